// Depthwise correlation with output columns in the lanes.
//
// A thread walks down one image of one channel. The padded rows that a block of output rows reads are packed into a
// ring of lines that stays in L1, so every pixel is fetched from memory once and the inner loops see no edges. Of a
// volume, it walks along the depth, and the ring has the slices that an output slice reads, in L2.
#if defined(POLYCONV_CPU_DEPTHWISE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_DEPTHWISE_ROWS_INL_H_
#undef POLYCONV_CPU_DEPTHWISE_ROWS_INL_H_
#else
#define POLYCONV_CPU_DEPTHWISE_ROWS_INL_H_
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "common/caches.h"
#include "common/memory.h"
#include "common/row_writer-inl.h"
#include "common/tiny-inl.h"
#include "depthwise/lines-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// A register tile is kTileRows output rows x up to kTileColumns vectors of output columns. Each vector that is loaded
// is used for kTileRows rows, each weight for kTileColumns vectors.
inline constexpr int kTileRows = 4;
#if POLYCONV_REGISTERS == 32
inline constexpr int kTileColumns = 4;
#else
inline constexpr int kTileColumns = 2;
#endif

template <int kVectors>
using RowSums = Floats[kTileRows][kVectors];

// Taps of one class, for one register tile.
struct TapBlock {
  const float* const* lines;  // input row t of the class is at lines[t * period]
  int period;
  const float* weights;  // [tap row][tap column]
  int taps_h, taps_w;
  const std::int32_t* offsets;  // of the tap columns within a line
  int column;                   // first output column of the tile
};

// Adds a tap column of an input row to the tile's rows kFirst to kLast. `weights`: of the tap row that row 0 would use.
template <int kVectors, int kFirst, int kLast>
HWY_INLINE void AddTap(const Floats (&in)[kVectors], const float* weights, int taps_w, RowSums<kVectors>& sums) {
  POLYCONV_UNROLL
  for (int row = kFirst; row <= kLast; row++) {
#if HWY_TARGET == HWY_NEON
    // gcc would broadcast weights as it loads them, which takes one of the pipelines that multiply, and would keep more of
    // them than there are registers where all tap columns are unrolled.
    float weight = weights[-row * taps_w];
    if (__builtin_constant_p(taps_w) && taps_w > 3) {
      asm volatile("ldr %s0, %1" : "=w"(weight) : "m"(weights[-row * taps_w]));
    } else {
      asm("" : "+w"(weight));
    }
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) sums[row][z] = Floats(vfmaq_n_f32(sums[row][z].raw, in[z].raw, weight));
#else
    const Floats weight = Broadcast(weights[-row * taps_w]);
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) sums[row][z] = hn::MulAdd(weight, in[z], sums[row][z]);
#endif
  }
}

// Adds the tap columns from kTap on of kColumns neighbouring ones. `whole`: the vectors of the first one and the next.
// With AVX-512, all others are shifted from these: every load of a vector that is not aligned takes two cache lines.
template <int kVectors, int kColumns, int kFirst, int kLast, int kTap = 0>
HWY_INLINE void AddColumns(const float* line, const Floats (&whole)[kVectors + 1], const float* weights,
                           RowSums<kVectors>& sums) {
  if constexpr (kTap < kColumns) {
    Floats in[kVectors];
    POLYCONV_UNROLL
    for (int z = 0; z < kVectors; z++) {
#if HWY_TARGET <= HWY_AVX3
      in[z] = Floats{_mm512_castsi512_ps(
          _mm512_alignr_epi32(_mm512_castps_si512(whole[z + 1].raw), _mm512_castps_si512(whole[z].raw), kTap))};
#else
      in[z] = kTap == 0 ? whole[z] : Load(line + kTap + z * kLanes);
#endif
    }
    AddTap<kVectors, kFirst, kLast>(in, weights + kTap, kColumns, sums);
    AddColumns<kVectors, kColumns, kFirst, kLast, kTap + 1>(line, whole, weights, sums);
  }
}

// Adds input row t to the tile's rows kFirst to kLast, each with its own tap row. kColumns: number of tap columns, which
// are neighbours; 0: any columns.
template <int kVectors, int kColumns, int kFirst, int kLast>
HWY_INLINE void AddLine(const TapBlock& block, int t, RowSums<kVectors>& sums) {
  const float* HWY_RESTRICT line = block.lines[t * block.period] + block.column;
  if constexpr (kColumns > 0) {
    Floats whole[kVectors + 1];
    POLYCONV_UNROLL
    for (int z = 0; z <= kVectors; z++) whole[z] = Load(line + z * kLanes);
    AddColumns<kVectors, kColumns, kFirst, kLast>(line, whole, block.weights + t * kColumns, sums);
  } else {
    const float* HWY_RESTRICT weights = block.weights + t * block.taps_w;
    for (int s = 0; s < block.taps_w; s++) {
      const float* source = line + block.offsets[s];
      Floats in[kVectors];
      POLYCONV_UNROLL
      for (int z = 0; z < kVectors; z++) in[z] = Load(source + z * kLanes);
      AddTap<kVectors, kFirst, kLast>(in, weights + s, block.taps_w, sums);
    }
  }
}

// All input rows from kRow on, of a class with exactly kTaps tap rows.
template <int kVectors, int kColumns, int kTaps, int kRow = 0>
HWY_INLINE void AddFewTaps(const TapBlock& block, RowSums<kVectors>& sums) {
  if constexpr (kRow < kTileRows + kTaps - 1) {
    AddLine<kVectors, kColumns, std::max(0, kRow - kTaps + 1), std::min(kRow, kTileRows - 1)>(block, kRow, sums);
    AddFewTaps<kVectors, kColumns, kTaps, kRow + 1>(block, sums);
  }
}

// Input rows before (AddFirstLines) and behind (AddLastLines) those that all rows of the tile read.
template <int kVectors, int kRow = 0>
HWY_INLINE void AddFirstLines(const TapBlock& block, RowSums<kVectors>& sums) {
  if constexpr (kRow < kTileRows - 1) {
    AddLine<kVectors, 0, 0, kRow>(block, kRow, sums);
    AddFirstLines<kVectors, kRow + 1>(block, sums);
  }
}
template <int kVectors, int kRow = 1>
HWY_INLINE void AddLastLines(const TapBlock& block, RowSums<kVectors>& sums) {
  if constexpr (kRow < kTileRows) {
    AddLine<kVectors, 0, kRow, kTileRows - 1>(block, block.taps_h - 1 + kRow, sums);
    AddLastLines<kVectors, kRow + 1>(block, sums);
  }
}

template <int kVectors>
HWY_INLINE void AddTaps(const TapBlock& block, RowSums<kVectors>& sums) {
  switch (block.taps_h) {
    case 0:
      return;
    case 1:
      return AddFewTaps<kVectors, 0, 1>(block, sums);
    case 2:
      return AddFewTaps<kVectors, 0, 2>(block, sums);
    case 3:
      return AddFewTaps<kVectors, 0, 3>(block, sums);
    default:
      AddFirstLines<kVectors>(block, sums);
      for (int t = kTileRows - 1; t < block.taps_h; t++) AddLine<kVectors, 0, 0, kTileRows - 1>(block, t, sums);
      AddLastLines<kVectors>(block, sums);
  }
}

class DepthwiseRows {
 public:
  explicit DepthwiseRows(const DepthwiseCorrelation& conv)
      : conv_(conv), packer_(conv.width, conv.border), shared_(conv.height) {
    block_outputs_ = kTileRows * shared_.output_step;
    for (const AxisPhase& phase : conv.height.phases) {
      const int last = (block_outputs_ - 1) * conv.height.stride + (phase.taps - 1) * conv.height.dilation;
      window_rows_ = std::max(window_rows_, conv.height.StartOf(phase) + last + 1);
      phase_outputs_ = std::max(phase_outputs_, phase.count);
      taps_h_ += phase.taps;
    }
    for (const AxisPhase& phase : conv.width.phases) {
      offset_starts_.push_back(static_cast<int>(offsets_.size()));
      for (int s = 0; s < phase.taps; s++) {
        const std::ptrdiff_t at = packer_.layout().OffsetOf(conv.width.StartOf(phase) + s * conv.width.dilation);
        offsets_.push_back(static_cast<std::int32_t>(at));
      }
    }
    // The rows of the next block are packed before those of this one are read: reading a vector that was just stored at
    // another alignment would stall (no store forwarding).
    ring_rows_ = std::min(window_rows_ + block_outputs_ * conv.height.stride, conv.height.source);
    // With one phase and one class of rows, tiles write finished rows in order.
    in_order_ = conv.height.phases.size() == 1 && conv.width.phases.size() == 1 && shared_.output_step == 1;
    block_rows_ = block_outputs_ * static_cast<int>(conv.height.phases.size());
    phase_pitch_ = RoundUp(CeilDiv(conv.width.target, static_cast<int>(conv.width.phases.size())), kLanes);
    dense_rows_ = conv.y_column == 1 && conv.y_row == conv.width.target;
    const double bytes = 4.0 * conv.batch * std::max(1, conv.depth.target) * conv.groups * conv.writes *
                         conv.height.target * conv.width.target;
    stream_ = bytes > (8 << 20) && conv.y_column == 1;
  }

  void Run(const Runtime& runtime) const {
    if (conv_.depth.target > 0) return RunVolumes(runtime);
    // Bands of rows only if there are too few planes for the threads: each band packs some of its neighbour's rows.
    const std::int64_t planes = std::int64_t{1} * conv_.batch * conv_.groups;
    const int blocks = Blocks();
    const int wanted = static_cast<int>(std::max<std::int64_t>(1, 8 * runtime.threads / planes));
    const int least = std::max(8, CeilDiv(2 * window_rows_, block_outputs_ * conv_.height.stride));
    const int band_blocks = std::max(CeilDiv(blocks, wanted), least);
    const int bands = CeilDiv(blocks, band_blocks);

    RunTasks(runtime, planes * bands, {conv_.reads, conv_.reads, ring_rows_}, [&](std::int64_t task, Thread& thread) {
      const int first_block = static_cast<int>(task % bands) * band_blocks;
      RunBand(PlaneOf(task / bands), first_block, std::min(blocks, first_block + band_blocks), thread);
    });
  }

 private:
  struct Plane {
    std::int64_t image;
    int group;
  };

  // [write][read][row phase][column phase][tap class][tap row][tap column]
  void PackWeights(int group, float* target) const {
    for (int channel = 0; channel < conv_.reads * conv_.writes; channel++) {
      const float* w = conv_.w + (group * conv_.reads * conv_.writes + channel) * conv_.w_channel;
      for (const AxisPhase& h : conv_.height.phases) {
        for (const AxisPhase& v : conv_.width.phases) {
          for (int tap_class = 0; tap_class < shared_.tap_step; tap_class++) {
            for (int r = tap_class; r < h.taps; r += shared_.tap_step) {
              const float* row = w + (h.first_tap + r * h.tap_step) * conv_.w_row + v.first_tap * conv_.w_column;
              for (int s = 0; s < v.taps; s++) *target++ = row[s * v.tap_step * conv_.w_column];
            }
          }
        }
      }
    }
  }

  // Lines that a thread keeps: `rows` of each of `slots` channels or slices, at most those of the image. `lists` lists
  // of addresses take turns to name the slots.
  struct RingShape {
    int slots, lists, rows;

    std::size_t lines() const { return std::size_t{1} * slots * rows; }
  };

  // Addresses of the packed rows of a plane, equal for all planes of a thread.
  struct Ring {
    std::vector<float*> slots;        // [list][position]
    std::vector<const float*> lines;  // like slots, with a line of zeros for rows outside the image
    std::vector<int> source;          // image row at a position, or -1
    std::size_t positions;
  };

  // Lines of the channels or slices that a block sums over.
  struct Reads {
    const float* const* lines;  // of the first one, from the block's first position on
    std::size_t pitch;          // from one to the next
    int count;
  };

  Ring MakeRing(float* memory, const RingShape& shape) const {
    const DepthwiseAxis& height = conv_.height;
    Ring ring;
    ring.positions = std::size_t{1} * (Blocks() + 1) * block_outputs_ * height.stride + window_rows_;
    const float* zeros = memory + packer_.pitch() * shape.lines();
    const bool whole = shape.rows >= height.source;
    for (int list = 0; list < shape.lists; list++) {
      float* slot = memory + packer_.pitch() * (list % shape.slots) * shape.rows;
      for (int position = 0; position < static_cast<int>(ring.positions); position++) {
        const bool read = position < height.reach;
        const int row = read ? SourceIndex(conv_.border, position - height.before, height.source) : -1;
        ring.slots.push_back(slot + packer_.pitch() * (whole ? std::max(row, 0) : position % shape.rows));
        ring.lines.push_back(row < 0 ? zeros : ring.slots.back());
        if (list == 0) ring.source.push_back(row);
      }
    }
    return ring;
  }

  // Finished rows before they are stored, one block later: reading them at once would stall, too.
  struct Staging {
    float* rows[2];
    int current = 0;
    float* target = nullptr;  // of the other rows, if any
    int count = 0;
  };

  struct Thread {
    Ring ring;
    float* weights;
    float* phases;
    Staging staging;
    TinyScale scale;
    float* copy;  // of a row that is scaled
  };

  int Blocks() const { return CeilDiv(phase_outputs_, block_outputs_); }
  int Advance() const { return block_outputs_ * conv_.height.stride; }
  std::size_t WeightsOfARead() const { return std::size_t{1} * taps_h_ * offsets_.size(); }
  Plane PlaneOf(std::int64_t number) const { return {number / conv_.groups, static_cast<int>(number % conv_.groups)}; }

  template <class RunTask>
  void RunTasks(const Runtime& runtime, std::int64_t tasks, const RingShape& shape, const RunTask& run) const {
    Carver carver;
    const std::size_t lines_at = carver.Take(packer_.pitch() * (shape.lines() + 1));
    const std::size_t weights_at = carver.Take(WeightsOfARead() * conv_.reads * conv_.writes);
    const std::size_t phases_at =
        carver.Take(in_order_ ? 0 : std::size_t{1} * block_rows_ * conv_.width.phases.size() * phase_pitch_);
    const std::size_t rows_size = RoundUp(block_rows_ * conv_.width.target, 16) + 2 * kTileColumns * kLanes;
    const std::size_t rows_at = carver.Take(2 * rows_size);
    const std::size_t copy_at = carver.Take(conv_.width.source);
    std::atomic<std::int64_t> next{0};
    runtime.parallel_for(runtime.threads, [&](std::int64_t, std::int64_t) {
      float* base = Scratch::OfThread().Get(carver.size());
      packer_.Clear(base + lines_at, shape.lines() + 1);
      Thread thread{MakeRing(base + lines_at, shape),
                    base + weights_at,
                    base + phases_at,
                    Staging{{base + rows_at, base + rows_at + rows_size}},
                    TinyScale(),
                    base + copy_at};
      for (std::int64_t task; (task = next.fetch_add(1)) < tasks;) run(task, thread);
      WritePending(thread.staging);
      if (thread.scale.SawOrdinary()) *conv_.tiny.ordinary = true;
      hwy::FlushStream();
    });
  }

  void PackRows(const float* image, int list, int first, int last, Thread& thread) const {
    const Ring& ring = thread.ring;
    for (int position = first; position < last; position++) {
      if (ring.source[position] < 0) continue;
      const float* row = image + ring.source[position] * conv_.x_row;
      float* line = ring.slots[list * ring.positions + position];
      if (HWY_UNLIKELY(conv_.tiny.scales)) {
        packer_.Pack(row, conv_.x_column, line, thread.scale, thread.copy);
      } else {
        packer_.Pack(row, conv_.x_column, line);
      }
    }
  }

  void RunBand(Plane plane, int first_block, int last_block, Thread& thread) const {
    const int advance = Advance();
    const float* x = conv_.x + plane.image * conv_.x_batch + plane.group * conv_.x_group;
    PackWeights(plane.group, thread.weights);
    int packed = first_block * advance;
    for (int block = first_block; block < last_block; block++) {
      const int first = block * advance, end = first + window_rows_ + (block + 1 < last_block ? advance : 0);
      for (int c = 0; c < conv_.reads; c++) {
        PackRows(x + c * conv_.x_channel, c, std::max(packed, first), end, thread);
      }
      packed = end;
      const Reads reads{thread.ring.lines.data() + first, thread.ring.positions, conv_.reads};
      for (int k = 0; k < conv_.writes; k++) {
        const int channel = plane.group * conv_.writes + k;
        RunBlock(channel, block, reads, thread.weights + k * WeightsOfARead() * conv_.reads,
                 conv_.y + plane.image * conv_.y_batch + channel * conv_.y_channel, thread);
      }
    }
  }

  // Bands of rows if the slices that one output slice reads are too large for L2; bands of slices only if there are too
  // few planes for the threads. Each packs some of its neighbour's.
  void RunVolumes(const Runtime& runtime) const {
    const int window = (conv_.reads - 1) * conv_.depth.dilation + 1, blocks = Blocks();
    const int slots = std::min(window, conv_.depth.source);
    const int lines = static_cast<int>(L2Bytes() / (2 * sizeof(float) * packer_.pitch() * slots));
    const int bands = CeilDiv(blocks, std::max(8, (lines - window_rows_) / Advance() + 1));
    const int band_blocks = CeilDiv(blocks, bands);
    const std::int64_t parts = std::int64_t{1} * conv_.batch * conv_.groups * bands;
    const int wanted = static_cast<int>(std::max<std::int64_t>(1, 4 * runtime.threads / parts));
    const int length = std::max(CeilDiv(conv_.depth.target, wanted), CeilDiv(2 * window, conv_.depth.stride));
    const int lengths = CeilDiv(conv_.depth.target, length);
    const int rows = std::min((band_blocks - 1) * Advance() + window_rows_, conv_.height.source);
    const RingShape shape{slots, 2 * slots, rows};
    RunTasks(runtime, parts * lengths, shape, [&](std::int64_t task, Thread& thread) {
      const int first = static_cast<int>(task % lengths) * length;
      const int first_block = static_cast<int>(task / lengths % bands) * band_blocks;
      RunSlices(PlaneOf(task / lengths / bands), first, std::min(conv_.depth.target, first + length), first_block,
                std::min(blocks, first_block + band_blocks), slots, thread);
    });
  }

  void RunSlices(Plane volume, int first, int last, int first_block, int last_block, int slots, Thread& thread) const {
    const DepthwiseAxis& depth = conv_.depth;
    const Ring& ring = thread.ring;
    const int first_row = first_block * Advance(), last_row = (last_block - 1) * Advance() + window_rows_;
    const int window = (conv_.reads - 1) * depth.dilation + 1, common = std::gcd(depth.stride, depth.dilation);
    const float* x = conv_.x + volume.image * conv_.x_batch + volume.group * conv_.x_group;
    float* y = conv_.y + volume.image * conv_.y_batch + volume.group * conv_.y_channel;
    PackWeights(volume.group, thread.weights);
    int packed = 0;
    for (int slice = first; slice < last; slice++) {
      const int start = slice * depth.stride - depth.before, end = std::min(depth.source, start + window);
      for (packed = std::max({packed, start, 0}); packed < end; packed++) {
        if ((packed - start) % common != 0) continue;
        PackRows(x + packed * conv_.x_channel, packed % slots, first_row, last_row, thread);
      }
      // Taps outside the volume are left out.
      const int tap = CeilDiv(std::max(-start, 0), depth.dilation), source = start + tap * depth.dilation;
      const int taps = source < end ? CeilDiv(end - source, depth.dilation) : 0;
      const float* const* lines = ring.lines.data() + source % slots * ring.positions;
      for (int block = first_block; block < last_block; block++) {
        RunBlock(volume.group, block, {lines + block * Advance(), depth.dilation * ring.positions, taps},
                 thread.weights + tap * WeightsOfARead(), y + slice * conv_.y_slice, thread);
      }
    }
  }

  // Computes a block of output rows of a channel, of which `y` is the first row, and stores the block before it.
  HWY_NOINLINE void RunBlock(int channel, int block, const Reads& reads, const float* weights, float* y,
                             Thread& thread) const {
    Staging& staging = thread.staging;
    float* rows = staging.rows[staging.current];
    ComputeBlock(channel, reads, weights, in_order_ ? rows : thread.phases);
    if (!in_order_) MergePhases(thread.phases, rows);
    WritePending(staging);
    const int first_row = block * block_rows_;
    staging.current ^= 1;
    staging.count = std::min(block_rows_, conv_.height.target - first_row);
    staging.target = y + first_row * conv_.y_row;
  }

  // Output rows of a block: dense and in order, or [row][column phase][column].
  HWY_INLINE void ComputeBlock(int channel, const Reads& reads, const float* weights, float* target) const {
    const float start = conv_.bias == nullptr ? 0.0f : conv_.bias[channel * conv_.bias_step];
    const int row_phases = static_cast<int>(conv_.height.phases.size());
    const int column_phases = static_cast<int>(conv_.width.phases.size());
    const std::ptrdiff_t row_pitch = in_order_ ? conv_.width.target : std::ptrdiff_t{1} * column_phases * phase_pitch_;
    for (int a = 0; a < row_phases; a++) {
      for (int b = 0; b < column_phases; b++) {
        const AxisPhase& h = conv_.height.phases[a];
        const AxisPhase& v = conv_.width.phases[b];
        for (int first = 0; first < shared_.output_step; first++) {
          Tile tile;
          tile.reads = reads;
          tile.reads.lines += conv_.height.StartOf(h) + first * conv_.height.stride;
          tile.weights = weights;
          tile.taps_h = h.taps, tile.taps_w = v.taps;
          tile.offsets = offsets_.data() + offset_starts_[b];
          tile.start = start;
          tile.row_pitch = row_pitch * shared_.output_step * row_phases;
          tile.target = target + (first * row_phases + a) * row_pitch + b * phase_pitch_ * (in_order_ ? 0 : 1);
          // From right to left, and each tile from top to bottom: a row's last vector may write past its end, over the
          // start of the next row, which is written later.
          for (int vectors = CeilDiv(v.count, kLanes), width; vectors > 0; vectors -= width) {
            width = vectors % kTileColumns == 0 ? kTileColumns : vectors % kTileColumns;
            ComputeTile(tile, (vectors - width) * kLanes, width);
          }
        }
        weights += h.taps * v.taps;
      }
    }
  }

  struct Tile {
    Reads reads;
    const float* weights;  // of the first channel
    int taps_h, taps_w;
    const std::int32_t* offsets;
    float start;
    float* target;
    std::ptrdiff_t row_pitch;
  };

  HWY_INLINE void ComputeTile(const Tile& tile, int column, int vectors) const {
    switch (vectors) {
      case 1:
        return ComputeTile<1>(tile, column);
      case 2:
        return ComputeTile<2>(tile, column);
#if POLYCONV_REGISTERS == 32
      case 3:
        return ComputeTile<3>(tile, column);
      default:
        return ComputeTile<4>(tile, column);
#endif
    }
  }

  template <int kVectors>
  HWY_INLINE void ComputeTile(const Tile& tile, int column) const {
    const int last = tile.taps_w - 1;
    const bool dense = last > 0 && tile.offsets[0] == 0 && tile.offsets[last] == last;
    switch (dense && tile.taps_h == tile.taps_w && shared_.tap_step == 1 ? tile.taps_w : 0) {
      case 3:
        return ComputeTaps<kVectors, 3>(tile, column);
      case 5:
        return ComputeTaps<kVectors, 5>(tile, column);
      case 7:
        return ComputeTaps<kVectors, 7>(tile, column);
      default:
        return ComputeTaps<kVectors, 0>(tile, column);
    }
  }

  // kTaps: number of tap rows and of neighbouring tap columns, in one class; 0: any.
  template <int kVectors, int kTaps>
  HWY_NOINLINE void ComputeTaps(const Tile& tile, int column) const {
    Floats sums[kTileRows][kVectors];
    POLYCONV_UNROLL
    for (int row = 0; row < kTileRows; row++) {
      POLYCONV_UNROLL
      for (int z = 0; z < kVectors; z++) sums[row][z] = Broadcast(tile.start);
    }
    TapBlock block{tile.reads.lines, shared_.period, tile.weights, kTaps, kTaps, tile.offsets, column};
    if constexpr (kTaps > 0) {
      const std::size_t weights = WeightsOfARead();
      for (int c = 0; c < tile.reads.count; c++, block.lines += tile.reads.pitch, block.weights += weights) {
        AddFewTaps<kVectors, kTaps, kTaps>(block, sums);
      }
    } else {
      block.taps_w = tile.taps_w;
      for (int c = 0; c < tile.reads.count; c++) {
        block.weights = tile.weights + c * WeightsOfARead();
        for (int tap_class = 0; tap_class < shared_.tap_step; tap_class++) {
          block.lines = tile.reads.lines + c * tile.reads.pitch + tap_class * conv_.height.dilation;
          block.taps_h = shared_.TapsOf(tap_class, tile.taps_h);
          AddTaps<kVectors>(block, sums);
          block.weights += block.taps_h * tile.taps_w;
        }
      }
    }
    POLYCONV_UNROLL
    for (int row = 0; row < kTileRows; row++) {
      POLYCONV_UNROLL
      for (int z = 0; z < kVectors; z++) Store(tile.target + row * tile.row_pitch + column + z * kLanes, sums[row][z]);
    }
  }

  // Merges the columns of all phases.
  void MergePhases(const float* phases, float* rows) const {
    const int count = static_cast<int>(conv_.width.phases.size()), width = conv_.width.target;
    for (int row = 0; row < block_rows_; row++, phases += count * phase_pitch_, rows += width) {
      if (count == 1) {
        for (int i = 0; i < width; i += kLanes) Store(rows + i, Load(phases + i));
      } else if (count == 2) {
        for (int i = 0; i < phase_pitch_; i += kLanes) {
          const Floats streams[2] = {Load(phases + i), Load(phases + phase_pitch_ + i)};
          Interleave<2>(streams, rows + 2 * i);
        }
      } else {
        for (int i = 0; i < width; i++) rows[i] = phases[i % count * phase_pitch_ + i / count];
      }
    }
  }

  HWY_NOINLINE void WritePending(Staging& staging) const {
    if (staging.target == nullptr) return;
    const int width = conv_.width.target;
    float* rows = staging.rows[staging.current ^ 1];
    float* target = staging.target;
    staging.target = nullptr;
    WithFinisher(Finished(conv_, rows, staging.count * width), conv_.y, [&](const auto& finish) HWY_ATTR {
      if (dense_rows_) {
        WriteRun(finish, target, rows, staging.count * width, stream_);
      } else {
        WriteApart(finish, target, rows, staging.count);
      }
    });
  }

  // Stores rows that are not contiguous in memory.
  template <class Finish>
  void WriteApart(const Finish& finish, float* target, const float* rows, int count) const {
    const int width = conv_.width.target;
    for (int row = 0; row < count; row++, target += conv_.y_row, rows += width) {
      if (conv_.y_column == 1) {
        WriteRun(finish, target, rows, width, stream_);
        continue;
      }
      for (int i = 0; i < width; i++) {
        float* place = target + i * conv_.y_column;
        *place = finish.One(rows[i], place);
      }
    }
  }

  const DepthwiseCorrelation& conv_;
  const LinePacker packer_;
  const SharedRows shared_;
  int block_outputs_;                  // of each row phase
  int block_rows_;                     // output rows of a block, all phases
  int window_rows_ = 0;                // padded input rows that a block reads
  int ring_rows_;                      // packed rows that are kept
  int phase_outputs_ = 0;              // most output rows of a phase
  int taps_h_ = 0;                     // of all row phases
  std::vector<std::int32_t> offsets_;  // of the tap columns, phase after phase
  std::vector<int> offset_starts_;
  bool in_order_;
  bool dense_rows_;  // rows of the output follow one another without a gap
  bool stream_;
  int phase_pitch_;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
