// The delta rule and its gradient on CPU tensors.

#include "../../cpu/delta.h"

#include "../../cpu/delta_short.h"
#include "../../cpu/delta_square.h"
#include "passes.h"

namespace fwp::cpu {
namespace {

// The tokens in quadratic form, which start without a state.
void forward_start(const Forward& pass) {
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    const Heads<const Real> q(pass.in.q), k(pass.in.k), v(pass.in.v), rate(pass.in.rate);
    const Heads<Real> out(pass.out), error(pass.retrieved), final(pass.final);
    for_short_heads<DeltaShort<Real>>(pass.size, [&](int64_t h, DeltaShort<Real>& rule) {
      rule.forward(q.tokens(h), k.tokens(h), v.tokens(h), rate.rates(h), out.tokens(h), error.tokens(h), final.tokens(h));
    });
  });
}

// Write the state after these tokens to `state`.
void rebuild_state(const Backward& pass, const View& state) {
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    const Heads<const Real> k(pass.in.k), rate(pass.in.rate), error(pass.retrieved);
    const Heads<Real> after(state);
    for_short_heads<DeltaShort<Real>>(pass.size, [&](int64_t h, DeltaShort<Real>& rule) {
      rule.rebuild_state(k.tokens(h), rate.rates(h), error.tokens(h), after.tokens(h));
    });
  });
}

void backward_start(const Backward& pass) {
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    const Heads<const Real> q(pass.in.q), k(pass.in.k), rate(pass.in.rate), error(pass.retrieved);
    const Heads<const Real> d_out(pass.d_out), d_final(pass.d_final);
    const Heads<Real> d_q(pass.to.q), d_k(pass.to.k), d_v(pass.to.v), d_rate(pass.to.rate);
    for_short_heads<DeltaShort<Real>>(pass.size, [&](int64_t h, DeltaShort<Real>& rule) {
      const Rates<Real> sums = d_rate.rates(h);
      for (int64_t t = 0; t < pass.size.L; ++t) sums[t] = 0;
      rule.backward(q.tokens(h), k.tokens(h), rate.rates(h), error.tokens(h), d_out.tokens(h), d_final.tokens(h),
                    d_q.tokens(h), d_k.tokens(h), d_v.tokens(h), sums);
    });
  });
}

// `final` may be the same tensor as `initial`.
void forward_scan(const Forward& pass) {
  const Lengths& size = pass.size;
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    const Heads<const Real> q(pass.in.q), k(pass.in.k), v(pass.in.v), rate(pass.in.rate), initial(pass.initial);
    const Heads<Real> out(pass.out), final(pass.final), error(pass.retrieved);
    for_blocks<Real>(size, size.Dk, size.Dv, [&](int64_t h, int64_t j, int64_t n, auto vectors, Real* work) {
      constexpr int NV = decltype(vectors)::value;
      if constexpr (NV == 1) {
        if (is_square<Real>(size)) {
          StateBlock<Real, 1> block(kLanes<Real>, kLanes<Real>, initial.matrix(h, j), final.matrix(h, j), work);
          DeltaForwardSquare<Real>{.block = block,
                                   .length = size.L,
                                   .q = q.tokens(h),
                                   .k = k.tokens(h),
                                   .v = v.tokens(h),
                                   .rate = rate.rates(h),
                                   .out = out.tokens(h),
                                   .error = error.tokens(h)}
              .run();
          return block.finish();
        }
      }
      with_block<Real, NV>(size.Dk, n, initial.matrix(h, j), final.matrix(h, j), work,
                           [&](StateBlock<Real, NV>& block) __attribute__((always_inline)) {
        DeltaForward<Real, NV> scan{.block = block,
                                    .length = size.L,
                                    .q = q.tokens(h),
                                    .k = k.tokens(h),
                                    .v = v.tokens(h).from(j),
                                    .rate = rate.rates(h),
                                    .out = out.tokens(h).from(j),
                                    .error = error.tokens(h).from(j)};
        if constexpr (NV == 4) {
          scan.template start<1>();
          scan.template run<1, true>(0);
        } else {
          if (size.L > 0) scan.template start<scan.kGroup>();
          for_token_groups<scan.kGroup>(size.L, scan);
        }
      });
    });
  });
}

// An undefined `d_initial` means that the gradient of the initial state is not computed.
void backward_scan(const Backward& pass) {
  const Lengths& size = pass.size;
  const int64_t L = size.L;
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    // The width of a block decides the order in which d_k is summed. So it must not depend on the number of threads.
    const int64_t vectors = block_vectors<Real>(size.Dk, size.Dv, 4), width = vectors * kLanes<Real>;
    const SharedHeads shared(size, size.Dv, width);
    const View d_k_parts = shared.in_parts(pass.to.k), d_rate_parts = shared.in_parts(pass.to.rate);
    const int64_t scratch_size = size.Dk * width + DeltaBackwardWrites<Real, 1>::products_size(size.Dk);
    const Heads<const Real> q(pass.in.q), k(pass.in.k), rate(pass.in.rate), error(pass.retrieved);
    const Heads<const Real> d_out(pass.d_out), d_final(pass.d_final);
    const Heads<Real> d_v(pass.to.v), d_initial(pass.d_initial);
    shared.for_blocks<Real>(size.L * size.Dk * size.Dv, scratch_size,
                            [&](int64_t h, int64_t part, int64_t index, bool add, Real* work) {
      const Heads<Real> d_k(d_k_parts.select(0, part)), d_rate(d_rate_parts.select(0, part));
      with_vectors<4>(vectors, [&](auto vectors) {
        constexpr int NV = decltype(vectors)::value;
        const int64_t j = index * width;
        if constexpr (NV == 1) {
          if (is_square<Real>(size)) {
            StateBlock<Real, 1> block(kLanes<Real>, kLanes<Real>, d_final.matrix(h, j), d_initial.matrix(h, j), work);
            DeltaBackwardWritesSquare<Real>{.block = block,
                                            .length = L,
                                            .q = q.tokens(h).reversed(L),
                                            .k = k.tokens(h).reversed(L),
                                            .d_out = d_out.tokens(h).reversed(L),
                                            .error = error.tokens(h).reversed(L),
                                            .rate = rate.rates(h).reversed(L),
                                            .d_k = d_k.tokens(h).reversed(L),
                                            .d_v = d_v.tokens(h).reversed(L),
                                            .d_rate = d_rate.rates(h).reversed(L)}
                .run();
            return block.finish();
          }
        }
        with_block<Real, NV>(size.Dk, std::min(width, size.Dv - j), d_final.matrix(h, j), d_initial.matrix(h, j), work,
                             [&](StateBlock<Real, NV>& block) __attribute__((always_inline)) {
          DeltaBackwardWrites<Real, NV> scan{.block = block,
                                             .q = q.tokens(h).reversed(L),
                                             .k = k.tokens(h).reversed(L),
                                             .d_out = d_out.tokens(h).from(j).reversed(L),
                                             .error = error.tokens(h).from(j).reversed(L),
                                             .rate = rate.rates(h).reversed(L),
                                             .d_k = d_k.tokens(h).reversed(L),
                                             .d_v = d_v.tokens(h).from(j).reversed(L),
                                             .d_rate = d_rate.rates(h).reversed(L),
                                             .add = add,
                                             .products = work + size.Dk * width};
          scan.start();
          for_like_groups<scan.kGroup>(L, scan);
          if (pass.d_initial.defined() && L > 0) scan.finish();
        });
      });
    });
    shared.add_parts<Real>(pass.to.k, d_k_parts);
    shared.add_parts<Real>(pass.to.rate, d_rate_parts);
    const Heads<const Real> initial(pass.initial), d_value(pass.to.v);
    const Heads<Real> d_q(pass.to.q), d_k(pass.to.k);
    for_blocks<Real, 2>(size, size.Dv, size.Dk, [&](int64_t h, int64_t j, int64_t n, auto vectors, Real* work) {
      constexpr int NV = decltype(vectors)::value;
      if constexpr (NV == 1) {
        if (is_square<Real>(size)) {
          const StateBlock<Real, 1> block(kLanes<Real>, kLanes<Real>, initial.matrix(h, j, true), {nullptr, 0, 0}, work);
          return DeltaBackwardReadsSquare<Real>{.block = block,
                                                .length = L,
                                                .k = k.tokens(h),
                                                .d_out = d_out.tokens(h),
                                                .error = error.tokens(h),
                                                .d_v = d_value.tokens(h),
                                                .rate = rate.rates(h),
                                                .d_q = d_q.tokens(h),
                                                .d_k = d_k.tokens(h)}
              .run();
        }
      }
      with_block<Real, NV>(size.Dv, n, initial.matrix(h, j, true), {nullptr, 0, 0}, work,
                           [&](StateBlock<Real, NV>& block) __attribute__((always_inline)) {
        DeltaBackwardReads<Real, NV> scan{.block = block,
                                          .k = k.tokens(h).from(j),
                                          .d_out = d_out.tokens(h),
                                          .error = error.tokens(h),
                                          .d_v = d_value.tokens(h),
                                          .rate = rate.rates(h),
                                          .d_q = d_q.tokens(h).from(j),
                                          .d_k = d_k.tokens(h).from(j),
                                          .scratch = work + size.Dv * block.kWidth};
        for_like_groups<scan.kGroup>(L, scan);
      });
    });
  });
}

// Number of tokens in quadratic form: see short_tokens.
int64_t length_of_start(const Lengths& size, const View& initial) {
  return initial.defined() ? 0 : std::min(size.L, short_tokens(size.Dk, size.Dv));
}

}  // namespace

template <>
void forward<Rule::delta>(const Forward& pass) {
  const int64_t L = pass.size.L, start = length_of_start(pass.size, pass.initial);
  if (start == 0) return forward_scan(pass);
  forward_start(pass.part(0, start, View(), pass.final));
  if (start < L) forward_scan(pass.part(start, L - start, pass.final, pass.final));
}

template <>
void backward<Rule::delta>(const Backward& pass) {
  const int64_t L = pass.size.L, start = length_of_start(pass.size, pass.initial);
  if (start == 0) return backward_scan(pass);
  // The state between the start and the rest, and its gradient.
  View middle, d_middle = pass.d_final;
  if (start < L) {
    middle = empty(pass.size.state(), pass.number_bytes), d_middle = empty(pass.size.state(), pass.number_bytes);
    rebuild_state(pass.part(0, start, View(), View(), View()), middle);
    backward_scan(pass.part(start, L - start, middle, pass.d_final, d_middle));
  }
  backward_start(pass.part(0, start, View(), d_middle, View()));
}

}  // namespace fwp::cpu
