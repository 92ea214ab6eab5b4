"""The run's trainer as the driver sees it: keep one assigned, notice that it gave up, wait until it is finished."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from millrace.errors import InternalError
from millrace.internal.v1 import worker_service_pb2
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry
from millrace.telemetry import waits

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
        """Keep one assigned, and raise TrainerFailedError if it gives up; ends by cancellation."""
        ...

    async def wait_finished(self, *, is_needed: bool, spare_s: float) -> None:
        """Wait until it has read the closing header and written everything."""
        ...


class TrainerWatch:
    """Assigns a trainer to one run and reads its reports."""

    def __init__(self, *, run_uid: str, registry: WorkerRegistry) -> None:
        self._run_uid = run_uid
        self._registry = registry

    async def run(self, *, is_closing: Callable[[], bool] = lambda: False) -> None:
        """Keep a trainer assigned; raises TrainerFailedError when it gives up. Ends by cancellation.

        A trainer that has finished although the run is not `is_closing` read a closing header from before a reopening.
        It is released, and can be assigned again once it has forgotten the run.
        """
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            self._look(fresh=True)
            if not is_closing() and (status := self._status()) is not None and status.is_finished:
                self._registry.give_back(_TRAINER, self._run_uid)
            await asyncio.sleep(POLL_S)

    async def wait_finished(self, *, is_needed: bool, spare_s: float = 0.0) -> None:
        """Wait until the closing header is consumed; a run that needs no trainer and has none waits `spare_s` for one.

        Raises TrainerFailedError, or InternalError after the deadline.
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
                        self._look()
                        await asyncio.sleep(FINISH_POLL_S)
        except TimeoutError as error:
            raise InternalError(
                f"the trainer did not finish within {FINISH_TIMEOUT_S:.0f} s after the closing header",
                reason="TRAINER_FINISH_TIMEOUT",
                remedy="look at the trainer's log",
            ) from error

    def _look(self, *, fresh: bool = False) -> None:
        self._registry.claim(_TRAINER, self._run_uid, limit=1, fresh=fresh)
        status = self._status()
        if status is not None and status.error_reason:
            remedy = status.error_remedy or None
            raise TrainerFailedError(status.error_message, reason=status.error_reason, remedy=remedy)

    def _status(self) -> worker_service_pb2.TrainerStatus | None:
        for record in self._registry.owned(_TRAINER, self._run_uid):
            if record.trainer is not None and record.trainer.run_uid == self._run_uid:
                return record.trainer
        return None
