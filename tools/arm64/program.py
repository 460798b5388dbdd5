"""The checks in the emulated process."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

import polyconv
from arm64 import bits
from fuzz import case as cases
from fuzz.parts.convolutions import Convolution
from polyconv.cpu import native
from polyconv.tools.doctor.check import Verdict
from polyconv.tools.doctor.environment import findings
from polyconv.tools.doctor.summary import findings_text

SEED = 0


def main(convolutions: int, seconds: float, digests: str) -> int:
    """Returns the exit status; ``digests``: the file for those of :mod:`.bits`."""
    assert native.instruction_set() == "neon", native.why_absent()
    said = f"torch {torch.__version__}, polyconv {polyconv.__version__}, {torch.get_num_threads()} threads"
    print(f"{said}, imported in {time.process_time():.0f} s", flush=True)
    torch.manual_seed(SEED)
    for check in (check_fork, check_threads, check_model, check_benchmark, check_doctor):
        check()
    bits.write(Path(digests))
    failures = check_random(convolutions, seconds)
    print("\n".join(failures), end="")
    print(f"{time.process_time():.0f} s of processor time", flush=True)
    return 1 if failures else 0


def check_fork() -> None:
    """A child process computes the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # forks of multi-threaded processes hang in OpenMP, as with torch alone
    call = _depthwise()
    wanted = call()
    child = os.fork()
    if child == 0:
        os._exit(not torch.equal(call(), wanted))
    assert os.waitpid(child, 0)[1] == 0, "the child process failed"
    torch.set_num_threads(threads)
    print("a child process: the same bits", flush=True)


def check_threads() -> None:
    """One thread and three compute the same bits."""
    threads, call, found = torch.get_num_threads(), _depthwise(), []
    for number in (1, 3):
        torch.set_num_threads(number)
        found.append(call())
    assert torch.equal(*found), "three threads give other bits than one"
    torch.set_num_threads(threads)
    print("one thread and three: the same bits", flush=True)


def _depthwise() -> Callable[[], Tensor]:
    """A convolution that is not left to torch: its convolution of other kinds has threads that a child waits for."""
    x, w = torch.randn(4, 16, 30, 30), torch.randn(16, 1, 3, 3)
    return lambda: polyconv.conv2d(x, w, groups=16)


def check_model() -> None:
    """A model with replaced convolutions agrees with torch's in float64, also frozen and then changed."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, (5, 9), groups=16)
    )
    x = torch.randn(2, 8, 24, 40)
    exact = torch.nn.Sequential(*(torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU())).double()
    exact.append(torch.nn.Conv2d(16, 16, (5, 9), groups=16, dtype=torch.float64))
    polyconv.replace(model)
    for state in ("replaced", "frozen", "changed"):
        with torch.no_grad():
            if state == "frozen":
                polyconv.freeze(model)
            elif state == "changed":
                for weight in model.parameters():
                    weight.mul_(-0.5)
            exact.load_state_dict(model.state_dict())
            wanted = exact(x.double())
            error = max(float((model(x) - wanted).abs().max() / wanted.abs().max()) for _ in range(2))
        assert error < 1e-4, f"{state}: relative error {error:.1e}"
        print(f"a model of two convolutions, {state}: relative error {error:.1e}", flush=True)


def check_benchmark() -> None:
    """Autotuning ends with a choice, and every call of it is right."""
    x, w = torch.randn(1, 16, 12, 12), torch.randn(16, 1, 3, 3)
    wanted = torch.nn.functional.conv2d(x.double(), w.double(), groups=16)
    with tempfile.TemporaryDirectory() as folder, polyconv.benchmark():
        for call in range(1, 101):
            error = float((polyconv.conv2d(x, w, groups=16) - wanted).abs().max() / wanted.abs().max())
            assert error < 1e-4, f"call {call} of autotuning: relative error {error:.1e}"
            if polyconv.save_benchmark(Path(folder) / "tuning.json"):
                break
        else:
            raise AssertionError(f"autotuning has not ended after {call} calls")
    print(f"autotuning: a choice after {call} calls", flush=True)


def check_doctor() -> None:
    """Nothing is broken but what torch's CUDA build lacks without CUDA's packages."""
    found = findings()
    print(findings_text(found, 100), flush=True)
    broken = {one.name for one in found if one.state is Verdict.PROBLEM} - {"driver"}
    assert not broken, f"polyconv doctor finds broken: {', '.join(sorted(broken))}"


def check_random(convolutions: int, seconds: float) -> list[str]:
    """The fuzzer's convolutions, each by one of the candidates: some in three passes, then others, with all options,
    until the time is up [s of processor time]. Returns those that failed."""
    part, failures, end = cases.load("convolutions"), [], time.process_time() + seconds
    for index in count():
        if index >= convolutions and time.process_time() >= end:
            break
        case = part.case(SEED, index)
        if index < convolutions:
            assert isinstance(case, Convolution)
            case = replace(case, mode="grad", backward=True, twice=False, forward_mode=False, rewritten=None)
        try:
            case.run()
        except Exception as error:
            failures.append(f"convolutions {SEED}:{index}: {type(error).__name__}: {error}\n{case.script()}\n")
    print(f"{index} random convolutions against float64, {len(failures)} failed", flush=True)
    return failures
