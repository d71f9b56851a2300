// Rules that forget but erase nothing, and their gradients, on CPU tensors.

#include "forget.h"

namespace fwp::cpu {
namespace {

template <Fades fades>
void backward(const Backward& pass) {
  if (in_chunks(pass.size))
    chunk_backward<fades, Erases::kNothing>(pass);
  else
    forget_scan_backward<fades, Erases::kNothing>(pass);
}

}  // namespace

void forget_forward(const Forward& pass) {
  if (pass.in.head_decay.defined())
    forget_forward<Fades::kHead, Erases::kNothing>(pass);
  else if (pass.in.value_decay.defined())
    forget_forward<Fades::kKeyAndValue, Erases::kNothing>(pass);
  else
    forget_forward<Fades::kKey, Erases::kNothing>(pass);
}

void forget_backward(const Backward& pass) {
  if (pass.in.head_decay.defined())
    backward<Fades::kHead>(pass);
  else if (pass.in.value_decay.defined())
    backward<Fades::kKeyAndValue>(pass);
  else
    backward<Fades::kKey>(pass);
}

}  // namespace fwp::cpu
