// Segments of one sequence that run in parallel, if there are fewer heads than multiprocessors. The state after a segment is T
// S + C. S is the state before it, T its transition, and C what it writes to an empty state. A first kernel computes T and C of
// all segments in parallel (kEnds). This kernel goes from segment to segment. Then all segments run in parallel, each from its
// own start state. The gradient goes in the other direction, with the transpose of T.
#pragma once

#include "chunks.cuh"

namespace fwp::cuda {

// The transition T: one, a factor for each row, or a matrix.
enum class Transition { one, rows, matrix };

constexpr int kThreadsForSegments = 128;
constexpr int kColumnsOfThread = 8;

// The state at the start of each segment, or the gradient at its end: (heads, segments, columns, kRows).
template <int kRows>
struct ChunkSegments {
  static constexpr int kColumns = kThreadsForSegments / kRows * kColumnsOfThread;  // of a block

  ScanSize size;
  int segments, slabs, ends_columns, first_of_transition;
  Transition transition;
  bool reverse;
  const float* ends;
  Matrices<const float> initial;
  float* boundaries;

  FWP_DEVICE void run() const {
    float* const shared = reinterpret_cast<float*>(shared_memory());
    const int row = int(threadIdx.x) % kRows, own = int(threadIdx.x) / kRows * kColumnsOfThread;
    const int64_t head = blockIdx.x / unsigned(slabs);
    const int first = int(blockIdx.x % unsigned(slabs)) * kColumns + own;
    const auto inside = [&](int c) { return first + c < size.columns; };
    float state[kColumnsOfThread];
    FWP_UNROLL for (int c = 0; c < kColumnsOfThread; ++c)
      state[c] = initial.data && row < size.rows && inside(c)
                     ? initial.data[head * initial.head + row * initial.row + (first + c) * initial.column]
                     : 0;
    for (int i = 0; i < segments; ++i) {
      const int64_t sequence = head * segments + (reverse ? segments - 1 - i : i);
      const float* const from = ends + sequence * ends_columns * kRows + row;
      float factor = transition == Transition::one ? 1 : 0;
      if (transition == Transition::rows) factor = from[first_of_transition * kRows];
      FWP_UNROLL for (int c = 0; c < kColumnsOfThread; ++c) {
        if (inside(c)) boundaries[(sequence * size.columns + first + c) * kRows + row] = state[c];
        shared[(own + c) * kRows + row] = state[c];
        state[c] = fma(factor, state[c], inside(c) ? from[(first + c) * kRows] : 0);
      }
      __syncthreads();
      if (transition == Transition::matrix)
        FWP_UNROLL_BY(8) for (int j = 0; j < size.rows; ++j) {
          const float column = from[(first_of_transition + j) * kRows];
          FWP_UNROLL for (int c = 0; c < kColumnsOfThread; ++c)
            state[c] = fma(column, shared[(own + c) * kRows + j], state[c]);
        }
      __syncthreads();
    }
  }
};

}  // namespace fwp::cuda
