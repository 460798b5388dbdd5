"""What ``polyconv doctor`` knows: the state of an installation, a test of it that takes about a minute, and one that is
not so quick.

========================  ==========================================================================
:mod:`~.findings`         what is there, what is wrong with it, and what to do
:mod:`~.cases`            small convolutions that every family of kernels takes part in
:mod:`~.correctness`      runs them on the machine's kernels, against float64
:mod:`~.speed`            the headline workloads, next to PyTorch's own convolution
:mod:`~.report`           all of it as a file that can be sent to somebody
========================  ==========================================================================

A GPU is examined from all sides in processes of their own:

========================  ==========================================================================
:mod:`~.examination`      what an examination is, and its answers
:mod:`~.examinations`     all of them
:mod:`~.subject`          the GPU, and how they get at it
:mod:`~.every_kernel`     a small problem for each kernel, and the way that launches it
:mod:`~.fences`           memory that shows who wrote beside it, or read what nobody wrote
:mod:`~.proof`            one plan with all that can be asked of it
:mod:`~.examine`          the process that examines
:mod:`~.examiner`         the one that listens to it
:mod:`~.round`            one after the other
:mod:`~.record`           what was answered, in a file that one can go on with
:mod:`~.screen`           the same for people
========================  ==========================================================================
"""
