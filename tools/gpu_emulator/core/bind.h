// Binding: from a parsed instruction to an Inst with its handler, rows and flags.
//
// Every opcode has a bind function, which must take every modifier that it understands. Any modifier left over makes
// the instruction unsupported, so nothing is executed on a guess.
#pragma once
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "machine.h"

namespace gpu_emulator {

struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Number { Integer, Float, Double };

class Binder {
 public:
  Binder(const SassInstruction& sass, Inst& inst, Kernel& kernel);

  const SassInstruction& sass;
  const std::string opcode;  // of the handler: IADD3 for UIADD3
  const bool uniform;        // the result belongs to the warp, not to a lane
  Inst& inst;

  // Modifiers.
  bool take(const char* modifier);                         // returns whether it is present, and marks it as understood
  void ignore(std::initializer_list<const char*> names);   // no effect on the result
  int take_one(std::initializer_list<const char*> names);  // index of the first one present, or -1
  void finish() const;                                     // throws if a modifier was not taken

  // Operands, in the order written.
  bool more() const { return next_ < sass.operands.size(); }
  const Operand& peek(size_t ahead = 0) const;
  bool peek_is(Operand::Kind kind, size_t ahead = 0) const;
  const Operand& next();
  void destination();  // register
  void predicate_destination(int slot);
  void optional_predicate_destination(int slot);
  void source(int slot, Number number = Number::Integer);
  void wide_source(int slot, Number number = Number::Integer);  // 64 bits in slot and slot + 1
  bool negatable_wide_source(int slot);  // an integer; true: both words are inverted, and 1 is still to be added
  void predicate_source(int slot);
  void address();  // src[0], offset; src[1]: the upper word if 64-bit, else a uniform register to be added
  uint32_t immediate();
  uint32_t branch_target();

  Source register_source(int index) const;
  Source pool_source(const PoolEntry& entry);
  Kernel& kernel() { return kernel_; }

 private:
  void apply_modifiers(Source& s, const Operand& o, Number number) const;
  Kernel& kernel_;
  std::vector<bool> taken_;
  size_t next_ = 0;
};

// Bind functions by opcode family. Each returns false for other opcodes.
bool bind_integer(Binder& b);
bool bind_float(Binder& b);
bool bind_double(Binder& b);
bool bind_convert(Binder& b);
bool bind_control(Binder& b);
bool bind_warp(Binder& b);
bool bind_memory(Binder& b);
bool bind_atomic(Binder& b);
bool bind_copy(Binder& b);
bool bind_tensor(Binder& b);

// Decodes a whole kernel.
std::unique_ptr<Kernel> bind_kernel(const std::string& disassembly, int arch);

// Elementwise helpers for handlers -------------------------------------------------------------------------

// Handler for dst = op(a, b, c), vectorised over the lanes.
template <class Op, int sources, bool plain>
void elementwise(Machine&, Warp& w, const Inst& in, uint32_t mask) {
  constexpr int second = sources > 1 ? 1 : 0, third = sources > 2 ? 2 : 0;
  alignas(64) uint32_t out[kLanes];
  if constexpr (plain) {
    const uint32_t *a = w.row(in.src[0]), *b = w.row(in.src[second]), *c = w.row(in.src[third]);
    for (int l = 0; l < kLanes; l++) out[l] = Op::apply(in, a[l], b[l], c[l]);
  } else {
    const Values a = w.values(in.src[0]), b = w.values(in.src[second]), c = w.values(in.src[third]);
    for (int l = 0; l < kLanes; l++) out[l] = Op::apply(in, a[l], b[l], c[l]);
  }
  store_row(w, in.dst, out, mask);
}

template <class Op, int sources>
Handler pick_elementwise(const Inst& in) {
  bool plain = true;
  for (int i = 0; i < sources; i++) plain = plain && in.src[i].plain();
  return plain ? elementwise<Op, sources, true> : elementwise<Op, sources, false>;
}

}  // namespace gpu_emulator
