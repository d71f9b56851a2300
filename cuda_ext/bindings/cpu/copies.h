// Passes of kernels that take only float32, over tokens in bfloat16.
#pragma once

#include <utility>
#include <vector>

#include "passes.h"

namespace fwp::cpu {

// Call f(tokens in bfloat16, those of the copy, token) for all tokens, by heads on threads.
template <typename F>
void for_copies(const View& half, const View& copy, F f) {
  const Heads<float> from(half), to(copy);
  const int64_t heads = copy.sizes[0] * copy.sizes[1], length = copy.sizes[2];
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, length * copy.sizes[3]));
  at::parallel_for(0, heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      const Stored<float> of_half = from.stored(h);
      const Tokens<float> of_copy = to.tokens(h);
      for (int64_t t = 0; t < length; ++t) f(of_half, of_copy[t], t);
    }
  });
}

// Float32 copies of all tokens in bfloat16. The next pass takes their memory again, and is not longer: to ask for it took a
// sixth of the time of 256 tokens.
class Copies {
 public:
  // Call run(pass) with copies of its tokens, of which those of results are written back.
  template <typename Pass, typename F>
  void run(Pass pass, F run) {
    used_ = 0;
    std::vector<std::pair<View, View>> results;
    const auto replace = [&](View& x, bool is_result) {
      if (x.number_bytes != sizeof(BFloat16)) return;
      const View copy = copy_of(x);
      if (is_result)
        results.emplace_back(x, copy);
      else
        for_copies(x, copy, [&](const Stored<float>& from, float* to, int64_t t) { from.read_to(to, t, x.sizes[3]); });
      x = copy;
    };
    const auto replaced = [&](bool is_result) { return [&, is_result](View x) { return replace(x, is_result), x; }; };
    pass.in = pass.in.map(replaced(false));
    if constexpr (std::is_same_v<Pass, Backward>)
      replace(pass.d_out, false), pass.to = pass.to.map(replaced(true));
    else
      replace(pass.out, true);
    run(pass);
    for (const auto& [to, copy] : results)
      for_copies(to, copy, [&, columns = copy.sizes[3]](const Stored<float>& to, float* from, int64_t t) {
        to.write_from(from, t, columns);
      });
  }

 private:
  View copy_of(const View& x) {
    if (used_ == memory_.size())
      memory_.push_back(empty({x.sizes[0], x.sizes[1], x.sizes[2], round_up(x.sizes[3], kLanes<float>)}, sizeof(float)));
    View copy = memory_[used_++].narrow(2, 0, x.sizes[2]);
    copy.sizes[3] = x.sizes[3];
    return copy;
  }

  std::vector<View> memory_;
  size_t used_ = 0;
};

// The part of head h of all sequences.
template <typename Pass>
Pass head_of(Pass pass, int64_t h) {
  const auto one = [h](const View& x) { return x.head(h); };
  pass.size.B = pass.size.H = 1;
  pass.in = pass.in.map(one);
  for (View* x : {&pass.initial, &pass.retrieved, &pass.kept}) *x = one(*x);
  if constexpr (std::is_same_v<Pass, Backward>) {
    pass.to = pass.to.map(one);
    for (View* x : {&pass.d_out, &pass.d_final, &pass.d_initial}) *x = one(*x);
  } else {
    for (View* x : {&pass.out, &pass.final}) *x = one(*x);
  }
  return pass;
}

// Call run(pass) with copies of one head at a time, which stay in the cache; of all heads if they are short.
template <typename Pass, typename F>
void run_in_float32(const Pass& pass, F run) {
  constexpr int64_t kCopied = 256;  // tokens of a forward pass: a multiple of kSplit, so its bits are those of one part
  static_assert(kCopied % kSplit == 0);
  const Lengths& size = pass.size;
  const int64_t work = size.L * size.Dk * size.Dv;
  if (work < 1 << 18) return Copies().run(pass, run);
  at::parallel_for(0, size.B * size.H, 1, [&](int64_t begin, int64_t end) {
    Copies copies;
    for (int64_t h = begin; h < end; ++h) {
      const Pass head = head_of(pass, h);
      if constexpr (std::is_same_v<Pass, Backward>)
        copies.run(head, run);
      else
        for (int64_t t = 0; t < size.L; t += kCopied)
          copies.run(head.part(t, std::min(kCopied, size.L - t), t ? head.final : head.initial, head.final), run);
    }
  });
}

}  // namespace fwp::cpu
