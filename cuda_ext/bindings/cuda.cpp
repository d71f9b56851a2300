// Registers the CUDA kernels for the operators whose schema, fake and autograd fairseq_fwp/ops owns.

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <vector>

#include "binding_arguments.h"
#include "cuda/launchers.h"

namespace fwp {
namespace {

using OptionalTensor = std::optional<Tensor>;

cuda::Type kernel_type(const Tensor& q) {
  switch (q.scalar_type()) {
    case at::kFloat: return cuda::Type::float32;
    case at::kDouble: return cuda::Type::float64;
    case at::kBFloat16: return cuda::Type::bfloat16;
    case at::kHalf: return cuda::Type::float16;
    default: TORCH_CHECK(false, "q must be float32, float64, bfloat16 or float16, got ", q.scalar_type());
  }
}

void* data(const Tensor& x) { return x.mutable_data_ptr(); }

// One call of an operator: it checks tensors against q, shows them to a kernel in the way that the kernel wants, and
// launches it on q's device and that device's current stream.
class Invocation {
 public:
  const Sizes size;

  Invocation(const Tensor& q, const Tensor& values)
      : size(q, values), type_(kernel_type(q)), given_(q.options()), state_(given_.dtype(state_type(q))),
        guard_(q.device()) {
    TORCH_CHECK(q.is_cuda(), "q must be on the GPU, where other arguments are, got ", q.device());
  }

  // Arguments of q's dtype, in any layout.
  cuda::Tokens keys(const char* name, const Tensor& x) { return tokens(name, x, size.keys(), given_); }
  cuda::Tokens values(const char* name, const Tensor& x) { return tokens(name, x, size.values(), given_); }
  cuda::Tokens rates(const char* name, const Tensor& x) { return tokens(name, x, size.rates(), given_); }
  cuda::Tokens grad_out(const OptionalTensor& x) { return x ? values("grad_out", *x) : cuda::Tokens{}; }
  // Arguments of the state's dtype.
  cuda::Tokens error(const Tensor& x) { return tokens("error", x, size.values(), state_); }
  const void* state(const char* name, const OptionalTensor& x) { return x ? packed(name, *x, size.state()) : nullptr; }
  const void* kept(const Tensor& x) { return packed("kept", x, kept_sizes()); }

  // Memory for results.
  Tensor empty(at::IntArrayRef sizes) const { return at::empty(sizes, given_); }
  Tensor empty_in_state_type(at::IntArrayRef sizes) const { return at::empty(sizes, state_); }
  Tensor empty_state() const { return empty_in_state_type(size.state()); }
  Tensor empty_kept() const { return empty_in_state_type(kept_sizes()); }
  // An operator cannot return an undefined tensor: (0,), whose address is null, stands for the gradient of no state.
  Tensor empty_gradient(const OptionalTensor& x) const { return x ? empty_state() : empty_in_state_type({0}); }

  // `launch` gets a cuda::Call and returns null, or what failed.
  template <typename F>
  void run(cuda::Operator op, F launch) const {
    const cuda::Sizes sizes{size.B, size.H, size.L, size.Dk, size.Dv};
    const int64_t bytes = cuda::workspace_bytes(op, sizes, type_);
    // It may go before the kernels have run: its memory is given only to what this stream does after them.
    const Tensor workspace = at::empty({bytes}, given_.dtype(at::kByte));
    void* const stream = c10::cuda::getCurrentCUDAStream(given_.device().index()).stream();
    const char* const failure = launch(cuda::Call{sizes, type_, data(workspace), stream});
    TORCH_CHECK(failure == nullptr, failure);
  }

 private:
  std::array<int64_t, 5> kept_sizes() const { return {size.B, size.H, size.L / cuda::kChunk, size.Dk, size.Dv}; }

  cuda::Tokens tokens(const char* name, const Tensor& x, at::IntArrayRef sizes, const at::TensorOptions& options) {
    check(name, x, sizes, at::typeMetaToScalarType(options.dtype()), given_.device());
    const bool side_by_side = x.dim() == 3 || x.size(3) == 1 || x.stride(3) == 1;
    const Tensor& same = hold(side_by_side ? x : x.contiguous());
    return {same.const_data_ptr(), same.stride(0), same.stride(1), same.stride(2)};
  }

  const void* packed(const char* name, const Tensor& x, at::IntArrayRef sizes) {
    check(name, x, sizes, at::typeMetaToScalarType(state_.dtype()), given_.device());
    return hold(x.contiguous()).const_data_ptr();
  }

  const Tensor& hold(Tensor x) { return held_.emplace_back(std::move(x)); }

  const cuda::Type type_;
  const at::TensorOptions given_, state_;
  const c10::DeviceGuard guard_;
  std::vector<Tensor> held_;  // copies, until they are queued
};

std::tuple<Tensor, Tensor> sum_rule(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& state) {
  Invocation call(q, v);
  const auto q_ = call.keys("q", q), k_ = call.keys("k", k), v_ = call.values("v", v);
  const auto state_ = call.state("state", state);
  const Tensor out = call.empty(call.size.values()), final = call.empty_state();
  call.run(cuda::Operator::sum_forward, [&](const cuda::Call& c) {
    return cuda::sum_forward(c, q_, k_, v_, state_, data(out), data(final));
  });
  return {out, final};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sum_rule_backward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                             const OptionalTensor& state,
                                                             const OptionalTensor& grad_out,
                                                             const OptionalTensor& grad_state) {
  Invocation call(q, v);
  const auto q_ = call.keys("q", q), k_ = call.keys("k", k), v_ = call.values("v", v);
  const auto state_ = call.state("state", state), d_final = call.state("grad_state", grad_state);
  const auto d_out = call.grad_out(grad_out);
  const Tensor d_q = call.empty(call.size.keys()), d_k = call.empty(call.size.keys());
  const Tensor d_v = call.empty(call.size.values()), d_state = call.empty_gradient(state);
  call.run(cuda::Operator::sum_backward, [&](const cuda::Call& c) {
    return cuda::sum_backward(c, q_, k_, v_, state_, d_out, d_final, data(d_q), data(d_k), data(d_v), data(d_state));
  });
  return {d_q, d_k, d_v, d_state};
}

std::tuple<Tensor, Tensor, Tensor> delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                                              const OptionalTensor& state) {
  Invocation call(q, v);
  const auto q_ = call.keys("q", q), k_ = call.keys("k", k), v_ = call.values("v", v), beta_ = call.rates("beta", beta);
  const auto state_ = call.state("state", state);
  const Tensor out = call.empty(call.size.values()), final = call.empty_state();
  const Tensor error = call.empty_in_state_type(call.size.values());
  call.run(cuda::Operator::delta_forward, [&](const cuda::Call& c) {
    return cuda::delta_forward(c, q_, k_, v_, beta_, state_, data(out), data(final), data(error));
  });
  return {out, final, error};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> delta_rule_backward(const Tensor& q, const Tensor& k,
                                                                       const Tensor& beta, const OptionalTensor& state,
                                                                       const Tensor& error,
                                                                       const OptionalTensor& grad_out,
                                                                       const OptionalTensor& grad_state) {
  Invocation call(q, error);
  const auto q_ = call.keys("q", q), k_ = call.keys("k", k), beta_ = call.rates("beta", beta);
  const auto state_ = call.state("state", state), d_final = call.state("grad_state", grad_state);
  const auto error_ = call.error(error), d_out = call.grad_out(grad_out);
  const Tensor d_q = call.empty(call.size.keys()), d_k = call.empty(call.size.keys());
  const Tensor d_v = call.empty(call.size.values()), d_beta = call.empty(call.size.rates());
  const Tensor d_state = call.empty_gradient(state);
  call.run(cuda::Operator::delta_backward, [&](const cuda::Call& c) {
    return cuda::delta_backward(c, q_, k_, beta_, state_, error_, d_out, d_final, data(d_q), data(d_k), data(d_v),
                                data(d_beta), data(d_state));
  });
  return {d_q, d_k, d_v, d_beta, d_state};
}

std::tuple<Tensor, Tensor, Tensor> gated_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate,
                                              const OptionalTensor& state) {
  Invocation call(q, v);
  const auto q_ = call.keys("q", q), k_ = call.keys("k", k), v_ = call.values("v", v), gate_ = call.rates("gate", gate);
  const auto state_ = call.state("state", state);
  const Tensor out = call.empty(call.size.values()), final = call.empty_state(), kept = call.empty_kept();
  call.run(cuda::Operator::gated_forward, [&](const cuda::Call& c) {
    return cuda::gated_forward(c, q_, k_, v_, gate_, state_, data(out), data(final), data(kept));
  });
  return {out, final, kept};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_rule_backward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate, const OptionalTensor& state,
    const Tensor& kept, const OptionalTensor& grad_out, const OptionalTensor& grad_state) {
  Invocation call(q, v);
  const auto q_ = call.keys("q", q), k_ = call.keys("k", k), v_ = call.values("v", v), gate_ = call.rates("gate", gate);
  const auto state_ = call.state("state", state), d_final = call.state("grad_state", grad_state);
  const auto kept_ = call.kept(kept);
  const auto d_out = call.grad_out(grad_out);
  const Tensor d_q = call.empty(call.size.keys()), d_k = call.empty(call.size.keys());
  const Tensor d_v = call.empty(call.size.values()), d_gate = call.empty(call.size.rates());
  const Tensor d_state = call.empty_gradient(state);
  call.run(cuda::Operator::gated_backward, [&](const cuda::Call& c) {
    return cuda::gated_backward(c, q_, k_, v_, gate_, state_, kept_, d_out, d_final, data(d_q), data(d_k), data(d_v),
                                data(d_gate), data(d_state));
  });
  return {d_q, d_k, d_v, d_gate, d_state};
}

std::tuple<Tensor, Tensor, Tensor> decay_rule(const Tensor& q, const Tensor& k, const Tensor& v,
                                              const Tensor& key_decay, const Tensor& value_decay,
                                              const OptionalTensor& state) {
  Invocation call(q, v);
  const auto q_ = call.keys("q", q), k_ = call.keys("k", k), v_ = call.values("v", v);
  const auto f = call.keys("key_decay", key_decay), z = call.values("value_decay", value_decay);
  const auto state_ = call.state("state", state);
  const Tensor out = call.empty(call.size.values()), final = call.empty_state(), kept = call.empty_kept();
  call.run(cuda::Operator::decay_forward, [&](const cuda::Call& c) {
    return cuda::decay_forward(c, q_, k_, v_, f, z, state_, data(out), data(final), data(kept));
  });
  return {out, final, kept};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> decay_rule_backward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_decay, const Tensor& value_decay,
    const OptionalTensor& state, const Tensor& kept, const OptionalTensor& grad_out,
    const OptionalTensor& grad_state) {
  Invocation call(q, v);
  const auto q_ = call.keys("q", q), k_ = call.keys("k", k), v_ = call.values("v", v);
  const auto f = call.keys("key_decay", key_decay), z = call.values("value_decay", value_decay);
  const auto state_ = call.state("state", state), d_final = call.state("grad_state", grad_state);
  const auto kept_ = call.kept(kept);
  const auto d_out = call.grad_out(grad_out);
  const Tensor d_q = call.empty(call.size.keys()), d_k = call.empty(call.size.keys());
  const Tensor d_v = call.empty(call.size.values()), d_state = call.empty_gradient(state);
  const Tensor d_f = call.empty(call.size.keys()), d_z = call.empty(call.size.values());
  call.run(cuda::Operator::decay_backward, [&](const cuda::Call& c) {
    return cuda::decay_backward(c, q_, k_, v_, f, z, state_, kept_, d_out, d_final, data(d_q), data(d_k), data(d_v),
                                data(d_f), data(d_z), data(d_state));
  });
  return {d_q, d_k, d_v, d_f, d_z, d_state};
}

}  // namespace
}  // namespace fwp

TORCH_LIBRARY_IMPL(fwp, CUDA, m) {
  m.impl("sum_rule", &fwp::sum_rule);
  m.impl("sum_rule_backward", &fwp::sum_rule_backward);
  m.impl("delta_rule", &fwp::delta_rule);
  m.impl("delta_rule_backward", &fwp::delta_rule_backward);
  m.impl("gated_rule", &fwp::gated_rule);
  m.impl("gated_rule_backward", &fwp::gated_rule_backward);
  m.impl("decay_rule", &fwp::decay_rule);
  m.impl("decay_rule_backward", &fwp::decay_rule_backward);
}
