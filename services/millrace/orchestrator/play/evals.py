"""Evaluation: held-out tasks played with one version of a policy, or with an endpoint that serves a fixed model.

Never trained on. During training an evaluation begins anew after a takeover; a run that is nothing but an evaluation
keeps what the log has of it (`begin` before the stream is read).
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.errors import InvalidStateError
from millrace.orchestrator.play.env_servers import EnvServers
from millrace.orchestrator.play.failures import describe_error, remedy_of
from millrace.orchestrator.play.play import Arrival, Play, PlayState, load_of
from millrace.orchestrator.play.player import Player
from millrace.orchestrator.play.settings import EvalSettings
from millrace.orchestrator.play.tasks import TaskRef
from millrace.rollouts.types import Rollout, reaches
from millrace.runlog.run_status import version_names
from millrace.telemetry import waits
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

STALL_SLACK_S = 60.0
"""Time without an answer, beyond one rollout's deadline, after which an evaluation ends; missing rollouts count as
failed."""
MAX_UNHELD_S = 600.0
"""Time without a replica at the version that is evaluated, while others train on, after which an evaluation ends."""
TICK_S = 0.5
_SHOWN_TASKS = 20
"""Tasks with failed rollouts that a report names."""


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """One evaluation of one environment."""

    eval_id: str
    env: str
    step: int
    min_version: int
    is_pinned: bool
    plays: dict[int, Play]
    """By ordinal, which is the task's index."""
    skipped: Sequence[int] = ()
    """Versions that were due before it and are not evaluated."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = field(default_factory=time.monotonic)
    last_answer: float = field(default_factory=time.monotonic)

    @property
    def num_missing(self) -> int:
        """Return the number of rollouts that are still to come."""
        return sum(len(play.missing) for play in self.plays.values() if play.is_open)

    @property
    def num_planned(self) -> int:
        """Return the number of requested rollouts."""
        return sum(play.group_size for play in self.plays.values())

    def add(self, rollout: Rollout) -> Arrival:
        """Put a rollout into the play of its task and return what that did.

        DUPLICATE if its task is not of this evaluation.
        """
        if rollout.ordinal not in self.plays:
            return Arrival.DUPLICATE
        self.last_answer = time.monotonic()
        self.changed.set()
        return self.plays[rollout.ordinal].add(rollout)

    def good(self) -> list[Rollout]:
        """Return the OK rollouts, in order of task and member."""
        return [rollout for play in self.plays.values() for rollout in play.rollouts()]

    def failed(self) -> list[Rollout]:
        """Return the failed rollouts of each play's last attempt, one of a member, in order of task and member."""
        return [play.failures[member] for play in self.plays.values() for member in sorted(play.failures)]


class Evaluator:
    """Plays evaluations and averages them."""

    def __init__(
        self,
        *,
        settings: EvalSettings | None,
        epoch: int,
        envs: EnvServers,
        player: Player,
        evaluations: dict[str, Evaluation],
    ) -> None:
        """Make an evaluator; `settings` is None if nothing is evaluated.

        `epoch` is the driver's. `evaluations` has by id those that take rollouts: opened ones are put there, finished
        ones taken out.
        """
        self._settings = settings
        self._epoch = epoch
        self._envs = envs
        self._player = player
        self._open = evaluations
        self._num_series = 0

    @property
    def is_playing(self) -> bool:
        """Return whether an evaluation is being played, or the next one of the same `series` is about to begin."""
        return self._num_series > 0 or bool(self._open)

    @contextmanager
    def series(self) -> Iterator[None]:
        """Treat the evaluations in the block as one series: `is_playing` stays True between them."""
        self._num_series += 1
        try:
            yield
        finally:
            self._num_series -= 1

    @property
    def names(self) -> list[str]:
        """Return the names of the environments that are evaluated."""
        return [] if self._settings is None else [env.name for env in self._settings.envs]

    @property
    def interval(self) -> int:
        """Return the greatest common divisor of the environments' intervals, in steps: evaluations are due at its
        multiples.
        """
        return math.gcd(*(env.interval for env in self.settings.envs))

    def may_be_due(self, version: int, *, before: int | None) -> bool:
        """Return whether some environment may be evaluated with a policy version during training.

        That is so for the multiples of `interval`. The version `before`, that of the last step, and later ones are not:
        they are evaluated at the end. None is no limit.
        """
        is_last = before is not None and version >= before
        return self._settings is not None and version % self.interval == 0 and not is_last

    def due(self, step: int, *, last: Mapping[str, int]) -> dict[str, list[int]]:
        """Return the environments to evaluate with the policy of `step`, each with the due steps that it missed before.

        `last` is the newest step that each was evaluated at, 0 if left out. A step is missed while others are
        evaluated, or while no orchestrator drives the run.
        """
        found: dict[str, list[int]] = {}
        for env in () if self._settings is None else self._settings.envs:
            # The first multiple of the interval after the last evaluation; that may have been at no multiple, at a
            # run's end.
            first = last.get(env.name, 0) // env.interval * env.interval + env.interval
            if first <= step:
                found[env.name] = list(range(first, step, env.interval))
        return found

    @property
    def settings(self) -> EvalSettings:
        """Return the settings of evaluations; AssertionError if nothing is evaluated."""
        assert self._settings is not None, "evaluation is off"
        return self._settings

    def load(self) -> Counter[str]:
        """Return the number of rollouts of open evaluations that each replica plays, by its worker id."""
        return load_of(play for current in self._open.values() for play in current.plays.values())

    def begin(
        self, env: str, *, step: int, min_version: int, is_pinned: bool = False, skipped: Sequence[int] = ()
    ) -> Evaluation:
        """Open an evaluation of `env` after `step` and return it, with unplaced plays of all its tasks.

        It takes rollouts now.

        Training tasks are played where the settings say so, or where `env` has no others. `min_version` is the oldest
        policy version that may play it. With `is_pinned` it is played by a replica that is held at its version.
        `skipped` are the versions due before it that are not evaluated.
        """
        settings, opened = self.settings, self._envs.envs[env]
        use_train_tasks = settings.use_train_tasks or opened.num_eval == 0
        num_tasks = opened.num_train if use_train_tasks else opened.num_eval
        counts = next(each for each in settings.envs if each.name == env)
        if counts.num_examples > 0:
            num_tasks = min(num_tasks, counts.num_examples)
        # During training the epoch is part of it: a successor begins anew, and late rollouts of its predecessor do not
        # count.
        eval_id = f"{env}@{step}" if settings.is_whole_run else f"{env}@{step}-e{self._epoch}"
        plays = replace(settings.plays, eval_id=eval_id, use_train_tasks=use_train_tasks, sampling=counts.sampling)
        current = self._open[eval_id] = Evaluation(
            eval_id=eval_id,
            env=env,
            step=step,
            min_version=min_version,
            is_pinned=is_pinned,
            skipped=skipped,
            plays={
                index: Play(
                    task=TaskRef(ordinal=index, env=env, task_index=index),
                    group_size=counts.rollouts_per_example,
                    settings=plays,
                    min_version=min_version,
                    is_pinned=is_pinned,
                    is_scored_whole=opened.requires_group,
                )
                for index in range(num_tasks)
            },
        )
        return current

    async def evaluate(
        self, env: str, *, step: int, min_version: int, is_pinned: bool = False, skipped: Sequence[int] = ()
    ) -> tuple[event_pb2.EvalCompleted, list[Rollout]]:
        """Play an evaluation of `env` to its end, and return its report and the OK rollouts.

        The parameters are those of `begin`.

        It lasts as long as answers come; raises InvalidStateError if not one rollout is good.
        """
        current = self.begin(env, step=step, min_version=min_version, is_pinned=is_pinned, skipped=skipped)
        try:
            return await self.finish(current), current.good()
        finally:
            del self._open[current.eval_id]

    async def finish(self, current: Evaluation) -> event_pb2.EvalCompleted:
        """Play what an open evaluation lacks and return its report.

        Raise InvalidStateError if not one rollout is good.
        """
        # The deadline begins now: its plays may have been opened long before.
        current.last_answer = current.began = time.monotonic()
        await self._play(current)
        return self._report(current, seconds=time.monotonic() - current.began)

    async def _play(self, current: Evaluation) -> None:
        """Place the evaluation's plays and wait until no rollout is missing.

        Returns with rollouts missing if none came for too long, or if no held replica plays it.
        """
        plays = current.plays.values()
        stall_s = self.settings.plays.rollout_timeout_s + STALL_SLACK_S
        unplaced_since = time.monotonic()
        what = f"evaluation of {current.env}"
        if not self.settings.is_whole_run:
            what += f" with policy {current.min_version}"
        if current.skipped:
            what += f" ({version_names(current.skipped)} before it: not evaluated)"
        with waits.waiting(what, waits_on="env-server", deadline_s=stall_s) as wait:
            while current.num_missing:
                # Before placing, so that an answer that arrives meanwhile is not missed.
                current.changed.clear()
                await self._player.place_open(plays)
                wait.update(reason=f"{current.num_missing} rollouts of the {what}")
                try:
                    async with asyncio.timeout(TICK_S):
                        await current.changed.wait()
                except TimeoutError:
                    now = time.monotonic()
                    if any(play.state is PlayState.PLACED for play in plays):
                        unplaced_since = now
                    else:
                        # Nothing is being played, because no replica or env-server takes it: that is no missing answer.
                        current.last_answer = now
                    is_unheld = current.is_pinned and now - unplaced_since > MAX_UNHELD_S
                    if is_unheld or now - current.last_answer > stall_s:
                        logger.warning(
                            "evaluation incomplete", extra={"env": current.env, "missing": current.num_missing}
                        )
                        return

    def _report(self, current: Evaluation, *, seconds: float) -> event_pb2.EvalCompleted:
        """Return the report of an evaluation that took `seconds`.

        Raise InvalidStateError if not one rollout is good.
        """
        good = current.good()
        if not good:
            is_run = self.settings.is_whole_run
            remedies = (remedy_of(rollout, of_evaluation=is_run) for rollout in current.failed())
            raise InvalidStateError(
                f"evaluation of {current.env} at step {current.step}: none of {current.num_planned} rollouts finished; "
                f"first failure: {_first_failure(current)}",
                reason="EVAL_FAILED",
                remedy=next(remedies, "look at the env-server's log"),
            )
        plays = list(current.plays.values())
        return event_pb2.EvalCompleted(
            env=current.env,
            policy_version=min((v for rollout in good if (v := rollout.min_version) is not None), default=0),
            policy_version_max=max((v for rollout in good if (v := rollout.max_version) is not None), default=0),
            step=current.step,
            # A rollout that is missing counts with reward 0.
            reward_mean=sum(rollout.reward for rollout in good) / current.num_planned,
            num_rollouts=len(good),
            num_failed=current.num_planned - len(good),
            metrics=figures(plays, pass_threshold=self.settings.pass_threshold),
            seconds=seconds,
            eval_id=current.eval_id,
            failed_tasks=[_task_id(play) for play in plays if play.missing][:_SHOWN_TASKS],
            skipped=current.skipped,
        )


def _task_id(play: Play) -> str:
    """Return the environment's id of the task if a rollout has one, else the task's index."""
    known = (rollout.task_id for rollout in (*play.failures.values(), *play.members.values()))
    return next(filter(None, known), f"{play.task.task_index}")


def _first_failure(current: Evaluation) -> str:
    """Return an evaluation's first failure in words; without one, why there is no rollout."""
    for rollout in current.failed():
        return f"{rollout.status}: {describe_error(rollout)}" if rollout.error else str(rollout.status)
    return "no answer within the deadline" if current.plays else "it has no such tasks (`tasks`)"


# The figures of an evaluation: reward with its standard error, pass@k, pass^k, the environment's own metrics.

_FIGURES = frozenset({"reward/sem", "truncated", "turns", "seconds"})
_Z95 = 1.959964
"""The normal distribution has 95 % of its mass within so many standard deviations."""


def figures(plays: Sequence[Play], *, pass_threshold: float) -> dict[str, float]:
    """Return all figures of an evaluation but the mean reward, by name.

    A rollout passes with a reward of `pass_threshold` or more.

    All figures are over the same rollouts, those that were asked for: one that failed has reward 0 and does not pass.
    `reward/sem` is the standard error over tasks, because rollouts of one task are not independent. pass@k and pass^k
    (k = 1, 2, 4, ... up to the rollouts of a task) are the unbiased estimates of "at least one of k passes" and "all of
    k pass" (Chen et al., 2021, https://arxiv.org/abs/2107.03374, equation 1). `pass@k/low` and `pass@k/high` are the
    bounds of the 95 % confidence interval of pass@k. What only a finished rollout has (turns, seconds, whether it was
    truncated, the environment's own metrics) is a mean over the finished ones. An environment's metric that has the
    name of such a figure is returned as `env/<name>`.
    """
    found: dict[str, float] = {}
    played = [[rollout.reward for rollout in play.rollouts()] for play in plays]
    # By the size of the group and not the number of answers: a missing rollout has reward 0.
    means = [sum(rewards) / play.group_size for rewards, play in zip(played, plays, strict=True)]
    if len(means) > 1:
        found["reward/sem"] = float(np.std(means, ddof=1) / math.sqrt(len(means)))
    counts = [
        (play.group_size, sum(reaches(reward, pass_threshold) for reward in rewards))
        for rewards, play in zip(played, plays, strict=True)
    ]
    k = 1
    while k <= max((size for size, _ in counts), default=0):
        usable = [(size, passed) for size, passed in counts if size >= k]
        chances = [pass_at_k(size, passed, k) for size, passed in usable]
        found[f"pass@{k}"] = float(np.mean(chances))
        # A task of n rollouts has n // k independent draws of k.
        low, high = confidence(chances, num_draws=sum(size // k for size, _ in usable))
        found[f"pass@{k}/low"], found[f"pass@{k}/high"] = low, high
        found[f"pass^{k}"] = float(np.mean([math.comb(passed, k) / math.comb(size, k) for size, passed in usable]))
        k *= 2
    good = [rollout for play in plays for rollout in play.members.values()]
    if good:
        found["truncated"] = float(np.mean([rollout.is_truncated for rollout in good]))
        found["turns"] = float(np.mean([rollout.num_turns for rollout in good]))
        found["seconds"] = float(np.mean([rollout.seconds for rollout in good]))
    own = {f"env/{name}" if _is_ours(name) else name: value for name, value in env_metrics(good).items()}
    return {**own, **found}


def _is_ours(name: str) -> bool:
    """Return whether a name is that of a figure of evaluations, which an environment's metric must not take."""
    return name in _FIGURES or name.startswith(("pass@", "pass^"))


def pass_at_k(size: int, passed: int, k: int) -> float:
    """Return the chance that at least one of k rollouts passes, drawn without replacement of `size`, of which
    `passed` pass.
    """
    return 1.0 - math.comb(size - passed, k) / math.comb(size, k)


def confidence(chances: Sequence[float], *, num_draws: int) -> tuple[float, float]:
    """Return the bounds of the 95 % confidence interval (Wilson's) of the mean of a chance over tasks.

    `chances` has one chance (0 to 1) for each task. The number of trials is what the spread over tasks amounts to: at
    least one a task, and at most `num_draws`, the independent draws of all tasks, because equal tasks have no spread at
    all.
    """
    mean, trials = float(np.mean(chances)), float(len(chances))
    if len(chances) > 1:
        spread = float(np.var(chances, ddof=1)) / len(chances)
        # As many independent trials as would give the mean this variance: p (1 - p) / n = spread.
        trials = max(trials, min(float(num_draws), mean * (1 - mean) / spread if spread > 0 else float(num_draws)))
    # E. B. Wilson, 1927: (p + z²/2n ± z √(p (1 - p)/n + z²/4n²)) / (1 + z²/n).
    shrink = 1 + _Z95**2 / trials
    middle = (mean + _Z95**2 / (2 * trials)) / shrink
    half = _Z95 * math.sqrt(mean * (1 - mean) / trials + _Z95**2 / (4 * trials**2)) / shrink
    return max(0.0, middle - half), min(1.0, middle + half)


def env_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each metric of the environment over the rollouts that have it, by name."""
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    return {name: float(np.mean([r.metrics[name] for r in rollouts if name in r.metrics])) for name in names}
