// Traces in the text format that Accel-Sim reads (tracer version 4).
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace volta {

struct Machine;
struct Warp;
struct SassInstruction;

class Tracer {
 public:
  struct Header {
    std::string kernel_name;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, registers;
    int id;
  };
  Tracer(const std::string& path, const Header& header, const std::vector<SassInstruction>& program);
  ~Tracer();
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  void start_block(uint32_t warps);
  // `address` is null for anything but a memory access; `skipped`: no lane was active.
  void record(int warp, uint32_t index, uint32_t mask, const uint64_t* address, bool skipped);
  void finish_block(const uint32_t id[3]);
  bool accesses_memory(uint32_t index) const { return lines_[index].memory_bytes != 0; }

 private:
  struct Line {
    std::string before, after;  // text around the mask
    int memory_bytes = 0;
    uint32_t pc = 0;
  };
  std::FILE* file_;
  std::vector<Line> lines_;
  std::vector<std::string> text_;  // per warp
  std::vector<uint64_t> count_;
};

}  // namespace volta
