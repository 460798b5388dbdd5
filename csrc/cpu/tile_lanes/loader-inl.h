// Copies rows of a sub-image to dense rows if the kernels cannot read them in place: columns that are not contiguous
// (channels_last, slices, strides), and borders that repeat the image.
#if defined(POLYCONV_CPU_TILE_LANES_LOADER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_TILE_LANES_LOADER_INL_H_
#undef POLYCONV_CPU_TILE_LANES_LOADER_INL_H_
#else
#define POLYCONV_CPU_TILE_LANES_LOADER_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "common/simd-inl.h"
#include "tile_lanes/segments.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Copies `count` floats that are `step` apart.
HWY_INLINE void CopyStrided(const float* source, std::ptrdiff_t step, int count, float* target) {
  int i = 0;
  if (step == 1) {
    std::memcpy(target, source, sizeof(float) * count);
    return;
  }
  if (step == 2) {
    for (; i + kLanes < count; i += kLanes) {  // not the last vector: its second half may lie outside of the row
      Floats streams[2];
      Deinterleave<2>(source + 2 * i, streams);
      Store(target + i, streams[0]);
    }
  } else if (std::abs(step) < std::numeric_limits<std::int32_t>::max() / kLanes) {
    const hn::RebindToSigned<FloatTag> integers;
    const auto places = hn::Mul(hn::Iota(integers, 0), hn::Set(integers, static_cast<std::int32_t>(step)));
    for (; i + kLanes <= count; i += kLanes) Store(target + i, hn::GatherIndex(kFloats, source + i * step, places));
  }
  for (; i < count; i++) target[i] = source[i * step];
}

class RowLoader {
 public:
  // Loads positions [0, columns) of the sub-images.
  RowLoader(const Convolution& conv, const Taps& taps, int columns) : conv_(conv), taps_(taps), columns_(columns) {
    const std::size_t padded = columns + kLanes;
    pixels_.resize(padded * taps.w.count());
    for (int segment = 0; segment < taps.w.count(); segment++) {
      for (int u = 0; u < static_cast<int>(padded); u++) {
        pixels_[segment * padded + u] = SourceIndex(conv.border, taps.w.PixelAt(segment, u), conv.in_width);
      }
    }
  }

  // Whether the rows cannot be read in place.
  static bool IsNeeded(const Convolution& conv) {
    return conv.x_column != 1 || conv.stride_w != 1 || conv.border != Border::kZeros;
  }

  // Number of channels to load together.
  int ChannelsTogether() const {
    return conv_.x_channel == 1 && conv_.in_channels >= kLanes / 2 ? Taps::kChannelsAtATime : 1;
  }

  // Loads positions [first, first + count) of one row of `channels` neighbouring channels, each to its own row of the
  // target. `row` is null for a row of zeros. Targets have room for whole vectors, of columns and of channels.
  void LoadRow(const float* row, int segment_w, int channels, int first, int count, float* target,
               std::size_t channel_pitch) const {
    if (row == nullptr) {
      for (int c = 0; c < channels; c++) std::memset(target + c * channel_pitch, 0, sizeof(float) * count);
    } else if (channels > 1) {
      for (int c = 0; c < channels; c += kLanes) {
        Transposed(row + c, segment_w, std::min(kLanes, channels - c), first, count, target + c * channel_pitch,
                   channel_pitch);
      }
    } else {
      OneChannel(row, segment_w, first, count, target);
    }
  }

 private:
  const std::int32_t* PixelsOf(int segment_w) const {
    return pixels_.data() + static_cast<std::size_t>(columns_ + kLanes) * segment_w;
  }

  void OneChannel(const float* row, int segment_w, int first, int count, float* target) const {
    const std::int32_t* pixels = PixelsOf(segment_w) + first;
    // Only positions before and behind the image need a lookup.
    const int offset = taps_.w.PixelAt(segment_w, first), stride = conv_.stride_w;
    const int begin = std::clamp(offset < 0 ? CeilDiv(-offset, stride) : 0, 0, count);
    const int end = std::clamp(offset < conv_.in_width ? CeilDiv(conv_.in_width - offset, stride) : 0, begin, count);
    const auto look_up = [&](int i) { return pixels[i] < 0 ? 0.0f : row[pixels[i] * conv_.x_column]; };
    for (int i = 0; i < begin; i++) target[i] = look_up(i);
    if (begin < end) {
      const std::ptrdiff_t step = conv_.x_column * stride;
      CopyStrided(row + pixels[begin] * conv_.x_column, step, end - begin, target + begin);
    }
    for (int i = end; i < count; i++) target[i] = look_up(i);
  }

  // Up to kLanes channels that are contiguous in memory.
  void Transposed(const float* row, int segment_w, int channels, int first, int count, float* target,
                  std::size_t channel_pitch) const {
    const std::int32_t* pixels = PixelsOf(segment_w) + first;
    for (int i = 0; i < count; i += kLanes) {
      Floats v[kLanes];
      POLYCONV_UNROLL
      for (int l = 0; l < kLanes; l++) {
        const float* pixel = row + pixels[i + l] * conv_.x_column;
        if (pixels[i + l] < 0) {
          v[l] = hn::Zero(kFloats);
        } else {
          v[l] = channels == kLanes ? Load(pixel) : LoadBetween(pixel, 0, channels);
        }
      }
      Transpose(v);
      POLYCONV_UNROLL
      for (int c = 0; c < kLanes; c++) Store(target + c * channel_pitch + i, v[c]);
    }
  }

  const Convolution& conv_;
  const Taps& taps_;
  int columns_;
  std::vector<std::int32_t> pixels_;  // [segment][position]: column of the image, or -1 for a zero
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
