// The scan of the sum rule on the tensor cores: with P = Q K^T up to its diagonal,
//   out = Q S + P V        S += K^T V
// S and P go into products in two parts, which leaves an error far below the rounding of out; what S adds up are products
// of the inputs, so it stays as exact as float32 is.
#pragma once

#include "chunks.cuh"

namespace fwp::cuda {

template <int kRows>
struct SumChunks : ChunkScan<kRows> {
  using Scan = ChunkScan<kRows>;
  using Scan::kColumnLine;

  Output out;

  static size_t shared_bytes(int warps) { return kBuffers * sizeof(Bfloat16) * Scan::buffer_numbers(warps, 0); }

  FWP_DEVICE void run() const {
    this->scan([&](int64_t n) { this->fill(this->buffer(n, 0), n, [](int, int, Bfloat16) {}); },
               [&](int64_t n, typename Scan::State& state) { use(n, state); });
  }

 private:
  FWP_DEVICE void use(int64_t n, typename Scan::State& state) const {
    const typename Scan::Buffer chunk = this->buffer(n, 0);
    float scores[2][4], read[2][4];
    uint32_t value[1][4];
    this->multiply_tokens(chunk.query, chunk.key, true, scores);
    clear(read);
    this->template read_state<2>(state, chunk.query, read);
    this->load_left(chunk.value_column + this->own_column() * kColumnLine, kColumnLine, value[0]);
    this->template read_tokens<1, 2>(value, scores, read);
    this->store_read(out, n, read);
    this->template write_state<1>(value, chunk.key_column, 1, state);
  }
};

}  // namespace fwp::cuda
