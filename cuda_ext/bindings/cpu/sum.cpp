// The sum rule and its gradient on CPU tensors.

#include "../../cpu/sum.h"

#include "passes.h"

namespace fwp::cpu {
namespace {

// out_t = q_t W_t with W_t = W_{t-1} + k_t^T v_t, for tensors of any roles. `initial` is W_0, its transpose, or
// undefined. `final` may be undefined.
template <typename Real>
void scan(const Lengths& size, const View& q, const View& k, const View& v, const View& initial, bool transposed,
          bool reverse, const View& out, const View& final) {
  const int64_t rows = k.sizes[3], columns = v.sizes[3], length = size.L;
  const auto ordered = [&](auto x) { return reverse ? x.reversed(length) : x; };
  const Heads<const Real> q_(q), k_(k), v_(v), initial_(initial);
  const Heads<Real> out_(out), final_(final);
  for_blocks<Real>(size, rows, columns, [&](int64_t head, int64_t column, int64_t n, auto vectors, Real* work) {
    constexpr int NV = decltype(vectors)::value;
    StateBlock<Real, NV> block(rows, n, initial_.matrix(head, column, transposed), final_.matrix(head, column), work);
    SumScan<Real, NV> scan{block, ordered(q_.tokens(head)), ordered(k_.tokens(head)),
                           ordered(v_.tokens(head).from(column)), ordered(out_.tokens(head).from(column))};
    if constexpr (NV == 4)
      scan.template run<1>(0, true);
    else
      for_like_groups(length, scan);
    block.finish();
  });
}

}  // namespace

template <>
void forward<Rule::sum>(const Forward& pass) {
  const TokenViews& in = pass.in;
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    scan<Real>(pass.size, in.q, in.k, in.v, pass.initial, false, false, pass.out, pass.final);
  });
}

template <>
void backward<Rule::sum>(const Backward& pass) {
  const TokenViews &in = pass.in, &to = pass.to;
  const View none;
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    scan<Real>(pass.size, pass.d_out, in.v, in.k, pass.initial, true, false, to.q, none);
    scan<Real>(pass.size, in.v, pass.d_out, in.q, pass.d_final, true, true, to.k, none);
    scan<Real>(pass.size, in.k, in.q, pass.d_out, pass.d_final, false, true, to.v, pass.d_initial);
  });
}

}  // namespace fwp::cpu
