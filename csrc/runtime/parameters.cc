// Between two calls the network's weights have driven the parameters' objects out of the caches. In Python the check
// takes three cache misses in a row for each; here they are fetched ahead.
#define PY_SSIZE_T_CLEAN
#include "parameters.h"

#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace polyconv {
namespace {

constexpr const char* kName = "polyconv.runtime.parameters";

struct Parameter {
  PyObject* object;  // owned
  Py_ssize_t position;
  const c10::TensorImpl* impl;      // not owned: torch.utils.swap_tensors requires that nothing else refers to it
  const c10::StorageImpl* storage;  // `weight.data = other` replaces it, and moves no version
  c10::weak_intrusive_ptr<c10::StorageImpl> no_other_there;  // while this lives, though its memory may be freed
  std::int64_t first;                                        // of its elements in the storage
  std::vector<std::int64_t> strides;
  uint32_t version;
};

struct Compiled {
  std::vector<Parameter> all;
  std::size_t offset = 0;  // of the pointer to the TensorImpl in a Python object

  ~Compiled() {
    for (const Parameter& one : all) Py_DECREF(one.object);
  }
};

void* PointerAt(const void* object, std::size_t offset) {
  void* pointer;
  std::memcpy(&pointer, static_cast<const char*>(object) + offset, sizeof(pointer));
  return pointer;
}

// Inference tensors have no versions.
uint32_t VersionOf(const c10::TensorImpl& impl) {
  const c10::VariableVersion& version = impl.version_counter();
  return version.enabled() ? version.current_version() : 0;
}

// Where a tensor's Python object holds `impl`, which is its attribute _cdata; 0 if nowhere.
std::size_t OffsetOf(PyObject* object, const void* impl) {
  for (std::size_t offset = sizeof(PyObject); offset < 2 * sizeof(PyObject) + 2 * sizeof(void*);
       offset += sizeof(void*)) {
    if (PointerAt(object, offset) == impl) return offset;
  }
  return 0;
}

void* ImplOf(PyObject* object) {
  PyObject* number = PyObject_GetAttrString(object, "_cdata");
  if (number == nullptr) return nullptr;
  void* impl = PyLong_AsVoidPtr(number);
  Py_DECREF(number);
  return impl;
}

void Delete(PyObject* capsule) {
  delete static_cast<Compiled*>(PyCapsule_GetPointer(capsule, kName));
}

bool Holds(const Compiled& compiled, PyObject* inputs) {
  constexpr std::size_t kAhead = 8;
  const std::vector<Parameter>& all = compiled.all;
  const Py_ssize_t count = PyTuple_Size(inputs);
  for (std::size_t i = 0; i < all.size() + 2 * kAhead; i++) {
    if (i < all.size()) {
      const Parameter& one = all[i];
      if (one.position >= count || PyTuple_GetItem(inputs, one.position) != one.object) return false;
      // The object may have been given another tensor, by torch.utils.swap_tensors. Until here the old one may be gone.
      if (PointerAt(one.object, compiled.offset) != one.impl) return false;
      __builtin_prefetch(&one.impl->version_counter());
      __builtin_prefetch(&one.impl->unsafe_storage());
    }
    if (i >= kAhead && i - kAhead < all.size()) {
      __builtin_prefetch(PointerAt(&all[i - kAhead].impl->version_counter(), 0));  // the counter itself, most likely
    }
    if (i >= 2 * kAhead) {
      const Parameter& one = all[i - 2 * kAhead];
      if (VersionOf(*one.impl) != one.version) return false;
      if (one.impl->unsafe_storage().unsafeGetStorageImpl() != one.storage) return false;
      if (one.impl->storage_offset() != one.first || !one.impl->strides().equals(one.strides)) return false;
    }
  }
  return true;
}

}  // namespace

PyObject* Parameters(PyObject*, PyObject* arguments) {
  PyObject *tensors, *positions, *versions;
  if (!PyArg_ParseTuple(arguments, "O!O!O!", &PyList_Type, &tensors, &PyList_Type, &positions, &PyList_Type,
                        &versions)) {
    return nullptr;
  }
  const Py_ssize_t count = PyList_Size(tensors);
  if (PyList_Size(positions) != count || PyList_Size(versions) != count) {
    PyErr_SetString(PyExc_ValueError, "a position and a version per tensor");
    return nullptr;
  }
  auto compiled = std::make_unique<Compiled>();
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* object = PyList_GetItem(tensors, i);
    void* impl = ImplOf(object);
    if (impl == nullptr) return nullptr;
    const std::size_t offset = OffsetOf(object, impl);
    if (offset == 0 || (i > 0 && offset != compiled->offset)) Py_RETURN_NONE;
    const auto* tensor = static_cast<const c10::TensorImpl*>(impl);
    if (!tensor->has_storage() || tensor->has_symbolic_sizes_strides()) Py_RETURN_NONE;
    compiled->offset = offset;
    Py_INCREF(object);
    compiled->all.push_back({object, PyLong_AsSsize_t(PyList_GetItem(positions, i)), tensor,
                             tensor->unsafe_storage().unsafeGetStorageImpl(),
                             tensor->unsafe_storage().getWeakStorageImpl(), tensor->storage_offset(),
                             tensor->strides().vec(),
                             static_cast<uint32_t>(PyLong_AsUnsignedLong(PyList_GetItem(versions, i)))});
  }
  if (PyErr_Occurred()) return nullptr;
  PyObject* capsule = PyCapsule_New(compiled.get(), kName, &Delete);
  if (capsule != nullptr) compiled.release();
  return capsule;
}

PyObject* IsUnchanged(PyObject*, PyObject* arguments) {
  PyObject *capsule, *inputs;
  if (!PyArg_ParseTuple(arguments, "OO!", &capsule, &PyTuple_Type, &inputs)) return nullptr;
  const auto* compiled = static_cast<const Compiled*>(PyCapsule_GetPointer(capsule, kName));
  if (compiled == nullptr) return nullptr;
  return PyBool_FromLong(Holds(*compiled, inputs));
}

}  // namespace polyconv
