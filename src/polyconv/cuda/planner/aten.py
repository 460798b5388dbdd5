"""PyTorch's convolution on a GPU: the time expected of it, and the choice between it and polyconv's plan.

Layers that :func:`polyconv.replace` or :func:`polyconv.enable` put in the place of PyTorch's must not become slower. So
each pass runs polyconv's plan if that is expected to be ahead by :data:`AHEAD`, and PyTorch's convolution otherwise.
Both times are modelled. PyTorch's is that of its multiplications, at a share of the peak of the format in which it
computes, and of some passes over input and output; the shares are fitted to published times, class by class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from ...numerics.prediction import HALF_ROUNDING, LARGEST_TO_SCALE, Way, with_numeric_tolerance
from ...problem import ELEMENT_BYTES, HALF_DTYPES, IMAGE_CHANNELS, TF32, Pass, Problem
from ...selection import TRIALS, Candidate, Preference, why_not
from ...util import gpu_arch
from .cost import LAUNCH_US, moved_bytes
from .device import CudaDevice, has_tf32
from .plan import ATEN, Autotunable, Plan
from .planner import DEFAULT_WORKSPACE
from .volumes import CudaVolumePlan, planned

AHEAD = 1.3
"""Least expected speed-up for polyconv's plan to run. The cost model agrees with counted times within 15 %, and
published times are up to 25 % below the time that is expected of PyTorch. The errors are independent."""
AHEAD_IN_HALF = 1.9
"""The same for dense layers of half precision in channels_last, and in any layout from sm_80 on. The share of the peak
that is expected of PyTorch is a mean over a network; single layers are said to reach 0.6 to 0.7. polyconv's kernels
were counted, not simulated, and on sm_80 in a few layers only: one strided gradient takes 2.6 times its estimate."""
CAST_EFFICIENCY = 0.7
"""Share of the bandwidth that casts between half precision and float32 reach."""


# ---- the time expected of PyTorch


class Class(NamedTuple):
    """Figures of a class of layers."""

    tensor: float
    """Share of the tensor cores' peak rate; 0 if PyTorch is expected to compute in float32 without them."""
    plain: float
    """Share of the peak rate in float32 where the format, or the class, has no tensor cores."""
    moves: float
    """Passes over input and output on NCHW tensors where tensor cores run or the format has some: they take
    channels_last, so cuDNN converts both. Otherwise one."""


DENSE = "dense"
CLASSES = {
    DENSE: Class(0.42, 0.75, 2.3),
    "3x3": Class(0.47, 1.25, 2.3),
    "1x1": Class(0.47, 0.85, 1.0),
    "few channels": Class(0.0, 0.5, 2.3),
    "grouped": Class(0.0, 0.2, 2.3),
    "3-D": Class(0.0, 0.5, 2.3),
    "strided dilated gradient": Class(0.0, 0.75, 4.5),
    "depthwise": Class(0.0, 1.0, 3.0),
}
"""Fitted to KernelBench's published times of PyTorch 2.5 with TF32 on an H100 (commit 423217d, H100_Modal; ``pytest
tests/planner/test_aten.py`` compares), and to NVIDIA's published training of ResNet-50 (DeepLearningExamples,
pytorch-20.12) on a V100 (356 images/s in float32, 951 in AMP) and an A100 (921 in TF32, 1997 in AMP), less the traffic
of the network's other layers. "plain" of 3x3 is a fast algorithm's. Grouped layers: assumed, the two
published times are far longer."""
MOVES_LAST = 1.2
"""Passes over input and output where nothing is converted."""
HALF = {"3-D": 0.3, "few channels": 0.3, "grouped": 0.1}
"""Share of the tensor cores' peak in half precision, for eight channels or more, where a class has none in TF32:
assumed. NVIDIA's nnU-Net (3-D) trains twice as fast in AMP as in TF32."""
PER_TAP = 0.2
"""Additional passes per tap of PyTorch's own depthwise kernels: 3x3 layers reach 25 % of the bandwidth, 3x7 14 %."""
CUDNN_DEPTHWISE = 1.7
"""Passes of cuDNN's depthwise kernels, for half precision and channels_last: assumed."""


def class_of(problem: Problem) -> str:
    """Class of a layer and pass, a key of :data:`CLASSES`."""
    dense = max(problem.stride) == max(problem.dilation) == 1
    if problem.groups > 1:
        return "depthwise" if problem.depthwise else "grouped"
    if problem.rank == 3:
        return "3-D"
    if min(problem.channels_per_group) <= IMAGE_CHANNELS:
        return "few channels"
    if problem.kind is Pass.DGRAD and max(problem.stride) > 1 and max(problem.dilation) > 1:
        return "strided dilated gradient"
    if max(problem.kernel) == 1:
        return "1x1"
    return "3x3" if dense and problem.kernel == (3, 3) and problem.kind is not Pass.WGRAD else DENSE


def expected_us(problem: Problem, device: CudaDevice) -> float:
    """Time expected of PyTorch for a pass in the problem's :attr:`~polyconv.problem.Problem.torch_format`."""
    scale = ELEMENT_BYTES.get(problem.torch_format, 4) / problem.element_bytes
    us_per_pass = scale * moved_bytes(problem) / (device.dram_gbs * 1e3)
    others = problem.element_bytes * prod(problem.w_shape)
    if not problem.has_aten_padding:  # a padded copy
        others += 2 * problem.element_bytes * prod(problem.x_shape)
    products = problem.multiplications / (device.sms * device.clock_mhz)
    least = min(products / rate + moves * us_per_pass for rate, moves in _paths(problem, device))
    return least + scale * others / (device.dram_gbs * 1e3) + LAUNCH_US


def _paths(problem: Problem, device: CudaDevice) -> Iterator[tuple[float, float]]:
    """Kernels that PyTorch may choose: multiply-adds per clock and multiprocessor, and passes over the tensors."""
    kind, last, half = class_of(problem), _is_channels_last(problem), problem.torch_format in HALF_DTYPES
    form, tensor_rate = CLASSES[kind], _tensor_rate(problem.torch_format, device)
    if kind == "depthwise":
        moves = CUDNN_DEPTHWISE if half or last else form.moves + PER_TAP * prod(problem.kernel)
        yield form.plain * device.fp32_per_clock, moves
        return
    share = HALF.get(kind, form.tensor) if half else form.tensor
    if kind in HALF:
        share *= min(1.0, min(problem.channels_per_group) / 8)
    converted = MOVES_LAST if last else form.moves
    if share and tensor_rate:
        yield share * tensor_rate, min(form.moves, converted)
    if not half or not tensor_rate:
        yield form.plain * device.fp32_per_clock, converted if tensor_rate and not form.tensor else 1.0


def _tensor_rate(form: str, device: CudaDevice) -> float:
    """Multiply-adds of the tensor cores per clock and multiprocessor; 0 if PyTorch uses none for the format."""
    if form in HALF_DTYPES:
        rate = gpu_arch.half_per_clock(device.arch, device.name, form)
        return rate if rate > device.fp32_per_clock else 0
    return gpu_arch.per_clock(device.arch, device.name) if form == TF32 else 0


def format_on(device: CudaDevice, form: str) -> str:
    """Name of the format that PyTorch uses for a problem's format: float32 where the GPU has no TF32."""
    return "float32" if form == TF32 and not gpu_arch.per_clock(device.arch, device.name) else form


# ---- the choice


@dataclass(frozen=True, slots=True)
class AtenPlan(Autotunable):
    """Plan of a pass that PyTorch's convolution runs."""

    problem: Problem
    device: str
    cost_us: float
    """Expected, not modelled from counts as the costs of kernels are."""
    candidates: tuple[Candidate, ...]
    preference: str
    """Where the choice came from: a preference, or the comparison with polyconv's plan."""

    @property
    def choice(self) -> str:
        return ATEN

    @property
    def name(self) -> str:
        return ATEN

    @property
    def cost(self) -> float:
        return self.cost_us

    @property
    def predicted_error(self) -> float:
        return _error(self.problem)

    @property
    def ways(self) -> tuple[Way, ...]:
        return ()

    @property
    def keeps_weights(self) -> bool:
        return False

    @property
    def passthrough(self) -> bool:
        return self.problem.has_aten_padding

    def trials(self, most: int = TRIALS) -> tuple[str, ...]:
        """Names of candidates worth timing, this one first."""
        return (ATEN, *(name for name in Autotunable.trials(self, most) if name != ATEN))

    def with_parts(self, plan: Callable[[Problem], object]) -> AtenPlan:
        return self

    def explain(self, *, verbose: bool = False) -> str:
        """The plan as text: both estimates, and why polyconv's plans do not run."""
        runs = f"runs PyTorch's convolution on {self.device}, in {self.problem.torch_format}"
        lines = [str(self.problem), f"  {runs}", f"  {self.preference}"]
        return "\n".join([*lines, *why_not(self.candidates, verbose=verbose)])


def chosen(
    problem: Problem, device: CudaDevice, workspace: int = DEFAULT_WORKSPACE, prefer: Preference | None = None
) -> Plan | CudaVolumePlan | AtenPlan:
    """Plan a problem. If PyTorch's convolution may run, it is a candidate, and a preference of any decides."""
    problem = with_numeric_tolerance(problem, has_tf32(device))
    if not problem.torch_format:
        return planned(problem, device, workspace, prefer)
    problem = replace(problem, torch_format=format_on(device, problem.torch_format))
    of_ours = None if prefer is None or prefer.name == ATEN else prefer
    ours = planned(replace(problem, torch_format=""), device, workspace, of_ours)
    mine, theirs = own_us(ours, problem, device), expected_us(problem, device)
    both = (
        f"modelled {mine:.0f} us, and {theirs:.0f} expected of PyTorch in {problem.torch_format} "
        f"({class_of(problem)} layer)"
    )
    if unable := why_not_aten(problem, device):
        aten = Candidate(ATEN, rejected=unable)
        return replace(ours, candidates=(*ours.candidates, aten), preference=ours.preference or unable)
    if prefer is not None and prefer.name in (ours.choice, ATEN):
        leave, why = prefer.name == ATEN, prefer.source
    else:
        ahead = margin(problem, device)
        leave = mine * ahead > theirs
        why = f"polyconv's {ours.name} is {'not ' if leave else ''}ahead by {ahead:.1f}: {both}"
    offers = () if _is_widened(problem) else ours.candidates  # trials would see the copies in float32
    aten = Candidate(ATEN, theirs, _error(problem))
    if leave:
        rejected = (replace(one, rejected=one.rejected or "not ahead of PyTorch's convolution") for one in offers)
        return AtenPlan(problem, device.name, theirs, (*rejected, aten), why)
    rest = (*ours.candidates, replace(aten, rejected=both)) if offers else ours.candidates
    return replace(ours, candidates=rest, preference=ours.preference or why)


def margin(problem: Problem, device: CudaDevice) -> float:
    """Least expected speed-up for polyconv's plan to run."""
    on_tensor_cores = problem.torch_format in HALF_DTYPES and CLASSES[class_of(problem)].tensor > 0
    return AHEAD_IN_HALF if on_tensor_cores and (has_tf32(device) or _is_channels_last(problem)) else AHEAD


def why_not_aten(problem: Problem, device: CudaDevice) -> str | None:
    """Why PyTorch's convolution is no candidate: where it may fail, or would run on copies. None if it is one."""
    if max(map(prod, (problem.x_shape[1:], problem.w_shape, problem.y_shape[1:]))) >= 2**31:  # it splits batches
        return "PyTorch's kernels may count elements in 32 bits"
    if problem.torch_format == "bfloat16" and gpu_arch.capability(device.arch) < 80:
        return f"cuDNN may have no kernel for bfloat16 on {device.name}"
    if _is_widened(problem) and not problem.has_aten_padding:
        return "PyTorch's convolution would need a padded copy of the copies in float32"
    return None


def own_us(plan: Plan | CudaVolumePlan, problem: Problem, device: CudaDevice) -> float:
    """Modelled time of polyconv's plan, with casts."""
    if not _is_widened(problem):
        return plan.cost_us
    read_and_written = 1.5 * (moved_bytes(problem) + problem.element_bytes * prod(problem.w_shape))
    return plan.cost_us + read_and_written / (CAST_EFFICIENCY * device.dram_gbs * 1e3) + 3 * LAUNCH_US


def _is_channels_last(problem: Problem) -> bool:
    return problem.x_strides[1] == 1 and problem.in_channels > 1


def _is_widened(problem: Problem) -> bool:
    """Whether the problem is one of half precision on float32 copies (:mod:`polyconv.lowering.widen`)."""
    return problem.torch_format in HALF_DTYPES and problem.dtype not in HALF_DTYPES


def _error(problem: Problem) -> float:
    """Error expected of PyTorch: that of rounding to its format."""
    return LARGEST_TO_SCALE * {TF32: 2.0**-11, **HALF_ROUNDING}.get(problem.torch_format, 0.0)
