// The kernels of the operator on CPU tensors.

#include <ATen/ops/zeros.h>

#include "../../cpu/amx.h"
#include "../operator.h"
#include "copies.h"

namespace fwp::cpu {

// Must not outlive `x`.
static View view(const Tensor& x) {
  View seen;
  if (!x.defined()) return seen;
  seen.data = static_cast<char*>(x.mutable_data_ptr()), seen.number_bytes = x.element_size(), seen.dims = x.dim();
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

View empty(const std::array<int64_t, 5>& sizes, int dims, int64_t number_bytes) {
  const auto type = number_bytes == sizeof(double) ? at::kDouble : at::kFloat;
  const auto memory = std::make_shared<Tensor>(at::empty({sizes.data(), size_t(dims)}, type));
  View seen = view(*memory);
  seen.owner = memory;
  return seen;
}

namespace {

// Tokens `begin` to `end` of sequence b. Whether the document continues from the given state: `goes_on`.
Forward document_of(const Forward& all, int64_t b, int64_t begin, int64_t end, bool goes_on) {
  const View before = goes_on && all.initial.defined() ? all.initial.narrow(0, b, 1) : View();
  return all.part(b, 1, begin, end - begin, before, all.final.narrow(0, b, 1));
}
Backward document_of(const Backward& all, int64_t b, int64_t begin, int64_t end, bool goes_on) {
  const auto some = [&](const View& x, bool wanted) { return wanted && x.defined() ? x.narrow(0, b, 1) : View(); };
  return all.part(b, 1, begin, end - begin, some(all.initial, goes_on), some(all.d_final, end == all.size.L),
                  some(all.d_initial, goes_on));
}

// Call f(document) for all documents, each of which has its own state; f(all) without marks of where they begin.
template <typename Pass, typename F>
void for_each_document(const Tensor& first, const Pass& all, F f) {
  const int64_t L = all.size.L;
  if (!first.defined() || L == 0) return f(all);
  const Tensor marks = first.contiguous();
  for (int64_t b = 0; b < marks.size(0); ++b) {
    const bool* mark = marks.const_data_ptr<bool>() + b * L;
    for (int64_t begin = 0, end; begin < L; begin = end) {
      end = std::find(mark + begin + 1, mark + L, true) - mark;
      f(document_of(all, b, begin, end, begin == 0 && !mark[0]));
    }
  }
}

// Call compute(pass) with tokens in a dtype that the kernels of the rule take.
template <typename Pass, typename F>
void in_kernel_dtype(Rule rule, const Pass& pass, F compute) {
  pass.in.q.number_bytes == pass.number_bytes || in_chunks(rule, pass.size) ? compute(pass) : run_in_float32(pass, compute);
}

struct Device {
  static constexpr at::DeviceType kType = at::kCPU;
  static constexpr bool kTokensFirst = false;
  static constexpr KernelNeeds kNeeds{.same_dtype = true, .shares_heads = true, .always_rate = false, .always_keeps = false};
  static int64_t segments(const OperatorCall&) { return 0; }

  static void run(const ForwardPass& x) {
    Forward pass{x.size, x.final.element_size(), views(x.in, x.size), view(x.state), view(x.out), view(x.final),
                 view(x.retrieved), view(x.kept)};
    Rule rule = x.rule;
    Tensor one;
    const bool half = pass.in.q.number_bytes != pass.number_bytes, of_chunks = x.size.L == 1 || TileUnit::chosen();
    if (half && of_chunks && is_large(x.size) && fades_of(rule) == Fades::kNothing) {
      // With decays of one, sum and delta have tiles, and steps that read bfloat16. Else copies are faster than chunks.
      rule = rule == Rule::sum ? Rule::gated : Rule::gated_delta;
      one = at::ones({}, x.final.options()).expand(x.size.rates());
      pass.in.head_decay = view(one);
    }
    for_each_document(x.first, pass, [&](const Forward& document) {
      in_kernel_dtype(rule, document, [&](Forward part) {
        if (erases_of(rule) != Erases::kNothing && !part.retrieved.defined() && !in_chunks(rule, part.size))
          part.retrieved = empty(part.size.values(), part.number_bytes);
        with_rule(rule, [&](auto constant) { forward<constant()>(part); });
      });
    });
  }

  static void run(const BackwardPass& x) {
    const Tensor d_out = x.d_out.defined() ? x.d_out : at::zeros(x.size.values(), x.in.q.options());
    const Tensor d_state = x.d_state.defined() ? prepare(x.d_state) : Tensor();
    const Backward pass{x.size, int64_t(c10::elementSize(x.state_type)), views(x.in, x.size), view(x.state),
                        view(x.retrieved), view(x.kept), view(d_out), view(d_state), x.to.map(view), view(x.d_initial)};
    if (x.first.defined() && x.d_initial.defined()) x.d_initial.zero_();
    for_each_document(x.first, pass, [&](const Backward& document) {
      in_kernel_dtype(x.rule, document, [&](const Backward& part) {
        with_rule(x.rule, [&](auto constant) { backward<constant()>(part); });
      });
    });
  }
};

}  // namespace
}  // namespace fwp::cpu

FWP_OPERATOR(CPU, fwp::cpu::Device)
