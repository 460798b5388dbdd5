#include "bindings/denormals.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "common/old_exp.h"

namespace polyconv {
namespace {

// Rows of up to 5 dimensions: calls body(first element of a, of b, count, step of a, of b) until it returns false. Dense
// tensors of equal strides are one row. `a` and `b` have equal sizes.
template <class Body>
void ForRows(const View& a, const View& b, const Body& body) {
  constexpr int kDims = 5;
  Require(a.dim() >= 1 && a.dim() <= kDims, "tensors have one to five dimensions");
  int64_t size[kDims] = {1, 1, 1, 1, 1}, of_a[kDims] = {}, of_b[kDims] = {}, reach = 1;
  bool alike = true;
  for (int64_t i = 0; i < a.dim(); i++) {
    const int64_t at = kDims - a.dim() + i;
    size[at] = a.size(i), of_a[at] = a.stride(i), of_b[at] = b.stride(i);
    if (of_a[at] == 0 && of_b[at] == 0) size[at] = 1;  // one value, expanded
    reach += (size[at] - 1) * of_a[at];
    alike &= (of_a[at] == of_b[at] && of_a[at] >= 0) || size[at] == 1;
  }
  if (a.numel() == 0) return;
  if (alike && reach == size[0] * size[1] * size[2] * size[3] * size[4]) {
    body(0, 0, reach, 1, 1);
    return;
  }
  for (int64_t i = 0; i < size[0] * size[1] * size[2] * size[3]; i++) {
    int64_t from = 0, to = 0, rest = i;
    for (int dim = kDims - 2; dim >= 0; dim--, rest /= size[dim + 1]) {
      from += rest % size[dim] * of_a[dim], to += rest % size[dim] * of_b[dim];
    }
    if (!body(from, to, size[kDims - 1], of_a[kDims - 1], of_b[kDims - 1])) return;
  }
}

// to = from * 2^exponent by ScaleUp or ScaleDown.
void Apply(decltype(ScaleUp)& scale, int exponent, const View& from, const View& to) {
  const FloatControl flush;
  const Runtime runtime = TheRuntime();
  const float* source = from.const_data_ptr<float>();
  float* target = to.mutable_data_ptr<float>();
  ForRows(from, to, [&](int64_t first, int64_t start, int64_t count, int64_t step, int64_t stride) {
    constexpr int64_t kShare = 1 << 14;
    const auto share = [&](int64_t begin, int64_t end) {
      const int64_t i = begin * kShare;
      scale({source + first + i * step, step, target + start + i * stride, stride}, std::min(end * kShare, count) - i,
            exponent);
    };
    if (count < kShare) {
      share(0, 1);
    } else {
      runtime.parallel_for((count + kShare - 1) / kShare, share);
    }
    return true;
  });
}

// Strides of a dense copy in the memory order of the given tensor. Returns the number of its elements.
int64_t DenseStrides(const View& given, int64_t* strides) {
  const std::size_t dims = given.dim();
  std::vector<int64_t> order(dims);
  std::iota(order.begin(), order.end(), 0);
  // Expanded axes are outermost and channels win ties, so that the channels of a channels_last tensor stay adjacent.
  const auto rank = [&](int64_t i) {
    const int64_t stride = given.stride(i) == 0 ? std::numeric_limits<int64_t>::max() : given.stride(i);
    return std::pair(stride, i != 1);
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return rank(i) > rank(j); });
  int64_t count = 1;
  for (std::size_t i = dims; i-- > 0; count *= given.size(order[i])) strides[order[i]] = count;
  return count;
}

// A tiny operand as a copy that the caller owns, and its exponent. Without elements and 0 for others.
std::tuple<Tensor, int64_t> NormalisedOp(const Tensor& given) {
  static thread_local Scratch scratch;
  const Operand found(given, scratch);
  if (found.exponent == 0) return {torch::stable::new_empty(given, {0}), 0};
  std::vector<int64_t> sizes, strides;
  for (int64_t i = 0; i < given.dim(); i++) {
    sizes.push_back(found.view.size(i)), strides.push_back(found.view.stride(i));
  }
  float* data = found.view.mutable_data_ptr<float>();
  const Tensor copy = torch::stable::from_blob(data, sizes, strides, given.device(), given.scalar_type());
  return {torch::stable::clone(copy), found.exponent};
}

void RescaleOp(const Tensor& tensor, int64_t exponent) {
  Rescale(tensor, Narrow(exponent, "an exponent"));
}

// y = activation(2^exponent sum + bias + residual). `sum` is overwritten, and is `y` if there is no residual.
void FinishForward(const View& sum, int exponent, const std::optional<View>& bias, const Epilogue<float>& epilogue,
                   const View& y) {
  Rescale(sum, exponent);
  if (!bias.has_value() && epilogue.IsEmpty()) return;
  const float* from = sum.const_data_ptr<float>();
  const float* added = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  float* to = y.mutable_data_ptr<float>();
  const int64_t channels = y.size(1), rows = y.size(2);
  TheRuntime().parallel_for(y.size(0) * channels * rows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t n = i / rows / channels, c = i / rows % channels, row = i % rows;
      const int64_t at = n * y.stride(0) + c * y.stride(1) + row * y.stride(2);
      const float* sums = from + n * sum.stride(0) + c * sum.stride(1) + row * sum.stride(2);
      Finish({sums, sum.stride(3), added == nullptr ? nullptr : added + c * bias->stride(0), 0,
              epilogue.residual == nullptr ? nullptr : epilogue.residual + at, to + at, y.stride(3)},
             y.size(3), epilogue);
    }
  });
}

}  // namespace

std::uint32_t LargestOf(const View& tensor, std::uint32_t enough) {
  const float* data = tensor.const_data_ptr<float>();
  std::uint32_t largest = 0;
  ForRows(tensor, tensor, [&](int64_t first, int64_t, int64_t count, int64_t step, int64_t) {
    largest = std::max(largest, LargestMagnitude(data + first, count, step, enough));
    return largest < enough;
  });
  return largest;
}

Operand::Operand(const View& given, Scratch& scratch, int most) : view(Scaled(given, scratch, most)) {}

View Operand::Scaled(const View& given, Scratch& scratch, int most) {
  if (most > 0) exponent = std::min(ExponentFor(LargestOf(given)), most);
  if (exponent == 0) return given;
  const int64_t count = DenseStrides(given, strides_);
  const View copy(given, strides_, scratch.Get(count));
  Apply(ScaleUp, exponent, given, copy);
  return copy;
}

bool MayBeTiny(const View& tensor) {
  constexpr int64_t kSamples = 128, kFirst = 1 << 14;
  const Element type = ElementOf(tensor);
  if (type == Element::kFloat16) return false;
  const int64_t count = tensor.numel(), step = std::max<int64_t>(count / kSamples, 1) | 1;
  for (int64_t i = 0; i < count; i += step) {
    int64_t at = 0;
    for (int64_t dim = tensor.dim() - 1, rest = i; dim >= 0; rest /= tensor.size(dim), dim--) {
      at += rest % tensor.size(dim) * tensor.stride(dim);
    }
    const std::uint32_t bits = type == Element::kFloat
                                   ? static_cast<const std::uint32_t*>(tensor.data())[at]
                                   : std::uint32_t{static_cast<const std::uint16_t*>(tensor.data())[at]} << 16;
    if (IsOrdinary(bits)) return false;
  }
  if (type != Element::kFloat) return true;
  // The samples may all be padding of the tensor, or zeros of a sparse gradient.
  const float* data = tensor.const_data_ptr<float>();
  std::uint32_t largest = 0;
  int64_t seen = 0;
  ForRows(tensor, tensor, [&](int64_t first, int64_t, int64_t row, int64_t stride, int64_t) {
    largest = std::max(largest, LargestMagnitude(data + first, std::min(row, kFirst - seen), stride));
    seen += row;
    return !IsOrdinary(largest) && seen < kFirst;
  });
  return !IsOrdinary(largest);
}

void Rescale(const View& tensor, int exponent) {
  if (exponent < 0) Apply(ScaleDown, exponent, tensor, tensor);
}

void Finish(const FinishedRow& row, int64_t count, const Epilogue<float>& epilogue) {
  const FloatControl exact(FloatControl::Exact());
  for (int64_t i = 0; i < count; i++) {
    float value = row.sums[i * row.sums_step];
    if (row.bias != nullptr) value += row.bias[i * row.bias_step];
    if (row.residual != nullptr) value += row.residual[i * row.step];
    if (epilogue.activation == Activation::kRelu) {
      value = value < 0 ? 0.0f : value;
    } else if (epilogue.activation != Activation::kNone) {
      value = static_cast<float>(Activated(epilogue.activation, epilogue.a, epilogue.b, value));
    }
    row.to[i * row.step] = value;
  }
}

void ForwardOfTiny(const View& y, int exponent, const std::optional<View>& bias, const Epilogue<float>& epilogue,
                   const std::function<void(const View& sum)>& run) {
  if (epilogue.residual == nullptr) {
    run(y);
    return FinishForward(y, exponent, bias, epilogue, y);
  }
  static thread_local Scratch scratch;  // a residual may be the output itself
  int64_t strides[5];
  const int64_t count = DenseStrides(y, strides);
  const View sum(y, strides, scratch.Get(count));
  run(sum);
  FinishForward(sum, exponent, bias, epilogue, y);
}

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  m.def("normalised(Tensor given) -> (Tensor, int)");
  m.def("rescale(Tensor(a!) tensor, int exponent) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("normalised", TORCH_BOX(&NormalisedOp));
  m.impl("rescale", TORCH_BOX(&RescaleOp));
}

}  // namespace polyconv
