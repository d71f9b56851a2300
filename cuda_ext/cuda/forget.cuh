// Rules with decays or removals: one forward scan and two reverse scans. README.md derives the backward pass. The decays are a
// along the keys and z along the values. k is the key, b the rate, y the key of a removal, and p the vector that is removed:
//     W' = (a^T z) * W_{t-1}      e = v - k W', or v      s = y W_{t-1}      W = W' + k^T b e - p^T s      out = q W
// The columns of W are independent. So are those of its transpose, once e and s are known.
#pragma once

#include "scan.cuh"

namespace fwp::cuda {

enum class Fades { kHead, kKey, kKeyAndValue };
enum class Erases { kNothing, kKey, kRemoval };

template <typename A, Fades kFades, Erases kErases>
struct ForgetForward : Scan<A, 2 + (kFades != Fades::kHead) + 2 * (kErases == Erases::kRemoval),
                            1 + (kFades == Fades::kKeyAndValue), 1 + (kFades == Fades::kHead),
                            1 + (kErases != Erases::kNothing)> {
  enum Rows { kKey, kQuery, kKeyDecay, kRemovalKey = kKeyDecay + (kFades != Fades::kHead), kRemoval };
  enum Columns { kValue, kValueDecay };
  enum Scalars { kRate, kHeadDecay };
  enum Outputs { kOut, kRetrieved };

  Matrices<A> kept;  // one for each whole chunk of a head

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    const auto step = [&](const auto& place, A* token, auto& state) {
      A row[kRows], value[kColumns], read[kColumns];
      [[maybe_unused]] A found[kColumns];
      if constexpr (kErases == Erases::kRemoval) {
        place.load_row(token, kRemovalKey, row);
        state.read(row, found);
        add_lanes(found, place.plan.lanes);
        place.put_columns(token, kRetrieved, found);
      }
      if constexpr (kFades == Fades::kHead) {
        state.scale(place.scalar(token, kHeadDecay));
      } else {
        place.load_row(token, kKeyDecay, row);
        if constexpr (kFades == Fades::kKeyAndValue) {
          place.load_column(token, kValueDecay, value);
          state.scale(row, value);
        } else {
          state.scale_rows(row);
        }
      }
      place.load_column(token, kValue, value);
      place.load_row(token, kKey, row);
      if constexpr (kErases == Erases::kKey) {
        state.read(row, read);
        add_lanes(read, place.plan.lanes);
        FWP_UNROLL for (int c = 0; c < kColumns; ++c) value[c] -= read[c];
        place.put_columns(token, kRetrieved, value);
      }
      scaled(place.scalar(token, kRate), value, value);
      state.add(row, value);
      if constexpr (kErases == Erases::kRemoval) {
        place.load_row(token, kRemoval, row);
        state.subtract(row, found);
      }
      place.load_row(token, kQuery, row);
      state.read(row, read);
      add_lanes(read, place.plan.lanes);
      place.put_columns(token, kOut, read);
    };
    // The end of a chunk is always the end of a stage.
    this->template scan<kRows, kColumns>(false, step, [&](const auto& place, int64_t end, const auto& state) {
      if (end % kChunk == 0) place.store(state, kept, place.head * (place.size.length / kChunk) + end / kChunk - 1);
    });
  }
};

// A reverse scan goes back through kGroup tokens between two stored states. It rebuilds the states of a chunk in two steps:
// first one before each group, then, in each group, one before each token.
constexpr int kGroup = 4;
constexpr int kGroups = kChunk / kGroup;

// A reverse scan with G, the gradient of W, and with W itself if kRebuilds. Self::go_back(place, token, before, G) turns G into
// the gradient of W_{t-1}. If kRebuilds, Self::go_on(place, token, whether W is read, W) turns W_{t-1} into W. before() loads
// W_{t-1} into registers, only when it is needed.
template <typename Self, typename A, int kRowParts, int kColumnParts, int kScalars, int kOutputs, bool kRebuilds_>
struct BackwardScan {
  using Number = A;
  using Arrays = TokenArrays<kRowParts, kColumnParts, kScalars, kOutputs>;
  static constexpr bool kRebuilds = kRebuilds_;
  static constexpr int kStates = kGroups - 1 + kGroup;  // of its tile that a thread keeps

  ScanSize size;
  Plan plan;  // its stage is kGroup if kRebuilds
  Arrays arrays;
  Matrices<const A> initial, kept, d_last;
  Matrices<A> d_initial;

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    const Place<A, kRows, kColumns, Arrays> place(size, plan, arrays);
    Tile<A, kRows, kColumns> g;
    place.load(d_last, place.head, g);
    if constexpr (kRebuilds) {
      go_in_groups(place, g);
    } else {
      place.for_tokens(
          true, [&](A* token) { undo(place, token, [] {}, g); }, [](int64_t) {});
    }
    place.store(g, d_initial, place.head);
  }

 private:
  // Each group of a chunk except the last is visited twice: first in forward order, then in reverse.
  struct GroupStage : Stage {
    int64_t chunk;
    int group, groups;  // of the chunk
    bool forwards, starts_chunk;
  };

  FWP_DEVICE const Self& self() const { return static_cast<const Self&>(*this); }

  FWP_DEVICE int64_t count_stages() const {
    const int64_t groups = (size.length + kGroup - 1) / kGroup;
    return 2 * groups - (size.length + kChunk - 1) / kChunk;
  }

  FWP_DEVICE GroupStage stage_at(int64_t n) const {
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
    return {{first, left < kGroup ? int(left) : kGroup, !forwards}, chunk, group, groups, forwards, i == 0};
  }

  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void go_in_groups(const Place& place, Tile<A, kRows, kColumns>& g) const {
    Tile<A, kRows, kColumns> state;
    A* const states = place.own_memory() + place.thread;
    place.for_stages(
        count_stages(), [&](int64_t n) { return stage_at(n); },
        [&](int at, const GroupStage& stage) {
          if (stage.starts_chunk) load_first(place, stage.chunk, state);
          if (stage.forwards)
            save(state, states, stage.group);
          else if (stage.group < stage.groups - 1)
            restore(states, stage.group, state);
          FWP_UNROLL_BY(1) for (int s = 0; s < stage.count; ++s) {
            A* const token = place.token(at, s);
            if (place.begins(token)) state.clear();
            if (!stage.forwards) save(state, states, kGroups - 1 + s);
            self().go_on(place, token, !stage.forwards, state);
          }
          if (stage.forwards) return;
          FWP_UNROLL_BY(1) for (int s = stage.count - 1; s >= 0; --s) {
            const auto before = [&] {
              Tile<A, kRows, kColumns> found;
              restore(states, kGroups - 1 + s, found);
              return found;
            };
            undo(place, place.token(at, s), before, g);
          }
        });
  }

  template <typename Place, typename Before, typename Tile>
  FWP_DEVICE void undo(const Place& place, A* token, Before before, Tile& g) const {
    self().go_back(place, token, before, g);
    if (place.begins(token)) g.clear();
  }

  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void load_first(const Place& place, int64_t chunk, Tile<A, kRows, kColumns>& state) const {
    if (chunk > 0)
      place.load(kept, place.head * (size.length / kChunk) + chunk - 1, state);
    else
      place.load(initial, place.head, state);
  }

  // One number for each thread of the block, by slots and then by elements.
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
};

// Over value columns: d_write = k G, d_v = b d_write, d_s = -p G. For decays along the values also their gradient, which needs
// W.
template <typename A, Fades kFades, Erases kErases>
struct ForgetValues
    : BackwardScan<ForgetValues<A, kFades, kErases>, A,
                   2 + (kFades != Fades::kHead) + 2 * (kErases == Erases::kRemoval),
                   1 + 2 * (kFades == Fades::kKeyAndValue), 1 + (kFades == Fades::kHead),
                   2 + (kFades == Fades::kKeyAndValue) + (kErases == Erases::kRemoval), kFades == Fades::kKeyAndValue> {
  enum Rows { kKey, kQuery, kKeyDecay, kRemovalKey = kKeyDecay + (kFades != Fades::kHead), kRemoval };
  enum Columns { kDOut, kValue, kValueDecay };
  enum Scalars { kRate, kHeadDecay };
  enum Outputs { kDV, kDWrite, kDValueDecay, kDFound = kDValueDecay };

  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void go_on(const Place& place, A* token, bool, Tile<A, kRows, kColumns>& state) const {
    A row[kRows], column[kColumns];
    place.load_row(token, kKeyDecay, row);
    place.load_column(token, kValueDecay, column);
    state.scale(row, column);
    place.load_row(token, kKey, row);
    place.load_column(token, kValue, column);
    scaled(place.scalar(token, kRate), column, column);
    state.add(row, column);
  }

  template <typename Place, typename Before, int kRows, int kColumns>
  FWP_DEVICE void go_back(const Place& place, A* token, Before before, Tile<A, kRows, kColumns>& g) const {
    A row[kRows], column[kColumns], of_write[kColumns];
    [[maybe_unused]] A of_found[kColumns];
    place.load_row(token, kQuery, row);
    place.load_column(token, kDOut, column);
    g.add(row, column);
    place.load_row(token, kKey, row);
    g.read(row, of_write);
    add_lanes(of_write, place.plan.lanes);
    place.put_columns(token, kDWrite, of_write);
    scaled(place.scalar(token, kRate), of_write, of_write);
    place.put_columns(token, kDV, of_write);
    if constexpr (kErases == Erases::kRemoval) {
      A removal[kRows];
      place.load_row(token, kRemoval, removal);
      g.read(removal, of_found);
      add_lanes(of_found, place.plan.lanes);
      scaled(A(-1), of_found, of_found);
      place.put_columns(token, kDFound, of_found);
    }
    if constexpr (kErases == Erases::kKey) g.subtract(row, of_write);
    if constexpr (kFades == Fades::kHead) {
      g.scale(place.scalar(token, kHeadDecay));
    } else {
      place.load_row(token, kKeyDecay, row);
      if constexpr (kFades == Fades::kKeyAndValue) {
        g.scale_rows(row);
        g.read_with(before(), column);
        add_lanes(column, place.plan.lanes);
        place.put_columns(token, kDValueDecay, column);
        place.load_column(token, kValueDecay, column);
        g.scale_columns(column);
      } else {
        g.scale_rows(row);
      }
    }
    if constexpr (kErases == Erases::kRemoval) {
      place.load_row(token, kRemovalKey, row);
      g.add(row, of_found);
    }
  }
};

// Over key columns, with the transposes of W and G:
//     d_q = d_out W      d_k = b e G - d_e W' (if the rule erases)      d_p = -s G      d_y = d_s W_{t-1}
//     d_a = z (G' * W_{t-1})      with d_e = b d_write and G' = G - d_e^T k (if the rule erases)
template <typename A, Fades kFades, Erases kErases>
struct ForgetKeys
    : BackwardScan<ForgetKeys<A, kFades, kErases>, A,
                   2 + (kFades == Fades::kKeyAndValue) + (kErases == Erases::kKey) + 2 * (kErases == Erases::kRemoval),
                   2 + (kFades != Fades::kHead) + 2 * (kErases == Erases::kRemoval), 1 + (kFades == Fades::kHead),
                   3 + 2 * (kErases == Erases::kRemoval), true> {
  enum Rows { kDOut, kError, kDWrite, kValueDecay = kDWrite, kFound = kDWrite, kDFound };
  enum Columns { kKey, kQuery, kKeyDecay, kRemovalKey = kKeyDecay + (kFades != Fades::kHead), kRemoval };
  enum Scalars { kRate, kHeadDecay };
  enum Outputs { kDQ, kDK, kDDecay, kDRemovalKey, kDRemoval };  // kDDecay by head: a part for each column

  template <typename Place, int kColumns>
  FWP_DEVICE void load_decay(const Place& place, const A* token, A (&decay)[kColumns]) const {
    if constexpr (kFades == Fades::kHead) {
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) decay[c] = place.scalar(token, kHeadDecay);
    } else {
      place.load_column(token, kKeyDecay, decay);
    }
  }

  template <typename Place, int kRows, int kColumns>
  FWP_DEVICE void go_on(const Place& place, A* token, bool reads, Tile<A, kRows, kColumns>& state) const {
    A row[kRows], column[kColumns];
    load_decay(place, token, column);
    state.scale_columns(column);
    if constexpr (kFades == Fades::kKeyAndValue) {
      place.load_row(token, kValueDecay, row);
      state.scale_rows(row);
    }
    place.load_row(token, kError, row);
    scaled(place.scalar(token, kRate), row, row);
    place.load_column(token, kKey, column);
    state.add(row, column);
    if constexpr (kErases == Erases::kRemoval) {
      place.load_row(token, kFound, row);
      place.load_column(token, kRemoval, column);
      state.subtract(row, column);
    }
    if (!reads) return;
    place.load_row(token, kDOut, row);
    state.read(row, column);
    add_lanes(column, place.plan.lanes);
    place.put_columns(token, kDQ, column);
  }

  template <typename Place, typename Before, int kRows, int kColumns>
  FWP_DEVICE void go_back(const Place& place, A* token, Before before, Tile<A, kRows, kColumns>& g) const {
    A row[kRows], column[kColumns], decay[kColumns], d_key[kColumns];
    place.load_row(token, kDOut, row);
    place.load_column(token, kQuery, column);
    g.add(row, column);
    place.load_row(token, kError, row);
    g.read(row, d_key);
    add_lanes(d_key, place.plan.lanes);
    scaled(place.scalar(token, kRate), d_key, d_key);
    load_decay(place, token, decay);
    if constexpr (kErases == Erases::kKey) {
      place.load_row(token, kDWrite, row);
      scaled(place.scalar(token, kRate), row, row);
      before().read(row, column);
      add_lanes(column, place.plan.lanes);
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) d_key[c] = fma(-decay[c], column[c], d_key[c]);
      place.load_column(token, kKey, column);
      g.subtract(row, column);
    }
    place.put_columns(token, kDK, d_key);
    if constexpr (kErases == Erases::kRemoval) {
      place.load_row(token, kFound, row);
      g.read(row, column);
      add_lanes(column, place.plan.lanes);
      scaled(A(-1), column, column);
      place.put_columns(token, kDRemoval, column);
    }
    if constexpr (kFades == Fades::kKeyAndValue) {
      place.load_row(token, kValueDecay, row);
      g.scale_rows(row);
    }
    g.read_with(before(), column);
    add_lanes(column, place.plan.lanes);
    place.put_columns(token, kDDecay, column);
    g.scale_columns(decay);
    if constexpr (kErases == Erases::kRemoval) {
      place.load_row(token, kDFound, row);
      before().read(row, column);
      add_lanes(column, place.plan.lanes);
      place.put_columns(token, kDRemovalKey, column);
      place.load_column(token, kRemovalKey, column);
      g.add(row, column);
    }
  }
};

// out = the product of two vectors of each token, with one warp per token. x is (..., width), in the state's type. Without y,
// it is the sum of x.
template <typename A>
struct TokenSums {
  const A* x;
  Tokens y;
  int64_t heads_per_batch, length, tokens;
  int width;
  Output out;

  FWP_DEVICE void run() const {
    const int lane = int(threadIdx.x) % kWarp;
    const int64_t t = int64_t(blockIdx.x) * (kThreadsPerBlock / kWarp) + int(threadIdx.x) / kWarp;
    if (t >= tokens) return;
    A sum[1] = {A(0)};
    if (y.data) {
      const int64_t head = t / length, at = head / heads_per_batch * y.batch + head % heads_per_batch * y.head;
      with_element<A>(y.type, [&](auto* element) {
        const auto* of_y = static_cast<decltype(element)>(const_cast<void*>(y.data)) + at + t % length * y.token;
        for (int i = lane; i < width; i += kWarp) sum[0] = fma(x[t * width + i], A(number(of_y[i])), sum[0]);
      });
    } else {
      for (int i = lane; i < width; i += kWarp) sum[0] += x[t * width + i];
    }
    add_lanes(sum, kWarp);
    if (lane != 0) return;
    with_element<A>(out.type, [&](auto* element) { round_to(sum[0], static_cast<decltype(element)>(out.data)[t]); });
  }
};

}  // namespace fwp::cuda
