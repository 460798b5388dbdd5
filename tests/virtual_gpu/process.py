"""The child processes with the fake driver as their libcuda.

One is shared. Calls with an environment of their own run in forks of another, which has imported PyTorch and nothing
else: a fork saves the two seconds of that import.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fake_cuda.library import driver_folder

_HERE = Path(__file__).resolve().parent
_REPOSITORY = _HERE.parents[1]
_IMPORT_PATH = (_HERE.parent, _REPOSITORY / "tools", _REPOSITORY / "src")


class VirtualGpuError(RuntimeError):
    """The child process crashed or took too long."""


class _RemoteError(Exception):
    """Traceback of an exception in the child."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_in_virtual_gpu(
    function: Callable[..., Any], *arguments: Any, timeout: float = 120.0, environment: dict[str, str] | None = None
) -> Any:
    """Call a module-level function in a process with a virtual V100, and return its result.

    A call with an ``environment`` gets its own process; the others share one.
    """
    if not environment:
        return _started(_serve).call((function, arguments), function.__qualname__, timeout)
    work = pickle.dumps((function, arguments))  # unpickled in the fork alone, as that imports polyconv
    with _environment(**_search_paths()), _environment(**environment):
        surroundings = dict(os.environ), list(sys.path), os.getcwd(), os.getpid()
    order = (surroundings, work, function.__qualname__, timeout)
    return _started(_serve_in_forks).call(order, function.__qualname__, timeout + 30.0)


class _Child:
    def __init__(self, body: Callable[[Connection], None]) -> None:
        self._connection, other = multiprocessing.get_context("spawn").Pipe()
        # Not a daemon, which could not start processes: it is killed when this process ends.
        self._process = multiprocessing.get_context("spawn").Process(target=body, args=(other,))
        with _environment(**_search_paths()):
            self._process.start()
        other.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def call(self, order: tuple[Any, ...], name: str, timeout: float) -> Any:
        self._connection.send(order)
        if not self._connection.poll(timeout):
            self.stop()
            raise _too_late(name, timeout)
        try:
            value, error, where = self._connection.recv()
        except EOFError:
            raise _crashed(name, self._process) from None
        if error is not None:
            raise error from _RemoteError(where)
        return value

    def stop(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._connection.close()


_children: dict[Callable[[Connection], None], _Child] = {}


def _started(body: Callable[[Connection], None]) -> _Child:
    child = _children.get(body)
    if child is None or not child.alive:
        child = _children[body] = _Child(body)
    return child


@atexit.register
def _stop_all() -> None:
    for child in _children.values():
        if child.alive:
            child.stop()


def _search_paths() -> dict[str, str]:
    libraries = [str(driver_folder()), os.environ.get("LD_LIBRARY_PATH", "")]
    modules = [str(folder) for folder in _IMPORT_PATH] + [os.environ.get("PYTHONPATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
    }


def _too_late(name: str, timeout: float) -> VirtualGpuError:
    return VirtualGpuError(f"{name} did not return within {timeout} s: its process was killed")


def _crashed(name: str, process: Any) -> VirtualGpuError:
    process.join(10)
    return VirtualGpuError(f"{name} crashed its process (exit code {process.exitcode})")


def _serve(connection: Connection) -> None:
    """Body of a child: answer calls until the parent is gone."""
    sys.path[:0] = [str(folder) for folder in _IMPORT_PATH if str(folder) not in sys.path]
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (function(*arguments), None, "")
        except BaseException as error:
            answer = (None, _sendable(error), traceback.format_exc())
        connection.send(answer)


def _serve_in_forks(connection: Connection) -> None:
    """Body of the child that forks: calls and answers pass through it as they are."""
    import torch  # noqa: F401

    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        connection.send_bytes(_answer_of_a_fork(*order))


def _answer_of_a_fork(surroundings: tuple[Any, ...], work: bytes, name: str, timeout: float) -> bytes:
    forks = multiprocessing.get_context("fork")
    ours, theirs = forks.Pipe()
    process = forks.Process(target=_serve_in, args=(theirs, *surroundings), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.send_bytes(work)
        if not ours.poll(timeout):
            return pickle.dumps((None, _too_late(name, timeout), ""))
        return ours.recv_bytes()
    except (EOFError, ConnectionError):
        return pickle.dumps((None, _crashed(name, process), ""))
    finally:
        process.kill()
        process.join(10)
        ours.close()


def _serve_in(connection: Connection, environ: dict[str, str], path: list[str], folder: str, caller: int) -> None:
    for stream in (1, 2):  # those of the caller at this moment, which pytest changes
        with contextlib.suppress(OSError):  # a socket cannot be opened
            os.dup2(os.open(f"/proc/{caller}/fd/{stream}", os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path
    os.chdir(folder)
    _serve(connection)


def _sendable(error: BaseException) -> BaseException:
    """The error itself if it can be pickled, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Environment variables inherited by a process started in this block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
