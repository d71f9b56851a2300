// The delta rule of launchers.h: which scans its operators consist of.
#pragma once

#include "delta.cuh"
#include "delta_chunks.cuh"
#include "launch.cuh"

namespace fwp::cuda {

namespace detail {

// On the tensor cores, or else not: DeltaForward, or in reverse DeltaBackwardValues.
template <bool kReverse, typename Scan>
const char* launch_either(const Scan& scan, const Output& read, const Output& error, Type type, void* stream) {
  if (!choose_chunks(scan.size, type)) return launch(scan, stream);
  return with_rows(scan.size.rows, [&](auto rows) {
    DeltaChunks<decltype(rows)::value, kReverse> chunks{};
    chunks.key = scan.inputs.rows[Scan::kKey];
    chunks.query = scan.inputs.rows[Scan::kQuery];
    chunks.value = scan.inputs.columns[0];
    chunks.beta = scan.inputs.scalars[0];
    chunks.initial = scan.initial;
    chunks.last = scan.last;
    chunks.read = read;
    chunks.error = error;
    return launch_chunks(chunks, scan.size, kReverse, stream);
  });
}

inline const char* launch_either(const DeltaForward<float>& scan, Type type, void* stream) {
  return launch_either<false>(scan, scan.out, scan.error, type, stream);
}
inline const char* launch_either(const DeltaBackwardValues<float>& scan, Type type, void* stream) {
  return launch_either<true>(scan, scan.d_v, scan.d_write, type, stream);
}
template <typename Scan>
const char* launch_either(const Scan& scan, Type, void* stream) {
  return launch(scan, stream);
}

}  // namespace detail

const char* delta_forward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens beta, const void* state,
                                 void* out, void* new_state, void* error) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const DeltaForward<A> scan{{make.along_keys(),  {},
                                {{make.input(k), make.input(q)}, {make.input(v)}, {make.input(beta)}},
                                make.matrix(state), make.matrix(new_state)},
                               make.output(out), make.raw(error)};
    return detail::launch_either(scan, call.type, call.stream);
  });
}

const char* delta_backward(const Call& call, Tokens q, Tokens k, Tokens beta, const void* state, Tokens error,
                                  Tokens grad_out, const void* grad_state, void* d_q, void* d_k, void* d_v,
                                  void* d_beta, void* d_state) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const Sizes& size = call.size;
    const Input query = make.input(q), key = make.input(k), rate = make.input(beta), d_out = make.input(grad_out);
    const Input e = make.in_state_type(error);
    char* const scratch = static_cast<char*>(call.workspace);
    void* const d_write = scratch;
    void* const half = detail::in_state_type(call.type) ? d_k
                                                        : scratch + detail::bytes_of_tokens(size, call.type, size.Dv);
    const Input write = make.scratch(d_write, size.Dv), first_half = make.scratch(half, size.Dk);
    const DeltaBackwardValues<A> values{{make.along_keys(),       {},
                                         {{key, query}, {d_out}, {rate}},
                                         make.matrix(grad_state), make.matrix(d_state)},
                                        make.output(d_v), make.raw(d_write)};
    const char* text = detail::launch_either(values, call.type, call.stream);
    if (!text)
      text = detail::launch(DeltaBackwardQueries<A>{{make.along_values(), {}, {{e, write, d_out}, {key}, {rate}},
                                                     make.transposed(state), {}},
                                                    make.output(d_q), make.raw(half), make.output(d_beta)},
                            call.stream);
    if (!text)
      text = detail::launch(DeltaBackwardKeys<A>{{make.along_values(), {},
                                                  {{e, write, d_out}, {query, key, first_half}, {rate}},
                                                  make.transposed(grad_state), {}},
                                                 make.output(d_k)},
                            call.stream);
    return text;
  });
}

}  // namespace fwp::cuda
