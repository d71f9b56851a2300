// Shared by all scans: a thread's tile of the matrix, the transfer of tokens through shared memory, and results.
#pragma once

#include <type_traits>

#include "layout.h"

namespace fwp::cuda {

// A rows x columns matrix for each head, or for each head and chunk. Strides can describe a transpose. If `data` is null, an
// input is zeros and an output is not stored.
template <typename Real>
struct Matrices {
  Real* data = nullptr;
  int64_t head = 0, row = 0, column = 0;
};

// Numbers that are read or written at once, or in pieces of 16 bytes.
template <typename T, int n>
struct alignas(n * sizeof(T) < 16 ? n * sizeof(T) : 16) Numbers {
  T x[n];
};
template <typename Real>
using Piece = Numbers<Real, kPiece>;
template <typename T>
constexpr int kOf16Bytes = 16 / sizeof(T);
template <typename T>
using Wide = Numbers<T, kOf16Bytes<T>>;

FWP_BOTH constexpr int bytes_of(Type type) { return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2; }

// A number that was loaded as it is stored in memory.
FWP_DEVICE double number_of(Type, double x) { return x; }
FWP_DEVICE float number_of(Type type, uint32_t bits) {
  if (type == Type::float32) return float_of_bits(bits);
  return type == Type::bfloat16 ? number(Bfloat16{uint16_t(bits)}) : number(Float16{uint16_t(bits)});
}

// Whether rows of `width` numbers with these strides can be copied 16 bytes at a time.
template <typename... Strides>
bool in_pieces(const void* data, Type type, Strides... strides) {
  const int numbers = 16 / bytes_of(type);
  return data && reinterpret_cast<uintptr_t>(data) % 16 == 0 && (... && (strides % numbers == 0));
}

// An input or output of a scan for each token.
struct Source : InputArray {
  bool by_pieces = false;  // of 16 bytes
  int log_bytes = 0;       // of a number, base 2

  Source() = default;
  Source(const InputArray& from) : InputArray(from) {}
  void set_pieces(int width) {
    by_pieces = in_pieces(data, type, width, batch, head, token);
    log_bytes = log2_of(bytes_of(type));
  }
};
struct Sink : OutputArray {
  bool by_pieces = false;

  Sink() = default;
  Sink(const OutputArray& to) : OutputArray(to) {}
  void set_pieces(int width, int slab_width) { by_pieces = in_pieces(data, type, width, slab_width); }
};

// An output along the rows: a (heads, length, rows) array for each slab, with the tokens from `first` on.
struct RowSink : Sink {
  int64_t slab = 0;  // numbers between the arrays
  int64_t first = 0, length = 0;

  void set_pieces(int width) {  // of kPiece numbers
    Sink::set_pieces(width, width);
    by_pieces = by_pieces && width % kPiece == 0;
  }
};

// The part of the matrix that one thread holds.
template <typename Real, int kRows, int kColumns>
struct Tile {
  Real x[kRows][kColumns];

  FWP_DEVICE void add(const Real (&row)[kRows], const Real (&column)[kColumns]) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] = fma(row[r], column[c], x[r][c]);
  }
  FWP_DEVICE void subtract(const Real (&row)[kRows], const Real (&column)[kColumns]) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] = fma(-row[r], column[c], x[r][c]);
  }
  FWP_DEVICE void scale(const Real (&row)[kRows], const Real (&column)[kColumns]) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] *= row[r] * column[c];
  }
  FWP_DEVICE void scale(Real factor) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] *= factor;
  }
  FWP_DEVICE void scale_rows(const Real (&row)[kRows]) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] *= row[r];
  }
  FWP_DEVICE void clear() {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] = Real(0);
  }
  FWP_DEVICE void multiply(const Tile& other) {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[r][c] *= other.x[r][c];
  }
  // x column, for the columns of this thread only.
  FWP_DEVICE void read_rows(const Real (&column)[kColumns], Real (&sum)[kRows]) const {
    FWP_UNROLL for (int r = 0; r < kRows; ++r) {
      sum[r] = x[r][0] * column[0];
      FWP_UNROLL for (int c = 1; c < kColumns; ++c) sum[r] = fma(x[r][c], column[c], sum[r]);
    }
  }
  FWP_DEVICE void add_columns(Real (&sum)[kRows]) const {
    FWP_UNROLL for (int r = 0; r < kRows; ++r) {
      sum[r] = x[r][0];
      FWP_UNROLL for (int c = 1; c < kColumns; ++c) sum[r] += x[r][c];
    }
  }
  // row x, for the rows of this thread only.
  FWP_DEVICE void read(const Real (&row)[kRows], Real (&sum)[kColumns]) const {
    FWP_UNROLL for (int c = 0; c < kColumns; ++c) {
      sum[c] = row[0] * x[0][c];
      FWP_UNROLL for (int r = 1; r < kRows; ++r) sum[c] = fma(row[r], x[r][c], sum[c]);
    }
  }
};

template <typename Real, int n>
FWP_DEVICE void scaled(Real factor, const Real (&x)[n], Real (&product)[n]) {
  FWP_UNROLL for (int i = 0; i < n; ++i) product[i] = factor * x[i];
}

// Sums over all lanes that share a column. Each of them gets the same bits, in every run. All lanes of a warp must call it.
template <typename Real, int n>
FWP_DEVICE void add_lanes(Real (&x)[n], int lanes) {
  for (int distance = 1; distance < lanes; distance *= 2)
    FWP_UNROLL for (int i = 0; i < n; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], distance);
}

// Tokens that go through shared memory together, in memory order.
struct Stage {
  int64_t first;
  int count;
  bool writes;  // whether they have outputs
};

// All inputs and outputs of a scan for each token.
template <int kRowParts, int kColumnParts, int kScalars_, int kOutputs, int kRowOutputs>
struct TokenArrays {
  static constexpr int kScalars = kScalars_;
  static FWP_BOTH constexpr TokenParts parts() { return {kRowParts, kColumnParts, kScalars, kOutputs, kRowOutputs}; }
  Source vectors[kRowParts + kColumnParts];  // along the rows, then along the columns
  Source scalars[kScalars];
  Sink outputs[kOutputs];
  RowSink row_outputs[kRowOutputs ? kRowOutputs : 1];

  Source& row(int n) { return vectors[n]; }
  Source& column(int n) { return vectors[kRowParts + n]; }
  void set_pieces(const ScanSize& size, int slab_width) {
    for (int n = 0; n < kRowParts; ++n) row(n).set_pieces(size.rows);
    for (int n = 0; n < kColumnParts; ++n) column(n).set_pieces(size.columns);
    for (Source& x : scalars) x.set_pieces(1);
    for (Sink& x : outputs) x.set_pieces(size.columns, slab_width);
    for (RowSink& x : row_outputs) x.set_pieces(size.rows);
  }
};

// The position of a thread in a scan.
template <typename Real, int kRows, int kColumns, typename Arrays>
struct Place {
  const ScanSize& size;
  const Plan& plan;
  const Arrays& arrays;
  TokenLayout layout;
  int thread, team, worker, lane, column;  // worker: the thread in its team; column: its first one in the matrix
  int slab_column, brought_column;         // in the slab of its team, and in the loaded part of a token
  int64_t head, batch, head_of_batch;

  FWP_DEVICE Place(const ScanSize& size_, const Plan& plan_, const Arrays& arrays_)
      : size(size_), plan(plan_), arrays(arrays_), layout(Arrays::parts(), plan_, kRows, kColumns) {
    thread = int(threadIdx.x);
    team = thread >> log_team();
    worker = thread & (plan.team_threads() - 1);
    lane = thread & (plan.lanes - 1);
    slab_column = (worker >> plan.log_lanes) * kColumns;
    column = slab() * layout.output_width + slab_column;
    brought_column = column & (layout.column_width - 1);
    head = int64_t(blockIdx.x / unsigned(plan.slabs)) * plan.teams + team;
    batch = head / size.heads_per_batch;
    head_of_batch = head % size.heads_per_batch;
  }

  FWP_DEVICE int slab() const { return int(blockIdx.x % unsigned(plan.slabs)); }
  // Whether the thread has columns of a head, which may be beyond the last column.
  FWP_DEVICE bool is_there() const { return head < size.heads; }
  // Whether a document begins at this token.
  FWP_DEVICE bool begins(const Real* token) const { return size.begins && token[layout.begins()] != 0; }
  // Clear the matrix there. The empty statement keeps this a branch, because a selection costs an instruction for each element.
  FWP_DEVICE void clear_if_begins(const Real* token, Tile<Real, kRows, kColumns>& matrix) const {
    if (!begins(token)) return;
    asm volatile("");
    matrix.clear();
  }
  FWP_DEVICE int row(int r) const { return (piece(r / kPiece) * plan.lanes + lane) * kPiece + r % kPiece; }
  // The place of a thread's pieces of rows. For sums over columns, every other thread starts with its second half: see
  // add_groups().
  FWP_DEVICE int piece(int p) const {
    constexpr int half = kRows / kPiece / 2;
    return Arrays::parts().row_outputs > 0 && column / kColumns % 2 ? p ^ half : p;
  }

  // A token of the thread's team, in one of the ring's buffers.
  FWP_DEVICE Real* token(int at, int slot) const {
    return reinterpret_cast<Real*>(shared_memory()) + ((at * plan.teams + team) * plan.stage + slot) * layout.size;
  }
  // Shared memory after the ring.
  FWP_DEVICE Real* own_memory() const {
    return reinterpret_cast<Real*>(shared_memory()) + plan.buffers * plan.teams * plan.stage * layout.size;
  }

  // Parts of a token.
  FWP_DEVICE void load_row(const Real* token, int n, Real (&x)[kRows]) const {
    const Piece<Real>* from = reinterpret_cast<const Piece<Real>*>(token + layout.row(n)) + lane;
    FWP_UNROLL for (int p = 0; p < kRows / kPiece; ++p) {
      const Piece<Real> found = from[piece(p) * plan.lanes];
      FWP_UNROLL for (int i = 0; i < kPiece; ++i) x[p * kPiece + i] = found.x[i];
    }
  }
  FWP_DEVICE void load_column(const Real* token, int n, Real (&x)[kColumns]) const {
    const auto found = *reinterpret_cast<const Numbers<Real, kColumns>*>(token + layout.column(n) + brought_column);
    FWP_UNROLL for (int c = 0; c < kColumns; ++c) x[c] = found.x[c];
  }
  FWP_DEVICE Real scalar(const Real* token, int n) const { return token[layout.scalar(n)]; }

  // One number per column, which all lanes of the column hold.
  FWP_DEVICE void put_columns(Real* token, int n, const Real (&x)[kColumns]) const {
    if (lane != 0) return;
    Numbers<Real, kColumns> all;
    FWP_UNROLL for (int c = 0; c < kColumns; ++c) all.x[c] = x[c];
    *reinterpret_cast<Numbers<Real, kColumns>*>(token + layout.output(n) + slab_column) = all;
  }
  // The sums of x over the columns of the team. Each warp has a part of them.
  FWP_DEVICE void put_rows(Real* token, int n, Real (&x)[kRows]) const {
    add_groups<kRows>(x, 0, plan.lanes, token + layout.row_output(n, worker / kWarp));
  }

  FWP_DEVICE void load(const Matrices<const Real>& m, int64_t index, Tile<Real, kRows, kColumns>& tile) const {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c) {
        const bool inside = m.data && is_there() && row(r) < size.rows && column + c < size.columns;
        tile.x[r][c] = inside ? m.data[index * m.head + row(r) * m.row + (column + c) * m.column] : Real(0);
      }
  }
  FWP_DEVICE void store(const Tile<Real, kRows, kColumns>& tile, const Matrices<Real>& m, int64_t index) const {
    if (!m.data || !is_there()) return;
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      FWP_UNROLL for (int c = 0; c < kColumns; ++c)
        if (row(r) < size.rows && column + c < size.columns)
          m.data[index * m.head + row(r) * m.row + (column + c) * m.column] = tile.x[r][c];
  }

  // Calls use(at, stage) for each stage stage_at(n), with its tokens in buffer `at` of a ring. Meanwhile the next stages are
  // being loaded and the outputs of the previous one are being stored.
  template <typename StageAt, typename Use>
  FWP_DEVICE void for_stages(int64_t stages, StageAt stage_at, Use use) const {
    const int ahead = plan.buffers - 1;
    Asked asked;
    Stage before{0, 0, false};
    // The buffers of stage n, of the stage before it, and of the stage whose scalars are being loaded.
    int at = 0, previous = 0, filled = -1;
    FWP_UNROLL_BY(1) for (int64_t n = -ahead; n <= stages; ++n) {
      const bool begun = n >= 0 && n < stages;
      if (begun) {
        plan.buffers == kMostBuffers ? wait_copies<kMostBuffers - 2>() : wait_copies<0>();
        if constexpr (sizeof(Real) < 8) convert(at);
      }
      if (filled >= 0) put_scalars(filled, asked);
      // From here on, stage n may be used and the buffer of the stage before it may be filled.
      __syncthreads();
      filled = n + ahead >= stages ? -1 : n > 0 ? previous : int(n) + ahead;
      if (filled >= 0) bring(filled, stage_at(n + ahead), asked);
      commit_copies();
      write(previous, before);
      if (!begun) continue;
      const auto stage = stage_at(n);
      use(at, stage);
      before = stage;
      previous = at;
      at = at == ahead ? 0 : at + 1;
    }
  }

 private:
  // Sum x[0] to x[n - 1], the numbers of rows from `r` on, over all threads of a warp that have the same rows, then put the
  // sums. At each distance, each of two threads takes half of the numbers. The order is that of a binary tree over the columns.
  template <int n>
  FWP_DEVICE void add_groups(Real (&x)[kRows], int r, int distance, Real* to) const {
    const int end = plan.team_threads() < kWarp ? plan.team_threads() : kWarp;
    if constexpr (n > 1) {
      if (distance < end) {
        const bool second = n < kRows && thread & distance;  // all rows already start with the half to keep
        FWP_UNROLL for (int i = 0; i < n / 2; ++i) {
          const Real given = second ? x[i] : x[i + n / 2], own = second ? x[i + n / 2] : x[i];
          x[i] = own + __shfl_xor_sync(0xffffffffu, given, distance);
        }
        return add_groups<n / 2>(x, second ? r + n / 2 : r, 2 * distance, to);
      }
      constexpr int together = n < kPiece ? n : kPiece;
      FWP_UNROLL for (int i = 0; i < n; i += together) {
        Numbers<Real, together> all;
        FWP_UNROLL for (int e = 0; e < together; ++e) all.x[e] = x[i + e];
        *reinterpret_cast<Numbers<Real, together>*>(to + row(r + i)) = all;
      }
    } else {
      const bool has_first_column = (thread & (end - distance)) == 0;
      for (; distance < end; distance *= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], distance);
      if (has_first_column) to[row(r)] = x[0];
    }
  }

  // The scalars of one token, as stored in memory.
  using Raw = std::conditional_t<sizeof(Real) == 8, double, uint32_t>;
  struct Asked {
    Raw x[Arrays::kScalars];
    bool begins;  // whether it is the first of a document
  };

  static constexpr int kVectors = Arrays::parts().rows + Arrays::parts().columns;
  // The position of a vector in a token, and the numbers that the block needs: from `column` on, with zeros from `limit` on.
  struct Vector {
    int at, log_width, column, limit;
  };
  FWP_DEVICE Vector vector(int i) const {
    const int column = i - Arrays::parts().rows;
    if (column < 0) return {layout.row(i), log_row_width(), 0, size.rows};
    return {layout.column(column), log_column_width(), first_column(), size.columns};
  }

  FWP_DEVICE int log_team() const { return plan.log_lanes + plan.log_groups; }
  FWP_DEVICE int log_row_width() const {
    constexpr int log_rows = log2_of(kRows);
    return log_rows + plan.log_lanes;
  }
  FWP_DEVICE int log_output_width() const {
    constexpr int log_columns = log2_of(kColumns);
    return log_columns + plan.log_groups;
  }
  FWP_DEVICE int log_column_width() const {
    constexpr int least = log2_of(kLeastColumns);
    return log_output_width() < least ? least : log_output_width();
  }
  FWP_DEVICE int first_output() const { return slab() * layout.output_width; }
  FWP_DEVICE int first_column() const { return first_output() & ~(layout.column_width - 1); }

  // Calls f(slot, i) for this thread's share of `count` tokens in 2^log_parts parts each. The share is the same in each call.
  template <typename F>
  FWP_DEVICE void share(int count, int log_parts, F f) const {
    const int parts = 1 << log_parts, spare = log_team() - log_parts;
    const int slot = spare > 0 ? worker >> log_parts : 0, step = spare > 0 ? 1 << spare : 1;
    FWP_UNROLL_BY(1) for (int s = slot; s < count; s += step)
      FWP_UNROLL_BY(1) for (int i = worker & (parts - 1); i < parts; i += plan.team_threads()) f(s, i);
  }

  // The address of the vectors of token t.
  FWP_DEVICE const unsigned char* start(const Source& from, int64_t t) const {
    const int64_t at = batch * from.batch + head_of_batch * from.head + t * from.token;
    return static_cast<const unsigned char*>(from.data) + (at << from.log_bytes);
  }

  // Starts to load a stage's tokens into buffer `at`. Scalars are loaded into `asked` and stored later.
  FWP_DEVICE void bring(int at, const Stage& stage, Asked& asked) const {
    if (!is_there()) return;
    FWP_UNROLL for (int i = 0; i < Arrays::kScalars; ++i) asked.x[i] = ask(arrays.scalars[i], stage);
    asked.begins = size.begins && worker < stage.count && size.begins[batch * size.length + stage.first + worker];
    FWP_UNROLL_BY(1) for (int i = 0; i < kVectors; ++i) {
      const Source& from = arrays.vectors[i];
      const Vector to = vector(i);
      const unsigned char* const data = start(from, stage.first);
      if (from.by_pieces)
        copy(from, data, stage.count, to, token(at, 0) + to.at);
      else
        bring_numbers(from, data, stage.count, to, token(at, 0) + to.at);
    }
  }

  // Copies each 16 bytes to where their numbers will lie. 2-byte numbers fill only the first half of that space.
  FWP_DEVICE void copy(const Source& from, const unsigned char* data, int count, const Vector& vector, Real* to) const {
    const int log_numbers = 4 - from.log_bytes;
    share(count, vector.log_width - log_numbers, [&](int s, int i) {
      const int column = vector.column + (i << log_numbers);
      const bool inside = column < vector.limit;
      const int64_t at = inside ? (s * from.token + column) << from.log_bytes : 0;
      copy_later(to + s * layout.size + (i << log_numbers), data + at, inside);
    });
  }

  // Copies single numbers of several tokens at a time: all loads start before the first value is needed.
  FWP_DEVICE void bring_numbers(const Source& from, const unsigned char* data, int count, const Vector& vector, Real* to) const {
    constexpr int kAtOnce = 4;
    const int limit = from.data ? vector.limit : 0;
    share((count + kAtOnce - 1) / kAtOnce, vector.log_width, [&](int s, int i) {
      Raw x[kAtOnce];
      FWP_UNROLL for (int n = 0; n < kAtOnce; ++n) {
        const int t = kAtOnce * s + n;
        x[n] = raw(from, data, t * from.token + vector.column + i, t < count && vector.column + i < limit);
      }
      FWP_UNROLL for (int n = 0; n < kAtOnce; ++n)
        if (kAtOnce * s + n < count) to[(kAtOnce * s + n) * layout.size + i] = number_of(from.type, x[n]);
    });
  }

  // Converts the 2-byte numbers that this thread has copied to buffer `at`.
  FWP_DEVICE void convert(int at) const {
    if (!is_there()) return;
    FWP_UNROLL_BY(1) for (int i = 0; i < kVectors; ++i) {
      const Source& from = arrays.vectors[i];
      if (from.by_pieces && from.log_bytes == 1) convert(from.type, vector(i), at);
    }
  }
  FWP_DEVICE void convert(Type type, const Vector& vector, int at) const {
    constexpr int numbers = kOf16Bytes<uint16_t>, log_numbers = log2_of(numbers);
    share(plan.stage, vector.log_width - log_numbers, [&](int s, int i) {
      Real* const to = token(at, s) + vector.at + i * numbers;
      const Wide<uint16_t> found = *reinterpret_cast<const Wide<uint16_t>*>(to);
      FWP_UNROLL for (int p = 0; p < numbers / kPiece; ++p) {
        Piece<Real> piece;
        FWP_UNROLL for (int e = 0; e < kPiece; ++e) piece.x[e] = number_of(type, Raw(found.x[p * kPiece + e]));
        reinterpret_cast<Piece<Real>*>(to)[p] = piece;
      }
    });
  }

  // The scalar of the token that this thread loads for a stage. No instruction waits for it before put_scalars().
  FWP_DEVICE Raw ask(const Source& from, const Stage& stage) const {
    return raw(from, start(from, stage.first), worker * from.token, from.data && worker < stage.count);
  }
  FWP_DEVICE void put_scalars(int at, const Asked& asked) const {
    if (!is_there() || worker >= plan.stage) return;
    Real* const to = token(at, worker);
    FWP_UNROLL for (int i = 0; i < Arrays::kScalars; ++i) to[layout.scalar(i)] = number_of(arrays.scalars[i].type, asked.x[i]);
    if (size.begins) to[layout.begins()] = asked.begins;
  }

  // Number `at`, as stored in memory, or zero.
  static FWP_DEVICE Raw raw(const Source& from, const unsigned char* data, int64_t at, bool inside) {
    if (!inside) return Raw(0);
    if constexpr (sizeof(Real) == 8)
      return reinterpret_cast<const double*>(data)[at];
    else
      return from.log_bytes == 2 ? reinterpret_cast<const uint32_t*>(data)[at] : reinterpret_cast<const uint16_t*>(data)[at];
  }

  // Stores the outputs of a stage, from buffer `at`.
  FWP_DEVICE void write(int at, const Stage& stage) const {
    if (!is_there() || !stage.writes) return;
    const Real* const tokens = token(at, 0);
    FWP_UNROLL_BY(1) for (int i = 0; i < Arrays::parts().outputs; ++i)
      if (arrays.outputs[i].data) write(arrays.outputs[i], stage, tokens + layout.output(i));
    FWP_UNROLL_BY(1) for (int i = 0; i < Arrays::parts().row_outputs; ++i)
      if (arrays.row_outputs[i].data) write_rows(arrays.row_outputs[i], stage, tokens + layout.row_output(i, 0));
  }
  FWP_DEVICE void write(const Sink& to, const Stage& stage, const Real* tokens) const {
    const int count = stage.count, apart = to.tokens_first ? int(size.heads_per_batch) : 1;  // in vectors
    const int64_t first = to.tokens_first ? (batch * size.length + stage.first) * apart + head_of_batch
                                          : head * size.length + stage.first;
    with_element<Real>(to.type, [&](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      T* const data = static_cast<T*>(to.data) + first * size.columns + first_output();
      const int limit = size.columns - first_output(), stride = apart * size.columns;
      if (to.by_pieces) {
        constexpr int numbers = kOf16Bytes<T>, log_numbers = log2_of(numbers), together = kOf16Bytes<Real>;
        share(count, log_output_width() - log_numbers, [&](int s, int i) {
          if (i * numbers >= limit) return;
          const Wide<Real>* const from = reinterpret_cast<const Wide<Real>*>(tokens + s * layout.size + i * numbers);
          Wide<T> piece;
          FWP_UNROLL for (int p = 0; p < numbers / together; ++p) {
            const Wide<Real> found = from[p];
            FWP_UNROLL for (int e = 0; e < together; ++e) round_to(found.x[e], piece.x[p * together + e]);
          }
          reinterpret_cast<Wide<T>*>(data + s * stride)[i] = piece;
        });
      } else {
        share(count, log_output_width(), [&](int s, int i) {
          if (i < limit) round_to(tokens[s * layout.size + i], data[s * stride + i]);
        });
      }
    });
  }

  FWP_DEVICE void write_rows(const RowSink& to, const Stage& stage, const Real* tokens) const {
    with_element<Real>(to.type, [&](auto* element) {
      using T = std::remove_pointer_t<decltype(element)>;
      T* const data = static_cast<T*>(to.data) + slab() * to.slab + (head * to.length + stage.first - to.first) * size.rows;
      constexpr int log_piece = log2_of(kPiece);
      share(stage.count, log_row_width() - log_piece, [&](int s, int i) {
        const int left = size.rows - i * kPiece;
        if (left <= 0) return;
        const Piece<Real> sum = add_warps(tokens + s * layout.size + i * kPiece);
        Piece<T> rounded;
        FWP_UNROLL for (int e = 0; e < kPiece; ++e) round_to(sum.x[e], rounded.x[e]);
        T* const target = data + s * size.rows + i * kPiece;
        if (to.by_pieces)
          *reinterpret_cast<Piece<T>*>(target) = rounded;
        else
          FWP_UNROLL for (int e = 0; e < kPiece; ++e) if (e < left) target[e] = rounded.x[e];
      });
    });
  }
  // Four sums of all warps of the team, in the order of a binary tree.
  FWP_DEVICE Piece<Real> add_warps(const Real* from) const {
    constexpr int most = kThreadsPerBlock / kWarp;
    Piece<Real> sums[most];
    FWP_UNROLL for (int w = 0; w < most; ++w)
      if (w < layout.warps) sums[w] = *reinterpret_cast<const Piece<Real>*>(from + w * layout.row_width);
    FWP_UNROLL for (int distance = 1; distance < most; distance *= 2)
      FWP_UNROLL for (int w = 0; w + distance < most; w += 2 * distance)
        if (w + distance < layout.warps)
          FWP_UNROLL for (int e = 0; e < kPiece; ++e) sums[w].x[e] += sums[w + distance].x[e];
    return sums[0];
  }
};

}  // namespace fwp::cuda
