// The launch of a scan, and what launches share.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <type_traits>

#include "choose.h"
#include "recurrent.cuh"

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

template <typename Sums>
__global__ void __launch_bounds__(kThreadsPerBlock) sums_kernel(const Sums sums) {
  sums.run();
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

// Launch blocks, if there are any.
template <typename Pass>
const char* launch_blocks(void (*kernel)(Pass), const Gpu& gpu, int64_t blocks, int threads, size_t bytes, void* stream,
                          const Pass& pass) {
  if (blocks == 0) return nullptr;
  if (blocks > 0x7fffffff) return say("%lld blocks are more than CUDA launches at once", (long long)blocks);
  return launch_kernel(kernel, gpu, blocks, threads, bytes, stream, pass);
}

inline ShapeSize tile_of(Shape shape) {
  if (shape == Shape::tall) return kTall;
  return shape == Shape::wide ? kWide : shape == Shape::medium ? kMedium : kNarrow;
}

// Call f(rows, columns), integral constants, with the tile of a scan.
template <typename Real, bool sums_columns, typename F>
const char* with_tile(Shape shape, F f) {
  if (shape == Shape::tall)
    return f(std::integral_constant<int, kTall.rows>{}, std::integral_constant<int, kTall.columns>{});
  if constexpr (sizeof(Real) < 8)
    if (shape == Shape::wide)
      return f(std::integral_constant<int, kWide.rows>{}, std::integral_constant<int, kWide.columns>{});
  if constexpr (sizeof(Real) < 8 && sums_columns)
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
  scan.arrays.set_pieces(scan.size, kColumns * scan.plan.groups);
  return launch_blocks(scan_kernel<Scan, kRows, kColumns>, gpu, blocks, scan.plan.threads(), bytes, stream, scan);
}

// Launch a scan that keeps only tokens in shared memory.
template <typename Scan>
const char* launch_scan(Scan scan, const Gpu& gpu, void* stream) {
  using Real = typename Scan::Number;
  const Shape shape = choose_shape<Real>(scan.size, gpu);
  const ScanNeeds needs{tile_of(shape), Scan::Arrays::parts(), sizeof(Real), 0, 0};
  scan.plan = choose_plan(scan.size, needs, gpu);
  return with_tile<Real, false>(shape, [&](auto rows, auto columns) {
    return launch_planned<rows(), columns()>(scan, needs, gpu, stream);
  });
}

inline ScanSize scan_size(const Call& call) {
  const Sizes& size = call.size;
  return {size.B * size.H, size.H, size.L, int(size.Dk), int(size.Dv), call.begins};
}

// A (B, H, Dk, Dv) array in the type of the computation.
template <typename Real, typename T>
auto matrices(T* x, const Sizes& size) {
  using Number = std::conditional_t<std::is_const_v<T>, const Real, Real>;
  return Matrices<Number>{static_cast<Number*>(x), size.Dk * size.Dv, size.Dv, 1};
}

// Call f with a zero of the type of the computation. Do nothing if there is nothing to compute.
template <typename F>
const char* with_number(const Call& call, F f) {
  if (const char* error = check(call.size)) return error;
  if (call.size.B * call.size.H == 0) return nullptr;
  return call.type == Type::float64 ? f(double()) : f(float());
}

inline Type state_type(Type type) { return type == Type::float64 ? type : Type::float32; }
inline size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Allocates arrays of device memory: from a workspace, or from null to count its bytes.
struct DeviceMemory {
  char* next;

  template <typename T>
  T* take(int64_t count) {
    T* const found = reinterpret_cast<T*>(next);
    next += aligned(size_t(count) * sizeof(T));
    return found;
  }
};

// Tokens of a group in the backward pass. If they do not fit, fewer.
constexpr int kGroup = 4;
static_assert(kGroup <= kLeastTeam);

// A backward pass. If several blocks share a head, it runs in windows of tokens, which limits the memory for parts of sums.
struct BackwardPlan {
  Shape shape;
  ScanNeeds needs;
  Plan plan;
  int64_t window, part, carry;  // tokens; numbers of a row output's sums, and of the gradient between two windows
};

template <typename Scan>
BackwardPlan plan_backward(const ScanSize& size, const Gpu& gpu) {
  using Real = typename Scan::Number;
  const Shape shape = choose_summing_shape<Real>(size);
  ScanNeeds needs{tile_of(shape), Scan::Arrays::parts(), sizeof(Real), 0, 0};
  Plan plan{};
  for (int group = kGroup; group > 0; group /= 2) {
    needs.states = Scan::states(group), needs.stage = group;
    plan = choose_plan(size, needs, gpu);
    if (shared_bytes(needs, plan) <= gpu.shared_bytes) break;
  }
  if (plan.slabs == 1) return {shape, needs, plan, size.length, 0, 0};
  const int64_t of_token = plan.slabs * size.heads * size.rows;
  const int64_t fit = int64_t(kPartBytes / (of_token * sizeof(Real) * needs.parts.row_outputs + 1)) / kKeptEvery * kKeptEvery;
  const int64_t window = std::min(std::max(fit, kKeptEvery), size.length);
  const int64_t of_states = window < size.length ? size.heads * size.rows * size.columns : 0;
  return {shape, needs, plan, window, of_token * window, of_states};
}

// The workspace of a backward scan.
template <typename Scan>
struct ScanMemory {
  using Real = typename Scan::Number;
  Real *d_write, *d_decay;                        // d_decay: by head, a part for each row
  Real* kept;                                     // the states of a rule without decays
  Real *parts[Scan::Arrays::parts().row_outputs], *carry;  // sums over columns of several blocks
  size_t bytes;

  ScanMemory(const ScanSize& size, const BackwardPlan& by, void* from) {
    DeviceMemory memory{static_cast<char*>(from)};
    const int64_t tokens = size.heads * size.length, states = size.heads * (size.length / kKeptEvery);
    d_write = memory.take<Real>(tokens * size.columns);
    d_decay = memory.take<Real>(Scan::kByHead ? tokens * size.rows : 0);
    kept = memory.take<Real>(Scan::kDecays ? 0 : states * size.rows * size.columns);
    for (Real*& part : parts) part = memory.take<Real>(by.part);
    carry = memory.take<Real>(by.carry);
    bytes = size_t(memory.next) - size_t(from);
  }
};

template <typename Sums>
const char* launch_sums(const Sums& sums, void* stream) {
  return launch_blocks(sums_kernel<Sums>, {}, sums.blocks(), kThreadsPerBlock, 0, stream, sums);
}

// Launch the scan, window by window. `to`: its row outputs.
template <typename Scan, int outputs>
const char* launch_backward(Scan scan, const BackwardPlan& by, const ScanMemory<Scan>& memory, const Gpu& gpu,
                            const OutputArray (&to)[outputs], void* stream) {
  using Real = typename Scan::Number;
  const Matrices<Real> d_initial = scan.d_first;
  SlabSums<Real, outputs> sums{};
  sums.heads = scan.size.heads, sums.rows = scan.size.rows, sums.length = scan.size.length, sums.slabs = by.plan.slabs;
  for (int n = 0; n < outputs; ++n) sums.parts[n] = memory.parts[n], sums.out[n] = to[n];
  const Matrices<Real> carry{memory.carry, int64_t(scan.size.rows) * scan.size.columns, scan.size.columns, 1};
  scan.plan = by.plan;
  scan.end = scan.size.length;
  do {
    scan.first = scan.end > by.window ? (scan.end - 1) / by.window * by.window : 0;
    scan.d_first = scan.first > 0 ? carry : d_initial;
    sums.first = scan.first, sums.tokens = scan.end - scan.first;
    for (int n = 0; n < outputs; ++n) {
      const OutputArray part{to[n].data ? sums.parts[n] : nullptr, sizeof(Real) == 8 ? Type::float64 : Type::float32};
      scan.arrays.row_outputs[n] = by.part ? RowSink{part, sums.count(), sums.first, sums.tokens}
                                                 : RowSink{to[n], 0, 0, scan.size.length};
    }
    const char* error = with_tile<Real, true>(by.shape, [&](auto rows, auto columns) {
      return launch_planned<rows(), columns()>(scan, by.needs, gpu, stream);
    });
    if (!error && by.part) error = launch_sums(sums, stream);
    if (error) return error;
    scan.d_final = {carry.data, carry.head, carry.row, carry.column};
    scan.end = scan.first;
  } while (scan.end > 0);
  return nullptr;
}

}  // namespace detail

}  // namespace fwp::cuda
