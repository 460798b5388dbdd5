"""Bounded LRU table, for entries by shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruTable(dict[K, V]):
    """LRU table of two generations: ``table[key]`` is None for an unknown key.

    New entries go to the younger generation; when that holds half of the capacity it becomes the older one, whose
    entries return to the younger one when looked up, and are dropped otherwise. A hit in the younger generation is a
    plain dict lookup, so warm calls pay nothing for the order. Threads may share a table: a lost entry is made anew.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.older: dict[K, V] = {}

    if TYPE_CHECKING:

        def __getitem__(self, key: K) -> V | None: ...  # type: ignore[override]

    def __missing__(self, key: K) -> V | None:
        value = self.older.pop(key, None)
        if value is not None:
            self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        """Add an entry; ``value`` must not be None."""
        if dict.__len__(self) >= max(1, self.capacity // 2):
            self.older = dict(self.items())
            dict.clear(self)
        self[key] = value

    def drop(self, key: K) -> None:
        """Remove an entry, if there is one."""
        self.pop(key, None)
        self.older.pop(key, None)

    def every(self) -> dict[K, V]:
        """A copy of both generations."""
        return {**self.older, **dict(self.items())}

    def clear(self) -> None:
        self.older = {}
        dict.clear(self)

    def __len__(self) -> int:
        return dict.__len__(self) + len(self.older)
