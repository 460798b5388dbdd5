// From a scheme's algorithms to its kernels: which order of the stages, how large the chunks.
#if defined(POLYCONV_CPU_SCHEMES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_SCHEMES_INL_H_
#undef POLYCONV_CPU_SCHEMES_INL_H_
#else
#define POLYCONV_CPU_SCHEMES_INL_H_
#endif

#include <algorithm>

#include "fast_convolution-inl.h"
#include "schemes.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

using F11 = CookToom<1, 1>;
using F23 = CookToom<2, 3>;
using F43 = CookToom<4, 3>;
using F63 = CookToom<6, 3>;
using F45 = CookToom<4, 5>;

// The schedule with all choices made: a pure function of the problem. The sizes suit cores with 1 to 2 MiB of L2 cache.
template <class H, class W, bool kNested>
Schedule Resolve(const Convolution& conv, Schedule schedule) {
  using S = Scheme<H, W, kNested, false>;
  constexpr double kKiB = 1024;
  const int channels = conv.in_channels * CeilDiv(conv.taps_h, S::kTapsH) * CeilDiv(conv.taps_w, S::kTapsW);
  const int units = CeilDiv(CeilDiv(conv.out_width, conv.dilation_w), S::kUnitColumns) * conv.dilation_w;
  const double unit_bytes = 4.0 * S::kSlots * S::kGroupPoints * channels;  // transformed input, all points
  const double group_bytes = H::kPoints > 2 ? unit_bytes * 2 / H::kPoints : unit_bytes;
  if (schedule.mode == Schedule::kAutomatic) {
    if (unit_bytes * 64 <= 1280 * kKiB) {
      schedule.mode = Schedule::kFused;
    } else if (group_bytes * 48 <= 1024 * kKiB && units >= kLanes / 2) {
      schedule.mode = Schedule::kFusedGrouped;
    } else {
      schedule.mode = Schedule::kPhased;
    }
  }
  if (schedule.lanes <= 0) {
    const double alive = schedule.mode == Schedule::kFusedGrouped ? group_bytes : unit_bytes;
    if (schedule.mode == Schedule::kPhased) {
      // A slab of transformed input and products: large enough to use each weight often, small enough to be bounded.
      const double slab = 4.0 * S::kBlocks * S::kGroupPoints * (conv.out_channels + kTileChannels) + alive;
      schedule.lanes = static_cast<int>(std::clamp(96 * kKiB * kKiB / slab, 96.0, 32768.0));
    } else {
      // At least 48 to 64 units, or the weights stream through too often.
      const int lanes = static_cast<int>(640 * kKiB / alive) / kLanes * kLanes;
      schedule.lanes = std::clamp(lanes, alive * 64 <= 1280 * kKiB ? 64 : 48, 12 * kLanes);
    }
  }
  if (schedule.channels <= 0) {
    // The products that wait for their inverse transform should not push the transformed input out of the cache.
    const double points =
        S::kBlocks * S::kGroupPoints / (schedule.mode == Schedule::kFusedGrouped ? H::kPoints / 2.0 : 1.0);
    const int batch = static_cast<int>(400 * kKiB / (4 * points * std::min(schedule.lanes, 12 * kLanes)));
    schedule.channels = std::clamp(batch / kTileChannels * kTileChannels, kTileChannels, 32);
  }
  return schedule;
}

template <class H, class W, bool kNested>
std::size_t WeightsSize(const Convolution& conv) {
  return WeightStage<Scheme<H, W, kNested, false>>(conv).size();
}

template <class H, class W, bool kNested>
void Run(const Convolution& conv, const Schedule& wanted, const float* transformed, const Runtime& runtime) {
  const Schedule schedule = Resolve<H, W, kNested>(conv, wanted);
  const int tiles_per_batch = CeilDiv(schedule.channels, kTileChannels);
  if (schedule.mode == Schedule::kFusedGrouped) {
    using S = Scheme<H, W, kNested, true>;
    FastConvolution<S>(conv, transformed, schedule.lanes).RunFused(tiles_per_batch, runtime);
    return;
  }
  const FastConvolution<Scheme<H, W, kNested, false>> convolution(conv, transformed, schedule.lanes);
  if (schedule.mode == Schedule::kPhased) {
    convolution.RunPhased(runtime);
  } else {
    convolution.RunFused(tiles_per_batch, runtime);
  }
}

template <class H, class W, bool kNested>
inline constexpr SchemeKernels kKernels = {&WeightsSize<H, W, kNested>, &TransformWeights<Scheme<H, W, kNested, false>>,
                                           &Run<H, W, kNested>};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
