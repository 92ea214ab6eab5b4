"""The commit of each header: the only writer of a run's batch stream.

Nothing counts before its header object exists in the store.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from millrace.algorithms import Baselines
from millrace.config.sections.buffer import BufferConfig
from millrace.errors import FencedError, InternalError
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.drive.batcher import (
    CutBatch,
    count_dropped,
    decode_state,
    encode_state,
    resolutions,
    score_samples,
)
from millrace.orchestrator.events import RunContext, is_told
from millrace.orchestrator.play.book import Book
from millrace.orchestrator.play.buffer import PoolSizes, thresholds_of
from millrace.orchestrator.play.env_servers import EnvServers
from millrace.orchestrator.play.failures import Failures
from millrace.orchestrator.play.pools import Pools
from millrace.orchestrator.play.rollout_stream import RolloutStream
from millrace.rollouts.batch_wire import closes_run, pack_batch
from millrace.rollouts.types import Rollout, TrainSample
from millrace.rollouts.wire import encode_archive
from millrace.runlog import Frontier, chain_hash, commit_batch
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.run_record import RunOrigin
from millrace.runlog.records.scores import name_scores
from millrace.runlog.recovery.recover import Committed
from millrace.v1 import run_pb2

T = TypeVar("T")


MAX_EMPTY_BATCHES = 10
"""Batches in a row without any advantage before the run fails instead of burning tokens for nothing (as prime-rl)."""
COMMIT_GRACE_S = 5.0
"""How long a shutdown waits for the commit that is under way; one that takes longer is abandoned, which is safe."""


class BatchWriter:
    """Turns what the book resolves into headers, and knows the chain that they form."""

    def __init__(
        self,
        context: RunContext,
        *,
        book: Book,
        envs: EnvServers,
        stream: RolloutStream,
        failures: Failures,
        seq_len: int,
        buffer: BufferConfig | None = None,
        baselines: Baselines | None = None,
    ) -> None:
        """`buffer`: what moves tasks between pools; None where nothing is drawn by them."""
        self._context = context
        self._log = context.log
        self._book = book
        self._envs = envs
        self._stream = stream
        self._failures = failures
        self._seq_len = seq_len
        self._buffer = buffer
        self.pools = Pools()
        """Which tasks are easy and hard behind the newest header."""
        self.pool_sizes: Callable[[Pools], PoolSizes | None] = lambda pools: None
        """How many tasks are in which pool; known once the environments are open."""
        self._next_pools: Pools | None = None
        self.baselines = baselines or Baselines()
        """What rae compares rewards with, behind the newest header."""
        self._next_baselines = self.baselines
        self.lineage = 0
        """Lineage of the newest published policy; the driver keeps it up to date."""
        self.closing: batch_pb2.BatchHeader | None = None
        """The closing header once it is committed; nothing may follow it."""
        self.is_closing = False
        """The closing header is being written, or is: a trainer may have finished."""
        self._revision = 0
        self.chain = bytes(32)
        self.known = KnownObjects()
        """What the committed headers name."""
        self.num_reopened = 0
        """How often the run had failed and went on."""
        self.num_empty = 0
        """Batches in a row without any advantage."""

    def restore(self, committed: Committed, *, origin: RunOrigin) -> None:
        """Continue behind the last committed header, or at the log's origin.

        Behind a closing header that was reopened, continue at its step, which it did not train, and with the ordinals
        behind those that it dropped.
        """
        self.chain, last, self.known = committed.chain, committed.last, KnownObjects(committed.headers)
        self.num_reopened = committed.num_reopened
        if last is None:
            self._book.restore(step=origin.base_step, frontier=origin.frontier)
            state = decode_state(origin.orchestrator_state)
            self.baselines = self.baselines.restored(state.baselines)
            self._restore_pools(state.pools, step=origin.base_step, begins_anew=True)
            return
        is_closing = closes_run(last)
        is_forked = last.writer_epoch == 0  # copied: the fork has committed nothing of its own
        begins_anew = is_forked or committed.is_reopened
        self.closing = last if is_closing and not committed.is_reopened else None
        self.lineage = last.lineage
        self._revision = last.revision + 1 if committed.is_reopened else 0
        state = decode_state(last.orchestrator_state)
        self.baselines = self.baselines.restored(state.baselines)
        self._failures.restore(state.failures, is_reopened=begins_anew)
        self._book.restore(
            step=last.step + (not committed.is_reopened),
            frontier=Frontier.from_header(last),
            num_duplicates=state.num_duplicates,
            counted_until=state.read_until,
        )
        self._restore_pools(state.pools, step=self._book.step, begins_anew=begins_anew)

    def _restore_pools(self, pools: Pools | None, *, step: int, begins_anew: bool) -> None:
        """Go on with the pools of the log; where a run begins anew, a share of the easy and hard tasks returns."""
        self.pools, config = pools or Pools(step=step), self._buffer
        if begins_anew and config is not None and pools is not None:
            self.pools = pools.begun_anew(
                easy_fraction=config.easy_fraction,
                hard_fraction=config.hard_fraction,
                seed=self._context.record.training.seed,
                step=step,
            )

    def opened(self, digests: Mapping[str, str]) -> None:
        """The environments are known, with the digests of their training tasks: other tasks' pools count no more."""
        self.pools = self.pools.of_task_sets(digests)

    def _pools_behind(self, step: int, frontier: Frontier) -> Pools | None:
        """The pools behind the header that resolves what is pending; None where nothing is drawn by them."""
        if self._buffer is None or not self._buffer.changes_draws:
            return None
        ordered = sorted(self._book.pending, key=lambda item: item.ordinal)
        return self.pools.after(
            [item.result for item in ordered if item.result is not None],
            thresholds_of(self._buffer),
            step=step,
            drawn_below=self._book.drawn_below,
            resolved_below=frontier.resolved_below,
        )

    async def commit(self, batch: CutBatch, *, metrics: Callable[[Mapping[str, int]], Mapping[str, float]]) -> None:
        """Commit batch n: its ordinals are resolved with it, and those dropped since batch n-1.

        `metrics` says what its rollouts were, given how many groups of each environment were dropped as stale.
        """
        await self._hold_lease()
        self._book.settle(batch.resolved)
        if not batch.samples:
            await self.count_empty(filtered=batch.filtered, num_rollouts=len(batch.rewards))
            return
        self.num_empty = 0
        header = self._header(batch_pb2.BATCH_KIND_TRAIN, batch.baselines)
        header.num_rollouts = len(batch.rewards)
        header.reward_mean = sum(batch.rewards) / len(batch.rewards)
        dropped = count_dropped(self._book.pending)
        num_trained = len(self._book.pending) - dropped.total()
        stale = Counter(item.env for item in self._book.pending if item.reason == "stale")
        await self._write(header, batch.samples)
        await self._context.events.batch_committed(
            step=batch.step,
            num_trained=num_trained,
            dropped=dropped,
            filtered=batch.filtered,
            num_tokens=header.num_tokens,
            chain_hash=self.chain.hex(),
            pools=self.pool_sizes(self.pools),
            metrics=metrics(stale),
        )
        # What was dropped while the commit was under way is in no header yet.
        if self._context.lease.may_write:  # else the next commit trims, or a successor that needs more than we know
            await self._log.trim_rollouts(self._book.oldest_entry() or self._stream.position)

    async def close(
        self,
        *,
        outcome: batch_pb2.RunOutcome,
        reason: str,
        evaluation: Sequence[Rollout] = (),
        error: run_pb2.RunError | None = None,
    ) -> None:
        """Write the closing header: every open ordinal ends, and the final evaluation's samples go to the trainer."""
        self.is_closing = True
        await self._hold_lease()
        self._book.close(reason)
        header = self._header(batch_pb2.BATCH_KIND_CLOSE, self.baselines)
        header.outcome = outcome
        header.final_version = self._book.step
        if error is not None:
            header.error_reason, header.error_message = error.reason, error.message
            header.error_component, header.error_remedy = error.component, error.remedy
        await self._write(header, score_samples(evaluation, seq_len=self._seq_len))

    async def count_empty(
        self,
        *,
        filtered: Mapping[str, int] | None = None,
        num_rollouts: int = 0,
        replaced: Mapping[str, int] | None = None,
    ) -> None:
        """Tell of one more batch, or a batch's worth of groups, without any advantage; InternalError if it is one too
        many. `filtered` are the batch's rollouts that filters found, by type, of `num_rollouts`; `replaced` says why
        groups were replaced before the cut.
        """
        self.num_empty += 1
        step = self._book.step
        why, remedy = _nothing_to_learn(filtered or {}, num_rollouts, replaced or {})
        if failed := self._failures.describe():
            why = f"{why}; {failed}, and only the others are compared"
        if is_told(self.num_empty):
            await self._context.events.warning(
                "ZERO_ADVANTAGE",
                f"{self.num_empty} batches in a row up to batch {step} had no advantage: {why}; the run fails after "
                f"{MAX_EMPTY_BATCHES}. {remedy[0].upper()}{remedy[1:]}",
            )
        if self.num_empty >= MAX_EMPTY_BATCHES:
            raise InternalError(
                f"{MAX_EMPTY_BATCHES} batches in a row up to batch {step} had no advantage: {why}",
                reason="NO_ADVANTAGE",
                remedy=remedy,
            )

    def _header(self, kind: batch_pb2.BatchKind, baselines: Baselines) -> batch_pb2.BatchHeader:
        book, context = self._book, self._context
        frontier = book.frontier.resolve(item.ordinal for item in book.pending)
        self._next_pools = self._pools_behind(book.step + (kind == batch_pb2.BATCH_KIND_TRAIN), frontier)
        self._next_baselines = baselines
        header = batch_pb2.BatchHeader(
            run_uid=self._log.uid,
            kind=kind,
            step=book.step,
            revision=self._revision,
            resolutions=resolutions(book.pending),
            previous_chain_hash=self.chain,
            writer_epoch=context.epoch.number,
            lineage=self.lineage,
            run_hash=context.record.run_hash,
            orchestrator_state=encode_state(
                next_ordinal=book.cursor,
                num_duplicates=book.num_duplicates,
                read_until=self._stream.newest,
                scored_whole=[name for name, env in self._envs.envs.items() if env.requires_group],
                failures=self._failures.tally,
                pools=self._next_pools,
                baselines=baselines.values,
            ),
        )
        frontier.fill(header)
        return header

    async def _write(self, header: batch_pb2.BatchHeader, samples: Sequence[TrainSample]) -> None:
        """Commit a header that was made without an await since: what is dropped from here on is in the next one."""
        self._context.lease.require()
        with self._book.committing() as archived:
            chunks = pack_batch(header, samples)
            header.objects.extend(name_scores(self._log.names, archived))
            archive = encode_archive(archived)
            header_bytes, cancelled = await _finish(
                commit_batch(self._log, self._context.epoch, header, chunks, archive, known=self.known)
            )
            self.chain = chain_hash(self.chain, header_bytes)
        self.pools, self.baselines = self._next_pools or self.pools, self._next_baselines
        self._revision = 0
        self.closing = header if closes_run(header) else None
        if cancelled is not None:  # the header is committed all the same: whatever follows comes behind it
            raise cancelled

    async def _hold_lease(self) -> None:
        """Renew the lease if it is not fresh, because Redis or we stood still for a while."""
        lease = self._context.lease
        if not lease.may_write and not await lease.renew():
            raise FencedError(
                f"the lease of run {self._log.uid} is another orchestrator's: batch {self._book.step} is not committed "
                "here",
                reason="LEASE_LOST",
                remedy="that one continues the run",
            )


def _nothing_to_learn(filtered: Mapping[str, int], num_rollouts: int, replaced: Mapping[str, int]) -> tuple[str, str]:
    """Why nothing is learned, and the remedy."""
    easy, hard = replaced.get("easy", 0), replaced.get("hard", 0)
    if easy or hard:
        return (
            "`orchestrator.buffer.online_difficulty_filtering` lets nothing pass: of the last "
            f"{sum(replaced.values())} groups {hard} had only the lowest reward of `reward_range` and {easy} only "
            "the highest",
            "check the reward function, take tasks that are easier or harder for this model, or raise "
            "orchestrator.rollouts_per_example",
        )
    why = "in every group all rewards are equal"
    if filtered:
        found = ", ".join(f"{count} of {num_rollouts} ({name})" for name, count in sorted(filtered.items()))
        why = f"all rewards are equal, or orchestrator.filters leave nothing of a group: they found {found}"
    return (
        f"{why}, so there is nothing to learn from",
        "check the reward function, or raise orchestrator.rollouts_per_example or the temperature",
    )


async def _finish(work: Coroutine[Any, Any, T]) -> tuple[T, asyncio.CancelledError | None]:
    """What `work` returns. If this task is cancelled meanwhile, let `work` finish first, for at most `COMMIT_GRACE_S`,
    and return the cancellation, too; it is raised if `work` has not finished by then."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task), None
    except asyncio.CancelledError as cancelled:
        await asyncio.wait((task,), timeout=COMMIT_GRACE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if task.cancelled() or task.exception() is not None:
            raise
        return task.result(), cancelled
