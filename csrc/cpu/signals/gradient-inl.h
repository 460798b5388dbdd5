// Weight gradient of depthwise signals, with outputs of one row in the lanes.
//
// A lane sums at most kSignalChunk / kLanes products of a row in float; the lanes are added, and these sums are added in
// double, chunk after chunk. The cut depends on the sizes alone, so results do not depend on the number of threads. Where
// operands may be tiny, lines are packed and scaled, and the sums are scaled back in double.
#if defined(POLYCONV_CPU_SIGNALS_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_SIGNALS_GRADIENT_INL_H_
#undef POLYCONV_CPU_SIGNALS_GRADIENT_INL_H_
#else
#define POLYCONV_CPU_SIGNALS_GRADIENT_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/float_control.h"
#include "common/memory.h"
#include "signals/lines-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// totals[q + m kLanes] += products of kColumns neighbouring taps q and kRows taps m a whole vector apart. A vector of
// x is loaded once for the kRows taps that multiply it with earlier vectors of dy, which stay in registers.
template <int kRows, int kColumns>
HWY_NOINLINE void AddProducts(const float* HWY_RESTRICT x, const int* offsets, const float* HWY_RESTRICT dy,
                              int vectors, double* totals) {
  Floats sums[kRows][kColumns], gradients[kRows];
  POLYCONV_UNROLL
  for (int m = 0; m < kRows; m++) {
    gradients[m] = hn::Zero(kFloats);
    POLYCONV_UNROLL
    for (int q = 0; q < kColumns; q++) sums[m][q] = hn::Zero(kFloats);
  }
  const float* lines[kColumns];
  POLYCONV_UNROLL
  for (int q = 0; q < kColumns; q++) lines[q] = x + offsets[q];
  const auto step = [&](int v) HWY_ATTR {
    POLYCONV_UNROLL
    for (int q = 0; q < kColumns; q++) {
      const Floats in = Load(lines[q] + v * kLanes);
      POLYCONV_UNROLL
      for (int m = 0; m < kRows; m++) sums[m][q] = hn::MulAdd(in, gradients[m], sums[m][q]);
    }
    POLYCONV_UNROLL
    for (int m = kRows - 1; m > 0; m--) gradients[m] = gradients[m - 1];
  };
  for (int v = 0; v < vectors; v++) {
    __builtin_prefetch(lines[0] + v * kLanes + kPrefetch);
    __builtin_prefetch(dy + v * kLanes + kPrefetch);
    gradients[0] = Load(dy + v * kLanes);
    step(v);
  }
  gradients[0] = hn::Zero(kFloats);
  for (int v = vectors; v < vectors + kRows - 1; v++) step(v);
  for (int m = 0; m < kRows; m++) {
    for (int q = 0; q < kColumns; q++) {
      totals[m * kLanes + q] += static_cast<double>(hn::GetLane(hn::SumOfLanes(kFloats, sums[m][q])));
    }
  }
}

template <class T>
class SignalWeights {
 public:
  explicit SignalWeights(const SignalWeightGradient& gradient)
      : gradient_(gradient),
        in_place_(std::is_same_v<T, float> && gradient.x_column == 1 && gradient.stride == 1 &&
                  gradient.y_column == 1 && !gradient.tiny),
        transposes_((gradient.x_channel == 1 || gradient.y_channel == 1) && !in_place_ && gradient.multiplier == 1 &&
                    gradient.groups >= kLanes / 2),
        chunk_(transposes_ ? 256 : kSignalChunk),
        x_shape_(gradient.source, gradient.x_channel, gradient.x_column, gradient.stride, gradient.border,
                 (std::min(chunk_, gradient.target) - 1) * gradient.stride + Halo()),
        dy_shape_(gradient.target, gradient.y_channel, gradient.y_column, 1, Border::kZeros,
                  std::min(chunk_, gradient.target)) {
    for (int q = 0; q < gradient.taps; q++) offsets_.push_back(x_shape_.OffsetOf(q * gradient.dilation));
    shares_ = gradient.stride == 1 && gradient.dilation == 1 && gradient.taps > kLanes;
    chunks_ = CeilDiv(gradient.target, chunk_);
    block_ = transposes_ ? kPackedChannels : 16;
    blocks_ = CeilDiv(gradient.channels(), block_);
    // Enough tasks for many threads even with few channels.
    pieces_ = std::int64_t{1} * gradient.batch * chunks_;
    parts_ = static_cast<int>(std::clamp<std::int64_t>(CeilDiv(64, blocks_), 1, std::max<std::int64_t>(pieces_, 1)));
  }

  void Run(const Runtime& runtime) const {
    const std::size_t share = gradient_.taps + 1;  // the last one is the bias gradient
    std::vector<double> partial(share * parts_ * gradient_.channels());
    Carver carver;
    const int lines = transposes_ ? kPackedChannels : 1;
    const std::size_t x_at = carver.Take(x_shape_.size() * lines), dy_at = carver.Take(dy_shape_.size() * lines);
    runtime.parallel_for(std::int64_t{1} * blocks_ * parts_, [&](std::int64_t begin, std::int64_t end) {
      float* base = Scratch::OfThread().Get(carver.size());
      for (std::int64_t task = begin; task < end; task++) {
        const std::int64_t part = task / blocks_;
        const int first_k = static_cast<int>(task % blocks_) * block_;
        const int count = std::min(block_, gradient_.channels() - first_k);
        for (std::int64_t piece = pieces_ * part / parts_; piece < pieces_ * (part + 1) / parts_; piece++) {
          const int first = static_cast<int>(piece % chunks_) * chunk_;
          AddPiece(piece / chunks_, first_k, count, first, base + x_at, base + dy_at,
                   &partial[(first_k * parts_ + part) * share], parts_ * share);
        }
      }
    });
    runtime.parallel_for(gradient_.channels(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = begin; k < end; k++) Finish(k, &partial[k * parts_ * share], share);
    });
  }

 private:
  int Halo() const { return (gradient_.taps - 1) * gradient_.dilation + 1; }
  int PositionOf(int output) const { return output * gradient_.stride - gradient_.before; }
  int PositionsOf(int outputs) const { return (outputs - 1) * gradient_.stride + Halo(); }

  // Chunk of one image from output `first` on, of `count` channels whose totals are `pitch` apart.
  void AddPiece(std::int64_t image, int first_k, int count, int first, float* x_lines, float* dy_lines, double* totals,
                std::size_t pitch) const {
    const int last = std::min(first + chunk_, gradient_.target), size = last - first;
    const int step = transposes_ ? block_ : 1;
    for (int k = first_k; k < first_k + count; k += step) {
      const int channels = std::min(step, first_k + count - k);
      const T* x = static_cast<const T*>(gradient_.x) + image * gradient_.x_batch +
                   k / gradient_.multiplier * gradient_.x_channel;
      const T* dy = static_cast<const T*>(gradient_.dy) + image * gradient_.y_batch + k * gradient_.y_channel;
      if (transposes_) {
        Pack(x_shape_, x, channels, PositionOf(first), PositionsOf(size), x_lines);
        Pack(dy_shape_, dy, channels, first, size, dy_lines);
        for (int c = 0; c < channels; c++) {
          AddLines(x_lines + c * x_shape_.size(), dy_lines + c * dy_shape_.size(), size,
                   totals + (k - first_k + c) * pitch);
        }
        continue;
      }
      double* sums = totals + (k - first_k) * pitch;
      int begin = first, end = first;
      if constexpr (std::is_same_v<T, float>) {
        const int from = std::clamp(gradient_.before, first, last);
        const int inside = std::min(last, gradient_.source + gradient_.before - Halo() + 1) - from;
        if (in_place_ && inside >= 4 * kLanes) {  // a few vectors do not pay for three parts
          begin = from, end = from + inside / kLanes * kLanes;
          Add(x + PositionOf(begin), dy + begin, end - begin, sums);
        }
      }
      const int edges[2][2] = {{first, begin}, {end, last}};
      for (const auto& edge : edges) {
        if (edge[0] == edge[1]) continue;
        PackLine(x_shape_, x, PositionOf(edge[0]), PositionsOf(edge[1] - edge[0]), x_lines);
        PackLine(dy_shape_, dy, edge[0], edge[1] - edge[0], dy_lines);
        AddLines(x_lines, dy_lines, edge[1] - edge[0], sums);
      }
    }
  }

  void Pack(const LineShape& shape, const T* from, int channels, int first, int count, float* lines) const {
    if (shape.channel == 1) return PackTransposed(shape, from, channels, first, count, lines);
    for (int c = 0; c < channels; c++)
      PackLine(shape, from + c * shape.channel, first, count, lines + c * shape.size());
  }

  // Packed lines, which are scaled if they are tiny.
  void AddLines(float* x, float* dy, int outputs, double* totals) const {
    if (!gradient_.tiny) return Add(x, dy, outputs, totals);
    const int of_x = NormaliseLine(x_shape_, PositionsOf(outputs), x), of_dy = Normalise(dy, outputs);
    if (of_x + of_dy == 0) return Add(x, dy, outputs, totals);
    std::vector<double> sums(gradient_.taps + 1);
    Add(x, dy, outputs, sums.data());
    for (int q = 0; q < gradient_.taps; q++) totals[q] += std::ldexp(sums[q], -of_x - of_dy);
    totals[gradient_.taps] += std::ldexp(sums[gradient_.taps], -of_dy);
  }

  // Zeros follow the last outputs in dy, if they are no whole vector.
  void Add(const float* x, const float* dy, int outputs, double* totals) const {
    if (outputs == 0) return;
    const int vectors = CeilDiv(outputs, kLanes), taps = gradient_.taps;
    if (shares_) {
      for (int block = 0; block < taps; block += 4 * kLanes) {
        for (int q = block; q < std::min(block + kLanes, taps); q += 4) AddShared(q, block, x, dy, vectors, totals);
      }
    } else {
      int q = 0;
      for (; q + kTileTaps <= taps; q += kTileTaps) {
        AddProducts<1, kTileTaps>(x, &offsets_[q], dy, vectors, totals + q);
      }
      for (; q + 4 <= taps; q += 4) AddProducts<1, 4>(x, &offsets_[q], dy, vectors, totals + q);
      for (; q + 2 <= taps; q += 2) AddProducts<1, 2>(x, &offsets_[q], dy, vectors, totals + q);
      if (q < taps) AddProducts<1, 1>(x, &offsets_[q], dy, vectors, totals + q);
    }
    if (gradient_.db == nullptr) return;
    Floats sum = hn::Zero(kFloats);
    for (int v = 0; v < vectors; v++) sum = hn::Add(sum, Load(dy + v * kLanes));
    totals[taps] += static_cast<double>(hn::GetLane(hn::SumOfLanes(kFloats, sum)));
  }

  // Four taps from q on, with those up to three vectors behind them in their block.
  HWY_INLINE void AddShared(int q, int block, const float* x, const float* dy, int vectors, double* totals) const {
    const int end = std::min(gradient_.taps, block + 4 * kLanes);
    const int all = (end - 1 - q - 3) / kLanes + 1;  // rows that have all four taps
    int m = 0;
    if (end - 1 - q >= 3) {
      if (all == 4) AddProducts<4, 4>(x, &offsets_[q], dy, vectors, totals + q), m = 4;
      if (all == 3) AddProducts<3, 4>(x, &offsets_[q], dy, vectors, totals + q), m = 3;
      if (all == 2) AddProducts<2, 4>(x, &offsets_[q], dy, vectors, totals + q), m = 2;
      if (all == 1) AddProducts<1, 4>(x, &offsets_[q], dy, vectors, totals + q), m = 1;
    }
    for (int tap = q + m * kLanes; tap < end && tap < q + m * kLanes + 3; tap++) {
      AddProducts<1, 1>(x, &offsets_[tap], dy, vectors, totals + tap);
    }
  }

  void Finish(std::int64_t k, const double* partial, std::size_t share) const {
    const FloatControl exact(FloatControl::Exact());
    const auto total = [&](std::size_t tap) HWY_ATTR {
      double sum = 0;
      for (int part = 0; part < parts_; part++) sum += partial[part * share + tap];
      return Broadcast(static_cast<float>(sum));
    };
    T* dw = static_cast<T*>(gradient_.dw) + k * gradient_.w_channel;
    for (int q = 0; q < gradient_.taps; q++) StoreSome(dw + q * gradient_.w_column, total(q), 1);
    if (gradient_.db != nullptr) {
      StoreSome(static_cast<T*>(gradient_.db) + k * gradient_.bias_step, total(share - 1), 1);
    }
  }

  const SignalWeightGradient& gradient_;
  const bool in_place_;    // rows are read where they are
  const bool transposes_;  // many channels are packed together
  const int chunk_;        // outputs at a time
  const LineShape x_shape_, dy_shape_;
  std::vector<int> offsets_;  // of the taps, in a line of x
  bool shares_;               // taps a vector apart share their loads
  int chunks_;
  int block_, blocks_;   // channels of a task, and number of such blocks
  std::int64_t pieces_;  // chunks of all images
  int parts_;            // parts of these pieces, summed separately
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
