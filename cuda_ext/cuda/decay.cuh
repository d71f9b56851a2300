// The decay rule: W = (f^T z) * W + k^T v, out = q W; and the gated rule, which is its case f = g, z = 1 and (1 - g) k for
// the key. README.md derives the backward pass. Key and value stand in for each other there, so one scan serves both: it
// gives the gradients of what lies along its columns.
#pragma once

#include "scan.cuh"

namespace fwp::cuda {

template <typename A, bool kGated>
struct DecayForward : Scan<A, kGated ? 2 : 3, kGated ? 1 : 2, kGated ? 1 : 0> {
  enum Rows { kKey, kQuery, kKeyDecay };
  enum Columns { kValue, kValueDecay };

  Matrices<A> kept;  // one for each whole chunk of a head
  Output out;

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    this->template scan<kRows, kColumns>(false, [&](const auto& place, int64_t t, const A* token, auto& state) {
      A key[kRows], query[kRows], value[kColumns], read[kColumns];
      place.load_column(token, kValue, value);
      if constexpr (kGated) {
        const A gate = place.scalar(token, 0);
        state.scale(gate);
        FWP_UNROLL for (int c = 0; c < kColumns; ++c) value[c] *= 1 - gate;
      } else {
        A key_decay[kRows], value_decay[kColumns];
        place.load_row(token, kKeyDecay, key_decay);
        place.load_column(token, kValueDecay, value_decay);
        state.scale(key_decay, value_decay);
      }
      place.load_row(token, kKey, key);
      state.add(key, value);
      place.load_row(token, kQuery, query);
      state.read(query, read);
      add_lanes(read, place.plan.lanes);
      place.store_columns(out, t, read);
      if ((t + 1) % kChunk == 0) place.store(state, kept, place.head * (place.size.length / kChunk) + t / kChunk);
    });
  }
};

// Tokens that the backward pass goes back through between two states that it has at hand. It makes those of a chunk in
// two steps: first one before each of these groups, then, in each group, one before each token.
constexpr int kGroup = 4;
constexpr int kGroups = kChunk / kGroup;

// In reverse, with G the gradient of W. The rows of W bring x, w and f, and its columns do: queries x, keys w and their
// decays f along one side, the gradients of out x, values w and theirs f along the other. For the columns' ones
//   d_x = x W_t      d_w = w G_t      d_f = f (G_t * W_{t-1})      with x, w, f of the rows.
template <typename A, bool kGated>
struct DecayBackward {
  using Number = A;
  static constexpr int kParts = kGated ? 2 : 3;
  using Inputs = TokenInputs<A, kParts, kParts, kGated ? 1 : 0>;
  enum Parts { kX, kW, kF };
  static constexpr int kStates = kGroups - 1 + kGroup;  // that a thread keeps of its tile

  ScanSize size;
  Plan plan;  // its stage is kGroup
  Inputs inputs;
  bool rebuilds;  // whether anything here needs W, which d_w alone does not
  Matrices<const A> initial, kept, d_last;
  Matrices<A> d_initial;
  Output d_x, d_w, d_f;  // gated: d_f is the columns' parts of d_gate

  // Where there are states to be rebuilt, each group but the last of a chunk comes twice: forwards from the first, then
  // backwards from the last.
  struct GroupStage : Stage {
    int64_t chunk;
    int group, groups;  // of the chunk
    bool forwards, first;
  };

  FWP_DEVICE int64_t count_stages() const {
    const int64_t groups = (size.length + kGroup - 1) / kGroup;
    if (!rebuilds) return groups;
    return 2 * groups - (size.length + kChunk - 1) / kChunk;
  }

  FWP_DEVICE GroupStage stage_at(int64_t n) const {
    if (!rebuilds) return {plain_stage(n, kGroup, size.length, true), 0, 0, 0, false, false};
    int64_t chunk = (size.length - 1) / kChunk;
    int groups = int((size.length - chunk * kChunk + kGroup - 1) / kGroup), i = int(n);
    if (n >= 2 * groups - 1) {
      const int64_t later = n - (2 * groups - 1);
      groups = kGroups;
      chunk -= 1 + later / (2 * kGroups - 1);
      i = int(later % (2 * kGroups - 1));
    }
    const bool forwards = i < groups - 1;
    const int group = forwards ? i : 2 * (groups - 1) - i;
    const int64_t first = chunk * kChunk + group * kGroup, left = size.length - first;
    return {{first, left < kGroup ? int(left) : kGroup}, chunk, group, groups, forwards, i == 0};
  }

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    const Place<A, kRows, kColumns, Inputs> place(size, plan, inputs);
    Tile<A, kRows, kColumns> state, g;
    A* states = place.own_memory() + place.thread;
    place.load(d_last, place.head, g);
    place.for_stages(
        count_stages(), [&](int64_t n) { return stage_at(n); },
        [&](int64_t n, const GroupStage& stage) {
          if (rebuilds) {
            if (stage.first) load_first(place, stage.chunk, state);
            if (stage.forwards)
              save(state, states, stage.group);
            else if (stage.group < stage.groups - 1)
              restore(states, stage.group, state);
            FWP_UNROLL_BY(1) for (int s = 0; s < stage.count; ++s) {
              const A* token = place.token(n, s);
              if (!stage.forwards) save(state, states, kGroups - 1 + s);
              advance(place, token, state);
              if (!stage.forwards && d_x.data) read_state(place, token, stage.Stage::first + s, state);
            }
          }
          if (stage.forwards) return;
          FWP_UNROLL_BY(1) for (int s = stage.count - 1; s >= 0; --s)
            go_back(place, place.token(n, s), stage.Stage::first + s, states, kGroups - 1 + s, g);
        });
    place.store(g, d_initial, place.head);
  }

 private:
  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void load_first(const Place& place, int64_t chunk, Tile<A, kRows, kColumns>& state) const {
    if (chunk > 0)
      place.load(kept, place.head * (size.length / kChunk) + chunk - 1, state);
    else
      place.load(initial, place.head, state);
  }

  // Slot by slot and element by element, one number for each thread of the block.
  template <int kRows, int kColumns>
  FWP_DEVICE void save(const Tile<A, kRows, kColumns>& state, A* states, int slot) const {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c)
        states[((slot * kRows + r) * kColumns + c) * plan.threads()] = state.x[r][c];
  }
  template <int kRows, int kColumns>
  FWP_DEVICE void restore(const A* states, int slot, Tile<A, kRows, kColumns>& state) const {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c)
        state.x[r][c] = states[((slot * kRows + r) * kColumns + c) * plan.threads()];
  }

  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void fade(const Place& place, const A* token, Tile<A, kRows, kColumns>& x) const {
    if constexpr (kGated) {
      x.scale(place.scalar(token, 0));
    } else {
      A row[kRows], column[kColumns];
      place.load_row(token, kF, row);
      place.load_column(token, kF, column);
      x.scale(row, column);
    }
  }

  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void advance(const Place& place, const A* token, Tile<A, kRows, kColumns>& state) const {
    A row[kRows], column[kColumns];
    fade(place, token, state);
    place.load_row(token, kW, row);
    place.load_column(token, kW, column);
    if constexpr (kGated) FWP_UNROLL for (int c = 0; c < kColumns; ++c) column[c] *= 1 - place.scalar(token, 0);
    state.add(row, column);
  }

  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void read_state(const Place& place, const A* token, int64_t t,
                             const Tile<A, kRows, kColumns>& state) const {
    A row[kRows], sum[kColumns];
    place.load_row(token, kX, row);
    state.read(row, sum);
    add_lanes(sum, plan.lanes);
    place.store_columns(d_x, t, sum);
  }

  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void go_back(const Place& place, const A* token, int64_t t, const A* states, int slot,
                          Tile<A, kRows, kColumns>& g) const {
    A row[kRows], column[kColumns], of_w[kColumns], of_f[kColumns];
    place.load_row(token, kX, row);
    place.load_column(token, kX, column);
    g.add(row, column);
    place.load_row(token, kW, row);
    g.read(row, of_w);
    add_lanes(of_w, plan.lanes);
    if (rebuilds) {
      if constexpr (!kGated) place.load_row(token, kF, row);
      Tile<A, kRows, kColumns> before;
      restore(states, slot, before);
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) {
        of_f[c] = A(0);
        FWP_UNROLL for (int r = 0; r < kRows; ++r)
          of_f[c] = fma(kGated ? g.x[r][c] : row[r] * g.x[r][c], before.x[r][c], of_f[c]);
      }
      add_lanes(of_f, plan.lanes);
    }
    if constexpr (kGated) {
      if (rebuilds) {
        place.load_column(token, kW, column);
        FWP_UNROLL for (int c = 0; c < kColumns; ++c) of_f[c] = fma(-column[c], of_w[c], of_f[c]);
      }
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) of_w[c] *= 1 - place.scalar(token, 0);
    }
    place.store_columns(d_w, t, of_w);
    if (rebuilds) place.store_columns(d_f, t, of_f);
    fade(place, token, g);
  }
};

// out = the sum of the `width` parts of each token, a warp a token.
template <typename A>
struct TokenSums {
  const A* parts;
  int64_t tokens;
  int width;
  Output out;

  FWP_DEVICE void run() const {
    const int lane = int(threadIdx.x) % kWarp;
    const int64_t t = int64_t(blockIdx.x) * (kThreadsPerBlock / kWarp) + int(threadIdx.x) / kWarp;
    if (t >= tokens) return;
    A sum[1] = {A(0)};
    for (int i = lane; i < width; i += kWarp) sum[0] += parts[t * width + i];
    add_lanes(sum, kWarp);
    if (lane != 0) return;
    with_element<A>(out.type, [&](auto* element) { round_to(sum[0], static_cast<decltype(element)>(out.data)[t]); });
  }
};

}  // namespace fwp::cuda
