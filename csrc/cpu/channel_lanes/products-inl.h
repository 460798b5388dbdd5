// Products of two sets of channels, summed over pixels or tiles: sums[a][b] += rows[t][a] * vectors[t][b].
#if defined(POLYCONV_CPU_CHANNEL_LANES_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_CHANNEL_LANES_PRODUCTS_INL_H_
#undef POLYCONV_CPU_CHANNEL_LANES_PRODUCTS_INL_H_
#else
#define POLYCONV_CPU_CHANNEL_LANES_PRODUCTS_INL_H_
#endif

#include <algorithm>

#include "channel_lanes/grid.h"
#include "common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// A register tile is up to kSumRows broadcast channels x kSumVectors vectors of channels.
#if POLYCONV_REGISTERS == 32
inline constexpr int kSumRows = 8;
#else
inline constexpr int kSumRows = 4;
#endif
inline constexpr int kSumVectors = 3;

// Rows of the next tile if `remaining` are left: a power of two, so that a tile has whole vectors or a part of one.
constexpr int NextRows(int remaining) {
  int rows = 1;
  while (rows < remaining && rows < kSumRows) rows *= 2;
  return rows;
}

// Vectors of the next tile: the widest, but two tiles of similar width at the end instead of a wide and a narrow one.
constexpr int NextVectors(int remaining, int widest = kSumVectors) {
  if (remaining <= widest) return remaining;
  return remaining < 2 * widest - 1 ? (remaining + 1) / 2 : widest;
}

// Packed pixels or transformed tiles as a list of vectors of channels. Pitches are in floats.
struct ChannelOperand {
  const float* data;
  std::size_t vector_pitch;  // between vectors of channels
  std::size_t column_pitch;  // between neighbours in a row of the list
  std::size_t row_pitch;     // between rows of the list
};

// row_count x column_count products per pair of channels, summed in one call.
struct ProductBlock {
  ChannelOperand rows, vectors;
  int row_count, column_count;
};

template <int kRows, int kVectors>
HWY_NOINLINE void SumTile(const ProductBlock& block, float* HWY_RESTRICT sums, bool accumulate) {
  Floats sum[kRows][kVectors];
  POLYCONV_UNROLL
  for (int r = 0; r < kRows; r++) {
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors; v++) {
      sum[r][v] = hn::Zero(kFloats);
      hwy::Prefetch(sums + (r * kVectors + v) * kLanes);  // needed at the end
    }
  }
  for (int i = 0; i < block.row_count; i++) {
    const float* HWY_RESTRICT a = block.rows.data + i * block.rows.row_pitch;
    const float* HWY_RESTRICT b = block.vectors.data + i * block.vectors.row_pitch;
    const std::size_t a_pitch = block.rows.column_pitch, b_pitch = block.vectors.column_pitch;
    const std::size_t vector_pitch = block.vectors.vector_pitch;
    for (int j = 0; j < block.column_count; j++, a += a_pitch, b += b_pitch) {
      Floats in[kVectors];
      POLYCONV_UNROLL
      for (int v = 0; v < kVectors; v++) in[v] = hn::Load(kFloats, b + v * vector_pitch);
#if HWY_TARGET == HWY_NEON
      if constexpr (kRows % kLanes == 0) {
        const std::size_t pitch = block.rows.vector_pitch;
        POLYCONV_UNROLL
        for (int r = 0; r < kRows; r += kLanes) AddRows<kVectors>(Load(a + r / kLanes * pitch), in, sum + r);
        continue;
      }
#endif
      POLYCONV_UNROLL
      for (int r = 0; r < kRows; r++) {
        const Floats factor = Broadcast(a[r]);
        POLYCONV_UNROLL
        for (int v = 0; v < kVectors; v++) sum[r][v] = hn::MulAdd(factor, in[v], sum[r][v]);
      }
    }
  }
  POLYCONV_UNROLL
  for (int r = 0; r < kRows; r++) {
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors; v++) {
      float* place = sums + (r * kVectors + v) * kLanes;
      StoreAligned(place, accumulate ? hn::Add(sum[r][v], hn::Load(kFloats, place)) : sum[r][v]);
    }
  }
}

template <int kRows>
HWY_INLINE void SumTile(int vectors, const ProductBlock& block, float* sums, bool accumulate) {
  if (vectors == 3) return SumTile<kRows, 3>(block, sums, accumulate);
  if (vectors == 2) return SumTile<kRows, 2>(block, sums, accumulate);
  SumTile<kRows, 1>(block, sums, accumulate);
}

// Sums of all pairs of channels, a matrix of register tiles: [tile of rows][tile of vectors][row][vector][lane].
struct SumLayout {
  int rows;     // channels that are broadcast
  int vectors;  // of the other channels

  int padded_rows() const { return rows / kSumRows * kSumRows + (rows % kSumRows ? NextRows(rows % kSumRows) : 0); }
  int row_tiles() const { return CeilDiv(rows, kSumRows); }
  // An odd number of vectors, against conflicts of consecutive matrices in cache sets.
  std::size_t size() const { return static_cast<std::size_t>(padded_rows() * vectors | 1) * kLanes; }

  // Calls fn(first row, rows, first vector, vectors, offset of the tile) for a range of row tiles and all vector tiles.
  template <class Fn>
  HWY_INLINE void ForTiles(int first_row_tile, int last_row_tile, const Fn& fn) const {
    for (int v = 0, width; v < vectors; v += width) {
      width = NextVectors(vectors - v);
      for (int tile = first_row_tile; tile < last_row_tile; tile++) {
        const int row = tile * kSumRows, height = NextRows(rows - row);
        fn(row, height, v, width, TileOffset(row, height * v));
      }
    }
  }

  // Offset of a tile: the size of all earlier rows, plus `vectors_before` vectors of the tile's rows.
  std::size_t TileOffset(int first_row, int vectors_before) const {
    return (static_cast<std::size_t>(first_row) * vectors + vectors_before) * kLanes;
  }

  // Relative time of the products: multiply-adds or loads, whichever are more.
  double Cost() const {
    double cost = 0;
    ForTiles(0, row_tiles(),
             [&](int, int height, int, int width, std::size_t) { cost += std::max(height * width, height + width); });
    return cost;
  }
};

// sums = or += the products of a block.
inline HWY_NOINLINE void SumProducts(const SumLayout& layout, const ProductBlock& block, float* sums, bool accumulate) {
  layout.ForTiles(0, layout.row_tiles(), [&](int row, int height, int v, int width, std::size_t offset) {
    ProductBlock tile = block;
    tile.rows.data += row / kLanes * block.rows.vector_pitch + row % kLanes;
    tile.vectors.data += v * block.vectors.vector_pitch;
    float* place = sums + offset;
    if constexpr (kSumRows == 8) {
      if (height == 8) return SumTile<8>(width, tile, place, accumulate);
    }
    if (height == 4) return SumTile<4>(width, tile, place, accumulate);
    if (height == 2) return SumTile<2>(width, tile, place, accumulate);
    SumTile<1>(width, tile, place, accumulate);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
