// How the work of one scan is laid out on threads, and the shared memory that it takes.
//
// A scan goes through the tokens with a matrix of rows x columns in registers: a state, its gradient, or the transpose
// of one. Its columns do not know of each other. A thread holds kRows x kColumns elements; `lanes` threads side by side
// share the rows of their kColumns columns, and add up over them by shuffles; `groups` of such lanes are a team, which
// takes a slab of the columns of one head; a block is some teams and one more warp, which brings the tokens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fragments.cuh"

namespace fwp::cuda {

constexpr int kThreadsPerBlock = 128;  // at most, without the warp that brings the tokens
constexpr int kBuffers = 2;            // of tokens: one is filled while the other is used

struct ScanSize {
  int64_t heads, heads_per_batch, length;
  int rows, columns;
  const bool* first;  // (batches, length): tokens before which the matrix is zero, forwards; null: nowhere
};

// All are powers of two, but `slabs`.
struct Plan {
  int lanes, groups, teams, slabs;
  int stage;  // tokens in a buffer

  FWP_BOTH int team_threads() const { return lanes * groups; }
  FWP_BOTH int threads() const { return lanes * groups * teams; }
};

// Numbers that a token brings: `rows` vectors along the rows, `columns` along the columns, `scalars` single ones.
struct TokenParts {
  int rows, columns, scalars;
};

constexpr int kPiece = 4;  // numbers that are read from shared memory at once

// Where the parts of a token lie in a buffer, in numbers.
struct TokenLayout {
  int row_width, column_width, columns_at, scalars_at, size;

  FWP_BOTH TokenLayout(const TokenParts& parts, const Plan& plan, int rows_per_thread, int columns_per_thread) {
    row_width = rows_per_thread * plan.lanes;
    column_width = columns_per_thread * plan.groups;
    const int pitch = column_width < kPiece ? kPiece : column_width;
    columns_at = parts.rows * row_width;
    scalars_at = columns_at + parts.columns * pitch;
    size = scalars_at + (parts.scalars ? kPiece : 0);
  }
  FWP_BOTH int row(int n) const { return n * row_width; }
  FWP_BOTH int column(int n) const { return columns_at + n * (column_width < kPiece ? kPiece : column_width); }
  FWP_BOTH int scalar(int n) const { return scalars_at + n; }
};

}  // namespace fwp::cuda
