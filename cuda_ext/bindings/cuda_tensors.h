// Tensors as the CUDA kernels take them.
#pragma once

#include <ATen/core/Tensor.h>

#include "../cuda/launchers.h"

namespace fwp::cuda {

inline Type type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Type::float32;
    case at::kDouble: return Type::float64;
    case at::kBFloat16: return Type::bfloat16;
    default: return Type::float16;
  }
}

}  // namespace fwp::cuda
