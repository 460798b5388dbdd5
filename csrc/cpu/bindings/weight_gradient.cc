// Operators of the weight gradient, on torch's stable ABI.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/denormals.h"
#include "bindings/passes.h"
#include "bindings/tensors.h"
#include "channel_lanes/gradient.h"

namespace polyconv {
namespace {

const GradientKernels& ReadGradientPlan(const std::vector<int64_t>& numbers, const Geometry& geometry) {
  Require(numbers.size() == 1, "the plan of a weight gradient has 1 number");
  const SchemeShape& shape = SchemeAt(kGradientSchemes, numbers[0]);
  Require(shape == kDirect || (geometry.stride_h == 1 && geometry.stride_w == 1),
          "the weight gradient of a strided convolution is summed directly");
  const GradientKernels* kernels = FindGradient(TheSet(), shape);
  Require(kernels != nullptr, "a scheme that no kernels are compiled for");
  return *kernels;
}

void WriteZeroGradient(const WeightGradient& problem) {
  const Convolution& c = problem.conv;
  for (int k = 0; k < c.out_channels; k++) {
    if (problem.db != nullptr) problem.db[k] = 0.0f;
    for (int i = 0; i < c.in_channels * c.taps_h * c.taps_w; i++) {
      const int tap = i % (c.taps_h * c.taps_w);
      problem.dw[k * c.w_out + i / (c.taps_h * c.taps_w) * c.w_in + tap / c.taps_w * c.w_row +
                 tap % c.taps_w * c.w_column] = 0.0f;
    }
  }
}

// Block sizes of the sums in `weight_gradient`, for the error model. sizes: x (4), dw (4), rows and columns of dy.
std::vector<int64_t> WeightGradientBlocksOp(const std::vector<int64_t>& sizes,
                                            const std::vector<int64_t>& geometry_numbers,
                                            const std::vector<int64_t>& plan_numbers) {
  Require(sizes.size() == 10, "four sizes of x, four of dw, rows and columns of dy");
  const Geometry geometry = ReadGeometry(geometry_numbers);
  const auto at = [&](int i) { return Narrow(sizes[i], "an extent of a tensor"); };
  Convolution c{};
  c.batch = at(0), c.in_channels = at(5), c.out_channels = at(4) / geometry.groups;
  c.in_height = at(2), c.in_width = at(3), c.taps_h = at(6), c.taps_w = at(7);
  c.out_height = at(8), c.out_width = at(9);
  c.stride_h = geometry.stride_h, c.stride_w = geometry.stride_w;
  c.dilation_h = geometry.dilation_h, c.dilation_w = geometry.dilation_w;
  Require(*std::min_element(sizes.begin(), sizes.end()) > 0, "no size is zero");
  return ReadGradientPlan(plan_numbers, geometry).blocks(c);
}

}  // namespace

void WeightGradientOp(const Tensor& x, const Tensor& dy, const Tensor& dw, const std::optional<Tensor>& db,
                      const std::vector<int64_t>& geometry_numbers, const std::vector<int64_t>& plan_numbers) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  const GradientKernels& kernels = ReadGradientPlan(plan_numbers, geometry);
  const FloatControl flush;
  const Operands of(x, dy);
  const Convolution first = DescribeForward(of.a.view, dw, of.b.view, geometry);
  float* dw_data = dw.mutable_data_ptr<float>();
  Require(!db.has_value() || db->is_contiguous(), "the bias gradient is dense");
  float* db_data = db.has_value() ? db->mutable_data_ptr<float>() : nullptr;
  const Runtime runtime = TheRuntime();
  for (int group = 0; group < geometry.groups; group++) {
    const Convolution conv = OfGroup(first, group, false);
    WeightGradient problem{conv, dw_data + (conv.w - first.w), nullptr};
    if (db_data != nullptr) problem.db = db_data + group * conv.out_channels;
    if (dy.numel() == 0) {
      WriteZeroGradient(problem);
    } else {
      kernels.run(problem, runtime);
    }
  }
  Rescale(dw, -of.exponent());
  if (db.has_value()) Rescale(*db, -of.b.exponent);
}

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  // geometry as for `convolve`; plan: algorithm
  m.def("weight_gradient(Tensor x, Tensor dy, Tensor(a!) dw, Tensor(b!)? db, int[] geometry, int[] plan) -> ()");
  m.def("weight_gradient_blocks(int[] sizes, int[] geometry, int[] plan) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("weight_gradient", TORCH_BOX(&WeightGradientOp));
  m.impl("weight_gradient_blocks", TORCH_BOX(&WeightGradientBlocksOp));
}

}  // namespace polyconv
