// Tensor cores with FP32 accumulators: HMMA.884 of sm_70, HMMA.1684, 1688 and 16816 of sm_80.
#include <algorithm>

#include "bind.h"
#include "tensor_sum.h"

namespace gpu_emulator {
namespace {

constexpr int kHalfBits = 11, kBfloatBits = 8, kTf32Bits = 11;  // significand of a factor

// mma.sync.m8n8k4 is four HMMA steps. A warp holds four independent products of 8 x 4 by 4 x 8, one per pair of quads:
// lanes 4q to 4q + 3 and 16 + 4q to 16 + 4q + 3 are the eight members of pair q.
constexpr int kQuadPairs = 4, kMembers = 8, kDepth = 4;

int lane_of(int quad_pair, int member) {
  return 4 * quad_pair + (member & 3) + (member >= 4 ? 16 : 0);
}

enum Hmma884Flags : uint8_t { kAByColumns = 1, kBByRows = 2 };

// One operand of a quad pair: eight rows of A, or eight columns of B, of four halves each. A member holds four halves
// in two registers: a whole row (column), or, if the operand is stored the other way, entry (member & 3) of the four
// rows (columns) of its quad. A step needs only half of the rows (columns): those with (line & bit) == value.
void read_operand(const uint32_t* low, const uint32_t* high, int quad_pair, bool across, int bit, int value,
                  TensorNumber (&out)[kMembers][kDepth]) {
  for (int member = 0; member < kMembers; member++) {
    const int lane = lane_of(quad_pair, member);
    const uint32_t bits[kDepth] = {low[lane], low[lane] >> 16, high[lane], high[lane] >> 16};
    for (int i = 0; i < kDepth; i++) {
      const int line = across ? i + (member & 4) : member;
      if ((line & bit) == value) out[line][across ? member & 3 : i] = tensor_number<kHalfBits>(half_value(bits[i]));
    }
  }
}

// Whether all halves of both operands are zero.
bool is_zero(const Warp& w, const Inst& in) {
  uint32_t any = 0;
  for (int slot = 0; slot < 4; slot++) {
    const uint32_t* row = w.row(in.src[slot]);
    for (int l = 0; l < kLanes; l++) any |= row[l];
  }
  return !(any & 0x7fff7fffu);
}

// kind: the step. It writes accumulators 2 step and 2 step + 1 of the eight that a lane has in the PTX manual.
void run_hmma_884(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  require_all_lanes(m, in, mask);
  const uint32_t* addend[2] = {w.row(in.src[4]), w.row(in.src[5])};
  alignas(64) uint32_t out[2][kLanes];
  if (is_zero(w, in)) {  // shortcut for the zero tensors on which costs are counted
    for (int j = 0; j < 2; j++)
      for (int l = 0; l < kLanes; l++) out[j][l] = addend[j][l] << 1 ? addend[j][l] : 0;
    store_row(w, in.dst, out[0], mask);
    store_row(w, in.dst + 1, out[1], mask);
    return;
  }
  for (int quad_pair = 0; quad_pair < kQuadPairs; quad_pair++) {
    TensorNumber a[kMembers][kDepth], b[kMembers][kDepth];
    read_operand(w.row(in.src[0]), w.row(in.src[1]), quad_pair, in.flags & kAByColumns, 2, in.kind << 1 & 2, a);
    read_operand(w.row(in.src[2]), w.row(in.src[3]), quad_pair, in.flags & kBByRows, 4, in.kind << 1 & 4, b);
    for (int member = 0; member < kMembers; member++) {
      const int lane = lane_of(quad_pair, member);
      for (int j = 0; j < 2; j++) {
        const int i = 2 * in.kind + j;
        const int row = (lane & 1) + (i & 2) + (member & 4), column = (i & 4) + (lane & 2) + (i & 1);
        out[j][lane] = as_bits(tensor_sum<kVoltaFp16, kHalfBits, kDepth>(a[row], b[column], as_float(addend[j][lane])));
      }
    }
  }
  store_row(w, in.dst, out[0], mask);
  store_row(w, in.dst + 1, out[1], mask);  // RZ is followed by scratch rows
}

// A pair of registers; RZ is a pair of zeros.
void pair_source(Binder& b, int slot, const Operand& o) {
  if (o.kind != Operand::Kind::Register || o.negate || o.absolute || o.invert) throw Unsupported("operand " + o.text);
  b.inst.src[slot] = b.register_source(o.index);
  b.inst.src[slot + 1] = b.register_source(o.index == kZeroRegister ? o.index : o.index + 1);
}

// HMMA.884.F32.F32.STEP0 R8, R2.ROW, R4.COL, R8: types of the result and of the addend, layouts of A and B.
void bind_hmma_884(Binder& b) {
  Inst& in = b.inst;
  const auto& modifiers = b.sass.modifiers;
  if (std::count(modifiers.begin(), modifiers.end(), "F32") != 2) throw Unsupported("accumulators other than F32");
  b.ignore({"F32"});
  const int step = b.take_one({"STEP0", "STEP1", "STEP2", "STEP3"});
  if (step < 0) throw Unsupported("step");
  in.kind = static_cast<uint8_t>(step);
  b.destination();
  const Operand &left = b.next(), &right = b.next(), &addend = b.next();
  if (left.suffix != "ROW" && left.suffix != "COL") throw Unsupported("operand " + left.text);
  if (right.suffix != "ROW" && right.suffix != "COL") throw Unsupported("operand " + right.text);
  if (!addend.suffix.empty()) throw Unsupported("operand " + addend.text);
  if (left.suffix == "COL") in.flags |= kAByColumns;
  if (right.suffix == "ROW") in.flags |= kBByRows;
  pair_source(b, 0, left);
  pair_source(b, 2, right);
  pair_source(b, 4, addend);
  in.run = run_hmma_884;
}

// ---- 16 x k by k x 8 -------------------------------------------------------------------------------------

// Layout of factors in a register, and rounding of their sums.
struct Fp16 {
  static constexpr int per_register = 2, bits = kHalfBits;
  static constexpr TensorRounding rounding = kAmpere16Bit;
  static float value(uint32_t word, int i) { return half_value(word >> (16 * i)); }
};
struct Bf16 {
  static constexpr int per_register = 2, bits = kBfloatBits;
  static constexpr TensorRounding rounding = kAmpere16Bit;
  static float value(uint32_t word, int i) { return as_float(i ? word & 0xffff0000u : word << 16); }
};
struct Tf32 {  // ignores the lower 13 bits of the float
  static constexpr int per_register = 1, bits = kTf32Bits;
  static constexpr TensorRounding rounding = kAmpereTf32;
  static float value(uint32_t word, int) { return as_float(word & ~0x1fffu); }
};

constexpr int kRows = 16, kColumns = 8;

// Four lanes share a row of A and of the result, or a column of B. Each register holds neighbouring factors; registers
// of A alternate between row r and row r + 8, and every second one (every one of B) is one piece of the depth further.
template <class Type, int pieces>
void run_hmma_16(Machine& m, Warp& w, const Inst& in, uint32_t mask) {
  require_all_lanes(m, in, mask);
  constexpr int piece = 4 * Type::per_register, depth = pieces * piece;
  auto row_of = [&](int slot, int i) {
    return w.row(in.src[slot]) + (in.src[slot].row == kZeroRegister ? 0 : i * kLanes);
  };
  TensorNumber a[kRows][depth], b[kColumns][depth];
  for (int lane = 0; lane < kLanes; lane++) {
    for (int p = 0; p < pieces; p++) {
      for (int i = 0; i < Type::per_register; i++) {
        const int k = p * piece + lane % 4 * Type::per_register + i;
        for (int half = 0; half < 2; half++)
          a[lane / 4 + 8 * half][k] = tensor_number<Type::bits>(Type::value(row_of(0, 2 * p + half)[lane], i));
        b[lane / 4][k] = tensor_number<Type::bits>(Type::value(row_of(1, p)[lane], i));
      }
    }
  }
  alignas(64) uint32_t out[4][kLanes];
  for (int i = 0; i < 4; i++) {
    const uint32_t* addend = row_of(2, i);
    for (int lane = 0; lane < kLanes; lane++) {
      const int row = lane / 4 + (i & 2) * 4, column = lane % 4 * 2 + (i & 1);
      out[i][lane] = as_bits(tensor_sum<Type::rounding, Type::bits, depth>(a[row], b[column], as_float(addend[lane])));
    }
  }
  for (int i = 0; i < 4; i++) store_row(w, in.dst + i, out[i], mask);
}

// HMMA.16816.F32 R12, R12, R16, R4; with .BF16 or .TF32 for factors of these types.
void bind_hmma_16(Binder& b, int shape) {
  Inst& in = b.inst;
  if (!b.take("F32")) throw Unsupported("accumulators other than F32");
  if (b.take("TF32")) {
    if (shape == 16816) throw Unsupported("shape");
    in.run = shape == 1684 ? run_hmma_16<Tf32, 1> : run_hmma_16<Tf32, 2>;
  } else {
    if (shape == 1684) throw Unsupported("shape");
    const bool twice = shape == 16816;
    if (b.take("BF16")) {
      in.run = twice ? run_hmma_16<Bf16, 2> : run_hmma_16<Bf16, 1>;
    } else {
      in.run = twice ? run_hmma_16<Fp16, 2> : run_hmma_16<Fp16, 1>;
    }
  }
  b.destination();
  for (int slot = 0; slot < 3; slot++) {
    if (!b.peek_is(Operand::Kind::Register)) throw Unsupported("operand " + b.peek().text);
    b.source(slot);
    if (!in.src[slot].plain()) throw Unsupported("modified factor or addend");
  }
}

void bind_hmma(Binder& b) {
  if (b.take("884")) {
    bind_hmma_884(b);
    return;
  }
  static const int shapes[] = {1684, 1688, 16816};
  const int shape = b.take_one({"1684", "1688", "16816"});
  if (shape < 0 || b.kernel().arch < 80 || b.kernel().arch >= 90) throw Unsupported("shape");
  bind_hmma_16(b, shapes[shape]);
}

}  // namespace

bool bind_tensor(Binder& b) {
  if (b.sass.opcode != "HMMA") return false;
  bind_hmma(b);
  return true;
}

}  // namespace gpu_emulator
