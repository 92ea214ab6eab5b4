"""Which rollouts of a run fail, by environment, and whether it can still learn.

    rollout taken ──note──▶ group in play ──close (its ordinal is resolved)──▶ totals, and the last groups
                                 └──────────── both together: `error`, `report` ────────────┘

It is a fold over the log: a header carries what came of the ordinals that it and earlier ones resolve, and the rollouts
of all others are read again from the stream, so that a successor counts each rollout once. What the infrastructure
lost (an engine, a worker, a restart) says nothing about the environment and is not counted.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.backoff import Backoff
from millrace.decoding import Fields
from millrace.errors import InternalError
from millrace.orchestrator.play.play import Play
from millrace.rollouts.types import OWN_SAMPLING, Rollout, RolloutStatus

BACKOFF = Backoff(0.05, 0.5)
"""First and longest pause before new groups start after groups that came to nothing; it doubles in between. A run
whose rollouts all fail shall end soon, and meanwhile neither flood the log nor keep the workers busy."""
MAX_ERROR_CHARS, MAX_FRAMES_CHARS = 500, 1000
OWN_SAMPLING_REMEDY = "an environment may set temperature, top_p, top_k and min_p of its own, and when a reply ends"
_MAX_ENVIRONMENTS, _MAX_GROUPS = 10_000, 100_000
REMEDIES = {
    RolloutStatus.ENV_ERROR: "fix the environment or its reward function; `millrace env check` plays one task of it",
    RolloutStatus.MODEL_ERROR: "the engine refuses the requests: see orchestrator.sampling, orchestrator.seq_len "
    "and the model's chat template",
    RolloutStatus.TIMEOUT: "raise orchestrator.rollout_timeout_s (or the environment's own limit, where the error "
    "names it), or lower orchestrator.sampling.max_tokens",
    RolloutStatus.PROMPT_TOO_LONG: "raise orchestrator.seq_len, and inference.model.max_model_len where it is set (or "
    "the environment's own limit, where the error names it), or shorten the prompts",
    RolloutStatus.MISSING_TOKENS: "use an engine that returns token ids and log-probs",
    RolloutStatus.WORKER_DIED: "the environment ended its own worker process (memory, a crash, an exit): see the "
    "env-server's log",
    RolloutStatus.QUARANTINED: "its tasks ended their worker process twice: see the env-server's log",
}
_REMEDIES_OF_EVALUATIONS = {
    RolloutStatus.MODEL_ERROR: "the endpoint refuses the requests: see sampling and model.name",
    RolloutStatus.TIMEOUT: "raise rollout_timeout_s (or the environment's own limit, where the error names it), or "
    "lower sampling.max_tokens",
    RolloutStatus.PROMPT_TOO_LONG: "raise the context of the engine that serves the model, or shorten the prompts",
}
"""Where a run is nothing but an evaluation, whose config has other keys."""


class RolloutsFailedError(InternalError):
    """So many rollouts failed that the run cannot learn."""


@dataclass(slots=True, kw_only=True)
class GroupCount:
    """Rollouts of one group, over all of its attempts."""

    env: str
    num_rollouts: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """By status."""
    members: set[int] = field(default_factory=set)
    """Members that came back; not kept once the group is resolved."""

    @property
    def num_failed(self) -> int:
        """Return the number of failed rollouts."""
        return self.failed.total()


@dataclass(slots=True, kw_only=True)
class EnvCount(GroupCount):
    """Rollouts of all groups of one environment."""

    first_error: str = ""
    """The first failure in words."""
    frames: str = ""
    num_recent: int = 0
    num_recent_failed: int = 0
    is_reported_before: bool = False
    """Whether an event has reported the first failure already."""

    @property
    def recent_share(self) -> float:
        """Return the share of failed rollouts in the environment's last groups, 0 to 1."""
        return self.num_recent_failed / self.num_recent if self.num_recent else 0.0

    def add(self, group: GroupCount) -> None:
        """Add a group's numbers of rollouts and of failures to these counts."""
        self.num_rollouts += group.num_rollouts
        self.failed += group.failed

    def explain(self) -> str:
        """Return a sentence on how many rollouts failed, with the first error and the remedy.

        Error and remedy are left out if an event has reported them (`is_reported_before`).
        """
        counts = f"{self.num_failed} of {self.num_rollouts} rollouts of environment {self.env!r} failed"
        if self.is_reported_before:
            return f"{counts} by now ({by_status(self.failed)})"
        return f"{counts} {self.cause}; {self.remedy}"

    @property
    def cause(self) -> str:
        """Return the counts of failed rollouts by status, and the first error, in words."""
        return f"({by_status(self.failed)}); the first: {self.first_error}{_at(self.frames)}"

    @property
    def remedy(self) -> str:
        """Return the remedy for the status of most failed rollouts; empty if none failed."""
        return REMEDIES.get(RolloutStatus(self.failed.most_common(1)[0][0]), "") if self.failed else ""


@dataclass(slots=True, kw_only=True)
class Tally:
    """What came of the ordinals that are resolved: all of them by environment, and the last groups."""

    environments: dict[str, EnvCount] = field(default_factory=dict)
    groups: Sequence[GroupCount] = ()
    reported_counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By environment, the failed and all rollouts in the last event about them."""


@dataclass(slots=True)
class Losses:
    """Rollouts that the infrastructure lost, one after the other, with none between them that came back OK."""

    statuses: Counter[str] = field(default_factory=Counter)
    last_error: str = ""

    def note(self, rollout: Rollout) -> None:
        """Count a rollout that the infrastructure lost: its engine, its worker or its store failed.

        A good rollout sets the count to 0; cancelled ones and failures of the environment change nothing.
        """
        if rollout.status == RolloutStatus.OK:
            self.statuses.clear()
        elif rollout.status != RolloutStatus.CANCELLED and not rollout.is_environment_failure:
            self.statuses[str(rollout.status)] += 1
            self.last_error = describe_error(rollout)[:MAX_ERROR_CHARS]

    def explain(self) -> str:
        """Return a sentence on how many rollouts were lost in a row, with the last error and the remedy."""
        return (
            f"{self.statuses.total()} rollouts in a row were lost to what they run on ({by_status(self.statuses)}); "
            f"the last: {self.last_error}; the run goes on once it works: see the logs of inference and env-server"
        )


class Failures:
    """Counts what is taken, group by group."""

    def __init__(self, *, num_groups: int, group_sizes: Mapping[str, int], max_share: float) -> None:
        """Make empty counts.

        The run fails once `max_share` (0 to 1) of the rollouts of the last `num_groups` groups failed.

        `group_sizes` are the rollouts of a group by environment; 1 for one that it does not name.
        """
        self._num_groups, self._group_sizes, self._max_share = num_groups, group_sizes, max_share
        self._largest_group = max(group_sizes.values(), default=1)
        self._open: dict[int, GroupCount] = {}
        self._closed: deque[GroupCount] = deque(maxlen=num_groups)
        self._totals: dict[str, EnvCount] = {}
        self._reported_counts: dict[str, tuple[int, int]] = {}
        self._losses, self._num_losses_reported = Losses(), 0
        self._num_in_a_row = 0
        self._own_sampling = ""
        # Whether any rollout ever failed: most runs need no look at the last groups at every turn of the loop.
        self._has_failed = False
        self.not_before = 0.0
        """Monotonic time before which no new group shall start."""

    def note(self, rollout: Rollout) -> None:
        """Count a rollout that was accepted into a group, and whether the infrastructure lost it.

        One that the infrastructure lost, or that was cancelled, is not counted in the group. A good one lets new groups
        start at once (`not_before`).
        """
        self._losses.note(rollout)
        is_ok = rollout.status == RolloutStatus.OK
        if is_ok:
            # One good rollout shows that groups can be played: the next ones need not wait.
            self._num_in_a_row, self.not_before = 0, 0.0
        elif not rollout.is_environment_failure:
            return
        if rollout.error is not None and rollout.error.type == OWN_SAMPLING:
            # The first one stays: all later ones say the same.
            self._own_sampling = self._own_sampling or rollout.error.message
        group = self._open.setdefault(rollout.ordinal, GroupCount(env=rollout.env))
        group.num_rollouts += 1
        group.members.add(rollout.member)
        if is_ok:
            return
        group.failed[str(rollout.status)] += 1
        self._has_failed = True
        total = self._total(rollout.env)
        if not total.first_error:
            error = rollout.error
            total.first_error = f"{error.type}: {error.message}"[:MAX_ERROR_CHARS] if error else f"{rollout.status}"
            total.frames = error.frames[:MAX_FRAMES_CHARS] if error else ""

    def resolve(self, play: Play) -> None:
        """Add the counts of a play that is over to the totals, as `close` does for its ordinal."""
        self.close(play.ordinal, has_failed=play.has_failed_members)

    def close(self, ordinal: int, *, has_failed: bool) -> None:
        """Add the counts of an ordinal's group to the totals and to the last groups, because the ordinal is resolved.

        With `has_failed` its members failed, so that nothing of it is trained: new groups then start only after a pause
        (`not_before`), which grows with each such group in a row.
        """
        if has_failed:
            self._num_in_a_row += 1
            self.not_before = time.monotonic() + BACKOFF.after(self._num_in_a_row)
        if group := self._open.pop(ordinal, None):
            # Closed groups are written into headers: without their members they stay small.
            group.members.clear()
            self._total(group.env).add(group)
            self._closed.append(group)

    def environments(self) -> list[EnvCount]:
        """Return the counts of every environment with failed rollouts; groups that are still in play count, too.

        The counts are new objects, which have the numbers of the last groups as well (`num_recent`).
        """
        found: dict[str, EnvCount] = {}
        for env, total in sorted(self._totals.items()):
            found[env] = EnvCount(
                env=env,
                num_rollouts=total.num_rollouts,
                failed=Counter(total.failed),
                first_error=total.first_error,
                frames=total.frames,
            )
        for group in self._open.values():
            if group.env in found:
                found[group.env].add(group)
            else:
                found[group.env] = EnvCount(env=group.env, num_rollouts=group.num_rollouts)
        # Every recent group is in the totals or still open, so that its environment is in `found`.
        for group in self._recent():
            found[group.env].num_recent += group.num_rollouts
            found[group.env].num_recent_failed += group.num_failed
        return [count for count in found.values() if count.num_failed]

    def report(self, *, is_final: bool = False) -> Iterator[EnvCount]:
        """Yield the environments to report now, and note that they were: at the first failing group, then at each
        doubling.

        With `is_final` also those whose counts have changed since their last report. Yields nothing if the run fails
        because an environment sets sampling of its own.
        """
        # An environment that sets sampling of its own ends the run, with an error that says it.
        if not self._has_failed or self._own_sampling:
            return
        failing = {group.env for group in self._recent() if group.num_failed}
        for count in self.environments():
            reported_counts = self._reported_counts.get(count.env)
            now = (count.num_failed, count.num_rollouts)
            is_due = count.num_failed >= 2 * reported_counts[0] if reported_counts else count.env in failing
            if is_due or (is_final and reported_counts != now):
                self._reported_counts[count.env] = now
                count.is_reported_before = reported_counts is not None and not is_final
                yield count

    @property
    def outage(self) -> str:
        """Return a sentence on what the infrastructure lost since the last good rollout.

        Empty if it lost fewer rollouts than the largest group has.
        """
        return self._losses.explain() if self._losses.statuses.total() >= self._largest_group else ""

    def outage_report(self) -> str:
        """Return a sentence on the rollouts lost in a row if it is to be reported now, and note that it was.

        Else an empty text.

        A report is due once as many as the largest group are lost, then whenever their number has doubled.
        """
        count = self._losses.statuses.total()
        # A good rollout came since the last report, and the count began anew.
        if count < self._num_losses_reported:
            self._num_losses_reported = 0
        if count < max(self._largest_group, 2 * self._num_losses_reported):
            return ""
        self._num_losses_reported = count
        return self._losses.explain()

    def error(self) -> RolloutsFailedError | None:
        """Return the error with which the run ends because it cannot learn.

        None while it can, or it is too early to decide.
        """
        # It is a property of the environment, and not of one task: all of its rollouts would fail in this way.
        if self._own_sampling:
            return RolloutsFailedError(
                self._own_sampling,
                reason="ENV_SAMPLING_REFUSED",
                remedy=OWN_SAMPLING_REMEDY,
            )
        recent = self._recent() if self._has_failed else []
        # It is too early: the first groups may fail by chance.
        if len(recent) < self._num_groups:
            return None
        num_rollouts = sum(group.num_rollouts for group in recent)
        num_failed = sum(group.num_failed for group in recent)
        if num_failed < self._max_share * num_rollouts:
            return None
        # The environment that fails most comes first in the message.
        causes = sorted(self.environments(), key=lambda count: -count.num_recent_failed)
        return RolloutsFailedError(
            f"{num_failed} of {num_rollouts} rollouts of the last {len(recent)} groups failed, so the run cannot "
            f"learn: {'. '.join(f'environment {count.env!r} {count.cause}' for count in causes)}",
            reason="ROLLOUTS_FAILED",
            remedy="; ".join(dict.fromkeys(filter(None, (count.remedy for count in causes))))
            + "; orchestrator.max_failed_share and orchestrator.failure_window say how many may fail",
        )

    def describe(self) -> str:
        """Return the failures in words, as in `12 of 4000 rollouts failed (10 env_error, 2 timeout)`.

        Empty without any.
        """
        counts = self.environments()
        if not counts:
            return ""
        failed = sum((count.failed for count in counts), Counter[str]())
        everything = sum(total.num_rollouts for total in self._totals.values())
        everything += sum(group.num_rollouts for group in self._open.values())
        return f"{failed.total()} of {everything} rollouts failed ({by_status(failed)})"

    @property
    def tally(self) -> Tally:
        """Return the counts that a header records: totals, last groups, and what was reported."""
        return Tally(environments=self._totals, groups=self._closed, reported_counts=self._reported_counts)

    def restore(self, tally: Tally, *, is_reopened: bool) -> None:
        """Continue with the counts of a header.

        With `is_reopened`, a run that was reopened or is a fork, the window of last groups and the reports begin empty:
        what failed before may have been corrected.
        """
        self._totals = dict(tally.environments)
        self._has_failed = any(count.num_failed for count in self._totals.values())
        # A window kept would end a reopened run at once, for failures of before.
        self._closed = deque([] if is_reopened else tally.groups, maxlen=self._num_groups)
        self._reported_counts = {} if is_reopened else dict(tally.reported_counts)

    def _total(self, env: str) -> EnvCount:
        """Return the totals of an environment, made if there are none."""
        return self._totals.setdefault(env, EnvCount(env=env))

    def _recent(self) -> list[GroupCount]:
        """Return the last `num_groups` groups that are resolved or whose members all came back at least once."""
        sizes = self._group_sizes
        # A group whose failed members are played again stays open, so that open ones have to count as well.
        answered = [group for group in self._open.values() if len(group.members) >= sizes.get(group.env, 1)]
        return [*self._closed, *answered][-self._num_groups :]


def describe_error(rollout: Rollout) -> str:
    """Return the error of a failed rollout with the last frames of the environment's own code.

    Its status if it has none.
    """
    error = rollout.error
    return f"{error.type}: {error.message}{_at(error.frames)}" if error else str(rollout.status)


def remedy_of(rollout: Rollout, *, of_evaluation: bool) -> str:
    """Return what to do about a failed rollout; `of_evaluation` is for a run that is nothing but an evaluation."""
    if of_evaluation and rollout.status in _REMEDIES_OF_EVALUATIONS:
        return _REMEDIES_OF_EVALUATIONS[rollout.status]
    return REMEDIES.get(rollout.status, "look at the env-server's log")


def _at(frames: str) -> str:
    """Return ` (at innermost ← outer)` for frames in lines, the innermost last; empty if there are none."""
    return f" (at {' ← '.join(reversed(frames.splitlines()))})" if frames else ""


def by_status(failed: Counter[str]) -> str:
    """Return counts by status in words, as in `10 env_error, 2 timeout`, the largest first."""
    return ", ".join(f"{count} {status}" for status, count in failed.most_common())


def encode_tally(tally: Tally) -> dict[str, Any]:
    """Return a tally as plain data for the JSON of a header."""
    return {
        "environments": [
            {
                "env": env,
                "num_rollouts": count.num_rollouts,
                "failed": dict(sorted(count.failed.items())),
                "first_error": count.first_error,
                "frames": count.frames,
            }
            for env, count in sorted(tally.environments.items())
        ],
        "groups": [
            {"env": group.env, "num_rollouts": group.num_rollouts, "failed": dict(sorted(group.failed.items()))}
            for group in tally.groups
        ],
        # The key of the stored format; the attribute has another name.
        "told": [
            {"env": env, "num_failed": num_failed, "num_rollouts": num_rollouts}
            for env, (num_failed, num_rollouts) in sorted(tally.reported_counts.items())
        ],
    }


def decode_tally(fields: Fields | None) -> Tally:
    """Return the tally that `encode_tally` encoded, an empty one for None; ValueError if the data are malformed."""
    if fields is None:
        return Tally()
    environments = {
        item.text("env"): EnvCount(
            env=item.text("env"),
            num_rollouts=item.integer("num_rollouts"),
            failed=_statuses(item.inner("failed")),
            first_error=item.text("first_error"),
            frames=item.text("frames"),
        )
        for item in fields.objects("environments", most=_MAX_ENVIRONMENTS)
    }
    groups = [
        GroupCount(
            env=item.text("env"), num_rollouts=item.integer("num_rollouts"), failed=_statuses(item.inner("failed"))
        )
        for item in fields.objects("groups", most=_MAX_GROUPS)
    ]
    # `environments` looks every recent group's environment up in the totals.
    if missing := {group.env for group in groups} - environments.keys():
        raise ValueError(f"groups of {sorted(missing)[0]!r}, which is no environment of it")
    reported_counts = {
        item.text("env"): (item.integer("num_failed"), item.integer("num_rollouts"))
        for item in (fields.objects("told", most=_MAX_ENVIRONMENTS) if fields.has("told") else ())
    }
    return Tally(environments=environments, groups=groups, reported_counts=reported_counts)


def _statuses(fields: Fields | None) -> Counter[str]:
    """Return counts by status; statuses that are unknown here are left out."""
    if fields is None:
        return Counter()
    return Counter({str(status): fields.integer(status) for status in RolloutStatus if fields.has(status)})
