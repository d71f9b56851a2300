// The delta rule on a square state of as many rows as a vector has lanes (16 with AVX-512, the small language models of
// Schlag et al. 2021): it stays in registers over all tokens, so that no token shares a pass with another one, and what
// that takes to make up for falls away. delta.h says what the three passes do.
#pragma once

#include <algorithm>

#include "state_block.h"

namespace fwp {

template <typename A>
struct Square {
  static constexpr int kRows = kLanes<A>;
  Vector<A> row[kRows];

  explicit FWP_INLINE Square(const StateBlock<A, 1>& block) {
    // Through memory: an array that is indexed by a variable lives there.
    Vector<A> given[kRows];
    block.read_rows([&](int64_t i, const Group<A, 1>& w) __attribute__((always_inline)) { given[i] = w.x[0]; }, [] {});
    FWP_UNROLL for (int i = 0; i < kRows; ++i) row[i] = given[i];
  }
  FWP_INLINE void store_to(StateBlock<A, 1>& block) const {
    Vector<A> result[kRows];
    FWP_UNROLL for (int i = 0; i < kRows; ++i) result[i] = row[i];
    block.change_rows(true, [&](int64_t i, Group<A, 1>& w) __attribute__((always_inline)) { w.x[0] = result[i]; }, [] {});
  }
  // += x^T y
  FWP_INLINE void add(const A* x, Vector<A> y) {
    FWP_UNROLL for (int i = 0; i < kRows; ++i) row[i] += x[i] * y;
  }
  FWP_INLINE void subtract(const A* x, Vector<A> y) {
    FWP_UNROLL for (int i = 0; i < kRows; ++i) row[i] -= x[i] * y;
  }
  // x times this, in four running sums: one would make every row wait for the one before it.
  FWP_INLINE Vector<A> read(const A* x) const {
    constexpr int kSums = kRows < 4 ? kRows : 4;
    Vector<A> sum[kSums];
    FWP_UNROLL for (int i = 0; i < kSums; ++i) sum[i] = x[i] * row[i];
    FWP_UNROLL for (int i = kSums; i < kRows; ++i) sum[i % kSums] += x[i] * row[i];
    if constexpr (kSums == 4) return (sum[0] + sum[1]) + (sum[2] + sum[3]);
    return sum[0] + sum[1];
  }
  // This times y^T: lane i is row i times y.
  FWP_INLINE Vector<A> multiply(Vector<A> y) const { return fold<1>(0, y); }

 private:
  // As sum_lanes_of_each, but one pair after the other, for which there are registers.
  template <int half>
  FWP_INLINE Vector<A> fold(int n, Vector<A> y) const {
    if constexpr (half == kRows)
      return row[n] * y;
    else
      return sum_runs<half, A>(fold<2 * half>(n, y), fold<2 * half>(n + half, y));
  }
};

template <typename A>
FWP_INLINE A multiply(const A* x, const A* y) {
  return sum_lanes<A>(load(x) * load(y));
}

template <typename A>
struct DeltaForwardSquare {
  StateBlock<A, 1>& block;
  const int64_t length;
  Tokens<const A> q, k, v;
  Rates<const A> beta;
  Tokens<A> out, error;

  // Each key reads the state before the last write, which is made up for: it would have to wait for all of that write.
  FWP_INLINE void run() const {
    Square<A> state(block);
    if (length == 0) return;
    Vector<A> e = load(v[0]) - state.read(k[0]);
    for (int64_t t = 0; t < length; ++t) {
      const int64_t next = std::min(t + 1, length - 1);
      const Vector<A> write = beta[t] * e;
      store(error[t], e);
      e = (load(v[next]) - state.read(k[next])) - multiply(k[next], k[t]) * write;
      state.add(k[t], write);
      store(out[t], state.read(q[t]));
    }
    state.store_to(block);
  }
};

// All token sequences arrive reversed.
template <typename A>
struct DeltaBackwardWritesSquare {
  StateBlock<A, 1>& block;
  const int64_t length;
  Tokens<const A> q, k, d_out, error;
  Rates<const A> beta;
  Tokens<A> d_k, d_v;
  Rates<A> d_beta;

  void run() const {
    Square<A> gradient(block);
    for (int64_t t = 0; t < length; ++t) {
      const Vector<A> e = load(error[t]);
      gradient.add(q[t], load(d_out[t]));
      const Vector<A> d_write = gradient.read(k[t]), d_value = beta[t] * d_write;
      store(d_v[t], d_value);
      d_beta[t] = sum_lanes<A>(e * d_write);
      store(d_k[t], beta[t] * gradient.multiply(e));
      gradient.subtract(k[t], d_value);
    }
    gradient.store_to(block);
  }
};

template <typename A>
struct DeltaBackwardReadsSquare {
  const StateBlock<A, 1>& block;
  const int64_t length;
  Tokens<const A> k, d_out, error, d_v;
  Rates<const A> beta;
  Tokens<A> d_q, d_k;

  void run() const {
    Square<A> state(block);
    for (int64_t t = 0; t < length; ++t) {
      alignas(kVectorBytes) A write[kLanes<A>];
      store(write, beta[t] * load(error[t]));
      store(d_k[t], load(d_k[t]) - state.read(d_v[t]));
      state.add(write, load(k[t]));
      store(d_q[t], state.read(d_out[t]));
    }
  }
};

}  // namespace fwp
