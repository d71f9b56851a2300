// The recurrent delta rule on tensors of any device, all contiguous and of one dtype, float32 or float64: checks arguments and
// allocates results. Logits x (B, L, H, 3 d + 1); R (H, d, 3 d + 1); outputs (B, L, H, d); memories (B, H, d, d); marks (B, L) of
// uint8.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>

#include "arguments.h"

namespace fwp {

// Device::run(pass, device) is the kernel, of both passes.
template <typename Device>
struct RecurrentDeltaOperator {
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

  static Results forward(const Tensor& x, const Optional& weights, const Optional& z, const Tensor& memory,
                         const Tensor& output, const Optional& marks, bool keeps) {
    const RecurrentSizes n = sizes_of(x, weights, output, marks);
    if (z) check("z", *z, {n.B, n.L, n.H, n.d}, x);
    check("memory", memory, {n.B, n.H, n.d, n.d}, x);
    const Tensor out = at::empty({n.B, n.L, n.H, n.d}, x.options()), last = memory.clone();
    const Tensor saved = at::empty(keeps ? x.sizes() : at::IntArrayRef{0}, x.options());
    const Tensor kept = at::empty({n.B, n.H, keeps ? n.chunks() : 0, n.d, n.d}, x.options());
    with_number(x, [&]<typename Real>(Real) {
      Device::run(RecurrentDeltaForward<Real>{n, data<Real>(weights), data<Real>(output), data<Real>(x), data<Real>(z),
                                              to<Real>(last), to<Real>(out), keeps ? to<Real>(saved) : nullptr,
                                              keeps ? to<Real>(kept) : nullptr},
                  x.device());
    });
    return {out, last, saved, kept};
  }

  // -> the gradients of x, z, memory and output, where z is only read without a kernel. last, out, saved, kept: of the forward
  // pass.
  static Results backward(const Optional& weights, const Optional& /*z*/, const Tensor& output, const Optional& marks,
                          const Tensor& last, const Tensor& out, const Tensor& saved, const Tensor& kept, const Tensor& d_out,
                          const Tensor& d_last) {
    const RecurrentSizes n = sizes_of(saved, weights, output, marks);
    check("last", last, {n.B, n.H, n.d, n.d}, saved);
    check("d_last", d_last, last.sizes(), saved);
    check("out", out, {n.B, n.L, n.H, n.d}, saved);
    check("d_out", d_out, out.sizes(), saved);
    check("kept", kept, {n.B, n.H, n.chunks(), n.d, n.d}, saved);
    const Tensor d_x = at::empty_like(saved), d_z = at::empty_like(out), d_memory = d_last.clone();
    const Tensor d_output = at::empty_like(output);
    with_number(saved, [&]<typename Real>(Real) {
      Device::run(RecurrentDeltaBackward<Real>{n, data<Real>(weights), data<Real>(output), data<Real>(last), data<Real>(out),
                                               data<Real>(saved), data<Real>(kept), data<Real>(d_out), to<Real>(d_x),
                                               to<Real>(d_z), to<Real>(d_memory), to<Real>(d_output)},
                  saved.device());
    });
    return {d_x, d_z, d_memory, d_output};
  }

 private:
  template <typename Real>
  static const Real* data(const Optional& x) { return x ? x->template const_data_ptr<Real>() : nullptr; }
  template <typename Real>
  static Real* to(const Tensor& x) { return x.mutable_data_ptr<Real>(); }
  template <typename F>
  static void with_number(const Tensor& x, F f) { x.scalar_type() == at::kDouble ? f(double()) : f(float()); }

  static RecurrentSizes sizes_of(const Tensor& x, const Optional& weights, const Tensor& output, const Optional& marks) {
    TORCH_CHECK(x.dim() == 4 && x.size(3) % 3 == 1 && x.size(3) > 1 &&
                    (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble),
                "x must have shape (B, L, H, 3 d + 1), in float32 or float64, got ", x.scalar_type(), " of shape ", x.sizes());
    check("x", x, x.sizes(), x);
    const RecurrentSizes n{x.size(0), x.size(1), x.size(2), (x.size(3) - 1) / 3, check_marks(marks, x)};
    if (weights) check("weights", *weights, {n.H, n.d, n.gates()}, x);
    check("output", output, {n.B, n.H, n.d}, x);
    return n;
  }
};

}  // namespace fwp

#define FWP_RECURRENT_DELTA(KEY, DEVICE)                                                  \
  TORCH_LIBRARY_IMPL(fwp, KEY, m) {                                                       \
    m.impl("recurrent_delta", &fwp::RecurrentDeltaOperator<DEVICE>::forward);             \
    m.impl("recurrent_delta_backward", &fwp::RecurrentDeltaOperator<DEVICE>::backward);   \
  }
