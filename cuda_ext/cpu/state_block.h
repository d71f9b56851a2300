// One block of a fast weight matrix W (rows x columns), and the passes over it that the rules consist of.
//
// A block is a few vectors of columns wide. The columns of W are independent, so blocks are, too. A pass processes T
// tokens. It loads each row once, writes the T rank-one updates in order, reads for the T tokens, and stores the row
// once. So the memory traffic of the state, the bottleneck of a token-by-token loop, falls by T at the same number of
// flops.
#pragma once

#include <algorithm>

#include "simd.h"

namespace fwp {

// Bytes of a cache line, on nearly every machine.
constexpr int kLineBytes = 64;

// A sequence that is split at multiples of kSplit tokens gives bit-identical outputs and states.
constexpr int64_t kSplit = 64;

// Number of tokens to prefetch ahead. Without prefetching, passes over tokens outside the second-level cache took up to
// twice as long. Prefetching only some of the inputs and results was slower still. Half or twice as many tokens did as
// well.
constexpr int kTokensAhead = 8;

// A pass over at most this many rows is too short for prefetching to pay off. (delta.h has a smaller number for its own
// passes, which do more work per row.)
constexpr int64_t kFewRows = 32;

// A matrix with any strides. `data` may be null.
template <typename Real>
struct Matrix {
  Real* data;
  int64_t row_stride, column_stride;
};

// Copy a matrix to one with other strides.
template <typename Real>
void copy_matrix(std::type_identity_t<Matrix<const Real>> from, int64_t rows, int64_t columns, Matrix<Real> to) {
  for (int64_t i = 0; i < rows; ++i) {
    const Real* const x = from.data + i * from.row_stride;
    Real* const y = to.data + i * to.row_stride;
    if (from.column_stride == 1 && to.column_stride == 1)
      std::memcpy(y, x, columns * sizeof(Real));
    else
      for (int64_t j = 0; j < columns; ++j) y[j * to.column_stride] = x[j * from.column_stride];
  }
}

// The address of element i of p. p may be null and i may be past the end, which pointer arithmetic does not allow.
template <typename Real>
FWP_INLINE Real* address(Real* p, int64_t i) {
  return reinterpret_cast<Real*>(reinterpret_cast<uintptr_t>(p) + uintptr_t(i) * sizeof(Real));
}

// One vector per token. The elements of a vector are contiguous.
template <typename Real>
struct Tokens {
  static constexpr int64_t kLine = kLineBytes / int64_t(sizeof(Real));  // elements
  Real* data;
  int64_t stride;
  Real* operator[](int64_t t) const { return data + t * stride; }
  Tokens from(int64_t column) const { return {address(data, column), stride}; }
  Tokens reversed(int64_t length) const { return {address(data, (length - 1) * stride), -stride}; }
};

// Prefetches the next tokens, including those that will be written, because a store waits for its cache line like a
// load. It fetches one line per row of the pass. Fetching all lines at once delayed the loads after them: passes over
// thousands of tokens took 10 to 20 % longer.
template <typename Real, int T, int kKinds>
class Ahead {
 public:
  // T tokens from t on of each of x, if `wanted`.
  template <typename... X>
  FWP_INLINE Ahead(bool wanted, int64_t t, const X&... x) : wanted_(wanted) {
    static_assert(sizeof...(x) == kKinds);
    if (!wanted) return;
    int n = 0;
    const auto add = [&](const auto& tokens) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) token_[n++] = address<const Real>(tokens.data, (t + s) * tokens.stride);
    };
    (add(x), ...);
    FWP_UNROLL for (; n < kSlots; ++n) token_[n] = token_[0];
  }

  // Row i fetches line i / kLine of a token. Fetches past the end of a token are useless but harmless.
  FWP_INLINE void fetch(int64_t i) const {
    if (!wanted_) return;
    FWP_UNROLL for (int n = 0; n < kSlots; n += kLine)
      __builtin_prefetch(address(token_[n + i % kLine], i / kLine * kLine));
  }

 private:
  static constexpr int64_t kLine = Tokens<Real>::kLine;
  static constexpr int kSlots = (T * kKinds + kLine - 1) / kLine * kLine;  // several lines per row if tokens are many
  const bool wanted_;
  const Real* token_[kSlots];
};

struct NothingAhead {
  FWP_INLINE void fetch(int64_t) const {}
};

template <typename Real>
struct Rates {  // one number per token
  Real* data;
  int64_t stride;
  Real& operator[](int64_t t) const { return data[t * stride]; }
  Rates reversed(int64_t length) const { return {address(data, (length - 1) * stride), -stride}; }
};

template <typename Real, int NV>
struct Group {  // NV vectors of adjacent columns
  Vector<Real> x[NV];

  Group() = default;
  FWP_INLINE Group(const Group& other) { *this = other; }
  FWP_INLINE Group& operator=(const Group& other) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] = other.x[n];
    return *this;
  }
  FWP_INLINE void load_from(const Real* p, int64_t columns) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] = load_part(p + n * kLanes<Real>, columns - n * kLanes<Real>);
  }
  FWP_INLINE void store_to(Real* p, int64_t columns) const {
    FWP_UNROLL for (int n = 0; n < NV; ++n) store_part(p + n * kLanes<Real>, x[n], columns - n * kLanes<Real>);
  }
  FWP_INLINE void clear() {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] = Vector<Real>{};
  }
  FWP_INLINE void scale(Real factor) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] *= factor;
  }
  // Keep the compiler from fusing earlier operations with later ones.
  FWP_INLINE void round() {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] = in_register<Real>(x[n]);
  }
  FWP_INLINE void add(const Group& other) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] += other.x[n];
  }
  FWP_INLINE void add(Real factor, const Group& other) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] += factor * other.x[n];
  }
  // Not add(-factor, other): that would negate each factor before it is broadcast to a vector.
  FWP_INLINE void subtract(Real factor, const Group& other) {
    FWP_UNROLL for (int n = 0; n < NV; ++n) x[n] -= factor * other.x[n];
  }
};

// One vector. The sum of its lanes is the product x . y.
template <typename Real, int NV>
FWP_INLINE Vector<Real> multiply_lanes(const Group<Real, NV>& x, const Group<Real, NV>& y) {
  Vector<Real> product = x.x[0] * y.x[0];
  FWP_UNROLL for (int n = 1; n < NV; ++n) product += x.x[n] * y.x[n];
  return product;
}

// Sums over the rows of a block, one per token. Partial sums over kSumRows rows are added up separately. One running
// sum over hundreds of rows would have several times the rounding error of a matrix product of the same precision.
constexpr int64_t kSumRows = 32;
template <typename Real, int NV, int T>
struct RowSums {
  Group<Real, NV> total[T];

  FWP_INLINE explicit RowSums(int64_t rows) : several_parts_(rows > kSumRows) {
    FWP_UNROLL for (int s = 0; s < T; ++s) total[s].clear();
    if (several_parts_) FWP_UNROLL for (int s = 0; s < T; ++s) aside_[s].clear();
  }
  // Call between two parts.
  FWP_INLINE void settle() {
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      aside_[s].add(total[s]);
      total[s].clear();
    }
  }
  // Call after the last part. `total` is then the sum of all parts.
  FWP_INLINE void finish() {
    if (several_parts_) FWP_UNROLL for (int s = 0; s < T; ++s) total[s].add(aside_[s]);
  }

 private:
  const bool several_parts_;
  Group<Real, NV> aside_[T];
};

// Rows of a given state to prefetch ahead. Hardware prefetching stops at page borders, and a decoding step is limited
// by the loading of states. Past the last row lies the state of the next head.
constexpr int64_t kRowsAhead = 24;

// The block in memory. The first pass reads the given state and the last pass writes the new state, if their layout
// allows it. In between, the block is in `work`, which is contiguous and fits in the first-level cache.
template <typename Real, int NV>
class StateBlock {
 public:
  static constexpr int64_t kWidth = NV * kLanes<Real>;

  StateBlock(int64_t rows, int64_t columns, Matrix<const Real> initial, Matrix<Real> final, Real* work)
      : rows(rows), columns(columns), final_(final), work_(work), source_(work), source_stride_(kWidth) {
    if (initial.data && initial.column_stride == 1 && columns == kWidth) {
      source_ = initial.data;
      source_stride_ = initial.row_stride;
      return;
    }
    std::memset(work, 0, rows * kWidth * sizeof(Real));
    if (initial.data) copy_matrix<Real>(initial, rows, columns, {work, kWidth, 1});
  }

  // f(i, w) reads row i and must not change it. settle() is called between parts of kSumRows rows.
  template <typename F, typename S>
  FWP_INLINE void read_rows(F f, S settle) const {
    for (int64_t begin = 0; begin < rows; begin += kSumRows) {
      const int64_t end = std::min(rows, begin + kSumRows);
      for (int64_t i = begin; i < end; ++i) {
        Group<Real, NV> w;
        w.load_from(source_ + i * source_stride_, kWidth);
        FWP_UNROLL for (int n = 0; n < NV; ++n)
          __builtin_prefetch(address(source_, (i + kRowsAhead) * source_stride_ + n * kLanes<Real>));
        f(i, w);
      }
      if (end < rows) settle();
    }
  }

  // f(i, w) changes row i; settle() as above. ahead.fetch(i) is called for every row. `is_last`: this is the last pass
  // that changes rows.
  template <typename Fetch, typename F, typename S>
  FWP_INLINE void change_rows(bool is_last, const Fetch& ahead, F f, S settle) {
    const bool to_final = is_last && final_.data && columns == kWidth;
    Real* target = to_final ? final_.data : work_;
    const int64_t target_stride = to_final ? final_.row_stride : kWidth;
    for (int64_t begin = 0; begin < rows; begin += kSumRows) {
      const int64_t end = std::min(rows, begin + kSumRows);
      for (int64_t i = begin; i < end; ++i) {
        ahead.fetch(i);
        Group<Real, NV> w;
        w.load_from(source_ + i * source_stride_, kWidth);
        f(i, w);
        w.store_to(target + i * target_stride, kWidth);
      }
      if (end < rows) settle();
    }
    source_ = target;
    source_stride_ = target_stride;
  }

  // The last pass that changes rows, without sums and without prefetching.
  template <typename F>
  FWP_INLINE void change_rows_last(F f) {
    change_rows(true, NothingAhead{}, f, [] {});
  }

  // Store the new state if the last pass could not.
  void finish() const {
    if (final_.data && source_ != final_.data) copy_matrix({source_, source_stride_, 1}, rows, columns, final_);
  }

  const int64_t rows, columns;

 private:
  Matrix<Real> final_;
  Real* work_;
  const Real* source_;
  int64_t source_stride_;
};

// Call f(block), then store the new state. For a full block, the width passed to f is a constant, which makes passes
// over short rows 10 % faster.
template <typename Real, int NV, typename F>
FWP_INLINE void with_block(int64_t rows, int64_t columns, Matrix<const Real> initial, Matrix<Real> final, Real* work, F f) {
  constexpr int64_t width = NV * kLanes<Real>;
  const auto run = [&](int64_t columns) __attribute__((always_inline)) {
    StateBlock<Real, NV> block(rows, columns, initial, final, work);
    f(block);
    block.finish();
  };
  if (columns < width)
    run(columns);
  else
    run(width);
}

// Call scan.run<T>(first token, is this the last group) for all groups of T = kGroup tokens; the last may be smaller.
template <int kGroup = kPassTokens, typename Scan>
FWP_INLINE void for_like_groups(int64_t length, Scan& scan) {
  int64_t t = 0;
  for (; t + kGroup <= length; t += kGroup) scan.template run<kGroup>(t, t + kGroup == length);
  if constexpr (kGroup == 4) {
    if (length - t == 3) scan.template run<3>(t, true);
    if (length - t == 2) scan.template run<2>(t, true);
  }
  if (length - t == 1) scan.template run<1>(t, true);
}

// The same for scans whose last pass has less to do: it calls scan.run<T, is this the last group>(first token).
template <int kGroup, typename Scan>
FWP_INLINE void for_token_groups(int64_t length, Scan& scan) {
  int64_t t = 0;
  for (; t + kGroup < length; t += kGroup) scan.template run<kGroup, false>(t);
  static_assert(kGroup == 2);
  if (length - t == 2) scan.template run<2, true>(t);
  if (length - t == 1) scan.template run<1, true>(t);
}

}  // namespace fwp
