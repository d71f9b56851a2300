// The passes on the tensor cores: of rules without decays, with decays by head, or by key.
#pragma once

#include <utility>

#include "chunk_forward.cuh"
#include "chunk_gradients.cuh"
#include "chunk_key_gradients.cuh"
#include "chunk_key_states.cuh"
#include "chunk_segments.cuh"
#include "launch_recurrent.cuh"

namespace fwp::cuda {

template <typename Pass>
__global__ void __launch_bounds__(Pass::kMostThreads, 1) chunk_kernel(const Pass pass) {
  pass.run();
}

namespace detail {

// Calls f with the smallest compiled row count, a constant, that is at least `rows`.
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
void set_size(Pass& pass, const ScanSize& size) {
  pass.size = size, pass.heads = std::max(1, int(size.heads_per_batch));
  pass.log_segments = Pass::kHasSegments ? choose_segments(size) : 0;
}

// Set as many slabs as fill the GPU with all segments of all heads.
template <typename Pass>
void set_columns(Pass& pass, int columns, const Gpu& gpu) {
  ScanSize size = pass.size;
  size.heads *= pass.segments(), size.columns = columns;
  const ChunkPlan plan = choose_chunk_plan(size, kBlock, Pass::kMostWarps, gpu.multiprocessors);
  pass.warps = plan.warps, pass.slabs = plan.slabs;
}

// Set as many teams as fit while all blocks run at once.
template <typename Pass>
void set_teams(Pass& pass, const Gpu& gpu) {
  const int64_t blocks = pass.size.heads * pass.segments() * pass.slabs.number;
  const int64_t at_once = (blocks + gpu.multiprocessors - 1) / gpu.multiprocessors;
  pass.log_team = log2_of(pass.warps * kWarp);
  const auto fits = [&](int teams) {
    pass.teams = teams;
    return teams * pass.warps * kWarp * at_once <= Pass::kMostThreads && chunk_bytes(pass) * at_once <= gpu.shared_bytes;
  };
  int teams = Pass::kMostTeams;
  while (teams > 1 && !fits(teams)) --teams;
  pass.teams = teams;
}

template <typename Pass>
const char* launch_chunks(const Pass& pass, const Gpu& gpu, void* stream) {
  const int64_t blocks = pass.size.heads * pass.segments() * pass.slabs.number;
  return launch_blocks(chunk_kernel<Pass>, gpu, blocks, pass.teams * pass.warps * kWarp, chunk_bytes(pass), stream, pass);
}

// Set all columns in one block.
template <typename Pass>
void set_all_columns(Pass& pass) {
  pass.slabs = 1;
  pass.warps = at_least_power_of_two((int64_t(pass.size.columns) + kBlock - 1) / kBlock, kChunkWarps);
}
template <int kRows, bool kErasesKey, bool kDecays>
ChunkBackward<kRows, kErasesKey, kDecays> sized_backward(const ScanSize& size) {
  ChunkBackward<kRows, kErasesKey, kDecays> pass{};
  set_size(pass, size);
  set_all_columns(pass);
  return pass;
}
template <int kRows, bool kErasesKey, bool kDecays>
ChunkGradients<kRows, kErasesKey, kDecays> sized_gradients(const ScanSize& size) {
  ChunkGradients<kRows, kErasesKey, kDecays> pass{};
  pass.size = size;
  set_all_columns(pass);
  pass.slabs = int(pass.chunks());  // a block for each chunk
  pass.gradients.columns = pass.states.columns = pass.block_columns();
  return pass;
}

// The backward pass has all columns of a head in one block, because gradients of keys sum over them. It needs more shared
// memory.
inline bool choose_chunks_backward(const ScanSize& size) {
  return choose_chunks(size) && size.columns <= kChunkWarps * kBlock;
}
template <bool kErasesKey, bool kDecays>
bool choose_chunks_backward(const ScanSize& size, const Gpu& gpu) {
  return choose_chunks_backward(size) && with_rows(size.rows, [&](auto rows) {
           constexpr int kRows = decltype(rows)::value;
           const size_t bytes = chunk_bytes(sized_backward<kRows, kErasesKey, kDecays>(size));
           return std::max(bytes, chunk_bytes(sized_gradients<kRows, kErasesKey, kDecays>(size))) <= gpu.shared_bytes;
         });
}

// The states at the starts of segments, or the gradients at their ends, that ChunkSegments has computed.
inline Matrices<const float> initial_of(const ScanSize& size, const void* matrices) {
  return {static_cast<const float*>(matrices), of_segment(size), 1, size.rows};
}

// Memory for the matrices of segments in the backward pass; empty if there is one segment.
template <typename Pass>
float* take_segments(const Pass& pass, DeviceMemory& memory) {
  return memory.take<float>(pass.log_segments > 0 ? pass.size.heads * pass.segments() * of_segment(pass.size) : 0);
}

// Device memory of the backward pass.
template <int kRows, bool kErasesKey, bool kDecays>
struct BackwardMemory {
  using Gradients = StateGradients<kRows, kDecays>;
  float* segments;
  Bfloat16* states;  // before each chunk, of a rule without decays
  decltype(Gradients::data) gradients;
  size_t bytes;

  BackwardMemory(const ScanSize& size, void* workspace) {
    const auto pass = sized_backward<kRows, kErasesKey, kDecays>(size);
    const int64_t numbers = size.heads * pass.chunks() * pass.block_columns() * kRows;
    DeviceMemory memory{static_cast<char*>(workspace)};
    segments = take_segments(pass, memory);
    states = memory.take<Bfloat16>(kDecays ? 0 : numbers);
    gradients = memory.take<std::remove_pointer_t<decltype(gradients)>>(numbers);
    bytes = size_t(memory.next) - size_t(workspace);
  }
};
template <bool kErasesKey, bool kDecays>
size_t chunk_workspace(const Call& call) {
  const ScanSize size = scan_size(call);
  return with_rows(size.rows, [&](auto rows) {
    return BackwardMemory<decltype(rows)::value, kErasesKey, kDecays>(size, nullptr).bytes;
  });
}

const char* launch_segments(const ChunkSegments& pass, const Gpu& gpu, void* stream);  // see kernels.cu

// Run the pass that computes the ends of segments, and from these compute `initial` of the pass through all segments.
template <typename Pass>
const char* find_initial(Pass ends, ChunkSegments through, Matrices<const float>& initial, const Gpu& gpu, void* stream) {
  ends.ends = through.matrices;
  if (const char* error = launch_chunks(ends, gpu, stream)) return error;
  through.initial = initial, through.size = ends.size, through.segments = int(ends.segments());
  through.slabs = (ends.size.columns + through.columns() - 1) / through.columns();
  initial = initial_of(ends.size, through.matrices);
  return launch_segments(through, gpu, stream);
}

template <bool kErasesKey, bool kDecays>
const char* chunk_forward(const Call& call, const Inputs& in, const Outputs& to, const Gpu& gpu) {
  const ScanSize size = scan_size(call);
  return with_rows(size.rows, [&](auto rows) -> const char* {
    constexpr int kRows = decltype(rows)::value;
    const auto fill = [&](auto& pass) {
      set_size(pass, size);
      pass.query = {in.q, size.rows}, pass.key = {in.k, size.rows}, pass.value = {in.v, size.columns};
      pass.rate = {in.rate, 1}, pass.decay = {in.head_decay, 1};
    };
    ChunkForward<kRows, kErasesKey, kDecays> pass{};
    fill(pass);
    set_columns(pass, size.columns, gpu);
    set_teams(pass, gpu);
    pass.initial = matrices<float>(in.state, call.size);
    pass.final = static_cast<float*>(to.state), pass.kept = static_cast<float*>(to.kept);
    pass.out = to.out, pass.error = static_cast<float*>(to.retrieved);
    if (pass.log_segments > 0) {
      float* const segments = static_cast<float*>(to.segments);
      ChunkForward<kRows, kErasesKey, kDecays> ends{};
      fill(ends);
      set_columns(ends, pass.kRates ? ends.ends_columns() : size.columns, gpu);
      set_teams(ends, gpu);
      const Transition transition = pass.kRates ? Transition::matrix : Transition::one;
      const ChunkSegments through{kRows, transition, false, segments, segments};
      if (const char* error = find_initial(ends, through, pass.initial, gpu, call.stream)) return error;
    }
    return launch_chunks(pass, gpu, call.stream);
  });
}

// A result with one vector of Dv per token, as an input.
inline InputArray contiguous_tokens(const OutputArray& x, const Sizes& size) {
  return {x.data, size.H * size.L * size.Dv, size.L * size.Dv, size.Dv, x.type};
}

template <bool kErasesKey, bool kDecays>
const char* chunk_backward(const Call& call, const Inputs& in, const BackwardInputs& more, const Gradients& to,
                           const Gpu& gpu) {
  const ScanSize size = scan_size(call);
  return with_rows(size.rows, [&](auto rows) -> const char* {
    constexpr int kRows = decltype(rows)::value;
    const InputArray& value = kErasesKey ? more.retrieved : in.v;
    const auto fill = [&](auto& pass) {
      pass.query = {in.q, size.rows}, pass.key = {in.k, size.rows}, pass.value = {value, size.columns};
      pass.rate = {in.rate, 1}, pass.decay = {in.head_decay, 1}, pass.d_out = {more.d_out, size.columns};
    };
    auto pass = sized_backward<kRows, kErasesKey, kDecays>(size);
    fill(pass);
    set_teams(pass, gpu);
    const BackwardMemory<kRows, kErasesKey, kDecays> memory(size, call.workspace);
    float* const segments = memory.segments;
    pass.d_final = matrices<float>(more.d_state, call.size), pass.d_initial = static_cast<float*>(to.state);
    pass.d_v = to.v, pass.d_rate = to.rate;
    pass.gradients = {memory.gradients, pass.block_columns()};
    const bool in_segments = pass.log_segments > 0;
    const auto make_states = [&](const InputArray& key, const InputArray& written, int columns) {
      ChunkForward<kRows, kErasesKey, kDecays> states{};
      set_size(states, size);
      set_columns(states, columns, gpu);
      set_teams(states, gpu);
      states.key = {key, size.rows}, states.value = {written, size.columns}, states.rate = {in.rate, 1};
      return states;
    };
    auto of_keys = sized_gradients<kRows, kErasesKey, kDecays>(size);
    fill(of_keys);
    of_keys.d = {contiguous_tokens(to.v, call.size), size.columns}, of_keys.gradients = pass.gradients;
    of_keys.d_q = to.q, of_keys.d_k = to.k, of_keys.d_decay = to.head_decay;
    if constexpr (kDecays) {
      of_keys.initial = static_cast<const float*>(in.state), of_keys.kept = static_cast<const float*>(more.kept);
    } else {
      auto before = make_states(in.k, value, pass.block_columns());
      before.initial = in_segments ? initial_of(size, more.segments) : matrices<float>(in.state, call.size);
      of_keys.states = before.states = {memory.states, pass.block_columns()};
      if (const char* error = launch_chunks(before, gpu, call.stream)) return error;
    }
    if (in_segments) {
      const float* const of_forward = static_cast<const float*>(more.segments);
      const char* error;
      if constexpr (pass.kRates) {
        ChunkBackward<kRows, kErasesKey, kDecays> ends{};
        set_size(ends, size);
        fill(ends);
        set_columns(ends, size.columns, gpu);
        set_teams(ends, gpu);
        error = find_initial(ends, {kRows, Transition::matrix, true, segments, of_forward}, pass.d_final, gpu, call.stream);
      } else {  // G = G + Q^T d_out is a state, too
        const auto ends = make_states(in.q, more.d_out, size.columns);
        error = find_initial(ends, {kRows, Transition::one, true, segments, of_forward}, pass.d_final, gpu, call.stream);
      }
      if (error) return error;
    }
    const char* const error = launch_chunks(pass, gpu, call.stream);
    return error ? error : launch_chunks(of_keys, gpu, call.stream);
  });
}

// Decays by key; in float32 and float16, all rules.

// Calls f with the number of parts that hold an input of this type, a constant.
template <typename F>
auto with_parts(Type type, F f) {
  return type == Type::bfloat16 ? f(std::integral_constant<int, 1>{}) : f(std::integral_constant<int, kExactParts>{});
}

template <typename Pass>
void set_keys(Pass& pass, const ScanSize& size, const Inputs& in) {
  set_size(pass, size);
  pass.query = {in.q, size.rows}, pass.key = {in.k, size.rows};
  pass.by_key = in.key_decay.data;
  pass.rate = {in.rate, 1}, pass.decay = in.key_decay.data ? Brought{in.key_decay, size.rows} : Brought{in.head_decay, 1};
  pass.removal_key = {in.removal_key, size.rows}, pass.removal = {in.removal, size.rows};
}

// A pass with a block for each chunk.
template <typename Pass>
Pass make_of_chunks(const ScanSize& size, const Inputs& in) {
  Pass pass{};
  set_keys(pass, size, in);
  pass.log_segments = 0;
  pass.slabs = int(pass.chunks()), pass.warps = (size.rows + kBlock - 1) / kBlock;
  return pass;
}

// A pass from chunk to chunk, with its scores.
template <typename Pass>
Pass make_key_states(const ScanSize& size, const Inputs& in, const InputArray& value, const Bfloat16* scores, int columns,
                     const Gpu& gpu) {
  Pass pass{};
  set_keys(pass, size, in);
  set_columns(pass, columns, gpu);
  set_teams(pass, gpu);
  pass.value = {value, size.columns}, pass.value_decay = {in.value_decay, size.columns}, pass.scores = scores;
  return pass;
}

// Where values fade, the values and their decays as keys: dO reads and V writes with z.
inline Inputs values_as_keys(const Inputs& in, const InputArray& d_out) {
  Inputs swapped = in;
  swapped.q = d_out, swapped.k = in.v, swapped.v = in.k;
  swapped.key_decay = in.value_decay, swapped.value_decay = in.key_decay;
  return swapped;
}
inline ScanSize values_as_keys(ScanSize size) {
  std::swap(size.rows, size.columns);
  return size;
}

// Device memory in bytes, and its parts.
template <Rule kRule, int kInputParts>
struct KeyMemory {
  using Pass = ChunkKeyParallel<kRule, kInputParts>;
  float* segments;
  Bfloat16 *scores, *d_scores;  // d_scores: where values fade
  void* d_removed;              // D of a removal, in the type of the values
  float *kept, *gradients;      // the states after each chunk, if the forward pass has not kept them; their gradients
  size_t bytes;

  KeyMemory(const Call& call, bool is_backward) {
    const ScanSize size = scan_size(call);
    Pass pass{};
    set_size(pass, size);
    const int64_t chunks = size.heads * pass.chunks(), numbers = int64_t(size.rows) * size.columns;
    const int64_t values = size.heads * size.length * size.columns;
    DeviceMemory memory{static_cast<char*>(call.workspace)};
    segments = is_backward ? take_segments(pass, memory) : nullptr;
    scores = memory.take<Bfloat16>(chunks * Pass::kScoreMatrices * kMatrix);
    d_scores = memory.take<Bfloat16>(is_backward && Pass::kFadesValues ? chunks * Pass::kResultParts * kMatrix : 0);
    d_removed = memory.take<char>(is_backward && Pass::kRemoves ? values * bytes_of(call.type) : 0);
    kept = memory.take<float>(is_backward && !keeps_states(call.rule) ? chunks * numbers : 0);
    gradients = memory.take<float>(is_backward ? chunks * numbers : 0);
    bytes = size_t(memory.next) - size_t(call.workspace);
  }
};

template <Rule kRule>
size_t chunk_keys_workspace(Call call, bool is_backward) {
  call.workspace = nullptr;
  return with_parts(call.type, [&](auto in) { return KeyMemory<kRule, decltype(in)::value>(call, is_backward).bytes; });
}

// Shared memory of a pass from chunk to chunk, at most. Inputs whose types are not known here count as float32.
template <typename Pass>
size_t key_states_bytes(const ScanSize& size, bool ends = false) {
  Pass pass{};
  pass.size = size, pass.by_key = true;
  const int columns = ends ? pass.ends_columns() : size.columns;
  pass.warps = at_least_power_of_two((int64_t(columns) + kBlock - 1) / kBlock, Pass::kMostWarps);
  return chunk_bytes(pass);
}
template <Rule kRule, int kInputParts>
size_t key_chunks_bytes(const ScanSize& size) {
  auto gradients = make_of_chunks<ChunkKeyGradients<kRule, kInputParts>>(size, {});
  auto scores = make_of_chunks<ChunkKeyScores<kRule, kInputParts>>(size, {});
  gradients.by_key = scores.by_key = true;
  return std::max(chunk_bytes(scores), chunk_bytes(gradients));
}
template <int kRows, Rule kRule, int kInputParts>
size_t key_bytes(const ScanSize& size) {
  const size_t most = std::max({key_states_bytes<ChunkKeyStates<kRows, kRule, kInputParts, false>>(size),
                                key_states_bytes<ChunkKeyStates<kRows, kRule, kInputParts, true>>(size),
                                key_chunks_bytes<kRule, kInputParts>(size)});
  if constexpr (!ChunkKeyPass<kRows, kRule, kInputParts>::kHasSegments) return most;
  else return std::max(most, key_states_bytes<ChunkKeyStates<kRows, kRule, kInputParts, false>>(size, true));
}

template <Rule kRule>
bool choose_chunk_keys(const ScanSize& size, Type type, const Gpu& gpu) {
  constexpr bool kFadesValues = fades_of(kRule) == Fades::kKeyAndValue;
  if (!choose_chunks(size) || type == Type::float64 || (kFadesValues && size.columns > kMostRowsForChunks)) return false;
  return with_parts(type, [&](auto in) {
    constexpr int kInputParts = decltype(in)::value;
    size_t most = with_rows(size.rows, [&](auto rows) { return key_bytes<decltype(rows)::value, kRule, kInputParts>(size); });
    if (kFadesValues) most = std::max(most, key_chunks_bytes<kRule, kInputParts>(values_as_keys(size)));
    return most <= gpu.shared_bytes;
  });
}

template <Rule kRule, int kInputParts>
const char* run_key_scores(const ScanSize& size, const Inputs& in, Bfloat16* to, const Gpu& gpu, void* stream) {
  auto pass = make_of_chunks<ChunkKeyScores<kRule, kInputParts>>(size, in);
  pass.scores = to;
  return launch_chunks(pass, gpu, stream);
}

// Compute the scores, then run the pass from chunk to chunk.
template <int kRows, Rule kRule, int kInputParts, bool kReverse>
const char* run_key_states(ChunkKeyStates<kRows, kRule, kInputParts, kReverse>& pass, const ScanSize& size, const Inputs& in,
                           const InputArray& value, const KeyMemory<kRule, kInputParts>& memory, float* segments,
                           const float* of_forward, const Gpu& gpu, void* stream) {
  if (const char* error = run_key_scores<kRule, kInputParts>(size, in, memory.scores, gpu, stream)) return error;
  if constexpr (pass.kHasSegments)
    if (pass.log_segments > 0) {
      using Pass = ChunkKeyStates<kRows, kRule, kInputParts, kReverse>;
      const int columns = kReverse ? size.columns : pass.ends_columns();
      const auto ends = make_key_states<Pass>(size, in, value, memory.scores, columns, gpu);
      const Transition transition = pass.kSolves ? Transition::matrix : Transition::rows;
      const ChunkSegments through{kRows, transition, kReverse, segments, of_forward};
      if (const char* error = find_initial(ends, through, pass.initial, gpu, stream)) return error;
    }
  return launch_chunks(pass, gpu, stream);
}

// Compute the states after each chunk again, from what was written, in float32 or float16: with the kernels of gated_by_key.
const char* keep_states(const Call& call, const Inputs& in, const InputArray& written, float* kept, const Gpu& gpu);

// The gradients of all chunks, with states whose rows and columns are so many numbers apart.
template <Rule kRule, int kInputParts>
ChunkKeyGradients<kRule, kInputParts> make_key_gradients(const ScanSize& size, const Inputs& in, const InputArray& d_out,
                                                         const float* kept, const float* gradients, int row, int column) {
  auto pass = make_of_chunks<ChunkKeyGradients<kRule, kInputParts>>(size, in);
  pass.value = {in.v, size.columns}, pass.d_out = {d_out, size.columns};
  pass.value_decay = {in.value_decay, size.columns};
  pass.initial = static_cast<const float*>(in.state), pass.kept = kept;
  pass.gradients = gradients, pass.row = row, pass.column = column;
  pass.in_pairs = column == 1 && size.columns % 2 == 0 && reinterpret_cast<uintptr_t>(in.state) % 8 == 0 &&
                  reinterpret_cast<uintptr_t>(kept) % 8 == 0;
  return pass;
}

// The passes of a rule, and of those that are cases of it.
template <Rule kRule>
struct ChunksByKey {
  static const char* forward(const Call& call, const Inputs& in, const Outputs& to, const Gpu& gpu);
  static const char* backward(const Call& call, const Inputs& in, const BackwardInputs& more, const Gradients& to,
                              const Gpu& gpu);
};
template <Rule kRule>
const char* ChunksByKey<kRule>::forward(const Call& call, const Inputs& in, const Outputs& to, const Gpu& gpu) {
  const ScanSize size = scan_size(call);
  return with_parts(call.type, [&](auto parts) {
    return with_rows(size.rows, [&](auto rows) -> const char* {
      constexpr int kRows = decltype(rows)::value, kInputParts = decltype(parts)::value;
      const KeyMemory<kRule, kInputParts> memory(call, false);
      using Pass = ChunkKeyStates<kRows, kRule, kInputParts, false>;
      auto pass = make_key_states<Pass>(size, in, in.v, memory.scores, size.columns, gpu);
      pass.initial = matrices<float>(in.state, call.size);
      pass.final = static_cast<float*>(to.state), pass.kept = static_cast<float*>(to.kept);
      pass.out = to.out, pass.error = static_cast<float*>(to.retrieved);
      float* const segments = static_cast<float*>(to.segments);
      return run_key_states(pass, size, in, in.v, memory, segments, segments, gpu, call.stream);
    });
  });
}
template <Rule kRule>
const char* ChunksByKey<kRule>::backward(const Call& call, const Inputs& in, const BackwardInputs& more, const Gradients& to,
                                         const Gpu& gpu) {
  const ScanSize size = scan_size(call);
  return with_parts(call.type, [&](auto parts) {
    return with_rows(size.rows, [&](auto rows) -> const char* {
      constexpr int kRows = decltype(rows)::value, kInputParts = decltype(parts)::value;
      const KeyMemory<kRule, kInputParts> memory(call, true);
      InputArray d_out = more.d_out;
      d_out.type = call.type;  // also of absent ones: results go through their place
      using Pass = ChunkKeyStates<kRows, kRule, kInputParts, true>;
      auto pass = make_key_states<Pass>(size, in, d_out, memory.scores, size.columns, gpu);
      pass.initial = matrices<float>(more.d_state, call.size);
      pass.final = static_cast<float*>(to.state), pass.kept = memory.gradients, pass.out = to.v;
      const OutputArray d_removed{pass.kRemoves ? memory.d_removed : to.v.data, call.type};
      pass.d_removed = d_removed;
      const float* kept = static_cast<const float*>(more.kept);
      if constexpr (kInputParts > 1 && kRule != Rule::decay && kRule != Rule::removal)
        if (!keeps_states(call.rule)) {
          const InputArray& written = pass.kErasesKey ? more.retrieved : in.v;
          if (const char* error = keep_states(call, in, written, memory.kept, gpu)) return error;
          kept = memory.kept;
        }
      const float* const of_forward = static_cast<const float*>(more.segments);
      if (const char* error = run_key_states(pass, size, in, d_out, memory, memory.segments, of_forward, gpu, call.stream))
        return error;
      auto of_k = make_key_gradients<kRule, kInputParts>(size, in, d_out, kept, memory.gradients, size.columns, 1);
      of_k.removed = {more.retrieved, size.columns};
      of_k.d_removed = {contiguous_tokens(d_removed, call.size), size.columns};
      of_k.d_q = to.q, of_k.d_k = to.k, of_k.d_rate = to.rate;
      of_k.d_decay = in.key_decay.data ? to.key_decay : to.head_decay;
      of_k.d_removal_key = to.removal_key, of_k.d_removal = to.removal;
      of_k.d_scores = memory.d_scores;
      if constexpr (pass.kFadesValues) {
        const Inputs swapped = values_as_keys(in, d_out);
        const ScanSize of_values = values_as_keys(size);
        if (const char* error = run_key_scores<kRule, kInputParts>(of_values, swapped, memory.d_scores, gpu, call.stream))
          return error;
        auto of_v = make_key_gradients<kRule, kInputParts>(of_values, swapped, in.q, kept, memory.gradients, 1, size.columns);
        of_v.d_scores = memory.scores, of_v.d_k = to.v, of_v.d_decay = to.value_decay;
        if (const char* error = launch_chunks(of_v, gpu, call.stream)) return error;
      }
      return launch_chunks(of_k, gpu, call.stream);
    });
  });
}
extern template struct ChunksByKey<Rule::gated_by_key>;  // compiled with that rule, for three
extern template struct ChunksByKey<Rule::gated_delta_by_key>;

}  // namespace detail

}  // namespace fwp::cuda
