// The functions of launchers.h and projection.h, and the kernels of maps. Those of rules are in rules/*.cu.
#include "launch_map.cuh"
#include "rules.h"

namespace fwp::cuda {

size_t workspace_bytes(const Call& call, bool is_backward) {
  return with_rule(call.rule, [&](auto rule) { return Passes<rule()>::workspace(call, is_backward); });
}

const char* forward(const Call& call, const Inputs& in, const Outputs& to) {
  return with_rule(call.rule, [&](auto rule) { return Passes<rule()>::forward(call, in, to); });
}

const char* backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to) {
  return with_rule(call.rule, [&](auto rule) { return Passes<rule()>::backward(call, in, more, to); });
}

const char* map_forward(const Projection& given) { return detail::launch_map<false>(given, nullptr); }
const char* map_backward(const Projection& given, void* to) { return detail::launch_map<true>(given, to); }

}  // namespace fwp::cuda
