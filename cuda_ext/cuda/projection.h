// The interface of the CUDA kernels around a rule: from a layer's projection to the queries, keys and gates of the rule, and
// back. Sizes: batch B, tokens L, columns of the projection W. One token has a query and `steps` keys for each head.
#pragma once

#include "launchers.h"

namespace fwp::cuda {

// phi, from vectors of `width` numbers to features. The first four are functions of one number.
enum class Map { identity, elu, silu, tanh, dpfp, favor, favor_relu };
// What features are divided by: nothing, their sum, or their length.
enum class Norm { none, sum, length };

// Vectors (B, L, steps, heads, D), with strides in elements; the last dimension is contiguous. Null: zeros, or not written.
struct Vectors {
  void* data = nullptr;
  int64_t batch = 0, token = 0, step = 0, head = 0;
};

// What other columns become. Without an activation they are used as they are, and the forward pass leaves them.
enum class Activation { none, sigmoid, silu };

// Columns of the projection behind those of queries and keys: (steps, heads, width).
struct Part {
  Activation activation;
  int steps, heads, width;
  double factor;    // of the sigmoid
  Vectors vectors;  // the results, or the gradients
};

constexpr int kMostParts = 4;
constexpr int64_t kMostRandomNumbers = 8192;

// Sigmoids and the random matrix are float32, or float64 for float64. All else has the type of the projection.
struct Projection {
  int64_t B, L, W;
  Type type;
  const void* data;         // (B, L, W), with contiguous columns
  int64_t batch, token;     // its strides
  int heads, steps, width;  // the first columns are (1 + steps, heads, width)
  int features;             // Dk
  Map map;
  Norm norm;
  bool adds;              // whether epsilon is added to the sum, or to the square of the length; else it is a lower bound
  double epsilon, query_factor;
  double scale, offset;   // of FAVOR+
  const void* random;     // its matrix (Dk / 2 or Dk, width), contiguous, with at most kMostRandomNumbers
  Vectors queries, keys;  // the results, or the gradients
  int parts;
  Part part[kMostParts];
  void* stream;
};

// As forward() and backward() of launchers.h. `to` is the gradient of the projection, (B, L, W) and contiguous.
const char* map_forward(const Projection& projection);
const char* map_backward(const Projection& projection, void* to);

}  // namespace fwp::cuda
