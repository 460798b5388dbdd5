"""Processes that fork, processes without a home directory.

The bodies run in processes that have only imported polyconv, so that a first convolution does all initialisation.
"""

from __future__ import annotations

import faulthandler
import os
import pwd
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import polyconv
from fresh import run_fresh
from polyconv.util.cached import cached_property


def forward() -> None:
    polyconv.conv2d(torch.ones(1, 4, 9, 9), torch.ones(4, 4, 3, 3))


def backward() -> None:
    x, w = torch.ones(1, 4, 9, 9, requires_grad=True), torch.ones(4, 4, 3, 3, requires_grad=True)
    polyconv.conv2d(x, w).sum().backward()


def fused() -> None:
    x, w, residual = torch.ones(1, 4, 9, 9), torch.ones(4, 4, 3, 3), torch.ones(1, 4, 7, 7)
    polyconv.conv2d(x, w, residual=residual, activation="relu")


def changing_settings() -> None:
    for _ in range(200):
        with polyconv.tolerance(1e-5):
            forward()


WORK = [forward, backward, fused, changing_settings]


def fork(work: Callable[[], object], seconds: int) -> int:
    """A child that does this and exits; a stuck one is killed."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.dump_traceback_later(seconds, exit=True)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def fork_during_a_first(work: Callable[[], object]) -> None:
    torch.set_num_threads(1)  # forks of multi-threaded processes hang in OpenMP, as with torch alone
    # Nor is a fork safe during torch's own initialisation.
    torch.ones(1, requires_grad=True).sum().backward()
    torch.ones(1).new_empty(1).contiguous()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    children, pause = [], 0.002
    while any(thread.is_alive() for thread in threads) or len(children) < 5:
        children.append(fork(work, 60))
        time.sleep(pause)
        pause *= 1.3  # some twenty children, on any machine
    states = [os.waitpid(child, 0)[1] for child in children]
    assert not any(states), f"{sum(map(bool, states))} of {len(states)} children did not come back"


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_children_forked_during_a_first_convolution_compute(work: Callable[[], object]) -> None:
    run_fresh(fork_during_a_first, work)


def fork_while_a_property_is_computed() -> None:
    parent, started, done = os.getpid(), threading.Event(), threading.Event()

    class Planned:
        @cached_property
        def value(self) -> int:
            started.set()
            if os.getpid() == parent:
                done.wait(60)
            return 1

    thread = threading.Thread(target=lambda: Planned().value)
    thread.start()
    started.wait()
    state = os.waitpid(fork(lambda: Planned().value, 20), 0)[1]
    done.set()
    thread.join()
    assert state == 0


def test_a_child_computes_a_property_that_another_thread_was_computing() -> None:
    run_fresh(fork_while_a_property_is_computed)


def imports_of_a_first(work: Callable[[], object]) -> list[str]:
    """Imports in the calling thread itself, for which a fork would not wait."""
    torch.ones(1, requires_grad=True).sum().backward()
    found, caller = [], threading.get_ident()

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "import" and threading.get_ident() == caller:
            found.append(str(arguments[0]))

    sys.addaudithook(watch)
    work()
    return found


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_a_first_convolution_imports_nothing_where_a_fork_may_meet_it(work: Callable[[], object]) -> None:
    assert run_fresh(imports_of_a_first, work) == []


def handle_a_signal_during_a_first(milliseconds: int, handle: Callable[[], object]) -> None:
    """What such a handler leaves undone is done by the next call."""
    handled: list[int] = []

    def handler(*_: object) -> None:
        handled.append(milliseconds)
        with torch.enable_grad():  # it may interrupt a pass, which it does not import for
            handle()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, milliseconds / 1000)
    try:
        while not handled:
            backward()
    except KeyboardInterrupt:
        pass
    backward()


def interrupt() -> None:
    raise KeyboardInterrupt


def fork_and_wait() -> None:
    assert os.waitpid(fork(backward, 60), 0)[1] == 0, "the child did not come back"


@pytest.mark.parametrize("handle", [backward, interrupt, fork_and_wait], ids=lambda handle: handle.__name__)
@pytest.mark.parametrize("milliseconds", [1, 5, 20])
def test_a_signal_may_come_during_a_first_convolution(milliseconds: int, handle: Callable[[], object]) -> None:
    run_fresh(handle_a_signal_during_a_first, milliseconds, handle)


def fork_while_outputs_are_taken() -> None:
    torch.set_num_threads(1)
    forward()
    torch.ops.polyconv_cpu.set_output_pool_limit(2**40)
    like, stop, take_one = torch.empty(1), threading.Event(), torch.ops.polyconv_cpu.empty_output.default

    def take() -> None:
        while not stop.is_set():
            take_one(like, [2**22], [1])

    kept = [take_one(like, [2**22 + (i << 19)], [1]) for i in range(1, 500)]  # scopes to search
    del kept
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    states: list[int] = []
    while len(states) < 60 and not any(states):
        states.append(os.waitpid(fork(lambda: take_one(like, [2**22], [1]), 10), 0)[1])
    stop.set()
    for thread in threads:
        thread.join()
    assert not any(states), f"child {len(states)} did not come back"


def test_children_forked_while_outputs_are_taken_take_theirs() -> None:
    pytest.importorskip("polyconv.cpu._native")
    run_fresh(fork_while_outputs_are_taken)


class Filtered(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return polyconv.conv2d(torch.full((1, 4, 9, 9), float(index)), torch.ones(4, 4, 3, 3))


def load_with_workers() -> None:
    torch.set_num_threads(1)
    expected = torch.stack([Filtered()[index] for index in range(8)])
    loader = DataLoader(Filtered(), batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=60)
    assert torch.equal(torch.cat(list(loader)), expected)


def test_forked_workers_of_a_data_loader_compute() -> None:
    run_fresh(load_with_workers)


# ---- without a home directory


def compute_without_a_home() -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "POLYCONV_CACHE_DIR", "POLYCONV_TUNING_FILE"):
        os.environ.pop(name, None)

    def unknown(who: object) -> object:
        raise KeyError(who)

    pwd.getpwuid = pwd.getpwnam = unknown  # type: ignore[assignment]  # a user whom the system does not know
    with pytest.raises(RuntimeError):
        Path.home()
    warnings.simplefilter("error")
    for work in WORK:
        work()
    assert polyconv.autotune.tuning_lookup.files() == ()


def test_without_a_home_convolutions_run() -> None:
    run_fresh(compute_without_a_home)
