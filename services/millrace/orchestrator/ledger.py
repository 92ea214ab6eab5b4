"""The run's ledger: the next step, what every ordinal came to, and the commit of each header.

Everything here can be rebuilt from the committed headers; nothing counts before its header object exists in the store.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from millrace.errors import FencedError, InternalError, MillraceError
from millrace.internal.v1 import batch_pb2, env_service_pb2, rollout_pb2
from millrace.orchestrator.batcher import (
    Batch,
    Resolved,
    count_dropped,
    decode_state,
    encode_state,
    resolutions,
    resolve,
    score_samples,
)
from millrace.orchestrator.env_pool import EnvPool
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.groups import Group, GroupTable
from millrace.orchestrator.rollout_stream import RolloutStream, entry_key
from millrace.rollouts.batch_wire import pack_batch
from millrace.rollouts.types import Purpose, Rollout, TrainSample
from millrace.rollouts.wire import encode_archive
from millrace.runlog import Epoch, Frontier, Lease, RunLog, chain_hash, commit_batch
from millrace.runlog.known import KnownObjects
from millrace.runlog.origin import Origin
from millrace.runlog.recover import Committed
from millrace.runlog.scores import name_scores
from millrace.v1 import run_pb2

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_EMPTY_BATCHES = 10
"""Batches in a row without any advantage before the run fails instead of burning tokens for nothing (as prime-rl)."""
STOP_TIMEOUT_S = 2.0
"""How long dropping groups waits for env-servers to stop them; what comes late is discarded anyway."""
COMMIT_GRACE_S = 5.0
"""How long a shutdown waits for the commit that is under way; one that takes longer is abandoned, which is safe."""


class Ledger:
    """Step counter, frontier and chain hash of a run, and the only writer of its batch stream."""

    def __init__(
        self,
        *,
        run_log: RunLog,
        epoch: Epoch,
        lease: Lease,
        run_hash: str,
        envs: EnvPool,
        stream: RolloutStream,
        events: RunEvents,
        seq_len: int,
    ) -> None:
        self._stream = stream
        self._log = run_log
        self._lease = lease
        self._seq_len = seq_len
        self._epoch = epoch
        self._run_hash = run_hash
        self._envs = envs
        self._events = events
        self.lineage = 0
        """Lineage of the newest published policy; the driver keeps it up to date."""
        self.closing: batch_pb2.BatchHeader | None = None
        """The closing header once it is committed; nothing may follow it."""
        self.is_closing = False
        """The closing header is being written, or is: a trainer may have finished."""
        self.step = 0
        self._revision = 0
        self.frontier = Frontier()
        self.chain = bytes(32)
        self.known = KnownObjects()
        """What the committed headers name."""
        self.num_reopened = 0
        """How often the run had failed and went on."""
        self._pending: list[Resolved] = []
        self._committing: frozenset[int] = frozenset()
        self._archive: list[Rollout] = []
        self._num_empty = 0
        self._cursor = 0

    def restore(self, committed: Committed, *, origin: Origin, table: GroupTable) -> None:
        """Continue behind the last committed header, or at the log's origin.

        Behind a closing header that was reopened: at its step, which it did not train, with the ordinals behind those
        that it dropped.
        """
        self.chain, last, self.known = committed.chain, committed.last, KnownObjects(committed.headers)
        self.num_reopened = committed.num_reopened
        if last is None:
            self.step, self.frontier = origin.base_step, origin.frontier
        else:
            is_closing = last.kind == batch_pb2.BATCH_KIND_CLOSE
            self.closing = last if is_closing and not committed.is_reopened else None
            self.lineage = last.lineage
            self.step = last.step + (not committed.is_reopened)
            self._revision = last.revision + 1 if committed.is_reopened else 0
            self.frontier = Frontier.from_header(last)
            table.num_duplicates, table.counted_until = decode_state(last.orchestrator_state)
        self._cursor = self.frontier.resolved_below

    def is_resolved(self, ordinal: int) -> bool:
        """Whether an ordinal is resolved: by a committed header, by the one under way, or dropped for the next one."""
        is_known = self.frontier.is_resolved(ordinal) or ordinal in self._committing
        return is_known or any(item.ordinal == ordinal for item in self._pending)

    def next_ordinal(self, table: GroupTable) -> int:
        """Smallest ordinal that is neither resolved nor in the table."""
        while self._cursor in table or self.is_resolved(self._cursor):
            self._cursor += 1
        return self._cursor

    def drop(self, group: Group, table: GroupTable, *, reason: str) -> None:
        """Resolve a group's ordinal as dropped; the next header says so."""
        self._pending.append(resolve(group, reason=reason))
        self._archive += table.remove(group.ordinal)

    async def drop_all(self, groups: Sequence[Group], table: GroupTable, *, reason: str) -> None:
        """Drop groups and stop those that are still being played."""
        playing = [
            env_service_pb2.PlayingGroup(purpose=rollout_pb2.PURPOSE_TRAIN, ordinal=group.ordinal)
            for group in groups
            if group.ordinal in table.open
        ]
        for group in groups:
            self.drop(group, table, reason=reason)
        if playing:
            await self._envs.cancel(playing, timeout_s=STOP_TIMEOUT_S)

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        """Archive rollouts with the next header that is written."""
        self._archive += rollouts

    def abandon(self, rollouts: Sequence[Rollout], *, reason: str) -> None:
        """Before a closing header: resolve as dropped what a predecessor left open, given the rollouts in the log.

        The archive keeps these. Of an ordinal that nothing came back from only the number is known.
        """
        left = [r for r in rollouts if r.purpose is Purpose.TRAIN and not self.frontier.is_resolved(r.ordinal)]
        self._archive += left
        newest = {rollout.ordinal: rollout for rollout in sorted(left, key=lambda rollout: rollout.attempt)}
        highest = max([*newest, *self.frontier.resolved_above], default=-1)
        for ordinal in range(self.frontier.resolved_below, highest + 1):
            if self.is_resolved(ordinal):
                continue
            item = Resolved(ordinal=ordinal, env="", task_id="", reason=reason, attempts=0)
            if rollout := newest.get(ordinal):
                item = replace(item, env=rollout.env, task_id=rollout.task_id, attempts=rollout.attempt + 1)
            self._pending.append(item)

    async def commit(self, batch: Batch, table: GroupTable) -> None:
        """Commit batch n: its ordinals are resolved with it, and those dropped since batch n-1."""
        await self._hold_lease()
        rollouts = [rollout for item in batch.resolved for rollout in table.remove(item.ordinal)]
        if not batch.samples:
            self._count_empty(batch, rollouts)
            return
        self._num_empty = 0
        resolved = [*self._pending, *batch.resolved]
        header = self._header(batch_pb2.BATCH_KIND_TRAIN, resolved, table)
        header.num_rollouts = len(batch.rewards)
        header.reward_mean = sum(batch.rewards) / len(batch.rewards)
        await self._write(header, batch.samples, resolved, rollouts)
        dropped = count_dropped(resolved)
        num_trained = len(resolved) - dropped.total()
        await self._events.batch_committed(
            step=batch.step,
            num_trained=num_trained,
            dropped=dropped,
            num_tokens=header.num_tokens,
            chain_hash=self.chain.hex(),
        )
        # What was dropped while the commit was under way is in no header yet.
        entries = [table.oldest_entry(), *(rollout.entry_id for rollout in self._archive)]
        needed = min(filter(None, entries), key=entry_key, default=self._stream.position)
        if self._lease.may_write:  # else the next commit trims, or a successor that needs more than we know
            await self._log.trim_rollouts(needed)

    async def close(
        self,
        table: GroupTable,
        *,
        outcome: batch_pb2.RunOutcome,
        reason: str,
        final_version: int,
        evaluation: Sequence[Rollout] = (),
        error: run_pb2.RunError | None = None,
    ) -> None:
        """Write the closing header: every open ordinal ends, and the final evaluation's samples go to the trainer."""
        self.is_closing = True
        await self._hold_lease()
        for group in list(table):
            self.drop(group, table, reason=reason)
        # A batch that could not be committed is trained by nobody.
        resolved = [replace(item, reason=item.reason or reason) for item in self._pending]
        header = self._header(batch_pb2.BATCH_KIND_CLOSE, resolved, table)
        header.outcome = outcome
        header.final_version = final_version
        if error is not None:
            header.error_reason, header.error_message = error.reason, error.message
            header.error_component = error.component
        await self._write(header, score_samples(evaluation, seq_len=self._seq_len), resolved, [])
        self.closing = header

    def _count_empty(self, batch: Batch, rollouts: list[Rollout]) -> None:
        self._pending += batch.resolved
        self._archive += rollouts
        self._num_empty += 1
        log.warning("every group of the batch had zero advantage", extra={"step": self.step, "count": self._num_empty})
        if self._num_empty >= MAX_EMPTY_BATCHES:
            raise InternalError(
                f"{MAX_EMPTY_BATCHES} batches in a row at step {self.step} had no advantage: in every group all "
                "rewards are equal, so there is nothing to learn from",
                reason="NO_ADVANTAGE",
                remedy="check the reward function, or raise orchestrator.rollouts_per_example or the temperature",
            )

    def _header(
        self, kind: batch_pb2.BatchKind, resolved: Sequence[Resolved], table: GroupTable
    ) -> batch_pb2.BatchHeader:
        frontier = self.frontier.resolve(item.ordinal for item in resolved)
        header = batch_pb2.BatchHeader(
            run_uid=self._log.uid,
            kind=kind,
            step=self.step,
            revision=self._revision,
            resolutions=resolutions(resolved),
            previous_chain_hash=self.chain,
            writer_epoch=self._epoch.number,
            lineage=self.lineage,
            run_hash=self._run_hash,
            orchestrator_state=encode_state(
                next_ordinal=self._cursor,
                num_duplicates=table.num_duplicates,
                read_until=self._stream.newest,
                scored_whole=[name for name, env in self._envs.envs.items() if env.requires_group],
            ),
        )
        frontier.fill(header)
        return header

    async def _write(
        self,
        header: batch_pb2.BatchHeader,
        samples: Sequence[TrainSample],
        resolved: Sequence[Resolved],
        rollouts: Sequence[Rollout],
    ) -> None:
        self._lease.require()
        # No await since `resolved` was made: what is dropped while the commit is under way belongs to the next header.
        archived, self._pending, self._archive = [*self._archive, *rollouts], [], []
        self._committing = frozenset(item.ordinal for item in resolved)
        try:
            chunks = pack_batch(header, samples)
            header.objects.extend(name_scores(self._log.names, archived))
            archive = encode_archive(archived)
            header_bytes = await _finish(
                commit_batch(self._log, self._epoch, header, chunks, archive, known=self.known)
            )
        except MillraceError:  # if the run fails for it, the closing header resolves them
            self._pending, self._archive = [*resolved, *self._pending], [*archived, *self._archive]
            raise
        self.chain = chain_hash(self.chain, header_bytes)
        self.frontier = self.frontier.resolve(item.ordinal for item in resolved)
        self._committing = frozenset()
        self.step += 1
        self._revision = 0

    async def _hold_lease(self) -> None:
        """Renew the lease if it is not fresh, because Redis or we stood still for a while."""
        if not self._lease.may_write and not await self._lease.renew():
            raise FencedError(
                f"the lease of run {self._log.uid} is another orchestrator's: step {self.step} is not committed here",
                reason="LEASE_LOST",
                remedy="that one continues the run",
            )


async def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; when we are cancelled meanwhile, let it come to its end first, for `COMMIT_GRACE_S` at most."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,), timeout=COMMIT_GRACE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
