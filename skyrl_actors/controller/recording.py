"""Record answered operations as metrics and spans."""

import re
import time
from collections.abc import Callable

from skyrl_actors.controller.operations import Op, Outcome
from skyrl_actors.controller.verbs import verb_of
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.results import Failure
from skyrl_actors.observe.counts import Counts
from skyrl_actors.observe.spans import Span, Spans

NOBODY = "-"  # the tenant of requests without an API key


def record_metrics(
    counts: Counts,
    op: Op,
    outcome: Outcome,
    role: str,
    label: Callable[[str], str] = str,
) -> None:
    """Count an operation, its times and its tokens.

    `role` is that of its model, "" for a sample. `label` returns the name of an owner.
    """
    request, result = op.request, outcome.result
    verb = _snake(type(request).__name__) if request is not None else "unread"
    tag = (
        (f"{'user_' if result.category == 'user' else ''}error")
        if isinstance(result, Failure)
        else "ok"
    )
    counts.add("operations", verb=verb, outcome=tag)
    ended = time.monotonic()
    begun = op.begun if op.begun is not None else ended
    counts.add("wait_seconds", begun - op.accepted, verb=verb)
    counts.add("run_seconds", ended - begun, verb=verb)
    if tag != "ok" or request is None:
        return
    owner = owner_of(op.request_id)
    tenant = label(owner) if owner else NOBODY
    for metric, value in verb_of(request).usage(request, result).items():
        of_model = {"role": role} if role else {}
        counts.add(metric, value, **of_model, tenant=tenant)


def record_span(spans: Spans, op: Op, outcome: Outcome, answered: float) -> None:
    """Record spans of an operation in its model's row: the whole, the wait and the run.

    `answered` is the time when the journal had the answer, on the clock of `op.accepted`.
    """
    verb = _snake(type(op.request).__name__) if op.request is not None else "unread"
    to_wall = time.time() - time.monotonic()
    begun = op.begun if op.begun is not None else answered
    row = op.model_id or "samples"
    result = outcome.result
    tag = result.category if isinstance(result, Failure) else "ok"
    named = {"operation": op.number, "outcome": tag}

    def span(name: str, began: float, ended: float, **more: str | int | float) -> Span:
        return Span(
            name=name,
            row=row,
            began=to_wall + began,
            seconds=max(ended - began, 0.0),
            request_id=op.request_id,
            attributes={**named, **more},
        )

    spans.send(span(f"request {verb}", op.accepted, answered), first=True)
    spans.send(span("wait", op.accepted, begun))
    spans.add(span(verb, begun, answered))


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
