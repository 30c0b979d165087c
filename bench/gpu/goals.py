"""The goals for one H100, and a table of what was measured against them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Mapping[str, Any]]  # by benchmark: gpu_engines, gpu_train, gpu_service


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One row. `read` raises LookupError or TypeError if a result lacks the figure."""

    name: str
    wanted: str
    read: Callable[[Results], float]
    unit: str = ""
    is_met: Callable[[float], bool] | None = None  # None: reported, without a goal


def _largest(results: Results) -> Mapping[str, Any]:
    """Return the figures of the largest shape that was measured."""
    engines = results["gpu_engines"]
    return next(engines[shape] for shape in ("8B", "4B", "0.5B", "tiny") if shape in engines)


GOALS: Sequence[Goal] = (
    Goal(
        name="change of phase, 8B full weights",
        wanted="below 1 s",
        unit="s",
        read=lambda r: _largest(r)["switch_s"],
        is_met=lambda s: s < 1,
    ),
    Goal(
        name="sync of 8B full weights in device memory",
        wanted="at most 0.25 s",
        unit="s",
        read=lambda r: _largest(r)["ipc_s"],
        is_met=lambda s: s <= 0.25,
    ),
    Goal(
        name="step of an adapter to its first token, 8B",
        wanted="reported",
        unit="s",
        read=lambda r: _largest(r)["lora_switch_s"] + _largest(r)["lora_first_token_s"],
    ),
    Goal(
        name="LoRA training, 4B",
        wanted="reported",
        unit="tokens/s",
        read=lambda r: r["gpu_train"]["lora_tokens_per_s"],
    ),
    Goal(
        name="LoRA training, share of the device's peak",
        wanted="at least 0.35",
        read=lambda r: r["gpu_train"]["lora_mfu"],
        is_met=lambda share: share >= 0.35,
    ),
    Goal(
        name="8 tenants in one pass / one at a time",
        wanted="at least 2",
        read=lambda r: r["gpu_train"]["tenants8_ratio"],
        is_met=lambda ratio: ratio >= 2,
    ),
    Goal(
        name="sampling through the service / vLLM alone",
        wanted="at least 0.95",
        read=lambda r: r["gpu_service"]["sampling_ratio"],
        is_met=lambda ratio: ratio >= 0.95,
    ),
    Goal(
        name="engine and trainer, mean |Δ logprob|",
        wanted="at most 0.02",
        unit="nats",
        read=lambda r: _largest(r)["mean_logprob_difference"],
        is_met=lambda nats: nats <= 0.02,
    ),
    *(
        Goal(
            name=f"{kind} killed, until the next answer",
            wanted="at most 60 s, equal",
            unit="s",
            read=lambda r, kind=kind: r["gpu_service"]["killed"][kind],
            is_met=lambda s: s <= 60,
        )
        for kind in ("rank", "engine actor", "controller")
    ),
    Goal(
        name="largest change of a logprob by these kills",
        wanted="0",
        unit="nats",
        read=lambda r: r["gpu_service"]["changed_by_kills"],
        is_met=lambda nats: nats == 0,
    ),
)


def table(results: Results, troubles: Mapping[str, str], means_nothing: bool = False) -> str:
    """Return the table. `troubles` tells why a benchmark has no result.

    With `means_nothing`, no figure is judged: the shapes were tiny, or the device is no GPU.
    """
    rows = [("what", "goal", "measured", "")]
    for goal in GOALS:
        try:
            value = float(goal.read(results))
        except (LookupError, TypeError, ValueError, StopIteration):
            rows.append((goal.name, goal.wanted, "not measured", ""))
            continue
        met = None if means_nothing or goal.is_met is None else goal.is_met(value)
        verdict = {None: "", True: "yes", False: "NO"}[met]
        rows.append((goal.name, goal.wanted, f"{value:,.4g} {goal.unit}".rstrip(), verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [f"{name}: {why}" for name, why in troubles.items()]
    return "\n".join(lines)
