// Self-referential weight matrices (Irie et al. 2022, arXiv 2202.05780), for one head of d numbers. From W = W_0 + C, which has
// d x (3 d + 4) numbers, and a token x_t,
//
//     [y q k b] = x W       of q and k the softmax, of the four b the sigmoid
//     p = q - k             e = p W              C += k^T (b e)
//
// where b has a number for the columns of y, of q, of k and of b. In reverse, with G the gradient of C through later tokens,
//
//     d_u = k G             d_k = G (b e)        d_e = b d_u          d_b = the sums of d_u e over its columns
//     d_p = d_e W^T         G += p^T d_e
//     d_a = [d_y d_q d_k d_b]: d_p through softmax, d_k - d_p through softmax, d_b through sigmoid
//     d_x = d_a W^T         G += x^T d_a
//
// with W before the write. C is read again before each kKeptEvery tokens. The gradient of W_0 is all that tokens add to G.
#pragma once

#include "recurrent_delta.h"

namespace fwp {

template <typename Real>
class Srwm {
 public:
  static int64_t scratch_size(int64_t d) {
    Srwm counted(d);
    return numbers_taken(counted.lay_out(nullptr));
  }

  // weights: W_0 (d, 3 d + 4). Scratch is aligned, with scratch_size(d) numbers.
  Srwm(int64_t d, const Real* weights, Real* scratch) : Srwm(d) {
    std::fill(scratch, scratch + scratch_size(d), Real(0));
    lay_out(scratch);
    load_matrix(weights, w_);
  }

  // Numbers that a sequence saves: q, k, b and e of each token, and then C before each kKeptEvery tokens.
  static int64_t saved_size(int64_t length, int64_t d) {
    return length * (5 * d + 8) + (length + kKeptEvery - 1) / kKeptEvery * d * (3 * d + 4);
  }

  // `length` tokens. marks and saved may be null. change, C, is replaced.
  void forward(int64_t length, Tokens<const Real> x, const uint8_t* marks, Real* change, Tokens<Real> out, Real* saved) {
    load_matrix(change, c_);
    for (int64_t t = 0; t < length; ++t) {
      if (saved && t % kKeptEvery == 0) store_matrix(c_, saved + length * saved_ + t / kKeptEvery * d_ * n_);
      const uint8_t mark = marks ? marks[t] : 0;
      if (mark & kBegins) clear(c_);
      if (mark & kIsPadding)
        std::fill(a_, a_ + d_, Real(0)), std::fill(q_, q_ + saved_, Real(0));
      else
        step(x[t]);
      std::copy(a_, a_ + d_, out[t]);
      if (saved) std::copy(q_, q_ + saved_, saved + t * saved_);
    }
    store_matrix(c_, change);
  }

  // last: C after the last token; saved: by the forward pass. d_change: the gradient of `last`, replaced by that of the first C;
  // d_weights receives that of W_0.
  void backward(int64_t length, Tokens<const Real> x, const uint8_t* marks, const Real* last, const Real* saved,
                Tokens<const Real> d_out, Tokens<Real> d_x, Real* d_weights, Real* d_change) {
    const Real* const kept = saved + length * saved_;
    load_matrix(last, c_);
    load_matrix(d_change, g_);
    for (int64_t i = 0; i < d_ * n_; ++i) d_weights[i] = -d_change[i];  // no token has added this
    for (int64_t t = length; t-- > 0;) {
      if ((t + 1) % kKeptEvery == 0 && t + 1 < length) load_matrix(kept + (t + 1) / kKeptEvery * d_ * n_, c_);
      const uint8_t mark = marks ? marks[t] : 0;
      if (mark & kIsPadding)
        std::fill(d_x[t], d_x[t] + d_, Real(0));
      else
        step_back(saved + t * saved_, x[t], d_out[t], d_x[t]);
      if (!(mark & kBegins)) continue;
      add_gradient(d_weights);
      clear(g_), clear(c_);  // also the padding of their rows, as in RecurrentDelta
      load_matrix(kept + t / kKeptEvery * d_ * n_, c_);
      for (int64_t s = t / kKeptEvery * kKeptEvery; s < t; ++s) {
        if (marks[s] & kBegins) clear(c_);
        load_token(saved + s * saved_);  // of padding, zeros
        write(Real(1));
      }
    }
    add_gradient(d_weights);
    store_matrix(g_, d_change);
  }

 private:
  explicit Srwm(int64_t d) : d_(d), n_(3 * d + 4), saved_(2 * d + 4 + n_) {}
  Real* lay_out(Real* scratch) {
    for (Tokens<Real>* x : {&w_, &c_, &g_}) *x = take(scratch, d_, n_);
    for (Real** x : {&a_, &u_, &d_a_}) *x = take(scratch, 1, n_).data;
    for (Real** x : {&p_, &d_k_, &d_p_}) *x = take(scratch, 1, d_).data;
    q_ = take(scratch, 1, saved_).data;
    k_ = address(q_, d_), b_ = address(k_, d_), e_ = address(b_, 4);
    return scratch;
  }
  void clear(Tokens<Real> x) { std::fill(x[0], x[0] + d_ * x.stride, Real(0)); }
  void load_matrix(const Real* from, Tokens<Real> to) { copy_matrix<Real>({from, n_, 1}, d_, n_, {to.data, to.stride, 1}); }
  void store_matrix(Tokens<Real> from, Real* to) { copy_matrix<Real>({from.data, from.stride, 1}, d_, n_, {to, n_, 1}); }
  void add_gradient(Real* to) const {
    for (int64_t i = 0; i < d_; ++i)
      for (int64_t j = 0; j < n_; ++j) to[i * n_ + j] += g_[i][j];
  }

  // to = x W.
  void read(const Real* x, Real* to) const {
    multiply<Real>(x, w_, d_, n_, nullptr, to);
    multiply<Real>(x, c_, d_, n_, to, to);
  }
  // to = b x, each rate for its columns.
  void weigh(const Real* x, Real* to) const {
    for (int64_t block = 0, j = 0; block < 4; ++block)
      for (; j < end(block); ++j) to[j] = b_[block] * x[j];
  }
  int64_t end(int64_t block) const { return block < 3 ? (block + 1) * d_ : n_; }
  // C += sign k^T u.
  void write(Real sign) {
    for (int64_t i = 0; i < d_; ++i)
      for_vectors<Real>(n_, [&](int64_t j, int64_t) { store(c_[i] + j, load(c_[i] + j) + sign * k_[i] * load(u_ + j)); });
  }
  void load_token(const Real* saved) {
    std::copy(saved, saved + saved_, q_);
    for (int64_t i = 0; i < d_; ++i) p_[i] = q_[i] - k_[i];
    weigh(e_, u_);
  }

  // From C_{t-1} to C_t, with y in a_.
  void step(const Real* x) {
    read(x, a_);
    softmax(a_ + d_, d_, q_);
    softmax(a_ + 2 * d_, d_, k_);
    for (int64_t block = 0; block < 4; ++block) b_[block] = 1 / (1 + std::exp(-a_[3 * d_ + block]));
    for (int64_t i = 0; i < d_; ++i) p_[i] = q_[i] - k_[i];
    read(p_, e_);
    weigh(e_, u_);
    write(Real(1));
  }

  void step_back(const Real* saved, const Real* x, const Real* d_out, Real* d_x) {
    load_token(saved);
    write(Real(-1));
    multiply<Real>(k_, g_, d_, n_, nullptr, d_a_);  // d_u
    for (int64_t i = 0; i < d_; ++i)
      d_k_[i] = sum_over<Real>(n_, [&](int64_t j, int64_t) { return load(g_[i] + j) * load(u_ + j); });
    Real d_b[4] = {};
    for (int64_t block = 0, j = 0; block < 4; ++block)
      for (; j < end(block); ++j) d_b[block] += d_a_[j] * e_[j];
    weigh(d_a_, u_);  // d_e
    read_back(u_, p_, d_p_);
    for (int64_t i = 0; i < d_; ++i) d_k_[i] -= d_p_[i];
    std::copy(d_out, d_out + d_, d_a_);
    through_softmax(q_, d_p_, d_, d_a_ + d_);
    through_softmax(k_, d_k_, d_, d_a_ + 2 * d_);
    for (int64_t block = 0; block < 4; ++block) d_a_[3 * d_ + block] = b_[block] * (1 - b_[block]) * d_b[block];
    read_back(d_a_, x, d_x);
  }
  // Through row = x W: to = row W^T, and G += x^T row.
  void read_back(const Real* row, const Real* x, Real* to) {
    for (int64_t i = 0; i < d_; ++i)
      to[i] = sum_over<Real>(n_, [&](int64_t j, int64_t) {
        const Vector<Real> part = load(row + j);
        store(g_[i] + j, load(g_[i] + j) + x[i] * part);
        return part * (load(w_[i] + j) + load(c_[i] + j));
      });
  }

  const int64_t d_, n_, saved_;
  Tokens<Real> w_, c_, g_;  // W_0, C, G
  Real *a_, *u_, *d_a_, *p_, *d_k_, *d_p_, *q_, *k_, *b_, *e_;
};

}  // namespace fwp
