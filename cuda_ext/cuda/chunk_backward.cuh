// The backward pass of the rules on the tensor cores, chunk by chunk (see chunks.cuh), from the last chunk to the first. G is
// the gradient of the state after the chunk. D is the gradient of E, or of V if nothing is erased:
//
//     dU = P^T dO + w K G - A^T D      D = b dU           (sum, no decays: D = dU)
//     dP = F dO U^T up to its diagonal                    dA = -F D U^T below it
//     dQ = c dO S^T + dP K                                dV = D
//     dK = w U G^T - c D S^T + dP^T Q + (dA + dA^T) K
//     G = f G + (c Q)^T dO - (c K)^T D                    db = the sum over a token's row of dU * E
//
// Every F_ts, c_t, w_s and f contains the decays of the tokens that it spans as factors: see DecayGradient. The states before
// the chunks are first rebuilt from what the forward pass has written.
#pragma once

#include "chunks.cuh"

namespace fwp::cuda {

// The states before each chunk of a rule without decays: (heads, chunks, columns, kRows).
template <int kRows, bool kErases>
struct ChunkStates : ChunkPass<kRows, kErases, false> {
  using Pass = ChunkPass<kRows, kErases, false>;
  using Pass::kParts;

  Brought value;  // the errors, if the rule erases
  Matrices<const float> initial;
  Bfloat16* states;  // null: only the ends of segments of the sum, without transitions
  int columns;       // of the states: those of the values, padded to a power of two of blocks
  float* ends;

  struct Stage {
    Shared key, value;
    float* rate;

    FWP_BOTH Stage(Carver& carver, const ChunkStates& pass)
        : key(carver.matrix(kChunkTokens, kRows)), value(carver.matrix(kErases ? 0 : kChunkTokens, pass.block_columns())),
          rate(carver.take<float>(kChunkTokens)) {}
  };
  struct Memory {
    const char** starts;
    Stages<Stage, ChunkStates> stages;

    FWP_BOTH Memory(Carver& carver, const ChunkStates& pass)
        : starts(carver.take<const char*>(4)), stages(carver, pass) {}
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    typename Pass::State state;
    this->load(initial, state);
    this->put_starts({&this->key, &value, &this->rate}, memory.starts);
    const int64_t begin = this->begin(), end = this->end();
    Scalars next = fill(memory, begin);
    Product values[kChunkBlocks];
    if constexpr (kErases) load_errors(memory, begin, values);
    for (int64_t n = begin; n < end; ++n) {
      if (states) put(state, n);
      const Stage chunk = memory.stages[n];
      this->put_scalars(next, chunk);
      wait_copies<0>();
      __syncthreads();
      if (n + 1 < end) next = fill(memory, n + 1);
      Factor write[kChunkBlocks][kParts];
      if constexpr (kErases) {
        FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
          for_elements(values[t], [&](int, int s, float& x) { x *= chunk.rate[t * kBlock + s]; });
          split(values[t], write[t]);
        }
      } else {
        FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
          chunk.value.left_transposed(t * kBlock, this->own_column(), write[t][0]);
      }
      if constexpr (kErases)
        if (n + 1 < end) load_errors(memory, n + 1, values);
      this->template write<false>(state, write, chunk.key);
    }
    if constexpr (!kErases)
      if (!states) this->store_ends(state, ends);
  }

 private:
  FWP_DEVICE Scalars fill(const Memory& memory, int64_t n) const {
    const Stage to = memory.stages[n];
    this->bring_keys(this->key, memory.starts[0], n, to.key);
    if constexpr (!kErases) this->bring_values(value, memory.starts[1], n, to.value);
    commit_copies();
    return this->ask(memory.starts[2], nullptr, nullptr, n);
  }

  FWP_DEVICE void load_errors(const Memory& memory, int64_t n, Product (&to)[kChunkBlocks]) const {
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) Pass::load_errors(memory.starts[1], n, t, to[t]);
  }

  FWP_DEVICE void put(typename Pass::State& state, int64_t n) const {
    const Shared to{states + (this->head() * this->chunks() + n) * columns * kRows, kRows};
    const int first = this->first_column() + this->own_column();
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i)
      for_pairs(state[i], [&](int j, int r, float x, float y) {
        to.put(first + j, i * kBlock + r, pair_of(x, y));
      });
  }
};

// The gradient of the decays of a chunk. Token t receives F_ts y_ts from token s < t; y_ts is the derivative of the loss in
// this product. The state before the chunk counts as a token before the first. The last token also reads the state after the
// chunk. The decay a_r is a factor of the products with s < r <= t, so
//
//     da_r = the sum over t >= r of F_tr z_tr      z_tr = the sum over s < r of F_(r-1)s y_ts = a_(r-1) z_t(r-1) + y_t(r-1)
struct DecayGradient {
  static constexpr int kLine = kChunkTokens + 1;
  float* parts;              // y_ts in line t, from s = -1 on
  float *of_reads, *of_writes, *of_state;  // sums over some columns for each token, or over some elements of the state

  FWP_BOTH DecayGradient(Carver& carver, int rows, int warps, bool fades)
      : parts(carver.take<float>(fades ? kChunkTokens * kLine : 0)),
        of_reads(carver.take<float>(fades ? rows / kBlock * kChunkTokens : 0)),
        of_writes(carver.take<float>(fades ? rows / kBlock * kChunkTokens : 0)),
        of_state(carver.take<float>(fades ? warps : 0)) {}

  FWP_DEVICE float& part(int s, int t) const { return parts[t * kLine + s + 1]; }

  // Returns, in each lane, the gradient of its token's decay, from sums in `blocks` blocks of rows. One whole warp calls it.
  FWP_DEVICE float find(const Decays& decays, int blocks, int warps) const {
    const int t = lane(), last = kChunkTokens - 1;
    float read = 0, write = 0;
    FWP_UNROLL_BY(1) for (int i = 0; i < blocks; ++i) {
      read += of_reads[i * kChunkTokens + t];
      write += of_writes[i * kChunkTokens + t];
    }
    part(-1, t) = read;
    __syncwarp();
    if (t < last) part(t, last) += write;
    if (t == last)
      FWP_UNROLL_BY(1) for (int w = 0; w < warps; ++w) part(-1, last) += of_state[w];
    __syncwarp();
    float z = 0;
    FWP_UNROLL_BY(4) for (int r = 0; r < kChunkTokens; ++r) {
      float& y = part(r - 1, t);
      if (r <= t) z = r > 0 ? fma(decays.each[r - 1], z, y) : y;
      y = r <= t ? decays.between(r, t) * z : 0;
    }
    __syncwarp();
    float sum = 0;
    FWP_UNROLL_BY(4) for (int reader = 0; reader < kChunkTokens; ++reader) sum += part(t - 1, reader);
    return sum;
  }
};

// The state before a chunk, in shared memory. Without decays it is the transpose in bfloat16. With decays it is the state itself
// in float32, because large terms cancel in the gradient of a decay.
template <int kRows, bool kFades>
struct StateBefore {
  static constexpr int kParts = kFades ? 2 : 1;
  Shared rounded;
  float* exact;
  int pitch;

  FWP_BOTH StateBefore(Carver& carver, int columns)
      : rounded(carver.matrix(kFades ? 0 : columns, kRows)),
        exact(carver.take<float>(kFades ? kRows * (columns + kPadding) : 0)), pitch(columns + kPadding) {}

  // 16 columns by 16 rows, from these on, as the right factor of a product.
  FWP_DEVICE void right(int column, int row, Factor (&to)[kParts]) const {
    if constexpr (kFades) {
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int i = 0; i < 2; ++i) {
          const float* const from = exact + (row + 8 * h + line()) * pitch + column + 8 * i + pair();
          const Numbers<float, 2> x = *reinterpret_cast<const Numbers<float, 2>*>(from);
          uint32_t parts[kParts];
          split(x.x[0], x.x[1], parts);
          FWP_UNROLL for (int m = 0; m < kParts; ++m) to[m][2 * h + i] = parts[m];
        }
    } else {
      rounded.right(column, row, to[0]);
    }
  }
};

// kEnds: compute only the ends of segments. Their transitions are known.
template <int kRows, bool kErases, bool kFades, bool kEnds = false>
struct ChunkBackward : ChunkPass<kRows, kErases, kFades> {
  using Pass = ChunkPass<kRows, kErases, kFades>;
  using Pass::kRates;
  static constexpr bool kWrites = kErases || !kEnds;  // whether it needs dU

  Brought d_out, value;  // value: the errors, if the rule erases
  const Bfloat16* states;       // of a rule without decays
  const float *initial, *kept;  // of a rule with decays: the states before the sequence and after whole chunks
  Matrices<const float> d_last;
  float* d_initial;
  Output d_q, d_k, d_v, d_rate, d_decay;
  float* ends;  // see store_ends()

  struct Stage {
    Shared query, key, d_out, value;
    float* rate;
    Decays decays;

    FWP_BOTH Stage(Carver& carver, const ChunkBackward& pass)
        : query(carver.matrix(kChunkTokens, kRows)), key(carver.matrix(kChunkTokens, kRows)),
          d_out(carver.matrix(kChunkTokens, pass.block_columns())),
          value(carver.matrix(kErases ? 0 : kChunkTokens, pass.block_columns())),
          rate(carver.take<float>(kChunkTokens)), decays(carver, kFades) {}
  };
  struct Memory {
    const char** starts;
    Scores scores;    // P and A, later overwritten by dP and dA
    StateBefore<kRows, kFades> state;
    Shared g;
    Shared write, d;  // U (unless it is V), and D
    float* d_rate;    // a sum for each warp's columns
    DecayGradient d_decay;
    Stages<Stage, ChunkBackward> stages;

    FWP_BOTH Memory(Carver& carver, const ChunkBackward& pass)
        : starts(carver.take<const char*>(7)), scores(carver, kExact, kErases),
          state(carver, pass.block_columns()),
          g(carver.matrix(pass.block_columns(), kRows)),
          write(carver.matrix(kRates ? kChunkTokens : 0, pass.block_columns())),
          d(carver.matrix(kChunkTokens, pass.block_columns())),
          d_rate(carver.take<float>(kRates ? pass.warps * kChunkTokens : 0)),
          d_decay(carver, kRows, pass.warps, kFades), stages(carver, pass) {}
  };

  FWP_DEVICE void run() const {
    const Memory memory = find_memory();
    typename Pass::State g;
    this->load(kEnds ? Matrices<const float>{} : d_last, g);
    const int64_t last = this->end() - 1;
    this->put_starts({&this->query, &this->key, &d_out, &value, &this->rate, &this->decay}, memory.starts);
    this->put_scalars(fill(memory, last), memory.stages[last]);
    for (int64_t n = last; n >= this->begin(); --n) {
      use_columns(n, g);
      if constexpr (!kEnds) use_tokens(n);
    }
    if constexpr (kEnds) return this->store_ends(g, ends);
    if (this->begin() == 0) this->store(g, d_initial, this->head());
    __syncthreads();
    store_decay(find_memory(), this->begin());
  }

 private:
  // Each part of a round computes its addresses again: those of a whole round do not fit into the registers.
  FWP_DEVICE Memory find_memory() const {
    Carver carver{shared_memory() + unknown_zero()};
    return Memory(carver, *this);
  }

  FWP_DEVICE Scalars fill(const Memory& memory, int64_t n) const {
    const Stage to = memory.stages[n];
    this->bring_keys(this->query, memory.starts[0], n, to.query);
    this->bring_keys(this->key, memory.starts[1], n, to.key);
    this->bring_values(d_out, memory.starts[2], n, to.d_out);
    if constexpr (!kErases) this->bring_values(value, memory.starts[3], n, to.value);
    commit_copies();
    return this->ask(memory.starts[4], memory.starts[5], memory.starts[6], n);
  }

  FWP_DEVICE void fill_state(const StateBefore<kRows, kFades>& to, int64_t n) const {
    if constexpr (kFades) {
      const int64_t index = n > 0 ? this->head() * (this->size.length / kChunkTokens) + n - 1 : this->head();
      const float* const states = n > 0 ? kept : initial;
      fill_exact(to, states ? states + index * this->size.rows * this->size.columns : nullptr);
    } else {
      constexpr int per_piece = 8, pieces = kRows / per_piece;
      const Bfloat16* const from = states + (this->head() * this->chunks() + n) * this->block_columns() * kRows;
      FWP_UNROLL_BY(1) for (int at = int(threadIdx.x); at < this->block_columns() * pieces; at += this->warps * kWarp)
        copy_later(to.rounded.at(at / pieces, at % pieces * per_piece), from + at * per_piece, true);
    }
    commit_copies();
  }
  FWP_DEVICE void fill_exact(const StateBefore<kRows, kFades>& to, const float* from) const {
    constexpr int per_piece = 4, pieces = kBlock / per_piece;  // each warp copies its own columns
    const int column = this->own_column() + lane() % pieces * per_piece, columns = this->size.columns;
    const bool by_pieces = from && columns % per_piece == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
    FWP_UNROLL_BY(1) for (int row = lane() / pieces; row < kRows; row += kWarp / pieces) {
      const bool inside = row < this->size.rows && column < columns;
      float* const target = to.exact + row * to.pitch + column;
      if (by_pieces)
        copy_later(target, inside ? from + row * columns + column : from, inside);
      else
        FWP_UNROLL_BY(1) for (int e = 0; e < per_piece; ++e)
          target[e] = from && inside && column + e < columns ? from[row * columns + column + e] : 0;
    }
  }

  // Compute the transposes of dU and D, and the gradient of the state before the chunk.
  FWP_DEVICE void use_columns(int64_t n, typename Pass::State& g) const {
    const Memory memory = find_memory();
    const Stage chunk = memory.stages[n];
    wait_copies<0>();
    // From here on, this chunk may be used, and the other stage and the buffer of the state may be filled.
    __syncthreads();
    if constexpr (!kEnds) fill_state(memory.state, n);
    const Scalars next = n > this->begin() ? fill(memory, n - 1) : Scalars{};
    const Scores& scores = memory.scores;
    Product values;
    if constexpr (kErases) this->load_errors(memory.starts[3], n, kChunkBlocks - 1, values);
    if constexpr (kWrites)
      this->template make_scores<kExact>(chunk.query, chunk.key, chunk.decays, scores,
                                       [&](int t, int, float x) { return chunk.rate[t] * x; });
    Product d_write[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(d_write[t]);
    if constexpr (kWrites) read_g(g, chunk, memory.g, d_write);
    if (!kEnds && n + 1 < this->end()) store_decay(memory, n + 1);
    this->put_scalars(next, memory.stages[n + 1]);  // the other stage, that of chunk n - 1
    if constexpr (kFades && !kEnds) wait_state(n);
    __syncthreads();  // for the scores
    Factor d_read[1];
    FWP_UNROLL for (int s = 0; s < kChunkBlocks && kWrites; ++s) {
      chunk.d_out.left_transposed(s * kBlock, this->own_column(), d_read[0]);
      FWP_UNROLL for (int t = 0; t <= s; ++t)
        multiply<kExact>(d_write[t], d_read,
                         [&](int m, Factor& right) { scores.read[m].right(s * kBlock, t * kBlock, right); });
    }
    solve(n, values, d_write, g);
  }

  // From dU without the term of A, compute D, the gradient of the state before the chunk, and those of the rates. `written`: of
  // the last block.
  FWP_DEVICE void solve(int64_t n, Product& written, Product (&d_write)[kChunkBlocks], typename Pass::State& g) const {
    const Memory memory = find_memory();
    const Stage chunk = memory.stages[n];
    if constexpr (kFades && !kEnds) sum_state(memory, g);
    add_reads(chunk, g);
    FWP_UNROLL for (int t = kChunkBlocks; kWrites && t-- > 0;) {
      Product& d = d_write[t];
      Factor left[1][kExact];
      if constexpr (kErases) {
        split(d, left[0]);
        add_erased(memory.scores, t, t, left[0], d);
      } else if constexpr (kRates) {
        Factor value;
        chunk.value.left_transposed(t * kBlock, this->own_column(), value);
        unpack(value, written);
      }
      if constexpr (kRates) apply_rate(t, chunk, memory, written, d);
      if constexpr (kErases) {
        if (t > 0) this->load_errors(memory.starts[3], n, t - 1, written);
        split(d, left[0]);
        FWP_UNROLL for (int s = 0; s < t; ++s) add_erased(memory.scores, t, s, left[0], d_write[s]);
      }
      for_elements(d, [&](int j, int s, float x) { memory.d.put(t * kBlock + s, this->own_column() + j, x); });
      if constexpr (kErases) {
        if constexpr (kFades) {
          this->fade_columns(t * kBlock, d, [&](int s) { return chunk.decays.from_start(s); });
          split(d, left[0]);
        }
        this->template write<true>(g, left, chunk.key, t);
      }
    }
  }

  // Compute what sums over all columns. The warps share the tokens.
  FWP_DEVICE void use_tokens(int64_t n) const {
    const Memory memory = find_memory();
    const Stage chunk = memory.stages[n];
    __syncthreads();
    this->store_tokens(d_v, n, memory.d, this->own_column(), kBlock, this->own_column(), this->size.columns, lane(), kWarp);
    if constexpr (kRates) this->store_sums(d_rate, n, memory.d_rate);
    make_d_scores(chunk, memory);
    wait_state(n);
    __syncthreads();
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < kChunkBlocks * kRows / kBlock; b += this->warps)
      give(n, b % kChunkBlocks, b / kChunkBlocks * kBlock, chunk, memory);
  }

  // d_write += w G^T K^T. Also copies G to shared memory.
  FWP_DEVICE void read_g(typename Pass::State& g, const Stage& chunk, const Shared& to,
                         Product (&d_write)[kChunkBlocks]) const {
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      Factor of_g[kErases ? kExact : 1];
      split(g[i], of_g);
      for_pairs(g[i], [&](int j, int r, float x, float y) {
        to.put(this->own_column() + j, i * kBlock + r, pair_of(x, y));
      });
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
        multiply<1>(d_write[t], of_g,
                    [&](int, Factor& key) { chunk.key.right_transposed(t * kBlock, i * kBlock, key); });
    }
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      this->fade_columns(t * kBlock, d_write[t], [&](int s) { return chunk.decays.to_end(s); });
  }

  // g = f g + (c Q)^T dO
  FWP_DEVICE void add_reads(const Stage& chunk, typename Pass::State& g) const {
    Factor d_read[kChunkBlocks][1];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      chunk.d_out.left_transposed(t * kBlock, this->own_column(), d_read[t][0]);
    if constexpr (kFades) {
      this->fade(g, chunk.decays.whole());
      FWP_UNROLL for (int t = kChunkBlocks; t-- > 0;) {
        Product faded[1];
        Factor left[1][kExact];
        unpack(d_read[t][0], faded[0]);
        this->fade_columns(t * kBlock, faded[0], [&](int s) { return chunk.decays.from_start(s); });
        this->split_writes(faded, left);
        this->template write<false>(g, left, chunk.query, t);
      }
    } else {
      this->template write<false>(g, d_read, chunk.query);
    }
  }

  // x += d times the block of scores.erase for the tokens t of d and s of x.
  FWP_DEVICE static void add_erased(const Scores& scores, int t, int s, const Factor (&d)[kExact], Product& x) {
    add_product<kExact>(x, d, [&](int m, Factor& right) { scores.erase[m].right(t * kBlock, s * kBlock, right); });
  }

  // Turn dU of block t into D. Also stores b E (or b V) in shared memory, and the terms of these columns in the gradients of
  // the rates.
  FWP_DEVICE void apply_rate(int t, const Stage& chunk, const Memory& memory, const Product& values,
                             Product& d_write) const {
    FWP_UNROLL for (int h = 0; h < 2; ++h)
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        const int token = t * kBlock + 8 * h + pair() + e;
        const float rate = chunk.rate[token];
        float of_rate = 0;
        FWP_UNROLL for (int r = 0; r < 2; ++r) {
          const int column = this->own_column() + line() + 8 * r;
          float& x = d_write[h][2 * r + e];
          const float written = values[h][2 * r + e];
          of_rate = fma(x, written, of_rate);
          memory.write.put(token, column, rate * written);
          x *= rate;
        }
        of_rate = sum_rows(of_rate);
        if (line() == 0) memory.d_rate[this->warp() * kChunkTokens + token] = of_rate;
      }
  }

  // The sum over all lanes that hold the same columns of a product.
  FWP_DEVICE static float sum_rows(float x) {
    FWP_UNROLL for (int distance = 4; distance < kWarp; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  }

  FWP_DEVICE void store_decay(const Memory& memory, int64_t n) const {
    if constexpr (kFades) {
      if (this->warp() > 0) return;
      const float found = memory.d_decay.find(memory.stages[n].decays, kRows / kBlock, this->warps);
      this->store_scalar(d_decay, n, this->begins(memory.starts[6], n) ? 0 : found);
    }
  }

  // <G, S> over this warp's columns.
  FWP_DEVICE void sum_state(const Memory& memory, const typename Pass::State& g) const {
    const StateBefore<kRows, kFades>& state = memory.state;
    const float* const first = state.exact + pair() * state.pitch + this->own_column() + line();
    float sum = 0;
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i)
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int e = 0; e < 2; ++e)
          FWP_UNROLL for (int r = 0; r < 2; ++r)
            sum = fma(g[i][h][2 * r + e], first[(i * kBlock + 8 * h + e) * state.pitch + 8 * r], sum);
    FWP_UNROLL for (int distance = 1; distance < kWarp; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane() == 0) memory.d_decay.of_state[this->warp()] = sum;
  }

  FWP_DEVICE static const Shared& writes(const Stage& chunk, const Memory& memory) {
    return kRates ? memory.write : chunk.value;
  }

  FWP_DEVICE void make_d_scores(const Stage& chunk, const Memory& memory) const {
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < 3; b += this->warps) {
      const int row = row_of_block(b), column = column_of_block(b);
      Product d_read, d_erase;
      this->template multiply_rows<1>(chunk.d_out, memory.d, writes(chunk, memory), this->block_columns(), row, column,
                                      d_read, d_erase);
      if constexpr (kFades) {
        put_decay_parts(chunk, memory, row, column, d_read, d_erase);
        this->fade_scores(chunk.decays, row, column, d_read);
        this->fade_scores(chunk.decays, row, column, d_erase);
      }
      const bool diagonal = row == column;
      for_pairs(d_read, [&](int t, int s, float x, float y) {
        if (diagonal) x = s <= t ? x : 0, y = s + 1 <= t ? y : 0;
        Scores::put<kOfTokens>(memory.scores.read, row + t, column + s, x, y);
      });
      if constexpr (kErases)
        for_pairs(d_erase, [&](int t, int s, float x, float y) {
          if (diagonal) x = s < t ? x : 0, y = s + 1 < t ? y : 0;
          Scores::put<kOfTokens>(memory.scores.erase, row + t, column + s, -x, -y);
        });
    }
  }

  // Stores the derivative of the loss in each product of two tokens, without the decays between them.
  FWP_DEVICE void put_decay_parts(const Stage& chunk, const Memory& memory, int row, int column, const Product& d_read,
                                  const Product& d_erase) const {
    Product read, erase;
    this->template multiply_rows<1>(chunk.query, chunk.key, chunk.key, kRows, row, column, read, erase);
    FWP_UNROLL for (int h = 0; h < 2; ++h)
      FWP_UNROLL for (int i = 0; i < 4; ++i) {
        const int t = row + line() + i / 2 * 8, s = column + 8 * h + pair() + i % 2;
        float part = d_read[h][i] * read[h][i];
        if constexpr (kErases) part = fma(-d_erase[h][i], erase[h][i], part);
        if (s < t) memory.d_decay.part(s, t) = part;
      }
  }

  // Wait for the state. Its copy was started before that of the next chunk, if there is one.
  FWP_DEVICE void wait_state(int64_t n) const {
    if (n > this->begin())
      wait_copies<1>();
    else
      wait_copies<0>();
  }

  // d_q and d_k of token block t, for 16 numbers from `first` on.
  FWP_DEVICE void give(int64_t n, int t, int first, const Stage& chunk, const Memory& memory) const {
    const Scores& scores = memory.scores;  // dP and dA by now
    const int row = t * kBlock;
    Product of_query, of_key, erased;
    clear(of_query);
    clear(of_key);
    clear(erased);
    Factor left, right;
    FWP_UNROLL_BY(1) for (int j = 0; j < this->block_columns(); j += kBlock) {
      Factor state[StateBefore<kRows, kFades>::kParts];
      memory.state.right(j, first, state);
      chunk.d_out.left(row, j, left);
      multiply(of_query, left, state);
      if constexpr (kErases) {
        memory.d.left(row, j, left);
        multiply(erased, left, state);
      }
      memory.g.right(j, first, right);
      writes(chunk, memory).left(row, j, left);
      multiply(of_key, left, right);
    }
    if constexpr (kFades) {
      const Decays& decays = chunk.decays;
      sum_columns(of_query, erased, of_key, t, first, chunk, memory.d_decay);
      fade_rows(row, of_query, [&](int t) { return decays.from_start(t); });
      fade_rows(row, erased, [&](int t) { return decays.from_start(t); });
      fade_rows(row, of_key, [&](int t) { return decays.to_end(t); });
    }
    FWP_UNROLL for (int s = 0; s < kChunkBlocks; ++s) {
      Factor key, query;
      chunk.key.right(s * kBlock, first, key);
      chunk.query.right(s * kBlock, first, query);
      FWP_UNROLL for (int m = kOfTokens; m-- > 0;) {
        if (s <= t) {
          scores.read[m].left(row, s * kBlock, left);
          multiply(of_query, left, key);
          if constexpr (kErases) {
            scores.erase[m].left(row, s * kBlock, left);
            multiply(of_key, left, key);
          }
        }
        if (s >= t) {
          scores.read[m].left_transposed(s * kBlock, row, left);
          multiply(of_key, left, query);
          if constexpr (kErases) {
            scores.erase[m].left_transposed(s * kBlock, row, left);
            multiply(of_key, left, key);
          }
        }
      }
    }
    if constexpr (kErases) subtract(of_key, erased);
    store_keys(d_q, n, row, first, of_query);
    store_keys(d_k, n, row, first, of_key);
  }

  template <typename Of>
  FWP_DEVICE static void fade_rows(int first, Product& x, Of fades) {
    for_elements(x, [&](int t, int, float& number) { number *= fades(first + t); });
  }

  // For token block t and 16 numbers of the key from `first` on: q dQ - k dK where a token reads, k dK where it writes.
  FWP_DEVICE static void sum_columns(const Product& of_query, const Product& erased, const Product& of_key, int t, int first,
                                     const Stage& chunk, const DecayGradient& to) {
    FWP_UNROLL for (int r = 0; r < 2; ++r) {
      const int token = t * kBlock + line() + 8 * r;
      float reads = 0, writes = 0;
      FWP_UNROLL for (int h = 0; h < 2; ++h) {
        const uint32_t q = chunk.query.get(token, first + 8 * h + pair()), k = chunk.key.get(token, first + 8 * h + pair());
        const int i = 2 * r;
        reads = fma(low(q), of_query[h][i], fma(high(q), of_query[h][i + 1], reads));
        if constexpr (kErases) reads -= fma(low(k), erased[h][i], high(k) * erased[h][i + 1]);
        writes = fma(low(k), of_key[h][i], fma(high(k), of_key[h][i + 1], writes));
      }
      FWP_UNROLL for (int distance = 1; distance < 4; distance *= 2) {
        reads += __shfl_xor_sync(0xffffffffu, reads, distance);
        writes += __shfl_xor_sync(0xffffffffu, writes, distance);
      }
      if (pair() > 0) continue;
      to.of_reads[first / kBlock * kChunkTokens + token] = reads;
      to.of_writes[first / kBlock * kChunkTokens + token] = writes;
    }
  }

  FWP_DEVICE void store_keys(const Output& to, int64_t n, int row, int first, Product& x) const {
    if (!to.data) return;
    Bfloat16* const data = static_cast<Bfloat16*>(to.data) + this->first_token(n) * this->size.rows;
    const int tokens = this->count(n);
    for_pairs(x, [&](int t, int i, float a, float b) {
      const int token = row + t, at = first + i;
      if (token >= tokens || at >= this->size.rows) return;
      Bfloat16* const target = data + token * this->size.rows + at;
      if (this->size.rows % 2 == 0) {
        *reinterpret_cast<uint32_t*>(target) = pair_of(a, b);
      } else {
        round_to(a, target[0]);
        if (at + 1 < this->size.rows) round_to(b, target[1]);
      }
    });
  }
};

}  // namespace fwp::cuda
