/* A cubin is an ELF file: each kernel has a section .nv.info.<name> of attributes, and all share .nv.info. */
#include "virtual_gpu.h"

#include <elf.h>
#include <string.h>

enum {
  /* formats and attributes of .nv.info, as cuobjdump -elf names them */
  FORMAT_HALF = 3,
  FORMAT_PAYLOAD = 4,
  ATTRIBUTE_MAX_THREADS = 0x05,
  ATTRIBUTE_KPARAM_INFO = 0x17,
  ATTRIBUTE_CBANK_PARAM_SIZE = 0x19,
  ATTRIBUTE_REGCOUNT = 0x2f,
};

static uint32_t word(const unsigned char* p) {
  uint32_t value;
  memcpy(&value, p, sizeof value);
  return value;
}

static uint16_t half(const unsigned char* p) {
  uint16_t value;
  memcpy(&value, p, sizeof value);
  return value;
}

static void read_attributes(struct Kernel* kernel, const unsigned char* p, const unsigned char* end) {
  while (p + 4 <= end) {
    unsigned format = p[0], attribute = p[1], value = half(p + 2);
    const unsigned char* payload = p + 4;
    p = payload + (format == FORMAT_PAYLOAD ? value : 0);
    if (attribute == ATTRIBUTE_CBANK_PARAM_SIZE && format == FORMAT_HALF) kernel->params_bytes = value;
    if (attribute == ATTRIBUTE_MAX_THREADS)
      kernel->max_threads = (int)(word(payload) * word(payload + 4) * word(payload + 8));
    if (attribute == ATTRIBUTE_KPARAM_INFO) {
      int ordinal = half(payload + 4);
      if (ordinal >= (int)(sizeof kernel->parameter / sizeof *kernel->parameter)) continue;
      kernel->parameter[ordinal].offset = half(payload + 6);
      kernel->parameter[ordinal].size = word(payload + 8) >> 18;
      if (ordinal >= kernel->parameters) kernel->parameters = ordinal + 1;
    }
  }
}

static int named(const char* section, const char* prefix, const char* kernel) {
  size_t n = strlen(prefix);
  return !strncmp(section, prefix, n) && !strcmp(section + n, kernel);
}

/* Registers of the kernels, which from sm_90 on stand nowhere else: pairs of a symbol's number and a count. */
static void read_registers(struct Library* library, const Elf64_Shdr* sections, int info, int symbols) {
  const unsigned char* p = library->code + sections[info].sh_offset;
  const unsigned char* end = p + sections[info].sh_size;
  const Elf64_Sym* symbol = (const void*)(library->code + sections[symbols].sh_offset);
  const char* names = (const char*)library->code + sections[sections[symbols].sh_link].sh_offset;
  while (p + 4 <= end) {
    unsigned format = p[0], attribute = p[1], value = half(p + 2);
    const unsigned char* payload = p + 4;
    p = payload + (format == FORMAT_PAYLOAD ? value : 0);
    if (attribute != ATTRIBUTE_REGCOUNT || format != FORMAT_PAYLOAD) continue;
    for (struct Kernel* kernel = library->kernels; kernel; kernel = kernel->next)
      if (!strcmp(kernel->name, names + symbol[word(payload)].st_name)) kernel->registers = (int)word(payload + 4);
  }
}

void read_cubin(struct Library* library) {
  const unsigned char* cubin = library->code;
  const Elf64_Ehdr* header = (const void*)cubin;
  const Elf64_Shdr* sections = (const void*)(cubin + header->e_shoff);
  const char* names = (const char*)cubin + sections[header->e_shstrndx].sh_offset;
  int info = 0, symbols = 0, reserved = 0;
  for (int i = 0; i < header->e_shnum; i++) {
    const char* name = names + sections[i].sh_name;
    if (!strcmp(name, ".nv.info")) info = i;
    if (sections[i].sh_type == SHT_SYMTAB) symbols = i;
    if (!strcmp(name, ".nv.shared.reserved.0")) reserved = 1024; /* counted in every kernel's static shared memory */
  }
  for (int i = 0; i < header->e_shnum; i++) {
    const char* name = names + sections[i].sh_name;
    if (strncmp(name, ".nv.info.", 9)) continue;
    struct Kernel* kernel = new_kernel(library, name + 9, strlen(name + 9));
    read_attributes(kernel, cubin + sections[i].sh_offset, cubin + sections[i].sh_offset + sections[i].sh_size);
    for (int j = 0; j < header->e_shnum; j++)
      if (named(names + sections[j].sh_name, ".nv.shared.", kernel->name))
        kernel->static_shared = (int)sections[j].sh_size - reserved;
  }
  if (info && symbols) read_registers(library, sections, info, symbols);
}
