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

struct SrwmSizes {
  int64_t B, L, H, d, columns, matrix, saved;

  SrwmSizes(const Tensor& x, const Tensor& weights, const Optional& marks) {
    TORCH_CHECK(x.dim() == 4 && x.size(3) > 0 && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble),
                "x must have shape (B, L, H, d), d > 0, in float32 or float64, got ", x.scalar_type(), " of shape ", x.sizes());
    B = x.size(0), L = x.size(1), H = x.size(2), d = x.size(3), columns = 3 * d + 4, matrix = d * columns;
    saved = Srwm<float>::saved_size(L, d);
    check(x, "x", x, x.sizes());
    check(x, "weights", weights, {H, d, columns});
    fwp::check("marks", marks, {B, L}, at::kByte, x.device());
    TORCH_CHECK(!marks || marks->is_contiguous(), "marks must be contiguous");
  }
  static void check(const Tensor& like, const char* name, const Tensor& x, at::IntArrayRef sizes) {
    fwp::check(name, x, sizes, like.scalar_type(), like.device());
    TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
  }
  // Call f(head, marks, tokens, rule) for every head, on threads; tokens(data) are those of the head in an array (B, L, H, d).
  template <typename A, typename F>
  void for_heads(const Tensor& weights, const Optional& marks, F f) const {
    const int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, L * matrix * 8));
    at::parallel_for(0, B * H, grain, [&](int64_t begin, int64_t end) {
      const auto memory = scratch<A>(Srwm<A>::scratch_size(d));
      for (int64_t head = begin; head < end; ++head) {
        Srwm<A> rule(d, weights.const_data_ptr<A>() + head % H * matrix, memory.get());
        const auto tokens = [&]<typename T>(T* data) -> Tokens<T> {
          return {data + (head / H * L * H + head % H) * d, H * d};
        };
        f(head, marks ? marks->const_data_ptr<uint8_t>() + head / H * L : nullptr, tokens, rule);
      }
    });
  }
};

std::tuple<Tensor, Tensor, Tensor> srwm(const Tensor& x, const Tensor& weights, const Tensor& change, const Optional& marks,
                                        bool keeps) {
  const SrwmSizes n(x, weights, marks);
  n.check(x, "change", change, {n.B, n.H, n.d, n.columns});
  const Tensor out = at::empty_like(x), last = change.clone(), saved = at::empty({keeps ? n.B : 0, n.H, n.saved}, x.options());
  with_number(x.element_size(), [&]<typename A>(A) {
    A *const outs = out.mutable_data_ptr<A>(), *const ends = last.mutable_data_ptr<A>(), *const to = saved.mutable_data_ptr<A>();
    n.for_heads<A>(weights, marks, [&](int64_t head, const uint8_t* marks, auto tokens, Srwm<A>& rule) {
      rule.forward(n.L, tokens(x.const_data_ptr<A>()), marks, ends + head * n.matrix, tokens(outs),
                   keeps ? to + head * n.saved : nullptr);
    });
  });
  return {out, last, saved};
}

// -> the gradients of x, weights and change, where change is only read without a kernel. last, saved: of the forward pass.
std::tuple<Tensor, Tensor, Tensor> srwm_backward(const Tensor& x, const Tensor& weights, const Tensor& /*change*/,
                                                 const Optional& marks, const Tensor& last, const Tensor& saved,
                                                 const Tensor& d_out, const Tensor& d_last) {
  const SrwmSizes n(x, weights, marks);
  n.check(x, "last", last, {n.B, n.H, n.d, n.columns});
  n.check(x, "saved", saved, {n.B, n.H, n.saved});
  n.check(x, "d_out", d_out, x.sizes());
  n.check(x, "d_last", d_last, last.sizes());
  const Tensor d_x = at::empty_like(x), d_weights = at::zeros_like(weights), d_change = d_last.clone(), each = d_last.clone();
  with_number(x.element_size(), [&]<typename A>(A) {
    A *const d_tokens = d_x.mutable_data_ptr<A>(), *const changes = d_change.mutable_data_ptr<A>();
    A *const parts = each.mutable_data_ptr<A>(), *const sum = d_weights.mutable_data_ptr<A>();
    n.for_heads<A>(weights, marks, [&](int64_t head, const uint8_t* marks, auto tokens, Srwm<A>& rule) {
      rule.backward(n.L, tokens(x.const_data_ptr<A>()), marks, last.const_data_ptr<A>() + head * n.matrix,
                    saved.const_data_ptr<A>() + head * n.saved, tokens(d_out.const_data_ptr<A>()), tokens(d_tokens),
                    parts + head * n.matrix, changes + head * n.matrix);
    });
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
