"""The checks in the emulated process."""

from __future__ import annotations

import os
import time
from itertools import count

import torch

import polyconv
from fuzz import case as cases
from polyconv.cpu import native

SEED = 0


def main(seconds: float) -> int:
    assert native.instruction_set() == "neon", native.why_absent()
    print(f"torch {torch.__version__}, polyconv {polyconv.__version__}, {torch.get_num_threads()} threads", flush=True)
    check_fork()
    check_model()
    failures = check_random(seconds)
    print("\n".join(failures), end="")
    return 1 if failures else 0


def check_model() -> None:
    """A model with replaced convolutions agrees with torch's in float64."""
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, (5, 9)))
    x = torch.randn(2, 8, 24, 40)
    with torch.no_grad():
        wanted = model.double()(x.double())
        polyconv.replace(model.float())
        error = float((model(x) - wanted).abs().max() / wanted.abs().max())
    assert error < 1e-4, f"relative error {error:.1e}"
    print(f"a model of two convolutions: relative error {error:.1e}", flush=True)


def check_fork() -> None:
    """A child process computes the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # forks of multi-threaded processes hang in OpenMP, as with torch alone
    # Depthwise, which is not left to torch: its convolution of other kinds has threads that a child process waits for.
    x, w = torch.randn(4, 16, 30, 30), torch.randn(16, 1, 3, 3)
    wanted = polyconv.conv2d(x, w, groups=16)
    child = os.fork()
    if child == 0:
        os._exit(not torch.equal(polyconv.conv2d(x, w, groups=16), wanted))
    assert os.waitpid(child, 0)[1] == 0, "the child process failed"
    torch.set_num_threads(threads)
    print("a child process: the same bits", flush=True)


def check_random(seconds: float) -> list[str]:
    """The fuzzer's convolutions, in all passes, by every candidate, for so long [s of processor time]: those that
    failed."""
    part, failures, end = cases.load("convolutions"), [], time.process_time() + seconds
    for index in count():
        if time.process_time() > end:
            break
        case = part.case(SEED, index)
        try:
            case.run()
        except Exception as error:
            failures.append(f"convolutions {SEED}:{index}: {type(error).__name__}: {error}\n{case.script()}\n")
    print(f"{index} random convolutions against float64, {len(failures)} failed", flush=True)
    return failures
