// polyconv_cpu::compiled_convolution: runs one layer of a compiled graph, epilogue included, on packed weights, and
// allocates its output.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/forward.h"
#include "bindings/tensors.h"
#include "pointwise/pointwise.h"

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
  int64_t clamped;          // whether a joined input is clamped at zero
  int64_t instruction_set;  // that the weights are packed for
};
constexpr std::size_t kNumbers = sizeof(Layer) / sizeof(int64_t);
static_assert(kNumbers == 19);

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

// A 1x1 layer on joined tensors. Denormals are not counted as zero: no operand is known to be tiny before the blocks of
// the input are computed.
void ConvolveJoined(const Layer& l, const Handle* inputs, int64_t count, const View& normalisation, const View& w,
                    const std::optional<View>& bias, const View& y, const Geometry& geometry,
                    const Epilogue<float>& epilogue, const View& weights) {
  Require(l.engine == static_cast<int64_t>(Lanes::kPointwise) && l.taps_h * l.taps_w == 1 && l.groups == 1 &&
              l.top == 0 && l.bottom == 0 && l.left == 0 && l.right == 0,
          "only 1x1 layers without borders and groups join tensors");
  Require(normalisation.numel() == 2 * l.inputs, "a joined input has a factor and a summand per channel");
  std::vector<JoinedInput::Part> parts;
  int channels = 0;
  for (const Handle* input = inputs; input < inputs + count; input++) {
    const View x(*input), first(*inputs);
    Require(x.dim() == 4 && (x.stride(1) == 1 || x.size(1) == 1), "joined tensors are in channels_last");
    for (const int axis : {0, 2, 3}) Require(x.size(axis) == first.size(axis), "joined tensors differ in size");
    parts.push_back({x.const_data_ptr<float>(), Extent(x, 1), x.stride(0), x.stride(2), x.stride(3)});
    channels += parts.back().channels;
  }
  Require(channels == l.inputs, "the joined tensors do not fit the layer");
  Convolution conv = DescribeForward(View(inputs[0]), w, y, geometry);
  conv.in_channels = channels;
  conv.bias = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  conv.epilogue = epilogue;
  const float* scale = normalisation.const_data_ptr<float>();
  const float least = l.clamped != 0 ? 0.0f : -std::numeric_limits<float>::infinity();
  FindJoined(TheSet())(conv, {parts, scale, scale + channels, least}, weights.const_data_ptr<float>(), TheRuntime());
}

// The operator as a C shim of Inductor's (polyconv/inductor/layer.py), but that it throws. `weights` has the layout of
// transform_weights; for depthwise layers it is the weight with channels innermost. `normalisation`: factors and
// summands of the joined channels of all inputs. Without it, there is one input.
void CompiledConvolution(const Handle* inputs, int64_t input_count, Handle weights_handle, const Handle* bias,
                         const Handle* residual, const Handle* normalisation, const int64_t* numbers, int64_t count,
                         double a, double b, Handle* result) {
  Require(count == kNumbers, "a layer of a compiled graph has 19 numbers");
  Require(input_count == 1 || (input_count > 1 && normalisation != nullptr), "several inputs are joined normalised");
  Layer l;
  std::memcpy(&l, numbers, sizeof l);
  const View x(inputs[0]), weights(weights_handle);
  Require(l.instruction_set == static_cast<int64_t>(TheSet()),
          "the weights of a compiled layer are packed for another instruction set than the one in use; compile again");
  Require(x.dim() == 4 && (normalisation != nullptr || x.size(1) == l.inputs * l.groups),
          "the input does not fit the layer");
  const Geometry geometry =
      ReadGeometry(std::array{l.stride_h, l.stride_w, l.top, l.left, l.dilation_h, l.dilation_w, l.groups, l.border});
  const int64_t height = Outputs(x.size(2), l.top, l.bottom, l.taps_h, l.stride_h, l.dilation_h);
  const int64_t width = Outputs(x.size(3), l.left, l.right, l.taps_w, l.stride_w, l.dilation_w);
  OwnedTensor made = EmptyChannelsLast(x.size(0), l.outputs, height, width);
  const View y(made.get());
  const Epilogue<float> epilogue = ReadEpilogue<float>(Given(residual), l.activation, a, b, y);
  const int64_t sizes[] = {l.outputs, l.inputs, l.taps_h, l.taps_w};
  const View w(sizes, weights);
  if (normalisation != nullptr) {
    ConvolveJoined(l, inputs, input_count, View(*normalisation), w, Given(bias), y, geometry, epilogue, weights);
  } else if (l.engine == kDepthwise) {
    DepthwiseForward(x, weights, Given(bias), y, geometry, epilogue);
  } else {
    ConvolveForward(x, w, Given(bias), y, geometry, std::array<int64_t, 5>{l.engine, l.scheme}, weights, epilogue,
                    true);
  }
  *result = made.release();
}

Tensor CompiledConvolutionOp(const std::vector<Tensor>& inputs, const Tensor& weights,
                             const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                             const std::optional<Tensor>& normalisation, const std::vector<int64_t>& numbers, double a,
                             double b) {
  std::vector<Handle> handles;
  for (const Tensor& input : inputs) handles.push_back(input.get());
  const auto handle = [](const std::optional<Tensor>& tensor) { return tensor.has_value() ? tensor->get() : nullptr; };
  const Handle given[] = {handle(bias), handle(residual), handle(normalisation)};
  const auto at = [&](int i) { return given[i] == nullptr ? nullptr : &given[i]; };
  Handle y;
  CompiledConvolution(handles.data(), static_cast<int64_t>(handles.size()), weights.get(), at(0), at(1), at(2),
                      numbers.data(), static_cast<int64_t>(numbers.size()), a, b, &y);
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
      "compiled_convolution(Tensor[] inputs, Tensor weights, Tensor? bias, Tensor? residual, Tensor? normalisation, "
      "int[] layer, float activation_a=0., float activation_b=0.) -> Tensor");
  m.def("compiled_convolution_address() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CPU, m) {
  m.impl("compiled_convolution", TORCH_BOX(&CompiledConvolutionOp));
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("compiled_convolution_address", TORCH_BOX(&CompiledConvolutionAddressOp));
}

}  // namespace polyconv
