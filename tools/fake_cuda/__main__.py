"""Runs a program with a CUDA build of PyTorch 2.6.0, on fake GPUs.

    python tools/fake_cuda program.py
    python tools/fake_cuda --devices v100 --caching -m pytest tests/cuda_tensors

The first use fetches PyTorch into the developers' cache. polyconv and its tests are those of this checkout.
Launches compute inside of ``with PretendedGpu():`` only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fake_cuda.environment import PretendedTorch
from gpu_emulator.toolchain import cache_dir

ROOT = Path(__file__).resolve().parents[2]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python tools/fake_cuda",
        usage="%(prog)s [--devices DEVICES] [--caching] program.py | -m module | -c code [its arguments]",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    parser.add_argument("--devices", default="v100,v100", help="the GPUs: profiles of driver/device.c")
    parser.add_argument("--caching", action="store_true", help="let PyTorch keep memory, as it does on a GPU")
    chosen, program = parser.parse_known_args(words)
    torch = PretendedTorch.installed()
    base = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("src", "tools", "tests")),
        # Kept from run to run: an entry's name holds everything that could make it stale.
        "POLYCONV_CACHE_DIR": str(cache_dir() / "cuda-tensors"),
    }
    variables = torch.environment(chosen.devices, base, caching=chosen.caching)
    return subprocess.run([str(torch.python), *program], env=variables).returncode


sys.exit(main(sys.argv[1:]))
