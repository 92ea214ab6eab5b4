"""The process that sends a run's traces to an OpenTelemetry collector while it goes on, as the usual variables say.

The run's log is the queue: spans are made of it as fast as the collector takes them, so that a collector which is down
costs the run nothing, and this process the spans of one step. A process begins with what was told in the last minutes;
spans that were sent before have the same ids.
"""

import logging
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

from millrace.errors import CorruptObjectError, NotFoundError, UnavailableError
from millrace.exports.extras import import_extra
from millrace.exports.process import LogExport, serve
from millrace.exports.reader import EventFollower, read_header
from millrace.exports.spans import (
    Span,
    StepTrace,
    batch_span,
    publish_span,
    rollout_spans,
    root_span,
    serve_span,
    span_id,
    step_span,
    time_of,
    trace_id,
)
from millrace.rollouts.types import Rollout
from millrace.runlog.records.revisions import read_rollouts
from millrace.telemetry.redact import keep_secret, redact
from millrace.v1 import event_pb2

BEGIN_S = 300.0
"""A new process leaves out what was told longer ago than this."""
MAX_SPANS = 512
"""Of one request."""
MAX_OPEN = 64
"""Steps that may still get spans; those of older ones are not waited for."""
PROTOCOL = "http/protobuf"
_SECRETS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")


class TraceExport(LogExport):
    """Sends the spans of each step as the log tells of them; a step's own span when its version is published."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order)
        self._uid, self._run = str(order["uid"]), str(order["run"])
        self._follower = EventFollower(self.store, self.names)
        self._events: list[event_pb2.Event] = []
        self._traces: dict[int, StepTrace] = {}
        self._since = time.time() - BEGIN_S
        self._collector: Collector | None = None
        self._is_over = False

    def look(self) -> bool:
        """Send the spans that are new; an event whose spans were not taken is looked at again."""
        collector = self._collector = self._collector or Collector(self._uid)
        self._events.extend(self._follower.read())
        while self._events:
            event = self._events[0]
            if event.HasField("state_changed"):
                self._is_over = bool(event.state_changed.chain_hash)
            elif time_of(event) >= self._since:
                self._take(event, collector)
            self._events.pop(0)
        return self._is_over

    def _take(self, event: event_pb2.Event, collector: "Collector") -> None:
        kind = event.WhichOneof("body")
        if kind == "batch_committed":
            trace = self._trace(event.batch_committed.step)
            rollouts = self._rollouts(trace.step)
            for span in (*rollout_spans(rollouts), batch_span(event, rollouts)):
                trace.add(span)
        elif kind == "step_completed":
            trace = self._trace(event.step_completed.step)
            trace.add(step_span(event))
        elif kind == "policy_published" and event.policy_published.version > 0:
            trace = self._trace(event.policy_published.version - 1)
            trace.add(publish_span(event))
            trace.published = trace.published or time_of(event)
            trace.add(root_span(trace, uid=self._uid, run=self._run))
        elif kind == "policy_served" and event.policy_served.version > 0:
            trace = self._trace(event.policy_served.version - 1)
            trace.add(serve_span(event))
        else:
            return
        while part := trace.ready[:MAX_SPANS]:
            collector.send(trace.step, part)
            del trace.ready[: len(part)]
            self.rows += len(part)
        self.say("open", text=f"step {trace.step}")

    def _trace(self, step: int) -> StepTrace:
        trace = self._traces.setdefault(step, StepTrace(step))
        while len(self._traces) > MAX_OPEN:
            del self._traces[next(iter(self._traces))]
        return trace

    def _rollouts(self, step: int) -> list[Rollout]:
        """What the batch resolved; nothing where its archive is gone or damaged (`millrace run audit` says so)."""
        header = read_header(self.store, self.names, step)
        if header is None or not header.rollouts_key:
            return []
        try:
            return read_rollouts(self.store, header)
        except (NotFoundError, CorruptObjectError):
            return []


class Collector:
    """The collector that the variables name."""

    def __init__(self, uid: str) -> None:
        """InvalidStateError with the pip command where the SDK is not installed."""
        if (protocol := _variable("PROTOCOL") or PROTOCOL) != PROTOCOL:
            raise _unusable(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, which is not supported", f"use {PROTOCOL}")
        if (wanted := os.environ.get("OTEL_TRACES_EXPORTER") or "otlp") != "otlp":
            raise _unusable(f"OTEL_TRACES_EXPORTER is {wanted!r}, which is not supported", "use otlp, or none")
        module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
        self._exporter = import_extra(module, extra="otel").OTLPSpanExporter()
        self._success = import_extra("opentelemetry.sdk.trace.export", extra="otel").SpanExportResult.SUCCESS
        self._sdk = import_extra("opentelemetry.sdk.trace", extra="otel")
        self._api = import_extra("opentelemetry.trace", extra="otel")
        self._resource = import_extra("opentelemetry.sdk.resources", extra="otel").Resource.create(
            {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "millrace"}
        )
        self._scope = import_extra("opentelemetry.sdk.util.instrumentation", extra="otel").InstrumentationScope(
            "millrace"
        )
        self._is_sampled = _sampler()
        self._uid = uid
        self._problem = _LastProblem()
        logging.getLogger("opentelemetry").addHandler(self._problem)

    def send(self, step: int, spans: list[Span]) -> None:
        """Send spans of one trace; UnavailableError if they were not taken."""
        if not self._is_sampled(trace_id(self._uid, step)):
            return
        if self._exporter.export([self._made(step, span) for span in spans]) is not self._success:
            raise UnavailableError(
                f"the collector of OTEL_EXPORTER_OTLP_ENDPOINT does not take traces: {redact(self._problem.text)}",
                reason="TRACES_UNREACHABLE",
                remedy="see that it listens there for this protocol, and takes these headers",
            )

    def _made(self, step: int, span: Span) -> Any:
        """The span as the SDK has it."""
        status = self._api.Status(self._api.StatusCode.ERROR, redact(span.error)[:500]) if span.error else None
        return self._sdk.ReadableSpan(
            name=span.name,
            context=self._context(step, span.key),
            parent=None if span.parent is None else self._context(step, span.parent),
            resource=self._resource,
            attributes={
                "millrace.component": span.component,
                "millrace.step": step,
                **{name: redact(value) if isinstance(value, str) else value for name, value in span.attributes.items()},
            },
            start_time=int(span.begin * 1e9),
            end_time=int(max(span.begin, span.end) * 1e9),
            instrumentation_scope=self._scope,
            **({} if status is None else {"status": status}),
        )

    def _context(self, step: int, key: str) -> Any:
        return self._api.SpanContext(
            trace_id(self._uid, step),
            span_id(self._uid, step, key),
            is_remote=False,
            trace_flags=self._api.TraceFlags(self._api.TraceFlags.SAMPLED),
        )


class _LastProblem(logging.Handler):
    """Keeps what the SDK said last: its answer is only whether the spans were taken."""

    text = "it said nothing"

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:300]


def _sampler() -> Callable[[int], bool]:
    """Which traces are sent, by OTEL_TRACES_SAMPLER and its _ARG."""
    name = os.environ.get("OTEL_TRACES_SAMPLER", "").removeprefix("parentbased_") or "always_on"
    if name == "always_off":
        return lambda _: False
    if name != "traceidratio":
        return lambda _: True
    given = os.environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        share = float(given)
    except ValueError:
        raise _unusable(f"OTEL_TRACES_SAMPLER_ARG is {given!r}, which is no number", "use one from 0 to 1") from None
    return lambda trace: trace & ((1 << 64) - 1) < share * (1 << 64)


def _unusable(problem: str, remedy: str) -> UnavailableError:
    return UnavailableError(f"no traces are sent: {problem}", reason="TRACES_UNREACHABLE", remedy=remedy)


def _variable(name: str) -> str:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def main() -> NoReturn:
    """Export the run that the first line of the standard input names; ends with its parent."""
    for name in _SECRETS:
        if os.environ.get(name):
            keep_secret(os.environ[name])
    serve(TraceExport)


if __name__ == "__main__":
    main()
