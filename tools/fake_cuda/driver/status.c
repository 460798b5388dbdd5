/* Names of statuses, and calls that fail on request. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"

static const struct {
  int code;
  const char *name, *runtime_name, *text;
} statuses[] = {
#define ROW(number, name, runtime_name, text) {number, #name, #runtime_name, text},
    STATUSES(ROW)};

static int find(CUresult code) {
  for (unsigned i = 0; i < sizeof statuses / sizeof *statuses; i++)
    if (statuses[i].code == code) return (int)i;
  return -1;
}

const char* status_text(CUresult status, int is_runtime_name) {
  const int at = find(status);
  return at < 0 ? NULL : is_runtime_name ? statuses[at].runtime_name : statuses[at].text;
}

API CUresult cuGetErrorName(CUresult code, const char** name) {
  const int at = find(code);
  *name = at < 0 ? NULL : statuses[at].name;
  return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult code, const char** text) {
  *text = status_text(code, 0);
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- injected faults ---- */

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static char failing[64];
static int before, left, with, faults;

API void fake_cuda_fail(const char* function, int nth, int count, int code) {
  pthread_mutex_lock(&guard);
  snprintf(failing, sizeof failing, "%s", function ? function : "");
  before = nth - 1;
  left = count;
  with = code;
  faults = 0;
  pthread_mutex_unlock(&guard);
}

API int fake_cuda_faults(void) {
  return __atomic_load_n(&faults, __ATOMIC_SEQ_CST);
}

CUresult fault_of(const char* function) {
  if (!__atomic_load_n(&failing[0], __ATOMIC_RELAXED)) return CUDA_SUCCESS; /* the usual case, without the lock */
  CUresult fault = CUDA_SUCCESS;
  pthread_mutex_lock(&guard);
  if (!strcmp(function, failing) && before-- <= 0 && left > 0) {
    left--;
    faults++;
    fault = with;
  }
  pthread_mutex_unlock(&guard);
  return fault;
}
