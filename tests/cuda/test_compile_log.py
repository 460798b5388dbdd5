"""The log line about kernels compiled while a call waited: one line, at the end."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import polyconv
from polyconv.backend import override
from polyconv.cuda import RefusedKernelError, compile_log
from polyconv.cuda.compile_log import Compilations, Compiled, Teller
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import KernelSpec
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def compilations(clock: Clock) -> Compilations:
    return Compilations(clock)


def test_what_is_compiled_side_by_side_takes_its_time_once(clock: Clock, compilations: Compilations) -> None:
    assert compilations.quiet() is None
    with compilations.noted("one"):
        clock.now += 1
        with compilations.noted("other"):
            clock.now += 2
            assert compilations.quiet() == 0
        clock.now += 0.5
    clock.now += 10
    assert compilations.quiet() == 10
    with pytest.raises(RefusedKernelError), compilations.noted("third"):
        _refuse(clock)
    assert compilations.quiet() == 0
    assert compilations.take() == Compiled(3, 3.75, "one", 3.5)
    assert compilations.take() == Compiled()


def _refuse(clock: Clock) -> None:
    clock.now += 0.25
    raise RefusedKernelError("no", symbol="third")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_does_not_wait_for_what_its_parent_compiles(clock: Clock, compilations: Compilations) -> None:
    with compilations.noted("done"):
        pass
    with compilations.noted("the parent's"):
        clock.now += 5
        child = os.fork()
        if child == 0:
            os._exit(0 if compilations.quiet() == 5 else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("seconds", "level"), [(compile_log.NOTICED, logging.WARNING), (compile_log.NOTICED / 2, logging.INFO)]
)
def test_one_line_when_it_is_over(
    clock: Clock, compilations: Compilations, caplog: pytest.LogCaptureFixture, seconds: float, level: int
) -> None:
    caplog.set_level(logging.INFO, "polyconv")
    teller = Teller(compilations, "sm_70", Path("/somewhere"), quiet=0.05)
    teller.listen()
    assert threading.active_count() == 1 or teller._thread is None
    for symbol in ("one", "other"):
        with compilations.noted(symbol):
            clock.now += seconds / 2
        teller.listen()
        time.sleep(0.2)  # the clock stands still: not finished
        assert not caplog.records
    clock.now += 1
    _until(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage() == (
        f"polyconv compiled 2 kernels for sm_70 in {seconds:.1f} s; the cache is /somewhere. polyconv.warmup(model, x) "
        "compiles those of a model beforehand, side by side"
    )
    teller.listen()
    teller.tell()
    assert len(caplog.records) == 1


def _until(done: object) -> None:
    for _ in range(200):
        if done():  # type: ignore[operator]
            return
        time.sleep(0.05)


def test_a_first_call_says_it_and_warmup_says_it_itself(tmp_path: Path) -> None:
    lines = run_in_virtual_gpu(_compile_and_listen, tmp_path)
    (line,) = lines
    assert "kernels for sm_70" in line
    assert str(tmp_path) in line


def _compile_and_listen(folder: Path) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("polyconv")
    before = compile_log.logger.level
    compile_log.logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    kept = KernelCache()

    def compiler(spec: KernelSpec, arch: str) -> bytes:
        return kept.get(spec, arch)

    try:
        with VirtualGpu() as gpu:
            with override("cpu", gpu.backend(cache=KernelCache(folder / "one", compiler=compiler))) as backend:
                polyconv.conv2d(torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3))
                backend._teller.tell()
                backend._teller.tell()
            with override("cpu", gpu.backend(cache=KernelCache(folder / "other", compiler=compiler))) as backend:
                polyconv.warmup(polyconv.Conv2d(4, 4, 3), (1, 4, 6, 6), quiet=True)
                backend._teller.tell()
    finally:
        logger.removeHandler(handler)
        compile_log.logger.setLevel(before)
    return lines
