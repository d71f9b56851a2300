// All rules: a scan forward and one in reverse. ../cpu.md derives the backward pass, ../rule.h has the symbols:
//
//     for t in range(L):
//         before[t], r[t] = W, y[t] @ W                      # r: of a removal
//         W = outer(a[t], z[t]) * W
//         e[t] = v[t] - k[t] @ W if erases else v[t]
//         W = W + outer(k[t], b[t] * e[t]) - outer(x[t], r[t])
//         out[t] = q[t] @ W
//
// The columns of W are independent.
#pragma once

#include "scan.cuh"

namespace fwp::cuda {

FWP_BOTH constexpr bool fades_by_key(Fades fades) { return fades == Fades::kKey || fades == Fades::kKeyAndValue; }

// Multiply x by the decays of a token of `Scan`.
template <typename Scan, typename Place, typename Real, int kRows, int kColumns>
FWP_DEVICE void fade(const Place& place, const Real* token, Tile<Real, kRows, kColumns>& x) {
  if constexpr (Scan::kFades == Fades::kHead) {
    x.scale(place.scalar(token, Scan::kHeadDecay));
  } else if constexpr (fades_by_key(Scan::kFades)) {
    Real row[kRows], column[kColumns];
    place.load_row(token, Scan::kKeyDecay, row);
    if constexpr (Scan::kFades == Fades::kKeyAndValue) {
      place.load_column(token, Scan::kValueDecay, column);
      x.scale(row, column);
    } else {
      x.scale_rows(row);
    }
  }
}

template <typename Real, Fades fades, Erases kErases>
struct RecurrentForward {
  static constexpr Fades kFades = fades;
  enum Rows { kKey, kQuery, kKeyDecay, kRemovalKey = kKeyDecay + fades_by_key(kFades), kRemoval };
  enum Columns { kValue, kValueDecay };
  enum Scalars { kRate, kHeadDecay };
  enum Outputs { kOut, kRetrieved };
  using Number = Real;
  using Arrays = TokenArrays<2 + fades_by_key(fades) + 2 * (kErases == Erases::kRemoval), 1 + (fades == Fades::kKeyAndValue),
                             1 + (fades == Fades::kHead), 1 + (kErases != Erases::kNothing), 0>;

  ScanSize size;
  Plan plan;
  Arrays arrays;
  Matrices<const Real> initial;
  Matrices<Real> final, kept;  // kept: one for each whole chunk of a head

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    const Place<Real, kRows, kColumns, Arrays> place(size, plan, arrays);
    Tile<Real, kRows, kColumns> state;
    place.load(initial, place.head, state);
    const auto stage_at = [&](int64_t n) -> Stage {
      const int64_t first = n * plan.stage, left = size.length - first;
      return {first, left < plan.stage ? int(left) : plan.stage, true};
    };
    place.for_stages((size.length + plan.stage - 1) / plan.stage, stage_at, [&](int at, const Stage& stage) {
      FWP_UNROLL_BY(1) for (int s = 0; s < stage.count; ++s) {
        Real* const token = place.token(at, s);
        place.clear_if_begins(token, state);
        go_on(place, token, state);
      }
      const int64_t end = stage.first + stage.count;  // the end of a chunk is always the end of a stage
      if (end % kKeptEvery == 0) place.store(state, kept, place.head * (size.length / kKeptEvery) + end / kKeptEvery - 1);
    });
    place.store(state, final, place.head);
  }

 private:
  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void go_on(const Place& place, Real* token, Tile<Real, kRows, kColumns>& state) const {
    Real row[kRows], value[kColumns], read[kColumns];
    [[maybe_unused]] Real found[kColumns];
    if constexpr (kErases == Erases::kRemoval) {
      place.load_row(token, kRemovalKey, row);
      state.read(row, found);
      add_lanes(found, plan.lanes);
      place.put_columns(token, kRetrieved, found);
    }
    fade<RecurrentForward>(place, token, state);
    place.load_column(token, kValue, value);
    place.load_row(token, kKey, row);
    if constexpr (kErases == Erases::kKey) {
      state.read(row, read);
      add_lanes(read, plan.lanes);
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) value[c] -= read[c];
      place.put_columns(token, kRetrieved, value);
    }
    scaled(place.scalar(token, kRate), value, value);
    state.add(row, value);
    if constexpr (kErases == Erases::kRemoval) {
      place.load_row(token, kRemoval, row);
      state.subtract(row, found);
    }
    if (!arrays.outputs[kOut].data) return;  // only the states are wanted
    place.load_row(token, kQuery, row);
    state.read(row, read);
    add_lanes(read, plan.lanes);
    place.put_columns(token, kOut, read);
  }
};

// The backward pass, in reverse, with W and its gradient G. It goes back through groups of tokens, the stages of its plan. From a
// state that a forward scan kept, it computes W again before each pair of groups. In each pair it then computes W before each
// group, and in each group before each token.
//
//     for t in reversed(range(L)):
//         W = before[t]
//         after = outer(a[t], z[t]) * W + outer(k[t], b[t] * e[t]) - outer(x[t], r[t])
//         G, d_q[t] = G + outer(q[t], d_out[t]), after @ d_out[t]
//         d_v[t], d_b[t], d_k[t] = b[t] * (k[t] @ G), k[t] @ G @ e[t], b[t] * (G @ e[t])
//         if erases:
//             G, d_k[t] = G - outer(k[t], d_v[t]), d_k[t] - a[t] * (W @ d_v[t])
//         d_r = -x[t] @ G
//         d_x[t], d_y[t] = -G @ r[t], W @ d_r
//         d_a[t], d_z[t] = (G * W) @ z[t], a[t] @ (G * W)
//         G = outer(a[t], z[t]) * G + outer(y[t], d_r)
template <typename Real, Fades fades, Erases kErases>
struct RecurrentBackward {
  static constexpr Fades kFades = fades;
  static constexpr bool kByHead = kFades == Fades::kHead, kByKey = fades_by_key(kFades);
  static constexpr bool kByValue = kFades == Fades::kKeyAndValue, kDecays = kFades != Fades::kNothing;
  static constexpr bool kRemoves = kErases == Erases::kRemoval;
  enum Rows { kKey, kQuery, kKeyDecay, kRemovalKey = kKeyDecay + kByKey, kRemoval };
  enum Columns { kDOut, kError, kValueDecay };  // kError: the value if the rule does not erase
  // In the place of a value decay, which no such rule has. It is not an enumerator, because nvcc 13.0 drops `= kValueDecay` of one
  // from the host code of a template: the enumerator is 2 in the kernel, and 3 in its launch.
  static constexpr int kFound = kValueDecay;
  enum Scalars { kRate, kHeadDecay };
  enum Outputs { kDV, kDWrite, kDValueDecay };
  enum RowOutputs { kDQ, kDK, kDDecay, kDRemovalKey = kDDecay + kDecays, kDRemoval };  // kDDecay by head: a part for each row
  using Number = Real;
  using Arrays = TokenArrays<2 + kByKey + 2 * kRemoves, 2 + (kByValue || kRemoves), 1 + kByHead, 2 + kByValue,
                             2 + kDecays + 2 * kRemoves>;

  ScanSize size;
  Plan plan;
  Arrays arrays;
  Matrices<const Real> initial, kept, d_final;
  Matrices<Real> d_first;  // the gradient of the state before token `first`
  int64_t first, end;      // the tokens of this launch; `first` starts a chunk

  // Tiles that a thread keeps, with groups of so many tokens: before each pair of groups, and before each token of a group.
  FWP_BOTH static constexpr int states(int group) { return kKeptEvery / (2 * group) + group; }

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    const Place<Real, kRows, kColumns, Arrays> place(size, plan, arrays);
    Tile<Real, kRows, kColumns> g, state;
    place.load(d_final, place.head, g);
    Real* const states = place.own_memory() + place.thread / kWarp * (kWarp * kRows * kColumns * this->states(plan.stage));
    place.for_stages(
        count_stages(), [&](int64_t n) { return stage_at(n); },
        [&](int at, const GroupStage& stage) {
          if (stage.visit == 0) load_first(place, stage.chunk, state);
          if (stage.group % 2 == 0) {
            if (stage.visit < 2 * stage.pairs - 1)
              save(state, states, stage.group / 2);
            else
              restore(states, stage.group / 2, state);
          }
          if (!stage.writes) {
            FWP_UNROLL_BY(1) for (int s = 0; s < stage.count; ++s) {
              Real* const token = place.token(at, s);
              place.clear_if_begins(token, state);
              go_on<false>(place, token, state);
            }
            return;
          }
          FWP_UNROLL_BY(1) for (int s = 0; s < stage.count; ++s) {
            Real* const token = place.token(at, s);
            place.clear_if_begins(token, state);
            save(state, states, whole_chunk() / 2 + s);
            go_on<true>(place, token, state);
          }
          FWP_UNROLL_BY(1) for (int s = stage.count - 1; s >= 0; --s) {
            Real* const token = place.token(at, s);
            Tile<Real, kRows, kColumns> before;
            restore(states, whole_chunk() / 2 + s, before);
            go_back(place, token, before, g);
            place.clear_if_begins(token, g);
          }
        });
    place.store(g, d_first, place.head);
  }

 private:
  struct GroupStage : Stage {  // it writes when it goes back
    int64_t chunk;
    int visit, group, pairs;  // in the chunk
  };

  // A chunk of `groups` groups is visited from all pairs except the last in forward order, and then pair by pair in reverse. A pair
  // is visited from its first group in forward order, its second one in reverse and its first one in reverse. A single last group
  // is only visited in reverse.
  FWP_DEVICE static int visits(int groups) { return 2 * ((groups + 1) / 2 - 1) + groups / 2 * 3 + groups % 2; }
  FWP_DEVICE int whole_chunk() const { return int(kKeptEvery) / plan.stage; }  // in groups
  FWP_DEVICE int groups_of(int64_t chunk) const {
    const int64_t left = end - chunk * kKeptEvery;
    return left < kKeptEvery ? (int(left) + plan.stage - 1) / plan.stage : whole_chunk();
  }
  FWP_DEVICE int64_t last_chunk() const { return (end - 1) / kKeptEvery; }
  FWP_DEVICE int64_t count_stages() const {
    if (end <= first) return 0;
    return visits(groups_of(last_chunk())) + (last_chunk() - first / kKeptEvery) * visits(whole_chunk());
  }

  FWP_DEVICE GroupStage stage_at(int64_t n) const {
    int64_t chunk = last_chunk();
    int visit = int(n);
    if (n >= visits(groups_of(chunk))) {
      const int64_t later = n - visits(groups_of(chunk));
      chunk -= 1 + later / visits(whole_chunk());
      visit = int(later % visits(whole_chunk()));
    }
    const int groups = groups_of(chunk), pairs = (groups + 1) / 2, single = groups % 2;
    const int after = visit - 2 * (pairs - 1);  // the forward visits of all pairs except the last
    int group = visit;
    bool writes = after >= 0;
    if (after >= single) {
      const int pair = groups / 2 - 1 - (after - single) / 3, step = (after - single) % 3;
      group = 2 * pair + (step == 1);
      writes = step > 0;
    }
    const int64_t from = chunk * kKeptEvery + group * plan.stage, left = end - from;
    return {{from, left < plan.stage ? int(left) : plan.stage, writes}, chunk, visit, group, pairs};
  }

  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void load_first(const Place& place, int64_t chunk, Tile<Real, kRows, kColumns>& state) const {
    if (chunk > 0)
      place.load(kept, place.head * (size.length / kKeptEvery) + chunk - 1, state);
    else
      place.load(initial, place.head, state);
  }

  // The tiles of a warp's threads, by slots and then by pieces of 16 bytes.
  template <int kRows, int kColumns>
  FWP_DEVICE static Wide<Real>* slot_of(Real* states, int slot) {
    return reinterpret_cast<Wide<Real>*>(states + slot * kRows * kColumns * kWarp) + lane();
  }
  template <int kRows, int kColumns>
  FWP_DEVICE static void save(const Tile<Real, kRows, kColumns>& state, Real* states, int slot) {
    constexpr int numbers = kOf16Bytes<Real>;
    Wide<Real>* const to = slot_of<kRows, kColumns>(states, slot);
    FWP_UNROLL for (int p = 0; p < kRows * kColumns / numbers; ++p) {
      Wide<Real> piece;
      FWP_UNROLL for (int e = 0; e < numbers; ++e)
        piece.x[e] = state.x[(p * numbers + e) / kColumns][(p * numbers + e) % kColumns];
      to[p * kWarp] = piece;
    }
  }
  template <int kRows, int kColumns>
  FWP_DEVICE static void restore(Real* states, int slot, Tile<Real, kRows, kColumns>& state) {
    constexpr int numbers = kOf16Bytes<Real>;
    const Wide<Real>* const from = slot_of<kRows, kColumns>(states, slot);
    FWP_UNROLL for (int p = 0; p < kRows * kColumns / numbers; ++p) {
      const Wide<Real> piece = from[p * kWarp];
      FWP_UNROLL for (int e = 0; e < numbers; ++e)
        state.x[(p * numbers + e) / kColumns][(p * numbers + e) % kColumns] = piece.x[e];
    }
  }

  // Turn W_{t-1} into W. With `reads`, also compute d_q.
  template <bool reads, typename Place, int kRows, int kColumns>
  FWP_DEVICE void go_on(const Place& place, Real* token, Tile<Real, kRows, kColumns>& state) const {
    Real row[kRows], column[kColumns];
    fade<RecurrentBackward>(place, token, state);
    place.load_column(token, kError, column);
    scaled(place.scalar(token, kRate), column, column);
    place.load_row(token, kKey, row);
    state.add(row, column);
    if constexpr (kRemoves) {
      place.load_column(token, kFound, column);
      place.load_row(token, kRemoval, row);
      state.subtract(row, column);
    }
    if constexpr (reads) {
      place.load_column(token, kDOut, column);
      state.read_rows(column, row);
      place.put_rows(token, kDQ, row);
    }
  }

  // Turn G into the gradient of W_{t-1}, which is `before`.
  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void go_back(const Place& place, Real* token, Tile<Real, kRows, kColumns>& before,
                          Tile<Real, kRows, kColumns>& g) const {
    const Real rate = place.scalar(token, kRate);
    Real row[kRows], column[kColumns], of_write[kColumns], d_row[kRows];
    [[maybe_unused]] Real of_found[kColumns];
    place.load_row(token, kQuery, row);
    place.load_column(token, kDOut, column);
    g.add(row, column);
    place.load_row(token, kKey, row);
    g.read(row, of_write);
    add_lanes(of_write, plan.lanes);
    place.put_columns(token, kDWrite, of_write);
    scaled(rate, of_write, of_write);
    place.put_columns(token, kDV, of_write);
    place.load_column(token, kError, column);
    g.read_rows(column, d_row);
    scaled(rate, d_row, d_row);
    if constexpr (kErases == Erases::kKey) {
      g.subtract(row, of_write);
      correct_key(place, token, before, of_write, d_row);
    }
    place.put_rows(token, kDK, d_row);
    if constexpr (kRemoves) {
      place.load_column(token, kFound, column);
      g.read_rows(column, d_row);
      scaled(Real(-1), d_row, d_row);
      place.put_rows(token, kDRemoval, d_row);
      place.load_row(token, kRemoval, row);
      g.read(row, of_found);
      add_lanes(of_found, plan.lanes);
      scaled(Real(-1), of_found, of_found);
      before.read_rows(of_found, d_row);
      place.put_rows(token, kDRemovalKey, d_row);
    }
    if constexpr (kDecays) give_decay(place, token, before, g);
    fade<RecurrentBackward>(place, token, g);
    if constexpr (kRemoves) {
      place.load_row(token, kRemovalKey, row);
      g.add(row, of_found);
    }
  }

  // The gradients of the decays. They overwrite `before`.
  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE static void give_decay(const Place& place, Real* token, Tile<Real, kRows, kColumns>& before,
                                    const Tile<Real, kRows, kColumns>& g) {
    Real row[kRows], column[kColumns], d_row[kRows];
    before.multiply(g);
    if constexpr (kByValue) {
      place.load_column(token, kValueDecay, column);
      before.read_rows(column, d_row);
      place.load_row(token, kKeyDecay, row);
      before.read(row, column);
      add_lanes(column, place.plan.lanes);
      place.put_columns(token, kDValueDecay, column);
    } else {
      before.add_columns(d_row);
    }
    place.put_rows(token, kDDecay, d_row);
  }

  // d_k -= d_e W'
  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void correct_key(const Place& place, const Real* token, const Tile<Real, kRows, kColumns>& before,
                              const Real (&d_error)[kColumns], Real (&d_key)[kRows]) const {
    Real decay[kRows], found[kRows];
    if constexpr (kByKey)
      place.load_row(token, kKeyDecay, decay);
    else
      FWP_UNROLL for (int r = 0; r < kRows; ++r) decay[r] = kByHead ? place.scalar(token, kHeadDecay) : Real(1);
    before.read_rows(d_error, found);
    FWP_UNROLL for (int r = 0; r < kRows; ++r) d_key[r] = fma(-decay[r], found[r], d_key[r]);
  }
};

// For each row output, the sums over `slabs` arrays of (heads, tokens, rows), one thread per number, in the order of a binary
// tree. The arrays are overwritten. They have the tokens from `first` on; `out` has all.
template <typename Real, int kOutputs>
struct SlabSums {
  Real* parts[kOutputs];
  OutputArray out[kOutputs];
  int64_t heads, first, tokens, length;
  int slabs, rows;

  FWP_BOTH int64_t count() const { return heads * tokens * rows; }
  int64_t blocks() const { return (kOutputs * count() + kThreadsPerBlock - 1) / kThreadsPerBlock; }

  FWP_DEVICE void run() const {
    const int64_t index = int64_t(blockIdx.x) * kThreadsPerBlock + int(threadIdx.x), i = index % count();
    const int64_t token = i / rows, head = token / tokens;
    const int64_t to = (head * length + first + token % tokens) * rows + i % rows;
    FWP_UNROLL for (int n = 0; n < kOutputs; ++n) {
      if (index / count() != n || !out[n].data) continue;
      Real* const x = parts[n] + i;
      for (int distance = 1; distance < slabs; distance *= 2)
        for (int s = 0; s + distance < slabs; s += 2 * distance) x[s * count()] += x[(s + distance) * count()];
      with_element<Real>(out[n].type, [&](auto* element) { round_to(x[0], static_cast<decltype(element)>(out[n].data)[to]); });
    }
  }
};

// out = the product of two vectors of each token, with one warp per token. x is (..., width), in the state's type. Without y,
// it is the sum of x.
template <typename Real>
struct TokenSums {
  const Real* x;
  InputArray y;
  int64_t heads_per_batch, length, tokens;
  int width;
  OutputArray out;

  static constexpr int kTokens = kThreadsPerBlock / kWarp;  // of a block
  int64_t blocks() const { return (tokens + kTokens - 1) / kTokens; }

  FWP_DEVICE void run() const {
    const int lane = int(threadIdx.x) % kWarp;
    const int64_t t = int64_t(blockIdx.x) * kTokens + int(threadIdx.x) / kWarp;
    if (t >= tokens) return;
    Real sum[1] = {Real(0)};
    if (y.data) {
      const int64_t head = t / length, at = head / heads_per_batch * y.batch + head % heads_per_batch * y.head;
      with_element<Real>(y.type, [&](auto* element) {
        const auto* of_y = static_cast<decltype(element)>(const_cast<void*>(y.data)) + at + t % length * y.token;
        for (int i = lane; i < width; i += kWarp) sum[0] = fma(x[t * width + i], Real(number(of_y[i])), sum[0]);
      });
    } else {
      for (int i = lane; i < width; i += kWarp) sum[0] += x[t * width + i];
    }
    add_lanes(sum, kWarp);
    if (lane != 0) return;
    with_element<Real>(out.type, [&](auto* element) { round_to(sum[0], static_cast<decltype(element)>(out.data)[t]); });
  }
};

}  // namespace fwp::cuda
