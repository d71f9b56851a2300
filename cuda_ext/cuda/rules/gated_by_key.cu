#include "../launch.cuh"

template struct fwp::cuda::Passes<fwp::Rule::gated_by_key>;
template struct fwp::cuda::detail::ChunksByKey<fwp::Rule::gated_by_key>;

namespace fwp::cuda::detail {

const char* keep_states(const Call& call, const Inputs& in, const InputArray& written, float* kept, const Gpu& gpu) {
  return with_rows(call.size.Dk, [&](auto rows) {
    using Pass = ChunkKeyStates<decltype(rows)::value, Rule::gated_by_key, kExactParts, false>;
    const ScanSize size = scan_size(call);
    auto pass = make_key_states<Pass>(size, in, written, nullptr, size.columns, gpu);
    pass.initial = matrices<float>(in.state, call.size), pass.kept = kept;
    return launch_chunks(pass, gpu, call.stream);
  });
}

}  // namespace fwp::cuda::detail
