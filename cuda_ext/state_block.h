// One block of a fast weight matrix W (rows x columns) and the passes over it that the rules are made of.
//
// A block is some vectors of columns wide: columns of W never meet, so blocks are independent. A pass takes T tokens at
// once: each row is loaded once, written by the T rank-one updates in order, read by the T tokens, and stored once.
// So the memory traffic of the state, which bounds a token-by-token loop, falls by T while the flops stay the same.
#pragma once

#include <algorithm>

#include "simd.h"

namespace fwp {

// Bytes that a cache fetches together, on nearly every machine.
constexpr int kLineBytes = 64;

// How far ahead tokens are fetched. Left to itself, the processor took up to twice as long over tokens that do not lie
// in the second-level cache; and longer still where only some of a pass's inputs and results were fetched.
constexpr int kTokensAhead = 8;

// A matrix with any strides; data may be null.
template <typename A>
struct Matrix {
  A* data;
  int64_t row_stride, column_stride;
};

// Where element i of p is, or would be: p may be null and i past an end, which arithmetic with pointers does not allow.
template <typename A>
FWP_INLINE A* address(A* p, int64_t i) {
  return reinterpret_cast<A*>(reinterpret_cast<uintptr_t>(p) + uintptr_t(i) * sizeof(A));
}

// One vector a token; the elements of a vector are neighbours in memory.
template <typename A>
struct Tokens {
  static constexpr int64_t kLine = kLineBytes / int64_t(sizeof(A));
  A* data;
  int64_t stride;
  A* operator[](int64_t t) const { return data + t * stride; }
  // Into the cache: the first `count` elements of token t, which may lie past the end.
  FWP_INLINE void fetch(int64_t t, int64_t count) const {
    for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(address(data, t * stride + i));
  }
  // The same for what will be written: a store waits for its line as a load does.
  FWP_INLINE void fetch_to_write(int64_t t, int64_t count) const {
    for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(address(data, t * stride + i), 1);
  }
  Tokens from(int64_t column) const { return {address(data, column), stride}; }
  Tokens reversed(int64_t length) const { return {address(data, (length - 1) * stride), -stride}; }
};

template <typename A>
struct Rates {  // one number a token
  A* data;
  int64_t stride;
  A& operator[](int64_t t) const { return data[t * stride]; }
  Rates reversed(int64_t length) const { return {address(data, (length - 1) * stride), -stride}; }
};

template <typename A, int NV>
struct Group {  // NV vectors of neighbouring columns
  Vector<A> x[NV];

  Group() = default;
  FWP_INLINE Group(const Group& other) { *this = other; }
  FWP_INLINE Group& operator=(const Group& other) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] = other.x[n];
    return *this;
  }
  FWP_INLINE void load_from(const A* p, int64_t columns) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] = load_part(p + n * kLanes<A>, columns - n * kLanes<A>);
  }
  FWP_INLINE void store_to(A* p, int64_t columns) const {
    FWP_UNROLL for (int n = 0; n < NV; ++n) store_part(p + n * kLanes<A>, x[n], columns - n * kLanes<A>);
  }
  FWP_INLINE void clear() {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] = Vector<A>{};
  }
  FWP_INLINE void scale(A factor) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] *= factor;
  }
  FWP_INLINE void add(A factor, const Group& other) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] += factor * other.x[n];
  }
  // add(-factor, other) would negate every factor before it becomes a vector.
  FWP_INLINE void subtract(A factor, const Group& other) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] -= factor * other.x[n];
  }
};

// One vector, whose lanes add up to the product x y.
template <typename A, int NV>
FWP_INLINE Vector<A> multiply_lanes(const Group<A, NV>& x, const Group<A, NV>& y) {
  Vector<A> product = x.x[0] * y.x[0];
  FWP_UNROLL for (int n = 1; n < NV; ++n) product += x.x[n] * y.x[n];
  return product;
}

// Sums over the rows of a block, one a token. Their parts are put aside after every kSumRows rows: the rounding error of
// one running sum over hundreds of rows would be several times that of a matrix product in the same precision.
constexpr int64_t kSumRows = 32;
template <typename A, int NV, int T>
struct RowSums {
  Group<A, NV> part[T], total[T];

  FWP_INLINE RowSums() {
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      part[s].clear();
      total[s].clear();
    }
  }
  FWP_INLINE void settle() {
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      FWP_UNROLL for (int n = 0; n < NV; ++n) total[s].x[n] += part[s].x[n];
      part[s].clear();
    }
  }
};

// Rows of a given state that are fetched ahead: the processor does not do so across pages, and a decoding step reads states
// faster than they arrive. Past the last row lies the next head's state.
constexpr int64_t kRowsAhead = 24;

// The block in memory. The first pass reads the given state and the last one writes the new state, where their layout
// allows it; in between the block lives in `work`, which is contiguous and small enough for the first-level cache.
template <typename A, int NV>
class StateBlock {
 public:
  static constexpr int64_t kWidth = NV * kLanes<A>;

  StateBlock(int64_t rows, int64_t columns, Matrix<const A> initial, Matrix<A> final, A* work)
      : rows(rows), columns(columns), final_(final), work_(work), source_(work), source_stride_(kWidth) {
    if (initial.data && initial.column_stride == 1 && columns == kWidth) {
      source_ = initial.data;
      source_stride_ = initial.row_stride;
      return;
    }
    std::memset(work, 0, rows * kWidth * sizeof(A));
    if (!initial.data) return;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j)
        work[i * kWidth + j] = initial.data[i * initial.row_stride + j * initial.column_stride];
  }

  // f(i, w) sees row i and does not change it; settle() follows every kSumRows rows, and the last.
  template <typename F, typename S>
  FWP_INLINE void read_rows(F f, S settle) const {
    for (int64_t begin = 0; begin < rows; begin += kSumRows) {
      for (int64_t i = begin; i < std::min(rows, begin + kSumRows); ++i) {
        Group<A, NV> w;
        w.load_from(source_ + i * source_stride_, kWidth);
        FWP_UNROLL for (int n = 0; n < NV; ++n)
          __builtin_prefetch(address(source_, (i + kRowsAhead) * source_stride_ + n * kLanes<A>));
        f(i, w);
      }
      settle();
    }
  }

  // f(i, w) sees row i and changes it; settle() as above. `last`: no later pass will.
  template <typename F, typename S>
  FWP_INLINE void change_rows(bool last, F f, S settle) {
    const bool to_final = last && final_.data && columns == kWidth;
    A* target = to_final ? final_.data : work_;
    const int64_t target_stride = to_final ? final_.row_stride : kWidth;
    for (int64_t begin = 0; begin < rows; begin += kSumRows) {
      for (int64_t i = begin; i < std::min(rows, begin + kSumRows); ++i) {
        Group<A, NV> w;
        w.load_from(source_ + i * source_stride_, kWidth);
        f(i, w);
        w.store_to(target + i * target_stride, kWidth);
      }
      settle();
    }
    source_ = target;
    source_stride_ = target_stride;
  }

  // Whether tokens are to be fetched ahead: a pass over few rows is too short to pay for it.
  FWP_INLINE bool fetches() const { return rows > kSumRows; }

  // Store the new state where the last pass could not.
  void finish() const {
    if (!final_.data || source_ == final_.data) return;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) final_.data[i * final_.row_stride + j] = source_[i * source_stride_ + j];
  }

  const int64_t rows, columns;

 private:
  Matrix<A> final_;
  A* work_;
  const A* source_;
  int64_t source_stride_;
};

// Call f(block), and store the new state. The width of a full block is a constant to the f that takes it: passes over
// short rows are a tenth faster for it.
template <typename A, int NV, typename F>
FWP_INLINE void with_block(int64_t rows, int64_t columns, Matrix<const A> initial, Matrix<A> final, A* work, F f) {
  constexpr int64_t width = NV * kLanes<A>;
  const auto run = [&](int64_t columns) __attribute__((always_inline)) {
    StateBlock<A, NV> block(rows, columns, initial, final, work);
    f(block);
    block.finish();
  };
  if (columns < width)
    run(columns);
  else
    run(width);
}

// Call scan.run<T, last group?>(first token) over all tokens, T = kGroup at a time.
template <int kGroup = kTokens, typename Scan>
FWP_INLINE void for_token_groups(int64_t length, Scan& scan) {
  int64_t t = 0;
  for (; t + kGroup < length; t += kGroup) scan.template run<kGroup, false>(t);
  static_assert(kGroup == 4 || kGroup == 2);
  if constexpr (kGroup == 4) {
    if (length - t == 4) scan.template run<4, true>(t);
    if (length - t == 3) scan.template run<3, true>(t);
  }
  if (length - t == 2) scan.template run<2, true>(t);
  if (length - t == 1) scan.template run<1, true>(t);
}

}  // namespace fwp
