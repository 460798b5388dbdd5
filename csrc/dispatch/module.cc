// The module polyconv.dispatch._native: the passthrough cache of polyconv/dispatch/passthrough.py. Of torch it uses
// only names of attributes. If any guard fails or raises, it returns None and the call takes the path in Python.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <functional>
#include <new>
#include <utility>
#include <vector>

#include "../module_of_one_type.h"

namespace polyconv {
namespace {

// An owned (strong) reference to a Python object.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  Owned(const Owned& other) : object_(other.object_) { Py_XINCREF(object_); }
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }

  static Owned To(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Owned(borrowed);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

// Fields of the tuple LastCall of polyconv/dispatch/passthrough.py, in order.
enum Field : Py_ssize_t {
  kWhileItLives,
  kNumber,
  kGraded,
  kVouched,
  kBiased,
  kFits,
  kTorchs,
  kArguments,
  kKind,
  kNames,
  kValues,
  kClasses,
  kSize,
  kOfClasses,
  kFields
};

struct Remembered {
  const void* module;
  Owned call;
};

struct PassthroughObject {
  PyObject head;
  // Sorted by the address of the module, so that a search among hundreds touches few cache lines.
  std::vector<Remembered>* calls;
  // Planning state seen last: [dict of state version by thread count, weak reference to the process group or None].
  PyObject* seen;
  PyObject* frozen_marks;
  PyObject* is_grad_enabled;
  PyObject* get_num_threads;
  // Placeholder for the value of an attribute that the call does not depend on.
  PyObject* any;
};

struct Names {
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* weight = PyUnicode_InternFromString("weight");
  PyObject* bias = PyUnicode_InternFromString("bias");
  PyObject* is_nested = PyUnicode_InternFromString("is_nested");
  PyObject* c10d = PyUnicode_InternFromString("torch.distributed.distributed_c10d");
  PyObject* world = PyUnicode_InternFromString("_world");
  PyObject* group = PyUnicode_InternFromString("_default_pg");
};

const Names& TheNames() {
  static const Names names;
  return names;
}

PassthroughObject* AsCache(PyObject* object) {
  return reinterpret_cast<PassthroughObject*>(object);
}

// Binary search: position of the module's entry, or where to insert it.
std::vector<Remembered>::iterator Find(PassthroughObject& cache, const void* module) {
  return std::lower_bound(cache.calls->begin(), cache.calls->end(), module,
                          [](const Remembered& one, const void* at) { return std::less<>()(one.module, at); });
}

bool IsAt(const PassthroughObject& cache, std::vector<Remembered>::iterator found, const void* module) {
  return found != cache.calls->end() && found->module == module;
}

PyObject* New(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *seen, *frozen_marks, *is_grad_enabled, *get_num_threads, *any;
  if (!PyArg_ParseTuple(arguments, "O!O!OOO", &PyList_Type, &seen, &PyDict_Type, &frozen_marks, &is_grad_enabled,
                        &get_num_threads, &any)) {
    return nullptr;
  }
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* cache = AsCache(self);
  cache->seen = Owned::To(seen).release();
  cache->frozen_marks = Owned::To(frozen_marks).release();
  cache->is_grad_enabled = Owned::To(is_grad_enabled).release();
  cache->get_num_threads = Owned::To(get_num_threads).release();
  cache->any = Owned::To(any).release();
  cache->calls = new (std::nothrow) std::vector<Remembered>();
  if (cache->calls == nullptr) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return self;
}

void Delete(PyObject* object) {
  auto* cache = AsCache(object);
  delete cache->calls;
  Py_XDECREF(cache->seen);
  Py_XDECREF(cache->frozen_marks);
  Py_XDECREF(cache->is_grad_enabled);
  Py_XDECREF(cache->get_num_threads);
  Py_XDECREF(cache->any);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

PyObject* Remember(PyObject* object, PyObject* arguments) {
  PyObject *key, *call;
  if (!PyArg_ParseTuple(arguments, "O!O!", &PyLong_Type, &key, &PyTuple_Type, &call)) return nullptr;
  if (PyTuple_Size(call) != kFields) {
    PyErr_SetString(PyExc_TypeError, "not the fields of a LastCall");
    return nullptr;
  }
  const void* module = PyLong_AsVoidPtr(key);
  if (module == nullptr) return nullptr;
  PassthroughObject& cache = *AsCache(object);
  Remembered now{module, Owned::To(call)};
  try {
    const auto found = Find(cache, module);
    if (IsAt(cache, found, module)) {
      std::swap(*found, now);  // the old entry is released on return, when the new one is in place
    } else {
      cache.calls->insert(found, std::move(now));
    }
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

PyObject* Forget(PyObject* object, PyObject* key) {
  const void* module = PyLong_AsVoidPtr(key);
  if (PyErr_Occurred()) return nullptr;
  PassthroughObject& cache = *AsCache(object);
  const auto found = Find(cache, module);
  if (IsAt(cache, found, module)) {
    const Remembered forgotten = std::move(*found);  // released after its removal from the list
    cache.calls->erase(found);
  }
  Py_RETURN_NONE;
}

bool Is(PyObject* expected, Owned found) {
  return found.get() == expected;
}

// Whether the process group is the one seen last. torch sends no notification of a change.
bool IsSameGroup(PyObject* seen) {
  const Names& names = TheNames();
  PyObject* c10d = PyDict_GetItemWithError(PyImport_GetModuleDict(), names.c10d);
  if (c10d == nullptr) return seen == Py_None;  // not in every build of PyTorch
  const Owned world(PyObject_GetAttr(c10d, names.world));
  if (world.get() == nullptr) return false;
  const Owned group(PyObject_GetAttr(world.get(), names.group));
  if (group.get() == Py_None || seen == Py_None) return group.get() == seen;
  return group.get() != nullptr && PyWeakref_GetObject(seen) == group.get();
}

bool IsVouched(PyObject* frozen_marks, PyObject* weight) {
  if (PyDict_Size(frozen_marks) == 0) return false;
  const Owned key(PyLong_FromVoidPtr(weight));
  return key.get() != nullptr && PyDict_GetItemWithError(frozen_marks, key.get()) != nullptr;
}

// Whether the state version, for the current thread count, and the process group are those of the cached call.
bool IsSameState(const PassthroughObject& cache, PyObject* number) {
  const Owned threads(PyObject_CallObject(cache.get_num_threads, nullptr));
  PyObject* numbers = PyList_GetItem(cache.seen, 0);
  if (threads.get() == nullptr || numbers == nullptr || !PyDict_Check(numbers)) return false;
  return PyDict_GetItemWithError(numbers, threads.get()) == number && IsSameGroup(PyList_GetItem(cache.seen, 1));
}

// Whether the instance attributes are those of the cached call: same names in the same order, and identical objects for
// those that the call depends on. The dictionary is scanned in order: lookups by name would touch more memory.
bool HasSameAttributes(PyObject* own, PyObject* call, PyObject* any) {
  PyObject *names = PyTuple_GetItem(call, kNames), *values = PyTuple_GetItem(call, kValues);
  const Py_ssize_t count = PyTuple_Size(names);
  if (PyDict_Size(own) != count) return false;
  PyObject *name, *value;
  Py_ssize_t position = 0;
  for (Py_ssize_t i = 0; PyDict_Next(own, &position, &name, &value); i++) {
    if (i == count || name != PyTuple_GetItem(names, i)) return false;
    PyObject* expected = PyTuple_GetItem(values, i);
    if (expected != value && expected != any) return false;
  }
  return true;
}

// Whether the classes have as many attributes as before, and those that the call depends on are identical.
bool HasSameClasses(PyObject* module, PyObject* call) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(module)) != PyTuple_GetItem(call, kKind)) return false;
  PyObject *classes = PyTuple_GetItem(call, kClasses), *attributes = PyTuple_GetItem(call, kOfClasses);
  const Py_ssize_t class_count = PyTuple_Size(classes), count = PyTuple_Size(attributes);
  Py_ssize_t size = 0;
  for (Py_ssize_t i = 0; i < class_count; i++) size += PyDict_Size(PyTuple_GetItem(classes, i));
  if (size != PyLong_AsSsize_t(PyTuple_GetItem(call, kSize))) return false;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* one = PyTuple_GetItem(attributes, i);
    PyObject* value = PyDict_GetItemWithError(PyTuple_GetItem(one, 0), PyTuple_GetItem(one, 1));
    if (value != PyTuple_GetItem(one, 2)) return false;
  }
  return true;
}

// Arguments for ATen's convolution if all guards of the cached call hold. Otherwise null, perhaps with an exception.
Owned Arguments(const PassthroughObject& cache, PyObject* call, PyObject* module, PyObject* x) {
  const Names& names = TheNames();
  if (!IsSameState(cache, PyTuple_GetItem(call, kNumber))) return Owned();
  if (!Is(PyTuple_GetItem(call, kGraded), Owned(PyObject_CallObject(cache.is_grad_enabled, nullptr)))) return Owned();
  const Owned own(PyObject_GenericGetDict(module, nullptr));
  if (own.get() == nullptr || !HasSameAttributes(own.get(), call, cache.any)) return Owned();
  if (!HasSameClasses(module, call)) return Owned();
  const Owned parameters = Owned::To(PyDict_GetItemWithError(own.get(), names.parameters));
  if (parameters.get() == nullptr || !PyDict_Check(parameters.get())) return Owned();
  const Owned weight = Owned::To(PyDict_GetItemWithError(parameters.get(), names.weight));
  const Owned bias = Owned::To(PyDict_GetItemWithError(parameters.get(), names.bias));
  if (weight.get() == nullptr || bias.get() == nullptr) return Owned();  // computed before each call, for example
  const bool biased = PyTuple_GetItem(call, kBiased) == Py_True;
  const bool frozen_marks = PyTuple_GetItem(call, kVouched) == Py_True;
  if (biased == (bias.get() == Py_None) || frozen_marks != IsVouched(cache.frozen_marks, weight.get())) return Owned();
  PyObject* const tensors[] = {x, weight.get(), bias.get()};
  const Py_ssize_t count = biased ? 3 : 2;
  const Owned looked_at(PyTuple_New(count));
  if (looked_at.get() == nullptr) return Owned();
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!Is(Py_False, Owned(PyObject_GetAttr(tensors[i], names.is_nested)))) return Owned();
    PyTuple_SetItem(looked_at.get(), i, Owned::To(tensors[i]).release());
  }
  if (!Is(Py_True, Owned(PyObject_CallObject(PyTuple_GetItem(call, kFits), looked_at.get())))) return Owned();
  PyObject* arguments = PyTuple_GetItem(call, kArguments);
  const Py_ssize_t more = PyTuple_Size(arguments);
  Owned all(PyTuple_New(3 + more));
  if (all.get() == nullptr) return Owned();
  for (Py_ssize_t i = 0; i < 3 + more; i++) {
    PyObject* argument = i < 3 ? tensors[i] : PyTuple_GetItem(arguments, i - 3);
    PyTuple_SetItem(all.get(), i, Owned::To(argument).release());
  }
  return all;
}

PyObject* Again(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "again(module, x)");
    return nullptr;
  }
  PassthroughObject& cache = *AsCache(object);
  const auto found = Find(cache, arguments[0]);
  if (!IsAt(cache, found, arguments[0])) Py_RETURN_NONE;
  const Owned call = found->call;  // strong: Python code called below may drop the cache entry
  const Owned all = Arguments(cache, call.get(), arguments[0], arguments[1]);
  if (all.get() == nullptr) {
    PyErr_Clear();  // the slow path in Python meets the same error and reports it
    Py_RETURN_NONE;
  }
  return PyObject_CallObject(PyTuple_GetItem(call.get(), kTorchs), all.get());
}

Py_ssize_t Length(PyObject* object) {
  return static_cast<Py_ssize_t>(AsCache(object)->calls->size());
}

PyMethodDef methods[] = {{"remember", &Remember, METH_VARARGS, "remember(key, call)"},
                         {"forget", &Forget, METH_O, "forget(key)"},
                         {"again", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Again)), METH_FASTCALL,
                          "again(module, x): the output, or None."},
                         {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&New)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&Delete)},
    {Py_tp_methods, methods},
    {Py_mp_length, reinterpret_cast<void*>(&Length)},
    {Py_tp_doc, const_cast<char*>("Left(seen, frozen_marks, is_grad_enabled, get_num_threads, any)")},
    {0, nullptr}};

PyType_Spec spec = {"polyconv.dispatch._native.PassthroughCache", sizeof(PassthroughObject), 0, Py_TPFLAGS_DEFAULT,
                    slots};

}  // namespace
}  // namespace polyconv

PyMODINIT_FUNC PyInit__native() {
  return polyconv::ModuleOfOneType(polyconv::spec, "PassthroughCache");
}
