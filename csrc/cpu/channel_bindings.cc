// The operators of the forward kernels with channels in the lanes, on torch's stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "channel_schemes.h"
#include "memory.h"
#include "tensors.h"

namespace polyconv {
namespace {

const SchemeKernels& ChannelKernels(int64_t algorithm) {
  const SchemeKernels* kernels = FindChannelScheme(TheSet(), static_cast<int>(algorithm));
  Require(kernels != nullptr, "no such algorithm");
  return *kernels;
}

void RunChannelGroups(const Convolution& first, int groups, bool input_gradient, const SchemeKernels& kernels,
                      const float* transformed) {
  const Runtime runtime = TheRuntime();
  static thread_local Scratch fresh;
  for (int group = 0; group < groups; group++) {
    const Convolution conv = OfGroup(first, group, input_gradient);
    if (conv.taps_h == 0) {
      WriteZeros(conv, runtime);
      continue;
    }
    const std::size_t size = kernels.weights_size(conv);
    const float* weights = transformed + group * size;
    if (transformed == nullptr) {
      float* target = fresh.Get(size);
      kernels.transform_weights(conv, target, runtime);
      weights = target;
    }
    kernels.run(conv, {}, weights, runtime);
  }
}

Tensor ChannelWeightsOp(const Tensor& x, const Tensor& w, const Tensor& y, const std::vector<int64_t>& numbers,
                        int64_t algorithm) {
  const Geometry geometry = ReadGeometry(numbers);
  const SchemeKernels& kernels = ChannelKernels(algorithm);
  const Convolution first = DescribeForward(x, w, y, geometry);
  const std::size_t size = kernels.weights_size(first);
  Tensor transformed = torch::stable::new_empty(w, {static_cast<int64_t>(size) * geometry.groups});
  for (int group = 0; group < geometry.groups; group++) {
    float* target = transformed.mutable_data_ptr<float>() + group * size;
    kernels.transform_weights(OfGroup(first, group, false), target, TheRuntime());
  }
  return transformed;
}

void ChannelConvolveOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
                       const std::vector<int64_t>& numbers, int64_t algorithm,
                       const std::optional<Tensor>& transformed) {
  const Geometry geometry = ReadGeometry(numbers);
  Convolution first = DescribeForward(x, w, y, geometry);
  if (bias.has_value()) first.bias = bias->const_data_ptr<float>();
  const float* kept = transformed.has_value() ? transformed->const_data_ptr<float>() : nullptr;
  RunChannelGroups(first, geometry.groups, false, ChannelKernels(algorithm), kept);
}

void ChannelInputGradientOp(const Tensor& dy, const Tensor& w, const Tensor& dx, const std::vector<int64_t>& numbers,
                            int64_t algorithm) {
  const Geometry geometry = ReadGeometry(numbers);
  for (const Convolution& phase : DescribeInputGradient(dy, w, dx, geometry)) {
    RunChannelGroups(phase, geometry.groups, true, ChannelKernels(algorithm), nullptr);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  // geometry as for `convolve`
  m.def("channel_weights(Tensor x, Tensor w, Tensor y, int[] geometry, int algorithm) -> Tensor");
  m.def(
      "channel_convolve(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] geometry, int algorithm, "
      "Tensor? transformed) -> ()");
  m.def("channel_input_gradient(Tensor dy, Tensor w, Tensor(a!) dx, int[] geometry, int algorithm) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("channel_weights", TORCH_BOX(&ChannelWeightsOp));
  m.impl("channel_convolve", TORCH_BOX(&ChannelConvolveOp));
  m.impl("channel_input_gradient", TORCH_BOX(&ChannelInputGradientOp));
}

}  // namespace polyconv
