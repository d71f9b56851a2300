// The sum rule and its gradient on CPU tensors.
#pragma once

#include "binding_tensors.h"
#include "sum.h"

namespace fwp::cpu {

// out_t = q_t W_t with W_t = W_{t-1} + k_t^T v_t for tensors of any roles; `initial` is W_0, or its transpose, or
// undefined; `final` may be undefined.
template <typename A>
void scan(const Sizes& size, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& initial, bool transposed,
          bool reverse, const Tensor& out, const Tensor& final) {
  const int64_t rows = k.size(3), columns = v.size(3), length = size.L;
  const auto ordered = [&](auto x) { return reverse ? x.reversed(length) : x; };
  const Heads<const A> q_(q), k_(k), v_(v), initial_(initial);
  const Heads<A> out_(out), final_(final);
  for_blocks<A>(size, rows, columns, [&](int64_t head, int64_t column, int64_t n, auto vectors, A* work) {
    constexpr int NV = decltype(vectors)::value;
    StateBlock<A, NV> block(rows, n, initial_.matrix(head, column, transposed), final_.matrix(head, column), work);
    SumScan<A, NV> scan{block, ordered(q_.tokens(head)), ordered(k_.tokens(head)),
                        ordered(v_.tokens(head).from(column)), ordered(out_.tokens(head).from(column))};
    if constexpr (NV == 4)
      scan.template run<1, true>(0);
    else
      for_token_groups(length, scan);
    block.finish();
  });
}

inline std::tuple<Tensor, Tensor> sum_rule(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const std::optional<Tensor>& state) {
  const Sizes size(q, v);
  const auto type = state_type(q);
  check("k", k, size.keys(), q.scalar_type());
  check("v", v, size.values(), q.scalar_type());
  check("state", state, size.state(), type);
  const Tensor out = at::empty(size.values(), q.options().dtype(type));
  const Tensor final = at::empty(size.state(), out.options());
  const Tensor q_ = prepare(q, type), k_ = prepare(k, type), v_ = prepare(v, type);
  FWP_DISPATCH(type, scan<A>(size, q_, k_, v_, state.value_or(Tensor()), false, false, out, final);)
  return {out.to(q.scalar_type()), final};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> sum_rule_backward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                             const std::optional<Tensor>& state,
                                                             const std::optional<Tensor>& grad_out,
                                                             const std::optional<Tensor>& grad_state) {
  const Sizes size(q, v);
  const auto type = state_type(q);
  check("k", k, size.keys(), q.scalar_type());
  check("v", v, size.values(), q.scalar_type());
  check("state", state, size.state(), type);
  check("grad_out", grad_out, size.values(), q.scalar_type());
  check("grad_state", grad_state, size.state(), type);
  const Tensor q_ = prepare(q, type), k_ = prepare(k, type), v_ = prepare(v, type);
  const Tensor d_out = grad_out ? prepare(*grad_out, type) : at::zeros(size.values(), v_.options());
  const Tensor d_q = at::empty(size.keys(), q_.options()), d_k = at::empty(size.keys(), q_.options());
  const Tensor d_v = at::empty(size.values(), q_.options());
  const Tensor initial = state.value_or(Tensor()), d_final = grad_state.value_or(Tensor()), none;
  const Tensor d_initial = state ? at::empty(size.state(), q_.options()) : none;
  FWP_DISPATCH(type, {
    scan<A>(size, d_out, v_, k_, initial, true, false, d_q, none);
    scan<A>(size, v_, d_out, q_, d_final, true, true, d_k, none);
    scan<A>(size, k_, q_, d_out, d_final, false, true, d_v, d_initial);
  })
  const auto given = q.scalar_type();
  return {d_q.to(given), d_k.to(given), d_v.to(given), or_nothing(d_initial, q_)};
}

}  // namespace fwp::cpu
