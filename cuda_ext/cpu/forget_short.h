// Rules that forget but erase nothing, on the first tokens of a sequence without an initial state, in quadratic form.
// The key and the value of token s decay separately: X_ts = x_s * f_{s+1} * ... * f_t. With A_ts = q_t . K_ts, the
// output is out_t = sum over s <= t of A_ts V_ts. Only the last state, K_L^T V_L, is computed. README.md derives the
// backward pass. Products are computed in forward order, one factor per token. Nothing is divided and nothing is masked
// by multiplying with zero.
#pragma once

#include <algorithm>
#include <type_traits>

#include "forget.h"
#include "tile.h"

namespace fwp {

// Number of tokens at the start of a sequence that use the quadratic form. As for the delta rule, it depends only on
// the sizes. It is a multiple of kChunk, so the chunks of the scan do not move.
inline int64_t short_decay_tokens(int64_t keys, int64_t values) {
  // Operations of token t, forward + backward. Scan: 16 Dk Dv. This form: t (9 Dk + 7 Dv) + 3 Dk Dv. At 40 tokens this
  // form took 44 ms (scan 115 ms) for Dk = 256 and Dv = 64, and 9 ms (scan 15 ms) for Dk = Dv = 64.
  const int64_t even = 13 * keys * values / std::max<int64_t>(1, 9 * keys + 7 * values);
  return even < 32 ? 0 : std::min<int64_t>(64, (even + 16) / 32 * 32);
}

// One head of `length` tokens. All arrays except A and its gradient are copied to scratch, zero-padded.
template <typename A, Fades fades>
class ForgetShort {
 public:
  static constexpr bool kValuesFade = fades == Fades::kKeyAndValue;
  using Number = A;
  const int64_t length, keys, values;

  ForgetShort(int64_t length, int64_t keys, int64_t values, A* scratch) : length(length), keys(keys), values(values) {
    const int64_t tokens = round_up(length, kTileRows);
    for (Tokens<A>* x : {&query_, &d_query_}) *x = take(scratch, tokens, keys);
    for (Tokens<A>* x : {&read_, &d_read_}) *x = take(scratch, tokens, values);
    for (Tokens<A>* x : {&key_.x, &key_.fade, &key_.last, &key_.d_x, &key_.d_fade, &key_.d_last})
      *x = take(scratch, tokens, keys);
    for (Tokens<A>* x : {&value_.x, &value_.fade, &value_.last, &value_.d_x, &value_.d_fade, &value_.d_last})
      *x = take(scratch, tokens, values);
    for (Tokens<A>* x : {&scores_, &d_scores_}) *x = take(scratch, tokens, tokens);
    d_state_ = take(scratch, round_up(keys, kTileRows), values);
    faded_ = scratch;
    key_.width = keys, value_.width = values;
  }

  static int64_t scratch_size(int64_t length, int64_t keys, int64_t values) {
    const int64_t tokens = round_up(length, kTileRows);
    return tokens * (8 * padded<A>(keys) + 8 * padded<A>(values) + 2 * padded<A>(tokens)) +
           round_up(keys, kTileRows) * padded<A>(values) + tokens * kFaded;
  }

  void forward(const ForgetTokens<A>& in, Tokens<A> out, Tokens<A> state) {
    copy_inputs(in);
    score<true>(key_, query_, scores_);
    read<kValuesFade>(value_, scores_, read_);
    copy_back(read_, values, out);
    multiply_transposed(key_.last, value_.last, length, keys, values, state);
  }

  // d_state.data may be null.
  void backward(const ForgetTokens<A>& in, Tokens<const A> d_out, Tokens<const A> d_state,
                const ForgetGradients<A>& to) {
    copy_inputs(in);
    copy(d_out, length, values, d_read_);
    score<true>(key_, query_, scores_);
    score<kValuesFade>(value_, d_read_, d_scores_);
    differentiate_last(d_state);
    differentiate<true, true>(key_, query_, d_scores_);
    differentiate<kValuesFade, false>(value_, d_read_, scores_);
    copy_back(d_query_, keys, to.q);
    copy_back(value_.d_x, values, to.v);
    if (in.rate.data) differentiate_rates(in, to.rate);
    copy_back(key_.d_x, keys, to.k);
    if constexpr (fades == Fades::kHead)
      for (int64_t t = 0; t < length; ++t) to.head_decay[t] = sum_of(key_.d_fade[t], keys);
    else
      copy_back(key_.d_fade, keys, to.key_decay);
    if constexpr (kValuesFade) copy_back(value_.d_fade, values, to.value_decay);
  }

 private:
  // Vectors with a decay, one per token. `last`: the same vectors after all decays, as the last token sees them.
  struct Fading {
    Tokens<A> x, fade, last, d_x, d_fade, d_last;
    int64_t width;
  };
  using Rows = std::integral_constant<int, kTileRows>;
  // kNarrow: vectors of columns that are differentiated together. kFaded: numbers of decayed vectors per token.
  static constexpr int kNarrow = kTileVectors / 2;
  static constexpr int64_t kFaded = kTileRows * kNarrow * kLanes<A>;

  Tokens<A> query_, d_query_, read_, d_read_, scores_, d_scores_, d_state_;
  Fading key_, value_;
  A* faded_;

  void copy_inputs(const ForgetTokens<A>& in) {
    copy(in.q, length, keys, query_);
    copy(in.k, length, keys, key_.x);
    copy(in.v, length, values, value_.x);
    if constexpr (fades == Fades::kHead)
      for (int64_t t = 0; t < length; ++t)
        for (int64_t i = 0; i < keys; i += kLanes<A>) store(key_.fade[t] + i, in.head_decay[t] - Vector<A>{});
    else
      copy(in.key_decay, length, keys, key_.fade);
    if constexpr (kValuesFade) copy(in.value_decay, length, values, value_.fade);
    if (in.rate.data)
      for (int64_t t = 0; t < length; ++t) scale(key_.x[t], in.rate[t]);
  }

  void scale(A* key, A factor) const {
    for (int64_t i = 0; i < keys; i += kLanes<A>) store(key + i, factor * load(key + i));
  }

  static A sum_of(const A* x, int64_t columns) {
    Vector<A> sum = {};
    for (int64_t i = 0; i < columns; i += kLanes<A>) sum += load_part(x + i, columns - i);  // the padding of x is arbitrary
    return sum_lanes<A>(sum);
  }

  void copy_back(Tokens<A> x, int64_t columns, Tokens<A> to) const {
    for (int64_t t = 0; t < length; ++t) std::memcpy(to[t], x[t], columns * sizeof(A));
  }

  // Call f(t, how many of the tokens s to s + 3 are before t) for t = s, s + 1, ..., or in reverse. The count is a
  // constant.
  template <typename F>
  FWP_INLINE void for_tokens_from(int64_t s, F f) const {
    if (s < length) f(s, std::integral_constant<int, 0>{});
    if (s + 1 < length) f(s + 1, std::integral_constant<int, 1>{});
    if (s + 2 < length) f(s + 2, std::integral_constant<int, 2>{});
    if (s + 3 < length) f(s + 3, std::integral_constant<int, 3>{});
    for (int64_t t = s + kTileRows; t < length; ++t) f(t, Rows{});
  }
  template <typename F>
  FWP_INLINE void for_tokens_back_to(int64_t s, F f) const {
    static_assert(kTileRows == 4);
    for (int64_t t = length; t-- > s + kTileRows;) f(t, Rows{});
    if (s + 3 < length) f(s + 3, std::integral_constant<int, 3>{});
    if (s + 2 < length) f(s + 2, std::integral_constant<int, 2>{});
    if (s + 1 < length) f(s + 1, std::integral_constant<int, 1>{});
    if (s < length) f(s, std::integral_constant<int, 0>{});
  }

  // From four vectors as token t - 1 sees them to the same vectors as token t sees them. `earlier` of the four are
  // before t.
  template <bool kFades, int earlier, int NV>
  static FWP_INLINE void advance(const Fading& chain, int64_t t, int64_t j, Group<A, NV> (&faded)[kTileRows]) {
    if constexpr (kFades && earlier > 0) {
      Group<A, NV> fade;
      fade.load_from(chain.fade[t] + j, NV * kLanes<A>);
      FWP_UNROLL for (int m = 0; m < earlier; ++m)
        FWP_UNROLL for (int n = 0; n < NV; ++n) faded[m].x[n] *= fade.x[n];
    }
    if constexpr (earlier < kTileRows) faded[earlier].load_from(chain.x[t] + j, NV * kLanes<A>);
  }

  // scores[t][s] = y_t . X_ts for s <= t. Also stores the last X.
  template <bool kFades>
  void score(const Fading& chain, Tokens<A> y, Tokens<A> scores) {
    for_panels<A>(chain.width, [&](int64_t j, auto vectors) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t s = 0; s < length; s += kTileRows) {
        Group<A, NV> faded[kTileRows];
        FWP_UNROLL for (int m = 0; m < kTileRows; ++m) faded[m].clear();
        for_tokens_from(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
          advance<kFades, decltype(earlier)::value>(chain, t, j, faded);
          Group<A, NV> own;
          own.load_from(y[t] + j, NV * kLanes<A>);
          Vector<A> sum[kTileRows];
          FWP_UNROLL for (int m = 0; m < kTileRows; ++m) {
            sum[m] = Vector<A>{};
            if (m <= decltype(earlier)::value)
              FWP_UNROLL for (int n = 0; n < NV; ++n) sum[m] += own.x[n] * faded[m].x[n];
          }
          FWP_UNROLL for (int m = 0; m < kTileRows; m += kPiece<A>) {
            Piece<A> total = sums_of<A>(sum + m), other;
            A* target = scores[t] + s + m;
            std::memcpy(&other, target, sizeof other);
            if (j) total += other;
            std::memcpy(target, &total, sizeof total);
          }
        });
        FWP_UNROLL for (int m = 0; m < kTileRows; ++m) faded[m].store_to(chain.last[s + m] + j, NV * kLanes<A>);
      }
    });
  }

  // out_t = sum over s <= t of scores[t][s] X_ts. Also stores the last X.
  template <bool kFades>
  void read(const Fading& chain, Tokens<A> scores, Tokens<A> out) {
    for_panels<A>(chain.width, [&](int64_t j, auto vectors) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t s = 0; s < length; s += kTileRows) {
        Group<A, NV> faded[kTileRows];
        FWP_UNROLL for (int m = 0; m < kTileRows; ++m) faded[m].clear();
        for_tokens_from(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
          advance<kFades, decltype(earlier)::value>(chain, t, j, faded);
          Group<A, NV> sum;
          if (s)
            sum.load_from(out[t] + j, NV * kLanes<A>);
          else
            sum.clear();
          FWP_UNROLL for (int m = 0; m < kTileRows; ++m)
            if (m <= decltype(earlier)::value) sum.add(scores[t][s + m], faded[m]);
          sum.store_to(out[t] + j, NV * kLanes<A>);
        });
        FWP_UNROLL for (int m = 0; m < kTileRows; ++m) faded[m].store_to(chain.last[s + m] + j, NV * kLanes<A>);
      }
    });
  }

  // The gradients of the last keys and values, from the gradient of the last state.
  void differentiate_last(Tokens<const A> d_state) {
    const int64_t tokens = round_up(length, kTileRows);
    if (!d_state.data) {
      for (const Fading* chain : {&key_, &value_})
        std::memset(chain->d_last.data, 0, tokens * chain->d_last.stride * sizeof(A));
      return;
    }
    copy(d_state, keys, values, d_state_);
    multiply_rows(value_.last, d_state_, length, keys, values, key_.d_last);
    for_panels<A>(values, [&](int64_t j, auto vectors) {
      for (int64_t t = 0; t < length; t += kTileRows) {
        Tile<A, decltype(vectors)::value> sum;
        sum.clear();
        sum.add_in_parts(keys, constant(d_state_, j),
                         [&](int64_t i, int r) __attribute__((always_inline)) { return key_.last[t + r][i]; });
        sum.store_to(from_row(value_.d_last, t).from(j), kTileRows, values - j);
      }
    });
  }

  // Gradients of x and f, from d_scores, the gradient of y_t . X_ts. X_Ls also has a gradient of its own. With
  // kQueries, also computes d_query, the gradient of y.
  template <bool kFades, bool kQueries>
  void differentiate(const Fading& chain, Tokens<A> y, Tokens<A> d_scores) {
    for_panels<A, kNarrow>(chain.width, [&](int64_t j, auto vectors) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t s = 0; s < length; s += kTileRows) {
        Group<A, NV> faded[kTileRows], gradient[kTileRows];
        if constexpr (kFades || kQueries)
          for_tokens_from(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
            advance<kFades, decltype(earlier)::value>(chain, t, j, faded);
            FWP_UNROLL for (int m = 0; m < kTileRows; ++m)
              if (m <= decltype(earlier)::value) faded[m].store_to(faded_at<NV>(t, m), NV * kLanes<A>);
          });
        FWP_UNROLL for (int m = 0; m < kTileRows; ++m)
          gradient[m].load_from(chain.d_last[s + m] + j, NV * kLanes<A>);
        for_tokens_back_to(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
          differentiate_token<kFades, kQueries, decltype(earlier)::value>(chain, t, s, j, y, d_scores[t] + s, gradient);
        });
      }
    });
  }

  template <int NV>
  FWP_INLINE A* faded_at(int64_t t, int m) const {
    return faded_ + t * kFaded + m * NV * kLanes<A>;
  }

  template <bool kFades, bool kQueries, int earlier, int NV>
  FWP_INLINE void differentiate_token(const Fading& chain, int64_t t, int64_t s, int64_t j, Tokens<A> y,
                                      const A* d_score, Group<A, NV> (&gradient)[kTileRows]) {
    constexpr int64_t width = NV * kLanes<A>;
    constexpr int seen = std::min(earlier + 1, kTileRows);
    Group<A, NV> own, x;
    own.load_from(y[t] + j, width);
    FWP_UNROLL for (int m = 0; m < seen; ++m) gradient[m].add(d_score[m], own);
    if constexpr (kQueries) {
      Group<A, NV> d_own = sum_so_far<NV>(d_query_[t] + j, s > 0);
      FWP_UNROLL for (int m = 0; m < seen; ++m) {
        x.load_from(faded_at<NV>(t, m), width);
        d_own.add(d_score[m], x);
      }
      d_own.store_to(d_query_[t] + j, width);
    }
    if constexpr (kFades) {
      Group<A, NV> fade, d_fade = sum_so_far<NV>(chain.d_fade[t] + j, s > 0);
      fade.load_from(chain.fade[t] + j, width);
      FWP_UNROLL for (int m = 0; m < earlier; ++m) {
        x.load_from(faded_at<NV>(t - 1, m), width);
        FWP_UNROLL for (int n = 0; n < NV; ++n) {
          d_fade.x[n] += gradient[m].x[n] * x.x[n];
          gradient[m].x[n] *= fade.x[n];
        }
      }
      d_fade.store_to(chain.d_fade[t] + j, width);
    }
    if constexpr (earlier < kTileRows) gradient[earlier].store_to(chain.d_x[t] + j, width);
  }

  template <int NV>
  static FWP_INLINE Group<A, NV> sum_so_far(const A* p, bool begun) {
    Group<A, NV> sum;
    sum.clear();
    if (begun) sum.load_from(p, NV * kLanes<A>);
    return sum;
  }

  // The gradients of the rates, and the gradients of the keys from those of rate * k.
  void differentiate_rates(const ForgetTokens<A>& in, Rates<A> d_rate) {
    for (int64_t t = 0; t < length; ++t) {
      Vector<A> sum = {};
      for (int64_t i = 0; i < keys; i += kLanes<A>)
        sum += load_part(in.k[t] + i, keys - i) * load_part(key_.d_x[t] + i, keys - i);
      d_rate[t] = sum_lanes<A>(sum);
      scale(key_.d_x[t], in.rate[t]);
    }
  }
};

}  // namespace fwp
