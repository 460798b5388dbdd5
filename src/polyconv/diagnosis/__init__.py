"""What ``polyconv doctor`` knows: the state of an installation, and a test of it that takes about a minute.

========================  ==========================================================================
:mod:`~.findings`         what is there, what is wrong with it, and what to do
:mod:`~.cases`            small convolutions that every family of kernels takes part in
:mod:`~.correctness`      runs them on the machine's kernels, against float64
:mod:`~.speed`            the headline workloads, next to PyTorch's own convolution
:mod:`~.report`           all of it as a file that can be sent to somebody
========================  ==========================================================================
"""
