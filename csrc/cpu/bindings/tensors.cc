#include "bindings/tensors.h"

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "bindings/denormals.h"
#include "common/lattice.h"

namespace polyconv {
namespace {

constexpr int kSets = static_cast<int>(InstructionSet::kCount);
std::atomic<int> chosen_set{-1};

template <class T>
int32_t DtypeOf();
template <>
int32_t DtypeOf<float>() {
  static const int32_t dtype = aoti_torch_dtype_float32();
  return dtype;
}
template <>
int32_t DtypeOf<double>() {
  static const int32_t dtype = aoti_torch_dtype_float64();
  return dtype;
}

// Correlation that reads `x` and writes `y`, without a bias.
Convolution Describe(const ConvolutionShape& shape, const View& x, const View& w, const View& y) {
  return {shape, x.const_data_ptr<float>(), w.const_data_ptr<float>(), nullptr, y.mutable_data_ptr<float>(), {}};
}

}  // namespace

void Require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string("polyconv: ") + what);
}

View::View(AtenTensorHandle tensor) : tensor_(tensor) {
  int64_t *sizes, *strides;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim_));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype_));
  sizes_ = sizes, strides_ = strides;
}

View::View(const int64_t* sizes, const View& packed)
    : tensor_(packed.tensor_), dim_(4), sizes_(sizes), dtype_(packed.dtype_) {
  static const int64_t kZeros[4] = {};
  strides_ = kZeros;
}

View::View(const View& like, const int64_t* strides, float* data)
    : tensor_(like.tensor_),
      dim_(like.dim_),
      sizes_(like.sizes_),
      strides_(strides),
      dtype_(like.dtype_),
      data_(data) {}

View View::From(int64_t element, const int64_t* sizes) const {
  View result = *this;
  result.sizes_ = sizes;
  result.data_ = mutable_data_ptr<float>() + element;
  return result;
}

int64_t View::numel() const {
  return std::accumulate(sizes_, sizes_ + dim_, int64_t{1}, std::multiplies<>());
}

const void* View::data() const {
  const void* data = data_;
  if (data == nullptr) STABLE_TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(tensor_, &data));
  return data;
}

template <class T>
const T* View::const_data_ptr() const {
  Require(dtype_ == DtypeOf<T>(), "a tensor has elements of another type");
  return static_cast<const T*>(data());
}
template const float* View::const_data_ptr() const;
template const double* View::const_data_ptr() const;

template <class T>
T* View::mutable_data_ptr() const {
  Require(dtype_ == DtypeOf<T>(), "a tensor has elements of another type");
  void* data = data_;
  if (data == nullptr) STABLE_TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(tensor_, &data));
  return static_cast<T*>(data);
}
template float* View::mutable_data_ptr() const;

int Narrow(int64_t value, const char* what) {
  constexpr int64_t kLargest = std::numeric_limits<int>::max();
  if (value >= -kLargest && value <= kLargest) return static_cast<int>(value);
  throw std::runtime_error(std::string("polyconv: ") + what + " is " + std::to_string(value) +
                           "; the CPU kernels take at most " + std::to_string(kLargest));
}

Element ElementOf(const View& tensor) {
  static const int32_t bfloat16 = aoti_torch_dtype_bfloat16(), float16 = aoti_torch_dtype_float16();
  if (tensor.dtype() == bfloat16) return Element::kBfloat16;
  if (tensor.dtype() == float16) return Element::kFloat16;
  Require(tensor.dtype() == DtypeOf<float>(), "the depthwise kernels take float32, bfloat16 and float16");
  return Element::kFloat;
}

int Extent(const View& tensor, int dim) {
  return Narrow(tensor.size(dim), "an extent of a tensor");
}

void RequireCountable(const View& x, const View& w, const View& y, const Geometry& geometry) {
  constexpr int64_t kOverhang = 32;  // more steps of stride and dilation than a tile extends beyond the image
  const auto require = [&](int dim, int64_t stride, int64_t dilation, int64_t before) {
    const int64_t padded = std::max(stride * Extent(y, dim) + dilation * Extent(w, dim),  //
                                    Extent(x, dim) + std::abs(before));
    Narrow(padded + kOverhang * (stride + dilation), "the last place that a tap may have");
  };
  require(2, geometry.stride_h, geometry.dilation_h, geometry.top);
  require(3, geometry.stride_w, geometry.dilation_w, geometry.left);
}

Geometry ReadGeometry(std::span<const int64_t> numbers) {
  Require(numbers.size() == 8, "a geometry has 8 numbers");
  const auto at = [&](int i) { return Narrow(numbers[i], "a stride, a padding, a dilation or the groups"); };
  Require(std::min({at(0), at(1), at(4), at(5), at(6)}) > 0, "strides, dilations and groups are positive");
  Require(at(7) >= 0 && at(7) < static_cast<int>(Border::kCount), "no such border");
  return {at(0), at(1), at(2), at(3), at(4), at(5), at(6), static_cast<Border>(at(7))};
}

const SchemeShape& SchemeAt(std::span<const SchemeShape> schemes, int64_t number) {
  Require(number >= 0 && number < static_cast<int64_t>(schemes.size()), "no such algorithm");
  return schemes[number];
}

void RequireResidual(const std::optional<View>& residual, const View& y) {
  if (!residual.has_value()) return;
  Require(residual->dtype() == y.dtype(), "element types of residual and output differ");
  Require(residual->dim() == y.dim(), "residual and output differ in size");
  for (int64_t i = 0; i < y.dim(); i++) {
    Require(residual->size(i) == y.size(i), "residual and output differ in size");
    Require(residual->stride(i) == y.stride(i) || y.size(i) <= 1, "residual and output differ in their strides");
  }
}

template <class T>
Epilogue<T> ReadEpilogue(const std::optional<View>& residual, int64_t activation, double a, double b, const View& y) {
  Require(activation >= 0 && activation < static_cast<int64_t>(Activation::kCount), "no such activation");
  RequireResidual(residual, y);
  const T* added = residual.has_value() ? residual->const_data_ptr<T>() : nullptr;
  return {added, static_cast<Activation>(activation), static_cast<T>(a), static_cast<T>(b)};
}
template Epilogue<float> ReadEpilogue(const std::optional<View>&, int64_t, double, double, const View&);
template Epilogue<double> ReadEpilogue(const std::optional<View>&, int64_t, double, double, const View&);

ConvolutionShape ShapeOf(const View& x, const View& w, const View& y, const Geometry& geometry) {
  Require(x.dim() == 4 && w.dim() == 4 && y.dim() == 4, "tensors have four dimensions");
  Require(x.size(0) == y.size(0), "batch sizes differ");
  ConvolutionShape s{};
  s.batch = Extent(x, 0);
  s.in_channels = Extent(x, 1) / geometry.groups;
  s.out_channels = Extent(y, 1) / geometry.groups;
  s.in_height = Extent(x, 2), s.in_width = Extent(x, 3);
  s.out_height = Extent(y, 2), s.out_width = Extent(y, 3);
  s.taps_h = Extent(w, 2), s.taps_w = Extent(w, 3);
  s.top = geometry.top, s.left = geometry.left;
  s.stride_h = geometry.stride_h, s.stride_w = geometry.stride_w;
  s.dilation_h = geometry.dilation_h, s.dilation_w = geometry.dilation_w;
  s.border = geometry.border;
  s.x_batch = x.stride(0), s.x_channel = x.stride(1), s.x_row = x.stride(2), s.x_column = x.stride(3);
  s.y_batch = y.stride(0), s.y_channel = y.stride(1), s.y_row = y.stride(2), s.y_column = y.stride(3);
  s.w_out = w.stride(0), s.w_in = w.stride(1), s.w_row = w.stride(2), s.w_column = w.stride(3);
  return s;
}

Convolution DescribeForward(const View& x, const View& w, const View& y, const Geometry& geometry) {
  const ConvolutionShape shape = ShapeOf(x, w, y, geometry);
  RequireCountable(x, w, y, geometry);
  return Describe(shape, x, w, y);
}

std::vector<Convolution> DescribeInputGradient(const View& dy, const View& w, const View& dx,
                                               const Geometry& geometry) {
  Require(geometry.border == Border::kZeros, "the input gradient knows only a border of zeros");
  ConvolutionShape shape = ShapeOf(dy, w, dx, geometry);
  RequireCountable(dx, w, dy, geometry);
  std::swap(shape.w_in, shape.w_out);  // sums run over the output channels
  const Convolution whole = Describe(shape, dy, w, dx);
  std::vector<Convolution> phases;
  for (int a = 0; a < std::min(whole.stride_h, whole.out_height); a++) {
    const AxisPhase h = PhaseOf(a, whole.out_height, whole.taps_h, whole.stride_h, whole.dilation_h, whole.top);
    for (int b = 0; b < std::min(whole.stride_w, whole.out_width); b++) {
      const AxisPhase v = PhaseOf(b, whole.out_width, whole.taps_w, whole.stride_w, whole.dilation_w, whole.left);
      Convolution c = whole;
      c.y += a * c.y_row + b * c.y_column;
      c.y_row *= c.stride_h, c.y_column *= c.stride_w;
      c.out_height = h.count, c.out_width = v.count;
      c.taps_h = v.taps == 0 ? 0 : h.taps, c.taps_w = h.taps == 0 ? 0 : v.taps;
      c.w += h.first_tap * c.w_row + v.first_tap * c.w_column;
      c.w_row *= h.tap_step, c.w_column *= v.tap_step;
      c.top = h.padding, c.left = v.padding;
      c.dilation_h = h.dilation, c.dilation_w = v.dilation;
      c.stride_h = c.stride_w = 1;
      phases.push_back(c);
    }
  }
  return phases;
}

Convolution OfGroup(const Convolution& first, int group, bool input_gradient) {
  Convolution c = first;
  c.x += group * c.in_channels * c.x_channel;
  c.y += group * c.out_channels * c.y_channel;
  c.w += group * (input_gradient ? c.in_channels * c.w_in : c.out_channels * c.w_out);
  if (c.bias != nullptr) c.bias += group * c.out_channels;
  if (c.epilogue.residual != nullptr) c.epilogue.residual += group * c.out_channels * c.y_channel;
  return c;
}

void WriteZeros(const Convolution& conv, const Runtime& runtime) {
  const std::int64_t rows = static_cast<std::int64_t>(conv.batch) * conv.out_channels * conv.out_height;
  runtime.parallel_for(rows, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; row++) {
      const std::int64_t plane = row / conv.out_height;
      float* y = conv.y + plane / conv.out_channels * conv.y_batch + plane % conv.out_channels * conv.y_channel +
                 row % conv.out_height * conv.y_row;
      for (int column = 0; column < conv.out_width; column++) y[column * conv.y_column] = 0.0f;
    }
  });
}

Runtime TheRuntime() {
  return {[](int64_t count, const RangeBody& body) {
            const unsigned control = FloatControl::Get();
            const FloatControl own(FloatControl::Own());  // a thread that the pool starts here inherits it for good
            torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
              const FloatControl as_caller(control);
              body(begin, end);
              Scratch::OfThread().Trim();
            });
          },
          static_cast<int>(torch::stable::get_num_threads())};
}

InstructionSet TheSet() {
  for (int set = 0; chosen_set.load() < 0 && set < kSets; set++) {
    if (IsSupported(static_cast<InstructionSet>(set))) chosen_set.store(set);
  }
  Require(chosen_set.load() >= 0, "this processor has none of AVX-512, AVX2, SSE4.2 and NEON");
  return static_cast<InstructionSet>(chosen_set.load());
}

void ChooseInstructionSet(const std::string& name) {
  if (name == "best") chosen_set.store(-1);
  for (int i = 0; i < kSets && !name.empty() && name != "best"; i++) {
    const auto set = static_cast<InstructionSet>(i);
    if (name != NameOf(set)) continue;
    Require(IsSupported(set), "this processor cannot run that instruction set");
    chosen_set.store(i);
  }
}

}  // namespace polyconv
