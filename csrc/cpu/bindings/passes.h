// Passes on tensors, shared by the operators of single calls and of compiled graphs.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "bindings/tensors.h"

namespace polyconv {

// A forward pass of the engines in enum Lanes. Transforms the weights itself if `transformed` is empty. `packed_only`:
// `w` has the shape of the weight, but not its values.
void ConvolveForward(const View& x, const View& w, const std::optional<View>& bias, const View& y,
                     const Geometry& geometry, std::span<const int64_t> plan, const std::optional<View>& transformed,
                     const Epilogue<float>& epilogue, bool packed_only = false);

// A transposed convolution: the input gradient of one whose output is `x`. `w` has the shape of that one's weight, but
// not its values; `transformed` is of transform_transposed_weights.
void ConvolveTransposed(const View& x, const View& w, const std::optional<View>& bias, const View& y,
                        const Geometry& geometry, std::span<const int64_t> plan, const View& transformed,
                        const Epilogue<float>& epilogue);

// How a depthwise forward pass is computed. By segments: see depthwise/segments-inl.h; `transformed` are those of
// depthwise_transform, if they are kept. `packed_only`: the weight itself has the right shape, but not its values.
struct DepthwiseAlgorithm {
  bool by_segments = false;
  std::optional<View> transformed{};
  bool packed_only = false;
};

// A forward pass of the depthwise engine, in float32 or half precision. `residual`: laid out as `y`, in its type; may be
// null.
void DepthwiseForward(const View& x, const View& w, const std::optional<View>& bias, const View& y,
                      const Geometry& geometry, const DepthwiseAlgorithm& algorithm, Epilogue<float> epilogue,
                      const void* residual);

// The operators of gradients.
void InputGradientOp(const Tensor& dy, const Tensor& w, const Tensor& dx, const std::vector<int64_t>& geometry,
                     const std::vector<int64_t>& plan);
void WeightGradientOp(const Tensor& x, const Tensor& dy, const Tensor& dw, const std::optional<Tensor>& db,
                      const std::vector<int64_t>& geometry, const std::vector<int64_t>& plan);
void DepthwiseInputGradientOp(const Tensor& dy, const Tensor& w, const Tensor& dx, const std::vector<int64_t>& geometry,
                              const std::optional<Tensor>& bias, bool by_segments);
void DepthwiseWeightGradientOp(const Tensor& x, const Tensor& dy, const Tensor& dw, const std::optional<Tensor>& db,
                               const std::vector<int64_t>& geometry);

}  // namespace polyconv
