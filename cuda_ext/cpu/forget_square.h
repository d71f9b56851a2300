// Rules that forget but erase nothing, on a state in registers: see square.h. forget.h describes the passes.
#pragma once

#include <algorithm>

#include "forget.h"
#include "square.h"

namespace fwp {

// The decay of a state by one token. Row i is multiplied by rows[i] * lanes, by one of the two, or by one number for
// all.
template <typename Real, bool kRows, bool kLanesFade>
struct Fade {
  const Real* rows = nullptr;
  Vector<Real> lanes = Vector<Real>{} + 1;

  FWP_INLINE Vector<Real> of(int i) const {
    if constexpr (kRows && kLanesFade) return rows[i] * lanes;
    if constexpr (kRows) return rows[i] - Vector<Real>{};
    return lanes;
  }
};

template <typename Real, Fades fades>
struct ForgetForwardSquare {
  StateBlock<Real, 1>& block;
  const int64_t length;
  const ForgetTokens<Real> in;
  Tokens<Real> out;
  Real* states;  // the state after each whole chunk; may be null

  void run() const {
    Square<Real> state(block);
    Real* to = states;
    for (int64_t t = 0; t < length; ++t) {
      Fade<Real, fades != Fades::kHead, fades != Fades::kKey> fade;
      if constexpr (fades == Fades::kHead) fade.lanes = in.head_decay[t] - Vector<Real>{};
      if constexpr (fades != Fades::kHead) fade.rows = in.key_decay[t];
      if constexpr (fades == Fades::kKeyAndValue) fade.lanes = load(in.value_decay[t]);
      const Vector<Real> value = in.rate_at(t) * load(in.v[t]);
      const Real* key = in.k[t];
      FWP_UNROLL for (int i = 0; i < kLanes<Real>; ++i) state.row[i] = state.row[i] * fade.of(i) + key[i] * value;
      store(out[t], state.read(in.q[t]));
      if (to && (t + 1) % kKeptEvery == 0) to = state.store_to(to);
    }
    state.store_to(block);
  }
};

template <typename Real, Fades fades>
struct ForgetBackwardSquare {
  static constexpr int kSize = kLanes<Real> * kLanes<Real>;  // numbers of a state
  static constexpr int64_t scratch() { return kKeptEvery * kSize; }

  const int64_t length;
  const ForgetTokens<Real> in;
  Tokens<const Real> d_out;
  const ForgetGradients<Real> to;
  Matrix<const Real> initial, d_final;  // transposed
  Matrix<Real> d_initial;
  const Real* states;  // after each whole chunk
  Real* work;

  void run() const {
    Square<Real> gradient = square_of(d_final);
    for (int64_t c = (length + kKeptEvery - 1) / kKeptEvery; c-- > 0;) {
      const int64_t first = c * kKeptEvery, end = std::min(length, first + kKeptEvery);
      rebuild(first, end, c ? Matrix<const Real>{states + (c - 1) * kSize, 1, kLanes<Real>} : initial);
      for (int64_t t = end; t-- > first;) step(t, gradient, work + (t - first) * kSize);
    }
    gradient.store_to(d_initial);
  }

 private:
  FWP_INLINE Square<Real> square_of(const Matrix<const Real>& m) const {
    return Square<Real>(StateBlock<Real, 1>(kLanes<Real>, kLanes<Real>, m, {nullptr, 0, 0}, work));
  }
  FWP_INLINE Vector<Real> key(int64_t t) const { return in.rate_at(t) * load(in.k[t]); }
  // Rows of the state are value dimensions here, and lanes are key dimensions.
  FWP_INLINE auto fade_at(int64_t t) const {
    Fade<Real, fades == Fades::kKeyAndValue, true> fade;
    if constexpr (fades == Fades::kHead)
      fade.lanes = in.head_decay[t] - Vector<Real>{};
    else
      fade.lanes = load(in.key_decay[t]);
    if constexpr (fades == Fades::kKeyAndValue) fade.rows = in.value_decay[t];
    return fade;
  }

  // Store the state before each token, and d_q.
  FWP_INLINE void rebuild(int64_t first, int64_t end, const Matrix<const Real>& before) const {
    Real* next = work;
    Square<Real> state = square_of(before);
    for (int64_t t = first; t < end; ++t) {
      next = state.store_to(next);
      const auto fade = fade_at(t);
      const Vector<Real> key = this->key(t);
      const Real* value = in.v[t];
      FWP_UNROLL for (int j = 0; j < kLanes<Real>; ++j) state.row[j] = state.row[j] * fade.of(j) + value[j] * key;
      store(to.q[t], state.read(d_out[t]));
    }
  }

  FWP_INLINE void step(int64_t t, Square<Real>& gradient, const Real* before) const {
    const auto fade = fade_at(t);
    gradient.add(d_out[t], load(in.q[t]));
    const Vector<Real> d_key = gradient.read(in.v[t]);
    store(to.v[t], gradient.multiply(key(t)));
    // Return the gradient of the decay of row j, and turn the gradient of row j into that before the decay.
    const auto pass_fade = [&](int j) __attribute__((always_inline)) {
      const Vector<Real> d_fade = gradient.row[j] * load(before + j * kLanes<Real>);
      gradient.row[j] *= fade.of(j);
      return d_fade;
    };
    if constexpr (fades == Fades::kHead) {
      to.head_decay[t] = sum_lanes<Real>(sum_in_turn<Real>(pass_fade));
    } else if constexpr (fades == Fades::kKey) {
      store(to.key_decay[t], sum_in_turn<Real>(pass_fade));
    } else {
      Vector<Real> d_lanes[2] = {};
      store(to.value_decay[t], sum_lanes_in_turn<Real>([&](int j) __attribute__((always_inline)) {
        const Vector<Real> d_fade = pass_fade(j);
        d_lanes[j / (kLanes<Real> / 2)] += fade.rows[j] * d_fade;
        return fade.lanes * d_fade;
      }));
      store(to.key_decay[t], d_lanes[0] + d_lanes[1]);
    }
    if (to.rate.data) to.rate[t] = sum_lanes<Real>(load(in.k[t]) * d_key);
    store(to.k[t], in.rate_at(t) * d_key);
  }
};

}  // namespace fwp
