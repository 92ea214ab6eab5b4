"""What the orchestrator counts of a run while it drives it: rollouts, groups, batches, staleness, leases.

Series are forgotten ten minutes after a run has ended (`forget`), so that their number stays bounded and the last
scrape still finds them.
"""

import time
from collections.abc import Iterable, Mapping

from prometheus_client import Counter, Gauge, Histogram

from millrace.orchestrator.play.play import Play
from millrace.orchestrator.play.pools import PoolSizes
from millrace.rollouts.types import Rollout
from millrace.runlog.run_status import BatchAge
from millrace.telemetry.metrics import BoundedLabel
from millrace.v1 import run_pb2

ROLLOUTS = Counter(
    "millrace_orchestrator_rollouts_total",
    "Training rollouts that this orchestrator read from the log, duplicates left out.",
    ["run", "env", "status"],
    registry=None,
)
GROUPS = Counter(
    "millrace_orchestrator_groups_resolved_total",
    "Groups that a committed batch resolved: trained, or why they were dropped (stale, surplus, error, ...).",
    ["run", "outcome"],
    registry=None,
)
FILTERED = Counter(
    "millrace_orchestrator_rollouts_filtered_total",
    "Rollouts of committed batches' groups that a filter found, by its type.",
    ["run", "filter"],
    registry=None,
)
BATCHES = Counter(
    "millrace_orchestrator_batches_committed_total", "Batches committed to the log.", ["run"], registry=None
)
TOKENS = Counter("millrace_orchestrator_batch_tokens_total", "Tokens of the committed batches.", ["run"], registry=None)
STALENESS = Histogram(
    "millrace_orchestrator_staleness_steps",
    "Of each trained rollout: the step that trains it minus the oldest policy version among its tokens.",
    ["run"],
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
    registry=None,
)
REWARD = Gauge(
    "millrace_orchestrator_reward",
    "Rewards of an environment's rollouts in the newest batch that has some: mean, std, and group_std, the mean over "
    "groups of the spread within one.",
    ["run", "env", "stat"],
    registry=None,
)
SOLVED = Gauge(
    "millrace_orchestrator_solved_groups_ratio",
    "Of an environment's groups in that batch, those that are solved by all of their rollouts, or by none (0 to 1).",
    ["run", "env", "by"],
    registry=None,
)
TRUNCATED = Gauge(
    "millrace_orchestrator_truncated_rollouts_ratio",
    "Of an environment's rollouts in that batch, those that were cut at a token limit (0 to 1).",
    ["run", "env"],
    registry=None,
)
STOPS = Counter(
    "millrace_orchestrator_rollout_stops_total",
    "Rollouts of the groups that batches were made of, by why they ended; at most 16 reasons, then other.",
    ["run", "env", "reason"],
    registry=None,
)
LEASES = Counter(
    "millrace_orchestrator_leases_acquired_total",
    "Claims of the run by this orchestrator; more than one without a restart is an outage or a rival.",
    ["run"],
    registry=None,
)
GIVEN_UP = Counter(
    "millrace_orchestrator_drives_failed_total",
    "Drives of the run that ended with an error and are tried again: a lost lease, Redis or the store away.",
    ["run"],
    registry=None,
)
RUNS_FAILED = Counter(
    "millrace_orchestrator_runs_failed_total",
    "Runs that ended as FAILED here, by the component that says why: orchestrator, env-server or trainer.",
    ["component"],
    registry=None,
)
DAMAGED = Counter(
    "millrace_orchestrator_entries_damaged_total",
    "Damaged or foreign entries of the log in Redis that were skipped: somebody else writes there.",
    ["run", "stream"],
    registry=None,
)
TASKS = Gauge(
    "millrace_orchestrator_tasks",
    "Training tasks by pool (easy, normal, hard) after the newest batch; only where `orchestrator.buffer` has a "
    "threshold.",
    ["run", "pool"],
    registry=None,
)
_OF_BATCH = (REWARD, SOLVED, TRUNCATED, STOPS)
_OF_RUN = (ROLLOUTS, GROUPS, FILTERED, BATCHES, TOKENS, STALENESS, *_OF_BATCH, LEASES, GIVEN_UP, DAMAGED, TASKS)
COUNTED = (*_OF_RUN, RUNS_FAILED)

_COMPONENTS = ("orchestrator", "env-server", "trainer")
for _component in _COMPONENTS:
    RUNS_FAILED.labels(_component)  # 0 from the beginning: `increase` sees the first one

_env_label = BoundedLabel()
_reason_label = BoundedLabel(16)
_runs: set[str] = set()


class RunMeters:
    """The counters of one run, and when it last got ahead."""

    def __init__(self, run: str) -> None:
        """Make the counters of the run named `run`, at 0."""
        self.run = run
        self._batches = BatchAge()
        seen(run)

    @property
    def seconds_since_batch(self) -> float | None:
        """Return the seconds since the last commit, or since play began; None while no batch is due."""
        return None if self._batches.moved is None else max(0.0, time.monotonic() - self._batches.moved)

    def resume(self, moved: float | None) -> None:
        """Set when the run's last batch was committed, or it began to play: `moved`, in seconds since the epoch.

        None changes nothing.
        """
        if moved is not None:
            self._batches.committed(time.monotonic() - seconds_since(moved))

    def state_changed(self, state: run_pb2.RunState, *, failed_in: str = "") -> None:
        """Note the run's new state, and count a run that fails by component.

        In some states no batch is due, and the time since the last one is not exported. `failed_in` is the component
        whose error the run fails with; an unknown one counts as the orchestrator.
        """
        self._batches.state_changed(state, time.monotonic())
        if state == run_pb2.RUN_STATE_FAILED:
            RUNS_FAILED.labels(failed_in if failed_in in _COMPONENTS else "orchestrator").inc()

    def rollout(self, rollout: Rollout) -> None:
        """Count a rollout that was accepted into its group, by environment and status."""
        ROLLOUTS.labels(self.run, _env_label(rollout.env), rollout.status.value).inc()

    def batch_committed(
        self, *, num_trained: int, dropped: Mapping[str, int], filtered: Mapping[str, int], num_tokens: int
    ) -> None:
        """Count a committed batch: its groups by outcome, its tokens, and filtered rollouts by filter.

        `dropped` has the number of dropped groups by reason.
        """
        for name, count in filtered.items():
            FILTERED.labels(self.run, name).inc(count)
        self._batches.committed(time.monotonic())
        BATCHES.labels(self.run).inc()
        TOKENS.labels(self.run).inc(num_tokens)
        GROUPS.labels(self.run, "trained").inc(num_trained)
        for reason, count in dropped.items():
            GROUPS.labels(self.run, reason).inc(count)

    def tasks(self, pools: PoolSizes) -> None:
        """Set the number of tasks in each pool, as it is after the newest batch."""
        for pool, count in (("easy", pools.easy), ("normal", pools.normal), ("hard", pools.hard)):
            TASKS.labels(self.run, pool).set(count)

    def trained(self, plays: Iterable[Play], *, step: int, metrics: Mapping[str, float]) -> None:
        """Count why the rollouts of a trained batch ended and how stale they are; set the gauges of its environments.

        `plays` are the batch's groups, `step` is the batch's number, and `metrics` are those of the batch
        (`batch_metrics`), which have the rewards and shares of each environment.
        """
        ages, envs = STALENESS.labels(self.run), set[str]()
        for play in plays:
            envs.add(play.task.env)
            for rollout in play.rollouts():
                reason = _reason_label(rollout.stop_condition or "unknown")
                STOPS.labels(self.run, _env_label(rollout.env), reason).inc()
                if rollout.min_version is not None:
                    ages.observe(step - rollout.min_version)
        for env in envs:
            label = _env_label(env)
            for stat in ("mean", "std", "group_std"):
                REWARD.labels(self.run, label, stat).set(metrics[f"reward/{env}/{stat}"])
            for by in ("all", "none"):
                SOLVED.labels(self.run, label, by).set(metrics[f"solve_{by}/{env}"])
            TRUNCATED.labels(self.run, label).set(metrics[f"is_truncated/{env}/mean"])


def seconds_since(moment: float) -> float:
    """Return the seconds since `moment`, in seconds since the epoch.

    0 for a time of another machine that is in the future.
    """
    return max(0.0, time.time() - moment)


def seen(run: str) -> None:
    """Create the series of the run that alerts watch, at 0, so that `increase` misses nothing that happens later."""
    if run in _runs:
        return
    _runs.add(run)
    for metric in (BATCHES, TOKENS, STALENESS, LEASES, GIVEN_UP):
        metric.labels(run)
    for stream in ("rollouts", "events"):
        DAMAGED.labels(run, stream)
    GROUPS.labels(run, "trained")


def lease_acquired(run: str) -> None:
    """Count that this orchestrator acquired the lease of the run with this name."""
    seen(run)
    LEASES.labels(run).inc()


def drive_failed(run: str) -> None:
    """Count a drive of the run that failed or could not begin."""
    seen(run)
    GIVEN_UP.labels(run).inc()


def entries_damaged(run: str, stream: str, count: int) -> None:
    """Count entries of a stream of the run's log that were skipped because they are damaged."""
    seen(run)
    DAMAGED.labels(run, stream).inc(count)


def forget(run: str) -> None:
    """Remove all series of the run with this name, which ended long ago."""
    if run in _runs:
        _runs.discard(run)
        for metric in _OF_RUN:
            metric.remove_by_labels({"run": run})
