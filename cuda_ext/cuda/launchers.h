// What the CUDA kernels offer to a binding: the operator fast_weights of fairseq_fwp/ops and its backward pass. Standard
// C++17 without PyTorch or CUDA headers.
// Sizes: B batch, H heads, L tokens, Dk size of a key, Dv of a value. A state is a (B, H, Dk, Dv) array.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fwp::cuda {

enum class Type { float32, float64, bfloat16, float16 };

struct Sizes {
  int64_t B, H, L, Dk, Dv;
};

// An input (B, H, L, D), or (B, H, L) for one number a token, with any strides (in elements) but that of its last
// dimension D, whose elements lie side by side. Strides of 0 (expanded tensors) are fine. `data` is null where a rule has
// no such input.
struct Tokens {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, token = 0;
  Type type = Type::float32;
};

// A contiguous result, of one entry a token; not wanted where `data` is null.
struct Target {
  void* data = nullptr;
  Type type = Type::float32;
};

// What the rule does before it writes: nothing; fades, by a number for each head, for each dimension of the key, or for
// each of the key and of the value; retrieves under the key what is there; removes what it retrieves under another key.
enum class Rule {
  sum, delta, gated, gated_by_key, decay, gated_delta, gated_delta_by_key, removal
};

// What both passes are told. They launch on the current device and return before the kernels have run.
struct Call {
  Sizes size;
  Type type;          // of q; states, `retrieved` and `kept` are float32, or float64 for float64
  Rule rule;
  const bool* first;  // (B, L), contiguous: tokens before which the state is empty; null: nowhere
  void* workspace;    // workspace_bytes(...) bytes of device memory, aligned to 16; null where that is 0
  void* stream;       // cudaStream_t
};

// What a rule reads. A rate is there for all but sum; a head's decay for gated and gated_delta, a key's for the others that
// fade and for removal, a value's for decay; removal_key and what is removed under it for removal. `state` may be null.
struct Inputs {
  Tokens q, k, v, head_decay, key_decay, value_decay, rate, removal_key, removal;
  const void* state = nullptr;
};

struct Outputs {
  Target out;
  void* state;
  void* retrieved;  // (B, H, L, Dv): errors of a rule that corrects, or what removal_key finds
  void* kept;       // (B, H, L / kChunk, Dk, Dv), of rules that fade or remove
};

// What the backward pass reads besides: of its own, and of the forward pass. d_out and d_state may be absent.
struct Backward {
  Tokens retrieved, d_out;
  const void *kept = nullptr, *d_state = nullptr;
};

struct Gradients {
  Target q, k, v, head_decay, key_decay, value_decay, rate, removal_key, removal;
  void* state = nullptr;  // null: not written
};

// The greatest Dk and Dv that the kernels take; the functions below refuse more.
constexpr int64_t kGreatestSize = 512;

// Tokens between two of the states that are kept: KEPT_EVERY of fairseq_fwp/ops/fast_weights.py.
constexpr int64_t kChunk = 32;

// Device memory that a pass needs while it runs, besides its arguments.
size_t workspace_bytes(Rule rule, const Sizes& size, Type type, bool is_backward);

// Both return null, or a sentence on what failed (an unsupported size, or the text of a CUDA error), which stays valid
// until the same thread calls again. Results are contiguous, need not be initialised, and must not overlap the inputs.
// They are bit-equal from run to run.
const char* forward(const Call& call, const Inputs& in, const Outputs& to);
const char* backward(const Call& call, const Inputs& in, const Backward& more, const Gradients& to);

}  // namespace fwp::cuda
