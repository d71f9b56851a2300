// The delta rule and its gradient on CPU tensors.

#include "../../cpu/delta.h"

#include "../../cpu/delta_short.h"
#include "../../cpu/delta_square.h"
#include "passes.h"

namespace fwp::cpu {
namespace {

Lengths lengths_of(const View& keys, const View& values) {
  return {keys.sizes[0], keys.sizes[1], keys.sizes[2], keys.sizes[3], values.sizes[3]};
}

void delta_start(const View& q, const View& k, const View& v, const View& beta, const View& out,
                        const View& state, const View& error) {
  const Lengths size = lengths_of(q, v);
  FWP_DISPATCH(out.item, {
    const Heads<const A> q_(q), k_(k), v_(v), beta_(beta);
    const Heads<A> out_(out), error_(error), state_(state);
    for_short_heads<DeltaShort<A>>(size, [&](int64_t h, DeltaShort<A>& rule) {
      rule.forward(q_.tokens(h), k_.tokens(h), v_.tokens(h), beta_.rates(h), out_.tokens(h), error_.tokens(h),
                   state_.tokens(h));
    });
  })
}

// Rebuild the state after the start (the tokens in quadratic form) and write it to `state`.
void delta_rebuild_state(const View& k, const View& beta, const View& error, const View& state) {
  const Lengths size = lengths_of(k, error);
  FWP_DISPATCH(error.item, {
    const Heads<const A> k_(k), beta_(beta), error_(error);
    const Heads<A> state_(state);
    for_short_heads<DeltaShort<A>>(size, [&](int64_t h, DeltaShort<A>& rule) {
      rule.rebuild_state(k_.tokens(h), beta_.rates(h), error_.tokens(h), state_.tokens(h));
    });
  })
}

void delta_start_backward(const View& q, const View& k, const View& beta, const View& error,
                                 const View& d_out, const View& d_state, const View& d_q, const View& d_k,
                                 const View& d_v, const View& d_beta) {
  const Lengths size = lengths_of(q, error);
  FWP_DISPATCH(error.item, {
    const Heads<const A> q_(q), k_(k), beta_(beta), error_(error), d_out_(d_out), d_state_(d_state);
    const Heads<A> d_q_(d_q), d_k_(d_k), d_v_(d_v), d_beta_(d_beta);
    for_short_heads<DeltaShort<A>>(size, [&](int64_t h, DeltaShort<A>& rule) {
      const Rates<A> sums = d_beta_.rates(h);
      for (int64_t t = 0; t < size.L; ++t) sums[t] = 0;
      rule.backward(q_.tokens(h), k_.tokens(h), beta_.rates(h), error_.tokens(h), d_out_.tokens(h), d_state_.tokens(h),
                    d_q_.tokens(h), d_k_.tokens(h), d_v_.tokens(h), sums);
    });
  })
}

// `final` may be the same tensor as `initial`.
void delta_scan(const View& q, const View& k, const View& v, const View& beta, const View& initial,
                       const View& out, const View& final, const View& error) {
  const Lengths size = lengths_of(q, v);
  FWP_DISPATCH(out.item, {
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

// An undefined `d_initial` means that the gradient of the initial state is not computed.
void delta_scan_backward(const View& q, const View& k, const View& beta, const View& initial,
                                const View& error, const View& d_out, const View& d_final, const View& d_q,
                                const View& d_k, const View& d_v, const View& d_beta, const View& d_initial) {
  const Lengths size = lengths_of(q, error);
  const int64_t L = size.L;
  FWP_DISPATCH(error.item, {
    // The width of a block decides the order in which d_k is summed. So it must not depend on the number of threads.
    const int64_t vectors = block_vectors<A>(size.Dk, size.Dv, 4), width = vectors * kLanes<A>;
    const SharedHeads shared(size, size.Dv, width);
    const View d_k_parts = shared.in_parts(d_k), d_beta_parts = shared.in_parts(d_beta);
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
          for_like_groups<scan.kGroup>(L, scan);
          if (d_initial.defined() && L > 0) scan.finish();
        });
      });
    });
    shared.add_parts<A>(d_k, d_k_parts);
    shared.add_parts<A>(d_beta, d_beta_parts);
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
        for_like_groups<scan.kGroup>(L, scan);
      });
    });
  })
}

// Number of tokens in quadratic form: see short_tokens.
int64_t length_of_start(const Lengths& size, const View& initial) {
  return initial.defined() ? 0 : std::min(size.L, short_tokens(size.Dk, size.Dv));
}

}  // namespace

template <>
void forward<Rule::delta>(const Forward& pass) {
  const int64_t L = pass.size.L, start = length_of_start(pass.size, pass.initial);
  const auto run = [](const Forward& part) {
    const TokenViews& in = part.in;
    delta_scan(in.q, in.k, in.v, in.rate, part.initial, part.out, part.final, part.retrieved);
  };
  if (start == 0) return run(pass);
  const Forward first = pass.part(0, start, View(), pass.final);
  delta_start(first.in.q, first.in.k, first.in.v, first.in.rate, first.out, first.final, first.retrieved);
  if (start < L) run(pass.part(start, L - start, pass.final, pass.final));
}

template <>
void backward<Rule::delta>(const Backward& pass) {
  const int64_t L = pass.size.L, start = length_of_start(pass.size, pass.initial);
  const auto run = [](const Backward& part) {
    const TokenViews &in = part.in, &to = part.to;
    delta_scan_backward(in.q, in.k, in.rate, part.initial, part.retrieved, part.d_out, part.d_final, to.q, to.k, to.v,
                        to.rate, part.d_initial);
  };
  if (start == 0) return run(pass);
  // The state between the start and the rest, and its gradient.
  View middle, d_middle = pass.d_final;
  if (start < L) {
    middle = empty(pass.size.state(), pass.item), d_middle = empty(pass.size.state(), pass.item);
    const Backward first = pass.part(0, start, View(), View(), View());
    delta_rebuild_state(first.in.k, first.in.rate, first.retrieved, middle);
    run(pass.part(start, L - start, middle, pass.d_final, d_middle));
  }
  const Backward first = pass.part(0, start, View(), d_middle, View());
  delta_start_backward(first.in.q, first.in.k, first.in.rate, first.retrieved, first.d_out, first.d_final, first.to.q,
                       first.to.k, first.to.v, first.to.rate);
}

}  // namespace fwp::cpu
