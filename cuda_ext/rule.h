// Shared by both devices, with or without ATen: kinds of rules, sizes and tensors, also of rules that run token by token.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

// Symbols, in all kernels, cpu.md and cuda.md. Small letters are of one token t, capital ones of all tokens of a chunk, in rows.
//
//   W      the state, Dk x Dv              q, k, v   query, key and value
//   a, z   the decays along the keys and along the values; by head, a is one number
//   b      the rate of a write             e         the error v - k W, or v if nothing is erased
//   y, x   of a removal: what y retrieves (removal_key) is subtracted under x (removal)
//   r      what is retrieved: k W, so that e = v - r, or y W
//   n, m   key and value of any write: k with b e or b v, and of a removal also x with -r
//   d_q    the gradient of q               G         that of W_t, through all reads of it or of a later state
//
// In chunks, W is the state before the chunk and W_C that after it. F_ts and Z_ts are the products of a and z of tokens s + 1 to
// t. Likewise c_t begins with the chunk's first token, w_s ends with its last, and c_C has all.
//
//   P, A   the scores of tokens that read, q_t (F_ts * k_s), and that erase, k_t (F_ts * k_s)
//   U      what is written, b E            D         the gradient of E
//
// Types of numbers: Real, that of the computation (float or double), and T, as stored, perhaps in half precision.
//
// The papers have beta for b, and for a: alpha (gated delta), g (gated), f (decay; z is theirs), w (RWKV-7).

namespace fwp {

// What a rule does before it writes:
//   - sum: nothing
//   - gated, gated_by_key, decay: multiply by a decay per head, per key dimension, or per key and value dimension
//   - delta and gated_delta*: also erase what the key retrieves
//   - removal: a decay per key dimension; subtract what another key retrieves
enum class Rule { sum, delta, gated, gated_by_key, decay, gated_delta, gated_delta_by_key, removal };

// What a decay multiplies: the whole state (kHead), its rows (kKey), or its rows and its columns (kKeyAndValue).
enum class Fades { kNothing, kHead, kKey, kKeyAndValue };
// What is erased before a write: nothing, what the key retrieves after the decay (kKey), or what a separate key
// retrieves before the decay (kRemoval).
enum class Erases { kNothing, kKey, kRemoval };

constexpr Fades fades_of(Rule rule) {
  switch (rule) {
    case Rule::sum: case Rule::delta: return Fades::kNothing;
    case Rule::gated: case Rule::gated_delta: return Fades::kHead;
    case Rule::decay: return Fades::kKeyAndValue;
    case Rule::gated_by_key: case Rule::gated_delta_by_key: case Rule::removal: return Fades::kKey;
  }
  __builtin_unreachable();
}
constexpr Erases erases_of(Rule rule) {
  switch (rule) {
    case Rule::delta: case Rule::gated_delta: case Rule::gated_delta_by_key: return Erases::kKey;
    case Rule::removal: return Erases::kRemoval;
    case Rule::sum: case Rule::gated: case Rule::gated_by_key: case Rule::decay: return Erases::kNothing;
  }
  __builtin_unreachable();
}

// Call f(rule) with the rule as a compile-time constant.
template <typename F>
auto with_rule(Rule rule, F f) {
  switch (rule) {
    case Rule::sum: return f(std::integral_constant<Rule, Rule::sum>{});
    case Rule::delta: return f(std::integral_constant<Rule, Rule::delta>{});
    case Rule::gated: return f(std::integral_constant<Rule, Rule::gated>{});
    case Rule::gated_by_key: return f(std::integral_constant<Rule, Rule::gated_by_key>{});
    case Rule::decay: return f(std::integral_constant<Rule, Rule::decay>{});
    case Rule::gated_delta: return f(std::integral_constant<Rule, Rule::gated_delta>{});
    case Rule::gated_delta_by_key: return f(std::integral_constant<Rule, Rule::gated_delta_by_key>{});
    case Rule::removal: return f(std::integral_constant<Rule, Rule::removal>{});
  }
  __builtin_unreachable();
}

// Rules that forget keep the state after every so many tokens for the backward pass: KEPT_EVERY of
// fairseq_fwp/ops/fast_weights.py. Others rebuild it by adding the writes, or from the saved errors.
constexpr int64_t kKeptEvery = 32;
constexpr bool keeps_states(Rule rule) { return fades_of(rule) != Fades::kNothing; }

// The segments of a sequence that run in parallel on a GPU's tensor cores, at most; 0: it is not split. `segments_of` of
// fairseq_fwp/ops/fast_weights.py is the same. The number depends only on the sequence, so its bits depend neither on its batch
// nor on the GPU. In a batch of 32,768 tokens, each segment of a head gets one of 128 multiprocessors: 256 tokens bring a
// sequence one of them. A segment has at least 512 tokens. Fewer than four do not pay, because they take about twice the work.
constexpr int64_t segments_of(int64_t heads, int64_t length) {
  const int64_t multiprocessors = length / 256 < 128 ? length / 256 : 128;
  const int64_t segments = multiprocessors / (heads > 2 ? heads : 2);
  return segments < 4 ? 0 : segments;
}

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

// Of rules that run token by token, what happens before a token: the state is emptied; the token is padding, and changes nothing.
enum Mark : uint8_t { kBegins = 1, kIsPadding = 2 };

// Their sizes, and the marks (B, L) or null. A state is kept before each kKeptEvery tokens.
struct TokenSizes {
  int64_t B, L, H, d;
  const uint8_t* marks;
  constexpr int64_t chunks() const { return (L + kKeptEvery - 1) / kKeptEvery; }
};

// Of the recurrent delta rule (cpu/recurrent_delta.h). The arrays of its passes are contiguous. Those of tokens are
// (B, L, H, n), where n is 3 d + 1 in x and saved, and else d. Weights are R (H, d, 3 d + 1), memories (B, H, d, d), and
// first_output is o (B, H, d) before the first token. Null: z and weights are zeros; saved and kept are not written.
struct RecurrentSizes : TokenSizes {
  constexpr int64_t gates() const { return 3 * d + 1; }
};
template <typename Real>
struct RecurrentDeltaForward : RecurrentSizes {
  const Real *weights, *first_output, *x, *z;
  Real *memory, *out, *saved, *kept;  // memory: before the first token, replaced by that after the last
};
// memory: after the last token; d_memory: its gradient, replaced by that of the memory before the first.
template <typename Real>
struct RecurrentDeltaBackward : RecurrentSizes {
  const Real *weights, *first_output, *memory, *out, *saved, *kept, *d_out;
  Real *d_x, *d_z, *d_memory, *d_first_output;
};

}  // namespace fwp
