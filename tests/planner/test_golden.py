"""Plans and machine code equal the golden record: every workload on every known device, every kernel.

After an intended change ``python tests/golden/record.py`` writes the record again, and the commit shows the difference.
"""

from __future__ import annotations

import pytest

from compiled_kernels import compiled
from cpu_passes import on_instruction_set
from golden import record
from polyconv.cpu import native
from polyconv.cuda.jit.compile import compiler_id
from polyconv.cuda.planner import DEVICES, KernelSpec, all_kernels

ANEW = "Where this is meant: python tests/golden/record.py"


def compare(name: str, now: record.Record) -> None:
    found = record.differences(record.load(name), now, name)
    assert not found, "\n".join(["plans are not those on record (before -> now)", *found, ANEW])


@pytest.mark.parametrize("name", DEVICES)
def test_cuda_plans_are_those_on_record(name: str) -> None:
    compare(name, record.cuda_record(name))


@pytest.mark.parametrize("name", record.CPUS)
def test_cpu_plans_are_those_on_record(name: str) -> None:
    if not native.is_available():
        pytest.skip(str(native.why_absent()))
    with on_instruction_set(name):  # or skip
        compare(name, record.cpu_record(name))


@pytest.mark.parametrize(
    ("arch", "spec"),
    [pytest.param(arch, spec, id=f"{spec.symbol}-{arch}") for spec, arch in compiled() if arch in record.ARCHS],
)
def test_machine_code_is_that_on_record(spec: KernelSpec, arch: str) -> None:
    """Compiles only kernels of test_resources.py: whichever runs first fills the cache."""
    known = record.load(record.MACHINE_CODE)
    if not any(key.startswith(f"{compiler_id()}, ") for key in known):
        recorded = sorted({key.rpartition(", sm_")[0] for key in known})
        pytest.skip(
            f"machine code is on record of NVRTC {' and '.join(recorded)}, not of {compiler_id()}, which is here"
        )
    key = record.code_key(spec, arch)
    assert key in known, f"{spec.symbol} is not on record. {ANEW} machine_code"
    found = record.code_hash(spec, arch, known[key])
    assert found == known[key], f"{spec.symbol} is compiled to other machine code for {arch}. {ANEW} machine_code"


def test_no_machine_code_is_on_record_of_a_kernel_that_is_gone() -> None:
    symbols = {spec.symbol for spec in all_kernels()}
    gone = [key for key in record.load(record.MACHINE_CODE) if key.rpartition(", ")[2] not in symbols]
    assert not gone, f"{ANEW} machine_code"


def test_a_difference_says_what_ran_and_what_runs() -> None:
    before = {"kb1 fprop": {"runs": "direct", "cost_us": 1.5, "launches": ["a, 2 times", "b"]}, "kb2 fprop": {}}
    now = {"kb1 fprop": {"runs": "fast", "cost_us": 1.500001, "launches": ["c"]}, "kb3 fprop": {}}
    assert record.differences(before, now, "v100") == [
        "kb1 fprop on v100:",
        "  runs: direct -> fast",
        "  launches: a, 2 times; b -> c",
        "kb2 fprop on v100 is on record and is not planned any more",
        "kb3 fprop on v100 is planned and not on record",
    ]


def test_only_what_a_kernel_executes_is_hashed() -> None:
    """A constant of a header is a variable of the cubin, whether a kernel uses it or not."""
    core = pytest.importorskip("cuda.core")
    source = (
        "struct Facts {{ static constexpr int {constants}; }};\n"
        'extern "C" __global__ void scale(int* y) {{ y[threadIdx.x] *= Facts::kFactor; }}'
    )

    def cubin(constants: str) -> bytes:
        options = core.ProgramOptions(arch="sm_70", std="c++17")
        return bytes(core.Program(source.format(constants=constants), "c++", options).compile("cubin").code)

    before, unused, used = map(cubin, ["kFactor = 3", "kUnused = 5, kFactor = 3", "kFactor = 5"])
    assert before != unused
    assert record.cubin_hash(before) == record.cubin_hash(unused) != record.cubin_hash(used)
