"""The only reader of the rollout stream: every entry goes to the loop or to an evaluation, once."""

import asyncio
import logging

from millrace.errors import CorruptObjectError
from millrace.internal.v1 import rollout_pb2
from millrace.orchestrator.env_pool import EnvPool
from millrace.orchestrator.evals import Evaluator
from millrace.orchestrator.groups import Group
from millrace.orchestrator.ledger import Ledger
from millrace.orchestrator.loop import RolloutLoop
from millrace.rollouts.types import Purpose, Rollout
from millrace.rollouts.wire import decode_rollout
from millrace.runlog import RunLog

log = logging.getLogger(__name__)

READ_COUNT = 512
"""Entries taken from the stream at once; a rollout of a long context is about 0.1 MiB."""


class Collector:
    """Reads the stream from its first entry, so that a new orchestrator reuses what its predecessor was sent."""

    def __init__(self, *, log: RunLog, loop: RolloutLoop, evals: Evaluator, ledger: Ledger, envs: EnvPool) -> None:
        self._log = log
        self._loop = loop
        self._evals = evals
        self._ledger = ledger
        self._envs = envs
        self._cursor = "0"

    async def adopt(self) -> None:
        """After a takeover: take over what env-servers still play, then every rollout that the stream holds."""
        for worker_id, groups in (await self._envs.playing()).items():
            for playing in groups:
                if playing.purpose == rollout_pb2.PURPOSE_TRAIN:
                    group = self._group(playing.ordinal, planned_step=playing.planned_step)
                    if group is not None:
                        group.env_server, group.attempt = worker_id, max(group.attempt, playing.attempt)
                        group.deadline = asyncio.get_running_loop().time() + self._loop.dispatcher.timeout_s
        while await self._poll(block_s=0.0, adopting=True):
            pass
        for group in self._loop.table.open.values():
            if not group.env_server:
                group.next_attempt()  # whoever played it is silent or gone: the loop places it

    async def run(self) -> None:
        """Follow the stream; ends by cancellation."""
        while True:
            await self._poll(block_s=5.0, adopting=False)

    async def _poll(self, *, block_s: float, adopting: bool) -> bool:
        entries = await self._log.read("rollouts", after=self._cursor, count=READ_COUNT, block_s=block_s)
        for entry in entries:
            self._cursor = entry.id
            try:
                rollout = decode_rollout(entry.d)
            except CorruptObjectError as error:
                # The entry's hash held, so its writer encoded it wrongly: the member stays missing and is played again.
                log.error("rollout refused", extra={"entry": entry.id, "error": str(error)})
                continue
            self._take(rollout, entry_id=entry.id, adopting=adopting)
        return bool(entries)

    def _take(self, rollout: Rollout, *, entry_id: str, adopting: bool) -> None:
        if rollout.purpose == Purpose.EVAL:
            self._evals.add(rollout)
            return
        if adopting:
            group = self._group(rollout.ordinal, planned_step=rollout.planned_step)
            if group is not None:
                group.attempt = max(group.attempt, rollout.attempt)
        self._loop.add(rollout, entry_id=entry_id)

    def _group(self, ordinal: int, *, planned_step: int) -> Group | None:
        """The open group of an unresolved ordinal, made if it is not known."""
        table = self._loop.table
        if self._ledger.is_resolved(ordinal):
            return None
        if ordinal not in table:
            table.open[ordinal] = self._loop.make_group(ordinal, planned_step)
        return table.open.get(ordinal)
