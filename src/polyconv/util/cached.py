"""A cached property that holds no lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801  # as functools has it
    """``functools.cached_property`` without its lock, which Python has before 3.12.

    All instances share that lock, and it is held while a value is computed. A child that is forked meanwhile by another
    thread would wait for it without end. Here two threads may compute the same value, and keep one.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> cached_property[T] | T:
        if instance is None:
            return self
        # Not called again: a value in the instance's dictionary is found first.
        return instance.__dict__.setdefault(self._name, self._compute(instance))  # type: ignore[no-any-return]
