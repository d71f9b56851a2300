// Products of bfloat16 numbers by tiles: a processor with AMX has an instruction for them. An emulation gives every bit
// of its results, slowly, for tests on other processors.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>

#include "bfloat16.h"

// Without AVX-512, the rest of a chunk would take longer than tiles save. GCC passes their instructions on to the
// assembler, for any -march.
#if defined(__x86_64__) && defined(__linux__) && defined(__AVX512F__) && !defined(__clang__) && __GNUC__ >= 11
#define FWP_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fwp {

// A tile of sums is 16 x 16 numbers of float32, a tile of a factor 16 rows of 16 pairs of bfloat16. A row of a left factor
// is a row of it: pairs are neighbors along the inner dimension. A right factor has a row for each pair, which it has in
// each of 16 columns.
constexpr int kTileSide = 16;
struct FactorTile {
  uint32_t pairs[kTileSide][kTileSide];
};

// Products are of two rows of tiles with two columns of tiles.
constexpr int64_t kProductSide = 2 * kTileSide;
struct TileFactors {
  const FactorTile *left, *right;  // each row or column has `steps` tiles, after those of the one before
};

#ifdef FWP_AMX
struct Amx {
  static void configure() {
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes_of_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const tiles;
    static_assert(sizeof tiles == 64);
    asm volatile("ldtilecfg %0" : : "m"(tiles));
  }
  static void release() { asm volatile("tilerelease" : : : "memory"); }
  template <int tile>
  static FWP_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  template <int tile>
  static FWP_INLINE void load(const FactorTile* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(sizeof from->pairs[0]), "i"(tile), "m"(*from));
  }
  template <int tile>
  static FWP_INLINE void store(float* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride * sizeof(float)), "i"(tile) : "memory");
  }
  template <int sums, int left, int right>
  static FWP_INLINE void add_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(left), "i"(right));
  }

  // Whether the processor has it, and Linux has given this process the right to use it.
  static bool available() {
    static const bool found = [] {
      constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24;  // of CPUID
      constexpr long kAsk = 0x1023, kTileData = 18;                // of arch_prctl
      unsigned a, b, c, d = 0;
      if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (kBfloat16 | kTiles)) return false;
      return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
    }();
    return found;
  }
};
#endif

// A product adds the first numbers of the 16 pairs from zero in their order, by fused multiply-adds, and the second ones
// apart; then both; then that to the sum before. Each step rounds to the nearest. What is smaller than a normal number is
// zero, as a factor and as a result.
struct EmulatedAmx {
  uint32_t tiles[8][kTileSide][kTileSide];

  static void configure() {}
  static void release() {}
  template <int tile>
  void zero() {
    std::memset(tiles[tile], 0, sizeof tiles[tile]);
  }
  template <int tile>
  void load(const FactorTile* from) {
    std::memcpy(tiles[tile], from, sizeof tiles[tile]);
  }
  template <int tile>
  void store(float* to, int64_t stride) const {
    for (int t = 0; t < kTileSide; ++t) std::memcpy(to + t * stride, tiles[tile][t], sizeof tiles[tile][t]);
  }
  template <int sums, int left, int right>
  void add_product() {
    for (int t = 0; t < kTileSide; ++t) {
      float first[kTileSide] = {}, second[kTileSide] = {};
      for (int pair = 0; pair < kTileSide; ++pair)
        for (int j = 0; j < kTileSide; ++j) {
          const uint32_t x = tiles[left][t][pair], y = tiles[right][pair][j];
          first[j] = normal(std::fma(normal(same_bits<float>(x << 16)), normal(same_bits<float>(y << 16)), first[j]));
          second[j] = normal(std::fma(upper(x), upper(y), second[j]));
        }
      for (int j = 0; j < kTileSide; ++j) {
        uint32_t& sum = tiles[sums][t][j];
        sum = same_bits<uint32_t>(normal(same_bits<float>(sum) + normal(first[j] + second[j])));
      }
    }
  }

 private:
  static float normal(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? 0 * x : x; }
  static float upper(uint32_t pair) { return normal(same_bits<float>(pair & 0xffff0000)); }
};

// sums (32 x 32) = the sum of the products of some pairs of factors.
template <typename Unit>
void multiply_factors(const TileFactors* factors, int count, int64_t steps, float* sums) {
  Unit unit;
  unit.template zero<0>(), unit.template zero<1>(), unit.template zero<2>(), unit.template zero<3>();
  for (const TileFactors* of = factors; of < factors + count; ++of)
    for (int64_t i = 0; i < steps; ++i) {
      unit.template load<4>(of->left + i), unit.template load<5>(of->left + steps + i);
      unit.template load<6>(of->right + i), unit.template load<7>(of->right + steps + i);
      unit.template add_product<0, 4, 6>(), unit.template add_product<1, 4, 7>();
      unit.template add_product<2, 5, 6>(), unit.template add_product<3, 5, 7>();
    }
  float* const below = sums + kTileSide * kProductSide;
  unit.template store<0>(sums, kProductSide), unit.template store<1>(sums + kTileSide, kProductSide);
  unit.template store<2>(below, kProductSide), unit.template store<3>(below + kTileSide, kProductSide);
}

// Whether a unit has the bits of the emulation, for some factors.
template <typename Unit>
bool is_as_emulated() {
  constexpr int64_t kSteps = 2;
  FactorTile tiles[4 * kSteps];
  uint32_t draw = 1;
  const auto number = [&] {  // of either sign, from 0.5 to 2
    draw = draw * 1664525 + 1013904223;
    return 0x3f00u | (draw >> 16 & 0x80ff);
  };
  for (FactorTile& tile : tiles)
    for (auto& row : tile.pairs)
      for (uint32_t& pair : row) pair = number() | number() << 16;
  float found[kProductSide * kProductSide], expected[kProductSide * kProductSide];
  const TileFactors factors{tiles, tiles + 2 * kSteps};
  Unit::configure();
  multiply_factors<Unit>(&factors, 1, kSteps, found);
  Unit::release();
  multiply_factors<EmulatedAmx>(&factors, 1, kSteps, expected);
  return std::memcmp(found, expected, sizeof found) == 0;
}

// What computes products. A thread calls configure() before the first and release() after the last: other libraries use
// tiles of other sizes.
struct TileUnit {
  void (*configure)();
  void (*release)();
  void (*multiply)(const TileFactors* factors, int count, int64_t steps, float* sums);

  template <typename Unit>
  static const TileUnit* of() {
    static constexpr TileUnit unit{Unit::configure, Unit::release, multiply_factors<Unit>};
    return &unit;
  }

  // As FWP_CPU_TILES says: auto, the processor's unit; off; emulated, for tests. Null: none.
  static const TileUnit* chosen() {
    const char* const given = std::getenv("FWP_CPU_TILES");
    const std::string choice = given && *given ? given : "auto";
    if (choice == "emulated") return of<EmulatedAmx>();
    if (choice != "auto" && choice != "off")
      throw std::invalid_argument("FWP_CPU_TILES must be auto, off or emulated, got " + choice);
#ifdef FWP_AMX
    static const bool usable = [] {
      if (!Amx::available()) return false;
      const bool right = is_as_emulated<Amx>();
      if (!right) std::fputs("fairseq_fwp: this processor's tiles give other bits than expected, and are not used\n", stderr);
      return right;
    }();
    if (choice == "auto" && usable) return of<Amx>();
#endif
    return nullptr;
  }
};

}  // namespace fwp
