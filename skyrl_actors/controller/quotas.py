"""Decide whether an API key may send one more request now (pure).

Rates are token buckets. A bucket holds what a minute allows and fills evenly. A request is admitted
while its buckets are not empty, and may bring them into debt: its sampled tokens are known only
when it is answered. So the rate over a longer time is exact, and a large request is not refused for
ever. After a restart the buckets are full. The tokens of the day are in the journal. Those that
open requests may still use are reserved, so that many at once exceed the day's limit by one request
at most, beside those that were open when this process started. What samples reserve is mostly more
than they use, so it stops only samples: training would otherwise wait behind them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from skyrl_actors.messages.errors import CapacityError, QuotaUsed
from skyrl_actors.messages.usage import ALL_KEYS, DAY_S, LIMITS, OwnerQuota, Quota, Usage

MINUTE_S = 60.0
NO_QUOTA = Quota()


class Reserved(NamedTuple):
    """Tokens that open requests may use: input of training, which is known, and samples."""

    training: int = 0
    samples: int = 0


NOTHING = Reserved()


class Bucket:
    """A token bucket that holds `limit` and fills by `limit` in a minute."""

    def __init__(self, limit: int, now: float):
        self.limit = limit
        self._level = float(limit)
        self._at = now

    def wait_s(self, now: float) -> float:
        """Return the seconds until the bucket is no longer empty; 0 if it is not."""
        passed_s, self._at = max(0.0, now - self._at), now
        self._level = min(self.limit, self._level + passed_s * self.limit / MINUTE_S)
        return 0.0 if self._level > 0 else (1 - self._level) * MINUTE_S / self.limit

    def take(self, amount: int) -> None:
        """Take an amount, also if that empties the bucket."""
        self._level -= amount


class Quotas:
    """The quotas of all keys and what was used of them. `wall`: seconds since the epoch."""

    def __init__(self, wall: Callable[[], float]):
        self._wall = wall
        self._of: dict[str, OwnerQuota] = {}
        self._buckets: dict[tuple[str, str], Bucket] = {}
        self._day = -1
        self._today: dict[str, int] = {}
        self._reserved: dict[str, Reserved] = {}  # by owner

    def begin(self, quotas: Iterable[OwnerQuota], today: Iterable[Usage]) -> None:
        """Take the quotas and today's usage that are in the journal."""
        self._of = {quota.owner: quota for quota in quotas}
        for usage in today:
            self.answered(usage)

    def all(self) -> list[OwnerQuota]:
        """Return the quotas that were set, by name."""
        return sorted(self._of.values(), key=lambda quota: (quota.name, quota.owner))

    def set(self, quota: OwnerQuota) -> None:
        """Use a quota from now on."""
        self._of[quota.owner] = quota

    def of(self, owner: str) -> Quota:
        """Return the quota of an owner: its own, that of all keys, or none.

        One that has only a weight of its own has the limits of all keys.
        """
        if not owner:  # without API keys
            return NO_QUOTA
        of_all, own = self._of.get(ALL_KEYS), self._of.get(owner)
        if own is None:
            return NO_QUOTA if of_all is None else of_all.quota
        if of_all is None or any(getattr(own.quota, limit) is not None for limit in LIMITS):
            return own.quota
        return replace(of_all.quota, weight=own.quota.weight)

    def weight(self, owner: str) -> float:
        return self.of(owner).weight

    def today(self, owner: str) -> int:
        """Return the tokens that an owner used since midnight UTC."""
        self._turn_day()
        return self._today.get(owner, 0)

    def admit(self, owner: str, tokens: int, num_open: int, reserves: Reserved = NOTHING) -> None:
        """Count a request with `tokens` of input, or raise CapacityError or QuotaUsed.

        `num_open`: requests of the owner that are accepted and not answered. `reserves`: what the
        request may use, until `release`.
        """
        quota, now = self.of(owner), self._wall()
        if quota.open_requests is not None and num_open >= quota.open_requests:
            raise CapacityError(
                f"{num_open} requests of this API key are open, its most (open_requests); "
                "try again when some were answered"
            )
        if quota.tokens_per_day is not None and self.today(owner) >= quota.tokens_per_day:
            left_s = DAY_S - now % DAY_S
            raise QuotaUsed(
                f"this API key has used {self.today(owner)} tokens today and may use "
                f"{quota.tokens_per_day} (tokens_per_day); the next day begins in "
                f"{left_s / 3600:.1f} h, at 00:00 UTC"
            )
        held = self._reserved.get(owner, NOTHING)
        if quota.tokens_per_day is not None:
            left = quota.tokens_per_day - self.today(owner)
            counted = sum(held) if reserves.samples else held.training if reserves.training else 0
            if counted >= left:
                raise CapacityError(
                    f"open requests of this API key may use {counted} tokens, and {left} are left "
                    "of today (tokens_per_day); try again when some were answered"
                )
        self.count(owner, tokens)
        if any(reserves):
            self._reserved[owner] = _added(held, reserves, 1)

    def count(self, owner: str, tokens: int = 0) -> None:
        """Count a request for the rates alone, or raise CapacityError."""
        now = self._wall()
        rates = self._rates(owner, self.of(owner), now)
        for name, bucket in rates.items():
            if wait_s := bucket.wait_s(now):
                raise CapacityError(
                    f"this API key has used its {bucket.limit} {name.replace('_', ' ')} ({name}); "
                    f"try again in {wait_s:.1f} s"
                )
        for name, bucket in rates.items():
            bucket.take(1 if name == "requests_per_minute" else tokens)

    def withdraw(self, owner: str, tokens: int) -> None:
        """Give back an admitted request that was not accepted after all."""
        for name, amount in (("requests_per_minute", 1), ("tokens_per_minute", tokens)):
            if (bucket := self._buckets.get((owner, name))) is not None:
                bucket.take(-amount)

    def release(self, owner: str, reserved: Reserved) -> None:
        """End a reservation, because the request is answered or was not accepted."""
        left = _added(self._reserved.pop(owner, NOTHING), reserved, -1)
        if any(left):
            self._reserved[owner] = left

    def answered(self, usage: Usage) -> None:
        """Count what an answered request used. Its input is in the buckets already."""
        self._turn_day()
        if usage.hour // DAY_S == self._day:
            self._today[usage.owner] = self._today.get(usage.owner, 0) + usage.tokens
        bucket = self._buckets.get((usage.owner, "tokens_per_minute"))
        if bucket is not None:
            bucket.take(usage.sampled_tokens)

    def _turn_day(self) -> None:
        day = int(self._wall() // DAY_S)
        if day != self._day:
            self._day, self._today = day, {}

    def _rates(self, owner: str, quota: Quota, now: float) -> Mapping[str, Bucket]:
        found: dict[str, Bucket] = {}
        for name in ("requests_per_minute", "tokens_per_minute"):
            limit, key = getattr(quota, name), (owner, name)
            if limit is None:
                self._buckets.pop(key, None)
                continue
            if key not in self._buckets or self._buckets[key].limit != limit:
                self._buckets[key] = Bucket(limit, now)
            found[name] = self._buckets[key]
        return found


def _added(held: Reserved, more: Reserved, sign: int) -> Reserved:
    return Reserved(held.training + sign * more.training, held.samples + sign * more.samples)
