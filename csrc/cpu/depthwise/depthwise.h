// Depthwise convolutions: every group has one input channel and a few output channels.
//
// Channels share nothing, so there are only as many multiplications per float read as there are taps. The kernels are
// built to touch every float once: see depthwise/rows-inl.h, and depthwise/tiles-inl.h for channels_last.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/convolution.h"
#include "common/lattice.h"
#include "common/scaling.h"

namespace polyconv {

// Source positions that the outputs along one axis read. Output o is number u = o / phases of phase o % phases. It
// reads the positions start + u stride + q dilation, for all taps q of its phase, of the padded source: `before`
// positions of border, then the source. A forward pass has one phase; an input gradient has one per residue class of
// the stride, and unit stride.
struct DepthwiseAxis {
  int source, target;  // pixels
  int stride;
  int dilation;
  int before;  // negative: the source is cropped
  int reach;   // positions that are read
  std::vector<AxisPhase> phases;

  int StartOf(const AxisPhase& phase) const { return before - phase.padding; }
};

inline DepthwiseAxis MakeAxis(int source, int target, int stride, std::vector<AxisPhase> phases) {
  DepthwiseAxis axis{source, target, stride, phases[0].dilation, 0, 0, std::move(phases)};
  bool any = false;
  for (const AxisPhase& phase : axis.phases) {
    if (phase.taps > 0) axis.before = any ? std::max(axis.before, phase.padding) : phase.padding;
    any = any || phase.taps > 0;
  }
  for (AxisPhase& phase : axis.phases) {
    if (phase.taps == 0) phase.padding = axis.before;  // reads nothing
    const int last = (phase.count - 1) * stride + (phase.taps - 1) * axis.dilation;
    axis.reach = std::max(axis.reach, axis.StartOf(phase) + last + 1);
  }
  return axis;
}

inline DepthwiseAxis ForwardAxis(int source, int target, int taps, int stride, int dilation, int before) {
  return MakeAxis(source, target, stride, {{target, taps, 0, 1, before, dilation}});
}

// From the gradient of the output (`source`) to that of the input (`target`).
inline DepthwiseAxis GradientAxis(int source, int target, int taps, int stride, int dilation, int before) {
  std::vector<AxisPhase> phases;
  for (int residue = 0; residue < stride; residue++) {
    phases.push_back(PhaseOf(residue, target, taps, stride, dilation, before));
  }
  return MakeAxis(source, target, 1, std::move(phases));
}

// Common to all passes.
struct DepthwiseShape {
  int batch, groups;
  DepthwiseAxis height, width;
  Border border;

  std::ptrdiff_t x_batch, x_channel, x_row, x_column;
  std::ptrdiff_t y_batch, y_channel, y_row, y_column;
  std::ptrdiff_t w_channel, w_row, w_column;
  std::ptrdiff_t bias_step;
  Tiny tiny;  // the operand that is packed is x
};

// A forward pass or an input gradient. A group reads `reads` channels and writes `writes`; one of them is 1.
struct DepthwiseCorrelation : DepthwiseShape {
  const float* x;
  const float* w;
  const float* bias;  // may be null
  float* y;
  Epilogue<float> epilogue;  // forward passes only

  int reads, writes;
  std::ptrdiff_t x_group;  // step from the first channel of a group to that of the next

  // Volumes, if it has a target: an output slice of a channel reads `reads` slices of it, one per tap along the depth.
  // They are x_channel apart, with zeros outside of the volume; `writes` is 1.
  DepthwiseAxis depth;
  std::ptrdiff_t y_slice;
};

// The axes are those of the forward pass, the strides of `y` and `w` those of dy and dw.
struct DepthwiseWeightGradient : DepthwiseShape {
  const float* x;
  const float* dy;
  float* dw;
  float* db;  // may be null

  int multiplier;
  bool scales_dy = false;  // as tiny.scales
};

void RunDepthwise(InstructionSet set, const DepthwiseCorrelation& conv, const Runtime& runtime);
void RunDepthwise(InstructionSet set, const DepthwiseWeightGradient& gradient, const Runtime& runtime);

// Most products that a lane of a weight gradient sums in float before the sum is added in double. Depends on the sizes
// only: a bound for all kernels, whichever the memory layout selects.
std::int64_t LongestDepthwiseSum(InstructionSet set, const DepthwiseWeightGradient& gradient);

}  // namespace polyconv
