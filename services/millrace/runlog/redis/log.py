"""The log of one run: append through the one guarded script, read with the checks of docs/reliability.md."""

import asyncio
import logging
import re
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis.asyncio as redis_asyncio
from redis.exceptions import ResponseError

from millrace.decoding import MAX_JSON_BYTES, decode_message
from millrace.errors import (
    AlreadyExistsError,
    CorruptObjectError,
    FencedError,
    InternalError,
    LogGoneError,
    MillraceError,
    NotFoundError,
    PermissionDeniedError,
)
from millrace.internal.v1 import batch_pb2
from millrace.runlog.names import Names, Stream
from millrace.runlog.records import numbered
from millrace.runlog.records import numbered as intents
from millrace.runlog.records.numbered import Epoch, Intent
from millrace.runlog.records.run_record import RunRecord, parse_origin, require_exists
from millrace.runlog.redis import connection, damage, script
from millrace.runlog.redis.connection import MAX_BLOCK_S, as_text
from millrace.runlog.redis.entry import (
    FORMAT_MAJOR,
    AppendResult,
    Entry,
    check_format,
    decode_entry,
    hashes_of,
    log_gone,
    read_entry,
)
from millrace.runlog.redis.script import Script
from millrace.storage import ObjectStore
from millrace.telemetry import waits
from millrace.telemetry.leftovers import LEFTOVERS

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEPT_POLICIES = 1000
"""Announcements of published policies that Redis keeps: an evaluation may be due at one of them."""
_CHECK_S = 2.0  # a blocked reader looks that often whether the log is still there
_POLL_S = 0.5
_NUMBER = re.compile(r"[0-9]{1,18}")

__all__ = ["FORMAT_MAJOR", "AppendResult", "Entry", "RunLog", "check_format", "decode_entry", "log_gone"]


class RunLog:
    """The log of the run `uid`. Get one by `open` or `create`. Async-safe; of one event loop."""

    def __init__(
        self, redis: redis_asyncio.Redis, store: ObjectStore, *, names: Names, generation: int, run_hash: str
    ) -> None:
        """Create the object alone; nothing is read.

        `generation` 0 with an empty `run_hash` is a log that is not open yet.
        """
        self.redis = redis
        self.store = store
        self.names = names
        self.generation = generation
        self.run_hash = run_hash
        self._epochs: dict[str, int] = {}  # by role: the newest that the store was seen to have

    @classmethod
    async def open(cls, redis: redis_asyncio.Redis, store: ObjectStore, *, prefix: str, uid: str) -> "RunLog":
        """Open the log of a run; `LogGoneError` if Redis does not hold it."""
        log = cls(redis, store, names=Names(prefix, uid), generation=0, run_hash="")
        await log.reopen()
        return log

    @classmethod
    async def create(
        cls, redis: redis_asyncio.Redis, store: ObjectStore, prefix: str, uid: str, run_json: bytes
    ) -> "RunLog":
        """Create the log of a new run, and return it opened: `run.json` (create-only), generation 1, meta in Redis.

        Repeating it is harmless. `AlreadyExistsError` if the uid has another `run.json` or its log a later generation.
        The run is listed nowhere yet (`index.create_run`).
        """
        names = Names(prefix, uid)
        is_new = await asyncio.to_thread(store.create, names.run_json, run_json)
        if not is_new and await asyncio.to_thread(store.get, names.run_json) != run_json:
            raise AlreadyExistsError(
                f"run {uid} exists with another run.json",
                reason="RUN_ID_TAKEN",
                remedy="uids are never reused: make a new one",
                metadata={"uid": uid},
            )
        generation = await asyncio.to_thread(numbered.first_generation, store, names)
        run_hash = parse_run_hash(run_json)
        fields = [generation, "format", FORMAT_MAJOR, "run_hash", run_hash]
        if base := parse_origin(run_json, where=store.uri(names.run_json)).base_step:
            fields += [f"base:{Stream.BATCHES}", base, f"base:{Stream.POLICIES}", base]
        answer, held = await connection.call(
            redis, f"creating run {uid}", lambda: script.CREATE_META.run(redis, [names.meta], fields)
        )
        if as_text(answer) == "CONFLICT":
            raise AlreadyExistsError(
                f"the log of run {uid} is at generation {as_text(held)}, not {generation}",
                reason="RUN_ID_TAKEN",
                remedy="open the run instead of creating it",
                metadata={"uid": uid},
            )
        return cls(redis, store, names=names, generation=generation, run_hash=run_hash)

    async def reopen(self, *, is_checked: bool = True) -> None:
        """Adopt, in place, the generation of the log that Redis holds now.

        `LogGoneError` while it holds none, or a damaged one. A generation below ours is a copy that a restarted Redis
        brought back from before a rebuild: as good as none. With `is_checked`, one that is new to us is compared with
        the store.
        """
        names = ("generation", "format", "run_hash", "damage")
        found: Any = await self.command("opening the log", "HMGET", self.names.meta, *names)
        text, version, run_hash, cause = (as_text(value) for value in found)
        if not text:
            raise log_gone(f"opening run {self.uid}")
        if not _NUMBER.fullmatch(text):
            raise damage.log_damaged(cause or f"meta of run {self.uid} is damaged: its generation is {text[:40]!r}")
        generation = int(text)
        if generation < self.generation:
            raise log_gone(f"opening run {self.uid}")
        # Another object: ours stays as it is if this copy is refused.
        held = RunLog(self.redis, self.store, names=self.names, generation=generation, run_hash=run_hash)
        try:
            check_format(version, f"meta of run {self.uid}")
        except CorruptObjectError as error:
            raise await damage.mark_damaged(held, "meta", f"in its field format: {version[:40]!r}") from error
        if generation == self.generation:
            return
        if is_checked:
            await held.require_true()
        if self.generation:
            where = {"uid": self.uid, "old": self.generation, "new": generation}
            logger.info("log of the run adopted in its new generation", extra=where)
        self.generation, self.run_hash = generation, run_hash

    async def require_true(self) -> None:
        """Raise `LogGoneError`, and mark meta as damaged, if its generation or run hash is not the store's."""

        def compare() -> str:
            """Return what is wrong with meta, in words; empty if the store confirms it (blocking)."""
            if numbered.latest_epoch(self.store, self.names, numbered.GENERATION_ROLE) < self.generation:
                return f"in its field generation: there never was a generation {self.generation}"
            is_ours = parse_run_hash(self.store.get(self.names.run_json, max_bytes=MAX_JSON_BYTES)) == self.run_hash
            return "" if is_ours else "in its field run_hash, which is not that of run.json"

        try:
            cause = await asyncio.to_thread(compare)
        except NotFoundError as error:
            raise log_gone(f"opening run {self.uid}, which is not in the store") from error
        if cause:
            raise await damage.mark_damaged(self, "meta", cause)

    async def wait_reopened(self, why: str) -> None:
        """Wait without end until the orchestrator has rebuilt the log in Redis, and adopt it.

        `why` names the purpose in the registered wait. `NotFoundError` if the run is gone or about to be: nobody will
        rebuild its log.
        """
        reason = f"{why}: the log of the run to be rebuilt"
        with waits.waiting(reason, waits_on="orchestrator") as wait:
            while True:
                try:
                    return await self.reopen()
                except LogGoneError as error:
                    wait.update(reason=f"{reason} ({error.message})" if error.reason == "LOG_DAMAGED" else reason)
                    await asyncio.to_thread(require_exists, self.store, self.names)
                await asyncio.sleep(_POLL_S)

    async def read_instance(self) -> str:
        """Return the identity of Redis' copy of the log: `{generation}.{run id of the server}`.

        It changes when the log was rebuilt, and when the server restarted, which may have lost the newest
        entries: a writer that sees a change appends again what that copy lacks. Where INFO is denied the run id
        is empty. `LogGoneError` if Redis does not hold this generation.
        """
        try:
            info = await self.command("asking for the server's run id", "INFO", "server")
        except PermissionDeniedError:
            info = {}
        await self.check()
        return f"{self.generation}.{as_text(info.get('run_id'))}"

    @property
    def uid(self) -> str:
        """Return the uid of the run."""
        return self.names.uid

    async def run_json(self) -> bytes:
        """Return the stored bytes of the run's record, as it was created."""
        return await asyncio.to_thread(self.store.get, self.names.run_json)

    async def check(self) -> None:
        """Raise `LogGoneError` unless Redis holds this generation of the log, undamaged."""
        found = await self.command("checking meta", "HMGET", self.names.meta, "generation", "damage")
        stored, cause = (as_text(value) for value in found)
        if stored != str(self.generation):
            if cause:
                raise damage.log_damaged(cause)
            raise log_gone(f"run {self.uid}: generation {self.generation}, Redis has {stored[:40] or 'none'}")

    # Epochs.

    async def acquire_epoch(self, role: str, owner: str) -> Epoch:
        """Take the next epoch of a role for `owner`, in the store and then in Redis: every older one is refused from
        now on.
        """
        epoch = await numbered.create_epoch(self.store, self.names, role, owner)
        await self._raise_epoch(epoch)
        return epoch

    async def current_epoch(self, role: str) -> int:
        """Return the epoch that Redis enforces for a role, 0 if none.

        `LogGoneError`, and a rebuild, if the store never had that epoch.
        """
        number = await self._meta_number(f"epoch:{role}", f"the epoch of {role}")
        if number > self._epochs.get(role, 0):
            self._epochs[role] = await asyncio.to_thread(numbered.latest_epoch, self.store, self.names, role)
            if number > self._epochs[role]:  # it would fence everybody out, for ever
                raise await damage.mark_damaged(
                    self, "meta", f"in its field epoch:{role}: there never was an epoch {number}"
                )
        return number

    # Append.

    async def append_rollouts(self, many: Sequence[bytes], *, tp: str = "") -> AppendResult:
        """Append finished rollouts (serialized) in one command, which blocks Redis for as long: a few MiB are enough.

        After a lost answer they may be there twice; readers know each by its attempt. `tp` is a trace context. The
        result says whether they are in the log.
        """
        return await self._append(Stream.ROLLOUTS, "auto", "", 0, 0, many, tp)

    async def append_event(self, data: bytes, *, writer: str, sequence: int, tp: str = "") -> AppendResult:
        """Append a serialized event as number `sequence` of its writer; CONFLICT if that is not next.

        `tp`: a trace context.
        """
        return await self._append(Stream.EVENTS, "writer", writer, 0, sequence, [data], tp)

    async def append_batch(
        self, epoch: Epoch, header: bytes, chunks: Sequence[bytes] = (), *, tp: str = ""
    ) -> AppendResult:
        """Append the stored bytes of a committed header, and its chunks unless they stay in the store only, in one
        atomic step.

        The result says whether it is in the log (`require`). `LogGoneError`, and a rebuild, if another entry that the
        store does not have is in its place. `tp` is a trace context.
        """
        step = decode_message(batch_pb2.BatchHeader, header, what="a header", reason="BATCH_INVALID").step
        result = await self._append(Stream.BATCHES, "step", epoch.role, epoch.number, step, [header, *chunks], tp)
        if result is AppendResult.CONFLICT:
            await damage.require_own(self, Stream.BATCHES, step, header)
        return result

    async def append_policy(self, epoch: Epoch, data: bytes, version: int, *, tp: str = "") -> AppendResult:
        """Append a published policy version (a serialized `PolicyEntry`); the result says whether it is in the log.

        `LogGoneError`, and a rebuild, if another entry that the store does not have is in its place. `tp` is a
        trace context.
        """
        result = await self._append(Stream.POLICIES, "step", epoch.role, epoch.number, version, [data], tp)
        if result is AppendResult.CONFLICT:
            await damage.require_own(self, Stream.POLICIES, version, data)
        return result

    # Read.

    async def read(
        self, stream: Stream | str, *, after: str = "0", count: int = 100, block_s: float = 0.0
    ) -> list[Entry]:
        """Return entries of a stream after the id `after`, at most `count`.

        Wait up to `block_s` (≤ 5) seconds for the first one. Empty if none comes. `LogGoneError` when the log is gone,
        or is given up because of a damaged batch or policy. Damaged rollouts and events are returned with a `damage`.
        """
        stream = Stream(stream)
        key = self.names.stream(stream)
        ends = time.monotonic() + min(block_s, MAX_BLOCK_S)
        while True:
            block_ms = max(0, round(min(ends - time.monotonic(), _CHECK_S) * 1000))
            block = ("BLOCK", block_ms) if block_ms > 0 else ()  # BLOCK 0 would be for ever
            words = ("XREAD", "COUNT", count, *block, "STREAMS", key, after or "0")
            found = await self.command(f"reading {stream}", *words, block_s=block_ms / 1000)
            await self.check()  # XREAD does not tell a wiped stream from a silent one
            if found:
                return await damage.check_entries(
                    self, stream, [read_entry(key, id_, fields) for id_, fields in found[0][1]]
                )
            if time.monotonic() >= ends:
                return []

    async def read_range(self, stream: Stream, first: str, last: str) -> list[Entry]:
        """Return a stream's entries with ids from `first` to `last`, inclusive, without waiting.

        A damaged one has a `damage`.
        """
        key = self.names.stream(stream)
        found = await self.command(f"reading {stream}", "XRANGE", key, first, last)
        return [read_entry(key, id_, fields) for id_, fields in found]

    async def remove_entries(self, stream: Stream, ids: Sequence[str]) -> None:
        """Remove the entries with these ids, which cannot be used, from a stream; only the lease holder does."""
        await self.command(f"removing damaged entries of {stream}", "XDEL", self.names.stream(stream), *ids)

    async def last_id(self, stream: Stream) -> str | None:
        """Return the newest entry id that the stream ever had, trimmed or not; None if it never had one."""
        key = self.names.stream(stream)

        async def ask() -> dict[str, Any] | None:
            try:
                return await self.redis.xinfo_stream(key)
            except ResponseError as error:
                if "no such key" in str(error).lower():
                    return None
                raise

        info = await self.call(f"asking for the end of {stream}", ask)
        return None if info is None else as_text(info["last-generated-id"])

    async def next_position(self, stream: Stream) -> int:
        """Return the batch (or policy version) that the stream takes next: one after its newest, or where a new log
        begins.
        """
        last = await self.last_id(stream)
        if last is not None:
            return int(last.partition("-")[0]) + 1
        return await self._meta_number(f"base:{stream.value}", f"the base of {stream}")

    async def writer_sequence(self, writer: str) -> int:
        """Return the number of the newest event of a writer, 0 if it has none."""
        return await self._meta_number(f"seq:{writer}", f"the sequence of {writer}")

    # Trim: only the lease holder does.

    async def trim_rollouts(self, below: str) -> int:
        """Remove rollouts older than the entry id `below` from Redis; return how many.

        A commit must have archived them.
        """
        return await self._trim(Stream.ROLLOUTS, below)

    async def trim_batches(self, below_step: int) -> int:
        """Remove batches of steps below `below_step` from Redis, and return how many entries; the store keeps them."""
        return await self._trim(Stream.BATCHES, f"{below_step}-0")

    async def trim_events(self, below: str) -> int:
        """Remove events older than the entry id `below`; return how many. They must be archived in the store."""
        return await self._trim(Stream.EVENTS, below)

    async def trim_consumed(self, version: int) -> int:
        """Remove from Redis what policy `version` makes superfluous; return how many entries.

        These are the batches that the policy was trained on, and all announcements of policies except the
        newest `KEPT_POLICIES`. The store keeps them: a trainer that begins at an earlier step reads them there.
        """
        oldest = max(0, version - KEPT_POLICIES + 1)
        return await self.trim_batches(version) + await self._trim(Stream.POLICIES, f"{oldest}-0")

    # How long Redis keeps the log.

    async def expire(self, seconds: float) -> None:
        """Set every Redis key of the log to expire in `seconds`; a run that is opened later gets its log rebuilt."""
        await self._each_key("letting the log expire", "PEXPIRE", round(1000 * seconds))

    async def persist(self) -> None:
        """Cancel the expiry of every Redis key of the log, because the run goes on."""
        await self._each_key("keeping the log", "PERSIST")

    async def _each_key(self, what: str, command: str, *args: int) -> None:
        """Run a command on every key of the log, in one transaction; `what` describes it in messages."""

        async def ask() -> None:
            pipeline = self.redis.pipeline(transaction=True)  # of one moment: the keys expire together
            for key in self.names.all_keys:
                pipeline.execute_command(command, key, *args)
            await pipeline.execute()

        await self.call(what, ask)

    # Intents.

    async def write_intent(self, kind: str, payload: Mapping[str, Any]) -> Intent:
        """Store a user's intent, and return it with its number; it is durable then, and may be acknowledged.

        `kind` is what is requested (`pause`, …), `payload` its JSON fields.
        """
        return await intents.write_intent(self.store, self.names, kind, payload)

    async def read_intents(self, *, after: int = 0) -> list[Intent]:
        """Return the intents of the run's users with a number above `after`, in order."""
        return await intents.read_intents(self.store, self.names, after=after)

    # Inside.

    async def command(self, what: str, *words: Any, block_s: float = 0.0) -> Any:
        """Run one Redis command by its words, with retries as `call` does, and return its answer.

        `what` is for messages.
        """
        return await self.call(what, lambda: self.redis.execute_command(*words), block_s=block_s)

    async def call(self, what: str, command: Callable[[], Awaitable[T]], *, block_s: float = 0.0) -> T:
        """Run a Redis command of this run with bounded, visible retries, and return its result; `what` is for messages.

        It may wait in Redis for `block_s` seconds by itself. `LogGoneError`, and a rebuild, if a key of the log is of
        another type than ours.
        """
        try:
            return await connection.call(self.redis, f"{what} of run {self.uid}", command, block_s=block_s)
        except CorruptObjectError as error:
            raise await damage.mark_damaged(self, "a key", f"of another type than ours ({what})") from error

    async def _meta_number(self, field: str, what: str) -> int:
        """Return the number that a field of meta begins with, 0 if it is not there; `what` is for messages.

        `LogGoneError`, and a rebuild, if it is no number.
        """
        held = as_text(await self.command(f"reading {what}", "HGET", self.names.meta, field)).partition(" ")[0]
        if held and not _NUMBER.fullmatch(held):
            raise await damage.mark_damaged(self, "meta", f"in its field {field}: {held[:40]!r} is no number")
        return int(held or 0)

    async def _append(
        self, stream: Stream, mode: str, role: str, epoch: int, position: int, entries: Sequence[bytes], tp: str
    ) -> AppendResult:
        """Append entries to a stream by the append script, and return its answer; a refusal is logged.

        `mode` is "auto", "step" or "writer"; `role` and `epoch` are the writer's, `position` is a step, version or
        sequence number (`script.APPEND`), `tp` a trace context. Where Redis has lost the epoch it is written again
        first, if it is still the newest. `LogGoneError`, and a rebuild, if the stream or meta is damaged.
        """
        keys = [self.names.stream(stream), self.names.meta]
        args: list[Any] = [mode, self.generation, role, epoch, position, len(entries)]
        for data, found in zip(entries, await hashes_of(entries), strict=True):
            args += [FORMAT_MAJOR, found, data, tp]
        # Names the field base:{stream} of meta, where a new stream begins.
        args.append(stream.value)
        what = f"appending to {stream}"
        # Once more after EPOCH_BEHIND, with our epoch written again.
        for _ in range(2):
            reply = await self.call(what, lambda: script.APPEND.run(self.redis, keys, args))
            answer, detail = (as_text(part) for part in reply)
            if answer == "DAMAGED":
                raise await damage.mark_damaged(self, f"stream {stream}", f"at its end: {detail}")
            if answer != "EPOCH_BEHIND":
                result = AppendResult(answer)
                if result is AppendResult.FENCED:
                    await self.current_epoch(role)
                if result not in (AppendResult.OK, AppendResult.ALREADY):
                    logger.warning(
                        "append refused: %s",
                        detail,
                        extra={"uid": self.uid, "stream": stream.value, "position": position, "answer": answer}
                        | {"detail": detail},
                    )
                return result
            # Redis lost the tail that held our epoch. The store knows whether ours is still the newest.
            newest = await asyncio.to_thread(numbered.latest_epoch, self.store, self.names, role)
            if newest > epoch or not await self._raise_epoch(Epoch(role, epoch), raises=False):
                return AppendResult.FENCED
        raise InternalError(f"{what} of run {self.uid}: Redis forgets epochs", reason="EPOCH_LOST")

    async def _raise_epoch(self, epoch: Epoch, *, raises: bool = True) -> bool:
        """Write the holder's epoch of its role into meta; return True.

        If meta has a newer one, return False, or raise FencedError if `raises`.
        """
        args = [self.generation, epoch.role, epoch.number]
        reply = await self.call(
            f"writing the epoch of {epoch.role}",
            lambda: script.RAISE_EPOCH.run(self.redis, [self.names.meta], args),
        )
        text, detail = (as_text(part) for part in reply)
        if text == "DAMAGED":
            raise await damage.mark_damaged(self, "meta", f"in its {detail}")
        answer = AppendResult(text)
        if answer is AppendResult.FENCED:
            await self.current_epoch(epoch.role)  # an epoch that fences us must be in the store
            if not raises:
                return False
        answer.require(f"epoch {epoch.number} of {epoch.role} of run {self.uid}")
        return True

    async def _trim(self, stream: Stream, below: str) -> int:
        """Remove the entries of a stream older than the id `below` and return how many.

        A failure is counted and returns 0: the next trim removes them.
        """
        key = self.names.stream(stream)
        try:
            return await self.command(f"trimming {stream}", "XTRIM", key, "MINID", "=", below)
        except (LogGoneError, FencedError):
            raise
        except MillraceError as error:
            LEFTOVERS.failed("entries of Redis", key, str(error))
            return 0


def parse_run_hash(run_json: bytes) -> str:
    """Return the hash of the resolved config that a `run.json` (its bytes) names.

    CorruptObjectError if it names none.
    """
    return RunRecord.parse(run_json, where="run.json", needs=["run_hash"]).run_hash


# Which copies of logs this process has compared with the store and found complete.


@dataclass(slots=True)
class Proof:
    """What is known of one run's log at one Redis."""

    instance: str = ""
    """The log instance that was compared last; "" if none was, or it lacked what the store has."""
    rebuilt: list[float] = field(default_factory=list)
    """When this process rebuilt it because of damage, on the monotonic clock; the newest ones, oldest first."""
    damage: str = ""
    """What was found damaged and is not rebuilt yet; "" if nothing is."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the log is compared or rebuilt, so that one process does it once."""


_PROOFS: weakref.WeakKeyDictionary[redis_asyncio.Redis, dict[str, Proof]] = weakref.WeakKeyDictionary()
"""By client and run. A copy that lacks what the store has is always another instance."""


def proof_of(log: RunLog) -> Proof:
    """Return what this process knows of a run's log at the log's Redis; it is kept as long as the client, and may be
    changed.
    """
    return _PROOFS.setdefault(log.redis, {}).setdefault(log.names.root, Proof())


def is_nameable(instance: str) -> bool:
    """Return whether an instance (`RunLog.read_instance`) names its server.

    Without INFO it does not, and proves nothing.
    """
    return not instance.endswith(".")


# Which entries a stream holds, by the sha256 of their bytes: only ids and hashes cross the network.

PAGE_ENTRIES = 128
"""Entries that one call of the script looks at: at 0.1 MiB each the server reads 13 MiB, some milliseconds."""

# The fields h of a page of a stream. KEYS: stream, meta. ARGV: generation, id after which to begin, count.
READ_HASHES = Script.of(
    """
local stored = redis.call('HGET', KEYS[2], 'generation')
if stored ~= ARGV[1] then return {'LOGGONE', stored or 'no meta', {}} end
local entries = redis.call('XRANGE', KEYS[1], '(' .. ARGV[2], '+', 'COUNT', ARGV[3])
local hashes, last = {}, ''
for i, entry in ipairs(entries) do
  last = entry[1]
  for j = 1, #entry[2], 2 do
    if entry[2][j] == 'h' then hashes[#hashes + 1] = entry[2][j + 1] end
  end
end
if last == '18446744073709551615-18446744073709551615' then last = '' end  -- nothing can be read after it
return {'OK', last, hashes}
"""
)


async def read_hashes(log: RunLog, stream: Stream) -> Mapping[str, int]:
    """Return how often each sha256 (hex) is in a stream; `LogGoneError` if this generation of the log is gone."""
    keys, after = [log.names.stream(stream), log.names.meta], "0-0"
    counts: dict[str, int] = {}
    while after:
        args = [log.generation, after, PAGE_ENTRIES]
        answer, last, hashes = await log.call(
            f"reading the hashes of {stream}", lambda args=args: READ_HASHES.run(log.redis, keys, args)
        )
        if as_text(answer) == "LOGGONE":
            raise log_gone(f"run {log.uid}: generation {log.generation}, Redis has {as_text(last)}")
        for value in hashes:
            counts[as_text(value)] = counts.get(as_text(value), 0) + 1
        after = as_text(last)
    return counts
