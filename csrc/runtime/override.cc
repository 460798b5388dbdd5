// The module polyconv.runtime._native: aten::convolution and its backward, overridden by polyconv.enable(). Unboxed
// kernels, because boxing takes three microseconds per call: so the module serves only the torch that it was built
// with, whose version is its attribute torch_version.
//
// A call that Python planned as ATen's leaves the hash of its description, and is passed through by the next. A
// collision of hashes costs time, never a wrong result: ATen computes any convolution.
#define PY_SSIZE_T_CLEAN
#include <ATen/DeviceGuard.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_convolution_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/convolution_backward_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/convolution_compositeexplicitautograd_dispatch.h>
#include <Python.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>
#include <torch/version.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "parameters.h"

namespace polyconv {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// Changes with the planning state of Python (polyconv/runtime/state_version.py), which is part of each description.
std::atomic<int64_t> state{0};
// Whether any weight is frozen: then the plan depends on the identity of the weight.
std::atomic<bool> any_frozen{false};
// Calls of this thread that are ATen's: those that polyconv makes itself.
thread_local int bypassing = 0;
// Consecutive calls of this thread that were passed through without a call of Python.
thread_local int passed = 0;
// Most such calls. The next call is planned in Python, which detects a new process group: torch has no event for one.
constexpr int kLongestPassage = 1024;

struct Bypass {
  Bypass() { bypassing++; }
  ~Bypass() { bypassing--; }
};

// Hashes of the calls known to be ATen's. A call has one of two places.
std::array<std::atomic<uint64_t>, 4096> known{};

struct Place {
  uint64_t hash;
  std::atomic<uint64_t>& first() const { return known[hash % known.size()]; }
  std::atomic<uint64_t>& second() const { return known[(hash >> 32) % known.size()]; }

  bool IsKnown() const { return first().load() == hash || second().load() == hash; }
  bool PassesThrough() const {
    passed = passed < kLongestPassage && IsKnown() ? passed + 1 : 0;
    return passed > 0;
  }
  void Remember() const {
    if (!IsKnown()) (first().load() == 0 ? first() : second()).store(hash);
  }
};

// Description of a call, hashed.
class Description {
 public:
  explicit Description(bool recorded) {
    Add(state.load());
    Add(at::get_num_threads() * 2 + recorded);
  }
  void Add(int64_t number) {
    hash_ = (hash_ ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15u;
    hash_ ^= hash_ >> 29;
  }
  void Add(SymIntArrayRef numbers) {
    Add(static_cast<int64_t>(numbers.size()));
    for (const SymInt& number : numbers) Add(number.expect_int());
  }
  void Add(const Tensor& tensor) {
    Add(tensor.dim() * 64 + static_cast<int64_t>(tensor.scalar_type()));
    Add(tensor.device().index() * 16 + static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16));
    for (const int64_t extent : tensor.sizes()) Add(extent);
    for (const int64_t stride : tensor.strides()) Add(stride);
  }
  Place Hash() const { return {hash_ | 1}; }

 private:
  uint64_t hash_ = 0;
};

bool WantsGradient(const Tensor& one, const Tensor& other, const std::optional<Tensor>& bias) {
  const bool wanted =
      one.requires_grad() || other.requires_grad() || (bias && bias->defined() && bias->requires_grad());
  return wanted && c10::GradMode::is_enabled();
}

// Whether torch.jit.trace records this thread's calls: of a convolution it records what ATen's calls.
bool IsTraced() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Tracer);
}

// ATen's convolution calls another overridden operator, and for complex tensors itself.
template <class Aten>
auto Bypassing(const Aten& aten) {
  const Bypass bypass;
  return aten();
}

template <class Aten>
Tensor Forward(const Aten& aten, const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
               SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
               SymIntArrayRef output_padding, SymInt groups) {
  if (bypassing > 0 || IsTraced()) return aten();
  const bool recorded = WantsGradient(x, w, bias);
  Description call(recorded);
  call.Add(x);
  call.Add(w);
  if (bias && bias->defined()) call.Add(*bias);  // an empty tensor stands for none as well
  if (!recorded && any_frozen.load()) {
    call.Add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(w.unsafeGetTensorImpl())));
  }
  for (const SymIntArrayRef& numbers : {stride, padding, dilation, output_padding}) call.Add(numbers);
  call.Add(groups.expect_int() * 2 + transposed);
  const Place place = call.Hash();
  if (place.PassesThrough()) return Bypassing(aten);
  using Planned = std::tuple<Tensor, bool>(const Tensor&, const Tensor&, const std::optional<Tensor>&, SymIntArrayRef,
                                           SymIntArrayRef, SymIntArrayRef, bool, SymIntArrayRef, SymInt);
  static const auto planned =
      c10::Dispatcher::singleton().findSchemaOrThrow("polyconv::_convolution", "").typed<Planned>();
  auto [y, is_atens] = Bypassing(
      [&] { return planned.call(x, w, bias, stride, padding, dilation, transposed, output_padding, groups); });
  if (is_atens) place.Remember();
  return y;
}

Tensor Convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, SymIntArrayRef stride,
                   SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding,
                   SymInt groups) {
  const auto aten = [&] {
    return at::compositeexplicitautograd::convolution_symint(x, w, bias, stride, padding, dilation, transposed,
                                                             output_padding, groups);
  };
  return Forward(aten, x, w, bias, stride, padding, dilation, transposed, output_padding, groups);
}

// aten::_convolution, which graphs of torch.jit.trace call.
Tensor TracedConvolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, SymIntArrayRef stride,
                         SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
                         SymIntArrayRef output_padding, SymInt groups, bool benchmark, bool deterministic,
                         bool cudnn_enabled, bool allow_tf32) {
  const auto aten = [&] {
    return at::compositeexplicitautograd::_convolution_symint(x, w, bias, stride, padding, dilation, transposed,
                                                              output_padding, groups, benchmark, deterministic,
                                                              cudnn_enabled, allow_tf32);
  };
  return Forward(aten, x, w, bias, stride, padding, dilation, transposed, output_padding, groups);
}

Gradients ConvolutionBackward(const Tensor& grad, const Tensor& x, const Tensor& w,
                              at::OptionalSymIntArrayRef bias_sizes, SymIntArrayRef stride, SymIntArrayRef padding,
                              SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, SymInt groups,
                              std::array<bool, 3> wanted) {
  const c10::OptionalDeviceGuard device(at::device_of(x));  // the kernel for CUDA has one
  const auto aten = [&] {
    return at::compositeexplicitautograd::convolution_backward_symint(grad, x, w, bias_sizes, stride, padding, dilation,
                                                                      transposed, output_padding, groups, wanted);
  };
  if (bypassing > 0 || IsTraced()) return aten();
  Description call(true);
  for (const Tensor& tensor : {grad, x, w}) call.Add(tensor);
  for (const SymIntArrayRef& numbers : {stride, padding, dilation, output_padding}) call.Add(numbers);
  call.Add(groups.expect_int() * 2 + transposed);
  call.Add(wanted[0] + wanted[1] * 2 + wanted[2] * 4);
  const Place place = call.Hash();
  if (place.PassesThrough()) return Bypassing(aten);
  using Planned = std::tuple<Tensor, Tensor, Tensor, bool>(
      const Tensor&, const Tensor&, const Tensor&, at::OptionalSymIntArrayRef, SymIntArrayRef, SymIntArrayRef,
      SymIntArrayRef, bool, SymIntArrayRef, SymInt, std::array<bool, 3>);
  static const auto planned =
      c10::Dispatcher::singleton().findSchemaOrThrow("polyconv::_convolution_backward", "").typed<Planned>();
  auto [dx, dw, db, is_atens] = Bypassing([&] {
    return planned.call(grad, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, wanted);
  });
  if (is_atens) place.Remember();
  return {dx, dw, db};
}

// Drops torch's warning that a kernel is overridden, and no other.
class Expected : public c10::WarningHandler {
 public:
  explicit Expected(c10::WarningHandler* others) : others_(others) {}
  void process(const c10::Warning& warning) override {
    if (std::string_view(warning.msg()).find("Overriding a previously registered kernel") == std::string_view::npos) {
      others_->process(warning);
    }
  }

 private:
  c10::WarningHandler* others_;
};

std::vector<std::unique_ptr<torch::Library>> libraries;

void Register(bool on, bool cuda) {
  libraries.clear();
  if (!on) return;
  Expected expected(c10::WarningUtils::get_warning_handler());
  const c10::WarningUtils::WarningHandlerGuard quiet(&expected);
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    if (key == c10::DispatchKey::CUDA && !cuda) continue;
    libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
    libraries.back()->impl("convolution", TORCH_FN(Convolution));
    libraries.back()->impl("_convolution", TORCH_FN(TracedConvolution));
    libraries.back()->impl("convolution_backward", TORCH_FN(ConvolutionBackward));
  }
}

// override(on, cuda): the caller holds a lock.
PyObject* Override(PyObject*, PyObject* arguments) {
  int on, cuda;
  if (!PyArg_ParseTuple(arguments, "pp", &on, &cuda)) return nullptr;
  PyThreadState* thread = PyEval_SaveThread();  // torch may wait for another registration, and that for Python
  std::optional<std::string> failure;
  try {
    Register(on, cuda);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  PyEval_RestoreThread(thread);
  if (!failure) Py_RETURN_NONE;
  PyErr_SetString(PyExc_RuntimeError, failure->c_str());
  return nullptr;
}

PyObject* Changed(PyObject*, PyObject* frozen) {
  any_frozen = frozen == Py_True;
  state++;
  Py_RETURN_NONE;
}

PyObject* BypassedCall(PyObject*, PyObject* arguments) {
  PyObject* function = PyTuple_GetItem(arguments, 0);
  if (function == nullptr) return nullptr;
  PyObject* rest = PyTuple_GetSlice(arguments, 1, PyTuple_Size(arguments));
  if (rest == nullptr) return nullptr;
  const Bypass bypass;
  PyObject* result = PyObject_CallObject(function, rest);
  Py_DECREF(rest);
  return result;
}

PyMethodDef methods[] = {
    {"override", &Override, METH_VARARGS, "override(on, cuda): register the kernels, or restore torch's."},
    {"changed", &Changed, METH_O, "changed(frozen): the planning state is another; whether any weight is frozen."},
    {"bypassing", &BypassedCall, METH_VARARGS,
     "bypassing(function, *arguments): call it; its convolutions are ATen's."},
    {"parameters", &Parameters, METH_VARARGS, "parameters(tensors, positions, versions): for is_unchanged, or None."},
    {"is_unchanged", &IsUnchanged, METH_VARARGS, "is_unchanged(parameters, inputs): the same tensors and versions."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace
}  // namespace polyconv

PyMODINIT_FUNC PyInit__native() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, -1, polyconv::methods, nullptr, nullptr, nullptr, nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr && PyModule_AddStringConstant(module, "torch_version", TORCH_VERSION) != 0) Py_CLEAR(module);
  return module;
}
