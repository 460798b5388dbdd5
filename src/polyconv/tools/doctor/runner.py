"""Parent of the worker processes: starts them, collects their results, and reports those that hang or die."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

from .check import Check, Result, Verdict

COMMAND = (sys.executable, "-m", "polyconv.tools.doctor.worker")
MOST_PROBLEMS = 8
"""Problems after which the rest of a check is skipped: they are likely to have one cause."""
MOST_SANITIZED = 2
"""Problems of one check that are rerun under compute-sanitizer, which is slow."""
SANITIZER_LINES = 12
SLOWER_SANITIZED = 10
"""Factor on a part's time limit under compute-sanitizer."""
LAST_WORDS = 400
"""Characters kept from the end of a dead worker's standard error."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Runner:
    """Runs checks on one device.

    Args:
        device: name of the device, as in :class:`~.device_under_test.DeviceUnderTest`.
        quick: fewer parts.
        command: command line of a worker, to which the check's name and options are appended.
        environment: variables of the workers in addition to this process's.
        sanitizer: path of compute-sanitizer; None to search the path, ``""`` to disable it.
        expects: callback that receives the number of outstanding parts of a check.
    """

    device: str = "cuda:0"
    quick: bool = False
    command: Sequence[str] = COMMAND
    environment: Mapping[str, str] | None = None
    sanitizer: str | None = None
    expects: Callable[[int], None] = field(default=lambda parts: None)

    def run(self, check: Check, done: Sequence[Result] = ()) -> Iterator[Result]:
        """Yield the results of a check as they arrive, resuming after the results in ``done``."""
        problems = sum(result.verdict is Verdict.PROBLEM for result in done)
        first = after = done[-1].part if done else None
        while problems < MOST_PROBLEMS:
            before = after
            for result in self._heard(check, after, self.expects if after == first else None):
                if result is None:
                    return
                after = result.part
                if result.verdict is Verdict.PROBLEM:
                    problems += 1
                    if problems <= MOST_SANITIZED:
                        result = replace(result, sanitizer=self._sanitized(check, after))
                yield result
            if not after or after == before:  # died before its first part: a restart would, too
                return
        words = f"the parts after {after} were left out, because {problems} before them went wrong"
        yield Result(check.name, "", Verdict.WARNING, words)

    def _heard(self, check: Check, after: str | None, expects: Callable[[int], None] | None) -> Iterator[Result | None]:
        """Results of one worker for the parts after ``after``; finally None if no part is left."""
        at: str | None = None
        complete = False
        arguments = [] if after is None else ["--after", after]
        for message in self._listen(check, self._words(check, arguments), check.limit):
            if "parts" in message and expects is not None:
                expects(message["parts"])
            elif "begins" in message:
                at = str(message["begins"])
            elif "part" in message:
                yield Result(**{**message, "check": check.name, "verdict": Verdict(message["verdict"])})
                at = None
            elif "complete" in message:
                complete = True
            elif "ended" in message and (at is not None or message["failed"]):
                yield Result(check.name, at or "", Verdict.PROBLEM, message["ended"])
        if complete:
            yield None

    def _words(self, check: Check, more: Sequence[str]) -> list[str]:
        quick = ["--quick"] if self.quick else []
        return [*self.command, check.name, "--device", self.device, *quick, *more]

    def _listen(self, check: Check, command: list[str], patience: float) -> Iterator[Message]:
        """Messages of a worker, the last one its exit status. Killed after ``patience`` [s] without a message."""
        with tempfile.TemporaryFile() as errors, self._started(check, command, errors) as process:
            lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
            threading.Thread(target=_read, args=(process.stdout, lines.put), daemon=True).start()
            try:
                while (line := lines.get(timeout=patience)) is not None:
                    if line.endswith("\n"):  # otherwise the worker died while writing
                        yield json.loads(line)
                status = process.wait(patience)
                words = _how_it_ended(status) + _last_words(errors)
                yield {"ended": words, "failed": status != 0}
            except (queue.Empty, subprocess.TimeoutExpired):
                yield {"ended": f"gave no answer within {patience:.0f} s, and was stopped", "failed": True}
            finally:
                _stop(process)

    def _started(self, check: Check, command: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[str]:
        """Start a worker in a new session, so that its children are killed with it."""
        settled = {"POLYCONV_STRICT": "on", "CUDA_LAUNCH_BLOCKING": "1" if check.blocking else "0"}
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **settled, **(self.environment or {})},
            encoding="utf-8",
            start_new_session=True,
        )

    def _sanitized(self, check: Check, part: str) -> str:
        """First lines of compute-sanitizer's output for a failed part."""
        sanitizer = shutil.which("compute-sanitizer") if self.sanitizer is None else self.sanitizer
        if not sanitizer:
            return ""
        command = [sanitizer, "--tool", "memcheck", *self._words(check, ["--only", part])]
        with tempfile.TemporaryFile() as errors, self._started(check, command, errors) as process:
            try:
                said, _ = process.communicate(timeout=SLOWER_SANITIZED * check.limit)
            except subprocess.TimeoutExpired:
                return "compute-sanitizer did not come to an end"
            finally:
                _stop(process)
            errors.seek(0)
            lines = [*said.splitlines(), *errors.read().decode(errors="replace").splitlines()]
        return "\n".join([line for line in lines if line.startswith("=========")][:SANITIZER_LINES])


def _read(stream: IO[str] | None, put: Callable[[str | None], None]) -> None:
    """Forward all lines, then None."""
    with contextlib.suppress(ValueError):  # stream closed in the meantime
        for line in stream or ():
            put(line)
    put(None)


def _stop(process: subprocess.Popen[str]) -> None:
    """Kill a worker with its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"its process was ended by {name}"


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip()
    return f": {said[-LAST_WORDS:]}" if said else ""
