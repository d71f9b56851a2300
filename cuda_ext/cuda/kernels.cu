// The functions of launchers.h, and all kernels: the only file that nvcc compiles.
#include "launch.cuh"

namespace fwp::cuda {

// Call f with the kernels of a rule.
template <typename F>
auto with_kernels(Rule rule, F f) {
  switch (rule) {
    case Rule::sum: return f(detail::Kernels<Rule::sum>{});
    case Rule::delta: return f(detail::Kernels<Rule::delta>{});
    case Rule::gated: return f(detail::Kernels<Rule::gated>{});
    case Rule::gated_by_key: return f(detail::Kernels<Rule::gated_by_key>{});
    case Rule::decay: return f(detail::Kernels<Rule::decay>{});
    case Rule::gated_delta: return f(detail::Kernels<Rule::gated_delta>{});
    case Rule::gated_delta_by_key: return f(detail::Kernels<Rule::gated_delta_by_key>{});
    default: return f(detail::Kernels<Rule::removal>{});
  }
}

size_t workspace_bytes(const Call& call, bool is_backward) {
  return with_kernels(call.rule, [&](auto rule) { return rule.workspace(call, is_backward); });
}

const char* forward(const Call& call, const Inputs& in, const Outputs& to) {
  return with_kernels(call.rule, [&](auto rule) { return rule.forward(call, in, to); });
}

const char* backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to) {
  return with_kernels(call.rule, [&](auto rule) { return rule.backward(call, in, more, to); });
}

}  // namespace fwp::cuda
