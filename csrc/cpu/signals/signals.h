// Depthwise convolutions of signals: one axis, one input channel per group, float32 or half precision.
//
// There are only as many products per element as taps, so memory sets the pace. Every element is read once and written
// once, rows are read in place where they are contiguous, and half precision is widened in registers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/convolution.h"
#include "common/elements.h"

namespace polyconv {

// Output o of channel k reads the positions o stride + q dilation - before of channel k / multiplier, for all taps q.
struct Signal {
  Element element;  // of all tensors
  int batch, groups, multiplier;
  int source, target;  // elements of a row of x and of y
  int taps, stride, dilation;
  int before;  // negative: the source is cropped
  Border border;
  bool tiny;  // operands may be: see common/scaling.h

  // In elements.
  std::ptrdiff_t x_batch, x_channel, x_column;
  std::ptrdiff_t y_batch, y_channel, y_column;
  std::ptrdiff_t w_channel, w_column;
  std::ptrdiff_t bias_step;

  int channels() const { return groups * multiplier; }
};

// A forward pass, or an input gradient of unit stride: then `x` is dy, and the taps are reversed. Rows of y are
// contiguous.
struct SignalCorrelation : Signal {
  const void* x;
  const void* w;
  const void* bias;      // may be null
  const void* residual;  // laid out as y; may be null
  void* y;
  Epilogue<float> epilogue;  // without its residual
};

// The strides of `y` are those of dy.
struct SignalWeightGradient : Signal {
  const void* x;
  const void* dy;
  void* dw;
  void* db;  // may be null
};

void RunSignals(InstructionSet set, const SignalCorrelation& signal, const Runtime& runtime);
void RunSignals(InstructionSet set, const SignalWeightGradient& gradient, const Runtime& runtime);

// Outputs whose products a weight gradient sums in float, in all lanes together, before it continues in double.
inline constexpr int kSignalChunk = 2048;

}  // namespace polyconv
