// The delta rule on one block of columns: W_t = W_{t-1} + k_t^T beta_t (v_t - k_t W_{t-1}), out_t = q_t W_t.
// README.md derives the backward pass. Nothing is rewound and no state is kept: the errors e_t = v_t - k_t W_{t-1} of
// the forward pass rebuild W_t forwards, where the gradients of queries and keys need it.
#pragma once

#include <algorithm>

#include "state_block.h"

namespace fwp {

// x_s y_m for all m < s of a group. (Bounds are constants: GCC unrolls no triangular loop, and an array that is indexed
// by a variable lives in memory.)
template <int T, typename A>
struct Gram {
  A product[T][T];

  FWP_INLINE Gram(const A* const (&x)[T], const A* const (&y)[T], int64_t rows) {
    Vector<A> sum[T][T];
    FWP_UNROLL for (int s = 0; s < T; ++s)
      FWP_UNROLL for (int m = 0; m < T; ++m) sum[s][m] = Vector<A>{};
    int64_t i = 0;
    for (; i + kLanes<A> <= rows; i += kLanes<A>)
      FWP_UNROLL for (int s = 0; s < T; ++s)
        FWP_UNROLL for (int m = 0; m < T; ++m)
          if (m < s) sum[s][m] += load(x[s] + i) * load(y[m] + i);
    if (i < rows)
      FWP_UNROLL for (int s = 0; s < T; ++s)
        FWP_UNROLL for (int m = 0; m < T; ++m)
          if (m < s) sum[s][m] += load_part(x[s] + i, rows - i) * load_part(y[m] + i, rows - i);
    FWP_UNROLL for (int s = 0; s < T; ++s)
      FWP_UNROLL for (int m = 0; m < T; ++m)
        if (m < s) product[s][m] = sum_lanes<A>(sum[s][m]);
  }
};

// beta_s (x_s - sum over m < s of (k_s k_m) x_m): turn what the keys of a group find before any of them has written
// into what they write one after the other. `before` receives the bracket.
template <int T, typename A, int NV>
FWP_INLINE void solve_group(const Gram<T, A>& gram, const A (&rate)[T], Group<A, NV> (&x)[T],
                            Group<A, NV> (&before)[T]) {
  FWP_UNROLL for (int s = 0; s < T; ++s) {
    FWP_UNROLL for (int m = 0; m < T; ++m)
      if (m < s) x[s].subtract(gram.product[s][m], x[m]);
    before[s] = x[s];
    x[s].scale(rate[s]);
  }
}

// One pass a group of tokens: its writes, its reads, and what the keys of the next group find.
template <typename A, int NV>
struct DeltaForward {
  StateBlock<A, NV>& block;
  const int64_t length;
  Tokens<const A> q, k, v;
  Rates<const A> beta;
  Tokens<A> out, error;
  Group<A, NV> found[kTokens];  // k_s W, of the coming group's keys and the state before it

  // Pointers past the end repeat the last key: what it finds is not used.
  FWP_INLINE const A* key_at(int64_t t) const { return k[std::min(t, length - 1)]; }

  // What the first T keys find.
  template <int T>
  FWP_INLINE void start() {
    const A* key[T];
    RowSums<A, NV, T> first;
    FWP_UNROLL for (int s = 0; s < T; ++s) key[s] = key_at(s);
    block.read_rows([&](int64_t i, const Group<A, NV>& w) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) first.part[s].add(key[s][i], w);
    }, [&]() __attribute__((always_inline)) { first.settle(); });
    FWP_UNROLL for (int s = 0; s < T; ++s) found[s] = first.total[s];
  }

  template <int T, bool kLast>
  FWP_INLINE void run(int64_t t) {
    Group<A, NV> write[T], before[T];
    RowSums<A, NV, T> read;
    RowSums<A, NV, kTokens> next;
    const A *key[T], *query[T], *next_key[kTokens];
    A rate[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      key[s] = k[t + s];
      query[s] = q[t + s];
      rate[s] = beta[t + s];
      write[s].load_from(v[t + s], block.columns);
      write[s].add(A(-1), found[s]);
    }
    FWP_UNROLL for (int s = 0; s < kTokens; ++s) next_key[s] = key_at(t + T + s);
    solve_group(Gram<T, A>(key, key, block.rows), rate, write, before);
    FWP_UNROLL for (int s = 0; s < T; ++s) before[s].store_to(error[t + s], block.columns);
    block.change_rows(kLast, [&](int64_t i, Group<A, NV>& w) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        w.add(key[s][i], write[s]);
        read.part[s].add(query[s][i], w);
      }
      if constexpr (!kLast) FWP_UNROLL for (int s = 0; s < kTokens; ++s) next.part[s].add(next_key[s][i], w);
    }, [&]() __attribute__((always_inline)) {
      read.settle();
      if constexpr (!kLast) next.settle();
    });
    FWP_UNROLL for (int s = 0; s < T; ++s) read.total[s].store_to(out[t + s], block.columns);
    if constexpr (!kLast) FWP_UNROLL for (int s = 0; s < kTokens; ++s) found[s] = next.total[s];
  }
};

// In reverse over a block of value columns, with G the gradient of W: d_v_t = beta_t k_t G_t and d_beta_t. All token
// sequences arrive reversed. One pass a group of tokens: the part of d_v of the group before it, then its own reads.
template <typename A, int NV>
struct DeltaBackwardValues {
  StateBlock<A, NV>& block;
  Tokens<const A> q, k, d_out, error;
  Rates<const A> beta;
  Tokens<A> d_v;
  Rates<A> d_beta;  // of this block alone
  const A* late_key[kTokens];
  Group<A, NV> late[kTokens];  // d_v that have not reached G yet

  void start() {
    FWP_UNROLL for (int s = 0; s < kTokens; ++s) {
      late_key[s] = k.data;
      late[s].clear();
    }
  }

  template <int T, bool kLast>
  FWP_INLINE void run(int64_t t) {
    Group<A, NV> d_read[T], d_write[T], earlier[kTokens];
    RowSums<A, NV, T> d_value_sums;
    auto& d_value = d_value_sums.total;
    const A *key[T], *query[T], *earlier_key[kTokens];
    A rate[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      key[s] = k[t + s];
      query[s] = q[t + s];
      rate[s] = beta[t + s];
      d_read[s].load_from(d_out[t + s], block.columns);
    }
    FWP_UNROLL for (int s = 0; s < kTokens; ++s) {
      earlier_key[s] = late_key[s];
      earlier[s] = late[s];
    }
    const Gram<T, A> gram(key, key, block.rows);
    block.change_rows(false, [&](int64_t i, Group<A, NV>& g) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < kTokens; ++s) g.subtract(earlier_key[s][i], earlier[s]);
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        g.add(query[s][i], d_read[s]);
        d_value_sums.part[s].add(key[s][i], g);
      }
    }, [&]() __attribute__((always_inline)) { d_value_sums.settle(); });
    solve_group(gram, rate, d_value, d_write);
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      d_value[s].store_to(d_v[t + s], block.columns);
      late_key[s] = key[s];
      late[s] = d_value[s];
      Group<A, NV> e;
      e.load_from(error[t + s], block.columns);
      Vector<A> sum = {};
      FWP_UNROLL for (int n = 0; n < NV; ++n) sum += e.x[n] * d_write[s].x[n];
      d_beta[t + s] = sum_lanes<A>(sum);
    }
    FWP_UNROLL for (int s = T; s < kTokens; ++s) late[s].clear();
  }

  // The gradient of the initial state, where it is wanted.
  void finish() {
    block.change_rows(true, [&](int64_t i, Group<A, NV>& g) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < kTokens; ++s) g.subtract(late_key[s][i], late[s]);
    }, [] {});
  }
};

// Forwards over a block of key columns of W^T: d_q_t = d_out_t W_t^T and the first half of d_k_t, -d_v_t W_{t-1}^T.
// W is rebuilt from the errors by the very operations of the forward pass, in their order, and so to the last bit. That
// is needed: rounding errors that differ from those of the forward pass are not corrected here, as they are there, and
// after thousands of tokens their sum would be larger than all others.
template <typename A, int NV>
struct DeltaBackwardQueries {
  StateBlock<A, NV>& block;
  Tokens<const A> k, d_out, error, d_v;
  Rates<const A> beta;
  Tokens<A> d_q, d_k;
  A* scratch;  // kTokens x rows

  template <int T, bool kLast>
  FWP_INLINE void run(int64_t t) {
    Group<A, NV> key[T];
    RowSums<A, NV, T> d_query, d_key;
    const A *write[T], *d_read[T], *d_value[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      key[s].load_from(k[t + s], block.columns);
      write[s] = scratch + s * block.rows;
      d_read[s] = d_out[t + s];
      d_value[s] = d_v[t + s];
      const A* e = error[t + s];
      const A rate = beta[t + s];
      for (int64_t j = 0; j < block.rows; ++j) scratch[s * block.rows + j] = rate * e[j];
    }
    block.change_rows(kLast, [&](int64_t j, Group<A, NV>& w) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        d_key.part[s].subtract(d_value[s][j], w);
        w.add(write[s][j], key[s]);
        d_query.part[s].add(d_read[s][j], w);
      }
    }, [&]() __attribute__((always_inline)) {
      d_query.settle();
      d_key.settle();
    });
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      d_query.total[s].store_to(d_q[t + s], block.columns);
      d_key.total[s].store_to(d_k[t + s], block.columns);
    }
  }
};

// In reverse over a block of key columns of G^T: the second half of d_k_t, beta_t e_t G_t^T. Sequences arrive reversed.
// G is rebuilt to the last bit as well. So the d_v of a group reach it after all reads of the group, as they do in
// DeltaBackwardValues, and their part in the reads is made up for afterwards.
template <typename A, int NV>
struct DeltaBackwardKeys {
  StateBlock<A, NV>& block;
  Tokens<const A> q, k, d_out, error, d_v;
  Rates<const A> beta;
  Tokens<A> d_k;

  template <int T, bool kLast>
  FWP_INLINE void run(int64_t t) {
    Group<A, NV> query[T], key[T];
    RowSums<A, NV, T> d_key_sums;
    auto& d_key = d_key_sums.total;
    const A *e[T], *d_read[T], *d_value[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      query[s].load_from(q[t + s], block.columns);
      key[s].load_from(k[t + s], block.columns);
      e[s] = error[t + s];
      d_read[s] = d_out[t + s];
      d_value[s] = d_v[t + s];
    }
    const Gram<T, A> gram(e, d_value, block.rows);
    block.change_rows(kLast, [&](int64_t j, Group<A, NV>& g) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        g.add(d_read[s][j], query[s]);
        d_key_sums.part[s].add(e[s][j], g);
      }
      FWP_UNROLL for (int s = 0; s < T; ++s) g.subtract(d_value[s][j], key[s]);
    }, [&]() __attribute__((always_inline)) { d_key_sums.settle(); });
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      FWP_UNROLL for (int m = 0; m < T; ++m)
        if (m < s) d_key[s].subtract(gram.product[s][m], key[m]);
      Group<A, NV> d_first;
      d_first.load_from(d_k[t + s], block.columns);
      d_first.add(beta[t + s], d_key[s]);
      d_first.store_to(d_k[t + s], block.columns);
    }
  }
};

}  // namespace fwp
