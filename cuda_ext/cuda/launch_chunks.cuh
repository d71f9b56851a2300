// The passes on the tensor cores: of the sum and the delta rule, without decays or with decays by head.
#pragma once

#include "chunk_backward.cuh"
#include "chunk_forward.cuh"
#include "chunk_segments.cuh"
#include "launch.cuh"

namespace fwp::cuda {

template <typename Pass>
__global__ void __launch_bounds__(kChunkWarps* kWarp, 1) chunk_kernel(const Pass pass) {
  pass.run();
}

template <int kRows>
__global__ void __launch_bounds__(kThreadsForSegments) segments_kernel(const ChunkSegments<kRows> pass) {
  pass.run();
}

namespace detail {

// Calls f with the smallest compiled row count, a constant, that is at least `rows`.
template <typename F>
auto with_rows(int64_t rows, F f) {
  if (rows <= 16) return f(std::integral_constant<int, 16>{});
  if (rows <= 32) return f(std::integral_constant<int, 32>{});
  if (rows <= 64) return f(std::integral_constant<int, 64>{});
  return f(std::integral_constant<int, kMostRowsForChunks>{});
}

template <typename Pass>
size_t chunk_bytes(const Pass& pass) {
  Carver carver{nullptr};
  typename Pass::Memory(carver, pass);
  return reinterpret_cast<size_t>(carver.next);
}

template <typename Pass>
void set_size(Pass& pass, const ScanSize& size) {
  pass.size = size;
  const SegmentPlan plan = choose_segments(size, pass.chunks(), Pass::kLeastSegments);
  pass.log_segments = plan.log_segments, pass.chunks_of_segment = plan.chunks;
}

// Set as many slabs as fill the GPU with all segments of all heads.
template <typename Pass>
void set_columns(Pass& pass, int columns, const Gpu& gpu) {
  ScanSize size = pass.size;
  size.heads *= pass.segments(), size.columns = columns;
  const ChunkPlan plan = choose_chunk_plan(size, kBlock, kChunkWarps, gpu.multiprocessors);
  pass.warps = plan.warps, pass.slabs = plan.slabs;
}

template <typename Pass>
const char* launch_chunks(const Pass& pass, const Gpu& gpu, void* stream) {
  const int64_t blocks = pass.size.heads * pass.segments() * pass.slabs.number;
  if (blocks == 0) return nullptr;
  if (const char* error = check_blocks(blocks)) return error;
  return launch_kernel(chunk_kernel<Pass>, gpu, blocks, pass.warps * kWarp, chunk_bytes(pass), stream, pass);
}

inline ScanSize chunk_size(const Sizes& size, const bool* first = nullptr) {
  return {size.B * size.H, size.H, size.L, int(size.Dk), int(size.Dv), first};
}
inline ScanSize chunk_size(const Call& call) { return chunk_size(call.size, call.first); }

template <int kRows, bool kErases, bool kFades>
ChunkBackward<kRows, kErases, kFades> sized_backward(const ScanSize& size) {
  ChunkBackward<kRows, kErases, kFades> pass{};
  set_size(pass, size);
  pass.slabs = 1;
  pass.warps = at_least_power_of_two((int64_t(size.columns) + kBlock - 1) / kBlock, kChunkWarps);
  return pass;
}

// The backward pass has all columns of a head in one block, because gradients of keys sum over them. It needs more shared
// memory.
inline bool choose_chunks_backward(const ScanSize& size, Type type) {
  return choose_chunks(size, type) && size.columns <= kChunkWarps * kBlock;
}
template <bool kErases, bool kFades>
bool choose_chunks_backward(const ScanSize& size, Type type, const Gpu& gpu) {
  return choose_chunks_backward(size, type) && with_rows(size.rows, [&](auto rows) {
           return chunk_bytes(sized_backward<decltype(rows)::value, kErases, kFades>(size)) <= gpu.shared_bytes;
         });
}

// Memory for the states between segments; empty if there is one segment.
template <int kRows>
struct SegmentMemory {
  char* next;
  float *ends, *boundaries;

  template <typename Pass>
  SegmentMemory(const Pass& pass, void* from) : next(static_cast<char*>(from)) {
    const int64_t sequences = pass.log_segments > 0 ? pass.size.heads * pass.segments() : 0;
    ends = take(sequences * pass.ends_columns() * kRows);
    boundaries = take(sequences * pass.size.columns * kRows);
  }
  float* take(int64_t count) {
    float* const found = reinterpret_cast<float*>(next);
    next += aligned(size_t(count) * sizeof(float));
    return found;
  }
  Matrices<const float> matrices(const ScanSize& size) const { return {boundaries, int64_t(size.columns) * kRows, 1, kRows}; }

  // Compute the boundaries from the ends.
  template <typename Pass>
  const char* connect(const Pass& pass, const Matrices<const float>& initial, Transition transition, bool reverse,
                      const Gpu& gpu, void* stream) const {
    ChunkSegments<kRows> through{};
    through.size = pass.size, through.segments = int(pass.segments()), through.reverse = reverse;
    through.slabs = (pass.size.columns + through.kColumns - 1) / through.kColumns;
    through.first_of_transition = pass.value_columns();
    through.ends_columns = transition == Transition::one ? pass.value_columns() : pass.ends_columns();
    through.ends = ends, through.transition = transition;
    through.initial = initial, through.boundaries = boundaries;
    const int64_t blocks = pass.size.heads * through.slabs;
    if (blocks == 0) return nullptr;
    if (const char* error = check_blocks(blocks)) return error;
    const size_t bytes = size_t(through.kColumns) * kRows * sizeof(float);
    return launch_kernel(segments_kernel<kRows>, gpu, blocks, kThreadsForSegments, bytes, stream, through);
  }
};

// Device memory in bytes. Forward: ends and boundaries of segments. Backward: also the states before each chunk.
template <bool kErases, bool kFades>
size_t chunk_workspace(const Sizes& sizes, Type type, bool is_backward) {
  const ScanSize size = chunk_size(sizes);
  if (!(is_backward ? choose_chunks_backward(size, type) : choose_chunks(size, type))) return 0;
  return with_rows(size.rows, [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const auto pass = sized_backward<kRows, kErases, kFades>(size);
    const size_t segments = reinterpret_cast<size_t>(SegmentMemory<kRows>(pass, nullptr).next);
    const size_t states = kFades ? 0 : size_t(size.heads * pass.chunks() * pass.block_columns() * kRows);
    return segments + is_backward * states * sizeof(Bfloat16);
  });
}

// The pass that computes the ends of segments, or the states before each chunk.
template <int kRows, bool kErases>
ChunkStates<kRows, kErases> make_states(const ScanSize& size, const Tokens& key, const Tokens& value, const Inputs& in,
                                        const Gpu& gpu) {
  ChunkStates<kRows, kErases> pass{};
  set_size(pass, size);
  set_columns(pass, size.columns, gpu);
  pass.key = {key, size.rows}, pass.value = {value, size.columns}, pass.rate = {in.rate, 1};
  return pass;
}

// Run the pass that computes the ends of segments. From these compute the states at their starts, beginning with `initial`, or
// in reverse the gradients at their ends.
template <int kRows, typename Pass>
const char* find_boundaries(Pass ends, const SegmentMemory<kRows>& memory, const Matrices<const float>& initial,
                            Transition transition, bool reverse, const Gpu& gpu, void* stream) {
  ends.ends = memory.ends;
  if (const char* error = launch_chunks(ends, gpu, stream)) return error;
  return memory.connect(ends, initial, transition, reverse, gpu, stream);
}

template <bool kErases, bool kFades>
const char* chunk_forward(const Call& call, const Inputs& in, const Outputs& to) {
  const Maker<float> make{call};
  const ScanSize size = chunk_size(call);
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  return with_rows(size.rows, [&](auto rows) -> const char* {
    constexpr int kRows = decltype(rows)::value;
    const auto fill = [&](auto& pass) {
      set_size(pass, size);
      pass.query = {in.q, size.rows}, pass.key = {in.k, size.rows}, pass.value = {in.v, size.columns};
      pass.rate = {in.rate, 1}, pass.decay = {in.head_decay, 1};
    };
    ChunkForward<kRows, kErases, kFades> pass{};
    fill(pass);
    set_columns(pass, size.columns, gpu);
    pass.initial = make.matrix(in.state);
    pass.last = static_cast<float*>(to.state), pass.kept = static_cast<float*>(to.kept);
    pass.out = to.out, pass.error = static_cast<float*>(to.retrieved);
    if (pass.log_segments > 0) {
      const SegmentMemory<kRows> memory(pass, call.workspace);
      const char* error;
      if constexpr (pass.kRates) {
        ChunkForward<kRows, kErases, kFades, true> ends{};
        fill(ends);
        set_columns(ends, ends.ends_columns(), gpu);
        error = find_boundaries(ends, memory, pass.initial, Transition::matrix, false, gpu, call.stream);
      } else {
        const auto ends = make_states<kRows, kErases>(size, in.k, in.v, in, gpu);
        error = find_boundaries(ends, memory, pass.initial, Transition::one, false, gpu, call.stream);
      }
      if (error) return error;
      pass.initial = memory.matrices(size);
    }
    return launch_chunks(pass, gpu, call.stream);
  });
}

template <bool kErases, bool kFades>
const char* chunk_backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to,
                           const Gpu& gpu) {
  const Maker<float> make{call};
  const ScanSize size = chunk_size(call);
  return with_rows(size.rows, [&](auto rows) -> const char* {
    constexpr int kRows = decltype(rows)::value;
    const Tokens& value = kErases ? more.retrieved : in.v;
    const auto fill = [&](auto& pass) {
      set_size(pass, size);
      pass.query = {in.q, size.rows}, pass.key = {in.k, size.rows}, pass.value = {value, size.columns};
      pass.rate = {in.rate, 1}, pass.decay = {in.head_decay, 1}, pass.d_out = {more.d_out, size.columns};
    };
    auto pass = sized_backward<kRows, kErases, kFades>(size);
    fill(pass);
    const SegmentMemory<kRows> memory(pass, call.workspace);
    pass.d_last = make.matrix(more.d_state), pass.d_initial = static_cast<float*>(to.state);
    pass.d_q = to.q, pass.d_k = to.k, pass.d_v = to.v, pass.d_rate = to.rate, pass.d_decay = to.head_decay;
    const bool in_segments = pass.log_segments > 0;
    if constexpr (kFades) {
      pass.initial = static_cast<const float*>(in.state), pass.kept = static_cast<const float*>(more.kept);
    } else {
      const auto ends = make_states<kRows, kErases>(size, in.k, value, in, gpu);
      auto before = ends;
      before.warps = pass.warps, before.slabs = pass.slabs;  // it writes the states as `pass` reads them
      before.initial = make.matrix(in.state);
      pass.states = before.states = reinterpret_cast<Bfloat16*>(memory.next);
      if (in_segments) {
        const char* const error = find_boundaries(ends, memory, before.initial, Transition::one, false, gpu, call.stream);
        if (error) return error;
        before.initial = memory.matrices(size);
      }
      if (const char* error = launch_chunks(before, gpu, call.stream)) return error;
    }
    if (in_segments) {
      const char* error;
      if constexpr (pass.kRates) {
        ChunkBackward<kRows, kErases, kFades, true> ends{};
        fill(ends);
        set_columns(ends, ends.ends_columns(), gpu);
        error = find_boundaries(ends, memory, pass.d_last, Transition::matrix, true, gpu, call.stream);
      } else {  // G = G + Q^T d_out is a state, too
        const auto ends = make_states<kRows, kErases>(size, in.q, more.d_out, in, gpu);
        error = find_boundaries(ends, memory, pass.d_last, Transition::one, true, gpu, call.stream);
      }
      if (error) return error;
      pass.d_last = memory.matrices(size);
    }
    return launch_chunks(pass, gpu, call.stream);
  });
}

}  // namespace detail

}  // namespace fwp::cuda
