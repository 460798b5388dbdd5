// Plugin of qemu's user mode that counts the guest's executed instructions. The guest marks a place by a system call
// that has no effect, getpriority(2, n): the plugin then prints n and the instructions since the last mark. The guest has
// one thread. Declarations instead of qemu's header, which Debian does not package.
#include <inttypes.h>
#include <stdio.h>

typedef uint64_t Id;
typedef void (*OnTranslation)(Id, void* block);
typedef void (*OnSystemCall)(Id, unsigned cpu, int64_t number, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t a4,
                             uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8);

size_t qemu_plugin_tb_n_insns(const void* block);
void qemu_plugin_register_vcpu_tb_trans_cb(Id id, OnTranslation on_translation);
void qemu_plugin_register_vcpu_tb_exec_inline(void* block, int operation, void* counter, uint64_t amount);
void qemu_plugin_register_vcpu_syscall_cb(Id id, OnSystemCall on_system_call);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static uint64_t executed, at_last_mark;

static void CountBlock(Id id, void* block) {
  (void)id;
  enum { kAdd = 0 };
  qemu_plugin_register_vcpu_tb_exec_inline(block, kAdd, &executed, qemu_plugin_tb_n_insns(block));
}

static void ReadMark(Id id, unsigned cpu, int64_t number, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t a4,
                     uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8) {
  (void)id, (void)cpu, (void)a3, (void)a4, (void)a5, (void)a6, (void)a7, (void)a8;
  enum { kGetPriority = 141, kOfUser = 2 };
  if (number != kGetPriority || a1 != kOfUser) return;
  printf("instructions %" PRIu64 " %" PRIu64 "\n", a2, executed - at_last_mark);
  fflush(stdout);
  at_last_mark = executed;
}

__attribute__((visibility("default"))) int qemu_plugin_install(Id id, const void* info, int argc, char** argv) {
  (void)info, (void)argc, (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, CountBlock);
  qemu_plugin_register_vcpu_syscall_cb(id, ReadMark);
  return 0;
}
