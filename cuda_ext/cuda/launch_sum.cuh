// The sum rule: which scans its passes consist of.
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

inline const char* sum_forward(const Call& call, const Inputs& in, const Outputs& to) {
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const SumScan<A> scan{{make.along_keys(), {}, {{in.k, in.q}, {in.v}, {}}, make.matrix(in.state), make.matrix(to.state)},
                          false, to.out};
    return launch_either(scan, call.type, call.stream);
  });
}

inline const char* sum_backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to) {
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const Tokens& d_out = more.d_out;
    const SumScan<A> queries{
        {make.along_values(), {}, {{in.v, d_out}, {in.k}, {}}, make.transposed(in.state), {}}, false, to.q};
    const SumScan<A> keys{
        {make.along_values(), {}, {{d_out, in.v}, {in.q}, {}}, make.transposed(more.d_state), {}}, true, to.k};
    const SumScan<A> values{
        {make.along_keys(), {}, {{in.q, in.k}, {d_out}, {}}, make.matrix(more.d_state), make.matrix(to.state)}, true, to.v};
    const char* error = nullptr;
    for (const SumScan<A>* scan : {&queries, &keys, &values})
      if (!error) error = launch_either(*scan, call.type, call.stream);
    return error;
  });
}

}  // namespace detail

}  // namespace fwp::cuda
