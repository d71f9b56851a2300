// The backward pass of sum and the delta rule on the tensor cores, one chunk of chunks.cuh after the other, the last one first.
// With G the gradient of the state after the chunk, and D that of E (of the sum rule, of V):
//
//   dU = P^T dO + K G - A^T D      D = b dU           (of the sum rule D = dU)
//   dP = dO U^T up to its diagonal                    dA = -D U^T below it
//   dQ = dO S^T + dP K                                dV = D
//   dK = U G^T - D S^T + dP^T Q + (dA + dA^T) K       db = the sum over a token's row of dU * E
//   G += Q^T dO - K^T D
//
// The states before the chunks are made again first, from what the forward pass has written.
#pragma once

#include "chunks.cuh"

namespace fwp::cuda {

// States before each chunk, in bfloat16: (heads, chunks, columns, kRows), columns padded to a whole number of blocks.
template <int kRows, bool kErases>
struct ChunkStates : ChunkPass<kRows> {
  using Pass = ChunkPass<kRows>;
  using Value = std::conditional_t<kErases, float, Bfloat16>;  // errors, or values
  static constexpr int kParts = kErases ? kExact : 1;

  Brought value, rate;
  Matrices<const float> initial;
  Bfloat16* states;

  struct Stage {
    Shared key, value;
    float *error, *rate;

    FWP_BOTH Stage(Carver& carver, const ChunkStates& pass)
        : key(carver.matrix(kChunkTokens, kRows)), value(carver.matrix(kErases ? 0 : kChunkTokens, pass.block_columns())),
          error(carver.take<float>(kErases ? kChunkTokens * pass.error_line() : 0)),
          rate(carver.take<float>(kChunkTokens)) {}
  };
  struct Memory {
    const char** starts;
    Stages<Stage, ChunkStates> stages;

    FWP_BOTH Memory(Carver& carver, const ChunkStates& pass)
        : starts(carver.take<const char*>(3)), stages(carver, pass) {}
  };

  FWP_BOTH int error_line() const { return this->block_columns() + 4; }

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    typename Pass::State state;
    this->load(initial, state);
    this->put_starts({&this->key, &value, &rate}, {2, int(sizeof(Value)), 2}, memory.starts);
    float next_rate = fill(memory, 0);
    for (int64_t n = 0; n < this->chunks(); ++n) {
      put(state, n);
      const Stage chunk = memory.stages[n];
      if (kErases && int(threadIdx.x) < kChunkTokens) chunk.rate[threadIdx.x] = next_rate;
      wait_copies<0>();
      __syncthreads();
      if (n + 1 < this->chunks()) next_rate = fill(memory, n + 1);
      Factor write[kChunkBlocks][kParts];
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        if constexpr (kErases) {
          Product of_error;
          for_elements(of_error, [&](int j, int s, float& x) {
            const int token = t * kBlock + s;
            x = chunk.rate[token] * chunk.error[token * error_line() + this->own_column() + j];
          });
          split(of_error, write[t]);
        } else {
          chunk.value.left_transposed(t * kBlock, this->own_column(), write[t][0]);
        }
      }
      this->template write<false>(state, write, chunk.key);
    }
  }

 private:
  FWP_DEVICE float fill(const Memory& memory, int64_t n) const {
    const Stage to = memory.stages[n];
    this->bring_keys(this->key, memory.starts[0], n, to.key);
    if constexpr (kErases)
      this->bring_values(value, memory.starts[1], n, to.error, error_line());
    else
      this->bring_values(value, memory.starts[1], n, to.value);
    commit_copies();
    return kErases ? this->rate_of(rate, memory.starts[2], n) : 0;
  }

  FWP_DEVICE void put(typename Pass::State& state, int64_t n) const {
    const int64_t columns = int64_t(this->slabs) * this->block_columns();
    const int column = this->first_column() + this->own_column();
    const Shared to{states + ((this->head() * this->chunks() + n) * columns + column) * kRows, kRows};
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i)
      for_pairs(state[i], [&](int j, int r, float x, float y) { to.put(j, i * kBlock + r, pair_of(x, y)); });
  }
};

template <int kRows, bool kErases>
struct ChunkBackward : ChunkPass<kRows> {
  using Pass = ChunkPass<kRows>;
  using Value = std::conditional_t<kErases, float, Bfloat16>;
  static constexpr int kParts = kErases ? kExact : 1;

  Brought d_out, value, rate;  // of a rule that erases, errors in the place of values
  const Bfloat16* states;
  Matrices<const float> d_last;
  Matrices<float> d_initial;
  Output d_q, d_k, d_v, d_rate;

  struct Stage {
    Shared query, key, d_out, value;
    float *error, *rate;

    FWP_BOTH Stage(Carver& carver, const ChunkBackward& pass)
        : query(carver.matrix(kChunkTokens, kRows)), key(carver.matrix(kChunkTokens, kRows)),
          d_out(carver.matrix(kChunkTokens, pass.block_columns())),
          value(carver.matrix(kErases ? 0 : kChunkTokens, pass.block_columns())),
          error(carver.take<float>(kErases ? kChunkTokens * pass.error_line() : 0)),
          rate(carver.take<float>(kChunkTokens)) {}
  };
  struct Memory {
    const char** starts;
    Scores scores;    // later dP and dA, in the place of P and of A
    Shared state, g;  // of this chunk, transposed
    Shared write, d;  // U, where it is not V, and D
    float* d_rate;    // what each warp's columns add to it
    Stages<Stage, ChunkBackward> stages;

    FWP_BOTH Memory(Carver& carver, const ChunkBackward& pass)
        : starts(carver.take<const char*>(5)), scores(carver, kExact, kErases), state(carver.matrix(pass.block_columns(), kRows)),
          g(carver.matrix(pass.block_columns(), kRows)),
          write(carver.matrix(kErases ? kChunkTokens : 0, pass.block_columns())),
          d(carver.matrix(kChunkTokens, pass.block_columns())),
          d_rate(carver.take<float>(kErases ? pass.warps * kChunkTokens : 0)), stages(carver, pass) {}
  };

  FWP_BOTH int error_line() const { return this->block_columns() + 4; }

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    typename Pass::State g;
    this->load(d_last, g);
    const int64_t last = this->chunks() - 1;
    this->put_starts({&this->query, &this->key, &d_out, &value, &rate}, {2, 2, 2, int(sizeof(Value)), 2}, memory.starts);
    put_rate(memory, last, fill(memory, last));
    for (int64_t n = last; n >= 0; --n) {
      const Stage chunk = memory.stages[n];
      wait_copies<0>();
      // From here on this chunk may be used, and the other stage and the place of the state be filled.
      __syncthreads();
      fill_state(memory.state, n);
      const float next_rate = n > 0 ? fill(memory, n - 1) : 0;
      use(n, chunk, memory, next_rate, g);
    }
    this->store(g, d_initial);
  }

 private:
  FWP_DEVICE float fill(const Memory& memory, int64_t n) const {
    const Stage to = memory.stages[n];
    this->bring_keys(this->query, memory.starts[0], n, to.query);
    this->bring_keys(this->key, memory.starts[1], n, to.key);
    this->bring_values(d_out, memory.starts[2], n, to.d_out);
    if constexpr (kErases)
      this->bring_values(value, memory.starts[3], n, to.error, error_line());
    else
      this->bring_values(value, memory.starts[3], n, to.value);
    commit_copies();
    return kErases ? this->rate_of(rate, memory.starts[4], n) : 0;
  }

  FWP_DEVICE void fill_state(const Shared& to, int64_t n) const {
    constexpr int per_piece = 8, pieces = kRows / per_piece;
    const Bfloat16* const from = states + (this->head() * this->chunks() + n) * this->block_columns() * kRows;
    FWP_UNROLL_BY(1) for (int at = int(threadIdx.x); at < this->block_columns() * pieces; at += this->warps * kWarp)
      copy_later(to.at(at / pieces, at % pieces * per_piece), from + at * per_piece, true);
    commit_copies();
  }

  FWP_DEVICE void put_rate(const Memory& memory, int64_t n, float x) const {
    if (kErases && int(threadIdx.x) < kChunkTokens) memory.stages[n].rate[threadIdx.x] = x;
  }

  FWP_DEVICE void use(int64_t n, const Stage& chunk, const Memory& memory, float next_rate, typename Pass::State& g) const {
    const Scores& scores = memory.scores;
    this->template make_scores<kExact, kErases>(chunk.query, chunk.key, scores,
                                                [&](int t, int, float x) { return chunk.rate[t] * x; });
    // By columns: the transposes of dU and D, and the gradient of the state before.
    Product d_write[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(d_write[t]);
    read_g(g, chunk, memory.g, d_write);
    put_rate(memory, n + 1, next_rate);  // into the other stage, that of chunk n - 1
    __syncthreads();  // for the scores
    Factor d_read[kChunkBlocks][1];
    FWP_UNROLL for (int s = 0; s < kChunkBlocks; ++s) {
      chunk.d_out.left_transposed(s * kBlock, this->own_column(), d_read[s][0]);
      FWP_UNROLL for (int t = 0; t <= s; ++t)
        multiply<kExact>(d_write[t], d_read[s],
                         [&](int m, Factor& right) { scores.read[m].right(s * kBlock, t * kBlock, right); });
    }
    this->template write<false>(g, d_read, chunk.query);
    FWP_UNROLL for (int t = kChunkBlocks; t-- > 0;) {
      if constexpr (kErases) {
        solve(t, chunk, memory, d_write[t]);
        Factor d[1][kExact];
        split(d_write[t], d[0]);
        FWP_UNROLL for (int s = 0; s < t; ++s) add_erased(scores, t, s, d[0], d_write[s]);
        this->template write<true>(g, d, chunk.key, t);
      }
      for_elements(d_write[t], [&](int j, int s, float x) { memory.d.put(t * kBlock + s, this->own_column() + j, x); });
    }
    // By tokens: what sums over all columns.
    __syncthreads();
    this->store_tokens(d_v, n, memory.d, 0, this->block_columns(), int(threadIdx.x), this->warps * kWarp);
    if constexpr (kErases) store_rate(n, memory.d_rate);
    make_d_scores(chunk, memory);
    wait_state(n);
    __syncthreads();
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < kChunkBlocks * kRows / kBlock; b += this->warps)
      give(n, b % kChunkBlocks, b / kChunkBlocks * kBlock, chunk, memory);
  }

  // d_write += G^T K^T, and G to shared memory.
  FWP_DEVICE void read_g(typename Pass::State& g, const Stage& chunk, const Shared& to,
                         Product (&d_write)[kChunkBlocks]) const {
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      Factor of_g[kParts];
      split(g[i], of_g);
      for_pairs(g[i], [&](int j, int r, float x, float y) {
        to.put(this->own_column() + j, i * kBlock + r, pair_of(x, y));
      });
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
        multiply<1>(d_write[t], of_g,
                    [&](int, Factor& key) { chunk.key.right_transposed(t * kBlock, i * kBlock, key); });
    }
  }

  // x += d times what scores.erase has for the tokens t of d and s of x.
  FWP_DEVICE static void add_erased(const Scores& scores, int t, int s, const Factor (&d)[kExact], Product& x) {
    add_product<kExact>(x, d, [&](int m, Factor& right) { scores.erase[m].right(t * kBlock, s * kBlock, right); });
  }

  // From dU of block t without what its own tokens erase, all of it and then D; U to shared memory.
  FWP_DEVICE void solve(int t, const Stage& chunk, const Memory& memory, Product& d_write) const {
    Factor left[kExact];
    split(d_write, left);
    add_erased(memory.scores, t, t, left, d_write);
    FWP_UNROLL for (int h = 0; h < 2; ++h)
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        const int token = t * kBlock + 8 * h + pair() + e;
        const float rate = chunk.rate[token];
        float of_rate = 0;
        FWP_UNROLL for (int r = 0; r < 2; ++r) {
          const int column = this->own_column() + line() + 8 * r;
          float& x = d_write[h][2 * r + e];
          const float error = chunk.error[token * error_line() + column];
          of_rate = fma(x, error, of_rate);
          memory.write.put(token, column, rate * error);
          x *= rate;
        }
        of_rate = sum_rows(of_rate);
        if (line() == 0) memory.d_rate[this->warp() * kChunkTokens + token] = of_rate;
      }
  }

  // Over the lanes that have the same columns of a product.
  FWP_DEVICE static float sum_rows(float x) {
    FWP_UNROLL for (int distance = 4; distance < kWarp; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  }

  FWP_DEVICE void store_rate(int64_t n, const float* parts) const {
    const int t = int(threadIdx.x);
    if (!d_rate.data || t >= this->count(n)) return;
    float sum = 0;
    FWP_UNROLL_BY(1) for (int w = 0; w < this->warps; ++w) sum += parts[w * kChunkTokens + t];
    round_to(sum, static_cast<Bfloat16*>(d_rate.data)[this->token(n, t)]);
  }

  FWP_DEVICE static const Shared& writes(const Stage& chunk, const Memory& memory) {
    return kErases ? memory.write : chunk.value;
  }

  FWP_DEVICE void make_d_scores(const Stage& chunk, const Memory& memory) const {
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < 3; b += this->warps) {
      const int row = b > 0 ? kBlock : 0, column = b == 1 ? kBlock : 0;
      Product d_read, d_erase;
      clear(d_read);
      clear(d_erase);
      FWP_UNROLL_BY(1) for (int j = 0; j < this->block_columns(); j += kBlock) {
        Factor left, right;
        writes(chunk, memory).right_transposed(column, j, right);
        chunk.d_out.left(row, j, left);
        multiply(d_read, left, right);
        if constexpr (kErases) {
          memory.d.left(row, j, left);
          multiply(d_erase, left, right);
        }
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

  // The copy of the state is older than that of the next chunk, where there is one.
  FWP_DEVICE static void wait_state(int64_t n) {
    if (n > 0)
      wait_copies<1>();
    else
      wait_copies<0>();
  }

  // d_q and d_k, of block t of the tokens and 16 numbers from `first` on.
  FWP_DEVICE void give(int64_t n, int t, int first, const Stage& chunk, const Memory& memory) const {
    const Scores& scores = memory.scores;  // dP and dA by now
    const int row = t * kBlock;
    Product of_query, of_key, erased;
    clear(of_query);
    clear(of_key);
    clear(erased);
    Factor left, right;
    FWP_UNROLL_BY(1) for (int j = 0; j < this->block_columns(); j += kBlock) {
      memory.state.right(j, first, right);
      chunk.d_out.left(row, j, left);
      multiply(of_query, left, right);
      if constexpr (kErases) {
        memory.d.left(row, j, left);
        multiply(erased, left, right);
      }
      memory.g.right(j, first, right);
      writes(chunk, memory).left(row, j, left);
      multiply(of_key, left, right);
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

  FWP_DEVICE void store_keys(const Output& to, int64_t n, int row, int first, Product& x) const {
    Bfloat16* const data = static_cast<Bfloat16*>(to.data);
    if (!data) return;
    for_pairs(x, [&](int t, int i, float a, float b) {
      const int token = row + t, at = first + i;
      if (token >= this->count(n) || at >= this->size.rows) return;
      Bfloat16* const target = data + this->token(n, token) * this->size.rows + at;
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
