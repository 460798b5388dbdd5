// Depthwise convolution of images whose channels are neighbours in memory (channels_last), with channels in the lanes.
//
// Pixels are read where they lie. Whether a tap falls outside the image is decided for a few neighbouring pixels at a
// time: those whose taps are all inside, nearly all, take the loop without questions.
#if defined(POLYCONV_CPU_DEPTHWISE_PIXELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_DEPTHWISE_PIXELS_INL_H_
#undef POLYCONV_CPU_DEPTHWISE_PIXELS_INL_H_
#else
#define POLYCONV_CPU_DEPTHWISE_PIXELS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "depthwise.h"
#include "memory.h"
#include "padded_line.h"
#include "simd-inl.h"
#include "tiling.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// The pixel at every position of a padded axis, or -1.
inline std::vector<int> SourcesOf(const DepthwiseAxis& axis, Border border) {
  std::vector<int> sources(std::max(axis.reach, 0));
  for (int position = 0; position < axis.reach; position++) {
    sources[position] = SourceIndex(border, position - axis.before, axis.source);
  }
  return sources;
}

// Whether the positions from `first` to `last` are pixels next to one another.
HWY_INLINE bool AreInside(const DepthwiseAxis& axis, int first, int last) {
  return first >= axis.before && last < axis.before + axis.source;
}

// One vector of channels; the last one may be shorter.
template <bool kWhole>
HWY_INLINE Floats LoadChannels(const float* p, int channels) {
  if constexpr (kWhole) return Load(p);
  return LoadBetween(p, 0, channels);
}

class DepthwisePixels {
 public:
  static bool Takes(const DepthwiseCorrelation& conv) {
    return conv.reads == 1 && conv.writes == 1 && conv.groups >= kLanes / 2 && conv.x_channel == 1 &&
           conv.y_channel == 1;
  }

  explicit DepthwisePixels(const DepthwiseCorrelation& conv)
      : conv_(conv), rows_(SourcesOf(conv.height, conv.border)), columns_(SourcesOf(conv.width, conv.border)) {
    for (const AxisPhase& phase : conv.height.phases) taps_h_ += phase.taps;
    for (const AxisPhase& phase : conv.width.phases) taps_w_ += phase.taps;
    channels_ = RoundUp(conv.groups, kLanes);
    // As many channels at a time as keep their weights in the L1 cache.
    constexpr int kWeightBytes = 16 << 10;
    block_channels_ = std::max(kLanes, kWeightBytes / (4 * taps_h_ * taps_w_) / kLanes * kLanes);
    const double bytes = 4.0 * conv.batch * conv.groups * conv.height.target * conv.width.target;
    const bool aligned = reinterpret_cast<std::uintptr_t>(conv.y) % (kLanes * sizeof(float)) == 0 &&
                         (conv.y_batch | conv.y_row | conv.y_column) % kLanes == 0;
    stream_ = bytes > (8 << 20) && aligned;
  }

  void Run(const Runtime& runtime) const {
    float* weights = Scratch::Shared().Get(std::size_t{1} * taps_h_ * taps_w_ * channels_);
    PackWeights(weights);
    const std::int64_t rows = std::int64_t{1} * conv_.batch * conv_.height.target;
    runtime.parallel_for(rows, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; row++) {
        for (int first = 0; first < conv_.groups; first += block_channels_) {
          RunRow(row / conv_.height.target, static_cast<int>(row % conv_.height.target), first,
                 std::min(first + block_channels_, conv_.groups), weights);
        }
      }
      hwy::FlushStream();
    });
  }

 private:
  // [tap row][tap column][channel], taps in the order of the phases
  void PackWeights(float* target) const {
    for (const AxisPhase& h : conv_.height.phases) {
      for (int r = 0; r < h.taps; r++) {
        for (const AxisPhase& v : conv_.width.phases) {
          for (int s = 0; s < v.taps; s++, target += channels_) {
            const float* w = conv_.w + (h.first_tap + r * h.tap_step) * conv_.w_row +
                             (v.first_tap + s * v.tap_step) * conv_.w_column;
            for (int c = 0; c < channels_; c++) target[c] = c < conv_.groups ? w[c * conv_.w_channel] : 0.0f;
          }
        }
      }
    }
  }

  // A few output pixels of one row and one phase.
  struct Tile {
    const float* image;
    const float* weights;  // of the first tap of the phase
    float* y;
    std::ptrdiff_t y_step;  // from one pixel to the next
    int first_row;          // positions of the first tap
    int first_column;
    int taps_h, taps_w;
  };

  void RunRow(std::int64_t image, int row, int first_channel, int last_channel, const float* weights) const {
    const int row_phases = static_cast<int>(conv_.height.phases.size());
    const int column_phases = static_cast<int>(conv_.width.phases.size());
    const AxisPhase& h = conv_.height.phases[row % row_phases];
    for (int a = 0; a < row % row_phases; a++) {
      weights += std::size_t{1} * conv_.height.phases[a].taps * taps_w_ * channels_;
    }
    Tile tile;
    tile.image = conv_.x + image * conv_.x_batch;
    tile.first_row = conv_.height.StartOf(h) + row / row_phases * conv_.height.stride;
    tile.taps_h = h.taps;
    tile.y_step = column_phases * conv_.y_column;
    for (int b = 0; b < column_phases; b++) {
      const AxisPhase& v = conv_.width.phases[b];
      tile.weights = weights;
      tile.taps_w = v.taps;
      for (int u = 0, pixels; u < v.count; u += pixels) {
        pixels = v.count - u >= kMostPixels ? kMostPixels : v.count - u >= 4 ? 4 : 1;
        tile.first_column = conv_.width.StartOf(v) + u * conv_.width.stride;
        tile.y = conv_.y + image * conv_.y_batch + row * conv_.y_row + (u * column_phases + b) * conv_.y_column;
        if (pixels == kMostPixels) {
          RunTile<kMostPixels>(tile, first_channel, last_channel);
        } else if (pixels == 4) {
          RunTile<4>(tile, first_channel, last_channel);
        } else {
          RunTile<1>(tile, first_channel, last_channel);
        }
      }
      weights += std::size_t{1} * v.taps * channels_;
    }
  }

  template <int kPixels>
  HWY_NOINLINE void RunTile(const Tile& tile, int first_channel, int last_channel) const {
    const int last = tile.first_column + (kPixels - 1) * conv_.width.stride + (tile.taps_w - 1) * conv_.width.dilation;
    const bool inside = AreInside(conv_.width, tile.first_column, last);
    int c = first_channel;
    if (inside) {
      for (; c + kLanes <= last_channel; c += kLanes) RunVector<kPixels, true, true>(tile, c);
      if (c < last_channel) RunVector<kPixels, false, true>(tile, c);
    } else {
      for (; c + kLanes <= last_channel; c += kLanes) RunVector<kPixels, true, false>(tile, c);
      if (c < last_channel) RunVector<kPixels, false, false>(tile, c);
    }
  }

  template <int kPixels, bool kWhole, bool kInside>
  HWY_INLINE void RunVector(const Tile& tile, int channel) const {
    const int channels = conv_.groups - channel;
    const std::ptrdiff_t pixel_step = conv_.width.stride * conv_.x_column;
    const std::ptrdiff_t tap_step = conv_.width.dilation * conv_.x_column;
    Floats sums[kPixels];
    const Floats start = conv_.bias == nullptr ? hn::Zero(kFloats) : LoadBias(channel, std::min(channels, kLanes));
    POLYCONV_UNROLL
    for (int j = 0; j < kPixels; j++) sums[j] = start;
    for (int r = 0; r < tile.taps_h; r++) {
      const int row = rows_[tile.first_row + r * conv_.height.dilation];
      if (row < 0) continue;
      const float* weights = tile.weights + std::size_t{1} * r * taps_w_ * channels_ + channel;
      const float* line = tile.image + row * conv_.x_row + channel;
      const float* source = line + (tile.first_column - conv_.width.before) * conv_.x_column;
      for (int s = 0; s < tile.taps_w; s++, weights += channels_, source += tap_step) {
        const Floats weight = Load(weights);
        POLYCONV_UNROLL
        for (int j = 0; j < kPixels; j++) {
          if constexpr (kInside) {
            sums[j] = hn::MulAdd(weight, LoadChannels<kWhole>(source + j * pixel_step, channels), sums[j]);
          } else {
            const int column = columns_[tile.first_column + j * conv_.width.stride + s * conv_.width.dilation];
            if (column < 0) continue;
            sums[j] = hn::MulAdd(weight, LoadChannels<kWhole>(line + column * conv_.x_column, channels), sums[j]);
          }
        }
      }
    }
    POLYCONV_UNROLL
    for (int j = 0; j < kPixels; j++) {
      float* target = tile.y + j * tile.y_step + channel;
      if constexpr (!kWhole) {
        StoreBetween(target, sums[j], 0, channels);
      } else if (stream_) {
        hn::Stream(sums[j], kFloats, target);
      } else {
        Store(target, sums[j]);
      }
    }
  }

  Floats LoadBias(int channel, int channels) const {
    alignas(64) float bias[kLanes] = {};
    for (int i = 0; i < channels; i++) bias[i] = conv_.bias[(channel + i) * conv_.bias_step];
    return hn::Load(kFloats, bias);
  }

  static constexpr int kMostPixels = 8;

  const DepthwiseCorrelation& conv_;
  const std::vector<int> rows_, columns_;  // of the source, by position
  int taps_h_ = 0, taps_w_ = 0;            // of all phases
  int channels_;                           // whole vectors of them
  int block_channels_;
  bool stream_;
};

// The weight gradient. A lane adds up the products of a few rows in float, at most kTerms unless one row alone has more;
// these sums are added in double. The cut depends on the shape alone.
class DepthwisePixelWeights {
 public:
  static bool Takes(const DepthwiseWeightGradient& gradient) {
    return gradient.multiplier == 1 && gradient.groups >= kLanes / 2 && gradient.x_channel == 1 &&
           gradient.y_channel == 1;
  }

  explicit DepthwisePixelWeights(const DepthwiseWeightGradient& gradient)
      : gradient_(gradient),
        rows_(SourcesOf(gradient.height, gradient.border)),
        columns_(SourcesOf(gradient.width, gradient.border)),
        taps_h_(gradient.height.phases[0].taps),
        taps_w_(gradient.width.phases[0].taps) {
    // As many channels at a time as keep their sums near the core: pixels are contiguous then.
    constexpr int kSumBytes = 64 << 10;
    block_channels_ = std::clamp(kSumBytes / (4 * taps_h_ * taps_w_) / kLanes * kLanes, kLanes, 256);
    block_channels_ = std::min(block_channels_, RoundUp(gradient.groups, kLanes));
    blocks_ = CeilDiv(gradient.groups, block_channels_);
    band_rows_ = std::clamp(kTerms / gradient.width.target, 1, gradient.height.target);
    bands_ = CeilDiv(gradient.height.target, band_rows_);
    pieces_ = std::int64_t{1} * gradient.batch * bands_;
    parts_ = static_cast<int>(std::clamp<std::int64_t>(CeilDiv(64, blocks_), 1, std::max<std::int64_t>(pieces_, 1)));
  }

  void Run(const Runtime& runtime) const {
    const std::size_t share = (std::size_t{1} * taps_h_ * taps_w_ + 1) * block_channels_;  // see AddBand
    std::vector<double> partial(share * parts_ * blocks_);
    runtime.parallel_for(std::int64_t{1} * parts_ * blocks_, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> sums(share);
      for (std::int64_t task = begin; task < end; task++) {
        const int first_channel = static_cast<int>(task / parts_) * block_channels_;
        const std::int64_t part = task % parts_;
        for (std::int64_t piece = pieces_ * part / parts_; piece < pieces_ * (part + 1) / parts_; piece++) {
          AddBand(piece / bands_, static_cast<int>(piece % bands_) * band_rows_, first_channel, sums);
          for (std::size_t i = 0; i < share; i++) partial[task * share + i] += static_cast<double>(sums[i]);
        }
      }
    });
    const std::size_t vector_share = share / (block_channels_ / kLanes);
    for (int c = 0; c < gradient_.groups; c++) {
      const int block = c / block_channels_, vector = c % block_channels_ / kLanes;
      Finish(c, &partial[block * parts_ * share + vector * vector_share + c % kLanes], share);
    }
  }

 private:
  // The sums of a few rows of one image: [vector of channels][tap][lane]; behind the taps comes the bias gradient.
  void AddBand(std::int64_t image, int first_row, int first_channel, std::vector<float>& sums) const {
    const std::size_t vector_share = (std::size_t{1} * taps_h_ * taps_w_ + 1) * kLanes;
    const int last_row = std::min(first_row + band_rows_, gradient_.height.target);
    const int last_channel = std::min(first_channel + block_channels_, gradient_.groups);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int i = first_row; i < last_row; i++) {
      float* target = sums.data();
      for (int channel = first_channel; channel < last_channel; channel += kLanes, target += vector_share) {
        if (gradient_.groups - channel >= kLanes) {
          AddRow<true>(image, channel, i, target);
        } else {
          AddRow<false>(image, channel, i, target);
        }
      }
    }
  }

  template <bool kWhole>
  HWY_INLINE void AddRow(std::int64_t image, int channel, int i, float* sums) const {
    const DepthwiseAxis& height = gradient_.height;
    const float* dy = gradient_.dy + image * gradient_.y_batch + i * gradient_.y_row + channel;
    for (int r = 0; r < taps_h_; r++) {
      const int row = rows_[i * height.stride + r * height.dilation];
      if (row < 0) continue;
      const float* line = gradient_.x + image * gradient_.x_batch + row * gradient_.x_row + channel;
      for (int s = 0, taps; s < taps_w_; s += taps) {
        taps = std::min(taps_w_ - s, kMostTaps);
        float* target = sums + (std::size_t{1} * r * taps_w_ + s) * kLanes;
        switch (taps) {
          case 1:
            AddTaps<1, kWhole>(dy, line, channel, s, target);
            break;
          case 2:
            AddTaps<2, kWhole>(dy, line, channel, s, target);
            break;
          case 3:
            AddTaps<3, kWhole>(dy, line, channel, s, target);
            break;
          case 4:
            AddTaps<4, kWhole>(dy, line, channel, s, target);
            break;
          case 5:
            AddTaps<5, kWhole>(dy, line, channel, s, target);
            break;
          case 6:
            AddTaps<6, kWhole>(dy, line, channel, s, target);
            break;
          default:
            AddTaps<kMostTaps, kWhole>(dy, line, channel, s, target);
        }
      }
    }
    if (gradient_.db == nullptr) return;
    float* target = sums + std::size_t{1} * taps_h_ * taps_w_ * kLanes;
    Floats sum = Load(target);
    for (int j = 0; j < gradient_.width.target; j++) {
      sum = hn::Add(sum, LoadChannels<kWhole>(dy + j * gradient_.y_column, gradient_.groups - channel));
    }
    Store(target, sum);
  }

  // sums += products of one row of dy and one row of x, for kTaps neighbouring taps
  template <int kTaps, bool kWhole>
  HWY_NOINLINE void AddTaps(const float* dy, const float* line, int channel, int first_tap, float* target) const {
    const DepthwiseAxis& width = gradient_.width;
    const int channels = gradient_.groups - channel;
    const std::ptrdiff_t tap_step = width.dilation * gradient_.x_column;
    Floats sums[kTaps];
    POLYCONV_UNROLL
    for (int q = 0; q < kTaps; q++) sums[q] = Load(target + q * kLanes);
    for (int j = 0; j < width.target; j++) {
      const Floats gradient = LoadChannels<kWhole>(dy + j * gradient_.y_column, channels);
      const int position = j * width.stride + first_tap * width.dilation;
      if (HWY_LIKELY(AreInside(width, position, position + (kTaps - 1) * width.dilation))) {
        const float* source = line + (position - width.before) * gradient_.x_column;
        POLYCONV_UNROLL
        for (int q = 0; q < kTaps; q++) {
          sums[q] = hn::MulAdd(gradient, LoadChannels<kWhole>(source + q * tap_step, channels), sums[q]);
        }
      } else {
        POLYCONV_UNROLL
        for (int q = 0; q < kTaps; q++) {
          const int column = columns_[position + q * width.dilation];
          if (column < 0) continue;
          const Floats x = LoadChannels<kWhole>(line + column * gradient_.x_column, channels);
          sums[q] = hn::MulAdd(gradient, x, sums[q]);
        }
      }
    }
    POLYCONV_UNROLL
    for (int q = 0; q < kTaps; q++) Store(target + q * kLanes, sums[q]);
  }

  void Finish(int c, const double* partial, std::size_t share) const {
    const auto total = [&](std::size_t tap) {
      double sum = 0;
      for (int part = 0; part < parts_; part++) sum += partial[part * share + tap * kLanes];
      return static_cast<float>(sum);
    };
    for (int r = 0; r < taps_h_; r++) {
      float* target = gradient_.dw + c * gradient_.w_channel + r * gradient_.w_row;
      for (int s = 0; s < taps_w_; s++) target[s * gradient_.w_column] = total(std::size_t{1} * r * taps_w_ + s);
    }
    if (gradient_.db != nullptr) gradient_.db[c * gradient_.bias_step] = total(std::size_t{1} * taps_h_ * taps_w_);
  }

  static constexpr int kMostTaps = 7;
  static constexpr int kTerms = 512;  // products that a lane adds up in float, if a row is not longer

  const DepthwiseWeightGradient& gradient_;
  const std::vector<int> rows_, columns_;  // of the source, by position
  const int taps_h_, taps_w_;
  int block_channels_, blocks_;
  int band_rows_, bands_;
  std::int64_t pieces_;  // bands of all images
  int parts_;            // of these pieces, summed apart
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
