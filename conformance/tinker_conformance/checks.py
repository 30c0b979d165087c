"""What a check is: a function of a server that raises `Failed` or `Skipped`, and its place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from tinker_conformance.server import Server

Tier = Literal["core", "numbers", "sampling", "models", "images", "load", "durability", "hostile"]
TIERS: tuple[Tier, ...] = get_args(Tier)  # in the order of their runs: the harmless ones first


class Failed(Exception):
    """The server does not do what the check asks for."""


class Skipped(Exception):
    """The server does not offer what the check is about, and says so."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the scorecard."""

    tier: Tier
    title: str  # what a right server does
    run: "Callable[[Server], str | None]"  # returns what it measured

    @property
    def name(self) -> str:
        return self.run.__name__


CHECKS: list[Check] = []


def check(tier: Tier, title: str) -> "Callable[[Callable[[Server], str | None]], None]":
    """Add a function to the checks."""

    def add(run: "Callable[[Server], str | None]") -> None:
        CHECKS.append(Check(tier=tier, title=title, run=run))

    return add


def expect(holds: bool, otherwise: str) -> None:
    """Raise Failed unless the condition holds."""
    if not holds:
        raise Failed(otherwise)
