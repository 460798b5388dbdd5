// Atomics, executed in lane order. A GPU guarantees no order, so a result that depends on it is a bug in the kernel
// (floating-point sums above all).
#include <cstring>

#include "bind.h"
#include "memory.h"

namespace gpu_emulator {
namespace {

enum Operation : uint8_t { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor, kExch, kCas, kCast };
enum Type : uint8_t { kU32, kS32, kU64, kS64, kF32, kF64 };

template <class T>
T extremum(T old, T value, bool minimum) {
  return (minimum ? value < old : value > old) ? value : old;
}

uint64_t combine(uint8_t operation, uint8_t type, uint64_t old, uint64_t value) {
  auto narrow = [](uint64_t x) { return static_cast<uint32_t>(x); };
  switch (operation) {
    case kAdd:
      if (type == kF32) return as_bits(as_float(narrow(old)) + as_float(narrow(value)));
      if (type == kF64) return as_bits64(as_double(old) + as_double(value));
      return old + value;
    case kMin:
    case kMax: {
      bool minimum = operation == kMin;
      switch (type) {
        case kU32:
          return extremum(narrow(old), narrow(value), minimum);
        case kS32:
          return narrow(
              static_cast<uint64_t>(extremum(static_cast<int32_t>(old), static_cast<int32_t>(value), minimum)));
        case kU64:
          return extremum(old, value, minimum);
        default:
          return static_cast<uint64_t>(extremum(static_cast<int64_t>(old), static_cast<int64_t>(value), minimum));
      }
    }
    case kInc:
      return narrow(old) >= narrow(value) ? 0 : narrow(old) + 1;
    case kDec:
      return narrow(old) == 0 || narrow(old) > narrow(value) ? narrow(value) : narrow(old) - 1;
    case kAnd:
      return old & value;
    case kOr:
      return old | value;
    case kXor:
      return old ^ value;
    default:
      return value;  // exchange
  }
}

uint64_t read_value(const Warp& w, const Inst& in, int slot, int lane) {
  uint32_t low = w.row(in.src[slot])[lane];
  return in.width == 8 ? pair(low, w.row(in.src[slot + 1])[lane]) : low;
}

// kind: operation; flags: type; imm: 1 to return the old value. src[2..3]: value or comparand, src[4..5]: new value.
void apply(Machine& m, Warp& w, const Inst& in, uint32_t mask, const uint64_t* address, Space space) {
  access(m, w, in, mask, address, space, kReads | kWrites | kAtomic);
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    uint8_t* p = host_pointer(m, w, space, address[l], l);
    uint64_t old = 0, value = read_value(w, in, 2, l);
    memcpy(&old, p, in.width);
    uint64_t fresh, result = old;
    if (in.kind == kCas || in.kind == kCast) {
      bool hit = old == value;
      fresh = hit ? read_value(w, in, 4, l) : old;
      if (in.kind == kCast) result = hit;  // returns success, not the old value
    } else {
      fresh = combine(in.kind, in.flags, old, value);
    }
    memcpy(p, &fresh, in.width);
    w.reg[in.dst][l] = static_cast<uint32_t>(result);
    if (in.width == 8) w.reg[in.dst + 1][l] = static_cast<uint32_t>(result >> 32);
  }
}

template <Space space>
void run_atomic(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) uint64_t address[kLanes];
  if (space == Space::Global) {
    global_addresses(w, in, address);
  } else {
    window_addresses(w, in, address);
  }
  apply(m, w, in, mask, address, space);
}

void run_generic_atomic(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  alignas(64) uint64_t address[kLanes];
  global_addresses(w, in, address);
  for_each_space(mask, address, [&](Space space, uint32_t lanes) { apply(m, w, in, lanes, address, space); });
}

void bind_value(Binder& b, int slot) {
  if (b.inst.width == 8) {
    b.wide_source(slot);
  } else {
    b.source(slot);
    if (!b.inst.src[slot].plain()) throw Unsupported("modified value");
  }
}

void bind_operation(Binder& b) {
  Inst& in = b.inst;
  b.ignore({"STRONG", "WEAK", "GPU", "SYS", "CTA", "SM", "SPIN", "E", "RN", "FTZ"});
  int operation = b.take_one({"ADD", "MIN", "MAX", "INC", "DEC", "AND", "OR", "XOR", "EXCH", "CAS", "CAST"});
  if (operation < 0) throw Unsupported("operation");
  in.kind = static_cast<uint8_t>(operation);
  int type = b.take_one({"U32", "S32", "U64", "S64", "F32", "F64"});
  bool wide = b.take("64");
  b.ignore({"32"});
  in.flags = static_cast<uint8_t>(type >= 0 ? type : wide ? kU64 : kU32);
  in.width = in.flags == kU64 || in.flags == kS64 || in.flags == kF64 ? 8 : 4;
  if (type >= kF32 && in.kind != kAdd) throw Unsupported("floating-point operation");
}

}  // namespace

bool bind_atomic(Binder& b) {
  const std::string& op = b.opcode;
  Inst& in = b.inst;
  bool shared = op == "ATOMS", reduction = op == "RED";
  if (!shared && !reduction && op != "ATOMG" && op != "ATOM") return false;
  bind_operation(b);
  in.wide_address = !shared;
  if (!reduction) {
    if (!shared) b.optional_predicate_destination(0);
    b.destination();
  }
  b.address();
  bind_value(b, 2);
  if (in.kind == kCas || in.kind == kCast) bind_value(b, 4);
  if (shared || op == "ATOM") {
    if (in.kind == kCas || in.kind == kCast) b.kernel().shared_cas = true;
  }
  in.run = shared ? run_atomic<Space::Shared> : op == "ATOM" ? run_generic_atomic : run_atomic<Space::Global>;
  return true;
}

}  // namespace gpu_emulator
