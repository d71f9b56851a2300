// The interface of the CUDA kernels for a binding: the operator fast_weights of fairseq_fwp/ops and its backward pass. Standard
// C++17 without headers of PyTorch or CUDA. Sizes: batch B, heads H, tokens L, key size Dk, value size Dv. A state is a (B, H,
// Dk, Dv) array.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../rule.h"

namespace fwp::cuda {

enum class Type { float32, float64, bfloat16, float16 };

using Sizes = Lengths;

// An input (B, H, L, D), or (B, H, L) for one number per token. Strides are in elements, and may be 0 (expanded tensors); the
// last dimension D must be contiguous. `data` is null if a rule does not have this input.
struct InputArray {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, token = 0;
  Type type = Type::float32;
};

// A contiguous result with one entry per token, (B, H, L, D), or (B, L, H, D) if tokens come first, which only out may have.
// It is not computed if `data` is null, which out and the gradient of v must not be.
struct OutputArray {
  void* data = nullptr;
  Type type = Type::float32;
  bool tokens_first = false;
};

// Arguments of both passes. They launch on the current device and return before the kernels have run.
struct Call {
  Sizes size;
  Type type;           // of q; states, `retrieved` and `kept` are float32, or float64 for float64
  Rule rule;
  const bool* begins;  // (B, L), contiguous: tokens before which the state is empty; null: none
  void* workspace;     // workspace_bytes(...) bytes of device memory, aligned to 16; null if that is 0
  void* stream;        // cudaStream_t
};

// All rules have a rate; sum and delta have no decays. head_decay: gated and gated_delta. key_decay: the other rules with
// decays, and removal. `state` may be null.
struct Inputs : TokenTensorsOf<InputArray> {
  const void* state = nullptr;
};

struct Outputs {
  OutputArray out;
  void* state;
  void* retrieved;  // (B, H, L, Dv): errors of a rule that erases, or what removal_key retrieves
  void* kept;       // (B, H, L / kKeptEvery, Dk, Dv), of rules with decays or removals
  void* segments;   // (B, H, segments_of(H, L), Dk + Dv, Dk) in float32, of bfloat16: states and transitions of segments
};

// Further inputs of the backward pass: its own, and results of the forward pass. d_out and d_state may be absent.
struct BackwardInputs {
  InputArray retrieved, d_out;
  const void *kept = nullptr, *segments = nullptr, *d_state = nullptr;
};

struct Gradients : TokenTensorsOf<OutputArray> {
  void* state = nullptr;  // null: not written
};

// The properties of a GPU on which the plans of the kernels depend.
struct Gpu {
  int multiprocessors = 1;
  size_t shared_bytes = 0;  // of shared memory per block, at most
};

// The largest supported Dk and Dv. The functions below refuse larger ones.
constexpr int64_t kGreatestSize = 512;

// Device memory in bytes that a pass needs while it runs, in addition to its arguments. call.workspace is not read.
size_t workspace_bytes(const Call& call, bool is_backward);

// Both return null, or an error message (an unsupported size or the text of a CUDA error). The message stays valid until the
// same thread calls again. Results are contiguous, need not be initialized, and must not overlap the inputs. They are
// bit-identical in every run.
const char* forward(const Call& call, const Inputs& in, const Outputs& to);
const char* backward(const Call& call, const Inputs& in, const BackwardInputs& more, const Gradients& to);

// The same for the recurrent delta rule.
const char* recurrent_delta(const RecurrentDeltaForward<float>& given, void* stream);
const char* recurrent_delta(const RecurrentDeltaForward<double>& given, void* stream);
const char* recurrent_delta(const RecurrentDeltaBackward<float>& given, void* stream);
const char* recurrent_delta(const RecurrentDeltaBackward<double>& given, void* stream);

}  // namespace fwp::cuda
