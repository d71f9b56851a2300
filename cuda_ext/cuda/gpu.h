// The properties of a GPU on which the plans of the kernels depend.
#pragma once

#include <cstddef>
#include <cstdint>

#include "launchers.h"

namespace fwp::cuda {

struct Gpu {
  int multiprocessors = 1;
  size_t shared_bytes = 0;  // of shared memory per block, at most
};

}  // namespace fwp::cuda
