"""Partial evaluation of the kernels' C++ text for one geometry.

The device headers serve every geometry, through templates, parameters and branches. For the one geometry of an exported
file, template parameters with a single argument and parameters with a constant value are substituted, branches on
constants resolved, and unused definitions dropped. The compiler would do the same; this is for readers of the file.

``scanning`` finds definitions and brackets, ``constants`` evaluates, ``templates``, ``fields`` and ``folding``
substitute and drop, ``layout`` fills the lines. There is no C++ parser: the rules rely on the text being this project's
own, formatted by clang-format. The tests compile and execute the output.
"""
