"""Convolutions of every kind against float64: results and their errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import polyconv
from fuzz import oracle
from fuzz.case import Case, Failure
from fuzz.tensors import BEYOND, PAST_FLOAT16, PATTERNED, POISON, Operand, Shape, draw, sources
from polyconv.arguments import Geometry, normalise
from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu import native
from polyconv.cpu.engines import aten
from polyconv.cpu.engines.in_torch import fourier, frames, patches
from polyconv.cpu.planner import CpuPlan
from polyconv.problem import Pass

ABOUT = "any convolution, pass, epilogue, data and memory layout, by every candidate: against float64"

Results = dict[str, Tensor]

HALVES = ("float16", "bfloat16")
IN_TORCH = (aten.NAME, fourier.NAME, frames.NAME, patches.NAME)
"""Engines in PyTorch's operators, whose bits may depend on the number of threads."""

REWRITES: dict[str, str] = {
    "doubled": "w.data.mul_(2)",
    "negated": "w.data.neg_()",
    "one channel negated": "w.data[-1].neg_()",
    "negated by numpy": "w.numpy()[:, -1] *= -1",
    "taps turned": "w.data.copy_(w.data.flip(-1).clone())",
    "replaced": "w.data = w.data.clone() + 1",
    "one number": "w.data.view(-1)[-1:].add_(1) if w.is_contiguous() else w.data[-1, -1, -1, -1:].add_(1)",
}
"""Writes to a weight that torch's version counter does not see."""


@dataclass(frozen=True)
class Convolution(Case):
    """One convolution with its options, and the candidate that computes it."""

    batch: int | None
    channels: tuple[int, int]
    """Input and output channels, per group."""
    size: tuple[int, int]
    kernel: tuple[int, int]
    x: Operand
    w: Operand
    dy: Operand
    bias: Operand | None = None
    residual: Operand | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    padding_mode: str = "zeros"
    activation: str | None = None
    tolerance: float | None = None
    dtype: str = "float32"
    instruction_set: str = "best"
    threads: int = 1
    mode: str = "no_grad"
    backward: bool = False
    twice: bool = False
    """Second derivatives, too."""
    forward_mode: bool = False
    again: bool = False
    """Repeated, also with another number of threads: the same bits."""
    rewritten: str | None = None
    """How the weight is changed between two calls."""
    trial: int | None = None
    """Index of the candidate that runs; None: the planner's choice."""
    limit = 120.0

    # ---- shapes

    @property
    def geometry(self) -> Geometry:
        return normalise(self.kernel, self.stride, self.padding, self.dilation, self.groups, self.padding_mode)

    @property
    def x_shape(self) -> Shape:
        batch = () if self.batch is None else (self.batch,)
        return (*batch, self.groups * self.channels[0], *self.size)

    @property
    def w_shape(self) -> Shape:
        return (self.groups * self.channels[1], self.channels[0], *self.kernel)

    @property
    def y_shape(self) -> Shape:
        batch = () if self.batch is None else (self.batch,)
        return (*batch, self.w_shape[0], *self.geometry.out_size(self.size, self.kernel))

    @property
    def is_valid(self) -> bool:
        """True if torch takes it, as far as it supports such arguments."""
        if self.padding == "same" and self.stride not in (1, (1, 1)):
            return False
        geometry, out = self.geometry, self.y_shape[-2:]
        if min(out) < 1 or min(self.size) < 1 or max(prod(self.y_shape), prod(out)) > 2**18:
            return False
        for size, before, after in zip(self.size, geometry.padding[::2], geometry.padding[1::2], strict=True):
            left = size + min(before, 0) + min(after, 0)
            widest = {"reflect": left - 1, "circular": left}.get(self.padding_mode, max(before, after))
            if left < 1 or max(before, after) > widest:
                return False
        work = prod(self.y_shape) * self.channels[0] * prod(self.kernel)
        return work <= 4_000_000

    @property
    def is_stretched(self) -> bool:
        return max(*self.geometry.stride, *self.geometry.dilation) > 8

    @property
    def _products(self) -> dict[Pass, int]:
        """Summed products per element of each result."""
        batch, taps = (1 if self.batch is None else self.batch), prod(self.kernel)
        return {
            Pass.FPROP: self.channels[0] * taps,
            Pass.DGRAD: self.channels[1] * taps,
            Pass.WGRAD: batch * prod(self.y_shape[-2:]),
        }

    @property
    def operands(self) -> list[tuple[str, Operand, Shape]]:
        found = [("x", self.x, self.x_shape), ("w", self.w, self.w_shape), ("dy", self.dy, self.y_shape)]
        if self.bias is not None:
            found.append(("bias", self.bias, self.w_shape[:1]))
        if self.residual is not None:
            found.append(("residual", self.residual, self.y_shape))
        return found

    # ---- computation

    def run(self) -> None:
        tensors = {name: operand.make(shape, getattr(torch, self.dtype)) for name, operand, shape in self.operands}
        before = {name: _memory(tensor) for name, tensor in tensors.items()}
        use_instruction_set(self.instruction_set)
        with polyconv.allow_low_precision() if self.dtype in HALVES else nullcontext():
            self._check(tensors)
        for name, tensor in tensors.items():
            if not self.rewritten and not _same(before[name], _memory(tensor)):
                raise Failure(f"{name} was changed by the call")

    def _check(self, tensors: dict[str, Tensor]) -> None:
        with preferences.watched() as seen:
            self._compute(tensors)
        backend: Any = backend_for(torch.device("cpu"))
        forced = {}
        if self.trial is not None:
            for decision in seen:
                names = candidate_names(backend, decision.problem, inference=decision.inference)
                if self.is_stretched:  # the slowest candidates may take minutes there, and are never chosen
                    names = names[:4]
                forced[decision.key] = names[self.trial % len(names)]
        with preferences.Forced(forced):
            plans = [preferences.plan(backend, decision.problem, inference=decision.inference) for decision in seen]
            if prod(self.y_shape) > 0:
                torch.full(self.y_shape, float("nan"), dtype=tensors["x"].dtype)  # where the output may be placed
            # Not recorded, as for users: a passthrough uses PyTorch's derivatives, whose second ones sum in another
            # order.
            results = self._compute(tensors)
            self._compare(tensors, results, plans)
            if self.again:
                ran = {decision.key: plan.choice for decision, plan in zip(seen, plans, strict=True)}
                self._check_bits(tensors, results, plans, ran)
            if self.rewritten is not None:
                w = tensors["w"]
                exec(REWRITES[self.rewritten], {"w": w})
                self._compare(tensors, self._compute(tensors), plans, f"after the weight was {self.rewritten}: ")

    def _compute(self, tensors: dict[str, Tensor]) -> Results:
        torch.set_num_threads(self.threads)
        x, w, bias, residual = (tensors.get(name) for name in ("x", "w", "bias", "residual"))
        assert x is not None
        assert w is not None
        context: AbstractContextManager[Any] = {
            "grad": torch.enable_grad,
            "no_grad": torch.no_grad,
            "inference_mode": torch.inference_mode,
        }[self.mode]()
        with context:
            if self.forward_mode:
                tangents = {name: _direction(t, number) for number, (name, t) in enumerate(tensors.items())}
                given = [(name, t) for name, t in (("x", x), ("w", w), ("bias", bias)) if t is not None]
                jvp: Any = torch.func.jvp
                y, tangent = jvp(
                    lambda *primals: self._call(*primals),
                    tuple(t for _, t in given),
                    tuple(tangents[name] for name, _ in given),
                )
                return {"y": y, "tangent": tangent}
            if not self.backward:
                return {"y": self._call(x, w, bias, residual)}
            # Detached, so that they are leaves, at the same address and with the same strides.
            leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
            y = self._call(leaves["x"], leaves["w"], leaves.get("bias"), leaves.get("residual"))
            names = [name for name in leaves if name != "dy"]
            grads = torch.autograd.grad(y, [leaves[n] for n in names], leaves["dy"], create_graph=self.twice)
            results = {"y": y, **{f"d{name}": grad for name, grad in zip(names, grads, strict=True)}}
            if self.twice:
                v, u = _direction(x, 0), _direction(w, 1)
                total = (results["dx"] * v).sum() + (results["dw"] * u).sum()
                again = torch.autograd.grad(total, [leaves[name] for name in ("x", "w", "dy")])
                results |= {f"d2{name}": grad for name, grad in zip(("x", "w", "dy"), again, strict=True)}
            return {name: t.detach() for name, t in results.items()}

    def _call(self, x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        return polyconv.conv2d(
            x,
            w,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            padding_mode=self.padding_mode,
            tolerance=self.tolerance,
            activation=self.activation,
            residual=residual,
        )

    # ---- checks

    def _compare(self, tensors: dict[str, Tensor], results: Results, plans: list[CpuPlan], when: str = "") -> None:
        torch.set_num_threads(1)
        exact = {name: t.double() for name, t in tensors.items()}
        if self.batch is None:
            exact |= {n: exact[n].unsqueeze(0) for n in ("x", "dy", "residual") if n in exact}
            images = ("y", "dx", "dresidual", "tangent", "d2x", "d2dy")
            results = {n: t.unsqueeze(0) if n in images else t for n, t in results.items()}
        if self.x.is_any_of(POISON) or self.w.is_any_of(POISON):
            self._check_spread(exact, results["y"], plans)
            return
        x, w, dy = exact["x"], exact["w"], exact["dy"]
        bias = exact["bias"].reshape(1, -1, 1, 1) if "bias" in exact else torch.zeros(())
        residual = exact.get("residual", torch.zeros(()))
        sums, largest = oracle.exact(x, w, self.geometry), oracle.exact(x.abs(), w.abs(), self.geometry)
        z = sums + bias + residual
        y = {"relu": torch.relu, "silu": F.silu}.get(self.activation or "", lambda t: t)(z)
        rounding = 2.0**-53 if self.dtype == "float64" else 2.0**-24
        fprop = _worst(plans, Pass.FPROP)
        # A direct sum may start with the bias: then every addition rounds to the bias's precision.
        additions = 8 + (self._products[Pass.FPROP] if fprop is None or fprop.chosen.direct else 0)
        apart = rounding * (8 * z.abs() + additions * (bias.abs() + residual.abs()))
        if self.dtype in HALVES and (fprop is None or fprop.chosen.engine == aten.NAME):
            # PyTorch's kernels may add the bias to a rounded sum.
            apart = apart + torch.finfo(getattr(torch, self.dtype)).eps * sums.abs()
        allowed = 1.1 * self._promised(fprop, x, w, sums, largest) + apart
        self._hold("y", results["y"], y, allowed, fprop, when)
        if self.forward_mode:
            v, u = _direction(x, 0).to(tensors["x"].dtype).double(), _direction(w, 1).to(tensors["w"].dtype).double()
            v, u = v.reshape(x.shape), u.reshape(w.shape)
            expected = oracle.exact(v, w, self.geometry) + oracle.exact(x, u, self.geometry)
            one = self._promised(fprop, v, w, expected, oracle.exact(v.abs(), w.abs(), self.geometry))
            two = self._promised(fprop, x, u, expected, oracle.exact(x.abs(), u.abs(), self.geometry))
            if "bias" in exact:
                number = list(tensors).index("bias")
                expected = expected + _direction(tensors["bias"], number).double().reshape(1, -1, 1, 1)
            slack = 8 * rounding * expected.abs()
            self._hold("tangent", results["tangent"], expected, one + two + slack, fprop, when)
        if not self.backward:
            return
        dz, slope = dy, torch.zeros_like(dy)
        if self.activation == "relu":
            dz = dy * (results["y"] > 0)  # if the sums are nearly zero either answer is correct
        elif self.activation == "silu":
            sigmoid = torch.sigmoid(z)
            dz = dy * sigmoid * (1 + z * (1 - sigmoid))
            # The second derivative is 0.5 at most; below the smallest exponent errors are absolute.
            slope = dy.abs() * (0.5 * allowed + 32 * rounding) + 4 * oracle.SMALLEST
        found = _passes(x, w, dz, self.geometry)
        size = _passes(x.abs(), w.abs(), dz.abs(), self.geometry)
        spread = _passes(x.abs(), w.abs(), slope, self.geometry)
        dgrad, wgrad = _worst(plans, Pass.DGRAD), _worst(plans, Pass.WGRAD)
        may = self._promised(dgrad, dz, w, found["dx"], size["dx"]) + spread["dx"]
        if self.dtype in HALVES and dgrad is not None and dgrad.folded and dgrad.chosen.engine == aten.NAME:
            # PyTorch rounds the gradient of the padded image, and each sum of its border.
            may = may + torch.finfo(getattr(torch, self.dtype)).eps * size["dx"]
        self._hold("dx", results["dx"], found["dx"], may, dgrad, when)
        may = self._promised(wgrad, x, dz, found["dw"], size["dw"]) + spread["dw"]
        self._hold("dw", results["dw"], found["dw"], may, wgrad, when)
        if "dbias" in results:
            count = dz.shape[0] * prod(dz.shape[2:])
            may = (count + 2) * rounding * dz.abs().sum((0, 2, 3)) + slope.sum((0, 2, 3))
            if self.dtype == "bfloat16" and wgrad is not None and wgrad.chosen.engine == aten.NAME:
                may = may + count * torch.finfo(torch.bfloat16).tiny  # AMX reads denormal numbers as zero
            self._hold("dbias", results["dbias"], dz.sum((0, 2, 3)), may, wgrad, when)
        if "dresidual" in results:
            self._hold("dresidual", results["dresidual"], dz, slope + 8 * rounding * dz.abs(), None, when)
        if self.twice:
            v, u = _direction(tensors["x"], 0).double().reshape(x.shape), _direction(tensors["w"], 1).double()
            back = _passes(v, u, dy, self.geometry)
            backs = _passes(v.abs(), u.abs(), dy.abs(), self.geometry)
            may = self._promised(dgrad, dy, u, back["dx"], backs["dx"])
            self._hold("d2x", results["d2x"], back["dx"], may, dgrad, when)
            may = self._promised(wgrad, v, dy, back["dw"], backs["dw"])
            self._hold("d2w", results["d2w"], back["dw"], may, wgrad, when)
            forth, other = oracle.exact(v, w, self.geometry), oracle.exact(x, u, self.geometry)
            may = self._promised(fprop, v, w, forth, oracle.exact(v.abs(), w.abs(), self.geometry))
            may = may + self._promised(fprop, x, u, other, oracle.exact(x.abs(), u.abs(), self.geometry))
            may = may + 8 * rounding * (forth.abs() + other.abs())
            self._hold("d2dy", results["d2dy"], forth + other, may, fprop, when)

    def _promised(self, plan: CpuPlan | None, one: Tensor, other: Tensor, expected: Tensor, size: Tensor) -> Tensor:
        if plan is None:  # the sum was empty
            return 2.0**-20 * size + 1e-37
        reduction = max(1, self._products[plan.problem.kind])
        return oracle.FrozenMark(plan, one, other, reduction, self._is_patterned).allowed(expected, size)

    def _hold(
        self, name: str, found: Tensor, expected: Tensor, allowed: Tensor, plan: CpuPlan | None, when: str
    ) -> None:
        who = "nobody" if plan is None else f"{plan.name}, {native.instruction_set()}"
        if found.shape != expected.shape:
            raise Failure(f"{when}{name} has another shape\n{list(found.shape)}, not {list(expected.shape)}, by {who}")
        if not found.numel():
            return
        if found.dtype in (torch.float16, torch.bfloat16):  # sums in float32, rounded once
            kind = torch.finfo(found.dtype)
            allowed = allowed + 0.51 * kind.eps * expected.abs() + kind.tiny * kind.eps
        off = (found.double() - expected).abs()
        if not bool(torch.isfinite(found).all()) and bool(torch.isfinite(expected).all()):
            raise Failure(f"{when}{name} is not finite, by {_engine(plan)}\nby {who}")
        excess = off - allowed
        if bool((excess > 0).any()):
            at = int(excess.argmax())
            error, may = float(off.flatten()[at]), float(allowed.expand_as(off).flatten()[at])
            raise Failure(
                f"{when}{name} strays more than {self._kind_of_promise(plan)}, by {_engine(plan)}\n"
                f"by {who}: {error:.3e} where {may:.3e} is allowed ({error / may if may else float('inf'):.2f} times), "
                f"predicted {0.0 if plan is None else plan.predicted_error:.2e} of the scale"
            )

    @property
    def _is_patterned(self) -> bool:
        return any(operand.is_any_of((*PATTERNED, *BEYOND)) for _, operand, _ in self.operands)

    def _kind_of_promise(self, plan: CpuPlan | None) -> str:
        if self._is_patterned:
            return "the bound"
        aliased = any(operand.aliased for _, operand, _ in self.operands)
        folded = plan is not None and plan.folded
        return "predicted" + (" of aliased memory" if aliased else "") + (" of a folded border" if folded else "")

    def _check_spread(self, exact: dict[str, Tensor], y: Tensor, plans: list[CpuPlan]) -> None:
        """One NaN or infinity: it must appear, and not beyond its tile (in the weight: not in other channels)."""
        plan = _worst(plans, Pass.FPROP)
        x, w = exact["x"], exact["w"]
        bad_x, bad_w = ~torch.isfinite(x), ~torch.isfinite(w)
        reach = oracle.tile_reach(plan, self.geometry, self.kernel)
        spoilt = oracle.reached(bad_x, self.geometry, w.shape, reach) if bad_x.any() else torch.zeros_like(y).bool()
        if bad_w.any():
            spoilt = spoilt | bad_w.flatten(1).any(1).reshape(1, -1, 1, 1)
        beyond = ~torch.isfinite(y) & ~spoilt
        if bool(beyond.any()):
            raise Failure(f"a NaN or infinity spreads beyond its tile, by {_engine(plan)}\nby {plan and plan.name}")
        if bad_x.any() and not bad_w.any() and self.activation is None:
            seen = ~torch.isfinite(oracle.exact(x, w, self.geometry))
            if bool((seen & torch.isfinite(y)).any()):
                raise Failure(f"a NaN or infinity is lost, by {_engine(plan)}\nby {plan and plan.name}")

    def _check_bits(
        self, tensors: dict[str, Tensor], results: Results, plans: list[CpuPlan], ran: dict[str, str]
    ) -> None:
        """Always deterministic; and polyconv's kernels give the same bits with any number of threads.

        The plan may depend on the threads, so ``ran`` is requested; and whether the weight is cached, and so known to
        miss the tolerance in a fast algorithm.
        """
        own = all(plan.chosen.engine not in IN_TORCH and _suits(plan, tensors["w"]) for plan in plans)
        for threads in (self.threads, *((self.threads % 4 + 1,) if own else ())):
            with preferences.Forced(ran) if threads != self.threads else nullcontext():
                again = replace(self, threads=threads)._compute(tensors)
            for name, found in again.items():
                if not _same(found, results[name]):
                    what = "a second call" if threads == self.threads else "another number of threads"
                    raise Failure(f"{what} gives other bits of {name}, by {_engine(_worst(plans, None))}")

    # ---- reports

    def smaller(self) -> Iterator[Case]:
        for candidate in itertools.chain(self._plainer(), self._tinier()):
            if candidate != self and candidate.is_valid:
                yield candidate

    def _plainer(self) -> Iterator[Convolution]:
        plain: dict[str, Any] = {
            "twice": False,
            "again": False,
            "rewritten": None,
            "forward_mode": False,
            "residual": None,
            "activation": None,
            "bias": None,
            "padding_mode": "zeros",
            "tolerance": None,
            "threads": 1,
            "instruction_set": "best",
            "trial": None,
            "groups": 1,
            "stride": 1,
            "dilation": 1,
            "padding": 0,
        }
        if self.backward and not self.twice:
            yield replace(self, backward=False, mode="no_grad")
        for name, value in plain.items():
            if getattr(self, name) != value:
                yield replace(self, **{name: value})
        for name in ("x", "w", "dy", "bias", "residual"):
            operand = getattr(self, name)
            if operand is not None:
                for simpler in operand.simpler():
                    yield replace(self, **{name: simpler})

    def _tinier(self) -> Iterator[Convolution]:
        if self.batch is None or self.batch > 1:
            yield replace(self, batch=1)
        for name in ("channels", "size", "kernel"):
            for axis in (0, 1):
                now = getattr(self, name)[axis]
                for less in sorted({1, now // 2, now - 1}):
                    if 0 < less < now:
                        pair: list[Any] = [*getattr(self, name)]
                        pair[axis] = less
                        changed: dict[str, Any] = {name: tuple(pair)}
                        yield replace(self, **changed)
        if self.groups > 2:
            yield replace(self, groups=self.groups // 2)

    def script(self) -> str:
        lines = [
            "import torch",
            "",
            "import polyconv",
            "from polyconv.autotune import preferences",
        ]
        lines += [
            "from polyconv.backend import backend_for, candidate_names",
            "from polyconv.cpu import native",
            "",
            "",
        ]
        used = [(name, operand, shape) for name, operand, shape in self.operands if name != "dy" or self.backward]
        lines += [sources(operand for _, operand, _ in used), "", f"native.instruction_set({self.instruction_set!r})"]
        lines += [f"torch.set_num_threads({self.threads})"]
        lines += [f"{name} = {operand.source(shape, self.dtype)}" for name, operand, shape in used]
        options = [f"stride={self.stride}", f"padding={self.padding!r}", f"dilation={self.dilation}"]
        options += [f"groups={self.groups}", f"padding_mode={self.padding_mode!r}", f"tolerance={self.tolerance}"]
        options += [f"activation={self.activation!r}"] if self.activation else []
        options += ["residual=residual"] if self.residual else []
        bias = "bias" if self.bias else "None"
        lines += ["", "", "def run():", f"    with torch.{_MODES[self.mode]}():"]
        if self.backward:
            inner = ", ".join(name for name, _, _ in used if name != "dy")
            lines += [f"        for t in ({inner},):", "            t.requires_grad_()"]
        call = f"polyconv.conv2d(x, w, {bias}, {', '.join(options)})"
        if self.forward_mode:
            call = f"torch.func.jvp(lambda x, w: {call}, (x, w), (torch.ones_like(x), torch.ones_like(w)))"
        lines += [f"        y = {call}"]
        if self.backward:
            lines += [f"        return y, torch.autograd.grad(y, ({inner},), dy, create_graph={self.twice})"]
        else:
            lines += ["        return y"]
        lines += ["", "", "with preferences.watched() as seen:", "    result = run()"]
        if self.trial is not None:
            lines += [
                "forced = {}",
                "for d in seen:  # let another candidate run",
                '    names = candidate_names(backend_for(torch.device("cpu")), d.problem, inference=d.inference)',
                f"    names = names[:4] if {self.is_stretched} else names",
                f"    forced[d.key] = names[{self.trial} % len(names)]",
                "print(forced)",
                "with preferences.Forced(forced):",
                "    result = run()",
            ]
        else:
            lines += ["print([(d.key, d.choice) for d in seen])"]
        if self.rewritten is not None:
            lines += [REWRITES[self.rewritten], "result = run()"]
        lines += ["print(result)", f"# the case: {self}", ""]
        return "\n".join(lines)


_MODES = {"grad": "enable_grad", "no_grad": "no_grad", "inference_mode": "inference_mode"}


def use_instruction_set(name: str) -> None:
    """The requested instruction set, or the best that the processor has."""
    try:
        native.instruction_set(name)
    except RuntimeError:
        native.instruction_set("best")


def _passes(x: Tensor, w: Tensor, dy: Tensor, geometry: Geometry) -> Results:
    """Both gradients, in float64."""
    with torch.enable_grad():
        x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
        y = oracle.exact(x, w, geometry)
        if not y.requires_grad:  # no tap overlaps the image
            return {"dx": torch.zeros_like(x), "dw": torch.zeros_like(w)}
        dx, dw = torch.autograd.grad(y, (x, w), dy.detach(), allow_unused=True)
    return {
        "dx": torch.zeros_like(x).detach() if dx is None else dx,
        "dw": torch.zeros_like(w).detach() if dw is None else dw,
    }


def _direction(like: Tensor, number: int) -> Tensor:
    """A tensor to differentiate along: the same for each shape."""
    g = torch.Generator().manual_seed(like.numel() + number)
    return torch.randn(like.shape, generator=g).to(like.dtype)


def _worst(plans: list[CpuPlan], kind: Pass | None) -> CpuPlan | None:
    """Of the plans of a pass, the one with the largest predicted error."""
    able = [plan for plan in plans if kind is None or plan.problem.kind is kind]
    return max(able, key=lambda plan: (not plan.chosen.direct, plan.predicted_error), default=None)


def _suits(plan: CpuPlan, w: Tensor) -> bool:
    """True if the plan keeps its tolerance for this weight."""
    return plan.problem.kind is not Pass.FPROP or w.shape != plan.problem.w_shape or plan.for_weights(w) is plan


def _engine(plan: CpuPlan | None) -> str:
    return "nobody" if plan is None else plan.chosen.engine


def _memory(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


# ---- the sequence


def case(seed: int, index: int) -> Convolution:
    """A convolution that torch would take, computed within milliseconds."""
    random = Random(f"convolutions {seed} {index}")
    for _ in range(1000):
        found = _drawn(random)
        if found.is_valid:
            return found
    raise AssertionError("no valid convolution in a thousand")


def _drawn(random: Random) -> Convolution:
    shape = random.choice([_ordinary, _ordinary, _ordinary, _depthwise, _stretched, _wide])(random)
    extra: dict[str, Any] = {}
    extra["dtype"] = random.choices(["float32", "float64", "float16", "bfloat16"], [20, 2, 1.5, 1.5])[0]
    half = extra["dtype"] in HALVES
    extra["mode"] = random.choice(["grad", "no_grad", "inference_mode"])
    if extra["mode"] == "grad":
        what = random.choice(["nothing", "backward", "backward", "backward", *([] if half else ["twice", "forward"])])
        extra |= {
            "backward": what in ("backward", "twice"),
            "twice": what == "twice",
            "forward_mode": what == "forward",
        }
    plain = extra.get("twice") or extra.get("forward_mode")
    if not plain and not half and random.random() < 0.25:
        extra["activation"] = random.choice([None, "relu", "silu"])
        extra["residual"] = random.choice([None, draw(random)])
    extra["bias"] = random.choice([None, draw(random)])
    extra["tolerance"] = random.choice([None, None, None, 0, 1e-6, 1e-2])
    extra["instruction_set"] = random.choice(["best", "avx512", "avx2", "sse4"])
    extra["threads"] = random.choice([1, 1, 1, 1, 1, 1, 1, 2, 3, 4])
    extra["again"] = random.random() < 0.15
    extra["trial"] = random.choice([None, random.randrange(30), random.randrange(30)])
    w, poisoned = draw(random, poison=not half), not half
    writable = not w.aliased and shape["channels"][0] > 0
    if writable and not extra.get("backward") and not plain and not half and random.random() < 0.2:
        extra["rewritten"] = random.choice([*REWRITES])
        w, poisoned = replace(w, fill="normal"), False
        extra |= {"mode": "no_grad", "again": False}
    if plain:
        w, poisoned = replace(w, fill="normal"), False
    x = draw(random, poison=poisoned)
    if extra.get("forward_mode"):  # torch gives tangents the layout of their tensors: each element needs its own place
        extra["bias"] = extra["bias"] and replace(extra["bias"], place="contiguous")
        x, w = (replace(operand, place="sliced" if operand.aliased else operand.place) for operand in (x, w))
    if half and (shape["channels"][0] == 0 or max(*_both(shape["stride"]), *_both(shape["dilation"])) > 100):
        extra["dtype"] = "float32"  # torch is the reference of half precision: it pads a copy, drops an empty sum
    if extra["dtype"] == "float16":  # zeros of a border times infinity: torch's result depends on who pads
        x, w = (replace(operand, fill="normal") if operand.is_any_of(PAST_FLOAT16) else operand for operand in (x, w))
    return Convolution(x=x, w=w, dy=draw(random), **shape, **extra)


def _both(extent: int | tuple[int, int]) -> tuple[int, int]:
    return (extent, extent) if isinstance(extent, int) else extent


def _pair(random: Random, draw_one: Callable[[], int]) -> tuple[int, int]:
    return draw_one(), draw_one()


def _padding(random: Random, most: int) -> Any:
    form = random.choice(["none", "one", "pair", "sides", "sides", "same", "valid"])
    if form == "sides":
        return tuple(random.randint(-2, most) for _ in range(4))
    if form == "pair":
        return _pair(random, lambda: random.randint(0, most))
    return {"none": 0, "one": random.randint(0, most)}.get(form, form)


def _ordinary(random: Random) -> dict[str, Any]:
    """Typical layers of networks, reduced."""
    channels = _pair(random, lambda: random.choice([1, 2, 3, 3, 4, 5, 8, 12, 16, 17, 33]))
    kernel = _pair(random, lambda: random.choice([1, 2, 3, 3, 3, 4, 5, 5, 7, 9]))
    return {
        "batch": random.choice([None, 0, 1, 1, 1, 2, 2, 3, 4, 9]),
        "channels": channels if random.random() < 0.98 else (0, channels[1]),
        "size": _pair(random, lambda: random.randint(1, 24)),
        "kernel": random.choice([kernel, (kernel[0], kernel[0])]),
        "stride": random.choice([1, 1, 1, 2, (1, 2), (3, 1), (4, 5)]),
        "dilation": random.choice([1, 1, 1, 2, (1, 2), (3, 2), (2, 5)]),
        "padding": _padding(random, 5),
        "groups": random.choice([1, 1, 1, 2, 3]),
        "padding_mode": random.choice(["zeros", "zeros", "zeros", "reflect", "replicate", "circular"]),
    }


def _depthwise(random: Random) -> dict[str, Any]:
    multiplier = random.choice([1, 1, 1, 2, 3])
    return {**_ordinary(random), "channels": (1, multiplier), "groups": random.choice([1, 2, 5, 8, 16, 19, 32])}


def _wide(random: Random) -> dict[str, Any]:
    """One row, one column, or a kernel as large as the image."""
    shape = _ordinary(random)
    long = random.choice([40, 100, 257])
    size = random.choice([(1, long), (long, 1), (random.randint(1, 9), random.randint(1, 9))])
    kernel = random.choice([(1, min(size[1], 9)), (min(size[0], 9), 1), (min(size[0], 12), min(size[1], 12))])
    return {**shape, "size": size, "kernel": kernel}


def _stretched(random: Random) -> dict[str, Any]:
    """Strides, dilations and paddings far beyond the image."""
    shape = _ordinary(random)
    if random.random() < 0.6:
        far = lambda: random.choice([1, 1, 7, 30, 100])  # noqa: E731
    else:
        far = lambda: random.choice([1, 1, 3, 1000, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40])  # noqa: E731
    kernel, dilation, stride = shape["kernel"], _pair(random, far), _pair(random, far)
    padding: list[int] = []
    for axis in (0, 1):
        # Large enough that only one to a few positions fit.
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        missing = max(0, reach - shape["size"][axis])
        before = random.choice([0, missing, missing // 2, dilation[axis]])
        padding += [before, max(0, missing - before) + random.choice([0, 0, 1, 3])]
    return {**shape, "stride": stride, "dilation": dilation, "padding": tuple(padding), "padding_mode": "zeros"}
