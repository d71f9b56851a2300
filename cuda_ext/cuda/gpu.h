// What the plans of the kernels depend on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "launchers.h"

namespace fwp::cuda {

struct Gpu {
  int multiprocessors = 1;
  size_t shared_bytes = 0;  // of shared memory, that a block may have
};

}  // namespace fwp::cuda
