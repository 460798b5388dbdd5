"""Process of one contender: builds it, then answers requests on its pipes, one line each, and is blocked in between.

An answer is a line of JSON. The first tells how the contender was built, or why not; ``sample N`` is answered by the
mean times of N calls, ``memory`` by the peak resident size.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from ....cpu import native
from ....measure import timing
from .contenders import Ready, build, in_brief, source


def main() -> None:
    answers = _answers()
    path = Path(sys.argv[1])
    job = pickle.loads(path.read_bytes())
    torch.set_num_threads(job.case.threads)
    if job.isa:
        native.instruction_set(job.isa)
    try:
        origin, x = source(job)
        began = time.perf_counter()
        ready = build(job, origin, x)
        seconds = time.perf_counter() - began
        torch.save(ready.result.detach().clone(), path.with_suffix(".pt"))
        with ready.block():
            once = timing.sample(ready.call, 1)
    except Exception as error:  # whatever a compiler raises goes into the report
        _answer(answers, {"refused": in_brief(error)})
        return
    _answer(answers, {"setup_s": seconds, "calls": timing.calls_per_sample(once)})
    for line in sys.stdin:
        request, *numbers = line.split()
        _answer(answers, _sample(ready, int(numbers[0])) if request == "sample" else {"bytes": peak_memory()})


def _sample(ready: Ready, times: int) -> dict[str, float]:
    with ready.block():
        ready.call()  # wakes the threads and fetches the weights, after the other contenders' turns
        before = time.process_time()
        seconds = timing.sample(ready.call, times)
        return {"s": seconds, "cpu_s": (time.process_time() - before) / times}


def peak_memory() -> int:
    """Peak resident size [bytes]. Not ``ru_maxrss``, which begins with that of the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _answers() -> TextIO:
    """The pipe to the driver. What libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, found: dict[str, Any]) -> None:
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
