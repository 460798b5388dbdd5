// The output of `nvdisasm -b` as a data structure. Nothing here executes.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpu_emulator {

constexpr int kZeroRegister = 255;  // RZ
constexpr int kTruePredicate = 7;   // PT
// Numbers of registers and predicates shared by a warp: UR4 is register kUniformRegister + 4, UP0 is predicate
// kUniformPredicate. URZ is RZ and UPT is PT, which have the same values.
constexpr int kUniformRegister = 260;
constexpr int kUniformRegisters = 64;
constexpr int kUniformPredicate = 9;
constexpr int kUniformPredicates = 7;
constexpr uint32_t kInstructionBytes = 16;

struct Operand {
  enum class Kind { Register, Predicate, Constant, Immediate, Memory, Barrier, Special };
  Kind kind = Kind::Immediate;
  int index = kZeroRegister;    // register, predicate or convergence barrier; base register of an address
  bool negate = false;          // -x
  bool invert = false;          // ~x
  bool absolute = false;        // |x|
  bool complement = false;      // !P
  int bank = 0;                 // c[bank][index_register + offset]
  int64_t offset = 0;           // constant offset or address displacement
  int uniform = kZeroRegister;  // uniform register that is added to an address
  bool indexed = false;         // c[bank][Rn + offset] rather than c[bank][offset]
  bool is_float = false;        // immediate written as a decimal float
  double number = 0;            // its value, when is_float
  uint32_t bits = 0;            // its bits otherwise
  std::string suffix;           // .64, .U32, .H0_H0 ... (without .reuse, which has no effect)
  std::string text;

  bool moves() const { return indexed || uniform != kZeroRegister; }  // an address that depends on a register
};

struct SassInstruction {
  uint32_t pc = 0;
  int guard = kTruePredicate;  // @P0
  bool guard_negated = false;  // @!P0
  std::string opcode;          // FFMA
  std::vector<std::string> modifiers;
  std::string mnemonic;  // FFMA.FTZ
  std::vector<Operand> operands;
  std::string text;  // everything after the address
};

struct ParseError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Instructions in address order; instruction i is at address 16 * i.
std::vector<SassInstruction> parse_sass(const std::string& text);

}  // namespace gpu_emulator
