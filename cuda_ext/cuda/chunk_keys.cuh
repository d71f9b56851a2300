// Shared by the passes on the tensor cores with decays by key, 32 tokens at a time. ../rule.h has the symbols. F_ts, c, w and c_C
// are vectors along the keys; B is b K, which writes. A removal reads with y before the decay of its
// token, so F_(t-1)s and c- (F_before, c_before) stand for F_ts and c there, and what y retrieves is -E. Only where nothing is
// erased do values fade (Z, z_C).
//
// A program of one chunk (read(Q, F, K) has q_t . (F_ts * k_s); `upto` keeps s <= t, `below` s < t):
//
//     P, A, X = upto(read(Q, F, B)), below(read(K, F, B)), upto(read(Q, F, x))
//     R, Y = below(read(y, F_before, B)), below(read(y, F_before, x))
//     E = -solve(I + Y, (c_before * y) @ W + R @ V) if removes else solve(I + A, V - (c * K) @ W) if erases else V
//     written, removed = (V, E) if removes else (E, 0 * E)
//     out = ((c * Q) @ W) * Z_start + fade(P, Z, written) + X @ removed
//     W = outer(c_C, z_C) * W + (w * B).T @ (w_of_value * written) + (w * x).T @ removed
//
// A group has 8 tokens. In one group, a lane multiplies token by token, in float32. Tokens of different groups: let h be 16 if t
// and s are in different halves of the chunk, otherwise 8. Then s is in an even block of h tokens and t in the odd one after it.
// Let c_t start at the first token of its block, and w_s end at the last one of its block. So F_ts = c_t w_s, and the scores are
// products of matrices. There are no divisions or logarithms, so decays may be zero.
//
// ChunkKeyScores computes the scores, for all chunks in parallel. ChunkKeyStates goes from chunk to chunk, in both passes.
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
FWP_DEVICE void multiply(KeyNumbers& x, const KeyNumbers& by) {
  for_numbers([&](int t, int e) { x[t][e] *= by[t][e]; });
}
FWP_DEVICE void clear(KeyNumbers& x) {
  for_numbers([&](int t, int e) { x[t][e] = 0; });
}

// The parts that hold a number of an input: one for bfloat16, all three for float32 and float16. So a pass for float32 takes
// float16, too. Its other factors then have all parts as well, and long sums are added outside of the tensor cores.
template <int kInputParts>
using HalfOf = std::conditional_t<kInputParts == 1, Bfloat16, Float16>;

// Two adjacent numbers in shared memory.
template <typename T>
FWP_DEVICE void load_two(const Grouped<T>& from, int token, int i, float (&to)[2]) {
  FWP_UNROLL for (int e = 0; e < 2; ++e) to[e] = number(from.at(token, i)[e]);
}
template <typename T>
FWP_DEVICE void store_two(const float (&from)[2], const Grouped<T>& to, int token, int i) {
  FWP_UNROLL for (int e = 0; e < 2; ++e) to.put(token, i + e, from[e]);
}
FWP_DEVICE void load_two(const Grouped<Bfloat16>& from, int token, int i, float (&to)[2]) {
  const uint32_t pair = from.get(token, i);
  to[0] = low(pair), to[1] = high(pair);
}
FWP_DEVICE void store_two(const float (&from)[2], const Grouped<Bfloat16>& to, int token, int i) {
  to.put(token, i, pair_of(from[0], from[1]));
}

// A vector for each token of a chunk in shared memory, in half precision, or as given in that or in float32. Lanes load numbers
// of rows 8 apart, for which the rows need no padding.
template <typename Half, bool kOnlyHalf = false>
struct TokenVectors {
  Grouped<float> in_float32;
  Type type;

  FWP_BOTH TokenVectors(Carver& carver, int tokens, int width, Type type_, int padding = 0) : type(type_) {
    // One pointer, with a size that depends on the type: of one of two pointers the compiler does not know the memory.
    const int pitch = width + padding;
    const bool is_wide = !kOnlyHalf && type == Type::float32;
    Half* const data = carver.take<Half>(is_wide ? 2 * grouped_size<float>(tokens, pitch) : grouped_size(tokens, pitch));
    in_float32 = {reinterpret_cast<float*>(data), pitch};
  }
  // Calls f with the matrix of its type.
  template <typename F>
  FWP_DEVICE void typed(F f) const {
    const Grouped<Half> in_half{reinterpret_cast<Half*>(in_float32.data), in_float32.pitch};
    if constexpr (kOnlyHalf)
      f(in_half);
    else
      type == Type::float32 ? f(in_float32) : f(in_half);
  }

  // This lane's numbers of 16, from `column` on.
  FWP_DEVICE void load(int column, KeyNumbers& to) const {
    typed([&](const auto& from) {
      FWP_UNROLL for (int t = 0; t < kSpan; ++t) load_two(from, own_token(t), column + own_number(), to[t]);
    });
  }
  FWP_DEVICE void store(int column, const KeyNumbers& from) const {
    typed([&](const auto& to) {
      FWP_UNROLL for (int t = 0; t < kSpan; ++t) store_two(from[t], to, own_token(t), column + own_number());
    });
  }
};

// A lane's part of 16 numbers of the keys. neighbor[n]: the product of all decays of the neighboring block of 2^n groups, in the
// order of the tokens.
struct KeySlice {
  KeyNumbers reader, writer, decay;
  float neighbor[2][2];

  // All lanes of a warp call it.
  FWP_DEVICE void find_whole() {
    FWP_UNROLL for (int e = 0; e < 2; ++e) {
      float own = decay[0][e];
      FWP_UNROLL for (int t = 1; t < kSpan; ++t) own *= decay[t][e];
      neighbor[0][e] = __shfl_xor_sync(0xffffffffu, own, kSpan);
      neighbor[1][e] = __shfl_xor_sync(0xffffffffu, own * neighbor[0][e], 2 * kSpan);
    }
  }
  // c_C: the product of all decays of the chunk. It is computed with a rest, because an error of f would add up over the chunks.
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

// The products of decays from the start of each block of kGroups groups to each token (kBefore: to the token before it), and of
// those after it to the end.
template <int kGroups, bool kBefore = false>
struct DecayProducts {
  KeyNumbers from_start, to_end;

  FWP_DEVICE DecayProducts(const KeySlice& keys) {
    for_numbers([&](int t, int e) {
      if (kBefore)
        from_start[t][e] = t > 0 ? from_start[t - 1][e] * keys.decay[t - 1][e] : 1;
      else
        from_start[t][e] = t > 0 ? from_start[t - 1][e] * keys.decay[t][e] : keys.decay[t][e];
    });
    FWP_UNROLL for (int t = kSpan; t-- > 0;)
      FWP_UNROLL for (int e = 0; e < 2; ++e) to_end[t][e] = t + 1 < kSpan ? to_end[t + 1][e] * keys.decay[t + 1][e] : 1;
    if constexpr (kGroups > 1) join<1>(keys.neighbor[0]);
    if constexpr (kGroups > 2) join<2>(keys.neighbor[1]);
  }

 private:
  // Blocks of kOf groups become pairs of blocks.
  template <int kOf>
  FWP_DEVICE void join(const float (&neighbor)[2]) {
    for_numbers([&](int t, int e) {
      from_start[t][e] *= reads<kOf>() ? neighbor[e] : 1;
      to_end[t][e] *= reads<kOf>() ? 1 : neighbor[e];
    });
  }
};

// Two adjacent numbers of a token, in parts.
template <int parts, typename To>
FWP_DEVICE void put_parts(const float (&x)[2], const To (&to)[parts], int token, int i) {
  uint32_t of_pair[parts];
  split(x[0], x[1], of_pair);
  FWP_UNROLL for (int n = 0; n < parts; ++n) to[n].put(token, i, of_pair[n]);
}

// The size of a matrix of 32 x 16.
constexpr int kScaledSize = grouped_size(kChunkTokens, kBlock + kPadding);

// 32 x 16 numbers of one warp: as factors, or for an exchange between lanes.
template <int parts>
union WarpScratch {
  Bfloat16 factors[parts][kScaledSize];
  float numbers[kChunkTokens][kBlock + 2];

  template <int kGroups, bool kBefore>
  FWP_DEVICE void put(const KeySlice& keys, const DecayProducts<kGroups, kBefore>& products,
                      Grouped<Bfloat16> (&scaled)[parts]) {
    FWP_UNROLL for (int m = 0; m < parts; ++m) scaled[m] = {factors[m], kBlock + kPadding};
    put_scaled(keys, products, scaled);
  }
  // Products whose rows are tokens, or whose columns are, to the lanes of their numbers.
  template <bool kTokensInRows>
  FWP_DEVICE void exchange(Product (&from)[kChunkBlocks], KeyNumbers& to) {
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
      if constexpr (kTokensInRows)
        for_pairs(from[t], [&](int row, int i, float x, float y) {
          numbers[t * kBlock + row][i] = x, numbers[t * kBlock + row][i + 1] = y;
        });
      else
        for_elements(from[t], [&](int i, int token, float x) { numbers[t * kBlock + token][i] = x; });
    }
    __syncwarp();
    for_numbers([&](int t, int e) { to[t][e] = numbers[own_token(t)][own_number() + e]; });
    __syncwarp();
  }
  // Back to products whose columns are tokens.
  FWP_DEVICE void exchange(const KeyNumbers& from, Product (&to)[kChunkBlocks]) {
    for_numbers([&](int t, int e) { numbers[own_token(t)][own_number() + e] = from[t][e]; });
    __syncwarp();
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      for_elements(to[t], [&](int i, int token, float& x) { x = numbers[t * kBlock + token][i]; });
    __syncwarp();
  }
};

// The tokens as factors for blocks of kGroups groups, in such a matrix for this warp: c x where a token reads, w y where it
// writes.
template <int kGroups, bool kBefore, int parts>
FWP_DEVICE void put_scaled(const KeySlice& keys, const DecayProducts<kGroups, kBefore>& products,
                           const Grouped<Bfloat16> (&to)[parts]) {
  FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
    float x[2];
    FWP_UNROLL for (int e = 0; e < 2; ++e)
      x[e] = reads<kGroups>() ? products.from_start[t][e] * keys.reader[t][e] : products.to_end[t][e] * keys.writer[t][e];
    put_parts(x, to, own_token(t), own_number());
  }
  __syncwarp();
}

// Where a token's decay comes from, if not from its vector: zero, or one.
constexpr float kGiven = 2;

// The tokens of a chunk in shared memory, vectors of `width` numbers. by_key: whether decays are vectors. If not, `source` has
// them, otherwise kGiven or what replaces them.
template <int kInputParts, bool kRemoves>
struct KeyTokens {
  TokenVectors<HalfOf<kInputParts>, kInputParts == 1> query, key;
  TokenVectors<HalfOf<kInputParts>> decay, removal_key, removal;
  float *rate, *source;
  bool by_key;

  FWP_BOTH KeyTokens(Carver& carver, int width, Type type, Type of_decay, bool by_key_, Type of_removal_key = {},
                     Type of_removal = {})
      : query(carver, kChunkTokens, width, type), key(carver, kChunkTokens, width, type),
        decay(carver, by_key_ ? kChunkTokens : 0, width, of_decay),
        removal_key(carver, kRemoves ? kChunkTokens : 0, width, of_removal_key),
        removal(carver, kRemoves ? kChunkTokens : 0, width, of_removal), rate(carver.take<float>(kChunkTokens)),
        source(carver.take<float>(kChunkTokens)), by_key(by_key_) {}

  // The decays of 16 numbers, from `column` on.
  FWP_DEVICE void load_decays(int column, KeySlice& to) const {
    if (by_key) decay.load(column, to.decay);
    FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
      const float from = source[own_token(t)];
      if (!by_key || from != kGiven) to.decay[t][0] = to.decay[t][1] = from;
    }
    to.find_whole();
  }
  // What erases in a removal. It reads before the decay of its token, which is zero where a document begins: there is nothing
  // to read.
  FWP_DEVICE void load_removal_keys(int column, KeyNumbers& to) const {
    removal_key.load(column, to);
    clear_beginnings(to);
  }
  FWP_DEVICE void clear_beginnings(KeyNumbers& x) const {
    FWP_UNROLL for (int t = 0; t < kSpan; ++t)
      if (source[own_token(t)] == 0) x[t][0] = x[t][1] = 0;
  }
  FWP_DEVICE void load_keys(int column, KeyNumbers& to) const {
    key.load(column, to);
    FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
      const float b = rate[own_token(t)];
      to[t][0] *= b, to[t][1] *= b;
    }
  }
};

// Values or gradients of outputs of a chunk, 32 tokens, and how a warp has 16 columns of them as rows: as factors, or as numbers.
template <int kInputParts>
struct ValueTile : TokenVectors<HalfOf<kInputParts>> {
  FWP_BOTH ValueTile(Carver& carver, int tokens, int width, Type type)
      : TokenVectors<HalfOf<kInputParts>>(carver, tokens, width, type, kPadding) {}

  FWP_DEVICE void load(int t, int column, Product& to) const {
    this->typed([&](const auto& from) {
      for_elements(to, [&](int j, int s, float& x) { x = number(*from.at(t * kBlock + s, column + j)); });
    });
  }
  template <bool kAlign>
  FWP_DEVICE void load(int column, Factor (&to)[kChunkBlocks][kInputParts]) const {
    Product x[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) load(t, column, x[t]);
    if constexpr (kAlign)
      split_rows(x, to);
    else
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) split(x[t], to[t]);
  }
};
template <>
struct ValueTile<1> {
  Shared numbers;

  FWP_BOTH ValueTile(Carver& carver, int tokens, int width, Type) : numbers(carver.matrix(tokens, width)) {}
  template <typename F>
  FWP_DEVICE void typed(F f) const {
    f(numbers);
  }
  FWP_DEVICE void load(int t, int column, Product& to) const {
    Factor factor;
    numbers.left_transposed(t * kBlock, column, factor);
    unpack(factor, to);
  }
  template <bool kAlign>
  FWP_DEVICE void load(int column, Factor (&to)[kChunkBlocks][1]) const {
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) numbers.left_transposed(t * kBlock, column, to[t][0]);
  }
};

// Tokens in three parts leave no room for a second team.
template <int kRows, int kInputParts>
constexpr int kTeamsByKey = kInputParts == 1 ? kMostTeams<kRows> : 1;

// kRows: a multiple of 16, at least Dk. The inputs `rate`, `decay` along the keys or for a head, and along the keys
// `removal_key` and `removal`.
template <int kRows, Rule kRule, int kInputParts, int kTeamLimit = kTeamsByKey<kRows, kInputParts>>
struct ChunkKeyPass : ChunkPass<kRows, erases_of(kRule) != Erases::kNothing, true, kTeamLimit> {
  static constexpr bool kErasesKey = erases_of(kRule) == Erases::kKey, kRemoves = erases_of(kRule) == Erases::kRemoval;
  static constexpr bool kSolves = kErasesKey || kRemoves;  // for E
  static constexpr bool kFadesValues = fades_of(kRule) == Fades::kKeyAndValue;
  using Base = ChunkPass<kRows, kSolves, true, kTeamLimit>;
  using SharedTokens = KeyTokens<kInputParts, kRemoves>;
  // Parts of products of tokens that results have as factors. A state that is read has as many as an input.
  static constexpr int kResultParts = kInputParts == 1 ? kTokenParts : kExactParts;
  // Without solving, a transition is a vector. Where values fade, it would be two: there are no segments. Nor are there in
  // float32, to have fewer kernels.
  static constexpr bool kHasSegments = !kFadesValues && kInputParts == 1;
  // Of columns: these rules need more shared memory.
  static constexpr int kMostWarps = kRemoves || kFadesValues ? kChunkWarps / 2 : kChunkWarps;
  // The stored scores: P in parts, as exact as what depends on it, then -A (of a removal -Y) as in Scores, X, and -R.
  static constexpr int kScoreParts = kErasesKey ? kExactParts : kResultParts;
  static constexpr int kErased = kScoreParts, kReadRemoved = kErased + kExactParts, kFound = kReadRemoved + kExactParts;
  static constexpr int kScoreMatrices = kRemoves ? kFound + kExactParts : kErasesKey ? kErased + kExactParts : kScoreParts;

  Brought removal_key, removal;
  bool by_key;  // whether decays are vectors; always in bfloat16, whose other decays have kernels of their own

  // With kRows numbers of the keys.
  FWP_BOTH SharedTokens take_tokens(Carver& carver) const {
    return {carver, kRows, this->query.type, this->decay.type, kInputParts == 1 || by_key, removal_key.type, removal.type};
  }

  // c += a b, where load(n, b) loads part n of b.
  template <int of_b, int of_a, typename Load>
  FWP_DEVICE static void accumulate(Product& c, const Factor (&a)[of_a], Load load) {
    if constexpr (kInputParts == 1)
      multiply<of_b>(c, a, load);
    else
      add_product<of_b>(c, a, load);
  }

  // Without solving, an additional column, which begins with ones and where nothing is written, has the product of all decays.
  FWP_BOTH int ends_columns() const { return this->value_columns() + (kSolves ? kRows : kBlock); }
  FWP_DEVICE void load_transition(typename Base::State& state) const {
    if constexpr (kSolves)
      this->load_identity(state);
    else
      this->for_state(state, [&](bool, int, int column, float& x) { x = column == this->value_columns() ? 1 : 0; });
  }

  // The starts of a pass's inputs: of those below, then its own, then of documents.
  static constexpr int kOwnStarts = 6;
  template <typename... Own>
  FWP_DEVICE void put_starts(const char** starts, const Own&... own) const {
    const Brought* const all[] = {&this->query, &this->key, &this->decay, &this->rate, &removal_key, &removal, &own...};
    Base::put_starts(all, starts);
  }
  // The numbers of the keys from `column` on, by so many threads.
  FWP_DEVICE void bring_tokens(const char* const* starts, int64_t n, const SharedTokens& to, int column, int thread,
                               int threads) const {
    const auto bring_vectors = [&](const Brought& from, const char* start, const auto& vectors) {
      vectors.typed([&](const auto& target) {
        this->bring(from, start, n, column, this->size.rows, kRows, target, 0, thread, threads);
      });
    };
    bring_vectors(this->query, starts[0], to.query);
    bring_vectors(this->key, starts[1], to.key);
    if (to.by_key) bring_vectors(this->decay, starts[2], to.decay);
    if constexpr (kRemoves) {
      bring_vectors(removal_key, starts[4], to.removal_key);
      bring_vectors(removal, starts[5], to.removal);
    }
  }

  FWP_DEVICE Scalars ask(const char* const* starts, const char* documents, int64_t n, int t) const {
    return Base::ask(starts[3], kInputParts == 1 || by_key ? nullptr : starts[2], documents, n, t);
  }
  // By one warp.
  template <typename To>
  FWP_DEVICE void put_scalars(const Scalars& asked, const To& to) const {
    to.rate[lane()] = number_of(this->rate.type, asked.rate);
    const float decay = to.by_key ? kGiven : this->decay.data ? number_of(this->decay.type, asked.decay) : 1;
    to.source[lane()] = !asked.there ? 1 : asked.begins ? 0 : decay;
  }
};

// A pass with a block for each chunk, for any Dk: a warp has 16 numbers of the keys, in shared memory of its own.
template <Rule kRule, int kInputParts>
struct ChunkKeyParallel : ChunkKeyPass<kBlock, kRule, kInputParts, 1> {
  using Base = ChunkKeyPass<kBlock, kRule, kInputParts, 1>;

  struct WarpTokens : Base::SharedTokens {
    FWP_BOTH WarpTokens(Carver& carver, const ChunkKeyParallel& pass) : Base::SharedTokens(pass.take_tokens(carver)) {}
  };
  using TokensOfWarps = Copies<WarpTokens, ChunkKeyParallel>;

  FWP_DEVICE Scalars load_tokens(const char* const* starts, const char* documents, int64_t n, const WarpTokens& to) const {
    this->bring_tokens(starts, n, to, this->own_column(), lane(), kWarp);
    const Scalars scalars = this->ask(starts, documents, n, lane());
    this->put_scalars(scalars, to);
    return scalars;
  }
  template <typename Vectors>
  FWP_DEVICE void store_vectors(const OutputArray& to, int64_t n, const Vectors& from) const {
    from.typed([&](const auto& source) {
      this->store_tokens(to, n, source, 0, kBlock, this->own_column(), this->size.rows, lane(), kWarp);
    });
  }
};

}  // namespace fwp::cuda
