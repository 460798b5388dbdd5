// y += a x on a block's slice of n elements, staged through dynamic shared memory. The smallest kernel that uses every
// part of the launch path: pointers, 64-bit and float parameters, shared memory, more than one block.
#pragma once

#include "common/common.cuh"

namespace example {

struct AxpyParams {
  const float* x;
  float* y;
  long long n;
  float a;
  int stage;  // elements of shared memory in use, at least one per thread
};

template <int kThreads>
__device__ void axpy(const AxpyParams& params) {
  extern __shared__ float staged[];
  const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  const int last = params.stage - 1;
  // Staged in reverse, so that a thread reads what another one wrote.
  staged[last - threadIdx.x] = i < params.n ? params.x[i] : 0.0f;
  __syncthreads();
  if (i < params.n) params.y[i] += params.a * staged[last - threadIdx.x];
}

// y = x.
template <int kThreads>
__device__ void copy(const AxpyParams& params) {
  const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < params.n) params.y[i] = params.x[i];
}

// As axpy, but the last block writes past the end.
template <int kThreads>
__device__ void axpy_past_the_end(const AxpyParams& params) {
  const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  params.y[i] += params.a * (i < params.n ? params.x[i] : 0.0f);
}

// Keeps more values alive than two blocks of 1024 threads leave registers for: the compiler must spill.
template <int kValues>
__device__ void spill(const AxpyParams& params) {
  float value[kValues];
#pragma unroll
  for (int i = 0; i < kValues; i++) value[i] = params.x[i * 37 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int round = 0; round < 3; round++) {
#pragma unroll
    for (int i = 0; i < kValues; i++) value[i] = value[i] * value[(i * 7 + 3) % kValues] + params.a;
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; i++) sum += value[i] * i;
  params.y[threadIdx.x] = sum;
}

// Static shared memory, for the report of resources.
template <int kThreads>
__device__ void swap_neighbours(const AxpyParams& params) {
  __shared__ float staged[2 * kThreads];
  staged[threadIdx.x] = params.x[threadIdx.x];
  __syncthreads();
  params.y[threadIdx.x] = staged[threadIdx.x ^ 1];
}

}  // namespace example
