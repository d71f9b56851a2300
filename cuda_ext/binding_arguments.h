// What the bindings of all devices share: sizes, dtypes, and the checks of the tensors they are given.
// Shapes: q, k (B, H, L, Dk), v, out, error (B, H, L, Dv), beta (B, H, L), states (B, H, Dk, Dv).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

namespace fwp {

using at::Tensor;

inline at::ScalarType state_type(const Tensor& q) { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

inline void check(const char* name, const Tensor& x, at::IntArrayRef sizes, at::ScalarType type,
                  at::Device device = at::kCPU) {
  TORCH_CHECK(x.sizes() == sizes && x.scalar_type() == type && x.device() == device, name, " must be a ", type,
              " tensor of ", sizes, " on ", device, ", got ", x.scalar_type(), " of ", x.sizes(), " on ", x.device());
}

inline void check(const char* name, const std::optional<Tensor>& x, at::IntArrayRef sizes, at::ScalarType type,
                  at::Device device = at::kCPU) {
  if (x) check(name, *x, sizes, type, device);
}

struct Sizes {
  int64_t B, H, L, Dk, Dv;
  Sizes(const Tensor& q, const Tensor& values) {
    TORCH_CHECK(q.dim() == 4 && values.dim() == 4, "q and v must have 4 dimensions, got ", q.dim(), ", ", values.dim());
    const auto type = q.scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf,
                "q must be float32, float64, bfloat16 or float16, got ", type);
    B = q.size(0), H = q.size(1), L = q.size(2), Dk = q.size(3), Dv = values.size(3);
  }
  std::array<int64_t, 4> keys() const { return {B, H, L, Dk}; }
  std::array<int64_t, 4> values() const { return {B, H, L, Dv}; }
  std::array<int64_t, 4> state() const { return {B, H, Dk, Dv}; }
  std::array<int64_t, 3> rates() const { return {B, H, L}; }
};

}  // namespace fwp
