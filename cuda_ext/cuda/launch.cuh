// Shared by the functions of launchers.h: the launch of a scan and its arguments.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <type_traits>

#include "choose.h"
#include "launchers.h"
#include "scan.cuh"

namespace fwp::cuda {

// At least. Without this number, ptxas spills registers in favor of more blocks than are useful.
template <typename Scan, int kColumns>
constexpr int blocks_per_multiprocessor() {
  if (sizeof(typename Scan::Number) == 8 || Scan::Arrays::parts().row_outputs > 0) return 2;
  return kColumns == kWide.columns ? 3 : 4;
}

template <typename Scan, int kRows, int kColumns>
__global__ void __launch_bounds__(kThreadsPerBlock, (blocks_per_multiprocessor<Scan, kColumns>()))
    scan_kernel(const Scan scan) {
  scan.template run<kRows, kColumns>();
}

namespace detail {

inline const char* say(const char* format, ...) {
  static thread_local char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

// Null if the kernels support these sizes.
inline const char* check(const Sizes& size) {
  if (size.Dk > kGreatestSize || size.Dv > kGreatestSize)
    return say("the CUDA kernels take keys and values of up to %lld elements, got Dk = %lld and Dv = %lld",
               (long long)kGreatestSize, (long long)size.Dk, (long long)size.Dv);
  return nullptr;
}

inline const char* check_blocks(int64_t blocks) {
  if (blocks > 0x7fffffff) return say("%lld blocks are more than CUDA launches at once", (long long)blocks);
  return nullptr;
}

inline ShapeSize tile_of(Shape shape) {
  if (shape == Shape::tall) return kTall;
  return shape == Shape::wide ? kWide : shape == Shape::medium ? kMedium : kNarrow;
}

// Call f(rows, columns), integral constants, with the tile of a scan.
template <typename A, bool sums_columns, typename F>
const char* with_tile(Shape shape, F f) {
  if (shape == Shape::tall)
    return f(std::integral_constant<int, kTall.rows>{}, std::integral_constant<int, kTall.columns>{});
  if constexpr (sizeof(A) < 8)
    if (shape == Shape::wide)
      return f(std::integral_constant<int, kWide.rows>{}, std::integral_constant<int, kWide.columns>{});
  if constexpr (sizeof(A) < 8 && sums_columns)
    if (shape == Shape::medium)
      return f(std::integral_constant<int, kMedium.rows>{}, std::integral_constant<int, kMedium.columns>{});
  return f(std::integral_constant<int, kNarrow.rows>{}, std::integral_constant<int, kNarrow.columns>{});
}

// Launch a scan, which has its plan.
template <int kRows, int kColumns, typename Scan>
const char* launch_planned(Scan scan, const ScanNeeds& needs, const Gpu& gpu, void* stream) {
  const size_t bytes = shared_bytes(needs, scan.plan);
  if (bytes > gpu.shared_bytes)
    return say("a state of %d x %d in %s takes %zu KiB of shared memory here, of which this GPU has %zu KiB for a block; "
               "use float32, smaller heads or the reference",
               scan.size.rows, scan.size.columns, needs.number == 8 ? "float64" : "float32", (bytes + 1023) / 1024,
               gpu.shared_bytes / 1024);
  const int64_t blocks = (scan.size.heads + scan.plan.teams - 1) / scan.plan.teams * scan.plan.slabs;
  if (const char* error = check_blocks(blocks)) return error;
  scan.arrays.set_pieces(scan.size, kColumns * scan.plan.groups);
  return launch_kernel(scan_kernel<Scan, kRows, kColumns>, gpu, blocks, scan.plan.threads(), bytes, stream, scan);
}

// Launch a scan that keeps only tokens in shared memory.
template <typename Scan>
const char* launch_scan(Scan scan, void* stream) {
  using A = typename Scan::Number;
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  const Shape shape = choose_shape<A>(scan.size, gpu);
  const ScanNeeds needs{tile_of(shape), Scan::Arrays::parts(), sizeof(A), 0, 0};
  scan.plan = choose_plan(scan.size, needs, gpu);
  return with_tile<A, false>(shape, [&](auto rows, auto columns) {
    return launch_planned<rows(), columns()>(scan, needs, gpu, stream);
  });
}

// Makes the arguments of scans from those of the launchers.
template <typename A>
struct Maker {
  using Number = A;
  const Call& call;
  const Sizes& size = call.size;
  static constexpr Type kState = sizeof(A) == 8 ? Type::float64 : Type::float32;

  ScanSize along_keys() const { return {size.B * size.H, size.H, size.L, int(size.Dk), int(size.Dv), call.first}; }
  ScanSize along_values() const { return {size.B * size.H, size.H, size.L, int(size.Dv), int(size.Dk), call.first}; }

  // A contiguous array of `width` numbers per token, in the state's type.
  Input scratch(const void* x, int64_t width) const {
    return {x, size.H * size.L * width, size.L * width, width, kState};
  }
  static Output raw(void* x) { return {x, kState}; }

  template <typename T>
  auto matrix(T* x) const {
    using Number = std::conditional_t<std::is_const_v<T>, const A, A>;
    return Matrices<Number>{static_cast<Number*>(x), size.Dk * size.Dv, size.Dv, 1};
  }
  Matrices<const A> transposed(const void* x) const {
    return {static_cast<const A*>(x), size.Dk * size.Dv, 1, size.Dv};
  }
};

// Call f(Maker) in the type of the computation. Do nothing if there is nothing to compute.
template <typename F>
const char* with_maker(const Call& call, F f) {
  if (const char* error = check(call.size)) return error;
  if (call.size.B * call.size.H == 0) return nullptr;
  return call.type == Type::float64 ? f(Maker<double>{call}) : f(Maker<float>{call});
}

inline size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }
inline size_t state_bytes(Type type) { return type == Type::float64 ? 8 : 4; }
inline size_t bytes_of_tokens(const Sizes& size, Type type, int64_t width) {
  return aligned(size_t(size.B * size.H * size.L * width) * state_bytes(type));
}

// Consecutive arrays of the workspace.
class Workspace {
 public:
  Workspace(const Call& call) : call_(call), next_(static_cast<char*>(call.workspace)) {}
  // `width` numbers per token, in the state's type.
  void* tokens(int64_t width) { return take(bytes_of_tokens(call_.size, call_.type, width)); }
  // So many bytes, a result of aligned().
  void* take(size_t bytes) {
    void* const found = next_;
    next_ += bytes;
    return found;
  }

 private:
  const Call& call_;
  char* next_;
};

}  // namespace detail

}  // namespace fwp::cuda
