// The passes of rules that forget, on CPU tensors. forget.cpp and retrieve.cpp compile them.
#pragma once

#include <vector>

#include "../../cpu/forget_square.h"
#include "../../cpu/forget_tiles.h"
#include "passes.h"

namespace fwp::cpu {

// Token tensors by heads, as Of has their tokens. An absent member is null.
template <typename Real, typename Of>
struct ForgetHeads {
  const TokenTensorsOf<Heads<Real>> all;

  explicit ForgetHeads(const TokenViews& x) : all(x.map([](const View& view) { return Heads<Real>(view); })) {}

  // The tokens of head h, from key column i and value column j on.
  Of at(int64_t h, int64_t i, int64_t j) const {
    const auto vectors = [&](const Heads<Real>& x) {
      if constexpr (std::is_same_v<decltype(Of::q), Stored<std::remove_const_t<Real>>>)
        return x.stored(h);
      else
        return x.tokens(h);
    };
    const auto keys = [&](const Heads<Real>& x) { return vectors(x).from(i); };
    const auto values = [&](const Heads<Real>& x) { return vectors(x).from(j); };
    return {.q = keys(all.q), .k = keys(all.k), .v = values(all.v), .key_decay = keys(all.key_decay),
            .value_decay = values(all.value_decay), .head_decay = all.head_decay.rates(h), .rate = all.rate.rates(h),
            .removal = keys(all.removal), .removal_key = keys(all.removal_key)};
  }
};
template <typename Real>
using InputHeads = ForgetHeads<const Real, ForgetTokens<Real>>;
template <typename Real>
using GradientHeads = ForgetHeads<Real, ForgetGradients<Real>>;

// The columns of the states of head h from j on; null if none are kept.
template <typename Real>
Tokens<Real> kept_states(const Heads<Real>& kept, const Lengths& size, int64_t h, int64_t j = 0) {
  Real* const data = kept.tokens(h).data;
  return {data ? data + j : nullptr, size.Dv};
}

// Columns of a block in the backward pass: two vectors if there are enough registers.
inline int64_t backward_width(const Lengths& size, int64_t number_bytes) {
  const int64_t lanes = kVectorBytes / number_bytes;
  return kManyRegisters && size.Dk > lanes ? 2 * lanes : lanes;
}

// The forward scan. `kept` receives the state after each whole chunk.
template <Fades fades, Erases erases>
void forget_scan(const Forward& pass) {
  const Lengths& size = pass.size;
  using K = Kind<fades, erases>;
  // Each block reads all keys, queries and key decays. Wider blocks halve these reads, which outweighs passes of only
  // two tokens.
  constexpr bool wide = kManyRegisters && !K::retrieves;
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    const InputHeads<Real> inputs(pass.in);
    const Heads<const Real> initial(pass.initial);
    const Heads<Real> out(pass.out), final(pass.final), retrieved(pass.retrieved), kept(pass.kept);
    const auto run_block = [&](int64_t h, int64_t j, int64_t n, auto vectors, Real* work) {
      constexpr int NV = decltype(vectors)::value;
      StateBlock<Real, NV> block(size.Dk, n, initial.matrix(h, j), final.matrix(h, j), work);
      if constexpr (NV == 1 && !K::retrieves) {
        if (is_square<Real>(size)) {
          ForgetForwardSquare<Real, fades>{.block = block,
                                           .length = size.L,
                                           .in = inputs.at(h, 0, j),
                                           .out = out.tokens(h),
                                           .states = kept.tokens(h).data}
              .run();
          return block.finish();
        }
      }
      ForgetForward<Real, NV, K> scan{.block = block,
                                      .in = inputs.at(h, 0, j),
                                      .out = out.tokens(h).from(j),
                                      .retrieved = retrieved.tokens(h).from(j),
                                      .kept = kept_states(kept, size, h, j),
                                      .scratch = work + size.Dk * block.kWidth};
      if constexpr (NV == 4 && !wide)
        scan.run_token();
      else
        scan.run_tokens(size.L);
      block.finish();
    };
    if constexpr (wide)
      for_blocks<Real, 4>(size, size.Dk, size.Dv, run_block);
    else
      for_blocks<Real>(size, size.Dk, size.Dv, run_block);
  });
}

// The reverse scan, over blocks of key columns. `d_retrieved` is d_v or d_removed of a rule that retrieves.
template <Fades fades, Erases erases>
void forget_scan_backward(const Backward& pass, const View& d_retrieved = {}) {
  const Lengths& size = pass.size;
  using K = Kind<fades, erases>;
  const int64_t width = backward_width(size, pass.number_bytes);
  const SharedHeads shared(size, size.Dk, width);
  // Gradients that are summed over the blocks of a head.
  std::vector summed{&TokenViews::value_decay, &TokenViews::head_decay, &TokenViews::rate};
  if (erases != Erases::kKey) summed.push_back(&TokenViews::v);
  TokenViews sums;
  for (const auto x : summed) sums.*x = shared.in_parts(pass.to.*x);
  const auto of_part = [&](int64_t part) {
    TokenViews to = pass.to;
    for (const auto x : summed)
      if ((to.*x).defined()) to.*x = (sums.*x).select(0, part);
    return to;
  };
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    const InputHeads<Real> inputs(pass.in);
    const Heads<const Real> initial(pass.initial), d_final(pass.d_final), kept(pass.kept), d_out(pass.d_out);
    const Heads<const Real> retrieved(pass.retrieved), d_retrieved_(d_retrieved);
    const Heads<Real> d_initial(pass.d_initial);
    const auto run_block = [&](int64_t h, int64_t part, int64_t i, bool add, auto vectors, Real* work) {
      constexpr int NV = decltype(vectors)::value;
      const ForgetGradients<Real> to = GradientHeads<Real>(of_part(part)).at(h, i, 0);
      if constexpr (NV == 1 && !K::retrieves) {
        if (is_square<Real>(size)) {
          return ForgetBackwardSquare<Real, fades>{.length = size.L,
                                                   .in = inputs.at(h, 0, 0),
                                                   .d_out = d_out.tokens(h),
                                                   .to = to,
                                                   .initial = initial.matrix(h, 0, true),
                                                   .d_final = d_final.matrix(h, 0, true),
                                                   .d_initial = d_initial.matrix(h, 0, true),
                                                   .states = kept.tokens(h).data,
                                                   .work = work}
              .run();
        }
      }
      ForgetBackward<Real, NV, K>{.length = size.L,
                                  .rows = size.Dv,
                                  .columns = std::min(width, size.Dk - i),
                                  .in = inputs.at(h, i, 0),
                                  .d_out = d_out.tokens(h),
                                  .removed = retrieved.tokens(h),
                                  .d_retrieved = d_retrieved_.tokens(h),
                                  .to = to,
                                  .add = add,
                                  .initial = initial.matrix(h, i, true),
                                  .d_final = d_final.matrix(h, i, true),
                                  .d_initial = d_initial.matrix(h, i, true),
                                  .kept = kept.tokens(h).data + i * size.Dv,
                                  .kept_stride = size.Dk * size.Dv,
                                  .work = work}
          .run();
    };
    const int64_t scratch_size = std::max(ForgetBackward<Real, 1, K>::scratch(size.Dv) * width / kLanes<Real>,
                                          ForgetBackwardSquare<Real, fades>::scratch());
    shared.for_blocks<Real>(size.L * size.Dk * size.Dv, scratch_size,
                            [&](int64_t h, int64_t part, int64_t block, bool add, Real* work) {
      with_vectors<kPassTokens / 2>(width / kLanes<Real>, [&](auto vectors) {
        run_block(h, part, block * width, add, vectors, work);
      });
    });
    for (const auto x : summed) shared.add_parts<Real>(pass.to.*x, sums.*x);
  });
}

// In reverse over blocks of value columns: the gradients of written or removed values, and of the rates.
template <Fades fades, Erases erases>
void retrieved_backward(const Backward& pass, const View& d_retrieved) {
  const Lengths& size = pass.size;
  const int64_t L = size.L;
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    const int64_t vectors = block_vectors<Real>(size.Dk, size.Dv, 2), width = vectors * kLanes<Real>;
    const SharedHeads shared(size, size.Dv, width);
    const View d_rate_parts = shared.in_parts(pass.to.rate);
    const InputHeads<Real> inputs(pass.in);
    const Heads<const Real> d_out(pass.d_out), d_final(pass.d_final), retrieved(pass.retrieved);
    const Heads<Real> to(d_retrieved);
    shared.for_blocks<Real>(L * size.Dk * size.Dv, size.Dk * (width + 1),
                            [&](int64_t h, int64_t part, int64_t index, bool add, Real* work) {
      const Heads<Real> d_rate(d_rate_parts.defined() ? d_rate_parts.select(0, part) : d_rate_parts);
      with_vectors<2>(vectors, [&](auto vectors) {
        constexpr int NV = decltype(vectors)::value;
        const int64_t j = index * width;
        StateBlock<Real, NV> block(size.Dk, std::min(width, size.Dv - j), d_final.matrix(h, j), {nullptr, 0, 0}, work);
        RetrieveBackward<Real, NV, Kind<fades, erases>>{.block = block,
                                                        .length = L,
                                                        .in = inputs.at(h, 0, j).reversed(L),
                                                        .d_out = d_out.tokens(h).from(j).reversed(L),
                                                        .retrieved = retrieved.tokens(h).from(j).reversed(L),
                                                        .d_retrieved = to.tokens(h).from(j).reversed(L),
                                                        .d_rate = d_rate.rates(h).reversed(L),
                                                        .add = add,
                                                        .scratch = work + size.Dk * width}
            .run();
      });
    });
    shared.add_parts<Real>(pass.to.rate, d_rate_parts);
  });
}

// The errors times the rates: the written values, identical to the last bit.
inline View written_values(const Backward& pass) {
  const Lengths& size = pass.size;
  const View written = empty(size.values(), pass.number_bytes);
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    const Heads<const Real> error(pass.retrieved), rate(pass.in.rate);
    const Heads<Real> to(written);
    for_tokens(size.B * size.H * size.L, size.Dv, [&](int64_t token) {
      const int64_t h = token / size.L, t = token % size.L;
      const Real* from = error.tokens(h)[t];
      Real *row = to.tokens(h)[t], factor = rate.rates(h)[t];
      for (int64_t j = 0; j < size.Dv; ++j) row[j] = from[j] * factor;
    });
  });
  return written;
}

template <Fades fades, Erases erases>
void retrieve_scan_backward(const Backward& pass) {
  Backward scan = pass;
  View d_retrieved = pass.to.v;
  if (erases == Erases::kRemoval) d_retrieved = empty(pass.size.values(), pass.number_bytes);
  retrieved_backward<fades, erases>(pass, d_retrieved);
  if (erases == Erases::kKey) {
    scan.in.v = written_values(pass);
    scan.to.rate = View();
  }
  forget_scan_backward<fades, erases>(scan, d_retrieved);
}

// Call f(head, first column, number of columns, chunk) on threads; columns are divided if there are more threads than
// heads, which changes no bit.
template <typename Chunk, typename F>
void for_chunk_heads(const Lengths& size, bool divide, F f) {
  using Real = typename Chunk::Number;
  const int64_t heads = size.B * size.H, panels = blocks_of(size.Dv, Chunk::kColumns);
  const int64_t wanted = heads && divide ? (threads() + heads - 1) / heads : 1;
  const int64_t width = blocks_of(panels, std::min(wanted, panels)) * Chunk::kColumns, parts = blocks_of(size.Dv, width);
  at::parallel_for(0, heads * parts, grain_of(size.L * size.Dk * width), [&](int64_t begin, int64_t end) {
    const auto memory = scratch<Real>(Chunk::scratch_size(size.Dk, width));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t column = item % parts * width, n = std::min(width, size.Dv - column);
      Chunk chunk(size.Dk, n, memory.get());
      f(item / parts, column, chunk);
    }
  });
}

// Call run(kind of chunks, arguments that they have before others). A decoding step in bfloat16 has no use for tiles. Without
// them, a decay per head is one per key in the backward pass.
template <typename Real, Fades fades, Erases erases, typename Pass, typename F>
void run_chunks(const Pass& pass, F run) {
  constexpr bool forward = std::is_same_v<Pass, Forward>;
  constexpr bool in_tiles = fades == Fades::kHead || (fades == Fades::kKey && erases != Erases::kRemoval);
  if constexpr (in_tiles && std::is_same_v<Real, float>)
    if (pass.in.q.number_bytes == sizeof(BFloat16) && pass.size.L > 1)
      if (const TileUnit* unit = TileUnit::chosen()) return run(std::type_identity<ForgetTiles<fades, erases>>{}, *unit);
  if constexpr (forward)
    run(std::type_identity<ForgetChunkForward<Real, fades, erases>>{});
  else
    run(std::type_identity<ForgetChunkBackward<Real, fades == Fades::kHead ? Fades::kKey : fades, erases>>{});
}

template <Fades fades, Erases erases>
void chunk_forward(const Forward& pass) {
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    const ForgetHeads<const Real, ForgetTokens<Real, Stored<Real>>> inputs(pass.in);
    const Heads<const Real> initial(pass.initial);
    const Heads<Real> out(pass.out), final(pass.final), retrieved(pass.retrieved), kept(pass.kept);
    const auto run = [&]<typename Chunk>(std::type_identity<Chunk>, const auto&... unit) {
      for_chunk_heads<Chunk>(pass.size, true, [&](int64_t h, int64_t j, auto& chunk) {
        chunk.forward(unit..., pass.size.L, inputs.at(h, 0, j), initial.matrix(h, j), out.stored(h).from(j),
                      retrieved.stored(h).from(j), kept_states(kept, pass.size, h, j), final.matrix(h, j));
      });
    };
    run_chunks<Real, fades, erases>(pass, run);
  });
}

template <Fades fades, Erases erases>
void chunk_backward(const Backward& pass) {
  with_number(pass.number_bytes, [&]<typename Real>(Real) {
    const ForgetHeads<const Real, ForgetTokens<Real, Stored<Real>>> inputs(pass.in);
    const ForgetHeads<Real, ForgetGradients<Real, Stored<Real>>> to(pass.to);
    const Heads<const Real> initial(pass.initial), d_final(pass.d_final), retrieved(pass.retrieved), kept(pass.kept);
    const Heads<const Real> d_out(pass.d_out);
    const Heads<Real> d_initial(pass.d_initial);
    const auto run = [&]<typename Chunk>(std::type_identity<Chunk>, const auto&... unit) {
      for_chunk_heads<Chunk>(pass.size, false, [&](int64_t h, int64_t, auto& chunk) {
        chunk.backward(unit..., pass.size.L, inputs.at(h, 0, 0), initial.matrix(h, 0), retrieved.tokens(h),
                       kept_states(kept, pass.size, h), d_out.stored(h), d_final.matrix(h, 0), to.at(h, 0, 0),
                       d_initial.matrix(h, 0));
      });
    };
    run_chunks<Real, fades, erases>(pass, run);
  });
}

template <Rule rule>
void forward(const Forward& pass) {
  if (is_large(pass.size))
    chunk_forward<fades_of(rule), erases_of(rule)>(pass);
  else
    forget_scan<fades_of(rule), erases_of(rule)>(pass);
}

template <Rule rule>
void backward(const Backward& pass) {
  constexpr Fades fades = fades_of(rule);
  constexpr Erases erases = erases_of(rule);
  if (is_large(pass.size))
    chunk_backward<fades, erases>(pass);
  else if constexpr (erases == Erases::kNothing)
    forget_scan_backward<fades, erases>(pass);
  else
    retrieve_scan_backward<fades, erases>(pass);
}

}  // namespace fwp::cpu
