"""The planner's description of a GPU, read from the driver."""

from __future__ import annotations

from functools import cache

from . import driver
from .planner.device import CudaDevice

USUAL_CLOCK_MHZ = 1500
"""Clock for drivers that report none. Any value works: the cost model compares candidates on one device."""


@cache
def describe(index: int) -> CudaDevice:
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
    """DRAM bandwidth [GB/s] at two transfers per clock.

    Virtualised and integrated GPUs may report no clock; 10 GB/s per SM is a typical ratio.
    """
    return 2 * clock_khz * 1e3 * bus_bits / 8 / 1e9 or 10.0 * sms
