// The states of rules with decays by key, from chunk to chunk, and what is read from them; chunk_keys.cuh has the equations. In
// reverse, the same pass has the gradient G of the state after a chunk, and reads with the keys what the queries have written:
//
//     dV = (w b K) G + P^T dO        G before the chunk = f G + (c Q)^T dO
#pragma once

#include "chunk_key_scores.cuh"

namespace fwp::cuda {

// kEnds: compute only the ends of segments.
template <int kRows, bool kReverse, bool kEnds = false>
struct ChunkKeyStates : ChunkKeyPass<kRows> {
  using Pass = ChunkKeyPass<kRows>;
  using State = typename Pass::State;

  Brought value;  // in reverse, the gradient of the outputs
  const Bfloat16* scores;
  Matrices<const float> initial;
  float *last, *kept;  // kept: the state after each whole chunk; in reverse, the gradient of the state after each chunk
  Output out;
  float* ends;  // (heads, segments, ends_columns(), kRows)

  struct Stage {
    KeyTokens<kRows> tokens;
    Shared value, scores[kOfTokens];

    FWP_BOTH Stage(Carver& carver, const ChunkKeyStates& pass)
        : tokens(carver), value(carver.matrix(kChunkTokens, pass.block_columns())) {
      FWP_UNROLL for (Shared& x : scores) x = carver.matrix(kEnds ? 0 : kChunkTokens, kChunkTokens);
    }
  };
  struct Memory {
    const char** starts;
    Grouped<Bfloat16> reads[kOfTokens], writes[kExact];  // c Q and w b K in parts; in reverse, the other way around
    float* whole;                             // f
    Stages<Stage, ChunkKeyStates> stages;

    FWP_BOTH Memory(Carver& carver, const ChunkKeyStates& pass)
        : starts(carver.take<const char*>(6)), whole(carver.take<float>(kRows)), stages(carver, pass) {
      FWP_UNROLL for (Grouped<Bfloat16>& x : reads) x = carver.grouped(kEnds ? 0 : kChunkTokens, kRows);
      FWP_UNROLL for (Grouped<Bfloat16>& x : writes) x = carver.grouped(kChunkTokens, kRows);
    }
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    State state;
    if constexpr (kEnds)
      this->for_state(state, [&](bool, int, int column, float& x) { x = column == this->value_columns() ? 1 : 0; });
    else
      this->load(initial, state);
    this->put_starts({&this->query, &this->key, &this->decay, &this->rate, &value}, memory.starts);
    const int64_t begin = this->begin(), end = this->end(), step = kReverse ? -1 : 1;
    int64_t n = kReverse ? end - 1 : begin;
    Scalars next = fill(memory, n);
    for (int64_t left = end - begin; left > 0; --left, n += step) {
      const Stage chunk = memory.stages[n];
      this->put_scalars(next, chunk.tokens);
      wait_copies<0>();
      // From here on, this chunk may be used and the other stage may be filled.
      __syncthreads();
      if (left > 1) next = fill(memory, n + step);
      if (kReverse && !kEnds) this->store(state, kept, this->head() * this->chunks() + n);
      scale(chunk.tokens, memory);
      __syncthreads();
      Product read[kChunkBlocks];
      if constexpr (!kEnds) read_state(chunk, memory, state, read);
      write(chunk, memory, state);
      if constexpr (!kEnds) this->store_results(out, n, read, chunk.value);
      if (!kReverse && !kEnds && this->count(n) == kChunkTokens)
        this->store(state, kept, this->head() * (this->size.length / kChunkTokens) + n);
    }
    if constexpr (kEnds)
      this->store_ends(state, ends, this->ends_columns());
    else if (kReverse ? begin == 0 : end == this->chunks())
      this->store(state, last, this->head());
  }

 private:
  FWP_DEVICE Scalars fill(const Memory& memory, int64_t n) const {
    const Stage to = memory.stages[n];
    this->bring_tokens(memory.starts, n, to.tokens);
    this->bring_values(value, memory.starts[4], n, to.value);
    if constexpr (!kEnds) bring_scores(n, to);
    commit_copies();
    return this->ask(memory.starts[3], memory.starts[5], n);
  }
  FWP_DEVICE void bring_scores(int64_t n, const Stage& to) const {
    constexpr int per_piece = 8, of_row = kChunkTokens / per_piece, of_part = kChunkTokens * of_row;
    const Bfloat16* const from = scores + (this->head() * this->chunks() + n) * kScores;
    FWP_UNROLL for (int m = 0; m < kOfTokens; ++m)
      FWP_UNROLL_BY(1) for (int at = int(threadIdx.x); at < of_part; at += this->warps * kWarp)
        copy_later(to.scores[m].at(at / of_row, at % of_row * per_piece), from + (m * of_part + at) * per_piece, true);
  }

  // The tokens, scaled for products with the state. The warps share the numbers of a key.
  FWP_DEVICE void scale(const KeyTokens<kRows>& tokens, const Memory& memory) const {
    FWP_UNROLL_BY(1) for (int first = this->own_column(); first < kRows; first += this->block_columns()) {
      KeySlice keys;
      this->load_slice(tokens, first, keys);
      const DecayProducts<kChunkTokens / kSpan> products(keys);
      KeyNumbers query, key;
      for_numbers([&](int t, int e) {
        query[t][e] = products.from_start[t][e] * keys.query[t][e], key[t][e] = products.to_end[t][e] * keys.key[t][e];
      });
      const int i = first + own_number();
      if constexpr (!kEnds)
        FWP_UNROLL for (int t = 0; t < kSpan; ++t) put_parts(kReverse ? key[t] : query[t], memory.reads, own_token(t), i);
      put_writes(kReverse ? query : key, i, memory);
      FWP_UNROLL for (int e = 0; e < 2; ++e)
        if (group() == kChunkTokens / kSpan - 1) memory.whole[i + e] = products.from_start[kSpan - 1][e];
    }
  }

  // In parts. The first ones of all tokens are multiples of one number: see split_rows().
  FWP_DEVICE static void put_writes(const KeyNumbers& write, int i, const Memory& memory) {
    float grid[2];
    FWP_UNROLL for (int e = 0; e < 2; ++e) {
      float greatest = 0;
      FWP_UNROLL for (int t = 0; t < kSpan; ++t) greatest = fmaxf(greatest, fabsf(write[t][e]));
      FWP_UNROLL for (int distance = kSpan; distance < kWarp; distance *= 2)
        greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
      grid[e] = grid_of(greatest);
    }
    FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
      uint32_t of_pair[kExact];
      split(write[t][0], write[t][1], of_pair, grid[0], grid[1]);
      FWP_UNROLL for (int n = 0; n < kExact; ++n) memory.writes[n].put(own_token(t), i, of_pair[n]);
    }
  }

  // The transposed results for the columns of this warp.
  FWP_DEVICE void read_state(const Stage& chunk, const Memory& memory, const State& state,
                             Product (&read)[kChunkBlocks]) const {
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(read[t]);
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      Factor of_state[1];
      split(state[i], of_state);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
        multiply<kOfTokens>(read[t], of_state, [&](int n, Factor& right) {
          memory.reads[n].right_transposed(t * kBlock, i * kBlock, right);
        });
    }
    FWP_UNROLL for (int s = 0; s < kChunkBlocks; ++s) {
      Factor value[1];
      chunk.value.left_transposed(s * kBlock, this->own_column(), value[0]);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
        if (kReverse ? t <= s : t >= s)
          multiply<kOfTokens>(read[t], value, [&](int n, Factor& right) {
            kReverse ? chunk.scores[n].right(s * kBlock, t * kBlock, right)
                     : chunk.scores[n].right_transposed(t * kBlock, s * kBlock, right);
          });
    }
  }

  FWP_DEVICE void write(const Stage& chunk, const Memory& memory, State& state) const {
    Factor value[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      chunk.value.left_transposed(t * kBlock, this->own_column(), value[t]);
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      Product first, rest;
      clear(first);
      clear(rest);
      FWP_UNROLL for (int n = kExact; n-- > 0;)
        FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
          Factor right;
          memory.writes[n].right(t * kBlock, i * kBlock, right);
          multiply(n > 0 ? rest : first, value[t], right);
        }
      for_elements(state[i], [&](int, int r, float& x) { x *= memory.whole[i * kBlock + r]; });
      add(state[i], rest);
      add(state[i], first);
    }
  }
};

}  // namespace fwp::cuda
