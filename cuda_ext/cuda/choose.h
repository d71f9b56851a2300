// Chooses the tile and the plan of a scan; no other file does. All thresholds are estimates from counting operations, none of
// which has been compared with another on a GPU.
#pragma once

#include <algorithm>

#include "layout.h"

namespace fwp::cuda {

// Elements of the matrix that a thread holds. More columns per row save reads of shared memory, because a number along the rows
// is read once for all of them. Fewer columns give more threads to fill the GPU.
enum class Shape { wide, medium, narrow, tall };

struct ShapeSize {
  int rows, columns;
};

constexpr ShapeSize kWide{8, 4}, kMedium{8, 2}, kNarrow{8, 1};
constexpr ShapeSize kTall{16, 1};  // for more rows than 32 lanes can hold otherwise

// Below this number of warps per multiprocessor, more threads help more than fewer reads.
constexpr int64_t kWarpsToFill = 4;
// The same for scans with sums over columns, with wide tiles and with medium ones. It does not depend on the GPU, because the
// bits of these sums depend on the tile.
constexpr int64_t kWideWarpsToSum = 512, kMediumWarpsToSum = 256;
// Memory for parts of sums over columns of several blocks. It should fit into the second-level cache.
constexpr size_t kPartBytes = 32 * 1024 * 1024;

constexpr size_t kBufferBytes = 12 * 1024;
constexpr int kStageTokens = 16;  // at most; a chunk that ends in a kept state is a multiple of it
static_assert(kKeptEvery % kStageTokens == 0);
constexpr int kLeastTeam = 4;  // at least the tokens of a stage, because each thread copies the scalars of one
// Shared memory of a block on every GPU. Beyond it, two buffers are better than fewer blocks.
constexpr size_t kSharedBytes = 99 * 1024;

constexpr int at_least_power_of_two(int64_t x, int limit) {
  int power = 1;
  while (power < x && power < limit) power *= 2;
  return power;
}

constexpr int lanes_for(const ScanSize& size, const ShapeSize& shape) {
  return at_least_power_of_two((int64_t(size.rows) + shape.rows - 1) / shape.rows, kWarp);
}

inline bool has_warps(const ScanSize& size, const ShapeSize& shape, int64_t warps) {
  const int64_t threads = size.heads * ((size.columns + shape.columns - 1) / shape.columns) * lanes_for(size, shape);
  return threads >= kWarp * warps;
}

template <typename Real>
Shape choose_shape(const ScanSize& size, const Gpu& gpu) {
  if (size.rows > kWarp * kWide.rows) return Shape::tall;
  if (sizeof(Real) == 8) return Shape::narrow;
  return has_warps(size, kWide, kWarpsToFill * gpu.multiprocessors) ? Shape::wide : Shape::narrow;
}
template <typename Real>
Shape choose_summing_shape(const ScanSize& size) {
  if (size.rows > kWarp * kWide.rows) return Shape::tall;
  if (sizeof(Real) == 8) return Shape::narrow;
  if (has_warps(size, kWide, kWideWarpsToSum)) return Shape::wide;
  return has_warps(size, kMedium, kMediumWarpsToSum) ? Shape::medium : Shape::narrow;
}

struct ScanNeeds {
  ShapeSize shape;
  TokenParts parts;
  size_t number;  // bytes per number
  int states;     // tiles that a thread keeps in shared memory
  int stage;      // tokens in a buffer; 0: as many as fit
};

inline size_t shared_bytes(const ScanNeeds& needs, const Plan& plan) {
  const TokenLayout token(needs.parts, plan, needs.shape.rows, needs.shape.columns);
  const size_t buffers = size_t(plan.buffers) * plan.teams * plan.stage * token.size;
  const size_t states = size_t(needs.states) * needs.shape.rows * needs.shape.columns * plan.threads();
  return (buffers + states) * needs.number;
}

inline Plan with_teams(Plan plan, const ScanNeeds& needs, int teams) {
  plan.teams = teams;
  const TokenLayout token(needs.parts, plan, needs.shape.rows, needs.shape.columns);
  const int fits = int(kBufferBytes / (size_t(token.size) * needs.number * teams));
  const int most = plan.team_threads() < kStageTokens ? plan.team_threads() : kStageTokens;
  plan.stage = needs.stage ? needs.stage : 1;
  while (!needs.stage && 2 * plan.stage <= fits && 2 * plan.stage <= most) plan.stage *= 2;
  plan.buffers = kMostBuffers;
  if (shared_bytes(needs, plan) > kSharedBytes) plan.buffers = 2;
  return plan;
}

inline Plan choose_plan(const ScanSize& size, const ScanNeeds& needs, const Gpu& gpu, int most_threads) {
  Plan plan{};
  plan.lanes = lanes_for(size, needs.shape);
  const auto columns_of_team = [&] { return int64_t(plan.groups) * needs.shape.columns; };
  const auto count_slabs = [&] {
    const int64_t slabs = (size.columns + columns_of_team() - 1) / columns_of_team();
    return int(slabs > 1 ? slabs : 1);  // an empty matrix still has scalars to write
  };
  plan.groups = at_least_power_of_two((size.columns + needs.shape.columns - 1) / needs.shape.columns,
                                      most_threads / plan.lanes);
  while (plan.team_threads() < kLeastTeam) plan.groups *= 2;
  const bool sums_columns = needs.parts.row_outputs > 0;  // then slabs cost memory
  while (!sums_columns && plan.team_threads() > kWarp && plan.groups > 1 &&
         size.heads * count_slabs() < gpu.multiprocessors)
    plan.groups /= 2;
  plan.slabs = count_slabs();
  plan.log_lanes = log2_of(plan.lanes), plan.log_groups = log2_of(plan.groups);
  plan = with_teams(plan, needs, plan.team_threads() < kWarp ? kWarp / plan.team_threads() : 1);
  while (2 * plan.threads() <= most_threads &&
         size.heads * plan.slabs >= 4 * int64_t(plan.teams) * gpu.multiprocessors) {
    const Plan doubled = with_teams(plan, needs, 2 * plan.teams);
    if (shared_bytes(needs, doubled) > gpu.shared_bytes) break;
    plan = doubled;
  }
  return plan;
}

// The greatest block that fits.
inline Plan choose_plan(const ScanSize& size, const ScanNeeds& needs, const Gpu& gpu) {
  int threads = kThreadsPerBlock;
  Plan plan = choose_plan(size, needs, gpu, threads);
  while (shared_bytes(needs, plan) > gpu.shared_bytes && threads > kWarp)
    plan = choose_plan(size, needs, gpu, threads /= 2);
  return plan;
}

// The tensor cores take a length of several chunks.
constexpr int64_t kLengthForChunks = 64;
constexpr int kLeastForChunks = 16, kMostRowsForChunks = 128;

inline bool choose_chunks(const ScanSize& size) {
  return size.length >= kLengthForChunks && size.rows >= kLeastForChunks &&
         size.rows <= kMostRowsForChunks && size.columns >= kLeastForChunks && size.columns <= kGreatestSize;
}

// The logarithm, base 2, of the number of segments.
inline int choose_segments(const ScanSize& size) {
  const int64_t most = segments_of(size.heads_per_batch, size.length);
  int log = 0;
  while (2 << log <= most) ++log;
  return log;
}

struct ChunkPlan {
  int warps, slabs;  // of the columns of a head
};

// Each slab computes its own scores, so there are only as many slabs as the multiprocessors take at once.
inline ChunkPlan choose_chunk_plan(const ScanSize& size, int columns, int most_warps, int multiprocessors) {
  const auto slabs = [&](int warps) { return (size.columns + warps * columns - 1) / (warps * columns); };
  int warps = at_least_power_of_two(slabs(1), most_warps);
  while (warps > 1 && 2 * size.heads * slabs(warps) <= multiprocessors) warps /= 2;
  return {warps, slabs(warps)};
}

}  // namespace fwp::cuda
