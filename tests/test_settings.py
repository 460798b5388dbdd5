"""Settings: defaults, environment variables, scopes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import polyconv
from commands import environment
from interrupts import interrupted_at_each_step
from polyconv import backend, settings
from polyconv.autotune import preferences
from polyconv.runtime import scopes, state_version, warn_once
from polyconv.settings import Settings
from recording import Recorder


def test_defaults() -> None:
    found = Settings.from_environment({"XDG_CACHE_HOME": "/c"})
    assert found == Settings(cache_dir=Path("/c/polyconv"))
    assert found.workspace_bytes == 64 * 2**20
    assert Settings.from_environment({}).cache_dir == Path.home() / ".cache" / "polyconv"


def test_environment() -> None:
    found = Settings.from_environment(
        {
            "POLYCONV_CACHE_DIR": "/a",
            "POLYCONV_WORKSPACE_BYTES": "0",
            "POLYCONV_TOLERANCE": "1e-5",
            "POLYCONV_TUNING_FILE": "",
        }
    )
    assert found == Settings(Path("/a"), 0, 1e-5, None)


def test_tuning_files() -> None:
    def read(text: str) -> tuple[Path, ...] | None:
        return Settings.from_environment({"POLYCONV_TUNING_FILE": text}).tuning_file

    assert read("a.json") == (Path("a.json"),)
    assert read("a.json:/b/c.json") == (Path("a.json"), Path("/b/c.json"))
    assert read("~/a.json") == (Path.home() / "a.json",)
    assert read("off") == ()
    assert read("") is None
    for text in ("a.json", "a.json:/b/c.json", "off", ""):
        assert replace(settings.current(), tuning_file=read(text)).as_variables()["POLYCONV_TUNING_FILE"] == text


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WORKSPACE_BYTES", "64M"),
        ("WORKSPACE_BYTES", "-1"),
        ("TOLERANCE", "-1"),
        ("TOLERANCE", "nan"),
        ("JIT", "maybe"),
        ("OUTPUT_POOL", "much"),
        ("OUTPUT_POOL", "-1"),
        ("OUTPUT_POOL", "1.5G"),
        ("INSTRUCTION_SET", "avx1024"),
    ],
)
def test_what_cannot_be_read_is_an_error(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"cannot read POLYCONV_{variable}='{value}'"):
        Settings.from_environment({f"POLYCONV_{variable}": value})


@pytest.mark.parametrize("name", ["cache_dir", "kernels", "profile", "tuning_file"])
def test_a_path_may_begin_with_a_tilde(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands no ``~`` in values of ``env``, service files or container settings."""
    monkeypatch.setenv("HOME", "/home/me")
    value = getattr(Settings.from_environment({f"POLYCONV_{name.upper()}": "~/x"}), name)
    assert value in (Path("/home/me/x"), (Path("/home/me/x"),))
    with pytest.raises(settings.SettingsError, match=f"cannot read POLYCONV_{name.upper()}='~nobody-of-that-name/x'"):
        Settings.from_environment({f"POLYCONV_{name.upper()}": "~nobody-of-that-name/x"})


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("256M", 2**28), ("256 MiB", 2**28), ("2g", 2**31), ("1GB", 2**30), ("64k", 2**16)],
)
def test_the_size_of_the_output_pool(text: str, size: int) -> None:
    found = Settings.from_environment({"POLYCONV_OUTPUT_POOL": text})
    assert found.output_pool == size
    assert Settings.from_environment(found.as_variables()) == found
    assert Settings().output_pool == 2**30


@pytest.mark.parametrize("text", ["AVX2", "avx2", "sse4", "avx512"])
def test_the_instruction_set(text: str) -> None:
    found = Settings.from_environment({"POLYCONV_INSTRUCTION_SET": text})
    assert found.instruction_set == text.lower()
    assert Settings().instruction_set is None


# ---- unknown variables


def first_read(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    """Warnings of a new process when it first reads its settings, twice."""
    monkeypatch.setattr(warn_once, "_said", {})
    for kept in ("_initial", "_process"):
        monkeypatch.setattr(settings, kept, getattr(settings, kept))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            monkeypatch.setattr(settings, "_current", None)
            settings.current()
    return [str(warning.message) for warning in caught]


def test_a_misspelt_variable_is_said_once_with_the_closest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = first_read(monkeypatch, POLYCONV_TOLERENCE="1e-5")
    assert said == "POLYCONV_TOLERENCE is set, but polyconv has no such setting: did you mean POLYCONV_TOLERANCE?"
    (said,) = first_read(monkeypatch, POLYCONV_ZZZ="1", POLYCONV_TOLERENCE="")
    assert said.startswith("POLYCONV_ZZZ is set, but polyconv has no such setting: there are POLYCONV_ALLOW_LOW_PREC")


def test_variables_of_the_build_and_of_tests_are_not_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting name read in a checkout."""
    root = Path(__file__).resolve().parents[1]
    files = [root / "setup.py", *(p for d in ("src", "csrc", "tests", "tools") for p in (root / d).rglob("*.py"))]
    read = {
        name
        for path in files
        for name in re.findall(r"environ(?:\.get\(|\[)\"(POLYCONV_\w+)\"", path.read_text(encoding="utf-8"))
    }
    assert {"POLYCONV_BUILD_NATIVE", "POLYCONV_BUILD_DIR", "POLYCONV_NIGHTLY"} <= read
    unset = {name: "1" for name in read if name not in Settings().as_variables()}
    assert first_read(monkeypatch, **unset) == []


def test_importing_says_nothing_of_a_misspelt_variable() -> None:
    program = "import polyconv, polyconv.settings, polyconv.nn, polyconv.functional"
    command = [sys.executable, "-W", "error", "-c", program]
    subprocess.run(command, env=environment(POLYCONV_TOLERENCE="1"), check=True)


def test_kernels_that_are_compiled_ahead_of_time() -> None:
    found = Settings.from_environment({"POLYCONV_JIT": "OFF", "POLYCONV_KERNELS": "/k"})
    assert (found.jit, found.kernels) == (False, Path("/k"))
    assert Settings.from_environment({"POLYCONV_JIT": "on"}).jit


def test_prints_what_would_set_it() -> None:
    for files in ("", "off", "/t", f"/t{os.pathsep}/u"):
        environ = {"POLYCONV_CACHE_DIR": "/a", "POLYCONV_JIT": "off", "POLYCONV_TUNING_FILE": files}
        found = Settings.from_environment(environ)
        assert Settings.from_environment(found.as_variables()) == found


def test_use() -> None:
    before = settings.current()
    with settings.use(workspace_bytes=1) as inside:
        assert settings.current() is inside
        assert inside.workspace_bytes == 1
        assert inside.tolerance == before.tolerance
    assert settings.current() is before


def test_blocks_of_several_threads_take_back_only_what_they_changed() -> None:
    before = settings.current()
    loose, exact, small = settings.use(tolerance=1e-2), settings.use(tolerance=0.0), settings.use(workspace_bytes=1)
    for block in (loose, exact, small):
        block.__enter__()
    loose.__exit__(None, None, None)
    assert settings.current() == replace(before, tolerance=0.0, workspace_bytes=1)
    exact.__exit__(None, None, None)
    assert settings.current() == replace(before, workspace_bytes=1)
    small.__exit__(None, None, None)
    assert settings.current() is before


def test_a_block_ends_what_was_set_in_it() -> None:
    before = settings.current()
    with settings.use(workspace_bytes=1):
        settings.set_tolerance(1e-2)
        with settings.use(tolerance=0.0):
            assert settings.current().tolerance == 0
        assert settings.current() == replace(before, workspace_bytes=1, tolerance=1e-2)
    assert settings.current() is before
    with settings.allow_low_precision():
        settings.set_tolerance(1e-2)
    assert settings.current() == replace(before, tolerance=1e-2)
    settings.set_tolerance(before.tolerance)
    assert settings.current() == before


def test_blocks_of_threads_that_allow_low_precision_end_in_any_order() -> None:
    before = settings.current()
    one, other = settings.allow_low_precision(False), settings.allow_low_precision(False)
    tuned = settings.use(tuning_file=())
    for block in (one, tuned, other):
        block.__enter__()
    one.__exit__(None, None, None)
    assert not settings.current().allow_low_precision
    other.__exit__(None, None, None)
    assert settings.current() == replace(before, tuning_file=())
    tuned.__exit__(None, None, None)
    assert settings.current() is before


def test_what_is_allowed_without_a_block_holds_for_the_block_around_it() -> None:
    before = settings.current()
    with settings.use(workspace_bytes=1):
        settings.allow_low_precision(False)
        assert settings.current() == replace(before, workspace_bytes=1, allow_low_precision=False)
    assert settings.current() is before
    settings.allow_low_precision(False)
    assert settings.current() == replace(before, allow_low_precision=False)
    settings.allow_low_precision()
    assert settings.current() == before


def test_a_block_refuses_an_instruction_set_that_there_is_not() -> None:
    before = settings.current()
    with pytest.raises(ValueError, match="expected one of avx512, avx2, sse4; got 'avx1024'"):
        settings.use(instruction_set="avx1024")
    assert settings.current() is before


def test_use_names_an_unknown_setting() -> None:
    with pytest.raises(TypeError, match="nonsense"), settings.use(nonsense=1):
        pass


def test_prints_as_variables() -> None:
    assert "POLYCONV_WORKSPACE_BYTES=67108864" in str(settings.current())


# ---- the state version


def test_a_state_that_comes_back_has_the_number_that_it_had() -> None:
    """So that plans are found again: a training loop may enter a scope in each step."""
    before = state_version.current()
    inside = set()
    for _ in range(3):
        with polyconv.tolerance(1e-3):
            inside.add(state_version.current())
        assert state_version.current() == before
    assert len(inside) == 1
    assert before not in inside
    forced = preferences.Forced({"key": "candidate"})
    with forced:
        inside.add(state_version.current())
        with preferences.watched():
            inside.add(state_version.current())
        with backend.override("cpu", Recorder()):
            inside.add(state_version.current())
        set_before = polyconv.set_tolerance(1e-2)
        inside.add(state_version.current())
        polyconv.set_tolerance(set_before)
    with forced:
        assert state_version.current() in inside
    assert len(inside) == 5
    assert state_version.current() == before


def test_nobody_learns_a_number_amid_a_change() -> None:
    """A signal handler may change settings, in the thread that is changing them; the version is then invalid."""
    asked: list[int] = []
    stack: scopes.ScopeStack[int] = scopes.ScopeStack(lambda: asked.append(state_version.current()))
    numbers = [0]
    state_version.include(lambda: numbers[0])
    try:
        before = state_version.current()
        numbers[0] = 1
        stack.put(scopes.ScopeEntry(1))
        numbers[0] = 2  # the setting being changed
        stack.put(scopes.ScopeEntry(2))
        assert len({before, state_version.current(), *asked}) == 3
    finally:
        state_version._sources.pop()
        state_version.changed()


# ---- Ctrl-C


def loosened() -> None:
    with polyconv.tolerance(1e-2):
        assert settings.current().tolerance == 1e-2
        with settings.use(workspace_bytes=0), polyconv.tolerance(0):
            assert settings.current().tolerance == 0


def test_an_interrupt_at_any_step_leaves_no_setting_behind() -> None:
    before = settings.current()
    for step in interrupted_at_each_step(loosened, settings, state_version, scopes):
        assert settings.current() is before, step
        assert settings.changes == "", step


def test_an_interrupt_at_any_step_ends_a_block_that_allows_low_precision() -> None:
    before = settings.current()
    entered: list[AbstractContextManager[None]] = []

    def enter() -> None:
        entered.append(polyconv.allow_low_precision())
        entered[0].__enter__()

    enter()
    for step in interrupted_at_each_step(
        lambda: entered[0].__exit__(None, None, None), settings, state_version, scopes
    ):
        entered.clear()  # as a with statement does
        assert settings.current() == before, step
        enter()
    assert settings.current() == before


SWITCHES = {"allow_low_precision": polyconv.allow_low_precision, "benchmark": polyconv.benchmark}
NOT_THE_DEFAULT = {"allow_low_precision": False, "benchmark": True}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("nested", [False, True])
def test_an_interrupt_at_any_step_of_a_switch_leaves_nothing_behind(name: str, nested: bool) -> None:
    """From the constructor call, through entry into its block, to its exit."""
    switch, before, entered = SWITCHES[name], settings.current(), state_version.current()
    on = NOT_THE_DEFAULT[name]

    def block() -> None:
        with switch(on):
            assert getattr(settings.current(), name) is on
            if nested:
                with switch(not on):
                    assert getattr(settings.current(), name) is not on

    steps = 0
    for step in interrupted_at_each_step(block, settings, state_version, scopes):
        assert settings.current() == before, step
        assert state_version.current() == entered, step
        assert not settings._changes.entries, step
        steps += 1
    assert steps > 300
    assert settings.current() == before


@pytest.mark.parametrize("name", SWITCHES)
def test_all_uses_of_a_switch(name: str) -> None:
    on = NOT_THE_DEFAULT[name]

    def is_on() -> bool:
        return getattr(settings.current(), name) is on

    switch, before = SWITCHES[name], settings.current()
    made = switch(on)
    assert is_on()
    with made, made:
        with made:
            assert is_on()
        assert is_on()
    assert settings.current() == before
    for _ in range(2):  # again
        with made, made:
            assert is_on()
        assert settings.current() == before
    del made
    assert settings.current() == before

    with ExitStack() as stack:
        assert stack.enter_context(switch(on)) is None  # type: ignore[func-returns-value]
        assert is_on()
    assert settings.current() == before

    inside = switch(on)(is_on)  # type: ignore[operator]
    assert not is_on()
    assert [inside(), inside(), is_on()] == [True, True, False]
    del inside
    assert settings.current() == before

    with pytest.raises(KeyError), switch(on):
        raise KeyError
    assert settings.current() == before

    made = switch(on)
    del made
    assert is_on()
    switch(not on)
    assert settings.current() == before


def test_an_interrupt_at_any_step_leaves_no_choice_and_no_backend_behind() -> None:
    before, cpu = state_version.current(), backend.backend_for(torch.device("cpu"))
    forced = preferences.Forced({"key": "candidate"})

    def force() -> None:
        with forced, preferences.watched(alone=True) as seen:
            assert seen == []
        with backend.override("cpu", Recorder()) as recorder:
            assert backend.backend_for(torch.device("cpu")) is recorder

    for step in interrupted_at_each_step(force, preferences, state_version, scopes, backend):
        forced = preferences.Forced({"key": "candidate"})
        assert state_version.current() == before, step
        assert backend.backend_for(torch.device("cpu")) is cpu, step


def test_a_block_can_be_entered_again_and_decorate() -> None:
    before = settings.current()
    block = polyconv.tolerance(1e-3)
    with block, block:
        settings.set_tolerance(1e-2)
    assert settings.current() is before
    with block:
        assert settings.current().tolerance == 1e-3

    @polyconv.tolerance(1e-3)
    def inside() -> float:
        return settings.current().tolerance

    assert inside() == inside() == 1e-3
    assert settings.current() is before


# ---- without a home directory


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert Settings.from_environment({}) == Settings()
    assert Settings.from_environment({"POLYCONV_CACHE_DIR": "/a"}).cache_dir == Path("/a")
    assert Settings.from_environment({"XDG_CACHE_HOME": "/a"}).cache_dir == Path("/a/polyconv")
    with settings.use(cache_dir=None), pytest.raises(ValueError, match="Set POLYCONV_CACHE_DIR to a folder"):
        settings.cache_folder()
