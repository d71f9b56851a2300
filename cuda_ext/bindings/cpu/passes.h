// The passes of the rules, as the operator calls them.
#pragma once

#include "tensors.h"

namespace fwp::cpu {

// Whether a head is large enough for chunks: with fewer keys or values, the recurrent form is faster.
inline bool is_large(const Lengths& size) { return std::min(size.Dk, size.Dv) >= 48; }

// Whether a rule processes tokens in chunks. Such kernels take vectors in bfloat16, and need no memory for what they retrieve.
inline bool in_chunks(Rule rule, const Lengths& size) {
  return fades_of(rule) != Fades::kNothing && is_large(size);
}

// Inputs and results of a forward pass. May be undefined: `initial`, and what a backward pass needs, `retrieved` in chunks and
// `kept`.
struct Forward {
  Lengths size;
  int64_t number_bytes;  // in every tensor, but for vectors of tokens in bfloat16 that are processed in chunks
  TokenViews in;
  View initial, out, final, retrieved, kept;

  // A range of tokens of some sequences, with the states before and after it.
  Forward part(int64_t batch, int64_t batches, int64_t first, int64_t length, const View& before,
               const View& after) const {
    Forward part = *this;
    part.size.B = batches, part.size.L = length;
    part.in = tokens_of(in, batch, batches, first, length);
    part.initial = before, part.final = after;
    part.out = tokens_of(out, batch, batches, first, length);
    part.retrieved = tokens_of(retrieved, batch, batches, first, length);
    part.kept = tokens_of(kept, batch, batches, first / kKeptEvery, length / kKeptEvery);
    return part;
  }
  Forward part(int64_t first, int64_t length, const View& before, const View& after) const {
    return part(0, size.B, first, length, before, after);
  }
};

// Inputs and results of a backward pass. `d_initial` and members of `to` are undefined if the gradient is not needed.
struct Backward {
  Lengths size;
  int64_t number_bytes;  // as in Forward
  TokenViews in;
  View initial, retrieved, kept, d_out, d_final;
  TokenViews to;
  View d_initial;

  Backward part(int64_t batch, int64_t batches, int64_t first, int64_t length, const View& before,
                const View& d_after, const View& d_before) const {
    Backward part = *this;
    part.size.B = batches, part.size.L = length;
    part.in = tokens_of(in, batch, batches, first, length);
    part.to = tokens_of(to, batch, batches, first, length);
    part.initial = before, part.d_final = d_after, part.d_initial = d_before;
    part.d_out = tokens_of(d_out, batch, batches, first, length);
    part.retrieved = tokens_of(retrieved, batch, batches, first, length);
    part.kept = tokens_of(kept, batch, batches, first / kKeptEvery, length / kKeptEvery);
    return part;
  }
  Backward part(int64_t first, int64_t length, const View& before, const View& d_after,
                const View& d_before) const {
    return part(0, size.B, first, length, before, d_after, d_before);
  }
};

// Each kind of rule is compiled in its own file: sum.cpp, delta.cpp, and of rules that forget forget.cpp or, if they
// retrieve before they write, retrieve.cpp.
template <Rule rule>
void forward(const Forward& pass);
template <Rule rule>
void backward(const Backward& pass);
template <>
void forward<Rule::sum>(const Forward& pass);
template <>
void backward<Rule::sum>(const Backward& pass);
template <>
void forward<Rule::delta>(const Forward& pass);
template <>
void backward<Rule::delta>(const Backward& pass);

}  // namespace fwp::cpu
