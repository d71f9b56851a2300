// The launches of the recurrent delta rule.
#include "../launch_recurrent.cuh"
#include "../recurrent_delta.cuh"

namespace fwp::cuda {

template <typename Pass>
__global__ void __launch_bounds__(Pass::Block::kThreads) recurrent_delta_kernel(const Pass pass) {
  pass.run();
}

namespace detail {

template <typename Real, template <typename, int> class Pass, int kSize, typename Given>
const char* launch_recurrent_delta(const Given& given, void* stream) {
  if constexpr (kSize < kGreatestRecurrentDelta)
    if (given.d > kSize) return launch_recurrent_delta<Real, Pass, 2 * kSize>(given, stream);
  if (given.d > kSize)
    return say("the CUDA kernel of recurrent_delta takes heads of up to %d numbers, got %lld", kSize, (long long)given.d);
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  using Kernel = Pass<Real, kSize>;
  const size_t numbers = size_t(kRecurrentAhead * Kernel::kTokenVectors + Kernel::kBlockVectors) * kSize;
  return launch_blocks(recurrent_delta_kernel<Kernel>, gpu, given.B * given.H, Kernel::Block::kThreads,
                       numbers * sizeof(Real), stream, Kernel{given});
}

}  // namespace detail

const char* recurrent_delta(const RecurrentDeltaForward<float>& given, void* stream) {
  return detail::launch_recurrent_delta<float, RecurrentForwardPass, 16>(given, stream);
}
const char* recurrent_delta(const RecurrentDeltaForward<double>& given, void* stream) {
  return detail::launch_recurrent_delta<double, RecurrentForwardPass, 16>(given, stream);
}
const char* recurrent_delta(const RecurrentDeltaBackward<float>& given, void* stream) {
  return detail::launch_recurrent_delta<float, RecurrentBackwardPass, 16>(given, stream);
}
const char* recurrent_delta(const RecurrentDeltaBackward<double>& given, void* stream) {
  return detail::launch_recurrent_delta<double, RecurrentBackwardPass, 16>(given, stream);
}

}  // namespace fwp::cuda
