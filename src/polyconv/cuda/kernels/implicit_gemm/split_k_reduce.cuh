// Second stage of every weight gradient: adds the slices' partial sums in ascending order, so that results are
// deterministic, and writes them with the strides of dw (and to db).
//
// Grid: x covers the elements of `partial[slice]`, one thread each, so that all reads are coalesced.
#pragma once

#include "common/common.cuh"

namespace polyconv {

struct SplitKReduceParams {
  const float* partial;  // [slice][group * k][columns_padded]
  float* dw;
  float* db;  // null: no bias gradient
  i64 dw_k, dw_channel, dw_row, dw_column;
  i64 elements;  // of one slice
  int slices;
  int columns;  // of dw; column number `columns` is the bias
  FastDivisor columns_padded, kernel_area, kernel_width;
};

// A thread's element: its sum, and its offset in dw, or in db. False if it belongs to neither.
__device__ __forceinline__ bool reduced(const SplitKReduceParams& p, float& sum, i64& place, bool& is_bias) {
  const i64 element = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (element >= p.elements) return false;
  const int k = p.columns_padded.quotient(u32(element)), column = int(element) - k * int(p.columns_padded.divisor);
  is_bias = column == p.columns && p.db;
  if (column >= p.columns && !is_bias) return false;

  sum = 0.f;
  const float* from = p.partial + element;
#pragma unroll 4
  for (int slice = 0; slice < p.slices; slice++, from += p.elements) sum += *from;

  place = k;
  if (is_bias) return true;
  const int channel = p.kernel_area.quotient(column), tap = column - channel * p.kernel_area.divisor;
  const int r = p.kernel_width.quotient(tap), s = tap - r * p.kernel_width.divisor;
  place = k * p.dw_k + channel * p.dw_channel + r * p.dw_row + s * p.dw_column;
  return true;
}

__device__ __forceinline__ void implicit_gemm_split_k_reduce(const SplitKReduceParams& p) {
  float sum;
  i64 place;
  bool is_bias;
  if (reduced(p, sum, place, is_bias)) (is_bias ? p.db : p.dw)[place] = sum;
}

}  // namespace polyconv
