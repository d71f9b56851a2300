// The states of rules with decays by key, from chunk to chunk, and what is read from them; chunk_keys.cuh has the equations. In
// reverse, the same pass has the gradient G of the state after a chunk, and D is the gradient of E:
//
//     gla, gated delta   D = P^T d_out + (w B) G - A^T D   d_V = D     G before the chunk = c_C G + (c Q)^T d_out - (c K)^T D
//     removal            D = X^T d_out + (w x) G - Y^T D   d_V = P^T d_out + (w B) G - R^T D
//                                                          G before the chunk = c_C G + (c Q)^T d_out - (c- y)^T D
//
// Where values fade, V and d_out do on their way into the state and its gradient, and d_V is computed with the other gradients.
#pragma once

#include "chunk_key_scores.cuh"
#include "relay.cuh"

namespace fwp::cuda {

template <bool kFirst, typename First, typename Second>
FWP_DEVICE const auto& either(const First& first, const Second& second) {
  if constexpr (kFirst) return first;
  else return second;
}

// Scaled tokens of a chunk, in so many parts. kAligned: the first parts of all are multiples of one number (see grid_of).
template <int kParts, bool kAligned>
struct ScaledTokens {
  Grouped<Bfloat16> part[kExactParts];

  FWP_BOTH void take(Carver& carver, int rows, int m) {
    if (m < kParts) part[m] = carver.grouped(kChunkTokens, rows);
  }
  // The numbers i and i + 1 of this lane's tokens.
  FWP_DEVICE void put(const KeyNumbers& x, int i) const {
    if constexpr (kParts > 0) {
      float grid[2];
      FWP_UNROLL for (int e = 0; e < 2 && kAligned; ++e) {
        float greatest = 0;
        FWP_UNROLL for (int t = 0; t < kSpan; ++t) greatest = fmaxf(greatest, fabsf(x[t][e]));
        FWP_UNROLL for (int distance = kSpan; distance < kWarp; distance *= 2)
          greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
        grid[e] = grid_of(greatest);
      }
      FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
        uint32_t of_pair[kParts];
        if constexpr (kAligned)
          split(x[t][0], x[t][1], of_pair, grid[0], grid[1]);
        else
          split(x[t][0], x[t][1], of_pair);
        FWP_UNROLL for (int m = 0; m < kParts; ++m) part[m].put(own_token(t), i, of_pair[m]);
      }
    }
  }
};

template <int kRows, Rule kRule, int kInputParts, bool kReverse>
struct ChunkKeyStates : ChunkKeyPass<kRows, kRule, kInputParts> {
  using Base = ChunkKeyPass<kRows, kRule, kInputParts>;
  using State = typename Base::State;
  using Turns = Relay<kRows, Base::kMostTeams>;
  using Base::kErasesKey, Base::kRemoves, Base::kSolves, Base::kFadesValues, Base::kResultParts;
  static constexpr bool kReads = !kReverse || kRemoves;                   // out, or d_V next to D
  static constexpr bool kFinds = kSolves || (kReverse && !kFadesValues);  // D, or what E takes away
  static constexpr bool kOnlyState = kReverse && kFadesValues;            // d_V is computed with the other gradients
  static constexpr bool kAligned = !kErasesKey;  // what is written under keys: nothing corrects its errors
  static constexpr int kStateParts = kSolves ? kExactParts : kInputParts;  // of a state that is read

  Brought value;        // in reverse, the gradient of the outputs
  Brought value_decay;  // z
  const Bfloat16* scores;
  Matrices<const float> initial;
  float *final, *kept;  // kept: the state after each whole chunk; in reverse, the gradient of the state after each chunk
  OutputArray out;        // in reverse, d_V
  OutputArray d_removed;  // D of a removal
  float* error;           // (heads, tokens, columns): E, or of a removal what y retrieves
  float* ends;            // if given, only the ends of segments are computed: see store_ends()

  struct Stage {
    ValueTile<kInputParts> value;
    TokenVectors<HalfOf<kInputParts>> value_decay;
    Shared scores[Base::kScoreMatrices];

    FWP_BOTH Stage(Carver& carver, const ChunkKeyStates& pass)
        : value(carver, kChunkTokens, pass.block_columns(), pass.value.type),
          value_decay(carver, kFadesValues ? kChunkTokens : 0, pass.block_columns(), pass.value_decay.type) {
      FWP_UNROLL for (int m = 0; m < Base::kScoreMatrices && !kOnlyState; ++m)
        scores[m] = carver.matrix(kChunkTokens, kChunkTokens);
    }
    // P, or X of a removal: what is read of E.
    FWP_DEVICE const Shared* of_errors() const { return scores + (kRemoves ? Base::kReadRemoved : 0); }
  };
  struct OfTeam {
    ScaledTokens<kReverse ? kExactParts : kResultParts, kReverse && kAligned> query;  // c Q
    ScaledTokens<!kReverse || kErasesKey ? kExactParts : kOnlyState ? 0 : kResultParts, !kReverse && kAligned> key;  // w K
    ScaledTokens<kSolves ? kExactParts : 0, false> eraser;    // c K or c- y
    ScaledTokens<kRemoves ? kExactParts : 0, false> removal;  // w x
    float* total;                        // c_C
    WarpScratch<kResultParts>* scratch;  // of each warp, to exchange numbers
    typename Base::SharedTokens tokens;
    Stages<Stage, ChunkKeyStates> stages;

    FWP_BOTH OfTeam(Carver& carver, const ChunkKeyStates& pass)
        : total(carver.take<float>(kRows)),
          scratch(carver.take<WarpScratch<kResultParts>>(kFadesValues ? pass.warps : 0)), tokens(pass.take_tokens(carver)),
          stages(carver, pass) {
      FWP_UNROLL for (int m = 0; m < kExactParts; ++m) {
        if constexpr (kRemoves) {  // what reads and what writes take turns
          query.part[m] = key.part[m] = carver.grouped(kChunkTokens, kRows);
          eraser.part[m] = removal.part[m] = carver.grouped(kChunkTokens, kRows);
        } else {
          query.take(carver, kRows, m), key.take(carver, kRows, m), eraser.take(carver, kRows, m);
        }
      }
    }
    // What these tokens do with the state: one reads results, one what D or E needs, one writes values or errors, one removes.
    FWP_DEVICE const auto& reader() const { return either<kReverse>(key, query); }
    FWP_DEVICE const auto& finder() const { return either<kReverse>(either<kRemoves>(removal, key), eraser); }
    FWP_DEVICE const auto& writer() const { return either<kReverse>(query, key); }
    FWP_DEVICE const auto& remover() const { return either<kReverse>(eraser, removal); }
  };
  struct Memory {
    const char** starts;
    Turns relay;
    Copies<OfTeam, ChunkKeyStates> of_teams;

    FWP_BOTH Memory(Carver& carver, const ChunkKeyStates& pass)
        : starts(carver.take<const char*>(Base::kOwnStarts + 3)), relay(carver, pass.warps, pass.teams),
          of_teams(carver, pass, pass.teams) {}
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    const Turns& relay = memory.relay;
    const int team = this->team();
    const OfTeam own = memory.of_teams[team];
    State state;
    Base::kHasSegments && !kReverse && ends ? this->load_transition(state) : this->load(initial, state);
    if (kReverse && team == 0) this->store(state, kept, this->head() * this->chunks() + chunk_of(0));
    this->put_starts(memory.starts, value, value_decay);
    const int chunks = int(this->end() - this->begin());
    Scalars next;
    if (team < chunks) next = fill(memory.starts, own, 0, chunk_of(team));
    for (int i = team, of_team = 0; i < chunks; i += this->teams, ++of_team) {
      if (this->warp() == 0) this->put_scalars(next, own.tokens);
      wait_copies<0>();
      relay.wait_for_team(team);
      scale<true, !kRemoves>(own.tokens, own);
      relay.wait_for_team(team);
      // From here on, the scaled tokens and this stage may be used, and the other stage may be filled; so may the tokens,
      // when all are scaled.
      const auto fill_next = [&] {
        if (i + this->teams < chunks) next = fill(memory.starts, own, of_team + 1, chunk_of(i + this->teams));
      };
      if constexpr (!kRemoves) fill_next();
      run_chunk(i, own.stages[of_team], own, relay, state, [&] {
        if constexpr (!kRemoves) return;
        relay.wait_for_team(team);
        scale<false, true>(own.tokens, own);
        relay.wait_for_team(team);
        fill_next();
      });
    }
  }

 private:
  static constexpr int kValueStart = Base::kOwnStarts;

  // Chunk i of the segment, in the order of the pass.
  FWP_DEVICE int64_t chunk_of(int i) const { return kReverse ? this->end() - 1 - i : this->begin() + i; }

  FWP_DEVICE Scalars fill(const char* const* starts, const OfTeam& own, int of_team, int64_t n) const {
    const Stage to = own.stages[of_team];
    this->bring_tokens(starts, n, own.tokens, 0, this->thread(), this->warps * kWarp);
    to.value.typed([&](const auto& v) { this->bring_values(value, starts[kValueStart], n, v); });
    if constexpr (kFadesValues)
      to.value_decay.typed([&](const auto& z) { this->bring_values(value_decay, starts[kValueStart + 1], n, z); });
    bring_scores(n, to);
    commit_copies();
    return this->ask(starts, starts[kValueStart + 2], n, this->thread());
  }
  FWP_DEVICE void bring_scores(int64_t n, const Stage& to) const {
    constexpr int per_piece = 8, of_row = kChunkTokens / per_piece;
    if (kOnlyState || !scores) return;  // without scores only states are wanted
    const Bfloat16* const from = scores + (this->head() * this->chunks() + n) * Base::kScoreMatrices * kMatrix;
    FWP_UNROLL for (int m = 0; m < Base::kScoreMatrices; ++m)
      FWP_UNROLL_BY(1) for (int at = this->thread(); at < kMatrix / per_piece; at += this->warps * kWarp)
        copy_later(to.scores[m].at(at / of_row, at % of_row * per_piece), from + m * kMatrix + at * per_piece, true);
  }

  // What reads the state, what writes to it, or both. The warps share the numbers of a key.
  template <bool kReaders, bool kWriters>
  FWP_DEVICE void scale(const typename Base::SharedTokens& tokens, const OfTeam& memory) const {
    FWP_UNROLL_BY(1) for (int column = this->own_column(); column < kRows; column += this->block_columns()) {
      KeySlice keys;
      tokens.load_decays(column, keys);
      const DecayProducts<kChunkTokens / kSpan> products(keys);
      const int i = column + own_number();
      KeyNumbers x;
      constexpr bool kOfQueries = kReverse ? kWriters : kReaders, kOfKeys = kReverse ? kReaders : kWriters;
      if constexpr (kOfQueries) {
        tokens.query.load(column, x);
        multiply(x, products.from_start);
        memory.query.put(x, i);
      }
      if constexpr (kOfKeys) {
        tokens.load_keys(column, x);
        multiply(x, products.to_end);
        memory.key.put(x, i);
      }
      if constexpr (kErasesKey) {
        tokens.key.load(column, x);
        multiply(x, products.from_start);
        memory.eraser.put(x, i);
      }
      if constexpr (kRemoves && kOfQueries) {
        tokens.load_removal_keys(column, x);
        multiply(x, DecayProducts<kChunkTokens / kSpan, true>(keys).from_start);
        memory.eraser.put(x, i);
      }
      if constexpr (kRemoves && kOfKeys) {
        tokens.removal.load(column, x);
        multiply(x, products.to_end);
        memory.removal.put(x, i);
      }
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        const float total = keys.product(e);
        if (group() == 0) memory.total[i + e] = total;
      }
    }
  }

  // The steps of chunk i. All products are transposed: a warp has its columns in rows. before_writes() is called when the state
  // has been read.
  template <typename F>
  FWP_DEVICE void run_chunk(int i, const Stage& chunk, const OfTeam& memory, const Turns& relay, State& state,
                      F before_writes) const {
    const int64_t n = chunk_of(i);
    const bool gives_results = !Base::kHasSegments || !ends;  // some do not affect the state
    relay.take(i, this->team(), this->warp(), state);
    Product read[kChunkBlocks], found[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(read[t]), clear(found[t]);
    // read = c Q W, found = c K W or of a removal c- y W. In reverse found = w K G, or of a removal w x G and read = w K G.
    read_state(gives_results, memory, state, read, found);
    Factor value[kChunkBlocks][kInputParts], error_parts[kChunkBlocks][kExactParts];  // d_out and D in reverse
    if constexpr (kReverse || !kErasesKey) chunk.value.template load<kAligned>(this->own_column(), value);
    // In reverse found += P^T d_out, or X^T d_out of a removal.
    if constexpr (kReverse && kFinds)
      if (kSolves || gives_results)
        read_later<kSolves ? kExactParts : kResultParts>(value, chunk.of_errors(), found);
    // E = V - found - A E, or of a removal -found - R V - Y E. In reverse D = found - A^T D, or found - Y^T D.
    if constexpr (kSolves) {
      if constexpr (!kReverse) take_away(value, chunk, this->own_column(), found);
      solve(chunk, found, error_parts);
    }
    // What needs no other chunk: after the state where a team waits for that, else before it, to have fewer numbers in registers.
    const auto read_chunk = [&] {
      if (!gives_results) return;
      if constexpr (kReverse && kReads) {  // d_V = P^T d_out + read - R^T D.
        read_later<kResultParts>(value, chunk.scores, read);
        read_later<kResultParts>(error_parts, chunk.scores + Base::kFound, read);
      }
      if constexpr (!kReverse && !kFadesValues) {  // out = read + P E, or of a removal read + P V + X E.
        if constexpr (!kErasesKey) read_earlier<kInputParts>(value, chunk.scores, read);
        if constexpr (kSolves) read_earlier<kResultParts>(error_parts, chunk.of_errors(), read);
      }
      FWP_UNROLL for (int t = 0; t < kChunkBlocks && !kReverse && kSolves; ++t) {
        if constexpr (kRemoves) for_elements(found[t], [](int, int, float& x) { x = -x; });
        this->store_errors(error, n, t, found[t]);
      }
    };
    if constexpr (Base::kMostTeams == 1) read_chunk();
    before_writes();
    // W = c_C W + (w K)^T E, of a removal with V, and + (w x)^T E. In reverse G = c_C G + (c Q)^T d_out - (c K)^T D, or c- y.
    if constexpr (kFadesValues) {
      fade_values(n, chunk, memory, read, state, [&] { hand_over(i, relay, state); });
    } else {
      change(memory, value, error_parts, state);
      hand_over(i, relay, state);
    }
    if constexpr (Base::kMostTeams > 1) read_chunk();
    if (gives_results) chunk.value.typed([&](const auto& through) {
      if constexpr (kReverse && kRemoves) this->store_results(d_removed, n, found, through);
      if constexpr (!kOnlyState) this->store_results(out, n, kReads ? read : found, through);
    });
  }

  // The state after chunk i, to where it is needed.
  FWP_DEVICE void hand_over(int i, const Turns& relay, State& state) const {
    const int64_t n = chunk_of(i);
    const bool is_last = kReverse ? n == this->begin() : n + 1 == this->end();
    relay.give(is_last, this->team(), this->warp(), state);
    if (Base::kHasSegments && ends && is_last) this->store_ends(state, ends);
    if constexpr (kReverse) {
      if (!is_last) this->store(state, kept, this->head() * this->chunks() + n - 1);
      if (n == 0) this->store(state, final, this->head());
    } else {
      if (this->count(n) == kChunkTokens) this->store(state, kept, this->head() * (this->size.length / kChunkTokens) + n);
      if (n + 1 == this->chunks()) this->store(state, final, this->head());
    }
  }

  // x += what tokens read of `columns` in this chunk: of earlier ones and their own, or of later ones and their own.
  template <int most, int parts>
  FWP_DEVICE static void read_earlier(const Factor (&columns)[kChunkBlocks][parts], const Shared* scores,
                                      Product (&x)[kChunkBlocks]) {
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      FWP_UNROLL for (int s = 0; s <= t; ++s)
        Base::template accumulate<kResultParts>(x[t], greatest<most>(columns[s]), [&](int m, Factor& right) {
          scores[m].right_transposed(t * kBlock, s * kBlock, right);
        });
  }
  template <int of_scores, int parts>
  FWP_DEVICE static void read_later(const Factor (&columns)[kChunkBlocks][parts], const Shared* scores,
                                    Product (&x)[kChunkBlocks]) {
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      FWP_UNROLL for (int s = t; s < kChunkBlocks; ++s)
        Base::template accumulate<of_scores>(x[t], greatest<(parts < of_scores ? parts : of_scores)>(columns[s]),
                                             [&](int m, Factor& right) { scores[m].right(s * kBlock, t * kBlock, right); });
  }

  // From what is found in the state, the right side of the equations for E.
  FWP_DEVICE static void take_away(const Factor (&value)[kChunkBlocks][kInputParts], const Stage& chunk, int column,
                                   Product (&x)[kChunkBlocks]) {
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
      if constexpr (kErasesKey) {
        Product values;
        chunk.value.load(t, column, values);
        subtract_from(values, x[t]);
      } else {
        for_elements(x[t], [](int, int, float& number) { number = -number; });
        FWP_UNROLL for (int s = 0; s <= t; ++s)
          add_product<kExactParts>(x[t], value[s], [&](int m, Factor& right) {
            chunk.scores[Base::kFound + m].right_transposed(t * kBlock, s * kBlock, right);
          });
      }
    }
  }

  // The state after the chunk.
  FWP_DEVICE static void change(const OfTeam& memory, const Factor (&value)[kChunkBlocks][kInputParts],
                                const Factor (&error_parts)[kChunkBlocks][kExactParts], State& state) {
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      for_elements(state[i], [&](int, int r, float& x) { x *= memory.total[i * kBlock + r]; });
      add_write<false>(either<kErasesKey && !kReverse>(error_parts, value), memory.writer(), i, state[i]);
      if constexpr (kReverse ? kSolves : kRemoves) add_write<kReverse>(error_parts, memory.remover(), i, state[i]);
    }
  }

  // The state after the chunk, for hand_over(), and what is read, where values fade.
  template <typename F>
  FWP_DEVICE void fade_values(int64_t n, const Stage& chunk, const OfTeam& memory, Product (&read)[kChunkBlocks],
                              State& state, F hand_over_state) const {
    WarpScratch<kResultParts>& scratch = memory.scratch[this->warp()];
    KeySlice values;
    chunk.value.typed([&](const auto& v) {
      for_numbers([&](int t, int e) {
        values.writer[t][e] = number(*v.at(own_token(t), this->own_column() + own_number() + e));
      });
    });
    clear(values.reader);
    chunk.value_decay.load(this->own_column(), values.decay);
    const int tokens = this->count(n);
    for_numbers([&](int t, int e) { values.decay[t][e] = own_token(t) < tokens ? values.decay[t][e] : 1; });
    values.find_whole();
    const DecayProducts<kChunkTokens / kSpan> products(values);
    KeyNumbers scaled;
    for_numbers([&](int t, int e) {
      scaled[t][e] = (kReverse ? products.from_start : products.to_end)[t][e] * values.writer[t][e];
    });
    Product columns[kChunkBlocks];
    Factor write[kChunkBlocks][kExactParts];
    scratch.exchange(scaled, columns);
    split_rows(columns, write);
    float total[2];  // of this lane's columns
    FWP_UNROLL for (int e = 0; e < 2; ++e) {
      const float product = values.product(e);
      if (group() == 0) scratch.numbers[0][own_number() + e] = product;
    }
    __syncwarp();
    FWP_UNROLL for (int r = 0; r < 2; ++r) total[r] = scratch.numbers[0][line() + 8 * r];
    __syncwarp();
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int e = 0; e < 4; ++e)
          state[i][h][e] *= memory.total[i * kBlock + 8 * h + pair() + e % 2] * total[e / 2];
      add_write<false>(write, memory.writer(), i, state[i]);
    }
    hand_over_state();
    if constexpr (kReads) {
      KeyNumbers x;
      scratch.template exchange<false>(read, x);
      for_numbers([&](int t, int e) { x[t][e] *= products.from_start[t][e]; });
      read_blocks<2>(values, chunk.scores, scratch, x);
      read_blocks<1>(values, chunk.scores, scratch, x);
      read_in_groups(values, chunk.scores, x);
      scratch.exchange(x, read);
    }
  }

  // x += what tokens read of those in the neighboring block of kGroups groups.
  template <int kGroups>
  FWP_DEVICE static void read_blocks(const KeySlice& values, const Shared* scores, WarpScratch<kResultParts>& scratch,
                                     KeyNumbers& x) {
    const DecayProducts<kGroups> products(values);
    Grouped<Bfloat16> scaled[kResultParts];
    scratch.put(values, products, scaled);
    Product found[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
      clear(found[t]);
      if (kGroups > 1 && t == 0) continue;
      const int row = t * kBlock, column = kGroups > 1 ? 0 : row;
      Factor left[kResultParts];
      FWP_UNROLL for (int m = 0; m < kResultParts; ++m) {
        scores[m].left(row, column, left[m]);
        if (kGroups == 1) left[m][0] = left[m][3] = 0;  // pairs of tokens of one group
      }
      multiply<kResultParts>(found[t], left, [&](int m, Factor& right) { scaled[m].right(column, 0, right); });
    }
    __syncwarp();
    KeyNumbers z;
    scratch.template exchange<true>(found, z);
    if (reads<kGroups>()) for_numbers([&](int t, int e) { x[t][e] = fma(products.from_start[t][e], z[t][e], x[t][e]); });
  }

  FWP_DEVICE static void read_in_groups(const KeySlice& values, const Shared* scores, KeyNumbers& x) {
    FWP_UNROLL for (int s = 0; s < kSpan; s += 2) {
      float y[2][2];
      FWP_UNROLL for (int t = s; t < kSpan; ++t) {
        float score[2] = {};
        FWP_UNROLL for (int m = kResultParts; m-- > 0;) {
          const uint32_t pair = scores[m].get(own_token(t), own_token(s));
          score[0] += low(pair), score[1] += high(pair);
        }
        FWP_UNROLL for (int e = 0; e < 2; ++e) {
          y[0][e] = t > s ? y[0][e] * values.decay[t][e] : values.writer[s][e];
          x[t][e] = fma(score[0], y[0][e], x[t][e]);
          if (t == s) continue;
          y[1][e] = t > s + 1 ? y[1][e] * values.decay[t][e] : values.writer[s + 1][e];
          x[t][e] = fma(score[1], y[1][e], x[t][e]);
        }
      }
    }
  }

  // read += (c Q W)^T; found += what erases, times W; or in reverse found += (w K G)^T, or of a removal found += (w x G)^T and
  // read += (w K G)^T.
  FWP_DEVICE static void read_state(bool results, const OfTeam& memory, const State& state, Product (&read)[kChunkBlocks],
                                    Product (&found)[kChunkBlocks]) {
    constexpr int of_results = kReverse ? kResultParts : kInputParts;
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      Factor of_state[kStateParts];
      split(state[i], of_state);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        if constexpr (kReads)
          if (results) read_rows(greatest<of_results>(of_state), memory.reader(), t, i, read[t]);
        if constexpr (kFinds)
          if (kSolves || results) read_rows(of_state, memory.finder(), t, i, found[t]);
      }
    }
  }
  template <int of_state, int of_rows, bool aligned>
  FWP_DEVICE static void read_rows(const Factor (&state)[of_state], const ScaledTokens<of_rows, aligned>& rows, int t, int i,
                                   Product& to) {
    Base::template accumulate<of_rows>(
        to, state, [&](int m, Factor& right) { rows.part[m].right_transposed(t * kBlock, i * kBlock, right); });
  }

  // x, without the term of A, becomes E or D, also in parts. E begins with the first tokens, D with the last ones.
  FWP_DEVICE static void solve(const Stage& chunk, Product (&x)[kChunkBlocks], Factor (&parts)[kChunkBlocks][kExactParts]) {
    const auto add_erased = [&](int from, int to) {
      add_product<kExactParts>(x[to], parts[from], [&](int m, Factor& right) {
        const Shared& erase = chunk.scores[Base::kErased + m];
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

  // state += (or -=) the columns of 32 tokens times the rows of those tokens. Small parts are added first, and apart from the
  // first ones if these are aligned.
  template <bool minus, int of_columns, int of_rows, bool aligned>
  FWP_DEVICE static void add_write(const Factor (&columns)[kChunkBlocks][of_columns],
                                   const ScaledTokens<of_rows, aligned>& rows, int i, Product& state) {
    constexpr int most = of_rows > of_columns ? of_rows : of_columns;
    Product product;
    clear(product);
    FWP_UNROLL for (int m = of_rows; m-- > 0;) {
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        Factor right;
        rows.part[m].right(t * kBlock, i * kBlock, right);
        FWP_UNROLL for (int k = of_columns; k-- > 0;)
          if (k + m < most && !(aligned && k + m == 0)) multiply(product, columns[t][k], right);
      }
    }
    minus ? subtract(state, product) : add(state, product);
    if constexpr (aligned) {
      clear(product);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        Factor right;
        rows.part[0].right(t * kBlock, i * kBlock, right);
        multiply(product, columns[t][0], right);
      }
      minus ? subtract(state, product) : add(state, product);
    }
  }
};

}  // namespace fwp::cuda
