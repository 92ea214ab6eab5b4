"""What the events of a run's log say of it: the one fold over them, of the server and of its clients.

Nothing here is stored: every process computes the same status from the same events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from google.protobuf.timestamp_pb2 import Timestamp

from millrace.decoding import MAX_INTEGER
from millrace.runlog.usage import AcceleratorUsage
from millrace.v1 import event_pb2, run_pb2

GONE_BEHIND = 8
"""A replica whose version is older than the newest one by more than this is gone, or replaced under another id."""
MAX_ENVIRONMENTS = 1000
"""Environments that are kept of one run, whatever its events name."""
TERMINAL = frozenset({run_pb2.RUN_STATE_SUCCEEDED, run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_CANCELLED})
WORKING = frozenset({run_pb2.RUN_STATE_STARTING, run_pb2.RUN_STATE_RUNNING, run_pb2.RUN_STATE_STOPPING})
"""States in which a run has workers."""
_SHOWN_VERSIONS = 10


def is_terminal(state: run_pb2.RunState) -> bool:
    """Return whether a run in this state has ended; only one that FAILED can be reopened."""
    return state in TERMINAL


def resumed_words(body: event_pb2.TrainingResumed) -> str:
    """Describe for people how training began again: after which step, which steps are trained again, and why."""
    begins = f"after step {body.step} ({body.start})" if body.step else f"from {body.start}"
    again = ""
    if body.published == body.step + 1:
        again = f", step {body.published} is trained again"
    elif body.published > body.step:
        again = f", steps {body.step + 1} to {body.published} are trained again"
    keep = " (`ckpt.interval` keeps checkpoints to go on from)" if again and not body.step else ""
    return f"training goes on {begins}{again}{keep}: {body.reason}"


def version_names(steps: Sequence[int]) -> str:
    """Return the first ten of these versions as text, such as `v1, v2`, and how many there are if there are more."""
    shown = ", ".join(f"v{step}" for step in steps[:_SHOWN_VERSIONS])
    return f"{shown}, … ({len(steps)} in all)" if len(steps) > _SHOWN_VERSIONS else shown


def state_name(state: run_pb2.RunState) -> str:
    """Return the short name of a state, such as RUNNING for RUN_STATE_RUNNING."""
    return run_pb2.RunState.Name(state).removeprefix("RUN_STATE_")


def ended_words(name: str, status: "RunStatus") -> str:
    """Return a sentence that says in which state the run `name` has ended, and of one that failed the error and its
    remedy.
    """
    words = f"run {name} has ended as {state_name(status.state)}"
    if (error := status.error) is not None:
        words += f": {error.message} [{error.reason}]" + (f"; {error.remedy}" if error.remedy else "")
    return words


class BatchAge:
    """When a run last got ahead: its last batch, or the time from which it could make one; on any clock, in seconds.

    A run that is driven anew (STARTING) makes no progress meanwhile, so its next driver keeps the old time, else an
    orchestrator that ends again and again would hide that nothing is committed.
    """

    def __init__(self) -> None:
        self.moved: float | None = None
        """None while no batch is due."""
        self._is_due = True

    def state_changed(self, state: run_pb2.RunState, at: float) -> None:
        """Note that the run entered a state at `at` (seconds, on the clock of all calls).

        RUNNING begins the wait for a batch if one is due, STARTING changes nothing, and any other state ends it.
        """
        if state == run_pb2.RUN_STATE_RUNNING:
            if self.moved is None and self._is_due:
                self.moved = at
        elif state != run_pb2.RUN_STATE_STARTING:
            self.moved = None  # paused, queued or at its end

    def committed(self, at: float, *, is_last: bool = False) -> None:
        """Begin the wait anew at `at` because a batch is in the log; after the last one (`is_last`) no batch is due."""
        self._is_due = not is_last
        self.moved = None if is_last else at


# How old the rollouts of each environment were when they were trained on, and how many groups came too late.

MUCH = 0.25
"""Share of an environment's last groups dropped as stale from which people are informed."""
_MOST = 1000  # environments of one run, whatever its events name


@dataclass(slots=True, kw_only=True)
class Staleness:
    """Of one environment."""

    mean: float | None = None
    """Steps between the policy that sampled a token and the step that trained on it, in the newest step."""
    largest: float | None = None
    """The largest of any step."""
    num_stale: int = 0
    """Groups dropped as stale."""
    share: float | None = None
    """Of its last groups, those dropped as stale, 0 to 1."""
    slow_share: float | None = None
    """The same of the slowest quarter of them."""

    @property
    def is_much(self) -> bool:
        """Return whether so many of the last groups were dropped as stale (`MUCH`) that people are informed."""
        return self.share is not None and self.share >= MUCH

    @property
    def lost(self) -> str:
        """Return in words how many groups were dropped as stale, such as `12 groups dropped as stale (31% of its last
        ones, …)`.

        Empty without any.
        """
        if not self.num_stale:
            return ""
        shares = [(self.share, "of its last ones"), (self.slow_share, "of the slowest quarter")]
        known = ", ".join(f"{share:.0%} {whose}" for share, whose in shares if share is not None)
        groups = "group" if self.num_stale == 1 else "groups"
        return f"{self.num_stale} {groups} dropped as stale" + (f" ({known})" if known else "")

    @property
    def words(self) -> str:
        """Return the staleness in words, such as `0.8 steps, at most 2; 12 groups dropped …`.

        Empty if nothing is known.
        """
        age = "" if self.mean is None else f"{self.mean:.1f} steps"
        age += f", at most {self.largest:.0f}" if age and self.largest is not None else ""
        return "; ".join(part for part in (age, self.lost) if part)


def note_batch(known: dict[str, Staleness], metrics: Mapping[str, float]) -> None:
    """Add a batch's stale groups to `known`, by environment, and set the shares of stale groups.

    `metrics` are those of its event, such as `batch/dropped/stale/ENV`; others are ignored.
    """
    for name, value in metrics.items():
        if env := _between(name, "batch/dropped/stale/"):
            _of(known, env).num_stale += round(value)
        elif env := _between(name, "stale_share/", "/mean"):
            _of(known, env).share = value
        elif env := _between(name, "stale_share/", "/slowest_quarter"):
            _of(known, env).slow_share = value


def note_step(known: dict[str, Staleness], metrics: Mapping[str, float]) -> None:
    """Set in `known`, by environment, how old the tokens of a step were: the mean, and the largest so far.

    `metrics` are those of its event, such as `staleness/ENV/mean`; others are ignored.
    """
    for name, value in metrics.items():
        if env := _between(name, "staleness/", "/mean"):
            _of(known, env).mean = value
        elif env := _between(name, "staleness/", "/max"):
            found = _of(known, env)
            found.largest = value if found.largest is None else max(found.largest, value)


def _of(known: dict[str, Staleness], env: str) -> Staleness:
    """Return the status of an environment in `known`, added if it is new; beyond `_MOST` one that nobody keeps."""
    return known.setdefault(env, Staleness()) if env in known or len(known) < _MOST else Staleness()


def _between(name: str, begin: str, end: str = "") -> str:
    """Return what is between `begin` and `end` in a metric's name, an environment.

    Empty if the name is another metric's.
    """
    is_it = name.startswith(begin) and name.endswith(end) and len(name) > len(begin) + len(end)
    return name[len(begin) : len(name) - len(end)] if is_it else ""


@dataclass(slots=True, kw_only=True)
class RunStatus:
    """The status of one run. `apply` takes the events in, in the order of their cursors."""

    max_steps: int = 0
    """0 is unlimited."""
    state: run_pb2.RunState = run_pb2.RUN_STATE_QUEUED
    error: run_pb2.RunError | None = None
    start_time: Timestamp | None = None
    end_time: Timestamp | None = None
    entered: dict[run_pb2.RunState, float] = field(default_factory=dict)
    """When each state was entered first, on the writers' clocks (seconds since the epoch)."""
    num_steps: int = 0
    """Optimizer steps taken. It never goes back: a trainer that resumed reports steps again."""
    num_rollouts: int = 0
    num_tokens: int = 0
    reward: float = 0.0
    """Of the newest step."""
    committed: int = 0
    """Batches committed."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Ordinals dropped, by reason."""
    num_trained_groups: int = 0
    """Ordinals trained."""
    tasks: tuple[int, int, int] = (0, 0, 0)
    """Easy, normal and hard training tasks; all 0 where none can move."""
    policy_version: int = 0
    """Newest published version."""
    served: dict[str, int] = field(default_factory=dict)
    """Version by replica."""
    done_evals: dict[tuple[str, int], str] = field(default_factory=dict)
    """By environment and step of every evaluation that is finished, what its rollouts are marked with."""
    environments: dict[str, run_pb2.EnvRollouts] = field(default_factory=dict)
    """Environments of which rollouts failed, by name."""
    staleness: dict[str, Staleness] = field(default_factory=dict)
    """By environment."""
    batches: BatchAge = field(default_factory=BatchAge)
    """On the clocks of the events' writers."""
    usage: AcceleratorUsage = field(default_factory=AcceleratorUsage)
    """Of accelerators, as far as the log says which the run had."""
    resumed: event_pb2.TrainingResumed | None = None
    """How training began again, until it is as far as it was before."""
    last_time: float = 0.0
    """Of the newest event, on its writer's clock (seconds since the epoch)."""
    spoke_at: dict[str, float] = field(default_factory=dict)
    """When each writer wrote its newest event, on its own clock."""
    queued_at: float = 0.0
    """When it was queued last by an event, 0 if never: a run begins QUEUED without one."""
    claimed_at: float = 0.0
    """When it got workers last after it was QUEUED; 0 if never."""
    is_preempted: bool = False
    """It is QUEUED because it paused for another run."""
    is_reopened: bool = False
    """It had FAILED, and `run resume` reopened it; the event that says so is still to be written."""
    _state_before_end: run_pb2.RunState = run_pb2.RUN_STATE_QUEUED

    @classmethod
    def begin(cls, run: run_pb2.Run) -> Self:
        """Return the status of a run before its first event: a fork has taken the steps of its parent."""
        progress = run.progress
        return cls(max_steps=progress.max_steps, num_steps=progress.step, policy_version=progress.policy_version)

    @property
    def inference_version(self) -> int | None:
        """Return the oldest version that a replica serves; None if none has reported one."""
        return min(self.served.values()) if self.served else None

    def fill(self, run: run_pb2.Run) -> None:
        """Write the status into the public message of the run: state, times, error and progress."""
        run.state = self.state
        for name in ("start_time", "end_time", "error"):
            value = getattr(self, name)
            if value is None:
                run.ClearField(name)
            else:
                getattr(run, name).CopyFrom(value)
        progress = run.progress
        progress.step, progress.policy_version = self.num_steps, self.policy_version
        progress.num_rollouts, progress.num_tokens = self.num_rollouts, self.num_tokens
        progress.reward = self.reward
        easy, normal, hard = map(_counted, self.tasks)
        progress.num_easy_tasks, progress.num_normal_tasks, progress.num_hard_tasks = easy, normal, hard
        dropped = _counted(sum(self.dropped.values()))
        progress.num_groups_dropped, progress.num_groups = dropped, _counted(dropped + self.num_trained_groups)
        progress.min_inference_version = 0 if self.inference_version is None else self.inference_version
        del progress.environments[:]
        progress.environments.extend(self.environments[name] for name in sorted(self.environments))

    def reopen(self) -> None:
        """Note that the failed run was reopened: it is QUEUED without an end until the next event sets its state."""
        self.is_reopened = True
        self._leave_end(run_pb2.RUN_STATE_QUEUED)

    def retract_end(self) -> None:
        """Set the state that the run had before its end, because no closing header confirms that end."""
        self._leave_end(self._state_before_end)

    def apply(self, event: event_pb2.Event) -> None:
        """Update the status by one event; events come in the order of their cursors.

        Those of an unknown kind change no more than the times.
        """
        self.last_time = self.spoke_at[event.writer] = event.time.ToNanoseconds() / 1e9
        match event.WhichOneof("body"):
            case "state_changed":
                self._change_state(event)
            case "batch_committed":
                batch = event.batch_committed
                self.committed = max(self.committed, batch.step + 1)
                for reason, number in batch.dropped.items():
                    self.dropped[reason] = self.dropped.get(reason, 0) + number
                self.num_trained_groups += batch.num_trained
                note_batch(self.staleness, batch.metrics)
                self.tasks = (batch.num_easy_tasks, batch.num_normal_tasks, batch.num_hard_tasks)
                self.batches.committed(self.last_time, is_last=0 < self.max_steps <= batch.step + 1)
            case "step_completed":
                self._add_step(event.step_completed)
                if self.resumed is not None and event.step_completed.step >= self.resumed.published:
                    self.resumed = None
            case "workers_assigned":
                given = event.workers_assigned
                if self.state in WORKING:
                    held = given.trainer_accelerators + given.replica_accelerators
                    self.usage.change(held, self.last_time, by=event.writer)
            case "training_resumed":
                self.resumed = event_pb2.TrainingResumed()
                self.resumed.CopyFrom(event.training_resumed)
            case "rollouts_failed":
                count = run_pb2.EnvRollouts()
                count.CopyFrom(event.rollouts_failed.environment)
                if count.env in self.environments or len(self.environments) < MAX_ENVIRONMENTS:
                    self.environments[count.env] = count
            case "policy_published":
                self.policy_version = max(self.policy_version, _counted(event.policy_published.version))
            case "eval_completed":
                done = event.eval_completed
                self.done_evals[done.env, done.step] = done.eval_id
            case "policy_served":
                self.served[event.policy_served.replica] = _counted(event.policy_served.version)
                newest = max(self.served.values())
                # No event says that a replica is gone: one that is many versions late is taken for that.
                self.served = {name: at for name, at in self.served.items() if at >= newest - GONE_BEHIND}

    def _add_step(self, step: event_pb2.StepCompleted) -> None:
        """Add the numbers of a completed step, unless it was reported before."""
        # Only the first report of a step counts: a resumed trainer reports steps again.
        if self.num_steps < step.step + 1 <= MAX_INTEGER:
            self.num_steps = step.step + 1
            self.num_rollouts = _counted(self.num_rollouts + step.num_rollouts)
            self.num_tokens = _counted(self.num_tokens + step.num_tokens)
            self.reward = step.reward_mean
            note_step(self.staleness, step.metrics)

    def _change_state(self, event: event_pb2.Event) -> None:
        """Set state, start and end time, error and age by an event `state_changed`."""
        change = event.state_changed
        self.is_reopened = False
        if self.state not in TERMINAL:
            self._state_before_end = self.state
        is_queued = change.new_state == run_pb2.RUN_STATE_QUEUED
        self.is_preempted = is_queued and change.old_state in WORKING
        if is_queued:
            self.queued_at = self.last_time
        elif self.state == run_pb2.RUN_STATE_QUEUED:
            self.claimed_at = self.last_time
        self._leave_end(change.new_state)
        self.entered.setdefault(change.new_state, self.last_time)
        if change.new_state == run_pb2.RUN_STATE_STARTING and self.start_time is None:
            self.start_time = _copy(event.time)
        if change.new_state in TERMINAL:
            self.end_time = _copy(event.time)
        if change.HasField("error"):
            self.error = run_pb2.RunError()
            self.error.CopyFrom(change.error)
        self.batches.state_changed(change.new_state, self.last_time)
        if change.new_state not in WORKING:
            self.usage.change(0, self.last_time, by=event.writer)

    def _leave_end(self, state: run_pb2.RunState) -> None:
        """Set the state; one that is not terminal has neither an end time nor an error."""
        self.state = state
        if state not in TERMINAL:
            self.end_time = self.error = None


def _copy(time: Timestamp) -> Timestamp:
    """Return a copy of a message's time, which does not keep the whole event in memory."""
    return Timestamp(seconds=time.seconds, nanos=time.nanos)


def _counted(number: int) -> int:
    """Return a number of an event, at most `MAX_INTEGER`: a foreign event may name one that was never counted."""
    return min(number, MAX_INTEGER)
