"""What `status` shows of who is here and what is queued."""

from typing import Any

from skyrl_actors.controller.queue import RequestQueue
from skyrl_actors.controller.recovery import Recovery
from skyrl_actors.controller.tenants import TenantTable

SHOWN = 20  # of the newest durations


def of(tenants: TenantTable, queue: RequestQueue, recovery: Recovery) -> dict[str, Any]:
    return {
        "sessions": len(tenants.sessions),
        "samplers": len(tenants.samplers),
        "open_requests": queue.num_open,
        "queued": queue.lengths(),
        "models": [
            {"model_id": m.spec.model_id, "role": m.spec.role, "lora_rank": m.spec.lora.rank if m.spec.lora else 0,
             "steps": m.steps, "ready": m.ready}
            for m in tenants.models.values()
        ],
        "recoveries": len(recovery.recovery_s),
        "recovery_s": [round(s, 3) for s in recovery.recovery_s[-SHOWN:]],
        "snapshot_s": [round(s, 3) for s in recovery.snapshot_s[-SHOWN:]],
    }  # fmt: skip
