/* Machine code that is loaded at run time, and its launches. */
#include <elf.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum {
  MACHINE_CUDA = 190,
  ATTRIBUTE_MAX_THREADS = 0,
  ATTRIBUTE_STATIC_SHARED = 1,
  ATTRIBUTE_LOCAL_BYTES = 3,
  ATTRIBUTE_REGISTERS = 4,
  ATTRIBUTE_DYNAMIC_SHARED = 8,
  ATTRIBUTE_CARVEOUT = 9,
};

typedef struct Kernel {
  Function function;
  struct Kernel* next;
} Kernel;

typedef struct Library {
  unsigned char* code;
  Kernel* kernels; /* those that were asked for */
  struct Library* next;
} Library;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Library* libraries;

/* Handles are looked up, never followed: a stale or invented one is an error and not a crash. */
static Library* find_library(const void* handle) {
  Library* library = libraries;
  while (library && library != handle) library = library->next;
  return library;
}

static Function* find_kernel(const void* handle) {
  Function* found = NULL;
  pthread_mutex_lock(&lock);
  for (Library* library = libraries; library && !found; library = library->next)
    for (Kernel* kernel = library->kernels; kernel && !found; kernel = kernel->next)
      if (kernel == handle) found = &kernel->function;
  pthread_mutex_unlock(&lock);
  return found;
}

/* Its section table comes last. */
static size_t bytes_of(const Elf64_Ehdr* cubin) {
  const size_t sections = cubin->e_shoff + (size_t)cubin->e_shnum * sizeof(Elf64_Shdr);
  const size_t segments = cubin->e_phoff + (size_t)cubin->e_phnum * sizeof(Elf64_Phdr);
  return sections > segments ? sections : segments;
}

API CUresult cuLibraryLoadData(Library** out, const void* code, void* jit_options, void* jit_values, unsigned jit_count,
                               void* options, void* values, unsigned count) {
  (void)jit_options, (void)jit_values, (void)options, (void)values;
  REQUIRE_NO_FAULT();
  REQUIRE(jit_count == 0 && count == 0, cudaErrorNotSupported);
  const Elf64_Ehdr* header = code; /* PTX is refused: nothing here translates it */
  REQUIRE(!memcmp(header->e_ident, ELFMAG, SELFMAG) && header->e_machine == MACHINE_CUDA, cudaErrorInvalidKernelImage);
  REQUIRE_SUCCESS(forbidden_while_capturing());
  const size_t bytes = bytes_of(header);
  Library* library = calloc(1, sizeof *library);
  library->code = malloc(bytes); /* as the driver does: the caller may free its own */
  memcpy(library->code, code, bytes);
  pthread_mutex_lock(&lock);
  library->next = libraries;
  libraries = library;
  pthread_mutex_unlock(&lock);
  *out = library;
  return cudaSuccess;
}

API CUresult cuLibraryUnload(Library* library) {
  REQUIRE_NO_FAULT();
  CUresult result = cudaErrorInvalidResourceHandle;
  pthread_mutex_lock(&lock);
  for (Library** at = &libraries; *at; at = &(*at)->next)
    if (*at == library) {
      *at = library->next; /* kept in memory: captured graphs may still launch its kernels */
      result = cudaSuccess;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

API CUresult cuLibraryGetKernel(Kernel** out, Library* library, const char* name) {
  REQUIRE_NO_FAULT();
  pthread_mutex_lock(&lock);
  const int is_loaded = find_library(library) != NULL;
  Kernel* kernel = is_loaded ? library->kernels : NULL;
  while (kernel && strcmp(kernel->function.name, name)) kernel = kernel->next;
  if (is_loaded && !kernel) {
    kernel = calloc(1, sizeof *kernel);
    kernel->function.name = strdup(name);
    kernel->function.code = library->code;
    kernel->next = library->kernels;
    library->kernels = kernel;
  }
  pthread_mutex_unlock(&lock);
  REQUIRE(is_loaded, cudaErrorInvalidResourceHandle);
  REQUIRE(described(&kernel->function) == cudaSuccess, CUDA_ERROR_NOT_FOUND);
  *out = kernel;
  return cudaSuccess;
}

/* A kernel is a function of every context. */
API CUresult cuKernelGetFunction(const void** function, const void* kernel) {
  REQUIRE_NO_FAULT();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(find_kernel(kernel), cudaErrorInvalidResourceHandle);
  *function = kernel;
  return cudaSuccess;
}

API CUresult cuFuncLoad(const void* function) {
  REQUIRE_NO_FAULT();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  REQUIRE(find_kernel(function), cudaErrorInvalidResourceHandle);
  return forbidden_while_capturing();
}

API CUresult cuKernelGetAttribute(int* value, int attribute, const void* kernel, CUdevice device) {
  REQUIRE_NO_FAULT();
  REQUIRE_DEVICE(device);
  const Function* function = find_kernel(kernel);
  REQUIRE(function, cudaErrorInvalidResourceHandle);
  const Description* d = &function->description;
  const struct {
    int attribute, value;
  } known[] = {
      {ATTRIBUTE_MAX_THREADS, d->max_threads},
      {ATTRIBUTE_STATIC_SHARED, d->static_shared},
      {ATTRIBUTE_LOCAL_BYTES, d->local_bytes},
      {ATTRIBUTE_REGISTERS, d->registers},
      {ATTRIBUTE_DYNAMIC_SHARED, max_dynamic_shared(function, device)},
  };
  *value = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].attribute == attribute) *value = known[i].value;
  return cudaSuccess;
}

API CUresult cuKernelSetAttribute(int attribute, int value, const void* kernel, CUdevice device) {
  REQUIRE_NO_FAULT();
  REQUIRE_DEVICE(device);
  Function* function = find_kernel(kernel);
  REQUIRE(function, cudaErrorInvalidResourceHandle);
  if (attribute == ATTRIBUTE_CARVEOUT) return cudaSuccess;
  REQUIRE(attribute == ATTRIBUTE_DYNAMIC_SHARED, cudaErrorInvalidValue);
  return allow_dynamic_shared(function, value, device);
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads, size_t shared) {
  REQUIRE_NO_FAULT();
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  const Function* function = find_kernel(kernel);
  REQUIRE(function, cudaErrorInvalidResourceHandle);
  *blocks = resident_blocks(function, threads, shared, current_device());
  return cudaSuccess;
}

API CUresult cuLaunchKernel(const void* kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned dynamic_shared, cudaStream_t stream,
                            void** parameters, void** extra) {
  REQUIRE_NO_FAULT();
  REQUIRE(!extra, cudaErrorNotSupported); /* the other way to pass parameters */
  Function* function = find_kernel(kernel);
  int device;
  REQUIRE(function && stream_device(stream, &device), cudaErrorInvalidResourceHandle);
  REQUIRE(current_context(), CUDA_ERROR_INVALID_CONTEXT);
  const dim3 grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
  const CUresult result = launch(function, grid, block, parameters, dynamic_shared, stream, device);
  return result == cudaErrorInvalidConfiguration ? cudaErrorInvalidValue : result;
}
