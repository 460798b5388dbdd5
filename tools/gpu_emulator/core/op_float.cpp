// Single-precision arithmetic with the host's IEEE operations. NaNs keep their payload (a GPU returns the canonical
// NaN), so that a poisoned register stays recognisable.
#include <cfenv>
#include <cmath>
#include <limits>

#include "bind.h"

namespace gpu_emulator {
namespace {

enum FloatFlags : uint8_t { kFtz = 1, kSaturate = 2, kNan = 2, kRoundShift = 2, kRoundMask = 3 << kRoundShift };
constexpr int kRoundingModes[4] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};

inline float flush(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
inline float saturate(float x) {
  return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}  // NaN becomes 0

struct Fma {
  static float apply(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static constexpr int sources = 3;
};
struct Mul {
  static float apply(float a, float b, float) { return a * b; }
  static constexpr int sources = 2;
};
struct Add {
  static float apply(float a, float b, float) { return a + b; }
  static constexpr int sources = 2;
};

template <class Op, class Reader>
void arithmetic(uint32_t* d, uint32_t mask, const Reader& a, const Reader& b, const Reader& c) {
  if (mask == kAllLanes) {  // the inner loop of every GEMM; a lane reads only its own column, so aliasing is harmless
#pragma GCC ivdep
    for (int l = 0; l < kLanes; l++) d[l] = as_bits(Op::apply(as_float(a[l]), as_float(b[l]), as_float(c[l])));
    return;
  }
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = as_bits(Op::apply(as_float(a[l]), as_float(b[l]), as_float(c[l])));
  for (int l = 0; l < kLanes; l++) d[l] = (mask >> l & 1) ? out[l] : d[l];
}

template <class Op, bool plain>
void run_fast(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  if constexpr (plain) {
    arithmetic<Op>(w.reg[in.dst], mask, w.row(in.src[0]), w.row(in.src[1]), w.row(in.src[2]));
  } else {
    arithmetic<Op>(w.reg[in.dst], mask, w.values(in.src[0]), w.values(in.src[1]), w.values(in.src[2]));
  }
}

// Flushing, saturation or a directed rounding: lane by lane.
template <class Op>
void run_careful(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]), c = w.values(in.src[2]);
  bool ftz = in.flags & kFtz;
  alignas(64) uint32_t out[kLanes] = {};
  fesetround(kRoundingModes[(in.flags & kRoundMask) >> kRoundShift]);
  for (int l = 0; l < kLanes; l++) {
    if (!(mask >> l & 1)) continue;
    float x = as_float(a[l]), y = as_float(b[l]), z = as_float(c[l]);
    // volatile: keeps the operation between the two fesetround calls
    volatile float vx = ftz ? flush(x) : x, vy = ftz ? flush(y) : y, vz = ftz ? flush(z) : z;
    volatile float r = Op::apply(vx, vy, vz);
    out[l] = as_bits(r);
  }
  fesetround(FE_TONEAREST);
  for (int l = 0; l < kLanes; l++) {
    float r = as_float(out[l]);
    if (ftz) r = flush(r);
    if (in.flags & kSaturate) r = saturate(r);
    out[l] = as_bits(r);
  }
  store_row(w, in.dst, out, mask);
}

template <class Op>
void bind_arithmetic(Binder& b) {
  Inst& in = b.inst;
  if (b.take("FTZ")) in.flags |= kFtz;
  if (b.take("SAT")) in.flags |= kSaturate;
  int round = b.take_one({"RN", "RZ", "RM", "RP"});
  if (round > 0) in.flags |= static_cast<uint8_t>(round << kRoundShift);
  b.destination();
  for (int i = 0; i < Op::sources; i++) b.source(i, Number::Float);
  bool plain = in.src[0].plain() && in.src[1].plain() && in.src[2].plain();
  in.run = in.flags ? run_careful<Op> : plain ? run_fast<Op, true> : run_fast<Op, false>;
}

// ---- comparison and selection ----------------------------------------------------------------------------

enum FloatCompare : uint8_t { kLess = 1, kEqual = 2, kGreater = 4, kUnordered = 8 };
enum SetFlags : uint8_t { kSetFtz = 1, kSetOr = 2, kSetXor = 4 };

uint8_t take_comparison(Binder& b) {
  static const struct {
    const char* name;
    uint8_t bits;
  } names[] = {{"F", 0},
               {"LT", kLess},
               {"EQ", kEqual},
               {"LE", kLess | kEqual},
               {"GT", kGreater},
               {"NE", kLess | kGreater},
               {"GE", kGreater | kEqual},
               {"NUM", kLess | kEqual | kGreater},
               {"NAN", kUnordered},
               {"LTU", kLess | kUnordered},
               {"EQU", kEqual | kUnordered},
               {"LEU", kLess | kEqual | kUnordered},
               {"GTU", kGreater | kUnordered},
               {"NEU", kLess | kGreater | kUnordered},
               {"GEU", kGreater | kEqual | kUnordered},
               {"T", 15}};
  for (const auto& n : names)
    if (b.take(n.name)) return n.bits;
  throw Unsupported("comparison");
}

uint32_t compare(Warp& w, const Inst& in) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]);
  uint32_t less = 0, equal = 0, greater = 0;
  for (int l = 0; l < kLanes; l++) {
    float x = as_float(a[l]), y = as_float(b[l]);
    if (in.flags & kSetFtz) {
      x = std::fabs(x) < std::numeric_limits<float>::min() ? 0.0f : x;
      y = std::fabs(y) < std::numeric_limits<float>::min() ? 0.0f : y;
    }
    less |= static_cast<uint32_t>(x < y) << l;
    equal |= static_cast<uint32_t>(x == y) << l;
    greater |= static_cast<uint32_t>(x > y) << l;
  }
  uint32_t r = 0;
  if (in.kind & kLess) r |= less;
  if (in.kind & kEqual) r |= equal;
  if (in.kind & kGreater) r |= greater;
  if (in.kind & kUnordered) r |= ~(less | equal | greater);
  return r;
}

uint32_t combine(const Inst& in, uint32_t x, uint32_t p) {
  return in.flags & kSetOr ? x | p : in.flags & kSetXor ? x ^ p : x & p;
}

void run_fsetp(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  uint32_t r = compare(w, in), p = w.predicate(in.psrc[0]);
  store_predicate(w, in.pdst[0], combine(in, r, p), mask);
  store_predicate(w, in.pdst[1], combine(in, ~r, p), mask);
}

void run_fset(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  uint32_t r = combine(in, compare(w, in), w.predicate(in.psrc[0]));
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = (r >> l & 1) ? in.imm : 0;
  store_row(w, in.dst, out, mask);
}

void bind_set(Binder& b, bool to_predicate) {
  Inst& in = b.inst;
  if (!to_predicate) in.imm = b.take("BF") ? as_bits(1.0f) : 0xffffffffu;
  in.kind = take_comparison(b);
  if (b.take("FTZ")) in.flags |= kSetFtz;
  int how = b.take_one({"AND", "OR", "XOR"});
  if (how < 0) throw Unsupported("combination");
  if (how == 1) in.flags |= kSetOr;
  if (how == 2) in.flags |= kSetXor;
  if (to_predicate) {
    b.predicate_destination(0);
    b.predicate_destination(1);
  } else {
    b.destination();
  }
  b.source(0, Number::Float);
  b.source(1, Number::Float);
  b.predicate_source(0);
  in.run = to_predicate ? run_fsetp : run_fset;
}

void run_fsel(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]);
  uint32_t p = w.predicate(in.psrc[0]);
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) {
    uint32_t x = a[l], y = b[l];
    out[l] = (p >> l & 1) ? x : y;
    if (in.flags & kFtz) out[l] = as_bits(flush(as_float(out[l])));
  }
  store_row(w, in.dst, out, mask);
}

// Minimum if the predicate holds, else maximum. A number wins against NaN, except with .NAN, and -0 is below +0.
void run_fmnmx(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]);
  uint32_t p = w.predicate(in.psrc[0]);
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) {
    float x = as_float(a[l]), y = as_float(b[l]);
    if (in.flags & kFtz) {
      x = flush(x);
      y = flush(y);
    }
    bool first_is_less = x < y || (x == y && std::signbit(x));
    float r = (p >> l & 1) == first_is_less ? x : y;
    if (x != x) r = y;
    if (y != y) r = x;
    out[l] = (in.flags & kNan) && (x != x || y != y) ? 0x7fffffff : as_bits(r);
  }
  store_row(w, in.dst, out, mask);
}

// ---- division support, special functions -----------------------------------------------------------------

// True if the short division sequence is not safe. The slow path that follows is right for every input, so this may be
// more conservative than the hardware.
void run_fchk(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]);
  uint32_t slow = 0;
  for (int l = 0; l < kLanes; l++) {
    int ea = a[l] >> 23 & 255, eb = b[l] >> 23 & 255;
    int quotient = ea - eb;
    bool safe = ea >= 25 && ea < 255 && eb >= 3 && eb <= 250 && quotient > -125 && quotient < 125;
    slow |= static_cast<uint32_t>(!safe) << l;
  }
  store_predicate(w, in.pdst[0], slow, mask);
}

enum Function : uint8_t { kRcp, kRsq, kSqrt, kEx2, kLg2, kSin, kCos, kRcp64H, kRsq64H };

// Correctly rounded results (the hardware errs by about one unit in the last place).
uint32_t special_function(uint8_t kind, uint32_t bits) {
  constexpr double two_pi = 6.283185307179586476925;
  double x = as_float(bits);
  switch (kind) {
    case kRcp:
      return as_bits(static_cast<float>(1.0 / x));
    case kRsq:
      return as_bits(static_cast<float>(1.0 / std::sqrt(x)));
    case kSqrt:
      return as_bits(static_cast<float>(std::sqrt(x)));
    case kEx2:
      return as_bits(static_cast<float>(std::exp2(x)));
    case kLg2:
      return as_bits(static_cast<float>(std::log2(x)));
    case kSin:
      return as_bits(static_cast<float>(std::sin(two_pi * x)));  // the argument comes divided by 2 pi
    case kCos:
      return as_bits(static_cast<float>(std::cos(two_pi * x)));
    case kRcp64H:
      return static_cast<uint32_t>(as_bits64(1.0 / as_double(static_cast<uint64_t>(bits) << 32)) >> 32);
    default:
      return static_cast<uint32_t>(as_bits64(1.0 / std::sqrt(as_double(static_cast<uint64_t>(bits) << 32))) >> 32);
  }
}

void run_mufu(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]);
  alignas(64) uint32_t out[kLanes] = {};
  for (int l = 0; l < kLanes; l++)
    if (mask >> l & 1) out[l] = special_function(in.kind, a[l]);
  store_row(w, in.dst, out, mask);
}

}  // namespace

bool bind_float(Binder& b) {
  const std::string& op = b.opcode;
  Inst& in = b.inst;
  if (op == "FFMA" || op == "FFMA32I") {
    bind_arithmetic<Fma>(b);
  } else if (op == "FMUL" || op == "FMUL32I") {
    bind_arithmetic<Mul>(b);
  } else if (op == "FADD" || op == "FADD32I") {
    bind_arithmetic<Add>(b);
  } else if (op == "FSETP") {
    bind_set(b, true);
  } else if (op == "FSET") {
    bind_set(b, false);
  } else if (op == "FSEL" || op == "FMNMX") {
    if (b.take("FTZ")) in.flags |= kFtz;
    if (op == "FMNMX" && b.take("NAN")) in.flags |= kNan;
    b.destination();
    b.source(0, Number::Float);
    b.source(1, Number::Float);
    b.predicate_source(0);
    in.run = op == "FSEL" ? run_fsel : run_fmnmx;
  } else if (op == "FCHK") {
    b.ignore({"DIVIDE"});
    b.predicate_destination(0);
    b.source(0, Number::Float);
    b.source(1, Number::Float);
    in.run = run_fchk;
  } else if (op == "MUFU") {
    int kind = b.take_one({"RCP", "RSQ", "SQRT", "EX2", "LG2", "SIN", "COS", "RCP64H", "RSQ64H"});
    if (kind < 0) throw Unsupported("function");
    in.kind = static_cast<uint8_t>(kind);
    b.destination();
    b.source(0, Number::Float);
    in.run = run_mufu;
  } else {
    return false;
  }
  return true;
}

}  // namespace gpu_emulator
