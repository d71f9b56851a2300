// Executes kernels in nvcc's PTX on the CPU and finds races. interpreter.py makes their text, the emulator launches.
//
// Threads take turns of random lengths. Only a barrier of the block (bar.sync) or of the warp (bar.warp.sync) orders
// accesses of two threads, and cp.async.wait_group those of a copy. Shuffles and matrix products order nothing.
// Barriers have whole blocks or warps, so a vector clock is two numbers: how many of each kind a thread has passed.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace {

using Address = uint64_t;
constexpr int kWarp = 32, kLongestTurn = 400;       // threads, instructions
constexpr Address kSharedMemory = 4096, kCell = 2;  // as in interpreter.py; bytes that are written at least

struct Thread;
struct Instruction;
using Handler = void (*)(Thread*, const Instruction&);  // of a thread, or of the first of a warp or block
enum class State { ready, at_warp, at_block, ended };   // waits for its warp or block
enum class Use { read, write, begin_copy, end_copy };

struct Instruction {
  std::string place, name;
  char space;  // shared, global or parameters
  int count, negated, predicate;
  Address offset;
  std::array<int, 14> operands;  // registers, also of constants and labels
  Handler run;
  State waits;
};
struct Kernel {
  std::vector<uint64_t> registers;  // at the start
  std::vector<Instruction> code;
};
// Who executes what, and when. A thread of -1 stands for several of a warp.
struct Point {
  int block = -1, warp = -1, thread = -1, barriers = 0, syncs = 0;
  size_t at = 0;
};
struct Copy {
  Address to, from, bytes;
  int group;
};
struct Thread : Point {
  State state = State::ready;
  int groups = 0;
  std::vector<Copy> copies;
  std::vector<uint64_t> registers;
};
// The last write of kCell bytes, and the last reads of each warp since then.
struct Cell {
  Point write;
  bool copying = false;
  std::vector<Point> reads;
};

std::map<std::string, Kernel> kernels;
std::mt19937_64 draw;
// Of the launch and the block that run.
const Kernel* kernel;
const char* argument;
std::vector<Thread> threads;
std::vector<char> shared;
std::vector<Cell> shared_cells;
std::unordered_map<Address, Cell> global_cells;

[[noreturn]] void fail(const Thread& t, const std::string& what) {
  const Instruction& i = kernel->code[t.at];
  const std::string who = "thread " + std::to_string(t.thread) + " of block " + std::to_string(t.block);
  throw std::runtime_error(i.place + ", " + i.name + ": " + who + " " + what);
}

template <typename T>
T get(const Thread& t, int number) {
  T x;
  std::memcpy(&x, &t.registers[size_t(number)], sizeof x);
  return x;
}
template <typename T>
void put(Thread& t, int number, T x) {
  std::memcpy(&(t.registers[size_t(number)] = 0), &x, sizeof x);
}

void check_order(const Point& p, const Thread& t, Use use) {
  const bool in_warp = p.warp == t.warp && (p.syncs < t.syncs || p.thread == t.thread);
  if (p.block < 0 || (p.block == t.block && (p.barriers < t.barriers || in_warp))) return;
  const std::string what = use == Use::read ? "reads" : "writes", who = "warp " + std::to_string(p.warp);
  const std::string where = std::to_string(p.block) + " uses at " + kernel->code[p.at].place;
  fail(t, "races: it " + what + " what " + who + " of block " + where);
}

void record(Cell& cell, const Thread& t, Use use) {
  if (cell.copying && use != Use::end_copy) fail(t, "races: a copy to this place is under way");
  check_order(cell.write, t, use);
  if (use != Use::read) {
    for (const Point& read : cell.reads) check_order(read, t, use);
    cell = {t, use == Use::begin_copy, {}};
    return;
  }
  for (Point& read : cell.reads)
    if (read.block == t.block && read.warp == t.warp) {
      const bool same = read.thread == t.thread || read.barriers < t.barriers || read.syncs < t.syncs;
      read = t;
      if (!same) read.thread = -1;
      return;
    }
  cell.reads.push_back(t);
}

// Checks and records an access. Returns where its bytes are.
char* reach(const Thread& t, char space, Address address, size_t bytes, Use use) {
  if (address % bytes) fail(t, "is at an address that is not a multiple of " + std::to_string(bytes));
  if (space == 'p') return const_cast<char*>(argument) + address;
  if (address < kSharedMemory) fail(t, "is at address " + std::to_string(address));
  if (space == 's') address -= kSharedMemory;
  if (space == 's' && address + bytes > shared.size()) fail(t, "is beyond shared memory");
  if (use != Use::read && bytes < kCell) fail(t, "writes less than the detector of races tells apart");
  for (Address cell = address / kCell; cell * kCell < address + bytes; ++cell)
    record(space == 's' ? shared_cells[cell] : global_cells[cell], t, use);
  return space == 's' ? &shared[address] : reinterpret_cast<char*>(address);
}

template <typename T, bool writes>
void move(Thread* t, const Instruction& i) {
  const size_t count = size_t(i.count);
  const Address address = get<Address>(*t, i.operands[writes ? 0 : count]) + i.offset;
  T* const x = reinterpret_cast<T*>(reach(*t, i.space, address, count * sizeof(T), writes ? Use::write : Use::read));
  for (size_t n = 0; n < count; ++n)
    if (writes) x[n] = get<T>(*t, i.operands[n + 1]);
    else put(*t, i.operands[n], x[n]);
}

// A copy arrives when it begins, or when it is waited for.
void arrive(const Copy& copy) {
  std::memset(&shared[copy.to - kSharedMemory], 0, 16);
  std::memcpy(&shared[copy.to - kSharedMemory], reinterpret_cast<char*>(copy.from), copy.bytes);
}
void begin_copy(Thread* t, const Instruction& i) {
  const Address to = get<Address>(*t, i.operands[0]), from = get<Address>(*t, i.operands[1]);
  t->copies.push_back({to, from, get<uint32_t>(*t, i.operands[3]), t->groups});
  if (t->copies.back().bytes) reach(*t, 'g', from, 16, Use::read);
  reach(*t, 's', to, 16, Use::begin_copy);
  if (draw() % 2) arrive(t->copies.back());
}
void wait_copies(Thread* t, const Instruction& i) {
  while (!t->copies.empty() && t->copies[0].group < t->groups - get<int>(*t, i.operands[0])) {
    reach(*t, 's', t->copies[0].to, 16, Use::end_copy);
    arrive(t->copies[0]);
    t->copies.erase(t->copies.begin());
  }
}

void end(Thread* t, const Instruction&) {
  if (!t->copies.empty()) fail(*t, "ends before its copies");
  t->state = State::ended;
}

void shuffle(Thread* lanes, const Instruction& i) {
  uint32_t given[kWarp];
  for (int n = 0; n < kWarp; ++n) given[n] = get<uint32_t>(lanes[n], i.operands[2]);
  if (get<int>(*lanes, i.operands[5]) != -1) fail(*lanes, "shuffles a part of a warp");
  for (int n = 0; n < kWarp; ++n) put(lanes[n], i.operands[0], given[n ^ get<int>(lanes[n], i.operands[3])]);
}

// The emulator's matrix products and loads.
std::vector<emulator::Fiber> fibers(kWarp);
void multiply(Thread* lanes, const Instruction& i) {
  const auto word = [](size_t lane, size_t n) { return reinterpret_cast<uint32_t*>(&fibers[lane].fragments) + n; };
  for (size_t lane = 0; lane < kWarp; ++lane)
    for (size_t n = 0; n < 10; ++n) *word(lane, n) = get<uint32_t>(lanes[lane], i.operands[4 + n]);
  emulator::multiply(fibers.data());
  for (size_t lane = 0; lane < kWarp; ++lane)
    for (size_t n = 0; n < 4; ++n) put(lanes[lane], i.operands[n], *word(lane, 6 + n));
}
template <bool transposed>
void load_matrices(Thread* lanes, const Instruction& i) {
  for (size_t lane = 0; lane < kWarp; ++lane) {
    const char* const row = reach(lanes[lane], 's', get<Address>(lanes[lane], i.operands[4]), 16, Use::read);
    fibers[lane].row = reinterpret_cast<const uint16_t*>(row);
  }
  emulator::load(fibers.data(), transposed);
  for (size_t lane = 0; lane < kWarp; ++lane)
    for (size_t n = 0; n < 4; ++n) put(lanes[lane], i.operands[n], fibers[lane].fragments.a[n]);
}

// Those with .sync wait for their warp, or bar.sync for its block.
const std::map<std::string, Handler> kOpcodes = {
    {"nop", [](Thread*, const Instruction&) {}},
    {"bra", [](Thread* t, const Instruction& i) { t->at = get<size_t>(*t, i.operands[0]) - 1; }},
    {"ret", end},
    {"bar.sync", [](Thread*, const Instruction&) { for (Thread& t : threads) ++t.barriers; }},
    {"bar.warp.sync", [](Thread* t, const Instruction&) { for (int n = 0; n < kWarp; ++n) ++t[n].syncs; }},
    {"shfl.sync.bfly.b32", shuffle},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", multiply},
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", load_matrices<false>},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", load_matrices<true>},
    {"cp.async.cg.shared.global", begin_copy},
    {"cp.async.commit_group", [](Thread* t, const Instruction&) { ++t->groups; }},
    {"cp.async.wait_group", wait_copies},
};

uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t bytes = 0;
  for (int n = 0; n < 4; ++n) bytes |= uint32_t((uint64_t(y) << 32 | x) >> (selector >> 4 * n & 7) * 8 & 0xff) << 8 * n;
  return bytes;
}
uint64_t mask(uint32_t first, uint32_t count) { return ((1ull << count) - 1) << first; }

#define IF(opcode, result)                                                                                 \
  if (name == opcode) return [](Thread* t, const Instruction& i) {                                         \
    [[maybe_unused]] const T x = get<T>(*t, i.operands[1]), y = get<T>(*t, i.operands[2]);                 \
    [[maybe_unused]] const T z = get<T>(*t, i.operands[3]);                                                \
    [[maybe_unused]] const uint32_t n = get<uint32_t>(*t, i.operands[2]), m = get<uint32_t>(*t, i.operands[4]); \
    put(*t, i.operands[0], result);                                                                        \
  };
// The handler of an opcode with operands of type T, or null.
template <typename T>
Handler of_type(const std::string& name) {
  [[maybe_unused]] constexpr size_t size = 8 * sizeof(T), half = size / 2;
  if (name == "ld") return move<T, false>;
  if (name == "st") return move<T, true>;
  IF("add", x + y) IF("sub", x - y) IF("neg", -x)
  IF("min", x < y || y != y ? x : y) IF("max", x > y || y != y ? x : y)
  IF("setp.eq", x == y) IF("setp.lt", x < y) IF("setp.le", x <= y) IF("setp.gt", x > y) IF("setp.ge", x >= y)
  IF("cvt.f32", float(x)) IF("cvt.f64", double(x))
  if constexpr (std::is_floating_point_v<T>) {
    IF("mul", x * y) IF("fma", std::fma(x, y, z)) IF("abs", std::fabs(x)) IF("setp.neu", x != y)
    IF("cvt.bf16x2", fwp::cuda::pair_of(float(y), float(x))) IF("cvt.f16", fwp::cuda::half_bits_of_float(float(x)))
  } else {
    IF("mov", x) IF("cvta.to.global", x) IF("selp", z ? x : y) IF("setp.ne", x != y)
    IF("mul.lo", x * y) IF("mad.lo", x * y + z) IF("div", y ? x / y : 0) IF("rem", y ? x % y : 0)
    IF("and", x & y) IF("or", x | y) IF("xor", x ^ y) IF("not", x ^ T(-1))
    IF("shl", n < size ? uint64_t(x) << n : 0) IF("shr", x >> std::min<size_t>(n, size - 1) >> (n >= size))
    IF("cvt.s16", int16_t(x)) IF("cvt.u16", uint16_t(x)) IF("cvt.u32", uint32_t(x))
    IF("cvt.s64", int64_t(x)) IF("cvt.u64", uint64_t(x))
    IF("high", x >> half) IF("pack", uint64_t(y) << half | uint64_t(x) << (64 - half) >> (64 - half))
  }
  if constexpr (std::is_same_v<T, uint16_t>) IF("half", fwp::cuda::float_of_half_bits(x))
  if constexpr (std::is_integral_v<T> && size == 32) {
    IF("mul.wide", int64_t(x) * int64_t(y)) IF("mul.hi", int64_t(x) * int64_t(y) >> 32)
    IF("prmt", permute(x, y, z)) IF("bfi", (uint64_t(x) << z & mask(z, m)) | (y & ~mask(z, m)))
  }
  return nullptr;
}

const std::map<std::string, Handler (*)(const std::string&)> kTypes = {
    {"pred", of_type<bool>},    {"s8", of_type<int8_t>},    {"s16", of_type<int16_t>},  {"s32", of_type<int32_t>},
    {"s64", of_type<int64_t>},  {"u8", of_type<uint8_t>},   {"u16", of_type<uint16_t>}, {"u32", of_type<uint32_t>},
    {"u64", of_type<uint64_t>}, {"b16", of_type<uint16_t>}, {"b32", of_type<uint32_t>}, {"b64", of_type<uint64_t>},
    {"f32", of_type<float>},    {"f64", of_type<double>},
};

Handler find(const std::string& name) {
  const size_t dot = std::min(name.rfind('.'), name.size() - 1);
  const auto opcode = kOpcodes.find(name);
  const auto type = kTypes.find(name.substr(dot + 1));
  Handler run = opcode != kOpcodes.end() ? opcode->second : nullptr;
  if (!run && type != kTypes.end()) run = type->second(name.substr(0, dot));
  return run ? run : [](Thread* t, const Instruction&) { fail(*t, "has an unknown opcode"); };
}

// Until it waits, has ended or its turn is over.
void take_turn(Thread& t, uint64_t instructions) {
  for (; instructions-- && t.state == State::ready; t.at += t.state == State::ready) {
    const Instruction& i = kernel->code[t.at];
    if (get<bool>(t, i.predicate) == bool(i.negated)) continue;
    if (i.waits == State::ready) i.run(&t, i);
    else t.state = i.waits;
  }
}

// Whether all these threads are in this state; then they execute their instruction and go on.
bool meet(size_t first, size_t count, State state) {
  for (size_t n = first; n < first + count; ++n)
    if (threads[n].state != state) return false;
  const size_t at = threads[first].at;
  for (size_t n = first; n < first + count; ++n)
    if (threads[n].at != at) fail(threads[n], "waits, but thread " + std::to_string(first) + " waits elsewhere");
  kernel->code[at].run(&threads[first], kernel->code[at]);
  for (size_t n = first; n < first + count; ++n) ++threads[n].at, threads[n].state = State::ready;
  return true;
}

void run_block(int block, size_t count) {
  std::fill(shared.begin(), shared.end(), char(-1));  // NaN in every type
  shared_cells.assign(shared.size() / kCell + 1, {});
  threads.assign(count, {});
  for (size_t n = 0; n < count; ++n) {
    Thread& t = threads[n];
    t.block = block, t.thread = int(n), t.warp = t.thread / kWarp, t.registers = kernel->registers;
    put(t, 0, t.thread), put(t, 1, block), put(t, 2, int(count));
  }
  for (size_t ready = count; ready || meet(0, count, State::at_block);) {
    if (!ready) ready = count;
    Thread& t = threads[draw() % count];
    if (t.state != State::ready) continue;
    take_turn(t, 1 + draw() % kLongestTurn);
    ready -= t.state != State::ready;
    if (t.state == State::at_warp && meet(size_t(t.warp) * kWarp, kWarp, State::at_warp)) ready += kWarp;
  }
  for (const Thread& t : threads)
    if (t.state != State::ended) fail(t, "waits for ever");
}

}  // namespace

extern "C" void interpreter_seed(uint64_t seed) { draw.seed(seed); }

// Replaces an earlier text of the kernel.
extern "C" void interpreter_load(const char* text) {
  std::istringstream in(text);
  std::string name;
  size_t registers, constants, instructions, number, operands;
  in >> name >> registers >> constants >> instructions;
  Kernel& to = kernels[name] = {std::vector<uint64_t>(registers), std::vector<Instruction>(instructions)};
  while (constants--) in >> number >> to.registers.at(number);
  for (Instruction& i : to.code) {
    in >> i.place >> i.name >> i.space >> i.count >> i.negated >> i.predicate >> i.offset >> operands;
    for (size_t n = 0; n < operands; ++n) in >> i.operands.at(n);
    const bool together = i.name.find(".sync") != std::string::npos;
    i.waits = i.name == "bar.sync" ? State::at_block : together ? State::at_warp : State::ready;
    i.run = find(i.name);
  }
}

// Returns null, or what went wrong.
extern "C" const char* interpreter_launch(const char* name, int64_t blocks, int count, size_t bytes, const char* x) {
  static std::string error;
  try {
    kernel = &kernels.at(name);
    argument = x;
    shared.resize(bytes);
    global_cells.clear();
    for (int64_t block = 0; block < blocks; ++block) run_block(int(block), size_t(count));
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
