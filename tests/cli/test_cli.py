"""The command line as a whole: version, help and examples, errors, interrupts, completion, imports."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import polyconv
from commands import command_line, environment, python
from commands import polyconv as command
from polyconv import cli
from polyconv.cli import _options
from polyconv.cpu import native
from polyconv.measure.workloads import WorkloadError, find
from polyconv.util import console

WITH_TORCH = "the package's public names need torch; help and completion do not"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"polyconv {polyconv.__version__}\n"


@pytest.mark.parametrize("module", ["polyconv", "polyconv_cli"])
def test_module_runs(module: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", module, "--version"], env=environment(), capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"polyconv {polyconv.__version__}\n"


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert "usage: polyconv" in printed
    assert all(f"\n  {name} " in printed for name in cli.COMMANDS)


def test_a_subcommand_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = types.ModuleType("polyconv.cli.hello")
    module.add_arguments = lambda parser: parser.add_argument("--name")  # type: ignore[attr-defined]
    module.run = lambda args: seen.append(args.name) or 3  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "polyconv.cli.hello", module)
    monkeypatch.setitem(cli.COMMANDS, "hello", "greets")
    assert cli.main(["hello", "--name", "x"]) == 3
    assert seen == ["x"]


# ---- help


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_ends_with_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = help_of(name, capsys)
    _, heading, after = printed.rpartition("\nexample")
    assert heading, f"polyconv {name} --help has no example"
    examples = [line.strip() for line in after.splitlines() if line.strip().startswith("polyconv ")]
    assert examples
    for example in examples:
        words = shlex.split(example.partition(" > ")[0])
        assert words[:2] == ["polyconv", name]
        cli.command_parser(name).parse_args(words[2:])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_json_is_a_flag_of_every_command(name: str) -> None:
    (action,) = (a for a in cli.command_parser(name)._actions if "--json" in a.option_strings)
    assert action.nargs == 0


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_options_of_one_name_mean_one_thing(name: str) -> None:
    destinations = {"--pass": "passes", "--arch": "archs", "--device": "device", "--output": "output", "-o": "output"}
    for action in cli.command_parser(name)._actions:
        for option in action.option_strings:
            assert destinations.get(option, action.dest) == action.dest


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_fits_a_narrow_window(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except commands, which are copied as one line, and lists."""
    monkeypatch.setenv("COLUMNS", "60")
    paragraphs = help_of(name, capsys).split("\n\n")
    assert any(len(paragraph.splitlines()) > 1 for paragraph in paragraphs)
    for paragraph in paragraphs[1:]:
        lines = paragraph.splitlines()
        if len({len(line) - len(line.lstrip()) for line in lines}) == 1:
            assert max(map(len, lines)) <= 60
    cli.main([])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_wide_windows_do_not_make_wide_paragraphs() -> None:
    text = "one two three " * 40 + "\n\nlist:\n  of   columns\n  in   lines"
    filled = _options.Help("polyconv", width=300)._fill_text(text, 300, "")
    assert max(map(len, filled.splitlines())) in range(100, 121)
    assert filled.endswith("list:\n  of   columns\n  in   lines")


def test_what_commands_promise_they_take() -> None:
    assert "model" not in cli.COMMANDS["tune"]
    with pytest.raises(WorkloadError):
        find("torchvision.models:resnet50")


def test_without_rich_tables_are_plain() -> None:
    poison = "import sys; sys.modules['rich'] = None; from polyconv_cli import main; sys.exit(main())"
    assert python(poison, "cache", POLYCONV_CACHE_DIR="/nowhere").startswith("/nowhere: 0 kernels")


ROWS = [["layer", "1.25", "F(4,3) x F(4,3), tile lanes"], [], ["other", "10.5", "direct"]]


@pytest.mark.parametrize(("width", "drawn", "folded"), [(80, True, False), (44, True, True), (25, False, False)])
def test_numbers_of_a_table_stay_in_one_piece(
    width: int, drawn: bool, folded: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(console, "WIDE", width)
    console.print_table("title", ("name", "milliseconds", "plan"), ROWS, left=1)
    printed = capsys.readouterr().out
    assert ("│" in printed) is drawn
    assert all(word in printed for word in ("title", "milliseconds", "layer", "1.25", "10.5"))
    assert ("F(4,3) x F(4,3), tile lanes" not in printed) is folded


def test_progress_says_what_is_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 60.0, 200.0, 260.0, 264.0])
    monkeypatch.setattr(console, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    with console.progress() as shown:
        shown.expect(4)
        for _ in range(4):
            shown.step("a piece")
    assert capsys.readouterr().err.splitlines() == [
        "1/4 a piece, about 3 min left",
        "2/4 a piece, about 3 min left",
        "3/4 a piece, about 87 s left",
        "4/4 a piece",
    ]
    assert [console.duration_text(s) for s in (9.6, 89, 91, 5399, 5400)] == ["10 s", "89 s", "2 min", "90 min", "2 h"]


# ---- imports that must not happen


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", "--help"],
        ["cache", "--help"],
        ["bench", "--help"],
        ["cache"],
        ["plan", "W1", "--json"],
        [],
    ],
    ids=" ".join,
)
def test_what_needs_no_torch_does_not_import_it(arguments: list[str], tmp_path: Path) -> None:
    script = (
        "import sys, atexit\n"
        "heavy = ('torch', 'rich', 'cuda.core')\n"
        "atexit.register(lambda: print([m for m in heavy if m in sys.modules], file=sys.stderr))\n"
        "from polyconv_cli import main\n"
        "sys.exit(main())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment(POLYCONV_CACHE_DIR=str(tmp_path)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch" not in ran.stderr, WITH_TORCH
    assert "cuda" not in ran.stderr
    assert "usage: polyconv" in ran.stdout or arguments in (["cache"], ["plan", "W1", "--json"])


def test_the_package_is_whole_once_it_is_asked_for() -> None:
    script = (
        "import sys; from polyconv_cli import defer; defer('polyconv')\n"
        "import polyconv.problem, polyconv.settings\n"
        "from polyconv import settings\n"
        "assert 'torch' not in sys.modules\n"
        "from polyconv import Conv2d\n"
        "import polyconv, torch\n"
        "assert polyconv.__version__ and polyconv.settings is settings and polyconv.explain\n"
        "print(polyconv.Conv2d is Conv2d, dir(torch.ops.polyconv))\n"
        "try: polyconv.nonsense\n"
        "except AttributeError as error: print(error)"
    )
    said = python(script)
    assert said.startswith("True [")
    assert "no attribute 'nonsense'" in said


# ---- errors


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("plam", "did you mean plan?"),
        ("benhc", "did you mean bench?"),
        ("nonsense", "there are doctor, plan, bench"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_unknown_commands(typed: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([typed])
    printed = capsys.readouterr().err
    assert words in printed
    assert typed in printed


@pytest.mark.parametrize(("typed", "meant"), [("kb800", "kb80"), ("resnet50-3d", "resnet50-3b"), ("model", "models")])
def test_mistyped_workloads(typed: str, meant: str) -> None:
    with pytest.raises(WorkloadError, match=rf"no workload is called '{typed}'; did you mean {meant}\? There are W1"):
        find(typed)


@pytest.mark.parametrize("name", ["plan", "bench", "warmup", "inspect"])
def test_an_unknown_workload_is_wrong_usage(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arch = ["--arch", "sm_70"] if name in ("warmup", "inspect") else []
    assert cli.main([name, "W9", *arch]) == 2
    assert f"polyconv {name}: no workload is called 'W9'; there are W1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan", "bench", "tune", "warmup", "inspect"])
def test_a_file_after_json_is_told_where_to_go(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--json takes no file, so a file after it would be read as a workload."""
    with pytest.raises(SystemExit, match="2"):
        cli.main([name, "--json", "out.json"])
    assert (
        "'out.json' is a file, no workload; to write what --json prints: --json > out.json" in capsys.readouterr().err
    )


BY_ARGUMENTS = ["plan", "--in-channels", "8", "--out-channels", "8", "--kernel-size", "3"]
BY_ARGUMENTS += ["--input", "2", "8", "20", "20"]


def test_plan_takes_a_convolution_by_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*BY_ARGUMENTS, "--padding", "same", "--device", "t4", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [(plan["workload"], plan["pass"], plan["device"]) for plan in plans] == [
        ("Conv2d", kind, "Tesla T4") for kind in ("fprop", "dgrad", "wgrad")
    ]


@pytest.mark.parametrize("device", ["cpu", "v100"])
def test_plan_takes_one_axis(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*BY_ARGUMENTS[:-1], "--padding", "2", "1", "--device", device, "--json"]) == 0
    assert [plan["workload"] for plan in json.loads(capsys.readouterr().out)] == ["Conv1d"] * 3


@pytest.mark.parametrize("device", ["cpu", "v100"])
def test_plan_takes_three_axes(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*BY_ARGUMENTS[:-1], "9", "9", "--device", device, "--pass", "fprop"]
    assert cli.main([*arguments, "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["workload"] == "Conv3d"
    if device == "v100":
        assert plan["algorithm"].startswith("stacked inputs (")
        assert (plan["across"], plan["device"]) == ("depth", "Tesla V100")
        assert sum(part["times"] for part in plan["problems"]) == 2, "an image is a problem"
        refused = {"sum of slices", "stacked outputs", "whole volumes"}
        assert {one["name"] for one in plan["candidates"] if one["rejected"]} == refused
        assert all(part["launches"] for part in plan["problems"])


def test_plan_of_a_volume_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of ``explain``: the stacking, the plans of the 2-D problems, and why the sum does not run."""
    assert cli.main([*BY_ARGUMENTS[:-1], "9", "9", "--device", "v100", "--pass", "fprop"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "Conv3d: fprop 2x8x20x9x9, 8 channels, kernel 3x3x3, bias\n  runs stacked inputs on Tesla V100: "
    )
    assert "\n  2 problems across the depth, with the input slices of 3 taps stacked as" in said
    assert ":\n    2 times fprop 18x24x9x9" in said
    assert "\n  not sum of slices: estimated to take" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*BY_ARGUMENTS, "20", "20"], "--input takes batch, channels, and one to three axes; got 6 numbers"),
        (["plan"], "missing are --in-channels, --out-channels, --kernel-size, --input"),
        (["plan", "W1", "--groups", "2"], "W1 has its arguments already; leave out --groups"),
        ([*BY_ARGUMENTS, "--groups", "3"], "cannot be split into 3 groups"),
        ([*BY_ARGUMENTS, "--dilation", "16"], "nothing to compute: the output would have the shape (2, 8, -12, -12)"),
        ([*BY_ARGUMENTS, "--padding", "much"], "--padding takes numbers, 'same' or 'valid'; got 'much'"),
        ([*BY_ARGUMENTS, "--stride", "0"], "a stride is at least 1"),
        ([*BY_ARGUMENTS[:-3], "9", "20", "20"], "an input of 9 channels does not fit --in-channels 8"),
    ],
)
def test_plan_says_what_is_wrong_with_arguments(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(not native.is_available(), reason="without native kernels there are no other candidates")
def test_plan_names_an_option_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tiny-batch", "--device", "cpu", "--pass", "fprop"]) == 0
    brief = capsys.readouterr().out
    assert "other candidates (verbose names them)" in brief
    assert cli.main(["plan", "tiny-batch", "--device", "cpu", "--pass", "fprop", "--verbose"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(brief.splitlines())


def test_a_setting_that_cannot_be_read_is_wrong_usage() -> None:
    ran = command("cache", POLYCONV_JIT="perhaps")
    assert ran.returncode == 2
    assert ran.stderr == "polyconv cache: cannot read POLYCONV_JIT='perhaps': expected on or off\n"


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("polyconv.cli.hello")
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    module.run = lambda args: {}["bug"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "polyconv.cli.hello", module)
    monkeypatch.setitem(cli.COMMANDS, "hello", "greets")
    with pytest.raises(KeyError, match="bug"):
        cli.main(["hello"])


# ---- interruptions


def test_ctrl_c_leaves_no_traceback(tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = (
        "import signal, sys, time, types, pathlib\n"
        # A shell starts background jobs with SIGINT ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from polyconv_cli import defer, main\n"
        "defer('polyconv')\n"
        "from polyconv import cli\n"
        "slow = types.ModuleType('polyconv.cli.slow')\n"
        "slow.add_arguments = lambda parser: None\n"
        f"slow.run = lambda args: (pathlib.Path({str(started)!r}).touch(), [time.sleep(0.05) for _ in range(1200)])\n"
        "sys.modules['polyconv.cli.slow'] = slow\n"
        "cli.COMMANDS['slow'] = 'takes its time'\n"
        "sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "slow"], env=environment(), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "polyconv: interrupted\n")


def test_a_closed_pipe_leaves_no_traceback() -> None:
    """``polyconv plan all --json | head -1``: more output than a pipe holds."""
    process = subprocess.Popen(
        command_line("plan", "models", "--pass", "fprop", "--json"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "[\n"
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 141
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


# ---- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    pytest.importorskip("shtab")
    ran = command("completion", shell)
    assert ran.returncode == 0, ran.stderr
    assert all(name in ran.stdout for name in [*cli.COMMANDS, "resnet50-3b", "older-than"])


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("polyconv wa", ["warmup"]),
        ("polyconv plan resnet50-3", ["resnet50-3b", "resnet50-3down"]),
        ("polyconv plan W1,kb8", [f"W1,kb{number}" for number in range(80, 88)]),
        ("polyconv plan W1 --device rtx5", ["rtx5090"]),
        ("polyconv cache ver", ["verify"]),
    ],
)
def test_completion_in_bash(line: str, offered: list[str], tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "polyconv.bash"
    script.write_text(command("completion", "bash").stdout)
    words = line.split(" ")
    ask = (
        f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        f"COMP_LINE='{line}'; COMP_POINT={len(line)}; "
        'function=$(complete -p polyconv | sed "s/.*-F \\([^ ]*\\).*/\\1/"); $function polyconv; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    ran = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert sorted(ran.stdout.split()) == offered, ran.stderr


def test_completion_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", "fish"]) == 0
    script = capsys.readouterr().out
    assert cli.main(["completion", "fish", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shell": "fish", "script": script.removesuffix("\n")}


def test_completion_without_shtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    assert "pip install 'polyconv[cli]'" in capsys.readouterr().err


# ---- files


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(_options.UsageError, match="is not a directory"):
        _options.check_writable(tmp_path / "absent" / "file.json")
    _options.check_writable(None, tmp_path / "file.json")


@pytest.mark.parametrize("text", ["", "sm70", "70", "sm_70,x"])
def test_architectures(text: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    _options.add_arch_argument(parser, default="sm_70")
    assert parser.parse_args([]).archs == ("sm_70",)
    assert parser.parse_args(["--arch", "sm_80, sm_90,sm_80"]).archs == ("sm_80", "sm_90")
    with pytest.raises(argparse.ArgumentError, match="architecture"):
        parser.parse_args(["--arch", text])


def test_export_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.py"
    assert cli.main(["export", "tiny-batch", "-o", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"file": str(path), "device": "v100", "lines": found["lines"], "bytes": os.path.getsize(path)}
    assert cli.main(["export", "--list", "--json"]) == 0
    assert "kb80" in json.loads(capsys.readouterr().out)
    assert cli.main(["export", "kb80"]) == 2
    assert cli.main(["export", "kb80", "-o", "-", "--json"]) == 2
