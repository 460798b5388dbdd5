// polyconv_cpu::pixels: 1x1 convolutions in half precision. Of channels_last tensors, the pointwise kernels convert
// tiles of pixels; of others and of tiny ones, blocks of pixels are float32 copies that stay in a core's cache.
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

  bool IsPlanes() const { return channel != 1 && channels > 1; }

  // Calls runs(HalfRuns, address) or planes(HalfPlanes, address) for `count` pixels of a line.
  template <class Runs, class Planes>
  void Visit(int64_t image, int64_t line, int64_t first, int64_t count, const Runs& runs, const Planes& planes) const {
    char* at = data + (image * batch + line * row + first * column) * 2;
    const auto size = static_cast<std::size_t>(channels), pixels = static_cast<std::size_t>(count);
    if (IsPlanes()) {
      planes(HalfPlanes{size, pixels, channel}, at);
    } else {
      runs(column == channels ? HalfRuns{1, size * pixels} : HalfRuns{pixels, size, column}, at);
    }
  }

  // The same runs of each channel for the pixels [first, last) of all images, which have `size` each.
  PlaneRuns Runs(int64_t images, int64_t size, int64_t first, int64_t last) const {
    const int64_t end = (images - 1) * batch + (channels - 1) * channel + size;
    PlaneRuns found{type, data, data + end * 2, channel, {}};
    for (int64_t at = first, count; at < last; at += count) {
      count = std::min(last - at, size - at % size);
      found.runs.push_back({at / size * batch + at % size, static_cast<int>(count)});
    }
    return found;
  }
};

// One tap and one image of one row. Columns are those of x and y.
Convolution OneRow(int64_t in_channels, int64_t out_channels, int64_t columns) {
  Convolution conv{};
  conv.batch = conv.in_height = conv.out_height = 1;
  conv.taps_h = conv.taps_w = conv.stride_h = conv.stride_w = conv.dilation_h = conv.dilation_w = 1;
  conv.in_channels = Narrow(in_channels, "a number of channels");
  conv.out_channels = Narrow(out_channels, "a number of channels");
  conv.in_width = conv.out_width = Narrow(columns, "a number of columns");
  conv.x_channel = conv.y_channel = 1, conv.x_column = in_channels, conv.y_column = out_channels;
  return conv;
}

// A layer and its pixels, blocks of which are copied to float32.
struct Layer {
  int64_t in_channels, out_channels, images, size;  // size: pixels of an image
  const float* bias;
  Epilogue<float> epilogue;
  const SchemeKernels& kernels = *FindPointwise(TheSet());

  // Calls body(first, last, scratch) for blocks of pixels whose copies stay in L2. They begin at multiples of a vector.
  template <class Body>
  void ForBlocks(const Body& body) const {
    constexpr int64_t kUnit = 16;
    const int64_t room = static_cast<int64_t>(L2Bytes() / 4 / sizeof(float)) / (in_channels + out_channels);
    const int64_t pixels = images * size, units = (pixels + kUnit - 1) / kUnit;
    const int64_t most = std::clamp<int64_t>(room / kUnit, 2, 64);
    // Not more for more threads: blocks of tiny elements are scaled, and results must not depend on the threads.
    const int64_t blocks = (units + most - 1) / most;
    TheRuntime().parallel_for(blocks, [&](int64_t begin, int64_t end) {
      static thread_local Scratch scratch;
      for (int64_t block = begin; block < end; block++) {
        const int64_t first = units * block / blocks * kUnit, last = units * (block + 1) / blocks * kUnit;
        body(first, std::min(last, pixels), scratch);
      }
    });
  }
};

// Sums of tiny operands become 2^-exponent sums + bias, activated. A row has one bias (row_bias), or one for each sum.
void FinishTiny(Convolution& conv, int exponent, int64_t rows, int64_t count, bool row_bias) {
  for (int64_t i = 0; i < rows; i++) {
    float* row = conv.y + i * conv.y_column;
    Rescale(row, count, -exponent);
    const float* bias = conv.bias == nullptr || !row_bias ? conv.bias : conv.bias + i;
    Finish({row, 1, bias, row_bias ? 0 : 1, nullptr, row, 1}, count, conv.epilogue);
  }
  conv.bias = nullptr, conv.epilogue = {};
}

// A matrix in half precision whose rows or columns are contiguous, in float32 by rows. Times 2^exponent if it is tiny:
// returns the exponent.
int WidenRows(const View& matrix, float* target) {
  constexpr int64_t kRows = 16;
  const Element type = ElementOf(matrix);
  const int64_t rows = matrix.size(0), columns = matrix.size(1), row = matrix.stride(0), column = matrix.stride(1);
  const char* data = static_cast<const char*>(matrix.data());
  Require(column == 1 || row == 1, "the rows or the columns of the weight are contiguous");
  TheRuntime().parallel_for((rows + kRows - 1) / kRows, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kRows, count = std::min(end * kRows, rows) - first;
    const auto length = static_cast<std::size_t>(columns), many = static_cast<std::size_t>(count);
    const char* from = data + first * row * 2;
    if (column == 1) {
      Widen(TheSet(), type, {many, length, row}, from, target + first * columns);
    } else {
      WidenPlanes(TheSet(), type, {length, many, column}, from, target + first * columns);
    }
  });
  return Normalise(target, rows * columns);
}

// A dense weight in half precision as the kernels take it for pixels, times 2^exponent if it is tiny.
const float* Pack(const Layer& layer, const View& weight, Scratch& scratch, int& exponent) {
  const int64_t rows = layer.out_channels, columns = layer.in_channels;
  Require(weight.size(0) == rows && weight.size(1) == columns, "the weight does not fit");
  const auto has = [&](int dim, int64_t stride) { return weight.size(dim) == 1 || weight.stride(dim) == stride; };
  const bool by_rows = has(1, 1) && has(0, columns);
  Require(weight.numel() == rows * columns && (by_rows || (has(0, 1) && has(1, rows))), "a weight is 1x1 and dense");
  Convolution conv = OneRow(columns, rows, 1);
  const std::size_t size = layer.kernels.weights_size(conv), count = static_cast<std::size_t>(rows * columns);
  float* packed = scratch.Get(size + count);
  float* wide = packed + size;
  Widen(TheSet(), ElementOf(weight), {1, count}, weight.data(), wide);
  exponent = Normalise(wide, rows * columns);
  conv.w = wide, conv.w_out = by_rows ? columns : 1, conv.w_in = by_rows ? 1 : rows, conv.w_row = conv.w_column = 1;
  layer.kernels.transform_weights(conv, packed, TheRuntime());
  return packed;
}

// Both tensors are planes. `weights`: [output channel][input channel].
void RunPlanes(const Layer& layer, const Pixels& from, const Pixels& to, const float* weights, int exponent) {
  const HalfKernels& planes = *FindHalf(TheSet());
  layer.ForBlocks([&](int64_t first, int64_t last, Scratch& scratch) {
    Convolution conv = OneRow(layer.in_channels, last - first, layer.out_channels);
    const std::size_t packed = layer.kernels.weights_size(conv);
    conv.y_column = (last - first + 15) / 16 * 16 + 16;
    float* memory = scratch.Get(packed + static_cast<std::size_t>(layer.out_channels * conv.y_column));
    conv.x = weights, conv.y = memory + packed;
    const int tiny = exponent + planes.pack(conv, from.Runs(layer.images, layer.size, first, last), memory);
    layer.kernels.run(conv, {}, memory, OneThread());
    conv.bias = layer.bias, conv.epilogue = layer.epilogue;
    if (tiny > 0) FinishTiny(conv, tiny, layer.out_channels, last - first, true);
    planes.round(conv, to.Runs(layer.images, layer.size, first, last));
  });
}

// Channels are contiguous and nothing is tiny. Lines have `width` pixels.
void RunInPlace(const Layer& layer, const Pixels& from, const Pixels& to, int64_t width, const float* weights) {
  Convolution conv = OneRow(from.channels, to.channels, width);
  conv.batch = Narrow(layer.images, "a number of images");
  conv.in_height = conv.out_height = Narrow(layer.size / width, "a number of rows");
  conv.x = reinterpret_cast<const float*>(from.data), conv.y = reinterpret_cast<float*>(to.data);
  conv.x_batch = from.batch, conv.x_row = from.row, conv.x_column = from.column;
  conv.y_batch = to.batch, conv.y_row = to.row, conv.y_column = to.column;
  conv.bias = layer.bias, conv.epilogue = layer.epilogue;
  FindHalf(TheSet())->run(conv, from.type, weights, TheRuntime());
}

// Tensors of any layout, in lines of `width`. `weights`: packed.
void RunPixels(const Layer& layer, const Pixels& from, const Pixels& to, int64_t width, const float* weights,
               int exponent) {
  const int64_t lines = layer.size / width;
  layer.ForBlocks([&](int64_t first, int64_t last, Scratch& scratch) {
    float* memory = scratch.Get(static_cast<std::size_t>((last - first) * (from.channels + to.channels)));
    Convolution conv = OneRow(from.channels, to.channels, last - first);
    float* result = memory + (last - first) * from.channels;
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
    const int tiny = exponent + Normalise(memory, (last - first) * from.channels);
    if (tiny == 0) conv.bias = layer.bias, conv.epilogue = layer.epilogue;
    layer.kernels.run(conv, {}, weights, OneThread());
    conv.bias = layer.bias, conv.epilogue = layer.epilogue;
    if (tiny > 0) FinishTiny(conv, tiny, last - first, to.channels, false);
    visit(
        to, [&](const HalfRuns& r, char* half, float* copy) { Round(TheSet(), to.type, r, copy, half); },
        [&](const HalfPlanes& p, char* half, float* copy) { RoundPlanes(TheSet(), to.type, p, copy, half); });
  });
}

// `weight`: packed by the pointwise kernels' transform_weights for one image of one pixel; [output][input channel][1][1] in
// half precision, which is packed here; or, if both tensors are planes, [output channel][input channel] in float32 or half
// precision. Strides are those of x.
void PixelsOp(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& y,
              int64_t stride_h, int64_t stride_w, int64_t activation, double a, double b) {
  const View from_view(x), to_view(y);
  Require(x.dim() == 4 && y.dim() == 4 && x.size(0) == y.size(0), "tensors have four dimensions and equal batches");
  const Pixels from(from_view, stride_h, stride_w), to(to_view, 1, 1);
  const int64_t rows = y.size(2), columns = y.size(3);
  Require((rows - 1) * stride_h < x.size(2) && (columns - 1) * stride_w < x.size(3), "the output is too large");
  const bool dense = from.row == columns * from.column && to.row == columns * to.column;
  const Layer layer{from.channels,
                    to.channels,
                    x.size(0),
                    rows * columns,
                    bias.has_value() ? View(*bias).const_data_ptr<float>() : nullptr,
                    ReadEpilogue<float>(std::nullopt, activation, a, b, to_view)};
  const FloatControl flush;
  static thread_local Scratch copies;
  if (weight.dim() == 2) {
    const View given(weight);
    Require(dense && from.column == 1 && to.column == 1, "planes of pixels are dense");
    Require(given.size(0) == to.channels && given.size(1) == from.channels, "the weight does not fit");
    if (IsHalf(given)) {
      float* wide = copies.Get(static_cast<std::size_t>(given.numel()));
      const int exponent = WidenRows(given, wide);
      return RunPlanes(layer, from, to, wide, exponent);
    }
    Require(weight.is_contiguous(), "a weight in float32 is contiguous");
    const Operand rows_of_w(given, copies);
    return RunPlanes(layer, from, to, rows_of_w.view.const_data_ptr<float>(), rows_of_w.exponent);
  }
  const int64_t width = dense ? layer.size : columns;
  const auto run = [&](const float* packed, int exponent) {
    const bool in_place = exponent == 0 && !from.IsPlanes() && !to.IsPlanes() && !MayBeTiny(from_view);
    if (in_place) return RunInPlace(layer, from, to, width, packed);
    RunPixels(layer, from, to, width, packed, exponent);
  };
  if (weight.dim() == 4) {
    int exponent;
    const float* packed = Pack(layer, weight, copies, exponent);
    return run(packed, exponent);
  }
  const Operand packed(weight, copies);
  const std::size_t size = layer.kernels.weights_size(OneRow(from.channels, to.channels, 1));
  Require(static_cast<std::size_t>(weight.numel()) == size, "the packed weights do not fit");
  run(packed.view.const_data_ptr<float>(), packed.exponent);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  m.def(
      "pixels(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) y, int stride_h, int stride_w, int activation=0, "
      "float activation_a=0, float activation_b=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("pixels", TORCH_BOX(&PixelsOp));
}

}  // namespace polyconv
