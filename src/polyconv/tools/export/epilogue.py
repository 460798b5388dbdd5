"""Activation of an exported convolution, applied to the sums of a forward pass before they are stored.

A file with gradients applies it to calls that want none (``Call::activates``). For the others its kernels store the
sums, and PyTorch applies and differentiates the activation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from ...activation import Activation
from ...cuda.planner.epilogue import function_of
from .partial_eval.scanning import closing, definitions, name_of, split

STRUCTS = ("FusedParams", "NonfusedOutputParams", "Fp16x3GemmParams")
"""Parameters of kernels that store a forward pass, where they are not derived from ``Call``."""
_NEEDED = {"clamp", "power_of_two", "reciprocal", "kLog2E", "sigmoid", "gelu"}
"""Definitions of common/epilogue that an expression may name."""
_EXPRESSIONS = {
    "leaky_relu": "z > 0.f ? z : z * {a}",
    "sigmoid": "sigmoid(z)",
    "swish": "z * sigmoid(z * ({a} + {b} * fminf(z * z, 1e4f)))",
    "hardsigmoid": "clamp(z + 3.f, 0.f, 6.f) * (1.f / 6.f)",
    "hardswish": "z * clamp(z + 3.f, 0.f, 6.f) * (1.f / 6.f)",
    "gelu": "gelu(z)",
}
"""Function of common/epilogue -> its expression there, except for bounds."""
_SOURCE = """
// The activation {name}.
__device__ __forceinline__ float activated(float z{parameter}) {{
  return {value};
}}

__device__ __forceinline__ float4 activated4(float4 z{parameter}) {{
  return make_float4(activated(z.x{flag}), activated(z.y{flag}), activated(z.z{flag}), activated(z.w{flag}));
}}

template <int kCount>
__device__ __forceinline__ void activate(float (&values)[kCount]{parameter}) {{
#pragma unroll
  for (int i = 0; i < kCount; i++) values[i] = activated(values[i]{flag});
}}
"""


@dataclass(frozen=True)
class Epilogue:
    """Epilogue of the forward kernels of a file."""

    activation: Activation
    always: bool
    """Whether every call applies it, because the file has no gradients."""

    @property
    def exists(self) -> bool:
        return self.activation is not Activation.NONE

    @property
    def is_flagged(self) -> bool:
        """Whether ``Call`` and kernels have a flag for it."""
        return self.exists and not self.always

    def definitions(self, header: str) -> Iterator[str]:
        """C++ definitions for the kernels, after those that they need of ``header``, the text of common/epilogue."""
        if not self.exists:
            return
        yield from (part for part in definitions(header) if name_of(part) in _NEEDED)
        value, parameter, flag = _expression(self.activation), "", ""
        if self.is_flagged:
            value = f"on ? {f'({value})' if '?' in value else value} : z"
            parameter, flag = ", i64 on", ", on"
        yield from definitions(_SOURCE.format(name=self.activation, value=value, parameter=parameter, flag=flag))

    def in_host(self, text: str) -> str:
        """A host text whose calls of ``activated``, with a flag as the second argument, are those of this file."""
        if not self.is_flagged:
            text = re.sub(r"^  i64 activates;.*\n", "", text, flags=re.MULTILINE)
            text = _rewritten(text, "activated", lambda sums, _: f"activated({sums})" if self.exists else sums)
        return text

    def in_kernel(self, text: str) -> str:
        """A kernel's text with this epilogue in place of that of its template argument ``Params``."""
        text = text.replace("EpilogueOf<Params>::kExists", str(self.exists).lower())
        text = text.replace("EpilogueOf<Params>::kResidual", "false")
        flag = ", p.activates" if self.is_flagged else ""

        def finished(_: str, sums: str, to: str) -> str:
            return f"activated{'4' * sums.startswith('load4')}({sums}{flag})" if self.exists else sums

        text = _rewritten(text, "finished", finished)
        if name_of(text) in STRUCTS and self.is_flagged:
            text = re.sub(r"\};\n$", "  i64 activates;\n};\n", text)
        return re.sub(r"\bactivate\((.*), p\);", rf"activate(\1{flag});", text)


def _expression(activation: Activation) -> str:
    function, a, b = function_of(activation)
    if function == "clamp":
        return _clamp(a, b)
    if function == "swish" and b == 0.0:
        return "z * sigmoid(z)"
    return _EXPRESSIONS[function].format(a=f"{a!r}f", b=f"{b!r}f")


def _clamp(low: float, high: float) -> str:
    """NaN stays NaN, as in common/epilogue."""
    if -inf < low and high < inf:
        return f"clamp(z, {low!r}f, {high!r}f)"
    if -inf < low:
        return f"z < {low!r}f ? {low!r}f : z"
    return f"z > {high!r}f ? {high!r}f : z" if high < inf else "z"


def _rewritten(text: str, function: str, call: Callable[..., str]) -> str:
    """A text with each call of a function replaced by ``call`` of its arguments."""
    at = 0
    while found := re.compile(rf"\b{function}\(").search(text, at):
        end = closing(text, found.end() - 1)
        new = call(*split(text[found.end() : end]))
        text, at = text[: found.start()] + new + text[end + 1 :], found.start() + len(new)
    return text
