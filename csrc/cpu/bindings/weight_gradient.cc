// Operators of the weight gradient, on torch's stable ABI.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "bindings/converted.h"
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

// An operand that kernels pack. They widen half precision; where that may be tiny, it is a scaled copy in float32.
class Packed {
 public:
  Packed(const View& given, Scratch& scratch)
      : operand_(given, scratch, IsHalf(given) ? 0 : 149), element_(ElementOf(given)), exponent_(operand_.exponent) {
    if (element_ == Element::kFloat) return;
    Require(given.dim() == 4 && Images::Takes(given) && (given.stride(1) == 1 || given.size(1) == 1),
            "tensors in half precision are dense and channels_last");
    if (given.numel() == 0 || !MayBeTiny(given)) return;
    const Images images(given);
    const int64_t channels = given.size(1), size = given.size(2) * given.size(3) * channels;
    float* copy = scratch.Get(static_cast<std::size_t>(given.numel()));
    for (int64_t i = 0; i < given.size(0); i++) images.CopyTo(copy + i * size, i, 0, channels);
    exponent_ = Normalise(copy, given.numel());
    strides_[0] = size, strides_[1] = 1, strides_[2] = given.size(3) * channels, strides_[3] = channels;
    copy_.emplace(given, strides_, copy);
    element_ = Element::kFloat;
  }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  const View& view() const { return copy_.has_value() ? *copy_ : operand_.view; }
  const float* data() const { return static_cast<const float*>(view().data()); }
  Element element() const { return element_; }
  int exponent() const { return exponent_; }

 private:
  const Operand operand_;
  Element element_;
  int exponent_;
  int64_t strides_[4];
  std::optional<View> copy_;
};

// A result: float32, or a float32 copy of a dense tensor in half precision that is rounded to it.
class Result {
 public:
  explicit Result(const View& tensor) : tensor_(tensor) {
    if (IsHalf(tensor)) copy_.emplace(tensor);
  }
  float* data() { return copy_.has_value() ? copy_->data() : tensor_.mutable_data_ptr<float>(); }
  void Finish(int exponent) {
    if (!copy_.has_value()) return Rescale(tensor_, exponent);
    Rescale(copy_->data(), static_cast<int64_t>(copy_->size()), exponent);
    copy_->RoundTo(tensor_);
  }

 private:
  const View tensor_;
  std::optional<Elements> copy_;
};

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
  const Packed input(x, Operands::scratch[0]), gradient(dy, Operands::scratch[1]);
  const bool is_half = input.element() != Element::kFloat || gradient.element() != Element::kFloat;
  Require(!is_half || (geometry.groups == 1 && geometry.border == Border::kZeros),
          "the weight gradient of half precision has one group and zeros as border");
  Require(!db.has_value() || db->is_contiguous(), "the bias gradient is dense");
  Result weights(dw);
  std::optional<Result> biases;
  if (db.has_value()) biases.emplace(*db);
  float *dw_data = weights.data(), *db_data = biases.has_value() ? biases->data() : nullptr;
  RequireCountable(input.view(), dw, gradient.view(), geometry);
  Convolution first{ShapeOf(input.view(), dw, gradient.view(), geometry)};
  first.x = input.data(), first.w = dw_data, first.y = const_cast<float*>(gradient.data());
  const Runtime runtime = TheRuntime();
  for (int group = 0; group < geometry.groups; group++) {
    const Convolution conv = OfGroup(first, group, false);
    WeightGradient problem{conv, dw_data + (conv.w - dw_data), nullptr, input.element(), gradient.element()};
    if (db_data != nullptr) problem.db = db_data + group * conv.out_channels;
    if (dy.numel() == 0) {
      WriteZeroGradient(problem);
    } else {
      kernels.run(problem, runtime);
    }
  }
  weights.Finish(-input.exponent() - gradient.exponent());
  if (biases.has_value()) biases->Finish(-gradient.exponent());
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
