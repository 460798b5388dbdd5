"""Importing the package defines names and does nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, logging, os, sys, torch
before = set(sys.modules)
handlers = list(logging.root.handlers)
environ = dict(os.environ)
threads = __import__("threading").active_count()
grad, default = torch.is_grad_enabled(), torch.get_default_dtype()
import polyconv
print(json.dumps({
    "modules": sorted(m for m in set(sys.modules) - before if not m.startswith("torch")),
    "torch": sorted(m for m in set(sys.modules) - before if m.startswith("torch")),
    "root handlers": handlers == logging.root.handlers,
    "own handlers": [n for n in logging.root.manager.loggerDict if n.startswith("polyconv")
                     and logging.getLogger(n).handlers],
    "environ": environ == dict(os.environ),
    "threads": threads == __import__("threading").active_count(),
    "cuda": torch.cuda.is_initialized(),
    "state": (grad, str(default)) == (torch.is_grad_enabled(), str(torch.get_default_dtype())),
}))
"""


def imported(tmp_path: Path) -> dict[str, object]:
    environ = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    ran = subprocess.run(
        [sys.executable, "-W", "error::Warning:polyconv", "-c", SCRIPT],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    return dict(json.loads(ran.stdout))


def test_no_side_effects(tmp_path: Path) -> None:
    seen = imported(tmp_path)
    modules = seen["modules"]
    assert isinstance(modules, list)
    outside = [m for m in modules if not m.startswith("polyconv") and m.split(".")[0] not in sys.stdlib_module_names]
    assert outside == []
    later = ("algebra", "autotune.tuning", "cli", "cpu.engines", "cpu.planner", "cuda", "measure", "numerics", "tools")
    assert not [m for m in modules if m.startswith(tuple(f"polyconv.{name}" for name in later))]
    assert not [m for m in seen["torch"] if m.startswith(("torch._dynamo", "torch._inductor"))]  # type: ignore[attr-defined]
    assert seen["root handlers"]
    assert seen["own handlers"] == []
    assert seen["environ"]
    assert seen["threads"]
    assert seen["state"]
    assert not seen["cuda"]
    assert list(tmp_path.iterdir()) == []


def test_public_names() -> None:
    import polyconv

    assert all(hasattr(polyconv, name) for name in polyconv.__all__)
    assert callable(polyconv.replace)
    assert callable(polyconv.explain)
