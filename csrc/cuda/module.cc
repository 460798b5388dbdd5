// The module polyconv.cuda._native: launches for Python. Of torch it uses only a tensor's data_ptr().
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <new>
#include <utility>
#include <vector>

#include "../module_of_one_type.h"
#include "launches.h"

namespace polyconv {
namespace {

// Buffers whose addresses are passed as numbers, because they are not tensors of the call. Others are found by name.
constexpr const char* kNumbered[] = {"workspace", "weights"};
constexpr size_t kMostBuffers = 16;

struct LaunchesObject {
  PyObject head;
  Launches* launches;
  // Names of the buffers, by buffer number.
  std::vector<PyObject*>* names;
};

void* AsPointer(uint64_t number) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(number));
}

// Number of a buffer; a new name gets the next number. Returns -1 with an exception if there are too many.
Py_ssize_t BufferNumber(std::vector<PyObject*>& names, PyObject* name) {
  for (size_t i = 0; i < names.size(); i++) {
    if (PyUnicode_Compare(names[i], name) == 0) return static_cast<Py_ssize_t>(i);
    if (PyErr_Occurred()) return -1;
  }
  if (names.size() == kMostBuffers) {
    PyErr_SetString(PyExc_ValueError, "a plan names more buffers than any kernel has");
    return -1;
  }
  Py_INCREF(name);
  names.push_back(name);
  return static_cast<Py_ssize_t>(names.size() - 1);
}

// Reads (offset in the parameters, name of the buffer, offset in the buffer).
bool ReadSlot(PyObject* tuple, std::vector<PyObject*>& names, Launch& launch) {
  unsigned long long at, byte_offset;
  PyObject* name;
  if (!PyArg_ParseTuple(tuple, "KUK", &at, &name, &byte_offset)) return false;
  const Py_ssize_t buffer = BufferNumber(names, name);
  if (buffer < 0) return false;
  if (at > launch.parameters.size() || launch.parameters.size() - at < sizeof(uint64_t)) {
    PyErr_Format(PyExc_ValueError, "an address at byte %llu of %zu bytes of parameters", at, launch.parameters.size());
    return false;
  }
  launch.slots.push_back({static_cast<size_t>(at), static_cast<size_t>(buffer), byte_offset});
  return true;
}

// Reads (function, grid, block, dynamic shared memory, parameters, slots).
bool ReadLaunch(PyObject* tuple, std::vector<PyObject*>& names, std::vector<Launch>& all) {
  Launch launch;
  unsigned long long function;
  const char* parameters;
  Py_ssize_t size;
  PyObject* slots;
  auto& grid = launch.grid;
  auto& block = launch.block;
  if (!PyArg_ParseTuple(tuple, "K(III)(III)Iy#O!", &function, &grid[0], &grid[1], &grid[2], &block[0], &block[1],
                        &block[2], &launch.dynamic_shared, &parameters, &size, &PyTuple_Type, &slots)) {
    return false;
  }
  if (static_cast<size_t>(size) > kMostParameters) {
    PyErr_Format(PyExc_ValueError, "%zd bytes of parameters; a kernel takes at most %zu", size, kMostParameters);
    return false;
  }
  launch.function = AsPointer(function);
  launch.parameters.assign(parameters, parameters + size);
  for (Py_ssize_t i = 0; i < PyTuple_Size(slots); i++) {
    if (!ReadSlot(PyTuple_GetItem(slots, i), names, launch)) return false;
  }
  all.push_back(std::move(launch));
  return true;
}

bool Read(LaunchesObject* self, PyObject* arguments) {
  unsigned long long functions[4], context;
  PyObject* launches;
  if (!PyArg_ParseTuple(arguments, "(KKKK)KO!", &functions[0], &functions[1], &functions[2], &functions[3], &context,
                        &PyTuple_Type, &launches)) {
    return false;
  }
  self->launches = new Launches();
  self->names = new std::vector<PyObject*>();
  Driver& driver = self->launches->driver;
  driver.ctx_get_current = reinterpret_cast<decltype(driver.ctx_get_current)>(functions[0]);
  driver.ctx_push_current = reinterpret_cast<decltype(driver.ctx_push_current)>(functions[1]);
  driver.ctx_pop_current = reinterpret_cast<decltype(driver.ctx_pop_current)>(functions[2]);
  driver.launch_kernel = reinterpret_cast<decltype(driver.launch_kernel)>(functions[3]);
  self->launches->context = AsPointer(context);
  for (const char* name : kNumbered) {
    PyObject* text = PyUnicode_InternFromString(name);
    if (text == nullptr) return false;
    self->names->push_back(text);
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(launches); i++) {
    if (!ReadLaunch(PyTuple_GetItem(launches, i), *self->names, self->launches->all)) return false;
  }
  return true;
}

PyObject* New(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  bool well = false;
  try {
    well = Read(reinterpret_cast<LaunchesObject*>(self), arguments);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  if (!well) {
    Py_DECREF(self);
    return nullptr;
  }
  return self;
}

void Delete(PyObject* object) {
  auto* self = reinterpret_cast<LaunchesObject*>(object);
  if (self->names != nullptr) {
    for (PyObject* name : *self->names) Py_DECREF(name);
  }
  delete self->names;
  delete self->launches;
  PyTypeObject* type = Py_TYPE(object);
  PyObject_Free(object);
  Py_DECREF(type);
}

bool ReadNumber(PyObject* object, uint64_t& number) {
  number = PyLong_AsUnsignedLongLong(object);
  return number != UINT64_MAX || !PyErr_Occurred();
}

// Address of a tensor of the call, 0 if the call does not have it. Returns false with an exception set on errors.
bool ReadAddress(PyObject* tensors, PyObject* name, uint64_t& address) {
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* tensor = PyDict_GetItemWithError(tensors, name);
  address = 0;
  if (tensor == nullptr) return !PyErr_Occurred();
  PyObject* number = PyObject_CallMethodObjArgs(tensor, data_ptr, nullptr);
  const bool well = number != nullptr && ReadNumber(number, address);
  Py_XDECREF(number);
  return well;
}

PyObject* Enqueue(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
  const auto* self = reinterpret_cast<const LaunchesObject*>(object);
  if (count != 6 || !PyDict_Check(arguments[3])) {
    PyErr_SetString(PyExc_TypeError, "enqueue(first, last, stream, tensors by name, workspace, weights)");
    return nullptr;
  }
  uint64_t first, last, stream;
  std::array<uint64_t, kMostBuffers> addresses;
  if (!ReadNumber(arguments[0], first) || !ReadNumber(arguments[1], last) || !ReadNumber(arguments[2], stream) ||
      !ReadNumber(arguments[4], addresses[0]) || !ReadNumber(arguments[5], addresses[1])) {
    return nullptr;
  }
  for (size_t i = std::size(kNumbered); i < self->names->size(); i++) {
    if (!ReadAddress(arguments[3], (*self->names)[i], addresses[i])) return nullptr;
  }
  if (first > last || last > self->launches->all.size()) {
    PyErr_Format(PyExc_IndexError, "there are %zu launches", self->launches->all.size());
    return nullptr;
  }
  Outcome outcome;
  Py_BEGIN_ALLOW_THREADS;  // a full queue blocks the driver until the GPU advances, which may need another thread
  outcome = self->launches->Enqueue(first, last, addresses, AsPointer(stream));
  Py_END_ALLOW_THREADS;
  if (outcome.refused == nullptr) Py_RETURN_NONE;
  return Py_BuildValue("sni", outcome.refused, static_cast<Py_ssize_t>(outcome.launch), outcome.status);
}

PyMethodDef methods[] = {
    {"enqueue", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Enqueue)), METH_FASTCALL,
     "enqueue(first, last, stream, tensors, workspace, weights): None, or what the driver refused: the name of its "
     "function, the number of the launch, and the status."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(&New)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(&Delete)},
                       {Py_tp_methods, methods},
                       {Py_tp_doc, const_cast<char*>("Launches(functions of the driver, context, launches)")},
                       {0, nullptr}};

PyType_Spec spec = {"polyconv.cuda._native.Launches", sizeof(LaunchesObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace
}  // namespace polyconv

PyMODINIT_FUNC PyInit__native() {
  return polyconv::ModuleOfOneType(polyconv::spec, "Launches");
}
