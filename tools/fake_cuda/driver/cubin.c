/* Attributes of a kernel, from a cubin or from PTX.
 *
 * A cubin is an ELF file: each kernel has a section .nv.info.<name> of attributes, and all kernels share .nv.info. */
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum {
  /* formats and attributes of .nv.info, as cuobjdump -elf names them */
  FORMAT_PAYLOAD = 4,
  ATTRIBUTE_MAX_THREADS = 0x05,
  ATTRIBUTE_FRAME_SIZE = 0x11,
  ATTRIBUTE_KPARAM_INFO = 0x17,
  ATTRIBUTE_CBANK_PARAM_SIZE = 0x19,
  ATTRIBUTE_REGCOUNT = 0x2f,
  RESERVED_SHARED = 1024,
  ABI_BLACKWELL = 8, /* from this version on e_flags has the architecture elsewhere */
};

typedef struct {
  unsigned attribute;
  uint16_t value; /* of an attribute without a payload */
  const unsigned char* payload;
} Attribute;

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

static const Elf64_Shdr* sections_of(const unsigned char* cubin) {
  return (const void*)(cubin + ((const Elf64_Ehdr*)(const void*)cubin)->e_shoff);
}

static const Elf64_Shdr* find_section(const unsigned char* cubin, const char* prefix, const char* name) {
  const Elf64_Ehdr* header = (const void*)cubin;
  const Elf64_Shdr* sections = sections_of(cubin);
  const char* names = (const char*)cubin + sections[header->e_shstrndx].sh_offset;
  const size_t length = strlen(prefix);
  for (int i = 0; i < header->e_shnum; i++) {
    const char* found = names + sections[i].sh_name;
    if (!strncmp(found, prefix, length) && !strcmp(found + length, name)) return &sections[i];
  }
  return NULL;
}

/* Reads the attribute at *at and moves on; 0 at the end of the section. */
static int next(const unsigned char* cubin, const Elf64_Shdr* section, size_t* at, Attribute* found) {
  if (*at + 4 > section->sh_size) return 0;
  const unsigned char* p = cubin + section->sh_offset + *at;
  *found = (Attribute){p[1], half(p + 2), p + 4};
  *at += 4u + (p[0] == FORMAT_PAYLOAD ? found->value : 0u);
  return 1;
}

static void read_own_attributes(Kernel* kernel, const Elf64_Shdr* info) {
  Attribute a;
  for (size_t at = 0; next(kernel->code, info, &at, &a);) {
    if (a.attribute == ATTRIBUTE_CBANK_PARAM_SIZE) kernel->params_bytes = a.value;
    if (a.attribute == ATTRIBUTE_MAX_THREADS)
      kernel->max_threads = (int)(word(a.payload) * word(a.payload + 4) * word(a.payload + 8));
    if (a.attribute == ATTRIBUTE_KPARAM_INFO) {
      const int ordinal = half(a.payload + 4);
      if (ordinal >= MAX_PARAMETERS) continue;
      kernel->parameter[ordinal].offset = half(a.payload + 6);
      kernel->parameter[ordinal].size = word(a.payload + 8) >> 18;
      if (ordinal >= kernel->parameters) kernel->parameters = ordinal + 1;
    }
  }
}

/* Pairs of a symbol's number and a value. Registers of sm_90 and newer are found nowhere else. */
static void read_shared_attributes(Kernel* kernel, const Elf64_Shdr* info, const Elf64_Shdr* symbols) {
  const Elf64_Sym* symbol = (const void*)(kernel->code + symbols->sh_offset);
  const char* names = (const char*)kernel->code + sections_of(kernel->code)[symbols->sh_link].sh_offset;
  Attribute a;
  for (size_t at = 0; next(kernel->code, info, &at, &a);) {
    if (a.attribute != ATTRIBUTE_REGCOUNT && a.attribute != ATTRIBUTE_FRAME_SIZE) continue;
    if (strcmp(kernel->name, names + symbol[word(a.payload)].st_name)) continue;
    const uint32_t value = word(a.payload + 4);
    if (a.attribute == ATTRIBUTE_REGCOUNT) kernel->registers = (int)value;
    if (a.attribute == ATTRIBUTE_FRAME_SIZE) kernel->local_bytes = value == UINT32_MAX ? 0 : (int)value; /* unbounded */
  }
}

static int read_from_cubin(Kernel* kernel) {
  const unsigned char* cubin = kernel->code;
  const Elf64_Shdr *own = find_section(cubin, ".nv.info.", kernel->name), *info = find_section(cubin, ".nv.info", "");
  const Elf64_Shdr *text = find_section(cubin, ".text.", kernel->name), *symbols = find_section(cubin, ".symtab", "");
  const Elf64_Shdr* shared = find_section(cubin, ".nv.shared.", kernel->name);
  if (!own || !text) return 0;
  read_own_attributes(kernel, own);
  kernel->registers = (int)(text->sh_info >> 24);
  if (info && symbols) read_shared_attributes(kernel, info, symbols);
  /* A reservation is counted in the static shared memory of every kernel. */
  const int reserved = find_section(cubin, ".nv.shared.reserved.0", "") ? RESERVED_SHARED : 0;
  if (shared) kernel->static_shared = (int)shared->sh_size - reserved;
  return kernel->params_bytes <= PARAMETER_BYTES;
}

/* As NVRTC writes it: name, launch bounds, and one parameter. */
static int read_from_ptx(Kernel* kernel) {
  const char* at = (const char*)kernel->code;
  const size_t length = strlen(kernel->name);
  do {
    at = strstr(at, ".entry ");
    if (!at) return 0;
    at += strlen(".entry ");
  } while (strcspn(at, "( \n") != length || strncmp(at, kernel->name, length));
  const char *body = strchr(at, '{'), *size = strchr(at, '['), *bounds = strstr(at, ".maxntid ");
  if (size && size < body) {
    kernel->parameters = 1;
    kernel->parameter[0].size = kernel->params_bytes = (uint32_t)atoi(size + 1);
  }
  if (bounds && bounds < body) kernel->max_threads = atoi(bounds + strlen(".maxntid "));
  kernel->registers = REGISTERS / kernel->max_threads; /* the most that a block of this size can have */
  if (kernel->registers > 255) kernel->registers = 255;
  return kernel->params_bytes <= PARAMETER_BYTES;
}

/* The section table comes last. */
size_t cubin_bytes(const unsigned char* cubin) {
  const Elf64_Ehdr* header = (const void*)cubin;
  const size_t sections = header->e_shoff + (size_t)header->e_shnum * sizeof(Elf64_Shdr);
  const size_t segments = header->e_phoff + (size_t)header->e_phnum * sizeof(Elf64_Phdr);
  return sections > segments ? sections : segments;
}

int cubin_arch(const unsigned char* cubin) {
  const Elf64_Ehdr* header = (const void*)cubin;
  const int is_blackwell = header->e_ident[EI_ABIVERSION] >= ABI_BLACKWELL;
  return (int)(is_blackwell ? header->e_flags >> 8 : header->e_flags) & 0xff;
}

int read_kernel(Kernel* kernel) {
  kernel->max_threads = THREADS;
  return memcmp(kernel->code, ELFMAG, SELFMAG) ? read_from_ptx(kernel) : read_from_cubin(kernel);
}
