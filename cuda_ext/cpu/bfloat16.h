// Numbers in bfloat16: they are computed with in float32.
#pragma once

#include "state_block.h"

namespace fwp {

struct BFloat16 {
  uint16_t bits;  // the upper half of a float32's
};

// What is computed in: float32 for bfloat16.
template <typename T>
struct ArithmeticOf {
  using type = T;
};
template <>
struct ArithmeticOf<BFloat16> {
  using type = float;
};
template <typename T>
using Arithmetic = typename ArithmeticOf<T>::type;

using Words = Vector<uint32_t>;
typedef uint16_t HalfWords __attribute__((vector_size(kVectorBytes / 2)));

template <typename To, typename From>
FWP_INLINE To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

FWP_INLINE HalfWords load_half(const BFloat16* p) {
  HalfWords x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
FWP_INLINE void store_half(BFloat16* p, HalfWords x) { std::memcpy(p, &x, sizeof x); }
__attribute__((noinline)) inline HalfWords load_fewer(const BFloat16* p, int64_t n) {
  BFloat16 part[kLanes<float>] = {};
  for (int64_t i = 0; i < n; ++i) part[i] = p[i];
  return load_half(part);
}
__attribute__((noinline)) inline void store_fewer(BFloat16* p, HalfWords x, int64_t n) {
  BFloat16 part[kLanes<float>];
  store_half(part, x);
  for (int64_t i = 0; i < n; ++i) p[i] = part[i];
}

// The first n numbers at p, at most a vector, followed by zeros.
template <typename Real>
FWP_INLINE Vector<Real> read(const Real* p, int64_t n) {
  return load_part(p, n);
}
FWP_INLINE Vector<float> read(const BFloat16* p, int64_t n) {
  return same_bits<Vector<float>>(__builtin_convertvector(n >= kLanes<float> ? load_half(p) : load_fewer(p, n), Words) << 16);
}

template <typename Real>
FWP_INLINE void write(Real* p, Vector<Real> x, int64_t n) {
  store_part(p, x, n);
}
// Rounded to the nearest, and of two to the even one; NaN stays NaN.
FWP_INLINE void write(BFloat16* p, Vector<float> x, int64_t n) {
  const Words bits = same_bits<Words>(x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const HalfWords half = __builtin_convertvector(x == x ? rounded : Words{} + 0x7fc0, HalfWords);
  n >= kLanes<float> ? store_half(p, half) : store_fewer(p, half, n);
}

// One vector per token, as PyTorch has stored it: numbers of Real or, if that is float, of bfloat16. `data` may be null.
template <typename Real>
struct Stored {
  char* data = nullptr;
  int64_t stride = 0;  // in bytes
  bool half = false;   // bfloat16

  Stored() = default;
  Stored(char* data, int64_t stride, bool half) : data(data), stride(stride), half(half) {}
  Stored(Tokens<Real> x) : data(reinterpret_cast<char*>(x.data)), stride(x.stride * int64_t(sizeof(Real))) {}
  Stored(Tokens<const Real> x) : Stored(Tokens<Real>{const_cast<Real*>(x.data), x.stride}) {}

  int64_t item() const { return half ? sizeof(BFloat16) : sizeof(Real); }
  Stored from(int64_t column) const { return {data ? data + column * item() : nullptr, stride, half}; }
  char* operator[](int64_t t) const { return data + t * stride; }
  Real* numbers(int64_t t) const { return reinterpret_cast<Real*>(data + t * stride); }
  Tokens<Real> tokens_from(int64_t t) const { return {numbers(t), stride / int64_t(sizeof(Real))}; }
  BFloat16* halves(int64_t t) const { return reinterpret_cast<BFloat16*>(data + t * stride); }

  // Token t, zero-padded to whole vectors; and from such.
  void read_to(Real* to, int64_t t, int64_t columns) const {
    if constexpr (std::is_same_v<Real, float>)
      if (half) return copy(halves(t), columns, to);
    copy(numbers(t), columns, to);
  }
  void write_from(const Real* from, int64_t t, int64_t columns) const {
    if constexpr (std::is_same_v<Real, float>)
      if (half) {
        BFloat16* const to = halves(t);
        int64_t i = 0;
        for (; i + kLanes<Real> <= columns; i += kLanes<Real>) write(to + i, load(from + i), int64_t(kLanes<Real>));
        if (i < columns) write(to + i, load(from + i), columns - i);
        return;
      }
    std::memcpy(numbers(t), from, columns * sizeof(Real));
  }

 private:
  template <typename T>
  static void copy(const T* from, int64_t columns, Real* to) {
    int64_t i = 0;
    for (; i + kLanes<Real> <= columns; i += kLanes<Real>) store(to + i, read(from + i, int64_t(kLanes<Real>)));
    if (i < columns) store(to + i, read(from + i, columns - i));
  }
};

// The next kCount tokens, whose lines are fetched kColumns columns at a time. Without it passes over tokens outside of the
// second-level cache took a fifth longer.
template <typename Real, int64_t kCount, int64_t kColumns>
struct NextTokens {
  static constexpr int kKinds = 14;
  const char* tokens[kKinds];
  int64_t strides[kKinds], bytes[kKinds];
  int kinds = 0;

  void add(const Stored<Real>& x, int64_t first, int64_t columns) {
    if (x.data && first >= 0) tokens[kinds] = x[first], strides[kinds] = x.stride, bytes[kinds++] = columns * x.item();
  }
  // The lines of some columns of token t.
  FWP_INLINE void fetch(int64_t t, int64_t column) const {
    if (t < kCount)
      for (int n = 0; n < kinds; ++n)
        FWP_UNROLL for (int64_t j = 0; j < kColumns * int64_t(sizeof(Real)); j += kLineBytes)
          if (const int64_t at = column * int64_t(sizeof(Real)) + j; at < bytes[n])
            __builtin_prefetch(tokens[n] + t * strides[n] + at);
  }
};

}  // namespace fwp
