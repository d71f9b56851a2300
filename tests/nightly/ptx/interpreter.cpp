// Executes kernels in nvcc's PTX on the CPU and finds races: an emulator whose fibers interpret the text of interpreter.py.
//
// Only barriers (bar.sync, bar.arrive) and those of a warp (bar.warp.sync) order accesses of two threads, and
// cp.async.wait_group those of a copy. Shuffles and matrix products order nothing. Whole warps take part in a barrier, so a
// thread has a vector clock of warps: how many barriers of each one lie before what it does.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <sstream>
#include <string>
#include <unordered_map>

namespace {

using Address = uint64_t;
constexpr Address kCell = 2;  // bytes that are written at least
// The first so many addresses are of nothing, the next of the argument, the next of shared memory: as in interpreter.py.
constexpr Address kRegion = 1 << 20;

struct Thread;
struct Instruction;
using Handler = void (*)(Thread&, const Instruction&);
enum class Use { read, write, begin_copy, end_copy };

struct Instruction {
  std::string place, name;
  int negated, predicate;
  Address offset;
  size_t count;                  // of operands
  std::array<int, 14> operands;  // registers, also of constants and labels
  Handler run;
};
struct Kernel {
  std::vector<uint64_t> registers;  // at the start
  std::vector<Instruction> code;
};
using Clock = std::array<int, 32>;  // of warps
// Who executes what, and when: after so many barriers of each kind. A thread of -1 stands for several of a warp.
struct Point {
  int block = -1, warp = -1, thread = -1, barriers = 0, syncs = 0;
  size_t at = 0;
};
struct Thread : Point {
  std::vector<uint64_t> registers;
  Clock before = {};  // it: barriers of each warp

  bool is_after(const Point& p) const { return p.barriers < before[size_t(p.warp)]; }
};
// What the threads at a barrier know, and what those know that it has opened for, each time.
struct Barrier {
  int arrived = 0;
  Clock gathered = {};
  std::vector<Clock> opened;
};
// The last write of kCell bytes, and the last reads of each warp since then.
struct Cell {
  Point write;
  bool copying = false;
  std::vector<Point> reads;
};

std::map<std::string, Kernel> kernels;
std::map<std::string, int64_t> launched;  // instructions of all threads, by name
bool executes = true;
// Of the launch and the block that run.
const Kernel* kernel;
int64_t* executed;  // its instructions
const char* argument;
size_t shared_bytes;
int block;
std::vector<Thread> threads;
std::array<Barrier, emulator::kBarriers> barriers;
std::vector<Cell> shared_cells;
std::unordered_map<Address, Cell> global_cells;

// The thread never goes on.
[[noreturn]] void fail(const Thread& t, const std::string& what) {
  const Instruction& i = kernel->code[t.at];
  emulator::fail("%s, %s: thread %d %s", i.place.c_str(), i.name.c_str(), t.thread, what.c_str());
  while (true) emulator::wait(emulator::State::done);
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

void record(Cell& cell, const Thread& t, Use use) {
  const auto check = [&](const Point& p) {
    const bool in_warp = p.warp == t.warp && (p.syncs < t.syncs || p.thread == t.thread);
    if (p.block < 0 || (p.block == t.block && (t.is_after(p) || in_warp))) return;
    const std::string who = std::to_string(p.warp) + " of block " + std::to_string(p.block);
    fail(t, "races with warp " + who + " at " + kernel->code[p.at].place);
  };
  if (cell.copying && use != Use::end_copy) fail(t, "races: a copy to this place is under way");
  check(cell.write);
  if (use != Use::read) {
    for (const Point& read : cell.reads) check(read);
    cell = {t, use == Use::begin_copy, {}};
    return;
  }
  for (Point& read : cell.reads)
    if (read.block == t.block && read.warp == t.warp) {
      const bool same = read.thread == t.thread || t.is_after(read) || read.syncs < t.syncs;
      read = t;
      if (!same) read.thread = -1;
      return;
    }
  cell.reads.push_back(t);
}

// Checks and records an access. Returns where its bytes are.
char* reach(const Thread& t, Address address, size_t bytes, Use use) {
  const Address region = address / kRegion, first = region == 2 ? address % kRegion : address;
  if (address % bytes) fail(t, "is at an address that is not a multiple of " + std::to_string(bytes));
  if (region == 1) return const_cast<char*>(argument) + address % kRegion;
  if (region == 0 || (region == 2 && first + bytes > shared_bytes)) fail(t, "is at address " + std::to_string(address));
  if (use != Use::read && bytes < kCell) fail(t, "writes less than the detector of races tells apart");
  for (Address cell = first / kCell; cell * kCell < first + bytes; ++cell)
    record(region == 2 ? shared_cells[cell] : global_cells[cell], t, use);
  return reinterpret_cast<char*>(region == 2 ? fwp::cuda::shared_memory() + first : reinterpret_cast<unsigned char*>(address));
}

template <typename T, bool writes>
void move(Thread& t, const Instruction& i) {
  const size_t count = i.count - 1;
  const Address address = get<Address>(t, i.operands[writes ? 0 : count]) + i.offset;
  T* const x = reinterpret_cast<T*>(reach(t, address, count * sizeof(T), writes ? Use::write : Use::read));
  for (size_t n = 0; n < count; ++n)
    if (writes) x[n] = get<T>(t, i.operands[n + 1]);
    else put(t, i.operands[n], x[n]);
}

void begin_copy(Thread& t, const Instruction& i) {
  const bool wanted = get<uint32_t>(t, i.operands[3]);  // otherwise it brings zeros
  const void* const from = wanted ? reach(t, get<Address>(t, i.operands[1]), 16, Use::read) : nullptr;
  fwp::cuda::copy_later(reach(t, get<Address>(t, i.operands[0]), 16, Use::begin_copy), from, wanted);
}
void wait_copies(Thread& t, const Instruction& i) {
  const std::vector<emulator::Copy>& left = emulator::running_fiber().copies;
  const std::vector<emulator::Copy> before = left;
  emulator::finish_copies(get<size_t>(t, i.operands[0]));
  for (size_t n = 0; n < before.size() - left.size(); ++n)
    reach(t, 2 * kRegion + (static_cast<unsigned char*>(before[n].to) - fwp::cuda::shared_memory()), 16, Use::end_copy);
}

void join(Clock& to, const Clock& from) {
  for (size_t warp = 0; warp < to.size(); ++warp) to[warp] = std::max(to[warp], from[warp]);
}
template <bool waits>
void use_barrier(Thread& t, const Instruction& i) {
  const size_t id = get<uint32_t>(t, i.operands[0]);
  const int count = i.count > 1 ? get<int>(t, i.operands[1]) : emulator::machine().threads;
  if (id >= barriers.size()) fail(t, "is at a barrier that does not exist");
  Barrier& barrier = barriers[id];
  const size_t time = barrier.opened.size();
  Clock known = t.before;
  known[size_t(t.warp)] = ++t.barriers;
  join(barrier.gathered, known);
  if (++barrier.arrived == count) barrier.opened.push_back(barrier.gathered), barrier.arrived = 0, barrier.gathered = {};
  waits ? emulator::wait_at(int(id), count) : emulator::arrive(int(id), count);
  if (waits) join(t.before, barrier.opened.at(time));
}
void shuffle(Thread& t, const Instruction& i) {
  const uint32_t given = get<uint32_t>(t, i.operands[2]), lanes = get<uint32_t>(t, i.operands[5]);
  put(t, i.operands[0], __shfl_xor_sync(lanes, given, get<int>(t, i.operands[3])));
}
void multiply(Thread& t, const Instruction& i) {
  uint32_t a[4];
  float c[4];
  for (size_t n = 0; n < 4; ++n) a[n] = get<uint32_t>(t, i.operands[4 + n]), c[n] = get<float>(t, i.operands[10 + n]);
  fwp::cuda::mma(c, a, get<uint32_t>(t, i.operands[8]), get<uint32_t>(t, i.operands[9]));
  for (size_t n = 0; n < 4; ++n) put(t, i.operands[n], c[n]);
}
template <bool transposed>
void load_matrices(Thread& t, const Instruction& i) {
  uint32_t x[4];
  fwp::cuda::load_matrices(reach(t, get<Address>(t, i.operands[4]), 16, Use::read), x, transposed);
  for (size_t n = 0; n < 4; ++n) put(t, i.operands[n], x[n]);
}

const std::map<std::string, Handler> kOpcodes = {
    {"nop", [](Thread&, const Instruction&) {}},
    {"bra", [](Thread& t, const Instruction& i) { t.at = get<size_t>(t, i.operands[0]) - 1; }},
    {"ret", [](Thread& t, const Instruction&) { t.at = kernel->code.size(); }},
    {"bar.sync", use_barrier<true>},
    {"bar.arrive", use_barrier<false>},
    {"bar.warp.sync", [](Thread& t, const Instruction&) { __syncwarp(), ++t.syncs; }},
    {"shfl.sync.bfly.b32", shuffle},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", multiply},
    {"ldmatrix.sync.aligned.m8n8.x4.b16", load_matrices<false>},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.b16", load_matrices<true>},
    {"cp.async.cg", begin_copy},
    {"cp.async.commit_group", [](Thread&, const Instruction&) { fwp::cuda::commit_copies(); }},
    {"cp.async.wait_group", wait_copies},
};

uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t bytes = 0;
  for (int n = 0; n < 4; ++n) bytes |= uint32_t((uint64_t(y) << 32 | x) >> (selector >> 4 * n & 7) * 8 & 0xff) << 8 * n;
  return bytes;
}
uint64_t mask(uint32_t first, uint32_t count) { return ((1ull << count) - 1) << first; }
// x y + z, rounded down.
float multiply_add_down(float x, float y, float z) {
  const double exact = std::fma(double(x), double(y), double(z));
  return float(exact) > exact ? std::nextafter(float(exact), -INFINITY) : float(exact);
}

#define IF(opcode, result)                                                                                 \
  if (name == opcode) return [](Thread& t, const Instruction& i) {                                         \
    [[maybe_unused]] const T x = get<T>(t, i.operands[1]), y = get<T>(t, i.operands[2]);                 \
    [[maybe_unused]] const T z = get<T>(t, i.operands[3]);                                                \
    [[maybe_unused]] const uint32_t n = get<uint32_t>(t, i.operands[2]), m = get<uint32_t>(t, i.operands[4]); \
    put(t, i.operands[0], result);                                                                        \
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
    IF("div", x / y) IF("rcp", 1 / x) IF("rcp.approx.ftz", 1 / x) IF("sqrt", std::sqrt(x)) IF("ex2.approx.ftz", std::exp2(x))
    IF("copysign", std::copysign(y, x)) IF("setp.geu", !(x < y)) IF("setp.ltu", !(x >= y)) IF("setp.gtu", !(x <= y))
    IF("cvt.sat.f32", x > 0 ? std::min(x, T(1)) : T(0)) IF("cvt.rni.f32", std::nearbyint(x))
    IF("fma.rm", multiply_add_down(float(x), float(y), float(z)))
    IF("cvt.bf16x2", fwp::cuda::pair_of(float(y), float(x))) IF("cvt.f16", fwp::cuda::half_bits_of_float(float(x)))
  } else {
    IF("mov", x) IF("cvta.to", x) IF("selp", z ? x : y) IF("setp.ne", x != y)
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
  if (const auto found = kOpcodes.find(name); found != kOpcodes.end()) return found->second;
  const size_t dot = name.rfind('.');
  const auto type = kTypes.find(name.substr(dot + 1));
  const Handler run = type != kTypes.end() ? type->second(name.substr(0, dot)) : nullptr;
  return run ? run : [](Thread& t, const Instruction&) { fail(t, "has an unknown opcode"); };
}

// The work of a fiber.
void run_thread() {
  const emulator::Machine& machine = emulator::machine();
  if (block != int(machine.block))
    block = int(machine.block), shared_cells.assign(shared_bytes / kCell + 1, {}), barriers.fill({});
  Thread& t = threads[size_t(machine.running)];
  t = {{block, machine.running / emulator::kWarp, machine.running}, kernel->registers};
  put(t, 0, t.thread), put(t, 1, block), put(t, 2, machine.threads);
  for (; t.at < kernel->code.size(); ++t.at, ++*executed) {
    const Instruction& i = kernel->code[t.at];
    if (get<bool>(t, i.predicate) != bool(i.negated)) i.run(t, i);
  }
}

const char* launch(const char* name, int64_t blocks, int count, size_t bytes, const void* x) {
  executed = &launched[name];
  kernel = &kernels.at(name), argument = static_cast<const char*>(x), shared_bytes = bytes, block = -1;
  threads.assign(size_t(count), {});
  global_cells.clear();
  if (executes) emulator::launch(blocks, count, bytes, run_thread);
  return fwp::cuda::failure();
}
const bool kLaunches = (emulator::machine().launcher = launch);

}  // namespace

// Replaces an earlier text of the kernel.
extern "C" void interpreter_load(const char* text) {
  std::istringstream in(text);
  std::string name;
  size_t registers, constants, instructions, number;
  in >> name >> registers >> constants >> instructions;
  Kernel& to = kernels[name] = {std::vector<uint64_t>(registers), std::vector<Instruction>(instructions)};
  while (constants--) in >> number >> to.registers.at(number);
  for (Instruction& i : to.code) {
    in >> i.place >> i.name >> i.negated >> i.predicate >> i.offset >> i.count;
    for (size_t n = 0; n < i.count; ++n) in >> i.operands.at(n);
    i.run = find(i.name);
  }
}

// Returns the kernels that were launched since the last call: names, each with a number of instructions. Later launches are
// executed, or only named.
extern "C" const char* interpreter_launched(bool execute) {
  static std::string said;
  said.clear();
  for (const auto& [name, instructions] : launched) said += name + " " + std::to_string(instructions) + " ";
  launched.clear(), executes = execute;
  return said.c_str();
}

#include "../../emulator/emulator.cpp"  // the launchers

// A launch by nvcc's host code, which does not know the emulator.
extern "C" const char* interpreter_launch(const Pretended* how, const char* kernel, int64_t blocks, int threads,
                                          size_t bytes, const void* x) {
  pretend(*how);
  return launch(kernel, blocks, threads, bytes, x);
}
