// The operator on CPU tensors: converts its arguments to those of a kernel.

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../autograd.h"
#include "../kernel_arguments.h"
#include "passes.h"

namespace fwp::cpu {

// Must not outlive `x`.
static View view(const Tensor& x) {
  View seen;
  if (!x.defined()) return seen;
  seen.data = static_cast<char*>(x.mutable_data_ptr()), seen.item = x.element_size(), seen.dims = x.dim();
  std::copy(x.sizes().begin(), x.sizes().end(), seen.sizes.begin());
  std::copy(x.strides().begin(), x.strides().end(), seen.strides.begin());
  return seen;
}

// Must not outlive `all`. Heads that share a key see it as their own.
static TokenViews views(const TokenTensors& all, const Sizes& size) {
  TokenViews seen = all.map(view);
  for (View* x : {&seen.q, &seen.k})
    if (size.Hk) x->sharing = size.H / size.Hk, x->sizes[1] = size.H;
  return seen;
}

View empty(const std::array<int64_t, 5>& sizes, int dims, int64_t item) {
  const auto type = item == sizeof(double) ? at::kDouble : at::kFloat;
  const auto memory = std::make_shared<Tensor>(at::empty({sizes.data(), size_t(dims)}, type));
  View seen = view(*memory);
  seen.owner = memory;
  return seen;
}

namespace {

// Each document of a sequence has its own state. Call f(sequence, first token, number of tokens, whether the document
// continues from the given state) for each one.
template <typename F>
void for_documents(const Tensor& first, F f) {
  const Tensor marks = first.contiguous();
  const int64_t L = marks.size(1);
  for (int64_t b = 0; b < marks.size(0); ++b) {
    const bool* mark = marks.const_data_ptr<bool>() + b * L;
    for (int64_t begin = 0, end; begin < L; begin = end) {
      end = std::find(mark + begin + 1, mark + L, true) - mark;
      f(b, begin, end - begin, begin == 0 && !mark[0]);
    }
  }
}

void run(Rule rule, const Forward& pass) {
  constexpr decltype(&sum_forward) kPasses[] = {&sum_forward,    &delta_forward,    &forget_forward,   &forget_forward,
                                                &forget_forward, &retrieve_forward, &retrieve_forward, &retrieve_forward};
  kPasses[int(rule)](pass);
}

void run(Rule rule, const Backward& pass) {
  constexpr decltype(&sum_backward) kPasses[] = {&sum_backward,    &delta_backward,    &forget_backward,   &forget_backward,
                                                 &forget_backward, &retrieve_backward, &retrieve_backward, &retrieve_backward};
  kPasses[int(rule)](pass);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fast_weights(const Tensor& q, const Tensor& k, const Tensor& v,
                                                        const Optional& decay, const Optional& value_decay,
                                                        const Optional& rate, const Optional& removal_key,
                                                        const Optional& removal, const Optional& state,
                                                        const Optional& first, bool erases) {
  const Arguments given{q, k, v, decay, value_decay, rate, removal_key, removal, state, first, erases};
  const Sizes size(q, v);
  given.check_all(size, q.scalar_type());
  const auto type = state_type(q);
  const auto options = q.options().dtype(type);
  const Rule rule = rule_of(given);
  const TokenTensors in = prepare_all(given, size, type);
  const Tensor out = at::empty(size.values(), options), final = at::empty(size.state(), options);
  Tensor retrieved, kept;
  if (given.retrieves()) retrieved = at::empty(size.values(), options);
  if (given.keeps_states()) kept = at::empty({size.B, size.H, size.L / kChunk, size.Dk, size.Dv}, options);
  const Forward pass{size, out.element_size(), views(in, size), view(state.value_or(Tensor())), view(out), view(final),
                     view(retrieved), view(kept)};
  if (!first || size.L == 0)
    run(rule, pass);
  else
    for_documents(*first, [&](int64_t b, int64_t begin, int64_t length, bool goes_on) {
      const View before = goes_on && state ? pass.initial.narrow(0, b, 1) : View();
      run(rule, pass.part(b, 1, begin, length, before, pass.final.narrow(0, b, 1)));
    });
  return {out.to(q.scalar_type()), final, or_nothing(retrieved, out), or_nothing(kept, out)};
}

NineTensors fast_weights_backward(const Tensor& q, const Tensor& k, const Optional& v, const Optional& decay,
                                  const Optional& value_decay, const Optional& rate, const Optional& removal_key,
                                  const Optional& removal, const Optional& state, const Optional& first,
                                  bool erases, const Tensor& retrieved, const Tensor& kept, const Optional& grad_out,
                                  const Optional& grad_state) {
  const Arguments given{q, k, v, decay, value_decay, rate, removal_key, removal, state, first, erases};
  TORCH_CHECK(erases || v, "v must be given");
  const Sizes size(q, v ? *v : retrieved);
  given.check_all(size, q.scalar_type());
  const auto type = state_type(q);
  const auto options = q.options().dtype(type);
  if (given.retrieves()) check("retrieved", retrieved, size.values(), type);
  if (given.keeps_states()) check("kept", kept, {size.B, size.H, size.L / kChunk, size.Dk, size.Dv}, type);
  TORCH_CHECK(kept.is_contiguous(), "kept must be contiguous");
  check("grad_out", grad_out, size.values(), q.scalar_type());
  check("grad_state", grad_state, size.state(), type);
  const auto like = [&](const Tensor& x) { return x.defined() ? at::empty(x.sizes(), options) : x; };
  const TokenTensors in = prepare_all(given, size, type);
  TokenTensors to = in.map(like);
  to.q = at::empty(size.keys(), options), to.k = at::empty(size.keys(), options);
  to.v = at::empty(size.values(), options);
  const Tensor errors = given.retrieves() ? prepare(retrieved, type) : Tensor();
  const Tensor d_out = grad_out ? prepare(*grad_out, type) : at::zeros(size.values(), options);
  const Tensor d_final = grad_state ? prepare(*grad_state, type) : Tensor();
  const Tensor d_initial = state ? at::empty(size.state(), options) : Tensor();
  const Backward pass{size, to.v.element_size(), views(in, size), view(state.value_or(Tensor())), view(errors),
                      view(given.keeps_states() ? kept : Tensor()), view(d_out), view(d_final), to.map(view),
                      view(d_initial)};
  const Rule rule = rule_of(given);
  if (!first || size.L == 0) {
    run(rule, pass);
  } else {
    if (state) d_initial.zero_();
    for_documents(*first, [&](int64_t b, int64_t begin, int64_t length, bool goes_on) {
      const auto some = [&](const View& x, bool wanted) { return wanted && x.defined() ? x.narrow(0, b, 1) : View(); };
      run(rule, pass.part(b, 1, begin, length, some(pass.initial, goes_on),
                          some(pass.d_final, begin + length == size.L), some(pass.d_initial, goes_on)));
    });
  }
  return gradients(given, size, to, d_initial);
}

}  // namespace
}  // namespace fwp::cpu

TORCH_LIBRARY_IMPL(fwp, CPU, m) {
  m.impl("fast_weights", &fwp::cpu::fast_weights);
  m.impl("fast_weights_backward", &fwp::cpu::fast_weights_backward);
}
