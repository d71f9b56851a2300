// Rules that forget, on chunks of kChunkTokens tokens. Between chunks the state moves once, by products of matrices;
// inside a chunk the tokens see each other in quadratic form. ../README.md derives both passes.
//
// A writer is a sequence of keys x_s with values m_s: the keys of the rule, and those of a removal, whose values are
// -e_s. With X_ts = x_s * F_ts (../rule.h has the symbols),
//
//     e_t = (y_t * c_{t-1}) W + sum over writers and s < t of (y_t . X_{t-1,s}) m_s        what a token retrieves
//     out_t = (q_t * c_t) W + sum over writers and s <= t of (q_t . X_ts) m_s
//     W_C = c_C^T * W + sum over writers and s of X_Cs^T m_s
//
// If values decay too, they fade like keys: V_ts = v_s * Z_ts stands for m_s in out_t, V_Cs in W_C, and W as token t
// sees it has the factor z_1 * ... * z_t.
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

// One head. All arrays of a chunk are in scratch, zero-padded. `values` may be some of the columns of W.
template <typename A, Fades fades, Erases erases>
class ForgetChunk {
 public:
  using Number = A;
  using In = ForgetTokens<A, Stored<A>>;
  using Gradients = ForgetGradients<A, Stored<A>>;
  static constexpr int kPanel = 2;  // vectors of columns that are processed together
  static constexpr int64_t kColumns = kPanel * kLanes<A>;
  static constexpr bool kRetrieves = erases != Erases::kNothing, kRemoves = erases == Erases::kRemoval;
  static constexpr bool kByHead = fades == Fades::kHead, kValuesFade = fades == Fades::kKeyAndValue;
  static_assert(!kRetrieves || !kValuesFade);

  ForgetChunk(int64_t keys, int64_t values, A* scratch) : keys_(keys), values_(values) {
    for (Tokens<A>* x : {&state_, &d_state_}) *x = take(scratch, state_rows(keys), values);
    state_of_value_ = take(scratch, round_up(values, kLanes<A>), keys);
    for (Tokens<A>* x : {&own_query_, &own_reader_, &own_fade_, &seen_query_, &seen_reader_, &own_d_query_,
                         &own_d_reader_, &own_d_fade_, &d_seen_query_, &d_seen_reader_})
      *x = take(scratch, kChunkTokens, keys);
    for (Tokens<A>* x : {&own_value_, &own_error_, &read_, &found_, &own_d_read_, &d_found_, &own_value_fade_,
                         &own_d_value_fade_, &own_d_value_, &seen_d_read_})
      *x = take(scratch, kChunkTokens, values);
    for (Writer& w : writer_) {
      for (Tokens<A>* x : {&w.own_key, &w.last, &w.own_d_key, &w.d_last}) *x = take(scratch, kChunkTokens, keys);
      for (Tokens<A>* x : {&w.value, &w.d_value}) *x = take(scratch, kChunkTokens, values);
      for (Tokens<A>* x : {&w.with_query, &w.with_reader, &w.d_with_query, &w.d_with_reader})
        *x = take(scratch, kChunkTokens, kChunkTokens);
    }
    total_ = take(scratch, kChunkTokens, keys);
    d_total_ = take(scratch, 1, keys);
    for (Tokens<A>* x : {&total_of_value_, &d_total_of_value_}) *x = take(scratch, 1, values);
    faded_ = scratch;
    // The padding of tokens in scratch stays zero.
    if (!whole_panels(keys))
      for (const Tokens<A>& x : {own_query_, own_reader_, own_fade_, writer_[0].own_key, writer_[kWriters - 1].own_key})
        clear(x, kChunkTokens);
    if (!whole_panels(values))
      for (const Tokens<A>& x : {own_value_, own_value_fade_, own_d_read_}) clear(x, kChunkTokens);
  }

  static int64_t scratch_size(int64_t keys, int64_t values) {
    const int64_t of_key = padded<A>(keys), of_value = padded<A>(values), of_pair = padded<A>(kChunkTokens);
    return 2 * state_rows(keys) * of_value + round_up(values, kLanes<A>) * of_key + of_key + 2 * of_value +
           kChunkTokens * ((11 + 4 * kWriters) * of_key + (10 + 2 * kWriters) * of_value + 4 * kWriters * of_pair + kFaded);
  }

  // kept: rows of the state after every kKeptEvery tokens; may be null, as may `retrieved` and a matrix.
  void forward(int64_t length, const In& in, Matrix<const A> initial, const Stored<A>& out,
               const Stored<A>& retrieved, Tokens<A> kept, Matrix<A> final) {
    if (length == 1 && initial.data && initial.column_stride == 1)
      return forward_token(in, initial, out, retrieved, final);
    bool empty = !initial.data;
    empty ? clear(state_, round_up(keys_, kTileRows)) : copy_in(initial, state_);
    for (int64_t t = 0; t < length; t += kChunkTokens) {
      begin(length - t);
      const int64_t following = t + 2 * kChunkTokens <= length ? t + kChunkTokens : -1;
      expect(in, following);
      for (const Stored<A>& x : {out, retrieved}) next_.add(x, following, values_);
      if constexpr (kByHead)
        prepare_by_head(in, t);
      else
        prepare(in, t);
      read_state(kByHead ? query_ : constant(seen_query_), empty, read_);
      if constexpr (kRetrieves) read_state(kByHead ? writer_[0].key : constant(seen_reader_), empty, found_);
      if constexpr (kValuesFade) {
        load_values(in, {}, t);
        fade_values<Pass::kForward>(output(out, t, values_, read_));
      } else {
        solve(in, t, output(retrieved, t, values_, own_error_));
        if constexpr (kRetrieves) deliver(own_error_, values_, retrieved, t);
        add_reads(output(out, t, values_, read_));
      }
      deliver(read_, values_, out, t);
      const bool keeps = kept.data && (t + count_) % kKeptEvery == 0;
      // Copied while it changes: a copy of its own would wait for the lines of new memory.
      const bool at_once = keeps && whole_panels(values_) && keys_ % kTileRows == 0;
      advance_state(empty, at_once ? kept : Tokens<A>{});
      empty = false;
      if (!keeps) continue;
      if (!at_once) copy_rows(state_, kept);
      kept.data = kept[keys_];
    }
    copy_out(state_, final);
  }

  // kept as in `forward`, from the start of the sequence; retrieved is what `forward` has stored.
  void backward(int64_t length, const In& in, Matrix<const A> initial, Tokens<const A> retrieved, Tokens<const A> kept,
                const Stored<A>& d_out, Matrix<const A> d_final, const Gradients& to, Matrix<A> d_initial) {
    d_empty_ = !d_final.data;
    d_empty_ ? clear(d_state_, round_up(keys_, kTileRows)) : copy_in(d_final, d_state_);
    for (int64_t t = (length - 1) / kChunkTokens * kChunkTokens; t >= 0; t -= kChunkTokens) {
      const int64_t start = t / kKeptEvery * kKeptEvery;
      const Matrix<const A> before =
          start ? Matrix<const A>{kept[(start / kKeptEvery - 1) * keys_], kept.stride, 1} : initial;
      bool empty = !before.data;
      if (!empty) copy_in(before, state_);
      for (int64_t u = start; u < t; u += kChunkTokens) {  // rebuild the state, with the operations of `forward`
        begin(kChunkTokens);
        prepare<false>(in, u);
        load_values(in, retrieved, u);
        if constexpr (kValuesFade) fade_values<Pass::kRebuild>();
        advance_state(empty);
        empty = false;
      }
      begin(length - t);
      expect(in, t - kChunkTokens);
      for (const Stored<A>& x : {Stored<A>(retrieved), d_out, to.v, to.value_decay}) next_.add(x, t - kChunkTokens, values_);
      for (const Stored<A>& x : {to.q, to.k, to.key_decay, to.removal, to.removal_key}) next_.add(x, t - kChunkTokens, keys_);
      prepare(in, t);
      load_values(in, retrieved, t);
      differentiate(in, t, empty, d_out, to, t > 0 || d_initial.data);
    }
    copy_out(d_state_, d_initial);
  }

 private:
  template <Fades, Erases>
  friend class ForgetTiles;
  struct Writer {
    Tokens<const A> key;                         // x_s
    Tokens<A> own_key, last, value;              // X_Cs, m_s
    Tokens<A> with_query, with_reader;           // q_t . X_ts and y_t . X_{t-1,s}
    Tokens<A> d_key, own_d_key, d_last, d_value, d_with_query, d_with_reader;
  };
  static constexpr int kWriters = kRemoves ? 2 : 1;
  // Vectors of columns that are processed together if two kinds of sums need registers.
  static constexpr int kNarrow = kTileVectors / 2;
  static constexpr int64_t kFaded = kTileRows * kNarrow * kLanes<A>;
  using Rows = std::integral_constant<int, kTileRows>;

  const int64_t keys_, values_;
  int64_t count_ = 0, rows_ = 0;                    // tokens of the chunk, and in groups: the others do nothing
  bool d_empty_ = false;                            // whether the gradient of W is zero: products with it are not needed
  Tokens<A> state_, state_of_value_, d_state_;      // W, W^T, the gradient of W
  Tokens<const A> query_, reader_, fade_;           // q_t, y_t, a_t
  Tokens<const A> error_, d_read_;                  // v_t, or v_t - e_t of a rule that erases with its key; d_out_t
  Tokens<A> seen_query_, seen_reader_;              // q_t * c_t and y_t * c_{t-1}
  Tokens<A> d_query_, d_reader_, d_fade_, d_seen_query_, d_seen_reader_;
  Tokens<const A> value_fade_;                      // z_t
  Tokens<A> read_, found_, d_found_;                // out_t, e_t
  Tokens<A> seen_d_read_;                           // d_out_t * Z_t
  // Memory for tokens that are not whole vectors, or not a whole chunk.
  Tokens<A> own_query_, own_reader_, own_fade_, own_value_, own_error_;
  Tokens<A> own_d_read_, own_d_query_, own_d_reader_, own_d_fade_, own_value_fade_, own_d_value_fade_, own_d_value_;
  Writer writer_[kWriters];
  Tokens<A> total_, d_total_;                       // F_C in the first row; see see_group()
  Tokens<A> total_of_value_, d_total_of_value_;     // Z_C
  NextTokens<A, kChunkTokens, kColumns> next_;      // a panel at a time while states change
  A decay_so_far_[kChunkTokens], last_decay_[kChunkTokens];  // by head: c_t and w_t
  A* faded_;                                        // X_ts of four s and a few columns, for every t

  static int64_t state_rows(int64_t keys) { return round_up(keys, std::max(kLanes<A>, kTileRows)); }
  void clear(Tokens<A> x, int64_t rows) const { std::memset(x.data, 0, rows * x.stride * sizeof(A)); }

  void copy_in(Matrix<const A> from, Tokens<A> to) const {
    if (from.column_stride == 1) return copy(Tokens<const A>{from.data, from.row_stride}, keys_, values_, to);
    clear(to, round_up(keys_, kTileRows));
    for (int64_t i = 0; i < keys_; ++i)
      for (int64_t j = 0; j < values_; ++j) to[i][j] = from.data[i * from.row_stride + j * from.column_stride];
  }
  void copy_rows(Tokens<A> from, Tokens<A> to) const {
    for (int64_t i = 0; i < keys_; ++i) std::memcpy(to[i], from[i], values_ * sizeof(A));
  }
  void copy_out(Tokens<A> from, Matrix<A> to) const {
    if (!to.data) return;
    if (to.column_stride == 1) return copy_rows(from, {to.data, to.row_stride});
    for (int64_t i = 0; i < keys_; ++i)
      for (int64_t j = 0; j < values_; ++j) to.data[i * to.row_stride + j * to.column_stride] = from[i][j];
  }
  // Call f(first column, vectors) for panels of columns. The last may reach into the padding.
  template <int vectors, typename F>
  static FWP_INLINE void for_columns(int64_t columns, F f) {
    for (int64_t j = 0; j < columns; j += vectors * kLanes<A>) f(j, std::integral_constant<int, vectors>{});
  }

  static bool whole_panels(int64_t columns) { return columns % (kPanel * kLanes<A>) == 0; }
  bool in_place(const Stored<A>& x, int64_t columns) const { return !x.half && count_ == kChunkTokens && whole_panels(columns); }
  // The chunk's tokens of x, zero-padded.
  Tokens<const A> input(const Stored<A>& x, int64_t first, int64_t columns, Tokens<A> own) const {
    if (in_place(x, columns)) return constant(x.tokens_from(first));
    if (count_ < kChunkTokens) clear(own, kChunkTokens);
    for (int64_t t = 0; t < count_; ++t) x.read_to(own[t], first + t, columns);
    return constant(own);
  }
  // Where to write the chunk's tokens of x, before deliver().
  Tokens<A> output(const Stored<A>& x, int64_t first, int64_t columns, Tokens<A> own) const {
    return x.data && in_place(x, columns) ? x.tokens_from(first) : own;
  }
  void deliver(Tokens<A> own, int64_t columns, const Stored<A>& to, int64_t first) const {
    if (!to.data || in_place(to, columns)) return;
    for (int64_t t = 0; t < count_; ++t) to.write_from(own[t], first + t, columns);
  }
  A rate_at(const In& in, int64_t first, int64_t t) const { return t < count_ ? in.rate_at(first + t) : 0; }

  static void fill(A* x, int64_t columns, A number) {
    for (int64_t i = 0; i < columns; i += kLanes<A>) store(x + i, number - Vector<A>{});
  }
  static A sum_of(const A* x, int64_t columns) {
    Vector<A> sum = {};
    for (int64_t i = 0; i < columns; i += kLanes<A>) sum += load_part(x + i, columns - i);  // the padding is arbitrary
    return sum_lanes<A>(sum);
  }
  static A dot(const A* x, const A* y, int64_t columns) {
    Vector<A> sum = {};
    for (int64_t i = 0; i < columns; i += kLanes<A>) sum += load_part(x + i, columns - i) * load_part(y + i, columns - i);
    return sum_lanes<A>(sum);
  }

  void begin(int64_t tokens) { count_ = std::min(kChunkTokens, tokens), rows_ = round_up(count_, kTileRows); }

  // The chunk from `first` on comes next; -1: none.
  void expect(const In& in, int64_t first) {
    next_.kinds = 0;
    for (const Stored<A>& x : {in.q, in.k, in.key_decay, in.removal, in.removal_key}) next_.add(x, first, keys_);
    for (const Stored<A>& x : {in.v, in.value_decay}) next_.add(x, first, values_);
  }

  // A decoding step: the operations of a chunk of one token, in their order, without copies of the state.
  void forward_token(const In& in, Matrix<const A> initial, const Stored<A>& out, const Stored<A>& retrieved,
                     Matrix<A> final) {
    const A *query = token(in.q, keys_, own_query_), *reader = own_reader_[0], *fade = own_fade_[0];
    const A *key[kWriters] = {token(in.k, keys_, writer_[0].own_key)}, *given = token(in.v, values_, own_value_);
    if constexpr (kValuesFade) token(in.value_decay, values_, own_value_fade_);
    if (in.key_decay.data)
      token(in.key_decay, keys_, own_fade_);
    else
      fill(own_fade_[0], keys_, in.head_decay[0]);
    if constexpr (kRemoves) {
      key[1] = token(in.removal, keys_, writer_[1].own_key);
      token(in.removal_key, keys_, own_reader_);
    }
    Vector<A> with_query[kWriters] = {};
    for (int64_t i = 0; i < keys_; i += kLanes<A>) {
      const Vector<A> own = load(query + i), x = kByHead ? A(1) - Vector<A>{} : load(fade + i);
      for (int n = 0; n < kWriters; ++n) with_query[n] += own * load(key[n] + i);
      store(seen_query_[0] + i, own * x);
      if constexpr (erases == Erases::kKey) store(own_reader_[0] + i, load(key[0] + i) * x);
    }
    const auto run_columns = [&](int64_t j, auto vectors, int64_t n) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      const auto row = [&](int64_t i) __attribute__((always_inline)) {
        Group<A, NV> w;
        w.load_from(initial.data + i * initial.row_stride + j, n);
        w.round();  // where the product with it is fused with a sum does not depend on n
        return w;
      };
      Group<A, NV> value[kWriters], of_value;
      const auto write = [&](int64_t i, Group<A, NV> before) __attribute__((always_inline)) {
        if constexpr (kValuesFade) multiply(before, of_value), before.round();
        Group<A, NV> after;
        after.clear();
        for (int m = 0; m < kWriters; ++m) after.add(key[m][i], value[m]), after.round();
        after.add(fade[i], before);
        after.store_to(final.data + i * final.row_stride + j, n);
      };
      value[0].load_from(given + j, n);
      if constexpr (kValuesFade) of_value.load_from(own_value_fade_[0] + j, n);
      if constexpr (!kRetrieves && !kValuesFade) value[0].scale(in.rate_at(0));
      RowSums<A, NV, 1> read(keys_), found(keys_);
      A* copied = state_.data;  // contiguous, unlike the rows of a state, which may all lie in a few sets of the cache
      for (int64_t i = 0; i < keys_; ++i) {
        if (i && i % kSumRows == 0) read.settle(), found.settle();
        FWP_UNROLL for (int m = 0; m < NV; m += kLineBytes / kVectorBytes)
          __builtin_prefetch(address(initial.data, (i + kRowsAhead) * initial.row_stride + j + m * kLanes<A>));
        const Group<A, NV> w = row(i);
        read.total[0].add(seen_query_[0][i], w);
        if constexpr (kRetrieves) {
          found.total[0].add(reader[i], w);
          w.store_to(copied + i * NV * kLanes<A>, NV * kLanes<A>);
        } else if (final.data) {
          write(i, w);
        }
      }
      read.finish(), found.finish();
      if constexpr (kByHead)
        for (Group<A, NV>* x : {&read.total[0], &found.total[0]}) x->scale(in.head_decay[0]), x->round();
      if constexpr (kValuesFade) multiply(read.total[0], of_value), read.total[0].round();
      if constexpr (kRetrieves) {
        if constexpr (kRemoves)
          value[1].clear(), value[1].add(A(-1), found.total[0]);
        else
          value[0].add(A(-1), found.total[0]);
        if (retrieved.data) (kRemoves ? found.total[0] : value[0]).store_to(retrieved.numbers(0) + j, n);
        value[0].scale(in.rate_at(0));
        for (int64_t i = 0; final.data && i < keys_; ++i) {
          Group<A, NV> w;
          w.load_from(copied + i * NV * kLanes<A>, NV * kLanes<A>);
          write(i, w);
        }
      }
      for (int m = 0; m < kWriters; ++m) read.total[0].add(sum_lanes<A>(with_query[m]), value[m]);
      read.total[0].store_to(read_[0] + j, n);
    };
    int64_t j = 0;
    for (; j + 4 * kLanes<A> <= values_; j += 4 * kLanes<A>)
      run_columns(j, std::integral_constant<int, 4>{}, 4 * kLanes<A>);
    for (; j < values_; j += kLanes<A>) run_columns(j, std::integral_constant<int, 1>{}, values_ - j);
    out.write_from(read_[0], 0, values_);
  }

  static A* token(const Stored<A>& x, int64_t columns, Tokens<A> own) { return x.read_to(own[0], 0, columns), own[0]; }

  // Everything that needs keys and decays only. Without scores, what the next chunk needs.
  template <bool kScores = true>
  void prepare(const In& in, int64_t t) {
    query_ = input(in.q, t, keys_, own_query_);
    writer_[0].key = input(in.k, t, keys_, writer_[0].own_key);
    reader_ = constant(own_reader_), fade_ = constant(own_fade_);
    if (in.key_decay.data) fade_ = input(in.key_decay, t, keys_, own_fade_);
    for (int64_t s = in.key_decay.data ? count_ : 0; s < rows_; ++s)
      fill(own_fade_[s], keys_, s < count_ ? in.head_decay[t + s] : 1);
    if constexpr (kRemoves) {
      writer_[1].key = input(in.removal, t, keys_, writer_[1].own_key);
      reader_ = input(in.removal_key, t, keys_, own_reader_);
    }
    for (int64_t t = 0; t < rows_; t += kTileRows) {
      for (const Writer& w : writer_) see_group<kScores>(w, t);
      for (int64_t s = 0; s < t; s += kTileRows)
        for (const Writer& w : writer_) {
          if constexpr (kScores) score(constant(seen_query_), constant(w.last), t, s, w.with_query);
          if constexpr (kScores && kRetrieves) score(constant(seen_reader_), constant(w.last), t, s, w.with_reader);
          scale_rows(w.last, s, t);
        }
      if (t == 0) continue;
      if constexpr (kScores) scale_rows(seen_query_, t, 0);
      if constexpr (kScores && kRetrieves) scale_rows(seen_reader_, t, 0);
      for (int64_t i = 0; i < keys_; i += kLanes<A>) store(total_[0] + i, load(total_[0] + i) * load(total_[t] + i));
    }
  }

  // The same for decays by head: products of tokens first, then their decays. Queries and keys are read as they are.
  void prepare_by_head(const In& in, int64_t first) {
    const Writer& w = writer_[0];
    query_ = input(in.q, first, keys_, own_query_);
    writer_[0].key = input(in.k, first, keys_, w.own_key);
    std::memset(last_decay_, 0, sizeof last_decay_);
    A so_far = 1;
    for (int64_t t = 0; t < rows_; ++t) {
      if (t % kTileRows == 0)
        for (int64_t s = 0; s <= t; s += kTileRows) {
          score(query_, w.key, t, s, w.with_query);
          if constexpr (kRetrieves) score(w.key, w.key, t, s, w.with_reader);
        }
      const A decay = t < count_ ? in.head_decay[first + t] : 1;
      decay_so_far_[t] = so_far *= decay;
      for (int64_t s = 0; s < t; ++s) {
        last_decay_[s] *= decay;
        if constexpr (kRetrieves) w.with_reader[t][s] *= last_decay_[s];
        w.with_query[t][s] *= last_decay_[s];
      }
      last_decay_[t] = 1;
    }
    fill(total_[0], keys_, so_far);
  }

  // A group of kTileRows tokens: queries and readers after its decays, the products of a writer's keys with them, and the keys
  // as its last token sees them. total_[s]: the decays of the group at s.
  template <bool kScores>
  void see_group(const Writer& w, int64_t s) const {
    constexpr int kProducts = kTileRows * kTileRows;  // t(t - 1) / 2 with readers, t(t + 1) / 2 with queries
    static_assert(kProducts % kLanes<A> == 0);
    Vector<A> sum[kProducts];
    FWP_UNROLL for (int n = 0; n < kProducts; ++n) sum[n] = Vector<A>{};
    for (int64_t i = 0; i < keys_; i += kLanes<A>) {
      Vector<A> so_far = A(1) - Vector<A>{}, faded[kTileRows];
      FWP_UNROLL for (int t = 0; t < kTileRows; ++t) {
        const Vector<A> own = load(w.key[s + t] + i), fade = load(fade_[s + t] + i);
        if constexpr (kScores && kRetrieves) {
          const Vector<A> reader = kRemoves ? load(reader_[s + t] + i) : own * fade;
          if (!kRemoves) store(own_reader_[s + t] + i, reader);
          store(seen_reader_[s + t] + i, reader * so_far);
          FWP_UNROLL for (int m = 0; m < t; ++m) sum[t * t + m] += reader * faded[m];
        }
        so_far *= fade;
        FWP_UNROLL for (int m = 0; m < t; ++m) faded[m] *= fade;
        faded[t] = own;
        if constexpr (kScores) {
          const Vector<A> query = load(query_[s + t] + i);
          store(seen_query_[s + t] + i, query * so_far);
          FWP_UNROLL for (int m = 0; m <= t; ++m) sum[t * t + t + m] += query * faded[m];
        }
      }
      store(total_[s] + i, so_far);
      FWP_UNROLL for (int m = 0; m < kTileRows; ++m) store(w.last[s + m] + i, faded[m]);
    }
    if constexpr (!kScores) return;
    A product[kProducts];
    FWP_UNROLL for (int n = 0; n < kProducts; n += kLanes<A>) {
      sum_lanes_of_each<A>(sum + n);
      store(product + n, sum[n]);
    }
    FWP_UNROLL for (int t = 0; t < kTileRows; ++t) {
      if constexpr (kRetrieves) std::memcpy(w.with_reader[s + t] + s, product + t * t, t * sizeof(A));
      std::memcpy(w.with_query[s + t] + s, product + t * t + t, (t + 1) * sizeof(A));
    }
  }

  // Four rows of x times the decays of the group at s.
  void scale_rows(Tokens<A> x, int64_t t, int64_t s) const {
    for (int64_t i = 0; i < keys_; i += kLanes<A>) {
      const Vector<A> total = load(total_[s] + i);
      FWP_UNROLL for (int r = 0; r < kTileRows; ++r) store(x[t + r] + i, load(x[t + r] + i) * total);
    }
  }

  // The products of the tokens of group t with the keys of the earlier group s, as its last token sees them.
  void score(Tokens<const A> seen, Tokens<const A> key, int64_t t, int64_t s, Tokens<A> products) const {
    for (int m = 0; m < kTileRows; m += kTileVectors)
      multiply_tile<A>(from_row(seen, t), from_row(key, s + m), keys_, products[t] + s + m, products.stride);
  }

  template <int NV>
  static FWP_INLINE void multiply(Group<A, NV>& x, const Group<A, NV>& factor) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x.x[n] *= factor.x[n];
  }

  // Call f(t, how many of the tokens s to s + 3 are before t) for t = s, s + 1, ..., or in reverse. The count is a
  // constant.
  template <typename F>
  FWP_INLINE void for_tokens_from(int64_t s, F f) const {
    static_assert(kTileRows == 4 && kChunkTokens % kTileRows == 0);
    f(s, std::integral_constant<int, 0>{});
    f(s + 1, std::integral_constant<int, 1>{});
    f(s + 2, std::integral_constant<int, 2>{});
    f(s + 3, std::integral_constant<int, 3>{});
    for (int64_t t = s + kTileRows; t < rows_; ++t) f(t, Rows{});
  }
  template <typename F>
  FWP_INLINE void for_tokens_back_to(int64_t s, F f) const {
    for (int64_t t = rows_; t-- > s + kTileRows;) f(t, Rows{});
    f(s + 3, std::integral_constant<int, 3>{});
    f(s + 2, std::integral_constant<int, 2>{});
    f(s + 1, std::integral_constant<int, 1>{});
    f(s, std::integral_constant<int, 0>{});
  }

  // From X_{t-1,s} to X_ts for four s, of which `earlier` are before t; x and a of token t.
  template <int earlier, int NV>
  static FWP_INLINE void advance(const A* x, const A* f, Group<A, NV> (&faded)[kTileRows]) {
    if constexpr (earlier > 0) {
      Group<A, NV> fade;
      fade.load_from(f, NV * kLanes<A>);
      FWP_UNROLL for (int m = 0; m < earlier; ++m) multiply(faded[m], fade);
    }
    if constexpr (earlier < kTileRows) faded[earlier].load_from(x, NV * kLanes<A>);
  }

  // products[t][s + m] (+)= y . x[m] for four m. Only the first `count` of x are used; the other products are arbitrary.
  template <int count, int NV>
  static FWP_INLINE void add_products(const Group<A, NV>& y, const Group<A, NV> (&x)[kTileRows], bool begun, A* target) {
    Vector<A> sum[kTileRows];
    FWP_UNROLL for (int m = 0; m < kTileRows; ++m) sum[m] = m < count ? multiply_lanes(y, x[m]) : Vector<A>{};
    FWP_UNROLL for (int m = 0; m < kTileRows; m += kPiece<A>) {
      Piece<A> total = sums_of<A>(sum + m), other;
      std::memcpy(&other, target + m, sizeof other);
      if (begun) total += other;
      std::memcpy(target + m, &total, sizeof total);
    }
  }

  void read_state(Tokens<const A> key, bool empty, Tokens<A> read) const {
    if (empty) return clear(read, rows_);
    multiply_matrices<A>(key, rows_, constant(state_), keys_, values_, read);
    if constexpr (kByHead) scale_tokens(decay_so_far_, read, read);
  }
  // to = factor[t] * x.
  void scale_tokens(const A* factor, Tokens<A> x, Tokens<A> to) const {
    for (int64_t t = 0; t < rows_; ++t)
      for (int64_t j = 0; j < values_; j += kLanes<A>) store(to[t] + j, load(x[t] + j) * factor[t]);
  }

  // Turn values into sequential writes. Each depends on what the writes before it have left under the token's key.
  void solve(const In& in, int64_t first, Tokens<A> error) {
    const Tokens<const A> given = input(in.v, first, values_, own_value_);
    for_columns<kPanel>(values_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      constexpr int64_t width = NV * kLanes<A>;
      for (int64_t t = 0; t < rows_; t += kTileRows) {
        Tile<A, NV> found;
        if constexpr (kRetrieves) {
          FWP_UNROLL for (int r = 0; r < kTileRows; ++r) found.row[r].load_from(found_[t + r] + j, width);
          for (const Writer& w : writer_)
            found.add(0, t, constant(w.value, j),
                      [&](int64_t s, int r) __attribute__((always_inline)) { return w.with_reader[t + r][s]; });
        }
        FWP_UNROLL for (int r = 0; r < kTileRows; ++r) {
          Group<A, NV> value, earlier;
          value.load_from(given[t + r] + j, width);
          if constexpr (kRetrieves) {
            for (const Writer& w : writer_)
              for (int m = 0; m < r; ++m) {
                earlier.load_from(w.value[t + m] + j, width);
                found.row[r].add(w.with_reader[t + r][t + m], earlier);
              }
            if constexpr (erases == Erases::kKey) {
              value.add(A(-1), found.row[r]);
              value.store_to(error[t + r] + j, width);
            } else {
              found.row[r].store_to(error[t + r] + j, width);
              earlier.clear();
              if (t + r < count_) earlier.add(A(-1), found.row[r]);
              earlier.store_to(writer_[kWriters - 1].value[t + r] + j, width);
            }
          }
          value.scale(rate_at(in, first, t + r));
          if (t + r >= count_) value.clear();  // zero times what it retrieves need not be zero
          value.store_to(writer_[0].value[t + r] + j, width);
        }
      }
    });
  }

  // The same values from what the forward pass has stored.
  void load_values(const In& in, Tokens<const A> retrieved, int64_t first) {
    error_ = input(erases == Erases::kKey ? Stored<A>(retrieved) : in.v, first, values_, own_value_);
    if constexpr (kValuesFade) {
      value_fade_ = input(in.value_decay, first, values_, own_value_fade_);
      for (int64_t t = count_; t < rows_; ++t) fill(own_value_fade_[t], values_, 1);
      return;
    }
    Tokens<const A> removed;
    if constexpr (kRemoves) removed = input(retrieved, first, values_, own_error_);
    for (int64_t t = 0; t < rows_; ++t) {
      const A rate = rate_at(in, first, t);
      for (int64_t j = 0; j < values_; j += kLanes<A>) {
        store(writer_[0].value[t] + j, load(error_[t] + j) * rate);
        if constexpr (kRemoves) store(writer_[1].value[t] + j, -load(removed[t] + j));
      }
    }
  }

  // Values that decay: V_Cs and Z_C. The forward pass also needs out_t; the backward pass, which has d_out, the products
  // d_out_t . V_ts and d_out_t * Z_t.
  enum class Pass { kForward, kRebuild, kBackward };
  template <Pass pass>
  void fade_values(Tokens<A> out = {}) {
    constexpr bool kForward = pass == Pass::kForward, kBackward = pass == Pass::kBackward;
    Writer& w = writer_[0];
    for_columns<kNarrow>(values_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      constexpr int64_t width = NV * kLanes<A>;
      Group<A, NV> so_far, x;
      FWP_UNROLL for (int n = 0; n < NV; ++n) so_far.x[n] = A(1) - Vector<A>{};
      for (int64_t t = 0; t < rows_; ++t) {
        x.load_from(value_fade_[t] + j, width);
        multiply(so_far, x);
        if constexpr (pass != Pass::kRebuild) {
          x.load_from((kForward ? constant(read_) : d_read_)[t] + j, width);
          multiply(x, so_far);
          x.store_to((kForward ? read_ : seen_d_read_)[t] + j, width);
        }
      }
      so_far.store_to(total_of_value_[0] + j, width);
      for (int64_t s = 0; s < rows_; s += kTileRows) {
        Group<A, NV> faded[kTileRows];
        FWP_UNROLL for (int m = 0; m < kTileRows; ++m) faded[m].clear();
        for_tokens_from(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
          constexpr int before = decltype(earlier)::value, seen = std::min(before + 1, kTileRows);
          advance<before>(error_[t] + j, value_fade_[t] + j, faded);
          if constexpr (kForward) {
            x.load_from((s ? out : read_)[t] + j, width);
            FWP_UNROLL for (int m = 0; m < seen; ++m) x.add(w.with_query[t][s + m], faded[m]);
            x.store_to(out[t] + j, width);
          }
          if constexpr (kBackward) {
            x.load_from(d_read_[t] + j, width);
            add_products<seen>(x, faded, j > 0, w.d_with_query[t] + s);
          }
        });
        FWP_UNROLL for (int m = 0; m < kTileRows; ++m) faded[m].store_to(w.value[s + m] + j, width);
      }
    });
  }

  // out_t += the values that the tokens of the chunk have written so far.
  void add_reads(Tokens<A> out) {
    for_columns<kPanel>(values_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t t = 0; t < rows_; t += kTileRows) {
        Tile<A, NV> read;
        FWP_UNROLL for (int r = 0; r < kTileRows; ++r) read.row[r].load_from(read_[t + r] + j, NV * kLanes<A>);
        for (const Writer& w : writer_) {
          read.add(0, t, constant(w.value, j),
                   [&](int64_t s, int r) __attribute__((always_inline)) { return w.with_query[t + r][s]; });
          FWP_UNROLL for (int m = 0; m < kTileRows; ++m) {
            Group<A, NV> value;
            value.load_from(w.value[t + m] + j, NV * kLanes<A>);
            FWP_UNROLL for (int r = m; r < kTileRows; ++r) read.row[r].add(w.with_query[t + r][t + m], value);
          }
        }
        read.store_to(from_row(out, t).from(j), kTileRows, NV * kLanes<A>);
      }
    });
  }

  // W = F_C^T * W + the sum of writes.
  void advance_state(bool empty, Tokens<A> copy = {}) const {
    std::array<Factors<A>, kWriters> writes;
    for (int n = 0; n < kWriters; ++n) writes[n] = {constant(writer_[n].last), constant(writer_[n].value)};
    if constexpr (kByHead) {
      scale_tokens(last_decay_, writer_[0].value, writer_[0].d_value);
      writes[0] = {writer_[0].key, constant(writer_[0].d_value)};
    }
    change_rows(empty, writes, state_, copy);
  }

  // W = F_C^T * W + the sum of outer products. The sum starts at zero, with the terms that have decayed most: its rounding
  // errors are then as small as the reference's.
  template <size_t kFactors>
  void change_rows(bool empty, const std::array<Factors<A>, kFactors>& factors, Tokens<A> state,
                   Tokens<A> copy = {}) const {
    const int64_t rows = round_up(keys_, kTileRows);
    for_columns<kPanel>(values_, [&](int64_t j, auto vectors) {
      constexpr int NV = decltype(vectors)::value;
      std::array<Factors<A>, kFactors> panel = factors;
      for (Factors<A>& x : panel) x.y = x.y.from(j);
      const auto run = [&](int64_t i, auto tile) {
        return change_tiles<decltype(tile)::value, NV, kValuesFade>(
            panel, rows_, empty ? nullptr : total_[0], total_of_value_[0] + j, i, rows, state.from(j),
            copy.data ? copy.from(j) : copy,
            [this, j](int64_t i) __attribute__((always_inline)) {
              FWP_UNROLL for (int n = 0; n < decltype(tile)::value; n += kTileRows) next_.fetch((i + n) / kTileRows, j);
            });
      };
      run(run(0, std::integral_constant<int, rows_of_product(NV)>{}), Rows{});
    });
  }

  // The gradients of the chunk's tokens, and of the state before it if `needed`, from d_out and that of the state after
  // it. `empty`: the state before it is zero.
  void differentiate(const In& in, int64_t first, bool empty, const Stored<A>& d_out, const Gradients& to, bool needed) {
    d_read_ = input(d_out, first, values_, own_d_read_);
    d_query_ = output(to.q, first, keys_, own_d_query_), d_fade_ = output(to.key_decay, first, keys_, own_d_fade_);
    d_reader_ = kRemoves ? output(to.removal_key, first, keys_, own_d_reader_) : own_d_reader_;
    writer_[0].d_key = output(to.k, first, keys_, writer_[0].own_d_key);
    if constexpr (kRemoves) writer_[1].d_key = output(to.removal, first, keys_, writer_[1].own_d_key);
    for (Writer& w : writer_)
      if (d_empty_)
        clear(w.d_value, rows_);
      else
        multiply_matrices<A>(constant(w.last), rows_, constant(d_state_), keys_, values_, w.d_value);
    if constexpr (kValuesFade)
      fade_values<Pass::kBackward>();
    else
      solve_back(in, first);
    for (Writer& w : writer_) {
      if constexpr (!kValuesFade) multiply_tokens(d_read_, w.value, w.d_with_query);
      if constexpr (kRetrieves) multiply_tokens(constant(d_found_), w.value, w.d_with_reader);
      if (d_empty_)
        clear(w.d_last, rows_);
      else
        multiply_rows(constant(w.value), d_state_, rows_, keys_, values_, w.d_last);
    }
    differentiate_reads(empty);
    const Side of_keys{query_, fade_, d_seen_query_, d_query_, d_fade_, d_total_};
    for_columns<kNarrow>(keys_, [&](int64_t i, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      differentiate_state<true, NV>(of_keys, i);
      for (const Writer& w : writer_)
        for (int64_t s = 0; s < rows_; s += kTileRows)
          differentiate_writer<true, NV>(of_keys, {w.key, w.d_last, w.d_key, w.d_with_query, w.d_with_reader}, s, i);
    });
    if constexpr (kValuesFade) {
      const Writer& w = writer_[0];
      const Side of_values{d_read_, value_fade_, read_, {}, output(to.value_decay, first, values_, own_d_value_fade_),
                           d_total_of_value_};
      const Tokens<A> d_value = output(to.v, first, values_, own_d_value_);
      for_columns<kNarrow>(values_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
        constexpr int NV = decltype(vectors)::value;
        differentiate_state<false, NV>(of_values, j);
        for (int64_t s = 0; s < rows_; s += kTileRows)
          differentiate_writer<false, NV>(of_values, {error_, w.d_value, d_value, w.with_query, {}}, s, j);
      });
      deliver(own_d_value_, values_, to.v, first);
      deliver(own_d_value_fade_, values_, to.value_decay, first);
    }
    if (needed) {
      const auto back = [&](Tokens<A> x, Tokens<const A> y) {
        return Factors<A>{constant(x).reversed(rows_), y.reversed(rows_)};
      };
      const Factors<A> reads = back(seen_query_, kValuesFade ? constant(seen_d_read_) : d_read_);
      if constexpr (kRetrieves)
        change_rows(d_empty_, std::array{reads, back(seen_reader_, constant(d_found_))}, d_state_);
      else
        change_rows(d_empty_, std::array{reads}, d_state_);
    }
    d_empty_ = false;
    store_gradients(in, first, to);
  }

  // product[t][s] = x_t . y_s for the tokens s <= t, and some others.
  void multiply_tokens(Tokens<const A> x, Tokens<A> y, Tokens<A> product) const {
    for (int64_t t = 0; t < rows_; t += kTileRows)
      multiply_rows(from_row(x, t), y, kTileRows, t + kTileRows, values_, from_row(product, t));
  }

  // The gradients of what tokens read in the state before the chunk, and of F_C and Z_C.
  void differentiate_reads(bool empty) {
    if (empty) {
      for (const Tokens<A>& x : {d_seen_query_, d_seen_reader_}) clear(x, rows_);
      clear(d_total_, 1);
      if constexpr (kValuesFade) clear(read_, rows_), clear(d_total_of_value_, 1);
      return;
    }
    transpose(state_, keys_, values_, state_of_value_);
    const Tokens<const A> by_value = constant(state_of_value_);
    multiply_matrices<A>(kValuesFade ? constant(seen_d_read_) : d_read_, rows_, by_value, values_, keys_, d_seen_query_);
    if constexpr (kRetrieves) multiply_matrices<A>(constant(d_found_), rows_, by_value, values_, keys_, d_seen_reader_);
    if constexpr (!kValuesFade) {
      for (int64_t i = 0; i < keys_; i += kLanes<A>) {
        Vector<A> sum[kLanes<A>];
        FWP_UNROLL for (int n = 0; n < kLanes<A>; ++n) {
          sum[n] = Vector<A>{};
          for (int64_t j = 0; j < values_; j += kLanes<A>)
            sum[n] += load_part(state_[i + n] + j, values_ - j) * load_part(d_state_[i + n] + j, values_ - j);
        }
        sum_lanes_of_each<A>(sum);
        store(d_total_[0] + i, sum[0]);
      }
    } else {
      multiply_matrices<A>(constant(seen_query_), rows_, constant(state_), keys_, values_, read_);
      clear(d_total_of_value_, 1);
      for (int64_t i = 0; i < keys_; ++i) {
        Vector<A> sum = {};
        for (int64_t j = 0; j < values_; j += kLanes<A>) {
          const Vector<A> product = load_part(state_[i] + j, values_ - j) * load_part(d_state_[i] + j, values_ - j);
          sum += product * load_part(total_of_value_[0] + j, values_ - j);
          A* d_total = d_total_of_value_[0] + j;
          store(d_total, load(d_total) + total_[0][i] * product);
        }
        d_total_[0][i] = sum_lanes<A>(sum);
      }
    }
  }

  // The gradients of written values and of retrieved ones, from the last token back.
  void solve_back(const In& in, int64_t first) {
    for_columns<kNarrow>(values_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      constexpr int64_t width = NV * kLanes<A>;
      for (int64_t t = rows_ - kTileRows; t >= 0; t -= kTileRows) {
        Tile<A, NV> d_value[kWriters];
        for (int n = 0; n < kWriters; ++n) {
          const Writer& w = writer_[n];
          FWP_UNROLL for (int r = 0; r < kTileRows; ++r) d_value[n].row[r].load_from(w.d_value[t + r] + j, width);
          d_value[n].add(t + kTileRows, rows_, d_read_.from(j),
                         [&](int64_t u, int r) __attribute__((always_inline)) { return w.with_query[u][t + r]; });
          if constexpr (kRetrieves)
            d_value[n].add(t + kTileRows, rows_, constant(d_found_, j),
                           [&](int64_t u, int r) __attribute__((always_inline)) { return w.with_reader[u][t + r]; });
        }
        FWP_UNROLL for (int r = kTileRows - 1; r >= 0; --r) {
          for (int n = 0; n < kWriters; ++n) {
            const Writer& w = writer_[n];
            Group<A, NV> later;
            for (int m = r; m < kTileRows; ++m) {
              later.load_from(d_read_[t + m] + j, width);
              d_value[n].row[r].add(w.with_query[t + m][t + r], later);
            }
            if constexpr (kRetrieves)
              for (int m = r + 1; m < kTileRows; ++m) {
                later.load_from(d_found_[t + m] + j, width);
                d_value[n].row[r].add(w.with_reader[t + m][t + r], later);
              }
            d_value[n].row[r].store_to(w.d_value[t + r] + j, width);
          }
          if constexpr (kRetrieves) {
            Group<A, NV>& of_found = d_value[kWriters - 1].row[r];
            of_found.scale(kRemoves ? A(-1) : -rate_at(in, first, t + r));
            if (t + r >= count_) of_found.clear();
            of_found.store_to(d_found_[t + r] + j, width);
          }
        }
      }
    });
  }

  A* faded_at(int64_t t) const { return faded_ + t * kFaded; }

  // Keys with their decays and queries; or values, with d_out in place of queries.
  struct Side {
    Tokens<const A> query, fade;
    Tokens<A> d_seen, d_query, d_fade, d_total;  // d_seen: of q_t * c_t
  };
  struct Faded {
    Tokens<const A> x;
    Tokens<A> d_last, d_x, d_with_query, d_with_reader;
  };

  // What comes of c_t: gradients of queries, readers and decays from what they have read in the state.
  template <bool kKeys, int NV>
  FWP_INLINE void differentiate_state(const Side& side, int64_t i) {
    constexpr int64_t width = NV * kLanes<A>;
    Group<A, NV> so_far, fade, x, gradient, of_read;
    FWP_UNROLL for (int n = 0; n < NV; ++n) so_far.x[n] = A(1) - Vector<A>{};
    for (int64_t t = 0; t < rows_; ++t) {
      so_far.store_to(faded_at(t), width);
      fade.load_from(side.fade[t] + i, width);
      multiply(so_far, fade);
    }
    gradient.load_from(side.d_total[0] + i, width);
    for (int64_t t = rows_; t-- > 0;) {
      of_read.load_from(side.d_seen[t] + i, width);
      x.load_from(side.query[t] + i, width);
      FWP_UNROLL for (int n = 0; n < NV; ++n) gradient.x[n] += x.x[n] * of_read.x[n];
      if constexpr (kKeys) {
        multiply(of_read, so_far);
        of_read.store_to(side.d_query[t] + i, width);
      }
      so_far.load_from(faded_at(t), width);
      x = gradient;
      multiply(x, so_far);
      x.store_to(side.d_fade[t] + i, width);
      fade.load_from(side.fade[t] + i, width);
      multiply(gradient, fade);
      if constexpr (kKeys && kRetrieves) {
        of_read.load_from(d_seen_reader_[t] + i, width);
        x.load_from(reader_[t] + i, width);
        FWP_UNROLL for (int n = 0; n < NV; ++n) gradient.x[n] += x.x[n] * of_read.x[n];
        multiply(of_read, so_far);
        of_read.store_to(d_reader_[t] + i, width);
      }
    }
  }

  // The same for X_ts: also the gradients of the four keys from s on.
  template <bool kKeys, int NV>
  FWP_INLINE void differentiate_writer(const Side& side, const Faded& w, int64_t s, int64_t i) {
    constexpr int64_t width = NV * kLanes<A>;
    Group<A, NV> faded[kTileRows], gradient[kTileRows];
    for_tokens_from(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
      advance<decltype(earlier)::value>(w.x[t] + i, side.fade[t] + i, faded);
      FWP_UNROLL for (int m = 0; m < kTileRows; ++m)
        if (m <= decltype(earlier)::value) faded[m].store_to(faded_at(t) + m * width, width);
    });
    FWP_UNROLL for (int m = 0; m < kTileRows; ++m) gradient[m].load_from(w.d_last[s + m] + i, width);
    for_tokens_back_to(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
      constexpr int before = decltype(earlier)::value, seen = std::min(before + 1, kTileRows);
      const A* of_query = w.d_with_query[t] + s;
      Group<A, NV> own, x, d_own;
      own.load_from(side.query[t] + i, width);
      FWP_UNROLL for (int m = 0; m < seen; ++m) gradient[m].add(of_query[m], own);
      if constexpr (kKeys) {
        d_own.load_from(side.d_query[t] + i, width);
        FWP_UNROLL for (int m = 0; m < seen; ++m) {
          x.load_from(faded_at(t) + m * width, width);
          d_own.add(of_query[m], x);
        }
        d_own.store_to(side.d_query[t] + i, width);
      }
      if constexpr (before > 0) {
        const A* of_reader = w.d_with_reader[t] + s;
        Group<A, NV> fade, d_fade;
        fade.load_from(side.fade[t] + i, width);
        d_fade.load_from(side.d_fade[t] + i, width);
        if constexpr (kKeys && kRetrieves) {
          own.load_from(reader_[t] + i, width);
          d_own.load_from(d_reader_[t] + i, width);
        }
        FWP_UNROLL for (int m = 0; m < before; ++m) {
          x.load_from(faded_at(t - 1) + m * width, width);
          FWP_UNROLL for (int n = 0; n < NV; ++n) d_fade.x[n] += gradient[m].x[n] * x.x[n];
          multiply(gradient[m], fade);
          if constexpr (kKeys && kRetrieves) {
            gradient[m].add(of_reader[m], own);
            d_own.add(of_reader[m], x);
          }
        }
        d_fade.store_to(side.d_fade[t] + i, width);
        if constexpr (kKeys && kRetrieves) d_own.store_to(d_reader_[t] + i, width);
      }
      if constexpr (before < kTileRows) gradient[before].store_to(w.d_x[t] + i, width);
    });
  }

  void store_gradients(const In& in, int64_t first, const Gradients& to) {
    const Tokens<A> d_value = output(to.v, first, values_, own_d_value_);
    for (int64_t t = 0; t < count_; ++t) {
      if constexpr (erases == Erases::kKey)  // y_t = a_t * k_t
        for (int64_t i = 0; i < keys_; i += kLanes<A>) {
          const Vector<A> of_reader = load(d_reader_[t] + i);
          store(writer_[0].d_key[t] + i, load(writer_[0].d_key[t] + i) + load(fade_[t] + i) * of_reader);
          store(d_fade_[t] + i, load(d_fade_[t] + i) + load(writer_[0].key[t] + i) * of_reader);
        }
      if (to.head_decay.data) to.head_decay[first + t] = sum_of(d_fade_[t], keys_);
      if (to.rate.data) to.rate[first + t] = dot(writer_[0].d_value[t], error_[t], values_);
      const A rate = rate_at(in, first, t);
      if constexpr (!kValuesFade)
        for (int64_t j = 0; j < values_; j += kLanes<A>)
          store(d_value[t] + j, load(writer_[0].d_value[t] + j) * rate);
    }
    if constexpr (!kValuesFade) deliver(own_d_value_, values_, to.v, first);
    deliver(own_d_query_, keys_, to.q, first);
    deliver(own_d_fade_, keys_, to.key_decay, first);
    deliver(writer_[0].own_d_key, keys_, to.k, first);
    if constexpr (kRemoves) {
      deliver(writer_[1].own_d_key, keys_, to.removal, first);
      deliver(own_d_reader_, keys_, to.removal_key, first);
    }
  }
};

}  // namespace fwp
