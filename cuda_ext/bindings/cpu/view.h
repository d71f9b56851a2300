// A tensor as the CPU kernels see it. ATen's headers would take eight seconds in each of their sources.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>

#include "../../cpu/state_block.h"
#include "../../rule.h"

namespace fwp::cpu {

struct View {
  char* data = nullptr;
  int64_t number_bytes = 0;  // zero if the tensor is undefined
  int dims = 0;
  std::array<int64_t, 5> sizes = {}, strides = {};
  int64_t sharing = 1;  // heads that read the same numbers
  std::shared_ptr<void> owner = {};  // of memory that a kernel has asked for

  bool defined() const { return number_bytes > 0; }
  View narrow(int dim, int64_t begin, int64_t length) const {
    View part = *this;
    part.data = address(data, begin * strides[dim] * number_bytes);
    part.sizes[dim] = length;
    return part;
  }
  View select(int dim, int64_t index) const {
    View part = narrow(dim, index, 1);
    std::copy(sizes.begin() + dim + 1, sizes.end(), part.sizes.begin() + dim);
    std::copy(strides.begin() + dim + 1, strides.end(), part.strides.begin() + dim);
    --part.dims;
    return part;
  }
  // Head h of all sequences.
  View head(int64_t h) const {
    if (!defined()) return *this;
    View one = narrow(0, h / sizes[1], 1).narrow(1, h % sizes[1] / sharing, 1);
    one.sharing = 1;
    return one;
  }
};

// New contiguous memory, from PyTorch.
View empty(const std::array<int64_t, 5>& sizes, int dims, int64_t number_bytes);

inline View empty(const std::array<int64_t, 4>& sizes, int64_t number_bytes) {
  return empty({sizes[0], sizes[1], sizes[2], sizes[3]}, 4, number_bytes);
}

// `length` tokens from `first` on, of `batches` sequences from `batch` on. An undefined tensor stays undefined.
inline View tokens_of(const View& x, int64_t batch, int64_t batches, int64_t first, int64_t length) {
  return x.defined() ? x.narrow(0, batch, batches).narrow(2, first, length) : x;
}

using TokenViews = TokenTensorsOf<View>;

inline TokenViews tokens_of(const TokenViews& all, int64_t batch, int64_t batches, int64_t first, int64_t length) {
  return all.map([&](const View& x) { return tokens_of(x, batch, batches, first, length); });
}

}  // namespace fwp::cpu
