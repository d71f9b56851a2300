// The kernels of the operator on CUDA tensors.

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda_tensors.h"
#include "operator.h"

namespace fwp::cuda {
namespace {

InputArray input(const Tensor& x) {
  if (!x.defined()) return {};
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2), type_of(x.scalar_type())};
}

OutputArray output(const Tensor& x) {
  if (!x.defined()) return {};
  return {x.mutable_data_ptr(), type_of(x.scalar_type())};
}

Tensor contiguous(const Tensor& x) { return x.defined() ? x.contiguous() : x; }
const void* data(const Tensor& x) { return x.defined() ? x.const_data_ptr() : nullptr; }
void* memory(const Tensor& x) { return x.defined() ? x.mutable_data_ptr() : nullptr; }

struct Device {
  static constexpr at::DeviceType kType = at::kCUDA;
  static constexpr bool kTokensFirst = true;  // so that the heads of a token can be merged without a copy
  // Kernels read what they keep.
  static constexpr KernelNeeds kNeeds{.same_dtype = false, .shares_heads = false, .always_rate = true, .always_keeps = true};
  static int64_t segments(const OperatorCall& x) {
    return x.in.q.scalar_type() == at::kBFloat16 ? segments_of(x.size.H, x.size.L) : 0;
  }

  static void run(const ForwardPass& x) {
    OutputArray out = output(x.out);
    out.tokens_first = kTokensFirst;
    launch(x, false, [&](const Call& call, const Inputs& in) {
      return forward(call, in, {out, memory(x.final), memory(x.retrieved), memory(x.kept), memory(x.segments)});
    });
  }

  static void run(const BackwardPass& x) {
    const Tensor d_state = contiguous(x.d_state);
    launch(x, true, [&](const Call& call, const Inputs& in) {
      const Gradients gradients{x.to.map(output), memory(x.d_initial)};
      const BackwardInputs more{input(x.retrieved), input(x.d_out), data(x.kept), data(x.segments), data(d_state)};
      return backward(call, in, more, gradients);
    });
  }

 private:
  // Call f, which returns null or an error message, for q's device and its current stream.
  template <typename F>
  static void launch(const OperatorCall& x, bool is_backward, F f) {
    const c10::DeviceGuard guard(x.in.q.device());
    const Tensor state = contiguous(x.state), first = contiguous(x.first);
    void* const stream = c10::cuda::getCurrentCUDAStream(x.in.q.device().index()).stream();
    const bool* const begins = first.defined() ? first.const_data_ptr<bool>() : nullptr;
    Call call{x.size, type_of(x.in.q.scalar_type()), x.rule, begins, nullptr, stream};
    // The workspace may be freed before the kernels have run: only later work of this stream gets its memory.
    const Tensor workspace = at::empty({int64_t(workspace_bytes(call, is_backward))}, x.in.q.options().dtype(at::kByte));
    call.workspace = memory(workspace);
    const char* const failure = f(call, Inputs{x.in.map(input), data(state)});
    TORCH_CHECK(failure == nullptr, failure);
  }
};

}  // namespace
}  // namespace fwp::cuda

FWP_OPERATOR(CUDA, fwp::cuda::Device)
