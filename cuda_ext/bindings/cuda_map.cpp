// Maps, normalisation and gates around a rule, on CUDA tensors: the kernels of ../cuda/projection.h and their autograd.
//
// A projection (B, L, W) becomes queries (B, L, 1, H, Dk), keys (B, L, steps, H, Dk) and other parts (B, L, steps, heads,
// width). Those are gates, or views of the projection. One kernel makes all, and one their gradient.

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "../cuda/projection.h"
#include "arguments.h"
#include "cuda_tensors.h"

namespace fwp::cuda {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr size_t kSizes = 4, kNumbers = 4, kSizesOfPart = 4;

Map map_of(const std::string& name) {
  const char* const names[] = {"identity", "elu", "silu", "tanh", "dpfp", "favor", "favor_relu"};
  for (int n = 0; n < 7; ++n)
    if (name == names[n]) return Map(n);
  TORCH_CHECK(false, "map must be one of the kernels', got ", name);
}

Norm norm_of(const std::string& name) {
  TORCH_CHECK(name == "none" || name == "sum" || name == "length", "norm must be none, sum or length, got ", name);
  return name == "none" ? Norm::none : name == "sum" ? Norm::sum : Norm::length;
}

// What a projection becomes. sizes: heads, steps, width and features of queries and keys, then the number of the activation,
// steps, heads and width of each other part. numbers: epsilon, the factor of queries, scale and offset of FAVOR+, then the
// factor of each other part.
struct Layout {
  std::string map, norm;
  bool adds;
  std::vector<int64_t> sizes;
  std::vector<double> numbers;

  size_t parts() const { return numbers.size() - kNumbers; }
  int64_t mapped() const { return (1 + sizes[1]) * sizes[0] * sizes[2]; }
  at::IntArrayRef part(size_t n) const { return at::IntArrayRef(sizes).slice(kSizes + kSizesOfPart * n + 1, kSizesOfPart - 1); }
  Activation activation(size_t n) const { return Activation(sizes[kSizes + kSizesOfPart * n]); }
  at::ScalarType type(size_t n, const Tensor& x) const {
    return activation(n) == Activation::sigmoid ? state_type(x) : x.scalar_type();
  }

  // The shapes of queries, keys and parts, with (B, L).
  std::vector<std::vector<int64_t>> shapes(const Tensor& x) const {
    const int64_t B = x.size(0), L = x.size(1);
    std::vector<std::vector<int64_t>> found{{B, L, 1, sizes[0], sizes[3]}, {B, L, sizes[1], sizes[0], sizes[3]}};
    for (size_t n = 0; n < parts(); ++n) found.push_back({B, L, part(n)[0], part(n)[1], part(n)[2]});
    return found;
  }

  // Raise an error where kernels would read outside of a tensor.
  void check_all(const Tensor& x, const Optional& random) const {
    TORCH_CHECK(sizes.size() >= kSizes && numbers.size() >= kNumbers && parts() <= size_t(kMostParts) &&
                    sizes.size() == kSizes + kSizesOfPart * parts(),
                "sizes must be 4 and 4 for each part, numbers 4 and 1 for each part, got ", sizes.size(), " and ",
                numbers.size());
    for (size_t n = 0; n < sizes.size(); ++n) {
      const bool is_activation = n >= kSizes && (n - kSizes) % kSizesOfPart == 0;
      const int64_t size = sizes[n];
      TORCH_CHECK(is_activation ? 0 <= size && size <= 2 : size >= 1, "sizes must be positive, got ", sizes);
    }
    const int64_t width = sizes[2], features = sizes[3];
    int64_t columns = mapped();
    for (size_t n = 0; n < parts(); ++n) columns += part(n)[0] * part(n)[1] * part(n)[2];
    TORCH_CHECK(x.dim() == 3 && x.size(2) == columns, "projected must have shape (B, L, ", columns, "), got ", x.sizes());
    const auto type = x.scalar_type();
    TORCH_CHECK(type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf,
                "projected must be float32, float64, bfloat16 or float16, got ", type);
    const Map kind = map_of(map);
    norm_of(norm);
    const bool is_dpfp = kind == Map::dpfp, is_random = kind == Map::favor || kind == Map::favor_relu;
    TORCH_CHECK(random.has_value() == is_random, "random must be given for FAVOR+ only");
    const bool fits = is_dpfp ? features % (2 * width) == 0 && features < 4 * width * width : is_random || features == width;
    TORCH_CHECK(fits, "features must fit the map and ", width, " numbers, got ", features);
    if (!random) return;
    TORCH_CHECK(kind == Map::favor_relu || features % 2 == 0, "features must be even, got ", features);
    check("random", random, {kind == Map::favor ? features / 2 : features, width}, state_type(x), x.device());
    TORCH_CHECK(random->numel() <= kMostRandomNumbers, "random must have at most ", kMostRandomNumbers, " numbers, got ",
                random->numel());
  }
};

Vectors vectors(const Tensor& x) {
  if (!x.defined()) return {};
  return {x.mutable_data_ptr(), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

// Call f, which returns null or an error message, with the projection, queries, keys and parts, or their gradients.
template <typename F>
void launch(const Tensor& x, const Optional& random, const Layout& layout, const variable_list& of, F f) {
  const c10::DeviceGuard guard(x.device());
  const auto& sizes = layout.sizes;
  const auto& numbers = layout.numbers;
  const Tensor matrix = random ? random->contiguous() : Tensor();
  Projection given{x.size(0), x.size(1), x.size(2), type_of(x.scalar_type()), x.const_data_ptr(), x.stride(0), x.stride(1)};
  given.heads = int(sizes[0]), given.steps = int(sizes[1]), given.width = int(sizes[2]), given.features = int(sizes[3]);
  given.map = map_of(layout.map), given.norm = norm_of(layout.norm), given.adds = layout.adds;
  given.epsilon = numbers[0], given.query_factor = numbers[1], given.scale = numbers[2], given.offset = numbers[3];
  given.random = matrix.defined() ? matrix.const_data_ptr() : nullptr;
  given.queries = vectors(of[0]), given.keys = vectors(of[1]);
  given.parts = int(layout.parts());
  for (size_t n = 0; n < layout.parts(); ++n) {
    const at::IntArrayRef part = layout.part(n);
    const int steps = int(part[0]), heads = int(part[1]), width = int(part[2]);
    given.part[n] = {layout.activation(n), steps, heads, width, numbers[kNumbers + n], vectors(of[2 + n])};
  }
  given.stream = c10::cuda::getCurrentCUDAStream(x.device().index()).stream();
  const char* const failure = f(given);
  TORCH_CHECK(failure == nullptr, failure);
}

Tensor with_dense_rows(const Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

variable_list make(const Tensor& projected, const Optional& random, const Layout& layout) {
  layout.check_all(projected, random);
  const Tensor x = with_dense_rows(projected);
  const auto shapes = layout.shapes(x);
  const int64_t heads = layout.sizes[0], steps = layout.sizes[1];
  // Queries and keys of a token are neighbors in memory.
  const Tensor mapped = at::empty({x.size(0), x.size(1), 1 + steps, heads, layout.sizes[3]}, x.options());
  variable_list found{mapped.narrow(2, 0, 1), mapped.narrow(2, 1, steps)};
  int64_t column = layout.mapped();
  for (size_t n = 0; n < layout.parts(); ++n) {
    const at::IntArrayRef part = layout.part(n);
    const int64_t count = part[0] * part[1] * part[2];
    const bool is_view = layout.activation(n) == Activation::none;
    found.push_back(is_view ? x.narrow(2, column, count).unflatten(2, part)
                            : at::empty(shapes[2 + n], x.options().dtype(layout.type(n, x))));
    column += count;
  }
  launch(x, random, layout, found, [](const Projection& given) { return map_forward(given); });
  return found;
}

Tensor make_gradient(const Tensor& projected, const Optional& random, const Layout& layout, const variable_list& gradients) {
  layout.check_all(projected, random);
  const Tensor x = with_dense_rows(projected);
  const auto shapes = layout.shapes(x);
  TORCH_CHECK(gradients.size() == shapes.size(), "gradients must be ", shapes.size(), ", got ", gradients.size());
  variable_list dense;
  for (size_t n = 0; n < shapes.size(); ++n) {
    const Tensor& d = gradients[n];
    const auto type = n < 2 ? x.scalar_type() : layout.type(n - 2, x);
    if (d.defined()) check("a gradient", d, shapes[n], type, x.device());
    dense.push_back(d.defined() ? with_dense_rows(d) : d);
  }
  const Tensor d_x = at::empty(x.sizes(), x.options());
  launch(x, random, layout, dense, [&](const Projection& given) { return map_backward(given, d_x.mutable_data_ptr()); });
  return d_x;
}

// The gradient under create_graph=True: to differentiate it is an error, because silence would be a wrong derivative.
struct Gradient : torch::autograd::Function<Gradient> {
  static Tensor forward(AutogradContext*, const Tensor& projected, const Optional& random, const Layout& layout,
                        const variable_list* gradients, at::TensorList) {
    return make_gradient(projected, random, layout, *gradients);
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false, "fwp::map_projection_backward cannot be differentiated: for second derivatives use backend='reference'");
  }
};

struct Mapped : torch::autograd::Function<Mapped> {
  static variable_list forward(AutogradContext* ctx, const Tensor& projected, const Optional& random, const Layout& layout) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward({projected, random.value_or(Tensor())});
    ctx->saved_data["map"] = layout.map, ctx->saved_data["norm"] = layout.norm, ctx->saved_data["adds"] = layout.adds;
    ctx->saved_data["sizes"] = layout.sizes, ctx->saved_data["numbers"] = layout.numbers;
    ctx->set_materialize_grads(false);
    return make(projected, random, layout);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const variable_list saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const Layout layout{data["map"].toStringRef(), data["norm"].toStringRef(), data["adds"].toBool(),
                        data["sizes"].toIntVector(), data["numbers"].toDoubleVector()};
    const Optional random = saved[1].defined() ? Optional(saved[1]) : Optional();
    if (!at::GradMode::is_enabled()) {
      at::AutoDispatchBelowADInplaceOrView below;
      return {make_gradient(saved[0], random, layout, gradients), Tensor(), Tensor()};
    }
    variable_list given;
    for (const Tensor& d : gradients)
      if (d.defined()) given.push_back(d);
    return {Gradient::apply(saved[0], random, layout, &gradients, at::TensorList(given)), Tensor(), Tensor()};
  }
};

variable_list map_projection(const Tensor& projected, const Optional& random, const std::string& map, const std::string& norm,
                             bool adds, at::IntArrayRef sizes, at::ArrayRef<double> numbers) {
  return make(projected, random, {map, norm, adds, sizes.vec(), numbers.vec()});
}

variable_list differentiable(const Tensor& projected, const Optional& random, const std::string& map, const std::string& norm,
                             bool adds, at::IntArrayRef sizes, at::ArrayRef<double> numbers) {
  const Layout layout{map, norm, adds, sizes.vec(), numbers.vec()};
  if (projected.requires_grad() && at::GradMode::is_enabled()) return Mapped::apply(projected, random, layout);
  at::AutoDispatchBelowADInplaceOrView below;
  return make(projected, random, layout);
}

}  // namespace
}  // namespace fwp::cuda

TORCH_LIBRARY_IMPL(fwp, CUDA, m) { m.impl("map_projection", &fwp::cuda::map_projection); }
TORCH_LIBRARY_IMPL(fwp, FWP_AUTOGRAD_KEY, m) { m.impl("map_projection", &fwp::cuda::differentiable); }
