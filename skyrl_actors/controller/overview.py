"""The tables of sessions, models and queues as `status` shows them."""

from collections.abc import Callable, Mapping
from typing import Any

from skyrl_actors.controller.queue import RequestQueue
from skyrl_actors.controller.recording import NOBODY
from skyrl_actors.controller.replay import Replayer
from skyrl_actors.controller.tenants import TenantTable
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.observe.counts import COUNTS, Tags

SHOWN = 20  # number of the newest durations
COUNTED = ("trained_tokens", "sampled_tokens", "operations")


def of(
    tenants: TenantTable, queue: RequestQueue, replayer: Replayer, label: Callable[[str], str]
) -> dict[str, Any]:
    """Return sessions, models, queues, counts and durations as JSON values.

    `label` returns the name of an owner.
    """
    return {
        "sessions": len(tenants.sessions),
        "samplers": len(tenants.samplers),
        "open_requests": queue.num_open,
        "queued": queue.lengths(),
        "models": [
            {
                "model_id": m.spec.model_id,
                "tenant": _tenant(m.spec.model_id, label),
                "role": m.spec.role,
                "lora_rank": m.spec.lora.rank if m.spec.lora else 0,
                "steps": m.steps,
                "ready": m.ready,
            }
            for m in tenants.models.values()
        ],
        **counted(
            COUNTS.read(), {label(o) if o else NOBODY: n for o, n in queue.open_by_owner().items()}
        ),
        "recoveries": replayer.recoveries,
        "recovery_s": [round(s, 3) for s in replayer.recovery_s[-SHOWN:]],
        "snapshot_s": [round(s, 3) for s in replayer.snapshot_s[-SHOWN:]],
    }


def _tenant(model_id: str, label: Callable[[str], str]) -> str:
    owner = owner_of(model_id)
    return label(owner) if owner else NOBODY


def counted(
    totals: Mapping[tuple[str, Tags], float], open_requests: Mapping[str, int]
) -> dict[str, Any]:
    """Return totals since this controller started, in all and by tenant: the name of a key.

    `open_requests`: those of each tenant.
    """
    counts = dict.fromkeys(COUNTED, 0.0)
    tenants: dict[str, dict[str, float]] = {}
    for (metric, tags), value in totals.items():
        if metric not in COUNTED:
            continue
        counts[metric] += value
        if tenant := dict(tags).get("tenant"):
            own = tenants.setdefault(tenant, {})
            own[metric] = own.get(metric, 0.0) + value
    for tenant, number in open_requests.items():
        tenants.setdefault(tenant, {})["open_requests"] = number
    return {"counts": counts, "tenants": tenants}
