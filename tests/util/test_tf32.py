"""TF32: rates as in data sheets, formats by name, tables of the documentation."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import replace as replace_fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nightly import NIGHTLY
from polyconv import optimize
from polyconv.backend import backend_for
from polyconv.cli import main
from polyconv.cuda.planner import DEVICES
from polyconv.cuda.planner.aten import expected_us
from polyconv.cuda.planner.device import MOST_BY_MMA_SYNC
from polyconv.measure import candidate_timing
from polyconv.measure.accuracy import Accuracy
from polyconv.measure.operands import Operands
from polyconv.measure.timing import Timing
from polyconv.measure.workloads import find
from polyconv.model import replace
from polyconv.problem import TF32, Problem
from polyconv.util import gpu_arch, tf32

REPOSITORY = Path(__file__).resolve().parents[2]
TERAFLOPS = {
    "a100": 156,
    "a30": 82,
    "rtx3090": 35.6,
    "a10": 62.5,
    "rtx4090": 82.6,
    "l40s": 183,
    "l4": 60,
    "h100": 495,
    "b200": 1100,
    "b300": 1125,
    "rtx5090": 105,
}
"""Dense TF32 TFLOPS of the data sheets."""
TENSOR_CLOCKS = {"h100": 1830}
"""GPUs that clock lower with busy tensor cores, according to their papers."""
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
RTX_4090 = SimpleNamespace(name="NVIDIA GeForce RTX 4090", major=8, minor=9)
T4 = SimpleNamespace(name="Tesla T4", major=7, minor=5)


FLOAT32 = {
    "a100": 19.5,
    "a30": 10.3,
    "rtx3090": 35.6,
    "a10": 31.2,
    "orin": 5.3,
    "rtx4090": 82.6,
    "l40s": 91.6,
    "l4": 30.3,
    "h100": 67,
    "rtx5090": 104.8,
    "t4": 8.1,
    "v100": 15.7,
}
"""Likewise without tensor cores: the check of multiprocessors and clocks."""


@pytest.mark.parametrize("name", FLOAT32)
def test_clocks_are_those_of_the_data_sheets(name: str) -> None:
    device = DEVICES[name]
    rate = 2 * device.sms * device.clock_mhz * 1e6 * device.fp32_per_clock / 1e12
    assert rate == pytest.approx(FLOAT32[name], rel=0.01)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("NVIDIA H20", 74), ("NVIDIA H20-3e", 74), ("NVIDIA H200", 495), ("NVIDIA GH200 480GB", 495)],
)
def test_an_h20_is_no_h100(name: str, teraflops: float) -> None:
    """Its 78 multiprocessors have tensor cores of a quarter of the rate, so that float32 is worth its plans."""
    device = replace_fields(DEVICES["h100"], name=name, sms=78 if teraflops == 74 else 132)
    rate = 2 * device.sms * TENSOR_CLOCKS["h100"] * 1e6 / 1e12
    assert rate * gpu_arch.per_clock(device.arch, name) == pytest.approx(teraflops, rel=0.06)
    assert device.products_per_clock("float16") == (512 if teraflops == 74 else MOST_BY_MMA_SYNC)
    problem = replace_fields(find("W1")[0].problem("fprop"), torch_format=TF32)
    slower = expected_us(problem, device) / expected_us(problem, DEVICES["h100"])
    assert slower > 3 if teraflops == 74 else slower == 1


@pytest.mark.parametrize("name", TERAFLOPS)
def test_rates_are_those_of_the_data_sheets(name: str) -> None:
    device = DEVICES[name]
    clock_mhz = TENSOR_CLOCKS.get(name, device.clock_mhz)
    rate = 2 * device.sms * clock_mhz * 1e6 * gpu_arch.per_clock(device.arch, device.name) / 1e12
    assert rate == pytest.approx(TERAFLOPS[name], rel=0.06)


def test_a_model_on_the_cpu_is_told_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replace.replace(torch.nn.Conv2d(2, 2, 1)).count == 1


@pytest.mark.parametrize(
    ("gpu", "allowed", "format"), [(H100, True, "TF32"), (H100, False, "float32"), (T4, True, "float32")]
)
def test_what_pytorch_computes_in_has_a_name(
    gpu: SimpleNamespace, allowed: bool, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with torch.backends.cudnn.flags(allow_tf32=allowed):
        assert tf32.torchs_format(torch.device("cuda", 0)) == format
    assert tf32.torchs_format(torch.device("cpu")) == "float32"


@pytest.mark.parametrize(
    ("name", "float16", "bfloat16"), [("v100", 512, 64), ("a100", 1024, 1024), ("rtx4090", 256, 256)]
)
def test_half_precision_has_twice_the_rate(name: str, float16: int, bfloat16: int) -> None:
    """bfloat16 has float32's rate without tensor cores for it."""
    assert DEVICES[name].products_per_clock("float16") == float16
    assert DEVICES[name].products_per_clock("bfloat16") == bfloat16


def _tables() -> Any:
    spec = importlib.util.spec_from_file_location("tf32_table", REPOSITORY / "benchmarks" / "gpu" / "tf32.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_documentation_are_what_the_model_says() -> None:
    module = _tables()
    page = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")
    assert module.table() in page
    assert module.layers_table() in page
    for network in module.NETWORKS if NIGHTLY else ("EDSR",):
        assert module.network_row(network) in page


@pytest.mark.parametrize(
    ("gpu", "dtype", "images", "gigabytes"),
    [
        ("v100", "float32", 356, 164),
        ("v100", "float16", 951, 82),
        ("a100", "float32", 921, 164),
        ("a100", "float16", 1997, 82),
    ],
)
def test_published_training_is_expected(gpu: str, dtype: str, images: int, gigabytes: int) -> None:
    """NVIDIA's ResNet-50 (DeepLearningExamples, pytorch-20.12): images per second of one GPU in eight at batch 256,
    channels_last in AMP, less the traffic of the layers that are no convolutions, 640 MB per image in float32."""
    module, device = _tables(), DEVICES[gpu]
    net = module.resnet50(module.Net(256, 3, 224, 224))
    form = TF32 if dtype == "float32" else dtype
    problems = module._problems(net, dtype != "float32")
    ms = sum(n * expected_us(replace_fields(p, dtype=dtype, torch_format=form), device) / 1e3 for p, n in problems)
    published = 256e3 / images - gigabytes * 1e3 / device.dram_gbs
    assert 0.8 <= ms / published <= 1.05


@pytest.mark.parametrize("network", ["ResNet-50", "3-D U-Net"])
def test_no_network_is_expected_to_become_slower(network: str) -> None:
    """Neither under the default flags nor under autocast; ``replace`` gains where it leaves something to itself."""
    module = _tables()
    for how in (("float32",), ("bfloat16",), ("bfloat16", True)):
        found = module.step(network, DEVICES["a100"], *how)
        assert found.theirs_us >= 0.97 * found.us
        assert (found.theirs_us > found.us) == (found.ours > 0)


# ---- flags and messages


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="PyTorch has flags per operator from 2.9 on")
@pytest.mark.parametrize(("precision", "format"), [("ieee", "float32"), ("tf32", "TF32")])
def test_flags_of_convolutions_alone_are_followed(precision: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If other operators have other flags, ``torch.backends.cudnn.allow_tf32`` raises an error."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    cudnn = torch.backends.cudnn
    before = cudnn.conv.fp32_precision
    cudnn.conv.fp32_precision = precision
    try:
        assert tf32.torchs_format(torch.device("cuda", 0)) == format
        with tf32.switched_off():
            assert tf32.torchs_format(torch.device("cuda", 0)) == "float32"
        assert cudnn.conv.fp32_precision == precision
    finally:
        cudnn.conv.fp32_precision = before


def test_who_times_pytorch_in_tf32_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tf32, "torchs_format", lambda device: "TF32")
    _, report = optimize(torch.nn.Conv2d(3, 4, 3).eval(), torch.randn(1, 3, 12, 12), quiet=True, seconds=1)
    report.undo()
    assert "PyTorch computed in TF32, as its flags say, and polyconv in float32" in str(report)
    assert report.as_json()["torch_computes_in"] == "TF32"
    command = ["tune", "tiny-batch", "--pass", "fprop", "--batch", "1", "--candidates", "1", "-o", str(tmp_path / "t")]
    assert main(command) == 0
    assert "PyTorch computed in TF32" in capsys.readouterr().out


def test_being_as_wrong_as_tf32_is_not_exact_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's float32 error excuses polyconv's; that of TF32, a thousand times as large, does not."""
    problem = Problem.make("fprop", (1, 4, 12, 12), (4, 4, 3, 3))
    operands = Operands.random(problem)

    def timed(_: str, calls: Mapping[str, Any], __: Any) -> dict[str, Timing]:
        return {name: Timing(1.0, 1.0) for name in calls}

    monkeypatch.setattr(tf32, "torchs_format", lambda device: "TF32")
    decision = candidate_timing.decision_of(problem, operands, inference=True)
    backend = backend_for(torch.device("cpu"))
    errors = [1e-3, 1e-3, 1e-6]
    monkeypatch.setattr(candidate_timing, "measure_all", lambda *_, **__: [Accuracy(error, 1.0) for error in errors])
    with pytest.raises(candidate_timing.InexactError, match=r"strayed by 1\.0e-03, PyTorch by 1\.0e-03"):
        candidate_timing.contest(decision, operands, backend, timed)
    errors[2] = 1e-3
    assert candidate_timing.contest(decision, operands, backend, timed).error == 1e-3
