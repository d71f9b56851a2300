// The delta rule on a state in registers: see square.h. delta.h describes the three passes.
#pragma once

#include <algorithm>

#include "square.h"

namespace fwp {

template <typename Real>
FWP_INLINE Real multiply(const Real* x, const Real* y) {
  return sum_lanes<Real>(load(x) * load(y));
}

template <typename Real>
struct DeltaForwardSquare {
  StateBlock<Real, 1>& block;
  const int64_t length;
  Tokens<const Real> q, k, v;
  Rates<const Real> rate;
  Tokens<Real> out, error;

  // Each key reads the state before the last write, and the result is corrected. So the read does not wait for the
  // whole write. This does not apply to the first of every kSplit tokens: so a sequence can be split there and no bit
  // changes.
  FWP_INLINE void run() const {
    Square<Real> state(block);
    for (int64_t first = 0; first < length; first += kSplit) {
      const int64_t last = std::min(first + kSplit, length) - 1;
      Vector<Real> e = load(v[first]) - state.read(k[first]);
      for (int64_t t = first; t <= last; ++t) {
        const int64_t next = std::min(t + 1, last);
        const Vector<Real> write = rate[t] * e;
        store(error[t], e);
        e = (load(v[next]) - state.read(k[next])) - multiply(k[next], k[t]) * write;
        state.add(k[t], write);
        store(out[t], state.read(q[t]));
      }
    }
    state.store_to(block);
  }
};

// All token sequences are passed in reverse.
template <typename Real>
struct DeltaBackwardWritesSquare {
  StateBlock<Real, 1>& block;
  const int64_t length;
  Tokens<const Real> q, k, d_out, error;
  Rates<const Real> rate;
  Tokens<Real> d_k, d_v;
  Rates<Real> d_rate;

  void run() const {
    Square<Real> gradient(block);
    for (int64_t t = 0; t < length; ++t) {
      const Vector<Real> e = load(error[t]);
      gradient.add(q[t], load(d_out[t]));
      const Vector<Real> d_write = gradient.read(k[t]), d_value = rate[t] * d_write;
      store(d_v[t], d_value);
      d_rate[t] = sum_lanes<Real>(e * d_write);
      store(d_k[t], rate[t] * gradient.multiply(e));
      gradient.subtract(k[t], d_value);
    }
    gradient.store_to(block);
  }
};

template <typename Real>
struct DeltaBackwardReadsSquare {
  const StateBlock<Real, 1>& block;
  const int64_t length;
  Tokens<const Real> k, d_out, error, d_v;
  Rates<const Real> rate;
  Tokens<Real> d_q, d_k;

  void run() const {
    Square<Real> state(block);
    for (int64_t t = 0; t < length; ++t) {
      alignas(kVectorBytes) Real write[kLanes<Real>];
      store(write, rate[t] * load(error[t]));
      store(d_k[t], load(d_k[t]) - state.read(d_v[t]));
      state.add(write, load(k[t]));
      store(d_q[t], state.read(d_out[t]));
    }
  }
};

}  // namespace fwp
