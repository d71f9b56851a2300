// How teams of warps take turns with the chunks of a sequence. A team prepares its chunk, takes the state that the team of the
// chunk before has left in shared memory, and leaves the next one. So only what changes the state waits for another team: while
// one does, others compute scores, or results. The bits of a result do not depend on the number of teams. A single team keeps the
// state in its registers.
#pragma once

#include "chunks.cuh"

namespace fwp::cuda {

// Of a block. A multiprocessor has 65,536 registers: 168 for each of 384 threads, or 255 if a lane has more of the state.
template <int kRows>
constexpr int kThreadsOfTeams = kRows <= 64 ? 384 : 256;

// The numbers of a warp, as its lanes have them: pieces, by lanes.
template <int kRows>
constexpr int kPiecesOfWarp = kRows / kPiece * kBlock;

template <int blocks>
FWP_DEVICE void load_lanes(const Piece<float>* from, Product (&to)[blocks]) {
  FWP_UNROLL for (int p = 0; p < 2 * blocks; ++p) {
    const Piece<float> piece = from[p * kWarp + lane()];
    FWP_UNROLL for (int e = 0; e < kPiece; ++e) to[p / 2][p % 2][e] = piece.x[e];
  }
}
template <int blocks>
FWP_DEVICE void store_lanes(const Product (&from)[blocks], Piece<float>* to) {
  FWP_UNROLL for (int p = 0; p < 2 * blocks; ++p) {
    Piece<float> piece;
    FWP_UNROLL for (int e = 0; e < kPiece; ++e) piece.x[e] = from[p / 2][p % 2][e];
    to[p * kWarp + lane()] = piece;
  }
}

// Chunk i of a segment, from 0 on, is that of team i % teams. kTeamLimit: teams, at most.
template <int kRows, int kTeamLimit>
struct Relay {
  using State = Product[kRows / kBlock];
  Piece<float>* state;  // of each warp of a team
  int teams, threads;   // of a team

  FWP_BOTH Relay(Carver& carver, int warps, int teams_)
      : state(carver.take<Piece<float>>(teams_ > 1 ? warps * kPiecesOfWarp<kRows> : 0)), teams(teams_), threads(warps * kWarp) {}

  // All threads of a team.
  FWP_DEVICE void wait_for_team(int team) const { wait_at_barrier(1 + team, threads); }

  // The state before chunk i, unless this team has it: from the chunk before, or as that at the start.
  FWP_DEVICE void take(int i, int team, int warp, State& to) const {
    if (!passes() || i == 0) return;
    wait_at_barrier(baton_of(team), 2 * threads);
    load_lanes(state + warp * kPiecesOfWarp<kRows>, to);
  }
  // For the next chunk, unless this one is the last.
  FWP_DEVICE void give(bool is_last, int team, int warp, const State& from) const {
    if (!passes() || is_last) return;
    store_lanes(from, state + warp * kPiecesOfWarp<kRows>);
    arrive_at_barrier(baton_of(team + 1 < teams ? team + 1 : 0), 2 * threads);
  }

 private:
  FWP_DEVICE bool passes() const { return kTeamLimit > 1 && teams > 1; }
  FWP_DEVICE int baton_of(int team) const { return 1 + teams + team; }
};

}  // namespace fwp::cuda
