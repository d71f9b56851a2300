// Rules that forget and retrieve before they write, and their gradients, on CPU tensors.

#include "forget.h"

namespace fwp::cpu {
namespace {

// In reverse over blocks of value columns: the gradients of written or removed values, and of the rates.
template <Fades fades, Erases erases>
void retrieved_backward(const Backward& pass, const View& d_retrieved) {
  const Lengths& size = pass.size;
  const int64_t L = size.L;
  FWP_DISPATCH(pass.item, {
    const int64_t vectors = block_vectors<A>(size.Dk, size.Dv, 2), width = vectors * kLanes<A>;
    const SharedHeads shared(size, size.Dv, width);
    const View d_rate_parts = shared.in_parts(pass.to.rate);
    const InputHeads<A> of(pass.in);
    const Heads<const A> d_out(pass.d_out), d_final(pass.d_final), retrieved(pass.retrieved);
    const Heads<A> to(d_retrieved);
    shared.for_blocks<A>(L * size.Dk * size.Dv, size.Dk * (width + 1),
                         [&](int64_t h, int64_t part, int64_t index, bool add, A* work) {
      const Heads<A> d_rate(d_rate_parts.defined() ? d_rate_parts.select(0, part) : d_rate_parts);
      with_vectors<2>(vectors, [&](auto vectors) {
        constexpr int NV = decltype(vectors)::value;
        const int64_t j = index * width;
        StateBlock<A, NV> block(size.Dk, std::min(width, size.Dv - j), d_final.matrix(h, j), {nullptr, 0, 0}, work);
        RetrieveBackward<A, NV, Kind<fades, erases>>{block,
                                                     L,
                                                     of.at(h, 0, j).reversed(L),
                                                     d_out.tokens(h).from(j).reversed(L),
                                                     retrieved.tokens(h).from(j).reversed(L),
                                                     to.tokens(h).from(j).reversed(L),
                                                     d_rate.rates(h).reversed(L),
                                                     add,
                                                     work + size.Dk * width}
            .run();
      });
    });
    shared.add_parts<A>(pass.to.rate, d_rate_parts);
  })
}

// The errors times the rates: the written values, identical to the last bit.
View written_values(const Backward& pass) {
  const Lengths& size = pass.size;
  const View written = empty(size.values(), pass.item);
  FWP_DISPATCH(pass.item, {
    const Heads<const A> error(pass.retrieved), rate(pass.in.rate);
    const Heads<A> to(written);
    for_tokens(size.B * size.H * size.L, size.Dv, [&](int64_t token) {
      const int64_t h = token / size.L, t = token % size.L;
      const A* from = error.tokens(h)[t];
      A *row = to.tokens(h)[t], factor = rate.rates(h)[t];
      for (int64_t j = 0; j < size.Dv; ++j) row[j] = from[j] * factor;
    });
  })
  return written;
}

template <Fades fades, Erases erases>
void scan_backward(const Backward& pass) {
  Backward scan = pass;
  View d_retrieved = pass.to.v;
  if (erases == Erases::kRemoval) d_retrieved = empty(pass.size.values(), pass.item);
  retrieved_backward<fades, erases>(pass, d_retrieved);
  if (erases == Erases::kKey) {
    scan.in.v = written_values(pass);
    scan.to.rate = View();
  }
  forget_scan_backward<fades, erases>(scan, d_retrieved);
}

template <Fades fades, Erases erases>
void backward(const Backward& pass) {
  if (in_chunks(pass.size))
    chunk_backward<fades, erases>(pass);
  else
    scan_backward<fades, erases>(pass);
}

}  // namespace

void retrieve_forward(const Forward& pass) {
  if (pass.in.removal.defined())
    forget_forward<Fades::kKey, Erases::kRemoval>(pass);
  else if (pass.in.head_decay.defined())
    forget_forward<Fades::kHead, Erases::kKey>(pass);
  else
    forget_forward<Fades::kKey, Erases::kKey>(pass);
}

void retrieve_backward(const Backward& pass) {
  if (pass.in.removal.defined())
    backward<Fades::kKey, Erases::kRemoval>(pass);
  else if (pass.in.head_decay.defined())
    backward<Fades::kHead, Erases::kKey>(pass);
  else
    backward<Fades::kKey, Erases::kKey>(pass);
}

}  // namespace fwp::cpu
