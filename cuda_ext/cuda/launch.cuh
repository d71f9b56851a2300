// The passes of a rule: on tensor cores, or its scans.
#pragma once

#include "launch_chunks.cuh"
#include "rules.h"

namespace fwp::cuda {

using namespace detail;

template <Rule rule>
typename Passes<rule>::Way Passes<rule>::way(const Call& call, const Gpu& gpu, bool is_backward) {
  const ScanSize size = scan_size(call);
  if (kByKey || call.type != Type::bfloat16)
    return choose_chunk_keys<kRuleByKey>(size, call.type, gpu) ? Way::chunks_by_key : Way::scan;
  if constexpr (!kByKey) {
    const bool fits = kDecays || is_backward ? choose_chunks_backward<kErasesKey, kDecays>(size, gpu) : choose_chunks(size);
    if (fits && (kDecays || !call.begins)) return Way::chunks;  // without decays, they do not take documents
  }
  return Way::scan;
}

template <Rule rule>
size_t Passes<rule>::workspace(const Call& call, bool is_backward) {
  Gpu gpu;
  if (query(&gpu)) return 0;  // the launch reports the error
  const Way how = way(call, gpu, is_backward);
  if (how == Way::chunks_by_key) return chunk_keys_workspace<kRuleByKey>(call, is_backward);
  if constexpr (!kByKey)
    if (how == Way::chunks) return is_backward ? chunk_workspace<kErasesKey, kDecays>(call) : 0;
  size_t bytes = 0;
  if (is_backward)
    with_number(call, [&](auto zero) -> const char* {
      using Scan = RecurrentBackward<decltype(zero), kFades, kErases>;
      const ScanSize size = scan_size(call);
      bytes = ScanMemory<Scan>(size, plan_backward<Scan>(size, gpu), nullptr).bytes;
      return nullptr;
    });
  return bytes;
}

template <Rule rule>
template <typename Scan>
void Passes<rule>::set_inputs(Scan& scan, const Call& call, const Inputs& in) {
  scan.size = scan_size(call);
  scan.arrays.row(Scan::kKey) = in.k;
  scan.arrays.row(Scan::kQuery) = in.q;
  scan.arrays.scalars[Scan::kRate] = in.rate;
  if constexpr (kByHead) scan.arrays.scalars[Scan::kHeadDecay] = in.head_decay;
  if constexpr (fades_by_key(kFades)) scan.arrays.row(Scan::kKeyDecay) = in.key_decay;
  if constexpr (kFades == Fades::kKeyAndValue) scan.arrays.column(Scan::kValueDecay) = in.value_decay;
  if constexpr (kErases == Erases::kRemoval) {
    scan.arrays.row(Scan::kRemovalKey) = in.removal_key;
    scan.arrays.row(Scan::kRemoval) = in.removal;
  }
  scan.initial = matrices<typename Scan::Number>(in.state, call.size);
}

template <Rule rule>
const char* Passes<rule>::forward(const Call& call, const Inputs& in, const Outputs& to) {
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  const Way how = way(call, gpu, false);
  if (how == Way::chunks_by_key) return ChunksByKey<kRuleByKey>::forward(call, in, to, gpu);
  if constexpr (!kByKey)
    if (how == Way::chunks) return chunk_forward<kErasesKey, kDecays>(call, in, to, gpu);
  return with_number(call, [&](auto zero) {
    using Real = decltype(zero);
    using Scan = RecurrentForward<Real, kFades, kErases>;
    Scan scan{};
    set_inputs(scan, call, in);
    scan.arrays.column(Scan::kValue) = in.v;
    scan.final = matrices<Real>(to.state, call.size), scan.kept = matrices<Real>(to.kept, call.size);
    scan.arrays.outputs[Scan::kOut] = to.out;
    if constexpr (kErases != Erases::kNothing) scan.arrays.outputs[Scan::kRetrieved] =
          OutputArray{to.retrieved, state_type(call.type)};
    return launch_scan(scan, gpu, call.stream);
  });
}

template <Rule rule>
const char* Passes<rule>::backward(const Call& call, const Inputs& in, const BackwardInputs& more, const Gradients& to) {
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  const Way how = way(call, gpu, true);
  if (how == Way::chunks_by_key) return ChunksByKey<kRuleByKey>::backward(call, in, more, to, gpu);
  if constexpr (!kByKey)
    if (how == Way::chunks) return chunk_backward<kErasesKey, kDecays>(call, in, more, to, gpu);
  return with_number(call, [&](auto zero) {
    using Real = decltype(zero);
    using Scan = RecurrentBackward<Real, kFades, kErases>;
    const Sizes& size = call.size;
    const InputArray& error = kErasesKey ? more.retrieved : in.v;
    Scan scan{};
    set_inputs(scan, call, in);
    const BackwardPlan by = plan_backward<Scan>(scan.size, gpu);
    const ScanMemory<Scan> memory(scan.size, by, call.workspace);
    scan.arrays.column(Scan::kDOut) = more.d_out;
    scan.arrays.column(Scan::kError) = error;
    scan.arrays.outputs[Scan::kDV] = to.v;
    scan.arrays.outputs[Scan::kDWrite] = OutputArray{memory.d_write, state_type(call.type)};
    if constexpr (Scan::kByValue) scan.arrays.outputs[Scan::kDValueDecay] = to.value_decay;
    scan.kept = matrices<Real>(more.kept, size);
    scan.d_final = matrices<Real>(more.d_state, size), scan.d_first = matrices<Real>(to.state, size);
    OutputArray rows[Scan::Arrays::parts().row_outputs] = {to.q, to.k};
    if constexpr (kDecays) rows[Scan::kDDecay] = kByHead ? OutputArray{memory.d_decay, state_type(call.type)} : to.key_decay;
    if constexpr (Scan::kRemoves) {
      scan.arrays.column(Scan::kFound) = more.retrieved;
      rows[Scan::kDRemovalKey] = to.removal_key, rows[Scan::kDRemoval] = to.removal;
    }
    const char* text = nullptr;
    if constexpr (!kDecays) {  // rebuild the states from what was written
      using States = RecurrentForward<Real, Fades::kNothing, Erases::kNothing>;
      States states{scan.size, {}, {{in.k, in.k, error}, {in.rate}}, scan.initial};
      states.kept = matrices<Real>(memory.kept, size);
      text = launch_scan(states, gpu, call.stream);
      scan.kept = matrices<Real>(static_cast<const Real*>(memory.kept), size);
    }
    if (!text) text = launch_backward(scan, by, memory, gpu, rows, call.stream);
    const auto sum = [&](const Real* x, const InputArray& y, int64_t width, const OutputArray& out) -> const char* {
      if (!out.data) return nullptr;
      return launch_sums(TokenSums<Real>{x, y, size.H, size.L, size.B * size.H * size.L, int(width), out}, call.stream);
    };
    if (!text) text = sum(memory.d_write, error, size.Dv, to.rate);
    return text || !kByHead ? text : sum(memory.d_decay, {}, size.Dk, to.head_decay);
  });
}

}  // namespace fwp::cuda
