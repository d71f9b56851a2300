// Runs the chunks of rules that forget in memory full of signalling NaN, which end the program where one takes part in
// a computation. Arguments: keys, values, tokens, whether there is a state.
#include <cfenv>
#include <cstdlib>
#include <limits>
#include <vector>

#include "forget_chunk_backward.h"
#include "forget_chunk_forward.h"

using namespace fwp;
using Numbers = std::vector<float>;

Numbers draw(int64_t count) {
  Numbers numbers(count);
  for (float& x : numbers) x = 0.01f + 0.01f * drand48();  // the sums of long keys stay finite
  return numbers;
}

// Call f with a chunk in such memory.
template <typename Chunk, typename F>
void run(int64_t keys, int64_t values, F f) {
  const int64_t size = Chunk::scratch_size(keys, values);
  float* const memory = static_cast<float*>(::operator new(size * sizeof(float), std::align_val_t{kVectorBytes}));
  std::fill_n(memory, size, std::numeric_limits<float>::signaling_NaN());
  feenableexcept(FE_INVALID);
  Chunk chunk(keys, values, memory);
  f(chunk);
  fedisableexcept(FE_INVALID);
  ::operator delete(memory, std::align_val_t{kVectorBytes});
}

template <Fades fades, Erases erases>
void check(int64_t keys, int64_t values, int64_t length, bool has_state) {
  Numbers of_key[8], of_value[8], of_token[4], state = draw(keys * values), d_state = state, kept = state, final = state;
  for (Numbers& x : of_key) x = draw(length * keys);
  for (Numbers& x : of_value) x = draw(length * values);
  for (Numbers& x : of_token) x = draw(length);
  kept.resize((length / kKeptEvery + 1) * keys * values);
  const auto key = [&](int n) { return Tokens<float>{of_key[n].data(), keys}; };
  const auto value = [&](int n) { return Tokens<float>{of_value[n].data(), values}; };
  const auto rows = [&](Numbers& x) { return Tokens<float>{x.data(), values}; };

  ForgetTokens<float, Stored<float>> in{.q = key(0), .k = key(1), .v = value(0), .rate = {of_token[0].data(), 1}};
  ForgetGradients<float, Stored<float>> to{.q = key(2), .k = key(3), .v = value(1), .rate = {of_token[1].data(), 1}};
  if (fades == Fades::kHead)
    in.head_decay = {of_token[2].data(), 1};
  else
    in.key_decay = key(4), to.key_decay = key(5);
  if (fades == Fades::kKeyAndValue) in.value_decay = value(2), to.value_decay = value(3), in.rate = {}, to.rate = {};
  if (erases == Erases::kRemoval) in.removal = key(6), in.removal_key = key(7), to.removal = key(4), to.removal_key = key(5);

  float* const before = has_state ? state.data() : nullptr;
  run<ForgetChunkForward<float, fades, erases>>(keys, values, [&](auto& chunk) {
    chunk.forward(length, in, {before, values, 1}, value(4), value(5), rows(kept), {final.data(), values, 1});
  });
  if constexpr (fades != Fades::kHead)
    run<ForgetChunkBackward<float, fades, erases>>(keys, values, [&](auto& chunk) {
      chunk.backward(length, in, {before, values, 1}, constant(value(5)), constant(rows(kept)), value(6),
                     {before, values, 1}, to, {d_state.data(), values, 1});
    });
}

int main(int, char** arguments) {
  const int64_t keys = std::atoi(arguments[1]), values = std::atoi(arguments[2]), length = std::atoi(arguments[3]);
  const bool has_state = std::atoi(arguments[4]);
  check<Fades::kHead, Erases::kNothing>(keys, values, length, has_state);
  check<Fades::kHead, Erases::kKey>(keys, values, length, has_state);
  check<Fades::kKey, Erases::kKey>(keys, values, length, has_state);
  check<Fades::kKey, Erases::kRemoval>(keys, values, length, has_state);
  check<Fades::kKeyAndValue, Erases::kNothing>(keys, values, length, has_state);
}
