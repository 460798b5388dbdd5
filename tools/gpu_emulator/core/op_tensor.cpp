// Tensor cores: HMMA.884 of sm_70 with FP32 accumulators.
#include <algorithm>

#include "bind.h"
#include "tensor_sum.h"

namespace gpu_emulator {
namespace {

constexpr int kHalfBits = 11;  // of a half's significand

// mma.sync.m8n8k4 is four HMMA steps. A warp holds four independent products of 8 x 4 by 4 x 8, one per pair of quads:
// lanes 4q to 4q + 3 and 16 + 4q to 16 + 4q + 3 are the eight members of pair q.
constexpr int kQuadPairs = 4, kMembers = 8, kDepth = 4;

int lane_of(int quad_pair, int member) {
  return 4 * quad_pair + (member & 3) + (member >= 4 ? 16 : 0);
}

enum Hmma884Flags : uint8_t { kAByColumns = 1, kBByRows = 2 };

// One operand of a quad pair: eight rows of A, or eight columns of B, of four halves each. A member holds four halves in
// two registers: a whole row (column), or, where the operand is stored the other way, entry (member & 3) of the four
// rows (columns) of its quad. A step needs half of the rows (columns): those that have `bit` as in `value`.
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

// Whether both operands have no half but zeros.
bool is_zero(const Warp& w, const Inst& in) {
  uint32_t any = 0;
  for (int slot = 0; slot < 4; slot++) {
    const uint32_t* row = w.row(in.src[slot]);
    for (int l = 0; l < kLanes; l++) any |= row[l];
  }
  return !(any & 0x7fff7fffu);
}

// kind: the step. It writes the accumulators 2 step and 2 step + 1 of the eight that a lane has in the PTX manual.
void run_hmma_884(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  if (mask != kAllLanes) {
    Fault f;
    f.kind = FaultKind::Unsupported;
    f.message = "HMMA with inactive lanes";
    throw f;
  }
  const uint32_t* addend[2] = {w.row(in.src[4]), w.row(in.src[5])};
  alignas(64) uint32_t out[2][kLanes];
  if (is_zero(w, in)) {  // as on the empty tensors that costs are counted on
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
  store_row(w, in.dst + 1, out[1], mask);  // behind RZ there is scratch
}

// A pair of registers; RZ is a pair of zeros.
void pair_source(Binder& b, int slot, const Operand& o) {
  if (o.kind != Operand::Kind::Register || o.negate || o.absolute || o.invert) throw Unsupported("operand " + o.text);
  b.inst.src[slot] = b.register_source(o.index);
  b.inst.src[slot + 1] = b.register_source(o.index == kZeroRegister ? o.index : o.index + 1);
}

// HMMA.884.F32.F32.STEP0 R8, R2.ROW, R4.COL, R8: types of the result and of the addend, how A and B lie in the lanes.
void bind_hmma(Binder& b) {
  Inst& in = b.inst;
  if (!b.take("884")) throw Unsupported("shape");
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

}  // namespace

bool bind_tensor(Binder& b) {
  if (b.sass.opcode != "HMMA") return false;
  bind_hmma(b);
  return true;
}

}  // namespace gpu_emulator
