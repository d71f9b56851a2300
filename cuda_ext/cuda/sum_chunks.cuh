// The scan of the sum rule in bfloat16, 16 tokens at a time, on the tensor cores: with Q, K, V the tokens of a chunk in
// rows, S the state before it and P = Q K^T without what is above its diagonal,
//   out = Q S + P V        S += K^T V
// Only Q, K and V are bfloat16. S and P go into products as the sum of two bfloat16, which leaves an error far below the
// rounding of out; the products that S adds up are those of the inputs, so S stays as exact as float32 is.
//
// A warp has 16 columns of S, as the rows of its transpose: then what one product leaves in registers is just what the
// next one takes. A block has some warps, and shares the tokens in shared memory.
#pragma once

#include "scan.cuh"

namespace fwp::cuda {

constexpr int kChunkTokens = 16;
constexpr int kWarpColumns = 16;
constexpr int kChunkWarps = 4;  // in a block, at most
constexpr int kPadding = 8;     // numbers after each line in shared memory: lanes that read one column meet other banks

FWP_DEVICE uint32_t pair_of(Bfloat16 first, Bfloat16 second) { return first.bits | uint32_t(second.bits) << 16; }

// x and y as two sums of two numbers of bfloat16.
FWP_DEVICE void split(float x, float y, uint32_t& high, uint32_t& low) {
  Bfloat16 of_x, of_y, rest_of_x, rest_of_y;
  round_to(x, of_x);
  round_to(y, of_y);
  round_to(x - number(of_x), rest_of_x);
  round_to(y - number(of_y), rest_of_y);
  high = pair_of(of_x, of_y);
  low = pair_of(rest_of_x, rest_of_y);
}

// kRows: a multiple of 16 that is no less than the rows there are.
template <int kRows>
struct SumChunks {
  using Number = float;
  static constexpr int kLine = kRows + kPadding, kColumnLine = kChunkTokens + kPadding;

  ScanSize size;
  Input key, query, value;
  bool reverse;
  Matrices<const float> initial;
  Matrices<float> last;
  Output out;
  int warps, slabs;

  // The tokens of a chunk, in the order of the scan.
  struct Buffer {
    Bfloat16 *query, *key;             // 16 x kRows
    Bfloat16 *key_column, *value_column;  // the transposes of key and value
  };
  static FWP_BOTH int buffer_numbers(int warps) {
    return 2 * kChunkTokens * kLine + (kRows + warps * kWarpColumns) * kColumnLine;
  }
  FWP_DEVICE Buffer buffer(int64_t n) const {
    Bfloat16* const query_ = reinterpret_cast<Bfloat16*>(shared_memory()) + (n % kBuffers) * buffer_numbers(warps);
    Bfloat16 *const key_ = query_ + kChunkTokens * kLine, *const key_column = key_ + kChunkTokens * kLine;
    return {query_, key_, key_column, key_column + kRows * kColumnLine};
  }

  FWP_DEVICE int64_t head() const { return blockIdx.x / unsigned(slabs); }
  FWP_DEVICE int first_column() const { return int(blockIdx.x % unsigned(slabs)) * warps * kWarpColumns; }
  // Of this lane in the fragments of a product, and its warp's first column in the slab.
  static FWP_DEVICE int line() { return int(threadIdx.x) % kWarp / 4; }
  static FWP_DEVICE int pair() { return int(threadIdx.x) % 4 * 2; }
  static FWP_DEVICE int own_column() { return int(threadIdx.x) / kWarp * kWarpColumns; }

  FWP_DEVICE void run() const {
    float state[kRows / 8][4];
    const int64_t chunks = (size.length + kChunkTokens - 1) / kChunkTokens;
    load(state);
    if (chunks > 0) fill(0);
    __syncthreads();
    for (int64_t n = 0; n < chunks; ++n) {
      if (n + 1 < chunks) fill(n + 1);
      use(n, state);
      // From here on the next buffer may be used, and this one be filled.
      __syncthreads();
    }
    store(state);
  }

 private:
  FWP_DEVICE int64_t token_at(int64_t n, int t) const {
    const int64_t at = n * kChunkTokens + t;
    return reverse ? size.length - 1 - at : at;
  }
  FWP_DEVICE int count(int64_t n) const {
    const int64_t left = size.length - n * kChunkTokens;
    return left < kChunkTokens ? int(left) : kChunkTokens;
  }

  // Zeros beyond the last token, row and column.
  FWP_DEVICE void fill(int64_t n) const {
    const Buffer to = buffer(n);
    copy(query, n, 0, size.rows, kRows, [&](int t, int i, Bfloat16 x) { to.query[t * kLine + i] = x; });
    copy(key, n, 0, size.rows, kRows, [&](int t, int i, Bfloat16 x) {
      to.key[t * kLine + i] = x;
      to.key_column[i * kColumnLine + t] = x;
    });
    copy(value, n, first_column(), size.columns, warps * kWarpColumns,
         [&](int t, int j, Bfloat16 x) { to.value_column[j * kColumnLine + t] = x; });
  }
  template <typename F>
  FWP_DEVICE void copy(const Input& from, int64_t n, int first, int limit, int width, F put) const {
    const int64_t h = head();
    const Bfloat16* data = static_cast<const Bfloat16*>(from.data) + h / size.heads_per_batch * from.batch +
                           h % size.heads_per_batch * from.head + first;
    const int tokens = from.data ? count(n) : 0;
    FWP_UNROLL_BY(4) for (int at = int(threadIdx.x); at < kChunkTokens * width; at += warps * kWarp) {
      const int t = at / width, i = at % width;
      put(t, i, t < tokens && first + i < limit ? data[token_at(n, t) * from.token + i] : Bfloat16{0});
    }
  }

  FWP_DEVICE static uint32_t pair_at(const Bfloat16* x) { return *reinterpret_cast<const uint32_t*>(x); }
  // Fragments of a matrix in shared memory: 16 lines from the first on as the left factor, 8 as the transposed right one.
  FWP_DEVICE static void load_left(const Bfloat16* first, int pitch, uint32_t (&a)[4]) {
    const Bfloat16* at = first + line() * pitch + pair();
    a[0] = pair_at(at), a[1] = pair_at(at + 8 * pitch), a[2] = pair_at(at + 8), a[3] = pair_at(at + 8 * pitch + 8);
  }
  FWP_DEVICE static void load_right(const Bfloat16* first, int pitch, uint32_t (&b)[2]) {
    const Bfloat16* at = first + line() * pitch + pair();
    b[0] = pair_at(at), b[1] = pair_at(at + 8);
  }

  // Q K^T up to the diagonal: of 8 keys at a time.
  FWP_DEVICE void attend(const Buffer& chunk, float (&scores)[2][4]) const {
    FWP_UNROLL for (int s = 0; s < 2; ++s) FWP_UNROLL for (int x = 0; x < 4; ++x) scores[s][x] = 0;
    FWP_UNROLL for (int i = 0; i < kRows; i += 16) {
      uint32_t a[4], b[2];
      load_left(chunk.query + i, kLine, a);
      FWP_UNROLL for (int s = 0; s < 2; ++s) {
        load_right(chunk.key + 8 * s * kLine + i, kLine, b);
        mma(scores[s], a, b);
      }
    }
    FWP_UNROLL for (int s = 0; s < 2; ++s)
      FWP_UNROLL for (int x = 0; x < 4; ++x)
        if (8 * s + pair() + x % 2 > line() + x / 2 * 8) scores[s][x] = 0;
  }

  FWP_DEVICE void use(int64_t n, float (&state)[kRows / 8][4]) const {
    const Buffer chunk = buffer(n);
    float scores[2][4], read[2][4];
    uint32_t a[4], high[4], low[4], b[2], rest[2];
    attend(chunk, scores);
    FWP_UNROLL for (int t = 0; t < 2; ++t) FWP_UNROLL for (int x = 0; x < 4; ++x) read[t][x] = 0;
    FWP_UNROLL for (int i = 0; i < kRows / 16; ++i) {
      FWP_UNROLL for (int x = 0; x < 4; ++x) {
        const float* from = &state[2 * i + x / 2][x % 2 * 2];
        split(from[0], from[1], high[x], low[x]);
      }
      FWP_UNROLL for (int t = 0; t < 2; ++t) {
        load_right(chunk.query + 8 * t * kLine + 16 * i, kLine, b);
        mma(read[t], low, b);
        mma(read[t], high, b);
      }
    }
    load_left(chunk.value_column + own_column() * kColumnLine, kColumnLine, a);
    FWP_UNROLL for (int t = 0; t < 2; ++t) {
      FWP_UNROLL for (int s = 0; s < 2; ++s) split(scores[s][2 * t], scores[s][2 * t + 1], b[s], rest[s]);
      mma(read[t], a, rest);
      mma(read[t], a, b);
    }
    store_read(n, read);
    FWP_UNROLL for (int i = 0; i < kRows / 8; ++i) {
      float write[4] = {0, 0, 0, 0};
      load_right(chunk.key_column + 8 * i * kColumnLine, kColumnLine, b);
      mma(write, a, b);
      // Added here, to the nearest: the tensor cores cut off what does not fit.
      FWP_UNROLL for (int x = 0; x < 4; ++x) state[i][x] += write[x];
    }
  }

  // Calls f(row, column, x) for what this lane holds of the state.
  template <typename F>
  FWP_DEVICE void for_state(F f) const {
    FWP_UNROLL for (int i = 0; i < kRows / 8; ++i)
      FWP_UNROLL for (int x = 0; x < 4; ++x) f(8 * i + pair() + x % 2, first_column() + own_column() + line() + x / 2 * 8, i, x);
  }
  FWP_DEVICE void load(float (&state)[kRows / 8][4]) const {
    for_state([&](int row, int column, int i, int x) {
      const bool inside = initial.data && row < size.rows && column < size.columns;
      state[i][x] = inside ? initial.data[head() * initial.head + row * initial.row + column * initial.column] : 0;
    });
  }
  FWP_DEVICE void store(const float (&state)[kRows / 8][4]) const {
    if (!last.data) return;
    for_state([&](int row, int column, int i, int x) {
      if (row < size.rows && column < size.columns)
        last.data[head() * last.head + row * last.row + column * last.column] = state[i][x];
    });
  }
  FWP_DEVICE void store_read(int64_t n, const float (&read)[2][4]) const {
    Bfloat16* const data = static_cast<Bfloat16*>(out.data);
    FWP_UNROLL for (int t = 0; t < 2; ++t)
      FWP_UNROLL for (int x = 0; x < 4; ++x) {
        const int token = 8 * t + pair() + x % 2, column = first_column() + own_column() + line() + x / 2 * 8;
        if (token < count(n) && column < size.columns)
          round_to(read[t][x], data[(head() * size.length + token_at(n, token)) * size.columns + column]);
      }
  }
};

}  // namespace fwp::cuda
