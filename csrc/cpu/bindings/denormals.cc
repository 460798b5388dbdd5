#include "bindings/denormals.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

// The version of exp that glibc 2.28 has: see reference/reference.cc.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
#endif

// Loops that the compiler vectorises for each instruction set.
#define POLYCONV_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))

namespace polyconv {
namespace {

constexpr std::uint32_t kMagnitude = 0x7fffffff, kSmallestNormal = 0x00800000;
constexpr std::uint32_t kOrdinary = std::uint32_t{127 - 48} << 23;  // 2^-48
constexpr int kDenormalUnit = 149;                                  // denormals are multiples of 2^-149

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

std::uint32_t Bits(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

POLYCONV_CLONES std::uint32_t LargestOfRow(const float* from, int64_t count, int64_t step) {
  std::uint32_t largest = 0;
  if (step == 1) {
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, Bits(from[i]) & kMagnitude);
  } else {
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, Bits(from[i * step]) & kMagnitude);
  }
  return largest;
}

// Bits of the largest magnitude. Any ordinary one, if there is one.
std::uint32_t LargestMagnitude(const View& tensor) {
  constexpr int64_t kStep = 1024;
  const float* data = tensor.const_data_ptr<float>();
  std::uint32_t largest = 0;
  ForRows(tensor, tensor, [&](int64_t first, int64_t, int64_t count, int64_t step, int64_t) {
    for (int64_t begin = 0; begin < count && largest < kOrdinary; begin += kStep) {
      const std::uint32_t found = LargestOfRow(data + first + begin * step, std::min(kStep, count - begin), step);
      largest = std::max(largest, found);
    }
    return largest < kOrdinary;
  });
  return largest;
}

// 2^exponent as a product of two floats, each a normal number.
struct PowerOfTwo {
  explicit PowerOfTwo(int exponent)
      : one(std::ldexp(1.0f, std::clamp(exponent / 2, -126, 127))),
        other(std::ldexp(1.0f, std::clamp(exponent - exponent / 2, -126, 127))) {}
  float one, other;
};

// Factors of a tensor, for normal numbers and for denormal ones as integers.
struct Factors {
  PowerOfTwo normal, denormal;
};

// The bits of one of two magnitudes, with the sign of `value`. Without a branch, so that loops are vectorised.
float Chosen(bool counts, std::uint32_t counted, float normal, float value) {
  const std::uint32_t mask = -static_cast<std::uint32_t>(counts);
  return std::bit_cast<float>((counted & mask) | (Bits(normal) & ~mask) | (Bits(value) & ~kMagnitude));
}

// to = from * 2^exponent for tiny values, the results being ordinary. Integers take the place of denormal operands.
struct ScaleUp {
  static Factors Of(int exponent) { return {PowerOfTwo(exponent), PowerOfTwo(exponent - kDenormalUnit)}; }
  static float Scaled(float value, Factors by) {
    const std::uint32_t magnitude = Bits(value) & kMagnitude;
    const float counted =
        static_cast<float>(static_cast<std::int32_t>(magnitude)) * by.denormal.one * by.denormal.other;
    const float normal = std::bit_cast<float>(magnitude) * by.normal.one * by.normal.other;
    return Chosen(magnitude < kSmallestNormal, Bits(counted), normal, value);
  }
};

// to = from * 2^exponent for ordinary values and a negative exponent. Denormal results are rounded as integers.
struct ScaleDown {
  static Factors Of(int exponent) { return {PowerOfTwo(exponent), PowerOfTwo(exponent + kDenormalUnit)}; }
  static float Scaled(float value, Factors by) {
    constexpr float kIntegers = 0x1p23f;  // from here on floats are integers
    const float magnitude = std::bit_cast<float>(Bits(value) & kMagnitude);
    const float normal = magnitude * by.normal.one * by.normal.other;
    const float counted = magnitude * by.denormal.one * by.denormal.other + kIntegers;
    return Chosen(Bits(normal) < kSmallestNormal, Bits(counted) - Bits(kIntegers), normal, value);
  }
};

POLYCONV_CLONES void ScaleRow(ScaleUp, const float* from, float* to, int64_t count, Factors by) {
  for (int64_t i = 0; i < count; i++) to[i] = ScaleUp::Scaled(from[i], by);
}
POLYCONV_CLONES void ScaleRow(ScaleDown, const float* from, float* to, int64_t count, Factors by) {
  for (int64_t i = 0; i < count; i++) to[i] = ScaleDown::Scaled(from[i], by);
}

// to = from * 2^exponent
template <class Scale>
void Apply(Scale scale, int exponent, const View& from, const View& to) {
  const FloatControl flush;
  const Runtime runtime = TheRuntime();
  const Factors by = Scale::Of(exponent);
  const float* source = from.const_data_ptr<float>();
  float* target = to.mutable_data_ptr<float>();
  ForRows(from, to, [&](int64_t first, int64_t start, int64_t count, int64_t step, int64_t stride) {
    constexpr int64_t kShare = 1 << 14;
    const float* s = source + first;
    float* t = target + start;
    if (step != 1 || stride != 1) {
      for (int64_t i = 0; i < count; i++) t[i * stride] = Scale::Scaled(s[i * step], by);
    } else if (count < kShare) {
      ScaleRow(scale, s, t, count, by);
    } else {
      runtime.parallel_for((count + kShare - 1) / kShare, [&](int64_t begin, int64_t end) {
        ScaleRow(scale, s + begin * kShare, t + begin * kShare, std::min(end * kShare, count) - begin * kShare, by);
      });
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
  const FloatControl keep(_mm_getcsr() & ~(FloatControl::kDenormalsAreZero | FloatControl::kFlushToZero));
  const float* from = sum.const_data_ptr<float>();
  const float* added = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  float* to = y.mutable_data_ptr<float>();
  const int64_t channels = y.size(1), rows = y.size(2), columns = y.size(3);
  TheRuntime().parallel_for(y.size(0) * channels * rows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t n = i / rows / channels, c = i / rows % channels, row = i % rows;
      const float* s = from + n * sum.stride(0) + c * sum.stride(1) + row * sum.stride(2);
      const int64_t start = n * y.stride(0) + c * y.stride(1) + row * y.stride(2);
      for (int64_t column = 0; column < columns; column++) {
        const int64_t at = start + column * y.stride(3);
        float value = s[column * sum.stride(3)];
        if (added != nullptr) value += added[c * bias->stride(0)];
        if (epilogue.residual != nullptr) value += epilogue.residual[at];
        if (epilogue.activation == Activation::kRelu) {
          to[at] = value < 0 ? 0.0f : value;
        } else if (epilogue.activation == Activation::kNone) {
          to[at] = value;
        } else {
          to[at] = static_cast<float>(Activated(epilogue.activation, epilogue.a, epilogue.b, value));
        }
      }
    }
  });
}

}  // namespace

Operand::Operand(const View& given, Scratch& scratch) : view(Scaled(given, scratch)) {}

View Operand::Scaled(const View& given, Scratch& scratch) {
  const std::uint32_t largest = LargestMagnitude(given);
  if (largest == 0 || largest >= kOrdinary) return given;
  const bool denormal = largest < kSmallestNormal;
  exponent = denormal ? kDenormalUnit - std::bit_width(largest) + 1 : 127 - static_cast<int>(largest >> 23);
  const int64_t count = DenseStrides(given, strides_);
  const View copy(given, strides_, scratch.Get(count));
  Apply(ScaleUp{}, exponent, given, copy);
  return copy;
}

void Rescale(const View& tensor, int exponent) {
  if (exponent < 0) Apply(ScaleDown{}, exponent, tensor, tensor);
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
