// The delta rule on one block of columns. ../cpu.md derives the backward pass. It stores no states and undoes no
// writes. The gradients of queries and keys need W_t, which the saved errors e_t rebuild, in forward order.
#pragma once

#include <algorithm>

#include "state_block.h"

namespace fwp {

// The kFewRows of these passes.
constexpr int64_t kDeltaFewRows = 16;

// The products k_s . k_m for all m < s of a group. The loops have constant bounds: GCC does not unroll triangular
// loops, and an array with a variable index is kept in memory.
template <int T, typename Real>
struct Gram {
  Real product[T][T];

  Gram() = default;

  FWP_INLINE Gram(const Real* const (&key)[T], int64_t rows) {
    Vector<Real> sum[T][T];
    FWP_UNROLL for (int s = 0; s < T; ++s)
      FWP_UNROLL for (int m = 0; m < T; ++m) sum[s][m] = Vector<Real>{};
    int64_t i = 0;
    for (; i + kLanes<Real> <= rows; i += kLanes<Real>)
      FWP_UNROLL for (int s = 0; s < T; ++s)
        FWP_UNROLL for (int m = 0; m < T; ++m)
          if (m < s) sum[s][m] += load(key[s] + i) * load(key[m] + i);
    if (i < rows)
      FWP_UNROLL for (int s = 0; s < T; ++s)
        FWP_UNROLL for (int m = 0; m < T; ++m)
          if (m < s) sum[s][m] += load_part(key[s] + i, rows - i) * load_part(key[m] + i, rows - i);
    FWP_UNROLL for (int s = 0; s < T; ++s)
      FWP_UNROLL for (int m = 0; m < T; ++m)
        if (m < s) product[s][m] = sum_lanes<Real>(sum[s][m]);
  }
};

// Compute b_s (x_s - sum over m < s of (k_s . k_m) x_m). This turns retrieved values of a group, all read before its
// first write, into its sequential writes. `before` receives the bracket.
template <int T, int kGroup, typename Real, int NV>
FWP_INLINE void solve_group(const Gram<kGroup, Real>& gram, const Real (&b)[T], Group<Real, NV> (&x)[T],
                            Group<Real, NV> (&before)[T]) {
  FWP_UNROLL for (int s = 0; s < T; ++s) {
    FWP_UNROLL for (int m = 0; m < T; ++m)
      if (m < s) x[s].subtract(gram.product[s][m], x[m]);
    before[s] = x[s];
    x[s].scale(b[s]);
  }
}

// One pass per group of tokens: its writes, its reads, and the values that the keys of the next group retrieve.
//
//     for t in range(L):
//         e[t] = v[t] - k[t] @ W
//         W += outer(k[t], b[t] * e[t])
//         out[t] = q[t] @ W
template <typename Real, int NV>
struct DeltaForward {
  static constexpr int kGroup = kDeltaTokens;

  StateBlock<Real, NV>& block;
  const int64_t length;
  Tokens<const Real> q, k, v;
  Rates<const Real> rate;
  Tokens<Real> out, error;
  // For the keys of the next group: k_s W with the state before that group, and their products. They are computed one
  // pass ahead: in the same pass, the first row had to wait for them, which took 5 % of the time.
  Group<Real, NV> found[kGroup] = {};
  Gram<kGroup, Real> gram = {};

  // A pointer past the end repeats the last key. Its retrieved value is not used.
  FWP_INLINE const Real* key_at(int64_t t) const { return k[std::min(t, length - 1)]; }

  // Compute the values that the first T keys retrieve.
  template <int T>
  FWP_INLINE void start() {
    const Real* key[T];
    RowSums<Real, NV, T> sums(block.rows);
    FWP_UNROLL for (int s = 0; s < T; ++s) key[s] = key_at(s);
    block.read_rows([&](int64_t i, const Group<Real, NV>& w) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) sums.total[s].add(key[s][i], w);
    }, [&]() __attribute__((always_inline)) { sums.settle(); });
    sums.finish();
    FWP_UNROLL for (int s = 0; s < T; ++s) found[s] = sums.total[s];
    if constexpr (T == kGroup) gram = Gram<kGroup, Real>(key, block.rows);
  }

  template <int T, bool kLast>
  FWP_INLINE void run(int64_t t) {
    Group<Real, NV> write[T], before[T];
    RowSums<Real, NV, T> read(block.rows);
    RowSums<Real, NV, kGroup> next(block.rows);
    const Real *key[T], *query[T], *next_key[kGroup];
    Real b[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      key[s] = k[t + s];
      query[s] = q[t + s];
      b[s] = rate[t + s];
      write[s].load_from(v[t + s], block.columns);
      write[s].add(Real(-1), found[s]);
    }
    FWP_UNROLL for (int s = 0; s < kGroup; ++s) next_key[s] = key_at(t + T + s);
    solve_group(gram, b, write, before);
    if constexpr (!kLast) gram = Gram<kGroup, Real>(next_key, block.rows);
    FWP_UNROLL for (int s = 0; s < T; ++s) before[s].store_to(error[t + s], block.columns);
    const Ahead<Real, T, 5> ahead(!kLast && block.rows > kDeltaFewRows, t + kTokensAhead, q, k, v, out, error);
    block.change_rows(kLast, ahead, [&](int64_t i, Group<Real, NV>& w) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        w.add(key[s][i], write[s]);
        read.total[s].add(query[s][i], w);
      }
      if constexpr (!kLast) FWP_UNROLL for (int s = 0; s < kGroup; ++s) next.total[s].add(next_key[s][i], w);
    }, [&]() __attribute__((always_inline)) {
      read.settle();
      if constexpr (!kLast) next.settle();
    });
    read.finish();
    if constexpr (!kLast) next.finish();
    FWP_UNROLL for (int s = 0; s < T; ++s) read.total[s].store_to(out[t + s], block.columns);
    if constexpr (!kLast) FWP_UNROLL for (int s = 0; s < kGroup; ++s) found[s] = next.total[s];
  }
};

// In reverse over a block of value columns, with the first half of d_k. All token sequences are passed in reverse.
//
//     for t in reversed(range(L)):
//         G += outer(q[t], d_out[t])
//         d_v[t] = b[t] * (k[t] @ G)
//         d_b[t] = k[t] @ G @ e[t]
//         d_k[t] = b[t] * (G @ e[t])
//         G -= outer(k[t], d_v[t])
//
// There is one pass per group of tokens. It adds the d_v terms of the previous group to G, then does the reads of its
// own group. The d_v of a group are added to G after all its reads, and a correction follows for these reads.
template <typename Real, int NV>
struct DeltaBackwardWrites {
  static constexpr int kGroup = kDeltaTokens, kHalf = kLanes<Real> / 2;

  StateBlock<Real, NV>& block;
  Tokens<const Real> q, k, d_out, error;
  Rates<const Real> rate;
  Tokens<Real> d_k, d_v;
  Rates<Real> d_rate;
  const bool add;  // whether to add to d_k and d_rate (other columns came before)
  Real* products;  // per row i a vector; its halves sum to e_s G_i^T for the two tokens s of a group
  const Real* late_key[kGroup];
  Group<Real, NV> late[kGroup];  // d_v that are not yet added to G

  static int64_t products_size(int64_t rows) { return round_up(rows, kLanes<Real>) * kLanes<Real>; }

  void start() {
    FWP_UNROLL for (int s = 0; s < kGroup; ++s) {
      late_key[s] = k.data;
      late[s].clear();
    }
  }

  template <int T>
  FWP_INLINE void run(int64_t t, bool is_last) {
    Group<Real, NV> d_read[T], d_write[T], error_of[T], earlier[kGroup];
    RowSums<Real, NV, T> d_value_sums(block.rows);
    auto& d_value = d_value_sums.total;
    const Real *key[T], *query[T], *earlier_key[kGroup];
    Real b[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      key[s] = k[t + s];
      query[s] = q[t + s];
      b[s] = rate[t + s];
      d_read[s].load_from(d_out[t + s], block.columns);
      error_of[s].load_from(error[t + s], block.columns);
    }
    FWP_UNROLL for (int s = 0; s < kGroup; ++s) {
      earlier_key[s] = late_key[s];
      earlier[s] = late[s];
    }
    const Gram<T, Real> gram(key, block.rows);
    const Ahead<Real, T, 6> ahead(!is_last && block.rows > kDeltaFewRows, t + kTokensAhead, q, k, d_k, d_out, error, d_v);
    block.change_rows(false, ahead, [&](int64_t i, Group<Real, NV>& g) __attribute__((always_inline)) {
      Vector<Real> product[kGroup] = {};
      FWP_UNROLL for (int s = 0; s < kGroup; ++s) g.subtract(earlier_key[s][i], earlier[s]);
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        g.add(query[s][i], d_read[s]);
        d_value_sums.total[s].add(key[s][i], g);
        product[s] = multiply_lanes(error_of[s], g);
      }
      // The first step of the sum is done here, so one vector per row is stored instead of two.
      store(products + i * kLanes<Real>, sum_runs<kHalf, Real>(product[0], product[1]));
    }, [&]() __attribute__((always_inline)) { d_value_sums.settle(); });
    d_value_sums.finish();
    solve_group(gram, b, d_value, d_write);
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      d_value[s].store_to(d_v[t + s], block.columns);
      late_key[s] = key[s];
      late[s] = d_value[s];
      d_rate[t + s] = sum_lanes<Real>(multiply_lanes(error_of[s], d_write[s])) + (add ? d_rate[t + s] : 0);
    }
    FWP_UNROLL for (int s = T; s < kGroup; ++s) late[s].clear();
    store_d_keys(t, error_of, d_value, key, b);
  }

  // Store the gradient of the initial state, if it is needed.
  void finish() {
    block.change_rows_last([&](int64_t i, Group<Real, NV>& g) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < kGroup; ++s) g.subtract(late_key[s][i], late[s]);
    });
  }

 private:
  // d_k_s = b_s (e_s G^T - sum over m < s of (e_s . d_v_m) k_m), with G after the reads of the group.
  template <int T>
  FWP_INLINE void store_d_keys(int64_t t, const Group<Real, NV> (&error_of)[T], const Group<Real, NV> (&d_value)[T],
                               const Real* const (&key)[T], const Real (&b)[T]) {
    static_assert(kGroup == 2);
    const Real late_part = T == 2 ? sum_lanes<Real>(multiply_lanes(error_of[T - 1], d_value[0])) : 0;
    for (int64_t i = 0; i < block.rows; i += kLanes<Real>) {
      const int64_t rows = block.rows - i;
      Vector<Real> sum[kLanes<Real>];  // one for each of the two tokens, for half as many rows
      FWP_UNROLL for (int r = 0; r < kLanes<Real>; ++r) sum[r] = in_register<Real>(load(products + (i + r) * kLanes<Real>));
      sum_lanes_of_each<Real, kHalf / 2>(sum);
      sum_lanes_of_each<Real, kHalf / 2>(sum + kHalf);
      Vector<Real> d_key[] = {join_halves<false, Real>(sum[0], sum[kHalf]), join_halves<true, Real>(sum[0], sum[kHalf])};
      d_key[1] -= late_part * load_part(key[0] + i, rows);
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        d_key[s] *= b[s];
        if (add) d_key[s] += load_part(d_k[t + s] + i, rows);
        store_part(d_k[t + s] + i, d_key[s], rows);
      }
    }
  }
};

// In forward order over a block of key columns of W^T, with the second half of d_k.
//
//     for t in range(L):
//         d_k[t] -= W @ d_v[t]
//         W += outer(k[t], b[t] * e[t])
//         d_q[t] = W @ d_out[t]
//
// W is rebuilt from the errors with exactly the operations of the forward pass, in the same order, so to the
// last bit. This is necessary: the forward pass corrects its rounding errors, but this pass does not correct different
// ones. After thousands of tokens their sum would exceed all other errors.
template <typename Real, int NV>
struct DeltaBackwardReads {
  // All reads and writes are known in advance. So the number of tokens per pass changes no bit.
  static constexpr int kGroup = NV == 1 ? kPassTokens : kDeltaTokens;

  StateBlock<Real, NV>& block;
  Tokens<const Real> k, d_out, error, d_v;
  Rates<const Real> rate;
  Tokens<Real> d_q, d_k;
  Real* scratch;  // kGroup x rows

  template <int T>
  FWP_INLINE void run(int64_t t, bool is_last) {
    Group<Real, NV> key[T];
    RowSums<Real, NV, T> d_query(block.rows), d_key(block.rows);
    const Real *write[T], *d_read[T], *d_value[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      key[s].load_from(k[t + s], block.columns);
      write[s] = scratch + s * block.rows;
      d_read[s] = d_out[t + s];
      d_value[s] = d_v[t + s];
      const Real* e = error[t + s];
      const Real b = rate[t + s];
      for (int64_t j = 0; j < block.rows; ++j) scratch[s * block.rows + j] = b * e[j];
    }
    const Ahead<Real, T, 6> ahead(!is_last && block.rows > kDeltaFewRows, t + kTokensAhead, d_out, error, d_v, k, d_q, d_k);
    block.change_rows(is_last, ahead, [&](int64_t j, Group<Real, NV>& w) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        d_key.total[s].subtract(d_value[s][j], w);
        w.add(write[s][j], key[s]);
        d_query.total[s].add(d_read[s][j], w);
      }
    }, [&]() __attribute__((always_inline)) {
      d_query.settle();
      d_key.settle();
    });
    d_query.finish();
    d_key.finish();
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      d_query.total[s].store_to(d_q[t + s], block.columns);
      Group<Real, NV> d_first;
      d_first.load_from(d_k[t + s], block.columns);
      d_key.total[s].add(1, d_first);
      d_key.total[s].store_to(d_k[t + s], block.columns);
    }
  }
};

}  // namespace fwp
