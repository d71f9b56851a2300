// The states of rules with decays by key, from chunk to chunk, and what is read from them; chunk_keys.cuh has the equations. In
// reverse, the same pass has the gradient G of the state after a chunk, and D is the gradient of E (without erasing that of V):
//
//     D = P^T dO + (w b K) G - A^T D        dV = D        G before the chunk = f G + (c Q)^T dO - (c K)^T D
#pragma once

#include "chunk_key_scores.cuh"

namespace fwp::cuda {

// kEnds: compute only the ends of segments.
template <int kRows, bool kErases, bool kReverse, bool kEnds = false>
struct ChunkKeyStates : ChunkKeyPass<kRows, kErases> {
  using Pass = ChunkKeyPass<kRows, kErases>;
  using State = typename Pass::State;
  using Pass::kScoreParts;
  static constexpr bool kReads = !kReverse && !kEnds;           // out
  static constexpr bool kFinds = kReverse ? kErases || !kEnds : kErases;  // D, or what is erased
  static constexpr int kQueryParts = kReverse ? kExact : kReads ? kOfTokens : 0;
  static constexpr int kKeyParts = !kReverse || kErases ? kExact : kFinds ? kOfTokens : 0;
  static constexpr int kEraserParts = kErases ? kExact : 0;
  static constexpr int kParts = kErases ? kExact : 1;  // of a state that is read, and of a value: V and dO are exact in one

  Brought value;  // in reverse, the gradient of the outputs
  const Bfloat16* scores;
  Matrices<const float> initial;
  float *last, *kept;  // kept: the state after each whole chunk; in reverse, the gradient of the state after each chunk
  Output out;          // in reverse, dV
  float* error;        // E: (heads, tokens, columns)
  float* ends;         // (heads, segments, ends_columns(), kRows)

  struct Stage {
    KeyTokens<kRows> tokens;
    Shared value, scores[Pass::kScoreMatrices];

    FWP_BOTH Stage(Carver& carver, const ChunkKeyStates& pass)
        : tokens(carver), value(carver.matrix(kChunkTokens, pass.block_columns())) {
      FWP_UNROLL for (Shared& x : scores) x = carver.matrix(kChunkTokens, kChunkTokens);
    }
  };
  // Scaled tokens in parts: c Q, w b K and c K.
  struct Memory {
    const char** starts;
    Grouped<Bfloat16> query[kExact], key[kExact], eraser[kExact];
    float* whole;  // f
    Stages<Stage, ChunkKeyStates> stages;

    FWP_BOTH Memory(Carver& carver, const ChunkKeyStates& pass)
        : starts(carver.take<const char*>(6)), whole(carver.take<float>(kRows)), stages(carver, pass) {
      FWP_UNROLL for (int m = 0; m < kExact; ++m) {
        if (m < kQueryParts) query[m] = carver.grouped(kChunkTokens, kRows);
        if (m < kKeyParts) key[m] = carver.grouped(kChunkTokens, kRows);
        if (m < kEraserParts) eraser[m] = carver.grouped(kChunkTokens, kRows);
      }
    }
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    State state;
    kEnds ? this->load_transition(state) : this->load(initial, state);
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
      use(n, chunk, memory, state);
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
    if constexpr (kReads || kFinds) bring_scores(n, to);
    commit_copies();
    return this->ask(memory.starts[3], memory.starts[5], n);
  }
  FWP_DEVICE void bring_scores(int64_t n, const Stage& to) const {
    constexpr int per_piece = 8, of_row = kChunkTokens / per_piece, first = kReads || kReverse ? 0 : kScoreParts;
    const Bfloat16* const from = scores + (this->head() * this->chunks() + n) * Pass::kScoreMatrices * kMatrix;
    FWP_UNROLL for (int m = first; m < Pass::kScoreMatrices; ++m)
      FWP_UNROLL_BY(1) for (int at = int(threadIdx.x); at < kMatrix / per_piece; at += this->warps * kWarp)
        copy_later(to.scores[m].at(at / of_row, at % of_row * per_piece), from + m * kMatrix + at * per_piece, true);
  }

  // The warps share the numbers of a key.
  FWP_DEVICE void scale(const KeyTokens<kRows>& tokens, const Memory& memory) const {
    FWP_UNROLL_BY(1) for (int first = this->own_column(); first < kRows; first += this->block_columns()) {
      KeySlice keys;
      this->load_slice(tokens, first, keys);
      const DecayProducts<kChunkTokens / kSpan> products(keys);
      const int i = first + own_number();
      const auto scaled = [&](const KeyNumbers& x, const KeyNumbers& by, KeyNumbers& to) {
        for_numbers([&](int t, int e) { to[t][e] = by[t][e] * x[t][e]; });
      };
      KeyNumbers x;
      scaled(keys.query, products.from_start, x);
      put_scaled_tokens<kQueryParts, kReverse>(x, i, memory.query);
      scaled(keys.key, products.to_end, x);
      put_scaled_tokens<kKeyParts, !kReverse>(x, i, memory.key);
      if constexpr (kErases) {
        KeyNumbers eraser;
        this->load_readers(tokens.key, first, eraser);
        scaled(eraser, products.from_start, x);
        put_scaled_tokens<kEraserParts, false>(x, i, memory.eraser);
      }
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        const float whole = keys.product(e);
        if (group() == 0) memory.whole[i + e] = whole;
      }
    }
  }

  // kWrites: without erasing, the first parts of all tokens are multiples of one number (see grid_of), because nothing corrects
  // the errors of what is written.
  template <int parts, bool kWrites>
  FWP_DEVICE static void put_scaled_tokens(const KeyNumbers& x, int i, const Grouped<Bfloat16> (&to)[kExact]) {
    if constexpr (parts > 0) {
      float grid[2];
      FWP_UNROLL for (int e = 0; e < 2 && kWrites && !kErases; ++e) {
        float greatest = 0;
        FWP_UNROLL for (int t = 0; t < kSpan; ++t) greatest = fmaxf(greatest, fabsf(x[t][e]));
        FWP_UNROLL for (int distance = kSpan; distance < kWarp; distance *= 2)
          greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
        grid[e] = grid_of(greatest);
      }
      FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
        uint32_t of_pair[parts];
        if constexpr (kWrites && !kErases)
          split(x[t][0], x[t][1], of_pair, grid[0], grid[1]);
        else
          split(x[t][0], x[t][1], of_pair);
        FWP_UNROLL for (int m = 0; m < parts; ++m) to[m].put(own_token(t), i, of_pair[m]);
      }
    }
  }

  FWP_DEVICE void use(int64_t n, const Stage& chunk, const Memory& memory, State& state) const {
    Product read[kChunkBlocks], found[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(read[t]), clear(found[t]);
    read_state(memory, state, read, found);
    Factor value[kChunkBlocks][1], write[kChunkBlocks][kParts];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      chunk.value.left_transposed(t * kBlock, this->own_column(), value[t][0]);
    if constexpr (kReverse && kFinds) {
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
        FWP_UNROLL for (int s = t; s < kChunkBlocks; ++s)
          multiply<kScoreParts>(found[t], value[s], [&](int m, Factor& right) {
            chunk.scores[m].right(s * kBlock, t * kBlock, right);
          });
    }
    if constexpr (kErases) {
      if constexpr (!kReverse) {
        FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
          Product values;
          unpack(value[t][0], values);
          subtract_from(values, found[t]);
        }
      }
      solve(chunk, found, write);
    } else {
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
        FWP_UNROLL for (int i = 0; i < 4; ++i) write[t][0][i] = value[t][0][i];
    }
    if constexpr (kReads) {
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
        FWP_UNROLL for (int s = 0; s <= t; ++s)
          multiply<kOfTokens>(read[t], greatest<(kErases ? kOfTokens : 1)>(write[s]), [&](int m, Factor& right) {
            chunk.scores[m].right_transposed(t * kBlock, s * kBlock, right);
          });
      if constexpr (kErases)
        FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) this->store_errors(error, n, t, found[t]);
    }
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      for_elements(state[i], [&](int, int r, float& x) { x *= memory.whole[i * kBlock + r]; });
      if constexpr (kReverse) {
        add_write<kQueryParts, false>(value, memory.query, i, state[i]);
        if constexpr (kErases) add_write<kEraserParts, true>(write, memory.eraser, i, state[i]);
      } else {
        add_write<kKeyParts, false>(write, memory.key, i, state[i]);
      }
    }
    if constexpr (!kEnds) this->store_results(out, n, kReverse ? found : read, chunk.value);
  }

  // read += (c Q S)^T; found += (c K S)^T, or in reverse (w b K G)^T.
  FWP_DEVICE static void read_state(const Memory& memory, const State& state, Product (&read)[kChunkBlocks],
                                    Product (&found)[kChunkBlocks]) {
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      Factor of_state[kParts];
      split(state[i], of_state);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        if constexpr (kReads)
          multiply<kQueryParts>(read[t], greatest<1>(of_state), [&](int m, Factor& right) {
            memory.query[m].right_transposed(t * kBlock, i * kBlock, right);
          });
        if constexpr (kFinds)
          multiply<(kReverse ? kKeyParts : kEraserParts)>(found[t], of_state, [&](int m, Factor& right) {
            (kReverse ? memory.key : memory.eraser)[m].right_transposed(t * kBlock, i * kBlock, right);
          });
      }
    }
  }

  // x, without the term of A, becomes E or D, also in parts. E begins with the first tokens, D with the last ones.
  FWP_DEVICE static void solve(const Stage& chunk, Product (&x)[kChunkBlocks], Factor (&parts)[kChunkBlocks][kParts]) {
    const auto add_erased = [&](int from, int to) {
      add_product<kExact>(x[to], parts[from], [&](int m, Factor& right) {
        const Shared& erase = chunk.scores[kScoreParts + m];
        kReverse ? erase.right(from * kBlock, to * kBlock, right)
                 : erase.right_transposed(to * kBlock, from * kBlock, right);
      });
    };
    FWP_UNROLL for (int i = 0; i < kChunkBlocks; ++i) {
      const int t = kReverse ? kChunkBlocks - 1 - i : i;
      split(x[t], parts[t]);
      add_erased(t, t);
      split(x[t], parts[t]);
      if (i + 1 < kChunkBlocks) add_erased(t, kReverse ? t - 1 : t + 1);
    }
  }

  // state += (or -=) the columns of 32 tokens times the rows of those tokens. Small parts are added first.
  template <int of_rows, bool minus, int of_columns>
  FWP_DEVICE static void add_write(const Factor (&columns)[kChunkBlocks][of_columns], const Grouped<Bfloat16> (&rows)[kExact],
                                   int i, Product& state) {
    constexpr int most = of_rows > of_columns ? of_rows : of_columns;
    Product product;
    clear(product);
    FWP_UNROLL for (int m = of_rows; m-- > 0;) {
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        Factor right;
        rows[m].right(t * kBlock, i * kBlock, right);
        FWP_UNROLL for (int k = of_columns; k-- > 0;)
          if (k + m < most) multiply(product, columns[t][k], right);
      }
      if (m > int(!kErases)) continue;
      minus ? subtract(state, product) : add(state, product);
      clear(product);
    }
  }
};

}  // namespace fwp::cuda
