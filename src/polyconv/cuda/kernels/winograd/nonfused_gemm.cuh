// GEMM of the nonfused pipeline (winograd/nonfused_layout.cuh): for each point of H a matrix product over channels,
//   Y[k, u] = A^T sum over channels c of  U[k, c] * (B^T X[c, u])        (elementwise over the points of W)
// with the transform along W fused into the load of X and its inverse into the epilogue.
//
// One warp per point of W, with kK x kU accumulators, 8 x 8 per thread. Blocks are persistent and loop over tiles
// (point of H, group, columns, k tile), the point of H slowest, so that its slice of U stays in L2. Segments of taps
// are further chunks of channels whose columns are `next` further. Nested segments (F(2,2), algebra/segments.py)
// compute two neighbouring tiles of outputs at once, in two sets of accumulators: P = (U0 + U1) V1 into the first set;
// copy it to the second; then U0 (V0 - V1) to the first, U1 (V2 - V1) to the second.
//
// The reduction runs in chunks of 8 channels. While a chunk is multiplied, the next one, in registers since the last
// chunk, goes to the other buffers (weights to the warp's own, columns through the transform), and the loads of the one
// after it are issued. One barrier per chunk. The first chunk of the next tile follows the last of a tile.
// Shared memory:  v[2][8][kPoints][kU]   u[2][kPoints][8][kK]   exchange[kPoints][rows of a part][kU]
#pragma once

#include "winograd/nonfused_layout.cuh"

namespace polyconv {

struct NonfusedGemmParams {
  const float* x;
  const float* u;
  float* y;
  int tiles;
  FastDivisor k_tiles, column_tiles;  // tile = (hg * column tiles + column tile) * k tiles + k tile, hg = point, group
  FastDivisor row_columns;
  int columns, columns_filled;  // columns of the slab; padded to whole tiles
  int row_stride;               // elements of X between rows, groups, channels
  int group_stride, channel_stride;
  int part_stride, next;  // elements of X between parts; to the next unit
  int chunks, segments;
  int outputs;  // written channels of a group
  int zero;     // 0, unknown to the compiler
};

template <class W, int kK_>
struct NonfusedGemm {
  static constexpr int kPoints = W::kPoints, kVector = W::kM, kParts = W::kTiles;
  static constexpr bool kNested = W::kTiles == 2;
  static_assert(!kNested || W::kSegments == 2, "only F(2,2) is nested");
  static constexpr int kSets = W::kTiles;
  static constexpr int kThreads = 32 * kPoints;
  static constexpr int kK = kK_, kLanesK = kK / 8, kLanesU = 32 / kLanesK, kU = 8 * kLanesU;
  static_assert(kChannelChunk == 8, "a chunk is multiplied in two halves of four channels");
  static constexpr int kChunkV = kChannelChunk * kPoints * kU, kChunkU = kChannelChunk * kK;  // the latter per warp
  static constexpr int kWeightVectors = kChunkU / 128;                                        // float4 per lane
  // A warp transforms 32 columns at a time: kTasks per warp and chunk, some of the last ones idle.
  static constexpr int kStrips = kU / 32, kTaskCount = kChannelChunk * kStrips;
  static constexpr int kTasks = (kTaskCount + kPoints - 1) / kPoints;
  static constexpr int kOwnStrips = kStrips == 4 && kPoints % 4 ? 2 : 1;  // different strips that a warp works on
  static_assert(kPoints % 2 == 0, "the strips of a warp repeat");
  static constexpr int kInputs = (kPoints + kVector - 1) / kVector;  // vectors of one tile
  // Accumulators are exchanged in parts of kPartRows rows per thread.
  static constexpr int kPartRows = kU == 128 || kPoints < 8 ? 2 : 4;
  static constexpr int kExchangeRows = kLanesK * kPartRows;
  static constexpr int kExchange = kPoints * kExchangeRows * kU;
  static constexpr int kSharedFloats = 2 * kChunkV + 2 * kPoints * kChunkU + kExchange;

  struct Accumulators {
    float sum[kSets][8][8];
  };

  // A thread's addresses in the two V buffers and in the two U buffers of its warp.
  struct Buffers {
    float *v, *write_u;
    const float *read_v, *read_u;
    int parity = 0;  // the buffers that are read

    __device__ __forceinline__ explicit Buffers(float* shared) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      float* u = shared + 2 * kChunkV + warp * kChunkU;
      v = shared, read_v = v + warp * kU + lane % kLanesU * 4;
      write_u = u + lane * 4, read_u = u + lane / kLanesU * 4;
    }
  };

  // This lane's weights, two chunks ahead, between global memory and the warp's shared memory.
  struct Weights {
    int tile, chunks_left;
    const float* from;
    float4 u[kWeightVectors];

    __device__ __forceinline__ void begin_tile(const NonfusedGemmParams& p, int chunks) {
      const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const u32 rest = p.k_tiles.quotient(tile), k_tile = tile - rest * p.k_tiles.divisor;
      const u32 hg = p.column_tiles.quotient(rest);
      from = p.u + i64(hg * p.k_tiles.divisor + k_tile) * chunks * kPoints * kChunkU + warp * kChunkU + lane * 4;
      chunks_left = chunks;
    }

    __device__ __forceinline__ void advance(const NonfusedGemmParams& p, int chunks) {
      from += kPoints * kChunkU;
      if (--chunks_left) return;
      if (tile + gridDim.x < p.tiles) tile += gridDim.x;
      begin_tile(p, chunks);
    }

    __device__ __forceinline__ void load(int number) { u[number] = load4(from + number * 128); }
    __device__ __forceinline__ void store(float* to, int number) { store4(to + number * 128, u[number]); }
  };

  // This lane's columns of the next chunk, between global memory and the other V buffer (transformed).
  struct Columns {
    int tile, chunks_left, channels_left;
    int kind, loaded_kind;  // 0: a tile itself, 1: V0 - V1, 2: V2 - V1
    u32 at[kOwnStrips];
    float v[kTasks][kInputs + kNested][kVector];

    __device__ __forceinline__ void begin_tile(const NonfusedGemmParams& p, int chunks) {
      const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
      const u32 rest = p.k_tiles.quotient(tile);
      const u32 hg = p.column_tiles.quotient(rest), column_tile = rest - hg * p.column_tiles.divisor;
#pragma unroll
      for (int i = 0; i < kOwnStrips; i++) {
        const u32 strip = (warp + i * kPoints) % kStrips;
        // Columns past the end repeat the last one and are not written.
        const u32 n = min(column_tile * kU + strip * 32 + lane, u32(p.columns - 1));
        const u32 row = p.row_columns.quotient(n), column = n - row * p.row_columns.divisor;
        at[i] = row * p.row_stride + hg * p.group_stride + column * kVector;
      }
      chunks_left = chunks, channels_left = p.chunks, kind = 0;
    }

    // Moves to the next chunk. Past the last tile that tile is loaded once more, unused.
    __device__ __forceinline__ void advance(const NonfusedGemmParams& p, int chunks) {
      loaded_kind = kind;
      if (--chunks_left == 0) {
        if (tile + gridDim.x < p.tiles) tile += gridDim.x;
        begin_tile(p, chunks);
        return;
      }
      int by = kChannelChunk * p.channel_stride;
      if constexpr (kNested) {
        if (kind == 1) {
          kind = 2, by = 0;
        } else if (kind == 2) {
          kind = 1;
        } else if (--channels_left == 0) {
          kind = 1, by = -(p.chunks - 1) * kChannelChunk * p.channel_stride;
        }
      } else if (--channels_left == 0) {
        channels_left = p.chunks, by = p.next - (p.chunks - 1) * kChannelChunk * p.channel_stride;
      }
#pragma unroll
      for (int i = 0; i < kOwnStrips; i++) at[i] += by;
    }

    static __device__ __forceinline__ int task(int number) { return threadIdx.x / 32 + number * kPoints; }

    __device__ __forceinline__ void load(const NonfusedGemmParams& p, int number) {
      if (kTaskCount % kPoints && number == kTasks - 1 && task(number) >= kTaskCount) return;
      const float* from = p.x + (at[number % kOwnStrips] + u32(task(number) / kStrips) * p.channel_stride);
      if constexpr (kNested) {
        // Vectors 1 and 2 are the middle tile; its left neighbour has 0 and 1, its right one 2 and 3.
        load_vector<kVector>(from + p.part_stride, v[number][0]);
        load_vector<kVector>(from + p.next, v[number][1]);
        static_assert(!kNested || kVector == 4, "one load instruction");
        load4_if(kind != 0, from + (kind == 2 ? p.part_stride + p.next : 0), v[number][2]);
      } else {
#pragma unroll
        for (int i = 0; i < kInputs; i++) load_vector<kVector>(from + i * p.next, v[number][i]);
      }
    }

    __device__ __forceinline__ void store(float* to, int number) {
      if (kTaskCount % kPoints && number == kTasks - 1 && task(number) >= kTaskCount) return;
      float in[kInputs * kVector], out[kPoints];
      if constexpr (kNested) {
        static_assert(!kNested || kInputs == 2, "a tile is two vectors");
#pragma unroll
        for (int i = 0; i < kVector; i++) {
          const float middle = v[number][0][i], after = v[number][1][i], outer = v[number][2][i];
          in[i] = loaded_kind == 0 ? middle : (loaded_kind == 1 ? outer : after) - middle;
          in[kVector + i] = loaded_kind == 0 ? after : (loaded_kind == 1 ? middle : outer) - after;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kInputs * kVector; i++) in[i] = v[number][i / kVector][i % kVector];
      }
      W::input(in, out);
      to += task(number) / kStrips * kPoints * kU + task(number) % kStrips * 32 + threadIdx.x % 32;
#pragma unroll
      for (int i = 0; i < kPoints; i++) to[i * kU] = out[i];
    }
  };

  // One half of a chunk: four outer products.
  template <int kSet, class Beside>
  static __device__ __forceinline__ void multiply(Accumulators& c, const float* u, const float* v, Beside beside) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
      float row[8], column[8];
      load_vector<4>(u + step * kK, row), load_vector<4>(u + step * kK + kK / 2, row + 4);
      load_vector<4>(v + step * kPoints * kU, column), load_vector<4>(v + step * kPoints * kU + kU / 2, column + 4);
      beside(step);
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) c.sum[kSet][i][j] = fmaf(row[i], column[j], c.sum[kSet][i][j]);
    }
  }

  // Multiplies the chunk in one buffer into accumulator set kSet, and stores the next one to the other buffer. The
  // cursors advance between the two halves: their branches keep the compiler from using loaded values too early. Loads
  // are spread out: a burst would fill the queues of L1 and delay the loads from shared memory.
  template <int kSet>
  static __device__ __forceinline__ void multiply_chunk(Accumulators& c, Columns& columns, Weights& weights,
                                                        const NonfusedGemmParams& p, int chunks, Buffers& buffers) {
    const float* v = buffers.read_v + buffers.parity * kChunkV;
    const float* u = buffers.read_u + buffers.parity * kPoints * kChunkU;
    buffers.parity ^= 1;
    float* next_v = buffers.v + buffers.parity * kChunkV;
    float* next_u = buffers.write_u + buffers.parity * kPoints * kChunkU;
    multiply<kSet>(c, u, v, [&](int step) {
#pragma unroll
      for (int i = 0; i < kWeightVectors; i++)
        if (step == i * 4 / kWeightVectors) weights.store(next_u, i);
    });
    columns.advance(p, chunks);
    weights.advance(p, chunks);
    multiply<kSet>(c, u + 4 * kK, v + 4 * kPoints * kU, [&](int step) {
#pragma unroll
      for (int task = 0; task < kTasks; task++)
        if (step == task * 4 / kTasks) columns.store(next_v, task), columns.load(p, task);
#pragma unroll
      for (int i = 0; i < kWeightVectors; i++)
        if (step == i * 4 / kWeightVectors) weights.load(i);
    });
    __syncthreads();
  }

  // Exchanges the accumulators of one set through shared memory, applies the inverse along W, and stores to Y.
  template <int kSet>
  static __device__ __forceinline__ void write(const Accumulators& c, const NonfusedGemmParams& p, float* exchange,
                                               int tile) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, lane_k = lane / kLanesU, lane_u = lane % kLanesU;
    const u32 rest = p.k_tiles.quotient(tile), k_tile = tile - rest * p.k_tiles.divisor;
    const u32 hg = p.column_tiles.quotient(rest), column_tile = rest - hg * p.column_tiles.divisor;
#pragma unroll
    for (int part = 0; part < 8 / kPartRows; part++) {
      if (kSet > 0 || part > 0) __syncthreads();
      // With 32 columns per row, rows of neighbouring lanes are in the same banks: swap their halves.
      float* to = exchange + (warp * kExchangeRows + lane_k * kPartRows) * kU;
      const u32 swap = kU == 32 ? lane_k % 2 * 16 : 0;
#pragma unroll
      for (int i = 0; i < kPartRows; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          // OR with a zero unknown to the compiler: a direct vector store would tie accumulators to neighbouring
          // registers, and cost bank conflicts of the register file in the main loop.
          const float* sum = c.sum[kSet][part * kPartRows + i] + half * 4;
          store4(to + i * kU + ((lane_u * 4 + half * (kU / 2)) ^ swap),
                 make_float4(
                     __int_as_float(__float_as_int(sum[0]) | p.zero), __int_as_float(__float_as_int(sum[1]) | p.zero),
                     __int_as_float(__float_as_int(sum[2]) | p.zero), __int_as_float(__float_as_int(sum[3]) | p.zero)));
        }
      __syncthreads();
#pragma unroll
      for (int first = 0; first < kExchangeRows * kStrips; first += kPoints) {
        const u32 task = first + warp;
        if (kExchangeRows * kStrips % kPoints && task >= kExchangeRows * kStrips) continue;
        const u32 row = task / kStrips, of_lane_k = row / kPartRows, i = part * kPartRows + row % kPartRows;
        const u32 u = task % kStrips * 32 + lane;
        const float* from = exchange + row * kU + (kU == 32 ? u ^ (of_lane_k % 2 * 16) : u);
        float points[kPoints], out[W::kM];
#pragma unroll
        for (int point = 0; point < kPoints; point++) points[point] = from[point * kExchangeRows * kU];
        W::output(points, out);
        // Columns past the end are written, too: Y is padded to whole tiles.
        const u32 k = k_tile * kK + i / 4 * (kK / 2) + of_lane_k * 4 + i % 4, n = column_tile * kU + u;
        store_vector_if<kVector>(
            k < p.outputs, p.y + ((i64(hg) * p.outputs + k) * kParts + kSet) * p.columns_filled * kVector + n * kVector,
            out);
      }
    }
  }
};

template <class W, int kK>
__device__ __forceinline__ void winograd_nonfused_gemm(const NonfusedGemmParams& p) {
  using Gemm = NonfusedGemm<W, kK>;
  extern __shared__ __align__(16) float shared[];
  float* const exchange = shared + 2 * Gemm::kChunkV + 2 * Gemm::kPoints * Gemm::kChunkU;
  typename Gemm::Buffers buffers(shared);
  const int chunks = p.chunks * (Gemm::kNested ? 3 : p.segments);

  typename Gemm::Columns columns;
  typename Gemm::Weights weights;
  columns.tile = weights.tile = blockIdx.x;
  columns.begin_tile(p, chunks);
  weights.begin_tile(p, chunks);
#pragma unroll
  for (int i = 0; i < Gemm::kTasks; i++) columns.load(p, i);
#pragma unroll
  for (int i = 0; i < Gemm::kWeightVectors; i++) weights.load(i), weights.store(buffers.write_u, i);
  columns.advance(p, chunks);
  weights.advance(p, chunks);
#pragma unroll
  for (int i = 0; i < Gemm::kWeightVectors; i++) weights.load(i);
#pragma unroll
  for (int i = 0; i < Gemm::kTasks; i++) columns.store(buffers.v, i), columns.load(p, i);
  __syncthreads();

  typename Gemm::Accumulators c;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) c.sum[0][i][j] = 0.f;
#pragma unroll 1
    for (int chunk = Gemm::kNested ? p.chunks : chunks; chunk > 0; chunk--)
      Gemm::template multiply_chunk<0>(c, columns, weights, p, chunks, buffers);
    if constexpr (Gemm::kNested) {
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) c.sum[1][i][j] = c.sum[0][i][j];
#pragma unroll 1
      for (int chunk = p.chunks; chunk > 0; chunk--) {
        Gemm::template multiply_chunk<0>(c, columns, weights, p, chunks, buffers);
        Gemm::template multiply_chunk<1>(c, columns, weights, p, chunks, buffers);
      }
    }
    Gemm::template write<0>(c, p, exchange, tile);
    if constexpr (Gemm::kNested) Gemm::template write<1>(c, p, exchange, tile);
  }
}

}  // namespace polyconv
