// Rules that forget but erase nothing, and their gradients, on CPU tensors.

#include "forget_passes.h"

namespace fwp::cpu {

template void forward<Rule::gated>(const Forward&);
template void backward<Rule::gated>(const Backward&);
template void forward<Rule::gated_by_key>(const Forward&);
template void backward<Rule::gated_by_key>(const Backward&);
template void forward<Rule::decay>(const Forward&);
template void backward<Rule::decay>(const Backward&);

}  // namespace fwp::cpu
