"""The fuzzer's machinery, on parts that fail in every possible way; on request, a fuzzing run."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from textwrap import dedent, indent

import pytest
import torch

from fuzz import case
from fuzz.parts import convolutions
from fuzz.parts.cuda import Planned
from fuzz.tensors import FILTERS, IMAGES, Fill, Operand
from polyconv.cpu import native

ROOT = Path(__file__).resolve().parents[2]

PARTS = {
    "harmless": """
        def run(self): pass
    """,
    "wrong": """
        def run(self):
            if self.number % 4 == 3:
                raise Failure(f"{self.number} is wrong\\nbecause of its remainder")
    """,
    "raising": """
        def run(self):
            if self.number == 2:
                {}["missing"]
    """,
    "crashing": """
        def run(self):
            if self.number >= 7:
                print("last words", flush=True)
                os.kill(os.getpid(), signal.SIGSEGV)
    """,
    "leaving": """
        def run(self):
            if self.number == 3:
                if os.fork() == 0:
                    time.sleep(600)  # holds the pipes open
                os._exit(5)
    """,
    "hanging": """
        limit = 0.5
        def run(self):
            if self.number == 1:
                time.sleep(600)
    """,
    "remembering": """
        seen = []
        def run(self):
            self.seen.append(self.number)
            if len(self.seen) == 5:
                raise Failure("the fifth is too many")
    """,
    "slow": """
        def run(self): time.sleep(0.1 if self.number < 3 else 600)
    """,
}

TEMPLATE = """
import os, signal, time
from fuzz.case import Case, Failure
ABOUT = "for a test"
class Number(Case):
    def __init__(self, number): self.number = number
    def script(self): return f"print({{self.number}})\\n"
    def smaller(self):
        if self.number >= 8: yield Number(self.number // 2)
        if self.number > 0: yield Number(self.number - 1)
        if self.number > 3: yield Number(self.number - 4)
{body}
def case(seed, index): return Number(seed + index)
"""


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, body in PARTS.items():
        (folder / f"{name}.py").write_text(TEMPLATE.format(body=indent(dedent(body), "    ")))
    return folder


def run(parts: Path, *arguments: object, status: int = 0) -> str:
    """Fuzz the test's parts; returns the output."""
    command = [sys.executable, ROOT / "tools" / "fuzz", "--parts", parts, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def figures(printed: str, part: str) -> list[int]:
    """Cases, failures and kinds of a part, from the table."""
    line = next(line for line in printed.splitlines() if line.startswith(f"{part} "))
    return [int(word.replace(",", "")) for word in line.split()[1:4]]


def test_parts_are_listed(parts: Path) -> None:
    assert [line.split()[0] for line in run(parts, "--list").splitlines()] == sorted(PARTS)


def test_cases_are_counted_by_part_and_number(parts: Path) -> None:
    printed = run(parts, "harmless", "slow", "--cases", 3, "--jobs", 2)
    assert figures(printed, "harmless") == figures(printed, "slow") == [3, 0, 0]


def test_time_is_shared_between_parts(parts: Path) -> None:
    begun = time.monotonic()
    printed = run(parts, "harmless", "wrong", "--seconds", 4, status=1)
    assert time.monotonic() - begun < 30
    assert figures(printed, "harmless")[0] > 10


def test_a_failure_is_made_small_and_told_with_its_script(parts: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    printed = run(parts, "wrong", "--seed", 100, "--cases", 8, "--journal", journal, status=1)
    assert figures(printed, "wrong") == [8, 2, 1]  # 103 and 107 differ in the number only: one kind
    assert "and 1 more like it: 7" in printed
    script = (journal / "wrong-3.py").read_text()
    assert script in printed
    assert script.endswith("print(3)\n"), "103 fails, and so does 3"
    assert "because of its remainder" in script
    assert "--seed 100 --only wrong:3" in script


def test_an_exception_is_a_failure(parts: Path) -> None:
    printed = run(parts, "raising", "--cases", 4, status=1)
    assert figures(printed, "raising") == [4, 1, 1]
    assert "KeyError: 'missing'" in printed


def test_a_crash_is_pinned_to_its_case_and_the_campaign_goes_on(parts: Path) -> None:
    printed = run(parts, "crashing", "--seed", 6, "--cases", 4, status=1)
    assert figures(printed, "crashing") == [4, 3, 1]
    assert "crashing:1 crashed" in printed
    assert "SIGSEGV" in printed
    assert "last words" in printed


def test_a_worker_that_leaves_a_child_behind_is_noticed(parts: Path) -> None:
    printed = run(parts, "leaving", "--cases", 5, status=1)
    assert figures(printed, "leaving") == [5, 1, 1]
    assert "ended with status 5" in printed


def test_a_hang_is_pinned_to_its_case_and_says_where(parts: Path) -> None:
    printed = run(parts, "hanging", "--cases", 4, status=1)
    assert figures(printed, "hanging") == [4, 1, 1]
    assert "hanging:1 hung" in printed
    assert "in run" in printed, "faulthandler's word on where it hangs"


def test_a_failure_that_needs_earlier_cases_says_so_and_can_be_had_again(parts: Path) -> None:
    printed = run(parts, "remembering", "--cases", 6, status=1)
    assert figures(printed, "remembering") == [6, 1, 1]
    assert "--only remembering:0-4" in printed
    assert "the fifth is too many" in run(parts, "--only", "remembering:0-4", status=1)


def test_one_case_alone_prints_its_script(parts: Path) -> None:
    assert "print(12)" in run(parts, "--only", "harmless:2", "--seed", 10)
    assert "0 is wrong" not in run(parts, "--only", "wrong:0")
    assert "3 is wrong" in run(parts, "--only", "wrong:3", status=1)


def test_a_journal_is_gone_on_with(parts: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    run(parts, "wrong", "--cases", 5, "--journal", journal, status=1)
    printed = run(parts, "wrong", "--cases", 4, "--journal", journal, status=1)
    assert figures(printed, "wrong") == [9, 2, 1]
    lines = [json.loads(line) for line in (journal / "wrong.jsonl").read_text().splitlines()]
    assert [line["begin"] for line in lines if "begin" in line] == list(range(9))
    command = [sys.executable, ROOT / "tools/fuzz", "--parts", parts, "wrong", "--seed", 1, "--journal", journal]
    refused = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "was begun with --seed 0" in refused.stderr


def heed_interrupts() -> None:
    """A shell starts background commands with SIGINT ignored, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_prints_the_summary_and_the_case_comes_again(parts: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    command = [sys.executable, ROOT / "tools/fuzz", "--parts", parts, "slow", "--journal", journal]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)
    file, end = journal / "slow.jsonl", time.monotonic() + 60
    while not (file.exists() and '"begin": 3' in file.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert figures(printed, "slow") == [3, 0, 0]
    assert json.loads(file.read_text().splitlines()[-2]) == {"stopped": 3}


def test_a_part_that_cannot_be_imported_is_told_and_the_others_go_on(parts: Path) -> None:
    (parts / "broken.py").write_text("import no_such_module\n")
    printed = run(parts, "broken", "harmless", "--cases", 2, status=1)
    assert "No module named 'no_such_module'" in printed
    assert figures(printed, "harmless") == [2, 0, 0]


def test_a_part_that_has_no_cases_here_is_skipped_with_its_reason(parts: Path) -> None:
    why_not = 'def why_not(): return "there is no such thing"\n'
    (parts / "absent.py").write_text(TEMPLATE.format(body="    pass") + why_not)
    printed = run(parts, "absent", "harmless", "--cases", 2)
    assert "absent was skipped: there is no such thing" in printed
    assert figures(printed, "harmless") == [2, 0, 0]


def test_another_interpreter_runs_convolutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the other interpreter is this one."""
    for python, words in (("", "names no interpreter"), (str(tmp_path), "is no interpreter")):
        monkeypatch.setenv("CAMPAIGN_OTHER_PYTHON", python)
        assert words in case.why_not(case.load("versions"))
    command = [sys.executable, str(ROOT / "tools/fuzz"), "versions", "--cases", "2"]
    environment = {**os.environ, "CAMPAIGN_OTHER_PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures(done.stdout, "versions") == [2, 0, 0]


def test_workers_get_the_environment_that_is_asked_for(parts: Path) -> None:
    (parts / "environment.py").write_text(
        TEMPLATE.format(body="    def run(self):\n        raise Failure(os.environ['WORD'])")
    )
    assert "hello there" in run(parts, "environment", "--cases", 1, "--env", "WORD=hello there", status=1)


@pytest.mark.parametrize("name", case.names())
def test_the_cases_of_a_part_follow_from_their_numbers_and_are_programs(name: str) -> None:
    part = case.load(name)
    assert part.ABOUT
    for index in range(12):
        once, again = part.case(1, index), part.case(1, index)
        compile(once.script(), f"{name}-{index}.py", "exec")
        assert once.script() == again.script()
        candidates = itertools.islice(zip(once.smaller(), again.smaller(), strict=True), 40)
        assert all(one.script() == other.script() for one, other in candidates)


@pytest.mark.skipif(not native.is_available(), reason="without native kernels nothing is transformed")
@pytest.mark.parametrize("place", ["contiguous", "overlapping"])
def test_no_more_is_asked_of_weights_below_the_smallest_exponent_than_is_promised(place: str) -> None:
    """Their transform loses digits, which are multiplied by 1e16: docs/accuracy.md excludes that."""
    x, w = Operand("large", "contiguous", 1078391494), Operand("denormal", place, 2092299233)
    shape = {"batch": 3, "channels": (1, 1), "size": (12, 16), "kernel": (1, 3), "dilation": 2, "groups": 5}
    for trial in range(30):
        convolutions.Convolution(**shape, x=x, w=w, dy=Operand(), trial=trial).run()


def test_half_precision_is_compared_with_torch_on_finite_numbers() -> None:
    """Values beyond float16's range are infinite: torch multiplies a zero of the border by them, or leaves that out."""
    drawn = [convolutions.case(901, index) for index in range(2400, 2600)]
    operands = [operand for found in drawn if found.dtype == "float16" for operand in (found.x, found.w)]
    assert operands
    assert all(operand.make((9, 9), torch.float16).isfinite().all() for operand in operands)


def test_a_border_is_planned_of_what_a_crop_leaves() -> None:
    """A height of 1 cropped by 1 is empty, and torch refuses to pad it."""
    cropped = Planned("fprop", (1, 16, 1, 197), (4, 16, 1, 1), (4, 4), (-1, 2, 0, -1), padding_mode="replicate")
    assert not cropped.is_valid
    assert replace(cropped, x=(1, 16, 2, 197)).is_valid
    assert replace(cropped, padding_mode="zeros").is_valid


@pytest.mark.parametrize("fill", [*FILTERS, *IMAGES])
def test_filters_and_images_are_of_numbers_and_follow_from_the_generator(fill: Fill) -> None:
    for shape in ((4, 3, 3, 3), (2, 5, 1, 31), (3, 1, 5, 9)):
        one, other = (fill(shape, torch.Generator().manual_seed(4)) for _ in range(2))
        assert one.shape == shape
        assert one.isfinite().all()
        assert one.any()
        assert torch.equal(one, other)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_a_campaign_finds_nothing(request: pytest.FixtureRequest) -> None:
    """``pytest -m fuzz``: six minutes, or POLYCONV_CAMPAIGN_SECONDS."""
    if "fuzz" not in request.config.getoption("markexpr"):
        pytest.skip("takes minutes: pytest -m fuzz runs it")
    seconds = os.environ.get("POLYCONV_CAMPAIGN_SECONDS", "360")
    done = subprocess.run([sys.executable, ROOT / "tools/fuzz", "--seconds", seconds, "--jobs", "2"])
    assert done.returncode == 0
