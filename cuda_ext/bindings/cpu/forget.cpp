// Rules that forget but erase nothing, and their gradients, on CPU tensors.

#include "../../cpu/forget_short.h"
#include "forget.h"

namespace fwp::cpu {
namespace {

// Number of tokens in quadratic form: see short_decay_tokens.
int64_t length_of_start(const Lengths& size, const View& initial) {
  return initial.defined() ? 0 : std::min(size.L, short_decay_tokens(size.Dk, size.Dv));
}

template <Fades fades>
void start_forward(const Forward& pass) {
  FWP_DISPATCH(pass.item, {
    const InputHeads<A> of(pass.in);
    const Heads<A> out(pass.out), state(pass.final);
    for_short_heads<ForgetShort<A, fades>>(pass.size, [&](int64_t h, ForgetShort<A, fades>& rule) {
      rule.forward(of.at(h, 0, 0), out.tokens(h), state.tokens(h));
    });
  })
}

template <Fades fades>
void start_backward(const Backward& pass) {
  FWP_DISPATCH(pass.item, {
    const InputHeads<A> of(pass.in);
    const GradientHeads<A> to(pass.to);
    const Heads<const A> d_out(pass.d_out), d_state(pass.d_final);
    for_short_heads<ForgetShort<A, fades>>(pass.size, [&](int64_t h, ForgetShort<A, fades>& rule) {
      rule.backward(of.at(h, 0, 0), d_out.tokens(h), d_state.tokens(h), to.at(h, 0, 0));
    });
  })
}

// The state after the start is one of the kept states, or the final state.
template <Fades fades>
void forward(const Forward& pass) {
  const int64_t L = pass.size.L, start = length_of_start(pass.size, pass.initial);
  if (start == 0) return forget_scan<fades, Erases::kNothing>(pass);
  const View middle = start < L ? pass.kept.select(2, start / kChunk - 1) : pass.final;
  start_forward<fades>(pass.part(0, start, View(), middle));
  if (start < L) forget_scan<fades, Erases::kNothing>(pass.part(start, L - start, middle, pass.final));
}

template <Fades fades>
void backward(const Backward& pass) {
  const int64_t L = pass.size.L, start = length_of_start(pass.size, pass.initial);
  if (start == 0) return forget_scan_backward<fades, Erases::kNothing>(pass);
  View d_middle = pass.d_final;
  if (start < L) {
    const View middle = pass.kept.select(2, start / kChunk - 1);
    d_middle = empty(pass.size.state(), pass.item);
    forget_scan_backward<fades, Erases::kNothing>(pass.part(start, L - start, middle, pass.d_final, d_middle));
  }
  start_backward<fades>(pass.part(0, start, View(), d_middle, View()));
}

}  // namespace

void forget_forward(const Forward& pass) {
  if (pass.in.head_decay.defined())
    forward<Fades::kHead>(pass);
  else if (pass.in.value_decay.defined())
    forward<Fades::kKeyAndValue>(pass);
  else
    forward<Fades::kKey>(pass);
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
