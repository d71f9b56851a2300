#include "../launch.cuh"

template struct fwp::cuda::Passes<fwp::Rule::gated_delta>;
