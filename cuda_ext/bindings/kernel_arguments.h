// Shared by the operators of all devices: converts arguments to kernel inputs, and kernel outputs to gradients.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <tuple>

#include "arguments.h"

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

// Inputs of the kernels. An absent gate that a kernel needs is one. On a CPU all inputs have the dtype of the
// computation, `type`, and kernels find the head of q and k that a head shares. Otherwise tensors keep their dtype, and
// shared heads are copied.
inline TokenTensors prepare_all(const Arguments& given, const Sizes& size, std::optional<at::ScalarType> type = {}) {
  const auto ready = [&](const Optional& x) { return x ? prepare(*x, type) : Tensor(); };
  TokenTensors in;
  const auto shared = [&](const Tensor& x) {
    return type || size.Hk == size.H ? x : x.repeat_interleave(size.H / size.Hk, 1);
  };
  in.q = prepare(shared(given.q), type), in.k = prepare(shared(given.k), type), in.v = ready(given.v);
  in.value_decay = ready(given.value_decay);
  in.rate = ready(given.rate);
  // The same number for all tokens.
  const auto ones = [&](at::IntArrayRef sizes) {
    return (sizes.size() == 3 ? at::ones({}, in.q.options()) : at::ones({sizes[3]}, in.q.options())).expand(sizes);
  };
  if (!in.rate.defined() && (given.erases || !type)) in.rate = ones(size.rates());
  in.removal_key = ready(given.removal_key), in.removal = ready(given.removal);
  const Rule rule = rule_of(given);
  if (rule == Rule::sum || rule == Rule::delta) return in;
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
// head that shares them. An operator cannot return an undefined tensor: a tensor of shape (0,) stands for the gradient of
// an absent argument.
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

}  // namespace fwp
