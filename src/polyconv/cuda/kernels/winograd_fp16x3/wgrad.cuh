// Winograd weight gradient (winograd/wgrad.cuh) on FP16 tensor cores, with FP32 accuracy: operands are split into two
// halves each (winograd_fp16x3/layout.cuh) and scaled by the absmax of their channel.
//
// Blocks, chunks and stage 1 are those of winograd/wgrad.cuh. A warp owns one point of W with all its segments. Rows of
// a matrix instruction are channels of x, columns are channels of dy, and its depth runs over four tiles, so a quad is
// hi and lo of four tiles of one channel:   D[point][quad][k], V[segment][point][quad][c].
// The tensor cores truncate, so they start every chunk with zero, and FP32 additions sum the chunks.
#pragma once

#include "winograd/wgrad.cuh"
#include "winograd_fp16x3/layout.cuh"

namespace polyconv {

struct Fp16x3WgradParams : WinogradWgradParams {
  const u32* largest_dy;  // absmax parts of every channel
  const u32* largest_x;
  int headroom_dy, headroom_x;  // bits by which transformed values may exceed the absmax
};

// Stage 2 of a block: the scales of its channels, and operands that are transformed along W, scaled and split.
template <class H, class W, class Tile>
struct WinogradWgradHalves {
  using Mma = Mma884;
  using Sizes = WinogradWgradSizes<H, W, Tile>;
  static constexpr int kRounds = 2, kQuads = kChunk / Mma::kDepth;  // of a chunk
  static constexpr int kTasksD = kQuads * Tile::kTileK, kTasksV = Sizes::kPasses * kQuads * Tile::kTileC;
  static_assert(Sizes::kWarps == W::kPoints, "a warp for each point");
  static_assert(kTasksD % 32 == 0 && kTasksD + kTasksV <= Sizes::kThreads, "a quad of tiles per thread");

  int* exponents;  // of the scales of the block's channels: those of dy, then those of x

  // Computes the scales. All threads see them after the next barrier.
  __device__ __forceinline__ WinogradWgradHalves(const Fp16x3WgradParams& p, int* scales) : exponents(scales) {
    const WinogradWgradBlock<Sizes, Tile> block(p);
#pragma unroll 1
    for (int n = threadIdx.x / 32; n < Tile::kTileK + Tile::kTileC; n += Sizes::kWarps) {
      // Channels that the tile does not have are scaled like the last one.
      const u32* parts;
      if (n < Tile::kTileK) {
        const int k = min(block.k_tile * Tile::kTileK + n, p.outputs - 1);
        parts = p.largest_dy + i64(block.group * p.outputs + k) * kMagnitudeParts;
      } else {
        const int c = min(block.c_tile * Tile::kTileC + n - Tile::kTileK, p.channels - 1);
        const u32 channel = block.group * p.classes.quotient(p.channels) + p.classes.quotient(c);
        parts = p.largest_x + i64(channel) * kMagnitudeParts;
      }
      const u32 largest = largest_part(parts);
      const int headroom = n < Tile::kTileK ? p.headroom_dy : p.headroom_x;
      if (threadIdx.x % 32 == 0) exponents[n] = scale_exponent(largest, headroom);
    }
  }

  // Four tiles of one channel per thread: dy in the first round; x, by other warps, in the second.
  __device__ __forceinline__ void transform(int round, int interleave, const float* from, float* operands,
                                            float& bias) const {
    const u32 thread = fresh_thread(), task = thread - kTasksD;
    float points[W::kPoints][Mma::kDepth];
    if (round == 0 && thread < kTasksD) {
      const u32 k = thread % Tile::kTileK, quad = thread / Tile::kTileK;
      const float scale = power_of_two(exponents[k]);
#pragma unroll
      for (int n = 0; n < Mma::kDepth; n++) {
        const u32 u = quad * Mma::kDepth + n;
        float d[W::kPoints];
        const float4 tile = load4(from + k * 4 * kChunk + (u ^ k % 8) * 4);
        const float scaled[4] = {tile.x * scale, tile.y * scale, tile.z * scale, tile.w * scale};
        W::spread(scaled, d);
        bias += d[1];
#pragma unroll
        for (int i = 0; i < W::kPoints; i++) points[i][n] = d[i];
      }
      store_quads(points, reinterpret_cast<uint4*>(operands) + thread, kTasksD);
    }
    if (round == 1 && task < kTasksV) {
      const u32 c = task % Tile::kTileC, quad = task / Tile::kTileC % kQuads, segment = task / (Tile::kTileC * kQuads);
      const float scale = power_of_two(exponents[Tile::kTileK + c]);
      const float* at = from + Sizes::kStagedD + c * Sizes::kPitchX + (quad * Mma::kDepth + segment * interleave) * 4;
#pragma unroll
      for (int n = 0; n < Mma::kDepth; n++) {
        float v[W::kPoints];
        const float4 tile = load4(at + n * 4), beyond = load4(at + (n + interleave) * 4);
        const float scaled[8] = {tile.x * scale,   tile.y * scale,   tile.z * scale,   tile.w * scale,
                                 beyond.x * scale, beyond.y * scale, beyond.z * scale, beyond.w * scale};
        W::input(scaled, v);
#pragma unroll
        for (int i = 0; i < W::kPoints; i++) points[i][n] = v[i];
      }
      uint4* to = reinterpret_cast<uint4*>(operands + Sizes::kOperandD);
      store_quads(points, to + (segment * W::kPoints * kQuads + quad) * Tile::kTileC + c, kQuads * Tile::kTileC);
    }
  }

  static __device__ __forceinline__ void store_quads(const float (&points)[W::kPoints][Mma::kDepth], uint4* to,
                                                     int apart) {
#pragma unroll
    for (int i = 0; i < W::kPoints; i++) to[i * apart] = split(points[i]);
  }
};

// Stage 3: the sums of a thread, for one point of W and its segments, in sets of eight rows by 32 columns.
template <class H, class W, class Tile>
struct WinogradWgradMatrices {
  using Mma = Mma884;
  using Sizes = WinogradWgradSizes<H, W, Tile>;
  static constexpr int kQuads = kChunk / Mma::kDepth;  // of a chunk
  static constexpr int kFragments = Tile::kTileC / Mma::kRows, kStrips = Tile::kTileK / Mma::kColumns;
  static constexpr int kSets = Sizes::kPasses * kFragments * kStrips;
  static_assert(kSets % Sizes::kSteps == 0, "as many in each step");
  float sum[kSets][Mma::kSums];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int i = 0; i < Mma::kSums; i++) sum[s][i] = 0.f;
  }

  // Operands of a chunk: this lane's columns, and the address of its rows.
  struct Chunk {
    const uint4* rows;
    uint4 column[kQuads][kStrips];

    __device__ __forceinline__ explicit Chunk(const float* operands) {
      const u32 thread = fresh_thread(), lane = thread % 32, point = thread / 32;
      const uint4* columns =
          reinterpret_cast<const uint4*>(operands) + point * kQuads * Tile::kTileK + Mma::column_of_b(lane);
#pragma unroll
      for (int q = 0; q < kQuads; q++)
#pragma unroll
        for (int n = 0; n < kStrips; n++) column[q][n] = columns[q * Tile::kTileK + n * Mma::kColumns];
      rows = reinterpret_cast<const uint4*>(operands + Sizes::kOperandD) + point * kQuads * Tile::kTileC +
             Mma::row_of_a(lane);
    }
  };

  // All products of some sets, the small ones first.
  __device__ __forceinline__ void multiply_add(const Chunk& chunk, int step) {
    constexpr int kEach = kSets / Sizes::kSteps;
    uint4 row[kEach][kQuads];
    float recent[kEach][Mma::kSums] = {};
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const int fragment = (step * kEach + e) / kStrips, segment = fragment / kFragments;
#pragma unroll
      for (int q = 0; q < kQuads; q++)
        row[e][q] = chunk.rows[(segment * W::kPoints * kQuads + q) * Tile::kTileC + fragment % kFragments * Mma::kRows];
    }
#pragma unroll
    for (int product = 0; product < 3; product++)
#pragma unroll
      for (int q = 0; q < kQuads; q++)
#pragma unroll
        for (int e = 0; e < kEach; e++) {
          const uint4 a = row[e][q], b = chunk.column[q][(step * kEach + e) % kStrips];
          Mma::multiply_add(recent[e], product == 0 ? make_uint2(a.z, a.w) : make_uint2(a.x, a.y),
                            product == 1 ? make_uint2(b.z, b.w) : make_uint2(b.x, b.y));
        }
#pragma unroll
    for (int e = 0; e < kEach; e++)
#pragma unroll
      for (int i = 0; i < Mma::kSums; i++) sum[step * kEach + e][i] += recent[e][i];
  }

  // Adds the unscaled sums to the block's part of `partial`, or starts it.
  __device__ __forceinline__ void flush(const WinogradWgradParams& p, const int* exponents, bool begin) const {
    const WinogradWgradBlock<Sizes, Tile> block(p);
    const u32 thread = fresh_thread(), lane = thread % 32, point = thread / 32;
    const i64 run = i64(block.slice) * p.groups.divisor + block.group;
    const i64 product = (run * p.channel_tiles.divisor + block.channel_tile) * Sizes::kProducts + block.product;
    float* const partial = p.partial + (product * Sizes::kPasses * W::kPoints + point) * (Tile::kTileK * Tile::kTileC);
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int i = 0; i < Mma::kSums; i++) {
        const int fragment = s / kStrips, segment = fragment / kFragments;
        const int c = fragment % kFragments * Mma::kRows + Mma::row_of_sum(lane, i);
        const int k = s % kStrips * Mma::kColumns + Mma::column_of_sum(lane, i);
        float* to = partial + (segment * W::kPoints * Tile::kTileK + k) * Tile::kTileC + c;
        // In two steps, neither of which leaves the range of a float if the result does not.
        const int both = -(exponents[k] + exponents[Tile::kTileK + c]), half = both / 2;
        const float value = sum[s][i] * power_of_two(half) * power_of_two(both - half);
        *to = begin ? value : *to + value;
      }
  }
};

// The loop of winograd_wgrad with other stages 2 and 3. Not one template, because the FP32 kernels have no register to
// spare and take more of them in any text that serves both.
template <class H, class W, class Tile, bool kClassed>
__device__ __forceinline__ void winograd_fp16x3_wgrad(const Fp16x3WgradParams& p) {
  using Sizes = WinogradWgradSizes<H, W, Tile>;
  using Operands = WinogradWgradHalves<H, W, Tile>;
  using Sums = WinogradWgradMatrices<H, W, Tile>;
  extern __shared__ __align__(16) float shared[];

  constexpr int kBuffer = Sizes::kOperands + Sizes::kStaged;
  WinogradWgradState* const state = reinterpret_cast<WinogradWgradState*>(shared + 2 * kBuffer);
  const Operands operands(p, reinterpret_cast<int*>(state + 1));
  WinogradWgradLoader<H, W, Tile, kClassed> loader(p, *state, shared);
  int chunks;
  {
    const WinogradWgradBlock<Sizes, Tile> block(p);
    chunks = (block.end_row(p) - block.first_row(p)) * ((p.tiles + kChunk - 1) / kChunk);
  }

  // Prologue: the first chunk through stages 1 and 2, the second through stage 1.
  const int odd = chunks % 2;
  float bias = 0.f;
#pragma unroll 1
  for (int ahead = 0; ahead < 2; ahead++) {
    loader.staged = shared + (ahead == odd ? 0 : kBuffer) + Sizes::kOperands;
    loader.aim_chunk();
#pragma unroll
    for (int batch = 0; batch < Sizes::kBatches; batch++) loader.load(batch), loader.combine(batch);
    loader.head(shared + (odd ? kBuffer : 0) + Sizes::kOperands);
    loader.advance();
    __syncthreads();
    if (ahead == 0) {
#pragma unroll
      for (int round = 0; round < Operands::kRounds; round++)
        operands.transform(round, p.interleave, loader.staged, loader.staged - Sizes::kOperands, bias);
    }
  }
  __syncthreads();

  Sums sums;
  sums.clear();
  int until_flush = p.flush + kFirstFlush;
#pragma unroll 1
  for (; chunks > 0; chunks--) {
    float* const now = shared + (chunks % 2 ? kBuffer : 0);
    float* const next = shared + (chunks % 2 ? 0 : kBuffer);
    loader.staged = now + Sizes::kOperands;
    const typename Sums::Chunk chunk(now);
    loader.head(next + Sizes::kOperands);
    loader.aim_chunk();
#pragma unroll
    for (int step = 0; step < Sizes::kSteps; step++) {
      if (step > 0) loader.combine(step - 1);
      if (step < Sizes::kBatches) loader.load(step);
#pragma unroll
      for (int round = 0; round < Operands::kRounds; round++)
        if (step_of<H>(round, Operands::kRounds, Sizes::kSteps) == step)
          operands.transform(round, p.interleave, next + Sizes::kOperands, next, bias);
      if (step == Sizes::kSteps - 1) loader.advance();
      sums.multiply_add(chunk, step);
    }
    if (--until_flush % kFirstFlush == 0 || chunks == 1) {
      sums.flush(p, operands.exponents, until_flush >= kFirstFlush);
      sums.clear();
      until_flush = p.flush;
    }
    __syncthreads();
  }

  const WinogradWgradBlock<Sizes, Tile> block(p);
  if (p.bias_partial && block.product == (H::kPoints > 1 ? 1 : 0) && block.c_tile == 0) {
    // The sum of dy is the product of the points 1 of both axes, where dy has factor 1.
    shared[threadIdx.x] = bias;
    __syncthreads();
    const int channel = block.k_tile * Tile::kTileK + threadIdx.x;
    if (threadIdx.x < Tile::kTileK && channel < p.outputs) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < Operands::kQuads; i++) sum += shared[threadIdx.x + i * Tile::kTileK];
      p.bias_partial[(i64(block.slice) * p.groups.divisor + block.group) * p.outputs + channel] =
          sum * power_of_two(-operands.exponents[threadIdx.x]);
    }
  }
}

}  // namespace polyconv
