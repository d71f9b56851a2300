// The launch of maps.
#pragma once

#include "launch_recurrent.cuh"
#include "map.cuh"

namespace fwp::cuda {

template <typename Pass>
__global__ void __launch_bounds__(kMostMapThreads) map_kernel(const Pass pass) {
  pass.run();
}

namespace detail {

constexpr int64_t kBlocksOfMaps = 32;  // for each multiprocessor, at most; a block then has several tokens

// Whether vectors can be copied in pieces.
template <typename T, typename... Strides>
bool have_pieces(const void* data, Strides... strides) {
  return data && reinterpret_cast<uintptr_t>(data) % alignof(Numbers<T, kPiece>) == 0 && (... && (strides % kPiece == 0));
}
template <typename T>
bool have_pieces(const Vectors& x, int width) {
  return have_pieces<T>(x.data, x.batch, x.token, x.step, x.head, width);
}

// Null if the kernels take this projection.
inline const char* check(const Projection& given) {
  if (given.width > kGreatestSize || given.features > kGreatestSize)
    return say("the CUDA kernels map vectors of up to %lld elements to as many features, got %d and %d",
               (long long)kGreatestSize, given.width, given.features);
  return nullptr;
}

template <typename T, bool kBackward>
const char* launch_map(const Projection& given, T* to) {
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  if (const char* error = check(given)) return error;
  const int rows = (1 + given.steps) * given.heads;
  MapPass<T, kBackward> pass{given, MapLayout(rows, given.width, given.features, kBackward)};
  pass.to = to;
  pass.wide = have_pieces<T>(given.data, given.batch, given.token, given.width) &&
              (!kBackward || have_pieces<T>(to, given.W));
  pass.wide_features = have_pieces<T>(given.queries, given.features) && have_pieces<T>(given.keys, given.features);
  int column = rows * given.width;
  for (int n = 0; n < given.parts; ++n) {
    const Part& part = given.part[n];
    const bool copied = kBackward && part.activation == Activation::none && have_pieces<T>(part.vectors, part.width);
    pass.piece[n] = copied && have_pieces<T>(to, given.W, column) ? kPiece : 1;
    pass.begin[n] = column, column += part.steps * part.heads * part.width;
  }
  const size_t bytes = pass.numbers() * sizeof(typename MapPass<T, kBackward>::Real);
  if (bytes > gpu.shared_bytes)
    return say("this map takes %zu KiB of shared memory, of which this GPU has %zu KiB for a block", (bytes + 1023) / 1024,
               gpu.shared_bytes / 1024);
  pass.blocks = std::min<int64_t>(given.B * given.L, kBlocksOfMaps * gpu.multiprocessors);
  return launch_blocks(map_kernel<MapPass<T, kBackward>>, gpu, pass.blocks, pass.layout.threads, bytes, given.stream, pass);
}

template <bool kBackward>
const char* launch_map(const Projection& given, void* to) {
  switch (given.type) {
    case Type::float32: return launch_map<float, kBackward>(given, static_cast<float*>(to));
    case Type::float64: return launch_map<double, kBackward>(given, static_cast<double*>(to));
    case Type::bfloat16: return launch_map<Bfloat16, kBackward>(given, static_cast<Bfloat16*>(to));
    default: return launch_map<Float16, kBackward>(given, static_cast<Float16*>(to));
  }
}

}  // namespace detail
}  // namespace fwp::cuda
