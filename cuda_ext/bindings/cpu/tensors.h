// Shared by the CPU bindings: tensors as the kernels see them, and blocks of columns, the work items of threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <new>
#include <type_traits>

#include "../../cpu/bfloat16.h"
#include "view.h"

namespace fwp::cpu {

// The heads of a tensor in memory; null if it is undefined. Only stored() gives those of a tensor in bfloat16. The strides
// are read once, not for every head: over a single token, reading them took a fifth of the time of the arithmetic.
template <typename Real>
class Heads {
 public:
  explicit Heads(const View& x) : data_(reinterpret_cast<Real*>(x.data)), item_(x.item) {
    if (!x.defined()) return;
    heads_ = x.sizes[1], sharing_ = x.sharing;
    batch_stride_ = x.strides[0], head_stride_ = x.strides[1], stride_ = x.strides[2];
    if (x.dims > 3) column_stride_ = x.strides[3];
  }
  Tokens<Real> tokens(int64_t head) const {
    return {address(data_, offset_of(head)), stride_};
  }
  Stored<std::remove_const_t<Real>> stored(int64_t head) const {
    return {data_ ? (char*)data_ + offset_of(head) * item_ : nullptr, stride_ * item_, item_ == sizeof(BFloat16)};
  }
  Rates<Real> rates(int64_t head) const { return {tokens(head).data, stride_}; }
  // The columns of a state, or of its transpose, from `column` on.
  Matrix<Real> matrix(int64_t head, int64_t column, bool transposed = false) const {
    if (!data_) return {nullptr, 0, 0};
    Real* data = tokens(head).data;
    if (transposed) return {data + column * stride_, column_stride_, stride_};
    return {data + column * column_stride_, stride_, column_stride_};
  }

 private:
  int64_t offset_of(int64_t head) const {
    int64_t own = head % heads_;
    if (sharing_ > 1) own /= sharing_;
    return head / heads_ * batch_stride_ + own * head_stride_;
  }

  Real* data_ = nullptr;
  int64_t item_ = 0, heads_ = 1, sharing_ = 1, batch_stride_ = 0, head_stride_ = 0, stride_ = 0, column_stride_ = 0;
};

// Threads that may share the work; inside a parallel region, one.
inline int64_t threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

// Aligned memory for `count` numbers.
template <typename Real>
auto scratch(int64_t count) {
  const auto release = [](Real* p) { ::operator delete(p, std::align_val_t{kVectorBytes}); };
  void* p = ::operator new(count * sizeof(Real), std::align_val_t{kVectorBytes});
  return std::unique_ptr<Real, decltype(release)>(static_cast<Real*>(p), release);
}

// Half of a 32 KiB first-level cache; the other half is for the tokens.
constexpr int64_t kBlockBytes = 1 << 14;

inline int64_t blocks_of(int64_t columns, int64_t width) { return (columns + width - 1) / width; }

// Vectors in a row of a block: `widest`, or fewer if the block must be smaller to stay in the cache.
template <typename Real>
int64_t block_vectors(int64_t rows, int64_t columns, int64_t widest) {
  int64_t vectors = widest;
  while (vectors > 1 && (columns <= vectors / 2 * kLanes<Real> || rows * vectors * kVectorBytes > kBlockBytes)) vectors /= 2;
  return vectors;
}

// Call f(vectors) with a compile-time constant.
template <int widest, typename F>
void with_vectors(int64_t vectors, F f) {
  if (vectors == widest)
    f(std::integral_constant<int, widest>{});
  else if constexpr (widest > 1)
    with_vectors<widest / 2>(vectors, f);
}

// Call f(head, first column, number of columns, vectors per row, scratch) for blocks that cover `columns` of every
// head. The scratch holds a block and kPassTokens columns of it. Blocks are narrower if that gives every thread one.
template <typename Real, int widest, typename F>
void for_blocks(const Lengths& size, int64_t rows, int64_t columns, F f) {
  const int64_t heads = size.B * size.H;
  int64_t vectors = block_vectors<Real>(rows, columns, widest);
  while (vectors > 1 && heads * blocks_of(columns, vectors * kLanes<Real>) < threads()) vectors /= 2;
  const int64_t width = vectors * kLanes<Real>, blocks = blocks_of(columns, width);
  // Starting a thread takes some microseconds: as long as 2^18 updates of a state element, a few of them in a vector.
  const int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, size.L * rows * width));
  at::parallel_for(0, heads * blocks, grain, [&](int64_t begin, int64_t end) {
    const auto work = scratch<Real>(rows * (width + kPassTokens));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / blocks, column = item % blocks * width, n = std::min(width, columns - column);
      with_vectors<widest>(vectors, [&](auto vectors) { f(head, column, n, vectors, work.get()); });
    }
  });
}

// For a group of tokens, the registers hold two vectors per row. For a single token they hold four. Reading the state
// is then the whole cost, and longer pieces are faster.
template <typename Real, typename F>
void for_blocks(const Lengths& size, int64_t rows, int64_t columns, F f) {
  if (size.L == 1)
    for_blocks<Real, 4>(size, rows, columns, f);
  else
    for_blocks<Real, 2>(size, rows, columns, f);
}

// Call f(index) for the tokens of all heads, on threads. Each costs `work` operations.
template <typename F>
void for_tokens(int64_t tokens, int64_t work, F f) {
  at::parallel_for(0, tokens, std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, work)),
                   [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) f(token);
  });
}

// Sums over the blocks of columns of a head. Threads share the blocks of a head only if there are fewer heads than
// threads. Then each thread has its own partial sum.
struct SharedHeads {
  int64_t heads, blocks, parts;

  SharedHeads(const Lengths& size, int64_t columns, int64_t width) : heads(size.B * size.H) {
    blocks = std::max<int64_t>(1, blocks_of(columns, width));
    const int64_t wanted = heads ? (threads() + heads - 1) / heads : 1;
    parts = std::min(wanted, blocks);
  }

  // Memory for all parts of a sum, one after the other. With one part, it is the sum itself.
  View in_parts(const View& sum) const {
    View all = sum;
    const int64_t columns = sum.dims == 4 ? sum.sizes[3] : 1;
    if (sum.defined() && parts > 1)
      return empty({parts, sum.sizes[0], sum.sizes[1], sum.sizes[2], columns}, 5, sum.item);
    std::copy_backward(sum.sizes.begin(), sum.sizes.end() - 1, all.sizes.end());
    std::copy_backward(sum.strides.begin(), sum.strides.end() - 1, all.strides.end());
    ++all.dims;
    return all;
  }
  template <typename Real>
  void add_parts(const View& sum, const View& in_parts) const {
    if (!sum.defined() || parts == 1) return;
    const Heads<Real> to(sum);
    const int64_t length = in_parts.sizes[3], columns = in_parts.sizes[4], count = heads * length * columns;
    const Real* from = reinterpret_cast<const Real*>(in_parts.data);
    for_tokens(heads * length, parts * columns, [&](int64_t token) {
      Real* row = to.tokens(token / length)[token % length];
      for (int64_t i = 0; i < columns; ++i) {
        Real total = 0;
        for (int64_t part = 0; part < parts; ++part) total += from[part * count + token * columns + i];
        row[i] = total;
      }
    });
  }

  // Call f(head, part, block, whether the part has seen a block before, scratch) for all blocks, on threads. The blocks
  // of a part run in order. A head costs `work` updates of an element; as in for_blocks, a thread costs 2^18.
  template <typename Real, typename F>
  void for_blocks(int64_t work, int64_t scratch_size, F f) const {
    const int64_t grain = std::max<int64_t>(1, (1 << 18) * parts / std::max<int64_t>(1, work));
    at::parallel_for(0, heads * parts, grain, [&](int64_t begin, int64_t end) {
      const auto memory = scratch<Real>(scratch_size);
      for (int64_t item = begin; item < end; ++item) {
        const int64_t head = item / parts, part = item % parts, start = part * blocks / parts;
        for (int64_t block = start; block < (part + 1) * blocks / parts; ++block)
          f(head, part, block, block > start, memory.get());
      }
    });
  }
};

// Call f(head, rule) for every head, on threads. Rule is a quadratic form.
template <typename Rule, typename F>
void for_short_heads(const Lengths& size, F f) {
  // As in for_blocks: a thread costs as much as 2^18 multiply-adds, a few of them in a vector.
  const int64_t work = size.L * (size.L * (size.Dk + size.Dv) + size.Dk * size.Dv);
  const int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, work));
  at::parallel_for(0, size.B * size.H, grain, [&](int64_t begin, int64_t end) {
    using Real = typename Rule::Number;
    const auto memory = scratch<Real>(Rule::scratch_size(size.L, size.Dk, size.Dv));
    for (int64_t head = begin; head < end; ++head) {
      Rule rule(size.L, size.Dk, size.Dv, memory.get());
      f(head, rule);
    }
  });
}

// Call f(head, marks, tokens, rule) for every head of a rule that runs token by token, on threads. `updates`: of numbers of the
// state, for a token. weights, or null: of_head of them for each head. tokens(data, n) are those of the head in an array
// (B, L, H, n); there are none if it is null.
template <typename Rule, typename Real, typename F>
void for_token_heads(const TokenSizes& size, int64_t updates, const Real* weights, int64_t of_head, F f) {
  const int64_t grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, size.L * updates * 8));
  at::parallel_for(0, size.B * size.H, grain, [&](int64_t begin, int64_t end) {
    const auto memory = scratch<Real>(Rule::scratch_size(size.d));
    for (int64_t head = begin; head < end; ++head) {
      const int64_t b = head / size.H, h = head % size.H;
      Rule rule(size.d, weights ? weights + h * of_head : nullptr, memory.get());
      const auto tokens = [&]<typename T>(T* data, int64_t n) -> Tokens<T> {
        return {data ? data + (b * size.L * size.H + h) * n : nullptr, size.H * n};
      };
      f(head, size.marks ? size.marks + b * size.L : nullptr, tokens, rule);
    }
  });
}

// Whether the state is kept in registers.
template <typename Real>
bool is_square(const Lengths& size) {
  return size.Dk == kLanes<Real> && size.Dv == kLanes<Real>;
}

// Call f with a zero of the type of the computation, whose numbers have `item` bytes.
template <typename F>
void with_number(int64_t item, F f) {
  item == sizeof(double) ? f(double()) : f(float());
}

}  // namespace fwp::cpu
