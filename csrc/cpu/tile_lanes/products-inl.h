// Products: for each point a GEMM, transformed weights x transformed input, in register tiles.
#if defined(POLYCONV_CPU_TILE_LANES_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_TILE_LANES_PRODUCTS_INL_H_
#undef POLYCONV_CPU_TILE_LANES_PRODUCTS_INL_H_
#else
#define POLYCONV_CPU_TILE_LANES_PRODUCTS_INL_H_
#endif

#include "common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// A register tile is kTileChannels output channels x up to kTileVectors vectors of units. 8 x 3 sums, 3 inputs and a
// weight (NEON: two vectors of weights) fill 32 registers; 16 registers hold 4 x 3.
#if POLYCONV_REGISTERS == 32
inline constexpr int kTileChannels = 8;
#else
inline constexpr int kTileChannels = 4;
inline constexpr int kWeightsAhead = 96 * kTileChannels;  // prefetch distance [floats]
#endif
inline constexpr int kTileVectors = 3;

// Vectors of the next tile if `remaining` are left: threes, and two twos instead of a three and a one.
constexpr int NextTile(int remaining) {
  return remaining == 4 ? 2 : remaining < kTileVectors ? remaining : kTileVectors;
}

template <int kVectors>
using Sums = Floats[kTileChannels][kVectors];

// sums += weights[k] * input[lane] for one channel: kVectors vectors and kTileChannels broadcast weights are loaded for
// kTileChannels * kVectors multiply-adds.
template <int kVectors>
HWY_INLINE void MultiplyAddChannel(Sums<kVectors>& sums, const float* HWY_RESTRICT weights,
                                   const float* HWY_RESTRICT input) {
  Floats in[kVectors];
  POLYCONV_UNROLL
  for (int z = 0; z < kVectors; z++) in[z] = Load(input + z * kLanes);
#if HWY_TARGET == HWY_NEON
  POLYCONV_UNROLL
  for (int k = 0; k < kTileChannels; k += kLanes) AddRows<kVectors>(Load(weights + k), in, sums + k);
#else
  POLYCONV_UNROLL
  for (int k = 0; k < kTileChannels; k++) {
    const Floats weight = Broadcast(weights[k]);
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) sums[k][z] = hn::MulAdd(weight, in[z], sums[k][z]);
  }
#endif
}

// sums += weights[channel][k] * input[channel][lane]. Most of the run time is spent in this loop.
//
// If there are many weights they come from beyond L2 and are prefetched: `next` are those of the following sum. A tile
// of one vector has no loads to spare for that. A core with four instructions per cycle has few free beside two
// multiply-adds and their loads, so two channels, whose weights fill a cache line, share one prefetch. With 16
// registers, all in use, both were slower: there the distance is fixed.
template <int kVectors>
HWY_INLINE void MultiplyAdd(Sums<kVectors>& sums, const float* HWY_RESTRICT weights, [[maybe_unused]] const float* next,
                            const float* HWY_RESTRICT input, int channels, std::size_t channel_pitch) {
  int c = 0;
#if POLYCONV_REGISTERS == 32
  const std::ptrdiff_t ahead = next - weights;
  for (; c + 2 <= channels; c += 2, weights += 2 * kTileChannels, input += 2 * channel_pitch) {
    if constexpr (kVectors > 1) __builtin_prefetch(weights + ahead);
    MultiplyAddChannel<kVectors>(sums, weights, input);
    MultiplyAddChannel<kVectors>(sums, weights + kTileChannels, input + channel_pitch);
  }
  if (c < channels) MultiplyAddChannel<kVectors>(sums, weights, input);
#else
  for (; c < channels; c++, weights += kTileChannels, input += channel_pitch) {
    if constexpr (kVectors > 1) __builtin_prefetch(weights + kWeightsAhead);
    MultiplyAddChannel<kVectors>(sums, weights, input);
  }
#endif
}

template <int kVectors>
HWY_INLINE void Clear(Sums<kVectors>& sums) {
  POLYCONV_UNROLL
  for (int k = 0; k < kTileChannels; k++) {
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) sums[k][z] = hn::Zero(kFloats);
  }
}

template <int kVectors>
HWY_INLINE void LoadTile(Sums<kVectors>& sums, const float* HWY_RESTRICT tile) {
  POLYCONV_UNROLL
  for (int k = 0; k < kTileChannels; k++) {
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) sums[k][z] = hn::Load(kFloats, tile + (k * kVectors + z) * kLanes);
  }
}

template <int kVectors>
HWY_INLINE void StoreTile(const Sums<kVectors>& sums, float* HWY_RESTRICT tile) {
  POLYCONV_UNROLL
  for (int k = 0; k < kTileChannels; k++) {
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) StoreAligned(tile + (k * kVectors + z) * kLanes, sums[k][z]);
  }
}

template <int kVectors>
HWY_INLINE void AddTile(Sums<kVectors>& sums, const float* HWY_RESTRICT tile) {
  POLYCONV_UNROLL
  for (int k = 0; k < kTileChannels; k++) {
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) {
      sums[k][z] = hn::Add(sums[k][z], hn::Load(kFloats, tile + (k * kVectors + z) * kLanes));
    }
  }
}

// Operands of a register tile. Pitches are in floats.
struct TileOperands {
  const float* weights;       // [slot][channel][k]
  const float* next_weights;  // of the register tile after this one
  const float* input;         // [slot][channel][lane]
  int channels;               // summed in this call
  std::size_t weights_pitch;  // between slots
  std::size_t input_pitch;    // between slots
  std::size_t channel_pitch;  // of the input
};

// One register tile of one point: products = sum over channels, or += if `accumulate`.
// Nested: two blocks of outputs and three slots. Block 0 is slot 0 + slot 1, block 1 is slot 0 + slot 2, so the sums of
// slot 0 continue in block 0 and are reloaded for block 1: three multiplications for four.
template <int kVectors, bool kNested>
HWY_NOINLINE void ComputeTile(const TileOperands& op, float* products, std::size_t block_pitch, bool accumulate) {
  Floats sums[kTileChannels][kVectors];
  Clear<kVectors>(sums);
  if constexpr (kNested) {
    const float *second = op.weights + op.weights_pitch, *third = second + op.weights_pitch;
    MultiplyAdd<kVectors>(sums, op.weights, second, op.input, op.channels, op.channel_pitch);
    HWY_ALIGN float common[kTileChannels * kVectors * kLanes];
    StoreTile<kVectors>(sums, common);
    MultiplyAdd<kVectors>(sums, second, third, op.input + op.input_pitch, op.channels, op.channel_pitch);
    if (accumulate) AddTile<kVectors>(sums, products);
    StoreTile<kVectors>(sums, products);
    LoadTile<kVectors>(sums, common);
    MultiplyAdd<kVectors>(sums, third, op.next_weights, op.input + 2 * op.input_pitch, op.channels, op.channel_pitch);
    products += block_pitch;
  } else {
    MultiplyAdd<kVectors>(sums, op.weights, op.next_weights, op.input, op.channels, op.channel_pitch);
  }
  if (accumulate) AddTile<kVectors>(sums, products);
  StoreTile<kVectors>(sums, products);
}

template <bool kNested>
HWY_INLINE void ComputeTile(int vectors, const TileOperands& op, float* products, std::size_t block_pitch,
                            bool accumulate) {
  if (vectors == 3) return ComputeTile<3, kNested>(op, products, block_pitch, accumulate);
  if (vectors == 2) return ComputeTile<2, kNested>(op, products, block_pitch, accumulate);
  ComputeTile<1, kNested>(op, products, block_pitch, accumulate);
}

// Products of kTileChannels output channels, by tile of units. The tile at vector z starts at z * kVectorSize and holds
// [block][point][k][vector]: contiguous for the stores of a register tile and the loads of an inverse transform.
template <class S>
struct ProductLayout {
  // One vector of padding per point, against conflicts of points in cache sets.
  static constexpr std::size_t PointPitch(int vectors) {
    return static_cast<std::size_t>(kTileChannels * vectors + 1) * kLanes;
  }
  static constexpr std::size_t BlockPitch(int vectors) { return S::kGroupPoints * PointPitch(vectors); }
  static constexpr std::size_t kVectorSize = S::kBlocks * BlockPitch(1);
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
