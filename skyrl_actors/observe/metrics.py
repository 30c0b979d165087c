"""The metrics that a service exports through Ray and at `/metrics`.

`python -m skyrl_actors.observe.metrics > docs/reference/service_metrics.md` generates the page.
The Grafana dashboard is generated from the same list. Descriptions must be ASCII, because Ray's
agents refuse other characters.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter"]
PREFIX = "skyrl_actors_"


@dataclass(frozen=True, slots=True, kw_only=True)
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
        name="operations",
        kind="counter",
        description="answered requests, by verb and outcome (ok, user_error, error)",
        unit="ops",
        tags=("verb", "outcome"),
        panel="Control plane",
    ),
    Metric(
        name="wait_seconds",
        kind="counter",
        description="time that answered requests spent in the queue, by verb",
        unit="s",
        tags=("verb",),
        panel="Control plane",
    ),
    Metric(
        name="run_seconds",
        kind="counter",
        description="time that answered requests ran, including recoveries, by verb",
        unit="s",
        tags=("verb",),
        panel="Control plane",
    ),
    Metric(
        name="open_requests",
        kind="gauge",
        description="accepted requests without an answer",
        unit="short",
        tags=(),
        panel="Control plane",
    ),
    Metric(
        name="journal_free_bytes",
        kind="gauge",
        description="free space of the disk of journal.folder",
        unit="bytes",
        tags=(),
        panel="Control plane",
    ),
    Metric(
        name="checkpoint_free_bytes",
        kind="gauge",
        description="free space of the disk of checkpoint_dir",
        unit="bytes",
        tags=(),
        panel="Control plane",
    ),
    Metric(
        name="serving",
        kind="gauge",
        description="1 while requests are served, 0 while they are not",
        unit="short",
        tags=(),
        panel="Control plane",
    ),
    Metric(
        name="recoveries",
        kind="gauge",
        description="models restored from the journal since the controller started",
        unit="short",
        tags=(),
        panel="Control plane",
    ),
    Metric(
        name="trained_tokens",
        kind="counter",
        description="tokens that forward_backward and forward processed, by role and tenant",
        unit="tokens",
        tags=("role", "tenant"),
        panel="Throughput",
    ),
    Metric(
        name="prompt_tokens",
        kind="counter",
        description="tokens of the prompts of samples, by tenant",
        unit="tokens",
        tags=("tenant",),
        panel="Throughput",
    ),
    Metric(
        name="checkpoints",
        kind="counter",
        description="saved checkpoints and exports, by role and tenant",
        unit="short",
        tags=("role", "tenant"),
        panel="Throughput",
    ),
    Metric(
        name="sampled_tokens",
        kind="counter",
        description="sampled tokens, by tenant",
        unit="tokens",
        tags=("tenant",),
        panel="Throughput",
    ),
    Metric(
        name="phase_seconds",
        kind="counter",
        description="time in each phase, without moves between phases",
        unit="s",
        tags=("phase",),
        panel="Phases",
    ),
    Metric(
        name="move_seconds",
        kind="counter",
        description="time of each move between phases",
        unit="s",
        tags=("move",),
        panel="Phases",
    ),
    Metric(
        name="move_bytes",
        kind="counter",
        description="bytes that each move between phases moved or freed",
        unit="bytes",
        tags=("move",),
        panel="Phases",
    ),
    Metric(
        name="move_failures",
        kind="counter",
        description="moves between phases that failed and were recovered",
        unit="ops",
        tags=("move",),
        panel="Phases",
    ),
    Metric(
        name="transfer_seconds",
        kind="counter",
        description="time in which engines loaded new weights",
        unit="s",
        tags=(),
        panel="Transfer",
    ),
    Metric(
        name="transfers",
        kind="counter",
        description="number of times that an engine loaded full weights or an adapter",
        unit="ops",
        tags=(),
        panel="Transfer",
    ),
    Metric(
        name="transfer_bytes",
        kind="counter",
        description="bytes of weights that engines loaded",
        unit="bytes",
        tags=(),
        panel="Transfer",
    ),
    Metric(
        name="logprob_difference",
        kind="gauge",
        description="mean absolute difference of logprobs between engine and trainer in nats per "
        "token, last comparison",
        unit="short",
        tags=ACTOR,
        panel="Transfer",
    ),
    Metric(
        name="engine_running",
        kind="gauge",
        description="samples that an engine has received and not answered",
        unit="short",
        tags=ACTOR,
        panel="Engines",
    ),
    Metric(
        name="engine_waiting",
        kind="gauge",
        description="sequences that an engine has queued",
        unit="short",
        tags=ACTOR,
        panel="Engines",
    ),
    Metric(
        name="engine_kv_usage",
        kind="gauge",
        description="fraction of an engine's KV cache that is in use, 0 to 1",
        unit="percentunit",
        tags=ACTOR,
        panel="Engines",
    ),
    Metric(
        name="engine_prefix_hit_rate",
        kind="gauge",
        description="fraction of all prompt tokens that were found in the KV cache, 0 to 1",
        unit="percentunit",
        tags=ACTOR,
        panel="Engines",
    ),
    Metric(
        name="engine_weight_version",
        kind="gauge",
        description="version number (after the @) of the full weights that an engine holds; 0 = "
        "base model",
        unit="short",
        tags=ACTOR,
        panel="Engines",
    ),
    Metric(
        name="rss_bytes",
        kind="gauge",
        description="host memory of an actor's processes, in bytes",
        unit="bytes",
        tags=ACTOR,
        panel="Parts",
    ),
    Metric(
        name="device_used_bytes",
        kind="gauge",
        description="memory in use on a GPU, by all processes",
        unit="bytes",
        tags=("device",),
        panel="Parts",
    ),
    Metric(
        name="device_total_bytes",
        kind="gauge",
        description="memory of a GPU",
        unit="bytes",
        tags=("device",),
        panel="Parts",
    ),
    Metric(
        name="device_utilization",
        kind="gauge",
        description="fraction of the last second in which a GPU computed, 0 to 1",
        unit="percentunit",
        tags=("device",),
        panel="Parts",
    ),
    Metric(
        name="restarts",
        kind="gauge",
        description="restarts of an actor since the controller started",
        unit="short",
        tags=ACTOR,
        panel="Parts",
    ),
    Metric(
        name="refused_calls",
        kind="gauge",
        description="calls that the ranks refused because of their input, e.g. a loss that is "
        "not finite",
        unit="short",
        tags=ACTOR,
        panel="Parts",
    ),
)
REGISTRY = {metric.name: metric for metric in _ALL}


HEAD = """# Metrics of a service

A service exports these metrics in two ways: `GET /metrics` of its endpoint, and Ray's agents, where
their names start with `ray_skyrl_actors_`. In both, names of counters end with `_total`. A counter
only increases; the dashboard shows its rate. Every metric has the tag `service`. Where API keys are
required, `/metrics` needs one, and only one of the role admin sees the rows of all tenants.
`python -m skyrl_actors.observe.metrics` generates this page.

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
