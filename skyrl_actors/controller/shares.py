"""Bound the part of a resource that one API key may take (pure).

The bound of a key is the amount that is free, times the key's weight. A key of weight 1 that takes
all it can leaves half to the next key, which leaves half of that, and so on. The bound of a key
rises when others release units. Source: dynamic thresholds, with the weight as the factor, of
Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM
Transactions on Networking 6(2), 1998.
"""

from collections import Counter
from collections.abc import Callable


class Shares:
    """`limit` units, shared between API keys.

    Each key may always have `floor` units, also while others hold the rest, and never more than
    `limit`.
    """

    def __init__(self, *, limit: int, floor: int, weight: Callable[[str], float] = lambda _: 1.0):
        self.limit = limit
        self.floor = floor
        self._weight = weight
        self.taken = 0
        self._of_owner: Counter[str] = Counter()

    def held(self, owner: str) -> int:
        """Return the units that an owner has."""
        return self._of_owner[owner]

    def by_owner(self) -> dict[str, int]:
        """Return the units of all owners that have some."""
        return dict(self._of_owner)

    def has_room(self, owner: str, amount: int) -> bool:
        """Return whether an owner may take `amount` more.

        An owner without units may take all free ones.
        """
        held, free = self._of_owner[owner], self.limit - self.taken
        if held + amount <= min(self.limit, self.floor):
            return True
        if not owner or not held:  # without API keys all clients are one owner
            return amount <= free
        return held + amount <= free * self._weight(owner) and amount <= free

    def take(self, owner: str, amount: int) -> None:
        """Take units for an owner, whether there is room or not."""
        self._of_owner[owner] += amount
        self.taken += amount

    def give(self, owner: str, amount: int) -> None:
        """Release units of an owner."""
        self._of_owner[owner] -= amount
        self.taken -= amount
        if not self._of_owner[owner]:
            del self._of_owner[owner]
