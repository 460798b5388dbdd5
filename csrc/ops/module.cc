// The module polyconv.ops._native: calls of modules that are left to PyTorch, as polyconv/ops/left.py has them. It knows
// nothing of torch but names of attributes, and gives a call that it is not sure of back to Python, without a word.
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

// A reference of its own.
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

// The last call of a module.
struct Call {
  Owned number;
  bool graded;
  bool vouched;
  bool biased;
  Owned fits;
  Owned torchs;
  Owned arguments;
};

struct Remembered {
  const void* module;
  Owned while_it_lives;
  Call call;
};

struct LeftObject {
  PyObject head;
  // In the order of the modules' addresses: few cache lines are read to find one of some hundreds.
  std::vector<Remembered>* calls;
  // What was seen last of the state: its number, and a weak reference to the process group or None.
  PyObject* seen;
  PyObject* vouched;
  PyObject* is_grad_enabled;
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

LeftObject* AsLeft(PyObject* object) {
  return reinterpret_cast<LeftObject*>(object);
}

// Where the call of a module is, or would be.
std::vector<Remembered>::iterator Find(LeftObject& left, const void* module) {
  return std::lower_bound(left.calls->begin(), left.calls->end(), module,
                          [](const Remembered& one, const void* at) { return std::less<>()(one.module, at); });
}

bool IsAt(const LeftObject& left, std::vector<Remembered>::iterator found, const void* module) {
  return found != left.calls->end() && found->module == module;
}

PyObject* New(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *seen, *vouched, *is_grad_enabled;
  if (!PyArg_ParseTuple(arguments, "O!O!O", &PyList_Type, &seen, &PyDict_Type, &vouched, &is_grad_enabled)) {
    return nullptr;
  }
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* left = AsLeft(self);
  left->seen = Owned::To(seen).release();
  left->vouched = Owned::To(vouched).release();
  left->is_grad_enabled = Owned::To(is_grad_enabled).release();
  left->calls = new (std::nothrow) std::vector<Remembered>();
  if (left->calls == nullptr) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return self;
}

void Delete(PyObject* object) {
  auto* left = AsLeft(object);
  delete left->calls;
  Py_XDECREF(left->seen);
  Py_XDECREF(left->vouched);
  Py_XDECREF(left->is_grad_enabled);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

PyObject* Remember(PyObject* object, PyObject* arguments) {
  PyObject *key, *while_it_lives, *number, *fits, *torchs, *more;
  int graded, vouched, biased;
  if (!PyArg_ParseTuple(arguments, "O!OOpppOOO!", &PyLong_Type, &key, &while_it_lives, &number, &graded, &vouched,
                        &biased, &fits, &torchs, &PyTuple_Type, &more)) {
    return nullptr;
  }
  const void* module = PyLong_AsVoidPtr(key);
  if (module == nullptr) return nullptr;
  LeftObject& left = *AsLeft(object);
  Remembered now{
      module,
      Owned::To(while_it_lives),
      {Owned::To(number), graded != 0, vouched != 0, biased != 0, Owned::To(fits), Owned::To(torchs), Owned::To(more)}};
  try {
    const auto found = Find(left, module);
    if (IsAt(left, found, module)) {
      std::swap(*found, now);  // what was there before ends with the function, when the new one stands
    } else {
      left.calls->insert(found, std::move(now));
    }
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_RETURN_NONE;
}

PyObject* Forget(PyObject* object, PyObject* key) {
  const void* module = PyLong_AsVoidPtr(key);
  if (PyErr_Occurred()) return nullptr;
  LeftObject& left = *AsLeft(object);
  const auto found = Find(left, module);
  if (IsAt(left, found, module)) {
    const Remembered forgotten = std::move(*found);  // ends when it is out of the list
    left.calls->erase(found);
  }
  Py_RETURN_NONE;
}

bool Is(PyObject* expected, Owned found) {
  return found.get() == expected;
}

// Whether the process group is the one that was seen last. It comes and goes without a word to anyone.
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

bool IsVouched(PyObject* vouched, PyObject* weight) {
  if (PyDict_Size(vouched) == 0) return false;
  const Owned key(PyLong_FromVoidPtr(weight));
  return key.get() != nullptr && PyDict_GetItemWithError(vouched, key.get()) != nullptr;
}

// What PyTorch's convolution is called with, if a call is the one that is remembered. None and no exception if not.
Owned Arguments(const LeftObject& left, const Call& call, PyObject* module, PyObject* x) {
  const Names& names = TheNames();
  if (PyList_GetItem(left.seen, 0) != call.number.get() || !IsSameGroup(PyList_GetItem(left.seen, 1))) return Owned();
  if (!Is(call.graded ? Py_True : Py_False, Owned(PyObject_CallObject(left.is_grad_enabled, nullptr)))) return Owned();
  const Owned parameters(PyObject_GetAttr(module, names.parameters));
  if (parameters.get() == nullptr || !PyDict_Check(parameters.get())) return Owned();
  const Owned weight = Owned::To(PyDict_GetItemWithError(parameters.get(), names.weight));
  const Owned bias = Owned::To(PyDict_GetItemWithError(parameters.get(), names.bias));
  if (weight.get() == nullptr || bias.get() == nullptr) return Owned();  // made anew before each call
  if (call.biased == (bias.get() == Py_None) || call.vouched != IsVouched(left.vouched, weight.get())) return Owned();
  PyObject* const tensors[] = {x, weight.get(), bias.get()};
  const Py_ssize_t count = call.biased ? 3 : 2;
  const Owned looked_at(PyTuple_New(count));
  if (looked_at.get() == nullptr) return Owned();
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!Is(Py_False, Owned(PyObject_GetAttr(tensors[i], names.is_nested)))) return Owned();
    PyTuple_SetItem(looked_at.get(), i, Owned::To(tensors[i]).release());
  }
  if (!Is(Py_True, Owned(PyObject_CallObject(call.fits.get(), looked_at.get())))) return Owned();
  const Py_ssize_t more = PyTuple_Size(call.arguments.get());
  Owned all(PyTuple_New(3 + more));
  if (all.get() == nullptr) return Owned();
  for (Py_ssize_t i = 0; i < 3 + more; i++) {
    PyObject* argument = i < 3 ? tensors[i] : PyTuple_GetItem(call.arguments.get(), i - 3);
    PyTuple_SetItem(all.get(), i, Owned::To(argument).release());
  }
  return all;
}

PyObject* Again(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "again(module, x)");
    return nullptr;
  }
  LeftObject& left = *AsLeft(object);
  const auto found = Find(left, arguments[0]);
  if (!IsAt(left, found, arguments[0])) Py_RETURN_NONE;
  const Call call = found->call;  // a copy: Python code that runs meanwhile may forget it
  const Owned all = Arguments(left, call, arguments[0], arguments[1]);
  if (all.get() == nullptr) {
    PyErr_Clear();  // whatever it was, Python will find it and say it in words
    Py_RETURN_NONE;
  }
  return PyObject_CallObject(call.torchs.get(), all.get());
}

Py_ssize_t Length(PyObject* object) {
  return static_cast<Py_ssize_t>(AsLeft(object)->calls->size());
}

PyMethodDef methods[] = {{"remember", &Remember, METH_VARARGS,
                          "remember(key, while_it_lives, number, graded, vouched, biased, fits, torchs, arguments)"},
                         {"forget", &Forget, METH_O, "forget(key)"},
                         {"again", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Again)), METH_FASTCALL,
                          "again(module, x): the output, or None."},
                         {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(&New)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(&Delete)},
                       {Py_tp_methods, methods},
                       {Py_mp_length, reinterpret_cast<void*>(&Length)},
                       {Py_tp_doc, const_cast<char*>("Left(seen, vouched, is_grad_enabled)")},
                       {0, nullptr}};

PyType_Spec spec = {"polyconv.ops._native.Left", sizeof(LeftObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace
}  // namespace polyconv

extern "C" PyMODINIT_FUNC PyInit__native() {
  return polyconv::ModuleOfOneType(polyconv::spec, "Left");
}
