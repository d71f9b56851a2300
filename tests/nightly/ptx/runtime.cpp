// A made-up CUDA runtime, of what nvcc's host code of the kernels calls: its launches go to the interpreter of their PTX.
// It exports the functions of emulator.cpp.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <map>
#include <string>

#include "launchers.h"
#include "projection.h"

namespace {

// As in emulator.cpp.
struct Pretended {
  int reversed, multiprocessors, shared_kib;
};
using Launch = const char* (*)(const Pretended*, const char* kernel, int64_t blocks, int threads, size_t shared_bytes,
                               const void* argument);

struct Kernel {
  std::string name;
  size_t shared_bytes = 48 << 10;  // for a block, at most
};

// Kernels are registered before other static objects need exist.
std::map<const void*, Kernel>& kernels() {
  static std::map<const void*, Kernel> by_function;
  return by_function;
}
Launch launch;
Pretended gpu;
const char* failure;  // of the last launch

}  // namespace

extern "C" {

void runtime_connect(Launch to) { launch = to; }

// Returns the names of all kernels, each with a space after it.
const char* runtime_kernels() {
  static std::string names;
  names.clear();
  for (const auto& kernel : kernels()) names += kernel.second.name + " ";
  return names.c_str();
}

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const void* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels()[function].name = name;
}

// Only for launches with <<<...>>>, of which there are none.
void __cudaInitModule() { std::abort(); }
void __cudaGetKernel() { std::abort(); }
void __cudaLaunchKernel() { std::abort(); }
void __cudaPopCallConfiguration() { std::abort(); }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount) *value = gpu.multiprocessors;
  else if (attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin) *value = gpu.shared_kib << 10;
  else return cudaErrorInvalidValue;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > gpu.shared_kib << 10) return cudaErrorInvalidValue;
  kernels().at(function).shared_bytes = size_t(value);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t bytes, cudaStream_t) {
  const Kernel& kernel = kernels().at(function);
  if (grid.x == 0 || grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1 || bytes > kernel.shared_bytes)
    return cudaErrorInvalidConfiguration;
  failure = launch(&gpu, kernel.name.c_str(), grid.x, int(block.x), bytes, arguments[0]);
  return failure ? cudaErrorLaunchFailure : cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? failure : "the runtime refuses an argument";
}

size_t emulator_workspace_bytes(const Pretended* how, const fwp::cuda::Call* call, bool is_backward) {
  gpu = *how;
  return workspace_bytes(*call, is_backward);
}
const char* emulator_forward(const Pretended* how, const fwp::cuda::Call* call, const fwp::cuda::Inputs* in,
                             const fwp::cuda::Outputs* to) {
  gpu = *how;
  return forward(*call, *in, *to);
}
const char* emulator_backward(const Pretended* how, const fwp::cuda::Call* call, const fwp::cuda::Inputs* in,
                              const fwp::cuda::Backward* more, const fwp::cuda::Gradients* to) {
  gpu = *how;
  return backward(*call, *in, *more, *to);
}
const char* emulator_map(const Pretended* how, const fwp::cuda::Projection* given, void* d_projection) {
  gpu = *how;
  return d_projection ? map_backward(*given, d_projection) : map_forward(*given);
}
const char* emulator_recurrent_delta(const Pretended* how, bool is_double, bool is_backward, const void* pass) {
  gpu = *how;
  const auto run = [&](auto number) {
    using Real = decltype(number);
    return is_backward ? fwp::cuda::recurrent_delta(*static_cast<const fwp::RecurrentDeltaBackward<Real>*>(pass), nullptr)
                       : fwp::cuda::recurrent_delta(*static_cast<const fwp::RecurrentDeltaForward<Real>*>(pass), nullptr);
  };
  return is_double ? run(double()) : run(float());
}

}  // extern "C"
