// The scan of the sum rule on the tensor cores: with P = Q K^T up to its diagonal,
//   out = Q S + P V        S += K^T V
// S and P go into products in two parts, which leaves an error far below the rounding of out; what S adds up are products
// of the inputs, so it stays as exact as float32 is.
#pragma once

#include "chunks.cuh"

namespace fwp::cuda {

template <int kRows>
struct SumChunks : ChunkScan<kRows> {
  using Scan = ChunkScan<kRows>;
  using Scan::kLine, Scan::kColumnLine;

  Input key, query, value;
  Matrices<const float> initial;
  Matrices<float> last;
  Output out;

  // The tokens of a chunk, in the order of the scan.
  struct Buffer {
    Bfloat16 *query, *key;                // 16 x kRows
    Bfloat16 *key_column, *value_column;  // the transposes of key and value
  };
  static FWP_BOTH int buffer_numbers(int warps) {
    return 2 * kChunkTokens * kLine + (kRows + warps * kWarpColumns) * kColumnLine;
  }
  static size_t shared_bytes(int warps) { return kBuffers * sizeof(Bfloat16) * buffer_numbers(warps); }

  FWP_DEVICE void run() const {
    typename Scan::State state;
    this->load(initial, state);
    this->for_chunks([&](int64_t n) { fill(n); }, [&](int64_t n) { use(n, state); });
    this->store(state, last);
  }

 private:
  FWP_DEVICE Buffer buffer(int64_t n) const {
    Bfloat16* const query_ = reinterpret_cast<Bfloat16*>(shared_memory()) + n % kBuffers * buffer_numbers(this->warps);
    Bfloat16 *const key_ = query_ + kChunkTokens * kLine, *const key_column = key_ + kChunkTokens * kLine;
    return {query_, key_, key_column, key_column + kRows * kColumnLine};
  }

  FWP_DEVICE void fill(int64_t n) const {
    const Buffer to = buffer(n);
    this->copy(query, n, 0, this->size.rows, kRows, [&](int t, int i, Bfloat16 x) { to.query[t * kLine + i] = x; });
    this->copy(key, n, 0, this->size.rows, kRows, [&](int t, int i, Bfloat16 x) {
      to.key[t * kLine + i] = x;
      to.key_column[i * kColumnLine + t] = x;
    });
    this->copy(value, n, this->first_column(), this->size.columns, this->warps * kWarpColumns,
               [&](int t, int j, Bfloat16 x) { to.value_column[j * kColumnLine + t] = x; });
  }

  FWP_DEVICE void use(int64_t n, typename Scan::State& state) const {
    const Buffer chunk = buffer(n);
    float scores[2][4], read[2][4];
    uint32_t value[1][4];
    this->multiply_tokens(chunk.query, chunk.key, true, scores);
    clear(read);
    this->template read_state<2>(state, chunk.query, read);
    this->load_left(chunk.value_column + this->own_column() * kColumnLine, kColumnLine, value[0]);
    this->template read_tokens<1, 2>(value, scores, read);
    this->store_read(out, n, read);
    this->template write_state<1>(value, chunk.key_column, 1, state);
  }
};

}  // namespace fwp::cuda
