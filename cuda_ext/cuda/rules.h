// The passes of a rule. Their kernels take a minute to compile, so each rule has a file, rules/*.cu; launch.cuh has
// the bodies.
#pragma once

#include "launchers.h"

namespace fwp::cuda {

// The rule with decays by key that has this one as a case.
constexpr Rule with_decays_by_key(Rule rule) {
  switch (rule) {
    case Rule::sum: case Rule::gated: return Rule::gated_by_key;
    case Rule::delta: case Rule::gated_delta: return Rule::gated_delta_by_key;
    default: return rule;
  }
}

template <Rule rule>
struct Passes {
  static size_t workspace(const Call& call, bool is_backward);
  static const char* forward(const Call& call, const Inputs& in, const Outputs& to);
  static const char* backward(const Call& call, const Inputs& in, const BackwardInputs& more, const Gradients& to);

 private:
  static constexpr Fades kFades = fades_of(rule);
  static constexpr Erases kErases = erases_of(rule);
  static constexpr bool kDecays = kFades != Fades::kNothing, kByHead = kFades == Fades::kHead, kByKey = kDecays && !kByHead;
  static constexpr bool kErasesKey = kErases == Erases::kKey;
  static constexpr Rule kRuleByKey = with_decays_by_key(rule);

  // How a pass is computed: token by token, or in chunks, with kernels of decays by key or with simpler ones. With decays both
  // passes are in the same way. Without, the forward pass leaves nothing that depends on it.
  enum class Way { scan, chunks, chunks_by_key };
  static Way way(const Call& call, const Gpu& gpu, bool is_backward);

  // The inputs that both scans have.
  template <typename Scan>
  static void set_inputs(Scan& scan, const Call& call, const Inputs& in);
};

}  // namespace fwp::cuda
