#include "../launch.cuh"

template struct fwp::cuda::Passes<fwp::Rule::sum>;
