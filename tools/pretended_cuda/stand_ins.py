"""A stand-in for the libraries of NVIDIA's that PyTorch links: cuBLAS, cuDNN and others, two gigabytes in all.

They bring a CUDA runtime of their own, which no pretended one reaches, so that none of their kernels could run. PyTorch
only has to find them when it is loaded. The stand-in has the functions that PyTorch names, and all of them fail:
PyTorch reports that as it reports any failure.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

_LIBRARIES = r"lib(?:cu(?!da\.|dart)|nccl)\w*\.so\.\d+"
_FUNCTIONS = r"((?:cublas|cudnn|cufft|cupti|curand|cusolver|cusparse|nccl)[A-Z]\w+)(?:@(\S+))?"
"""With the version that is asked for, which the linker insists on."""
_TEXTS = re.compile("String|ErrorName|LastError")
"""Functions that return words, and not a status."""
_WORDS = "the library itself is not there, but a stand-in of tools/pretended_cuda"


def write(torch_libraries: Path, folder: Path) -> None:
    """Compile the stand-in for the PyTorch whose libraries lie in one folder into another, under all of its names."""
    names = set[str]()
    functions: dict[str, set[str]] = defaultdict(set)
    for library in sorted(torch_libraries.glob("*.so")):
        names |= set(re.findall(rf"\[({_LIBRARIES})\]", _output("readelf", "-d", str(library))))
        for function, version in re.findall(f" U {_FUNCTIONS}", _output("nm", "-D", "--undefined-only", str(library))):
            functions[version].add(function)
    folder.mkdir(parents=True, exist_ok=True)
    code, versions, target = folder / "stand_in.c", folder / "versions", folder / "libstand_in.so"
    code.write_text("".join(_stand_in(function) for found in functions.values() for function in sorted(found)))
    versions.write_text("".join(f"{name} {{ {'; '.join(functions[name])}; }};\n" for name in functions if name))
    script = f"-Wl,--version-script={versions}"
    subprocess.run(["gcc", "-shared", "-fPIC", script, str(code), "-o", str(target)], check=True)
    for name in names:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)


def _stand_in(function: str) -> str:
    if _TEXTS.search(function):
        return f'const char* {function}(void) {{ return "{_WORDS}"; }}\n'
    return f"int {function}(void) {{ return 1; }}\n"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
