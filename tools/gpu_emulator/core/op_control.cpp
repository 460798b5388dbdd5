// Branches, convergence, barriers, and instructions that only cost time.
#include <algorithm>

#include "bind.h"

namespace gpu_emulator {

// ---- divergence ------------------------------------------------------------------------------------------
//
// Lanes have their own program counters. The group with the lowest one runs, and stops when it reaches that of the next
// group, so lanes converge at the first common instruction. That alone would let lanes run past a point where the
// program makes them wait, so BSYNC and WARPSYNC really block.

void reschedule(Warp& w) {
  uint32_t runnable = w.alive & ~w.blocked;
  w.active = 0;
  w.limit = kNoLimit;
  if (!runnable) {
    w.limit = 0;
    return;
  }
  uint32_t lowest = kNoLimit;
  for (int l = 0; l < kLanes; l++)
    if ((runnable >> l & 1) && w.lane_pc[l] < lowest) lowest = w.lane_pc[l];
  for (int l = 0; l < kLanes; l++) {
    if (!(runnable >> l & 1)) continue;
    if (w.lane_pc[l] == lowest) {
      w.active |= 1u << l;
    } else if (w.lane_pc[l] < w.limit) {
      w.limit = w.lane_pc[l];
    }
  }
  w.pc = lowest;
}

// Switches to another group, so that lanes spinning on a lock let its holder proceed.
void rotate(Warp& w) {
  uint32_t others = w.alive & ~w.blocked & ~w.active;
  if (!others) return;
  for (int l = 0; l < kLanes; l++)
    if (w.active >> l & 1) w.lane_pc[l] = w.pc;
  uint32_t pc = w.lane_pc[__builtin_ctz(others)];
  w.active = 0;
  for (int l = 0; l < kLanes; l++)
    if ((others >> l & 1) && w.lane_pc[l] == pc) w.active |= 1u << l;
  w.pc = pc;
  // Groups ahead join as usual; groups behind wait for their turn.
  w.limit = kNoLimit;
  for (int l = 0; l < kLanes; l++)
    if ((w.alive & ~w.blocked & ~w.active) >> l & 1 && w.lane_pc[l] > pc) w.limit = std::min(w.limit, w.lane_pc[l]);
}

void release_blocked(Machine& m, Warp& w) {
  for (uint32_t left = w.blocked; left; left &= left - 1) {
    int l = __builtin_ctz(left);
    if (!(w.blocked >> l & 1)) continue;
    uint8_t place = w.waits_at[l];
    uint32_t needed = (place == Warp::kAtWarpSync ? w.waits_for[l] : w.convergence[place][l]) & w.alive;
    uint32_t here = 0;
    for (int k = 0; k < kLanes; k++)
      if ((w.blocked >> k & 1) && w.waits_at[k] == place) here |= 1u << k;
    if (needed & ~here) continue;
    w.blocked &= ~(needed | 1u << l);
    if (place == Warp::kAtWarpSync && m.options.check_races) m.races.warp_sync(w.id, needed, w.alive);
  }
}

namespace {

void park_active(Warp& w) {
  for (int l = 0; l < kLanes; l++)
    if (w.active >> l & 1) w.lane_pc[l] = w.pc;
}

// Sends lanes to their targets; w.pc is already the next instruction.
void jump(Warp& w, uint32_t mask, uint32_t target) {
  if (mask == w.active) {
    w.pc = target;
    return;
  }
  park_active(w);
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) w.lane_pc[l] = target;
  reschedule(w);
}

void jump_each(Machine& m, Warp& w, uint32_t mask, const uint32_t* address) {
  park_active(w);
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    if (address[l] % kInstructionBytes || address[l] / kInstructionBytes >= m.kernel.code.size()) {
      Fault f;
      f.kind = FaultKind::BadBranch;
      f.lane = l;
      f.message = "indirect branch to a place that is no instruction of the kernel";
      f.has_address = true;
      f.address = address[l];
      throw f;
    }
    w.lane_pc[l] = address[l] / kInstructionBytes;
  }
  reschedule(w);
}

void run_bra(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  mask &= w.predicate(in.psrc[0]);
  if (mask) jump(w, mask, in.target);
}

// Taken if some live lanes of those named (default: all) are elsewhere (DIV), or none are (CONV).
void run_bra_if_diverged(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  uint32_t named = w.values(in.src[0])[__builtin_ctz(mask)];
  bool diverged = named & w.alive & ~w.active;
  if (diverged == static_cast<bool>(in.flags)) jump(w, mask, in.target);
}

// Target = register + base; flags: the register is a pair (its upper word is zero within a kernel).
void run_indirect(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t* r = w.row(in.src[0]);
  uint32_t address[kLanes];
  for (int l = 0; l < kLanes; l++) address[l] = r[l] + in.imm;
  jump_each(m, w, mask, address);
}

void run_exit(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  mask &= w.predicate(in.psrc[0]);
  if (!mask) return;
  park_active(w);
  w.alive &= ~mask;
  release_blocked(m, w);
  reschedule(w);
}

void run_trap(Machine&, Warp&, const Inst&, uint32_t mask) {
  Fault f;
  f.kind = FaultKind::Trap;
  f.lane = __builtin_ctz(mask);
  f.message = "trap";
  throw f;
}

void run_bssy(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) w.convergence[in.kind][l] = mask;
}

void block_lanes(Machine& m, Warp& w, uint32_t mask, uint8_t place) {
  park_active(w);
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) w.waits_at[l] = place;
  w.blocked |= mask;
  release_blocked(m, w);
  reschedule(w);
}

void run_bsync(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  uint32_t needed = 0;
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) needed |= w.convergence[in.kind][l];
  if ((needed & w.alive & ~mask) == 0) return;
  block_lanes(m, w, mask, in.kind);
}

void run_break(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  for (int l = 0; l < kLanes; l++) w.convergence[in.kind][l] &= mask >> l & 1 ? ~kAllLanes : ~mask;
  release_blocked(m, w);
  if (w.active != w.alive) {
    park_active(w);
    reschedule(w);
  }
}

void run_bmov_from(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  store_row(w, in.dst, w.convergence[in.kind], mask);
  if (in.flags)
    for (int l = 0; l < kLanes; l++)
      if (mask >> l & 1) w.convergence[in.kind][l] = 0;
}

void run_bmov_to(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t* r = w.row(in.src[0]);
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) w.convergence[in.kind][l] = r[l];
}

void run_warpsync(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t* r = w.row(in.src[0]);
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) w.waits_for[l] = r[l];
  // Lanes may name different sets; a complete set continues at once.
  uint32_t waiting = 0;
  for (uint32_t left = mask; left;) {
    uint32_t named = r[__builtin_ctz(left)], group = 0;
    for (int l = 0; l < kLanes; l++)
      if ((left >> l & 1) && r[l] == named) group |= 1u << l;
    left &= ~group;
    if ((named & w.alive & ~group) != 0) {
      waiting |= group;
    } else if (m.options.check_races) {
      m.races.warp_sync(w.id, group, w.alive);
    }
  }
  if (waiting) block_lanes(m, w, waiting, Warp::kAtWarpSync);
}

// A WARPSYNC of lanes that the compiler has proven converged is emitted as NOP; it still orders memory.
void run_nop(Machine& m, Warp& w, const Inst&, uint32_t mask) {
  if (m.options.check_races) m.races.warp_sync(w.id, mask, w.alive);
}

void run_nothing(Machine&, Warp&, const Inst&, uint32_t) {}

// ---- block barriers --------------------------------------------------------------------------------------

enum BarrierKind : uint8_t { kSync, kArrive, kPopc, kAnd, kOr };

void run_bar(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  if (mask != w.alive) {
    uint32_t missing = w.alive & ~mask;
    Fault f;
    f.kind = FaultKind::DivergentBarrier;
    f.lane = __builtin_ctz(mask);
    f.message = "barrier reached by only some of the warp's live threads (lane " +
                std::to_string(__builtin_ctz(missing)) + " is elsewhere)";
    throw f;
  }
  int lane = __builtin_ctz(mask);
  uint32_t index = w.row(in.src[0])[lane], count = w.row(in.src[1])[lane];
  if (index >= kBlockBarriers) {
    Fault f;
    f.kind = FaultKind::DivergentBarrier;
    f.lane = lane;
    f.message = "barrier number " + std::to_string(index) + " does not exist";
    throw f;
  }
  uint32_t expected = in.flags ? (count + kLanes - 1) / kLanes : 0;
  m.arrive_at_barrier(w, static_cast<int>(index), expected, in.kind != kArrive, w.predicate(in.psrc[0]) & mask, mask);
}

void run_b2r(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = w.reduction;
  store_row(w, in.dst, out, mask);
  store_predicate(w, in.pdst[0], w.reduction ? kAllLanes : 0, mask);
}

void bind_bar(Binder& b) {
  Inst& in = b.inst;
  b.ignore({"DEFER_BLOCKING", "RED"});
  int kind = b.take_one({"SYNC", "ARV", "POPC", "AND", "OR"});
  if (kind < 0) throw Unsupported("barrier");
  in.kind = static_cast<uint8_t>(kind);
  b.source(0);
  if (b.more() && !b.peek_is(Operand::Kind::Predicate)) {
    b.source(1);
    in.flags = 1;
    b.kernel().partial_barriers = true;
  }
  if (b.more()) b.predicate_source(0);
  in.run = run_bar;
}

uint8_t convergence_barrier(Binder& b) {
  const Operand& o = b.next();
  if (o.kind != Operand::Kind::Barrier || o.index >= kConvergenceBarriers) throw Unsupported("barrier " + o.text);
  return static_cast<uint8_t>(o.index);
}

void bind_bmov(Binder& b) {
  if (!b.take("32")) throw Unsupported("width");
  b.inst.flags = b.take("CLEAR");
  if (b.peek_is(Operand::Kind::Barrier)) {
    b.inst.kind = convergence_barrier(b);
    b.source(0);
    b.inst.run = run_bmov_to;
  } else {
    b.destination();
    b.inst.kind = convergence_barrier(b);
    b.inst.run = run_bmov_from;
  }
}

// "CALL.REL.NOINC 0x6f0", "CALL.REL.NOINC R8 0x0", "RET.REL.NODEC R20 0x0", "BRX R4 -0x140".
void bind_jump(Binder& b, bool relative_to_next) {
  Inst& in = b.inst;
  b.ignore({"REL", "ABS", "NOINC", "NODEC"});
  if (b.peek_is(Operand::Kind::Register)) {
    b.source(0);
    in.imm = b.immediate();
    if (relative_to_next) in.imm += (in.index + 1) * kInstructionBytes;
    in.run = run_indirect;
  } else {
    in.target = b.branch_target();
    in.run = run_bra;
  }
}

void bind_bra(Binder& b) {
  Inst& in = b.inst;
  bool div = b.take("DIV"), conv = b.take("CONV");
  b.ignore({"U"});
  if (b.peek_is(Operand::Kind::Predicate)) b.predicate_source(0);
  if (b.peek_is(Operand::Kind::Register) && (div || conv)) {
    b.source(0);
  } else {
    in.src[0] = b.pool_source({false, 0, kAllLanes});
  }
  in.target = b.branch_target();
  in.flags = div;
  in.run = div || conv ? run_bra_if_diverged : run_bra;
}

void accept_everything(Binder& b) {
  while (b.more()) b.next();
  for (const std::string& m : b.sass.modifiers) b.take(m.c_str());
}

}  // namespace

bool bind_control(Binder& b) {
  const std::string& op = b.opcode;
  Inst& in = b.inst;
  if (op == "BRA") {
    bind_bra(b);
  } else if (op == "BRX" || op == "CALL" || op == "RET" || op == "JMP" || op == "JMX") {
    bind_jump(b, op == "BRX");
  } else if (op == "EXIT" || op == "KILL") {
    if (b.peek_is(Operand::Kind::Predicate)) b.predicate_source(0);
    in.run = run_exit;
  } else if (op == "BPT") {
    accept_everything(b);
    in.run = run_trap;
  } else if (op == "BSSY") {
    in.kind = convergence_barrier(b);
    b.next();  // only the hardware's scheduler uses the target
    in.run = run_bssy;
  } else if (op == "BSYNC" || op == "BREAK") {
    in.kind = convergence_barrier(b);
    in.run = op == "BSYNC" ? run_bsync : run_break;
  } else if (op == "BMOV") {
    bind_bmov(b);
  } else if (op == "WARPSYNC") {
    b.source(0);
    in.run = run_warpsync;
  } else if (op == "NOP") {
    in.run = run_nop;
  } else if (op == "BAR") {
    bind_bar(b);
  } else if (op == "B2R") {
    if (!b.take("RESULT")) throw Unsupported("barrier state");
    b.destination();
    b.optional_predicate_destination(0);
    if (b.more()) b.optional_predicate_destination(0);
    in.run = run_b2r;
  } else if (op == "MEMBAR" || op == "ERRBAR" || op == "CCTL" || op == "CCTLL" || op == "YIELD" || op == "NANOSLEEP" ||
             op == "PREEXIT") {
    accept_everything(b);  // memory is sequentially consistent here, and nothing is in flight
    in.run = run_nothing;
  } else {
    return false;
  }
  return true;
}

}  // namespace gpu_emulator
