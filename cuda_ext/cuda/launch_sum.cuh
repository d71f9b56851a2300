// The sum rule: the scans of its passes.
#pragma once

#include "launch_chunks.cuh"
#include "sum.cuh"

namespace fwp::cuda {

namespace detail {

inline const char* sum_forward(const Call& call, const Inputs& in, const Outputs& to) {
  if (!call.first && choose_chunks(chunk_size(call), call.type)) return chunk_forward<false, false>(call, in, to);
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const SumScan<A> scan{
        {make.along_keys(), {}, {{in.k, in.q, in.v}, {}, {to.out}}, make.matrix(in.state), make.matrix(to.state)}, false};
    return launch(scan, call.stream);
  });
}

inline const char* sum_backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to) {
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  if (!call.first && choose_chunks_backward<false, false>(chunk_size(call), call.type, gpu))
    return chunk_backward<false, false>(call, in, more, to, gpu);
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const Tokens& d_out = more.d_out;
    const SumScan<A> queries{
        {make.along_values(), {}, {{in.v, d_out, in.k}, {}, {to.q}}, make.transposed(in.state), {}}, false};
    const SumScan<A> keys{
        {make.along_values(), {}, {{d_out, in.v, in.q}, {}, {to.k}}, make.transposed(more.d_state), {}}, true};
    const SumScan<A> values{
        {make.along_keys(), {}, {{in.q, in.k, d_out}, {}, {to.v}}, make.matrix(more.d_state), make.matrix(to.state)},
        true};
    const char* error = nullptr;
    for (const SumScan<A>* scan : {&queries, &keys, &values})
      if (!error) error = launch(*scan, call.stream);
    return error;
  });
}

}  // namespace detail

}  // namespace fwp::cuda
