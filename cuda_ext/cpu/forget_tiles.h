// Rules with a decay per head or, forward, per key on tokens in bfloat16, by products of tiles (amx.h). The chunks are those
// of forget_chunk.h, twice as long, and a chunk is solved by the inverse of one matrix (../rule.h has the symbols):
//
//     E = (I + A b)^-1 (V - c K W), A_ts = F_ts (k_t . k_s) for s < t      U = b E  (b V if nothing is erased)
//     out = c Q W + P U, P_ts = F_ts (q_t . k_s) for s <= t                W_C = c_C W + K^T (w U)
//
// Values are exact in bfloat16, and so are queries and keys, unless they fade by key before their products. All other
// factors are sums of two such numbers, of whose products only that of the lower parts is left out. So the error of W is
// below 1e-5, and that of out its own rounding. ../cpu.md derives the backward pass.
//
// Tokens are padded with zeros, and what a token must not see is multiplied by zero. So a number that is not finite would
// reach earlier tokens: from its token on, a chunk is left to ForgetChunk, and its whole backward pass. The first token of
// a chunk is, too: a decoding step has its bits.
#pragma once

#include "amx.h"
#include "forget_chunk_backward.h"
#include "forget_chunk_forward.h"

namespace fwp {

template <Fades fades, Erases erases>
class ForgetTiles {
 public:
  using Number = float;
  using Chunk = ForgetChunkForward<float, fades, erases>;
  using BackwardChunk = ForgetChunkBackward<float, Fades::kKey, erases>;
  using In = typename Chunk::In;
  using Gradients = typename BackwardChunk::Gradients;
  static constexpr int64_t kTokens = kProductSide;   // of a chunk
  static constexpr int64_t kColumns = kProductSide;  // of a panel of values
  static constexpr bool kErases = erases == Erases::kKey, kByKey = fades == Fades::kKey;
  static_assert(kTokens == kKeptEvery && erases != Erases::kRemoval);

  ForgetTiles(int64_t keys, int64_t values, float* scratch)
      : keys_(keys), values_(values), steps_(round_up(keys, kProductSide) / kProductSide) {
    for (Tokens<float>* x : {&state_, &gradient_, &next_gradient_})
      *x = take(scratch, steps_ * kProductSide, round_up(values, kColumns));
    for (Tokens<float>* x : {&first_out_, &first_error_}) *x = take(scratch, 1, round_up(values, kColumns));
    total_ = take(scratch, 1, steps_ * kProductSide);
    for (FactorTile** x : {&key_, &query_, &key_by_token_, &key_of_token_, &query_of_token_, &key_by_dim_, &query_by_dim_})
      *x = take_tiles(scratch, 2 * steps_);
    for (Parts* x : {&inverse_, &scores_, &left_, &rest_, &write_, &last_, &erased_, &by_column_})
      *x = take_parts(scratch, 2);
    of_state_ = take_parts(scratch, 2 * steps_);
    for (float** x : {&with_key_, &with_query_, &faded_, &solved_, &found_, &read_, &error_, &d_read_, &d_error_, &d_write_,
                      &d_with_key_, &d_with_query_, &turned_})
      *x = take_blocks(scratch, 1);
    for (float** x : {&from_read_, &from_found_, &from_write_}) *x = take_blocks(scratch, steps_);
    for_chunk_ = scratch;
  }

  static int64_t scratch_size(int64_t keys, int64_t values) {
    return numbers_taken(ForgetTiles(keys, values, nullptr).for_chunk_) +
           std::max((1 + kByKey) * Chunk::scratch_size(keys, values), BackwardChunk::scratch_size(keys, values));
  }

  // As ForgetChunkForward::forward.
  void forward(const TileUnit& unit, int64_t length, const In& in, Matrix<const float> initial, const Stored<float>& out,
               const Stored<float>& retrieved, Tokens<float> kept, Matrix<float> final) {
    unit_ = &unit, in_ = in, out_ = out, retrieved_ = retrieved, empty_ = !initial.data;
    unit.configure();
    copy_in(initial, state_);
    for (start_ = 0; start_ < length; start_ += kTokens, empty_ = false) {
      const int64_t count = std::min(kTokens, length - start_);
      run_chunk(count);
      if (!kept.data || count < kTokens) continue;
      copy_out(state_, {kept.data, kept.stride, 1});
      kept.data = kept[keys_];
    }
    copy_out(state_, final);
    unit.release();
  }

  // As ForgetChunkBackward::backward.
  void backward(const TileUnit& unit, int64_t length, const In& in, Matrix<const float> initial,
                Tokens<const float> retrieved, Tokens<const float> kept, const Stored<float>& d_out,
                Matrix<const float> d_final, const Gradients& to, Matrix<float> d_initial) {
    unit_ = &unit, in_ = in;
    unit.configure();
    copy_in(d_final, gradient_);
    for (start_ = (length - 1) / kTokens * kTokens; start_ >= 0; start_ -= kTokens) {
      const Matrix<const float> before =
          start_ ? Matrix<const float>{kept[(start_ / kTokens - 1) * keys_], kept.stride, 1} : initial;
      copy_in(before, state_);
      const int64_t count = std::min(kTokens, length - start_);
      const Tokens<const float> of_chunk = retrieved.data ? from_row(retrieved, start_) : retrieved;
      const Stored<float> d_read(d_out[start_], d_out.stride, d_out.half);
      const Gradients own = at(to, start_);
      if (differentiate(count, of_chunk, d_read, own)) {
        std::swap(gradient_, next_gradient_);
      } else {
        const Matrix<float> gradient{gradient_.data, gradient_.stride, 1};
        BackwardChunk(keys_, values_, for_chunk_)
            .backward(count, at(in_, start_), before, of_chunk, {}, d_read, {gradient.data, gradient.row_stride, 1}, own,
                      gradient);
      }
    }
    copy_out(gradient_, d_initial);
    unit.release();
  }

 private:
  struct Parts {
    FactorTile *high, *low;
  };
  using Row = Group<float, kTileSide / kLanes<float>>;      // of a tile
  using Line = Group<float, kProductSide / kLanes<float>>;  // of a block of 32 x 32 numbers
  static constexpr int64_t kTile = sizeof(FactorTile) / sizeof(float), kBlock = kProductSide * kProductSide;
  static constexpr int kVectors = kProductSide / kLanes<float>;  // of a line

  const int64_t keys_, values_, steps_;
  const TileUnit* unit_ = nullptr;
  In in_;
  Stored<float> out_, retrieved_;  // the second may be null
  int64_t start_ = 0;        // of the chunk
  bool empty_ = true;        // whether W is zero, before the first chunk
  bool finite_ = true;       // whether the factors of the chunk are
  Tokens<float> state_, gradient_, next_gradient_;  // W, the gradient of W' and that of W
  Tokens<float> first_out_, first_error_, total_;   // the first token's results; by key: c_C
  FactorTile *key_, *query_, *key_by_token_;            // K and Q as left factors, K^T as a right one
  FactorTile *key_of_token_, *query_of_token_;          // K^T and Q^T on the left
  FactorTile *key_by_dim_, *query_by_dim_;              // K and Q on the right
  Parts inverse_, scores_;                              // (I + A b)^-1 and P, on the left; their transposes on the way back
  Parts of_state_, rest_, write_, last_;                // a panel of W, V - c K W, U, w U, on the right
  Parts left_, erased_, by_column_;                     // only on the way back
  float *with_key_, *with_query_, *faded_, *solved_;    // K K^T, Q K^T, F, (I + A b)^-1
  float *found_, *read_, *error_;                       // K W; Q W, later out; E
  float *d_read_, *d_error_, *d_write_, *d_with_key_, *d_with_query_, *turned_;
  float *from_read_, *from_found_, *from_write_;        // blocks of d_out W^T, d_E W^T and U G'^T
  float so_far_[kTokens], weight_[kTokens], rate_[kTokens];  // c_t, w_t, b_t
  float* for_chunk_;

  static float* take_blocks(float*& scratch, int64_t count) { return std::exchange(scratch, address(scratch, count * kBlock)); }
  static FactorTile* take_tiles(float*& scratch, int64_t count) {
    return reinterpret_cast<FactorTile*>(std::exchange(scratch, address(scratch, count * kTile)));
  }
  static Parts take_parts(float*& scratch, int64_t count) {
    return {take_tiles(scratch, count), take_tiles(scratch, count)};
  }
  void copy_in(Matrix<const float> from, Tokens<float> to) const {
    std::memset(to.data, 0, steps_ * kProductSide * to.stride * sizeof(float));
    if (from.data) copy_matrix(from, keys_, values_, Matrix<float>{to.data, to.stride, 1});
  }
  void copy_out(Tokens<float> from, Matrix<float> to) const {
    if (to.data) copy_matrix({from.data, from.stride, 1}, keys_, values_, to);
  }
  int64_t columns_from(int64_t j) const { return std::min(kColumns, values_ - j); }

  // Tokens, or gradients of tokens, from t on.
  template <typename X>
  static X at(X x, int64_t t) {
    for (Stored<float>* y : {&x.q, &x.k, &x.v, &x.key_decay}) y->data = y->data ? y->data + t * y->stride : nullptr;
    for (auto* y : {&x.head_decay, &x.rate}) y->data = y->data ? y->data + t * y->stride : nullptr;
    return x;
  }
  // Tokens from t on by ForgetChunk, on some columns, from the state before them. It changes the state if `changes`.
  void run_without_tiles(int64_t t, int64_t length, int64_t column, int64_t columns, bool changes,
                         const Stored<float>& out, const Stored<float>& retrieved) {
    const Matrix<float> state{state_.data + column, state_.stride, 1};
    const Matrix<const float> before{empty_ && t == start_ ? nullptr : state.data, state.row_stride, 1};
    In in = at(in_, t);
    in.v = in.v.from(column);
    Chunk(keys_, columns, for_chunk_)
        .forward(length, in, before, out, retrieved, {}, changes ? state : Matrix<float>{});
  }
  static Stored<float> from(const Stored<float>& x, int64_t t, int64_t column) {
    return Stored<float>(x.data ? x[t] : nullptr, x.stride, x.half).from(column);
  }

  void run_chunk(int64_t count) {
    if (count == 1)
      return run_without_tiles(start_, 1, 0, values_, true, from(out_, start_, 0), from(retrieved_, start_, 0));
    run_without_tiles(start_, 1, 0, values_, false, first_out_, first_error_);
    prepare(count);
    for (int64_t j = 0; j < values_; j += kColumns)
      if (compute(j, count))
        commit(j, count);
      else
        repair(j, count);
  }

  // A panel whose results are not finite: by tiles up to the token that makes them so, which changes none of their bits.
  void repair(int64_t j, int64_t count) {
    const auto try_tokens = [&](int64_t tokens) { return prepare(tokens), compute(j, tokens); };
    int64_t good = 0, bad = count;
    while (bad - good > 1) {
      const int64_t tokens = (good + bad) / 2;
      (try_tokens(tokens) ? good : bad) = tokens;
    }
    if (good) try_tokens(good), commit(j, good);
    const int64_t t = start_ + good;
    run_without_tiles(t, count - good, j, columns_from(j), true, from(out_, t, j), from(retrieved_, t, j));
    prepare(count);
  }

  static FWP_INLINE Line line(const float* x) {
    Line line;
    line.load_from(x, kProductSide);
    return line;
  }
  static FWP_INLINE Row row(const float* x) {
    Row row;
    row.load_from(x, kTileSide);
    return row;
  }
  static FWP_INLINE Words rounded(const Vector<float>& x) { return (same_bits<Words>(x) + 0x8000) & 0xffff0000; }
  // The parts of 16 pairs of numbers, rounded to the nearest; a half away from zero. bad: NaN from then on if one is not
  // finite, of which nothing else may be left.
  static FWP_INLINE void split(const Row& x, const Row& y, uint32_t* high, uint32_t* low, Vector<float>& bad) {
    FWP_UNROLL for (int n = 0; n < kTileSide / kLanes<float>; ++n) {
      const Words of_x = rounded(x.x[n]), of_y = rounded(y.x[n]);
      const Words low_x = rounded(x.x[n] - same_bits<Vector<float>>(of_x));
      const Words low_y = rounded(y.x[n] - same_bits<Vector<float>>(of_y));
      bad += (x.x[n] + y.x[n]) * 0.0f;
      store(high + n * kLanes<float>, (of_x >> 16) | of_y);
      store(low + n * kLanes<float>, (low_x >> 16) | low_y);
    }
  }
  // A block as a left factor, whose pairs are columns n and n + 16; as a right one, whose pairs are rows n and n + 16.
  static FWP_INLINE void split_line(const Line& x, int64_t t, const Parts& to, Vector<float>& bad, int64_t steps = 1) {
    Row first, second;
    FWP_UNROLL for (int n = 0; n < kVectors / 2; ++n) first.x[n] = x.x[n], second.x[n] = x.x[n + kVectors / 2];
    const int64_t tile = t / kTileSide * steps, pair = t % kTileSide;
    split(first, second, to.high[tile].pairs[pair], to.low[tile].pairs[pair], bad);
  }
  static void split_left(const float* block, int64_t stride, const Parts& to, Vector<float>& bad, int64_t steps = 1) {
    for (int64_t t = 0; t < kProductSide; ++t) split_line(line(block + t * stride), t, to, bad, steps);
  }
  static void split_right(const float* block, const Parts& to, Vector<float>& bad) {
    for (int64_t t = 0; t < kTileSide; ++t)
      FWP_UNROLL for (int tile = 0; tile < 2; ++tile) {
        const float* const x = block + t * kProductSide + tile * kTileSide;
        split(row(x), row(x + kTileSide * kProductSide), to.high[tile].pairs[t], to.low[tile].pairs[t], bad);
      }
  }
  // A panel of columns of a state on the right, whose pairs are neighboring rows, or with decays by key rows n and n + 16.
  void split_state(Tokens<float> state, int64_t j, const Parts& to, Vector<float>& bad) const {
    for (int64_t i = 0; i < steps_ * kTileSide; ++i)
      FWP_UNROLL for (int tile = 0; tile < 2; ++tile) {
        const int64_t n = tile * steps_ + i / kTileSide, column = j + tile * kTileSide;
        const int64_t first = kByKey ? i + i / kTileSide * kTileSide : 2 * i, second = first + (kByKey ? kTileSide : 1);
        split(row(state[first] + column), row(state[second] + column), to.high[n].pairs[i % kTileSide],
              to.low[n].pairs[i % kTileSide], bad);
      }
  }
  // Exchange rows with pairs: the transpose of a left factor, on the right.
  static void turn(FactorTile* x, int64_t tiles, FactorTile* to) {
    const auto rows = [](FactorTile& x) { return Tokens<float>{reinterpret_cast<float*>(x.pairs), kTileSide}; };
    for (int64_t n = 0; n < tiles; ++n) transpose(rows(x[n]), kTileSide, kTileSide, rows(to[n]));
  }
  static void turn(const Parts& x, int64_t tiles, const Parts& to) {
    turn(x.high, tiles, to.high), turn(x.low, tiles, to.low);
  }

  // Exact or in parts, times parts.
  void multiply(const FactorTile* left, const Parts& right, int64_t steps, float* sums) const {
    const TileFactors factors[] = {{left, right.low}, {left, right.high}};
    unit_->multiply(factors, 2, steps, sums);
  }
  void multiply(const Parts& left, const FactorTile* right, int64_t steps, float* sums) const {
    const TileFactors factors[] = {{left.low, right}, {left.high, right}};
    unit_->multiply(factors, 2, steps, sums);
  }
  void multiply(const Parts& left, const Parts& right, int64_t steps, float* sums) const {
    const TileFactors factors[] = {{left.low, right.high}, {left.high, right.low}, {left.high, right.high}};
    unit_->multiply(factors, 3, steps, sums);
  }

  // Everything that needs queries, keys, decays and rates only, of the first tokens of the chunk.
  void prepare(int64_t count) {
    if constexpr (kByKey) return prepare_by_key(count);
    copy_tokens(in_.q, count, query_);
    copy_tokens(in_.k, count, key_);
    turn(key_, 2 * steps_, key_by_token_);
    pair_tokens(key_by_token_, key_of_token_);
    const TileFactors of_query[] = {{query_, key_by_token_}}, of_key[] = {{key_, key_by_token_}};
    unit_->multiply(of_query, 1, steps_, with_query_);
    if constexpr (kErases) unit_->multiply(of_key, 1, steps_, with_key_);
    fade(count, Vector<float>{});
  }

  // Some dimensions of a left factor in parts.
  static Parts of_block(const Parts& x, int64_t tiles) { return {x.high + tiles, x.low + tiles}; }

  // The same for decays by key: scores of ForgetChunk, queries and keys after the decays before them, and keys after those that
  // follow. None is exact, and their memory is that of exact ones, and of the backward pass.
  void prepare_by_key(int64_t count) {
    const int64_t halves = count > kChunkTokens ? 2 : 1;
    Chunk half[] = {{keys_, values_, for_chunk_}, {keys_, values_, for_chunk_ + Chunk::scratch_size(keys_, values_)}};
    for (float* x : {with_query_, with_key_}) std::memset(x, 0, kBlock * sizeof(float));
    for (float* x : {from_read_, from_found_, from_write_}) std::memset(x, 0, steps_ * kBlock * sizeof(float));
    for (int64_t h = 0; h < halves; ++h) half[h].begin(count - h * kChunkTokens), half[h].prepare(in_, start_ + h * kChunkTokens);
    const float* const total[] = {half[0].total_[0], halves == 2 ? half[1].total_[0] : nullptr};
    for (int64_t i = 0; i < steps_ * kProductSide; ++i)
      total_[0][i] = i < keys_ ? total[0][i] * (total[1] ? total[1][i] : 1) : 1;
    for (int64_t h = 0; h < halves; ++h) {
      const auto& writer = half[h].writer_[0];
      const int64_t first = h * kChunkTokens;
      const auto put = [&](Tokens<float> x, const float* factor, float* blocks) {
        for (int64_t t = 0; t < half[h].count_; ++t)
          for (int64_t i = 0; i < keys_; ++i)
            blocks[i / kProductSide * kBlock + (first + t) * kProductSide + i % kProductSide] =
                x[t][i] * (factor ? factor[i] : 1);
      };
      const auto put_scores = [&](Tokens<float> seen, Tokens<float> scores, int64_t own, float* block) {
        const Tokens<float> to{block + first * kTokens, kTokens};
        if (h) multiply_rows(constant(seen), half[0].writer_[0].last, half[1].rows_, kChunkTokens, keys_, to);
        for (int64_t t = 0; t < half[h].count_; ++t) std::memcpy(to[t] + first, scores[t], (t + own) * sizeof(float));
      };
      put_scores(half[h].seen_query_, writer.with_query, 1, with_query_);
      if constexpr (kErases) put_scores(half[h].seen_reader_, writer.with_reader, 0, with_key_);
      put(half[h].seen_query_, h ? total[0] : nullptr, from_read_);
      if constexpr (kErases) put(half[h].seen_reader_, h ? total[0] : nullptr, from_found_);
      put(writer.last, h ? nullptr : total[1], from_write_);
    }
    Vector<float> bad = {};
    for (int64_t i = 0; i < steps_; ++i) {
      split_left(from_read_ + i * kBlock, kProductSide, of_block(seen_query(), i), bad, steps_);
      if constexpr (kErases) split_left(from_found_ + i * kBlock, kProductSide, of_block(seen_key(), i), bad, steps_);
      split_right(from_write_ + i * kBlock, rest_, bad);
      turn(rest_, 2, of_block(last_key(), 2 * i));
    }
    fade(count, bad);
  }
  Parts seen_query() const { return {query_, query_by_dim_}; }
  Parts seen_key() const { return {key_, key_by_dim_}; }
  Parts last_key() const { return {key_of_token_, query_of_token_}; }

  // The chunk's queries or keys as a left factor.
  void copy_tokens(const Stored<float>& x, int64_t count, FactorTile* to) const {
    std::memset(to, 0, 2 * steps_ * sizeof(FactorTile));
    for (int64_t t = 0; t < count; ++t)
      for (int64_t i = 0; i < steps_; ++i)
        std::memcpy(to[t / kTileSide * steps_ + i].pairs[t % kTileSide], x.halves(start_ + t) + i * kProductSide,
                    std::min(kProductSide, keys_ - i * kProductSide) * sizeof(BFloat16));
  }
  // A left factor with a row for each dimension, whose pairs are tokens n and n + 16.
  void pair_tokens(const FactorTile* by_token, FactorTile* to) const {
    for (int64_t i = 0; i < steps_; ++i)
      for (int pair = 0; pair < kTileSide; ++pair) {
        const uint32_t *x = by_token[i].pairs[pair], *y = by_token[steps_ + i].pairs[pair];
        uint32_t* const row = to[2 * i + pair / (kTileSide / 2)].pairs[2 * pair % kTileSide];
        for (int n = 0; n < kTileSide; ++n) row[n] = (x[n] & 0xffff) | y[n] << 16;
        for (int n = 0; n < kTileSide; ++n) row[kTileSide + n] = x[n] >> 16 | (y[n] & 0xffff0000);
      }
  }

  // F, P, (I + A b)^-1 and products of decays. Scores with decays by key have them.
  void fade(int64_t count, Vector<float> bad) {
    float index[kTokens], product = 1;
    for (int64_t t = 0; t < kTokens; ++t) index[t] = t, rate_[t] = t < count ? in_.rate_at(start_ + t) : 0;
    const Line place = line(index), rate = line(rate_);
    Line faded, own;
    faded.clear();
    for (int64_t t = 0; t < kTokens; ++t) {
      const float decay = !kByKey && t < count ? in_.head_decay[start_ + t] : 1;
      so_far_[t] = product *= decay;
      faded.scale(decay);
      if constexpr (kErases) {
        own = line(with_key_ + t * kTokens);
        FWP_UNROLL for (int n = 0; n < kVectors; ++n) own.x[n] *= faded.x[n] * rate.x[n];
        invert_row(own, t, bad);
      }
      own = line(with_query_ + t * kTokens);
      FWP_UNROLL for (int n = 0; n < kVectors; ++n) {
        faded.x[n] = place.x[n] == float(t) ? Vector<float>{} + 1.0f : faded.x[n];
        own.x[n] *= faded.x[n];
      }
      faded.store_to(faded_ + t * kTokens, kTokens);
      split_line(own, t, scores_, bad);
    }
    faded.store_to(weight_, kTokens);
    finite_ = sum_lanes<float>(bad) == 0;
  }

  // Row t of (I + A b)^-1, from that of A b and the rows before it.
  FWP_INLINE void invert_row(const Line& x, int64_t t, Vector<float>& bad) {
    float factor[kTokens];
    x.store_to(factor, kTokens);
    Line even, odd;  // one sum would wait for each of its terms
    even.clear(), odd.clear();
    for (int64_t s = 0; s < t; s += 2) {
      even.subtract(factor[s], line(solved_ + s * kTokens));
      if (s + 1 < t) odd.subtract(factor[s + 1], line(solved_ + (s + 1) * kTokens));
    }
    even.add(odd);
    float* const to = solved_ + t * kTokens;
    even.store_to(to, kTokens);
    to[t] = 1;
    split_line(line(to), t, inverse_, bad);
  }

  // Some tokens' values or gradients of outputs, zero-padded to a block.
  static void read_block(const Stored<float>& x, int64_t first, int64_t count, int64_t columns, float* to) {
    if (columns < kColumns || count < kTokens) std::memset(to, 0, kBlock * sizeof(float));
    for (int64_t t = 0; t < count; ++t) x.read_to(to + t * kColumns, first + t, columns);
  }
  // to = factor[t] * x, line by line.
  static void scale(const float* factor, const float* x, float* to) {
    for (int64_t t = 0; t < kTokens; ++t) {
      Line y = line(x + t * kProductSide);
      y.scale(factor[t]);
      y.store_to(to + t * kProductSide, kProductSide);
    }
  }
  // to += factor[t] * x, line by line.
  static void add(const float* factor, const float* x, float* to) {
    for (int64_t t = 0; t < kTokens; ++t) {
      Line y = line(to + t * kProductSide);
      y.add(factor[t], line(x + t * kProductSide));
      y.store_to(to + t * kProductSide, kProductSide);
    }
  }

  // The results of a panel of columns, but for the new state. Returns whether they are finite.
  bool compute(int64_t j, int64_t count) {
    Vector<float> bad = {};
    split_state(state_, j, of_state_, bad);
    if constexpr (kByKey)
      multiply(seen_query(), of_state_, steps_, read_);
    else
      multiply(query_, of_state_, steps_, read_);
    read_block(in_.v.from(j), start_, count, columns_from(j), error_);
    if constexpr (kErases) {
      if constexpr (kByKey)
        multiply(seen_key(), of_state_, steps_, found_);
      else
        multiply(key_, of_state_, steps_, found_);
      for (int64_t t = 0; t < count; ++t) {
        Line rest = line(error_ + t * kColumns);
        rest.subtract(so_far_[t], line(found_ + t * kColumns));
        rest.store_to(error_ + t * kColumns, kColumns);
      }
      split_right(error_, rest_, bad);
      multiply(inverse_, rest_, 1, error_);
    }
    scale(rate_, error_, found_);
    split_right(found_, write_, bad);
    scale(weight_, found_, found_);
    split_right(found_, last_, bad);
    multiply(scores_, write_, 1, found_);
    for (int64_t t = 0; t < kTokens; ++t) {
      Line read = line(found_ + t * kColumns);
      read.add(so_far_[t], line(read_ + t * kColumns));
      FWP_UNROLL for (int n = 0; n < kVectors; ++n) bad += read.x[n] * 0.0f;
      read.store_to(read_ + t * kColumns, kColumns);
    }
    return finite_ && sum_lanes<float>(bad) == 0;
  }

  // Deliver what compute() has found, and change the state.
  void commit(int64_t j, int64_t count) {
    const Stored<float> out = out_.from(j), retrieved = retrieved_.from(j);
    for (int64_t t = 0; t < count; ++t) {
      out.write_from(t ? read_ + t * kColumns : first_out_[0] + j, start_ + t, columns_from(j));
      if (kErases && retrieved.data)
        retrieved.write_from(t ? error_ + t * kColumns : first_error_[0] + j, start_ + t, columns_from(j));
    }
    for (int64_t i = 0; i < steps_; ++i) {
      if constexpr (kByKey)
        multiply(of_block(last_key(), 2 * i), last_, 1, found_);
      else
        multiply(key_of_token_ + 2 * i, last_, 1, found_);
      change_state(i, j, state_, state_);
    }
  }
  // The rows of block i of a state: c_C times those before, and the block found_.
  void change_state(int64_t i, int64_t j, Tokens<float> before, Tokens<float> after) const {
    for (int64_t r = 0; r < kProductSide; ++r) {
      Line x = line(found_ + r * kColumns);
      x.add(kByKey ? total_[0][i * kProductSide + r] : so_far_[kTokens - 1], line(before[i * kProductSide + r] + j));
      x.store_to(after[i * kProductSide + r] + j, kColumns);
    }
  }

  static float dot(const float* x, const float* y) {
    Vector<float> sum = {};
    for (int64_t n = 0; n < kProductSide; n += kLanes<float>) sum += fwp::load(x + n) * fwp::load(y + n);
    return sum_lanes<float>(sum);
  }
  // own[t][s] = x[t][s] F_ts, for s <= t or, if `strict`, s < t.
  void fade_block(const float* x, bool strict, float* own) const {
    for (int64_t t = 0; t < kTokens; ++t) {
      Line y = line(x + t * kTokens);
      FWP_UNROLL for (int n = 0; n < kVectors; ++n) y.x[n] *= fwp::load(faded_ + t * kTokens + n * kLanes<float>);
      y.store_to(own + t * kTokens, kTokens);
      if (strict) own[t * kTokens + t] = 0;
    }
  }
  static void turn_block(float* x, float* to) {
    transpose(Tokens<float>{x, kProductSide}, kProductSide, kProductSide, Tokens<float>{to, kProductSide});
  }

  // to = the block found_, of some dimensions from i on.
  void write_block(const Stored<float>& to, int64_t i, int64_t count, Vector<float>& bad) const {
    const Stored<float> columns = to.from(i * kProductSide);
    for (int64_t t = 0; t < count; ++t) {
      const Line x = line(found_ + t * kProductSide);
      FWP_UNROLL for (int n = 0; n < kVectors; ++n) bad += x.x[n] * 0.0f;
      columns.write_from(found_ + t * kProductSide, t, std::min(kProductSide, keys_ - i * kProductSide));
    }
  }

  // The gradients of the chunk's tokens, and that of the state before it, in next_gradient_. Returns whether they are
  // finite.
  bool differentiate(int64_t count, Tokens<const float> retrieved, const Stored<float>& d_out, const Gradients& to) {
    Vector<float> bad = {};
    prepare(count);
    turn(query_, 2 * steps_, query_by_dim_);
    pair_tokens(query_by_dim_, query_of_token_);
    turn(query_of_token_, 2 * steps_, query_by_dim_);
    turn(key_of_token_, 2 * steps_, key_by_dim_);
    const auto split_turned = [&](float* block, const Parts& to) {
      turn_block(block, turned_);
      split_left(turned_, kProductSide, to, bad);
    };
    fade_block(with_query_, false, found_);
    split_turned(found_, scores_);
    if constexpr (kErases) {
      fade_block(with_key_, true, found_);
      split_turned(found_, left_);
      split_turned(solved_, inverse_);
    }
    for (float* x : {d_with_query_, d_with_key_}) std::memset(x, 0, kBlock * sizeof(float));
    for (float* x : {from_read_, from_found_, from_write_}) std::memset(x, 0, steps_ * kBlock * sizeof(float));
    float one[kTokens], minus_one[kTokens], minus_so_far[kTokens], d_rate[kTokens] = {}, of_total = 0;
    for (int64_t t = 0; t < kTokens; ++t) one[t] = 1, minus_one[t] = -1, minus_so_far[t] = -so_far_[t];
    for (int64_t j = 0; j < values_; j += kColumns) {
      split_state(gradient_, j, of_state_, bad);
      multiply(key_, of_state_, steps_, d_write_);
      scale(weight_, d_write_, d_write_);
      read_block(d_out.from(j), 0, count, columns_from(j), d_read_);
      split_right(d_read_, rest_, bad);
      multiply(scores_, rest_.high, 1, found_);
      add(one, found_, d_write_);
      if constexpr (kErases) {
        read_block(retrieved.from(j), 0, count, columns_from(j), error_);
        scale(rate_, d_write_, found_);
        split_right(found_, rest_, bad);
        multiply(inverse_, rest_, 1, d_error_);
        split_right(d_error_, rest_, bad);
        multiply(left_, rest_, 1, found_);
        add(minus_one, found_, d_write_);
      } else {
        read_block(in_.v.from(j), start_, count, columns_from(j), error_);
        scale(rate_, d_write_, d_error_);
      }
      for (int64_t t = 0; t < count; ++t) {
        d_rate[t] += dot(d_write_ + t * kColumns, error_ + t * kColumns);
        to.v.from(j).write_from(d_error_ + t * kColumns, t, columns_from(j));
      }
      scale(rate_, error_, found_);
      split_left(found_, kColumns, write_, bad);
      turn(write_, 2, last_);
      split_left(d_read_, kColumns, rest_, bad);
      multiply(rest_.high, last_, 1, found_);
      add(one, found_, d_with_query_);
      if constexpr (kErases) {
        split_left(d_error_, kColumns, erased_, bad);
        multiply(erased_, last_, 1, found_);
        add(minus_one, found_, d_with_key_);
      }
      for (int64_t i = 0; i < steps_; ++i) {
        const float *state = state_[i * kProductSide] + j, *gradient = gradient_[i * kProductSide] + j;
        split_left(state, state_.stride, of_state_, bad);
        turn(of_state_, 2, by_column_);
        multiply(rest_.high, by_column_, 1, found_);
        add(one, found_, from_read_ + i * kBlock);
        if constexpr (kErases) {
          multiply(erased_, by_column_, 1, found_);
          add(one, found_, from_found_ + i * kBlock);
        }
        split_left(gradient, gradient_.stride, of_state_, bad);
        turn(of_state_, 2, by_column_);
        multiply(write_, by_column_, 1, found_);
        add(one, found_, from_write_ + i * kBlock);
        for (int64_t r = 0; r < kProductSide; ++r)
          of_total += dot(state + r * state_.stride, gradient + r * gradient_.stride);
      }
      scale(so_far_, d_read_, found_);
      split_right(found_, rest_, bad);
      scale(minus_so_far, d_error_, found_);
      split_right(found_, last_, bad);
      for (int64_t i = 0; i < steps_; ++i) {
        const FactorTile *query = query_of_token_ + 2 * i, *key = key_of_token_ + 2 * i;
        const TileFactors factors[] = {{query, rest_.low}, {query, rest_.high}, {key, last_.low}, {key, last_.high}};
        unit_->multiply(factors, kErases ? 4 : 2, 1, found_);
        change_state(i, j, gradient_, next_gradient_);
      }
    }
    float d_so_far[kTokens] = {}, d_weight[kTokens] = {};
    fade_block(d_with_query_, false, read_);
    split_left(read_, kTokens, left_, bad);
    for (int64_t i = 0; i < steps_; ++i) {
      read_block(in_.q.from(i * kProductSide), start_, count, std::min(kProductSide, keys_ - i * kProductSide), error_);
      for (int64_t t = 0; t < count; ++t)
        d_so_far[t] += dot(error_ + t * kProductSide, from_read_ + i * kBlock + t * kProductSide);
      multiply(left_, key_by_dim_ + 2 * i, 1, found_);
      add(so_far_, from_read_ + i * kBlock, found_);
      write_block(to.q, i, count, bad);
    }
    split_turned(read_, left_);
    if constexpr (kErases) {
      fade_block(d_with_key_, true, read_);
      turn_block(read_, turned_);
      add(one, turned_, read_);
      split_left(read_, kTokens, erased_, bad);
    }
    for (int64_t i = 0; i < steps_; ++i) {
      read_block(in_.k.from(i * kProductSide), start_, count, std::min(kProductSide, keys_ - i * kProductSide), error_);
      for (int64_t t = 0; t < count; ++t) {
        const int64_t at = i * kBlock + t * kProductSide;
        d_so_far[t] -= dot(error_ + t * kProductSide, from_found_ + at);
        d_weight[t] += dot(error_ + t * kProductSide, from_write_ + at);
      }
      const FactorTile *query = query_by_dim_ + 2 * i, *key = key_by_dim_ + 2 * i;
      const TileFactors factors[] = {{left_.low, query}, {left_.high, query}, {erased_.low, key}, {erased_.high, key}};
      unit_->multiply(factors, kErases ? 4 : 2, 1, found_);
      add(weight_, from_write_ + i * kBlock, found_);
      add(minus_so_far, from_found_ + i * kBlock, found_);
      write_block(to.k, i, count, bad);
    }
    return differentiate_decays(count, d_so_far, d_weight, of_total, d_rate, to) && finite_ && sum_lanes<float>(bad) == 0;
  }

  // From the gradients of F_ts, c_t, w_s and c_C. Each is passed on to the decays from the last one back. Returns whether
  // those of decays and rates are finite.
  bool differentiate_decays(int64_t count, const float* d_so_far, const float* d_weight, float of_start,
                            const float* d_rate, const Gradients& to) const {
    Line of_key = line(d_weight);
    float bad = 0;
    for (int64_t t = kTokens - 1; t >= 0; --t) {
      Vector<float> sum = {};
      FWP_UNROLL for (int n = 0; n < kVectors; ++n) {
        const int64_t at = t * kTokens + n * kLanes<float>;
        of_key.x[n] += fwp::load(d_with_query_ + at) * fwp::load(with_query_ + at);
        if constexpr (kErases) of_key.x[n] += fwp::load(d_with_key_ + at) * fwp::load(with_key_ + at);
        if (t) sum += of_key.x[n] * fwp::load(faded_ + at - kTokens);
      }
      of_start += d_so_far[t];
      const float d_decay = sum_lanes<float>(sum) + of_start * (t ? so_far_[t - 1] : 1);
      if (t >= count) continue;
      if (to.head_decay.data) to.head_decay[t] = d_decay;
      if (to.rate.data) to.rate[t] = d_rate[t];
      bad += 0 * (d_decay + d_rate[t]);
      of_key.scale(in_.head_decay[start_ + t]);
      of_start *= in_.head_decay[start_ + t];
    }
    return bad == 0;
  }
};

}  // namespace fwp
