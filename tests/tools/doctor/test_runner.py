"""Checks in separate processes: any outcome of a process is a result, and the others continue."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import environment
from polyconv.tools.doctor import runner as module
from polyconv.tools.doctor.check import Check, Needs, Result, Verdict
from polyconv.tools.doctor.journal import Journal
from polyconv.tools.doctor.runner import Runner
from polyconv.tools.doctor.session import run_checks
from polyconv.tools.doctor.summary import WIDTH, summary

TALKER = """\
# Speaks as polyconv.tools.doctor.worker does, without a GPU, and has the troubles that one has.
import json, os, signal, sys, time

def say(**message):
    print(json.dumps(message), flush=True)

parts = ["good", "segfault", "better", "hangs", "wrong", "leaves", "best"]
words = sys.argv[1:]
if "--only" in words:
    parts = [words[words.index("--only") + 1]]
if "--after" in words:
    parts = parts[parts.index(words[words.index("--after") + 1]) + 1:]
say(parts=len(parts))
for part in parts:
    say(begins=part)
    if part == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if part == "hangs":
        time.sleep(1000)
    if part == "leaves":
        sys.exit("no device")
    verdict = "problem" if part == "wrong" else "ok"
    say(part=part, verdict=verdict, words=f"{os.environ['CUDA_LAUNCH_BLOCKING']} {os.environ['POLYCONV_STRICT']}",
        figures={}, seconds=0.1)
    if verdict == "problem":
        sys.exit()
say(complete=True)
if words[0] == "dies at its end":
    os.kill(os.getpid(), signal.SIGABRT)
"""


def no_parts(subject: object) -> dict[str, Any]:
    raise AssertionError("parts are made where they are run")


TROUBLE = Check("trouble", no_parts, Needs.NOTHING, limit=12.0)


@pytest.fixture
def talker(tmp_path: Path) -> Runner:
    file = tmp_path / "talker.py"
    file.write_text(TALKER)
    return Runner(command=(sys.executable, "-S", str(file)), sanitizer="")


def test_whatever_becomes_of_a_process_the_rest_goes_on(talker: Runner) -> None:
    found = {result.part: result for result in talker.run(TROUBLE)}
    assert list(found) == ["good", "segfault", "better", "hangs", "wrong", "leaves", "best"]
    assert found["segfault"].words == "its process was ended by SIGSEGV"
    assert found["hangs"].words == "gave no answer within 12 s, and was stopped"
    assert found["leaves"].words == "its process ended with status 1: no device"
    assert {part for part, result in found.items() if result.verdict is Verdict.OK} == {"good", "better", "best"}
    assert found["good"].words == "1 on"


def test_where_time_is_taken_no_launch_is_waited_for(talker: Runner) -> None:
    first = next(iter(talker.run(replace(TROUBLE, blocking=False))))
    assert first.words == "0 on"


def test_it_goes_on_after_what_is_there(talker: Runner) -> None:
    done = [Result("trouble", part, Verdict.OK) for part in ("good", "segfault", "better", "hangs", "wrong", "leaves")]
    assert [result.part for result in talker.run(TROUBLE, done)] == ["best"]


def test_after_many_problems_the_rest_is_left_out(talker: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PROBLEMS", 2)
    found = list(talker.run(TROUBLE))
    assert [result.part for result in found] == ["good", "segfault", "better", "hangs", ""]
    assert "the parts after hangs were left out" in found[-1].words
    assert found[-1].verdict is Verdict.WARNING


def test_a_process_that_dies_at_its_end_is_noticed(talker: Runner) -> None:
    done = [Result("trouble", "leaves", Verdict.OK)]
    best, end = talker.run(replace(TROUBLE, name="dies at its end"), done)
    assert (best.verdict, end.verdict) == (Verdict.OK, Verdict.PROBLEM)
    assert "SIGABRT" in end.words


def test_what_cannot_be_started_is_one_answer() -> None:
    (result,) = Runner(command=(sys.executable, "-c", "raise SystemExit('no module')"), sanitizer="").run(TROUBLE)
    assert result.verdict is Verdict.PROBLEM
    assert "no module" in result.words


def test_what_went_wrong_is_looked_at_with_compute_sanitizer(talker: Runner, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "========= Invalid __global__ write of size 4 bytes"\necho "$@"\n')
    tool.chmod(0o755)
    found = {result.part: result for result in replace(talker, sanitizer=str(tool)).run(TROUBLE)}
    assert found["segfault"].sanitizer == "========= Invalid __global__ write of size 4 bytes"
    assert found["good"].sanitizer == ""


def test_the_process_itself(tmp_path: Path) -> None:
    """polyconv.tools.doctor.worker: exceptions and output of a part, and its exit after an error."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from polyconv.tools.doctor import worker\n"
        "from polyconv.tools.doctor.check import Check, Needs, passed\n"
        "def prints():\n    print('not an answer')\n    return passed('printed', error=float('inf'))\n"
        "def raises():\n    raise ValueError('broken')\n"
        "parts = {'prints': prints, 'raises': raises, 'after': lambda: passed()}\n"
        "one = Check('one', lambda subject: parts, Needs.NOTHING)\n"
        "sys.exit(worker.main(subject=lambda device, quick: None, checks={'one': one}))\n"
    )
    runner = Runner(command=(sys.executable, str(program)), environment=environment(), sanitizer="")
    found = {result.part: result for result in runner.run(Check("one", no_parts))}
    assert [str(result.verdict) for result in found.values()] == ["ok", "problem", "ok"]
    assert found["raises"].words == "ValueError: broken"
    assert "raise ValueError" in found["raises"].figures["trace"]
    journal = Journal(tmp_path / "journal.json", {}, results=list(found.values()))
    journal.write()
    assert json.loads(journal.path.read_text())["results"][0]["figures"] == {"error": "inf"}


# ---- the journal


class Answering(Runner):
    """A runner that is interrupted after some results."""

    patience = 100

    def run(self, check: Check, done: Sequence[Result] = ()) -> Iterator[Result]:
        for part in ("a", "b", "c")[len(done) :]:
            if Answering.patience == 0:
                raise KeyboardInterrupt
            Answering.patience -= 1
            yield Result(check.name, part, Verdict.OK, seconds=1.0)


class Nobody:
    gpus = 1
    why_no_tensors = ""
    why_no_torch = "needs a build of PyTorch that can use this GPU"


ROUND = {
    one.name: one
    for one in (
        replace(TROUBLE, name="first"),
        replace(TROUBLE, name="second"),
        replace(TROUBLE, name="third", needs=Needs.TORCH),
        replace(TROUBLE, name="fourth", gpus=2),
    )
}


def go(journal: Journal) -> None:
    run_checks(journal, Nobody(), Answering(), ROUND)  # type: ignore[arg-type]


def test_an_interrupted_round_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, about = tmp_path / "journal.json", {"GPU": "one", "checks": "full"}
    monkeypatch.setattr(Answering, "patience", 4)
    with pytest.raises(KeyboardInterrupt):
        go(Journal(path, about))
    monkeypatch.setattr(Answering, "patience", 2)
    journal = Journal(path, about)
    assert journal.resume() == ""
    assert [(result.check, result.part) for result in journal.results][-1] == ("second", "a")
    go(journal)
    assert [result.part for result in journal.of("second")] == ["a", "b", "c"]
    assert journal.having(Verdict.NOT_HERE)[0].words == "needs a build of PyTorch that can use this GPU"
    assert journal.having(Verdict.NOT_HERE)[1].words == "needs 2 GPUs, and there is one"
    assert journal.ok
    again = Journal(path, about)
    again.resume()
    assert again.results == journal.results
    go(again)  # nothing is missing
    assert again.results == journal.results


def test_another_journal_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    Journal(path, {"GPU": "one"}, results=[Result("first", "a", Verdict.OK)]).write()
    other = Journal(path, {"GPU": "another"})
    assert other.resume() == f"{path} is of another device, installation or selection of checks"
    assert other.results == []
    path.write_text('{"format": "polyconv doctor", "schema": 1, "about": {"GPU": "one"}, "results": [{}]}')
    assert "is damaged: results[0]: expected a result" in Journal(path, {"GPU": "one"}).resume()
    half = Journal(path, {"GPU": "one"}, results=[Result("first", "a", Verdict.OK)]).as_json()
    path.write_text(json.dumps({**half, "complete": [3]}))
    damaged = Journal(path, {"GPU": "one"})
    assert "is damaged: complete[0]: expected a text" in damaged.resume()
    assert damaged.results == []  # not half of it
    path.write_text("{}")
    assert "is not a doctor file of polyconv's" in Journal(path, {"GPU": "one"}).resume()


def test_the_report_fits_on_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    journal = Journal(Path("polyconv-doctor.json"), {"GPU": "a GPU", "polyconv": "0.1"})
    for name in map("check {}".format, range(17)):
        journal.results += [Result(name, str(part), Verdict.OK, figures={"error": 1e-6}) for part in range(20)]
    assert journal.ok
    text = summary(journal, "polyconv-doctor.txt")
    assert "All is well." in text
    assert "ok       check 3                       20 of 20  largest error 1.0e-06" in text
    bad = Result("check 1", "a part", Verdict.PROBLEM, "wrote\noutside of /home/somebody/x " + "and " * 99)
    journal.results += 30 * [replace(bad, sanitizer="========= Invalid")]
    text = summary(journal, "polyconv-doctor.txt")
    assert not journal.ok
    assert "somebody" not in text
    assert "PROBLEM  check 1                       20 of 50  a part: wrote outside of ~/x" in text
    assert "========= Invalid" in text
    assert "and 22 more, which are in the file" in text
    assert "attach polyconv-doctor.txt and polyconv-doctor.json" in text
    assert len(text.splitlines()) <= 50
    assert max(map(len, text.splitlines())) <= WIDTH
