// Half-precision operands of the depthwise kernels: blocks of channels as float32 copies that stay in a core's cache.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bindings/tensors.h"
#include "common/half.h"

namespace polyconv {

inline bool IsHalf(const Tensor& tensor) {
  using torch::headeronly::ScalarType;
  return tensor.scalar_type() == ScalarType::Half || tensor.scalar_type() == ScalarType::BFloat16;
}

inline Element HalfTypeOf(const Tensor& tensor) {
  Require(IsHalf(tensor), "elements are float16 or bfloat16");
  return ElementOf(tensor);
}

// Dense elements in memory order, for weights and biases: the copy has the strides of the tensor.
class HalfElements {
 public:
  explicit HalfElements(const Tensor& tensor) : type_(HalfTypeOf(tensor)), copy_(tensor.numel()) {
    for (int64_t dim = 0, last = 0; dim < tensor.dim(); dim++) {
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
      Require(dim + 1 < tensor.dim() || last < tensor.numel(), "half-precision weights are dense");
    }
  }
  float* data() { return copy_.data(); }
  std::size_t size() const { return copy_.size(); }
  float* Widened(const Tensor& tensor) {
    Widen(TheSet(), type_, {1, copy_.size()}, tensor.const_data_ptr(), data());
    return data();
  }
  void RoundTo(const Tensor& tensor) { Round(TheSet(), type_, {1, copy_.size()}, data(), tensor.mutable_data_ptr()); }

 private:
  Element type_;
  std::vector<float> copy_;
};

// Images whose planes are dense (NCHW), or whose pixels are (channels_last).
class HalfImages {
 public:
  explicit HalfImages(const Tensor& tensor)
      : type_(HalfTypeOf(tensor)),
        data_(static_cast<std::uint16_t*>(const_cast<void*>(tensor.const_data_ptr()))),
        batch_(tensor.stride(0)),
        channel_(tensor.stride(1)),
        width_(tensor.size(3)),
        pixels_(tensor.size(2) * tensor.size(3)) {
    const auto is = [&](int64_t column) {
      return (tensor.size(3) == 1 || tensor.stride(3) == column) &&
             (tensor.size(2) == 1 || tensor.stride(2) == width_ * column);
    };
    planes_ = is(1);
    column_ = planes_ ? 1 : width_ > 1 ? tensor.stride(3) : tensor.stride(2);
    Require(planes_ || (is(column_) && (channel_ == 1 || tensor.size(1) == 1)), "half-precision images are dense");
  }

  // Neighbouring channels that are copied together: half a cache line.
  int64_t together() const { return planes_ ? 1 : 16; }
  std::size_t SizeOf(int64_t channels) const { return static_cast<std::size_t>(channels * pixels_); }

  // Strides of a copy of `channels` channels of an image.
  struct Strides {
    std::ptrdiff_t channel, row, column;
  };
  Strides StridesOf(int64_t channels) const {
    if (planes_) return {pixels_, width_, 1};
    return {1, channels * width_, channels};
  }

  void WidenTo(float* target, int64_t image, int64_t first, int64_t channels) const {
    Widen(TheSet(), type_, RunsOf(channels), data_ + image * batch_ + first * channel_, target);
  }
  void RoundFrom(const float* source, int64_t image, int64_t first, int64_t channels) const {
    Round(TheSet(), type_, RunsOf(channels), source, data_ + image * batch_ + first * channel_);
  }

 private:
  HalfRuns RunsOf(int64_t channels) const {
    if (planes_ ? channel_ == pixels_ : column_ == channels) return {1, SizeOf(channels)};
    const auto pixels = static_cast<std::size_t>(pixels_), together = static_cast<std::size_t>(channels);
    return planes_ ? HalfRuns{together, pixels, channel_} : HalfRuns{pixels, together, column_};
  }

  Element type_;
  std::uint16_t* data_;
  std::ptrdiff_t batch_, channel_, column_;
  int64_t width_, pixels_;
  bool planes_;
};

}  // namespace polyconv
