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

// Tokens between two states that rules that forget keep: KEPT_EVERY of fairseq_fwp/ops/fast_weights.py.
constexpr int64_t kChunk = 32;

// A sequence split at multiples of so many tokens gives the outputs and states of the whole, to the last bit.
constexpr int64_t kSplit = 64;

// How far ahead tokens are fetched. Left to itself, the processor took up to twice as long over tokens that do not lie
// in the second-level cache; and longer still where only some of a pass's inputs and results were fetched. Half as many
// or twice as many did as well.
constexpr int kTokensAhead = 8;

// A pass over so few rows is too short to pay for it. (delta.h has fewer for its own passes, which do more with a row.)
constexpr int64_t kFewRows = 32;

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
  static constexpr int64_t kLine = kLineBytes / int64_t(sizeof(A));  // elements
  A* data;
  int64_t stride;
  A* operator[](int64_t t) const { return data + t * stride; }
  Tokens from(int64_t column) const { return {address(data, column), stride}; }
  Tokens reversed(int64_t length) const { return {address(data, (length - 1) * stride), -stride}; }
};

// Coming tokens on their way into the cache, those that will be written as well, since a store waits for its line as a
// load does. One line a row while a pass goes over its rows: all lines at once kept the loads behind them waiting, and
// passes over thousands of tokens took a tenth to a fifth longer.
template <typename A, int T, int kKinds>
class Ahead {
 public:
  // T tokens from t on of each of x, if they are wanted.
  template <typename... X>
  FWP_INLINE Ahead(bool wanted, int64_t t, const X&... x) : wanted_(wanted) {
    static_assert(sizeof...(x) == kKinds);
    if (!wanted) return;
    int n = 0;
    const auto add = [&](const auto& tokens) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) token_[n++] = address<const A>(tokens.data, (t + s) * tokens.stride);
    };
    (add(x), ...);
    FWP_UNROLL for (; n < kSlots; ++n) token_[n] = token_[0];
  }

  // Row i is worth line i / kLine of a token. What lies past the end of one is fetched in vain.
  FWP_INLINE void fetch(int64_t i) const {
    if (!wanted_) return;
    FWP_UNROLL for (int n = 0; n < kSlots; n += kLine)
      __builtin_prefetch(address(token_[n + i % kLine], i / kLine * kLine));
  }

 private:
  static constexpr int64_t kLine = Tokens<A>::kLine;
  static constexpr int kSlots = (T * kKinds + kLine - 1) / kLine * kLine;  // some lines a row where tokens are many
  const bool wanted_;
  const A* token_[kSlots];
};

struct NothingAhead {
  FWP_INLINE void fetch(int64_t) const {}
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
  // What follows cannot be fused with what was before.
  FWP_INLINE void round() {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] = in_register<A>(x[n]);
  }
  FWP_INLINE void add(const Group& other) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] += other.x[n];
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
  Group<A, NV> total[T];

  FWP_INLINE explicit RowSums(int64_t rows) : several_parts_(rows > kSumRows) {
    FWP_UNROLL for (int s = 0; s < T; ++s) total[s].clear();
    if (several_parts_) FWP_UNROLL for (int s = 0; s < T; ++s) aside_[s].clear();
  }
  // Between two parts.
  FWP_INLINE void settle() {
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      aside_[s].add(total[s]);
      total[s].clear();
    }
  }
  // After the last one: total is the sum of all.
  FWP_INLINE void finish() {
    if (several_parts_) FWP_UNROLL for (int s = 0; s < T; ++s) total[s].add(aside_[s]);
  }

 private:
  const bool several_parts_;
  Group<A, NV> aside_[T];
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

  // f(i, w) sees row i and does not change it; settle() comes between parts of kSumRows rows.
  template <typename F, typename S>
  FWP_INLINE void read_rows(F f, S settle) const {
    for (int64_t begin = 0; begin < rows; begin += kSumRows) {
      const int64_t end = std::min(rows, begin + kSumRows);
      for (int64_t i = begin; i < end; ++i) {
        Group<A, NV> w;
        w.load_from(source_ + i * source_stride_, kWidth);
        FWP_UNROLL for (int n = 0; n < NV; ++n)
          __builtin_prefetch(address(source_, (i + kRowsAhead) * source_stride_ + n * kLanes<A>));
        f(i, w);
      }
      if (end < rows) settle();
    }
  }

  // f(i, w) sees row i and changes it; settle() as above, and ahead.fetch(i) for every row. `last`: no later pass will.
  template <typename Fetch, typename F, typename S>
  FWP_INLINE void change_rows(bool last, const Fetch& ahead, F f, S settle) {
    const bool to_final = last && final_.data && columns == kWidth;
    A* target = to_final ? final_.data : work_;
    const int64_t target_stride = to_final ? final_.row_stride : kWidth;
    for (int64_t begin = 0; begin < rows; begin += kSumRows) {
      const int64_t end = std::min(rows, begin + kSumRows);
      for (int64_t i = begin; i < end; ++i) {
        ahead.fetch(i);
        Group<A, NV> w;
        w.load_from(source_ + i * source_stride_, kWidth);
        f(i, w);
        w.store_to(target + i * target_stride, kWidth);
      }
      if (end < rows) settle();
    }
    source_ = target;
    source_stride_ = target_stride;
  }

  // The last pass, without sums and with no tokens to come.
  template <typename F>
  FWP_INLINE void change_rows_last(F f) {
    change_rows(true, NothingAhead{}, f, [] {});
  }

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
