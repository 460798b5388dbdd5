// The operators, on torch's stable ABI: from tensors to plain pointers, and nothing else.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "convolution.h"
#include "memory.h"
#include "output_pool.h"
#include "schemes.h"
#include "stages.h"

namespace polyconv {
namespace {

using torch::stable::Tensor;

constexpr int kSets = static_cast<int>(InstructionSet::kCount);

// The best instruction set of this processor, unless a test chose another one.
std::atomic<int> chosen_set{-1};

InstructionSet TheSet() {
  for (int set = 0; chosen_set.load() < 0 && set < kSets; set++) {
    if (IsSupported(static_cast<InstructionSet>(set))) chosen_set.store(set);
  }
  if (chosen_set.load() < 0) throw std::runtime_error("polyconv: this processor has none of AVX-512, AVX2 and SSE4.2");
  return static_cast<InstructionSet>(chosen_set.load());
}

// The integers of a call, in the order of the operator's schema.
struct Call {
  int top, left, dilation_h, dilation_w, groups;
  bool input_gradient;
  Algorithm algorithm;
  Schedule schedule;
};

Call ReadCall(const std::vector<int64_t>& numbers) {
  if (numbers.size() != 10) throw std::runtime_error("polyconv: a call has 10 numbers");
  const auto at = [&](int i) { return static_cast<int>(numbers[i]); };
  if (at(6) < 0 || at(6) >= static_cast<int>(Algorithm::kCount))
    throw std::runtime_error("polyconv: no such algorithm");
  return {at(0), at(1), at(2), at(3), at(4), at(5) != 0, static_cast<Algorithm>(at(6)), {at(7), at(8), at(9)}};
}

void Require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(std::string("polyconv: ") + what);
}

// The convolution of the first group. `x` is what is read and `y` what is written, in both passes.
Convolution Describe(const Tensor& x, const Tensor& w, const Tensor& y, const Call& call) {
  Require(x.dim() == 4 && w.dim() == 4 && y.dim() == 4, "tensors have four dimensions");
  Require(x.stride(3) == 1 && y.stride(3) == 1, "columns must be contiguous");
  Require(x.size(0) == y.size(0), "batch sizes differ");
  const int reads = call.input_gradient ? 0 : 1;  // the dimension of w that is summed over
  Convolution c{};
  c.x = x.const_data_ptr<float>();
  c.w = w.const_data_ptr<float>();
  c.y = y.mutable_data_ptr<float>();
  c.batch = static_cast<int>(x.size(0));
  c.in_channels = static_cast<int>(x.size(1)) / call.groups;
  c.out_channels = static_cast<int>(y.size(1)) / call.groups;
  c.in_height = static_cast<int>(x.size(2));
  c.in_width = static_cast<int>(x.size(3));
  c.out_height = static_cast<int>(y.size(2));
  c.out_width = static_cast<int>(y.size(3));
  c.taps_h = static_cast<int>(w.size(2));
  c.taps_w = static_cast<int>(w.size(3));
  c.dilation_h = call.dilation_h;
  c.dilation_w = call.dilation_w;
  c.x_batch = x.stride(0), c.x_channel = x.stride(1), c.x_row = x.stride(2);
  c.y_batch = y.stride(0), c.y_channel = y.stride(1), c.y_row = y.stride(2);
  c.w_in = w.stride(reads), c.w_out = w.stride(1 - reads);
  c.w_row = w.stride(2), c.w_column = w.stride(3);
  c.top = call.top, c.left = call.left;
  if (call.input_gradient) {
    // Correlate the gradient with the taps in reverse order, from the far end of the padding.
    c.w += (c.taps_h - 1) * c.w_row + (c.taps_w - 1) * c.w_column;
    c.w_row = -c.w_row, c.w_column = -c.w_column;
    c.top = c.dilation_h * (c.taps_h - 1) - call.top;
    c.left = c.dilation_w * (c.taps_w - 1) - call.left;
  }
  return c;
}

Convolution OfGroup(const Convolution& first, int group, const Call& call) {
  Convolution c = first;
  c.x += group * c.in_channels * c.x_channel;
  c.y += group * c.out_channels * c.y_channel;
  // Groups follow one another along the weight's first dimension.
  c.w += group * (call.input_gradient ? c.in_channels * c.w_in : c.out_channels * c.w_out);
  if (c.bias != nullptr) c.bias += group * c.out_channels;
  return c;
}

Runtime TheRuntime() {
  return {[](int64_t count, const std::function<void(int64_t, int64_t)>& body) {
            torch::stable::parallel_for(0, count, 1, body);
          },
          static_cast<int>(torch::stable::get_num_threads())};
}

// Transformed weights for `convolve`. They depend on the instruction set, the weights and the algorithm, not on the
// images nor the schedule.
Tensor TransformWeightsOp(const Tensor& x, const Tensor& w, const Tensor& y, const std::vector<int64_t>& numbers) {
  const Call call = ReadCall(numbers);
  const SchemeKernels& kernels = *FindScheme(TheSet(), call.algorithm);
  const Convolution first = Describe(x, w, y, call);
  const std::size_t size = kernels.weights_size(first);
  Tensor transformed = torch::stable::new_empty(w, {static_cast<int64_t>(size) * call.groups});
  float* target = transformed.mutable_data_ptr<float>();
  AdviseHugePages(target, size * call.groups * sizeof(float));
  for (int group = 0; group < call.groups; group++) {
    kernels.transform_weights(OfGroup(first, group, call), target + group * size, TheRuntime());
  }
  return transformed;
}

void ConvolveOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
                const std::vector<int64_t>& numbers, const std::optional<Tensor>& transformed) {
  const Call call = ReadCall(numbers);
  const SchemeKernels& kernels = *FindScheme(TheSet(), call.algorithm);
  const Runtime runtime = TheRuntime();
  Convolution first = Describe(x, w, y, call);
  if (bias.has_value()) first.bias = bias->const_data_ptr<float>();
  AdviseHugePages(first.y, static_cast<std::size_t>(y.numel()) * sizeof(float));
  const std::size_t size = kernels.weights_size(first);
  if (transformed.has_value()) {
    Require(transformed->numel() == static_cast<int64_t>(size) * call.groups, "these weights are of another problem");
  }
  static thread_local Scratch weights_scratch;
  for (int group = 0; group < call.groups; group++) {
    const Convolution conv = OfGroup(first, group, call);
    const float* weights = nullptr;
    if (transformed.has_value()) {
      weights = transformed->const_data_ptr<float>() + group * size;
    } else {
      float* fresh = weights_scratch.Get(size);
      kernels.transform_weights(conv, fresh, runtime);
      weights = fresh;
    }
    kernels.run(conv, call.schedule, weights, runtime);
  }
}

// A number that changes with any bit of a dense float32 tensor, and with their order: to notice weights that were
// written to behind the back of their version counter. As fast as reading them.
int64_t ChecksumOp(const Tensor& dense) {
  Require(dense.is_contiguous(), "a checksum is of a dense tensor");
  constexpr int kStreams = 16;  // independent, so that the compiler uses vectors
  const auto* bits = reinterpret_cast<const uint32_t*>(dense.const_data_ptr<float>());
  uint32_t sums[kStreams] = {};
  const int64_t count = dense.numel(), whole = count / kStreams * kStreams;
  for (int64_t i = 0; i < whole; i += kStreams) {
    for (int j = 0; j < kStreams; j++) sums[j] = sums[j] * 0x9E3779B1u + bits[i + j];
  }
  for (int64_t i = whole; i < count; i++) sums[i - whole] = sums[i - whole] * 0x9E3779B1u + bits[i];
  uint64_t result = 0;
  for (uint32_t sum : sums) result = result * 0x9E3779B97F4A7C15u + sum;
  return static_cast<int64_t>(result);
}

#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0
// A dense float32 tensor on pooled memory where it is large; undefined contents.
Tensor EmptyOutputOp(const Tensor& like, const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t count = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = count;
    count *= std::max<int64_t>(sizes[i], 1);
  }
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
  constexpr std::size_t kSmallest = std::size_t{16} << 20;  // below this torch's allocator is as good
  void* block = bytes >= kSmallest ? TakeOutputBlock(bytes) : nullptr;
  if (block == nullptr) return torch::stable::new_empty(like, sizes);
  return torch::stable::from_blob(block, sizes, strides, like.device(), like.scalar_type(), &ReturnOutputBlock);
}
#endif

// The instruction set in use; chooses it first if a name (or "best") is given.
std::string InstructionSetOp(const std::string& name) {
  if (name == "best") chosen_set.store(-1);
  for (int i = 0; i < kSets && !name.empty() && name != "best"; i++) {
    const auto set = static_cast<InstructionSet>(i);
    if (name != NameOf(set)) continue;
    Require(IsSupported(set), "this processor cannot run that instruction set");
    chosen_set.store(i);
  }
  return NameOf(TheSet());
}

void SetOutputPoolLimitOp(int64_t bytes) {
  SetOutputPoolLimit(static_cast<std::size_t>(std::max<int64_t>(bytes, 0)));
}
int64_t OutputPoolIdleBytesOp() {
  return static_cast<int64_t>(OutputPoolIdleBytes());
}

#ifdef POLYCONV_STAGE_COUNTERS
// Cycles of the calling thread since the last call, by stage.
std::vector<int64_t> StageCyclesOp() {
  std::vector<int64_t> cycles;
  for (auto& count : stage_cycles) {
    cycles.push_back(static_cast<int64_t>(count));
    count = 0;
  }
  return cycles;
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY(polyconv_cpu, m) {
  // numbers: top, left, dilation_h, dilation_w, groups, input_gradient, algorithm, mode, lanes, channels
  m.def("transform_weights(Tensor x, Tensor w, Tensor y, int[] numbers) -> Tensor");
  m.def("convolve(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] numbers, Tensor? transformed) -> ()");
  m.def("checksum(Tensor dense) -> int");
  m.def("instruction_set(str name) -> str");
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0
  m.def("empty_output(Tensor like, int[] sizes) -> Tensor");
  m.def("set_output_pool_limit(int bytes) -> ()");
  m.def("output_pool_idle_bytes() -> int");
#endif
#ifdef POLYCONV_STAGE_COUNTERS
  m.def("stage_cycles() -> int[]");
#endif
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("transform_weights", TORCH_BOX(&TransformWeightsOp));
  m.impl("convolve", TORCH_BOX(&ConvolveOp));
  m.impl("checksum", TORCH_BOX(&ChecksumOp));
  m.impl("instruction_set", TORCH_BOX(&InstructionSetOp));
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0
  m.impl("empty_output", TORCH_BOX(&EmptyOutputOp));
  m.impl("set_output_pool_limit", TORCH_BOX(&SetOutputPoolLimitOp));
  m.impl("output_pool_idle_bytes", TORCH_BOX(&OutputPoolIdleBytesOp));
#endif
#ifdef POLYCONV_STAGE_COUNTERS
  m.impl("stage_cycles", TORCH_BOX(&StageCyclesOp));
#endif
}

}  // namespace polyconv

// Importing the module registers the operators; it has nothing of its own.
extern "C" PyMODINIT_FUNC PyInit__native() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
