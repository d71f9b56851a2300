// The delta rule on the first tokens of a sequence without an initial state, in quadratic form. Let A_ts = k_t . k_s
// and P_ts = q_t . k_s (../rule.h has the symbols).
//   The error is   e_t   = v_t - sum over s < t of A_ts u_s,
//   the write is   u_t   = b_t e_t,
//   the output is  out_t = sum over s <= t of P_ts u_s.
// Only the last state is computed. ../cpu.md derives the backward pass.
// Each sum runs only over the tokens that the rule allows, so nothing is masked by multiplying with zero.
#pragma once

#include <algorithm>

#include "tile.h"

namespace fwp {

// Number of tokens at the start of a sequence that use the quadratic form. It depends only on the sizes, not on the
// length: a prefix of the input must give a bit-identical prefix of the output.
inline int64_t short_tokens(int64_t keys, int64_t values) {
  // Multiply-adds of token t, forward + backward. Scan: 10 Dk Dv and sums across lanes, counted as 2 Dk Dv more. This
  // form: t (8 Dk + 6 Dv) + Dk Dv.
  const int64_t even = 11 * keys * values / std::max<int64_t>(1, 8 * keys + 6 * values);
  return even < 32 ? 0 : std::min<int64_t>(64, even / 16 * 16);
}

// One head of `length` tokens. Inputs that are read more than once are copied to scratch, zero-padded to whole vectors
// and tiles.
template <typename Real>
class DeltaShort {
 public:
  using Number = Real;
  const int64_t length, keys, values;

  DeltaShort(int64_t length, int64_t keys, int64_t values, Real* scratch)
      : length(length), keys(keys), values(values), free_(scratch) {
    const int64_t tokens = round_up(length, kTileRows);
    for (Tokens<Real>* x : {&key_, &query_, &d_key_}) *x = take<Real>(free_, tokens, keys);
    for (Tokens<Real>* x : {&write_, &d_out_, &d_value_}) *x = take<Real>(free_, tokens, values);
    for (Tokens<Real>* x : {&key_products_, &scores_, &d_key_products_, &d_scores_}) *x = take<Real>(free_, tokens, tokens);
    d_state_ = take<Real>(free_, round_up(keys, kTileRows), values);
  }

  static int64_t scratch_size(int64_t length, int64_t keys, int64_t values) {
    const int64_t tokens = round_up(length, kTileRows);
    return tokens * (3 * padded<Real>(keys) + 3 * padded<Real>(values) + 4 * padded<Real>(tokens)) +
           round_up(keys, kTileRows) * padded<Real>(values);
  }

  void forward(Tokens<const Real> q, Tokens<const Real> k, Tokens<const Real> v, Rates<const Real> rate, Tokens<Real> out,
               Tokens<Real> error, Tokens<Real> state) {
    multiply_keys(q, k);
    for_panels<Real>(values, [&](int64_t j, auto vectors) {
      for (int64_t t = 0; t < length; t += kTileRows) {
        write<vectors.value>(t, j, v, rate, error);
        read<vectors.value>(t, j, out);
      }
    });
    multiply_transposed(key_, write_, length, keys, values, state);
  }

  // The state after the last token, from the errors, bit-identical to that of the forward pass.
  void rebuild_state(Tokens<const Real> k, Rates<const Real> rate, Tokens<const Real> error, Tokens<Real> state) {
    copy(k, length, keys, key_);
    rebuild_writes(rate, error);
    multiply_transposed(key_, write_, length, keys, values, state);
  }

  // d_state.data may be null. d_rate must contain zeros.
  void backward(Tokens<const Real> q, Tokens<const Real> k, Rates<const Real> rate, Tokens<const Real> error,
                Tokens<const Real> d_out, Tokens<const Real> d_state, Tokens<Real> d_q, Tokens<Real> d_k, Tokens<Real> d_v,
                Rates<Real> d_rate) {
    multiply_keys(q, k);
    rebuild_writes(rate, error);
    copy(d_out, length, values, d_out_);
    if (d_state.data) copy(d_state, keys, values, d_state_);
    const int64_t last = (length - 1) / kTileRows * kTileRows;
    for_panels<Real>(values, [&](int64_t j, auto vectors) {
      for (int64_t t = last; t >= 0; t -= kTileRows)
        differentiate_values<vectors.value>(t, j, rate, error, d_state.data, d_v, d_rate);
    });
    multiply_lower(d_out_, write_, values, d_scores_);
    multiply_lower(d_value_, write_, values, d_key_products_);
    if (d_state.data) multiply_rows(constant(write_), d_state_, length, keys, values, d_key_);
    for_panels<Real>(keys, [&](int64_t j, auto vectors) {
      for (int64_t t = 0; t < length; t += kTileRows) {
        differentiate_queries<vectors.value>(t, j, d_q);
        differentiate_keys<vectors.value>(t, j, d_state.data, d_k);
      }
    });
  }

 private:
  Real* free_;
  Tokens<Real> key_, query_, d_key_, write_, d_out_, d_value_, d_state_;
  Tokens<Real> key_products_, scores_, d_key_products_, d_scores_;

  // product[t][s] = x_t . y_s for s <= t. Tiles on the diagonal also contain values for s > t, which are never read.
  void multiply_lower(Tokens<Real> x, Tokens<Real> y, int64_t width, Tokens<Real> product) {
    for (int64_t t = 0; t < length; t += kTileRows)
      for (int64_t s = 0; s < t + kTileRows; s += kTileVectors)
        multiply_tile<Real>(constant(from_row(x, t)), constant(from_row(y, s)), width, product[t] + s, product.stride);
  }

  void multiply_keys(Tokens<const Real> q, Tokens<const Real> k) {
    copy(q, length, keys, query_);
    copy(k, length, keys, key_);
    multiply_lower(key_, key_, keys, key_products_);
    multiply_lower(query_, key_, keys, scores_);
  }

  void rebuild_writes(Rates<const Real> rate, Tokens<const Real> error) {
    copy(error, length, values, write_);
    for (int64_t t = 0; t < length; ++t)
      for (int64_t j = 0; j < values; j += kLanes<Real>) store(write_[t] + j, rate[t] * load(write_[t] + j));
  }

  template <int NV>
  void write(int64_t t, int64_t j, Tokens<const Real> v, Rates<const Real> rate, Tokens<Real> error) {
    const Tokens<Real> product = from_row(key_products_, t);
    Tile<Real, NV> e;
    FWP_UNROLL for (int r = 0; r < kTileRows; ++r) e.row[r].load_from(v[std::min(t + r, length - 1)] + j, values - j);
    e.template add<true>(0, t, constant(write_, j),
                         [&](int64_t s, int r) __attribute__((always_inline)) { return product[r][s]; });
    Tile<Real, NV> u;
    FWP_UNROLL for (int r = 0; r < kTileRows; ++r) {
      FWP_UNROLL for (int m = 0; m < kTileRows; ++m)
        if (m < r) e.row[r].subtract(product[r][t + m], u.row[m]);
      u.row[r] = e.row[r];
      u.row[r].scale(rate[std::min(t + r, length - 1)]);
    }
    e.store_to(from_row(error, t).from(j), length - t, values - j);
    u.store_to(from_row(write_, t).from(j), kTileRows, NV * kLanes<Real>);
  }

  template <int NV>
  void read(int64_t t, int64_t j, Tokens<Real> out) {
    const Tokens<Real> score = from_row(scores_, t);
    Tile<Real, NV> sum;
    sum.clear();
    add_until<NV>(sum, t, score, constant(write_, j));
    sum.store_to(from_row(out, t).from(j), length - t, values - j);
  }

  // row[r] += the sum of factor[r][s] x_s over s <= t + r.
  template <int NV>
  FWP_INLINE void add_until(Tile<Real, NV>& sum, int64_t t, Tokens<Real> factor, Tokens<const Real> x) {
    sum.add(0, t, x, [&](int64_t s, int r) __attribute__((always_inline)) { return factor[r][s]; });
    FWP_UNROLL for (int m = 0; m < kTileRows; ++m) {
      Group<Real, NV> other;
      other.load_from(x[t + m], NV * kLanes<Real>);
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r)
        if (m <= r) sum.row[r].add(factor[r][t + m], other);
    }
  }

  // row[r] += the sum of factor[s][t + r] x_s over s >= t + r. With `subtract`: -= the sum over s > t + r.
  template <bool subtract, int NV>
  FWP_INLINE void add_from(Tile<Real, NV>& sum, int64_t t, Tokens<Real> factor, Tokens<const Real> x) {
    FWP_UNROLL for (int m = 0; m < kTileRows; ++m) {
      if (t + m >= length) break;
      Group<Real, NV> other;
      other.load_from(x[t + m], NV * kLanes<Real>);
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r) {
        if (subtract && m > r) sum.row[r].subtract(factor[t + m][t + r], other);
        if (!subtract && m >= r) sum.row[r].add(factor[t + m][t + r], other);
      }
    }
    sum.template add<subtract>(t + kTileRows, length, x, [&](int64_t s, int r) __attribute__((always_inline)) {
      return factor[s][t + r];
    });
  }

  template <int NV>
  void differentiate_values(int64_t t, int64_t j, Rates<const Real> rate, Tokens<const Real> error, bool from_state,
                                       Tokens<Real> d_v, Rates<Real> d_rate) {
    Tile<Real, NV> d_write, d_value;
    d_write.clear();
    if (from_state)
      d_write.add_in_parts(keys, constant(d_state_, j),
                           [&](int64_t i, int r) __attribute__((always_inline)) { return key_[t + r][i]; });
    // In reverse order of tiles. Tokens of this tile run one after the other, because each needs the d_value of all
    // later ones.
    const Tokens<const Real> d_out = constant(d_out_, j), later = constant(d_value_, j);
    d_write.add(t + kTileRows, length, d_out,
                [&](int64_t s, int r) __attribute__((always_inline)) { return scores_[s][t + r]; });
    d_write.template add<true>(t + kTileRows, length, later, [&](int64_t s, int r) __attribute__((always_inline)) {
      return key_products_[s][t + r];
    });
    FWP_UNROLL for (int r = kTileRows - 1; r >= 0; --r) {
      if (t + r >= length) continue;
      FWP_UNROLL for (int m = kTileRows - 1; m >= 0; --m) {
        if (m < r || t + m >= length) continue;
        Group<Real, NV> read;
        read.load_from(d_out[t + m], NV * kLanes<Real>);
        d_write.row[r].add(scores_[t + m][t + r], read);
        if (m > r) d_write.row[r].subtract(key_products_[t + m][t + r], d_value.row[m]);
      }
      d_value.row[r] = d_write.row[r];
      d_value.row[r].scale(rate[t + r]);
      d_value.row[r].store_to(d_value_[t + r] + j, NV * kLanes<Real>);
      d_value.row[r].store_to(d_v[t + r] + j, values - j);
      Group<Real, NV> e;
      e.load_from(error[t + r] + j, values - j);
      Vector<Real> sum = {};
      FWP_UNROLL for (int n = 0; n < NV; ++n) sum += e.x[n] * d_write.row[r].x[n];
      d_rate[t + r] += sum_lanes<Real>(sum);
    }
  }

  template <int NV>
  void differentiate_queries(int64_t t, int64_t j, Tokens<Real> d_q) {
    Tile<Real, NV> sum;
    sum.clear();
    add_until<NV>(sum, t, from_row(d_scores_, t), constant(key_, j));
    sum.store_to(from_row(d_q, t).from(j), length - t, keys - j);
  }

  template <int NV>
  void differentiate_keys(int64_t t, int64_t j, bool from_state, Tokens<Real> d_k) {
    Tile<Real, NV> sum;
    sum.clear();
    if (from_state) {
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r) sum.row[r].load_from(d_key_[t + r] + j, NV * kLanes<Real>);
    }
    const Tokens<Real> product = from_row(d_key_products_, t);
    const Tokens<const Real> key = constant(key_, j);
    sum.template add<true>(0, t, key, [&](int64_t s, int r) __attribute__((always_inline)) { return product[r][s]; });
    FWP_UNROLL for (int m = 0; m < kTileRows; ++m) {
      Group<Real, NV> other;
      other.load_from(key[t + m], NV * kLanes<Real>);
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r)
        if (m < r) sum.row[r].subtract(product[r][t + m], other);
    }
    add_from<true>(sum, t, d_key_products_, key);
    add_from<false>(sum, t, d_scores_, constant(query_, j));
    sum.store_to(from_row(d_k, t).from(j), length - t, keys - j);
  }
};

}  // namespace fwp
