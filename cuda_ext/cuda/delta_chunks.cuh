// The two scans of the delta rule whose writes depend on what the keys find, on the tensor cores. With U = beta E the writes
// of a chunk, A = K K^T below its diagonal, P = Q K^T and R = K Q^T up to theirs,
//   forwards    E = V - K S - A U                out = Q S + P U        S += K^T U
//   in reverse  E = K G + R D_out - A U          d_v = U                G += Q^T D_out - K^T U
// where a lane solves for a column of E from the first token to the last. E, U, S and G are float32 and go into the products
// that they depend on in three parts, which is all their digits; into out in two.
#pragma once

#include "chunks.cuh"

namespace fwp::cuda {

template <int kRows, bool kReverse>
struct DeltaChunks : ChunkScan<kRows> {
  using Scan = ChunkScan<kRows>;
  using Scan::kLine, Scan::kColumnLine;
  static constexpr int kFloatLine = kChunkTokens + 1;
  static constexpr int kMore = kRows * kColumnLine + kChunkTokens;  // the transposed queries, used in reverse, and beta

  // The base's value is d_out in reverse.
  Input beta;
  Output read, error;  // in reverse d_v and d_write

  static size_t shared_bytes(int warps) {
    return kBuffers * sizeof(Bfloat16) * Scan::buffer_numbers(warps, kMore) +
           sizeof(float) * warps * (kChunkTokens + kWarpColumns) * kFloatLine;
  }

  FWP_DEVICE void run() const {
    this->scan([&](int64_t n) { fill(n); }, [&](int64_t n, typename Scan::State& state) { use(n, state); });
  }

 private:
  FWP_DEVICE typename Scan::Buffer buffer(int64_t n) const { return Scan::buffer(n, kMore); }
  static FWP_DEVICE Bfloat16* rates(const typename Scan::Buffer& chunk) { return chunk.more + kRows * kColumnLine; }
  // Of this warp alone: A, 16 x 16, and E or U, a line for each of its columns.
  FWP_DEVICE float* own_products() const {
    float* const first = reinterpret_cast<float*>(reinterpret_cast<Bfloat16*>(shared_memory()) +
                                                  kBuffers * Scan::buffer_numbers(this->warps, kMore));
    return first + int(threadIdx.x) / kWarp * (kChunkTokens + kWarpColumns) * kFloatLine;
  }
  FWP_DEVICE float* own_columns() const { return own_products() + kChunkTokens * kFloatLine; }

  FWP_DEVICE void fill(int64_t n) const {
    const typename Scan::Buffer to = buffer(n);
    Scan::fill(to, n, [&](int t, int i, Bfloat16 x) {
      if (kReverse) to.more[i * kColumnLine + t] = x;
    });
    this->copy(beta, n, 0, 1, 1, [&](int t, int, Bfloat16 x) { rates(to)[t] = x; });
  }

  FWP_DEVICE void use(int64_t n, typename Scan::State& state) const {
    const typename Scan::Buffer chunk = buffer(n);
    const Bfloat16* const values = chunk.value_column + this->own_column() * kColumnLine;
    float scores[2][4], found[2][4];
    uint32_t value[1][4], write[3][4];
    clear(found);
    this->template read_state<3>(state, chunk.key, found);
    this->load_left(values, kColumnLine, value[0]);
    if (kReverse) {
      this->multiply_tokens(chunk.key, chunk.query, true, scores);
      this->template read_tokens<1, 3>(value, scores, found);
    }
    float* const columns = own_columns();
    for_columns([&](int t, int e, int j, int token) {
      const float given = kReverse ? 0 : number(values[j * kColumnLine + token]);
      columns[j * kFloatLine + token] = kReverse ? found[t][e] : given - found[t][e];
    });
    this->multiply_tokens(chunk.key, chunk.key, false, scores);
    FWP_UNROLL for (int s = 0; s < 2; ++s)
      FWP_UNROLL for (int e = 0; e < 4; ++e)
        own_products()[(this->line() + e / 2 * 8) * kFloatLine + 8 * s + this->pair() + e % 2] = scores[s][e];
    __syncwarp();
    solve(n, rates(chunk));
    __syncwarp();
    FWP_UNROLL for (int e = 0; e < 4; ++e) {
      const float* const at = columns + (this->line() + e % 2 * 8) * kFloatLine + this->pair() + e / 2 * 8;
      uint32_t of_pair[3];
      split(at[0], at[1], of_pair);
      FWP_UNROLL for (int m = 0; m < 3; ++m) write[m][e] = of_pair[m];
    }
    if (kReverse) {
      this->template write_state<1>(value, chunk.more, 1, state);
    } else {
      float out[2][4];
      clear(out);
      this->multiply_tokens(chunk.query, chunk.key, true, scores);
      this->template read_state<2>(state, chunk.query, out);
      this->template read_tokens<3, 2>(write, scores, out);
      this->store_read(read, n, out);
    }
    this->template write_state<3>(write, chunk.key_column, kReverse ? -1 : 1, state);
  }

  // Calls f(t, e, column of the warp, token) for element e of fragment t of a product of columns and tokens.
  template <typename F>
  FWP_DEVICE void for_columns(F f) const {
    FWP_UNROLL for (int t = 0; t < 2; ++t)
      FWP_UNROLL for (int e = 0; e < 4; ++e)
        f(t, e, this->line() + e / 2 * 8, 8 * t + this->pair() + e % 2);
  }

  // Turns what lies in own_columns into U, with E on the way: a lane a column.
  FWP_DEVICE void solve(int64_t n, const Bfloat16* rate) const {
    const int j = int(threadIdx.x) % kWarp, column = this->first_column() + this->own_column() + j;
    if (j >= kWarpColumns) return;
    float* const own = own_columns() + j * kFloatLine;
    const float* const products = own_products();
    float u[kChunkTokens];
    FWP_UNROLL for (int t = 0; t < kChunkTokens; ++t) {
      float e = own[t];
      FWP_UNROLL for (int s = 0; s < kChunkTokens; ++s)
        if (s < t) e = fma(-products[t * kFloatLine + s], u[s], e);
      u[t] = number(rate[t]) * e;
      own[t] = u[t];
      if (t < this->count(n) && column < this->size.columns) {
        const int64_t at = (this->head() * this->size.length + this->token_at(n, t)) * this->size.columns + column;
        static_cast<float*>(error.data)[at] = e;
        if (kReverse) round_to(u[t], static_cast<Bfloat16*>(read.data)[at]);
      }
    }
  }
};

}  // namespace fwp::cuda
