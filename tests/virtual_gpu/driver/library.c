/* Libraries and kernels: what is loaded, and what is asked of it. */
#include "virtual_gpu.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  MACHINE_CUDA = 190,
  ABI_BLACKWELL = 8, /* from this version on the architecture stands elsewhere in e_flags */
  /* function attributes of the driver */
  FUNC_MAX_THREADS = 0,
  FUNC_SHARED_SIZE = 1,
  FUNC_NUM_REGS = 4,
  FUNC_MAX_DYNAMIC_SHARED = 8,
  FUNC_PREFERRED_CARVEOUT = 9,
};

static struct Library* libraries;

struct Kernel* new_kernel(struct Library* library, const char* name, size_t length) {
  struct Kernel* kernel = calloc(1, sizeof *kernel);
  snprintf(kernel->name, sizeof kernel->name, "%.*s", (int)length, name);
  kernel->max_threads = BLOCK_THREADS;
  kernel->library = library;
  kernel->next = library->kernels;
  library->kernels = kernel;
  return kernel;
}

/* Size in bytes of a cubin that lies in memory: its section table comes last. */
static size_t cubin_bytes(const unsigned char* cubin) {
  const Elf64_Ehdr* header = (const void*)cubin;
  size_t end = header->e_shoff + (size_t)header->e_shnum * sizeof(Elf64_Shdr);
  size_t segments = header->e_phoff + (size_t)header->e_phnum * sizeof(Elf64_Phdr);
  return segments > end ? segments : end;
}

/* The architecture that a text of PTX was written for, of which every newer one can be had; 0 if it is none. */
static int ptx_arch(const char* text) {
  const char* target = strstr(text, "\n.target sm_");
  return target ? atoi(target + strlen("\n.target sm_")) : 0;
}

API CUresult cuLibraryLoadData(CUlibrary* out, const void* code, void* jit_options, void* jit_values,
                               unsigned jit_count, void* options, void* values, unsigned count) {
  (void)jit_options, (void)jit_values, (void)options, (void)values;
  REQUIRE_INITIALISED();
  REQUIRE(jit_count == 0 && count == 0, CUDA_ERROR_INVALID_VALUE); /* not modelled */
  REQUIRE(code, CUDA_ERROR_INVALID_IMAGE);
  REQUIRE_NO_CAPTURE();
  const Elf64_Ehdr* header = code;
  int is_cubin = !memcmp(header->e_ident, ELFMAG, SELFMAG);
  if (is_cubin) {
    REQUIRE(header->e_machine == MACHINE_CUDA, CUDA_ERROR_INVALID_IMAGE);
    int blackwell = header->e_ident[EI_ABIVERSION] >= ABI_BLACKWELL;
    int arch = (int)(blackwell ? header->e_flags >> 8 : header->e_flags) & 0xff;
    REQUIRE(arch == model()->arch, CUDA_ERROR_NO_BINARY_FOR_GPU);
  } else {
    REQUIRE(!memcmp(code, "//", 2) || !memcmp(code, "\n//", 3), CUDA_ERROR_INVALID_IMAGE); /* as NVRTC begins PTX */
    REQUIRE(ptx_arch(code) > 0 && ptx_arch(code) <= model()->arch, CUDA_ERROR_INVALID_PTX);
  }

  struct Library* library = calloc(1, sizeof *library);
  library->bytes = is_cubin ? cubin_bytes(code) : strlen(code) + 1;
  library->code = malloc(library->bytes); /* as the driver does: the caller may free its copy */
  memcpy(library->code, code, library->bytes);
  if (is_cubin)
    read_cubin(library);
  else
    read_ptx(library);
  for (struct Kernel* kernel = library->kernels; kernel; kernel = kernel->next)
    for (int d = 0; d < MAX_DEVICES; d++) kernel->max_dynamic_shared[d] = BLOCK_SHARED - kernel->static_shared;
  pthread_mutex_lock(&lock);
  library->next = libraries;
  libraries = library;
  pthread_mutex_unlock(&lock);
  *out = library;
  return CUDA_SUCCESS;
}

API CUresult cuLibraryUnload(CUlibrary library) {
  REQUIRE_INITIALISED();
  REQUIRE_NO_CAPTURE();
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

CUresult load_kernel(CUkernel kernel, CUdevice device) {
  if (__atomic_load_n(&kernel->loaded[device], __ATOMIC_ACQUIRE)) return CUDA_SUCCESS;
  REQUIRE_NO_CAPTURE();
  __atomic_store_n(&kernel->loaded[device], 1, __ATOMIC_RELEASE);
  return CUDA_SUCCESS;
}

API CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  REQUIRE_INITIALISED();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(is_kernel(kernel), CUDA_ERROR_INVALID_HANDLE);
  *function = kernel;
  return CUDA_SUCCESS;
}

API CUresult cuFuncLoad(CUfunction function) {
  REQUIRE_INITIALISED();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(is_kernel(function), CUDA_ERROR_INVALID_HANDLE);
  return load_kernel(function, current_context()->device);
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
  int most = model()->sm_shared - model()->reserved_shared;
  REQUIRE(value >= 0 && value + kernel->static_shared <= most, CUDA_ERROR_INVALID_VALUE);
  kernel->max_dynamic_shared[device] = value;
  return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction kernel, int threads, size_t shared) {
  REQUIRE_INITIALISED();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(is_kernel(kernel), CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(threads > 0, CUDA_ERROR_INVALID_VALUE);
  *blocks = resident_blocks(kernel, threads, shared);
  return CUDA_SUCCESS;
}
