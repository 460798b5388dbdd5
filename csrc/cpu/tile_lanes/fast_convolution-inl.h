// One convolution by one scheme, with two orders of the stages:
//
//   fused    each thread takes a chunk of units through all stages, with all live data in its L2. The weights stream
//            through once per chunk, so a chunk should have at least some 64 units.
//   phased   all threads transform the input, then multiply, then invert, with the transformed data of a whole slab in
//            memory. Better for many channels and small images: each weight is read once per slab.
//
// Neither the order of any sum nor the cut into chunks depends on the number of threads: same input, same bits.
#if defined(POLYCONV_CPU_TILE_LANES_FAST_CONVOLUTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_TILE_LANES_FAST_CONVOLUTION_INL_H_
#undef POLYCONV_CPU_TILE_LANES_FAST_CONVOLUTION_INL_H_
#else
#define POLYCONV_CPU_TILE_LANES_FAST_CONVOLUTION_INL_H_
#endif

#include <algorithm>
#include <atomic>

#include "common/memory.h"
#include "common/stages.h"
#include "tile_lanes/input-inl.h"
#include "tile_lanes/output-inl.h"
#include "tile_lanes/products-inl.h"
#include "tile_lanes/weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Length of the equal blocks that a sum over channels is cut into. Each starts from zero: the error grows with the
// length of a block and the number of blocks, not with the number of channels.
inline int ChannelsSummed(int channels) {
  const int longest = channels <= 512 ? 64 : 48;
  return CeilDiv(channels, CeilDiv(channels, longest));
}

template <class S>
void TransformWeights(const Convolution& conv, float* transformed, const Runtime& runtime) {
  const WeightStage<S> stage(conv);
  const std::int64_t work = static_cast<std::int64_t>(stage.channel_tiles) * stage.channels;
  runtime.parallel_for(work, [&](std::int64_t begin, std::int64_t end) {
    const StageTimer timer(Stage::kWeights);
    for (std::int64_t i = begin; i < end; i++) {
      stage.Transform(static_cast<int>(i / stage.channels), static_cast<int>(i % stage.channels), transformed);
    }
  });
}

template <class S>
class FastConvolution {
  using Ungrouped = typename S::Ungrouped;

 public:
  // `crosses_bands`: whether a chunk may end within a band, to fill its vectors.
  FastConvolution(const Convolution& conv, const float* weights, int wanted_lanes, bool crosses_bands)
      : conv_(conv),
        weights_(weights),
        weight_stage_(conv),
        tiling_(MakeTiling(S::kNumbers, conv, weight_stage_.all_taps, wanted_lanes, crosses_bands, kLanes)),
        input_(conv, tiling_) {}

  void RunFused(int tiles_per_batch, const Runtime& runtime) const {
    const int vectors = tiling_.lanes / kLanes;
    const OutputStage<Ungrouped> output(conv_, tiling_, tiling_.lanes);
    const int channels = input_.channels();
    const TransformedLayout layout(tiling_.lanes, 1, S::kSlots, channels);
    const int batch = std::clamp(tiles_per_batch, 1, weight_stage_.channel_tiles);

    Carver carver;
    // Ungrouped, a channel's columns are consumed at once and need not be kept.
    const int band_groups = CeilDiv(tiling_.bands_per_chunk, input_.side_by_side);
    const std::size_t kept = S::kGrouped ? static_cast<std::size_t>(band_groups) * channels : 1;
    const InputScratch input_scratch(input_, kept, carver);
    const std::size_t transformed_at = carver.Take(layout.point * S::kGroupPoints);
    const std::size_t tile_products = ProductLayout<S>::kVectorSize * vectors;
    const std::size_t products_at = carver.Take(tile_products * batch);
    const std::size_t sums_at =
        carver.Take(output.template sums_size<S>(vectors) * weight_stage_.channel_tiles * kTileChannels);
    const OutputScratch output_scratch(output, carver);

    std::atomic<int> next_chunk{0};
    runtime.parallel_for(runtime.threads, [&](std::int64_t, std::int64_t) {
      float* base = Scratch::OfThread().Get(carver.size());
      float* transformed = base + transformed_at;
      input_.ClearRows(base + input_scratch.rows);
      for (int chunk; (chunk = next_chunk.fetch_add(1)) < tiling_.chunk_count;) {
        const BandRange bands = BandsOf(tiling_, chunk);
        const int chunk_vectors = CeilDiv(UnitsOf(tiling_, bands), kLanes);
        if (S::kGrouped) GatherChunk(bands, input_scratch, base);
        for (int group = 0; group < S::kGroups; group++) {
          if (S::kGrouped) {
            ExpandChunk(bands, group, base + input_scratch.columns, layout, transformed);
          } else {
            GatherAndExpand(bands, {0, channels}, input_scratch, base, layout, transformed);
          }
          for (int first = 0; first < weight_stage_.channel_tiles; first += batch) {
            const int last = std::min(first + batch, weight_stage_.channel_tiles);
            {
              const StageTimer timer(Stage::kProducts);
              for (int point = 0; point < S::kGroupPoints; point++) {
                MultiplyPoint(group, point, {first, last}, chunk_vectors, layout, transformed, base + products_at,
                              tile_products);
              }
            }
            const Range written{first * kTileChannels, std::min(last * kTileChannels, conv_.out_channels)};
            InvertAndWrite(output, group, written, bands, chunk_vectors, base + products_at, tile_products,
                           base + sums_at, output_scratch, base);
          }
        }
      }
      hwy::FlushStream();
    });
  }

  // Bounded memory: chunks of the tiling are slabs here, live with all channels and points.
  void RunPhased(const Runtime& runtime) const {
    static_assert(!S::kGrouped, "the phased order has no use for groups of points");
    const int channels = input_.channels(), tiles = weight_stage_.channel_tiles;
    // Whole register tiles, as wide as possible and of equal width.
    const int blocks = CeilDiv(tiling_.lanes, kTileVectors * kLanes);
    const int block_vectors = CeilDiv(tiling_.lanes / kLanes, blocks), vectors = blocks * block_vectors;
    const TransformedLayout layout(block_vectors * kLanes, blocks, S::kSlots, channels);
    const OutputStage<Ungrouped> output(conv_, tiling_, vectors * kLanes);
    const std::size_t tile_products = ProductLayout<S>::kVectorSize * vectors;

    Carver shared;
    const std::size_t transformed_at = shared.Take(layout.point * S::kGroupPoints);
    const std::size_t products_at = shared.Take(tile_products * tiles);
    float* base = Scratch::Shared().Get(shared.size());
    float* transformed = base + transformed_at;
    float* products = base + products_at;

    for (int slab = 0; slab < tiling_.chunk_count; slab++) {
      const BandRange bands = BandsOf(tiling_, slab);
      const int slab_blocks = CeilDiv(UnitsOf(tiling_, bands), layout.block_lanes);
      // Few bands and few channels at a time: what is written then is close together, for every point.
      const int band_step = RoundUp(std::max(1, layout.block_lanes / tiling_.units), input_.side_by_side);
      const int channel_step = std::min(Taps::kChannelsAtATime, channels);
      const int band_steps = CeilDiv(bands.count(), band_step);
      const int channel_steps = CeilDiv(channels, channel_step);
      runtime.parallel_for(band_steps * channel_steps, [&](std::int64_t begin, std::int64_t end) {
        Carver own;
        const InputScratch scratch(input_, 1, own);
        float* mine = Scratch::OfThread().Get(own.size());
        input_.ClearRows(mine + scratch.rows);
        for (int step = static_cast<int>(begin); step < end; step++) {
          const int first_band = bands.begin + step / channel_steps * band_step;
          const int first_channel = step % channel_steps * channel_step;
          GatherAndExpand(bands.Cut(first_band, band_step),
                          {first_channel, std::min(first_channel + channel_step, channels)}, scratch, mine, layout,
                          transformed);
        }
      });
      runtime.parallel_for(S::kGroupPoints, [&](std::int64_t begin, std::int64_t end) {
        const StageTimer timer(Stage::kProducts);
        for (int point = static_cast<int>(begin); point < end; point++) {
          MultiplyPoint(0, point, {0, tiles}, slab_blocks * block_vectors, layout, transformed, products,
                        tile_products);
        }
      });
      const int tiles_together = std::max(1, output.ChannelsTogether() / kTileChannels);
      runtime.parallel_for(CeilDiv(tiles, tiles_together), [&](std::int64_t begin, std::int64_t end) {
        Carver own;
        const OutputScratch scratch(output, own);
        float* mine = Scratch::OfThread().Get(own.size());
        const int first = static_cast<int>(begin) * tiles_together, last = static_cast<int>(end) * tiles_together;
        const Range written{first * kTileChannels, std::min(last * kTileChannels, conv_.out_channels)};
        InvertAndWrite(output, 0, written, bands, slab_blocks * block_vectors, products + first * tile_products,
                       tile_products, nullptr, scratch, mine);
        hwy::FlushStream();
      });
    }
  }

 private:
  // Offsets in a thread's scratch memory.
  struct InputScratch {
    std::size_t loaded, rows, columns;
    InputScratch(const InputStage<Ungrouped>& input, std::size_t kept_columns, Carver& carver)
        : loaded(carver.Take(input.loaded_size())),
          rows(carver.Take(input.rows_size())),
          columns(carver.Take(input.columns_size() * kept_columns)) {}
  };
  struct OutputScratch {
    std::size_t units, lines;
    OutputScratch(const OutputStage<Ungrouped>& output, Carver& carver)
        : units(carver.Take(output.units_size() * output.ChannelsTogether())),
          lines(carver.Take(output.lines_size() * output.ChannelsTogether())) {}
  };

  float BiasOf(int k) const { return conv_.bias == nullptr ? 0.0f : conv_.bias[k]; }

  // Calls use(bands, channel, its index among the loaded ones). Channels outermost: their bands overlap in the cache.
  template <class Use>
  HWY_INLINE void ForEachInput(const BandRange& bands, Range channels, float* loaded, const Use& use) const {
    for (int c = channels.begin, together; c < channels.end; c += together) {
      together = std::min(input_.ChannelsTogether(c), channels.end - c);
      for (int index = bands.begin; index < bands.end; index += input_.side_by_side) {
        const BandRange some = bands.Cut(index, input_.side_by_side);
        if (input_.loads) {
          const StageTimer timer(Stage::kLoad);
          input_.LoadRows(some, c, together, loaded);
        }
        for (int i = 0; i < together; i++) use(some, c + i, i);
      }
    }
  }

  // Offset of the columns of some bands of a channel, which are kept until all groups of points have used them.
  std::size_t KeptAt(int first_band, int chunk_begin, int channel) const {
    const std::size_t band_group = (first_band - chunk_begin) / input_.side_by_side;
    return (band_group * input_.channels() + channel) * input_.columns_size();
  }

  void GatherChunk(const BandRange& bands, const InputScratch& scratch, float* base) const {
    ForEachInput(bands, {0, input_.channels()}, base + scratch.loaded,
                 [&](const BandRange& some, int c, int place) HWY_ATTR {
                   const StageTimer timer(Stage::kGather);
                   input_.Gather(some, c, base + scratch.loaded, place, base + scratch.rows,
                                 base + scratch.columns + KeptAt(some.begin, bands.begin, c));
                 });
  }

  void ExpandChunk(const BandRange& bands, int group, const float* columns, const TransformedLayout& layout,
                   float* transformed) const {
    const StageTimer timer(Stage::kExpand);
    for (int index = bands.begin; index < bands.end; index += input_.side_by_side) {
      const BandRange some = bands.Cut(index, input_.side_by_side);
      for (int c = 0; c < input_.channels(); c++) {
        input_.template Expand<S>(some, group, columns + KeptAt(index, bands.begin, c), c, layout, transformed);
      }
    }
  }

  void GatherAndExpand(const BandRange& bands, Range channels, const InputScratch& scratch, float* base,
                       const TransformedLayout& layout, float* transformed) const {
    const float* loaded = base + scratch.loaded;
    ForEachInput(bands, channels, base + scratch.loaded, [&](const BandRange& some, int c, int place) HWY_ATTR {
      if constexpr (S::kDirect) {
        const StageTimer timer(Stage::kGather);
        input_.Copy(BandAt(tiling_, some, some.begin), c, loaded, place, base + scratch.rows, layout, transformed);
      } else {
        {
          const StageTimer timer(Stage::kGather);
          input_.Gather(some, c, loaded, place, base + scratch.rows, base + scratch.columns);
        }
        const StageTimer timer(Stage::kExpand);
        input_.template Expand<S>(some, 0, base + scratch.columns, c, layout, transformed);
      }
    });
  }

  // Products of one point for some tiles of output channels, from `products` on. The input of a register tile, over one
  // block of the sum, stays in L1 for all output channels; the weights stay in L2 for all units.
  HWY_INLINE void MultiplyPoint(int group, int point, Range tiles, int vectors, const TransformedLayout& layout,
                                const float* transformed, float* products, std::size_t tile_products) const {
    using Layout = ProductLayout<S>;
    const int channels = input_.channels(), summed = ChannelsSummed(channels);
    TileOperands op{};
    op.weights_pitch = weight_stage_.slot_pitch();
    op.input_pitch = layout.slot;
    op.channel_pitch = layout.channel;
    const auto weights_at = [&](int p, int tile, int c) HWY_ATTR {
      return weights_ + weight_stage_.offset(group, p, tile) + c * kTileChannels;
    };
    for (int c = 0; c < channels; c += summed) {
      op.channels = std::min(summed, channels - c);
      // Weights after the last tile. Further units find them in L2.
      const float* following = c + summed < channels
                                   ? weights_at(point, tiles.begin, c + summed)
                                   : weights_at(std::min(point + 1, S::kGroupPoints - 1), tiles.begin, 0);
      for (int z = 0, width; z < vectors; z += width) {
        width = NextTile(vectors - z);  // never crosses a block: if there are several, each is one register tile
        const int block = z * kLanes / layout.block_lanes;
        op.input = transformed + point * layout.point + block * layout.block + c * layout.channel + z * kLanes -
                   block * layout.block_lanes;
        float* target = products + z * Layout::kVectorSize + point * Layout::PointPitch(width);
        for (int tile = tiles.begin; tile < tiles.end; tile++, target += tile_products) {
          op.weights = weights_at(point, tile, c);
          op.next_weights = tile + 1 < tiles.end ? weights_at(point, tile + 1, c) : following;
          ComputeTile<S::kNested>(width, op, target, Layout::BlockPitch(width), c > 0);
        }
      }
    }
  }

  // Inverse transforms of the output channels in `range`, with their products at `products`. The last group writes.
  HWY_NOINLINE void InvertAndWrite(const OutputStage<Ungrouped>& output, int group, Range range, const BandRange& bands,
                                   int vectors, const float* products, std::size_t tile_products, float* sums,
                                   const OutputScratch& scratch, float* base) const {
    const int step = output.ChannelsTogether();
    for (int first = range.begin; first < range.end; first += step) {
      const int together = std::min(step, range.end - first);
      for (int i = 0; i < together; i++) {
        const StageTimer timer(Stage::kInvert);
        const int k = first + i, number = k - range.begin;
        output.template Invert<S>(group, products + number / kTileChannels * tile_products, number % kTileChannels,
                                  vectors, sums + k * output.template sums_size<S>(vectors), BiasOf(k),
                                  base + scratch.units + i * output.units_size());
      }
      if (group < S::kGroups - 1) continue;
      const StageTimer timer(Stage::kWrite);
      output.Write(bands, first, together, base + scratch.units, base + scratch.lines);
    }
  }

  const Convolution& conv_;
  const float* weights_;
  const WeightStage<S> weight_stage_;
  const Tiling tiling_;
  const InputStage<Ungrouped> input_;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
