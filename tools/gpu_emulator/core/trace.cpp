#include "trace.h"

#include <algorithm>
#include <stdexcept>

#include "machine.h"
#include "sass.h"

namespace gpu_emulator {
namespace {

int access_bytes(const SassInstruction& in) {
  static const char* const ops[] = {"LDG", "STG", "LD",    "ST",   "LDS",   "STS",   "LDL",
                                    "STL", "RED", "ATOMG", "ATOM", "ATOMS", "LDGSTS"};
  if (in.opcode == "LDSM") return 16;
  if (std::none_of(std::begin(ops), std::end(ops), [&](const char* o) { return in.opcode == o; })) return 0;
  int bytes = 4;
  for (const std::string& m : in.modifiers) {
    if (m == "128") bytes = 16;
    if (m == "64" || m == "U64" || m == "S64" || m == "F64") bytes = 8;
    if (m == "U8" || m == "S8") bytes = 1;
    if (m == "U16" || m == "S16") bytes = 2;
  }
  return bytes;
}

// RZ is not listed, and the simulator has no uniform registers.
void add_registers(std::vector<int>& list, int first, int count) {
  for (int i = 0; i < count; i++)
    if (first < kZeroRegister && std::find(list.begin(), list.end(), first + i) == list.end())
      list.push_back(first + i);
}

// Registers per operand of HMMA: the result and the addend have four, A four or two, B half as many as A.
int registers_of_matrix(bool deep, size_t operand) {
  return operand == 1 ? (deep ? 4 : 2) : operand == 2 ? (deep ? 2 : 1) : 4;
}

// Registers that an instruction writes and reads, for the simulator's scoreboard.
void registers_of(const SassInstruction& in, int bytes, std::vector<int>& written, std::vector<int>& read) {
  bool store = in.opcode == "STG" || in.opcode == "STS" || in.opcode == "STL" || in.opcode == "ST" ||
               in.opcode == "RED" || in.opcode == "LDGSTS";
  auto has = [&](const char* m) {
    return std::find(in.modifiers.begin(), in.modifiers.end(), m) != in.modifiers.end();
  };
  bool no_destination = store || in.opcode == "R2P" || in.opcode == "BAR" || in.opcode == "WARPSYNC" ||
                        in.opcode.find("SETP") != std::string::npos || in.opcode == "RET" || in.opcode == "BRX" ||
                        in.opcode == "CALL";
  bool is_double = in.opcode[0] == 'D' && in.opcode != "DEPBAR";
  int words = std::max(1, bytes / 4);
  bool first = true;
  for (size_t i = 0; i < in.operands.size(); i++) {
    const Operand& o = in.operands[i];
    if (o.kind == Operand::Kind::Memory) {
      bool wide = in.opcode == "LDG" || in.opcode == "STG" || in.opcode == "LD" || in.opcode == "ST" ||
                  in.opcode == "RED" || in.opcode == "ATOMG" || in.opcode == "ATOM" ||
                  (in.opcode == "LDGSTS" && i == 1);
      add_registers(read, o.index, wide ? 2 : 1);
    } else if (o.kind == Operand::Kind::Constant && o.indexed) {
      add_registers(read, o.index, 1);
    } else if (o.kind == Operand::Kind::Register) {
      bool pair = is_double || in.opcode == "HMMA" ||
                  (in.opcode == "IMAD" && has("WIDE") && (first || i + 1 == in.operands.size())) ||
                  (in.opcode == "CS2R" && !has("32"));
      int count = bytes ? words : pair ? 2 : 1;
      if (in.opcode == "LDSM") count = has("4") ? 4 : has("2") ? 2 : 1;
      if (in.opcode == "HMMA" && !has("884"))
        count = registers_of_matrix(has("16816") || (has("TF32") && has("1688")), i);
      if (in.opcode == "LDC") count = has("64") ? 2 : has("128") ? 4 : 1;
      if (first && !no_destination) {
        add_registers(written, o.index, count);
      } else {
        add_registers(read, o.index, count);
      }
      first = false;
    }
  }
}

void append_register(std::string& out, int number) {
  out += 'R';
  out += std::to_string(number);
  out += ' ';
}

}  // namespace

Tracer::Tracer(const std::string& path, const Header& h, const std::vector<SassInstruction>& program)
    : limit_(h.limit) {
  file_ = std::fopen(path.c_str(), "w");
  if (!file_) throw std::runtime_error("cannot write the trace " + path);
  std::fprintf(
      file_,
      "-kernel name = %s\n-kernel id = %d\n-grid dim = (%u,%u,%u)\n-block dim = (%u,%u,%u)\n-shmem = %u\n"
      "-nregs = %u\n-binary version = %d\n-cuda stream id = 0\n-shmem base_addr = 0x%016llx\n"
      "-local mem base_addr = 0x%016llx\n-nvbit version = 1.5.5\n-accelsim tracer version = 4\n"
      "-enable lineinfo = 0\n\n#traces format = PC mask dest_num [reg_dests] opcode src_num [reg_srcs] mem_width "
      "[adrrescompress?] [mem_addresses] immediate\n\n",
      h.kernel_name.c_str(), h.id, h.grid[0], h.grid[1], h.grid[2], h.block[0], h.block[1], h.block[2], h.shared_bytes,
      h.registers, h.arch, static_cast<unsigned long long>(kSharedWindow),
      static_cast<unsigned long long>(kLocalWindow));
  for (const SassInstruction& in : program) {
    Line line;
    line.memory_bytes = access_bytes(in);
    std::vector<int> written, read;
    registers_of(in, line.memory_bytes, written, read);
    line.is_barrier = in.mnemonic.rfind("BAR.SYNC", 0) == 0 || in.mnemonic.rfind("BAR.RED", 0) == 0;
    line.is_exit = in.opcode == "EXIT";
    if (line.is_exit) exit_pc_ = in.pc;
    char pc[16];
    std::snprintf(pc, sizeof pc, "%04x ", in.pc);
    line.before = pc;
    line.after = " " + std::to_string(written.size()) + " ";
    for (int r : written) append_register(line.after, r);
    line.after += in.mnemonic + " " + std::to_string(read.size()) + " ";
    for (int r : read) append_register(line.after, r);
    lines_.push_back(std::move(line));
  }
}

Tracer::~Tracer() {
  if (file_) std::fclose(file_);
}

void Tracer::start_block(uint32_t threads) {
  streams_.assign((threads + kLanes - 1) / kLanes, Stream{});
  for (size_t w = 0; w < streams_.size(); w++) {
    uint32_t lanes = std::min<uint32_t>(threads - static_cast<uint32_t>(w) * kLanes, kLanes);
    streams_[w].end.alive = lanes == kLanes ? ~0u : (1u << lanes) - 1;
  }
}

void Tracer::record(int warp, uint32_t index, uint32_t mask, const uint64_t* address, bool skipped) {
  const Line& line = lines_[index];
  Stream& stream = streams_[warp];
  if (limit_ && stream.end.instructions >= limit_) {
    stream.complete = false;
    return;
  }
  append(stream.text, line, mask, address, skipped);
  stream.end.instructions++;
  stream.end.characters = stream.text.size();
  if (line.is_exit && !skipped) stream.end.alive &= ~mask;
  if (line.is_barrier && !skipped) stream.barriers.push_back(stream.end);
}

void Tracer::append(std::string& out, const Line& line, uint32_t mask, const uint64_t* address, bool skipped) {
  char number[64];
  std::snprintf(number, sizeof number, "%08x", mask);
  out += line.before;
  out += number;
  if (skipped) {
    out += " 0 NOP 0 0 0\n";
    return;
  }
  out += line.after;
  if (!line.memory_bytes || !address) {
    out += "0 0\n";
    return;
  }
  out += std::to_string(line.memory_bytes) + " ";
  // One stride if the active lanes are consecutive and evenly spaced, else differences lane by lane. Readers keep the
  // stride in an int, the differences in 64 bits.
  int first = __builtin_ctz(mask), last = 31 - __builtin_clz(mask);
  uint32_t run = (last - first == 31 ? 0xffffffffu : ((1u << (last - first + 1)) - 1)) << first;
  bool even = mask == run;
  long long stride = last > first ? static_cast<long long>(address[first + 1] - address[first]) : 0;
  even = even && stride == static_cast<int>(stride);
  for (int l = first + 1; even && l <= last; l++) even = static_cast<long long>(address[l] - address[l - 1]) == stride;
  std::snprintf(number, sizeof number, "%d 0x%llx ", even ? 1 : 2, static_cast<unsigned long long>(address[first]));
  out += number;
  if (even) {
    out += std::to_string(stride) + " ";
  } else {
    uint64_t previous = address[first];
    for (int l = first + 1; l <= last; l++) {
      if (!(mask >> l & 1)) continue;
      out += std::to_string(static_cast<long long>(address[l] - previous)) + " ";
      previous = address[l];
    }
    out += "0 ";
  }
  out += "0\n";
}

// Ends all incomplete warps behind the same barrier, the last that all of them have recorded, so that none waits there
// forever; without barriers, where the limit stopped them.
void Tracer::shorten() {
  size_t common = SIZE_MAX;
  for (const Stream& s : streams_)
    if (!s.complete) common = std::min(common, s.barriers.size());
  for (Stream& s : streams_) {
    if (common && s.barriers.size() >= common) {
      if (s.complete && s.barriers.size() == common) continue;
      s.end = s.barriers[common - 1];
    } else if (s.complete) {
      continue;
    }
    s.text.resize(s.end.characters);
    char line[64];
    std::snprintf(line, sizeof line, "%04x %08x 0 EXIT 0 0 0\n", exit_pc_, s.end.alive);
    s.text += line;
    s.end.instructions++;
  }
}

void Tracer::finish_block(const uint32_t id[3]) {
  std::fprintf(file_, "#BEGIN_TB\n\nthread block = %u,%u,%u\n\n", id[0], id[1], id[2]);
  if (std::any_of(streams_.begin(), streams_.end(), [](const Stream& s) { return !s.complete; })) shorten();
  for (size_t w = 0; w < streams_.size(); w++) {
    const Stream& s = streams_[w];
    std::fprintf(file_, "warp = %zu\ninsts = %llu\n", w, static_cast<unsigned long long>(s.end.instructions));
    std::fwrite(s.text.data(), 1, s.text.size(), file_);
    std::fprintf(file_, "\n");
  }
  std::fprintf(file_, "#END_TB\n\n");
}

}  // namespace gpu_emulator
