// Forward passes on tensors, shared by the operators of single calls and of compiled graphs.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/tensors.h"

namespace polyconv {

// A forward pass of the engines in enum Lanes. Transforms the weights itself if `transformed` is empty. `packed_only`:
// `w` has the shape of the weight, but not its values.
void ConvolveForward(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
                     const std::vector<int64_t>& geometry, const std::vector<int64_t>& plan,
                     const std::optional<Tensor>& transformed, const Epilogue<float>& epilogue,
                     bool packed_only = false);

// A forward pass of the depthwise engine.
void DepthwiseForward(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
                      const std::vector<int64_t>& geometry, const Epilogue<float>& epilogue);

}  // namespace polyconv
