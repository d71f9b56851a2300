// Self-referential weight matrices on CPU tensors, all contiguous and of one dtype, float32 or float64. Tokens x (B, L, H, d);
// weights W_0 (H, d, 3 d + 4); changes C (B, H, d, 3 d + 4); marks (B, L) of uint8. Each head is one task of a thread.

#include "../../cpu/srwm.h"
#include "../arguments.h"
#include "tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <tuple>

namespace fwp::cpu {
namespace {

struct SrwmSizes : TokenSizes {
  int64_t columns, matrix, saved;
};

SrwmSizes sizes_of(const Tensor& x, const Tensor& weights, const Optional& marks) {
  TORCH_CHECK(x.dim() == 4 && x.size(3) > 0 && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble),
              "x must have shape (B, L, H, d), d > 0, in float32 or float64, got ", x.scalar_type(), " of shape ", x.sizes());
  const int64_t d = x.size(3), columns = 3 * d + 4;
  check("x", x, x.sizes(), x);
  check("weights", weights, {x.size(2), d, columns}, x);
  const TokenSizes size{x.size(0), x.size(1), x.size(2), d, check_marks(marks, x)};
  return {size, columns, d * columns, Srwm<float>::saved_size(size.L, d)};
}

std::tuple<Tensor, Tensor, Tensor> srwm(const Tensor& x, const Tensor& weights, const Tensor& change, const Optional& marks,
                                        bool keeps) {
  const SrwmSizes n = sizes_of(x, weights, marks);
  check("change", change, {n.B, n.H, n.d, n.columns}, x);
  const Tensor out = at::empty_like(x), last = change.clone(), saved = at::empty({keeps ? n.B : 0, n.H, n.saved}, x.options());
  with_number(x.element_size(), [&]<typename Real>(Real) {
    Real *const outs = out.mutable_data_ptr<Real>(), *const ends = last.mutable_data_ptr<Real>();
    Real* const to = saved.mutable_data_ptr<Real>();
    const auto run_head = [&](int64_t head, const uint8_t* marks, auto tokens, Srwm<Real>& rule) {
      rule.forward(n.L, tokens(x.const_data_ptr<Real>(), n.d), marks, ends + head * n.matrix, tokens(outs, n.d),
                   keeps ? to + head * n.saved : nullptr);
    };
    for_token_heads<Srwm<Real>>(n, n.matrix, weights.const_data_ptr<Real>(), n.matrix, run_head);
  });
  return {out, last, saved};
}

// -> the gradients of x, weights and change, where change is only read without a kernel. last, saved: of the forward pass.
std::tuple<Tensor, Tensor, Tensor> srwm_backward(const Tensor& x, const Tensor& weights, const Tensor& /*change*/,
                                                 const Optional& marks, const Tensor& last, const Tensor& saved,
                                                 const Tensor& d_out, const Tensor& d_last) {
  const SrwmSizes n = sizes_of(x, weights, marks);
  check("last", last, {n.B, n.H, n.d, n.columns}, x);
  check("saved", saved, {n.B, n.H, n.saved}, x);
  check("d_out", d_out, x.sizes(), x);
  check("d_last", d_last, last.sizes(), x);
  const Tensor d_x = at::empty_like(x), d_weights = at::zeros_like(weights), d_change = d_last.clone(), each = d_last.clone();
  with_number(x.element_size(), [&]<typename Real>(Real) {
    Real *const d_tokens = d_x.mutable_data_ptr<Real>(), *const changes = d_change.mutable_data_ptr<Real>();
    Real *const parts = each.mutable_data_ptr<Real>(), *const sum = d_weights.mutable_data_ptr<Real>();
    const auto run_head = [&](int64_t head, const uint8_t* marks, auto tokens, Srwm<Real>& rule) {
      rule.backward(n.L, tokens(x.const_data_ptr<Real>(), n.d), marks, last.const_data_ptr<Real>() + head * n.matrix,
                    saved.const_data_ptr<Real>() + head * n.saved, tokens(d_out.const_data_ptr<Real>(), n.d),
                    tokens(d_tokens, n.d), parts + head * n.matrix, changes + head * n.matrix);
    };
    for_token_heads<Srwm<Real>>(n, n.matrix, weights.const_data_ptr<Real>(), n.matrix, run_head);
    for (int64_t b = 0; b < n.B; ++b)  // in one order, whatever the number of threads
      for (int64_t i = 0; i < n.H * n.matrix; ++i) sum[i] += parts[b * n.H * n.matrix + i];
  });
  return {d_x, d_weights, d_change};
}

}  // namespace
}  // namespace fwp::cpu

TORCH_LIBRARY_IMPL(fwp, CPU, m) {
  m.impl("srwm", &fwp::cpu::srwm);
  m.impl("srwm_backward", &fwp::cpu::srwm_backward);
}
