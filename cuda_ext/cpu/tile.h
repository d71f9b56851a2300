// Products of small matrices, with a tile of the result in registers. The quadratic forms of the rules consist of them.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "state_block.h"

namespace fwp {

// A tile is 4 x 4 vectors of sums (4 x 2 with 16 registers), which leaves registers for the operands.
constexpr int kTileRows = 4;
constexpr int kTileVectors = kPassTokens;

// product[t][s] = x_t . y_s for kTileRows t and kTileVectors s.
template <typename Real>
FWP_INLINE void multiply_tile(Tokens<const Real> x, Tokens<const Real> y, int64_t width, Real* product, int64_t stride) {
  constexpr int count = kTileRows * kTileVectors;
  static_assert(count % kLanes<Real> == 0);
  Vector<Real> sum[count];
  FWP_UNROLL for (int n = 0; n < count; ++n) sum[n] = Vector<Real>{};
  for (int64_t i = 0; i < width; i += kLanes<Real>) {
    Vector<Real> other[kTileVectors];
    FWP_UNROLL for (int s = 0; s < kTileVectors; ++s) other[s] = in_register<Real>(load(y[s] + i));
    FWP_UNROLL for (int t = 0; t < kTileRows; ++t) {
      const Vector<Real> own = in_register<Real>(load(x[t] + i));
      FWP_UNROLL for (int s = 0; s < kTileVectors; ++s) sum[t * kTileVectors + s] += own * other[s];
    }
  }
  Real result[count];
  FWP_UNROLL for (int n = 0; n < count; n += kLanes<Real>) {
    sum_lanes_of_each<Real>(sum + n);
    store(result + n, sum[n]);
  }
  FWP_UNROLL for (int t = 0; t < kTileRows; ++t)
    std::memcpy(product + t * stride, result + t * kTileVectors, kTileVectors * sizeof(Real));
}

// Rows of scratch are padded to whole vectors. Their stride is never a power of two: rows in the same cache set would
// evict each other.
template <typename Real>
FWP_INLINE int64_t padded(int64_t columns) {
  return round_up(columns, kLanes<Real>) + kLanes<Real>;
}

template <typename Real>
FWP_INLINE Tokens<Real> take(Real*& scratch, int64_t rows, int64_t columns) {
  const Tokens<Real> x{scratch, padded<Real>(columns)};
  scratch = address(scratch, rows * x.stride);
  return x;
}
// What has been taken from a scratch that began as null, only to count it.
template <typename Real>
int64_t numbers_taken(const Real* scratch) {
  return reinterpret_cast<uintptr_t>(scratch) / sizeof(Real);
}

template <typename Real>
FWP_INLINE Tokens<const Real> constant(Tokens<Real> x, int64_t column = 0) {
  return {x.data + column, x.stride};
}

template <typename Real>
FWP_INLINE Tokens<Real> from_row(Tokens<Real> x, int64_t row) {
  return {x[row], x.stride};
}

// Copy to scratch, zero-padded to whole vectors and tiles.
template <typename Real>
void copy(Tokens<const Real> x, int64_t rows, int64_t columns, Tokens<Real> to) {
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t i = 0; i < columns; i += kLanes<Real>) store(to[t] + i, load_part(x[t] + i, columns - i));
  for (int64_t t = rows; t < round_up(rows, kTileRows); ++t) std::memset(to[t], 0, to.stride * sizeof(Real));
}

// Sums of vectors for kTileRows tokens (or keys), on a panel of columns.
template <typename Real, int NV>
struct Tile {
  Group<Real, NV> row[kTileRows];

  FWP_INLINE void clear() {
    FWP_UNROLL for (int r = 0; r < kTileRows; ++r) row[r].clear();
  }
  // row[r] += (or -=) the sum of factor(s, r) x_s over begin <= s < end.
  template <bool subtract = false, typename F>
  FWP_INLINE void add(int64_t begin, int64_t end, Tokens<const Real> x, F factor) {
    for (int64_t s = begin; s < end; ++s) {
      Group<Real, NV> other;
      FWP_UNROLL for (int n = 0; n < NV; ++n) other.x[n] = in_register<Real>(load(x[s] + n * kLanes<Real>));
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r)
        subtract ? row[r].subtract(factor(s, r), other) : row[r].add(factor(s, r), other);
    }
  }
  // The same from s = 0 on, with partial sums like those of RowSums.
  template <typename F>
  FWP_INLINE void add_in_parts(int64_t end, Tokens<const Real> x, F factor) {
    for (int64_t begin = 0; begin < end; begin += kSumRows) {
      Tile part;
      part.clear();
      part.add(begin, std::min(end, begin + kSumRows), x, factor);
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r) row[r].add(1, part.row[r]);
    }
  }
  FWP_INLINE void store_to(Tokens<Real> x, int64_t rows, int64_t columns) const {
    FWP_UNROLL for (int r = 0; r < kTileRows; ++r)
      if (r < rows) row[r].store_to(x[r], columns);
  }
};

// Call f(first column, vectors) for panels of columns. A panel is `widest` vectors or one vector wide.
template <typename Real, int widest = kTileVectors, typename F>
FWP_INLINE void for_panels(int64_t columns, F f) {
  int64_t j = 0;
  for (; columns - j > (widest - 1) * kLanes<Real>; j += widest * kLanes<Real>) f(j, std::integral_constant<int, widest>{});
  for (; j < columns; j += kLanes<Real>) f(j, std::integral_constant<int, 1>{});
}

// product[i][j] = sum over t < length of x[t][i] y[t][j], for rows i and columns j.
template <typename Real>
void multiply_transposed(Tokens<Real> x, Tokens<Real> y, int64_t length, int64_t rows, int64_t columns, Tokens<Real> product) {
  for_panels<Real>(columns, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
    for (int64_t i = 0; i < rows; i += kTileRows) {
      Tile<Real, decltype(vectors)::value> sum;
      sum.clear();
      sum.add(0, length, constant(y, j),
              [&](int64_t t, int r) __attribute__((always_inline)) { return x[t][i + r]; });
      sum.store_to(from_row(product, i).from(j), rows - i, columns - j);
    }
  });
}

// product[t][i] = x_t . y_i, for t < length and the rows i of y; both have `width` columns. The padding is overwritten,
// too.
template <typename Real>
__attribute__((noinline)) void multiply_rows(Tokens<const Real> x, Tokens<Real> y, int64_t length, int64_t rows, int64_t width,
                                             Tokens<Real> product) {
  for (int64_t i = 0; i < rows; i += kTileVectors)
    for (int64_t t = 0; t < length; t += kTileRows)
      multiply_tile<Real>(from_row(x, t), constant(from_row(y, i)), width, product[t] + i, product.stride);
}

// Rows of a product of `vectors` vectors that are summed up together, in half of the registers.
constexpr int rows_of_product(int vectors) { return 4 * kPassTokens / vectors; }

// product[t] = the sum over i < n of x[t][i] y_i, for tiles of R rows from t on and NV vectors of columns, with partial
// sums like those of RowSums. Returns the first row that is left. Not inlined: in a larger function, GCC 12 kept y_i in
// memory, which took 1.6 times as long with AVX-512.
template <int R, int NV, typename Real>
__attribute__((noinline)) int64_t multiply_tiles(Tokens<const Real> x, int64_t t, int64_t rows, Tokens<const Real> y,
                                                 int64_t n, Tokens<Real> product) {
  for (; t + R <= rows; t += R)
    for (int64_t begin = 0; begin < n; begin += kSumRows) {
      const int64_t end = std::min(n, begin + kSumRows);
      const Real* own = x[t];
      Real* to = product[t];
      Vector<Real> sum[R][NV];
      FWP_UNROLL for (int r = 0; r < R; ++r) FWP_UNROLL for (int m = 0; m < NV; ++m) sum[r][m] = Vector<Real>{};
      for (int64_t i = begin; i < end; ++i) {
        Vector<Real> other[NV];
        FWP_UNROLL for (int m = 0; m < NV; ++m) other[m] = in_register<Real>(load(y[i] + m * kLanes<Real>));
        FWP_UNROLL for (int r = 0; r < R; ++r)
          FWP_UNROLL for (int m = 0; m < NV; ++m) sum[r][m] += own[r * x.stride + i] * other[m];
      }
      if (begin)
        FWP_UNROLL for (int r = 0; r < R; ++r)
          FWP_UNROLL for (int m = 0; m < NV; ++m) sum[r][m] += load(to + r * product.stride + m * kLanes<Real>);
      FWP_UNROLL for (int r = 0; r < R; ++r)
        FWP_UNROLL for (int m = 0; m < NV; ++m) store(to + r * product.stride + m * kLanes<Real>, sum[r][m]);
    }
  return t;
}

// The same for whole vectors of columns and all rows, in multiples of kTileRows.
template <typename Real>
void multiply_matrices(Tokens<const Real> x, int64_t rows, Tokens<const Real> y, int64_t n, int64_t columns,
                       Tokens<Real> product) {
  for_panels<Real, 2>(columns, [&](int64_t j, auto vectors) {
    constexpr int NV = decltype(vectors)::value;
    const int64_t t = multiply_tiles<rows_of_product(NV), NV, Real>(x, 0, rows, y.from(j), n, product.from(j));
    multiply_tiles<kTileRows, NV, Real>(x, t, rows, y.from(j), n, product.from(j));
  });
}

// Rows whose outer products x_s^T y_s are summed up.
template <typename Real>
struct Factors {
  Tokens<const Real> x, y;
};

// row_i = the sum over s < n of x_s[i] y_s, of several factors in turn, + scale[i] * column_scale * row_i, for tiles of R
// rows from i on and NV vectors of columns. Without `scale` the sum replaces the row. `copy` may be null. Calls fetch(i)
// for each tile. Not inlined, as above.
template <int R, int NV, bool kColumnScale, size_t kFactors, typename Real, typename Fetch>
__attribute__((noinline)) int64_t change_tiles(const std::array<Factors<Real>, kFactors>& factors, int64_t n,
                                               const Real* scale, const Real* column_scale, int64_t i, int64_t rows,
                                               Tokens<Real> row, Tokens<Real> copy, Fetch fetch) {
  for (; i + R <= rows; i += R) {
    fetch(i);
    Vector<Real> sum[R][NV];
    FWP_UNROLL for (int r = 0; r < R; ++r) FWP_UNROLL for (int m = 0; m < NV; ++m) sum[r][m] = Vector<Real>{};
    for (int64_t s = 0; s < n; ++s)
      FWP_UNROLL for (size_t p = 0; p < kFactors; ++p) {
        const Real *own = factors[p].x[s] + i, *y = factors[p].y[s];
        Vector<Real> other[NV];
        FWP_UNROLL for (int m = 0; m < NV; ++m) other[m] = in_register<Real>(load(y + m * kLanes<Real>));
        FWP_UNROLL for (int r = 0; r < R; ++r)
          FWP_UNROLL for (int m = 0; m < NV; ++m) sum[r][m] += own[r] * other[m];
      }
    Real* to = row[i];
    if (scale)
      FWP_UNROLL for (int r = 0; r < R; ++r)
        FWP_UNROLL for (int m = 0; m < NV; ++m) {
          Vector<Real> before = load(to + r * row.stride + m * kLanes<Real>);
          if constexpr (kColumnScale) before *= load(column_scale + m * kLanes<Real>);
          sum[r][m] += scale[i + r] * before;
        }
    FWP_UNROLL for (int r = 0; r < R; ++r)
      FWP_UNROLL for (int m = 0; m < NV; ++m) store(to + r * row.stride + m * kLanes<Real>, sum[r][m]);
    if (copy.data)
      FWP_UNROLL for (int r = 0; r < R; ++r)
        FWP_UNROLL for (int m = 0; m < NV; ++m) store(copy[i + r] + m * kLanes<Real>, sum[r][m]);
  }
  return i;
}

// Exchange lane i of x[n] and lane n of x[i], for kLanes vectors. Each step exchanges halves of pairs of vectors.
template <typename Real, int half = kLanes<Real> / 2>
FWP_INLINE void transpose_lanes(Vector<Real>* x) {
  FWP_UNROLL for (int n = 0; n < kLanes<Real>; ++n) {
    if (n & half) continue;
    const Vector<Real> a = x[n], b = x[n + half];
    x[n] = shuffle<Real>(a, b, [](int lane) { return lane & half ? kLanes<Real> + lane - half : lane; });
    x[n + half] = shuffle<Real>(a, b, [](int lane) { return lane & half ? kLanes<Real> + lane : lane + half; });
  }
  if constexpr (half > 1) transpose_lanes<Real, half / 2>(x);
}

// to[j][i] = x[i][j]. Both have whole vectors, and rows in multiples of kLanes.
template <typename Real>
void transpose(Tokens<Real> x, int64_t rows, int64_t columns, Tokens<Real> to) {
  for (int64_t i = 0; i < rows; i += kLanes<Real>)
    for (int64_t j = 0; j < columns; j += kLanes<Real>) {
      Vector<Real> part[kLanes<Real>];
      FWP_UNROLL for (int n = 0; n < kLanes<Real>; ++n) part[n] = load(x[i + n] + j);
      transpose_lanes<Real>(part);
      FWP_UNROLL for (int n = 0; n < kLanes<Real>; ++n) store(to[j + n] + i, part[n]);
    }
}

}  // namespace fwp
