// What all scans share: a thread's tile of the matrix, the tokens' way through shared memory, results.
#pragma once

#include "layout.h"

namespace fwp::cuda {

using Input = Tokens;  // zeros where `data` is null
using Output = Target;

// A rows x columns matrix for each head, or for each head and chunk; the transpose of one by its strides. Zeros, or not
// wanted, where `data` is null.
template <typename A>
struct Matrices {
  A* data = nullptr;
  int64_t head = 0, row = 0, column = 0;
};

template <typename A>
struct alignas(kPiece * sizeof(A) < 16 ? kPiece * sizeof(A) : 16) Piece {
  A x[kPiece];
};

// The part of the matrix that one thread holds.
template <typename A, int kRows, int kColumns>
struct Tile {
  A x[kRows][kColumns];

  FWP_DEVICE void add(const A (&row)[kRows], const A (&column)[kColumns]) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] = fma(row[r], column[c], x[r][c]);
  }
  FWP_DEVICE void subtract(const A (&row)[kRows], const A (&column)[kColumns]) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] = fma(-row[r], column[c], x[r][c]);
  }
  FWP_DEVICE void scale(const A (&row)[kRows], const A (&column)[kColumns]) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] *= row[r] * column[c];
  }
  FWP_DEVICE void scale(A factor) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] *= factor;
  }
  FWP_DEVICE void scale_rows(const A (&row)[kRows]) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] *= row[r];
  }
  FWP_DEVICE void scale_columns(const A (&column)[kColumns]) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] *= column[c];
  }
  FWP_DEVICE void clear() {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] = A(0);
  }
  // row x, of this thread's rows alone.
  FWP_DEVICE void read(const A (&row)[kRows], A (&sum)[kColumns]) const {
    FWP_UNROLL for (int c = 0; c < kColumns; ++c) {
      sum[c] = row[0] * x[0][c];
      FWP_UNROLL for (int r = 1; r < kRows; ++r) sum[c] = fma(row[r], x[r][c], sum[c]);
    }
  }
  // The sums over this thread's rows of the products of elements.
  FWP_DEVICE void read_with(const Tile& other, A (&sum)[kColumns]) const {
    FWP_UNROLL for (int c = 0; c < kColumns; ++c) {
      sum[c] = x[0][c] * other.x[0][c];
      FWP_UNROLL for (int r = 1; r < kRows; ++r) sum[c] = fma(x[r][c], other.x[r][c], sum[c]);
    }
  }
};

template <typename A, int n>
FWP_DEVICE void scaled(A factor, const A (&x)[n], A (&product)[n]) {
  FWP_UNROLL for (int i = 0; i < n; ++i) product[i] = factor * x[i];
}

// Over all lanes that share a column: the same bits for each of them, whatever else runs. All of a warp must call it.
template <typename A, int n>
FWP_DEVICE void add_lanes(A (&x)[n], int lanes) {
  for (int distance = 1; distance < lanes; distance *= 2)
    FWP_UNROLL for (int i = 0; i < n; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], distance);
}

// Tokens that go through shared memory at once, in the order of memory.
struct Stage {
  int64_t first;
  int count;
};

// Those of a scan from the first token to the last, or back.
FWP_DEVICE Stage plain_stage(int64_t n, int tokens, int64_t length, bool reverse) {
  const int64_t before = n * tokens, left = length - before;
  const int count = left < tokens ? int(left) : tokens;
  return {reverse ? left - count : before, count};
}

template <typename A, int kRowParts, int kColumnParts, int kScalars>
struct TokenInputs {
  static FWP_BOTH constexpr TokenParts parts() { return {kRowParts, kColumnParts, kScalars}; }
  Input rows[kRowParts];
  Input columns[kColumnParts];
  Input scalars[kScalars ? kScalars : 1];
};

// The place of a thread in a scan.
template <typename A, int kRows, int kColumns, typename Inputs>
struct Place {
  const ScanSize& size;
  const Plan& plan;
  const Inputs& inputs;
  TokenLayout layout;
  int thread, team, lane, column;  // column: the first one of this thread in the matrix
  int group_column;                // and in the slab of its team
  int64_t head;

  FWP_DEVICE Place(const ScanSize& size_, const Plan& plan_, const Inputs& inputs_)
      : size(size_), plan(plan_), inputs(inputs_), layout(Inputs::parts(), plan_, kRows, kColumns) {
    thread = int(threadIdx.x);
    team = thread / plan.team_threads();
    lane = thread & (plan.lanes - 1);
    group_column = (thread & (plan.team_threads() - 1)) / plan.lanes * kColumns;
    column = slab() * layout.column_width + group_column;
    head = first_head() + team;
  }

  FWP_DEVICE int slab() const { return int(blockIdx.x % unsigned(plan.slabs)); }
  FWP_DEVICE int64_t first_head() const { return int64_t(blockIdx.x / unsigned(plan.slabs)) * plan.teams; }
  FWP_DEVICE bool brings_tokens() const { return thread >= plan.threads(); }
  // Whether the thread has columns of a head, though perhaps beyond the last one.
  FWP_DEVICE bool is_there() const { return !brings_tokens() && head < size.heads; }
  // Whether a document begins with token t.
  FWP_DEVICE bool begins(int64_t t) const {
    return size.first && is_there() && size.first[head / size.heads_per_batch * size.length + t];
  }
  FWP_DEVICE int row(int r) const { return ((r / kPiece) * plan.lanes + lane) * kPiece + r % kPiece; }

  FWP_DEVICE A* buffer(int64_t n) const {
    return reinterpret_cast<A*>(shared_memory()) + (n % kBuffers) * plan.teams * plan.stage * layout.size;
  }
  // Shared memory beyond the buffers.
  FWP_DEVICE A* own_memory() const {
    return reinterpret_cast<A*>(shared_memory()) + kBuffers * plan.teams * plan.stage * layout.size;
  }
  FWP_DEVICE const A* token(int64_t n, int slot) const {
    return buffer(n) + (team * plan.stage + slot) * layout.size;
  }

  // Parts of a token.
  FWP_DEVICE void load_row(const A* token, int n, A (&x)[kRows]) const {
    const Piece<A>* from = reinterpret_cast<const Piece<A>*>(token + layout.row(n)) + lane;
    FWP_UNROLL for (int p = 0; p < kRows / kPiece; ++p) {
      const Piece<A> piece = from[p * plan.lanes];
      FWP_UNROLL for (int i = 0; i < kPiece; ++i) x[p * kPiece + i] = piece.x[i];
    }
  }
  FWP_DEVICE void load_column(const A* token, int n, A (&x)[kColumns]) const {
    const A* from = token + layout.column(n) + group_column;
    FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[c] = from[c];
  }
  FWP_DEVICE A scalar(const A* token, int n) const { return token[layout.scalar(n)]; }

  FWP_DEVICE void load(const Matrices<const A>& m, int64_t index, Tile<A, kRows, kColumns>& tile) const {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) {
        const bool inside = m.data && is_there() && row(r) < size.rows && column + c < size.columns;
        tile.x[r][c] = inside ? m.data[index * m.head + row(r) * m.row + (column + c) * m.column] : A(0);
      }
  }
  FWP_DEVICE void store(const Tile<A, kRows, kColumns>& tile, const Matrices<A>& m, int64_t index) const {
    if (!m.data || !is_there()) return;
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c)
        if (row(r) < size.rows && column + c < size.columns)
          m.data[index * m.head + row(r) * m.row + (column + c) * m.column] = tile.x[r][c];
  }

  // One number a column, which all lanes of the column have.
  FWP_DEVICE void store_columns(const Output& to, int64_t t, const A (&x)[kColumns]) const {
    if (!to.data || !is_there() || lane != 0) return;
    const int64_t at = (head * size.length + t) * size.columns + column;
    with_element<A>(to.type, [&](auto* element) {
      auto* data = static_cast<decltype(element)>(to.data) + at;
      FWP_UNROLL for (int c = 0; c < kColumns; ++c)
        if (column + c < size.columns) round_to(x[c], data[c]);
    });
  }
  // One number a token, which all threads have; nowhere if it is not wanted.
  FWP_DEVICE void store_scalar(const Output& to, int64_t t, A x) const {
    if (!to.data || !is_there() || lane != 0 || column != 0) return;
    with_element<A>(to.type, [&](auto* element) {
      round_to(x, static_cast<decltype(element)>(to.data)[head * size.length + t]);
    });
  }

  // Calls use(n, stage) for each of the stages that stage_at(n) names, with their tokens in buffer n.
  template <typename StageAt, typename Use>
  FWP_DEVICE void for_stages(int64_t stages, StageAt stage_at, Use use) const {
    for (int64_t n = 0; n <= stages; ++n) {
      if (brings_tokens()) {
        if (n < stages) fill(n, stage_at(n));
      } else if (n > 0) {
        use(n - 1, stage_at(n - 1));
      }
      // The buffer that was filled may be used from here on, and the one that was used may be filled.
      __syncthreads();
    }
  }

  // Calls use(t, token) for all tokens from the first to the last, or back.
  template <typename Use>
  FWP_DEVICE void for_tokens(bool reverse, Use use) const {
    const int64_t stages = (size.length + plan.stage - 1) / plan.stage;
    for_stages(
        stages, [&](int64_t n) { return plain_stage(n, plan.stage, size.length, reverse); },
        [&](int64_t n, const Stage& stage) {
          FWP_UNROLL_BY(1) for (int s = 0; s < stage.count; ++s) {
            const int slot = reverse ? stage.count - 1 - s : s;
            use(stage.first + slot, token(n, slot));
          }
        });
  }

 private:
  FWP_DEVICE void fill(int64_t n, const Stage& stage) const {
    FWP_UNROLL_BY(1) for (int which = 0; which < plan.teams && first_head() + which < size.heads; ++which) {
      A* to = buffer(n) + which * plan.stage * layout.size;
      const int64_t h = first_head() + which;
      FWP_UNROLL_BY(1) for (int i = 0; i < Inputs::parts().rows; ++i)
        copy(inputs.rows[i], h, stage, 0, size.rows, layout.row_width, to + layout.row(i));
      const int first = slab() * layout.column_width;
      FWP_UNROLL_BY(1) for (int i = 0; i < Inputs::parts().columns; ++i)
        copy(inputs.columns[i], h, stage, first, size.columns - first, layout.column_width, to + layout.column(i));
      FWP_UNROLL_BY(1) for (int i = 0; i < Inputs::parts().scalars; ++i)
        copy(inputs.scalars[i], h, stage, 0, 1, 1, to + layout.scalar(i));
    }
  }

  // `count` numbers of each token of the stage from `first` on, and zeros up to `width`, a power of two: some tokens at
  // once where they are shorter than a warp, or else one after the other.
  FWP_DEVICE void copy(const Input& from, int64_t h, const Stage& stage, int first, int count, int width, A* to) const {
    const int worker = thread - plan.threads(), tokens = width < kWarp ? kWarp / width : 1;
    const int slot = worker / width * (tokens > 1), j = tokens > 1 ? worker & (width - 1) : worker;
    if (!from.data) count = 0;
    const int64_t at = h / size.heads_per_batch * from.batch + h % size.heads_per_batch * from.head +
                       (stage.first + slot) * from.token + first;
    with_element<A>(from.type, [&](auto* element) {
      const auto* data = static_cast<decltype(element)>(const_cast<void*>(from.data)) + at;
      A* target = to + slot * layout.size;
      FWP_UNROLL_BY(4) for (int s = slot; s < stage.count; s += tokens) {
        FWP_UNROLL_BY(1) for (int i = j; i < width; i += kWarp) target[i] = i < count ? number(data[i]) : A(0);
        data += tokens * from.token;
        target += tokens * layout.size;
      }
    });
  }
};

// What every scan has: the tokens that it goes through, and the matrix before the first that it comes to and after the last.
template <typename A, int kRowParts, int kColumnParts, int kScalars>
struct Scan {
  using Number = A;
  using Inputs = TokenInputs<A, kRowParts, kColumnParts, kScalars>;

  ScanSize size;
  Plan plan;
  Inputs inputs;
  Matrices<const A> initial;
  Matrices<A> last;

  // Calls step(place, t, token, matrix) for all tokens from the first to the last, or back.
  template <int kRows, int kColumns, typename Step>
  FWP_DEVICE void scan(bool reverse, Step step) const {
    const Place<A, kRows, kColumns, Inputs> place(size, plan, inputs);
    Tile<A, kRows, kColumns> matrix;
    place.load(initial, place.head, matrix);
    place.for_tokens(reverse, [&](int64_t t, const A* token) {
      if (!reverse && place.begins(t)) matrix.clear();
      step(place, t, token, matrix);
      if (reverse && place.begins(t)) matrix.clear();
    });
    place.store(matrix, last, place.head);
  }
};

}  // namespace fwp::cuda
