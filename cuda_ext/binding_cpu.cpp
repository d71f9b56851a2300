// Registers the CPU kernels for the operators whose schema, fake and autograd fairseq_fwp/ops owns.

#include <torch/library.h>

#include "binding_decay.h"
#include "binding_delta.h"
#include "binding_sum.h"

TORCH_LIBRARY_IMPL(fwp, CPU, m) {
  m.impl("sum_rule", &fwp::cpu::sum_rule);
  m.impl("sum_rule_backward", &fwp::cpu::sum_rule_backward);
  m.impl("delta_rule", &fwp::cpu::delta_rule);
  m.impl("delta_rule_backward", &fwp::cpu::delta_rule_backward);
  m.impl("gated_rule", &fwp::cpu::gated_rule);
  m.impl("gated_rule_backward", &fwp::cpu::gated_rule_backward);
  m.impl("decay_rule", &fwp::cpu::decay_rule);
  m.impl("decay_rule_backward", &fwp::cpu::decay_rule_backward);
}
