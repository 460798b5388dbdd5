"""Processor profiles: corrections of estimates, files, precedence, and their effect on plans."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import commands
import polyconv
from cpu_passes import on_instruction_set
from nightly import sampled
from polyconv import settings
from polyconv.cli import calibrate, main
from polyconv.cpu import native, planner
from polyconv.cpu.costs import Costs
from polyconv.cpu.device import CpuDevice
from polyconv.cpu.engines import aten
from polyconv.cpu.planner import here, offered, plan_cpu
from polyconv.cpu.profiles import Kernel, Profile, ProfileError, Record, Section, Spent, file, in_force, lookup, shipped
from polyconv.cpu.profiles.profile import UNMEASURED, is_channels_last, place_of
from polyconv.measure import calibration
from polyconv.problem import Pass, Problem
from polyconv.runtime import warn_once
from polyconv.tuning_key import Environment

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

FAST, DIRECT = Kernel("F(4,3) x F(4,3), tile lanes"), Kernel("direct, tile lanes")
PROBLEM = Problem.make("fprop", (1, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1, 1, 1))
HERE = Environment("cpu", "A Processor", polyconv.__version__, str(torch.__version__), "avx512", threads=2)


def record(error: float, problem: Problem = PROBLEM, kernel: Kernel = FAST) -> Record:
    """A kernel whose ratio to ATen was estimated too small by a factor."""
    return Record(problem, Spent(1e-3, 1e6), ((kernel, Spent(error * 1e-3, 1e6)),))


def nearby(**changed: object) -> Problem:
    return replace(PROBLEM, **changed)  # type: ignore[arg-type]


# ---- corrections


def test_far_from_everything_the_model_is_all_there_is() -> None:
    profile = Profile("A", [record(2.0)])
    assert profile.correction(nearby(kernel=(31, 31)), FAST) == UNMEASURED
    assert profile.correction(nearby(kind=Pass.WGRAD), FAST) == UNMEASURED
    assert profile.correction(PROBLEM.channels_last(), FAST) == UNMEASURED
    assert profile.correction(PROBLEM, DIRECT) == UNMEASURED
    assert profile.correction(PROBLEM, replace(FAST, kept=True)) == UNMEASURED


def test_what_was_measured_nearby_shifts_the_estimate() -> None:
    profile = Profile("A", [record(2.0, nearby(in_size=(56, width))) for width in range(50, 62)])
    found = profile.correction(PROBLEM, FAST)
    assert math.exp(found.shift) == pytest.approx(2.0, rel=0.02)
    assert found.doubt < 0.1


def test_measurements_that_disagree_leave_doubt() -> None:
    agreeing = [record(2.0, nearby(in_size=(56, width))) for width in range(50, 62)]
    scattered = [record(2.0 ** (width % 2 * 2), nearby(in_size=(56, width))) for width in range(50, 62)]
    assert Profile("A", scattered).correction(PROBLEM, FAST).doubt > 0.5
    assert (
        Profile("A", scattered).correction(PROBLEM, FAST).factor
        > Profile("A", agreeing).correction(PROBLEM, FAST).factor
    )


def test_one_measurement_is_believed_less_than_many() -> None:
    one, many = Profile("A", [record(1.0)]), Profile("A", [record(1.0)] * 20)
    assert one.correction(PROBLEM, FAST).doubt > many.correction(PROBLEM, FAST).doubt


def test_a_profile_behind_is_believed_less() -> None:
    behind = Profile("A", [record(2.0)] * 20)
    found = Profile("B", (), behind, 0.3).correction(PROBLEM, FAST)
    assert found.shift == behind.correction(PROBLEM, FAST).shift
    assert found.doubt == pytest.approx(math.hypot(0.3, behind.correction(PROBLEM, FAST).doubt))
    own = Profile("B", [record(0.5)] * 20, behind, 0.3).correction(PROBLEM, FAST)
    assert math.exp(own.shift) == pytest.approx(0.5, rel=0.05)


def test_places_are_near_where_layers_are_alike() -> None:
    def distance(problem: Problem) -> float:
        return math.dist(place_of(PROBLEM), place_of(problem))

    assert distance(PROBLEM) == 0.0
    assert distance(nearby(in_size=(57, 57))) < distance(nearby(in_size=(28, 28))) < distance(nearby(kernel=(1, 1)))
    assert math.isfinite(distance(nearby(batch=0)))


# ---- files


def section(*records: Record, model: str = "GenuineIntel 6 85", **environment: object) -> Section:
    return Section.of(model, replace(HERE, **environment), records)  # type: ignore[arg-type]


def test_more_images_of_a_large_map_are_no_other_place() -> None:
    """Measurements of one image serve a batch: PyTorch ran eight images of a layer of which one image was measured."""
    one, eight = (place_of(replace(PROBLEM, batch=batch, in_size=(512, 512))) for batch in (1, 8))
    assert one == eight
    assert place_of(PROBLEM) != place_of(replace(PROBLEM, batch=2 * PROBLEM.batch))


def test_a_file_says_what_was_measured(tmp_path: Path) -> None:
    records = [
        record(2.0, replace(PROBLEM, bias=True)),
        record(0.5, replace(PROBLEM, kind=Pass.DGRAD).channels_last()),
        record(1.0, Problem.make("wgrad", (8, 32, 9, 20), (32, 1, 5, 3), stride=(2, 1), groups=32, dilation=(1, 2))),
    ]
    written = file.update(tmp_path / "profile.json", section(*records))
    (read,) = file.load(tmp_path / "profile.json")
    assert (read,) == written
    assert [r.problem for r in read.records] == [r.problem for r in records]
    assert [r.errors() for r in read.records] == [r.errors() for r in records]
    assert str(read) == "A Processor (GenuineIntel 6 85), avx512, 2 threads"


def test_a_section_is_added_to_one_of_the_same_environment(tmp_path: Path) -> None:
    path, other = tmp_path / "profile.json", replace(PROBLEM, bias=True)
    file.update(path, section(record(1.0), record(1.0, other)))
    file.update(path, section(record(1.0), threads=4))
    file.update(path, section(record(2.0), record(3.0)))
    first, second = file.load(path)
    assert (first.threads, len(first.records)) == (4, 1)
    assert second.threads == 2
    assert [r.problem for r in second.records] == [other, PROBLEM, PROBLEM]  # the one not measured again
    assert second.records[1:] == section(record(2.0), record(3.0)).records


DAMAGED = {
    "no JSON": (b"{", "is not JSON"),
    "another file": (b'{"format": "polyconv tuning"}', "is not a profile file of polyconv's"),
    "a later one": (b'{"format": "polyconv profile", "schema": 3, "sections": []}', "has schema 3"),
    "no sections": (b'{"format": "polyconv profile", "schema": 2}', 'it has no "sections"'),
}


@pytest.mark.parametrize(("data", "words"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_no_profile_is_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(data)
    with pytest.raises(ProfileError, match=words):
        file.load(path)
    with pytest.raises(ProfileError, match="It was not overwritten"):
        file.update(path, section())
    assert path.read_bytes() == data


RECORDS = {
    "too few numbers": ["fprop", "nchw", [1, 2], 1.0, 1.0, 0, 1.0, 1.0],
    "another pass": ["sideways", "nchw", [1] * 17, 1.0, 1.0, 0, 1.0, 1.0],
    "no time": ["fprop", "nchw", [1] * 17, 0.0, 1.0, 0, 1.0, 1.0],
    "a text": ["fprop", "nchw", [1] * 17, "1", 1.0, 0, 1.0, 1.0],
    "no list": 7,
    "no groups": ["fprop", "nchw", [*[1] * 15, 0, 0], 1.0, 1.0, 0, 1.0, 1.0],
    "no such kernels": ["fprop", "nchw", [1] * 17, 1.0, 1.0, 1],
    "kernels from the end": ["fprop", "nchw", [1] * 17, 1.0, 1.0, -1, 1.0, 1.0],
    "no cycles of a kernel": ["fprop", "nchw", [1] * 17, 1.0, 1.0, 0, 1.0],
    "another time": ["fprop", "nchw", [1] * 17, 1.0, 1.0, 0, 1.0, 1.0, 1.0],
}


@pytest.mark.parametrize("bad", RECORDS.values(), ids=RECORDS)
def test_a_damaged_record_is_named(bad: object) -> None:
    found = json.loads(file.text([section(record(1.0))]))
    found["sections"][0]["records"].append(bad)
    with pytest.raises(ProfileError, match=r"p\.json is damaged: sections\[0\]\.records\[1\]"):
        file.parse(json.dumps(found).encode(), "p.json")


@pytest.mark.parametrize("bad", [7, ["F(4,3)"], [["F(4,3)", 0, 1]]])
def test_a_damaged_list_of_kernels_is_named(bad: object) -> None:
    found = json.loads(file.text([section(record(1.0))]))
    found["sections"][0]["kernels"].append(bad)
    with pytest.raises(ProfileError, match=r"p\.json is damaged: sections\[0\]\.kernels\[1\]: not a list of kernels"):
        file.parse(json.dumps(found).encode(), "p.json")


# ---- precedence


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Section]]:
    """A fake processor with its own shipped profiles and an empty cache."""
    sections: list[Section] = []

    def known_with(instruction_set: str) -> list[lookup.Known]:
        with_it = (s for s in sections if s.instruction_set == instruction_set)
        return [lookup.Known(s.model, s.threads, partial(replace, s)) for s in with_it]

    monkeypatch.setattr(lookup, "shipped", known_with)
    monkeypatch.setattr(lookup, "processor_model", lambda: "GenuineIntel 6 85")
    lookup._in_force.cache_clear()
    with settings.use(profile=None, cache_dir=tmp_path):
        yield sections
    lookup._in_force.cache_clear()


def test_the_same_processor_is_believed_as_it_is(known: list[Section]) -> None:
    known += [section(record(3.0)), section(record(2.0), model="AuthenticAMD 25 1")]
    found = in_force("avx512", 2)
    assert found is not None
    assert str(found) == "A Processor (GenuineIntel 6 85), avx512, 2 threads"
    assert found.correction(PROBLEM, FAST) == Profile("", [record(3.0)]).correction(PROBLEM, FAST)


def test_another_number_of_threads_leaves_doubt(known: list[Section]) -> None:
    known += [section(record(3.0), threads=1), section(record(2.0), threads=8)]
    near, far = in_force("avx512", 8), in_force("avx512", 32)
    assert near is not None
    assert far is not None
    assert str(far).endswith("8 threads, taken for 32 threads")
    assert far.correction(PROBLEM, FAST).shift == near.correction(PROBLEM, FAST).shift
    assert far.correction(PROBLEM, FAST).doubt > near.correction(PROBLEM, FAST).doubt


def test_fewer_threads_are_the_prior(known: list[Section]) -> None:
    """Layers that were measured with one thread only, and so with more doubt; not the other way round."""
    elsewhere = nearby(kernel=(11, 11))
    known += [section(*[record(0.5)] * 20, threads=1), section(record(2.0, elsewhere), threads=2)]
    one, two = in_force("avx512", 1), in_force("avx512", 2)
    assert one is not None
    assert two is not None
    here = one.correction(PROBLEM, FAST)
    assert two.correction(PROBLEM, FAST) == here.elsewhere(lookup.OF_FEWER_THREADS)
    assert two.correction(PROBLEM, FAST).covered
    assert not one.correction(elsewhere, FAST).covered


def test_a_processor_that_nobody_measured_is_taken_for_another_one_and_doubted(known: list[Section]) -> None:
    known += [section(record(2.0), model="AuthenticAMD 25 1")]
    found = in_force("avx512", 2)
    assert found is not None
    assert str(found).startswith("A Processor (AuthenticAMD 25 1), avx512, 2 threads, taken for ")
    assert str(found).endswith("(GenuineIntel 6 85)")
    there = Profile("", [record(2.0)]).correction(PROBLEM, FAST)
    assert found.correction(PROBLEM, FAST) == there.elsewhere(lookup.STRANGER)
    for nothing_measured in ("avx2", "neon"):
        other = in_force(nothing_measured, 2)
        assert other is not None
        assert other.correction(PROBLEM, FAST) == UNMEASURED


def test_what_was_measured_here_comes_first(known: list[Section], tmp_path: Path) -> None:
    known += [section(record(2.0))]
    file.update(tmp_path / "profile.json", section(*[record(0.5)] * 20))
    found = in_force("avx512", 2)
    assert found is not None
    assert str(found).endswith("measured here")
    assert found.correction(PROBLEM, FAST).shift < 0


@pytest.mark.parametrize("changed", [{"polyconv": "0.0.1"}, {"torch": "2.0.0"}, {"instruction_set": "sse4"}])
def test_what_was_measured_with_something_else_does_not_count(
    known: list[Section], tmp_path: Path, changed: dict[str, str]
) -> None:
    file.update(tmp_path / "profile.json", section(*[record(0.5)] * 20, **changed))
    found = in_force("avx512", 2)
    assert found is not None
    assert found.correction(PROBLEM, FAST) == UNMEASURED


def test_a_file_that_cannot_be_read_is_named_once(
    known: list[Section], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    path.write_text("{")
    monkeypatch.setattr(warn_once, "_said", {})
    with settings.use(profile=path), pytest.warns(RuntimeWarning, match=r"ignores a profile: .*mine\.json is not JSON"):
        in_force("avx512", 2)
    lookup._in_force.cache_clear()
    with settings.use(profile=path), warnings.catch_warnings():
        warnings.simplefilter("error")
        in_force("avx512", 2)


def test_off_means_the_cost_model_alone() -> None:
    assert settings.current().profile == "off"
    assert in_force("avx512", 2) is None
    assert here().profile is None


# ---- plans


def device(error: float, *problems: Problem, times: int = 20) -> CpuDevice:
    """A profile in which every polyconv kernel takes this many times its estimate, relative to ATen."""
    plain = CpuDevice("avx512", cores=2)
    records = []
    for problem in problems or [PROBLEM]:
        kernels = {Kernel(c.name, kept) for c in offered(problem, plain) for kept in (False, True)}
        spent = tuple((kernel, Spent(error * 1e-3, 1e6)) for kernel in kernels)
        records += [Record(problem, Spent(1e-3, 1e6), spent)] * times
    return replace(plain, profile=Profile("a test", records))


def test_a_kernel_runs_where_it_was_measured_to_be_ahead() -> None:
    plan = plan_cpu(PROBLEM, device(0.3))
    assert plan.chosen.engine != aten.NAME
    assert "times as fast as PyTorch's convolution, probably at least" in plan.reason
    assert "estimates are corrected by the profile of a test" in plan.explain()


def test_pytorch_runs_where_kernels_were_measured_to_be_slow() -> None:
    plan = plan_cpu(PROBLEM, device(10.0))
    assert plan.chosen.engine == aten.NAME
    assert plan.reason == "no kernel of polyconv's is ahead of it by as much as the estimate may be wrong"


def test_without_measurements_only_a_large_advantage_counts() -> None:
    bare = replace(CpuDevice("avx512", cores=2), profile=Profile("nothing", ()))
    long = Problem.make("fprop", (4, 32, 128, 128), (64, 32, 5, 9), padding=(4, 4, 12, 12), dilation=(2, 3))
    assert plan_cpu(long, bare).chosen.engine != aten.NAME
    costs = Costs(PROBLEM, replace(bare, profile=None), False)
    ahead = {c.name for c in offered(PROBLEM, bare) if c.refusal is None and c.engine != aten.NAME}
    theirs = next(c for c in offered(PROBLEM, bare) if c.engine == aten.NAME)
    least = min(costs.counted(c) for c in offered(PROBLEM, bare) if c.name in ahead)
    assert costs.counted(theirs) / UNMEASURED.factor < least < costs.counted(theirs)
    assert plan_cpu(PROBLEM, bare).chosen.engine == aten.NAME


def test_the_passes_of_a_layer_pay_for_python_together() -> None:
    every = [Problem.make(kind, (1, 64, 20, 20), (64, 64, 3, 3), padding=(1, 1, 1, 1)) for kind in Pass]
    one, all_three = (replace(found, cores=1) for found in (device(0.3, every[2]), device(0.3, *every)))
    gains = [planner._gain(problem, all_three) for problem in every]
    assert max(gains) < planner.MIXED_CYCLES < sum(gains)
    assert planner._gain(every[2], one) == gains[2] > 0.0
    assert {plan_cpu(problem, one).chosen.engine for problem in every} == {aten.NAME}
    assert aten.NAME not in {plan_cpu(problem, all_three).chosen.engine for problem in every}
    assert plan_cpu(replace(every[2], batch=8), one).chosen.engine != aten.NAME


def test_cores_that_wait_for_python_are_counted() -> None:
    """Twice the cores halve the compute time, not the dispatch overhead."""
    few, many = (replace(device(0.3, PROBLEM), cores=cores) for cores in (1, 8))
    ahead = dict.fromkeys(Pass, 0.0)
    for inference in (False, True):
        one, eight = (planner.dispatch_overhead(PROBLEM, cores, inference, ahead) for cores in (few, many))
        assert eight == 8 * one


def test_what_is_alone_needs_no_advantage() -> None:
    double = replace(PROBLEM, dtype="float64")
    assert plan_cpu(double, device(10.0)).chosen.engine == "plain"


# ---- shipped profiles


SHIPPED = [known.read() for name in ("avx512", "avx2", "sse4") for known in shipped(name)]
SAMPLE = 200
"""Layers of each profile that are decided again, except nightly."""


@pytest.mark.parametrize("found", SHIPPED, ids=str)
def test_shipped_estimates_are_those_of_todays_cost_model(found: Section) -> None:
    """After a change of formulas: python benchmarks/cpu/remodel_profiles.py."""
    with on_instruction_set(found.instruction_set):
        for one in found.records[::7]:
            again = calibration.remodelled(one, found.instruction_set, found.threads)
            assert file.text([replace(found, records=(one,))]) == file.text([replace(found, records=(again,))])


@pytest.mark.parametrize("found", SHIPPED, ids=str)
def test_layers_that_were_measured_would_not_be_slower(found: Section) -> None:
    """Leave-one-out: each layer is decided by the profile without it. Hardly any loses, none much."""
    places = [(one.problem.kind, place_of(one.problem), one) for one in found.records]
    ratios = []
    for kind, place, one in sampled(places, SAMPLE, str(found)):
        others = [record for of_kind, at, record in places if of_kind is kind and at != place]
        profile = Profile("the others", others)
        costs = [
            (spent.cycles * profile.correction(one.problem, kernel).factor, spent.seconds)
            for kernel, spent in one.kernels
            if not kernel.kept
        ]
        chosen = min([(one.torch.cycles, one.torch.seconds), *costs])
        ratios.append(one.torch.seconds / chosen[1])
    slower = [ratio for ratio in ratios if ratio < 0.9]
    assert len(slower) <= 0.03 * len(ratios)
    assert sum(math.log(ratio) for ratio in ratios) > 0


def test_a_file_is_named_by_what_is_in_it() -> None:
    for name in ("avx512", "avx2", "sse4"):
        for known in shipped(name):
            found = known.read()
            assert (known.model, name, known.threads) == (found.model, found.instruction_set, found.threads)


# ---- measuring


def test_layers_come_far_apart() -> None:
    found = [next(iter(problems)) for _, problems in zip(range(12), calibration.cases(), strict=False)]
    assert len({(p.kernel, p.stride, p.groups == 1, p.in_channels <= 4) for p in found}) >= 6
    assert all(p.batch * p.multiplications <= 8 * calibration.MOST_MULTIPLICATIONS for p in found)


def test_layers_of_some_kinds_can_be_asked_for() -> None:
    found = [problems[0] for _, problems in zip(range(5), calibration.cases(only=("Depthwise 3x3",)), strict=False)]
    assert all(p.depthwise and p.kernel == (3, 3) for p in found)
    assert not list(calibration.cases(only=("no such layer",)))


def test_of_one_channel_the_output_says_the_layout() -> None:
    """The input has one layout in both problems. A file stores both, and finds them again."""
    layers = calibration.cases(only=("photographs",), most=2e9)
    (gray,) = (problems for problems in layers if problems[0].in_channels == 1)
    assert [is_channels_last(p) for p in gray] == [False, True] * 2
    (read,) = file.parse(file.text([section(*(record(1.0, p) for p in gray))]).encode(), "p.json")
    assert [r.problem for r in read.records] == gray


def test_signals_and_transposed_convolutions_are_among_them() -> None:
    """A signal as the 2-D problem that kernels get, in its one layout; a file stores it and finds it again."""
    signals = list(calibration.cases(only=("vocoder",), most=1e9))
    assert len(signals) == 1 + 4 * (1 + 9) + 1
    assert all(p.in_size[0] == 1 and p.x_strides[1] != 1 for problems in signals for p in problems)
    longer = [problems for problems in signals if problems[0].kernel == (1, 16)]
    assert {tuple(p.kind for p in problems) for problems in longer} == {(Pass.DGRAD, Pass.FPROP, Pass.WGRAD)}
    (noise, *_) = calibration.cases(only=("family/dcgan",))
    assert [is_channels_last(p) for p in noise] == [False, True] * 3
    every = [p for problems in (*signals, noise) for p in problems]
    (read,) = file.parse(file.text([section(*(record(1.0, p) for p in every))]).encode(), "p.json")
    assert [r.problem for r in read.records] == every


def test_a_problem_is_measured_with_every_engine_and_both_ways() -> None:
    one = calibration.measure(Problem.make("fprop", (1, 32, 14, 14), (32, 32, 3, 3), padding=(1, 1, 1, 1), bias=True))
    found = {(kernel.name.rpartition(", ")[2], kernel.kept) for kernel, _ in one.kernels}
    assert {("tile lanes", False), ("tile lanes", True), ("channel lanes", False)} <= found
    assert one.torch.seconds > 0
    assert all(spent.seconds > 0 and spent.cycles > 0 for _, spent in one.kernels)


@pytest.mark.parametrize("kind", [Pass.DGRAD, Pass.WGRAD])
def test_gradients_are_measured(kind: Pass) -> None:
    problem = Problem.make(kind, (2, 16, 9, 9), (16, 1, 3, 3), padding=(1, 1, 1, 1), groups=16, bias=kind is Pass.WGRAD)
    assert "direct, depthwise" in {kernel.name for kernel, _ in calibration.measure(problem.channels_last()).kernels}


def test_the_command_writes_a_profile_that_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = [Problem.make("fprop", (1, 16, 14, 14), (16, 16, 1, 1)), Problem.make("wgrad", (1, 8, 9, 9), (8, 8, 3, 3))]
    monkeypatch.setattr(calibration, "cases", lambda most, only: iter([small]))
    path = tmp_path / "profile.json"
    assert main(["calibrate", "--seconds", "5", "-o", str(path)]) == 0
    assert "2 problems" in capsys.readouterr().out
    assert main(["calibrate", "--seconds", "5", "-o", str(path), "--json"]) == 0
    assert [room["problems"] for room in json.loads(capsys.readouterr().out)["rooms"]] == [1, 1]
    with settings.use(profile=path):
        assert "measured here" in str(polyconv.explain(polyconv.Conv2d(16, 16, 1), torch.randn(1, 16, 14, 14)))


def test_one_layer_is_measured_however_slow_the_machine_is() -> None:
    small = [Problem.make("fprop", (1, 16, 14, 14), (16, 16, 1, 1))]
    ((_, records),) = calibration.measured(0.0, [small, small])
    assert [record.problem for record in records] == small


def test_figures_of_problems_that_only_pytorch_can_run() -> None:
    found = calibrate._figures([Record(PROBLEM, Spent(1e-3, 1e6), ())])
    assert found == {"problems": 1, "ahead": 0, "by": 1.0, "scatter": 1.0}


def test_the_command_does_not_overwrite_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.json"
    path.write_text("[]")
    assert main(["calibrate", "--seconds", "1", "-o", str(path)]) == 1
    assert "It was not overwritten" in capsys.readouterr().err


def test_calibrate_for_a_lesser_processor(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    ran = commands.polyconv("calibrate", "--isa", "sse4", "--seconds", "1", "-o", str(path), "--json")
    assert ran.returncode == 0, ran.stderr
    assert ", sse4, " in json.loads(ran.stdout)["processor"]


def test_single_taps_with_a_stride_on_few_channels_do_not_end_the_process() -> None:
    """ATen's weight gradient reads past the image there: see ``aten``."""
    x, dy = torch.randn(1, 3, 224, 224), torch.randn(1, 64, 112, 112)
    x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    module = polyconv.Conv2d(3, 64, 1, stride=2, bias=False).to(memory_format=torch.channels_last)
    module(x).backward(dy)
    assert module.weight.grad is not None
    expected = torch.einsum("nkhw,nchw->kc", dy.double(), x[:, :, ::2, ::2].double())
    torch.testing.assert_close(module.weight.grad[:, :, 0, 0].double(), expected, rtol=1e-4, atol=1e-2)
