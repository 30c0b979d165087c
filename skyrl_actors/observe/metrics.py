"""Every metric that a service exports through Ray: kind, meaning, unit, tags, and how a dashboard shows it.

`python -m skyrl_actors.observe.metrics > docs/service_metrics.md` prints the table; the Grafana dashboard is made from the same list.
Descriptions are ASCII: Ray's agents take nothing else.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]
PREFIX = "skyrl_actors_"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # without the prefix
    kind: Kind
    description: str
    unit: str  # as Grafana names it
    tags: tuple[str, ...]  # beside `service`
    panel: str  # the group of the dashboard


ACTOR = ("actor",)
_ALL = (
    Metric("operations", "counter", "requests answered, by verb and outcome (ok, user_error, error)", "ops", ("verb", "outcome"), "Control plane"),
    Metric("wait_seconds", "counter", "seconds that answered requests waited for their turn, by verb", "s", ("verb",), "Control plane"),
    Metric("run_seconds", "counter", "seconds in which answered requests ran, recoveries included, by verb", "s", ("verb",), "Control plane"),
    Metric("open_requests", "gauge", "requests that were accepted and not answered", "short", (), "Control plane"),
    Metric("recoveries", "gauge", "models restored from the journal since the controller started", "short", (), "Control plane"),
    Metric("trained_tokens", "counter", "tokens through forward_backward or forward, by role and tenant", "tokens", ("role", "tenant"), "Throughput"),
    Metric("sampled_tokens", "counter", "tokens sampled, by tenant", "tokens", ("tenant",), "Throughput"),
    Metric("phase_seconds", "counter", "seconds spent in each phase, without moves", "s", ("phase",), "Phases"),
    Metric("move_seconds", "counter", "seconds spent in each move between phases", "s", ("move",), "Phases"),
    Metric("move_bytes", "counter", "bytes moved or freed by each move between phases", "bytes", ("move",), "Phases"),
    Metric("move_failures", "counter", "moves between phases that failed and were healed", "ops", ("move",), "Phases"),
    Metric("transfer_seconds", "counter", "seconds in which engines took new weights", "s", (), "Transfer"),
    Metric("transfers", "counter", "times an engine took new weights, full ones or an adapter", "ops", (), "Transfer"),
    Metric("transfer_bytes", "counter", "bytes of the weights that engines took", "bytes", (), "Transfer"),
    Metric("logprob_difference", "gauge", "mean absolute difference of engine and trainer in nats a token, last comparison", "short", ACTOR, "Transfer"),
    Metric("engine_running", "gauge", "samples that an engine was given and has not answered", "short", ACTOR, "Engines"),
    Metric("engine_waiting", "gauge", "sequences that an engine has not begun", "short", ACTOR, "Engines"),
    Metric("engine_kv_usage", "gauge", "part of an engine's KV cache in use, 0 to 1", "percentunit", ACTOR, "Engines"),
    Metric("engine_prefix_hit_rate", "gauge", "part of the prompt tokens so far that the KV cache had, 0 to 1", "percentunit", ACTOR, "Engines"),
    Metric("engine_weight_version", "gauge", "number behind the @ of the full weights an engine holds; 0 = base", "short", ACTOR, "Engines"),
    Metric("rss_bytes", "gauge", "host memory of an actor's processes, in bytes", "bytes", ACTOR, "Parts"),
    Metric("restarts", "gauge", "times a part was made anew since the controller started", "short", ACTOR, "Parts"),
    Metric("refused_calls", "gauge", "calls that the ranks refused for their input, e.g. a loss not finite", "short", ACTOR, "Parts"),
)  # fmt: skip
REGISTRY = {metric.name: metric for metric in _ALL}


def markdown() -> str:
    head = (
        "# Metrics of a service\n\nExported through Ray (`ray_skyrl_actors_…` in Prometheus), each with the tag `service`. A counter only grows; the dashboard shows "
        "its rate.\n\n| metric | kind | meaning | unit | tags |\n|---|---|---|---|---|\n"
    )
    return head + "".join(
        f"| `{PREFIX}{m.name}` | {m.kind} | {m.description} | {m.unit} | {', '.join(m.tags) or '-'} |\n" for m in _ALL
    )


if __name__ == "__main__":
    print(markdown(), end="")
