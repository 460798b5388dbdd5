// Depthwise correlation of small images: a whole plane at a time, its rows concatenated to one line.
//
// Rows of a small image are hardly longer than a vector, so a loop over them is all edges. Instead, a plane is packed
// with its border as one line, and outputs are computed along it as if it had no rows: output u, v is number u * pitch
// + v, and every tap is at a fixed distance from it. Numbers between the end of a row and the start of the next are not
// used. With a stride, each residue class of rows and columns has its own line.
#if defined(POLYCONV_CPU_DEPTHWISE_PLANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_DEPTHWISE_PLANES_INL_H_
#undef POLYCONV_CPU_DEPTHWISE_PLANES_INL_H_
#else
#define POLYCONV_CPU_DEPTHWISE_PLANES_INL_H_
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/integers.h"
#include "common/memory.h"
#include "common/row_writer-inl.h"
#include "common/simd-inl.h"
#include "common/tiny-inl.h"
#include "depthwise/depthwise.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

class DepthwisePlanes {
 public:
  // Whether this is faster than a loop over rows, which is better for many taps or long rows: here, every product loads
  // a vector. Measured with AVX-512, one thread: 3 x 3 taps up to 40 columns, 5 x 5 up to 28, 9 x 9 up to 14.
  static bool Takes(const DepthwiseCorrelation& conv) {
    const auto simple = [](const DepthwiseAxis& axis) {
      return axis.stride <= 2 && axis.phases.size() <= 2 && axis.before >= 0;
    };
    const bool dense = conv.x_column == 1 && conv.y_column == 1 && conv.y_row == conv.width.target;
    if (conv.reads != 1 || conv.writes != 1 || conv.border != Border::kZeros || !dense) return false;
    if (!simple(conv.height) || !simple(conv.width)) return false;
    if (std::int64_t{1} * PositionsOf(conv.height) * PositionsOf(conv.width) > kMostPositions) return false;
    std::int64_t columns = 0, taps_h = 0, taps_w = 0;
    for (const AxisPhase& h : conv.height.phases) taps_h = std::max<std::int64_t>(taps_h, h.taps);
    for (const AxisPhase& v : conv.width.phases) {
      columns = std::max<std::int64_t>(columns, v.count), taps_w = std::max<std::int64_t>(taps_w, v.taps);
    }
    return columns * columns * taps_h * taps_w <= 78 * kLanes * kLanes;
  }

  explicit DepthwisePlanes(const DepthwiseCorrelation& conv)
      : conv_(conv),
        pitch_(CeilDiv(PositionsOf(conv.width), conv.width.stride)),
        rows_(CeilDiv(PositionsOf(conv.height), conv.height.stride)),
        line_size_(RoundUp(pitch_ * rows_, kLanes) + kSlack),
        packed_size_(line_size_ * conv.height.stride * conv.width.stride),
        dense_size_(RoundUp(conv.height.target * conv.width.target, kLanes) + kSlack) {
    for (const AxisPhase& h : conv.height.phases) {
      for (const AxisPhase& v : conv.width.phases) AddPhase(h, v);
    }
    for (int i = 0; i < conv.height.source; i++) {
      packed_rows_.push_back(PairAt(conv.height.before + i, conv.width.before));
    }
    const int row_phases = static_cast<int>(conv.height.phases.size());
    const int column_phases = static_cast<int>(conv.width.phases.size());
    for (int i = 0; i < conv.height.target; i++) {
      const Phase* phase = &phases_[i % row_phases * column_phases];
      const int place = i / row_phases * pitch_;
      output_rows_.push_back({phase[0].offset + place, phase[column_phases - 1].offset + place});
    }
    planes_at_a_time_ = std::clamp(kFloatsAtATime / packed_size_, 1, kMostPlanes);
    const double bytes = 4.0 * conv.batch * conv.groups * conv.height.target * conv.width.target;
    stream_ = bytes > (8 << 20);
  }

  void Run(const Runtime& runtime) const {
    const std::int64_t planes = std::int64_t{1} * conv_.batch * conv_.groups;
    Carver carver;
    const std::size_t packed_at = carver.Take(static_cast<std::size_t>(packed_size_) * planes_at_a_time_);
    const std::size_t lines_at = carver.Take(static_cast<std::size_t>(outputs_size_) * planes_at_a_time_);
    const std::size_t dense_at = carver.Take(static_cast<std::size_t>(dense_size_) * planes_at_a_time_);
    std::atomic<std::int64_t> next{0};
    runtime.parallel_for(runtime.threads, [&](std::int64_t, std::int64_t) {
      float* base = Scratch::OfThread().Get(carver.size());
      // Positions that no pixel is written to stay zero: the border.
      TinyScale scale;
      std::memset(base + packed_at, 0, sizeof(float) * packed_size_ * planes_at_a_time_);
      for (std::int64_t first; (first = next.fetch_add(planes_at_a_time_)) < planes;) {
        const int count = static_cast<int>(std::min<std::int64_t>(planes_at_a_time_, planes - first));
        RunSome(first, count, base + packed_at, base + lines_at, base + dense_at, scale);
      }
      if (scale.SawOrdinary()) *conv_.tiny.ordinary = true;
      hwy::FlushStream();
    });
  }

 private:
  static constexpr int kMostPositions = 64 * 64;  // of a padded plane, which has to stay in L1
  static constexpr int kMostPlanes = 8;
  static constexpr int kFloatsAtATime = 4096;  // packed: half of a small L1
#if HWY_TARGET == HWY_NEON                     // short vectors: addresses and a weight are shared by as many floats
  static constexpr int kMostVectors = 16;      // of a register tile
#else
  static constexpr int kMostVectors = 8;  // of a register tile
#endif
  static constexpr int kSlack = (kMostVectors + 2) * kLanes;

  // Outputs of one residue class of rows and one of columns, and their taps.
  struct Phase {
    int first_tap, taps;  // in the lists of all phases
    int outputs;          // along the line
    int offset;           // of its line within the plane
  };

  // Offsets of the even and odd columns of a row; equal if they are not separate.
  struct RowPlaces {
    std::int32_t even, odd;
  };

  struct Plane {
    int image, group;
  };

  static int PositionsOf(const DepthwiseAxis& axis) { return std::max(axis.reach, axis.before + axis.source); }

  int OffsetOf(int row, int column) const {
    const int h = conv_.height.stride, w = conv_.width.stride;
    return (row % h * w + column % w) * line_size_ + row / h * pitch_ + column / w;
  }

  RowPlaces PairAt(int row, int column) const {
    return {OffsetOf(row, column), OffsetOf(row, column + conv_.width.stride - 1)};
  }

  void AddPhase(const AxisPhase& h, const AxisPhase& v) {
    Phase phase{static_cast<int>(places_.size()), h.taps * v.taps, 0, outputs_size_};
    if (h.count > 0 && v.count > 0) phase.outputs = (h.count - 1) * pitch_ + v.count;
    outputs_size_ += RoundUp(phase.outputs, kLanes) + kSlack;
    for (int r = 0; r < h.taps; r++) {
      for (int s = 0; s < v.taps; s++) {
        places_.push_back(OffsetOf(conv_.height.StartOf(h) + r * conv_.height.dilation,
                                   conv_.width.StartOf(v) + s * conv_.width.dilation));
        weights_.push_back((h.first_tap + r * h.tap_step) * conv_.w_row +
                           (v.first_tap + s * v.tap_step) * conv_.w_column);
      }
    }
    phases_.push_back(phase);
  }

  // Each step for all planes before the next step: loading what was just stored in another width would stall.
  void RunSome(std::int64_t first, int count, float* packed, float* lines, float* dense, TinyScale& scale) const {
    Plane planes[kMostPlanes] = {
        {static_cast<int>(first / conv_.groups), static_cast<int>(first % conv_.groups)},
    };
    for (int i = 1; i < count; i++) {
      const bool wraps = planes[i - 1].group + 1 == conv_.groups;
      planes[i] = wraps ? Plane{planes[i - 1].image + 1, 0} : Plane{planes[i - 1].image, planes[i - 1].group + 1};
    }
    for (int i = 0; i < count; i++) {
      const float* x = conv_.x + planes[i].image * conv_.x_batch + planes[i].group * conv_.x_channel;
      if (HWY_UNLIKELY(conv_.tiny.scales)) {
        Pack(x, packed + i * packed_size_, scale);
      } else {
        Pack(x, packed + i * packed_size_, NoScale());
      }
    }
    for (int i = 0; i < count; i++) {
      const int group = planes[i].group;
      const float* weights = conv_.w + group * conv_.w_channel;
      const float start = conv_.bias == nullptr ? 0.0f : conv_.bias[group * conv_.bias_step];
      for (const Phase& phase : phases_) {
        Compute(phase, packed + i * packed_size_, weights, start, lines + i * outputs_size_ + phase.offset);
      }
    }
    const int pixels = conv_.height.target * conv_.width.target;
    for (int i = 0; i < count; i++) Arrange(lines + i * outputs_size_, dense + i * dense_size_);
    WithFinisher(Finished(conv_, dense, (count - 1) * dense_size_ + pixels), conv_.y, [&](const auto& finish) HWY_ATTR {
      for (int i = 0; i < count; i++) {
        float* target = conv_.y + planes[i].image * conv_.y_batch + planes[i].group * conv_.y_channel;
        WriteRun(finish, target, dense + i * dense_size_, pixels, stream_);
      }
    });
  }

  // From top to bottom: zeros that a row's last vector writes past its end are border, or the next row overwrites them.
  template <class Scale>
  HWY_NOINLINE void Pack(const float* row, float* packed, Scale&& scale) const {
    const int width = conv_.width.source;
    for (const RowPlaces& places : packed_rows_) {
      float* even = packed + places.even;
      float* odd = packed + places.odd;
      if (conv_.width.stride == 1) {
        for (int j = 0; j < width; j += kLanes) Store(even + j, scale.Up(Columns(row, j)));
      } else {
        for (int j = 0; j < width; j += 2 * kLanes) {
          const Floats low = scale.Up(Columns(row, j)), high = scale.Up(Columns(row, j + kLanes));
          Store(even + j / 2, hn::ConcatEven(kFloats, high, low));
          Store(odd + j / 2, hn::ConcatOdd(kFloats, high, low));
        }
      }
      row += conv_.x_row;
    }
  }

  // One vector of a row, zeros behind its end.
  HWY_INLINE Floats Columns(const float* row, int column) const {
    const int rest = conv_.width.source - column;
    if (rest >= kLanes) return Load(row + column);
    return rest > 0 ? LoadBetween(row + column, 0, rest) : hn::Zero(kFloats);
  }

  HWY_INLINE void Compute(const Phase& phase, const float* packed, const float* weights, float start,
                          float* line) const {
    for (int vectors = CeilDiv(phase.outputs, kLanes), width; vectors > 0; vectors -= width) {
      width = vectors == kMostVectors + 1 ? (kMostVectors + 1) / 2 : std::min(vectors, kMostVectors);
      ComputeVectors(width, phase, packed, weights, start, line);
      packed += width * kLanes, line += width * kLanes;
    }
  }

  template <int kVectors = kMostVectors>
  HWY_INLINE void ComputeVectors(int vectors, const Phase& phase, const float* packed, const float* weights,
                                 float start, float* line) const {
    if constexpr (kVectors > 1) {
      if (vectors < kVectors) return ComputeVectors<kVectors - 1>(vectors, phase, packed, weights, start, line);
    }
    SumTaps<kVectors>(phase, packed, weights, start, line);
  }

  template <int kVectors>
  HWY_NOINLINE void SumTaps(const Phase& phase, const float* HWY_RESTRICT packed, const float* HWY_RESTRICT weights,
                            float start, float* HWY_RESTRICT line) const {
    const std::int32_t* places = places_.data() + phase.first_tap;
    const std::ptrdiff_t* taps = weights_.data() + phase.first_tap;
    Floats sums[kVectors];
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) sums[z] = Broadcast(start);
    for (int tap = 0; tap < phase.taps; tap++) {
      const Floats weight = Broadcast(weights[taps[tap]]);
      const float* source = packed + places[tap];
      POLYCONV_UNROLL
      for (int z = 0; z < kVectors; z++) sums[z] = hn::MulAdd(weight, Load(source + z * kLanes), sums[z]);
    }
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) StoreAligned(line + z * kLanes, sums[z]);
  }

  // Outputs in order: rows of all phases concatenated, without the unused numbers between them. What a vector writes
  // past the end of its row is overwritten by the next row.
  HWY_INLINE void Arrange(const float* lines, float* dense) const {
    const int width = conv_.width.target;
    for (const RowPlaces& places : output_rows_) {
      const float* even = lines + places.even;
      const float* odd = lines + places.odd;
      if (conv_.width.phases.size() == 1) {
        for (int j = 0; j < width; j += kLanes) Store(dense + j, Load(even + j));
      } else {
        for (int j = 0; j < width; j += 2 * kLanes) {
          const Floats streams[2] = {Load(even + j / 2), Load(odd + j / 2)};
          Interleave<2>(streams, dense + j);
        }
      }
      dense += width;
    }
  }

  const DepthwiseCorrelation& conv_;
  const int pitch_, rows_;  // of a line: floats from row to row, and number of rows
  const int line_size_;     // of one class of positions
  const int packed_size_;   // of a plane: all its lines
  const int dense_size_;    // of a plane's outputs in order
  int outputs_size_ = 0;    // of a plane's outputs along the lines of all phases
  int planes_at_a_time_;
  bool stream_;
  std::vector<Phase> phases_;            // [row phase][column phase]
  std::vector<RowPlaces> packed_rows_;   // of each row of the source, in its lines
  std::vector<RowPlaces> output_rows_;   // of each row of the output, in its lines
  std::vector<std::int32_t> places_;     // source offset of each tap, for output 0 of its phase
  std::vector<std::ptrdiff_t> weights_;  // weight offset of each tap
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
