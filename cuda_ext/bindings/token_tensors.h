// The tensors of a pass, for kernels with or without ATen.
#pragma once

#include <array>
#include <cstdint>

namespace fwp {

struct Lengths {
  int64_t B, H, L, Dk, Dv;
  std::array<int64_t, 4> keys() const { return {B, H, L, Dk}; }
  std::array<int64_t, 4> values() const { return {B, H, L, Dv}; }
  std::array<int64_t, 4> state() const { return {B, H, Dk, Dv}; }
  std::array<int64_t, 3> rates() const { return {B, H, L}; }
};

// Tensors that kernels read or write for each token; undefined if the rule does not have them.
template <typename Tensor>
struct TokenTensorsOf {
  Tensor q, k, v, key_decay, value_decay, head_decay, rate, removal, removal_key;

  template <typename F>
  auto map(F f) const -> TokenTensorsOf<decltype(f(q))> {
    return {f(q), f(k), f(v), f(key_decay), f(value_decay), f(head_decay), f(rate), f(removal), f(removal_key)};
  }
};

}  // namespace fwp
