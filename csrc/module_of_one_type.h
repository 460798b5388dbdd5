// Python module with a single type.
#pragma once

#include <Python.h>

namespace polyconv {

inline PyObject* ModuleOfOneType(PyType_Spec& spec, const char* name) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* module = PyModule_Create(&definition);
  PyObject* type = module == nullptr ? nullptr : PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObjectRef(module, name, type) != 0) Py_CLEAR(module);
  Py_XDECREF(type);
  return module;
}

}  // namespace polyconv
