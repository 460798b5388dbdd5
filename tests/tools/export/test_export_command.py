"""``polyconv export``: its output, accepted modules, and messages about others."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exported_files import V100, Builds, load, text_of
from polyconv import cli
from polyconv.tools.export import ExportError, convolution_model, exported_file, imported_model


def test_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    assert cli.main(["export", "kb82", "-o", str(path)]) == 0
    assert path.read_text() == text_of("kb82")
    assert "wrote" in capsys.readouterr().err


def test_takes_arguments(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    words = "--in-channels 32 --out-channels 64 --kernel-size 5 9 --stride 1 --padding 2 4 --dilation 2 3 --groups 32"
    words += " --bias --padding-mode reflect --input 8 32 64 64"
    assert cli.main(["export", *words.split(), "-o", str(path)]) == 0
    arguments: Any = {"in_channels": 32, "out_channels": 64, "kernel_size": (5, 9), "groups": 32}
    expected = convolution_model((8, 32, 64, 64), padding=(2, 4), dilation=(2, 3), padding_mode="reflect", **arguments)
    assert path.read_text() == exported_file(expected, V100)
    again = tmp_path / "again.py"
    assert cli.main(["export", *expected.command.split(), "-o", str(again)]) == 0
    assert again.read_text() == path.read_text()


def test_takes_options(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    words = "kb82 --forward-only --arch sm_70,sm_90a,sm_120 --class-name Depthwise"
    assert cli.main(["export", *words.split(), "-o", str(path)]) == 0
    text = path.read_text()
    assert "class Depthwise(nn.Module):" in text
    assert 'os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "7.0;9.0a;12.0")' in text
    assert "direct_input_gradient" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("kb89", "no workload 'kb89'"),
        (
            "--in-channels 3 --out-channels 4 --kernel-size 3 --padding-mode reflect --input 1 3 8 8 8",
            "over three axes padding_mode='zeros' can be exported alone; got 'reflect'",
        ),
        ("kb80 --groups 2", "leave out --groups"),
        ("--in-channels 3", "missing are --out-channels, --kernel-size, --input"),
        ("--in-channels 3 --out-channels 4 --kernel-size 3 --input 1 2 8 8", "an input of 2 channels"),
        ("--in-channels 3 --out-channels 4 --kernel-size 9 --input 1 3 8 8", "nothing to compute"),
        ("--in-channels 3 --out-channels 4 --kernel-size 3 --groups 2 --input 1 3 8 8", "cannot be split"),
        ("--in-channels 3 --out-channels 4 --kernel-size 3 --padding some --input 1 3 8 8", "got 'some'"),
        ("kb82 --class-name 1st", "'1st' is no name for a class"),
        ("--from torch.nn:Identity", "only --input is given, and it is needed"),
        ("--from torch.nn:Identity --input 1 3 8 8 --groups 2", "only --input is given"),
        ("--from torch.nn --input 1 3 8 8", "'torch.nn' names no attribute"),
        ("--from torch.nn:Konv2d --input 1 3 8 8", "torch.nn:Konv2d cannot be imported"),
        ("--from no.such.module:conv --input 1 3 8 8", "no.such.module:conv cannot be imported"),
        (
            "--from torch.nn:Identity --input 1 3 8 8",
            "torch.nn:Identity holds a Identity: a Conv1d, a Conv2d, a Conv3d, or a Seq",
        ),
        ("--from torch.nn:Sequential --input 1 3 8 8", "torch.nn:Sequential is empty"),
        ("--from math:pi --input 1 3 8 8", "math:pi holds a float"),
    ],
)
def test_explains_what_is_wrong(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", *words.split(), "-o", os.devnull]) == 2
    assert message in capsys.readouterr().err


def test_negative_padding_needs_zeros() -> None:
    with pytest.raises(ExportError, match="zeros"):
        convolution_model(
            (1, 3, 8, 8), in_channels=3, out_channels=3, kernel_size=3, padding=(-1, 0, 0, 0), padding_mode="reflect"
        )


# ---- a user's module

NETWORK = """
import torch
from torch import nn

import polyconv

stem = nn.Conv2d(3, 8, 5, stride=2, padding=2, bias=False)
mirrored = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", groups=4)
faster = polyconv.Conv2d(4, 4, 3, padding=(0, 1, 2, 1), groups=4)
activated = polyconv.Conv2d(4, 4, 3, activation="relu")
folded = polyconv.Conv2d(4, 4, 3)
folded.fold = object()


def pair():
    return nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 1))


class Blocks:
    named = nn.Sequential()
    named.add_module("depthwise", nn.Conv2d(4, 4, 3, groups=4))
    named.add_module("pointwise", nn.Conv2d(4, 6, 1))
    mixed = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())


class Standardised(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


standardised = Standardised(4, 4, 3)
"""


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package in the current folder."""
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "network.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("users_package")]:
        del sys.modules[name]


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("attribute", "channels", "layers"),
    [
        ("stem", 3, {"conv2d": (8, 3, 5, 5)}),
        ("mirrored", 4, {"conv2d": (4, 1, 3, 3)}),
        ("faster", 4, {"conv2d": (4, 1, 3, 3)}),
        ("activated", 4, {"conv2d": (4, 4, 3, 3)}),
        ("pair", 4, {"conv0": (4, 1, 3, 3), "conv1": (6, 4, 1, 1)}),
        ("Blocks.named", 4, {"depthwise": (4, 1, 3, 3), "pointwise": (6, 4, 1, 1)}),
    ],
)
def test_a_module_of_the_users(
    attribute: str, channels: int, layers: dict[str, tuple[int, ...]], builds: Builds, tmp_path: Path
) -> None:
    path = tmp_path / "exported_users.py"
    words = f"--from users_package.network:{attribute} --input 2 {channels} 16 18"
    assert cli.main(["export", *words.split(), "-o", str(path)]) == 0
    text = path.read_text()
    assert f"polyconv export {words}" in " ".join(text.split())
    module: Any = load(text, path)
    model = module.ModelNew()
    assert {name: tuple(layer.weight.shape) for name, layer in model.named_children()} == layers
    assert module.get_init_inputs() == []
    assert len(builds) == len(layers)
    with torch.device("meta"):
        (x,) = module.get_inputs()
    assert x.shape == (2, channels, 16, 18)


@pytest.mark.usefixtures("network")
def test_its_border_is_kept(builds: Builds, tmp_path: Path) -> None:
    model = imported_model("users_package.network:mirrored", (1, 4, 9, 9))
    load(exported_file(model, V100), tmp_path / "exported_users.py")
    assert "constexpr int kBorder = 1;" in builds.sources[0]


@pytest.mark.usefixtures("network")
def test_its_activation_is_kept(builds: Builds, tmp_path: Path) -> None:
    model = imported_model("users_package.network:activated", (1, 4, 9, 9))
    load(exported_file(model, V100, forward_only=True), tmp_path / "exported_users.py")
    assert "return z < 0.0f ? 0.0f : z;" in builds.sources[0]


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("Blocks.mixed", "holds a ReLU"),
        ("standardised", "holds a Standardised"),
        ("folded", "with a folded normalisation"),
        ("nothing", "cannot be imported"),
    ],
)
def test_what_it_cannot_hold_is_refused(attribute: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        imported_model(f"users_package.network:{attribute}", (1, 4, 9, 9))
