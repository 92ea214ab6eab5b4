"""What a run looks like from outside: its record in the store, folded with the events of its log.

Nothing here is stored: any orchestrator replica computes the same view from `run.json` and the event stream.
"""

import contextlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

from google.protobuf.timestamp_pb2 import Timestamp

from millrace.config.load import from_resolved
from millrace.config.schema import EvalRunConfig, RLConfig
from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, MillraceError
from millrace.v1 import event_pb2, run_pb2

GONE_BEHIND = 8
"""A replica that is more versions behind the newest one is gone or as good as gone: it does not count as the oldest."""
RL, EVAL, UNKNOWN = "RL", "EVAL", "UNSPECIFIED"
"""Kinds of runs, as `run.json` names them; the last one where it cannot be read."""
TERMINAL = frozenset({run_pb2.RUN_STATE_SUCCEEDED, run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_CANCELLED})


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The immutable part of a run, as `run.json` has it."""

    uid: str
    name: str
    kind: str
    config: dict[str, object]
    run_hash: str
    request_id: str
    create_time: str
    code_version: str
    labels: dict[str, str]
    parent: dict[str, Any] | None = None
    """For a fork: where it begins, as `runlog.origin` reads it."""

    def encode(self) -> bytes:
        """Canonical JSON; `parent` only where there is one."""
        document = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.parent is None:
            del document["parent"]
        return json.dumps(document, sort_keys=True, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> Self:
        """Parse `run.json`; fields of a newer release are ignored. `CorruptObjectError` names it by `where`."""
        document = decode_object(data, what=where, reason="RUN_JSON_CORRUPT")
        for name, kind in _FIELDS.items():
            if not isinstance(document.get(name), kind):
                raise CorruptObjectError(f"{where} has no usable {name}", reason="RUN_JSON_CORRUPT")
        record = cls(parent=document.get("parent"), **{name: document[name] for name in _FIELDS})
        try:
            RunView(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptObjectError(f"{where} holds no run: {error!r}"[:500], reason="RUN_JSON_CORRUPT") from error
        return record

    @classmethod
    def unreadable(cls, uid: str, name: str) -> Self:
        """What stands for a run whose `run.json` cannot be read."""
        empty: dict[str, Any] = {"config": {}, "run_hash": "", "request_id": "", "create_time": "", "code_version": ""}
        return cls(uid=uid, name=name, kind=UNKNOWN, labels={}, **empty)

    @property
    def config_json(self) -> str:
        """The resolved config as canonical JSON."""
        return json.dumps(self.config, sort_keys=True)

    @cached_property
    def settings(self) -> RLConfig | EvalRunConfig:
        """The config, typed; ValueError if it is of another release."""
        return from_resolved(self.config, EvalRunConfig if self.kind == EVAL else RLConfig)

    @property
    def training(self) -> RLConfig:
        """The config of a run that trains; ValueError for another one."""
        if not isinstance(self.settings, RLConfig):
            raise ValueError(f"run {self.name} trains nothing")
        return self.settings


_FIELDS: dict[str, type] = {each.name: str for each in fields(RunRecord) if each.name != "parent"}
_FIELDS |= {"config": dict, "labels": dict}


class BatchClock:
    """When a run last got ahead: its last batch, or the time from which it could make one; on any clock, in seconds.

    A run that is driven anew (STARTING) stands still meanwhile: who drives it next goes on with the old time, else an
    orchestrator that ends again and again would hide that nothing is committed.
    """

    def __init__(self) -> None:
        self.moved: float | None = None
        """None while no batch is due."""
        self._is_due = True

    def state_changed(self, state: run_pb2.RunState, at: float) -> None:
        """The run's state since `at`."""
        if state == run_pb2.RUN_STATE_RUNNING:
            if self.moved is None and self._is_due:
                self.moved = at
        elif state != run_pb2.RUN_STATE_STARTING:
            self.moved = None  # paused, queued or at its end

    def committed(self, at: float, *, is_last: bool = False) -> None:
        """A batch is in the log."""
        self._is_due = not is_last
        self.moved = None if is_last else at


class RunView:
    """A `Run` resource that events are folded into."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.cursor = ""
        self.log_instance = ""
        """Which copy of the log the events were read from; empty before the first look."""
        self.is_closed = False
        """Known to be committed to its closing header: events that said so may be lost with Redis."""
        self.is_reopened = False
        """It had FAILED, and `run resume` reopened it; the event that says so is still to be written."""
        self.num_reopened = 0
        """How often it was reopened, at the last look."""
        self.done_evals: set[tuple[str, int]] = set()
        """Environment and step of every evaluation that is finished."""
        self._served: dict[str, int] = {}
        self._state_before_end = run_pb2.RUN_STATE_QUEUED
        self.batches = BatchClock()
        """On the clocks of those who wrote the events (seconds since the epoch)."""
        self.spoke_at: dict[str, float] = {}
        """When each writer wrote its newest event, on its own clock (seconds since the epoch)."""
        self.damage: MillraceError | None = None
        """Why the run cannot be read at the moment."""
        self._run = run_pb2.Run(
            name=f"runs/{record.name}",
            uid=record.uid,
            kind=f"RUN_KIND_{record.kind}",
            state=run_pb2.RUN_STATE_QUEUED,
            config_json=record.config_json,
            run_hash=record.run_hash,
            create_time=_timestamp(record.create_time) if record.create_time else None,
            labels=record.labels,
        )
        max_steps = record.config.get("max_steps")
        self._run.progress.max_steps = max_steps if isinstance(max_steps, int) else 0
        if record.parent is not None:
            parent = record.parent
            self._run.parent.CopyFrom(
                run_pb2.RunParent(name=f"runs/{parent['name']}", uid=parent["uid"], step=parent["step"])
            )
            self._run.progress.step = self._run.progress.policy_version = parent["base_step"]

    @property
    def run(self) -> run_pb2.Run:
        """The resource; DAMAGED, with the reason and the remedy, while the run cannot be read."""
        if self.damage is None:
            return self._run
        run = run_pb2.Run()
        run.CopyFrom(self._run)
        run.state = run_pb2.RUN_STATE_DAMAGED
        message = str(self.damage)
        if self.record.uid:
            message += f"; `millrace run repair {self.record.name}` says what can be restored from what"
        run.error.CopyFrom(run_pb2.RunError(reason=self.damage.reason, message=message, component="orchestrator"))
        return run

    @property
    def logged_state(self) -> run_pb2.RunState:
        """The state that the log says, also while the run cannot be read."""
        return self._run.state

    @property
    def is_terminal(self) -> bool:
        """Whether the run has ended, and can be read."""
        return self.run.state in TERMINAL

    @property
    def has_failed(self) -> bool:
        """Whether the run has ended as FAILED, which can be reopened."""
        return self._run.state == run_pb2.RUN_STATE_FAILED

    def reopen(self) -> None:
        """The run that had failed goes on; its state is that of the event that comes next."""
        self.is_reopened, self.is_closed = True, False
        self._leave_end(run_pb2.RUN_STATE_QUEUED)

    def take_end_back(self) -> None:
        """The event of its end is nobody's: no closing header ends the run, which goes on as it was."""
        self._leave_end(self._state_before_end)

    def apply(self, event: event_pb2.Event) -> None:
        """Fold one event in; events come in the order of their cursors."""
        self.cursor = event.cursor
        with contextlib.suppress(ValueError):  # numbers to which nothing was counted: a foreign event
            self._fold(event)

    def _fold(self, event: event_pb2.Event) -> None:
        at = self.spoke_at[event.writer] = event.time.ToNanoseconds() / 1e9
        progress = self._run.progress
        match event.WhichOneof("body"):
            case "state_changed":
                self._apply_state(event)
                self.batches.state_changed(event.state_changed.new_state, at)
            case "batch_committed":
                self.batches.committed(at, is_last=0 < progress.max_steps <= event.batch_committed.step + 1)
            case "step_completed":
                step = event.step_completed
                # A trainer that resumed reports steps again; progress never goes back.
                if step.step + 1 > progress.step:
                    progress.step = step.step + 1
                    progress.num_rollouts += step.num_rollouts
                    progress.num_tokens += step.num_tokens
                    progress.reward = step.reward_mean
            case "policy_published":
                progress.policy_version = max(progress.policy_version, event.policy_published.version)
            case "eval_completed":
                self.done_evals.add((event.eval_completed.env, event.eval_completed.step))
            case "policy_served":
                self._served[event.policy_served.replica] = event.policy_served.version
                newest = max(self._served.values())
                self._served = {name: at for name, at in self._served.items() if at >= newest - GONE_BEHIND}
                progress.min_inference_version = min(self._served.values())
            case _:
                pass

    def _apply_state(self, event: event_pb2.Event) -> None:
        change = event.state_changed
        self.is_reopened = False
        if self._run.state not in TERMINAL:
            self._state_before_end = self._run.state
        self._leave_end(change.new_state)
        if change.new_state == run_pb2.RUN_STATE_STARTING and not self._run.HasField("start_time"):
            self._run.start_time.CopyFrom(event.time)
        if change.new_state in TERMINAL:
            self._run.end_time.CopyFrom(event.time)
        if change.HasField("error"):
            self._run.error.CopyFrom(change.error)

    def _leave_end(self, state: run_pb2.RunState) -> None:
        """Enter a state; what a reopened run had as an end is none."""
        self._run.state = state
        if state not in TERMINAL:
            self._run.ClearField("end_time")
            self._run.ClearField("error")


def _timestamp(text: str) -> Timestamp:
    stamp = Timestamp()
    stamp.FromJsonString(text)
    return stamp
