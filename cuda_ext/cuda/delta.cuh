// The delta rule: e = v - k W, W += k^T beta e, out = q W. README.md derives the backward pass, with the same names. It stores
// no states and undoes no writes: the errors rebuild W in forward order, and d_write = k G rebuilds G in reverse. Both repeat
// exactly the operations of the pass that computed them, in the same order, so to the last bit (unless that pass ran on tensor
// cores).
#pragma once

#include "scan.cuh"

namespace fwp::cuda {

template <typename A>
struct DeltaForward : Scan<A, 2, 1, 1, 2> {
  enum Rows { kKey, kQuery };
  enum Outputs { kOut, kError };

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    this->template scan<kRows, kColumns>(false, [&](const auto& place, A* token, auto& state) {
      A key[kRows], query[kRows], value[kColumns], found[kColumns], write[kColumns], read[kColumns];
      place.load_row(token, kKey, key);
      place.load_column(token, 0, value);
      state.read(key, found);
      add_lanes(found, place.plan.lanes);
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) value[c] -= found[c];
      place.put_columns(token, kError, value);
      scaled(place.scalar(token, 0), value, write);
      state.add(key, write);
      place.load_row(token, kQuery, query);
      state.read(query, read);
      add_lanes(read, place.plan.lanes);
      place.put_columns(token, kOut, read);
    });
  }
};

// In reverse over value columns, with G the gradient of W: d_v = beta d_write, where d_write = k G.
template <typename A>
struct DeltaBackwardValues : Scan<A, 2, 1, 1, 2> {
  enum Rows { kKey, kQuery };
  enum Outputs { kDV, kDWrite };

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    this->template scan<kRows, kColumns>(true, [&](const auto& place, A* token, auto& g) {
      A key[kRows], query[kRows], d_out[kColumns], d_found[kColumns], d_value[kColumns];
      place.load_row(token, kQuery, query);
      place.load_column(token, 0, d_out);
      g.add(query, d_out);
      place.load_row(token, kKey, key);
      g.read(key, d_found);
      add_lanes(d_found, place.plan.lanes);
      place.put_columns(token, kDWrite, d_found);
      scaled(place.scalar(token, 0), d_found, d_value);
      place.put_columns(token, kDV, d_value);
      g.subtract(key, d_value);
    });
  }
};

// In forward order over key columns of W^T: d_q = d_out W^T, the half of d_k that is -d_v W_{t-1}^T, and d_beta = d_write . e.
template <typename A>
struct DeltaBackwardQueries : Scan<A, 3, 1, 1, 2> {
  enum Rows { kError, kDWrite, kDOut };
  enum Outputs { kDQ, kHalfOfDK };

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    this->template scan<kRows, kColumns>(false, [&](const auto& place, A* token, auto& state) {
      A error[kRows], d_write[kRows], d_out[kRows], key[kColumns], read[kColumns], of_rate[1] = {A(0)};
      place.load_row(token, kError, error);
      place.load_row(token, kDWrite, d_write);
      FWP_UNROLL for (int r = 0; r < kRows; ++r) of_rate[0] = fma(d_write[r], error[r], of_rate[0]);
      add_lanes(of_rate, place.plan.lanes);
      place.put_sum(token, of_rate[0]);
      const A beta = place.scalar(token, 0);
      scaled(-beta, d_write, d_write);
      state.read(d_write, read);
      add_lanes(read, place.plan.lanes);
      place.put_columns(token, kHalfOfDK, read);
      scaled(beta, error, error);
      place.load_column(token, 0, key);
      state.add(error, key);
      place.load_row(token, kDOut, d_out);
      state.read(d_out, read);
      add_lanes(read, place.plan.lanes);
      place.put_columns(token, kDQ, read);
    });
  }
};

// In reverse over key columns of G^T: the other half of d_k, beta e G^T.
template <typename A>
struct DeltaBackwardKeys : Scan<A, 3, 3, 1, 1> {
  enum Rows { kError, kDWrite, kDOut };
  enum Columns { kQuery, kKey, kHalfOfDK };
  enum Outputs { kDK };

  template <int kRows, int kColumns>
  FWP_DEVICE void run() const {
    this->template scan<kRows, kColumns>(true, [&](const auto& place, A* token, auto& g) {
      A error[kRows], d_write[kRows], d_out[kRows], query[kColumns], key[kColumns], d_key[kColumns], half[kColumns];
      place.load_row(token, kDOut, d_out);
      place.load_column(token, kQuery, query);
      g.add(d_out, query);
      place.load_row(token, kError, error);
      g.read(error, d_key);
      add_lanes(d_key, place.plan.lanes);
      const A beta = place.scalar(token, 0);
      place.load_column(token, kHalfOfDK, half);
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) d_key[c] = fma(beta, d_key[c], half[c]);
      place.put_columns(token, kDK, d_key);
      place.load_row(token, kDWrite, d_write);
      place.load_column(token, kKey, key);
      scaled(beta, d_write, d_write);
      g.subtract(d_write, key);
    });
  }
};

}  // namespace fwp::cuda
