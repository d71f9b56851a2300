// Maps, their normalisation and gates, in one pass over a projection, and all their gradients in another. A block has a token,
// and a team of its threads a vector. The backward pass needs only x, the projection.
//
//     y = phi(x) / D     d_phi = (d - sum of d y) / D if D is the sum, (d - y sum of d y) / D if it is the length
//     ELU+1              d_x = d min(phi, 1)
//     DPFP               d_r_i = sum over n of d_(n, i) r_(i - n) + d_(n, i + n) r_(i + n), with r = relu([x; -x])
//     FAVOR+             d_x = R^T (d phi for R - d phi for -R) - x sum of d phi
//
// The first sum is left out where D is its lower bound.
#pragma once

#include "projection.h"
#include "scan.cuh"

namespace fwp::cuda {

constexpr int kMostMapThreads = 256;

template <typename Real>
FWP_DEVICE Real sigmoid(Real x) {
  return Real(1) / (Real(1) + exp(-x));
}
template <typename Real>
FWP_DEVICE Real rectified(Real x) {  // NaN stays NaN
  return x <= Real(0) ? Real(0) : x;
}

// Maps of one number, and their derivatives.
template <typename Real>
FWP_DEVICE Real feature(Map map, Real x) {
  if (map == Map::elu) return x > Real(0) ? x + Real(1) : exp(x);
  if (map == Map::silu) return x / (Real(1) + exp(-x));
  return map == Map::tanh ? tanh(x) : x;
}
template <typename Real>
FWP_DEVICE Real slope(Map map, Real x, Real phi) {
  if (map == Map::elu) return phi < Real(1) ? phi : Real(1);
  if (map == Map::tanh) return Real(1) - phi * phi;
  if (map != Map::silu) return Real(1);
  const Real opening = sigmoid(x);
  return opening * (Real(1) + x * (Real(1) - opening));
}

// A block's shared memory, in numbers: arrays of each team, then the random matrix.
struct MapLayout {
  int threads, lanes;  // of a block, and of a team
  int width, features;  // with room for whole pieces
  int team;             // all arrays of a team

  MapLayout(int rows, int width_, int features_, bool is_backward) {
    const auto pieces = [](int n) { return (n + kPiece - 1) / kPiece; };
    width = pieces(width_) * kPiece, features = pieces(features_) * kPiece;
    const int most = pieces(width_ > features_ ? width_ : features_);
    lanes = kPiece;
    while (lanes < kWarp && lanes < most) lanes *= 2;
    threads = kWarp;
    while (threads < kMostMapThreads && threads < rows * lanes) threads *= 2;
    const int numbers = is_backward ? 2 * (width + features) : width + features;
    team = (numbers + kWarp - 1) / kWarp * kWarp + lanes;  // teams begin in different banks
  }
  FWP_BOTH int phi() const { return width; }
  FWP_BOTH int d_phi() const { return width + features; }
  FWP_BOTH int d_x() const { return width + 2 * features; }
  FWP_BOTH int random() const { return threads / lanes * team; }
};
FWP_BOTH int odd_pitch(int width) { return width | 1; }  // of the random matrix: a column is in all banks

// The lanes of a team put f(x) of `count` numbers x, in pieces if they are `wide`.
template <typename From, typename To, typename F>
FWP_DEVICE void put_numbers(const From* from, To* to, int count, bool wide, int lane, int lanes, F f) {
  if (wide) {
    for (int i = lane * kPiece; i < count; i += lanes * kPiece) {
      const auto found = *reinterpret_cast<const Numbers<From, kPiece>*>(from + i);
      Numbers<To, kPiece> made;
      FWP_UNROLL for (int e = 0; e < kPiece; ++e) round_to(f(number(found.x[e])), made.x[e]);
      *reinterpret_cast<Numbers<To, kPiece>*>(to + i) = made;
    }
  } else {
    for (int i = lane; i < count; i += lanes) round_to(f(number(from[i])), to[i]);
  }
}

template <typename T, bool kBackward>
struct MapPass {
  using Real = decltype(number(T()));

  Projection given;
  MapLayout layout;
  int64_t blocks;                            // of the launch
  T* to;                                     // the gradient of the projection
  bool wide, wide_features;                  // whether vectors, and features, can be copied in pieces
  int begin[kMostParts], piece[kMostParts];  // a part's first column; the numbers of it that are copied at once

  size_t numbers() const {  // in shared memory
    return size_t(layout.random()) + (has_random() ? size_t(random_vectors()) * size_t(odd_pitch(given.width)) : 0);
  }

  FWP_DEVICE void run() const {
    if (has_random()) load_random();
    const int rows = (1 + given.steps) * given.heads;
    for (int64_t token = blockIdx.x; token < given.B * given.L; token += blocks) {
      const int64_t b = token / given.L, l = token % given.L;
      const T* const from = static_cast<const T*>(given.data) + b * given.batch + l * given.token;
      T* const d_from = kBackward ? to + token * given.W : nullptr;
      for (int row = 0; row < rows; row += layout.threads / layout.lanes) use_vector(row + team(), b, l, from, d_from);
      FWP_UNROLL for (int n = 0; n < kMostParts; ++n)
        if (n < given.parts) use_part(given.part[n], piece[n], b, l, from + begin[n], d_from + begin[n]);
    }
  }

 private:
  // The divisor of a vector's features.
  struct Divisor {
    Real x;
    bool varies;
  };

  FWP_DEVICE int team() const { return int(threadIdx.x) / layout.lanes; }
  FWP_DEVICE int lane() const { return int(threadIdx.x) % layout.lanes; }
  FWP_DEVICE Real* x() const { return reinterpret_cast<Real*>(shared_memory()) + team() * layout.team; }
  FWP_DEVICE Real* phi() const { return x() + layout.phi(); }
  FWP_DEVICE Real* d_phi() const { return x() + layout.d_phi(); }
  FWP_DEVICE Real* d_x() const { return x() + layout.d_x(); }
  FWP_DEVICE Real* random() const { return reinterpret_cast<Real*>(shared_memory()) + layout.random(); }
  FWP_BOTH bool has_random() const { return given.map == Map::favor || given.map == Map::favor_relu; }
  FWP_BOTH int random_vectors() const { return given.map == Map::favor ? given.features / 2 : given.features; }
  FWP_DEVICE Real root() const { return Real(1) / sqrt(Real(given.features)); }
  // All features have it; phi() is without.
  FWP_DEVICE Real offset() const { return has_random() ? Real(given.offset) * root() : Real(0); }

  // Call f(i) for the numbers of a vector that belong to this lane.
  template <typename F>
  FWP_DEVICE void for_numbers(int count, F f) const {
    for (int i = lane(); i < count; i += layout.lanes) f(i);
  }
  FWP_DEVICE Real sum_of_team(Real sum) const {
    Real sums[1] = {sum};
    add_lanes(sums, layout.lanes);
    return sums[0];
  }

  FWP_DEVICE void load_random() const {
    const Real* const from = static_cast<const Real*>(given.random);
    for (int n = int(threadIdx.x); n < random_vectors() * given.width; n += layout.threads)
      random()[n / given.width * odd_pitch(given.width) + n % given.width] = Real(given.scale) * from[n];
    __syncthreads();
  }

  // A query or a key, by a team. All lanes of a warp call it, also for rows that are not there. What its last lines read, the
  // next vector writes after its first barrier.
  FWP_DEVICE void use_vector(int row, int64_t b, int64_t l, const T* from, T* d_from) const {
    const bool there = row < (1 + given.steps) * given.heads, is_query = row < given.heads;
    const int width = there ? given.width : 0, features = there ? given.features : 0;
    const int step = row / given.heads - 1, head = row % given.heads;
    const Vectors& of = is_query ? given.queries : given.keys;
    const int64_t at = b * of.batch + l * of.token + (is_query ? 0 : step * of.step) + head * of.head;
    T* const y = of.data && there ? static_cast<T*>(of.data) + at : nullptr;
    const Real factor = is_query ? Real(given.query_factor) : Real(1), added = offset();
    put_numbers(from + row * given.width, x(), width, wide, lane(), layout.lanes, [](Real x) { return x; });
    __syncwarp();
    find_features(width, features);
    __syncwarp();
    const Divisor divisor = find_divisor(features);
    if constexpr (!kBackward) {
      const auto scaled = [&](Real x) { return (x + added) / divisor.x * factor; };
      put_numbers(phi(), y, features, wide_features, lane(), layout.lanes, scaled);
    } else {
      if (y)
        put_numbers(y, d_phi(), features, wide_features, lane(), layout.lanes, [&](Real d) { return factor * d; });
      else
        for_numbers(features, [&](int j) { d_phi()[j] = Real(0); });
      __syncwarp();
      differentiate_norm(features, divisor);
      __syncwarp();
      differentiate_map(width, features);
      __syncwarp();
      put_numbers(d_x(), d_from + row * given.width, width, wide, lane(), layout.lanes, [](Real x) { return x; });
    }
  }

  // r_i of DPFP, for i in [-2 width, 4 width).
  FWP_DEVICE Real halves(int i) const {
    const int twice = 2 * given.width;
    i = i < 0 ? i + twice : i >= twice ? i - twice : i;
    return i < given.width ? rectified(x()[i]) : rectified(-x()[i - given.width]);
  }
  // Products with the random vectors.
  FWP_DEVICE Real product(int j) const {
    Real sum = 0;
    for (int i = 0; i < given.width; ++i) sum = fma(random()[j * odd_pitch(given.width) + i], x()[i], sum);
    return sum;
  }

  FWP_DEVICE void find_features(int width, int features) const {
    if (given.map == Map::favor) {
      Real sum = 0;
      for_numbers(width, [&](int i) { sum = fma(x()[i], x()[i], sum); });
      const Real scale = Real(given.scale), log_size = (sum_of_team(sum) * scale * scale + log(Real(given.features))) / Real(2);
      for_numbers(features / 2, [&](int j) {
        const Real found = product(j);
        phi()[j] = exp(found - log_size), phi()[features / 2 + j] = exp(-found - log_size);
      });
    } else if (given.map == Map::favor_relu) {
      for_numbers(features, [&](int j) { phi()[j] = rectified(product(j)) * root(); });
    } else if (given.map == Map::dpfp) {
      const int twice = 2 * given.width;
      for (int n = 1, row = 0; row < features; ++n, row += twice)
        for_numbers(twice, [&](int i) { phi()[row + i] = halves(i) * halves(i - n); });
    } else {
      for_numbers(features, [&](int j) { phi()[j] = feature(given.map, x()[j]); });
    }
  }

  FWP_DEVICE Divisor find_divisor(int features) const {
    if (given.norm == Norm::none) return {Real(1), false};
    const bool is_sum = given.norm == Norm::sum;
    const Real epsilon = Real(given.epsilon), added = offset();
    Real sum = 0;
    for_numbers(features, [&](int j) {
      const Real y = phi()[j] + added;
      sum += is_sum ? y : y * y;
    });
    sum = sum_of_team(sum);
    if (given.adds) return {is_sum ? sum + epsilon : sqrt(sum + epsilon), true};
    const Real divisor = is_sum ? sum : sqrt(sum);
    return {divisor < epsilon ? epsilon : divisor, divisor >= epsilon};
  }

  // From the gradient of y to that of phi.
  FWP_DEVICE void differentiate_norm(int features, const Divisor& divisor) const {
    if (given.norm == Norm::none) return;
    Real sum = 0;
    const Real added = offset();
    for_numbers(features, [&](int j) { sum = fma(d_phi()[j], (phi()[j] + added) / divisor.x, sum); });
    sum = sum_of_team(sum);
    if (!divisor.varies) sum = 0;
    for_numbers(features, [&](int j) {
      const Real y = given.norm == Norm::sum ? Real(1) : (phi()[j] + added) / divisor.x;
      d_phi()[j] = (d_phi()[j] - y * sum) / divisor.x;
    });
  }

  FWP_DEVICE void differentiate_map(int width, int features) const {
    if (has_random()) {
      const int vectors = features ? random_vectors() : 0;
      Real sum = 0;
      for_numbers(vectors, [&](int j) {  // the gradients of the products
        if (given.map == Map::favor) {
          const Real plus = d_phi()[j] * phi()[j], minus = d_phi()[vectors + j] * phi()[vectors + j];
          sum += plus + minus, d_phi()[j] = plus - minus;
        } else {
          d_phi()[j] = phi()[j] > Real(0) ? d_phi()[j] * root() : Real(0);
        }
      });
      sum = sum_of_team(sum) * Real(given.scale) * Real(given.scale);  // 0 for ReLU
      __syncwarp();
      for_numbers(width, [&](int i) {
        Real d = -sum * x()[i];
        for (int j = 0; j < vectors; ++j) d = fma(random()[j * odd_pitch(given.width) + i], d_phi()[j], d);
        d_x()[i] = d;
      });
    } else if (given.map == Map::dpfp) {
      const int twice = 2 * given.width;
      for_numbers(width, [&](int i) {
        const Real own = x()[i];
        const int at = own < Real(0) ? i + given.width : i;  // the half that is not zero
        Real d = 0;
        for (int n = 1, row = 0; row < features; ++n, row += twice) {
          const int next = at + n < twice ? at + n : at + n - twice;
          d = fma(d_phi()[row + at], halves(at - n), fma(d_phi()[row + next], halves(next), d));
        }
        d_x()[i] = own == Real(0) ? Real(0) : own < Real(0) ? -d : d;
      });
    } else {
      for_numbers(width, [&](int i) { d_x()[i] = d_phi()[i] * slope(given.map, x()[i], phi()[i]); });
    }
  }

  // A part's results, or its gradients, by all threads.
  FWP_DEVICE void use_part(const Part& part, int piece, int64_t b, int64_t l, const T* from, T* d_from) const {
    if (!kBackward && part.activation == Activation::none) return;
    const int count = part.steps * part.heads * part.width;
    for (int i = int(threadIdx.x) * piece; i < count; i += layout.threads * piece) {
      const int vector = i / part.width, step = vector / part.heads, head = vector % part.heads;
      const Vectors& of = part.vectors;
      const int64_t at = b * of.batch + l * of.token + step * of.step + head * of.head + i % part.width;
      if (!of.data) {
        if constexpr (kBackward) round_to(Real(0), d_from[i]);
      } else if (part.activation == Activation::none) {
        const T* const d = static_cast<const T*>(of.data) + at;
        if (piece == kPiece)
          *in_global_memory(reinterpret_cast<Numbers<T, kPiece>*>(d_from + i)) = *reinterpret_cast<const Numbers<T, kPiece>*>(d);
        else
          d_from[i] = *d;
      } else if (part.activation == Activation::silu) {
        const Real x = number(from[i]);
        T* const y = static_cast<T*>(of.data) + at;
        if constexpr (!kBackward) round_to(feature(Map::silu, x), *y);
        else round_to(number(*y) * slope(Map::silu, x, Real(0)), d_from[i]);
      } else {
        const Real opening = sigmoid(number(from[i]));
        Real* const gate = static_cast<Real*>(of.data) + at;
        if constexpr (!kBackward) *gate = Real(part.factor) * opening;
        else round_to(Real(part.factor) * *gate * opening * (Real(1) - opening), d_from[i]);
      }
    }
  }
};

}  // namespace fwp::cuda
