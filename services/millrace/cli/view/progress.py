"""The state of a run, computed from its events, and plots of it. All views and the summary are made from it."""

import json
import re
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from millrace.errors import RefusedError
from millrace.runlog.run_status import RunStatus
from millrace.v1 import event_pb2, run_pb2

_KL_NAMES = ("mismatch_kl/mean", "mismatch_kl/all/mean", "mismatch_kl")
_RECENT_STEPS = 8
_WORKER_ID = re.compile(r"\b(trainer|env-server|inference|orchestrator)-[\w.-]*?-?\d+-[0-9a-f]{8}\b")
"""Matches ids made by `new_worker_id`: service, host, process id and a random part."""
LAST_EVENTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """Measurements of one optimizer step. `number` counts from 1: the step made policy version `number`."""

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
        """Return the batch's tokens divided by the step's wall time."""
        return self.num_tokens / self.step_s if self.step_s > 0 else 0.0

    @property
    def wait_ratio(self) -> float:
        """Return the share of the step's time in which the trainer waited for its batch."""
        return self.wait_s / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPoint:
    """The result of one evaluation of one environment."""

    env: str
    step: int
    version: int
    """The oldest policy version that answered."""
    version_max: int
    """The newest policy version that answered."""
    reward: float
    num_rollouts: int
    num_failed: int
    skipped: tuple[int, ...]
    """Versions whose evaluation was due before this one and was skipped."""


@dataclass(slots=True, kw_only=True)
class TransferredBytes:
    """Bytes of weights that were moved, and the size of full copies of the same versions."""

    versions: int = 0
    moved_bytes: int = 0
    full_bytes: int = 0

    def add(self, moved_bytes: int, full_bytes: int) -> None:
        """Add one version: the bytes that were moved, and the size of its full copy (0 in events of older releases)."""
        self.versions += 1
        self.moved_bytes += moved_bytes
        self.full_bytes += full_bytes

    @property
    def ratio(self) -> float | None:
        """Return the transferred share of full copies; None if their size is unknown."""
        return self.moved_bytes / self.full_bytes if self.full_bytes else None


@dataclass(slots=True, kw_only=True)
class Progress(RunStatus):
    """The status of a run with the series that views draw.

    Only `apply` changes it, except for the fields that the views use themselves.
    """

    name: str
    uid: str = ""
    has_versions: bool = True
    """Whether the run has policy versions; an evaluation plays one fixed model."""
    place: str = ""
    """The addresses of the run's orchestrator and dashboard; empty if unknown."""
    staleness_bound: int | None = None
    """The run's `max_off_policy_steps`. Older rollouts are dropped."""
    steps: list[StepPoint] = field(default_factory=list)
    evals: list[EvalPoint] = field(default_factory=list)
    policy: event_pb2.PolicyPublished | None = None
    """The newest published version."""
    published: TransferredBytes = field(default_factory=TransferredBytes)
    """Bytes the trainer has written for all versions."""
    fetched: TransferredBytes = field(default_factory=TransferredBytes)
    """Bytes all replicas have read."""
    checkpoint: event_pb2.CheckpointSaved | None = None
    score: event_pb2.ScoreCompleted | None = None
    waits: dict[str, event_pb2.Wait] = field(default_factory=dict)
    """The newest wait reported by each owner."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_EVENTS))
    """The last events as text; the views add them."""
    shown_as: dict[str, str] = field(default_factory=dict)
    """Short names of processes, such as `trainer-1`, by process id."""
    held_up: RefusedError | None = None
    """The error because of which following the run ended, although the run has not."""

    @classmethod
    def of(cls, run: run_pb2.Run) -> Self:
        """Return the progress of a run before its first event, with the limits from its config."""
        try:
            orchestrator = json.loads(run.config_json or "{}").get("orchestrator", {})
        except ValueError:  # a newer server may send another form; the bounds are only decoration
            orchestrator = {}
        bound = orchestrator.get("max_off_policy_steps")
        return cls(
            name=run.name,
            uid=run.uid,
            has_versions=run.kind != run_pb2.RUN_KIND_EVAL,
            max_steps=run.progress.max_steps,
            staleness_bound=bound,
        )

    def short(self, text: str) -> str:
        """Return the text with ids of processes replaced by short names, numbered per service in order of
        appearance.
        """
        return _WORKER_ID.sub(self._name, text)

    def _name(self, found: re.Match[str]) -> str:
        """Return the short name of the process whose id the match is; a new id gets the next number of its service."""
        worker_id, service = found.group(), found.group(1)
        if worker_id not in self.shown_as:
            number = 1 + sum(name.rpartition("-")[0] == service for name in self.shown_as.values())
            self.shown_as[worker_id] = f"{service}-{number}"
        return self.shown_as[worker_id]

    def apply(self, event: event_pb2.Event) -> None:
        """Apply an event. Unknown kinds of events change nothing."""
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
        """Return the number of optimizer steps done."""
        return self.steps[-1].number if self.steps else 0

    @property
    def eta_s(self) -> float | None:
        """Return the seconds until the last step, from the median of recent steps; None if unknown.

        The first step is left out, because it includes the start of the run.
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
        """Return the share of all step time in which the trainer waited; None before the first step."""
        total_s = sum(point.step_s for point in self.steps)
        return sum(point.wait_s for point in self.steps) / total_s if total_s > 0 else None

    @property
    def reward_before(self) -> float | None:
        """Return the held-out reward at the first evaluated step, as the mean over environments.

        None without evaluations.
        """
        return self._eval_mean(min(point.step for point in self.evals)) if self.evals else None

    @property
    def reward_after(self) -> float | None:
        """Return the held-out reward at the last evaluated step; None unless at least two steps were evaluated."""
        steps = {point.step for point in self.evals}
        return self._eval_mean(max(steps)) if len(steps) > 1 else None

    def _add_point(self, done: event_pb2.StepCompleted) -> None:
        """Add the measurements of a step; steps that a resumed trainer repeats are replaced."""
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
        """Add the result of an evaluation."""
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
        """Return the held-out reward at a step, as the mean over environments."""
        # A dict: an evaluation that a resumed run repeats replaces the earlier one.
        return statistics.fmean({p.env: p.reward for p in self.evals if p.step == step}.values())


def write_plot(progress: Progress, path: Path) -> bool:
    """Draw reward, held-out reward, staleness and step time over the steps, as a PNG.

    Return False without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    # Agg draws into files, and needs no display.
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=[2, 1])
    try:
        numbers = [point.number for point in progress.steps]
        top.plot(numbers, [point.reward for point in progress.steps], label="training batch", linewidth=1.2)
        for env in dict.fromkeys(point.env for point in progress.evals):
            points = sorted((p for p in progress.evals if p.env == env), key=lambda p: p.version)
            label = f"held-out {env}"
            top.plot([p.version for p in points], [p.reward for p in points], "o--", label=label, linewidth=1.2)
        top.set_ylabel("mean reward")
        top.set_title(progress.name.removeprefix("runs/"))
        if progress.steps or progress.evals:
            top.legend(loc="best")
        top.grid(alpha=0.3)
        bottom.plot(numbers, [point.staleness_mean for point in progress.steps], label="staleness", linewidth=1.2)
        bottom.set_ylabel("mean staleness (steps)")
        bottom.set_xlabel("step (policy version)")
        bottom.grid(alpha=0.3)
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        seconds = bottom.twinx()
        seconds.plot(numbers, [p.step_s for p in progress.steps], color="tab:gray", label="step time", linewidth=0.8)
        seconds.plot(numbers, [p.wait_s for p in progress.steps], color="tab:red", label="trainer waits", linewidth=0.8)
        seconds.set_ylabel("seconds per step")
        seconds.set_ylim(bottom=0)
        lines = [*bottom.get_lines(), *seconds.get_lines()]
        bottom.legend(lines, [str(line.get_label()) for line in lines], loc="best", fontsize="small")
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    finally:
        # pyplot keeps every figure until it is closed.
        pyplot.close(figure)
    return True


def write_eval_plot(data: dict[str, Any], path: Path) -> bool:
    """Draw the mean reward of each environment over the steps with its standard error, as a PNG.

    `data` are the results of several policies. Return False without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    try:
        for env in dict.fromkeys(name for policy in data["policies"] for name in policy["envs"]):
            points = [(p["step"] or 0, p["envs"][env]) for p in data["policies"] if env in p["envs"]]
            rewards, errors = [e["reward_mean"] for _, e in points], [e["reward_sem"] or 0.0 for _, e in points]
            axes.errorbar([step for step, _ in points], rewards, yerr=errors, fmt="o-", capsize=3, label=env)
        axes.set_xlabel("step (0: the base model)")
        axes.set_ylabel("mean reward ± standard error")
        axes.set_title(data["name"])
        axes.legend(loc="best")
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
    return True
