// The backward pass of a rule that forgets, on chunks: see forget_chunk.h. A decay per head is one per key here.
#pragma once

#include "forget_chunk.h"

namespace fwp {

template <typename Real, Fades fades, Erases erases>
struct ForgetChunkBackward {
  using Chunk = ForgetChunk<Real, fades, erases>;
  using Writer = typename Chunk::Writer;
  using Number = Real;
  using In = typename Chunk::In;
  using Gradients = ForgetGradients<Real, Stored<Real>>;
  static constexpr int64_t kColumns = Chunk::kColumns;
  static constexpr int kNarrow = Chunk::kNarrow, kWriters = Chunk::kWriters;
  static constexpr bool kRetrieves = Chunk::kRetrieves, kRemoves = Chunk::kRemoves, kValuesFade = Chunk::kValuesFade;

  struct WriterGradients {
    Tokens<Real> key, padded_key, key_at_end, value, with_query, with_reader;
  };

  Chunk chunk;
  Tokens<Real> d_state, state_of_value;  // the gradient of W, and W^T
  bool d_empty = false;                  // whether that gradient is zero: products with it are not needed
  Tokens<const Real> d_read;             // d_out_t
  Tokens<Real> seen_d_read, d_found;     // d_out_t * Z_t and the gradient of r_t
  Tokens<Real> d_query, d_reader, d_fade, d_seen_query, d_seen_reader;
  WriterGradients d_writer[kWriters];
  Tokens<Real> d_total, d_total_of_value;
  Tokens<Real> padded_d_query, padded_d_reader, padded_d_fade, padded_d_read, padded_d_value, padded_d_value_fade;
  Tokens<Real> faded_at;  // N_ts of four s and a few columns, for every t

  ForgetChunkBackward(int64_t keys, int64_t values, Real* scratch) : chunk(keys, values, scratch) {
    static_assert(fades != Fades::kHead);
    d_state = chunk.take_state(), state_of_value = chunk.take_rows(round_up(values, kLanes<Real>), keys);
    for (Tokens<Real>* x : {&padded_d_query, &padded_d_reader, &padded_d_fade, &d_seen_query, &d_seen_reader})
      *x = chunk.take_keys();
    for (Tokens<Real>* x : {&padded_d_read, &padded_d_value, &padded_d_value_fade, &seen_d_read, &d_found})
      *x = chunk.take_values();
    for (WriterGradients& d : d_writer) {
      d.padded_key = chunk.take_keys(), d.key_at_end = chunk.take_keys(), d.value = chunk.take_values();
      d.with_query = chunk.take_rows(kChunkTokens, kChunkTokens), d.with_reader = chunk.take_rows(kChunkTokens, kChunkTokens);
    }
    d_total = chunk.take_rows(1, keys), d_total_of_value = chunk.take_rows(1, values);
    faded_at = chunk.take_rows(kChunkTokens, kTileRows * kNarrow * kLanes<Real>);
  }
  static int64_t scratch_size(int64_t keys, int64_t values) { return ForgetChunkBackward(keys, values, nullptr).chunk.taken(); }

  // kept as in `forward`, from the start of the sequence; retrieved is what `forward` has stored.
  void backward(int64_t length, const In& in, Matrix<const Real> initial, Tokens<const Real> retrieved, Tokens<const Real> kept,
                const Stored<Real>& d_out, Matrix<const Real> d_final, const Gradients& to, Matrix<Real> d_initial) {
    d_empty = !d_final.data;
    d_empty ? clear(d_state, round_up(chunk.keys, kTileRows)) : chunk.copy_in(d_final, d_state);
    for (int64_t t = (length - 1) / kChunkTokens * kChunkTokens; t >= 0; t -= kChunkTokens) {
      const int64_t start = t / kKeptEvery * kKeptEvery;
      const Matrix<const Real> before =
          start ? Matrix<const Real>{kept[(start / kKeptEvery - 1) * chunk.keys], kept.stride, 1} : initial;
      bool empty = !before.data;
      if (!empty) chunk.copy_in(before, chunk.state);
      for (int64_t u = start; u < t; u += kChunkTokens) {  // rebuild the state, with the operations of `forward`
        chunk.begin(kChunkTokens);
        chunk.template prepare<false>(in, u);
        chunk.load_values(in, retrieved, u);
        if constexpr (kValuesFade) chunk.template fade_values<Chunk::Direction::kRebuild>();
        chunk.advance_state(empty);
        empty = false;
      }
      chunk.begin(length - t);
      const int64_t following = t - kChunkTokens;
      chunk.expect(in, following);
      for (const Stored<Real>& x : {Stored<Real>(retrieved), d_out, to.v, to.value_decay})
        chunk.next.add(x, following, chunk.values);
      for (const Stored<Real>& x : {to.q, to.k, to.key_decay, to.removal, to.removal_key})
        chunk.next.add(x, following, chunk.keys);
      chunk.prepare(in, t);
      chunk.load_values(in, retrieved, t);
      differentiate(in, t, empty, d_out, to, t > 0 || d_initial.data);
    }
    chunk.copy_out(d_state, d_initial);
  }

  // The gradients of the chunk's tokens, and of the state before it if `needed`, from d_out and that of the state after
  // it. `empty`: the state before it is zero.
  void differentiate(const In& in, int64_t first, bool empty, const Stored<Real>& d_out, const Gradients& to, bool needed) {
    d_read = chunk.input(d_out, first, chunk.values, padded_d_read);
    // d_m_s = N_Cs G + the sum of P_ts d_out_t (t >= s) and A_ts d_r_t (t > s): the state's part, then those of tokens.
    for (int n = 0; n < kWriters; ++n)
      if (d_empty)
        clear(d_writer[n].value, chunk.rows);
      else
        multiply_matrices<Real>(constant(chunk.writer[n].key_at_end), chunk.rows, constant(d_state), chunk.keys, chunk.values,
                                d_writer[n].value);
    if constexpr (kValuesFade)
      chunk.template fade_values<Chunk::Direction::kBackward>(d_read, seen_d_read, d_writer[0].with_query);
    else
      solve_back(in, first);
    // d_P_ts = d_out_t . m_s, d_A_ts = d_r_t . m_s, d_N_Cs = m_s G^T.
    for (int n = 0; n < kWriters; ++n) {
      const Tokens<Real> value = chunk.writer[n].value;
      if constexpr (!kValuesFade) multiply_tokens(d_read, value, d_writer[n].with_query);
      if constexpr (kRetrieves) multiply_tokens(constant(d_found), value, d_writer[n].with_reader);
      if (d_empty)
        clear(d_writer[n].key_at_end, chunk.rows);
      else
        multiply_rows(constant(value), d_state, chunk.rows, chunk.keys, chunk.values, d_writer[n].key_at_end);
    }
    differentiate_reads(empty);
    differentiate_keys(first, to);
    const Tokens<Real> d_value = chunk.output(to.v, first, chunk.values, padded_d_value);
    if constexpr (kValuesFade) {
      const Tokens<Real> d_value_fade = chunk.output(to.value_decay, first, chunk.values, padded_d_value_fade);
      const Side of_values{d_read, chunk.value_fade, chunk.read, {}, d_value_fade, d_total_of_value};
      const Faded written{chunk.error, d_writer[0].value, d_value, chunk.writer[0].with_query, {}};
      for_columns<Real, kNarrow>(chunk.values, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
        constexpr int NV = decltype(vectors)::value;
        differentiate_state<false, NV>(of_values, j);
        for (int64_t s = 0; s < chunk.rows; s += kTileRows) differentiate_writer<false, NV>(of_values, written, s, j);
      });
      chunk.deliver(padded_d_value_fade, chunk.values, to.value_decay, first);
    } else {  // d_b_t = d_m_t . e_t, d_v_t = b_t d_m_t
      for (int64_t t = 0; t < chunk.count; ++t) {
        const Real* d_written = d_writer[0].value[t];
        const Real rate = chunk.rate_at(in, first, t);
        if (to.rate.data) to.rate[first + t] = dot(d_written, chunk.error[t], chunk.values);
        for (int64_t j = 0; j < chunk.values; j += kLanes<Real>) store(d_value[t] + j, load(d_written + j) * rate);
      }
    }
    chunk.deliver(padded_d_value, chunk.values, to.v, first);
    if (needed) {  // G = c_C * G * Z_C + (q_t * c_t)^T (d_out_t * Z_t) + (y_t * c_{t-1})^T d_r_t
      const auto back = [&](Tokens<Real> x, Tokens<const Real> y) {
        return Factors<Real>{constant(x).reversed(chunk.rows), y.reversed(chunk.rows)};
      };
      const Factors<Real> reads = back(chunk.seen_query, kValuesFade ? constant(seen_d_read) : d_read);
      if constexpr (kRetrieves)
        chunk.change_rows(d_empty, std::array{reads, back(chunk.seen_reader, constant(d_found))}, d_state);
      else
        chunk.change_rows(d_empty, std::array{reads}, d_state);
    }
    d_empty = false;
  }

  // product[t][s] = x_t . y_s for the tokens s <= t, and some others.
  void multiply_tokens(Tokens<const Real> x, Tokens<Real> y, Tokens<Real> product) const {
    for (int64_t t = 0; t < chunk.rows; t += kTileRows)
      multiply_rows(from_row(x, t), y, kTileRows, t + kTileRows, chunk.values, from_row(product, t));
  }

  // The gradients of what tokens read in the state before the chunk, and of c_C and Z_C.
  void differentiate_reads(bool empty) {
    if (empty) {
      for (const Tokens<Real>& x : {d_seen_query, d_seen_reader}) clear(x, chunk.rows);
      clear(d_total, 1);
      if constexpr (kValuesFade) clear(chunk.read, chunk.rows), clear(d_total_of_value, 1);
      return;
    }
    transpose(chunk.state, chunk.keys, chunk.values, state_of_value);
    const Tokens<const Real> by_value = constant(state_of_value);
    const auto through_state = [&](Tokens<const Real> x, Tokens<Real> to) {
      multiply_matrices<Real>(x, chunk.rows, by_value, chunk.values, chunk.keys, to);
    };
    through_state(kValuesFade ? constant(seen_d_read) : d_read, d_seen_query);
    if constexpr (kRetrieves) through_state(constant(d_found), d_seen_reader);
    if constexpr (!kValuesFade) {  // d_c_C: the rows of W * G, summed
      for (int64_t i = 0; i < chunk.keys; i += kLanes<Real>) {
        Vector<Real> sum[kLanes<Real>];
        FWP_UNROLL for (int n = 0; n < kLanes<Real>; ++n) {
          sum[n] = Vector<Real>{};
          for (int64_t j = 0; j < chunk.values; j += kLanes<Real>)
            sum[n] += load_part(chunk.state[i + n] + j, chunk.values - j) * load_part(d_state[i + n] + j, chunk.values - j);
        }
        sum_lanes_of_each<Real>(sum);
        store(d_total[0] + i, sum[0]);
      }
    } else {  // d_c_C and d_Z_C: the rows of W * G * Z_C, and the columns of c_C * W * G
      multiply_matrices<Real>(constant(chunk.seen_query), chunk.rows, constant(chunk.state), chunk.keys, chunk.values,
                              chunk.read);
      clear(d_total_of_value, 1);
      for (int64_t i = 0; i < chunk.keys; ++i) {
        Vector<Real> sum = {};
        for (int64_t j = 0; j < chunk.values; j += kLanes<Real>) {
          const int64_t left = chunk.values - j;
          const Vector<Real> product = load_part(chunk.state[i] + j, left) * load_part(d_state[i] + j, left);
          sum += product * load_part(chunk.total_of_value[0] + j, left);
          Real* d_column = d_total_of_value[0] + j;
          store(d_column, load(d_column) + chunk.total[0][i] * product);
        }
        d_total[0][i] = sum_lanes<Real>(sum);
      }
    }
  }

  // The gradients of written values and of retrieved ones, from the last token back.
  void solve_back(const In& in, int64_t first) {
    for_columns<Real, kNarrow>(chunk.values, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      constexpr int64_t width = NV * kLanes<Real>;
      for (int64_t t = chunk.rows - kTileRows; t >= 0; t -= kTileRows) {
        Tile<Real, NV> d_value[kWriters];
        for (int n = 0; n < kWriters; ++n) {
          const Writer& w = chunk.writer[n];
          FWP_UNROLL for (int r = 0; r < kTileRows; ++r) d_value[n].row[r].load_from(d_writer[n].value[t + r] + j, width);
          d_value[n].add(t + kTileRows, chunk.rows, d_read.from(j),
                         [&](int64_t u, int r) __attribute__((always_inline)) { return w.with_query[u][t + r]; });
          if constexpr (kRetrieves)
            d_value[n].add(t + kTileRows, chunk.rows, constant(d_found, j),
                           [&](int64_t u, int r) __attribute__((always_inline)) { return w.with_reader[u][t + r]; });
        }
        FWP_UNROLL for (int r = kTileRows - 1; r >= 0; --r) {
          for (int n = 0; n < kWriters; ++n) {
            const Writer& w = chunk.writer[n];
            Group<Real, NV> later;
            for (int m = r; m < kTileRows; ++m) {
              later.load_from(d_read[t + m] + j, width);
              d_value[n].row[r].add(w.with_query[t + m][t + r], later);
            }
            if constexpr (kRetrieves)
              for (int m = r + 1; m < kTileRows; ++m) {
                later.load_from(d_found[t + m] + j, width);
                d_value[n].row[r].add(w.with_reader[t + m][t + r], later);
              }
            d_value[n].row[r].store_to(d_writer[n].value[t + r] + j, width);
          }
          if constexpr (kRetrieves) {  // d_r_t = -b_t d_m_t, of a removal -d_m_t of its own writer
            Group<Real, NV>& of_found = d_value[kWriters - 1].row[r];
            of_found.scale(kRemoves ? Real(-1) : -chunk.rate_at(in, first, t + r));
            if (t + r >= chunk.count) of_found.clear();
            of_found.store_to(d_found[t + r] + j, width);
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
    for (int64_t t = chunk.rows; t-- > s + kTileRows;) f(t, typename Chunk::Rows{});
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
    for (int64_t t = 0; t < chunk.rows; ++t) {
      so_far.store_to(faded_at[t], width);
      fade.load_from(side.fade[t] + i, width);
      multiply(so_far, fade);
    }
    gradient.load_from(side.d_total[0] + i, width);
    for (int64_t t = chunk.rows; t-- > 0;) {
      of_read.load_from(side.d_seen[t] + i, width);
      x.load_from(side.query[t] + i, width);
      FWP_UNROLL for (int n = 0; n < NV; ++n) gradient.x[n] += x.x[n] * of_read.x[n];
      if constexpr (kKeys) {
        multiply(of_read, so_far);
        of_read.store_to(side.d_query[t] + i, width);
      }
      so_far.load_from(faded_at[t], width);
      x = gradient;
      multiply(x, so_far);
      x.store_to(side.d_fade[t] + i, width);
      fade.load_from(side.fade[t] + i, width);
      multiply(gradient, fade);
      if constexpr (kKeys && kRetrieves) {
        of_read.load_from(d_seen_reader[t] + i, width);
        x.load_from(chunk.reader[t] + i, width);
        FWP_UNROLL for (int n = 0; n < NV; ++n) gradient.x[n] += x.x[n] * of_read.x[n];
        multiply(of_read, so_far);
        of_read.store_to(d_reader[t] + i, width);
      }
    }
  }

  // The same for N_ts: also the gradients of the four keys from s on.
  template <bool kKeys, int NV>
  FWP_INLINE void differentiate_writer(const Side& side, const Faded& w, int64_t s, int64_t i) {
    constexpr int64_t width = NV * kLanes<Real>;
    Group<Real, NV> faded[kTileRows], gradient[kTileRows];
    chunk.for_tokens_from(s, [&](int64_t t, auto earlier) __attribute__((always_inline)) {
      advance<decltype(earlier)::value>(w.x[t] + i, side.fade[t] + i, faded);
      FWP_UNROLL for (int m = 0; m < kTileRows; ++m)
        if (m <= decltype(earlier)::value) faded[m].store_to(faded_at[t] + m * width, width);
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
          x.load_from(faded_at[t] + m * width, width);
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
          own.load_from(chunk.reader[t] + i, width);
          d_own.load_from(d_reader[t] + i, width);
        }
        FWP_UNROLL for (int m = 0; m < before; ++m) {
          x.load_from(faded_at[t - 1] + m * width, width);
          FWP_UNROLL for (int n = 0; n < NV; ++n) d_fade.x[n] += gradient[m].x[n] * x.x[n];
          multiply(gradient[m], fade);
          if constexpr (kKeys && kRetrieves) {
            gradient[m].add(of_reader[m], own);
            d_own.add(of_reader[m], x);
          }
        }
        d_fade.store_to(side.d_fade[t] + i, width);
        if constexpr (kKeys && kRetrieves) d_own.store_to(d_reader[t] + i, width);
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
    d_query = chunk.output(to.q, first, chunk.keys, padded_d_query);
    d_fade = chunk.output(to.key_decay, first, chunk.keys, padded_d_fade);
    d_reader = kRemoves ? chunk.output(to.removal_key, first, chunk.keys, padded_d_reader) : padded_d_reader;
    d_writer[0].key = chunk.output(to.k, first, chunk.keys, d_writer[0].padded_key);
    if constexpr (kRemoves) d_writer[1].key = chunk.output(to.removal, first, chunk.keys, d_writer[1].padded_key);
    const Side of_keys{chunk.query, chunk.fade, d_seen_query, d_query, d_fade, d_total};
    for_columns<Real, kNarrow>(chunk.keys, [&](int64_t i, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      differentiate_state<true, NV>(of_keys, i);
      for (int n = 0; n < kWriters; ++n)
        for (int64_t s = 0; s < chunk.rows; s += kTileRows) {
          const WriterGradients& d = d_writer[n];
          differentiate_writer<true, NV>(of_keys, {chunk.writer[n].key, d.key_at_end, d.key, d.with_query, d.with_reader}, s, i);
        }
    });
    for (int64_t t = 0; t < chunk.count; ++t) {
      if constexpr (erases == Erases::kKey)  // y_t = a_t * k_t
        for (int64_t i = 0; i < chunk.keys; i += kLanes<Real>) {
          const Vector<Real> of_reader = load(d_reader[t] + i);
          store(d_writer[0].key[t] + i, load(d_writer[0].key[t] + i) + load(chunk.fade[t] + i) * of_reader);
          store(d_fade[t] + i, load(d_fade[t] + i) + load(chunk.writer[0].key[t] + i) * of_reader);
        }
      if (to.head_decay.data) to.head_decay[first + t] = sum_of(d_fade[t], chunk.keys);
    }
    chunk.deliver(padded_d_query, chunk.keys, to.q, first);
    chunk.deliver(padded_d_fade, chunk.keys, to.key_decay, first);
    chunk.deliver(d_writer[0].padded_key, chunk.keys, to.k, first);
    if constexpr (kRemoves) {
      chunk.deliver(d_writer[1].padded_key, chunk.keys, to.removal, first);
      chunk.deliver(padded_d_reader, chunk.keys, to.removal_key, first);
    }
  }
};

}  // namespace fwp
