"""What is committed of a step: its header, or a chain of them where `run resume` reopened a run that had failed.

    batches/00000007.pb        closing header, FAILED: the run is over
    reopened/00000001.json     names its sha256: from here on it does not end the run
    batches/00000007.r1.pb     its successor (`storage/base.py`): batch 7, or the next closing header

Every object is create-only, and each names the one before: the record by its hash, the successor by the chain. What
the failed header resolved stays resolved (dropped as `run_failed`); the run goes on with new ordinals at the same step.
Only FAILED is ever superseded. Everything here reads the store (blocking).
"""

import datetime
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from millrace.decoding import MAX_JSON_BYTES, decode_object
from millrace.errors import CorruptObjectError, InvalidStateError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import MAX_HEADER_BYTES, closes_run, decode_header, decode_link, verify_chunk
from millrace.rollouts.types import Rollout
from millrace.rollouts.wire import decode_archive
from millrace.runlog.catalogue import BATCH_HEADER
from millrace.runlog.names import Deployment, Names
from millrace.runlog.records.frontier import Closing
from millrace.runlog.records.retirement import explain
from millrace.runlog.records.run_record import RunRecord, load_origin
from millrace.storage.base import MAX_GET_BYTES, ObjectStore

_MAX_RECORD_BYTES = 1 << 20

H = TypeVar("H", batch_pb2.BatchHeader, batch_pb2.BatchLink)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopening:
    """The record that a closing header does not end its run."""

    step: int
    revision: int
    closing_sha256: str
    """Of the stored bytes of the closing header, hex."""
    epoch: int
    """Orchestrator epoch that was taken for it: the driver before is fenced out. 0: copied by a fork."""
    owner: str
    time: str

    def encode(self) -> bytes:
        """Return the record as JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeaders:
    """The stored bytes of the committed headers of one step, by revision."""

    revisions: tuple[bytes, ...]
    is_reopened: bool
    """The last one is a failed closing header that does not end the run: its successor is still to come."""

    @property
    def in_force(self) -> bytes | None:
        """Return the stored bytes of the header that counts; None while the successor of a reopened one is to come."""
        return None if self.is_reopened else self.revisions[-1]


def is_failed_closing(header: batch_pb2.BatchHeader | batch_pb2.BatchLink) -> bool:
    """Return whether a header ends its run as FAILED: the only kind of header that can be superseded."""
    return closes_run(header) and header.outcome == batch_pb2.RUN_OUTCOME_FAILED


def decode_stored(
    decode: Callable[[bytes], H], store: ObjectStore, names: Names, step: int, revision: int, data: bytes
) -> H:
    """Decode the stored bytes of a header with `decode`; a `CorruptObjectError` names the object and the remedy.

    `step` and `revision` say which header it is, for that message.
    """
    try:
        return decode(data)
    except CorruptObjectError as error:
        raise CorruptObjectError(
            f"{store.uri(names.batch_header(step, revision))} cannot be read: {error.message}",
            reason=error.reason,
            remedy="restore the object from a replica of the bucket",
            metadata={"uid": names.uid, "step": str(step)},
        ) from error


def chain_broken(names: Names, step: int, message: str) -> CorruptObjectError:
    """Make the error for a header of `step` that is missing, or does not continue the chain."""
    return CorruptObjectError(
        message,
        reason="CHAIN_BROKEN",
        remedy="restore the header objects of the run from a replica of the bucket",
        metadata={"uid": names.uid, "step": str(step)},
    )


def load_step(store: ObjectStore, names: Names, step: int) -> StepHeaders | None:
    """Return the stored headers of a step, all revisions; None if nothing is committed of it (blocking).

    It is one request, but for a step at which a run failed. `CorruptObjectError` if one cannot be decoded.
    """
    revisions: list[bytes] = []
    while True:
        try:
            revisions.append(read_header(store, names, step, len(revisions)))
        except NotFoundError:
            break
        # Only a failed closing header may have a successor.
        if not is_failed_closing(decode_stored(decode_link, store, names, step, len(revisions) - 1, revisions[-1])):
            return StepHeaders(revisions=tuple(revisions), is_reopened=False)
    if not revisions:
        return None
    # Every revision is a failed closing header: either a record says that the last one was reopened, or it ends the
    # run.
    last = hashlib.sha256(revisions[-1]).hexdigest()
    is_reopened = any(record.closing_sha256 == last for record in load_reopenings(store, names))
    return StepHeaders(revisions=tuple(revisions), is_reopened=is_reopened)


def load_reopenings(store: ObjectStore, names: Names) -> list[Reopening]:
    """Return every record that reopened the run after a failure, in order (blocking)."""
    return [
        parse_reopening(store.get(info.key, max_bytes=_MAX_RECORD_BYTES), where=store.uri(info.key))
        for info in store.list(names.reopenings)
    ]


def last_reopened(store: ObjectStore, names: Names) -> int:
    """Return the newest step at which the run was reopened after a failure; 0 if it never was (blocking)."""
    return max((record.step for record in load_reopenings(store, names)), default=0)


def parse_reopening(data: bytes, *, where: str) -> Reopening:
    """Return the record in an object's bytes; CorruptObjectError, naming `where`, if it holds none."""
    remedy = "restore that object from a replica of the bucket"
    document = decode_object(data, what=where, reason="REOPENING_CORRUPT", remedy=remedy)
    try:
        found = Reopening(**document)
        if any(type(document[each.name]) is not each.type for each in fields(Reopening)):
            raise TypeError("a field has another type")
    except TypeError as error:
        raise CorruptObjectError(
            f"{where} does not say which closing header was reopened: {error}",
            reason="REOPENING_CORRUPT",
            remedy=remedy,
        ) from error
    return found


def list_headers(store: ObjectStore, names: Names) -> list[tuple[int, int]]:
    """Return (step, revision) of every header object in the store, ascending (blocking)."""
    places = (BATCH_HEADER.parse(info.key.removeprefix(names.root)) for info in store.list(names.batches))
    return sorted((int(place["step"]), int(place["revision"])) for place in places if place)


def load_newest(store: ObjectStore, names: Names) -> tuple[int, StepHeaders] | None:
    """Return the newest committed step and its headers; None if nothing is committed (blocking).

    It takes a logarithmic number of requests: headers are written one after the other and stay until the run is
    deleted, so the newest is found by bisection.
    """
    first = load_origin(store, names).base_step

    def exists(step: int) -> bool:
        return store.head(names.batch_header(step)) is not None

    if not exists(first):
        return None
    low, width = first, 1
    # Doubling, then bisection: steps are committed without gaps.
    while exists(low + width):
        low, width = low + width, 2 * width
    high = low + width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    found = load_step(store, names, low)
    # None if the run was deleted between the two requests.
    return None if found is None else (low, found)


def read_header(store: ObjectStore, names: Names, step: int, revision: int = 0) -> bytes:
    """Return the stored bytes of a step's header (blocking); `NotFoundError` if there is none.

    A `revision` from 1 on is that of the successor of a failed closing header.
    """
    return store.get(names.batch_header(step, revision), max_bytes=MAX_HEADER_BYTES)


def read_chunk(store: ObjectStore, header: batch_pb2.BatchHeader, index: int) -> bytes:
    """Return the bytes of chunk `index` of a committed header, checked against its hash there (blocking).

    `NotFoundError` if it is missing, with the record if it was retired; `CorruptObjectError` if it differs from the
    header.
    """
    chunk = header.chunks[index]
    data = _get(store, chunk.key, max_bytes=min(chunk.size_bytes, MAX_GET_BYTES))
    verify_chunk(header, index, data)
    return data


def read_archive(store: ObjectStore, header: batch_pb2.BatchHeader) -> bytes:
    """Return the archive of the rollouts that a committed header resolves, as it is stored; empty if it names none.

    `NotFoundError` if it is missing, with the record if it was retired; `CorruptObjectError` if it differs from the
    header.
    """
    if not header.rollouts_key:
        return b""
    data, where = _get(store, header.rollouts_key), store.uri(header.rollouts_key)
    if hashlib.sha256(data).digest() != header.rollouts_sha256:
        raise CorruptObjectError(
            f"the archive of batch {header.step} ({where}) has not the sha256 that its header names",
            reason="ARCHIVE_CORRUPT",
            remedy="restore the object from a replica of the bucket (`millrace run repair`)",
        )
    return data


def _get(store: ObjectStore, key: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
    """Return an object that a header names; `NotFoundError` names the record of its retirement, if it was retired."""
    try:
        return store.get(key, max_bytes=max_bytes)
    except NotFoundError as error:
        raise explain(store, key, error) from error


def read_rollouts(store: ObjectStore, header: batch_pb2.BatchHeader) -> list[Rollout]:
    """Return the rollouts that a committed header resolves, none if it archives none (blocking).

    Raises as `read_archive`.
    """
    data = read_archive(store, header)
    return decode_archive(data) if data else []


def has_ended(store: ObjectStore, names: Names) -> bool:
    """Return whether a run is closed and not reopened, or is deleted: nobody reads its rollouts any more (blocking)."""
    try:
        newest = load_newest(store, names)
    except NotFoundError:
        # Even run.json is gone: the run is deleted, its tombstone included.
        return True
    return store.head(names.tombstone) is not None or _is_closing(newest)


def is_closed(store: ObjectStore, names: Names) -> bool:
    """Return whether the header that counts closes the run, whether or not the run has a tombstone (blocking).

    `NotFoundError` if the run has no `run.json`.
    """
    return _is_closing(load_newest(store, names))


def _is_closing(newest: tuple[int, StepHeaders] | None) -> bool:
    """Return whether the newest step's header that counts closes the run; `newest` is what `load_newest` returned."""
    if newest is None or (header := newest[1].in_force) is None:
        return False
    return closes_run(decode_header(header))


def is_end(store: ObjectStore, names: Names, state: str) -> bool:
    """Return whether the store confirms an event that the run ended in `state` ("SUCCEEDED", …) (blocking).

    It does if a closing header says so, also one that was reopened, or if the run is deleted.
    """
    try:
        newest = load_newest(store, names)
    except NotFoundError:
        return True
    headers = [] if newest is None else [decode_header(data) for data in newest[1].revisions]
    outcome = batch_pb2.RunOutcome.Value(f"RUN_OUTCOME_{state}")
    if any(closes_run(header) and header.outcome == outcome for header in headers):
        return True
    if store.head(names.tombstone) is not None:
        return True
    return state == "FAILED" and next(iter(store.list(names.reopenings)), None) is not None


def is_reopened(store: ObjectStore, names: Names) -> bool:
    """Return whether a run that has failed goes on: it was reopened, and has not ended again (blocking)."""
    return next(iter(store.list(names.reopenings)), None) is not None and not has_ended(store, names)


def find_closing(store: ObjectStore, names: Names) -> Closing | None:
    """Return the closing header that ends the run as FAILED; None if the run is open, or was reopened (blocking).

    `InvalidStateError` if it ended otherwise.
    """
    newest = load_newest(store, names)
    if newest is None or newest[1].is_reopened:
        return None
    step, headers = newest
    header = decode_header(headers.revisions[-1])
    if not closes_run(header):
        return None
    if not is_failed_closing(header):
        outcome = batch_pb2.RunOutcome.Name(header.outcome).removeprefix("RUN_OUTCOME_")
        raise InvalidStateError(
            f"run {names.uid} ended as {outcome}, which is for good: only a run that FAILED can be reopened",
            reason="RUN_ENDED",
            remedy="`millrace run fork` starts a new run at one of its steps",
            metadata={"state": outcome},
        )
    sha256 = hashlib.sha256(headers.revisions[-1]).hexdigest()
    return Closing(step=step, revision=len(headers.revisions) - 1, sha256=sha256)


def reopen(store: ObjectStore, names: Names, closing: Closing, *, epoch: int, owner: str) -> bool:
    """Record that a closing header does not end its run.

    Return False if that is recorded already, by any process (blocking). The run is marked as open before. `epoch` is
    the orchestrator's epoch that was taken for it, `owner` who took it. Of several callers one wins. Each record is for
    a closing header that was written after the record before, so a caller that is late finds its number taken and its
    own header named.
    """
    time = datetime.datetime.now(datetime.UTC).isoformat()
    record = Reopening(
        step=closing.step,
        revision=closing.revision,
        closing_sha256=closing.sha256,
        epoch=epoch,
        owner=owner,
        time=time,
    )
    run_json = store.get(names.run_json, max_bytes=MAX_JSON_BYTES)
    name = RunRecord.parse(run_json, where=store.uri(names.run_json), needs=["name"]).name
    while True:
        known = load_reopenings(store, names)
        if any(each.closing_sha256 == closing.sha256 for each in known):
            return False
        # Before the record, without which it is harmless: an orchestrator that begins later looks at marked runs only.
        store.create(Deployment(names.prefix).open_object(names.uid, len(known) + 1), name.encode())
        # Another record took that number meanwhile: look whether it is of this closing header.
        if store.create(names.reopened(len(known) + 1), record.encode()):
            return True
