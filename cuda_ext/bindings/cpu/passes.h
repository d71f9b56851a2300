// The passes of the rules, as the operator calls them. Each rule is compiled in its own file.
#pragma once

#include "tensors.h"

namespace fwp::cpu {

// Inputs and results of a forward pass. `initial` may be undefined.
struct Forward {
  Sizes size;
  at::ScalarType type;
  TokenTensors in;
  Tensor initial, out, final, retrieved, kept;

  // A range of tokens of some sequences, with the states before and after it.
  Forward part(int64_t batch, int64_t batches, int64_t first, int64_t length, const Tensor& before,
               const Tensor& after) const {
    Forward part = *this;
    part.size.B = batches, part.size.L = length;
    part.in = in.part(batch, batches, first, length);
    part.initial = before, part.final = after;
    part.out = tokens_of(out, batch, batches, first, length);
    part.retrieved = tokens_of(retrieved, batch, batches, first, length);
    part.kept = tokens_of(kept, batch, batches, first / kChunk, length / kChunk);
    return part;
  }
  Forward part(int64_t first, int64_t length, const Tensor& before, const Tensor& after) const {
    return part(0, size.B, first, length, before, after);
  }
};

// Inputs and results of a backward pass. `d_initial` and members of `to` are undefined if the gradient is not needed.
struct Backward {
  Sizes size;
  at::ScalarType type;
  TokenTensors in;
  Tensor initial, retrieved, kept, d_out, d_final;
  TokenTensors to;
  Tensor d_initial;

  Backward part(int64_t batch, int64_t batches, int64_t first, int64_t length, const Tensor& before,
                const Tensor& d_after, const Tensor& d_before) const {
    Backward part = *this;
    part.size.B = batches, part.size.L = length;
    part.in = in.part(batch, batches, first, length);
    part.to = to.part(batch, batches, first, length);
    part.initial = before, part.d_final = d_after, part.d_initial = d_before;
    part.d_out = tokens_of(d_out, batch, batches, first, length);
    part.retrieved = tokens_of(retrieved, batch, batches, first, length);
    part.kept = tokens_of(kept, batch, batches, first / kChunk, length / kChunk);
    return part;
  }
  Backward part(int64_t first, int64_t length, const Tensor& before, const Tensor& d_after,
                const Tensor& d_before) const {
    return part(0, size.B, first, length, before, d_after, d_before);
  }
};

void sum_forward(const Forward& pass);
void sum_backward(const Backward& pass);
void delta_forward(const Forward& pass);
void delta_backward(const Backward& pass);
// Rules that forget but erase nothing (forget), and rules that retrieve before they write (retrieve).
void forget_forward(const Forward& pass);
void forget_backward(const Backward& pass);
void retrieve_forward(const Forward& pass);
void retrieve_backward(const Backward& pass);

}  // namespace fwp::cpu
