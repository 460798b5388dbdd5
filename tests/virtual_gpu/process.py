"""The child process with the fake driver as its libcuda."""

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
    if environment:
        child = _Child(environment)
        try:
            return child.call(function, arguments, timeout)
        finally:
            child.stop()
    global _shared
    if _shared is None or not _shared.alive:
        _shared = _Child({})
    return _shared.call(function, arguments, timeout)


class _Child:
    def __init__(self, environment: dict[str, str]) -> None:
        self._connection, other = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(other,), daemon=True)
        search = [str(driver_folder()), os.environ.get("LD_LIBRARY_PATH", "")]
        path = [str(folder) for folder in _IMPORT_PATH] + [os.environ.get("PYTHONPATH", "")]
        with _environment(
            LD_LIBRARY_PATH=os.pathsep.join(filter(None, search)),
            PYTHONPATH=os.pathsep.join(filter(None, path)),
            **environment,
        ):
            self._process.start()
        other.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        self._connection.send((function, arguments))
        if not self._connection.poll(timeout):
            self.stop()
            raise VirtualGpuError(f"{function.__qualname__} did not return within {timeout} s: its process was killed")
        try:
            value, error, where = self._connection.recv()
        except EOFError:
            self._process.join(10)
            raise VirtualGpuError(
                f"{function.__qualname__} crashed its process (exit code {self._process.exitcode})"
            ) from None
        if error is not None:
            raise error from _RemoteError(where)
        return value

    def stop(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._connection.close()


_shared: _Child | None = None


@atexit.register
def _stop_shared() -> None:
    if _shared is not None and _shared.alive:
        _shared.stop()


def _serve(connection: Connection) -> None:
    """Body of the child: answer calls until the parent is gone."""
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
