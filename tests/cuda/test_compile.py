"""NVRTC: successful and failed compilation, and the error messages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import polyconv.cuda.jit.compile as compile_module
from polyconv.cuda import CompileError, RefusedKernelError
from polyconv.cuda.jit.compile import ALLOCATIONS, compile_kernel, compiler_id, flags, in_threads, without_spills
from polyconv.cuda.jit.cubin import kernel_info
from polyconv.cuda.planner import kernel_params
from virtual_gpu.example import KERNELS, axpy_spec

ARCHS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_for_the_exact_architecture(arch: str) -> None:
    cubin = compile_kernel(axpy_spec(), arch, include_dirs=[KERNELS])
    assert kernel_info(cubin, "axpy_128").arch == arch


def test_compiler_warnings_are_not_swallowed(caplog: pytest.LogCaptureFixture) -> None:
    compile_kernel(axpy_spec(), "sm_70", include_dirs=[KERNELS])
    assert not caplog.records
    compile_kernel(replace(axpy_spec(), body="int unused = 1 << 40;"), "sm_70", include_dirs=[KERNELS])
    assert "axpy_128" in caplog.text
    assert "warning" in caplog.text


def test_the_same_input_gives_the_same_bytes() -> None:
    first, second = (compile_kernel(axpy_spec(), "sm_70", include_dirs=[KERNELS]) for _ in range(2))
    assert first == second


def test_a_batch_keeps_its_order() -> None:
    specs = [axpy_spec(threads) for threads in (32, 64, 128)]
    cubins = in_threads(lambda spec: compile_kernel(spec, "sm_70", include_dirs=[KERNELS]), specs)
    assert [kernel_info(cubin).name for cubin in cubins] == [spec.symbol for spec in specs]


def test_an_error_names_the_kernel_the_architecture_and_the_line() -> None:
    wrong = replace(axpy_spec(), body="example::no_such_function(params);")
    with pytest.raises(CompileError) as caught:
        compile_kernel(wrong, "sm_70", include_dirs=[KERNELS])
    text = str(caught.value)
    assert "axpy_128" in text
    assert "sm_70" in text
    assert "no_such_function" in text
    assert "axpy_128.cu(" in text
    assert "deprecated" not in text


def test_host_and_device_must_agree_about_the_parameters() -> None:
    with pytest.raises(CompileError, match="host and device disagree about example::AxpyParams"):
        compile_kernel(replace(axpy_spec(), params_bytes=40), "sm_70", include_dirs=[KERNELS])


def test_an_architecture_that_is_too_old_is_refused_in_words() -> None:
    with pytest.raises(CompileError, match=r"need compute capability 7\.0 .* a GPU of sm_60 has 6\.0"):
        compile_kernel(axpy_spec(), "sm_60")


def test_a_volta_on_cuda_13_is_sent_to_cu12(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyconv.cuda.jit.compile.supported_archs", lambda: (75, 80, 90, 100, 120))
    with pytest.raises(CompileError, match=r"polyconv\[cu12\]"):
        compile_kernel(axpy_spec(), "sm_70")


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def missing() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.12"')

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    compiler_id.cache_clear()
    with pytest.raises(CompileError, match=r"install polyconv\[cu12\]"):
        compiler_id()


@pytest.mark.parametrize("arch", ["70", "compute_70", "sm_", ""])
def test_a_malformed_architecture_is_refused(arch: str) -> None:
    with pytest.raises(CompileError, match="not a GPU architecture"):
        compile_kernel(axpy_spec(), arch)


def test_headers_in_the_current_directory_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "axpy.cuh").write_text("#error a stray file was included\n")
    monkeypatch.chdir(tmp_path)
    compile_kernel(axpy_spec(), "sm_70", include_dirs=[KERNELS])


def test_float32_means_float32() -> None:
    given = flags("sm_70")
    assert "-arch=sm_70" in given
    assert "--fmad=true" in given
    assert not any("fast_math" in flag or "fast-math" in flag or "ftz=true" in flag for flag in given)


def test_the_compiler_is_known_by_its_build() -> None:
    build, version = compiler_id().split()
    assert build.startswith("CL-")
    assert version.count(".") == 1


@pytest.mark.parametrize(
    ("version", "header", "expected"),
    [
        ((13, 4), "Build ID: CL-38855100\n// Cuda compilation tools, release 13.4, V13.4.92", "CL-38855100 13.4"),
        ((13, 2), "Build ID: UNKNOWN\n// Cuda compilation tools, release 13.2, V13.2.86", "13.2.86"),
        ((13, 2), "Build ID: UNKNOWN\n// Cuda compilation tools, release 13.2, V13.2.51", "13.2.51"),
        ((13, 2), "", "13.2"),
    ],
)
def test_a_compiler_without_a_build_is_known_by_its_release(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], header: str, expected: str
) -> None:
    """NVRTC 13.2 reports its version as UNKNOWN: its patch releases must not share cache entries, nor that name."""
    from cuda.bindings import nvrtc

    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (0, *version))
    monkeypatch.setattr(compile_module, "_ptx", lambda *_: f"//\n// Compiler {header}\n".encode())
    compiler_id.cache_clear()
    try:
        assert compiler_id() == expected
    finally:
        compiler_id.cache_clear()


def test_device_headers_include_neither_torch_nor_std() -> None:
    for header in kernel_params.KERNELS.rglob("*.cuh"):
        for line in header.read_text().splitlines():
            if line.lstrip().startswith("#include"):
                assert '"' in line, f"{header.name}: {line}: only headers of kernels/ may be included"


def test_importing_polyconv_loads_neither_compiler_nor_driver() -> None:
    code = (
        "import sys, polyconv, polyconv.cuda\n"
        "import polyconv.cuda.jit.compile, polyconv.cuda.jit.cache, polyconv.cuda.driver\n"
        "assert not {'cuda.core', 'cuda.bindings.nvrtc'} & set(sys.modules)\n"  # torch imports the others
        "assert not any(name in open('/proc/self/maps').read() for name in ('libnvrtc', 'libcuda.so'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize(("without", "tried"), [("plain", 1), ("first", 2), ("second", 3), ("nothing", 3)])
def test_a_kernel_that_spills_is_compiled_with_other_settings(without: str, tried: int) -> None:
    """In order, until it does not; if it always does, the default's code stays. A setting may be unknown."""
    spills = compile_kernel(axpy_spec(1024, "spill", min_blocks=2, value=200), "sm_80", include_dirs=[KERNELS])
    fits = compile_kernel(axpy_spec(), "sm_80", include_dirs=[KERNELS])
    settings: dict[str | None, str] = dict(zip((None, *ALLOCATIONS), ("plain", "first", "second"), strict=True))
    seen: list[str] = []

    def compiled(setting: str | None) -> bytes:
        seen.append(settings[setting])
        if without == "second" and seen[-1] == "first":
            raise RefusedKernelError("nvrtc: error: invalid value for --ptxas-options")
        return fits if seen[-1] == without else spills

    assert without_spills(compiled) == (spills if without == "nothing" else fits)
    assert seen == ["plain", "first", "second"][:tried]
