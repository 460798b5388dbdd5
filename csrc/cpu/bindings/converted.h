// Operands of the depthwise kernels in half precision: float32 copies of blocks of channels, which stay in a core's cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "bindings/denormals.h"
#include "bindings/tensors.h"
#include "common/half.h"

namespace polyconv {

inline bool IsHalf(const View& tensor) {
  return ElementOf(tensor) != Element::kFloat;
}

// Runs on the calling thread: blocks are in parallel, not their parts.
inline const Runtime& OneThread() {
  static const Runtime runtime{[](int64_t count, const RangeBody& body) { body(0, count); }, 1};
  return runtime;
}

// Dense elements in memory order, for weights and biases: the copy has the strides of the tensor.
class Elements {
 public:
  explicit Elements(const View& tensor) : type_(ElementOf(tensor)), copy_(tensor.numel()) {
    Require(Takes(tensor), "weights that are converted are dense");
  }
  static bool Takes(const View& tensor) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    return last == tensor.numel() - 1 || tensor.numel() == 0;
  }

  float* data() { return copy_.data(); }
  std::size_t size() const { return copy_.size(); }
  float* Widened(const View& tensor) {
    Widen(TheSet(), type_, {1, copy_.size()}, tensor.data(), data());
    return data();
  }
  void RoundTo(const View& tensor) {
    Round(TheSet(), type_, {1, copy_.size()}, data(), const_cast<void*>(tensor.data()));
  }

 private:
  Element type_;
  std::vector<float> copy_;
};

// Images whose planes are dense (NCHW), or whose pixels are (channels_last).
class Images {
 public:
  // `data`: that of another tensor with the layout of `tensor`.
  explicit Images(const View& tensor, const void* data = nullptr)
      : type_(ElementOf(tensor)),
        data_(static_cast<char*>(const_cast<void*>(data == nullptr ? tensor.data() : data))),
        batch_(tensor.stride(0)),
        channel_(tensor.stride(1)),
        column_(ColumnOf(tensor)),
        width_(tensor.size(3)),
        pixels_(tensor.size(2) * tensor.size(3)),
        planes_(HasColumns(tensor, 1)) {
    Require(Takes(tensor), "images that are converted are dense");
  }
  static bool HasPlanes(const View& tensor) { return HasColumns(tensor, 1); }
  static bool Takes(const View& tensor) {
    if (HasPlanes(tensor)) return true;
    return HasColumns(tensor, ColumnOf(tensor)) && (tensor.stride(1) == 1 || tensor.size(1) == 1);
  }

  // Neighbouring channels that are copied together: half a cache line.
  int64_t together() const { return planes_ ? 1 : 16; }
  bool planes() const { return planes_; }
  std::size_t SizeOf(int64_t channels) const { return static_cast<std::size_t>(channels * pixels_); }

  // Strides of a copy of `channels` channels of an image.
  struct Strides {
    std::ptrdiff_t channel, row, column;
  };
  Strides StridesOf(int64_t channels) const {
    if (planes_) return {pixels_, width_, 1};
    return {1, channels * width_, channels};
  }

  void CopyTo(float* target, int64_t image, int64_t first, int64_t channels) const {
    Widen(TheSet(), type_, RunsOf(channels), At(image, first), target);
  }

  // The copy is times a power of two if all elements are tiny. Returns its exponent, or 0.
  int WidenTo(float* target, int64_t image, int64_t first, int64_t channels) const {
    CopyTo(target, image, first, channels);
    return type_ == Element::kFloat16 ? 0 : Normalise(target, static_cast<int64_t>(SizeOf(channels)));
  }

  // Of elements times 2^exponent, which are overwritten unless it is 0.
  void RoundFrom(float* source, int exponent, int64_t image, int64_t first, int64_t channels) const {
    Rescale(source, static_cast<int64_t>(SizeOf(channels)), exponent);
    Round(TheSet(), type_, RunsOf(channels), source, At(image, first));
  }

 private:
  static int64_t ColumnOf(const View& tensor) {
    if (HasColumns(tensor, 1)) return 1;
    return tensor.size(3) > 1 ? tensor.stride(3) : tensor.stride(2);
  }
  static bool HasColumns(const View& tensor, int64_t column) {
    return (tensor.size(3) == 1 || tensor.stride(3) == column) &&
           (tensor.size(2) == 1 || tensor.stride(2) == tensor.size(3) * column);
  }

  char* At(int64_t image, int64_t channel) const { return data_ + (image * batch_ + channel * channel_) * 2; }
  HalfRuns RunsOf(int64_t channels) const {
    if (planes_ ? channel_ == pixels_ : column_ == channels) return {1, SizeOf(channels)};
    const auto pixels = static_cast<std::size_t>(pixels_), together = static_cast<std::size_t>(channels);
    return planes_ ? HalfRuns{together, pixels, channel_} : HalfRuns{pixels, together, column_};
  }

  Element type_;
  char* data_;
  std::ptrdiff_t batch_, channel_, column_;
  int64_t width_, pixels_;
  bool planes_;
};

}  // namespace polyconv
