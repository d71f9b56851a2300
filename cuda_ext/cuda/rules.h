// The passes of a rule. Their kernels take a minute to compile, so each rule has a file, rules/*.cu.
#pragma once

#include "launchers.h"

namespace fwp::cuda {

template <Rule rule>
struct Passes {
  static size_t workspace(const Call& call, bool is_backward);
  static const char* forward(const Call& call, const Inputs& in, const Outputs& to);
  static const char* backward(const Call& call, const Inputs& in, const BackwardInputs& more, const Gradients& to);
};

}  // namespace fwp::cuda
