"""The process that sends a run's traces to an OpenTelemetry collector while it goes on, as the usual variables say.

The run's log is the queue: spans are made of it as fast as the collector takes them, so that a collector which is down
costs the run nothing, and this process the spans of one step. A process begins with the events of the last minutes;
spans that were sent before have the same ids.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from millrace.errors import CorruptObjectError, NotFoundError, UnavailableError
from millrace.readers.exports.metrics import EventFollower, read_header
from millrace.readers.exports.process import LogExport, import_extra, serve
from millrace.rollouts.types import Rollout
from millrace.runlog.records.revisions import read_rollouts
from millrace.telemetry.logging import keep_secret, redact
from millrace.v1 import event_pb2

BEGIN_S = 300.0
"""A new process leaves out events that are older than this, in seconds."""
MAX_SPANS = 512
"""Of one request."""
MAX_OPEN = 64
"""Steps that may still get spans; those of older ones are not waited for."""
PROTOCOL = "http/protobuf"
_SECRETS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")


# A run's log as traces: one per step, from the tasks that were played for it to the version that came of it.
#
#     step 7
#       task 41                                from the first rollout's begin to the last one's end
#         rollout 0
#           generation                         the model calls, one after another as if without pause
#           environment                        the rest: the environment and its rewards
#       batch 7                                from the last rollout until the batch was committed
#       training step 7                        from the batch until the policy was better
#       publish version 8
#       serve version 8 on inference-0         one per replica
#
# Ids follow from the run's uid and the step, so that a second reading of the log makes the same spans.

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work. Times are seconds since 1970; the root has no parent."""

    name: str
    component: str
    """The service that did it."""
    key: str
    """What distinguishes it in its trace; "" is the root."""
    parent: str | None
    begin: float
    end: float
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""
    """What went wrong, in words."""


@dataclass(slots=True)
class StepTrace:
    """What is known of one step. `ready` are its spans that were not sent yet."""

    step: int
    begin: float = 0.0
    ready: list[Span] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    published: float = 0.0

    def add(self, span: Span) -> None:
        """Add a span to those to be sent, unless one with its key was added before: the first attempt counts."""
        if span.key not in self.seen:
            self.seen.add(span.key)
            self.ready.append(span)
            self.begin = min(self.begin or span.begin, span.begin)


def trace_id(uid: str, step: int) -> int:
    """Return the id of a step's trace: the first 16 bytes of the sha256 of `UID/STEP`."""
    return int.from_bytes(hashlib.sha256(f"{uid}/{step}".encode()).digest()[:16])


def span_id(uid: str, step: int, key: str) -> int:
    """Return the id of a span of a step's trace; `key` distinguishes the span in the trace."""
    return int.from_bytes(hashlib.sha256(f"{uid}/{step}/{key}".encode()).digest()[:8])


def rollout_spans(rollouts: Sequence[Rollout]) -> Iterator[Span]:
    """Yield spans of the tasks of a batch, of their rollouts, and of each one's generation and environment.

    A rollout whose log entry has no time is left out, and so are duplicates.
    """
    groups: dict[tuple[int, int], list[Rollout]] = {}
    for rollout in rollouts:
        if finished(rollout) and not rollout.is_duplicate:
            groups.setdefault((rollout.ordinal, rollout.attempt), []).append(rollout)
    for (ordinal, attempt), members in groups.items():
        task, first = f"task/{ordinal}/{attempt}", members[0]
        yield Span(
            name=f"task {ordinal}",
            component="orchestrator",
            key=task,
            parent="",
            begin=min(finished(each) - each.seconds for each in members),
            end=max(finished(each) for each in members),
            attributes={
                "millrace.environment": first.env,
                "millrace.task_id": first.task_id,
                "millrace.purpose": first.purpose.value,
                "millrace.attempt": attempt,
                "millrace.group_size": first.group_size,
            },
        )
        for rollout in members:
            yield from _rollout(rollout, task)


def _rollout(rollout: Rollout, task: str) -> Iterator[Span]:
    """Yield the spans of one rollout, its generation and its environment; `task` is the key of the task's span."""
    end = finished(rollout)
    begin = end - rollout.seconds
    generated = begin + min(rollout.model_seconds, rollout.seconds)
    key = f"{task}/{rollout.member}"
    versions = {"millrace.version_min": rollout.min_version, "millrace.version_max": rollout.max_version}
    yield Span(
        name=f"rollout {rollout.member}",
        component="env-server",
        key=key,
        parent=task,
        begin=begin,
        end=end,
        attributes={
            "millrace.worker": rollout.env_server,
            "millrace.status": rollout.status.value,
            "millrace.reward": rollout.reward,
            "millrace.stop": rollout.stop_condition,
        },
        error="" if rollout.error is None else f"{rollout.error.type}: {rollout.error.message}",
    )
    yield Span(
        name="generation",
        component="inference",
        key=f"{key}/generation",
        parent=key,
        begin=begin,
        end=generated,
        attributes={
            "millrace.calls": rollout.num_turns,
            "millrace.tokens": rollout.num_loss_tokens,
            **{name: version for name, version in versions.items() if version is not None},
        },
    )
    yield Span(
        name="environment",
        component="env-server",
        key=f"{key}/environment",
        parent=key,
        begin=generated,
        end=end,
        attributes={"millrace.environment": rollout.env},
    )


def finished(rollout: Rollout) -> float:
    """Return when the rollout's entry came into the log, in seconds since 1970; 0 if its id has no time."""
    milliseconds = rollout.entry_id.partition("-")[0]
    return int(milliseconds) / 1000 if milliseconds.isdecimal() and len(milliseconds) < 16 else 0.0


def batch_span(event: event_pb2.Event, rollouts: Sequence[Rollout]) -> Span:
    """Return the span of a batch's commit, which begins when the last of its rollouts was finished."""
    body, at = event.batch_committed, time_of(event)
    last = max((finished(rollout) for rollout in rollouts), default=0.0)
    return Span(
        name=f"batch {body.step}",
        component="orchestrator",
        key="batch",
        parent="",
        begin=min(at, last or at),
        end=at,
        attributes={
            "millrace.worker": event.writer,
            "millrace.groups": body.num_trained,
            "millrace.dropped": sum(body.dropped.values()),
            "millrace.tokens": body.num_tokens,
        },
    )


def step_span(event: event_pb2.Event) -> Span:
    """Return the span of the trainer's own work on a step, without its wait for the batch."""
    body, at = event.step_completed, time_of(event)
    return Span(
        name=f"training step {body.step}",
        component="trainer",
        key="train",
        parent="",
        begin=at - max(0.0, body.step_seconds - body.wait_seconds),
        end=at,
        attributes={
            "millrace.worker": event.writer,
            "millrace.reward_mean": body.reward_mean,
            "millrace.tokens": body.num_tokens,
            "millrace.wait_seconds": body.wait_seconds,
        },
    )


def publish_span(event: event_pb2.Event) -> Span:
    """Return the span of a policy version's upload; it is part of the trace of the step that made the version."""
    body, at = event.policy_published, time_of(event)
    return Span(
        name=f"publish version {body.version}",
        component="trainer",
        key="publish",
        parent="",
        begin=at - body.seconds,
        end=at,
        attributes={
            "millrace.worker": event.writer,
            "millrace.version": body.version,
            "millrace.lineage": body.lineage,
            "millrace.bytes": body.size_bytes,
            "millrace.codec": body.codec,
        },
    )


def serve_span(event: event_pb2.Event) -> Span:
    """Return the span in which a replica fetched and applied a policy version."""
    body, at = event.policy_served, time_of(event)
    return Span(
        name=f"serve version {body.version} on {body.replica}",
        component="inference",
        key=f"serve/{body.replica}",
        parent="",
        begin=at - max(body.update_seconds, body.pause_seconds),
        end=at,
        attributes={
            "millrace.worker": body.replica,
            "millrace.version": body.version,
            "millrace.pause_seconds": body.pause_seconds,
            "millrace.bytes": body.fetched_bytes,
        },
    )


def root_span(trace: StepTrace, *, uid: str, run: str) -> Span:
    """Return the span of the whole step: from its first task until its version is published.

    `run` is the run's name.
    """
    return Span(
        name=f"step {trace.step}",
        component="orchestrator",
        key="",
        parent=None,
        begin=trace.begin,
        end=max(trace.published, trace.begin),
        attributes={"millrace.run": run, "millrace.run_uid": uid, "millrace.step": trace.step},
    )


def time_of(event: event_pb2.Event) -> float:
    """Return when the event was written, in seconds since 1970."""
    return event.time.ToNanoseconds() / 1e9


class TraceExport(LogExport):
    """Sends the spans of each step as the log has events of them; a step's own span when its version is published."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Create the export of an order, which names the run and its store.

        Older events than `BEGIN_S` are left out.
        """
        super().__init__(order)
        self._uid, self._run = str(order["uid"]), str(order["run"])
        self._follower = EventFollower(self.store, self.names)
        self._events: list[event_pb2.Event] = []
        self._traces: dict[int, StepTrace] = {}
        self._since = time.time() - BEGIN_S
        self._collector: Collector | None = None
        self._is_over = False

    def look(self) -> bool:
        """Send the new spans to the collector, and return whether the log has the run's end.

        UnavailableError if the collector does not accept them: the event whose spans these are is processed again.
        """
        collector = self._collector = self._collector or Collector(self._uid)
        self._events.extend(self._follower.read())
        while self._events:
            event = self._events[0]
            # Only terminal states have a chain hash: the event of a reopening takes the end back.
            if event.HasField("state_changed"):
                self._is_over = bool(event.state_changed.chain_hash)
            elif time_of(event) >= self._since:
                self._send_event(event, collector)
            # Only now: an event whose spans were refused is processed again.
            self._events.pop(0)
        return self._is_over

    def _send_event(self, event: event_pb2.Event, collector: "Collector") -> None:
        """Add the spans of an event to its step's trace, and send all of that trace that are ready."""
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
            # Only after they were accepted: refused spans stay, and are sent when their event is processed again.
            del trace.ready[: len(part)]
            self.rows += len(part)
        self.report("open", text=f"step {trace.step}")

    def _trace(self, step: int) -> StepTrace:
        """Return the trace of a step, a new one if there is none; beyond `MAX_OPEN` traces the oldest is forgotten."""
        trace = self._traces.setdefault(step, StepTrace(step))
        while len(self._traces) > MAX_OPEN:
            del self._traces[next(iter(self._traces))]
        return trace

    def _rollouts(self, step: int) -> list[Rollout]:
        """Return the rollouts that a step's batch resolved.

        The list is empty if the archive is gone or damaged, which an audit reports.
        """
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
        """Make the exporter of OpenTelemetry's SDK that the variables name; the spans are of the run `uid`.

        InvalidStateError with the pip command if the SDK is not installed, UnavailableError for settings that
        are not supported.
        """
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
        """Send spans of one step's trace to the collector, unless the trace is not sampled.

        UnavailableError if they were not accepted.
        """
        if not self._is_sampled(trace_id(self._uid, step)):
            return
        if self._exporter.export([self._sdk_span(step, span) for span in spans]) is not self._success:
            raise UnavailableError(
                f"the collector of OTEL_EXPORTER_OTLP_ENDPOINT does not take traces: {redact(self._problem.text)}",
                reason="TRACES_UNREACHABLE",
                remedy="see that it listens there for this protocol, and takes these headers",
            )

    def _sdk_span(self, step: int, span: Span) -> Any:
        """Return a span in the SDK's form, with secrets masked."""
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
        """Return the SDK's context of a span: the ids of its trace and of itself."""
        return self._api.SpanContext(
            trace_id(self._uid, step),
            span_id(self._uid, step, key),
            is_remote=False,
            trace_flags=self._api.TraceFlags(self._api.TraceFlags.SAMPLED),
        )


class _LastProblem(logging.Handler):
    """Keeps the last line that the SDK logged: its answer is only whether the spans were taken."""

    text = "it logged no reason"

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:300]


def _sampler() -> Callable[[int], bool]:
    """Return a function that says by a trace's id whether it is sent, as OTEL_TRACES_SAMPLER and its _ARG demand.

    UnavailableError if the argument is no number.
    """
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
    # As the SDK's `TraceIdRatioBased`: by the lower 64 bits of the id, so that each process decides alike.
    return lambda trace: trace & ((1 << 64) - 1) < share * (1 << 64)


def _unusable(problem: str, remedy: str) -> UnavailableError:
    """Make the error for settings with which no traces are sent."""
    return UnavailableError(f"no traces are sent: {problem}", reason="TRACES_UNREACHABLE", remedy=remedy)


def _variable(name: str) -> str:
    """Return OpenTelemetry's variable of this ending for traces, else for all exports; empty if neither is set."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""


def main() -> NoReturn:
    """Send the traces of the run that the first line of the standard input names; exit when the parent is gone."""
    for name in _SECRETS:
        if os.environ.get(name):
            keep_secret(os.environ[name])
    serve(TraceExport)


if __name__ == "__main__":
    main()
