"""An OpenTelemetry collector for tests: receives OTLP over gRPC and HTTP, and writes a line for each span.

A process of its own, so that a test can stop, continue, kill and restart it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from kvtier.testing.servers import free_port
from tests.rigs.cache_process import START_SECONDS, StoppableProcess
from tests.rigs.waiting import wait_until


class Received(NamedTuple):
    """A span. Ids are in hexadecimal digits; times are nanoseconds since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, str | int]
    error: str
    service: str


class Collector(StoppableProcess):
    """The collector and what it has received, also before it was restarted."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "collector.log"
        self.file = folder / "spans.jsonl"
        self.file.touch()
        self.ports = {"grpc": free_port(), "http/protobuf": free_port()}

    def start(self) -> Self:
        before = self.log.read_text().count("ready") if self.log.exists() else 0
        with self.log.open("ab") as output:
            ports = map(str, self.ports.values())
            command = [sys.executable, "-m", "tests.rigs.collector", str(self.file), *ports]
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + START_SECONDS
        while self.log.read_text().count("ready") == before:
            self.check_running()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.02)
        return self

    def environment(self, protocol: str = "grpc") -> dict[str, str]:
        """Return the variables with which kvtier exports to it."""
        url = f"http://127.0.0.1:{self.ports[protocol]}"
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url if protocol == "grpc" else f"{url}/v1/traces",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol,
        }

    @property
    def spans(self) -> list[Received]:
        """What it has received."""
        lines = self.file.read_text().split("\n")[:-1]
        return [Received(**json.loads(line)) for line in lines]

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def wait_for(self, condition: Callable[[list[Received]], object]) -> list[Received]:
        """Return the spans once they fulfil a condition."""
        try:
            wait_until(lambda: condition(self.spans))
        except TimeoutError as error:
            raise AssertionError(f"received: {self.spans}\n{self.tail()}") from error
        return self.spans


def _received(request: Any) -> Iterator[Received]:
    for resource in request.resource_spans:
        service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            attributes = {
                each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
            }
            yield Received(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                span.start_time_unix_nano,
                span.end_time_unix_nano,
                attributes,
                span.status.message,
                service,
            )


def main(file: str, grpc_port: str, http_port: str) -> None:
    """Receive until killed."""
    from concurrent.futures import ThreadPoolExecutor
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    def write(request: Any) -> None:
        lines = "".join(json.dumps(span._asdict()) + "\n" for span in _received(request))
        with Path(file).open("a") as spans:
            spans.write(lines)

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
            write(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found = self.path == "/v1/traces"
            if found:
                write(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if found else 404)
            self.end_headers()

    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    assert server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    server.start()
    http = ThreadingHTTPServer(("127.0.0.1", int(http_port)), Handler)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    http.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
