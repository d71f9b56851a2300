// The operator and its backward pass on tensors of any device: checks arguments, converts them to inputs of kernels,
// allocates results, and converts those to gradients.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <tuple>

#include "arguments.h"
#include "autograd.h"

namespace fwp {

// Return x with contiguous vectors, in dtype `type` if given. In most cases this is x itself.
inline Tensor prepare(const Tensor& x, std::optional<at::ScalarType> type = {}) {
  const Tensor same = type && x.scalar_type() != *type ? x.to(*type) : x;
  return same.dim() == 3 || same.stride(-1) == 1 || same.size(-1) == 1 ? same : same.contiguous();
}

using TokenTensors = TokenTensorsOf<Tensor>;

// An operator cannot return an undefined tensor: a tensor of shape (0,) stands for it.
inline Tensor or_nothing(const Tensor& x, const Tensor& like) { return x.defined() ? x : at::empty({0}, like.options()); }

inline Rule rule_of(const Arguments& given) {
  if (given.removes()) return Rule::removal;
  if (given.value_decay) return Rule::decay;
  if (given.decay && !given.decays_by_head()) return given.erases ? Rule::gated_delta_by_key : Rule::gated_by_key;
  if (given.decay || (given.rate && !given.erases)) return given.erases ? Rule::gated_delta : Rule::gated;
  return given.erases ? Rule::delta : Rule::sum;
}

// What the kernels of a device take.
struct KernelNeeds {
  bool same_dtype;    // all in the dtype of the state, but for vectors in bfloat16; otherwise any
  bool shares_heads;  // the head of q and k that several heads share; otherwise copies
  bool always_rate;   // a rate even where none is given and nothing is erased
  bool always_keeps;  // memory for what a backward pass needs, even if there is none
};

// Return x, of a call with this q, as kernels take it.
inline Tensor ready(const Tensor& x, const Tensor& q, const KernelNeeds& needs) {
  if (!needs.same_dtype || (x.dim() != 3 && q.scalar_type() == at::kBFloat16)) return prepare(x);
  return prepare(x, state_type(q));
}

// Inputs of the kernels. An absent gate that a kernel needs is one.
inline TokenTensors prepare_all(const Arguments& given, const Sizes& size, const KernelNeeds& needs) {
  const auto ready = [&](const Optional& x) { return x ? fwp::ready(*x, given.q, needs) : Tensor(); };
  TokenTensors in;
  const auto shared = [&](const Tensor& x) {
    return needs.shares_heads || size.Hk == size.H ? x : x.repeat_interleave(size.H / size.Hk, 1);
  };
  in.q = ready(shared(given.q)), in.k = ready(shared(given.k)), in.v = ready(given.v);
  in.value_decay = ready(given.value_decay);
  in.rate = ready(given.rate);
  // The same number for all tokens.
  const auto ones = [&](at::IntArrayRef sizes) {
    const auto options = in.q.options().dtype(needs.same_dtype ? state_type(in.q) : in.q.scalar_type());
    return (sizes.size() == 3 ? at::ones({}, options) : at::ones({sizes[3]}, options)).expand(sizes);
  };
  if (!in.rate.defined() && (given.erases || needs.always_rate)) in.rate = ones(size.rates());
  in.removal_key = ready(given.removal_key), in.removal = ready(given.removal);
  const Rule rule = rule_of(given);
  if (fades_of(rule) == Fades::kNothing) return in;
  if (rule == Rule::gated || rule == Rule::gated_delta)
    in.head_decay = given.decay ? ready(given.decay) : ones(size.rates());
  else if (given.decays_by_head())
    in.key_decay = ready(given.decay).unsqueeze(-1).expand(size.keys()).contiguous();
  else
    in.key_decay = given.decay ? ready(given.decay) : ones(size.keys());
  return in;
}

using NineTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The gradients of the operator's arguments, from those of the kernels' inputs, where q and k have a gradient for each
// head that shares them. That of an absent argument has shape (0,), as in or_nothing().
inline NineTensors gradients(const Arguments& given, const Sizes& size, const TokenTensors& to, const Tensor& d_initial) {
  const auto of = [&](const Optional& x, const Tensor& gradient) {
    return x ? gradient.to(x->scalar_type()) : at::empty({0}, given.q.options());
  };
  Tensor d_decay = to.head_decay.defined() ? to.head_decay : to.key_decay;
  if (given.decays_by_head() && !to.head_decay.defined()) d_decay = to.key_decay.sum(-1);
  const auto type = given.q.scalar_type();
  const auto of_shared = [&](const Tensor& x) {
    return (size.Hk == size.H ? x : x.unflatten(1, {size.Hk, size.H / size.Hk}).sum(2)).to(type);
  };
  return {of_shared(to.q), of_shared(to.k), to.v.to(type), of(given.decay, d_decay), of(given.value_decay, to.value_decay),
          of(given.rate, to.rate), of(given.removal_key, to.removal_key), of(given.removal, to.removal),
          of(given.state, d_initial)};
}

// Inputs and results of the kernels; undefined if a rule does not have them. Results, `retrieved`, `kept` and `segments`
// are contiguous, except an `out` with tokens first; `state`, `first` and `d_state` may have any strides.
struct OperatorCall {
  const Sizes size;
  const Rule rule;
  const at::ScalarType state_type;
  const TokenTensors in;
  const Tensor state, first;
  Tensor retrieved, kept, segments;

  template <typename Device>
  OperatorCall(Device, const Arguments& given, const Tensor& values)
      : size(checked(given, values, Device::kType)), rule(rule_of(given)), state_type(fwp::state_type(given.q)),
        in(prepare_all(given, size, Device::kNeeds)),
        state(given.state.value_or(Tensor())), first(given.first.value_or(Tensor())) {}

  Tensor empty(at::IntArrayRef sizes) const { return at::empty(sizes, in.q.options()); }
  Tensor empty_in_state_type(at::IntArrayRef sizes) const { return at::empty(sizes, in.q.options().dtype(state_type)); }
  std::array<int64_t, 5> kept_sizes() const { return {size.B, size.H, size.L / kKeptEvery, size.Dk, size.Dv}; }
  std::array<int64_t, 5> segments_sizes(int64_t number) const { return {size.B, size.H, number, size.Dk + size.Dv, size.Dk}; }

 private:
  static Sizes checked(const Arguments& given, const Tensor& values, at::DeviceType device) {
    TORCH_CHECK(given.q.device().type() == device, "q must be on ", device, ", where other arguments are, got ",
                given.q.device());
    const Sizes size(given.q, values);
    given.check_all(size);
    return size;
  }
};

struct ForwardPass : OperatorCall {
  using OperatorCall::OperatorCall;
  Tensor out, final;
};

struct BackwardPass : OperatorCall {
  using OperatorCall::OperatorCall;
  Tensor d_out, d_state;
  TokenTensors to;
  Tensor d_initial;
};

using FiveTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// `Device` has its type, what its kernels take, the number of segments that they may compute in parallel, and run() of
// both passes. kTokensFirst: whether out has the heads of a token next to each other. Without `keeps` there is no backward pass.
template <typename Device>
FiveTensors fast_weights(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& decay,
                         const Optional& value_decay, const Optional& rate, const Optional& removal_key,
                         const Optional& removal, const Optional& state, const Optional& first, bool erases, bool keeps) {
  const Arguments given{q, k, v, decay, value_decay, rate, removal_key, removal, state, first, erases};
  ForwardPass pass(Device{}, given, v);
  const Sizes& size = pass.size;
  pass.out = Device::kTokensFirst ? pass.empty({size.B, size.L, size.H, size.Dv}).transpose(1, 2) : pass.empty(size.values());
  pass.final = pass.empty_in_state_type(size.state());
  keeps |= Device::kNeeds.always_keeps;
  if (keeps && given.retrieves()) pass.retrieved = pass.empty_in_state_type(size.values());
  if (keeps && keeps_states(pass.rule)) pass.kept = pass.empty_in_state_type(pass.kept_sizes());
  pass.segments = pass.empty_in_state_type(pass.segments_sizes(Device::segments(pass)));
  Device::run(pass);
  return {pass.out.to(q.scalar_type()), pass.final, or_nothing(pass.retrieved, pass.final), or_nothing(pass.kept, pass.final),
          pass.segments};
}

template <typename Device>
NineTensors fast_weights_backward(const Tensor& q, const Tensor& k, const Optional& v, const Optional& decay,
                                  const Optional& value_decay, const Optional& rate, const Optional& removal_key,
                                  const Optional& removal, const Optional& state, const Optional& first,
                                  bool erases, const Tensor& retrieved, const Tensor& kept, const Tensor& segments,
                                  const Optional& grad_out, const Optional& grad_state) {
  const Arguments given{q, k, v, decay, value_decay, rate, removal_key, removal, state, first, erases};
  TORCH_CHECK(erases || v, "v must be given");
  BackwardPass pass(Device{}, given, v ? *v : retrieved);
  const Sizes& size = pass.size;
  if (given.retrieves()) check("retrieved", retrieved, size.values(), pass.state_type, q.device());
  if (keeps_states(pass.rule)) check("kept", kept, pass.kept_sizes(), pass.state_type, q.device());
  check("segments", segments, pass.segments_sizes(Device::segments(pass)), pass.state_type, q.device());
  check("grad_out", grad_out, size.values(), q.scalar_type(), q.device());
  check("grad_state", grad_state, size.state(), pass.state_type, q.device());
  if (given.retrieves()) pass.retrieved = retrieved.contiguous();
  if (keeps_states(pass.rule)) pass.kept = kept.contiguous();
  pass.segments = segments.contiguous();
  if (grad_out) pass.d_out = ready(*grad_out, q, Device::kNeeds);
  if (grad_state) pass.d_state = *grad_state;
  pass.to = pass.in.map([](const Tensor& x) { return x.defined() ? at::empty(x.sizes(), x.options()) : Tensor(); });
  const bool summed = Device::kNeeds.shares_heads && size.Hk != size.H;  // over the heads that share a key, then rounded
  for (Tensor* x : {&pass.to.q, &pass.to.k}) *x = summed ? pass.empty_in_state_type(size.keys()) : pass.empty(size.keys());
  pass.to.v = pass.empty(size.values());
  if (!rate && !erases) pass.to.rate = Tensor();  // nobody wants it
  if (state) pass.d_initial = pass.empty_in_state_type(size.state());
  Device::run(pass);
  return gradients(given, size, pass.to, pass.d_initial);
}

}  // namespace fwp

// Register the kernels of a device: `key` is its dispatch key.
#define FWP_OPERATOR(key, Device)                                                \
  TORCH_LIBRARY_IMPL(fwp, key, m) {                                              \
    m.impl("fast_weights", &fwp::fast_weights<Device>);                          \
    m.impl("fast_weights_backward", &fwp::fast_weights_backward<Device>);        \
  }
