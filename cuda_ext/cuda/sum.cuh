// The sum rule: M += key^T value, out = query M. Its three backward passes are the same scan with exchanged arguments: see
// README.md.
#pragma once

#include "scan.cuh"

namespace fwp::cuda {

template <typename A>
struct SumScan : Scan<A, 2, 1, 0, 1> {
  enum Rows { kKey, kQuery };
  enum Outputs { kOut };

  bool reverse;

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    this->template scan<kRows, kColumns>(reverse, [&](const auto& place, A* token, auto& state) {
      A key[kRows], query[kRows], value[kColumns], read[kColumns];
      place.load_row(token, kKey, key);
      place.load_row(token, kQuery, query);
      place.load_column(token, 0, value);
      state.add(key, value);
      state.read(query, read);
      add_lanes(read, place.plan.lanes);
      place.put_columns(token, kOut, read);
    });
  }
};

}  // namespace fwp::cuda
