// Rows of numbers, element by element: SiLU and the normalisation of a row by its length, with their gradients.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "bfloat16.h"

namespace fwp {

// e^x = 2^n e^r with |r| <= log(2) / 2, whose series to degree 7 leaves out r^8 / 8! < 6e-9. It is at least e^-87, and
// infinite above e^88.
FWP_INLINE Vector<float> exponential(Vector<float> argument) {
  constexpr float kRounding = 0x1.8p23f;  // a sum with it has no digits after the point, and n in its lowest bits
  constexpr float kLog2Upper = 0x1.62ep-1f, kLog2Rest = 0x1.0bfbe8p-15f;  // n times the upper part is exact
  const Vector<float> x = argument < -87.0f ? Vector<float>{} - 87.0f : argument;
  const Vector<float> sum = x * 0x1.715476p0f + kRounding, n = sum - kRounding;
  const Vector<float> r = x - n * kLog2Upper - n * kLog2Rest;
  constexpr float kInverseFactorials[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  Vector<float> series = Vector<float>{} + 1.0f / 5040;
  FWP_UNROLL for (int degree = 0; degree < 7; ++degree) series = series * r + kInverseFactorials[degree];
  const Vector<float> power = same_bits<Vector<float>>(same_bits<Words>(series) + (same_bits<Words>(sum) << 23));
  return x <= 88.0f ? power : x + std::numeric_limits<float>::infinity();  // NaN stays NaN
}
FWP_INLINE Vector<double> exponential(Vector<double> x) {
  FWP_UNROLL for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = std::exp(x[lane]);
  return x;
}

// What a gate is opened by: x sigmoid(x), or sigmoid(x).
enum class Opening { kSilu, kSigmoid };

template <Opening kOpening, typename A>
struct Opened {
  Vector<A> value, derivative;

  explicit FWP_INLINE Opened(Vector<A> x) {
    const Vector<A> sigmoid = A(1) / (A(1) + exponential(-x));
    value = kOpening == Opening::kSilu ? x * sigmoid : sigmoid;
    derivative = kOpening == Opening::kSilu ? sigmoid + value * (A(1) - sigmoid) : sigmoid * (A(1) - sigmoid);
  }
};

// The sum of f(first element, number of elements) over the vectors of n elements; f gives zeros after their number.
template <typename A, typename F>
FWP_INLINE A sum_over(int64_t n, F f) {
  constexpr int kSums = 4;  // independent, so that additions do not wait for each other
  Vector<A> sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes<A> <= n; i += kSums * kLanes<A>)
    FWP_UNROLL for (int part = 0; part < kSums; ++part) sums[part] += f(i + part * kLanes<A>, kLanes<A>);
  for (; i < n; i += kLanes<A>) sums[0] += f(i, n - i);
  return sum_lanes<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename A, typename F>
FWP_INLINE void for_vectors(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kLanes<A>) f(i, n - i);
}

// SiLU(x) * y for rows of n numbers.
template <typename T>
struct GatedSilu {
  using A = Arithmetic<T>;
  int64_t n;

  void forward(const T* x, const T* y, T* out) const {
    for_vectors<A>(n, [&](int64_t i, int64_t left) {
      write(out + i, Opened<Opening::kSilu, A>(read(x + i, left)).value * read(y + i, left), left);
    });
  }
  void backward(const T* x, const T* y, const T* d_out, T* d_x, T* d_y) const {
    for_vectors<A>(n, [&](int64_t i, int64_t left) {
      const Opened<Opening::kSilu, A> opened(read(x + i, left));
      const Vector<A> d = read(d_out + i, left);
      write(d_x + i, d * read(y + i, left) * opened.derivative, left);
      write(d_y + i, d * opened.value, left);
    });
  }
};

// Rows x of n numbers times r = (factor * sum of x_i^2 + epsilon)^(-1/2), a weight and an opened gate:
//
//     out = r x w a(g)
//
// and, with e = d_out w a(g), d_x = r (e - factor r^2 (e . x) x). No weight, or no gate: without that factor.
template <typename T, Opening kOpening>
struct RowNorm {
  using A = Arithmetic<T>;
  int64_t n;
  const A* weight;  // may be null
  A factor, epsilon;

  A inverse_length(const T* x) const {
    return A(1) / std::sqrt(epsilon + factor * sum_over<A>(n, [&](int64_t i, int64_t left) {
      const Vector<A> part = read(x + i, left);
      return part * part;
    }));
  }
  FWP_INLINE Vector<A> weight_of(int64_t i, int64_t left) const {
    return weight ? read(weight + i, left) : Vector<A>{} + A(1);
  }

  void forward(const T* x, const T* gate, T* out) const {
    const A r = inverse_length(x);
    for_vectors<A>(n, [&](int64_t i, int64_t left) {
      Vector<A> y = r * read(x + i, left) * weight_of(i, left);
      if (gate) y *= Opened<kOpening, A>(read(gate + i, left)).value;
      write(out + i, y, left);
    });
  }
  // d_weight is added to, d_gate is null without a gate; scratch has n numbers.
  void backward(const T* x, const T* gate, const T* d_out, T* d_x, T* d_gate, A* d_weight, A* scratch) const {
    const A r = inverse_length(x);
    const A product = sum_over<A>(n, [&](int64_t i, int64_t left) {
      const Vector<A> part = read(x + i, left), normal = r * part, w = weight_of(i, left);
      Vector<A> d = read(d_out + i, left);
      if (gate) {
        const Opened<kOpening, A> opened(read(gate + i, left));
        write(d_gate + i, d * normal * w * opened.derivative, left);
        d *= opened.value;
      }
      if (d_weight) write(d_weight + i, read(d_weight + i, left) + d * normal, left);
      d *= w;
      write(scratch + i, d, left);
      return d * part;
    });
    const A share = factor * r * r * product;
    for_vectors<A>(n, [&](int64_t i, int64_t left) {
      write(d_x + i, r * (read(scratch + i, left) - share * read(x + i, left)), left);
    });
  }
};

}  // namespace fwp
