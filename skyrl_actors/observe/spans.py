"""Record the timed operations of a process as spans.

Recent spans are kept for the command `trace`. If a collector is configured, spans are also sent to
it with OpenTelemetry. All spans of a request belong to one trace. Its ids are derived from the
request id, so processes need not exchange them.
"""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)
RECENT = 2000
EXPORT_EVERY_MS = 1000  # a killed process loses at most the spans of this time
LOG_EVERY_S = 300.0
NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One timed operation.

    `row` is the row of the trace view: a model, samples or transfers. `began` is Unix time.
    """

    name: str
    row: str
    began: float
    seconds: float
    request_id: str = ""
    attributes: Mapping[str, str | int | float] = field(
        default_factory=dict[str, str | int | float]
    )


def ids_of(request_id: str) -> tuple[int, int]:
    """Return the trace id and the id of its first span.

    Neither is 0, because 0 means "no id" in OpenTelemetry.
    """
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:16]) | 1, int.from_bytes(digest[16:24]) | 1


class Spans:
    """The recent spans of a process, and the connection to a collector."""

    def __init__(self) -> None:
        self.recent: deque[Span] = deque(maxlen=RECENT)
        self._sender: _Sender | None = None

    @property
    def sends(self) -> bool:
        """Whether a collector is configured."""
        return self._sender is not None

    def add(self, span: Span) -> None:
        """Keep a span, and send it to the collector."""
        self.recent.append(span)
        self.send(span)

    @contextmanager
    def sent(
        self, name: str, row: str, request_id: str, **attributes: str | int | float
    ) -> Generator[None]:
        """Send a span for the body of the context, in the trace of this request.

        The span has the attribute `outcome`: ok, or the type of the error.
        """
        began, outcome = time.time(), "ok"
        try:
            yield
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            if self.sends and request_id:
                self.send(
                    Span(
                        name=name,
                        row=row,
                        began=began,
                        seconds=time.time() - began,
                        request_id=request_id,
                        attributes={"outcome": outcome, **attributes},
                    )
                )

    def send(self, span: Span, first: bool = False) -> None:
        """Send a span to the collector, if there is one, without keeping it.

        `first` marks the span of the whole request. The other spans of its trace are its children.
        """
        if self._sender is not None:
            self._sender.send(span, first)

    def send_to(self, url: str | None, service: str, part: str) -> None:
        """Send all following spans to the collector at `url` (OTLP over HTTP).

        They are sent in the background, in batches. Without a URL, nothing is sent.
        """
        self._sender = _Sender(url, service, part) if url else None

    def close(self) -> None:
        """Send the spans that are still buffered, and stop the background thread."""
        if self._sender is not None:
            self._sender.close()


SPANS = Spans()
"""The spans of this process."""


class _RateLimit(logging.Filter):
    """Passes at most one log record in LOG_EVERY_S seconds.

    Otherwise records about an unreachable collector would hide why a process died: its last log
    lines show that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + LOG_EVERY_S
        return True


NOISY_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.trace.export",
)
_RATE_LIMIT = _RateLimit()


class _Sender:
    def __init__(self, url: str, service: str, part: str):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class PresetIds(RandomIdGenerator):
            """Uses the ids in `wanted` for the next span, or else random ids."""

            wanted: tuple[int, int] | None = None

            def generate_trace_id(self) -> int:
                return self.wanted[0] if self.wanted else super().generate_trace_id()

            def generate_span_id(self) -> int:
                return self.wanted[1] if self.wanted else super().generate_span_id()

        self._ids = PresetIds()
        named = Resource.create(
            {"service.name": f"skyrl-actors {part}", "service.instance.id": service}
        )
        self._provider = TracerProvider(
            id_generator=self._ids, resource=named, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(f"{url.rstrip('/')}/v1/traces", timeout=5)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_EVERY_MS)
        )
        for name in NOISY_LOGGERS:
            logging.getLogger(name).addFilter(_RATE_LIMIT)
        self._tracer = self._provider.get_tracer("skyrl_actors")

    def send(self, span: Span, first: bool) -> None:
        from opentelemetry import trace
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

        context: Any = trace.set_span_in_context(NonRecordingSpan(trace.INVALID_SPAN_CONTEXT))
        if span.request_id and first:
            self._ids.wanted = ids_of(span.request_id)
        elif span.request_id:
            above = SpanContext(
                *ids_of(span.request_id), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
            )
            context = trace.set_span_in_context(NonRecordingSpan(above))
        begun = int(span.began * NANOSECONDS)
        attributes = {"row": span.row, "request_id": span.request_id, **span.attributes}
        sent = self._tracer.start_span(span.name, context, attributes=attributes, start_time=begun)
        self._ids.wanted = None
        sent.end(begun + int(span.seconds * NANOSECONDS))

    def close(self) -> None:
        self._provider.shutdown()
