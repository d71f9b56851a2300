// The passes of a rule: on tensor cores, or its scans.
#pragma once

#include "forget.cuh"
#include "launch_chunk_keys.cuh"

namespace fwp::cuda {

template <typename Sums>
__global__ void __launch_bounds__(kThreadsPerBlock) sums_kernel(const Sums sums) {
  sums.run();
}

namespace detail {

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
  ScanNeeds needs{tile_of(shape), Scan::Arrays::parts(), sizeof(A), 0, 0};
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
    const char* error = with_tile<A, true>(by.shape, [&](auto rows, auto columns) {
      return launch_planned<rows(), columns()>(scan, by.needs, gpu, stream);
    });
    if (!error && by.part_bytes) error = launch_sums(sums, stream);
    if (error) return error;
    scan.d_last = {carry.data, carry.head, carry.row, carry.column};
    scan.end = scan.first;
  } while (scan.end > 0);
  return nullptr;
}

constexpr Fades fades_of(Rule rule) {
  switch (rule) {
    case Rule::sum: case Rule::delta: return Fades::kNothing;
    case Rule::gated: case Rule::gated_delta: return Fades::kHead;
    case Rule::decay: return Fades::kKeyAndValue;
    default: return Fades::kKey;
  }
}
constexpr Erases erases_of(Rule rule) {
  switch (rule) {
    case Rule::delta: case Rule::gated_delta: case Rule::gated_delta_by_key: return Erases::kKey;
    case Rule::removal: return Erases::kRemoval;
    default: return Erases::kNothing;
  }
}

// A rule, and the kernels that it needs.
template <Rule rule>
struct Kernels {
  static constexpr Fades kFades = fades_of(rule);
  static constexpr Erases kErases = erases_of(rule);
  static constexpr bool kDecays = kFades != Fades::kNothing, kByHead = kFades == Fades::kHead;
  static constexpr bool kByKey = kFades == Fades::kKey, kErasesKey = kErases == Erases::kKey;
  static constexpr bool kHasChunks = rule != Rule::decay && rule != Rule::removal;
  template <typename A>
  using Forward = ForgetForward<A, kFades, kErases>;
  template <typename A>
  using Backward = ForgetBackward<A, kFades, kErases>;
  // Rebuilds the states of a rule without decays from what it has written.
  template <typename A>
  using States = ForgetForward<A, Fades::kNothing, Erases::kNothing>;

  // Whether a pass is in chunks. With decays both are or none. Without, the forward pass leaves nothing that depends on it, and
  // documents have no chunks.
  static bool in_chunks(const Call& call, const Gpu& gpu, bool is_backward) {
    const ScanSize size = chunk_size(call);
    if constexpr (!kHasChunks) return false;
    else if constexpr (kByKey) return choose_chunk_keys<kErasesKey>(size, call.type, gpu);
    else if (!kDecays && call.first) return false;
    else if (!kDecays && !is_backward) return choose_chunks(size, call.type);
    else return choose_chunks_backward<kErasesKey, kDecays>(size, call.type, gpu);
  }

  static const char* forward(const Call& call, const Inputs& in, const Outputs& to) {
    Gpu gpu;
    if (const char* error = query(&gpu)) return error;
    if constexpr (kHasChunks)
      if (in_chunks(call, gpu, false)) {
        if constexpr (kByKey) return chunk_keys_forward<kErasesKey>(call, in, to, gpu);
        else return chunk_forward<kErasesKey, kDecays>(call, in, to);
      }
    return with_maker(call, [&](auto make) {
      using Scan = Forward<typename decltype(make)::Number>;
      Scan scan{{make.along_keys()}};
      scan.arrays.row(Scan::kKey) = in.k;
      scan.arrays.row(Scan::kQuery) = in.q;
      scan.arrays.column(Scan::kValue) = in.v;
      scan.arrays.scalars[Scan::kRate] = in.rate;
      if constexpr (kByHead) scan.arrays.scalars[Scan::kHeadDecay] = in.head_decay;
      if constexpr (fades_by_key(kFades)) scan.arrays.row(Scan::kKeyDecay) = in.key_decay;
      if constexpr (kFades == Fades::kKeyAndValue) scan.arrays.column(Scan::kValueDecay) = in.value_decay;
      if constexpr (kErases == Erases::kRemoval) {
        scan.arrays.row(Scan::kRemovalKey) = in.removal_key;
        scan.arrays.row(Scan::kRemoval) = in.removal;
      }
      scan.initial = make.matrix(in.state);
      scan.last = make.matrix(to.state);
      scan.kept = make.matrix(to.kept);
      scan.arrays.outputs[Scan::kOut] = to.out;
      if constexpr (kErases != Erases::kNothing) scan.arrays.outputs[Scan::kRetrieved] = make.raw(to.retrieved);
      return launch_scan(scan, call.stream);
    });
  }

  // In the order of the scan's workspace: d_write, the parts of a decay's gradient by head, states of a rule without decays, and
  // sums over columns of several blocks. On tensor cores, memory for states and scores.
  static size_t workspace(const Call& call, bool is_backward) {
    Gpu gpu;
    if (query(&gpu)) return 0;  // the launch reports the error
    if constexpr (kHasChunks)
      if (in_chunks(call, gpu, is_backward)) {
        if constexpr (kByKey) return chunk_keys_workspace<kErasesKey>(call.size, is_backward);
        else return chunk_workspace<kErasesKey, kDecays>(call.size, call.type, is_backward);
      }
    if (!is_backward) return 0;
    size_t bytes = 0;
    with_maker(call, [&](auto make) -> const char* {
      using Scan = Backward<typename decltype(make)::Number>;
      const BackwardPlan by = plan_backward<Scan>(make.along_keys(), gpu);
      bytes = bytes_of_tokens(call.size, call.type, call.size.Dv) + kByHead * bytes_of_tokens(call.size, call.type, call.size.Dk) +
              !kDecays * bytes_of_kept(call) + size_t(by.needs.parts.row_outputs) * by.part_bytes + by.carry_bytes;
      return nullptr;
    });
    return bytes;
  }
  static size_t bytes_of_kept(const Call& call) {
    const Sizes& size = call.size;
    return aligned(size_t(size.B * size.H * (size.L / kChunk) * size.Dk * size.Dv) * state_bytes(call.type));
  }

  static const char* backward(const Call& call, const Inputs& in, const fwp::cuda::Backward& more, const Gradients& to) {
    Gpu gpu;
    if (const char* error = query(&gpu)) return error;
    if constexpr (kHasChunks)
      if (in_chunks(call, gpu, true)) {
        if constexpr (kByKey) return chunk_keys_backward<kErasesKey>(call, in, more, to, gpu);
        else return chunk_backward<kErasesKey, kDecays>(call, in, more, to, gpu);
      }
    return with_maker(call, [&](auto make) {
      using A = typename decltype(make)::Number;
      using Scan = Backward<A>;
      const Sizes& size = call.size;
      const Tokens& error = kErasesKey ? more.retrieved : in.v;
      Workspace workspace(call);
      void* const d_write = workspace.tokens(size.Dv);
      void* const d_decay = kByHead ? workspace.tokens(size.Dk) : nullptr;  // a part for each row
      Scan scan{make.along_keys()};
      scan.arrays.row(Scan::kKey) = in.k;
      scan.arrays.row(Scan::kQuery) = in.q;
      scan.arrays.column(Scan::kDOut) = more.d_out;
      scan.arrays.column(Scan::kError) = error;
      scan.arrays.scalars[Scan::kRate] = in.rate;
      if constexpr (kByHead) scan.arrays.scalars[Scan::kHeadDecay] = in.head_decay;
      if constexpr (Scan::kByKey) scan.arrays.row(Scan::kKeyDecay) = in.key_decay;
      if constexpr (Scan::kByValue) {
        scan.arrays.column(Scan::kValueDecay) = in.value_decay;
        scan.arrays.outputs[Scan::kDValueDecay] = to.value_decay;
      }
      scan.arrays.outputs[Scan::kDV] = to.v;
      scan.arrays.outputs[Scan::kDWrite] = make.raw(d_write);
      scan.initial = make.matrix(in.state), scan.kept = make.matrix(more.kept);
      scan.d_last = make.matrix(more.d_state), scan.d_first = make.matrix(to.state);
      Target rows[Scan::Arrays::parts().row_outputs] = {to.q, to.k};
      if constexpr (kDecays) rows[Scan::kDDecay] = kByHead ? make.raw(d_decay) : to.key_decay;
      if constexpr (Scan::kRemoves) {
        scan.arrays.row(Scan::kRemovalKey) = in.removal_key;
        scan.arrays.row(Scan::kRemoval) = in.removal;
        scan.arrays.column(Scan::kFound) = more.retrieved;
        rows[Scan::kDRemovalKey] = to.removal_key, rows[Scan::kDRemoval] = to.removal;
      }
      const char* text = nullptr;
      if constexpr (!kDecays) {
        void* const kept = workspace.take(bytes_of_kept(call));
        const States<A> states{{make.along_keys(), {}, {{in.k, in.k, error}, {in.rate}}, scan.initial}, make.matrix(kept)};
        text = launch_scan(states, call.stream);
        scan.kept = make.matrix(static_cast<const void*>(kept));
      }
      const BackwardPlan by = plan_backward<Scan>(scan.size, gpu);
      if (!text) text = launch_backward(scan, by, gpu, workspace, rows, call.stream);
      const auto sum = [&](const void* x, const Tokens& y, int64_t width, const Target& out) -> const char* {
        if (!out.data) return nullptr;
        const int64_t tokens = size.B * size.H * size.L;
        return launch_sums(TokenSums<A>{static_cast<const A*>(x), y, size.H, size.L, tokens, int(width), out}, call.stream);
      };
      if (!text) text = sum(d_write, error, size.Dv, to.rate);
      return text || !kByHead ? text : sum(d_decay, {}, size.Dk, to.head_decay);
    });
  }
};

}  // namespace detail

}  // namespace fwp::cuda
