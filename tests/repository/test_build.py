"""The build rule of the native kernels: what is recompiled, and what is not. On one-line sources."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "csrc" / "build.py"


def load(root: Path) -> ModuleType:
    """csrc/build.py of a tree, as a fresh module without cached hashes."""
    spec = importlib.util.spec_from_file_location("native_build", root / "csrc" / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["native_build"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("POLYCONV_BUILD_DIR", raising=False)
    root = tmp_path / "tree"
    (root / "csrc" / "cpu").mkdir(parents=True)
    for name in ("build.py", "function_order.py"):
        shutil.copy(SCRIPT.with_name(name), root / "csrc")
    (root / "csrc" / "cpu" / "number.h").write_text("#define NUMBER 1\n")
    (root / "csrc" / "cpu" / "uses.cc").write_text('#include "number.h"\nint uses() { return NUMBER; }\n')
    (root / "csrc" / "cpu" / "alone.cc").write_text("int alone() { return 0; }\n")
    return root


def compiled(root: Path) -> set[str]:
    """Builds; returns the sources that the compiler saw."""
    objects = Path(os.environ.get("POLYCONV_BUILD_DIR", root / "build")) / "cpu"
    for old in objects.rglob("*.o"):
        os.utime(old, (0, 0))
    module = load(root).build()
    assert module == root / "src" / "polyconv" / "cpu" / "_native.abi3.so"
    assert module.exists()
    return {str(path.relative_to(objects).with_suffix("")) for path in objects.rglob("*.o") if path.stat().st_mtime > 0}


def test_contents_decide(root: Path) -> None:
    assert compiled(root) == {"alone", "uses"}
    assert compiled(root) == set()
    header = root / "csrc" / "cpu" / "number.h"
    header.touch()
    assert compiled(root) == set()
    header.write_text("#define NUMBER 2\n")
    assert compiled(root) == {"uses"}
    (root / "csrc" / "cpu" / "alone.cc").write_text("int alone() { return 1; }\n")
    assert compiled(root) == {"alone"}


def test_sources_in_folders(root: Path) -> None:
    """Objects of equal names stay separate, includes have full paths, and a folder hides no library of its name."""
    (root / "csrc" / "cpu" / "torch").mkdir()
    (root / "csrc" / "cpu" / "torch" / "one.h").write_text("#define ONE 1\n")
    for folder in ("first", "second"):
        (root / "csrc" / "cpu" / folder).mkdir()
        text = f'#include <torch/headeronly/version.h>\n#include "torch/one.h"\nint {folder}() {{ return ONE; }}\n'
        (root / "csrc" / "cpu" / folder / "same.cc").write_text(text)
    assert compiled(root) == {"alone", "uses", "first/same", "second/same"}
    assert compiled(root) == set()


def test_what_launches_on_a_gpu_is_a_module_of_its_own(root: Path) -> None:
    (root / "csrc" / "cuda").mkdir()
    (root / "csrc" / "cuda" / "module.cc").write_text("int module() { return 0; }\n")
    module = load(root).build("cuda")
    assert module == root / "src" / "polyconv" / "cuda" / "_native.abi3.so"
    assert module.exists()
    assert compiled(root) == {"alone", "uses"}


def test_the_command_decides(root: Path) -> None:
    compiled(root)
    script = root / "csrc" / "build.py"
    script.write_text(script.read_text().replace('"-O3"', '"-O1"'))
    assert compiled(root) == {"alone", "uses"}


def test_a_copy_of_the_sources_uses_the_objects(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the wheel built from an unpacked source archive does."""
    compiled(root)
    shutil.copytree(root / "csrc", tmp_path / "copy" / "csrc")
    monkeypatch.setenv("POLYCONV_BUILD_DIR", str(root / "build"))
    assert compiled(tmp_path / "copy") == set()


def test_modules_do_not_depend_on_folders(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on that of the sources nor on those of headers, which enter the messages of assertions."""
    (root / "csrc" / "cpu" / "where.cc").write_text("#include <where.h>\nconst char* place() { return where(); }\n")
    modules = []
    for place in ("one", "another"):
        headers = tmp_path / place / "include"
        headers.mkdir(parents=True)
        (headers / "where.h").write_text("inline const char* where() { return __FILE__; }\n")
        shutil.copytree(root / "csrc", tmp_path / place / "csrc")
        monkeypatch.setattr(sysconfig, "get_paths", lambda headers=headers: {"include": str(headers)})
        modules.append(load(tmp_path / place).build().read_bytes())
    assert b"include/where.h" in modules[0]
    assert modules[0] == modules[1]


def test_a_failure_is_compiled_again(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compiled(root)
    source = root / "csrc" / "cpu" / "alone.cc"
    right = source.read_text()
    source.write_text("int alone() { return nonsense; }\n")
    with pytest.raises(SystemExit, match=r"could not compile alone\.cc"):
        load(root).build()
    assert "nonsense" in capfd.readouterr().err
    source.write_text(right)
    assert compiled(root) == {"alone"}


@pytest.mark.parametrize("variant", ["counters", "address,undefined", "thread"])
def test_a_variant_stays_beside_its_objects(root: Path, variant: str) -> None:
    """In place, where it is imported, is the plain build only."""
    module = load(root).build(variant=variant)
    assert module == root / "build" / f"cpu-{variant.replace(',', '-')}" / "_native.abi3.so"
    assert module.exists()
    assert not (root / "src").exists()


PRETENDED = """\
#!/usr/bin/env python3
import sys
from pathlib import Path
words = sys.argv[1:]
if "-dumpmachine" in words:
    print(words[words.index("--target") + 1])
else:
    with open(__file__ + ".log", "a") as log:
        print(*words, file=log)
    if "-Werror" in words and "-fno-schedule-insns" in words:
        sys.exit(1)  # as clang
    Path(words[words.index("-o") + 1]).touch()
    if "-MF" in words:
        Path(words[words.index("-MF") + 1]).write_text("target: " + words[words.index("-c") + 1])
"""


@pytest.mark.parametrize(
    ("triple", "folder", "used", "unused"),
    [
        ("arm64-apple-darwin24.6.0", "cpu-aarch64-darwin", ("-bundle", "dynamic_lookup"), ("as-needed", "-Wl,-T")),
        ("aarch64-unknown-linux-gnu", "cpu-aarch64", ("-shared", "-Wl,--as-needed"), ("-bundle",)),
    ],
)
def test_commands_for_another_machine(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    triple: str,
    folder: str,
    used: tuple[str, ...],
    unused: tuple[str, ...],
) -> None:
    """A compiler with arguments, which lacks an option of gcc; the module stays in the build folder."""
    compiler = root / "pretended"
    compiler.write_text(PRETENDED)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} --target {triple}")
    build = load(root)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.function_order, "write_script", lambda unordered, order: order.touch())
    assert build.target() == ("aarch64", "darwin" if "apple" in triple else "linux")
    assert build.build() == root / "build" / folder / "_native.abi3.so"
    commands = Path(f"{compiler}.log").read_text().splitlines()
    assert all(command.startswith(f"--target {triple} ") for command in commands)
    compiled = [command for command in commands if " -MF " in command]
    assert len(compiled) == 2
    assert not any("-fno-schedule-insns" in command for command in compiled)
    last = commands[-1]
    assert all(word in last for word in (*used, "-ltorch_cpu", "alone.o", "uses.o"))
    assert not any(word in last for word in unused)


def test_other_machines_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = root / "pretended"
    compiler.write_text(PRETENDED)
    compiler.chmod(0o755)
    for triple in ("riscv64-unknown-linux-gnu", "x86_64-pc-windows-msvc"):
        monkeypatch.setenv("CXX", f"{compiler} --target {triple}")
        with pytest.raises(SystemExit, match=f"compiles for {triple}; the native modules are for x86_64 and aarch64"):
            load(root).build()


def test_similar_functions_are_neighbours(root: Path) -> None:
    """Two families of functions that alternate, larger than the window together."""
    load(root)
    order = sys.modules["function_order"].similar_together
    families = [os.urandom(20_000) for _ in range(2)]
    found = order([families[index % 2] + bytes([index]) * 8 for index in range(8)])
    assert sorted(found) == list(range(8))
    assert [index % 2 for index in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert order([]) == []
    assert order([b"", b""]) == [0, 1]


def test_instances_of_templates_are_ordered(root: Path) -> None:
    text = "template <int N> __attribute__((used)) inline int instance() { return N; }\n"
    text += "int all() { return instance<1>() + instance<2>() + instance<3>(); }\n"
    (root / "csrc" / "cpu" / "instances.cc").write_text(text)
    load(root).build()
    script = root / "build" / "cpu" / "order.ld"
    first = script.read_text()
    assert {f"*(.text._Z8instanceILi{number}EEiv)" for number in (1, 2, 3)} <= set(first.splitlines())
    load(root).build()
    assert script.read_text() == first
