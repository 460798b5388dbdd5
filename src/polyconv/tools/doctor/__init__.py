"""Implementation of ``polyconv doctor``: state of the installation, and checks of a device in separate processes.

==========================  ========================================================================
:mod:`~.environment`        findings about versions, devices, settings and caches, each with advice
:mod:`~.check`              a check, its parts and their results
:mod:`~.checks`             all checks, and the selections that the self-test and ``--quick`` run
:mod:`~.device_under_test`  the CPU or a GPU, and how checks access it
:mod:`~.kernel_coverage`    small convolutions that together launch every kernel
:mod:`~.redzones`           red zones that detect out-of-bounds writes and uninitialised reads
:mod:`~.verify`             accuracy, determinism and memory safety of one plan
:mod:`~.worker`             the process that runs a check
:mod:`~.runner`             its parent, which collects the results
:mod:`~.session`            runs a selection of checks in order
:mod:`~.journal`            findings and results so far, in a file from which a session resumes
:mod:`~.summary`            the journal as text
==========================  ========================================================================
"""
