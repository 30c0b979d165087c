"""The status of a service from those of its shards (pure)."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

Status = dict[str, Any]
SUMS = ("sessions", "samplers", "open_requests", "recoveries")
LISTS = ("models", "recovery_s", "snapshot_s")
OF_SHARD = ("ready", "mode", "epoch", "sessions", "open_requests", "uptime_s", "process", "standby")
SILENT = "it does not answer"


def joined(found: Mapping[int, Status]) -> Status:
    """Return one status. Phases are those of the first shard that answers.

    Parts of other shards than the first one have the number of the shard before their names.
    """
    whole = dict(found[min(found)])
    whole["name"] = str(whole["name"]).partition(".")[0]
    for key in SUMS:
        whole[key] = sum(own.get(key, 0) for own in found.values())
    for key in LISTS:
        whole[key] = [item for number in sorted(found) for item in found[number].get(key, ())]
    whole["queued"] = {key: n for own in found.values() for key, n in own["queued"].items()}
    whole["counts"] = _added(own["counts"] for own in found.values())
    tenants = {tenant for own in found.values() for tenant in own["tenants"]}
    whole["tenants"] = {
        tenant: _added(own["tenants"].get(tenant, {}) for own in found.values())
        for tenant in sorted(tenants)
    }
    whole["devices"] = {k: v for own in found.values() for k, v in own.get("devices", {}).items()}
    for key in ("groups", "base_models"):
        whole[key] = {
            part_name(number, name): part
            for number in sorted(found)
            for name, part in found[number].get(key, {}).items()
        }
    whole["engines"] = [
        {**engine, "name": part_name(number, str(engine["name"]))} if "name" in engine else engine
        for number in sorted(found)
        for engine in found[number].get("engines", ())
    ]
    return whole | _state(found)


def part_name(number: int, part: str) -> str:
    """Return the name of a part in a service with several shards, such as `2.engine:0`."""
    return part if number == 1 else f"{number}.{part}"


def _added(parts: Any) -> dict[str, float]:
    total = Counter[str]()
    for part in parts:
        total.update(part)
    return dict(total)


def _state(found: Mapping[int, Status]) -> Status:
    """Return whether the service serves, and what is wrong with single shards."""
    faults = {number: own.get("fault") for number, own in found.items()}
    serves = None in faults.values()
    of_shards = [f"shard {number}: {text}" for number, text in sorted(faults.items()) if text]
    warnings = [
        f"shard {number}: {text}"
        for number, own in sorted(found.items())
        if (text := own.get("warning"))
    ]
    return {
        "ready": any(own.get("ready") for own in found.values()),
        "fault": None if serves else "; ".join(of_shards),
        "warning": "; ".join([*(of_shards if serves else ()), *warnings]) or None,
        "shards": [
            {"shard": number, "fault": own.get("fault"), **{k: own.get(k) for k in OF_SHARD}}
            for number, own in sorted(found.items())
        ],
    }


def with_silent(status: Status, count: int) -> Status:
    """Return the status with rows and a warning for the shards that are not in it."""
    there = {row["shard"] for row in status["shards"]}
    silent = [number for number in range(1, count + 1) if number not in there]
    if not silent:
        return status
    rows = [{"shard": n, "fault": SILENT, **dict.fromkeys(OF_SHARD)} for n in silent]
    text = "; ".join(f"shard {number}: {SILENT}" for number in silent)
    warning = text if status["warning"] is None else f"{text}; {status['warning']}"
    all_rows: list[Status] = [*status["shards"], *rows]
    shards = sorted(all_rows, key=lambda row: int(row["shard"]))
    return status | {"shards": shards, "warning": warning}
