// Rules that forget, on one block of columns. ../rule.h has the symbols.
// ../cpu.md derives the backward pass. Forgetting cannot be undone. So the forward pass keeps the state after every
// kKeptEvery tokens, and the backward pass rebuilds the states in between, a few rows at a time.
#pragma once

#include <algorithm>

#include "../rule.h"
#include "state_block.h"

namespace fwp {

template <Fades fades_, Erases erases_>
struct Kind {
  static constexpr Fades fades = fades_;
  static constexpr Erases erases = erases_;
  static constexpr bool retrieves = erases != Erases::kNothing;
  static_assert(fades != Fades::kNothing);
};

// The tokens of one head, from some column on. A member that a rule does not have is null; `rate` may be null, too.
template <typename Real, typename Vectors = Tokens<const Real>>
struct ForgetTokens {
  Vectors q, k, v;
  Vectors key_decay, value_decay;
  Rates<const Real> head_decay;  // replaces both
  Rates<const Real> rate;        // of the write
  Vectors removal, removal_key;  // the key that is written with, and the key that retrieves

  FWP_INLINE Real rate_at(int64_t t) const { return rate.data ? rate[t] : 1; }
  ForgetTokens reversed(int64_t length) const {
    return {.q = q.reversed(length),
            .k = k.reversed(length),
            .v = v.reversed(length),
            .key_decay = key_decay.reversed(length),
            .value_decay = value_decay.reversed(length),
            .head_decay = head_decay.reversed(length),
            .rate = rate.reversed(length),
            .removal = removal.reversed(length),
            .removal_key = removal_key.reversed(length)};
  }
};

template <typename Real, typename Vectors = Tokens<Real>>
struct ForgetGradients {  // null like ForgetTokens
  Vectors q, k, v, key_decay, value_decay;
  Rates<Real> head_decay, rate;
  Vectors removal, removal_key;
};

// One pass per group of tokens: decays and writes, then reads. Rules that retrieve also read for the next two tokens.
// With decays a, and y = k if the key erases, token 0 retrieves (y_0 * a_0) W and token 1 (y_1 * a_1 * a_0) W. For a
// removal the last decay is left out. Both read W, with keys multiplied by the decays. Products of keys then add what token 0
// writes.
//
//     for t in range(L):
//         before[t], r[t] = W, y[t] @ W                      # r: of a removal; of `before`, every kKeptEvery-th is kept
//         W = outer(a[t], z[t]) * W
//         e[t] = v[t] - k[t] @ W if erases else v[t]
//         W = W + outer(k[t], b[t] * e[t]) - outer(x[t], r[t])
//         out[t] = q[t] @ W
template <typename Real, int NV, typename K>
struct ForgetForward {
  static constexpr int kGroup = K::retrieves ? kDeltaTokens : NV == 4 ? 2 : kPassTokens;  // limited by registers
  static_assert(!K::retrieves || kGroup == 2);

  StateBlock<Real, NV>& block;
  const ForgetTokens<Real> in;
  Tokens<Real> out, retrieved;
  Tokens<Real> kept;  // rows of the state kKeptEvery tokens after `first`; may be null
  Real* scratch;      // 2 x rows
  int64_t first = 0, last = 0;  // the tokens up to the next kept state; run() counts from the first
  // For the next group: what its keys retrieve from the state before it, and the products of its second key with the
  // keys that the first token writes with.
  Group<Real, NV> found[2] = {};
  Real with_key = 0, with_removal = 0;

  void run_tokens(int64_t length) {
    for (first = 0; first < length; first += kKeptEvery) {
      last = std::min(first + kKeptEvery, length) - 1;
      if constexpr (K::retrieves) {
        start();
        for_token_groups<kGroup>(last + 1 - first, *this);
      } else {
        for_like_groups<kGroup>(last + 1 - first, *this);
      }
      if (first + kKeptEvery > length) return;
      if (!kept.data) continue;
      block.read_rows([&](int64_t i, const Group<Real, NV>& w) { w.store_to(kept[i], block.columns); }, [] {});
      kept.data = kept[block.rows];
    }
  }

  // A sequence of one token: less to compile than run_tokens.
  void run_token() {
    if constexpr (K::retrieves) start();
    run_group<1, false>(0, true);
  }

  template <int T, bool kLast>
  FWP_INLINE void run(int64_t from) {
    run_group<T, !kLast>(from, kLast);
  }
  template <int T>
  FWP_INLINE void run(int64_t from, bool is_last) {
    run_group<T, false>(from, is_last);
  }

 private:
  template <int T, bool kReadsAhead>
  FWP_INLINE void run_group(int64_t from, bool is_last) {
    const int64_t t = first + from;
    Group<Real, NV> value[T], value_decay[T], removed[T];
    RowSums<Real, NV, T> read(block.rows);
    const Real *key[T], *query[T], *key_decay[T], *removal[T];
    Real head_decay[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      key[s] = in.k[t + s];
      query[s] = in.q[t + s];
      value[s].load_from(in.v[t + s], block.columns);
      if constexpr (K::fades == Fades::kHead) head_decay[s] = in.head_decay[t + s];
      if constexpr (K::fades != Fades::kHead) key_decay[s] = in.key_decay[t + s];
      if constexpr (K::fades == Fades::kKeyAndValue) value_decay[s].load_from(in.value_decay[t + s], block.columns);
      if constexpr (K::erases == Erases::kRemoval) removal[s] = in.removal[t + s];
    }
    solve<T>(t, value, removed);
    const Real* reader[2] = {};
    Real scale[2];
    RowSums<Real, NV, K::retrieves ? 2 : 1> next(block.rows);
    if constexpr (kReadsAhead) prepare(t + T, reader, scale);
    const auto ahead = ahead_of<T>(t, block.rows > kFewRows);
    block.change_rows(is_last, ahead, [&](int64_t i, Group<Real, NV>& w) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        if constexpr (K::fades == Fades::kHead)
          w.scale(head_decay[s]);
        else if constexpr (K::fades == Fades::kKey)
          w.scale(key_decay[s][i]);
        else
          FWP_UNROLL for (int n = 0; n < NV; ++n) w.x[n] *= key_decay[s][i] * value_decay[s].x[n];
        if constexpr (K::erases == Erases::kRemoval) w.subtract(removal[s][i], removed[s]);
        w.add(key[s][i], value[s]);
        read.total[s].add(query[s][i], w);
      }
      if constexpr (kReadsAhead)
        FWP_UNROLL for (int s = 0; s < 2; ++s) next.total[s].add(reader[s][i], w);
    }, [&]() __attribute__((always_inline)) {
      read.settle();
      if constexpr (kReadsAhead) next.settle();
    });
    read.finish();
    FWP_UNROLL for (int s = 0; s < T; ++s) read.total[s].store_to(out[t + s], block.columns);
    if constexpr (kReadsAhead) keep_found(next, scale);
  }

  // Turn the values of a group into its sequential writes, and store what they retrieve.
  template <int T>
  FWP_INLINE void solve(int64_t t, Group<Real, NV> (&value)[T], Group<Real, NV> (&removed)[T]) {
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      if constexpr (K::erases == Erases::kKey) {
        value[s].add(Real(-1), found[s]);
        if (s == 1) value[s].subtract(with_key, value[0]);
        value[s].store_to(retrieved[t + s], block.columns);
      }
      value[s].scale(in.rate_at(t + s));
      if constexpr (K::erases == Erases::kRemoval) {
        removed[s] = found[s];
        if (s == 1) {
          removed[s].add(with_key, value[0]);
          removed[s].subtract(with_removal, removed[0]);
        }
        removed[s].store_to(retrieved[t + s], block.columns);
      }
    }
  }

  // The keys with which tokens t and t + 1 read the state before both, and their products. Past the end of the chunk,
  // the last key is repeated and its retrieved value is not used.
  FWP_INLINE void prepare(int64_t t, const Real* (&reader)[2], Real (&scale)[2]) {
    const int64_t u = std::min(t, last), n = std::min(t + 1, last);
    const bool of_key = K::erases == Erases::kKey;
    const Tokens<const Real>& keys = of_key ? in.k : in.removal_key;
    reader[0] = keys[u], reader[1] = keys[n];
    scale[0] = scale[1] = 1;
    if constexpr (K::fades == Fades::kHead) {
      scale[0] = in.head_decay[u];
      scale[1] = in.head_decay[n] * scale[0];
      with_key = in.head_decay[n] * multiply(reader[1], in.k[u]);
    } else {
      Real *faded = scratch, *second = scratch + block.rows;
      Vector<Real> sum = {}, of_removal = {};
      for (int64_t i = 0; i < block.rows; i += kLanes<Real>) {
        const int64_t count = block.rows - i;
        Vector<Real> own = load_part(reader[1] + i, count);
        const Vector<Real> key_decay = load_part(in.key_decay[u] + i, count);
        if (of_key) {
          own *= load_part(in.key_decay[n] + i, count);
          store_part(faded + i, load_part(reader[0] + i, count) * key_decay, count);
        }
        sum += own * load_part(in.k[u] + i, count);
        if (!of_key) of_removal += own * load_part(in.removal[u] + i, count);
        store_part(second + i, own * key_decay, count);
      }
      if (of_key) reader[0] = faded;
      reader[1] = second;
      with_key = sum_lanes<Real>(sum), with_removal = sum_lanes<Real>(of_removal);
    }
  }

  FWP_INLINE Real multiply(const Real* x, const Real* y) const {
    Vector<Real> sum = {};
    for (int64_t i = 0; i < block.rows; i += kLanes<Real>)
      sum += load_part(x + i, block.rows - i) * load_part(y + i, block.rows - i);
    return sum_lanes<Real>(sum);
  }

  // Compute what the first keys of a chunk retrieve.
  FWP_INLINE void start() {
    const Real* reader[2];
    Real scale[2];
    prepare(first, reader, scale);
    RowSums<Real, NV, 2> sums(block.rows);
    block.read_rows([&](int64_t i, const Group<Real, NV>& w) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < 2; ++s) sums.total[s].add(reader[s][i], w);
    }, [&]() __attribute__((always_inline)) { sums.settle(); });
    keep_found(sums, scale);
  }

  FWP_INLINE void keep_found(RowSums<Real, NV, 2>& sums, const Real (&scale)[2]) {
    sums.finish();
    FWP_UNROLL for (int s = 0; s < 2; ++s) {
      found[s] = sums.total[s];
      if constexpr (K::fades == Fades::kHead) found[s].scale(scale[s]);
    }
  }

  template <int T>
  FWP_INLINE auto ahead_of(int64_t t, bool wanted) const {
    const int64_t next = t + kTokensAhead;
    if constexpr (K::erases == Erases::kRemoval)
      return Ahead<Real, T, 8>(wanted, next, in.q, in.k, in.v, out, in.key_decay, in.removal, in.removal_key, retrieved);
    else if constexpr (K::retrieves && K::fades == Fades::kKey)
      return Ahead<Real, T, 6>(wanted, next, in.q, in.k, in.v, out, in.key_decay, retrieved);
    else if constexpr (K::retrieves)
      return Ahead<Real, T, 5>(wanted, next, in.q, in.k, in.v, out, retrieved);
    else if constexpr (K::fades == Fades::kKeyAndValue)
      return Ahead<Real, T, 6>(wanted, next, in.q, in.k, in.v, out, in.key_decay, in.value_decay);
    else if constexpr (K::fades == Fades::kKey)
      return Ahead<Real, T, 5>(wanted, next, in.q, in.k, in.v, out, in.key_decay);
    else
      return Ahead<Real, T, 4>(wanted, next, in.q, in.k, in.v, out);
  }
};

// In reverse over a block of value columns of G, the gradient of W, for rules that retrieve. If they erase with the
// key, this computes d_v_t = b_t k_t G_t and d_b_t; if they remove, d_r_t = -x_t G_t. All token
// sequences are passed in reverse. Like the forward pass, one pass changes G by a group of two tokens and reads for the
// next group. ForgetBackward repeats the operations on G in the same order, so to the last bit: it does not correct
// errors, so different ones would add up.
//
//     for t in reversed(range(L)):
//         G = G + outer(q[t], d_out[t])
//         if erases:
//             d_v[t], d_b[t] = b[t] * (k[t] @ G), k[t] @ G @ e[t]
//             G = G - outer(k[t], d_v[t])
//         d_r[t] = -x[t] @ G
//         G = outer(a[t], z[t]) * G + outer(y[t], d_r[t])
template <typename Real, int NV, typename K>
struct RetrieveBackward {
  static constexpr int kGroup = 2;

  StateBlock<Real, NV>& block;
  const int64_t length;
  const ForgetTokens<Real> in;
  Tokens<const Real> d_out, retrieved;
  Tokens<Real> d_retrieved;  // d_value or d_removed
  Rates<Real> d_rate;
  const bool add;  // whether to add to d_rate (other columns came before)
  Real* scratch;   // rows
  Group<Real, NV> found[2] = {};
  Real with_query[2] = {}, with_first_query = 0, with_key = 0;

  void run() {
    if (length == 0) return;
    const Real* reader[2];
    Real scale;
    prepare(0, reader, scale);
    RowSums<Real, NV, 2> sums(block.rows);
    block.read_rows([&](int64_t i, const Group<Real, NV>& g) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < 2; ++s) sums.total[s].add(reader[s][i], g);
    }, [&]() __attribute__((always_inline)) { sums.settle(); });
    keep_found(sums, scale);
    for_token_groups<kGroup>(length, *this);
  }

  template <int T, bool kLast>
  FWP_INLINE void run(int64_t t) {
    Group<Real, NV> d_read[T], d_written[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) d_read[s].load_from(d_out[t + s], block.columns);
    solve<T>(t, d_read, d_written);
    if constexpr (!kLast) {
      const Real *key[T], *query[T], *key_decay[T], *removal_key[T], *reader[2];
      Real head_decay[T], scale;
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        key[s] = in.k[t + s];
        query[s] = in.q[t + s];
        if constexpr (K::fades == Fades::kHead) head_decay[s] = in.head_decay[t + s];
        if constexpr (K::fades != Fades::kHead) key_decay[s] = in.key_decay[t + s];
        if constexpr (K::erases == Erases::kRemoval) removal_key[s] = in.removal_key[t + s];
      }
      prepare(t + T, reader, scale);
      RowSums<Real, NV, 2> next(block.rows);
      const auto ahead = ahead_of<T>(t, block.rows > kFewRows);
      block.change_rows(false, ahead, [&](int64_t i, Group<Real, NV>& g) __attribute__((always_inline)) {
        FWP_UNROLL for (int s = 0; s < T; ++s) {
          g.add(query[s][i], d_read[s]);
          if constexpr (K::erases == Erases::kKey) g.subtract(key[s][i], d_written[s]);
          if constexpr (K::fades == Fades::kHead)
            g.scale(head_decay[s]);
          else
            g.scale(key_decay[s][i]);
          g.round();
          if constexpr (K::erases == Erases::kRemoval) g.add(removal_key[s][i], d_written[s]);
        }
        FWP_UNROLL for (int s = 0; s < 2; ++s) next.total[s].add(reader[s][i], g);
      }, [&]() __attribute__((always_inline)) { next.settle(); });
      keep_found(next, scale);
    }
  }

 private:
  template <int T>
  FWP_INLINE void solve(int64_t t, const Group<Real, NV> (&d_read)[T], Group<Real, NV> (&d_written)[T]) {
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      Group<Real, NV>& x = d_written[s];
      x = found[s];
      x.add(with_query[s], d_read[s]);
      if (s == 1) {
        x.add(with_first_query, d_read[0]);
        x.add(with_key, d_written[0]);
      }
      if constexpr (K::erases == Erases::kKey) {
        Group<Real, NV> error;
        error.load_from(retrieved[t + s], block.columns);
        d_rate[t + s] = sum_lanes<Real>(multiply_lanes(error, x)) + (add ? d_rate[t + s] : 0);
        x.scale(in.rate[t + s]);
      } else {
        x.scale(-1);
      }
      x.store_to(d_retrieved[t + s], block.columns);
    }
  }

  // Like ForgetForward::prepare. Here G takes the d_out of a query before it is read, and decays after it.
  FWP_INLINE void prepare(int64_t t, const Real* (&reader)[2], Real& scale) {
    const int64_t u = std::min(t, length - 1), n = std::min(t + 1, length - 1);
    const bool of_key = K::erases == Erases::kKey;
    const Tokens<const Real>& keys = of_key ? in.k : in.removal;
    reader[0] = keys[u], reader[1] = scratch;
    Vector<Real> sum[2] = {}, first_query = {}, key = {};
    scale = 1;
    if constexpr (K::fades == Fades::kHead) scale = in.head_decay[u];
    for (int64_t i = 0; i < block.rows; i += kLanes<Real>) {
      const int64_t count = block.rows - i;
      const Vector<Real> own = load_part(keys[u] + i, count), next = load_part(keys[n] + i, count);
      const Vector<Real> query = load_part(in.q[u] + i, count);
      Vector<Real> faded = next;
      if constexpr (K::fades != Fades::kHead) faded *= load_part(in.key_decay[u] + i, count);
      store_part(scratch + i, faded, count);
      sum[0] += own * query;
      sum[1] += next * load_part(in.q[n] + i, count);
      first_query += faded * query;
      if (of_key)
        key -= faded * load_part(in.k[u] + i, count);
      else
        key += next * load_part(in.removal_key[u] + i, count);
    }
    with_query[0] = sum_lanes<Real>(sum[0]), with_query[1] = sum_lanes<Real>(sum[1]);
    with_first_query = scale * sum_lanes<Real>(first_query);
    with_key = scale * sum_lanes<Real>(key);
  }

  FWP_INLINE void keep_found(RowSums<Real, NV, 2>& sums, Real scale) {
    sums.finish();
    FWP_UNROLL for (int s = 0; s < 2; ++s) found[s] = sums.total[s];
    if constexpr (K::fades == Fades::kHead) found[1].scale(scale);
  }

  template <int T>
  FWP_INLINE auto ahead_of(int64_t t, bool wanted) const {
    const int64_t next = t + kTokensAhead;
    if constexpr (K::erases == Erases::kRemoval)
      return Ahead<Real, T, 6>(wanted, next, in.q, in.removal, in.removal_key, d_out, in.key_decay, d_retrieved);
    else if constexpr (K::fades == Fades::kKey)
      return Ahead<Real, T, 6>(wanted, next, in.q, in.k, d_out, in.key_decay, retrieved, d_retrieved);
    else
      return Ahead<Real, T, 5>(wanted, next, in.q, in.k, d_out, retrieved, d_retrieved);
  }
};

// In reverse over a block of key columns of W^T, with G the gradient of W. No operation mixes elements of W or of G. So
// a few rows go through a whole chunk, forward and back, before the next rows. For a rule that retrieves, all that it
// wrote or removed is already known, with its gradients.
//
//     for t in reversed(range(L)):
//         W = before[t]
//         after = outer(a[t], z[t]) * W + outer(k[t], b[t] * e[t]) - outer(x[t], r[t])
//         G, d_q[t] = G + outer(q[t], d_out[t]), after @ d_out[t]
//         d_k[t] = b[t] * (G @ e[t])
//         if erases:
//             G, d_k[t] = G - outer(k[t], d_v[t]), d_k[t] - a[t] * (W @ d_v[t])
//         else:
//             d_v[t], d_b[t] = b[t] * (k[t] @ G), k[t] @ G @ v[t]
//         d_x[t], d_y[t] = -G @ r[t], W @ d_r[t]
//         d_a[t], d_z[t] = (G * W) @ z[t], a[t] @ (G * W)
//         G = outer(a[t], z[t]) * G + outer(y[t], d_r[t])
template <typename Real, int NV, typename K>
struct ForgetBackward {
  static constexpr int64_t kWidth = NV * kLanes<Real>;
  static constexpr bool kRemoves = K::erases == Erases::kRemoval;
  // Sums over rows for each token: d_q, d_k, d_decay, and those of a removal and its key.
  static constexpr int64_t kSums = (kRemoves ? 5 : 3) * kWidth;
  // All rows of G, the states of a few rows in a chunk, and two arrays of the sums of a chunk.
  static int64_t scratch(int64_t rows) { return (rows + kKeptEvery * kPiece<Real>)*kWidth + 2 * kKeptEvery * kSums; }

  const int64_t length, rows, columns;
  const ForgetTokens<Real> in;  // v: the written value, if the rule erases with the key
  Tokens<const Real> d_out;
  Tokens<const Real> removed, d_retrieved;  // of a rule that retrieves; d_retrieved is d_v or d_removed
  const ForgetGradients<Real> to;
  const bool add;  // whether to add to d_v, d_value_decay, d_head_decay and d_rate (other columns came before)
  Matrix<const Real> initial, d_final;
  Matrix<Real> d_initial;
  const Real* kept;  // transposed, like the matrices above
  int64_t kept_stride;
  Real* work;

  void run() {
    for (int64_t j = 0; j < rows; ++j) load_row(d_final, j).store_to(work + j * kWidth, kWidth);
    for (int64_t c = (length + kKeptEvery - 1) / kKeptEvery; c-- > 0;) {
      const Matrix<const Real> state = c ? Matrix<const Real>{kept + (c - 1) * kept_stride, 1, rows} : initial;
      run_chunk(c * kKeptEvery, std::min(kKeptEvery, length - c * kKeptEvery), state,
                c > 1 ? kept + (c - 2) * kept_stride : nullptr);
    }
    if (d_initial.data) copy_matrix({work, kWidth, 1}, rows, columns, d_initial);
  }

 private:
  Group<Real, NV> load_row(const Matrix<const Real>& m, int64_t j) const {
    Real row[kWidth] = {};
    if (m.data)
      for (int64_t i = 0; i < columns; ++i) row[i] = m.data[j * m.row_stride + i * m.column_stride];
    Group<Real, NV> x;
    x.load_from(row, kWidth);
    return x;
  }

  // The decay of row j at token t, and the key that token t writes with.
  FWP_INLINE Group<Real, NV> load_decay(int64_t t) const {
    Group<Real, NV> x;
    if constexpr (K::fades == Fades::kHead)
      FWP_UNROLL for (int n = 0; n < NV; ++n) x.x[n] = in.head_decay[t] - Vector<Real>{};
    else
      x.load_from(in.key_decay[t], columns);
    return x;
  }
  FWP_INLINE Group<Real, NV> load_key(int64_t t) const {
    Group<Real, NV> x;
    x.load_from(in.k[t], columns);
    // Rules whose values decay have no rate. Testing for one here costs the decay rule 8 %.
    if constexpr (K::fades != Fades::kKeyAndValue && K::erases != Erases::kKey)
      if (in.rate.data) x.scale(in.rate[t]);
    return x;
  }
  FWP_INLINE Real value_decay(int64_t t, int64_t j) const {
    if constexpr (K::fades == Fades::kKeyAndValue)
      return in.value_decay[t][j];
    else
      return 1;
  }
  static FWP_INLINE void fade(Group<Real, NV>& x, const Group<Real, NV>& decay, Real value_decay) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) {
      if constexpr (K::fades == Fades::kKeyAndValue)
        x.x[n] *= value_decay * decay.x[n];
      else
        x.x[n] *= decay.x[n];
    }
  }

  // Prefetch what this chunk will write and the previous chunk will read, some lines per token. Rows come kPiece at a
  // time, so four steps share a cache line, and each kind of vector is fetched in one of the four. The target is the
  // second-level cache: the first-level cache would evict the data before its use, or need the space.
  struct Lines {
    static constexpr int kLines = K::retrieves ? 4 : 3;
    const Real* line[kLines];
    int64_t stride[kLines];

    explicit Lines(const Real* nothing) : stride{} {
      for (const Real*& x : line) x = nothing;
    }
    // The line of `column`, for each token from t on. `data` may be null. Fetches past the end are useless but
    // harmless.
    void set(int n, const Real* data, int64_t token_stride, int64_t t, int64_t column) {
      if (!data || n >= kLines) return;
      line[n] = address(data, t * token_stride + column);
      stride[n] = token_stride;
    }
    FWP_INLINE void fetch(int64_t t) const {
      FWP_UNROLL for (int n = 0; n < kLines; ++n) __builtin_prefetch(address(line[n], t * stride[n]), 0, 2);
    }
  };

  // `earlier` is the state two chunks back (the state before the previous chunk), or null.
  Lines lines_due(int64_t first, int64_t j, const Real* earlier) const {
    constexpr int64_t kLine = Tokens<Real>::kLine;
    const int64_t column = j / kLine * kLine, before = first - kKeptEvery;
    Lines lines(work);
    const auto set = [&](int n, const auto& x, int64_t t) { lines.set(n, x.data, x.stride, t, column); };
    const bool of_keys = column < kWidth;
    switch (j % kLine / kPiece<Real>) {
      case 0:
        set(0, in.v, before);
        set(1, Tokens<const Real>{earlier, rows}, 0);
        if (of_keys) set(2, in.k, before);
        set(3, d_retrieved, before);
        break;
      case 1:
        set(0, d_out, before);
        set(1, in.value_decay, before);
        if (of_keys) set(2, in.q, before);
        set(3, removed, before);
        break;
      case 2:
        set(0, to.v, first);
        set(1, to.value_decay, first);
        if (of_keys) set(2, in.key_decay, before);
        if (of_keys) set(3, in.removal, before);
        break;
      case 3:
        if (!of_keys) break;
        set(0, to.q, first);
        set(1, to.k, first);
        set(2, to.key_decay, first);
        set(3, in.removal_key, before);
    }
    return lines;
  }

  // Process kSumRows rows at a time, as in RowSums. The first part initializes the total.
  void run_chunk(int64_t first, int64_t tokens, const Matrix<const Real>& state, const Real* earlier) {
    Real *total = work + (rows + kKeptEvery * kPiece<Real>)*kWidth, *part = total + kKeptEvery * kSums;
    for (int64_t begin = 0; begin == 0 || begin < rows; begin += kSumRows) {
      Real* sums = begin ? part : total;
      const int64_t end = std::min(rows, begin + kSumRows);
      std::memset(sums, 0, tokens * kSums * sizeof(Real));
      int64_t j = begin;
      for (; j + kPiece<Real> <= end; j += kPiece<Real>) run_rows<kPiece<Real>>(j, first, tokens, state, earlier, sums);
      for (; j < end; ++j) run_rows<1>(j, first, tokens, state, earlier, sums);
      if (begin)
        for (int64_t n = 0; n < tokens * kSums; n += kLanes<Real>) store(total + n, load(total + n) + load(part + n));
    }
    for (int64_t t = 0; t < tokens; ++t) store_sums(first + t, total + t * kSums);
  }

  template <int R>
  void run_rows(int64_t j, int64_t first, int64_t tokens, const Matrix<const Real>& state, const Real* earlier, Real* sums) {
    const ForgetBackward self = *this;  // a local copy: the compiler must assume that a store can change *this
    Real *states = work + rows * kWidth, *d_rows = work + j * kWidth;
    Group<Real, NV> w[R], g[R];
    FWP_UNROLL for (int r = 0; r < R; ++r) w[r] = self.load_row(state, j + r);
    const Lines due = self.lines_due(first, j, earlier);
    for (int64_t t = 0; t < tokens; ++t) {
      due.fetch(t);
      self.template step_forward<R>(j, first + t, w, states + t * R * kWidth, sums + t * kSums);
    }
    FWP_UNROLL for (int r = 0; r < R; ++r) g[r].load_from(d_rows + r * kWidth, kWidth);
    for (int64_t t = tokens; t-- > 0;)
      self.template step_back<R>(j, first + t, g, states + t * R * kWidth, sums + t * kSums);
    FWP_UNROLL for (int r = 0; r < R; ++r) g[r].store_to(d_rows + r * kWidth, kWidth);
  }

  // W before token t is stored in `states`. W after it gives d_q. What the token retrieves in between gives d_k or
  // d_removal_key.
  template <int R>
  FWP_INLINE void step_forward(int64_t j, int64_t t, Group<Real, NV> (&w)[R], Real* states, Real* sums) const {
    const Real *value = in.v[t] + j, *d_read = d_out[t] + j;
    const Group<Real, NV> decay = load_decay(t), key = load_key(t);
    Group<Real, NV> d_query, d_found, removal;
    d_query.load_from(sums, kWidth);
    Real* d_found_sum = sums + (kRemoves ? 4 : 1) * kWidth;
    if constexpr (K::retrieves) d_found.load_from(d_found_sum, kWidth);
    if constexpr (kRemoves) removal.load_from(in.removal[t], columns);
    FWP_UNROLL for (int r = 0; r < R; ++r) {
      w[r].store_to(states + r * kWidth, kWidth);
      if constexpr (kRemoves) d_found.add(d_retrieved[t][j + r], w[r]);
      fade(w[r], decay, value_decay(t, j + r));
      if constexpr (K::erases == Erases::kKey) d_found.subtract(d_retrieved[t][j + r], w[r]);
      if constexpr (kRemoves) w[r].subtract(removed[t][j + r], removal);
      w[r].add(value[r], key);
      d_query.add(d_read[r], w[r]);
    }
    d_query.store_to(sums, kWidth);
    if constexpr (K::retrieves) d_found.store_to(d_found_sum, kWidth);
  }

  // On entry G is the gradient of W after token t, without the read of token t. On return, of W before token t.
  template <int R>
  FWP_INLINE void step_back(int64_t j, int64_t t, Group<Real, NV> (&g)[R], const Real* states, Real* sums) const {
    const Real *value = in.v[t] + j, *d_read = d_out[t] + j;
    const Group<Real, NV> decay = load_decay(t), key = load_key(t);
    Group<Real, NV> query, d_key, d_decay, d_removal, removal_key;
    query.load_from(in.q[t], columns);
    Real *d_key_sum = sums + kWidth, *d_decay_sum = sums + 2 * kWidth, *d_removal_sum = sums + 3 * kWidth;
    d_key.load_from(d_key_sum, kWidth);
    d_decay.clear();
    if constexpr (kRemoves) {
      d_removal.load_from(d_removal_sum, kWidth);
      removal_key.load_from(in.removal_key[t], columns);
    }
    Vector<Real> d_value[R], d_value_decay[R];
    FWP_UNROLL for (int r = 0; r < R; ++r) {
      const Real of_value = value_decay(t, j + r);
      Group<Real, NV> before;
      before.load_from(states + r * kWidth, kWidth);
      d_value[r] = d_value_decay[r] = Vector<Real>{};
      g[r].add(d_read[r], query);
      d_key.add(value[r], g[r]);
      if constexpr (K::erases == Erases::kKey) g[r].subtract(d_retrieved[t][j + r], key);
      if constexpr (kRemoves) d_removal.subtract(removed[t][j + r], g[r]);
      FWP_UNROLL for (int n = 0; n < NV; ++n) {
        if constexpr (K::erases != Erases::kKey) d_value[r] += key.x[n] * g[r].x[n];
        const Vector<Real> d_fade = g[r].x[n] * before.x[n];
        if constexpr (K::fades == Fades::kKeyAndValue) {
          d_decay.x[n] += of_value * d_fade;
          d_value_decay[r] += decay.x[n] * d_fade;
        } else {
          d_decay.x[n] += d_fade;
        }
      }
      fade(g[r], decay, of_value);
      if constexpr (K::retrieves) g[r].round();
      if constexpr (kRemoves) g[r].add(d_retrieved[t][j + r], removal_key);
    }
    d_key.store_to(d_key_sum, kWidth);
    FWP_UNROLL for (int n = 0; n < NV; ++n) d_decay.x[n] += load(d_decay_sum + n * kLanes<Real>);
    d_decay.store_to(d_decay_sum, kWidth);
    if constexpr (kRemoves) d_removal.store_to(d_removal_sum, kWidth);
    if constexpr (K::erases != Erases::kKey) add_sums(d_value, to.v[t] + j);
    if constexpr (K::fades == Fades::kKeyAndValue) add_sums(d_value_decay, to.value_decay[t] + j);
  }

  template <int R>
  FWP_INLINE void add_sums(const Vector<Real> (&x)[R], Real* target) const {
    if constexpr (R == 1) {
      *target = sum_lanes<Real>(x[0]) + (add ? *target : 0);
    } else {
      Piece<Real> sum = sums_of<Real>(x);
      if (add) {
        Piece<Real> other;
        std::memcpy(&other, target, sizeof other);
        sum += other;
      }
      std::memcpy(target, &sum, sizeof sum);
    }
  }

  void store_sums(int64_t t, const Real* from) const {
    const auto sum_of = [&](int n) {
      Group<Real, NV> x;
      x.load_from(from + n * kWidth, kWidth);
      return x;
    };
    sum_of(0).store_to(to.q[t], columns);
    Group<Real, NV> d_key = sum_of(1), d_decay = sum_of(2), key;
    if (to.rate.data) {
      key.load_from(in.k[t], columns);
      to.rate[t] = sum_lanes<Real>(multiply_lanes(key, d_key)) + (add ? to.rate[t] : 0);
    }
    if (K::erases != Erases::kKey && in.rate.data) d_key.scale(in.rate[t]);
    d_key.store_to(to.k[t], columns);
    if constexpr (K::fades == Fades::kHead) {
      Vector<Real> sum = d_decay.x[0];
      FWP_UNROLL for (int n = 1; n < NV; ++n) sum += d_decay.x[n];
      to.head_decay[t] = sum_lanes<Real>(sum) + (add ? to.head_decay[t] : 0);
    } else {
      d_decay.store_to(to.key_decay[t], columns);
    }
    if constexpr (kRemoves) {
      sum_of(3).store_to(to.removal[t], columns);
      sum_of(4).store_to(to.removal_key[t], columns);
    }
  }
};

}  // namespace fwp
