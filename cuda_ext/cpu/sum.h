// The sum rule on one block of columns. Its three backward passes are the same scan with exchanged arguments: see
// ../cpu.md. ../rule.h has the symbols.
//
//     for t in range(L):
//         W += outer(k[t], v[t])
//         out[t] = q[t] @ W
#pragma once

#include "state_block.h"

namespace fwp {

template <typename Real, int NV>
struct SumScan {
  StateBlock<Real, NV>& block;
  Tokens<const Real> q, k, v;
  Tokens<Real> out;

  template <int T>
  FWP_INLINE void run(int64_t t, bool is_last) {
    Group<Real, NV> value[T];
    RowSums<Real, NV, T> read(block.rows);
    const Real *key[T], *query[T];
    FWP_UNROLL for (int s = 0; s < T; ++s) {
      key[s] = k[t + s];
      query[s] = q[t + s];
      value[s].load_from(v[t + s], block.columns);
    }
    const Ahead<Real, T, 4> ahead(!is_last && block.rows > kFewRows, t + kTokensAhead, q, k, v, out);
    block.change_rows(is_last, ahead, [&](int64_t i, Group<Real, NV>& w) __attribute__((always_inline)) {
      FWP_UNROLL for (int s = 0; s < T; ++s) {
        w.add(key[s][i], value[s]);
        read.total[s].add(query[s][i], w);
      }
    }, [&]() __attribute__((always_inline)) { read.settle(); });
    read.finish();
    FWP_UNROLL for (int s = 0; s < T; ++s) read.total[s].store_to(out[t + s], block.columns);
  }
};

}  // namespace fwp
