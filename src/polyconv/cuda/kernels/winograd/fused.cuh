// fprop and dgrad by 2-D Cook-Toom tiles in one kernel, without a transformed tensor in memory:
//   written = bias + A_h^T [ sum over channels c of  U_c * (B_h^T x_c B_w) ] A_w
//
// A unit is one tile of H::kM x W::kM outputs. A block owns 32 columns (32 / W::kM units side by side, several above
// one another) and loops over the written channels in tiles of kK. A point of the transform is an independent matrix
// product, units x channels; a lane owns kEach points with kThreadK x kThreadU sums of each. Then the sums of all
// points are exchanged, a few channels at a time, and the inverse transform yields rows of 32 outputs.
//
// Shared memory: two buffers of   v[kChunk][point][unit]   patch[kChunk][row][column]
// A step multiplies chunk i (v of one buffer), transforms the patch of chunk i + 1 into the other buffer's v, and loads
// the patch of chunk i + 2 into registers: one barrier per step. The first chunk follows the last one, for the next
// tile of channels, so that its loads are already in flight. Behind the buffers:
//   exchange[point][k of a slice][unit], units swizzled;   a warp's own part of it then stages its rows of outputs.
//
// Grid: x = (((image * tiles of rows) + row tile) * tiles of columns + column tile) * k splits + k split, y = group.
// A dilated axis has a tile per residue of the dilation: tile = first position / positions * dilation + residue.
#pragma once

#include "common/epilogue.cuh"
#include "winograd/axis.cuh"

namespace polyconv {

// Position i = residue + dilation * q of an axis is written at written_first + i * written_step, and its tap t reads
// read_first + (i + dilation * t) * read_step (algebra/polyphase.py).
struct FusedAxis {
  int written_first, written_step, read_first, read_step, count;
  FastDivisor dilation, tiles;
};

struct FusedParams {
  const float* source;
  const float* weights;  // from winograd/fused_filter.cuh: [group][k tile][channel][point and k]
  const float* bias;
  float* written;
  i64 source_batch, source_channel, written_batch, written_channel;
  i64 source_channel_bytes, source_rewind_bytes;  // to the next channel; from behind the last chunk to the first
  i64 patch_step_bytes;                           // between the rows that a thread reads
  // winograd/fused_resident.cuh: to the next 32 columns, between rows of a warp, between channels of a warp
  i64 across_bytes, down_bytes, job_bytes;
  int source_row, source_column, written_row, written_column, source_height, source_width;
  int channels, channels_padded, outputs;
  int k_tiles, k_tiles_each;  // tiles of k of all blocks, of one block
  int pairs;                  // winograd/fused_resident.cuh: neighbouring columns may be stored two at a time
  FastDivisor k_splits;       // blocks that share the tiles of k
  FusedAxis h, w;
};

// kEach: points per lane. kChunk: channels per step. kMeet: how many of a lane's kThreadK channels meet at a time.
template <class H_, class W_, int kLanesK_, int kLanesU_, int kThreadK_, int kThreadU_, int kEach_, int kChunk_,
          int kMeet_>
struct FusedTile {
  using H = H_;
  using W = W_;
  static constexpr int kLanesK = kLanesK_, kLanesU = kLanesU_, kThreadK = kThreadK_, kThreadU = kThreadU_;
  static constexpr int kEach = kEach_, kChunk = kChunk_;
  static constexpr int kLanesPoint = 32 / (kLanesK * kLanesU);
  static constexpr int kPoints = H::kPoints * W::kPoints;
  static constexpr int kWarps = kPoints / (kLanesPoint * kEach), kThreads = 32 * kWarps;
  static constexpr int kK = kLanesK * kThreadK, kUnits = kLanesU * kThreadU;
  static constexpr int kColumns = 32, kUnitsW = kColumns / W::kM, kUnitsH = kUnits / kUnitsW;
  static constexpr int kRows = kUnitsH * H::kM;  // of outputs
  static constexpr int kPatchRows = kRows + H::kLongest - 1;
  static constexpr int kPatchPitch = (kColumns + W::kLongest - 1 + 3) / 4 * 4;
  static constexpr int kPatch = kPatchRows * kPatchPitch;
  static constexpr int kPitchV = kUnits + 8;  // units of neighbouring points are in different banks
  static constexpr int kV = kChunk * kPoints * kPitchV;
  static constexpr int kBuffer = kV + kChunk * kPatch;
  static constexpr int kMeet = kMeet_, kSliceK = kMeet * kLanesK;  // channels of a slice
  static constexpr int kExchange = kPoints * kSliceK * kUnits;
  static_assert(kPoints % (kLanesPoint * kEach) == 0, "every lane has a point");
  static_assert(kThreadK % 4 == 0 && kThreadU % 4 == 0, "sums come in groups of four");
  static_assert(kUnits % 32 == 0 && kUnits % kUnitsW == 0 && 32 % kUnitsW == 0, "a warp owns whole rows of units");
  static_assert(kPoints >= 32 / kUnitsW * H::kM, "a warp's rows of outputs fit where its points were");
};

__device__ __forceinline__ int fused_position(const FusedAxis& axis, int residue, int q) {
  return residue + int(axis.dilation.divisor) * q;
}

// Work of a block: its image, first positions and residues along both axes, its tiles of written channels.
template <class Tile>
struct FusedBlock {
  int image, group, first_k_tile, k_tiles;
  int residue_h, residue_w;
  int first_h, first_w;  // q of the first output

  __device__ __forceinline__ FusedBlock(const FusedParams& p, u32 block, u32 group_) : group(group_) {
    const u32 tile = p.k_splits.quotient(block);
    first_k_tile = (block - tile * p.k_splits.divisor) * p.k_tiles_each;
    k_tiles = min(p.k_tiles_each, p.k_tiles - first_k_tile);
    const u32 row_tile = p.w.tiles.quotient(tile), column_tile = tile - row_tile * p.w.tiles.divisor;
    image = p.h.tiles.quotient(row_tile);
    const u32 of_image = row_tile - image * p.h.tiles.divisor;
    const u32 h = p.h.dilation.quotient(of_image), w = p.w.dilation.quotient(column_tile);
    residue_h = of_image - h * p.h.dilation.divisor;
    residue_w = column_tile - w * p.w.dilation.divisor;
    first_h = h * Tile::kRows;
    first_w = w * Tile::kColumns;
  }

  // Residues of the dilation differ in length; the grid is made for the longest.
  __device__ __forceinline__ bool is_outside(const FusedParams& p) const {
    return fused_position(p.h, residue_h, first_h) >= p.h.count || fused_position(p.w, residue_w, first_w) >= p.w.count;
  }
};

__device__ __forceinline__ int fused_read(const FusedAxis& axis, int residue, int q) {
  return axis.read_first + axis.read_step * fused_position(axis, residue, q);
}

// Loads the block's patch of the source into shared memory, one channel at a time; zeros outside the image. A thread
// has one column and every kStride-th row, so that one pointer and one row step suffice.
template <class Tile>
struct PatchLoader {
  static constexpr int kStride = Tile::kThreads / Tile::kPatchPitch;
  static constexpr int kEach = (Tile::kPatchRows + kStride - 1) / kStride;
  const float* at;
  u32 inside;  // bit i: row number i of this thread is in the image
  int left;    // channels from here to the last
  float value[Tile::kChunk][kEach];

  __device__ __forceinline__ PatchLoader(const FusedParams& p, const FusedBlock<Tile>& block)
      : inside(0), left(p.channels) {
    const int row = int(threadIdx.x) / Tile::kPatchPitch, column = int(threadIdx.x) % Tile::kPatchPitch;
    const int y = fused_read(p.h, block.residue_h, block.first_h + row);
    const int x = fused_read(p.w, block.residue_w, block.first_w + column);
    const int step = p.h.read_step * int(p.h.dilation.divisor) * kStride;
    at = p.source + block.image * p.source_batch + i64(block.group) * p.channels * p.source_channel +
         i64(y) * p.source_row + i64(x) * p.source_column;
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (row < kStride && row + i * kStride < Tile::kPatchRows && u32(x) < u32(p.source_width) &&
          u32(y + i * step) < u32(p.source_height))
        inside |= 1u << i;
  }

  // The next chunk, with zeros for missing channels. After the last chunk the first again, for the next tile of k.
  __device__ __forceinline__ void load(const FusedParams& p) {
#pragma unroll
    for (int c = 0; c < Tile::kChunk; c++) {
      const float* from = at;
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        value[c][i] = c < left && (inside >> i & 1) ? *from : 0.f;
        from = add_bytes(from, p.patch_step_bytes);
      }
      at = add_bytes(at, p.source_channel_bytes);
    }
    left -= Tile::kChunk;
    if (left <= 0) {
      left = p.channels;
      at = add_bytes(at, p.source_rewind_bytes);
    }
  }

  __device__ __forceinline__ void store(float* patches) const {
    const int thread = fresh_thread();
    if (thread >= kStride * Tile::kPatchPitch) return;
    float* to = patches + thread;
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if ((i + 1) * kStride <= Tile::kPatchRows || thread < (Tile::kPatchRows - i * kStride) * Tile::kPatchPitch)
#pragma unroll
        for (int c = 0; c < Tile::kChunk; c++) to[c * Tile::kPatch + i * kStride * Tile::kPatchPitch] = value[c][i];
  }
};

// A group of H points: +p and -p, which share most of their arithmetic, or 0 and infinity, which do not.
template <class H>
__device__ __forceinline__ constexpr int grouped_point(int group, int i) {
  return group < H::kPoints / 2 - 1 ? 1 + 2 * group + i : i * (H::kPoints - 1);
}

// Points kFirst to kLast - 1 of a group, for one unit. Calls `use` with every point along H and all points along W.
template <class Tile, int kGroup, int kFirst, int kLast, class Use>
__device__ __forceinline__ void transform_rows(const float* patch, Use use) {
  using H = typename Tile::H;
  using W = typename Tile::W;
  constexpr int kWidth = (W::kSpan + W::kM - 1) / W::kM * W::kM;
  float x[W::kSpan][H::kSpan];
#pragma unroll
  for (int row = 0; row < H::kSpan; row++) {  // the compiler drops rows that these points do not need
    float line[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; j += W::kM) {
      const float* at = patch + row * Tile::kPatchPitch + j;
      if constexpr (W::kM == 4) {
        const float4 four = load4(at);
        line[j] = four.x, line[j + 1] = four.y, line[j + 2] = four.z, line[j + 3] = four.w;
      } else {
        const float2 two = *reinterpret_cast<const float2*>(at);
        line[j] = two.x, line[j + 1] = two.y;
      }
    }
#pragma unroll
    for (int j = 0; j < W::kSpan; j++) x[j][row] = line[j];
  }
  float along_h[H::kPoints][W::kSpan];
#pragma unroll
  for (int j = 0; j < W::kSpan; j++) {
    float points[H::kPoints];
    H::input(x[j], points);
#pragma unroll
    for (int i = 0; i < H::kPoints; i++) along_h[i][j] = points[i];
  }
#pragma unroll
  for (int i = kFirst; i < kLast; i++) {
    const int point = grouped_point<H>(kGroup, i);
    float points[W::kPoints];
    W::input(along_h[point], points);
    use(point, points);
  }
}

// transform_rows, stored to v[point][unit].
template <class Tile, int kGroup, int kFirst, int kLast>
__device__ __forceinline__ void transform_points(const float* patch, float* v) {
  using W = typename Tile::W;
  transform_rows<Tile, kGroup, kFirst, kLast>(patch, [&](int point, const float (&points)[W::kPoints]) {
#pragma unroll
    for (int j = 0; j < W::kPoints; j++) v[(point * W::kPoints + j) * Tile::kPitchV] = points[j];
  });
}

template <class Tile, int kGroup>
__device__ __forceinline__ void transform_unit(const float* patch, float* v) {
  if constexpr (kGroup < Tile::H::kPoints / 2 - 1) {
    transform_points<Tile, kGroup, 0, 2>(patch, v);
  } else {  // one after the other: the accumulators leave no registers for both
    transform_points<Tile, kGroup, 0, 1>(patch, v);
    asm volatile("" ::: "memory");
    transform_points<Tile, kGroup, 1, 2>(patch, v);
  }
}

// Transforms the patches of a chunk. A warp takes 32 units of one channel and one group of points at a time.
template <class Tile>
__device__ __forceinline__ void transform_chunk(const float* patches, float* v) {
  constexpr int kGroups = Tile::H::kPoints / 2, kJobs = kGroups * Tile::kChunk * (Tile::kUnits / 32);
  const int thread = fresh_thread(), lane = thread % 32;
#pragma unroll
  for (int first = 0; first < kJobs; first += Tile::kWarps) {
    const int job = first + thread / 32;
    if (kJobs % Tile::kWarps != 0 && job >= kJobs) return;
    const int group = job % kGroups, rest = job / kGroups;
    const int c = rest % Tile::kChunk, unit = rest / Tile::kChunk * 32 + lane;
    const float* patch = patches + c * Tile::kPatch + unit / Tile::kUnitsW * Tile::H::kM * Tile::kPatchPitch +
                         unit % Tile::kUnitsW * Tile::W::kM;
    float* to = v + c * Tile::kPoints * Tile::kPitchV + unit;
    if (group == 0) transform_unit<Tile, 0>(patch, to);
    if constexpr (kGroups > 1)
      if (group == 1) transform_unit<Tile, 1>(patch, to);
    if constexpr (kGroups > 2)
      if (group == 2) transform_unit<Tile, 2>(patch, to);
  }
}

// A thread's first point, channel and unit.
template <class Tile>
struct FusedPlace {
  int point, k, unit;

  __device__ __forceinline__ explicit FusedPlace(u32 thread) {
    const int lane = thread % 32;
    point = (thread / 32 * Tile::kLanesPoint + lane / (Tile::kLanesK * Tile::kLanesU)) * Tile::kEach;
    k = lane / Tile::kLanesU % Tile::kLanesK * 4;
    unit = lane % Tile::kLanesU * 4;
  }
  static __device__ __forceinline__ constexpr int offset_k(int i) { return (i / 4) * Tile::kLanesK * 4 + i % 4; }
  static __device__ __forceinline__ constexpr int offset_unit(int j) { return (j / 4) * Tile::kLanesU * 4 + j % 4; }
};

// Transformed weights of a thread's points and channels. No other warp needs them, so they come straight from memory,
// in a layout that makes a warp's loads consecutive. A used quad is replaced by that of the next channel.
template <class Tile>
struct WeightStream {
  static constexpr int kQuads = Tile::kThreadK / 4, kLine = Tile::kLanesPoint * Tile::kLanesK * 4;
  const float* at;
  float4 quad[Tile::kEach][kQuads];

  __device__ __forceinline__ WeightStream(const FusedParams& p, const FusedBlock<Tile>& block) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 first = (i64(block.group) * p.k_tiles + block.first_k_tile) * p.channels_padded;
    at =
        p.weights + first * (Tile::kPoints * Tile::kK) + warp * Tile::kEach * kQuads * kLine + lane / Tile::kLanesU * 4;
#pragma unroll
    for (int point = 0; point < Tile::kEach; point++)
#pragma unroll
      for (int i = 0; i < kQuads; i++) load(point, i);
    at += Tile::kPoints * Tile::kK;
  }
  __device__ __forceinline__ void load(int point, int i) { quad[point][i] = load4(at + (point * kQuads + i) * kLine); }
};

template <class Tile>
struct PointSums {
  float sum[Tile::kEach][Tile::kThreadK][Tile::kThreadU];

  // One channel. v points at this thread's first point and unit.
  __device__ __forceinline__ void multiply_add(const float* v, WeightStream<Tile>& weights) {
#pragma unroll
    for (int point = 0; point < Tile::kEach; point++) {
      float column[Tile::kThreadU];
#pragma unroll
      for (int j = 0; j < Tile::kThreadU; j += 4) {
        const float4 four = load4(v + point * Tile::kPitchV + FusedPlace<Tile>::offset_unit(j));
        column[j] = four.x, column[j + 1] = four.y, column[j + 2] = four.z, column[j + 3] = four.w;
      }
#pragma unroll
      for (int q = 0; q < WeightStream<Tile>::kQuads; q++) {
        const float4 four = weights.quad[point][q];
        const float row[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int j = 0; j < Tile::kThreadU; j++) {
            float& s = sum[point][q * 4 + i][j];
            s = fmaf(row[i], column[j], s);
          }
        weights.load(point, q);
      }
    }
    weights.at += Tile::kPoints * Tile::kK;
  }
};

// Neighbouring lanes of k would hit the same banks: every other one's units are rotated by half.
__device__ __forceinline__ int swizzled(int k, int unit) {
  return unit ^ ((k & 1) << 4);
}

// Store address of a lane: column number `lane` of the block's first row, in the first channel of a tile of k.
template <class Tile>
struct FusedStore {
  float* corner;
  i64 row_step;  // bytes
  int rows, k;   // rows and written channels from there to the end
  const float* bias;
  bool inside;

  __device__ __forceinline__ FusedStore(const FusedParams& p, int k_left) {
    const FusedBlock<Tile> block(p, fresh_block_x(), fresh_block_y());
    const int lane = fresh_thread() % 32;
    const int i = fused_position(p.h, block.residue_h, block.first_h);
    const int j = fused_position(p.w, block.residue_w, block.first_w + lane);
    const int first_k = (block.first_k_tile + block.k_tiles - k_left) * Tile::kK;
    const i64 first = i64(block.group) * p.outputs + first_k;
    inside = j < p.w.count;
    rows = p.h.dilation.quotient(p.h.count - i + int(p.h.dilation.divisor) - 1);
    k = p.outputs - first_k;
    bias = p.bias ? p.bias + first : nullptr;
    row_step = i64(p.h.written_step) * int(p.h.dilation.divisor) * p.written_row * 4;
    corner = p.written + block.image * p.written_batch + first * p.written_channel +
             i64(p.h.written_first + i * p.h.written_step) * p.written_row +
             i64(p.w.written_first + j * p.w.written_step) * p.written_column;
  }
};

// Stores one column of kRows rows of outputs per lane, read kStep elements apart and written `row_bytes` apart.
template <int kRows, int kStep, class Params>
__device__ __forceinline__ void store_rows(const Params& p, const float* from, int lane, float* to, i64 row_bytes) {
  if constexpr (EpilogueOf<Params>::kExists) {
    float values[kRows] = {};
    if constexpr (EpilogueOf<Params>::kResidual) {
      // All residuals before the first store, so that the loads overlap.
      const float* at = add_bytes(to, p.residual_bytes());
#pragma unroll
      for (int row = 0; row < kRows; row++, at = add_bytes(at, row_bytes)) values[row] = p.residual ? *at : 0.f;
    }
#pragma unroll
    for (int row = 0; row < kRows; row++) values[row] += from[row * kStep + lane];
    activate(values, p);
#pragma unroll
    for (int row = 0; row < kRows; row++, to = add_bytes(to, row_bytes)) *to = values[row];
  } else {
#pragma unroll
    for (int row = 0; row < kRows; row++) {
      *to = from[row * kStep + lane];
      to = add_bytes(to, row_bytes);
    }
  }
}

// Inverse transform of one slice of channels. A warp takes 32 units of one channel at a time, stages their outputs as
// rows of 32 in memory that only it reads, and stores them row by row.
template <class Tile, class Params>
__device__ __forceinline__ void write_slice(float* exchange, const Params& p, const FusedStore<Tile>& store,
                                            int first) {
  using H = typename Tile::H;
  using W = typename Tile::W;
  constexpr int kPointStep = Tile::kSliceK * Tile::kUnits, kJobs = Tile::kSliceK * (Tile::kUnits / 32);
  constexpr int kJobRows = 32 / Tile::kUnitsW * H::kM;
  // The point 1 of both axes has factor 1 in every output of a unit: a bias added to it reaches all of them.
  constexpr int kOnes = 1;
  const int lane = fresh_thread() % 32;
#pragma unroll 1
  for (int job = fresh_thread() / 32; job < kJobs; job += Tile::kWarps) {
    const int k = job % Tile::kSliceK, part = job / Tile::kSliceK;
    const int i = first + k / Tile::kLanesK;  // of a lane's channels
    const int of_block = FusedPlace<Tile>::offset_k(i) + k % Tile::kLanesK * 4;
    if (i >= Tile::kThreadK || of_block >= store.k) continue;
    const float bias = store.bias ? store.bias[of_block] : 0.f;
    float* own = exchange + k * Tile::kUnits + part * 32;
    float along_h[H::kM][W::kPoints];
#pragma unroll
    for (int q = 0; q < W::kPoints; q++) {
      float points[H::kPoints], rows_of[H::kM];
#pragma unroll
      for (int h = 0; h < H::kPoints; h++) points[h] = own[(h * W::kPoints + q) * kPointStep + swizzled(k, lane)];
      if (q == kOnes) points[kOnes] += bias;
      H::output(points, rows_of);
#pragma unroll
      for (int h = 0; h < H::kM; h++) along_h[h][q] = rows_of[h];
    }
    __syncwarp();
    float* stage = own + lane / Tile::kUnitsW * H::kM * kPointStep + lane % Tile::kUnitsW * W::kM;
#pragma unroll
    for (int h = 0; h < H::kM; h++) {
      float y[W::kM];
      W::output(along_h[h], y);
      if constexpr (W::kM == 4)
        store4(stage + h * kPointStep, make_float4(y[0], y[1], y[2], y[3]));
      else
        *reinterpret_cast<float2*>(stage + h * kPointStep) = make_float2(y[0], y[1]);
    }
    __syncwarp();
    float* to = add_bytes(store.corner + of_block * p.written_channel, part * kJobRows * store.row_step);
    const int rows = store.rows - part * kJobRows;
    if (store.inside && rows >= kJobRows) {
      store_rows<kJobRows, kPointStep>(p, own, lane, to, store.row_step);
    } else if (store.inside) {
#pragma unroll 1
      for (int row = 0; row < rows; row++) {
        *to = finished(p, own[row * kPointStep + lane], to);
        to = add_bytes(to, store.row_step);
      }
    }
    __syncwarp();
  }
}

template <class Tile, class Params>
__device__ __forceinline__ void winograd_fused(const Params& p) {
  extern __shared__ __align__(16) float shared[];
  float* const exchange = shared + 2 * Tile::kBuffer;
  const FusedBlock<Tile> block(p, blockIdx.x, blockIdx.y);
  if (block.is_outside(p)) return;

  const FusedPlace<Tile> start(threadIdx.x);
  PatchLoader<Tile> patch(p, block);
  WeightStream<Tile> weights(p, block);
  patch.load(p);
  patch.store(shared + Tile::kV);
  patch.load(p);
  patch.store(shared + Tile::kBuffer + Tile::kV);
  __syncthreads();
  transform_chunk<Tile>(shared + Tile::kV, shared);
  __syncthreads();

  int own = start.point * Tile::kPitchV + start.unit;  // this thread's offset in the buffer of this step's v
#pragma unroll 1
  for (int k_left = block.k_tiles; k_left > 0; k_left--) {
    PointSums<Tile> sums;
#pragma unroll
    for (int point = 0; point < Tile::kEach; point++)
#pragma unroll
      for (int i = 0; i < Tile::kThreadK; i++)
#pragma unroll
        for (int j = 0; j < Tile::kThreadU; j++) sums.sum[point][i][j] = 0.f;

#pragma unroll 1
    for (int left = p.channels_padded; left > 0; left -= Tile::kChunk) {
      float* const next = shared + (own >= Tile::kBuffer ? 0 : Tile::kBuffer);
      transform_chunk<Tile>(next + Tile::kV, next);
      patch.load(p);
#pragma unroll 1  // unrolled, the iterations would overlap and exceed the registers
      for (int c = 0; c < Tile::kChunk; c++)
        sums.multiply_add(shared + own + c * Tile::kPoints * Tile::kPitchV, weights);
      patch.store(shared + (own >= Tile::kBuffer ? Tile::kBuffer : 0) + Tile::kV);
      own += own >= Tile::kBuffer ? -Tile::kBuffer : Tile::kBuffer;
      __syncthreads();
    }

    const FusedPlace<Tile> place(fresh_thread());
    const FusedStore<Tile> store(p, k_left);
#pragma unroll
    for (int first = 0; first < Tile::kThreadK; first += Tile::kMeet) {
#pragma unroll
      for (int point = 0; point < Tile::kEach; point++)
#pragma unroll
        for (int i = first; i < first + Tile::kMeet && i < Tile::kThreadK; i++) {
          const int k = (i - first) * Tile::kLanesK + place.k / 4;
          float* to = exchange + ((place.point + point) * Tile::kSliceK + k) * Tile::kUnits;
          const float* from = sums.sum[point][i];
#pragma unroll
          for (int j = 0; j < Tile::kThreadU; j += 4)
            store4(to + swizzled(k, place.unit + place.offset_unit(j)),
                   make_float4(from[j], from[j + 1], from[j + 2], from[j + 3]));
        }
      __syncthreads();
      write_slice(exchange, p, store, first);
      __syncthreads();
    }
  }
}

}  // namespace polyconv
