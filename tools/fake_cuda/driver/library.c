/* Machine code loaded at run time. */
#include <elf.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum { MACHINE_CUDA = 190 };

typedef struct Library {
  unsigned char* code;
  size_t bytes;
  Kernel* kernels; /* those that were looked up */
  struct Library* next;
} Library;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Library* libraries;

/* Handles are looked up before they are dereferenced, so that a stale or invalid one is an error and not a crash. */
static int is_library(const void* handle) {
  const Library* library = libraries;
  while (library && library != handle) library = library->next;
  return library != NULL;
}

Kernel* find_kernel(const void* handle) {
  Kernel* found = NULL;
  pthread_mutex_lock(&lock);
  for (Library* library = libraries; library && !found; library = library->next)
    for (Kernel* kernel = library->kernels; kernel && !found; kernel = kernel->next)
      if (kernel == handle) found = kernel;
  pthread_mutex_unlock(&lock);
  return found;
}

static int some_device_has(int arch) {
  for (int device = 0; device < device_count(); device++)
    if (profile_of(device)->arch == arch) return 1;
  return 0;
}

static int some_device_translates(const char* ptx) {
  const char* target = strstr(ptx, "\n.target sm_");
  const int arch = target ? atoi(target + strlen("\n.target sm_")) : 0;
  for (int device = 0; device < device_count(); device++)
    if (arch && arch <= profile_of(device)->arch) return 1;
  return 0;
}

API CUresult cuLibraryLoadData(Library** out, const void* code, void* jit_options, void* jit_values, unsigned jit_count,
                               void* options, void* values, unsigned count) {
  (void)jit_options, (void)jit_values, (void)options, (void)values;
  REQUIRE_INITIALISED();
  REQUIRE(jit_count == 0 && count == 0, CUDA_ERROR_NOT_SUPPORTED);
  REQUIRE(code, CUDA_ERROR_INVALID_IMAGE);
  REQUIRE_SUCCESS(forbidden_while_capturing());
  const Elf64_Ehdr* header = code;
  const int is_cubin = !memcmp(header->e_ident, ELFMAG, SELFMAG);
  if (is_cubin) {
    REQUIRE(header->e_machine == MACHINE_CUDA, CUDA_ERROR_INVALID_IMAGE);
    REQUIRE(some_device_has(cubin_arch(code)), CUDA_ERROR_NO_BINARY_FOR_GPU);
  } else {
    REQUIRE(!memcmp(code, "//", 2) || !memcmp(code, "\n//", 3), CUDA_ERROR_INVALID_IMAGE); /* as NVRTC begins PTX */
    REQUIRE(some_device_translates(code), CUDA_ERROR_INVALID_PTX);
  }
  Library* library = calloc(1, sizeof *library);
  library->bytes = is_cubin ? cubin_bytes(code) : strlen(code) + 1;
  library->code = malloc(library->bytes); /* a copy, as the driver makes one: the caller may free its own */
  memcpy(library->code, code, library->bytes);
  pthread_mutex_lock(&lock);
  library->next = libraries;
  libraries = library;
  pthread_mutex_unlock(&lock);
  *out = library;
  return CUDA_SUCCESS;
}

API CUresult cuLibraryUnload(Library* library) {
  REQUIRE_INITIALISED();
  REQUIRE_SUCCESS(forbidden_while_capturing());
  CUresult result = CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&lock);
  for (Library** at = &libraries; *at; at = &(*at)->next)
    if (*at == library) {
      *at = library->next; /* never freed: captured graphs may still launch its kernels */
      result = CUDA_SUCCESS;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

/* With the lock held. NULL if the library has no such kernel. */
static Kernel* kernel_of(Library* library, const char* name) {
  for (Kernel* kernel = library->kernels; kernel; kernel = kernel->next)
    if (!strcmp(kernel->name, name)) return kernel;
  Kernel found = {.name = name, .code = library->code, .code_bytes = library->bytes, .next = library->kernels};
  if (!read_kernel(&found)) return NULL;
  Kernel* kernel = malloc(sizeof *kernel);
  *kernel = found;
  kernel->name = strdup(name);
  return library->kernels = kernel;
}

API CUresult cuLibraryGetKernel(Kernel** out, Library* library, const char* name) {
  REQUIRE_INITIALISED();
  pthread_mutex_lock(&lock);
  const int is_loaded = is_library(library);
  *out = is_loaded ? kernel_of(library, name) : NULL;
  pthread_mutex_unlock(&lock);
  REQUIRE(is_loaded, CUDA_ERROR_INVALID_HANDLE);
  REQUIRE(*out, CUDA_ERROR_NOT_FOUND);
  return CUDA_SUCCESS;
}
