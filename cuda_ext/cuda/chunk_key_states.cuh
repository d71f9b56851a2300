// The states of rules with decays by key, from chunk to chunk, and what is read from them; chunk_keys.cuh has the equations. In
// reverse, the same pass has the gradient G of the state after a chunk, and D is the gradient of E:
//
//     gla, gated delta   D = P^T d_out + (w K) G - A^T D   d_V = D     G before the chunk = c_C G + (c Q)^T d_out - (c K)^T D
//     removal            D = X^T d_out + (w x) G - Y^T D   d_V = P^T d_out + (w K) G - R^T D
//                                                          G before the chunk = c_C G + (c Q)^T d_out - (c- y)^T D
//
// Where values fade, V and d_out do on their way into the state and its gradient, and d_V is computed with the other gradients.
#pragma once

#include "chunk_key_scores.cuh"
#include "relay.cuh"

namespace fwp::cuda {

template <int kRows, Rule kRule, int kInputParts, bool kReverse>
struct ChunkKeyStates : ChunkKeyPass<kRows, kRule, kInputParts> {
  using Base = ChunkKeyPass<kRows, kRule, kInputParts>;
  using State = typename Base::State;
  using Turns = Relay<kRows, Base::kMostTeams>;
  using Base::kErasesKey, Base::kRemoves, Base::kSolves, Base::kFadesValues, Base::kResultParts;
  static constexpr bool kReads = !kReverse;                               // out
  static constexpr bool kFinds = kSolves || (kReverse && !kFadesValues);  // D, or what E takes away
  static constexpr bool kGives = kRemoves && kReverse;                    // d_V next to D
  static constexpr bool kAligned = !kErasesKey;  // what is written under keys: nothing corrects its errors (see grid_of)
  static constexpr bool kScored = !(kReverse && kFadesValues);  // whether stored scores are used
  static constexpr int kQueryParts = kReverse ? kExactParts : kResultParts;
  static constexpr int kKeyParts = !kReverse || kErasesKey ? kExactParts : kFadesValues ? 0 : kResultParts;
  static constexpr int kEraserParts = kSolves ? kExactParts : 0, kRemovalParts = kRemoves ? kExactParts : 0;
  static constexpr int kStateParts = kSolves ? kExactParts : kInputParts;  // of a state that is read, and of E

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
      FWP_UNROLL for (int m = 0; m < Base::kScoreMatrices && kScored; ++m)
        scores[m] = carver.matrix(kChunkTokens, kChunkTokens);
    }
  };
  // Scaled tokens in parts: c Q, w K, what erases (c K or c- y), and w x.
  struct OfTeam {
    Grouped<Bfloat16> query[kExactParts], key[kExactParts], eraser[kExactParts], removal[kExactParts];
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
          if (m < kQueryParts || m < kKeyParts) query[m] = key[m] = carver.grouped(kChunkTokens, kRows);
          eraser[m] = removal[m] = carver.grouped(kChunkTokens, kRows);
          continue;
        }
        if (m < kQueryParts) query[m] = carver.grouped(kChunkTokens, kRows);
        if (m < kKeyParts) key[m] = carver.grouped(kChunkTokens, kRows);
        if (m < kEraserParts) eraser[m] = carver.grouped(kChunkTokens, kRows);
      }
    }
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
    if (!kScored || !scores) return;  // without scores only states are wanted
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
        put_scaled_tokens<kQueryParts, kReverse && kAligned>(x, i, memory.query);
      }
      if constexpr (kOfKeys) {
        tokens.load_keys(column, x);
        multiply(x, products.to_end);
        put_scaled_tokens<kKeyParts, !kReverse && kAligned>(x, i, memory.key);
      }
      if constexpr (kErasesKey) {
        tokens.key.load(column, x);
        multiply(x, products.from_start);
        put_scaled_tokens<kEraserParts, false>(x, i, memory.eraser);
      }
      if constexpr (kRemoves && kOfQueries) {
        tokens.load_removal_keys(column, x);
        multiply(x, DecayProducts<kChunkTokens / kSpan, true>(keys).from_start);
        put_scaled_tokens<kEraserParts, false>(x, i, memory.eraser);
      }
      if constexpr (kRemoves && kOfKeys) {
        tokens.removal.load(column, x);
        multiply(x, products.to_end);
        put_scaled_tokens<kRemovalParts, false>(x, i, memory.removal);
      }
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        const float total = keys.product(e);
        if (group() == 0) memory.total[i + e] = total;
      }
    }
  }

  // kAlign: the first parts of all tokens are multiples of one number (see grid_of).
  template <int parts, bool kAlign>
  FWP_DEVICE static void put_scaled_tokens(const KeyNumbers& x, int i, const Grouped<Bfloat16> (&to)[kExactParts]) {
    if constexpr (parts > 0) {
      float grid[2];
      FWP_UNROLL for (int e = 0; e < 2 && kAlign; ++e) {
        float greatest = 0;
        FWP_UNROLL for (int t = 0; t < kSpan; ++t) greatest = fmaxf(greatest, fabsf(x[t][e]));
        FWP_UNROLL for (int distance = kSpan; distance < kWarp; distance *= 2)
          greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
        grid[e] = grid_of(greatest);
      }
      FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
        uint32_t of_pair[parts];
        if constexpr (kAlign)
          split(x[t][0], x[t][1], of_pair, grid[0], grid[1]);
        else
          split(x[t][0], x[t][1], of_pair);
        FWP_UNROLL for (int m = 0; m < parts; ++m) to[m].put(own_token(t), i, of_pair[m]);
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
    Product read[kChunkBlocks], found[kChunkBlocks], given[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(read[t]), clear(found[t]), clear(given[t]);
    // read = c Q W, found = c K W or of a removal c- y W; in reverse found = w K G, or of a removal w x G and given = w K G.
    read_state(gives_results, memory, state, read, found, given);
    Factor value[kChunkBlocks][kInputParts], write[kChunkBlocks][kStateParts];
    if constexpr (kReverse || !kErasesKey) chunk.value.template load<kAligned>(this->own_column(), value);
    // In reverse found += P^T d_out, or X^T d_out of a removal.
    if constexpr (kReverse && kFinds)
      if (kSolves || gives_results)
        read_later<kSolves ? kExactParts : kResultParts>(value, chunk.scores + (kRemoves ? Base::kReadRemoved : 0), found);
    // E = V - found - A E, or of a removal -found - R V - Y E. In reverse D = found - A^T D, or found - Y^T D.
    if constexpr (kSolves) {
      if constexpr (!kReverse) take_away(value, chunk, this->own_column(), found);
      solve(chunk, found, write);
    }
    // What needs no other chunk: after the state where a team waits for that, else before it, to have fewer numbers in registers.
    const auto read_chunk = [&] {
      if (!gives_results) return;
      // out = read + P E, or of a removal read + P V + X E.
      if constexpr (kReads && !kFadesValues) {
        if constexpr (!kErasesKey) read_earlier<kInputParts>(value, chunk.scores, read);
        if constexpr (kSolves) read_earlier<kResultParts>(write, chunk.scores + (kRemoves ? Base::kReadRemoved : 0), read);
      }
      // d_V = P^T d_out + given - R^T D.
      if constexpr (kGives) {
        read_later<kResultParts>(value, chunk.scores, given);
        read_later<kResultParts>(write, chunk.scores + Base::kFound, given);
      }
      FWP_UNROLL for (int t = 0; t < kChunkBlocks && kReads && kSolves; ++t) {
        if constexpr (kRemoves) for_elements(found[t], [](int, int, float& x) { x = -x; });
        this->store_errors(error, n, t, found[t]);
      }
    };
    if constexpr (Base::kMostTeams == 1) read_chunk();
    before_writes();
    // W = c_C W + (w K)^T E, of a removal with V, and + (w x)^T E; in reverse G = c_C G + (c Q)^T d_out - (c K)^T D, or c- y.
    if constexpr (kFadesValues) {
      fade_values(n, chunk, memory, read, state, [&] { give(i, relay, state); });
    } else {
      change(memory, value, write, state);
      give(i, relay, state);
    }
    if constexpr (Base::kMostTeams > 1) read_chunk();
    if (gives_results) chunk.value.typed([&](const auto& through) {
      if constexpr (kReverse && kRemoves) this->store_results(d_removed, n, found, through);
      if constexpr (!kReverse || !kFadesValues)
        this->store_results(out, n, kGives ? given : kReverse ? found : read, through);
    });
  }

  // The state after chunk i, to where it is needed.
  FWP_DEVICE void give(int i, const Turns& relay, State& state) const {
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
                                const Factor (&write)[kChunkBlocks][kStateParts], State& state) {
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      for_elements(state[i], [&](int, int r, float& x) { x *= memory.total[i * kBlock + r]; });
      if constexpr (kReverse) {
        add_write<kQueryParts, kAligned, false>(value, memory.query, i, state[i]);
        if constexpr (kSolves) add_write<kEraserParts, false, true>(write, memory.eraser, i, state[i]);
      } else if constexpr (kErasesKey) {
        add_write<kKeyParts, false, false>(write, memory.key, i, state[i]);
      } else {
        add_write<kKeyParts, kAligned, false>(value, memory.key, i, state[i]);
        if constexpr (kRemoves) add_write<kRemovalParts, false, false>(write, memory.removal, i, state[i]);
      }
    }
  }

  // The state after the chunk, for give(), and what is read, where values fade.
  template <typename F>
  FWP_DEVICE void fade_values(int64_t n, const Stage& chunk, const OfTeam& memory, Product (&read)[kChunkBlocks],
                              State& state, F give) const {
    WarpScratch<kResultParts>& scratch = memory.scratch[this->warp()];
    KeySlice values;
    chunk.value.typed([&](const auto& v) {
      for_numbers([&](int t, int e) {
        (kReverse ? values.reader : values.writer)[t][e] = number(*v.at(own_token(t), this->own_column() + own_number() + e));
      });
    });
    clear(kReverse ? values.writer : values.reader);
    chunk.value_decay.load(this->own_column(), values.decay);
    const int tokens = this->count(n);
    for_numbers([&](int t, int e) { values.decay[t][e] = own_token(t) < tokens ? values.decay[t][e] : 1; });
    values.find_whole();
    const DecayProducts<kChunkTokens / kSpan> products(values);
    KeyNumbers scaled;
    for_numbers([&](int t, int e) {
      scaled[t][e] = kReverse ? products.from_start[t][e] * values.reader[t][e] : products.to_end[t][e] * values.writer[t][e];
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
      add_write<kExactParts, true, false>(write, kReverse ? memory.query : memory.key, i, state[i]);
    }
    give();
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
  // given += (w K G)^T.
  FWP_DEVICE static void read_state(bool results, const OfTeam& memory, const State& state, Product (&read)[kChunkBlocks],
                                    Product (&found)[kChunkBlocks], Product (&given)[kChunkBlocks]) {
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      Factor of_state[kStateParts];
      split(state[i], of_state);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        if constexpr (kReads)
          if (results) read_rows<kQueryParts>(greatest<kInputParts>(of_state), memory.query, t, i, read[t]);
        if constexpr (kGives)
          if (results) read_rows<kKeyParts>(greatest<kResultParts>(of_state), memory.key, t, i, given[t]);
        if constexpr (kFinds && !kReverse) read_rows<kEraserParts>(of_state, memory.eraser, t, i, found[t]);
        if constexpr (kFinds && kReverse)
          if (kSolves || results)
            read_rows<(kRemoves ? kRemovalParts : kKeyParts)>(of_state, kRemoves ? memory.removal : memory.key, t, i, found[t]);
      }
    }
  }
  template <int of_rows, int of_state>
  FWP_DEVICE static void read_rows(const Factor (&state)[of_state], const Grouped<Bfloat16> (&rows)[kExactParts], int t, int i,
                                   Product& to) {
    Base::template accumulate<of_rows>(
        to, state, [&](int m, Factor& right) { rows[m].right_transposed(t * kBlock, i * kBlock, right); });
  }

  // x, without the term of A, becomes E or D, also in parts. E begins with the first tokens, D with the last ones.
  FWP_DEVICE static void solve(const Stage& chunk, Product (&x)[kChunkBlocks], Factor (&parts)[kChunkBlocks][kStateParts]) {
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
  template <int of_rows, bool kAlign, bool minus, int of_columns>
  FWP_DEVICE static void add_write(const Factor (&columns)[kChunkBlocks][of_columns],
                                   const Grouped<Bfloat16> (&rows)[kExactParts], int i, Product& state) {
    constexpr int most = of_rows > of_columns ? of_rows : of_columns;
    Product product;
    clear(product);
    FWP_UNROLL for (int m = of_rows; m-- > 0;) {
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        Factor right;
        rows[m].right(t * kBlock, i * kBlock, right);
        FWP_UNROLL for (int k = of_columns; k-- > 0;)
          if (k + m < most && !(kAlign && k + m == 0)) multiply(product, columns[t][k], right);
      }
    }
    minus ? subtract(state, product) : add(state, product);
    if constexpr (kAlign) {
      clear(product);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        Factor right;
        rows[0].right(t * kBlock, i * kBlock, right);
        multiply(product, columns[t][0], right);
      }
      minus ? subtract(state, product) : add(state, product);
    }
  }
};

}  // namespace fwp::cuda
