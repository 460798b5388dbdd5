"""How long a process takes from its import of an exported file to its first model.

    first_model.py FOLDER_OF_MODEL_PY LIMIT      fails if that took more than LIMIT seconds of processors' time

The time that passes is printed; judged is that of the processors, compilers included, to which nobody else adds.
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
