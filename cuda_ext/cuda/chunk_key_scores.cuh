// The scores of rules with decays by key; chunk_keys.cuh has the equations. A block has one chunk, a warp 16 numbers of its
// keys.
#pragma once

#include "chunk_keys.cuh"

namespace fwp::cuda {

// A matrix of 32 x 32 for each chunk, in parts.
constexpr int kMatrix = kChunkTokens * kChunkTokens;
// Pairs of tokens s <= t of a group.
constexpr int kPairs = kSpan * (kSpan + 1) / 2;
FWP_DEVICE int pair_at(int t, int s) { return t * (t + 1) / 2 + s; }

template <Rule kRule, int kInputParts>
struct ChunkKeyScores : ChunkKeyParallel<kRule, kInputParts> {
  using Base = ChunkKeyParallel<kRule, kInputParts>;
  using Base::kErasesKey, Base::kRemoves, Base::kScoreParts;
  static constexpr int kScaledParts = Base::kSolves ? kExactParts : kScoreParts;

  Bfloat16* scores;  // (heads, chunks, kScoreMatrices, 32, 32): see ChunkKeyPass

  // Each warp's part of the scores, over its numbers of the keys.
  union Scratch {
    WarpScratch<kScaledParts> scaled;
    float in_group[kPairs][kWarp];  // over the numbers of each lane
  };
  struct Memory {
    const char** starts;
    typename Base::TokensOfWarps tokens;
    Scratch* scratch;
    float* parts;  // (warps, 3, 8, lanes)
    Scores erase;

    FWP_BOTH Memory(Carver& carver, const ChunkKeyScores& pass)
        : starts(carver.take<const char*>(Base::kOwnStarts + 1)), tokens(carver, pass, pass.warps),
          scratch(carver.take<Scratch>(pass.warps)), parts(carver.take<float>(pass.warps * 3 * 8 * kWarp)),
          erase(carver, 0, Base::kSolves ? kExactParts : 0) {}
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    const int64_t n = this->chunk();
    this->put_starts(memory.starts);
    const auto tokens = memory.tokens[this->warp()];
    this->load_tokens(memory.starts, memory.starts[Base::kOwnStarts], n, tokens);
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    KeySlice keys;
    tokens.load_decays(0, keys);
    tokens.query.load(0, keys.reader);
    tokens.load_keys(0, keys.writer);
    Bfloat16* const to = scores + (this->head() * this->chunks() + n) * Base::kScoreMatrices * kMatrix;
    store_scores<false, kScoreParts>(keys, memory, 1, to);
    if constexpr (kErasesKey) {
      tokens.key.load(0, keys.reader);
      store_erased<false>(keys, memory, to + Base::kErased * kMatrix);
    }
    if constexpr (kRemoves) {
      KeyNumbers written;
      for_numbers([&](int t, int e) { written[t][e] = keys.writer[t][e]; });
      tokens.removal.load(0, keys.writer);
      store_scores<false, kExactParts>(keys, memory, 1, to + Base::kReadRemoved * kMatrix);
      tokens.load_removal_keys(0, keys.reader);
      store_erased<true>(keys, memory, to + Base::kErased * kMatrix);
      for_numbers([&](int t, int e) { keys.writer[t][e] = written[t][e]; });
      store_scores<true, kExactParts>(keys, memory, -1, to + Base::kFound * kMatrix);
    }
  }

 private:
  // Number i of this lane in block b.
  FWP_DEVICE static float& part(const Memory& memory, int warp, int b, int i) {
    return memory.parts[((warp * 3 + b) * 8 + i) * kWarp + lane()];
  }

  // The scores in parts, times `sign`.
  template <bool kBefore, int parts>
  FWP_DEVICE void store_scores(const KeySlice& keys, const Memory& memory, float sign, Bfloat16* to) const {
    multiply_tokens<kBefore, parts>(keys, memory);
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < 3; b += this->warps) {
      Product sum;
      sum_block(b, memory, sum);
      for_pairs(sum, [&](int t, int s, float x, float y) {
        uint32_t of_pair[parts];
        split(sign * x, sign * y, of_pair);
        FWP_UNROLL for (int m = 0; m < parts; ++m)
          Shared{to + m * kMatrix, kChunkTokens}.put(row_of_block(b) + t, column_of_block(b) + s, of_pair[m]);
      });
    }
  }
  // Those with what erases, negative, and solved for within each half of the chunk.
  template <bool kBefore>
  FWP_DEVICE void store_erased(const KeySlice& keys, const Memory& memory, Bfloat16* to) const {
    multiply_tokens<kBefore, kExactParts>(keys, memory);
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < 3; b += this->warps) make_erase(b, memory);
    __syncthreads();
    store_erase(memory.erase, to);
  }

  template <bool kBefore, int parts>
  FWP_DEVICE void multiply_tokens(const KeySlice& keys, const Memory& memory) const {
    Scratch& own = memory.scratch[this->warp()];
    __syncthreads();  // for the scores before
    multiply_blocks<2, kBefore, parts>(keys, own, memory);
    multiply_blocks<1, kBefore, parts>(keys, own, memory);
    multiply_in_groups<kBefore>(keys, own);
    __syncthreads();
  }

  // The scores of tokens in neighboring blocks of kGroups groups.
  template <int kGroups, bool kBefore, int parts>
  FWP_DEVICE void multiply_blocks(const KeySlice& keys, Scratch& own, const Memory& memory) const {
    Grouped<Bfloat16> scaled[kScaledParts];
    own.scaled.put(keys, DecayProducts<kGroups, kBefore>(keys), scaled);
    FWP_UNROLL for (int b = 0; b < (kGroups > 1 ? 1 : kChunkBlocks); ++b) {
      const int row = kGroups > 1 ? kBlock : b * kBlock, column = b * kBlock;
      Product product;
      Factor left[parts];
      clear(product);
      FWP_UNROLL for (int m = 0; m < parts; ++m) scaled[m].left(row, 0, left[m]);
      multiply<parts>(product, left, [&](int m, Factor& right) { scaled[m].right_transposed(column, 0, right); });
      FWP_UNROLL for (int i = 0; i < 8; ++i)
        part(memory, this->warp(), kGroups > 1 ? 2 : b, i) = product[i / 4][i % 4];
    }
    __syncwarp();
  }

  // kBefore: what a token reads has not yet faded by its own decay, and is not its own.
  template <bool kBefore>
  FWP_DEVICE static void multiply_in_groups(const KeySlice& keys, Scratch& own) {
    FWP_UNROLL for (int s = 0; s < kSpan; ++s) {
      float x = keys.writer[s][0], y = keys.writer[s][1];
      FWP_UNROLL for (int t = s; t < kSpan; ++t) {
        const int faded_by = kBefore ? t - 1 : t;
        if (faded_by > s) x *= keys.decay[faded_by][0], y *= keys.decay[faded_by][1];
        const float score = fma(keys.reader[t][0], x, keys.reader[t][1] * y);
        own.in_group[pair_at(t, s)][lane()] = kBefore && t == s ? 0 : score;
      }
    }
  }

  // Block b, summed over the warps; zeros above the diagonal.
  FWP_DEVICE void sum_block(int b, const Memory& memory, Product& sum) const {
    clear(sum);
    FWP_UNROLL_BY(1) for (int w = 0; w < this->warps; ++w)
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int i = 0; i < 4; ++i) {
          const int r = i / 2, s = pair() + i % 2;
          if (b == 2 || r > h)
            sum[h][i] += part(memory, w, b, 4 * h + i);
          else if (r == h && s <= line())
            sum[h][i] += sum_group(memory.scratch[w].in_group[pair_at(line(), s)] + (row_of_block(b) + 8 * r));
        }
  }
  FWP_DEVICE static float sum_group(const float* of_lanes) {
    float sum = 0;
    FWP_UNROLL for (int i = 0; i < kSpan; i += kPiece) {
      const Piece<float> piece = *reinterpret_cast<const Piece<float>*>(of_lanes + i);
      sum += (piece.x[0] + piece.x[1]) + (piece.x[2] + piece.x[3]);
    }
    return sum;
  }

  // -A below the diagonal blocks, and for a diagonal block the result of invert().
  FWP_DEVICE void make_erase(int b, const Memory& memory) const {
    Product sum;
    sum_block(b, memory, sum);
    for_pairs(sum, [&](int t, int s, float x, float y) {
      if (b == 2) return Scores::put<kExactParts>(memory.erase.erase, kBlock + t, s, -x, -y);
      float* const at = memory.erase.diagonal + b * Scores::kDiagonal + t * Scores::kLine + s;
      at[0] = x, at[1] = y;
    });
    __syncwarp();
    if (b < kChunkBlocks && lane() < kBlock) Base::invert(memory.erase, b, lane());
  }
  FWP_DEVICE void store_erase(const Scores& from, Bfloat16* to) const {
    constexpr int per_piece = 8, of_row = kChunkTokens / per_piece;
    FWP_UNROLL for (int m = 0; m < kExactParts; ++m)
      FWP_UNROLL_BY(1) for (int at = int(threadIdx.x); at < kMatrix / per_piece; at += this->warps * kWarp)
        *reinterpret_cast<Piece<float>*>(to + m * kMatrix + at * per_piece) =
            *reinterpret_cast<const Piece<float>*>(from.erase[m].at(at / of_row, at % of_row * per_piece));
  }
};

}  // namespace fwp::cuda
