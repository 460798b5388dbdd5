// Depthwise correlation with many taps, of unit stride, by F(4, 4) along both axes, with channels in the lanes.
//
// The taps are cut into segments of 4 x 4, the outputs into tiles of 4 x 4. The input tile of a segment is that of the
// first segment, moved by whole tiles, so each tile is transformed once. At each of the 49 points, the segments are then
// the taps of a small correlation over tiles: 3.06 products per output and segment instead of 16.
//
// A thread walks down one image of one vector of channels. A ring has the transformed rows of tiles that a band of rows
// of output tiles reads. Tiles without a pixel are zeros: rows of them are skipped.
#if defined(POLYCONV_CPU_DEPTHWISE_SEGMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_DEPTHWISE_SEGMENTS_INL_H_
#undef POLYCONV_CPU_DEPTHWISE_SEGMENTS_INL_H_
#else
#define POLYCONV_CPU_DEPTHWISE_SEGMENTS_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "common/epilogue-inl.h"
#include "common/memory.h"
#include "common/transforms-inl.h"
#include "depthwise/segments.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

class DepthwiseSegments {
  using Algorithm = CookToom<4, 4>;
  static constexpr int kTile = Algorithm::kM;  // outputs, and taps of a segment
  static constexpr int kPoints = Algorithm::kPoints;
  static constexpr int kPoints2d = kPoints * kPoints;
  static constexpr int kBandRows = 4;  // of tiles
  static constexpr int kLines = 8;     // rows of pixels that are kept; a tile reads kPoints
  static constexpr int kLongestSum = 64;

  // Register tile: rows and columns of output tiles. The products of kTaps neighbouring segments are added together.
#if POLYCONV_REGISTERS == 32
  static constexpr int kTileRows = 2;
#else
  static constexpr int kTileRows = 1;
#endif
  static constexpr int kTaps = 2, kWide = 7, kNarrow = 4;  // of columns

  // Tiles along an axis.
  struct Tiles {
    int outputs;      // tiles of outputs
    int narrow;       // register tiles of kNarrow columns, before those of kWide
    int padded;       // outputs of whole register tiles
    int segments;     // of the taps
    int first, last;  // of the input tiles, those that have pixels
    int before, source, target;

    explicit Tiles(const DepthwiseAxis& axis)
        : outputs(CeilDiv(axis.target, kTile)),
          narrow(NarrowFor(outputs)),
          padded(narrow * kNarrow + RoundUp(std::max(0, outputs - narrow * kNarrow), kWide)),
          segments(CeilDiv(axis.phases[0].taps, kTile)),
          before(axis.before),
          source(axis.source),
          target(axis.target) {
      first = std::max(0, CeilDiv(before - kPoints + 1, kTile));
      last = std::min(inputs(), before + source <= 0 ? 0 : CeilDiv(before + source, kTile));
      first = std::min(first, last);
    }
    // As few columns too many as possible.
    static int NarrowFor(int outputs) {
      constexpr int kByRemainder[kWide] = {0, 2, 1, 1, 1, 3, 0};
      return std::min(kByRemainder[outputs % kWide], CeilDiv(outputs, kNarrow));
    }
    int inputs() const { return padded + segments - 1; }
    // The pixels of the tiles, from the first one on.
    int pixels() const { return (last - first) * kTile + kPoints - kTile; }
    // The first and the last pixel of the source that the tiles have, and the place of the first one among their pixels.
    int begin() const { return std::max(0, first * kTile - before); }
    int end() const { return std::min(source, first * kTile + pixels() - before); }
    int place() const { return begin() + before - first * kTile; }
  };

 public:
  HWY_NOINLINE explicit DepthwiseSegments(const DepthwiseCorrelation& conv)
      : conv_(conv),
        h_(conv.height),
        w_(conv.width),
        vectors_(CeilDiv(conv.groups, kLanes)),
        weights_size_(std::size_t{1} * kPoints2d * h_.segments * w_.segments * kLanes),
        ring_rows_(kBandRows + h_.segments - 1),
        // Odd numbers of cache lines, against conflicts in cache sets.
        row_size_(static_cast<std::size_t>(kPoints2d * w_.inputs() | 1) * kLanes),
        line_size_(static_cast<std::size_t>((w_.pixels() + kLanes) | 1) * kLanes),
        out_pitch_(RoundUp(w_.outputs * kTile, kLanes)) {
    const Epilogue<float>& epilogue = conv.epilogue;
    clamps_ = epilogue.activation == Activation::kRelu || epilogue.activation == Activation::kClamp;
    if (epilogue.activation == Activation::kClamp) low_ = epilogue.a, high_ = epilogue.b;
  }

  // Size of all transformed weights [floats].
  std::size_t weights_size() const { return weights_size_ * vectors_; }

  // [vector of channels][point][segment down][segment across][lane]
  void TransformWeights(float* weights, const Runtime& runtime) const {
    const std::size_t taps = std::size_t{1} * conv_.height.phases[0].taps * conv_.width.phases[0].taps;
    runtime.parallel_for(vectors_, [&](std::int64_t begin, std::int64_t end) {
      float* packed = Scratch::OfThread().Get((taps + kLanes) * kLanes);
      for (std::int64_t v = begin; v < end; v++) {
        TransformVector(static_cast<int>(v) * kLanes, packed, weights + v * weights_size_);
      }
    });
  }

  void Run(const float* weights, const Runtime& runtime) const {
    if (weights == nullptr) {
      float* fresh = Scratch::Shared().Get(weights_size());
      TransformWeights(fresh, runtime);
      weights = fresh;
    }
    // Several parts of an image only if there are too few images and channels for the threads: each transforms some of
    // its neighbour's rows.
    const int bands = CeilDiv(h_.outputs, kBandRows);
    const std::int64_t planes = std::int64_t{1} * conv_.batch * vectors_;
    const std::int64_t parts = std::clamp<std::int64_t>(runtime.threads / planes, 1, bands);
    runtime.parallel_for(planes * parts, [&](std::int64_t begin, std::int64_t end) {
      Thread thread = MakeThread();
      for (std::int64_t task = begin; task < end; task++) {
        const std::int64_t plane = task / parts, part = task % parts;
        const int vector = static_cast<int>(plane % vectors_);
        RunBands(plane / vectors_, vector * kLanes, static_cast<int>(bands * part / parts),
                 static_cast<int>(bands * (part + 1) / parts), weights + vector * weights_size_, thread);
      }
    });
  }

 private:
  struct Thread {
    float* ring;                          // [row of tiles][point][tile][lane]
    float* lines;                         // [row of pixels][pixel][lane]
    float* zeros;                         // a line of zeros
    float* half;                          // pixels transformed along H: [point][pixel][lane]
    float* sums;                          // [row of tiles][point][tile][lane]
    float* pixels;                        // of outputs: [row][pixel][lane]
    float* block;                         // of outputs: [lane][pixel]
    std::vector<const float*> row, line;  // see Multiply
  };

  Thread MakeThread() const {
    Carver carver;
    const std::size_t ring = carver.Take(row_size_ * ring_rows_), lines = carver.Take(line_size_ * kLines);
    const std::size_t zeros_size = std::max<std::size_t>(line_size_, w_.inputs() * kLanes);
    const std::size_t zeros = carver.Take(zeros_size), half = carver.Take(line_size_ * kPoints);
    const std::size_t sums = carver.Take(std::size_t{1} * kBandRows * kPoints2d * w_.padded * kLanes);
    const std::size_t pixels = carver.Take(std::size_t{1} * kTile * out_pitch_ * kLanes);
    const std::size_t block = carver.Take(kLanes * kLanes);
    float* base = Scratch::OfThread().Get(carver.size());
    // Tiles and pixels that are never written stay zero.
    std::memset(base + ring, 0, row_size_ * ring_rows_ * sizeof(float));
    std::memset(base + lines, 0, line_size_ * kLines * sizeof(float));
    std::memset(base + zeros, 0, zeros_size * sizeof(float));
    const std::size_t rows = ring_rows_ + 1;
    return {base + ring,
            base + lines,
            base + zeros,
            base + half,
            base + sums,
            base + pixels,
            base + block,
            std::vector<const float*>(rows),
            std::vector<const float*>(rows)};
  }

  using DoubleTag = hn::ScalableTag<double>;
  using Doubles = hn::Vec<DoubleTag>;
  using NarrowTag = hn::Rebind<float, DoubleTag>;

  // The weights of a vector of channels, in double as those of all algorithms. `packed`: room for its taps.
  HWY_NOINLINE void TransformVector(int channel, float* packed, float* target) const {
    constexpr DoubleTag d;
    constexpr NarrowTag narrow;
    const AxisPhase &rows = conv_.height.phases[0], &columns = conv_.width.phases[0];
    const int channels = std::min(kLanes, conv_.groups - channel);
    for (int r = 0; r < rows.taps; r++) {
      ToLanes(conv_.w + channel * conv_.w_channel + r * conv_.w_row, conv_.w_channel, conv_.w_column, channels,
              columns.taps, packed + r * columns.taps * kLanes);
    }
    const std::size_t pitch = std::size_t{1} * h_.segments * w_.segments * kLanes;
    for (int segment = 0; segment < h_.segments * w_.segments; segment++, target += kLanes) {
      const int first_row = segment / w_.segments * kTile, first_column = segment % w_.segments * kTile;
      for (std::size_t lane = 0; lane < kLanes; lane += hn::MaxLanes(d)) {
        Doubles taps[kTile], half[kTile][kPoints], out[kPoints];
        for (int r = 0; r < kTile; r++) {
          for (int s = 0; s < kTile; s++) {
            const bool inside = first_row + r < rows.taps && first_column + s < columns.taps;
            const int row = rows.first_tap + (first_row + r) * rows.tap_step;
            const int column = columns.first_tap + (first_column + s) * columns.tap_step;
            const float* tap = packed + (row * columns.taps + column) * kLanes + lane;
            taps[s] = inside ? hn::PromoteTo(d, hn::LoadU(narrow, tap)) : hn::Zero(d);
          }
          TransformTaps(taps, half[r]);
        }
        for (int p = 0; p < kPoints; p++) {
          for (int r = 0; r < kTile; r++) taps[r] = half[r][p];
          TransformTaps(taps, out);
          for (int h = 0; h < kPoints; h++) {
            hn::StoreU(hn::DemoteTo(narrow, out[h]), narrow, target + (h * kPoints + p) * pitch + lane);
          }
        }
      }
    }
  }

  // out = G taps. The rows of +p and -p differ in the sign of the odd columns.
  static HWY_INLINE void TransformTaps(const Doubles* taps, Doubles* out) {
    constexpr DoubleTag d;
    constexpr auto& kFactors = Algorithm::kMatrices.weight.at;
    static_assert(kTile == 4 && kFactors[1][0] == kFactors[2][0] && kFactors[1][1] == -kFactors[2][1]);
    out[0] = hn::Mul(hn::Set(d, kFactors[0][3]), taps[3]);
    POLYCONV_UNROLL
    for (int p = 1; p < kPoints; p += 2) {
      const Doubles even =
          hn::MulAdd(hn::Set(d, kFactors[p][2]), taps[2], hn::Mul(hn::Set(d, kFactors[p][0]), taps[0]));
      const Doubles odd = hn::MulAdd(hn::Set(d, kFactors[p][3]), taps[3], hn::Mul(hn::Set(d, kFactors[p][1]), taps[1]));
      out[p] = hn::Add(even, odd);
      out[p + 1] = hn::Sub(even, odd);
    }
  }

  static HWY_NOINLINE void TransposeBlock(const float* from, std::ptrdiff_t from_pitch, float* to) {
    Floats v[kLanes];
    POLYCONV_UNROLL
    for (int i = 0; i < kLanes; i++) v[i] = Load(from + i * from_pitch);
    Transpose(v);
    POLYCONV_UNROLL
    for (int i = 0; i < kLanes; i++) StoreAligned(to + i * kLanes, v[i]);
  }

  // Some elements of up to kLanes channels, as [element][lane]. Absent channels are zeros, and so are up to kLanes
  // elements behind the last one.
  static HWY_NOINLINE void ToLanes(const float* from, std::ptrdiff_t channel_step, std::ptrdiff_t step, int channels,
                                   int count, float* to) {
    if (channel_step == 1) {
      for (int i = 0; i < count; i++, from += step, to += kLanes) {
        StoreAligned(to, channels == kLanes ? Load(from) : LoadBetween(from, 0, channels));
      }
    } else if (step == 1) {
      for (int i = 0; i < count; i += kLanes, to += kLanes * kLanes) {
        const int some = std::min(kLanes, count - i);
        if (channels == kLanes && some == kLanes) {
          TransposeBlock(from + i, channel_step, to);
          continue;
        }
        HWY_ALIGN float block[kLanes * kLanes] = {};
        for (int c = 0; c < channels; c++) {
          StoreAligned(block + c * kLanes, LoadBetween(from + c * channel_step + i, 0, some));
        }
        TransposeBlock(block, kLanes, to);
      }
    } else {
      for (int i = 0; i < count * kLanes; i++) {
        const int c = i % kLanes;
        to[i] = c < channels ? from[c * channel_step + i / kLanes * step] : 0.0f;
      }
    }
  }

  void RunBands(std::int64_t image, int channel, int first_band, int last_band, const float* weights,
                Thread& thread) const {
    const float* x = conv_.x + image * conv_.x_batch + channel * conv_.x_channel;
    float* y = conv_.y + image * conv_.y_batch + channel * conv_.y_channel;
    int row = std::max(h_.first, first_band * kBandRows);  // the next row of tiles to be transformed
    int position = row * kTile;                            // the next row of pixels to be packed
    for (int band = first_band; band < last_band; band++) {
      const int first = band * kBandRows, count = std::min(kBandRows, h_.outputs - first);
      for (; row < std::min(h_.last, first + count + h_.segments - 1); row++) {
        for (; position < row * kTile + kPoints; position++) Pack(x, channel, position, thread);
        TransformRow(row, thread);
      }
      Multiply(first, count, weights, thread);
      for (int i = 0; i < count; i++) {
        Invert(thread.sums + i * kPoints2d * w_.padded * kLanes, channel, thread.pixels);
        const int rows = std::min(kTile, h_.target - (first + i) * kTile);
        for (int r = 0; r < rows; r++) {
          Write(thread.pixels + r * out_pitch_ * kLanes, channel, y + ((first + i) * kTile + r) * conv_.y_row,
                thread.block);
        }
      }
    }
  }

  // Rows of pixels are kept as [pixel][lane].
  void Pack(const float* x, int channel, int position, const Thread& thread) const {
    const int source = position - h_.before;
    if (source < 0 || source >= h_.source) return;
    ToLanes(x + source * conv_.x_row + w_.begin() * conv_.x_column, conv_.x_channel, conv_.x_column,
            std::min(kLanes, conv_.groups - channel), w_.end() - w_.begin(),
            thread.lines + position % kLines * line_size_ + w_.place() * kLanes);
  }

  HWY_NOINLINE void TransformRow(int row, const Thread& thread) const {
    const float* lines[kPoints];
    for (int i = 0; i < kPoints; i++) {
      const int position = row * kTile + i, source = position - h_.before;
      const bool inside = source >= 0 && source < h_.source;
      lines[i] = inside ? thread.lines + position % kLines * line_size_ : thread.zeros;
    }
    TransformLines(lines, kLanes, w_.pixels(), thread.half, line_size_);
    const std::ptrdiff_t pitch = w_.inputs() * kLanes;
    float* target = thread.ring + row % ring_rows_ * row_size_ + w_.first * kLanes;
    for (int h = 0; h < kPoints; h++, target += kPoints * pitch) {
      for (int p = 0; p < kPoints; p++) lines[p] = thread.half + h * line_size_ + p * kLanes;
      TransformLines(lines, kTile * kLanes, w_.last - w_.first, target, pitch);
    }
  }

  // B^T of `count` neighbouring columns of seven lines, a `step` apart.
  static HWY_NOINLINE void TransformLines(const float* const* lines, int step, int count, float* target,
                                          std::ptrdiff_t pitch) {
    Floats in[kPoints], out[kPoints];
    for (int i = 0; i < count; i++) {
      POLYCONV_UNROLL
      for (int p = 0; p < kPoints; p++) in[p] = hn::Load(kFloats, lines[p] + i * step);
      TransformInput<Algorithm>(in, out);
      POLYCONV_UNROLL
      for (int p = 0; p < kPoints; p++) StoreAligned(target + p * pitch + i * kLanes, out[p]);
    }
  }

  // One register tile, at one point: what the segments in some rows and columns add to it.
  struct Block {
    const float* const* lines;  // of tiles, one for each row of segments, from the first tile on
    const float* weights;       // of the first row and column of segments
    int rows, columns;
    std::ptrdiff_t weights_pitch;  // of a row of segments
    float* sums;
    std::ptrdiff_t sums_pitch;  // of a row of tiles
    bool adds;                  // to the sums of earlier rows of segments
  };

  template <int kColumns, int kSegments>
  static HWY_INLINE void AddSegments(const float* const* lines, int column, const float* weights,
                                     Floats (&sums)[kTileRows][kColumns]) {
    Floats w[kSegments];
    POLYCONV_UNROLL
    for (int s = 0; s < kSegments; s++) w[s] = hn::Load(kFloats, weights + s * kLanes);
    POLYCONV_UNROLL
    for (int r = 0; r < kTileRows; r++) {
      const float* line = lines[r] + column * kLanes;
      POLYCONV_UNROLL
      for (int c = 0; c < kColumns + kSegments - 1; c++) {
        const Floats in = hn::Load(kFloats, line + c * kLanes);
        POLYCONV_UNROLL
        for (int s = 0; s < kSegments; s++) {
          if (c >= s && c - s < kColumns) sums[r][c - s] = hn::MulAdd(w[s], in, sums[r][c - s]);
        }
      }
    }
  }

  template <int kColumns>
  static HWY_NOINLINE void MultiplyBlock(const Block& b) {
    Floats sums[kTileRows][kColumns];
    POLYCONV_UNROLL
    for (int r = 0; r < kTileRows; r++) {
      POLYCONV_UNROLL
      for (int c = 0; c < kColumns; c++) sums[r][c] = hn::Zero(kFloats);
    }
    for (int i = 0; i < b.rows; i++) {
      const float* weights = b.weights + i * b.weights_pitch;
      int s = 0;
      for (; s + kTaps <= b.columns; s += kTaps) {
        AddSegments<kColumns, kTaps>(b.lines + i, s, weights + s * kLanes, sums);
      }
      for (; s < b.columns; s++) AddSegments<kColumns, 1>(b.lines + i, s, weights + s * kLanes, sums);
    }
    POLYCONV_UNROLL
    for (int r = 0; r < kTileRows; r++) {
      POLYCONV_UNROLL
      for (int c = 0; c < kColumns; c++) {
        float* target = b.sums + r * b.sums_pitch + c * kLanes;
        StoreAligned(target, b.adds ? hn::Add(sums[r][c], hn::Load(kFloats, target)) : sums[r][c]);
      }
    }
  }

  // The sums of `count` rows of output tiles, from number `first` on.
  HWY_NOINLINE void Multiply(int first, int count, const float* weights, Thread& thread) const {
    const int rows = RoundUp(count, kTileRows) + h_.segments - 1;
    for (int i = 0; i < rows; i++) {
      const bool inside = first + i >= h_.first && first + i < std::min(h_.last, first + count + h_.segments - 1);
      thread.row[i] = inside ? thread.ring + (first + i) % ring_rows_ * row_size_ : nullptr;
    }
    const int pieces_rows = std::max(1, kLongestSum / w_.segments);
    Block block{};
    block.weights_pitch = w_.segments * kLanes;
    block.sums_pitch = std::ptrdiff_t{1} * kPoints2d * w_.padded * kLanes;
    std::vector<const float*>& line = thread.line;
    for (int point = 0; point < kPoints2d; point++, weights += h_.segments * block.weights_pitch) {
      const std::ptrdiff_t offset = std::ptrdiff_t{1} * point * w_.inputs() * kLanes;
      for (int column = 0, columns = 0; column < w_.padded; column += columns) {
        columns = column < w_.narrow * kNarrow ? kNarrow : kWide;
        const int first_segment = std::max(0, w_.first - column - columns + 1);
        block.columns = std::max(0, std::min(w_.segments, w_.last - column) - first_segment);
        for (int i = 0; i < rows; i++) {
          const float* row = thread.row[i];
          line[i] = (row == nullptr ? thread.zeros : row + offset) + (column + first_segment) * kLanes;
        }
        for (int u = 0; u < count; u += kTileRows) {
          const int begin = std::max(0, h_.first - first - u - kTileRows + 1);
          const int end = std::max(begin, std::min(h_.segments, h_.last - first - u));
          block.sums = thread.sums + u * block.sums_pitch + (point * w_.padded + column) * kLanes;
          block.adds = false;
          int i = begin;
          do {
            block.rows = std::min(pieces_rows, end - i);
            block.lines = line.data() + u + i;
            block.weights = weights + i * block.weights_pitch + first_segment * kLanes;
            columns == kWide ? MultiplyBlock<kWide>(block) : MultiplyBlock<kNarrow>(block);
            block.adds = true;
            i += block.rows;
          } while (i < end);
        }
      }
    }
  }

  // The pixels of a row of tiles, with the bias: [row][pixel][lane].
  HWY_NOINLINE void Invert(const float* sums, int channel, float* pixels) const {
    HWY_ALIGN float bias[kLanes] = {};
    for (int i = 0; conv_.bias != nullptr && i < std::min(kLanes, conv_.groups - channel); i++) {
      bias[i] = conv_.bias[(channel + i) * conv_.bias_step];
    }
    const std::ptrdiff_t pitch = w_.padded * kLanes, row_pitch = std::ptrdiff_t{1} * out_pitch_ * kLanes;
    const Floats added = hn::Load(kFloats, bias), zero = hn::Zero(kFloats);
    HWY_ALIGN float half[kTile * kPoints * kLanes];
    for (int t = 0; t < w_.outputs; t++, sums += kLanes, pixels += kTile * kLanes) {
      for (int h = 0; h < kPoints; h++) {
        InvertLine(sums + h * kPoints * pitch, pitch, zero, half + h * kLanes, kPoints * kLanes);
      }
      for (int i = 0; i < kTile; i++) {
        InvertLine(half + i * kPoints * kLanes, kLanes, added, pixels + i * kLanes, row_pitch);
      }
    }
  }

  static HWY_NOINLINE void InvertLine(const float* sums, std::ptrdiff_t pitch, Floats added, float* target,
                                      std::ptrdiff_t target_pitch) {
    Floats in[kPoints], out[kTile];
    POLYCONV_UNROLL
    for (int p = 0; p < kPoints; p++) in[p] = hn::Load(kFloats, sums + p * pitch);
    TransformOutput<Algorithm>(in, out);
    POLYCONV_UNROLL
    for (int i = 0; i < kTile; i++) StoreAligned(target + i * target_pitch, hn::Add(out[i], added));
  }

  // Stores a row of pixels with the epilogue.
  void Write(const float* pixels, int channel, float* y, float* block) const {
    const int channels = std::min(kLanes, conv_.groups - channel);
    if (conv_.y_channel == 1) return WriteRuns(pixels, kLanes, w_.target, y, conv_.y_column, channels);
    for (int i = 0; i < w_.target; i += kLanes) {
      TransposeBlock(pixels + i * kLanes, kLanes, block);
      WriteRuns(block, kLanes, channels, y + i, conv_.y_channel, std::min(kLanes, w_.target - i));
    }
  }

  HWY_NOINLINE void WriteRuns(const float* source, int source_pitch, int runs, float* y, std::ptrdiff_t y_pitch,
                              int count) const {
    for (int run = 0; run < runs; run++, source += source_pitch, y += y_pitch) {
      int i = 0;
      for (; i + kLanes <= count; i += kLanes) {
        Floats v = Load(source + i);
        if (conv_.epilogue.residual != nullptr) v = hn::Add(v, Load(conv_.epilogue.residual + (y - conv_.y) + i));
        Store(y + i, Activated(v));
      }
      if (i == count) continue;
      Floats v = Load(source + i);
      if (conv_.epilogue.residual != nullptr) {
        v = hn::Add(v, LoadBetween(conv_.epilogue.residual + (y - conv_.y) + i, 0, count - i));
      }
      StoreBetween(y + i, Activated(v), 0, count - i);
    }
  }

  HWY_INLINE Floats Activated(Floats v) const {
    if (conv_.epilogue.activation == Activation::kNone) return v;
    return clamps_ ? Clamp(v, Broadcast(low_), Broadcast(high_)) : ActivateAny(conv_.epilogue, v);
  }

  const DepthwiseCorrelation& conv_;
  const Tiles h_, w_;
  const int vectors_;
  const std::size_t weights_size_;  // of a vector of channels
  const int ring_rows_;
  const std::size_t row_size_, line_size_;  // of the ring and of a line of pixels [floats]
  const int out_pitch_;                     // of a row of outputs [pixels]
  bool clamps_;
  float low_ = 0, high_ = std::numeric_limits<float>::infinity();
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
