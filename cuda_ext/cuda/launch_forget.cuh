// Rules with decays or removals: the scans of their passes.
#pragma once

#include "forget.cuh"
#include "launch_chunks.cuh"

namespace fwp::cuda {

template <typename A>
__global__ void __launch_bounds__(kThreadsPerBlock) token_sums_kernel(const TokenSums<A> sums) {
  sums.run();
}

namespace detail {

// Tall tiles have half the columns, because these scans hold more in registers than the sum and the delta rule. Scans that keep
// tiles in shared memory do not use wide tiles.
template <bool keeps_tiles, typename Scan>
const char* launch_forgetting(const Scan& scan, int states, int stage, void* stream) {
  using A = typename Scan::Number;
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  const Shape shape = choose_shape<A>(scan.size, gpu.multiprocessors);
  if (shape == Shape::tall) return launch_shape<Scan, kTall<A>.rows, 1>(scan, states, stage, gpu, stream);
  if constexpr (sizeof(A) < 8 && !keeps_tiles)
    if (shape == Shape::wide)
      return launch_shape<Scan, kWide.rows, kWide.columns>(scan, states, stage, gpu, stream);
  return launch_shape<Scan, kNarrow.rows, kNarrow.columns>(scan, states, stage, gpu, stream);
}

static_assert(kGroup <= kLeastTeam);

template <typename Scan>
const char* launch_backward(const Scan& scan, void* stream) {
  if constexpr (Scan::kRebuilds)
    return launch_forgetting<true>(scan, Scan::kStates, kGroup, stream);
  else
    return launch_forgetting<false>(scan, 0, 0, stream);
}

template <typename A>
const char* launch(const TokenSums<A>& sums, void* stream) {
  constexpr int kTokens = kThreadsPerBlock / kWarp;
  const int64_t blocks = (sums.tokens + kTokens - 1) / kTokens;
  if (blocks == 0) return nullptr;
  if (const char* error = check_blocks(blocks)) return error;
  return launch_kernel(token_sums_kernel<A>, {}, blocks, kThreadsPerBlock, 0, stream, sums);
}

// Call f with the scans of the rule.
template <typename F>
const char* with_scans(Rule rule, F f) {
  const auto call = [&](auto fades, auto erases) { return f(fades, erases); };
#define FWP_SCANS(fades, erases) \
  return call(std::integral_constant<Fades, Fades::fades>{}, std::integral_constant<Erases, Erases::erases>{})
  switch (rule) {
    case Rule::gated: FWP_SCANS(kHead, kNothing);
    case Rule::gated_by_key: FWP_SCANS(kKey, kNothing);
    case Rule::decay: FWP_SCANS(kKeyAndValue, kNothing);
    case Rule::gated_delta: FWP_SCANS(kHead, kKey);
    case Rule::gated_delta_by_key: FWP_SCANS(kKey, kKey);
    default: FWP_SCANS(kKey, kRemoval);
  }
#undef FWP_SCANS
}

// Whether both passes use chunks. The gated rule does not: the truncation in the tensor cores is
// larger than the rounding of its scans, and nothing in the rule corrects it.
inline bool choose_chunks_forget(const Call& call, const Gpu& gpu) {
  return call.rule == Rule::gated_delta && choose_chunks_backward<true, true>(chunk_size(call), call.type, gpu);
}

inline const char* forget_forward(const Call& call, const Inputs& in, const Outputs& to) {
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  if (choose_chunks_forget(call, gpu)) return chunk_forward<true, true>(call, in, to);
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    return with_scans(call.rule, [&](auto fades, auto erases) {
      using Scan = ForgetForward<A, decltype(fades)::value, decltype(erases)::value>;
      Scan scan{{make.along_keys()}};
      scan.arrays.row(Scan::kKey) = in.k;
      scan.arrays.row(Scan::kQuery) = in.q;
      scan.arrays.column(Scan::kValue) = in.v;
      scan.arrays.scalars[Scan::kRate] = in.rate;
      if constexpr (fades == Fades::kHead) scan.arrays.scalars[Scan::kHeadDecay] = in.head_decay;
      if constexpr (fades != Fades::kHead) scan.arrays.row(Scan::kKeyDecay) = in.key_decay;
      if constexpr (fades == Fades::kKeyAndValue) scan.arrays.column(Scan::kValueDecay) = in.value_decay;
      if constexpr (erases == Erases::kRemoval) {
        scan.arrays.row(Scan::kRemovalKey) = in.removal_key;
        scan.arrays.row(Scan::kRemoval) = in.removal;
      }
      scan.initial = make.matrix(in.state);
      scan.last = make.matrix(to.state);
      scan.kept = make.matrix(to.kept);
      scan.arrays.outputs[Scan::kOut] = to.out;
      if constexpr (erases != Erases::kNothing) scan.arrays.outputs[Scan::kRetrieved] = make.raw(to.retrieved);
      return launch_forgetting<false>(scan, 0, 0, call.stream);
    });
  });
}

// Memory for d_write, for a removal the gradient of its retrieved value, and for a decay by head a part per key column. On
// tensor cores, memory for states instead.
inline size_t forget_workspace(Rule rule, const Sizes& size, Type type, bool is_backward) {
  const size_t chunks = rule == Rule::gated_delta ? chunk_workspace<true, true>(size, type, is_backward) : 0;
  if (!is_backward) return chunks;
  const bool by_head = rule == Rule::gated || rule == Rule::gated_delta;
  const size_t scans = bytes_of_tokens(size, type, size.Dv) * (1 + (rule == Rule::removal)) +
                       by_head * bytes_of_tokens(size, type, size.Dk);
  return std::max(scans, chunks);
}

inline const char* forget_backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to) {
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  if (choose_chunks_forget(call, gpu)) return chunk_backward<true, true>(call, in, more, to, gpu);
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    return with_scans(call.rule, [&](auto fades, auto erases) {
      using Values = ForgetValues<A, decltype(fades)::value, decltype(erases)::value>;
      using Keys = ForgetKeys<A, decltype(fades)::value, decltype(erases)::value>;
      const Sizes& size = call.size;
      Workspace workspace(call);
      void* const d_write = workspace.tokens(size.Dv);
      Values values{};
      Keys keys{};
      values.size = make.along_keys(), keys.size = make.along_values();
      values.arrays.row(Values::kKey) = keys.arrays.column(Keys::kKey) = in.k;
      values.arrays.row(Values::kQuery) = keys.arrays.column(Keys::kQuery) = in.q;
      values.arrays.column(Values::kDOut) = keys.arrays.row(Keys::kDOut) = more.d_out;
      values.arrays.scalars[Values::kRate] = keys.arrays.scalars[Keys::kRate] = in.rate;
      const Tokens& error = erases == Erases::kKey ? more.retrieved : in.v;
      keys.arrays.row(Keys::kError) = error;
      if constexpr (erases == Erases::kKey) keys.arrays.row(Keys::kDWrite) = make.scratch(d_write, size.Dv);
      values.arrays.outputs[Values::kDWrite] = make.raw(d_write);
      values.arrays.outputs[Values::kDV] = to.v;
      keys.arrays.outputs[Keys::kDQ] = to.q, keys.arrays.outputs[Keys::kDK] = to.k;
      keys.arrays.outputs[Keys::kDDecay] = to.key_decay;
      if constexpr (erases == Erases::kRemoval) {
        void* const d_found = workspace.tokens(size.Dv);
        values.arrays.row(Values::kRemovalKey) = keys.arrays.column(Keys::kRemovalKey) = in.removal_key;
        values.arrays.row(Values::kRemoval) = keys.arrays.column(Keys::kRemoval) = in.removal;
        keys.arrays.row(Keys::kFound) = more.retrieved;
        keys.arrays.row(Keys::kDFound) = make.scratch(d_found, size.Dv);
        values.arrays.outputs[Values::kDFound] = make.raw(d_found);
        keys.arrays.outputs[Keys::kDRemovalKey] = to.removal_key;
        keys.arrays.outputs[Keys::kDRemoval] = to.removal;
      }
      void* const parts = fades == Fades::kHead ? workspace.tokens(size.Dk) : nullptr;
      if constexpr (fades == Fades::kHead) {
        values.arrays.scalars[Values::kHeadDecay] = keys.arrays.scalars[Keys::kHeadDecay] = in.head_decay;
        keys.arrays.outputs[Keys::kDDecay] = make.raw(parts);
      } else {
        values.arrays.row(Values::kKeyDecay) = keys.arrays.column(Keys::kKeyDecay) = in.key_decay;
      }
      if constexpr (fades == Fades::kKeyAndValue) {
        values.arrays.column(Values::kValue) = in.v;
        values.arrays.column(Values::kValueDecay) = keys.arrays.row(Keys::kValueDecay) = in.value_decay;
        values.initial = make.matrix(in.state), values.kept = make.matrix(more.kept);
        values.arrays.outputs[Values::kDValueDecay] = to.value_decay;
      }
      keys.initial = make.transposed(in.state), keys.kept = make.transposed(more.kept);
      values.d_last = make.matrix(more.d_state), keys.d_last = make.transposed(more.d_state);
      values.d_initial = make.matrix(to.state);
      const char* text = launch_backward(values, call.stream);
      if (!text) text = launch_backward(keys, call.stream);
      const auto sum = [&](const void* x, const Tokens& y, int64_t width, const Target& out) -> const char* {
        if (!out.data) return nullptr;
        return launch(TokenSums<A>{static_cast<const A*>(x), y, size.H, size.L, size.B * size.H * size.L, int(width), out},
                      call.stream);
      };
      if (!text) text = sum(d_write, error, size.Dv, to.rate);
      return text || fades != Fades::kHead ? text : sum(parts, {}, size.Dk, to.head_decay);
    });
  });
}

}  // namespace detail

}  // namespace fwp::cuda
