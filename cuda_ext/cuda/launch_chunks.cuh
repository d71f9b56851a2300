// The passes on the tensor cores: of sum, of the delta rule, and of the latter with decays by head.
#pragma once

#include "chunk_backward.cuh"
#include "chunk_forward.cuh"
#include "launch.cuh"

namespace fwp::cuda {

template <typename Pass>
__global__ void __launch_bounds__(kChunkWarps* kWarp, 1) chunk_kernel(const Pass pass) {
  pass.run();
}

namespace detail {

// Calls f with a constant no less than the rows, of those that the passes are made for.
template <typename F>
auto with_rows(int64_t rows, F f) {
  if (rows <= 16) return f(std::integral_constant<int, 16>{});
  if (rows <= 32) return f(std::integral_constant<int, 32>{});
  if (rows <= 64) return f(std::integral_constant<int, 64>{});
  return f(std::integral_constant<int, kMostRowsForChunks>{});
}

template <typename Pass>
size_t chunk_bytes(const Pass& pass) {
  Carver carver{nullptr};
  typename Pass::Memory(carver, pass);
  return reinterpret_cast<size_t>(carver.next);
}

template <typename Pass>
const char* launch_chunks(const Pass& pass, const Gpu& gpu, void* stream) {
  const int64_t blocks = pass.size.heads * pass.slabs;
  if (const char* error = check_blocks(blocks)) return error;
  return launch_kernel(chunk_kernel<Pass>, gpu, blocks, pass.warps * kWarp, chunk_bytes(pass), stream, pass);
}

inline ScanSize chunk_size(const Sizes& size, const bool* first = nullptr) {
  return {size.B * size.H, size.H, size.L, int(size.Dk), int(size.Dv), first};
}
inline ScanSize chunk_size(const Call& call) { return chunk_size(call.size, call.first); }

template <int kRows, bool kErases, bool kFades>
ChunkBackward<kRows, kErases, kFades> sized_backward(const ScanSize& size) {
  ChunkBackward<kRows, kErases, kFades> pass{};
  pass.size = size, pass.slabs = 1;
  pass.warps = at_least_power_of_two((int64_t(size.columns) + kBlock - 1) / kBlock, kChunkWarps);
  return pass;
}

// The backward pass has all columns of a head in one block, for gradients of keys sum over them, and needs more shared memory.
inline bool choose_chunks_backward(const ScanSize& size, Type type) {
  return choose_chunks(size, type) && size.columns <= kChunkWarps * kBlock;
}
template <bool kErases, bool kFades>
bool choose_chunks_backward(const ScanSize& size, Type type, const Gpu& gpu) {
  return choose_chunks_backward(size, type) && with_rows(size.rows, [&](auto rows) {
           return chunk_bytes(sized_backward<decltype(rows)::value, kErases, kFades>(size)) <= gpu.shared_bytes;
         });
}

// States before each chunk.
template <bool kFades>
size_t chunk_workspace(const Sizes& sizes, Type type) {
  const ScanSize size = chunk_size(sizes);
  if (!choose_chunks_backward(size, type)) return 0;
  return with_rows(size.rows, [&](auto rows) {
    const auto pass = sized_backward<decltype(rows)::value, kFades, kFades>(size);
    return size_t(size.heads * pass.chunks() * pass.kStateParts * pass.block_columns() * rows) * sizeof(Bfloat16);
  });
}

template <bool kErases, bool kFades>
const char* chunk_forward(const Call& call, const Inputs& in, const Outputs& to) {
  const Maker<float> make{call};
  const ScanSize size = chunk_size(call);
  Gpu gpu;
  if (const char* error = query(&gpu)) return error;
  return with_rows(size.rows, [&](auto rows) {
    ChunkForward<decltype(rows)::value, kErases, kFades> pass{};
    const ChunkPlan plan = choose_chunk_plan(size, kBlock, kChunkWarps, gpu.multiprocessors);
    pass.size = size, pass.warps = plan.warps, pass.slabs = plan.slabs;
    pass.query = {in.q, size.rows}, pass.key = {in.k, size.rows}, pass.value = {in.v, size.columns};
    pass.rate = {in.rate, 1}, pass.decay = {in.head_decay, 1};
    pass.initial = make.matrix(in.state), pass.last = make.matrix(to.state);
    pass.out = to.out, pass.error = static_cast<float*>(to.retrieved);
    return launch_chunks(pass, gpu, call.stream);
  });
}

template <bool kErases, bool kFades>
const char* chunk_backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to,
                           const Gpu& gpu) {
  const Maker<float> make{call};
  const ScanSize size = chunk_size(call);
  return with_rows(size.rows, [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const Brought value = kErases ? Brought{more.retrieved, size.columns} : Brought{in.v, size.columns};
    auto pass = sized_backward<kRows, kErases, kFades>(size);
    ChunkStates<kRows, kErases, kFades> before{};
    before.size = size, before.warps = pass.warps, before.slabs = 1;
    before.key = pass.key = {in.k, size.rows};
    before.value = pass.value = value;
    before.rate = pass.rate = {in.rate, 1};
    before.decay = pass.decay = {in.head_decay, 1};
    before.initial = make.matrix(in.state);
    before.states = static_cast<Bfloat16*>(call.workspace);
    pass.states = before.states;
    pass.query = {in.q, size.rows};
    pass.d_out = {more.d_out, size.columns};
    pass.d_last = make.matrix(more.d_state), pass.d_initial = make.matrix(to.state);
    pass.d_q = to.q, pass.d_k = to.k, pass.d_v = to.v, pass.d_rate = to.rate, pass.d_decay = to.head_decay;
    const char* const error = launch_chunks(before, gpu, call.stream);
    return error ? error : launch_chunks(pass, gpu, call.stream);
  });
}

}  // namespace detail

}  // namespace fwp::cuda
