// The forward pass of a rule that forgets, on chunks: see forget_chunk.h.
#pragma once

#include "forget_chunk.h"

namespace fwp {

template <typename Real, Fades fades, Erases erases>
class ForgetChunkForward {
  using Chunk = ForgetChunk<Real, fades, erases>;
  using Writer = typename Chunk::Writer;
  static constexpr int kPanel = Chunk::kPanel, kWriters = Chunk::kWriters;
  static constexpr bool kRetrieves = Chunk::kRetrieves, kRemoves = Chunk::kRemoves, kByHead = Chunk::kByHead,
                        kValuesFade = Chunk::kValuesFade;

 public:
  using Number = Real;
  using In = typename Chunk::In;
  static constexpr int64_t kColumns = Chunk::kColumns;

  ForgetChunkForward(int64_t keys, int64_t values, Real* scratch) : chunk_(keys, values, scratch) {
    found_ = chunk_.take_values(), scaled_ = chunk_.take_values();
  }
  static int64_t scratch_size(int64_t keys, int64_t values) { return ForgetChunkForward(keys, values, nullptr).chunk_.taken(); }

  // kept: rows of the state after every kKeptEvery tokens; may be null, as may `retrieved` and a matrix.
  void forward(int64_t length, const In& in, Matrix<const Real> initial, const Stored<Real>& out,
               const Stored<Real>& retrieved, Tokens<Real> kept, Matrix<Real> final) {
    if (length == 1 && initial.data && initial.column_stride == 1)
      return forward_token(in, initial, out, retrieved, final);
    bool empty = !initial.data;
    empty ? clear(chunk_.state, round_up(chunk_.keys, kTileRows)) : chunk_.copy_in(initial, chunk_.state);
    for (int64_t t = 0; t < length; t += kChunkTokens) {
      chunk_.begin(length - t);
      const int64_t following = t + 2 * kChunkTokens <= length ? t + kChunkTokens : -1;
      chunk_.expect(in, following);
      for (const Stored<Real>& x : {out, retrieved}) chunk_.next.add(x, following, chunk_.values);
      if constexpr (kByHead)
        prepare_by_head(in, t);
      else
        chunk_.prepare(in, t);
      // (q_t * c_t) W, and (y_t * c_{t-1}) W, where y_t is a_t * k_t of a rule that erases with its key.
      read_state(kByHead ? chunk_.query : constant(chunk_.seen_query), empty, chunk_.read);
      if constexpr (kRetrieves) read_state(kByHead ? chunk_.writer[0].key : constant(chunk_.seen_reader), empty, found_);
      if constexpr (kValuesFade) {  // nothing is erased: m_s is v_s, and fades like n_s
        chunk_.load_values(in, {}, t);
        chunk_.template fade_values<Chunk::Direction::kForward>(constant(chunk_.read), chunk_.read,
                                                                chunk_.output(out, t, chunk_.values, chunk_.read));
      } else {
        solve(in, t, chunk_.output(retrieved, t, chunk_.values, chunk_.padded_error));
        if constexpr (kRetrieves) chunk_.deliver(chunk_.padded_error, chunk_.values, retrieved, t);
        add_reads(chunk_.output(out, t, chunk_.values, chunk_.read));
      }
      chunk_.deliver(chunk_.read, chunk_.values, out, t);
      const bool keeps = kept.data && (t + chunk_.count) % kKeptEvery == 0;
      // Copied while it changes: a copy of its own would wait for the lines of new memory.
      const bool at_once = keeps && chunk_.whole_panels(chunk_.values) && chunk_.keys % kTileRows == 0;
      advance_state(empty, at_once ? kept : Tokens<Real>{});
      empty = false;
      if (!keeps) continue;
      if (!at_once) chunk_.copy_out(chunk_.state, {kept.data, kept.stride, 1});
      kept.data = kept[chunk_.keys];
    }
    chunk_.copy_out(chunk_.state, final);
  }

 private:
  Chunk chunk_;
  Tokens<Real> found_;                                          // r_t
  Real decay_so_far_[kChunkTokens], last_decay_[kChunkTokens];  // by head: c_t and w_t
  Tokens<Real> scaled_;                                         // by head: w_t m_t

  // A decoding step: the operations of a chunk of one token, in their order, without copies of the state.
  void forward_token(const In& in, Matrix<const Real> initial, const Stored<Real>& out, const Stored<Real>& retrieved,
                     Matrix<Real> final) {
    const auto read = [](const Stored<Real>& x, int64_t columns, Tokens<Real> to) -> const Real* {
      return x.read_to(to[0], 0, columns), to[0];
    };
    const int64_t keys = chunk_.keys, values = chunk_.values;
    OneToken token{.keys = keys, .initial = initial, .final = final, .rate = in.rate_at(0)};
    const Real* const query = read(in.q, keys, chunk_.padded_query);
    token.key[0] = read(in.k, keys, chunk_.writer[0].padded_key), token.value = read(in.v, values, chunk_.padded_value);
    token.query = chunk_.seen_query[0], token.reader = chunk_.padded_reader[0], token.fade = chunk_.padded_fade[0];
    token.out = chunk_.read[0], token.copied = chunk_.state.data;
    if (retrieved.data) token.retrieved = retrieved.numbers(0);
    if constexpr (kByHead) token.head_decay = in.head_decay[0];
    if constexpr (kValuesFade) token.value_fade = read(in.value_decay, values, chunk_.padded_value_fade);
    if (in.key_decay.data)
      read(in.key_decay, keys, chunk_.padded_fade);
    else
      fill(chunk_.padded_fade[0], keys, in.head_decay[0]);
    if constexpr (kRemoves) {
      token.key[1] = read(in.removal, keys, chunk_.writer[1].padded_key);
      read(in.removal_key, keys, chunk_.padded_reader);
    }
    Vector<Real> with_query[kWriters] = {};
    for (int64_t i = 0; i < keys; i += kLanes<Real>) {
      const Vector<Real> own = load(query + i), x = kByHead ? Real(1) - Vector<Real>{} : load(token.fade + i);
      for (int n = 0; n < kWriters; ++n) with_query[n] += own * load(token.key[n] + i);
      store(chunk_.seen_query[0] + i, own * x);
      if constexpr (erases == Erases::kKey) store(chunk_.padded_reader[0] + i, load(token.key[0] + i) * x);
    }
    for (int n = 0; n < kWriters; ++n) token.with_query[n] = sum_lanes<Real>(with_query[n]);
    int64_t j = 0;
    for (; j + 4 * kLanes<Real> <= values; j += 4 * kLanes<Real>) TokenStep<4>{token, j, 4 * kLanes<Real>}.run();
    for (; j < values; j += kLanes<Real>) TokenStep<1>{token, j, values - j}.run();
    out.write_from(token.out, 0, values);
  }

  struct OneToken {
    int64_t keys;
    Matrix<const Real> initial;
    Matrix<Real> final;
    Real rate, head_decay, with_query[kWriters];
    const Real *key[kWriters], *value, *query, *reader, *fade, *value_fade;  // query and reader as they see the state
    Real *out, *retrieved;
    Real* copied;  // the state, contiguous, unlike its rows, which may all lie in a few sets of the cache
  };

  // The step in n columns of the state, from j on.
  template <int NV>
  struct TokenStep {
    static constexpr int64_t kWidth = NV * kLanes<Real>;
    const OneToken token;  // a copy: the compiler must assume that a store can change what another function has seen
    const int64_t j, n;
    Group<Real, NV> value[kWriters], of_value;
    RowSums<Real, NV, 1> read{token.keys}, found{token.keys};

    FWP_INLINE void run() {
      value[0].load_from(token.value + j, n);
      if constexpr (kValuesFade) of_value.load_from(token.value_fade + j, n);
      if constexpr (!kRetrieves && !kValuesFade) value[0].scale(token.rate);
      read_rows();
      if constexpr (kByHead)
        for (Group<Real, NV>* x : {&read.total[0], &found.total[0]}) x->scale(token.head_decay), x->round();
      if constexpr (kValuesFade) multiply(read.total[0], of_value), read.total[0].round();
      if constexpr (kRetrieves) solve(), write_rows();
      for (int m = 0; m < kWriters; ++m) read.total[0].add(token.with_query[m], value[m]);
      read.total[0].store_to(token.out + j, n);
    }

    // Rows of a rule that retrieves are written after all have been read.
    FWP_INLINE void read_rows() {
      const Real* const data = token.initial.data;
      const int64_t stride = token.initial.row_stride;
      for (int64_t i = 0; i < token.keys; ++i) {
        if (i && i % kSumRows == 0) read.settle(), found.settle();
        FWP_UNROLL for (int m = 0; m < NV; m += kLineBytes / kVectorBytes)
          __builtin_prefetch(address(data, (i + kRowsAhead) * stride + j + m * kLanes<Real>));
        Group<Real, NV> w;
        w.load_from(data + i * stride + j, n);
        w.round();  // where the product with it is fused with a sum does not depend on n
        read.total[0].add(token.query[i], w);
        if constexpr (kRetrieves) {
          found.total[0].add(token.reader[i], w);
          w.store_to(token.copied + i * kWidth, kWidth);
        } else if (token.final.data) {
          write(i, w);
        }
      }
      read.finish(), found.finish();
    }

    FWP_INLINE void solve() {
      if constexpr (kRemoves)
        value[1].clear(), value[1].add(Real(-1), found.total[0]);
      else
        value[0].add(Real(-1), found.total[0]);
      if (token.retrieved) (kRemoves ? found.total[0] : value[0]).store_to(token.retrieved + j, n);
      value[0].scale(token.rate);
    }

    FWP_INLINE void write_rows() const {
      Group<Real, NV> w;
      for (int64_t i = 0; token.final.data && i < token.keys; ++i)
        w.load_from(token.copied + i * kWidth, kWidth), write(i, w);
    }

    FWP_INLINE void write(int64_t i, Group<Real, NV> before) const {
      if constexpr (kValuesFade) multiply(before, of_value), before.round();
      Group<Real, NV> after;
      after.clear();
      for (int m = 0; m < kWriters; ++m) after.add(token.key[m][i], value[m]), after.round();
      after.add(token.fade[i], before);
      after.store_to(token.final.data + i * token.final.row_stride + j, n);
    }
  };

  // The same for decays by head: products of tokens first, then their decays. Queries and keys are read as they are.
  void prepare_by_head(const In& in, int64_t first) {
    const Writer& w = chunk_.writer[0];
    chunk_.query = chunk_.input(in.q, first, chunk_.keys, chunk_.padded_query);
    chunk_.writer[0].key = chunk_.input(in.k, first, chunk_.keys, w.padded_key);
    std::memset(last_decay_, 0, sizeof last_decay_);
    Real so_far = 1;
    for (int64_t t = 0; t < chunk_.rows; ++t) {
      if (t % kTileRows == 0)
        for (int64_t s = 0; s <= t; s += kTileRows) {
          chunk_.score(chunk_.query, w.key, t, s, w.with_query);
          if constexpr (kRetrieves) chunk_.score(w.key, w.key, t, s, w.with_reader);
        }
      const Real decay = t < chunk_.count ? in.head_decay[first + t] : 1;
      decay_so_far_[t] = so_far *= decay;
      for (int64_t s = 0; s < t; ++s) {
        last_decay_[s] *= decay;
        if constexpr (kRetrieves) w.with_reader[t][s] *= last_decay_[s];
        w.with_query[t][s] *= last_decay_[s];
      }
      last_decay_[t] = 1;
    }
    fill(chunk_.total[0], chunk_.keys, so_far);
  }

  void read_state(Tokens<const Real> key, bool empty, Tokens<Real> read) const {
    if (empty) return clear(read, chunk_.rows);
    multiply_matrices<Real>(key, chunk_.rows, constant(chunk_.state), chunk_.keys, chunk_.values, read);
    if constexpr (kByHead) scale_tokens(decay_so_far_, read, read);
  }
  // to = factor[t] * x.
  void scale_tokens(const Real* factor, Tokens<Real> x, Tokens<Real> to) const {
    for (int64_t t = 0; t < chunk_.rows; ++t)
      for (int64_t j = 0; j < chunk_.values; j += kLanes<Real>) store(to[t] + j, load(x[t] + j) * factor[t]);
  }

  // Turn values into sequential writes. Each depends on what the writes before it have left under the token's key.
  void solve(const In& in, int64_t first, Tokens<Real> error) {
    const Tokens<const Real> given = chunk_.input(in.v, first, chunk_.values, chunk_.padded_value);
    for_columns<Real, kPanel>(chunk_.values, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      constexpr int64_t width = NV * kLanes<Real>;
      for (int64_t t = 0; t < chunk_.rows; t += kTileRows) {
        Tile<Real, NV> found;
        if constexpr (kRetrieves) {  // r_t = (y_t * c_{t-1}) W + the sum of A_ts m_s over earlier groups
          FWP_UNROLL for (int r = 0; r < kTileRows; ++r) found.row[r].load_from(found_[t + r] + j, width);
          for (const Writer& w : chunk_.writer)
            found.add(0, t, constant(w.value, j),
                      [&](int64_t s, int r) __attribute__((always_inline)) { return w.with_reader[t + r][s]; });
        }
        FWP_UNROLL for (int r = 0; r < kTileRows; ++r) {
          Group<Real, NV> value, earlier;
          value.load_from(given[t + r] + j, width);
          if constexpr (kRetrieves) {  // r_t += A_ts m_s of its own group; e_t = v_t - r_t, or the removal's value is -r_t
            for (const Writer& w : chunk_.writer)
              for (int m = 0; m < r; ++m) {
                earlier.load_from(w.value[t + m] + j, width);
                found.row[r].add(w.with_reader[t + r][t + m], earlier);
              }
            if constexpr (erases == Erases::kKey) {
              value.add(Real(-1), found.row[r]);
              value.store_to(error[t + r] + j, width);
            } else {
              found.row[r].store_to(error[t + r] + j, width);
              earlier.clear();
              if (t + r < chunk_.count) earlier.add(Real(-1), found.row[r]);
              earlier.store_to(chunk_.writer[kWriters - 1].value[t + r] + j, width);
            }
          }
          value.scale(chunk_.rate_at(in, first, t + r));  // m_t = b_t e_t
          if (t + r >= chunk_.count) value.clear();  // zero times what it retrieves need not be zero
          value.store_to(chunk_.writer[0].value[t + r] + j, width);
        }
      }
    });
  }

  // out_t += the values that the tokens of the chunk have written so far.
  void add_reads(Tokens<Real> out) {
    for_columns<Real, kPanel>(chunk_.values, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t t = 0; t < chunk_.rows; t += kTileRows) {
        Tile<Real, NV> read;
        FWP_UNROLL for (int r = 0; r < kTileRows; ++r) read.row[r].load_from(chunk_.read[t + r] + j, NV * kLanes<Real>);
        for (const Writer& w : chunk_.writer) {
          read.add(0, t, constant(w.value, j),
                   [&](int64_t s, int r) __attribute__((always_inline)) { return w.with_query[t + r][s]; });
          FWP_UNROLL for (int m = 0; m < kTileRows; ++m) {
            Group<Real, NV> value;
            value.load_from(w.value[t + m] + j, NV * kLanes<Real>);
            FWP_UNROLL for (int r = m; r < kTileRows; ++r) read.row[r].add(w.with_query[t + r][t + m], value);
          }
        }
        read.store_to(from_row(out, t).from(j), kTileRows, NV * kLanes<Real>);
      }
    });
  }

  // As in ForgetChunk; values take the place of keys that have decayed by head.
  void advance_state(bool empty, Tokens<Real> copy) {
    if constexpr (kByHead) {
      scale_tokens(last_decay_, chunk_.writer[0].value, scaled_);
      chunk_.change_rows(empty, std::array{Factors<Real>{chunk_.writer[0].key, constant(scaled_)}}, chunk_.state, copy);
    } else {
      chunk_.advance_state(empty, copy);
    }
  }
};

}  // namespace fwp
