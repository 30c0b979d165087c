"""How many base models fit on the devices and in the memory of their hosts (pure)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from placement.memory import PHASES, MemoryPlan
from skyrl_actors.config.cluster import ClusterConfig
from skyrl_actors.config.served_bases import ParkingConfig
from skyrl_actors.messages.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class ParkingPlan:
    """The room for base models. Bytes are those of one device.

    `sizes` is what each takes beside what it also takes while it is parked. `capacity` None: one at
    a time. `max_loaded` None: all fit in memory.
    """

    sizes: Mapping[str, int]
    capacity: int | None
    max_loaded: int | None
    max_resident: int | None = None  # from the config; sizes and capacity count base models then

    @property
    def text(self) -> str:
        """The plan in words."""
        loaded = len(self.sizes) if self.max_loaded is None else self.max_loaded
        sizes = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in self.sizes.items())
        if self.capacity is None or self.max_resident is not None:
            return f"{self.max_resident or 1} on the devices at a time; {loaded} loaded"
        room = f"{self.capacity / GIB:.2f} GiB of each device"
        return f"on the devices as many as fit in {room} ({sizes}); {loaded} loaded"


def parking_plan(parking: ParkingConfig, plans: Mapping[str, MemoryPlan]) -> ParkingPlan:
    """Return the room for base models with these memory plans.

    Raises ConfigError when one does not fit beside what the parked ones keep.
    """
    parked = {name: _kept_on_device(plan) for name, plan in plans.items()}
    sizes = {name: _peak(plan) - parked[name] for name, plan in plans.items()}
    usable = min((p.usable_bytes for p in plans.values() if p.usable_bytes), default=None)
    max_loaded = parking.max_loaded or _max_loaded(plans, parked, sizes, usable)
    if parking.max_resident is not None:
        most = parking.max_resident
        return ParkingPlan(dict.fromkeys(sizes, 1), most, max_loaded, most)
    if usable is None:
        return ParkingPlan(sizes, None, max_loaded)
    capacity = usable - _most(parked.values(), max_loaded)
    if capacity < max(sizes.values()):
        raise ConfigError(
            f"parking.max_loaded is {max_loaded}, and beside what that many keep on a device "
            f"{capacity / GIB:.2f} GiB are free; the largest base model needs "
            f"{max(sizes.values()) / GIB:.2f}: lower parking.max_loaded"
        )
    return ParkingPlan(sizes, capacity, max_loaded)


def too_much(config: ClusterConfig, plans: Mapping[str, MemoryPlan]) -> list[str]:
    """Return what is wrong if the given limits allow more base models than there is room for.

    Nothing is checked with placement.memory_check=off.
    """
    parking = config.parking
    if config.placement.memory_check == "off":
        return []
    parked = {name: _kept_on_device(plan) for name, plan in plans.items()}
    sizes = {name: _peak(plan) - parked[name] for name, plan in plans.items()}
    usable = min((p.usable_bytes for p in plans.values() if p.usable_bytes), default=None)
    found, most, loaded = list[str](), parking.max_resident, parking.max_loaded
    if most is None and loaded is None:
        return found
    try:
        fit = _max_loaded(plans, parked, sizes, usable)
    except ConfigError as error:
        return [str(error)]
    if loaded is not None and fit is not None and loaded > fit:
        found.append(f"parking.max_loaded is {loaded}, and the memory holds {fit}")
    if most is not None and usable is not None:
        needed = _most(sizes.values(), most) + _most(parked.values(), loaded or fit)
        if needed > usable:
            found.append(
                f"parking.max_resident is {most}: the {most} largest base models, beside what "
                f"parked ones keep, need {needed / GIB:.2f} GiB of a device, and "
                f"{usable / GIB:.2f} can be used"
            )
    return found


def _max_loaded(
    plans: Mapping[str, MemoryPlan],
    parked: Mapping[str, int],
    sizes: Mapping[str, int],
    usable: int | None,
) -> int | None:
    """Return how many base models may be loaded, or None if all may."""
    hosts = [plan.host_bytes for plan in plans.values() if plan.host_bytes is not None]
    in_host = [_parked_in_host(plan) for plan in plans.values()]
    for count in range(len(plans), 0, -1):
        fits_host = not hosts or _most(in_host, count) <= min(hosts)
        if fits_host and (
            usable is None or _most(parked.values(), count) + max(sizes.values()) <= usable
        ):
            return None if count == len(plans) else count
    largest = max(sizes, key=lambda name: sizes[name] + parked[name])
    raise ConfigError(
        f"base model {largest} does not fit beside others, not even if only one is loaded; "
        "lower its engine.kv_cache_bytes or policy.microbatch_tokens, or serve it alone"
    )


def _kept_on_device(plan: MemoryPlan) -> int:
    """Return what the processes keep on a device while they are parked."""
    return max(
        sum(part.bytes for part in parts if set(PHASES) <= part.phases)
        for parts in plan.parts.values()
    )


def _peak(plan: MemoryPlan) -> int:
    return max(plan.used(device, phase) for device in plan.parts for phase in PHASES)


def _parked_in_host(plan: MemoryPlan) -> int:
    """Return the memory that a parked base model takes of its share of the host."""
    return max(sum(part.bytes for part in parts if part.kept) for parts in plan.parts.values())


def _most(values: Iterable[int], count: int | None) -> int:
    """Return the sum of the `count` largest values; None: of all."""
    return sum(sorted(values, reverse=True)[:count])
