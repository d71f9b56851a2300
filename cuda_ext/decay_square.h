// The decay rule, and the gated rule, on a state in registers: see square.h. decay.h says what the passes do.
#pragma once

#include <algorithm>

#include "decay.h"
#include "square.h"

namespace fwp {

// What one token leaves of a state: of row i the share rows[i] * lanes, or the gate of all of it.
template <typename A, bool kGated>
struct Fade {
  const A* rows;
  Vector<A> lanes;

  FWP_INLINE Fade(const Tokens<const A>& rows, const Tokens<const A>& lanes, const Rates<const A>& gate, int64_t t) {
    if constexpr (kGated)
      this->lanes = gate[t] - Vector<A>{};
    else
      this->rows = rows[t], this->lanes = load(lanes[t]);
  }
  FWP_INLINE Vector<A> of(int i) const {
    if constexpr (kGated) return lanes;
    return rows[i] * lanes;
  }
};

template <typename A, bool kGated>
struct DecayForwardSquare {
  StateBlock<A, 1>& block;
  const int64_t length;
  Tokens<const A> q, k, v, key_decay, value_decay;
  Rates<const A> gate;  // instead of both decays, if kGated
  Tokens<A> out;
  A* states;  // the state after each whole chunk

  void run() const {
    Square<A> state(block);
    A* to = states;
    for (int64_t t = 0; t < length; ++t) {
      const Fade<A, kGated> fade(key_decay, value_decay, gate, t);
      Vector<A> value = load(v[t]);
      if constexpr (kGated) value *= 1 - gate[t];
      FWP_UNROLL for (int i = 0; i < kLanes<A>; ++i) state.row[i] = state.row[i] * fade.of(i) + k[t][i] * value;
      store(out[t], state.read(q[t]));
      if ((t + 1) % kChunk == 0) to = state.store_to(to);
    }
    state.store_to(block);
  }
};

template <typename A, bool kGated>
struct DecayBackwardSquare {
  static constexpr int kSize = kLanes<A> * kLanes<A>;  // of a state
  static constexpr int64_t scratch() { return kChunk * kSize; }

  const int64_t length;
  Tokens<const A> q, k, key_decay, v, value_decay, d_out;
  Rates<const A> gate;  // instead of both decays, if kGated
  Tokens<A> d_q, d_k, d_key_decay, d_v, d_value_decay;
  Rates<A> d_gate;
  Matrix<const A> initial, d_final;  // transposed
  Matrix<A> d_initial;
  const A* states;  // after each whole chunk
  A* work;

  void run() const {
    Square<A> gradient = square_of(d_final);
    for (int64_t c = (length + kChunk - 1) / kChunk; c-- > 0;) {
      const int64_t first = c * kChunk, end = std::min(length, first + kChunk);
      rebuild(first, end, c ? Matrix<const A>{states + (c - 1) * kSize, 1, kLanes<A>} : initial);
      for (int64_t t = end; t-- > first;) step(t, gradient, work + (t - first) * kSize);
    }
    gradient.store_to(d_initial);
  }

 private:
  FWP_INLINE Square<A> square_of(const Matrix<const A>& m) const {
    return Square<A>(StateBlock<A, 1>(kLanes<A>, kLanes<A>, m, {nullptr, 0, 0}, work));
  }
  FWP_INLINE Vector<A> key(int64_t t) const {
    if constexpr (kGated) return (1 - gate[t]) * load(k[t]);
    return load(k[t]);
  }

  // The states before each token, and d_q.
  FWP_INLINE void rebuild(int64_t first, int64_t end, const Matrix<const A>& before) const {
    A* to = work;
    Square<A> state = square_of(before);
    for (int64_t t = first; t < end; ++t) {
      to = state.store_to(to);
      const Fade<A, kGated> fade(value_decay, key_decay, gate, t);
      const Vector<A> key = this->key(t);
      FWP_UNROLL for (int j = 0; j < kLanes<A>; ++j) state.row[j] = state.row[j] * fade.of(j) + v[t][j] * key;
      store(d_q[t], state.read(d_out[t]));
    }
  }

  FWP_INLINE void step(int64_t t, Square<A>& gradient, const A* before) const {
    const Fade<A, kGated> fade(value_decay, key_decay, gate, t);
    gradient.add(d_out[t], load(q[t]));
    const Vector<A> d_key = gradient.read(v[t]);
    store(d_v[t], gradient.multiply(key(t)));
    // The gradient of what is left of row j; that of the state goes on to the one before.
    const auto pass_fade = [&](int j) __attribute__((always_inline)) {
      const Vector<A> d_fade = gradient.row[j] * load(before + j * kLanes<A>);
      gradient.row[j] *= fade.of(j);
      return d_fade;
    };
    if constexpr (kGated) {
      d_gate[t] = sum_lanes<A>(sum_in_turn<A>(pass_fade) - load(k[t]) * d_key);
      store(d_k[t], (1 - gate[t]) * d_key);
    } else {
      Vector<A> d_lanes[2] = {};
      store(d_value_decay[t], sum_lanes_in_turn<A>([&](int j) __attribute__((always_inline)) {
        const Vector<A> d_fade = pass_fade(j);
        d_lanes[j / (kLanes<A> / 2)] += fade.rows[j] * d_fade;
        return fade.lanes * d_fade;
      }));
      store(d_key_decay[t], d_lanes[0] + d_lanes[1]);
      store(d_k[t], d_key);
    }
  }
};

}  // namespace fwp
