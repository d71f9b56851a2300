// The recurrent delta rule on CPU tensors. Each head is one task of a thread.

#include "../../cpu/recurrent_delta.h"
#include "../recurrent_delta.h"
#include "tensors.h"

namespace fwp::cpu {
namespace {

struct Device {
  template <typename Real>
  static void run(const RecurrentDeltaForward<Real>& x, at::Device) {
    const int64_t d = x.d, kept = x.chunks() * d * d;
    const auto run_head = [&](int64_t head, const uint8_t* marks, auto tokens, RecurrentDelta<Real>& rule) {
      rule.forward(x.L, tokens(x.x, x.gates()), tokens(x.z, d), marks, x.memory + head * d * d, x.first_output + head * d,
                   tokens(x.out, d), tokens(x.saved, x.gates()), x.kept ? x.kept + head * kept : nullptr);
    };
    for_token_heads<RecurrentDelta<Real>>(x, d * d, x.weights, d * x.gates(), run_head);
  }
  template <typename Real>
  static void run(const RecurrentDeltaBackward<Real>& x, at::Device) {
    const int64_t d = x.d, kept = x.chunks() * d * d;
    const auto run_head = [&](int64_t head, const uint8_t* marks, auto tokens, RecurrentDelta<Real>& rule) {
      rule.backward(x.L, marks, x.memory + head * d * d, x.first_output + head * d, tokens(x.out, d), tokens(x.saved, x.gates()),
                    x.kept + head * kept, tokens(x.d_out, d), tokens(x.d_x, x.gates()), tokens(x.d_z, d),
                    x.d_memory + head * d * d, x.d_first_output + head * d);
    };
    for_token_heads<RecurrentDelta<Real>>(x, d * d, x.weights, d * x.gates(), run_head);
  }
};

}  // namespace
}  // namespace fwp::cpu

FWP_RECURRENT_DELTA(CPU, fwp::cpu::Device)
