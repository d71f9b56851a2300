// The functions of launchers.h on the emulator, for ctypes and for a program that AddressSanitizer watches.

#include <cstdlib>

// A mutation test needs only the rules that it tests, only maps, or only the recurrent delta rule.
#if !defined(EMULATOR_SUM) && !defined(EMULATOR_DELTA) && !defined(EMULATOR_FORGET) && !defined(EMULATOR_MAPS) && \
    !defined(EMULATOR_RECURRENT)
#define EMULATOR_SUM
#define EMULATOR_DELTA
#define EMULATOR_FORGET
#define EMULATOR_MAPS
#define EMULATOR_RECURRENT
#endif

#ifdef EMULATOR_RECURRENT
#include "rules/recurrent_delta.cu"
#endif

#ifdef EMULATOR_FORGET
#include "kernels.cu"
#include "rules/decay.cu"
#include "rules/delta.cu"
#include "rules/gated.cu"
#include "rules/gated_by_key.cu"
#include "rules/gated_delta.cu"
#include "rules/gated_delta_by_key.cu"
#include "rules/removal.cu"
#include "rules/sum.cu"
#elif defined(EMULATOR_MAPS) || defined(EMULATOR_RECURRENT)
#include "launch_map.cuh"

namespace fwp::cuda {

size_t workspace_bytes(const Call&, bool) { return 0; }
const char* forward(const Call&, const Inputs&, const Outputs&) { return "no rule"; }
const char* backward(const Call&, const Inputs&, const BackwardInputs&, const Gradients&) { return "no rule"; }
const char* map_forward(const Projection& given) { return detail::launch_map<false>(given, nullptr); }
const char* map_backward(const Projection& given, void* to) { return detail::launch_map<true>(given, to); }

}  // namespace fwp::cuda
#else
#ifdef EMULATOR_SUM
#include "rules/gated_by_key.cu"
#include "rules/sum.cu"
#else
#include "rules/delta.cu"
#include "rules/gated_delta_by_key.cu"
#endif

namespace fwp::cuda {

#ifdef EMULATOR_SUM
using Only = Passes<Rule::sum>;
#else
using Only = Passes<Rule::delta>;
#endif
size_t workspace_bytes(const Call& call, bool is_backward) { return Only::workspace(call, is_backward); }
const char* forward(const Call& call, const Inputs& in, const Outputs& to) { return Only::forward(call, in, to); }
const char* backward(const Call& call, const Inputs& in, const BackwardInputs& more, const Gradients& to) {
  return Only::backward(call, in, more, to);
}

}  // namespace fwp::cuda
#endif

using namespace fwp;
using namespace fwp::cuda;

// What the emulator pretends to be.
struct Pretended {
  int reversed, multiprocessors, shared_kib;
};

static void pretend(const Pretended& how) {
  emulator::machine().reversed = how.reversed;
  emulator::machine().multiprocessors = how.multiprocessors;
  emulator::machine().shared_bytes = size_t(how.shared_kib) * 1024;
  emulator::machine().error[0] = 0;
}

extern "C" int64_t emulator_launches() { return emulator::machine().launches; }

extern "C" size_t emulator_workspace_bytes(const Pretended* how, const Call* call, bool is_backward) {
  pretend(*how);
  return workspace_bytes(*call, is_backward);
}

extern "C" const char* emulator_forward(const Pretended* how, const Call* call, const Inputs* in, const Outputs* to) {
  pretend(*how);
  return forward(*call, *in, *to);
}

extern "C" const char* emulator_backward(const Pretended* how, const Call* call, const Inputs* in, const BackwardInputs* more,
                                     const Gradients* to) {
  pretend(*how);
  return backward(*call, *in, *more, *to);
}

#ifdef EMULATOR_MAPS
extern "C" const char* emulator_map(const Pretended* how, const Projection* given, void* d_projection) {
  pretend(*how);
  return d_projection ? map_backward(*given, d_projection) : map_forward(*given);
}
#endif

#ifdef EMULATOR_RECURRENT
// pass: RecurrentDeltaForward or RecurrentDeltaBackward, of float or double.
extern "C" const char* emulator_recurrent_delta(const Pretended* how, bool is_double, bool is_backward, const void* pass) {
  pretend(*how);
  const auto run = [&](auto number) {
    using Real = decltype(number);
    return is_backward ? recurrent_delta(*static_cast<const RecurrentDeltaBackward<Real>*>(pass), nullptr)
                       : recurrent_delta(*static_cast<const RecurrentDeltaForward<Real>*>(pass), nullptr);
  };
  return is_double ? run(double()) : run(float());
}
#endif

#ifdef EMULATOR_PROGRAM

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

std::vector<Rule> rules() {
  std::vector<Rule> found;
#ifdef EMULATOR_SUM
  found.push_back(Rule::sum);
#endif
#ifdef EMULATOR_DELTA
  found.push_back(Rule::delta);
#endif
#ifdef EMULATOR_FORGET
  for (int rule = int(Rule::gated); rule <= int(Rule::removal); ++rule) found.push_back(Rule(rule));
#endif
  return found;
}

// Both passes of a rule on arrays of their exact sizes; the second token of each sequence begins a document, or none does.
const char* run(Rule rule, const Sizes& size, Type type, bool documents, const Pretended& how) {
  const Type of_state = type == Type::float64 ? type : Type::float32;
  const int64_t heads = size.B * size.H, tokens = heads * size.L;
  std::vector<Array> arrays;
  arrays.reserve(64);
  const auto make = [&](int64_t count, Type t) -> void* { return arrays.emplace_back(count, t).bytes.data(); };
  const auto view = [&](int64_t width, Type t) {
    return InputArray{make(tokens * width, t), size.H * size.L * width, size.L * width, width, t};
  };
  const auto target = [&](int64_t width, Type t) { return OutputArray{make(tokens * width, t), t}; };
  const auto states = [&](int64_t each) { return make(heads * each * size.Dk * size.Dv, of_state); };
  const Fades fades = fwp::fades_of(rule);
  const bool removes = rule == Rule::removal;
  Inputs in;
  Gradients to;
  in.q = view(size.Dk, type), in.k = view(size.Dk, type), in.v = view(size.Dv, type), in.state = states(1);
  to.q = target(size.Dk, type), to.k = target(size.Dk, type), to.v = target(size.Dv, type), to.state = states(1);
  if (fades == Fades::kHead) in.head_decay = view(1, type), to.head_decay = target(1, type);
  if (fades_by_key(fades)) in.key_decay = view(size.Dk, type), to.key_decay = target(size.Dk, type);
  if (rule == Rule::decay) in.value_decay = view(size.Dv, type), to.value_decay = target(size.Dv, type);
  in.rate = view(1, type);
  if (rule != Rule::sum) to.rate = target(1, type);
  if (removes) {
    in.removal_key = view(size.Dk, type), in.removal = view(size.Dk, of_state);
    to.removal_key = target(size.Dk, of_state), to.removal = target(size.Dk, of_state);
  }
  BackwardInputs more;
  if (fwp::erases_of(rule) != Erases::kNothing) more.retrieved = view(size.Dv, of_state);
  if (fades != Fades::kNothing) more.kept = states(size.L / kKeptEvery);
  if (type == Type::bfloat16)
    more.segments = make(heads * fwp::segments_of(size.H, size.L) * (size.Dk + size.Dv) * size.Dk, of_state);
  more.d_out = view(size.Dv, type), more.d_state = states(1);
  const Outputs out{target(size.Dv, type), states(1), const_cast<void*>(more.retrieved.data),
                    const_cast<void*>(more.kept), const_cast<void*>(more.segments)};
  const std::unique_ptr<bool[]> begins(new bool[size_t(size.B * size.L)]());
  for (int64_t b = 0; b < size.B && size.L > 1; ++b) begins[size_t(b * size.L + 1)] = true;
  Call call{size, type, rule, documents ? begins.get() : nullptr, nullptr, nullptr};
  std::vector<unsigned char> workspace(emulator_workspace_bytes(&how, &call, true));
  call.workspace = workspace.data();
  const char* const error = emulator_forward(&how, &call, &in, &out);
  return error ? error : emulator_backward(&how, &call, &in, &more, &to);
}

#ifdef EMULATOR_MAPS
// Both passes of a map on arrays of their exact sizes, with values, a gate, and queries and keys of two heads.
const char* run(Map map, Norm norm, int width, Type type, const Pretended& how) {
  const bool has_random = map == Map::favor || map == Map::favor_relu;
  const int features = map == Map::dpfp ? 4 * width : map == Map::favor ? width + width % 2 : width;
  const int64_t B = 2, L = 3, columns = 4 * width + 2 * width + 2;
  const Type wide = type == Type::float64 ? type : Type::float32;
  Array x(B * L * columns, type), to(B * L * columns, type), mapped(B * L * 4 * features, type), gates(B * L * 2, wide);
  Array values(B * L * 2 * width, type), random(features * width, wide);
  const auto vectors = [&](Array& of, int64_t heads, int64_t size) {
    return Vectors{of.bytes.data(), L * heads * size, heads * size, 0, size};
  };
  Projection given{B, L, columns, type, x.bytes.data(), L * columns, columns, 2, 1, width, features, map, norm};
  given.epsilon = given.query_factor = given.scale = given.offset = 0.5;
  given.random = has_random ? random.bytes.data() : nullptr;
  given.queries = given.keys = vectors(mapped, 4, features);
  given.keys.data = mapped.bytes.data() + mapped.bytes.size() / size_t(B * L) / 2;
  given.parts = 2;
  given.part[0] = {Activation::none, 1, 2, width, 0, vectors(values, 2, width)};
  given.part[1] = {Activation::sigmoid, 1, 2, 1, 1, vectors(gates, 2, 1)};
  const char* const error = emulator_map(&how, &given, nullptr);
  return error ? error : emulator_map(&how, &given, to.bytes.data());
}

const char* run_maps(Type type, const Pretended& how) {
  for (int map = int(Map::identity); map <= int(Map::favor_relu); ++map)
    for (const Norm norm : {Norm::none, Norm::sum, Norm::length})
      for (const int width : {3, 8, 40})
        if (const char* const error = run(Map(map), norm, width, type, how)) return error;
  return nullptr;
}
#else
const char* run_maps(Type, const Pretended&) { return nullptr; }
#endif

#ifdef EMULATOR_RECURRENT
// Both passes of the recurrent delta rule on arrays of their exact sizes, with documents and padding, of one head.
template <typename Real>
const char* run_recurrent(int64_t L, int64_t d, const Pretended& how) {
  const auto make = [](int64_t count) { return std::vector<Real>(size_t(count), Real(0.5)); };
  std::vector<uint8_t> marks(size_t(L), 0);
  if (L > 2) marks[1] = kIsPadding, marks[size_t(L - 1)] = kBegins;
  const RecurrentSizes n{1, L, 1, d, marks.data()};
  auto weights = make(d * n.gates()), x = make(L * n.gates()), saved = x, d_x = x, z = make(L * d), out = z, d_out = z, d_z = z;
  auto output = make(d), d_output = output, memory = make(d * d), d_memory = memory, kept = make(n.chunks() * d * d);
  const RecurrentDeltaForward<Real> forward{
      n, weights.data(), output.data(), x.data(), z.data(), memory.data(), out.data(), saved.data(), kept.data()};
  const RecurrentDeltaBackward<Real> backward{n,            weights.data(), output.data(), memory.data(), out.data(),
                                              saved.data(), kept.data(),    d_out.data(),  d_x.data(),    d_z.data(),
                                              d_memory.data(), d_output.data()};
  const char* const error = emulator_recurrent_delta(&how, sizeof(Real) == 8, false, &forward);
  return error ? error : emulator_recurrent_delta(&how, sizeof(Real) == 8, true, &backward);
}

const char* run_recurrent(const Pretended& how) {
  for (const int64_t L : {1, 35})
    for (const int64_t d : {3, 16, 20, 33}) {
      if (const char* const error = run_recurrent<float>(L, d, how)) return error;
      if (const char* const error = run_recurrent<double>(L, d, how)) return error;
    }
  return nullptr;
}
#else
const char* run_recurrent(const Pretended&) { return nullptr; }
#endif

// Says an error; returns whether there is one.
bool fails(const char* error) {
  if (error) std::fprintf(stderr, "%s\n", error);
  return error;
}

}  // namespace

// Arguments: B H L Dk Dv, once or more.
int main(int count, char** arguments) {
  for (const Type type : {Type::float32, Type::float64, Type::bfloat16, Type::float16})
    for (const int multiprocessors : {132, 1}) {
      const Pretended how{multiprocessors == 1, multiprocessors, 227};
      if (fails(run_maps(type, how)) || (type == Type::float32 && fails(run_recurrent(how)))) return 1;
      for (int i = 1; i + 4 < count; i += 5) {
        const auto at = [&](int n) { return int64_t(std::atoll(arguments[i + n])); };
        const Sizes size{at(0), at(1), at(2), at(3), at(4)};
        for (const Rule rule : rules())
          if (fails(run(rule, size, type, multiprocessors == 1 && type != Type::bfloat16, how))) return 1;
      }
    }
  return 0;
}

#endif
