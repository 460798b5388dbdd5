"""Writes a kernel repository in the layout of the Hugging Face hub from this source tree.

    python csrc/build.py                   the native CPU kernels, if they are not there
    python tools/hub --output polyconv-hub

The result holds one build variant: the CPU kernels, for any PyTorch from 2.11 on (torch's stable ABI), and the Python
code around them. A process may load several builds beside an installed polyconv: operators of Python and C++ are in a
namespace of the build, and imports between its modules are relative.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TEMPLATE = ROOT / "src" / "polyconv", Path(__file__).resolve().parent / "template"
LEFT_OUT = ("__init__.py", "__main__.py", "cli", "cuda", "inductor", "measure", "model", "nn.py", "tools")
"""Without a use in a layer; and CUDA, whose kernels need cuda-core, which the hub does not allow as a dependency."""
NATIVE = Path("cpu/_native.abi3.so"), Path("dispatch/_native.abi3.so")
"""Not ``runtime``'s, which serves ``polyconv.enable`` and is bound to one version of torch."""
NAMESPACE = b"\0polyconv_cpu\0"
"""The operators' namespace in the compiled library."""
OPS = '''"""The operators of this build."""

import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{id}::{{op_name}}"
'''
COMPATIBLE = '''"""This kernel under the path that older versions of kernels import."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("{id}", Path(__file__).parents[1] / "__init__.py")
if "{id}" not in sys.modules:
    sys.modules["{id}"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["{id}"])
globals().update({{name: getattr(sys.modules["{id}"], name) for name in sys.modules["{id}"].__all__}})
'''
BUILD = """[general]
name = "polyconv"
license = "apache-2.0"
version = 0
edition = 5
backends = ["cpu"]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the repository; it must not exist")
    print(write(parser.parse_args().output))


def write(repository: Path) -> Path:
    """Write the repository; returns the folder of the variant."""
    missing = [str(name) for name in NATIVE if not (SOURCE / name).exists()]
    if missing:
        raise SystemExit(f"tools/hub: {', '.join(missing)} not built: run python csrc/build.py first")
    files = {path.relative_to(SOURCE): path.read_bytes() for path in sorted(SOURCE.rglob("*")) if _is_part(path)}
    files |= {Path(path.name): path.read_bytes() for path in sorted(TEMPLATE.glob("*.py"))}
    content = hashlib.sha256(b"".join(str(name).encode() + data for name, data in files.items()))
    name = f"_pconv{content.hexdigest()[:6]}"  # as long as the namespace that it replaces
    assert len(name) == len(NAMESPACE) - 2
    files = {path: relocated(path, data, name) for path, data in files.items()}
    files[Path("_ops.py")] = OPS.format(id=name).encode()
    files[Path("polyconv/__init__.py")] = COMPATIBLE.format(id=name).encode()
    metadata = {
        "name": "polyconv",
        "id": name,
        "version": 0,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": {str(path): _digest(data) for path, data in sorted(files.items())}},
    }
    variant = repository / "build" / f"torch-stable-abi211-cpu-{platform.machine()}-{platform.system().lower()}"
    for path, data in {**files, Path("metadata.json"): json.dumps(metadata, indent=2).encode()}.items():
        (variant / path).parent.mkdir(parents=True, exist_ok=True)
        (variant / path).write_bytes(data)
    (repository / "build.toml").write_text(BUILD)
    return variant


def _is_part(path: Path) -> bool:
    name = path.relative_to(SOURCE)
    if not path.is_file() or name.parts[0] in LEFT_OUT or "__pycache__" in name.parts:
        return False
    return path.suffix != ".so" or name in NATIVE


def _digest(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def relocated(path: Path, data: bytes, name: str) -> bytes:
    """A file of the package as part of the build ``name``: its modules and operators have that name."""
    if path == NATIVE[0]:
        assert data.count(NAMESPACE) == 1, "the namespace of the operators is one constant of the library"
        return data.replace(NAMESPACE, b"\0" + name.encode() + b"\0")
    if path.suffix != ".py":
        return data
    text = data.decode()
    text = text.replace('torch.library.Library("polyconv", "DEF")', f'torch.library.Library("{name}", "FRAGMENT")')
    text = re.sub(r"torch\.ops\.polyconv(_cpu)?\b", f"torch.ops.{name}", text)
    text = re.sub(r'"polyconv(?=(\.\w+)+")', f'"{name}', text)  # names of modules that are imported later
    text = text.replace('startswith("polyconv")', f'startswith("{name}")')
    prefixed = text.replace('f"polyconv::{name}"', "add_op_namespace_prefix(name)")
    if prefixed != text:
        dots = "." * len(path.parts)
        prefixed = prefixed.replace(
            "\nimport torch\n", f"\nimport torch\n\nfrom {dots}_ops import add_op_namespace_prefix\n"
        )
    return prefixed.encode()


if __name__ == "__main__":
    main()
