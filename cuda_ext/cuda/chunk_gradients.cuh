// The gradients of queries, keys and decays, without decays or with decays by head. A block has one chunk: it needs the state W
// before it, the gradient G of the state after it, and D (see chunk_backward.cuh).
//
//     d_P = F d_out U^T up to its diagonal      d_A = -F D U^T below it
//     d_Q = c d_out W^T + d_P K                 d_K = w U G^T - c D W^T + d_P^T Q + (d_A + d_A^T) K
//
// Every F_ts, c_t, w_s and c_C contains the decays of the tokens that it spans as factors: see DecayGradient.
#pragma once

#include "chunk_backward.cuh"

namespace fwp::cuda {

// The gradient of the decays of a chunk. Token t receives F_ts m_ts from token s < t; m_ts is the derivative of the loss in
// this product. The state before the chunk counts as a token before the first. The last token also reads the state after the
// chunk. The decay a_r is a factor of the products with s < r <= t, so
//
//     d_a_r = the sum over t >= r of F_tr n_tr      n_tr = the sum over s < r of F_(r-1)s m_ts = a_(r-1) n_t(r-1) + m_t(r-1)
struct DecayGradient {
  static constexpr int kLine = kChunkTokens + 1;
  float* parts;              // m_ts in line t, from s = -1 on
  float *of_reads, *of_writes, *of_state;  // sums over some columns for each token, or over some elements of the state

  FWP_BOTH DecayGradient(Carver& carver, int rows, int warps, bool fades)
      : parts(carver.take<float>(fades ? kChunkTokens * kLine : 0)),
        of_reads(carver.take<float>(fades ? rows / kBlock * kChunkTokens : 0)),
        of_writes(carver.take<float>(fades ? rows / kBlock * kChunkTokens : 0)),
        of_state(carver.take<float>(fades ? warps : 0)) {}

  FWP_DEVICE float& part(int s, int t) const { return parts[t * kLine + s + 1]; }

  // Returns, in each lane, the gradient of its token's decay, from sums in `blocks` blocks of rows. One whole warp calls it.
  FWP_DEVICE float find(const Decays& decays, int blocks, int warps) const {
    const int t = lane(), last = kChunkTokens - 1;
    float read = 0, write = 0;
    FWP_UNROLL_BY(1) for (int i = 0; i < blocks; ++i) {
      read += of_reads[i * kChunkTokens + t];
      write += of_writes[i * kChunkTokens + t];
    }
    part(-1, t) = read;
    __syncwarp();
    if (t < last) part(t, last) += write;
    if (t == last)
      FWP_UNROLL_BY(1) for (int w = 0; w < warps; ++w) part(-1, last) += of_state[w];
    __syncwarp();
    float z = 0;
    FWP_UNROLL_BY(4) for (int r = 0; r < kChunkTokens; ++r) {
      float& y = part(r - 1, t);
      if (r <= t) z = r > 0 ? fma(decays.each[r - 1], z, y) : y;
      y = r <= t ? decays.between(r, t) * z : 0;
    }
    __syncwarp();
    float sum = 0;
    FWP_UNROLL_BY(4) for (int reader = 0; reader < kChunkTokens; ++reader) sum += part(t - 1, reader);
    return sum;
  }
};

// The state before a chunk, in shared memory. Without decays it is the transpose in bfloat16. With decays it is the state itself
// in float32, because large terms cancel in the gradient of a decay.
template <int kRows, bool kDecays>
struct StateBefore {
  static constexpr int kStateParts = kDecays ? 2 : 1;
  Shared rounded;
  float* exact;
  int pitch;

  FWP_BOTH StateBefore(Carver& carver, int columns)
      : rounded(carver.matrix(kDecays ? 0 : columns, kRows)),
        exact(carver.take<float>(kDecays ? kRows * (columns + kPadding) : 0)), pitch(columns + kPadding) {}

  // 16 columns by 16 rows, from these on, as the right factor of a product.
  FWP_DEVICE void right(int column, int row, Factor (&to)[kStateParts]) const {
    if constexpr (kDecays) {
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int i = 0; i < 2; ++i) {
          const float* const from = exact + (row + 8 * h + line()) * pitch + column + 8 * i + pair();
          const Numbers<float, 2> x = *reinterpret_cast<const Numbers<float, 2>*>(from);
          uint32_t parts[kStateParts];
          split(x.x[0], x.x[1], parts);
          FWP_UNROLL for (int m = 0; m < kStateParts; ++m) to[m][2 * h + i] = parts[m];
        }
    } else {
      rounded.right(column, row, to[0]);
    }
  }
};

template <int kRows, bool kErasesKey, bool kDecays>
struct ChunkGradients : ChunkPass<kRows, kErasesKey, kDecays, 1> {
  using Base = ChunkPass<kRows, kErasesKey, kDecays, 1>;
  using Base::kRates;

  Brought d_out, value, d;  // value: the errors, if the rule erases
  ChunkMatrices<kRows, Bfloat16> states;  // of a rule without decays
  const float *initial, *kept;            // of a rule with decays: the states before the sequence and after whole chunks
  StateGradients<kRows, kDecays> gradients;
  OutputArray d_q, d_k, d_decay;

  // Of put_starts(), in its order.
  enum { kQueryStart, kKeyStart, kDOutStart, kDStart, kValueStart, kRateStart, kDecayStart, kDocuments, kStarts };
  struct Memory {
    const char** starts;
    Shared query, key, d_out, d, value, write;  // write: U, the value itself if it has no rate
    float* rate;
    Decays decays;
    Scores scores;  // d_P and d_A
    StateBefore<kRows, kDecays> state;
    Shared g;
    DecayGradient d_decay;

    FWP_BOTH Memory(Carver& carver, const ChunkGradients& pass)
        : starts(carver.take<const char*>(kStarts)), query(carver.matrix(kChunkTokens, kRows)),
          key(carver.matrix(kChunkTokens, kRows)), d_out(carver.matrix(kChunkTokens, pass.block_columns())),
          d(carver.matrix(kErasesKey ? kChunkTokens : 0, pass.block_columns())),
          value(carver.matrix(kErasesKey ? 0 : kChunkTokens, pass.block_columns())),
          write(kRates ? carver.matrix(kChunkTokens, pass.block_columns()) : value),
          rate(carver.take<float>(kChunkTokens)), decays(carver, kDecays),
          scores(carver, kTokenParts, kErasesKey ? kTokenParts : 0),
          state(carver, pass.block_columns()), g(carver.matrix(pass.block_columns(), kRows)),
          d_decay(carver, kRows, pass.warps, kDecays) {}
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    const int64_t n = this->chunk();
    load(n, memory);
    __syncthreads();
    if constexpr (kRates) put_writes(n, memory);
    if constexpr (kDecays) load_gradient(n, memory);
    __syncthreads();
    make_d_scores(memory);
    __syncthreads();
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < kChunkBlocks * kRows / kBlock; b += this->warps)
      store_gradients(n, b % kChunkBlocks, b / kChunkBlocks * kBlock, memory);
    if constexpr (kDecays) {
      __syncthreads();
      if (this->warp() > 0) return;
      const float found = memory.d_decay.find(memory.decays, kRows / kBlock, this->warps);
      this->store_scalar(d_decay, n, this->begins(memory.starts[kDocuments], n) ? 0 : found);
    }
  }

 private:
  FWP_DEVICE void load(int64_t n, const Memory& memory) const {
    this->put_starts({&this->query, &this->key, &d_out, &d, &value, &this->rate, &this->decay}, memory.starts);
    this->bring_keys(this->query, memory.starts[kQueryStart], n, memory.query);
    this->bring_keys(this->key, memory.starts[kKeyStart], n, memory.key);
    bring_columns(d_out, memory.starts[kDOutStart], n, memory.d_out);
    if constexpr (kErasesKey) bring_columns(d, memory.starts[kDStart], n, memory.d);
    if constexpr (!kErasesKey) bring_columns(value, memory.starts[kValueStart], n, memory.value);
    const int64_t at = this->head() * this->chunks() + n;
    if constexpr (kDecays) {
      const int64_t index = n > 0 ? this->head() * (this->size.length / kChunkTokens) + n - 1 : this->head();
      const float* const states = n > 0 ? kept : initial;
      fill_exact(memory.state, states ? states + index * this->size.rows * this->size.columns : nullptr);
    } else {
      bring_matrix(states, at, memory.state.rounded);
      bring_matrix(gradients, at, memory.g);
    }
    commit_copies();
    const char* const* const starts = memory.starts;
    this->put_scalars(this->ask(starts[kRateStart], starts[kDecayStart], starts[kDocuments], n, this->thread()), memory);
    wait_copies<0>();
  }
  FWP_DEVICE void bring_columns(const Brought& from, const char* start, int64_t n, const Shared& to) const {
    this->bring(from, start, n, 0, this->size.columns, this->block_columns(), to, 0, this->thread(), this->warps * kWarp);
  }
  FWP_DEVICE void bring_matrix(const ChunkMatrices<kRows, Bfloat16>& from, int64_t at, const Shared& to) const {
    constexpr int per_piece = 8, pieces = kRows / per_piece;
    const Bfloat16* const data = from.of_warp(at, 0);
    FWP_UNROLL_BY(1) for (int i = this->thread(); i < this->block_columns() * pieces; i += this->warps * kWarp)
      copy_later(to.at(i / pieces, i % pieces * per_piece), data + i * per_piece, true);
  }
  FWP_DEVICE void fill_exact(const StateBefore<kRows, kDecays>& to, const float* from) const {
    constexpr int per_piece = 4, pieces = kBlock / per_piece;  // each warp copies its own columns
    const int column = this->own_column() + lane() % pieces * per_piece, columns = this->size.columns;
    const bool by_pieces = from && columns % per_piece == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
    FWP_UNROLL_BY(1) for (int row = lane() / pieces; row < kRows; row += kWarp / pieces) {
      const bool inside = row < this->size.rows && column < columns;
      float* const target = to.exact + row * to.pitch + column;
      if (by_pieces)
        copy_later(target, inside ? from + row * columns + column : from, inside);
      else
        FWP_UNROLL_BY(1) for (int e = 0; e < per_piece; ++e)
          target[e] = from && inside && column + e < columns ? from[row * columns + column + e] : 0;
    }
  }
  // b E, or b V.
  FWP_DEVICE void put_writes(int64_t n, const Memory& memory) const {
    const float* const errors = in_global_memory(reinterpret_cast<const float*>(memory.starts[kValueStart])) +
                                n * kChunkTokens * this->size.columns;
    const int tokens = this->count(n), columns = this->size.columns, width = this->block_columns();
    FWP_UNROLL_BY(4) for (int i = this->thread(); i < kChunkTokens * width; i += this->warps * kWarp) {
      const int t = i / width, j = i % width;
      float x;
      if constexpr (kErasesKey)
        x = t < tokens && j < columns ? errors[t * columns + j] : 0;
      else
        x = number(*memory.value.at(t, j));
      memory.write.put(t, j, memory.rate[t] * x);
    }
  }
  FWP_DEVICE void load_gradient(int64_t n, const Memory& memory) const {
    typename Base::State g;
    gradients.load(this->head() * this->chunks() + n, this->warp(), g);
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i)
      for_pairs(g[i], [&](int j, int r, float x, float y) {
        memory.g.put(this->own_column() + j, i * kBlock + r, pair_of(x, y));
      });
    sum_state(memory, g);
  }

  // <G, W> over this warp's columns.
  FWP_DEVICE void sum_state(const Memory& memory, const typename Base::State& g) const {
    const StateBefore<kRows, kDecays>& state = memory.state;
    const float* const from = state.exact + pair() * state.pitch + this->own_column() + line();
    float sum = 0;
    FWP_UNROLL for (int i = 0; i < kRows / kBlock; ++i)
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int e = 0; e < 2; ++e)
          FWP_UNROLL for (int r = 0; r < 2; ++r)
            sum = fma(g[i][h][2 * r + e], from[(i * kBlock + 8 * h + e) * state.pitch + 8 * r], sum);
    FWP_UNROLL for (int distance = 1; distance < kWarp; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane() == 0) memory.d_decay.of_state[this->warp()] = sum;
  }

  FWP_DEVICE void make_d_scores(const Memory& memory) const {
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < 3; b += this->warps) {
      const int row = row_of_block(b), column = column_of_block(b);
      Product d_read, d_erase;
      this->template multiply_rows<1>(memory.d_out, memory.d, memory.write, this->block_columns(), row, column,
                                      d_read, d_erase);
      if constexpr (kDecays) {
        put_decay_parts(memory, row, column, d_read, d_erase);
        this->fade_scores(memory.decays, row, column, d_read);
        this->fade_scores(memory.decays, row, column, d_erase);
      }
      const bool diagonal = row == column;
      for_pairs(d_read, [&](int t, int s, float x, float y) {
        if (diagonal) x = s <= t ? x : 0, y = s + 1 <= t ? y : 0;
        Scores::put<kTokenParts>(memory.scores.read, row + t, column + s, x, y);
      });
      if constexpr (kErasesKey)
        for_pairs(d_erase, [&](int t, int s, float x, float y) {
          if (diagonal) x = s < t ? x : 0, y = s + 1 < t ? y : 0;
          Scores::put<kTokenParts>(memory.scores.erase, row + t, column + s, -x, -y);
        });
    }
  }

  // Stores the derivative of the loss in each product of two tokens, without the decays between them.
  FWP_DEVICE void put_decay_parts(const Memory& memory, int row, int column, const Product& d_read,
                                  const Product& d_erase) const {
    Product read, erase;
    this->template multiply_rows<1>(memory.query, memory.key, memory.key, kRows, row, column, read, erase);
    FWP_UNROLL for (int h = 0; h < 2; ++h)
      FWP_UNROLL for (int i = 0; i < 4; ++i) {
        const int t = row + line() + i / 2 * 8, s = column + 8 * h + pair() + i % 2;
        float part = d_read[h][i] * read[h][i];
        if constexpr (kErasesKey) part = fma(-d_erase[h][i], erase[h][i], part);
        if (s < t) memory.d_decay.part(s, t) = part;
      }
  }

  // d_q and d_k of token block t, for 16 numbers from `column` on.
  FWP_DEVICE void store_gradients(int64_t n, int t, int column, const Memory& memory) const {
    const Scores& scores = memory.scores;  // d_P and d_A by now
    const int row = t * kBlock;
    Product of_query, of_key, erased;
    clear(of_query);
    clear(of_key);
    clear(erased);
    Factor left, right;
    FWP_UNROLL_BY(1) for (int j = 0; j < this->block_columns(); j += kBlock) {
      Factor state[StateBefore<kRows, kDecays>::kStateParts];
      memory.state.right(j, column, state);
      memory.d_out.left(row, j, left);
      multiply(of_query, left, state);
      if constexpr (kErasesKey) {
        memory.d.left(row, j, left);
        multiply(erased, left, state);
      }
      memory.g.right(j, column, right);
      memory.write.left(row, j, left);
      multiply(of_key, left, right);
    }
    if constexpr (kDecays) {
      const Decays& decays = memory.decays;
      sum_columns(of_query, erased, of_key, t, column, memory);
      fade_rows(row, of_query, [&](int token) { return decays.from_start(token); });
      fade_rows(row, erased, [&](int token) { return decays.from_start(token); });
      fade_rows(row, of_key, [&](int token) { return decays.to_end(token); });
    }
    FWP_UNROLL for (int s = 0; s < kChunkBlocks; ++s) {
      Factor key, query;
      memory.key.right(s * kBlock, column, key);
      memory.query.right(s * kBlock, column, query);
      FWP_UNROLL for (int m = kTokenParts; m-- > 0;) {
        if (s <= t) {
          scores.read[m].left(row, s * kBlock, left);
          multiply(of_query, left, key);
          if constexpr (kErasesKey) {
            scores.erase[m].left(row, s * kBlock, left);
            multiply(of_key, left, key);
          }
        }
        if (s >= t) {
          scores.read[m].left_transposed(s * kBlock, row, left);
          multiply(of_key, left, query);
          if constexpr (kErasesKey) {
            scores.erase[m].left_transposed(s * kBlock, row, left);
            multiply(of_key, left, key);
          }
        }
      }
    }
    if constexpr (kErasesKey) subtract(of_key, erased);
    store_keys(d_q, n, row, column, of_query);
    store_keys(d_k, n, row, column, of_key);
  }

  template <typename Of>
  FWP_DEVICE static void fade_rows(int first, Product& x, Of fades) {
    for_elements(x, [&](int t, int, float& number) { number *= fades(first + t); });
  }

  // For token block t and 16 numbers of the key from `column` on: q d_Q - k d_K where a token reads, k d_K where it writes.
  FWP_DEVICE static void sum_columns(const Product& of_query, const Product& erased, const Product& of_key, int t, int column,
                                     const Memory& memory) {
    FWP_UNROLL for (int r = 0; r < 2; ++r) {
      const int token = t * kBlock + line() + 8 * r;
      float reads = 0, writes = 0;
      FWP_UNROLL for (int h = 0; h < 2; ++h) {
        const uint32_t q = memory.query.get(token, column + 8 * h + pair()), k = memory.key.get(token, column + 8 * h + pair());
        const int i = 2 * r;
        reads = fma(low(q), of_query[h][i], fma(high(q), of_query[h][i + 1], reads));
        if constexpr (kErasesKey) reads -= fma(low(k), erased[h][i], high(k) * erased[h][i + 1]);
        writes = fma(low(k), of_key[h][i], fma(high(k), of_key[h][i + 1], writes));
      }
      FWP_UNROLL for (int distance = 1; distance < 4; distance *= 2) {
        reads += __shfl_xor_sync(0xffffffffu, reads, distance);
        writes += __shfl_xor_sync(0xffffffffu, writes, distance);
      }
      if (pair() > 0) continue;
      memory.d_decay.of_reads[column / kBlock * kChunkTokens + token] = reads;
      memory.d_decay.of_writes[column / kBlock * kChunkTokens + token] = writes;
    }
  }

  FWP_DEVICE void store_keys(const OutputArray& to, int64_t n, int row, int column, Product& x) const {
    if (!to.data) return;
    Bfloat16* const data = static_cast<Bfloat16*>(to.data) + this->first_token(n) * this->size.rows;
    const int tokens = this->count(n);
    for_pairs(x, [&](int t, int i, float a, float b) {
      const int token = row + t, at = column + i;
      if (token >= tokens || at >= this->size.rows) return;
      Bfloat16* const target = data + token * this->size.rows + at;
      if (this->size.rows % 2 == 0) {
        *reinterpret_cast<uint32_t*>(target) = pair_of(a, b);
      } else {
        round_to(a, target[0]);
        if (at + 1 < this->size.rows) round_to(b, target[1]);
      }
    });
  }
};

}  // namespace fwp::cuda
