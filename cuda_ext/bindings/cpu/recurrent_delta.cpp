// The recurrent delta rule on CPU tensors. Each head is one task of a thread.

#include "../../cpu/recurrent_delta.h"
#include "../recurrent_delta.h"
#include "tensors.h"

namespace fwp::cpu {
namespace {

// Call f(head, marks, tokens, rule) for every head, on threads. tokens(data, n) are those of the head in an array (B, L, H, n).
// There are none if it is null.
template <typename A, typename F>
void for_heads(const RecurrentSizes& size, const A* weights, F f) {
  const int64_t d = size.d, grain = std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, size.L * d * d * 8));
  at::parallel_for(0, size.B * size.H, grain, [&](int64_t begin, int64_t end) {
    const auto memory = scratch<A>(RecurrentDelta<A>::scratch_size(d));
    for (int64_t head = begin; head < end; ++head) {
      const int64_t b = head / size.H, h = head % size.H;
      RecurrentDelta<A> rule(d, weights ? weights + h * d * size.gates() : nullptr, memory.get());
      const auto tokens = [&]<typename T>(T* data, int64_t n) -> Tokens<T> {
        return {data ? data + (b * size.L * size.H + h) * n : nullptr, size.H * n};
      };
      f(head, size.marks ? size.marks + b * size.L : nullptr, tokens, rule);
    }
  });
}

struct Device {
  template <typename A>
  static void run(const RecurrentDeltaForward<A>& x, at::Device) {
    const int64_t d = x.d, kept = x.chunks() * d * d;
    for_heads<A>(x, x.weights, [&](int64_t head, const uint8_t* marks, auto tokens, RecurrentDelta<A>& rule) {
      rule.forward(x.L, tokens(x.x, x.gates()), tokens(x.z, d), marks, x.memory + head * d * d, x.first_output + head * d,
                   tokens(x.out, d), tokens(x.saved, x.gates()), x.kept ? x.kept + head * kept : nullptr);
    });
  }
  template <typename A>
  static void run(const RecurrentDeltaBackward<A>& x, at::Device) {
    const int64_t d = x.d, kept = x.chunks() * d * d;
    for_heads<A>(x, x.weights, [&](int64_t head, const uint8_t* marks, auto tokens, RecurrentDelta<A>& rule) {
      rule.backward(x.L, marks, x.memory + head * d * d, x.first_output + head * d, tokens(x.out, d), tokens(x.saved, x.gates()),
                    x.kept + head * kept, tokens(x.d_out, d), tokens(x.d_x, x.gates()), tokens(x.d_z, d),
                    x.d_memory + head * d * d, x.d_first_output + head * d);
    });
  }
};

}  // namespace
}  // namespace fwp::cpu

FWP_RECURRENT_DELTA(CPU, fwp::cpu::Device)
