"""What the store says was committed, and how Redis gets what it lacks of it."""

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.internal.v1 import batch_pb2, policy_pb2
from millrace.rollouts.batch_wire import closes_run, decode_header, decode_link
from millrace.runlog.catalogue import CHAIN_POINT
from millrace.runlog.names import Names, Stream
from millrace.runlog.records.frontier import NamedObjects, chain_hash, load_point
from millrace.runlog.records.known import KnownObjects, add_named, manifest_digest
from millrace.runlog.records.numbered import Epoch
from millrace.runlog.records.revisions import (
    StepHeaders,
    chain_broken,
    decode_stored,
    load_step,
    read_chunk,
    read_header,
)
from millrace.runlog.records.run_record import list_objects, list_policies, load_origin
from millrace.runlog.redis import damage
from millrace.runlog.redis.log import RunLog
from millrace.storage import ObjectStore
from millrace.storage.base import newest_revision

logger = logging.getLogger(__name__)

MAX_REDIS_BATCH_BYTES = 32 << 20
"""Above this, a batch's chunks stay in the store and only its header goes to Redis (docs/scale.md)."""

_WINDOW = 16  # steps fetched at once
_MAX_POINTS = 2  # the newest has no header after it where its writer died just then


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What the store has of a log."""

    last: batch_pb2.BatchHeader | None
    """The last header; None if nothing is committed."""
    chain: bytes
    """The chain hash after the last of them, or after the log's origin."""
    is_reopened: bool
    """The last one is a closing header that does not end the run: its successor comes next."""
    known: KnownObjects = field(default_factory=KnownObjects)
    """What the headers name."""

    @property
    def num_reopened(self) -> int:
        """Return how often the run failed and was reopened: the closing headers that do not end the run."""
        ends = self.last is not None and closes_run(self.last) and not self.is_reopened
        return len(self.known.closings) - ends


class ChainWalk:
    """Reads the chain of a run from some point on, header by header, and checks that each continues the one before."""

    def __init__(
        self,
        store: ObjectStore,
        names: Names,
        *,
        step: int,
        chain: bytes,
        known: KnownObjects,
        point: tuple[str, str] | None = None,
    ) -> None:
        """Begin before the header of `step`, with the chain hash `chain` and the objects that the headers before it
        name.

        `point` is the key, without the run's prefix, and the sha256 (hex) of the chain point that says so; None at the
        log's origin.
        """
        self._store, self._names = store, names
        self._step, self.chain, self.known = step, chain, known
        self._point = point
        self.is_proved = point is None
        """A header of the chain names the point."""
        self._last: tuple[int, int, bytes] | None = None

    @classmethod
    def from_origin(cls, store: ObjectStore, names: Names) -> "ChainWalk":
        """Return a walk that begins at the run's first header (blocking)."""
        origin = load_origin(store, names)
        return cls(store, names, step=origin.base_step, chain=origin.chain_hash, known=KnownObjects())

    @classmethod
    def from_point(cls, store: ObjectStore, names: Names, step: int) -> "ChainWalk | None":
        """Return a walk that begins after the chain point of a step (blocking).

        None if the point or the header of that step is missing or damaged, or if they do not agree.
        """
        try:
            point, sha256 = load_point(store, names, step)
            data = read_header(store, names, step, point.revision)
        except (CorruptObjectError, NotFoundError) as error:
            logger.warning("the chain is read from an earlier point", extra={"uid": names.uid, "problem": str(error)})
            return None
        # The point may only be believed if it has the hash of the header that is stored.
        before = decode_stored(decode_link, store, names, step, point.revision, data).previous_chain_hash
        if len(before) != len(point.chain_hash) or chain_hash(before, data) != point.chain_hash:
            logger.warning("a chain point is not that of its header", extra={"uid": names.uid, "step": step})
            return None
        known, named = KnownObjects.after(point, sha256), (CHAIN_POINT.path(step=step), sha256)
        return cls(store, names, step=step + 1, chain=point.chain_hash, known=known, point=named)

    def windows(self) -> Generator[list[StepHeaders | None], None, None]:
        """Read the headers of the next steps, and yield them, `_WINDOW` steps at a time and without an end (blocking).

        A step that is not committed is None.
        """
        # Headers are small, and what each costs is a round trip to the store: a window in parallel takes about one.
        with ThreadPoolExecutor(_WINDOW, thread_name_prefix="headers") as pool:
            for first in itertools.count(self._step, _WINDOW):
                steps = range(first, first + _WINDOW)
                yield list(pool.map(lambda step: load_step(self._store, self._names, step), steps))

    def add_window(self, window: Sequence[StepHeaders | None]) -> Committed | None:
        """Check and add the headers of the next steps.

        Return what is committed if the chain ends among them, else None. `CorruptObjectError` if a header does not
        continue the chain, or one is missing before others.
        """
        for place, found in enumerate(window):
            if found is not None:
                for revision, data in enumerate(found.revisions):
                    self._add(self._step, revision, data)
            if found is None or found.is_reopened:
                self._require_end(window[place + 1 :])
                return self._committed(is_reopened=found is not None)
            self._step += 1
        return None

    def _add(self, step: int, revision: int, data: bytes) -> None:
        """Check that a stored header continues the chain, and add what it names to what is known.

        `CorruptObjectError` unless it does, and is of this step and revision.
        """
        link = decode_stored(decode_link, self._store, self._names, step, revision, data)
        if (link.step, link.revision) != (step, revision) or link.previous_chain_hash != self.chain:
            where = self._store.uri(self._names.batch_header(step, revision))
            raise chain_broken(self._names, step, f"{where} does not continue the chain of batch {step - 1}")
        if not self.is_proved:
            self.is_proved = any((ref.key, ref.sha256.hex()) == self._point for ref in link.objects)
        self.known.note(link, data)
        self.chain = chain_hash(self.chain, data)
        self._last = step, revision, data

    def _committed(self, *, is_reopened: bool) -> Committed:
        """Return what is committed up to the last header that was added; `is_reopened` is passed on into the result."""
        last = None if self._last is None else decode_stored(decode_header, self._store, self._names, *self._last)
        return Committed(last=last, chain=self.chain, is_reopened=is_reopened, known=self.known)

    def _require_end(self, rest: Sequence[StepHeaders | None]) -> None:
        """Raise `CorruptObjectError` if a header is committed in `rest`, which comes after a step without one.

        Headers are written in order, so that one was lost.
        """
        later = [self._step + 1 + offset for offset, found in enumerate(rest) if found is not None]
        if later:
            where = self._store.uri(self._names.batch_header(self._step))
            message = f"header {where} is missing, but step {later[0]} is committed"
            raise chain_broken(self._names, self._step, message)


async def load_history(log: RunLog) -> Committed:
    """Return what is committed of a run: read every header from the newest proved chain point on, and check the chain.

    A header that was replaced or lost is found here; before that point the audit finds it. The cost does not grow with
    the run. Without a point that a later header proves, the headers are read from the log's origin on.
    """
    for step in await asyncio.to_thread(_newest_points, log):
        walk = await asyncio.to_thread(ChainWalk.from_point, log.store, log.names, step)
        # A point that no later header names may be anybody's.
        if walk is not None and (committed := await _walk(walk)).last is not None and walk.is_proved:
            return committed
    return await _walk(await asyncio.to_thread(ChainWalk.from_origin, log.store, log.names))


def load_closings(log: RunLog, committed: Committed) -> list[batch_pb2.BatchHeader]:
    """Return every closing header of the chain, also those after which the run was reopened (blocking).

    `CorruptObjectError` if one is not what the chain has there.
    """
    found: list[batch_pb2.BatchHeader] = []
    for each in committed.known.closings:
        data = read_header(log.store, log.names, each.step, each.revision)
        if hashlib.sha256(data).hexdigest() != each.sha256:
            where = log.store.uri(log.names.batch_header(each.step, each.revision))
            raise chain_broken(log.names, each.step, f"{where} is not the header that the chain has there")
        found.append(decode_stored(decode_header, log.store, log.names, each.step, each.revision, data))
    return found


def load_named(store: ObjectStore, names: Names, known: KnownObjects) -> NamedObjects:
    """Return all objects that the headers of a run name (blocking); `known` is what is known of its newest headers.

    They are read from the chain points. If one of these is missing or damaged, all headers are read.
    """
    try:
        return known.named(store, names)
    except (CorruptObjectError, NotFoundError) as error:
        logger.warning("every header is read for what it names", extra={"uid": names.uid, "problem": str(error)})
    walk, whole = ChainWalk.from_origin(store, names), NamedObjects()
    with contextlib.closing(walk.windows()) as windows:
        for window in windows:
            for data in [data for found in window if found is not None for data in found.revisions]:
                add_named(whole, decode_link(data))
            if walk.add_window(window) is not None:
                break
    return whole


def _newest_points(log: RunLog) -> list[int]:
    """Return the steps of the newest chain points, at most `_MAX_POINTS`, the newest first (blocking)."""
    places = map(CHAIN_POINT.parse, list_objects(log.store, log.names, CHAIN_POINT))
    return sorted((int(place["step"]) for place in places if place), reverse=True)[:_MAX_POINTS]


async def _walk(walk: ChainWalk) -> Committed:
    """Read the chain to its end, in another thread, and return what is committed."""
    with contextlib.closing(walk.windows()) as windows:
        while (committed := walk.add_window(await asyncio.to_thread(next, windows))) is None:
            pass
    return committed


async def reappend_committed(log: RunLog, epoch: Epoch) -> int:
    """Append to Redis, as the holder of `epoch`, every committed step that it lacks at its end, and return how many.

    `LogGoneError`, and a rebuild, if Redis has a step that was never committed.
    """
    step = await log.next_position(Stream.BATCHES)
    if step > 0 and await log.last_id(Stream.BATCHES) is not None:
        # Redis may claim a step that was never committed: nothing may be appended after it.
        await damage.require_backed(log, Stream.BATCHES, step - 1)
    count = 0
    while (data := await _get_header_in_force(log, step)) is not None:
        chunks = await asyncio.to_thread(_load_chunks, log.store, decode_header(data))
        (await log.append_batch(epoch, data, chunks)).require(f"repeating step {step} of run {log.uid}")
        step += 1
        count += 1
    if count:
        logger.info("repeated committed steps in Redis", extra={"uid": log.uid, "count": count, "next": step})
    return count


async def reappend_policies(log: RunLog, epoch: Epoch) -> int:
    """Append to Redis, as the holder of `epoch`, every published version that it lacks at its end; return how many.

    Of several lineages of a version the newest counts. `LogGoneError`, and a rebuild, if Redis has a version that was
    never published.
    """
    version = await log.next_position(Stream.POLICIES)
    if await log.last_id(Stream.POLICIES) is not None:
        await damage.require_backed(log, Stream.POLICIES, version - 1)
    entries = await asyncio.to_thread(_load_policies, log, version)
    for entry in entries:
        # Redis knows a repeated append by the hash of its bytes, so equal entries must have equal bytes.
        data = entry.SerializeToString(deterministic=True)
        (await log.append_policy(epoch, data, entry.version)).require(f"repeating version {entry.version}")
    return len(entries)


def _load_chunks(store: ObjectStore, header: batch_pb2.BatchHeader) -> list[bytes]:
    """Return the chunks of a batch for Redis, from the store.

    The list is empty when they stay in the store (too large), or retention removed them.
    """
    if sum(chunk.size_bytes for chunk in header.chunks) > MAX_REDIS_BATCH_BYTES:
        return []
    chunks = []
    for index, chunk in enumerate(header.chunks):
        try:
            chunks.append(read_chunk(store, header, index))
        except NotFoundError:
            logger.warning("chunk is not in the store any more", extra={"step": header.step, "key": chunk.key})
            return []
    return chunks


def _load_policies(log: RunLog, first: int) -> list[policy_pb2.PolicyEntry]:
    """Return the stream entries of the published versions from `first` on, up to the first that is missing
    (blocking).
    """
    # The list ascends, so the newest lineage of a version is the one that stays.
    newest = {version: lineage for version, lineage in list_policies(log.store, log.names) if version >= first}
    entries = []
    for version in range(first, first + len(newest)):
        # Redis takes versions without a gap (`script.APPEND`): nothing after the first that is missing can be appended.
        if version not in newest:
            break
        key = log.names.policy_manifest(newest[version], version)
        try:
            manifest = log.store.get(newest_revision(log.store, key), max_bytes=MAX_JSON_BYTES)
        except NotFoundError:  # uploaded in part: not published
            break
        except CorruptObjectError:  # larger than any manifest: damaged, as one that cannot be decoded is
            manifest = b""
        entries.append(
            policy_pb2.PolicyEntry(
                lineage=newest[version],
                version=version,
                manifest_key=key,
                manifest_sha256=hashlib.sha256(manifest).digest(),
                digest=manifest_digest(manifest),
            )
        )
    return entries


async def _get_step(log: RunLog, step: int) -> StepHeaders | None:
    """Load the committed headers of a step in another thread; None if nothing is committed of it."""
    return await asyncio.to_thread(load_step, log.store, log.names, step)


async def _get_header_in_force(log: RunLog, step: int) -> bytes | None:
    """Return the stored bytes of the header that counts of a step; None if there is none yet."""
    found = await _get_step(log, step)
    return None if found is None else found.in_force
