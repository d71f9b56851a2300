// In place of PyTorch's, which needs CUDA.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

struct CUDAStream {
  void* stream() const { return nullptr; }
};
inline CUDAStream getCurrentCUDAStream(DeviceIndex) { return {}; }

}  // namespace c10::cuda
