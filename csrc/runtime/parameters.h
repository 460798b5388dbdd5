// Check of a compiled graph's parameters before each call: polyconv/inductor/backend.py.
#pragma once

#include <Python.h>

namespace polyconv {

// parameters(tensors, positions, versions, links): a capsule for is_unchanged. None if this torch keeps tensors in another
// way. Tensors at position -1 are no inputs, but values of `links`: (dictionary, key, value), or (None, attribute of the
// first input, value).
PyObject* Parameters(PyObject*, PyObject* arguments);

// is_unchanged(parameters, inputs): whether the inputs are these tensors, at these versions, and the links as they were.
PyObject* IsUnchanged(PyObject*, PyObject* arguments);

}  // namespace polyconv
