// Problem description for the engines: plain numbers and pointers, independent of torch and of the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "common/epilogue.h"

namespace polyconv {

// Padding mode. Python finds the values by their names: see bindings/facts.cc.
enum class Border : int { kZeros = 0, kReflect, kReplicate, kCircular, kCount };

constexpr const char* NameOf(Border border) {
  switch (border) {
    case Border::kZeros:
      return "zeros";
    case Border::kReflect:
      return "reflect";
    case Border::kReplicate:
      return "replicate";
    case Border::kCircular:
      return "circular";
    case Border::kCount:
      break;
  }
  return "";
}

// Sizes and strides of a correlation.
struct ConvolutionShape {
  int batch, in_channels, out_channels;  // channels of one group
  int in_height, in_width, out_height, out_width;
  int taps_h, taps_w;
  int top, left;  // rows and columns of border before the image; negative: cropped
  int stride_h, stride_w;
  int dilation_h, dilation_w;
  Border border;

  // Strides in elements, of any sign and size. NCHW, channels_last, slices and expanded tensors need no special cases.
  std::ptrdiff_t x_batch, x_channel, x_row, x_column;
  std::ptrdiff_t y_batch, y_channel, y_row, y_column;
  std::ptrdiff_t w_out, w_in, w_row, w_column;
};

// A correlation: y[n, k, i, j] = bias[k] + sum w[k, c, r, s] x[n, c, i sh + r dh - top, j sw + s dw - left].
// The input gradient of a unit-stride convolution is also one, with channels exchanged and negative strides over the
// taps; with a stride it is several, one per residue class of its pixels: see lattice.h.
struct Convolution : ConvolutionShape {  // of one group
  const float* x;
  const float* w;
  const float* bias;  // may be null
  float* y;
  Epilogue<float> epilogue;  // forward passes only
};

// Meaning of the vector lanes in a forward pass.
enum class Lanes : int { kTiles = 0, kChannels, kPointwise, kCount };

constexpr const char* NameOf(Lanes lanes) {
  switch (lanes) {
    case Lanes::kTiles:
      return "tile lanes";
    case Lanes::kChannels:
      return "channel lanes";
    case Lanes::kPointwise:
      return "pointwise";
    case Lanes::kCount:
      break;
  }
  return "";
}

// Cut of the work. 0: the engine chooses.
struct Schedule {
  enum Mode : int { kAutomatic = 0, kFused = 1, kFusedGrouped = 2, kPhased = 3 };
  int mode = kAutomatic;
  int lanes = 0;     // units per chunk
  int channels = 0;  // output channels between two inverse transforms
};

// A function of a range that is called while its caller waits: refers to it, where std::function would copy it.
class RangeBody {
 public:
  template <class Fn>
  RangeBody(const Fn& fn)
      : fn_(&fn), call_([](const void* body, std::int64_t begin, std::int64_t end) {
          (*static_cast<const Fn*>(body))(begin, end);
        }) {}

  void operator()(std::int64_t begin, std::int64_t end) const { call_(fn_, begin, end); }

 private:
  const void* fn_;
  void (*call_)(const void*, std::int64_t, std::int64_t);
};

// Calls body(begin, end) for disjoint ranges that cover [0, count), possibly in parallel.
using ParallelFor = std::function<void(std::int64_t count, const RangeBody& body)>;

struct Runtime {
  ParallelFor parallel_for;
  int threads;
};

// Those of x86-64 from the best to the baseline, then that of ARM64. Python has the same order.
enum class InstructionSet : int { kAvx512, kAvx2, kSse4, kNeon, kCount };

const char* NameOf(InstructionSet set);
bool IsSupported(InstructionSet set);

}  // namespace polyconv
