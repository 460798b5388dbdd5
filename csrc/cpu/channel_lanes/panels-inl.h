// Panels of packed pixels, the input of a chunk.
#if defined(POLYCONV_CPU_CHANNEL_LANES_PANELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYCONV_CPU_CHANNEL_LANES_PANELS_INL_H_
#undef POLYCONV_CPU_CHANNEL_LANES_PANELS_INL_H_
#else
#define POLYCONV_CPU_CHANNEL_LANES_PANELS_INL_H_
#endif

#include <algorithm>

#include "channel_lanes/grid.h"
#include "channel_lanes/pack-inl.h"
#include "common/stages.h"

HWY_BEFORE_NAMESPACE();
namespace polyconv {
namespace HWY_NAMESPACE {

// Pixels of a panel: [row][vector of channels][column][lane], first of x, then of dy (forward pass: outputs).
class PackedPanels {
 public:
  PackedPanels(const Convolution& conv, const TileShape& tile, int wanted_units, int threads = 1)
      : grid_(conv, tile, wanted_units, threads),
        x_(InputPixels(conv)),
        dy_(OutputPixels(conv)),
        // Odd numbers of columns, against conflicts of rows in cache sets.
        x_vector_(static_cast<std::size_t>(grid_.InputColumns() | 1) * kLanes),
        dy_vector_(static_cast<std::size_t>(grid_.OutputColumns() | 1) * kLanes),
        x_size_(x_row() * grid_.MostInputRows()) {}

  const PanelGrid& grid() const { return grid_; }
  int x_vectors() const { return x_.vectors(); }
  int dy_vectors() const { return dy_.vectors(); }
  std::size_t x_vector() const { return x_vector_; }
  std::size_t dy_vector() const { return dy_vector_; }
  std::size_t x_row() const { return x_vector_ * x_.vectors(); }
  std::size_t dy_row() const { return dy_vector_ * dy_.vectors(); }
  std::size_t dy_offset() const { return x_size_; }
  std::size_t panel_size() const { return x_size_ + dy_row() * grid_.MostOutputRows(); }
  std::size_t chunk_size() const { return panel_size() * grid_.panels_per_chunk(); }

  // Packs all panels of a chunk, and adds dy to `bias` unless it is null. The images have these elements.
  void Pack(int chunk, float* packed, double* bias, Element of_x, Element of_dy) const {
    const StageTimer timer(Stage::kGather);
    grid_.ForPanels(chunk, [&](const Panel& panel, int number) {
      float* x = packed + number * panel_size();
      float* dy = x + dy_offset();
      PackInput(panel, x, of_x);
      for (int i = 0; i < grid_.OutputRows(panel); i++) {
        dy_.Pack(panel.image, grid_.OutputRow(panel, i), grid_.FirstOutputColumn(panel), grid_.OutputColumns(),
                 dy + i * dy_row(), dy_vector_, of_dy);
        if (bias != nullptr) AddRow(dy + i * dy_row(), bias);
      }
    });
  }

  void PackInput(const Panel& panel, float* x, Element element = Element::kFloat) const {
    for (int i = 0; i < grid_.InputRows(panel); i++) {
      if (!grid_.IsRead(i)) continue;
      x_.Pack(panel.image, grid_.InputRow(panel, i), grid_.FirstInputColumn(panel), grid_.InputColumns(),
              x + i * x_row(), x_vector_, element);
    }
  }

 private:
  // Adds a row of dy to the bias gradient; pixels outside are zeros. Four parallel float sums, then double.
  void AddRow(const float* dy, double* bias) const {
    constexpr int kStreams = 4;
    const int columns = grid_.OutputColumns();
    for (int v = 0; v < dy_.vectors(); v++, dy += dy_vector_, bias += kLanes) {
      Floats sums[kStreams];
      for (Floats& sum : sums) sum = hn::Zero(kFloats);
      int j = 0;
      for (; j + kStreams <= columns; j += kStreams) {
        POLYCONV_UNROLL
        for (int i = 0; i < kStreams; i++) sums[i] = hn::Add(sums[i], hn::Load(kFloats, dy + (j + i) * kLanes));
      }
      for (; j < columns; j++) sums[0] = hn::Add(sums[0], hn::Load(kFloats, dy + j * kLanes));
      HWY_ALIGN float total[kLanes];
      StoreAligned(total, hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3])));
      for (int lane = 0; lane < kLanes; lane++) bias[lane] += total[lane];
    }
  }

  const PanelGrid grid_;
  const RowPacker x_, dy_;
  const std::size_t x_vector_, dy_vector_;
  const std::size_t x_size_;
};

}  // namespace HWY_NAMESPACE
}  // namespace polyconv
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
