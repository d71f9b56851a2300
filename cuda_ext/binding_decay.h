// The decay rule, the gated rule as a case of it, and their gradients on CPU tensors.
#pragma once

#include "binding_tensors.h"
#include "decay.h"

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
};

// Null where there is no such tensor.
template <typename A>
Tokens<A> tokens_or_null(const Tensor& x, int64_t head) {
  return x.defined() ? tokens<A>(x, head) : Tokens<A>{nullptr, 0};
}

template <bool kGated>
std::tuple<Tensor, Tensor, Tensor> decay_forward(const DecayInputs& in) {
  const Sizes& size = in.size;
  const int64_t chunks = size.L / kChunk;
  const Tensor out = in.empty(size.values()), final = in.empty(size.state());
  const Tensor kept = in.empty({size.B, size.H, chunks, size.Dk, size.Dv});
  FWP_DISPATCH(in.type, for_blocks<A>(size, size.Dk, size.Dv, [&](int64_t h, int64_t j, int64_t n, auto vectors, A* work) {
    constexpr int NV = decltype(vectors)::value;
    StateBlock<A, NV> block(size.Dk, n, matrix<const A>(in.initial, h, j), matrix<A>(final, h, j), work);
    const auto gate = tokens_or_null<const A>(in.gate, h);
    DecayForward<A, NV, kGated> scan{block,
                                     tokens<const A>(in.q, h),
                                     tokens<const A>(in.k, h),
                                     tokens<const A>(in.v, h).from(j),
                                     tokens_or_null<const A>(in.key_decay, h),
                                     tokens_or_null<const A>(in.value_decay, h).from(j),
                                     {gate.data, gate.stride},
                                     tokens<A>(out, h).from(j),
                                     0};
    if constexpr (NV == 4)
      scan.template run<1, true>(0);
    else
      scan.run_chunks(size.L, kept.mutable_data_ptr<A>() + h * chunks * size.Dk * size.Dv + j, size.Dv);
    block.finish();
  });)
  return {out.to(in.given), final, kept};
}

// A block of columns in the backward pass: two vectors where there are the registers for it.
inline int64_t backward_width(const Sizes& size, at::ScalarType type) {
  const int64_t lanes = type == at::kDouble ? kLanes<double> : kLanes<float>;
  return kTokens == 4 && size.Dk > lanes ? 2 * lanes : lanes;
}

template <typename A>
auto scratch(int64_t count) {
  const auto release = [](A* p) { ::operator delete(p, std::align_val_t{kVectorBytes}); };
  void* p = ::operator new(count * sizeof(A), std::align_val_t{kVectorBytes});
  return std::unique_ptr<A, decltype(release)>(static_cast<A*>(p), release);
}

// Gradients of q, k, v, key_decay (or gate), value_decay (or nothing) and the initial state.
template <bool kGated>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> decay_backward(const DecayInputs& in, const Tensor& kept, const std::optional<Tensor>& grad_out,
                                     const std::optional<Tensor>& grad_state) {
  const Sizes& size = in.size;
  const int64_t heads = size.B * size.H, chunks = size.L / kChunk;
  check("kept", kept, {size.B, size.H, chunks, size.Dk, size.Dv}, in.type);
  TORCH_CHECK(kept.is_contiguous(), "kept must be contiguous");
  check("grad_out", grad_out, size.values(), in.given);
  check("grad_state", grad_state, size.state(), in.type);
  const Tensor d_out = grad_out ? prepare(*grad_out, in.type) : at::zeros(size.values(), in.q.options());
  const Tensor d_final = grad_state.value_or(Tensor()), none;
  const Tensor d_q = in.empty(size.keys()), d_k = in.empty(size.keys());
  const Tensor d_key_decay = kGated ? none : in.empty(size.keys());
  const Tensor d_initial = in.initial.defined() ? in.empty(size.state()) : none;
  // Where there are fewer heads than threads, the blocks of a head are shared out, and sums over them come in parts.
  const int64_t width = backward_width(size, in.type), blocks = std::max<int64_t>(1, (size.Dk + width - 1) / width);
  const int64_t wanted = heads ? (at::get_num_threads() + heads - 1) / heads : 1, parts = std::min(wanted, blocks);
  const Tensor d_v = in.empty({parts, size.B, size.H, size.L, size.Dv});
  const Tensor d_value_decay = kGated ? none : in.empty(d_v.sizes());
  const Tensor d_gate = kGated ? in.empty({parts, size.B, size.H, size.L}) : none;
  FWP_DISPATCH(in.type, {
    const auto run_block = [&](int64_t h, int64_t part, int64_t i, bool add, auto vectors, A* work) {
      constexpr int NV = decltype(vectors)::value;
      const auto of_part = [&](const Tensor& x) { return x.defined() ? x.select(0, part) : x; };
      const auto gate = tokens_or_null<const A>(in.gate, h);
      const auto d_gate_ = tokens_or_null<A>(of_part(d_gate), h);
      DecayBackward<A, NV, kGated>{size.L,
                                   size.Dv,
                                   std::min(width, size.Dk - i),
                                   tokens<const A>(in.q, h).from(i),
                                   tokens<const A>(in.k, h).from(i),
                                   tokens_or_null<const A>(in.key_decay, h).from(i),
                                   tokens<const A>(in.v, h),
                                   tokens_or_null<const A>(in.value_decay, h),
                                   tokens<const A>(d_out, h),
                                   {gate.data, gate.stride},
                                   tokens<A>(d_q, h).from(i),
                                   tokens<A>(d_k, h).from(i),
                                   tokens_or_null<A>(d_key_decay, h).from(i),
                                   tokens<A>(of_part(d_v), h),
                                   tokens_or_null<A>(of_part(d_value_decay), h),
                                   {d_gate_.data, d_gate_.stride},
                                   add,
                                   matrix<const A>(in.initial, h, i, true),
                                   matrix<const A>(d_final, h, i, true),
                                   matrix<A>(d_initial, h, i, true),
                                   kept.const_data_ptr<A>() + h * chunks * size.Dk * size.Dv + i * size.Dv,
                                   size.Dk * size.Dv,
                                   work}
          .run();
    };
    const int64_t grain = std::max<int64_t>(1, (1 << 18) * parts / std::max<int64_t>(1, size.L * size.Dk * size.Dv));
    at::parallel_for(0, heads * parts, grain, [&](int64_t begin, int64_t end) {
      const auto work = scratch<A>(DecayBackward<A, 1, kGated>::scratch(size.Dv) * width / kLanes<A>);
      for (int64_t item = begin; item < end; ++item) {
        const int64_t h = item / parts, part = item % parts, first = part * blocks / parts;
        for (int64_t b = first; b < (part + 1) * blocks / parts; ++b) {
          if (width == kLanes<A>)
            run_block(h, part, b * width, b > first, std::integral_constant<int, 1>{}, work.get());
          else
            run_block(h, part, b * width, b > first, std::integral_constant<int, 2>{}, work.get());
        }
      }
    });
  })
  const auto total = [&](const Tensor& x) { return x.defined() ? (parts == 1 ? x.select(0, 0) : x.sum(0)).to(in.given) : x; };
  const Tensor d_rate = kGated ? total(d_gate) : d_key_decay.to(in.given);
  return {d_q.to(in.given), d_k.to(in.given), total(d_v), d_rate, total(d_value_decay), or_nothing(d_initial, in.q)};
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
