"""The run's trainer as the driver sees it, and whose turn it is on devices that trainer and replicas share."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from millrace.backoff import Backoff
from millrace.errors import InternalError, MillraceError
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import worker_service_pb2
from millrace.internal.v1.policy_service_pb2_grpc import PolicyServiceStub as Stub
from millrace.orchestrator.workers import WorkerKind, WorkerRecord, WorkerRegistry
from millrace.race import first_of
from millrace.rpc.channel import call, open_channel
from millrace.telemetry import waits
from millrace.telemetry.waits import LastingWait

FINISH_TIMEOUT_S = 600.0
"""Longest wait for the trainer to write its last checkpoint and reports after the closing header."""
POLL_S = 0.5
FINISH_POLL_S = 0.1
_TRAINER = WorkerKind.TRAINER


class TrainerFailedError(InternalError):
    """The trainer gave up on the run; message and reason are its own."""


class Trainer(Protocol):
    """The trainer of a run."""

    async def run(self, *, is_closing: Callable[[], bool]) -> None:
        """Keep a trainer assigned to the run until cancelled, and raise TrainerFailedError if the trainer gives up.

        `is_closing` says whether the closing header is being written or is: a trainer may have finished from then on.
        """
        ...

    async def wait_finished(self, *, is_needed: bool, spare_s: float) -> None:
        """Wait until the trainer has read the closing header and written everything.

        If no trainer `is_needed`, wait `spare_s` seconds at most for one to be assigned.
        """
        ...


class TrainerWatch:
    """Assigns a trainer to one run and reads its reports."""

    def __init__(self, *, run_uid: str, registry: WorkerRegistry) -> None:
        """Make the watch over the trainer of one run, among the registered workers."""
        self._run_uid = run_uid
        self._registry = registry

    async def run(self, *, is_closing: Callable[[], bool] = lambda: False) -> None:
        """Keep a trainer assigned to the run until cancelled; raise TrainerFailedError if the trainer gives up.

        `is_closing` says whether the run's closing header is being written or is. A trainer that has finished although
        it is not read a closing header from before a reopening. It is released, and can be assigned again once it has
        forgotten the run.
        """
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            self._look(fresh=True)
            if not is_closing() and (status := self._status()) is not None and status.is_finished:
                self._registry.give_back(_TRAINER, self._run_uid)
            await asyncio.sleep(POLL_S)

    async def wait_finished(self, *, is_needed: bool, spare_s: float = 0.0) -> None:
        """Wait until the trainer has read the closing header and written everything.

        If no trainer `is_needed`, return without one unless one is assigned within `spare_s` seconds. Raises
        TrainerFailedError if the trainer gives up, and InternalError after `FINISH_TIMEOUT_S`.
        """
        began = time.monotonic()
        try:
            with waits.waiting(
                "the trainer's last checkpoint and reports", waits_on="trainer", deadline_s=FINISH_TIMEOUT_S
            ):
                async with asyncio.timeout(FINISH_TIMEOUT_S):
                    while (status := self._status()) is None or not status.is_finished:
                        is_spared = not is_needed and time.monotonic() - began >= spare_s
                        if is_spared and not self._registry.owned(_TRAINER, self._run_uid):
                            return
                        # The trainer may die meanwhile: then another one is assigned, and finishes.
                        self._look()
                        await asyncio.sleep(FINISH_POLL_S)
        except TimeoutError as error:
            raise InternalError(
                f"the trainer did not finish within {FINISH_TIMEOUT_S:.0f} s after the closing header",
                reason="TRAINER_FINISH_TIMEOUT",
                remedy="look at the trainer's log",
            ) from error

    def _look(self, *, fresh: bool = False) -> None:
        """Assign a trainer to the run if it has none; raise TrainerFailedError if its trainer reports that it gave up.

        With `fresh` no trainer is taken that reports how this run ended for it: that may be from before a reopening.
        """
        self._registry.claim(_TRAINER, self._run_uid, limit=1, fresh=fresh)
        status = self._status()
        if status is not None and status.error_reason:
            remedy = status.error_remedy or None
            raise TrainerFailedError(status.error_message, reason=status.error_reason, remedy=remedy)

    def _status(self) -> worker_service_pb2.TrainerStatus | None:
        """Return what the run's trainer last reported of this run.

        None if there is none, or it has reported nothing.
        """
        for record in self._registry.owned(_TRAINER, self._run_uid):
            if record.trainer is not None and record.trainer.run_uid == self._run_uid:
                return record.trainer
        return None


# Whose turn it is where trainer and replicas share devices (`inference.sleep_while_training`).
#
#     trainer has a batch: asks for turn n ──▶ evaluations end ──▶ every replica sleeps ──▶ turn n is its own, it trains
#     trainer has published: asks for none ──▶ replicas are woken ──▶ they take the version and generate
#
# Level-triggered, like everything between workers: the turn that the trainer wants is in each of its heartbeats, and
# each is answered with the turn that it has. A trainer that dies wants none, so replicas wake; its successor asks
# before it trains. Turns have numbers, so that the next one is not taken for the one before. A replica whose
# orchestrator is gone wakes by itself after `inference.service.PAUSE_LIMIT_S`.

logger = logging.getLogger(__name__)

Ask: TypeAlias = Callable[[Stub, str], Awaitable[pb.PolicyStatus]]
"""A call of a replica by its id; what it says of itself."""

CALL_TIMEOUT_S = 150.0
"""For weights to be brought to the host, or back to the device. What takes longer goes on, and is asked for again."""
RENEWED_S = 60.0
"""How often a sleep is asked for again; a fifth of what it lasts by itself."""
RETRIES = Backoff(0.5, 2.0)
LOOK_S = 5.0
SLOW_S = 600.0
"""Age from which it is overdue that a replica sleeps or wakes."""
LEAVE_S = 300.0
"""How long the end of a run waits for a step that is being computed."""
_NEVER, _LOADS = "SLEEP_NOT_ENABLED", "ENGINE_NOT_READY"  # reasons of replicas


class DeviceTurns:
    """The turns of one run. `is_evaluating` says whether an evaluation is being played, which ends before a turn."""

    def __init__(
        self, *, run_uid: str, epoch: int, registry: WorkerRegistry, is_evaluating: Callable[[], bool]
    ) -> None:
        """Make the turns of one run on devices that trainer and replicas share, under the orchestrator's `epoch`.

        `is_evaluating` says whether an evaluation is being played, which ends before a turn.
        """
        self._run_uid = run_uid
        self._epoch = epoch
        self._registry = registry
        self._is_evaluating = is_evaluating
        self._asleep: dict[str, float] = {}
        """Replicas that were asked to sleep, by worker id: when to ask again; 0 if nobody knows whether they do."""
        self._problems: dict[str, str] = {}
        self._num_failed = 0
        self._wait = LastingWait()

    async def run(self) -> None:
        """Give the devices to the trainer and to the replicas in turn, until cancelled.

        Raises InvalidStateError if a replica cannot sleep.
        """
        try:
            while True:
                changed = self._registry.changed
                await self._until(changed, is_settled=await self._settle())
        finally:
            self._wait.over()

    async def leave(self) -> None:
        """Wait until the step that is being computed has ended and all replicas are awake.

        The trainer gets no other turn.

        It takes `LEAVE_S` seconds at most, and what fails is logged.
        """
        try:
            with waits.waiting("replicas to wake at the run's end", waits_on="trainer", deadline_s=LEAVE_S):
                async with asyncio.timeout(LEAVE_S):
                    while True:
                        changed = self._registry.changed
                        is_settled = await self._settle(begins=False)
                        if is_settled and not self._asleep:
                            return
                        await self._until(changed, is_settled=is_settled)
        except (TimeoutError, MillraceError) as error:
            logger.warning("replicas were left asleep", extra={"run": self._run_uid, "error": str(error)})
        finally:
            self._wait.over()

    async def _until(self, changed: asyncio.Event, *, is_settled: bool) -> None:
        """Wait for a change of workers, or `LOOK_S`, if all is settled; else pause before the next try.

        `changed` is the event of such a change.
        """
        if is_settled:
            self._wait.over()
            self._num_failed = 0
            await first_of(changed.wait(), timeout_s=LOOK_S)
        else:
            self._num_failed += 1
            await asyncio.sleep(RETRIES.after(self._num_failed))

    async def _settle(self, *, begins: bool = True) -> bool:
        """Give the devices to the trainer if it asks for them, else to the replicas; return whether that is done.

        With `begins` False a trainer keeps the turn that it has, and gets no other.
        """
        trainers = self._registry.owned(WorkerKind.TRAINER, self._run_uid)
        # A trainer may have begun its turn under an earlier orchestrator: replicas must not wake before it has
        # reported.
        if any(each.trainer is None for each in trainers):
            self._wait.on("the trainer's first report", waits_on="trainer", key="trainer")
            return False
        replicas = self._registry.owned(WorkerKind.INFERENCE, self._run_uid)
        ids = {each.worker_id for each in replicas}
        self._asleep = {worker_id: due for worker_id, due in self._asleep.items() if worker_id in ids}
        wanted = next(((each.worker_id, turn) for each in trainers if (turn := self._turn_of(each))), None)
        if wanted is not None and (begins or self._has_begun(wanted, replicas)):
            return await self._to_trainer(*wanted)
        self._registry.take_devices(self._run_uid)
        sleepers = [each for each in replicas if each.worker_id in self._asleep or _says_it_sleeps(each)]
        return await self._all(sleepers, self._wake, "wake")

    async def _to_trainer(self, trainer_id: str, turn: int) -> bool:
        """Put the replicas to sleep and lend the devices to a trainer for its turn; return whether that is done.

        A turn that no replica sleeps for yet waits for evaluations to end.
        """
        replicas, now = self._registry.owned(WorkerKind.INFERENCE, self._run_uid), time.monotonic()
        is_begun = any(self._asleep.get(each.worker_id) or _says_it_sleeps(each) for each in replicas)
        # A turn that has begun is finished first: the evaluation's replicas are asleep already.
        if self._is_evaluating() and not is_begun:
            self._wait.on("an evaluation to end, before the trainer gets the devices", key="evals", deadline_s=SLOW_S)
            return False
        self._registry.claim(WorkerKind.INFERENCE, self._run_uid)
        replicas = self._registry.owned(WorkerKind.INFERENCE, self._run_uid)
        awake = [each for each in replicas if self._asleep.get(each.worker_id, 0.0) <= now]
        if not await self._all(awake, self._sleep, "sleep"):
            return False
        # The trainer may have given the turn back meanwhile: then the number is of no turn that it asks for, and has no
        # effect.
        self._registry.lend_devices(self._run_uid, trainer_id, turn)
        return True

    def _has_begun(self, wanted: tuple[str, int], replicas: Sequence[WorkerRecord]) -> bool:
        """Return whether a trainer has the turn that it asks for, lent by this orchestrator or an earlier one.

        `wanted` is the trainer's worker id and the number of the turn.
        """
        lent = self._registry.lent_turn(self._run_uid)
        return wanted == lent or (not lent[1] and any(map(_says_it_sleeps, replicas)))

    def _turn_of(self, trainer: WorkerRecord) -> int:
        """Return the number of the turn that a trainer asks for or has; 0 for none.

        A trainer that failed may still have it: a gang's processes hold what they held until they end.
        """
        status = trainer.trainer
        return status.device_turn if status is not None and status.run_uid == self._run_uid else 0

    async def _all(self, replicas: Sequence[WorkerRecord], ask: Ask, what: str) -> bool:
        """Call `ask` for all replicas at once, and return whether all did what `what` ("sleep" or "wake") names.

        Raises InvalidStateError if one cannot sleep.
        """
        if not replicas:
            return True
        names = ", ".join(each.worker_id for each in replicas[:3]) + ", …" * (len(replicas) > 3)
        self._wait.on(f"replicas to {what}: {names}", waits_on="inference", key=what, deadline_s=SLOW_S)
        asked = [asyncio.create_task(self._asked(each, ask, what)) for each in replicas]
        try:
            return all([await each for each in asked])
        finally:
            # Also where one raised: no call may go on while the turn is decided anew.
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _asked(self, replica: WorkerRecord, ask: Ask, what: str) -> bool:
        """Call `ask` for one replica and return whether it did what `what` names; log why it did not.

        The replica's record takes what it answers about itself. Raises the error of a replica that can never sleep.
        """
        worker_id = replica.worker_id
        try:
            async with open_channel(replica.worker.address) as channel:
                replica.policy = await ask(Stub(channel), worker_id)
        except MillraceError as error:
            if error.reason == _NEVER:
                raise
            # A replica that loads was started anew, and holds its memory: it does not sleep.
            if error.reason == _LOADS and what == "wake":
                self._asleep.pop(worker_id, None)
                return True
            if self._problems.get(worker_id) != (problem := str(error)):
                self._problems[worker_id] = problem
                fields = {"worker": worker_id, "asked": what, "error": problem}
                logger.warning("a replica does not do what it shall, and is asked again", extra=fields)
            return False
        self._problems.pop(worker_id, None)
        return True

    async def _sleep(self, stub: Stub, worker_id: str) -> pb.PolicyStatus:
        """Ask a replica to stop generating and free its device's memory, or to stay so.

        Return what it says of itself.
        """
        request = pb.PauseGenerationRequest(run_uid=self._run_uid, frees_memory=True, epoch=self._epoch)
        # Before the call: if its answer is lost, the replica may be asleep.
        self._asleep[worker_id] = 0.0
        answer = await call(stub.PauseGeneration, request, timeout_s=CALL_TIMEOUT_S, waits_on=worker_id)
        self._asleep[worker_id] = time.monotonic() + RENEWED_S
        return answer.status

    async def _wake(self, stub: Stub, worker_id: str) -> pb.PolicyStatus:
        """Ask a replica to take its device's memory again and generate; return what it says of itself."""
        request = pb.ResumeGenerationRequest(run_uid=self._run_uid, takes_memory=True, epoch=self._epoch)
        # Before the call: if its answer is lost, nobody knows whether the replica sleeps, and it is asked again.
        self._asleep[worker_id] = 0.0
        answer = await call(stub.ResumeGeneration, request, timeout_s=CALL_TIMEOUT_S, waits_on=worker_id)
        self._asleep.pop(worker_id, None)
        return answer.status


def _says_it_sleeps(replica: WorkerRecord) -> bool:
    """Return whether the replica's last heartbeat says that it sleeps; an earlier orchestrator may have asked it to."""
    return replica.policy is not None and replica.policy.is_asleep
