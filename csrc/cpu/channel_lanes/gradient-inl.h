// Weight gradient with channels in the lanes: pack pixels, transform tiles, multiply and sum, transform back.
//
// The order of every sum follows from the sizes alone. Products of a chunk are summed in registers, chunks of a slice
// in its own accumulators, and slices in double, so that errors do not grow with the image.
#if defined(POLYCONV_CPU_CHANNEL_LANES_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_CHANNEL_LANES_GRADIENT_INL_H_
#undef POLYCONV_CPU_CHANNEL_LANES_GRADIENT_INL_H_
#else
#define POLYCONV_CPU_CHANNEL_LANES_GRADIENT_INL_H_
#endif

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "channel_lanes/gradient.h"
#include "channel_lanes/grid.h"
#include "channel_lanes/pack-inl.h"
#include "channel_lanes/panels-inl.h"
#include "channel_lanes/products-inl.h"
#include "channel_lanes/transform-inl.h"
#include "common/caches.h"
#include "common/memory.h"
#include "common/stages.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// The last steps are in double, half a vector of channels at a time.
using DoubleTag = hn::ScalableTag<double>;
using Doubles = hn::Vec<DoubleTag>;
inline constexpr DoubleTag kDoubles{};
inline constexpr int kDoubleLanes = hn::MaxLanes(DoubleTag());
using SumTag = hn::Rebind<float, DoubleTag>;

// Accumulators of one channel with kDoubleLanes others, for all matrices.
struct SumView {
  const float* first;
  std::size_t matrix_pitch;

  HWY_INLINE Doubles At(int matrix) const {
    return hn::PromoteTo(kDoubles, hn::LoadU(SumTag(), first + matrix * matrix_pitch));
  }
};

// Direct summation: one matrix per tap, straight from the packed pixels.
class DirectGradient {
 public:
  static constexpr int kGroups = 1;
  static constexpr int kTapsH = 1 << 20, kTapsW = 1 << 20;  // any kernel at once
  static constexpr int kMostUnits = 128;

  DirectGradient(const Convolution& conv, int units)
      : conv_(conv), panels_(conv, TileShape{1, 1, conv.taps_h, conv.taps_w, false}, units) {}

  const PackedPanels& panels() const { return panels_; }
  int matrices() const { return conv_.taps_h * conv_.taps_w; }  // of a group
  int blocks(int chunk) const {
    const PanelGrid& grid = panels_.grid();
    return std::min(grid.panels_per_chunk(), grid.panels() - chunk * grid.panels_per_chunk());
  }
  std::size_t operands_size() const { return 0; }  // none but the packed pixels
  std::size_t work_size() const { return 0; }
  void Expand(int, int, const float*, float*, float*) const {}

  // x and dy of one sum of products.
  std::pair<ChannelOperand, ChannelOperand> Operands(int matrix, int block, const float* packed, const float*) const {
    const PackedPanels& p = panels_;
    const float* x = packed + block * p.panel_size();
    const float* dy = x + p.dy_offset();
    const int r = matrix / conv_.taps_w, s = matrix % conv_.taps_w;
    const auto column = static_cast<std::size_t>(s) * conv_.dilation_w * kLanes;
    const auto step = static_cast<std::size_t>(conv_.stride_w) * kLanes;
    return {{x + r * p.x_row() + column, p.x_vector(), step, p.grid().row_stride() * p.x_row()},
            {dy, p.dy_vector(), static_cast<std::size_t>(kLanes), p.dy_row()}};
  }
  std::pair<int, int> Extent(int chunk, int block) const {
    const Panel panel = panels_.grid().PanelAt(chunk * panels_.grid().panels_per_chunk() + block);
    return {panel.rows, panel.columns};
  }

  // Calls write(r, s, sums) for every tap.
  template <class Write>
  HWY_INLINE void Finish(const SumView& sums, const Write& write) const {
    for (int r = 0, tap = 0; r < conv_.taps_h; r++) {
      for (int s = 0; s < conv_.taps_w; s++, tap++) write(r, s, sums.At(tap));
    }
  }

  // Products that are summed sequentially.
  int longest() const { return panels_.grid().PanelUnits(); }

 private:
  const Convolution& conv_;
  const PackedPanels panels_;
};

// A Cook-Toom scheme: one matrix per point, and per slot if segments of taps are nested.
template <class AlongH, class AlongW, bool kNested>
class FastGradient {
 public:
  using S = Scheme<AlongH, AlongW, kNested, true>;
  static constexpr int kGroups = S::kGroups;
  static constexpr int kTapsH = S::kTapsH, kTapsW = S::kTapsW;
  static constexpr int kMatrices = S::kGroupPoints * S::kSlots;
  static constexpr int kMostUnits = 64;  // transformed tiles take more of the cache than pixels

  FastGradient(const Convolution& conv, int units)
      : conv_(conv), panels_(conv, TileShape{AlongH::kM, S::kUnitColumns, kTapsH, kTapsW, true}, units) {}

  const PackedPanels& panels() const { return panels_; }
  int matrices() const { return kMatrices; }
  int blocks(int) const { return 1; }
  std::size_t operands_size() const { return kMatrices * matrix_pitch(); }  // of a group
  // One line of tiles, transformed along H only.
  std::size_t work_size() const {
    return static_cast<std::size_t>(S::kGroupRows) * panels_.grid().InputColumns() * kLanes;
  }

  // Transforms all tiles of a chunk to the points of a group: [matrix][vector of channels, x then dy][tile][lane].
  void Expand(int group, int chunk, const float* packed, float* operands, float* work) const {
    const StageTimer timer(Stage::kExpand);
    ExpandGroup<0>(group, chunk, packed, operands, work);
  }

  std::pair<ChannelOperand, ChannelOperand> Operands(int matrix, int, const float*, const float* operands) const {
    const float* x = operands + matrix * matrix_pitch();
    const float* dy = x + panels_.x_vectors() * vector_pitch();
    return {{x, vector_pitch(), static_cast<std::size_t>(kLanes), 0},
            {dy, vector_pitch(), static_cast<std::size_t>(kLanes), 0}};
  }
  std::pair<int, int> Extent(int chunk, int) const {
    int units = 0;
    panels_.grid().ForPanels(chunk, [&](const Panel& panel, int) { units += panels_.grid().Units(panel); });
    return {1, units};
  }

  // G^T along W, then along H.
  template <class Write>
  HWY_INLINE void Finish(const SumView& sums, const Write& write) const {
    Doubles rows[AlongH::kPoints][kTapsW];
    for (int group = 0; group < kGroups; group++) {
      for (int h = 0; h < S::kGroupRows; h++) {
        const int first = (group * S::kGroupRows + h) * AlongW::kPoints * S::kSlots;
        FinishRow(sums, first, rows[S::PointOfH(group, h)]);
      }
    }
    for (int r = 0; r < conv_.taps_h; r++) {
      for (int s = 0; s < conv_.taps_w; s++) {
        Doubles total = hn::Zero(kDoubles);
        POLYCONV_UNROLL
        for (int h = 0; h < AlongH::kPoints; h++) {
          total = hn::MulAdd(hn::Set(kDoubles, AlongH::kMatrices.weight.at[h][r]), rows[h][s], total);
        }
        write(r, s, total);
      }
    }
  }

  int longest() const { return panels_.grid().ChunkUnits(); }

 private:
  std::size_t vector_pitch() const { return static_cast<std::size_t>(panels_.grid().ChunkUnits()) * kLanes; }
  // An odd number of vectors, against conflicts in cache sets.
  std::size_t matrix_pitch() const {
    const int vectors = panels_.grid().ChunkUnits() * (panels_.x_vectors() + panels_.dy_vectors());
    return static_cast<std::size_t>(vectors | 1) * kLanes;
  }

  template <int kGroup>
  void ExpandGroup(int group, int chunk, const float* packed, float* operands, float* work) const {
    if constexpr (kGroup < kGroups) {
      if (group != kGroup) return ExpandGroup<kGroup + 1>(group, chunk, packed, operands, work);
      const PackedPanels& p = panels_;
      const int dilation = p.grid().column_dilation();
      TileLine line{};
      line.column_pitch = static_cast<std::size_t>(dilation) * kLanes;
      line.matrix_pitch = matrix_pitch();
      line.group_pitch = AlongW::kPoints * S::kSlots * matrix_pitch();
      float* target = operands;
      p.grid().ForPanels(chunk, [&](const Panel& panel, int number) {
        const float* x = packed + number * p.panel_size();
        const float* dy = x + p.dy_offset();
        line.tiles = panel.columns;
        for (int row = 0; row < panel.rows; row++) {
          for (int phase = 0; phase < p.grid().column_phases(); phase++, target += panel.columns * kLanes) {
            line.row_pitch = p.x_row();
            for (int v = 0; v < p.x_vectors(); v++) {
              line.pixels = x + row * AlongH::kM * p.x_row() + v * p.x_vector() + phase * kLanes;
              line.target = target + v * vector_pitch();
              ExpandInput<S, kGroup>(line, work);
            }
            line.row_pitch = p.dy_row();
            for (int v = 0; v < p.dy_vectors(); v++) {
              line.pixels = dy + row * AlongH::kM * p.dy_row() + v * p.dy_vector() + phase * kLanes;
              line.target = target + (p.x_vectors() + v) * vector_pitch();
              ExpandOutputGradient<S, kGroup>(line, work);
            }
          }
        }
      });
    }
  }

  // Inverse along W of the sums of one point of H. With nested segments, slot 0 belongs to both.
  static HWY_INLINE void FinishRow(const SumView& sums, int first_matrix, Doubles (&row)[kTapsW]) {
    Doubles taps[S::kBlocks][AlongW::kR];
    POLYCONV_UNROLL
    for (int w = 0; w < AlongW::kPoints; w++) {
      const Doubles common = sums.At(first_matrix + w * S::kSlots);
      POLYCONV_UNROLL
      for (int block = 0; block < S::kBlocks; block++) {
        Doubles point = common;
        if constexpr (kNested) point = hn::Add(point, sums.At(first_matrix + w * S::kSlots + 1 + block));
        POLYCONV_UNROLL
        for (int s = 0; s < AlongW::kR; s++) {
          const Doubles factor = hn::Set(kDoubles, AlongW::kMatrices.weight.at[w][s]);
          taps[block][s] = w == 0 ? hn::Mul(factor, point) : hn::MulAdd(factor, point, taps[block][s]);
        }
      }
    }
    // The first of two segments has kM taps, the second follows it.
    POLYCONV_UNROLL
    for (int s = 0; s < kTapsW; s++) {
      const int block = kNested && s >= AlongW::kM ? 1 : 0;
      row[s] = taps[block][s - block * AlongW::kM];
    }
  }

  const Convolution& conv_;
  const PackedPanels panels_;
};

// Distribution of the work. Sliced: chunks are cut into slices, each with its own accumulators and processed by one
// thread, with the operands of one group of points at a time in its L2. Otherwise, with too many channels for that: all
// threads prepare a slab of chunks, then divide the accumulators among them. If there is only one slab, as for small
// images, the sums of some channels are finished before those of others begin, and never leave the cache.
struct GradientCut {
  int units;  // wanted per chunk
  bool sliced;
  int parts;  // number of slices or slabs
};

template <class Form>
class ChannelGradient {
 public:
  explicit ChannelGradient(const WeightGradient& problem)
      : problem_(problem), conv_(problem.conv), layout_(ChooseLayout(conv_)), cut_(Cut()), form_(conv_, cut_.units) {}

  static std::size_t SumBytes(const Convolution& conv) {
    return Form(conv, kMostUnits).matrices() * Form::kGroups * ChooseLayout(conv).layout.size() * sizeof(float);
  }

  void Run(const Runtime& runtime) const {
    if (cut_.sliced) {
      RunSliced(runtime);
    } else {
      RunShared(runtime);
    }
  }

  std::vector<std::int64_t> Blocks() const {
    const int sums = form_.panels().grid().chunks() * form_.blocks(0);
    return {form_.longest(), cut_.sliced ? CeilDiv(sums, cut_.parts) : sums};
  }

 private:
  static constexpr int kMostUnits = Form::kMostUnits;
  static constexpr double kMiB = 1 << 20;
  static constexpr double kCache = 1.6 * kMiB;      // L2 budget [bytes] of chunks with the best size for the products
  static constexpr double kMostCache = 2.4 * kMiB;  // L2 budget of the smallest chunks: still better than sharing slabs
  static constexpr double kMemory = 64 * kMiB;      // accumulators of all slices, or operands of a slab [bytes]
  static constexpr double kSumsInCache = 0.4;       // share of L2 for sums that are finished from there

  // Which channels are in the vectors; the others are broadcast.
  struct Layout {
    SumLayout layout;
    bool input_in_vectors;
  };
  static Layout ChooseLayout(const Convolution& conv) {
    const SumLayout input{conv.out_channels, CeilDiv(conv.in_channels, kLanes)};
    const SumLayout output{conv.in_channels, CeilDiv(conv.out_channels, kLanes)};
    const bool input_in_vectors = input.Cost() <= output.Cost();
    return {input_in_vectors ? input : output, input_in_vectors};
  }

  std::size_t GroupSums(const Form& form) const { return form.matrices() * layout_.layout.size(); }
  std::size_t AllSums(const Form& form) const { return GroupSums(form) * Form::kGroups; }

  HWY_NOINLINE GradientCut Cut() const {
    for (int units = kMostUnits; units >= kMostUnits / 2; units -= kMostUnits / 4) {
      const Form form(conv_, units);
      const PackedPanels& panels = form.panels();
      const double alive = sizeof(float) * (panels.chunk_size() + form.operands_size() + GroupSums(form));
      if (alive > (units > kMostUnits / 2 ? kCache : kMostCache)) continue;
      const int most = std::max(1, static_cast<int>(kMemory / (AllSums(form) * sizeof(float))));
      // More slices serve more threads, but each costs as much as another chunk.
      const int chunks = panels.grid().chunks();
      const int slices = std::clamp(chunks / 16, std::min(8, CeilDiv(chunks, 4)), 16);
      if (slices == 1) break;
      return {units, true, std::min(slices, most)};
    }
    const Form form(conv_, kMostUnits);
    const int chunks = form.panels().grid().chunks();
    const int at_a_time = std::clamp(static_cast<int>(kMemory / (ChunkOperands(form) * sizeof(float))), 1, chunks);
    return {kMostUnits, false, CeilDiv(chunks, at_a_time)};
  }

  // Floats that a slab keeps of a chunk.
  static std::size_t ChunkOperands(const Form& form) {
    const std::size_t operands = form.operands_size() * Form::kGroups;
    return operands > 0 ? operands : form.panels().chunk_size();
  }

  // A range of the broadcast channels, in whole vectors and whole register tiles, with its own sums.
  static constexpr int kRangeRows = std::max(kLanes, kSumRows);
  struct RowRange {
    int first_row;
    SumLayout layout;
  };
  int row_ranges() const { return CeilDiv(layout_.layout.rows, kRangeRows); }
  RowRange Rows(int begin, int end) const {
    const int first = begin * kRangeRows, last = std::min(end * kRangeRows, layout_.layout.rows);
    return {first, {last - first, layout_.layout.vectors}};
  }
  RowRange AllRows() const { return Rows(0, row_ranges()); }

  // One matrix of one chunk: sums = or += its products.
  void Multiply(int chunk, int matrix, const RowRange& range, const float* packed, const float* operands, float* sums,
                bool accumulate) const {
    for (int block = 0; block < form_.blocks(chunk); block++) {
      const auto [x, dy] = form_.Operands(matrix, block, packed, operands);
      const auto [rows, columns] = form_.Extent(chunk, block);
      const bool input_in_vectors = layout_.input_in_vectors;
      ProductBlock products{input_in_vectors ? dy : x, input_in_vectors ? x : dy, rows, columns};
      products.rows.data += range.first_row / kLanes * products.rows.vector_pitch;
      SumProducts(range.layout, products, sums, accumulate || block > 0);
    }
  }

  void RunSliced(const Runtime& runtime) const {
    const PackedPanels& panels = form_.panels();
    const int slices = cut_.parts, chunks = panels.grid().chunks();
    const std::size_t all = AllSums(form_), one = layout_.layout.size();
    float* accumulators = Scratch::Shared().Get(slices * all);
    const int channels = panels.dy_vectors() * kLanes;
    std::vector<double> bias(problem_.db != nullptr ? slices * channels : 0);
    runtime.parallel_for(slices, [&](std::int64_t begin, std::int64_t end) {
      Carver carver;
      const std::size_t packed_at = carver.Take(panels.chunk_size());
      const std::size_t operands_at = carver.Take(form_.operands_size());
      const std::size_t work_at = carver.Take(form_.work_size());
      float* scratch = Scratch::OfThread().Get(carver.size());
      float* packed = scratch + packed_at;
      float* operands = scratch + operands_at;
      for (int slice = static_cast<int>(begin); slice < end; slice++) {
        const int first = static_cast<int>(std::int64_t{chunks} * slice / slices);
        const int last = static_cast<int>(std::int64_t{chunks} * (slice + 1) / slices);
        double* slice_bias = bias.empty() ? nullptr : bias.data() + slice * channels;
        for (int chunk = first; chunk < last; chunk++) {
          panels.Pack(chunk, packed, slice_bias, problem_.x_element, problem_.dy_element);
          float* sums = accumulators + slice * all;
          for (int group = 0; group < Form::kGroups; group++) {
            form_.Expand(group, chunk, packed, operands, scratch + work_at);
            const StageTimer timer(Stage::kProducts);
            for (int matrix = 0; matrix < form_.matrices(); matrix++, sums += one) {
              Multiply(chunk, matrix, AllRows(), packed, operands, sums, chunk > first);
            }
          }
        }
      }
    });
    AddSlices(accumulators, slices, runtime);
    Finish(accumulators, runtime);
    if (problem_.db != nullptr) FinishBias(bias.data(), slices);
  }

  void RunShared(const Runtime& runtime) const {
    const int chunks = form_.panels().grid().chunks(), at_a_time = CeilDiv(chunks, cut_.parts);
    const bool whole = cut_.parts == 1;
    Carver carver;
    const std::size_t sums_at = carver.Take(whole ? 0 : AllSums(form_));
    const std::size_t operands_at = carver.Take(at_a_time * ChunkOperands(form_));
    float* shared = Scratch::Shared().Get(carver.size());
    float* sums = shared + sums_at;
    float* operands = shared + operands_at;
    const int channels = form_.panels().dy_vectors() * kLanes;
    std::vector<double> bias(problem_.db != nullptr ? channels : 0), chunk_bias(bias.size() * at_a_time);
    for (int first = 0; first < chunks; first += at_a_time) {
      const int count = std::min(at_a_time, chunks - first);
      std::fill(chunk_bias.begin(), chunk_bias.end(), 0.0);
      PrepareSlab(first, count, operands, bias.empty() ? nullptr : chunk_bias.data(), runtime);
      for (std::size_t i = 0; i < bias.size() * count; i++) bias[i % bias.size()] += chunk_bias[i];
      if (whole) {
        MultiplyAndFinish(operands, runtime);
      } else {
        MultiplySlab(first, count, operands, sums, runtime);
      }
    }
    if (!whole) Finish(sums, runtime);
    if (problem_.db != nullptr) FinishBias(bias.data(), 1);
  }

  // Prepares the operands of some chunks, side by side, and sums their dy unless `bias` is null.
  void PrepareSlab(int first, int count, float* operands, double* bias, const Runtime& runtime) const {
    const PackedPanels& panels = form_.panels();
    const bool expands = form_.operands_size() > 0;
    runtime.parallel_for(count, [&](std::int64_t begin, std::int64_t end) {
      Carver carver;
      const std::size_t packed_at = carver.Take(expands ? panels.chunk_size() : 0);
      const std::size_t work_at = carver.Take(form_.work_size());
      float* scratch = Scratch::OfThread().Get(carver.size());
      for (int i = static_cast<int>(begin); i < end; i++) {
        float* target = operands + i * ChunkOperands(form_);
        float* packed = expands ? scratch + packed_at : target;
        panels.Pack(first + i, packed, bias == nullptr ? nullptr : bias + i * panels.dy_vectors() * kLanes,
                    problem_.x_element, problem_.dy_element);
        for (int group = 0; group < Form::kGroups; group++) {
          form_.Expand(group, first + i, packed, target + group * form_.operands_size(), scratch + work_at);
        }
      }
    });
  }

  // Products of a slab. There are enough items for many threads, each with its own accumulators.
  void MultiplySlab(int first, int count, const float* operands, float* sums, const Runtime& runtime) const {
    const int matrices = form_.matrices() * Form::kGroups, ranges = row_ranges();
    const int parts = std::min(ranges, CeilDiv(128, matrices));
    runtime.parallel_for(std::int64_t{matrices} * parts, [&](std::int64_t begin, std::int64_t end) {
      const StageTimer timer(Stage::kProducts);
      for (std::int64_t item = begin; item < end; item++) {
        const int matrix = static_cast<int>(item / parts), part = static_cast<int>(item % parts);
        const RowRange range = Rows(ranges * part / parts, ranges * (part + 1) / parts);
        float* place = sums + matrix * layout_.layout.size() + layout_.layout.TileOffset(range.first_row, 0);
        MultiplyChunks(first, count, matrix, range, operands, place);
      }
    });
  }

  // Products of all chunks, which form one slab, and dw from them, one range of channels after another.
  void MultiplyAndFinish(const float* operands, const Runtime& runtime) const {
    constexpr int kRanges = 16;  // enough for many threads
    const int matrices = form_.matrices() * Form::kGroups, ranges = row_ranges();
    const double range_bytes = sizeof(float) * matrices * static_cast<double>(Rows(0, 1).layout.size());
    const int fitting = std::max(1, static_cast<int>(kSumsInCache * static_cast<double>(L2Bytes()) / range_bytes));
    const int each = std::min(fitting, CeilDiv(ranges, kRanges));
    runtime.parallel_for(CeilDiv(ranges, each), [&](std::int64_t begin, std::int64_t end) {
      float* sums = Scratch::OfThread().Get(matrices * Rows(0, each).layout.size());
      for (int part = static_cast<int>(begin); part < end; part++) {
        const RowRange range = Rows(part * each, std::min((part + 1) * each, ranges));
        {
          const StageTimer timer(Stage::kProducts);
          for (int matrix = 0; matrix < matrices; matrix++) {
            float* place = sums + matrix * range.layout.size();
            MultiplyChunks(0, form_.panels().grid().chunks(), matrix, range, operands, place);
          }
        }
        const StageTimer timer(Stage::kInvert);
        FinishRows(range, 0, range.layout.row_tiles(), sums);
      }
    });
  }

  // One matrix, for some chunks of a slab.
  void MultiplyChunks(int first, int count, int matrix, const RowRange& range, const float* operands,
                      float* sums) const {
    const int group = matrix / form_.matrices();
    for (int i = 0; i < count; i++) {
      const float* source = operands + i * ChunkOperands(form_);
      Multiply(first + i, matrix % form_.matrices(), range, source, source + group * form_.operands_size(), sums,
               first + i > 0);
    }
  }

  // Adds all slices to the accumulators of the first, in double.
  void AddSlices(float* accumulators, int slices, const Runtime& runtime) const {
    const StageTimer timer(Stage::kInvert);
    if (slices == 1) return;
    const std::size_t all = AllSums(form_), step = all / Form::kGroups / form_.matrices();
    runtime.parallel_for(static_cast<std::int64_t>(all / step), [&](std::int64_t begin, std::int64_t end) {
      const SumTag half;
      for (std::size_t i = begin * step; i < end * step; i += kDoubleLanes) {
        Doubles total = hn::PromoteTo(kDoubles, hn::LoadU(half, accumulators + i));
        for (int slice = 1; slice < slices; slice++) {
          total = hn::Add(total, hn::PromoteTo(kDoubles, hn::LoadU(half, accumulators + slice * all + i)));
        }
        hn::StoreU(hn::DemoteTo(half, total), half, accumulators + i);
      }
    });
  }

  // Transforms back and writes dw.
  void Finish(const float* accumulators, const Runtime& runtime) const {
    const StageTimer timer(Stage::kInvert);
    runtime.parallel_for(layout_.layout.row_tiles(), [&](std::int64_t begin, std::int64_t end) {
      FinishRows(AllRows(), static_cast<int>(begin), static_cast<int>(end), accumulators);
    });
  }

  // Finish for some tiles of a range. dw is written along the rows of an output channel: input channels are neighbours.
  void FinishRows(const RowRange& range, int first_tile, int last_tile, const float* accumulators) const {
    const SumLayout& layout = range.layout;
    const auto finish_row = [&](int row, int r, int v, int width, std::size_t offset) {
      for (int lane = 0; lane < width * kLanes; lane += kDoubleLanes) {
        const float* sums = accumulators + offset + r * width * kLanes + lane;
        FinishLanes({sums, layout.size()}, range.first_row + row + r, v * kLanes + lane);
      }
    };
    if (!layout_.input_in_vectors) {
      layout.ForTiles(first_tile, last_tile, [&](int row, int height, int v, int width, std::size_t offset) {
        for (int r = 0; r < std::min(height, layout.rows - row); r++) finish_row(row, r, v, width, offset);
      });
      return;
    }
    for (int tile = first_tile; tile < last_tile; tile++) {
      for (int r = 0; r < std::min(kSumRows, layout.rows - tile * kSumRows); r++) {
        layout.ForTiles(tile, tile + 1, [&](int row, int, int v, int width, std::size_t offset) {
          finish_row(row, r, v, width, offset);
        });
      }
    }
  }

  HWY_NOINLINE void FinishLanes(const SumView& sums, int row, int first_lane) const {
    const std::ptrdiff_t row_pitch = layout_.input_in_vectors ? conv_.w_out : conv_.w_in;
    const std::ptrdiff_t lane_pitch = layout_.input_in_vectors ? conv_.w_in : conv_.w_out;
    const int channels = layout_.input_in_vectors ? conv_.in_channels : conv_.out_channels;
    const int lanes = std::min(kDoubleLanes, channels - first_lane);
    if (lanes <= 0) return;
    float* target = problem_.dw + row * row_pitch + first_lane * lane_pitch;
    form_.Finish(sums, [&](int r, int s, Doubles total) {
      HWY_ALIGN float rounded[kDoubleLanes];
      const SumTag half;
      float* tap = target + r * conv_.w_row + s * conv_.w_column;
      if (lane_pitch == 1 && lanes == kDoubleLanes) return hn::StoreU(hn::DemoteTo(half, total), half, tap);
      hn::Store(hn::DemoteTo(half, total), half, rounded);
      for (int lane = 0; lane < lanes; lane++) tap[lane * lane_pitch] = rounded[lane];
    });
  }

  void FinishBias(const double* sums, int slices) const {
    const int channels = form_.panels().dy_vectors() * kLanes;
    for (int k = 0; k < conv_.out_channels; k++) {
      double total = 0;
      for (int slice = 0; slice < slices; slice++) total += sums[slice * channels + k];
      problem_.db[k] = static_cast<float>(total);
    }
  }

  const WeightGradient& problem_;
  const Convolution& conv_;
  const Layout layout_;
  const GradientCut cut_;
  const Form form_;
};

// Halves the output or input channels until the accumulators fit the memory.
template <class Form>
void RunSplit(const WeightGradient& problem, const Runtime& runtime) {
  constexpr std::size_t kMost = std::size_t{64} << 20;
  const Convolution& conv = problem.conv;
  const int most = std::max(conv.out_channels, conv.in_channels);
  if (ChannelGradient<Form>::SumBytes(conv) <= kMost || most <= 4 * kLanes) {
    ChannelGradient<Form>(problem).Run(runtime);
    return;
  }
  const int half = CeilDiv(most / 2, kLanes) * kLanes;
  WeightGradient first = problem, second = problem;
  if (conv.out_channels == most) {
    first.conv.out_channels = half, second.conv.out_channels = most - half;
    second.conv.y = Moved(conv.y, problem.dy_element, half * conv.y_channel), second.dw += half * conv.w_out;
    if (problem.db != nullptr) second.db += half;
  } else {
    first.conv.in_channels = half, second.conv.in_channels = most - half;
    second.conv.x = Moved(conv.x, problem.x_element, half * conv.x_channel), second.dw += half * conv.w_in;
    second.db = nullptr;
  }
  RunSplit<Form>(first, runtime);
  RunSplit<Form>(second, runtime);
}

// Runs kernels longer than the scheme's segment by segment.
template <class Form>
void RunGradient(const WeightGradient& problem, const Runtime& runtime) {
  for (int r = 0; r < problem.conv.taps_h; r += Form::kTapsH) {
    for (int s = 0; s < problem.conv.taps_w; s += Form::kTapsW) {
      WeightGradient segment = problem;
      Convolution& conv = segment.conv;
      conv.taps_h = std::min(Form::kTapsH, conv.taps_h - r), conv.taps_w = std::min(Form::kTapsW, conv.taps_w - s);
      conv.top -= r * conv.dilation_h, conv.left -= s * conv.dilation_w;
      segment.dw += r * conv.w_row + s * conv.w_column;
      if (r + s > 0) segment.db = nullptr;
      RunSplit<Form>(segment, runtime);
    }
  }
}

template <class Form>
std::vector<std::int64_t> GradientBlocks(const Convolution& conv) {
  return ChannelGradient<Form>({conv, nullptr, nullptr}).Blocks();
}

template <class Form>
inline constexpr GradientKernels kGradientKernels = {&RunGradient<Form>, &GradientBlocks<Form>};

template <SchemeShape kShape>
using GradientOf =
    std::conditional_t<kShape == kDirect, DirectGradient, FastGradient<AlongH<kShape>, AlongW<kShape>, kShape.nested>>;

inline constexpr auto kGradientKernelsOf = []<SchemeShape kShape>() { return &kGradientKernels<GradientOf<kShape>>; };

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
