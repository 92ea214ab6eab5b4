"""The copy of the log in Redis: of the newest generation, never ahead of the store, and equal to it byte for byte."""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import redis.asyncio as redis_asyncio

from millrace.decoding import decode_message
from millrace.errors import CorruptObjectError, InvalidStateError, MillraceError
from millrace.internal.v1 import batch_pb2, policy_pb2
from millrace.readers.audit.events import EventCheck
from millrace.readers.audit.findings import Audit
from millrace.readers.audit.rollouts import RolloutFact, is_trainable
from millrace.rollouts.batch_wire import decode_header
from millrace.rollouts.wire import decode_rollout
from millrace.runlog.names import Stream
from millrace.runlog.records.known import manifest_digest
from millrace.runlog.records.numbered import GENERATION_ROLE, latest_epoch
from millrace.runlog.redis import connection
from millrace.runlog.redis.connection import as_text
from millrace.runlog.redis.entry import Entry, decode_entry, scan
from millrace.storage.base import newest_revision

PAGE = {Stream.BATCHES: 4, Stream.ROLLOUTS: 64, Stream.POLICIES: 256, Stream.EVENTS: 256}  # at most some MiB each


class Mirror:
    """Reads the streams of a run from Redis. What is read before the store may lack what the store has, never more."""

    def __init__(self, audit: Audit, redis: redis_asyncio.Redis, meta: dict[str, str]) -> None:
        self._audit = audit
        self._redis = redis
        self._meta = meta

    @classmethod
    async def open(cls, audit: Audit, redis: redis_asyncio.Redis) -> "Mirror | None":
        """Read meta of the run's log and return the mirror; None, with a note, if Redis does not hold the log."""
        mirror = cls(audit, redis, {})
        found = await mirror._ask("reading meta", "HGETALL", audit.names.meta)
        meta = mirror._meta = {as_text(name): as_text(value) for name, value in (found or {}).items()}
        if "generation" not in meta:
            audit.findings.not_seen(
                "NOT_IN_REDIS", "Redis does not hold the log of the run: only the store was checked"
            )
            return None
        return mirror

    async def rollouts(self) -> dict[tuple[int, int], list[RolloutFact]]:
        """Return the trainable rollouts in Redis by (ordinal, member).

        Entries that cannot be decoded are violations.
        """
        facts: defaultdict[tuple[int, int], list[RolloutFact]] = defaultdict(list)
        async for entry in self._entries(Stream.ROLLOUTS):
            try:
                rollout = decode_rollout(entry.d)
            except CorruptObjectError as error:
                self._audit.findings.violation("ENTRY_CORRUPT", f"rollout {entry.id} in Redis: {error.message}")
                continue
            if is_trainable(rollout):
                facts[rollout.ordinal, rollout.member].append(RolloutFact.of(rollout, entry_id=entry.id))
        return dict(facts)

    async def events(self, check: EventCheck) -> None:
        """Add every event in Redis."""
        async for entry in self._entries(Stream.EVENTS):
            check.add([entry])

    async def compare(self, *, epochs: dict[str, int], installed: int) -> None:
        """Report where meta, batches and policies in Redis differ from the store, or are ahead of it.

        `epochs` are the newest by role, and `installed` is the newest generation marked in the store.
        """
        findings = self._audit.findings
        held = await self._read_generation()  # again: a rebuild may have come in between
        newest = await asyncio.to_thread(latest_epoch, self._audit.store, self._audit.names, GENERATION_ROLE)
        if held is None:
            findings.not_seen(
                "NOT_IN_REDIS", "Redis lost the log of the run during the audit: only the store was checked"
            )
            return
        if not installed <= held <= max(newest, installed):  # the mark of the newest may be still to come
            findings.violation(
                "GENERATION_MISMATCH",
                f"Redis holds generation {held} of the log, the newest that was installed is {installed}",
            )
        for name, value in sorted(self._meta.items()):
            role = name.removeprefix("epoch:")
            if role != name and not value.isdecimal():
                findings.violation("ENTRY_CORRUPT", f"meta in Redis has {name[:80]} = {value[:80]!r}")
            elif role != name and int(value) > epochs.get(role, 0):
                findings.violation(
                    "EPOCH_AHEAD",
                    f"Redis enforces epoch {value} of {role}, the newest in the store is {epochs.get(role, 0)}",
                )
        await self._compare_batches()
        async for entry in self._entries(Stream.POLICIES):
            await asyncio.to_thread(self._compare_policy, entry)

    async def _read_generation(self) -> int | None:
        found = await self._ask("reading the generation", "HGET", self._audit.names.meta, "generation")
        text = as_text(found)
        if found is not None and not text.isdecimal():
            self._audit.findings.violation("ENTRY_CORRUPT", f"meta in Redis has the generation {text[:80]!r}")
            return None
        return None if found is None else int(text)

    async def _ask(self, what: str, *words: Any) -> Any:
        """Run a Redis command and return its answer; None, with a violation, for a key of another type.

        `what` describes the command; `words` are all of it, its name first.
        """
        try:
            return await connection.call(
                self._redis,
                f"{what} of run {self._audit.names.uid}",
                lambda: self._redis.execute_command(*words),
            )
        except CorruptObjectError as error:
            self._audit.findings.violation("ENTRY_CORRUPT", f"{error.message} ({words[1]})")
            return None

    async def _compare_batches(self) -> None:
        header: batch_pb2.BatchHeader | None = None
        async for entry in self._entries(Stream.BATCHES):
            step, number = (int(part) for part in entry.id.split("-"))
            if number == 1:
                self._audit.progress(f"step {step} in Redis")
                header = await asyncio.to_thread(self._compare_header, step, entry)
            elif header is not None and header.step == step:
                self._compare_chunk(header, number - 2, entry)

    def _compare_header(self, step: int, entry: Entry) -> batch_pb2.BatchHeader | None:
        audit = self._audit
        try:
            revision = decode_header(entry.d).revision
        except CorruptObjectError:
            revision = 0
        key = audit.names.batch_header(step, revision)
        stored = audit.get(key, missing="MIRROR_AHEAD", what=f"Redis holds step {step}, but its header")
        if stored is None:
            return None
        if stored != entry.d:
            audit.findings.violation("MIRROR_DIFFERS", f"header {step} in Redis is not what {audit.uri(key)} holds")
        try:
            return decode_header(stored)
        except CorruptObjectError:
            return None  # the walk over the headers reports it

    def _compare_chunk(self, header: batch_pb2.BatchHeader, index: int, entry: Entry) -> None:
        if index >= len(header.chunks) or hashlib.sha256(entry.d).digest() != header.chunks[index].sha256:
            self._audit.findings.violation(
                "MIRROR_DIFFERS", f"chunk {index} of batch {header.step} in Redis is not the one that its header names"
            )

    def _compare_policy(self, entry: Entry) -> None:
        audit = self._audit
        try:
            policy = decode_message(
                policy_pb2.PolicyEntry, entry.d, what=f"policy {entry.id} in Redis", reason="ENTRY_CORRUPT"
            )
        except CorruptObjectError as error:
            audit.findings.violation("ENTRY_CORRUPT", error.message)
            return
        what = f"policy {policy.lineage}-{policy.version} in Redis"
        if entry.id != f"{policy.version}-1":
            audit.findings.violation("MIRROR_DIFFERS", f"{what} stands at {entry.id}")
        if policy.manifest_key != audit.names.policy_manifest(policy.lineage, policy.version):
            audit.findings.violation("MIRROR_DIFFERS", f"{what} names the manifest {policy.manifest_key}")
            return
        key = newest_revision(audit.store, policy.manifest_key)
        stored = audit.get(key, missing="MIRROR_AHEAD", what=f"{what} is announced, but its manifest")
        if stored is None:
            return
        is_announced = key != policy.manifest_key or hashlib.sha256(stored).digest() == policy.manifest_sha256
        if not is_announced or policy.digest != manifest_digest(stored):
            audit.findings.violation("MIRROR_DIFFERS", f"{what} has another digest than {audit.uri(key)}")

    async def _entries(self, stream: Stream) -> AsyncIterator[Entry]:
        """Yield the entries of a stream whose format and hash are right; the others are violations."""
        key, read_page = self._audit.names.stream(stream), partial(self._ask, f"auditing {stream}", "XRANGE")
        async for id_, fields in scan(lambda start, count: read_page(key, start, "+", "COUNT", count), PAGE[stream]):
            try:
                yield decode_entry(key, id_, fields)
            except (CorruptObjectError, InvalidStateError) as error:
                self._audit.findings.violation(_entry_check(error), error.message)


def _entry_check(error: MillraceError) -> str:
    if isinstance(error, InvalidStateError):
        return "ENTRY_TOO_OLD" if error.reason == "FORMAT_TOO_OLD" else "ENTRY_TOO_NEW"
    return "ENTRY_CORRUPT"
