// polyconv_cpu::compiled_convolution: runs one layer of a compiled graph, or a chain of layers, epilogues included, on
// packed weights, and allocates its output. planned_fprop and planned_gradients: the passes of a layer in a compiled
// training graph.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bindings/converted.h"
#include "bindings/denormals.h"
#include "bindings/passes.h"
#include "bindings/tensors.h"
#include "common/caches.h"
#include "common/integers.h"
#include "common/memory.h"
#include "common/output_pool.h"
#include "depthwise/depthwise.h"
#include "pointwise/pointwise.h"

namespace polyconv {
namespace {

// Number of the depthwise engine, which is none of enum Lanes.
constexpr int64_t kDepthwise = -1;

// Numbers of a layer, in this order.
struct Layer {
  int64_t engine, scheme;                   // see ReadPlan, or kDepthwise
  int64_t outputs, inputs, taps_h, taps_w;  // the weight's shape
  int64_t stride_h, stride_w;
  int64_t top, bottom, left, right;
  int64_t dilation_h, dilation_w;
  int64_t groups, border, activation;
  int64_t flags;            // see kClamped
  int64_t whole, first;     // channels of a tensor of several layers' outputs, or 0; the layer's first one of them
  int64_t instruction_set;  // that the weights are packed for
};
constexpr std::size_t kNumbers = sizeof(Layer) / sizeof(int64_t), kFlags = offsetof(Layer, flags) / sizeof(int64_t),
                      kWhole = offsetof(Layer, whole) / sizeof(int64_t);
static_assert(kNumbers == 21);

// Flags of a layer: a joined input is clamped at zero; the output may replace the residual, which is read no more; the
// convolution is transposed.
constexpr int64_t kClamped = 1, kOverwrites = 2, kTransposed = 4;

int64_t Outputs(int64_t extent, int64_t before, int64_t after, int64_t taps, int64_t stride, int64_t dilation) {
  const int64_t room = extent + before + after - dilation * (taps - 1) - 1;
  Require(room >= 0, "the kernel is larger than the padded image");
  return room / stride + 1;
}

// The same of a transposed convolution.
int64_t TransposedOutputs(int64_t extent, int64_t before, int64_t after, int64_t taps, int64_t stride,
                          int64_t dilation) {
  const int64_t outputs = (extent - 1) * stride + dilation * (taps - 1) + 1 - before - after;
  Require(outputs >= 0, "the padding is larger than the image");
  return outputs;
}

using Handle = AtenTensorHandle;

struct DeleteTensor {
  void operator()(Handle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// Uninitialised dense tensor. A large one is on pooled memory.
OwnedTensor EmptyImage(const int64_t (&sizes)[4], bool channels_last) {
  const auto [batch, channels, height, width] = sizes;
  const int64_t strides[] = {height * width * channels, channels_last ? 1 : height * width,
                             channels_last ? width * channels : width, channels_last ? channels : 1};
  static const int32_t dtype = aoti_torch_dtype_float32(), device = aoti_torch_device_type_cpu();
  Handle made;
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0
  const std::size_t bytes = sizeof(float) * batch * strides[0];
  if (void* block = bytes >= kSmallestBlock ? TakeOutputBlock(bytes) : nullptr; block != nullptr) {
    const Tensor y =
        torch::stable::from_blob(block, sizes, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                 torch::headeronly::ScalarType::Float, &ReturnOutputBlock);
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(y.get(), &made));
    return OwnedTensor(made);
  }
#endif
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(4, sizes, strides, dtype, device, 0, &made));
  return OwnedTensor(made);
}

OwnedTensor EmptyChannelsLast(int64_t batch, int64_t channels, int64_t height, int64_t width) {
  return EmptyImage({batch, channels, height, width}, true);
}

// The same tensor.
OwnedTensor Shared(Handle tensor) {
  Handle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &made));
  return OwnedTensor(made);
}

std::optional<View> Given(const Handle* tensor) {
  return tensor == nullptr ? std::nullopt : std::optional<View>(*tensor);
}

// Tensor for the output of a layer: the residual if it may be overwritten, which saves reading new memory into the
// caches. Not of tiny operands, whose sums are stored before the residual is added.
OwnedTensor OutputOf(const Layer& l, const View& x, const View& weights, int64_t height, int64_t width,
                     const Handle* residual) {
  if ((l.flags & kOverwrites) != 0 && !MayBeTiny(x) && !MayBeTiny(weights)) {
    Require(residual != nullptr && l.engine == static_cast<int64_t>(Lanes::kPointwise),
            "only pointwise layers with a residual overwrite it");
    const View y(*residual);
    const int64_t sizes[] = {x.size(0), l.outputs, height, width};
    const int64_t strides[] = {height * width * l.outputs, 1, width * l.outputs, l.outputs};
    bool fits = y.dim() == 4;
    for (int axis = 0; fits && axis < 4; axis++) fits = y.size(axis) == sizes[axis] && y.stride(axis) == strides[axis];
    if (fits) return Shared(*residual);
  }
  return EmptyChannelsLast(x.size(0), l.outputs, height, width);
}

// The channels of `whole` from `first` on that a layer writes.
View PartOf(const View& whole, const int64_t* sizes, int64_t channels, int64_t first) {
  bool fits = whole.dim() == 4 && whole.size(1) == channels && first >= 0 && first + sizes[1] <= channels;
  for (const int axis : {0, 2, 3}) fits = fits && whole.size(axis) == sizes[axis];
  Require(fits && (whole.stride(1) == 1 || channels == 1), "the output does not fit into the tensor of several layers");
  return whole.From(first, sizes);
}

// Layers of which each reads only what the one before it writes. A few rows of each are computed at a time, so that
// tensors between the layers stay in L2 as the rows that the next layer still reads. Pointwise and depthwise layers of
// channels_last tensors with a border of zeros, without dilation.
class Chain {
 public:
  // `weights` and `bias`: those of all layers, one after another. The weights of each begin on a cache line.
  Chain(const View& x, const float* weights, const float* bias, const Layer* layers, std::size_t count, double a,
        double b)
      : batch_(Extent(x, 0)), x_(x.const_data_ptr<float>()), x_batch_(x.stride(0)) {
    int channels = Extent(x, 1), height = Extent(x, 2), width = Extent(x, 3);
    std::ptrdiff_t row = x.stride(2), column = x.stride(3);
    for (std::size_t i = 0; i < count; i++) {
      const Layer& l = layers[i];
      const auto at = [](int64_t number) { return Narrow(number, "a number of a layer"); };
      Require(l.inputs * l.groups == channels && std::max(l.dilation_h, l.dilation_w) == 1 &&
                  l.border == static_cast<int64_t>(Border::kZeros),
              "a layer does not fit into a chain");
      Link link{l.engine == kDepthwise};
      Convolution& conv = link.conv;
      conv.batch = 1, conv.in_channels = channels, conv.out_channels = at(l.outputs);
      conv.in_height = height, conv.in_width = width;
      conv.taps_h = at(l.taps_h), conv.taps_w = at(l.taps_w);
      conv.top = at(l.top), conv.left = at(l.left);
      conv.stride_h = at(l.stride_h), conv.stride_w = at(l.stride_w);
      conv.dilation_h = conv.dilation_w = 1;
      conv.out_height = at(Outputs(height, l.top, l.bottom, l.taps_h, l.stride_h, 1));
      conv.out_width = at(Outputs(width, l.left, l.right, l.taps_w, l.stride_w, 1));
      conv.x_channel = conv.y_channel = 1, conv.x_row = row, conv.x_column = column;
      conv.y_column = conv.out_channels, conv.y_row = conv.y_column * conv.out_width;
      conv.w = weights, conv.bias = bias;
      conv.epilogue = {nullptr, static_cast<Activation>(l.activation), static_cast<float>(a), static_cast<float>(b)};
      if (link.depthwise) {
        Require(l.groups == channels && l.outputs == channels, "a layer does not fit into a chain");
      } else {
        Require(l.engine == static_cast<int64_t>(Lanes::kPointwise) && l.groups == 1 && IsPointwise(conv),
                "a layer does not fit into a chain");
      }
      const std::size_t size = link.depthwise ? std::size_t{1} * conv.taps_h * conv.taps_w * channels
                                              : FindPointwise(TheSet())->weights_size(conv);
      weights += RoundUp(size, kLine);
      bias += conv.out_channels;
      channels = conv.out_channels, height = conv.out_height, width = conv.out_width;
      row = conv.y_row, column = conv.y_column;
      links_.push_back(link);
    }
    weights_end_ = weights, bias_end_ = bias;
  }

  // Where the weights and the biases end.
  const float* weights_end() const { return weights_end_; }
  const float* bias_end() const { return bias_end_; }

  int height() const { return links_.back().conv.out_height; }
  int width() const { return links_.back().conv.out_width; }

  // `residual`: laid out as y, or null.
  void Run(float* y, const float* residual) const {
    const Runtime runtime = TheRuntime();
    const int rows = height(), parts = std::clamp(runtime.threads / std::max(batch_, 1), 1, std::max(rows, 1));
    const std::ptrdiff_t image = links_.back().conv.y_row * rows;
    runtime.parallel_for(std::int64_t{1} * batch_ * parts, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; i++) {
        const std::int64_t n = i / parts, part = i % parts;
        RunPart(x_ + n * x_batch_, y + n * image, residual == nullptr ? nullptr : residual + n * image,
                {static_cast<int>(rows * part / parts), static_cast<int>(rows * (part + 1) / parts)});
      }
    });
  }

 private:
  static constexpr std::size_t kLine = 16;  // floats

  struct Rows {
    int first, last;
    int count() const { return last - first; }
  };

  struct Link {
    bool depthwise;
    Convolution conv{};

    // Input rows of output rows.
    Rows Reads(Rows out) const {
      const int first = out.first * conv.stride_h - conv.top;
      return {std::clamp(first, 0, conv.in_height),
              std::clamp((out.last - 1) * conv.stride_h - conv.top + conv.taps_h, 0, conv.in_height)};
    }
    std::size_t Floats(int rows) const { return static_cast<std::size_t>(conv.y_row) * rows; }

    // `x` and `y`: the first of the input rows and of the output rows.
    void Run(Rows out, const float* x, float* y, const float* residual) const {
      const Rows in = Reads(out);
      Convolution c = conv;
      c.in_height = in.count(), c.out_height = out.count();
      c.top = in.first - (out.first * conv.stride_h - conv.top);
      c.x = x, c.y = y, c.epilogue.residual = residual;
      if (!depthwise) return FindPointwise(TheSet())->run(c, {}, conv.w, OneThread());
      DepthwiseCorrelation d{};
      d.batch = 1, d.groups = c.out_channels, d.reads = d.writes = 1;
      d.height = ForwardAxis(c.in_height, c.out_height, c.taps_h, c.stride_h, 1, c.top);
      d.width = ForwardAxis(c.in_width, c.out_width, c.taps_w, c.stride_w, 1, c.left);
      d.x_channel = d.x_group = d.y_channel = d.w_channel = d.bias_step = 1;
      d.x_row = c.x_row, d.x_column = c.x_column, d.y_row = c.y_row, d.y_column = c.y_column;
      d.w_column = c.out_channels, d.w_row = d.w_column * c.taps_w;
      d.x = x, d.w = c.w, d.bias = c.bias, d.y = y, d.epilogue = c.epilogue;
      RunDepthwise(TheSet(), d, OneThread());
    }
  };

  // Rows of every layer that a strip of the last one's needs.
  std::vector<Rows> Needed(Rows strip) const {
    std::vector<Rows> rows(links_.size());
    for (std::size_t i = links_.size(); i-- > 0; strip = links_[i].Reads(strip)) rows[i] = strip;
    return rows;
  }

  // Offsets of the layers' rows in scratch memory, for strips of `rows`. Returns the size too.
  std::vector<std::size_t> Place(int rows) const {
    Carver carver;
    std::vector<std::size_t> offsets;
    for (std::size_t i = links_.size(); i-- > 1;) {
      const Convolution& reader = links_[i].conv;
      rows = std::min((rows - 1) * reader.stride_h + reader.taps_h, reader.in_height);
      offsets.insert(offsets.begin(), carver.Take(links_[i - 1].Floats(rows)));
    }
    offsets.push_back(carver.size());
    return offsets;
  }

  // Some rows of one image.
  void RunPart(const float* x, float* y, const float* residual, Rows part) const {
    if (part.count() == 0) return;
    std::vector<std::size_t> offsets;
    int strips = 0, size = 0;
    do {
      size = CeilDiv(part.count(), ++strips);
      offsets = Place(size);
    } while (offsets.back() * sizeof(float) > L2Bytes() / 2 && size > 1);
    static thread_local Scratch scratch;
    float* memory = scratch.Get(offsets.back());
    std::vector<Rows> kept(links_.size(), Rows{0, 0});
    for (int first = part.first; first < part.last; first += size) {
      const std::vector<Rows> needed = Needed({first, std::min(first + size, part.last)});
      for (std::size_t i = 0; i < links_.size(); i++) {
        const Link& link = links_[i];
        const bool last = i + 1 == links_.size();
        Rows compute = needed[i];
        float* to = y + link.Floats(compute.first);
        if (!last) {
          to = memory + offsets[i];
          if (kept[i].last > compute.first) {
            const std::size_t gone = link.Floats(compute.first - kept[i].first);
            const std::size_t stay = link.Floats(kept[i].last - compute.first);
            if (gone > 0) std::memmove(to, to + gone, stay * sizeof(float));
            compute.first = kept[i].last, to += stay;
          }
          kept[i] = needed[i];
        }
        if (compute.count() <= 0) continue;
        const int from = link.Reads(compute).first;
        link.Run(compute,
                 i == 0 ? x + from * link.conv.x_row
                        : memory + offsets[i - 1] + links_[i - 1].Floats(from - kept[i - 1].first),
                 to, last && residual != nullptr ? residual + link.Floats(compute.first) : nullptr);
      }
    }
  }

  const int batch_;
  const float* x_;
  const std::ptrdiff_t x_batch_;
  std::vector<Link> links_;
  const float *weights_end_, *bias_end_;
};

OwnedTensor RunChain(const View& x, const View& weights, const View& bias, const Handle* residual, const Layer* layers,
                     std::size_t count, double a, double b) {
  std::optional<FloatControl> flush;
  if (!MayBeTiny(x) && !MayBeTiny(weights)) flush.emplace();  // tensors between the layers cannot be scaled
  const Chain chain(x, weights.const_data_ptr<float>(), bias.const_data_ptr<float>(), layers, count, a, b);
  Require(chain.weights_end() == weights.const_data_ptr<float>() + weights.numel() &&
              chain.bias_end() == bias.const_data_ptr<float>() + bias.numel(),
          "the weights do not fit the chain");
  OwnedTensor made = OutputOf(layers[count - 1], x, weights, chain.height(), chain.width(), residual);
  const View y(made.get());
  const auto epilogue = ReadEpilogue<float>(Given(residual), layers[count - 1].activation, a, b, y);
  AdviseHugePages(y.mutable_data_ptr<float>(), static_cast<std::size_t>(y.numel()) * sizeof(float));
  if (y.numel() > 0) chain.Run(y.mutable_data_ptr<float>(), epilogue.residual);
  return made;
}

// A 1x1 layer on joined tensors. Denormals are not counted as zero: no operand is known to be tiny before the blocks of
// the input are computed.
void ConvolveJoined(const Layer& l, const Handle* inputs, int64_t count, const View& normalisation, const View& w,
                    const std::optional<View>& bias, const View& y, const Geometry& geometry,
                    const Epilogue<float>& epilogue, const View& weights) {
  Require(l.engine == static_cast<int64_t>(Lanes::kPointwise) && l.taps_h * l.taps_w == 1 && l.groups == 1 &&
              l.top == 0 && l.bottom == 0 && l.left == 0 && l.right == 0,
          "only 1x1 layers without borders and groups join tensors");
  const bool shifts = normalisation.numel() == 2 * l.inputs;
  Require(shifts || (normalisation.numel() == l.inputs && normalisation.dim() == 4 && normalisation.stride(1) == 1) ||
              (normalisation.numel() == l.inputs && normalisation.dim() == 1),
          "a joined input has a factor and a summand per channel, or a factor alone");
  std::vector<JoinedInput::Part> parts;
  int channels = 0;
  for (const Handle* input = inputs; input < inputs + count; input++) {
    const View x(*input), first(*inputs);
    Require(x.dim() == 4 && (x.stride(1) == 1 || x.size(1) == 1), "joined tensors are in channels_last");
    for (const int axis : {0, 2, 3}) Require(x.size(axis) == first.size(axis), "joined tensors differ in size");
    parts.push_back({x.const_data_ptr<float>(), Extent(x, 1), x.stride(0), x.stride(2), x.stride(3)});
    channels += parts.back().channels;
  }
  Require(channels == l.inputs, "the joined tensors do not fit the layer");
  Convolution conv = DescribeForward(View(inputs[0]), w, y, geometry);
  conv.in_channels = channels;
  conv.bias = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
  conv.epilogue = epilogue;
  const float* scale = normalisation.const_data_ptr<float>();
  const float least = (l.flags & kClamped) != 0 ? 0.0f : -std::numeric_limits<float>::infinity();
  const std::vector<float> zeros(shifts ? 0 : channels);
  FindJoined(TheSet())(conv, {parts, scale, shifts ? scale + channels : zeros.data(), least},
                       weights.const_data_ptr<float>(), TheRuntime());
}

// The operator as a C shim of Inductor's (polyconv/inductor/layer.py), but that it throws. `weights` has the layout of
// transform_weights; for depthwise layers it is the weight with channels innermost, or of depthwise_transform if there is
// a scheme. `normalisation`: factors and summands of the joined channels of all inputs, or factors alone. Without it, there is one input. `residual` of a layer
// that writes into a tensor of several: that tensor, or null to make it.
void CompiledConvolution(const Handle* inputs, int64_t input_count, Handle weights_handle, const Handle* bias,
                         const Handle* residual, const Handle* normalisation, const int64_t* numbers, int64_t count,
                         double a, double b, Handle* result) {
  Require(count > 0 && count % kNumbers == 0, "a layer of a compiled graph has 21 numbers");
  Require(input_count == 1 || (input_count > 1 && normalisation != nullptr), "several inputs are joined normalised");
  std::vector<Layer> layers(count / kNumbers);
  std::memcpy(layers.data(), numbers, count * sizeof(int64_t));
  const Layer& l = layers[0];
  const View x(inputs[0]), weights(weights_handle);
  Require(l.instruction_set == static_cast<int64_t>(TheSet()),
          "the weights of a compiled layer are packed for another instruction set than the one in use; compile again");
  Require(x.dim() == 4 && (normalisation != nullptr || x.size(1) == l.inputs * l.groups),
          "the input does not fit the layer");
  if (layers.size() > 1) {
    Require(l.whole == 0 && layers.back().whole == 0,
            "only a single layer can write into a tensor of several layers' outputs");
    Require(normalisation == nullptr && bias != nullptr && x.stride(1) == 1,
            "a chain has biases, and one input, which is in channels_last");
    *result = RunChain(x, weights, View(*bias), residual, layers.data(), layers.size(), a, b).release();
    return;
  }
  const Geometry geometry =
      ReadGeometry(std::array{l.stride_h, l.stride_w, l.top, l.left, l.dilation_h, l.dilation_w, l.groups, l.border});
  const bool transposed = (l.flags & kTransposed) != 0;
  const auto outputs = transposed ? TransposedOutputs : Outputs;
  const int64_t height = outputs(x.size(2), l.top, l.bottom, l.taps_h, l.stride_h, l.dilation_h);
  const int64_t width = outputs(x.size(3), l.left, l.right, l.taps_w, l.stride_w, l.dilation_w);
  const bool in_whole = l.whole > 0;
  const Handle* const earlier = in_whole ? residual : nullptr;
  OwnedTensor made = earlier != nullptr ? Shared(*earlier)
                     : in_whole         ? EmptyChannelsLast(x.size(0), l.whole, height, width)
                                        : OutputOf(l, x, weights, height, width, residual);
  const int64_t y_sizes[] = {x.size(0), l.outputs, height, width};
  const View y = in_whole ? PartOf(View(made.get()), y_sizes, l.whole, l.first) : View(made.get());
  const Epilogue<float> epilogue =
      ReadEpilogue<float>(in_whole ? std::nullopt : Given(residual), l.activation, a, b, y);
  const int64_t sizes[] = {l.outputs, l.inputs, l.taps_h, l.taps_w};
  const View w(sizes, weights);
  if (normalisation != nullptr) {
    ConvolveJoined(l, inputs, input_count, View(*normalisation), w, Given(bias), y, geometry, epilogue, weights);
  } else if (l.engine == kDepthwise) {
    const std::int64_t no_strides[4] = {};
    const bool packed = l.scheme > 0;
    DepthwiseForward(x, packed ? View(w, no_strides, nullptr) : weights, Given(bias), y, geometry,
                     {packed, packed ? std::optional<View>(weights) : std::nullopt, packed}, epilogue,
                     epilogue.residual);
  } else {
    const std::array<int64_t, 5> plan{l.engine, l.scheme};
    if (transposed) {
      const int64_t plain[] = {l.inputs, l.outputs, l.taps_h, l.taps_w};
      ConvolveTransposed(x, View(plain, weights), Given(bias), y, geometry, plan, weights, epilogue);
    } else {
      ConvolveForward(x, w, Given(bias), y, geometry, plan, weights, epilogue, true);
    }
  }
  *result = made.release();
}

Tensor CompiledConvolutionOp(const std::vector<Tensor>& inputs, const Tensor& weights,
                             const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                             const std::optional<Tensor>& normalisation, const std::vector<int64_t>& numbers, double a,
                             double b) {
  std::vector<Handle> handles;
  for (const Tensor& input : inputs) handles.push_back(input.get());
  const auto handle = [](const std::optional<Tensor>& tensor) { return tensor.has_value() ? tensor->get() : nullptr; };
  Handle given[] = {handle(bias), handle(residual), handle(normalisation)};
  OwnedTensor copied;  // operators return new tensors
  const auto at = [&](int i) { return given[i] == nullptr ? nullptr : &given[i]; };
  std::vector<int64_t> layers = numbers;
  for (std::size_t i = kFlags; i < layers.size(); i += kNumbers) layers[i] &= ~kOverwrites;
  if (given[1] != nullptr && layers.size() == kNumbers && layers[kWhole] > 0) {
    Handle copy;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_clone(given[1], &copy));
    copied.reset(copy), given[1] = copy;
  }
  Handle y;
  CompiledConvolution(handles.data(), static_cast<int64_t>(handles.size()), weights.get(), at(0), at(1), at(2),
                      layers.data(), static_cast<int64_t>(layers.size()), a, b, &y);
  return Tensor(y);
}

// Address of CompiledConvolution. Generated code reads it once and then calls without the dispatcher, whose boxed
// arguments take longer than a small layer. A new signature needs a new name: saved packages call this one.
int64_t CompiledConvolutionAddressOp() {
  return reinterpret_cast<int64_t>(&CompiledConvolution);
}

// How a pass of a training graph is computed, and what it writes.
struct PlannedPass {
  int64_t engine, scheme;  // as of a layer
  int64_t channels_last;
  int64_t sizes[4];

  explicit PlannedPass(const std::vector<int64_t>& numbers) {
    Require(numbers.size() == sizeof(PlannedPass) / sizeof(int64_t), "a planned pass has 7 numbers");
    std::memcpy(this, numbers.data(), sizeof(PlannedPass));
    for (const int64_t size : sizes) Require(size > 0, "no size of a planned pass is zero");
  }
  Tensor Empty() const { return Tensor(EmptyImage(sizes, channels_last != 0).release()); }
  std::vector<int64_t> Plan() const { return {engine, scheme, 0, 0, 0}; }
};

Tensor PlannedForwardOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                        const std::vector<int64_t>& geometry, const std::vector<int64_t>& numbers) {
  const PlannedPass pass(numbers);
  Tensor y = pass.Empty();
  if (pass.engine == kDepthwise) {
    DepthwiseForward(x, w, bias, y, ReadGeometry(geometry), {pass.scheme > 0}, {}, nullptr);
  } else {
    ConvolveForward(x, w, bias, y, ReadGeometry(geometry), pass.Plan(), std::nullopt, {});
  }
  return y;
}

// Gradients of input, weight and bias; empty tensors for those that have no numbers. `x` is read for the weight's, `w`
// for the input's.
std::tuple<Tensor, Tensor, Tensor> PlannedGradientsOp(const Tensor& dy, const std::optional<Tensor>& x,
                                                      const std::optional<Tensor>& w,
                                                      const std::vector<int64_t>& geometry,
                                                      const std::vector<int64_t>& for_x,
                                                      const std::vector<int64_t>& for_w, bool with_bias) {
  const auto made = [&](const std::vector<int64_t>& pass) {  // operators do not return a tensor twice
    return pass.empty() ? torch::stable::new_empty(dy, {0}) : PlannedPass(pass).Empty();
  };
  Tensor dx = made(for_x), dw = made(for_w);
  Tensor db = torch::stable::new_empty(dy, {with_bias && !for_w.empty() ? PlannedPass(for_w).sizes[0] : 0});
  if (!for_x.empty()) {
    const PlannedPass pass(for_x);
    Require(w.has_value(), "an input gradient needs the weight");
    if (pass.engine == kDepthwise) {
      DepthwiseInputGradientOp(dy, *w, dx, geometry, std::nullopt, pass.scheme > 0);
    } else {
      InputGradientOp(dy, *w, dx, geometry, pass.Plan());
    }
  }
  if (!for_w.empty()) {
    const PlannedPass pass(for_w);
    Require(x.has_value(), "a weight gradient needs the input");
    const std::optional<Tensor> for_bias = with_bias ? std::optional<Tensor>(db) : std::nullopt;
    if (pass.engine == kDepthwise) {
      DepthwiseWeightGradientOp(*x, dy, dw, for_bias, geometry);
    } else {
      WeightGradientOp(*x, dy, dw, for_bias, geometry, {pass.scheme});
    }
  }
  return {dx, dw, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyconv_cpu, m) {
  m.def("planned_fprop(Tensor x, Tensor weight, Tensor? bias, int[] geometry, int[] plan) -> Tensor");
  m.def(
      "planned_gradients(Tensor grad, Tensor? x, Tensor? weight, int[] geometry, int[] for_x, int[] for_weight, "
      "bool for_bias) -> (Tensor, Tensor, Tensor)");
  m.def(
      "compiled_convolution(Tensor[] inputs, Tensor weights, Tensor? bias, Tensor? residual, Tensor? normalisation, "
      "int[] layer, float activation_a=0., float activation_b=0.) -> Tensor");
  m.def("compiled_convolution_address() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CPU, m) {
  m.impl("compiled_convolution", TORCH_BOX(&CompiledConvolutionOp));
  m.impl("planned_fprop", TORCH_BOX(&PlannedForwardOp));
  m.impl("planned_gradients", TORCH_BOX(&PlannedGradientsOp));
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("compiled_convolution_address", TORCH_BOX(&CompiledConvolutionAddressOp));
}

}  // namespace polyconv
