// Integer, logic and predicate instructions.
#include <algorithm>

#include "bind.h"

namespace gpu_emulator {
namespace {

// ---- moves, selects, multiply-add ------------------------------------------------------------------------

struct Move {
  static uint32_t apply(const Inst&, uint32_t a, uint32_t, uint32_t) { return a; }
};
struct MultiplyAdd {
  static uint32_t apply(const Inst&, uint32_t a, uint32_t b, uint32_t c) { return a * b + c; }
};
struct Add3 {
  static uint32_t apply(const Inst&, uint32_t a, uint32_t b, uint32_t c) { return a + b + c; }
};

// HFMA2.MMA R0, -RZ, RZ, 1.875, 0 is a move through another pipe: two half immediates, the upper one first, plus -0.
void bind_half_move(Binder& b) {
  if (!b.take("MMA")) throw Unsupported("half precision");
  b.destination();
  for (bool negated : {true, false}) {
    const Operand& zero = b.next();
    if (zero.kind != Operand::Kind::Register || zero.index != kZeroRegister || zero.negate != negated)
      throw Unsupported("half precision");
  }
  uint32_t bits = 0;
  for (int i = 0; i < 2; i++) {
    const Operand& half = b.next();
    if (half.kind != Operand::Kind::Immediate || !half.is_float || half.number != half.number)
      throw Unsupported("operand " + half.text);
    bits = bits << 16 | half_bits(static_cast<float>(half.number));
  }
  b.inst.src[0] = b.pool_source({false, 0, bits});
  b.inst.run = pick_elementwise<Move, 1>(b.inst);
}

void run_imad_x(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]), c = w.values(in.src[2]);
  uint32_t carry = w.predicate(in.psrc[0]);
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) out[l] = a[l] * b[l] + c[l] + (carry >> l & 1);
  store_row(w, in.dst, out, mask);
}

// Flags of a wide multiply-add.
enum : uint32_t { kCarryIn = 1, kNegatedAddend = 2 };

// 64-bit product plus 64-bit addend: all of it (WIDE) or its upper word (HI), with an optional carry out and in.
template <bool is_signed, bool high_only>
void run_imad_wide(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]), c = w.values(in.src[2]), d = w.values(in.src[3]);
  uint32_t carry_in = in.flags & kCarryIn ? w.predicate(in.psrc[0]) : 0;
  uint64_t one = in.flags & kNegatedAddend ? 1 : 0;  // -x is ~x + 1
  alignas(64) uint32_t low[kLanes], high[kLanes], carry[kLanes];
  for (int l = 0; l < kLanes; l++) {
    uint32_t x = a[l], y = b[l];
    uint64_t product =
        is_signed ? static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(x)) * static_cast<int32_t>(y))
                  : static_cast<uint64_t>(x) * y;
    uint64_t sum = product + (pair(c[l], d[l]) + one);
    carry[l] = sum < product;
    uint64_t with_carry = sum + (carry_in >> l & 1);
    carry[l] |= with_carry < sum;
    low[l] = static_cast<uint32_t>(with_carry);
    high[l] = static_cast<uint32_t>(with_carry >> 32);
  }
  if (in.pdst[0] != kScratchPredicate) {
    uint32_t bits = 0;
    for (int l = 0; l < kLanes; l++) bits |= carry[l] << l;
    store_predicate(w, in.pdst[0], bits, mask);
  }
  if (high_only) {
    store_row(w, in.dst, high, mask);
  } else {
    store_row(w, in.dst, low, mask);
    store_row(w, in.dst + 1, high, mask);
  }
}

void bind_imad(Binder& b) {
  Inst& in = b.inst;
  bool wide = b.take("WIDE"), high = b.take("HI"), extended = b.take("X"), is_unsigned = b.take("U32");
  bool move = b.take("MOV");
  b.ignore({"IADD", "SHL"});  // spellings of a plain multiply-add
  b.destination();
  b.optional_predicate_destination(0);
  b.source(0);
  b.source(1);
  if (wide || high) {
    bool immediate = b.peek_is(Operand::Kind::Immediate);
    uint32_t sign = immediate && !is_unsigned && b.peek().bits >> 31 ? 0xffffffffu : 0;
    bool negated = b.negatable_wide_source(2);
    if (negated && (extended || in.pdst[0] != kScratchPredicate)) throw Unsupported("carry of a negated addend");
    if (immediate) in.src[3] = b.pool_source({false, 0, sign});
    if (extended) b.predicate_source(0);
    in.flags = (extended ? kCarryIn : 0) | (negated ? kNegatedAddend : 0);
    if (is_unsigned) {
      in.run = high ? run_imad_wide<false, true> : run_imad_wide<false, false>;
    } else {
      in.run = high ? run_imad_wide<true, true> : run_imad_wide<true, false>;
    }
    return;
  }
  if (in.pdst[0] != kScratchPredicate) throw Unsupported("carry of a 32-bit IMAD");
  b.source(2);
  if (extended) {
    b.predicate_source(0);
    in.run = run_imad_x;
  } else if (move) {  // RZ * RZ + c
    in.src[0] = in.src[2];
    in.run = pick_elementwise<Move, 1>(in);
  } else {
    in.run = pick_elementwise<MultiplyAdd, 3>(in);
  }
}

// a + b + c with carries. A negated operand is ~x + 1, whose own carry counts.
void run_iadd3_carry(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]), c = w.values(in.src[2]);
  uint64_t ones = (a.minus & 1) + (b.minus & 1) + (c.minus & 1);
  uint32_t carry_a = in.flags ? w.predicate(in.psrc[0]) : 0, carry_b = in.flags ? w.predicate(in.psrc[1]) : 0;
  alignas(64) uint32_t out[kLanes];
  uint32_t above1 = 0, above2 = 0;
  for (int l = 0; l < kLanes; l++) {
    uint64_t sum = static_cast<uint64_t>(a.row[l] ^ a.flip) + (b.row[l] ^ b.flip) + (c.row[l] ^ c.flip) + ones +
                   (carry_a >> l & 1) + (carry_b >> l & 1);
    out[l] = static_cast<uint32_t>(sum);
    uint32_t carries = static_cast<uint32_t>(sum >> 32);
    above1 |= static_cast<uint32_t>(carries >= 1) << l;
    above2 |= static_cast<uint32_t>(carries >= 2) << l;
  }
  store_row(w, in.dst, out, mask);
  store_predicate(w, in.pdst[0], above1, mask);
  store_predicate(w, in.pdst[1], above2, mask);
}

void bind_iadd3(Binder& b) {
  Inst& in = b.inst;
  bool extended = b.take("X");
  b.destination();
  b.optional_predicate_destination(0);
  b.optional_predicate_destination(1);
  for (int i = 0; i < 3; i++) b.source(i);
  if (extended) {
    b.predicate_source(0);
    in.psrc[1] = {kTruePredicate, 0xffffffffu};
    if (b.more()) b.predicate_source(1);
    for (const Source& s : in.src)
      if (s.mods & Source::kNegateInteger) throw Unsupported("negation in IADD3.X");
  }
  in.flags = extended;
  bool carries = extended || in.pdst[0] != kScratchPredicate || in.pdst[1] != kScratchPredicate;
  in.run = carries ? run_iadd3_carry : pick_elementwise<Add3, 3>(in);
}

void run_select(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]);
  uint32_t p = w.predicate(in.psrc[0]);
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) {
    uint32_t x = a[l], y = b[l];
    out[l] = (p >> l & 1) ? x : y;
  }
  store_row(w, in.dst, out, mask);
}

// flags: unsigned. Minimum if the predicate holds, else maximum.
void run_imnmx(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]);
  uint32_t p = w.predicate(in.psrc[0]), bias = in.flags ? 0 : 0x80000000u;
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) {
    uint32_t x = a[l] ^ bias, y = b[l] ^ bias;
    out[l] = ((p >> l & 1) ? std::min(x, y) : std::max(x, y)) ^ bias;
  }
  store_row(w, in.dst, out, mask);
}

// ---- shifts and address arithmetic -----------------------------------------------------------------------

enum ShiftFlags : uint8_t { kLeft = 1, kHigh = 2, kSigned = 4, kLong = 8, kWrap = 16 };

void run_shf(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values low = w.values(in.src[0]), by = w.values(in.src[1]), high = w.values(in.src[2]);
  uint32_t most = in.flags & kLong ? 64 : 32;
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) {
    uint64_t v = pair(low[l], high[l]);
    uint32_t raw = by[l];
    uint32_t k = in.flags & kWrap ? raw & (most - 1) : std::min(raw, most);
    uint64_t r;
    if (in.flags & kLeft) {
      r = k >= 64 ? 0 : v << k;
    } else if (in.flags & kSigned) {
      r = static_cast<uint64_t>(static_cast<int64_t>(v) >> std::min(k, 63u));
    } else {
      r = k >= 64 ? 0 : v >> k;
    }
    out[l] = static_cast<uint32_t>(in.flags & kHigh ? r >> 32 : r);
  }
  store_row(w, in.dst, out, mask);
}

void bind_shf(Binder& b) {
  int direction = b.take_one({"L", "R"});
  if (direction < 0) throw Unsupported("shift direction");
  uint8_t flags = direction == 0 ? kLeft : 0;
  if (b.take("HI")) flags |= kHigh;
  if (b.take("W")) flags |= kWrap;
  int type = b.take_one({"U32", "S32", "U64", "S64"});
  if (type < 0) throw Unsupported("shift type");
  if (type == 1 || type == 3) flags |= kSigned;
  if (type >= 2) flags |= kLong;
  b.inst.flags = flags;
  b.destination();
  for (int i = 0; i < 3; i++) b.source(i);
  b.inst.run = run_shf;
}

enum LeaFlags : uint8_t { kLeaHigh = 1, kLeaExtended = 2, kLeaSigned = 4, kLeaNegated = 8 };

// (a << shift) + b, or b plus the upper word of (c:a) << shift, with carries.
void run_lea(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]), c = w.values(in.src[2]);
  uint32_t carry_in = in.flags & kLeaExtended ? w.predicate(in.psrc[0]) : 0;
  bool high = in.flags & kLeaHigh, negated = in.flags & kLeaNegated;
  uint32_t flip = negated ? 0xffffffffu : 0;
  // -x is ~x + 1; in a carry chain, the + 1 comes in as the carry.
  uint64_t one = negated && !high && !(in.flags & kLeaExtended) ? 1 : 0;
  alignas(64) uint32_t out[kLanes];
  uint32_t carry_out = 0;
  for (int l = 0; l < kLanes; l++) {
    uint32_t upper = in.flags & kLeaSigned ? static_cast<uint32_t>(static_cast<int32_t>(a[l]) >> 31) : c[l];
    uint64_t shifted = high ? (pair(a[l], upper) << in.imm) >> 32 : static_cast<uint32_t>(a[l] << in.imm);
    uint64_t sum = (static_cast<uint32_t>(shifted) ^ flip) + one + b[l] + (carry_in >> l & 1);
    out[l] = static_cast<uint32_t>(sum);
    carry_out |= static_cast<uint32_t>(sum >> 32 != 0) << l;
  }
  store_row(w, in.dst, out, mask);
  store_predicate(w, in.pdst[0], carry_out, mask);
}

void bind_lea(Binder& b) {
  Inst& in = b.inst;
  uint8_t flags = 0;
  if (b.take("HI")) flags |= kLeaHigh;
  if (b.take("X")) flags |= kLeaExtended;
  if (b.take("SX32")) flags |= kLeaSigned;
  b.destination();
  b.optional_predicate_destination(0);
  b.source(0);
  if (!in.src[0].plain()) flags |= kLeaNegated;
  in.src[0].mods = 0;
  b.source(1);
  if ((flags & kLeaHigh) && !(flags & kLeaSigned)) b.source(2);
  in.imm = b.immediate();
  if (flags & kLeaExtended) b.predicate_source(0);
  if ((flags & kLeaNegated) && (flags & kLeaHigh) && (!(flags & kLeaExtended) || (flags & kLeaSigned)))
    throw Unsupported("negated LEA.HI");
  if (!in.src[2].plain()) throw Unsupported("modified upper word in LEA.HI");
  in.flags = flags;
  in.run = run_lea;
}

// ---- logic -----------------------------------------------------------------------------------------------

inline uint32_t lookup(uint32_t table, uint32_t a, uint32_t b, uint32_t c) {
  auto row = [&](int i) { return 0u - (table >> i & 1); };  // all ones if the table's bit is set
  uint32_t with_a = (b & ((c & row(7)) | (~c & row(6)))) | (~b & ((c & row(5)) | (~c & row(4))));
  uint32_t without_a = (b & ((c & row(3)) | (~c & row(2)))) | (~b & ((c & row(1)) | (~c & row(0))));
  return (a & with_a) | (~a & without_a);
}

struct And2 {
  static uint32_t apply(const Inst&, uint32_t a, uint32_t b, uint32_t) { return a & b; }
};
struct Or2 {
  static uint32_t apply(const Inst&, uint32_t a, uint32_t b, uint32_t) { return a | b; }
};
struct Xor2 {
  static uint32_t apply(const Inst&, uint32_t a, uint32_t b, uint32_t) { return a ^ b; }
};
struct Logic3 {
  static uint32_t apply(const Inst& in, uint32_t a, uint32_t b, uint32_t c) { return lookup(in.imm, a, b, c); }
};

void run_lop3_predicate(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]), c = w.values(in.src[2]);
  alignas(64) uint32_t out[kLanes];
  uint32_t nonzero = 0;
  for (int l = 0; l < kLanes; l++) {
    out[l] = lookup(in.imm, a[l], b[l], c[l]);
    nonzero |= static_cast<uint32_t>(out[l] != 0) << l;
  }
  uint32_t p = w.predicate(in.psrc[0]);
  store_row(w, in.dst, out, mask);
  store_predicate(w, in.pdst[0], in.flags ? nonzero & p : nonzero | p, mask);
}

void bind_lop3(Binder& b) {
  Inst& in = b.inst;
  b.ignore({"LUT"});
  in.flags = b.take("PAND");
  b.optional_predicate_destination(0);
  b.destination();
  for (int i = 0; i < 3; i++) b.source(i);
  in.imm = b.immediate();
  if (b.more()) b.predicate_source(0);
  if (in.pdst[0] != kScratchPredicate) {
    in.run = run_lop3_predicate;
  } else if (in.imm == 0xc0) {
    in.run = pick_elementwise<And2, 2>(in);
  } else if (in.imm == 0xfc) {
    in.run = pick_elementwise<Or2, 2>(in);
  } else if (in.imm == 0x3c) {
    in.run = pick_elementwise<Xor2, 2>(in);
  } else {
    in.run = pick_elementwise<Logic3, 3>(in);
  }
}

void run_plop3(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  uint32_t a = w.predicate(in.psrc[0]), b = w.predicate(in.psrc[1]), c = w.predicate(in.psrc[2]);
  uint32_t first = lookup(in.imm & 0xff, a, b, c), second = lookup(in.imm >> 8, a, b, c);
  store_predicate(w, in.pdst[0], first, mask);
  store_predicate(w, in.pdst[1], second, mask);
}

void bind_plop3(Binder& b) {
  b.ignore({"LUT"});
  b.predicate_destination(0);
  b.predicate_destination(1);
  for (int i = 0; i < 3; i++) b.predicate_source(i);
  uint32_t first = b.immediate(), second = b.immediate();
  b.inst.imm = (first & 0xff) | second << 8;
  b.inst.run = run_plop3;
}

// ---- comparison ------------------------------------------------------------------------------------------

enum Compare : uint8_t { kFalse, kLT, kEQ, kLE, kGT, kNE, kGE, kTrue };
enum SetpFlags : uint8_t { kOr = 1, kXor = 2, kUnsigned = 4, kEx = 8 };

void run_isetp(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const Values a = w.values(in.src[0]), b = w.values(in.src[1]);
  uint32_t bias = in.flags & kUnsigned ? 0 : 0x80000000u;
  uint32_t less = 0, equal = 0;
  for (int l = 0; l < kLanes; l++) {
    uint32_t x = a[l] ^ bias, y = b[l] ^ bias;
    less |= static_cast<uint32_t>(x < y) << l;
    equal |= static_cast<uint32_t>(x == y) << l;
  }
  uint32_t greater = ~(less | equal), r = 0;
  if (in.flags & kEx) {  // the upper words of a 64-bit comparison; the predicate is the lower words' result
    uint32_t lower = w.predicate(in.psrc[1]);
    switch (in.kind) {
      case kEQ:
        r = equal & lower;
        break;
      case kNE:
        r = ~equal | lower;
        break;
      case kLT:
      case kLE:
        r = less | (equal & lower);
        break;
      case kGT:
      case kGE:
        r = greater | (equal & lower);
        break;
      case kTrue:
        r = kAllLanes;
        break;
    }
  } else {
    if (in.kind & kLT) r |= less;
    if (in.kind & kEQ) r |= equal;
    if (in.kind & kGT) r |= greater;
  }
  uint32_t p = w.predicate(in.psrc[0]);
  auto combine = [&](uint32_t x) { return in.flags & kOr ? x | p : in.flags & kXor ? x ^ p : x & p; };
  store_predicate(w, in.pdst[0], combine(r), mask);
  store_predicate(w, in.pdst[1], combine(~r), mask);
}

void bind_isetp(Binder& b) {
  Inst& in = b.inst;
  int compare = b.take_one({"F", "LT", "EQ", "LE", "GT", "NE", "GE", "T"});
  if (compare < 0) throw Unsupported("comparison");
  in.kind = static_cast<uint8_t>(compare);
  int combine = b.take_one({"AND", "OR", "XOR"});
  if (combine < 0) throw Unsupported("combination");
  in.flags = static_cast<uint8_t>(combine);
  if (b.take("U32")) in.flags |= kUnsigned;
  if (b.take("EX")) in.flags |= kEx;
  b.predicate_destination(0);
  b.predicate_destination(1);
  b.source(0);
  b.source(1);
  b.predicate_source(0);
  if (in.flags & kEx) b.predicate_source(1);
  in.run = run_isetp;
}

// ---- bits ------------------------------------------------------------------------------------------------

struct AbsoluteInt {
  static uint32_t apply(const Inst&, uint32_t a, uint32_t, uint32_t) {
    return static_cast<int32_t>(a) < 0 ? 0u - a : a;
  }
};
struct PopulationCount {
  static uint32_t apply(const Inst&, uint32_t a, uint32_t, uint32_t) {
    return static_cast<uint32_t>(__builtin_popcount(a));
  }
};
struct ReverseBits {
  static uint32_t apply(const Inst&, uint32_t a, uint32_t, uint32_t) {
    a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
    a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
    a = (a >> 4 & 0x0f0f0f0fu) | (a & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(a);
  }
};
// Position of the leading one; flags: 1 signed (leading bit that differs from the sign), 2 as a shift distance.
struct FindLeadingOne {
  static uint32_t apply(const Inst& in, uint32_t a, uint32_t, uint32_t) {
    if ((in.flags & 1) && static_cast<int32_t>(a) < 0) a = ~a;
    if (a == 0) return 0xffffffffu;
    uint32_t zeros = static_cast<uint32_t>(__builtin_clz(a));
    return in.flags & 2 ? zeros : 31 - zeros;
  }
};
struct Permute {  // bytes of c:a chosen by the nibbles of b; bit 3 of a nibble spreads the sign
  static uint32_t apply(const Inst&, uint32_t a, uint32_t b, uint32_t c) {
    uint64_t bytes = pair(a, c);
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
      uint32_t pick = b >> (4 * i) & 15;
      uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (pick & 7))) & 255;
      if (pick & 8) byte = byte & 128 ? 255 : 0;
      r |= byte << (8 * i);
    }
    return r;
  }
};
struct SignExtend {  // flags: 1 zero-extend, 2 wrap the width
  static uint32_t apply(const Inst& in, uint32_t a, uint32_t bits, uint32_t) {
    if (in.flags & 2) bits &= 31;
    if (bits >= 32) return a;
    if (bits == 0) return 0;
    uint32_t up = a << (32 - bits);
    return in.flags & 1 ? up >> (32 - bits) : static_cast<uint32_t>(static_cast<int32_t>(up) >> (32 - bits));
  }
};
struct BitMask {  // `count` ones from bit `first` on; flags: 2 wrap both
  static uint32_t apply(const Inst& in, uint32_t first, uint32_t count, uint32_t) {
    if (in.flags & 2) {
      first &= 31;
      count &= 31;
    }
    uint32_t ones = count >= 32 ? 0xffffffffu : (1u << count) - 1;
    return first >= 32 ? 0 : ones << first;
  }
};
struct DotTwo {  // dp2a: two 16-bit values times the lower or (flags: 1) upper two of four bytes, plus c; all unsigned
  static uint32_t apply(const Inst& in, uint32_t a, uint32_t b, uint32_t c) {
    b >>= in.flags ? 16 : 0;
    return c + (a & 0xffff) * (b & 0xff) + (a >> 16) * (b >> 8 & 0xff);
  }
};
struct AbsoluteDifference {  // |a - b| + c; flags: unsigned
  static uint32_t apply(const Inst& in, uint32_t a, uint32_t b, uint32_t c) {
    bool less = in.flags ? a < b : static_cast<int32_t>(a) < static_cast<int32_t>(b);
    return (less ? b - a : a - b) + c;
  }
};

template <class Op>
void bind_unary(Binder& b) {
  b.destination();
  b.source(0);
  b.inst.run = pick_elementwise<Op, 1>(b.inst);
}

// kind: byte of the register that holds the predicates.
void run_p2r(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t *keep = w.row(in.src[0]), *select = w.row(in.src[1]);
  alignas(64) uint32_t out[kLanes];
  for (int l = 0; l < kLanes; l++) {
    uint32_t bits = 0;
    for (int p = 0; p < kTruePredicate; p++) bits |= (w.pred[p] >> l & 1) << p;
    uint32_t chosen = (select[l] & 0x7f) << (8 * in.kind);
    out[l] = (keep[l] & ~chosen) | ((bits << (8 * in.kind)) & chosen);
  }
  store_row(w, in.dst, out, mask);
}

void run_r2p(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  const uint32_t *from = w.row(in.src[0]), *select = w.row(in.src[1]);
  for (int p = 0; p < kTruePredicate; p++) {
    uint32_t bits = 0, chosen = 0;
    for (int l = 0; l < kLanes; l++) {
      bits |= (from[l] >> (8 * in.kind + p) & 1) << l;
      chosen |= (select[l] >> p & 1) << l;
    }
    store_predicate(w, p, bits, mask & chosen);
  }
}

uint8_t byte_number(const std::string& suffix) {
  if (suffix.empty() || suffix == "B0") return 0;
  if (suffix == "B1") return 1;
  if (suffix == "B2") return 2;
  if (suffix == "B3") return 3;
  throw Unsupported("byte ." + suffix);
}

void bind_p2r(Binder& b) {
  int byte = b.take_one({"B0", "B1", "B2", "B3"});
  b.inst.kind = static_cast<uint8_t>(std::max(byte, 0));
  b.destination();
  if (b.next().text != "PR") throw Unsupported("source of P2R");
  b.source(0);
  b.source(1);
  b.inst.run = run_p2r;
}

void bind_r2p(Binder& b) {
  if (b.next().text != "PR") throw Unsupported("destination of R2P");
  const Operand& from = b.next();
  if (from.kind != Operand::Kind::Register) throw Unsupported("operand " + from.text);
  b.inst.kind = byte_number(from.suffix);
  b.inst.src[0] = b.register_source(from.index);
  b.source(1);
  b.inst.run = run_r2p;
}

}  // namespace

bool bind_integer(Binder& b) {
  const std::string& op = b.opcode;
  Inst& in = b.inst;
  if (op == "IMAD") {
    bind_imad(b);
  } else if (op == "IADD3") {
    bind_iadd3(b);
  } else if (op == "MOV" || op == "MOV32I") {
    b.destination();
    b.source(0);
    in.run = pick_elementwise<Move, 1>(in);
  } else if (op == "HFMA2") {
    bind_half_move(b);
  } else if (op == "SEL") {
    b.destination();
    b.source(0);
    b.source(1);
    b.predicate_source(0);
    in.run = run_select;
  } else if (op == "IMNMX") {
    in.flags = b.take("U32");
    b.destination();
    b.source(0);
    b.source(1);
    b.predicate_source(0);
    in.run = run_imnmx;
  } else if (op == "SHF") {
    bind_shf(b);
  } else if (op == "LEA") {
    bind_lea(b);
  } else if (op == "LOP3") {
    bind_lop3(b);
  } else if (op == "PLOP3") {
    bind_plop3(b);
  } else if (op == "ISETP") {
    bind_isetp(b);
  } else if (op == "IABS") {
    bind_unary<AbsoluteInt>(b);
  } else if (op == "POPC") {
    bind_unary<PopulationCount>(b);
  } else if (op == "BREV") {
    bind_unary<ReverseBits>(b);
  } else if (op == "FLO") {
    in.flags = b.take("U32") ? 0 : 1;
    if (b.take("SH")) in.flags |= 2;
    b.destination();
    b.optional_predicate_destination(0);
    if (in.pdst[0] != kScratchPredicate) throw Unsupported("predicate of FLO");
    b.source(0);
    in.run = pick_elementwise<FindLeadingOne, 1>(in);
  } else if (op == "PRMT") {
    b.destination();
    for (int i = 0; i < 3; i++) b.source(i);
    in.run = pick_elementwise<Permute, 3>(in);
  } else if (op == "SGXT" || op == "BMSK") {
    if (op == "SGXT" && b.take("U32")) in.flags |= 1;
    b.ignore({"C"});
    if (b.take("W")) in.flags |= 2;
    b.destination();
    b.source(0);
    b.source(1);
    in.run = op == "SGXT" ? pick_elementwise<SignExtend, 2>(in) : pick_elementwise<BitMask, 2>(in);
  } else if (op == "VABSDIFF") {
    in.flags = b.take("U32");
    b.destination();
    for (int i = 0; i < 3; i++) b.source(i);
    in.run = pick_elementwise<AbsoluteDifference, 3>(in);
  } else if (op == "IDP") {
    if (!b.take("2A")) throw Unsupported("form");
    const int part = b.take_one({"LO", "HI"});
    if (part < 0 || !b.take("U16") || !b.take("U8")) throw Unsupported("types");
    in.flags = static_cast<uint8_t>(part);
    b.destination();
    for (int i = 0; i < 3; i++) b.source(i);
    in.run = pick_elementwise<DotTwo, 3>(in);
  } else if (op == "P2R") {
    bind_p2r(b);
  } else if (op == "R2P") {
    bind_r2p(b);
  } else {
    return false;
  }
  return true;
}

}  // namespace gpu_emulator
