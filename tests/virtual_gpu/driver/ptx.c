/* PTX is text: of a kernel we read its name, its launch bounds and its one parameter, as NVRTC writes them. */
#include "virtual_gpu.h"

#include <stdlib.h>
#include <string.h>

void read_ptx(struct Library* library) {
  for (const char* at = (const char*)library->code; (at = strstr(at, ".entry ")) != NULL;) {
    at += strlen(".entry ");
    struct Kernel* kernel = new_kernel(library, at, strcspn(at, "( \n"));
    const char* body = strchr(at, '{');
    const char* size = strchr(at, '[');
    const char* bounds = strstr(at, ".maxntid ");
    if (size && size < body) {
      kernel->parameters = 1;
      kernel->parameter[0].size = kernel->params_bytes = (uint32_t)atoi(size + 1);
    }
    if (bounds && bounds < body) kernel->max_threads = atoi(bounds + strlen(".maxntid "));
    kernel->registers = BLOCK_REGISTERS / kernel->max_threads; /* as many as a block of them may take, at most */
    if (kernel->registers > 255) kernel->registers = 255;
  }
}
