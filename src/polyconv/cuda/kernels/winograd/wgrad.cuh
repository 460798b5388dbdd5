// Winograd weight gradient: along both axes dW = G^T [(A dy) * (B^T x)], summed over all tiles.
//
// For each product of the H algorithm (a point of a segment), each segment and each point of the W algorithm this is a
// matrix product over the tiles, sums[k][c] = sum D[k][tile] V[c][tile]. A block owns one product of H, kTileK output
// channels, kTileC source channels and a slice of the rows of tiles; a warp owns one point of W (or a part of its
// channels, or every other tile). Three stages work on successive chunks of kChunk tiles, so that one barrier per chunk
// suffices and memory latency is hidden:
//   1. rows of dy and x are combined along H, lanes = positions along W (coalesced), into `staged`;
//   2. each tile of `staged` is transformed along W, lanes = channels, into `operands`: the transposition is free;
//   3. outer products: fragments of 16 bytes, 64 to 128 accumulators per thread.
// Tiles of neighbouring phases of a dilated convolution are neighbours here (`interleave`), so that a warp's reads are
// dense in memory. Accumulators are added to the block's part of `partial` every `flush` chunks: rounding errors grow
// with the longest sequence of additions, not with the number of tiles. winograd/wgrad_output.cuh adds the slices.
//
// Grid: x = ((slice * groups + group) * channel tiles + channel tile) * products + product. All products of a slice run
// at about the same time and share their reads in L2.
// Shared memory, two of each:  operands = D[point][tile][k], V[segment][point][tile][c];
//                              staged = dy[k][4 * tile], x[c][4 * block], a block being 4 positions of one phase.
#pragma once

#include "winograd/axis.cuh"

namespace polyconv {

constexpr int kChunk = 8;             // tiles multiplied between two barriers
constexpr int kMaxInterleave = 3;     // phases along W that share a chunk; more would not fit into shared memory
constexpr int kFirstFlush = 1 << 20;  // marks the first flush
constexpr int kMaxWarps = 16;
constexpr int kMaxClasses = 8;  // residue classes of taps per axis

struct WinogradWgradParams {
  const float* x;
  const float* dy;
  float* partial;       // [slice * kSplit][group][channel tile][product][segment][point][kTileK][kTileC]
  float* bias_partial;  // [slice][group * outputs], or null
  i64 x_batch, x_channel, dy_batch, dy_channel;
  i64 x_next_row, dy_next_row;                               // bytes between rows of a tile
  i64 x_next_channel, dy_next_channel;                       // bytes between channels of a warp
  i64 x_first_h[kMaxClasses], x_first_w[kMaxClasses];        // elements from x to position 0, by class of taps
  int read_first_h[kMaxClasses], read_first_w[kMaxClasses];  // rows and columns
  int x_row, x_column, dy_row, dy_column;                    // elements between lattice positions
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

// kTileK x kTileC channels per block, divided among kWarpsK x kWarpsC warps per point. kWarpsPass warps share the
// segments of W, and kSplit warps take every kSplit-th tile. A warp's lanes form kLanesK x (32 / kLanesK).
template <int kTileK_, int kTileC_, int kWarpsK_, int kWarpsC_, int kWarpsPass_, int kSplit_, int kLanesK_>
struct WgradTile {
  static constexpr int kTileK = kTileK_, kTileC = kTileC_, kWarpsK = kWarpsK_, kWarpsC = kWarpsC_, kSplit = kSplit_;
  static constexpr int kWarpsPass = kWarpsPass_;
  static constexpr int kLanesK = kLanesK_, kLanesC = 32 / kLanesK_;
  static constexpr int kThreadK = kTileK / kWarpsK / kLanesK, kThreadC = kTileC / kWarpsC / kLanesC;
  static constexpr int kWarpsPerPoint = kWarpsK * kWarpsC * kWarpsPass * kSplit;
  static_assert(kThreadK % 4 == 0 && kThreadC % 4 == 0, "fragments are loaded in quads");
};

template <class H, class W, class Tile>
struct WinogradWgradSizes {
  static_assert(W::kM == 4 && H::kTiles == 1 && W::kTiles == 1, "tiles of four along W; segments are not nested");
  static constexpr int kProducts = H::kPoints * H::kSegments;
  static constexpr int kPasses = W::kSegments;
  // Rows of x that a product needs: 0, 2, 4, ... for the point 0, 1, 3, 5, ... for infinity, 1, 2, 3, ... for others.
  static constexpr int kRowsX = H::kPoints > 2 ? H::kPoints - 2 : H::kPoints;
  static constexpr int kWarps = W::kPoints * Tile::kWarpsPerPoint, kThreads = 32 * kWarps;
  static constexpr int kSteps = kChunk / Tile::kSplit;
  static constexpr int kBeyond = (W::kSpan + 3) / 4 - 1;  // blocks (per phase) that the last tile reads after its own
  static constexpr int kOperandD = W::kPoints * kChunk * Tile::kTileK;
  static constexpr int kOperandV = kPasses * W::kPoints * kChunk * Tile::kTileC;
  static constexpr int kOperands = kOperandD + kOperandV;
  // Stage 1 by items: kItemsD channels of dy and kItemsX of x per warp; kHeadBlocks blocks per channel at a row's
  // start.
  static constexpr int kItemsD = (Tile::kTileK + kWarps - 1) / kWarps;
  static constexpr int kItemsX = (Tile::kTileC + kWarps - 1) / kWarps;
  // Each item of stage 1 has its row of `staged`, even if there are fewer channels than warps.
  static constexpr int kStagedD = kItemsD * kWarps * kChunk * 4;
  static constexpr int kPitchX = 4 * ((kChunk + kBeyond * kMaxInterleave) | 1);
  static constexpr int kStaged = kStagedD + kItemsX * kWarps * kPitchX;
  static constexpr int kHeadBlocks = kThreads / (4 * Tile::kTileC);
  static constexpr int kBatches = kSteps - 1;
  static constexpr int kTasksD = Tile::kTileK * kChunk, kTasksV = kPasses * Tile::kTileC * kChunk;
  static constexpr int kRoundsD = (kTasksD + kThreads - 1) / kThreads;
  static constexpr int kRoundsV = (kTasksV + kThreads - 1) / kThreads;
  static_assert(kThreads % Tile::kTileK == 0, "a thread transforms one channel of dy, whatever the tile");
};

// Row `point` of the matrix of a transform, computed from unit vectors (constants, once compiled).
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

// Work of a block. Decoded from the special register wherever it is needed: the accumulators need the registers.
template <class Sizes, class Tile>
struct WinogradWgradBlock {
  int product, slice, group, channel_tile, k_tile, c_tile;

  __device__ __forceinline__ explicit WinogradWgradBlock(const WinogradWgradParams& p) {
    const u32 number = fresh_block_x(), pair = number / Sizes::kProducts;
    const u32 above = p.channel_tiles.quotient(pair), run = p.groups.quotient(above);
    product = number % Sizes::kProducts;
    channel_tile = pair - above * p.channel_tiles.divisor;
    slice = run;
    group = above - run * p.groups.divisor;
    c_tile = p.k_tiles.quotient(channel_tile);
    k_tile = channel_tile - c_tile * int(p.k_tiles.divisor);
  }

  __device__ __forceinline__ int first_row(const WinogradWgradParams& p) const {
    return int(i64(p.rows) * slice / p.slices);
  }
  __device__ __forceinline__ int end_row(const WinogradWgradParams& p) const {
    return int(i64(p.rows) * (slice + 1) / p.slices);
  }
};

// A row of tiles, the same for all threads of a block. In shared memory, one for each of two successive rows.
struct WinogradWgradRow {
  const float *x, *dy;  // first row of the tiles, of the block's first channels
  int phase;            // first phase along W
  u32 rows;             // bit n: row n of dy, bit 8 + n: row n of x is inside the image and counts
  int x_first;          // first row of x, as a lattice position
  int beyond;           // 1 after the block's last row
};

// State of a block in shared memory, behind its buffers.
struct WinogradWgradState {
  float of_dy[4], of_x[8];  // factors of the block's product along H
  WinogradWgradRow row[2];
  int x_from, x_step;                         // first row of x that the product needs, and distance to the next
  i64 x_next_row;                             // that distance in bytes
  int end_row;                                // of the block
  i64 dy_warp[kMaxWarps], x_warp[kMaxWarps];  // elements to the first channel of each warp
};

// Stages 1 and 2 of a block: loops over its chunks and leaves transformed operands in shared memory.
template <class H, class W, class Tile, bool kClassed>
struct WinogradWgradLoader {
  using Sizes = WinogradWgradSizes<H, W, Tile>;
  using Block = WinogradWgradBlock<Sizes, Tile>;
  static constexpr int kRowsD = H::kM, kRowsX = Sizes::kRowsX;

  const WinogradWgradParams& p;
  WinogradWgradState& state;
  float* staged;  // target of stage 1
  u32 more;       // bit i: item i of dy, bit 16 + i: item i of x is not the last that has a channel

  // The chunk of stage 1.
  int row, tile;
  int x_place;                // this lane's position of x along W (with classes)
  const float *x_at, *dy_at;  // its address, of the current channel
  u32 mask;
  float dy_loaded[Sizes::kItemsD][kRowsD], x_loaded[Sizes::kItemsX][kRowsX];

  __device__ __forceinline__ WinogradWgradLoader(const WinogradWgradParams& params, WinogradWgradState& shared_state,
                                                 float* scratch)
      : p(params), state(shared_state), tile(0) {
    const Block block(p);
    const int warp = threadIdx.x / 32;
    const int left_d = min(Tile::kTileK, p.outputs - block.k_tile * Tile::kTileK) - 1 - warp;
    const int left_x = min(Tile::kTileC, p.channels - block.c_tile * Tile::kTileC) - 1 - warp;
    more = 0;
#pragma unroll
    for (int item = 0; item < 16; item++) {
      more |= u32((item + 1) * Sizes::kWarps <= left_d) << item;
      more |= u32((item + 1) * Sizes::kWarps <= left_x) << (16 + item);
    }
    row = block.first_row(p);
    if (threadIdx.x % 32 == 0) {
      state.dy_warp[warp] = (warp + min(left_d, 0)) * p.dy_channel;
      state.x_warp[warp] = (warp + min(left_x, 0)) * p.x_channel;
    }
    if (threadIdx.x == 0) {
      float of_dy[kRowsD], of_x[H::kPoints];
      coefficients<H, kRowsD, true>(block.product % H::kPoints, of_dy);
      coefficients<H, H::kPoints, false>(block.product % H::kPoints, of_x);
      state.end_row = block.end_row(p);
      state.x_from = of_x[0] == 0.f;
      state.x_step = steps_of_two(of_x) ? 2 : 1;
      state.x_next_row = state.x_step * p.x_next_row;
#pragma unroll
      for (int n = 0; n < H::kPoints; n++) scratch[n] = of_x[n];
#pragma unroll
      for (int n = 0; n < 4; n++) state.of_dy[n] = n < kRowsD ? of_dy[n] : 0.f;
#pragma unroll 1
      for (int n = 0; n < 8; n++) {
        const int from = state.x_from + n * state.x_step;
        state.of_x[n] = n < kRowsX && from < H::kPoints ? scratch[from] : 0.f;
      }
      aim_row();
    }
    __syncthreads();
  }

  static __device__ __forceinline__ bool steps_of_two(const float* of_x) {
    return H::kPoints > 2 && (of_x[1] == 0.f || of_x[H::kPoints > 2 ? 2 : 0] == 0.f);
  }

  // Decodes `row` = ((image * phases + phase) * tiles + tile along H) * outer phases + outer phase along W.
  __device__ __forceinline__ void aim_row() {
    const Block block(p);
    WinogradWgradRow& to = state.row[row & 1];
    const u32 above = p.outer_phases.quotient(row), column = p.tiles_h.quotient(above);
    const int image = p.phases_h.quotient(column);
    to.phase = (row - int(above * p.outer_phases.divisor)) * p.interleave;
    const int first =
        int(column - image * p.phases_h.divisor) + p.dilation_h * H::kM * int(above - column * p.tiles_h.divisor);
    const int x_first = first + (H::offset(block.product / H::kPoints) + state.x_from) * p.dilation_h;
    to.dy = p.dy + (i64(block.group) * p.outputs + block.k_tile * Tile::kTileK) * p.dy_channel + image * p.dy_batch +
            i64(first) * p.dy_row;
    const float* x = p.x + i64(block.group) * p.classes.quotient(p.channels) * p.x_channel + image * p.x_batch +
                     i64(x_first) * p.x_row;
    to.x = kClassed ? x : x + block.c_tile * Tile::kTileC * p.x_channel + p.x_first_h[0] + p.x_first_w[0];
    to.x_first = x_first;
    to.beyond = row >= state.end_row;
    u32 rows = 0;
#pragma unroll
    for (int n = 0; n < kRowsD; n++) rows |= u32(first + n * p.dilation_h < p.count_h && state.of_dy[n] != 0.f) << n;
    if (!kClassed) rows |= rows_inside(x_first, p.read_first_h[0]);
    to.rows = to.beyond ? 0 : rows;
  }

  __device__ __forceinline__ u32 rows_inside(int x_first, int read_first) const {
    u32 found = 0;
#pragma unroll
    for (int n = 0; n < kRowsX; n++) {
      const int at = read_first + p.read_step_h * (x_first + n * state.x_step * p.dilation_h);
      found |= u32(u32(at) < u32(p.height) && state.of_x[n] != 0.f) << (8 + n);
    }
    return found;
  }

  // Lattice position along W of element j of block number `number`, in the first of the row's phases.
  __device__ __forceinline__ int position(int number, int j) const {
    const int unit = p.interleaved.quotient(number);
    return number - unit * p.interleave + p.dilation_w * (4 * unit + j);
  }

  __device__ __forceinline__ bool column_inside(int read_first, int at) const {
    return u32(read_first + p.read_step_w * at) < u32(p.width);
  }

  __device__ __forceinline__ void aim_chunk() {
    const WinogradWgradRow& at = state.row[row & 1];
    const u32 thread = fresh_thread();
    const int here = at.phase + position(tile + thread % 32 / 4, thread % 4);
    const int x_here = here + Sizes::kBeyond * 4 * p.dilation_w;
    dy_at = at.dy + state.dy_warp[thread / 32] + i64(here) * p.dy_column;
    mask = here < p.count_w ? at.rows & 0xff : 0;
    if (kClassed) x_place = x_here;
    if (!kClassed) {
      x_at = at.x + state.x_warp[thread / 32] + i64(x_here) * p.x_column;
      mask |= column_inside(p.read_first_w[0], x_here) ? at.rows & 0xff00 : 0;
    }
  }

  // Moves to the next chunk. All threads see a new row after the next barrier.
  __device__ __forceinline__ void advance() {
    tile += kChunk;
    if (tile >= p.tiles) {
      tile = 0;
      row++;
      if (fresh_thread() == 0) aim_row();
    }
  }

  template <int kRows>
  static __device__ __forceinline__ void load_rows(const float* at, i64 step, u32 inside, float* loaded) {
#pragma unroll
    for (int n = 0; n < kRows; n++) {
      loaded[n] = (inside >> n & 1) ? __ldg(at) : 0.f;
      at = opaque(add_bytes(at, step));
    }
  }

  // One position of channel number c of the tile.
  __device__ __forceinline__ void load_x(int c, int here, float* loaded) const {
    const WinogradWgradRow& at = state.row[row & 1];
    const int first = Block(p).c_tile * Tile::kTileC;
    c = min(c, p.channels - first - 1);
    const float* from = at.x + i64(here) * p.x_column;
    u32 inside;
    if (kClassed) {
      c += first;
      const int channel = p.classes.quotient(c), number = c - channel * int(p.classes.divisor);
      const int h = p.classes_w.quotient(number), w = number - h * int(p.classes_w.divisor);
      from += channel * p.x_channel + p.x_first_h[h] + p.x_first_w[w];
      inside = !at.beyond && column_inside(p.read_first_w[w], here) ? rows_inside(at.x_first, p.read_first_h[h]) : 0;
    } else {
      from += c * p.x_channel;
      inside = column_inside(p.read_first_w[0], here) ? at.rows : 0;
    }
    load_rows<kRowsX>(from, state.x_next_row, inside >> 8, loaded);
  }

  // The first blocks of a chunk are the last ones of the chunk before; at the beginning of a row they are loaded.
  __device__ __forceinline__ void head(const float* before) const {
    const u32 thread = fresh_thread();
    const int blocks = Sizes::kBeyond * p.interleave;
    const u32 c = thread / 4 / Sizes::kHeadBlocks, j = thread % 4;
    const u32 to = Sizes::kStagedD + c * Sizes::kPitchX + j;
#pragma unroll 1
    for (int number = thread / 4 % Sizes::kHeadBlocks; number < blocks; number += Sizes::kHeadBlocks) {
      if (c >= Tile::kTileC) break;
      float value;
      if (tile > 0) {
        value = before[to + (kChunk + number) * 4];
      } else {
        float loaded[kRowsX], of_x[8];
        load_x(c, state.row[row & 1].phase + position(number, j), loaded);
        fragment(state.of_x, (kRowsX + 3) / 4, of_x);
        value = dot<kRowsX>(of_x, loaded);
      }
      staged[to + number * 4] = value;
    }
  }

  // Stage 1 in batches of items, evenly distributed, dy and x alternating if there are fewer items than batches.
  static __device__ __forceinline__ constexpr int first_d(int batch) {
    return Sizes::kItemsD * batch / Sizes::kBatches;
  }
  static __device__ __forceinline__ constexpr int first_x(int batch) {
    return (Sizes::kItemsX * batch + Sizes::kBatches - 2) / Sizes::kBatches;
  }

  // First half: loads.
  __device__ __forceinline__ void load(int batch) {
#pragma unroll
    for (int item = first_d(batch); item < first_d(batch + 1); item++) {
      load_rows<kRowsD>(dy_at, p.dy_next_row, mask, dy_loaded[item]);
      if (more >> item & 1) dy_at = add_bytes(dy_at, p.dy_next_channel);
    }
#pragma unroll
    for (int item = first_x(batch); item < first_x(batch + 1); item++) {
      if (kClassed) {
        load_x(fresh_thread() / 32 + item * Sizes::kWarps, x_place, x_loaded[item]);
      } else {
        load_rows<kRowsX>(x_at, state.x_next_row, mask >> 8, x_loaded[item]);
        if (more >> (16 + item) & 1) x_at = add_bytes(x_at, p.x_next_channel);
      }
    }
  }

  // Second half: the product of the H transform, into `staged`. The quads of a row of dy are permuted by channel, and
  // rows of x have an odd number of quads, so that stage 2, with channels as lanes, reads both without bank conflicts.
  __device__ __forceinline__ void combine(int batch) const {
    const u32 thread = fresh_thread(), lane = thread % 32, warp = thread / 32;
    float of_dy[4], of_x[8];
    fragment(state.of_dy, 1, of_dy);
    fragment(state.of_x, (kRowsX + 3) / 4, of_x);
#pragma unroll
    for (int item = first_d(batch); item < first_d(batch + 1); item++) {
      const u32 k = warp + item * Sizes::kWarps;
      staged[k * 4 * kChunk + (lane ^ (k % 8 * 4))] = dot<kRowsD>(of_dy, dy_loaded[item]);
    }
    float* const to = staged + Sizes::kStagedD + Sizes::kBeyond * p.interleave * 4 + lane;
#pragma unroll
    for (int item = first_x(batch); item < first_x(batch + 1); item++) {
      const u32 c = warp + item * Sizes::kWarps;
      to[c * Sizes::kPitchX] = dot<kRowsX>(of_x, x_loaded[item]);
    }
  }

  static __device__ __forceinline__ void fragment(const float* at, int quads, float* values) {
#pragma unroll
    for (int i = 0; i < quads; i++) {
      const float4 v = load4(at + 4 * i);
      values[4 * i] = v.x, values[4 * i + 1] = v.y, values[4 * i + 2] = v.z, values[4 * i + 3] = v.w;
    }
  }

  template <int kRows>
  static __device__ __forceinline__ float dot(const float* a, const float* b) {
    float sum = a[0] * b[0];
#pragma unroll
    for (int n = 1; n < kRows; n++) sum = fmaf(a[n], b[n], sum);
    return sum;
  }

  // Stage 2, one round: a tile of one channel per thread, dy in the first rounds, then x.
  __device__ __forceinline__ void transform(int round, const float* from, float* operands, float& bias) const {
    const u32 thread = fresh_thread();
    if (round < Sizes::kRoundsD) {
      const u32 task = thread + round * Sizes::kThreads;
      if (Sizes::kTasksD % Sizes::kThreads != 0 && task >= Sizes::kTasksD) return;
      const u32 k = task % Tile::kTileK, u = task / Tile::kTileK;
      float dy_tile[4], d[W::kPoints];
      fragment(from + k * 4 * kChunk + (u ^ k % 8) * 4, 1, dy_tile);
      W::spread(dy_tile, d);
#pragma unroll
      for (int i = 0; i < W::kPoints; i++) operands[(i * kChunk + u) * Tile::kTileK + k] = d[i];
      bias += d[1];
      return;
    }
    const u32 task = thread + (round - Sizes::kRoundsD) * Sizes::kThreads;
    if (Sizes::kTasksV % Sizes::kThreads != 0 && task >= Sizes::kTasksV) return;
    const u32 c = task % Tile::kTileC, u = task / Tile::kTileC % kChunk, segment = task / (Tile::kTileC * kChunk);
    const float* at = from + Sizes::kStagedD + c * Sizes::kPitchX + (u + segment * p.interleave) * 4;
    float inputs[8], v[W::kPoints];
    fragment(at, 1, inputs);
    fragment(at + p.interleave * 4, 1, inputs + 4);
    W::input(inputs, v);
    float* to = operands + Sizes::kOperandD + (segment * W::kPoints * kChunk + u) * Tile::kTileC + c;
#pragma unroll
    for (int i = 0; i < W::kPoints; i++) to[i * kChunk * Tile::kTileC] = v[i];
  }
};

// Stage 3: the accumulators of a thread, for one point of W and its segments.
template <class W, class Tile>
struct WinogradWgradSums {
  static constexpr int kPasses = W::kSegments / Tile::kWarpsPass;
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

  // Adds the sums to those of `partial`, or starts them.
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

// Keeps the compiler from hoisting loads into spills. From sm_90 on the barrier takes registers, too many for 16 warps.
template <int kWarps>
__device__ __forceinline__ void keep_order() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (kWarps < 16) __syncwarp();
#else
  __syncwarp();
#endif
}

// Step of a chunk in which a round of transforms runs: evenly distributed. On sm_90 eight points along H leave no
// register for a round in the first step.
template <class H>
__device__ __forceinline__ constexpr int step_of(int round, int rounds, int steps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  return H::kPoints == 8 ? (round + 1) * steps / (rounds + 1) : round * steps / rounds;
#else
  return round * steps / rounds;
#endif
}

// A thread's channels within the block's tile, its point and its share of the tiles.
template <class W, class Tile>
struct WinogradWgradPlace {
  u32 point, split, k, c, segment;

  __device__ __forceinline__ explicit WinogradWgradPlace(u32 thread) {
    const u32 lane = thread % 32, warp = thread / 32, part = warp / W::kPoints;
    point = warp % W::kPoints;
    split = part % Tile::kSplit;
    k = part / Tile::kSplit % Tile::kWarpsK * (Tile::kTileK / Tile::kWarpsK) + lane % Tile::kLanesK * 4;
    const u32 column = part / Tile::kSplit / Tile::kWarpsK;
    c = column % Tile::kWarpsC * (Tile::kTileC / Tile::kWarpsC) + lane / Tile::kLanesK * 4;
    segment = column / Tile::kWarpsC * (W::kSegments / Tile::kWarpsPass);
  }
};

// Address of a thread's partial sums.
template <class Sizes, class Tile, class W>
__device__ __forceinline__ float* partial_of(const WinogradWgradParams& p) {
  const WinogradWgradBlock<Sizes, Tile> block(p);
  const WinogradWgradPlace<W, Tile> place(fresh_thread());
  const i64 run = (i64(block.slice) * Tile::kSplit + place.split) * p.groups.divisor + block.group;
  const i64 product = (run * p.channel_tiles.divisor + block.channel_tile) * Sizes::kProducts + block.product;
  return p.partial + product * (Sizes::kPasses * W::kPoints * Tile::kTileK * Tile::kTileC) +
         ((place.segment * W::kPoints + place.point) * Tile::kTileK + place.k) * Tile::kTileC + place.c;
}

template <class H, class W, class Tile, bool kClassed>
__device__ __forceinline__ void winograd_wgrad(const WinogradWgradParams& p) {
  using Sizes = WinogradWgradSizes<H, W, Tile>;
  extern __shared__ __align__(16) float shared[];

  constexpr int kBuffer = Sizes::kOperands + Sizes::kStaged;
  WinogradWgradLoader<H, W, Tile, kClassed> loader(p, *reinterpret_cast<WinogradWgradState*>(shared + 2 * kBuffer),
                                                   shared);
  int chunks;
  {
    const WinogradWgradBlock<Sizes, Tile> block(p);
    chunks = (block.end_row(p) - block.first_row(p)) * ((p.tiles + kChunk - 1) / kChunk);
  }

  // Prologue: the first chunk through stages 1 and 2, the second through stage 1. Chunks are counted backwards, and the
  // parity of a chunk's number selects its buffers.
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
      for (int round = 0; round < Sizes::kRoundsD + Sizes::kRoundsV; round++)
        loader.transform(round, loader.staged, loader.staged - Sizes::kOperands, bias);
    }
  }
  __syncthreads();

  WinogradWgradSums<W, Tile> sums;
  sums.clear();
  int until_flush = p.flush + kFirstFlush;
#pragma unroll 1
  for (; chunks > 0; chunks--) {
    // The chunk after next goes where this one was staged; the next is transformed into the other operands.
    float* const now = shared + (chunks % 2 ? kBuffer : 0);
    float* const next = shared + (chunks % 2 ? 0 : kBuffer);
    loader.staged = now + Sizes::kOperands;
    const WinogradWgradPlace<W, Tile> place(fresh_thread());
    const float* d = now + (place.point * kChunk + place.split) * Tile::kTileK + place.k;
    const float* v = now + Sizes::kOperandD +
                     ((place.segment * W::kPoints + place.point) * kChunk + place.split) * Tile::kTileC + place.c;
    constexpr int kRounds = Sizes::kRoundsD + Sizes::kRoundsV;
    loader.head(next + Sizes::kOperands);
    loader.aim_chunk();
#pragma unroll
    for (int step = 0; step < Sizes::kSteps; step++) {
      // Consumers of loads come before the last products: nothing behind them could hide the latency.
      if (step > 0) keep_order<Sizes::kWarps>();
      if (step > 0) loader.combine(step - 1);
      if (step < Sizes::kBatches) loader.load(step);
#pragma unroll
      for (int round = 0; round < kRounds; round++)
        if (step_of<H>(round, kRounds, Sizes::kSteps) == step)
          loader.transform(round, next + Sizes::kOperands, next, bias);
      if (step == Sizes::kSteps - 1) loader.advance();
      sums.multiply_add(d + step * Tile::kSplit * Tile::kTileK, v + step * Tile::kSplit * Tile::kTileC);
    }
    if (--until_flush % kFirstFlush == 0 || chunks == 1) {
      sums.flush(partial_of<Sizes, Tile, W>(p), until_flush >= kFirstFlush);
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
      for (int i = 0; i < Sizes::kThreads / Tile::kTileK; i++) sum += shared[threadIdx.x + i * Tile::kTileK];
      p.bias_partial[(i64(block.slice) * p.groups.divisor + block.group) * p.outputs + channel] = sum;
    }
  }
}

}  // namespace polyconv
