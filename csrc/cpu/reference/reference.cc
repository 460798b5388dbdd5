// Direct summation in double. Borders, crops, strides, memory layouts and element types are handled once per row, when
// it is copied into a line of doubles (common/padded_line.h). The remaining loops run over contiguous doubles, and the
// compiler vectorises them.
// The order of every sum depends on the shape alone, so results do not depend on the number of threads.
#include "reference/reference.h"

#include <algorithm>
#include <vector>

#include "common/integers.h"
#include "common/old_exp.h"
#include "common/padded_line.h"
#include "common/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "reference/reference.cc"
#include <hwy/foreach_target.h>  // includes this file again, once per target
// must come after foreach_target.h
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Output (input, for the input gradient) channels that share one copied line.
constexpr int kChannelsAtATime = 8;

// sums += factor * line
HWY_INLINE void AddScaled(double factor, const double* HWY_RESTRICT line, int count, double* HWY_RESTRICT sums) {
  for (int i = 0; i < count; i++) sums[i] += factor * line[i];
}

// Dot product continued from row to row: element i is summed in lane i % kDotLanes, and the lanes are added at the end.
constexpr int kDotLanes = 8;
struct DotLanes {
  alignas(64) double lane[kDotLanes] = {};

  double Total() const {
    double total = 0;
    for (double sum : lane) total += sum;
    return total;
  }
};

HWY_INLINE void AddProducts(const double* HWY_RESTRICT a, const double* HWY_RESTRICT b, int count, DotLanes& sums) {
  DotLanes local = sums;
  const int whole = count / kDotLanes * kDotLanes;
  for (int i = 0; i < whole; i += kDotLanes) {
    for (int lane = 0; lane < kDotLanes; lane++) local.lane[lane] += a[i + lane] * b[i + lane];
  }
  for (int i = whole; i < count; i++) local.lane[i - whole] += a[i] * b[i];
  sums = local;
}

// Layout of the padded row, from the first to the last column that is read.
inline LineLayout LineOf(const PlainShape& s) {
  const int reach = (s.out_width - 1) * s.stride_w + (s.taps_w - 1) * s.dilation_w + 1;
  return LineLayout(s.stride_w, s.left, s.in_width, reach);
}

// Applies the epilogue to a row of sums and stores it to y from element `first` on. The only rounding to T.
template <class T>
void FinishRow(const Epilogue<T>& epilogue, std::ptrdiff_t first, std::ptrdiff_t step, int count, const double* sums,
               T* y) {
  for (int j = 0; j < count; j++) {
    const std::ptrdiff_t at = first + j * step;
    const double sum = epilogue.residual == nullptr ? sums[j] : sums[j] + static_cast<double>(epilogue.residual[at]);
    const double a = static_cast<double>(epilogue.a), b = static_cast<double>(epilogue.b);
    y[at] = static_cast<T>(Activated(epilogue.activation, a, b, sum));
  }
}

template <class T>
void Forward(const PlainShape& s, const T* x, const T* w, const T* bias, const Epilogue<T>& epilogue, T* y,
             const Runtime& runtime) {
  const LineLayout layout = LineOf(s);
  const int blocks = CeilDiv(s.out_channels, kChannelsAtATime);
  const std::int64_t tasks = std::int64_t{1} * s.batch * s.groups * blocks * s.out_height;
  runtime.parallel_for(tasks, [&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    std::vector<double> line(layout.size()), sums(std::size_t{kChannelsAtATime} * s.out_width);
    for (std::int64_t task = begin; task < end; task++) {
      const int i = static_cast<int>(task % s.out_height);
      const int block = static_cast<int>(task / s.out_height % blocks);
      const int group = static_cast<int>(task / s.out_height / blocks % s.groups);
      const std::int64_t image = task / s.out_height / blocks / s.groups;
      const int first_k = group * s.out_channels + block * kChannelsAtATime;
      const int channels = std::min(kChannelsAtATime, s.out_channels - block * kChannelsAtATime);
      for (int k = 0; k < channels; k++) {
        const double start = bias == nullptr ? 0.0 : static_cast<double>(bias[(first_k + k) * s.bias_step]);
        std::fill_n(&sums[k * s.out_width], s.out_width, start);
      }
      for (int c = 0; c < s.in_channels; c++) {
        const T* plane = x + image * s.x_batch + (group * s.in_channels + c) * s.x_channel;
        for (int r = 0; r < s.taps_h; r++) {
          const int row = SourceIndex(s.border, i * s.stride_h + r * s.dilation_h - s.top, s.in_height);
          if (row < 0) continue;
          FillLine(layout, s.border, plane + row * s.x_row, s.x_column, line.data());
          for (int k = 0; k < channels; k++) {
            const T* taps = w + (first_k + k) * s.w_out + c * s.w_in + r * s.w_row;
            for (int tap = 0; tap < s.taps_w; tap++) {
              AddScaled(static_cast<double>(taps[tap * s.w_column]), &line[layout.OffsetOf(tap * s.dilation_w)],
                        s.out_width, &sums[k * s.out_width]);
            }
          }
        }
      }
      for (int k = 0; k < channels; k++) {
        const std::ptrdiff_t first = image * s.y_batch + (first_k + k) * s.y_channel + i * s.y_row;
        FinishRow(epilogue, first, s.y_column, s.out_width, &sums[k * s.out_width], y);
      }
    }
  });
}

// A row of dx sums the padded rows that map to it: itself and the border rows that mirror it. Along a row, sums are
// over the padded line, which is folded onto the image at the end.
template <class T>
void InputGradient(const PlainShape& s, const T* dy, const T* w, T* dx, const Runtime& runtime) {
  const LineLayout layout = LineOf(s), dense(1, 0, s.out_width, s.out_width);
  const int reach = (s.out_height - 1) * s.stride_h + (s.taps_h - 1) * s.dilation_h + 1;
  const int blocks = CeilDiv(s.in_channels, kChannelsAtATime);
  const std::int64_t tasks = std::int64_t{1} * s.batch * s.groups * blocks * s.in_height;
  runtime.parallel_for(tasks, [&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    std::vector<double> line(s.out_width), sums(kChannelsAtATime * layout.size()), folded(s.in_width);
    for (std::int64_t task = begin; task < end; task++) {
      const int h = static_cast<int>(task % s.in_height);
      const int block = static_cast<int>(task / s.in_height % blocks);
      const int group = static_cast<int>(task / s.in_height / blocks % s.groups);
      const std::int64_t image = task / s.in_height / blocks / s.groups;
      const int first_c = block * kChannelsAtATime;
      const int channels = std::min(kChannelsAtATime, s.in_channels - first_c);
      std::fill(sums.begin(), sums.end(), 0.0);
      for (int padded_row = 0; padded_row < reach; padded_row++) {
        if (SourceIndex(s.border, padded_row - s.top, s.in_height) != h) continue;
        for (int r = 0; r < s.taps_h; r++) {
          const int distance = padded_row - r * s.dilation_h, i = distance / s.stride_h;
          if (distance < 0 || distance % s.stride_h != 0 || i >= s.out_height) continue;
          for (int k = group * s.out_channels; k < (group + 1) * s.out_channels; k++) {
            FillLine(dense, Border::kZeros, dy + image * s.y_batch + k * s.y_channel + i * s.y_row, s.y_column,
                     line.data());
            for (int c = 0; c < channels; c++) {
              const T* taps = w + k * s.w_out + (first_c + c) * s.w_in + r * s.w_row;
              for (int tap = 0; tap < s.taps_w; tap++) {
                AddScaled(static_cast<double>(taps[tap * s.w_column]), line.data(), s.out_width,
                          &sums[c * layout.size() + layout.OffsetOf(tap * s.dilation_w)]);
              }
            }
          }
        }
      }
      for (int c = 0; c < channels; c++) {
        FoldLine(layout, s.border, &sums[c * layout.size()], folded.data());
        T* target = dx + image * s.x_batch + (group * s.in_channels + first_c + c) * s.x_channel + h * s.x_row;
        for (int j = 0; j < s.in_width; j++) target[j * s.x_column] = static_cast<T>(folded[j]);
      }
    }
  });
}

// A task is one input channel, one row of taps, and kChannelsAtATime output channels.
template <class T>
void WeightGradient(const PlainShape& s, const T* x, const T* dy, T* dw, T* db, const Runtime& runtime) {
  const LineLayout layout = LineOf(s), dense(1, 0, s.out_width, s.out_width);
  const int blocks = CeilDiv(s.out_channels, kChannelsAtATime);
  const std::int64_t tasks = std::int64_t{1} * s.groups * blocks * s.in_channels * s.taps_h;
  runtime.parallel_for(tasks, [&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    std::vector<double> line(layout.size()), gradient(s.out_width);
    std::vector<DotLanes> sums(std::size_t{kChannelsAtATime} * s.taps_w);
    for (std::int64_t task = begin; task < end; task++) {
      const int r = static_cast<int>(task % s.taps_h);
      const int c = static_cast<int>(task / s.taps_h % s.in_channels);
      const int block = static_cast<int>(task / s.taps_h / s.in_channels % blocks);
      const int group = static_cast<int>(task / s.taps_h / s.in_channels / blocks);
      const int first_k = group * s.out_channels + block * kChannelsAtATime;
      const int channels = std::min(kChannelsAtATime, s.out_channels - block * kChannelsAtATime);
      std::fill(sums.begin(), sums.end(), DotLanes());
      for (std::int64_t image = 0; image < s.batch; image++) {
        const T* plane = x + image * s.x_batch + (group * s.in_channels + c) * s.x_channel;
        for (int i = 0; i < s.out_height; i++) {
          const int row = SourceIndex(s.border, i * s.stride_h + r * s.dilation_h - s.top, s.in_height);
          if (row < 0) continue;
          FillLine(layout, s.border, plane + row * s.x_row, s.x_column, line.data());
          for (int k = 0; k < channels; k++) {
            FillLine(dense, Border::kZeros, dy + image * s.y_batch + (first_k + k) * s.y_channel + i * s.y_row,
                     s.y_column, gradient.data());
            for (int tap = 0; tap < s.taps_w; tap++) {
              AddProducts(&line[layout.OffsetOf(tap * s.dilation_w)], gradient.data(), s.out_width,
                          sums[k * s.taps_w + tap]);
            }
          }
        }
      }
      for (int k = 0; k < channels; k++) {
        T* target = dw + (first_k + k) * s.w_out + c * s.w_in + r * s.w_row;
        for (int tap = 0; tap < s.taps_w; tap++) {
          target[tap * s.w_column] = static_cast<T>(sums[k * s.taps_w + tap].Total());
        }
      }
    }
  });
  if (db == nullptr) return;
  runtime.parallel_for(s.groups * s.out_channels, [&](std::int64_t begin, std::int64_t end) HWY_ATTR {
    std::vector<double> gradient(s.out_width);
    const std::vector<double> ones(s.out_width, 1.0);
    for (std::int64_t k = begin; k < end; k++) {
      DotLanes sum;
      for (std::int64_t image = 0; image < s.batch; image++) {
        for (int i = 0; i < s.out_height; i++) {
          FillLine(dense, Border::kZeros, dy + image * s.y_batch + k * s.y_channel + i * s.y_row, s.y_column,
                   gradient.data());
          AddProducts(gradient.data(), ones.data(), s.out_width, sum);
        }
      }
      db[k * s.bias_step] = static_cast<T>(sum.Total());
    }
  });
}

template <class T>
const PlainKernels<T>& Kernels() {
  static constexpr PlainKernels<T> kKernels = {&Forward<T>, &InputGradient<T>, &WeightGradient<T>};
  return kKernels;
}

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace polyconv {
template <class T>
const PlainKernels<T>& FindPlainKernels(InstructionSet set) {
  POLYCONV_CALL_TARGET(set, Kernels<T>);
}
template const PlainKernels<float>& FindPlainKernels<float>(InstructionSet set);
template const PlainKernels<double>& FindPlainKernels<double>(InstructionSet set);
}  // namespace polyconv
#endif
