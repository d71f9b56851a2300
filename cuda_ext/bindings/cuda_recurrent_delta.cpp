// The recurrent delta rule on CUDA tensors.

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/launchers.h"
#include "recurrent_delta.h"

namespace fwp::cuda {
namespace {

struct RecurrentDevice {
  template <typename Pass>
  static void run(const Pass& pass, at::Device device) {
    const c10::DeviceGuard guard(device);
    const char* const failure = recurrent_delta(pass, c10::cuda::getCurrentCUDAStream(device.index()).stream());
    TORCH_CHECK(failure == nullptr, failure);
  }
};

}  // namespace
}  // namespace fwp::cuda

FWP_RECURRENT_DELTA(CUDA, fwp::cuda::RecurrentDevice)
