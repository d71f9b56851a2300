// Operations on rows of CPU tensors, all of one dtype, float32, float64 or bfloat16; weights and their gradients are in
// the dtype of the arithmetic.

#include "../../cpu/rows.h"
#include "dense_rows.h"
#include "tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace fwp::cpu {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

constexpr int64_t kRows = 32;  // of a block; gradients of weights are sums over blocks, whatever the number of threads

// Call f(T()) for the type T of the numbers of x.
template <typename F>
void with_type(const Tensor& x, F f) {
  if (x.scalar_type() == at::kFloat) return f(float());
  if (x.scalar_type() == at::kDouble) return f(double());
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "rows must be float32, float64 or bfloat16, got ", x.scalar_type());
  f(BFloat16());
}

template <typename T>
const T* data(const Tensor& x) { return static_cast<const T*>(x.const_data_ptr()); }
template <typename T>
T* mutable_data(const Tensor& x) { return static_cast<T*>(x.mutable_data_ptr()); }

int64_t count_rows(const Tensor& x) { return x.numel() / std::max<int64_t>(1, x.size(-1)); }

// Call f(block, first row, end) for blocks of rows of x, on threads.
template <typename F>
void for_row_blocks(const Tensor& x, F f) {
  const int64_t rows = count_rows(x), n = x.size(-1);
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, kRows * n));
  at::parallel_for(0, blocks_of(rows, kRows), grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) f(block, block * kRows, std::min(rows, (block + 1) * kRows));
  });
}

void check_rows(const char* name, const Tensor& x, at::IntArrayRef sizes, at::ScalarType type) {
  TORCH_CHECK(x.sizes() == sizes && x.scalar_type() == type && x.is_contiguous() && x.device().is_cpu(), name,
              " must be contiguous, ", type, " and of shape ", sizes, ", got ", x.scalar_type(), " of shape ", x.sizes());
}

// x (..., 2 n), contiguous -> SiLU(x_1) * x_2 (..., n).
Tensor gated_silu(const Tensor& x) {
  TORCH_CHECK(x.dim() > 0 && x.size(-1) % 2 == 0, "x must have an even number of columns, got shape ", x.sizes());
  check_rows("x", x, x.sizes(), x.scalar_type());
  const int64_t n = x.size(-1) / 2;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = n;
  const Tensor out = at::empty(sizes, x.options());
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const T* from = data<T>(x);
    T* to = mutable_data<T>(out);
    for_row_blocks(out, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        GatedSilu<T>{n}.forward(from + 2 * row * n, from + (2 * row + 1) * n, to + row * n);
    });
  });
  return out;
}

Tensor gated_silu_backward(const Tensor& x, const Tensor& d_out) {
  std::vector<int64_t> sizes = d_out.sizes().vec();
  sizes.back() *= 2;
  check_rows("x", x, sizes, d_out.scalar_type());
  check_rows("d_out", d_out, d_out.sizes(), x.scalar_type());
  const int64_t n = d_out.size(-1);
  const Tensor d_x = at::empty_like(x);
  with_type(x, [&](auto type) {
    using T = decltype(type);
    const T *from = data<T>(x), *d = data<T>(d_out);
    T* to = mutable_data<T>(d_x);
    for_row_blocks(d_out, [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t first = 2 * row * n, second = first + n;
        GatedSilu<T>{n}.backward(from + first, from + second, d + row * n, to + first, to + second);
      }
    });
  });
  return d_x;
}

// Rows x (B, L, H, n) with any strides but the last, which is 1.
struct Rows {
  int64_t L, H, n, strides[3];

  explicit Rows(const Tensor& x) {
    TORCH_CHECK(x.dim() == 4 && has_dense_rows(x) && x.device().is_cpu(),
                "x must have shape (B, L, H, n), with rows whose numbers lie next to each other");
    L = x.size(1), H = x.size(2), n = x.size(3);
    for (int i = 0; i < 3; ++i) strides[i] = x.stride(i);
  }
  int64_t at(int64_t row) const {
    return row / H / L * strides[0] + row / H % L * strides[1] + row % H * strides[2];
  }
};

void check(const Tensor& x, const Optional& weight, const Optional& gate) {
  const auto computed = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (weight) check_rows("weight", *weight, x.sizes().slice(3), computed);
  if (gate) check_rows("gate", *gate, x.sizes(), x.scalar_type());
}

template <typename F>
void with_opening(std::string_view opening, F f) {
  if (opening == "sigmoid") return f(std::integral_constant<Opening, Opening::kSigmoid>());
  TORCH_CHECK(opening == "silu", "opening must be silu or sigmoid, got ", opening);
  f(std::integral_constant<Opening, Opening::kSilu>());
}

// out (B, L, H, n) is contiguous.
Tensor normalize_rows(const Tensor& x, const Optional& weight, const Optional& gate, std::string_view opening, double factor,
                      double epsilon) {
  const Rows rows(x);
  check(x, weight, gate);
  const Tensor out = at::empty(x.sizes(), x.options());
  with_type(x, [&](auto type) {
    using T = decltype(type);
    using Real = Arithmetic<T>;
    with_opening(opening, [&](auto kind) {
      const RowNorm<T, kind> norm{rows.n, weight ? data<Real>(*weight) : nullptr, Real(factor), Real(epsilon)};
      for_row_blocks(x, [&](int64_t, int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row)
          norm.forward(data<T>(x) + rows.at(row), gate ? data<T>(*gate) + row * rows.n : nullptr,
                       mutable_data<T>(out) + row * rows.n);
      });
    });
  });
  return out;
}

// d_x has the strides of x if x has no gaps; d_weight and d_gate are empty without a weight or a gate.
std::tuple<Tensor, Tensor, Tensor> normalize_rows_backward(const Tensor& x, const Optional& weight, const Optional& gate,
                                                           std::string_view opening, double factor,
                                                           double epsilon, const Tensor& d_out) {
  const Rows rows(x);
  check(x, weight, gate);
  check_rows("d_out", d_out, x.sizes(), x.scalar_type());
  const int64_t n = rows.n;
  const Tensor none = at::empty({0}, x.options()), d_gate = gate ? at::empty_like(*gate) : none;
  const Tensor d_x = x.is_non_overlapping_and_dense() ? at::empty_like(x) : at::empty(x.sizes(), x.options());
  const Rows to(d_x);
  const Tensor parts = weight ? at::zeros({blocks_of(count_rows(x), kRows), n}, weight->options()) : none;
  Tensor d_weight = none;
  with_type(x, [&](auto type) {
    using T = decltype(type);
    using Real = Arithmetic<T>;
    with_opening(opening, [&](auto kind) {
      const RowNorm<T, kind> norm{n, weight ? data<Real>(*weight) : nullptr, Real(factor), Real(epsilon)};
      for_row_blocks(x, [&](int64_t block, int64_t begin, int64_t end) {
        const auto memory = scratch<Real>(n);
        for (int64_t row = begin; row < end; ++row)
          norm.backward(data<T>(x) + rows.at(row), gate ? data<T>(*gate) + row * n : nullptr, data<T>(d_out) + row * n,
                        mutable_data<T>(d_x) + to.at(row), gate ? mutable_data<T>(d_gate) + row * n : nullptr,
                        weight ? mutable_data<Real>(parts) + block * n : nullptr, memory.get());
      });
    });
    if (weight) d_weight = sum_rows<Real>(parts);
  });
  return {d_x, d_weight, d_gate};
}

}  // namespace
}  // namespace fwp::cpu

TORCH_LIBRARY_IMPL(fwp, CPU, m) {
  m.impl("gated_silu", &fwp::cpu::gated_silu);
  m.impl("gated_silu_backward", &fwp::cpu::gated_silu_backward);
  m.impl("normalize_rows", &fwp::cpu::normalize_rows);
  m.impl("normalize_rows_backward", &fwp::cpu::normalize_rows_backward);
}
