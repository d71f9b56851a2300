// The forward pass of the rules on the tensor cores; chunks.cuh has its equations. E is solved for in blocks of 16 tokens. The
// diagonal blocks of 1 + A b are inverted in float32.
#pragma once

#include "relay.cuh"

namespace fwp::cuda {

// The transposes of states, or of their gradients, of each chunk of each head: (heads, chunks, columns, kRows), in bfloat16 or
// in float32. In float32 a warp has its 16 columns as its lanes have them.
template <int kRows, typename T>
struct ChunkMatrices {
  using State = Product[kRows / kBlock];
  T* data;
  int columns;  // those of the values, padded to a power of two of blocks

  FWP_DEVICE T* of_warp(int64_t at, int warp) const { return data + (at * columns + warp * kBlock) * kRows; }
  FWP_DEVICE void load(int64_t at, int warp, State& to) const {
    load_lanes(reinterpret_cast<const Piece<float>*>(of_warp(at, warp)), to);
  }
  FWP_DEVICE void store(State& from, int64_t at, int warp) const {
    if constexpr (sizeof(T) == sizeof(float)) {
      store_lanes(from, reinterpret_cast<Piece<float>*>(of_warp(at, warp)));
    } else {
      const Shared to{of_warp(at, warp), kRows};
      FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i)
        for_pairs(from[i], [&](int j, int r, float x, float y) { to.put(j, i * kBlock + r, pair_of(x, y)); });
    }
  }
};
// With decays in float32, because large terms cancel in the gradient of a decay.
template <int kRows, bool kDecays>
using StateGradients = ChunkMatrices<kRows, std::conditional_t<kDecays, float, Bfloat16>>;

template <int kRows, bool kErasesKey, bool kDecays>
struct ChunkForward : ChunkPass<kRows, kErasesKey, kDecays> {
  using Base = ChunkPass<kRows, kErasesKey, kDecays>;
  using Base::kWriteParts, Base::kRates;
  static constexpr int kMostThreads = kThreadsOfTeams<kRows>;
  using Turns = Relay<kRows, Base::kMostTeams>;

  Brought value;  // of a rule that erases, the errors if states are rebuilt
  Matrices<const float> initial;
  float *final, *kept;  // kept: after each whole chunk, of a rule with decays
  OutputArray out;
  float* error;  // (heads, tokens, columns)
  float* ends;   // if given, only the ends of segments are computed: see store_ends()
  ChunkMatrices<kRows, Bfloat16> states;  // if given, only the states before each chunk are rebuilt, of a rule without decays

  struct Stage {
    Shared query, key;
    float* rate;
    Decays decays;
    Shared value;  // the last one: the compiler knows the places of those before

    FWP_BOTH Stage(Carver& carver, const ChunkForward& pass)
        : query(carver.matrix(kChunkTokens, kRows)), key(carver.matrix(kChunkTokens, kRows)),
          rate(carver.take<float>(kChunkTokens)), decays(carver, kDecays),
          value(carver.matrix(kChunkTokens, pass.block_columns())) {}
  };
  struct OfTeam {
    Scores scores;
    Stages<Stage, ChunkForward> stages;

    FWP_BOTH OfTeam(Carver& carver, const ChunkForward& pass)
        : scores(carver, kTokenParts, kErasesKey ? kExactParts : 0), stages(carver, pass) {}
  };
  // Of put_starts(), in its order.
  enum { kQueryStart, kKeyStart, kValueStart, kRateStart, kDecayStart, kDocuments, kStarts };
  struct Memory {
    const char** starts;  // see put_starts()
    Turns relay;
    Copies<OfTeam, ChunkForward> of_teams;

    FWP_BOTH Memory(Carver& carver, const ChunkForward& pass)
        : starts(carver.take<const char*>(kStarts)), relay(carver, pass.warps, pass.teams), of_teams(carver, pass, pass.teams) {}
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    const int team = this->team();
    const OfTeam own = memory.of_teams[team];
    typename Base::State state;
    ends ? this->load_identity(state) : this->load(initial, state);
    this->put_starts({&this->query, &this->key, &value, &this->rate, &this->decay}, memory.starts);
    const int chunks = int(this->end() - this->begin());
    Scalars next;
    if (team < chunks) next = fill(memory.starts, own.stages[0], this->begin() + team);
    for (int i = team, of_team = 0; i < chunks; i += this->teams, ++of_team) {
      const Stage chunk = own.stages[of_team];
      this->put_scalars(next, chunk);
      wait_copies<0>();
      // From here on, this chunk may be used and the other stage may be filled.
      memory.relay.wait_for_team(team);
      if (i + this->teams < chunks)
        next = fill(memory.starts, own.stages[of_team + 1], this->begin() + i + this->teams);
      run_chunk(i, memory.starts[kValueStart], chunk, own.scores, memory.relay, state);
    }
  }

 private:
  FWP_DEVICE Scalars fill(const char* const* starts, const Stage& to, int64_t n) const {
    this->bring_keys(this->query, starts[kQueryStart], n, to.query);
    this->bring_keys(this->key, starts[kKeyStart], n, to.key);
    if (!kErasesKey || !rebuilds()) this->bring_values(value, starts[kValueStart], n, to.value);
    commit_copies();
    return this->ask(starts[kRateStart], starts[kDecayStart], starts[kDocuments], n, this->thread());
  }

  FWP_DEVICE bool rebuilds() const { return !kDecays && states.data; }

  // Chunk i of the segment.
  FWP_DEVICE void run_chunk(int i, const char* errors, const Stage& chunk, const Scores& scores, const Turns& relay,
                      typename Base::State& state) const {
    const Decays& decays = chunk.decays;
    // P and the inverses of the diagonal blocks of 1 + A b.
    if (!rebuilds())
      this->template make_scores<kTokenParts>(chunk.query, chunk.key, decays, scores,
                                              [&](int, int s, float x) { return x * chunk.rate[s]; });
    const int team = this->team(), warp = this->warp();
    const int64_t n = this->begin() + i;
    const bool is_last = n + 1 == this->end(), gives_results = !ends && !rebuilds();
    relay.wait_for_team(team);  // for the scores
    relay.take(i, team, warp, state);
    if (rebuilds()) states.store(state, this->head() * this->chunks() + n, int(this->slab()) * this->warps + warp);
    // found = (c K W)^T and read = (c Q W)^T, for the columns of this warp.
    Product found[kChunkBlocks], read[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(found[t]), clear(read[t]);
    FWP_UNROLL for (int block = 0; block < kRows / kBlock; ++block) {
      Factor of_state[kErasesKey ? kExactParts : 1], query;
      split(state[block], of_state);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        if (gives_results) {
          chunk.query.right_transposed(t * kBlock, block * kBlock, query);
          multiply(read[t], of_state[0], query);
        }
        if constexpr (kErasesKey)
          if (!rebuilds())
            multiply<1>(found[t], of_state,
                        [&](int, Factor& key) { chunk.key.right_transposed(t * kBlock, block * kBlock, key); });
      }
    }
    const auto from_start = [&](int t) { return decays.from_start(t); };
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
      this->fade_columns(t * kBlock, read[t], from_start);
      this->fade_columns(t * kBlock, found[t], from_start);
    }
    // E = V - c K W - A U, U = b E, and before U fades read += (P U)^T, from the first block of tokens on.
    Product (&writes)[kChunkBlocks] = found;  // E and U take the place of what was found
    Factor write_parts[kChunkBlocks][kWriteParts];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
      chunk.value.left_transposed(t * kBlock, this->own_column(), write_parts[t][0]);
      if constexpr (kErasesKey)
        rebuilds() ? this->load_errors(errors, n, t, writes[t]) : correct(n, t, chunk, scores, write_parts, writes[t]);
      else if constexpr (kRates)
        unpack(write_parts[t][0], writes[t]);
      if constexpr (kRates) {
        for_elements(writes[t], [&](int, int s, float& x) { x *= chunk.rate[t * kBlock + s]; });
        split(writes[t], write_parts[t]);
      }
      if (kDecays && gives_results) read_scores(t, scores, write_parts, read[t]);
    }
    // W = c_C W + (w K)^T U, with w in U.
    if constexpr (kDecays) {
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
        this->fade_columns(t * kBlock, writes[t], [&](int s) { return decays.to_end(s); });
      this->split_writes(writes, write_parts);
      this->fade(state, decays.total());
    }
    this->template write<false>(state, write_parts, chunk.key);
    relay.give(is_last, team, warp, state);
    if (ends) {
      if (is_last) this->store_ends(state, ends);
    } else if (gives_results) {
      if (kDecays && this->count(n) == kChunkTokens)
        this->store(state, kept, this->head() * (this->size.length / kChunkTokens) + n);
      if (n + 1 == this->chunks()) this->store(state, final, this->head());
      if constexpr (!kDecays) FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) read_scores(t, scores, write_parts, read[t]);
      this->store_results(out, n, read, chunk.value);
    }
  }

  // read += what token block t reads of this chunk. The writes of a fading rule are read before they fade.
  FWP_DEVICE static void read_scores(int t, const Scores& scores, const Factor (&write_parts)[kChunkBlocks][kWriteParts],
                                     Product& read) {
    constexpr int most = kWriteParts < kTokenParts ? kWriteParts : kTokenParts;
    FWP_UNROLL for (int s = 0; s <= t; ++s)
      multiply<kTokenParts>(read, greatest<most>(write_parts[s]), [&](int m, Factor& right) {
        scores.read[m].right_transposed(t * kBlock, s * kBlock, right);
      });
  }

  // Replace what the keys of block t retrieve, in `found`, by the errors. write_parts[t] has the values.
  FWP_DEVICE void correct(int64_t n, int t, const Stage& chunk, const Scores& scores,
                          const Factor (&write_parts)[kChunkBlocks][kWriteParts], Product& found) const {
    Product value;
    unpack(write_parts[t][0], value);
    subtract_from(value, found);
    const auto times = [&](int s, const Factor (&left)[kExactParts]) {
      add_product<kExactParts>(found, left, [&](int m, Factor& right) {
        scores.erase[m].right_transposed(t * kBlock, s * kBlock, right);
      });
    };
    FWP_UNROLL for (int s = 0; s < t; ++s) times(s, write_parts[s]);
    Factor left[kExactParts];
    split(found, left);
    times(t, left);
    this->store_errors(error, n, t, found);
  }
};

}  // namespace fwp::cuda
