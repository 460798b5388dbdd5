// Depthwise convolution of images with contiguous channels (channels_last), with channels in the lanes.
//
// Pixels are read in place. Whether a tap falls outside the image is decided for a few neighbouring pixels at a time:
// nearly all of them have all taps inside, and take a loop without checks.
#if defined(POLYCONV_CPU_DEPTHWISE_PIXELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_DEPTHWISE_PIXELS_INL_H_
#undef POLYCONV_CPU_DEPTHWISE_PIXELS_INL_H_
#else
#define POLYCONV_CPU_DEPTHWISE_PIXELS_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/epilogue-inl.h"
#include "common/integers.h"
#include "common/memory.h"
#include "common/padded_line.h"
#include "common/simd-inl.h"
#include "common/tiny-inl.h"
#include "depthwise/depthwise.h"

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

// Whether the positions from `first` to `last` are all pixels.
HWY_INLINE bool AreInside(const DepthwiseAxis& axis, int first, int last) {
  return first >= axis.before && last < axis.before + axis.source;
}

// One vector of channels; the last one may be partial.
template <bool kWhole>
HWY_INLINE Floats LoadChannels(const float* p, int channels) {
  if constexpr (kWhole) return Load(p);
  return LoadBetween(p, 0, channels);
}

class DepthwisePixels {
  // Register tile.
  static constexpr int kTileRows = 2;
#if POLYCONV_REGISTERS == 32
  static constexpr int kTilePixels = 8;
#else
  static constexpr int kTilePixels = 4;
#endif

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
    // As many channels at a time as keep their weights in L1.
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
    const int phases = static_cast<int>(conv_.height.phases.size());
    const int pairs = CeilDiv(CeilDiv(conv_.height.target, phases), kTileRows);
    runtime.parallel_for(std::int64_t{1} * conv_.batch * pairs * phases, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t task = begin; task < end; task++) {
        const int phase = static_cast<int>(task % phases), pair = static_cast<int>(task / phases % pairs);
        for (int first = 0; first < conv_.groups; first += block_channels_) {
          const int last = std::min(first + block_channels_, conv_.groups);
          RunRows(task / phases / pairs, phase, pair * kTileRows, first, last, weights);
        }
      }
      hwy::FlushStream();
    });
  }

 private:
  // [tap row][tap column][channel], taps in order of the phases
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

  // A few output pixels of one phase, in one row or in two that share their input.
  struct Tile {
    const float* image;
    const float* weights;  // of the first tap of the phase
    float* y;
    std::ptrdiff_t y_row, y_step;  // between rows and between pixels
    int rows;
    int first_row;  // positions of the first tap
    int first_column;
    int taps_h, taps_w;
  };

  // kTileRows rows of a phase, from number u on.
  void RunRows(std::int64_t image, int row_phase, int u, int first_channel, int last_channel,
               const float* weights) const {
    const int row_phases = static_cast<int>(conv_.height.phases.size());
    const AxisPhase& h = conv_.height.phases[row_phase];
    for (int a = 0; a < row_phase; a++) {
      weights += std::size_t{1} * conv_.height.phases[a].taps * taps_w_ * channels_;
    }
    const int rows = std::min(kTileRows, h.count - u);
    // Tap r + 1 of a row reads what tap r of the next row reads only if stride and dilation agree.
    const bool together = rows == kTileRows && conv_.height.stride == conv_.height.dilation;
    Tile tile;
    tile.image = conv_.x + image * conv_.x_batch;
    tile.taps_h = h.taps;
    tile.y_row = row_phases * conv_.y_row;
    tile.rows = together ? kTileRows : 1;
    for (int row = 0; row < rows; row += tile.rows) {
      tile.first_row = conv_.height.StartOf(h) + (u + row) * conv_.height.stride;
      RunColumns(tile, conv_.y + image * conv_.y_batch + ((u + row) * row_phases + row_phase) * conv_.y_row,
                 first_channel, last_channel, weights);
    }
  }

  void RunColumns(Tile& tile, float* y, int first_channel, int last_channel, const float* weights) const {
    const int column_phases = static_cast<int>(conv_.width.phases.size());
    tile.y_step = column_phases * conv_.y_column;
    for (int b = 0; b < column_phases; b++) {
      const AxisPhase& v = conv_.width.phases[b];
      tile.weights = weights;
      tile.taps_w = v.taps;
      // Equal tiles, without a small remainder.
      const int tiles = CeilDiv(v.count, kTilePixels);
      for (int number = 0; number < tiles; number++) {
        const int u = v.count * number / tiles, pixels = v.count * (number + 1) / tiles - u;
        tile.first_column = conv_.width.StartOf(v) + u * conv_.width.stride;
        tile.y = y + (u * column_phases + b) * conv_.y_column;
        if (tile.rows == kTileRows) {
          RunTile<kTileRows>(pixels, tile, first_channel, last_channel);
        } else {
          RunTile<1>(pixels, tile, first_channel, last_channel);
        }
      }
      weights += std::size_t{1} * v.taps * channels_;
    }
  }

  template <int kRows, int kPixels = kTilePixels>
  HWY_INLINE void RunTile(int pixels, const Tile& tile, int first_channel, int last_channel) const {
    if constexpr (kPixels > 1) {
      if (pixels < kPixels) return RunTile<kRows, kPixels - 1>(pixels, tile, first_channel, last_channel);
    }
    RunTile<kRows, kPixels>(tile, first_channel, last_channel);
  }

  template <int kRows, int kPixels>
  HWY_NOINLINE void RunTile(const Tile& tile, int first_channel, int last_channel) const {
    const int last = tile.first_column + (kPixels - 1) * conv_.width.stride + (tile.taps_w - 1) * conv_.width.dilation;
    const bool inside = AreInside(conv_.width, tile.first_column, last);
    int c = first_channel;
    if (inside) {
      for (; c + kLanes <= last_channel; c += kLanes) RunVector<kRows, kPixels, true, true>(tile, c);
      if (c < last_channel) RunVector<kRows, kPixels, false, true>(tile, c);
    } else {
      for (; c + kLanes <= last_channel; c += kLanes) RunVector<kRows, kPixels, true, false>(tile, c);
      if (c < last_channel) RunVector<kRows, kPixels, false, false>(tile, c);
    }
  }

  template <int kRows, int kPixels, bool kWhole, bool kInside>
  HWY_INLINE void RunVector(const Tile& tile, int channel) const {
    const int channels = conv_.groups - channel;
    Floats sums[kRows][kPixels];
    const Floats start = conv_.bias == nullptr ? hn::Zero(kFloats) : LoadBias(channel, std::min(channels, kLanes));
    POLYCONV_UNROLL
    for (int row = 0; row < kRows; row++) {
      POLYCONV_UNROLL
      for (int j = 0; j < kPixels; j++) sums[row][j] = start;
    }
    // Input row t is tap row t of the first output row and tap row t - 1 of the second.
    const int lines = tile.taps_h == 0 ? 0 : tile.taps_h + kRows - 1;
    for (int t = 0; t < lines; t++) {
      const int row = rows_[tile.first_row + t * conv_.height.dilation];
      if (row < 0) continue;
      const float* line = tile.image + row * conv_.x_row + channel;
      if (kRows == 1 || t == 0) {
        AddLine<0, 0, kPixels, kWhole, kInside>(tile, channel, t, line, sums);
      } else if (t == tile.taps_h) {
        AddLine<kRows - 1, kRows - 1, kPixels, kWhole, kInside>(tile, channel, t, line, sums);
      } else {
        AddLine<0, kRows - 1, kPixels, kWhole, kInside>(tile, channel, t, line, sums);
      }
    }
    if (HWY_UNLIKELY(!conv_.epilogue.IsEmpty() || conv_.tiny.exponent > 0)) {
      // Sums go through L1, so that one loop serves all register tiles.
      HWY_ALIGN float kept[kRows * kPixels * kLanes];
      POLYCONV_UNROLL
      for (int row = 0; row < kRows; row++) {
        POLYCONV_UNROLL
        for (int j = 0; j < kPixels; j++) StoreAligned(kept + (row * kPixels + j) * kLanes, sums[row][j]);
      }
      return FinishTile(kept, kRows, kPixels, tile, channel);
    }
    POLYCONV_UNROLL
    for (int row = 0; row < kRows; row++) {
      POLYCONV_UNROLL
      for (int j = 0; j < kPixels; j++) {
        float* target = tile.y + row * tile.y_row + j * tile.y_step + channel;
        if constexpr (!kWhole) {
          StoreBetween(target, sums[row][j], 0, channels);
        } else if (stream_) {
          hn::Stream(sums[row][j], kFloats, target);
        } else {
          Store(target, sums[row][j]);
        }
      }
    }
  }

  // Writes the sums of a tile, [row][pixel][lane], with the epilogue.
  HWY_NOINLINE void FinishTile(float* sums, int rows, int pixels, const Tile& tile, int channel) const {
    const int channels = std::min(conv_.groups - channel, kLanes);
    WithFinisher(Finished(conv_, sums, rows * pixels * kLanes), conv_.y, [&](const auto& finish) HWY_ATTR {
      for (int row = 0; row < rows; row++) {
        for (int j = 0; j < pixels; j++, sums += kLanes) {
          float* target = tile.y + row * tile.y_row + j * tile.y_step + channel;
          const Floats finished = finish.Between(hn::Load(kFloats, sums), target, 0, channels);
          if (channels < kLanes) {
            StoreBetween(target, finished, 0, channels);
          } else if (stream_) {
            hn::Stream(finished, kFloats, target);
          } else {
            Store(target, finished);
          }
        }
      }
    });
  }

  // One row of input for the tile's rows kFirst to kLast.
  template <int kFirst, int kLast, int kPixels, bool kWhole, bool kInside, int kRows>
  HWY_INLINE void AddLine(const Tile& tile, int channel, int t, const float* line,
                          Floats (&sums)[kRows][kPixels]) const {
    const int channels = conv_.groups - channel;
    const std::ptrdiff_t pixel_step = conv_.width.stride * conv_.x_column;
    const std::ptrdiff_t tap_step = conv_.width.dilation * conv_.x_column;
    const std::ptrdiff_t tap_row = std::ptrdiff_t{1} * taps_w_ * channels_;
    const float* weights = tile.weights + t * tap_row + channel;
    const float* source = line + (tile.first_column - conv_.width.before) * conv_.x_column;
    for (int s = 0; s < tile.taps_w; s++, weights += channels_, source += tap_step) {
      Floats weight[kRows];
      POLYCONV_UNROLL
      for (int row = kFirst; row <= kLast; row++) weight[row] = Load(weights - row * tap_row);
      POLYCONV_UNROLL
      for (int j = 0; j < kPixels; j++) {
        const float* pixel = source + j * pixel_step;
        if constexpr (!kInside) {
          const int column = columns_[tile.first_column + j * conv_.width.stride + s * conv_.width.dilation];
          if (column < 0) continue;
          pixel = line + column * conv_.x_column;
        }
        const Floats x = LoadChannels<kWhole>(pixel, channels);
        POLYCONV_UNROLL
        for (int row = kFirst; row <= kLast; row++) sums[row][j] = hn::MulAdd(weight[row], x, sums[row][j]);
      }
    }
  }

  Floats LoadBias(int channel, int channels) const {
    alignas(64) float bias[kLanes] = {};
    for (int i = 0; i < channels; i++) bias[i] = conv_.bias[(channel + i) * conv_.bias_step];
    return hn::Load(kFloats, bias);
  }

  const DepthwiseCorrelation& conv_;
  const std::vector<int> rows_, columns_;  // of the source, by position
  int taps_h_ = 0, taps_w_ = 0;            // of all phases
  int channels_;                           // rounded up to whole vectors
  int block_channels_;
  bool stream_;
};

// Weight gradient. A lane sums the products of a few rows in float, at most kTerms unless one row alone has more; these
// sums are added in double. The cut depends on the shape alone.
class DepthwisePixelWeights {
 public:
  static bool Takes(const DepthwiseWeightGradient& gradient) {
    return gradient.multiplier == 1 && gradient.groups >= kLanes / 2 && gradient.x_channel == 1 &&
           gradient.y_channel == 1;
  }

  static std::int64_t LongestSum(const DepthwiseWeightGradient& gradient) {
    return std::int64_t{1} * BandRows(gradient) * gradient.width.target;
  }

  explicit DepthwisePixelWeights(const DepthwiseWeightGradient& gradient)
      : gradient_(gradient),
        rows_(SourcesOf(gradient.height, gradient.border)),
        columns_(SourcesOf(gradient.width, gradient.border)),
        taps_h_(gradient.height.phases[0].taps),
        taps_w_(gradient.width.phases[0].taps) {
    // As many channels at a time as keep their sums in the cache: pixels are then read contiguously.
    constexpr int kSumBytes = 64 << 10;
    block_channels_ = std::clamp(kSumBytes / (4 * taps_h_ * taps_w_) / kLanes * kLanes, kLanes, 256);
    block_channels_ = std::min(block_channels_, RoundUp(gradient.groups, kLanes));
    blocks_ = CeilDiv(gradient.groups, block_channels_);
    band_rows_ = BandRows(gradient);
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
  static int BandRows(const DepthwiseWeightGradient& gradient) {
    return std::clamp(kTerms / gradient.width.target, 1, gradient.height.target);
  }

  // Sums of a few rows of one image: [vector of channels][tap][lane]; the bias gradient follows the taps.
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
    const float* image_rows = gradient_.x + image * gradient_.x_batch + channel;
    const auto line_of = [&](int r) {
      const int row = rows_[i * height.stride + r * height.dilation];
      return row < 0 ? nullptr : image_rows + row * gradient_.x_row;
    };
    for (int r = 0, rows; r < taps_h_; r += rows) {
      rows = 1;
      const float* lines[3] = {line_of(r)};
      if (lines[0] == nullptr) continue;
      if (taps_w_ <= 3 && r + 2 < taps_h_) {
        lines[1] = line_of(r + 1), lines[2] = line_of(r + 2);
        if (lines[1] != nullptr && lines[2] != nullptr) rows = 3;
      }
      for (int s = 0, taps; s < taps_w_; s += taps) {
        taps = std::min(taps_w_ - s, kMostTaps);
        float* target = sums + (std::size_t{1} * r * taps_w_ + s) * kLanes;
        if (rows == 3) {
          AddTaps<3, 3, kWhole>(taps, dy, lines, channel, s, target);
        } else {
          AddTaps<1, kMostTaps, kWhole>(taps, dy, lines, channel, s, target);
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

  // Calls AddProducts with `taps` taps, at most kMost.
  template <int kRows, int kMost, bool kWhole>
  HWY_INLINE void AddTaps(int taps, const float* dy, const float* const* lines, int channel, int first_tap,
                          float* target) const {
    if constexpr (kMost > 1) {
      if (taps < kMost) return AddTaps<kRows, kMost - 1, kWhole>(taps, dy, lines, channel, first_tap, target);
    }
    AddProducts<kRows, kMost, kWhole>(dy, lines, channel, first_tap, target);
  }

  // sums += products of one row of dy and kRows rows of x, for kTaps neighbouring taps. More sums hide latency.
  template <int kRows, int kTaps, bool kWhole>
  HWY_NOINLINE void AddProducts(const float* dy, const float* const* lines, int channel, int first_tap,
                                float* target) const {
    const DepthwiseAxis& width = gradient_.width;
    const int channels = gradient_.groups - channel;
    const std::ptrdiff_t tap_step = width.dilation * gradient_.x_column;
    const std::ptrdiff_t row_pitch = std::ptrdiff_t{1} * taps_w_ * kLanes;
    Floats sums[kRows][kTaps];
    const float* line[kRows];
    POLYCONV_UNROLL
    for (int r = 0; r < kRows; r++) {
      line[r] = lines[r];
      POLYCONV_UNROLL
      for (int q = 0; q < kTaps; q++) sums[r][q] = Load(target + r * row_pitch + q * kLanes);
    }
    for (int j = 0; j < width.target; j++) {
      const Floats gradient = LoadChannels<kWhole>(dy + j * gradient_.y_column, channels);
      const int position = j * width.stride + first_tap * width.dilation;
      const bool inside = AreInside(width, position, position + (kTaps - 1) * width.dilation);
      const std::ptrdiff_t first = (position - width.before) * gradient_.x_column;
      POLYCONV_UNROLL
      for (int q = 0; q < kTaps; q++) {
        std::ptrdiff_t at = first + q * tap_step;
        if (HWY_UNLIKELY(!inside)) {
          const int column = columns_[position + q * width.dilation];
          if (column < 0) continue;
          at = column * gradient_.x_column;
        }
        POLYCONV_UNROLL
        for (int r = 0; r < kRows; r++) {
          sums[r][q] = hn::MulAdd(gradient, LoadChannels<kWhole>(line[r] + at, channels), sums[r][q]);
        }
      }
    }
    POLYCONV_UNROLL
    for (int r = 0; r < kRows; r++) {
      POLYCONV_UNROLL
      for (int q = 0; q < kTaps; q++) Store(target + r * row_pitch + q * kLanes, sums[r][q]);
    }
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
  static constexpr int kTerms = 512;  // products that a lane sums in float, if a row is not longer

  const DepthwiseWeightGradient& gradient_;
  const std::vector<int> rows_, columns_;  // of the source, by position
  const int taps_h_, taps_w_;
  int block_channels_, blocks_;
  int band_rows_, bands_;
  std::int64_t pieces_;  // bands of all images
  int parts_;            // parts of these pieces, summed separately
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
