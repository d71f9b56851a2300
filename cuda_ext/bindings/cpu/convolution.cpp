// The convolution on CPU tensors: x (B, L, D), weight (W, D), bias (D,), sequence (B, L) of int64, contiguous.

#include "../../cpu/convolution.h"
#include "tensors.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace fwp::cpu {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

// Call f(batch, first channel, convolution) for blocks of channels on threads, a batch after the other in each block.
template <typename A, typename F>
void for_channels(const Tensor& x, const Tensor& weight, const Optional& sequence, F f) {
  const int64_t B = x.size(0), L = x.size(1), D = x.size(2), blocks = (D + kChannels - 1) / kChannels;
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, B * L * kChannels));
  at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin * kChannels; c < std::min(D, end * kChannels); c += kChannels)
      for (int64_t b = 0; b < B; ++b)
        f(b, c, Convolution<A>{L, std::min(kChannels, D - c), weight.size(0),
                               {x.const_data_ptr<A>() + b * L * D + c, D}, {weight.const_data_ptr<A>() + c, D},
                               sequence ? sequence->const_data_ptr<int64_t>() + b * L : nullptr});
  });
}

void check(const Tensor& x, const Tensor& weight, const Optional& bias, const Optional& sequence) {
  const auto fits = [&](const Tensor& y, at::IntArrayRef sizes) {
    return y.sizes() == sizes && y.scalar_type() == x.scalar_type() && y.is_contiguous() && y.device().is_cpu();
  };
  TORCH_CHECK(x.dim() == 3 && weight.dim() == 2 && fits(x, x.sizes()) && fits(weight, {weight.size(0), x.size(2)}) &&
                  (!bias || fits(*bias, {x.size(2)})) && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble),
              "x (B, L, D), weight (W, D) and bias (D,) must be contiguous, of one dtype, float32 or float64");
  TORCH_CHECK(!sequence || (sequence->sizes() == x.sizes().slice(0, 2) && sequence->scalar_type() == at::kLong &&
                            sequence->is_contiguous()),
              "sequence must be a contiguous tensor (B, L) of int64");
}

Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const Optional& bias, const Optional& sequence) {
  check(x, weight, bias, sequence);
  const Tensor out = at::empty_like(x);
  const int64_t L = x.size(1), D = x.size(2);
  FWP_DISPATCH(x.element_size(), {
    for_channels<A>(x, weight, sequence, [&](int64_t b, int64_t c, const Convolution<A>& convolution) {
      convolution.forward(bias ? bias->const_data_ptr<A>() + c : nullptr,
                          {out.mutable_data_ptr<A>() + b * L * D + c, D});
    });
  })
  return out;
}

std::tuple<Tensor, Tensor> causal_conv1d_backward(const Tensor& x, const Tensor& weight, const Optional& sequence,
                                                  const Tensor& d_out) {
  check(x, weight, {}, sequence);
  check(d_out, weight, {}, {});
  TORCH_CHECK(d_out.sizes() == x.sizes() && d_out.scalar_type() == x.scalar_type(), "d_out must be as x");
  const Tensor d_x = at::empty_like(x), d_weight = at::zeros(weight.sizes(), x.options());
  const int64_t L = x.size(1), D = x.size(2);
  FWP_DISPATCH(x.element_size(), {
    for_channels<A>(x, weight, sequence, [&](int64_t b, int64_t c, const Convolution<A>& convolution) {
      const int64_t first = b * L * D + c;
      convolution.backward({d_out.const_data_ptr<A>() + first, D}, {d_x.mutable_data_ptr<A>() + first, D},
                           {d_weight.mutable_data_ptr<A>() + c, D});
    });
  })
  return {d_x, d_weight};
}

}  // namespace
}  // namespace fwp::cpu

TORCH_LIBRARY_IMPL(fwp, CPU, m) {
  m.impl("causal_conv1d", &fwp::cpu::causal_conv1d);
  m.impl("causal_conv1d_backward", &fwp::cpu::causal_conv1d_backward);
}
