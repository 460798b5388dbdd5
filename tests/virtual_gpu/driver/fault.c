/* Calls that fail because a test wants them to. */
#include "virtual_gpu.h"

#include <stdio.h>
#include <string.h>

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static char failing[64];
static int before, left, with, failed;

API void virtual_gpu_fail(const char* function, int nth, int count, int code) {
  pthread_mutex_lock(&guard);
  snprintf(failing, sizeof failing, "%s", function ? function : "");
  before = nth - 1;
  left = count;
  with = code;
  failed = 0;
  pthread_mutex_unlock(&guard);
}

API int virtual_gpu_faults(void) {
  return __atomic_load_n(&failed, __ATOMIC_SEQ_CST);
}

CUresult fault_of(const char* function) {
  CUresult fault = CUDA_SUCCESS;
  pthread_mutex_lock(&guard);
  if (!strcmp(function, failing) && before-- <= 0 && left > 0) {
    left--;
    failed++;
    fault = (CUresult)with;
  }
  pthread_mutex_unlock(&guard);
  return fault;
}
