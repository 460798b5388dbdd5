// C interface for Python (and for a fake CUDA driver). _core.py mirrors these structures.
#include <cstdio>
#include <cstring>
#include <memory>

#include "bind.h"
#include "machine.h"
#include "trace.h"

using namespace gpu_emulator;

#define EMULATOR_API __attribute__((visibility("default")))

extern "C" {

struct EmulatorBank {
  int32_t number;
  const void* data;
  uint64_t size;
};

struct EmulatorLaunch {
  const void* kernel;
  uint32_t grid[3], block[3];
  uint32_t shared_bytes, local_bytes, registers;
  const EmulatorBank* banks;
  uint64_t bank_count;
  const GlobalMemory::Range* buffers;
  uint64_t buffer_count;
  const uint32_t* blocks;  // coordinates, three each; null: the whole grid
  uint64_t block_count;
  int32_t check_races, check_global;
  uint64_t max_instructions;
  const char* trace_path;  // null: no trace
  const char* trace_name;
  int32_t trace_id;
  uint64_t trace_limit;  // warp instructions per warp; 0: all
};

struct EmulatorResult {
  Counters* counters;  // one per instruction, provided by the caller
  uint64_t blocks_run;
  uint64_t unique_read_sectors, block_unique_read_sectors, unique_written_sectors;
  int32_t fault;
  int32_t fault_thread, fault_other_thread, fault_has_address;
  uint32_t fault_pc, fault_block[3];
  uint64_t fault_address;
  char message[1024];
};

EMULATOR_API void emulator_sizes(uint64_t* out) {
  out[0] = sizeof(EmulatorLaunch);
  out[1] = sizeof(EmulatorResult);
  out[2] = sizeof(Counters);
}

EMULATOR_API void* emulator_parse(const char* disassembly, int32_t arch, char* error, uint64_t error_size) {
  try {
    return bind_kernel(disassembly, arch).release();
  } catch (const std::exception& e) {
    snprintf(error, error_size, "%s", e.what());
    return nullptr;
  }
}

EMULATOR_API void emulator_free(void* kernel) {
  delete static_cast<Kernel*>(kernel);
}

EMULATOR_API uint64_t emulator_instruction_count(const void* kernel) {
  return static_cast<const Kernel*>(kernel)->code.size();
}

EMULATOR_API const char* emulator_instruction_text(const void* kernel, uint64_t index) {
  return static_cast<const Kernel*>(kernel)->sass[index].text.c_str();
}

EMULATOR_API const char* emulator_instruction_mnemonic(const void* kernel, uint64_t index) {
  return static_cast<const Kernel*>(kernel)->sass[index].mnemonic.c_str();
}

// Reason why the instruction cannot be executed, or an empty string.
EMULATOR_API const char* emulator_instruction_problem(const void* kernel, uint64_t index) {
  return static_cast<const Kernel*>(kernel)->unsupported[index].c_str();
}

EMULATOR_API int emulator_launch(const EmulatorLaunch* launch, EmulatorResult* result) {
  const Kernel& kernel = *static_cast<const Kernel*>(launch->kernel);
  result->fault = 0;
  result->blocks_run = 0;
  try {
    GlobalMemory global(launch->buffers, launch->buffer_count, launch->check_global);
    Machine m(kernel, global);
    m.options.check_races = launch->check_races;
    m.options.max_instructions = launch->max_instructions;
    memcpy(m.grid, launch->grid, sizeof m.grid);
    memcpy(m.block, launch->block, sizeof m.block);
    m.threads = launch->block[0] * launch->block[1] * launch->block[2];
    m.shared_bytes = launch->shared_bytes;
    m.local_bytes = launch->local_bytes;
    for (uint64_t i = 0; i < launch->bank_count; i++) {
      const EmulatorBank& b = launch->banks[i];
      if (m.banks.size() <= static_cast<size_t>(b.number)) m.banks.resize(b.number + 1);
      const uint8_t* data = static_cast<const uint8_t*>(b.data);
      m.banks[b.number].assign(data, data + b.size);
    }
    m.prepare();
    std::unique_ptr<Tracer> tracer;
    if (launch->trace_path) {
      Tracer::Header h;
      h.kernel_name = launch->trace_name;
      memcpy(h.grid, launch->grid, sizeof h.grid);
      if (launch->blocks) {  // the simulator takes the number of blocks in the file from the grid
        h.grid[0] = static_cast<uint32_t>(launch->block_count);
        h.grid[1] = h.grid[2] = 1;
      }
      memcpy(h.block, launch->block, sizeof h.block);
      h.shared_bytes = launch->shared_bytes;
      h.registers = launch->registers;
      h.id = launch->trace_id;
      h.limit = launch->trace_limit;
      h.arch = kernel.arch;
      tracer = std::make_unique<Tracer>(launch->trace_path, h, kernel.sass);
      m.tracer = tracer.get();
    }
    auto finish = [&] {
      memcpy(result->counters, m.counters.data(), m.counters.size() * sizeof(Counters));
      result->unique_read_sectors = global.unique_read();
      result->block_unique_read_sectors = global.block_unique_read();
      result->unique_written_sectors = global.unique_written();
    };
    try {
      if (launch->blocks) {
        for (uint64_t i = 0; i < launch->block_count; i++, result->blocks_run++) m.run_block(launch->blocks + 3 * i);
      } else {
        for (uint32_t z = 0; z < launch->grid[2]; z++)
          for (uint32_t y = 0; y < launch->grid[1]; y++)
            for (uint32_t x = 0; x < launch->grid[0]; x++, result->blocks_run++) {
              const uint32_t id[3] = {x, y, z};
              m.run_block(id);
            }
      }
      finish();
    } catch (const Fault& f) {
      finish();
      result->fault = static_cast<int32_t>(f.kind);
      result->fault_thread = f.thread;
      result->fault_other_thread = f.other_thread;
      result->fault_has_address = f.has_address;
      result->fault_pc = f.pc;
      memcpy(result->fault_block, f.block, sizeof f.block);
      result->fault_address = f.address;
      snprintf(result->message, sizeof result->message, "%s", f.message.c_str());
    }
  } catch (const std::exception& e) {
    snprintf(result->message, sizeof result->message, "%s", e.what());
    return -1;
  }
  return 0;
}

}  // extern "C"
