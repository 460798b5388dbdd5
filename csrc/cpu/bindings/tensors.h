// What every operator shares: from tensors and integers to the engine's plain numbers and pointers.
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

// Throws, with the package's name before the words, unless the condition holds.
void Require(bool condition, const char* what);

// A number of Python's as the engine counts. Throws, with what it is and its value, where 32 bits do not hold it.
int Narrow(int64_t value, const char* what);

// An extent of a tensor.
int Extent(const Tensor& tensor, int dim);

// How the kernel moves over the image. Bottom and right padding follow from the sizes of the tensors.
struct Geometry {
  int stride_h, stride_w, top, left, dilation_h, dilation_w, groups;
  Border border;
};

// From [stride_h, stride_w, top, left, dilation_h, dilation_w, groups, border].
Geometry ReadGeometry(const std::vector<int64_t>& numbers);

// The scheme of a list that Python knows by this number.
const SchemeShape& SchemeAt(std::span<const SchemeShape> schemes, int64_t number);

// Throws unless every place that a tap can have, in tiles that jut out of the padded image as well, is counted in 32
// bits: kernels add and multiply these numbers freely. `y` is the output or its gradient.
void RequireCountable(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry);

// What a forward operator does to its sums before it stores them to `y`. The residual has to be laid out as `y` is.
template <class T>
Epilogue<T> ReadEpilogue(const std::optional<Tensor>& residual, int64_t activation, const Tensor& y);

extern template Epilogue<float> ReadEpilogue(const std::optional<Tensor>&, int64_t, const Tensor&);
extern template Epilogue<double> ReadEpilogue(const std::optional<Tensor>&, int64_t, const Tensor&);

// The sizes and the strides of a correlation from `x` to `y`. Of an input gradient that is from dy to dx.
ConvolutionShape ShapeOf(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry);

// The forward convolution of the first group.
Convolution DescribeForward(const Tensor& x, const Tensor& w, const Tensor& y, const Geometry& geometry);

// Its input gradient, of the first group: one correlation per residue class of the stride, each of unit stride. Those
// without taps only write zeros. Borders other than zeros are the caller's.
std::vector<Convolution> DescribeInputGradient(const Tensor& dy, const Tensor& w, const Tensor& dx,
                                               const Geometry& geometry);

// The same for another group. Groups follow one another along the weight's first dimension.
Convolution OfGroup(const Convolution& first, int group, bool input_gradient);

// Writes zeros to all outputs, for a convolution without taps.
void WriteZeros(const Convolution& conv, const Runtime& runtime);

// torch's threads.
Runtime TheRuntime();

// The best instruction set of this processor, unless a test chose another one: see ChooseInstructionSet.
InstructionSet TheSet();

// Chooses by name, or anew for "best"; an empty name changes nothing.
void ChooseInstructionSet(const std::string& name);

}  // namespace polyconv
