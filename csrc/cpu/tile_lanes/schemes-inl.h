// Schedules of a scheme, and its table of kernels.
#if defined(POLYCONV_CPU_TILE_LANES_SCHEMES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_TILE_LANES_SCHEMES_INL_H_
#undef POLYCONV_CPU_TILE_LANES_SCHEMES_INL_H_
#else
#define POLYCONV_CPU_TILE_LANES_SCHEMES_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "common/caches.h"
#include "tile_lanes/fast_convolution-inl.h"
#include "tile_lanes/schemes.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Completes a schedule: a pure function of problem and L2 size. Shares of L2 were tuned on cores with 1 and 2 MiB.
inline HWY_NOINLINE Schedule Resolve(const SchemeNumbers& scheme, const Convolution& conv, Schedule schedule) {
  constexpr double kKiB = 1024, kMiB = 1024 * kKiB;
  const double cache = static_cast<double>(L2Bytes());
  const Taps taps(conv, scheme.taps_h, scheme.taps_w);
  const int channels = taps.channels();
  const int units = CeilDiv(CeilDiv(conv.out_width, taps.w.dilation), scheme.unit_columns) * taps.w.dilation;
  const double unit_bytes = 4.0 * scheme.slots * scheme.points * channels;  // transformed input, all points
  const double group_bytes = scheme.points_h > 2 ? unit_bytes * 2 / scheme.points_h : unit_bytes;
  const double weight_bytes = unit_bytes * conv.out_channels;
  if (schedule.mode == Schedule::kAutomatic) {
    // Bands shorter than a vector are better grouped, unless there are too few units for all threads.
    const bool many = 1.0 * conv.batch * CeilDiv(conv.out_height, scheme.unit_rows) * units >= 128;
    const bool fits = unit_bytes * 64 <= (many ? 0.625 * cache : 1280 * kKiB);
    if (fits && (units >= kLanes || scheme.points_h <= 2 || !many)) {
      schedule.mode = Schedule::kFused;
    } else if (group_bytes * 32 <= cache && (many || units >= kLanes / 2)) {
      schedule.mode = Schedule::kFusedGrouped;
    } else {
      schedule.mode = Schedule::kPhased;
    }
  }
  if (schedule.lanes <= 0) {
    const double alive = schedule.mode == Schedule::kFusedGrouped ? group_bytes : unit_bytes;
    if (schedule.mode == Schedule::kPhased) {
      // A slab of transformed input and products: large enough to reuse weights often, small enough to bound memory.
      const double slab = 4.0 * scheme.blocks * scheme.points * (conv.out_channels + kTileChannels) + alive;
      schedule.lanes = static_cast<int>(std::clamp(96 * kMiB / slab, 96.0, 32768.0));
    } else {
      // Grouped, columns and sums are kept beside the transformed input.
      const double room = schedule.mode == Schedule::kFusedGrouped ? std::min(400 * kKiB, 0.3 * cache)
                                                                   : std::min(640 * kKiB, 0.44 * cache);
      const int lanes = static_cast<int>(room / alive) / kLanes * kLanes;
      // With fewer units the weights stream through too often, the more so the farther away they are.
      const int wanted = cache <= 1.5 * kMiB ? 32 : alive * 64 <= 1280 * kKiB ? 64 : 48;
      const int least = std::clamp(static_cast<int>(weight_bytes / (256 * kKiB)), wanted, 96);
      const int most = std::min(12 * kLanes, static_cast<int>(cache / (8 * kKiB)));
      schedule.lanes = std::clamp(lanes, least, std::max(least, most));
    }
  }
  if (schedule.channels <= 0) {
    // The products that wait for their inverse transform should not evict the transformed input.
    const double points =
        scheme.blocks * scheme.points / (schedule.mode == Schedule::kFusedGrouped ? scheme.points_h / 2.0 : 1.0);
    const double room = std::min(400 * kKiB, 0.25 * cache);
    const int batch = static_cast<int>(room / (4 * points * std::min(schedule.lanes, 12 * kLanes)));
    schedule.channels = std::clamp(batch / kTileChannels * kTileChannels, kTileChannels, 32);
  }
  return schedule;
}

// A 1 x 1 kernel over evenly spaced pixels does not see rows or images: they become one long row.
template <class S>
Convolution JoinRows(Convolution conv) {
  const bool single = conv.taps_h == 1 && conv.taps_w == 1 && conv.stride_h == 1 && conv.stride_w == 1;
  const bool same =
      conv.top == 0 && conv.left == 0 && conv.in_height == conv.out_height && conv.in_width == conv.out_width;
  const bool countable = std::int64_t{1} * conv.batch * conv.in_height * conv.in_width <= 1 << 30;
  if (!S::kDirect || !single || !same || !countable) return conv;
  if (conv.x_row != conv.in_width * conv.x_column || conv.y_row != conv.out_width * conv.y_column) return conv;
  conv.in_width = conv.out_width = conv.in_width * conv.in_height;
  conv.in_height = conv.out_height = 1;
  if (conv.x_batch != conv.in_width * conv.x_column || conv.y_batch != conv.out_width * conv.y_column) return conv;
  conv.in_width = conv.out_width = conv.in_width * conv.batch;
  conv.batch = 1;
  return conv;
}

template <class H, class W, bool kNested>
std::size_t WeightsSize(const Convolution& conv) {
  return WeightStage<Scheme<H, W, kNested, false>>(conv).size();
}

template <class H, class W, bool kNested>
void Run(const Convolution& given, const Schedule& wanted, const float* transformed, const Runtime& runtime) {
  const Convolution conv = JoinRows<Scheme<H, W, kNested, false>>(given);
  const Schedule schedule = Resolve(Scheme<H, W, kNested, false>::kNumbers, conv, wanted);
  const int tiles_per_batch = CeilDiv(schedule.channels, kTileChannels);
  if (schedule.mode == Schedule::kFusedGrouped) {
    using S = Scheme<H, W, kNested, (H::kPoints > 2)>;
    // Parts of bands need more room for the kept columns; beyond the cache, that costs more than empty lanes.
    const Taps taps(conv, S::kTapsH, S::kTapsW);
    const double kept = 4.0 * schedule.lanes * taps.channels() * H::kPoints * S::kUnitColumns;
    const bool crosses_bands = kept <= 768 * 1024;
    FastConvolution<S>(conv, transformed, schedule.lanes, crosses_bands).RunFused(tiles_per_batch, runtime);
    return;
  }
  const FastConvolution<Scheme<H, W, kNested, false>> convolution(conv, transformed, schedule.lanes, true);
  if (schedule.mode == Schedule::kPhased) {
    convolution.RunPhased(runtime);
  } else {
    convolution.RunFused(tiles_per_batch, runtime);
  }
}

template <class H, class W, bool kNested>
inline constexpr SchemeKernels kKernels = {&WeightsSize<H, W, kNested>, &TransformWeights<Scheme<H, W, kNested, false>>,
                                           [](const Convolution&) { return false; }, &Run<H, W, kNested>,
                                           &ChannelsSummed};

inline constexpr auto kKernelsOf = []<SchemeShape kShape>() {
  return &kKernels<AlongH<kShape>, AlongW<kShape>, kShape.nested>;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
