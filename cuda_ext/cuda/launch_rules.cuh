// The functions of launchers.h: choose the scans of each rule.
#pragma once

#include "launch_delta.cuh"
#include "launch_forget.cuh"
#include "launch_sum.cuh"

namespace fwp::cuda {

size_t workspace_bytes(Rule rule, const Sizes& size, Type type, bool is_backward) {
  if (rule == Rule::sum) return detail::chunk_workspace<false, false>(size, type, is_backward);
  if (rule == Rule::delta) return detail::delta_workspace(size, type, is_backward);
  return detail::forget_workspace(rule, size, type, is_backward);
}

const char* forward(const Call& call, const Inputs& in, const Outputs& to) {
  if (call.rule == Rule::sum) return detail::sum_forward(call, in, to);
  if (call.rule == Rule::delta) return detail::delta_forward(call, in, to);
  return detail::forget_forward(call, in, to);
}

const char* backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to) {
  if (call.rule == Rule::sum) return detail::sum_backward(call, in, more, to);
  if (call.rule == Rule::delta) return detail::delta_backward(call, in, more, to);
  return detail::forget_backward(call, in, more, to);
}

}  // namespace fwp::cuda
