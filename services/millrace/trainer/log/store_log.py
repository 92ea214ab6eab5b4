"""A run's batches from the object store alone: for replays, which work without Redis and write nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.errors import InvalidStateError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import closes_run, decode_header
from millrace.runlog.names import Names
from millrace.runlog.records.listing import list_checkpoints
from millrace.runlog.records.revisions import list_headers, load_step, read_chunk, read_header
from millrace.storage.base import ObjectStore


@dataclass(frozen=True, slots=True)
class KeptRange:
    """The batches that can be recomputed, from `first` to `last`; none if `last` is below `first`. People see steps."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"steps {self.first + 1} to {self.last + 1}" if self.first <= self.last else "no step"


class StoreLog:
    """The `BatchLog` of a replay. `base_step` is the first step that the run's log ever had."""

    def __init__(self, store: ObjectStore, names: Names, *, base_step: int) -> None:
        self._store = store
        self._names = names
        self._base_step = base_step
        self._headers: dict[int, batch_pb2.BatchHeader] = {}

    def poll_header(self, step: int, *, timeout_s: float) -> bytes | None:
        """The header of a committed step; InvalidStateError naming the kept range if it is not there."""
        found = load_step(self._store, self._names, step)
        if found is None:
            raise self.not_kept(step)
        data = found.revisions[-1]
        self._headers[step] = decode_header(data)
        return data

    def read_superseded(self, step: int, revisions: int) -> list[bytes]:
        """The first so many headers of a step, as stored."""
        return [read_header(self._store, self._names, step, revision) for revision in range(revisions)]

    def read_chunks(self, step: int, chunks: Sequence[int]) -> dict[int, bytes]:
        """The named chunks of a step whose header was read; InvalidStateError if retention has removed one."""
        found: dict[int, bytes] = {}
        for index in chunks:
            try:
                found[index] = read_chunk(self._store, self._headers[step], index)
            except NotFoundError as error:
                raise self.not_kept(step) from error
        return found

    def prefetch(self, step: int) -> None:
        """Nothing: a replay reads what it needs when it needs it."""

    def is_stop_requested(self) -> bool:
        """Never: Ctrl-C ends the process, and nothing is left behind."""
        return False

    def kept(self) -> KeptRange:
        """What can be recomputed: from the oldest checkpoint, or from the start while its batches are kept."""
        last = max((step for step, _ in list_headers(self._store, self._names)), default=-1)
        if last >= 0 and closes_run(self._header(last)):
            last -= 1
        first = next(list_checkpoints(self._store, self._names), last + 1)
        if self._base_step == 0 and last >= 0 and self._has_data(0):
            first = 0
        return KeptRange(first, last)

    def not_kept(self, step: int) -> InvalidStateError:
        """The error for a step outside the range: one that is not there yet, or one that is not there any more."""
        kept = self.kept()
        if step > kept.last:
            return InvalidStateError(
                f"step {step + 1} of run {self._names.uid} is not there (yet): it has {kept.last + 1}",
                reason="STEP_NOT_COMMITTED",
                remedy=f"choose one of {kept}" if kept.first <= kept.last else "wait for its first batches",
                metadata={"uid": self._names.uid, "step": str(step)},
            )
        return InvalidStateError(
            f"step {step + 1} of run {self._names.uid} is too old to be recomputed: {self._store.describe()} keeps "
            f"what is needed for {kept}",
            reason="STEP_NOT_KEPT",
            remedy="choose a step of that range; [ckpt] keep_last and keep_interval decide what later runs keep",
            metadata={"uid": self._names.uid, "step": str(step)},
        )

    def _header(self, step: int) -> batch_pb2.BatchHeader:
        found = load_step(self._store, self._names, step)
        if found is None:
            raise NotFoundError(f"batch {step} of run {self._names.uid} was deleted just now", reason="RUN_NOT_FOUND")
        return decode_header(found.revisions[-1])

    def _has_data(self, step: int) -> bool:
        return all(self._store.head(chunk.key) is not None for chunk in self._header(step).chunks)
