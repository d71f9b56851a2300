// The sum of partial results of blocks, in their order, so that it does not depend on the number of threads.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace fwp::cpu {

// parts (blocks, n), contiguous -> (n,).
template <typename A>
at::Tensor sum_rows(const at::Tensor& parts) {
  const int64_t n = parts.size(1);
  const at::Tensor sum = at::zeros({n}, parts.options());
  A* to = sum.mutable_data_ptr<A>();
  const A* from = parts.const_data_ptr<A>();
  for (int64_t row = 0; row < parts.size(0); ++row)
    for (int64_t i = 0; i < n; ++i) to[i] += from[row * n + i];
  return sum;
}

}  // namespace fwp::cpu
