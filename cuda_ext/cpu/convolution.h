// A short causal convolution of each channel, and its gradients. Rows are tokens, and lie next to each other in memory:
//
//     out_t = bias + sum over w < width of weight_w * x_{t - width + 1 + w}
//
// without the tokens before the first, and without those of another sequence. All rows have `n` channels.
#pragma once

#include <algorithm>

#include "state_block.h"

namespace fwp {

constexpr int64_t kChannels = 64;  // a block's rows, weights and sums stay in the first-level cache

template <typename A>
struct Convolution {
  int64_t length, n, width;
  Tokens<const A> x, weight;  // (length, n), (width, n)
  const int64_t* sequence;    // numbers of the tokens' sequences; null: one sequence

  // Call f(t, w, s) for the tokens s that token t sees, under weight w.
  template <typename F>
  FWP_INLINE void for_seen(F f) const {
    for (int64_t t = 0; t < length; ++t)
      for (int64_t w = std::max<int64_t>(0, width - 1 - t); w < width; ++w) {
        const int64_t s = t - width + 1 + w;
        if (!sequence || sequence[s] == sequence[t]) f(t, w, s);
      }
  }
  static FWP_INLINE void add(A* sum, const A* x, const A* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) sum[i] += x[i] * y[i];
  }

  void forward(const A* bias, Tokens<A> out) const {
    for (int64_t t = 0; t < length; ++t)
      for (int64_t i = 0; i < n; ++i) out[t][i] = bias ? bias[i] : 0;
    for_seen([&](int64_t t, int64_t w, int64_t s) { add(out[t], weight[w], x[s], n); });
  }
  // d_weight is added to.
  void backward(Tokens<const A> d_out, Tokens<A> d_x, Tokens<A> d_weight) const {
    for (int64_t t = 0; t < length; ++t) std::fill_n(d_x[t], n, A(0));
    for_seen([&](int64_t t, int64_t w, int64_t s) {
      add(d_x[s], weight[w], d_out[t], n);
      add(d_weight[w], x[s], d_out[t], n);
    });
  }
};

}  // namespace fwp
