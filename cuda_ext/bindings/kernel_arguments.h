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

// Rules, grouped by the kernels that they need.
enum class Rule { kSum, kDelta, kForget, kRetrieve };

inline Rule rule_of(const Arguments& given) {
  if (given.removes() || (given.erases && given.forgets())) return Rule::kRetrieve;
  if (given.erases) return Rule::kDelta;
  return given.forgets() || given.rate ? Rule::kForget : Rule::kSum;
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
  const Rule rule = rule_of(given);
  const bool fades = rule == Rule::kForget || rule == Rule::kRetrieve;
  if (!in.rate.defined() && (given.erases || !type)) in.rate = ones(size.rates());
  if (!fades) return in;
  in.removal_key = ready(given.removal_key), in.removal = ready(given.removal);
  const bool by_head = !given.removes() && !given.value_decay && (given.decays_by_head() || !given.decay);
  if (by_head)
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
