"""Processes that fork, processes without a home."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEADER = """
import os, signal, sys, threading, time
import torch
import polyconv

torch.set_num_threads(1)  # a child of a process that used several hangs in OpenMP, as with torch alone
x, w = torch.randn(1, 4, 9, 9), torch.randn(4, 4, 3, 3)


def backward():
    polyconv.conv2d(x.requires_grad_(), w.requires_grad_()).sum().backward()


def settings():
    for _ in range(200):
        with polyconv.tolerance(1e-5):
            polyconv.conv2d(x, w)


work = {
    "forward": lambda: polyconv.conv2d(x, w),
    "backward": backward,
    "fused": lambda: polyconv.conv2d(x, w, residual=torch.randn(1, 4, 7, 7), activation="relu"),
    "settings": settings,
}
"""

FORKS = """
done = []


def first():
    work[sys.argv[1]]()
    done.append(1)


threads = [threading.Thread(target=first) for _ in range(2)]
for thread in threads:
    thread.start()
children = []
while len(done) < 2 or len(children) < 5:
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that is stuck
        work[sys.argv[1]]()
        os._exit(0)
    children.append(child)
    time.sleep(0.004)
for thread in threads:
    thread.join()
states = [os.waitpid(child, 0)[1] for child in children]
assert not any(states), f"{sum(map(bool, states))} of {len(states)} children did not come back"
"""

FORKS_OF_A_POOL = """
polyconv.conv2d(x, w)
from polyconv.cpu import native

native.set_output_pool_limit(2**40)
stop, take_one = [], torch.ops.polyconv_cpu.empty_output.default


def take():
    while not stop:
        take_one(x, [2**22])


kept = [take_one(x, [2**22 + (i << 19)]) for i in range(1, 500)]  # blocks to look through
del kept
threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads:
    thread.start()
states = []
for _ in range(60):
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        take_one(x, [2**22])
        os._exit(0)
    states.append(os.waitpid(child, 0)[1])
    if any(states):
        break
stop.append(1)
for thread in threads:
    thread.join()
assert not any(states), f"child {len(states)} did not come back"
"""

WORKERS = """
from torch.utils.data import DataLoader


class Filtered(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return polyconv.conv2d(torch.full((1, 4, 9, 9), float(index)), w)


expected = torch.stack([Filtered()[index] for index in range(8)])
loader = DataLoader(Filtered(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
assert torch.equal(torch.cat(list(loader)), expected)
"""


def run(script: str, *arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A new interpreter in which nothing has been computed yet."""
    ran = subprocess.run(
        [sys.executable, "-c", HEADER + script, *arguments],
        env=environ if environ is not None else dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran


@pytest.mark.parametrize("work", ["forward", "backward", "fused", "settings"])
def test_children_forked_during_a_first_convolution_compute(work: str) -> None:
    run(FORKS, work)


def test_children_forked_while_outputs_are_taken_take_theirs() -> None:
    run(FORKS_OF_A_POOL)


def test_forked_workers_of_a_data_loader_compute() -> None:
    run(WORKERS)


# ---- without a home


HOMELESS = """
import pwd, warnings
from pathlib import Path

pwd.getpwuid = pwd.getpwnam = lambda who: {}[who]  # a user whom the system does not know
try:
    raise SystemExit(f"a home after all: {Path.home()}")
except RuntimeError:
    pass
warnings.simplefilter("error")
for run in work.values():
    run()
from polyconv import tuning

assert tuning.lookup.files() == ()
"""


def test_without_a_home_convolutions_run() -> None:
    unset = ("HOME", "XDG_CACHE_HOME", "POLYCONV_CACHE_DIR", "POLYCONV_TUNING_FILE")
    run(HOMELESS, environ={name: value for name, value in os.environ.items() if name not in unset})
