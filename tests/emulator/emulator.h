// Runs CUDA kernels on the CPU, to test their logic where there is no GPU: every CUDA thread is a fiber, and a block's
// fibers take turns, each until it has to wait for others. Given to the compiler with -include, before the kernels.
//
// What it finds: results that depend on the order of threads (run in both orders), shared memory that is read before it
// is written (it starts as NaN) or overrun (fences), barriers that not all threads of a block reach, and warp primitives
// that not all the named lanes call, and asynchronous copies that nobody waits for or that are not aligned. It knows neither
// time nor the memory model.
#pragma once

#include <dlfcn.h>
#include <math.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "launchers.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define FWP_DEVICE inline
#define FWP_BOTH inline
#define FWP_UNROLL
#define FWP_UNROLL_BY(n)
#define __global__
#define __launch_bounds__(...)
#define threadIdx emulator::current_thread()
#define blockIdx emulator::current_block()

namespace emulator {

#if defined(__x86_64__)
// A stack that waits: its top, with the registers that a function must preserve. swapcontext does the same, but asks the
// kernel for the signal mask each time, which takes twenty times as long.
struct Context {
  void* top;
};
extern "C" void emulator_switch(Context* from, const Context* to);
asm(R"(
  .text
  .p2align 4
  .type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulator_switch, .-emulator_switch
)");
inline void switch_stack(Context* from, const Context* to) { emulator_switch(from, to); }
inline void prepare(Context* context, char* stack, size_t bytes, void (*start)()) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(15));
  *--top = nullptr;  // `start` must find its stack as after a call
  *--top = reinterpret_cast<void*>(start);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context->top = top;
}
#else
using Context = ucontext_t;
inline void switch_stack(Context* from, const Context* to) { swapcontext(from, to); }
inline void prepare(Context* context, char* stack, size_t bytes, void (*start)()) {
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = bytes;
  context->uc_link = nullptr;
  makecontext(context, start, 0);
}
#endif

constexpr int kWarp = 32, kBarriers = 16;
constexpr size_t kStackBytes = 1 << 17, kFenceBytes = 1 << 14;
// All bits set is NaN in every type of float: what reads unwritten memory, or a fence, makes NaN.
constexpr unsigned char kPoison = 0xff, kFence = 0xff;

struct Index {
  unsigned x;
};

enum class State { ready, at_barrier, at_exchange, done };

// What a warp does together: exchange numbers, multiply matrices, load them, or their transposes.
enum class Primitive { shuffle, mma, load, transpose };

// A lane's part of the matrices of mma.m16n8k16.
struct Fragments {
  uint32_t a[4], b[2];
  float c[4];
};

// 16 bytes on their way to shared memory; zeros where `from` is null.
struct Copy {
  void* to;
  const void* from;
};

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state;
  int barrier;  // that it waits at
  // Of the primitive that it waits for: the lanes that take part, whom it reads from, what it gives, what it gets.
  Primitive primitive;
  unsigned mask;
  int source;
  uint64_t given, got;
  Fragments fragments;
  const uint16_t* row;  // of the matrices to load
  // Copies that it has begun and not waited for, and how many of them each group ends with.
  std::vector<Copy> copies;
  std::vector<size_t> groups;
};

// Returns an error, or null. A kernel has its mangled name, and one argument.
using Launcher = const char* (*)(const char* kernel, int64_t blocks, int threads, size_t shared_bytes,
                                 const void* argument);

// What runs now. One launch at a time.
struct Machine {
  bool reversed = false;            // the order in which threads take their turns
  int multiprocessors = 132;        // that it claims to have, as an H100
  size_t shared_bytes = 227 << 10;  // that it claims to have for a block
  char error[256] = "";             // the first one
  Launcher launcher = nullptr;      // executes kernels instead of the fibers
  int64_t launches = 0;             // so far
  std::vector<Fiber> fibers;
  int arrived[kBarriers] = {};  // threads, at each barrier
  int threads = 0, running = 0;
  unsigned block = 0;
  unsigned char* shared = nullptr;
  std::function<void()> kernel;
  Context scheduler;
  const void* scheduler_stack = nullptr;
  size_t scheduler_bytes = 0;
};

// Hidden: each library in a process has its own, which its linker would otherwise share.
[[gnu::visibility("hidden")]] inline Machine& machine() {
  static Machine m;
  return m;
}

inline Fiber& running_fiber() { return machine().fibers[size_t(machine().running)]; }

inline Index current_thread() { return {unsigned(machine().running)}; }
inline Index current_block() { return {machine().block}; }

template <typename... Arguments>
void fail(const char* format, Arguments... arguments) {
  Machine& m = machine();
  if (m.error[0]) return;
  const int length = std::snprintf(m.error, sizeof m.error, "block %u: ", m.block);
  std::snprintf(m.error + length, sizeof m.error - size_t(length), format, arguments...);
}

inline void check_aligned(const void* x) {
  if (reinterpret_cast<uintptr_t>(x) % 16) fail("thread %d reads or writes 16 bytes at %p", machine().running, x);
}

inline void finish(const Copy& copy) {
  copy.from ? std::memcpy(copy.to, copy.from, 16) : std::memset(copy.to, 0, 16);
}
// In one order of threads a copy arrives at once, in the other only when it is waited for.
inline void begin(const Copy& copy) {
  if (machine().reversed)
    std::memset(copy.to, kPoison, 16);
  else
    finish(copy);
}
inline void finish_copies(size_t newest) {
  Fiber& fiber = running_fiber();
  if (fiber.groups.size() <= newest) return;
  const size_t last = fiber.groups[fiber.groups.size() - 1 - newest];
  if (machine().reversed)
    for (size_t i = 0; i < last; ++i) finish(fiber.copies[i]);
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + long(last));
  fiber.groups.erase(fiber.groups.begin(), fiber.groups.end() - long(newest));
  for (size_t& end : fiber.groups) end -= last;
}

// AddressSanitizer has to know which stack is in use.
inline void before_switch([[maybe_unused]] void** saved, [[maybe_unused]] const void* stack,
                          [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(saved, stack, bytes);
#endif
}
inline void after_switch([[maybe_unused]] void* saved, [[maybe_unused]] const void** from,
                         [[maybe_unused]] size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(saved, from, bytes);
#endif
}

// The running fiber waits until the scheduler calls it ready; where it is done, for ever.
inline void wait(State state) {
  Machine& m = machine();
  Fiber& fiber = m.fibers[size_t(m.running)];
  fiber.state = state;
  void* saved = nullptr;
  before_switch(state == State::done ? nullptr : &saved, m.scheduler_stack, m.scheduler_bytes);
  switch_stack(&fiber.context, &m.scheduler);
  after_switch(saved, nullptr, nullptr);
}

inline void start_fiber() {
  Machine& m = machine();
  after_switch(nullptr, &m.scheduler_stack, &m.scheduler_bytes);
  m.kernel();
  if (!running_fiber().copies.empty()) fail("thread %d has ended before its copies", m.running);
  wait(State::done);
}

inline void resume(int thread) {
  Machine& m = machine();
  Fiber& fiber = m.fibers[size_t(thread)];
  m.running = thread;
  void* saved = nullptr;
  before_switch(&saved, fiber.stack.get(), kStackBytes);
  switch_stack(&m.scheduler, &fiber.context);
  after_switch(saved, nullptr, nullptr);
}

inline float bfloat16_at(uint32_t pair, int which) {
  const uint32_t bits = (which ? pair >> 16 : pair & 0xffff) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Half of the time of all tests of chunks: several columns at once, with the vectors of the processor.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("O3")
#endif
// c += a b, where a is a row and c is one, as tensor cores add up: the terms of a sum are cut off below 2^-24 of the greatest,
// and the sum to 24 bits.
inline void multiply(const double (&a)[16], const double (&b)[16][8], double (&c)[8]) {
  double terms[17][8], greatest[8] = {}, scale[8], sums[8] = {};
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < 8; ++n) terms[k][n] = a[k] * b[k][n];
  for (int n = 0; n < 8; ++n) terms[16][n] = c[n];
  for (int k = 0; k < 17; ++k)
    for (int n = 0; n < 8; ++n) greatest[n] = greatest[n] < fabs(terms[k][n]) ? fabs(terms[k][n]) : greatest[n];
  for (int n = 0; n < 8; ++n) {
    uint64_t bits;
    std::memcpy(&bits, &greatest[n], sizeof bits);
    bits = (2070 - (bits >> 52)) << 52;  // a power of two: greatest * scale is from 2^24 to 2^25
    std::memcpy(&scale[n], &bits, sizeof bits);
    if (greatest[n] == 0) scale[n] = 1;
    if (greatest[n] == INFINITY) scale[n] = NAN;  // as the sum, if a term is not finite
  }
  for (int k = 0; k < 17; ++k)
    for (int n = 0; n < 8; ++n) sums[n] += trunc(terms[k][n] * scale[n]);
  for (int n = 0; n < 8; ++n) {
    uint64_t bits;
    std::memcpy(&bits, &sums[n], sizeof bits);
    bits &= ~uint64_t(0) << 29;  // 24 of 53
    std::memcpy(&c[n], &bits, sizeof bits);
    c[n] /= scale[n];
  }
}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

// Lane 4 g + p holds of a the rows g and g + 8 and the columns 2 p, 2 p + 1 and 8 more; of b the transpose of such a half;
// of c the rows g and g + 8 and the columns 2 p and 2 p + 1.
inline void multiply(Fiber* lanes) {
  double a[16][16], b[16][8], c[16][8];
  const auto for_results = [&](auto f) {
    for (int lane = 0; lane < kWarp; ++lane)
      for (int i = 0; i < 4; ++i) f(c[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2], lanes[lane].fragments.c[i]);
  };
  for (int lane = 0; lane < kWarp; ++lane)
    for (int i = 0; i < 2; ++i) {
      const int g = lane / 4, p = 2 * (lane % 4) + i;
      const Fragments& f = lanes[lane].fragments;
      a[g][p] = bfloat16_at(f.a[0], i), a[g + 8][p] = bfloat16_at(f.a[1], i);
      a[g][p + 8] = bfloat16_at(f.a[2], i), a[g + 8][p + 8] = bfloat16_at(f.a[3], i);
      b[p][g] = bfloat16_at(f.b[0], i), b[p + 8][g] = bfloat16_at(f.b[1], i);
    }
  for_results([](double& x, float& own) { x = own; });
  for (int row = 0; row < 16; ++row) multiply(a[row], b, c[row]);
  for_results([](double& x, float& own) { own = float(x); });
}

// Into a of each lane: of matrix m, whose rows the lanes from 8 m on name, two numbers side by side, or one above the other.
inline void load(Fiber* lanes, bool transposed) {
  for (int lane = 0; lane < kWarp; ++lane)
    for (int m = 0; m < 4; ++m) {
      const int g = lane / 4, p = 2 * (lane % 4);
      const auto at = [&](int i) { return uint32_t(transposed ? lanes[8 * m + p + i].row[g] : lanes[8 * m + g].row[p + i]); };
      lanes[lane].fragments.a[m] = at(0) | at(1) << 16;
    }
}

// The running fiber, about to do something with all of its warp.
inline Fiber& whole_warp(Primitive primitive) {
  Fiber& fiber = running_fiber();
  fiber.primitive = primitive;
  fiber.mask = 0xffffffffu;
  fiber.source = 0;
  return fiber;
}

// Whether the lanes of a warp, none of which can run, have all come to one primitive; they can run again then.
inline bool exchange(int first, int count) {
  Machine& m = machine();
  Fiber* lanes = &m.fibers[size_t(first)];
  int waiting = -1;
  for (int i = 0; i < count; ++i)
    if (lanes[i].state == State::at_exchange) waiting = i;
  if (waiting < 0) return false;
  const unsigned mask = lanes[waiting].mask;
  for (int i = 0; i < kWarp; ++i) {
    if (!(mask >> i & 1)) continue;
    if (i >= count || lanes[i].state != State::at_exchange || lanes[i].mask != mask ||
        lanes[i].primitive != lanes[waiting].primitive) {
      fail("thread %d waits in a warp primitive for lanes %08x, but lane %d does not take part", first + waiting, mask,
           i);
      return false;
    }
    if (!(mask >> lanes[i].source & 1)) {
      fail("thread %d reads from lane %d, which does not take part", first + i, lanes[i].source);
      return false;
    }
  }
  const Primitive primitive = lanes[waiting].primitive;
  if (primitive == Primitive::mma) multiply(lanes);
  if (primitive == Primitive::load || primitive == Primitive::transpose) load(lanes, primitive == Primitive::transpose);
  for (int i = 0; i < count; ++i)
    if (mask >> i & 1) {
      lanes[i].got = lanes[lanes[i].source].given;
      lanes[i].state = State::ready;
    }
  return true;
}

inline bool run_warp(int first, int count) {
  Machine& m = machine();
  bool ran = false;
  for (int i = 0; i < count && !m.error[0]; ++i) {
    const int thread = m.reversed ? first + count - 1 - i : first + i;
    if (m.fibers[size_t(thread)].state != State::ready) continue;
    resume(thread);
    ran = true;
  }
  return ran;
}

// The running thread is at a barrier. The last one opens it.
inline void arrive(int id, int threads) {
  Machine& m = machine();
  if (id < 0 || id >= kBarriers || (id > 0 && threads % kWarp) || threads > m.threads)
    return fail("barrier %d for %d threads", id, threads);
  if (++m.arrived[id] < threads) return;
  m.arrived[id] = 0;
  for (int t = 0; t < m.threads; ++t) {
    Fiber& fiber = m.fibers[size_t(t)];
    if (fiber.state == State::at_barrier && fiber.barrier == id) fiber.state = State::ready;
  }
}
inline void wait_at(int id, int threads) {
  Fiber& fiber = running_fiber();
  fiber.state = State::at_barrier, fiber.barrier = id;
  arrive(id, threads);
  wait(fiber.state);
}

// Each warp goes as far as it can before the next one moves: as far apart as barriers allow.
inline void run_block() {
  Machine& m = machine();
  for (int t = 0; t < m.threads; ++t) {
    Fiber& fiber = m.fibers[size_t(t)];
    prepare(&fiber.context, fiber.stack.get(), kStackBytes, start_fiber);
    fiber.state = State::ready;
    fiber.copies.clear(), fiber.groups.clear();
  }
  std::fill(std::begin(m.arrived), std::end(m.arrived), 0);
  const int warps = (m.threads + kWarp - 1) / kWarp;
  while (true) {
    for (int w = 0; w < warps; ++w) {
      const int first = (m.reversed ? warps - 1 - w : w) * kWarp;
      const int count = first + kWarp <= m.threads ? kWarp : m.threads - first;
      while (run_warp(first, count) || (!m.error[0] && exchange(first, count))) {
      }
      if (m.error[0]) return;
    }
    int done = 0, ready = 0, barrier = 0;
    for (int t = 0; t < m.threads; ++t) {
      const Fiber& fiber = m.fibers[size_t(t)];
      done += fiber.state == State::done, ready += fiber.state == State::ready;
      if (fiber.state == State::at_barrier) barrier = fiber.barrier;
    }
    if (done == m.threads) break;
    if (!ready) return fail("threads wait for ever at barrier %d; %d of %d have ended", barrier, done, m.threads);
  }
  for (int id = 0; id < kBarriers; ++id)
    if (m.arrived[id] > 0) fail("%d threads have arrived at barrier %d, where nobody waits", m.arrived[id], id);
}

inline bool is_fence(const unsigned char* bytes) {
  return bytes[0] == kFence && std::memcmp(bytes, bytes + 1, kFenceBytes - 1) == 0;
}

// AddressSanitizer takes both fences of shared memory for forbidden ground: they lie in an allocation that it knows.
inline void forbid(const unsigned char* fence, bool forbidden) {
#if defined(__SANITIZE_ADDRESS__)
  forbidden ? __asan_poison_memory_region(fence, kFenceBytes) : __asan_unpoison_memory_region(fence, kFenceBytes);
#else
  (void)fence, (void)forbidden;
#endif
}

inline void launch(int64_t blocks, int threads, size_t shared_bytes, std::function<void()> kernel) {
  Machine& m = machine();
  m.threads = threads;
  m.kernel = std::move(kernel);
  if (m.fibers.size() < size_t(threads)) m.fibers = std::vector<Fiber>(size_t(threads));
  const std::unique_ptr<unsigned char[]> memory(new unsigned char[shared_bytes + 2 * kFenceBytes]);
  m.shared = memory.get() + kFenceBytes;
  std::memset(memory.get(), kFence, shared_bytes + 2 * kFenceBytes);
  const unsigned char* const fences[] = {memory.get(), m.shared + shared_bytes};
  for (int64_t b = 0; b < blocks && !m.error[0]; ++b) {
    m.block = unsigned(m.reversed ? blocks - 1 - b : b);
    std::memset(m.shared, kPoison, shared_bytes);
    for (const unsigned char* fence : fences) forbid(fence, true);
    run_block();
    for (const unsigned char* fence : fences) forbid(fence, false);
    if (!is_fence(fences[0]) || !is_fence(fences[1])) fail("writes beyond its shared memory");
  }
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait_at(0, emulator::machine().threads); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int distance) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  emulator::Fiber& fiber = emulator::running_fiber();
  fiber.primitive = emulator::Primitive::shuffle;
  fiber.mask = mask;
  fiber.source = (emulator::machine().running % emulator::kWarp) ^ distance;
  std::memcpy(&fiber.given, &x, sizeof(T));
  emulator::wait(emulator::State::at_exchange);
  std::memcpy(&x, &fiber.got, sizeof(T));
  return x;
}

inline void __syncwarp() { __shfl_xor_sync(0xffffffffu, 0, 0); }

namespace fwp::cuda {

inline unsigned char* shared_memory() { return emulator::machine().shared; }
template <typename T>
T* in_global_memory(T* x) {
  return x;
}

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of_half_bits(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? ldexpf(float(1024 + fraction), exponent - 25)
                                    : ldexpf(float(fraction), -24);
  return bits >> 15 ? -size : size;
}
// To the nearest, ties to even, as nearbyintf rounds.
inline uint16_t half_bits_of_float(float x) {
  const uint16_t sign = uint16_t(bits_of_float(x) >> 16 & 0x8000);
  const float size = fabsf(x);
  if (size != size) return sign | 0x7e00;
  if (size >= 65520.f) return sign | 0x7c00;
  int exponent;
  frexpf(size, &exponent);                       // size < 2^exponent
  const int unit = (exponent < -13 ? -13 : exponent) - 11;  // of the last place
  const int steps = int(nearbyintf(ldexpf(size, -unit)));
  return uint16_t(sign | (steps < 1024 ? steps : ((unit + 24) << 10) + steps));
}

// To the nearest, ties to even. NaN stays NaN.
inline uint32_t bfloat16_bits(float x) {
  const uint32_t bits = bits_of_float(x);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}
inline uint32_t pair_of(float x, float y) { return bfloat16_bits(x) | bfloat16_bits(y) << 16; }

inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::Fiber& fiber = emulator::whole_warp(emulator::Primitive::mma);
  fiber.fragments = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  emulator::wait(emulator::State::at_exchange);
  std::memcpy(c, fiber.fragments.c, sizeof c);
}

inline void load_matrices(const void* row, uint32_t (&x)[4], bool transposed = false) {
  emulator::check_aligned(row);
  emulator::Fiber& fiber = emulator::whole_warp(transposed ? emulator::Primitive::transpose : emulator::Primitive::load);
  fiber.row = static_cast<const uint16_t*>(row);
  emulator::wait(emulator::State::at_exchange);
  std::memcpy(x, fiber.fragments.a, sizeof x);
}
inline void load_matrices_transposed(const void* row, uint32_t (&x)[4]) { load_matrices(row, x, true); }

inline void copy_later(void* to, const void* from, bool wanted) {
  emulator::check_aligned(to);
  if (wanted) emulator::check_aligned(from);
  emulator::running_fiber().copies.push_back({to, wanted ? from : nullptr});
  emulator::begin(emulator::running_fiber().copies.back());
}
inline void wait_at_barrier(int id, int threads) { emulator::wait_at(id, threads); }
inline void arrive_at_barrier(int id, int threads) { emulator::arrive(id, threads); }
inline void commit_copies() {
  emulator::Fiber& fiber = emulator::running_fiber();
  fiber.groups.push_back(fiber.copies.size());
}
template <int newest>
void wait_copies() {
  emulator::finish_copies(newest);
}

inline const char* failure() { return emulator::machine().error[0] ? emulator::machine().error : nullptr; }

inline const char* query(Gpu* gpu) {
  *gpu = {emulator::machine().multiprocessors, emulator::machine().shared_bytes};
  return failure();
}

template <typename Argument>
const char* launch_kernel(void (*kernel)(Argument), const Gpu&, int64_t blocks, int threads, size_t shared_bytes, void*,
                          Argument argument) {
  emulator::Machine& machine = emulator::machine();
  ++machine.launches;
  Dl_info symbol;
  if (blocks == 0)
    emulator::fail("is launched without a block");
  else if (shared_bytes > machine.shared_bytes)
    emulator::fail("asks for %zu bytes of shared memory", shared_bytes);
  else if (machine.launcher && dladdr(reinterpret_cast<void*>(kernel), &symbol))
    return machine.launcher(symbol.dli_sname, blocks, threads, shared_bytes, &argument);
  else
    emulator::launch(blocks, threads, shared_bytes, [&] { kernel(argument); });
  return failure();
}

}  // namespace fwp::cuda
