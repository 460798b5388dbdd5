"""Time of a process from importing an exported file to its first model.

    first_model.py FOLDER_OF_MODEL_PY LIMIT      fails if that took more than LIMIT seconds of processor time

Wall time is printed; the limit applies to processor time, compilers included, to which other processes do not add.
"""

from __future__ import annotations

import os
import sys
import time

import torch.utils.cpp_extension  # noqa: F401 - its own time is not the file's


def main(folder: str, limit: str) -> None:
    sys.path.insert(0, folder)
    start, before = time.perf_counter(), sum(os.times()[:4])
    from model import ModelNew

    ModelNew()
    seconds, spent = time.perf_counter() - start, sum(os.times()[:4]) - before
    print(f"  the first ModelNew() of a process: {seconds:.2f} s, {spent:.2f} s of the processors' time")
    assert spent <= float(limit), f"more than {limit} s"


main(*sys.argv[1:])
