// Rows of signals as padded lines of floats, for what cannot be read in place: edges, strides, contiguous channels.
#if defined(POLYCONV_CPU_SIGNALS_LINES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_SIGNALS_LINES_INL_H_
#undef POLYCONV_CPU_SIGNALS_LINES_INL_H_
#else
#define POLYCONV_CPU_SIGNALS_LINES_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/border.h"
#include "common/elements-inl.h"
#include "common/integers.h"
#include "common/scaling.h"
#include "signals/signals.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Registers for outputs of a tile, and for neighbouring taps of a weight gradient.
#if POLYCONV_REGISTERS == 32
inline constexpr int kTileVectors = 8, kTileTaps = 8;
#else
inline constexpr int kTileVectors = 4, kTileTaps = 4;
#endif

// Prefetch distance [elements]: the hardware prefetcher stops at the end of a page, which is often that of a row.
inline constexpr int kPrefetch = 1024;

// Channels that are packed together where they are contiguous: a few cache lines of every position, because memory is
// slow at a single one.
inline constexpr int kPackedChannels = 64;

// Elements along one axis of a tensor, and how a line of them is laid out: with a stride, the elements of each residue
// class are contiguous.
struct LineShape {
  int extent;
  std::ptrdiff_t channel, column;  // steps in memory
  int stride;
  Border border;
  int pitch;  // of a residue class

  LineShape(int extent, std::ptrdiff_t channel, std::ptrdiff_t column, int stride, Border border, int positions)
      : extent(extent), channel(channel), column(column), stride(stride), border(border) {
    pitch = RoundUp(CeilDiv(positions, stride), 16) + 2 * kTileVectors * kLanes + 16;
  }

  std::size_t size() const { return std::size_t{1} * pitch * stride; }
  int OffsetOf(int position) const { return position % stride * pitch + position / stride; }
  bool IsInside(int index) const { return index >= 0 && index < extent; }
};

// Packs `count` positions of a row from index `first` on, which may lie outside. Zeros follow them.
template <class T>
HWY_NOINLINE void PackLine(const LineShape& shape, const T* row, int first, int count, float* line) {
  const int s = shape.stride;
  for (int r = 0; r < s; r++) {
    const int size = CeilDiv(std::max(count - r, 0), s);
    float* target = line + r * shape.pitch;
    const auto outside = [&](int begin, int end) {
      for (int i = begin; i < end; i++) {
        const int index = SourceIndex(shape.border, first + r + i * s, shape.extent);
        target[i] = index < 0 ? 0.0f : One(row + index * shape.column);
      }
    };
    const int begin = std::clamp(first + r >= 0 ? 0 : CeilDiv(-first - r, s), 0, size);
    const int end = std::clamp(CeilDiv(std::max(shape.extent - first - r, 0), s), begin, size);
    outside(0, begin);
    const T* inside = row + (first + r) * shape.column;
    int i = begin;
    if (s * shape.column == 1) {
      for (; i + kLanes <= end; i += kLanes) {
        __builtin_prefetch(inside + i + kPrefetch);
        Store(target + i, LoadWide(inside + i));
      }
      if (i < end) Store(target + i, LoadSome(inside + i, end - i));
    } else {
      for (; i < end; i++) target[i] = One(inside + i * s * shape.column);
    }
    outside(end, size);
    for (int z = 0; z < kLanes; z++) target[size + z] = 0.0f;
  }
}

// The same for up to kPackedChannels neighbouring channels that are contiguous in memory, one line each.
template <class T>
HWY_NOINLINE void PackTransposed(const LineShape& shape, const T* image, int channels, int first, int count,
                                 float* lines) {
  const int s = shape.stride;
  for (int r = 0; r < s; r++) {
    const int size = CeilDiv(std::max(count - r, 0), s);
    for (int i = 0; i < size + kLanes; i += kLanes) {
      const int from = first + r + i * s, last = from + (kLanes - 1) * s;
      const bool inside = i + kLanes <= size && shape.IsInside(from) && shape.IsInside(last);
      for (int c = 0; c < channels; c += kLanes) {
        Floats v[kLanes];
        if (HWY_LIKELY(inside && c + kLanes <= channels)) {
          const T* pixel = image + from * shape.column + c;
          POLYCONV_UNROLL
          for (int l = 0; l < kLanes; l++, pixel += s * shape.column) {
            __builtin_prefetch(pixel + kLanes * s * shape.column);
            v[l] = LoadWide(pixel);
          }
        } else {
          for (int l = 0; l < kLanes; l++) {
            const int index = i + l < size ? SourceIndex(shape.border, from + l * s, shape.extent) : -1;
            v[l] = index < 0 ? hn::Zero(kFloats)
                             : LoadSome(image + index * shape.column + c, std::min(channels - c, kLanes));
          }
        }
        Transpose(v);
        float* target = lines + c * shape.size() + r * shape.pitch + i;
        POLYCONV_UNROLL
        for (int l = 0; l < kLanes; l++) Store(target + l * shape.size(), v[l]);
      }
    }
  }
}

// Scales a packed line of `count` positions if all of it is tiny. Returns the exponent.
inline int NormaliseLine(const LineShape& shape, int count, float* line) {
  const auto size = [&](int r) { return CeilDiv(std::max(count - r, 0), shape.stride); };
  std::uint32_t largest = 0;
  for (int r = 0; r < shape.stride; r++) largest = std::max(largest, LargestMagnitude(line + r * shape.pitch, size(r)));
  const int exponent = ExponentFor(largest);
  for (int r = 0; r < shape.stride && exponent > 0; r++) {
    ScaleUp({line + r * shape.pitch, 1, line + r * shape.pitch, 1}, size(r), exponent);
  }
  return exponent;
}

// Weights of one channel as floats.
template <class T>
HWY_INLINE void ReadTaps(const T* w, std::ptrdiff_t step, int taps, float* target) {
  int q = 0;
  if (step == 1) {
    for (; q + kLanes <= taps; q += kLanes) Store(target + q, LoadWide(w + q));
  }
  for (; q < taps; q++) target[q] = One(w + q * step);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
