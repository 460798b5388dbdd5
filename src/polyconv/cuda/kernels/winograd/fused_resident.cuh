// Fused Winograd kernel for few channels: the transformed source of all channels stays in shared memory.
//
// A block transforms its patch once, whatever the number of written channels, and then loops over tiles of kK of them
// without a barrier until the sums of a tile are exchanged. A warp owns all points along H of one point along W, for
// half of the tile's channels and all 32 units. So the inverse transform along H is done in registers, and only H::kM
// instead of H::kPoints words per unit and point along W are exchanged.
//
// Shared memory:   v[channel][point][unit]   meeting[h][point along W][k of a slice][unit]
// The patch is staged in the exchange memory (`meeting`), kChunk channels at a time. Grid as in winograd/fused.cuh.
#pragma once

#include "winograd/fused.cuh"

namespace polyconv {

template <class H_, class W_, int kColumns_, int kChannels_>
struct ResidentTile {
  using H = H_;
  using W = W_;
  static constexpr int kChannels = kChannels_;                                            // most that fit
  static constexpr int kLanesK = 4, kLanesU = 8, kThreadK = 4, kThreadU = 4, kParts = 2;  // parts of k, one per warp
  static constexpr int kPoints = H::kPoints * W::kPoints;
  static constexpr int kWarps = kParts * W::kPoints, kThreads = 32 * kWarps;
  static constexpr int kPartK = kLanesK * kThreadK, kK = kParts * kPartK, kUnits = kLanesU * kThreadU;
  static constexpr int kColumns = kColumns_, kUnitsW = kColumns / W::kM, kUnitsH = kUnits / kUnitsW;
  static constexpr int kPieces = kUnitsH * (kColumns / 32);  // rows of 32 columns that a warp stores at a time
  static constexpr int kRows = kUnitsH * H::kM;              // of outputs
  static constexpr int kPatchRows = kRows + H::kLongest - 1;
  static constexpr int kPatchPitch = (kColumns + W::kLongest - 1 + 3) / 4 * 4;
  static constexpr int kPatch = kPatchRows * kPatchPitch;
  static constexpr int kChunk = kChannels / 2;
  static constexpr int kPitchV = kUnits;
  static constexpr int kV = kPoints * kPitchV;      // of one channel
  static constexpr int kSliceK = kParts * kLanesK;  // channels of a slice: one per lane
  static constexpr int kSlice = kSliceK * kUnits;   // of one point along W and one row
  static constexpr int kMeeting = H::kM * W::kPoints * kSlice;
  static constexpr int kTogether = 4;    // blocks that begin with the same tile of channels
  static constexpr bool kSwaps = false;  // whether sums are exchanged with the halves of every second row swapped
  static_assert(kUnits == 32, "a lane of the inverse transform has one unit");
  static_assert(kChunk * kPatch <= kMeeting, "the patch is staged where the sums meet");
  static_assert(kWarps % H::kM == 0, "a warp writes one row of every unit");
  static_assert(W::kM == 4 && W::kPoints >= kPieces, "a warp's rows of outputs fit where its points were");
};

// Returns the number with its origin hidden from the compiler: constants added to it become offsets of the accesses.
__device__ __forceinline__ int opaque_index(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A thread's point along W, its first channel of the tile and its first unit.
template <class Tile>
struct ResidentPlace {
  int point, k, unit;

  __device__ __forceinline__ explicit ResidentPlace(u32 thread) {
    const int lane = thread % 32, warp = thread / 32;
    point = warp / Tile::kParts;
    k = warp % Tile::kParts * Tile::kPartK + lane / Tile::kLanesU * Tile::kThreadK;
    unit = lane % Tile::kLanesU * Tile::kThreadU;
  }
  // Address of this thread's sums in the exchange memory.
  __device__ __forceinline__ float* meets(float* meeting) const {
    return meeting + point * Tile::kSlice + k / Tile::kThreadK * Tile::kUnits + unit;
  }
};

// Loads and transforms the source, all channels.
template <class Tile>
__device__ __forceinline__ void transform_all(const FusedParams& p, const FusedBlock<Tile>& block, float* v,
                                              float* patches) {
  PatchLoader<Tile> patch(p, block);
  patch.load(p);
#pragma unroll 1
  for (int left = p.channels_padded;;) {
    patch.store(patches);
    __syncthreads();
    left -= Tile::kChunk;
    if (left > 0) patch.load(p);
    transform_chunk<Tile>(patches, v);
    __syncthreads();
    if (left <= 0) break;
    v += Tile::kChunk * Tile::kV;
  }
}

// A lane's share of the inverse transform along W and of the stores: one row of every unit, of several channels.
template <class Tile>
struct ResidentStore {
  static constexpr int kAcross = Tile::kColumns / 32;
  static constexpr int kStep = Tile::kWarps / Tile::H::kM, kEach = (Tile::kSliceK + kStep - 1) / kStep;
  float* corner;  // column number `lane` of the warp's first row, the warp's first channel of a slice
  u32 inside;     // bit i: in piece number i, this lane's column is in the image
  bool wide;      // all of the warp's are, and pairs of columns may be stored: then `corner` is column 2 * lane

  __device__ __forceinline__ ResidentStore(const FusedParams& p, const FusedBlock<Tile>& block) : inside(0) {
    const int lane = threadIdx.x % 32, h = threadIdx.x / 32 % Tile::H::kM, k = threadIdx.x / 32 / Tile::H::kM;
    const int i = fused_position(p.h, block.residue_h, block.first_h + h);
    const int j = fused_position(p.w, block.residue_w, block.first_w + lane);
    const i64 first_k = i64(block.group) * p.outputs + block.first_k_tile * Tile::kK + k * Tile::kThreadK;
    const int down = Tile::H::kM * int(p.h.dilation.divisor), across = 32 * int(p.w.dilation.divisor);
    corner = p.written + block.image * p.written_batch + first_k * p.written_channel +
             i64(p.h.written_first + i * p.h.written_step) * p.written_row +
             i64(p.w.written_first + j * p.w.written_step) * p.written_column;
#pragma unroll
    for (int piece = 0; piece < Tile::kPieces; piece++)
      if (j + piece % kAcross * across < p.w.count && i + piece / kAcross * down < p.h.count) inside |= 1u << piece;
    wide = kAcross == 2 && p.pairs && __all_sync(0xffffffffu, inside == (1u << Tile::kPieces) - 1);
    if (wide) corner += lane;
  }

  // One slice of a tile of channels, `k_left` from this warp's first on. All channels of a warp take each step
  // together, to pay the latency of shared memory once. `undo` post-processes the outputs of a unit.
  template <class Undo, class Params>
  __device__ __forceinline__ void write(const Params& p, float* meeting, int k_left, Undo undo) const {
    using H = typename Tile::H;
    using W = typename Tile::W;
    const int thread = fresh_thread(), lane = thread % 32, warp = thread / 32, first = warp / H::kM;
    const int own = warp % H::kM * W::kPoints * Tile::kSlice + first * Tile::kUnits;
    const float* const mine = meeting + opaque_index(own + lane);
    float points[kEach][W::kPoints];
#pragma unroll
    for (int n = 0; n < kEach; n++)
      if (exists(n, first)) {
        const float* from = mine;
        if constexpr (Tile::kSwaps) from = meeting + opaque_index(own + (lane ^ (first + n * kStep) % 2 * 16));
#pragma unroll
        for (int w = 0; w < W::kPoints; w++) points[n][w] = from[w * Tile::kSlice + n * kStep * Tile::kUnits];
      }
    __syncwarp();
    float* const stage = meeting + opaque_index(own + lane / Tile::kUnitsW * (kAcross * Tile::kSlice) +
                                                lane % Tile::kUnitsW / 8 * Tile::kSlice + lane % 8 * W::kM);
#pragma unroll
    for (int n = 0; n < kEach; n++)
      if (exists(n, first)) {
        float y[W::kM];
        W::output(points[n], y);
        undo(n, y);
        store4(stage + n * kStep * Tile::kUnits, make_float4(y[0], y[1], y[2], y[3]));
      }
    __syncwarp();
    if (wide)
      store_pairs(p, meeting + opaque_index(own + lane / 16 * Tile::kSlice + lane % 16 * 2), first, k_left);
    else
      store_columns(p, mine, first, k_left);
  }

  // Whether the warp has a channel number n in a slice.
  static __device__ __forceinline__ bool exists(int n, int first) {
    return (n + 1) * kStep <= Tile::kSliceK || n * kStep + first < Tile::kSliceK;
  }

  template <class Params>
  __device__ __forceinline__ void store_pairs(const Params& p, const float* mine, int first, int k_left) const {
    float* to = corner;
#pragma unroll
    for (int n = 0; n < kEach; n++) {
      if (exists(n, first) && n * kStep * Tile::kThreadK < k_left) {
        float* at = to;
        float2 residual[Tile::kUnitsH];
        if constexpr (EpilogueOf<Params>::kResidual) {
          // Before the first store, so that the loads overlap.
          const float* from = add_bytes(at, p.residual_bytes());
#pragma unroll
          for (int row = 0; row < Tile::kUnitsH; row++, from = add_bytes(from, p.down_bytes))
            residual[row] = p.residual ? *reinterpret_cast<const float2*>(from) : make_float2(0.f, 0.f);
        }
#pragma unroll
        for (int row = 0; row < Tile::kUnitsH; row++) {
          const float* const from = mine + row * kAcross * Tile::kSlice + n * kStep * Tile::kUnits;
          float2 pair = *reinterpret_cast<const float2*>(from);
          if constexpr (EpilogueOf<Params>::kResidual) pair.x += residual[row].x, pair.y += residual[row].y;
          if constexpr (EpilogueOf<Params>::kExists) {
            float value[2] = {pair.x, pair.y};
            activate(value, p);
            pair = make_float2(value[0], value[1]);
          }
          *reinterpret_cast<float2*>(at) = pair;
          at = add_bytes(at, p.down_bytes);
        }
      }
      to = add_bytes(to, p.job_bytes);
    }
  }

  template <class Params>
  __device__ __forceinline__ void store_columns(const Params& p, const float* mine, int first, int k_left) const {
    float* to = corner;
#pragma unroll 1
    for (int n = 0; n < kEach; n++) {
      if (exists(n, first) && n * kStep * Tile::kThreadK < k_left) {
#pragma unroll
        for (int piece = 0; piece < Tile::kPieces; piece++)
          if (inside >> piece & 1) {
            const float sum = mine[piece * Tile::kSlice];
            float* const at = add_bytes(to, piece / kAcross * p.down_bytes + piece % kAcross * p.across_bytes);
            *at = finished(p, sum, at);
          }
      }
      mine += kStep * Tile::kUnits;
      to = add_bytes(to, p.job_bytes);
    }
  }
};

template <class Tile, class Params>
__device__ __forceinline__ void winograd_fused_resident(const Params& p) {
  using H = typename Tile::H;
  using W = typename Tile::W;
  constexpr int kOnes = 1;  // the point 1 has factor 1 in every output: a bias added there reaches all of them
  extern __shared__ __align__(16) float shared[];
  float* const meeting = shared + Tile::kChannels * Tile::kV;
  const FusedBlock<Tile> block(p, blockIdx.x, blockIdx.y);
  if (block.is_outside(p)) return;

  // Blocks begin with different tiles of channels, so that all weights are in use at any time and stay in L2, whatever
  // is written meanwhile. Neighbours begin with the same tile: their outputs are close in memory.
  const u32 turn = blockIdx.x / Tile::kTogether % p.k_tiles_each;
  int k_tile = turn < u32(block.k_tiles) ? turn : 0;
  const ResidentPlace<Tile> start(threadIdx.x);
  const int tile_weights = p.channels_padded * (Tile::kPoints * Tile::kK);
  const float* weights = p.weights + start.point * Tile::kK + start.k +
                         (i64(block.group) * p.k_tiles + block.first_k_tile + k_tile) * tile_weights;
  float4 u[H::kPoints];  // of this thread's points, one channel ahead
#pragma unroll
  for (int h = 0; h < H::kPoints; h++) u[h] = load4(weights + h * W::kPoints * Tile::kK);
  transform_all<Tile>(p, block, shared, meeting);

  ResidentStore<Tile> store(p, block);
  store.corner += k_tile * Tile::kK * p.written_channel;
  const float* const own = shared + start.point * Tile::kPitchV + start.unit;
  const float* v_at = own;
  float4 v = load4(v_at);  // one point ahead
#pragma unroll 1
  for (int tiles = block.k_tiles; tiles > 0; tiles--) {
    const int k_left = p.outputs - (block.first_k_tile + k_tile) * Tile::kK;
    const bool last = ++k_tile == block.k_tiles;  // the first tile follows
    float bias[Tile::kThreadK];
    {
      const ResidentPlace<Tile> place(fresh_thread());
      const i64 behind = (fresh_block_y() + 1) * i64(p.outputs);  // end of the group's channels
#pragma unroll
      for (int i = 0; i < Tile::kThreadK; i++)
        bias[i] = p.bias && place.point == kOnes && place.k + i < k_left ? p.bias[behind - k_left + place.k + i] : 0.f;
    }
    float sum[H::kPoints][Tile::kThreadK][Tile::kThreadU];
#pragma unroll
    for (int h = 0; h < H::kPoints; h++)
#pragma unroll
      for (int i = 0; i < Tile::kThreadK; i++)
#pragma unroll
        for (int j = 0; j < Tile::kThreadU; j++) sum[h][i][j] = h == kOnes ? bias[i] : 0.f;

#pragma unroll 1
    for (int left = p.channels_padded; left > 0; left--) {
      weights += Tile::kPoints * Tile::kK;
      if (last && left == 1) weights -= i64(block.k_tiles) * tile_weights;
      const float* const next = left > 1 ? v_at + Tile::kV : own;
#pragma unroll
      for (int h = 0; h < H::kPoints; h++) {
        const float column[4] = {v.x, v.y, v.z, v.w};
        const float row[4] = {u[h].x, u[h].y, u[h].z, u[h].w};
        v = h + 1 < H::kPoints ? load4(v_at + (h + 1) * W::kPoints * Tile::kPitchV) : load4(next);
#pragma unroll
        for (int i = 0; i < Tile::kThreadK; i++)
#pragma unroll
          for (int j = 0; j < Tile::kThreadU; j++) sum[h][i][j] = fmaf(row[i], column[j], sum[h][i][j]);
        u[h] = load4(weights + h * W::kPoints * Tile::kK);
      }
      v_at = next;
    }

    float* const sums_to = ResidentPlace<Tile>(fresh_thread()).meets(meeting);
#pragma unroll
    for (int i = 0; i < Tile::kThreadK; i++) {
      float rows[Tile::kThreadU][H::kM];
#pragma unroll
      for (int j = 0; j < Tile::kThreadU; j++) {
        float points[H::kPoints];
#pragma unroll
        for (int h = 0; h < H::kPoints; h++) points[h] = sum[h][i][j];
        H::output(points, rows[j]);
      }
#pragma unroll
      for (int h = 0; h < H::kM; h++)
        store4(sums_to + h * W::kPoints * Tile::kSlice, make_float4(rows[0][h], rows[1][h], rows[2][h], rows[3][h]));
      __syncthreads();
      store.write(p, meeting, k_left - i - int(fresh_thread()) / (32 * H::kM) * Tile::kThreadK,
                  [](int, float (&)[W::kM]) {});
      store.corner += p.written_channel;
      __syncthreads();
    }
    store.corner += (Tile::kK - Tile::kThreadK) * p.written_channel;
    if (last) {
      store.corner -= block.k_tiles * Tile::kK * p.written_channel;
      k_tile = 0;
    }
  }
}

}  // namespace polyconv
