// The recurrent delta rule on CPU tensors, all contiguous and of one dtype, float32 or float64. Logits x (B, L, H, 3 d + 1); R
// (H, d, 3 d + 1); outputs (B, L, H, d); memories (B, H, d, d); marks (B, L) of uint8. Each head is one task of a thread.

#include "../../cpu/recurrent_delta.h"
#include "tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace fwp::cpu {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

template <typename A>
const A* data_of(const Optional& x) { return x ? x->const_data_ptr<A>() : nullptr; }

struct HeadSizes {
  int64_t B, L, H, d, gates, chunks;

  explicit HeadSizes(const Tensor& x)
      : B(x.size(0)), L(x.size(1)), H(x.size(2)), d((x.size(3) - 1) / 3), gates(x.size(3)),
        chunks((x.size(1) + kKeptEvery - 1) / kKeptEvery) {}

  // Call f(b, h, rule) for every head, on threads.
  template <typename A, typename F>
  void for_heads(const Optional& weights, F f) const {
    const int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, L * d * d * 8));
    at::parallel_for(0, B * H, grain, [&](int64_t begin, int64_t end) {
      const auto memory = scratch<A>(RecurrentDelta<A>::scratch_size(d));
      for (int64_t head = begin; head < end; ++head) {
        const A* const r = data_of<A>(weights);
        RecurrentDelta<A> rule(d, r ? r + head % H * d * gates : nullptr, memory.get());
        f(head / H, head % H, rule);
      }
    });
  }
  // The tokens of a head of x (B, L, H, n); none if `data` is null.
  template <typename A>
  Tokens<A> tokens(A* data, int64_t b, int64_t h, int64_t n) const {
    return {data ? data + (b * L * H + h) * n : nullptr, H * n};
  }
};

void check(const Tensor& x, const Tensor& other, const char* name, at::IntArrayRef sizes) {
  TORCH_CHECK(other.sizes() == sizes && other.scalar_type() == x.scalar_type() && other.is_contiguous() &&
                  other.device().is_cpu(),
              name, " must be contiguous, on the CPU, ", x.scalar_type(), " and of shape ", sizes, ", got ",
              other.scalar_type(), " of shape ", other.sizes());
}
void check(const Tensor& x, const Optional& weights, const Tensor& output, const Optional& marks) {
  TORCH_CHECK(x.dim() == 4 && x.size(3) % 3 == 1 && x.size(3) > 1 &&
                  (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble),
              "x must have shape (B, L, H, 3 d + 1), in float32 or float64, got ", x.scalar_type(), " of shape ", x.sizes());
  const HeadSizes n(x);
  check(x, x, "x", x.sizes());
  if (weights) check(x, *weights, "weights", {n.H, n.d, n.gates});
  check(x, output, "output", {n.B, n.H, n.d});
  TORCH_CHECK(!marks || (marks->sizes() == x.sizes().slice(0, 2) && marks->scalar_type() == at::kByte && marks->is_contiguous()),
              "marks must be a contiguous tensor (B, L) of uint8");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> recurrent_delta(const Tensor& x, const Optional& weights, const Optional& z,
                                                           const Tensor& memory, const Tensor& output, const Optional& marks,
                                                           bool keeps) {
  check(x, weights, output, marks);
  const HeadSizes n(x);
  if (z) check(x, *z, "z", {n.B, n.L, n.H, n.d});
  check(x, memory, "memory", {n.B, n.H, n.d, n.d});
  const Tensor out = at::empty({n.B, n.L, n.H, n.d}, x.options()), last = memory.clone(), fed_back = output.clone();
  const Tensor saved = at::empty(keeps ? x.sizes() : at::IntArrayRef{0}, x.options());
  const Tensor kept = at::empty({keeps ? n.B * n.H * n.chunks : 0, n.d, n.d}, x.options());
  with_number(x.element_size(), [&]<typename A>(A) {
    A *const outs = out.mutable_data_ptr<A>(), *const states = last.mutable_data_ptr<A>();
    A *const feedback = fed_back.mutable_data_ptr<A>(), *const of_tokens = keeps ? saved.mutable_data_ptr<A>() : nullptr;
    A* const of_chunks = keeps ? kept.mutable_data_ptr<A>() : nullptr;
    n.for_heads<A>(weights, [&](int64_t b, int64_t h, RecurrentDelta<A>& rule) {
      const int64_t head = b * n.H + h;
      rule.forward(n.L, n.tokens(x.const_data_ptr<A>(), b, h, n.gates), n.tokens(data_of<A>(z), b, h, n.d),
                   marks ? marks->const_data_ptr<uint8_t>() + b * n.L : nullptr, states + head * n.d * n.d,
                   feedback + head * n.d, n.tokens(outs, b, h, n.d), n.tokens(of_tokens, b, h, n.gates),
                   of_chunks ? of_chunks + head * n.chunks * n.d * n.d : nullptr);
    });
  });
  return {out, last, saved, kept};
}

// -> the gradients of x, z, memory and output, where z is only read without a kernel. last, out, saved, kept: of the forward pass.
std::tuple<Tensor, Tensor, Tensor, Tensor> recurrent_delta_backward(const Optional& weights, const Optional& /*z*/,
                                                                    const Tensor& output, const Optional& marks, const Tensor& last,
                                                                    const Tensor& out, const Tensor& saved,
                                                                    const Tensor& kept, const Tensor& d_out,
                                                                    const Tensor& d_last) {
  check(saved, weights, output, marks);
  const HeadSizes n(saved);
  check(saved, last, "last", {n.B, n.H, n.d, n.d});
  check(saved, d_last, "d_last", last.sizes());
  check(saved, out, "out", {n.B, n.L, n.H, n.d});
  check(saved, d_out, "d_out", out.sizes());
  check(saved, kept, "kept", {n.B * n.H * n.chunks, n.d, n.d});
  const Tensor d_x = at::empty_like(saved), d_z = at::empty_like(out), d_memory = d_last.clone(), d_output = at::empty_like(output);
  with_number(saved.element_size(), [&]<typename A>(A) {
    A *const d_tokens = d_x.mutable_data_ptr<A>(), *const d_added = d_z.mutable_data_ptr<A>();
    A *const d_states = d_memory.mutable_data_ptr<A>(), *const d_feedback = d_output.mutable_data_ptr<A>();
    n.for_heads<A>(weights, [&](int64_t b, int64_t h, RecurrentDelta<A>& rule) {
      const int64_t head = b * n.H + h, matrix = n.d * n.d;
      rule.backward(n.L, marks ? marks->const_data_ptr<uint8_t>() + b * n.L : nullptr,
                    last.const_data_ptr<A>() + head * matrix, output.const_data_ptr<A>() + head * n.d,
                    n.tokens(out.const_data_ptr<A>(), b, h, n.d), n.tokens(saved.const_data_ptr<A>(), b, h, n.gates),
                    kept.const_data_ptr<A>() + head * n.chunks * matrix, n.tokens(d_out.const_data_ptr<A>(), b, h, n.d),
                    n.tokens(d_tokens, b, h, n.gates), n.tokens(d_added, b, h, n.d), d_states + head * matrix,
                    d_feedback + head * n.d);
    });
  });
  return {d_x, d_z, d_memory, d_output};
}

}  // namespace
}  // namespace fwp::cpu

TORCH_LIBRARY_IMPL(fwp, CPU, m) {
  m.impl("recurrent_delta", &fwp::cpu::recurrent_delta);
  m.impl("recurrent_delta_backward", &fwp::cpu::recurrent_delta_backward);
}
