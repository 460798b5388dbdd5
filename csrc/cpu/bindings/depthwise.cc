// Operators of the depthwise kernels (depthwise/depthwise.h).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/denormals.h"
#include "bindings/forward.h"
#include "bindings/half.h"
#include "bindings/tensors.h"
#include "common/memory.h"
#include "depthwise/depthwise.h"

namespace polyconv {
namespace {

using AxisOf = DepthwiseAxis (*)(int source, int target, int taps, int stride, int dilation, int before);

void RequireDepthwise(const View& x, const View& w, const View& y, const Geometry& geometry) {
  Require(x.dim() == 4 && w.dim() == 4 && y.dim() == 4, "tensors have four dimensions");
  Require(x.size(0) == y.size(0), "batch sizes differ");
  Require(x.size(1) == geometry.groups && w.size(1) == 1, "a depthwise convolution has one input channel per group");
  Require(w.size(0) == y.size(1) && y.size(1) % geometry.groups == 0, "the weight does not fit the channels");
  RequireCountable(x, w, y, geometry);
}

// Sizes and strides of a correlation that reads `x` and writes `y`. For a weight gradient, `y` is dy and is read too.
DepthwiseShape ShapeOf(const View& x, const View& w, const View& y, const Geometry& geometry, AxisOf axis_of) {
  const auto axis = [&](int dim, int stride, int dilation, int before) {
    return axis_of(Extent(x, dim), Extent(y, dim), Extent(w, dim), stride, dilation, before);
  };
  DepthwiseShape s{};
  s.batch = Extent(x, 0);
  s.groups = geometry.groups;
  s.height = axis(2, geometry.stride_h, geometry.dilation_h, geometry.top);
  s.width = axis(3, geometry.stride_w, geometry.dilation_w, geometry.left);
  s.border = geometry.border;
  s.x_batch = x.stride(0), s.x_channel = x.stride(1), s.x_row = x.stride(2), s.x_column = x.stride(3);
  s.y_batch = y.stride(0), s.y_channel = y.stride(1), s.y_row = y.stride(2), s.y_column = y.stride(3);
  s.w_channel = w.stride(0), s.w_row = w.stride(2), s.w_column = w.stride(3);
  return s;
}

// A correlation from `x` to `y`.
DepthwiseCorrelation Describe(const View& x, const View& w, const View& y, const Geometry& geometry, AxisOf axis_of) {
  DepthwiseCorrelation c{ShapeOf(x, w, y, geometry, axis_of)};
  c.x = x.const_data_ptr<float>();
  c.w = w.const_data_ptr<float>();
  c.y = y.mutable_data_ptr<float>();
  c.reads = Extent(x, 1) / c.groups;
  c.writes = Extent(y, 1) / c.groups;
  c.x_group = c.reads * c.x_channel;
  AdviseHugePages(c.y, static_cast<std::size_t>(y.numel()) * sizeof(float));
  return c;
}

void SetBias(DepthwiseCorrelation& conv, const std::optional<View>& bias) {
  if (!bias.has_value()) return;
  conv.bias = bias->const_data_ptr<float>();
  conv.bias_step = bias->stride(0);
}

// Calls run(image, first, count, memory) for blocks of groups of an image whose float32 copies, `floats` per group, stay
// in a core's cache. Blocks depend on the sizes only. Each runs in one thread.
template <class Run>
void ForEachBlock(int64_t images, int64_t groups, int64_t together, std::size_t floats, const Run& run) {
  constexpr std::size_t kFloatsOfABlock = std::size_t{1} << 16;
  const int64_t wanted = static_cast<int64_t>(std::max<std::size_t>(1, kFloatsOfABlock / floats));
  const int64_t size = std::min(groups, (wanted + together - 1) / together * together);
  const int64_t blocks = (groups + size - 1) / size;
  TheRuntime().parallel_for(images * blocks, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* memory = scratch.Get(floats * static_cast<std::size_t>(size));
    for (int64_t task = begin; task < end; task++) {
      const int64_t first = task % blocks * size;
      run(task / blocks, first, std::min(size, groups - first), memory);
    }
  });
}

const Runtime& OneThread() {
  static const Runtime runtime{[](int64_t count, const std::function<void(int64_t, int64_t)>& body) { body(0, count); },
                               1};
  return runtime;
}

void SetX(DepthwiseShape& s, const HalfImages::Strides& strides, std::ptrdiff_t batch) {
  s.x_batch = batch, s.x_channel = strides.channel, s.x_row = strides.row, s.x_column = strides.column;
}
void SetY(DepthwiseShape& s, const HalfImages::Strides& strides, std::ptrdiff_t batch) {
  s.y_batch = batch, s.y_channel = strides.channel, s.y_row = strides.row, s.y_column = strides.column;
}

// A correlation of half-precision tensors.
void CorrelateHalf(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
                   const Geometry& geometry, AxisOf axis_of, const std::optional<Tensor>& residual,
                   const Epilogue<float>& epilogue) {
  const HalfImages from(x), to(y), added(residual.has_value() ? *residual : y);
  HalfElements weights(w), biases(bias.has_value() ? *bias : w);
  DepthwiseCorrelation whole{ShapeOf(x, w, y, geometry, axis_of)};
  whole.reads = Extent(x, 1) / whole.groups;
  whole.writes = Extent(y, 1) / whole.groups;
  whole.batch = 1;
  whole.w = weights.Widened(w);
  whole.bias = bias.has_value() ? biases.Widened(*bias) : nullptr;
  whole.bias_step = 1;
  whole.epilogue = epilogue;
  const std::size_t read = from.SizeOf(whole.reads), written = to.SizeOf(whole.writes);
  const std::size_t kept = residual.has_value() ? written : 0;
  ForEachBlock(x.size(0), whole.groups, std::max(from.together(), to.together()), read + written + kept,
               [&](int64_t image, int64_t first, int64_t groups, float* memory) {
                 const auto count = static_cast<std::size_t>(groups);
                 DepthwiseCorrelation block = whole;
                 float* y_copy = memory + count * read;
                 float* residual_copy = y_copy + count * written;
                 block.groups = static_cast<int>(groups);
                 block.x = memory, block.y = y_copy;
                 block.w += first * whole.reads * whole.writes * whole.w_channel;
                 if (block.bias != nullptr) block.bias += first * whole.writes;
                 SetX(block, from.StridesOf(groups * whole.reads), 0);
                 SetY(block, to.StridesOf(groups * whole.writes), 0);
                 block.x_group = block.reads * block.x_channel;
                 from.WidenTo(memory, image, first * whole.reads, groups * whole.reads);
                 if (kept > 0) {
                   added.WidenTo(residual_copy, image, first * whole.writes, groups * whole.writes);
                   block.epilogue.residual = residual_copy;
                 }
                 RunDepthwise(TheSet(), block, OneThread());
                 to.RoundFrom(y_copy, image, first * whole.writes, groups * whole.writes);
               });
}

// Computes the weight gradient of each image in float32, and adds these gradients in double.
void WeightGradientHalf(const Tensor& x, const Tensor& dy, const Tensor& dw, const std::optional<Tensor>& db,
                        const Geometry& geometry) {
  constexpr int64_t kMostParts = 64;
  const HalfImages from(x), to(dy);
  HalfElements weights(dw), biases(db.has_value() ? *db : dw);
  DepthwiseWeightGradient whole{ShapeOf(x, dw, dy, geometry, &ForwardAxis)};
  whole.multiplier = Extent(dy, 1) / whole.groups;
  whole.bias_step = 1;
  const int64_t images = whole.batch, together = (images + kMostParts - 1) / kMostParts;
  const int64_t parts = (images + together - 1) / together;
  const std::size_t size = weights.size(), outputs = static_cast<std::size_t>(dy.size(1)), part = size + outputs;
  std::vector<float> sums(part * static_cast<std::size_t>(parts));  // [part][dw, db]
  const std::size_t read = together * from.SizeOf(1), other = together * to.SizeOf(whole.multiplier);
  ForEachBlock(parts, whole.groups, std::max(from.together(), to.together()), read + other,
               [&](int64_t number, int64_t first, int64_t groups, float* memory) {
                 DepthwiseWeightGradient block = whole;
                 float* dy_copy = memory + static_cast<std::size_t>(groups) * read;
                 const int64_t channels = groups * whole.multiplier, first_image = number * together;
                 block.batch = static_cast<int>(std::min(together, images - first_image));
                 block.groups = static_cast<int>(groups);
                 block.x = memory, block.dy = dy_copy;
                 block.dw = sums.data() + number * part + first * whole.multiplier * whole.w_channel;
                 if (db.has_value()) block.db = sums.data() + number * part + size + first * whole.multiplier;
                 SetX(block, from.StridesOf(groups), static_cast<std::ptrdiff_t>(from.SizeOf(groups)));
                 SetY(block, to.StridesOf(channels), static_cast<std::ptrdiff_t>(to.SizeOf(channels)));
                 for (int64_t image = 0; image < block.batch; image++) {
                   from.WidenTo(memory + image * block.x_batch, first_image + image, first, groups);
                   to.WidenTo(dy_copy + image * block.y_batch, first_image + image, first * whole.multiplier, channels);
                 }
                 RunDepthwise(TheSet(), block, OneThread());
               });
  const auto add_up = [&](HalfElements& total, std::size_t offset, const Tensor& target) {
    for (std::size_t i = 0; i < total.size(); i++) {
      double sum = 0.0;
      for (int64_t number = 0; number < parts; number++) sum += sums[number * part + offset + i];
      total.data()[i] = static_cast<float>(sum);
    }
    total.RoundTo(target);
  };
  add_up(weights, 0, dw);
  if (db.has_value()) add_up(biases, size, *db);
}

void ForwardOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
               const std::vector<int64_t>& geometry, const std::optional<Tensor>& residual, int64_t activation,
               double a, double b) {
  const Geometry read = ReadGeometry(geometry);
  if (IsHalf(x)) {
    RequireDepthwise(x, w, y, read);
    RequireResidual(residual, y);
    const auto epilogue = ReadEpilogue<float>(std::nullopt, activation, a, b, y);
    if (y.numel() > 0) CorrelateHalf(x, w, bias, y, read, &ForwardAxis, residual, epilogue);
    return;
  }
  DepthwiseForward(x, w, bias, y, read, ReadEpilogue<float>(residual, activation, a, b, y));
}

// Slices of a depthwise convolution of volumes, each with all of its taps along the depth: output slice n of channel g
// sums over the slices x[n][g][t], which are views and overlap. w: [channel][tap along the depth][row][column].
void SlicesOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
              const std::vector<int64_t>& geometry_numbers) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  Require(x.dim() == 5 && w.dim() == 4 && y.dim() == 4, "slices have five dimensions, weights and outputs four");
  Require(x.size(0) == y.size(0) && x.size(1) == y.size(1) && w.size(0) == y.size(1) && w.size(1) == x.size(2),
          "the sizes of slices, weights and outputs differ");
  Require(w.stride(0) == w.size(1) * w.stride(1), "the taps of all channels are equally far apart");
  Require(x.scalar_type() == y.scalar_type() && w.scalar_type() == y.scalar_type() && !IsHalf(y),
          "the tensors are of float32");
  Require(geometry.border == Border::kZeros, "slices know only a border of zeros");
  if (y.numel() == 0) return;
  const FloatControl flush;
  const auto axis = [&](int dim, int stride, int dilation, int before) {
    return ForwardAxis(Extent(x, dim + 1), Extent(y, dim), Extent(w, dim), stride, dilation, before);
  };
  DepthwiseCorrelation c{};
  c.batch = Extent(y, 0), c.groups = Extent(y, 1), c.reads = Extent(x, 2), c.writes = 1;
  c.height = axis(2, geometry.stride_h, geometry.dilation_h, geometry.top);
  c.width = axis(3, geometry.stride_w, geometry.dilation_w, geometry.left);
  c.border = geometry.border;
  c.x_batch = x.stride(0), c.x_group = x.stride(1), c.x_row = x.stride(3), c.x_column = x.stride(4);
  c.x_channel = c.reads > 1 ? x.stride(2) : x.stride(1);
  c.y_batch = y.stride(0), c.y_channel = y.stride(1), c.y_row = y.stride(2), c.y_column = y.stride(3);
  c.w_channel = w.stride(1), c.w_row = w.stride(2), c.w_column = w.stride(3);
  c.x = x.const_data_ptr<float>(), c.w = w.const_data_ptr<float>(), c.y = y.mutable_data_ptr<float>();
  if (bias.has_value()) c.bias = bias->const_data_ptr<float>(), c.bias_step = bias->stride(0);
  RunDepthwise(TheSet(), c, TheRuntime());
}

// `bias`: of a transposed convolution.
void InputGradientOp(const Tensor& dy, const Tensor& w, const Tensor& dx, const std::vector<int64_t>& geometry_numbers,
                     const std::optional<Tensor>& bias) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  RequireDepthwise(dx, w, dy, geometry);
  Require(geometry.border == Border::kZeros, "the depthwise input gradient knows only a border of zeros");
  if (dx.numel() == 0) return;
  if (IsHalf(dx)) return CorrelateHalf(dy, w, bias, dx, geometry, &GradientAxis, std::nullopt, {});
  const FloatControl flush;
  const Operands of(dy, w);
  DepthwiseCorrelation conv = Describe(of.a.view, of.b.view, dx, geometry, &GradientAxis);
  if (of.exponent() > 0) {
    return ForwardOfTiny(dx, -of.exponent(), bias, {},
                         [&](const View&) { RunDepthwise(TheSet(), conv, TheRuntime()); });
  }
  SetBias(conv, bias);
  RunDepthwise(TheSet(), conv, TheRuntime());
}

void WeightGradientOp(const Tensor& x, const Tensor& dy, const Tensor& dw, const std::optional<Tensor>& db,
                      const std::vector<int64_t>& geometry_numbers) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  RequireDepthwise(x, dw, dy, geometry);
  if (IsHalf(x)) return WeightGradientHalf(x, dy, dw, db, geometry);
  const FloatControl flush;
  const Operands of(x, dy);
  DepthwiseWeightGradient g{ShapeOf(of.a.view, dw, of.b.view, geometry, &ForwardAxis)};
  g.x = of.a.view.const_data_ptr<float>();
  g.dy = of.b.view.const_data_ptr<float>();
  g.dw = dw.mutable_data_ptr<float>();
  g.multiplier = Extent(dy, 1) / g.groups;
  if (db.has_value()) {
    g.db = db->mutable_data_ptr<float>();
    g.bias_step = db->stride(0);
  }
  RunDepthwise(TheSet(), g, TheRuntime());
  Rescale(dw, -of.exponent());
  if (db.has_value()) Rescale(*db, -of.b.exponent);
}

// Longest sequential sum in `depthwise_wgrad`, for the error model. sizes: x (4), dw (4), rows and columns of dy.
int64_t LongestSumOp(const std::vector<int64_t>& sizes, const std::vector<int64_t>& geometry_numbers) {
  Require(sizes.size() == 10, "four sizes of x, four of dw, rows and columns of dy");
  Require(*std::min_element(sizes.begin(), sizes.end()) > 0, "no size is zero");
  const Geometry geometry = ReadGeometry(geometry_numbers);
  const auto at = [&](int i) { return Narrow(sizes[i], "an extent of a tensor"); };
  DepthwiseWeightGradient g{};
  g.height = {at(2), at(8), geometry.stride_h, geometry.dilation_h};
  g.width = {at(3), at(9), geometry.stride_w, geometry.dilation_w};
  return LongestDepthwiseSum(TheSet(), g);
}

}  // namespace

void DepthwiseForward(const View& x, const View& w, const std::optional<View>& bias, const View& y,
                      const Geometry& geometry, const Epilogue<float>& epilogue) {
  const FloatControl flush;
  const Operands of(x, w);
  if (of.exponent() > 0) {
    return ForwardOfTiny(y, -of.exponent(), bias, epilogue, [&](const View& sum) {
      DepthwiseForward(of.a.view, of.b.view, std::nullopt, sum, geometry, {});
    });
  }
  RequireDepthwise(x, w, y, geometry);
  DepthwiseCorrelation conv = Describe(x, w, y, geometry, &ForwardAxis);
  conv.epilogue = epilogue;
  SetBias(conv, bias);
  if (y.numel() > 0) RunDepthwise(TheSet(), conv, TheRuntime());
}

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  // geometry: stride_h, stride_w, top, left, dilation_h, dilation_w, groups, border
  m.def(
      "depthwise_fprop(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] geometry, "
      "Tensor? residual=None, int activation=0, float activation_a=0, float activation_b=0) -> ()");
  m.def("depthwise_dgrad(Tensor dy, Tensor w, Tensor(a!) dx, int[] geometry, Tensor? bias=None) -> ()");
  m.def("depthwise_slices(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] geometry) -> ()");
  m.def("depthwise_longest_sum(int[] sizes, int[] geometry) -> int");
  m.def("depthwise_wgrad(Tensor x, Tensor dy, Tensor(a!) dw, Tensor(b!)? db, int[] geometry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("depthwise_fprop", TORCH_BOX(&ForwardOp));
  m.impl("depthwise_dgrad", TORCH_BOX(&InputGradientOp));
  m.impl("depthwise_slices", TORCH_BOX(&SlicesOp));
  m.impl("depthwise_longest_sum", TORCH_BOX(&LongestSumOp));
  m.impl("depthwise_wgrad", TORCH_BOX(&WeightGradientOp));
}

}  // namespace polyconv
