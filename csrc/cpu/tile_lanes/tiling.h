// Cut of a convolution into bands, units and chunks: integer arithmetic only, shared by all instruction sets.
//
//   phase   with dilation d of the sub-image, the output rows a, a + d, a + 2d, ... are a dense convolution, for each
//           a < d; so are columns
//   band    the output rows of one row of tiles: one image, one row phase, H::kM rows of that phase
//   unit    one tile of one column phase of a band. Units are the lanes of the vectors: unit u is tile u / d of column
//           phase u % d, so neighbouring lanes read neighbouring columns
//   chunk   work item of a thread: whole bands, a part of a wide one, or, if both would leave many lanes of the last
//           vector empty, consecutive tiles across bands
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/convolution.h"
#include "common/cook_toom.h"
#include "tile_lanes/segments.h"

namespace polyconv {

struct Tiling {
  int dilation_h, dilation_w;  // of the sub-images that the segments of taps read: see segments.h
  int tile_rows;               // tiles of one row phase
  int units;                   // units of a whole band
  int piece_units;             // most units of one band in a chunk
  int band_count;              // over all images and row phases
  int bands_per_chunk;         // at most, counting partial ones
  int band_tiles;              // tiles of a band, all column phases together
  int chunk_tiles;
  int parts;  // chunks per band; 0 if chunks continue in the next band
  int chunk_count;
  int lanes;  // units of a chunk, rounded up to whole vectors
};

struct Range {
  int begin, end;
};

// Bands of a chunk, between its first and its last tile.
struct BandRange {
  int begin, end;
  int first_tile, last_tile;  // of the whole chunk

  int count() const { return end - begin; }
  BandRange Cut(int from, int most) const { return {from, std::min(from + most, end), first_tile, last_tile}; }
};

// The part of a band within a chunk.
struct Band {
  int image, phase, tile_row;
  int first_unit, unit_count;
  int first_lane;  // of its units in the chunk
};

inline Tiling MakeTiling(const SchemeNumbers& scheme, const Convolution& conv, const Taps& taps, int wanted_lanes,
                         bool crosses_bands, int vector) {
  Tiling t{};
  t.dilation_h = taps.h.dilation;
  t.dilation_w = taps.w.dilation;
  t.tile_rows = CeilDiv(CeilDiv(conv.out_height, t.dilation_h), scheme.unit_rows);
  t.units = CeilDiv(CeilDiv(conv.out_width, t.dilation_w), scheme.unit_columns) * t.dilation_w;
  t.band_count = conv.batch * t.dilation_h * t.tile_rows;
  t.band_tiles = t.units / t.dilation_w;
  wanted_lanes = std::max(wanted_lanes, vector);
  const int tiles = t.band_count * t.band_tiles, most_tiles = std::max(wanted_lanes / t.dilation_w, 1);
  const auto fills_vectors = [vector](int units) { return units * 10 >= RoundUp(units, vector) * 9; };
  // Equal parts, in whole vectors. All weights stream through once per part: avoid slivers by slightly larger chunks.
  const int even_units = CeilDiv(t.band_tiles, CeilDiv(t.band_tiles, most_tiles)) * t.dilation_w;
  const int part_tiles = std::max(even_units, RoundUp(even_units, vector) / t.dilation_w * t.dilation_w) / t.dilation_w;
  const bool sliver = (t.band_tiles - 1) % part_tiles + 1 < part_tiles / 2;
  if (t.units > wanted_lanes + std::max(vector / 2, sliver ? wanted_lanes / 3 : 0)) {
    t.chunk_tiles = part_tiles;
    t.parts = CeilDiv(t.band_tiles, t.chunk_tiles);
    t.bands_per_chunk = 1;
    t.chunk_count = t.parts * t.band_count;
  } else {
    // As many chunks as needed, filled evenly.
    const int whole_bands = std::clamp(most_tiles / t.band_tiles, 1, t.band_count);
    t.bands_per_chunk = CeilDiv(t.band_count, CeilDiv(t.band_count, whole_bands));
    t.chunk_tiles = t.bands_per_chunk * t.band_tiles;
    const bool wasteful = t.units > vector && t.chunk_tiles < tiles && !fills_vectors(t.chunk_tiles * t.dilation_w);
    if (crosses_bands && wasteful) {
      t.chunk_tiles = most_tiles;
      t.bands_per_chunk = std::min(CeilDiv(t.chunk_tiles - 1, t.band_tiles) + 1, t.band_count);
    }
    t.chunk_count = CeilDiv(tiles, t.chunk_tiles);
  }
  t.piece_units = std::min(t.chunk_tiles, t.band_tiles) * t.dilation_w;
  t.lanes = RoundUp(t.chunk_tiles * t.dilation_w, vector);
  return t;
}

inline BandRange BandsOf(const Tiling& t, int chunk) {
  int first = chunk * t.chunk_tiles, end = t.band_count * t.band_tiles;
  if (t.parts > 0) {
    first = chunk / t.parts * t.band_tiles + chunk % t.parts * t.chunk_tiles;
    end = (chunk / t.parts + 1) * t.band_tiles;
  }
  const int last = std::min(first + t.chunk_tiles, end);
  return {first / t.band_tiles, CeilDiv(last, t.band_tiles), first, last};
}

inline int UnitsOf(const Tiling& t, const BandRange& chunk) {
  return (chunk.last_tile - chunk.first_tile) * t.dilation_w;
}

inline Band BandAt(const Tiling& t, const BandRange& chunk, int band) {
  const int start = band * t.band_tiles;
  const int first = std::max(chunk.first_tile, start), last = std::min(chunk.last_tile, start + t.band_tiles);
  Band b{};
  b.tile_row = band % t.tile_rows;
  b.phase = band / t.tile_rows % t.dilation_h;
  b.image = band / t.tile_rows / t.dilation_h;
  b.first_unit = (first - start) * t.dilation_w;
  b.unit_count = (last - first) * t.dilation_w;
  b.first_lane = (first - chunk.first_tile) * t.dilation_w;
  return b;
}

}  // namespace polyconv
