// Weight gradient of a depthwise convolution, with output columns in the lanes.
//
// dw[r][s] is the sum of dy[i][j] x[i + r][j + s], in three levels: each lane sums at most kLaneTerms products in
// float, in a register; the lanes of a vector are added pairwise; these sums are added in double, image after image.
// The cut depends on the shape alone, so results do not depend on the number of threads.
#if defined(POLYCONV_CPU_DEPTHWISE_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_DEPTHWISE_WEIGHTS_INL_H_
#undef POLYCONV_CPU_DEPTHWISE_WEIGHTS_INL_H_
#else
#define POLYCONV_CPU_DEPTHWISE_WEIGHTS_INL_H_
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "common/memory.h"
#include "common/tiny-inl.h"
#include "depthwise/lines-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// A register tile is up to kGradientRows x kGradientColumns taps. Down a column of vectors, each vector of x that is
// loaded is multiplied with the last few vectors of dy, which stay in registers.
#if POLYCONV_REGISTERS == 32
inline constexpr int kGradientRows = 5, kGradientColumns = 4;
#else
inline constexpr int kGradientRows = 3, kGradientColumns = 3;
#endif

// Products that a lane sums in float, unless rows are too long for it: see LongestSum.
inline constexpr int kLaneTerms = 512;

// One tile of taps over the rows of a band.
struct GradientTile {
  const float* const* x;   // input row t is at x[t * x_step]
  const float* const* dy;  // output row t is at dy[t * dy_step]; zeros follow the last one
  int x_step, dy_step;
  int rows, vectors;
  const std::int32_t* offsets;  // of the tap columns within a line
  double* totals;               // [tap row][tap column]
  std::ptrdiff_t totals_pitch;
};

template <int kRows, int kColumns>
HWY_NOINLINE void AddGradients(const GradientTile& tile) {
  Floats sums[kRows][kColumns];
  POLYCONV_UNROLL
  for (int q = 0; q < kRows; q++) {
    POLYCONV_UNROLL
    for (int s = 0; s < kColumns; s++) sums[q][s] = hn::Zero(kFloats);
  }
  for (int z = 0; z < tile.vectors; z++) {
    Floats dy[kRows];  // of the output rows t, t - 1, ...
    POLYCONV_UNROLL
    for (int q = 0; q < kRows; q++) dy[q] = hn::Zero(kFloats);
    int t = 0;
#if HWY_TARGET == HWY_NEON
    // Whole turns of a ring, without copies among registers, which take the pipelines that multiply.
    std::int32_t offsets[kColumns];
    for (int s = 0; s < kColumns; s++) offsets[s] = tile.offsets[s] + z * kLanes;
    for (; t < tile.rows; t += kRows) {
      POLYCONV_UNROLL
      for (int turn = 0; turn < kRows; turn++) {
        const int last = kRows - 1 - turn;  // the place of the oldest row
        dy[last] = Load(tile.dy[(t + turn) * tile.dy_step] + z * kLanes);
        const float* line = tile.x[(t + turn) * tile.x_step];
        POLYCONV_UNROLL
        for (int s = 0; s < kColumns; s++) {
          const Floats x = Load(line + offsets[s]);
          POLYCONV_UNROLL
          for (int q = 0; q < kRows; q++) sums[q][s] = hn::MulAdd(x, dy[(last + q) % kRows], sums[q][s]);
        }
      }
    }
#endif
    for (; t < tile.rows + kRows - 1; t++) {
      POLYCONV_UNROLL
      for (int q = kRows - 1; q > 0; q--) dy[q] = dy[q - 1];
      dy[0] = Load(tile.dy[t * tile.dy_step] + z * kLanes);
      const float* line = tile.x[t * tile.x_step] + z * kLanes;
      POLYCONV_UNROLL
      for (int s = 0; s < kColumns; s++) {
        const Floats x = Load(line + tile.offsets[s]);
        POLYCONV_UNROLL
        for (int q = 0; q < kRows; q++) sums[q][s] = hn::MulAdd(x, dy[q], sums[q][s]);
      }
    }
  }
#if HWY_TARGET == HWY_NEON
  // Otherwise gcc keeps the sums in memory, too.
  POLYCONV_UNROLL
#endif
  for (int q = 0; q < kRows; q++) {
#if HWY_TARGET == HWY_NEON
    POLYCONV_UNROLL
#endif
    for (int s = 0; s < kColumns; s++) {
      tile.totals[q * tile.totals_pitch + s] += static_cast<double>(hn::GetLane(hn::SumOfLanes(kFloats, sums[q][s])));
    }
  }
}

template <int kRows>
HWY_INLINE void AddGradients(int columns, const GradientTile& tile) {
  switch (columns) {
    case 1:
      return AddGradients<kRows, 1>(tile);
    case 2:
      return AddGradients<kRows, 2>(tile);
    case 3:
      return AddGradients<kRows, 3>(tile);
#if POLYCONV_REGISTERS == 32
    default:
      return AddGradients<kRows, 4>(tile);
#endif
  }
}

HWY_INLINE void AddGradients(int rows, int columns, const GradientTile& tile) {
  switch (rows) {
    case 1:
      return AddGradients<1>(columns, tile);
    case 2:
      return AddGradients<2>(columns, tile);
    case 3:
      return AddGradients<3>(columns, tile);
#if POLYCONV_REGISTERS == 32
    case 4:
      return AddGradients<4>(columns, tile);
    default:
      return AddGradients<5>(columns, tile);
#endif
  }
}

// Length of the next piece if `remaining` are cut into as few and as equal pieces as possible.
constexpr int NextPiece(int remaining, int most) {
  return CeilDiv(remaining, CeilDiv(remaining, most));
}

class DepthwiseWeights {
 public:
  static std::int64_t LongestSum(const DepthwiseWeightGradient& gradient) {
    return std::int64_t{1} * BandRows(gradient) * Vectors(gradient);
  }

  explicit DepthwiseWeights(const DepthwiseWeightGradient& gradient)
      : gradient_(gradient),
        packer_(gradient.width, gradient.border),
        shared_(gradient.height),
        taps_h_(gradient.height.phases[0].taps),
        taps_w_(gradient.width.phases[0].taps) {
    vectors_ = Vectors(gradient);
    band_rows_ = BandRows(gradient);
    bands_ = CeilDiv(gradient.height.target, band_rows_);
    band_lines_ = (band_rows_ - 1) * gradient.height.stride + (taps_h_ - 1) * gradient.height.dilation + 1;
    kept_lines_ = std::min(band_lines_, gradient.height.source);
    gradient_pitch_ = RoundUp(vectors_ * kLanes, 32) + 16;
    for (int s = 0; s < taps_w_; s++) {
      offsets_.push_back(static_cast<std::int32_t>(packer_.layout().OffsetOf(s * gradient.width.dilation)));
    }
    // Enough tasks for many threads even with few channels.
    pieces_ = std::int64_t{1} * gradient.batch * bands_;
    blocks_ = CeilDiv(gradient.groups * gradient.multiplier, kBlockChannels);
    parts_ = static_cast<int>(std::clamp<std::int64_t>(CeilDiv(64, blocks_), 1, std::max<std::int64_t>(pieces_, 1)));
  }

  void Run(const Runtime& runtime) const {
    const std::size_t share = std::size_t{1} * taps_h_ * taps_w_ + 1;  // the last one is the bias gradient
    const std::int64_t channels = std::int64_t{1} * gradient_.groups * gradient_.multiplier;
    std::vector<double> partial(share * parts_ * channels);

    // Zeros behind the last line of dy, as many as a register tile reads past it.
    const std::size_t dy_lines = band_rows_ + std::size_t{kGradientRows} * shared_.output_step;
    Carver carver;
    const std::size_t lines_at = carver.Take(packer_.pitch() * (kept_lines_ + 1));
    const std::size_t dy_at = carver.Take(std::size_t{1} * gradient_pitch_ * (band_rows_ + 1));
    const std::size_t copy_at = carver.Take(gradient_.width.source);
    std::atomic<std::int64_t> next{0};
    runtime.parallel_for(runtime.threads, [&](std::int64_t, std::int64_t) {
      float* base = Scratch::OfThread().Get(carver.size());
      packer_.Clear(base + lines_at, kept_lines_ + 1);
      std::memset(base + dy_at, 0, (std::size_t{1} * gradient_pitch_ * (band_rows_ + 1)) * sizeof(float));
      std::vector<const float*> x(band_lines_), dy(dy_lines);
      TinyScale scale;
      for (std::int64_t task; (task = next.fetch_add(1)) < std::int64_t{1} * blocks_ * parts_;) {
        const std::int64_t part = task / blocks_, first_k = task % blocks_ * kBlockChannels;
        const std::int64_t last_k = std::min(first_k + kBlockChannels, channels);
        // Channels innermost: planes of one image are contiguous in memory.
        for (std::int64_t piece = pieces_ * part / parts_; piece < pieces_ * (part + 1) / parts_; piece++) {
          const std::int64_t image = piece / bands_;
          const int first = static_cast<int>(piece % bands_) * band_rows_;
          for (std::int64_t k = first_k; k < last_k; k++) {
            if (k == first_k || k % gradient_.multiplier == 0) {
              PackInput(image, static_cast<int>(k) / gradient_.multiplier, first, base + lines_at, x.data(), scale,
                        base + copy_at);
            }
            const int rows = PackGradient(image, k, first, base + dy_at, dy.data(), dy_lines, scale);
            AddBand(x.data(), dy.data(), rows, &partial[(k * parts_ + part) * share]);
          }
        }
      }
      if (scale.SawOrdinary()) *gradient_.tiny.ordinary = true;
    });
    runtime.parallel_for(channels, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = begin; k < end; k++) Finish(k, &partial[k * parts_ * share], share);
    });
  }

 private:
  static int Vectors(const DepthwiseWeightGradient& gradient) { return CeilDiv(gradient.width.target, kLanes); }

  // At least a few rows, however long they are, and one row of each class that shares nothing.
  static int BandRows(const DepthwiseWeightGradient& gradient) {
    const int step = SharedRows(gradient.height).output_step;
    const int rows = std::clamp(kLaneTerms / Vectors(gradient), 8, 64) / step * step;
    return std::min(std::max(rows, step), gradient.height.target);
  }

  void PackInput(std::int64_t image, int channel, int first_row, float* lines, const float** x, TinyScale& scale,
                 float* copy) const {
    const DepthwiseAxis& height = gradient_.height;
    const float* plane = gradient_.x + image * gradient_.x_batch + channel * gradient_.x_channel;
    for (int i = 0; i < band_lines_; i++) {
      const int position = first_row * height.stride + i;
      const int row =
          position < height.reach ? SourceIndex(gradient_.border, position - height.before, height.source) : -1;
      const int place = row < 0 ? kept_lines_ : kept_lines_ < band_lines_ ? row : i;  // the last line is one of zeros
      float* line = lines + place * packer_.pitch();
      x[i] = line;
      if (row < 0) continue;
      const float* source = plane + row * gradient_.x_row;
      if (HWY_UNLIKELY(gradient_.tiny.scales)) {
        packer_.Pack(source, gradient_.x_column, line, scale, copy);
      } else {
        packer_.Pack(source, gradient_.x_column, line);
      }
    }
  }

  // Returns the number of rows.
  int PackGradient(std::int64_t image, std::int64_t k, int first_row, float* lines, const float** dy, std::size_t count,
                   TinyScale& scale) const {
    const int rows = std::min(band_rows_, gradient_.height.target - first_row), width = gradient_.width.target;
    const float* plane = gradient_.dy + image * gradient_.y_batch + k * gradient_.y_channel;
    for (int i = 0; i < rows; i++) {
      const float* row = plane + (first_row + i) * gradient_.y_row;
      float* line = lines + std::size_t{1} * i * gradient_pitch_;
      dy[i] = line;
      if (HWY_UNLIKELY(gradient_.scales_dy)) {
        scale.Up(row, gradient_.y_column, width, line);
      } else if (gradient_.y_column == 1) {
        int j = 0;
        for (; j + kLanes <= width; j += kLanes) {
          __builtin_prefetch(row + j + kPrefetch);
          Store(line + j, Load(row + j));
        }
        if (j < width) Store(line + j, LoadBetween(row + j, 0, width - j));
      } else {
        for (int j = 0; j < width; j++) line[j] = row[j * gradient_.y_column];
      }
    }
    const float* zeros = lines + std::size_t{1} * band_rows_ * gradient_pitch_;
    for (std::size_t i = rows; i < count; i++) dy[i] = zeros;
    return rows;
  }

  // totals += the share of one band
  void AddBand(const float* const* x, const float* const* dy, int rows, double* totals) const {
    const DepthwiseAxis& height = gradient_.height;
    GradientTile tile{};
    tile.x_step = shared_.period, tile.dy_step = shared_.output_step;
    tile.vectors = vectors_;
    tile.totals_pitch = std::ptrdiff_t{1} * taps_w_ * shared_.tap_step;
    for (int first = 0; first < std::min(shared_.output_step, rows); first++) {
      tile.dy = dy + first;
      tile.rows = CeilDiv(rows - first, shared_.output_step);
      for (int tap_class = 0; tap_class < shared_.tap_step; tap_class++) {
        const int taps = shared_.TapsOf(tap_class, taps_h_);
        for (int q = 0, tap_rows; q < taps; q += tap_rows) {
          tap_rows = NextPiece(taps - q, kGradientRows);
          const int r = tap_class + q * shared_.tap_step;
          tile.x = x + first * height.stride + r * height.dilation;
          for (int s = 0, tap_columns; s < taps_w_; s += tap_columns) {
            tap_columns = NextPiece(taps_w_ - s, kGradientColumns);
            tile.offsets = &offsets_[s];
            tile.totals = totals + std::ptrdiff_t{1} * r * taps_w_ + s;
            AddGradients(tap_rows, tap_columns, tile);
          }
        }
      }
    }
    if (gradient_.db == nullptr) return;
    Floats sum = hn::Zero(kFloats);
    for (int i = 0; i < rows; i++) {
      for (int z = 0; z < vectors_; z++) sum = hn::Add(sum, Load(dy[i] + z * kLanes));
    }
    totals[taps_h_ * taps_w_] += static_cast<double>(hn::GetLane(hn::SumOfLanes(kFloats, sum)));
  }

  void Finish(std::int64_t k, const double* partial, std::size_t share) const {
    const auto total = [&](std::size_t tap) {
      double sum = 0;
      for (int part = 0; part < parts_; part++) sum += partial[part * share + tap];
      return static_cast<float>(sum);
    };
    for (int r = 0; r < taps_h_; r++) {
      float* target = gradient_.dw + k * gradient_.w_channel + r * gradient_.w_row;
      for (int s = 0; s < taps_w_; s++) target[s * gradient_.w_column] = total(std::size_t{1} * r * taps_w_ + s);
    }
    if (gradient_.db != nullptr) gradient_.db[k * gradient_.bias_step] = total(share - 1);
  }

  static constexpr int kBlockChannels = 16;

  const DepthwiseWeightGradient& gradient_;
  const LinePacker packer_;
  const SharedRows shared_;
  int taps_h_, taps_w_;
  int vectors_;                         // of an output row
  int band_rows_, bands_, band_lines_;  // output rows per band, bands, and input rows per band
  int kept_lines_;                      // of these, all that differ
  int gradient_pitch_;
  std::vector<std::int32_t> offsets_;  // of the tap columns
  std::int64_t pieces_;                // bands of all images
  int parts_;                          // parts of these pieces, summed separately
  int blocks_;                         // of kBlockChannels channels
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
