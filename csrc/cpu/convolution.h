// What the engine is asked for, in plain numbers and pointers. Nothing here knows torch or the instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace polyconv {

// A correlation of unit stride: y[n, k, i, j] = bias[k] + sum w[k, c, r, s] x[n, c, i + r dh - top, j + s dw - left].
// The input gradient of such a convolution is one too, with channels exchanged and negative strides over the taps.
struct Convolution {
  const float* x;
  const float* w;
  const float* bias;  // may be null
  float* y;

  int batch, in_channels, out_channels;  // of one group
  int in_height, in_width, out_height, out_width;
  int taps_h, taps_w;
  int top, left;  // rows and columns of zeros before the image; negative where it is cropped
  int dilation_h, dilation_w;

  // In elements. Columns of x and y are contiguous.
  std::ptrdiff_t x_batch, x_channel, x_row;
  std::ptrdiff_t y_batch, y_channel, y_row;
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
