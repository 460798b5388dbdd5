"""The exported files, and the computations that each must get right."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One computation of an exported file. It is small because the emulator runs every thread."""

    shape: tuple[int, ...]
    convolution: dict[str, Any]
    """Arguments of PyTorch's module."""
    module: str = "Conv2d"
    """Name of PyTorch's module."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments; none means the exported convolution."""
    forward_only: bool = False
    activation: str = ""
    """Of the exported module: name in ``torch.nn.functional``."""
    expanded: bool = False
    """The gradient has stride 0 everywhere, as that of ``y.sum()`` has."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class File:
    """One exported file."""

    name: str
    words: str
    """Arguments of ``polyconv export``."""
    cases: tuple[Case, ...]
    workspace: int = 0
    """Workspace [bytes] instead of the file's own 64 MiB, so that small problems are cut into slabs."""
    always: bool = True
    """Whether it is built by day, too: a sample of similar files."""
    arch: str = "7.0"
    """``TORCH_CUDA_ARCH_LIST``."""
    devices: tuple[str, ...] = ("v100", "t4")
    """Fake GPUs to run on. These have 96 and 64 KiB of shared memory: kernels that do not fit the second fall back."""
    board: tuple[tuple[int, int, int, int], ...] = ()
    """Of a submission to a board, in place of ``cases``: image, taps per axis, channels, batch."""
    slow_build: bool = False
    """True if torch's headers are compiled, a minute, which PyTorch 2.0 does again in each process: fewer of these."""


W1 = {
    "in_channels": 32,
    "out_channels": 64,
    "kernel_size": (5, 9),
    "padding": (2, 4),
    "dilation": (2, 3),
    "bias": False,
}
W3 = {"in_channels": 32, "out_channels": 64, "kernel_size": (5, 9), "bias": False}
W2 = {"in_channels": 16, "out_channels": 128, "kernel_size": 3, "bias": False}
KB57 = {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "bias": False}
KB64 = {"in_channels": 128, "out_channels": 128, "kernel_size": 3, "bias": False}
KB76 = {"in_channels": 64, "out_channels": 128, "kernel_size": 3, "stride": 3, "dilation": 4, "bias": False}
KB82: dict[str, Any] = {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "groups": 64, "bias": False}
OTHER = {"in_channels": 5, "out_channels": 7, "kernel_size": (2, 3), "stride": 2, "padding": (1, 1), "bias": True}
RESNET: dict[str, Any] = {"in_channels": 32, "out_channels": 32, "kernel_size": 3, "padding": 1}
UNEVEN = {**OTHER, "in_channels": 6, "out_channels": 9, "dilation": (1, 2), "groups": 3}
GROUPED = {"in_channels": 32, "out_channels": 24, "kernel_size": (3, 5), "padding": (1, 2), "groups": 2, "bias": True}
BIASED = {"in_channels": 8, "out_channels": 12, "kernel_size": (3, 5), "padding": (1, 2), "groups": 2, "bias": True}

EXAMPLE = File(
    "W1",
    "kb80",
    (
        Case((2, 32, 12, 28), W1),
        # Constructor arguments other than the exported ones.
        Case((2, 5, 8, 9), OTHER, arguments=OTHER),
    ),
)

KB75 = {
    "in_channels": 32,
    "out_channels": 64,
    "kernel_size": (3, 5),
    "stride": (2, 3),
    "padding": (1, 2),
    "dilation": (2, 1),
    "groups": 4,
    "bias": False,
}
VOLUME = {"kernel_size": 3, "bias": False}
LONG_VOLUME = {"kernel_size": (3, 5, 7), "bias": False}
KB54 = {"in_channels": 3, "out_channels": 64, **VOLUME}
KB59 = {"in_channels": 3, "out_channels": 64, "kernel_size": (3, 3, 1), "bias": False}
KB60 = {"in_channels": 3, "out_channels": 64, **LONG_VOLUME}
KB58 = {"in_channels": 32, "out_channels": 16, **LONG_VOLUME}
KB61 = {"in_channels": 48, "out_channels": 48, **VOLUME}
KB68 = {"in_channels": 32, "out_channels": 64, "kernel_size": (3, 5, 5), "bias": False}
KB70 = {"in_channels": 48, "out_channels": 24, **VOLUME}
KB72 = {
    "in_channels": 32,
    "out_channels": 32,
    "stride": 2,
    "padding": (1, 2, 3),
    "output_padding": 1,
    "groups": 4,
    **LONG_VOLUME,
}
KB73 = {"in_channels": 32, "out_channels": 32, "stride": 2, "padding": 1, **VOLUME}
KB77 = {"in_channels": 32, "out_channels": 64, "stride": 2, "padding": 1, "dilation": 2, **VOLUME}
OTHER_VOLUME = {"in_channels": 4, "out_channels": 6, "kernel_size": 2, "stride": 2, "padding": 1, "bias": True}
UPSAMPLED = {"in_channels": 6, "out_channels": 8, "kernel_size": 5, "stride": 2, "output_padding": 1, "bias": True}

VOLUMES = tuple(
    File(name, name, (Case(shape, convolution, module),), always=False)
    for name, module, shape, convolution in (
        ("kb59", "Conv3d", (2, 3, 6, 9, 5), KB59),
        ("kb60", "Conv3d", (2, 3, 4, 8, 12), KB60),
        ("kb66", "Conv3d", (1, 3, 5, 9, 14), KB60),
        ("kb58", "ConvTranspose3d", (2, 32, 2, 4, 6), KB58),
        ("kb61", "ConvTranspose3d", (1, 48, 2, 5, 7), KB61),
        ("kb68", "ConvTranspose3d", (1, 32, 2, 5, 6), KB68),
        ("kb70", "ConvTranspose3d", (1, 48, 3, 4, 5), KB70),
        ("kb72", "ConvTranspose3d", (2, 32, 2, 4, 5), KB72),
        ("kb73", "ConvTranspose3d", (1, 32, 3, 4, 5), KB73),
    )
)
"""KernelBench's other 3-D convolutions."""

FILES = (
    EXAMPLE,
    File("W1, simple", "kb80 --simple", (Case((2, 32, 12, 28), W1),), slow_build=True, always=False),
    File(
        "simple",
        "--in-channels 6 --out-channels 9 --kernel-size 2 3 --stride 2 --padding 1 --dilation 1 2 --groups 3 --bias "
        "--input 2 6 9 11 --simple",
        (Case((2, 6, 9, 11), UNEVEN, expanded=True),),
        slow_build=True,
    ),
    File("W1, forward only", "kb80 --forward-only", (Case((1, 32, 24, 40), W1, forward_only=True),), always=False),
    File(
        "W1, tensor cores",
        "kb80 --tensor-cores",
        # All rows of a 2-D problem's phase in one tile, and several.
        (Case((2, 32, 12, 28), W1), Case((1, 32, 24, 40), W1, forward_only=True)),
    ),
    File(
        "W1, tensor cores, slabs",
        "kb80 --tensor-cores",
        (Case((3, 32, 12, 28), W1),),  # two or more planes of an image in each
        workspace=1_200_000,
        always=False,
    ),
    File(
        "W1, A100",
        "kb80 --device a100",
        (Case((2, 32, 12, 28), W1), Case((1, 32, 24, 40), W1, expanded=True)),
        arch="7.0;8.0",
        devices=("a100", "v100"),
    ),
    File("W1, A100, slabs", "kb80 --device a100", (Case((3, 32, 12, 28), W1),), 1_200_000, False, "8.0", ("a100",)),
    File("W1, A100, PTX", "kb80 --device a100", (Case((1, 32, 12, 28), W1),), 0, False, "7.0+PTX", ("a100",)),
    File("W2, A100", "kb63 --device a100", (Case((2, 16, 8, 11), W2),), 0, False, "8.0", ("a100",)),
    File("W3, A100", "kb62 --device a100", (Case((2, 32, 11, 21), W3),), 0, False, "8.0", ("a100",)),
    File(
        "groups and bias, A100",
        "--in-channels 32 --out-channels 24 --kernel-size 3 5 --padding 1 2 --groups 2 --bias --input 8 32 64 64 "
        "--device a100",
        (Case((2, 32, 9, 12), GROUPED),),
        arch="8.0",
        devices=("a100",),
        always=False,
    ),
    File(
        "board",
        "--board --device h100",
        (),
        always=False,
        arch="8.0",
        devices=("a100",),
        board=((18, 8, 64, 2), (22, 16, 64, 2), (22, 16, 128, 1), (34, 32, 128, 1), (10, 4, 16, 2)),
    ),
    File(
        "W2",
        "kb63",
        (Case((2, 16, 8, 11), W2), Case((1, 16, 10, 18), W2, expanded=True)),
    ),
    File("kb82, depthwise", "kb82", (Case((2, 64, 10, 21), KB82),)),
    File("kb57, transposed", "kb57", (Case((1, 64, 7, 13), KB57, "ConvTranspose2d"),)),
    File("kb75, transposed, strided", "kb75", (Case((1, 32, 5, 6), KB75, "ConvTranspose2d"),), always=False),
    File(
        "kb64, transposed, one axis",
        "kb64",
        (
            Case((2, 128, 19), KB64, "ConvTranspose1d"),
            Case((2, 6, 9), UPSAMPLED, "ConvTranspose1d", arguments=UPSAMPLED),
        ),
    ),
    File("kb76, one axis", "kb76", (Case((2, 64, 50), KB76, "Conv1d"),)),
    File(
        "kb54, a volume",
        "kb54",
        (Case((2, 3, 5, 9, 12), KB54, "Conv3d"), Case((1, 4, 5, 6, 7), OTHER_VOLUME, "Conv3d", arguments=OTHER_VOLUME)),
    ),
    File("kb77, a transposed volume", "kb77", (Case((1, 32, 3, 4, 5), KB77, "ConvTranspose3d"),), always=False),
    *VOLUMES,
    File(
        "an algorithm per pass",
        "--in-channels 2 --out-channels 128 --kernel-size 9 9 --no-bias --input 1 2 12 64",
        (Case((1, 2, 11, 15), {"in_channels": 2, "out_channels": 128, "kernel_size": 9, "bias": False}),),
        always=False,
    ),
    File(
        "groups and bias",
        "--in-channels 8 --out-channels 12 --kernel-size 3 5 --padding 1 2 --groups 2 --bias --input 8 8 64 64",
        (Case((2, 8, 9, 12), BIASED),),
    ),
    File(
        "SiLU",
        "--from export_check.modules:silu --input 32 32 56 56",
        (Case((1, 32, 13, 18), RESNET, activation="silu"),),
        always=False,
    ),
    File(
        "depthwise, ReLU6, forward only",
        "--from export_check.modules:relu6 --input 16 64 56 56 --forward-only",
        (Case((2, 64, 10, 21), KB82, forward_only=True, activation="relu6"),),
    ),
)
