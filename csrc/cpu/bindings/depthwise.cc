// Operators of the depthwise kernels (depthwise/depthwise.h).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/denormals.h"
#include "bindings/forward.h"
#include "bindings/tensors.h"
#include "common/memory.h"
#include "depthwise/depthwise.h"

namespace polyconv {
namespace {

using AxisOf = DepthwiseAxis (*)(int source, int target, int taps, int stride, int dilation, int before);

void RequireDepthwise(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry) {
  Require(x.dim() == 4 && w.dim() == 4 && y.dim() == 4, "tensors have four dimensions");
  Require(x.size(0) == y.size(0), "batch sizes differ");
  Require(x.size(1) == geometry.groups && w.size(1) == 1, "a depthwise convolution has one input channel per group");
  Require(w.size(0) == y.size(1) && y.size(1) % geometry.groups == 0, "the weight does not fit the channels");
  RequireCountable(x, w, y, geometry);
}

// Sizes and strides of a correlation that reads `x` and writes `y`. For a weight gradient, `y` is dy and is read too.
DepthwiseShape ShapeOf(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry, AxisOf axis_of) {
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
DepthwiseCorrelation Describe(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry,
                              AxisOf axis_of) {
  DepthwiseCorrelation c{ShapeOf(x, w, y, geometry, axis_of)};
  c.x = x.const_data_ptr<float>();
  c.w = w.const_data_ptr<float>();
  c.y = y.mutable_data_ptr<float>();
  c.reads = Extent(x, 1) / c.groups;
  c.writes = Extent(y, 1) / c.groups;
  AdviseHugePages(c.y, static_cast<std::size_t>(y.numel()) * sizeof(float));
  return c;
}

void ForwardOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
               const std::vector<int64_t>& geometry, const std::optional<Tensor>& residual, int64_t activation,
               double a, double b) {
  DepthwiseForward(x, w, bias, y, geometry, ReadEpilogue<float>(residual, activation, a, b, y));
}

void InputGradientOp(const Tensor& dy, const Tensor& w, const Tensor& dx,
                     const std::vector<int64_t>& geometry_numbers) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  RequireDepthwise(dx, w, dy, geometry);
  Require(geometry.border == Border::kZeros, "the depthwise input gradient knows only a border of zeros");
  if (dx.numel() == 0) return;
  const FloatControl flush;
  const Operands of(dy, w);
  RunDepthwise(TheSet(), Describe(of.a.tensor, of.b.tensor, dx, geometry, &GradientAxis), TheRuntime());
  Rescale(dx, -of.exponent());
}

void WeightGradientOp(const Tensor& x, const Tensor& dy, const Tensor& dw, const std::optional<Tensor>& db,
                      const std::vector<int64_t>& geometry_numbers) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  RequireDepthwise(x, dw, dy, geometry);
  const FloatControl flush;
  const Operands of(x, dy);
  DepthwiseWeightGradient g{ShapeOf(of.a.tensor, dw, of.b.tensor, geometry, &ForwardAxis)};
  g.x = of.a.tensor.const_data_ptr<float>();
  g.dy = of.b.tensor.const_data_ptr<float>();
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

void DepthwiseForward(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
                      const std::vector<int64_t>& geometry_numbers, const Epilogue<float>& epilogue) {
  const FloatControl flush;
  const Operands of(x, w);
  if (of.exponent() > 0) {
    return ForwardOfTiny(y, -of.exponent(), bias, epilogue, [&](const Tensor& sum) {
      DepthwiseForward(of.a.tensor, of.b.tensor, std::nullopt, sum, geometry_numbers, {});
    });
  }
  const Geometry geometry = ReadGeometry(geometry_numbers);
  RequireDepthwise(x, w, y, geometry);
  DepthwiseCorrelation conv = Describe(x, w, y, geometry, &ForwardAxis);
  conv.epilogue = epilogue;
  if (bias.has_value()) {
    conv.bias = bias->const_data_ptr<float>();
    conv.bias_step = bias->stride(0);
  }
  if (y.numel() > 0) RunDepthwise(TheSet(), conv, TheRuntime());
}

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  // geometry: stride_h, stride_w, top, left, dilation_h, dilation_w, groups, border
  m.def(
      "depthwise_fprop(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] geometry, "
      "Tensor? residual=None, int activation=0, float activation_a=0, float activation_b=0) -> ()");
  m.def("depthwise_dgrad(Tensor dy, Tensor w, Tensor(a!) dx, int[] geometry) -> ()");
  m.def("depthwise_longest_sum(int[] sizes, int[] geometry) -> int");
  m.def("depthwise_wgrad(Tensor x, Tensor dy, Tensor(a!) dw, Tensor(b!)? db, int[] geometry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("depthwise_fprop", TORCH_BOX(&ForwardOp));
  m.impl("depthwise_dgrad", TORCH_BOX(&InputGradientOp));
  m.impl("depthwise_longest_sum", TORCH_BOX(&LongestSumOp));
  m.impl("depthwise_wgrad", TORCH_BOX(&WeightGradientOp));
}

}  // namespace polyconv
