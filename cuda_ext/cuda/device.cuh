// The CUDA functions that the kernels use, under names that a test can redefine. It compiles the same kernels for the CPU, with
// one fiber per thread and its own definitions instead of the first half of this file.
#pragma once

#include "launchers.h"

#ifdef __CUDACC__

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define FWP_DEVICE __device__ __forceinline__
#define FWP_BOTH __host__ __device__ __forceinline__
#define FWP_UNROLL _Pragma("unroll")
#define FWP_PRAGMA(text) _Pragma(#text)
#define FWP_UNROLL_BY(n) FWP_PRAGMA(unroll n)

namespace fwp::cuda {

FWP_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char fwp_shared_bytes[];
  return fwp_shared_bytes;
}

FWP_DEVICE float float_of_half_bits(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
FWP_DEVICE uint16_t half_bits_of_float(float x) { return __half_as_ushort(__float2half_rn(x)); }
FWP_DEVICE float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
FWP_DEVICE uint32_t bits_of_float(float x) { return __float_as_uint(x); }

// x and y as bfloat16, rounded to nearest, with x in the lower half.
FWP_DEVICE uint32_t pair_of(float x, float y) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

// c += a b on the tensor cores: a is 16 x 16 and b is 16 x 8, both bfloat16, two per register; c is 16 x 8. The layout is that
// of PTX's mma.m16n8k16. All lanes of a warp must call it.
FWP_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

FWP_DEVICE unsigned shared_address(const void* x) { return unsigned(__cvta_generic_to_shared(x)); }

// Loads four 8 x 8 matrices of 2-byte numbers from shared memory. Lane 8 m + r gives the address of row r of matrix m: 16
// bytes, aligned to 16. Lane 4 g + p receives numbers 2 p and 2 p + 1 of row g, or of column g, of each matrix. All lanes of a
// warp must call it.
FWP_DEVICE void load_matrices(const void* row, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}
FWP_DEVICE void load_matrices_transposed(const void* row, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(row))
               : "memory");
}

// x, a pointer into global memory. The compiler does not know that of a pointer that was kept in shared memory.
template <typename T>
FWP_DEVICE T* in_global_memory(T* x) {
  __builtin_assume(__isGlobal(x));
  return x;
}

// Starts to copy 16 bytes from global to shared memory, both aligned to 16; zeros if `wanted` is false. commit_copies() groups
// the copies since the last call. wait_copies<n>() waits for all groups of this thread except the n newest. Other threads see
// the copies after a barrier.
FWP_DEVICE void copy_later(void* to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(wanted ? 16 : 0)
               : "memory");
}
// Barriers with a number from 1 to 15, for so many threads of a block, whole warps: some wait, others only arrive.
FWP_DEVICE void wait_at_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory"); }
FWP_DEVICE void arrive_at_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}
FWP_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int newest>
FWP_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(newest) : "memory");
}

// Null, or the text of our own error. The error is cleared, because other libraries would take it for theirs. For the same
// reason, errors left by other libraries are ignored.
inline const char* failure(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(error);
}

inline const char* query(Gpu* gpu) {
  int device = 0, shared_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (!error) error = cudaDeviceGetAttribute(&gpu->multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (!error) error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  gpu->shared_bytes = size_t(shared_bytes);
  return failure(error);
}

// More than 48 KiB of shared memory must be requested. We always request the maximum: the setting holds for all launches of a
// kernel on a GPU, so threads with different requests would disturb each other.
template <typename Argument>
const char* launch_kernel(void (*kernel)(Argument), const Gpu& gpu, int64_t blocks, int threads, size_t shared_bytes,
                          void* stream, Argument argument) {
  const void* const function = reinterpret_cast<const void*>(kernel);
  void* arguments[] = {&argument};
  cudaError_t error = cudaSuccess;
  if (shared_bytes > 48 * 1024)
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, int(gpu.shared_bytes));
  if (!error)
    error = cudaLaunchKernel(function, dim3(unsigned(blocks)), dim3(unsigned(threads)), arguments, shared_bytes,
                             static_cast<cudaStream_t>(stream));
  return failure(error);
}

}  // namespace fwp::cuda

#endif

namespace fwp::cuda {

// Numbers as stored in memory, and in the type of the computation (Real).
struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

FWP_DEVICE float number(float x) { return x; }
FWP_DEVICE double number(double x) { return x; }
FWP_DEVICE float number(Bfloat16 x) { return float_of_bits(uint32_t(x.bits) << 16); }
FWP_DEVICE float number(Float16 x) { return float_of_half_bits(x.bits); }

FWP_DEVICE void round_to(float x, float& to) { to = x; }
FWP_DEVICE void round_to(double x, double& to) { to = x; }
FWP_DEVICE void round_to(float x, Float16& to) { to.bits = half_bits_of_float(x); }

FWP_DEVICE void round_to(float x, Bfloat16& to) { to.bits = uint16_t(pair_of(x, 0)); }

// Call f with a null pointer to the element type that `type` names.
template <typename Real, typename F>
FWP_DEVICE void with_element(Type type, F f) {
  if constexpr (sizeof(Real) == 8) {
    f(static_cast<double*>(nullptr));
  } else {
    if (type == Type::float32) f(static_cast<float*>(nullptr));
    if (type == Type::bfloat16) f(static_cast<Bfloat16*>(nullptr));
    if (type == Type::float16) f(static_cast<Float16*>(nullptr));
  }
}

}  // namespace fwp::cuda
