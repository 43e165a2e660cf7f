"""Names of proposers and verifiers to classes, by entry points; the built-in ones come in by the same door.

Nothing is imported until it is asked for, so a broken third party spoils its own name and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from vllm_specplugin.errors import RegistryError, suggestion
from vllm_specplugin.proposers.base import Proposer
from vllm_specplugin.scorers.base import Verifier

PROPOSER_GROUP = "vllm_specplugin.proposers"
VERIFIER_GROUP = "vllm_specplugin.verifiers"

PartT = TypeVar("PartT")


def normalise(name: str) -> str:
    """Dashes and underscores are equal in every name and key."""
    return name.strip().replace("-", "_")


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered name."""

    name: str
    target: str
    """`module:Class`"""
    distribution: str
    """The installed package that brings it."""


class Registry(Generic[PartT]):
    """The names of one entry-point group."""

    def __init__(self, group: str, base: type[PartT], noun: str) -> None:
        self.group = group
        self.base = base
        self.noun = noun

    def _points(self) -> dict[str, list[EntryPoint]]:
        points: dict[str, list[EntryPoint]] = {}
        for point in entry_points(group=self.group):
            same_name = points.setdefault(normalise(point.name), [])
            # One distribution can be found twice (an editable install and its folder): that is no conflict.
            if point.value not in [other.value for other in same_name]:
                same_name.append(point)
        return points

    def entries(self) -> list[Entry]:
        """Every registered name, sorted; two packages that claim one name are both listed."""
        return [
            Entry(name, point.value, _distribution(point)) for name, points in sorted(self._points().items()) for point in points
        ]

    def names(self) -> list[str]:
        return sorted(self._points())

    def resolve(self, name: str) -> type[PartT]:
        """The class registered under a name.

        Raises:
            RegistryError: unknown name, a name claimed by two packages, a class that cannot be imported or is of the
                wrong kind.
        """
        points = self._points()
        found = points.get(normalise(name))
        if not found:
            raise RegistryError(
                f"{name!r} is no {self.noun}{suggestion(normalise(name), points)} "
                f"Installed: {', '.join(sorted(points)) or 'none'}."
            )
        if len(found) > 1:
            owners = " and ".join(f"{_distribution(point)} ({point.value})" for point in found)
            raise RegistryError(f"The {self.noun} {name!r} is registered by {owners}; uninstall one of them.")
        point = found[0]
        try:
            part = point.load()
        except Exception as error:
            raise RegistryError(
                f"The {self.noun} {name!r} of {_distribution(point)} cannot be imported from {point.value}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not (isinstance(part, type) and issubclass(part, self.base)):
            raise RegistryError(
                f"The {self.noun} {name!r} of {_distribution(point)} is {point.value}, which is no subclass of "
                f"{self.base.__module__}.{self.base.__name__}."
            )
        return part

    def describe(self, look: Callable[[type[PartT]], str]) -> list[tuple[Entry, str]]:
        """Each entry with `look(class)`, or with what is wrong where it cannot be had."""
        described = []
        for entry in self.entries():
            try:
                described.append((entry, look(self.resolve(entry.name))))
            except RegistryError as error:
                described.append((entry, f"broken: {error}"))
        return described


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed package"


PROPOSERS: Registry[Proposer] = Registry(PROPOSER_GROUP, Proposer, "proposer")  # type: ignore[type-abstract]
VERIFIERS: Registry[Verifier] = Registry(VERIFIER_GROUP, Verifier, "verifier")  # type: ignore[type-abstract]
