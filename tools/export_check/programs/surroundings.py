"""An exported file with streams, devices, threads, graphs, and refused launches.

surroundings.py FOLDER_OF_MODEL_PY      on two fake GPUs
"""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

import torch

from fake_cuda import PretendedGpu, compute_nothing, counts

_OUT_OF_RESOURCES = 701


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    from model import ModelNew

    model = ModelNew().cuda()
    x = torch.zeros(1, 32, 24, 40, device="cuda", requires_grad=True)
    for check in (side_stream, other_device, no_waiting, threads, refused_launch, refused_tensors):
        check(model, x)
        print(f"  as it should be: {check.__name__.replace('_', ' ')}")
    graph(model)
    print("  as it should be: graph, replayed with another input")


def side_stream(model: Any, x: torch.Tensor) -> None:
    """Forward on a side stream, backward on the same, whatever stream is current by then."""
    stream = torch.cuda.Stream()
    with PretendedGpu(compute_nothing) as gpu:
        with torch.cuda.stream(stream):
            y = model(x)
        assert {launch.stream for launch in gpu.launches} == {stream.cuda_stream}
        gradient = torch.empty_like(y)
        gpu.launches.clear()
        y.backward(gradient)
        assert {launch.stream for launch in gpu.launches} == {stream.cuda_stream}


def other_device(model: Any, x: torch.Tensor) -> None:
    """Kernels run on the tensors' device; the current device does not change."""
    with PretendedGpu(compute_nothing) as gpu, torch.no_grad():
        type(model)().to("cuda:1")(x.to("cuda:1"))
    assert {launch.device for launch in gpu.launches} == {1}
    assert torch.cuda.current_device() == 0


def no_waiting(model: Any, x: torch.Tensor) -> None:
    before = counts().synchronisations
    y = model(x)
    y.backward(torch.empty_like(y))
    assert counts().synchronisations == before


def threads(model: Any, x: torch.Tensor) -> None:
    """Several at once, each on its own stream."""
    failures = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    y = model(x)
                    torch.autograd.grad(y, x, torch.empty_like(y))
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work) for _ in range(4)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failures, failures


def refused_launch(model: Any, x: torch.Tensor) -> None:
    """Any launch of the forward may fail: the error names the kernel, and no state is left behind."""
    with PretendedGpu(compute_nothing) as gpu, torch.no_grad():
        model(x)
        names = [launch.name for launch in gpu.launches]
        for nth, name in enumerate(names, 1):
            gpu.fail("cudaLaunchKernel", nth, 1, _OUT_OF_RESOURCES)
            message = error_of(lambda: model(x))
            assert gpu.repair() == 1
            assert "too many resources requested for launch" in message, message
            assert plain_name(name) in message, f"{name} is not named: {message}"
            torch.cuda.synchronize()
        model(x)
    print(f"  such as: {message.splitlines()[0]}")


def plain_name(symbol: str) -> str:
    """A kernel's name in the source. In a mangled symbol each name follows its length, namespaces first."""
    is_nested = symbol.startswith("_ZN")
    name, rest = symbol, re.sub("^_ZN?", "", symbol)
    while digits := re.match(r"\d+", rest):
        start, end = digits.end(), digits.end() + int(digits.group())
        name, rest = rest[start:end], rest[end:] if is_nested else ""
    return name


def refused_tensors(model: Any, x: torch.Tensor) -> None:
    assert ".cuda()" in error_of(lambda: model(x.detach().cpu()))
    assert "float32" in error_of(lambda: model(x.detach().cpu().half().cuda()))
    assert "32" in error_of(lambda: model(x.detach()[:, 1:]))


def graph(model: Any) -> None:
    """Captured once, replayed with another input in the same memory: correct results."""
    with PretendedGpu(), torch.no_grad():
        x = torch.zeros(1, 32, 12, 28, device="cuda")
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            y = model(x)
        x.copy_(torch.randn(x.shape))
        captured.replay()
        assert torch.equal(y.cpu(), model(x).cpu())


def error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it was not refused")


main(*sys.argv[1:])
