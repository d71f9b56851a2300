// Autograd of the operators, for the device whose kernels are built: FWP_AUTOGRAD_KEY is its dispatch key.
// fairseq_fwp/ops registers the same in Python for all devices; on small inputs that takes as long as the kernels do.
// Compiled by itself, because its headers take a quarter of a minute.

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

// A rule's operator and the one that returns the gradients of its inputs, in their order. What the latter reads is told
// by the names of its arguments: inputs of the rule, the gradients of its first two results, or its third result.
struct Rule {
  enum Source { kInput, kThirdResult, kGradOut, kGradState };

  c10::OperatorHandle forward, backward;
  std::vector<std::pair<Source, int>> reads;  // with the number of an input

  explicit Rule(const std::string& name)
      : forward(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "")),
        backward(c10::Dispatcher::singleton().findSchemaOrThrow((name + "_backward").c_str(), "")) {
    for (const auto& argument : backward.schema().arguments()) {
      const auto input = forward.schema().argumentIndexWithName(argument.name());
      if (input)
        reads.emplace_back(kInput, *input);
      else if (argument.name() == "grad_out")
        reads.emplace_back(kGradOut, 0);
      else
        reads.emplace_back(argument.name() == "grad_state" ? kGradState : kThirdResult, 0);
    }
  }
};

variable_list call(const c10::OperatorHandle& op, Stack stack) {
  op.callBoxed(&stack);
  variable_list results;
  for (auto& result : stack) results.push_back(std::move(result).toTensor());
  return results;
}

// The last input of a rule is its state, which may be missing, as may the gradient of either result. The third result
// has no derivative, so it is handed past autograd.
template <const char* name>
struct Differentiable : torch::autograd::Function<Differentiable<name>> {
  static const Rule& rule() {
    static const Rule found(name);
    return found;
  }

  static variable_list forward(AutogradContext* ctx, at::TensorList tokens, const std::optional<Tensor>& state,
                               Tensor* third_result) {
    at::AutoDispatchBelowADInplaceOrView below;
    Stack inputs(tokens.begin(), tokens.end());
    inputs.emplace_back(state);
    variable_list results = call(rule().forward, std::move(inputs));
    if (results.size() > 2) *third_result = results[2];
    results.resize(2);
    variable_list saved;
    for (const auto& [source, input] : rule().reads) {
      if (source == Rule::kThirdResult) saved.push_back(*third_result);
      if (source == Rule::kInput)
        saved.push_back(static_cast<size_t>(input) < tokens.size() ? tokens[input] : state.value_or(Tensor()));
    }
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(false);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto next = saved.begin();
    Stack inputs;
    for (const auto& [source, _] : rule().reads) {
      const bool is_grad = source == Rule::kGradOut || source == Rule::kGradState;
      const Tensor& x = is_grad ? grads.at(source == Rule::kGradState) : *next++;
      inputs.push_back(x.defined() ? c10::IValue(x) : c10::IValue());
    }
    // Where gradients are to be differentiated in turn, the operator itself says that they cannot be.
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    if (!at::GradMode::is_enabled()) below.emplace();
    variable_list results = call(rule().backward, std::move(inputs));
    // An operator cannot return None: (0,) stands for the gradient of no state.
    if (results.back().dim() == 1) results.back() = Tensor();
    results.emplace_back();  // of `third_result`
    return results;
  }
};

template <const char* name>
void differentiable(const c10::OperatorHandle& op, Stack* stack) {
  const size_t inputs = op.schema().arguments().size();
  const auto given = torch::jit::last(*stack, inputs);
  const auto state = given.back().toOptional<Tensor>();
  variable_list tokens;
  for (const auto& input : given.slice(0, inputs - 1)) tokens.push_back(input.toTensor());
  for (const auto& input : given)
    TORCH_CHECK_NOT_IMPLEMENTED(input.isNone() || !input.toTensor()._fw_grad(0).defined(), name,
                                " has no derivative in forward mode: use backend='reference'");
  if (at::GradMode::is_enabled() &&
      (torch::autograd::any_variable_requires_grad(tokens) || (state && state->requires_grad()))) {
    Tensor third_result;
    variable_list results = Differentiable<name>::apply(at::TensorList(tokens), state, &third_result);
    if (third_result.defined()) results.push_back(third_result);
    torch::jit::drop(*stack, inputs);
    for (auto& result : results) stack->emplace_back(std::move(result));
  } else {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
}

template <const char* name>
void make_differentiable(torch::Library& m) {
  m.impl(name, torch::CppFunction::makeFromBoxedFunction<&differentiable<name>>());
}

constexpr char kSumRule[] = "fwp::sum_rule", kDeltaRule[] = "fwp::delta_rule", kGatedRule[] = "fwp::gated_rule",
               kDecayRule[] = "fwp::decay_rule";

}  // namespace
}  // namespace fwp

TORCH_LIBRARY_IMPL(fwp, FWP_AUTOGRAD_KEY, m) {
  fwp::make_differentiable<fwp::kSumRule>(m);
  fwp::make_differentiable<fwp::kDeltaRule>(m);
  fwp::make_differentiable<fwp::kGatedRule>(m);
  fwp::make_differentiable<fwp::kDecayRule>(m);
}
