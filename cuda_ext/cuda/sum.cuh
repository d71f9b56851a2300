// The sum rule: M += key^T value, out = query M. Its three backward passes are this very scan with the roles of its
// arguments exchanged: see README.md.
#pragma once

#include "scan.cuh"

namespace fwp::cuda {

template <typename A>
struct SumScan {
  using Number = A;
  using Inputs = TokenInputs<A, 2, 1, 0>;
  enum Rows { kKey, kQuery };

  ScanSize size;
  Plan plan;
  Inputs inputs;
  bool reverse;
  Matrices<const A> initial;
  Matrices<A> last;
  Output out;

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    const Place<A, kRows, kColumns, Inputs> place(size, plan, inputs);
    Tile<A, kRows, kColumns> state;
    place.load(initial, place.head, state);
    place.for_tokens(reverse, [&](int64_t t, const A* token) {
      A key[kRows], query[kRows], value[kColumns], read[kColumns];
      place.load_row(token, kKey, key);
      place.load_row(token, kQuery, query);
      place.load_column(token, 0, value);
      state.add(key, value);
      state.read(query, read);
      add_lanes(read, plan.lanes);
      place.store_columns(out, t, read);
    });
    place.store(state, last, place.head);
  }
};

}  // namespace fwp::cuda
