// The operator on CUDA tensors: converts its arguments to those of the launchers.

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "../cuda/launchers.h"
#include "autograd.h"
#include "kernel_arguments.h"

namespace fwp::cuda {
namespace {

Type type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return Type::float32;
    case at::kDouble: return Type::float64;
    case at::kBFloat16: return Type::bfloat16;
    default: return Type::float16;
  }
}

Tokens tokens(const Tensor& x) {
  if (!x.defined()) return {};
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2), type_of(x.scalar_type())};
}

Target target(const Tensor& x) {
  if (!x.defined()) return {};
  return {x.mutable_data_ptr(), type_of(x.scalar_type())};
}

Tensor contiguous(const Optional& x) { return x ? x->contiguous() : Tensor(); }
const void* data(const Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }
void* memory(const Tensor& x) { return x.defined() ? x.mutable_data_ptr() : nullptr; }

// Shared by both passes: the checked arguments in kernel form, on q's device and its current stream.
struct Pass {
  const fwp::Sizes size;
  const at::ScalarType state_type;
  const c10::DeviceGuard guard;
  const TokenTensors in;
  const Tensor state, first;
  const Rule rule;

  Pass(const Arguments& given, const Tensor& values)
      : size(given.q, values), state_type(fwp::state_type(given.q)), guard(given.q.device()),
        in((check_all(given, values), prepare_all(given, size))), state(contiguous(given.state)),
        first(contiguous(given.first)), rule(rule_of(given)) {}

  Tensor empty(at::IntArrayRef sizes) const { return at::empty(sizes, in.q.options()); }
  Tensor empty_in_state_type(at::IntArrayRef sizes) const { return at::empty(sizes, in.q.options().dtype(state_type)); }
  std::array<int64_t, 5> kept_sizes() const { return {size.B, size.H, size.L / kChunk, size.Dk, size.Dv}; }

  Inputs inputs() const { return {in.map(tokens), data(state)}; }

  // `launch` gets a Call and returns null or an error message.
  template <typename F>
  void run(bool is_backward, F launch) const {
    const Type type = type_of(in.q.scalar_type());
    void* const stream = c10::cuda::getCurrentCUDAStream(in.q.device().index()).stream();
    const bool* const starts = first.defined() ? first.const_data_ptr<bool>() : nullptr;
    Call call{size, type, rule, starts, nullptr, stream};
    // The workspace may be freed before the kernels have run: only later work of this stream gets its memory.
    const Tensor workspace = at::empty({int64_t(workspace_bytes(call, is_backward))}, in.q.options().dtype(at::kByte));
    call.workspace = memory(workspace);
    const char* const failure = launch(call);
    TORCH_CHECK(failure == nullptr, failure);
  }

 private:
  static void check_all(const Arguments& given, const Tensor& values) {
    TORCH_CHECK(given.q.is_cuda(), "q must be on the GPU, where other arguments are, got ", given.q.device());
    given.check_all(fwp::Sizes(given.q, values), given.q.scalar_type(), given.q.device());
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> fast_weights(const Tensor& q, const Tensor& k, const Tensor& v,
                                                        const Optional& decay, const Optional& value_decay,
                                                        const Optional& rate, const Optional& removal_key,
                                                        const Optional& removal, const Optional& state,
                                                        const Optional& first, bool erases) {
  const Arguments given{q, k, v, decay, value_decay, rate, removal_key, removal, state, first, erases};
  const Pass pass(given, v);
  const Tensor out = pass.empty(pass.size.values()), after = pass.empty_in_state_type(pass.size.state());
  Tensor retrieved, kept;
  if (given.retrieves()) retrieved = pass.empty_in_state_type(pass.size.values());
  if (given.keeps_states()) kept = pass.empty_in_state_type(pass.kept_sizes());
  pass.run(false, [&](const Call& call) {
    return forward(call, pass.inputs(), {target(out), memory(after), memory(retrieved), memory(kept)});
  });
  return {out, after, or_nothing(retrieved, after), or_nothing(kept, after)};
}

NineTensors fast_weights_backward(const Tensor& q, const Tensor& k, const Optional& v, const Optional& decay,
                                  const Optional& value_decay, const Optional& rate, const Optional& removal_key,
                                  const Optional& removal, const Optional& state, const Optional& first,
                                  bool erases, const Tensor& retrieved, const Tensor& kept, const Optional& grad_out,
                                  const Optional& grad_state) {
  const Arguments given{q, k, v, decay, value_decay, rate, removal_key, removal, state, first, erases};
  TORCH_CHECK(erases || v, "v must be given");
  const Pass pass(given, v ? *v : retrieved);
  const auto device = q.device();
  if (given.retrieves()) check("retrieved", retrieved, pass.size.values(), pass.state_type, device);
  if (given.keeps_states()) check("kept", kept, pass.kept_sizes(), pass.state_type, device);
  check("grad_out", grad_out, pass.size.values(), q.scalar_type(), device);
  check("grad_state", grad_state, pass.size.state(), pass.state_type, device);
  const Tensor found = given.retrieves() ? retrieved.contiguous() : Tensor(), d_out = grad_out ? prepare(*grad_out) : Tensor();
  const Tensor states = given.keeps_states() ? kept.contiguous() : Tensor(), d_state = contiguous(grad_state);
  const TokenTensors& in = pass.in;
  const auto like = [](const Tensor& x) { return x.defined() ? at::empty(x.sizes(), x.options()) : Tensor(); };
  TokenTensors to;
  to.q = like(in.q), to.k = like(in.k), to.v = pass.empty(pass.size.values());
  to.key_decay = like(in.key_decay), to.value_decay = like(in.value_decay), to.head_decay = like(in.head_decay);
  if (rate) to.rate = like(in.rate);
  if (in.removal.defined()) to.removal = like(in.removal), to.removal_key = like(in.removal_key);
  const Tensor d_initial = state ? pass.empty_in_state_type(pass.size.state()) : Tensor();
  pass.run(true, [&](const Call& call) {
    const Gradients gradients{to.map(target), memory(d_initial)};
    return backward(call, pass.inputs(), {tokens(found), tokens(d_out), data(states), data(d_state)}, gradients);
  });
  return gradients(given, pass.size, to, d_initial);
}

}  // namespace
}  // namespace fwp::cuda

TORCH_LIBRARY_IMPL(fwp, CUDA, m) {
  m.impl("fast_weights", &fwp::cuda::fast_weights);
  m.impl("fast_weights_backward", &fwp::cuda::fast_weights_backward);
}
