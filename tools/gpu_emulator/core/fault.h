// Errors of a kernel: thrown by the core, reported through api.cpp, and raised as Python exceptions (faults.py).
#pragma once
#include <cstdint>
#include <string>

namespace gpu_emulator {

// Same numbers as in faults.py.
enum class FaultKind : int {
  None = 0,
  Unsupported = 1,
  OutOfBounds = 2,
  Misaligned = 3,
  UninitialisedShared = 4,
  SharedRace = 5,
  DivergentBarrier = 6,
  Deadlock = 7,
  Trap = 8,
  GlobalRace = 9,
  InstructionLimit = 10,
  BadConstant = 11,
  BadBranch = 12,
  UnfinishedCopy = 13,
};

struct Fault {
  FaultKind kind = FaultKind::None;
  std::string message;
  int lane = -1;  // -1: the warp as a whole
  bool has_address = false;
  uint64_t address = 0;
  int other_thread = -1;  // the other thread of a race
  // Filled in by the block that was running:
  uint32_t pc = 0;
  int thread = -1;
  uint32_t block[3] = {0, 0, 0};
};

}  // namespace gpu_emulator
