"""What a process did lately and how long it took: kept for `trace`, and sent to an OpenTelemetry collector where one is named.

All spans of a request are of one trace, whose ids follow from the request's: processes need not tell each other.
"""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)
RECENT = 2000
EVERY_MS = 1000  # what a process that is killed takes with it
SAID_EVERY_S = 300.0
NANOSECONDS = 10**9


@dataclass(frozen=True, slots=True)
class Span:
    """`row`: what it happened in: a model, samples, transfers. `began` in Unix time."""

    name: str
    row: str
    began: float
    seconds: float
    request_id: str = ""
    attributes: Mapping[str, str | int | float] = field(default_factory=dict[str, str | int | float])


def ids_of(request_id: str) -> tuple[int, int]:
    """Trace id and the id of its first span; neither is 0, which OpenTelemetry takes for none."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:16]) | 1, int.from_bytes(digest[16:24]) | 1


class Spans:
    def __init__(self) -> None:
        self.recent: deque[Span] = deque(maxlen=RECENT)
        self._sender: _Sender | None = None

    @property
    def sends(self) -> bool:
        return self._sender is not None

    def add(self, span: Span) -> None:
        """Kept, and sent."""
        self.recent.append(span)
        self.send(span)

    @contextmanager
    def sent(self, name: str, row: str, request_id: str, **attributes: str | int | float) -> Iterator[None]:
        """What runs within, to the trace of this request, however it ends."""
        began, said = time.time(), "ok"
        try:
            yield
        except BaseException as error:
            said = type(error).__name__
            raise
        finally:
            if self.sends and request_id:
                self.send(Span(name, row, began, time.time() - began, request_id, {"outcome": said, **attributes}))

    def send(self, span: Span, first: bool = False) -> None:
        """To the collector only, where there is one. `first`: the whole request, which the others of its trace lie below."""
        if self._sender is not None:
            self._sender.send(span, first)

    def send_to(self, url: str | None, service: str, part: str) -> None:
        """From now on to the collector at `url` (OTLP over HTTP), in the background and in batches."""
        self._sender = _Sender(url, service, part) if url else None

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


SPANS = Spans()
"""Of this process."""


class _Seldom(logging.Filter):
    """A collector that is away is told of now and then: the last lines of a process must say why it died."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + SAID_EVERY_S
        return True


SAYING = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.trace.export",
)
_SELDOM = _Seldom()


class _Sender:
    def __init__(self, url: str, service: str, part: str):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Given(RandomIdGenerator):
            """The ids that are wanted for the next span, where they are."""

            wanted: tuple[int, int] | None = None

            def generate_trace_id(self) -> int:
                return self.wanted[0] if self.wanted else super().generate_trace_id()

            def generate_span_id(self) -> int:
                return self.wanted[1] if self.wanted else super().generate_span_id()

        self._ids = Given()
        named = Resource.create({"service.name": f"skyrl-actors {part}", "service.instance.id": service})
        self._provider = TracerProvider(id_generator=self._ids, resource=named, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(f"{url.rstrip('/')}/v1/traces", timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EVERY_MS))
        for name in SAYING:
            logging.getLogger(name).addFilter(_SELDOM)
        self._tracer = self._provider.get_tracer("skyrl_actors")

    def send(self, span: Span, first: bool) -> None:
        from opentelemetry import trace
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

        context: Any = trace.set_span_in_context(NonRecordingSpan(trace.INVALID_SPAN_CONTEXT))
        if span.request_id and first:
            self._ids.wanted = ids_of(span.request_id)
        elif span.request_id:
            above = SpanContext(*ids_of(span.request_id), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
            context = trace.set_span_in_context(NonRecordingSpan(above))
        begun = int(span.began * NANOSECONDS)
        attributes = {"row": span.row, "request_id": span.request_id, **span.attributes}
        sent = self._tracer.start_span(span.name, context, attributes=attributes, start_time=begun)
        self._ids.wanted = None
        sent.end(begun + int(span.seconds * NANOSECONDS))

    def close(self) -> None:
        self._provider.shutdown()
