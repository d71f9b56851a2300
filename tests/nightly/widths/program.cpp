// The CPU kernels of every rule without PyTorch: outputs and states against a loop in double, gradients in double
// against differences of that loop, and gradients in float against those in double.
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "../../../cuda_ext/bindings/cpu/passes.h"

using namespace fwp::cpu;
using fwp::Erases, fwp::Fades, fwp::Lengths, fwp::Rule;
using Numbers = std::vector<double>;
using Named = std::map<std::string, Numbers>;

namespace fwp::cpu {
View empty(const std::array<int64_t, 5>& sizes, int dims, int64_t number_bytes) {
  View x;
  x.number_bytes = number_bytes, x.dims = dims, x.sizes = sizes;
  int64_t count = 1;
  for (int d = dims; d-- > 0; count *= sizes[d]) x.strides[d] = count;
  const std::shared_ptr<char[]> memory(new char[count * number_bytes]);
  std::fill_n(memory.get(), count * number_bytes, char(0xff));  // not a number
  x.data = memory.get(), x.owner = memory;
  return x;
}
}  // namespace fwp::cpu

struct Kind {
  const char* name;
  Rule rule;
  Fades fades = fwp::fades_of(rule);
  bool erases = fwp::erases_of(rule) == Erases::kKey, removes = fwp::erases_of(rule) == Erases::kRemoval;
  bool head_decay = fades == Fades::kHead, value_decay = fades == Fades::kKeyAndValue;
  bool key_decay = fades == Fades::kKey || value_decay, forgets = fades != Fades::kNothing, rate = erases || head_decay;
};
constexpr Kind kKinds[] = {
    {"sum", Rule::sum},
    {"delta", Rule::delta},
    {"gla", Rule::gated},
    {"gla by key", Rule::gated_by_key},
    {"decay", Rule::decay},
    {"gated delta", Rule::gated_delta},
    {"gated delta by key", Rule::gated_delta_by_key},
    {"removal", Rule::removal},
};

struct Field {
  const char* name;
  View TokenViews::*member;
  bool of_keys, of_values;
};
constexpr Field kFields[] = {
    {"q", &TokenViews::q, true, false},
    {"k", &TokenViews::k, true, false},
    {"v", &TokenViews::v, false, true},
    {"head_decay", &TokenViews::head_decay, false, false},
    {"key_decay", &TokenViews::key_decay, true, false},
    {"value_decay", &TokenViews::value_decay, false, true},
    {"rate", &TokenViews::rate, false, false},
    {"removal", &TokenViews::removal, true, false},
    {"removal_key", &TokenViews::removal_key, true, false},
};

std::mt19937 random_bits(0);
Numbers draw(int64_t count, double low, double high) {
  std::uniform_real_distribution<double> one(low, high);
  Numbers x(count);
  for (double& number : x) number = one(random_bits);
  return x;
}

int64_t width_of(const Field& field, const Lengths& n) { return field.of_keys ? n.Dk : field.of_values ? n.Dv : 1; }

Named inputs_of(const Kind& kind, const Lengths& n, bool state) {
  Named x;
  const std::map<std::string, bool> gates = {{"head_decay", kind.head_decay}, {"key_decay", kind.key_decay},
                                             {"value_decay", kind.value_decay}, {"rate", kind.rate},
                                             {"removal", kind.removes}, {"removal_key", kind.removes}};
  for (const Field& field : kFields) {
    const auto gate = gates.find(field.name);
    if (gate != gates.end() && !gate->second) continue;
    const bool positive = gate != gates.end() && field.name[0] != 'r';
    const double size = field.of_keys ? 1 / std::sqrt(double(n.Dk)) : 1;
    x[field.name] = draw(n.B * n.H * n.L * width_of(field, n), positive ? 0.5 : -size, positive ? 1 : size);
  }
  if (state) x["state"] = draw(n.B * n.H * n.Dk * n.Dv, -1, 1);
  return x;
}

// Outputs, then states.
Numbers loop(const Kind& kind, const Lengths& n, const Named& x) {
  Numbers out(n.B * n.H * n.L * n.Dv), states(n.B * n.H * n.Dk * n.Dv);
  if (x.count("state")) states = x.at("state");
  for (int64_t h = 0; h < n.B * n.H; ++h) {
    double* w = states.data() + h * n.Dk * n.Dv;
    for (int64_t t = h * n.L; t < (h + 1) * n.L; ++t) {
      const auto of = [&](const char* name, int64_t width) {
        const auto found = x.find(name);
        return found == x.end() ? Numbers(width, 1) : Numbers(&found->second[t * width], &found->second[t * width] + width);
      };
      const Numbers q = of("q", n.Dk), k = of("k", n.Dk), v = of("v", n.Dv), value_decay = of("value_decay", n.Dv);
      const Numbers key_decay = of("key_decay", n.Dk), removal = of("removal", n.Dk), key = of("removal_key", n.Dk);
      const double head_decay = of("head_decay", 1)[0], rate = of("rate", 1)[0];
      Numbers removed(n.Dv), retrieved(n.Dv);
      for (int64_t i = 0; i < n.Dk; ++i)
        for (int64_t j = 0; j < n.Dv; ++j) {
          double& one = w[i * n.Dv + j];
          if (kind.removes) removed[j] += key[i] * one;
          one *= head_decay * key_decay[i] * value_decay[j];
          if (kind.erases) retrieved[j] += k[i] * one;
        }
      for (int64_t i = 0; i < n.Dk; ++i)
        for (int64_t j = 0; j < n.Dv; ++j) {
          double& one = w[i * n.Dv + j];
          if (kind.removes) one -= removal[i] * removed[j];
          one += k[i] * rate * (v[j] - retrieved[j]);
          out[t * n.Dv + j] += q[i] * one;
        }
    }
  }
  out.insert(out.end(), states.begin(), states.end());
  return out;
}

template <typename Real>
View view_of(const Numbers& x, const std::array<int64_t, 5>& sizes, int dims) {
  const View to = empty(sizes, dims, sizeof(Real));
  std::copy(x.begin(), x.end(), reinterpret_cast<Real*>(to.data));
  return to;
}

template <typename Real>
Numbers numbers_of(const View& x) {
  int64_t count = 1;
  for (int d = 0; d < x.dims; ++d) count *= x.sizes[d];
  const Real* data = reinterpret_cast<const Real*>(x.data);
  return {data, data + count};
}

// "results": outputs, then states. The rest are the gradients of their product with `weights`.
template <typename Real>
Named kernel(const Kind& kind, const Lengths& n, const Named& x, const Numbers& weights) {
  const int64_t number_bytes = sizeof(Real);
  const auto outputs = weights.begin() + n.B * n.H * n.L * n.Dv;
  Forward pass{n, number_bytes, {}, {}, empty(n.values(), number_bytes), empty(n.state(), number_bytes), {}, {}};
  TokenViews to;
  for (const Field& field : kFields) {
    const auto found = x.find(field.name);
    if (found == x.end()) continue;
    const bool rates = !field.of_keys && !field.of_values;
    const std::array<int64_t, 5> sizes = {n.B, n.H, n.L, width_of(field, n), 1};
    pass.in.*field.member = view_of<Real>(found->second, sizes, rates ? 3 : 4);
    to.*field.member = empty(sizes, rates ? 3 : 4, number_bytes);
  }
  const std::array<int64_t, 5> state = {n.B, n.H, n.Dk, n.Dv, 1};
  if (x.count("state")) pass.initial = view_of<Real>(x.at("state"), state, 4);
  if (kind.erases || kind.removes) pass.retrieved = empty(n.values(), number_bytes);
  if (kind.forgets) pass.kept = empty({n.B, n.H, n.L / fwp::kKeptEvery, n.Dk, n.Dv}, 5, number_bytes);
  fwp::with_rule(kind.rule, [&](auto rule) { forward<rule()>(pass); });
  Named found = {{"results", numbers_of<Real>(pass.out)}};
  const Numbers states = numbers_of<Real>(pass.final);
  found["results"].insert(found["results"].end(), states.begin(), states.end());
  const Backward back{n, number_bytes, pass.in, pass.initial, pass.retrieved, pass.kept,
                      view_of<Real>({weights.begin(), outputs}, {n.B, n.H, n.L, n.Dv, 1}, 4),
                      view_of<Real>({outputs, weights.end()}, state, 4), to,
                      pass.initial.defined() ? empty(n.state(), number_bytes) : View()};
  fwp::with_rule(kind.rule, [&](auto rule) { backward<rule()>(back); });
  for (const Field& field : kFields)
    if (x.count(field.name)) found[field.name] = numbers_of<Real>(to.*field.member);
  if (pass.initial.defined()) found["state"] = numbers_of<Real>(back.d_initial);
  return found;
}

double product(const Numbers& x, const Numbers& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

double relative_error(Numbers found, const Numbers& truth) {
  for (size_t i = 0; i < truth.size(); ++i) found[i] -= truth[i];
  return std::sqrt(product(found, found) / std::max(product(truth, truth), 1e-300));
}

int failures = 0;
void require(double error, double limit, const Kind& kind, const Lengths& n, const char* what, const char* name) {
  if (error <= limit) return;
  ++failures;
  std::printf("%s at (%d, %d, %d, %d, %d): %s of %s is %.2g, limit %.2g\n", kind.name, int(n.B), int(n.H), int(n.L),
              int(n.Dk), int(n.Dv), what, name, error, limit);
}

int main() {
  const Lengths sizes[] = {{2, 2, 1, 5, 7},   {1, 2, 33, 17, 35}, {1, 1, 67, 2, 2},  {1, 1, 67, 4, 4}, {1, 1, 67, 8, 8},
                           {1, 1, 67, 16, 16}, {1, 1, 70, 130, 35}, {1, 1, 40, 256, 64},
                           {1, 2, 70, 50, 49}};
  for (const Kind& kind : kKinds)
    for (const Lengths& n : sizes)
      for (const bool state : {false, true}) {
        const Named x = inputs_of(kind, n, state);
        const Numbers truth = loop(kind, n, x), weights = draw(truth.size(), -1, 1);
        const Named exact = kernel<double>(kind, n, x, weights), rounded = kernel<float>(kind, n, x, weights);
        require(relative_error(exact.at("results"), truth), 1e-13, kind, n, "the error in double", "results");
        require(relative_error(rounded.at("results"), truth), 2e-6, kind, n, "the error in float", "results");
        Named after = x, before = x;
        double slope = 0, scale = 0;
        for (const auto& [name, given] : x) {
          const Numbers direction = draw(given.size(), -1, 1), &gradient = exact.at(name);
          for (size_t i = 0; i < given.size(); ++i) {
            after[name][i] += 1e-5 * direction[i], before[name][i] -= 1e-5 * direction[i];
          }
          slope += product(gradient, direction), scale += product(gradient, gradient);
          require(relative_error(rounded.at(name), gradient), 1e-5, kind, n, "the error in float", name.c_str());
        }
        const double difference = product(loop(kind, n, after), weights) - product(loop(kind, n, before), weights);
        require(std::abs(difference / 2e-5 - slope) / std::sqrt(scale), 1e-7, kind, n, "the error in double", "gradients");
      }
  std::printf("vectors of %d bytes: %d failures\n", fwp::kVectorBytes, failures);
  return failures != 0;
}
