// Explicit vectors of the widest unit that the compiler may use, through the vector extension of GCC and Clang. The
// size is not left to the compiler: 64-byte vectors on a machine without AVX-512 are about thirty times slower.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define FWP_INLINE inline __attribute__((always_inline))
#define FWP_UNROLL _Pragma("GCC unroll 16")

namespace fwp {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Whether there are 32 registers for vectors, or 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif
// Tokens that share one pass over the state, which keeps up to three vectors per token and column group in registers.
constexpr int kPassTokens = kManyRegisters ? 4 : 2;
// The same where a write depends on what the state retrieves. Two were as fast as four if the tokens lie in the cache, and 25 %
// faster for thousands of tokens that do not.
constexpr int kDeltaTokens = 2;

FWP_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <typename Real>
struct VectorOf {
  typedef Real type __attribute__((vector_size(kVectorBytes)));
};
template <typename Real>
using Vector = typename VectorOf<Real>::type;
template <typename Real>
constexpr int kLanes = kVectorBytes / int(sizeof(Real));

template <typename Real>
FWP_INLINE Vector<Real> load(const Real* p) {
  Vector<Real> x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <typename Real>
FWP_INLINE void store(Real* p, Vector<Real> x) {
  std::memcpy(p, &x, sizeof x);
}

// Keep x in a register. GCC would load it again for each use, as a memory operand, and loads are the bottleneck.
template <typename Real>
FWP_INLINE Vector<Real> in_register(Vector<Real> x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// Not inlined: inlining this rare case into every kernel took half of the compile time.
template <typename Real>
__attribute__((noinline)) Vector<Real> load_fewer(const Real* p, int64_t n) {
  Real part[kLanes<Real>] = {};
  for (int64_t i = 0; i < n; ++i) part[i] = p[i];
  return load(part);
}

template <typename Real>
__attribute__((noinline)) void store_fewer(Real* p, Vector<Real> x, int64_t n) {
  Real part[kLanes<Real>];
  store(part, x);
  for (int64_t i = 0; i < n; ++i) p[i] = part[i];
}

// The first n numbers at p, followed by zeros.
template <typename Real>
FWP_INLINE Vector<Real> load_part(const Real* p, int64_t n) {
  return n >= kLanes<Real> ? load(p) : load_fewer(p, n);
}

template <typename Real>
FWP_INLINE void store_part(Real* p, Vector<Real> x, int64_t n) {
  return n >= kLanes<Real> ? store(p, x) : store_fewer(p, x, n);
}

// Lane n of the result is lane Source{}(n) of a and b; the lanes of b are numbered after those of a. GCC accepts single
// lane indices, as Clang does, only since version 12.
template <typename Real, typename Source>
FWP_INLINE Vector<Real> shuffle(Vector<Real> a, Vector<Real> b, Source) {
  return [&]<int... lane>(std::integer_sequence<int, lane...>) __attribute__((always_inline)) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Source{}(lane)...);
#else
    using Index = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
    return __builtin_shuffle(a, b, Vector<Index>{Source{}(lane)...});
#endif
  }(std::make_integer_sequence<int, kLanes<Real>>());
}

// The sum of all lanes, by exchanging halves. Through memory, the loads of parts would wait for the store of the whole
// vector.
template <typename Real, int half = kLanes<Real> / 2>
FWP_INLINE Real sum_lanes(Vector<Real> x) {
  x += shuffle<Real>(x, x, [](int lane) { return lane ^ half; });
  if constexpr (half > 1) return sum_lanes<Real, half / 2>(x);
  return x[0];
}

// The numbers in 16 bytes; also the number of sums across lanes that are computed together.
template <typename Real>
constexpr int kPiece = 16 / int(sizeof(Real));
template <typename Real>
struct PieceOf {
  typedef Real type __attribute__((vector_size(16)));
};
template <typename Real>
using Piece = typename PieceOf<Real>::type;

// The lower or upper half of every 16 bytes of a and b, interleaved in runs of kRun elements.
template <bool kUpper, int kRun, typename Real>
FWP_INLINE Vector<Real> interleave(Vector<Real> a, Vector<Real> b) {
  return shuffle<Real>(a, b, [](int lane) {
    const int run = lane % kPiece<Real> / kRun;
    return run % 2 * kLanes<Real> + lane / kPiece<Real> * kPiece<Real> + run / 2 * kRun + lane % kRun + kUpper * kPiece<Real> / 2;
  });
}

// The sums of kPiece vectors across their lanes.
template <typename Real>
FWP_INLINE Piece<Real> sums_of(const Vector<Real>* x) {
  Vector<Real> sum;
  if constexpr (kPiece<Real> == 2) {
    sum = interleave<false, 1, Real>(x[0], x[1]) + interleave<true, 1, Real>(x[0], x[1]);
  } else {
    const Vector<Real> low = interleave<false, 1, Real>(x[0], x[1]) + interleave<true, 1, Real>(x[0], x[1]);
    const Vector<Real> high = interleave<false, 1, Real>(x[2], x[3]) + interleave<true, 1, Real>(x[2], x[3]);
    sum = interleave<false, 2, Real>(low, high) + interleave<true, 2, Real>(low, high);
  }
  Piece<Real> piece[kVectorBytes / 16];
  std::memcpy(piece, &sum, sizeof sum);
  FWP_UNROLL for (int half = kVectorBytes / 32; half > 0; half /= 2)
    FWP_UNROLL for (int n = 0; n < half; ++n) piece[n] += piece[n + half];
  return piece[0];
}

// Split x and y into runs of `half` lanes. Even runs of the result are the sums of two neighboring runs of x, and odd
// runs those of y.
template <int half, typename Real>
FWP_INLINE Vector<Real> sum_runs(Vector<Real> x, Vector<Real> y) {
  // Lanes that do not move are taken by a blend, which is cheaper than a shuffle.
  return shuffle<Real>(x, y, [](int lane) { return lane % (2 * half) < half ? lane : kLanes<Real> + lane; }) +
         shuffle<Real>(x, y, [](int lane) { return lane % (2 * half) < half ? lane + half : kLanes<Real> + lane - half; });
}

// The lower halves of a and b, or the upper halves.
template <bool kUpper, typename Real>
FWP_INLINE Vector<Real> join_halves(Vector<Real> a, Vector<Real> b) {
  return shuffle<Real>(a, b, [](int lane) {
    constexpr int half = kLanes<Real> / 2;
    return lane / half * kLanes<Real> + kUpper * half + lane % half;
  });
}

// Store the sum of the lanes of x[n] in lane n of x[0], for kLanes vectors. Each step combines pairs of vectors. With a
// smaller `half`, the same within every run of 2 half lanes, for 2 half vectors.
template <typename Real, int half = kLanes<Real> / 2>
FWP_INLINE void sum_lanes_of_each(Vector<Real>* x) {
  FWP_UNROLL for (int n = 0; n < half; ++n)
    x[n] = sum_runs<half, Real>(x[n], x[n + half]);
  if constexpr (half > 1) sum_lanes_of_each<Real, half / 2>(x);
}

}  // namespace fwp
