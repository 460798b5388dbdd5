"""Elimination in an autotuning session: order of trials, dropped candidates, the decision."""

from __future__ import annotations

from polyconv.autotune.elimination import BEHIND, Elimination


def run(times: dict[str, float], rounds: int = 5, stays: tuple[str, ...] = ()) -> Elimination:
    """A session in which every trial of a candidate takes the same time."""
    standings = Elimination(list(times), rounds, stays)
    while not standings.decided:
        name = standings.next
        standings.note(name, times[name])
    return standings


def test_everybody_has_as_many_turns() -> None:
    standings = run({"a": 1.0, "b": 1.1, "c": 1.05})
    assert {name: len(found) for name, found in standings.samples.items()} == {"a": 5, "b": 5, "c": 5}
    assert standings.best == {"a": 1.0, "b": 1.1, "c": 1.05}


def test_who_is_far_behind_drops_out_early() -> None:
    standings = run({"a": 1.0, "once": 2.6, "twice": 1.6, "thrice": 1.3, "near": 1.1})
    assert {name: len(found) for name, found in standings.samples.items()} == {
        "a": 5,
        "once": 1,
        "twice": 2,
        "thrice": 3,
        "near": 5,
    }
    assert standings.running == ("a", "near")


def test_who_comes_first_may_drop_out_for_who_comes_later() -> None:
    standings = run({"slow": 3.0, "fast": 1.0})
    assert standings.running == ("fast",)
    assert len(standings.samples["fast"]) == 1, "no trial is left to compare it with"


def test_one_slow_call_is_no_verdict() -> None:
    standings = Elimination(["a", "b"], 5)
    for name, seconds in (("a", 1.0), ("b", BEHIND[0] * 0.99), ("a", 1.0), ("b", 0.9)):
        standings.note(name, seconds)
    assert standings.running == ("a", "b")
    assert standings.best["b"] == 0.9


def test_who_stays_is_timed_to_the_end() -> None:
    standings = run({"a": 1.0, "theirs": 9.0}, stays=("theirs",))
    assert len(standings.samples["theirs"]) == 5


def test_nobody_is_dropped_who_is_alone() -> None:
    standings = Elimination(["a", "b"], 5)
    standings.drop("a")
    standings.drop("b")
    assert standings.running == ("b",)
    assert standings.decided
