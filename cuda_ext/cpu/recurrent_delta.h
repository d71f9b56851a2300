// The delta rule whose queries, keys, values and rates see the last output o (Irie et al. 2021, arXiv 2106.06295), for one head
// of d numbers. From the logits x_t of a token, 3 d + 1 numbers,
//
//     s = tanh(o_{t-1})      [q k v b] = x_t + s R      of q and k the softmax, of b the sigmoid
//     e = v - k W            W += k^T (b e)             o_t = z_t + q W
//
// is a Recurrent Delta Net, without z. Without R, o_{t-1} is added to the logits of q: with z from other memories, a Delta RNN.
//
// In reverse, with G and m the gradients of W and o through later tokens,
//
//     l = d_o_t + m          d_q = l W_t^T       G += q^T l          u = k G           d_e = b u         d_b = u . e
//     d_k = b e G^T - d_e W_{t-1}^T              G -= k^T d_e        d_v = d_e         d_z = l
//     d_x = all four through softmax, softmax, nothing and sigmoid                     m = (1 - s * s) * (d_x R^T)
//
// without R m is the part of d_x of q. W_{t-1} is W_t without the write of token t. The state is read again before each
// kKeptEvery tokens, as the forward pass has kept it: so the errors of at most as many subtractions add up.
#pragma once

#include "token.h"

namespace fwp {

FWP_INLINE Vector<float> hyperbolic_tangent(Vector<float> x) {
  const Vector<float> size = x < 0.0f ? -x : x, part = exponential(-2.0f * size), y = (1.0f - part) / (1.0f + part);
  return x < 0.0f ? -y : y;
}
FWP_INLINE Vector<double> hyperbolic_tangent(Vector<double> x) {
  FWP_UNROLL for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = std::tanh(x[lane]);
  return x;
}

template <typename Real>
class RecurrentDelta {
 public:
  static int64_t scratch_size(int64_t d) {
    RecurrentDelta counted(d, false);
    return numbers_taken(counted.lay_out(nullptr));
  }

  // weights: R (d, 3 d + 1), or null. Scratch is aligned, with scratch_size(d) numbers.
  RecurrentDelta(int64_t d, const Real* weights, Real* scratch) : RecurrentDelta(d, weights != nullptr) {
    std::fill(scratch, scratch + scratch_size(d), Real(0));
    lay_out(scratch);
    for (int64_t i = 0; i < d && weights; ++i)
      for (int64_t p = 0; p < gates_; ++p) r_[i][p] = of_gate_[p][i] = weights[i * gates_ + p];
  }

  // `length` tokens. z and marks may be null. saved: q, k, e and b of each token; kept: W before each kKeptEvery tokens. Both
  // may be null. memory, d^2 numbers, is replaced; output: o before the first token.
  void forward(int64_t length, Tokens<const Real> x, Tokens<const Real> z, const uint8_t* marks, Real* memory, const Real* output,
               Tokens<Real> out, Tokens<Real> saved, Real* kept) {
    load_matrix(memory, w_);
    std::copy(output, output + d_, o_);
    for (int64_t t = 0; t < length; ++t) {
      if (kept && t % kKeptEvery == 0) store_matrix(w_, kept + t / kKeptEvery * d_ * d_);
      const uint8_t mark = marks ? marks[t] : 0;
      if (mark & kBegins) clear(w_), std::fill(o_, o_ + d_, Real(0));
      if (mark & kIsPadding) {
        if (saved.data) std::fill(saved[t], saved[t] + gates_, Real(0));
      } else {
        const Real b = step(x[t], z.data ? z[t] : nullptr);
        if (saved.data) {
          std::copy(q_, q_ + d_, saved[t]), std::copy(k_, k_ + d_, saved[t] + d_), std::copy(e_, e_ + d_, saved[t] + 2 * d_);
          saved[t][3 * d_] = b;
        }
      }
      std::copy(o_, o_ + d_, out[t]);
    }
    store_matrix(w_, memory);
  }

  // memory: W after the last token; output: o before the first; out, saved, kept: results of the forward pass. d_memory and
  // d_output: the gradient of W after the last token, replaced by that of the first W; receives that of the first o.
  void backward(int64_t length, const uint8_t* marks, const Real* memory, const Real* output, Tokens<const Real> out,
                Tokens<const Real> saved, const Real* kept, Tokens<const Real> d_out, Tokens<Real> d_x, Tokens<Real> d_z,
                Real* d_memory, Real* d_output) {
    load_matrix(memory, w_);
    load_matrix(d_memory, g_);
    for (int64_t t = length; t-- > 0;) {
      if ((t + 1) % kKeptEvery == 0 && t + 1 < length) load_matrix(kept + (t + 1) / kKeptEvery * d_ * d_, w_);
      const uint8_t mark = marks ? marks[t] : 0;
      const bool is_first = mark & kBegins;
      if (mark & kIsPadding) {
        for (int64_t i = 0; i < d_; ++i) m_[i] += d_out[t][i];
        std::fill(d_x[t], d_x[t] + gates_, Real(0)), std::fill(d_z[t], d_z[t] + d_, Real(0));
      } else {
        step_back(saved[t], is_first ? nullptr : t > 0 ? out[t - 1] : output, d_out[t], d_x[t], d_z[t]);
      }
      if (!is_first) continue;
      clear(g_), std::fill(m_, m_ + d_, Real(0));
      rebuild(t, marks, saved, kept);
    }
    store_matrix(g_, d_memory);
    std::copy(m_, m_ + d_, d_output);
  }

 private:
  RecurrentDelta(int64_t d, bool feeds_back) : d_(d), gates_(3 * d + 1), feeds_back_(feeds_back) {}
  Real* lay_out(Real* scratch) {
    for (Tokens<Real>* x : {&w_, &g_}) *x = take(scratch, d_, d_);
    r_ = take(scratch, d_, gates_), of_gate_ = take(scratch, gates_, d_);
    for (Real** x : {&x_, &q_, &k_, &d_x_, &v_}) *x = take(scratch, 1, gates_).data;
    for (Real** x : {&s_, &o_, &e_, &u_, &m_, &l_, &d_q_, &d_k_}) *x = take(scratch, 1, d_).data;
    products_ = scratch;
    return address(products_, round_up(d_, kLanes<Real>) * kLanes<Real>);
  }
  void clear(Tokens<Real> x) { std::fill(x[0], x[0] + d_ * x.stride, Real(0)); }
  void load_matrix(const Real* from, Tokens<Real> to) { copy_matrix<Real>({from, d_, 1}, d_, d_, {to.data, to.stride, 1}); }
  void store_matrix(Tokens<Real> from, Real* to) { copy_matrix<Real>({from.data, from.stride, 1}, d_, d_, {to, d_, 1}); }
  // Call f(first column, vectors) for panels of the padded columns of a row.
  template <typename F>
  static FWP_INLINE void for_columns(int64_t columns, F f) {
    for_panels<Real, 4>(columns, f);
  }

  // From o_{t-1} and W_{t-1} to o_t and W_t, with q, k and e; returns b.
  Real step(const Real* x, const Real* z) {
    std::copy(x, x + gates_, x_);
    if (feeds_back_) {
      for_vectors<Real>(d_, [&](int64_t i, int64_t) { store(s_ + i, hyperbolic_tangent(load(o_ + i))); });
      multiply<Real>(s_, r_, d_, gates_, x_, x_);
    } else {
      for (int64_t i = 0; i < d_; ++i) x_[i] += o_[i];
    }
    softmax(x_, d_, q_);
    softmax(x_ + d_, d_, k_);
    const Real b = 1 / (1 + std::exp(-x_[3 * d_]));
    multiply<Real>(k_, w_, d_, d_, nullptr, e_);
    for (int64_t i = 0; i < d_; ++i) e_[i] = x_[2 * d_ + i] - e_[i], u_[i] = b * e_[i];
    for (int64_t i = 0; i < d_; ++i) o_[i] = z ? z[i] : 0;
    for_columns(d_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      Vector<Real> read[NV], write[NV];
      FWP_UNROLL for (int n = 0; n < NV; ++n)
        read[n] = load(o_ + j + n * kLanes<Real>), write[n] = load(u_ + j + n * kLanes<Real>);
      for (int64_t i = 0; i < d_; ++i)
        FWP_UNROLL for (int n = 0; n < NV; ++n) {
          Real* const at = w_[i] + j + n * kLanes<Real>;
          const Vector<Real> w = load(at) + k_[i] * write[n];
          store(at, w);
          read[n] += q_[i] * w;
        }
      FWP_UNROLL for (int n = 0; n < NV; ++n) store(o_ + j + n * kLanes<Real>, read[n]);
    });
    return b;
  }

  // before: o_{t-1}, null where the token is a document's first.
  void step_back(const Real* saved, const Real* before, const Real* d_out, Real* d_x, Real* d_z) {
    std::copy(saved, saved + d_, q_), std::copy(saved + d_, saved + 2 * d_, k_), std::copy(saved + 2 * d_, saved + 3 * d_, e_);
    const Real b = saved[3 * d_];
    for (int64_t i = 0; i < d_; ++i) d_z[i] = l_[i] = d_out[i] + m_[i], u_[i] = b * e_[i];
    clear_products();
    for_columns(d_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      Vector<Real> l[NV], u[NV], of_key[NV];
      FWP_UNROLL for (int n = 0; n < NV; ++n)
        l[n] = load(l_ + j + n * kLanes<Real>), u[n] = load(u_ + j + n * kLanes<Real>), of_key[n] = Vector<Real>{};
      for (int64_t i = 0; i < d_; ++i) {
        Vector<Real> product = load(products_ + i * kLanes<Real>);
        FWP_UNROLL for (int n = 0; n < NV; ++n) {
          Real *const w = w_[i] + j + n * kLanes<Real>, *const g = g_[i] + j + n * kLanes<Real>;
          const Vector<Real> state = load(w), gradient = load(g) + q_[i] * l[n];
          product += state * l[n];
          store(w, state - k_[i] * u[n]);
          store(g, gradient);
          of_key[n] += k_[i] * gradient;
        }
        store(products_ + i * kLanes<Real>, product);
      }
      FWP_UNROLL for (int n = 0; n < NV; ++n) store(v_ + j + n * kLanes<Real>, of_key[n]);
    });
    sum_products(d_q_);
    Real d_b = 0;
    for (int64_t i = 0; i < d_; ++i) d_b += v_[i] * e_[i], v_[i] *= b;  // v_: d_e
    clear_products();
    for_columns(d_, [&](int64_t j, auto vectors) __attribute__((always_inline)) {
      constexpr int NV = decltype(vectors)::value;
      Vector<Real> d_e[NV], u[NV];
      FWP_UNROLL for (int n = 0; n < NV; ++n) d_e[n] = load(v_ + j + n * kLanes<Real>), u[n] = load(u_ + j + n * kLanes<Real>);
      for (int64_t i = 0; i < d_; ++i) {
        Vector<Real> product = load(products_ + i * kLanes<Real>);
        FWP_UNROLL for (int n = 0; n < NV; ++n) {
          Real* const g = g_[i] + j + n * kLanes<Real>;
          const Vector<Real> gradient = load(g);
          product += gradient * u[n] - load(w_[i] + j + n * kLanes<Real>) * d_e[n];
          store(g, gradient - k_[i] * d_e[n]);
        }
        store(products_ + i * kLanes<Real>, product);
      }
    });
    sum_products(d_k_);
    through_softmax(q_, d_q_, d_, d_x_);
    through_softmax(k_, d_k_, d_, d_x_ + d_);
    std::copy(v_, v_ + d_, d_x_ + 2 * d_);
    d_x_[3 * d_] = b * (1 - b) * d_b;
    std::copy(d_x_, d_x_ + gates_, d_x);
    if (!feeds_back_) {
      std::copy(d_x_, d_x_ + d_, m_);
      return;
    }
    multiply<Real>(d_x_, of_gate_, gates_, d_, nullptr, m_);
    for (int64_t i = 0; i < d_; ++i) o_[i] = before ? before[i] : 0;
    for_vectors<Real>(d_, [&](int64_t i, int64_t) {
      const Vector<Real> s = hyperbolic_tangent(load(o_ + i));
      store(m_ + i, load(m_ + i) * (Real(1) - s * s));
    });
  }

  // Sums over the lanes of a vector for each row.
  void clear_products() { std::fill(products_, products_ + d_ * kLanes<Real>, Real(0)); }
  void sum_products(Real* to) {
    for (int64_t i = 0; i < d_; i += kLanes<Real>) {
      Vector<Real> parts[kLanes<Real>];
      FWP_UNROLL for (int n = 0; n < kLanes<Real>; ++n) parts[n] = load(products_ + (i + n) * kLanes<Real>);
      sum_lanes_of_each<Real>(parts);
      store(to + i, parts[0]);
    }
  }

  // W before token t, which is a document's first: from the state that was kept before it.
  void rebuild(int64_t t, const uint8_t* marks, Tokens<const Real> saved, const Real* kept) {
    const int64_t begin = t / kKeptEvery * kKeptEvery;
    clear(w_);  // NaN times the zeros of padding lanes was NaN there: it would reach all earlier documents
    load_matrix(kept + begin / kKeptEvery * d_ * d_, w_);
    for (int64_t s = begin; s < t; ++s) {
      if (marks[s] & kBegins) clear(w_);
      if (marks[s] & kIsPadding) continue;
      const Real *k = saved[s] + d_, *e = saved[s] + 2 * d_, b = saved[s][3 * d_];
      for (int64_t i = 0; i < d_; ++i)
        for (int64_t j = 0; j < d_; ++j) w_[i][j] += k[i] * (b * e[j]);
    }
  }

  const int64_t d_, gates_;
  const bool feeds_back_;
  Tokens<Real> w_, g_, r_, of_gate_;  // W, G, R and its transpose
  Real *x_, *q_, *k_, *d_x_, *v_, *s_, *o_, *e_, *u_, *m_, *l_, *d_q_, *d_k_, *products_;
};

}  // namespace fwp
