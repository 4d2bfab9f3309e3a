"""Dictionaries of what others keep alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class WeakValues(Generic[K, V]):
    """Values by key, for as long as somebody else keeps them.

    Unlike `weakref.WeakValueDictionary` it runs no Python code when a value dies: that may be in a garbage collection
    on the user's thread, where what a signal's handler raises in such code would be lost.
    """

    def __init__(self) -> None:
        self._references: dict[K, weakref.ref[V]] = {}

    def get(self, key: K) -> V | None:
        """The value, if there is one."""
        reference = self._references.get(key)
        return None if reference is None else reference()

    def set(self, key: K, value: V) -> V:
        """Keeps a value, and returns it."""
        # The dead reference is `pop`'s default.
        self._references[key] = weakref.ref(value, functools.partial(self._references.pop, key))
        return value
