// Stores finished rows with their epilogue: non-temporally if y is large, transposed if channels are contiguous.
#if defined(POLYCONV_CPU_COMMON_ROW_WRITER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_COMMON_ROW_WRITER_INL_H_
#undef POLYCONV_CPU_COMMON_ROW_WRITER_INL_H_
#else
#define POLYCONV_CPU_COMMON_ROW_WRITER_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/convolution.h"
#include "common/epilogue-inl.h"
#include "common/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Stores contiguous floats. `stream`: non-temporal stores.
template <class Finish>
HWY_INLINE void WriteRun(const Finish& finish, float* target, const float* source, int count, bool stream) {
  const int misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(target) / sizeof(float) % kLanes);
  int i = misaligned == 0 ? 0 : std::min(kLanes - misaligned, count);
  if (i > 0) StoreBetween(target, finish.Between(Load(source), target, 0, i), 0, i);
  if (stream) {
    for (; i + kLanes <= count; i += kLanes) {
      hn::Stream(finish.Whole(Load(source + i), target + i), kFloats, target + i);
    }
  } else {
    for (; i + kLanes <= count; i += kLanes) StoreAligned(target + i, finish.Whole(Load(source + i), target + i));
  }
  if (i < count) {
    StoreBetween(target + i, finish.Between(Load(source + i), target + i, 0, count - i), 0, count - i);
  }
}

class RowWriter {
 public:
  // `row_step`: distance between two rows in y [floats].
  RowWriter(const Convolution& conv, std::ptrdiff_t row_step)
      : conv_(conv), row_step_(row_step), transposes_(conv.y_column != 1 && conv.y_channel == 1) {
    const double bytes = 4.0 * conv.batch * conv.out_channels * conv.out_height * conv.out_width;
    stream_ = bytes > (8 << 20);
  }

  // Whether channels are contiguous in y, so that vectors of channels are written.
  bool transposes() const { return transposes_; }

  // Stores `count` columns of `rows` rows of up to kLanes neighbouring channels. In `lines`, rows are `pitch` floats
  // apart and channels `channel_pitch`.
  HWY_NOINLINE void Write(float* target, const float* lines, std::size_t pitch, std::size_t channel_pitch, int channels,
                          int rows, int count) const {
    WithFinisher(conv_.epilogue, conv_.y, [&](const auto& finish) HWY_ATTR {
      WriteRows(finish, target, lines, pitch, channel_pitch, channels, rows, count);
    });
  }

 private:
  template <class Finish>
  HWY_NOINLINE void WriteRows(const Finish& finish, float* target, const float* line, std::size_t pitch,
                              std::size_t channel_pitch, int channels, int rows, int count) const {
    for (int row = 0; row < rows; row++, line += pitch, target += row_step_) {
      if (conv_.y_column == 1) {
        WriteRun(finish, target, line, count, stream_);
      } else if (transposes_) {
        WriteTransposed(finish, target, line, channel_pitch, channels, count);
      } else {
        for (int i = 0; i < count; i++) {
          float* place = target + i * conv_.y_column;
          *place = finish.One(line[i], place);
        }
      }
    }
  }

  // Stores up to kLanes channels of each pixel as one vector.
  template <class Finish>
  HWY_NOINLINE void WriteTransposed(const Finish& finish, float* target, const float* line, std::size_t channel_pitch,
                                    int channels, int count) const {
    const bool whole = channels == kLanes;
    const bool streams = stream_ && whole && reinterpret_cast<std::uintptr_t>(target) % (kLanes * sizeof(float)) == 0 &&
                         conv_.y_column % kLanes == 0;
    for (int i = 0; i < count; i += kLanes) {
      Floats v[kLanes];
      POLYCONV_UNROLL
      for (int k = 0; k < kLanes; k++) v[k] = k < channels ? Load(line + k * channel_pitch + i) : hn::Zero(kFloats);
      Transpose(v);
      float* pixel = target + i * conv_.y_column;
      POLYCONV_UNROLL
      for (int l = 0; l < kLanes; l++, pixel += conv_.y_column) {
        if (i + l >= count) break;
        const Floats finished = finish.Between(v[l], pixel, 0, channels);
        if (streams) {
          hn::Stream(finished, kFloats, pixel);
        } else if (whole) {
          Store(pixel, finished);
        } else {
          StoreBetween(pixel, finished, 0, channels);
        }
      }
    }
  }

  const Convolution& conv_;
  const std::ptrdiff_t row_step_;
  const bool transposes_;
  bool stream_;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
