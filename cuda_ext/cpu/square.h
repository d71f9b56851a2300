// A square state with as many rows as a vector has lanes: 16 with AVX-512, as in the small language models of Schlag et
// al. 2021. It stays in registers for all tokens. So tokens do not share passes, and the corrections within a group are
// not needed.
#pragma once

#include "state_block.h"

namespace fwp {

// Lane i is the sum of the lanes of part(i). Unlike sum_lanes_of_each, it combines one pair at a time, which needs
// fewer registers.
template <typename Real, int half = 1, typename F>
FWP_INLINE Vector<Real> sum_lanes_in_turn(F part, int i = 0) {
  if constexpr (half == kLanes<Real>)
    return part(i);
  else
    return sum_runs<half, Real>(sum_lanes_in_turn<Real, 2 * half>(part, i), sum_lanes_in_turn<Real, 2 * half>(part, i + half));
}

// The sum of part(i) over all i, in four running sums. In a single sum, each part would wait for the previous one.
template <typename Real, typename F>
FWP_INLINE Vector<Real> sum_in_turn(F part) {
  constexpr int kSums = kLanes<Real> < 4 ? kLanes<Real> : 4;
  Vector<Real> sum[kSums];
  FWP_UNROLL for (int i = 0; i < kSums; ++i) sum[i] = part(i);
  FWP_UNROLL for (int i = kSums; i < kLanes<Real>; ++i) sum[i % kSums] += part(i);
  if constexpr (kSums == 4) return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  return sum[0] + sum[1];
}

template <typename Real>
struct Square {
  static constexpr int kRows = kLanes<Real>;
  Vector<Real> row[kRows];

  explicit FWP_INLINE Square(const StateBlock<Real, 1>& block) {
    // Through memory, because an array with a variable index is kept there.
    Vector<Real> given[kRows];
    block.read_rows([&](int64_t i, const Group<Real, 1>& w) __attribute__((always_inline)) { given[i] = w.x[0]; }, [] {});
    FWP_UNROLL for (int i = 0; i < kRows; ++i) row[i] = given[i];
  }
  FWP_INLINE void store_to(StateBlock<Real, 1>& block) const {
    Vector<Real> result[kRows];
    FWP_UNROLL for (int i = 0; i < kRows; ++i) result[i] = row[i];
    block.change_rows_last([&](int64_t i, Group<Real, 1>& w) __attribute__((always_inline)) { w.x[0] = result[i]; });
  }
  FWP_INLINE Real* store_to(Real* p) const {  // returns the end of the written numbers
    FWP_UNROLL for (int i = 0; i < kRows; ++i) store(p + i * kRows, row[i]);
    return p + kRows * kRows;
  }
  FWP_INLINE void store_to(const Matrix<Real>& m) const {
    if (!m.data) return;
    Real result[kRows * kRows];
    store_to(result);
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kRows; ++j) m.data[i * m.row_stride + j * m.column_stride] = result[i * kRows + j];
  }
  // += x^T y
  FWP_INLINE void add(const Real* x, Vector<Real> y) {
    FWP_UNROLL for (int i = 0; i < kRows; ++i) row[i] += x[i] * y;
  }
  FWP_INLINE void subtract(const Real* x, Vector<Real> y) {
    FWP_UNROLL for (int i = 0; i < kRows; ++i) row[i] -= x[i] * y;
  }
  // x times this matrix.
  FWP_INLINE Vector<Real> read(const Real* x) const {
    return sum_in_turn<Real>([&](int i) __attribute__((always_inline)) { return x[i] * row[i]; });
  }
  // This matrix times y^T: lane i is row i times y.
  FWP_INLINE Vector<Real> multiply(Vector<Real> y) const {
    return sum_lanes_in_turn<Real>([&](int i) __attribute__((always_inline)) { return row[i] * y; });
  }
};

}  // namespace fwp
