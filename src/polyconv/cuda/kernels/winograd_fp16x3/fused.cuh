// Fused Winograd kernel for few channels (winograd/fused_resident.cuh) on FP16 tensor cores, with FP32 accuracy: the
// transformed source of all channels stays in shared memory as two halves, the weights come split
// (winograd_fp16x3/fused_filter.cuh), and three FP16 products make one FP32 product (winograd_fp16x3/layout.cuh).
//
// A block loads its whole patch before the transform, so its scale (a power of two) is its own, and no absmax launch is
// needed. A warp owns all points along H of one point along W, for half of a tile's written channels and all 32 units:
// rows of a matrix instruction are written channels, columns are units, its depth is a quad of channels. The rest is as
// in winograd/fused_resident.cuh; a channel's scale is undone with its last outputs.
//
// Shared memory:   v[quad of channels][point][unit]   meeting[h][point along W][k of a slice][unit]
// with quads of hi and lo of the first two channels, then of the other two. Grid as in winograd/fused.cuh.
#pragma once

#include "winograd/fused_resident.cuh"
#include "winograd_fp16x3/layout.cuh"

namespace polyconv {

struct Fp16x3FusedParams : FusedParams {
  const u32* largest_filters;              // absmax of every filter
  int headroom_sources, headroom_filters;  // bits by which transformed values may exceed the absmax
};

template <class H, class W, int kColumns, int kChannels>
struct Fp16x3FusedTile : ResidentTile<H, W, kColumns, kChannels> {
  using Base = ResidentTile<H, W, kColumns, kChannels>;
  using Mma = Mma884;
  static constexpr bool kSwaps = true;
  static constexpr int kFragments = Base::kPartK / Mma::kRows;  // of a warp
  // A flight: channels that the tensor cores sum, which truncate. FP32 additions sum the flights.
  static constexpr int kFlights = 2, kQuads = kChannels / kTensorChannels, kOfFlight = kQuads / kFlights;
  static constexpr int kNextQuad = Base::kPoints * Base::kUnits, kNextPoint = W::kPoints * Base::kUnits;  // of V
  static constexpr int kOfPoint = kQuads * Base::kPartK;                     // weights of a warp and a point along H
  static constexpr int kNextWeights = W::kPoints * Base::kParts * kOfPoint;  // of the next point along H
  static constexpr int kWeights = H::kPoints * kNextWeights;                 // of a tile of written channels
  static_assert(kChannels == 2 * Base::kChunk, "the source is loaded in two chunks");
  static_assert(Base::kUnits == Mma::kColumns, "a matrix instruction has all units");
  static_assert(Base::kThreadK == 2 * kFragments, "a lane has two channels of a fragment");
  static_assert(Base::kWarps * 32 == H::kPoints / 2 * (Base::kChunk / 2) * Base::kUnits,
                "a thread transforms two channels of a unit");

  // Offset of the first quad of point (0, w) of written channel k of a tile among its weights. Sums of rows b0 + 2 b1 +
  // 4 b2 of fragment m are in lanes selected by b0 and b2, and in slices selected by b1 and m. So that a slice has one
  // of four neighbouring channels, that row is channel 4 (b0 + 2 b2) + 2 m + b1 of its part.
  static __device__ __forceinline__ int place_of_weight(int w, int k) {
    const int part = k / Base::kPartK, lanes = k % Base::kPartK / 4, slice = k % 4;
    return (w * Base::kParts + part) * kOfPoint + slice / 2 * Mma::kRows + lanes % 2 + slice % 2 * 2 + lanes / 2 * 4;
  }
};

// Absmax of the values that a thread has loaded, as bits.
template <class Tile>
__device__ __forceinline__ u32 largest_of(const PatchLoader<Tile>& patch) {
  u32 largest = 0;
#pragma unroll
  for (int c = 0; c < Tile::kChunk; c++)
#pragma unroll
    for (int i = 0; i < PatchLoader<Tile>::kEach; i++) {
      const u32 bits = __float_as_uint(patch.value[c][i]) & 0x7fffffffu;
      if (bits < 0x7f800000u) largest = max(largest, bits);
    }
  return largest;
}

// Absmax over the threads of a block. `found` is free before and after the next barrier.
template <class Tile>
__device__ __forceinline__ u32 largest_of_block(u32 largest, u32* found) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, apart));
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < Tile::kWarps; warp++) largest = max(largest, found[warp]);
  return largest;
}

// One group of points of two channels of a unit. v: their part of the unit's quad of point 0.
template <class Tile, int kGroup>
__device__ __forceinline__ void transform_pair(const float* patch, u32* v) {
  using W = typename Tile::W;
  float first[Tile::H::kPoints][W::kPoints];
  transform_rows<Tile, kGroup, 0, 2>(patch, [&](int point, const float (&points)[W::kPoints]) {
#pragma unroll
    for (int j = 0; j < W::kPoints; j++) first[point][j] = points[j];
  });
  transform_rows<Tile, kGroup, 0, 2>(patch + Tile::kPatch, [&](int point, const float (&points)[W::kPoints]) {
#pragma unroll
    for (int j = 0; j < W::kPoints; j++) {
      const float both[2] = {first[point][j], points[j]};
      u32 hi[1], lo[1];
      split(both, hi, lo);
      u32* const quad = v + (point * W::kPoints + j) * (4 * Tile::kUnits);
      quad[0] = hi[0], quad[2] = lo[0];
    }
  });
}

// Transforms and splits the patches of a chunk. A warp has a group of points, a quad of channels and half of the units;
// neighbouring lanes have the two halves of a quad.
template <class Tile>
__device__ __forceinline__ void split_chunk(const float* patches, uint4* v) {
  constexpr int kGroups = Tile::H::kPoints / 2, kQuads = Tile::kChunk / 4;
  static_assert(kGroups == 3, "as many as are called below");
  const int thread = fresh_thread(), warp = thread / 32;
  const int group = warp % kGroups, quad = warp / kGroups % kQuads;
  const int unit = warp / (kGroups * kQuads) * 16 + thread % 32 / 2, pair = thread % 2;
  const float* patch = patches + (quad * 4 + pair * 2) * Tile::kPatch +
                       unit / Tile::kUnitsW * Tile::H::kM * Tile::kPatchPitch + unit % Tile::kUnitsW * Tile::W::kM;
  u32* to = reinterpret_cast<u32*>(v + quad * Tile::kNextQuad + unit) + pair;
  if (group == 0) transform_pair<Tile, 0>(patch, to);
  if (group == 1) transform_pair<Tile, 1>(patch, to);
  if (group == 2) transform_pair<Tile, 2>(patch, to);
}

// Loads, scales, transforms and splits the source, all channels. Returns the exponent of its scale.
template <class Tile>
__device__ __forceinline__ int split_all(const Fp16x3FusedParams& p, const FusedBlock<Tile>& block, uint4* v,
                                         float* patches) {
  // All loads at once.
  PatchLoader<Tile> front(p, block);
  front.load(p);
  PatchLoader<Tile> back = front;
  const bool both = p.channels > Tile::kChunk;
  if (both) back.load(p);
  const u32 largest = largest_of_block<Tile>(max(largest_of(front), largest_of(back)), reinterpret_cast<u32*>(v));
  const int exponent = scale_exponent(largest, p.headroom_sources);
  const float scale = power_of_two(exponent);
  auto transform = [&](PatchLoader<Tile>& patch, uint4* to) {
#pragma unroll
    for (int c = 0; c < Tile::kChunk; c++)
#pragma unroll
      for (int i = 0; i < PatchLoader<Tile>::kEach; i++) patch.value[c][i] *= scale;
    patch.store(patches);
    __syncthreads();
    split_chunk<Tile>(patches, to);
    __syncthreads();
  };
  transform(front, v);
  if (both) transform(back, v + Tile::kChunk / 4 * Tile::kNextQuad);
  return exponent;
}

// Factors that undo the scales of the channels that a warp writes. Lane 4 n + slice: channel number n of a slice.
template <class Tile>
struct Fp16x3FusedScales {
  u32 largest;
  float bias, factor, before;
  bool plain;  // one factor is enough for all of them

  // The channels of a tile, of which `k_left` exist. `behind`: end of the group's channels.
  template <class Params>
  __device__ __forceinline__ Fp16x3FusedScales(const Params& p, int k_left, i64 behind) : largest(0), bias(0.f) {
    const int thread = fresh_thread(), lane = thread % 32, first = thread / 32 / Tile::H::kM;
    const int row = first + lane / 4 * ResidentStore<Tile>::kStep, k = row * Tile::kThreadK + lane % 4;
    if (row < Tile::kSliceK && k < k_left) {
      largest = p.largest_filters[behind - k_left + k];
      if (p.bias) bias = p.bias[behind - k_left + k];
    }
  }

  // With the exponent of the source's scale, once the sums are complete.
  __device__ __forceinline__ void prepare(int exponent, int headroom) {
    const int both = -exponent - scale_exponent(largest, headroom), most = min(max(both, -126), 127);
    factor = power_of_two(most), before = power_of_two(both - most);
    plain = __all_sync(~0u, both == most);
  }

  __device__ __forceinline__ void undo(int n, int slice, float (&y)[Tile::W::kM]) const {
    const float last = __shfl_sync(~0u, factor, 4 * n + slice), add = __shfl_sync(~0u, bias, 4 * n + slice);
    if (!plain) {
      const float first = __shfl_sync(~0u, before, 4 * n + slice);
#pragma unroll
      for (int j = 0; j < Tile::W::kM; j++) y[j] *= first;
    }
#pragma unroll
    for (int j = 0; j < Tile::W::kM; j++) y[j] = fmaf(y[j], last, add);
  }
};

template <class Tile, class Params>
__device__ __forceinline__ void winograd_fp16x3_fused(const Params& p) {
  using H = typename Tile::H;
  using W = typename Tile::W;
  using Mma = typename Tile::Mma;
  extern __shared__ __align__(16) float shared[];
  uint4* const quads = reinterpret_cast<uint4*>(shared);
  float* const meeting = shared + Tile::kChannels * Tile::kV;
  const FusedBlock<Tile> block(p, blockIdx.x, blockIdx.y);
  if (block.is_outside(p)) return;

  // Blocks begin with different tiles of channels, as in winograd/fused_resident.cuh.
  const u32 turn = blockIdx.x / Tile::kTogether % p.k_tiles_each;
  int k_tile = turn < u32(block.k_tiles) ? turn : 0;
  const ResidentPlace<Tile> start(threadIdx.x);
  const uint4* weights = reinterpret_cast<const uint4*>(p.weights) + Mma::row_of_a(threadIdx.x % 32) +
                         (start.point * Tile::kParts + start.k / Tile::kPartK) * Tile::kOfPoint +
                         (i64(block.group) * p.k_tiles + block.first_k_tile + k_tile) * Tile::kWeights;
  uint4 u[Tile::kFlights][Tile::kOfFlight][Tile::kFragments];  // one point along H ahead
  auto load_weights = [&](int h, int flight) {
#pragma unroll
    for (int quad = 0; quad < Tile::kOfFlight; quad++)
#pragma unroll
      for (int m = 0; m < Tile::kFragments; m++)
        u[flight][quad][m] =
            __ldg(weights + h * Tile::kNextWeights + (flight * Tile::kOfFlight + quad) * Tile::kPartK + m * Mma::kRows);
  };
#pragma unroll
  for (int flight = 0; flight < Tile::kFlights; flight++) load_weights(0, flight);
  const int exponent = split_all<Tile>(p, block, quads, meeting);

  ResidentStore<Tile> store(p, block);
  store.corner += k_tile * Tile::kK * p.written_channel;
  const uint4* const own = quads + start.point * Tile::kUnits + threadIdx.x % 32;
#pragma unroll 1
  for (int tiles = block.k_tiles; tiles > 0; tiles--) {
    const int k_left = p.outputs - (block.first_k_tile + k_tile) * Tile::kK;
    const bool last = ++k_tile == block.k_tiles;  // the first tile follows
    Fp16x3FusedScales<Tile> scales(p, k_left, (fresh_block_y() + 1) * i64(p.outputs));
    float sum[H::kPoints][Tile::kFragments][Mma::kSums];
#pragma unroll
    for (int h = 0; h < H::kPoints; h++)
#pragma unroll
      for (int flight = 0; flight < Tile::kFlights; flight++) {
        if (flight > 0 && p.channels <= Tile::kChunk) break;
        const uint4(&rows)[Tile::kOfFlight][Tile::kFragments] = u[flight];
        float recent[Tile::kFragments][Mma::kSums];
        uint4 v[Tile::kOfFlight];
#pragma unroll
        for (int quad = 0; quad < Tile::kOfFlight; quad++)
          v[quad] = own[h * Tile::kNextPoint + (flight * Tile::kOfFlight + quad) * Tile::kNextQuad];
#pragma unroll
        for (int m = 0; m < Tile::kFragments; m++)
#pragma unroll
          for (int i = 0; i < Mma::kSums; i++) recent[m][i] = 0.f;
      // All small products come first: a sum is then truncated as if it had the large ones alone.
#pragma unroll
        for (int quad = 0; quad < Tile::kOfFlight; quad++)
#pragma unroll
          for (int product = 0; product < 2; product++)
#pragma unroll
            for (int m = 0; m < Tile::kFragments; m++) {
              const uint4 a = rows[quad][m], b = v[quad];
              Mma::multiply_add(recent[m], product == 0 ? make_uint2(a.z, a.w) : make_uint2(a.x, a.y),
                                product == 1 ? make_uint2(b.z, b.w) : make_uint2(b.x, b.y));
            }
#pragma unroll
        for (int quad = 0; quad < Tile::kOfFlight; quad++)
#pragma unroll
          for (int m = 0; m < Tile::kFragments; m++) {
            const uint4 a = rows[quad][m], b = v[quad];
            Mma::multiply_add(recent[m], make_uint2(a.x, a.y), make_uint2(b.x, b.y));
          }
        if (h + 1 < H::kPoints) load_weights(h + 1, flight);
#pragma unroll
        for (int m = 0; m < Tile::kFragments; m++)
#pragma unroll
          for (int i = 0; i < Mma::kSums; i++) sum[h][m][i] = flight == 0 ? recent[m][i] : sum[h][m][i] + recent[m][i];
      }
    weights += Tile::kWeights;
    if (last) weights -= i64(block.k_tiles) * Tile::kWeights;

    scales.prepare(exponent, p.headroom_filters);
    const int lane = fresh_thread() % 32;
    const ResidentPlace<Tile> place(fresh_thread());
    // A lane's rows of a slice, with the halves of every second one swapped.
    float* const row = meeting + place.point * Tile::kSlice +
                       (place.k / Tile::kPartK * 4 + lane % 2 + lane / 16 * 2) * Tile::kUnits +
                       (lane / 4 % 4 * 4 + (lane & 2));
    float* const halves[2] = {row + lane % 2 * 16, row + (1 - lane % 2) * 16};
#pragma unroll
    for (int slice = 0; slice < Tile::kThreadK; slice++) {
      float rows[4][H::kM];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float points[H::kPoints];
#pragma unroll
        for (int h = 0; h < H::kPoints; h++) points[h] = sum[h][slice / 2][slice % 2 * 2 + j / 2 * 4 + j % 2];
        H::output(points, rows[j]);
      }
#pragma unroll
      for (int h = 0; h < H::kM; h++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          *reinterpret_cast<float2*>(halves[half] + h * W::kPoints * Tile::kSlice) =
              make_float2(rows[2 * half][h], rows[2 * half + 1][h]);
      __syncthreads();
      store.write(p, meeting, k_left - slice - int(fresh_thread()) / (32 * H::kM) * Tile::kThreadK,
                  [&](int n, float (&y)[W::kM]) { scales.undo(n, slice, y); });
      store.corner += p.written_channel;
      __syncthreads();
      // Weights of the next tile, into registers that are free by now.
      if (slice >= Tile::kThreadK - Tile::kFlights) load_weights(0, slice - (Tile::kThreadK - Tile::kFlights));
    }
    store.corner += (Tile::kK - Tile::kThreadK) * p.written_channel;
    if (last) {
      store.corner -= block.k_tiles * Tile::kK * p.written_channel;
      k_tile = 0;
    }
  }
}

}  // namespace polyconv
