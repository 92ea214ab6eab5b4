"""What is known of a run from its events: a plain state that every view, the summary and the plot are drawn from."""

import json
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Self

from millrace.v1 import event_pb2, run_pb2

_KL_NAMES = ("mismatch_kl/mean", "mismatch_kl/all/mean", "mismatch_kl")
_RECENT_STEPS = 8
LAST_EVENTS = 5
GONE_BEHIND = 8
"""A replica that is more versions behind the newest one is gone, or replaced under another id."""


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
        """Tokens of the batch over the wall time of the step."""
        return self.num_tokens / self.step_s if self.step_s > 0 else 0.0

    @property
    def wait_ratio(self) -> float:
        """Share of the step in which the trainer waited for its batch."""
        return self.wait_s / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPoint:
    """One evaluation of one environment."""

    env: str
    version: int
    reward: float
    num_rollouts: int
    num_failed: int


@dataclass(slots=True, kw_only=True)
class Moved:
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
        """Moved over full; None if nothing is known."""
        return self.moved_bytes / self.full_bytes if self.full_bytes else None


@dataclass(slots=True, kw_only=True)
class Progress:
    """The state of one run as its events tell it. `apply` is the only writer."""

    name: str
    uid: str = ""
    max_steps: int = 0
    """0 is unlimited."""
    staleness_bound: int | None = None
    """`max_off_policy_steps`: rollouts that are older are dropped."""
    state: run_pb2.RunState = run_pb2.RUN_STATE_QUEUED
    steps: list[StepPoint] = field(default_factory=list)
    evals: list[EvalPoint] = field(default_factory=list)
    committed: int = 0
    """Batches committed."""
    policy: event_pb2.PolicyPublished | None = None
    """The newest published version."""
    published: Moved = field(default_factory=Moved)
    """What the trainer wrote of all versions."""
    fetched: Moved = field(default_factory=Moved)
    """What all replicas read."""
    checkpoint: event_pb2.CheckpointSaved | None = None
    score: event_pb2.ScoreCompleted | None = None
    error: run_pb2.RunError | None = None
    served: dict[str, int] = field(default_factory=dict)
    """Version by replica."""
    waits: dict[str, event_pb2.Wait] = field(default_factory=dict)
    """The newest wait of each owner."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Ordinals dropped, by reason."""
    entered: dict[run_pb2.RunState, float] = field(default_factory=dict)
    """When each state was entered, on the writers' clocks (seconds since the epoch)."""
    last_time: float = 0.0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_EVENTS))
    """The last events in words, kept by the views."""

    @classmethod
    def of(cls, run: run_pb2.Run) -> Self:
        """The state before the first event, with the bounds that the run's config names."""
        try:
            orchestrator = json.loads(run.config_json or "{}").get("orchestrator", {})
        except ValueError:  # a newer server may send another form; the bounds are only decoration
            orchestrator = {}
        bound = orchestrator.get("max_off_policy_steps")
        return cls(name=run.name, uid=run.uid, max_steps=run.progress.max_steps, staleness_bound=bound)

    def apply(self, event: event_pb2.Event) -> None:
        """Take an event in. Events of a kind that this version does not know change nothing."""
        self.last_time = event.time.ToNanoseconds() / 1e9
        match event.WhichOneof("body"):
            case "state_changed":
                self._change_state(event.state_changed)
            case "step_completed":
                self._add_step(event.step_completed)
            case "eval_completed":
                self._add_eval(event.eval_completed)
            case "policy_published":
                new = event.policy_published
                self.published.add(new.size_bytes, new.full_bytes)
                if self.policy is None or (new.lineage, new.version) >= (self.policy.lineage, self.policy.version):
                    self.policy = new
            case "policy_served":
                self.fetched.add(event.policy_served.fetched_bytes, event.policy_served.full_bytes)
                self.served[event.policy_served.replica] = newest = event.policy_served.version
                self.served = {name: at for name, at in self.served.items() if at >= newest - GONE_BEHIND}
            case "checkpoint_saved":
                self.checkpoint = event.checkpoint_saved
            case "score_completed":
                self.score = event.score_completed
            case "batch_committed":
                self.committed = max(self.committed, event.batch_committed.step + 1)
                for reason, number in event.batch_committed.dropped.items():
                    self.dropped[reason] = self.dropped.get(reason, 0) + number
            case "wait_reported":
                self.waits[event.wait_reported.wait.owner] = event.wait_reported.wait

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.steps[-1].number if self.steps else 0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the pace of the last steps; None if unknown."""
        if not self.steps or not self.max_steps:
            return None
        pace_s = statistics.median(point.step_s for point in self.steps[-_RECENT_STEPS:])
        return pace_s * (self.max_steps - self.step)

    @property
    def wait_ratio(self) -> float | None:
        """Share of all step time in which the trainer waited; None before the first step."""
        total_s = sum(point.step_s for point in self.steps)
        return sum(point.wait_s for point in self.steps) / total_s if total_s > 0 else None

    @property
    def reward_before(self) -> float | None:
        """Held-out reward of the first evaluated version, the mean over environments; None without evaluation."""
        return self._eval_mean(min(point.version for point in self.evals)) if self.evals else None

    @property
    def reward_after(self) -> float | None:
        """Held-out reward of the last evaluated version; None unless two versions were evaluated."""
        versions = {point.version for point in self.evals}
        return self._eval_mean(max(versions)) if len(versions) > 1 else None

    @property
    def inference_version(self) -> int | None:
        """Oldest version that a replica serves."""
        return min(self.served.values()) if self.served else None

    def _change_state(self, change: event_pb2.StateChanged) -> None:
        self.state = change.new_state
        if change.old_state == run_pb2.RUN_STATE_FAILED:
            self.error = None  # it was reopened
        self.entered.setdefault(change.new_state, self.last_time)
        self.waits.clear()
        if change.HasField("error"):
            self.error = change.error

    def _add_step(self, done: event_pb2.StepCompleted) -> None:
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
                version=done.policy_version,
                reward=done.reward_mean,
                num_rollouts=done.num_rollouts,
                num_failed=done.num_failed,
            )
        )

    def _eval_mean(self, version: int) -> float:
        return statistics.fmean({p.env: p.reward for p in self.evals if p.version == version}.values())


def state_name(state: run_pb2.RunState) -> str:
    """RUNNING for RUN_STATE_RUNNING."""
    return run_pb2.RunState.Name(state).removeprefix("RUN_STATE_")
