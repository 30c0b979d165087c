"""How much of a bounded resource the holder of one API key may take (pure).

The bound of a key is what is still free, so that a key that takes all it can leaves half to the next one, which leaves half
of that, and so on (dynamic thresholds with factor 1: Choudhury and Hahne, "Dynamic queue length thresholds for
shared-memory packet switches", IEEE/ACM Transactions on Networking 6(2), 1998). When others give back, its bound rises.
"""

from collections import Counter


class Shares:
    """`limit` units of something. `floor`: what each key may always have, also beyond the limit."""

    def __init__(self, *, limit: int, per_key: int, floor: int):
        self.limit = limit
        self.per_key = per_key
        self.floor = floor
        self.taken = 0
        self._of_owner: Counter[str] = Counter()

    def held(self, owner: str) -> int:
        return self._of_owner[owner]

    def has_room(self, owner: str, amount: int) -> bool:
        """Whether this owner may take `amount` more. One who holds nothing may always take what is free."""
        held, free = self._of_owner[owner], self.limit - self.taken
        if held + amount <= min(self.per_key, self.floor):
            return True
        if not owner or not held:  # without API keys all clients are one owner
            return amount <= free and held + amount <= self.per_key
        return held + amount <= min(self.per_key, free)

    def take(self, owner: str, amount: int) -> None:
        self._of_owner[owner] += amount
        self.taken += amount

    def give(self, owner: str, amount: int) -> None:
        self._of_owner[owner] -= amount
        self.taken -= amount
        if not self._of_owner[owner]:
            del self._of_owner[owner]
