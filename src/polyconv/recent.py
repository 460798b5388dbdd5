"""A table of bounded size, for what is kept by shape: the entries that were used least recently are forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """Two generations of entries: ``table[key]`` gives None where nothing is known.

    A new entry is put into the younger generation; when that holds half of the capacity it becomes the older one, whose
    entries come back where they are asked for, and are forgotten otherwise. So the entries used last are always there,
    each step takes constant time, and a lookup that finds a young entry is one of a plain dictionary: warm calls pay
    nothing for the order. Threads may share a table: what one of them loses is made anew.
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
        """Enter ``value``, which is not None."""
        if dict.__len__(self) >= max(1, self.capacity // 2):
            self.older = dict(self.items())
            dict.clear(self)
        self[key] = value

    def every(self) -> dict[K, V]:
        """A copy of both generations."""
        return {**self.older, **dict(self.items())}

    def clear(self) -> None:
        self.older = {}
        dict.clear(self)

    def __len__(self) -> int:
        return dict.__len__(self) + len(self.older)
