/* A kernel as the host knows it. */
#ifndef FUNCTION_H
#define FUNCTION_H

#include "pretended.h"

struct Function {
  const void* host; /* the stub that the compiler made; its address is the kernel's identity */
  const char* name;
  const void* fat_binary;
  int dynamic_shared[MAX_DEVICES]; /* the opt-in, 0 if never set */
  int is_described;
  Description description;
};

Function* find_function(const void* host);
/* Its description is there afterwards, unless the machine code cannot be found. */
cudaError_t described(Function* function);
int max_dynamic_shared(const Function* function, int device);

#endif
