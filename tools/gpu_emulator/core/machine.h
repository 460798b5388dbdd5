// State of the machine: warps, their block, and the launch.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "access.h"
#include "fault.h"
#include "global.h"
#include "race.h"
#include "sass.h"

namespace gpu_emulator {

class Tracer;
struct Machine;
struct Warp;
struct Inst;

constexpr uint32_t kRegisterPoison = 0x7fffdeadu;  // a NaN, and no plausible address or index
constexpr uint32_t kSharedPoison = 0x7fffbeefu;
constexpr int kScratchRow = 256;  // target of writes to RZ; up to four registers wide
// A uniform register is a row with equal values in all lanes, a uniform predicate has equal bits: no special cases.
constexpr int kRegisterRows = kUniformRegister + kUniformRegisters;
constexpr int kScratchPredicate = 8;  // target of writes to PT
constexpr int kPredicateRows = kUniformPredicate + kUniformPredicates;
static_assert(kUniformRegister >= kScratchRow + 4 && kUniformPredicate > kScratchPredicate);
constexpr int kConvergenceBarriers = 16;
constexpr int kBlockBarriers = 16;
constexpr uint32_t kNoLimit = 0xffffffffu;
// Windows of the generic address space; no host pointer looks like this.
constexpr uint64_t kSharedWindow = 0x00f0000000000000ull;
constexpr uint64_t kLocalWindow = 0x00f1000000000000ull;
constexpr uint64_t kWindowBytes = 1ull << 24;

// A source operand: a row of 32 values, and modifiers applied to each.
struct Source {
  uint16_t row = kZeroRegister;
  uint8_t pooled = 0;  // 0: register row, 1: row of the constant pool
  uint8_t mods = 0;
  enum : uint8_t { kAbsolute = 1, kNegateFloat = 2, kInvert = 4, kNegateInteger = 8 };
  bool plain() const { return mods == 0; }
};

// A source as handlers read it: ((x & keep) ^ flip) - minus covers |x|, -x and ~x without a branch.
struct Values {
  const uint32_t* row;
  uint32_t keep, flip, minus;
  Values(const uint32_t* r, uint8_t mods)
      : row(r),
        keep(mods & Source::kAbsolute ? 0x7fffffffu : 0xffffffffu),
        flip(mods & (Source::kInvert | Source::kNegateInteger) ? 0xffffffffu
             : mods & Source::kNegateFloat                     ? 0x80000000u
                                                               : 0u),
        minus(mods & Source::kNegateInteger ? 0xffffffffu : 0u) {}
  uint32_t operator[](int l) const { return ((row[l] & keep) ^ flip) - minus; }
};

struct PredicateSource {
  uint8_t index = kTruePredicate;
  uint32_t flip = 0;
};

using Handler = void (*)(Machine&, Warp&, const Inst&, uint32_t mask);

// One decoded instruction.
struct Inst {
  Handler run = nullptr;
  Handler for_all_lanes = nullptr;  // called by `run` for all lanes, if the result belongs to the warp
  uint32_t guard_flip = 0;
  uint8_t guard = kTruePredicate;
  uint8_t width = 4;  // bytes per lane of a memory access
  uint8_t flags = 0;  // depends on the handler
  uint8_t kind = 0;   // likewise: comparison, function, special register, barrier ...
  uint16_t dst = kScratchRow;
  uint8_t pdst[2] = {kScratchPredicate, kScratchPredicate};
  Source src[6];
  PredicateSource psrc[3];
  int64_t offset = 0;  // displacement of an address
  uint32_t imm = 0;
  uint32_t target = 0;        // instruction index
  uint32_t index = 0;         // of this instruction
  bool wide_address = false;  // 64-bit address in a register pair
  uint8_t scale_shift = 0;    // of the base register in a shared-memory address: 2 for [R4.X4]
};

// A row of the constant pool: an immediate, or a word of a constant bank, equal in all lanes.
struct PoolEntry {
  bool constant = false;
  int bank = 0;
  uint32_t value = 0;  // the immediate's bits, or the offset in the bank
  bool operator==(const PoolEntry& o) const { return constant == o.constant && bank == o.bank && value == o.value; }
};

struct Kernel {
  int arch = 0;  // 70: sm_70
  std::vector<SassInstruction> sass;
  std::vector<Inst> code;
  std::vector<PoolEntry> pool;
  std::vector<std::string> unsupported;  // per instruction: why it cannot run, or empty
  bool byte_shared = false;              // some shared accesses are narrower than a word: track races per byte
  bool shared_cas = false;               // compare-and-swap loops read plainly what others write atomically
  bool partial_barriers = false;         // barriers with a thread count
  bool uses_local = false;
  bool asynchronous_copies = false;  // LDGSTS
};

// Events at one instruction, summed over the launch.
struct Counters {
  uint64_t issued = 0;   // warp instructions, predicated off or not
  uint64_t skipped = 0;  // of these, with no active lane
  uint64_t lanes = 0;    // active lanes
  // Global and local memory:
  uint64_t requests = 0;  // warp-wide accesses
  uint64_t lines = 0;     // of 128 bytes
  uint64_t ideal = 0;     // sectors if packed
  uint64_t sectors = 0;   // of 32 bytes, requested
  // Shared memory; an asynchronous copy from global memory counts in both:
  uint64_t shared_requests = 0;
  uint64_t shared_wavefronts = 0;  // passes through the banks
  uint64_t shared_ideal = 0;       // passes without conflicts
};

// A lane's copy from global to shared memory before its wait.
struct AsynchronousCopy {
  uint32_t begin, bytes;
  int lane;
  uint32_t group;  // groups that the lane had closed before
};

struct Warp {
  alignas(64) uint32_t reg[kRegisterRows][kLanes];
  uint32_t pred[kPredicateRows];
  const uint32_t* base[2];     // register rows, constant pool
  uint32_t pc = 0;             // of the active lanes, as an instruction index
  uint32_t last_pc = 0;        // of the instruction being executed
  uint32_t active = 0;         // lanes that currently run together
  uint32_t limit = kNoLimit;   // lowest pc among the other runnable lanes, where the groups may join
  uint32_t alive = 0;          // lanes that have not exited
  uint32_t blocked = 0;        // lanes waiting at BSYNC or WARPSYNC
  uint32_t lane_pc[kLanes];    // of lanes that are not active
  uint32_t waits_for[kLanes];  // lanes that a blocked lane waits for
  uint8_t waits_at[kLanes];    // convergence barrier, or kAtWarpSync
  uint32_t convergence[kConvergenceBarriers][kLanes];
  int id = 0;
  int at_barrier = -1;     // block barrier that this warp waits at
  uint32_t reduction = 0;  // result of its last BAR.RED
  std::vector<AsynchronousCopy> copies;
  uint32_t copy_groups[kLanes];  // number of groups that each lane has closed
  std::vector<uint8_t> local;    // kLanes consecutive areas of Machine::local_bytes

  static constexpr uint8_t kAtWarpSync = 0xff;

  const uint32_t* row(const Source& s) const { return base[s.pooled] + s.row * kLanes; }
  Values values(const Source& s) const { return Values(row(s), s.mods); }
  uint32_t predicate(const PredicateSource& p) const { return pred[p.index] ^ p.flip; }
  void stop() { limit = 0; }  // makes the run loop reschedule
};

struct BlockBarrier {
  uint32_t arrived = 0;   // warps, a mask
  uint32_t waiting = 0;   // of these, the ones that wait (not BAR.ARV)
  uint32_t expected = 0;  // warps; 0: all of the block
  uint32_t popc = 0;
  bool any = false, all = true;
  uint32_t arrival[kMaxWarps] = {};
};

struct LaunchOptions {
  bool check_races = true;
  uint64_t max_instructions = 0;  // per block; 0: no limit
};

struct Machine {
  const Kernel& kernel;
  GlobalMemory& global;
  LaunchOptions options;
  uint32_t grid[3], block[3];
  uint32_t threads, warps;
  uint32_t shared_bytes, local_bytes;
  std::vector<std::vector<uint8_t>> banks;                     // constant banks by number
  std::vector<uint32_t> pool;                                  // kernel.pool, each entry repeated for 32 lanes
  std::vector<Counters> counters;                              // per instruction
  std::vector<PatternCache> global_patterns, shared_patterns;  // per instruction
  Tracer* tracer = nullptr;

  // The block being run.
  uint32_t block_id[3] = {0, 0, 0};
  std::unique_ptr<Warp[]> warp;
  std::vector<uint8_t> shared;
  RaceDetector races;
  BlockBarrier barrier[kBlockBarriers];
  uint64_t executed = 0;  // warp instructions of this block
  uint64_t total_executed = 0;
  uint64_t lane_address[kLanes];  // of the last memory access, for the tracer
  Warp* current = nullptr;

  Machine(const Kernel& k, GlobalMemory& g) : kernel(k), global(g) {}

  void prepare();                        // call once the fields above are set
  void run_block(const uint32_t id[3]);  // throws Fault
  const uint8_t* constant(int bank, uint64_t offset, uint32_t bytes, int lane) const;

  // Barriers of the block (block.cpp).
  void arrive_at_barrier(Warp& w, int index, uint32_t expected_warps, bool waits, uint32_t predicate_lanes,
                         uint32_t lanes);
  void warp_finished();

 private:
  void start_warp(Warp& w, int id);
  void run_warp(Warp& w, uint64_t slice);
  void complete_if_full(int index);
  [[noreturn]] void report_deadlock();
};

// For instructions that are only defined for whole warps; throws Fault (op_warp.cpp).
void require_all_lanes(const Machine& m, const Inst& in, uint32_t mask);

// Divergence (op_control.cpp).
void reschedule(Warp& w);                   // picks the runnable group with the lowest pc
void release_blocked(Machine& m, Warp& w);  // wakes lanes whose partners have all arrived
void rotate(Warp& w);                       // picks another group, for fairness towards spinning lanes

inline float as_float(uint32_t x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
inline uint32_t as_bits(float f) {
  uint32_t x;
  memcpy(&x, &f, 4);
  return x;
}
inline uint32_t half_bits(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
// The half in the lower 16 bits.
inline float half_value(uint32_t bits) {
  const uint16_t lower = static_cast<uint16_t>(bits);
  _Float16 half;
  memcpy(&half, &lower, 2);
  return static_cast<float>(half);
}
inline double as_double(uint64_t x) {
  double d;
  memcpy(&d, &x, 8);
  return d;
}
inline uint64_t as_bits64(double d) {
  uint64_t x;
  memcpy(&x, &d, 8);
  return x;
}

// Writes the lanes in `mask` of a row.
inline void store_row(Warp& w, uint32_t row, const uint32_t* values, uint32_t mask) {
  uint32_t* d = w.reg[row];
  if (mask == kAllLanes) {
    for (int l = 0; l < kLanes; l++) d[l] = values[l];
  } else {
    for (int l = 0; l < kLanes; l++) d[l] = (mask >> l & 1) ? values[l] : d[l];
  }
}

inline void store_predicate(Warp& w, int index, uint32_t values, uint32_t mask) {
  w.pred[index] = (w.pred[index] & ~mask) | (values & mask);
}

inline uint64_t pair(uint32_t low, uint32_t high) {
  return static_cast<uint64_t>(high) << 32 | low;
}

}  // namespace gpu_emulator
