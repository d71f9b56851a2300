// Rows of numbers in memory, and the sum of partial results of blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace fwp::cpu {

// Whether the numbers of each row lie next to each other. The stride of a row of one number, or of none, has no meaning.
inline bool has_dense_rows(const at::Tensor& x) { return x.stride(-1) == 1 || x.size(-1) < 2 || x.numel() == 0; }

// parts (blocks, n), contiguous -> (n,), in the order of the blocks: it does not depend on the number of threads.
template <typename Real>
at::Tensor sum_rows(const at::Tensor& parts) {
  const int64_t n = parts.size(1);
  const at::Tensor sum = at::zeros({n}, parts.options());
  Real* to = sum.mutable_data_ptr<Real>();
  const Real* from = parts.const_data_ptr<Real>();
  for (int64_t row = 0; row < parts.size(0); ++row)
    for (int64_t i = 0; i < n; ++i) to[i] += from[row * n + i];
  return sum;
}

}  // namespace fwp::cpu
