"""What denormal tensors cost depthwise layers, in times of ordinary ones: ``python benchmarks/cpu/denormals.py``.

One thread; best processor time of alternating calls. Columns: the forward pass again with ordinary tensors (A/A), with
weights of 1e-40, and also with a bias and ReLU, with inputs of 1e-40; the input gradient with weights and with
gradients of 1e-40; the weight gradient with inputs and with gradients of 1e-40.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from polyconv.cpu import native

LAYERS = {
    "96 3x3 at 112x112": (1, 96, 112, 3, 1),
    "144 3x3/2 at 56x56": (1, 144, 56, 3, 2),
    "128 7x7 at 56x56": (1, 128, 56, 7, 1),
    "4 x 192 5x5 at 28x28": (4, 192, 28, 5, 1),
    "8 x 384 3x3 at 14x14": (8, 384, 14, 3, 1),
}
"""Images, channels, extent, taps and stride along both axes."""
FORMATS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
TINY = 1e-40
ROUNDS = 40


def ratios(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Times of all calls but the first, relative to that."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for place, call in enumerate(calls):
            began = time.process_time()
            call()
            best[place] = min(best[place], time.process_time() - began)
    return [one / best[0] for one in best[1:]]


def measured(layer: tuple[int, ...], memory_format: torch.memory_format) -> list[float]:
    images, channels, extent, taps, stride = layer
    forward, dgrad, wgrad = (native.operator(f"depthwise_{kind}") for kind in ("fprop", "dgrad", "wgrad"))
    x = torch.randn(images, channels, extent, extent).contiguous(memory_format=memory_format)
    w, bias = torch.randn(channels, 1, taps, taps), torch.randn(channels)
    y = torch.conv2d(x, w, None, stride, taps // 2, 1, channels).contiguous(memory_format=memory_format)
    dy, dx, dw, geometry = torch.randn_like(y), torch.empty_like(x), torch.empty_like(w), [stride] * 2
    geometry += [taps // 2, taps // 2, 1, 1, channels, 0]
    relu = native.facts()["activations"].index("relu")
    tiny_x, tiny_w, tiny_dy = x * TINY, w * TINY, dy * TINY
    return [
        *ratios(
            [
                lambda: forward(x, w, None, y, geometry),
                lambda: forward(x, w, None, y, geometry),
                lambda: forward(x, tiny_w, None, y, geometry),
                lambda: forward(x, tiny_w, bias, y, geometry, None, relu),
                lambda: forward(tiny_x, w, None, y, geometry),
            ]
        ),
        *ratios(
            [
                lambda: dgrad(dy, w, dx, geometry),
                lambda: dgrad(dy, tiny_w, dx, geometry),
                lambda: dgrad(tiny_dy, w, dx, geometry),
            ]
        ),
        *ratios(
            [
                lambda: wgrad(x, dy, dw, None, geometry),
                lambda: wgrad(tiny_x, dy, dw, None, geometry),
                lambda: wgrad(x, tiny_dy, dw, None, geometry),
            ]
        ),
    ]


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'layer':22} {'format':14} {'A/A':>5} | forward: w, + bias, ReLU, x | gradient: w, dy | of w: x, dy")
    for name, layer in LAYERS.items():
        for form, memory_format in FORMATS.items():
            a, *rest = (f"{ratio:5.2f}" for ratio in measured(layer, memory_format))
            parts = " ".join(rest[:3]), " ".join(rest[3:5]), " ".join(rest[5:])
            print(f"{name:22} {form:14} {a} | {' | '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
