// Convolutions on channels_last tensors as a matrix product: rows are output pixels, columns are output channels.
//
// The terms of a sum are [tap row][tap column][input channel]. Weights are packed in panels of up to kMostVectors
// vectors of output channels: [panel][term][vector][lane]. A register tile is up to kTileRows[vectors] pixels x the
// vectors of a panel. Terms that are contiguous in the input form a run: the channels of a tap or, if they are few, of
// a row of taps in a copy with borders. A pixel has one address per run, so strides, borders and slices need no other
// copies; a joined input is copied by blocks, and one in half precision by tiles. Terms are summed in blocks whose length
// depends on their number alone: same bits for every number of threads, pixels and output channels.
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
#include <limits>
#include <utility>

#include "common/caches.h"
#include "common/convolution.h"
#include "common/epilogue-inl.h"
#include "common/integers.h"
#include "common/memory.h"
#include "common/rounding-inl.h"
#include "common/scheme_kernels.h"
#include "common/simd-inl.h"
#include "common/stages.h"
#include "common/weight_reader-inl.h"
#include "pointwise/input-inl.h"
#include "pointwise/pointwise.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Pixels of a register tile by its vectors of output channels. All sums, the weights of one term and a factor are in
// registers, and so are the addresses of all pixels.
#if HWY_TARGET == HWY_NEON  // a vector of factors per pixel
inline constexpr int kTileRows[] = {0, 14, 9, 7, 5};
#elif HWY_TARGET <= HWY_AVX3
inline constexpr int kTileRows[] = {0, 11, 11, 9, 6};
#else
inline constexpr int kTileRows[] = {0, 10, 6, 4};
#endif
inline constexpr int kMostVectors = static_cast<int>(std::size(kTileRows)) - 1;

inline constexpr int kAhead = 512;  // prefetch distance of weights into L1 [floats]

// Most terms that are summed at a time: their weights stay in L2, and mostly in L1.
inline constexpr int kMostTerms = 512;

// Most pixels of a block, most addresses, and pixels of a block if all weights stay in L1: its outputs are then written
// row by row.
inline constexpr int kMostRows = 1024;
inline constexpr int kMostAddresses = 16 * kMostRows;
inline constexpr int kFewRows = 72;
inline constexpr std::size_t kWeightsInL1 = 24 << 10;

// Products that take one thread no longer than to wake another one.
inline constexpr double kFewProducts = 1 << 18;

inline int TermsAtATime(int terms) {
  return RoundUp(CeilDiv(terms, CeilDiv(terms, kMostTerms)), 2);
}

// Cut of the output channels into panels of nearly equal width.
struct Panels {
  int terms, outputs, vectors, count;

  explicit Panels(const ConvolutionShape& conv)
      : terms(conv.in_channels * conv.taps_h * conv.taps_w),
        outputs(conv.out_channels),
        vectors(CeilDiv(conv.out_channels, kLanes)),
        count(std::max(CeilDiv(vectors, kMostVectors), vectors / (kMostVectors - 1))) {}

  std::size_t size() const { return static_cast<std::size_t>(vectors) * kLanes * terms; }
  int First(int panel) const { return static_cast<int>(std::int64_t{vectors} * panel / count); }
};

// Operands of a register tile. It ends with the epilogue if that is short enough to be repeated for every vector: at
// most a residual and a clamp, each behind a branch, because an instance of the kernel for each took 110 KB of a wheel.
struct TileProducts {
  const float* const* x;  // address of each pixel in the first run
  std::ptrdiff_t pitch;   // addresses between runs
  int skipped, length;    // terms of the first run that were summed before; terms of a run
  int terms;              // that are summed
  float* const* y;        // address of each pixel
  int column;             // first output channel
  int lanes;              // output channels of the last vector
  bool first, last;       // whether these are the first or last terms
  bool finishes;          // whether the outputs are stored after the last terms, or the sums for FinishTile
  bool clamps;            // to [low, high]
  float low, high;
  const float* weights;   // [term][vector][lane]
  const float* ahead;     // the next tile's input: one cache line is prefetched per term
  const float* later;     // the next weights, of which each tile prefetches its share
  int pace;               // floats of them per term
  float* sums;            // of earlier terms, and for FinishTile: [pixel][vector][lane]
  const float* bias;      // null: none
  const float* residual;  // null: none
  const float* output;    // address in y of the residual
};

template <int kRows, int kVectors>
HWY_NOINLINE void SumTile(const TileProducts& op) {
  constexpr int kStep = kVectors * kLanes;
  Floats sum[kRows][kVectors];
  POLYCONV_UNROLL
  for (int r = 0; r < kRows; r++) {
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors; v++) sum[r][v] = hn::Zero(kFloats);
  }
  const bool finishes = op.last && op.finishes;
  if (finishes && op.residual != nullptr) {
    // By the end of the tile, tiles of other panels have moved it out of the caches, and the sums would wait for it.
    POLYCONV_UNROLL
    for (int r = 0; r < kRows; r++) {
      const float* residual = op.residual + (op.y[r] + op.column - op.output);
      POLYCONV_UNROLL
      for (int v = 0; v < kVectors; v++) hwy::Prefetch(residual + v * kLanes);
    }
  }
  const float* HWY_RESTRICT weights = op.weights;
  const float *ahead = op.ahead, *later = op.later;
  const std::ptrdiff_t pace = op.pace;
  const float* const* run = op.x;
  for (int begin = op.skipped, left = op.terms; left > 0; begin = 0, run += op.pitch) {
    const int end = std::min(begin + left, op.length);
    left -= end - begin;
    const float* x[kRows];
    POLYCONV_UNROLL
    for (int r = 0; r < kRows; r++) x[r] = run[r] + end;
    std::ptrdiff_t i = begin - end;
#if HWY_TARGET == HWY_NEON
    for (; i + kLanes <= 0; i += kLanes, later += kLanes * pace) {
      POLYCONV_UNROLL
      for (int r = 0; r < kRows * kLanes; r += kLine, ahead += kLine) hwy::Prefetch(ahead);
      hwy::Prefetch(later);
      hwy::Prefetch(later + 2 * pace);
      Floats factors[kRows];
      POLYCONV_UNROLL
      for (int r = 0; r < kRows; r++) factors[r] = Load(x[r] + i);
      AddTerms(factors, weights, sum);
      POLYCONV_UNROLL
      for (int v = 0; v < kVectors; v++, weights += kLine) hwy::Prefetch(weights + kAhead);
    }
#endif
    for (; i < 0; i++, weights += kStep, ahead += kLine, later += pace) {
      hwy::Prefetch(ahead);
      hwy::Prefetch(later);
      Floats w[kVectors];
      POLYCONV_UNROLL
      for (int v = 0; v < kVectors; v++) {
        w[v] = Load(weights + v * kLanes);
        if (v * kLanes % kLine == 0) hwy::Prefetch(weights + kAhead + v * kLanes);
      }
      POLYCONV_UNROLL
      for (int r = 0; r < kRows; r++) {
        const Floats factor = Broadcast(x[r][i]);
        POLYCONV_UNROLL
        for (int v = 0; v < kVectors; v++) sum[r][v] = hn::MulAdd(factor, w[v], sum[r][v]);
      }
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
  if (!finishes) {
    POLYCONV_UNROLL
    for (int r = 0; r < kRows; r++) {
      POLYCONV_UNROLL
      for (int v = 0; v < kVectors; v++) StoreAligned(op.sums + r * kStep + v * kLanes, sum[r][v]);
    }
    return;
  }
  constexpr int kEnd = (kVectors - 1) * kLanes;
  const bool whole = op.lanes == kLanes;
  if (op.residual != nullptr) {
    POLYCONV_UNROLL
    for (int r = 0; r < kRows; r++) {
      const float* residual = op.residual + (op.y[r] + op.column - op.output);
      POLYCONV_UNROLL
      for (int v = 0; v < kVectors - 1; v++) sum[r][v] = hn::Add(sum[r][v], Load(residual + v * kLanes));
      const Floats end = whole ? Load(residual + kEnd) : LoadBetween(residual + kEnd, 0, op.lanes);
      sum[r][kVectors - 1] = hn::Add(sum[r][kVectors - 1], end);
    }
  }
  if (op.clamps) {
    const Floats low = Broadcast(op.low), high = Broadcast(op.high);
    POLYCONV_UNROLL
    for (int r = 0; r < kRows; r++) {
      POLYCONV_UNROLL
      for (int v = 0; v < kVectors; v++) sum[r][v] = Clamp(sum[r][v], low, high);
    }
  }
  POLYCONV_UNROLL
  for (int r = 0; r < kRows; r++) {
    float* target = op.y[r] + op.column;
    POLYCONV_UNROLL
    for (int v = 0; v < kVectors - 1; v++) Store(target + v * kLanes, sum[r][v]);
    if (whole) {
      Store(target + kEnd, sum[r][kVectors - 1]);
    } else {
      StoreBetween(target + kEnd, sum[r][kVectors - 1], 0, op.lanes);
    }
  }
}

// Compiled for every height, so that the tiles of a block are of nearly equal height and none is padded.
template <int kVectors = kMostVectors>
inline auto FindTile(int rows, int vectors) {
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return FindTile<kVectors - 1>(rows, vectors);
  }
  static constexpr auto kTiles = []<std::size_t... kRows>(std::index_sequence<kRows...>) {
    return std::array{&SumTile<kRows + 1, kVectors>...};
  }(std::make_index_sequence<kTileRows[kVectors]>{});
  return kTiles[rows - 1];
}

// Adds the bias to sums in a buffer and applies the activation. There is room for a vector behind the last one.
inline HWY_NOINLINE void FinishSums(const Epilogue<float>& epilogue, float bias, float* sums, int count) {
  const bool relu = epilogue.activation == Activation::kRelu,
             clamps = relu || epilogue.activation == Activation::kClamp;
  const Floats low = Broadcast(relu ? 0.0f : epilogue.a);
  const Floats high = Broadcast(relu ? std::numeric_limits<float>::infinity() : epilogue.b);
  const Floats added = Broadcast(bias);
  for (int i = 0; i < count; i += kLanes) {
    const Floats sum = hn::Add(Load(sums + i), added);
    Store(sums + i, clamps ? Clamp(sum, low, high) : ActivateAny(epilogue, sum));
  }
}

// Rounds the sums of a register tile, activated, to the addresses of its pixels.
template <class T>
HWY_NOINLINE void RoundTile(const Epilogue<float>& epilogue, const TileProducts& op, int rows, int vectors) {
  const int step = vectors * kLanes, width = step - kLanes + op.lanes;
  if (epilogue.activation != Activation::kNone) FinishSums(epilogue, 0, op.sums, rows * step);
  for (int i = 0; i < rows; i++) {
    RoundTo(reinterpret_cast<T*>(op.y[i]) + op.column, op.sums + i * step, width);
  }
}

// `type`: of both tensors, whose addresses `conv` has. In half precision there is one tap and no residual. A tile's
// pixels are widened when its first panel needs them, and its sums are rounded while they are in L1.
class PointwiseProduct {
 public:
  PointwiseProduct(const Convolution& conv, const float* weights, const JoinedInput* joined = nullptr,
                   Element type = Element::kFloat)
      : conv_(conv),
        panels_(conv),
        runs_(conv, joined, type),
        weights_(weights),
        end_(weights + panels_.size()),
        rows_(static_cast<std::int64_t>(conv.batch) * conv.out_height * conv.out_width),
        terms_(TermsAtATime(panels_.terms)) {}

  void Run(const Runtime& runtime) const {
    const double products = static_cast<double>(rows_) * panels_.terms * panels_.outputs;
    const int threads = products < kFewProducts ? 1 : runtime.threads;
    if (threads == 1) return Part(0, rows_, 0, panels_.count);
    const int by_rows = SplitOfRows(threads), by_panels = threads / by_rows;
    runtime.parallel_for(by_rows * by_panels, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t part = begin; part < end; part++) {
        const std::int64_t i = part / by_panels, j = part % by_panels;
        Part(rows_ * i / by_rows, rows_ * (i + 1) / by_rows, static_cast<int>(panels_.count * j / by_panels),
             static_cast<int>(panels_.count * (j + 1) / by_panels));
      }
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

  HWY_NOINLINE void Part(std::int64_t first_row, std::int64_t last_row, int first_panel, int last_panel) const {
    const StageTimer timer(Stage::kProducts);
    const std::int64_t most = MostRows(), image = static_cast<std::int64_t>(conv_.out_height) * conv_.out_width;
    Carver carver;
    const std::size_t sums = carver.Take(static_cast<std::size_t>(most) * kMostVectors * kLanes);
    const std::size_t addresses = carver.Take(most * (runs_.addresses() + 1) * sizeof(float*) / sizeof(float));
    const std::size_t buffer = carver.Take(runs_.Buffer(static_cast<int>(most)));
    float* scratch = Scratch::OfThread().Get(carver.size());
    if (!runs_.copied() && !runs_.joined() && !runs_.widened()) std::fill_n(scratch + buffer, runs_.length(), 0.0f);
    const auto x = reinterpret_cast<const float**>(scratch + addresses);
    const auto y = const_cast<float**>(x + most * runs_.addresses());
    for (std::int64_t begin = first_row, end; begin < last_row; begin = end) {
      end = std::min(begin + most, last_row);
      if (runs_.copied()) end = std::min(end, (begin / image + 1) * image);
      const int rows = static_cast<int>(end - begin);
      runs_.List(begin, rows, scratch + buffer, x);
      ListOutputs(begin, rows, y);
      for (int panel = first_panel; panel < last_panel; panel++) {
        Multiply(x, y, rows, panel, scratch + sums, runs_.widened() && panel == first_panel);
      }
    }
  }

  // As many pixels as stay in L2. Of a line, if it is copied: so the copies stay in L1.
  std::int64_t MostRows() const {
    if (runs_.copied()) return std::clamp(conv_.out_width, kFewRows, kMostRows);
    const bool few = panels_.size() * sizeof(float) <= kWeightsInL1 || (runs_.widened() && panels_.count == 1);
    if (runs_.count() == 1 && few) return kFewRows;
    const std::int64_t each = static_cast<std::int64_t>(conv_.in_channels) * conv_.stride_h * conv_.stride_w;
    const std::int64_t inputs = std::min<std::int64_t>(panels_.terms, each) * (runs_.joined() ? 2 : 1);  // both copies
    const auto room = static_cast<std::int64_t>(L2Bytes() / 2 / (sizeof(float) * (inputs + panels_.outputs)));
    const std::int64_t most = std::min<std::int64_t>({room, kMostRows, kMostAddresses / runs_.count()});
    return std::max<std::int64_t>(most, 4 * kTileRows[kMostVectors]);
  }

  void ListOutputs(std::int64_t first, int count, float** y) const {
    ForLines(conv_, first, count, [&](std::int64_t image, int line, int column, int last, int i) {
      const std::ptrdiff_t size = runs_.widened() ? sizeof(Bfloat16) : sizeof(float);
      char* to = reinterpret_cast<char*>(conv_.y) + (image * conv_.y_batch + line * conv_.y_row) * size;
      for (; column < last; column++, i++) y[i] = reinterpret_cast<float*>(to + column * conv_.y_column * size);
    });
  }

  // Multiplies a block of pixels by a panel of weights. `widens`: it is the first one, and pixels are widened before.
  HWY_INLINE void Multiply(const float* const* x, float* const* y, int rows, int panel, float* sums,
                           bool widens) const {
    const int first = panels_.First(panel), vectors = panels_.First(panel + 1) - first, step = vectors * kLanes;
    const int tiles = CeilDiv(rows, kTileRows[vectors]);
    TileProducts op{};
    op.column = first * kLanes;
    op.lanes = std::min(panels_.outputs - (first + vectors - 1) * kLanes, kLanes);
    op.bias = conv_.bias;
    op.residual = conv_.epilogue.residual, op.output = conv_.y;
    const Activation activation = conv_.epilogue.activation;
    op.clamps = activation == Activation::kRelu || activation == Activation::kClamp;
    op.finishes = !runs_.widened() && (op.clamps || activation == Activation::kNone);
    op.low = activation == Activation::kClamp ? conv_.epilogue.a : 0.0f;
    op.high = activation == Activation::kClamp ? conv_.epilogue.b : std::numeric_limits<float>::infinity();
    op.pitch = rows, op.length = runs_.length();
    op.weights = weights_ + static_cast<std::size_t>(op.column) * panels_.terms;
    op.pace = std::min(kLine, CeilDiv(step, tiles));
    for (int term = 0; term < panels_.terms; term += terms_) {
      const float* const* run = x + static_cast<std::ptrdiff_t>(term / op.length) * rows;
      op.skipped = term % op.length, op.terms = std::min(terms_, panels_.terms - term);
      op.first = term == 0, op.last = term + op.terms == panels_.terms;
      const float* next = op.weights + op.terms * step;
      for (int tile = 0, begin = 0, end; tile < tiles; tile++, begin = end) {
        end = begin + rows / tiles + (tile < rows % tiles ? 1 : 0);  // of nearly equal height
        op.x = run + begin, op.y = y + begin, op.sums = sums + (terms_ < panels_.terms ? begin * step : 0);
        op.ahead = end < rows ? run[end] + op.skipped : op.weights;
        if (widens && op.first) runs_.Widen(x, rows, begin, end);
        const float* later = next + static_cast<std::ptrdiff_t>(tile) * op.terms * op.pace;
        op.later = later < end_ ? std::min(later, end_ - op.terms * op.pace) : op.weights;
        FindTile(end - begin, vectors)(op);
        if (!op.last || op.finishes) continue;
        if (runs_.widened()) {
          const auto round = runs_.type() == Element::kFloat16 ? &RoundTile<Float16> : &RoundTile<Bfloat16>;
          round(conv_.epilogue, op, end - begin, vectors);
        } else {
          FinishTile(op, end - begin, vectors);
        }
      }
      op.weights = next;
    }
  }

  // Stores outputs with an epilogue that is too long to be repeated for every vector of a register tile.
  HWY_NOINLINE void FinishTile(const TileProducts& op, int rows, int vectors) const {
    WithFinisher(conv_.epilogue, conv_.y, [&](const auto& finish) HWY_ATTR {
      const float* sum = op.sums;
      for (int i = 0; i < rows; i++) {
        for (int v = 0; v < vectors; v++, sum += kLanes) {
          float* target = op.y[i] + op.column + v * kLanes;
          const int lanes = v + 1 < vectors ? kLanes : op.lanes;
          const Floats finished = finish.Between(hn::Load(kFloats, sum), target, 0, lanes);
          if (lanes == kLanes) {
            Store(target, finished);
          } else {
            StoreBetween(target, finished, 0, lanes);
          }
        }
      }
    });
  }

  const Convolution& conv_;
  const Panels panels_;
  const InputRuns runs_;
  const float *weights_, *end_;
  const std::int64_t rows_;
  const int terms_;
};

// Zeros follow the weights, because a prefetch from a page that is not mapped takes long.
inline std::size_t PointwiseWeightsSize(const Convolution& conv) {
  return Panels(conv).size() + kAhead;
}

inline void PackPointwiseWeights(const Convolution& conv, float* packed, const Runtime& runtime) {
  const StageTimer timer(Stage::kWeights);
  const Panels panels(conv);
  std::fill_n(packed + panels.size(), kAhead, 0.0f);
  const WeightReader reader(conv, conv.w, {0, conv.taps_h, 1}, {0, conv.taps_w, 1}, conv.taps_w);
  runtime.parallel_for(panels.count, [&](std::int64_t begin, std::int64_t end) {
    for (int panel = static_cast<int>(begin); panel < end; panel++) {
      const int first = panels.First(panel), last = panels.First(panel + 1), step = (last - first) * kLanes;
      float* target = packed + static_cast<std::size_t>(first) * kLanes * panels.terms;
      for (int v = first; v < last; v++, target += kLanes) {
        reader.Read(v * kLanes, 0, conv.in_channels, [&](int channel, int tap, Floats w) {
          StoreAligned(target + (static_cast<std::size_t>(tap) * conv.in_channels + channel) * step, w);
        });
      }
    }
  });
}

inline void RunPointwise(const Convolution& conv, const Schedule&, const float* packed, const Runtime& runtime) {
  if (conv.batch == 0 || conv.out_height <= 0 || conv.out_width <= 0) return;
  PointwiseProduct(conv, packed).Run(runtime);
}

inline void RunJoinedPointwise(const Convolution& conv, const JoinedInput& input, const float* packed,
                               const Runtime& runtime) {
  if (conv.batch == 0 || conv.out_height <= 0 || conv.out_width <= 0) return;
  PointwiseProduct(conv, packed, &input).Run(runtime);
}

// x and y of `conv` are in half precision.
inline void RunHalfPointwise(const Convolution& conv, Element type, const float* packed, const Runtime& runtime) {
  PointwiseProduct(conv, packed, nullptr, type).Run(runtime);
}

inline constexpr SchemeKernels kPointwiseKernels = {&PointwiseWeightsSize, &PackPointwiseWeights,
                                                    [](const Convolution&) { return false; }, &RunPointwise,
                                                    [](int terms) { return TermsAtATime(terms); }};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
