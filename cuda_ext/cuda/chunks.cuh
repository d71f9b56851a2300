// What the scans on the tensor cores share. They go 16 tokens at a time, in bfloat16, with the tokens of a chunk as the rows
// of Q, K and V. What is float32 goes into a product as the sum of two or three numbers of bfloat16.
//
// A warp has 16 columns of the state, as the rows of its transpose: then what one product leaves in registers is just what
// the next one takes. A block has some warps, and shares the tokens in shared memory.
#pragma once

#include "scan.cuh"

namespace fwp::cuda {

constexpr int kChunkTokens = 16;
constexpr int kWarpColumns = 16;
constexpr int kChunkWarps = 4;  // in a block, at most
constexpr int kPadding = 8;     // numbers after each line in shared memory: lanes that read one column meet other banks

FWP_DEVICE uint32_t pair_of(Bfloat16 first, Bfloat16 second) { return first.bits | uint32_t(second.bits) << 16; }

// x and y as sums of `parts` numbers of bfloat16, the greatest first.
template <int parts>
FWP_DEVICE void split(float x, float y, uint32_t (&to)[parts]) {
  FWP_UNROLL for (int n = 0; n < parts; ++n) {
    Bfloat16 of_x, of_y;
    round_to(x, of_x);
    round_to(y, of_y);
    to[n] = pair_of(of_x, of_y);
    x -= number(of_x);
    y -= number(of_y);
  }
}

template <int n>
FWP_DEVICE void clear(float (&x)[n][4]) {
  FWP_UNROLL for (int i = 0; i < n; ++i) FWP_UNROLL for (int e = 0; e < 4; ++e) x[i][e] = 0;
}

// kRows: a multiple of 16 that is no less than the rows there are.
template <int kRows>
struct ChunkScan {
  static constexpr int kLine = kRows + kPadding, kColumnLine = kChunkTokens + kPadding;
  using State = float[kRows / 8][4];  // a lane's part of the 16 columns of its warp

  ScanSize size;
  bool reverse;
  int warps, slabs;
  Input key, query, value;
  Matrices<const float> initial;
  Matrices<float> last;

  // The tokens of a chunk, in the order of the scan.
  struct Buffer {
    Bfloat16 *query, *key;   // 16 x kRows
    Bfloat16* key_column;    // the transpose
    Bfloat16* more;          // what one scan alone has
    Bfloat16* value_column;  // the transpose; last, so that the others lie at distances known to the compiler
  };
  static FWP_BOTH int buffer_numbers(int warps, int more) {
    return 2 * kChunkTokens * kLine + (kRows + warps * kWarpColumns) * kColumnLine + more;
  }
  FWP_DEVICE Buffer buffer(int64_t n, int more) const {
    Bfloat16* const query_ = reinterpret_cast<Bfloat16*>(shared_memory()) + n % kBuffers * buffer_numbers(warps, more);
    Bfloat16 *const key_ = query_ + kChunkTokens * kLine, *const key_column = key_ + kChunkTokens * kLine;
    Bfloat16* const more_ = key_column + kRows * kColumnLine;
    return {query_, key_, key_column, more_, more_ + more};
  }

  FWP_DEVICE int64_t head() const { return blockIdx.x / unsigned(slabs); }
  FWP_DEVICE int first_column() const { return int(blockIdx.x % unsigned(slabs)) * warps * kWarpColumns; }
  // Of this lane in the fragments of a product, and its warp's first column in the slab.
  static FWP_DEVICE int line() { return int(threadIdx.x) % kWarp / 4; }
  static FWP_DEVICE int pair() { return int(threadIdx.x) % 4 * 2; }
  static FWP_DEVICE int own_column() { return int(threadIdx.x) / kWarp * kWarpColumns; }

  FWP_DEVICE int64_t chunks() const { return (size.length + kChunkTokens - 1) / kChunkTokens; }
  FWP_DEVICE int64_t token_at(int64_t n, int t) const {
    const int64_t at = n * kChunkTokens + t;
    return reverse ? size.length - 1 - at : at;
  }
  FWP_DEVICE int count(int64_t n) const {
    const int64_t left = size.length - n * kChunkTokens;
    return left < kChunkTokens ? int(left) : kChunkTokens;
  }

  // Calls fill(n) and then use(n, state) for each chunk, with the next one filled meanwhile.
  template <typename Fill, typename Use>
  FWP_DEVICE void scan(Fill fill, Use use) const {
    State state;
    load(initial, state);
    if (chunks() > 0) fill(0);
    __syncthreads();
    for (int64_t n = 0; n < chunks(); ++n) {
      if (n + 1 < chunks()) fill(n + 1);
      use(n, state);
      // From here on the next buffer may be used, and this one be filled.
      __syncthreads();
    }
    store(state, last);
  }

  // Brings the tokens of chunk n, and calls also(t, i, x) for the numbers of the queries.
  template <typename F>
  FWP_DEVICE void fill(const Buffer& to, int64_t n, F also) const {
    copy(query, n, 0, size.rows, kRows, [&](int t, int i, Bfloat16 x) {
      to.query[t * kLine + i] = x;
      also(t, i, x);
    });
    copy(key, n, 0, size.rows, kRows, [&](int t, int i, Bfloat16 x) {
      to.key[t * kLine + i] = x;
      to.key_column[i * kColumnLine + t] = x;
    });
    copy(value, n, first_column(), size.columns, warps * kWarpColumns,
         [&](int t, int j, Bfloat16 x) { to.value_column[j * kColumnLine + t] = x; });
  }

  // Calls put(t, i, x) for the numbers `first` to `first` + width of each token; zeros beyond the last token and `limit`.
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

  // x_t . y_s of the tokens of a chunk where s <= t, or s < t, and 0 elsewhere: for 8 tokens s at a time.
  FWP_DEVICE static void multiply_tokens(const Bfloat16* x, const Bfloat16* y, bool diagonal, float (&scores)[2][4]) {
    clear(scores);
    FWP_UNROLL for (int i = 0; i < kRows; i += 16) {
      uint32_t a[4], b[2];
      load_left(x + i, kLine, a);
      FWP_UNROLL for (int s = 0; s < 2; ++s) {
        load_right(y + 8 * s * kLine + i, kLine, b);
        mma(scores[s], a, b);
      }
    }
    FWP_UNROLL for (int s = 0; s < 2; ++s)
      FWP_UNROLL for (int e = 0; e < 4; ++e)
        if (8 * s + pair() + e % 2 >= line() + e / 2 * 8 + diagonal) scores[s][e] = 0;
  }

  // read[t] += the state's transpose times the tokens x of a chunk: 8 tokens at a time, the state in `parts`.
  template <int parts>
  FWP_DEVICE static void read_state(const State& state, const Bfloat16* x, float (&read)[2][4]) {
    FWP_UNROLL for (int i = 0; i < kRows / 16; ++i) {
      uint32_t a[parts][4], of_pair[parts], b[2];
      FWP_UNROLL for (int e = 0; e < 4; ++e) {
        split(state[2 * i + e / 2][e % 2 * 2], state[2 * i + e / 2][e % 2 * 2 + 1], of_pair);
        FWP_UNROLL for (int n = 0; n < parts; ++n) a[n][e] = of_pair[n];
      }
      FWP_UNROLL for (int t = 0; t < 2; ++t) {
        load_right(x + 8 * t * kLine + 16 * i, kLine, b);
        FWP_UNROLL for (int n = parts; n-- > 0;) mma(read[t], a[n], b);
      }
    }
  }

  // read[t] += the columns times the scores of the tokens t, each in parts; of these the products that matter.
  template <int of_columns, int of_scores>
  FWP_DEVICE static void read_tokens(const uint32_t (&columns)[of_columns][4], const float (&scores)[2][4],
                                     float (&read)[2][4]) {
    constexpr int most = of_columns > of_scores ? of_columns : of_scores;
    FWP_UNROLL for (int t = 0; t < 2; ++t) {
      uint32_t b[of_scores][2], of_pair[of_scores];
      FWP_UNROLL for (int s = 0; s < 2; ++s) {
        split(scores[s][2 * t], scores[s][2 * t + 1], of_pair);
        FWP_UNROLL for (int n = 0; n < of_scores; ++n) b[n][s] = of_pair[n];
      }
      FWP_UNROLL for (int m = of_columns; m-- > 0;)
        FWP_UNROLL for (int n = of_scores; n-- > 0;)
          if (m + n < most) mma(read[t], columns[m], b[n]);
    }
  }

  // The state's transpose += sign times the columns (in parts) times the transposed tokens x of a chunk.
  template <int parts>
  FWP_DEVICE static void write_state(const uint32_t (&columns)[parts][4], const Bfloat16* x_column, float sign,
                                     State& state) {
    FWP_UNROLL for (int i = 0; i < kRows / 8; ++i) {
      float write[4] = {0, 0, 0, 0};
      uint32_t b[2];
      load_right(x_column + 8 * i * kColumnLine, kColumnLine, b);
      FWP_UNROLL for (int n = parts; n-- > 0;) mma(write, columns[n], b);
      // Added here, to the nearest: the tensor cores cut off what does not fit.
      FWP_UNROLL for (int e = 0; e < 4; ++e) state[i][e] = fma(sign, write[e], state[i][e]);
    }
  }

  // Calls f(inside, row, column, x) for what this lane holds of the state.
  template <typename F>
  FWP_DEVICE void for_state(State& state, F f) const {
    FWP_UNROLL for (int i = 0; i < kRows / 8; ++i)
      FWP_UNROLL for (int e = 0; e < 4; ++e) {
        const int row = 8 * i + pair() + e % 2, column = first_column() + own_column() + line() + e / 2 * 8;
        f(row < size.rows && column < size.columns, row, column, state[i][e]);
      }
  }
  FWP_DEVICE void load(const Matrices<const float>& from, State& state) const {
    for_state(state, [&](bool inside, int row, int column, float& x) {
      x = from.data && inside ? from.data[head() * from.head + row * from.row + column * from.column] : 0;
    });
  }
  FWP_DEVICE void store(State& state, const Matrices<float>& to) const {
    for_state(state, [&](bool inside, int row, int column, float& x) {
      if (to.data && inside) to.data[head() * to.head + row * to.row + column * to.column] = x;
    });
  }
  FWP_DEVICE void store_read(const Output& to, int64_t n, const float (&read)[2][4]) const {
    Bfloat16* const data = static_cast<Bfloat16*>(to.data);
    FWP_UNROLL for (int t = 0; t < 2; ++t)
      FWP_UNROLL for (int e = 0; e < 4; ++e) {
        const int token = 8 * t + pair() + e % 2, column = first_column() + own_column() + line() + e / 2 * 8;
        if (token < count(n) && column < size.columns)
          round_to(read[t][e], data[(head() * size.length + token_at(n, token)) * size.columns + column]);
      }
  }
};

}  // namespace fwp::cuda
