"""The run's batches in order, verified, from Redis and the store, or from the store alone.

Rank 0 waits for each header and sends its bytes to the others, so that no rank waits inside a collective for longer
than one poll. Every rank then plans the same micro-batches from the header's sample table and reads only the chunks
that hold its own samples.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.errors import CorruptObjectError, InternalError, InvalidStateError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import chunks_for, closes_run, decode_header, unpack_batch
from millrace.rollouts.types import TrainSample
from millrace.runlog.names import Names
from millrace.runlog.records.frontier import chain_hash
from millrace.runlog.records.retirement import steps_retired
from millrace.runlog.records.revisions import list_headers, load_step, read_chunk, read_header
from millrace.runlog.records.run_record import list_checkpoints
from millrace.storage.base import ObjectStore
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import BatchLayout, MicroBatch, Minibatch, StepRows, build_micro_batch
from millrace.trainer.learning.plan import Rows, in_order, plan_micro_batches, plan_minibatches
from millrace.trainer.log.background import StopRequested

POLL_S = 0.5  # how soon a stop is noticed while there is no batch


class PolicyRepublisher(Protocol):
    """Publishes damaged policies again, between two batches; `Republisher` is one."""

    def policy_to_republish(self, version: int) -> bytes | None:
        """Return the policy `version`, encoded, if damage to it was reported since the last call; else None.

        Called at rank 0 only; then all ranks pass the result to `republish`. `version` is the newest policy version: no
        other has live weights to publish. Each report is returned once.
        """
        ...

    def republish(self, policy: bytes) -> None:
        """Publish the encoded policy again.

        Called at every rank, with what `policy_to_republish` returned at rank 0.
        """
        ...


class BatchLog(Protocol):
    """The part of a run's log that is needed to read batches; `LogClient` is one."""

    def poll_header(self, step: int, *, timeout_s: float) -> bytes | None:
        """Wait up to `timeout_s` for the header of batch `step`, and return its bytes as stored.

        None if it is not there.
        """
        ...

    def read_superseded(self, step: int, revisions: int) -> list[bytes]:
        """Return the first `revisions` headers of batch `step` as stored: failed closing headers that were replaced."""
        ...

    def read_chunks(self, step: int, chunks: Sequence[int]) -> dict[int, bytes]:
        """Return the chunks of batch `step`, whose header is there, that have the indices `chunks`, by index."""
        ...

    def prefetch(self, step: int) -> None:
        """Start to read batch `step` in the background, so that `poll_header` finds it."""
        ...

    def is_stop_requested(self) -> bool:
        """Return whether to raise StopRequested rather than continue to wait."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A committed batch, or the closing header, which is one minibatch.

    `chain_hash` is H(step); `wait_s` are the seconds of waiting for the header, `load_s` those of reading and padding.
    """

    header: batch_pb2.BatchHeader
    chain_hash: bytes
    minibatches: list[Minibatch]
    wait_s: float
    load_s: float

    @property
    def step(self) -> int:
        """Return the batch's number, counted from 0; for a closing header, the number of steps of the run."""
        return self.header.step

    @property
    def is_closing(self) -> bool:
        """Return whether this is the run's closing header, whose samples are scored and not trained on."""
        return closes_run(self.header)

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of all minibatches, in order."""
        return [micro_batch for minibatch in self.minibatches for micro_batch in minibatch.micro_batches]


class Batches:
    """Reads batches from a step on, at every rank of a gang."""

    def __init__(
        self,
        batch_log: BatchLog,
        *,
        gang: Gang,
        run_uid: str,
        run_hash: str,
        previous_chain_hash: bytes,
        layout: BatchLayout,
        republisher: PolicyRepublisher | None = None,
        dataset: StepRows | None = None,
    ) -> None:
        """Read batches from `batch_log` that follow the one with the chain hash `previous_chain_hash`.

        `run_hash` is the sha256 of the run's config, which each header must have. `republisher` publishes damaged
        policies again during waits; `dataset` has rows to learn beside rollouts. None: none.
        """
        self._log = batch_log
        self._gang = gang
        self._run_uid = run_uid
        self._run_hash = run_hash
        self._chain_hash = previous_chain_hash
        self._layout = layout
        self._republisher = republisher
        self._dataset = dataset

    def follow(self, start_step: int) -> Iterator[Batch]:
        """Yield every batch from number `start_step` on, the closing header last, as each is committed.

        Raises as `read`. Collective in a gang.
        """
        step = start_step
        while True:
            batch = self.read(step)
            yield batch
            if batch.is_closing:
                return
            step += 1

    def read(self, step: int) -> Batch:
        """Wait for batch `step`, and return it after verifying that it continues the chain.

        Batches must be read in order. During the wait damaged policies are published again. Raises CorruptObjectError
        for a broken chain or damaged data, and StopRequested if asked to stop, at every rank. Collective in a gang.
        """
        began = time.monotonic()
        header_bytes = self._wait_for_header(step)
        arrived = time.monotonic()
        header = decode_header(header_bytes)
        with agreed(self._gang):  # a rank that finds damage, or cannot read, ends the training at all ranks
            # The chain has every revision: a failed closing header that was reopened is part of the history.
            for revision, data in enumerate(self._log.read_superseded(step, header.revision)):
                closing = decode_header(data)
                self._verify(closing, step, revision)
                self._chain_hash = chain_hash(self._chain_hash, data)
            self._verify(header, step, header.revision)
            self._chain_hash = chain_hash(self._chain_hash, header_bytes)
            minibatches = self._minibatches(header)
        if not closes_run(header) and self._gang.is_leader:
            # The others get the header from rank 0, and then read only the chunks that have their samples.
            self._log.prefetch(step + 1)
        return Batch(
            header=header,
            chain_hash=self._chain_hash,
            minibatches=minibatches,
            wait_s=arrived - began,
            load_s=time.monotonic() - arrived,
        )

    def _wait_for_header(self, step: int) -> bytes:
        """Wait for the header of batch `step`, and return its bytes; publish damaged policies again meanwhile.

        Rank 0 polls, and sends the gang `wait`, `stop`, `redo` with a policy to publish again, or `head` with the
        header. Raises StopRequested. Collective in a gang.
        """

        def look() -> bytes:
            """Return what all ranks do next: `wait`, `stop`, `redo` and a policy, or `head` and the header."""
            if self._log.is_stop_requested():
                return b"stop"
            if self._republisher is not None and (policy := self._republisher.policy_to_republish(step)) is not None:
                return b"redo" + policy
            header = self._log.poll_header(step, timeout_s=POLL_S)  # registers the wait
            return b"wait" if header is None else b"head" + header

        while True:
            order = self._gang.from_leader(look)
            match order[:4]:
                case b"head":
                    return order[4:]
                case b"stop":
                    raise StopRequested
                # Publishing is collective: every rank does it here, and rank 0 not inside of `look`.
                case b"redo" if self._republisher is not None:
                    self._republisher.republish(order[4:])
                case b"wait":
                    continue
                case _:
                    raise InternalError(f"rank 0 sent {order[:4]!r} while batch {step} was awaited")

    def _minibatches(self, header: batch_pb2.BatchHeader) -> list[Minibatch]:
        """Read this rank's samples of a batch, and make its micro-batches of each minibatch.

        The rows of the dataset are dealt to the minibatches in turn; their indices follow those of the sample table.
        """
        layout, is_closing = self._layout, closes_run(header)
        # A closing header's samples are scored at once, whatever the number of minibatches.
        parts = plan_minibatches([entry.ordinal for entry in header.samples], 1 if is_closing else layout.minibatches)
        rows = [] if self._dataset is None or is_closing else self._dataset.samples(header.step)
        end = len(header.samples)
        lengths = [*(entry.length for entry in header.samples), *(row.num_tokens for row in rows)]
        dealt = [[*part, *range(end + at, len(lengths), len(parts))] for at, part in enumerate(parts)]
        plans = [self._plan(lengths, part) for part in dealt]
        places = {index for plan in plans for rows_of_plan in plan for row in rows_of_plan for index in row}
        indices = sorted(index for index in places if index < end)
        chunks = self._log.read_chunks(header.step, chunks_for(header, indices))
        samples: dict[int, TrainSample] = dict(zip(indices, unpack_batch(header, chunks, only=indices), strict=True))
        samples |= {end + at: row for at, row in enumerate(rows)}
        return [self._minibatch(plan, samples) for plan in plans]

    def _minibatch(self, plan: Sequence[Rows], samples: Mapping[int, TrainSample]) -> Minibatch:
        """Make this rank's micro-batches of a minibatch as `plan` says; `samples` are by index, as in the plan."""
        micro_batches, places = list[MicroBatch](), list[list[int]]()
        for rows in plan:
            flat = [index for row in rows for index in row]
            micro_batches.append(
                build_micro_batch(
                    [samples[index] for index in flat],
                    rows=in_order(rows),
                    seq_len=self._layout.seq_len,
                    device=self._gang.device,
                    routing=self._layout.routing,
                )
            )
            places.append(flat)
        return Minibatch(micro_batches=micro_batches, samples=places)

    def _plan(self, lengths: Sequence[int], part: Sequence[int]) -> list[Rows]:
        """Return this rank's micro-batches of the samples `part`; `part` and the result are indices into `lengths`."""
        plan = plan_micro_batches(
            # Longer samples are cut when rows are laid out, and the plan counts what is left of them.
            [min(lengths[index], self._layout.seq_len) for index in part],
            max_tokens=self._layout.micro_batch_tokens,
            world_size=self._gang.layout.data_size,
            packing=self._layout.packing,
        )
        return [[[part[place] for place in row] for row in rows] for rows in plan[self._gang.data_rank]]

    def _verify(self, header: batch_pb2.BatchHeader, step: int, revision: int) -> None:
        """Raise CorruptObjectError unless the header is that revision of batch `step` and continues the chain."""
        expected = {
            "run_uid": (header.run_uid, self._run_uid),
            "step": (header.step, step),
            "revision": (header.revision, revision),
            "run_hash": (header.run_hash, self._run_hash),
            "previous_chain_hash": (header.previous_chain_hash.hex(), self._chain_hash.hex()),
        }
        wrong = {name: pair for name, pair in expected.items() if pair[0] != pair[1]}
        if wrong:
            raise CorruptObjectError(
                f"batch {step} does not follow what this trainer was trained on (found, expected): {json.dumps(wrong)}",
                reason="BATCH_CHAIN_BROKEN",
                remedy="the log and the checkpoint belong to different histories: resume from an older checkpoint",
            )


# A run's batches from the object store alone: for replays, which work without Redis and write nothing.


@dataclass(frozen=True, slots=True)
class KeptRange:
    """The batches that can be recomputed, `first` to `last`; none if `last` is below `first`. `str` shows steps."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"steps {self.first + 1} to {self.last + 1}" if self.first <= self.last else "no step"


class StoreLog:
    """The `BatchLog` of a replay. `base_step` is the first step that the run's log ever had."""

    def __init__(self, store: ObjectStore, names: Names, *, base_step: int) -> None:
        """Read a run's batches from the store.

        `base_step` is the first batch that its log ever had, above 0 in a fork.
        """
        self._store = store
        self._names = names
        self._base_step = base_step
        self._headers: dict[int, batch_pb2.BatchHeader] = {}

    def poll_header(self, step: int, *, timeout_s: float) -> bytes | None:
        """Return the newest header of batch `step` as stored, at once; `timeout_s` is ignored.

        Raises InvalidStateError naming the steps that are kept if the batch has no header.
        """
        found = load_step(self._store, self._names, step)
        if found is None:
            raise self.not_kept(step)
        data = found.revisions[-1]
        self._headers[step] = decode_header(data)
        return data

    def read_superseded(self, step: int, revisions: int) -> list[bytes]:
        """Return the first `revisions` headers of batch `step` as stored, oldest first."""
        return [read_header(self._store, self._names, step, revision) for revision in range(revisions)]

    def read_chunks(self, step: int, chunks: Sequence[int]) -> dict[int, bytes]:
        """Return the chunks of a batch with the indices `chunks`, by index.

        `poll_header` must have returned its header. Raises InvalidStateError naming the steps that are kept if a chunk
        has been deleted.
        """
        found: dict[int, bytes] = {}
        for index in chunks:
            try:
                found[index] = read_chunk(self._store, self._headers[step], index)
            except NotFoundError as error:
                raise self.not_kept(step) from error
        return found

    def prefetch(self, step: int) -> None:
        """Do nothing: a replay reads when it needs the data."""

    def is_stop_requested(self) -> bool:
        """Return False: Ctrl-C ends the process and leaves nothing to release."""
        return False

    def kept(self) -> KeptRange:
        """Return the batches that can be recomputed: from the oldest checkpoint, or from 0 if batch 0 is whole."""
        last = max((step for step, _ in list_headers(self._store, self._names)), default=-1)
        # A closing header is no step.
        if last >= 0 and closes_run(self._header(last)):
            last -= 1
        below, _ = steps_retired(self._store, self._names)
        first = next((each for each in list_checkpoints(self._store, self._names) if each >= below), last + 1)
        if self._base_step == 0 and last >= 0 and self._has_data(0):
            first = 0
        return KeptRange(first, last)

    def not_kept(self, step: int) -> InvalidStateError:
        """Make the error for a batch after the kept range (STEP_NOT_COMMITTED) or before it (STEP_NOT_KEPT)."""
        kept = self.kept()
        if step > kept.last:
            return InvalidStateError(
                f"step {step + 1} of run {self._names.uid} is not there (yet): it has {kept.last + 1}",
                reason="STEP_NOT_COMMITTED",
                remedy=f"choose one of {kept}" if kept.first <= kept.last else "wait for its first batches",
                metadata={"uid": self._names.uid, "step": str(step)},
            )
        _, retired = steps_retired(self._store, self._names)
        return InvalidStateError(
            f"step {step + 1} of run {self._names.uid} is too old to be recomputed: {self._store.describe()} keeps "
            f"what is needed for {kept}" + (f"; {retired}" if retired else ""),
            reason="STEP_NOT_KEPT",
            remedy="choose a step of that range; [ckpt] keep_last and keep_interval, and orchestrator.retain_batches, "
            "decide what later runs keep",
            metadata={"uid": self._names.uid, "step": str(step)},
        )

    def _header(self, step: int) -> batch_pb2.BatchHeader:
        """Read the newest header of batch `step`; raise NotFoundError if there is none."""
        found = load_step(self._store, self._names, step)
        if found is None:
            raise NotFoundError(f"batch {step} of run {self._names.uid} was deleted just now", reason="RUN_NOT_FOUND")
        return decode_header(found.revisions[-1])

    def _has_data(self, step: int) -> bool:
        """Return whether the store has every chunk of batch `step`."""
        return all(self._store.head(chunk.key) is not None for chunk in self._header(step).chunks)
