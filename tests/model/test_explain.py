"""explain: reports every convolution of a call without running it."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import polyconv
from commands import python
from polyconv.backend import override
from polyconv.cpu import native
from polyconv.cpu.planner import plan_cpu
from polyconv.cuda.planner import DEVICES
from polyconv.measure.workloads import find
from polyconv.problem import Pass, Problem
from recording import Recorder


def test_a_module_and_a_shape() -> None:
    with override("cpu", Recorder()):
        text = str(polyconv.explain(polyconv.Conv2d(3, 8, (3, 5), padding=1), (2, 3, 16, 16)))
    assert text == (
        "Conv2d\n"
        "  fprop 2x3x16x16, 8 channels, kernel 3x5, padding 1x1, bias\n"
        "    recorded\n"
        "  dgrad 2x3x16x16, 8 channels, kernel 3x5, padding 1x1\n"
        "    recorded\n"
        "  wgrad 2x3x16x16, 8 channels, kernel 3x5, padding 1x1, bias\n"
        "    recorded"
    )


def test_every_pass_says_what_runs_and_how_far_it_strays() -> None:
    (conv,) = polyconv.explain(polyconv.Conv2d(3, 8, (3, 5), padding=1), (2, 3, 16, 16)).convolutions
    for one in conv.passes:
        assert "\n  runs " in one.text
        assert "predicted error" in one.text


def test_a_module_and_a_tensor_of_any_strides() -> None:
    x = torch.randn(2, 16, 16, 3).permute(0, 3, 1, 2)[:, :, ::2]
    (conv,) = polyconv.explain(polyconv.Conv2d(3, 8, 3), x).convolutions
    fprop, dgrad, wgrad = conv.passes
    assert fprop.problem.x_strides == x.stride()
    assert dgrad.problem.x_strides == (8 * 16 * 3, 1, 16 * 3, 3)
    assert wgrad.problem.kind is Pass.WGRAD
    assert fprop.backend == "cpu"


def test_the_problems_are_those_that_run() -> None:
    conv = polyconv.Conv2d(3, 8, 3, stride=2, padding="valid").to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    said = [one.problem for one in polyconv.explain(conv, x).convolutions[0].passes]
    recorder = Recorder()
    with override("cpu", recorder):
        y = conv(x)
        y.backward(torch.randn_like(y))
    assert recorder.problems == said


def test_a_call() -> None:
    x, w = torch.randn(1, 2, 8, 8), torch.randn(4, 2, 3, 3)
    text = str(polyconv.explain(polyconv.conv2d, x, w, padding=(0, 1, 2, -1)))
    assert "padding 0,1,2,-1" in text
    half = str(polyconv.explain(polyconv.conv2d, x.bfloat16(), w.bfloat16(), padding=(0, 1, 2, -1)))
    assert " in float32, " in half
    other = Problem.make("fprop", x.shape, w.shape, padding=(0, 1, 2, -1), dtype="bfloat16")
    assert "PyTorch's convolution on a padded copy, ATen" in {one.name for one in plan_cpu(other).candidates}


def test_a_model_names_its_modules_and_what_is_not_ours() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), polyconv.Conv2d(8, 8, 3))
    model[3].register_forward_hook(lambda *_: None)
    hooks = [len(m._forward_hooks) for m in model.modules()]
    first, second = polyconv.explain(model, (2, 3, 16, 16)).convolutions
    assert str(first) == "0 (Conv2d)\n  PyTorch's own convolution runs: this is not one of polyconv's modules"
    assert second.name == "3 (Conv2d)"
    assert len(second.passes) == 3
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert model[1].num_batches_tracked == 0
    assert torch.equal(model[1].running_mean, torch.zeros(8))


def test_nothing_is_computed() -> None:
    """An input of 70 TB fits no memory."""
    explanation = polyconv.explain(polyconv.Conv2d(1024, 1024, 3), (1024, 1024, 4096, 4096))
    assert explanation.convolutions[0].passes[0].problem.batch == 1024


def test_no_convolution() -> None:
    assert str(polyconv.explain(nn.ReLU(), torch.randn(3))) == "no convolution runs in this call"


def test_empty_input() -> None:
    assert "nothing runs" in str(polyconv.explain(polyconv.conv2d, torch.randn(0, 2, 5, 5), torch.randn(3, 2, 3, 3)))


def test_inside_a_fake_mode() -> None:
    with FakeTensorMode():
        conv = polyconv.Conv2d(3, 8, 3)
        x = torch.empty(2, 3, 16, 16)
        assert len(polyconv.explain(conv, x).convolutions) == 1
    assert len(polyconv.explain(conv, x).convolutions) == 1


def test_another_device_is_asked() -> None:
    with override("cuda", Recorder()):
        explanation = polyconv.explain(polyconv.Conv2d(3, 8, 3), (2, 3, 16, 16), device="cuda")
    assert {one.backend for one in explanation.convolutions[0].passes} == {"recorder"}


def test_fake_cuda_tensors_ask_the_cuda_backend() -> None:
    with FakeTensorMode(), override("cuda", Recorder()):
        x, w = torch.empty(2, 3, 16, 16, device="cuda:0"), torch.empty(8, 3, 3, 3, device="cuda:0")
        explanation = polyconv.explain(polyconv.conv2d, x, w)
    assert {one.backend for one in explanation.convolutions[0].passes} == {"recorder"}


def test_a_gpu_by_name_is_planned_for() -> None:
    conv = polyconv.Conv2d(32, 64, (5, 9), padding=(2, 4), dilation=(2, 3))
    explanation = polyconv.explain(conv, (8, 32, 512, 512), device="v100")
    by_description = polyconv.explain(conv, (8, 32, 512, 512), device=DEVICES["v100"])
    assert str(explanation) == str(by_description)
    assert "Tesla V100" in str(explanation)
    assert [one.problem.kind for one in explanation.convolutions[0].passes] == list(Pass)


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match=r"'v1000'.*v100"):
        polyconv.explain(polyconv.Conv2d(3, 8, 3), (2, 3, 16, 16), device="v1000")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_device_that_is_not_there_is_said_to_be() -> None:
    text = str(polyconv.explain(polyconv.Conv2d(3, 8, 3), (2, 3, 16, 16), device="cuda"))
    assert "the backend for cuda is not available here" in text


def test_torchs_function() -> None:
    text = str(polyconv.explain(F.conv2d, torch.randn(1, 2, 8, 8), torch.randn(4, 2, 3, 3)))
    assert "PyTorch's own convolution" in text


def test_a_convolution_by_its_arguments_on_any_known_gpu() -> None:
    for name in DEVICES:
        explained = polyconv.explain(polyconv.conv2d, (8, 64, 56, 56), (64, 64, 3, 3), None, 1, 1, device=name)
        assert all(DEVICES[name].name in str(one) for one in explained.convolutions[0].passes)
    x, w = torch.empty(8, 64, 56, 56), torch.empty(64, 64, 3, 3)
    assert str(explained) == str(polyconv.explain(polyconv.conv2d, x, w, padding=1, device=name))


@pytest.mark.parametrize(
    ("machine", "capability", "expected"),
    [
        ("x86_64", "AVX512", "avx512"),
        ("x86_64", "AVX2", "avx2"),
        ("x86_64", "DEFAULT", "sse4"),
        ("aarch64", "SVE256", "neon"),
    ],
)
def test_without_native_kernels_the_instruction_set_is_atens(
    monkeypatch: pytest.MonkeyPatch, machine: str, capability: str, expected: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(native, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    (workload,) = find("W1")
    assert f" on {expected}: " in plan_cpu(workload.problem(Pass.FPROP)).explain()


IMPORTS_OF_TORCH = """
import sys, threading
import polyconv

class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch._dynamo":
            print(threading.current_thread() is threading.main_thread())

sys.meta_path.insert(0, Watch)
polyconv.explain(polyconv.Conv2d(3, 8, 3), (2, 3, 16, 16))
"""


def test_ctrl_c_in_a_first_explanation_leaves_torch_whole() -> None:
    """torch's imports for fake tensors happen in a thread that no signal interrupts."""
    assert python(IMPORTS_OF_TORCH) == "False\n"
