// Operators of the depthwise kernels for signals (signals/signals.h): tensors have height 1.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "bindings/denormals.h"
#include "bindings/tensors.h"
#include "common/memory.h"
#include "signals/signals.h"

namespace polyconv {
namespace {

// Pointers to a tensor's first element; null without a tensor. The type is checked against that of `like`.
const void* DataOf(const std::optional<Tensor>& tensor, const Tensor& like) {
  if (!tensor.has_value()) return nullptr;
  Require(tensor->scalar_type() == like.scalar_type(), "the tensors have different element types");
  return tensor->const_data_ptr();
}
void* OutputOf(const std::optional<Tensor>& tensor, const Tensor& like) {
  return DataOf(tensor, like) == nullptr ? nullptr : tensor->mutable_data_ptr();
}

// Sizes and strides of a correlation that reads `x` and writes `y`.
Signal SignalOf(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry) {
  Require(x.dim() == 4 && w.dim() == 4 && y.dim() == 4, "tensors have four dimensions");
  Require(x.size(2) == 1 && w.size(2) == 1 && y.size(2) == 1, "signals have height 1");
  Require(geometry.top == 0, "signals have no rows of border");
  Require(x.size(0) == y.size(0), "batch sizes differ");
  Require(x.size(1) == geometry.groups && w.size(1) == 1, "a depthwise convolution has one input channel per group");
  Require(w.size(0) == y.size(1) && y.size(1) % geometry.groups == 0, "the weight does not fit the channels");
  RequireCountable(x, w, y, geometry);
  Signal s{};
  s.element = ElementOf(x);
  s.batch = Extent(x, 0), s.groups = geometry.groups, s.multiplier = Extent(y, 1) / geometry.groups;
  s.source = Extent(x, 3), s.target = Extent(y, 3);
  s.taps = Extent(w, 3), s.stride = geometry.stride_w, s.dilation = geometry.dilation_w, s.before = geometry.left;
  s.border = geometry.border;
  s.x_batch = x.stride(0), s.x_channel = x.stride(1), s.x_column = x.stride(3);
  s.y_batch = y.stride(0), s.y_channel = y.stride(1), s.y_column = y.stride(3);
  s.w_channel = w.stride(0), s.w_column = w.stride(3);
  return s;
}

// A correlation from `x` to `y`.
void Correlate(SignalCorrelation& signal, const Tensor& x, const Tensor& y) {
  Require(signal.y_column == 1 || signal.target == 1, "rows of the output are contiguous");
  signal.x = DataOf(x, x), signal.y = OutputOf(y, x);
  AdviseHugePages(signal.y, static_cast<std::size_t>(y.numel()) * y.element_size());
  const FloatControl flush;
  if (y.numel() > 0) RunSignals(TheSet(), signal, TheRuntime());
}

void ForwardOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
               const std::vector<int64_t>& geometry, const std::optional<Tensor>& residual, int64_t activation,
               double a, double b) {
  SignalCorrelation signal{SignalOf(x, w, y, ReadGeometry(geometry))};
  RequireResidual(residual, y);
  signal.epilogue = ReadEpilogue<float>(std::nullopt, activation, a, b, y);
  signal.tiny = MayBeTiny(x) || MayBeTiny(w);
  signal.residual = DataOf(residual, x);
  signal.bias = DataOf(bias, x);
  if (bias.has_value()) signal.bias_step = bias->stride(0);
  signal.w = DataOf(w, x);
  Correlate(signal, x, y);
}

void InputGradientOp(const Tensor& dy, const Tensor& w, const Tensor& dx,
                     const std::vector<int64_t>& geometry_numbers) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  Require(geometry.border == Border::kZeros, "the input gradient knows only a border of zeros");
  Require(geometry.stride_w == 1 && dy.size(1) == geometry.groups, "no stride and one output channel per group");
  SignalCorrelation signal{SignalOf(dy, w, dx, geometry)};
  signal.tiny = MayBeTiny(dy) || MayBeTiny(w);
  signal.before = (signal.taps - 1) * signal.dilation - signal.before;
  const std::ptrdiff_t last_tap = (signal.taps - 1) * signal.w_column * static_cast<std::ptrdiff_t>(w.element_size());
  signal.w = static_cast<const char*>(DataOf(w, dy)) + last_tap;
  signal.w_column = -signal.w_column;
  Correlate(signal, dy, dx);
}

void WeightGradientOp(const Tensor& x, const Tensor& dy, const Tensor& dw, const std::optional<Tensor>& db,
                      const std::vector<int64_t>& geometry) {
  SignalWeightGradient g{SignalOf(x, dw, dy, ReadGeometry(geometry))};
  g.tiny = MayBeTiny(x) || MayBeTiny(dy);
  g.x = DataOf(x, x), g.dy = DataOf(dy, x), g.dw = OutputOf(dw, x), g.db = OutputOf(db, x);
  if (db.has_value()) g.bias_step = db->stride(0);
  const FloatControl flush;
  RunSignals(TheSet(), g, TheRuntime());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  // geometry: as for depthwise_fprop
  m.def(
      "signal_fprop(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] geometry, "
      "Tensor? residual=None, int activation=0, float activation_a=0, float activation_b=0) -> ()");
  m.def("signal_dgrad(Tensor dy, Tensor w, Tensor(a!) dx, int[] geometry) -> ()");
  m.def("signal_wgrad(Tensor x, Tensor dy, Tensor(a!) dw, Tensor(b!)? db, int[] geometry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("signal_fprop", TORCH_BOX(&ForwardOp));
  m.impl("signal_dgrad", TORCH_BOX(&InputGradientOp));
  m.impl("signal_wgrad", TORCH_BOX(&WeightGradientOp));
}

}  // namespace polyconv
