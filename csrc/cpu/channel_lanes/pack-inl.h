// Packing: pixels of an image with any strides as vectors of channels, with the border resolved.
//
// A packed pixel is the address of a vector, so dilation, stride and the overlap of tiles are address arithmetic. A
// packed row is [vector of channels][column][lane]; lanes behind the last channel are zeros.
#if defined(POLYCONV_CPU_CHANNEL_LANES_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_CHANNEL_LANES_PACK_INL_H_
#undef POLYCONV_CPU_CHANNEL_LANES_PACK_INL_H_
#else
#define POLYCONV_CPU_CHANNEL_LANES_PACK_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "channel_lanes/grid.h"
#include "common/border.h"
#include "common/elements-inl.h"
#include "common/epilogue-inl.h"
#include "common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// The address `count` elements behind another one. In half precision both are those of such elements.
template <class Float>
Float* Moved(Float* from, Element element, std::ptrdiff_t count) {
  using Half = std::conditional_t<std::is_const_v<Float>, const std::uint16_t, std::uint16_t>;
  return element == Element::kFloat ? from + count : reinterpret_cast<Float*>(reinterpret_cast<Half*>(from) + count);
}

// Images in memory. Strides are in elements.
struct PixelSource {
  const float* data;
  std::ptrdiff_t batch, channel, row, column;
  int channels, height, width;
  Border border;
};

inline PixelSource InputPixels(const Convolution& conv) {
  return {conv.x,           conv.x_batch,   conv.x_channel, conv.x_row, conv.x_column,
          conv.in_channels, conv.in_height, conv.in_width,  conv.border};
}
inline PixelSource OutputPixels(const Convolution& conv) {
  return {conv.y,          conv.y_batch,   conv.y_channel, conv.y_row, conv.y_column, conv.out_channels,
          conv.out_height, conv.out_width, Border::kZeros};
}

// A vector of four floats from each of kLanes / 4 addresses.
template <class D>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const float* const* rows, std::ptrdiff_t column) {
  if constexpr (hn::MaxLanes(d) == 4) {
    return hn::LoadU(d, rows[0] + column);
  } else {
    const hn::Half<D> half;
    constexpr int kHalfRows = hn::MaxLanes(d) / 2;
    return hn::Combine(d, LoadBlocks(half, rows + kHalfRows, column), LoadBlocks(half, rows, column));
  }
}

// Transposes 4 kQuads columns of kLanes channels, each channel with its own address, to as many vectors of channels.
// All columns of a channel are read before those of the next four channels: with image sizes that are powers of two,
// all channels map to the same few cache sets, and no line survives until its next use.
template <int kQuads>
HWY_INLINE void TransposeColumns(const float* const* channels, std::ptrdiff_t column, float* target) {
  const hn::Repartition<double, FloatTag> pairs;
  Floats rows[kQuads][4];
  POLYCONV_UNROLL
  for (int i = 0; i < 4; i++) {
    POLYCONV_UNROLL
    for (int q = 0; q < kQuads; q++) rows[q][i] = LoadBlocks(kFloats, channels + i, column + 4 * q);
  }
  POLYCONV_UNROLL
  for (int q = 0; q < kQuads; q++, target += 4 * kLanes) {
    const auto ab_low = hn::BitCast(pairs, hn::InterleaveLower(kFloats, rows[q][0], rows[q][1]));
    const auto cd_low = hn::BitCast(pairs, hn::InterleaveLower(kFloats, rows[q][2], rows[q][3]));
    const auto ab_high = hn::BitCast(pairs, hn::InterleaveUpper(kFloats, rows[q][0], rows[q][1]));
    const auto cd_high = hn::BitCast(pairs, hn::InterleaveUpper(kFloats, rows[q][2], rows[q][3]));
    StoreAligned(target, hn::BitCast(kFloats, hn::InterleaveLower(pairs, ab_low, cd_low)));
    StoreAligned(target + kLanes, hn::BitCast(kFloats, hn::InterleaveUpper(pairs, ab_low, cd_low)));
    StoreAligned(target + 2 * kLanes, hn::BitCast(kFloats, hn::InterleaveLower(pairs, ab_high, cd_high)));
    StoreAligned(target + 3 * kLanes, hn::BitCast(kFloats, hn::InterleaveUpper(pairs, ab_high, cd_high)));
  }
}

class RowPacker {
 public:
  explicit RowPacker(const PixelSource& source) : source_(source), vectors_(CeilDiv(source.channels, kLanes)) {}

  int vectors() const { return vectors_; }

  // Packs the columns [first, first + count) of a row; both may lie outside of the image. The target is aligned to a
  // vector, its vectors of channels are `vector_pitch` floats apart.
  void Pack(int image, int row, int first, int count, float* target, std::size_t vector_pitch, Element element) const {
    for (int v = 0; v < vectors_; v++, target += vector_pitch) {
      PackVector(image, row, first, count, v, target, 0, element);
    }
  }

  // The same for one vector of channels. `ahead`: distance of the pixels that are packed next, which are prefetched.
  // `element`: of the image, whose channels are contiguous and whose border is zeros if it is in half precision.
  HWY_NOINLINE void PackVector(int image, int row, int first, int count, int vector, float* target,
                               std::ptrdiff_t ahead, Element element = Element::kFloat) const {
    const int inside_row = SourceIndex(source_.border, row, source_.height);
    if (inside_row < 0) return Clear(target, 0, count);
    // [begin, end) is inside the image.
    const int begin = std::clamp(-first, 0, count), end = std::clamp(source_.width - first, begin, count);
    const float* channels = Moved(source_.data, element,
                                  image * source_.batch + inside_row * source_.row +
                                      static_cast<std::ptrdiff_t>(vector) * kLanes * source_.channel);
    const int filled = std::min(kLanes, source_.channels - vector * kLanes);
    if (element != Element::kFloat) {
      Clear(target, 0, begin);
      WithElement(element, [&](auto one) {
        PackHalf(reinterpret_cast<const decltype(one)*>(channels), filled, first, begin, end, target);
      });
      return Clear(target, end, count);
    }
    PackInside(channels, filled, first, begin, end, target, ahead);
    PackBorder(channels, filled, first, 0, begin, target);
    PackBorder(channels, filled, first, end, count, target);
  }

 private:
  static void Clear(float* target, int begin, int end) {
    for (int i = begin; i < end; i++) StoreAligned(target + i * kLanes, hn::Zero(kFloats));
  }

  // Columns inside the image of contiguous channels.
  template <class T>
  void PackHalf(const T* channels, int filled, int first, int begin, int end, float* target) const {
    const T* pixel = channels + (std::ptrdiff_t{first} + begin) * source_.column;
    for (int i = begin; i < end; i++, pixel += source_.column) {
      StoreAligned(target + i * kLanes, filled == kLanes ? LoadWide(pixel) : LoadSome(pixel, filled));
    }
  }

  void PackInside(const float* channels, int filled, int first, int begin, int end, float* target,
                  std::ptrdiff_t ahead) const {
    const float* pixels = channels + first * source_.column;
    if (source_.channel == 0 && source_.column == 0) {  // an expanded scalar
      if (begin >= end) return;
      const Floats same = hn::IfThenElseZero(hn::FirstN(kFloats, filled), Broadcast(*channels));
      for (int i = begin; i < end; i++) StoreAligned(target + i * kLanes, same);
    } else if (source_.channel == 1) {
      for (int i = begin; i < end; i++) {
        const float* pixel = pixels + i * source_.column;
        hwy::Prefetch(pixel + ahead);
        StoreAligned(target + i * kLanes, filled == kLanes ? Load(pixel) : LoadBetween(pixel, 0, filled));
      }
    } else if (source_.column == 1 && end - begin >= 4) {
      PackColumns(pixels, filled, begin, end, target);
    } else {
      for (int i = begin; i < end; i++) PackPixel(pixels + i * source_.column, filled, target + i * kLanes);
    }
  }

  // Columns that are contiguous in memory, at least four.
  void PackColumns(const float* pixels, int filled, int begin, int end, float* target) const {
    constexpr int kQuads = kLanes >= 8 ? kLanes / 4 : 2;
    constexpr int kBlock = 4 * kQuads;
    static constexpr float kZeros[kBlock] = {};
    const float* channels[kLanes];
    const auto point_at = [&](int column) {
      for (int lane = 0; lane < kLanes; lane++) {
        channels[lane] = lane < filled ? pixels + lane * source_.channel + column : kZeros;
      }
    };
    const auto pack_fours = [&](int from, int to) {
      for (int i = from; i < to; i += 4) {  // the last four may overlap those before them
        const int first = std::min(i, end - 4);
        point_at(first);
        TransposeColumns<1>(channels, 0, target + first * kLanes);
      }
    };
    // Whole blocks start at whole cache lines, at least in the first channel.
    const auto misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(pixels + begin) / sizeof(float) % kBlock);
    const int aligned = std::min(end, begin + (kBlock - misaligned) % kBlock);
    pack_fours(begin, aligned);
    int i = aligned;
    for (; i + kBlock <= end; i += kBlock) {
      point_at(i);
      TransposeColumns<kQuads>(channels, 0, target + i * kLanes);
    }
    pack_fours(i, end);
  }

  void PackBorder(const float* channels, int filled, int first, int begin, int end, float* target) const {
    for (int i = begin; i < end; i++) {
      const int inside = SourceIndex(source_.border, first + i, source_.width);
      if (inside < 0) {
        Clear(target, i, i + 1);
      } else {
        PackPixel(channels + inside * source_.column, filled, target + i * kLanes);
      }
    }
  }

  void PackPixel(const float* pixel, int filled, float* target) const {
    for (int lane = 0; lane < filled; lane++) target[lane] = pixel[lane * source_.channel];
    for (int lane = filled; lane < kLanes; lane++) target[lane] = 0.0f;
  }

  const PixelSource source_;
  const int vectors_;
};

// Inverse of packing: from vectors of channels to an image with any strides.
class RowUnpacker {
 public:
  explicit RowUnpacker(const Convolution& conv) : conv_(conv) {}

  // Writes columns [first, first + count) of a row, as far as they exist, of one vector of channels; with epilogue.
  void Unpack(int image, int row, int first, int count, const float* source, int vector) const {
    if (row >= conv_.out_height) return;
    const int channel = vector * kLanes, filled = std::min(kLanes, conv_.out_channels - channel);
    float* target =
        conv_.y + image * conv_.y_batch + channel * conv_.y_channel + row * conv_.y_row + first * conv_.y_column;
    const Floats bias = conv_.bias == nullptr ? hn::Zero(kFloats) : LoadBetween(conv_.bias + channel, 0, filled);
    const int inside = std::min(count, conv_.out_width - first);
    WithFinisher(conv_.epilogue, conv_.y,
                 [&](const auto& finish) HWY_ATTR { UnpackVector(finish, source, inside, filled, bias, target); });
  }

 private:
  template <class Finish>
  void UnpackVector(const Finish& finish, const float* source, int count, int filled, Floats bias,
                    float* target) const {
    if (conv_.y_channel == 1) {
      for (int j = 0; j < count; j++, source += kLanes, target += conv_.y_column) {
        const Floats pixel = hn::Add(hn::Load(kFloats, source), bias);
        const Floats finished = finish.Between(pixel, target, 0, filled);
        if (filled == kLanes) {
          Store(target, finished);
        } else {
          StoreBetween(target, finished, 0, filled);
        }
      }
      return;
    }
    for (int j = 0; j < count; j += kLanes, target += kLanes * conv_.y_column) {
      const int columns = std::min(kLanes, count - j);
      HWY_ALIGN float channels[kLanes * kLanes];
      Turn(source + j * kLanes, columns, bias, channels);
      for (int lane = 0; lane < filled; lane++) {
        PutRow(finish, channels + lane * kLanes, columns, target + lane * conv_.y_channel);
      }
    }
  }

  // Rows of channels from columns of biased pixels; what follows the last column is undefined.
  static HWY_NOINLINE void Turn(const float* source, int columns, Floats bias, float* channels) {
    HWY_ALIGN float pixels[kLanes * kLanes];
    const float* rows[kLanes];
    for (int i = 0; i < kLanes; i++) {
      rows[i] = pixels + std::min(i, columns - 1) * kLanes;
      if (i < columns) StoreAligned(pixels + i * kLanes, hn::Add(hn::Load(kFloats, source + i * kLanes), bias));
    }
    TransposeColumns<kLanes / 4>(rows, 0, channels);
  }

  template <class Finish>
  void PutRow(const Finish& finish, const float* values, int columns, float* target) const {
    if (conv_.y_column != 1) {
      for (int i = 0; i < columns; i++) {
        float* place = target + i * conv_.y_column;
        *place = finish.One(values[i], place);
      }
      return;
    }
    const Floats finished = finish.Between(hn::Load(kFloats, values), target, 0, columns);
    if (columns == kLanes) {
      Store(target, finished);
    } else {
      StoreBetween(target, finished, 0, columns);
    }
  }

  const Convolution& conv_;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
