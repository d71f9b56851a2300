// The scores of rules with decays by key; chunk_keys.cuh has the equations. A block has one chunk, a warp 16 numbers of its
// keys.
#pragma once

#include "chunk_keys.cuh"

namespace fwp::cuda {

// P on and below its diagonal, in parts: (heads, chunks, kOfTokens, 32, 32).
constexpr int kScores = kOfTokens * kChunkTokens * kChunkTokens;
// Pairs of tokens s <= t of a group.
constexpr int kPairs = kSpan * (kSpan + 1) / 2;
FWP_DEVICE int pair_at(int t, int s) { return t * (t + 1) / 2 + s; }

template <int kRows>
struct ChunkKeyScores : ChunkKeyPass<kRows> {
  using Pass = ChunkKeyPass<kRows>;
  static constexpr int kWarps = kRows / kBlock;

  Bfloat16* scores;

  // Each warp's part of the scores, over its numbers of the keys.
  union Scratch {
    Bfloat16 factors[kOfTokens][kChunkTokens * (kBlock + kPadding) + kChunkTokens / kGroupRows * kBlock];
    float in_group[kPairs][kWarp];  // over the numbers of each lane
  };
  struct Memory {
    const char** starts;
    KeyTokens<kRows> tokens;
    Scratch* scratch;
    float* parts;  // (warps, 3, 8, lanes)

    FWP_BOTH Memory(Carver& carver, const ChunkKeyScores&)
        : starts(carver.take<const char*>(5)), tokens(carver), scratch(carver.take<Scratch>(kWarps)),
          parts(carver.take<float>(kWarps * 3 * 8 * kWarp)) {}
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    const int64_t n = this->chunk();
    this->put_starts({&this->query, &this->key, &this->decay, &this->rate}, memory.starts);
    this->bring_tokens(memory.starts, n, memory.tokens);
    commit_copies();
    this->put_scalars(this->ask(memory.starts[3], memory.starts[4], n), memory.tokens);
    wait_copies<0>();
    __syncthreads();
    KeySlice keys;
    this->load_slice(memory.tokens, this->own_column(), keys);
    Scratch& own = memory.scratch[this->warp()];
    multiply_blocks<2>(keys, own, memory);
    multiply_blocks<1>(keys, own, memory);
    multiply_in_groups(keys, own);
    __syncthreads();
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < 3; b += kWarps) give(n, b, memory);
  }

 private:
  // Number i of this lane in block b.
  FWP_DEVICE static float& part(const Memory& memory, int warp, int b, int i) {
    return memory.parts[((warp * 3 + b) * 8 + i) * kWarp + lane()];
  }

  // The scores of tokens in neighboring blocks of kGroups groups.
  template <int kGroups>
  FWP_DEVICE void multiply_blocks(const KeySlice& keys, Scratch& own, const Memory& memory) const {
    typename Pass::Scaled scaled;
    FWP_UNROLL for (int m = 0; m < kOfTokens; ++m) scaled[m] = {own.factors[m], kBlock + kPadding};
    Pass::template put_scaled<kGroups>(keys, DecayProducts<kGroups>(keys), scaled);
    FWP_UNROLL for (int b = 0; b < (kGroups > 1 ? 1 : kChunkBlocks); ++b) {
      const int row = kGroups > 1 ? kBlock : b * kBlock, column = b * kBlock;
      Product product;
      Factor left[kOfTokens];
      clear(product);
      FWP_UNROLL for (int m = 0; m < kOfTokens; ++m) scaled[m].left(row, 0, left[m]);
      multiply<kOfTokens>(product, left, [&](int m, Factor& right) { scaled[m].right_transposed(column, 0, right); });
      FWP_UNROLL for (int i = 0; i < 8; ++i)
        part(memory, this->warp(), kGroups > 1 ? 2 : b, i) = product[i / 4][i % 4];
    }
    __syncwarp();
  }

  FWP_DEVICE static void multiply_in_groups(const KeySlice& keys, Scratch& own) {
    FWP_UNROLL for (int s = 0; s < kSpan; ++s) {
      float x = keys.key[s][0], y = keys.key[s][1];
      FWP_UNROLL for (int t = s; t < kSpan; ++t) {
        if (t > s) x *= keys.decay[t][0], y *= keys.decay[t][1];
        own.in_group[pair_at(t, s)][lane()] = fma(keys.query[t][0], x, keys.query[t][1] * y);
      }
    }
  }

  // Sum block b over the warps, and store it.
  FWP_DEVICE void give(int64_t n, int b, const Memory& memory) const {
    const int row = b > 0 ? kBlock : 0, column = b == 1 ? kBlock : 0;
    Product sum;
    clear(sum);
    FWP_UNROLL_BY(1) for (int w = 0; w < kWarps; ++w)
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int i = 0; i < 4; ++i) {
          const int r = i / 2, s = pair() + i % 2;
          if (b == 2 || r > h)
            sum[h][i] += part(memory, w, b, 4 * h + i);
          else if (r == h && s <= line())
            sum[h][i] += sum_group(memory.scratch[w].in_group[pair_at(line(), s)] + (row + 8 * r));
        }
    Bfloat16* const to = scores + (this->head() * this->chunks() + n) * kScores;
    for_pairs(sum, [&](int t, int s, float x, float y) {
      uint32_t of_pair[kOfTokens];
      split(x, y, of_pair);
      FWP_UNROLL for (int m = 0; m < kOfTokens; ++m)
        Shared{to + m * kChunkTokens * kChunkTokens, kChunkTokens}.put(row + t, column + s, of_pair[m]);
    });
  }
  FWP_DEVICE static float sum_group(const float* of_lanes) {
    float sum = 0;
    FWP_UNROLL for (int i = 0; i < kSpan; i += kPiece) {
      const Piece<float> piece = *reinterpret_cast<const Piece<float>*>(of_lanes + i);
      sum += (piece.x[0] + piece.x[1]) + (piece.x[2] + piece.x[3]);
    }
    return sum;
  }
};

}  // namespace fwp::cuda
