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

template <Opening kOpening, typename Real>
struct Opened {
  Vector<Real> value, derivative;

  explicit FWP_INLINE Opened(Vector<Real> x) {
    const Vector<Real> sigmoid = Real(1) / (Real(1) + exponential(-x));
    value = kOpening == Opening::kSilu ? x * sigmoid : sigmoid;
    derivative = kOpening == Opening::kSilu ? sigmoid + value * (Real(1) - sigmoid) : sigmoid * (Real(1) - sigmoid);
  }
};

// The sum of f(first element, number of elements) over the vectors of n elements; f gives zeros after their number.
template <typename Real, typename F>
FWP_INLINE Real sum_over(int64_t n, F f) {
  constexpr int kSums = 4;  // independent, so that additions do not wait for each other
  Vector<Real> sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes<Real> <= n; i += kSums * kLanes<Real>)
    FWP_UNROLL for (int part = 0; part < kSums; ++part) sums[part] += f(i + part * kLanes<Real>, kLanes<Real>);
  for (; i < n; i += kLanes<Real>) sums[0] += f(i, n - i);
  return sum_lanes<Real>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename Real, typename F>
FWP_INLINE void for_vectors(int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kLanes<Real>) f(i, n - i);
}

// SiLU(x) * y for rows of n numbers.
template <typename T>
struct GatedSilu {
  using Real = Arithmetic<T>;
  int64_t n;

  void forward(const T* x, const T* y, T* out) const {
    for_vectors<Real>(n, [&](int64_t i, int64_t left) {
      write(out + i, Opened<Opening::kSilu, Real>(read(x + i, left)).value * read(y + i, left), left);
    });
  }
  void backward(const T* x, const T* y, const T* d_out, T* d_x, T* d_y) const {
    for_vectors<Real>(n, [&](int64_t i, int64_t left) {
      const Opened<Opening::kSilu, Real> opened(read(x + i, left));
      const Vector<Real> d = read(d_out + i, left);
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
  using Real = Arithmetic<T>;
  int64_t n;
  const Real* weight;  // may be null
  Real factor, epsilon;

  Real inverse_length(const T* x) const {
    return Real(1) / std::sqrt(epsilon + factor * sum_over<Real>(n, [&](int64_t i, int64_t left) {
      const Vector<Real> part = read(x + i, left);
      return part * part;
    }));
  }
  FWP_INLINE Vector<Real> weight_of(int64_t i, int64_t left) const {
    return weight ? read(weight + i, left) : Vector<Real>{} + Real(1);
  }

  void forward(const T* x, const T* gate, T* out) const {
    const Real r = inverse_length(x);
    for_vectors<Real>(n, [&](int64_t i, int64_t left) {
      Vector<Real> y = r * read(x + i, left) * weight_of(i, left);
      if (gate) y *= Opened<kOpening, Real>(read(gate + i, left)).value;
      write(out + i, y, left);
    });
  }
  // d_weight is added to, d_gate is null without a gate; scratch has n numbers.
  void backward(const T* x, const T* gate, const T* d_out, T* d_x, T* d_gate, Real* d_weight, Real* scratch) const {
    const Real r = inverse_length(x);
    const Real product = sum_over<Real>(n, [&](int64_t i, int64_t left) {
      const Vector<Real> part = read(x + i, left), normal = r * part, w = weight_of(i, left);
      Vector<Real> d = read(d_out + i, left);
      if (gate) {
        const Opened<kOpening, Real> opened(read(gate + i, left));
        write(d_gate + i, d * normal * w * opened.derivative, left);
        d *= opened.value;
      }
      if (d_weight) write(d_weight + i, read(d_weight + i, left) + d * normal, left);
      d *= w;
      write(scratch + i, d, left);
      return d * part;
    });
    const Real share = factor * r * r * product;
    for_vectors<Real>(n, [&](int64_t i, int64_t left) {
      write(d_x + i, r * (read(scratch + i, left) - share * read(x + i, left)), left);
    });
  }
};

}  // namespace fwp
