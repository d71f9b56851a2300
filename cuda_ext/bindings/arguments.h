// Shared by the bindings of all devices: the operator's arguments, their sizes and their checks.
// Shapes: q, k (B, Hk, L, Dk), where H is a multiple of Hk. v, out (B, H, L, Dv). Rates (B, H, L). States (B, H, Dk, Dv).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../rule.h"

namespace fwp {

using at::Tensor;
using Optional = std::optional<Tensor>;

inline at::ScalarType state_type(const Tensor& q) { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

inline void check(const char* name, const Tensor& x, at::IntArrayRef sizes, at::ScalarType type,
                  at::Device device) {
  TORCH_CHECK(x.sizes() == sizes && x.scalar_type() == type && x.device() == device, name, " must be a ", type,
              " tensor of ", sizes, " on ", device, ", got ", x.scalar_type(), " of ", x.sizes(), " on ", x.device());
}

inline void check(const char* name, const Optional& x, at::IntArrayRef sizes, at::ScalarType type,
                  at::Device device) {
  if (x) check(name, *x, sizes, type, device);
}

// Of rules that run token by token: a contiguous tensor like x, and marks (B, L), whose address is returned.
inline void check(const char* name, const Tensor& given, at::IntArrayRef sizes, const Tensor& x) {
  check(name, given, sizes, x.scalar_type(), x.device());
  TORCH_CHECK(given.is_contiguous(), name, " must be contiguous");
}
inline const uint8_t* check_marks(const Optional& marks, const Tensor& x) {
  check("marks", marks, x.sizes().slice(0, 2), at::kByte, x.device());
  TORCH_CHECK(!marks || marks->is_contiguous(), "marks must be contiguous");
  return marks ? marks->const_data_ptr<uint8_t>() : nullptr;
}

struct Sizes : Lengths {
  int64_t Hk;  // heads of q and k: each serves H / Hk consecutive heads

  Sizes(const Tensor& q, const Tensor& values) {
    TORCH_CHECK(q.dim() == 4 && values.dim() == 4, "q and v must have 4 dimensions, got ", q.dim(), ", ", values.dim());
    const auto type = q.scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf,
                "q must be float32, float64, bfloat16 or float16, got ", type);
    B = q.size(0), Hk = q.size(1), H = values.size(1), L = q.size(2), Dk = q.size(3), Dv = values.size(3);
    TORCH_CHECK(Hk == H || (Hk > 0 && H % Hk == 0), "the heads of v must be a multiple of those of q, got ", H, " and ", Hk);
  }
};

// The arguments of fwp::fast_weights, in its order and with its names (fairseq_fwp/ops/fast_weights.py). `v` is absent
// in the backward pass of a rule that erases.
struct Arguments {
  const Tensor &q, &k;
  const Optional v, decay, value_decay, rate, removal_key, removal, state, first;
  const bool erases;

  bool removes() const { return removal_key.has_value(); }
  bool retrieves() const { return erases || removes(); }
  bool decays_by_head() const { return decay && decay->dim() == 3; }

  // Raise an error where kernels would read outside of a tensor.
  void check_all(const Sizes& size) const {
    const auto given = q.scalar_type(), type = state_type(q);
    const at::Device device = q.device();
    // Half precision would round a gate just below 1. So a gate may have the dtype of the state.
    const auto check_gate = [&](const char* name, const Optional& x, at::IntArrayRef sizes) {
      check(name, x, sizes, x && x->scalar_type() == type ? type : given, device);
    };
    check("k", k, {size.B, size.Hk, size.L, size.Dk}, given, device);
    check("v", v, size.values(), given, device);
    if (decays_by_head())
      check_gate("decay", decay, size.rates());
    else
      check_gate("decay", decay, size.keys());
    check_gate("value_decay", value_decay, size.values());
    check_gate("rate", rate, size.rates());
    check_gate("removal_key", removal_key, size.keys());
    check_gate("removal", removal, size.keys());
    check("state", state, size.state(), type, device);
    check("first", first, {size.B, size.L}, at::kBool, device);
    TORCH_CHECK(removal_key.has_value() == removal.has_value(),
                "removal_key and removal must be given together, got only one of them");
    TORCH_CHECK(!(erases && removes()), "erases must be False with removal_key and removal, got True");
    TORCH_CHECK(!value_decay || !(rate || retrieves()),
                "value_decay must be None with a rate, erasing or removal, got a tensor");
  }
};

}  // namespace fwp
