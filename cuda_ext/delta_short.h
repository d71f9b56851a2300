// The delta rule on the first tokens of a sequence without an initial state, in its quadratic form: with N_ts = k_t k_s
// and S_ts = q_t k_s, the error is e_t = v_t - sum over s < t of N_ts u_s, the write u_t = beta_t e_t, and the read
// out_t = sum over s <= t of S_ts u_s: no state but the last is made. README.md derives the backward pass.
// Each sum runs over the tokens that the rule lets it see, and over no others: nothing is masked by a zero.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "state_block.h"

namespace fwp {

// How many tokens at the start of a sequence without a state take the quadratic form. Not how many follow, only the
// sizes decide, so that a prefix of the input gives a bit-identical prefix of the output.
inline int64_t short_tokens(int64_t keys, int64_t values) {
  // Multiply-adds of token t, forward + backward: 12 Dk Dv in the scan, t (8 Dk + 6 Dv) + Dk Dv here. At 40 tokens of
  // Dk = 256 and Dv = 64 this form took 22 ms where the scan took 60.
  const int64_t even = 11 * keys * values / std::max<int64_t>(1, 8 * keys + 6 * values);
  return even < 32 ? 0 : std::min<int64_t>(64, even / 16 * 16);
}

// A tile: 4 x 4 vectors of sums (4 x 2 where there are 16 registers), which leaves room for their operands.
constexpr int kTileRows = 4;
constexpr int kTileVectors = kTokens;

FWP_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// GCC loads what is used several times again for each use, as an operand of its instruction; loads are what is scarce.
template <typename A>
FWP_INLINE Vector<A> in_register(Vector<A> x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// Where lane `lane` of a sum of two vectors, the second one's lanes numbered after the first's, comes from.
template <int half, int lanes>
constexpr int folded(int lane, bool upper) {
  const int within = lane % (2 * half);
  return lane - within + (within < half ? within : within - half + lanes) + (upper ? half : 0);
}

template <typename A, int half, int... lane>
FWP_INLINE Vector<A> fold(Vector<A> x, Vector<A> y, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(x, y, folded<half, kLanes<A>>(lane, false)...) +
         __builtin_shufflevector(x, y, folded<half, kLanes<A>>(lane, true)...);
}

// The sum of the lanes of x[n] in lane n of x[0], for kLanes vectors: each step folds two vectors into one.
template <typename A, int half = kLanes<A> / 2>
FWP_INLINE void sum_lanes_of_each(Vector<A>* x) {
  FWP_UNROLL for (int n = 0; n < half; ++n)
    x[n] = fold<A, half>(x[n], x[n + half], std::make_integer_sequence<int, kLanes<A>>{});
  if constexpr (half > 1) sum_lanes_of_each<A, half / 2>(x);
}

// product[t][s] = x_t y_s for kTileRows t and kTileVectors s.
template <typename A>
FWP_INLINE void multiply_tile(Tokens<const A> x, Tokens<const A> y, int64_t width, A* product, int64_t stride) {
  constexpr int count = kTileRows * kTileVectors;
  static_assert(count % kLanes<A> == 0);
  Vector<A> sum[count];
  FWP_UNROLL for (int n = 0; n < count; ++n) sum[n] = Vector<A>{};
  for (int64_t i = 0; i < width; i += kLanes<A>) {
    Vector<A> other[kTileVectors];
    FWP_UNROLL for (int s = 0; s < kTileVectors; ++s) other[s] = in_register<A>(load(y[s] + i));
    FWP_UNROLL for (int t = 0; t < kTileRows; ++t) {
      const Vector<A> own = in_register<A>(load(x[t] + i));
      FWP_UNROLL for (int s = 0; s < kTileVectors; ++s) sum[t * kTileVectors + s] += own * other[s];
    }
  }
  A result[count];
  FWP_UNROLL for (int n = 0; n < count; n += kLanes<A>) {
    sum_lanes_of_each<A>(sum + n);
    store(result + n, sum[n]);
  }
  FWP_UNROLL for (int t = 0; t < kTileRows; ++t)
    std::memcpy(product + t * stride, result + t * kTileVectors, kTileVectors * sizeof(A));
}

// Sums of vectors for kTileRows tokens (or keys), on a panel of columns.
template <typename A, int NV>
struct Tile {
  Group<A, NV> row[kTileRows];

  FWP_INLINE void clear() {
    FWP_UNROLL for (int r = 0; r < kTileRows; ++r) row[r].clear();
  }
  // row[r] += (or -=) the sum of factor(s, r) x_s over begin <= s < end.
  template <bool subtract = false, typename F>
  FWP_INLINE void add(int64_t begin, int64_t end, Tokens<const A> x, F factor) {
    for (int64_t s = begin; s < end; ++s) {
      Group<A, NV> other;
      FWP_UNROLL for (int n = 0; n < NV; ++n) other.x[n] = in_register<A>(load(x[s] + n * kLanes<A>));
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r)
        subtract ? row[r].subtract(factor(s, r), other) : row[r].add(factor(s, r), other);
    }
  }
  FWP_INLINE void store_to(Tokens<A> x, int64_t rows, int64_t columns) const {
    FWP_UNROLL for (int r = 0; r < kTileRows; ++r)
      if (r < rows) row[r].store_to(x[r], columns);
  }
};

// Call f(first column, vectors) for panels of columns.
template <typename A, typename F>
FWP_INLINE void for_panels(int64_t columns, F f) {
  int64_t j = 0;
  for (; columns - j > (kTileVectors - 1) * kLanes<A>; j += kTileVectors * kLanes<A>)
    f(j, std::integral_constant<int, kTileVectors>{});
  for (; j < columns; j += kLanes<A>) f(j, std::integral_constant<int, 1>{});
}

// One head of `length` tokens. What is read more than once is copied to scratch, padded by zeros to whole vectors and
// tiles. Its stride is no power of two: rows that share a set of the cache would drive each other out.
template <typename A>
class DeltaShort {
 public:
  const int64_t length, keys, values;

  DeltaShort(int64_t length, int64_t keys, int64_t values, A* scratch)
      : length(length), keys(keys), values(values), free_(scratch) {
    const int64_t tokens = round_up(length, kTileRows);
    for (Tokens<A>* x : {&key_, &query_, &d_key_}) *x = take(tokens, keys);
    for (Tokens<A>* x : {&write_, &d_out_, &d_value_}) *x = take(tokens, values);
    for (Tokens<A>* x : {&key_products_, &scores_, &d_key_products_, &d_scores_}) *x = take(tokens, tokens);
    d_state_ = take(round_up(keys, kTileRows), values);
  }

  static int64_t scratch_size(int64_t length, int64_t keys, int64_t values) {
    const int64_t tokens = round_up(length, kTileRows);
    return tokens * (3 * stride(keys) + 3 * stride(values) + 4 * stride(tokens)) +
           round_up(keys, kTileRows) * stride(values);
  }

  void forward(Tokens<const A> q, Tokens<const A> k, Tokens<const A> v, Rates<const A> beta, Tokens<A> out,
               Tokens<A> error, Tokens<A> state) {
    multiply_keys(q, k);
    for_panels<A>(values, [&](int64_t j, auto vectors) {
      for (int64_t t = 0; t < length; t += kTileRows) {
        write<vectors.value>(t, j, v, beta, error);
        read<vectors.value>(t, j, out);
      }
    });
    make_state(state);
  }

  // The state after the last token, from the errors: bit for bit that of the forward pass.
  void rebuild_state(Tokens<const A> k, Rates<const A> beta, Tokens<const A> error, Tokens<A> state) {
    copy(k, length, keys, key_);
    rebuild_writes(beta, error);
    make_state(state);
  }

  // d_state.data may be null. d_beta holds zeros at first.
  void backward(Tokens<const A> q, Tokens<const A> k, Rates<const A> beta, Tokens<const A> error, Tokens<const A> d_out,
                Tokens<const A> d_state, Tokens<A> d_q, Tokens<A> d_k, Tokens<A> d_v, Rates<A> d_beta) {
    multiply_keys(q, k);
    rebuild_writes(beta, error);
    copy(d_out, length, values, d_out_);
    if (d_state.data) copy(d_state, keys, values, d_state_);
    const int64_t last = (length - 1) / kTileRows * kTileRows;
    for_panels<A>(values, [&](int64_t j, auto vectors) {
      for (int64_t t = last; t >= 0; t -= kTileRows)
        differentiate_values<vectors.value>(t, j, beta, error, d_state.data, d_v, d_beta);
    });
    multiply_lower(d_out_, write_, values, d_scores_);
    multiply_lower(d_value_, write_, values, d_key_products_);
    if (d_state.data)
      for (int64_t t = 0; t < length; t += kTileRows)
        for (int64_t i = 0; i < keys; i += kTileVectors)
          multiply_tile<A>(constant(from_row(write_, t)), constant(from_row(d_state_, i)), values, d_key_[t] + i,
                           d_key_.stride);
    for_panels<A>(keys, [&](int64_t j, auto vectors) {
      for (int64_t t = 0; t < length; t += kTileRows) {
        differentiate_queries<vectors.value>(t, j, d_q);
        differentiate_keys<vectors.value>(t, j, d_state.data, d_k);
      }
    });
  }

 private:
  A* free_;
  Tokens<A> key_, query_, d_key_, write_, d_out_, d_value_, d_state_;
  Tokens<A> key_products_, scores_, d_key_products_, d_scores_;

  static int64_t stride(int64_t columns) { return round_up(columns, kLanes<A>) + kLanes<A>; }

  Tokens<A> take(int64_t rows, int64_t columns) {
    const Tokens<A> x{free_, stride(columns)};
    free_ += rows * x.stride;
    return x;
  }

  static Tokens<const A> constant(Tokens<A> x, int64_t column = 0) { return {x.data + column, x.stride}; }
  template <typename B>
  static Tokens<B> from_row(Tokens<B> x, int64_t row) {
    return {x[row], x.stride};
  }

  static void copy(Tokens<const A> x, int64_t rows, int64_t columns, Tokens<A> to) {
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t i = 0; i < columns; i += kLanes<A>) store(to[t] + i, load_part(x[t] + i, columns - i));
    for (int64_t t = rows; t < round_up(rows, kTileRows); ++t) std::memset(to[t], 0, to.stride * sizeof(A));
  }

  // product[t][s] = x_t y_s for s <= t. The tiles on the diagonal hold some more, which nobody reads.
  void multiply_lower(Tokens<A> x, Tokens<A> y, int64_t width, Tokens<A> product) {
    for (int64_t t = 0; t < length; t += kTileRows)
      for (int64_t s = 0; s < t + kTileRows; s += kTileVectors)
        multiply_tile<A>(constant(from_row(x, t)), constant(from_row(y, s)), width, product[t] + s, product.stride);
  }

  void multiply_keys(Tokens<const A> q, Tokens<const A> k) {
    copy(q, length, keys, query_);
    copy(k, length, keys, key_);
    multiply_lower(key_, key_, keys, key_products_);
    multiply_lower(query_, key_, keys, scores_);
  }

  void rebuild_writes(Rates<const A> beta, Tokens<const A> error) {
    copy(error, length, values, write_);
    for (int64_t t = 0; t < length; ++t)
      for (int64_t j = 0; j < values; j += kLanes<A>) store(write_[t] + j, beta[t] * load(write_[t] + j));
  }

  template <int NV>
  void write(int64_t t, int64_t j, Tokens<const A> v, Rates<const A> beta, Tokens<A> error) {
    const Tokens<A> product = from_row(key_products_, t);
    Tile<A, NV> e;
    FWP_UNROLL for (int r = 0; r < kTileRows; ++r) e.row[r].load_from(v[std::min(t + r, length - 1)] + j, values - j);
    e.template add<true>(0, t, constant(write_, j),
                         [&](int64_t s, int r) __attribute__((always_inline)) { return product[r][s]; });
    Tile<A, NV> u;
    FWP_UNROLL for (int r = 0; r < kTileRows; ++r) {
      FWP_UNROLL for (int m = 0; m < kTileRows; ++m)
        if (m < r) e.row[r].subtract(product[r][t + m], u.row[m]);
      u.row[r] = e.row[r];
      u.row[r].scale(beta[std::min(t + r, length - 1)]);
    }
    e.store_to(from_row(error, t).from(j), length - t, values - j);
    u.store_to(from_row(write_, t).from(j), kTileRows, NV * kLanes<A>);
  }

  template <int NV>
  void read(int64_t t, int64_t j, Tokens<A> out) {
    const Tokens<A> score = from_row(scores_, t);
    Tile<A, NV> sum;
    sum.clear();
    add_until<NV>(sum, t, score, constant(write_, j));
    sum.store_to(from_row(out, t).from(j), length - t, values - j);
  }

  // row[r] += the sum of factor[r][s] x_s over s <= t + r.
  template <int NV>
  FWP_INLINE void add_until(Tile<A, NV>& sum, int64_t t, Tokens<A> factor, Tokens<const A> x) {
    sum.add(0, t, x, [&](int64_t s, int r) __attribute__((always_inline)) { return factor[r][s]; });
    FWP_UNROLL for (int m = 0; m < kTileRows; ++m) {
      Group<A, NV> other;
      other.load_from(x[t + m], NV * kLanes<A>);
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r)
        if (m <= r) sum.row[r].add(factor[r][t + m], other);
    }
  }

  // row[r] += the sum of factor[s][t + r] x_s over s >= t + r; or -= that over s > t + r.
  template <bool subtract, int NV>
  FWP_INLINE void add_from(Tile<A, NV>& sum, int64_t t, Tokens<A> factor, Tokens<const A> x) {
    FWP_UNROLL for (int m = 0; m < kTileRows; ++m) {
      if (t + m >= length) break;
      Group<A, NV> other;
      other.load_from(x[t + m], NV * kLanes<A>);
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r) {
        if (subtract && m > r) sum.row[r].subtract(factor[t + m][t + r], other);
        if (!subtract && m >= r) sum.row[r].add(factor[t + m][t + r], other);
      }
    }
    sum.template add<subtract>(t + kTileRows, length, x, [&](int64_t s, int r) __attribute__((always_inline)) {
      return factor[s][t + r];
    });
  }

  void make_state(Tokens<A> state) {
    for_panels<A>(values, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t i = 0; i < keys; i += kTileRows) {
        Tile<A, NV> sum;
        sum.clear();
        sum.add(0, length, constant(write_, j),
                [&](int64_t s, int r) __attribute__((always_inline)) { return key_[s][i + r]; });
        sum.store_to(from_row(state, i).from(j), keys - i, values - j);
      }
    });
  }

  template <int NV>
  void differentiate_values(int64_t t, int64_t j, Rates<const A> beta, Tokens<const A> error, bool from_state,
                                       Tokens<A> d_v, Rates<A> d_beta) {
    Tile<A, NV> d_write, d_value;
    d_write.clear();
    if (from_state)
      d_write.add(0, keys, constant(d_state_, j),
                  [&](int64_t i, int r) __attribute__((always_inline)) { return key_[t + r][i]; });
    // Later tokens first: those of this tile come one after the other, as each takes the d_value of those after it.
    const Tokens<const A> d_out = constant(d_out_, j), later = constant(d_value_, j);
    d_write.add(t + kTileRows, length, d_out,
                [&](int64_t s, int r) __attribute__((always_inline)) { return scores_[s][t + r]; });
    d_write.template add<true>(t + kTileRows, length, later, [&](int64_t s, int r) __attribute__((always_inline)) {
      return key_products_[s][t + r];
    });
    FWP_UNROLL for (int r = kTileRows - 1; r >= 0; --r) {
      if (t + r >= length) continue;
      FWP_UNROLL for (int m = kTileRows - 1; m >= 0; --m) {
        if (m < r || t + m >= length) continue;
        Group<A, NV> read;
        read.load_from(d_out[t + m], NV * kLanes<A>);
        d_write.row[r].add(scores_[t + m][t + r], read);
        if (m > r) d_write.row[r].subtract(key_products_[t + m][t + r], d_value.row[m]);
      }
      d_value.row[r] = d_write.row[r];
      d_value.row[r].scale(beta[t + r]);
      d_value.row[r].store_to(d_value_[t + r] + j, NV * kLanes<A>);
      d_value.row[r].store_to(d_v[t + r] + j, values - j);
      Group<A, NV> e;
      e.load_from(error[t + r] + j, values - j);
      Vector<A> sum = {};
      FWP_UNROLL for (int n = 0; n < NV; ++n) sum += e.x[n] * d_write.row[r].x[n];
      d_beta[t + r] += sum_lanes<A>(sum);
    }
  }

  template <int NV>
  void differentiate_queries(int64_t t, int64_t j, Tokens<A> d_q) {
    Tile<A, NV> sum;
    sum.clear();
    add_until<NV>(sum, t, from_row(d_scores_, t), constant(key_, j));
    sum.store_to(from_row(d_q, t).from(j), length - t, keys - j);
  }

  template <int NV>
  void differentiate_keys(int64_t t, int64_t j, bool from_state, Tokens<A> d_k) {
    Tile<A, NV> sum;
    sum.clear();
    if (from_state) {
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r) sum.row[r].load_from(d_key_[t + r] + j, NV * kLanes<A>);
    }
    const Tokens<A> product = from_row(d_key_products_, t);
    const Tokens<const A> key = constant(key_, j);
    sum.template add<true>(0, t, key, [&](int64_t s, int r) __attribute__((always_inline)) { return product[r][s]; });
    FWP_UNROLL for (int m = 0; m < kTileRows; ++m) {
      Group<A, NV> other;
      other.load_from(key[t + m], NV * kLanes<A>);
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r)
        if (m < r) sum.row[r].subtract(product[r][t + m], other);
    }
    add_from<true>(sum, t, d_key_products_, key);
    add_from<false>(sum, t, d_scores_, constant(query_, j));
    sum.store_to(from_row(d_k, t).from(j), length - t, keys - j);
  }
};

}  // namespace fwp
