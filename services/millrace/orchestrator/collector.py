"""What becomes of a rollout that was read: it goes to the loop or to an evaluation, and may open a group."""

import logging
import time

from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.orchestrator.env_pool import EnvPool
from millrace.orchestrator.evals import Evaluator
from millrace.orchestrator.groups import Group
from millrace.orchestrator.ledger import Ledger
from millrace.orchestrator.loop import RolloutLoop
from millrace.orchestrator.rollout_stream import RolloutStream
from millrace.rollouts.types import Purpose, Rollout

log = logging.getLogger(__name__)


class Collector:
    """Sorts the rollouts of the stream, and takes over what a predecessor left."""

    def __init__(
        self, *, stream: RolloutStream, loop: RolloutLoop, evals: Evaluator, ledger: Ledger, envs: EnvPool
    ) -> None:
        self._stream = stream
        self._loop = loop
        self._evals = evals
        self._ledger = ledger
        self._envs = envs
        self._is_adopting = False
        stream.take = self._take

    async def adopt(self, log_instance: str) -> None:
        """After a takeover: take every rollout that the log holds, then what env-servers still play.

        Each env-server first appends what it has finished and the log lacks. Groups that nobody plays, or whose
        env-server is silent, are left for the loop to place as their next attempt.
        """
        playing = await self._envs.playing(log_instance)
        self._is_adopting = True
        await self._stream.catch_up()
        self._is_adopting = False
        plays: dict[int, list[tuple[str, env_service_pb2.PlayingGroup]]] = {}
        for worker_id, groups in playing.items():
            for play in groups:
                if play.purpose == rollout_pb2.PURPOSE_TRAIN:
                    plays.setdefault(play.ordinal, []).append((worker_id, play))
                    self._open(play.ordinal, planned_step=play.planned_step, attempt=play.attempt)
        num_adopted = 0
        for group in list(self._loop.table.open.values()):
            group.env_server = ""
            if not any(self._adopt(group, worker_id, play) for worker_id, play in plays.get(group.ordinal, [])):
                group.next_attempt()
            num_adopted += bool(group.env_server)
        fields = {"open": len(self._loop.table.open), "finished": len(self._loop.table.finished)}
        log.info("rollouts taken over", extra=fields | {"being_played": num_adopted})

    async def resync(self, log_instance: str) -> None:
        """Redis came back with another copy of the stream: let env-servers append what it lacks, and read it again."""
        self._stream.rewind()
        await self._envs.playing(log_instance)
        await self._stream.catch_up()

    def _adopt(self, group: Group, worker_id: str, play: env_service_pb2.PlayingGroup) -> bool:
        """Take over a play that will bring every member that the group still misses."""
        if not set(group.missing) <= set(play.members):
            return False
        if group.is_scored_whole and play.attempt != group.attempt:
            return False
        group.env_server = worker_id
        group.replica = self._loop.policies.replica_at(play.base_url)
        group.deadline = time.monotonic() + self._loop.dispatcher.timeout_s
        return True

    def _take(self, rollout: Rollout) -> None:
        if rollout.purpose == Purpose.EVAL:
            self._evals.add(rollout)
            return
        if not self._ledger.is_resolved(rollout.ordinal) and (
            self._is_adopting or rollout.ordinal not in self._loop.table
        ):
            # Also beside adoption: a predecessor's env-server that we have not heard of may play on, and what it
            # brings must not be generated again.
            group = self._open(rollout.ordinal, planned_step=rollout.planned_step, attempt=rollout.attempt)
            if group is not None and not group.env_server:
                group.env_server = rollout.env_server
                group.deadline = time.monotonic() + self._loop.dispatcher.timeout_s
        self._loop.add(rollout)

    def _open(self, ordinal: int, *, planned_step: int, attempt: int) -> Group | None:
        """The open group of an unresolved ordinal at that attempt or a later one; made if it is not known."""
        table = self._loop.table
        if self._ledger.is_resolved(ordinal):
            return None
        if ordinal not in table:
            table.open[ordinal] = self._loop.make_group(ordinal, planned_step)
        group = table.open.get(ordinal)
        if group is not None:
            group.advance(attempt)
        return group
