"""Exported files for tests: texts, modules, and a stub compiler whose libraries have no kernels."""

from __future__ import annotations

import functools
import importlib.util
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nightly import nightly
from polyconv.activation import Activation
from polyconv.cuda.planner import DEVICES
from polyconv.tools.export import Model, exported_file, named_model

ROOT = Path(__file__).resolve().parents[1]
V100 = DEVICES["v100"]
PROBLEMS = ("kb50", "kb55", "kb56", "kb62", "kb63", "kb80", "kb82", "kb83", "kb84", "kb85", "kb86", "kb87")
"""KernelBench's Conv2d."""
FAMILY = ("kb57", "kb64", "kb65", "kb67", "kb69", "kb71", "kb74", "kb75", "kb76", "kb78", "kb79", "kb81")
"""Its 1-D and transposed convolutions."""
VOLUMES = ("kb54", "kb58", "kb59", "kb60", "kb61", "kb66", "kb68", "kb70", "kb72", "kb73", "kb77")
"""Its 3-D convolutions."""
_ALWAYS = ("kb50", "kb63", "kb80", "kb82", "kb86", "kb87", "kb64", "kb76", "kb54", "kb72")
EVERY = [name if name in _ALWAYS else pytest.param(name, marks=nightly) for name in (*PROBLEMS, *FAMILY, *VOLUMES)]
"""Test parameters of all 35: a sample of each kind, because writing one takes seconds; nightly all."""
_LIBRARY = """
const char* forward(const void* call) { return 0; }
const char* input_gradient(const void* call) { return 0; }
const char* weight_gradient(const void* call) { return "weight_gradient could not be launched: no reason"; }
"""


@functools.cache
def text_of(name: str) -> str:
    """The file of one of KernelBench's problems."""
    return exported_file(named_model(name), V100)


def with_activation(model: Model, activation: str) -> Model:
    """A model whose convolutions all have an activation."""
    layers = (replace(one, problem=replace(one.problem, activation=Activation(activation))) for one in model.layers)
    return replace(model, layers=tuple(layers))


def check_format(text: str, path: Path) -> None:
    """Check a file with the project's ruff settings."""
    path.write_text(text)
    for command in (["check", "--quiet"], ["format", "--check", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(path)]
        result = subprocess.run(ruff, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def weights(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [value for value in state.values() if value.dim() > 1]


def original_of(weight: torch.Tensor) -> torch.nn.Module:
    """A convolution whose weight is drawn alike: initialisation depends on the shape only."""
    k, c, *taps = weight.shape
    made: torch.nn.Module = getattr(torch.nn, f"Conv{len(taps)}d")(c, k, taps)
    return made


class Builds(list[str]):
    """Replaces torch's ``load_inline``: records the build, and leaves an empty library."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []

    def __call__(self, name: str, cpp: str, cuda: str, *, build_directory: str, **keywords: Any) -> Any:
        self.append(name)
        self.sources.append(cuda)
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", f"{build_directory}/{name}.so"]
        subprocess.run(command, input=_LIBRARY, text=True, check=True)
        return self


def load(text: str, path: Path) -> ModuleType:
    """An exported file, imported as users would."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # pickle finds classes there
    spec.loader.exec_module(module)
    return module


def any_convolution(seed: int) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
    """An input and the arguments of a convolution on it."""
    choose = random.Random(seed)
    groups = choose.choice([1, 1, 1, 2, 3, 8])
    inputs = groups * choose.choice([1, 2, 8, 16, 33])
    arguments = {
        "in_channels": inputs,
        "out_channels": inputs if choose.random() < 0.2 else groups * choose.choice([1, 3, 16, 64]),
        "kernel_size": (choose.choice([1, 2, 3, 5, 7]), choose.choice([1, 3, 4, 5, 9, 11])),
        "stride": (choose.choice([1, 1, 2, 3]), choose.choice([1, 1, 2, 3])),
        "dilation": (choose.choice([1, 1, 2, 3]), choose.choice([1, 1, 2, 4])),
        "groups": groups,
        "bias": choose.random() < 0.5,
        "padding_mode": choose.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]),
    }
    least = 0 if arguments["padding_mode"] != "zeros" else -1
    arguments["padding"] = choose.choice(
        [(choose.randrange(6), choose.randrange(6)), tuple(choose.randrange(least, 5) for _ in range(4))]
    )
    return (choose.choice([1, 2, 16]), inputs, choose.choice([33, 64, 257]), choose.choice([47, 64, 256])), arguments
