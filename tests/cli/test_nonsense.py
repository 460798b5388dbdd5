"""Invalid command lines: one sentence with the reason and exit status 2, or 1 if the answer is negative."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from polyconv import cli
from polyconv.autotune import tuning_file

CONV = "--in-channels 8 --out-channels 8 --kernel-size 3 --input 2 8 20 20"
HUGE = 10**30
LONG = "x" * 5000

NONSENSE = [
    # ---- words
    "nonsense",
    "--nonsense",
    "''",
    "' '",
    "平均",
    "plan plan",
    "plan --nonsense",
    "plan ''",
    "plan ,",
    "plan W1,,W9",
    "plan 平均",
    f"plan {LONG}",
    "plan W1 --device tpu",
    "plan W1 --device ''",
    "plan W1 --pass sideways",
    "plan W1 --pass ''",
    "plan W1 --stride 2",
    "plan --json out.json",
    # ---- a convolution's arguments
    "plan",
    "plan --in-channels 8",
    "plan --in-channels eight",
    "plan --in-channels ''",
    f"plan {CONV} --in-channels 9",
    f"plan {CONV} --in-channels 0",
    f"plan {CONV} --in-channels -8",
    f"plan {CONV} --in-channels 0 --input 2 0 20 20",
    f"plan {CONV} --in-channels {HUGE} --input 2 {HUGE} 20 20",
    f"plan {CONV} --out-channels 0",
    f"plan {CONV} --out-channels -8",
    f"plan {CONV} --out-channels {HUGE}",
    f"plan {CONV} --kernel-size 0",
    f"plan {CONV} --kernel-size 0 --device cpu",
    f"plan {CONV} --kernel-size 0 3",
    f"plan {CONV} --kernel-size -1",
    f"plan {CONV} --kernel-size 21",
    f"plan {CONV} --kernel-size 3 3 3",
    f"plan {CONV} --kernel-size {HUGE}",
    f"plan {CONV} --kernel-size {HUGE} --padding {HUGE}",
    f"plan {CONV} --kernel-size",
    f"plan {CONV} --stride 0",
    f"plan {CONV} --stride -1",
    f"plan {CONV} --stride 1 1 1",
    f"plan {CONV} --dilation 0",
    f"plan {CONV} --dilation {HUGE}",
    f"plan {CONV} --padding -1",
    f"plan {CONV} --padding nonsense",
    f"plan {CONV} --padding ''",
    f"plan {CONV} --padding 1 2 3",
    f"plan {CONV} --padding 99 --padding-mode reflect",
    f"plan {CONV} --padding {HUGE}",
    f"plan {CONV} --padding same --stride 2",
    f"plan {CONV} --padding-mode nonsense",
    f"plan {CONV} --groups 0",
    f"plan {CONV} --groups -1",
    f"plan {CONV} --groups 3",
    f"plan {CONV} --input 99999999999",
    f"plan {CONV} --input 2 8",
    f"plan {CONV} --input 2 8 20 20 20 20",
    f"plan {CONV} --input 0 8 20 20",
    f"plan {CONV} --input -2 8 20 20",
    f"plan {CONV} --input 2 8 0 20",
    f"plan {CONV} --input 2 8 -20 -20",
    f"plan {CONV} --input 2 8 99999999999 99999999999",
    f"plan {CONV} --input {HUGE} 8 20 20",
    f"plan {CONV} --input {HUGE} 8 20 20 --device cpu",
    f"plan {CONV} --input 99999999999 8 20 20",
    f"plan {CONV} --input 99999999999 8 20 20 --device cpu",
    # ---- export
    "export",
    "export kb80",
    "export kb82 -o",
    "export kb82 -o ''",
    "export kb82 -o /",
    "export kb82 -o .",
    "export kb82 -o FOLDER",
    "export kb82 -o FILE/model.py",
    "export kb82 -o MISSING/model.py",
    "export kb82 -o /dev/full",
    "export kb82 -o /proc/x",
    "export kb82 -o /proc/version",
    f"export kb82 -o {LONG}",
    "export kb82 -o - --json",
    "export W9 -o FOLDER/model.py",
    "export kb820 -o FOLDER/model.py",
    "export kb82 --input 1 2 3 4 -o FOLDER/model.py",
    "export --from nothing -o FOLDER/model.py",
    "export --from nothing:nothing --input 1 2 3 4 -o FOLDER/model.py",
    "export --from '' --input 1 2 3 4 -o FOLDER/model.py",
    "export --from : --input 1 2 3 4 -o FOLDER/model.py",
    "export --from os:getcwd --input 1 2 3 4 -o FOLDER/model.py",
    "export --from os:abort.nothing --input 1 2 3 4 -o FOLDER/model.py",
    "export --from torch.nn:ReLU --input 1 2 3 4 -o FOLDER/model.py",
    f"export {CONV} --kernel-size 0 -o FOLDER/model.py",
    f"export {CONV} --input 2 8 1 1 -o FOLDER/model.py",
    f"export {CONV} --input 0 8 20 20 -o FOLDER/model.py",
    f"export {CONV} --groups 0 -o FOLDER/model.py",
    f"export {CONV} --out-channels -1 -o FOLDER/model.py",
    f"export {CONV} --input {HUGE} 8 20 20 -o FOLDER/model.py",
    f"export {CONV} --padding {HUGE} -o FOLDER/model.py",
    "export kb82 --arch nonsense -o FOLDER/model.py",
    "export kb82 --arch '' -o FOLDER/model.py",
    "export kb82 --class-name '' -o FOLDER/model.py",
    "export kb82 --class-name class -o FOLDER/model.py",
    "export kb82 --class-name None -o FOLDER/model.py",
    "export kb82 --class-name open -o FOLDER/model.py",
    "export kb82 --class-name Conv2d -o FOLDER/model.py",
    "export kb82 --class-name ｔｏｒｃｈ -o FOLDER/model.py",
    "export kb82 --class-name __debug__ -o FOLDER/model.py",
    "export kb82 --class-name torch -o FOLDER/model.py",
    "export kb82 --class-name '1x' -o FOLDER/model.py",
    "export kb82 --class-name 'a b' -o FOLDER/model.py",
    "export kb82 --class-name 'a;import os' -o FOLDER/model.py",
    # ---- warmup
    "warmup",
    "warmup W1 --all-kernels --arch sm_70",
    "warmup W1 --arch sm_70 -o /proc/x",
    "warmup W1 --arch sm_70 -o /dev/full",
    "warmup W1 --arch sm_70 -o FILE",
    "warmup W1 --arch sm_70 -o FILE/kernels",
    f"warmup W1 --arch sm_70 -o {LONG}",
    "warmup W1 --arch sm_1",
    "warmup W1 --arch sm_60",
    "warmup W1 --arch 70",
    "warmup W1 --arch ''",
    "warmup W1 --input-shape 1,2,3,4 --arch sm_70",
    "warmup nothing:nothing --arch sm_70",
    "warmup nothing:nothing --input-shape 1,2,3,4 --arch sm_70",
    "warmup : --input-shape 1,2,3,4 --arch sm_70",
    "warmup os:getcwd --input-shape 1,2,3,4 --arch sm_70",
    "warmup os: --input-shape 1,2,3,4 --arch sm_70",
    "warmup torch.nn:ReLU --input-shape 1,2,3,4 --arch sm_70",
    "warmup torch.nn:ReLU --input-shape 0,2 --arch sm_70",
    "warmup torch.nn:ReLU --input-shape nonsense --arch sm_70",
    f"warmup torch.nn:ReLU --input-shape {HUGE} --arch sm_70",
    "warmup --kernels nonsense --arch sm_70",
    "warmup --kernels , --arch sm_70",
    "warmup --kernels 平均 --arch sm_70",
    # ---- inspect
    "inspect W9",
    "inspect W1 --arch sm_1",
    "inspect W1 --arch nonsense",
    "inspect W1 --pass nonsense",
    # ---- bench
    "bench W9",
    "bench --suite nonsense",
    "bench W1 --suite quick",
    "bench W1 --threads 0",
    "bench W1 --threads -1",
    "bench W1 --threads many",
    "bench W1 --repeats 0",
    "bench W1 --batch 0",
    "bench W1 --batch 1,2",
    "bench W1 --mode inference",
    "bench W1 --seed 1",
    "bench W1 --seconds 0",
    "bench W1 --only nothing",
    "bench W1 --resume",
    "bench W1 -o /",
    "bench W1 -o FOLDER",
    "bench W1 -o PIPE",
    "bench W1 -o MISSING/b.json",
    "bench W1 -o FILE/b.json",
    "bench W1 --resume -o GARBAGE",
    "bench W1 --plot FOLDER",
    "bench W1 --plot FOLDER/b.nonsense",
    "bench W1 --isa nonsense",
    "bench W1 --device cuda",
    # ---- tune
    "tune",
    "tune W9",
    "tune W1 --merge FILE",
    "tune --merge MISSING -o FOLDER/t.json",
    "tune --merge FOLDER -o FOLDER/t.json",
    "tune --merge GARBAGE -o FOLDER/t.json",
    "tune --merge /dev/zero -o FOLDER/t.json",
    "tune --merge VALID",
    "tune --merge VALID -o /",
    "tune --merge VALID -o FOLDER",
    "tune --merge VALID -o FILE/t.json",
    "tune --merge VALID -o PIPE",
    "tune --merge VALID -o /proc/x",
    f"tune --merge VALID -o {LONG}",
    "tune W1 -o /",
    "tune W1 -o FOLDER",
    "tune W1 -o MISSING/t.json",
    "tune W1 --candidates 0",
    "tune W1 --batch -1",
    "tune W1 --device tpu",
    # ---- calibrate
    "calibrate --seconds 0",
    "calibrate --seconds forever",
    "calibrate --most many",
    "calibrate --isa nonsense",
    "calibrate -o /",
    "calibrate -o FOLDER",
    "calibrate -o MISSING/p.json",
    "calibrate --only nonsense",
    "calibrate --most nan",
    "calibrate --most -1",
    # ---- bundle
    "bundle",
    "bundle nonsense",
    "bundle digest",
    "bundle digest MISSING",
    "bundle wheel FILE --name kernels",
    # ---- cache
    "cache nonsense",
    "cache --older-than 1d",
    "cache clear --older-than yesterday",
    "cache clear --older-than -1d",
    f"cache clear --older-than {HUGE}{HUGE}w --directory MISSING",
    "cache --directory MISSING",
    "cache --directory FILE",
    "cache --directory /dev/full",
    f"cache --directory {LONG}",
    "cache verify --directory BROKEN_BUNDLE",
    "cache clear --directory BROKEN_BUNDLE",
    # ---- doctor, completion
    "doctor --full --quick",
    "doctor --nonsense",
    "doctor -o /",
    "doctor -o FOLDER",
    "doctor -o MISSING/r.json",
    "doctor -o FILE/r.json",
    "doctor -o PIPE",
    "doctor -o /proc/x",
    "doctor nonsense",
    "completion",
    "completion csh",
    "completion ''",
]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Values of the placeholders in capitals."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("something")
    (tmp_path / "garbage.json").write_bytes(b"\xff\xfe{[")
    os.mkfifo(tmp_path / "pipe")
    tuning_file.update(tmp_path / "valid.json", tuning_file.Tuning())
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    names = {
        "FOLDER": "folder",
        "FILE": "file",
        "PIPE": "pipe",
        "GARBAGE": "garbage.json",
        "VALID": "valid.json",
        "BROKEN_BUNDLE": "bundle",
        "MISSING": "missing",
    }
    return {name: str(tmp_path / file) for name, file in names.items()}


def with_places(word: str, places: dict[str, str]) -> str:
    head, slash, rest = word.partition("/")
    return places.get(head, head) + slash + rest


@pytest.mark.parametrize("line", NONSENSE, ids=[line[:60] for line in NONSENSE])
def test_nonsense_is_answered_in_one_sentence(
    line: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*") if path.name != "cache")
    try:
        status = cli.main([with_places(word, places) for word in shlex.split(line)])
    except SystemExit as ended:
        status = int(str(ended.code))
    said = capsys.readouterr().err
    _, usage, said = said.rpartition("usage: polyconv") if "usage: polyconv" in said else ("", "", said)
    sentences = [one for one in said.splitlines() if one.startswith("polyconv")]
    assert status in (1, 2), said
    assert len(sentences) == 1, said
    assert usage or len(said.splitlines()) == 1, said
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "cache") == before, "nothing is left behind"


def test_there_are_many_and_of_every_command() -> None:
    assert len(NONSENSE) >= 150
    assert {shlex.split(line)[0] for line in NONSENSE} >= set(cli.COMMANDS)
