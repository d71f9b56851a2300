// Rules with decays or removals: the scans of their passes.
#pragma once

#include "forget.cuh"
#include "launch_chunk_keys.cuh"

namespace fwp::cuda {

template <typename Sums>
__global__ void __launch_bounds__(kThreadsPerBlock) sums_kernel(const Sums sums) {
  sums.run();
}

namespace detail {

// Tall tiles have half the columns, because these scans hold more in registers than the sum and the delta rule.
constexpr int kTallColumns = 1;

// Tokens of a group in the backward pass. If they do not fit, fewer.
constexpr int kGroup = 4;
static_assert(kGroup <= kLeastTeam);

// A backward pass. If several blocks share a head, it runs in windows of tokens, which limits the memory for parts of sums.
struct BackwardPlan {
  Shape shape;
  ScanNeeds needs;
  Plan plan;
  int64_t window;
  size_t part_bytes, carry_bytes;  // of a row output's sums, and of the gradient between two windows
};

template <typename Scan>
BackwardPlan plan_backward(const ScanSize& size, const Gpu& gpu) {
  using A = typename Scan::Number;
  const Shape shape = choose_summing_shape<A>(size);
  ScanNeeds needs{tile_of<A>(shape, kTallColumns), Scan::Arrays::parts(), sizeof(A), 0, 0};
  Plan plan{};
  for (int group = kGroup; group > 0; group /= 2) {
    needs.states = Scan::states(group), needs.stage = group;
    plan = choose_plan(size, needs, gpu);
    if (shared_bytes(needs, plan) <= gpu.shared_bytes) break;
  }
  if (plan.slabs == 1) return {shape, needs, plan, size.length, 0, 0};
  const size_t of_token = size_t(plan.slabs * size.heads * size.rows) * sizeof(A);
  const int64_t fit = int64_t(kPartBytes / (of_token * needs.parts.row_outputs + 1)) / kChunk * kChunk;
  const int64_t window = std::min(std::max(fit, kChunk), size.length);
  const size_t of_states = window < size.length ? size_t(size.heads * size.rows * size.columns) * sizeof(A) : 0;
  return {shape, needs, plan, window, aligned(of_token * size_t(window)), aligned(of_states)};
}

template <typename Sums>
const char* launch_sums(const Sums& sums, void* stream) {
  if (sums.blocks() == 0) return nullptr;
  if (const char* error = check_blocks(sums.blocks())) return error;
  return launch_kernel(sums_kernel<Sums>, {}, sums.blocks(), kThreadsPerBlock, 0, stream, sums);
}

// Launch the scan, window by window. `to`: its row outputs.
template <typename Scan, int outputs>
const char* launch_backward(Scan scan, const BackwardPlan& by, const Gpu& gpu, Workspace& workspace,
                            const Target (&to)[outputs], void* stream) {
  using A = typename Scan::Number;
  const Matrices<A> d_initial = scan.d_first;
  SlabSums<A, outputs> sums{};
  sums.heads = scan.size.heads, sums.rows = scan.size.rows, sums.length = scan.size.length, sums.slabs = by.plan.slabs;
  for (int n = 0; n < outputs; ++n) {
    sums.parts[n] = static_cast<A*>(workspace.take(by.part_bytes));
    sums.out[n] = to[n];
  }
  Matrices<A> carry = d_initial;
  carry.data = static_cast<A*>(workspace.take(by.carry_bytes));
  carry.head = int64_t(scan.size.rows) * scan.size.columns, carry.row = scan.size.columns, carry.column = 1;
  scan.plan = by.plan;
  scan.end = scan.size.length;
  do {
    scan.first = scan.end > by.window ? (scan.end - 1) / by.window * by.window : 0;
    scan.d_first = scan.first > 0 ? carry : d_initial;
    sums.first = scan.first, sums.tokens = scan.end - scan.first;
    for (int n = 0; n < outputs; ++n) {
      const Output part{to[n].data ? sums.parts[n] : nullptr, sizeof(A) == 8 ? Type::float64 : Type::float32};
      scan.arrays.row_outputs[n] = by.part_bytes ? RowSink{part, sums.count(), sums.first, sums.tokens}
                                                 : RowSink{to[n], 0, 0, scan.size.length};
    }
    const char* error = with_tile<A, kTallColumns, true>(by.shape, [&](auto rows, auto columns) {
      return launch_planned<rows(), columns()>(scan, by.needs, gpu, stream);
    });
    if (!error && by.part_bytes) error = launch_sums(sums, stream);
    if (error) return error;
    scan.d_last = {carry.data, carry.head, carry.row, carry.column};
    scan.end = scan.first;
  } while (scan.end > 0);
  return nullptr;
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

// Calls f(erases, by_key), constants, for a rule that has chunks.
template <typename F>
auto with_chunks(Rule rule, F f) {
  switch (rule) {
    case Rule::gated: return f(std::false_type{}, std::false_type{});
    case Rule::gated_delta: return f(std::true_type{}, std::false_type{});
    case Rule::gated_by_key: return f(std::false_type{}, std::true_type{});
    default: return f(std::true_type{}, std::true_type{});
  }
}
inline bool has_chunks(Rule rule) { return rule != Rule::decay && rule != Rule::removal; }

// Whether both passes use chunks.
inline bool choose_chunks_forget(const Call& call, const Gpu& gpu) {
  return has_chunks(call.rule) && with_chunks(call.rule, [&](auto erases, auto by_key) {
           if constexpr (by_key) return choose_chunk_keys<erases()>(chunk_size(call), call.type, gpu);
           else return choose_chunks_backward<erases(), true>(chunk_size(call), call.type, gpu);
         });
}

inline const char* forget_forward(const Call& call, const Inputs& in, const Outputs& to) {
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  if (choose_chunks_forget(call, gpu))
    return with_chunks(call.rule, [&](auto erases, auto by_key) {
      if constexpr (by_key) return chunk_keys_forward<erases()>(call, in, to, gpu);
      else return chunk_forward<erases(), true>(call, in, to);
    });
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
      return launch_scan<kTallColumns>(scan, call.stream);
    });
  });
}

// Memory for d_write, for the parts of a decay's gradient by head, and for sums over columns of several blocks. On tensor cores,
// memory for states instead.
inline size_t forget_workspace(Rule rule, const Sizes& size, Type type, bool is_backward) {
  const Call call{size, type, rule, nullptr, nullptr, nullptr};
  Gpu gpu;
  if (query(&gpu)) return 0;  // the launch reports the error
  if (choose_chunks_forget(call, gpu))
    return with_chunks(rule, [&](auto erases, auto by_key) {
      if constexpr (by_key) return chunk_keys_workspace<erases()>(size, is_backward);
      else return chunk_workspace<erases(), true>(size, type, is_backward);
    });
  if (!is_backward) return 0;
  size_t scans = 0;
  with_maker(call, [&](auto make) {
    return with_scans(rule, [&](auto fades, auto erases) -> const char* {
      using Scan = ForgetBackward<typename decltype(make)::Number, decltype(fades)::value, decltype(erases)::value>;
      const BackwardPlan by = plan_backward<Scan>(make.along_keys(), gpu);
      scans = bytes_of_tokens(size, type, size.Dv) + Scan::kByHead * bytes_of_tokens(size, type, size.Dk) +
              size_t(by.needs.parts.row_outputs) * by.part_bytes + by.carry_bytes;
      return nullptr;
    });
  });
  return scans;
}

inline const char* forget_backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to) {
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  if (choose_chunks_forget(call, gpu))
    return with_chunks(call.rule, [&](auto erases, auto by_key) {
      if constexpr (by_key) return chunk_keys_backward<erases()>(call, in, more, to, gpu);
      else return chunk_backward<erases(), true>(call, in, more, to, gpu);
    });
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    return with_scans(call.rule, [&](auto fades, auto erases) {
      using Scan = ForgetBackward<A, decltype(fades)::value, decltype(erases)::value>;
      const Sizes& size = call.size;
      const Tokens& error = erases == Erases::kKey ? more.retrieved : in.v;
      Workspace workspace(call);
      void* const d_write = workspace.tokens(size.Dv);
      void* const d_decay = Scan::kByHead ? workspace.tokens(size.Dk) : nullptr;  // a part for each row
      Scan scan{make.along_keys()};
      scan.arrays.row(Scan::kKey) = in.k;
      scan.arrays.row(Scan::kQuery) = in.q;
      scan.arrays.column(Scan::kDOut) = more.d_out;
      scan.arrays.column(Scan::kError) = error;
      scan.arrays.scalars[Scan::kRate] = in.rate;
      if constexpr (Scan::kByHead) scan.arrays.scalars[Scan::kHeadDecay] = in.head_decay;
      if constexpr (!Scan::kByHead) scan.arrays.row(Scan::kKeyDecay) = in.key_decay;
      if constexpr (Scan::kByValue) {
        scan.arrays.column(Scan::kValueDecay) = in.value_decay;
        scan.arrays.outputs[Scan::kDValueDecay] = to.value_decay;
      }
      scan.arrays.outputs[Scan::kDV] = to.v;
      scan.arrays.outputs[Scan::kDWrite] = make.raw(d_write);
      scan.initial = make.matrix(in.state), scan.kept = make.matrix(more.kept);
      scan.d_last = make.matrix(more.d_state), scan.d_first = make.matrix(to.state);
      Target rows[Scan::Arrays::parts().row_outputs] = {to.q, to.k, Scan::kByHead ? make.raw(d_decay) : to.key_decay};
      if constexpr (Scan::kRemoves) {
        scan.arrays.row(Scan::kRemovalKey) = in.removal_key;
        scan.arrays.row(Scan::kRemoval) = in.removal;
        scan.arrays.column(Scan::kFound) = more.retrieved;
        rows[Scan::kDRemovalKey] = to.removal_key, rows[Scan::kDRemoval] = to.removal;
      }
      const BackwardPlan by = plan_backward<Scan>(scan.size, gpu);
      const char* text = launch_backward(scan, by, gpu, workspace, rows, call.stream);
      const auto sum = [&](const void* x, const Tokens& y, int64_t width, const Target& out) -> const char* {
        if (!out.data) return nullptr;
        const int64_t tokens = size.B * size.H * size.L;
        return launch_sums(TokenSums<A>{static_cast<const A*>(x), y, size.H, size.L, tokens, int(width), out}, call.stream);
      };
      if (!text) text = sum(d_write, error, size.Dv, to.rate);
      return text || !Scan::kByHead ? text : sum(d_decay, {}, size.Dk, to.head_decay);
    });
  });
}

}  // namespace detail

}  // namespace fwp::cuda
