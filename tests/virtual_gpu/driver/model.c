/* The GPUs that this one can be. Limits from the CUDA programming guide's table of compute capabilities. */
#include "virtual_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SM_70 2048, 32, 96 << 10, 0, 256
#define SM_75 1024, 16, 64 << 10, 0, 256
#define SM_80 2048, 32, 164 << 10, 1024, 128
#define SM_86 1536, 16, 100 << 10, 1024, 128
#define SM_87 1536, 16, 164 << 10, 1024, 128
#define SM_89 1536, 24, 100 << 10, 1024, 128
#define SM_90 2048, 32, 228 << 10, 1024, 128

static const struct Model models[] = {
    {"v100", "Virtual Tesla V100-SXM2-16GB", 70, 80, 1530, 6, 877, 4096, SM_70},
    {"t4", "Virtual Tesla T4", 75, 40, 1590, 4, 5001, 256, SM_75},
    {"a100", "Virtual A100-SXM4-40GB", 80, 108, 1410, 40, 1215, 5120, SM_80},
    {"a30", "Virtual A30", 80, 56, 1440, 24, 1215, 3072, SM_80},
    {"rtx3090", "Virtual GeForce RTX 3090", 86, 82, 1695, 6, 9751, 384, SM_86},
    {"a10", "Virtual A10", 86, 72, 1695, 6, 6251, 384, SM_86},
    {"orin", "Virtual Orin", 87, 16, 1300, 4, 3200, 256, SM_87},
    {"rtx4090", "Virtual GeForce RTX 4090", 89, 128, 2520, 72, 10501, 384, SM_89},
    {"l40s", "Virtual L40S", 89, 142, 2520, 96, 9001, 384, SM_89},
    {"l4", "Virtual L4", 89, 58, 2040, 48, 6251, 192, SM_89},
    {"h100", "Virtual H100 80GB HBM3", 90, 132, 1980, 50, 2619, 5120, SM_90},
    {"b200", "Virtual B200", 100, 148, 1850, 126, 3996, 8192, SM_90},
    {"b300", "Virtual B300", 103, 148, 1850, 126, 3996, 8192, SM_90},
    {"rtx5090", "Virtual GeForce RTX 5090", 120, 170, 2407, 96, 14001, 512, SM_89},
    /* Integrated: the driver reports neither clocks of the memory nor the width of its bus. */
    {"gb10", "Virtual GB10", 121, 48, 2418, 24, 0, 0, SM_89},
    /* One that no compiler of today knows. */
    {"unborn", "Virtual GPU of tomorrow", 190, 200, 2000, 128, 4000, 8192, SM_90},
};

const struct Model* model(void) {
  const char* wanted = getenv("VIRTUAL_GPU_MODEL");
  for (unsigned i = 0; i < sizeof models / sizeof *models; i++)
    if (!strcmp(models[i].key, wanted ? wanted : "v100")) return &models[i];
  fprintf(stderr, "no virtual GPU is called %s\n", wanted);
  abort();
}

/* Shared memory is given to blocks in whole units, registers to whole warps, 8 per thread at a time, from the quarter
 * of them that a warp's scheduler has. */
int resident_blocks(CUkernel kernel, int threads, size_t dynamic_shared) {
  const struct Model* gpu = model();
  int warps = (threads + 31) / 32, of_warp = (kernel->registers + 7) / 8 * 8 * 32;
  int most = gpu->sm_blocks;
  if (most > gpu->sm_threads / 32 / warps) most = gpu->sm_threads / 32 / warps;
  if (of_warp && most > 4 * (SM_REGISTERS / 4 / of_warp) / warps) most = 4 * (SM_REGISTERS / 4 / of_warp) / warps;
  int taken = kernel->static_shared + (int)dynamic_shared + gpu->reserved_shared;
  taken = (taken + gpu->shared_unit - 1) / gpu->shared_unit * gpu->shared_unit;
  if (taken && most > gpu->sm_shared / taken) most = gpu->sm_shared / taken;
  return most;
}
