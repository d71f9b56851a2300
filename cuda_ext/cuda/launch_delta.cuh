// The delta rule: the scans of its passes.
#pragma once

#include "delta.cuh"
#include "launch_chunks.cuh"

namespace fwp::cuda {

namespace detail {

inline const char* delta_forward(const Call& call, const Inputs& in, const Outputs& to) {
  if (!call.first && choose_chunks(chunk_size(call), call.type)) return chunk_forward<true, false>(call, in, to);
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const DeltaForward<A> scan{
        {make.along_keys(), {}, {{in.k, in.q, in.v}, {in.rate}, {to.out, make.raw(to.retrieved)}},
         make.matrix(in.state), make.matrix(to.state)}};
    return launch(scan, call.stream);
  });
}

// Memory for d_write and for half of d_k. On tensor cores, for states instead.
inline size_t delta_workspace(const Sizes& size, Type type, bool is_backward) {
  const size_t chunks = chunk_workspace<true, false>(size, type, is_backward);
  if (!is_backward) return chunks;
  return std::max(bytes_of_tokens(size, type, size.Dv) + bytes_of_tokens(size, type, size.Dk), chunks);
}

inline const char* delta_backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to) {
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  if (!call.first && choose_chunks_backward<true, false>(chunk_size(call), call.type, gpu))
    return chunk_backward<true, false>(call, in, more, to, gpu);
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    Workspace workspace(call);
    void* const d_write = workspace.tokens(call.size.Dv);
    void* const half = workspace.tokens(call.size.Dk);
    const Tokens write = make.scratch(d_write, call.size.Dv), first_half = make.scratch(half, call.size.Dk);
    const Tokens &error = more.retrieved, &d_out = more.d_out;
    const DeltaBackwardValues<A> values{
        {make.along_keys(), {}, {{in.k, in.q, d_out}, {in.rate}, {to.v, make.raw(d_write)}},
         make.matrix(more.d_state), make.matrix(to.state)}};
    const DeltaBackwardQueries<A> queries{
        {make.along_values(), {}, {{error, write, d_out, in.k}, {in.rate}, {to.q, make.raw(half)}, to.rate},
         make.transposed(in.state), {}}};
    const DeltaBackwardKeys<A> keys{
        {make.along_values(), {}, {{error, write, d_out, in.q, in.k, first_half}, {in.rate}, {to.k}},
         make.transposed(more.d_state), {}}};
    const char* text = launch(values, call.stream);
    if (!text) text = launch(queries, call.stream);
    return text ? text : launch(keys, call.stream);
  });
}

}  // namespace detail

}  // namespace fwp::cuda
