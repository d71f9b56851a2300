// The sum rule of launchers.h: which scans its operators consist of.
#pragma once

#include "sum.cuh"
#include "launch.cuh"
#include "sum_chunks.cuh"

namespace fwp::cuda {

namespace detail {

// On the tensor cores, or else not.
template <typename A>
const char* launch_either(const SumScan<A>& scan, Type type, void* stream) {
  if constexpr (sizeof(A) == 4)
    if (choose_chunks(scan.size, type))
      return with_rows(scan.size.rows, [&](auto rows) {
        SumChunks<decltype(rows)::value> chunks{};
        chunks.key = scan.inputs.rows[SumScan<A>::kKey];
        chunks.query = scan.inputs.rows[SumScan<A>::kQuery];
        chunks.value = scan.inputs.columns[0];
        chunks.initial = scan.initial;
        chunks.last = scan.last;
        chunks.out = scan.out;
        return launch_chunks(chunks, scan.size, scan.reverse, stream);
      });
  return launch(scan, stream);
}

}  // namespace detail

const char* sum_forward(const Call& call, Tokens q, Tokens k, Tokens v, const void* state, void* out,
                               void* new_state) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const SumScan<A> scan{{make.along_keys(),  {},
                           {{make.input(k), make.input(q)}, {make.input(v)}, {}},
                           make.matrix(state), make.matrix(new_state)},
                          false, make.output(out)};
    return detail::launch_either(scan, call.type, call.stream);
  });
}

const char* sum_backward(const Call& call, Tokens q, Tokens k, Tokens v, const void* state, Tokens grad_out,
                                const void* grad_state, void* d_q, void* d_k, void* d_v, void* d_state) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const Input query = make.input(q), key = make.input(k), value = make.input(v), d_out = make.input(grad_out);
    const SumScan<A> queries{{make.along_values(), {}, {{value, d_out}, {key}, {}}, make.transposed(state), {}},
                             false, make.output(d_q)};
    const SumScan<A> keys{{make.along_values(), {}, {{d_out, value}, {query}, {}}, make.transposed(grad_state), {}},
                          true, make.output(d_k)};
    const SumScan<A> values{{make.along_keys(),       {},
                             {{query, key}, {d_out}, {}},
                             make.matrix(grad_state), make.matrix(d_state)},
                            true, make.output(d_v)};
    const char* error = nullptr;
    for (const SumScan<A>* scan : {&queries, &keys, &values})
      if (!error) error = detail::launch_either(*scan, call.type, call.stream);
    return error;
  });
}

}  // namespace fwp::cuda
