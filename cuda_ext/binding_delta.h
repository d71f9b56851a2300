// The delta rule and its gradient on CPU tensors.
#pragma once

#include "binding_tensors.h"
#include "delta.h"
#include "delta_short.h"
#include "delta_square.h"

namespace fwp::cpu {

inline void delta_start(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& out,
                        const Tensor& state, const Tensor& error) {
  const Sizes size(q, v);
  FWP_DISPATCH(out.scalar_type(), {
    const Heads<const A> q_(q), k_(k), v_(v), beta_(beta);
    const Heads<A> out_(out), error_(error), state_(state);
    for_short_heads<DeltaShort<A>>(size, [&](int64_t h, DeltaShort<A>& rule) {
      rule.forward(q_.tokens(h), k_.tokens(h), v_.tokens(h), beta_.rates(h), out_.tokens(h), error_.tokens(h),
                   state_.tokens(h));
    });
  })
}

// The state after the start, again; `state` receives it.
inline void delta_rebuild_state(const Tensor& k, const Tensor& beta, const Tensor& error, const Tensor& state) {
  const Sizes size(k, error);
  FWP_DISPATCH(error.scalar_type(), {
    const Heads<const A> k_(k), beta_(beta), error_(error);
    const Heads<A> state_(state);
    for_short_heads<DeltaShort<A>>(size, [&](int64_t h, DeltaShort<A>& rule) {
      rule.rebuild_state(k_.tokens(h), beta_.rates(h), error_.tokens(h), state_.tokens(h));
    });
  })
}

inline void delta_start_backward(const Tensor& q, const Tensor& k, const Tensor& beta, const Tensor& error,
                                 const Tensor& d_out, const Tensor& d_state, const Tensor& d_q, const Tensor& d_k,
                                 const Tensor& d_v, const Tensor& d_beta) {
  const Sizes size(q, error);
  FWP_DISPATCH(error.scalar_type(), {
    const Heads<const A> q_(q), k_(k), beta_(beta), error_(error), d_out_(d_out), d_state_(d_state);
    const Heads<A> d_q_(d_q), d_k_(d_k), d_v_(d_v), d_beta_(d_beta);
    for_short_heads<DeltaShort<A>>(size, [&](int64_t h, DeltaShort<A>& rule) {
      rule.backward(q_.tokens(h), k_.tokens(h), beta_.rates(h), error_.tokens(h), d_out_.tokens(h), d_state_.tokens(h),
                    d_q_.tokens(h), d_k_.tokens(h), d_v_.tokens(h), d_beta_.rates(h));
    });
  })
}

// `final` may be `initial`.
inline void delta_scan(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta, const Tensor& initial,
                       const Tensor& out, const Tensor& final, const Tensor& error) {
  const Sizes size(q, v);
  FWP_DISPATCH(out.scalar_type(), {
    const Heads<const A> q_(q), k_(k), v_(v), beta_(beta), initial_(initial);
    const Heads<A> out_(out), final_(final), error_(error);
    for_blocks<A>(size, size.Dk, size.Dv, [&](int64_t h, int64_t j, int64_t n, auto vectors, A* work) {
      constexpr int NV = decltype(vectors)::value;
      if constexpr (NV == 1) {
        if (is_square<A>(size)) {
          StateBlock<A, 1> block(kLanes<A>, kLanes<A>, initial_.matrix(h, j), final_.matrix(h, j), work);
          DeltaForwardSquare<A>{block, size.L, q_.tokens(h), k_.tokens(h), v_.tokens(h), beta_.rates(h),
                                out_.tokens(h), error_.tokens(h)}
              .run();
          return block.finish();
        }
      }
      with_block<A, NV>(size.Dk, n, initial_.matrix(h, j), final_.matrix(h, j), work,
                        [&](StateBlock<A, NV>& block) __attribute__((always_inline)) {
        DeltaForward<A, NV> scan{block, size.L, q_.tokens(h), k_.tokens(h), v_.tokens(h).from(j), beta_.rates(h),
                                 out_.tokens(h).from(j), error_.tokens(h).from(j)};
        if constexpr (NV == 4) {
          scan.template start<1>();
          scan.template run<1, true>(0);
        } else {
          if (size.L > 0) scan.template start<scan.kGroup>();
          for_token_groups<scan.kGroup>(size.L, scan);
        }
      });
    });
  })
}

// The gradient of the initial state is not made where `d_initial` is undefined.
inline void delta_scan_backward(const Tensor& q, const Tensor& k, const Tensor& beta, const Tensor& initial,
                                const Tensor& error, const Tensor& d_out, const Tensor& d_final, const Tensor& d_q,
                                const Tensor& d_k, const Tensor& d_v, const Tensor& d_beta, const Tensor& d_initial) {
  const Sizes size(q, error);
  const int64_t L = size.L;
  FWP_DISPATCH(error.scalar_type(), {
    // The width of a block decides in which order d_k is summed: no matter of the number of threads.
    const int64_t vectors = block_vectors<A>(size.Dk, size.Dv, 4), width = vectors * kLanes<A>;
    const SharedHeads shared(size, size.Dv, width);
    const Tensor d_k_parts = shared.in_parts(d_k), d_beta_parts = shared.in_parts(d_beta);
    const int64_t scratch_size = size.Dk * width + DeltaBackwardWrites<A, 1>::products_size(size.Dk);
    const Heads<const A> q_(q), k_(k), beta_(beta), error_(error), d_out_(d_out), d_final_(d_final);
    const Heads<A> d_v_(d_v), d_initial_(d_initial);
    shared.for_blocks<A>(size.L * size.Dk * size.Dv, scratch_size,
                         [&](int64_t h, int64_t part, int64_t index, bool add, A* work) {
      const Heads<A> d_k_(d_k_parts.select(0, part)), d_beta_(d_beta_parts.select(0, part));
      with_vectors<4>(vectors, [&](auto vectors) {
        constexpr int NV = decltype(vectors)::value;
        const int64_t j = index * width;
        if constexpr (NV == 1) {
          if (is_square<A>(size)) {
            StateBlock<A, 1> block(kLanes<A>, kLanes<A>, d_final_.matrix(h, j), d_initial_.matrix(h, j), work);
            DeltaBackwardWritesSquare<A>{block, L, q_.tokens(h).reversed(L), k_.tokens(h).reversed(L),
                                         d_out_.tokens(h).reversed(L), error_.tokens(h).reversed(L),
                                         beta_.rates(h).reversed(L), d_k_.tokens(h).reversed(L),
                                         d_v_.tokens(h).reversed(L), d_beta_.rates(h).reversed(L)}
                .run();
            return block.finish();
          }
        }
        with_block<A, NV>(size.Dk, std::min(width, size.Dv - j), d_final_.matrix(h, j), d_initial_.matrix(h, j), work,
                          [&](StateBlock<A, NV>& block) __attribute__((always_inline)) {
          DeltaBackwardWrites<A, NV> scan{
              block, q_.tokens(h).reversed(L), k_.tokens(h).reversed(L), d_out_.tokens(h).from(j).reversed(L),
              error_.tokens(h).from(j).reversed(L), beta_.rates(h).reversed(L), d_k_.tokens(h).reversed(L),
              d_v_.tokens(h).from(j).reversed(L), d_beta_.rates(h).reversed(L), add, work + size.Dk * width, {}, {}};
          scan.start();
          for_token_groups<scan.kGroup>(L, scan);
          if (d_initial.defined() && L > 0) scan.finish();
        });
      });
    });
    shared.add_parts(d_k, d_k_parts);
    shared.add_parts(d_beta, d_beta_parts);
    const Heads<const A> initial_(initial), d_value_(d_v);
    const Heads<A> d_q_(d_q), d_k_(d_k);
    for_blocks<A, 2>(size, size.Dv, size.Dk, [&](int64_t h, int64_t j, int64_t n, auto vectors, A* work) {
      constexpr int NV = decltype(vectors)::value;
      if constexpr (NV == 1) {
        if (is_square<A>(size)) {
          const StateBlock<A, 1> block(kLanes<A>, kLanes<A>, initial_.matrix(h, j, true), {nullptr, 0, 0}, work);
          return DeltaBackwardReadsSquare<A>{block, L, k_.tokens(h), d_out_.tokens(h), error_.tokens(h),
                                             d_value_.tokens(h), beta_.rates(h), d_q_.tokens(h), d_k_.tokens(h)}
              .run();
        }
      }
      with_block<A, NV>(size.Dv, n, initial_.matrix(h, j, true), {nullptr, 0, 0}, work,
                        [&](StateBlock<A, NV>& block) __attribute__((always_inline)) {
        DeltaBackwardReads<A, NV> scan{block, k_.tokens(h).from(j), d_out_.tokens(h), error_.tokens(h),
                                       d_value_.tokens(h), beta_.rates(h), d_q_.tokens(h).from(j),
                                       d_k_.tokens(h).from(j), work + size.Dv * block.kWidth};
        for_token_groups<scan.kGroup>(L, scan);
      });
    });
  })
}

// Tokens of the quadratic form: see short_tokens.
inline int64_t length_of_start(const Sizes& size, const Tensor& initial) {
  return initial.defined() ? 0 : std::min(size.L, short_tokens(size.Dk, size.Dv));
}

inline std::tuple<Tensor, Tensor, Tensor> delta_rule(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     const Tensor& beta, const std::optional<Tensor>& state) {
  const Sizes size(q, v);
  const auto type = state_type(q);
  check("k", k, size.keys(), q.scalar_type());
  check("v", v, size.values(), q.scalar_type());
  check("beta", beta, size.rates(), q.scalar_type());
  check("state", state, size.state(), type);
  const Tensor out = at::empty(size.values(), q.options().dtype(type)), error = at::empty(size.values(), out.options());
  const Tensor final = at::empty(size.state(), out.options()), initial = state.value_or(Tensor());
  const Tensor q_ = prepare(q, type), k_ = prepare(k, type), v_ = prepare(v, type), beta_ = beta.to(type);
  const int64_t L = size.L, start = length_of_start(size, initial);
  const auto first = [&](const Tensor& x) { return x.narrow(2, 0, start); };
  const auto rest = [&](const Tensor& x) { return start ? x.narrow(2, start, L - start) : x; };
  if (start) delta_start(first(q_), first(k_), first(v_), first(beta_), first(out), final, first(error));
  if (start < L || L == 0)
    delta_scan(rest(q_), rest(k_), rest(v_), rest(beta_), start ? final : initial, rest(out), final, rest(error));
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
  const Tensor d_v = at::empty(size.values(), e_.options()), d_beta = at::zeros(size.rates(), e_.options());
  const Tensor initial = state.value_or(Tensor()), d_final = grad_state ? prepare(*grad_state, type) : Tensor();
  const Tensor d_initial = state ? at::empty(size.state(), e_.options()) : Tensor();
  const int64_t L = size.L, start = length_of_start(size, initial);
  const auto first = [&](const Tensor& x) { return x.narrow(2, 0, start); };
  const auto rest = [&](const Tensor& x) { return start ? x.narrow(2, start, L - start) : x; };
  // The state between the start and the rest, and its gradient.
  Tensor middle = initial, d_middle = d_initial;
  if (start && start < L) {
    middle = at::empty(size.state(), e_.options()), d_middle = at::empty(size.state(), e_.options());
    delta_rebuild_state(first(k_), first(beta_), first(e_), middle);
  }
  if (start < L || L == 0)
    delta_scan_backward(rest(q_), rest(k_), rest(beta_), middle, rest(e_), rest(d_out), d_final, rest(d_q), rest(d_k),
                        rest(d_v), rest(d_beta), d_middle);
  if (start)
    delta_start_backward(first(q_), first(k_), first(beta_), first(e_), first(d_out), start < L ? d_middle : d_final,
                         first(d_q), first(d_k), first(d_v), first(d_beta));
  const auto given = q.scalar_type();
  return {d_q.to(given), d_k.to(given), d_v.to(given), d_beta.to(given), or_nothing(d_initial, e_)};
}

}  // namespace fwp::cpu
