"""Time of a submission to gpu-mode's board (polyconv export --board), modelled and counted.

    python benchmarks/gpu/board.py h100              # modelled
    python benchmarks/gpu/board.py a100 counted      # and as machine code in the emulator: a lower bound

The floor is direct multiplication in float32 at the GPU's peak. Additions of parts take 85 % of the memory's bandwidth.
"""

from __future__ import annotations

import sys

from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import DEVICES, Plan, plan_cuda
from polyconv.cuda.planner.device import CudaDevice
from polyconv.problem import Problem
from polyconv.selection import Preference
from polyconv.tools.export.board import PARTS, layer_of
from polyconv.tools.inspect.emulated_cost import count_plan, emulator

SIZES = ((128, 8, 64, 4), (128, 16, 64, 4), (256, 16, 128, 2), (256, 32, 128, 1))
"""Image, taps per axis, channels and batch of the board's benchmarks."""


def counted_ms(plan: Plan, device: CudaDevice) -> float:
    gpu = emulator()
    assert gpu is not None, "in a source checkout, pip install -e tools/gpu_emulator"
    specs = list(dict.fromkeys(plan.kernels))
    cubins = dict(zip(specs, KernelCache().get_many(specs, device.arch), strict=True))
    return sum(one.bound_ms for one in count_plan(gpu, plan, cubins, device))


def main(gpu_name: str = "h100", how: str = "") -> None:
    device = DEVICES[gpu_name]
    for size, taps, channels, batch in SIZES:
        part = next(one for one in PARTS if one.channels == channels and taps in one.sizes)
        out = size - taps + 1
        window, kernel = (out + part.taps[0] - 1, out + part.taps[1] - 1), (channels, channels, *part.taps)
        written = layer_of(part).problem
        problem = Problem.make("fprop", (batch, channels, *window), kernel, tolerance=written.tolerance)
        plan = plan_cuda(problem, device, prefer=Preference(plan_cuda(written, device).algorithm, "in the file"))
        times = taps * taps // (part.taps[0] * part.taps[1])
        added = (times - 1) * 3 * 4 * batch * channels * out * out / device.dram_gbs / 0.85 / 1e6
        whole = Problem.make("fprop", (batch, channels, size, size), (channels, channels, taps, taps))
        floor = whole.multiplications / (device.fp32_per_clock * device.sms * device.clock_mhz * 1e3)
        words = f"modelled {times * plan.cost_us / 1e3 + added:6.2f} ms"
        if how == "counted":
            words += f", counted {times * counted_ms(plan, device) + added:6.2f} ms"
        print(
            f"{taps}x{taps}, {channels} channels: {words}, FP32 floor {floor:6.2f}; {times} x {plan.algorithm}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
