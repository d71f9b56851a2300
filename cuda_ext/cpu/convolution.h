// A short causal convolution of each channel, and its gradients. A row is a token: its channels lie next to each other.
//
//     out_t = bias + sum over w < width of weight_w * x_{t - width + 1 + w}
//
// without the tokens before the first, and without those of another sequence. All rows have `n` channels.
#pragma once

#include <algorithm>

#include "state_block.h"

namespace fwp {

template <typename Real>
struct Convolution {
  int64_t length, n, width;
  Tokens<const Real> x, weight;  // (length, n), (width, n)
  const int64_t* sequence;       // numbers of the tokens' sequences; null: one sequence

  bool sees(int64_t t, int64_t s) const {
    return s >= 0 && t < length && (!sequence || sequence[s] == sequence[t]);
  }
  static FWP_INLINE void add(Real* __restrict sum, const Real* __restrict x, const Real* __restrict y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) sum[i] += x[i] * y[i];
  }

  // The rows of the tokens from `begin` to `end`.
  void forward(int64_t begin, int64_t end, const Real* bias, Tokens<Real> out) const {
    for (int64_t t = begin; t < end; ++t) {
      if (bias)
        std::copy_n(bias, n, out[t]);
      else
        std::fill_n(out[t], n, Real(0));
      for (int64_t w = 0; w < width; ++w)
        if (const int64_t s = t - width + 1 + w; sees(t, s)) add(out[t], weight[w], x[s], n);
    }
  }
  // The rows of d_x from `begin` to `end`, and what these tokens add to d_weight.
  void backward(int64_t begin, int64_t end, Tokens<const Real> d_out, Tokens<Real> d_x, Tokens<Real> d_weight) const {
    for (int64_t s = begin; s < end; ++s) {
      std::fill_n(d_x[s], n, Real(0));
      for (int64_t w = width - 1; w >= 0; --w)
        if (const int64_t t = s + width - 1 - w; sees(t, s)) {
          add(d_x[s], weight[w], d_out[t], n);
          add(d_weight[w], x[s], d_out[t], n);
        }
    }
  }
};

}  // namespace fwp
