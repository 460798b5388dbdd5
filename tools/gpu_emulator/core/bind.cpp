#include "bind.h"

#include <cstring>
#include <map>

namespace gpu_emulator {
namespace {

// Opcodes of the uniform datapath, and the per-lane opcodes with the same operation.
const std::map<std::string, std::string> kUniformOpcodes = {
    {"UBMSK", "BMSK"},   {"UBREV", "BREV"}, {"UFLO", "FLO"},   {"UIADD3", "IADD3"}, {"UIMAD", "IMAD"},
    {"UISETP", "ISETP"}, {"ULDC", "LDC"},   {"ULEA", "LEA"},   {"ULOP3", "LOP3"},   {"UMOV", "MOV"},
    {"UPLOP3", "PLOP3"}, {"UPOPC", "POPC"}, {"UPRMT", "PRMT"}, {"USEL", "SEL"},     {"USGXT", "SGXT"},
    {"USHF", "SHF"},     {"S2UR", "S2R"}};

std::string handled_as(const std::string& opcode) {
  const auto found = kUniformOpcodes.find(opcode);
  return found == kUniformOpcodes.end() ? opcode : found->second;
}

// All sources of a uniform instruction are uniform, so the result holds for every lane, also for inactive ones.
void run_for_all_lanes(Machine& m, Warp& w, const Inst& in, uint32_t) {
  in.for_all_lanes(m, w, in, kAllLanes);
}

}  // namespace

Binder::Binder(const SassInstruction& s, Inst& i, Kernel& kernel)
    : sass(s),
      opcode(handled_as(s.opcode)),
      uniform(opcode != s.opcode),
      inst(i),
      kernel_(kernel),
      taken_(s.modifiers.size(), false) {}

bool Binder::take(const char* modifier) {
  bool found = false;
  for (size_t i = 0; i < taken_.size(); i++) {
    if (sass.modifiers[i] == modifier) taken_[i] = found = true;
  }
  return found;
}

void Binder::ignore(std::initializer_list<const char*> names) {
  for (const char* n : names) take(n);
}

int Binder::take_one(std::initializer_list<const char*> names) {
  int i = 0;
  for (const char* n : names) {
    if (take(n)) return i;
    i++;
  }
  return -1;
}

void Binder::finish() const {
  for (size_t i = 0; i < taken_.size(); i++)
    if (!taken_[i]) throw Unsupported("modifier ." + sass.modifiers[i]);
  if (more()) throw Unsupported("operand " + peek().text);
}

const Operand& Binder::peek(size_t ahead) const {
  if (next_ + ahead >= sass.operands.size()) throw Unsupported("an operand is missing");
  return sass.operands[next_ + ahead];
}

bool Binder::peek_is(Operand::Kind kind, size_t ahead) const {
  return next_ + ahead < sass.operands.size() && sass.operands[next_ + ahead].kind == kind;
}

const Operand& Binder::next() {
  const Operand& o = peek();
  next_++;
  return o;
}

void Binder::destination() {
  const Operand& o = next();
  if (o.kind != Operand::Kind::Register || !o.suffix.empty()) throw Unsupported("destination " + o.text);
  inst.dst = static_cast<uint16_t>(o.index == kZeroRegister ? kScratchRow : o.index);
}

void Binder::predicate_destination(int slot) {
  const Operand& o = next();
  if (o.kind != Operand::Kind::Predicate || o.complement) throw Unsupported("predicate destination " + o.text);
  inst.pdst[slot] = static_cast<uint8_t>(o.index == kTruePredicate ? kScratchPredicate : o.index);
}

void Binder::optional_predicate_destination(int slot) {
  if (peek_is(Operand::Kind::Predicate)) predicate_destination(slot);
}

Source Binder::register_source(int index) const {
  Source s;
  s.row = static_cast<uint16_t>(index);
  return s;
}

Source Binder::pool_source(const PoolEntry& entry) {
  // The two words of a 64-bit operand need not be neighbours: each has its own row.
  auto& pool = kernel_.pool;
  size_t i = 0;
  while (i < pool.size() && !(pool[i] == entry)) i++;
  if (i == pool.size()) pool.push_back(entry);
  Source s;
  s.pooled = 1;
  s.row = static_cast<uint16_t>(i);
  return s;
}

void Binder::apply_modifiers(Source& s, const Operand& o, Number number) const {
  if (!o.suffix.empty() || o.complement) throw Unsupported("operand " + o.text);
  if (number == Number::Integer) {
    if (o.absolute) throw Unsupported("operand " + o.text);
    if (o.negate) s.mods |= Source::kNegateInteger;
    if (o.invert) s.mods |= Source::kInvert;
  } else {
    if (o.invert) throw Unsupported("operand " + o.text);
    if (o.absolute) s.mods |= Source::kAbsolute;
    if (o.negate) s.mods |= Source::kNegateFloat;
  }
}

void Binder::source(int slot, Number number) {
  const Operand& o = next();
  Source s;
  if (o.kind == Operand::Kind::Register) {
    s = register_source(o.index);
  } else if (o.kind == Operand::Kind::Constant) {
    if (o.moves()) throw Unsupported("indexed constant " + o.text);
    s = pool_source({true, o.bank, static_cast<uint32_t>(o.offset)});
  } else if (o.kind == Operand::Kind::Immediate) {
    s = pool_source({false, 0, o.is_float ? as_bits(static_cast<float>(o.number)) : o.bits});
  } else {
    throw Unsupported("operand " + o.text);
  }
  apply_modifiers(s, o, number);
  inst.src[slot] = s;
}

void Binder::wide_source(int slot, Number number) {
  const Operand& o = next();
  Source low, high;
  if (o.kind == Operand::Kind::Register) {
    low = register_source(o.index);
    high = register_source(o.index == kZeroRegister ? kZeroRegister : o.index + 1);
  } else if (o.kind == Operand::Kind::Constant) {
    if (o.moves()) throw Unsupported("indexed constant " + o.text);
    low = pool_source({true, o.bank, static_cast<uint32_t>(o.offset)});
    high = pool_source({true, o.bank, static_cast<uint32_t>(o.offset) + 4});
  } else if (o.kind == Operand::Kind::Immediate) {
    uint64_t bits;
    if (number == Number::Double) {
      // A double immediate holds only the upper word.
      bits = o.is_float ? as_bits64(o.number) : static_cast<uint64_t>(o.bits) << 32;
    } else {
      bits = o.bits;  // the opcode handles sign extension
    }
    low = pool_source({false, 0, static_cast<uint32_t>(bits)});
    high = pool_source({false, 0, static_cast<uint32_t>(bits >> 32)});
  } else {
    throw Unsupported("operand " + o.text);
  }
  if (number == Number::Double) {
    apply_modifiers(high, o, number);
  } else if (o.negate || o.invert || o.absolute || !o.suffix.empty()) {
    throw Unsupported("operand " + o.text);
  }
  inst.src[slot] = low;
  inst.src[slot + 1] = high;
}

bool Binder::negatable_wide_source(int slot) {
  const Operand& o = peek();
  if (o.kind != Operand::Kind::Register || !o.negate || o.invert || o.absolute || !o.suffix.empty()) {
    wide_source(slot);
    return false;
  }
  next();
  inst.src[slot] = register_source(o.index);
  inst.src[slot + 1] = register_source(o.index == kZeroRegister ? kZeroRegister : o.index + 1);
  for (int word = slot; word <= slot + 1; word++) inst.src[word].mods |= Source::kInvert;
  return true;
}

void Binder::predicate_source(int slot) {
  const Operand& o = next();
  if (o.kind != Operand::Kind::Predicate) throw Unsupported("predicate " + o.text);
  inst.psrc[slot] = {static_cast<uint8_t>(o.index), o.complement ? 0xffffffffu : 0u};
}

void Binder::address() {
  const Operand& o = next();
  if (o.kind != Operand::Kind::Memory) throw Unsupported("address " + o.text);
  const bool of_window = !inst.wide_address;
  if (o.suffix == "U32") inst.wide_address = false;
  static const std::map<std::string, uint8_t> shifts = {{"X4", 2}, {"X8", 3}, {"X16", 4}};
  if (const auto scale = shifts.find(o.suffix); scale != shifts.end() && of_window) {
    inst.scale_shift = scale->second;
  } else if (!o.suffix.empty() && o.suffix != "64" && o.suffix != "U32") {
    throw Unsupported("address " + o.text);
  }
  inst.src[0] = register_source(o.index);
  if (of_window) {
    inst.src[1] = register_source(o.uniform);
  } else {
    if (o.uniform != kZeroRegister) throw Unsupported("address " + o.text);
    inst.src[1] = register_source(inst.wide_address && o.index != kZeroRegister ? o.index + 1 : kZeroRegister);
  }
  inst.offset = o.offset;
}

uint32_t Binder::immediate() {
  const Operand& o = next();
  if (o.kind != Operand::Kind::Immediate || o.is_float) throw Unsupported("immediate " + o.text);
  return o.bits;
}

uint32_t Binder::branch_target() {
  const Operand& o = next();
  if (o.kind != Operand::Kind::Immediate || o.is_float || o.bits % kInstructionBytes)
    throw Unsupported("target " + o.text);
  return o.bits / kInstructionBytes;
}

namespace {

void run_unsupported(Machine& m, Warp&, const Inst& in, uint32_t) {
  Fault f;
  f.kind = FaultKind::Unsupported;
  f.message = "instruction not supported: " + m.kernel.unsupported[in.index];
  throw f;
}

void bind_one(const SassInstruction& sass, Inst& in, Kernel& kernel, std::string& problem) {
  in.guard = static_cast<uint8_t>(sass.guard);
  in.guard_flip = sass.guard_negated ? 0xffffffffu : 0u;
  in.index = sass.pc / kInstructionBytes;
  Inst clean = in;
  try {
    Binder b(sass, in, kernel);
    bool known = bind_float(b) || bind_integer(b) || bind_memory(b) || bind_control(b) || bind_warp(b) ||
                 bind_convert(b) || bind_double(b) || bind_atomic(b) || bind_copy(b) || bind_tensor(b);
    if (!known) throw Unsupported("opcode " + sass.opcode);
    b.finish();
    if (b.uniform) {
      in.for_all_lanes = in.run;
      in.run = run_for_all_lanes;
    }
    return;
  } catch (const Unsupported& e) {
    problem = sass.text + "  (" + e.what() + ")";
  }
  in = clean;
  in.run = run_unsupported;
}

}  // namespace

std::unique_ptr<Kernel> bind_kernel(const std::string& disassembly, int arch) {
  auto kernel = std::make_unique<Kernel>();
  kernel->arch = arch;
  kernel->sass = parse_sass(disassembly);
  kernel->code.resize(kernel->sass.size());
  kernel->unsupported.resize(kernel->sass.size());
  for (size_t i = 0; i < kernel->sass.size(); i++)
    bind_one(kernel->sass[i], kernel->code[i], *kernel, kernel->unsupported[i]);
  return kernel;
}

}  // namespace gpu_emulator
