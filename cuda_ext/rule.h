// Shared by both devices, with or without ATen: the kinds of rules, their sizes and their tensors.
#pragma once

#include <array>
#include <cstdint>

namespace fwp {

// What a rule does before it writes:
//   - sum: nothing
//   - gated, gated_by_key, decay: multiply by a decay per head, per key dimension, or per key and value dimension
//   - delta and gated_delta*: also erase what the key retrieves
//   - removal: a decay per key dimension; subtract what another key retrieves
enum class Rule { sum, delta, gated, gated_by_key, decay, gated_delta, gated_delta_by_key, removal };

struct Lengths {
  int64_t B, H, L, Dk, Dv;
  std::array<int64_t, 4> keys() const { return {B, H, L, Dk}; }
  std::array<int64_t, 4> values() const { return {B, H, L, Dv}; }
  std::array<int64_t, 4> state() const { return {B, H, Dk, Dv}; }
  std::array<int64_t, 3> rates() const { return {B, H, L}; }
};

// Tensors that kernels read or write for each token; undefined if the rule does not have them. removal_key retrieves, and
// `removal` is what that is subtracted under.
template <typename Tensor>
struct TokenTensorsOf {
  Tensor q, k, v, head_decay, key_decay, value_decay, rate, removal_key, removal;

  template <typename F>
  auto map(F f) const -> TokenTensorsOf<decltype(f(q))> {
    return {f(q), f(k), f(v), f(head_decay), f(key_decay), f(value_decay), f(rate), f(removal_key), f(removal)};
  }
};

}  // namespace fwp
