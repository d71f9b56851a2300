// Segments of one sequence that run in parallel, if there are fewer heads than multiprocessors. The state after a segment is T
// W + C. W is the state before it, T its transition, and C what it writes to an empty state. A first kernel computes T and C of
// all segments in parallel (`ends`). This kernel goes from segment to segment. Then all segments run in parallel, each from its
// own start state. The gradient goes in the other direction, with the transpose of T: the backward pass only computes C.
#pragma once

#include "chunks.cuh"

namespace fwp::cuda {

// The transition T: one, a factor for each row, or a matrix.
enum class Transition { one, rows, matrix };

constexpr int kThreadsForSegments = 128;
constexpr int kColumnsOfThread = 8;

// Replaces C by the state at the start of each segment, or by the gradient at its end. `matrices`: (heads, segments, columns +
// rows, rows). The first columns are those of C, then those of T, or the factors in one column.
struct ChunkSegments {
  int rows;  // a power of two, at least those of the matrices, and at most the threads
  Transition transition;
  bool reverse;
  float* matrices;
  const float* forward;  // the matrices of the forward pass, which have T
  Matrices<const float> initial;
  ScanSize size;
  int segments, slabs;

  FWP_BOTH int columns() const { return kThreadsForSegments / rows * kColumnsOfThread; }  // of a block

  FWP_DEVICE void run() const {
    float* const shared = reinterpret_cast<float*>(shared_memory());
    const int row = int(threadIdx.x) % rows, own = int(threadIdx.x) / rows * kColumnsOfThread;
    const int64_t head = blockIdx.x / unsigned(slabs);
    const int column = int(blockIdx.x % unsigned(slabs)) * columns() + own;
    const auto inside = [&](int c) { return row < size.rows && column + c < size.columns; };
    float state[kColumnsOfThread];
    FWP_UNROLL for (int c = 0; c < kColumnsOfThread; ++c)
      state[c] = initial.data && inside(c)
                     ? initial.data[head * initial.head + row * initial.row + (column + c) * initial.column]
                     : 0;
    // Element j of this row of T. Rows beyond the last are not used.
    const int step = reverse ? 1 : size.rows;
    const float* const of_row = forward + size.columns * size.rows + (row < size.rows ? row * (reverse ? size.rows : 1) : 0);
    for (int i = 0; i < segments; ++i) {
      const int64_t at = (head * segments + (reverse ? segments - 1 - i : i)) * of_segment(size);
      float factor = transition == Transition::one ? 1 : 0;
      if (transition == Transition::rows && row < size.rows) factor = forward[at + size.columns * size.rows + row];
      FWP_UNROLL for (int c = 0; c < kColumnsOfThread; ++c) {
        float* const written = matrices + at + (column + c) * size.rows + row;
        const float of_empty = inside(c) ? *written : 0;
        if (inside(c)) *written = state[c];
        shared[(own + c) * rows + row] = state[c];
        state[c] = fma(factor, state[c], of_empty);
      }
      __syncthreads();
      if (transition == Transition::matrix)
        FWP_UNROLL_BY(8) for (int j = 0; j < size.rows; ++j) {
          const float x = of_row[at + j * step];
          FWP_UNROLL for (int c = 0; c < kColumnsOfThread; ++c) state[c] = fma(x, shared[(own + c) * rows + j], state[c]);
        }
      __syncthreads();
    }
  }
};

}  // namespace fwp::cuda
