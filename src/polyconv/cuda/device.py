"""A GPU in the planner's words, read from the driver."""

from __future__ import annotations

from functools import cache

from ..plan.device import CudaDevice
from . import driver

USUAL_CLOCK_MHZ = 1500
"""For drivers that report no clock: the cost model compares candidates on one device, and any clock serves for that."""


@cache
def describe(index: int) -> CudaDevice:
    """What the planner wants to know about the GPU with this index."""
    gpu = driver.device(index)
    major, minor = gpu.attribute("COMPUTE_CAPABILITY_MAJOR"), gpu.attribute("COMPUTE_CAPABILITY_MINOR")
    sms = gpu.attribute("MULTIPROCESSOR_COUNT")
    return CudaDevice(
        name=gpu.name,
        arch=f"sm_{major}{minor}",
        sms=sms,
        clock_mhz=gpu.attribute("CLOCK_RATE") // 1000 or USUAL_CLOCK_MHZ,
        dram_gbs=_bandwidth(gpu.attribute("MEMORY_CLOCK_RATE"), gpu.attribute("GLOBAL_MEMORY_BUS_WIDTH"), sms),
        shared_per_sm=gpu.attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        shared_per_block_optin=gpu.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        registers_per_sm=gpu.attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        l2_bytes=gpu.attribute("L2_CACHE_SIZE"),
        threads_per_sm=gpu.attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        blocks_per_sm=gpu.attribute("MAX_BLOCKS_PER_MULTIPROCESSOR"),
    )


def _bandwidth(clock_khz: int, bus_bits: int, sms: int) -> float:
    """GB/s of the device's memory: two transfers per clock.

    Some drivers report no memory clock (virtualised and integrated GPUs). Then 10 GB/s per multiprocessor, a typical
    ratio, keeps the cost model working.
    """
    return 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9 or 10.0 * sms
