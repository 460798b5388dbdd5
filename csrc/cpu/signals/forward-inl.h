// Depthwise correlation of signals, with outputs of one row in the lanes.
//
// A row of floats has an interior, whose taps are all inside the signal and are read in place, and two edges, which are
// packed as padded lines first. Half precision is widened into such lines: once, not once per tap. Sums are staged in
// L1, so that one loop applies the epilogue and stores whole cache lines. Where operands may be tiny, lines and weights are
// scaled, and the staged sums are scaled back.
#if defined(POLYCONV_CPU_SIGNALS_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_SIGNALS_FORWARD_INL_H_
#undef POLYCONV_CPU_SIGNALS_FORWARD_INL_H_
#else
#define POLYCONV_CPU_SIGNALS_FORWARD_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/epilogue-inl.h"
#include "common/float_control.h"
#include "common/memory.h"
#include "signals/lines-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Adds kTaps taps that are a whole vector apart: what one tap reads for an output vector, the next tap reads for the
// vector before, so each vector is loaded once for all of them.
template <int kVectors, int kTaps>
HWY_INLINE void AddTaps(const float* HWY_RESTRICT line, const float* HWY_RESTRICT weights, Floats (&sums)[kVectors]) {
  Floats w[kTaps];
  POLYCONV_UNROLL
  for (int m = 0; m < kTaps; m++) w[m] = Broadcast(weights[m * kLanes]);
  POLYCONV_UNROLL
  for (int j = 0; j < kVectors + kTaps - 1; j++) {
    const Floats x = Load(line + j * kLanes);
    POLYCONV_UNROLL
    for (int m = 0; m < kTaps; m++) {
      if (j - m >= 0 && j - m < kVectors) sums[j - m] = hn::MulAdd(w[m], x, sums[j - m]);
    }
  }
}

template <class T>
class SignalRows {
 public:
  explicit SignalRows(const SignalCorrelation& signal)
      : signal_(signal),
        in_place_(std::is_same_v<T, float> && signal.x_column == 1 && signal.stride == 1 && !signal.tiny),
        transposes_(!in_place_ && signal.x_channel == 1 && signal.multiplier == 1 && signal.groups >= kLanes / 2),
        chunk_(in_place_     ? 1 << 14
               : transposes_ ? 256
                             : 1024),
        shape_(signal.source, signal.x_channel, signal.x_column, signal.stride, signal.border,
               (std::min(chunk_, signal.target) - 1) * signal.stride + Halo()) {
    for (int q = 0; q < signal.taps; q++) offsets_.push_back(shape_.OffsetOf(q * signal.dilation));
    shares_ = signal.stride == 1 && signal.dilation == 1 && signal.taps > kLanes;
    stream_ = sizeof(T) * signal.batch * signal.channels() * double(signal.target) > (8 << 20);
  }

  void Run(const Runtime& runtime) const {
    const int chunks = CeilDiv(signal_.target, chunk_), channels = transposes_ ? kPackedChannels : 1;
    const int blocks = CeilDiv(signal_.channels(), channels);
    Carver carver;
    const std::size_t lines_at = carver.Take(shape_.size() * channels);
    const std::size_t weights_at = carver.Take(signal_.taps + kLanes);
    const std::size_t staged_at = carver.Take(kStaged + 2 * kTileVectors * kLanes);
    runtime.parallel_for(std::int64_t{1} * signal_.batch * chunks * blocks, [&](std::int64_t begin, std::int64_t end) {
      float* base = Scratch::OfThread().Get(carver.size());
      float *lines = base + lines_at, *weights = base + weights_at, *staged = base + staged_at;
      for (std::int64_t task = begin; task < end; task++) {
        const std::int64_t image = task / blocks / chunks;
        // Rows one after the other if they are contiguous; otherwise channels innermost, which share cache lines.
        const bool rows = signal_.x_column == 1;
        const int block = static_cast<int>(rows ? task / chunks % blocks : task % blocks);
        const int first = static_cast<int>(rows ? task % chunks : task / blocks % chunks) * chunk_;
        const int last = std::min(first + chunk_, signal_.target);
        const T* x = static_cast<const T*>(signal_.x) + image * signal_.x_batch +
                     block * channels / signal_.multiplier * signal_.x_channel;
        const int count = std::min(channels, signal_.channels() - block * channels);
        if (transposes_) {
          PackTransposed(shape_, x, count, PositionOf(first), PositionsOf(last - first), lines);
        }
        for (int c = 0; c < count; c++) {
          const Row row = RowOf(image, block * channels + c, weights);
          if (transposes_) {
            ComputeLine(row, lines + c * shape_.size(), first, last, staged);
          } else if (in_place_) {
            ComputeInPlace(row, x, first, last, lines, staged);
          } else {
            ComputePacked(row, x, first, last, lines, staged);
          }
        }
      }
      hwy::FlushStream();
    });
  }

 private:
  static constexpr int kStaged = 1024;

  struct Row {
    const float* weights;
    int exponent;  // of the factor in the sums
    float bias;
    T* y;
    const T* residual;
  };

  int Halo() const { return (signal_.taps - 1) * signal_.dilation + 1; }
  int PositionOf(int output) const { return output * signal_.stride - signal_.before; }
  int PositionsOf(int outputs) const { return (outputs - 1) * signal_.stride + Halo(); }

  Row RowOf(std::int64_t image, int channel, float* weights) const {
    ReadTaps(static_cast<const T*>(signal_.w) + channel * signal_.w_channel, signal_.w_column, signal_.taps, weights);
    const auto* bias = static_cast<const T*>(signal_.bias);
    const std::ptrdiff_t at = image * signal_.y_batch + channel * signal_.y_channel;
    const auto* residual = static_cast<const T*>(signal_.residual);
    const int exponent = signal_.tiny ? Normalise(weights, signal_.taps) : 0;
    return {weights, exponent, bias == nullptr ? 0.0f : One(bias + channel * signal_.bias_step),
            static_cast<T*>(signal_.y) + at, residual == nullptr ? nullptr : residual + at};
  }

  // Outputs [first, last), of which the interior are those whole vectors that see nothing outside. A few vectors do not
  // pay for three parts.
  void ComputeInPlace(const Row& row, const T* x, int first, int last, float* line, float* staged) const {
    if constexpr (std::is_same_v<T, float>) {
      const int begin = std::clamp(signal_.before, first, last);
      const int inside = std::min(last, signal_.source + signal_.before - Halo() + 1) - begin;
      if (inside < kTileVectors * kLanes) return ComputePacked(row, x, first, last, line, staged);
      const int end = begin + inside / kLanes * kLanes;
      ComputePacked(row, x, first, begin, line, staged);
      Compute(row, x + PositionOf(begin), begin, end, staged);
      ComputePacked(row, x, end, last, line, staged);
    }
  }

  void ComputePacked(const Row& row, const T* x, int first, int last, float* line, float* staged) const {
    if (first == last) return;
    PackLine(shape_, x, PositionOf(first), PositionsOf(last - first), line);
    ComputeLine(row, line, first, last, staged);
  }

  // A packed line, which is scaled if it is tiny.
  void ComputeLine(Row row, float* line, int first, int last, float* staged) const {
    if (signal_.tiny) row.exponent += NormaliseLine(shape_, PositionsOf(last - first), line);
    Compute(row, line, first, last, staged);
  }

  // `line`: the first position that output `first` reads.
  void Compute(const Row& row, const float* line, int first, int last, float* staged) const {
    for (; first < last; first += kStaged, line += kStaged) {
      const int count = std::min(kStaged, last - first);
      int v = 0;
      const int vectors = CeilDiv(count, kLanes);
      for (; v + kTileVectors <= vectors; v += kTileVectors) {
        SumTile<kTileVectors>(row, line + v * kLanes, staged + v * kLanes);
      }
      for (; v + kTileVectors / 2 <= vectors; v += kTileVectors / 2) {
        SumTile<kTileVectors / 2>(row, line + v * kLanes, staged + v * kLanes);
      }
      for (; v < vectors; v++) SumTile<1>(row, line + v * kLanes, staged + v * kLanes);
      const T* residual = row.residual == nullptr ? nullptr : row.residual + first;
      if (HWY_LIKELY(row.exponent == 0)) {
        Write(staged, row.y + first, residual, count);
      } else {
        Rescale(staged, count, -row.exponent);
        const FloatControl exact(FloatControl::Exact());
        for (int i = 0; i < count && row.bias != 0.0f; i++) staged[i] += row.bias;
        Write(staged, row.y + first, residual, count);
      }
    }
  }

  template <int kVectors>
  HWY_NOINLINE void SumTile(const Row& row, const float* line, float* staged) const {
    Floats sums[kVectors];
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) {
      __builtin_prefetch(line + z * kLanes + kPrefetch);
      sums[z] = Broadcast(row.exponent == 0 ? row.bias : 0.0f);
    }
    const int taps = signal_.taps;
    if (!shares_) {
      for (int q = 0; q < taps; q++) AddTaps<kVectors, 1>(line + offsets_[q], row.weights + q, sums);
    } else {
      for (int block = 0; block < taps; block += 4 * kLanes) {
        for (int q = block; q < std::min(block + kLanes, taps); q++) {
          const int more = (std::min(taps, block + 4 * kLanes) - 1 - q) / kLanes;
          if (more == 3) {
            AddTaps<kVectors, 4>(line + q, row.weights + q, sums);
          } else {
            if (more > 0) AddTaps<kVectors, 2>(line + q, row.weights + q, sums);
            const int single = more == 1 ? taps : q + more * kLanes;
            if (single < taps) AddTaps<kVectors, 1>(line + single, row.weights + single, sums);
          }
        }
      }
    }
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) StoreAligned(staged + z * kLanes, sums[z]);
  }

  void Write(const float* sums, T* y, const T* residual, int count) const {
    const Epilogue<float>& epilogue = signal_.epilogue;
    switch (epilogue.activation) {
      case Activation::kNone:
        return Write(Finisher<Activate::kNone, false>{nullptr, epilogue, 0, 0}, sums, y, residual, count);
      case Activation::kSilu:
        return Write(Finisher<Activate::kSilu, false>{nullptr, epilogue, 0, 0}, sums, y, residual, count);
      case Activation::kRelu:
        return Write(Finisher<Activate::kClamp, false>{nullptr, epilogue, 0, std::numeric_limits<float>::infinity()},
                     sums, y, residual, count);
      case Activation::kClamp:
        return Write(Finisher<Activate::kClamp, false>{nullptr, epilogue, epilogue.a, epilogue.b}, sums, y, residual,
                     count);
      default:
        return Write(Finisher<Activate::kAny, false>{nullptr, epilogue, 0, 0}, sums, y, residual, count);
    }
  }

  template <class Finish>
  HWY_NOINLINE void Write(const Finish& finish, const float* sums, T* y, const T* residual, int count) const {
    // Only whole cache lines are streamed: a line of which a part is stored otherwise is read and written twice.
    constexpr int kLine = std::max<int>(kLanes, 64 / sizeof(T));
    const int misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(y) / sizeof(T) % kLine);
    const int head = misaligned == 0 ? 0 : std::min(kLine - misaligned, count);
    WriteSome(finish, sums, y, residual, 0, head);
    const int whole = head + (count - head) / kLine * kLine;
    for (int i = head; i < whole; i += kLanes) {
      Floats v = Load(sums + i);
      if (residual != nullptr) v = hn::Add(v, LoadWide(residual + i));
      v = finish.Whole(v, nullptr);
      if (stream_) {
        StreamNarrow(y + i, v);
      } else {
        StoreNarrow(y + i, v);
      }
    }
    WriteSome(finish, sums, y, residual, whole, count);
  }

  // Outputs [first, last), one of the ends of a line.
  template <class Finish>
  HWY_NOINLINE void WriteSome(const Finish& finish, const float* sums, T* y, const T* residual, int first,
                              int last) const {
    for (int i = first; i < last; i += kLanes) {
      const int size = std::min(kLanes, last - i);
      Floats v = Load(sums + i);
      if (residual != nullptr) v = hn::Add(v, LoadSome(residual + i, size));
      StoreSome(y + i, finish.Whole(v, nullptr), size);
    }
  }

  const SignalCorrelation& signal_;
  const bool in_place_;    // rows of x are read where they are
  const bool transposes_;  // channels of x are contiguous, and many of them are packed together
  const int chunk_;        // outputs of a task
  const LineShape shape_;
  std::vector<int> offsets_;  // of the taps, in a line
  bool shares_;               // taps a vector apart share their loads
  bool stream_;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
