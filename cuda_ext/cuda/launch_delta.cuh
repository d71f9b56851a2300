// The delta rule: which scans its passes consist of.
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

inline const char* delta_forward(const Call& call, const Inputs& in, const Outputs& to) {
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const DeltaForward<A> scan{
        {make.along_keys(), {}, {{in.k, in.q}, {in.v}, {in.rate}}, make.matrix(in.state), make.matrix(to.state)},
        to.out, make.raw(to.retrieved)};
    return launch_either(scan, call.type, call.stream);
  });
}

// d_write, and the half of d_k where d_k itself is not in the state's type.
inline size_t delta_workspace(const Sizes& size, Type type) {
  return bytes_of_tokens(size, type, size.Dv) + (in_state_type(type) ? 0 : bytes_of_tokens(size, type, size.Dk));
}

inline const char* delta_backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to) {
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    Workspace workspace(call);
    void* const d_write = workspace.tokens(call.size.Dv);
    void* const half = in_state_type(call.type) ? to.k.data : workspace.tokens(call.size.Dk);
    const Tokens write = make.scratch(d_write, call.size.Dv), first_half = make.scratch(half, call.size.Dk);
    const Tokens &error = more.retrieved, &d_out = more.d_out;
    const DeltaBackwardValues<A> values{
        {make.along_keys(), {}, {{in.k, in.q}, {d_out}, {in.rate}}, make.matrix(more.d_state), make.matrix(to.state)},
        to.v, make.raw(d_write)};
    const DeltaBackwardQueries<A> queries{
        {make.along_values(), {}, {{error, write, d_out}, {in.k}, {in.rate}}, make.transposed(in.state), {}},
        to.q, make.raw(half), to.rate};
    const DeltaBackwardKeys<A> keys{
        {make.along_values(), {}, {{error, write, d_out}, {in.q, in.k, first_half}, {in.rate}},
         make.transposed(more.d_state), {}},
        to.k};
    const char* text = launch_either(values, call.type, call.stream);
    if (!text) text = launch(queries, call.stream);
    return text ? text : launch(keys, call.stream);
  });
}

}  // namespace detail

}  // namespace fwp::cuda
