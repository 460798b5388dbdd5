"""Checks in separate processes: any outcome of a process is an answer, and the others continue."""

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
from polyconv.tools.doctor.check import Examination, Needs, Result, Verdict
from polyconv.tools.doctor.journal import Record
from polyconv.tools.doctor.runner import Examiner
from polyconv.tools.doctor.session import go_round
from polyconv.tools.doctor.summary import WIDTH, screen

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
    raise AssertionError("parts are made where they are examined")


TROUBLE = Examination("trouble", "nothing", no_parts, Needs.NOTHING, limit=2.0)


@pytest.fixture
def talker(tmp_path: Path) -> Examiner:
    file = tmp_path / "talker.py"
    file.write_text(TALKER)
    return Examiner(command=(sys.executable, "-S", str(file)), sanitizer="")


def test_whatever_becomes_of_a_process_the_rest_goes_on(talker: Examiner) -> None:
    found = {result.part: result for result in talker.examine(TROUBLE)}
    assert list(found) == ["good", "segfault", "better", "hangs", "wrong", "leaves", "best"]
    assert found["segfault"].words == "its process was ended by SIGSEGV"
    assert found["hangs"].words == "gave no answer within 2 s, and was stopped"
    assert found["leaves"].words == "its process ended with status 1: no device"
    assert {part for part, result in found.items() if result.verdict is Verdict.OK} == {"good", "better", "best"}
    assert found["good"].words == "1 on"


def test_where_time_is_taken_no_launch_is_waited_for(talker: Examiner) -> None:
    first = next(iter(talker.examine(replace(TROUBLE, blocking=False))))
    assert first.words == "0 on"


def test_it_goes_on_after_what_is_there(talker: Examiner) -> None:
    done = [Result("trouble", part, Verdict.OK) for part in ("good", "segfault", "better", "hangs", "wrong", "leaves")]
    assert [result.part for result in talker.examine(TROUBLE, done)] == ["best"]


def test_after_many_problems_the_rest_is_left_out(talker: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PROBLEMS", 2)
    found = list(talker.examine(TROUBLE))
    assert [result.part for result in found] == ["good", "segfault", "better", "hangs", ""]
    assert "the parts after hangs were left out" in found[-1].words
    assert found[-1].verdict is Verdict.WARNING


def test_a_process_that_dies_at_its_end_is_noticed(talker: Examiner) -> None:
    done = [Result("trouble", "leaves", Verdict.OK)]
    best, end = talker.examine(replace(TROUBLE, name="dies at its end"), done)
    assert (best.verdict, end.verdict) == (Verdict.OK, Verdict.PROBLEM)
    assert "SIGABRT" in end.words


def test_what_cannot_be_started_is_one_answer() -> None:
    (result,) = Examiner(command=(sys.executable, "-c", "raise SystemExit('no module')"), sanitizer="").examine(TROUBLE)
    assert result.verdict is Verdict.PROBLEM
    assert "no module" in result.words


def test_what_went_wrong_is_looked_at_with_compute_sanitizer(talker: Examiner, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "========= Invalid __global__ write of size 4 bytes"\necho "$@"\n')
    tool.chmod(0o755)
    found = {result.part: result for result in replace(talker, sanitizer=str(tool)).examine(TROUBLE)}
    assert found["segfault"].sanitizer == "========= Invalid __global__ write of size 4 bytes"
    assert found["good"].sanitizer == ""


def test_the_process_itself(tmp_path: Path) -> None:
    """polyconv.tools.doctor.worker: exceptions and output of a part, and its exit after an error."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from polyconv.tools.doctor import worker\n"
        "from polyconv.tools.doctor.check import Examination, Needs, fine\n"
        "def prints():\n    print('not an answer')\n    return fine('printed', error=float('inf'))\n"
        "def raises():\n    raise ValueError('broken')\n"
        "parts = {'prints': prints, 'raises': raises, 'after': lambda: fine()}\n"
        "one = Examination('one', '', lambda subject: parts, Needs.NOTHING)\n"
        "sys.exit(worker.main(subject=lambda gpu, quick: None, examinations={'one': one}))\n"
    )
    examiner = Examiner(command=(sys.executable, str(program)), environment=environment(), sanitizer="")
    found = {result.part: result for result in examiner.examine(Examination("one", "", no_parts))}
    assert [str(result.verdict) for result in found.values()] == ["ok", "problem", "ok"]
    assert found["raises"].words == "ValueError: broken"
    assert "raise ValueError" in found["raises"].figures["trace"]
    record = Record(tmp_path / "record.json", {}, results=list(found.values()))
    record.write()
    assert json.loads(record.path.read_text())["results"][0]["figures"] == {"error": "inf"}


# ---- the journal


class Answering(Examiner):
    """A runner that is interrupted after some answers."""

    patience = 100

    def examine(self, examination: Examination, done: Sequence[Result] = ()) -> Iterator[Result]:
        for part in ("a", "b", "c")[len(done) :]:
            if Answering.patience == 0:
                raise KeyboardInterrupt
            Answering.patience -= 1
            yield Result(examination.name, part, Verdict.OK, seconds=1.0)


class Nobody:
    gpus = 1
    why_no_tensors = ""
    why_no_torch = "needs a build of PyTorch that can use this GPU"


ROUND = {
    one.name: one
    for one in (
        replace(TROUBLE, name="first", quick=True),
        replace(TROUBLE, name="second"),
        replace(TROUBLE, name="third", needs=Needs.TORCH, quick=True),
        replace(TROUBLE, name="fourth", gpus=2),
    )
}


def go(record: Record, *, quick: bool = False) -> None:
    go_round(record, Nobody(), Answering(quick=quick), ROUND, lambda what: None)  # type: ignore[arg-type]


def test_an_interrupted_round_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, about = tmp_path / "record.json", {"GPU": "one", "round": "full"}
    monkeypatch.setattr(Answering, "patience", 4)
    with pytest.raises(KeyboardInterrupt):
        go(Record(path, about))
    monkeypatch.setattr(Answering, "patience", 2)
    record = Record(path, about)
    assert record.go_on() == ""
    assert [(result.examination, result.part) for result in record.results][-1] == ("second", "a")
    go(record)
    assert [result.part for result in record.of("second")] == ["a", "b", "c"]
    assert record.having(Verdict.NOT_HERE)[0].words == "needs a build of PyTorch that can use this GPU"
    assert record.having(Verdict.NOT_HERE)[1].words == "needs 2 GPUs, and there is one"
    assert record.ok
    again = Record(path, about)
    again.go_on()
    assert again.results == record.results
    go(again)  # nothing is missing
    assert again.results == record.results


def test_a_quick_round_leaves_out_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "patience", 100)
    record = Record(tmp_path / "record.json", {})
    go(record, quick=True)
    assert record.complete == ["first", "third"]


def test_another_record_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    Record(path, {"GPU": "one"}, results=[Result("first", "a", Verdict.OK)]).write()
    other = Record(path, {"GPU": "another"})
    assert other.go_on() == f"{path} is of another GPU, installation or kind of round"
    assert other.results == []
    path.write_text('{"format": "polyconv doctor", "schema": 1, "about": {"GPU": "one"}, "results": [{}]}')
    assert "is damaged: results[0]: expected a result" in Record(path, {"GPU": "one"}).go_on()
    path.write_text("{}")
    assert "is not a doctor file of polyconv's" in Record(path, {"GPU": "one"}).go_on()


def test_the_report_fits_on_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    record = Record(Path("polyconv-doctor.json"), {"GPU": "a GPU", "polyconv": "0.1"})
    for name in map("examination {}".format, range(17)):
        record.results += [Result(name, str(part), Verdict.OK, figures={"error": 1e-6}) for part in range(20)]
    assert record.ok
    text = screen(record, "polyconv-doctor.txt")
    assert "All is well." in text
    assert "ok       examination 3          20 of 20  largest error 1.0e-06" in text
    bad = Result("examination 1", "a part", Verdict.PROBLEM, "wrote\noutside of /home/somebody/x " + "and " * 99)
    record.results += 30 * [replace(bad, sanitizer="========= Invalid")]
    text = screen(record, "polyconv-doctor.txt")
    assert not record.ok
    assert "somebody" not in text
    assert "PROBLEM  examination 1          20 of 50  a part: wrote outside of ~/x" in text
    assert "========= Invalid" in text
    assert "and 22 more, which are in the file" in text
    assert "attach polyconv-doctor.txt and polyconv-doctor.json" in text
    assert len(text.splitlines()) <= 50
    assert max(map(len, text.splitlines())) <= WIDTH
