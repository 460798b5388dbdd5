/* Allocations, copies and fills, each checked against the allocations. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"

enum { PAGE = 4096, ON_HOST = -1 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation* allocations;
static uint64_t length, room;
static size_t used[MAX_DEVICES];

static size_t memory_of(int device) {
  return (size_t)profile_of(device)->memory_gib << 30;
}

static size_t pages(size_t bytes) {
  return (bytes + PAGE - 1) / PAGE * PAGE;
}

/* A page without access follows each allocation, so that no two allocations are neighbours. */
static cudaError_t allocate(void** pointer, size_t bytes, int device) {
  *pointer = NULL;
  if (bytes == 0) return cudaSuccess;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* memory = mmap(NULL, pages(bytes) + PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(memory + pages(bytes), PAGE, PROT_NONE);
  if (is_executing()) memset(memory, 0xFF, bytes);
  pthread_mutex_lock(&lock);
  if (length == room) {
    room = room ? 2 * room : 64;
    allocations = realloc(allocations, room * sizeof *allocations);
  }
  allocations[length++] = (Allocation){(uintptr_t)memory, bytes, device};
  if (device != ON_HOST) used[device] += bytes;
  pthread_mutex_unlock(&lock);
  *pointer = memory;
  return cudaSuccess;
}

static cudaError_t release(void* pointer, int on_host) {
  cudaError_t result = pointer ? cudaErrorInvalidValue : cudaSuccess;
  pthread_mutex_lock(&lock);
  for (uint64_t i = 0; i < length; i++)
    if (pointer && allocations[i].address == (uintptr_t)pointer && (allocations[i].device == ON_HOST) == on_host) {
      if (!on_host) used[allocations[i].device] -= allocations[i].size;
      munmap(pointer, pages(allocations[i].size) + PAGE);
      allocations[i] = allocations[--length];
      result = cudaSuccess;
      break;
    }
  pthread_mutex_unlock(&lock);
  return result;
}

/* Looks up the allocation that contains a range; 0 if there is none. */
static int find(const void* pointer, size_t bytes, Allocation* found) {
  const uint64_t address = (uintptr_t)pointer;
  int is_found = 0;
  pthread_mutex_lock(&lock);
  for (uint64_t i = 0; i < length && !is_found; i++) {
    const Allocation* a = &allocations[i];
    if (address >= a->address && address - a->address < a->size && bytes <= a->size - (address - a->address)) {
      *found = *a;
      is_found = 1;
    }
  }
  pthread_mutex_unlock(&lock);
  return is_found;
}

static int on_device(const void* pointer, size_t bytes) {
  Allocation found;
  return bytes == 0 || (find(pointer, bytes, &found) && found.device != ON_HOST);
}

API uint64_t fake_cuda_allocations(Allocation* found, uint64_t space) {
  pthread_mutex_lock(&lock);
  const uint64_t count = length;
  memcpy(found, allocations, (count < space ? count : space) * sizeof *found);
  pthread_mutex_unlock(&lock);
  return count;
}

API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  REQUIRE_NO_FAULT();
  const int device = working_device();
  REQUIRE(profile_of(device), cudaErrorNoDevice);
  REQUIRE_SUCCESS(forbidden_while_capturing());
  REQUIRE(used[device] + bytes <= memory_of(device), cudaErrorMemoryAllocation);
  COUNT(allocations);
  return failed(allocate(pointer, bytes, device));
}

API cudaError_t cudaFree(void* pointer) {
  REQUIRE_NO_FAULT();
  REQUIRE_SUCCESS(forbidden_while_capturing());
  return failed(release(pointer, 0));
}

API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  (void)flags;
  REQUIRE_NO_FAULT();
  REQUIRE_SUCCESS(forbidden_while_capturing());
  return failed(allocate(pointer, bytes, ON_HOST));
}

API cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  return cudaHostAlloc(pointer, bytes, 0);
}

API cudaError_t cudaFreeHost(void* pointer) {
  REQUIRE_NO_FAULT();
  REQUIRE_SUCCESS(forbidden_while_capturing());
  return failed(release(pointer, 1));
}

API cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  REQUIRE_NO_FAULT();
  const int device = current_device();
  REQUIRE(profile_of(device), cudaErrorNoDevice);
  *total = memory_of(device);
  *available = *total - used[device];
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* pointer) {
  REQUIRE_NO_FAULT();
  memset(attributes, 0, sizeof *attributes);
  Allocation found;
  if (!find(pointer, 1, &found)) {
    attributes->type = cudaMemoryTypeUnregistered;
    return cudaSuccess;
  }
  const int on_host = found.device == ON_HOST;
  attributes->type = on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = on_host ? 0 : found.device;
  attributes->devicePointer = (void*)pointer;
  attributes->hostPointer = on_host ? (void*)pointer : NULL;
  return cudaSuccess;
}

/* ---- copies and fills ---- */

static CUresult copy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  const int to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const int from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (to_device && !on_device(to, bytes)) return cudaErrorInvalidValue;
  if (from_device && !on_device(from, bytes)) return cudaErrorInvalidValue;
  Graph* graph;
  const CUresult result = find_capture(stream, &graph);
  return result == CUDA_SUCCESS ? do_copy(graph, to, from, bytes) : result;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind) {
  REQUIRE_NO_FAULT();
  return failed(copy(to, from, bytes, kind, NULL));
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, enum cudaMemcpyKind kind,
                                cudaStream_t stream) {
  REQUIRE_NO_FAULT();
  return failed(copy(to, from, bytes, kind, stream));
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, size_t bytes,
                                    cudaStream_t stream) {
  REQUIRE_NO_FAULT();
  REQUIRE_DEVICE(to_device);
  REQUIRE_DEVICE(from_device);
  return failed(copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  REQUIRE_NO_FAULT();
  for (size_t row = 0; row < height; row++)
    REQUIRE_SUCCESS(copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width, kind, stream));
  return cudaSuccess;
}

static CUresult fill(void* at, int value, size_t bytes, cudaStream_t stream) {
  if (!on_device(at, bytes)) return cudaErrorInvalidValue;
  Graph* graph;
  const CUresult result = find_capture(stream, &graph);
  return result == CUDA_SUCCESS ? do_fill(graph, at, value, bytes) : result;
}

API cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  REQUIRE_NO_FAULT();
  return failed(fill(at, value, bytes, NULL));
}

API cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  REQUIRE_NO_FAULT();
  return failed(fill(at, value, bytes, stream));
}
