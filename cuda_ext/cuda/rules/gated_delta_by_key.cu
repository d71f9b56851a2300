#include "../launch.cuh"

template struct fwp::cuda::Passes<fwp::Rule::gated_delta_by_key>;
template struct fwp::cuda::detail::ChunksByKey<fwp::Rule::gated_delta_by_key>;
