"""Whose turn it is where trainer and replicas share devices (`inference.sleep_while_training`).

    trainer has a batch: asks for turn n ──▶ evaluations end ──▶ every replica sleeps ──▶ turn n is its own, it trains
    trainer has published: asks for none ──▶ replicas are woken ──▶ they take the version and generate

Level-triggered, like everything between workers: the turn that the trainer wants is in each of its heartbeats, and each
is answered with the turn that it has. A trainer that dies wants none, so replicas wake; its successor asks before it
trains. Turns have numbers, so that the next one is not taken for the one before. A replica whose orchestrator is gone
wakes by itself after `pauses.PAUSE_LIMIT_S`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from millrace.errors import InvalidStateError, MillraceError
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1.policy_service_pb2_grpc import PolicyServiceStub as Stub
from millrace.orchestrator.workers import WorkerKind, WorkerRecord, WorkerRegistry
from millrace.race import first_of
from millrace.rpc.channel import call, open_channel
from millrace.telemetry.waits import LastingWait

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
"""For weights to be brought to the host, or back to the device."""
RENEWED_S = 60.0
"""How often a sleep is asked for again; a fifth of what it lasts by itself."""
RETRY_S = 0.5
LOOK_S = 5.0
SLOW_S = 600.0
"""Age from which it is overdue that a replica sleeps or wakes."""
LEAVE_S = 10.0
"""How long the end of a run waits for the trainer to be done with the devices."""


class DeviceTurns:
    """The turns of one run. `is_evaluating` says whether an evaluation is being played, which ends before a turn."""

    def __init__(self, *, run_uid: str, registry: WorkerRegistry, is_evaluating: Callable[[], bool]) -> None:
        self._run_uid = run_uid
        self._registry = registry
        self._is_evaluating = is_evaluating
        self._asleep: dict[str, float] = {}
        """Replicas that were asked to sleep, by worker id: when to ask them again."""
        self._wait = LastingWait()

    async def run(self) -> None:
        """Give the devices to whom they are due; ends by cancellation. InvalidStateError if a replica cannot sleep."""
        try:
            # unregistered wait: a periodic look; what it awaits is registered where it is awaited
            while True:
                changed = self._registry.changed
                if await self._settle():
                    self._wait.over()
                    await first_of(changed.wait(), timeout_s=LOOK_S)
                else:
                    await asyncio.sleep(RETRY_S)
        finally:
            self._wait.over()

    async def leave(self) -> None:
        """Wake the replicas once the trainer is done, if it is soon; else they wake by themselves."""
        try:
            async with asyncio.timeout(LEAVE_S):
                # unregistered wait: seconds at the end of a run
                while True:
                    if await self._settle() and not self._asleep:
                        return
                    await asyncio.sleep(RETRY_S)
        except (TimeoutError, MillraceError) as error:
            logger.warning("replicas were left asleep", extra={"run": self._run_uid, "error": str(error)})
        finally:
            self._wait.over()

    async def _settle(self) -> bool:
        """Let the trainer have the devices if it wants them, else the replicas; whether they have."""
        replicas = self._registry.owned(WorkerKind.INFERENCE, self._run_uid)
        ids = {each.worker_id for each in replicas}
        self._asleep = {worker_id: due for worker_id, due in self._asleep.items() if worker_id in ids}
        if self._wanting() is not None:
            return await self._to_trainer()
        self._registry.take_devices(self._run_uid)
        sleepers = [each for each in replicas if each.worker_id in self._asleep or _says_it_sleeps(each)]
        return all([await self._asked(each, self._wake) for each in sleepers])

    async def _to_trainer(self) -> bool:
        if not self._asleep and self._is_evaluating():
            self._wait.on("an evaluation to end, before the trainer gets the devices", key="evals", deadline_s=SLOW_S)
            return False
        self._registry.claim(WorkerKind.INFERENCE, self._run_uid)
        replicas, now = self._registry.owned(WorkerKind.INFERENCE, self._run_uid), time.monotonic()
        awake = [each for each in replicas if self._asleep.get(each.worker_id, now) <= now]
        is_settled = all([await self._asked(each, self._sleep) for each in awake])
        trainer = self._wanting()
        if is_settled and trainer is not None and trainer.trainer is not None:
            self._registry.lend_devices(self._run_uid, trainer.worker_id, trainer.trainer.device_turn)
        return is_settled

    def _wanting(self) -> WorkerRecord | None:
        """The run's trainer, if it wants the devices."""
        for record in self._registry.owned(WorkerKind.TRAINER, self._run_uid):
            status = record.trainer
            if status is not None and status.run_uid == self._run_uid and status.device_turn:
                return record
        return None

    async def _asked(self, replica: WorkerRecord, ask: Callable[[Stub, str], Awaitable[pb.PolicyStatus]]) -> bool:
        """Ask a replica to sleep or to wake; whether it did. InvalidStateError if it never can."""
        worker_id, what = replica.worker_id, ask.__name__.strip("_")
        self._wait.on(f"replica {worker_id} to {what}", waits_on=worker_id, key=what + worker_id, deadline_s=SLOW_S)
        try:
            async with open_channel(replica.worker.address) as channel:
                replica.policy = await ask(Stub(channel), worker_id)
        except InvalidStateError:
            raise
        except MillraceError as error:
            fields = {"worker": worker_id, "asked": what, "error": str(error)}
            logger.warning("a replica does not do what it shall, and is asked again", extra=fields)
            return False
        return True

    async def _sleep(self, stub: Stub, worker_id: str) -> pb.PolicyStatus:
        request = pb.PauseGenerationRequest(run_uid=self._run_uid, frees_memory=True)
        self._asleep[worker_id] = 0.0  # if the answer is lost it sleeps all the same
        answer = await call(stub.PauseGeneration, request, timeout_s=CALL_TIMEOUT_S, waits_on=worker_id)
        self._asleep[worker_id] = time.monotonic() + RENEWED_S
        return answer.status

    async def _wake(self, stub: Stub, worker_id: str) -> pb.PolicyStatus:
        request = pb.ResumeGenerationRequest(run_uid=self._run_uid, takes_memory=True)
        answer = await call(stub.ResumeGeneration, request, timeout_s=CALL_TIMEOUT_S, waits_on=worker_id)
        self._asleep.pop(worker_id, None)
        return answer.status


def _says_it_sleeps(replica: WorkerRecord) -> bool:
    """Whether its last heartbeat says so: an orchestrator before this one may have asked for it."""
    return replica.policy is not None and replica.policy.is_asleep
