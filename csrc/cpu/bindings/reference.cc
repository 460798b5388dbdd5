// Operators of the reference kernels (reference/reference.h).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "bindings/tensors.h"
#include "reference/reference.h"

namespace polyconv {
namespace {

using torch::headeronly::ScalarType;

PlainShape DescribePlain(const Tensor& x, const Tensor& w, const Tensor& y, const std::optional<Tensor>& bias,
                         const std::vector<int64_t>& geometry_numbers) {
  Require(x.scalar_type() == w.scalar_type() && x.scalar_type() == y.scalar_type(), "element types differ");
  const Geometry geometry = ReadGeometry(geometry_numbers);
  PlainShape s{ShapeOf(x, w, y, geometry), geometry.groups, 0};
  RequireCountable(x, w, y, geometry);
  Require(w.size(0) == y.size(1) && w.size(1) == s.in_channels, "the weight does not fit the channels");
  if (bias.has_value()) {
    Require(bias->scalar_type() == x.scalar_type(), "element types differ");
    s.bias_step = bias->stride(0);
  }
  return s;
}

// Calls fn.template operator()<T>() for the element type of a tensor.
template <class Fn>
void WithElement(const Tensor& tensor, const Fn& fn) {
  if (tensor.scalar_type() == ScalarType::Double) return fn.template operator()<double>();
  Require(tensor.scalar_type() == ScalarType::Float, "elements are float32 or float64");
  fn.template operator()<float>();
}

void ForwardOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
               const std::vector<int64_t>& geometry, const std::optional<Tensor>& residual, int64_t activation,
               double a, double b) {
  const PlainShape shape = DescribePlain(x, w, y, bias, geometry);
  WithElement(x, [&]<class T>() {
    const T* start = bias.has_value() ? bias->const_data_ptr<T>() : nullptr;
    FindPlainKernels<T>(TheSet()).forward(shape, x.const_data_ptr<T>(), w.const_data_ptr<T>(), start,
                                          ReadEpilogue<T>(residual, activation, a, b, y), y.mutable_data_ptr<T>(),
                                          TheRuntime());
  });
}

void InputGradientOp(const Tensor& dy, const Tensor& w, const Tensor& dx, const std::vector<int64_t>& geometry) {
  const PlainShape shape = DescribePlain(dx, w, dy, std::nullopt, geometry);
  WithElement(dy, [&]<class T>() {
    FindPlainKernels<T>(TheSet()).input_gradient(shape, dy.const_data_ptr<T>(), w.const_data_ptr<T>(),
                                                 dx.mutable_data_ptr<T>(), TheRuntime());
  });
}

void WeightGradientOp(const Tensor& x, const Tensor& dy, const Tensor& dw, const std::optional<Tensor>& db,
                      const std::vector<int64_t>& geometry) {
  const PlainShape shape = DescribePlain(x, dw, dy, db, geometry);
  WithElement(x, [&]<class T>() {
    T* bias_gradient = db.has_value() ? db->mutable_data_ptr<T>() : nullptr;
    FindPlainKernels<T>(TheSet()).weight_gradient(shape, x.const_data_ptr<T>(), dy.const_data_ptr<T>(),
                                                  dw.mutable_data_ptr<T>(), bias_gradient, TheRuntime());
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  // geometry: stride_h, stride_w, top, left, dilation_h, dilation_w, groups, border
  m.def(
      "plain_fprop(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] geometry, "
      "Tensor? residual=None, int activation=0, float activation_a=0, float activation_b=0) -> ()");
  m.def("plain_dgrad(Tensor dy, Tensor w, Tensor(a!) dx, int[] geometry) -> ()");
  m.def("plain_wgrad(Tensor x, Tensor dy, Tensor(a!) dw, Tensor(b!)? db, int[] geometry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("plain_fprop", TORCH_BOX(&ForwardOp));
  m.impl("plain_dgrad", TORCH_BOX(&InputGradientOp));
  m.impl("plain_wgrad", TORCH_BOX(&WeightGradientOp));
}

}  // namespace polyconv
