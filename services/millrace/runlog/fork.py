"""A fork: a run that begins with a copy of another run's state at a step. The parent is only read.

    planned    `parent` of the fork's run.json says what it is made of, for good: base_step (the newest checkpoint of
               the parent at or before the step), the chain hash and the resolved ordinals there
    copied     headers base_step … step - 1 with their chunks and archives, and checkpoint base_step, under the own uid;
               where the parent failed and was reopened, the closing header too: what it resolved stays resolved
    committed  by the fork's name, as every run is (see `index`)

The fork's trainer begins with that checkpoint, replays the copied batches and goes on; versions and steps keep their
numbers. Everything is written under names that follow from the parent's, so a copy that was killed is completed by the
same request, and two that run at once write the same bytes.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from millrace.decoding import MAX_JSON_BYTES, Fields, decode_object
from millrace.errors import ConflictError, CorruptObjectError, InvalidSpecError, InvalidStateError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import closes_run, decode_header
from millrace.runlog.names import Names
from millrace.runlog.records.frontier import Frontier, chain_hash
from millrace.runlog.records.retirement import explain, steps_retired
from millrace.runlog.records.revisions import chain_broken, list_headers, load_reopenings, load_step, read_header
from millrace.runlog.records.run_record import (
    RunOrigin,
    RunRecord,
    list_checkpoints,
    load_origin,
    parse_origin,
    require_exists,
)
from millrace.storage import ObjectStore
from millrace.storage.base import newest_revision, require_checksum, with_checksum
from millrace.storage.scratch import owned_directory

logger = logging.getLogger(__name__)

_PARALLEL_COPIES = 4
_MAX_OBJECTS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPlan:
    """What a fork is made of."""

    uid: str
    """Uid of the parent."""
    name: str
    """Name of the parent at that time."""
    step: int
    """First step that the fork does itself; its start is the policy version of this number."""
    base_step: int
    """The checkpoint that is copied; 0 without one is the start model."""
    checkpoints: tuple[int, ...]
    """Steps that the parent could be forked at without a replay."""
    chain_hash: bytes
    frontier: Frontier
    orchestrator_state: str = ""
    """What the parent's orchestrator kept at `base_step`, JSON; empty where it draws tasks by nothing of that."""

    def to_json(self) -> dict[str, Any]:
        """Return the `parent` of the fork's run.json, as `parse_origin` and `copy_fork` read it."""
        return {
            "uid": self.uid,
            "name": self.name,
            "step": self.step,
            "base_step": self.base_step,
            "chain_hash": self.chain_hash.hex(),
            "resolved_below": self.frontier.resolved_below,
            "resolved_above": sorted(self.frontier.resolved_above),
            **({"orchestrator_state": self.orchestrator_state} if self.orchestrator_state else {}),
        }


def plan_fork(store: ObjectStore, parent: Names, *, name: str, step: int) -> ForkPlan:
    """Return what a fork of `parent` at `step` is made of (blocking); nothing is written. `name` is the parent's.

    `InvalidStateError` naming the range if the step is not kept, `CorruptObjectError` if the checkpoint is not of this
    history, `NotFoundError` if the parent is being deleted.
    """
    require_exists(store, parent)
    origin = load_origin(store, parent)
    num_steps = _count_steps(store, parent, origin)
    kept = _kept_checkpoints(store, parent, origin, num_steps)
    below, retired = steps_retired(store, parent)
    # From a checkpoint before the step the fork replays the batches between them, which must not be retired.
    starts = [each for each in kept if each <= step and (each == step or each >= below)]
    if not starts or step > num_steps:
        whole = [each for each in kept if each >= below]
        exact = "".join(f", and step {each}" for each in kept[-8:] if each < below)
        span = f"steps {whole[0]} to {num_steps}{exact}" if whole else exact.removeprefix(", and ")
        span = span or "no step: it keeps no checkpoint and not all batches"
        raise InvalidStateError(
            f"run {name!r} cannot be forked at step {step}: it keeps {span}" + (f"; {retired}" if retired else ""),
            reason="STEP_NOT_KEPT",
            remedy="choose a step in that range" if kept else "keep checkpoints: ckpt.interval, ckpt.keep_last",
            metadata={"oldest": str(kept[0] if kept else ""), "newest": str(num_steps)},
        )
    base_step = starts[-1]
    chain, frontier, state = _state_before(store, parent, origin, base_step)
    plan = ForkPlan(
        uid=parent.uid,
        name=name,
        step=step,
        base_step=base_step,
        checkpoints=tuple(kept),
        chain_hash=chain,
        frontier=frontier,
        orchestrator_state=_drawing_state(state),
    )
    if store.head(parent.checkpoint_manifest(base_step)) is not None:
        manifest = _load_manifest(store, parent.checkpoint_manifest(base_step))
        # A checkpoint is of this history only if it was written after the same headers.
        if manifest["chain_hash"] != chain.hex():
            raise CorruptObjectError(
                f"checkpoint {base_step} of run {name!r} does not follow the committed headers",
                reason="CHECKPOINT_CHAIN_MISMATCH",
                remedy=f"see `millrace run audit {name}`, and fork at a step before this checkpoint",
            )
    return plan


def copy_fork(store: ObjectStore, prefix: str, uid: str, run_json: bytes) -> None:
    """Copy what the fork `uid` begins with, as its run.json (`run_json`) says, from its parent (blocking).

    Do nothing for a run that is no fork. Repeating it completes it. `InvalidStateError` (PARENT_GONE) if the parent
    does not keep it any more, `CorruptObjectError` if the parent's objects are not what their hashes say.
    """
    where = store.uri(Names(prefix, uid).run_json)
    record = RunRecord.parse(run_json, where=where, needs=["run_hash"])
    if record.parent is None:
        return
    try:
        parent = Fields(record.parent, what="parent")
        source, name = Names(prefix, parent.text("uid")), parent.text("name")
        base_step, step = parent.integer("base_step"), parent.integer("step")
    except (ValueError, InvalidSpecError) as error:  # the second: a uid that is none
        raise CorruptObjectError(
            f"{where} names no parent to copy: {error}",
            reason="RUN_JSON_CORRUPT",
            remedy="restore the object from a replica of the bucket, or fork again with a new request_id",
        ) from error
    origin = parse_origin(run_json, where=where)
    copy = _Copy(store=store, source=source, target=Names(prefix, uid), run_hash=record.run_hash, origin=origin)
    try:
        # The fork's run.json is written by now: either a deletion of the parent sees it, or its tombstone is seen here.
        require_exists(store, source)
        copy.run(base_step=base_step, step=step)
    except NotFoundError as error:
        raise InvalidStateError(
            f"run {name!r} does not keep any more what a fork at step {step} needs: {error.message}",
            reason="PARENT_GONE",
            remedy="fork it again at a newer step, with a new request_id",
            metadata={"parent": source.uid},
        ) from error


@dataclass(kw_only=True)
class _Copy:
    """One copy under way."""

    store: ObjectStore
    source: Names
    target: Names
    run_hash: str
    origin: RunOrigin
    _todo: list[Callable[[], None]] = field(default_factory=list)
    _num_reopened: int = 0

    def run(self, *, base_step: int, step: int) -> None:
        """Copy the headers of `base_step` to `step` - 1, what they name, and last the checkpoint of `base_step`."""
        # The parent's chain proves what is read, the fork's own one is over what is written.
        chain, own_chain = self.origin.parent_chain_hash, self.origin.chain_hash
        for number in range(base_step, step):
            chain, own_chain = self._headers(number, chain, own_chain)
        self._verify_follower(step, chain)
        manifest = self._checkpoint(base_step)
        with ThreadPoolExecutor(_PARALLEL_COPIES, thread_name_prefix="fork") as pool:
            # The headers are there before what they name, which is harmless: nobody sees the fork before its name is
            # committed.
            for copied in [pool.submit(copy) for copy in self._todo]:
                copied.result()
        # The manifest commits the checkpoint, so it is written after all that it names.
        if manifest is not None:
            self._create(self.target.checkpoint_manifest(base_step), manifest)
        logger.info(
            "forked",
            extra={"uid": self.target.uid, "parent": self.source.uid, "base_step": base_step, "step": step},
        )

    def _decode_header(self, step: int, revision: int, data: bytes, chain: bytes) -> batch_pb2.BatchHeader:
        """Decode a header of the parent.

        `CorruptObjectError` unless it is of this step and revision and continues the chain hash `chain`.
        """
        header = decode_header(data)
        if header.previous_chain_hash != chain or (header.step, header.revision) != (step, revision):
            where = self.store.uri(self.source.batch_header(step, revision))
            raise chain_broken(self.source, step, f"{where} does not continue the chain of batch {step - 1}")
        return header

    def _verify_follower(self, step: int, chain: bytes) -> None:
        """Raise `CorruptObjectError` if the parent has a header of `step` that does not continue the chain hash
        `chain`.

        It is the first header that is not copied: it proves the ones before.
        """
        if self.store.head(self.source.batch_header(step)) is not None:
            self._decode_header(step, 0, read_header(self.store, self.source, step), chain)

    def _headers(self, step: int, chain: bytes, own_chain: bytes) -> tuple[bytes, bytes]:
        """Write a step's headers as the fork's own; return both chain hashes after them, the parent's and the fork's.

        `chain` and `own_chain` are those before them. What the headers name is noted to be copied, and records of
        reopenings are copied. NotFoundError if the parent does not have them.
        """
        found = load_step(self.store, self.source, step)
        if found is None:
            raise NotFoundError(f"{self.store.uri(self.source.batch_header(step))} does not exist")
        records = {record.closing_sha256: record for record in load_reopenings(self.store, self.source)}
        for revision, data in enumerate(found.revisions):
            chain, own_chain, own = self._header(step, revision, data, chain, own_chain)
            if record := records.get(hashlib.sha256(data).hexdigest()):
                # The fork's header has another uid and other keys than the parent's, and so another sha256.
                copied = replace(record, closing_sha256=hashlib.sha256(own).hexdigest(), epoch=0)
                self._num_reopened += 1
                self._create(self.target.reopened(self._num_reopened), copied.encode())
        return chain, own_chain

    def _header(
        self, step: int, revision: int, data: bytes, chain: bytes, own_chain: bytes
    ) -> tuple[bytes, bytes, bytes]:
        """Write one header of the parent, whose stored bytes are `data`, as the fork's own.

        Note what it names to be copied. Return the chain hashes after it, the parent's and the fork's, and the bytes of
        the fork's header.
        """
        header = self._decode_header(step, revision, data, chain)
        for chunk in header.chunks:
            chunk.key = self._later(chunk.key, sha256=chunk.sha256.hex(), size_bytes=chunk.size_bytes)
        if header.rollouts_key:
            header.rollouts_key = self._later(header.rollouts_key, sha256=header.rollouts_sha256.hex())
        header.run_uid, header.run_hash, header.previous_chain_hash = self.target.uid, self.run_hash, own_chain
        # No epoch of the fork wrote it; the fork's own begin at 1.
        header.writer_epoch = header.config_revision = 0
        # The small objects are those of the parent's chain; the fork's first own header names its own.
        del header.objects[:]
        own = header.SerializeToString(deterministic=True)
        self._create(self.target.batch_header(step, revision), own)
        return chain_hash(chain, data), chain_hash(own_chain, own), own

    def _checkpoint(self, step: int) -> bytes | None:
        """Return the fork's manifest of the copied checkpoint, as bytes.

        None where the fork begins with the start model. Its objects are noted to be copied.
        """
        try:
            manifest = _load_manifest(self.store, self.source.checkpoint_manifest(step))
        except NotFoundError:
            if step == 0:
                return None
            raise
        for item in manifest["objects"]:
            item["key"] = self._later(item["key"], sha256=item["sha256"], size_bytes=item["size_bytes"])
        manifest |= {"run_uid": self.target.uid, "run_hash": self.run_hash}
        # The hash of the same history in the fork's own chain.
        manifest["chain_hash"] = self.origin.chain_hash.hex()
        # A fork may learn other rows: its own checkpoints prove its own.
        manifest.pop("dataset_digest", None)
        return with_checksum(manifest)

    def _later(self, key: str, *, sha256: str, size_bytes: int | None = None) -> str:
        """Note the object `key` of the parent to be copied by `run`, and return its key in the fork.

        `sha256` (hex) and `size_bytes` are what it has to be; None where the size is not known.
        """
        target = self.target.root + key.removeprefix(self.source.root)
        self._todo.append(lambda: self._copy(key, target, sha256=sha256, size_bytes=size_bytes))
        return target

    def _copy(self, key: str, target: str, *, sha256: str, size_bytes: int | None) -> None:
        """Copy the parent's object `key` to `target` and check its sha256 (hex), unless the target exists.

        `size_bytes` is only compared with the size of an existing target; None takes a target of any size. The error
        for a retired object names the record.
        """
        there = self.store.head(target)
        if there is not None and (size_bytes is None or there.size_bytes == size_bytes):
            # Objects appear whole or not at all: an attempt before this one has verified and copied it.
            return
        with owned_directory("fork") as directory:
            path = directory / "object"
            try:
                self.store.get_file(key, path)
            except NotFoundError as error:
                raise explain(self.store, key, error) from error
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256:
                raise CorruptObjectError(
                    f"{self.store.uri(key)} has sha256 {found}, what names it says {sha256}",
                    reason="OBJECT_HASH_MISMATCH",
                    remedy=f"it is damaged: see `millrace run audit {self.source.uid}`, and fork at another step",
                )
            self.store.put_file(target, path)

    def _create(self, key: str, data: bytes) -> None:
        """Create an object of the fork; ConflictError if it exists with other bytes."""
        if not self.store.create(key, data) and self.store.get(key) != data:
            raise ConflictError(
                f"{self.store.uri(key)} exists with other content",
                reason="FORK_CONFLICT",
                remedy="the parent changed between two tries: fork again with a new request_id",
            )


def _count_steps(store: ObjectStore, names: Names, origin: RunOrigin) -> int:
    """Return the step after the last committed training step of a run (its origin's, if none is committed).

    CorruptObjectError if a header is missing before others.
    """
    steps = [origin.base_step - 1, *(step for step, revision in list_headers(store, names) if not revision)]
    for before, after in pairwise(steps):
        if after != before + 1:
            where = store.uri(names.batch_header(before + 1))
            raise chain_broken(names, before + 1, f"header {where} is missing, but step {after} is committed")
    if steps[-1] < origin.base_step:
        return origin.base_step
    last = decode_header(_last_header(store, names, steps[-1]))
    return steps[-1] if closes_run(last) else steps[-1] + 1


def _kept_checkpoints(store: ObjectStore, names: Names, origin: RunOrigin, num_steps: int) -> list[int]:
    """Return the steps that a copy can begin at, ascending: committed checkpoints, and 0 if the first batch is kept.

    `num_steps` is the step after the last committed one; later checkpoints are left out.
    """
    kept = set(list_checkpoints(store, names))
    if origin.base_step == 0 and (num_steps == 0 or _has_batch(store, names, 0)):
        kept.add(0)  # the start model
    return sorted(step for step in kept if step <= num_steps)


def _has_batch(store: ObjectStore, names: Names, step: int) -> bool:
    """Return whether the store still has all chunks of a step's batch."""
    header = decode_header(_last_header(store, names, step))
    return all(store.head(chunk.key) is not None for chunk in header.chunks)


def _state_before(store: ObjectStore, names: Names, origin: RunOrigin, step: int) -> tuple[bytes, Frontier, bytes]:
    """Return what holds before `step`: chain hash, resolved ordinals, and the orchestrator's state (JSON as bytes)."""
    if step == origin.base_step:
        return origin.chain_hash, origin.frontier, origin.orchestrator_state
    data = _last_header(store, names, step - 1)
    header = decode_header(data)
    return chain_hash(header.previous_chain_hash, data), Frontier.from_header(header), header.orchestrator_state


def _drawing_state(state: bytes) -> str:
    """Return the part of an orchestrator's state that determines the next tasks, and the rewards that others are
    compared with.

    Both are JSON; empty if nothing does. What the parent's orchestrator counted is left out.
    """
    kept = decode_object(state or b"{}", what="the orchestrator's state in a header", reason="HEADER_CORRUPT")
    drawing = {name: kept[name] for name in ("pools", "baselines") if name in kept}
    return json.dumps({"num_duplicates": 0, "read_until": "", **drawing}, sort_keys=True) if drawing else ""


def _last_header(store: ObjectStore, names: Names, step: int) -> bytes:
    """Return the stored bytes of the newest header of a committed step; NotFoundError if nothing is committed of it."""
    found = load_step(store, names, step)
    if found is None:
        raise NotFoundError(f"{store.uri(names.batch_header(step))} does not exist")
    return found.revisions[-1]


def _load_manifest(store: ObjectStore, first_key: str) -> dict[str, Any]:
    """Return the newest revision of the checkpoint manifest whose first key this is, as decoded and checked JSON.

    NotFoundError if there is none, CorruptObjectError if it is damaged.
    """
    key, reason = newest_revision(store, first_key), "CHECKPOINT_MANIFEST_INVALID"
    what, remedy = f"checkpoint manifest {store.uri(key)}", "fork at a step before this checkpoint"
    manifest = decode_object(store.get(key, max_bytes=MAX_JSON_BYTES), what=what, reason=reason, remedy=remedy)
    try:
        require_checksum(manifest)
        Fields(manifest).hexadecimal("chain_hash", num_bytes=32)
        for item in Fields(manifest).objects("objects", most=_MAX_OBJECTS):
            item.key("key")
            item.hexadecimal("sha256", num_bytes=32)
            item.integer("size_bytes")
    except ValueError as error:
        raise CorruptObjectError(f"{what} is not readable: {error}", reason=reason, remedy=remedy) from error
    return manifest
