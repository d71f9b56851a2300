// What rules that run token by token are made of: products of a vector and a matrix, and softmax. Rows are padded to vectors.
#pragma once

#include "../rule.h"
#include "rows.h"
#include "tile.h"

namespace fwp {

// to = from + the sum over i of x_i y_i, for rows y_i of `columns` numbers.
template <typename Real>
void multiply(const Real* x, Tokens<Real> y, int64_t rows, int64_t columns, const Real* from, Real* to) {
  for_panels<Real, 4>(columns, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
    constexpr int NV = decltype(vectors)::value;
    Vector<Real> sum[NV];
    FWP_UNROLL for (int n = 0; n < NV; ++n) sum[n] = from ? load(from + j + n * kLanes<Real>) : Vector<Real>{};
    for (int64_t i = 0; i < rows; ++i)
      FWP_UNROLL for (int n = 0; n < NV; ++n) sum[n] += x[i] * load(y[i] + j + n * kLanes<Real>);
    FWP_UNROLL for (int n = 0; n < NV; ++n) store(to + j + n * kLanes<Real>, sum[n]);
  });
}

template <typename Real>
void softmax(const Real* x, int64_t d, Real* to) {
  const Real most = *std::max_element(x, x + d);
  const Real sum = sum_over<Real>(d, [&](int64_t i, int64_t left) {
    const Vector<Real> part = exponential(load_part(x + i, left) - most);
    store_part(to + i, part, left);
    return left >= kLanes<Real> ? part : load_part(to + i, left);
  });
  const Real share = 1 / sum;
  for (int64_t i = 0; i < d; ++i) to[i] *= share;
}
template <typename Real>
void through_softmax(const Real* y, const Real* d_y, int64_t d, Real* d_x) {
  Real product = 0;
  for (int64_t i = 0; i < d; ++i) product += y[i] * d_y[i];
  for (int64_t i = 0; i < d; ++i) d_x[i] = y[i] * (d_y[i] - product);
}

}  // namespace fwp
