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
  PyObject* object;             // owned
  Py_ssize_t position;          // -1: not an input
  const c10::TensorImpl* impl;  // not owned: torch.utils.swap_tensors requires that nothing else refers to it
  uint32_t version;
};

// What a dictionary has under a key, all owned. Without a dictionary: attribute of the first input.
struct Link {
  PyObject *dictionary, *key, *value;
};

struct Compiled {
  std::vector<Parameter> all;
  std::vector<Link> links;
  std::size_t offset = 0;  // of the pointer to the TensorImpl in a Python object

  ~Compiled() {
    for (const Parameter& one : all) Py_DECREF(one.object);
    for (const Link& link : links) Py_XDECREF(link.dictionary), Py_DECREF(link.key), Py_DECREF(link.value);
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

bool Holds(const Link& link, PyObject* inputs) {
  if (link.dictionary != nullptr) return PyDict_GetItemWithError(link.dictionary, link.key) == link.value;
  PyObject* value = PyTuple_Size(inputs) > 0 ? PyObject_GetAttr(PyTuple_GetItem(inputs, 0), link.key) : nullptr;
  Py_XDECREF(value);  // only compared
  return value == link.value;
}

// Where a dictionary has the address of its keys. Only fetched ahead: elsewhere it would be no gain.
constexpr std::size_t kKeys = sizeof(PyObject) + 2 * sizeof(void*);

bool Holds(const Compiled& compiled, PyObject* inputs) {
  constexpr std::size_t kAhead = 8;
  const std::vector<Parameter>& all = compiled.all;
  const Py_ssize_t count = PyTuple_Size(inputs);
  const std::vector<Link>& links = compiled.links;
  for (std::size_t i = 0; i < links.size() + 2 * kAhead; i++) {
    if (i < links.size() && links[i].dictionary != nullptr) __builtin_prefetch(links[i].dictionary);
    if (i >= kAhead && i - kAhead < links.size() && links[i - kAhead].dictionary != nullptr) {
      const auto* keys = static_cast<const char*>(PointerAt(links[i - kAhead].dictionary, kKeys));
      __builtin_prefetch(keys), __builtin_prefetch(keys + 64);
    }
    if (i >= 2 * kAhead && !Holds(links[i - 2 * kAhead], inputs)) return false;
  }
  for (std::size_t i = 0; i < all.size() + 2 * kAhead; i++) {
    if (i < all.size()) {
      const Parameter& one = all[i];
      if (one.position >= count) return false;
      if (one.position >= 0 && PyTuple_GetItem(inputs, one.position) != one.object) return false;
      // The object may have been given another tensor, by torch.utils.swap_tensors. Until here the old one may be gone.
      if (PointerAt(one.object, compiled.offset) != one.impl) return false;
      __builtin_prefetch(&one.impl->version_counter());
    }
    if (i >= kAhead && i - kAhead < all.size()) {
      __builtin_prefetch(PointerAt(&all[i - kAhead].impl->version_counter(), 0));  // the counter itself, most likely
    }
    if (i >= 2 * kAhead) {
      const Parameter& one = all[i - 2 * kAhead];
      if (VersionOf(*one.impl) != one.version) return false;
    }
  }
  return true;
}

}  // namespace

PyObject* Parameters(PyObject*, PyObject* arguments) {
  PyObject *tensors, *positions, *versions, *links;
  if (!PyArg_ParseTuple(arguments, "O!O!O!O!", &PyList_Type, &tensors, &PyList_Type, &positions, &PyList_Type,
                        &versions, &PyList_Type, &links)) {
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
    compiled->offset = offset;
    Py_INCREF(object);
    compiled->all.push_back({object, PyLong_AsSsize_t(PyList_GetItem(positions, i)),
                             static_cast<const c10::TensorImpl*>(impl),
                             static_cast<uint32_t>(PyLong_AsUnsignedLong(PyList_GetItem(versions, i)))});
  }
  for (Py_ssize_t i = 0; i < PyList_Size(links); i++) {
    PyObject *dictionary, *key, *value;
    if (!PyArg_ParseTuple(PyList_GetItem(links, i), "OOO", &dictionary, &key, &value)) return nullptr;
    if (dictionary == Py_None) dictionary = nullptr;
    Py_XINCREF(dictionary), Py_INCREF(key), Py_INCREF(value);
    compiled->links.push_back({dictionary, key, value});
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
  const bool holds = Holds(*compiled, inputs);
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(holds);
}

}  // namespace polyconv
