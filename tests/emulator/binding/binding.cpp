// cuda.cpp for CPU tensors: the operator's kernels on CUDA tensors, whose launchers are the emulator's.
#include <c10/core/DeviceGuard.h>

#include "operator.h"

// After PyTorch's headers, which have both names of both devices.
#define kCUDA kCPU
#define CUDA CPU
#include "cuda.cpp"
