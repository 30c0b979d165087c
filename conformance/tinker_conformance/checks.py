"""What a check is: a function of a server that raises `Failed` or `Skipped`, and its place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tinker_conformance.server import Server

Tier = Literal["core", "numbers", "sampling", "durability", "hostile"]
TIERS: tuple[Tier, ...] = ("core", "numbers", "sampling", "durability", "hostile")


class Failed(Exception):
    """The server does not do what the check asks for."""


class Skipped(Exception):
    """The server does not offer what the check is about, and says so."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the scorecard."""

    tier: Tier
    title: str  # what a right server does
    run: "Callable[[Server], None]"
    reproducer: str  # a short script; `client` and `types` are defined by its first lines

    @property
    def name(self) -> str:
        return self.run.__name__


CHECKS: list[Check] = []


def check(tier: Tier, title: str, reproducer: str) -> "Callable[[Callable[[Server], None]], None]":
    """Add a function to the checks."""

    def add(run: "Callable[[Server], None]") -> None:
        CHECKS.append(Check(tier=tier, title=title, run=run, reproducer=reproducer))

    return add


def expect(holds: bool, otherwise: str) -> None:
    """Raise Failed unless the condition holds."""
    if not holds:
        raise Failed(otherwise)
