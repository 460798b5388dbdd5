// The weight gradient in its own fast form: along both axes dW = G^T [(A dy) * (B^T x)], summed over all tiles.
//
// For each product of the H algorithm (a point of a segment), each segment and each point of the W algorithm this is a
// matrix product over the tiles, sums[k][c] = sum D[k][tile] V[c][tile]. A block owns one product of H, kTileK output
// channels, kTileC source channels and a slice of the rows of tiles; a warp owns one point of W (or a part of its
// channels, or every other tile). Everything from dy and x to the products happens here, in three stages that work on
// successive chunks of kChunk tiles, so that one barrier per chunk suffices and nothing waits for memory:
//   1. rows of dy and x are combined along H, lanes = positions along W (coalesced), into `staged`;
//   2. each tile of `staged` is transformed along W, lanes = channels, into `operands`: the transposition is free;
//   3. outer products: fragments of 16 bytes, 64 to 128 accumulators per thread.
// Tiles of neighbouring phases of a dilated convolution are neighbours here (`interleave`), so that what a warp reads
// is dense in memory.
//
// Accumulators are added to the block's own part of `partial` every `flush` chunks: rounding errors grow with the
// longest sequence of additions, not with the number of tiles. Slices are added by toom_wgrad_finish.cuh.
//
// Grid: x = ((slice * groups + group) * channel tiles + channel tile) * products + product. All products of a slice run
// at about the same time and share what they read in L2.
// Shared memory, two of each:  operands = D[point][tile][k], V[segment][point][tile][c];
//                              staged = dy[k][4 * tile], x[c][4 * block], a block being 4 positions of one phase.
#pragma once

#include "toom.cuh"

namespace polyconv {

constexpr int kChunk = 8;          // tiles that are multiplied between two barriers
constexpr int kMaxInterleave = 3;  // phases along W that share a chunk; more would not fit into shared memory
constexpr int kMaxClasses = 8;     // residue classes of taps per axis

struct ToomWgradParams {
  const float* x;
  const float* dy;
  float* partial;       // [slice * kSplit][group][channel tile][product][segment][point][kTileK][kTileC]
  float* bias_partial;  // [slice][group * outputs], or null
  i64 x_batch, x_channel, dy_batch, dy_channel;
  i64 x_next_row, dy_next_row;                               // bytes between rows of a tile
  i64 x_next_channel, dy_next_channel;                       // bytes between channels of a warp
  i64 x_first_h[kMaxClasses], x_first_w[kMaxClasses];        // elements from x to position 0, by class of taps
  int read_first_h[kMaxClasses], read_first_w[kMaxClasses];  // rows and columns
  int x_row, x_column, dy_row, dy_column;                    // elements from one lattice position to the next
  int read_step_h, read_step_w;                              // rows and columns
  int height, width;                                         // of x, as far as any output reads it
  int count_h, count_w;                                      // outputs
  int dilation_h, dilation_w, interleave;
  int channels, outputs;  // of a group; channels are (channel, class along H, class along W)
  int rows, tiles;        // rows of tiles, and tiles in each
  int slices, flush;
  FastDivisor channel_tiles, k_tiles, groups;
  FastDivisor outer_phases, tiles_h, phases_h, interleaved;
  FastDivisor classes, classes_w;  // of a channel; along W
};

// kTileK x kTileC channels per block, cut among kWarpsK x kWarpsC warps per point; kSplit warps take every kSplit-th
// tile. A warp's lanes form kLanesK x (32 / kLanesK).
template <int kTileK_, int kTileC_, int kWarpsK_, int kWarpsC_, int kSplit_, int kLanesK_>
struct WgradTile {
  static constexpr int kTileK = kTileK_, kTileC = kTileC_, kWarpsK = kWarpsK_, kWarpsC = kWarpsC_, kSplit = kSplit_;
  static constexpr int kLanesK = kLanesK_, kLanesC = 32 / kLanesK_;
  static constexpr int kThreadK = kTileK / kWarpsK / kLanesK, kThreadC = kTileC / kWarpsC / kLanesC;
  static constexpr int kWarpsPerPoint = kWarpsK * kWarpsC * kSplit;
  static_assert(kThreadK % 4 == 0 && kThreadC % 4 == 0, "fragments are loaded in quads");
};

template <class H, class W, class Tile>
struct WgradSizes {
  static_assert(W::kM == 4 && H::kTiles == 1 && W::kTiles == 1, "tiles of four along W; segments are not nested");
  static constexpr int kProducts = H::kPoints * H::kSegments;
  static constexpr int kPasses = W::kSegments;
  static constexpr int kWarps = W::kPoints * Tile::kWarpsPerPoint, kThreads = 32 * kWarps;
  static constexpr int kSteps = kChunk / Tile::kSplit;
  static constexpr int kBeyond = (W::kSpan + 3) / 4 - 1;  // blocks (per phase) that the last tile reads after its own
  static constexpr int kOperandD = W::kPoints * kChunk * Tile::kTileK;
  static constexpr int kOperandV = kPasses * W::kPoints * kChunk * Tile::kTileC;
  static constexpr int kOperands = kOperandD + kOperandV;
  static constexpr int kStagedD = Tile::kTileK * kChunk * 4;
  // Stage 1 by items: kItemsD channels of dy per warp; kItemsX of x, then the blocks beyond the chunk.
  static constexpr int kItemsD = (Tile::kTileK + kWarps - 1) / kWarps;
  static constexpr int kItemsX = (Tile::kTileC + kWarps - 1) / kWarps;
  static constexpr int kHaloBlocks = kThreads / (4 * Tile::kTileC);
  static constexpr int kItemsHalo = (kBeyond * kMaxInterleave + kHaloBlocks - 1) / kHaloBlocks;
  static constexpr int kBatches = kSteps - 1;
  static constexpr int kBatchD = (kItemsD + kBatches - 1) / kBatches;
  static constexpr int kBatchX = (kItemsX + kItemsHalo + kBatches - 1) / kBatches;
  static constexpr int kTasksD = Tile::kTileK * kChunk, kTasksV = kPasses * Tile::kTileC * kChunk;
  static constexpr int kRoundsD = (kTasksD + kThreads - 1) / kThreads;
  static constexpr int kRoundsV = (kTasksV + kThreads - 1) / kThreads;
  static_assert(kThreads % Tile::kTileK == 0, "a thread transforms one channel of dy, whatever the tile");
};

// Row `product` of the matrix of a transform, found by applying it to unit vectors (constants, once compiled).
template <class Axis, int kInputs, bool kSpread>
__device__ __forceinline__ void coefficients(int point, float* row) {
#pragma unroll
  for (int n = 0; n < kInputs; n++) {
    float unit[kInputs], values[Axis::kPoints];
#pragma unroll
    for (int i = 0; i < kInputs; i++) unit[i] = i == n ? 1.f : 0.f;
    if (kSpread)
      Axis::spread(unit, values);
    else
      Axis::input(unit, values);
    row[n] = 0.f;
#pragma unroll
    for (int i = 0; i < Axis::kPoints; i++) row[n] = i == point ? values[i] : row[n];
  }
}

// Stages 1 and 2 of a block: walks over its chunks and leaves transformed operands in shared memory.
template <class H, class W, class Tile, bool kClassed>
struct WgradLoader {
  using Sizes = WgradSizes<H, W, Tile>;
  static constexpr int kRowsD = H::kM, kRowsX = H::kPoints;

  const ToomWgradParams& p;
  float of_dy[kRowsD], of_x[kRowsX];  // this block's product along H
  int segment_row;                    // first row of the product's segment, as a lattice position
  int k_left, c_left, first_c;
  const float *x, *dy;  // of this group and these channels
  float* staged;        // where stage 1 writes
  int pitch_x;

  // The chunk that stage 1 works on.
  int row, end_row, tile;
  int phase;                    // first phase along W
  const float *x_row, *dy_row;  // first row of the tiles
  int x_first;                  // the same as a lattice position
  u32 x_rows, dy_rows;          // bit n: row n is inside the image and counts
  int place;                    // this lane's position along W
  const float *x_at, *dy_at;    // there, of the channel in turn
  u32 x_mask, dy_mask;
  float dy_loaded[2][Sizes::kBatchD][kRowsD], x_loaded[2][Sizes::kBatchX][kRowsX];

  __device__ __forceinline__ WgradLoader(const ToomWgradParams& params, float* buffer, int product, int group,
                                         int first_k, int first_channel, int first_row, int last_row)
      : p(params), first_c(first_channel), staged(buffer), row(first_row), end_row(last_row), tile(0) {
    coefficients<H, kRowsD, true>(product % H::kPoints, of_dy);
    coefficients<H, kRowsX, false>(product % H::kPoints, of_x);
    segment_row = H::offset(product / H::kPoints) * p.dilation_h;
    k_left = min(Tile::kTileK, p.outputs - first_k);
    c_left = min(Tile::kTileC, p.channels - first_c);
    x = p.x + i64(group) * p.classes.quotient(p.channels) * p.x_channel;
    if (!kClassed) x += first_c * p.x_channel + p.x_first_h[0] + p.x_first_w[0];
    dy = p.dy + (i64(group) * p.outputs + first_k) * p.dy_channel;
    pitch_x = 4 * ((kChunk + Sizes::kBeyond * p.interleave) | 1);
    aim_row();
    aim_chunk();
  }

  // Decodes `row` = ((image * phases + phase) * tiles + tile along H) * outer phases + outer phase along W.
  __device__ __forceinline__ void aim_row() {
    const u32 above = p.outer_phases.quotient(row), column = p.tiles_h.quotient(above);
    const int image = p.phases_h.quotient(column);
    phase = (row - int(above * p.outer_phases.divisor)) * p.interleave;
    const int first =
        int(column - image * p.phases_h.divisor) + p.dilation_h * H::kM * int(above - column * p.tiles_h.divisor);
    dy_row = dy + image * p.dy_batch + i64(first) * p.dy_row;
    x_first = first + segment_row;
    x_row = x + image * p.x_batch + i64(x_first) * p.x_row;
    dy_rows = 0;
#pragma unroll
    for (int n = 0; n < kRowsD; n++)
      dy_rows |= u32(first + n * p.dilation_h < p.count_h && of_dy[n] != 0.f && row < end_row) << n;
    if (!kClassed) x_rows = rows_inside(p.read_first_h[0]);
  }

  __device__ __forceinline__ u32 rows_inside(int read_first) const {
    u32 found = 0;
#pragma unroll
    for (int n = 0; n < kRowsX; n++) {
      const int at = read_first + p.read_step_h * (x_first + n * p.dilation_h);
      found |= u32(u32(at) < u32(p.height) && of_x[n] != 0.f && row < end_row) << n;
    }
    return found;
  }

  // Lattice position along W of element j of block number `block` of the row.
  __device__ __forceinline__ int position(int block, int j) const {
    const int unit = p.interleaved.quotient(block);
    return phase + (block - unit * p.interleave) + p.dilation_w * (4 * unit + j);
  }

  __device__ __forceinline__ bool column_inside(int read_first, int at) const {
    return u32(read_first + p.read_step_w * at) < u32(p.width);
  }

  __device__ __forceinline__ void aim_chunk() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    place = position(tile + lane / 4, lane % 4);
    dy_at = dy_row + i64(place) * p.dy_column + min(warp, k_left - 1) * p.dy_channel;
    dy_mask = place < p.count_w ? dy_rows : 0;
    if (!kClassed) {
      x_at = x_row + i64(place) * p.x_column + min(warp, c_left - 1) * p.x_channel;
      x_mask = column_inside(p.read_first_w[0], place) ? x_rows : 0;
    }
  }

  __device__ __forceinline__ void advance() {
    tile += kChunk;
    if (tile >= p.tiles) {
      tile = 0;
      row++;
      aim_row();
    }
    aim_chunk();
  }

  template <int kRows>
  static __device__ __forceinline__ void load_rows(const float* at, i64 step, u32 mask, float* loaded) {
#pragma unroll
    for (int n = 0; n < kRows; n++) {
      loaded[n] = (mask >> n & 1) ? __ldg(at) : 0.f;
      at = add_bytes(at, step);
    }
  }

  // One position of channel number c of the tile.
  __device__ __forceinline__ void load_x(int c, int at, float* loaded) const {
    c = min(c, c_left - 1);
    const float* from = x_row + i64(at) * p.x_column;
    u32 mask;
    if (kClassed) {
      const int channel = p.classes.quotient(first_c + c), number = first_c + c - channel * int(p.classes.divisor);
      const int h = p.classes_w.quotient(number), w = number - h * int(p.classes_w.divisor);
      from += channel * p.x_channel + p.x_first_h[h] + p.x_first_w[w];
      mask = column_inside(p.read_first_w[w], at) ? rows_inside(p.read_first_h[h]) : 0;
    } else {
      from += c * p.x_channel;
      mask = column_inside(p.read_first_w[0], at) ? x_rows : 0;
    }
    load_rows<kRowsX>(from, p.x_next_row, mask, loaded);
  }

  // The thread's share of the blocks beyond the chunk: channel, block.
  static __device__ __forceinline__ int halo_channel() { return threadIdx.x / 4 / Sizes::kHaloBlocks; }
  static __device__ __forceinline__ int halo_block(int item) {
    return kChunk + item * Sizes::kHaloBlocks + threadIdx.x / 4 % Sizes::kHaloBlocks;
  }
  __device__ __forceinline__ bool has_halo(int item) const {
    return halo_block(item) < kChunk + Sizes::kBeyond * p.interleave && halo_channel() < Tile::kTileC;
  }

  // Stage 1, first half of batch `batch`: loads.
  __device__ __forceinline__ void load(int batch) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < Sizes::kBatchD; i++) {
      const int item = batch * Sizes::kBatchD + i;
      if (item >= Sizes::kItemsD) continue;
      load_rows<kRowsD>(dy_at, p.dy_next_row, dy_mask, dy_loaded[batch & 1][i]);
      if (warp + (item + 1) * Sizes::kWarps < k_left) dy_at = add_bytes(dy_at, p.dy_next_channel);
    }
#pragma unroll
    for (int i = 0; i < Sizes::kBatchX; i++) {
      const int item = batch * Sizes::kBatchX + i;
      float* loaded = x_loaded[batch & 1][i];
      if (item < Sizes::kItemsX) {
        if (kClassed) {
          load_x(warp + item * Sizes::kWarps, place, loaded);
        } else {
          load_rows<kRowsX>(x_at, p.x_next_row, x_mask, loaded);
          if (warp + (item + 1) * Sizes::kWarps < c_left) x_at = add_bytes(x_at, p.x_next_channel);
        }
      } else if (item < Sizes::kItemsX + Sizes::kItemsHalo) {
        const int halo = item - Sizes::kItemsX;
        if (has_halo(halo)) load_x(halo_channel(), position(tile + halo_block(halo), threadIdx.x % 4), loaded);
      }
    }
  }

  // Second half: the product of the H transform, into `staged`. The quads of a row of dy are permuted by channel, the
  // rows of x have an odd number of quads: stage 2 reads both with its lanes in successive channels.
  __device__ __forceinline__ void combine(int batch) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* staged_x = staged + Sizes::kStagedD;
#pragma unroll
    for (int i = 0; i < Sizes::kBatchD; i++) {
      const int item = batch * Sizes::kBatchD + i, k = warp + item * Sizes::kWarps;
      if (item < Sizes::kItemsD && k < Tile::kTileK)
        staged[k * 4 * kChunk + (lane ^ (k % 8 * 4))] = dot<kRowsD>(of_dy, dy_loaded[batch & 1][i]);
    }
#pragma unroll
    for (int i = 0; i < Sizes::kBatchX; i++) {
      const int item = batch * Sizes::kBatchX + i, c = warp + item * Sizes::kWarps, halo = item - Sizes::kItemsX;
      const float* loaded = x_loaded[batch & 1][i];
      if (item < Sizes::kItemsX) {
        if (c < Tile::kTileC) staged_x[c * pitch_x + lane] = dot<kRowsX>(of_x, loaded);
      } else if (item < Sizes::kItemsX + Sizes::kItemsHalo && has_halo(halo)) {
        staged_x[halo_channel() * pitch_x + halo_block(halo) * 4 + threadIdx.x % 4] = dot<kRowsX>(of_x, loaded);
      }
    }
  }

  template <int kRows>
  static __device__ __forceinline__ float dot(const float* factors, const float* values) {
    float sum = factors[0] * values[0];
#pragma unroll
    for (int n = 1; n < kRows; n++) sum = fmaf(factors[n], values[n], sum);
    return sum;
  }

  // Stage 2, one round: a tile of one channel per thread, dy in the first rounds and x after them.
  __device__ __forceinline__ void transform(int round, const float* from, float* operands, float& bias) const {
    if (round < Sizes::kRoundsD) {
      const int task = threadIdx.x + round * Sizes::kThreads;
      if (Sizes::kTasksD % Sizes::kThreads != 0 && task >= Sizes::kTasksD) return;
      const int k = task % Tile::kTileK, u = task / Tile::kTileK;
      const float4 quad = load4(from + k * 4 * kChunk + (u ^ k % 8) * 4);
      const float dy_tile[4] = {quad.x, quad.y, quad.z, quad.w};
      float d[W::kPoints];
      W::spread(dy_tile, d);
#pragma unroll
      for (int i = 0; i < W::kPoints; i++) operands[(i * kChunk + u) * Tile::kTileK + k] = d[i];
      bias += d[1];
      return;
    }
    const int task = threadIdx.x + (round - Sizes::kRoundsD) * Sizes::kThreads;
    if (Sizes::kTasksV % Sizes::kThreads != 0 && task >= Sizes::kTasksV) return;
    const int c = task % Tile::kTileC, u = task / Tile::kTileC % kChunk, pass = task / (Tile::kTileC * kChunk);
    const float* tile_at = from + Sizes::kStagedD + c * pitch_x + (u + pass * p.interleave) * 4;
    const float4 near = load4(tile_at), far = load4(tile_at + p.interleave * 4);
    const float inputs[8] = {near.x, near.y, near.z, near.w, far.x, far.y, far.z, far.w};
    float v[W::kPoints];
    W::input(inputs, v);
    float* to = operands + Sizes::kOperandD + pass * W::kPoints * kChunk * Tile::kTileC + u * Tile::kTileC + c;
#pragma unroll
    for (int i = 0; i < W::kPoints; i++) to[i * kChunk * Tile::kTileC] = v[i];
  }
};

// Stage 3: the accumulators of a thread, for one point of W and all segments.
template <class W, class Tile>
struct WgradSums {
  static constexpr int kPasses = W::kSegments;
  float sum[kPasses][Tile::kThreadK][Tile::kThreadC];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < kPasses; s++)
#pragma unroll
      for (int i = 0; i < Tile::kThreadK; i++)
#pragma unroll
        for (int j = 0; j < Tile::kThreadC; j++) sum[s][i][j] = 0.f;
  }

  static __device__ __forceinline__ void fragment(const float* at, int quads, int apart, float* values) {
#pragma unroll
    for (int i = 0; i < quads; i++) {
      const float4 v = load4(at + i * apart);
      values[4 * i] = v.x, values[4 * i + 1] = v.y, values[4 * i + 2] = v.z, values[4 * i + 3] = v.w;
    }
  }

  // d and v point at this thread's channels of one tile.
  __device__ __forceinline__ void multiply_add(const float* d, const float* v) {
    float row[Tile::kThreadK], column[Tile::kThreadC];
    fragment(d, Tile::kThreadK / 4, Tile::kLanesK * 4, row);
#pragma unroll
    for (int s = 0; s < kPasses; s++) {
      fragment(v + s * W::kPoints * kChunk * Tile::kTileC, Tile::kThreadC / 4, Tile::kLanesC * 4, column);
#pragma unroll
      for (int i = 0; i < Tile::kThreadK; i++)
#pragma unroll
        for (int j = 0; j < Tile::kThreadC; j++) sum[s][i][j] = fmaf(row[i], column[j], sum[s][i][j]);
    }
  }

  // Adds the sums to those of `partial`, or begins them.
  __device__ __forceinline__ void flush(float* partial, bool begin) {
#pragma unroll
    for (int s = 0; s < kPasses; s++)
#pragma unroll
      for (int i = 0; i < Tile::kThreadK; i++) {
        float* at = partial + (s * W::kPoints * Tile::kTileK + (i / 4) * Tile::kLanesK * 4 + i % 4) * Tile::kTileC;
#pragma unroll
        for (int j = 0; j < Tile::kThreadC; j += 4) {
          float* to = at + j * Tile::kLanesC;
          const float4 old = begin ? make_float4(0.f, 0.f, 0.f, 0.f) : load4(to);
          store4_global(to, old.x + sum[s][i][j], old.y + sum[s][i][j + 1], old.z + sum[s][i][j + 2],
                        old.w + sum[s][i][j + 3]);
        }
      }
  }
};

template <class H, class W, class Tile, bool kClassed>
__device__ __forceinline__ void toom_wgrad(const ToomWgradParams& p) {
  using Sizes = WgradSizes<H, W, Tile>;
  extern __shared__ __align__(16) float shared[];

  const u32 pair = blockIdx.x / Sizes::kProducts, product = blockIdx.x % Sizes::kProducts;
  const u32 above = p.channel_tiles.quotient(pair), channel_tile = pair - above * p.channel_tiles.divisor;
  const u32 slice = p.groups.quotient(above), group = above - slice * p.groups.divisor;
  const u32 c_tile = p.k_tiles.quotient(channel_tile), k_tile = channel_tile - c_tile * p.k_tiles.divisor;
  const int first_row = int(i64(p.rows) * slice / p.slices), end_row = int(i64(p.rows) * (slice + 1) / p.slices);

  float* const operands = shared;
  float* const staged = shared + 2 * Sizes::kOperands;
  WgradLoader<H, W, Tile, kClassed> loader(p, staged, product, group, k_tile * Tile::kTileK, c_tile * Tile::kTileC,
                                           first_row, end_row);
  const int staged_size = Sizes::kStagedD + Tile::kTileC * loader.pitch_x;
  int chunks = (end_row - first_row) * ((p.tiles + kChunk - 1) / kChunk);

  // The first chunk through stages 1 and 2, the second through stage 1.
  float bias = 0.f;
#pragma unroll 1
  for (int ahead = 0; ahead < 2; ahead++) {
    loader.staged = staged + ahead * staged_size;
#pragma unroll
    for (int batch = 0; batch < Sizes::kBatches; batch++) loader.load(batch), loader.combine(batch);
    loader.advance();
    __syncthreads();
    if (ahead == 0) {
#pragma unroll
      for (int round = 0; round < Sizes::kRoundsD + Sizes::kRoundsV; round++)
        loader.transform(round, staged, operands, bias);
    }
  }
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int point = warp % W::kPoints, part = warp / W::kPoints, split = part % Tile::kSplit;
  const int k = part / Tile::kSplit % Tile::kWarpsK * (Tile::kTileK / Tile::kWarpsK) + lane % Tile::kLanesK * 4;
  const int c = part / Tile::kSplit / Tile::kWarpsK * (Tile::kTileC / Tile::kWarpsC) + lane / Tile::kLanesK * 4;
  const float* d = operands + (point * kChunk + split) * Tile::kTileK + k;
  const float* v = operands + Sizes::kOperandD + (point * kChunk + split) * Tile::kTileC + c;
  float* partial =
      p.partial +
      ((((i64(slice) * Tile::kSplit + split) * p.groups.divisor + group) * p.channel_tiles.divisor + channel_tile) *
           Sizes::kProducts +
       product) *
          (Sizes::kPasses * W::kPoints * Tile::kTileK * Tile::kTileC) +
      (point * Tile::kTileK + k) * Tile::kTileC + c;

  WgradSums<W, Tile> sums;
  sums.clear();
  int turn = 0, until_flush = p.flush;
  bool begin = true;
#pragma unroll 1
  for (; chunks > 0; chunks--) {
    // The chunk after next goes where this one was staged; the next is transformed into the other operands.
    loader.staged = staged + turn * staged_size;
    const float* from = staged + (turn ^ 1) * staged_size;
    float* to = operands + (turn ^ 1) * Sizes::kOperands;
    const int now = turn * Sizes::kOperands;
    constexpr int kRounds = Sizes::kRoundsD + Sizes::kRoundsV;
#pragma unroll
    for (int step = 0; step < Sizes::kSteps; step++) {
      if (step < Sizes::kBatches) loader.load(step);
      sums.multiply_add(d + now + step * Tile::kSplit * Tile::kTileK, v + now + step * Tile::kSplit * Tile::kTileC);
#pragma unroll
      for (int round = 0; round < kRounds; round++)
        if (round * Sizes::kSteps / kRounds == step) loader.transform(round, from, to, bias);
      if (step > 0) loader.combine(step - 1);
    }
    loader.advance();
    turn ^= 1;
    if (--until_flush == 0 || chunks == 1) {
      sums.flush(partial, begin);
      sums.clear();
      begin = false;
      until_flush = p.flush;
    }
    __syncthreads();
  }

  // The sum of dy is the product of the points 1 of both axes, where dy enters with factors 1.
  if (p.bias_partial && product == (H::kPoints > 1 ? 1 : 0) && c_tile == 0) {
    shared[threadIdx.x] = bias;
    __syncthreads();
    const int channel = k_tile * Tile::kTileK + threadIdx.x;
    if (threadIdx.x < Tile::kTileK && channel < p.outputs) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < Sizes::kThreads / Tile::kTileK; i++) sum += shared[threadIdx.x + i * Tile::kTileK];
      p.bias_partial[(i64(slice) * p.groups.divisor + group) * p.outputs + channel] = sum;
    }
  }
}

}  // namespace polyconv
