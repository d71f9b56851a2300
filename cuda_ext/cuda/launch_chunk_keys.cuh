// The passes on the tensor cores with decays by key.
#pragma once

#include "chunk_key_gradients.cuh"
#include "chunk_key_states.cuh"
#include "launch_chunks.cuh"

namespace fwp::cuda {

namespace detail {

template <typename Pass>
void set_keys(Pass& pass, const ScanSize& size, const Inputs& in) {
  set_size(pass, size);
  pass.query = {in.q, size.rows}, pass.key = {in.k, size.rows};
  pass.rate = {in.rate, 1}, pass.decay = {in.key_decay, size.rows};
}

// A pass with a block for each chunk.
template <typename Pass>
Pass make_of_chunks(const ScanSize& size, const Inputs& in) {
  Pass pass{};
  set_keys(pass, size, in);
  pass.log_segments = 0, pass.chunks_of_segment = 1;
  pass.slabs = int(pass.chunks()), pass.warps = Pass::kWarps;
  return pass;
}

// A result with one vector of Dv per token, as an input.
inline Tokens contiguous_tokens(const Target& x, const Sizes& size) {
  return {x.data, size.H * size.L * size.Dv, size.L * size.Dv, size.Dv, x.type};
}

// A pass from chunk to chunk, with its scores.
template <typename Pass>
Pass make_key_states(const ScanSize& size, const Inputs& in, const Tokens& value, const Bfloat16* scores, int columns,
                     const Gpu& gpu) {
  Pass pass{};
  set_keys(pass, size, in);
  set_columns(pass, columns, gpu);
  pass.value = {value, size.columns}, pass.scores = scores;
  return pass;
}

// Device memory in bytes, and its parts.
template <int kRows, bool kErases>
struct KeyMemory {
  SegmentMemory<kRows> segments;
  Bfloat16* scores;
  float* gradients;  // of the states after each chunk
  size_t bytes;

  KeyMemory(const ScanSize& size, void* from, bool is_backward) : segments(sized(size), from) {
    const int64_t chunks = size.heads * sized(size).chunks();
    scores = reinterpret_cast<Bfloat16*>(segments.take(chunks * ChunkKeyPass<kRows, kErases>::kScoreMatrices * kMatrix / 2));
    gradients = segments.take(is_backward ? chunks * size.rows * size.columns : 0);
    bytes = reinterpret_cast<size_t>(segments.next) - reinterpret_cast<size_t>(from);
  }

 private:
  static ChunkKeyScores<kRows, kErases> sized(const ScanSize& size) {
    ChunkKeyScores<kRows, kErases> pass{};
    set_size(pass, size);
    return pass;
  }
};

template <bool kErases>
size_t chunk_keys_workspace(const Sizes& sizes, bool is_backward) {
  const ScanSize size = chunk_size(sizes);
  return with_rows(size.rows, [&](auto rows) {
    return KeyMemory<decltype(rows)::value, kErases>(size, nullptr, is_backward).bytes;
  });
}

// Shared memory of a pass from chunk to chunk, at most.
template <typename Pass>
size_t key_states_bytes(const ScanSize& size, bool ends) {
  Pass pass{};
  pass.size = size;
  const int columns = ends ? pass.ends_columns() : size.columns;
  pass.warps = at_least_power_of_two((int64_t(columns) + kBlock - 1) / kBlock, kChunkWarps);
  return chunk_bytes(pass);
}

template <bool kErases>
bool choose_chunk_keys(const ScanSize& size, Type type, const Gpu& gpu) {
  return choose_chunks(size, type) && with_rows(size.rows, [&](auto rows) {
           constexpr int kRows = decltype(rows)::value;
           const size_t most = std::max({key_states_bytes<ChunkKeyStates<kRows, kErases, false>>(size, false),
                                         key_states_bytes<ChunkKeyStates<kRows, kErases, false, true>>(size, true),
                                         key_states_bytes<ChunkKeyStates<kRows, kErases, true>>(size, false),
                                         key_states_bytes<ChunkKeyStates<kRows, kErases, true, true>>(size, true),
                                         chunk_bytes(ChunkKeyScores<kRows, kErases>{}),
                                         chunk_bytes(make_of_chunks<ChunkKeyGradients<kRows, kErases>>(size, {}))});
           return most <= gpu.shared_bytes;
         });
}

// Compute the scores, then run the pass from chunk to chunk.
template <int kRows, bool kErases, bool kReverse>
const char* run_key_states(ChunkKeyStates<kRows, kErases, kReverse>& pass, const ScanSize& size, const Inputs& in,
                           const Tokens& value, const KeyMemory<kRows, kErases>& memory, const Gpu& gpu, void* stream) {
  auto scores = make_of_chunks<ChunkKeyScores<kRows, kErases>>(size, in);
  scores.scores = memory.scores;
  if (const char* error = launch_chunks(scores, gpu, stream)) return error;
  if (pass.log_segments > 0) {
    using Ends = ChunkKeyStates<kRows, kErases, kReverse, true>;
    const auto ends = make_key_states<Ends>(size, in, value, memory.scores, pass.ends_columns(), gpu);
    const Transition transition = kErases ? Transition::matrix : Transition::rows;
    const char* const error = find_boundaries(ends, memory.segments, pass.initial, transition, kReverse, gpu, stream);
    if (error) return error;
    pass.initial = memory.segments.matrices(size);
  }
  return launch_chunks(pass, gpu, stream);
}

template <bool kErases>
const char* chunk_keys_forward(const Call& call, const Inputs& in, const Outputs& to, const Gpu& gpu) {
  const ScanSize size = chunk_size(call);
  return with_rows(size.rows, [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const KeyMemory<kRows, kErases> memory(size, call.workspace, false);
    auto pass = make_key_states<ChunkKeyStates<kRows, kErases, false>>(size, in, in.v, memory.scores, size.columns, gpu);
    pass.initial = Maker<float>{call}.matrix(in.state);
    pass.last = static_cast<float*>(to.state), pass.kept = static_cast<float*>(to.kept);
    pass.out = to.out, pass.error = static_cast<float*>(to.retrieved);
    return run_key_states(pass, size, in, in.v, memory, gpu, call.stream);
  });
}

template <bool kErases>
const char* chunk_keys_backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to,
                                const Gpu& gpu) {
  const ScanSize size = chunk_size(call);
  return with_rows(size.rows, [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const KeyMemory<kRows, kErases> memory(size, call.workspace, true);
    auto pass = make_key_states<ChunkKeyStates<kRows, kErases, true>>(size, in, more.d_out, memory.scores, size.columns, gpu);
    pass.initial = Maker<float>{call}.matrix(more.d_state);
    pass.last = static_cast<float*>(to.state), pass.kept = memory.gradients, pass.out = to.v;
    if (const char* error = run_key_states(pass, size, in, more.d_out, memory, gpu, call.stream)) return error;
    auto gradients = make_of_chunks<ChunkKeyGradients<kRows, kErases>>(size, in);
    gradients.value = {kErases ? more.retrieved : in.v, size.columns}, gradients.d_out = {more.d_out, size.columns};
    gradients.d_value = {contiguous_tokens(to.v, call.size), size.columns};
    gradients.initial = static_cast<const float*>(in.state), gradients.kept = static_cast<const float*>(more.kept);
    gradients.gradients = memory.gradients;
    gradients.in_pairs = size.columns % 2 == 0 && reinterpret_cast<uintptr_t>(in.state) % 8 == 0 &&
                         reinterpret_cast<uintptr_t>(more.kept) % 8 == 0;
    gradients.d_q = to.q, gradients.d_k = to.k, gradients.d_rate = to.rate, gradients.d_decay = to.key_decay;
    return launch_chunks(gradients, gpu, call.stream);
  });
}

}  // namespace detail

}  // namespace fwp::cuda
