"""PyTorch's own OpInfo samples: results and errors agree with torch, by polyconv's functions and by ``enable``.

``python tests/dispatch/test_opinfo.py`` prints the counts.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyconv
from polyconv.autotune import preferences
from polyconv.cpu import native
from polyconv.cpu.engines import aten
from polyconv.dispatch.op import PUBLIC
from without_aten import enabled_without_aten

NAMES = [op.name for op in PUBLIC]


@cache
def opinfos() -> dict[str, Any]:
    """Imported by the first test, because the import takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {name: op for op in op_db if (name := op.name.rpartition(".")[2]) in NAMES}


def samples(name: str) -> list[Any]:
    return list(opinfos()[name].sample_inputs("cpu", torch.float64, requires_grad=True))


def errors(name: str) -> list[Any]:
    """None for transposed convolutions: torch has no such samples."""
    return list(opinfos()[name].error_inputs("cpu")) if opinfos()[name].error_inputs_func else []


def test_there_are_samples() -> None:
    assert sum(len(samples(name)) for name in NAMES) >= 60
    assert sum(len(errors(name)) for name in NAMES) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_samples(name: str) -> None:
    for sample in samples(name):
        ours = getattr(polyconv, name)(sample.input, *sample.args, **sample.kwargs)
        theirs = getattr(F, name)(sample.input, *sample.args, **sample.kwargs)
        torch.testing.assert_close(ours, theirs)
        leaves = [t for t in (sample.input, *sample.args) if isinstance(t, Tensor)]
        dy = torch.randn_like(theirs)
        torch.testing.assert_close(torch.autograd.grad(ours, leaves, dy), torch.autograd.grad(theirs, leaves, dy))


@pytest.mark.parametrize("name", NAMES)
def test_errors(name: str) -> None:
    for error in errors(name):
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            getattr(polyconv, name)(sample.input, *sample.args, **sample.kwargs)


# ---- by polyconv.enable

DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64
"""All that OpInfo lists for these operators on the CPU."""


class Verdict(NamedTuple):
    """Outputs and gradients of all samples of an operator in one dtype."""

    samples: int
    results: int
    ours: int
    """Passes on polyconv's kernels."""
    identical: int
    within: int
    """Results within OpInfo's tolerance of PyTorch's; for these operators on the CPU it is that of the dtype."""
    accurate: int
    """The others, if at least as close to the float64 result as PyTorch's, or within polyconv's tolerance of it, or
    within a unit in the last place of the largest element."""


def results(op: Any, sample: Any, dy: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    """Output and gradients of a sample, and the gradient of the output."""
    y = op(sample.input, *sample.args, **sample.kwargs)
    dy = torch.linspace(-1, 1, y.numel()).to(y.dtype).view_as(y) if dy is None else dy
    leaves = [one for one in (sample.input, *sample.args) if isinstance(one, Tensor) and one.requires_grad]
    return [y.detach(), *(torch.autograd.grad(y, leaves, dy) if leaves else ())], dy


def in_double(one: Any) -> Any:
    if not isinstance(one, Tensor) or not (one.is_floating_point() or one.is_complex()):
        return one
    return one.detach().to(torch.complex128 if one.is_complex() else torch.float64).requires_grad_(one.requires_grad)


def is_close(one: Tensor, other: Tensor) -> bool:
    try:
        torch.testing.assert_close(one, other)
    except AssertionError:
        return False
    return True


def verdict(name: str, dtype: torch.dtype, forced: bool) -> Verdict:
    """Compare all samples, with the planned kernels or with direct summation by polyconv's (``forced``)."""
    op, count = opinfos()[name], Counter[str]()
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", dtype, requires_grad=dtype != torch.int64):
        run = partial(results, op, sample)
        theirs, dy = run()
        exact, _ = results(op, sample.transform(in_double), in_double(dy))
        passes = forced and sample.input.numel() > 0  # an empty input is ATen's
        with (
            polyconv.tolerance(0 if forced else 1e-4),
            enabled_without_aten(run) if passes else polyconv.enable(),
            preferences.watched() as seen,
        ):
            ours, _ = run()
        count["samples"] += 1
        count["ours"] += sum(not one.choice.endswith(aten.NAME) for one in seen)
        for one, other, true in zip(ours, theirs, exact, strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            count["results"] += 1
            count["identical"] += torch.equal(one, other)
            if is_close(one, other):
                count["within"] += 1
                continue
            error, bound = (float((each.to(true.dtype) - true).abs().max()) for each in (one, other))
            relative = max(1e-6 if forced else 1e-4, torch.finfo(dtype).eps)  # or a unit in the last place
            tolerance = relative * float(true.abs().max())
            count["accurate"] += is_close(one, true.to(dtype)) or error <= max(bound, tolerance)
    return Verdict(**{field: count[field] for field in Verdict._fields})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_enabled(name: str, dtype: torch.dtype) -> None:
    for forced in (False, True) if native.is_available() and dtype != torch.int64 else (False,):
        found = verdict(name, dtype, forced)
        assert found.samples >= 10
        assert found.within + found.accurate == found.results, found
        assert not forced or found.ours >= 2.8 * found.samples  # three passes a sample, none if the input is empty


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_gradients_enabled(name: str) -> None:
    op = opinfos()[name]
    for sample in samples(name):
        leaves = [one for one in (sample.input, *sample.args) if isinstance(one, Tensor)]
        others = sample.args[len(leaves) - 1 :]

        def run(*tensors: Tensor, others: Any = others, options: Any = sample.kwargs) -> Tensor:
            return op(*tensors, *others, **options)

        with polyconv.enable():
            assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
def test_errors_enabled(name: str) -> None:
    op = opinfos()[name]
    for error in errors(name):
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex) as theirs:
            op(sample.input, *sample.args, **sample.kwargs)
        with polyconv.enable(), pytest.raises(error.error_type) as ours:
            op(sample.input, *sample.args, **sample.kwargs)
        assert type(ours.value) is type(theirs.value)
        assert str(ours.value) == str(theirs.value)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, polyconv {polyconv.__version__}, {len(NAMES)} operators\n")
    print(f"{'kernels':10}  {'dtype':10}", *(f"{field:>9}" for field in Verdict._fields))
    for kernels, dtypes in {"as planned": DTYPES, "polyconv's": DTYPES[:-1]}.items():
        for dtype in dtypes:
            counts = zip(*(verdict(name, dtype, kernels == "polyconv's") for name in NAMES), strict=True)
            print(f"{kernels:10}  {str(dtype)[6:]:10}", *(f"{sum(each):9}" for each in counts))
