// Registers the CPU kernels for the operators whose schema, fake and autograd fairseq_fwp/ops owns.
// Shapes: q, k (B, H, L, Dk), v, out, error (B, H, L, Dv), beta (B, H, L), states (B, H, Dk, Dv).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <optional>
#include <tuple>
#include <type_traits>

#include "delta.h"
#include "sum.h"

namespace {

using at::Tensor;
using fwp::Matrix;
using fwp::Rates;
using fwp::StateBlock;
using fwp::Tokens;

at::ScalarType state_type(const Tensor& q) { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// In the dtype that the kernels compute in, the elements of a vector side by side. Most often the tensor itself.
Tensor prepare(const Tensor& x, at::ScalarType type) {
  const Tensor same = x.scalar_type() == type ? x : x.to(type);
  return same.stride(-1) == 1 || same.size(-1) == 1 ? same : same.contiguous();
}

template <typename A>
Tokens<A> tokens(const Tensor& x, int64_t head) {
  const int64_t heads = x.size(1);
  A* data = x.mutable_data_ptr<std::remove_const_t<A>>();
  return {data + head / heads * x.stride(0) + head % heads * x.stride(1), x.stride(2)};
}

template <typename A>
Rates<A> rates(const Tensor& x, int64_t head) {
  const auto t = tokens<A>(x, head);
  return {t.data, t.stride};
}

// The columns from `column` on of a state, or of its transpose; null where there is no state.
template <typename A>
Matrix<A> matrix(const Tensor& x, int64_t head, int64_t column, bool transposed = false) {
  if (!x.defined()) return {nullptr, 0, 0};
  const auto rows = tokens<A>(x, head);
  if (transposed) return {rows.data + column * rows.stride, x.stride(3), rows.stride};
  return {rows.data + column * x.stride(3), rows.stride, x.stride(3)};
}

// An operator cannot return an undefined tensor: (0,) stands for it.
Tensor or_nothing(const Tensor& x, const Tensor& like) { return x.defined() ? x : at::empty({0}, like.options()); }

void check(const char* name, const Tensor& x, at::IntArrayRef sizes, at::ScalarType type) {
  TORCH_CHECK(x.sizes() == sizes && x.scalar_type() == type && x.is_cpu(), name, " must be a ", type, " CPU tensor of ",
              sizes, ", got ", x.scalar_type(), " on ", x.device(), " of ", x.sizes());
}

void check(const char* name, const std::optional<Tensor>& x, at::IntArrayRef sizes, at::ScalarType type) {
  if (x) check(name, *x, sizes, type);
}

struct Sizes {
  int64_t B, H, L, Dk, Dv;
  Sizes(const Tensor& q, const Tensor& values) {
    TORCH_CHECK(q.dim() == 4 && values.dim() == 4, "q and v must have 4 dimensions, got ", q.dim(), ", ", values.dim());
    B = q.size(0), H = q.size(1), L = q.size(2), Dk = q.size(3), Dv = values.size(3);
  }
  std::array<int64_t, 4> keys() const { return {B, H, L, Dk}; }
  std::array<int64_t, 4> values() const { return {B, H, L, Dv}; }
  std::array<int64_t, 4> state() const { return {B, H, Dk, Dv}; }
  std::array<int64_t, 3> rates() const { return {B, H, L}; }
};

// Half of a first-level cache of 32 KiB: the other half is for the tokens.
constexpr int64_t kBlockBytes = 1 << 14;

// Call f(head, first column, number of columns, vectors a row, scratch) for blocks that cover `columns` of every head.
// The scratch holds a block and kTokens columns of it.
// Blocks are `widest` vectors wide, or less where that is what it takes to stay in the cache or to give every thread a
// block.
template <typename A, int widest, typename F>
void for_blocks(const Sizes& size, int64_t rows, int64_t columns, F f) {
  const int64_t heads = size.B * size.H, lanes = fwp::kLanes<A>;
  const auto blocks_of = [&](int64_t vectors) { return (columns + vectors * lanes - 1) / (vectors * lanes); };
  int64_t vectors = widest;
  while (vectors > 1 && (columns <= vectors / 2 * lanes || rows * vectors * lanes * int64_t(sizeof(A)) > kBlockBytes ||
                         heads * blocks_of(vectors) < at::get_num_threads()))
    vectors /= 2;
  const int64_t width = vectors * lanes, blocks = blocks_of(vectors);
  // A thread costs some microseconds to wake: as much as 2^18 updates of a state element, a few of them in a vector.
  const int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, size.L * rows * width));
  at::parallel_for(0, heads * blocks, grain, [&](int64_t begin, int64_t end) {
    const std::align_val_t alignment{fwp::kVectorBytes};
    const int64_t scratch = rows * (width + fwp::kTokens);
    const auto release = [&](A* p) { ::operator delete(p, alignment); };
    const std::unique_ptr<A, decltype(release)> work(
        static_cast<A*>(::operator new(std::max<int64_t>(1, scratch) * sizeof(A), alignment)), release);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / blocks, column = item % blocks * width, n = std::min(width, columns - column);
      if (vectors == 1) f(head, column, n, std::integral_constant<int, 1>{}, work.get());
      if (vectors == 2) f(head, column, n, std::integral_constant<int, 2>{}, work.get());
      if constexpr (widest == 4)
        if (vectors == 4) f(head, column, n, std::integral_constant<int, 4>{}, work.get());
    }
  });
}

// Two vectors a row are what the registers hold for a group of tokens. A single token has room for four, and reads the
// state, which is all its cost, in longer pieces.
template <typename A, typename F>
void for_blocks(const Sizes& size, int64_t rows, int64_t columns, F f) {
  if (size.L == 1)
    for_blocks<A, 4>(size, rows, columns, f);
  else
    for_blocks<A, 2>(size, rows, columns, f);
}

// out_t = q_t W_t with W_t = W_{t-1} + k_t^T v_t for tensors of any roles; `initial` is W_0, or its transpose, or
// undefined; `final` may be undefined.
template <typename A>
void scan(const Sizes& size, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& initial, bool transposed,
          bool reverse, const Tensor& out, const Tensor& final) {
  const int64_t rows = k.size(3), columns = v.size(3), length = size.L;
  const auto ordered = [&](auto x) { return reverse ? x.reversed(length) : x; };
  for_blocks<A>(size, rows, columns, [&](int64_t head, int64_t column, int64_t n, auto vectors, A* work) {
    constexpr int NV = decltype(vectors)::value;
    StateBlock<A, NV> block(rows, n, matrix<const A>(initial, head, column, transposed), matrix<A>(final, head, column),
                            work);
    fwp::SumScan<A, NV> scan{block, ordered(tokens<const A>(q, head)), ordered(tokens<const A>(k, head)),
                             ordered(tokens<const A>(v, head).from(column)),
                             ordered(tokens<A>(out, head).from(column))};
    if constexpr (NV == 4)
      scan.template run<1, true>(0);
    else
      fwp::for_token_groups(length, scan);
    block.finish();
  });
}

#define FWP_DISPATCH(type, ...)     \
  if (type == at::kDouble) {        \
    using A = double;               \
    __VA_ARGS__                     \
  } else {                          \
    using A = float;                \
    __VA_ARGS__                     \
  }

std::tuple<Tensor, Tensor> sum_rule(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const std::optional<Tensor>& state) {
  const Sizes size(q, v);
  const auto type = state_type(q);
  check("k", k, size.keys(), q.scalar_type());
  check("v", v, size.values(), q.scalar_type());
  check("state", state, size.state(), type);
  const Tensor out = at::empty(size.values(), q.options().dtype(type));
  const Tensor final = at::empty(size.state(), out.options());
  const Tensor q_ = prepare(q, type), k_ = prepare(k, type), v_ = prepare(v, type);
  FWP_DISPATCH(type, scan<A>(size, q_, k_, v_, state.value_or(Tensor()), false, false, out, final);)
  return {out.to(q.scalar_type()), final};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sum_rule_backward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                             const std::optional<Tensor>& state,
                                                             const std::optional<Tensor>& grad_out,
                                                             const std::optional<Tensor>& grad_state) {
  const Sizes size(q, v);
  const auto type = state_type(q);
  check("k", k, size.keys(), q.scalar_type());
  check("v", v, size.values(), q.scalar_type());
  check("state", state, size.state(), type);
  check("grad_out", grad_out, size.values(), q.scalar_type());
  check("grad_state", grad_state, size.state(), type);
  const Tensor q_ = prepare(q, type), k_ = prepare(k, type), v_ = prepare(v, type);
  const Tensor d_out = grad_out ? prepare(*grad_out, type) : at::zeros(size.values(), v_.options());
  const Tensor d_q = at::empty(size.keys(), q_.options()), d_k = at::empty(size.keys(), q_.options());
  const Tensor d_v = at::empty(size.values(), q_.options());
  const Tensor initial = state.value_or(Tensor()), d_final = grad_state.value_or(Tensor()), none;
  const Tensor d_initial = state ? at::empty(size.state(), q_.options()) : none;
  FWP_DISPATCH(type, {
    scan<A>(size, d_out, v_, k_, initial, true, false, d_q, none);
    scan<A>(size, v_, d_out, q_, d_final, true, true, d_k, none);
    scan<A>(size, k_, q_, d_out, d_final, false, true, d_v, d_initial);
  })
  const auto given = q.scalar_type();
  return {d_q.to(given), d_k.to(given), d_v.to(given), or_nothing(d_initial, q_)};
}

std::tuple<Tensor, Tensor, Tensor> delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                                              const std::optional<Tensor>& state) {
  const Sizes size(q, v);
  const auto type = state_type(q);
  check("k", k, size.keys(), q.scalar_type());
  check("v", v, size.values(), q.scalar_type());
  check("beta", beta, size.rates(), q.scalar_type());
  check("state", state, size.state(), type);
  const Tensor out = at::empty(size.values(), q.options().dtype(type)), error = at::empty(size.values(), out.options());
  const Tensor final = at::empty(size.state(), out.options()), initial = state.value_or(Tensor());
  const Tensor q_ = prepare(q, type), k_ = prepare(k, type), v_ = prepare(v, type), beta_ = beta.to(type);
  FWP_DISPATCH(type, for_blocks<A>(size, size.Dk, size.Dv, [&](int64_t h, int64_t j, int64_t n, auto vectors, A* work) {
    constexpr int NV = decltype(vectors)::value;
    StateBlock<A, NV> block(size.Dk, n, matrix<const A>(initial, h, j), matrix<A>(final, h, j), work);
    fwp::DeltaForward<A, NV> scan{block, size.L, tokens<const A>(q_, h), tokens<const A>(k_, h),
                                  tokens<const A>(v_, h).from(j), rates<const A>(beta_, h), tokens<A>(out, h).from(j),
                                  tokens<A>(error, h).from(j), {}};
    if constexpr (NV == 4) {
      scan.template start<1>();
      scan.template run<1, true>(0);
    } else {
      if (size.L > 0) scan.template start<fwp::kTokens>();
      fwp::for_token_groups(size.L, scan);
    }
    block.finish();
  });)
  return {out.to(q.scalar_type()), final, error};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> delta_rule_backward(
    const Tensor& q, const Tensor& k, const Tensor& beta, const std::optional<Tensor>& state, const Tensor& error,
    const std::optional<Tensor>& grad_out, const std::optional<Tensor>& grad_state) {
  const Sizes size(q, error);
  const auto type = state_type(q);
  check("k", k, size.keys(), q.scalar_type());
  check("beta", beta, size.rates(), q.scalar_type());
  check("error", error, size.values(), type);
  check("state", state, size.state(), type);
  check("grad_out", grad_out, size.values(), q.scalar_type());
  check("grad_state", grad_state, size.state(), type);
  const Tensor q_ = prepare(q, type), k_ = prepare(k, type), e_ = prepare(error, type), beta_ = beta.to(type);
  const Tensor d_out = grad_out ? prepare(*grad_out, type) : at::zeros(size.values(), e_.options());
  const Tensor d_q = at::empty(size.keys(), e_.options()), d_k = at::empty(size.keys(), e_.options());
  const Tensor d_v = at::empty(size.values(), e_.options());
  const Tensor initial = state.value_or(Tensor()), d_final = grad_state.value_or(Tensor());
  const Tensor d_initial = state ? at::empty(size.state(), e_.options()) : Tensor();
  // Blocks of columns see a part of each value, and so a part of each d_beta.
  const int64_t parts = std::max<int64_t>(1, (size.Dv + fwp::kVectorBytes / 8 - 1) / (fwp::kVectorBytes / 8));
  const Tensor d_beta = at::zeros({parts, size.B, size.H, size.L}, e_.options());
  const int64_t L = size.L;
  FWP_DISPATCH(type, {
    for_blocks<A, 2>(size, size.Dk, size.Dv, [&](int64_t h, int64_t j, int64_t n, auto vectors, A* work) {
      constexpr int NV = decltype(vectors)::value;
      StateBlock<A, NV> block(size.Dk, n, matrix<const A>(d_final, h, j), matrix<A>(d_initial, h, j), work);
      fwp::DeltaBackwardValues<A, NV> scan{
          block, tokens<const A>(q_, h).reversed(L), tokens<const A>(k_, h).reversed(L),
          tokens<const A>(d_out, h).from(j).reversed(L), tokens<const A>(e_, h).from(j).reversed(L),
          rates<const A>(beta_, h).reversed(L), tokens<A>(d_v, h).from(j).reversed(L),
          rates<A>(d_beta.select(0, j / block.kWidth), h).reversed(L), {}, {}};
      scan.start();
      fwp::for_token_groups(L, scan);
      if (d_initial.defined() && L > 0) scan.finish();
      block.finish();
    });
    for_blocks<A, 2>(size, size.Dv, size.Dk, [&](int64_t h, int64_t j, int64_t n, auto vectors, A* work) {
      constexpr int NV = decltype(vectors)::value;
      StateBlock<A, NV> weights(size.Dv, n, matrix<const A>(initial, h, j, true), {nullptr, 0, 0}, work);
      fwp::DeltaBackwardQueries<A, NV> forwards{
          weights, tokens<const A>(k_, h).from(j), tokens<const A>(d_out, h), tokens<const A>(e_, h),
          tokens<const A>(d_v, h), rates<const A>(beta_, h), tokens<A>(d_q, h).from(j), tokens<A>(d_k, h).from(j),
          work + size.Dv * weights.kWidth};
      fwp::for_token_groups(L, forwards);
      StateBlock<A, NV> gradient(size.Dv, n, matrix<const A>(d_final, h, j, true), {nullptr, 0, 0}, work);
      fwp::DeltaBackwardKeys<A, NV> backwards{
          gradient, tokens<const A>(q_, h).from(j).reversed(L), tokens<const A>(k_, h).from(j).reversed(L),
          tokens<const A>(d_out, h).reversed(L), tokens<const A>(e_, h).reversed(L),
          tokens<const A>(d_v, h).reversed(L), rates<const A>(beta_, h).reversed(L),
          tokens<A>(d_k, h).from(j).reversed(L)};
      fwp::for_token_groups(L, backwards);
    });
  })
  const auto given = q.scalar_type();
  return {d_q.to(given), d_k.to(given), d_v.to(given), d_beta.sum(0).to(given),
          or_nothing(d_initial, e_)};
}

}  // namespace

TORCH_LIBRARY_IMPL(fwp, CPU, m) {
  m.impl("sum_rule", &sum_rule);
  m.impl("sum_rule_backward", &sum_rule_backward);
  m.impl("delta_rule", &delta_rule);
  m.impl("delta_rule_backward", &delta_rule_backward);
}
