// polyconv_cpu::pixels: 1x1 convolutions in half precision. Blocks of pixels are float32 copies that stay in a core's
// cache, which the pointwise kernels multiply.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/converted.h"
#include "bindings/denormals.h"
#include "bindings/tensors.h"
#include "common/caches.h"
#include "common/half.h"
#include "common/memory.h"
#include "pointwise/pointwise.h"

namespace polyconv {
namespace {

// Pixels of an image in half precision, in lines: the whole image if its pixels have equal steps, else its rows.
struct Pixels {
  Element type;
  char* data;
  int64_t channels, batch, channel, row, column;  // strides in elements

  Pixels(const View& tensor, int64_t stride_h, int64_t stride_w)
      : type(ElementOf(tensor)),
        data(static_cast<char*>(const_cast<void*>(tensor.data()))),
        channels(tensor.size(1)),
        batch(tensor.stride(0)),
        channel(tensor.stride(1)),
        row(tensor.stride(2) * stride_h),
        column(tensor.stride(3) * stride_w) {
    Require(IsHalf(tensor), "elements are float16 or bfloat16");
    Require(channel == 1 || column == 1 || channels == 1, "channels or pixels are contiguous");
  }

  // Calls runs(HalfRuns, address) or planes(HalfPlanes, address) for `count` pixels of a line.
  template <class Runs, class Planes>
  void Visit(int64_t image, int64_t line, int64_t first, int64_t count, const Runs& runs, const Planes& planes) const {
    char* at = data + (image * batch + line * row + first * column) * 2;
    const auto size = static_cast<std::size_t>(channels), pixels = static_cast<std::size_t>(count);
    if (channel != 1 && channels > 1) {
      planes(HalfPlanes{size, pixels, channel}, at);
    } else {
      runs(column == channels ? HalfRuns{1, size * pixels} : HalfRuns{pixels, size, column}, at);
    }
  }
};

// `packed`: of the pointwise kernels' transform_weights, for one image of one pixel. Strides are those of x.
void PixelsOp(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, const Tensor& y,
              int64_t stride_h, int64_t stride_w, int64_t activation, double a, double b) {
  const View from_view(x), to_view(y);
  Require(x.dim() == 4 && y.dim() == 4 && x.size(0) == y.size(0), "tensors have four dimensions and equal batches");
  const Pixels from(from_view, stride_h, stride_w), to(to_view, 1, 1);
  int64_t lines = y.size(2), width = y.size(3);
  Require((lines - 1) * stride_h < x.size(2) && (width - 1) * stride_w < x.size(3), "the output is too large");
  if (from.row == width * from.column && to.row == width * to.column) width *= lines, lines = 1;

  Convolution whole{};
  whole.batch = whole.in_height = whole.out_height = 1;
  whole.taps_h = whole.taps_w = whole.stride_h = whole.stride_w = whole.dilation_h = whole.dilation_w = 1;
  whole.in_channels = Extent(from_view, 1), whole.out_channels = Extent(to_view, 1);
  whole.x_channel = whole.y_channel = 1, whole.x_column = whole.in_channels, whole.y_column = whole.out_channels;
  whole.bias = bias.has_value() ? View(*bias).const_data_ptr<float>() : nullptr;
  whole.epilogue = ReadEpilogue<float>(std::nullopt, activation, a, b, to_view);
  const SchemeKernels& kernels = *FindPointwise(TheSet());
  Require(static_cast<std::size_t>(packed.numel()) == kernels.weights_size(whole), "the packed weights do not fit");

  const int64_t pixels = x.size(0) * lines * width, both = whole.in_channels + whole.out_channels;
  const int64_t most = std::clamp<int64_t>(static_cast<int64_t>(L2Bytes() / 4 / sizeof(float)) / both, 24, 1024);
  const int64_t blocks = (pixels + most - 1) / most;
  const FloatControl flush;
  static thread_local Scratch scaled;
  const Operand weights(packed, scaled);
  TheRuntime().parallel_for(blocks, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* memory = scratch.Get(static_cast<std::size_t>(most * both));
    for (int64_t block = begin; block < end; block++) {
      const int64_t first = pixels * block / blocks, last = pixels * (block + 1) / blocks;
      Convolution conv = whole;
      conv.in_width = conv.out_width = static_cast<int>(last - first);
      float* result = memory + (last - first) * whole.in_channels;
      conv.x = memory, conv.y = result;
      const auto visit = [&](const Pixels& of, const auto& runs, const auto& planes) {
        for (int64_t at = first, count; at < last; at += count) {
          count = std::min(last - at, width - at % width);
          float* copy = (&of == &from ? memory : result) + (at - first) * of.channels;
          of.Visit(
              at / width / lines, at / width % lines, at % width, count,
              [&](const HalfRuns& r, char* half) { runs(r, half, copy); },
              [&](const HalfPlanes& p, char* half) { planes(p, half, copy); });
        }
      };
      visit(
          from, [&](const HalfRuns& r, char* half, float* copy) { Widen(TheSet(), from.type, r, half, copy); },
          [&](const HalfPlanes& p, char* half, float* copy) { WidenPlanes(TheSet(), from.type, p, half, copy); });
      const int exponent = weights.exponent + Normalise(memory, (last - first) * whole.in_channels);
      if (exponent > 0) conv.bias = nullptr, conv.epilogue = {};
      kernels.run(conv, {}, weights.view.const_data_ptr<float>(), OneThread());
      Rescale(result, (last - first) * whole.out_channels, -exponent);
      for (int64_t i = 0; i < last - first && exponent > 0; i++) {
        float* row = result + i * whole.out_channels;
        Finish({row, 1, whole.bias, 1, nullptr, row, 1}, whole.out_channels, whole.epilogue);
      }
      visit(
          to, [&](const HalfRuns& r, char* half, float* copy) { Round(TheSet(), to.type, r, copy, half); },
          [&](const HalfPlanes& p, char* half, float* copy) { RoundPlanes(TheSet(), to.type, p, copy, half); });
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  m.def(
      "pixels(Tensor x, Tensor packed, Tensor? bias, Tensor(a!) y, int stride_h, int stride_w, int activation=0, "
      "float activation_a=0, float activation_b=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("pixels", TORCH_BOX(&PixelsOp));
}

}  // namespace polyconv
