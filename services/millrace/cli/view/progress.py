"""What is known of a run from its events: a plain state that every view, the summary and the plot are drawn from."""

import json
import re
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Self

from millrace.errors import RefusedError
from millrace.runlog.run_status import RunStatus
from millrace.v1 import event_pb2, run_pb2

_KL_NAMES = ("mismatch_kl/mean", "mismatch_kl/all/mean", "mismatch_kl")
_RECENT_STEPS = 8
_WORKER_ID = re.compile(r"\b(trainer|env-server|inference|orchestrator)-[\w.-]*?-?\d+-[0-9a-f]{8}\b")
"""Service, host, process id and a random part, as `new_worker_id` makes them."""
LAST_EVENTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One optimizer step. `number` counts from 1: after it the policy is version `number`."""

    number: int
    reward: float
    staleness_mean: float
    staleness_max: int
    num_tokens: int
    num_rollouts: int
    step_s: float
    wait_s: float
    kl: float | None

    @property
    def tokens_per_s(self) -> float:
        """Return tokens of the batch over the wall time of the step."""
        return self.num_tokens / self.step_s if self.step_s > 0 else 0.0

    @property
    def wait_ratio(self) -> float:
        """Return share of the step in which the trainer waited for its batch."""
        return self.wait_s / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPoint:
    """One evaluation of one environment."""

    env: str
    step: int
    version: int
    """Oldest policy version that answered."""
    version_max: int
    """Newest one."""
    reward: float
    num_rollouts: int
    num_failed: int
    skipped: tuple[int, ...]
    """Versions that were due before it and were not evaluated."""


@dataclass(slots=True, kw_only=True)
class TransferredBytes:
    """Bytes of weights that were moved, and what full copies would have been."""

    versions: int = 0
    moved_bytes: int = 0
    full_bytes: int = 0

    def add(self, moved_bytes: int, full_bytes: int) -> None:
        """Take one more version in; events of older releases do not say what a full copy has."""
        self.versions += 1
        self.moved_bytes += moved_bytes
        self.full_bytes += full_bytes

    @property
    def ratio(self) -> float | None:
        """Return the share of a full copy that was transferred; None if it is unknown."""
        return self.moved_bytes / self.full_bytes if self.full_bytes else None


@dataclass(slots=True, kw_only=True)
class Progress(RunStatus):
    """The status of a run as its events tell it, with the series that views draw. `apply` is the only writer."""

    name: str
    uid: str = ""
    place: str = ""
    """Where it can be looked at, if that is known."""
    staleness_bound: int | None = None
    """`max_off_policy_steps`: rollouts that are older are dropped."""
    steps: list[StepPoint] = field(default_factory=list)
    evals: list[EvalPoint] = field(default_factory=list)
    policy: event_pb2.PolicyPublished | None = None
    """The newest published version."""
    published: TransferredBytes = field(default_factory=TransferredBytes)
    """What the trainer wrote of all versions."""
    fetched: TransferredBytes = field(default_factory=TransferredBytes)
    """What all replicas read."""
    checkpoint: event_pb2.CheckpointSaved | None = None
    score: event_pb2.ScoreCompleted | None = None
    waits: dict[str, event_pb2.Wait] = field(default_factory=dict)
    """The newest wait of each owner."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_EVENTS))
    """The last events in words, kept by the views."""
    shown_as: dict[str, str] = field(default_factory=dict)
    """Short names of processes, such as `trainer-1`, by their ids."""
    held_up: RefusedError | None = None
    """Why nobody waits for it any more, though it has not ended."""

    @classmethod
    def of(cls, run: run_pb2.Run) -> Self:
        """Return the state before the first event, with the bounds that the run's config names."""
        try:
            orchestrator = json.loads(run.config_json or "{}").get("orchestrator", {})
        except ValueError:  # a newer server may send another form; the bounds are only decoration
            orchestrator = {}
        bound = orchestrator.get("max_off_policy_steps")
        return cls(name=run.name, uid=run.uid, max_steps=run.progress.max_steps, staleness_bound=bound)

    def short(self, text: str) -> str:
        """Return the text with short names for ids of processes, numbered by service as they come."""
        return _WORKER_ID.sub(self._name, text)

    def _name(self, found: re.Match[str]) -> str:
        worker_id, service = found.group(), found.group(1)
        if worker_id not in self.shown_as:
            number = 1 + sum(name.rpartition("-")[0] == service for name in self.shown_as.values())
            self.shown_as[worker_id] = f"{service}-{number}"
        return self.shown_as[worker_id]

    def apply(self, event: event_pb2.Event) -> None:
        """Take an event in. Events of a kind that this version does not know change nothing."""
        RunStatus.apply(self, event)
        match event.WhichOneof("body"):
            case "state_changed":
                self.waits.clear()
            case "step_completed":
                self._add_point(event.step_completed)
            case "eval_completed":
                self._add_eval(event.eval_completed)
            case "policy_published":
                new = event.policy_published
                self.published.add(new.size_bytes, new.full_bytes)
                if self.policy is None or (new.lineage, new.version) >= (self.policy.lineage, self.policy.version):
                    self.policy = new
            case "policy_served":
                self.fetched.add(event.policy_served.fetched_bytes, event.policy_served.full_bytes)
            case "checkpoint_saved":
                self.checkpoint = event.checkpoint_saved
            case "score_completed":
                self.score = event.score_completed
            case "wait_reported":
                self.waits[event.wait_reported.wait.owner] = event.wait_reported.wait

    @property
    def step(self) -> int:
        """Return optimizer steps taken."""
        return self.steps[-1].number if self.steps else 0

    @property
    def eta_s(self) -> float | None:
        """Return seconds to the last step at the pace of the last steps; None if unknown.

        The first step includes the wait for the first batch and what is done once, and says nothing of the others.
        """
        if not self.steps or not self.max_steps:
            return None
        recent = self.steps[1:][-_RECENT_STEPS:]
        if self.step < self.max_steps and not recent:
            return None
        pace_s = statistics.median(point.step_s for point in recent) if recent else 0.0
        return pace_s * (self.max_steps - self.step)

    @property
    def wait_ratio(self) -> float | None:
        """Return share of all step time in which the trainer waited; None before the first step."""
        total_s = sum(point.step_s for point in self.steps)
        return sum(point.wait_s for point in self.steps) / total_s if total_s > 0 else None

    @property
    def reward_before(self) -> float | None:
        """Return held-out reward of the first evaluated step, the mean over environments; None without evaluation."""
        return self._eval_mean(min(point.step for point in self.evals)) if self.evals else None

    @property
    def reward_after(self) -> float | None:
        """Return held-out reward of the last evaluated step; None unless two steps were evaluated."""
        steps = {point.step for point in self.evals}
        return self._eval_mean(max(steps)) if len(steps) > 1 else None

    def _add_point(self, done: event_pb2.StepCompleted) -> None:
        point = StepPoint(
            number=done.step + 1,
            reward=done.reward_mean,
            staleness_mean=done.staleness_mean,
            staleness_max=done.staleness_max,
            num_tokens=done.num_tokens,
            num_rollouts=done.num_rollouts,
            step_s=done.step_seconds,
            wait_s=done.wait_seconds,
            kl=next((done.metrics[name] for name in _KL_NAMES if name in done.metrics), None),
        )
        # A resumed trainer repeats the steps since its checkpoint; the repetition replaces what it repeats.
        while self.steps and self.steps[-1].number >= point.number:
            self.steps.pop()
        self.steps.append(point)
        self.waits.clear()

    def _add_eval(self, done: event_pb2.EvalCompleted) -> None:
        self.evals.append(
            EvalPoint(
                env=done.env,
                step=done.step,
                version=done.policy_version,
                version_max=max(done.policy_version_max, done.policy_version),
                reward=done.reward_mean,
                num_rollouts=done.num_rollouts,
                num_failed=done.num_failed,
                skipped=tuple(done.skipped),
            )
        )

    def _eval_mean(self, step: int) -> float:
        return statistics.fmean({p.env: p.reward for p in self.evals if p.step == step}.values())
