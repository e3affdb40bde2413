"""Export spans to an OpenTelemetry collector, in a thread.

OpenTelemetry's batch processor neither counts what it drops, nor ends in a bounded time if the collector does
not answer. The exporter is OpenTelemetry's, and reads its environment variables.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from anyio import CancelScope, to_thread

from kvtier.errors import SettingsError
from kvtier.logs import RateLimitedLog, printable
from kvtier.observability.traces.spans import NO_TRACER, TRACE_BYTES, Sampling, Span, Tracer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

OTLP = "opentelemetry.exporter.otlp.proto"
PACKAGES = {"grpc": f"{OTLP}.grpc", "http/protobuf": f"{OTLP}.http"}
INTERVAL_SECONDS = 1.0
BATCH = 128
"""Encoding a span takes the GIL for some 15 µs. This many delay an answer to an engine by up to 2 ms."""
END_SECONDS = 2.0
"""How long the end of the process waits for the queue to be exported, and for the exporter to give up."""


@asynccontextmanager
async def exporting(enabled: bool, service: str, instance: str) -> AsyncIterator[Tracer]:
    """Export what the yielded tracer records. If ``enabled``, takes up to 4 s at the end.

    ``service``: its name, unless a variable of OpenTelemetry sets another. Raises: SettingsError: a package
    is missing, or the protocol is unknown.
    """
    if not enabled:
        yield NO_TRACER
        return
    thread = await to_thread.run_sync(_Thread, {"service.name": service, "service.instance.id": instance})
    thread.start()
    try:
        yield thread.tracer
    finally:
        with CancelScope(shield=True):
            await to_thread.run_sync(thread.finish)


class _Thread(threading.Thread):
    """Exports the queue of a tracer. What fails is dropped, and counted."""

    def __init__(self, resource: dict[str, str]) -> None:
        """Import OpenTelemetry, which blocks for up to a second. ``resource``: what sends the spans."""
        super().__init__(name="kvtier traces", daemon=True)
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")  # As vLLM.
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
        if protocol not in PACKAGES:
            raise SettingsError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: use {' or '.join(PACKAGES)}")
        parsing = logging.getLogger("opentelemetry.util.re")
        parsing.addFilter(_refuse_header)
        try:
            module = import_module(f"{PACKAGES[protocol]}.trace_exporter")
            self._converted = _converter(resource)
            self._exporter = module.OTLPSpanExporter()
        except ImportError as error:
            message = "traces need OpenTelemetry, which is not installed: pip install 'kvtier[otel]'"
            raise SettingsError(message) from error
        except ValueError as error:
            raise SettingsError(f"a variable OTEL_EXPORTER_OTLP_… is wrong: {error}") from error
        finally:
            parsing.removeFilter(_refuse_header)
        logs = f"{PACKAGES[protocol]}.exporter", module.__name__
        self._logs = [logging.getLogger(name) for name in logs]
        """The exporter logs every attempt."""
        for theirs in self._logs:
            theirs.addFilter(self._take_log)
        self.tracer = Tracer(Sampling.of(os.environ))
        self._ending = threading.Event()
        self._reason = "too many to export, or an engine could not send them"
        self._warn = RateLimitedLog(logging.getLogger("kvtier"))

    def run(self) -> None:
        """Export until :meth:`finish`."""
        tracer, lost, ending = self.tracer, 0, False
        while not ending:
            ending = self._ending.wait(INTERVAL_SECONDS)
            while spans := [tracer.queue.popleft() for _ in range(min(len(tracer.queue), BATCH))]:
                try:
                    exported = self._exporter.export(list(map(self._converted, spans))).name == "SUCCESS"
                except Exception as error:  # A malformed span of an engine.
                    exported, self._reason = False, repr(error)
                if not exported:
                    tracer.failed += len(spans)
                    break
                tracer.exported += len(spans)
            if tracer.failed + tracer.dropped > lost:
                lost = tracer.failed + tracer.dropped
                self._warn("traces: %d spans are lost so far: %s", lost, self._reason)

    def _take_log(self, record: logging.LogRecord) -> bool:
        if record.thread != self.ident:
            return True
        self._reason = printable(record.getMessage())
        return False

    def finish(self) -> None:
        """Export what is queued, and end the thread. Blocks."""
        self._ending.set()
        self.join(END_SECONDS)
        self._exporter.shutdown()
        self.join(END_SECONDS)
        for theirs in self._logs:
            theirs.removeFilter(self._take_log)


def _refuse_header(_: logging.LogRecord) -> bool:
    """Raise instead of having OpenTelemetry log a header that it ignores, as it may be a key."""
    raise SettingsError("OTEL_EXPORTER_OTLP_HEADERS is not NAME=VALUE,… with URL-encoded values")


def _converter(resource: dict[str, str]) -> Callable[[Span], ReadableSpan]:
    """Return what makes a span OpenTelemetry's."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    sampled = TraceFlags(TraceFlags.SAMPLED)
    sender = Resource.create(resource).merge(OTELResourceDetector().detect())

    def converted(span: Span) -> ReadableSpan:
        trace = int.from_bytes(span.trace[:TRACE_BYTES])
        own, parent = (
            SpanContext(trace, int.from_bytes(span_id), False, sampled)
            for span_id in (span.trace[TRACE_BYTES:], span.parent)
        )
        return ReadableSpan(
            span.name,
            own,
            parent if span.parent else None,
            sender,
            span.attributes,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start,
            end_time=span.end,
        )

    return converted
