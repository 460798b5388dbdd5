// Depthwise convolution of images with contiguous channels (channels_last), for rows of 3, 5 and 7 taps.
//
// The common case of depthwise/pixels-inl.h, without its generality: one phase, a border of zeros, multiplier 1. A
// register tile is a vector of channels of a few neighbouring output pixels. Every pixel of an input row is loaded once
// per tile and multiplied by all its taps, whose weights stay in registers for the row.
#if defined(POLYCONV_CPU_DEPTHWISE_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_DEPTHWISE_TILES_INL_H_
#undef POLYCONV_CPU_DEPTHWISE_TILES_INL_H_
#else
#define POLYCONV_CPU_DEPTHWISE_TILES_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>

#include "common/epilogue-inl.h"
#include "common/integers.h"
#include "common/memory.h"
#include "common/simd-inl.h"
#include "common/tiny-inl.h"
#include "depthwise/depthwise.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

class DepthwiseTiles {
 public:
  static bool Takes(const DepthwiseCorrelation& conv) {
    if (conv.reads != 1 || conv.writes != 1 || conv.groups < kLanes || conv.x_channel != 1 || conv.y_channel != 1 ||
        conv.border != Border::kZeros || conv.height.phases.size() != 1 || conv.width.phases.size() != 1) {
      return false;
    }
    const int common = std::gcd(conv.width.stride, conv.width.dilation), taps = conv.width.phases[0].taps;
    return (taps == 3 || taps == 5 || taps == 7) && conv.width.stride / common <= 2 &&
           conv.width.dilation / common <= 2 && conv.width.target >= kFewPixels;
  }

  explicit DepthwiseTiles(const DepthwiseCorrelation& conv) : conv_(conv) {
    const AxisPhase &h = conv.height.phases[0], &v = conv.width.phases[0];
    const int width = v.count;
    common_ = std::gcd(conv.width.stride, conv.width.dilation);
    steps_.line = conv.height.dilation * conv.x_row, steps_.column = common_ * conv.x_column;
    vectors_ = CeilDiv(conv.groups, kLanes);
    // The number of pixels that leaves the least work, and then the largest.
    int least = std::numeric_limits<int>::max();
    for (const int pixels : {8, 7, kFewPixels}) {
      const int work = CeilDiv(width, pixels) * (pixels + 1);
      if (pixels <= width && work < least) least = work, pixels_ = pixels;
    }
    tiles_ = CeilDiv(width, pixels_);
    // A block of channels keeps its weights in L1.
    constexpr int kWeightBytes = 12 << 10;
    blocks_ = CeilDiv(vectors_, std::max(2, kWeightBytes / (4 * kLanes * h.taps * v.taps)));
    const bool shares = conv.height.stride == conv.height.dilation && conv.width.stride == conv.width.dilation;
    together_ = shares ? kMostRows : 1;
    const double output_bytes = 4.0 * conv.batch * conv.groups * conv.height.target * width;
    const bool aligned = reinterpret_cast<std::uintptr_t>(conv.y) % (kLanes * sizeof(float)) == 0 &&
                         (conv.y_batch | conv.y_row | conv.y_column | conv.groups) % kLanes == 0;
    stream_ = output_bytes > (8 << 20) && aligned;
    const Activation activation = conv.epilogue.activation;
    if (activation == Activation::kRelu) low_ = 0.0f;
    if (activation == Activation::kClamp) low_ = conv.epilogue.a, high_ = conv.epilogue.b;
    clamps_ = activation == Activation::kRelu || activation == Activation::kClamp;
    finishes_ = stream_ || conv.tiny.exponent > 0 || conv.epilogue.residual != nullptr ||
                (activation != Activation::kNone && !clamps_);
  }

  void Run(const Runtime& runtime) {
    PackWeights();
    const int taps = conv_.width.phases[0].taps;
    const TileTable& run = taps == 3 ? TilesFor<3>() : taps == 5 ? TilesFor<5>() : TilesFor<7>();
    const std::int64_t rows = conv_.height.phases[0].count;
    runtime.parallel_for(rows * blocks_ * conv_.batch, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t task = begin, last; task < end; task = last) {
        last = std::min(end, (task / rows + 1) * rows);
        RunBlock(run, task / rows / blocks_, static_cast<int>(task / rows % blocks_), static_cast<int>(task % rows),
                 static_cast<int>(task % rows + last - task));
      }
      hwy::FlushStream();
    });
  }

 private:
  static constexpr int kFewPixels = 4;
#if POLYCONV_REGISTERS == 32
  static constexpr int kMostRows = 2;
#else
  static constexpr int kMostRows = 1;  // two would not fit
#endif

  struct Span {
    int first, last;
  };

  // Distances in memory [floats]: between lines and columns of the input, and between taps.
  struct Steps {
    std::ptrdiff_t line, column, tap_row, tap_column;
  };

  // Which of `count` positions from `start` on, `step` apart, lie in [0, size).
  static Span Inside(int start, int step, int size, int count) {
    const int first = start >= 0 ? 0 : CeilDiv(-start, step);
    const int last = start >= size ? 0 : std::min(CeilDiv(size - start, step), count);
    return {std::min(first, last), last};
  }

  // Neighbouring output pixels, in one row or in two that share their input, of a block of channels.
  struct Tile {
    const float* x;        // position of the first tap, of the first channel; may lie outside of the image
    const float* weights;  // of the first tap
    const float* bias;
    float* y;
    Span lines, columns;  // rows and columns of the input that lie inside, counted from x
    int channels;
    int written;  // pixels that the tile before has written
  };
  using RunTile = void (DepthwiseTiles::*)(const Tile&) const;
  struct TileKernels {
    RunTile inside, border;
  };
  using TileTable = TileKernels[2];  // of one row, and of kMostRows

  // Weights and bias with contiguous channels are read in place.
  void PackWeights() {
    const AxisPhase &h = conv_.height.phases[0], &v = conv_.width.phases[0];
    const bool packs = conv_.w_channel != 1, packs_bias = conv_.bias == nullptr || conv_.bias_step != 1;
    const std::size_t size = packs ? std::size_t{1} * h.taps * v.taps * conv_.groups : 0;
    weights_ = conv_.w + h.first_tap * conv_.w_row + v.first_tap * conv_.w_column;
    steps_.tap_row = h.tap_step * conv_.w_row, steps_.tap_column = v.tap_step * conv_.w_column;
    bias_ = conv_.bias;
    if (!packs && !packs_bias) return;
    float* target = Scratch::Shared().Get(size + conv_.groups);
    if (packs_bias) {
      bias_ = target + size;
      for (int c = 0; c < conv_.groups; c++) {
        target[size + c] = conv_.bias == nullptr ? 0.0f : conv_.bias[c * conv_.bias_step];
      }
    }
    if (!packs) return;
    for (int c = 0; c < conv_.groups; c++) {
      float* tap = target + c;
      for (int r = 0; r < h.taps; r++) {
        const float* w = weights_ + c * conv_.w_channel + r * steps_.tap_row;
        for (int s = 0; s < v.taps; s++, tap += conv_.groups) *tap = w[s * steps_.tap_column];
      }
    }
    weights_ = target;
    steps_.tap_column = conv_.groups, steps_.tap_row = v.taps * steps_.tap_column;
  }

  // Rows [first_row, last_row) of a block of channels.
  void RunBlock(const TileTable& run, std::int64_t image, int block, int first_row, int last_row) const {
    const DepthwiseAxis &height = conv_.height, &width = conv_.width;
    const AxisPhase &h = height.phases[0], &v = width.phases[0];
    const int first_channel = vectors_ * block / blocks_ * kLanes;
    const int columns = ((pixels_ - 1) * width.stride + (v.taps - 1) * width.dilation) / common_ + 1;
    Tile tile;
    tile.channels = std::min(vectors_ * (block + 1) / blocks_ * kLanes, conv_.groups) - first_channel;
    tile.weights = weights_ + first_channel;
    tile.bias = bias_ + first_channel;
    for (int i = first_row, rows; i < last_row; i += rows) {
      rows = std::min(together_, last_row - i);
      const int top = height.StartOf(h) + i * height.stride - height.before;
      tile.lines = Inside(top, height.dilation, height.source, h.taps + rows - 1);
      for (int number = 0; number < tiles_; number++) {
        const int u = std::min(number * pixels_, v.count - pixels_);
        const int left = width.StartOf(v) + u * width.stride - width.before;
        tile.written = number * pixels_ - u;
        tile.columns = Inside(left, common_, width.source, columns);
        tile.x = conv_.x + image * conv_.x_batch + top * conv_.x_row + left * conv_.x_column + first_channel;
        tile.y = conv_.y + image * conv_.y_batch + i * conv_.y_row + u * conv_.y_column + first_channel;
        const bool inside = tile.columns.first == 0 && tile.columns.last == columns;
        (this->*(inside ? run[rows > 1].inside : run[rows > 1].border))(tile);
      }
    }
  }

  template <int kTaps>
  const TileTable& TilesFor() const {
    if (conv_.width.stride > common_) return TilesOf<kTaps, 2, 1>();
    return conv_.width.dilation > common_ ? TilesOf<kTaps, 1, 2>() : TilesOf<kTaps, 1, 1>();
  }

  template <int kTaps, int kStride, int kDilation>
  const TileTable& TilesOf() const {
    if (pixels_ == 8) return kTiles<kTaps, kStride, kDilation, 8>;
    return pixels_ == 7 ? kTiles<kTaps, kStride, kDilation, 7> : kTiles<kTaps, kStride, kDilation, kFewPixels>;
  }

  template <int kTaps, int kStride, int kDilation, int kRows, int kPixels, bool kInside>
  HWY_NOINLINE void Compute(const Tile& tile) const {
    // Copies, because the compiler reloads members after every store.
    const Steps steps = steps_;
    const Span columns = tile.columns;
    const std::ptrdiff_t y_row = conv_.y_row, y_column = conv_.y_column;
    const bool finishes = finishes_, clamps = clamps_;
    const Floats low = Broadcast(low_), high = Broadcast(high_);
    // Line t is tap row t of the first output row and tap row t - 1 of the second: some lines belong to one of them.
    const int taps_h = conv_.height.phases[0].taps;
    const bool only_first = kRows > 1 && tile.lines.first == 0 && tile.lines.last > 0;
    const bool only_last = kRows > 1 && tile.lines.first <= taps_h && tile.lines.last > taps_h;
    const int both = std::min(tile.lines.last, taps_h) - tile.lines.first - only_first;
    const float* x = tile.x + tile.lines.first * steps.line;
    const float* w = tile.weights + tile.lines.first * steps.tap_row;
    const float* bias = tile.bias;
    float* y = tile.y;
    for (int rest = tile.channels; rest > 0; rest -= kLanes, x += kLanes, w += kLanes, y += kLanes, bias += kLanes) {
      const int written = std::max(kLanes - rest, 0);
      x -= written, w -= written, y -= written, bias -= written;
      Floats sums[kRows][kPixels];
      const Floats start = Load(bias);
      POLYCONV_UNROLL
      for (int a = 0; a < kRows; a++) {
        POLYCONV_UNROLL
        for (int p = 0; p < kPixels; p++) sums[a][p] = start;
      }
      const float* line = x;
      const float* taps = w;
      if (only_first) {
        AddLine<kTaps, kStride, kDilation, 0, 0, kInside>(steps, columns, line, taps, sums);
        line += steps.line, taps += steps.tap_row;
      }
      for (int t = 0; t < both; t++, line += steps.line, taps += steps.tap_row) {
        AddLine<kTaps, kStride, kDilation, 0, kRows - 1, kInside>(steps, columns, line, taps, sums);
      }
      if (only_last) {
        AddLine<kTaps, kStride, kDilation, kRows - 1, kRows - 1, kInside>(steps, columns, line, taps, sums);
      }
      if (HWY_UNLIKELY(finishes)) {
        HWY_ALIGN float kept[kRows * kPixels * kLanes];
        POLYCONV_UNROLL
        for (int a = 0; a < kRows; a++) {
          POLYCONV_UNROLL
          for (int p = 0; p < kPixels; p++) StoreAligned(kept + (a * kPixels + p) * kLanes, sums[a][p]);
        }
        Finish(kept, kRows, kPixels, tile.written, y, written);
        continue;
      }
      if (clamps) {
        POLYCONV_UNROLL
        for (int a = 0; a < kRows; a++) {
          POLYCONV_UNROLL
          for (int p = 0; p < kPixels; p++) sums[a][p] = Clamp(sums[a][p], low, high);
        }
      }
      POLYCONV_UNROLL
      for (int a = 0; a < kRows; a++) {
        float* target = y + a * y_row;
        POLYCONV_UNROLL
        for (int p = 0; p < kPixels; p++, target += y_column) Store(target, sums[a][p]);
      }
    }
  }

  // One row of input for the output rows kFirst to kLast.
  template <int kTaps, int kStride, int kDilation, int kFirst, int kLast, bool kInside, int kRows, int kPixels>
  static HWY_INLINE void AddLine(const Steps& steps, const Span& columns, const float* line, const float* weights,
                                 Floats (&sums)[kRows][kPixels]) {
    constexpr int kColumns = (kPixels - 1) * kStride + (kTaps - 1) * kDilation + 1;
    Floats taps[kRows][kTaps];
    POLYCONV_UNROLL
    for (int a = kFirst; a <= kLast; a++) {
      POLYCONV_UNROLL
      for (int s = 0; s < kTaps; s++) taps[a][s] = Load(weights - a * steps.tap_row + s * steps.tap_column);
    }
    _Pragma("GCC unroll 32")
    for (int q = 0; q < kColumns; q++, line += steps.column) {
      if constexpr (!kInside) {
        if (q < columns.first || q >= columns.last) continue;
      }
      const Floats x = Load(line);
      POLYCONV_UNROLL
      for (int p = 0; p < kPixels; p++) {
        const int s = q - p * kStride;
        if (s < 0 || s % kDilation != 0 || s / kDilation >= kTaps) continue;
        POLYCONV_UNROLL
        for (int a = kFirst; a <= kLast; a++) sums[a][p] = hn::MulAdd(taps[a][s / kDilation], x, sums[a][p]);
      }
    }
  }

  // Writes the sums of a vector of channels, [row][pixel][lane], with the epilogue. What another vector or tile has
  // written is left out: the residual may be y itself.
  HWY_NOINLINE void Finish(float* sums, int rows, int pixels, int written_pixels, float* y, int written_lanes) const {
    WithFinisher(Finished(conv_, sums, rows * pixels * kLanes), conv_.y, [&](const auto& finish) HWY_ATTR {
      for (int row = 0; row < rows; row++) {
        for (int pixel = written_pixels; pixel < pixels; pixel++) {
          float* target = y + row * conv_.y_row + pixel * conv_.y_column;
          const Floats sum = hn::Load(kFloats, sums + (row * pixels + pixel) * kLanes);
          const Floats finished = finish.Between(sum, target, written_lanes, kLanes);
          if (written_lanes > 0) {
            StoreBetween(target, finished, written_lanes, kLanes);
          } else if (stream_) {
            hn::Stream(finished, kFloats, target);
          } else {
            Store(target, finished);
          }
        }
      }
    });
  }

  // Two rows at a time only for the usual geometry.
  template <int kStride, int kDilation>
  static constexpr int kTogether = kStride == 1 && kDilation == 1 ? kMostRows : 1;

  template <int kTaps, int kStride, int kDilation, int kPixels>
  static constexpr TileTable kTiles = {
      {&DepthwiseTiles::Compute<kTaps, kStride, kDilation, 1, kPixels, true>,
       &DepthwiseTiles::Compute<kTaps, kStride, kDilation, 1, kPixels, false>},
      {&DepthwiseTiles::Compute<kTaps, kStride, kDilation, kTogether<kStride, kDilation>, kPixels, true>,
       &DepthwiseTiles::Compute<kTaps, kStride, kDilation, kTogether<kStride, kDilation>, kPixels, false>}};

  const DepthwiseCorrelation& conv_;
  int common_;                       // divisor of stride and dilation along a row: the pixels between are not read
  int vectors_;                      // of channels; the last one overlaps the one before if they do not fill it
  int pixels_ = kFewPixels, tiles_;  // pixels per tile and tiles per row; the last tile overlaps likewise
  int blocks_;                       // of vectors
  int together_;                     // output rows per tile
  bool stream_;
  bool clamps_, finishes_;  // epilogues in registers, and by Finish
  float low_ = -std::numeric_limits<float>::infinity(), high_ = std::numeric_limits<float>::infinity();
  const float* weights_;
  const float* bias_;
  Steps steps_;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
