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

template <typename A>
struct VectorOf {
  typedef A type __attribute__((vector_size(kVectorBytes)));
};
template <typename A>
using Vector = typename VectorOf<A>::type;
template <typename A>
constexpr int kLanes = kVectorBytes / int(sizeof(A));

template <typename A>
FWP_INLINE Vector<A> load(const A* p) {
  Vector<A> x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <typename A>
FWP_INLINE void store(A* p, Vector<A> x) {
  std::memcpy(p, &x, sizeof x);
}

// Keep x in a register. GCC would load it again for each use, as a memory operand, and loads are the bottleneck.
template <typename A>
FWP_INLINE Vector<A> in_register(Vector<A> x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// Not inlined: inlining this rare case into every kernel took half of the compile time.
template <typename A>
__attribute__((noinline)) Vector<A> load_fewer(const A* p, int64_t n) {
  A part[kLanes<A>] = {};
  for (int64_t i = 0; i < n; ++i) part[i] = p[i];
  return load(part);
}

template <typename A>
__attribute__((noinline)) void store_fewer(A* p, Vector<A> x, int64_t n) {
  A part[kLanes<A>];
  store(part, x);
  for (int64_t i = 0; i < n; ++i) p[i] = part[i];
}

// The first n numbers at p, followed by zeros.
template <typename A>
FWP_INLINE Vector<A> load_part(const A* p, int64_t n) {
  return n >= kLanes<A> ? load(p) : load_fewer(p, n);
}

template <typename A>
FWP_INLINE void store_part(A* p, Vector<A> x, int64_t n) {
  return n >= kLanes<A> ? store(p, x) : store_fewer(p, x, n);
}

// Lane n of the result is lane Source{}(n) of a and b; the lanes of b are numbered after those of a. GCC accepts single
// lane indices, as Clang does, only since version 12.
template <typename A, typename Source>
FWP_INLINE Vector<A> shuffle(Vector<A> a, Vector<A> b, Source) {
  return [&]<int... lane>(std::integer_sequence<int, lane...>) __attribute__((always_inline)) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Source{}(lane)...);
#else
    using Index = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;
    return __builtin_shuffle(a, b, Vector<Index>{Source{}(lane)...});
#endif
  }(std::make_integer_sequence<int, kLanes<A>>());
}

// The sum of all lanes, by exchanging halves. Through memory, the loads of parts would wait for the store of the whole
// vector.
template <typename A, int half = kLanes<A> / 2>
FWP_INLINE A sum_lanes(Vector<A> x) {
  x += shuffle<A>(x, x, [](int lane) { return lane ^ half; });
  if constexpr (half > 1) return sum_lanes<A, half / 2>(x);
  return x[0];
}

// The numbers in 16 bytes; also the number of sums across lanes that are computed together.
template <typename A>
constexpr int kPiece = 16 / int(sizeof(A));
template <typename A>
struct PieceOf {
  typedef A type __attribute__((vector_size(16)));
};
template <typename A>
using Piece = typename PieceOf<A>::type;

// The lower or upper half of every 16 bytes of a and b, interleaved in runs of kRun elements.
template <bool kUpper, int kRun, typename A>
FWP_INLINE Vector<A> interleave(Vector<A> a, Vector<A> b) {
  return shuffle<A>(a, b, [](int lane) {
    const int run = lane % kPiece<A> / kRun;
    return run % 2 * kLanes<A> + lane / kPiece<A> * kPiece<A> + run / 2 * kRun + lane % kRun + kUpper * kPiece<A> / 2;
  });
}

// The sums of kPiece vectors across their lanes.
template <typename A>
FWP_INLINE Piece<A> sums_of(const Vector<A>* x) {
  Vector<A> sum;
  if constexpr (kPiece<A> == 2) {
    sum = interleave<false, 1, A>(x[0], x[1]) + interleave<true, 1, A>(x[0], x[1]);
  } else {
    const Vector<A> low = interleave<false, 1, A>(x[0], x[1]) + interleave<true, 1, A>(x[0], x[1]);
    const Vector<A> high = interleave<false, 1, A>(x[2], x[3]) + interleave<true, 1, A>(x[2], x[3]);
    sum = interleave<false, 2, A>(low, high) + interleave<true, 2, A>(low, high);
  }
  Piece<A> piece[kVectorBytes / 16];
  std::memcpy(piece, &sum, sizeof sum);
  FWP_UNROLL for (int half = kVectorBytes / 32; half > 0; half /= 2)
    FWP_UNROLL for (int n = 0; n < half; ++n) piece[n] += piece[n + half];
  return piece[0];
}

// Split x and y into runs of `half` lanes. Even runs of the result are the sums of two neighboring runs of x, and odd
// runs those of y.
template <int half, typename A>
FWP_INLINE Vector<A> sum_runs(Vector<A> x, Vector<A> y) {
  // Lanes that do not move are taken by a blend, which is cheaper than a shuffle.
  return shuffle<A>(x, y, [](int lane) { return lane % (2 * half) < half ? lane : kLanes<A> + lane; }) +
         shuffle<A>(x, y, [](int lane) { return lane % (2 * half) < half ? lane + half : kLanes<A> + lane - half; });
}

// The lower halves of a and b, or the upper halves.
template <bool kUpper, typename A>
FWP_INLINE Vector<A> join_halves(Vector<A> a, Vector<A> b) {
  return shuffle<A>(a, b, [](int lane) {
    constexpr int half = kLanes<A> / 2;
    return lane / half * kLanes<A> + kUpper * half + lane % half;
  });
}

// Store the sum of the lanes of x[n] in lane n of x[0], for kLanes vectors. Each step combines pairs of vectors. With a
// smaller `half`, the same within every run of 2 half lanes, for 2 half vectors.
template <typename A, int half = kLanes<A> / 2>
FWP_INLINE void sum_lanes_of_each(Vector<A>* x) {
  FWP_UNROLL for (int n = 0; n < half; ++n)
    x[n] = sum_runs<half, A>(x[n], x[n + half]);
  if constexpr (half > 1) sum_lanes_of_each<A, half / 2>(x);
}

}  // namespace fwp
