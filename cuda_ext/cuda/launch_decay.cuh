// The gated and decay rules of launchers.h: which scans their operators consist of.
#pragma once

#include "decay.cuh"
#include "launch.cuh"

namespace fwp::cuda {

template <typename A>
__global__ void __launch_bounds__(kThreadsPerBlock) token_sums_kernel(const TokenSums<A> sums) {
  sums.run();
}

namespace detail {

template <typename A, bool kGated>
const char* launch(const DecayBackward<A, kGated>& scan, void* stream) {
  using Scan = DecayBackward<A, kGated>;
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  const int states = scan.rebuilds ? Scan::kStates : 0;
  if (scan.size.rows > kWarp * kNarrow.rows)
    return launch_shape<Scan, kTall<A>.rows, 1>(scan, states, kGroup, gpu, stream);
  return launch_shape<Scan, kNarrow.rows, 1>(scan, states, kGroup, gpu, stream);
}

template <typename A>
const char* launch(const TokenSums<A>& sums, void* stream) {
  constexpr int kTokens = kThreadsPerBlock / kWarp;
  const int64_t blocks = (sums.tokens + kTokens - 1) / kTokens;
  if (blocks == 0) return nullptr;
  if (const char* error = check_blocks(blocks)) return error;
  return launch_kernel(token_sums_kernel<A>, {}, blocks, kThreadsPerBlock, 0, stream, sums);
}

template <bool kGated>
const char* forward_with_decay(const Call& call, Tokens q, Tokens k, Tokens v, Tokens key_decay, Tokens value_decay,
                               Tokens gate, const void* state, void* out, void* new_state, void* kept) {
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    DecayForward<A, kGated> scan{{make.along_keys()}};
    if constexpr (kGated)
      scan.inputs = {{make.input(k), make.input(q)}, {make.input(v)}, {make.input(gate)}};
    else
      scan.inputs = {{make.input(k), make.input(q), make.input(key_decay)}, {make.input(v), make.input(value_decay)}, {}};
    scan.initial = make.matrix(state);
    scan.last = make.matrix(new_state);
    scan.kept = make.matrix(kept);
    scan.out = make.output(out);
    return launch(scan, call.stream);
  });
}

}  // namespace detail

const char* gated_forward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens gate, const void* state,
                                 void* out, void* new_state, void* kept) {
  return detail::forward_with_decay<true>(call, q, k, v, {}, {}, gate, state, out, new_state, kept);
}

const char* decay_forward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens key_decay, Tokens value_decay,
                                 const void* state, void* out, void* new_state, void* kept) {
  return detail::forward_with_decay<false>(call, q, k, v, key_decay, value_decay, {}, state, out, new_state, kept);
}

const char* gated_backward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens gate, const void* state,
                                  const void* kept, Tokens grad_out, const void* grad_state, void* d_q, void* d_k,
                                  void* d_v, void* d_gate, void* d_state) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const Input query = make.input(q), key = make.input(k), value = make.input(v), d_out = make.input(grad_out);
    const Input g = make.input(gate);
    DecayBackward<A, true> values{make.along_keys()}, keys{make.along_values()};
    values.inputs = {{query, key}, {d_out, value}, {g}};
    values.rebuilds = false;
    values.d_last = make.matrix(grad_state);
    values.d_initial = make.matrix(d_state);
    values.d_w = make.output(d_v);
    keys.inputs = {{d_out, value}, {query, key}, {g}};
    keys.rebuilds = true;
    keys.initial = make.transposed(state);
    keys.kept = make.transposed(kept);
    keys.d_last = make.transposed(grad_state);
    keys.d_x = make.output(d_q);
    keys.d_w = make.output(d_k);
    keys.d_f = make.raw(call.workspace);
    const char* error = detail::launch(values, call.stream);
    if (!error) error = detail::launch(keys, call.stream);
    if (!error) error = detail::launch(TokenSums<A>{static_cast<const A*>(call.workspace),
                                                    call.size.B * call.size.H * call.size.L, int(call.size.Dk),
                                                    make.output(d_gate)},
                                       call.stream);
    return error;
  });
}

const char* decay_backward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens key_decay, Tokens value_decay,
                                  const void* state, const void* kept, Tokens grad_out, const void* grad_state,
                                  void* d_q, void* d_k, void* d_v, void* d_key_decay, void* d_value_decay,
                                  void* d_state) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const Input of_keys[] = {make.input(q), make.input(k), make.input(key_decay)};
    const Input of_values[] = {make.input(grad_out), make.input(v), make.input(value_decay)};
    DecayBackward<A, false> values{make.along_keys()}, keys{make.along_values()};
    for (int i = 0; i < 3; ++i) {
      values.inputs.rows[i] = keys.inputs.columns[i] = of_keys[i];
      values.inputs.columns[i] = keys.inputs.rows[i] = of_values[i];
    }
    values.rebuilds = keys.rebuilds = true;
    values.initial = make.matrix(state), keys.initial = make.transposed(state);
    values.kept = make.matrix(kept), keys.kept = make.transposed(kept);
    values.d_last = make.matrix(grad_state), keys.d_last = make.transposed(grad_state);
    values.d_initial = make.matrix(d_state);
    values.d_w = make.output(d_v), keys.d_w = make.output(d_k);
    values.d_f = make.output(d_value_decay), keys.d_f = make.output(d_key_decay);
    keys.d_x = make.output(d_q);
    const char* error = detail::launch(values, call.stream);
    return error ? error : detail::launch(keys, call.stream);
  });
}

}  // namespace fwp::cuda
