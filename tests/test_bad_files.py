"""Invalid files: one warning each, and the call continues as if the file were absent.

Every kind of file read at run time, replaced by anything: tuning files through convolutions on the CPU, descriptions of
cache entries and both kinds of bundle files through the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import polyconv
from polyconv import cli, settings
from polyconv.autotune import preferences, tuning_file, tuning_lookup
from polyconv.autotune.tuning_file import Tuning, TuningError
from polyconv.backend import backend_for
from polyconv.cuda.jit.bundle import Bundle, BundleError
from polyconv.cuda.jit.bundle_writer import BundleWriter
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.store import EntryError, Store
from polyconv.tools.doctor import environment as doctor_environment
from polyconv.util import checked_json
from polyconv.util.atomic_files import replace_whole
from polyconv.util.checked_json import DocumentError
from strangers import public_folder, stranger
from virtual_gpu.example import KERNELS, axpy_spec

SPEC, ARCH = axpy_spec(), "sm_70"
KEY = "fprop x 1x16x40x40"
Json = dict[str, Any]

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("new_warnings")]  # a pipe must not block


# ---- contents in a file's place


def _nested(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * levels + "1" + closing * levels).encode()


NOT_JSON: dict[str, bytes] = {
    "empty": b"",
    "blank": b" \n\t",
    "a byte": b"\0",
    "binary": bytes(range(256)) * 40,
    "a null and more": b"null\0",
    "truncated": b'{"format": "polyconv tuning", "schema": 2, "sections": [{"environ',
    "half a string": b'{"schema": "',
    "ends in a backslash": b'{"schema": "\\',
    "two documents": b"{}{}",
    "a comment": b"{} // why not",
    "single quotes": b"{'schema': 1}",
    "a trailing comma": b'{"schema": 1,}',
    "byte order mark": b'\xef\xbb\xbf{"schema": 1}',
    "UTF-16": '{"schema": 1}'.encode("utf-16"),
    "Latin-1": '{"name": "\xe9"}'.encode("latin-1"),
    "overlong UTF-8": b'{"name": "\xc0\xaf"}',
    "half a surrogate pair": b'{"name": "\\ud800"}',
    "nested lists": _nested(100_000),
    "nested objects": _nested(100_000, '{"a":', "}"),
    "nested and open": b"[" * 100_000,
    "nested behind strings": b'["\\"]]]]\\\\", ' + _nested(100_000) + b"]",
    "nested a little too deeply": _nested(checked_json.DEEPEST + 1),
    "NaN": b'{"schema": NaN}',
    "infinity": b'{"schema": -Infinity}',
    "a float too large": b'{"schema": 1e999}',
    "an integer too large": b'{"schema": ' + b"9" * 19 + b"9}",
    "an integer of 5,000 digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "a float of 5,000 digits": b'{"schema": 0.' + b"1" * 5000 + b"}",
    "a key twice": b'{"schema": 1, "schema": 1}',
}
"""Contents that are no JSON."""

OTHER_JSON: dict[str, bytes] = {
    "null": b"null",
    "a number": b"17",
    "a text": b'"sections"',
    "a list": b"[1, 2, 3]",
    "a list of pairs": b'[["schema", 1], ["kernels", {}]]',
    "an empty object": b"{}",
    "another object": b'{"name": "left-pad", "version": "1.3.0"}',
    "nested as deeply as allowed": _nested(checked_json.DEEPEST),
}
"""Valid JSON of the wrong kind."""


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 * 2**30)


def _large(path: Path) -> None:
    path.write_bytes(b"[" + b"[],[]," * 4_000_000 + b"[]]")


def _directory(path: Path) -> None:
    path.mkdir()


NOT_FILES: dict[str, Callable[[Path], None]] = {
    "10 GB of nothing": _sparse,
    "24 MB of lists": _large,
    "a folder": _directory,
    "a pipe": lambda path: os.mkfifo(path),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}

CONTENTS: dict[str, Callable[[Path], object]] = {
    **{name: lambda path, data=data: path.write_bytes(data) for name, data in (NOT_JSON | OTHER_JSON).items()},
    **NOT_FILES,
}


def put(content: str, path: Path) -> None:
    """Replaces the existing file."""
    path.unlink(missing_ok=True)
    CONTENTS[content](path)


# ---- convolutions with a bad tuning file


def convolve() -> list[str]:
    """Calls of several kinds, compared with float64; returns their warnings."""
    with settings.use(tuning_file=()):
        polyconv.conv2d(torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2))  # so that the next call plans again
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for shape in ((1, 16, 20, 20), (2, 16, 9, 11), (1, 16, 20, 20)):
            x, w = torch.randn(shape), torch.randn(16, 16, 3, 3, requires_grad=True)
            y = polyconv.conv2d(x, w, padding=1)
            (dw,) = torch.autograd.grad(y.square().sum(), w)
            exact_w = w.detach().double().requires_grad_()
            exact = F.conv2d(x.double(), exact_w, padding=1)
            (exact_dw,) = torch.autograd.grad(exact.square().sum(), exact_w)
            assert (y.double() - exact).abs().max() <= 1e-4 * 12 * 3
            assert (dw.double() - exact_dw).abs().max() <= 1e-4 * exact_dw.abs().max()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("named", [True, False], ids=["named", "default"])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_tuning_file_that_is_bad_is_one_warning(tmp_path: Path, content: str, named: bool) -> None:
    path = tmp_path / "tuning.json"
    put(content, path)
    with settings.use(tuning_file=(path,) if named else None, cache_dir=tmp_path / "none" if named else tmp_path):
        told = convolve()
    assert len(told) == 1
    assert told[0].startswith("polyconv ignores a tuning file: ")
    assert str(path) in told[0]
    assert len(told[0]) < 700


def test_a_tuning_file_that_cannot_be_read() -> None:
    with public_folder() as folder, stranger(), settings.use(tuning_file=(folder / "t.json",), cache_dir=folder):
        tuning_file.update(folder / "t.json", Tuning())
        (folder / "t.json").chmod(0)
        told = convolve()
        assert ["Permission denied" in words for words in told] == [True]
        (folder / "t.json").chmod(0o600)
        assert convolve() == []


def test_a_folder_of_tuning_files_that_cannot_be_entered() -> None:
    with public_folder() as folder, stranger():
        (folder / "inner").mkdir(mode=0)
        with settings.use(tuning_file=(folder / "inner" / "t.json",), cache_dir=folder):
            assert ["Permission denied" in words for words in convolve()] == [True]
        (folder / "inner").chmod(0o700)


def test_nesting_is_refused_before_the_stack_is_asked(tmp_path: Path) -> None:
    """A program may have raised the recursion limit beyond its stack."""
    path, before = tmp_path / "t.json", sys.getrecursionlimit()
    path.write_bytes(_nested(5_000_000))
    sys.setrecursionlimit(10**8)
    try:
        with settings.use(tuning_file=(path,), cache_dir=tmp_path / "none"):
            told = convolve()
    finally:
        sys.setrecursionlimit(before)
    assert ["nested more than 32 levels deep" in words for words in told] == [True]


def test_many_threads_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text("{")
    here, told, barrier = backend_for(torch.device("cpu")).environment(), [], threading.Barrier(8)
    monkeypatch.setattr(warnings, "warn", lambda message, *_, **__: told.append(message))

    def ask() -> None:
        barrier.wait(30)
        tuning_lookup.find(KEY, here)

    with settings.use(tuning_file=(path,), cache_dir=tmp_path / "none"), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: ask(), range(8)))
    assert len(told) == 1


def test_a_file_that_was_repaired_is_followed(tmp_path: Path) -> None:
    path, here = tmp_path / "t.json", backend_for(torch.device("cpu")).environment()
    path.write_text("{")
    with settings.use(tuning_file=(path,), cache_dir=tmp_path / "none"):
        with pytest.warns(RuntimeWarning, match="is not JSON"):
            assert tuning_lookup.find(KEY, here) is None
        path.unlink()
        tuning_file.update(path, Tuning.of(here, {KEY: tuning_file.Entry("a", {"a": 1.0}, 2.0)}))
        assert tuning_lookup.find(KEY, here).entry.choice == "a"


# ---- wrong values in a tuning file


def tuning_json() -> Json:
    """A file for this machine, so that all of it is read."""
    entry = {"choice": "a", "seconds": {"a": 1.0, "b": 2}, "torch_seconds": 3.0, "measured": "2026-01-01T00:00:00Z"}
    here = backend_for(torch.device("cpu")).environment().as_json()
    section = {"environment": here, "entries": {KEY: entry}}
    return {"format": f"polyconv {tuning_file.KIND}", "schema": tuning_file.SCHEMA, "sections": [section]}


def with_value(value: Any, *place: Any) -> Callable[[Json], None]:
    def change(found: Any) -> None:
        for step in place[:-1]:
            found = found[step]
        if value is GONE:
            del found[place[-1]]
        else:
            found[place[-1]] = value

    return change


GONE = object()
ENTRY = ("sections", 0, "entries", KEY)
AT = f'sections[0].entries["{KEY}"]'
WRONG_VALUES: list[tuple[Any, tuple[Any, ...], str]] = [
    (GONE, ("format",), "is not a tuning file"),
    ("another", ("format",), "is not a tuning file"),
    ({}, ("format",), "is not a tuning file"),
    (GONE, ("schema",), 'it has no "schema"'),
    (3, ("schema",), "has schema 3; this version of polyconv reads 2"),
    (True, ("schema",), "schema: expected a number, found true or false"),
    ("1", ("schema",), "schema: expected a number, found a text"),
    (GONE, ("sections",), 'it has no "sections"'),
    ({}, ("sections",), "sections: expected a list, found an object"),
    (None, ("sections",), "sections: expected a list, found null"),
    (["x"], ("sections",), "sections[0]: expected an object, found a text"),
    ([{}, 1], ("sections",), 'sections[0]: it has no "environment"'),
    (GONE, ("sections", 0, "entries"), 'sections[0]: it has no "entries"'),
    ([["a", "b"]], ("sections", 0, "environment"), "sections[0].environment: expected an object, found a list"),
    ([], ("sections", 0, "entries"), "sections[0].entries: expected an object, found a list"),
    (["ab"], ENTRY, f"{AT}: expected an object, found a list"),
    ("x", ENTRY, f"{AT}: expected an object, found a text"),
    (None, ENTRY, f"{AT}: expected an object, found null"),
    ({}, ENTRY, f'{AT}: it has no "seconds"'),
    ({}, (*ENTRY, "choice"), f"{AT}.choice: expected a text, found an object"),
    ([], (*ENTRY, "choice"), f"{AT}.choice: expected a text, found a list"),
    (1, (*ENTRY, "choice"), f"{AT}.choice: expected a text, found a number"),
    (GONE, (*ENTRY, "choice"), f'{AT}: it has no "choice"'),
    ("a\0", (*ENTRY, "choice"), f"{AT}.choice: expected a text without control characters"),
    (["a"], (*ENTRY, "seconds"), f"{AT}.seconds: expected an object, found a list"),
    ("1.0", (*ENTRY, "seconds", "a"), f"{AT}.seconds.a: expected a number, found a text"),
    (False, (*ENTRY, "seconds", "a"), f"{AT}.seconds.a: expected a number, found true or false"),
    (None, (*ENTRY, "torch_seconds"), f"{AT}.torch_seconds: expected a number, found null"),
    (0, (*ENTRY, "measured"), f"{AT}.measured: expected a text, found a number"),
]


@pytest.mark.parametrize(("value", "place", "words"), WRONG_VALUES, ids=[words for *_, words in WRONG_VALUES])
def test_a_wrong_value_in_a_tuning_file_is_named(
    tmp_path: Path, value: Any, place: tuple[Any, ...], words: str
) -> None:
    path, found = tmp_path / "t.json", tuning_json()
    with_value(value, *place)(found)
    path.write_text(json.dumps(found))
    with settings.use(tuning_file=(path,), cache_dir=tmp_path / "none"):
        told = convolve()
    assert [words in said for said in told] == [True], told
    with pytest.raises(TuningError, match="not overwritten"):
        tuning_file.update(path, Tuning())
    assert json.loads(path.read_text()) == found


def test_a_choice_that_nobody_knows_is_not_run(tmp_path: Path) -> None:
    path, found = tmp_path / "t.json", tuning_json()
    section = found["sections"][0]
    with preferences.watched() as seen, settings.use(tuning_file=()):
        convolve()
    (entry,) = section["entries"].values()
    for odd in ("", "magic", "[/red]", "é" * 10_000, "f(4,3) x f(4,3), tile lanes"):
        section["entries"] = {decision.key: {**entry, "choice": odd} for decision in seen}
        path.write_text(json.dumps(found))
        with settings.use(tuning_file=(path,), cache_dir=tmp_path / "none"):
            assert convolve() == []


def test_sections_of_other_versions_may_hold_anything(tmp_path: Path) -> None:
    path, found = tmp_path / "t.json", tuning_json()
    odd: list[Json] = [{"choice": {}}, {"choice": [], "seconds": {}}, {"seconds": {"a": "b"}, "choice": "a"}]
    for number, entry in enumerate(odd):
        for _ in range(2):  # the same environment twice: merged
            environment = {"polyconv": "99.0", "number": number, "odd": [{}]}
            found["sections"].append({"environment": environment, "entries": {"k": entry, KEY: {}}})
    path.write_text(json.dumps(found))
    with settings.use(tuning_file=(path,), cache_dir=tmp_path / "none"):
        assert convolve() == []
    written = tuning_file.update(path, Tuning())
    assert {json.dumps(entry) for section in written.sections for entry in section.entries.values()} >= {
        json.dumps(entry) for entry in odd
    }


# ---- the cache and the bundle


def machine(folder: Path, code: bytes = b"machine code") -> KernelCache:
    return KernelCache(folder, include_dirs=[KERNELS], compiler=lambda *_: code)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    writer = BundleWriter(tmp_path / "kernels", machine(tmp_path / "machine"))
    writer.add(SPEC, ARCH)
    writer.finish(["a test"])
    return tmp_path / "kernels"


def ask(folder: Path, code: bytes, bundle: Path | None = None) -> tuple[bytes, list[str]]:
    with warnings.catch_warnings(record=True) as caught, settings.use(kernels=bundle):
        warnings.simplefilter("always")
        found = [machine(folder, code).get(SPEC, ARCH) for _ in range(2)]
    return found[-1], [str(warning.message) for warning in caught]


@pytest.mark.parametrize("content", CONTENTS)
def test_a_bad_description_in_the_cache_is_one_warning_and_compiled_again(tmp_path: Path, content: str) -> None:
    cache = machine(tmp_path / "cache")
    cache.get(SPEC, ARCH)
    put(content, cache.entry(SPEC, ARCH) / "meta.json")
    found, told = ask(tmp_path / "cache", b"compiled again")
    assert found == b"compiled again"
    assert ["is refused" in words and "meta.json" in words for words in told] == [True]
    assert ask(tmp_path / "cache", b"another") == (b"compiled again", [])


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("file", ["manifest.json", "meta.json"])
def test_a_bad_file_in_a_bundle_is_one_warning_and_compiled(
    bundle: Path, tmp_path: Path, content: str, file: str
) -> None:
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    put(content, (bundle if file == "manifest.json" else entry) / file)
    found, told = ask(tmp_path / "cache", b"compiled", bundle)
    assert found == b"compiled"
    assert [file in words and words.endswith("compiles the kernel instead") for words in told] == [True]


WRONG_MANIFESTS: list[tuple[Any, tuple[Any, ...], str]] = [
    (GONE, ("kernels",), "is not the manifest of a bundle"),
    ([], ("kernels",), "kernels: expected an object, found a list"),
    (["x"], ("kernels", "NAME"), "expected an object, found a list"),
    ({}, ("kernels", "NAME"), 'it has no "symbol"'),
    ({"symbol": "s", "arch": 70}, ("kernels", "NAME"), ".arch: expected a text, found a number"),
    ([], ("kernels", "NAME", "cubin"), ".cubin: expected a text, found a list"),
    ({}, ("kernels", "a\0b"), 'kernels["a\\u0000b"]: no entry can have this name'),
    ({}, ("kernels", "../other"), 'kernels["../other"]: no entry can have this name'),
    (GONE, ("schema",), "has another schema than 1"),
    (2, ("schema",), "has another schema than 1"),
    (True, ("schema",), "has another schema than 1"),
    ({}, ("made_for",), "made_for: expected a list, found an object"),
    ([1], ("made_for",), "made_for[0]: expected a text, found a number"),
]


@pytest.mark.parametrize(("value", "place", "words"), WRONG_MANIFESTS, ids=[words for *_, words in WRONG_MANIFESTS])
def test_a_wrong_value_in_a_manifest_is_named(
    bundle: Path, tmp_path: Path, value: Any, place: tuple[Any, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    found = json.loads((bundle / "manifest.json").read_text())
    with_value(value, *(entry.name if step == "NAME" else step for step in place))(found)
    (bundle / "manifest.json").write_text(json.dumps(found))
    assert [words in said for said in ask(tmp_path / "cache", b"compiled", bundle)[1]] == [True]
    assert cli.main(["cache", "verify", "--directory", str(bundle)]) == 1
    assert words in capsys.readouterr().err
    with settings.use(kernels=bundle):
        (finding,) = (one for one in doctor_environment.findings() if one.name == "bundle")
    assert words in finding.text


WRONG_DESCRIPTIONS: list[tuple[Any, str, str]] = [
    (GONE, "cubin", 'it has no "cubin"'),
    ([], "cubin", "cubin: expected a text, found a list"),
    ("a\x1b]0;b\a", "symbol", "symbol: expected a text without control characters"),
    ({}, "symbol", "symbol: expected a text, found an object"),
    (70, "arch", "arch: expected a text, found a number"),
    (None, "compiler", "compiler: expected a text, found null"),
    ([], "source", "source: expected a text, found a list"),
    ("sm_80", "arch", "meta.json does not belong to this entry"),
    ([], "headers", "meta.json does not belong to this entry"),
]


@pytest.mark.parametrize(("value", "name", "words"), WRONG_DESCRIPTIONS)
def test_a_wrong_value_in_a_description_is_named(
    tmp_path: Path, value: Any, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = machine(tmp_path / "cache")
    cache.get(SPEC, ARCH)
    entry = cache.entry(SPEC, ARCH)
    found = json.loads((entry / "meta.json").read_text())
    with_value(value, name)(found)
    (entry / "meta.json").write_text(json.dumps(found))
    with settings.use(cache_dir=tmp_path / "cache"):
        assert cli.main(["cache", "verify"]) == 1
        assert words in capsys.readouterr().out
        assert cli.main(["cache", "list"]) == 0
        assert cli.main(["cache", "info"]) == 0
    found_code, told = ask(tmp_path / "cache", b"compiled again")
    assert found_code == b"compiled again"
    assert [words in said for said in told] == [True]


# ---- commands that name the file


@pytest.mark.parametrize("content", CONTENTS)
def test_a_command_that_names_a_bad_file_says_so(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    put(content, path)
    assert cli.main(["tune", "--merge", str(path), "-o", str(tmp_path / "out.json")]) == 1
    assert capsys.readouterr().err.startswith(f"polyconv tune: {path}")
    with settings.use(tuning_file=(path,), cache_dir=tmp_path / "none"):
        (finding,) = (one for one in doctor_environment.findings() if one.name == "tuning")
    assert finding.state == "warning"


def test_an_architecture_of_many_digits_can_be_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = machine(tmp_path / "cache")
    cache.get(SPEC, ARCH)
    path = cache.entry(SPEC, ARCH) / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "arch": "sm_" + "9" * 5000}))
    with settings.use(cache_dir=tmp_path / "cache"):
        assert cli.main(["cache", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


# ---- random damage


def mutations(data: bytes, count: int, seed: int) -> list[bytes]:
    """The file with bytes flipped, cut out, doubled, or values replaced."""
    rng, found = random.Random(seed), []
    values = [b"null", b"[]", b"{}", b"1e5", b'""', b"-1", b"true", b'{"a": []}', b"[[[]]]", b"\xff", b'"\\ud8']
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at, until = sorted(rng.randrange(len(changed) + 1) for _ in range(2))
            match rng.randrange(4):
                case 0:
                    changed[at:at] = bytes([rng.randrange(256)])
                case 1:
                    del changed[at : min(until, at + 30)]
                case 2:
                    changed[at:at] = changed[at:until]
                case 3:
                    changed[at : at + rng.randrange(12)] = rng.choice(values)
        found.append(bytes(changed))
    return found


def substitutions(found: Any) -> list[Any]:
    """The document with each value, at every level, replaced by one of every kind."""
    replaced: list[Any] = [None, True, 0, 1.5, "", "x", [], ["x"], [["a", "b"]], {}, {"x": []}]
    changed = list(replaced)
    members = found.items() if isinstance(found, Mapping) else enumerate(found) if isinstance(found, list) else ()
    for key, inner in members:
        for other in substitutions(inner):
            copy = deepcopy(found)
            copy[key] = other
            changed.append(copy)
    return changed


def all_variants(found: Json) -> list[bytes]:
    return mutations(json.dumps(found).encode(), 400, 1) + [json.dumps(one).encode() for one in substitutions(found)]


def test_no_tuning_file_raises_anything_but_its_own_error() -> None:
    here, read = backend_for(torch.device("cpu")).environment(), 0
    for data in all_variants(tuning_json()):
        try:
            found = tuning_file.parse(data, "t.json")
        except TuningError as error:
            assert str(error).startswith("t.json ")  # noqa: PT017 - most of them raise
            continue
        read += 1
        found.find(KEY, here)
        tuning_file.parse(tuning_file.merge((found, found)).text().encode(), "t.json")
    assert read > 20


def test_no_description_and_no_manifest_raises_anything_but_its_own_error(bundle: Path, tmp_path: Path) -> None:
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    kernel = machine(tmp_path / "machine").facts(SPEC, ARCH)
    for path in (entry / "meta.json", bundle / "manifest.json"):
        good = path.read_bytes()
        for data in all_variants(json.loads(good)):
            path.write_bytes(data)
            for ask_for in (
                lambda: Bundle(bundle).store.find(kernel),
                lambda: Bundle(bundle).check(),
                lambda: Store(bundle).rows(),
            ):
                with contextlib.suppress(EntryError, BundleError):
                    ask_for()
        path.write_bytes(good)
    assert Bundle(bundle).check() == {}


@pytest.mark.parametrize("data", [*NOT_JSON.values()], ids=NOT_JSON)
def test_the_loader_raises_its_own_error(data: bytes) -> None:
    with pytest.raises(DocumentError, match=r"^a\.json "):
        checked_json.parse(data, "a.json")


def test_what_is_as_deep_as_allowed_is_read() -> None:
    for data in (_nested(checked_json.DEEPEST), b'{"[[[[": "' + b"[{" * 1000 + b'\\"[[", "\\\\": [1]}'):
        assert checked_json.parse(data, "a.json").found == json.loads(data)
    assert checked_json.parse('{"name": "\\ud83d\\ude00 é"}'.encode(), "a.json").member("name").text() == "😀 é"


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """Root could replace a device: a file in place of /dev/null would break the system."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is not a file, and nothing is put in its place"):
        replace_whole(tmp_path / "pipe", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert (tmp_path / "pipe").is_fifo()
