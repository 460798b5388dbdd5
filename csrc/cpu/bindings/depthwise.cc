// Operators of the depthwise kernels (depthwise/depthwise.h).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

#include "bindings/converted.h"
#include "bindings/denormals.h"
#include "bindings/passes.h"
#include "bindings/tensors.h"
#include "common/memory.h"
#include "depthwise/depthwise.h"
#include "depthwise/segments.h"

namespace polyconv {
namespace {

using AxisOf = DepthwiseAxis (*)(int source, int target, int taps, int stride, int dilation, int before);

void RequireDepthwise(const View& x, const View& w, const View& y, const Geometry& geometry) {
  Require(x.dim() == 4 && w.dim() == 4 && y.dim() == 4, "tensors have four dimensions");
  Require(x.size(0) == y.size(0), "batch sizes differ");
  Require(x.size(1) == geometry.groups && w.size(1) == 1, "a depthwise convolution has one input channel per group");
  Require(w.size(0) == y.size(1) && y.size(1) % geometry.groups == 0, "the weight does not fit the channels");
  RequireCountable(x, w, y, geometry);
}

// Sizes and strides of a correlation that reads `x` and writes `y`. For a weight gradient, `y` is dy and is read too.
DepthwiseShape ShapeOf(const View& x, const View& w, const View& y, const Geometry& geometry, AxisOf axis_of) {
  const auto axis = [&](int dim, int stride, int dilation, int before) {
    return axis_of(Extent(x, dim), Extent(y, dim), Extent(w, dim), stride, dilation, before);
  };
  DepthwiseShape s{};
  s.batch = Extent(x, 0);
  s.groups = geometry.groups;
  s.height = axis(2, geometry.stride_h, geometry.dilation_h, geometry.top);
  s.width = axis(3, geometry.stride_w, geometry.dilation_w, geometry.left);
  s.border = geometry.border;
  s.x_batch = x.stride(0), s.x_channel = x.stride(1), s.x_row = x.stride(2), s.x_column = x.stride(3);
  s.y_batch = y.stride(0), s.y_channel = y.stride(1), s.y_row = y.stride(2), s.y_column = y.stride(3);
  s.w_channel = w.stride(0), s.w_row = w.stride(2), s.w_column = w.stride(3);
  return s;
}

// A correlation from `x` to `y`.
DepthwiseCorrelation Describe(const View& x, const View& w, const View& y, const Geometry& geometry, AxisOf axis_of) {
  DepthwiseCorrelation c{ShapeOf(x, w, y, geometry, axis_of)};
  c.x = x.const_data_ptr<float>();
  c.w = w.const_data_ptr<float>();
  c.y = y.mutable_data_ptr<float>();
  c.reads = Extent(x, 1) / c.groups;
  c.writes = Extent(y, 1) / c.groups;
  c.x_group = c.reads * c.x_channel;
  AdviseHugePages(c.y, static_cast<std::size_t>(y.numel()) * sizeof(float));
  return c;
}

void SetBias(DepthwiseCorrelation& conv, const std::optional<View>& bias) {
  if (!bias.has_value()) return;
  conv.bias = bias->const_data_ptr<float>();
  conv.bias_step = bias->stride(0);
}

// By segments if asked for and possible, or directly. `transformed`: weights by segments, if they were kept.
void Run(const DepthwiseCorrelation& conv, bool by_segments, const float* transformed, const Runtime& runtime) {
  if (by_segments && TakesSegments(TheSet(), conv)) return RunSegments(TheSet(), conv, transformed, runtime);
  RunDepthwise(TheSet(), conv, runtime);
}

// Whether kernels pack `x`, and scale it then if it is tiny. Those for adjacent channels read it where it is.
bool IsPacked(const View& x) {
  return x.stride(1) != 1;
}

// Whether CorrelateBands takes a correlation: rows without gaps, of adjacent channels, and outputs in order.
bool HasBands(const View& x, const DepthwiseAxis& height, Border border) {
  return !IsPacked(x) && x.size(1) > 1 && x.stride(3) == x.size(1) && x.stride(2) == x.size(3) * x.size(1) &&
         border == Border::kZeros && height.phases.size() == 1;
}

// Correlates tiny images of adjacent channels in bands of rows, which are scaled in copies that stay in a core's cache.
void CorrelateBands(const DepthwiseCorrelation& whole, int64_t row) {
  constexpr int64_t kFloats = 1 << 17;
  const DepthwiseAxis& height = whole.height;
  const AxisPhase& all = height.phases[0];
  const int64_t halo = (all.taps - 1) * all.dilation, outputs = height.target;
  const int64_t rows = std::min(outputs, std::max<int64_t>(4, (kFloats / row - halo - 1) / height.stride + 1));
  const int64_t bands = (outputs + rows - 1) / rows;
  TheRuntime().parallel_for(whole.batch * bands, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t task = begin; task < end; task++) {
      const int64_t image = task / bands, from = task % bands * rows, count = std::min(rows, outputs - from);
      const int64_t top = from * height.stride - all.padding, bottom = top + (count - 1) * height.stride + halo + 1;
      const int64_t first = std::clamp<int64_t>(top, 0, height.source - 1);
      const int64_t read = std::clamp<int64_t>(bottom, first + 1, height.source) - first;
      float* copy = scratch.Get(static_cast<std::size_t>(read * row));
      const float* x = whole.x + image * whole.x_batch + first * whole.x_row;
      if (!WereTiny(ScaleUp({x, 1, copy, 1}, read * row, kTinyExponent))) *whole.tiny.ordinary = true;
      DepthwiseCorrelation band = whole;
      AxisPhase phase = all;
      phase.count = static_cast<int>(count), phase.padding = static_cast<int>(first - top);
      band.height = MakeAxis(static_cast<int>(read), static_cast<int>(count), height.stride, {phase});
      band.batch = 1, band.x = copy;
      band.tiny.scales = false;  // not once more
      band.y += image * whole.y_batch + from * whole.y_row;
      RunDepthwise(TheSet(), band, OneThread());
    }
  });
}

// Correlates float32 tensors. Tiny ones are scaled where they are packed, and so is the sum where it is stored. A bias is
// times the same power of two in the meantime; activations other than ReLU, and residuals, take another pass over the
// output.
void Correlate(const View& x, const View& w, const std::optional<View>& bias, const View& y, const Geometry& geometry,
               AxisOf axis_of, const Epilogue<float>& epilogue) {
  // 2^100 times a number that is scaled, and 2^16 times the largest factor of a sum, are no infinity.
  constexpr std::uint32_t kHuge = std::uint32_t{127 + 100} << 23, kLargeBias = std::uint32_t{127 + 16} << 23;
  static thread_local Scratch scratch[2];
  constexpr int kLeastExponent = 24;  // makes all denormals ordinary numbers; times a huge weight they are no infinity
  const bool tiny = MayBeTiny(x), huge = tiny && LargestOf(w, kHuge) >= kHuge;
  bool scales = tiny && !huge;
  const bool in_bands = scales && HasBands(x, ShapeOf(x, w, y, geometry, axis_of).height, geometry.border);
  const bool copies = scales && !in_bands && !IsPacked(x);
  scales = scales && !copies;
  const Operand input(x, scratch[0], copies ? kTinyExponent : huge ? kLeastExponent : 0);
  const Operand weights(w, scratch[1], kTinyExponent);
  std::vector<float> biases;
  const auto run = [&](const View& target, const std::optional<View>& added, const Epilogue<float>& finish) {
    std::atomic<bool> ordinary{false};
    DepthwiseCorrelation conv = Describe(input.view, weights.view, target, geometry, axis_of);
    conv.epilogue = finish;
    conv.tiny = {input.exponent + weights.exponent + (scales ? kTinyExponent : 0), scales, &ordinary};
    SetBias(conv, added);
    if (conv.bias != nullptr && conv.tiny.exponent > 0) {
      biases.resize(bias->numel());
      ScaleUp({conv.bias, conv.bias_step, biases.data(), 1}, bias->numel(), conv.tiny.exponent);
      conv.bias = biases.data(), conv.bias_step = 1;
    }
    if (scales && in_bands) {
      CorrelateBands(conv, x.stride(2));
    } else {
      RunDepthwise(TheSet(), conv, TheRuntime());
    }
    return !ordinary;
  };
  const auto run_any = [&](const View& target, const std::optional<View>& added, const Epilogue<float>& finish) {
    if (run(target, added, finish)) return;
    scales = false;
    run(target, added, finish);
  };
  const bool simple = epilogue.residual == nullptr &&
                      (epilogue.activation == Activation::kNone || epilogue.activation == Activation::kRelu);
  if (input.exponent + weights.exponent == 0 && !scales) return run_any(y, bias, epilogue);
  if (simple && (!bias.has_value() || LargestOf(*bias, kLargeBias) < kLargeBias)) return run_any(y, bias, epilogue);
  ForwardOfTiny(y, 0, bias, epilogue, [&](const View& sum) { run_any(sum, std::nullopt, {}); });
}

// Correlates float32 tensors by segments. Tiny ones are scaled in copies.
void CorrelateSegments(const View& x, const View& w, const std::optional<View>& bias, const View& y,
                       const Geometry& geometry, AxisOf axis_of, const DepthwiseAlgorithm& algorithm,
                       const Epilogue<float>& epilogue) {
  const bool packed = algorithm.packed_only;
  // A transform is linear: packed weights times a power of two are those of the weights times it.
  const Operands of(x, packed ? *algorithm.transformed : w);
  const auto run = [&](const View& out, const std::optional<View>& added, const Epilogue<float>& last) {
    DepthwiseCorrelation conv = Describe(of.a.view, packed ? w : of.b.view, out, geometry, axis_of);
    conv.epilogue = last;
    SetBias(conv, added);
    const float* transformed = nullptr;
    const bool takes = TakesSegments(TheSet(), conv);
    if (packed || (algorithm.transformed.has_value() && takes && of.b.exponent == 0)) {
      const View& kept = packed ? of.b.view : *algorithm.transformed;
      Require(
          takes && static_cast<std::size_t>(kept.numel()) == TransformSegments(TheSet(), conv, nullptr, OneThread()),
          "the transformed weights do not fit the layer");
      transformed = kept.const_data_ptr<float>();
    }
    Run(conv, true, transformed, TheRuntime());
  };
  if (of.exponent() == 0) return run(y, bias, epilogue);
  ForwardOfTiny(y, -of.exponent(), bias, epilogue, [&](const View& sum) { run(sum, std::nullopt, {}); });
}

// Calls run(image, first, count, memory) for blocks of groups of an image whose float32 copies, `floats` per group, stay
// in a core's cache. Blocks depend on the sizes only. Each runs in one thread.
template <class Run>
void ForEachBlock(int64_t images, int64_t groups, int64_t together, std::size_t floats, const Run& run) {
  constexpr std::size_t kFloatsOfABlock = std::size_t{1} << 16;
  const int64_t wanted = static_cast<int64_t>(std::max<std::size_t>(1, kFloatsOfABlock / floats));
  const int64_t size = std::min(groups, (wanted + together - 1) / together * together);
  const int64_t blocks = (groups + size - 1) / size;
  TheRuntime().parallel_for(images * blocks, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* memory = scratch.Get(floats * static_cast<std::size_t>(size));
    for (int64_t task = begin; task < end; task++) {
      const int64_t first = task % blocks * size;
      run(task / blocks, first, std::min(size, groups - first), memory);
    }
    scratch.Trim();
  });
}

void SetX(DepthwiseShape& s, const Images::Strides& strides, std::ptrdiff_t batch) {
  s.x_batch = batch, s.x_channel = strides.channel, s.x_row = strides.row, s.x_column = strides.column;
}
void SetY(DepthwiseShape& s, const Images::Strides& strides, std::ptrdiff_t batch) {
  s.y_batch = batch, s.y_channel = strides.channel, s.y_row = strides.row, s.y_column = strides.column;
}

// y = activation(y + bias + residual) of a block in which y is a sum.
void FinishBlock(const DepthwiseCorrelation& block, int64_t pixels, bool planes) {
  const int64_t channels = int64_t{1} * block.groups * block.writes;
  const int64_t outer = planes ? channels : pixels, inner = planes ? pixels : channels;
  for (int64_t i = 0; i < outer; i++) {
    const float* bias = block.bias == nullptr || !planes ? block.bias : block.bias + i;
    const float* residual = block.epilogue.residual == nullptr ? nullptr : block.epilogue.residual + i * inner;
    float* y = block.y + i * inner;
    Finish({y, 1, bias, planes ? 0 : 1, residual, y, 1}, inner, block.epilogue);
  }
}

// Correlates tensors that are in half precision in float32 copies of blocks (converted.h). Every block that is tiny is
// scaled by its own power of two.
void CorrelateConverted(const View& x, const View& w, const std::optional<View>& bias, const View& y,
                        const Geometry& geometry, AxisOf axis_of, bool by_segments, const Epilogue<float>& epilogue,
                        const void* residual) {
  const Images from(x), to(y), added(y, residual);
  Elements weights(w), biases(bias.has_value() ? *bias : w);
  DepthwiseCorrelation whole{ShapeOf(x, w, y, geometry, axis_of)};
  whole.reads = Extent(x, 1) / whole.groups;
  whole.writes = Extent(y, 1) / whole.groups;
  whole.batch = 1;
  whole.w = weights.Widened(w);
  whole.bias = bias.has_value() ? biases.Widened(*bias) : nullptr;
  whole.bias_step = 1;
  whole.epilogue = epilogue;
  const int weight_exponent = Normalise(weights.data(), static_cast<int64_t>(weights.size()));
  const std::size_t read = from.SizeOf(whole.reads), written = to.SizeOf(whole.writes);
  const std::size_t kept = residual == nullptr ? 0 : written;
  ForEachBlock(x.size(0), whole.groups, std::max(from.together(), to.together()), read + written + kept,
               [&](int64_t image, int64_t first, int64_t groups, float* memory) {
                 const auto count = static_cast<std::size_t>(groups);
                 DepthwiseCorrelation block = whole;
                 float* y_copy = memory + count * read;
                 float* residual_copy = y_copy + count * written;
                 block.groups = static_cast<int>(groups);
                 block.x = memory, block.y = y_copy;
                 block.w += first * whole.reads * whole.writes * whole.w_channel;
                 if (block.bias != nullptr) block.bias += first * whole.writes;
                 SetY(block, to.StridesOf(groups * whole.writes), 0);
                 SetX(block, from.StridesOf(groups * whole.reads), 0);
                 const int exponent =
                     weight_exponent + from.WidenTo(memory, image, first * whole.reads, groups * whole.reads);
                 block.x_group = block.reads * block.x_channel;
                 if (kept > 0) {
                   added.CopyTo(residual_copy, image, first * whole.writes, groups * whole.writes);
                   block.epilogue.residual = residual_copy;
                 }
                 DepthwiseCorrelation sum = block;
                 if (exponent > 0) sum.bias = nullptr, sum.epilogue = {};
                 Run(sum, by_segments, nullptr, OneThread());
                 const bool finishes = exponent > 0 && (block.bias != nullptr || !block.epilogue.IsEmpty());
                 if (finishes) {
                   Rescale(y_copy, static_cast<int64_t>(count * written), -exponent);
                   FinishBlock(block, static_cast<int64_t>(to.SizeOf(1)), to.planes());
                 }
                 to.RoundFrom(y_copy, finishes ? 0 : -exponent, image, first * whole.writes, groups * whole.writes);
               });
}

// The weight gradient of tensors in half precision: those of some images at a time in float32, which are added in double.
void ConvertedWeightGradient(const View& x, const View& dy, const View& dw, const std::optional<View>& db,
                             const Geometry& geometry) {
  constexpr int64_t kMostParts = 64;
  const Images from(x), to(dy);
  Elements weights(dw), biases(db.has_value() ? *db : dw);
  DepthwiseWeightGradient whole{ShapeOf(x, dw, dy, geometry, &ForwardAxis)};
  whole.multiplier = Extent(dy, 1) / whole.groups;
  whole.bias_step = 1;
  const int64_t images = whole.batch, together = std::max<int64_t>(1, (images + kMostParts - 1) / kMostParts);
  const int64_t parts = (images + together - 1) / together, outputs = dy.size(1);
  const std::size_t size = weights.size(), part = size + outputs;
  std::vector<float> sums(part * parts);                 // [part][dw, db]
  std::vector<double> scales(parts * outputs * 2, 1.0);  // [part][output][dw, db]
  const std::size_t read = together * from.SizeOf(1), other = together * to.SizeOf(whole.multiplier);
  ForEachBlock(parts, whole.groups, std::max(from.together(), to.together()), read + other,
               [&](int64_t number, int64_t first, int64_t groups, float* memory) {
                 const auto count = static_cast<std::size_t>(groups);
                 DepthwiseWeightGradient block = whole;
                 float* dy_copy = memory + count * read;
                 const int64_t channels = groups * whole.multiplier, first_image = number * together;
                 const int64_t first_output = first * whole.multiplier;
                 block.batch = static_cast<int>(std::min(together, images - first_image));
                 block.groups = static_cast<int>(groups);
                 block.x = memory, block.dy = dy_copy;
                 block.dw = sums.data() + number * part + first_output * whole.w_channel;
                 if (db.has_value()) block.db = sums.data() + number * part + size + first_output;
                 SetX(block, from.StridesOf(groups), static_cast<std::ptrdiff_t>(from.SizeOf(groups)));
                 SetY(block, to.StridesOf(channels), static_cast<std::ptrdiff_t>(to.SizeOf(channels)));
                 int of_x = 0, of_dy = 0;
                 if (block.batch == 1) {
                   of_x = from.WidenTo(memory, first_image, first, groups);
                   of_dy = to.WidenTo(dy_copy, first_image, first_output, channels);
                 } else {
                   for (int64_t image = 0; image < block.batch; image++) {
                     from.CopyTo(memory + image * block.x_batch, first_image + image, first, groups);
                     to.CopyTo(dy_copy + image * block.y_batch, first_image + image, first_output, channels);
                   }
                   of_x = Normalise(memory, static_cast<int64_t>(block.batch * from.SizeOf(groups)));
                   of_dy = Normalise(dy_copy, static_cast<int64_t>(block.batch * to.SizeOf(channels)));
                 }
                 for (int64_t k = first_output; k < first_output + channels; k++) {
                   scales[(number * outputs + k) * 2] = std::ldexp(1.0, -of_x - of_dy);
                   scales[(number * outputs + k) * 2 + 1] = std::ldexp(1.0, -of_dy);
                 }
                 RunDepthwise(TheSet(), block, OneThread());
               });
  const FloatControl own(FloatControl::Own());  // sums may be denormal
  const auto total = [&](std::size_t at, int64_t output, int which) {
    double sum = 0.0;
    for (int64_t i = 0; i < parts; i++) sum += sums[i * part + at] * scales[(i * outputs + output) * 2 + which];
    return static_cast<float>(sum);
  };
  const int64_t taps_w = dw.size(3), taps = dw.size(2) * taps_w;
  for (int64_t k = 0; k < outputs; k++) {
    for (int64_t tap = 0; tap < taps; tap++) {
      const int64_t at = k * whole.w_channel + tap / taps_w * whole.w_row + tap % taps_w * whole.w_column;
      weights.data()[at] = total(at, k, 0);
    }
    if (db.has_value()) biases.data()[k] = total(size + k, k, 1);
  }
  weights.RoundTo(dw);
  if (db.has_value()) biases.RoundTo(*db);
}

void ForwardOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
               const std::vector<int64_t>& geometry, const std::optional<Tensor>& residual, int64_t activation,
               double a, double b, bool by_segments, const std::optional<Tensor>& transformed) {
  RequireResidual(residual, y);
  DepthwiseForward(x, w, bias, y, ReadGeometry(geometry), {by_segments, transformed},
                   ReadEpilogue<float>(std::nullopt, activation, a, b, y),
                   residual.has_value() ? residual->const_data_ptr() : nullptr);
}

// Transformed weights for `depthwise_fprop` by segments. They depend on instruction set and weights only.
Tensor TransformOp(const Tensor& weight) {
  const View w(weight);
  Require(w.dim() == 4 && w.size(1) == 1 && w.numel() > 0, "a depthwise convolution has one input channel per group");
  Require(TheSet() != InstructionSet::kSse4, "this instruction set has no kernels for segments");
  const FloatControl flush;
  DepthwiseCorrelation c{};
  c.groups = Extent(w, 0);
  c.height = ForwardAxis(Extent(w, 2), 1, Extent(w, 2), 1, 1, 0);
  c.width = ForwardAxis(Extent(w, 3), 1, Extent(w, 3), 1, 1, 0);
  c.w = w.const_data_ptr<float>();
  c.w_channel = w.stride(0), c.w_row = w.stride(2), c.w_column = w.stride(3);
  const std::size_t size = TransformSegments(TheSet(), c, nullptr, OneThread());
  Tensor transformed = torch::stable::new_empty(weight, {static_cast<int64_t>(size)});
  float* target = transformed.mutable_data_ptr<float>();
  AdviseHugePages(target, size * sizeof(float));
  TransformSegments(TheSet(), c, target, TheRuntime());
  return transformed;
}

// Depthwise convolution of volumes with zeros around them. The caller scales tiny tensors. w: [channel][tap along the
// depth][row][column]; geometry: strides, zeros before the input, dilations, each along depth, height and width.
void VolumesOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
               const std::vector<int64_t>& geometry) {
  Require(x.dim() == 5 && w.dim() == 4 && y.dim() == 5, "volumes have five dimensions, weights four");
  Require(x.size(0) == y.size(0) && x.size(1) == y.size(1) && w.size(0) == y.size(1), "batch sizes or channels differ");
  Require(w.is_contiguous(), "the weights are contiguous");
  Require(x.scalar_type() == y.scalar_type() && w.scalar_type() == y.scalar_type() && !IsHalf(y),
          "the tensors are of float32");
  Require(geometry.size() == 9, "a geometry of volumes has 9 numbers");
  if (y.numel() == 0) return;
  const FloatControl flush;
  const auto axis = [&](int i) {
    const auto at = [&](int part) { return Narrow(geometry[part * 3 + i], "a stride, a padding or a dilation"); };
    const int64_t stride = at(0), before = at(1), dilation = at(2);
    Require(stride > 0 && dilation > 0 && before >= 0, "strides and dilations are positive, paddings not negative");
    const int in = Extent(x, i + 2), out = Extent(y, i + 2), taps = Extent(w, i + 1);
    Narrow(std::max(stride * out + dilation * taps, in + before) + 32 * (stride + dilation), "the last tap's place");
    return ForwardAxis(in, out, taps, at(0), at(2), at(1));
  };
  DepthwiseCorrelation c{};
  c.batch = Extent(y, 0), c.groups = Extent(y, 1), c.reads = Extent(w, 1), c.writes = 1;
  c.depth = axis(0), c.height = axis(1), c.width = axis(2);
  c.border = Border::kZeros;
  c.x_batch = x.stride(0), c.x_group = x.stride(1), c.x_channel = x.stride(2), c.x_row = x.stride(3);
  c.y_batch = y.stride(0), c.y_channel = y.stride(1), c.y_slice = y.stride(2), c.y_row = y.stride(3);
  c.x_column = x.stride(4), c.y_column = y.stride(4);
  c.w_channel = w.size(2) * w.size(3), c.w_row = w.size(3), c.w_column = 1;
  c.x = x.const_data_ptr<float>(), c.w = w.const_data_ptr<float>(), c.y = y.mutable_data_ptr<float>();
  AdviseHugePages(c.y, static_cast<std::size_t>(y.numel()) * sizeof(float));
  SetBias(c, bias);
  RunDepthwise(TheSet(), c, TheRuntime());
}

// Longest sequential sum in `depthwise_wgrad`, for the error model. sizes: x (4), dw (4), rows and columns of dy.
int64_t LongestSumOp(const std::vector<int64_t>& sizes, const std::vector<int64_t>& geometry_numbers) {
  Require(sizes.size() == 10, "four sizes of x, four of dw, rows and columns of dy");
  Require(*std::min_element(sizes.begin(), sizes.end()) > 0, "no size is zero");
  const Geometry geometry = ReadGeometry(geometry_numbers);
  const auto at = [&](int i) { return Narrow(sizes[i], "an extent of a tensor"); };
  DepthwiseWeightGradient g{};
  g.height = {at(2), at(8), geometry.stride_h, geometry.dilation_h};
  g.width = {at(3), at(9), geometry.stride_w, geometry.dilation_w};
  return LongestDepthwiseSum(TheSet(), g);
}

}  // namespace

void DepthwiseForward(const View& x, const View& w, const std::optional<View>& bias, const View& y,
                      const Geometry& geometry, const DepthwiseAlgorithm& algorithm, Epilogue<float> epilogue,
                      const void* residual) {
  RequireDepthwise(x, w, y, geometry);
  if (y.numel() == 0) return;
  const FloatControl flush;
  if (IsHalf(x)) {
    return CorrelateConverted(x, w, bias, y, geometry, &ForwardAxis, algorithm.by_segments, epilogue, residual);
  }
  epilogue.residual = static_cast<const float*>(residual);
  if (algorithm.by_segments) return CorrelateSegments(x, w, bias, y, geometry, &ForwardAxis, algorithm, epilogue);
  Correlate(x, w, bias, y, geometry, &ForwardAxis, epilogue);
}

// `bias`: of a transposed convolution.
void DepthwiseInputGradientOp(const Tensor& dy, const Tensor& w, const Tensor& dx,
                              const std::vector<int64_t>& geometry_numbers, const std::optional<Tensor>& bias,
                              bool by_segments) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  RequireDepthwise(dx, w, dy, geometry);
  Require(geometry.border == Border::kZeros, "the depthwise input gradient knows only a border of zeros");
  if (dx.numel() == 0) return;
  const FloatControl flush;
  if (IsHalf(dy)) return CorrelateConverted(dy, w, bias, dx, geometry, &GradientAxis, by_segments, {}, nullptr);
  if (by_segments) return CorrelateSegments(dy, w, bias, dx, geometry, &GradientAxis, {true}, {});
  Correlate(dy, w, bias, dx, geometry, &GradientAxis, {});
}

void DepthwiseWeightGradientOp(const Tensor& x, const Tensor& dy, const Tensor& dw, const std::optional<Tensor>& db,
                               const std::vector<int64_t>& geometry_numbers) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  RequireDepthwise(x, dw, dy, geometry);
  const FloatControl flush;
  if (IsHalf(x)) return ConvertedWeightGradient(x, dy, dw, db, geometry);
  static thread_local Scratch scratch[2];
  const bool packs = IsPacked(x) || IsPacked(dy);
  const Operand a(x, scratch[0], packs ? 0 : kTinyExponent), b(dy, scratch[1], packs ? 0 : kTinyExponent);
  DepthwiseWeightGradient g{ShapeOf(a.view, dw, b.view, geometry, &ForwardAxis)};
  g.x = a.view.const_data_ptr<float>();
  g.dy = b.view.const_data_ptr<float>();
  g.dw = dw.mutable_data_ptr<float>();
  g.multiplier = Extent(dy, 1) / g.groups;
  if (db.has_value()) {
    g.db = db->mutable_data_ptr<float>();
    g.bias_step = db->stride(0);
  }
  std::atomic<bool> ordinary{false};
  g.tiny = {0, packs && MayBeTiny(x), &ordinary};
  g.scales_dy = packs && MayBeTiny(dy);
  RunDepthwise(TheSet(), g, TheRuntime());
  if (ordinary) {
    g.tiny.scales = g.tiny.scales && !IsOrdinary(LargestOf(x));
    g.scales_dy = g.scales_dy && !IsOrdinary(LargestOf(dy));
    RunDepthwise(TheSet(), g, TheRuntime());
  }
  const int of_dy = b.exponent + (g.scales_dy ? kTinyExponent : 0);
  Rescale(dw, -(a.exponent + (g.tiny.scales ? kTinyExponent : 0) + of_dy));
  if (db.has_value()) Rescale(*db, -of_dy);
}

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  // geometry: stride_h, stride_w, top, left, dilation_h, dilation_w, groups, border
  m.def(
      "depthwise_fprop(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] geometry, "
      "Tensor? residual=None, int activation=0, float activation_a=0, float activation_b=0, "
      "bool by_segments=False, Tensor? transformed=None) -> ()");
  m.def("depthwise_transform(Tensor w) -> Tensor");
  m.def(
      "depthwise_dgrad(Tensor dy, Tensor w, Tensor(a!) dx, int[] geometry, Tensor? bias=None, "
      "bool by_segments=False) -> ()");
  m.def("depthwise_volumes(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] geometry) -> ()");
  m.def("depthwise_longest_sum(int[] sizes, int[] geometry) -> int");
  m.def("depthwise_wgrad(Tensor x, Tensor dy, Tensor(a!) dw, Tensor(b!)? db, int[] geometry) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("depthwise_fprop", TORCH_BOX(&ForwardOp));
  m.impl("depthwise_transform", TORCH_BOX(&TransformOp));
  m.impl("depthwise_dgrad", TORCH_BOX(&DepthwiseInputGradientOp));
  m.impl("depthwise_volumes", TORCH_BOX(&VolumesOp));
  m.impl("depthwise_longest_sum", TORCH_BOX(&LongestSumOp));
  m.impl("depthwise_wgrad", TORCH_BOX(&DepthwiseWeightGradientOp));
}

}  // namespace polyconv
