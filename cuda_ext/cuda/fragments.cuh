// Matrices of bfloat16 in the layout of the tensor cores: 16 x 16, distributed over the registers of a warp. A float32 number
// becomes the sum of `parts` bfloat16 numbers, the largest first. Three parts hold all its digits.
#pragma once

#include "device.cuh"

namespace fwp::cuda {

constexpr int kWarp = 32;
constexpr int kBlock = 16;

using Factor = uint32_t[4];   // of a product
using Product = float[2][4];  // 16 x 8 and the 16 x 8 to the right of it

FWP_DEVICE int lane() { return int(threadIdx.x) % kWarp; }
// Element [h][2 r + e] of a Product, in a lane, is at row line() + 8 r and column 8 h + pair() + e.
FWP_DEVICE int line() { return lane() / 4; }
FWP_DEVICE int pair() { return lane() % 4 * 2; }

// Calls f(row, column, x) for each element of this lane, or f(row, column, x, y) for two adjacent elements.
template <typename F>
FWP_DEVICE void for_elements(Product& product, F f) {
  FWP_UNROLL for (int h = 0; h < 2; ++h)
    FWP_UNROLL for (int i = 0; i < 4; ++i) f(line() + i / 2 * 8, 8 * h + pair() + i % 2, product[h][i]);
}
template <typename F>
FWP_DEVICE void for_pairs(Product& product, F f) {
  FWP_UNROLL for (int h = 0; h < 2; ++h)
    FWP_UNROLL for (int r = 0; r < 2; ++r)
      f(line() + 8 * r, 8 * h + pair(), product[h][2 * r], product[h][2 * r + 1]);
}

FWP_DEVICE void clear(Product& x) {
  FWP_UNROLL for (int h = 0; h < 2; ++h) FWP_UNROLL for (int i = 0; i < 4; ++i) x[h][i] = 0;
}

// Rounds to nearest. The tensor cores truncate, so long sums are not computed on them.
FWP_DEVICE void add(Product& x, const Product& y) {
  FWP_UNROLL for (int h = 0; h < 2; ++h) FWP_UNROLL for (int i = 0; i < 4; ++i) x[h][i] += y[h][i];
}
FWP_DEVICE void subtract(Product& x, const Product& y) {
  FWP_UNROLL for (int h = 0; h < 2; ++h) FWP_UNROLL for (int i = 0; i < 4; ++i) x[h][i] -= y[h][i];
}
FWP_DEVICE void subtract_from(const Product& x, Product& y) {
  FWP_UNROLL for (int h = 0; h < 2; ++h) FWP_UNROLL for (int i = 0; i < 4; ++i) y[h][i] = x[h][i] - y[h][i];
}

FWP_DEVICE float low(uint32_t pair) { return float_of_bits(pair << 16); }
FWP_DEVICE float high(uint32_t pair) { return float_of_bits(pair & 0xffff0000u); }

template <int parts>
FWP_DEVICE void split(float x, float y, uint32_t (&to)[parts]) {
  FWP_UNROLL for (int n = 0; n < parts; ++n) {
    to[n] = pair_of(x, y);
    x -= low(to[n]);
    y -= high(to[n]);
  }
}
// The same; the first parts are multiples of the last places that grid_of() has found.
template <int parts>
FWP_DEVICE void split(float x, float y, uint32_t (&to)[parts], float grid_of_x, float grid_of_y) {
  to[0] = pair_of((x + grid_of_x) - grid_of_x, (y + grid_of_y) - grid_of_y);
  uint32_t rest[parts - 1];
  split(x - low(to[0]), y - high(to[0]), rest);
  FWP_UNROLL for (int n = 1; n < parts; ++n) to[n] = rest[n - 1];
}
// For numbers of very different sizes in one sum. The tensor cores cut off digits below the last place of the greatest product.
// So the first parts of the numbers are multiples of one number: 2^-7 times the power of two of the greatest one. Hardly any
// digit of their products is cut off, and the products of the other parts are small. Adding the result of this function, 1.5 *
// 2^16 times that power, rounds to such multiples.
FWP_DEVICE float grid_of(float greatest) {
  const uint32_t power = bits_of_float(fminf(greatest, 0x1p+100f)) & 0x7f800000u;
  return float_of_bits(power + (16u << 23)) * 1.5f;
}

// Calls f(n, part) for each part of one number.
template <int parts, typename F>
FWP_DEVICE void for_parts(float x, F f) {
  FWP_UNROLL for (int n = 0; n < parts; ++n) {
    Bfloat16 part;
    round_to(x, part);
    f(n, part);
    x -= number(part);
  }
}

// The numbers of a left factor, in the layout of a product.
FWP_DEVICE void unpack(const Factor& from, Product& to) {
  FWP_UNROLL for (int h = 0; h < 2; ++h)
    FWP_UNROLL for (int r = 0; r < 2; ++r) {
      to[h][2 * r] = low(from[2 * h + r]);
      to[h][2 * r + 1] = high(from[2 * h + r]);
    }
}

// A product as the left factor of the next one.
template <int parts>
FWP_DEVICE void split(const Product& x, Factor (&to)[parts]) {
  FWP_UNROLL for (int h = 0; h < 2; ++h)
    FWP_UNROLL for (int r = 0; r < 2; ++r) {
      uint32_t of_pair[parts];
      split(x[h][2 * r], x[h][2 * r + 1], of_pair);
      FWP_UNROLL for (int n = 0; n < parts; ++n) to[n][2 * h + r] = of_pair[n];
    }
}

// The same, with one last place for the first parts of a row.
template <int blocks, int parts>
FWP_DEVICE void split_rows(const Product (&x)[blocks], Factor (&to)[blocks][parts]) {
  float grid[2];
  FWP_UNROLL for (int r = 0; r < 2; ++r) {
    float greatest = 0;
    FWP_UNROLL for (int t = 0; t < blocks; ++t)
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int e = 0; e < 2; ++e) greatest = fmaxf(greatest, fabsf(x[t][h][2 * r + e]));
    FWP_UNROLL for (int distance = 1; distance < 4; distance *= 2)
      greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, distance));
    grid[r] = grid_of(greatest);
  }
  FWP_UNROLL for (int t = 0; t < blocks; ++t)
    FWP_UNROLL for (int h = 0; h < 2; ++h)
      FWP_UNROLL for (int r = 0; r < 2; ++r) {
        uint32_t of_pair[parts];
        split(x[t][h][2 * r], x[t][h][2 * r + 1], of_pair, grid[r], grid[r]);
        FWP_UNROLL for (int n = 0; n < parts; ++n) to[t][n][2 * h + r] = of_pair[n];
      }
}

// The `most` largest parts.
template <int most, int parts>
FWP_DEVICE const Factor (&greatest(const Factor (&x)[parts]))[most] {
  static_assert(most <= parts);
  return reinterpret_cast<const Factor(&)[most]>(x);
}

FWP_DEVICE void multiply(Product& c, const Factor& a, const Factor& b) {
  FWP_UNROLL for (int h = 0; h < 2; ++h) mma(c[h], a, b[2 * h], b[2 * h + 1]);
}
template <int parts>
FWP_DEVICE void multiply(Product& c, const Factor& a, const Factor (&b)[parts]) {
  FWP_UNROLL for (int n = parts; n-- > 0;) multiply(c, a, b[n]);
}
// c += a b, where load(n, b) loads part n of b. Products of small parts that do not matter are skipped.
template <int of_b, int of_a, typename Load>
FWP_DEVICE void multiply(Product& c, const Factor (&a)[of_a], Load load) {
  constexpr int most = of_a > of_b ? of_a : of_b;
  FWP_UNROLL for (int n = of_b; n-- > 0;) {
    Factor b;
    load(n, b);
    FWP_UNROLL for (int m = of_a; m-- > 0;)
      if (m + n < most) multiply(c, a[m], b);
  }
}
// The same, but the product is computed first and then added: otherwise the tensor cores would truncate digits of c.
template <int of_b, int of_a, typename Load>
FWP_DEVICE void add_product(Product& c, const Factor (&a)[of_a], Load load) {
  Product product;
  clear(product);
  multiply<of_b>(product, a, load);
  add(c, product);
}

// A matrix in shared memory. Rows start at multiples of 16 bytes, `pitch` numbers apart. With a pitch of 8 more than a multiple
// of 16, eight rows lie in different banks.
constexpr int kPadding = 8;
constexpr int kGroupRows = 8;

// kGap: numbers between groups of eight rows. With a gap of 32 bytes, pairs of numbers in rows 8 apart also lie in different
// banks.
template <typename T, int kGap>
struct Rows {
  using Number = T;
  T* data;
  int pitch;

  FWP_DEVICE T* at(int row, int column) const { return data + row * pitch + row / kGroupRows * kGap + column; }
  FWP_DEVICE uint32_t get(int row, int column) const { return *reinterpret_cast<const uint32_t*>(at(row, column)); }
  FWP_DEVICE void put(int row, int column, uint32_t pair) const {
    *reinterpret_cast<uint32_t*>(at(row, column)) = pair;
  }
  FWP_DEVICE void put(int row, int column, float x) const { round_to(x, *at(row, column)); }

  // The 16 x 16 block from (row, column) on, or its transpose, as the left or the right factor of a product.
  FWP_DEVICE void left(int row, int column, Factor& a) const { load_matrices(at_rows(row, column), a); }
  FWP_DEVICE void left_transposed(int row, int column, Factor& a) const {
    load_matrices_transposed(at_columns(row, column), a);
  }
  FWP_DEVICE void right(int row, int column, Factor& b) const { load_matrices_transposed(at_rows(row, column), b); }
  FWP_DEVICE void right_transposed(int row, int column, Factor& b) const { load_matrices(at_columns(row, column), b); }

 private:
  // The row address that this lane passes for the four 8 x 8 blocks: vertical neighbors first, or horizontal ones.
  FWP_DEVICE const Bfloat16* at_rows(int row, int column) const {
    return at(row + lane() % kBlock, column + lane() / kBlock * 8);
  }
  FWP_DEVICE const Bfloat16* at_columns(int row, int column) const {
    return at(row + lane() % 8 + lane() / kBlock * 8, column + lane() / 8 % 2 * 8);
  }
};

using Shared = Rows<Bfloat16, 0>;
template <typename T>
constexpr int kGap = 32 / sizeof(T);
template <typename T>
using Grouped = Rows<T, kGap<T>>;

}  // namespace fwp::cuda
