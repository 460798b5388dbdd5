// Second stage of winograd/wgrad.cuh: adds the slices' partial sums in a fixed order, then transforms them to taps.
//
// winograd_wgrad_sum: one thread per four elements of `partial[slice]`. Slices are added in groups, then the groups, so
// that no element goes through more than about 2 sqrt(slices) sequential additions.
// winograd_wgrad_output: one thread per pair of channels: G^T along W, then along H. Writes dw with its strides and
// classes of taps (of a strided convolution), and adds the partial sums of the bias gradient.
#pragma once

#include "winograd/axis.cuh"

namespace polyconv {

constexpr int kSlicesPerGroup = 8;
constexpr int kMaxTapClasses = 8;

struct WinogradWgradSumParams {
  float* partial;  // [slice][elements]; slice 0 becomes the sum
  i64 elements;
  int slices;
};

struct WinogradWgradOutputParams {
  const float* partial;       // [group][channel tile][product][segment][point][tile_k][tile_c]
  const float* bias_partial;  // [slice][group * outputs]
  float* dw;
  float* db;  // null: no bias gradient
  i64 dw_k, dw_channel;
  int dw_row, dw_column;
  int slices, outputs, all_outputs, pairs;  // outputs of a group, of all groups; pairs of channels
  FastDivisor channels, outputs_divisor;    // of a group
  FastDivisor tile_k, tile_c;
  int k_tiles, channel_tiles;
  FastDivisor classes, classes_w;
  int taps_h[kMaxTapClasses], tap_first_h[kMaxTapClasses];  // of each class; one stride for all
  int taps_w[kMaxTapClasses], tap_first_w[kMaxTapClasses];
  int tap_stride_h, tap_stride_w;
};

__device__ __forceinline__ float4 add4(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ void winograd_wgrad_sum(const WinogradWgradSumParams& p) {
  const i64 element = 4 * (i64(blockIdx.x) * blockDim.x + threadIdx.x);
  if (element >= p.elements) return;
  float* const to = p.partial + element;
  const float* from = to;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int first = 0; first < p.slices; first += kSlicesPerGroup) {
    float4 group = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kSlicesPerGroup; i++) {
      if (first + i < p.slices) group = add4(group, load4(from));
      from += p.elements;
    }
    sum = add4(sum, group);
  }
  store4(to, sum);
}

// Sum of the bias gradient's partial sums of one channel.
__device__ __forceinline__ float sum_of_bias(const WinogradWgradOutputParams& p, int channel) {
  const float* from = p.bias_partial + channel;
  float sum = 0.f;
#pragma unroll 1
  for (int first = 0; first < p.slices; first += kSlicesPerGroup) {
    float group = 0.f;
#pragma unroll
    for (int i = 0; i < kSlicesPerGroup; i++) {
      if (first + i < p.slices) group += *from;
      from += p.all_outputs;
    }
    sum += group;
  }
  return sum;
}

template <class H, class W>
__device__ __forceinline__ void winograd_wgrad_output(const WinogradWgradOutputParams& p) {
  const int pair = blockIdx.x * blockDim.x + threadIdx.x;
  if (p.db && pair < p.all_outputs) p.db[pair] = sum_of_bias(p, pair);
  if (pair >= p.pairs) return;

  const int output = p.channels.quotient(pair), c = pair - output * int(p.channels.divisor);
  const int group = p.outputs_divisor.quotient(output), k = output - group * p.outputs;
  const int k_tile = p.tile_k.quotient(k), c_tile = p.tile_c.quotient(c);
  const int point_size = p.tile_k.divisor * p.tile_c.divisor, product_size = W::kSegments * W::kPoints * point_size;
  const float* from =
      p.partial +
      i64(group * p.channel_tiles + c_tile * p.k_tiles + k_tile) * (H::kSegments * H::kPoints * product_size) +
      (k - k_tile * int(p.tile_k.divisor)) * int(p.tile_c.divisor) + c - c_tile * int(p.tile_c.divisor);

  const int channel = p.classes.quotient(c), number = c - channel * int(p.classes.divisor);
  const int class_h = p.classes_w.quotient(number), class_w = number - class_h * int(p.classes_w.divisor);
  float* const dw = p.dw + output * p.dw_k + channel * p.dw_channel + i64(p.tap_first_h[class_h]) * p.dw_row +
                    i64(p.tap_first_w[class_w]) * p.dw_column;
  const int taps_h = p.taps_h[class_h], taps_w = p.taps_w[class_w];

  // Segment by segment along both axes, so that the values of one pair of segments fit into registers.
#pragma unroll 1
  for (int segment_h = 0; segment_h < H::kSegments; segment_h++) {
#pragma unroll 1
    for (int segment_w = 0; segment_w < W::kSegments; segment_w++) {
      const float* const sums_at = from + segment_w * W::kPoints * point_size;
      float along_w[W::kLongest][H::kPoints];
#pragma unroll
      for (int product = 0; product < H::kPoints; product++) {
        float sums[W::kPoints], taps[W::kLongest];
#pragma unroll
        for (int i = 0; i < W::kPoints; i++) sums[i] = sums_at[product * product_size + i * point_size];
        W::collect(sums, taps);
#pragma unroll
        for (int t = 0; t < W::kLongest; t++) along_w[t][product] = taps[t];
      }
#pragma unroll
      for (int j = 0; j < W::kLongest; j++) {
        float taps[H::kLongest];
        H::collect(along_w[j], taps);
        const int s = W::first_tap(segment_w) + j;
#pragma unroll
        for (int t = 0; t < H::kLongest; t++) {
          const int r = H::first_tap(segment_h) + t;
          if (t < H::taps(segment_h) && j < W::taps(segment_w) && r < taps_h && s < taps_w)
            dw[i64(r * p.tap_stride_h) * p.dw_row + i64(s * p.tap_stride_w) * p.dw_column] = taps[t];
        }
      }
    }
    from += H::kPoints * product_size;
  }
}

}  // namespace polyconv
