"""Cuts batches and commits their headers: the only writer of a run's batch stream.

Nothing counts before its header object exists in the store.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from millrace.algorithms import Algorithm, Baselines, Credit, Credited, count_found
from millrace.config import ZeroAdvantageFilter
from millrace.config.sections.buffer import BufferConfig, FilterConfig
from millrace.decoding import Fields, decode_object
from millrace.errors import CorruptObjectError, FencedError, InternalError, InvalidSpecError, Violation
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.events import RunContext, is_reported
from millrace.orchestrator.play.book import Book, Resolved, RolloutStream, count_dropped, resolutions
from millrace.orchestrator.play.env_servers import EnvServers
from millrace.orchestrator.play.failures import Failures, Tally, decode_tally, encode_tally
from millrace.orchestrator.play.play import Play
from millrace.orchestrator.play.pools import Pools, PoolSizes, thresholds_of
from millrace.race import finished
from millrace.rollouts.batch_wire import closes_run, iter_chunks
from millrace.rollouts.types import Rollout, Sample, TrainSample
from millrace.rollouts.wire import encode_archive
from millrace.runlog import Frontier, chain_hash, commit_batch
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.run_record import RunOrigin
from millrace.runlog.records.token_logs import name_scores
from millrace.runlog.recover import Committed
from millrace.runlog.token_use import TokenUse
from millrace.v1 import run_pb2

MAX_EMPTY_BATCHES = 10
"""Batches in a row without any advantage before the run fails instead of burning tokens for nothing (as prime-rl)."""
COMMIT_GRACE_S = 5.0
"""How long a shutdown waits for the commit that is under way; one that takes longer is abandoned, which is safe."""


# Cutting a batch: which finished groups become step n, and the header that resolves their ordinals.

_MAX_BASELINES = 1 << 20


@dataclass(slots=True, kw_only=True)
class CutBatch:
    """One step's samples and everything that its header says about them."""

    step: int
    samples: list[TrainSample]
    rewards: list[float]
    resolved: list[Resolved] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)
    """Rollouts that filters found, by type."""
    baselines: Baselines = field(default_factory=Baselines)
    """The baselines after this batch."""


def credit_group(group: Play, algorithm: Algorithm, *, seq_len: int) -> list[Credited]:
    """Return the samples of a group, whose members are all there, with the credit that the algorithm gives each.

    Samples count up to `seq_len` tokens; those without a sampled token among them are left out. Raises InvalidSpecError
    if an advantage is not finite.
    """
    rollouts = group.rollouts()
    credits = algorithm.credit(rollouts)
    for rollout, own in zip(rollouts, credits, strict=True):
        if not all(np.isfinite(credit.advantages).all() for credit in own):
            raise _absurd(rollout)
    return [
        Credited(rollout=rollout, sample=sample, credit=credit, num_tokens=min(sample.num_tokens, seq_len), place=place)
        for rollout, own in zip(rollouts, credits, strict=True)
        for sample, credit, place in zip(rollout.samples, own, rollout.trace_of_sample, strict=True)
        if sample.loss_mask[:seq_len].any()
    ]


def _absurd(rollout: Rollout) -> InvalidSpecError:
    """Return the error for a config that makes an advantage that is not finite of a rollout's reward."""
    message = (
        f"make of the reward {rollout.reward:g} of ordinal {rollout.ordinal}, member {rollout.member}, environment "
        f"{rollout.env!r} an advantage that is no finite number; lower what is taken off (`filters`, `overlong`)"
    )
    return InvalidSpecError([Violation(field="orchestrator.algo", value="", message=message, source="a rollout")])


def _number(value: int | None) -> int:
    """Return a policy version or lineage as a batch stores it: 0 for None, which is one that is not known."""
    return 0 if value is None else value


def train_sample(item: Credited, credit: Credit, *, seq_len: int) -> TrainSample:
    """Return the row of a batch for a sample: its first `seq_len` tokens, and `credit`, which is the final one."""
    rollout, sample = item.rollout, item.sample
    return TrainSample(
        token_ids=sample.token_ids[:seq_len],
        loss_mask=sample.loss_mask[:seq_len],
        inference_logprobs=sample.inference_logprobs[:seq_len],
        advantages=credit.advantages[:seq_len],
        ordinal=rollout.ordinal,
        member=rollout.member,
        attempt=rollout.attempt,
        env=rollout.env,
        reward=item.trace.reward,
        temperature=rollout.temperature,
        truncation=rollout.truncation,
        own_sampling=tuple(
            replace(own, end=min(own.end, seq_len)) for own in sample.own_sampling if own.start < seq_len
        ),
        reference_kl=credit.reference_kl,
        min_version=_number(sample.min_version),
        max_version=_number(sample.max_version),
        lineage=_number(sample.lineage),
        mean_version=sample.mean_version(seq_len),
        rl_weights=None if credit.rl_weights is None else credit.rl_weights[:seq_len],
        ce_weights=None if credit.ce_weights is None else credit.ce_weights[:seq_len],
        routed_experts=None if sample.routed_experts is None else sample.routed_experts[:seq_len],
    )


def cut(
    groups: Sequence[Play],
    algorithms: Mapping[str, Algorithm],
    *,
    step: int,
    filter_zero_advantages: ZeroAdvantageFilter,
    seq_len: int,
    filters: Sequence[FilterConfig] = (),
    baselines: Baselines = Baselines(),  # noqa: B008 - immutable
) -> CutBatch:
    """Make batch `step` of groups whose members are all there; `algorithms` are by the name of the environment.

    An algorithm that several environments share finishes all of their samples together. Only then are samples without
    an advantage left out, if `filter_zero_advantages` has the batch shrink. A group of which nothing is left is
    resolved as dropped. Where batches are refilled, such groups were replaced before the cut, and the others stay
    whole, but for samples of which filters leave nothing. Samples are cut at `seq_len` tokens; `filters` are those
    whose finds are counted, `baselines` the averages before the batch. Raises InvalidSpecError if an advantage is not
    finite.
    """
    is_shrinking = filter_zero_advantages in (True, "shrink")
    batch = CutBatch(step=step, samples=[], rewards=[])
    credited = [credit_group(group, algorithms[group.task.env], seq_len=seq_len) for group in groups]
    compared, batch.baselines = baselines.against([item for items in credited for item in items])
    # One credit per sample, in the order in which the groups have their samples.
    credits = iter(finish(compared, algorithms))
    for group, items in zip(groups, credited, strict=True):
        final = [(item, credit) for item in items if not (credit := next(credits)).trains_nothing]
        kept = [(item, credit) for item, credit in final if not is_shrinking or has_advantage(item, credit)]
        batch.samples += [train_sample(item, credit, seq_len=seq_len) for item, credit in kept]
        batch.rewards += [rollout.reward for rollout in group.rollouts()]
        batch.filtered += count_found(group.rollouts(), filters)
        batch.resolved.append(Resolved.of(group, "" if kept else "zero_advantage"))
    return batch


def teaches(group: Play, algorithm: Algorithm, *, seq_len: int) -> bool:
    """Return whether any sample of a group has an advantage, cut at `seq_len` tokens; the same in every process."""
    return any(has_advantage(item, item.credit) for item in credit_group(group, algorithm, seq_len=seq_len))


def has_advantage(item: Credited, final: Credit) -> bool:
    """Return whether a sample has an advantage both in its group (`item.credit`) and in the batch (`final`).

    True also if it has cross-entropy weight on tokens of other roles. Tokens beyond those that are trained on do not
    count.
    """
    has_ce = final.ce_weights is not None and bool(final.ce_weights[: item.num_tokens].any())
    return has_ce or all(bool(credit.advantages[: item.num_tokens].any()) for credit in (item.credit, final))


def finish(credited: Sequence[Credited], algorithms: Mapping[str, Algorithm]) -> list[Credit]:
    """Return the final credit of each sample of a batch, in order; `algorithms` are by environment.

    An algorithm gets the samples of all environments that share it in one call.
    """
    credits: dict[int, Credit] = {}
    # By identity: environments without an algorithm of their own share one object, and so one batch.
    for algorithm in {id(each): each for each in algorithms.values()}.values():
        places = [at for at, item in enumerate(credited) if algorithms[item.rollout.env] is algorithm]
        credits.update(zip(places, algorithm.finish([credited[at] for at in places]), strict=True))
    return [credits[at] for at in range(len(credited))]


def score_samples(rollouts: Sequence[Rollout], *, seq_len: int) -> list[TrainSample]:
    """Return the samples of rollouts of an evaluation as rows of the closing header, with advantage 0.

    The trainer scores them, up to `seq_len` tokens, and never trains on them.
    """
    return [
        train_sample(item, item.credit, seq_len=seq_len)
        for rollout in rollouts
        for sample, place in zip(rollout.samples, rollout.trace_of_sample, strict=True)
        for item in [_uncredited(rollout, sample, place)]
    ]


def _uncredited(rollout: Rollout, sample: Sample, place: int) -> Credited:
    """Return a sample with advantage 0 on all of its tokens; `place` is the index of its trace in the rollout."""
    credit = Credit(advantages=np.zeros_like(sample.inference_logprobs))
    return Credited(rollout=rollout, sample=sample, credit=credit, num_tokens=sample.num_tokens, place=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterState:
    """What a successor goes on counting with."""

    num_duplicates: int = 0
    read_until: str = ""
    failures: Tally = field(default_factory=Tally)
    pools: Pools | None = None
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """By environment and agent, the moving average of its rewards."""


def encode_state(
    *,
    next_ordinal: int,
    num_duplicates: int,
    read_until: str,
    failures: Tally,
    scored_whole: Sequence[str] = (),
    pools: Pools | None = None,
    baselines: Mapping[str, Mapping[str, float]] | None = None,
) -> bytes:
    """Return the orchestrator's bounded state as JSON for a header; a successor goes on counting from it.

    `next_ordinal` is the one that is drawn next. `read_until` is the newest entry of the rollout stream that was read:
    `num_duplicates` counts up to there. `scored_whole` are the environments whose groups must come from one attempt.
    `pools` is None unless draws depend on pools; `baselines`, averages by environment and agent, is empty or None
    unless rae trains.
    """
    state = {
        "next_ordinal": next_ordinal,
        "num_duplicates": num_duplicates,
        "read_until": read_until,
        "scored_whole": sorted(scored_whole),
        "failures": encode_tally(failures),
    }
    if pools is not None:
        state["pools"] = pools.to_json()
    if baselines:
        state["baselines"] = [
            {"env": env, "agent": agent, "value": value}
            for env, agents in baselines.items()
            for agent, value in sorted(agents.items())
        ]
    return json.dumps(state, sort_keys=True).encode()


def decode_state(data: bytes) -> WriterState:
    """Return the state of `encode_state`, an empty one for no bytes (a new run).

    Raise CorruptObjectError if malformed.
    """
    if not data:
        return WriterState()
    what, reason = "the orchestrator's state in the last header", "HEADER_CORRUPT"
    fields = Fields(decode_object(data, what=what, reason=reason))
    try:
        pools = fields.inner("pools") if fields.has("pools") else None
        return WriterState(
            pools=None if pools is None else Pools.from_json(pools),
            baselines=_decode_baselines(fields),
            num_duplicates=fields.integer("num_duplicates"),
            read_until=fields.text("read_until"),
            failures=decode_tally(fields.inner("failures")) if fields.has("failures") else Tally(),
        )
    except ValueError as error:
        raise CorruptObjectError(f"{what} cannot be read: {error}", reason=reason) from error


def _decode_baselines(fields: Fields) -> dict[str, dict[str, float]]:
    """Return the averages of rewards by environment and agent; empty if the state has none."""
    found: dict[str, dict[str, float]] = {}
    for item in fields.objects("baselines", most=_MAX_BASELINES) if fields.has("baselines") else ():
        found.setdefault(item.text("env"), {})[item.text("agent")] = item.number("value")
    return found


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
        """Make the writer of a run's headers, before `restore`.

        Samples are cut at `seq_len` tokens. `buffer` is None if nothing is trained. `baselines` are the moving averages
        that rae compares rewards with, None where there are none.
        """
        self._context = context
        self._log = context.log
        self._book = book
        self._envs = envs
        self._stream = stream
        self._failures = failures
        self._seq_len = seq_len
        self._buffer = buffer
        self.pools = Pools()
        """Which tasks are easy and hard after the newest header."""
        self.pool_sizes: Callable[[Pools], PoolSizes | None] = lambda pools: None
        """How many tasks are in which pool; known once the environments are open."""
        self._next_pools: Pools | None = None
        self.baselines = baselines or Baselines()
        """What rae compares rewards with, after the newest header."""
        self._next_baselines = self.baselines
        self.lineage = 0
        """Lineage of the newest published policy; the driver keeps it up to date."""
        self.closing: batch_pb2.BatchHeader | None = None
        """The closing header once it is committed; nothing may follow it."""
        self.is_closing = False
        """The closing header is being written, or is: a trainer may have finished."""
        self._revision = 0
        self.chain = bytes(32)
        self.used = TokenUse()
        """Tokens of all rollouts that the committed headers have archived."""
        self.known = KnownObjects()
        """What the committed headers name."""
        self.num_reopened = 0
        """How often the run had failed and went on."""
        self.num_empty = 0
        """Batches in a row without any advantage."""

    def restore(self, committed: Committed, *, origin: RunOrigin) -> None:
        """Continue after the last committed header, or at the run's origin: step, frontier, counters, pools and chain.

        A closing header that was reopened did not train its step: continue at that step, with the ordinals after those
        that the header dropped.
        """
        self.chain, last, self.known = committed.chain, committed.last, committed.known
        self.num_reopened = committed.num_reopened
        if last is None:
            self._book.restore(step=origin.base_step, frontier=origin.frontier)
            state = decode_state(origin.orchestrator_state)
            self.baselines = self.baselines.restored(state.baselines)
            self._restore_pools(state.pools, step=origin.base_step, begins_anew=True)
            return
        is_closing = closes_run(last)
        is_forked = last.writer_epoch == 0  # copied: the fork has committed nothing of its own
        # Failures before a fork or a reopening must not end the new run: their cause may be gone.
        begins_anew = is_forked or committed.is_reopened
        self.closing = last if is_closing and not committed.is_reopened else None
        self.lineage = last.lineage
        # What a fork copied was its parent's use.
        self.used = TokenUse() if is_forked else TokenUse.of_header(last)
        # Two headers of one step: the reopened run's replaces the closing one as its next revision.
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
        """Continue at `step` with the pools of the log, None if it has none.

        If the run `begins_anew`, a share of the easy and hard tasks returns to normal, as the config says.
        """
        self.pools, config = pools or Pools(step=step), self._buffer
        if begins_anew and config is not None and pools is not None:
            self.pools = pools.begun_anew(
                easy_fraction=config.easy_fraction,
                hard_fraction=config.hard_fraction,
                seed=self._context.record.training.seed,
                step=step,
            )

    def opened(self, digests: Mapping[str, str]) -> None:
        """Drop the pools of task sets that are not those of the opened environments; `digests` are by environment."""
        self.pools = self.pools.of_task_sets(digests)

    def _pools_after(self, step: int, frontier: Frontier) -> Pools | None:
        """Return the pools after the header that resolves the pending plays; None if tasks are not drawn from pools.

        `step` is the next batch, `frontier` that of the header.
        """
        if self._buffer is None or not self._buffer.changes_draws:
            return None
        # By ordinal, not by arrival: a successor that resolves the same groups must move the same tasks.
        ordered = sorted(self._book.pending, key=lambda item: item.ordinal)
        return self.pools.after(
            [item.result for item in ordered if item.result is not None],
            thresholds_of(self._buffer),
            step=step,
            drawn_below=self._book.drawn_below,
            resolved_below=frontier.resolved_below,
        )

    async def commit(self, batch: CutBatch, *, metrics: Callable[[Mapping[str, int]], Mapping[str, float]]) -> None:
        """Commit a batch with its header, which resolves its ordinals and those dropped since the batch before.

        A batch without samples is not committed: it is counted (`count_empty`), and its ordinals wait for the next
        header. `metrics` returns the batch's metrics by name, given by environment how many groups were dropped as
        stale. Writes the event of the batch, and trims the rollout stream. Raises FencedError if the lease is another
        orchestrator's.
        """
        await self._hold_lease()
        self._book.settle(batch.resolved)
        # A batch without an advantage is no step: nothing is written, and its ordinals wait for the next header.
        if not batch.samples:
            await self.count_empty(filtered=batch.filtered, num_rollouts=len(batch.rewards))
            return
        self.num_empty = 0
        header = self._header(batch_pb2.BATCH_KIND_TRAIN, batch.baselines)
        header.num_rollouts = len(batch.rewards)
        header.reward_mean = sum(batch.rewards) / len(batch.rewards)
        dropped = count_dropped(self._book.pending)
        num_trained = len(self._book.pending) - dropped.total()
        # Counted before the write, which empties `pending`.
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
        """Commit the closing header, which records `outcome` and resolves every open ordinal as dropped for `reason`.

        The trainer scores the samples of `evaluation` without training on them. `error` is why the run failed, None if
        it did not. Raises FencedError if the lease is another orchestrator's.
        """
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
        """Count one more batch, or a batch's worth of replaced groups, without any advantage.

        Raise InternalError at the limit.

        Writes a warning after 1, 2, 4, … of them. `filtered` are the rollouts that filters found, by type, of
        `num_rollouts`; `replaced` has the number of groups that were replaced before the cut, by reason.
        """
        self.num_empty += 1
        step = self._book.step
        why, remedy = _nothing_to_learn(filtered or {}, num_rollouts, replaced or {})
        if failed := self._failures.describe():
            why = f"{why}; {failed}, and only the others are compared"
        if is_reported(self.num_empty):
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
        """Return the next header of the chain, of this kind, which resolves what is pending.

        Its samples are added later.

        Keeps pools and `baselines` (those after the batch) for `_write`.
        """
        book, context = self._book, self._context
        # Not the book's own yet: that moves on only when the header is committed.
        frontier = book.frontier.resolve(item.ordinal for item in book.pending)
        self._next_pools = self._pools_after(book.step + (kind == batch_pb2.BATCH_KIND_TRAIN), frontier)
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
        """Commit a header and its samples as the next of the chain, and take over the pools and baselines made for it.

        There must be no await between `_header` and this: what is dropped from here on is in the next header. If this
        task is cancelled meanwhile, the commit is finished first.
        """
        # The commit is the first thing that cannot be taken back.
        self._context.lease.require()
        # From here to the end of the commit the book keeps what this header resolves apart, so that a failure loses
        # nothing.
        with self._book.committing() as archived:
            header.objects.extend(await asyncio.to_thread(name_scores, self._log.names, archived))
            # In a thread, as compressing a batch's rollouts would stop the event loop and with it the heartbeats.
            archive = await asyncio.to_thread(encode_archive, archived)
            used = await asyncio.to_thread(self.used.plus, archived)
            used.fill(header)
            chunks = iter_chunks(header, samples)
            # A header may exist in the store although its writer was cancelled, and the chain must then include it.
            header_bytes, cancelled = await finished(
                commit_batch(self._log, self._context.epoch, header, chunks, archive, known=self.known),
                grace_s=COMMIT_GRACE_S,
            )
            self.chain = chain_hash(self.chain, header_bytes)
        self.used = used
        self.pools, self.baselines = self._next_pools or self.pools, self._next_baselines
        self._revision = 0
        self.closing = header if closes_run(header) else None
        if cancelled is not None:  # the header is committed all the same: whatever follows comes after it
            raise cancelled

    async def _hold_lease(self) -> None:
        """Renew the run's lease unless it was renewed lately (`Lease.may_write`).

        It was not if Redis or this process stood still. Raise FencedError if the lease is another orchestrator's.
        """
        lease = self._context.lease
        if not lease.may_write and not await lease.renew():
            raise FencedError(
                f"the lease of run {self._log.uid} is another orchestrator's: batch {self._book.step} is not committed "
                "here",
                reason="LEASE_LOST",
                remedy="that one continues the run",
            )


def _nothing_to_learn(filtered: Mapping[str, int], num_rollouts: int, replaced: Mapping[str, int]) -> tuple[str, str]:
    """Return in words why a batch has no advantage, and the remedy; the parameters are those of `count_empty`."""
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
