// polyconv_cpu::compiled_convolution: runs one layer of a compiled graph, epilogue included, on packed weights, and
// allocates its output.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/forward.h"
#include "bindings/tensors.h"

namespace polyconv {
namespace {

// Number of the depthwise engine, which is none of enum Lanes.
constexpr int64_t kDepthwise = -1;

// Numbers of a layer, in this order.
struct Layer {
  int64_t engine, scheme;                   // see ReadPlan, or kDepthwise
  int64_t outputs, inputs, taps_h, taps_w;  // the weight's shape
  int64_t stride_h, stride_w;
  int64_t top, bottom, left, right;
  int64_t dilation_h, dilation_w;
  int64_t groups, border, activation;
  int64_t instruction_set;  // that the weights are packed for
};
constexpr std::size_t kNumbers = sizeof(Layer) / sizeof(int64_t);
static_assert(kNumbers == 18);

int64_t Outputs(int64_t extent, int64_t before, int64_t after, int64_t taps, int64_t stride, int64_t dilation) {
  const int64_t room = extent + before + after - dilation * (taps - 1) - 1;
  Require(room >= 0, "the kernel is larger than the padded image");
  return room / stride + 1;
}

using Handle = AtenTensorHandle;

struct DeleteTensor {
  void operator()(Handle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// Uninitialised tensor in channels_last.
OwnedTensor EmptyChannelsLast(int64_t batch, int64_t channels, int64_t height, int64_t width) {
  const int64_t sizes[] = {batch, channels, height, width};
  const int64_t strides[] = {height * width * channels, 1, width * channels, channels};
  static const int32_t dtype = aoti_torch_dtype_float32(), device = aoti_torch_device_type_cpu();
  Handle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(4, sizes, strides, dtype, device, 0, &made));
  return OwnedTensor(made);
}

std::optional<View> Given(const Handle* tensor) {
  return tensor == nullptr ? std::nullopt : std::optional<View>(*tensor);
}

// The operator as a C shim of Inductor's (polyconv/inductor/layer.py), but that it throws. `weights` has the layout of
// transform_weights; for depthwise layers it is the weight with channels innermost.
void CompiledConvolution(Handle x_handle, Handle weights_handle, const Handle* bias, const Handle* residual,
                         const int64_t* numbers, int64_t count, double a, double b, Handle* result) {
  Require(count == kNumbers, "a layer of a compiled graph has 18 numbers");
  Layer l;
  std::memcpy(&l, numbers, sizeof l);
  const View x(x_handle), weights(weights_handle);
  Require(l.instruction_set == static_cast<int64_t>(TheSet()),
          "the weights of a compiled layer are packed for another instruction set than the one in use; compile again");
  Require(x.dim() == 4 && x.size(1) == l.inputs * l.groups, "the input does not fit the layer");
  const Geometry geometry =
      ReadGeometry(std::array{l.stride_h, l.stride_w, l.top, l.left, l.dilation_h, l.dilation_w, l.groups, l.border});
  const int64_t height = Outputs(x.size(2), l.top, l.bottom, l.taps_h, l.stride_h, l.dilation_h);
  const int64_t width = Outputs(x.size(3), l.left, l.right, l.taps_w, l.stride_w, l.dilation_w);
  OwnedTensor made = EmptyChannelsLast(x.size(0), l.outputs, height, width);
  const View y(made.get());
  const Epilogue<float> epilogue = ReadEpilogue<float>(Given(residual), l.activation, a, b, y);
  if (l.engine == kDepthwise) {
    DepthwiseForward(x, weights, Given(bias), y, geometry, epilogue, epilogue.residual);
  } else {
    const int64_t sizes[] = {l.outputs, l.inputs, l.taps_h, l.taps_w};
    ConvolveForward(x, View(sizes, weights), Given(bias), y, geometry, std::array<int64_t, 5>{l.engine, l.scheme},
                    weights, epilogue, true);
  }
  *result = made.release();
}

Tensor CompiledConvolutionOp(const Tensor& x, const Tensor& weights, const std::optional<Tensor>& bias,
                             const std::optional<Tensor>& residual, const std::vector<int64_t>& numbers, double a,
                             double b) {
  const Handle bias_handle = bias.has_value() ? bias->get() : nullptr;
  const Handle residual_handle = residual.has_value() ? residual->get() : nullptr;
  Handle y;
  CompiledConvolution(x.get(), weights.get(), bias.has_value() ? &bias_handle : nullptr,
                      residual.has_value() ? &residual_handle : nullptr, numbers.data(),
                      static_cast<int64_t>(numbers.size()), a, b, &y);
  return Tensor(y);
}

// Address of CompiledConvolution. Generated code reads it once and then calls without the dispatcher, whose boxed
// arguments take longer than a small layer. A new signature needs a new name: saved packages call this one.
int64_t CompiledConvolutionAddressOp() {
  return reinterpret_cast<int64_t>(&CompiledConvolution);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  m.def(
      "compiled_convolution(Tensor x, Tensor weights, Tensor? bias, Tensor? residual, int[] layer, "
      "float activation_a=0., float activation_b=0.) -> Tensor");
  m.def("compiled_convolution_address() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CPU, m) {
  m.impl("compiled_convolution", TORCH_BOX(&CompiledConvolutionOp));
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("compiled_convolution_address", TORCH_BOX(&CompiledConvolutionAddressOp));
}

}  // namespace polyconv
