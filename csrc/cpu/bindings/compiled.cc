// polyconv_cpu::compiled_convolution: runs one layer of a compiled graph, epilogue included, on packed weights, and
// allocates its output.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
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

Layer ReadLayer(const std::vector<int64_t>& numbers) {
  Require(numbers.size() == kNumbers, "a layer of a compiled graph has 18 numbers");
  Layer layer;
  std::memcpy(&layer, numbers.data(), sizeof layer);
  return layer;
}

int64_t Outputs(int64_t extent, int64_t before, int64_t after, int64_t taps, int64_t stride, int64_t dilation) {
  const int64_t room = extent + before + after - dilation * (taps - 1) - 1;
  Require(room >= 0, "the kernel is larger than the padded image");
  return room / stride + 1;
}

// `weights` has the layout of transform_weights; for depthwise layers it is the weight with channels innermost.
Tensor CompiledConvolutionOp(const Tensor& x, const Tensor& weights, const std::optional<Tensor>& bias,
                             const std::optional<Tensor>& residual, const std::vector<int64_t>& numbers, double a,
                             double b) {
  const Layer l = ReadLayer(numbers);
  Require(l.instruction_set == static_cast<int64_t>(TheSet()),
          "the weights of a compiled layer are packed for another instruction set than the one in use; compile again");
  Require(x.dim() == 4 && x.size(1) == l.inputs * l.groups, "the input does not fit the layer");
  const std::vector<int64_t> geometry = {l.stride_h,   l.stride_w,   l.top,    l.left,
                                         l.dilation_h, l.dilation_w, l.groups, l.border};
  ReadGeometry(geometry);  // checks the numbers
  const int64_t height = Outputs(x.size(2), l.top, l.bottom, l.taps_h, l.stride_h, l.dilation_h);
  const int64_t width = Outputs(x.size(3), l.left, l.right, l.taps_w, l.stride_w, l.dilation_w);
  Tensor y = torch::stable::empty({x.size(0), l.outputs, height, width}, x.scalar_type(), std::nullopt, x.device(),
                                  std::nullopt, torch::headeronly::MemoryFormat::ChannelsLast);
  const Epilogue<float> epilogue = ReadEpilogue<float>(residual, l.activation, a, b, y);
  if (l.engine == kDepthwise) {
    DepthwiseForward(x, weights, bias, y, geometry, epilogue);
    return y;
  }
  // The kernels read the packed weights; of the weight itself they need the shape.
  const Tensor w = torch::stable::from_blob(const_cast<float*>(weights.const_data_ptr<float>()),
                                            {l.outputs, l.inputs, l.taps_h, l.taps_w}, {0, 0, 0, 0}, weights.device(),
                                            weights.scalar_type());
  ConvolveForward(x, w, bias, y, geometry, {l.engine, l.scheme, 0, 0, 0}, weights, epilogue, true);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  m.def(
      "compiled_convolution(Tensor x, Tensor weights, Tensor? bias, Tensor? residual, int[] layer, "
      "float activation_a=0., float activation_b=0.) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CPU, m) {
  m.impl("compiled_convolution", TORCH_BOX(&CompiledConvolutionOp));
}

}  // namespace polyconv
