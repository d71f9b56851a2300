// The functions of launchers.h: which scans an operator consists of.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <type_traits>

#include "choose.h"
#include "decay.cuh"
#include "delta.cuh"
#include "launchers.h"
#include "sum.cuh"

namespace fwp::cuda {

// At least. Without this number, ptxas spills registers in favour of more blocks than are of use.
constexpr int kBlocksPerMultiprocessor = 2;

template <typename Scan, int kRows, int kColumns>
__global__ void __launch_bounds__(kThreadsPerBlock + kWarp, kBlocksPerMultiprocessor) scan_kernel(const Scan scan) {
  scan.template run<kRows, kColumns>();
}

template <typename A>
__global__ void __launch_bounds__(kThreadsPerBlock, kBlocksPerMultiprocessor) token_sums_kernel(const TokenSums<A> sums) {
  sums.run();
}

namespace detail {

inline const char* say(const char* format, ...) {
  static thread_local char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

// Whether the sizes can be run; and whether there is anything to run.
inline const char* check(const Sizes& size) {
  if (size.Dk > kGreatestSize || size.Dv > kGreatestSize)
    return say("the CUDA kernels take keys and values of up to %lld elements, got Dk = %lld and Dv = %lld",
               (long long)kGreatestSize, (long long)size.Dk, (long long)size.Dv);
  return nullptr;
}

inline const char* check_blocks(int64_t blocks) {
  if (blocks > 0x7fffffff) return say("%lld blocks are more than CUDA launches at once", (long long)blocks);
  return nullptr;
}

template <typename Scan, int kRows, int kColumns>
const char* launch_shape(Scan scan, int states, int stage, int multiprocessors, void* stream) {
  const ScanNeeds needs{{kRows, kColumns}, Scan::Inputs::parts(), sizeof(typename Scan::Number), states, stage};
  scan.plan = choose_plan(scan.size, needs, multiprocessors);
  const size_t bytes = shared_bytes(needs, scan.plan);
  const int64_t blocks = (scan.size.heads + scan.plan.teams - 1) / scan.plan.teams * scan.plan.slabs;
  if (const char* error = check_blocks(blocks)) return error;
  const auto kernel = scan_kernel<Scan, kRows, kColumns>;
  if (const char* error = allow_shared_memory(kernel, bytes)) return error;
  FWP_LAUNCH(kernel, blocks, scan.plan.threads() + kWarp, bytes, stream, scan);
  return last_error();
}

// A scan that keeps nothing in shared memory but tokens.
template <typename Scan>
const char* launch(const Scan& scan, void* stream) {
  using A = typename Scan::Number;
  int multiprocessors = 1;
  if (const char* error = count_multiprocessors(&multiprocessors)) return error;
  const Shape shape = choose_shape<A>(scan.size, multiprocessors);
  if (shape == Shape::tall)
    return launch_shape<Scan, kTall<A>.rows, kTall<A>.columns>(scan, 0, 0, multiprocessors, stream);
  if constexpr (sizeof(A) < 8)
    if (shape == Shape::wide)
      return launch_shape<Scan, kWide.rows, kWide.columns>(scan, 0, 0, multiprocessors, stream);
  return launch_shape<Scan, kNarrow.rows, kNarrow.columns>(scan, 0, 0, multiprocessors, stream);
}

template <typename A, bool kGated>
const char* launch(const DecayBackward<A, kGated>& scan, void* stream) {
  using Scan = DecayBackward<A, kGated>;
  int multiprocessors = 1;
  if (const char* error = count_multiprocessors(&multiprocessors)) return error;
  const int states = scan.rebuilds ? Scan::kStates : 0;
  if (scan.size.rows > kWarp * kNarrow.rows)
    return launch_shape<Scan, kTall<A>.rows, 1>(scan, states, kGroup, multiprocessors, stream);
  return launch_shape<Scan, kNarrow.rows, 1>(scan, states, kGroup, multiprocessors, stream);
}

template <typename A>
const char* launch(const TokenSums<A>& sums, void* stream) {
  constexpr int kTokens = kThreadsPerBlock / kWarp;
  const int64_t blocks = (sums.tokens + kTokens - 1) / kTokens;
  if (blocks == 0) return nullptr;
  if (const char* error = check_blocks(blocks)) return error;
  FWP_LAUNCH(token_sums_kernel<A>, blocks, kThreadsPerBlock, 0, stream, sums);
  return last_error();
}

// What the launchers make their scans of.
template <typename A>
struct Maker {
  using Number = A;
  const Call& call;
  const Sizes& size = call.size;
  static constexpr Type kState = sizeof(A) == 8 ? Type::float64 : Type::float32;

  ScanSize along_keys() const { return {size.B * size.H, size.H, size.L, int(size.Dk), int(size.Dv)}; }
  ScanSize along_values() const { return {size.B * size.H, size.H, size.L, int(size.Dv), int(size.Dk)}; }

  Input input(const Tokens& x) const { return {x.data, x.batch, x.head, x.token, call.type}; }
  Input in_state_type(const Tokens& x) const { return {x.data, x.batch, x.head, x.token, kState}; }
  // A contiguous array of `width` numbers a token, in the state's type.
  Input scratch(const void* x, int64_t width) const {
    return {x, size.H * size.L * width, size.L * width, width, kState};
  }
  Output output(void* x) const { return {x, call.type}; }
  static Output raw(void* x) { return {x, kState}; }

  template <typename T>
  auto matrix(T* x) const {
    using Number = std::conditional_t<std::is_const_v<T>, const A, A>;
    return Matrices<Number>{static_cast<Number*>(x), size.Dk * size.Dv, size.Dv, 1};
  }
  Matrices<const A> transposed(const void* x) const {
    return {static_cast<const A*>(x), size.Dk * size.Dv, 1, size.Dv};
  }
};

// f(Maker) in the type that the call computes in; nothing where there is nothing to do.
template <typename F>
const char* with_maker(const Call& call, F f) {
  if (const char* error = check(call.size)) return error;
  if (call.size.B * call.size.H == 0) return nullptr;
  return call.type == Type::float64 ? f(Maker<double>{call}) : f(Maker<float>{call});
}

// Scratch of the delta rule's gradient: d_write, and the half of d_k where d_k itself is not in the state's type.
inline size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }
inline size_t state_bytes(Type type) { return type == Type::float64 ? 8 : 4; }
inline bool in_state_type(Type type) { return type == Type::float32 || type == Type::float64; }
inline size_t bytes_of_tokens(const Sizes& size, Type type, int64_t width) {
  return aligned(size_t(size.B * size.H * size.L * width) * state_bytes(type));
}

template <bool kGated>
const char* forward_with_decay(const Call& call, Tokens q, Tokens k, Tokens v, Tokens key_decay, Tokens value_decay,
                               Tokens gate, const void* state, void* out, void* new_state, void* kept) {
  return with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    DecayForward<A, kGated> scan{make.along_keys()};
    if constexpr (kGated)
      scan.inputs = {{make.input(k), make.input(q)}, {make.input(v)}, {make.input(gate)}};
    else
      scan.inputs = {{make.input(k), make.input(q), make.input(key_decay)}, {make.input(v), make.input(value_decay)}, {}};
    scan.initial = make.matrix(state);
    scan.last = make.matrix(new_state);
    scan.kept = make.matrix(kept);
    scan.out = make.output(out);
    return launch(scan, call.stream);
  });
}

}  // namespace detail

size_t workspace_bytes(Operator op, const Sizes& size, Type type) {
  using namespace detail;
  if (op == Operator::delta_backward)
    return bytes_of_tokens(size, type, size.Dv) + (in_state_type(type) ? 0 : bytes_of_tokens(size, type, size.Dk));
  if (op == Operator::gated_backward) return bytes_of_tokens(size, type, size.Dk);
  return 0;
}

const char* sum_forward(const Call& call, Tokens q, Tokens k, Tokens v, const void* state, void* out,
                               void* new_state) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    return detail::launch(SumScan<A>{make.along_keys(),
                                     {},
                                     {{make.input(k), make.input(q)}, {make.input(v)}, {}},
                                     false,
                                     make.matrix(state),
                                     make.matrix(new_state),
                                     make.output(out)},
                          call.stream);
  });
}

const char* sum_backward(const Call& call, Tokens q, Tokens k, Tokens v, const void* state, Tokens grad_out,
                                const void* grad_state, void* d_q, void* d_k, void* d_v, void* d_state) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const Input query = make.input(q), key = make.input(k), value = make.input(v), d_out = make.input(grad_out);
    const SumScan<A> queries{make.along_values(), {}, {{value, d_out}, {key}, {}}, false, make.transposed(state), {},
                             make.output(d_q)};
    const SumScan<A> keys{make.along_values(), {}, {{d_out, value}, {query}, {}}, true, make.transposed(grad_state), {},
                          make.output(d_k)};
    const SumScan<A> values{make.along_keys(),       {},
                            {{query, key}, {d_out}, {}}, true,
                            make.matrix(grad_state), make.matrix(d_state),
                            make.output(d_v)};
    const char* error = nullptr;
    for (const SumScan<A>* scan : {&queries, &keys, &values})
      if (!error) error = detail::launch(*scan, call.stream);
    return error;
  });
}

const char* delta_forward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens beta, const void* state,
                                 void* out, void* new_state, void* error) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    return detail::launch(DeltaForward<A>{make.along_keys(),
                                          {},
                                          {{make.input(k), make.input(q)}, {make.input(v)}, {make.input(beta)}},
                                          make.matrix(state),
                                          make.matrix(new_state),
                                          make.output(out),
                                          make.raw(error)},
                          call.stream);
  });
}

const char* delta_backward(const Call& call, Tokens q, Tokens k, Tokens beta, const void* state, Tokens error,
                                  Tokens grad_out, const void* grad_state, void* d_q, void* d_k, void* d_v,
                                  void* d_beta, void* d_state) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const Sizes& size = call.size;
    const Input query = make.input(q), key = make.input(k), rate = make.input(beta), d_out = make.input(grad_out);
    const Input e = make.in_state_type(error);
    char* const scratch = static_cast<char*>(call.workspace);
    void* const d_write = scratch;
    void* const half = detail::in_state_type(call.type) ? d_k
                                                        : scratch + detail::bytes_of_tokens(size, call.type, size.Dv);
    const Input write = make.scratch(d_write, size.Dv), first_half = make.scratch(half, size.Dk);
    const char* text = detail::launch(DeltaBackwardValues<A>{make.along_keys(),
                                                             {},
                                                             {{key, query}, {d_out}, {rate}},
                                                             make.matrix(grad_state),
                                                             make.matrix(d_state),
                                                             make.output(d_v),
                                                             make.raw(d_write)},
                                      call.stream);
    if (!text)
      text = detail::launch(DeltaBackwardQueries<A>{make.along_values(),
                                                    {},
                                                    {{e, write, d_out}, {key}, {rate}},
                                                    make.transposed(state),
                                                    make.output(d_q),
                                                    make.raw(half),
                                                    make.output(d_beta)},
                            call.stream);
    if (!text)
      text = detail::launch(DeltaBackwardKeys<A>{make.along_values(),
                                                 {},
                                                 {{e, write, d_out}, {query, key, first_half}, {rate}},
                                                 make.transposed(grad_state),
                                                 make.output(d_k)},
                            call.stream);
    return text;
  });
}

const char* gated_forward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens gate, const void* state,
                                 void* out, void* new_state, void* kept) {
  return detail::forward_with_decay<true>(call, q, k, v, {}, {}, gate, state, out, new_state, kept);
}

const char* decay_forward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens key_decay, Tokens value_decay,
                                 const void* state, void* out, void* new_state, void* kept) {
  return detail::forward_with_decay<false>(call, q, k, v, key_decay, value_decay, {}, state, out, new_state, kept);
}

const char* gated_backward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens gate, const void* state,
                                  const void* kept, Tokens grad_out, const void* grad_state, void* d_q, void* d_k,
                                  void* d_v, void* d_gate, void* d_state) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const Input query = make.input(q), key = make.input(k), value = make.input(v), d_out = make.input(grad_out);
    const Input g = make.input(gate);
    DecayBackward<A, true> values{make.along_keys()}, keys{make.along_values()};
    values.inputs = {{query, key}, {d_out, value}, {g}};
    values.rebuilds = false;
    values.d_last = make.matrix(grad_state);
    values.d_initial = make.matrix(d_state);
    values.d_w = make.output(d_v);
    keys.inputs = {{d_out, value}, {query, key}, {g}};
    keys.rebuilds = true;
    keys.initial = make.transposed(state);
    keys.kept = make.transposed(kept);
    keys.d_last = make.transposed(grad_state);
    keys.d_x = make.output(d_q);
    keys.d_w = make.output(d_k);
    keys.d_f = make.raw(call.workspace);
    const char* error = detail::launch(values, call.stream);
    if (!error) error = detail::launch(keys, call.stream);
    if (!error) error = detail::launch(TokenSums<A>{static_cast<const A*>(call.workspace),
                                                    call.size.B * call.size.H * call.size.L, int(call.size.Dk),
                                                    make.output(d_gate)},
                                       call.stream);
    return error;
  });
}

const char* decay_backward(const Call& call, Tokens q, Tokens k, Tokens v, Tokens key_decay, Tokens value_decay,
                                  const void* state, const void* kept, Tokens grad_out, const void* grad_state,
                                  void* d_q, void* d_k, void* d_v, void* d_key_decay, void* d_value_decay,
                                  void* d_state) {
  return detail::with_maker(call, [&](auto make) {
    using A = typename decltype(make)::Number;
    const Input of_keys[] = {make.input(q), make.input(k), make.input(key_decay)};
    const Input of_values[] = {make.input(grad_out), make.input(v), make.input(value_decay)};
    DecayBackward<A, false> values{make.along_keys()}, keys{make.along_values()};
    for (int i = 0; i < 3; ++i) {
      values.inputs.rows[i] = keys.inputs.columns[i] = of_keys[i];
      values.inputs.columns[i] = keys.inputs.rows[i] = of_values[i];
    }
    values.rebuilds = keys.rebuilds = true;
    values.initial = make.matrix(state), keys.initial = make.transposed(state);
    values.kept = make.matrix(kept), keys.kept = make.transposed(kept);
    values.d_last = make.matrix(grad_state), keys.d_last = make.transposed(grad_state);
    values.d_initial = make.matrix(d_state);
    values.d_w = make.output(d_v), keys.d_w = make.output(d_k);
    values.d_f = make.output(d_value_decay), keys.d_f = make.output(d_key_decay);
    keys.d_x = make.output(d_q);
    const char* error = detail::launch(values, call.stream);
    return error ? error : detail::launch(keys, call.stream);
  });
}

}  // namespace fwp::cuda
