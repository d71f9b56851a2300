// The functions of launchers.h on the twin, for ctypes and for a program that AddressSanitizer watches.

#include "launchers.cuh"

using fwp::cuda::Call;
using fwp::cuda::Operator;
using fwp::cuda::Sizes;
using fwp::cuda::Tokens;
using fwp::cuda::Type;

extern "C" size_t twin_workspace_bytes(int op, const Sizes* size, int type) {
  return fwp::cuda::workspace_bytes(Operator(op), *size, Type(type));
}

// `in` holds the Tokens and `a` the arrays of an operator, in the order of its arguments.
extern "C" const char* twin_run(int op, const Sizes* size, int type, void* workspace, const Tokens* in, void* const* a,
                                int reversed, int multiprocessors) {
  using namespace fwp::cuda;
  twin::machine().reversed = reversed;
  twin::machine().multiprocessors = multiprocessors;
  twin::machine().error[0] = 0;
  const Call call{*size, Type(type), workspace, nullptr};
  switch (Operator(op)) {
    case Operator::sum_forward:
      return sum_forward(call, in[0], in[1], in[2], a[0], a[1], a[2]);
    case Operator::sum_backward:
      return sum_backward(call, in[0], in[1], in[2], a[0], in[3], a[1], a[2], a[3], a[4], a[5]);
    case Operator::delta_forward:
      return delta_forward(call, in[0], in[1], in[2], in[3], a[0], a[1], a[2], a[3]);
    case Operator::delta_backward:
      return delta_backward(call, in[0], in[1], in[2], a[0], in[3], in[4], a[1], a[2], a[3], a[4], a[5], a[6]);
    case Operator::gated_forward:
      return gated_forward(call, in[0], in[1], in[2], in[3], a[0], a[1], a[2], a[3]);
    case Operator::gated_backward:
      return gated_backward(call, in[0], in[1], in[2], in[3], a[0], a[1], in[4], a[2], a[3], a[4], a[5], a[6], a[7]);
    case Operator::decay_forward:
      return decay_forward(call, in[0], in[1], in[2], in[3], in[4], a[0], a[1], a[2], a[3]);
    case Operator::decay_backward:
      return decay_backward(call, in[0], in[1], in[2], in[3], in[4], a[0], a[1], in[5], a[2], a[3], a[4], a[5], a[6],
                            a[7], a[8]);
  }
  return "no such operator";
}
