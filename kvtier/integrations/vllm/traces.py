"""Spans of an engine's requests, which its cache process exports.

vLLM gives a request's W3C trace context to the connector (``Request.trace_headers``) if it exports traces
itself. It creates its own span at the end, so kvtier's are siblings of that: children of the client's span.
Without a client's, kvtier begins the trace, and vLLM's span is a child of ``kvtier.request``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvtier.bridge.protocol import Spans
from kvtier.integrations.vllm.plain import shown
from kvtier.observability.traces.spans import TRACE_BYTES, Span, Value, child

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvtier.bridge.client import Bridge

REQUEST, LOOKUP, LOAD, COPY, SAVE = (
    f"kvtier.{name}" for name in ("request", "lookup", "load", "copy", "save")
)
SEND_SECONDS = 0.1
"""How long spans wait for others: a message takes some 10 µs of a step."""


class Trace:
    """The trace of one request. Without a context, it records nothing."""

    def __init__(self, traces: Traces | None = None, request_id: str = "", context: bytes = b"") -> None:
        self._traces = traces
        self._request_id = request_id
        self._open: dict[str, tuple[bytes, bytes, float]] = {}
        """By name: the trace that a span belongs to, the trace within it, and when it began."""
        self.context = context
        if len(context) == TRACE_BYTES:
            self.context = self.begin(REQUEST)

    def begin(self, name: str) -> bytes:
        """Begin a span; return the trace within it."""
        if within := child(self.context):
            self._open[name] = self.context, within, time.monotonic()
        return within

    def within(self, name: str) -> bytes:
        """Return the trace within a span; empty if it has not begun."""
        return self._open[name][1] if name in self._open else b""

    def end(self, name: str, error: str = "", /, **attributes: Value) -> None:
        """End a span, if it has begun."""
        if name in self._open and self._traces is not None:
            trace, within, since = self._open.pop(name)
            attributes["request"] = self._request_id
            self._traces.add(Span.ended(name, trace, since, within, error, **attributes))

    def end_all(self) -> None:
        """End the request."""
        for name in list(self._open):
            self.end(name, "" if name == REQUEST else "the request ended before")


UNTRACED = Trace()


class Traces:
    """The traces of an engine's requests, and the spans to send. Not thread-safe; nothing blocks.

    Spans are dropped, and counted, while the cache process does not answer.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._requests: dict[str, Trace] = {}
        self._spans: list[Span] = []
        self._since = 0.0
        self._dropped = 0

    def begin(self, request: Request) -> Trace:
        """Return the trace of a request, the same until it ends."""
        name, welcome = request.request_id, self._bridge.welcome
        if welcome is None or welcome.sampling is None or name in self._requests:
            return self._requests.get(name, UNTRACED)
        headers = request.trace_headers or {}
        if not (context := welcome.sampling.trace(headers.get("traceparent"))):
            return UNTRACED
        trace = self._requests[name] = Trace(self, shown(name), context)
        if trace.context != context:
            ids = trace.context[:TRACE_BYTES].hex(), trace.context[TRACE_BYTES:].hex()
            request.trace_headers = {**headers, "traceparent": f"00-{ids[0]}-{ids[1]}-01"}
        return trace

    def end(self, request_id: str) -> None:
        """End the trace of a request, if it has one, and send its spans."""
        if (trace := self._requests.pop(request_id, None)) is not None:
            trace.end_all()
            self.send()

    def add(self, span: Span) -> None:
        """Add a span, to be sent with others."""
        self._since = self._since if self._spans else time.monotonic()
        self._spans.append(span)

    def send(self, after: float = 0.0) -> None:
        """Send the spans, unless none has waited for ``after`` seconds."""
        if self._spans and time.monotonic() - self._since >= after:
            spans, self._spans = self._spans, []
            sent = self._bridge.responsive and self._bridge.send(Spans(spans, self._dropped))
            self._dropped = 0 if sent else self._dropped + len(spans)
