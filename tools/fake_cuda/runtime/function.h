/* A kernel: of PyTorch or an extension, registered by nvcc's code, or loaded by the driver. */
#ifndef FUNCTION_H
#define FUNCTION_H

#include "fake_cuda.h"

struct Function {
  const void* host; /* the stub that the compiler made, whose address is the kernel's identity; NULL if it was loaded */
  const char* name;
  const void* code;                /* a fat binary, or a cubin */
  int dynamic_shared[MAX_DEVICES]; /* the opt-in, 0 if never set */
  int is_described;
  Description description;
};

Function* find_function(const void* host);
/* Its description is there afterwards, unless the machine code cannot be found. */
cudaError_t described(Function* function);
int max_dynamic_shared(const Function* function, int device);
cudaError_t allow_dynamic_shared(Function* function, int bytes, int device);
/* How many blocks of it a multiprocessor holds at once. */
int resident_blocks(const Function* function, int threads, size_t dynamic_shared, int device);
/* Checks a launch as the GPU's driver would, and hands it over. */
cudaError_t launch(Function* function, dim3 grid, dim3 block, void** parameters, size_t dynamic_shared,
                   cudaStream_t stream, int device);

#endif
