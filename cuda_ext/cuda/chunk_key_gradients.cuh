// The gradients of queries, keys, rates and decays of rules with decays by key, for a chunk, from the state W before it and the
// gradient G after it. A block has one chunk, a warp 16 numbers of its keys. B is b K, which writes. With V for E without
// erasing,
//
//     d_P = d_out E^T on and below its diagonal          d_A = -D E^T below its diagonal
//     d_Q = c (d_out W^T) + d_P (F B)                    of the erasing keys: -c (D W^T) + d_A (F B)
//     d_B = w (E G^T) + d_P^T (F Q) + d_A^T (F K)        d_c_C = the sums over the rows of G * W
//
// A erases with -K what P reads with Q, and D stands for d_out. So the terms of d_A are those of d_P, computed again for another
// reader. A removal has two readers, Q and -y, and two writers: B with V, and x with E. So it has these terms four times. -y
// reads with c-.
//
// Where values fade, d_out is c d_out and V is w V in the terms of the states, with z in c and w. In d_c_C, Z * W stands for W.
// d_P are the scores of d_out and V with z. The gradients of V and z are those of B and a with exchanged arguments. Then d_out, V
// and z stand for Q, B and a, P for d_P, and the transpose of W for W.
//
// As in chunk_keys.cuh, the terms with F are products of matrices between groups, for each h. One product Z gives both. In an odd
// block, Z_t is the sum over s of dP_ts w_s b_s k_s: c_t Z_t is a term of dQ_t, and q_t Z_t is the gradient of c_t. In an even
// block, Z_s is the sum over t of dP_ts c_t q_t, likewise for the written key and w_s. The gradients of all c and w, which are
// products of decays, give those of the decays, step by step in reverse and without divisions.
#pragma once

#include "chunk_key_scores.cuh"

namespace fwp::cuda {

template <Rule kRule, int kInputParts>
struct ChunkKeyGradients : ChunkKeyParallel<kRule, kInputParts> {
  using Base = ChunkKeyParallel<kRule, kInputParts>;
  using typename Base::WarpTokens;
  using Base::kErasesKey, Base::kRemoves, Base::kSolves, Base::kFadesValues, Base::kResultParts;
  static constexpr int kValueParts = kFadesValues ? kResultParts : kInputParts;  // of d_out and of what is written

  // value: V; removed: E, or -E of a removal, in float32; d_removed: D; value_decay: z.
  Brought value, d_out, removed, d_removed, value_decay;
  const Bfloat16* d_scores;  // where values fade: d_P, like the scores of ChunkKeyScores
  const float *initial, *kept, *gradients;  // the states before chunk 0 and after each whole one; G for each chunk
  int row, column;                          // the strides of a state
  bool in_pairs;                            // whether two numbers of a state can be loaded at once
  OutputArray d_q, d_k, d_rate, d_decay, d_removal_key, d_removal;

  static constexpr int kGroupSize = kSpan * kSpan + kSpan;  // groups in different banks

  using Scratch = WarpScratch<kResultParts>;
  using Columns = Shared[kValueParts];
  struct Memory {
    const char** starts;
    typename Base::TokensOfWarps tokens;
    Columns value, d_out, d_removed;  // what is written; d_out; D of a rule that erases. Those of a removal take turns in two
    Shared d_scores[kResultParts];  // d_P or d_A in parts, with its transpose above the diagonal
    float *in_group, *d_rate, *d_decay;  // dP_ts or dA_ts of each group at (s, t); (warps, 32); the same, of a decay by head
    Scratch* scratch;
    KeyTokens<kInputParts, false> others;  // where values fade: d_out, V and z
    float* total;             // the products of all z
    float* aside;             // two places for numbers of each thread

    FWP_BOTH Memory(Carver& carver, const ChunkKeyGradients& pass)
        : starts(carver.take<const char*>(kDocuments + 1)), tokens(carver, pass, pass.warps),
          in_group(carver.take<float>(kChunkTokens / kSpan * kGroupSize)),
          d_rate(carver.take<float>(pass.warps * kChunkTokens)),
          d_decay(carver.take<float>(kInputParts == 1 || pass.by_key ? 0 : pass.warps * kChunkTokens)),
          scratch(carver.take<Scratch>(pass.warps)),
          others(carver, kFadesValues ? pass.value_columns() : 0, pass.query.type, pass.value_decay.type, true),
          total(carver.take<float>(kFadesValues ? pass.value_columns() : 0)),
          aside(carver.take<float>(kRemoves ? 2 * pass.warps * kWarp * kSpan * 2 : 0)) {
      FWP_UNROLL for (Shared& x : value) x = carver.matrix(kChunkTokens, pass.value_columns());
      FWP_UNROLL for (Shared& x : d_out) x = carver.matrix(kChunkTokens, pass.value_columns());
      FWP_UNROLL for (Shared& x : d_removed) x = carver.matrix(kErasesKey ? kChunkTokens : 0, pass.value_columns());
      FWP_UNROLL for (Shared& x : d_scores) x = carver.matrix(kChunkTokens, kChunkTokens);
    }
  };

  FWP_DEVICE void run() const {
    Carver carver{shared_memory()};
    const Memory memory(carver, *this);
    const int64_t n = this->chunk();
    this->put_starts(memory.starts, value, d_out, removed, d_removed, value_decay);
    const auto tokens = memory.tokens[this->warp()];
    load(n, tokens, memory);
    Slice slice;
    tokens.load_decays(0, slice.keys);
    tokens.query.load(0, slice.keys.reader);
    clear(slice.d_reader), clear(slice.d_decay);
    if constexpr (kRemoves) {
      add_terms_of_writers<false>(n, tokens, memory, slice);
      tokens.query.store(0, slice.d_reader);
      tokens.load_removal_keys(0, slice.keys.reader);
      erase(slice);
      add_terms_of_writers<true>(n, tokens, memory, slice);
      for_numbers([&](int t, int e) { slice.d_reader[t][e] = -slice.d_reader[t][e]; });
      tokens.clear_beginnings(slice.d_reader);
      tokens.removal_key.store(0, slice.d_reader);
      tokens.removal.store(0, slice.d_writer);
      load_aside(memory, 0, slice.d_writer);
    } else {
      tokens.load_keys(0, slice.keys.writer);
      clear(slice.d_writer);
      add_terms<false>(n, memory.d_out, memory.value, true, memory, slice);
      tokens.query.store(0, slice.d_reader);
      if constexpr (kErasesKey) {
        tokens.key.load(0, slice.keys.reader);
        erase(slice);
        add_terms<true>(n, memory.d_removed, memory.value, true, memory, slice);
      }
    }
    put_others(tokens, memory, slice);
    __syncthreads();
    store_gradients(n, tokens, memory);
  }

 private:
  static constexpr int kValue = Base::kOwnStarts, kDOut = kValue + 1, kRemoved = kValue + 2, kDRemoved = kValue + 3,
                       kValueDecay = kValue + 4, kDocuments = kValue + 5;  // of the starts

  struct Slice {
    KeySlice keys;
    KeyNumbers d_reader, d_writer, d_decay;
  };
  // Gradients of DecayProducts.
  struct DProducts {
    KeyNumbers from_start, to_end;
  };

  FWP_DEVICE Scratch& scratch(const Memory& memory) const { return memory.scratch[this->warp()]; }

  FWP_DEVICE void load(int64_t n, const WarpTokens& tokens, const Memory& memory) const {
    const char* const* const starts = memory.starts;
    const Scalars scalars = this->load_tokens(starts, starts[kDocuments], n, tokens);
    if constexpr (kFadesValues) {
      memory.others.query.typed([&](const auto& to) { bring_columns(d_out, starts[kDOut], n, to); });
      memory.others.key.typed([&](const auto& to) { bring_columns(value, starts[kValue], n, to); });
      memory.others.decay.typed([&](const auto& z) { bring_columns(value_decay, starts[kValueDecay], n, z); });
    } else if constexpr (!kRemoves) {
      load_columns(d_out, starts[kDOut], n, memory.d_out);
      if constexpr (!kErasesKey) load_columns(value, starts[kValue], n, memory.value);
      if constexpr (kErasesKey) load_columns(d_removed, starts[kDRemoved], n, memory.d_removed);
    }
    commit_copies();
    if constexpr (kErasesKey) load_removed(n, 1, memory);
    if (kFadesValues && this->warp() == 0) this->put_scalars(scalars, memory.others);
    wait_copies<0>();
    __syncthreads();
    if constexpr (kFadesValues) scale_others(memory);
  }
  template <typename To>
  FWP_DEVICE void bring_columns(const Brought& from, const char* start, int64_t n, const To& to) const {
    this->bring(from, start, n, 0, this->size.columns, this->value_columns(), to, 0, int(threadIdx.x), this->warps * kWarp);
  }
  FWP_DEVICE void load_columns(const Brought& from, const char* start, int64_t n, const Columns& to) const {
    if constexpr (kInputParts == 1)
      bring_columns(from, start, n, to[0]);
    else
      with_element<float>(from.type, [&](auto* number) {
        split_columns<std::remove_pointer_t<decltype(number)>>(start, n, 1, to, from.data ? this->count(n) : 0, from.token);
      });
  }
  FWP_DEVICE void load_removed(int64_t n, float sign, const Memory& memory) const {
    split_columns<float>(memory.starts[kRemoved], n, sign, memory.value, this->count(n), removed.token);
  }
  // Numbers of type T in parts, `stride` apart for each token.
  template <typename T>
  FWP_DEVICE void split_columns(const char* start, int64_t n, float sign, const Columns& to, int tokens, int64_t stride) const {
    const int columns = this->size.columns, width = this->value_columns();
    const T* const from = in_global_memory(reinterpret_cast<const T*>(start)) + n * kChunkTokens * stride;
    FWP_UNROLL_BY(4) for (int at = int(threadIdx.x); at < kChunkTokens * width; at += this->warps * kWarp) {
      const int t = at / width, j = at % width;
      const float x = t < tokens && j < columns ? sign * number(from[t * stride + j]) : 0;
      for_parts<kValueParts>(x, [&](int m, Bfloat16 part) { *to[m].at(t, j) = part; });
    }
  }
  // c d_out and w V, and the products of all z. The warps share the numbers of a value.
  FWP_DEVICE void scale_others(const Memory& memory) const {
    FWP_UNROLL_BY(1) for (int first_value = this->own_column(); first_value < this->value_columns();
                          first_value += this->block_columns()) {
      KeySlice values;
      memory.others.load_decays(first_value, values);
      memory.others.query.load(first_value, values.reader);
      memory.others.key.load(first_value, values.writer);
      const DecayProducts<kChunkTokens / kSpan> products(values);
      const int i = first_value + own_number();
      FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
        float read[2], written[2];
        FWP_UNROLL for (int e = 0; e < 2; ++e) {
          read[e] = products.from_start[t][e] * values.reader[t][e];
          written[e] = products.to_end[t][e] * values.writer[t][e];
        }
        put_parts(read, memory.d_out, own_token(t), i);
        put_parts(written, memory.value, own_token(t), i);
      }
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        const float total = values.product(e);
        if (group() == 0) memory.total[i + e] = total;
      }
    }
  }
  // The next reader is negative, because it erases.
  FWP_DEVICE static void erase(Slice& slice) {
    for_numbers([&](int t, int e) { slice.keys.reader[t][e] = -slice.keys.reader[t][e], slice.d_reader[t][e] = 0; });
  }

  // A lane's numbers that wait for their turn, in one of two places.
  FWP_DEVICE float& aside(const Memory& memory, int place, int t, int e) const {
    return memory.aside[((place * kSpan + t) * 2 + e) * this->warps * kWarp + int(threadIdx.x)];
  }
  FWP_DEVICE void load_aside(const Memory& memory, int place, KeyNumbers& to) const {
    for_numbers([&](int t, int e) { to[t][e] = aside(memory, place, t, e); });
  }
  // The terms of a reader of a removal with both writers. The decays are loaded again, because otherwise the products of one
  // round would wait in registers for the next.
  template <bool kErased>
  FWP_DEVICE void add_terms_of_writers(int64_t n, const WarpTokens& tokens, const Memory& memory, Slice& slice) const {
    FWP_UNROLL_BY(1) for (int writer = 0; writer < 2; ++writer) {
      tokens.load_decays(0, slice.keys);
      writer > 0 ? tokens.removal.load(0, slice.keys.writer) : tokens.load_keys(0, slice.keys.writer);
      kErased ? load_aside(memory, writer, slice.d_writer) : clear(slice.d_writer);
      __syncthreads();  // for the terms before
      const int of_reader = kErased ? kDRemoved : kDOut;
      if (writer == 0) load_columns(kErased ? d_removed : d_out, memory.starts[of_reader], n, memory.d_out);
      writer > 0 ? load_removed(n, -1, memory) : load_columns(value, memory.starts[kValue], n, memory.value);
      commit_copies();
      wait_copies<0>();
      add_terms<kErased>(n, memory.d_out, memory.value, writer == 0, memory, slice);
      for_numbers([&](int t, int e) { aside(memory, writer, t, e) = slice.d_writer[t][e]; });
    }
  }

  // The terms of a reader and a writer, and of what they do with the states. kErased: the reader is what erases: it does not read
  // its own token, and of a removal not its decay. The terms of a writer and the states belong to the other reader, Q, and those
  // of a reader to its first writer.
  template <bool kErased>
  FWP_DEVICE void add_terms(int64_t n, const Columns& d_out, const Columns& value, bool of_first_writer, const Memory& memory,
                            Slice& slice) const {
    constexpr bool kBefore = kErased && kRemoves;
    __syncthreads();  // for the terms before
    if constexpr (kFadesValues)
      load_d_scores(n, memory);
    else
      make_d_scores<kErased>(d_out, value, memory);
    __syncthreads();
    DProducts d_products;
    clear(d_products.from_start), clear(d_products.to_end);
    use_states<kErased>(n, d_out, value, of_first_writer, memory, slice, d_products);
    separate<2, kBefore>(slice, d_products);
    add_blocks<2, kBefore>(memory, slice, d_products);
    separate<1, kBefore>(slice, d_products);
    add_blocks<1, kBefore>(memory, slice, d_products);
    differentiate<kBefore>(slice, d_products);
    add_in_groups<kBefore>(memory, slice);
  }

  template <bool kErased>
  FWP_DEVICE void make_d_scores(const Columns& d_out, const Columns& value, const Memory& memory) const {
    FWP_UNROLL_BY(1) for (int b = this->warp(); b < 3; b += this->warps) {
      const int row = row_of_block(b), column = column_of_block(b);
      Product d_score;
      clear(d_score);
      FWP_UNROLL_BY(1) for (int j = 0; j < this->value_columns(); j += kBlock) {
        Factor left[kValueParts];
        FWP_UNROLL for (int m = 0; m < kValueParts; ++m) d_out[m].left(row, j, left[m]);
        Base::template accumulate<kValueParts>(
            d_score, left, [&](int m, Factor& right) { value[m].right_transposed(column, j, right); });
      }
      for_elements(d_score, [&](int t, int s, float x) {
        t += row, s += column;
        put_d_score(t, s, kErased && t == s ? 0 : x, memory);
      });
    }
  }
  // d_P, as it is stored.
  FWP_DEVICE void load_d_scores(int64_t n, const Memory& memory) const {
    const Bfloat16* const from = d_scores + (this->head() * this->chunks() + n) * kResultParts * kMatrix;
    FWP_UNROLL_BY(1) for (int at = int(threadIdx.x); at < kMatrix; at += this->warps * kWarp) {
      const int t = at / kChunkTokens, s = at % kChunkTokens;
      if (s > t) continue;
      float x = 0;
      FWP_UNROLL for (int m = kResultParts; m-- > 0;) x += number(from[m * kMatrix + at]);
      put_d_score(t, s, x, memory);
    }
  }
  FWP_DEVICE static void put_d_score(int t, int s, float x, const Memory& memory) {
    if (t / kSpan == s / kSpan) memory.in_group[t / kSpan * kGroupSize + s % kSpan * kSpan + t % kSpan] = x;
    if (t / kSpan <= s / kSpan) return;
    for_parts<kResultParts>(
        x, [&](int m, Bfloat16 part) { *memory.d_scores[m].at(t, s) = *memory.d_scores[m].at(s, t) = part; });
  }

  // Products by rows of the state or its gradient, both also multiplied with each other.
  template <bool kErased>
  FWP_DEVICE void use_states(int64_t n, const Columns& d_out, const Columns& value, bool of_first_writer, const Memory& memory,
                             Slice& slice, DProducts& d_products) const {
    constexpr bool kBefore = kErased && kRemoves, kOfWriter = !kErased;
    if (!kOfWriter && !of_first_writer) return;
    const int64_t numbers = int64_t(this->size.rows) * this->size.columns, whole = this->size.length / kChunkTokens;
    const float* const state = n > 0 ? kept + (this->head() * whole + n - 1) * numbers
                                     : initial ? initial + this->head() * numbers : nullptr;
    const float* const gradient = gradients + (this->head() * this->chunks() + n) * numbers;
    Product of_reader[kChunkBlocks], of_writer[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) clear(of_reader[t]), clear(of_writer[t]);
    float d_whole[2] = {};  // of rows line() and line() + 8
    FWP_UNROLL_BY(1) for (int j = 0; j < this->value_columns(); j += kBlock) {
      Factor before[kResultParts], after[kResultParts];
      Product s, g;
      if (of_first_writer) load_block(state, j, s);
      if constexpr (kOfWriter) {
        load_block(gradient, j, g);
        if (of_first_writer)
          FWP_UNROLL for (int h = 0; h < 2; ++h)
            FWP_UNROLL for (int i = 0; i < 4; ++i) {
              const float z = kFadesValues ? memory.total[j + i / 2 * 8 + pair() + i % 2] : 1;
              d_whole[h] = fma(kFadesValues ? z * s[h][i] : s[h][i], g[h][i], d_whole[h]);
            }
        split(g, after);
      }
      if (of_first_writer) split(s, before);
      FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
        if (of_first_writer) multiply_columns(d_out, t, j, before, of_reader[t]);
        if constexpr (kOfWriter) multiply_columns(value, t, j, after, of_writer[t]);
      }
    }
    KeyNumbers z;
    const DecayProducts<kChunkTokens / kSpan, kBefore> products(slice.keys);
    if (of_first_writer) {
      scratch(memory).template exchange<true>(of_reader, z);
      for_numbers([&](int t, int e) {
        slice.d_reader[t][e] += products.from_start[t][e] * z[t][e];
        d_products.from_start[t][e] = slice.keys.reader[t][e] * z[t][e];
      });
    }
    if constexpr (kOfWriter) {
      scratch(memory).template exchange<true>(of_writer, z);
      for_numbers([&](int t, int e) {
        slice.d_writer[t][e] += products.to_end[t][e] * z[t][e];
        d_products.to_end[t][e] = slice.keys.writer[t][e] * z[t][e];
      });
    }
    if (!kOfWriter || !of_first_writer) return;
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
  FWP_DEVICE static void multiply_columns(const Columns& rows, int t, int j, const Factor (&state)[kResultParts], Product& to) {
    Factor left[kValueParts];
    FWP_UNROLL for (int m = 0; m < kValueParts; ++m) rows[m].left(t * kBlock, j, left[m]);
    Base::template accumulate<kResultParts>(
        to, left, [&](int m, Factor& right) { FWP_UNROLL for (int i = 0; i < 4; ++i) right[i] = state[m][i]; });
  }

  // 16 of the own rows and columns from j on, in the layout of a right factor before split().
  FWP_DEVICE void load_block(const float* matrix, int j, Product& to) const {
    const float* const from = matrix + (this->own_column() + line()) * row + (j + pair()) * column;
    const auto inside = [&](int h, int i) {
      const int r = this->own_column() + 8 * h + line(), c = j + i / 2 * 8 + pair() + i % 2;
      return matrix && r < this->size.rows && c < this->size.columns;
    };
    if (in_pairs) {
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int i = 0; i < 4; i += 2) {
          Numbers<float, 2> pair{};
          if (inside(h, i)) pair = *reinterpret_cast<const Numbers<float, 2>*>(from + 8 * h * row + 4 * i);
          to[h][i] = pair.x[0], to[h][i + 1] = pair.x[1];
        }
    } else {
      FWP_UNROLL for (int h = 0; h < 2; ++h)
        FWP_UNROLL for (int i = 0; i < 4; ++i)
          to[h][i] = inside(h, i) ? from[8 * h * row + (i / 2 * 8 + i % 2) * column] : 0;
    }
  }

  // The terms of tokens in neighboring blocks of kGroups groups.
  template <int kGroups, bool kBefore>
  FWP_DEVICE void add_blocks(const Memory& memory, Slice& slice, DProducts& d_products) const {
    const DecayProducts<kGroups, kBefore> products(slice.keys);
    Grouped<Bfloat16> scaled[kResultParts];
    scratch(memory).put(slice.keys, products, scaled);
    Product found[kChunkBlocks];
    FWP_UNROLL for (int t = 0; t < kChunkBlocks; ++t) {
      const int row = t * kBlock, column = kGroups > 1 ? kBlock - row : row;
      Factor left[kResultParts];
      FWP_UNROLL for (int m = 0; m < kResultParts; ++m) {
        memory.d_scores[m].left(row, column, left[m]);
        if (kGroups == 1) left[m][0] = left[m][3] = 0;  // pairs of tokens of one group
      }
      clear(found[t]);
      multiply<kResultParts>(found[t], left, [&](int m, Factor& right) { scaled[m].right(column, 0, right); });
    }
    __syncwarp();
    KeyNumbers z;
    scratch(memory).template exchange<true>(found, z);
    const bool read = reads<kGroups>();
    const float reading = read ? 1 : 0, writing = 1 - reading;
    for_numbers([&](int t, int e) {
      const float of_token = (read ? products.from_start[t][e] : products.to_end[t][e]) * z[t][e];
      const float of_product = (read ? slice.keys.reader[t][e] : slice.keys.writer[t][e]) * z[t][e];
      slice.d_reader[t][e] = fma(reading, of_token, slice.d_reader[t][e]);
      slice.d_writer[t][e] = fma(writing, of_token, slice.d_writer[t][e]);
      d_products.from_start[t][e] = fma(reading, of_product, d_products.from_start[t][e]);
      d_products.to_end[t][e] = fma(writing, of_product, d_products.to_end[t][e]);
    });
  }

  // The terms of tokens in one group. `seen` is F y_s as token t reads it, `d` its gradient.
  template <bool kBefore>
  FWP_DEVICE static void add_in_groups(const Memory& memory, Slice& slice) {
    const KeySlice& keys = slice.keys;
    FWP_UNROLL for (int s = 0; s < kSpan; ++s) {
      float d_scores[kSpan];  // with all tokens t
      FWP_UNROLL for (int t = s / kPiece * kPiece; t < kSpan; t += kPiece) {
        const float* const from = memory.in_group + group() * kGroupSize + s * kSpan + t;
        const Piece<float> piece = *reinterpret_cast<const Piece<float>*>(from);
        FWP_UNROLL for (int i = 0; i < kPiece; ++i) d_scores[t + i] = piece.x[i];
      }
      constexpr int kOwn = kBefore ? 1 : 0;  // the first reader is so much later, and a reader's last decay is so much earlier
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        float seen[kSpan], d = 0;
        FWP_UNROLL for (int t = s + kOwn; t < kSpan; ++t) {
          seen[t] = t > s + kOwn ? seen[t - 1] * keys.decay[t - kOwn][e] : keys.writer[s][e];
          slice.d_reader[t][e] = fma(d_scores[t], seen[t], slice.d_reader[t][e]);
        }
        FWP_UNROLL for (int t = kSpan; t-- > s + kOwn;) {
          d = fma(d_scores[t], keys.reader[t][e], t + 1 < kSpan ? d * keys.decay[t + 1 - kOwn][e] : 0);
          if (t > s + kOwn) slice.d_decay[t - kOwn][e] = fma(d, seen[t - 1], slice.d_decay[t - kOwn][e]);
        }
        slice.d_writer[s][e] += d;
      }
    }
  }

  // From the gradients of products over pairs of blocks of kGroups groups, those of products over single blocks.
  template <int kGroups, bool kBefore>
  FWP_DEVICE static void separate(Slice& slice, DProducts& d_products) {
    const DecayProducts<kGroups, kBefore> products(slice.keys);
    const bool read = reads<kGroups>();
    FWP_UNROLL for (int e = 0; e < 2; ++e) {
      const float neighbor = slice.keys.neighbor[kGroups - 1][e];
      float d_whole = 0;
      FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
        float &d_start = d_products.from_start[t][e], &d_end = d_products.to_end[t][e];
        d_whole = fma(read ? d_start : d_end, read ? products.from_start[t][e] : products.to_end[t][e], d_whole);
        d_start *= read ? neighbor : 1;
        d_end *= read ? 1 : neighbor;
      }
      if constexpr (kGroups > 1) d_whole += __shfl_xor_sync(0xffffffffu, d_whole, kSpan);
      d_whole = __shfl_xor_sync(0xffffffffu, d_whole, kGroups * kSpan);
      if (kGroups > 1 && group() % 2 == 0) continue;
      // The product of a block of groups is from_start of its last token, without kBefore.
      float &d_last = d_products.from_start[kSpan - 1][e], &d_decay = slice.d_decay[kSpan - 1][e];
      if (kBefore) d_decay = fma(d_whole, products.from_start[kSpan - 1][e], d_decay);
      d_last += kBefore ? d_whole * slice.keys.decay[kSpan - 1][e] : d_whole;
    }
  }

  // Add the gradients of products over a group to those of its decays.
  template <bool kBefore>
  FWP_DEVICE static void differentiate(Slice& slice, DProducts& d_products) {
    const DecayProducts<1, kBefore> products(slice.keys);
    const KeyNumbers& decay = slice.keys.decay;
    FWP_UNROLL for (int e = 0; e < 2; ++e) {
      FWP_UNROLL for (int t = kSpan; t-- > int(kBefore);) {
        const int last = kBefore ? t - 1 : t;  // the token of the product's last factor
        const float d = d_products.from_start[t][e];
        slice.d_decay[last][e] = fma(d, t > 0 ? products.from_start[t - 1][e] : 1, slice.d_decay[last][e]);
        if (t > 0) d_products.from_start[t - 1][e] = fma(d, decay[last][e], d_products.from_start[t - 1][e]);
      }
      FWP_UNROLL for (int t = 1; t < kSpan; ++t) {
        const float d = d_products.to_end[t - 1][e];
        slice.d_decay[t][e] = fma(d, products.to_end[t][e], slice.d_decay[t][e]);
        d_products.to_end[t][e] = fma(d, decay[t][e], d_products.to_end[t][e]);
      }
    }
  }

  // Replace tokens by their gradients. d_writer is the gradient of b K, and if the rule erases, d_reader that of -K where it
  // erases.
  FWP_DEVICE void put_others(const WarpTokens& to, const Memory& memory, Slice& slice) const {
    KeyNumbers keys;
    to.key.load(0, keys);
    FWP_UNROLL for (int t = 0; t < kSpan; ++t) {
      const int token = own_token(t);
      put_sum(fma(keys[t][0], slice.d_writer[t][0], keys[t][1] * slice.d_writer[t][1]), token, memory.d_rate);
      if (!to.by_key) put_sum(slice.d_decay[t][0] + slice.d_decay[t][1], token, memory.d_decay);
      const bool given = to.source[token] == kGiven;
      FWP_UNROLL for (int e = 0; e < 2; ++e) {
        slice.d_writer[t][e] *= to.rate[token];
        if constexpr (kErasesKey) slice.d_writer[t][e] -= slice.d_reader[t][e];
        if (!given) slice.d_decay[t][e] = 0;
      }
    }
    to.key.store(0, slice.d_writer);
    if (to.by_key) to.decay.store(0, slice.d_decay);
  }
  // The sum over the lanes of a token, for this warp.
  FWP_DEVICE void put_sum(float x, int token, float* to) const {
    FWP_UNROLL for (int distance = 1; distance < kSpan; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    if (own_number() == 0) to[this->warp() * kChunkTokens + token] = x;
  }

  FWP_DEVICE void store_gradients(int64_t n, const WarpTokens& tokens, const Memory& memory) const {
    this->store_vectors(d_q, n, tokens.query);
    this->store_vectors(d_k, n, tokens.key);
    if (tokens.by_key)
      this->store_vectors(d_decay, n, tokens.decay);
    else
      this->store_sums(d_decay, n, memory.d_decay, this->begins(memory.starts[kDocuments], n));
    if constexpr (kRemoves) {
      this->store_vectors(d_removal_key, n, tokens.removal_key);
      this->store_vectors(d_removal, n, tokens.removal);
    }
    this->store_sums(d_rate, n, memory.d_rate);
  }
};

}  // namespace fwp::cuda
