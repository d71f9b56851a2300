// Prints where the launches of the scans put their arguments. nvcc and a C++ compiler must agree.
#include <cstdio>

#include "recurrent.cuh"

using namespace fwp;
using namespace fwp::cuda;

template <Fades fades, Erases erases>
void print() {
  using Forward = RecurrentForward<float, fades, erases>;
  using Backward = RecurrentBackward<float, fades, erases>;
  const int places[] = {
      Forward::kKey,         Forward::kQuery,        Forward::kKeyDecay,  Forward::kRemovalKey,  Forward::kRemoval,
      Forward::kValue,       Forward::kValueDecay,   Forward::kRate,      Forward::kHeadDecay,   Forward::kOut,
      Forward::kRetrieved,   Backward::kKey,         Backward::kQuery,    Backward::kKeyDecay,   Backward::kRemovalKey,
      Backward::kRemoval,    Backward::kDOut,        Backward::kError,    Backward::kValueDecay, Backward::kFound,
      Backward::kRate,       Backward::kHeadDecay,   Backward::kDV,       Backward::kDWrite,     Backward::kDValueDecay,
      Backward::kDQ,         Backward::kDK,          Backward::kDDecay,   Backward::kDRemovalKey, Backward::kDRemoval,
      sizeof(Forward),       sizeof(Backward),
  };
  for (const int place : places) std::printf("%d ", place);
  std::printf("\n");
}

int main() {
  print<Fades::kNothing, Erases::kNothing>();
  print<Fades::kNothing, Erases::kKey>();
  print<Fades::kHead, Erases::kNothing>();
  print<Fades::kHead, Erases::kKey>();
  print<Fades::kKey, Erases::kNothing>();
  print<Fades::kKey, Erases::kKey>();
  print<Fades::kKey, Erases::kRemoval>();
  print<Fades::kKeyAndValue, Erases::kNothing>();
}
