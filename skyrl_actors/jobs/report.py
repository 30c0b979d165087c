"""Write the report of a run: its curves as a picture, and one HTML page with everything."""

import base64
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jinja2 import Environment

from skyrl_actors.jobs.metrics import REGISTRY
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.observe.figures import ends_of
from skyrl_actors.observe.runs import (
    CONFIG,
    METRICS,
    SAMPLES,
    SUMMARY,
    content_of,
    rows_in,
    state_of,
)

Row = Mapping[str, Any]
CURVES = (
    "eval/accuracy",
    "eval/nll",
    "eval/loss",
    "eval/pair_accuracy",
    "reward",
    "nll",
    "loss",
    "pair_accuracy",
    "margin",
    "kl",
    "value_loss",
    "clip_fraction",
    "explained_variance",
    "entropy",
    "logprob_mismatch",
    "policy_grad_norm",
    "critic_grad_norm",
    "answer_tokens",
    "sample_tokens_per_s",
    "seconds/iteration",
)
COLUMNS = 3
PARTS = (
    "seconds/sample",
    "seconds/values_and_reference",
    "seconds/advantages",
    "seconds/update",
    "seconds/transfer",
)

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>{{ name }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
td, th { padding: .25rem .75rem; text-align: left; vertical-align: top; }
td, th { border-bottom: 1px solid #8884; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; background: white; }
.curves { overflow-x: auto; }
.curves img { max-width: none; width: max(100%, 60rem); }
pre { overflow-x: auto; padding: 1rem; border: 1px solid #8884; }
.bar { display: flex; height: 1.5rem; }
.bar div { overflow: hidden; white-space: nowrap; padding: 0 .3rem; color: black; font-size: 12px; }
</style></head><body>
<h1>{{ name }}</h1>
<table>
{% for key, value in summary.items() %}
<tr><th>{{ key }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table>
<h2>Curves</h2>
<div class="curves"><img alt="curves of the run" src="data:image/png;base64,{{ picture }}"></div>
{% if shares %}
<h2>Time of a step by part</h2>
<div class="bar">
{% for part, share in shares %}
{% set percent = 100 * share %}
{% set hue = loop.index0 * 67 % 360 %}
<div style="width:{{ '%.2f'|format(percent) }}%;background:hsl({{ hue }} 60% 70%)"
title="{{ part }}">{{ part }} {{ '%.0f'|format(percent) }} %</div>
{% endfor %}
</div>
{% endif %}
{% if moves %}
<h2>Moves between phases</h2>
<table>
<tr><th>move</th><th>total seconds</th></tr>
{% for move, seconds in moves.items() %}
<tr><td>{{ move }}</td><td class="n">{{ '%.3f'|format(seconds) }}</td></tr>
{% endfor %}
</table>
{% endif %}
{% if samples %}
<h2>Rollouts</h2>
{% for step, rows in samples.items() %}
<details{% if loop.last %} open{% endif %}><summary>held-out, step {{ step }}</summary>
<table>
<tr><th>prompt</th><th>answer</th><th>expected</th><th>reward</th></tr>
{% for row in rows %}
<tr><td>{% for image in row.images or [] %}<img alt="image of the prompt" src="{{ image }}"> \
{% endfor %}{{ row.question }}</td><td>{{ row.answer }}</td><td>{{ row.expected }}</td>
<td class="n">{{ '%g'|format(row.reward) }}</td></tr>
{% endfor %}
</table></details>
{% endfor %}
{% endif %}
<h2>Metrics</h2>
<table>
<tr><th>metric</th><th>first</th><th>last</th><th>unit</th><th>definition</th></tr>
{% for m in metrics %}
<tr><td>{{ m.name }}</td><td class="n">{{ '%.4g'|format(m.first) }}</td>
<td class="n">{{ '%.4g'|format(m.last) }}</td><td>{{ m.unit }}</td><td>{{ m.definition }}</td></tr>
{% endfor %}
</table>
<h2>Software and machine</h2>
<table>
{% for key, value in environment.items() %}
<tr><th>{{ key }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table>
<h2>Config</h2><pre>{{ config }}</pre>
</body></html>
"""


def curves(title: str, history: Sequence[Row]) -> bytes:
    """Return a PNG with the curves of the metrics that the run has."""
    from matplotlib.figure import Figure

    present = [key for key in CURVES if any(key in row for row in history)]
    lines = max(1, -(-len(present) // COLUMNS))
    figure = cast(Any, Figure(figsize=(13, 3 * lines), layout="constrained"))
    figure.suptitle(title)
    for axes, key in zip(
        figure.subplots(lines, COLUMNS, squeeze=False).flat,
        [*present, *[""] * COLUMNS],
        strict=False,
    ):
        if not key:
            axes.set_axis_off()
            continue
        points = [(row["step"], row[key]) for row in history if key in row]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
        axes.set_title(f"{key} ({REGISTRY[key].unit})", fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()


def write_page(run: Path) -> Path:
    """Write report.html and report.png of a run. The run may be unfinished.

    Returns:
        The path of report.html.

    Raises:
        ConfigError: The folder contains no run.
    """
    if not (run / CONFIG).exists():
        raise ConfigError(
            f"{run} contains no run, because it has no {CONFIG}; give the folder of a run"
        )
    history, status = rows_in(run / METRICS), content_of(run / "status.json")
    samples: dict[int, list[Row]] = {}
    for row in rows_in(run / SAMPLES):
        samples.setdefault(row["step"], []).append(row)
    means = {part: [row[part] for row in history if part in row] for part in PARTS}
    total = sum(sum(values) for values in means.values())
    summary = content_of(run / SUMMARY)
    picture = curves(_title(run, summary), history)
    _write(run / "report.png", picture)
    page = (
        Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            name=run.name,
            summary=shown(summary or {"state": state_of(run, history)}),
            picture=base64.b64encode(picture).decode(),
            shares=[
                (part.partition("/")[2], sum(values) / total)
                for part, values in means.items()
                if values
            ]
            if total
            else [],
            moves=status.get("move_seconds", {}),
            samples=samples,
            metrics=_ends(history),
            environment=shown(content_of(run / "environment.json")),
            config=(run / CONFIG).read_text(),
        )
    )
    target = run / "report.html"
    _write(target, page.encode(errors="replace"))
    return target


def shown(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as texts for readers; those of nested objects have the names of both keys."""
    found: dict[str, str] = {}
    for key, value in values.items():
        name = key.replace("_", " ")
        if isinstance(value, Mapping):
            below = shown(cast("Mapping[str, Any]", value))
            found |= {f"{name}: {inner}": text for inner, text in below.items()}
        elif isinstance(value, list | tuple):
            found[name] = ", ".join(str(one) for one in cast("Sequence[Any]", value))
        else:
            found[name] = (
                "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
            )
    return found


def _title(run: Path, summary: Mapping[str, Any]) -> str:
    if not summary:
        return run.name
    before, after = summary["metric_before"], summary["metric_after"]
    return f"{run.name} ({summary['job']}): {summary['metric']} {before:.3f} → {after:.3f}"


def _write(file: Path, content: bytes) -> None:
    staging = file.with_name(f".{file.name}.partial")
    staging.write_bytes(content)
    os.replace(staging, file)


def _ends(history: Sequence[Row]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for metric in REGISTRY.values():
        if ends := ends_of(metric.name, history):
            found.append(
                {
                    "name": metric.name,
                    "first": ends.first,
                    "last": ends.last,
                    "unit": metric.unit,
                    "definition": metric.definition,
                }
            )
    return found
