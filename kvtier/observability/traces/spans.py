"""Spans, and which requests have any. Nothing here imports OpenTelemetry or blocks.

A *trace* is passed on as bytes: the 16 of a W3C trace id, then the 8 of the span in which something happens,
or none before the first span. It is empty for what is not traced.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from kvtier.backends.base import Outcome
from kvtier.events import Observer, Report

TRACE_BYTES, SPAN_BYTES = 16, 8
MAX_QUEUED = 8192
_TRACEPARENT = re.compile(
    r"(?!ff)[\da-f]{2}-(?!0{32})([\da-f]{32})-(?!0{16})([\da-f]{16})-([\da-f]{2})(-.*)?"
)

Value = str | int
"""Of an attribute: never keys, tokens, text or salts."""

current: ContextVar[bytes] = ContextVar("kvtier_trace", default=b"")
"""The trace of what is running. Tasks inherit it."""


@contextmanager
def following(trace: bytes) -> Iterator[None]:
    """Have what the block does, and the tasks that it starts, belong to a trace."""
    token = current.set(trace)
    try:
        yield
    finally:
        current.reset(token)


def child(trace: bytes) -> bytes:
    """Return the trace within a new span; empty for what is not traced."""
    return trace[:TRACE_BYTES] + os.urandom(SPAN_BYTES) if trace else b""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that has ended. Times are nanoseconds since 1970."""

    name: str
    trace: bytes
    """The trace within it."""
    parent: bytes
    """The id of the span that it belongs to, if there is one."""
    start: int
    end: int
    attributes: Mapping[str, Value]
    error: str

    @classmethod
    def ended(
        cls, name: str, trace: bytes, since: float, within: bytes = b"", error: str = "", /, **values: Value
    ) -> Span:
        """Return a span of ``trace`` from ``since`` (:func:`time.monotonic`) to now.

        ``within``: as :func:`child` has returned it, if others belong to the span. ``values``: attributes,
        whose names get the prefix ``kvtier.``.
        """
        end = time.time_ns()
        start = end - int((time.monotonic() - since) * 1e9)
        attributes = {f"kvtier.{attribute}": value for attribute, value in values.items()}
        return cls(name, within or child(trace), trace[TRACE_BYTES:], start, end, attributes, error)


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """Which requests are traced, as ``OTEL_TRACES_SAMPLER`` sets it."""

    ratio: float
    follows_client: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Sampling:
        """Read OpenTelemetry's variables. By default, all requests are traced."""
        name = environment.get("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        argument = environment.get("OTEL_TRACES_SAMPLER_ARG", "") if name.endswith("ratio") else ""
        ratio = float(argument) if re.fullmatch(r"0?\.\d+|0", argument) else float(name[-10:] != "always_off")
        return cls(ratio, name.startswith("parentbased_"))

    def trace(self, header: str | None = None) -> bytes:
        """Return the trace of a request with this ``traceparent``; empty if it is not traced."""
        client = _TRACEPARENT.fullmatch(header) if header else None
        trace = bytes.fromhex(client[1] + client[2]) if client else os.urandom(TRACE_BYTES)
        if client and self.follows_client:
            return trace if int(client[3], 16) & 1 else b""
        # As OpenTelemetry's TraceIdRatioBased, so that vLLM decides the same.
        return trace if int.from_bytes(trace[8:TRACE_BYTES]) < round(self.ratio * 2**64) else b""


class Tracer(Observer):
    """Queues spans for the thread that exports them. Without ``sampling``, it records nothing."""

    def __init__(self, sampling: Sampling | None = None) -> None:
        self.sampling = sampling
        self.queue: deque[Span] = deque()
        self.exported = self.failed = self.dropped = 0
        self.first_tier = ""
        """The tier that others are read into and written from."""

    def trace(self, header: str | None = None) -> bytes:
        """Return the trace of a request with this ``traceparent``; empty if it is not traced."""
        return b"" if self.sampling is None else self.sampling.trace(header)

    def received(self, trace: bytes) -> bytes:
        """Return a trace that a peer has sent with a request; empty if it is none, or nothing is traced."""
        ids = trace[:TRACE_BYTES], trace[TRACE_BYTES:]
        valid = len(ids[1]) == SPAN_BYTES and all(map(any, ids))
        return trace if valid and self.sampling is not None else b""

    def add(self, spans: Sequence[Span], dropped: int = 0) -> None:
        """Queue spans, as many as there is room for. ``dropped``: how many the sender has lost before."""
        if self.sampling is not None:
            accepted = spans[: max(0, MAX_QUEUED - len(self.queue))]
            self.queue.extend(accepted)
            self.dropped += dropped + len(spans) - len(accepted)

    def record(
        self, name: str, trace: bytes, since: float, within: bytes = b"", error: str = "", /, **values: Value
    ) -> None:
        """Record what has just ended, if it is traced. See :meth:`Span.ended`."""
        if trace:
            self.add([Span.ended(name, trace, since, within, error, **values)])

    def observe(self, report: Report) -> None:
        """Record tier I/O: in the trace of the request that waits for it, or in one of its own."""
        trace = current.get() or self.trace()
        if report.target is None or not report.keys or not trace:
            return
        name, tier = "kvtier.tier.read", report.source or ""
        if report.source == self.first_tier:
            name, tier = "kvtier.tier.write", report.target
        counts = {"chunks": len(report.keys), "bytes": report.transferred_bytes}
        counts["missed_chunks"] = report.outcomes.count(Outcome.MISS)
        failed = report.outcomes.count(Outcome.FAILED)
        error = f"{failed} chunks have failed" if failed else ""
        self.record(name, trace, time.monotonic() - report.seconds, b"", error, tier=tier, **counts)

    def queried(self, tier: str, asked: int, found: int, seconds: float) -> None:
        """Record the query of a shared pool, in the trace of the request that waits for it."""
        since, missed = time.monotonic() - seconds, asked - found
        self.record("kvtier.tier.lookup", current.get(), since, tier=tier, chunks=found, missed_chunks=missed)

    def status(self) -> dict[str, int]:
        """Return how many spans were exported, and how many could not be."""
        return {"exported": self.exported, "failed": self.failed, "dropped": self.dropped}


NO_TRACER = Tracer()
