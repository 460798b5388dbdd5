// Check of a compiled graph's parameters before each call: polyconv/inductor/backend.py.
#pragma once

#include <Python.h>

namespace polyconv {

// parameters(tensors, positions, versions): a capsule for is_unchanged. None if this torch keeps tensors in another way.
PyObject* Parameters(PyObject*, PyObject* arguments);

// is_unchanged(parameters, inputs): whether the inputs at these positions are these tensors, at these versions.
PyObject* IsUnchanged(PyObject*, PyObject* arguments);

}  // namespace polyconv
