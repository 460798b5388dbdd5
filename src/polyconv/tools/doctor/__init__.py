"""Implementation of ``polyconv doctor``: state of the installation, a one-minute self-test, full checks of a GPU.

==========================  ========================================================================
:mod:`~.environment`        findings about versions, devices, settings and caches, each with advice
:mod:`~.kernel_coverage`    small convolutions that together launch every kernel
:mod:`~.quick`              self-test: correctness against float64, speed next to PyTorch
:mod:`~.summary`            the report as JSON and as text
==========================  ========================================================================

A GPU is checked in separate processes:

==========================  ========================================================================
:mod:`~.check`              a check, its parts and their answers
:mod:`~.checks`             all checks
:mod:`~.device_under_test`  the GPU, and how checks access it
:mod:`~.redzones`           red zones that detect out-of-bounds writes and uninitialised reads
:mod:`~.verify`             accuracy, determinism and memory safety of one plan
:mod:`~.worker`             the process that runs a check
:mod:`~.runner`             its parent, which collects the answers
:mod:`~.session`            runs the checks in order
:mod:`~.journal`            results so far, in a file from which a session resumes
==========================  ========================================================================
"""
