// The recurrent delta rule of ../cpu/recurrent_delta.h, token by token: a block has a head. All matrices are in registers, all
// vectors in shared memory.
//
// Four lanes share a column, and sum over its rows by shuffles. The backward pass also sums along the rows of W, G and R. There
// four lanes share a row of them. They have G both ways, in two copies that change by the same operations.
#pragma once

#include "scan.cuh"

namespace fwp::cuda {

constexpr int kRecurrentAhead = 4;               // tokens that are loaded while those before them are used
constexpr int64_t kGreatestRecurrentDelta = 64;  // d: GREATEST of fairseq_fwp/ops/recurrent_delta.py

// What both passes share. kSize: d, rounded up to a power of two; what is beyond d is zero.
template <typename Real, int kSize, int kTokenVectors>
struct RecurrentBlock {
  static constexpr int kLanes = 4, kRows = kSize / kLanes, kThreads = kSize * kLanes;
  static constexpr int kToken = kTokenVectors * kSize, kLoaded = kRecurrentAhead * kTokenVectors / kLanes;

  const RecurrentSizes& size;
  const int d, gates, lane, column;
  const int64_t head, batch, head_of_batch;
  Real* const tokens;    // kRecurrentAhead of them, of kTokenVectors vectors each
  Real loaded[kLoaded];  // numbers of the tokens to come

  FWP_DEVICE explicit RecurrentBlock(const RecurrentSizes& size_)
      : size(size_), d(int(size_.d)), gates(3 * d + 1), lane(int(threadIdx.x) % kLanes), column(int(threadIdx.x) / kLanes),
        head(blockIdx.x), batch(head / size_.H), head_of_batch(head % size_.H),
        tokens(reinterpret_cast<Real*>(shared_memory())) {}

  FWP_DEVICE bool inside() const { return column < d; }
  FWP_DEVICE int row(int r) const { return (r / kPiece * kLanes + lane) * kPiece + r % kPiece; }
  FWP_DEVICE int64_t token(int64_t t) const { return (batch * size.L + t) * size.H + head_of_batch; }
  FWP_DEVICE int mark(int64_t t) const { return size.marks ? size.marks[batch * size.L + t] : 0; }
  FWP_DEVICE Real* vector(int n) const { return tokens + kRecurrentAhead * kToken + n * kSize; }  // after the tokens

  // Load the numbers number(t, part, column) of tokens from `first` on.
  template <typename F>
  FWP_DEVICE void bring(int64_t first, F number) {
    FWP_UNROLL for (int n = 0; n < kLoaded; ++n) {
      const int at = int(threadIdx.x) + n * kThreads, i = at % kSize;
      const int64_t t = first + at / kToken;
      loaded[n] = t >= 0 && t < size.L && i < d ? number(t, at / kSize % kTokenVectors, i) : Real(0);
    }
  }
  FWP_DEVICE void put_tokens() const {
    FWP_UNROLL for (int n = 0; n < kLoaded; ++n) tokens[int(threadIdx.x) + n * kThreads] = loaded[n];
  }

  // This lane's rows of a vector in shared memory, and of a matrix at from[first] with steps from row to row and from column to
  // column; zeros from null.
  FWP_DEVICE void read(const Real* from, Real (&x)[kRows]) const {
    FWP_UNROLL for (int p = 0; p < kRows / kPiece; ++p) {
      const Piece<Real> found = reinterpret_cast<const Piece<Real>*>(from)[p * kLanes + lane];
      FWP_UNROLL for (int i = 0; i < kPiece; ++i) x[p * kPiece + i] = found.x[i];
    }
  }
  FWP_DEVICE void load(const Real* from, int offset, int row_step, int column_step, Real (&x)[kRows]) const {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      x[r] = from && inside() && row(r) < d ? from[offset + row(r) * row_step + column * column_step] : Real(0);
  }
  FWP_DEVICE void store(const Real (&x)[kRows], Real* to) const {
    FWP_UNROLL for (int r = 0; r < kRows; ++r)
      if (inside() && row(r) < d) to[row(r) * d + column] = x[r];
  }
  FWP_DEVICE void clear(Real (&x)[kRows]) const {
    FWP_UNROLL for (int r = 0; r < kRows; ++r) x[r] = Real(0);
  }
  // Before tokens that are a multiple of kKeptEvery.
  FWP_DEVICE int64_t kept(int64_t t) const {
    return (head * ((size.L + kKeptEvery - 1) / kKeptEvery) + t / kKeptEvery) * d * d;
  }
};

template <typename Real, int kSize>
struct RecurrentForwardPass {
  static constexpr int kTokenVectors = 5, kBlockVectors = 5;  // q, k, v and the rate of a token, and z; the block's
  using Block = RecurrentBlock<Real, kSize, kTokenVectors>;

  RecurrentDeltaForward<Real> of;

  FWP_DEVICE void run() const {
    constexpr int kRows = Block::kRows;
    Block block(of);
    const int d = block.d, gates = block.gates, lane = block.lane, column = block.column;
    Real *const logits = block.vector(0), *const powers = block.vector(2), *const fed_back = block.vector(4);
    Real* const memory = of.memory + block.head * d * d;
    const Real* const r = of.weights ? of.weights + block.head_of_batch * d * gates : nullptr;
    Real w[kRows], of_q[kRows], of_k[kRows], of_v[kRows], of_rate[kRows];
    block.load(memory, 0, d, 1, w), block.load(r, 3 * d, gates, 0, of_rate);
    block.load(r, 0, gates, 1, of_q), block.load(r, d, gates, 1, of_k), block.load(r, 2 * d, gates, 1, of_v);
    const auto number = [&](int64_t t, int part, int i) {
      if (part == 4) return of.z ? of.z[block.token(t) * d + i] : Real(0);
      return of.x[block.token(t) * gates + part * d + (part == 3 ? 0 : i)];
    };
    Real o = block.inside() ? of.first_output[block.head * d + column] : Real(0);
    block.bring(0, number);
    if (lane == 0) fed_back[column] = tanh(o);
    for (int64_t t = 0; t < of.L; ++t) {
      if (t % kRecurrentAhead == 0) {
        block.put_tokens();
        block.bring(t + kRecurrentAhead, number);
        __syncthreads();
      }
      if (of.kept && t % kKeptEvery == 0) block.store(w, of.kept + block.kept(t));
      const Real* const x = block.tokens + t % kRecurrentAhead * Block::kToken;
      const int mark = block.mark(t);
      if (mark & kBegins) block.clear(w), o = Real(0);
      Real own = Real(0);  // what this lane saves
      if (!(mark & kIsPadding)) {
        Real logit[4] = {};
        if (r) {
          Real s[kRows];
          block.read(fed_back, s);
          if (mark & kBegins) block.clear(s);
          FWP_UNROLL for (int i = 0; i < kRows; ++i) {
            logit[0] = fma(s[i], of_q[i], logit[0]), logit[1] = fma(s[i], of_k[i], logit[1]);
            logit[2] = fma(s[i], of_v[i], logit[2]), logit[3] = fma(s[i], of_rate[i], logit[3]);
          }
          add_lanes(logit, Block::kLanes);
        } else {
          logit[0] = o;
        }
        FWP_UNROLL for (int part = 0; part < 4; ++part) logit[part] += x[part * kSize + column];
        // The first two lanes have the softmax of q and of k.
        const bool has_k = lane == 1;
        const Real own_logit = has_k ? logit[1] : logit[0];
        if (lane < 2) logits[lane * kSize + column] = block.inside() ? own_logit : -Real(INFINITY);
        __syncthreads();
        Real q[kRows], k[kRows];
        block.read(logits, q), block.read(logits + kSize, k);
        const Real most_q = greatest(q), most_k = greatest(k);
        own = exp(own_logit - (has_k ? most_k : most_q));
        if (lane < 2) powers[lane * kSize + column] = block.inside() ? own : Real(0);
        __syncthreads();
        block.read(powers, q), block.read(powers + kSize, k);
        Real sums[3] = {};
        FWP_UNROLL for (int i = 0; i < kRows; ++i) sums[0] += q[i], sums[1] += k[i], sums[2] = fma(k[i], w[i], sums[2]);
        add_lanes(sums, Block::kLanes);
        const Real of_sum_q = Real(1) / sums[0], of_sum_k = Real(1) / sums[1];
        const Real e = logit[2] - sums[2] * of_sum_k, b = Real(1) / (Real(1) + exp(-logit[3])), write = b * e * of_sum_k;
        Real found[1] = {};
        FWP_UNROLL for (int i = 0; i < kRows; ++i) w[i] = fma(k[i], write, w[i]), found[0] = fma(q[i], w[i], found[0]);
        add_lanes(found, Block::kLanes);
        o = fma(found[0], of_sum_q, x[4 * kSize + column]);
        own = lane == 0 ? own * of_sum_q : lane == 1 ? own * of_sum_k : lane == 2 ? e : b;
      }
      if (of.saved && (lane < 3 ? block.inside() : column == 0))
        of.saved[block.token(t) * gates + lane * d + column] = own;
      if (lane == 0 && block.inside()) of.out[block.token(t) * d + column] = o;
      if (lane == 0) fed_back[column] = tanh(o);
      __syncthreads();
    }
    block.store(w, memory);
  }

 private:
  static FWP_DEVICE Real greatest(const Real (&x)[Block::kRows]) {
    Real most = x[0];
    FWP_UNROLL for (int i = 1; i < Block::kRows; ++i) most = x[i] > most ? x[i] : most;
    for (int distance = 1; distance < Block::kLanes; distance *= 2) {
      const Real other = __shfl_xor_sync(0xffffffffu, most, distance);
      most = other > most ? other : most;
    }
    return most;
  }
};

// Its block has column i of G, and row i of W, G and R.
template <typename Real, int kSize>
struct RecurrentBackwardPass {
  static constexpr int kTokenVectors = 6, kBlockVectors = 4;  // q, k, e, the gradient of o, o before, the rate; the block's
  using Block = RecurrentBlock<Real, kSize, kTokenVectors>;

  RecurrentDeltaBackward<Real> of;

  FWP_DEVICE void run() const {
    constexpr int kRows = Block::kRows;
    Block block(of);
    const int d = block.d, gates = block.gates, lane = block.lane, column = block.column;
    Real *const of_out = block.vector(0), *const of_query = block.vector(1), *const of_key = block.vector(2),
             *const of_error = block.vector(3);
    Real* const d_memory = of.d_memory + block.head * d * d;
    const Real* const r = of.weights ? of.weights + block.head_of_batch * d * gates : nullptr;
    Real w[kRows], g[kRows], g_row[kRows], of_q[kRows], of_k[kRows], of_v[kRows];
    block.load(of.memory + block.head * d * d, 0, 1, d, w);
    block.load(d_memory, 0, d, 1, g), block.load(d_memory, 0, 1, d, g_row);
    block.load(r, 0, 1, gates, of_q), block.load(r, d, 1, gates, of_k), block.load(r, 2 * d, 1, gates, of_v);
    const Real of_rate = r && block.inside() ? r[column * gates + 3 * d] : Real(0);
    const auto number = [&](int64_t t, int part, int i) {
      if (part == 3) return of.d_out[block.token(t) * d + i];
      if (part == 4) return t > 0 ? of.out[block.token(t - 1) * d + i] : of.first_output[block.head * d + i];
      return of.saved[block.token(t) * gates + (part == 5 ? 3 * d : part * d + i)];
    };
    Real m = Real(0);  // the gradient of o through later tokens
    block.bring((of.L - 1) / kRecurrentAhead * kRecurrentAhead, number);
    for (int64_t t = of.L - 1; t >= 0; --t) {
      if (t == of.L - 1 || (t + 1) % kRecurrentAhead == 0) {
        __syncthreads();
        block.put_tokens();
        block.bring(t / kRecurrentAhead * kRecurrentAhead - kRecurrentAhead, number);
        __syncthreads();
      }
      if ((t + 1) % kKeptEvery == 0 && t + 1 < of.L) block.load(of.kept + block.kept(t + 1), 0, 1, d, w);
      const Real* const token = block.tokens + t % kRecurrentAhead * Block::kToken;
      const Real *const queries = token, *const keys = token + kSize, *const errors = token + 2 * kSize;
      const int mark = block.mark(t);
      Real l = m + token[3 * kSize + column], d_x = Real(0), d_z = Real(0);
      if (mark & kIsPadding) {
        m = l;
      } else {
        if (lane == 0) of_out[column] = l;
        __syncthreads();
        const Real own_q = queries[column], own_k = keys[column], b = token[5 * kSize];
        Real q[kRows], k[kRows], u[kRows], l_row[kRows];
        block.read(queries, q), block.read(keys, k), block.read(errors, u), block.read(of_out, l_row);
        Real sums[2] = {};  // of q, and what k reads of G
        FWP_UNROLL for (int i = 0; i < kRows; ++i) {
          u[i] *= b;
          sums[0] = fma(w[i], l_row[i], sums[0]), w[i] = fma(-own_k, u[i], w[i]);
          g[i] = fma(q[i], l, g[i]), g_row[i] = fma(own_q, l_row[i], g_row[i]);
          sums[1] = fma(k[i], g[i], sums[1]);
        }
        add_lanes(sums, Block::kLanes);
        const Real d_q = sums[0], d_e = b * sums[1];
        if (lane < 2) (lane == 0 ? of_query : of_error)[column] = lane == 0 ? d_q : d_e;
        __syncthreads();
        Real d_q_row[kRows], d_e_row[kRows], more[3] = {};  // of k, of the rate, and of the softmax of q
        block.read(of_query, d_q_row), block.read(of_error, d_e_row), block.read(errors, l_row);
        FWP_UNROLL for (int i = 0; i < kRows; ++i) {
          more[0] = fma(g_row[i], u[i], fma(-w[i], d_e_row[i], more[0]));
          more[1] = fma(l_row[i], d_e_row[i], more[1]), more[2] = fma(q[i], d_q_row[i], more[2]);
          g[i] = fma(-k[i], d_e, g[i]), g_row[i] = fma(-own_k, d_e_row[i], g_row[i]);
        }
        add_lanes(more, Block::kLanes);
        const Real d_k = more[0], d_rate = (Real(1) - b) * more[1], mean_q = more[2];
        if (lane == 0) of_key[column] = d_k;
        __syncthreads();
        Real d_k_row[kRows], mean_k[1] = {};
        block.read(of_key, d_k_row);
        FWP_UNROLL for (int i = 0; i < kRows; ++i) mean_k[0] = fma(k[i], d_k_row[i], mean_k[0]);
        add_lanes(mean_k, Block::kLanes);
        const Real d_logit_q = own_q * (d_q - mean_q);
        d_x = lane == 0 ? d_logit_q : lane == 1 ? own_k * (d_k - mean_k[0]) : lane == 2 ? d_e : d_rate;
        d_z = l;
        if (r) {
          Real back[1] = {};
          FWP_UNROLL for (int i = 0; i < kRows; ++i) {
            back[0] = fma(q[i] * (d_q_row[i] - mean_q), of_q[i], back[0]);
            back[0] = fma(k[i] * (d_k_row[i] - mean_k[0]), of_k[i], fma(d_e_row[i], of_v[i], back[0]));
          }
          add_lanes(back, Block::kLanes);
          const Real s = tanh(token[4 * kSize + column]);
          m = fma(d_rate, of_rate, back[0]) * (Real(1) - s * s);
        } else {
          m = d_logit_q;
        }
      }
      if (lane < 3 ? block.inside() : column == 0) of.d_x[block.token(t) * gates + lane * d + column] = d_x;
      if (lane == 3 && block.inside()) of.d_z[block.token(t) * d + column] = d_z;
      if (!(mark & kBegins)) continue;
      block.clear(g), block.clear(g_row), m = Real(0);
      rebuild(block, t, w);
    }
    block.store(g, d_memory);
    if (lane == 0 && block.inside()) of.d_first_output[block.head * d + column] = m;
  }

 private:
  // W before token t, which is a document's first: from the state that was kept before it.
  FWP_DEVICE void rebuild(const Block& block, int64_t t, Real (&w)[Block::kRows]) const {
    const int d = block.d;
    block.load(of.kept + block.kept(t), 0, 1, d, w);
    for (int64_t before = t / kKeptEvery * kKeptEvery; before < t; ++before) {
      const int mark = block.mark(before);
      if (mark & kBegins) block.clear(w);
      if (mark & kIsPadding) continue;
      const Real* const saved = of.saved + block.token(before) * block.gates;
      const Real k = block.inside() ? saved[d + block.column] : Real(0), b = saved[3 * d];
      FWP_UNROLL for (int i = 0; i < Block::kRows; ++i) {
        const int row = block.row(i);
        if (row < d) w[i] = fma(k, b * saved[2 * d + row], w[i]);
      }
    }
  }
};

}  // namespace fwp::cuda
