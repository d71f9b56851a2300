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

  Input key, query, value, beta;  // value: in reverse d_out
  Matrices<const float> initial;
  Matrices<float> last;
  Output read, error;  // in reverse d_v and d_write

  // The tokens of a chunk, in the order of the scan.
  struct Buffer {
    Bfloat16 *query, *key;                               // 16 x kRows
    Bfloat16 *key_column, *query_column, *value_column;  // the transposes
    Bfloat16* beta;
  };
  static FWP_BOTH int buffer_numbers(int warps) {
    return 2 * kChunkTokens * kLine + (2 * kRows + warps * kWarpColumns) * kColumnLine + kChunkTokens;
  }
  static size_t shared_bytes(int warps) {
    return kBuffers * sizeof(Bfloat16) * buffer_numbers(warps) +
           sizeof(float) * warps * (kChunkTokens + kWarpColumns) * kFloatLine;
  }

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
    Bfloat16 *const query_column = key_column + kRows * kColumnLine, *const value = query_column + kRows * kColumnLine;
    return {query_, key_, key_column, query_column, value, value + this->warps * kWarpColumns * kColumnLine};
  }
  // Of this warp alone: A, 16 x 16, and E or U, a line for each of its columns.
  FWP_DEVICE float* own_products() const {
    float* const first = reinterpret_cast<float*>(reinterpret_cast<Bfloat16*>(shared_memory()) +
                                                  kBuffers * buffer_numbers(this->warps));
    return first + int(threadIdx.x) / kWarp * (kChunkTokens + kWarpColumns) * kFloatLine;
  }
  FWP_DEVICE float* own_columns() const { return own_products() + kChunkTokens * kFloatLine; }

  FWP_DEVICE void fill(int64_t n) const {
    const Buffer to = buffer(n);
    this->copy(query, n, 0, this->size.rows, kRows, [&](int t, int i, Bfloat16 x) {
      to.query[t * kLine + i] = x;
      if (kReverse) to.query_column[i * kColumnLine + t] = x;
    });
    this->copy(key, n, 0, this->size.rows, kRows, [&](int t, int i, Bfloat16 x) {
      to.key[t * kLine + i] = x;
      to.key_column[i * kColumnLine + t] = x;
    });
    this->copy(value, n, this->first_column(), this->size.columns, this->warps * kWarpColumns,
               [&](int t, int j, Bfloat16 x) { to.value_column[j * kColumnLine + t] = x; });
    this->copy(beta, n, 0, 1, 1, [&](int t, int, Bfloat16 x) { to.beta[t] = x; });
  }

  FWP_DEVICE void use(int64_t n, typename Scan::State& state) const {
    const Buffer chunk = buffer(n);
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
    solve(n, chunk.beta);
    __syncwarp();
    FWP_UNROLL for (int e = 0; e < 4; ++e) {
      const float* const at = columns + (this->line() + e % 2 * 8) * kFloatLine + this->pair() + e / 2 * 8;
      uint32_t of_pair[3];
      split(at[0], at[1], of_pair);
      FWP_UNROLL for (int m = 0; m < 3; ++m) write[m][e] = of_pair[m];
    }
    if (kReverse) {
      this->template write_state<1>(value, chunk.query_column, 1, state);
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
  FWP_DEVICE void solve(int64_t n, const Bfloat16* rates) const {
    const int j = int(threadIdx.x) % kWarp, column = this->first_column() + this->own_column() + j;
    if (j >= kWarpColumns) return;
    float* const own = own_columns() + j * kFloatLine;
    const float* const products = own_products();
    float u[kChunkTokens];
    FWP_UNROLL for (int t = 0; t < kChunkTokens; ++t) {
      float e = own[t];
      FWP_UNROLL for (int s = 0; s < kChunkTokens; ++s)
        if (s < t) e = fma(-products[t * kFloatLine + s], u[s], e);
      u[t] = number(rates[t]) * e;
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
