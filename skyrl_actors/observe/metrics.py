"""The metrics that a service exports through Ray.

`python -m skyrl_actors.observe.metrics > docs/reference/service_metrics.md` generates the page.
The Grafana dashboard is generated from the same list. Descriptions must be ASCII, because Ray's
agents refuse other characters.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]
PREFIX = "skyrl_actors_"


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of one metric."""

    name: str  # without the prefix
    kind: Kind
    description: str
    unit: str  # the name that Grafana uses
    tags: tuple[str, ...]  # in addition to `service`
    panel: str  # group in the dashboard


ACTOR = ("actor",)
_ALL = (
    Metric(
        "operations",
        "counter",
        "answered requests, by verb and outcome (ok, user_error, error)",
        "ops",
        ("verb", "outcome"),
        "Control plane",
    ),
    Metric(
        "wait_seconds",
        "counter",
        "time that answered requests spent in the queue, by verb",
        "s",
        ("verb",),
        "Control plane",
    ),
    Metric(
        "run_seconds",
        "counter",
        "time that answered requests ran, including recoveries, by verb",
        "s",
        ("verb",),
        "Control plane",
    ),
    Metric(
        "open_requests",
        "gauge",
        "accepted requests without an answer",
        "short",
        (),
        "Control plane",
    ),
    Metric(
        "recoveries",
        "gauge",
        "models restored from the journal since the controller started",
        "short",
        (),
        "Control plane",
    ),
    Metric(
        "trained_tokens",
        "counter",
        "tokens that forward_backward and forward processed, by role and tenant",
        "tokens",
        ("role", "tenant"),
        "Throughput",
    ),
    Metric(
        "sampled_tokens",
        "counter",
        "sampled tokens, by tenant",
        "tokens",
        ("tenant",),
        "Throughput",
    ),
    Metric(
        "phase_seconds",
        "counter",
        "time in each phase, without moves between phases",
        "s",
        ("phase",),
        "Phases",
    ),
    Metric("move_seconds", "counter", "time of each move between phases", "s", ("move",), "Phases"),
    Metric(
        "move_bytes",
        "counter",
        "bytes that each move between phases moved or freed",
        "bytes",
        ("move",),
        "Phases",
    ),
    Metric(
        "move_failures",
        "counter",
        "moves between phases that failed and were recovered",
        "ops",
        ("move",),
        "Phases",
    ),
    Metric(
        "transfer_seconds",
        "counter",
        "time in which engines loaded new weights",
        "s",
        (),
        "Transfer",
    ),
    Metric(
        "transfers",
        "counter",
        "number of times that an engine loaded full weights or an adapter",
        "ops",
        (),
        "Transfer",
    ),
    Metric(
        "transfer_bytes", "counter", "bytes of weights that engines loaded", "bytes", (), "Transfer"
    ),
    Metric(
        "logprob_difference",
        "gauge",
        "mean absolute difference of logprobs between engine and trainer in nats per token, "
        "last comparison",
        "short",
        ACTOR,
        "Transfer",
    ),
    Metric(
        "engine_running",
        "gauge",
        "samples that an engine has received and not answered",
        "short",
        ACTOR,
        "Engines",
    ),
    Metric(
        "engine_waiting", "gauge", "sequences that an engine has queued", "short", ACTOR, "Engines"
    ),
    Metric(
        "engine_kv_usage",
        "gauge",
        "fraction of an engine's KV cache that is in use, 0 to 1",
        "percentunit",
        ACTOR,
        "Engines",
    ),
    Metric(
        "engine_prefix_hit_rate",
        "gauge",
        "fraction of all prompt tokens that were found in the KV cache, 0 to 1",
        "percentunit",
        ACTOR,
        "Engines",
    ),
    Metric(
        "engine_weight_version",
        "gauge",
        "version number (after the @) of the full weights that an engine holds; 0 = base model",
        "short",
        ACTOR,
        "Engines",
    ),
    Metric(
        "rss_bytes",
        "gauge",
        "host memory of an actor's processes, in bytes",
        "bytes",
        ACTOR,
        "Parts",
    ),
    Metric(
        "restarts",
        "gauge",
        "restarts of an actor since the controller started",
        "short",
        ACTOR,
        "Parts",
    ),
    Metric(
        "refused_calls",
        "gauge",
        "calls that the ranks refused because of their input, e.g. a loss that is not finite",
        "short",
        ACTOR,
        "Parts",
    ),
)
REGISTRY = {metric.name: metric for metric in _ALL}


HEAD = """# Metrics of a service

A service exports these metrics through Ray. In Prometheus their names start with
`ray_skyrl_actors_`. Every metric has the tag `service`. A counter only increases; the dashboard
shows its rate. `python -m skyrl_actors.observe.metrics` generates this page.

| metric | kind | meaning | unit | tags |
|---|---|---|---|---|
"""


def markdown() -> str:
    """Return the reference page."""
    return HEAD + "".join(
        f"| `{PREFIX}{m.name}` | {m.kind} | {m.description} | {m.unit} "
        f"| {', '.join(m.tags) or '-'} |\n"
        for m in _ALL
    )


if __name__ == "__main__":
    print(markdown(), end="")
