#include "sass.h"

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace gpu_emulator {
namespace {

std::string trim(const std::string& s) {
  const char* blanks = " \t\r\n";
  size_t first = s.find_first_not_of(blanks);
  if (first == std::string::npos) return "";
  return s.substr(first, s.find_last_not_of(blanks) - first + 1);
}

bool starts_with(const std::string& s, const char* prefix) {
  return s.compare(0, strlen(prefix), prefix) == 0;
}

int64_t parse_integer(const std::string& s) {
  bool negative = !s.empty() && s[0] == '-';
  int64_t value = static_cast<int64_t>(strtoull(s.c_str() + negative, nullptr, 0));
  return negative ? -value : value;
}

bool is_digit(char c) {
  return isdigit(static_cast<unsigned char>(c));
}

// Number of a register name "R12", "RZ", "UR4", "URZ"; -1 for other names.
int register_number(const std::string& s) {
  if (s == "RZ" || s == "URZ") return kZeroRegister;
  if (s.size() >= 2 && s[0] == 'R' && is_digit(s[1])) return atoi(s.c_str() + 1);
  if (s.size() >= 3 && starts_with(s, "UR") && is_digit(s[2])) return kUniformRegister + atoi(s.c_str() + 2);
  return -1;
}

// Number of a predicate name "P0", "PT", "UP0", "UPT"; -1 for other names.
int predicate_number(const std::string& s) {
  if (s == "PT" || s == "UPT") return kTruePredicate;
  if (s.size() == 2 && s[0] == 'P' && is_digit(s[1])) return s[1] - '0';
  if (s.size() == 3 && starts_with(s, "UP") && is_digit(s[2])) return kUniformPredicate + s[2] - '0';
  return -1;
}

// "[R9]", "[R9+0x200]", "[R9.64+-0x10]", "[0x10]", "[R9.X4+UR4+0x80]", "c[0x0][UR4]": a base register, perhaps scaled,
// a uniform register and a displacement.
void parse_address(const std::string& inside, Operand& out) {
  size_t begin = 0;
  while (begin < inside.size()) {
    size_t end = inside.find('+', begin);
    std::string part = trim(inside.substr(begin, end == std::string::npos ? end : end - begin));
    std::string name = part.substr(0, part.find('.'));
    int reg = register_number(name);
    if (starts_with(name, "UR") && reg >= 0) {
      if (out.uniform != kZeroRegister || name.size() < part.size()) throw ParseError("address " + out.text);
      out.uniform = reg;
    } else if (reg >= 0) {
      if (out.indexed) throw ParseError("address with two registers: " + out.text);
      out.index = reg;
      out.indexed = true;
      if (name.size() < part.size()) out.suffix = part.substr(name.size() + 1);
    } else if (is_digit(part[0]) || part[0] == '-') {
      out.offset += parse_integer(part);
    } else {
      throw ParseError("address not understood: " + out.text);
    }
    if (end == std::string::npos) break;
    begin = end + 1;
  }
}

void parse_immediate(std::string s, Operand& out) {
  out.kind = Operand::Kind::Immediate;
  bool negative = s[0] == '-';
  if (s[0] == '-' || s[0] == '+') s = s.substr(1);
  if (starts_with(s, "0x") || starts_with(s, "0X")) {
    uint32_t value = static_cast<uint32_t>(strtoul(s.c_str(), nullptr, 16));
    out.bits = negative ? 0u - value : value;
    return;
  }
  double value;
  if (starts_with(s, "INF")) {
    value = std::numeric_limits<double>::infinity();
  } else if (starts_with(s, "QNAN") || starts_with(s, "SNAN")) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else {
    char* end = nullptr;
    value = strtod(s.c_str(), &end);
    if (end == s.c_str()) throw ParseError("operand not understood: " + out.text);
  }
  out.is_float = true;
  out.number = negative ? -value : value;
}

Operand parse_operand(const std::string& raw) {
  Operand out;
  out.text = trim(raw);
  std::string s = out.text;
  if (s.empty()) throw ParseError("empty operand");
  if (s[0] == '[') {
    out.kind = Operand::Kind::Memory;
    parse_address(s.substr(1, s.find(']') - 1), out);
    return out;
  }
  // Prefixes. A minus before a number belongs to the number.
  while (!s.empty() && strchr("-~|!", s[0])) {
    bool number_follows =
        s[0] == '-' && s.size() > 1 && (is_digit(s[1]) || starts_with(s, "-INF") || starts_with(s, "-QNAN"));
    if (number_follows) break;
    if (s[0] == '-') out.negate = true;
    if (s[0] == '~') out.invert = true;
    if (s[0] == '|') out.absolute = true;
    if (s[0] == '!') out.complement = true;
    s = s.substr(1);
  }
  if (out.absolute) {  // the closing bar may be followed by .reuse
    size_t bar = s.find('|');
    if (bar != std::string::npos) s.erase(bar, 1);
  }
  if (starts_with(s, "c[")) {
    out.kind = Operand::Kind::Constant;
    size_t bank_end = s.find(']');
    out.bank = static_cast<int>(parse_integer(s.substr(2, bank_end - 2)));
    size_t inner = s.find('[', bank_end);
    size_t inner_end = s.find(']', inner);
    parse_address(s.substr(inner + 1, inner_end - inner - 1), out);
    if (inner_end + 2 < s.size()) out.suffix = s.substr(inner_end + 2);  // behind a dot
    return out;
  }
  if (starts_with(s, "SR") || s == "PR") {
    out.kind = Operand::Kind::Special;
    out.text = s;
    return out;
  }
  std::string name = s.substr(0, s.find('.'));
  std::string suffix = name.size() < s.size() && !is_digit(s[0]) ? s.substr(name.size() + 1) : "";
  if (int reg = register_number(name); reg >= 0) {
    out.kind = Operand::Kind::Register;
    out.index = reg;
    if (size_t at = suffix.find("reuse"); at != std::string::npos) suffix.erase(at ? at - 1 : 0, 6);  // with its dot
    out.suffix = suffix;
    return out;
  }
  if (int predicate = predicate_number(s); predicate >= 0) {
    out.kind = Operand::Kind::Predicate;
    out.index = predicate;
    return out;
  }
  if (s[0] == 'B' && s.size() >= 2 && is_digit(s[1])) {
    out.kind = Operand::Kind::Barrier;
    out.index = atoi(s.c_str() + 1);
    return out;
  }
  if (is_digit(s[0]) || s[0] == '-' || s[0] == '+') {
    parse_immediate(s, out);
    return out;
  }
  out.kind = Operand::Kind::Special;  // SB0 and other names: the opcode decides
  return out;
}

void split_mnemonic(SassInstruction& in) {
  size_t begin = 0;
  std::vector<std::string> parts;
  while (true) {
    size_t end = in.mnemonic.find('.', begin);
    parts.push_back(in.mnemonic.substr(begin, end == std::string::npos ? end : end - begin));
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  in.opcode = parts[0];
  in.modifiers.assign(parts.begin() + 1, parts.end());
}

SassInstruction parse_line(uint32_t pc, const std::string& body) {
  SassInstruction in;
  in.pc = pc;
  in.text = body;
  std::string s = body;
  if (s[0] == '@') {
    size_t space = s.find(' ');
    std::string guard = s.substr(1, space - 1);
    if (guard[0] == '!') {
      in.guard_negated = true;
      guard = guard.substr(1);
    }
    in.guard = predicate_number(guard);
    if (in.guard < 0) throw ParseError("guard not understood: " + body);
    s = trim(s.substr(space));
  }
  size_t space = s.find(' ');
  in.mnemonic = s.substr(0, space);
  split_mnemonic(in);
  std::string rest = space == std::string::npos ? "" : trim(s.substr(space));
  while (!rest.empty()) {
    size_t comma = rest.find(',');
    std::string piece = trim(rest.substr(0, comma));
    // Indirect branches separate register and displacement only by a blank: "RET.REL.NODEC R20 0x0".
    size_t gap = piece.find(' ');
    if (gap != std::string::npos && register_number(piece.substr(0, gap)) >= 0) {
      in.operands.push_back(parse_operand(piece.substr(0, gap)));
      piece = trim(piece.substr(gap));
    }
    in.operands.push_back(parse_operand(piece));
    if (comma == std::string::npos) break;
    rest = trim(rest.substr(comma + 1));
  }
  return in;
}

}  // namespace

std::vector<SassInstruction> parse_sass(const std::string& text) {
  std::vector<SassInstruction> program;
  size_t begin = 0;
  while (begin < text.size()) {
    size_t end = text.find('\n', begin);
    if (end == std::string::npos) end = text.size();
    std::string line = trim(text.substr(begin, end - begin));
    begin = end + 1;
    if (!starts_with(line, "/*")) continue;
    size_t close = line.find("*/");
    size_t semicolon = line.find(';');
    if (close == std::string::npos || semicolon == std::string::npos) continue;
    uint32_t pc = static_cast<uint32_t>(strtoul(line.substr(2, close - 2).c_str(), nullptr, 16));
    if (pc != program.size() * kInstructionBytes) throw ParseError("addresses are not consecutive at " + line);
    program.push_back(parse_line(pc, trim(line.substr(close + 2, semicolon - close - 2))));
  }
  if (program.empty()) throw ParseError("no instructions in the disassembly");
  return program;
}

}  // namespace gpu_emulator
