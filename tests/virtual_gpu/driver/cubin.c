/* Libraries and kernels: a cubin is an ELF file, and each kernel has a section .nv.info.<name> of attributes. */
#include "virtual_gpu.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  MACHINE_CUDA = 190,
  ABI_BLACKWELL = 8, /* from this version on the architecture stands elsewhere in e_flags */
  /* formats and attributes of .nv.info, as cuobjdump -elf names them */
  FORMAT_HALF = 3,
  FORMAT_PAYLOAD = 4,
  ATTRIBUTE_MAX_THREADS = 0x05,
  ATTRIBUTE_KPARAM_INFO = 0x17,
  ATTRIBUTE_CBANK_PARAM_SIZE = 0x19,
  /* function attributes of the driver */
  FUNC_MAX_THREADS = 0,
  FUNC_SHARED_SIZE = 1,
  FUNC_NUM_REGS = 4,
  FUNC_MAX_DYNAMIC_SHARED = 8,
  FUNC_PREFERRED_CARVEOUT = 9,
};

static struct Library* libraries;

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

/* Size in bytes of a cubin that lies in memory: its section table comes last. */
static size_t cubin_bytes(const unsigned char* cubin) {
  const Elf64_Ehdr* header = (const void*)cubin;
  size_t end = header->e_shoff + (size_t)header->e_shnum * sizeof(Elf64_Shdr);
  size_t segments = header->e_phoff + (size_t)header->e_phnum * sizeof(Elf64_Phdr);
  return segments > end ? segments : end;
}

static int named(const char* section, const char* prefix, const char* kernel) {
  size_t n = strlen(prefix);
  return !strncmp(section, prefix, n) && !strcmp(section + n, kernel);
}

static void read_kernels(struct Library* library) {
  const unsigned char* cubin = library->cubin;
  const Elf64_Ehdr* header = (const void*)cubin;
  const Elf64_Shdr* sections = (const void*)(cubin + header->e_shoff);
  const char* names = (const char*)cubin + sections[header->e_shstrndx].sh_offset;
  for (int i = 0; i < header->e_shnum; i++) {
    const char* name = names + sections[i].sh_name;
    if (strncmp(name, ".nv.info.", 9)) continue;
    struct Kernel* kernel = calloc(1, sizeof *kernel);
    snprintf(kernel->name, sizeof kernel->name, "%s", name + 9);
    kernel->max_threads = V100_THREADS;
    kernel->library = library;
    read_attributes(kernel, cubin + sections[i].sh_offset, cubin + sections[i].sh_offset + sections[i].sh_size);
    for (int j = 0; j < header->e_shnum; j++) {
      const char* other = names + sections[j].sh_name;
      if (named(other, ".text.", kernel->name)) kernel->registers = (int)(sections[j].sh_info >> 24);
      if (named(other, ".nv.shared.", kernel->name)) kernel->static_shared = (int)sections[j].sh_size;
    }
    for (int d = 0; d < MAX_DEVICES; d++) kernel->max_dynamic_shared[d] = V100_SHARED - kernel->static_shared;
    kernel->next = library->kernels;
    library->kernels = kernel;
  }
}

API CUresult cuLibraryLoadData(CUlibrary* out, const void* code, void* jit_options, void* jit_values,
                               unsigned jit_count, void* options, void* values, unsigned count) {
  (void)jit_options, (void)jit_values, (void)options, (void)values;
  REQUIRE_INITIALISED();
  REQUIRE(jit_count == 0 && count == 0, CUDA_ERROR_INVALID_VALUE); /* not modelled */
  const Elf64_Ehdr* header = code;
  REQUIRE(code && !memcmp(header->e_ident, ELFMAG, SELFMAG) && header->e_machine == MACHINE_CUDA,
          CUDA_ERROR_INVALID_IMAGE); /* neither are PTX and fat binaries */
  int blackwell = header->e_ident[EI_ABIVERSION] >= ABI_BLACKWELL;
  REQUIRE(!blackwell && (header->e_flags & 0xff) == V100_ARCH, CUDA_ERROR_NO_BINARY_FOR_GPU);

  struct Library* library = calloc(1, sizeof *library);
  library->bytes = cubin_bytes(code);
  library->cubin = malloc(library->bytes); /* as the driver does: the caller may free its copy */
  memcpy(library->cubin, code, library->bytes);
  read_kernels(library);
  pthread_mutex_lock(&lock);
  library->next = libraries;
  libraries = library;
  pthread_mutex_unlock(&lock);
  *out = library;
  return CUDA_SUCCESS;
}

API CUresult cuLibraryUnload(CUlibrary library) {
  REQUIRE_INITIALISED();
  CUresult result = CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&lock);
  for (struct Library** at = &libraries; *at; at = &(*at)->next)
    if (*at == library) {
      *at = library->next; /* kept in memory: a launch of an unloaded kernel is an error and not a crash */
      result = CUDA_SUCCESS;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

int is_kernel(CUkernel kernel) {
  int found = 0;
  pthread_mutex_lock(&lock);
  for (struct Library* library = libraries; library && !found; library = library->next)
    for (struct Kernel* k = library->kernels; k && !found; k = k->next) found = k == kernel;
  pthread_mutex_unlock(&lock);
  return found;
}

API CUresult cuLibraryGetKernel(CUkernel* out, CUlibrary library, const char* name) {
  REQUIRE_INITIALISED();
  for (struct Kernel* kernel = library->kernels; kernel; kernel = kernel->next)
    if (!strcmp(kernel->name, name)) {
      *out = kernel;
      return CUDA_SUCCESS;
    }
  return CUDA_ERROR_NOT_FOUND;
}

API CUresult cuKernelGetAttribute(int* value, int attribute, CUkernel kernel, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  REQUIRE(is_kernel(kernel), CUDA_ERROR_INVALID_HANDLE);
  switch (attribute) {
    case FUNC_MAX_THREADS:
      *value = kernel->max_threads;
      break;
    case FUNC_SHARED_SIZE:
      *value = kernel->static_shared;
      break;
    case FUNC_NUM_REGS:
      *value = kernel->registers;
      break;
    case FUNC_MAX_DYNAMIC_SHARED:
      *value = kernel->max_dynamic_shared[device];
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

API CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device) {
  REQUIRE_INITIALISED();
  REQUIRE_DEVICE(device);
  REQUIRE(is_kernel(kernel), CUDA_ERROR_INVALID_HANDLE);
  if (attribute == FUNC_PREFERRED_CARVEOUT) return CUDA_SUCCESS;
  REQUIRE(attribute == FUNC_MAX_DYNAMIC_SHARED, CUDA_ERROR_INVALID_VALUE);
  REQUIRE(value >= 0 && value + kernel->static_shared <= V100_SHARED_OPT_IN, CUDA_ERROR_INVALID_VALUE);
  kernel->max_dynamic_shared[device] = value;
  return CUDA_SUCCESS;
}
