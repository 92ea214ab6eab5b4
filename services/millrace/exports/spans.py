"""A run's log as traces: one per step, from the tasks that were played for it to the version that came of it.

    step 7
      task 41                                from the first rollout's begin to the last one's end
        rollout 0
          generation                         the model calls, one after another as if without pause
          environment                        the rest: the environment and its rewards
      batch 7                                from the last rollout until the batch was committed
      training step 7                        from the batch until the policy was better
      publish version 8
      serve version 8 on inference-0         one per replica

Ids follow from the run's uid and the step, so that a second reading of the log makes the same spans.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from millrace.rollouts.types import Rollout
from millrace.v1 import event_pb2

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
        """A span, unless the log said the same before, of an attempt that came first."""
        if span.key not in self.seen:
            self.seen.add(span.key)
            self.ready.append(span)
            self.begin = min(self.begin or span.begin, span.begin)


def trace_id(uid: str, step: int) -> int:
    """Of a step's trace: the first 16 bytes of the sha256 of `UID/STEP`."""
    return int.from_bytes(hashlib.sha256(f"{uid}/{step}".encode()).digest()[:16])


def span_id(uid: str, step: int, key: str) -> int:
    """Of a span of that trace."""
    return int.from_bytes(hashlib.sha256(f"{uid}/{step}/{key}".encode()).digest()[:8])


def rollout_spans(rollouts: Sequence[Rollout]) -> Iterator[Span]:
    """The tasks of a batch, with their rollouts. One whose log entry has no time is left out."""
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
    """When its entry came into the log, in seconds since 1970; 0 if it does not say."""
    milliseconds = rollout.entry_id.partition("-")[0]
    return int(milliseconds) / 1000 if milliseconds.isdecimal() and len(milliseconds) < 16 else 0.0


def batch_span(event: event_pb2.Event, rollouts: Sequence[Rollout]) -> Span:
    """From the end of the last rollout to the commit."""
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
    """The trainer's own work, without its wait for the batch."""
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
    """The upload of the version that came of the step."""
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
    """How a replica came to serve the version."""
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
    """The whole step: from its first task to its version."""
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
    """When it was written, in seconds since 1970."""
    return event.time.ToNanoseconds() / 1e9
