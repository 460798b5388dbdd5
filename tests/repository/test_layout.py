"""The package's layout: few files per folder, few layers, no import or include circle."""

from __future__ import annotations

import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "polyconv"
MOST_FILES, MOST_LAYERS = 12, 17


def test_folders_are_small() -> None:
    sources = [path for kind in ("*.py", "*.cuh") for path in PACKAGE.rglob(kind)]
    count = Counter(str(path.parent.relative_to(PACKAGE)) for path in sources)
    assert {folder: files for folder, files in count.items() if files > MOST_FILES} == {}


def test_no_import_circle() -> None:
    """Lazy and type-checking imports count."""
    graph = grimp.build_graph("polyconv", cache_dir=None)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


def test_layers_are_few() -> None:
    """``lint-imports`` checks that they are respected."""
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert len(contract["layers"]) <= MOST_LAYERS


def test_the_fake_driver_includes_nothing_of_the_runtime() -> None:
    """That it calls nothing of it either, the linker checks: ``tests/virtual_gpu`` links the driver alone."""
    sources = "".join(path.read_text() for path in (ROOT / "tools" / "fake_cuda" / "driver").iterdir())
    assert set(re.findall('#include "(.*)"', sources)) == {"driver.h"}


def test_kernel_families_have_one_name() -> None:
    families = {path.name for path in (PACKAGE / "cuda" / "planner").iterdir() if path.is_dir()} - {"__pycache__"}
    folders = {path.name for path in (PACKAGE / "cuda" / "kernels").iterdir()}
    assert folders - {"common", "__pycache__"} == families
