// Rules that forget, on chunks of kChunkTokens tokens. Between chunks the state moves once, by products of matrices;
// inside a chunk the tokens see each other in quadratic form. ../cpu.md derives both passes.
//
// A writer is a sequence of keys n_s with values m_s: the keys of the rule, and those of a removal. `r` is what a token
// retrieves. F[t][s], N_ts = n_s * F_ts: ../rule.h has the symbols; F[t][-1] is c_t. A program of one chunk:
//
//     for t in range(L):
//         reader = a[t] * k[t] if erases else y[t]
//         r[t] = (reader * F[t - 1][-1]) @ W + sum(reader @ (n[s] * F[t - 1][s]) * m[s] for n, m in writers for s in range(t))
//         written[t], removed[t] = b[t] * (v[t] - r[t] if erases else v[t]), -r[t]
//         out[t] = (q[t] * F[t][-1]) @ W * Z[t][-1]
//         out[t] += sum(q[t] @ (n[s] * F[t][s]) * m[s] * Z[t][s] for n, m in writers for s in range(t + 1))
//     W = outer(F[t][-1], Z[t][-1]) * W + sum(outer(n[s] * F[t][s], m[s] * Z[t][s]) for n, m in writers for s in range(L))
//
// Decays are only multiplied, one factor a token: nothing is divided, and nothing is masked by multiplying with zero.
#pragma once

#include <algorithm>
#include <type_traits>

#include "bfloat16.h"
#include "forget.h"
#include "tile.h"

namespace fwp {

constexpr int64_t kChunkTokens = 16;
static_assert(kKeptEvery % kChunkTokens == 0);

// Call f(first column, vectors) for panels of columns. The last may reach into the padding.
template <typename Real, int vectors, typename F>
FWP_INLINE void for_columns(int64_t columns, F f) {
  for (int64_t j = 0; j < columns; j += vectors * kLanes<Real>) f(j, std::integral_constant<int, vectors>{});
}
template <typename Real, int NV>
FWP_INLINE void multiply(Group<Real, NV>& x, const Group<Real, NV>& factor) {
  FWP_UNROLL for (int n = 0; n < NV; ++n) x.x[n] *= factor.x[n];
}
template <typename Real>
void clear(Tokens<Real> x, int64_t rows) { std::memset(x.data, 0, rows * x.stride * sizeof(Real)); }
template <typename Real>
void fill(Real* x, int64_t columns, Real number) {
  for (int64_t i = 0; i < columns; i += kLanes<Real>) store(x + i, number - Vector<Real>{});
}
// From N_{t-1,s} to N_ts for four s, of which `earlier` are before t; key and decay of token t.
template <int earlier, typename Real, int NV>
FWP_INLINE void advance(const Real* key, const Real* decay, Group<Real, NV> (&faded)[kTileRows]) {
  if constexpr (earlier > 0) {
    Group<Real, NV> fade;
    fade.load_from(decay, NV * kLanes<Real>);
    FWP_UNROLL for (int m = 0; m < earlier; ++m) multiply(faded[m], fade);
  }
  if constexpr (earlier < kTileRows) faded[earlier].load_from(key, NV * kLanes<Real>);
}

// What both passes over one head need: keys, decays, the writers of a chunk and the change of the state. All arrays of a chunk
// are in scratch, zero-padded. `values` may be some of the columns of W.
template <typename Real, Fades fades, Erases erases>
struct ForgetChunk {
  using Number = Real;
  using In = ForgetTokens<Real, Stored<Real>>;
  static constexpr int kPanel = 2;  // vectors of columns that are processed together
  static constexpr int64_t kColumns = kPanel * kLanes<Real>;
  static constexpr bool kRetrieves = erases != Erases::kNothing, kRemoves = erases == Erases::kRemoval;
  static constexpr bool kByHead = fades == Fades::kHead, kValuesFade = fades == Fades::kKeyAndValue;
  static_assert(!kRetrieves || !kValuesFade);

  struct Writer {
    Tokens<const Real> key;                      // n_s
    Tokens<Real> padded_key, key_at_end, value;  // N_Cs, m_s
    Tokens<Real> with_query, with_reader;        // P and A: q_t . N_ts and y_t . N_{t-1,s}
  };
  static constexpr int kWriters = kRemoves ? 2 : 1;
  // Vectors of columns that are processed together if two kinds of sums need registers.
  static constexpr int kNarrow = kTileVectors / 2;
  using Rows = std::integral_constant<int, kTileRows>;

  const int64_t keys, values;
  int64_t count = 0, rows = 0;             // tokens of the chunk, and in groups: the others do nothing
  Tokens<Real> state;                      // W
  Tokens<const Real> query, reader, fade;  // q_t, y_t, a_t
  Tokens<const Real> error, value_fade;    // v_t, or v_t - r_t of a rule that erases with its key; z_t
  Tokens<Real> seen_query, seen_reader;    // q_t * c_t and y_t * c_{t-1}
  Tokens<Real> read;                       // (q_t * c_t) W
  Writer writer[kWriters];
  Tokens<Real> total, total_of_value;  // c_C in the first row (see see_group()), and Z_C
  // Memory for tokens that are not whole vectors, or not a whole chunk.
  Tokens<Real> padded_query, padded_reader, padded_fade, padded_value, padded_error, padded_value_fade;
  NextTokens<Real, kChunkTokens, kColumns> next;  // a panel at a time while states change
  Real* scratch;                                  // what is left of it
  const bool counts;                              // only what it takes

  ForgetChunk(int64_t keys, int64_t values, Real* scratch)
      : keys(keys), values(values), scratch(scratch), counts(!scratch) {
    state = take_state();
    for (Tokens<Real>* x : {&padded_query, &padded_reader, &padded_fade, &seen_query, &seen_reader, &total})
      *x = take_keys();
    for (Tokens<Real>* x : {&padded_value, &padded_error, &padded_value_fade, &read}) *x = take_values();
    for (Writer& w : writer) {
      w.padded_key = take_keys(), w.key_at_end = take_keys(), w.value = take_values();
      w.with_query = take_rows(kChunkTokens, kChunkTokens), w.with_reader = take_rows(kChunkTokens, kChunkTokens);
    }
    total_of_value = take_rows(1, values);
  }
  // Padding is zero. It takes part in products, where numbers of others may be denormal, and then ten times as slow.
  Tokens<Real> take_rows(int64_t rows, int64_t columns) {
    const Tokens<Real> x = take(scratch, rows, columns);
    const int64_t whole = columns / kLanes<Real> * kLanes<Real>;
    if (!counts && !whole_panels(columns))
      for (int64_t t = 0; t < rows; ++t) std::memset(x[t] + whole, 0, (x.stride - whole) * sizeof(Real));
    return x;
  }
  Tokens<Real> take_keys() { return take_rows(kChunkTokens, keys); }
  Tokens<Real> take_values() { return take_rows(kChunkTokens, values); }
  Tokens<Real> take_state() {
    const int64_t rows = round_up(keys, std::max(kLanes<Real>, kTileRows));
    const Tokens<Real> x = take_rows(rows, values);
    if (!counts) clear(from_row(x, keys), rows - keys);
    return x;
  }
  int64_t taken() const { return numbers_taken(scratch); }

  void copy_in(Matrix<const Real> from, Tokens<Real> to) const {
    if (from.column_stride == 1) return copy(Tokens<const Real>{from.data, from.row_stride}, keys, values, to);
    clear(to, round_up(keys, kTileRows));
    copy_matrix(from, keys, values, Matrix<Real>{to.data, to.stride, 1});
  }
  void copy_out(Tokens<Real> from, Matrix<Real> to) const {
    if (to.data) copy_matrix({from.data, from.stride, 1}, keys, values, to);
  }

  static bool whole_panels(int64_t columns) { return columns % kColumns == 0; }
  bool in_place(const Stored<Real>& x, int64_t columns) const {
    return !x.half && count == kChunkTokens && whole_panels(columns);
  }
  // The chunk's tokens of x, zero-padded.
  Tokens<const Real> input(const Stored<Real>& x, int64_t first, int64_t columns, Tokens<Real> padded) const {
    if (in_place(x, columns)) return constant(x.tokens_from(first));
    if (count < kChunkTokens) clear(padded, kChunkTokens);
    for (int64_t t = 0; t < count; ++t) x.read_to(padded[t], first + t, columns);
    return constant(padded);
  }
  // Where to write the chunk's tokens of x, before deliver().
  Tokens<Real> output(const Stored<Real>& x, int64_t first, int64_t columns, Tokens<Real> padded) const {
    return x.data && in_place(x, columns) ? x.tokens_from(first) : padded;
  }
  void deliver(Tokens<Real> padded, int64_t columns, const Stored<Real>& to, int64_t first) const {
    if (!to.data || in_place(to, columns)) return;
    for (int64_t t = 0; t < count; ++t) to.write_from(padded[t], first + t, columns);
  }
  Real rate_at(const In& in, int64_t first, int64_t t) const { return t < count ? in.rate_at(first + t) : 0; }

  void begin(int64_t tokens) { count = std::min(kChunkTokens, tokens), rows = round_up(count, kTileRows); }

  // The chunk from `first` on comes next; -1: none.
  void expect(const In& in, int64_t first) {
    next.kinds = 0;
    for (const Stored<Real>& x : {in.q, in.k, in.key_decay, in.removal, in.removal_key}) next.add(x, first, keys);
    for (const Stored<Real>& x : {in.v, in.value_decay}) next.add(x, first, values);
  }

  // Everything that needs keys and decays only. Without scores, what the next chunk needs.
  template <bool kScores = true>
  void prepare(const In& in, int64_t first) {
    query = input(in.q, first, keys, padded_query);
    writer[0].key = input(in.k, first, keys, writer[0].padded_key);
    reader = constant(padded_reader), fade = constant(padded_fade);
    if (in.key_decay.data) fade = input(in.key_decay, first, keys, padded_fade);
    for (int64_t s = in.key_decay.data ? count : 0; s < rows; ++s)
      fill(padded_fade[s], keys, s < count ? in.head_decay[first + s] : 1);
    if constexpr (kRemoves) {
      writer[1].key = input(in.removal, first, keys, writer[1].padded_key);
      reader = input(in.removal_key, first, keys, padded_reader);
    }
    for (int64_t t = 0; t < rows; t += kTileRows) {
      for (const Writer& w : writer) see_group<kScores>(w, t);
      for (int64_t s = 0; s < t; s += kTileRows)
        for (const Writer& w : writer) {
          if constexpr (kScores) score(constant(seen_query), constant(w.key_at_end), t, s, w.with_query);
          if constexpr (kScores && kRetrieves) score(constant(seen_reader), constant(w.key_at_end), t, s, w.with_reader);
          scale_rows(w.key_at_end, s, t);
        }
      if (t == 0) continue;
      if constexpr (kScores) scale_rows(seen_query, t, 0);
      if constexpr (kScores && kRetrieves) scale_rows(seen_reader, t, 0);
      for (int64_t i = 0; i < keys; i += kLanes<Real>) store(total[0] + i, load(total[0] + i) * load(total[t] + i));
    }
  }

  // A group of kTileRows tokens: queries and readers after its decays, the products of a writer's keys with them, and the keys
  // as its last token sees them. total[s]: the decays of the group at s.
  template <bool kScores>
  void see_group(const Writer& w, int64_t s) const {
    constexpr int kProducts = kTileRows * kTileRows;  // t(t - 1) / 2 with readers, t(t + 1) / 2 with queries
    static_assert(kProducts % kLanes<Real> == 0);
    Vector<Real> sum[kProducts];
    FWP_UNROLL for (int n = 0; n < kProducts; ++n) sum[n] = Vector<Real>{};
    for (int64_t i = 0; i < keys; i += kLanes<Real>) {
      Vector<Real> so_far = Real(1) - Vector<Real>{}, faded[kTileRows];
      FWP_UNROLL for (int t = 0; t < kTileRows; ++t) {
        const Vector<Real> own = load(w.key[s + t] + i), decay = load(fade[s + t] + i);
        if constexpr (kScores && kRetrieves) {
          const Vector<Real> y = kRemoves ? load(reader[s + t] + i) : own * decay;
          if (!kRemoves) store(padded_reader[s + t] + i, y);
          store(seen_reader[s + t] + i, y * so_far);
          FWP_UNROLL for (int m = 0; m < t; ++m) sum[t * t + m] += y * faded[m];
        }
        so_far *= decay;
        FWP_UNROLL for (int m = 0; m < t; ++m) faded[m] *= decay;
        faded[t] = own;
        if constexpr (kScores) {
          const Vector<Real> q = load(query[s + t] + i);
          store(seen_query[s + t] + i, q * so_far);
          FWP_UNROLL for (int m = 0; m <= t; ++m) sum[t * t + t + m] += q * faded[m];
        }
      }
      store(total[s] + i, so_far);
      FWP_UNROLL for (int m = 0; m < kTileRows; ++m) store(w.key_at_end[s + m] + i, faded[m]);
    }
    if constexpr (!kScores) return;
    Real product[kProducts];
    FWP_UNROLL for (int n = 0; n < kProducts; n += kLanes<Real>) {
      sum_lanes_of_each<Real>(sum + n);
      store(product + n, sum[n]);
    }
    FWP_UNROLL for (int t = 0; t < kTileRows; ++t) {
      if constexpr (kRetrieves) std::memcpy(w.with_reader[s + t] + s, product + t * t, t * sizeof(Real));
      std::memcpy(w.with_query[s + t] + s, product + t * t + t, (t + 1) * sizeof(Real));
    }
  }

  // Four rows of x times the decays of the group at s.
  void scale_rows(Tokens<Real> x, int64_t t, int64_t s) const {
    for (int64_t i = 0; i < keys; i += kLanes<Real>) {
      const Vector<Real> decays = load(total[s] + i);
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r) store(x[t + r] + i, load(x[t + r] + i) * decays);
    }
  }

  // The products of the tokens of group t with the keys of the earlier group s, as its last token sees them.
  void score(Tokens<const Real> seen, Tokens<const Real> key, int64_t t, int64_t s, Tokens<Real> products) const {
    for (int m = 0; m < kTileRows; m += kTileVectors)
      multiply_tile<Real>(from_row(seen, t), from_row(key, s + m), keys, products[t] + s + m, products.stride);
  }

  // Call f(t, how many of the tokens s to s + 3 are before t) for t = s, s + 1, ... The count is a constant.
  template <typename F>
  FWP_INLINE void for_tokens_from(int64_t s, F f) const {
    static_assert(kTileRows == 4 && kChunkTokens % kTileRows == 0);
    f(s, std::integral_constant<int, 0>{});
    f(s + 1, std::integral_constant<int, 1>{});
    f(s + 2, std::integral_constant<int, 2>{});
    f(s + 3, std::integral_constant<int, 3>{});
    for (int64_t t = s + kTileRows; t < rows; ++t) f(t, Rows{});
  }

  // products[t][s + m] (+)= y . x[m] for four m. Only the first `count` of x are used; the other products are arbitrary.
  template <int count, int NV>
  static FWP_INLINE void add_products(const Group<Real, NV>& y, const Group<Real, NV> (&x)[kTileRows], bool begun, Real* target) {
    Vector<Real> sum[kTileRows];
    FWP_UNROLL for (int m = 0; m < kTileRows; ++m) sum[m] = m < count ? multiply_lanes(y, x[m]) : Vector<Real>{};
    FWP_UNROLL for (int m = 0; m < kTileRows; m += kPiece<Real>) {
      Piece<Real> total = sums_of<Real>(sum + m), other;
      std::memcpy(&other, target + m, sizeof other);
      if (begun) total += other;
      std::memcpy(target + m, &total, sizeof total);
    }
  }

  // The same values from what the forward pass has stored.
  void load_values(const In& in, Tokens<const Real> retrieved, int64_t first) {
    error = input(erases == Erases::kKey ? Stored<Real>(retrieved) : in.v, first, values, padded_value);
    if constexpr (kValuesFade) {
      value_fade = input(in.value_decay, first, values, padded_value_fade);
      for (int64_t t = count; t < rows; ++t) fill(padded_value_fade[t], values, Real(1));
      return;
    }
    Tokens<const Real> removed;
    if constexpr (kRemoves) removed = input(retrieved, first, values, padded_error);
    for (int64_t t = 0; t < rows; ++t) {
      const Real rate = rate_at(in, first, t);
      for (int64_t j = 0; j < values; j += kLanes<Real>) {
        store(writer[0].value[t] + j, load(error[t] + j) * rate);
        if constexpr (kRemoves) store(writer[1].value[t] + j, -load(removed[t] + j));
      }
    }
  }

  // Values that decay: V_Cs and Z_C. The forward pass also needs out_t, of what queries have read in W; the backward pass, of
  // d_out_t, its products with V_ts and d_out_t * Z_t, which is `seen_reads`.
  enum class Direction { kForward, kRebuild, kBackward };
  template <Direction direction>
  void fade_values(Tokens<const Real> reads = {}, Tokens<Real> seen_reads = {}, Tokens<Real> result = {}) {
    constexpr bool kForward = direction == Direction::kForward, kBackward = direction == Direction::kBackward;
    Writer& w = writer[0];
    for_columns<Real, kNarrow>(values, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      constexpr int64_t width = NV * kLanes<Real>;
      Group<Real, NV> so_far, x;
      FWP_UNROLL for (int n = 0; n < NV; ++n) so_far.x[n] = Real(1) - Vector<Real>{};
      for (int64_t t = 0; t < rows; ++t) {
        x.load_from(value_fade[t] + j, width);
        multiply(so_far, x);
        if constexpr (direction != Direction::kRebuild) {
          x.load_from(reads[t] + j, width);
          multiply(x, so_far);
          x.store_to(seen_reads[t] + j, width);
        }
      }
      so_far.store_to(total_of_value[0] + j, width);
      for (int64_t s = 0; s < rows; s += kTileRows) {
        Group<Real, NV> faded[kTileRows];
        FWP_UNROLL for (int m = 0; m < kTileRows; ++m) faded[m].clear();
        for_tokens_from(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
          constexpr int before = decltype(earlier)::value, seen = std::min(before + 1, kTileRows);
          advance<before>(error[t] + j, value_fade[t] + j, faded);
          if constexpr (kForward) {
            x.load_from((s ? result : seen_reads)[t] + j, width);
            FWP_UNROLL for (int m = 0; m < seen; ++m) x.add(w.with_query[t][s + m], faded[m]);
            x.store_to(result[t] + j, width);
          }
          if constexpr (kBackward) {
            x.load_from(reads[t] + j, width);
            add_products<seen>(x, faded, j > 0, result[t] + s);
          }
        });
        FWP_UNROLL for (int m = 0; m < kTileRows; ++m) faded[m].store_to(w.value[s + m] + j, width);
      }
    });
  }

  // W = c_C^T * W + the sum of writes.
  void advance_state(bool empty, Tokens<Real> copy = {}) const {
    std::array<Factors<Real>, kWriters> writes;
    for (int n = 0; n < kWriters; ++n) writes[n] = {constant(writer[n].key_at_end), constant(writer[n].value)};
    change_rows(empty, writes, state, copy);
  }

  // W = c_C^T * W + the sum of outer products. The sum starts at zero, with the terms that have decayed most: its rounding
  // errors are then as small as the reference's.
  template <size_t kFactors>
  void change_rows(bool empty, const std::array<Factors<Real>, kFactors>& factors, Tokens<Real> to,
                   Tokens<Real> copy = {}) const {
    const int64_t padded_keys = round_up(keys, kTileRows);
    for_columns<Real, kPanel>(values, [&](int64_t j, auto vectors) {
      constexpr int NV = decltype(vectors)::value;
      std::array<Factors<Real>, kFactors> panel = factors;
      for (Factors<Real>& x : panel) x.y = x.y.from(j);
      const auto run = [&](int64_t i, auto tile) {
        return change_tiles<decltype(tile)::value, NV, kValuesFade>(
            panel, rows, empty ? nullptr : total[0], total_of_value[0] + j, i, padded_keys, to.from(j),
            copy.data ? copy.from(j) : copy,
            [this, j](int64_t row) __attribute__((always_inline)) {
              FWP_UNROLL for (int n = 0; n < decltype(tile)::value; n += kTileRows) next.fetch((row + n) / kTileRows, j);
            });
      };
      run(run(0, std::integral_constant<int, rows_of_product(NV)>{}), Rows{});
    });
  }
};

}  // namespace fwp
