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

from millrace.errors import InvalidStateError
from millrace.orchestrator.play.env_servers import EnvServers
from millrace.orchestrator.play.eval_stats import figures
from millrace.orchestrator.play.failures import describe_error, remedy_of
from millrace.orchestrator.play.play import Arrival, Play, PlayState, load_of
from millrace.orchestrator.play.player import Player
from millrace.orchestrator.play.settings import EvalSettings
from millrace.orchestrator.play.tasks import TaskRef
from millrace.rollouts.types import Rollout
from millrace.runlog.events.run_status import version_names
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
        """Rollouts that are still to come."""
        return sum(len(play.missing) for play in self.plays.values() if play.is_open)

    @property
    def num_wanted(self) -> int:
        """Rollouts that were asked for."""
        return sum(play.group_size for play in self.plays.values())

    def add(self, rollout: Rollout) -> Arrival:
        """Take a rollout of one of its tasks."""
        if rollout.ordinal not in self.plays:
            return Arrival.DUPLICATE
        self.last_answer = time.monotonic()
        self.changed.set()
        return self.plays[rollout.ordinal].add(rollout)

    def good(self) -> list[Rollout]:
        """The OK rollouts in order of (task, member)."""
        return [rollout for play in self.plays.values() for rollout in play.rollouts()]

    def failed(self) -> list[Rollout]:
        """The last failure of every member that did not come back OK."""
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
        """`epoch` is that of the run's driver; `evaluations` are those that take rollouts, by id."""
        self._settings = settings
        self._epoch = epoch
        self._envs = envs
        self._player = player
        self._open = evaluations
        self._num_series = 0

    @property
    def is_playing(self) -> bool:
        """Whether an evaluation is being played, or another environment's of the same `series` follows."""
        return self._num_series > 0 or bool(self._open)

    @contextmanager
    def series(self) -> Iterator[None]:
        """In this block evaluations follow one another."""
        self._num_series += 1
        try:
            yield
        finally:
            self._num_series -= 1

    @property
    def names(self) -> list[str]:
        """Names of the environments that are evaluated."""
        return [] if self._settings is None else [env.name for env in self._settings.envs]

    @property
    def interval(self) -> int:
        """Steps after which some environment may be due."""
        return math.gcd(*(env.interval for env in self.settings.envs))

    def may_be_due(self, version: int, *, before: int | None) -> bool:
        """Whether a version is one that some environment is evaluated at during training, `before` the last step."""
        is_last = before is not None and version >= before
        return self._settings is not None and version % self.interval == 0 and not is_last

    def due(self, step: int, *, last: Mapping[str, int]) -> dict[str, list[int]]:
        """The environments to evaluate with the policy of a step, each with the steps that were skipped before it.

        `last` is the newest step that each was evaluated at, 0 if left out. A step may have passed while others were
        evaluated, or while nobody drove the run; it is made up for at the next one.
        """
        found: dict[str, list[int]] = {}
        for env in () if self._settings is None else self._settings.envs:
            first = last.get(env.name, 0) // env.interval * env.interval + env.interval
            if first <= step:
                found[env.name] = list(range(first, step, env.interval))
        return found

    @property
    def settings(self) -> EvalSettings:
        """What is evaluated; there must be something."""
        assert self._settings is not None, "evaluation is off"
        return self._settings

    def load(self) -> Counter[str]:
        """Rollouts of evaluations that are being played, by replica."""
        return load_of(play for current in self._open.values() for play in current.plays.values())

    def begin(
        self, env: str, *, step: int, min_version: int, is_pinned: bool = False, skipped: Sequence[int] = ()
    ) -> Evaluation:
        """Open an evaluation of `env`: from now on it takes rollouts.

        Its training tasks are played where the settings say so, or where it has no others. A pinned one is played by a
        replica that is held at its version. `skipped` are the versions due before it that are not evaluated.
        """
        settings, opened = self.settings, self._envs.envs[env]
        use_train_tasks = settings.use_train_tasks or opened.num_eval == 0
        num_tasks = opened.num_train if use_train_tasks else opened.num_eval
        counts = next(each for each in settings.envs if each.name == env)
        if counts.num_examples > 0:
            num_tasks = min(num_tasks, counts.num_examples)
        eval_id = f"{env}@{step}" if settings.is_whole_run else f"{env}@{step}-e{self._epoch}"
        plays = replace(settings.plays, eval_id=eval_id, use_train_tasks=use_train_tasks)
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
        """Play `env` on replicas at `min_version` or newer, or on a held one; returns the report and the OK rollouts.

        It lasts as long as answers come; raises InvalidStateError if not one rollout came back OK.
        """
        current = self.begin(env, step=step, min_version=min_version, is_pinned=is_pinned, skipped=skipped)
        try:
            return await self.finish(current), current.good()
        finally:
            del self._open[current.eval_id]

    async def finish(self, current: Evaluation) -> event_pb2.EvalCompleted:
        """Play what is missing of an evaluation and report; raises InvalidStateError as `evaluate` does."""
        current.last_answer = current.began = time.monotonic()
        await self._play(current)
        return self._report(current, seconds=time.monotonic() - current.began)

    async def _play(self, current: Evaluation) -> None:
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
                        current.last_answer = now  # nobody plays: no replica or env-server takes it
                    is_unheld = current.is_pinned and now - unplaced_since > MAX_UNHELD_S
                    if is_unheld or now - current.last_answer > stall_s:
                        logger.warning(
                            "evaluation incomplete", extra={"env": current.env, "missing": current.num_missing}
                        )
                        return

    def _report(self, current: Evaluation, *, seconds: float) -> event_pb2.EvalCompleted:
        good = current.good()
        if not good:
            is_run = self.settings.is_whole_run
            remedies = (remedy_of(rollout, of_evaluation=is_run) for rollout in current.failed())
            raise InvalidStateError(
                f"evaluation of {current.env} at step {current.step}: none of {current.num_wanted} rollouts finished; "
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
            reward_mean=sum(rollout.reward for rollout in good) / current.num_wanted,
            num_rollouts=len(good),
            num_failed=current.num_wanted - len(good),
            metrics=figures(plays, pass_threshold=self.settings.pass_threshold),
            seconds=seconds,
            eval_id=current.eval_id,
            failed_tasks=[_task_id(play) for play in plays if play.missing][:_SHOWN_TASKS],
            skipped=current.skipped,
        )


def _task_id(play: Play) -> str:
    """What the environment calls the task, where a rollout says it; else its index."""
    known = (rollout.task_id for rollout in (*play.failures.values(), *play.members.values()))
    return next(filter(None, known), f"{play.task.task_index}")


def _first_failure(current: Evaluation) -> str:
    for rollout in current.failed():
        return f"{rollout.status}: {describe_error(rollout)}" if rollout.error else str(rollout.status)
    return "no answer within the deadline" if current.plays else "it has no such tasks (`tasks`)"
