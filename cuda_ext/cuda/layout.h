// The layout of a scan's work on threads, and the shared memory that it takes.
//
// A scan goes through the tokens with a matrix of rows x columns in registers: a state, its gradient, or the transpose of one.
// Its columns are independent. A thread holds kRows x kColumns elements. `lanes` adjacent threads share the rows of their
// kColumns columns, and sum over them by shuffles. `groups` of such lanes form a team. A team has a slab of the columns of one
// head, and loads its tokens. A block consists of teams.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fragments.cuh"

namespace fwp::cuda {

constexpr int kThreadsPerBlock = 128;  // at most
constexpr int kMostBuffers = 3;        // of a ring, for tokens: two are filled while the third is used
constexpr int kBuffers = 2;            // for a chunk's matrices on the tensor cores

struct ScanSize {
  int64_t heads, heads_per_batch, length;
  int rows, columns;
  const bool* begins;  // (batches, length): tokens before which the matrix is zero, in forward order; null: none
};

FWP_BOTH constexpr int log2_of(int power) {
  int log = 0;
  while (1 << log < power) ++log;
  return log;
}

// All are powers of two, except `slabs` and `buffers`.
struct Plan {
  int lanes, groups, teams, slabs;
  int log_lanes, log_groups;  // base 2
  int stage;                  // tokens in a buffer, at most the threads of a team
  int buffers;                // of a ring: 2, or kMostBuffers

  FWP_BOTH int team_threads() const { return lanes * groups; }
  FWP_BOTH int threads() const { return lanes * groups * teams; }
};

// The data of a token. Inputs: `rows` vectors along the rows, `columns` vectors along the columns, `scalars` numbers. Outputs:
// `outputs` vectors along the columns, `row_outputs` along the rows, and possibly one number.
struct TokenParts {
  int rows, columns, scalars, outputs, row_outputs;
};

constexpr int kPiece = 4;         // numbers that are read from shared memory at once
constexpr int kSingles = 4;       // room for numbers, and for whether a document begins
constexpr int kLeastColumns = 8;  // that are loaded: 16 bytes in the smallest type

// Positions of a token's parts in shared memory, in numbers. All start at a multiple of 16 bytes.
struct TokenLayout {
  int row_width, column_width, output_width, columns_at, outputs_at, row_outputs_at, scalars_at, size;
  int warps;  // of a team: each has a part of a vector along the rows

  FWP_BOTH TokenLayout(const TokenParts& parts, const Plan& plan, int rows_per_thread, int columns_per_thread) {
    row_width = rows_per_thread * plan.lanes;
    output_width = columns_per_thread * plan.groups;
    column_width = output_width < kLeastColumns ? kLeastColumns : output_width;
    columns_at = parts.rows * row_width;
    outputs_at = columns_at + parts.columns * column_width;
    warps = plan.team_threads() > kWarp ? plan.team_threads() / kWarp : 1;
    row_outputs_at = outputs_at + parts.outputs * output_pitch();
    scalars_at = row_outputs_at + parts.row_outputs * warps * row_width;
    size = scalars_at + kSingles;
  }
  FWP_BOTH int output_pitch() const { return output_width < kPiece ? kPiece : output_width; }
  FWP_BOTH int row(int n) const { return n * row_width; }
  FWP_BOTH int column(int n) const { return columns_at + n * column_width; }
  FWP_BOTH int output(int n) const { return outputs_at + n * output_pitch(); }
  FWP_BOTH int row_output(int n, int warp) const { return row_outputs_at + (n * warps + warp) * row_width; }
  FWP_BOTH int scalar(int n) const { return scalars_at + n; }
  FWP_BOTH int begins() const { return scalar(kSingles - 1); }
};

}  // namespace fwp::cuda
