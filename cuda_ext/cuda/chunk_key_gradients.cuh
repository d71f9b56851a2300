// The gradients of queries, keys, rates and decays of rules with decays by key, for a chunk, from the state S before it and the
// gradient G after it. A block has one chunk, a warp 16 numbers of its keys. With K for b K in the terms of what is written, and
// without erasing V for E,
//
//     dP = dO E^T on and below its diagonal          dA = -D E^T below its diagonal
//     dQ = c (dO S^T) + dP (F K)                     of the erasing keys: -c (D S^T) + dA (F K)
//     dK = w (E G^T) + dP^T (F Q) + dA^T (F K)       df = the sums over the rows of G * S
//
// A erases with -K what P reads with Q, and D stands for dO. So the terms of dA are those of dP, computed again for other tokens.
//
// As in chunk_keys.cuh, the terms with F are products of matrices between groups, for each h. One product Z gives both. In an odd
// block, Z_t is the sum over s of dP_ts w_s k_s: c_t Z_t is a term of dQ_t, and q_t Z_t is the gradient of c_t. In an even block,
// Z_s is the sum over t of dP_ts c_t q_t, likewise for dK_s and w_s. The gradients of all c and w, which are products of decays,
// give those of the decays, step by step in reverse and without divisions.
#pragma once

#include "chunk_key_scores.cuh"

namespace fwp::cuda {

template <int kRows, bool kErases>
struct ChunkKeyGradients : ChunkKeyPass<kRows, kErases> {
  using Pass = ChunkKeyPass<kRows, kErases>;
  static constexpr int kWarps = kRows / kBlock;

  Brought value, d_out, d_value;  // value: E, or V in bfloat16; d_value: D
  const float *initial, *kept, *gradients;  // the states before chunk 0 and after each whole one; G for each chunk
  bool in_pairs;  // whether two numbers of a state can be loaded at once
  Output d_q, d_k, d_rate, d_decay;

  static constexpr int kGroupSize = kSpan * kSpan + kSpan;  // groups in different banks

  // 32 x 16 numbers of one warp: as factors, or for an exchange between lanes.
  union Scratch {
    Bfloat16 factors[kOfTokens][kScaledSize];
    float numbers[kChunkTokens][kBlock + 2];
  };
  struct Memory {
    const char** starts;
    KeyTokens<kRows> tokens;
    Shared value, d_out, d_value;
    Shared d_scores[kOfTokens];  // dP or dA in parts, with its transpose above the diagonal
    float *in_group, *d_rate;    // dP_ts or dA_ts of each group at (s, t); (warps, 32)
    Scratch* scratch;

    FWP_BOTH Memory(Carver& carver, const ChunkKeyGradients& pass)
        : starts(carver.take<const char*>(8)), tokens(carver), value(carver.matrix(kChunkTokens, pass.value_columns())),
          d_out(carver.matrix(kChunkTokens, pass.value_columns())),
          d_value(carver.matrix(kErases ? kChunkTokens : 0, pass.value_columns())),
          in_group(carver.take<float>(kChunkTokens / kSpan * kGroupSize)),
          d_rate(carver.take<float>(kWarps * kChunkTokens)), scratch(carver.take<Scratch>(kWarps)) {
      FWP_UNROLL for (Shared& x : d_scores) x = carver.matrix(kChunkTokens, kChunkTokens);
    }
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    const int64_t n = this->chunk();
    this->put_starts({&this->query, &this->key, &this->decay, &this->rate, &value, &d_out, &d_value}, memory.starts);
    this->bring_tokens(memory.starts, n, memory.tokens);
    bring_columns(d_out, memory.starts[5], n, memory.d_out);
    if constexpr (kErases)
      bring_columns(d_value, memory.starts[6], n, memory.d_value);
    else
      bring_columns(value, memory.starts[4], n, memory.value);
    commit_copies();
    if constexpr (kErases) load_errors(memory.starts[4], n, memory.value);
    this->put_scalars(this->ask(memory.starts[3], memory.starts[7], n), memory.tokens);
    wait_copies<0>();
    __syncthreads();
    Slice slice;
    this->load_slice(memory.tokens, this->own_column(), slice.keys);
    for_numbers([&](int t, int e) { slice.d_key[t][e] = slice.d_decay[t][e] = 0; });
    add_terms<false>(n, memory, slice);
    put_pairs(slice.d_query, memory.tokens.query);
    if constexpr (kErases) {
      this->load_readers(memory.tokens.key, this->own_column(), slice.keys.query);
      for_numbers([&](int t, int e) { slice.keys.query[t][e] = -slice.keys.query[t][e]; });
      __syncthreads();
      add_terms<true>(n, memory, slice);
    }
    put_others(memory, slice);
    __syncthreads();
    give(n, memory);
  }

 private:
  struct Slice {
    KeySlice keys;
    KeyNumbers d_query, d_key, d_decay;
  };
  // Gradients of DecayProducts.
  struct DProducts {
    KeyNumbers from_start, to_end;
  };

  FWP_DEVICE Scratch& scratch(const Memory& memory) const { return memory.scratch[this->warp()]; }

  FWP_DEVICE void bring_columns(const Brought& from, const char* start, int64_t n, const Shared& to) const {
    this->bring(from, start, n, 0, this->size.columns, this->value_columns(), to, 0, int(threadIdx.x), kWarps * kWarp);
  }
  FWP_DEVICE void load_errors(const char* start, int64_t n, const Shared& to) const {
    const int columns = this->size.columns, width = this->value_columns(), tokens = this->count(n);
    const float* const errors = in_global_memory(reinterpret_cast<const float*>(start)) + n * kChunkTokens * columns;
    FWP_UNROLL_BY(4) for (int at = int(threadIdx.x); at < kChunkTokens * width; at += kWarps * kWarp) {
      const int t = at / width, j = at % width;
      to.put(t, j, t < tokens && j < columns ? errors[t * columns + j] : 0);
    }
  }

  // The terms of the scores and of the state: of P, or of A with what erases in place of the queries and D in place of dO.
  template <bool kOfErased>
  FWP_DEVICE void add_terms(int64_t n, const Memory& memory, Slice& slice) const {
    const Shared& d_out = kOfErased ? memory.d_value : memory.d_out;
    make_d_scores<kOfErased>(d_out, memory);
    __syncthreads();
    DProducts d_products;
    use_states<kOfErased>(n, d_out, memory, slice, d_products);
    separate<2>(slice, d_products);
    add_blocks<2>(memory, slice, d_products);
    separate<1>(slice, d_products);
    add_blocks<1>(memory, slice, d_products);
    differentiate(slice, d_products);
    add_in_groups(memory, slice);
  }

  template <bool kOfErased>
  FWP_DEVICE void make_d_scores(const Shared& d_out, const Memory& memory) const {
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < 3; b += kWarps) {
      const int row = row_of_block(b), column = column_of_block(b);
      Product d_score, none;
      // The pass of a rule that does not erase: one product.
      ChunkPass<kRows, false, true>::template multiply_rows<1>(d_out, d_out, memory.value, this->value_columns(), row, column,
                                                               d_score, none);
      for_elements(d_score, [&](int t, int s, float x) {
        t += row, s += column;
        if (kOfErased && t == s) x = 0;
        if (t / kSpan == s / kSpan) memory.in_group[t / kSpan * kGroupSize + s % kSpan * kSpan + t % kSpan] = x;
        if (t / kSpan <= s / kSpan) return;
        FWP_UNROLL for (int m = 0; m < kOfTokens; ++m) {
          Bfloat16 part;
          round_to(x, part);
          *memory.d_scores[m].at(t, s) = *memory.d_scores[m].at(s, t) = part;
          x -= number(part);
        }
      });
    }
  }

  // Products by rows of the state or its gradient, both also multiplied with each other.
  template <bool kOfErased>
  FWP_DEVICE void use_states(int64_t n, const Shared& d_out, const Memory& memory, Slice& slice, DProducts& d_products) const {
    const int64_t numbers = int64_t(this->size.rows) * this->size.columns, whole = this->size.length / kChunkTokens;
    const float* const state = n > 0 ? kept + (this->head() * whole + n - 1) * numbers
                                     : initial ? initial + this->head() * numbers : nullptr;
    const float* const gradient = gradients + (this->head() * this->chunks() + n) * numbers;
    Product of_query[kChunkBlocks], of_key[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(of_query[t]), clear(of_key[t]);
    float d_whole[2] = {};  // of rows line() and line() + 8
    FWP_UNROLL_BY(1) for (int j = 0; j < this->value_columns(); j += kBlock) {
      Factor before[kOfTokens], after[kOfTokens], left;
      Product s, g;
      load_block(state, j, s);
      if constexpr (!kOfErased) {
        load_block(gradient, j, g);
        FWP_UNROLL for (int h = 0; h < 2; ++h)
          FWP_UNROLL for (int i = 0; i < 4; ++i) d_whole[h] = fma(s[h][i], g[h][i], d_whole[h]);
        split(g, after);
      }
      split(s, before);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        d_out.left(t * kBlock, j, left);
        multiply(of_query[t], left, before);
        if constexpr (kOfErased) continue;
        memory.value.left(t * kBlock, j, left);
        multiply(of_key[t], left, after);
      }
    }
    KeyNumbers z;
    const DecayProducts<kChunkTokens / kSpan> products(slice.keys);
    exchange(of_query, memory, z);
    for_numbers([&](int t, int e) {
      slice.d_query[t][e] = products.from_start[t][e] * z[t][e];
      d_products.from_start[t][e] = slice.keys.query[t][e] * z[t][e];
    });
    if constexpr (kOfErased) {
      for_numbers([&](int t, int e) { d_products.to_end[t][e] = 0; });
      return;
    }
    exchange(of_key, memory, z);
    for_numbers([&](int t, int e) {
      slice.d_key[t][e] += products.to_end[t][e] * z[t][e];
      d_products.to_end[t][e] = slice.keys.key[t][e] * z[t][e];
    });
    float* const sums = &scratch(memory).numbers[0][0];
    FWP_UNROLL for (int h = 0; h < 2; ++h) {
      FWP_UNROLL for (int distance = 1; distance < 4; distance *= 2)
        d_whole[h] += __shfl_xor_sync(0xffffffffu, d_whole[h], distance);
      if (pair() == 0) sums[8 * h + line()] = d_whole[h];
    }
    __syncwarp();
    if (group() == kChunkTokens / kSpan - 1)
      FWP_UNROLL for (int e = 0; e < 2; ++e) d_products.from_start[kSpan - 1][e] += sums[own_number() + e];
    __syncwarp();
  }

  // 16 of the own rows and columns from j on, in the layout of a right factor before split().
  FWP_DEVICE void load_block(const float* matrix, int j, Product& to) const {
    const float* const from = matrix + (this->own_column() + line()) * this->size.columns + j + pair();
    const auto inside = [&](int h, int i) {
      const int row = this->own_column() + 8 * h + line(), column = j + i / 2 * 8 + pair() + i % 2;
      return matrix && row < this->size.rows && column < this->size.columns;
    };
    if (in_pairs) {
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int i = 0; i < 4; i += 2) {
          Numbers<float, 2> pair{};
          if (inside(h, i)) pair = *reinterpret_cast<const Numbers<float, 2>*>(from + 8 * h * this->size.columns + 4 * i);
          to[h][i] = pair.x[0], to[h][i + 1] = pair.x[1];
        }
    } else {
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int i = 0; i < 4; ++i)
          to[h][i] = inside(h, i) ? from[8 * h * this->size.columns + i / 2 * 8 + i % 2] : 0;
    }
  }

  // Rows of tokens in the layout of products, to the lanes of their numbers.
  FWP_DEVICE void exchange(Product (&from)[kChunkBlocks], const Memory& memory, KeyNumbers& to) const {
    auto& numbers = scratch(memory).numbers;
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t)
      for_pairs(from[t], [&](int row, int i, float x, float y) {
        numbers[t * kBlock + row][i] = x, numbers[t * kBlock + row][i + 1] = y;
      });
    __syncwarp();
    for_numbers([&](int t, int e) { to[t][e] = numbers[own_token(t)][own_number() + e]; });
    __syncwarp();
  }

  // The terms of tokens in neighboring blocks of kGroups groups.
  template <int kGroups>
  FWP_DEVICE void add_blocks(const Memory& memory, Slice& slice, DProducts& d_products) const {
    const DecayProducts<kGroups> products(slice.keys);
    Grouped<Bfloat16> scaled[kOfTokens];
    FWP_UNROLL for (int m = 0; m < kOfTokens; ++m) scaled[m] = {scratch(memory).factors[m], kBlock + kPadding};
    put_scaled(slice.keys, products, scaled);
    Product found[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
      const int row = t * kBlock, column = kGroups > 1 ? kBlock - row : row;
      Factor left[kOfTokens];
      FWP_UNROLL for (int m = 0; m < kOfTokens; ++m) {
        memory.d_scores[m].left(row, column, left[m]);
        if (kGroups == 1) left[m][0] = left[m][3] = 0;  // pairs of tokens of one group
      }
      clear(found[t]);
      multiply<kOfTokens>(found[t], left, [&](int m, Factor& right) { scaled[m].right(column, 0, right); });
    }
    __syncwarp();
    KeyNumbers z;
    exchange(found, memory, z);
    const bool read = reads<kGroups>();
    const float reading = read ? 1 : 0, writing = 1 - reading;
    for_numbers([&](int t, int e) {
      const float of_token = (read ? products.from_start[t][e] : products.to_end[t][e]) * z[t][e];
      const float of_product = (read ? slice.keys.query[t][e] : slice.keys.key[t][e]) * z[t][e];
      slice.d_query[t][e] = fma(reading, of_token, slice.d_query[t][e]);
      slice.d_key[t][e] = fma(writing, of_token, slice.d_key[t][e]);
      d_products.from_start[t][e] = fma(reading, of_product, d_products.from_start[t][e]);
      d_products.to_end[t][e] = fma(writing, of_product, d_products.to_end[t][e]);
    });
  }

  // The terms of tokens in one group. `key` is F k_s as token t sees it, `d` its gradient.
  FWP_DEVICE static void add_in_groups(const Memory& memory, Slice& slice) {
    const KeySlice& keys = slice.keys;
    FWP_UNROLL for (int s = 0; s < kSpan; ++s) {
      float d_scores[kSpan];  // with all tokens t
      FWP_UNROLL for (int t = s / kPiece * kPiece; t < kSpan; t += kPiece) {
        const float* const from = memory.in_group + group() * kGroupSize + s * kSpan + t;
        const Piece<float> piece = *reinterpret_cast<const Piece<float>*>(from);
        FWP_UNROLL for (int i = 0; i < kPiece; ++i) d_scores[t + i] = piece.x[i];
      }
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        float key[kSpan], d = 0;
        FWP_UNROLL for (int t = s; t < kSpan; ++t) {
          key[t] = t > s ? key[t - 1] * keys.decay[t][e] : keys.key[s][e];
          slice.d_query[t][e] = fma(d_scores[t], key[t], slice.d_query[t][e]);
        }
        FWP_UNROLL for (int t = kSpan; t-- > s;) {
          d = fma(d_scores[t], keys.query[t][e], t + 1 < kSpan ? d * keys.decay[t + 1][e] : 0);
          if (t > s) slice.d_decay[t][e] = fma(d, key[t - 1], slice.d_decay[t][e]);
        }
        slice.d_key[s][e] += d;
      }
    }
  }

  // From the gradients of products over pairs of blocks of kGroups groups, those of products over single blocks.
  template <int kGroups>
  FWP_DEVICE static void separate(const Slice& slice, DProducts& d_products) {
    const DecayProducts<kGroups> products(slice.keys);
    const bool read = reads<kGroups>();
    FWP_UNROLL for (int e = 0; e < 2; ++e) {
      const float whole = slice.keys.whole[kGroups - 1][e];
      float d_whole = 0;
      FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
        float &d_start = d_products.from_start[t][e], &d_end = d_products.to_end[t][e];
        d_whole = fma(read ? d_start : d_end, read ? products.from_start[t][e] : products.to_end[t][e], d_whole);
        d_start *= read ? whole : 1;
        d_end *= read ? 1 : whole;
      }
      // The product of a block of groups is from_start of its last token.
      if constexpr (kGroups > 1) d_whole += __shfl_xor_sync(0xffffffffu, d_whole, kSpan);
      d_whole = __shfl_xor_sync(0xffffffffu, d_whole, kGroups * kSpan);
      if (kGroups == 1 || group() % 2) d_products.from_start[kSpan - 1][e] += d_whole;
    }
  }

  // Add the gradients of products over a group to those of its decays.
  FWP_DEVICE static void differentiate(Slice& slice, DProducts& d_products) {
    const DecayProducts<1> products(slice.keys);
    const KeyNumbers& decay = slice.keys.decay;
    FWP_UNROLL for (int e = 0; e < 2; ++e) {
      FWP_UNROLL for (int t = kSpan; t-- > 0;) {
        const float d = d_products.from_start[t][e];
        slice.d_decay[t][e] = fma(d, t > 0 ? products.from_start[t - 1][e] : 1, slice.d_decay[t][e]);
        if (t > 0) d_products.from_start[t - 1][e] = fma(d, decay[t][e], d_products.from_start[t - 1][e]);
      }
      FWP_UNROLL for (int t = 1; t < kSpan; ++t) {
        const float d = d_products.to_end[t - 1][e];
        slice.d_decay[t][e] = fma(d, products.to_end[t][e], slice.d_decay[t][e]);
        d_products.to_end[t][e] = fma(d, decay[t][e], d_products.to_end[t][e]);
      }
    }
  }

  // Replace tokens by their gradients.
  FWP_DEVICE void put_pairs(const KeyNumbers& x, const Grouped<Bfloat16>& to) const {
    FWP_UNROLL for (int t = 0; t < kSpan; ++t)
      to.put(own_token(t), this->own_column() + own_number(), pair_of(x[t][0], x[t][1]));
  }
  // d_key is the gradient of b K, and if the rule erases, d_query that of -K where it erases.
  FWP_DEVICE void put_others(const Memory& memory, Slice& slice) const {
    const KeyTokens<kRows>& to = memory.tokens;
    const int i = this->own_column() + own_number();
    KeyNumbers keys;
    this->load_readers(to.key, this->own_column(), keys);
    FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
      const int token = own_token(t);
      float sum = fma(keys[t][0], slice.d_key[t][0], keys[t][1] * slice.d_key[t][1]);
      FWP_UNROLL for (int distance = 1; distance < kSpan; distance *= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      if (own_number() == 0) memory.d_rate[this->warp() * kChunkTokens + token] = sum;
      const bool given = to.source[token] == float(DecaySource::given);
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        slice.d_key[t][e] *= to.rate[token];
        if constexpr (kErases) slice.d_key[t][e] -= slice.d_query[t][e];
        if (!given) slice.d_decay[t][e] = 0;
      }
    }
    put_pairs(slice.d_key, to.key);
    if (this->decay.type == Type::float32)
      for_numbers([&](int t, int e) { to.decay.at(own_token(t), i)[e] = slice.d_decay[t][e]; });
    else
      put_pairs(slice.d_decay, to.decay_in_bfloat16());
  }

  FWP_DEVICE void give(int64_t n, const Memory& memory) const {
    const KeyTokens<kRows>& tokens = memory.tokens;
    this->store_keys(d_q, n, tokens.query);
    this->store_keys(d_k, n, tokens.key);
    if (d_decay.type == Type::float32)
      this->store_keys(d_decay, n, tokens.decay);
    else
      this->store_keys(d_decay, n, tokens.decay_in_bfloat16());
    this->store_sums(d_rate, n, memory.d_rate);
  }
};

}  // namespace fwp::cuda
