// What rules that run token by token are made of: products of a vector and a matrix, and softmax. Rows are padded to vectors.
#pragma once

#include "../rule.h"
#include "rows.h"
#include "tile.h"

namespace fwp {

// to = from + the sum over i of x_i y_i, for rows y_i of `columns` numbers.
template <typename A>
void multiply(const A* x, Tokens<A> y, int64_t rows, int64_t columns, const A* from, A* to) {
  for_panels<A, 4>(columns, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
    constexpr int NV = decltype(vectors)::value;
    Vector<A> sum[NV];
    FWP_UNROLL for (int n = 0; n < NV; ++n) sum[n] = from ? load(from + j + n * kLanes<A>) : Vector<A>{};
    for (int64_t i = 0; i < rows; ++i)
      FWP_UNROLL for (int n = 0; n < NV; ++n) sum[n] += x[i] * load(y[i] + j + n * kLanes<A>);
    FWP_UNROLL for (int n = 0; n < NV; ++n) store(to + j + n * kLanes<A>, sum[n]);
  });
}

template <typename A>
void softmax(const A* x, int64_t d, A* to) {
  const A most = *std::max_element(x, x + d);
  const A sum = sum_over<A>(d, [&](int64_t i, int64_t left) {
    const Vector<A> part = exponential(load_part(x + i, left) - most);
    store_part(to + i, part, left);
    return left >= kLanes<A> ? part : load_part(to + i, left);
  });
  const A share = 1 / sum;
  for (int64_t i = 0; i < d; ++i) to[i] *= share;
}
template <typename A>
void through_softmax(const A* y, const A* d_y, int64_t d, A* d_x) {
  A product = 0;
  for (int64_t i = 0; i < d; ++i) product += y[i] * d_y[i];
  for (int64_t i = 0; i < d; ++i) d_x[i] = y[i] * (d_y[i] - product);
}

}  // namespace fwp
