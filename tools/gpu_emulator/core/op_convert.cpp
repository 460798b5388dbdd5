// Conversions between integers, floats and doubles.
#include <cfenv>
#include <cmath>

#include "bind.h"

namespace gpu_emulator {
namespace {

constexpr int kRoundingModes[4] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};

// An integer type: its width, and its signedness in bit 7.
constexpr uint8_t kSignBit = 128;
int integer_bits(uint8_t type) {
  return type & 127;
}
bool integer_signed(uint8_t type) {
  return type & kSignBit;
}

uint8_t take_integer(Binder& b, uint8_t otherwise) {
  static const struct {
    const char* name;
    uint8_t type;
  } names[] = {{"S64", 64 | kSignBit}, {"U64", 64}, {"S32", 32 | kSignBit}, {"U32", 32},
               {"S16", 16 | kSignBit}, {"U16", 16}, {"S8", 8 | kSignBit},   {"U8", 8}};
  for (const auto& n : names)
    if (b.take(n.name)) return n.type;
  return otherwise;
}

constexpr uint8_t kFromDouble = 1, kToDouble = 2, kFlush = 4, kNanToZero = 8, kSaturate = 16, kToHalf = 32,
                  kToBfloat = 64;

double flush(double x, const Inst& in) {
  return in.flags & kFlush && std::fabs(x) < 0x1p-126 ? std::copysign(0.0, x) : x;
}

double read_float(const Warp& w, const Inst& in, int l) {
  if (in.flags & kFromDouble) return as_double(pair(w.row(in.src[0])[l], w.values(in.src[1])[l]));
  return flush(as_float(w.values(in.src[0])[l]), in);
}

void store_wide(Warp& w, const Inst& in, const uint64_t* values, bool wide, uint32_t mask) {
  alignas(64) uint32_t low[kLanes], high[kLanes];
  for (int l = 0; l < kLanes; l++) {
    low[l] = static_cast<uint32_t>(values[l]);
    high[l] = static_cast<uint32_t>(values[l] >> 32);
  }
  store_row(w, in.dst, low, mask);
  if (wide) store_row(w, in.dst + 1, high, mask);
}

// kind: integer type; imm: rounding mode.
void run_i2f(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  uint64_t out[kLanes] = {};
  const Values low = w.values(in.src[0]), high = w.values(in.src[1]);
  fesetround(kRoundingModes[in.imm & 3]);
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    uint64_t x = integer_bits(in.kind) == 64 ? pair(low[l], high[l]) : low[l] >> (in.imm >> 8);
    int unused = 64 - integer_bits(in.kind);
    volatile int64_t s = static_cast<int64_t>(x << unused) >> unused;
    volatile uint64_t u = x << unused >> unused;
    if (in.flags & kToDouble) {
      volatile double r = integer_signed(in.kind) ? static_cast<double>(s) : static_cast<double>(u);
      out[l] = as_bits64(r);
    } else {
      volatile float r = integer_signed(in.kind) ? static_cast<float>(s) : static_cast<float>(u);
      out[l] = as_bits(r);
    }
  }
  fesetround(FE_TONEAREST);
  store_wide(w, in, out, in.flags & kToDouble, mask);
}

void bind_i2f(Binder& b) {
  Inst& in = b.inst;
  if (b.take("F64")) in.flags |= kToDouble;
  b.ignore({"F32"});
  in.kind = take_integer(b, 32 | kSignBit);
  int round = b.take_one({"RN", "RZ", "RM", "RP"});
  in.imm = static_cast<uint32_t>(round < 0 ? 0 : round);
  b.destination();
  if (integer_bits(in.kind) == 64) {
    b.wide_source(0);
  } else {
    const Operand& o = b.peek();
    if (o.kind == Operand::Kind::Register && o.suffix.size() == 2 && o.suffix[0] == 'B') {
      // a byte or half-word of the register
      in.imm |= static_cast<uint32_t>(o.suffix[1] - '0') * 8 << 8;
      if (o.negate || o.absolute || o.invert) throw Unsupported("operand " + o.text);
      in.src[0] = b.register_source(b.next().index);
    } else {
      b.source(0);
    }
  }
  in.run = run_i2f;
}

double round_to_integer(double x, uint32_t mode) {
  switch (mode) {
    case 1:
      return std::trunc(x);
    case 2:
      return std::floor(x);
    case 3:
      return std::ceil(x);
    default:
      return std::nearbyint(x);
  }
}

int take_integer_rounding(Binder& b) {
  int mode = b.take_one({"RN", "TRUNC", "FLOOR", "CEIL"});
  return mode < 0 ? 0 : mode;
}

uint64_t to_integer(double x, uint8_t type, uint32_t rounding, bool nan_to_zero) {
  int bits = integer_bits(type);
  if (x != x) {
    if (nan_to_zero || bits < 64)
      return nan_to_zero ? 0 : integer_signed(type) ? 1ull << (bits - 1) : ~0ull >> (64 - bits);
    return 1ull << 63;
  }
  double r = round_to_integer(x, rounding);
  if (integer_signed(type)) {
    double limit = std::ldexp(1.0, bits - 1);
    if (r >= limit) return (1ull << (bits - 1)) - 1;
    if (r <= -limit) return static_cast<uint64_t>(-1) << (bits - 1);
    return static_cast<uint64_t>(static_cast<int64_t>(r));
  }
  if (r <= 0) return 0;
  if (r >= std::ldexp(1.0, bits)) return ~0ull >> (64 - bits);
  return static_cast<uint64_t>(r);
}

void run_f2i(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  uint64_t out[kLanes] = {};
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) out[l] = to_integer(read_float(w, in, l), in.kind, in.imm, in.flags & kNanToZero);
  store_wide(w, in, out, integer_bits(in.kind) == 64, mask);
}

void bind_f2i(Binder& b) {
  Inst& in = b.inst;
  if (b.take("F64")) in.flags |= kFromDouble;
  b.ignore({"F32"});
  if (b.take("FTZ")) in.flags |= kFlush;
  if (b.take("NTZ")) in.flags |= kNanToZero;
  in.kind = take_integer(b, 32 | kSignBit);
  in.imm = static_cast<uint32_t>(take_integer_rounding(b));
  b.destination();
  if (in.flags & kFromDouble) {
    b.wide_source(0, Number::Double);
  } else {
    b.source(0, Number::Float);
  }
  in.run = run_f2i;
}

// In the current rounding mode.
uint32_t to_half(float x) {
  volatile _Float16 h = static_cast<_Float16>(x);
  const _Float16 plain = h;
  uint16_t bits;
  memcpy(&bits, &plain, 2);
  return bits;
}

// Rounds to nearest, or toward zero.
uint32_t to_bfloat(float x, bool nearest) {
  if (x != x) return 0x7fff;
  const uint32_t bits = as_bits(x);
  return (bits + (nearest ? 0x7fffu + (bits >> 16 & 1) : 0)) >> 16;
}

void run_f2f(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  uint64_t out[kLanes] = {};
  fesetround(kRoundingModes[in.imm & 3]);
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    volatile double x = read_float(w, in, l);
    if (in.flags & kToDouble) {
      out[l] = as_bits64(x);
    } else if (in.flags & kToHalf) {
      out[l] = to_half(static_cast<float>(x));
    } else if (in.flags & kToBfloat) {
      out[l] = to_bfloat(static_cast<float>(x), in.imm == 0);
    } else {
      volatile float f = static_cast<float>(x);
      float r = static_cast<float>(flush(f, in));
      if (in.flags & kSaturate) r = r > 0.0f ? (r < 1.0f ? r : 1.0f) : 0.0f;
      out[l] = as_bits(r);
    }
  }
  fesetround(FE_TONEAREST);
  store_wide(w, in, out, in.flags & kToDouble, mask);
}

// The first type is the destination, the second the source: F2F.F32.F64.
void bind_f2f(Binder& b) {
  Inst& in = b.inst;
  std::vector<std::string> types;
  for (const std::string& m : b.sass.modifiers)
    if (m == "F64" || m == "F32" || m == "F16" || m == "BF16") types.push_back(m);
  if (types.size() != 2) throw Unsupported("types");
  b.ignore({"F64", "F32", "F16", "BF16"});
  if (types[0] == "F64") in.flags |= kToDouble;
  if (types[0] == "F16") in.flags |= kToHalf;
  if (types[0] == "BF16") in.flags |= kToBfloat;
  const bool narrows = in.flags & (kToHalf | kToBfloat);
  if (types[1] == "F64") in.flags |= kFromDouble;
  if (types[1] == "F16" || types[1] == "BF16" || (narrows && types[1] == "F64")) throw Unsupported("half precision");
  if (b.take("FTZ")) in.flags |= kFlush;
  if (b.take("SAT")) in.flags |= kSaturate;
  int round = b.take_one({"RN", "RZ", "RM", "RP"});
  in.imm = static_cast<uint32_t>(round < 0 ? 0 : round);
  if ((in.flags & kToBfloat) && in.imm > 1) throw Unsupported("rounding");
  b.destination();
  if (in.flags & kFromDouble) {
    b.wide_source(0, Number::Double);
  } else {
    b.source(0, Number::Float);
  }
  in.run = run_f2f;
}

// F2FP.PACK_AB R0, R1, R2: two floats to the upper and the lower half of a register.
void run_pack(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values upper = w.values(in.src[0]), lower = w.values(in.src[1]);
  auto narrow = [&](uint32_t bits) {
    return in.flags & kToBfloat ? to_bfloat(as_float(bits), in.imm == 0) : to_half(as_float(bits));
  };
  alignas(64) uint32_t out[kLanes];
  fesetround(kRoundingModes[in.imm]);
  for (int l = 0; l < kLanes; l++) out[l] = narrow(upper[l]) << 16 | narrow(lower[l]);
  fesetround(FE_TONEAREST);
  store_row(w, in.dst, out, mask);
}

void bind_pack(Binder& b) {
  Inst& in = b.inst;
  if (!b.take("PACK_AB")) throw Unsupported("form");
  in.flags = b.take("BF16") ? kToBfloat : kToHalf;
  in.imm = b.take("RZ") ? 1 : 0;
  b.destination();
  b.source(0, Number::Float);
  b.source(1, Number::Float);
  in.run = run_pack;
}

// imm: first bit of the half in the register.
void run_widen_half(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]);
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = as_bits(half_value(a[l] >> in.imm));
  store_row(w, in.dst, out, mask);
}

// HADD2.F32 R0, R1.H0_H0, -RZ.H0_H0 (operands exchanged on sm_80) adds -0: the compiler's conversion of half to float.
void bind_widen_half(Binder& b) {
  if (!b.take("F32")) throw Unsupported("half precision");
  b.destination();
  const Operand &first = b.next(), &second = b.next();
  const bool zero_first = first.kind == Operand::Kind::Register && first.index == kZeroRegister;
  const Operand &half = zero_first ? second : first, &zero = zero_first ? first : second;
  const bool in_register = half.kind == Operand::Kind::Register;
  const bool in_bank = half.kind == Operand::Kind::Constant && !half.moves();
  const bool is_lower = half.suffix == "H0_H0", is_upper = half.suffix == "H1_H1";
  if (!(in_register || in_bank) || !(is_lower || is_upper) || half.negate || half.absolute) {
    throw Unsupported("operand " + half.text);
  }
  bool is_zero = zero.kind == Operand::Kind::Register && zero.index == kZeroRegister && zero.negate;
  if (!is_zero) throw Unsupported("half precision");
  b.inst.src[0] = in_register ? b.register_source(half.index)
                              : b.pool_source({true, half.bank, static_cast<uint32_t>(half.offset)});
  b.inst.imm = is_upper ? 16 : 0;
  b.inst.run = run_widen_half;
}

void run_frnd(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  uint64_t out[kLanes] = {};
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    double r = round_to_integer(read_float(w, in, l), in.imm);
    out[l] = in.flags & kFromDouble ? as_bits64(r) : as_bits(static_cast<float>(r));
  }
  store_wide(w, in, out, in.flags & kFromDouble, mask);
}

void bind_frnd(Binder& b) {
  Inst& in = b.inst;
  if (b.take("F64")) in.flags |= kFromDouble;
  b.ignore({"F32"});
  if (b.take("FTZ")) in.flags |= kFlush;
  in.imm = static_cast<uint32_t>(take_integer_rounding(b));
  b.destination();
  if (in.flags & kFromDouble) {
    b.wide_source(0, Number::Double);
  } else {
    b.source(0, Number::Float);
  }
  in.run = run_frnd;
}

// kind: destination type; imm: source type.
void run_i2i(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]);
  alignas(64) uint32_t out[kLanes];
  int to = integer_bits(in.kind), from = 64 - integer_bits(static_cast<uint8_t>(in.imm));
  for (int l = 0; l < kLanes; l++) {
    uint64_t up = static_cast<uint64_t>(a[l]) << from;
    int64_t x = integer_signed(static_cast<uint8_t>(in.imm)) ? static_cast<int64_t>(up) >> from
                                                             : static_cast<int64_t>(up >> from);
    if (in.flags & kSaturate) {
      int64_t low = integer_signed(in.kind) ? -(1ll << (to - 1)) : 0;
      int64_t high = integer_signed(in.kind) ? (1ll << (to - 1)) - 1 : (1ll << to) - 1;
      x = x < low ? low : x > high ? high : x;
    } else {
      x = integer_signed(in.kind) ? x << (64 - to) >> (64 - to)
                                  : static_cast<int64_t>(static_cast<uint64_t>(x) << (64 - to) >> (64 - to));
    }
    out[l] = static_cast<uint32_t>(x);
  }
  store_row(w, in.dst, out, mask);
}

void bind_i2i(Binder& b) {
  static const struct {
    const char* name;
    uint8_t type;
  } names[] = {{"S32", 32 | kSignBit}, {"U32", 32}, {"S16", 16 | kSignBit}, {"U16", 16},
               {"S8", 8 | kSignBit},   {"U8", 8}};
  std::vector<uint8_t> types;
  for (const std::string& m : b.sass.modifiers)
    for (const auto& n : names)
      if (m == n.name) {
        types.push_back(n.type);
        b.take(n.name);
      }
  if (types.empty()) throw Unsupported("types");
  b.inst.kind = types[0];
  b.inst.imm = types.size() > 1 ? types[1] : 32 | kSignBit;
  if (b.take("SAT")) b.inst.flags |= kSaturate;
  b.destination();
  b.source(0);
  b.inst.run = run_i2i;
}

}  // namespace

bool bind_convert(Binder& b) {
  const std::string& op = b.opcode;
  if (op == "I2F") {
    bind_i2f(b);
  } else if (op == "F2I") {
    bind_f2i(b);
  } else if (op == "F2F") {
    bind_f2f(b);
  } else if (op == "F2FP") {
    bind_pack(b);
  } else if (op == "HADD2") {
    bind_widen_half(b);
  } else if (op == "FRND") {
    bind_frnd(b);
  } else if (op == "I2I") {
    bind_i2i(b);
  } else {
    return false;
  }
  return true;
}

}  // namespace gpu_emulator
