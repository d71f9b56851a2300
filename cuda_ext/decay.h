// The decay rule on one block of columns: W_t = (f_t^T z_t) * W_{t-1} + k_t^T v_t, out_t = q_t W_t; and the gated rule,
// which is the same with f_t = g_t, z_t = 1 and the key (1 - g_t) k_t.
// README.md derives the backward pass. What was forgotten cannot be rewound: the forward pass keeps a state after every
// kChunk tokens, and the backward pass rebuilds those in between, some rows at a time.
#pragma once

#include <algorithm>

#include "state_block.h"

namespace fwp {

// Tokens between two states that are kept. fairseq_fwp/ops/chunks.py has the same number.
constexpr int64_t kChunk = 32;

template <typename A, int NV, bool kGated>
struct DecayForward {
  static constexpr int kGroup = NV == 4 ? 2 : kTokens;  // what the registers hold

  StateBlock<A, NV>& block;
  Tokens<const A> q, k, v, key_decay, value_decay;
  Rates<const A> gate;  // instead of both decays, if kGated
  Tokens<A> out;
  Tokens<A> kept;  // rows of the state after the chunk that begins with `first`: those of all whole chunks are kept
  int64_t first;   // token from which run counts

  void run_chunks(int64_t length) {
    for (first = 0; first < length; first += kChunk) {
      for_token_groups<kGroup>(std::min(kChunk, length - first), *this);
      if (first + kChunk > length) return;
      block.read_rows([&](int64_t i, const Group<A, NV>& w) { w.store_to(kept[i], block.columns); }, [] {});
      kept.data = kept[block.rows];
    }
  }

  template <int T>
  FWP_INLINE auto ahead_of(int64_t t, bool wanted) const {
    if constexpr (kGated)
      return Ahead<A, T, 4>(wanted, t + kTokensAhead, q, k, v, out);
    else
      return Ahead<A, T, 6>(wanted, t + kTokensAhead, q, k, v, out, key_decay, value_decay);
  }

  template <int T, bool kLast>
  FWP_INLINE void run(int64_t from) {
    const int64_t t = first + from;
    Group<A, NV> value[T], fade[T];
    RowSums<A, NV, T> read(block.rows);
    const A *key[T], *query[T], *rate[T];
    A share[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      key[s] = k[t + s];
      query[s] = q[t + s];
      value[s].load_from(v[t + s], block.columns);
      if constexpr (kGated) {
        share[s] = gate[t + s];
        value[s].scale(1 - share[s]);
      } else {
        rate[s] = key_decay[t + s];
        fade[s].load_from(value_decay[t + s], block.columns);
      }
    }
    const auto ahead = ahead_of<T>(t, block.rows > kFewRows);
    block.change_rows(kLast, ahead, [&](int64_t i, Group<A, NV>& w) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        if constexpr (kGated)
          w.scale(share[s]);
        else
          FWP_UNROLL for (int n = 0; n < NV; ++n) w.x[n] *= rate[s][i] * fade[s].x[n];
        w.add(key[s][i], value[s]);
        read.total[s].add(query[s][i], w);
      }
    }, [&]() __attribute__((always_inline)) { read.settle(); });
    read.finish();
    FWP_UNROLL for (int s = 0; s < T; ++s) read.total[s].store_to(out[t + s], block.columns);
  }
};

// In reverse over a block of key columns of W^T, with G the gradient of W. Nothing here mixes elements of W or of G, so a
// few rows go through a whole chunk, forwards and back, before the next ones do.
template <typename A, int NV, bool kGated>
struct DecayBackward {
  static constexpr int64_t kWidth = NV * kLanes<A>;
  static constexpr int64_t kSums = 3 * kWidth;  // sums over rows for each token: d_q, d_k and d_rate
  // All rows of G, the states of a few rows in a chunk, and the sums of a chunk, twice.
  static int64_t scratch(int64_t rows) { return (rows + kChunk * kPiece<A>)*kWidth + 2 * kChunk * kSums; }

  const int64_t length, rows, columns;
  Tokens<const A> q, k, key_decay, v, value_decay, d_out;
  Rates<const A> gate;  // instead of both decays, if kGated
  Tokens<A> d_q, d_k, d_key_decay, d_v, d_value_decay;
  Rates<A> d_gate;
  const bool add;  // whether other columns have been here: to d_v, d_value_decay and d_gate
  Matrix<const A> initial, d_final;
  Matrix<A> d_initial;
  const A* kept;  // transposed, as are these
  int64_t kept_stride;
  A* work;

  void run() {
    for (int64_t j = 0; j < rows; ++j) load_row(d_final, j).store_to(work + j * kWidth, kWidth);
    for (int64_t c = (length + kChunk - 1) / kChunk; c-- > 0;) {
      const Matrix<const A> state = c ? Matrix<const A>{kept + (c - 1) * kept_stride, 1, rows} : initial;
      run_chunk(c * kChunk, std::min(kChunk, length - c * kChunk), state,
                c > 1 ? kept + (c - 2) * kept_stride : nullptr);
    }
    if (!d_initial.data) return;
    for (int64_t j = 0; j < rows; ++j)
      for (int64_t i = 0; i < columns; ++i)
        d_initial.data[j * d_initial.row_stride + i * d_initial.column_stride] = work[j * kWidth + i];
  }

 private:
  Group<A, NV> load_row(const Matrix<const A>& m, int64_t j) const {
    A row[kWidth] = {};
    if (m.data)
      for (int64_t i = 0; i < columns; ++i) row[i] = m.data[j * m.row_stride + i * m.column_stride];
    Group<A, NV> x;
    x.load_from(row, kWidth);
    return x;
  }

  // What token t keeps of row j, and its key as it writes it.
  FWP_INLINE Group<A, NV> load_rate(int64_t t) const {
    Group<A, NV> x;
    if constexpr (kGated)
      FWP_UNROLL for (int n = 0; n < NV; ++n) x.x[n] = gate[t] - Vector<A>{};
    else
      x.load_from(key_decay[t], columns);
    return x;
  }
  FWP_INLINE Group<A, NV> load_key(int64_t t) const {
    Group<A, NV> x;
    x.load_from(k[t], columns);
    if constexpr (kGated) x.scale(1 - gate[t]);
    return x;
  }
  FWP_INLINE A value_rate(int64_t t, int64_t j) const {
    if constexpr (kGated)
      return 1;
    else
      return value_decay[t][j];
  }

  // What this chunk will write and the one before it will read, fetched up to three lines a token. Rows come kPiece at a
  // time, so a line of them has four turns, and each kind of vector has one of these. Into the second-level cache: in the
  // first one it would be in the way, or be gone before it is its turn.
  struct Lines {
    const A* line[3];
    int64_t stride[3];

    explicit Lines(const A* nothing) : line{nothing, nothing, nothing}, stride{} {}
    // The line of `column`, of each token from t on; a kind may be absent. Past an end it is fetched in vain.
    void set(int n, const A* data, int64_t token_stride, int64_t t, int64_t column) {
      if (!data) return;
      line[n] = address(data, t * token_stride + column);
      stride[n] = token_stride;
    }
    FWP_INLINE void fetch(int64_t t) const {
      FWP_UNROLL for (int n = 0; n < 3; ++n) __builtin_prefetch(address(line[n], t * stride[n]), 0, 2);
    }
  };

  // `earlier` is the state before the chunk before this one, or null.
  Lines lines_due(int64_t first, int64_t j, const A* earlier) const {
    constexpr int64_t kLine = Tokens<A>::kLine;
    const int64_t column = j / kLine * kLine, before = first - kChunk;
    Lines lines(work);
    const auto set = [&](int n, const auto& x, int64_t t) { lines.set(n, x.data, x.stride, t, column); };
    const bool of_keys = column < kWidth;
    switch (j % kLine / kPiece<A>) {
      case 0:
        set(0, v, before);
        set(1, Tokens<const A>{earlier, rows}, 0);
        if (of_keys) set(2, k, before);
        break;
      case 1:
        set(0, d_out, before);
        set(1, value_decay, before);
        if (of_keys) set(2, q, before);
        break;
      case 2:
        set(0, d_v, first);
        set(1, d_value_decay, first);
        if (of_keys) set(2, key_decay, before);
        break;
      case 3:
        if (!of_keys) break;
        set(0, d_q, first);
        set(1, d_k, first);
        set(2, d_key_decay, first);
    }
    return lines;
  }

  // Over kSumRows rows at a time, as in RowSums: the first ones' part becomes the total.
  void run_chunk(int64_t first, int64_t tokens, const Matrix<const A>& state, const A* earlier) {
    A *total = work + (rows + kChunk * kPiece<A>)*kWidth, *part = total + kChunk * kSums;
    for (int64_t begin = 0; begin == 0 || begin < rows; begin += kSumRows) {
      A* sums = begin ? part : total;
      const int64_t end = std::min(rows, begin + kSumRows);
      std::memset(sums, 0, tokens * kSums * sizeof(A));
      int64_t j = begin;
      for (; j + kPiece<A> <= end; j += kPiece<A>) run_rows<kPiece<A>>(j, first, tokens, state, earlier, sums);
      for (; j < end; ++j) run_rows<1>(j, first, tokens, state, earlier, sums);
      if (begin)
        for (int64_t n = 0; n < tokens * kSums; n += kLanes<A>) store(total + n, load(total + n) + load(part + n));
    }
    for (int64_t t = 0; t < tokens; ++t) store_sums(first + t, total + t * kSums);
  }

  template <int R>
  void run_rows(int64_t j, int64_t first, int64_t tokens, const Matrix<const A>& state, const A* earlier, A* sums) {
    const DecayBackward self = *this;  // for all the compiler knows, a store may change *this, but not what is local
    A *states = work + rows * kWidth, *d_rows = work + j * kWidth;
    Group<A, NV> w[R], g[R];
    FWP_UNROLL for (int r = 0; r < R; ++r) w[r] = self.load_row(state, j + r);
    const Lines due = self.lines_due(first, j, earlier);
    for (int64_t t = 0; t < tokens; ++t) {
      due.fetch(t);
      const A *value = self.v[first + t] + j, *d_read = self.d_out[first + t] + j;
      const Group<A, NV> rate = self.load_rate(first + t), key = self.load_key(first + t);
      Group<A, NV> d_query;
      A* d_q_sum = sums + t * kSums;
      d_query.load_from(d_q_sum, kWidth);
      FWP_UNROLL for (int r = 0; r < R; ++r) {
        w[r].store_to(states + (t * R + r) * kWidth, kWidth);
        fade(w[r], rate, self.value_rate(first + t, j + r));
        w[r].add(value[r], key);
        d_query.add(d_read[r], w[r]);
      }
      d_query.store_to(d_q_sum, kWidth);
    }
    FWP_UNROLL for (int r = 0; r < R; ++r) g[r].load_from(d_rows + r * kWidth, kWidth);
    for (int64_t t = tokens; t-- > 0;) {
      const A *value = self.v[first + t] + j, *d_read = self.d_out[first + t] + j;
      const Group<A, NV> rate = self.load_rate(first + t), key = self.load_key(first + t);
      Group<A, NV> query, d_key, d_rate;
      query.load_from(self.q[first + t], self.columns);
      A* d_k_sum = sums + t * kSums + kWidth;
      d_key.load_from(d_k_sum, kWidth);
      d_rate.clear();
      Vector<A> d_value[R], d_value_rate[R];
      FWP_UNROLL for (int r = 0; r < R; ++r) {
        const A value_rate_r = self.value_rate(first + t, j + r);
        Group<A, NV> before;
        before.load_from(states + (t * R + r) * kWidth, kWidth);
        d_value[r] = d_value_rate[r] = Vector<A>{};
        g[r].add(d_read[r], query);
        d_key.add(value[r], g[r]);
        FWP_UNROLL for (int n = 0; n < NV; ++n) {
          d_value[r] += key.x[n] * g[r].x[n];
          const Vector<A> d_fade = g[r].x[n] * before.x[n];
          if constexpr (kGated) {
            d_rate.x[n] += d_fade;
          } else {
            d_rate.x[n] += value_rate_r * d_fade;
            d_value_rate[r] += rate.x[n] * d_fade;
          }
        }
        fade(g[r], rate, value_rate_r);
      }
      d_key.store_to(d_k_sum, kWidth);
      FWP_UNROLL for (int n = 0; n < NV; ++n) d_rate.x[n] += load(d_k_sum + kWidth + n * kLanes<A>);
      d_rate.store_to(d_k_sum + kWidth, kWidth);
      self.add_sums(d_value, self.d_v[first + t] + j);
      if constexpr (!kGated) self.add_sums(d_value_rate, self.d_value_decay[first + t] + j);
    }
    FWP_UNROLL for (int r = 0; r < R; ++r) g[r].store_to(d_rows + r * kWidth, kWidth);
  }

  static FWP_INLINE void fade(Group<A, NV>& x, const Group<A, NV>& rate, A value_rate) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) {
      if constexpr (kGated)
        x.x[n] *= rate.x[n];
      else
        x.x[n] *= value_rate * rate.x[n];
    }
  }

  template <int R>
  FWP_INLINE void add_sums(const Vector<A> (&x)[R], A* target) const {
    if constexpr (R == 1) {
      *target = sum_lanes<A>(x[0]) + (add ? *target : 0);
    } else {
      Piece<A> sum = sums_of<A>(x);
      if (add) {
        Piece<A> other;
        std::memcpy(&other, target, sizeof other);
        sum += other;
      }
      std::memcpy(target, &sum, sizeof sum);
    }
  }

  void store_sums(int64_t t, const A* from) const {
    Group<A, NV> d_query, d_key, d_rate;
    d_query.load_from(from, kWidth);
    d_key.load_from(from + kWidth, kWidth);
    d_rate.load_from(from + 2 * kWidth, kWidth);
    d_query.store_to(d_q[t], columns);
    if constexpr (kGated) {
      Group<A, NV> key;
      key.load_from(k[t], columns);
      Vector<A> sum = {};
      FWP_UNROLL for (int n = 0; n < NV; ++n) sum += d_rate.x[n] - key.x[n] * d_key.x[n];
      d_gate[t] = sum_lanes<A>(sum) + (add ? d_gate[t] : 0);
      d_key.scale(1 - gate[t]);
    } else {
      d_rate.store_to(d_key_decay[t], columns);
    }
    d_key.store_to(d_k[t], columns);
  }
};

}  // namespace fwp
