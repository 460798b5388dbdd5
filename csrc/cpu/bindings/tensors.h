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
#include "common/elements.h"

namespace polyconv {

using torch::stable::Tensor;

// Sizes, strides and elements of a tensor, read once: with the stable ABI each is a call into torch. It is valid as long
// as the tensor, and as long as nothing resizes that.
class View {
 public:
  View(const Tensor& tensor) : View(tensor.get()) {}
  explicit View(AtenTensorHandle tensor);

  // A weight of four sizes that is packed: without strides.
  View(const int64_t* sizes, const View& packed);
  // Other memory in the place of a tensor's, with other strides.
  View(const View& like, const int64_t* strides, float* data);

  // The memory of a float32 tensor from an element on, with its strides and other sizes.
  View From(int64_t element, const int64_t* sizes) const;

  int64_t dim() const { return dim_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }
  int64_t numel() const;
  int32_t dtype() const { return dtype_; }
  const void* data() const;
  // Throw for tensors of other elements than T.
  template <class T>
  const T* const_data_ptr() const;
  template <class T>
  T* mutable_data_ptr() const;

 private:
  AtenTensorHandle tensor_;
  int64_t dim_;
  const int64_t* sizes_;
  const int64_t* strides_;
  int32_t dtype_;
  float* data_ = nullptr;  // null: that of the tensor
};

// Throws "polyconv: " + what, unless the condition holds.
void Require(bool condition, const char* what);

// A 64-bit integer as int. Throws an error with `what` and the value if 32 bits do not hold it.
int Narrow(int64_t value, const char* what);

int Extent(const View& tensor, int dim);

// Element type of a tensor that kernels widen on load. Throws for others than float32, bfloat16 and float16.
Element ElementOf(const View& tensor);

// Geometry of a convolution. Bottom and right padding follow from the sizes of the tensors.
struct Geometry {
  int stride_h, stride_w, top, left, dilation_h, dilation_w, groups;
  Border border;
};

// Reads [stride_h, stride_w, top, left, dilation_h, dilation_w, groups, border].
Geometry ReadGeometry(std::span<const int64_t> numbers);

// Scheme by its number in a list of algorithms.h.
const SchemeShape& SchemeAt(std::span<const SchemeShape> schemes, int64_t number);

// Throws unless every tap position, including those of tiles that extend beyond the padded image, fits into 32 bits:
// kernels add and multiply these numbers without checks. `y` is the output or its gradient.
void RequireCountable(const View& x, const View& w, const View& y, const Geometry& geometry);

// Throws unless the residual, if there is one, has type, sizes and strides of `y`.
void RequireResidual(const std::optional<View>& residual, const View& y);

// Epilogue of a forward operator, with the parameters of the activation. The residual must have the strides of `y`.
template <class T>
Epilogue<T> ReadEpilogue(const std::optional<View>& residual, int64_t activation, double a, double b, const View& y);

extern template Epilogue<float> ReadEpilogue(const std::optional<View>&, int64_t, double, double, const View&);
extern template Epilogue<double> ReadEpilogue(const std::optional<View>&, int64_t, double, double, const View&);

// Sizes and strides of a correlation from `x` to `y`. For an input gradient: from dy to dx.
ConvolutionShape ShapeOf(const View& x, const View& w, const View& y, const Geometry& geometry);

// Forward convolution of the first group.
Convolution DescribeForward(const View& x, const View& w, const View& y, const Geometry& geometry);

// Input gradient of the first group: one unit-stride correlation per residue class of the stride. Correlations without
// taps only write zeros. Only a border of zeros is supported.
std::vector<Convolution> DescribeInputGradient(const View& dy, const View& w, const View& dx, const Geometry& geometry);

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
