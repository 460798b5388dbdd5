// How a convolution is cut into bands, units and chunks: integer arithmetic only, shared by all instruction sets.
//
//   phase   with dilation d of the sub-image, output rows a, a + d, a + 2d, ... form a dense convolution of their own, for each a < d;
//           the same holds for columns
//   band    the output rows of one row of tiles: one image, one row phase, H::kM rows of that phase
//   unit    one tile of one column phase inside a band. Units are the lanes of the vectors: unit u is tile u / d of
//           column phase u % d, so neighbouring lanes read neighbouring columns
//   part    a range of units of a band; wide bands are cut into parts so that a chunk fits the cache
//   chunk   what one thread works on at a time: several bands, or one part of a band
#pragma once

#include <algorithm>
#include <cstddef>

#include "convolution.h"
#include "segments.h"

namespace polyconv {

struct Tiling {
  int dilation_h, dilation_w;  // of the sub-images that the segments of taps read: see segments.h
  int tile_rows;               // tiles of one row phase
  int units;                   // units of a whole band
  int part_units;              // units of a part; a multiple of dilation_w
  int parts;                   // parts of a band
  int band_count;              // over all images and row phases
  int bands_per_chunk;         // 1 where bands are cut into parts
  int chunk_count;
  int lanes;  // units of a chunk, rounded up to whole vectors
};

struct Range {
  int begin, end;
  int count() const { return end - begin; }
};

// One band or part of a band.
struct Band {
  int image, phase, tile_row;
  int first_unit, unit_count;
};

template <class S>
Tiling MakeTiling(const Convolution& conv, const Taps& taps, int wanted_lanes, int vector) {
  Tiling t{};
  t.dilation_h = taps.h.dilation;
  t.dilation_w = taps.w.dilation;
  t.tile_rows = CeilDiv(CeilDiv(conv.out_height, t.dilation_h), S::H::kM);
  t.units = CeilDiv(CeilDiv(conv.out_width, t.dilation_w), S::kUnitColumns) * t.dilation_w;
  t.band_count = conv.batch * t.dilation_h * t.tile_rows;
  wanted_lanes = std::max(wanted_lanes, vector);
  if (t.units > wanted_lanes + vector / 2) {
    // Parts of equal size, so that the last one is not a sliver.
    const int tiles = t.units / t.dilation_w;
    const int parts = std::min(tiles, CeilDiv(t.units, wanted_lanes));
    t.part_units = CeilDiv(tiles, parts) * t.dilation_w;
    const int aligned = RoundUp(t.part_units, vector) / t.dilation_w * t.dilation_w;
    t.part_units = std::max(t.part_units, aligned);
    t.parts = CeilDiv(t.units, t.part_units);
    t.bands_per_chunk = 1;
    t.lanes = RoundUp(t.part_units, vector);
  } else {
    t.part_units = t.units;
    t.parts = 1;
    t.bands_per_chunk = std::clamp(wanted_lanes / t.units, 1, t.band_count);
    // As many chunks as needed, filled evenly.
    const int chunks = CeilDiv(t.band_count, t.bands_per_chunk);
    t.bands_per_chunk = CeilDiv(t.band_count, chunks);
    t.lanes = RoundUp(t.bands_per_chunk * t.units, vector);
  }
  t.chunk_count = CeilDiv(t.band_count * t.parts, t.bands_per_chunk);
  return t;
}

inline Band BandAt(const Tiling& t, int index) {
  const int part = index % t.parts;
  const int band = index / t.parts;
  Band b{};
  b.tile_row = band % t.tile_rows;
  b.phase = band / t.tile_rows % t.dilation_h;
  b.image = band / t.tile_rows / t.dilation_h;
  b.first_unit = part * t.part_units;
  b.unit_count = std::min(t.part_units, t.units - b.first_unit);
  return b;
}

}  // namespace polyconv
