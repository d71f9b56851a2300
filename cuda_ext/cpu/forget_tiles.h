// Rules with a decay per head or per key on tokens in bfloat16, by products of tiles (amx.h). The chunks are those
// of forget_chunk.h, twice as long, and a chunk is solved by the inverse of one matrix (../rule.h has the symbols):
//
//     E = (I + A b)^-1 (V - c K W), A_ts = F_ts (k_t . k_s) for s < t      U = b E  (b V if nothing is erased)
//     out = c Q W + P U, P_ts = F_ts (q_t . k_s) for s <= t                W_C = c_C W + K^T (w U)
//
// Values are exact in bfloat16, and so are queries and keys, unless they fade by key before their products. All other
// factors are sums of two such numbers. With a decay per head, the product of two lower parts is left out; with one per key,
// more factors are rounded, and it takes part. So the error of W is below 1e-5, and that of out its own rounding. ../cpu.md
// derives the backward pass.
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
    for (Tokens<float>* x : {&total_, &d_total_}) *x = take(scratch, 1, steps_ * kProductSide);
    if constexpr (kByKey)
      for (Parts* x : {&query_, &key_, &last_key_}) *x = take_parts(scratch, 2 * steps_);
    else
      for (FactorTile** x : {&query_, &key_, &last_key_, &key_by_token_, &query_of_token_, &key_by_dim_, &query_by_dim_})
        *x = take_tiles(scratch, 2 * steps_);
    for (Parts* x : {&inverse_, &scores_, &left_, &rest_, &write_, &last_, &erased_, &by_column_})
      *x = take_parts(scratch, 2);
    of_state_ = take_parts(scratch, 2 * steps_);
    for (float** x : {&with_key_, &with_query_, &faded_, &solved_, &product_, &read_, &error_, &d_read_, &d_error_, &d_found_,
                      &d_write_, &d_with_key_, &d_with_query_, &turned_})
      *x = take_blocks(scratch, 1);
    for (float** x : {&from_read_, &from_found_, &from_write_}) *x = take_blocks(scratch, steps_);
    for_chunk_ = scratch;
  }

  static int64_t scratch_size(int64_t keys, int64_t values) {
    return numbers_taken(ForgetTiles(keys, values, nullptr).for_chunk_) +
           std::max({Chunk::scratch_size(keys, values), BackwardChunk::scratch_size(keys, values), 2 * half_size(keys)});
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
      before_ = constant(state_);
      if (is_whole() && before.data && before.column_stride == 1)
        before_ = {before.data, before.row_stride};
      else
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
  using Left = std::conditional_t<kByKey, Parts, FactorTile*>;  // of tokens: exact, or in parts
  using Halves = std::array<BackwardChunk, 2>;              // of a chunk with decays by key, without values
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
  Tokens<const float> before_;                      // on the way back: W, where it is kept
  Tokens<float> first_out_, first_error_;           // the first token's results
  Tokens<float> total_, d_total_;                   // by key: c_C and its gradient, by head in the first number
  Left query_, key_, last_key_;                         // Q, K and K^T on the left; by key, of c Q, c K and w K
  FactorTile *key_by_token_, *query_of_token_;          // by head: K^T on the right, Q^T on the left
  FactorTile *key_by_dim_, *query_by_dim_;              // by head: K and Q on the right
  Parts inverse_, scores_;                              // (I + A b)^-1 and P, on the left; their transposes on the way back
  Parts of_state_, rest_, write_, last_;                // a panel of W, V - c K W, U, w U, on the right
  Parts left_, erased_, by_column_;                     // only on the way back
  float *with_key_, *with_query_, *faded_, *solved_;    // K K^T, Q K^T, F, (I + A b)^-1
  float *product_, *read_, *error_;                     // of the last factors; Q W, later out; E
  float *d_read_, *d_error_, *d_found_, *d_write_, *d_with_key_, *d_with_query_, *turned_;
  float *from_read_, *from_found_, *from_write_;        // blocks of d_out W^T, -d_E W^T and U G'^T
  float so_far_[kTokens], weight_[kTokens], rate_[kTokens];  // c_t, w_t, b_t
  float d_so_far_[kTokens], d_weight_[kTokens], d_rate_[kTokens];
  float* for_chunk_;

  static float* take_blocks(float*& scratch, int64_t count) { return std::exchange(scratch, address(scratch, count * kBlock)); }
  static FactorTile* take_tiles(float*& scratch, int64_t count) {
    return reinterpret_cast<FactorTile*>(std::exchange(scratch, address(scratch, count * kTile)));
  }
  static Parts take_parts(float*& scratch, int64_t count) {
    return {take_tiles(scratch, count), take_tiles(scratch, count)};
  }
  // Whether a state has no padding.
  bool is_whole() const { return keys_ % kProductSide == 0 && values_ % kColumns == 0; }
  void copy_in(Matrix<const float> from, Tokens<float> to) const {
    if (!from.data || !is_whole()) std::memset(to.data, 0, steps_ * kProductSide * to.stride * sizeof(float));
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
    const TileFactors factors[] = {
        {left.low, right.low}, {left.low, right.high}, {left.high, right.low}, {left.high, right.high}};
    unit_->multiply(factors + !kByKey, 3 + kByKey, steps, sums);
  }

  // sums (+)= the product of two factors of 32 x 32 numbers.
  template <typename Left, typename Right>
  void add_product(const Left& left, const Right& right, bool begun, float* sums) const {
    multiply(left, right, 1, begun ? product_ : sums);
    if (begun) add(product_, sums);
  }

  // Everything that needs queries, keys, decays and rates only, of the first tokens of the chunk.
  void prepare(int64_t count) {
    if constexpr (kByKey) {
      Halves half = halves();
      prepare_by_key(count, half, false);
    } else {
      copy_tokens(in_.q, count, query_);
      copy_tokens(in_.k, count, key_);
      turn(key_, 2 * steps_, key_by_token_);
      pair_tokens(key_by_token_, last_key_);
      const TileFactors of_query[] = {{query_, key_by_token_}}, of_key[] = {{key_, key_by_token_}};
      unit_->multiply(of_query, 1, steps_, with_query_);
      if constexpr (kErases) unit_->multiply(of_key, 1, steps_, with_key_);
      fade(count, Vector<float>{});
    }
  }

  // Some dimensions of a left factor.
  static Parts of_block(const Parts& x, int64_t tiles) { return {x.high + tiles, x.low + tiles}; }
  static FactorTile* of_block(FactorTile* x, int64_t tiles) { return x + tiles; }

  static int64_t half_size(int64_t keys) { return BackwardChunk::scratch_size(keys, 0); }
  Halves halves() const { return {{{keys_, 0, for_chunk_}, {keys_, 0, for_chunk_ + half_size(keys_)}}}; }
  // Where a number of token t is in blocks of dimensions.
  static int64_t in_blocks(int64_t t, int64_t i) { return i / kProductSide * kBlock + t * kProductSide + i % kProductSide; }

  // The same for decays by key: scores of ForgetChunk, queries and keys after the decays before them, and keys after those that
  // follow, none of which is exact. The forward pass reads the state with the first two and changes it with the last; the
  // backward pass changes and reads its gradient the other way around.
  void prepare_by_key(int64_t count, Halves& half, bool backward) {
    const int64_t halves = count > kChunkTokens ? 2 : 1;
    for (float* x : {with_query_, with_key_}) std::memset(x, 0, kBlock * sizeof(float));
    if (count < kTokens || keys_ % kProductSide)
      for (float* x : {from_read_, from_found_, from_write_}) std::memset(x, 0, steps_ * kBlock * sizeof(float));
    for (int64_t h = 0; h < halves; ++h) {
      half[h].chunk.begin(count - h * kChunkTokens);
      half[h].chunk.prepare(in_, start_ + h * kChunkTokens);
    }
    const float* const total[] = {half[0].chunk.total[0], halves == 2 ? half[1].chunk.total[0] : nullptr};
    for (int64_t i = 0; i < steps_ * kProductSide; ++i)
      total_[0][i] = i < keys_ ? total[0][i] * (total[1] ? total[1][i] : 1) : 1;
    for (int64_t h = 0; h < halves; ++h) {
      const auto& writer = half[h].chunk.writer[0];
      const int64_t first = h * kChunkTokens;
      const auto put = [&](Tokens<float> x, const float* factor, float* blocks) {
        for (int64_t t = 0; t < half[h].chunk.count; ++t)
          for (int64_t i = 0; i < keys_; i += kLanes<float>) {
            const Vector<float> own = fwp::load(x[t] + i);
            fwp::store(blocks + in_blocks(first + t, i), factor ? own * fwp::load(factor + i) : own);
          }
      };
      const auto put_scores = [&](Tokens<float> seen, Tokens<float> scores, int64_t own, float* block) {
        const Tokens<float> to{block + first * kTokens, kTokens};
        if (h) multiply_rows(constant(seen), half[0].chunk.writer[0].key_at_end, half[1].chunk.rows, kChunkTokens, keys_, to);
        for (int64_t t = 0; t < half[h].chunk.count; ++t) std::memcpy(to[t] + first, scores[t], (t + own) * sizeof(float));
      };
      put_scores(half[h].chunk.seen_query, writer.with_query, 1, with_query_);
      if constexpr (kErases) put_scores(half[h].chunk.seen_reader, writer.with_reader, 0, with_key_);
      put(half[h].chunk.seen_query, h ? total[0] : nullptr, from_read_);
      if constexpr (kErases) put(half[h].chunk.seen_reader, h ? total[0] : nullptr, from_found_);
      put(writer.key_at_end, h ? nullptr : total[1], from_write_);
    }
    Vector<float> bad = {};
    const auto split_blocks = [&](const float* blocks, const Parts& to, bool by_token) {
      for (int64_t i = 0; i < steps_; ++i) {
        const float* const block = blocks + i * kBlock;
        if (by_token) {
          split_left(block, kProductSide, of_block(to, i), bad, steps_);
        } else {
          split_right(block, rest_, bad);
          turn(rest_, 2, of_block(to, 2 * i));
        }
      }
    };
    split_blocks(from_read_, query_, !backward);
    if constexpr (kErases) split_blocks(from_found_, key_, !backward);
    split_blocks(from_write_, last_key_, backward);
    fade(count, bad);
  }

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
  // to += x.
  static void add(const float* x, float* to) {
    for (int64_t n = 0; n < kBlock; n += kLanes<float>) fwp::store(to + n, fwp::load(to + n) + fwp::load(x + n));
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
    multiply(query_, of_state_, steps_, read_);
    read_block(in_.v.from(j), start_, count, columns_from(j), error_);
    if constexpr (kErases) {
      multiply(key_, of_state_, steps_, product_);
      for (int64_t t = 0; t < count; ++t) {
        Line rest = line(error_ + t * kColumns);
        rest.subtract(so_far_[t], line(product_ + t * kColumns));
        rest.store_to(error_ + t * kColumns, kColumns);
      }
      split_right(error_, rest_, bad);
      multiply(inverse_, rest_, 1, error_);
    }
    scale(rate_, error_, product_);
    split_right(product_, write_, bad);
    scale(weight_, product_, product_);
    split_right(product_, last_, bad);
    multiply(scores_, write_, 1, product_);
    for (int64_t t = 0; t < kTokens; ++t) {
      Line read = line(product_ + t * kColumns);
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
      multiply(of_block(last_key_, 2 * i), last_, 1, product_);
      change_state(i, j, state_, state_);
    }
  }
  // The rows of block i of a state: c_C times those before, and the product.
  void change_state(int64_t i, int64_t j, Tokens<float> before, Tokens<float> after) const {
    for (int64_t r = 0; r < kProductSide; ++r) {
      Line x = line(product_ + r * kColumns);
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

  // to = the product, of some dimensions from i on.
  void write_block(const Stored<float>& to, int64_t i, int64_t count, Vector<float>& bad) const {
    const Stored<float> columns = to.from(i * kProductSide);
    for (int64_t t = 0; t < count; ++t) {
      const Line x = line(product_ + t * kProductSide);
      FWP_UNROLL for (int n = 0; n < kVectors; ++n) bad += x.x[n] * 0.0f;
      columns.write_from(product_ + t * kProductSide, t, std::min(kProductSide, keys_ - i * kProductSide));
    }
  }

  // The gradients of the chunk's tokens, and that of the state before it, in next_gradient_. Returns whether they are
  // finite.
  bool differentiate(int64_t count, Tokens<const float> retrieved, const Stored<float>& d_out, const Gradients& to) {
    Vector<float> bad = {};
    if constexpr (kByKey) {
      Halves half = halves();
      prepare_by_key(count, half, true);
      differentiate_panels(count, retrieved, d_out, to, bad);
      differentiate_halves(count, half, to, bad);
    } else {
      prepare(count);
      turn(query_, 2 * steps_, query_by_dim_);
      pair_tokens(query_by_dim_, query_of_token_);
      turn(query_of_token_, 2 * steps_, query_by_dim_);
      turn(last_key_, 2 * steps_, key_by_dim_);
      differentiate_panels(count, retrieved, d_out, to, bad);
      differentiate_queries(count, to, bad);
      differentiate_keys(count, to, bad);
      differentiate_decays(count, to, bad);
    }
    return finite_ && sum_lanes<float>(bad) == 0;
  }

  void split_turned(float* block, const Parts& to, Vector<float>& bad) {
    turn_block(block, turned_);
    split_left(turned_, kProductSide, to, bad);
  }

  // The gradients of values, rates and the state before the chunk, and of what comes of queries, keys and decays: scores, what
  // tokens have seen of the state, and c_C.
  void differentiate_panels(int64_t count, Tokens<const float> retrieved, const Stored<float>& d_out, const Gradients& to,
                            Vector<float>& bad) {
    fade_block(with_query_, false, product_);
    split_turned(product_, scores_, bad);
    if constexpr (kErases) {
      fade_block(with_key_, true, product_);
      split_turned(product_, left_, bad);
      split_turned(solved_, inverse_, bad);
    }
    std::memset(d_total_.data, 0, steps_ * kProductSide * sizeof(float));
    std::memset(d_rate_, 0, sizeof d_rate_);
    for (int64_t j = 0; j < values_; j += kColumns) {
      differentiate_values(j, count, retrieved, d_out, to, bad);
      differentiate_scores(j, bad);
      differentiate_reads(j, bad);
      change_gradient(j, bad);
    }
    for (int64_t t = 0; t < count; ++t) {
      if (to.rate.data) to.rate[t] = d_rate_[t];
      bad += 0 * d_rate_[t];
    }
  }

  // In a panel of columns: d_out, E, the gradients of E and U, and those of values and rates.
  void differentiate_values(int64_t j, int64_t count, Tokens<const float> retrieved, const Stored<float>& d_out,
                            const Gradients& to, Vector<float>& bad) {
    split_state(gradient_, j, of_state_, bad);
    if constexpr (kByKey)
      multiply(last_key_, of_state_, steps_, d_write_);
    else
      multiply(key_, of_state_, steps_, d_write_);
    scale(weight_, d_write_, d_write_);
    read_block(d_out.from(j), 0, count, columns_from(j), d_read_);
    split_right(d_read_, rest_, bad);
    multiply(scores_, rest_.high, 1, product_);
    add(product_, d_write_);
    if constexpr (kErases) {
      read_block(retrieved.from(j), 0, count, columns_from(j), error_);
      scale(rate_, d_write_, product_);
      split_right(product_, rest_, bad);
      multiply(inverse_, rest_, 1, d_error_);
      for (int64_t n = 0; n < kBlock; ++n) d_found_[n] = -d_error_[n];
      split_right(d_found_, rest_, bad);
      multiply(left_, rest_, 1, product_);
      add(product_, d_write_);
    } else {
      read_block(in_.v.from(j), start_, count, columns_from(j), error_);
      scale(rate_, d_write_, d_error_);
    }
    for (int64_t t = 0; t < count; ++t) {
      d_rate_[t] += dot(d_write_ + t * kColumns, error_ + t * kColumns);
      to.v.from(j).write_from(d_error_ + t * kColumns, t, columns_from(j));
    }
  }

  // The gradients of scores, without their decays. The parts of U, d_out and -d_E stay.
  void differentiate_scores(int64_t j, Vector<float>& bad) {
    scale(rate_, error_, product_);
    split_left(product_, kColumns, write_, bad);
    turn(write_, 2, last_);
    split_left(d_read_, kColumns, rest_, bad);
    add_product(rest_.high, last_, j > 0, d_with_query_);
    if constexpr (kErases) {
      split_left(d_found_, kColumns, erased_, bad);
      add_product(erased_, last_, j > 0, d_with_key_);
    }
  }

  // The gradients of what multiplies the state before the chunk or is written to the one after it, and of c_C.
  void differentiate_reads(int64_t j, Vector<float>& bad) {
    for (int64_t i = 0; i < steps_; ++i) {
      const float *state = before_[i * kProductSide] + j, *gradient = gradient_[i * kProductSide] + j;
      split_left(state, before_.stride, of_state_, bad);
      turn(of_state_, 2, by_column_);
      add_product(rest_.high, by_column_, j > 0, from_read_ + i * kBlock);
      if constexpr (kErases) add_product(erased_, by_column_, j > 0, from_found_ + i * kBlock);
      split_left(gradient, gradient_.stride, of_state_, bad);
      turn(of_state_, 2, by_column_);
      add_product(write_, by_column_, j > 0, from_write_ + i * kBlock);
      for (int64_t r = 0; r < kProductSide; ++r)
        d_total_[0][kByKey ? i * kProductSide + r : 0] += dot(state + r * before_.stride, gradient + r * gradient_.stride);
    }
  }

  // From the gradient of the state after the chunk to that of the state before it.
  void change_gradient(int64_t j, Vector<float>& bad) {
    scale(so_far_, d_read_, product_);
    split_right(product_, rest_, bad);
    if constexpr (kErases) {
      scale(so_far_, d_found_, product_);
      split_right(product_, last_, bad);
    }
    for (int64_t i = 0; i < steps_; ++i) {
      if constexpr (kByKey) {
        const Parts query = of_block(query_, 2 * i), key = of_block(key_, 2 * i);
        const TileFactors factors[] = {{query.low, rest_.high}, {query.high, rest_.high},  // d_out is exact
                                       {key.low, last_.high},   {key.high, last_.low},     {key.high, last_.high}};
        unit_->multiply(factors, kErases ? 5 : 2, 1, product_);
      } else {
        const FactorTile *query = query_of_token_ + 2 * i, *key = last_key_ + 2 * i;
        const TileFactors factors[] = {{query, rest_.low}, {query, rest_.high}, {key, last_.low}, {key, last_.high}};
        unit_->multiply(factors, kErases ? 4 : 2, 1, product_);
      }
      change_state(i, j, gradient_, next_gradient_);
    }
  }

  // The gradients of queries and keys with a decay by head, and of c_t and w_s.
  void differentiate_queries(int64_t count, const Gradients& to, Vector<float>& bad) {
    std::memset(d_so_far_, 0, sizeof d_so_far_);
    fade_block(d_with_query_, false, read_);
    split_left(read_, kTokens, left_, bad);
    for (int64_t i = 0; i < steps_; ++i) {
      float* const from_read = from_read_ + i * kBlock;
      read_block(in_.q.from(i * kProductSide), start_, count, std::min(kProductSide, keys_ - i * kProductSide), error_);
      for (int64_t t = 0; t < count; ++t) d_so_far_[t] += dot(error_ + t * kProductSide, from_read + t * kProductSide);
      multiply(left_, key_by_dim_ + 2 * i, 1, product_);
      add(so_far_, from_read, product_);
      write_block(to.q, i, count, bad);
    }
  }
  void differentiate_keys(int64_t count, const Gradients& to, Vector<float>& bad) {
    std::memset(d_weight_, 0, sizeof d_weight_);
    split_turned(read_, left_, bad);
    if constexpr (kErases) {
      fade_block(d_with_key_, true, read_);
      turn_block(read_, turned_);
      add(turned_, read_);
      split_left(read_, kTokens, erased_, bad);
    }
    for (int64_t i = 0; i < steps_; ++i) {
      const float *from_found = from_found_ + i * kBlock, *from_write = from_write_ + i * kBlock;
      read_block(in_.k.from(i * kProductSide), start_, count, std::min(kProductSide, keys_ - i * kProductSide), error_);
      for (int64_t t = 0; t < count; ++t) {
        if constexpr (kErases) d_so_far_[t] += dot(error_ + t * kProductSide, from_found + t * kProductSide);
        d_weight_[t] += dot(error_ + t * kProductSide, from_write + t * kProductSide);
      }
      const FactorTile *query = query_by_dim_ + 2 * i, *key = key_by_dim_ + 2 * i;
      const TileFactors factors[] = {{left_.low, query}, {left_.high, query}, {erased_.low, key}, {erased_.high, key}};
      unit_->multiply(factors, kErases ? 4 : 2, 1, product_);
      add(weight_, from_write, product_);
      if constexpr (kErases) add(so_far_, from_found, product_);
      write_block(to.k, i, count, bad);
    }
  }

  // From the gradients of F_ts, c_t, w_s and c_C. Each is passed on to the decays from the last one back.
  void differentiate_decays(int64_t count, const Gradients& to, Vector<float>& bad) const {
    Line of_key = line(d_weight_);
    float of_start = d_total_[0][0];
    for (int64_t t = kTokens - 1; t >= 0; --t) {
      Vector<float> sum = {};
      FWP_UNROLL for (int n = 0; n < kVectors; ++n) {
        const int64_t at = t * kTokens + n * kLanes<float>;
        of_key.x[n] += fwp::load(d_with_query_ + at) * fwp::load(with_query_ + at);
        if constexpr (kErases) of_key.x[n] += fwp::load(d_with_key_ + at) * fwp::load(with_key_ + at);
        if (t) sum += of_key.x[n] * fwp::load(faded_ + at - kTokens);
      }
      of_start += d_so_far_[t];
      const float d_decay = sum_lanes<float>(sum) + of_start * (t ? so_far_[t - 1] : 1);
      if (t >= count) continue;
      if (to.head_decay.data) to.head_decay[t] = d_decay;
      bad += 0 * d_decay;
      of_key.scale(in_.head_decay[start_ + t]);
      of_start *= in_.head_decay[start_ + t];
    }
  }

  // The gradients of queries, keys and decays by key. ForgetChunk derives them from those of the scores of 16 tokens and of what
  // these have seen. Before, each half gets its share of scores between both, and of products with the other one's decays.
  void differentiate_halves(int64_t count, Halves& half, const Gradients& to, Vector<float>& bad) const {
    const int64_t halves = count > kChunkTokens ? 2 : 1;
    for (int64_t h = 0; h < halves; ++h)
      for (int64_t i = 0; i < keys_; i += kLanes<float>) {
        const Vector<float> d_total = fwp::load(d_total_[0] + i);
        fwp::store(half[h].d_total[0] + i, halves == 2 ? d_total * fwp::load(half[1 - h].chunk.total[0] + i) : d_total);
      }
    for (int64_t h = 0; h < halves; ++h) {
      auto& d_writer = half[h].d_writer[0];
      const int64_t first = h * kChunkTokens, corner = first * (kTokens + 1);
      d_writer.with_query = {d_with_query_ + corner, kTokens}, d_writer.with_reader = {d_with_key_ + corner, kTokens};
      const auto take_from = [&](const float* blocks, Tokens<float> own, bool fades_in_other, Tokens<float> d_own) {
        for (int64_t t = 0; t < half[h].chunk.rows; ++t)
          for (int64_t i = 0; i < keys_; i += kLanes<float>) {
            Vector<float> gradient = fwp::load(blocks + in_blocks(first + t, i));
            if (fades_in_other) {
              float* const d_total = half[1 - h].d_total[0] + i;
              fwp::store(d_total, fwp::load(d_total) + gradient * fwp::load(own[t] + i));
              gradient *= fwp::load(half[1 - h].chunk.total[0] + i);
            }
            fwp::store(d_own[t] + i, gradient);
          }
      };
      take_from(from_read_, half[h].chunk.seen_query, h > 0, half[h].d_seen_query);
      if constexpr (kErases) take_from(from_found_, half[h].chunk.seen_reader, h > 0, half[h].d_seen_reader);
      take_from(from_write_, half[h].chunk.writer[0].key_at_end, h + 1 < halves, d_writer.key_at_end);
    }
    if (halves == 2) {
      const Tokens<float> key_at_end = half[0].chunk.writer[0].key_at_end, d_key_at_end = half[0].d_writer[0].key_at_end;
      const auto differentiate_seen = [&](const float* d_scores, Tokens<float> seen, Tokens<float> d_seen) {
        const float* const between = d_scores + kChunkTokens * kTokens;
        add_rows(between, 1, kTokens, constant(key_at_end), kChunkTokens, d_seen, half[1].chunk.rows);
        add_rows(between, kTokens, 1, constant(seen), half[1].chunk.rows, d_key_at_end, kChunkTokens);
      };
      differentiate_seen(d_with_query_, half[1].chunk.seen_query, half[1].d_seen_query);
      if constexpr (kErases) differentiate_seen(d_with_key_, half[1].chunk.seen_reader, half[1].d_seen_reader);
    }
    for (int64_t h = 0; h < halves; ++h) {
      half[h].differentiate_keys(h * kChunkTokens, to);
      for (int64_t t = 0; t < half[h].chunk.count; ++t)
        for (const float* x : {half[h].d_query[t], half[h].d_writer[0].key[t], half[h].d_fade[t]})
          bad += 0 * BackwardChunk::sum_of(x, keys_);
    }
  }

  // to_n += the sum of factor[m * stride + n * row_stride] x_m, for whole groups of rows.
  void add_rows(const float* factor, int64_t stride, int64_t row_stride, Tokens<const float> x, int64_t count, Tokens<float> to,
                int64_t rows) const {
    for_panels<float, 2>(keys_, [&](int64_t i, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      for (int64_t n = 0; n < rows; n += kTileRows) {
        Tile<float, NV> sum;
        FWP_UNROLL for (int r = 0; r < kTileRows; ++r) sum.row[r].load_from(to[n + r] + i, NV * kLanes<float>);
        sum.add(0, count, x.from(i), [&](int64_t m, int r)
                __attribute__((always_inline)) { return factor[m * stride + (n + r) * row_stride]; });
        sum.store_to(from_row(to, n).from(i), kTileRows, NV * kLanes<float>);
      }
    });
  }
};

}  // namespace fwp
