// The decay rule, the gated rule as a case of it, and their gradients on CPU tensors.
#pragma once

#include "binding_tensors.h"
#include "decay.h"
#include "decay_short.h"
#include "decay_square.h"

namespace fwp::cpu {

// What a rule that forgets is given, checked, as the kernels see it. Gated: a gate instead of both decays.
struct DecayInputs {
  Sizes size;
  at::ScalarType given, type;
  Tensor q, k, v, key_decay, value_decay, gate, initial;

  DecayInputs(const Tensor& q_, const Tensor& k_, const Tensor& v_, const std::optional<Tensor>& state)
      : size(q_, v_), given(q_.scalar_type()), type(state_type(q_)), initial(state.value_or(Tensor())) {
    check("k", k_, size.keys(), given);
    check("v", v_, size.values(), given);
    check("state", state, size.state(), type);
    q = prepare(q_, type), k = prepare(k_, type), v = prepare(v_, type);
  }
  DecayInputs(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& key_decay_, const Tensor& value_decay_,
              const std::optional<Tensor>& state)
      : DecayInputs(q_, k_, v_, state) {
    check("key_decay", key_decay_, size.keys(), given);
    check("value_decay", value_decay_, size.values(), given);
    key_decay = prepare(key_decay_, type), value_decay = prepare(value_decay_, type);
  }
  DecayInputs(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& gate_,
              const std::optional<Tensor>& state)
      : DecayInputs(q_, k_, v_, state) {
    check("gate", gate_, size.rates(), given);
    gate = gate_.to(type);
  }
  Tensor empty(at::IntArrayRef sizes) const { return at::empty(sizes, q.options()); }
  // `length` tokens from `first` on, and the state before them.
  DecayInputs part(int64_t first, int64_t length, const Tensor& state) const {
    DecayInputs part = *this;
    narrow({&part.q, &part.k, &part.v, &part.key_decay, &part.value_decay, &part.gate}, first, length);
    part.size.L = length;
    part.initial = state;
    return part;
  }
};

// The same by heads. A member that is not there is null.
template <typename A>
struct DecayHeads {
  const Heads<const A> q, k, v, key_decay, value_decay, gate, initial;

  explicit DecayHeads(const DecayInputs& in)
      : q(in.q), k(in.k), v(in.v), key_decay(in.key_decay), value_decay(in.value_decay), gate(in.gate),
        initial(in.initial) {}
};

// Tokens of the quadratic form: see short_decay_tokens.
inline int64_t length_of_start(const DecayInputs& in) {
  return in.initial.defined() ? 0 : std::min(in.size.L, short_decay_tokens(in.size.Dk, in.size.Dv));
}

template <bool kGated>
void decay_start(const DecayInputs& in, const Tensor& out, const Tensor& state) {
  FWP_DISPATCH(in.type, {
    using Rule = DecayShort<A, kGated>;
    const DecayHeads<A> of(in);
    const Heads<A> out_(out), state_(state);
    for_short_heads<Rule>(in.size, [&](int64_t h, Rule& rule) {
      rule.forward(of.q.tokens(h), of.k.tokens(h), of.v.tokens(h), of.key_decay.tokens(h), of.value_decay.tokens(h),
                   of.gate.rates(h), out_.tokens(h), state_.tokens(h));
    });
  })
}

// `kept` receives the state after each whole chunk.
template <bool kGated>
void decay_scan(const DecayInputs& in, const Tensor& out, const Tensor& final, const Tensor& kept) {
  const Sizes& size = in.size;
  FWP_DISPATCH(in.type, {
    const DecayHeads<A> of(in);
    const Heads<A> out_(out), final_(final), kept_(kept);
    const auto run_block = [&](int64_t h, int64_t j, int64_t n, auto vectors, A* work) {
      constexpr int NV = decltype(vectors)::value;
      StateBlock<A, NV> block(size.Dk, n, of.initial.matrix(h, j), final_.matrix(h, j), work);
      if constexpr (NV == 1) {
        if (is_square<A>(size)) {
          DecayForwardSquare<A, kGated>{block,
                                        size.L,
                                        of.q.tokens(h),
                                        of.k.tokens(h),
                                        of.v.tokens(h),
                                        of.key_decay.tokens(h),
                                        of.value_decay.tokens(h),
                                        of.gate.rates(h),
                                        out_.tokens(h),
                                        kept_.tokens(h).data}
              .run();
          return block.finish();
        }
      }
      DecayForward<A, NV, kGated>{block,
                                  of.q.tokens(h),
                                  of.k.tokens(h),
                                  of.v.tokens(h).from(j),
                                  of.key_decay.tokens(h),
                                  of.value_decay.tokens(h).from(j),
                                  of.gate.rates(h),
                                  out_.tokens(h).from(j),
                                  {kept_.tokens(h).data + j, size.Dv},
                                  0}
          .run_chunks(size.L);
      block.finish();
    };
    // Each block reads all keys, queries and key decays: half as many are worth passes of two tokens.
    if (kTokens == 4)
      for_blocks<A, 4>(size, size.Dk, size.Dv, run_block);
    else
      for_blocks<A>(size, size.Dk, size.Dv, run_block);
  })
}

// Out, the last state, and the state after each whole chunk, but for those in the midst of the start.
template <bool kGated>
std::tuple<Tensor, Tensor, Tensor> decay_forward(const DecayInputs& in) {
  const Sizes& size = in.size;
  const Tensor out = in.empty(size.values()), final = in.empty(size.state());
  const Tensor kept = in.empty({size.B, size.H, size.L / kChunk, size.Dk, size.Dv});
  const int64_t L = size.L, start = length_of_start(in), chunks = start / kChunk;
  if (start == 0) {
    decay_scan<kGated>(in, out, final, kept);
  } else {
    const Tensor middle = start < L ? kept.select(2, chunks - 1) : final;
    decay_start<kGated>(in.part(0, start, Tensor()), out.narrow(2, 0, start), middle);
    if (start < L)
      decay_scan<kGated>(in.part(start, L - start, middle), out.narrow(2, start, L - start), final,
                         kept.narrow(2, chunks, L / kChunk - chunks));
  }
  return {out.to(in.given), final, kept};
}

// A block of columns in the backward pass: two vectors where there are the registers for it.
inline int64_t backward_width(const Sizes& size, at::ScalarType type) {
  const int64_t lanes = type == at::kDouble ? kLanes<double> : kLanes<float>;
  return kTokens == 4 && size.Dk > lanes ? 2 * lanes : lanes;
}

// Undefined: a gradient that the rule has not, or that nobody wants.
struct DecayGradients {
  Tensor q, k, v, key_decay, value_decay, gate, initial;

  DecayGradients part(int64_t first, int64_t length, const Tensor& state) const {
    DecayGradients part = *this;
    narrow({&part.q, &part.k, &part.v, &part.key_decay, &part.value_decay, &part.gate}, first, length);
    part.initial = state;
    return part;
  }
};

template <bool kGated>
void decay_start_backward(const DecayInputs& in, const Tensor& d_out, const Tensor& d_state, const DecayGradients& to) {
  FWP_DISPATCH(in.type, {
    using Rule = DecayShort<A, kGated>;
    const DecayHeads<A> of(in);
    const Heads<const A> d_out_(d_out), d_state_(d_state);
    const Heads<A> d_q(to.q), d_k(to.k), d_v(to.v), d_key_decay(to.key_decay), d_value_decay(to.value_decay);
    const Heads<A> d_gate(to.gate);
    for_short_heads<Rule>(in.size, [&](int64_t h, Rule& rule) {
      rule.backward(of.q.tokens(h), of.k.tokens(h), of.v.tokens(h), of.key_decay.tokens(h), of.value_decay.tokens(h),
                    of.gate.rates(h), d_out_.tokens(h), d_state_.tokens(h), d_q.tokens(h), d_k.tokens(h), d_v.tokens(h),
                    d_key_decay.tokens(h), d_value_decay.tokens(h), d_gate.rates(h));
    });
  })
}

template <bool kGated>
void decay_scan_backward(const DecayInputs& in, const Tensor& kept, const Tensor& d_out, const Tensor& d_final,
                         const DecayGradients& to) {
  const Sizes& size = in.size;
  const int64_t width = backward_width(size, in.type);
  const SharedHeads shared(size, size.Dk, width);
  const Tensor d_v = shared.in_parts(to.v), d_value_decay = shared.in_parts(to.value_decay);
  const Tensor d_gate = shared.in_parts(to.gate);
  FWP_DISPATCH(in.type, {
    const DecayHeads<A> of(in);
    const Heads<const A> kept_(kept), d_out_(d_out), d_final_(d_final);
    const Heads<A> d_q(to.q), d_k(to.k), d_key_decay(to.key_decay), d_initial(to.initial);
    const auto run_block = [&](int64_t h, int64_t part, int64_t i, bool add, auto vectors, A* work) {
      constexpr int NV = decltype(vectors)::value;
      const auto of_part = [&](const Tensor& x) { return Heads<A>(x.defined() ? x.select(0, part) : x); };
      if constexpr (NV == 1) {
        if (is_square<A>(size)) {
          return DecayBackwardSquare<A, kGated>{size.L,
                                                of.q.tokens(h),
                                                of.k.tokens(h),
                                                of.key_decay.tokens(h),
                                                of.v.tokens(h),
                                                of.value_decay.tokens(h),
                                                d_out_.tokens(h),
                                                of.gate.rates(h),
                                                d_q.tokens(h),
                                                d_k.tokens(h),
                                                d_key_decay.tokens(h),
                                                of_part(d_v).tokens(h),
                                                of_part(d_value_decay).tokens(h),
                                                of_part(d_gate).rates(h),
                                                of.initial.matrix(h, 0, true),
                                                d_final_.matrix(h, 0, true),
                                                d_initial.matrix(h, 0, true),
                                                kept_.tokens(h).data,
                                                work}
              .run();
        }
      }
      DecayBackward<A, NV, kGated>{size.L,
                                   size.Dv,
                                   std::min(width, size.Dk - i),
                                   of.q.tokens(h).from(i),
                                   of.k.tokens(h).from(i),
                                   of.key_decay.tokens(h).from(i),
                                   of.v.tokens(h),
                                   of.value_decay.tokens(h),
                                   d_out_.tokens(h),
                                   of.gate.rates(h),
                                   d_q.tokens(h).from(i),
                                   d_k.tokens(h).from(i),
                                   d_key_decay.tokens(h).from(i),
                                   of_part(d_v).tokens(h),
                                   of_part(d_value_decay).tokens(h),
                                   of_part(d_gate).rates(h),
                                   add,
                                   of.initial.matrix(h, i, true),
                                   d_final_.matrix(h, i, true),
                                   d_initial.matrix(h, i, true),
                                   kept_.tokens(h).data + i * size.Dv,
                                   size.Dk * size.Dv,
                                   work}
          .run();
    };
    const int64_t scratch_size = std::max(DecayBackward<A, 1, kGated>::scratch(size.Dv) * width / kLanes<A>,
                                          DecayBackwardSquare<A, kGated>::scratch());
    shared.for_blocks<A>(size.L * size.Dk * size.Dv, scratch_size,
                         [&](int64_t h, int64_t part, int64_t block, bool add, A* work) {
      if (width == kLanes<A>)
        run_block(h, part, block * width, add, std::integral_constant<int, 1>{}, work);
      else
        run_block(h, part, block * width, add, std::integral_constant<int, 2>{}, work);
    });
  })
  shared.add_parts(to.v, d_v);
  shared.add_parts(to.value_decay, d_value_decay);
  shared.add_parts(to.gate, d_gate);
}

// Gradients of q, k, v, key_decay (or gate), value_decay (or nothing) and the initial state.
template <bool kGated>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> decay_backward(const DecayInputs& in, const Tensor& kept,
                                                                          const std::optional<Tensor>& grad_out,
                                                                          const std::optional<Tensor>& grad_state) {
  const Sizes& size = in.size;
  const int64_t L = size.L, start = length_of_start(in), chunks = start / kChunk;
  check("kept", kept, {size.B, size.H, L / kChunk, size.Dk, size.Dv}, in.type);
  TORCH_CHECK(kept.is_contiguous(), "kept must be contiguous");
  check("grad_out", grad_out, size.values(), in.given);
  check("grad_state", grad_state, size.state(), in.type);
  const Tensor d_out = grad_out ? prepare(*grad_out, in.type) : at::zeros(size.values(), in.q.options());
  const Tensor d_final = grad_state.value_or(Tensor()), none;
  DecayGradients to{in.empty(size.keys()), in.empty(size.keys()), in.empty(size.values()), none, none, none, none};
  if (kGated)
    to.gate = in.empty(size.rates());
  else
    to.key_decay = in.empty(size.keys()), to.value_decay = in.empty(size.values());
  if (in.initial.defined()) to.initial = in.empty(size.state());
  if (start == 0) {
    decay_scan_backward<kGated>(in, kept, d_out, d_final, to);
  } else {
    Tensor d_middle = start < L ? in.empty(size.state()) : d_final.defined() ? prepare(d_final, in.type) : none;
    if (start < L)
      decay_scan_backward<kGated>(in.part(start, L - start, kept.select(2, chunks - 1)),
                                  kept.narrow(2, chunks, L / kChunk - chunks), d_out.narrow(2, start, L - start),
                                  d_final, to.part(start, L - start, d_middle));
    decay_start_backward<kGated>(in.part(0, start, none), d_out.narrow(2, 0, start), d_middle,
                                 to.part(0, start, none));
  }
  const auto given = [&](const Tensor& x) { return x.defined() ? x.to(in.given) : x; };
  return {given(to.q), given(to.k), given(to.v), given(kGated ? to.gate : to.key_decay), given(to.value_decay),
          or_nothing(to.initial, in.q)};
}

inline std::tuple<Tensor, Tensor, Tensor> decay_rule(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     const Tensor& key_decay, const Tensor& value_decay,
                                                     const std::optional<Tensor>& state) {
  return decay_forward<false>({q, k, v, key_decay, value_decay, state});
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> decay_rule_backward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_decay, const Tensor& value_decay,
    const std::optional<Tensor>& state, const Tensor& kept, const std::optional<Tensor>& grad_out,
    const std::optional<Tensor>& grad_state) {
  return decay_backward<false>({q, k, v, key_decay, value_decay, state}, kept, grad_out, grad_state);
}

inline std::tuple<Tensor, Tensor, Tensor> gated_rule(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     const Tensor& gate, const std::optional<Tensor>& state) {
  return decay_forward<true>({q, k, v, gate, state});
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_rule_backward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate, const std::optional<Tensor>& state,
    const Tensor& kept, const std::optional<Tensor>& grad_out, const std::optional<Tensor>& grad_state) {
  const auto [d_q, d_k, d_v, d_gate, none, d_initial] =
      decay_backward<true>({q, k, v, gate, state}, kept, grad_out, grad_state);
  return {d_q, d_k, d_v, d_gate, d_initial};
}

}  // namespace fwp::cpu
