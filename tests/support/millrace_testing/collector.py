"""A collector of OpenTelemetry traces: it takes what OTLP over HTTP sends, and keeps the spans."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

MAX_WAIT_S = 60.0


class Collector:
    """What came, in the order in which it came."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        """What it answers; spans are kept of requests that get 200."""
        self.answers = threading.Event()
        """Cleared, requests wait for their answer: a collector that is slow."""
        self.answers.set()
        self.refused = 0
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []

    def take(self, request: ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        """Keep what a request holds."""
        self.headers.append(headers)
        for each in request.resource_spans:
            self.resources.append({item.key: item.value.string_value for item in each.resource.attributes})
            for scope in each.scope_spans:
                self.spans.extend(scope.spans)

    def named(self, name: str) -> list[Span]:
        """Return the spans of that name."""
        return [span for span in self.spans if span.name == name]


@contextlib.contextmanager
def collecting(collector: Collector) -> Iterator[Collector]:
    """Serve it on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            collector.answers.wait(MAX_WAIT_S)
            if self.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
            if collector.status == 200 and self.path == "/v1/traces":
                collector.take(ExportTraceServiceRequest.FromString(data), dict(self.headers))
            else:
                collector.refused += 1
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
