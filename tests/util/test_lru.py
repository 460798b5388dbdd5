"""Tables of bounded size."""

from __future__ import annotations

import random

from polyconv.util.lru import LruTable


def test_what_was_used_last_is_there() -> None:
    """At least half of the capacity, at most the capacity, whatever came in between."""
    table: LruTable[int, str] = LruTable(16)
    draw, used = random.Random(0), []
    for _ in range(5000):
        key = draw.randrange(40)
        if table[key] is None:
            table.put(key, str(key))
        assert len(table) <= 16
        used.append(key)
        latest = list(dict.fromkeys(reversed(used)))[:8]
        assert all(key in table or key in table.older for key in latest)
        assert table[latest[-1]] == str(latest[-1])
        used.append(latest[-1])


def test_an_entry_that_is_used_again_and_again_stays() -> None:
    table: LruTable[int, str] = LruTable(8)
    table.put(-1, "hot")
    for key in range(1000):
        table.put(key, "cold")
        assert table[-1] == "hot"
    assert table[0] is None


def test_clear_forgets_both_generations() -> None:
    table: LruTable[int, int] = LruTable(4)
    for key in range(3):
        table.put(key, key)
    assert len(table) == 3
    table.clear()
    assert len(table) == 0
    assert [table[key] for key in range(3)] == [None] * 3
