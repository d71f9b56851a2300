// The functions of launchers.h on the twin, for ctypes and for a program that AddressSanitizer watches.

#include <cstdlib>

// A mutation test needs only the rules that it tests.
#if !defined(TWIN_SUM) && !defined(TWIN_DELTA) && !defined(TWIN_DECAY)
#define TWIN_SUM
#define TWIN_DELTA
#define TWIN_DECAY
#endif

#ifdef TWIN_SUM
#include "launch_sum.cuh"
#endif
#ifdef TWIN_DELTA
#include "launch_delta.cuh"
#endif
#ifdef TWIN_DECAY
#include "launch_decay.cuh"
#endif

using fwp::cuda::Call;
using fwp::cuda::Operator;
using fwp::cuda::Sizes;
using fwp::cuda::Tokens;
using fwp::cuda::Type;

extern "C" size_t twin_workspace_bytes(int op, const Sizes* size, int type) {
  return fwp::cuda::workspace_bytes(Operator(op), *size, Type(type));
}

// `in` holds the Tokens and `a` the arrays of an operator, in the order of its arguments.
extern "C" const char* twin_run(int op, const Sizes* size, int type, void* workspace, const Tokens* in, void* const* a,
                                int reversed, int multiprocessors, int shared_kib) {
  using namespace fwp::cuda;
  twin::machine().reversed = reversed;
  twin::machine().multiprocessors = multiprocessors;
  twin::machine().shared_bytes = size_t(shared_kib) * 1024;
  twin::machine().error[0] = 0;
  const Call call{*size, Type(type), workspace, nullptr};
  switch (Operator(op)) {
#ifdef TWIN_SUM
    case Operator::sum_forward:
      return sum_forward(call, in[0], in[1], in[2], a[0], a[1], a[2]);
    case Operator::sum_backward:
      return sum_backward(call, in[0], in[1], in[2], a[0], in[3], a[1], a[2], a[3], a[4], a[5]);
#endif
#ifdef TWIN_DELTA
    case Operator::delta_forward:
      return delta_forward(call, in[0], in[1], in[2], in[3], a[0], a[1], a[2], a[3]);
    case Operator::delta_backward:
      return delta_backward(call, in[0], in[1], in[2], a[0], in[3], in[4], a[1], a[2], a[3], a[4], a[5], a[6]);
#endif
#ifdef TWIN_DECAY
    case Operator::gated_forward:
      return gated_forward(call, in[0], in[1], in[2], in[3], a[0], a[1], a[2], a[3]);
    case Operator::gated_backward:
      return gated_backward(call, in[0], in[1], in[2], in[3], a[0], a[1], in[4], a[2], a[3], a[4], a[5], a[6], a[7]);
    case Operator::decay_forward:
      return decay_forward(call, in[0], in[1], in[2], in[3], in[4], a[0], a[1], a[2], a[3]);
    case Operator::decay_backward:
      return decay_backward(call, in[0], in[1], in[2], in[3], in[4], a[0], a[1], in[5], a[2], a[3], a[4], a[5], a[6],
                            a[7], a[8]);
#endif
    default:
      return "this operator is not part of the build";
  }
}

#ifdef TWIN_PROGRAM

namespace {

// Memory that ends where the array does, so that AddressSanitizer sees each step beyond it. Numbers are about a half.
struct Array {
  std::vector<unsigned char> bytes;

  Array(int64_t count, Type type) {
    const size_t size = type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2;
    bytes.resize(size_t(count) * size);
    bytes.shrink_to_fit();
    const uint64_t half = type == Type::float64    ? 0x3fe0000000000000
                          : type == Type::float32  ? 0x3f000000
                          : type == Type::bfloat16 ? 0x3f00
                                                   : 0x3800;
    for (size_t i = 0; i < bytes.size(); i += size) std::memcpy(&bytes[i], &half, size);
  }
};

std::vector<int> operators() {
  std::vector<int> found;
  const auto add = [&](Operator forward, Operator backward) {
    found.push_back(int(forward));
    found.push_back(int(backward));
  };
#ifdef TWIN_SUM
  add(Operator::sum_forward, Operator::sum_backward);
#endif
#ifdef TWIN_DELTA
  add(Operator::delta_forward, Operator::delta_backward);
#endif
#ifdef TWIN_DECAY
  add(Operator::gated_forward, Operator::gated_backward);
  add(Operator::decay_forward, Operator::decay_backward);
#endif
  return found;
}

// All operators on arrays of their exact sizes.
const char* run_all(const Sizes& size, Type type, int reversed, int multiprocessors) {
  const Type of_state = type == Type::float64 ? type : Type::float32;
  const int64_t heads = size.B * size.H, tokens = heads * size.L;
  const auto view = [&](const Array& x, int64_t width) {
    return Tokens{x.bytes.data(), size.H * size.L * width, size.L * width, width};
  };
  for (const int op : operators()) {
    std::vector<Array> arrays;
    arrays.reserve(32);
    const auto make = [&](int64_t count, Type t) -> Array& { return arrays.emplace_back(count, t); };
    const auto keys = [&] { return view(make(tokens * size.Dk, type), size.Dk); };
    const auto values = [&] { return view(make(tokens * size.Dv, type), size.Dv); };
    const auto rates = [&] { return view(make(tokens, type), 1); };
    const auto states = [&](int64_t each, Type t) -> void* {
      return make(heads * each * size.Dk * size.Dv, t).bytes.data();
    };
    const auto state = [&] { return states(1, of_state); };
    const auto kept = [&] { return states(size.L / fwp::cuda::kChunk, of_state); };
    const auto out = [&](int64_t width, Type t) -> void* { return make(tokens * width, t).bytes.data(); };
    const auto d_key = [&] { return out(size.Dk, type); };
    const auto d_value = [&] { return out(size.Dv, type); };
    const auto d_rate = [&] { return out(1, type); };
    std::vector<Tokens> in;
    std::vector<void*> a;
    switch (Operator(op)) {
      case Operator::sum_forward:
        in = {keys(), keys(), values()}, a = {state(), d_value(), state()};
        break;
      case Operator::sum_backward:
        in = {keys(), keys(), values(), values()}, a = {state(), state(), d_key(), d_key(), d_value(), state()};
        break;
      case Operator::delta_forward:
        in = {keys(), keys(), values(), rates()}, a = {state(), d_value(), state(), out(size.Dv, of_state)};
        break;
      case Operator::delta_backward:
        in = {keys(), keys(), rates(), view(make(tokens * size.Dv, of_state), size.Dv), values()};
        a = {state(), state(), d_key(), d_key(), d_value(), d_rate(), state()};
        break;
      case Operator::gated_forward:
        in = {keys(), keys(), values(), rates()}, a = {state(), d_value(), state(), kept()};
        break;
      case Operator::gated_backward:
        in = {keys(), keys(), values(), rates(), values()};
        a = {state(), kept(), state(), d_key(), d_key(), d_value(), d_rate(), state()};
        break;
      case Operator::decay_forward:
        in = {keys(), keys(), values(), keys(), values()}, a = {state(), d_value(), state(), kept()};
        break;
      case Operator::decay_backward:
        in = {keys(), keys(), values(), keys(), values(), values()};
        a = {state(), kept(), state(), d_key(), d_key(), d_value(), d_key(), d_value(), state()};
        break;
    }
    std::vector<unsigned char> workspace(fwp::cuda::workspace_bytes(Operator(op), size, type));
    const char* error =
        twin_run(op, &size, int(type), workspace.data(), in.data(), a.data(), reversed, multiprocessors, 163);
    if (error) return error;
  }
  return nullptr;
}

}  // namespace

// Arguments: B H L Dk Dv, once or more.
int main(int count, char** arguments) {
  for (int i = 1; i + 4 < count; i += 5) {
    const auto at = [&](int n) { return int64_t(std::atoll(arguments[i + n])); };
    const Sizes size{at(0), at(1), at(2), at(3), at(4)};
    for (const Type type : {Type::float32, Type::float64, Type::bfloat16, Type::float16})
      for (const int multiprocessors : {132, 1})
        if (const char* error = run_all(size, type, multiprocessors == 1, multiprocessors)) {
          std::fprintf(stderr, "%s\n", error);
          return 1;
        }
  }
  return 0;
}

#endif
