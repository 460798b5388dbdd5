"""Cases that are whole programs: each runs in its own process, and is its own reproduction.

A program is the source of a module in this folder, with the possible actions, and one call at its end, with the actual
ones.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz.case import Case, Failure

FOLDER = Path(__file__).resolve().parent
_DIE_WITH_PARENT = 1  # of prctl


@dataclass(frozen=True)
class Program(Case):
    """A case that is a program."""

    def call(self) -> str:
        """The last line."""
        raise NotImplementedError

    limit = 120.0
    patience = 80.0
    """Seconds after which the program counts as hanging. The machine may be busy, or the build sanitized."""
    head = ""
    """The module of this folder that the program begins with."""

    @property
    def from_scratch(self) -> bool:
        """True if it needs a new interpreter, for example to see its exit. Otherwise a fork of the worker serves, which
        has imported torch and polyconv and used neither."""
        return False

    @property
    def in_worker(self) -> bool:
        """True if it leaves nothing behind, and may run in the worker itself, after others: imports, profiles and first
        plans are then paid for once, which is most of a small program's cost."""
        return False

    def ended_well(self, status: int | None, words: str) -> bool:
        """Judges an exit status (negative for a signal, None for a hang) and the output."""
        return status == 0

    def script(self) -> str:
        return f"{(FOLDER / f'{self.head}.py').read_text()}\n\n{self.call()}\n"

    def run(self) -> None:
        if self.in_worker:
            try:
                exec(compile(self.script(), f"{self.head}.py", "exec"), {"__name__": "__main__"})
            except Exception:
                raise Failure(_told(1, traceback.format_exc().strip())) from None
            return
        with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
            path = Path(folder) / "program.py"
            path.write_text(self.script())
            with open(Path(folder) / "said", "w+b") as said:
                start = _start if self.from_scratch else _fork
                pid = start(path, said.fileno())
                status = _wait(pid, self.patience)
                said.seek(0)
                words = said.read().decode(errors="replace").strip()
        if not self.ended_well(status, words):
            raise Failure(_told(status, words))


def _fork(path: Path, said: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _settle(said)
        code = compile(path.read_text(), str(path), "exec")
        names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
        exec(code, names)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _start(path: Path, said: int) -> int:
    """Likewise as a new interpreter. The process object is dropped: its id suffices."""
    process = subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.DEVNULL, stdout=said, stderr=said, process_group=0
    )
    process.returncode = 0  # or it would be waited for twice
    return process.pid


def _settle(said: int) -> None:
    """In the child: its own group, output and signals; it ends with its parent."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=sys.stderr)


def _wait(pid: int, seconds: float) -> int | None:
    """Its exit status, negative for a signal; None if it hung and was killed."""
    end, pause = time.monotonic() + seconds, 0.001
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        os.kill(pid, signal.SIGABRT)  # faulthandler then prints every thread's stack
        time.sleep(1.0)
        return None
    finally:
        try:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def _told(status: int | None, words: str) -> str:
    """The outcome in one line that is equal for similar failures, then all output."""
    reported = re.search(r"(Address|Thread)Sanitizer: .*|runtime error: .*", words)
    if reported is not None:
        return f"{reported[0]}\n{words[-6000:]}"
    if status is None:
        return f"hangs\n{words[-6000:]}"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}\n{words[-6000:]}"
    last = next((line for line in reversed(words.splitlines()) if line and not line.startswith(" ")), "says nothing")
    return f"{last[:300]}\n{words[-6000:]}"
