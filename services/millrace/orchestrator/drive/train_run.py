"""Runs that train, with evaluations before, during and after, and runs that only evaluate.

    restore ──▶ environments, policy ──▶ take over ──▶ RUNNING ──▶ loop ──▶ last version served ──▶ last evaluation
                                                          └──▶ evaluations at an interval of versions
An evaluation that the log has is not done again.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from millrace.algorithms import make_algorithms
from millrace.errors import InvalidStateError, NotFoundError
from millrace.orchestrator.drive.assembly import assemble, make_loop, task_sources
from millrace.orchestrator.drive.loop import RolloutLoop
from millrace.orchestrator.drive.run_driver import RunDriver, RunStoppedError, lasting
from millrace.orchestrator.events import RunContext
from millrace.orchestrator.play.evals import MAX_UNHELD_S, Evaluation
from millrace.orchestrator.play.tasks import Sampler
from millrace.race import in_own_thread
from millrace.rollouts.types import Rollout, RolloutStatus
from millrace.runlog.records.revisions import read_rollouts
from millrace.runlog.run_status import version_names
from millrace.telemetry import waits
from millrace.v1 import run_pb2

SERVED_POLL_S = 0.05
POLICY_OVERDUE_S = 600.0
"""Age from which the wait for a policy is overdue: the trainer may be loading a large model."""


class TrainRunDriver(RunDriver):
    """Drives one training run under one epoch."""

    PLAYED, WRITTEN = "every step is done", "the trainer has written everything"

    def __init__(self, context: RunContext, *, done_evals: Mapping[tuple[str, int], str]) -> None:
        """Make the driver of a training run.

        `done_evals` has, by environment and step, the ids of the evaluations in the log.
        """
        config = context.record.training
        super().__init__(assemble(context, config, reported_evals=frozenset(done_evals.values())))
        self._config = config
        self._done_evals = done_evals
        self._skipped: Mapping[str, Sequence[int]] = {}
        """Versions due before the last one that are not evaluated, by environment."""

    async def _play(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]) -> list[Rollout]:
        """Evaluate the first policy, train to the last step or a stop, and return the rollouts of the final evaluation.

        Long-lived work is appended to `background`. Raises RunStoppedError when the run shall pause or end.
        """
        loop = await self._unless_stopped(self._start())
        has_predecessor = self._context.epoch.number > 1
        self._parts.intake.begin(loop.make_play, has_predecessor=has_predecessor, draw=loop.draw)
        await self._take_over()
        background.append(tasks.create_task(lasting(self._parts.stream.follow)))
        await self._events.state_changed(
            run_pb2.RUN_STATE_RUNNING, f"workers, environments and policy are ready{self._parts.envs.chosen()}"
        )
        settings = self._config.orchestrator.eval
        if settings is not None and self._parts.book.step == 0 and not settings.skip_first_step:
            await self._unless_stopped(self._evaluate(0, done=self._done_evals))
        # Beside the loop, because no step waits for an evaluation.
        periodic = tasks.create_task(self._evaluate_periodically())
        background.append(periodic)
        await loop.run()
        if self._asked_to_stop.is_set():
            if not self._cancelled.is_set():
                # A pause lets open groups finish; a cancellation ends that.
                await self._unless(self._cancelled, loop.drain())
            raise RunStoppedError
        # The last batch is trained into the version that the final evaluation is of.
        await self._unless_stopped(self._wait_served(self._parts.book.step))
        with waits.waiting("the evaluations of earlier versions", waits_on="env-server", deadline_s=0.0):
            await self._unless_stopped(asyncio.wait((periodic,)))
        return await self._unless_stopped(self._evaluate(self._parts.book.step, skipped=self._skipped))

    async def _start(self) -> RolloutLoop:
        """Open the environments, wait until the first policy is served, and return the loop.

        Imports the user's functions, and tries a sampler of the user's out. Writes a warning for each evaluated
        environment that has no held-out tasks.
        """
        envs, settings, code = self._parts.envs, self._config.orchestrator, self._parts.context.custom_code
        # In threads of their own: they may import modules of the user's. Bounded by nothing but their imports, which
        # submission saw.
        algorithms = await in_own_thread(partial(make_algorithms, settings, code))
        sampler = await in_own_thread(partial(Sampler.load, settings.buffer, code, seed=settings.seed))
        async with asyncio.TaskGroup() as tasks:
            # Side by side: both take long, and neither needs the other.
            tasks.create_task(envs.open_all(self._parts.specs))
            tasks.create_task(self._wait_served(0))
        for name in self._parts.evals.names:
            if envs.envs[name].num_eval == 0:
                await self._events.warning(
                    "EVAL_ON_TRAINING_TASKS",
                    f"environment {name!r} has no held-out tasks: it is evaluated on its training tasks",
                )
        if sampler is not None:
            await sampler.try_out(task_sources(self._parts, self._config))
        return make_loop(
            self._parts,
            self._config,
            algorithms=algorithms,
            sampler=sampler,
            is_stopping=self._asked_to_stop.is_set,
        )

    async def _evaluate_periodically(self) -> None:
        """Evaluate during training whenever a version that is a multiple of the interval is served.

        The version of the last step is left to the end of the run.
        """
        evals, policies, settings = self._parts.evals, self._parts.policies, self._config.orchestrator.eval
        if settings is None:
            return
        interval, is_pinned = evals.interval, settings.pin == "hold"
        # Counted as evaluated just before its first step, so that a fork is evaluated there if that step is due.
        last = dict.fromkeys(evals.names, max(self._base_step - 1, 0))
        for env, done in self._done_evals:
            last[env] = max(done, last.get(env, 0))
        # The first multiple of the interval at which some environment was not evaluated.
        step = min(last.values()) // interval * interval + interval
        # Why the first versions may be skipped; later ones are skipped because of an evaluation.
        cause = "the run was taken over"
        while step < self._parts.max_steps:
            if not evals.due(step, last=last):
                step += interval
                continue
            try:
                step = await self._wait_due(step, is_pinned=is_pinned)
                due = evals.due(step, last=last)
                await self._report_skipped(due, cause=f"{cause} until policy {step} was due")
                cause = "an evaluation before them lasted"
                await self._evaluate(step, list(due), done=self._done_evals, is_pinned=is_pinned, skipped=due)
            except InvalidStateError as error:
                await self._events.warning(error.reason, str(error))
            finally:
                # After an error, too: the replica must not stay at an old version.
                policies.release()
            last |= dict.fromkeys(evals.due(step, last=last), step)
            # A version that was published meanwhile can be held still; without holding, the next one is waited for.
            following = self._parts.book.step // interval * interval + interval
            newest = following if not is_pinned else policies.newest_due
            step = step + interval if newest is None else max(step + interval, newest)
        # `max_steps` is finite here: the loop has ended.
        self._skipped = evals.due(int(self._parts.max_steps), last=last)
        await self._report_skipped(self._skipped, cause=f"{cause} until the last step was done")

    async def _wait_due(self, step: int, *, is_pinned: bool) -> int:
        """Wait until the version of `step`, or a later one that is due by then, can be evaluated; return its step.

        With `is_pinned` that is when a replica is held at it; it raises InvalidStateError if no replica takes it
        although it is published. Else it is when the version is served.
        """
        policies = self._parts.policies
        if not is_pinned:
            await self._wait_served(step, overdue_s=0.0)  # nothing waits for it
            return step
        policies.hold(step)
        # Until the version is published the trainer is waited for; from then on a replica that takes it, within a
        # bound.
        published = math.inf
        with waits.waiting(f"policy {step} to be evaluated", waits_on="trainer", deadline_s=0.0) as wait:
            while (held := policies.held_version) is None:
                if policies.newest_due is not None and policies.newest_due >= step:
                    published = min(published, time.monotonic())
                    wait.update(waits_on="inference")
                if time.monotonic() - published > MAX_UNHELD_S:
                    raise InvalidStateError(
                        f"policy {step} is not evaluated: no replica has taken it within {MAX_UNHELD_S:g} s",
                        reason="EVAL_FAILED",
                        remedy="the replicas' logs say why",
                    )
                await asyncio.sleep(SERVED_POLL_S)
        return held

    async def _report_skipped(self, due: Mapping[str, Sequence[int]], *, cause: str) -> None:
        """Write a warning that names the versions in `due` that are not evaluated, by environment; `cause` says why."""
        if skipped := {env: steps for env, steps in due.items() if steps}:
            named = "; ".join(f"{env}: {version_names(steps)}" for env, steps in skipped.items())
            await self._events.warning(
                "EVAL_SKIPPED",
                f"these versions are not evaluated, because {cause}: {named}. Where it happens often, evaluate fewer "
                "tasks (orchestrator.eval.num_examples), less often (orchestrator.eval.interval), or add replicas",
            )

    async def _evaluate(
        self,
        step: int,
        envs: Sequence[str] | None = None,
        *,
        done: Collection[tuple[str, int]] = (),
        is_pinned: bool = False,
        skipped: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> list[Rollout]:
        """Evaluate `envs` (None: all) with the policy of `step`, except for those in `done`; return the OK rollouts.

        `done` has pairs of environment and step. A pinned evaluation is played by the replica that is held at its
        version, while versions come. `skipped` are the versions due before it that are not evaluated, by environment:
        its report names them.
        """
        rollouts: list[Rollout] = []
        chosen = self._parts.evals.names if envs is None else envs
        with self._parts.evals.series():
            for env in (name for name in chosen if (name, step) not in done):
                report, good = await self._parts.evals.evaluate(
                    env, step=step, min_version=step, is_pinned=is_pinned, skipped=skipped.get(env, ())
                )
                await self._events.eval_completed(report)
                rollouts += good
        return rollouts

    async def _wait_served(self, version: int, *, overdue_s: float = POLICY_OVERDUE_S) -> None:
        """Wait until a ready replica serves `version` or a newer one.

        The wait is shown as overdue after `overdue_s` seconds.
        """
        policies = self._parts.policies
        with waits.waiting(f"policy {version} to be served", waits_on="trainer", deadline_s=overdue_s) as wait:
            while (served := policies.served_version()) is None or served < version:
                wait.update(waits_on=policies.up_to(version))
                await asyncio.sleep(SERVED_POLL_S)


# A run of kind EVAL: every environment is played with a fixed model, then the run closes like any other.
#
#     run ──▶ restore ──▶ environments ──▶ begin all ──▶ read the log, take over what is played ──▶ RUNNING
#                                                                                                 │
#             closing header, its archive holds every rollout ◀── STOPPING ◀── play what is missing
#
# Rollouts go through the log like those of training, so who takes the run over plays only what the log does not have.
# A run that was reopened begins with what its failed closing header archives: none of that is played or archived
# again.

STEP = 0
"""An evaluation run has no steps; its reports carry this one."""


class EvalRunDriver(RunDriver):
    """Drives one evaluation run under one epoch."""

    PLAYED, WRITTEN = "every environment is evaluated", "every rollout is archived"

    def __init__(self, context: RunContext, *, done_evals: Mapping[tuple[str, int], str]) -> None:
        """Make the driver of an evaluation run.

        `done_evals` has, by environment and step, the ids of evaluations in the log.
        """
        super().__init__(assemble(context, context.record.settings))
        self._done_evals = done_evals
        self._evaluations: list[Evaluation] = []

    async def _play(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]) -> list[Rollout]:
        """Play every environment and report those that the log has no evaluation of.

        Return no rollouts: no trainer scores them.

        Long-lived work is appended to `background`. Raises RunStoppedError when the run shall pause or end.
        """
        parts = self._parts
        await self._unless_stopped(parts.envs.open_all(parts.specs))
        archived = await asyncio.to_thread(self._load_archived)
        self._evaluations = [parts.evals.begin(env, step=STEP, min_version=0) for env in parts.evals.names]
        has_predecessor = self._context.epoch.number > 1
        parts.intake.begin(None, has_predecessor=has_predecessor)
        # Before the stream is read, so that these fill their places, and what the log has of the same places is a
        # duplicate.
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
            # By identity: a rollout that was archived before is the same object, and one played again an equal one.
            known = set(map(id, archived))
            ended = [rollout for each in self._evaluations for rollout in (*each.good(), *each.failed())]
            parts.book.keep([rollout for rollout in ended if id(rollout) not in known])
        return []

    async def _abandon(self, reason: str) -> None:
        """Prepare the closing header as the base class does; `reason` is why open plays are dropped.

        If the environments are not open yet, the rollouts in the log are kept for the archive: of each place the first
        OK one, else the last one, unless an earlier closing header archives an OK one.
        """
        await super()._abandon(reason)
        if not self._parts.intake.has_begun:
            archived = await asyncio.to_thread(self._load_archived)
            self._parts.book.keep(_best(self._parts.intake.noted, besides={_place(rollout) for rollout in archived}))

    def _load_archived(self) -> list[Rollout]:
        """Return the OK rollouts that closing headers archive from before the run was reopened (blocking)."""
        found: list[Rollout] = []
        for header in self._superseded:
            with contextlib.suppress(NotFoundError):  # pruned: it is played again
                found += read_rollouts(self._context.log.store, header)
        return [rollout for rollout in found if rollout.status is RolloutStatus.OK]

    def progress(self) -> run_pb2.RunProgress:
        """Return how many of the planned rollouts (`max_steps`) came back or were given up (`step`).

        It also has the number of OK ones (`num_rollouts`) and their mean reward.
        """
        good = [rollout for each in self._evaluations for rollout in each.good()]
        wanted = sum(each.num_planned for each in self._evaluations)
        missing = sum(each.num_missing for each in self._evaluations)
        reward = sum(rollout.reward for rollout in good) / len(good) if good else 0.0
        return run_pb2.RunProgress(step=wanted - missing, max_steps=wanted, num_rollouts=len(good), reward=reward)


def _place(rollout: Rollout) -> tuple[str, int, int]:
    """Return what identifies a rollout's place in the run: evaluation, ordinal and member, whatever the attempt."""
    return rollout.eval_id, rollout.ordinal, rollout.member


def _best(rollouts: Iterable[Rollout], *, besides: Container[tuple[str, int, int]]) -> list[Rollout]:
    """Return for each place (`_place`) not in `besides` the first OK rollout, or the last rollout if none is OK."""
    found: dict[tuple[str, int, int], Rollout] = {}
    for rollout in rollouts:
        known = found.get(_place(rollout))
        if known is None or known.status is not RolloutStatus.OK:
            found[_place(rollout)] = rollout
    return [rollout for place, rollout in found.items() if place not in besides]
