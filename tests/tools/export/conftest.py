"""Fixtures for exported files: built without a compiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from exported_files import V100, Builds, load, text_of
from polyconv.tools.export import Model, exported_file, named_model


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builds:
    """A machine without a GPU, with given architectures, building in the test's folder."""
    builds = Builds()
    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", builds)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Volta")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return builds


@pytest.fixture
def imported(builds: Builds, tmp_path: Path) -> Iterator[Any]:
    """Imports the file of a problem by name, or of a model, with libraries that compute nothing."""

    def make(model: str | Model, **options: Any) -> ModuleType:
        if isinstance(model, Model) or options:
            model = named_model(model) if isinstance(model, str) else model
            text = exported_file(model, options.pop("device", V100), **options)
        else:
            text = text_of(model)
        return load(text, tmp_path / "exported_model.py")

    yield make
    sys.modules.pop("exported_model", None)
