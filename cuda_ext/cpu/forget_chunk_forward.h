// The forward pass of a rule that forgets, on chunks: see forget_chunk.h.
#pragma once

#include "forget_chunk.h"

namespace fwp {

template <typename Real, Fades fades, Erases erases>
class ForgetChunkForward : public ForgetChunk<Real, fades, erases> {
  using Base = ForgetChunk<Real, fades, erases>;

 public:
  using typename Base::In;

  ForgetChunkForward(int64_t keys, int64_t values, Real* scratch) : Base(keys, values, scratch) {
    found_ = take_values(), scaled_ = take_values();
  }
  static int64_t scratch_size(int64_t keys, int64_t values) { return ForgetChunkForward(keys, values, nullptr).taken(); }

  // kept: rows of the state after every kKeptEvery tokens; may be null, as may `retrieved` and a matrix.
  void forward(int64_t length, const In& in, Matrix<const Real> initial, const Stored<Real>& out,
               const Stored<Real>& retrieved, Tokens<Real> kept, Matrix<Real> final) {
    if (length == 1 && initial.data && initial.column_stride == 1)
      return forward_token(in, initial, out, retrieved, final);
    bool empty = !initial.data;
    empty ? clear(state_, round_up(keys_, kTileRows)) : copy_in(initial, state_);
    for (int64_t t = 0; t < length; t += kChunkTokens) {
      begin(length - t);
      const int64_t following = t + 2 * kChunkTokens <= length ? t + kChunkTokens : -1;
      expect(in, following);
      for (const Stored<Real>& x : {out, retrieved}) next_.add(x, following, values_);
      if constexpr (kByHead)
        prepare_by_head(in, t);
      else
        prepare(in, t);
      // (q_t * c_t) W, and (y_t * c_{t-1}) W, where y_t is a_t * k_t of a rule that erases with its key.
      read_state(kByHead ? query_ : constant(seen_query_), empty, read_);
      if constexpr (kRetrieves) read_state(kByHead ? writer_[0].key : constant(seen_reader_), empty, found_);
      if constexpr (kValuesFade) {  // nothing is erased: m_s is v_s, and fades like n_s
        load_values(in, {}, t);
        this->template fade_values<Pass::kForward>(constant(read_), read_, output(out, t, values_, read_));
      } else {
        solve(in, t, output(retrieved, t, values_, padded_error_));
        if constexpr (kRetrieves) deliver(padded_error_, values_, retrieved, t);
        add_reads(output(out, t, values_, read_));
      }
      deliver(read_, values_, out, t);
      const bool keeps = kept.data && (t + count_) % kKeptEvery == 0;
      // Copied while it changes: a copy of its own would wait for the lines of new memory.
      const bool at_once = keeps && whole_panels(values_) && keys_ % kTileRows == 0;
      advance_state(empty, at_once ? kept : Tokens<Real>{});
      empty = false;
      if (!keeps) continue;
      if (!at_once) copy_out(state_, {kept.data, kept.stride, 1});
      kept.data = kept[keys_];
    }
    copy_out(state_, final);
  }

 private:
  template <Fades, Erases>
  friend class ForgetTiles;
  using typename Base::Pass, typename Base::Writer;
  using Base::kPanel, Base::kRetrieves, Base::kRemoves, Base::kByHead, Base::kValuesFade, Base::kWriters;
  using Base::count_, Base::keys_, Base::next_, Base::padded_error_, Base::padded_fade_, Base::padded_query_,
      Base::padded_reader_, Base::padded_value_, Base::padded_value_fade_, Base::query_, Base::read_, Base::rows_,
      Base::seen_query_, Base::seen_reader_, Base::state_, Base::total_, Base::values_, Base::writer_;
  using Base::begin, Base::change_rows, Base::clear, Base::copy_in, Base::copy_out, Base::deliver,
      Base::expect, Base::fade_values, Base::fill, Base::input, Base::load_values, Base::output, Base::prepare,
      Base::rate_at, Base::score, Base::take_values, Base::whole_panels;

  Tokens<Real> found_;                                          // r_t
  Real decay_so_far_[kChunkTokens], last_decay_[kChunkTokens];  // by head: c_t and w_t
  Tokens<Real> scaled_;                                         // by head: w_t m_t

  // A decoding step: the operations of a chunk of one token, in their order, without copies of the state.
  void forward_token(const In& in, Matrix<const Real> initial, const Stored<Real>& out, const Stored<Real>& retrieved,
                     Matrix<Real> final) {
    const Real *query = token(in.q, keys_, padded_query_), *reader = padded_reader_[0], *fade = padded_fade_[0];
    const Real *key[kWriters] = {token(in.k, keys_, writer_[0].padded_key)}, *given = token(in.v, values_, padded_value_);
    if constexpr (kValuesFade) token(in.value_decay, values_, padded_value_fade_);
    if (in.key_decay.data)
      token(in.key_decay, keys_, padded_fade_);
    else
      fill(padded_fade_[0], keys_, in.head_decay[0]);
    if constexpr (kRemoves) {
      key[1] = token(in.removal, keys_, writer_[1].padded_key);
      token(in.removal_key, keys_, padded_reader_);
    }
    Vector<Real> with_query[kWriters] = {};
    for (int64_t i = 0; i < keys_; i += kLanes<Real>) {
      const Vector<Real> own = load(query + i), x = kByHead ? Real(1) - Vector<Real>{} : load(fade + i);
      for (int n = 0; n < kWriters; ++n) with_query[n] += own * load(key[n] + i);
      store(seen_query_[0] + i, own * x);
      if constexpr (erases == Erases::kKey) store(padded_reader_[0] + i, load(key[0] + i) * x);
    }
    const auto run_columns = [&](int64_t j, auto vectors, int64_t n) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      const auto row = [&](int64_t i) __attribute__((always_inline)) {
        Group<Real, NV> w;
        w.load_from(initial.data + i * initial.row_stride + j, n);
        w.round();  // where the product with it is fused with a sum does not depend on n
        return w;
      };
      Group<Real, NV> value[kWriters], of_value;
      const auto write = [&](int64_t i, Group<Real, NV> before) __attribute__((always_inline)) {
        if constexpr (kValuesFade) multiply(before, of_value), before.round();
        Group<Real, NV> after;
        after.clear();
        for (int m = 0; m < kWriters; ++m) after.add(key[m][i], value[m]), after.round();
        after.add(fade[i], before);
        after.store_to(final.data + i * final.row_stride + j, n);
      };
      value[0].load_from(given + j, n);
      if constexpr (kValuesFade) of_value.load_from(padded_value_fade_[0] + j, n);
      if constexpr (!kRetrieves && !kValuesFade) value[0].scale(in.rate_at(0));
      RowSums<Real, NV, 1> read(keys_), found(keys_);
      Real* copied = state_.data;  // contiguous, unlike the rows of a state, which may all lie in a few sets of the cache
      for (int64_t i = 0; i < keys_; ++i) {
        if (i && i % kSumRows == 0) read.settle(), found.settle();
        FWP_UNROLL for (int m = 0; m < NV; m += kLineBytes / kVectorBytes)
          __builtin_prefetch(address(initial.data, (i + kRowsAhead) * initial.row_stride + j + m * kLanes<Real>));
        const Group<Real, NV> w = row(i);
        read.total[0].add(seen_query_[0][i], w);
        if constexpr (kRetrieves) {
          found.total[0].add(reader[i], w);
          w.store_to(copied + i * NV * kLanes<Real>, NV * kLanes<Real>);
        } else if (final.data) {
          write(i, w);
        }
      }
      read.finish(), found.finish();
      if constexpr (kByHead)
        for (Group<Real, NV>* x : {&read.total[0], &found.total[0]}) x->scale(in.head_decay[0]), x->round();
      if constexpr (kValuesFade) multiply(read.total[0], of_value), read.total[0].round();
      if constexpr (kRetrieves) {
        if constexpr (kRemoves)
          value[1].clear(), value[1].add(Real(-1), found.total[0]);
        else
          value[0].add(Real(-1), found.total[0]);
        if (retrieved.data) (kRemoves ? found.total[0] : value[0]).store_to(retrieved.numbers(0) + j, n);
        value[0].scale(in.rate_at(0));
        for (int64_t i = 0; final.data && i < keys_; ++i) {
          Group<Real, NV> w;
          w.load_from(copied + i * NV * kLanes<Real>, NV * kLanes<Real>);
          write(i, w);
        }
      }
      for (int m = 0; m < kWriters; ++m) read.total[0].add(sum_lanes<Real>(with_query[m]), value[m]);
      read.total[0].store_to(read_[0] + j, n);
    };
    int64_t j = 0;
    for (; j + 4 * kLanes<Real> <= values_; j += 4 * kLanes<Real>)
      run_columns(j, std::integral_constant<int, 4>{}, 4 * kLanes<Real>);
    for (; j < values_; j += kLanes<Real>) run_columns(j, std::integral_constant<int, 1>{}, values_ - j);
    out.write_from(read_[0], 0, values_);
  }

  static Real* token(const Stored<Real>& x, int64_t columns, Tokens<Real> own) { return x.read_to(own[0], 0, columns), own[0]; }

  // The same for decays by head: products of tokens first, then their decays. Queries and keys are read as they are.
  void prepare_by_head(const In& in, int64_t first) {
    const Writer& w = writer_[0];
    query_ = input(in.q, first, keys_, padded_query_);
    writer_[0].key = input(in.k, first, keys_, w.padded_key);
    std::memset(last_decay_, 0, sizeof last_decay_);
    Real so_far = 1;
    for (int64_t t = 0; t < rows_; ++t) {
      if (t % kTileRows == 0)
        for (int64_t s = 0; s <= t; s += kTileRows) {
          score(query_, w.key, t, s, w.with_query);
          if constexpr (kRetrieves) score(w.key, w.key, t, s, w.with_reader);
        }
      const Real decay = t < count_ ? in.head_decay[first + t] : 1;
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

  void read_state(Tokens<const Real> key, bool empty, Tokens<Real> read) const {
    if (empty) return clear(read, rows_);
    multiply_matrices<Real>(key, rows_, constant(state_), keys_, values_, read);
    if constexpr (kByHead) scale_tokens(decay_so_far_, read, read);
  }
  // to = factor[t] * x.
  void scale_tokens(const Real* factor, Tokens<Real> x, Tokens<Real> to) const {
    for (int64_t t = 0; t < rows_; ++t)
      for (int64_t j = 0; j < values_; j += kLanes<Real>) store(to[t] + j, load(x[t] + j) * factor[t]);
  }

  // Turn values into sequential writes. Each depends on what the writes before it have left under the token's key.
  void solve(const In& in, int64_t first, Tokens<Real> error) {
    const Tokens<const Real> given = input(in.v, first, values_, padded_value_);
    for_columns<Real, kPanel>(values_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      constexpr int64_t width = NV * kLanes<Real>;
      for (int64_t t = 0; t < rows_; t += kTileRows) {
        Tile<Real, NV> found;
        if constexpr (kRetrieves) {  // r_t = (y_t * c_{t-1}) W + the sum of A_ts m_s over earlier groups
          FWP_UNROLL for (int r = 0; r < kTileRows; ++r) found.row[r].load_from(found_[t + r] + j, width);
          for (const Writer& w : writer_)
            found.add(0, t, constant(w.value, j),
                      [&](int64_t s, int r) __attribute__((always_inline)) { return w.with_reader[t + r][s]; });
        }
        FWP_UNROLL for (int r = 0; r < kTileRows; ++r) {
          Group<Real, NV> value, earlier;
          value.load_from(given[t + r] + j, width);
          if constexpr (kRetrieves) {  // r_t += A_ts m_s of its own group; e_t = v_t - r_t, or the removal's value is -r_t
            for (const Writer& w : writer_)
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
              if (t + r < count_) earlier.add(Real(-1), found.row[r]);
              earlier.store_to(writer_[kWriters - 1].value[t + r] + j, width);
            }
          }
          value.scale(rate_at(in, first, t + r));  // m_t = b_t e_t
          if (t + r >= count_) value.clear();  // zero times what it retrieves need not be zero
          value.store_to(writer_[0].value[t + r] + j, width);
        }
      }
    });
  }

  // out_t += the values that the tokens of the chunk have written so far.
  void add_reads(Tokens<Real> out) {
    for_columns<Real, kPanel>(values_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t t = 0; t < rows_; t += kTileRows) {
        Tile<Real, NV> read;
        FWP_UNROLL for (int r = 0; r < kTileRows; ++r) read.row[r].load_from(read_[t + r] + j, NV * kLanes<Real>);
        for (const Writer& w : writer_) {
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

  // As in Base; values take the place of keys that have decayed by head.
  void advance_state(bool empty, Tokens<Real> copy) {
    if constexpr (kByHead) {
      scale_tokens(last_decay_, writer_[0].value, scaled_);
      change_rows(empty, std::array{Factors<Real>{writer_[0].key, constant(scaled_)}}, state_, copy);
    } else {
      Base::advance_state(empty, copy);
    }
  }
};

}  // namespace fwp
