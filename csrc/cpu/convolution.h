// What the engine is asked for, in plain numbers and pointers. Nothing here knows torch or the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "epilogue.h"

namespace polyconv {

// What stands outside the image. The values are those that Python sends.
enum class Border : int { kZeros = 0, kReflect, kReplicate, kCircular, kCount };

// A correlation: y[n, k, i, j] = bias[k] + sum w[k, c, r, s] x[n, c, i sh + r dh - top, j sw + s dw - left].
// The input gradient of a convolution of unit stride is one too, with channels exchanged and negative strides over the
// taps; that of a strided one is several, one per residue class of its pixels: see lattice.h.
struct Convolution {
  const float* x;
  const float* w;
  const float* bias;  // may be null
  float* y;
  Epilogue<float> epilogue;  // of forward passes

  int batch, in_channels, out_channels;  // of one group
  int in_height, in_width, out_height, out_width;
  int taps_h, taps_w;
  int top, left;  // rows and columns of border before the image; negative where it is cropped
  int stride_h, stride_w;
  int dilation_h, dilation_w;
  Border border;

  // In elements, of any sign and size: NCHW, channels_last, slices and expanded scalars are all the same to the kernels.
  std::ptrdiff_t x_batch, x_channel, x_row, x_column;
  std::ptrdiff_t y_batch, y_channel, y_row, y_column;
  std::ptrdiff_t w_out, w_in, w_row, w_column;
};

enum class Algorithm : int {
  kF45xF45Nested = 0,  // up to 5 x 9 taps
  kF45xF45,            // 5 x 5
  kF43xF43,            // 3 x 3
  kF63xF63,            // 3 x 3, fewer products, larger tiles
  kF23xF23,            // 3 x 3, smallest error
  kF11xF45Nested,      // 1 x 9
  kF11xF45,            // 1 x 5
  kF45xF11,            // 5 x 1
  kF43xF45,            // 3 x 5
  kF43xF45Nested,      // 3 x 9
  kF11xF63,            // 1 x 3
  kF63xF11,            // 3 x 1
  kF11xF11,            // 1 x 1: direct multiplication, each tap a channel of its own
  kCount
};

// How the work is cut. Zero means: let the engine choose.
struct Schedule {
  enum Mode : int { kAutomatic = 0, kFused = 1, kFusedGrouped = 2, kPhased = 3 };
  int mode = kAutomatic;
  int lanes = 0;     // units per chunk
  int channels = 0;  // output channels between inverse transforms
};

// body(begin, end) over disjoint ranges that cover [0, count), possibly at the same time.
using ParallelFor =
    std::function<void(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body)>;

struct Runtime {
  ParallelFor parallel_for;
  int threads;
};

// From the best to the one that every x86-64 machine in use has.
enum class InstructionSet : int { kAvx512, kAvx2, kSse4, kCount };

const char* NameOf(InstructionSet set);
bool IsSupported(InstructionSet set);

}  // namespace polyconv
