"""A run of kind EVAL: every environment is played with a fixed model, then the run closes like any other.

    run ──▶ restore ──▶ environments ──▶ begin all ──▶ read the log, take over what is played ──▶ RUNNING
                                                                                                │
            closing header, its archive holds every rollout ◀── STOPPING ◀── play what is missing

Rollouts go through the log like those of training, so who takes the run over plays only what the log does not have. A
run that was reopened begins with what its failed closing header archives: none of that is played or archived again.
"""

import asyncio
import contextlib
from collections.abc import Container, Iterable, Mapping

from millrace.errors import NotFoundError
from millrace.orchestrator.drive.assembly import assemble
from millrace.orchestrator.drive.run_driver import RunDriver, lasting
from millrace.orchestrator.events import RunContext
from millrace.orchestrator.play.evals import Evaluation
from millrace.rollouts.types import Rollout, RolloutStatus
from millrace.runlog.records.revisions import read_rollouts
from millrace.v1 import run_pb2

STEP = 0
"""An evaluation run has no steps; its reports carry this one."""


class EvalRunDriver(RunDriver):
    """Drives one evaluation run under one epoch."""

    PLAYED, WRITTEN = "every environment is evaluated", "every rollout is archived"

    def __init__(self, context: RunContext, *, done_evals: Mapping[tuple[str, int], str]) -> None:
        """`done_evals` are the environments and steps whose evaluation the log holds, with the ids of these."""
        super().__init__(assemble(context, context.record.settings))
        self._done_evals = done_evals
        self._evaluations: list[Evaluation] = []

    async def _play(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]) -> list[Rollout]:
        """Play every environment; there are no rollouts for a trainer to score."""
        parts = self._parts
        await self._unless_stopped(parts.envs.open_all(parts.specs))
        archived = await asyncio.to_thread(self._load_archived)
        self._evaluations = [parts.evals.begin(env, step=STEP, min_version=0) for env in parts.evals.names]
        has_predecessor = self._context.epoch.number > 1
        parts.intake.begin(None, has_predecessor=has_predecessor)
        for rollout in archived:
            parts.intake.take(rollout)
        if has_predecessor:
            await self._take_over()
        background.append(tasks.create_task(lasting(parts.stream.follow)))
        await self._events.state_changed(run_pb2.RUN_STATE_RUNNING, f"environments are ready{parts.envs.chosen()}")
        try:
            for evaluation in self._evaluations:
                report = await self._unless_stopped(parts.evals.finish(evaluation))
                if (evaluation.env, STEP) not in self._done_evals:
                    await self._events.eval_completed(report)
        finally:
            known = set(map(id, archived))
            ended = [rollout for each in self._evaluations for rollout in (*each.good(), *each.failed())]
            parts.book.keep([rollout for rollout in ended if id(rollout) not in known])
        return []

    async def _abandon(self, reason: str) -> None:
        await super()._abandon(reason)
        if not self._parts.intake.has_begun:
            archived = await asyncio.to_thread(self._load_archived)
            self._parts.book.keep(_best(self._parts.intake.noted, besides={_place(rollout) for rollout in archived}))

    def _load_archived(self) -> list[Rollout]:
        """The good rollouts that were archived before the run was reopened (blocking)."""
        found: list[Rollout] = []
        for header in self._superseded:
            with contextlib.suppress(NotFoundError):  # pruned: it is played again
                found += read_rollouts(self._context.log.store, header)
        return [rollout for rollout in found if rollout.status is RolloutStatus.OK]

    def progress(self) -> run_pb2.RunProgress:
        """Rollouts that came back, of how many; the mean reward so far."""
        good = [rollout for each in self._evaluations for rollout in each.good()]
        wanted = sum(each.num_wanted for each in self._evaluations)
        missing = sum(each.num_missing for each in self._evaluations)
        reward = sum(rollout.reward for rollout in good) / len(good) if good else 0.0
        return run_pb2.RunProgress(step=wanted - missing, max_steps=wanted, num_rollouts=len(good), reward=reward)


def _place(rollout: Rollout) -> tuple[str, int, int]:
    """Which rollout of the run it is, whatever the attempt."""
    return rollout.eval_id, rollout.ordinal, rollout.member


def _best(rollouts: Iterable[Rollout], *, besides: Container[tuple[str, int, int]]) -> list[Rollout]:
    """For each place but `besides`, the first good rollout, or the last one where none is good."""
    found: dict[tuple[str, int, int], Rollout] = {}
    for rollout in rollouts:
        known = found.get(_place(rollout))
        if known is None or known.status is not RolloutStatus.OK:
            found[_place(rollout)] = rollout
    return [rollout for place, rollout in found.items() if place not in besides]
