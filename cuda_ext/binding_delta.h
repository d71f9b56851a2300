// The delta rule and its gradient on CPU tensors.
#pragma once

#include "binding_tensors.h"
#include "delta.h"

namespace fwp::cpu {

inline std::tuple<Tensor, Tensor, Tensor> delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                                              const std::optional<Tensor>& state) {
  const Sizes size(q, v);
  const auto type = state_type(q);
  check("k", k, size.keys(), q.scalar_type());
  check("v", v, size.values(), q.scalar_type());
  check("beta", beta, size.rates(), q.scalar_type());
  check("state", state, size.state(), type);
  const Tensor out = at::empty(size.values(), q.options().dtype(type)), error = at::empty(size.values(), out.options());
  const Tensor final = at::empty(size.state(), out.options()), initial = state.value_or(Tensor());
  const Tensor q_ = prepare(q, type), k_ = prepare(k, type), v_ = prepare(v, type), beta_ = beta.to(type);
  FWP_DISPATCH(type, for_blocks<A>(size, size.Dk, size.Dv, [&](int64_t h, int64_t j, int64_t n, auto vectors, A* work) {
    constexpr int NV = decltype(vectors)::value;
    StateBlock<A, NV> block(size.Dk, n, matrix<const A>(initial, h, j), matrix<A>(final, h, j), work);
    DeltaForward<A, NV> scan{block, size.L, tokens<const A>(q_, h), tokens<const A>(k_, h),
                                  tokens<const A>(v_, h).from(j), rates<const A>(beta_, h), tokens<A>(out, h).from(j),
                                  tokens<A>(error, h).from(j), {}};
    if constexpr (NV == 4) {
      scan.template start<1>();
      scan.template run<1, true>(0);
    } else {
      if (size.L > 0) scan.template start<kTokens>();
      for_token_groups(size.L, scan);
    }
    block.finish();
  });)
  return {out.to(q.scalar_type()), final, error};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> delta_rule_backward(
    const Tensor& q, const Tensor& k, const Tensor& beta, const std::optional<Tensor>& state, const Tensor& error,
    const std::optional<Tensor>& grad_out, const std::optional<Tensor>& grad_state) {
  const Sizes size(q, error);
  const auto type = state_type(q);
  check("k", k, size.keys(), q.scalar_type());
  check("beta", beta, size.rates(), q.scalar_type());
  check("error", error, size.values(), type);
  check("state", state, size.state(), type);
  check("grad_out", grad_out, size.values(), q.scalar_type());
  check("grad_state", grad_state, size.state(), type);
  const Tensor q_ = prepare(q, type), k_ = prepare(k, type), e_ = prepare(error, type), beta_ = beta.to(type);
  const Tensor d_out = grad_out ? prepare(*grad_out, type) : at::zeros(size.values(), e_.options());
  const Tensor d_q = at::empty(size.keys(), e_.options()), d_k = at::empty(size.keys(), e_.options());
  const Tensor d_v = at::empty(size.values(), e_.options());
  const Tensor initial = state.value_or(Tensor()), d_final = grad_state.value_or(Tensor());
  const Tensor d_initial = state ? at::empty(size.state(), e_.options()) : Tensor();
  // Blocks of columns see a part of each value, and so a part of each d_beta.
  const int64_t parts = std::max<int64_t>(1, (size.Dv + kVectorBytes / 8 - 1) / (kVectorBytes / 8));
  const Tensor d_beta = at::zeros({parts, size.B, size.H, size.L}, e_.options());
  const int64_t L = size.L;
  FWP_DISPATCH(type, {
    for_blocks<A, 2>(size, size.Dk, size.Dv, [&](int64_t h, int64_t j, int64_t n, auto vectors, A* work) {
      constexpr int NV = decltype(vectors)::value;
      StateBlock<A, NV> block(size.Dk, n, matrix<const A>(d_final, h, j), matrix<A>(d_initial, h, j), work);
      DeltaBackwardValues<A, NV> scan{
          block, tokens<const A>(q_, h).reversed(L), tokens<const A>(k_, h).reversed(L),
          tokens<const A>(d_out, h).from(j).reversed(L), tokens<const A>(e_, h).from(j).reversed(L),
          rates<const A>(beta_, h).reversed(L), tokens<A>(d_v, h).from(j).reversed(L),
          rates<A>(d_beta.select(0, j / block.kWidth), h).reversed(L), {}, {}};
      scan.start();
      for_token_groups(L, scan);
      if (d_initial.defined() && L > 0) scan.finish();
      block.finish();
    });
    for_blocks<A, 2>(size, size.Dv, size.Dk, [&](int64_t h, int64_t j, int64_t n, auto vectors, A* work) {
      constexpr int NV = decltype(vectors)::value;
      StateBlock<A, NV> weights(size.Dv, n, matrix<const A>(initial, h, j, true), {nullptr, 0, 0}, work);
      DeltaBackwardQueries<A, NV> forwards{
          weights, tokens<const A>(k_, h).from(j), tokens<const A>(d_out, h), tokens<const A>(e_, h),
          tokens<const A>(d_v, h), rates<const A>(beta_, h), tokens<A>(d_q, h).from(j), tokens<A>(d_k, h).from(j),
          work + size.Dv * weights.kWidth};
      for_token_groups(L, forwards);
      StateBlock<A, NV> gradient(size.Dv, n, matrix<const A>(d_final, h, j, true), {nullptr, 0, 0}, work);
      DeltaBackwardKeys<A, NV> backwards{
          gradient, tokens<const A>(q_, h).from(j).reversed(L), tokens<const A>(k_, h).from(j).reversed(L),
          tokens<const A>(d_out, h).reversed(L), tokens<const A>(e_, h).reversed(L),
          tokens<const A>(d_v, h).reversed(L), rates<const A>(beta_, h).reversed(L),
          tokens<A>(d_k, h).from(j).reversed(L)};
      for_token_groups(L, backwards);
    });
  })
  const auto given = q.scalar_type();
  return {d_q.to(given), d_k.to(given), d_v.to(given), d_beta.sum(0).to(given),
          or_nothing(d_initial, e_)};
}

}  // namespace fwp::cpu
