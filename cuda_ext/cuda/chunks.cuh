// Shared by the passes on the tensor cores: the sum and the delta rule in bfloat16, without decays or with decays by head, 32
// tokens at a time. ../rule.h has the symbols.
//
// sum and gated have E = V; a program of one chunk (`upto` keeps s <= t, `below` s < t):
//
//     P, A = upto(F * (Q @ K.T)), below(F * (K @ K.T))
//     E = solve(I + A * b, V - c * K @ W) if erases else V
//     U = b[:, None] * E
//     out = c * Q @ W + P @ U
//     W = c_C * W + (w * K).T @ U
//
// A block has some or all columns of one head's state. A warp has 16 of them, as rows of the transpose: so the result of a
// product is already in the register layout of the next product's factor. Factors that affect later states are split into three
// parts, which is as exact as float32. Products of tokens with each other take two parts. Everything else ends in bfloat16 and
// takes one.
#pragma once

#include "fragments.cuh"
#include "scan.cuh"

namespace fwp::cuda {

constexpr int kChunkTokens = 32;
constexpr int kChunkBlocks = kChunkTokens / kBlock;
constexpr int kChunkWarps = 8;  // of columns in a block, at most
constexpr int kLogMostThreads = 10;
template <int kRows>
constexpr int kMostTeams = kRows <= 64 ? 4 : 1;  // more rows fill the registers, and a state the shared memory
constexpr int kExactParts = 3;       // parts that hold all digits of float32
constexpr int kTokenParts = 2;    // parts of products of two tokens that do not affect a state

// An input, and whether it can be copied 16 bytes at a time.
struct Brought : InputArray {
  bool by_pieces = false;

  Brought() = default;
  Brought(const InputArray& from, int64_t width)
      : InputArray(from), by_pieces(in_pieces(from.data, from.type, width, from.batch, from.head, from.token)) {}
};

// Divides numbers below 2^31 by a positive number with a multiplication, because a division takes about 80 cycles. `factor` is 2^k /
// number, rounded up, with 2^(k - 32) at least `number`: so the error of a quotient is below 1 / number.
struct Divisor {
  int number = 1, shift = 32;
  uint64_t factor = uint64_t(1) << 32;

  Divisor() = default;
  Divisor(int number_) : number(number_), shift(32) {
    while (int64_t(1) << (shift - 32) < number) ++shift;
    factor = ((uint64_t(1) << shift) + number - 1) / number;
  }
  FWP_BOTH friend unsigned operator/(unsigned x, const Divisor& by) { return unsigned(x * by.factor >> by.shift); }
};

// The numbers of a grouped matrix, with what lies between its rows.
template <typename T = Bfloat16>
FWP_BOTH constexpr int grouped_size(int rows, int pitch) {
  return rows * pitch + rows / kGroupRows * kGap<T>;
}

// Allocates shared memory: in the kernel from its start, on the host from null, to count it.
struct Carver {
  unsigned char* next;

  template <typename T>
  FWP_BOTH T* take(int count) {
    T* const found = reinterpret_cast<T*>(next);
    next += (count * sizeof(T) + 15) / 16 * 16;
    return found;
  }
  FWP_BOTH Shared matrix(int rows, int columns) {
    return {take<Bfloat16>(rows * (columns + kPadding)), columns + kPadding};
  }
  FWP_BOTH Grouped<Bfloat16> grouped(int rows, int columns) {
    return {take<Bfloat16>(grouped_size(rows, columns + kPadding)), columns + kPadding};
  }
};

// Shared memory with a part for each of `count`: the teams of a relay, or chunks, of which one is filled while another is used.
template <typename Part, typename Pass>
struct Copies {
  unsigned char* begin;
  int bytes;
  const Pass& pass;

  FWP_BOTH Copies(Carver& carver, const Pass& pass_, int count) : begin(carver.next), pass(pass_) {
    Part(carver, pass);
    bytes = int(carver.next - begin);
    carver.next += (count - 1) * bytes;
  }
  FWP_DEVICE Part operator[](int n) const {
    Carver carver{begin + n * bytes};
    return Part(carver, pass);
  }
};
template <typename Stage, typename Pass>
struct Stages : Copies<Stage, Pass> {
  FWP_BOTH Stages(Carver& carver, const Pass& pass) : Copies<Stage, Pass>(carver, pass, kBuffers) {}
  FWP_DEVICE Stage operator[](int64_t n) const { return Copies<Stage, Pass>::operator[](int(n % kBuffers)); }
};

// The products of a chunk's tokens with each other. Only blocks on and below the diagonal exist: two on it, then the one below.
FWP_DEVICE int row_of_block(int b) { return b > 0 ? kBlock : 0; }
FWP_DEVICE int column_of_block(int b) { return b == 1 ? kBlock : 0; }

struct Scores {
  static constexpr int kLine = kBlock + 4;                   // of `diagonal`: a multiple of 16 bytes
  static constexpr int kDiagonal = kBlock * kLine + kBlock;  // the second block in other banks
  Shared read[kExactParts], erase[kExactParts];                        // P; -A, with the result of invert() on the diagonal
  float* diagonal;

  // The parts of each. All parts of -A are also those of an inverse.
  FWP_BOTH Scores(Carver& carver, int of_read, int of_erase) {
    for (int n = 0; n < of_read; ++n) read[n] = carver.matrix(kChunkTokens, kChunkTokens);
    for (int n = 0; n < of_erase; ++n) erase[n] = carver.matrix(kChunkTokens, kChunkTokens);
    diagonal = carver.take<float>(of_erase == kExactParts ? kChunkBlocks * kDiagonal : 0);
  }

  template <int parts>
  static FWP_DEVICE void put(const Shared* to, int row, int column, float x, float y) {
    uint32_t of_pair[parts];
    split(x, y, of_pair);
    FWP_UNROLL for (int n = 0; n < parts; ++n) to[n].put(row, column, of_pair[n]);
  }
};

// Products of the decays of a chunk's tokens. There are no divisions or logarithms, so decays may be zero.
struct Decays {
  static constexpr int kLine = kChunkTokens + 1;  // threads that each handle a token access different banks
  float *each, *products;

  FWP_BOTH Decays(Carver& carver, bool fades)
      : each(carver.take<float>(fades ? kChunkTokens : 0)), products(carver.take<float>(fades ? kChunkTokens * kLine : 0)) {}

  // F_ts for s <= t. s = -1 stands for the state before the chunk.
  FWP_DEVICE float between(int s, int t) const { return products[t * kLine + s + 1]; }
  FWP_DEVICE float from_start(int t) const { return between(-1, t); }
  FWP_DEVICE float to_end(int s) const { return between(s, kChunkTokens - 1); }
  FWP_DEVICE float total() const { return between(-1, kChunkTokens - 1); }

  // All lanes of one warp call it, each with the decay of its token.
  FWP_DEVICE void put(float decay) const {
    each[lane()] = decay;
    products[lane() * kLine + kChunkTokens] = 1;
    __syncwarp();
    float product = 1, rest = 0;  // with a rest, because an error of f would add up over the chunks
    FWP_UNROLL_BY(8) for (int t = 0; t < kChunkTokens; ++t) {
      if (t >= lane()) {
        const float next = product * each[t];
        rest = fma(rest, each[t], fma(product, each[t], -next));
        product = next;
      }
      products[t * kLine + lane()] = product + rest;
    }
  }
};

// The scalars of a token, as stored in memory. They are loaded one chunk ahead: no instruction waits for them before
// put_scalars().
struct Scalars {
  uint32_t rate = 0, decay = 0;
  bool there = false;
  char begins = 0;  // not zero: the first token of a document
};

// Numbers in the matrices of a segment: see ChunkSegments.
FWP_BOTH constexpr int64_t of_segment(const ScanSize& size) { return int64_t(size.columns + size.rows) * size.rows; }

// kRows: a multiple of 16, at least Dk. kSolves: whether the rule erases, so that E is solved for. kDecays: whether there are
// decays. kTeamLimit: teams, at most.
template <int kRows, bool kSolves, bool kDecays, int kTeamLimit = kMostTeams<kRows>>
struct ChunkPass {
  using State = Product[kRows / kBlock];  // the transpose: 16 columns of the warp, by all rows
  static constexpr bool kRates = kSolves || kDecays;
  static constexpr int kMostWarps = kChunkWarps;
  static constexpr int kMostTeams = kTeamLimit, kMostThreads = kChunkWarps * kWarp;  // of a block
  static constexpr bool kAligned = kDecays && !kSolves;  // writes are split by split_rows: nothing corrects their errors
  static constexpr bool kHasSegments = true;
  static constexpr int kWriteParts = kRates ? kExactParts : 1;  // of a write: values of the sum rule are exact in one

  ScanSize size;
  int warps;         // of columns: a power of two
  int teams = 1, log_team = kLogMostThreads;  // of so many warps, see Relay; the logarithm, base 2, of a team's threads
  Divisor slabs;     // of columns
  Divisor heads;     // of a batch
  int log_segments;  // of tokens: segments of one head run in parallel
  Brought query, key, rate, decay;

  FWP_BOTH int block_columns() const { return warps * kBlock; }
  FWP_DEVICE int team() const { return kTeamLimit > 1 ? int(threadIdx.x) >> log_team : 0; }
  // In its team, as is the warp.
  FWP_DEVICE int thread() const { return kTeamLimit > 1 ? int(threadIdx.x) & ((1 << log_team) - 1) : int(threadIdx.x); }
  FWP_DEVICE int warp() const { return thread() / kWarp; }
  FWP_DEVICE unsigned sequence() const { return blockIdx.x / slabs; }  // a segment of a head
  FWP_DEVICE int64_t head() const { return sequence() >> log_segments; }
  FWP_DEVICE unsigned slab() const { return blockIdx.x - sequence() * unsigned(slabs.number); }
  FWP_DEVICE int first_column() const { return int(slab()) * block_columns(); }
  FWP_DEVICE int own_column() const { return warp() * kBlock; }                            // the warp's first one in the block
  FWP_DEVICE int head_column() const { return first_column() + own_column(); }  // and in the head

  FWP_BOTH unsigned segments() const { return 1u << log_segments; }
  FWP_BOTH int64_t chunks() const { return (size.length + kChunkTokens - 1) / kChunkTokens; }
  // The chunks of this block's segment are begin() to end() - 1.
  FWP_DEVICE int64_t begin() const { return start_of(segment()); }
  FWP_DEVICE int64_t end() const { return start_of(segment() + 1); }
  FWP_DEVICE unsigned segment() const { return sequence() & (segments() - 1); }
  // The chunk of a block that has only one: then the slabs are chunks.
  FWP_DEVICE int64_t chunk() const { return slab(); }
  FWP_DEVICE int64_t start_of(unsigned segment) const { return segment * chunks() >> log_segments; }

  // The ends of a segment are its final state from an empty start state, and its transition. The transition is what the segment
  // makes of an identity matrix, in columns after those of the values. In reverse, gradients have the transposed transition.
  FWP_BOTH int value_columns() const { return (size.columns + kBlock - 1) / kBlock * kBlock; }
  FWP_BOTH int ends_columns() const { return value_columns() + kRows; }
  FWP_DEVICE int count(int64_t n) const {
    const int64_t left = size.length - n * kChunkTokens;
    return left < kChunkTokens ? int(left) : kChunkTokens;
  }
  FWP_DEVICE int64_t first_token(int64_t n) const { return head() * size.length + n * kChunkTokens; }

  // The start of each input of this block's head, and then of the marks of documents. They are kept in shared memory: as
  // pointers they would take too many registers.
  template <int inputs>
  FWP_DEVICE void put_starts(const Brought* const (&from)[inputs], const char** starts) const {
    const int64_t b = head() / size.heads_per_batch, h = head() % size.heads_per_batch;
    if (threadIdx.x == 0) {
      FWP_UNROLL for (int i = 0; i < inputs; ++i)
        starts[i] = static_cast<const char*>(from[i]->data) +
                    (b * from[i]->batch + h * from[i]->head) * bytes_of(from[i]->type);
      starts[inputs] = size.begins ? reinterpret_cast<const char*>(size.begins + b * size.length) : nullptr;
    }
    __syncthreads();
  }

  // Starts to copy `width` numbers of each token of chunk n: from `from_column` on, with zeros beyond the last token and `limit`,
  // to `to_column` of `to`. This thread takes pieces `thread`, `thread` + `threads`, ...
  template <typename To>
  FWP_DEVICE void bring(const Brought& from, const char* start, int64_t n, int from_column, int limit, int width, const To& to,
                        int to_column, int thread, int threads) const {
    using T = typename To::Number;
    constexpr int per_piece = kOf16Bytes<T>;
    const T* const data = in_global_memory(reinterpret_cast<const T*>(start)) + n * kChunkTokens * from.token + from_column;
    const int tokens = from.data ? count(n) : 0, pieces = width / per_piece;
    FWP_UNROLL_BY(1) for (int at = thread; at < kChunkTokens * pieces; at += threads) {
      const int t = at / pieces, i = at % pieces * per_piece;
      T* const target = to.at(t, to_column + i);
      if (from.by_pieces) {
        const bool inside = t < tokens && from_column + i < limit;
        copy_later(target, inside ? data + t * from.token + i : data, inside);
      } else {
        Wide<T> piece;  // no load waits for another
        FWP_UNROLL for (int e = 0; e < per_piece; ++e)
          piece.x[e] = t < tokens && from_column + i + e < limit ? data[t * from.token + i + e] : T{};
        *reinterpret_cast<Wide<T>*>(target) = piece;
      }
    }
  }
  template <typename To>
  FWP_DEVICE void bring_keys(const Brought& from, const char* start, int64_t n, const To& to) const {
    bring(from, start, n, 0, size.rows, kRows, to, 0, thread(), warps * kWarp);
  }
  // Each warp copies its own columns.
  template <typename To>
  FWP_DEVICE void bring_values(const Brought& from, const char* start, int64_t n, const To& to) const {
    bring(from, start, n, head_column(), size.columns, kBlock, to, own_column(), lane(), kWarp);
  }

  // Loads the scalars of token t of chunk n, if there is one: of a token for each lane of one warp. `decays` may be null.
  FWP_DEVICE Scalars ask(const char* rates, const char* decays, const char* documents, int64_t n, int t) const {
    Scalars asked;
    asked.there = t < count(n);
    if (!asked.there) return asked;
    const int64_t token = n * kChunkTokens + t;
    if constexpr (kRates) asked.rate = raw(rate, rates, token);
    if (kDecays && decays) asked.decay = raw(decay, decays, token);
    if (kDecays && documents) asked.begins = in_global_memory(documents)[token];
    return asked;
  }
  FWP_DEVICE static uint32_t raw(const Brought& from, const char* start, int64_t token) {
    const int64_t at = token * from.token;
    if (from.type == Type::float32) return in_global_memory(reinterpret_cast<const uint32_t*>(start))[at];
    return in_global_memory(reinterpret_cast<const uint16_t*>(start))[at];
  }
  // Whether a document begins at this thread's token of chunk n.
  FWP_DEVICE bool begins(const char* documents, int64_t n) const {
    return documents && thread() < count(n) && in_global_memory(documents)[n * kChunkTokens + thread()];
  }
  // This lane's part of the transposed errors of block t, directly from global memory: no other lane needs it.
  FWP_DEVICE void load_errors(const char* start, int64_t n, int t, Product& to) const {
    const float* const data = in_global_memory(reinterpret_cast<const float*>(start)) + n * kChunkTokens * size.columns;
    const int tokens = count(n), own = head_column();
    for_elements(to, [&](int j, int s, float& x) {
      const int token = t * kBlock + s, column = own + j;
      x = token < tokens && column < size.columns ? data[token * size.columns + column] : 0;
    });
  }
  FWP_DEVICE void store_errors(float* to, int64_t n, int t, Product& errors) const {
    if (!to) return;
    float* const data = to + first_token(n) * size.columns;
    const int tokens = count(n), own = head_column();
    for_elements(errors, [&](int j, int s, float x) {
      const int token = t * kBlock + s, column = own + j;
      if (token < tokens && column < size.columns) data[token * size.columns + column] = x;
    });
  }
  // To shared memory, by the first warp. Beyond the last token, rate 0 and decay 1 change nothing.
  template <typename Stage>
  FWP_DEVICE void put_scalars(const Scalars& asked, const Stage& to) const {
    if (!kRates || warp() > 0) return;
    to.rate[lane()] = number_of(rate.type, asked.rate);
    if constexpr (kDecays) to.decays.put(!asked.there ? 1 : asked.begins ? 0 : number_of(decay.type, asked.decay));
  }

  // read = rows of `query` from `row` on times rows of `other` from `column` on. The same with `key` for `erase`, if the rule
  // erases.
  template <int unrolled, bool reads = true>
  FWP_DEVICE static void multiply_rows(const Shared& query, const Shared& key, const Shared& other, int width, int row,
                                       int column, Product& read, Product& erase) {
    clear(read);
    clear(erase);
    FWP_UNROLL_BY(unrolled) for (int i = 0; i < width; i += kBlock) {
      Factor left, right;
      other.right_transposed(column, i, right);
      if constexpr (reads) {
        query.left(row, i, left);
        multiply(read, left, right);
      }
      if constexpr (kSolves) {
        key.left(row, i, left);
        multiply(erase, left, right);
      }
    }
  }

  // P, and -A, scaled. The result of invert() replaces the diagonal blocks of -A. The warps share the blocks.
  template <int of_read, typename Scaled>
  FWP_DEVICE void make_scores(const Shared& query, const Shared& key, const Decays& decays, const Scores& to,
                              Scaled scaled) const {
    FWP_UNROLL_BY(1) for (int b = warp(); b < 3; b += warps) {
      const int row = row_of_block(b), column = column_of_block(b);
      const bool diagonal = row == column;
      Product read, erase;
      multiply_rows<2, (of_read > 0)>(query, key, key, kRows, row, column, read, erase);
      if constexpr (of_read > 0) {
        fade_scores(decays, row, column, read);
        for_pairs(read, [&](int t, int s, float x, float y) {
          if (diagonal) x = s <= t ? x : 0, y = s + 1 <= t ? y : 0;
          Scores::put<of_read>(to.read, row + t, column + s, x, y);
        });
      }
      if constexpr (kSolves) fade_scores(decays, row, column, erase);
      if constexpr (kSolves)
        for_pairs(erase, [&](int t, int s, float x, float y) {
          if (!diagonal) return Scores::put<kExactParts>(to.erase, row + t, column + s, -x, -y);
          float* const at = to.diagonal + b * Scores::kDiagonal + t * Scores::kLine + s;
          at[0] = scaled(row + t, row + s, x), at[1] = scaled(row + t, row + s + 1, y);
        });
    }
    if constexpr (kSolves) {
      __syncwarp();
      const int b = lane() / kBlock;
      if (b % warps == warp()) invert(to, b, lane() % kBlock);
    }
  }

  // Multiply by F, for tokens from `row` and from `column` on. Above the diagonal the factor is one.
  FWP_DEVICE static void fade_scores(const Decays& decays, int row, int column, Product& x) {
    if constexpr (kDecays)
      for_elements(x, [&](int t, int s, float& score) { score *= decays.between(column + s, row + t); });
  }
  // Multiply the column of each token, from `first` on, by fades(token).
  template <typename Of>
  FWP_DEVICE static void fade_columns(int first, Product& x, Of fades) {
    if constexpr (kDecays) for_elements(x, [&](int, int s, float& number) { number *= fades(first + s); });
  }

  // Column c of the inverse of 1 + block b of the diagonal, but without the identity, which is added exactly. Only the part of
  // the block below the diagonal is read.
  FWP_DEVICE static void invert(const Scores& scores, int b, int c) {
    const float* const block = scores.diagonal + b * Scores::kDiagonal;
    float x[kBlock];
    FWP_UNROLL for (int t = 0; t < kBlock; ++t) {
      x[t] = t == c ? 1.f : 0.f;
      const Piece<float>* const row = reinterpret_cast<const Piece<float>*>(block + t * Scores::kLine);
      FWP_UNROLL for (int p = 0; kPiece * p < t; ++p) {
        const Piece<float> piece = row[p];
        FWP_UNROLL for (int s = kPiece * p; s < kPiece * (p + 1); ++s)
          if (s < t) x[t] = fma(-piece.x[s - kPiece * p], x[s], x[t]);
      }
    }
    FWP_UNROLL for (int t = 0; t < kBlock; ++t) {  // after the last load: no load waits for a store
      for_parts<kExactParts>(t == c ? 0.f : x[t], [&](int n, Bfloat16 part) {
        *scores.erase[n].at(b * kBlock + t, b * kBlock + c) = part;
      });
    }
  }

  template <int blocks>
  FWP_DEVICE static void split_writes(const Product (&x)[blocks], Factor (&to)[blocks][kExactParts]) {
    if constexpr (kAligned)
      split_rows(x, to);
    else
      FWP_UNROLL for (int t = 0; t < blocks; ++t) split(x[t], to[t]);
  }

  FWP_DEVICE static void fade(State& state, float factor) {
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i)
      for_elements(state[i], [&](int, int, float& x) { x *= factor; });
  }

  // state += (or -=) the columns (16 x 16 tokens each, in parts) times the rows of those tokens, from block `block` on.
  template <bool minus, int blocks, int parts>
  FWP_DEVICE static void write(State& state, const Factor (&columns)[blocks][parts], const Shared& rows, int block = 0) {
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i) {
      Factor right[blocks];
      FWP_UNROLL for (int t = 0; t < blocks; ++t) rows.right((block + t) * kBlock, i * kBlock, right[t]);
      Product product;
      clear(product);
      FWP_UNROLL for (int n = parts; n-- > 0;) {
        FWP_UNROLL for (int t = 0; t < blocks; ++t) multiply(product, columns[t][n], right[t]);
        if (n > int(kAligned)) continue;  // otherwise the small parts are added first
        minus ? subtract(state[i], product) : add(state[i], product);
        clear(product);
      }
    }
  }

  // Calls f(inside, row, column, x) for the elements of the state that this lane holds.
  template <typename F>
  FWP_DEVICE void for_state(State& state, F f) const {
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i)
      for_elements(state[i], [&](int j, int r, float& x) {
        const int row = i * kBlock + r, column = head_column() + j;
        f(row < size.rows && column < size.columns, row, column, x);
      });
  }
  FWP_DEVICE void load(const Matrices<const float>& from, State& state) const {
    for_state(state, [&](bool inside, int row, int column, float& x) {
      x = from.data && inside ? from.data[int64_t(sequence()) * from.head + row * from.row + column * from.column] : 0;
    });
  }
  // To matrix `index` of contiguous ones, if they are wanted.
  FWP_DEVICE void store(const State& state, float* matrices, int64_t index) const {
    if (!matrices) return;
    const int column = head_column() + line();
    int rows[2];  // of this lane's columns that exist
    FWP_UNROLL for (int r = 0; r < 2; ++r) rows[r] = column + 8 * r < size.columns ? size.rows - pair() : 0;
    float* const to = matrices + (index * size.rows + pair()) * size.columns + column;
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i)
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int e = 0; e < 2; ++e) {
          const int row = i * kBlock + 8 * h + e;
          FWP_UNROLL for (int r = 0; r < 2; ++r)
            if (row < rows[r]) to[row * size.columns + 8 * r] = state[i][h][2 * r + e];
        }
  }
  FWP_DEVICE void load_identity(State& state) const {
    for_state(state, [&](bool, int row, int column, float& x) { x = column - value_columns() == row ? 1 : 0; });
  }
  // To the matrices of a segment: see ChunkSegments.
  FWP_DEVICE void store_ends(const State& state, float* ends) const {
    float* const to = ends + sequence() * of_segment(size) + pair();
    FWP_UNROLL for (int r = 0; r < 2; ++r) {
      const int column = head_column() + line() + 8 * r, of_transition = column - value_columns();
      const bool wanted = of_transition < 0 ? column < size.columns : of_transition < size.rows;
      const int rows = wanted ? size.rows - pair() : 0;
      float* const of_column = to + (of_transition < 0 ? column : size.columns + of_transition) * size.rows;
      FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i)
        FWP_UNROLL for (int h = 0; h < 2; ++h)
          FWP_UNROLL for (int e = 0; e < 2; ++e) {
            const int row = i * kBlock + 8 * h + e;
            if (row < rows) of_column[row] = state[i][h][2 * r + e];
          }
    }
  }

  // Stores the transposed results of this warp's columns. They go through shared memory that only this warp uses.
  template <typename Through>
  FWP_DEVICE void store_results(const OutputArray& to, int64_t n, Product (&results)[kChunkBlocks],
                                const Through& through) const {
    __syncwarp();
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      for_elements(results[t], [&](int j, int s, float x) { through.put(t * kBlock + s, own_column() + j, x); });
    __syncwarp();
    store_tokens(to, n, through, own_column(), kBlock, head_column(), size.columns, lane(), kWarp);
  }

  // Stores one number per token: the sum of those of all warps, (warps, 32). The first warp does it.
  FWP_DEVICE void store_sums(const OutputArray& to, int64_t n, const float* parts, bool is_zero = false) const {
    if (warp() > 0) return;
    float sum = 0;
    FWP_UNROLL_BY(1) for (int w = 0; w < warps; ++w) sum += parts[w * kChunkTokens + lane()];
    store_scalar(to, n, is_zero ? 0 : sum);
  }

  // Stores `width` numbers of each token of chunk n from shared memory, 16 bytes at a time if possible: from `column` of `from`,
  // to `at` of `limit` numbers per token. This thread takes pieces `thread`, `thread` + `threads`, ...
  template <typename From>
  FWP_DEVICE void store_tokens(const OutputArray& to, int64_t n, const From& from, int column, int width, int at, int limit,
                               int thread, int threads) const {
    if (!to.data) return;
    using T = typename From::Number;
    constexpr int per_piece = 16 / sizeof(T);
    const int pieces = width / per_piece;
    const bool by_pieces = limit % per_piece == 0 && reinterpret_cast<uintptr_t>(to.data) % 16 == 0;
    int64_t first = first_token(n);
    if (to.tokens_first) {
      const int64_t b = unsigned(head()) / heads;
      first = (b * size.length + n * kChunkTokens) * heads.number + head() - b * heads.number;
    }
    T* const data = static_cast<T*>(to.data) + first * limit + at;
    const int tokens = count(n), stride = to.tokens_first ? heads.number * limit : limit;
    FWP_UNROLL_BY(1) for (int piece = thread; piece < kChunkTokens * pieces; piece += threads) {
      const int t = piece / pieces, i = piece % pieces * per_piece;
      if (t >= tokens || at + i >= limit) continue;
      T* const target = data + t * stride + i;
      const T* const source = from.at(t, column + i);
      if (by_pieces)
        *reinterpret_cast<Piece<float>*>(target) = *reinterpret_cast<const Piece<float>*>(source);
      else
        FWP_UNROLL_BY(1) for (int e = 0; e < per_piece && at + i + e < limit; ++e) target[e] = source[e];
    }
  }
  // Stores one number per token, held by lane t of the first warp.
  FWP_DEVICE void store_scalar(const OutputArray& to, int64_t n, float x) const {
    const int t = thread();
    if (!to.data || t >= count(n)) return;
    with_element<float>(to.type, [&](auto* number) {
      round_to(x, static_cast<decltype(number)>(to.data)[first_token(n) + t]);
    });
  }
};

}  // namespace fwp::cuda
