// The backward pass of the rules on the tensor cores, chunk by chunk (see chunks.cuh). G is the gradient of the state after the
// chunk. D is the gradient of E, or of V if nothing is erased. From the last chunk to the first, with teams of warps (see Relay),
//
//     d_U = P^T d_out + w K G - A^T D          D = b d_U = d_V      (sum, no decays: D = d_U)
//     G = c_C G + (c Q)^T d_out - (c K)^T D    d_b = the sum over a token's row of d_U * E
//
// All other gradients need no other chunk: chunk_gradients.cuh computes them from G and D. Of rules without decays, the states
// before the chunks are first rebuilt from what the forward pass has written.
#pragma once

#include "chunk_forward.cuh"

namespace fwp::cuda {

template <int kRows, bool kErasesKey, bool kDecays>
struct ChunkBackward : ChunkPass<kRows, kErasesKey, kDecays> {
  using Base = ChunkPass<kRows, kErasesKey, kDecays>;
  using Base::kRates;
  using State = typename Base::State;
  static constexpr int kMostThreads = kThreadsOfTeams<kRows>;
  using Turns = Relay<kRows, Base::kMostTeams>;

  Brought d_out, value;  // value: the errors, if the rule erases
  Matrices<const float> d_final;
  float* d_initial;
  OutputArray d_v, d_rate;
  StateGradients<kRows, kDecays> gradients;  // G after each chunk
  float* ends;  // if given, only the ends of segments are computed: see store_ends(). Their transitions are known

  struct Stage {
    Shared query, key;
    float* rate;
    Decays decays;
    Shared d_out, value;  // the last ones: the compiler knows the places of those before

    FWP_BOTH Stage(Carver& carver, const ChunkBackward& pass)
        : query(carver.matrix(kChunkTokens, kRows)), key(carver.matrix(kChunkTokens, kRows)),
          rate(carver.take<float>(kChunkTokens)), decays(carver, kDecays),
          d_out(carver.matrix(kChunkTokens, pass.block_columns())),
          value(carver.matrix(kRates && !kErasesKey ? kChunkTokens : 0, pass.block_columns())) {}
  };
  struct OfTeam {
    Scores scores;
    float* d_rate;  // a sum for each warp's columns
    Stages<Stage, ChunkBackward> stages;

    FWP_BOTH OfTeam(Carver& carver, const ChunkBackward& pass)
        : scores(carver, kExactParts, kErasesKey ? kExactParts : 0),
          d_rate(carver.take<float>(kRates ? kChunkWarps * kChunkTokens : 0)), stages(carver, pass) {}
  };
  // Of put_starts(), in its order.
  enum { kQueryStart, kKeyStart, kDOutStart, kValueStart, kRateStart, kDecayStart, kDocuments, kStarts };
  struct Memory {
    const char** starts;
    Turns relay;
    Copies<OfTeam, ChunkBackward> of_teams;

    FWP_BOTH Memory(Carver& carver, const ChunkBackward& pass)
        : starts(carver.take<const char*>(kStarts)), relay(carver, pass.warps, pass.teams), of_teams(carver, pass, pass.teams) {}
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    const int team = this->team();
    const OfTeam own = memory.of_teams[team];
    State g;
    this->load(d_final, g);
    if (!ends && team == 0) gradients.store(g, this->head() * this->chunks() + this->end() - 1, this->warp());
    this->put_starts({&this->query, &this->key, &d_out, &value, &this->rate, &this->decay}, memory.starts);
    const int chunks = int(this->end() - this->begin());
    const int64_t last_chunk = this->end() - 1;
    Scalars next;
    if (team < chunks) next = fill(memory.starts, own.stages[0], last_chunk - team);
    for (int i = team, of_team = 0; i < chunks; i += this->teams, ++of_team) {
      const Stage chunk = own.stages[of_team];
      this->put_scalars(next, chunk);
      wait_copies<0>();
      // From here on, this chunk may be used and the other stage may be filled.
      memory.relay.wait_for_team(team);
      if (kRates && of_team > 0) this->store_sums(d_rate, last_chunk - i + this->teams, own.d_rate);
      if (i + this->teams < chunks) next = fill(memory.starts, own.stages[of_team + 1], last_chunk - i - this->teams);
      run_chunk(i, memory.starts[kValueStart], chunk, own, memory.relay, g);
    }
    if constexpr (kRates) {
      memory.relay.wait_for_team(team);
      if (team < chunks) this->store_sums(d_rate, this->begin() + (chunks - 1 - team) % this->teams, own.d_rate);
    }
  }

 private:
  FWP_DEVICE Scalars fill(const char* const* starts, const Stage& to, int64_t n) const {
    this->bring_keys(this->query, starts[kQueryStart], n, to.query);
    this->bring_keys(this->key, starts[kKeyStart], n, to.key);
    this->bring_values(d_out, starts[kDOutStart], n, to.d_out);
    if constexpr (kRates && !kErasesKey) this->bring_values(value, starts[kValueStart], n, to.value);
    commit_copies();
    return this->ask(starts[kRateStart], starts[kDecayStart], starts[kDocuments], n, this->thread());
  }

  // The chunk before which i are between it and the end of the segment: the transposes of d_U and D, and the gradient of the
  // state before the chunk.
  FWP_DEVICE void run_chunk(int i, const char* errors, const Stage& chunk, const OfTeam& own, const Turns& relay,
                      State& g) const {
    const int team = this->team(), warp = this->warp();
    const int64_t n = this->end() - 1 - i;
    Product values;  // of the last block, then of the one before
    if constexpr (kRates && kErasesKey) this->load_errors(errors, n, kChunkBlocks - 1, values);
    const bool gives_results = !ends, writes = kErasesKey || gives_results;  // writes: whether d_U is needed
    // P and the inverses of the diagonal blocks of 1 + b A.
    if (writes)
      this->template make_scores<kExactParts>(chunk.query, chunk.key, chunk.decays, own.scores,
                                              [&](int t, int, float x) { return chunk.rate[t] * x; });
    relay.wait_for_team(team);  // for the scores
    // d_U = P^T d_out + w K G, from here on transposed.
    Product d_write[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(d_write[t]);
    FWP_UNROLL for (int s = 0; s < kChunkBlocks && writes; ++s) {
      Factor d_read[1];
      chunk.d_out.left_transposed(s * kBlock, this->own_column(), d_read[0]);
      FWP_UNROLL for (int t = 0; t <= s; ++t)
        multiply<kExactParts>(d_write[t], d_read,
                              [&](int m, Factor& right) { own.scores.read[m].right(s * kBlock, t * kBlock, right); });
    }
    relay.take(i, team, warp, g);
    if (writes) read_g(g, chunk, d_write);
    // G = c_C G + (c Q)^T d_out.
    add_reads(chunk, g);
    // From the last block of tokens back: d_U -= A^T D, d_b = d_U . E, D = b d_U, G -= (c K)^T D.
    float of_rates[kChunkBlocks][4];
    FWP_UNROLL for (int t = kChunkBlocks; writes && t-- > 0;) {
      Product& d = d_write[t];
      Factor left[1][kExactParts];
      if constexpr (kErasesKey) {
        split(d, left[0]);
        add_erased(own.scores, t, t, left[0], d);
      }
      if constexpr (kRates) {
        if constexpr (!kErasesKey) {
          Factor value;
          chunk.value.left_transposed(t * kBlock, this->own_column(), value);
          unpack(value, values);
        }
        multiply_columns(d, values, of_rates[t]);
        if (kErasesKey && t > 0) this->load_errors(errors, n, t - 1, values);
      }
      if constexpr (kRates) for_elements(d, [&](int, int s, float& x) { x *= chunk.rate[t * kBlock + s]; });
      if constexpr (kErasesKey) {
        split(d, left[0]);
        FWP_UNROLL for (int s = 0; s < t; ++s) add_erased(own.scores, t, s, left[0], d_write[s]);
        if constexpr (kDecays) {
          Product faded;
          FWP_UNROLL for (int h = 0; h < 2; ++h) FWP_UNROLL for (int e = 0; e < 4; ++e) faded[h][e] = d[h][e];
          this->fade_columns(t * kBlock, faded, [&](int s) { return chunk.decays.from_start(s); });
          split(faded, left[0]);
        }
        this->template write<true>(g, left, chunk.key, t);
      }
    }
    relay.give(n == this->begin(), team, warp, g);
    if (!gives_results) {
      if (n == this->begin()) this->store_ends(g, ends);
    } else {
      if (n > this->begin()) gradients.store(g, this->head() * this->chunks() + n - 1, warp);
      if (n == 0) this->store(g, d_initial, this->head());
      if constexpr (kRates) put_rates(of_rates, own.d_rate);
      this->store_results(d_v, n, d_write, chunk.d_out);
    }
  }

  // d_write += w G^T K^T.
  FWP_DEVICE void read_g(State& g, const Stage& chunk, Product (&d_write)[kChunkBlocks]) const {
    Product found[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(found[t]);
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      Factor of_g[kErasesKey ? kExactParts : 1];
      split(g[i], of_g);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
        multiply<1>(found[t], of_g, [&](int, Factor& key) { chunk.key.right_transposed(t * kBlock, i * kBlock, key); });
    }
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
      this->fade_columns(t * kBlock, found[t], [&](int s) { return chunk.decays.to_end(s); });
      add(d_write[t], found[t]);
    }
  }

  // g = c_C g + (c Q)^T d_out
  FWP_DEVICE void add_reads(const Stage& chunk, typename Base::State& g) const {
    Factor d_read[kChunkBlocks][1];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      chunk.d_out.left_transposed(t * kBlock, this->own_column(), d_read[t][0]);
    if constexpr (kDecays) {
      this->fade(g, chunk.decays.total());
      FWP_UNROLL for (int t = kChunkBlocks; t-- > 0;) {
        Product faded[1];
        Factor left[1][kExactParts];
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
  FWP_DEVICE static void add_erased(const Scores& scores, int t, int s, const Factor (&d)[kExactParts], Product& x) {
    add_product<kExactParts>(x, d, [&](int m, Factor& right) { scores.erase[m].right(t * kBlock, s * kBlock, right); });
  }

  // This lane's sums of x * y over the rows, for each of its columns.
  FWP_DEVICE static void multiply_columns(const Product& x, const Product& y, float (&sums)[4]) {
    FWP_UNROLL for (int h = 0; h < 2; ++h)
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        float& sum = sums[2 * h + e] = 0;
        FWP_UNROLL for (int r = 0; r < 2; ++r) sum = fma(x[h][2 * r + e], y[h][2 * r + e], sum);
      }
  }
  // The terms of this warp's columns in the gradients of the rates.
  FWP_DEVICE void put_rates(const float (&of_rates)[kChunkBlocks][4], float* to) const {
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int e = 0; e < 2; ++e) {
          const float sum = sum_rows(of_rates[t][2 * h + e]);
          if (line() == 0) to[this->warp() * kChunkTokens + t * kBlock + 8 * h + pair() + e] = sum;
        }
  }
  // The sum over all lanes that hold the same columns of a product.
  FWP_DEVICE static float sum_rows(float x) {
    FWP_UNROLL for (int distance = 4; distance < kWarp; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  }
};

}  // namespace fwp::cuda
