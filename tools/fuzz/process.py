"""A worker process as its owner sees it: it gets one case at a time, and its death or hanging is detected."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

STARTING = 300.0
"""Seconds to import a part, or to make a case: torch alone takes some, a sanitized build many more."""
DYING = 20.0
"""Seconds to report where it hangs before it is killed."""


class PartError(Exception):
    """A part that cannot be used at all. The message is its worker's."""


class PartSkipped(Exception):  # noqa: N818 (no error: there is nothing that could fail)
    """A part without cases on this machine. The message is the reason."""


@dataclass(frozen=True)
class Surroundings:
    """Environment of workers."""

    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to this process's: for a sanitized build, for example."""

    def variables(self) -> dict[str, str]:
        """This checkout's sources first. Measurements of this machine must not change plans."""
        paths = [str(ROOT / name) for name in ("src", "tools", "tests")]
        found = {
            **os.environ,
            "PYTHONFAULTHANDLER": "1",
            "POLYCONV_TUNING_FILE": "off",
            "POLYCONV_STRICT": "on",
            **self.environment,
        }
        found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [found.get("PYTHONPATH")])])
        return found


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case."""

    kind: str
    """``passed``, ``failed``, ``crashed``, ``hung``, ``unmade`` (could not be made) or ``absent`` (none here)."""
    words: str = ""

    @property
    def is_bad(self) -> bool:
        return self.kind not in ("passed", "absent")


class _SilenceError(Exception):
    """No answer: the worker died, or took too long."""

    def __init__(self, gone: bool) -> None:
        self.gone = gone


class Worker:
    """One process for many cases of a part; after a case that killed it, a new one must be started."""

    def __init__(self, folder: Path, part: str, seed: int, log: Path, surroundings: Surroundings) -> None:
        self.ran: list[int] = []
        """Indices of this process's earlier cases, on which a case may depend."""
        self._log = log.open("ab")
        self._unread = b""
        requests, self._write = os.pipe()
        self._read, answers = os.pipe()
        arguments = [str(folder), part, str(seed), str(requests), str(answers)]
        self._process = subprocess.Popen(
            [surroundings.python, "-m", "fuzz.worker", *arguments],
            cwd=ROOT,
            env=surroundings.variables(),
            pass_fds=(requests, answers),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C goes to the fuzzer; children of a case die with the worker
        )
        os.close(requests)
        os.close(answers)
        self._said = self._log.tell()
        try:
            why_not = self._answer(STARTING).get("why_not")
        except _SilenceError:
            words = self._end()
            raise PartError(f"the worker of {part!r} does not start: {words}") from None
        if why_not:
            self.close()
            raise PartSkipped(why_not)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, index: int, path: Sequence[int] = ()) -> Outcome:
        """Run a case. If it crashed or hung, the process is gone."""
        if not path:
            self.ran.append(index)
        try:
            self._ask(index, path, script=False)
            answer = self._answer(STARTING)
            if "limit" in answer:
                answer = self._answer(answer["limit"])
        except _SilenceError as silence:
            kind = "crashed" if silence.gone else "hung"
            return Outcome(kind, self._end())
        return Outcome(answer["kind"], answer.get("words", ""))

    def script(self, index: int, path: Sequence[int]) -> str:
        """The program that reproduces a case."""
        try:
            self._ask(index, path, script=True)
            answer = self._answer(STARTING)
        except _SilenceError:
            return f'raise SystemExit("""making the script of this case ended the worker: {self._end()}""")\n'
        text: str = answer.get("script") or f'raise SystemExit("""there is no script: {answer.get("words")}""")\n'
        return text

    def interrupt(self) -> None:
        """Kill it from another thread: the case then counts as crashed."""
        if self.alive:
            self._process.kill()

    def close(self) -> None:
        """End the process and its children. Idempotent."""
        if self._log.closed:
            return
        os.close(self._write)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        self._kill()

    def _ask(self, index: int, path: Sequence[int], script: bool) -> None:
        self._said = self._log.seek(0, os.SEEK_END)
        request = json.dumps({"index": index, "path": list(path), "script": script}) + "\n"
        try:
            os.write(self._write, request.encode())
        except BrokenPipeError:
            raise _SilenceError(gone=True) from None

    def _answer(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _SilenceError(gone=False)
            # A fork of a case may hold the pipe open: the worker's exit must be polled.
            gone = self._process.poll() is not None
            readable, _, _ = select.select([self._read], [], [], 0 if gone else min(left, 0.5))
            text = os.read(self._read, 65536) if readable else b""
            if not text and (readable or gone):
                raise _SilenceError(gone=True)
            self._unread += text
        line, self._unread = self._unread.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def _end(self) -> str:
        """How the process ended, or where it hangs (then it is killed); and its last output."""
        try:
            status = self._process.wait(1.0)
            words = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            words = "no answer in time"
            self._process.send_signal(signal.SIGABRT)  # faulthandler then prints every thread's stack
            try:
                self._process.wait(DYING)
            except subprocess.TimeoutExpired:
                words += ", and deaf to signals"
        self._kill()
        os.close(self._write)
        with open(self._log.name, "rb") as log:
            log.seek(self._said)
            said = log.read().decode(errors="replace").strip()
        return f"{words}\n{said[-6000:]}" if said else words

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        self._log.close()
