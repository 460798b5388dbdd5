// Conversion of operator arguments (tensors, integers) to the engines' plain numbers and pointers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/algorithms.h"
#include "common/convolution.h"

namespace polyconv {

using torch::stable::Tensor;

// Throws "polyconv: " + what, unless the condition holds.
void Require(bool condition, const char* what);

// A 64-bit integer as int. Throws an error with `what` and the value if 32 bits do not hold it.
int Narrow(int64_t value, const char* what);

int Extent(const Tensor& tensor, int dim);

// Geometry of a convolution. Bottom and right padding follow from the sizes of the tensors.
struct Geometry {
  int stride_h, stride_w, top, left, dilation_h, dilation_w, groups;
  Border border;
};

// Reads [stride_h, stride_w, top, left, dilation_h, dilation_w, groups, border].
Geometry ReadGeometry(const std::vector<int64_t>& numbers);

// Scheme by its number in a list of algorithms.h.
const SchemeShape& SchemeAt(std::span<const SchemeShape> schemes, int64_t number);

// Throws unless every tap position, including those of tiles that extend beyond the padded image, fits into 32 bits:
// kernels add and multiply these numbers without checks. `y` is the output or its gradient.
void RequireCountable(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry);

// Epilogue of a forward operator, with the parameters of the activation. The residual must have the strides of `y`.
template <class T>
Epilogue<T> ReadEpilogue(const std::optional<Tensor>& residual, int64_t activation, double a, double b,
                         const Tensor& y);

extern template Epilogue<float> ReadEpilogue(const std::optional<Tensor>&, int64_t, double, double, const Tensor&);
extern template Epilogue<double> ReadEpilogue(const std::optional<Tensor>&, int64_t, double, double, const Tensor&);

// Sizes and strides of a correlation from `x` to `y`. For an input gradient: from dy to dx.
ConvolutionShape ShapeOf(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry);

// Forward convolution of the first group.
Convolution DescribeForward(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry);

// Input gradient of the first group: one unit-stride correlation per residue class of the stride. Correlations without
// taps only write zeros. Only a border of zeros is supported.
std::vector<Convolution> DescribeInputGradient(const Tensor& dy, const Tensor& w, const Tensor& dx,
                                               const Geometry& geometry);

// The correlation of another group. Groups follow one another along the weight's first dimension.
Convolution OfGroup(const Convolution& first, int group, bool input_gradient);

// Writes zeros to all outputs of a correlation without taps.
void WriteZeros(const Convolution& conv, const Runtime& runtime);

// Runs on torch's thread pool, with the calling thread's floating-point control.
Runtime TheRuntime();

// Best instruction set of this processor, unless ChooseInstructionSet chose another one for a test.
InstructionSet TheSet();

// Chooses an instruction set by name; "best" detects it again, an empty name changes nothing.
void ChooseInstructionSet(const std::string& name);

}  // namespace polyconv
