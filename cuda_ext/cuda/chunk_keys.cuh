// Shared by the passes on the tensor cores with decays by key, in bfloat16, 32 tokens at a time. With b the rates, K for the keys
// and F_ts for the product of the decays of tokens s + 1 to t, now a vector along the keys:
//
//     P_ts = the sum over i of q_ti F_tsi b_s k_si  (s <= t)        A_ts = the sum over i of k_ti F_tsi b_s k_si  (s < t)
//     E = V - (c K) S - A E  (without erasing E = V)                  out = (c Q) S + P E        S' = f S + (w b K)^T E
//
// with c, w and f as in chunks.cuh, element by element.
//
// A group has 8 tokens. In one group, a lane multiplies token by token, in float32. Tokens of different groups: let h be 16 if t
// and s are in different halves of the chunk, otherwise 8. Then s is in an even block of h tokens and t in the odd one after it.
// Let c_t start at the first token of its block, and w_s end at the last one of its block. So F_ts = c_t w_s, and the scores are
// products of matrices. There are no divisions or logarithms, so decays may be zero.
//
// ChunkKeyScores computes P and A, for all chunks in parallel. ChunkKeyStates goes from chunk to chunk, in both passes.
// ChunkKeyGradients computes the gradients of keys, queries and decays, again for all chunks in parallel.
#pragma once

#include "chunks.cuh"

namespace fwp::cuda {

// A lane has two numbers of the keys of eight adjacent tokens, in 16 numbers of the keys of a chunk.
constexpr int kSpan = kGroupRows;
using KeyNumbers = float[kSpan][2];

FWP_DEVICE int group() { return lane() / kSpan; }
FWP_DEVICE int own_token(int t) { return group() * kSpan + t; }
FWP_DEVICE int own_number() { return lane() % kSpan * 2; }

// Whether, in blocks of kGroups groups, this lane's group is in an odd block: it reads what the even one before it has written.
template <int kGroups>
FWP_DEVICE bool reads() {
  return group() & kGroups;
}

template <typename F>
FWP_DEVICE void for_numbers(F f) {
  FWP_UNROLL for (int t = 0; t < kSpan; ++t) FWP_UNROLL for (int e = 0; e < 2; ++e) f(t, e);
}

// Where a token's decay comes from.
enum class DecaySource { zero, one, given };

// The tokens of a chunk in shared memory.
template <int kRows>
struct KeyTokens {
  Grouped<Bfloat16> query, key;
  Grouped<float> decay;  // or bfloat16, as it is given
  float *rate, *source;

  FWP_BOTH KeyTokens(Carver& carver)
      : query(carver.grouped(kChunkTokens, kRows)), key(carver.grouped(kChunkTokens, kRows)),
        decay(carver.grouped<float>(kChunkTokens, kRows)), rate(carver.take<float>(kChunkTokens)),
        source(carver.take<float>(kChunkTokens)) {}
  FWP_DEVICE Grouped<Bfloat16> decay_in_bfloat16() const { return {reinterpret_cast<Bfloat16*>(decay.data), decay.pitch}; }
};

// A lane's part of 16 numbers of the keys. `key` is b k. whole[n]: the product of all decays of the neighboring block of 2^n
// groups, in the order of the tokens.
struct KeySlice {
  KeyNumbers query, key, decay;
  float whole[2][2];

  // All lanes of a warp call it.
  FWP_DEVICE void find_whole() {
    FWP_UNROLL for (int e = 0; e < 2; ++e) {
      float own = decay[0][e];
      FWP_UNROLL for (int t = 1; t < kSpan; ++t) own *= decay[t][e];
      whole[0][e] = __shfl_xor_sync(0xffffffffu, own, kSpan);
      whole[1][e] = __shfl_xor_sync(0xffffffffu, own * whole[0][e], 2 * kSpan);
    }
  }
  // f: the product of all decays of the chunk. It is computed with a rest, because an error of f would add up over the chunks.
  // All lanes of a warp call it.
  FWP_DEVICE float product(int e) const {
    float product = decay[0][e], rest = 0;
    const auto times = [&](float factor, float rest_of_factor) {
      const float next = product * factor;
      rest = fma(rest, factor, fma(product, rest_of_factor, fma(product, factor, -next)));
      product = next;
    };
    FWP_UNROLL for (int t = 1; t < kSpan; ++t) times(decay[t][e], 0);
    FWP_UNROLL for (int distance = kSpan; distance < kWarp; distance *= 2)
      times(__shfl_xor_sync(0xffffffffu, product, distance), __shfl_xor_sync(0xffffffffu, rest, distance));
    return product + rest;
  }
};

// The products of decays from the start of each block of kGroups groups to each token, and of those after it to the end.
template <int kGroups>
struct DecayProducts {
  KeyNumbers from_start, to_end;

  FWP_DEVICE DecayProducts(const KeySlice& keys) {
    for_numbers([&](int t, int e) {
      from_start[t][e] = t > 0 ? from_start[t - 1][e] * keys.decay[t][e] : keys.decay[t][e];
    });
    FWP_UNROLL for (int t = kSpan; t-- > 0;)
      FWP_UNROLL for (int e = 0; e < 2; ++e) to_end[t][e] = t + 1 < kSpan ? to_end[t + 1][e] * keys.decay[t + 1][e] : 1;
    if constexpr (kGroups > 1) join<1>(keys.whole[0]);
    if constexpr (kGroups > 2) join<2>(keys.whole[1]);
  }

 private:
  // Blocks of kOf groups become pairs of blocks.
  template <int kOf>
  FWP_DEVICE void join(const float (&whole)[2]) {
    for_numbers([&](int t, int e) {
      from_start[t][e] *= reads<kOf>() ? whole[e] : 1;
      to_end[t][e] *= reads<kOf>() ? 1 : whole[e];
    });
  }
};

// Two adjacent numbers of a token, in parts.
template <int parts>
FWP_DEVICE void put_parts(const float (&x)[2], const Grouped<Bfloat16> (&to)[parts], int token, int i) {
  uint32_t of_pair[parts];
  split(x[0], x[1], of_pair);
  FWP_UNROLL for (int n = 0; n < parts; ++n) to[n].put(token, i, of_pair[n]);
}

// The size of a matrix of 32 x 16.
constexpr int kScaledSize = kChunkTokens * (kBlock + kPadding) + kChunkTokens / kGroupRows * kBlock;

// The tokens as factors for blocks of kGroups groups, in such a matrix for this warp: c q where a token reads, w b k where it
// writes.
template <int kGroups, int parts>
FWP_DEVICE void put_scaled(const KeySlice& keys, const DecayProducts<kGroups>& products, const Grouped<Bfloat16> (&to)[parts]) {
  FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
    float x[2];
    FWP_UNROLL for (int e = 0; e < 2; ++e)
      x[e] = reads<kGroups>() ? products.from_start[t][e] * keys.query[t][e] : products.to_end[t][e] * keys.key[t][e];
    put_parts(x, to, own_token(t), own_number());
  }
  __syncwarp();
}

// kRows: a multiple of 16, at least Dk. kErases: whether the rule erases what the key retrieves. The inputs `rate`, and `decay`
// along the keys.
template <int kRows, bool kErases>
struct ChunkKeyPass : ChunkPass<kRows, kErases, true> {
  static constexpr int kLeastSegments = kErases ? 4 : 2;  // without erasing, a transition is a vector, which costs little
  // The stored scores: P in parts, as exact as what depends on it, and then -A as in Scores.
  static constexpr int kScoreParts = kErases ? kExact : kOfTokens;
  static constexpr int kScoreMatrices = kScoreParts + (kErases ? kExact : 0);

  // The chunk of a block that has only one: then the slabs are chunks.
  FWP_DEVICE int64_t chunk() const { return this->slab(); }

  // Without erasing, an additional column, which begins with ones and where nothing is written, has the product of all decays.
  FWP_BOTH int ends_columns() const { return this->value_columns() + (kErases ? kRows : kBlock); }
  FWP_DEVICE void load_transition(typename ChunkPass<kRows, kErases, true>::State& state) const {
    if constexpr (kErases)
      this->load_identity(state);
    else
      this->for_state(state, [&](bool, int, int column, float& x) { x = column == this->value_columns() ? 1 : 0; });
  }

  FWP_DEVICE void bring_tokens(const char* const* starts, int64_t n, const KeyTokens<kRows>& to) const {
    this->bring_keys(this->query, starts[0], n, to.query);
    this->bring_keys(this->key, starts[1], n, to.key);
    if (this->decay.type == Type::float32)
      this->bring_keys(this->decay, starts[2], n, to.decay);
    else
      this->bring_keys(this->decay, starts[2], n, to.decay_in_bfloat16());
  }

  // As in ChunkPass, but the decays are among the tokens.
  FWP_DEVICE Scalars ask(const char* rates, const char* documents, int64_t n) const {
    return ChunkPass<kRows, kErases, true>::ask(rates, nullptr, documents, n);
  }
  FWP_DEVICE void put_scalars(const Scalars& asked, const KeyTokens<kRows>& to) const {
    if (this->warp() > 0) return;
    to.rate[lane()] = number_of(this->rate.type, asked.rate);
    to.source[lane()] =
        float(!asked.there ? DecaySource::one : asked.begins ? DecaySource::zero : DecaySource::given);
  }

  // 16 numbers of the keys, from `first` on.
  FWP_DEVICE void load_slice(const KeyTokens<kRows>& from, int first, KeySlice& to) const {
    const int i = first + own_number();
    if (this->decay.type == Type::float32)
      for_numbers([&](int t, int e) { to.decay[t][e] = from.decay.at(own_token(t), i)[e]; });
    else
      for_numbers([&](int t, int e) { to.decay[t][e] = number(from.decay_in_bfloat16().at(own_token(t), i)[e]); });
    load_readers(from.query, first, to.query);
    load_readers(from.key, first, to.key);
    FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
      const float rate = from.rate[own_token(t)], source = from.source[own_token(t)];
      to.key[t][0] *= rate, to.key[t][1] *= rate;
      if (source != float(DecaySource::given)) to.decay[t][0] = to.decay[t][1] = source;
    }
    to.find_whole();
  }

  // Queries, or keys without rates: what reads.
  FWP_DEVICE static void load_readers(const Grouped<Bfloat16>& from, int first, KeyNumbers& to) {
    FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
      const uint32_t pair = from.get(own_token(t), first + own_number());
      to[t][0] = low(pair), to[t][1] = high(pair);
    }
  }
};

}  // namespace fwp::cuda
