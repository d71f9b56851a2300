// The convolution on CPU tensors: x (B, L, D), whose channels lie next to each other; weight (W, D), bias (D,), sequence
// (B, L) of int64, contiguous.

#include "../../cpu/convolution.h"
#include "dense_rows.h"
#include "tensors.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace fwp::cpu {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

constexpr int64_t kTokensOfBlock = 64;  // d_weight is a sum over blocks of tokens, whatever the number of threads
constexpr int64_t kChannels = 256;      // rows, weights and sums of so many stay in the first-level cache

// Call f(block, batch, first token, end, first channel, convolution) for blocks of tokens, on threads.
template <typename Real, typename F>
void for_token_blocks(const Tensor& x, const Tensor& weight, const Optional& sequence, F f) {
  const int64_t B = x.size(0), L = x.size(1), D = x.size(2), blocks = blocks_of(L, kTokensOfBlock);
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, kTokensOfBlock * D));
  at::parallel_for(0, B * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t b = block / blocks, first = block % blocks * kTokensOfBlock;
      for (int64_t c = 0; c < D; c += kChannels)
        f(block, b, first, std::min(L, first + kTokensOfBlock), c,
          Convolution<Real>{L, std::min(kChannels, D - c), weight.size(0),
                            {x.const_data_ptr<Real>() + b * x.stride(0) + c, x.stride(1)}, {weight.const_data_ptr<Real>() + c, D},
                            sequence ? sequence->const_data_ptr<int64_t>() + b * L : nullptr});
    }
  });
}

void check(const Tensor& x, const Tensor& weight, const Optional& bias, const Optional& sequence) {
  const auto fits = [&](const Tensor& y, at::IntArrayRef sizes) {
    return y.sizes() == sizes && y.scalar_type() == x.scalar_type() && y.is_contiguous() && y.device().is_cpu();
  };
  TORCH_CHECK(x.dim() == 3 && has_dense_rows(x) && x.device().is_cpu() && weight.dim() == 2 &&
                  fits(weight, {weight.size(0), x.size(2)}) && (!bias || fits(*bias, {x.size(2)})) &&
                  (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble),
              "x (B, L, D) must have rows whose numbers lie next to each other; weight (W, D) and bias (D,) must be "
              "contiguous; all must be of one dtype, float32 or float64");
  TORCH_CHECK(!sequence || (sequence->sizes() == x.sizes().slice(0, 2) && sequence->scalar_type() == at::kLong &&
                            sequence->is_contiguous()),
              "sequence must be a contiguous tensor (B, L) of int64");
}

// Sequence b of a contiguous tensor (B, L, D) that starts at `data`, from a channel on.
template <typename Real>
Tokens<Real> sequence_of(Real* data, const Tensor& x, int64_t b, int64_t channel) {
  return {data + b * x.size(1) * x.size(2) + channel, x.size(2)};
}

Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const Optional& bias, const Optional& sequence) {
  check(x, weight, bias, sequence);
  const Tensor out = at::empty(x.sizes(), x.options());
  with_number(x.element_size(), [&]<typename Real>(Real) {
    const Real* start = bias ? bias->const_data_ptr<Real>() : nullptr;
    Real* rows = out.mutable_data_ptr<Real>();
    for_token_blocks<Real>(x, weight, sequence, [&](int64_t, int64_t b, int64_t first, int64_t end, int64_t c,
                                                    const auto& convolution) {
      convolution.forward(first, end, start ? start + c : nullptr, sequence_of(rows, x, b, c));
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> causal_conv1d_backward(const Tensor& x, const Tensor& weight, const Optional& sequence,
                                                  const Tensor& d_out) {
  check(x, weight, {}, sequence);
  TORCH_CHECK(d_out.sizes() == x.sizes() && d_out.scalar_type() == x.scalar_type() && d_out.is_contiguous() &&
                  d_out.device().is_cpu(), "d_out must be contiguous, with the shape and dtype of x");
  const int64_t W = weight.size(0), D = x.size(2), blocks = x.size(0) * blocks_of(x.size(1), kTokensOfBlock);
  const Tensor d_x = at::empty(x.sizes(), x.options()), parts = at::zeros({blocks, W * D}, x.options());
  Tensor d_weight;
  with_number(x.element_size(), [&]<typename Real>(Real) {
    Real *rows = d_x.mutable_data_ptr<Real>(), *sums = parts.mutable_data_ptr<Real>();
    const Real* d_rows = d_out.const_data_ptr<Real>();
    for_token_blocks<Real>(x, weight, sequence, [&](int64_t block, int64_t b, int64_t first, int64_t end, int64_t c,
                                                    const auto& convolution) {
      convolution.backward(first, end, sequence_of(d_rows, x, b, c), sequence_of(rows, x, b, c),
                           {sums + block * W * D + c, D});
    });
    d_weight = sum_rows<Real>(parts).view({W, D});
  });
  return {d_x, d_weight};
}

}  // namespace
}  // namespace fwp::cpu

TORCH_LIBRARY_IMPL(fwp, CPU, m) {
  m.impl("causal_conv1d", &fwp::cpu::causal_conv1d);
  m.impl("causal_conv1d_backward", &fwp::cpu::causal_conv1d_backward);
}
