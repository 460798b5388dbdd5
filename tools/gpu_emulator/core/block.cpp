// Runs one thread block: warps in turn, each until it waits at a barrier, ends, or has used its time slice.
#include <algorithm>

#include "machine.h"
#include "trace.h"

namespace gpu_emulator {
namespace {

constexpr uint64_t kSlice = 1 << 20;       // instructions before the next warp runs
constexpr uint64_t kGroupSlice = 1 << 12;  // instructions before another divergent group runs

}  // namespace

void Machine::prepare() {
  warps = (threads + kLanes - 1) / kLanes;
  warp = std::make_unique<Warp[]>(warps);
  counters.assign(kernel.code.size(), Counters{});
  global_patterns = std::vector<PatternCache>(kernel.code.size());
  shared_patterns = std::vector<PatternCache>(kernel.code.size());
  shared.resize(std::max<uint32_t>(shared_bytes, 4));
  pool.assign(std::max<size_t>(kernel.pool.size(), 1) * kLanes, 0);
  for (size_t i = 0; i < kernel.pool.size(); i++) {
    const PoolEntry& e = kernel.pool[i];
    uint32_t v = e.value;
    if (e.constant) {
      // Beyond the end of a bank the value is poison: the unused upper word of a pair may lie there.
      v = kRegisterPoison;
      if (static_cast<size_t>(e.bank) < banks.size() && e.value + 4ull <= banks[e.bank].size())
        memcpy(&v, banks[e.bank].data() + e.value, 4);
    }
    std::fill_n(pool.begin() + static_cast<std::ptrdiff_t>(i * kLanes), kLanes, v);
  }
}

const uint8_t* Machine::constant(int bank, uint64_t offset, uint32_t bytes, int lane) const {
  if (static_cast<size_t>(bank) < banks.size() && offset + bytes <= banks[bank].size() && offset % bytes == 0)
    return banks[bank].data() + offset;
  Fault f;
  f.kind = FaultKind::BadConstant;
  f.lane = lane;
  f.has_address = true;
  f.address = offset;
  f.message = "read of constant bank " + std::to_string(bank) + " outside its " +
              std::to_string(static_cast<size_t>(bank) < banks.size() ? banks[bank].size() : 0) +
              " bytes, or misaligned";
  throw f;
}

void Machine::start_warp(Warp& w, int id) {
  w.id = id;
  std::fill(&w.reg[0][0], &w.reg[0][0] + kRegisterRows * kLanes, kRegisterPoison);
  std::fill(w.reg[kZeroRegister], w.reg[kZeroRegister] + kLanes, 0u);  // URZ as well
  std::fill(std::begin(w.pred), std::end(w.pred), 0u);
  w.pred[kTruePredicate] = kAllLanes;
  w.base[0] = &w.reg[0][0];
  w.base[1] = pool.data();
  uint32_t lanes = std::min<uint32_t>(kLanes, threads - static_cast<uint32_t>(id) * kLanes);
  w.alive = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
  w.active = w.alive;
  w.pc = 0;
  w.limit = kNoLimit;
  w.blocked = 0;
  w.at_barrier = -1;
  w.reduction = 0;
  w.copies.clear();
  memset(w.copy_groups, 0, sizeof w.copy_groups);
  memset(w.lane_pc, 0, sizeof w.lane_pc);
  memset(w.convergence, 0, sizeof w.convergence);
  if (kernel.uses_local) w.local.assign(static_cast<size_t>(local_bytes) * kLanes, 0xab);
}

// Interpreter loop. Returns when the warp waits at a barrier, has ended, or has used its slice.
void Machine::run_warp(Warp& w, uint64_t slice) {
  const Inst* code = kernel.code.data();
  const uint32_t size = static_cast<uint32_t>(kernel.code.size());
  uint64_t end = executed + slice, group_end = executed + kGroupSlice;
  while (true) {
    if (w.pc >= w.limit) {
      if (w.at_barrier >= 0 || !w.alive) return;
      // Reached another group's address, or the groups changed: choose again.
      for (int l = 0; l < kLanes; l++)
        if (w.active >> l & 1) w.lane_pc[l] = w.pc;
      reschedule(w);
      if (!w.active) report_deadlock();
      continue;
    }
    if (w.pc >= size) {
      Fault f;
      f.kind = FaultKind::BadBranch;
      f.message = "ran past the end of the kernel";
      throw f;
    }
    const Inst& in = code[w.pc];
    uint32_t mask = w.active & (w.pred[in.guard] ^ in.guard_flip);
    Counters& c = counters[in.index];
    c.issued++;
    c.lanes += static_cast<uint64_t>(__builtin_popcount(mask));
    executed++;
    w.last_pc = w.pc++;
    if (mask) {
      in.run(*this, w, in, mask);
      if (__builtin_expect(tracer != nullptr, 0)) tracer->record(w.id, in.index, mask, lane_address, false);
    } else {
      c.skipped++;
      if (__builtin_expect(tracer != nullptr, 0)) tracer->record(w.id, in.index, w.active, nullptr, true);
    }
    if (__builtin_expect(executed >= group_end, 0)) {
      group_end = executed + kGroupSlice;
      if (w.at_barrier >= 0 || !w.alive) return;
      if (w.active != w.alive) rotate(w);
      if (executed >= end) return;
    }
  }
}

void Machine::run_block(const uint32_t id[3]) {
  std::copy(id, id + 3, block_id);
  global.start_block();
  std::fill(shared.begin(), shared.end(), uint8_t{0});
  for (size_t i = 0; i + 4 <= shared.size(); i += 4) memcpy(&shared[i], &kSharedPoison, 4);
  if (options.check_races)
    races.start_block(static_cast<int>(warps), shared.size(), kernel.byte_shared ? 1 : 4, kernel.partial_barriers,
                      kernel.asynchronous_copies);
  for (BlockBarrier& b : barrier) b = BlockBarrier{};
  executed = 0;
  if (tracer) tracer->start_block(threads);
  for (uint32_t i = 0; i < warps; i++) start_warp(warp[i], static_cast<int>(i));
  try {
    while (true) {
      bool progress = false, left = false;
      for (uint32_t i = 0; i < warps; i++) {
        Warp& w = warp[i];
        if (!w.alive) continue;
        left = true;
        if (w.at_barrier >= 0) continue;
        progress = true;
        current = &w;
        run_warp(w, kSlice);
        if (!w.alive) warp_finished();
        if (options.max_instructions && executed > options.max_instructions) {
          Fault f;
          f.kind = FaultKind::InstructionLimit;
          f.message = "the block ran more than " + std::to_string(options.max_instructions) + " warp instructions";
          throw f;
        }
      }
      if (!left) break;
      if (!progress) report_deadlock();
    }
  } catch (Fault& f) {
    std::copy(id, id + 3, f.block);
    if (current) {
      if (f.lane >= 0) f.thread = current->id * kLanes + f.lane;
      f.pc = current->last_pc * kInstructionBytes;
    }
    throw;
  }
  total_executed += executed;
  if (tracer) tracer->finish_block(id);
}

// ---- block barriers --------------------------------------------------------------------------------------

void Machine::arrive_at_barrier(Warp& w, int index, uint32_t expected_warps, bool waits, uint32_t predicate_lanes,
                                uint32_t lanes) {
  BlockBarrier& b = barrier[index];
  uint32_t bit = 1u << w.id;
  if (b.arrived & bit) {
    Fault f;
    f.kind = FaultKind::DivergentBarrier;
    f.lane = __builtin_ctz(lanes);
    f.message = "a warp arrives twice at barrier " + std::to_string(index) + " before it completes";
    throw f;
  }
  if (b.arrived && b.expected != expected_warps) {
    Fault f;
    f.kind = FaultKind::DivergentBarrier;
    f.lane = __builtin_ctz(lanes);
    f.message = "warps expect different thread counts at barrier " + std::to_string(index);
    throw f;
  }
  b.expected = expected_warps;
  b.arrived |= bit;
  if (options.check_races && !waits) b.arrival[w.id] = races.arrive();
  b.popc += static_cast<uint32_t>(__builtin_popcount(predicate_lanes));
  b.any = b.any || predicate_lanes;
  b.all = b.all && predicate_lanes == lanes;
  if (waits) {
    b.waiting |= bit;
    w.at_barrier = index;
    w.stop();
  }
  complete_if_full(index);
}

// A warp whose threads have all exited counts as arrived at barriers of the whole block, as on hardware.
void Machine::complete_if_full(int index) {
  BlockBarrier& b = barrier[index];
  if (!b.arrived) return;
  uint32_t gone = 0;
  for (uint32_t i = 0; i < warps; i++)
    if (!warp[i].alive) gone |= 1u << i;
  uint32_t members = b.expected ? b.arrived : b.arrived | gone;
  uint32_t needed = b.expected ? b.expected : warps;
  if (static_cast<uint32_t>(__builtin_popcount(members)) < needed) return;
  if (options.check_races) races.complete_barrier(members, b.waiting, members & ~b.arrived, b.arrival);
  for (uint32_t i = 0; i < warps; i++) {
    if (!(b.waiting >> i & 1)) continue;
    Warp& w = warp[i];
    w.at_barrier = -1;
    w.limit = kNoLimit;  // all live lanes arrived together
    // The instruction selects one of the three reductions; B2R reads the result.
    const std::vector<std::string>& mods = kernel.sass[w.pc - 1].modifiers;
    auto is = [&](const char* m) { return std::find(mods.begin(), mods.end(), m) != mods.end(); };
    w.reduction = is("POPC") ? b.popc : is("AND") ? b.all : b.any;
  }
  b = BlockBarrier{};
}

void Machine::warp_finished() {
  for (int i = 0; i < kBlockBarriers; i++) complete_if_full(i);
}

void Machine::report_deadlock() {
  Fault f;
  f.kind = FaultKind::Deadlock;
  f.message = "no thread of the block can go on:";
  int listed = 0;
  for (uint32_t i = 0; i < warps && listed < 6; i++) {
    const Warp& w = warp[i];
    if (!w.alive) continue;
    char text[160];
    if (w.at_barrier >= 0) {
      snprintf(text, sizeof text, " warp %u waits at barrier %d (0x%x);", i, w.at_barrier,
               (w.pc - 1) * kInstructionBytes);
    } else if (w.blocked) {
      int l = __builtin_ctz(w.blocked);
      snprintf(text, sizeof text, " warp %u: lanes 0x%08x wait at %s (0x%x);", i, w.blocked,
               w.waits_at[l] == Warp::kAtWarpSync ? "WARPSYNC" : "BSYNC", (w.lane_pc[l] - 1) * kInstructionBytes);
    } else {
      continue;
    }
    f.message += text;
    listed++;
  }
  throw f;
}

}  // namespace gpu_emulator
