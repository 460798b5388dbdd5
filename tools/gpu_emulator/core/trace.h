// Traces in the text format of Accel-Sim (tracer version 4).
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace gpu_emulator {

struct Machine;
struct Warp;
struct SassInstruction;

class Tracer {
 public:
  struct Header {
    std::string kernel_name;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, registers;
    int id, arch;
    uint64_t limit;  // warp instructions per warp after which a block is cut short; 0: none
  };
  Tracer(const std::string& path, const Header& header, const std::vector<SassInstruction>& program);
  ~Tracer();
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  void start_block(uint32_t threads);
  // `address` is null unless this is a memory access; `skipped`: no lane was active.
  void record(int warp, uint32_t index, uint32_t mask, const uint64_t* address, bool skipped);
  void finish_block(const uint32_t id[3]);
  bool accesses_memory(uint32_t index) const { return lines_[index].memory_bytes != 0; }

 private:
  struct Line {
    std::string before, after;  // text around the mask
    int memory_bytes = 0;
    bool is_barrier = false, is_exit = false;
  };
  // A position where a warp's stream may end.
  struct Cut {
    uint64_t instructions = 0;
    size_t characters = 0;
    uint32_t alive = 0;  // lanes that have not exited
  };
  struct Stream {
    std::string text;
    Cut end;                    // of the recorded part
    std::vector<Cut> barriers;  // just after each barrier
    bool complete = true;
  };
  static void append(std::string& out, const Line& line, uint32_t mask, const uint64_t* address, bool skipped);
  void shorten();

  std::FILE* file_;
  uint64_t limit_;
  uint32_t exit_pc_ = 0;
  std::vector<Line> lines_;
  std::vector<Stream> streams_;  // of the block's warps
};

}  // namespace gpu_emulator
