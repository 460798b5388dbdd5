// The operators of the depthwise kernels: depthwise.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/memory.h"
#include "depthwise/depthwise.h"
#include "torch/tensors.h"

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

// What both correlations share: `x` is what is read and `y` what is written.
DepthwiseCorrelation Describe(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry,
                              AxisOf axis_of) {
  const auto axis = [&](int dim, int stride, int dilation, int before) {
    return axis_of(Extent(x, dim), Extent(y, dim), Extent(w, dim), stride, dilation, before);
  };
  DepthwiseCorrelation c{};
  c.x = x.const_data_ptr<float>();
  c.w = w.const_data_ptr<float>();
  c.y = y.mutable_data_ptr<float>();
  c.batch = Extent(x, 0);
  c.groups = geometry.groups;
  c.reads = Extent(x, 1) / c.groups;
  c.writes = Extent(y, 1) / c.groups;
  c.height = axis(2, geometry.stride_h, geometry.dilation_h, geometry.top);
  c.width = axis(3, geometry.stride_w, geometry.dilation_w, geometry.left);
  c.border = geometry.border;
  c.x_batch = x.stride(0), c.x_channel = x.stride(1), c.x_row = x.stride(2), c.x_column = x.stride(3);
  c.y_batch = y.stride(0), c.y_channel = y.stride(1), c.y_row = y.stride(2), c.y_column = y.stride(3);
  c.w_channel = w.stride(0), c.w_row = w.stride(2), c.w_column = w.stride(3);
  AdviseHugePages(c.y, static_cast<std::size_t>(y.numel()) * sizeof(float));
  return c;
}

void ForwardOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
               const std::vector<int64_t>& geometry_numbers, const std::optional<Tensor>& residual,
               int64_t activation) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  RequireDepthwise(x, w, y, geometry);
  DepthwiseCorrelation conv = Describe(x, w, y, geometry, &ForwardAxis);
  conv.epilogue = ReadEpilogue<float>(residual, activation, y);
  if (bias.has_value()) {
    conv.bias = bias->const_data_ptr<float>();
    conv.bias_step = bias->stride(0);
  }
  if (y.numel() > 0) RunDepthwise(TheSet(), conv, TheRuntime());
}

void InputGradientOp(const Tensor& dy, const Tensor& w, const Tensor& dx,
                     const std::vector<int64_t>& geometry_numbers) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  RequireDepthwise(dx, w, dy, geometry);
  Require(geometry.border == Border::kZeros, "the depthwise input gradient knows only a border of zeros");
  if (dx.numel() > 0) RunDepthwise(TheSet(), Describe(dy, w, dx, geometry, &GradientAxis), TheRuntime());
}

void WeightGradientOp(const Tensor& x, const Tensor& dy, const Tensor& dw, const std::optional<Tensor>& db,
                      const std::vector<int64_t>& geometry_numbers) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  RequireDepthwise(x, dw, dy, geometry);
  const auto axis = [&](int dim, int stride, int dilation, int before) {
    return ForwardAxis(Extent(x, dim), Extent(dy, dim), Extent(dw, dim), stride, dilation, before);
  };
  DepthwiseWeightGradient g{};
  g.x = x.const_data_ptr<float>();
  g.dy = dy.const_data_ptr<float>();
  g.dw = dw.mutable_data_ptr<float>();
  g.batch = Extent(x, 0);
  g.groups = geometry.groups;
  g.multiplier = Extent(dy, 1) / g.groups;
  g.height = axis(2, geometry.stride_h, geometry.dilation_h, geometry.top);
  g.width = axis(3, geometry.stride_w, geometry.dilation_w, geometry.left);
  g.border = geometry.border;
  g.x_batch = x.stride(0), g.x_channel = x.stride(1), g.x_row = x.stride(2), g.x_column = x.stride(3);
  g.y_batch = dy.stride(0), g.y_channel = dy.stride(1), g.y_row = dy.stride(2), g.y_column = dy.stride(3);
  g.w_channel = dw.stride(0), g.w_row = dw.stride(2), g.w_column = dw.stride(3);
  if (db.has_value()) {
    g.db = db->mutable_data_ptr<float>();
    g.bias_step = db->stride(0);
  }
  RunDepthwise(TheSet(), g, TheRuntime());
}

// How `depthwise_wgrad` cuts its sums, for the error model. sizes: those of x, then of dw, then rows and columns of dy.
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

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  // geometry: stride_h, stride_w, top, left, dilation_h, dilation_w, groups, border
  m.def(
      "depthwise_fprop(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] geometry, "
      "Tensor? residual=None, int activation=0) -> ()");
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
