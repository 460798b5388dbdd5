"""A stand-in for the libraries of NVIDIA's that PyTorch links: cuBLAS, cuDNN and others, two gigabytes in all.

They bring a CUDA runtime of their own, which no pretended one reaches, so that none of their kernels could run. PyTorch
only has to find them when it is loaded. The stand-in has the functions that PyTorch names, and all of them fail:
PyTorch reports that as it reports any failure. With the CUDA runtime among them, a CUDA build of PyTorch works on the
CPU without any package of NVIDIA's, and finds no GPU.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

_LIBRARIES = r"lib(?:cu(?!da\.|dart)|nccl)\w*\.so\.\d+"
_FUNCTIONS = r"((?:cublas|cudnn|cufft|cupti|curand|cusolver|cusparse|nccl)[A-Z]\w+)(?:@+(\S+))?"
"""With the version that is asked for, which the linker insists on."""
_ALL_LIBRARIES = r"lib(?:cu(?!da\.)|nccl|nv)\w*\.so\.\d+"
_ALL_FUNCTIONS = r"((?:(?:__cuda|cu[a-z]*|nccl|nvrtc|nvtx)[A-Z]|nvshmem)\w+)(?:@+(\S+))?"
"""With the CUDA runtime, and what a build links beside it: NVRTC, NVTX, NVSHMEM."""
_NO_DEVICE = 100
"""``cudaErrorNoDevice``: PyTorch takes it for a machine without a GPU."""
_TEXTS = re.compile("String|ErrorName|(?<!cudaGet)(?<!cudaPeekAt)LastError")
"""Functions that return words, and not a status."""
_WORDS = "the library itself is not there, but a stand-in of tools/fake_cuda"
_OTHERS = {
    "cuptiGetResultString": f'int cuptiGetResultString(int code, const char** text) {{ *text = "{_WORDS}"; return 0; }}'
}
"""Functions that PyTorch relies on: its profiler does without CUPTI, but asks why."""


def build(torch_libraries: Path, folder: Path, *, runtime: bool = False) -> Path:
    """Compile the stand-in for the PyTorch whose libraries lie in one folder into another, under all of its names.

    ``runtime``: stand in for the CUDA runtime, too, and for all else of NVIDIA's. Returns a folder for the loader's
    path, inside of the one that was given.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    target = folder / f"stand-ins-{'all-' if runtime else ''}{digest}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "stand-ins"
            built.mkdir()
            _compile(
                torch_libraries, built, *((_ALL_LIBRARIES, _ALL_FUNCTIONS) if runtime else (_LIBRARIES, _FUNCTIONS))
            )
            built.rename(target)
    return target


def _compile(torch_libraries: Path, folder: Path, libraries: str, named: str) -> None:
    names = set[str]()
    functions: dict[str, set[str]] = defaultdict(set)
    for library in sorted(torch_libraries.glob("*.so")):
        names |= set(re.findall(rf"\[({libraries})\]", _output("readelf", "-d", str(library))))
        for function, version in re.findall(f" U {named}", _output("nm", "-D", "--undefined-only", str(library))):
            functions[version].add(function)
    code, versions, target = folder / "stand_in.c", folder / "versions", folder / "libstand_in.so"
    code.write_text("".join(_stand_in(function) for found in functions.values() for function in sorted(found)))
    versions.write_text("".join(f"{name} {{ {'; '.join(functions[name])}; }};\n" for name in functions if name))
    script = f"-Wl,--version-script={versions}"
    subprocess.run(["gcc", "-shared", "-fPIC", script, str(code), "-o", str(target)], check=True)
    for name in names:
        (folder / name).symlink_to(target.name)


def _stand_in(function: str) -> str:
    if function in _OTHERS:
        return f"{_OTHERS[function]}\n"
    if _TEXTS.search(function):
        return f'const char* {function}(void) {{ return "{_WORDS}"; }}\n'
    return f"int {function}(void) {{ return {_NO_DEVICE if function.startswith('cuda') else 1}; }}\n"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
