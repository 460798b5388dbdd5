// Operators of the forward pass and the input gradient, on torch's stable ABI. They only unpack tensors into pointers.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings/denormals.h"
#include "bindings/passes.h"
#include "bindings/tensors.h"
#include "channel_lanes/forward.h"
#include "common/caches.h"
#include "common/convolution.h"
#include "common/hash.h"
#include "common/memory.h"
#include "common/output_pool.h"
#include "common/stages.h"
#include "pointwise/pointwise.h"
#include "tile_lanes/schemes.h"

namespace polyconv {
namespace {

// Kernels of a call, and how the work is cut. Zeros in the schedule leave the cut to the kernels.
struct Plan {
  Lanes lanes;
  const SchemeKernels* kernels;
  Schedule schedule;
};

const SchemeKernels* FindKernels(Lanes lanes, int scheme) {
  switch (lanes) {
    case Lanes::kTiles:
      return FindScheme(TheSet(), SchemeAt(kTileSchemes, scheme));
    case Lanes::kChannels:
      return FindChannelScheme(TheSet(), SchemeAt(kChannelSchemes, scheme));
    case Lanes::kPointwise:
      Require(scheme == 0, "no such algorithm");
      return FindPointwise(TheSet());
    default:
      Require(false, "no such engine");
      return nullptr;
  }
}

// Reads [engine (enum Lanes), scheme number, mode, lanes per chunk, channels at a time].
Plan ReadPlan(std::span<const int64_t> numbers) {
  Require(numbers.size() == 5, "a plan has 5 numbers");
  const auto at = [&](int i) { return Narrow(numbers[i], "a number of a plan"); };
  const auto lanes = static_cast<Lanes>(at(0));
  const SchemeKernels* kernels = FindKernels(lanes, at(1));
  Require(kernels != nullptr, "a scheme that no kernels are compiled for");
  return {lanes, kernels, {at(2), at(3), at(4)}};
}

// Size of one group's transformed weights [floats].
std::size_t WeightsSize(const Plan& plan, const Convolution& conv) {
  Require(plan.lanes != Lanes::kPointwise || IsPointwise(conv), "the pointwise engine takes channels_last tensors");
  return plan.kernels->weights_size(conv);
}

// Lets one call take all groups of a forward pass, if the plan has kernels for that. Returns the groups that are left.
int Together(Plan& plan, Convolution& first, int groups) {
  if (plan.lanes != Lanes::kPointwise) return groups;
  const SchemeKernels* together = FindGroups(TheSet(), first, groups);
  if (together == nullptr) return groups;
  plan.kernels = together;
  first.out_channels *= groups;
  return 1;
}

// Transformed weights for a forward `convolve`. They depend on instruction set, weights and algorithm only.
Tensor TransformWeightsOp(const Tensor& x, const Tensor& w, const Tensor& y,
                          const std::vector<int64_t>& geometry_numbers, const std::vector<int64_t>& plan_numbers) {
  const FloatControl flush;
  const Geometry geometry = ReadGeometry(geometry_numbers);
  Plan plan = ReadPlan(plan_numbers);
  Convolution first = DescribeForward(x, w, y, geometry);
  const int groups = Together(plan, first, geometry.groups);
  const std::size_t size = WeightsSize(plan, first);
  Tensor transformed = torch::stable::new_empty(w, {static_cast<int64_t>(size) * groups});
  float* target = transformed.mutable_data_ptr<float>();
  AdviseHugePages(target, size * groups * sizeof(float));
  for (int group = 0; group < groups; group++) {
    plan.kernels->transform_weights(OfGroup(first, group, false), target + group * size, TheRuntime());
  }
  return transformed;
}

// Transformed weights of a transposed convolution of one group: those of its phases, one after another. `y` is its input.
Tensor TransformTransposedWeightsOp(const Tensor& y, const Tensor& w, const Tensor& x,
                                    const std::vector<int64_t>& geometry, const std::vector<int64_t>& plan_numbers) {
  const FloatControl flush;
  const Plan plan = ReadPlan(plan_numbers);
  const std::vector<Convolution> phases = DescribeInputGradient(y, w, x, ReadGeometry(geometry));
  std::size_t size = 0;
  for (const Convolution& phase : phases) size += WeightsSize(plan, phase);
  Tensor transformed = torch::stable::new_empty(w, {static_cast<int64_t>(size)});
  float* target = transformed.mutable_data_ptr<float>();
  AdviseHugePages(target, size * sizeof(float));
  for (const Convolution& phase : phases) {
    plan.kernels->transform_weights(phase, target, TheRuntime());
    target += WeightsSize(plan, phase);
  }
  return transformed;
}

// Runs all groups of one correlation. Transforms the weights itself if `transformed` is null.
void RunGroups(const Convolution& first, int groups, bool input_gradient, const Plan& plan, const float* transformed) {
  const Runtime runtime = TheRuntime();
  if (first.taps_h == 0) {
    for (int group = 0; group < groups; group++) WriteZeros(OfGroup(first, group, input_gradient), runtime);
    return;
  }
  const SchemeKernels& kernels = *plan.kernels;
  const std::size_t size = WeightsSize(plan, first);
  static thread_local Scratch weights_scratch;
  for (int group = 0; group < groups; group++) {
    const Convolution conv = OfGroup(first, group, input_gradient);
    const float* weights = transformed == nullptr ? nullptr : transformed + group * size;
    if (transformed == nullptr && !kernels.takes_plain_weights(conv)) {
      float* fresh = weights_scratch.Get(size);
      kernels.transform_weights(conv, fresh, runtime);
      weights = fresh;
    }
    kernels.run(conv, plan.schedule, weights, runtime);
  }
}

void ConvolveOp(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, const Tensor& y,
                const std::vector<int64_t>& geometry, const std::vector<int64_t>& plan,
                const std::optional<Tensor>& transformed, const std::optional<Tensor>& residual, int64_t activation,
                double a, double b) {
  ConvolveForward(x, w, bias, y, ReadGeometry(geometry), plan, transformed,
                  ReadEpilogue<float>(residual, activation, a, b, y));
}

// Longest sequential sum in `convolve` and `input_gradient`, for the error model: see SchemeKernels::longest_sum.
int64_t LongestSumOp(int64_t terms, const std::vector<int64_t>& plan_numbers) {
  Require(terms > 0, "a sum has terms");
  return ReadPlan(plan_numbers).kernels->longest_sum(Narrow(terms, "the terms of a sum"));
}

// Hash of the bits of a dense tensor, in address order.
int64_t HashOp(const Tensor& dense) {
  Require(dense.is_contiguous(), "a hash is of a dense tensor");
  return static_cast<int64_t>(Hash(dense.const_data_ptr(), dense.numel() * dense.element_size()));
}

#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0
// Uninitialised dense tensor of the type of `like` on pooled memory. Without elements if the pool has no block for it.
Tensor EmptyOutputOp(const Tensor& like, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= std::max<int64_t>(size, 1);
  const std::size_t bytes = static_cast<std::size_t>(count) * like.element_size();
  void* block = bytes >= kSmallestBlock ? TakeOutputBlock(bytes) : nullptr;
  if (block == nullptr) return torch::stable::new_empty(like, {0});
  return torch::stable::from_blob(block, sizes, strides, like.device(), like.scalar_type(), &ReturnOutputBlock);
}
#endif

// Name of the instruction set in use. Switches to `name` (or to the "best") first, unless it is empty.
std::string InstructionSetOp(const std::string& name) {
  ChooseInstructionSet(name);
  return NameOf(TheSet());
}

// L2 size that the work is cut for [bytes]. Sets it first if `bytes` is positive.
int64_t L2BytesOp(int64_t bytes) {
  if (bytes > 0) SetL2Bytes(static_cast<std::size_t>(bytes));
  return static_cast<int64_t>(L2Bytes());
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

void InputGradientOp(const Tensor& dy, const Tensor& w, const Tensor& dx, const std::vector<int64_t>& geometry_numbers,
                     const std::vector<int64_t>& plan_numbers) {
  const Geometry geometry = ReadGeometry(geometry_numbers);
  const Plan plan = ReadPlan(plan_numbers);
  AdviseHugePages(dx.mutable_data_ptr<float>(), static_cast<std::size_t>(dx.numel()) * sizeof(float));
  const FloatControl flush;
  const Operands of(dy, w);
  for (const Convolution& phase : DescribeInputGradient(of.a.view, of.b.view, dx, geometry)) {
    RunGroups(phase, geometry.groups, true, plan, nullptr);
  }
  Rescale(dx, -of.exponent());
}

void ConvolveForward(const View& x, const View& w, const std::optional<View>& bias, const View& y,
                     const Geometry& geometry, std::span<const int64_t> plan_numbers,
                     const std::optional<View>& transformed, const Epilogue<float>& epilogue, bool packed_only) {
  const FloatControl flush;
  const Operands of(x, packed_only ? *transformed : w);
  if (of.exponent() > 0) {
    // A transform is linear: packed weights times a power of two are those of the weights times it.
    const View weight = packed_only ? w : of.b.view;
    const std::optional<View> packed = packed_only         ? of.b.view
                                       : of.b.exponent > 0 ? std::optional<View>()
                                                           : transformed;
    return ForwardOfTiny(y, -of.exponent(), bias, epilogue, [&](const View& sum) {
      ConvolveForward(of.a.view, weight, std::nullopt, sum, geometry, plan_numbers, packed, {}, packed_only);
    });
  }
  Plan plan = ReadPlan(plan_numbers);
  Convolution first = DescribeForward(x, w, y, geometry);
  const int groups = Together(plan, first, geometry.groups);
  if (bias.has_value()) first.bias = bias->const_data_ptr<float>();
  first.epilogue = epilogue;
  AdviseHugePages(first.y, static_cast<std::size_t>(y.numel()) * sizeof(float));
  const float* kept = transformed.has_value() ? transformed->const_data_ptr<float>() : nullptr;
  RunGroups(first, groups, false, plan, kept);
}

void ConvolveTransposed(const View& x, const View& w, const std::optional<View>& bias, const View& y,
                        const Geometry& geometry, std::span<const int64_t> plan_numbers, const View& transformed,
                        const Epilogue<float>& epilogue) {
  const FloatControl flush;
  const Operands of(x, transformed);
  if (of.exponent() > 0) {
    return ForwardOfTiny(y, -of.exponent(), bias, epilogue, [&](const View& sum) {
      ConvolveTransposed(of.a.view, w, std::nullopt, sum, geometry, plan_numbers, of.b.view, {});
    });
  }
  Require(geometry.groups == 1 && epilogue.residual == nullptr && Extent(w, 2) >= geometry.stride_h &&
              Extent(w, 3) >= geometry.stride_w && geometry.dilation_h == 1 && geometry.dilation_w == 1,
          "transposed layers have one group, no residual, no dilation and taps for every pixel");
  const Plan plan = ReadPlan(plan_numbers);
  AdviseHugePages(y.mutable_data_ptr<float>(), static_cast<std::size_t>(y.numel()) * sizeof(float));
  const float* weights = transformed.const_data_ptr<float>();
  const float* const end = weights + transformed.numel();
  for (Convolution& phase : DescribeInputGradient(x, w, y, geometry)) {
    phase.bias = bias.has_value() ? bias->const_data_ptr<float>() : nullptr;
    phase.epilogue = epilogue;
    const std::size_t size = WeightsSize(plan, phase);
    Require(size <= static_cast<std::size_t>(end - weights), "the weights do not fit the layer");
    plan.kernels->run(phase, plan.schedule, weights, TheRuntime());
    weights += size;
  }
}

STABLE_TORCH_LIBRARY(polyconv_cpu, m) {
  // geometry: stride_h, stride_w, top, left, dilation_h, dilation_w, groups, border; plan: see ReadPlan
  m.def("transform_weights(Tensor x, Tensor w, Tensor y, int[] geometry, int[] plan) -> Tensor");
  m.def("transform_transposed_weights(Tensor y, Tensor w, Tensor x, int[] geometry, int[] plan) -> Tensor");
  m.def(
      "convolve(Tensor x, Tensor w, Tensor? bias, Tensor(a!) y, int[] geometry, int[] plan, Tensor? transformed, "
      "Tensor? residual=None, int activation=0, float activation_a=0, float activation_b=0) -> ()");
  m.def("input_gradient(Tensor dy, Tensor w, Tensor(a!) dx, int[] geometry, int[] plan) -> ()");
  m.def("longest_sum(int terms, int[] plan) -> int");
  m.def("hash(Tensor dense) -> int");
  m.def("instruction_set(str name) -> str");
  m.def("l2_bytes(int bytes) -> int");
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0
  m.def("empty_output(Tensor like, int[] sizes, int[] strides) -> Tensor");
  m.def("set_output_pool_limit(int bytes) -> ()");
  m.def("output_pool_idle_bytes() -> int");
#endif
#ifdef POLYCONV_STAGE_COUNTERS
  m.def("stage_cycles() -> int[]");
#endif
}

STABLE_TORCH_LIBRARY_IMPL(polyconv_cpu, CompositeExplicitAutograd, m) {
  m.impl("transform_weights", TORCH_BOX(&TransformWeightsOp));
  m.impl("transform_transposed_weights", TORCH_BOX(&TransformTransposedWeightsOp));
  m.impl("convolve", TORCH_BOX(&ConvolveOp));
  m.impl("input_gradient", TORCH_BOX(&InputGradientOp));
  m.impl("longest_sum", TORCH_BOX(&LongestSumOp));
  m.impl("hash", TORCH_BOX(&HashOp));
  m.impl("instruction_set", TORCH_BOX(&InstructionSetOp));
  m.impl("l2_bytes", TORCH_BOX(&L2BytesOp));
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

// Importing the module registers the operators. It has no attributes.
PyMODINIT_FUNC PyInit__native() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
