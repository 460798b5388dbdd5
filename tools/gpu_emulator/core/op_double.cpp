// Double precision: each value is a pair of registers.
#include <cfenv>
#include <cmath>

#include "bind.h"

namespace gpu_emulator {
namespace {

constexpr int kRoundingModes[4] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};

inline double read(const Warp& w, const Inst& in, int slot, int l) {
  return as_double(pair(w.row(in.src[slot])[l], w.values(in.src[slot + 1])[l]));
}

enum Operation : uint8_t { kFma, kMul, kAdd };

// flags: rounding mode.
void run_arithmetic(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) uint32_t low[kLanes] = {}, high[kLanes] = {};
  fesetround(kRoundingModes[in.flags]);
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    // volatile: keeps the operation between the two fesetround calls
    volatile double a = read(w, in, 0, l), b = read(w, in, 2, l), c = read(w, in, 4, l), r;
    r = in.kind == kFma ? __builtin_fma(a, b, c) : in.kind == kMul ? a * b : a + b;
    uint64_t bits = as_bits64(r);
    low[l] = static_cast<uint32_t>(bits);
    high[l] = static_cast<uint32_t>(bits >> 32);
  }
  fesetround(FE_TONEAREST);
  store_row(w, in.dst, low, mask);
  store_row(w, in.dst + 1, high, mask);
}

void bind_arithmetic(Binder& b, Operation operation) {
  b.inst.kind = operation;
  int round = b.take_one({"RN", "RZ", "RM", "RP"});
  b.inst.flags = static_cast<uint8_t>(round < 0 ? 0 : round);
  b.destination();
  b.wide_source(0, Number::Double);
  b.wide_source(2, Number::Double);
  if (operation == kFma) b.wide_source(4, Number::Double);
  b.inst.run = run_arithmetic;
}

enum Compare : uint8_t { kLess = 1, kEqual = 2, kGreater = 4, kUnordered = 8, kMinimum = 16, kMaximum = 32 };

void run_dsetp(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  uint32_t r = 0, second = 0;
  for (int l = 0; l < kLanes; l++) {
    double a = read(w, in, 0, l), b = read(w, in, 2, l);
    bool first, other;
    if (in.kind & (kMinimum | kMaximum)) {
      // First predicate: take the first operand. Second: both are NaN.
      bool less = a < b || (a == b && std::signbit(a) && !std::signbit(b));
      bool greater = a > b || (a == b && !std::signbit(a) && std::signbit(b));
      first = (in.kind & kMinimum ? less : greater) || b != b;
      other = a != a && b != b;
    } else {
      first = (in.kind & kLess && a < b) || (in.kind & kEqual && a == b) || (in.kind & kGreater && a > b) ||
              (in.kind & kUnordered && (a != a || b != b));
      other = !first;
    }
    r |= static_cast<uint32_t>(first) << l;
    second |= static_cast<uint32_t>(other) << l;
  }
  uint32_t p = w.predicate(in.psrc[0]);
  auto combine = [&](uint32_t x) { return in.flags == 1 ? x | p : in.flags == 2 ? x ^ p : x & p; };
  store_predicate(w, in.pdst[0], combine(r), mask);
  store_predicate(w, in.pdst[1], combine(second), mask);
}

void bind_dsetp(Binder& b) {
  static const struct {
    const char* name;
    uint8_t bits;
  } names[] = {{"LT", 1},   {"EQ", 2},   {"LE", 3},  {"GT", 4},   {"NE", 5},         {"GE", 6},
               {"NUM", 7},  {"NAN", 8},  {"LTU", 9}, {"EQU", 10}, {"LEU", 11},       {"GTU", 12},
               {"NEU", 13}, {"GEU", 14}, {"T", 15},  {"F", 0},    {"MIN", kMinimum}, {"MAX", kMaximum}};
  Inst& in = b.inst;
  bool found = false;
  for (const auto& n : names) {
    if (!found && b.take(n.name)) {
      in.kind = n.bits;
      found = true;
    }
  }
  if (!found) throw Unsupported("comparison");
  int how = b.take_one({"AND", "OR", "XOR"});
  if (how < 0) throw Unsupported("combination");
  in.flags = static_cast<uint8_t>(how);
  b.predicate_destination(0);
  b.predicate_destination(1);
  b.wide_source(0, Number::Double);
  b.wide_source(2, Number::Double);
  b.predicate_source(0);
  in.run = run_dsetp;
}

}  // namespace

bool bind_double(Binder& b) {
  const std::string& op = b.opcode;
  if (op == "DFMA") {
    bind_arithmetic(b, kFma);
  } else if (op == "DMUL") {
    bind_arithmetic(b, kMul);
  } else if (op == "DADD") {
    bind_arithmetic(b, kAdd);
  } else if (op == "DSETP") {
    bind_dsetp(b);
  } else {
    return false;
  }
  return true;
}

}  // namespace gpu_emulator
