// Autograd of the operator, for the device whose kernels are built; FWP_AUTOGRAD_KEY is its dispatch key.
// fairseq_fwp/ops registers the same in Python for all devices, but that takes as long as the kernels on small inputs.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fwp {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

struct Operators {
  c10::OperatorHandle forward = find("fwp::fast_weights"), backward = find("fwp::fast_weights_backward");
  // Positions among the forward operator's arguments. A rule that erases does not save v. The tensors with a gradient end at
  // `first`, all tensors at `erases`.
  size_t v = position("v"), first = position("first"), erases = position("erases"), end = forward.schema().arguments().size();

  static const Operators& get() {
    static const Operators found;
    return found;
  }

 private:
  static c10::OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }
  size_t position(const char* name) const { return forward.schema().argumentIndexWithName(name).value(); }
};

c10::IValue optional(const Tensor& x) { return x.defined() ? c10::IValue(x) : c10::IValue(); }

variable_list call(const c10::OperatorHandle& op, Stack stack) {
  op.callBoxed(&stack);
  variable_list results;
  for (auto& result : stack) results.push_back(std::move(result).toTensor());
  return results;
}

// Autograd takes no undefined tensors, so it gets a list of those that are given. `all` also has an undefined tensor
// for each absent one. Gradients of unused results are undefined, not zeros. The results after the second have no
// derivative and bypass autograd.
struct Differentiable : torch::autograd::Function<Differentiable> {
  static variable_list forward(AutogradContext* ctx, at::TensorList, const variable_list* all, bool erases,
                               variable_list* others) {
    at::AutoDispatchBelowADInplaceOrView below;
    Stack inputs;
    for (const Tensor& x : *all) inputs.push_back(optional(x));
    inputs.emplace_back(erases), inputs.emplace_back(true);
    variable_list results = call(Operators::get().forward, std::move(inputs)), saved = *all;
    others->assign(results.begin() + 2, results.end());
    results.resize(2);
    if (erases) saved[Operators::get().v] = Tensor();
    saved.insert(saved.end(), others->begin(), others->end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["erases"] = erases;
    ctx->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Operators& of = Operators::get();
    const variable_list saved = ctx->get_saved_variables();
    Stack inputs;
    for (const Tensor& x : saved) inputs.push_back(optional(x));
    inputs.insert(inputs.begin() + of.erases, ctx->saved_data["erases"]);
    for (const Tensor& x : grads) inputs.push_back(optional(x));
    // In grad mode (double backward), the backward operator itself raises the error that it has no derivative.
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!at::GradMode::is_enabled()) below.emplace();
    variable_list results = call(of.backward, std::move(inputs));
    variable_list gradients;  // of the tensors given, except `first`; undefined for the other arguments of forward()
    for (size_t i = 0; i < of.first; ++i)
      if (saved[i].defined() || i == of.v) gradients.push_back(results[i]);
    gradients.resize(gradients.size() + saved[of.first].defined() + 3);
    return gradients;
  }
};

void differentiable(const c10::OperatorHandle& op, Stack* stack) {
  const Operators& of = Operators::get();
  const auto given = torch::jit::last(*stack, of.end);
  bool any = false;
  for (const auto& input : given.slice(0, of.erases)) {
    if (input.isNone()) continue;
    const Tensor& x = input.toTensor();
    any |= x.requires_grad();
    TORCH_CHECK_NOT_IMPLEMENTED(!x._fw_grad(0).defined(),
                                "fwp::fast_weights has no derivative in forward mode: use backend='reference'");
  }
  if (!any || !at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
    return;
  }
  variable_list all, present;
  for (const auto& input : given.slice(0, of.erases)) {
    all.push_back(input.isNone() ? Tensor() : input.toTensor());
    if (all.back().defined()) present.push_back(all.back());
  }
  variable_list others;
  variable_list results = Differentiable::apply(at::TensorList(present), &all, given[of.erases].toBool(), &others);
  torch::jit::drop(*stack, of.end);
  for (auto& result : results) stack->emplace_back(std::move(result));
  for (auto& result : others) stack->emplace_back(std::move(result));
}

}  // namespace
}  // namespace fwp

TORCH_LIBRARY_IMPL(fwp, FWP_AUTOGRAD_KEY, m) {
  m.impl("fast_weights", torch::CppFunction::makeFromBoxedFunction<&fwp::differentiable>());
}
