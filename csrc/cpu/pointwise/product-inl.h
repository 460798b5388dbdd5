// 1x1 convolutions on channels_last tensors as a matrix product: rows are pixels, columns are output channels.
//
// Weights are packed in panels of up to kMostVectors vectors of output channels: [panel][input channel][vector][lane].
// A register tile is up to kTileRows[vectors] pixels x the vectors of a panel. The pixels of a tile have one address
// each, so strides and slices need no copies. Input channels are summed in blocks whose length depends on their number
// alone: same bits for every number of threads, pixels and output channels.
#if defined(POLYCONV_CPU_POINTWISE_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_POINTWISE_PRODUCT_INL_H_
#undef POLYCONV_CPU_POINTWISE_PRODUCT_INL_H_
#else
#define POLYCONV_CPU_POINTWISE_PRODUCT_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>

#include "common/caches.h"
#include "common/convolution.h"
#include "common/epilogue-inl.h"
#include "common/integers.h"
#include "common/memory.h"
#include "common/scheme_kernels.h"
#include "common/simd-inl.h"
#include "common/stages.h"
#include "common/weight_reader-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Pixels of a register tile by its vectors of output channels. All sums, the weights of one input channel and a factor
// are in registers, and so are the addresses of all pixels.
#if HWY_TARGET <= HWY_AVX3
inline constexpr int kTileRows[] = {0, 11, 11, 9, 6};
#else
inline constexpr int kTileRows[] = {0, 10, 6, 4};
#endif
inline constexpr int kMostVectors = static_cast<int>(std::size(kTileRows)) - 1;

inline constexpr int kLine = 16;  // floats of a cache line

// Most input channels that are summed at a time: their weights stay in L2, and mostly in L1.
inline constexpr int kMostTerms = 512;

// Most pixels of a block, and those of a block if all weights stay in L1: its outputs are then written row by row.
inline constexpr int kMostRows = 1024;
inline constexpr int kFewRows = 72;
inline constexpr std::size_t kWeightsInL1 = 24 << 10;

// Products that take one thread no longer than to wake another one.
inline constexpr double kFewProducts = 1 << 18;

inline int TermsAtATime(int channels) {
  return RoundUp(CeilDiv(channels, CeilDiv(channels, kMostTerms)), 2);
}

// Cut of the output channels into panels of nearly equal width.
struct Panels {
  int channels, outputs, vectors, count;

  explicit Panels(const ConvolutionShape& conv)
      : channels(conv.in_channels),
        outputs(conv.out_channels),
        vectors(CeilDiv(conv.out_channels, kLanes)),
        count(std::max(CeilDiv(vectors, kMostVectors), vectors / (kMostVectors - 1))) {}

  std::size_t size() const { return static_cast<std::size_t>(vectors) * kLanes * channels; }
  int First(int panel) const { return static_cast<int>(std::int64_t{vectors} * panel / count); }
};

// Operands of a register tile.
struct TileProducts {
  const float* const* x;  // address of each pixel in x and in y
  float* const* y;
  int channel, column;   // first input channel and output channel
  int channels;          // input channels that are summed
  int lanes;             // output channels of the last vector
  bool first, last;      // whether these are the first or last input channels
  const float* weights;  // [input channel][vector][lane]
  const float* ahead;    // what is needed next: one cache line is prefetched per input channel
  float* sums;           // of earlier input channels, and for FinishLater: [pixel][vector][lane]
  const float* bias;     // null: none
};

// Stores the first `lanes` of a finished vector.
template <class Finish>
HWY_INLINE void StoreEnd(const Finish& finish, Floats sum, float* target, int lanes) {
  if (lanes == kLanes) {
    Store(target, finish.Whole(sum, target));
  } else {
    StoreBetween(target, finish.Between(sum, target, 0, lanes), 0, lanes);
  }
}

// Whether an epilogue is short enough to be repeated for every vector of a register tile.
template <class Finish>
inline constexpr bool kIsShort = false;
template <Activate kActivate, bool kResidual>
inline constexpr bool kIsShort<Finisher<kActivate, kResidual>> =
    kActivate == Activate::kNone || kActivate == Activate::kClamp;

// Stands for an epilogue that is applied to the stored sums, because it is too long to be repeated for every vector.
struct FinishLater {};

template <int kRows, int kVectors, class Finish>
HWY_NOINLINE void SumTile(const TileProducts& op, const Finish& finish) {
  constexpr int kStep = kVectors * kLanes;
  constexpr int kAhead = 2048 / sizeof(float) / kStep * kStep;  // prefetch distance into L1
  Floats sum[kRows][kVectors];
  const float* x[kRows];
  std::ptrdiff_t c = -static_cast<std::ptrdiff_t>(op.channels);
  POLYCONV_UNROLL
  for (int r = 0; r < kRows; r++) {
    x[r] = op.x[r] + op.channel - c;
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors; v++) sum[r][v] = hn::Zero(kFloats);
  }
  const float* HWY_RESTRICT weights = op.weights;
  const float* ahead = op.ahead;
  for (; c < 0; c++, weights += kStep, ahead += kLine) {
    hwy::Prefetch(ahead);
    Floats w[kVectors];
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors; v++) {
      w[v] = Load(weights + v * kLanes);
      if (v * kLanes % kLine == 0) hwy::Prefetch(weights + kAhead + v * kLanes);
    }
    POLYCONV_UNROLL
    for (int r = 0; r < kRows; r++) {
      const Floats factor = Broadcast(x[r][c]);
      POLYCONV_UNROLL
      for (int v = 0; v < kVectors; v++) sum[r][v] = hn::MulAdd(factor, w[v], sum[r][v]);
    }
  }
  if (!op.first) {
    POLYCONV_UNROLL
    for (int r = 0; r < kRows; r++) {
      POLYCONV_UNROLL
      for (int v = 0; v < kVectors; v++) {
        sum[r][v] = hn::Add(sum[r][v], hn::Load(kFloats, op.sums + r * kStep + v * kLanes));
      }
    }
  }
  if (op.last && op.bias != nullptr) {
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors; v++) {
      const float* from = op.bias + op.column + v * kLanes;
      const Floats bias = v + 1 < kVectors ? Load(from) : LoadBetween(from, 0, op.lanes);
      POLYCONV_UNROLL
      for (int r = 0; r < kRows; r++) sum[r][v] = hn::Add(sum[r][v], bias);
    }
  }
  if constexpr (!std::is_same_v<Finish, FinishLater>) {
    if (op.last) {
      POLYCONV_UNROLL
      for (int r = 0; r < kRows; r++) {
        float* target = op.y[r] + op.column;
        POLYCONV_UNROLL
        for (int v = 0; v < kVectors - 1; v++, target += kLanes) Store(target, finish.Whole(sum[r][v], target));
        StoreEnd(finish, sum[r][kVectors - 1], target, op.lanes);
      }
      return;
    }
  }
  POLYCONV_UNROLL
  for (int r = 0; r < kRows; r++) {
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors; v++) StoreAligned(op.sums + r * kStep + v * kLanes, sum[r][v]);
  }
}

// Compiled for every height, so that the tiles of a block are of nearly equal height and none is padded.
template <class Finish, int kVectors = kMostVectors>
inline auto FindTile(int rows, int vectors) {
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return FindTile<Finish, kVectors - 1>(rows, vectors);
  }
  static constexpr auto kTiles = []<std::size_t... kRows>(std::index_sequence<kRows...>) {
    return std::array{&SumTile<kRows + 1, kVectors, Finish>...};
  }(std::make_index_sequence<kTileRows[kVectors]>{});
  return kTiles[rows - 1];
}

class PointwiseProduct {
 public:
  PointwiseProduct(const Convolution& conv, const float* weights)
      : conv_(conv),
        panels_(conv),
        weights_(weights),
        end_(weights + panels_.size()),
        rows_(static_cast<std::int64_t>(conv.batch) * conv.out_height * conv.out_width),
        terms_(TermsAtATime(conv.in_channels)) {}

  void Run(const Runtime& runtime) const {
    WithFinisher(conv_.epilogue, conv_.y, [&](const auto& finish) HWY_ATTR {
      const double products = static_cast<double>(rows_) * panels_.channels * panels_.outputs;
      const int threads = products < kFewProducts ? 1 : runtime.threads;
      if (threads == 1) return Part(finish, 0, rows_, 0, panels_.count);
      const int by_rows = SplitOfRows(threads), by_panels = threads / by_rows;
      runtime.parallel_for(by_rows * by_panels, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t part = begin; part < end; part++) {
          const std::int64_t i = part / by_panels, j = part % by_panels;
          Part(finish, rows_ * i / by_rows, rows_ * (i + 1) / by_rows, static_cast<int>(panels_.count * j / by_panels),
               static_cast<int>(panels_.count * (j + 1) / by_panels));
        }
      });
    });
  }

 private:
  // Number of parts that the pixels are cut into; the panels of weights are cut among the remaining threads. Reading all
  // weights costs a thread as much as computing some pixels.
  int SplitOfRows(int threads) const {
    constexpr double kReading = 24;
    int best = 1;
    double least = 1e300;
    for (int parts = 1; parts <= threads; parts++) {
      const double rows = static_cast<double>((rows_ + parts - 1) / parts);
      const double panels = CeilDiv(panels_.count, threads / parts);
      const double cost = panels * (rows + kReading);
      if (cost < least) least = cost, best = parts;
    }
    return best;
  }

  template <class Finish>
  HWY_NOINLINE void Part(const Finish& finish, std::int64_t first_row, std::int64_t last_row, int first_panel,
                         int last_panel) const {
    const StageTimer timer(Stage::kProducts);
    const float* x[kMostRows];
    float* y[kMostRows];
    float* sums = Scratch::OfThread().Get(std::size_t{kMostRows} * kMostVectors * kLanes);
    const std::int64_t most = MostRows();
    for (std::int64_t begin = first_row; begin < last_row; begin += most) {
      const int rows = static_cast<int>(std::min(most, last_row - begin));
      ListRows(begin, rows, x, y);
      for (int panel = first_panel; panel < last_panel; panel++) Multiply(finish, x, y, rows, panel, sums);
    }
  }

  // As many pixels as stay in L2.
  std::int64_t MostRows() const {
    if (panels_.size() * sizeof(float) <= kWeightsInL1) return kFewRows;
    const std::size_t room = L2Bytes() / 2 / (sizeof(float) * (panels_.channels + panels_.outputs));
    return std::clamp<std::int64_t>(static_cast<std::int64_t>(room), 4 * kTileRows[kMostVectors], kMostRows);
  }

  void ListRows(std::int64_t first, int count, const float** x, float** y) const {
    std::int64_t row = first / conv_.out_width;
    int column = static_cast<int>(first % conv_.out_width);
    for (int i = 0; i < count; row++, column = 0) {
      const std::int64_t image = row / conv_.out_height, line = row % conv_.out_height;
      const float* from = conv_.x + image * conv_.x_batch + line * conv_.stride_h * conv_.x_row;
      float* to = conv_.y + image * conv_.y_batch + line * conv_.y_row;
      for (; column < conv_.out_width && i < count; column++, i++) {
        x[i] = from + static_cast<std::int64_t>(column) * conv_.stride_w * conv_.x_column;
        y[i] = to + column * conv_.y_column;
      }
    }
  }

  // Multiplies a block of pixels by a panel of weights.
  template <class Finish>
  HWY_INLINE void Multiply(const Finish& finish, const float* const* x, float* const* y, int rows, int panel,
                           float* sums) const {
    using InTile = std::conditional_t<kIsShort<Finish>, Finish, FinishLater>;
    const int first = panels_.First(panel), vectors = panels_.First(panel + 1) - first, step = vectors * kLanes;
    const int tiles = CeilDiv(rows, kTileRows[vectors]);
    TileProducts op{};
    op.column = first * kLanes;
    op.lanes = std::min(panels_.outputs - (first + vectors - 1) * kLanes, kLanes);
    op.bias = conv_.bias;
    op.weights = weights_ + static_cast<std::size_t>(op.column) * panels_.channels;
    for (int channel = 0; channel < panels_.channels; channel += terms_) {
      op.channel = channel, op.channels = std::min(terms_, panels_.channels - channel);
      op.first = channel == 0, op.last = channel + op.channels == panels_.channels;
      const float* next = op.weights + op.channels * step;
      for (int tile = 0, begin = 0, end; tile < tiles; tile++, begin = end) {
        end = begin + rows / tiles + (tile < rows % tiles ? 1 : 0);  // of nearly equal height
        op.x = x + begin, op.y = y + begin, op.sums = sums + (terms_ < panels_.channels ? begin * step : 0);
        if (tile < vectors && next < end_) {
          op.ahead = next + tile * op.channels * kLine;
        } else {
          op.ahead = end < rows ? x[end] + channel : op.weights;
        }
        const auto sum_tile = FindTile<InTile>(end - begin, vectors);
        if constexpr (kIsShort<Finish>) {
          sum_tile(op, finish);
        } else {
          sum_tile(op, FinishLater());
          if (op.last) FinishTile(finish, op, end - begin, vectors);
        }
      }
      op.weights = next;
    }
  }

  template <class Finish>
  static HWY_INLINE void FinishTile(const Finish& finish, const TileProducts& op, int rows, int vectors) {
    const float* sum = op.sums;
    for (int i = 0; i < rows; i++) {
      for (int v = 0; v < vectors; v++, sum += kLanes) {
        StoreEnd(finish, hn::Load(kFloats, sum), op.y[i] + op.column + v * kLanes, v + 1 < vectors ? kLanes : op.lanes);
      }
    }
  }

  const Convolution& conv_;
  const Panels panels_;
  const float *weights_, *end_;
  const std::int64_t rows_;
  const int terms_;
};

inline std::size_t PointwiseWeightsSize(const Convolution& conv) {
  return Panels(conv).size();
}

inline void PackPointwiseWeights(const Convolution& conv, float* packed, const Runtime& runtime) {
  const StageTimer timer(Stage::kWeights);
  const Panels panels(conv);
  const WeightReader reader(conv, conv.w, {0, 1, 1}, {0, 1, 1}, 1);
  runtime.parallel_for(panels.count, [&](std::int64_t begin, std::int64_t end) {
    for (int panel = static_cast<int>(begin); panel < end; panel++) {
      const int first = panels.First(panel), last = panels.First(panel + 1);
      float* target = packed + static_cast<std::size_t>(first) * kLanes * panels.channels;
      for (int v = first; v < last; v++, target += kLanes) {
        reader.Read(v * kLanes, 0, panels.channels,
                    [&](int channel, int, Floats w) { StoreAligned(target + channel * (last - first) * kLanes, w); });
      }
    }
  });
}

inline void RunPointwise(const Convolution& conv, const Schedule&, const float* packed, const Runtime& runtime) {
  if (conv.batch == 0 || conv.out_height <= 0 || conv.out_width <= 0) return;
  PointwiseProduct(conv, packed).Run(runtime);
}

inline constexpr SchemeKernels kPointwiseKernels = {&PointwiseWeightsSize, &PackPointwiseWeights,
                                                    [](const Convolution&) { return false; }, &RunPointwise,
                                                    [](int terms) { return TermsAtATime(terms); }};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
