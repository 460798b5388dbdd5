// The second stage of every weight gradient: adds the slices' partial sums in ascending order, always the same, and
// writes them where dw's strides (and db) want them.
//
// Grid: x covers the elements of `partial[slice]`, one thread each, so that all reads are coalesced.
#pragma once

#include "elements.cuh"

namespace polyconv {

template <class Element>
struct ReduceParamsOf {
  const float* partial;  // [slice][group * k][columns_padded]
  Element* dw;
  Element* db;  // null: no bias gradient
  i64 dw_k, dw_channel, dw_row, dw_column;
  i64 elements;  // of one slice
  int slices;
  int columns;  // of dw; column number `columns` is the bias
  FastDivisor columns_padded, kernel_area, kernel_width;
};
struct ReduceParams : ReduceParamsOf<float> {};
struct HalfReduceParams : ReduceParamsOf<Half> {};
struct BFloat16ReduceParams : ReduceParamsOf<BFloat16> {};

template <class Element>
__device__ __forceinline__ void reduce_partials(const ReduceParamsOf<Element>& p) {
  const i64 element = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (element >= p.elements) return;
  const int k = p.columns_padded.quotient(u32(element)), column = int(element) - k * int(p.columns_padded.divisor);
  const bool is_bias = column == p.columns && p.db;
  if (column >= p.columns && !is_bias) return;

  float sum = 0.f;
  const float* from = p.partial + element;
#pragma unroll 4
  for (int slice = 0; slice < p.slices; slice++, from += p.elements) sum += *from;

  if (is_bias) {
    p.db[k] = rounded<Element>(sum);
    return;
  }
  const int channel = p.kernel_area.quotient(column), tap = column - channel * p.kernel_area.divisor;
  const int r = p.kernel_width.quotient(tap), s = tap - r * p.kernel_width.divisor;
  p.dw[k * p.dw_k + channel * p.dw_channel + r * p.dw_row + s * p.dw_column] = rounded<Element>(sum);
}

}  // namespace polyconv
