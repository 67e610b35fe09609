"""Additions of installed packages by entry points: `gramwatch-lab` adds sets and networks."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any, TypeVar

_T = TypeVar("_T")


class Offered(Mapping[str, _T]):
    """The entries that installed packages offer for a group, and then the library's own.

    An entry point of the group names a mapping. Nothing is imported before the first use.
    """

    def __init__(self, group: str, own: Mapping[str, _T] | None = None) -> None:
        self.group, self._own = group, own or {}

    @cached_property
    def others(self) -> Mapping[str, _T]:
        """The entries of other packages."""
        entries: dict[str, Any] = {}
        for point in entry_points(group=self.group):
            entries |= point.load()
        return entries

    @cached_property
    def _entries(self) -> Mapping[str, _T]:
        return {**self.others, **self._own}

    def __getitem__(self, name: str) -> _T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
