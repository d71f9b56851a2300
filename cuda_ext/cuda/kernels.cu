// The functions of launchers.h and projection.h, and the kernels of maps and of segments. Those of rules are in rules/*.cu.
#include "launch_chunks.cuh"
#include "launch_map.cuh"
#include "rules.h"

namespace fwp::cuda {

__global__ void __launch_bounds__(kThreadsForSegments) segments_kernel(const ChunkSegments pass) { pass.run(); }

const char* detail::launch_segments(const ChunkSegments& pass, const Gpu& gpu, void* stream) {
  const size_t bytes = size_t(pass.columns()) * pass.rows * sizeof(float);
  return launch_blocks(segments_kernel, gpu, pass.size.heads * pass.slabs, kThreadsForSegments, bytes, stream, pass);
}

size_t workspace_bytes(const Call& call, bool is_backward) {
  return with_rule(call.rule, [&](auto rule) { return Passes<rule()>::workspace(call, is_backward); });
}

const char* forward(const Call& call, const Inputs& in, const Outputs& to) {
  return with_rule(call.rule, [&](auto rule) { return Passes<rule()>::forward(call, in, to); });
}

const char* backward(const Call& call, const Inputs& in, const BackwardInputs& more, const Gradients& to) {
  return with_rule(call.rule, [&](auto rule) { return Passes<rule()>::backward(call, in, more, to); });
}

const char* map_forward(const Projection& given) { return detail::launch_map<false>(given, nullptr); }
const char* map_backward(const Projection& given, void* to) { return detail::launch_map<true>(given, to); }

}  // namespace fwp::cuda
