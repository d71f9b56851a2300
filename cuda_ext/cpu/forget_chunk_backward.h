// The backward pass of a rule that forgets, on chunks: see forget_chunk.h. A decay per head is one per key here.
#pragma once

#include "forget_chunk.h"

namespace fwp {

template <typename Real, Fades fades, Erases erases>
class ForgetChunkBackward : public ForgetChunk<Real, fades, erases> {
  using Base = ForgetChunk<Real, fades, erases>;

 public:
  using typename Base::In;
  using Gradients = ForgetGradients<Real, Stored<Real>>;

  ForgetChunkBackward(int64_t keys, int64_t values, Real* scratch) : Base(keys, values, scratch) {
    static_assert(fades != Fades::kHead);
    d_state_ = take_rows(state_rows(keys), values), state_of_value_ = take_rows(round_up(values, kLanes<Real>), keys);
    for (Tokens<Real>* x : {&padded_d_query_, &padded_d_reader_, &padded_d_fade_, &d_seen_query_, &d_seen_reader_})
      *x = take_keys();
    for (Tokens<Real>* x : {&padded_d_read_, &padded_d_value_, &padded_d_value_fade_, &seen_d_read_, &d_found_})
      *x = take_values();
    for (WriterGradients& d : d_writer_) {
      d.padded_key = take_keys(), d.key_at_end = take_keys(), d.value = take_values();
      d.with_query = take_rows(kChunkTokens, kChunkTokens), d.with_reader = take_rows(kChunkTokens, kChunkTokens);
    }
    d_total_ = take_rows(1, keys), d_total_of_value_ = take_rows(1, values);
    faded_ = take_rows(kChunkTokens, kTileRows * kNarrow * kLanes<Real>);
    if (scratch && !whole_panels(values)) clear(padded_d_read_, kChunkTokens);
  }
  static int64_t scratch_size(int64_t keys, int64_t values) { return ForgetChunkBackward(keys, values, nullptr).taken(); }

  // kept as in `forward`, from the start of the sequence; retrieved is what `forward` has stored.
  void backward(int64_t length, const In& in, Matrix<const Real> initial, Tokens<const Real> retrieved, Tokens<const Real> kept,
                const Stored<Real>& d_out, Matrix<const Real> d_final, const Gradients& to, Matrix<Real> d_initial) {
    d_empty_ = !d_final.data;
    d_empty_ ? clear(d_state_, round_up(keys_, kTileRows)) : copy_in(d_final, d_state_);
    for (int64_t t = (length - 1) / kChunkTokens * kChunkTokens; t >= 0; t -= kChunkTokens) {
      const int64_t start = t / kKeptEvery * kKeptEvery;
      const Matrix<const Real> before =
          start ? Matrix<const Real>{kept[(start / kKeptEvery - 1) * keys_], kept.stride, 1} : initial;
      bool empty = !before.data;
      if (!empty) copy_in(before, state_);
      for (int64_t u = start; u < t; u += kChunkTokens) {  // rebuild the state, with the operations of `forward`
        begin(kChunkTokens);
        this->template prepare<false>(in, u);
        load_values(in, retrieved, u);
        if constexpr (kValuesFade) this->template fade_values<Pass::kRebuild>();
        advance_state(empty);
        empty = false;
      }
      begin(length - t);
      const int64_t following = t - kChunkTokens;
      expect(in, following);
      for (const Stored<Real>& x : {Stored<Real>(retrieved), d_out, to.v, to.value_decay}) next_.add(x, following, values_);
      for (const Stored<Real>& x : {to.q, to.k, to.key_decay, to.removal, to.removal_key}) next_.add(x, following, keys_);
      prepare(in, t);
      load_values(in, retrieved, t);
      differentiate(in, t, empty, d_out, to, t > 0 || d_initial.data);
    }
    copy_out(d_state_, d_initial);
  }

 private:
  template <Fades, Erases>
  friend class ForgetTiles;
  using typename Base::Pass, typename Base::Rows, typename Base::Writer;
  using Base::kValuesFade, Base::kWriters, Base::kNarrow;
  static constexpr bool kRetrieves = Base::kRetrieves, kRemoves = Base::kRemoves;  // GCC loses a `using` in a lambda
  using Base::count_, Base::error_, Base::fade_, Base::keys_, Base::next_, Base::query_, Base::read_, Base::reader_,
      Base::rows_, Base::seen_query_, Base::seen_reader_, Base::state_, Base::total_, Base::total_of_value_,
      Base::value_fade_, Base::values_, Base::writer_;
  using Base::advance_state, Base::begin, Base::change_rows, Base::clear, Base::copy_in, Base::copy_out, Base::deliver,
      Base::expect, Base::fade_values, Base::for_tokens_from, Base::input, Base::load_values, Base::output, Base::prepare,
      Base::rate_at, Base::state_rows, Base::take_keys, Base::take_rows, Base::take_values, Base::whole_panels;

  struct WriterGradients {
    Tokens<Real> key, padded_key, key_at_end, value, with_query, with_reader;
  };

  Tokens<Real> d_state_, state_of_value_;  // the gradient of W, and W^T
  bool d_empty_ = false;                   // whether that gradient is zero: products with it are not needed
  Tokens<const Real> d_read_;              // d_out_t
  Tokens<Real> seen_d_read_, d_found_;     // d_out_t * Z_t and the gradient of r_t
  Tokens<Real> d_query_, d_reader_, d_fade_, d_seen_query_, d_seen_reader_;
  WriterGradients d_writer_[kWriters];
  Tokens<Real> d_total_, d_total_of_value_;
  Tokens<Real> padded_d_query_, padded_d_reader_, padded_d_fade_, padded_d_read_, padded_d_value_, padded_d_value_fade_;
  Tokens<Real> faded_;                  // N_ts of four s and a few columns, for every t

  // The gradients of the chunk's tokens, and of the state before it if `needed`, from d_out and that of the state after
  // it. `empty`: the state before it is zero.
  void differentiate(const In& in, int64_t first, bool empty, const Stored<Real>& d_out, const Gradients& to, bool needed) {
    d_read_ = input(d_out, first, values_, padded_d_read_);
    // d_m_s = N_Cs G + the sum of P_ts d_out_t (t >= s) and A_ts d_r_t (t > s): the state's part, then those of tokens.
    for (int n = 0; n < kWriters; ++n)
      if (d_empty_)
        clear(d_writer_[n].value, rows_);
      else
        multiply_matrices<Real>(constant(writer_[n].key_at_end), rows_, constant(d_state_), keys_, values_, d_writer_[n].value);
    if constexpr (kValuesFade)
      this->template fade_values<Pass::kBackward>(d_read_, seen_d_read_, d_writer_[0].with_query);
    else
      solve_back(in, first);
    // d_P_ts = d_out_t . m_s, d_A_ts = d_r_t . m_s, d_N_Cs = m_s G^T.
    for (int n = 0; n < kWriters; ++n) {
      const Tokens<Real> value = writer_[n].value;
      if constexpr (!kValuesFade) multiply_tokens(d_read_, value, d_writer_[n].with_query);
      if constexpr (kRetrieves) multiply_tokens(constant(d_found_), value, d_writer_[n].with_reader);
      if (d_empty_)
        clear(d_writer_[n].key_at_end, rows_);
      else
        multiply_rows(constant(value), d_state_, rows_, keys_, values_, d_writer_[n].key_at_end);
    }
    differentiate_reads(empty);
    differentiate_keys(first, to);
    const Tokens<Real> d_value = output(to.v, first, values_, padded_d_value_);
    if constexpr (kValuesFade) {
      const Side of_values{d_read_, value_fade_, read_, {}, output(to.value_decay, first, values_, padded_d_value_fade_),
                           d_total_of_value_};
      for_columns<Real, kNarrow>(values_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
        constexpr int NV = decltype(vectors)::value;
        differentiate_state<false, NV>(of_values, j);
        for (int64_t s = 0; s < rows_; s += kTileRows)
          differentiate_writer<false, NV>(of_values, {error_, d_writer_[0].value, d_value, writer_[0].with_query, {}}, s, j);
      });
      deliver(padded_d_value_fade_, values_, to.value_decay, first);
    } else {  // d_b_t = d_m_t . e_t, d_v_t = b_t d_m_t
      for (int64_t t = 0; t < count_; ++t) {
        const Real* d_written = d_writer_[0].value[t];
        if (to.rate.data) to.rate[first + t] = dot(d_written, error_[t], values_);
        for (int64_t j = 0; j < values_; j += kLanes<Real>) store(d_value[t] + j, load(d_written + j) * rate_at(in, first, t));
      }
    }
    deliver(padded_d_value_, values_, to.v, first);
    if (needed) {  // G = c_C * G * Z_C + (q_t * c_t)^T (d_out_t * Z_t) + (y_t * c_{t-1})^T d_r_t
      const auto back = [&](Tokens<Real> x, Tokens<const Real> y) {
        return Factors<Real>{constant(x).reversed(rows_), y.reversed(rows_)};
      };
      const Factors<Real> reads = back(seen_query_, kValuesFade ? constant(seen_d_read_) : d_read_);
      if constexpr (kRetrieves)
        change_rows(d_empty_, std::array{reads, back(seen_reader_, constant(d_found_))}, d_state_);
      else
        change_rows(d_empty_, std::array{reads}, d_state_);
    }
    d_empty_ = false;
  }

  // product[t][s] = x_t . y_s for the tokens s <= t, and some others.
  void multiply_tokens(Tokens<const Real> x, Tokens<Real> y, Tokens<Real> product) const {
    for (int64_t t = 0; t < rows_; t += kTileRows)
      multiply_rows(from_row(x, t), y, kTileRows, t + kTileRows, values_, from_row(product, t));
  }

  // The gradients of what tokens read in the state before the chunk, and of c_C and Z_C.
  void differentiate_reads(bool empty) {
    if (empty) {
      for (const Tokens<Real>& x : {d_seen_query_, d_seen_reader_}) clear(x, rows_);
      clear(d_total_, 1);
      if constexpr (kValuesFade) clear(read_, rows_), clear(d_total_of_value_, 1);
      return;
    }
    transpose(state_, keys_, values_, state_of_value_);
    const Tokens<const Real> by_value = constant(state_of_value_);
    multiply_matrices<Real>(kValuesFade ? constant(seen_d_read_) : d_read_, rows_, by_value, values_, keys_, d_seen_query_);
    if constexpr (kRetrieves) multiply_matrices<Real>(constant(d_found_), rows_, by_value, values_, keys_, d_seen_reader_);
    if constexpr (!kValuesFade) {  // d_c_C: the rows of W * G, summed
      for (int64_t i = 0; i < keys_; i += kLanes<Real>) {
        Vector<Real> sum[kLanes<Real>];
        FWP_UNROLL for (int n = 0; n < kLanes<Real>; ++n) {
          sum[n] = Vector<Real>{};
          for (int64_t j = 0; j < values_; j += kLanes<Real>)
            sum[n] += load_part(state_[i + n] + j, values_ - j) * load_part(d_state_[i + n] + j, values_ - j);
        }
        sum_lanes_of_each<Real>(sum);
        store(d_total_[0] + i, sum[0]);
      }
    } else {  // d_c_C and d_Z_C: the rows of W * G * Z_C, and the columns of c_C * W * G
      multiply_matrices<Real>(constant(seen_query_), rows_, constant(state_), keys_, values_, read_);
      clear(d_total_of_value_, 1);
      for (int64_t i = 0; i < keys_; ++i) {
        Vector<Real> sum = {};
        for (int64_t j = 0; j < values_; j += kLanes<Real>) {
          const Vector<Real> product = load_part(state_[i] + j, values_ - j) * load_part(d_state_[i] + j, values_ - j);
          sum += product * load_part(total_of_value_[0] + j, values_ - j);
          Real* d_total = d_total_of_value_[0] + j;
          store(d_total, load(d_total) + total_[0][i] * product);
        }
        d_total_[0][i] = sum_lanes<Real>(sum);
      }
    }
  }

  // The gradients of written values and of retrieved ones, from the last token back.
  void solve_back(const In& in, int64_t first) {
    for_columns<Real, kNarrow>(values_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      constexpr int64_t width = NV * kLanes<Real>;
      for (int64_t t = rows_ - kTileRows; t >= 0; t -= kTileRows) {
        Tile<Real, NV> d_value[kWriters];
        for (int n = 0; n < kWriters; ++n) {
          const Writer& w = writer_[n];
          FWP_UNROLL for (int r = 0; r < kTileRows; ++r) d_value[n].row[r].load_from(d_writer_[n].value[t + r] + j, width);
          d_value[n].add(t + kTileRows, rows_, d_read_.from(j),
                         [&](int64_t u, int r) __attribute__((always_inline)) { return w.with_query[u][t + r]; });
          if constexpr (kRetrieves)
            d_value[n].add(t + kTileRows, rows_, constant(d_found_, j),
                           [&](int64_t u, int r) __attribute__((always_inline)) { return w.with_reader[u][t + r]; });
        }
        FWP_UNROLL for (int r = kTileRows - 1; r >= 0; --r) {
          for (int n = 0; n < kWriters; ++n) {
            const Writer& w = writer_[n];
            Group<Real, NV> later;
            for (int m = r; m < kTileRows; ++m) {
              later.load_from(d_read_[t + m] + j, width);
              d_value[n].row[r].add(w.with_query[t + m][t + r], later);
            }
            if constexpr (kRetrieves)
              for (int m = r + 1; m < kTileRows; ++m) {
                later.load_from(d_found_[t + m] + j, width);
                d_value[n].row[r].add(w.with_reader[t + m][t + r], later);
              }
            d_value[n].row[r].store_to(d_writer_[n].value[t + r] + j, width);
          }
          if constexpr (kRetrieves) {  // d_r_t = -b_t d_m_t, of a removal -d_m_t of its own writer
            Group<Real, NV>& of_found = d_value[kWriters - 1].row[r];
            of_found.scale(kRemoves ? Real(-1) : -rate_at(in, first, t + r));
            if (t + r >= count_) of_found.clear();
            of_found.store_to(d_found_[t + r] + j, width);
          }
        }
      }
    });
  }

  // Keys with their decays and queries; or values, with d_out in place of queries.
  struct Side {
    Tokens<const Real> query, fade;
    Tokens<Real> d_seen, d_query, d_fade, d_total;  // d_seen: of q_t * c_t
  };
  struct Faded {
    Tokens<const Real> x;
    Tokens<Real> d_key_at_end, d_key, d_with_query, d_with_reader;
  };

  // Call f(t, how many of the tokens s to s + 3 are before t) for t from the last token back to s.
  template <typename F>
  FWP_INLINE void for_tokens_back_to(int64_t s, F f) const {
    for (int64_t t = rows_; t-- > s + kTileRows;) f(t, Rows{});
    f(s + 3, std::integral_constant<int, 3>{});
    f(s + 2, std::integral_constant<int, 2>{});
    f(s + 1, std::integral_constant<int, 1>{});
    f(s, std::integral_constant<int, 0>{});
  }

  // What comes of c_t: gradients of queries, readers and decays from what they have read in the state.
  template <bool kKeys, int NV>
  FWP_INLINE void differentiate_state(const Side& side, int64_t i) {
    constexpr int64_t width = NV * kLanes<Real>;
    Group<Real, NV> so_far, fade, x, gradient, of_read;
    FWP_UNROLL for (int n = 0; n < NV; ++n) so_far.x[n] = Real(1) - Vector<Real>{};
    for (int64_t t = 0; t < rows_; ++t) {
      so_far.store_to(faded_[t], width);
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
      so_far.load_from(faded_[t], width);
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

  // The same for N_ts: also the gradients of the four keys from s on.
  template <bool kKeys, int NV>
  FWP_INLINE void differentiate_writer(const Side& side, const Faded& w, int64_t s, int64_t i) {
    constexpr int64_t width = NV * kLanes<Real>;
    Group<Real, NV> faded[kTileRows], gradient[kTileRows];
    for_tokens_from(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
      advance<decltype(earlier)::value>(w.x[t] + i, side.fade[t] + i, faded);
      FWP_UNROLL for (int m = 0; m < kTileRows; ++m)
        if (m <= decltype(earlier)::value) faded[m].store_to(faded_[t] + m * width, width);
    });
    FWP_UNROLL for (int m = 0; m < kTileRows; ++m) gradient[m].load_from(w.d_key_at_end[s + m] + i, width);
    for_tokens_back_to(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
      constexpr int before = decltype(earlier)::value, seen = std::min(before + 1, kTileRows);
      const Real* of_query = w.d_with_query[t] + s;
      Group<Real, NV> own, x, d_own;
      own.load_from(side.query[t] + i, width);
      FWP_UNROLL for (int m = 0; m < seen; ++m) gradient[m].add(of_query[m], own);
      if constexpr (kKeys) {
        d_own.load_from(side.d_query[t] + i, width);
        FWP_UNROLL for (int m = 0; m < seen; ++m) {
          x.load_from(faded_[t] + m * width, width);
          d_own.add(of_query[m], x);
        }
        d_own.store_to(side.d_query[t] + i, width);
      }
      if constexpr (before > 0) {
        const Real* of_reader = w.d_with_reader[t] + s;
        Group<Real, NV> fade, d_fade;
        fade.load_from(side.fade[t] + i, width);
        d_fade.load_from(side.d_fade[t] + i, width);
        if constexpr (kKeys && kRetrieves) {
          own.load_from(this->reader_[t] + i, width);
          d_own.load_from(d_reader_[t] + i, width);
        }
        FWP_UNROLL for (int m = 0; m < before; ++m) {
          x.load_from(faded_[t - 1] + m * width, width);
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
      if constexpr (before < kTileRows) gradient[before].store_to(w.d_key[t] + i, width);
    });
  }

  static Real sum_of(const Real* x, int64_t columns) {
    Vector<Real> sum = {};
    for (int64_t i = 0; i < columns; i += kLanes<Real>) sum += load_part(x + i, columns - i);  // the padding is arbitrary
    return sum_lanes<Real>(sum);
  }
  static Real dot(const Real* x, const Real* y, int64_t columns) {
    Vector<Real> sum = {};
    for (int64_t i = 0; i < columns; i += kLanes<Real>) sum += load_part(x + i, columns - i) * load_part(y + i, columns - i);
    return sum_lanes<Real>(sum);
  }

  // The gradients of queries, keys and decays, from those of what products read.
  void differentiate_keys(int64_t first, const Gradients& to) {
    d_query_ = output(to.q, first, keys_, padded_d_query_), d_fade_ = output(to.key_decay, first, keys_, padded_d_fade_);
    d_reader_ = kRemoves ? output(to.removal_key, first, keys_, padded_d_reader_) : padded_d_reader_;
    d_writer_[0].key = output(to.k, first, keys_, d_writer_[0].padded_key);
    if constexpr (kRemoves) d_writer_[1].key = output(to.removal, first, keys_, d_writer_[1].padded_key);
    const Side of_keys{query_, fade_, d_seen_query_, d_query_, d_fade_, d_total_};
    for_columns<Real, kNarrow>(keys_, [&](int64_t i, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      differentiate_state<true, NV>(of_keys, i);
      for (int n = 0; n < kWriters; ++n)
        for (int64_t s = 0; s < rows_; s += kTileRows) {
          const WriterGradients& d = d_writer_[n];
          differentiate_writer<true, NV>(of_keys, {writer_[n].key, d.key_at_end, d.key, d.with_query, d.with_reader}, s, i);
        }
    });
    for (int64_t t = 0; t < count_; ++t) {
      if constexpr (erases == Erases::kKey)  // y_t = a_t * k_t
        for (int64_t i = 0; i < keys_; i += kLanes<Real>) {
          const Vector<Real> of_reader = load(d_reader_[t] + i);
          store(d_writer_[0].key[t] + i, load(d_writer_[0].key[t] + i) + load(fade_[t] + i) * of_reader);
          store(d_fade_[t] + i, load(d_fade_[t] + i) + load(writer_[0].key[t] + i) * of_reader);
        }
      if (to.head_decay.data) to.head_decay[first + t] = sum_of(d_fade_[t], keys_);
    }
    deliver(padded_d_query_, keys_, to.q, first);
    deliver(padded_d_fade_, keys_, to.key_decay, first);
    deliver(d_writer_[0].padded_key, keys_, to.k, first);
    if constexpr (kRemoves) {
      deliver(d_writer_[1].padded_key, keys_, to.removal, first);
      deliver(padded_d_reader_, keys_, to.removal_key, first);
    }
  }
};

}  // namespace fwp
