"""The CUDA weight cache: prepared weights of frozen models stay on the GPU, others are prepared at each call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_fallback import NOT_STRICT, OUT_OF_RESOURCES, said
from torch import Tensor
from torch.nn import Parameter

import polyconv
from moved_weights import MOVES, offloaded_and_loaded_there
from polyconv.autotune import preferences
from polyconv.backend import override
from polyconv.cuda import driver
from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.cuda.planner.planner import candidates
from polyconv.lowering import volume_stack
from polyconv.numerics.known_weights import concentration
from polyconv.numerics.scale import largest, scales
from polyconv.problem import Pass, Problem
from polyconv.runtime.frozen_weights import frozen_marks
from polyconv.selection import Preference
from tap_distributions import TAPS
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualBackend, VirtualGpu
from virtual_gpu.streams import captured, new_stream

V100 = DEVICES["v100"]
FAST, DIRECT = 1e-4, 0.0
"""Tolerances for which weights are transformed, and packed."""


@contextmanager
def layer(tolerance: float = FAST) -> Iterator[tuple[VirtualGpu, VirtualBackend, polyconv.Conv2d, Tensor]]:
    torch.manual_seed(0)
    conv, x = polyconv.Conv2d(16, 32, 3, padding=1, tolerance=tolerance), torch.randn(1, 16, 20, 20)
    with VirtualGpu() as gpu, override("cpu", gpu.backend()) as backend, torch.no_grad():
        yield gpu, backend, conv, x


def runs(gpu: VirtualGpu, conv: polyconv.Conv2d, x: Tensor) -> int:
    """Call, check the result, and return the number of launches that prepared the weight."""
    gpu.launches.clear()
    y = conv(x)
    exact = F.conv2d(x.double(), conv.weight.double(), conv.bias.double(), padding=1)  # type: ignore[union-attr]
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)
    names = [launch.name for launch in gpu.launches]
    assert names[-1].startswith(("implicit_gemm", "winograd_fused", "winograd_nonfused_output"))
    return sum("weights" in name or "filter" in name for name in names)


# ---- which launches can be skipped


@pytest.mark.parametrize("kind", list(Pass))
def test_what_a_plan_says_of_its_weights(kind: Pass) -> None:
    """The launches that read w come first, no others read it, and their output starts the workspace."""
    problem = Problem.make(kind, (2, 16, 20, 20), (32, 16, 3, 3), padding=(1, 1, 1, 1))
    kept = 0
    for candidate in candidates(problem):
        if candidate.refusal(problem) is not None:
            continue
        plan = plan_cuda(problem, V100, prefer=Preference(candidate.name))
        if plan.choice != candidate.name or not plan.weights_bytes:
            continue
        kept += 1
        first, rest = plan.launches[: plan.preparing], plan.launches[plan.preparing :]
        assert first
        assert {slot.buffer for launch in first for slot in launch.pointers} == {"w", "workspace"}
        assert all(slot.buffer != "w" for launch in rest for slot in launch.pointers)
        made = {slot.byte_offset for launch in first for slot in launch.pointers if slot.buffer == "workspace"}
        assert max(made) < plan.weights_bytes <= plan.workspace_bytes
        apart = [slot for launch in plan.with_weights_apart().launches for slot in launch.pointers]
        assert {slot.byte_offset for slot in apart if slot.buffer == "weights"} == made
        assert all(slot.byte_offset >= plan.weights_bytes for slot in apart if slot.buffer == "workspace")
    assert bool(kept) == (kind is Pass.FPROP)


# ---- hits


@pytest.mark.parametrize("tolerance", [FAST, DIRECT])
def test_a_frozen_weight_is_prepared_once(tolerance: float) -> None:
    run_in_virtual_gpu(_prepared_once, tolerance)


def _prepared_once(tolerance: float) -> None:
    with layer(tolerance) as (gpu, backend, conv, x):
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 1]
        assert not backend.weights._kept
        polyconv.freeze(conv)
        assert [runs(gpu, conv, x) for _ in range(3)] == [1, 0, 0]
        assert backend.weights.size == sum(kept.size for kept in backend.weights._kept.values()) > 0
        before = conv(x)
        conv.weight.data.fill_(1e30)  # the freeze was violated: the weight is not read
        assert torch.equal(conv(x), before)
        conv.weight.data.fill_(1.0)
        polyconv.unfreeze(conv)
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 1]


def test_batches_of_other_sizes_share_it() -> None:
    run_in_virtual_gpu(_other_sizes)


def _other_sizes() -> None:
    with layer() as (gpu, backend, conv, x):
        polyconv.freeze(conv)
        more = torch.randn(2, 16, 20, 20)
        assert [runs(gpu, conv, images) for images in (x, more, x, more)] == [1, 0, 0, 0]
        assert len(backend.weights._kept) == 1


def test_what_is_kept_is_bounded_and_goes_with_the_weight() -> None:
    run_in_virtual_gpu(_bounded)


def _bounded() -> None:
    with layer() as (gpu, backend, conv, x):
        polyconv.freeze(conv)
        backend.weights.limit = 100
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 1]
        assert (backend.weights.size, backend.weights._kept) == (0, {})
        backend.weights.limit = 2**20
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 0]
        other = polyconv.Conv2d(16, 32, 3, padding=1)
        polyconv.freeze(other)
        assert [runs(gpu, other, x) for _ in range(2)] == [1, 0]
        assert len(backend.weights._kept) == 2
        del other
        gc.collect()
        assert len(backend.weights._kept) == 1


VOLUMES = {
    "sum of slices": polyconv.Conv3d(8, 16, 3, padding=1),
    "stacked inputs": polyconv.Conv3d(16, 16, 3, padding=1).half(),
    "stacked outputs": polyconv.Conv3d(16, 16, (3, 3, 3), stride=(2, 1, 1), padding=1),
    "sum of slices, half precision": polyconv.Conv3d(16, 16, (1, 3, 3)).half(),
}
"""By lowering: layers for which it is preferred."""


@pytest.mark.parametrize("name", VOLUMES)
def test_parts_of_a_volumes_weight_are_prepared_once(name: str) -> None:
    run_in_virtual_gpu(_volume, name, timeout=300)


def _volume(name: str) -> None:
    """Each part on its own: parts of equal size are not mistaken for each other, and a change is seen in all."""
    torch.manual_seed(0)
    lowering, conv = name.partition(",")[0], VOLUMES[name]
    x = torch.randn(2, conv.in_channels, 6, 9, 12, dtype=conv.weight.dtype)
    stacked, stack_weights = [], volume_stack.stacked_weights
    volume_stack.stacked_weights = lambda *given: (stacked.append(given[1]), stack_weights(*given))[1]
    with VirtualGpu() as gpu, override("cpu", gpu.backend()) as backend, torch.no_grad():
        plan = backend.plan
        backend.plan = lambda problem, **more: plan(problem, **{**more, "prefer": Preference(lowering)})

        def prepares() -> tuple[int, int]:
            """Launches that prepare weights, and stacks of weights."""
            gpu.launches.clear(), stacked.clear()
            y = conv(x)
            exact = F.conv3d(x.double(), conv.weight.double(), conv.bias.double(), conv.stride, conv.padding)
            torch.testing.assert_close(y.double(), exact, rtol=3e-3, atol=3e-3)
            return sum("weights" in one.name or "filter" in one.name for one in gpu.launches), len(stacked)

        first = prepares()
        assert first[0] > 0
        assert bool(first[1]) == lowering.startswith("stacked")
        assert prepares() == first
        polyconv.freeze(conv)
        once = prepares()  # images share the parts
        assert 0 < once[0] <= first[0]
        assert once[1] == first[1]
        assert [prepares() for _ in range(2)] == [(0, 0)] * 2
        few, x = x, torch.cat([x, x])  # other launches, the same weights
        assert prepares() == (0, 0)
        x = few
        conv.weight.mul_(-0.5)
        assert prepares() == once
        assert prepares() == (0, 0)
        stream = new_stream()
        backend.stream = lambda: stream
        with captured(stream):
            assert prepares() == first  # everything is made in the graph
        polyconv.unfreeze(conv)
        assert prepares() == first


# ---- invalidation

CHANGES: dict[str, Callable[[polyconv.Conv2d], object]] = {
    "in place": lambda conv: conv.weight.mul_(-2),
    "load_state_dict": lambda conv: conv.load_state_dict(polyconv.Conv2d(16, 32, 3).state_dict()),
    "other memory": lambda conv: setattr(conv.weight, "data", torch.randn(32, 16, 3, 3)),
    "another layout": lambda conv: conv.to(memory_format=torch.channels_last),
    "a promise that is new": lambda conv: (polyconv.unfreeze(conv), conv.weight.data.mul_(3), polyconv.freeze(conv)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    run_in_virtual_gpu(_changed, change)


def _changed(change: str) -> None:
    with layer() as (gpu, _, conv, x):
        polyconv.freeze(conv)
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 0]
        CHANGES[change](conv)
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("move", MOVES)
def test_other_memory_at_the_same_address_is_seen(move: Callable[[Tensor], None]) -> None:
    run_in_virtual_gpu(_moved, move)


def _moved(move: Callable[[Tensor], None]) -> None:
    with layer() as (gpu, backend, conv, x):
        polyconv.freeze(conv)
        runs(gpu, conv, x)
        places = []
        for _ in range(20):
            before = conv.weight.data_ptr(), conv.weight._version
            move(conv.weight)
            places.append((conv.weight.data_ptr(), conv.weight._version) == before)
            assert [runs(gpu, conv, x) for _ in range(2)] == [1, 0]
        assert all(places[1:]) or move is not offloaded_and_loaded_there
        assert len(backend.weights._kept) == 1


def test_tensors_may_be_swapped() -> None:
    run_in_virtual_gpu(_swapped)


def _swapped() -> None:
    with layer() as (gpu, _, conv, x):
        polyconv.freeze(conv)
        runs(gpu, conv, x)
        torch.utils.swap_tensors(conv.weight, Parameter(torch.randn(32, 16, 3, 3)))
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 1]
        polyconv.freeze(conv)
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 0]


def test_another_weight_in_its_place_is_not_vouched_for() -> None:
    run_in_virtual_gpu(_another_weight)


def _another_weight() -> None:
    with layer() as (gpu, _, conv, x):
        polyconv.freeze(conv)
        runs(gpu, conv, x)
        conv.weight = Parameter(torch.randn(32, 16, 3, 3))
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 1]


def test_training_keeps_nothing() -> None:
    run_in_virtual_gpu(_training)


def _training() -> None:
    with layer() as (gpu, backend, conv, x):
        polyconv.freeze(conv)
        with torch.enable_grad():
            assert [runs(gpu, conv, x) for _ in range(2)] == [1, 1]
        assert not backend.weights._kept


def test_a_weight_without_a_version_is_not_kept() -> None:
    run_in_virtual_gpu(_of_inference_mode)


def _of_inference_mode() -> None:
    with layer() as (gpu, backend, _, x), torch.inference_mode():
        conv = polyconv.Conv2d(16, 32, 3, padding=1)
        polyconv.freeze(conv)
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 1]
        assert not backend.weights._kept


# ---- weights that miss the tolerance


@contextmanager
def fast_layer() -> Iterator[tuple[VirtualGpu, VirtualBackend, polyconv.Conv2d, Tensor]]:
    """A convolution with a transforming plan."""
    torch.manual_seed(0)
    conv, x = polyconv.Conv2d(32, 32, 5, tolerance=FAST), torch.randn(1, 32, 24, 24)
    with VirtualGpu() as gpu, override("cpu", gpu.backend()) as backend, torch.no_grad():
        yield gpu, backend, conv, x


def launched(gpu: VirtualGpu, conv: polyconv.Conv2d, x: Tensor) -> list[str]:
    gpu.launches.clear()
    conv(x)
    return [launch.name for launch in gpu.launches]


def test_a_frozen_weight_with_its_energy_in_one_tap_has_a_plan_of_its_own() -> None:
    run_in_virtual_gpu(_uneven, timeout=300)


def _uneven() -> None:
    with fast_layer() as (gpu, backend, conv, x):
        usual = launched(gpu, conv, x)
        conv.weight.copy_(TAPS["last tap"](tuple(conv.weight.shape)))
        assert launched(gpu, conv, x) == usual  # not frozen: reading it would synchronise with the GPU
        polyconv.freeze(conv)
        problem = replace(Problem.make("fprop", tuple(x.shape), tuple(conv.weight.shape)), frozen=True)
        plan, chosen = preferences.plan(backend, problem), preferences.plan(backend, problem, w=conv.weight)
        assert concentration(problem, plan, conv.weight) * plan.predicted_error > FAST
        assert concentration(problem, chosen, conv.weight) * chosen.predicted_error <= FAST
        first, again = launched(gpu, conv, x), launched(gpu, conv, x)
        assert first != usual
        assert first[-1] == again[-1] == chosen.kernels[-1].symbol  # type: ignore[union-attr]
        assert len(again) < len(first) or not chosen.weights_bytes  # type: ignore[union-attr]
        unit = scales(problem, {"x": x, "w": conv.weight, "bias": conv.bias})["y"]  # type: ignore[dict-item]
        exact = F.conv2d(x.double(), conv.weight.double(), conv.bias.double())  # type: ignore[union-attr]
        assert largest((conv(x).double() - exact).abs(), unit) <= FAST
        conv.weight.copy_(TAPS["even"](tuple(conv.weight.shape)))
        assert launched(gpu, conv, x) == usual
        other = polyconv.Conv2d(32, 32, 5)
        polyconv.freeze(other)
        launched(gpu, other, x)
        assert len(backend.weights._judged) == 2
        del other
        gc.collect()
        assert len(backend.weights._judged) == 1


def test_a_plan_for_a_weight_is_for_one_image_size() -> None:
    """Plans for other sizes prepare the weight alike, but their replacements write other outputs."""
    run_in_virtual_gpu(_uneven_in_two_sizes, timeout=300)


def _uneven_in_two_sizes() -> None:
    with fast_layer() as (_, backend, conv, _):
        conv.weight.copy_(TAPS["last tap"](tuple(conv.weight.shape)))
        polyconv.freeze(conv)
        for rows in (24, 28, 24):
            x = torch.randn(1, 32, rows, 24)
            exact = F.conv2d(x.double(), conv.weight.double(), conv.bias.double())  # type: ignore[union-attr]
            torch.testing.assert_close(conv(x).double(), exact, rtol=1e-3, atol=1e-3)
        assert len(backend.weights._judged) == 2


def test_a_weight_is_measured_once_on_every_stream_and_never_in_a_graph() -> None:
    run_in_virtual_gpu(_measured_once, timeout=300)


def _measured_once() -> None:
    with fast_layer() as (gpu, backend, conv, x):
        conv.weight.copy_(TAPS["last tap"](tuple(conv.weight.shape)))
        usual = launched(gpu, conv, x)
        polyconv.freeze(conv)
        measured, look = [], backend._instead
        backend._instead = lambda plan, w: (measured.append(plan.choice), look(plan, w))[1]  # type: ignore[method-assign]
        streams = [new_stream(), new_stream()]
        backend.stream = lambda: streams[0]
        with captured(streams[0]):
            assert launched(gpu, conv, x) == usual  # the weight is unknown and cannot be read
        assert not measured
        first = launched(gpu, conv, x)
        assert first != usual
        assert len(measured) == 1
        for stream in streams:
            backend.stream = lambda stream=stream: stream  # type: ignore[misc]
            assert launched(gpu, conv, x)[-1] == first[-1]
            with captured(stream):
                assert launched(gpu, conv, x) == first  # known facts are used; everything is made in the graph
        assert len(measured) == 1


# ---- streams and graphs


def test_each_stream_has_its_own() -> None:
    """Nothing orders a stream's writes before another stream's reads."""
    run_in_virtual_gpu(_streams)


def _streams() -> None:
    with layer() as (gpu, backend, conv, x):
        polyconv.freeze(conv)
        streams = [0, new_stream()]
        prepared = []
        for number in (0, 1, 0, 1):
            backend.stream = lambda number=number: streams[number]  # type: ignore[misc]
            prepared.append(runs(gpu, conv, x))
        assert prepared == [1, 1, 0, 0]


def test_a_graph_has_its_own() -> None:
    """Captured work runs with the graph: no other call may rely on it, nor it on others."""
    run_in_virtual_gpu(_capture)


def _capture() -> None:
    with layer() as (gpu, backend, conv, x):
        stream = new_stream()
        backend.stream = lambda: stream
        runs(gpu, conv, x)  # before freezing: nothing is cached, and kernels are loaded
        polyconv.freeze(conv)
        with captured(stream):
            assert [runs(gpu, conv, x) for _ in range(2)] == [1, 1]
        assert not backend.weights._kept
        assert [runs(gpu, conv, x) for _ in range(2)] == [1, 0]
        with captured(stream):
            assert runs(gpu, conv, x) == 1


# ---- failing launches


@pytest.mark.parametrize("nth", [1, 2])
def test_what_was_not_launched_is_not_kept(nth: int) -> None:
    run_in_virtual_gpu(_fails, nth, environment=NOT_STRICT, timeout=300)


def _fails(nth: int) -> None:
    with layer() as (gpu, backend, conv, x), said() as words:
        polyconv.freeze(conv)
        gpu.fail(driver.LAUNCH, nth, 1, OUT_OF_RESOURCES)
        runs(gpu, conv, x)
        assert gpu.repair() == 1
        assert len(backend.weights._kept) == 1  # of the fallback plan
        assert runs(gpu, conv, x) == 0
    assert len(words) == 1


def test_a_part_of_a_weight_is_made_for_a_fallback() -> None:
    run_in_virtual_gpu(_fails_with_a_part, environment=NOT_STRICT, timeout=300)


def _fails_with_a_part() -> None:
    conv, x = polyconv.Conv3d(16, 16, 3, padding=1).half(), torch.randn(1, 16, 4, 9, 12).half()
    with VirtualGpu() as gpu, override("cpu", gpu.backend()), torch.no_grad(), said() as words:
        polyconv.freeze(conv)
        conv(x)
        gpu.fail(driver.LAUNCH, 1, 1, OUT_OF_RESOURCES)
        y = conv(x)
        assert gpu.repair() == 1
        exact = F.conv3d(x.double(), conv.weight.double(), conv.bias.double(), padding=1)  # type: ignore[union-attr]
        torch.testing.assert_close(y.double(), exact, rtol=3e-3, atol=3e-3)
    assert len(words) == 1


def test_the_promise_is_known_by_identity() -> None:
    conv = polyconv.Conv2d(1, 1, 1)
    polyconv.freeze(conv)
    first = frozen_marks[id(conv.weight)]
    polyconv.unfreeze(conv)
    polyconv.freeze(conv)
    assert frozen_marks[id(conv.weight)] is not first
