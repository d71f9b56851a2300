// The files of CUDA tensors for CPU tensors: the operators' kernels on CUDA tensors, whose launchers are the emulator's.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "operator.h"

// After PyTorch's headers, which have both names of both devices.
#define kCUDA kCPU
#define CUDA CPU
#include "cuda.cpp"
#include "cuda_map.cpp"
#include "cuda_recurrent_delta.cpp"
