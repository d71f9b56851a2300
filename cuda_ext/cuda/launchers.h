// What the CUDA kernels offer to a binding: one function for each operator of fairseq_fwp/ops. Standard C++17 without
// PyTorch or CUDA headers.
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
// dimension D, whose elements lie side by side. Strides of 0 (expanded tensors) are fine. `data` is null where an
// optional input is absent.
struct Tokens {
  const void* data;
  int64_t batch, head, token;
};

enum class Operator {
  sum_forward, sum_backward, delta_forward, delta_backward, gated_forward, gated_backward, decay_forward, decay_backward
};

// What every operator is told. It launches on the current device and returns before the kernels have run.
struct Call {
  Sizes size;
  Type type;  // of q and all Tokens but `error`; states, `error` and `kept` are float32, or float64 for float64
  void* workspace;  // workspace_bytes(...) bytes of device memory, aligned to 16; null where that is 0
  void* stream;  // cudaStream_t
};

// The greatest Dk and Dv that the kernels take; the functions below refuse more.
constexpr int64_t kGreatestSize = 512;

// Tokens between two of the states that gated_forward and decay_forward keep: CHUNK of fairseq_fwp/ops/chunks.py.
constexpr int64_t kChunk = 32;

// Device memory that an operator needs while it runs, besides its arguments.
size_t workspace_bytes(Operator op, const Sizes& size, Type type);

// All return null, or a sentence on what failed (an unsupported size, or the text of a CUDA error), which stays valid
// until the same thread calls again. Outputs are contiguous, need not be initialised, and must not overlap the inputs.
// Where `state`, `grad_out` or `grad_state` is null it stands for zeros. Where `d_state` is null, that gradient is not
// written. Results are bit-equal from run to run.

const char* sum_forward(const Call& call, Tokens q, Tokens k, Tokens v, const void* state,  //
                        void* out, void* new_state);

const char* sum_backward(const Call& call, Tokens q, Tokens k, Tokens v, const void* state, Tokens grad_out,
                         const void* grad_state,  //
                         void* d_q, void* d_k, void* d_v, void* d_state);

// `error` (B, H, L, Dv) in the type of the state.
const char* delta_forward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens beta, const void* state,  //
                          void* out, void* new_state, void* error);

const char* delta_backward(const Call& call, Tokens q, Tokens k, Tokens beta, const void* state, Tokens error,
                           Tokens grad_out, const void* grad_state,  //
                           void* d_q, void* d_k, void* d_v, void* d_beta, void* d_state);

// `kept` (B, H, L / kChunk, Dk, Dv), contiguous, in the type of the state.
const char* gated_forward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens gate, const void* state,  //
                          void* out, void* new_state, void* kept);

const char* gated_backward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens gate, const void* state,
                           const void* kept, Tokens grad_out, const void* grad_state,  //
                           void* d_q, void* d_k, void* d_v, void* d_gate, void* d_state);

const char* decay_forward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens key_decay, Tokens value_decay,
                          const void* state,  //
                          void* out, void* new_state, void* kept);

const char* decay_backward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens key_decay, Tokens value_decay,
                           const void* state, const void* kept, Tokens grad_out, const void* grad_state,  //
                           void* d_q, void* d_k, void* d_v, void* d_key_decay, void* d_value_decay, void* d_state);

}  // namespace fwp::cuda
