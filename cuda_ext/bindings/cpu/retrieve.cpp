// Rules that forget and retrieve before they write, and their gradients, on CPU tensors.

#include "forget_passes.h"

namespace fwp::cpu {

template void forward<Rule::gated_delta>(const Forward&);
template void backward<Rule::gated_delta>(const Backward&);
template void forward<Rule::gated_delta_by_key>(const Forward&);
template void backward<Rule::gated_delta_by_key>(const Backward&);
template void forward<Rule::removal>(const Forward&);
template void backward<Rule::removal>(const Backward&);

}  // namespace fwp::cpu
