"""Open the log of a run; where Redis does not hold it, or holds a copy that lacks what the store has, rebuild it first.

What is restored: meta with the epochs of every role, so that older holders stay fenced, and the archived events under
their old ids. They are written into a key of their own that expires, and one script puts it in place together with
meta, if meta is still absent (or is still the stale copy's): a rebuilder may die anywhere, and of two the first wins.
Batches and policies are appended again by their writers (`reappend_committed`, `reappend_policies`) from
`base:{stream}` on; rollouts by the env-servers, which hold what is not resolved.

A copy is stale when Redis came back from a file that misses a rebuild (its generation is below an installed one) or
events that the store has (new events would get the ids of these), when it holds a closing header that does not end the
run any more (`revisions`: an entry cannot be taken back), and when it is damaged (`runlog/redis/damage.py`). Which
generations were installed is marked by create-only objects; the rebuilder, or the next opener, writes it. Damage that
comes again after a rebuild is rebuilt again, but ever more seldom: `LogGoneError` (LOG_UNSTABLE) says what it is
and when the next try is.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import redis.asyncio as redis_asyncio
from redis.exceptions import ResponseError

from millrace.backoff import Backoff
from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import LogGoneError, UnavailableError
from millrace.runlog.event_archive import (
    KEPT_EVENTS,
    MAX_SEQUENCE,
    load_archived_events,
    load_newest_archived,
    read_page,
    readable_event,
)
from millrace.runlog.names import Names, Stream
from millrace.runlog.records.numbered import GENERATION_ROLE, create_epoch, latest_epoch
from millrace.runlog.records.revisions import load_reopenings
from millrace.runlog.records.run_record import RunOrigin, list_policies, parse_origin, require_exists
from millrace.runlog.records.sealed import is_sealed
from millrace.runlog.redis import connection, script
from millrace.runlog.redis.connection import as_text
from millrace.runlog.redis.entry import FORMAT_MAJOR, Entry, id_order
from millrace.runlog.redis.log import KEPT_POLICIES, RunLog, is_nameable, parse_run_hash, proof_of
from millrace.storage import ObjectStore
from millrace.telemetry import waits
from millrace.v1 import event_pb2

# What a rebuilt log of a run holds at first: meta and events, from the store and from what Redis still has.

REBUILDER = "log"
"""Name of the writer of the event that a rebuild leaves."""
LOST = "Redis had lost the log of the run"
"""Why a log is rebuilt, for people, where nothing else is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """Contents of a rebuilt log."""

    meta: dict[str, str | int]
    """Fields of meta but generation and format."""
    events: Sequence[Entry]
    """The events in their order."""
    summary: str
    """What was restored, for people."""


def load_restored(store: ObjectStore, names: Names) -> Restored:
    """Load from the store what a rebuilt log of the run holds: meta with the epochs, and the archived events
    (blocking).
    """
    run_json = store.get(names.run_json, max_bytes=MAX_JSON_BYTES)
    origin = parse_origin(run_json, where=store.uri(names.run_json))
    policies = list_policies(store, names)
    step = _first_batch(store, names, origin, policies)
    version = _first_policy(store, names, origin, policies)
    epochs = {role: latest_epoch(store, names, role) for role in _roles(store, names)}
    meta: dict[str, str | int] = {"run_hash": parse_run_hash(run_json)}
    meta |= {f"base:{Stream.BATCHES}": step, f"base:{Stream.POLICIES}": version}
    meta |= {f"epoch:{role}": number for role, number in epochs.items()}
    events = load_archived_events(store, names)
    summary = (
        f"restored {len(events)} archived events, epochs {json.dumps(epochs, sort_keys=True)}; "
        f"batches come again from step {step} on, policies from version {version}"
    )
    return Restored(meta=meta, events=events, summary=summary)


async def read_events(log: RunLog) -> list[Entry]:
    """Return the events that Redis still has of a run, of whatever generation.

    The list is empty if they cannot be read, which is logged.
    """
    found: list[Entry] = []
    try:
        while page := await read_page(log, f"({found[-1].id}" if found else "-"):
            found += page
    except LogGoneError as error:
        logger.warning("events in Redis cannot be read", extra={"uid": log.uid, "error": error.message})
        return []
    return found


def merge_events(
    restored: Restored, held: Sequence[Entry], *, generation: int, now_ns: int, why: str = LOST
) -> Restored:
    """Return `restored` with the events that only Redis has (`held`) and an event that says that the log was rebuilt.

    These get ids of the new `generation`, because their old ids may be those of other events that the store has. Their
    bytes stay, and so do their numbers unless an archived event of the writer has that number (of a process that died,
    whose successor did not know it). Damaged events are left out, and archived ones with ids of this or a later
    generation. `now_ns` is the new event's time (nanoseconds since the epoch), `why` the reason for the rebuild, for
    people.
    """
    hashes = {entry.h for entry in restored.events}
    events, newest = _readable(restored, before=generation)
    num_damaged = len(restored.events) - len(events)
    extra: list[Entry] = []
    for entry in held:
        # By hash and not by id: a Redis that had lost its tail gave new events the ids of archived ones.
        if entry.damage or entry.h not in hashes:
            event = readable_event(entry)
            if event is None:
                num_damaged += 1
                continue
            # Reading set the cursor to the old id; the bytes that are appended have none.
            event.ClearField("cursor")
            known, _ = newest.get(event.writer, (0, ""))
            # The number is taken by an archived event of a process that died, so this event gets the next free one.
            if event.writer_sequence <= known:
                event.writer_sequence = known + 1
                entry = _entry(event)
            _note(newest, event, entry.h)
            extra.append(entry)
    summary = restored.summary + (f"; kept {len(extra)} events that only Redis had" if extra else "")
    summary += f"; left out {num_damaged} damaged entries" if num_damaged else ""
    event = event_pb2.Event(writer=REBUILDER, writer_sequence=newest.get(REBUILDER, (0, ""))[0] + 1)
    event.time.FromNanoseconds(now_ns)
    event.warning.reason = "LOG_REBUILT"
    event.warning.message = (
        f"{why}; generation {generation} {summary}; events of the last seconds that no living process holds are "
        "lost, nothing else is"
    )
    extra.append(_entry(event))
    _note(newest, event, extra[-1].h)
    events = events[-KEPT_EVENTS:] + [replace(entry, id=f"{generation}-{n}") for n, entry in enumerate(extra)]
    return Restored(meta=restored.meta | _sequences(newest), events=events, summary=summary)


def as_sealed(restored: Restored) -> Restored:
    """Return what the log of a sealed run holds: the archived events in `restored`, and no event about the rebuild."""
    events, newest = _readable(restored, before=None)
    return Restored(meta=restored.meta | _sequences(newest), events=events[-KEPT_EVENTS:], summary=restored.summary)


def _readable(restored: Restored, *, before: int | None) -> tuple[list[Entry], dict[str, tuple[int, str]]]:
    """Return the archived events of generations below `before` (None: of all), and each writer's newest number and its
    hash.

    Damaged events are left out.
    """
    newest: dict[str, tuple[int, str]] = {}
    events: list[Entry] = []
    for entry in restored.events:
        event = readable_event(entry)
        if event is not None and (before is None or id_order(entry.id) < (before, 0)):
            events.append(entry)
            _note(newest, event, entry.h)
    return events, newest


def _sequences(newest: dict[str, tuple[int, str]]) -> dict[str, str | int]:
    """Return the fields `seq:{writer}` of meta for each writer's newest number and hash."""
    return {f"seq:{writer}": f"{number} {entry_hash}" for writer, (number, entry_hash) in newest.items()}


def _note(newest: dict[str, tuple[int, str]], event: event_pb2.Event, entry_hash: str) -> None:
    """Set in `newest` the number and the hash of an event's writer, if the event is the writer's newest.

    An event whose number no writer can have reached is ignored.
    """
    known, _ = newest.get(event.writer, (0, ""))
    # A number above that is foreign: no writer has made so many events. It might leave its writer no next number.
    if known < event.writer_sequence <= max(MAX_SEQUENCE // 2, known + 1):
        newest[event.writer] = event.writer_sequence, entry_hash


def _entry(event: event_pb2.Event) -> Entry:
    """Return an entry with this event's bytes and their hash, without id and trace context."""
    data = event.SerializeToString(deterministic=True)
    return Entry(id="", v=FORMAT_MAJOR, h=hashlib.sha256(data).hexdigest(), d=data, tp="")


def _roles(store: ObjectStore, names: Names) -> list[str]:
    """Return every role that ever had an epoch in the store, except the log itself ("log")."""
    found = (prefix.removeprefix(names.all_epochs).rstrip("/") for prefix in store.list_prefixes(names.all_epochs))
    return [role for role in found if role != GENERATION_ROLE]


def _first_batch(store: ObjectStore, names: Names, origin: RunOrigin, policies: Sequence[tuple[int, int]]) -> int:
    """Return the first batch that Redis has to hold: the one after the batches that the newest published policy is made
    of.

    `policies` has the version and the lineage of each policy that was begun, ascending. A trainer that begins earlier
    reads the batches before it from the store.
    """
    version = next((version for version, lineage in reversed(policies) if _is_there(store, names, version, lineage)), 0)
    is_backed = version > origin.base_step and store.head(names.batch_header(version - 1)) is not None
    return version if is_backed else origin.base_step


def _first_policy(store: ObjectStore, names: Names, origin: RunOrigin, policies: Sequence[tuple[int, int]]) -> int:
    """Return the lowest version from which all up to the newest in the store are there; `origin.base_step` if none is.

    At most KEPT_POLICIES versions are counted. `policies` are version and lineage of each that was begun, ascending;
    those before `origin.base_step` are ignored, and so are those above the newest whose manifest is there.
    """
    lineages: dict[int, list[int]] = {}
    for version, lineage in policies:
        if version >= origin.base_step:
            lineages.setdefault(version, []).append(lineage)
    held: list[int] = []
    # From the newest down to the first hole, because Redis takes versions without a gap.
    for version in sorted(lineages, reverse=True):
        if any(_is_there(store, names, version, lineage) for lineage in lineages[version]):
            if held and version != held[-1] - 1:
                break
            held.append(version)
            if len(held) == KEPT_POLICIES:
                break
        elif held:
            # A hole: retention has removed what is below.
            break
    return held[-1] if held else origin.base_step


def _is_there(store: ObjectStore, names: Names, version: int, lineage: int) -> bool:
    """Return whether a policy of this lineage and version is published: whether the store has its manifest."""
    return store.head(names.policy_manifest(lineage, version)) is not None


logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 10  # each repetition means that Redis was wiped once more meanwhile
_TEMPORARY_S = 600  # the rebuilt events of a dead rebuilder go after that
PAGE_ENTRIES = 500
ENDED_S = 3600.0
"""How long Redis keeps the log of a run that has ended, since its end or since somebody last had it put back."""
MAX_PROMPT = 3  # rebuilds because of damage that need not wait
BACKOFF = Backoff(5.0, 60.0)
_DAMAGE_WINDOW_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rebuild:
    """One try: its generation, and which one it replaces (b"" = none)."""

    log: RunLog
    generation: int
    stale: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stale:
    """What a rebuild replaces: a copy of the log that is not current, or nothing."""

    generation: bytes
    """What Redis names as its generation, as it is there; b"" if it holds none."""
    why: str
    is_damaged: bool = False


async def open_or_rebuild(
    redis: redis_asyncio.Redis, store: ObjectStore, *, prefix: str, uid: str, owner: str
) -> RunLog:
    """Return the log of an existing run, opened.

    Where Redis does not hold it, or a stale copy, rebuild it from the store. `owner` is named in the new generation.
    Only orchestrators call it, for runs of the index. `NotFoundError` if the store has no such run, or is about to
    delete it; `UnavailableError` if the log is lost again and again. The winner of a rebuild leaves a warning event
    LOG_REBUILT that says what was restored.
    """
    names = Names(prefix, uid)
    for _ in range(_MAX_ATTEMPTS):
        log = RunLog(redis, store, names=names, generation=0, run_hash="")
        # No look at the store: this process has compared this very instance before.
        if await _is_proven(log):
            return log
        what = f"the log of run {uid} to be compared with the store, and rebuilt if need be"
        # Damage that an earlier try found still says why the run does not go on.
        if damage := proof_of(log).damage:
            what += f" ({damage})"
        with waits.waiting(what, waits_on="object store"):
            async with proof_of(log).lock:
                if await _make_current(log, owner):
                    return log
    raise UnavailableError(
        f"the log of run {uid} was lost again {_MAX_ATTEMPTS} times while it was rebuilt",
        reason="LOG_UNSTABLE",
        remedy="see why Redis keeps losing its data",
        metadata={"uid": uid},
    )


async def _is_proven(log: RunLog) -> bool:
    """Open the log, and return whether Redis holds it as an instance that this process has found to be current
    before.
    """
    try:
        await log.reopen(is_checked=False)
        instance = await log.read_instance()
    except LogGoneError:
        return False
    return is_nameable(instance) and proof_of(log).instance == instance


async def _make_current(log: RunLog, owner: str) -> bool:
    """Open the log and return True if it is current; else try once to rebuild it, and return False.

    `owner` is named in the new generation. `LogGoneError` if a damaged log was rebuilt so often that the next try has
    to wait.
    """
    stale = await _find_stale(log)
    proof_of(log).damage = stale.why if stale is not None and stale.is_damaged else ""
    if stale is None:
        return True
    if stale.is_damaged:
        _pace(log, stale.why)
    await _rebuild(log, stale, owner)
    return False


async def open_reopened(redis: redis_asyncio.Redis, store: ObjectStore, *, prefix: str, uid: str, owner: str) -> RunLog:
    """Open the log of a run that was reopened, rebuilt without the closing header that does not end the run any more.

    Redis' copy is compared with the store anew; else as `open_or_rebuild`. The log does not expire any more.
    """
    proof_of(RunLog(redis, store, names=Names(prefix, uid), generation=0, run_hash="")).instance = ""
    log = await open_or_rebuild(redis, store, prefix=prefix, uid=uid, owner=owner)
    await log.persist()
    return log


async def _find_stale(log: RunLog) -> _Stale | None:
    """Open the log, and return what a rebuild has to replace; None if Redis holds the log and it is current."""
    proof = proof_of(log)
    try:
        await log.reopen(is_checked=False)
        instance = await log.read_instance()
        if proof.instance != instance or not is_nameable(instance):
            # Not proven while it is compared: an error in between must not leave it so.
            proof.instance = ""
            await log.require_true()
            if why := await _why_stale(log):
                return _Stale(generation=str(log.generation).encode(), why=why)
            proof.instance = instance
    except LogGoneError as error:
        # Whatever is there now is what is replaced, also if it is no generation at all.
        held = await connection.call(
            log.redis, f"looking at the log of run {log.uid}", lambda: script.HELD.run(log.redis, [log.names.meta], [])
        )
        is_damaged = error.reason == "LOG_DAMAGED"
        why = error.message.removesuffix("; being rebuilt") if is_damaged else LOST
        return _Stale(generation=held, why=why, is_damaged=is_damaged)
    return None


def _pace(log: RunLog, damage: str) -> None:
    """Note a rebuild of the log because of `damage` (in words).

    `LogGoneError` if there were so many that it has to wait.
    """
    proof, now = proof_of(log), time.monotonic()
    proof.rebuilt = [at for at in proof.rebuilt if now - at < _DAMAGE_WINDOW_S]
    extra = len(proof.rebuilt) - MAX_PROMPT
    # The first `MAX_PROMPT` rebuilds of the window do not wait.
    if extra >= 0:
        left_s = proof.rebuilt[-1] + BACKOFF.after(1 + extra) - now
        if left_s > 0:
            raise LogGoneError(
                f"{damage}; it was rebuilt {len(proof.rebuilt)} times within {now - proof.rebuilt[0]:.0f} s and was "
                f"damaged again each time, the next try is in {left_s:.0f} s",
                reason="LOG_UNSTABLE",
                remedy="find out who else writes to this Redis",
                metadata={"uid": log.uid},
            )
    proof.rebuilt.append(now)


async def _why_stale(log: RunLog) -> str:
    """Return why the copy that Redis holds has to be replaced; empty if it is as new as the store.

    The mark of its generation is written if its rebuilder died before it did.
    """
    installed = await asyncio.to_thread(_newest_installed, log.store, log.names)
    where = {"uid": log.uid, "held": log.generation, "installed": installed}
    # Redis came back from a file that is older than the last rebuild.
    if log.generation < installed:
        logger.warning("Redis holds an older generation of the log than was installed", extra=where)
        return LOST
    # Redis would give new events the ids of archived ones that it has lost.
    newest = await asyncio.to_thread(load_newest_archived, log.store, log.names)
    if newest is not None:
        held = await log.read_range(Stream.EVENTS, newest.id, newest.id)
        await log.check()
        # An absent event may also mean that the stream was wiped between two commands, which `check` has ruled out.
        if [entry.h for entry in held] != [newest.h]:
            logger.warning("Redis lost events that the store has", extra={**where, "event": newest.id})
            return LOST
    for record in await asyncio.to_thread(load_reopenings, log.store, log.names):
        id_ = f"{record.step}-1"
        held = await log.read_range(Stream.BATCHES, id_, id_)
        # An entry cannot be removed again, and a reader of this one would believe that the run has ended.
        if [entry.h for entry in held] == [record.closing_sha256]:
            return f"the run was reopened at step {record.step + 1}, and Redis had the closing header of its end"
    # The rebuilder died between its install and this mark.
    if log.generation > max(installed, 1):
        await asyncio.to_thread(log.store.create, log.names.generation(log.generation), b"")
    return ""


def _newest_installed(store: ObjectStore, names: Names) -> int:
    """Return the newest generation of which the store has a mark that it was put in place; 1 without any."""
    marks = [info.key.removeprefix(names.generations) for info in store.list(names.generations)]
    numbers = [int(mark) for mark in marks if mark.isdecimal()]
    taken = latest_epoch(store, names, GENERATION_ROLE) if numbers else 0
    # A mark of a generation that nobody took is foreign.
    return max((number for number in numbers if number <= taken), default=1)


async def _rebuild(log: RunLog, stale: _Stale, owner: str) -> None:
    """Try once to put a new generation of the log in place of `stale`.

    It is no error if another process was faster, or Redis was wiped again: the caller looks again. A sealed run gets
    the log as it ended.
    """
    await asyncio.to_thread(require_exists, log.store, log.names)
    if await asyncio.to_thread(is_sealed, log.store, log.names) and await _put_back(log, stale):
        return
    # Exactly one rebuilder gets each number, so that no two fill the same key.
    epoch = await create_epoch(log.store, log.names, GENERATION_ROLE, owner)
    rebuild = _Rebuild(log=log, generation=epoch.number, stale=stale.generation)
    replaced = {"stale": as_text(stale.generation), "why": stale.why}
    logger.warning(
        "rebuilding the log of the run",
        extra={"uid": log.uid, "generation": epoch.number, "owner": owner, **replaced},
    )
    restored = await asyncio.to_thread(load_restored, log.store, log.names)
    held = await read_events(log)
    restored = merge_events(restored, held, generation=epoch.number, now_ns=time.time_ns(), why=stale.why)
    await _fill(rebuild, restored)
    answer = await _install(rebuild, restored, expires_s=0.0)
    if answer != "OK":
        await log.command("dropping a rebuild", "DEL", log.names.rebuilt_events(epoch.number))
        logger.info("log not installed", extra={"uid": log.uid, "generation": epoch.number, "answer": answer})
        return
    # After the install: a mark of a generation that was never put in place would make the copy that Redis holds stale.
    # If this process dies before it, the next opener writes the mark (`_why_stale`).
    await asyncio.to_thread(log.store.create, log.names.generation(epoch.number), b"")
    logger.warning("log of the run rebuilt", extra={"uid": log.uid, "summary": restored.summary})


async def _put_back(log: RunLog, stale: _Stale) -> bool:
    """Install in Redis the log of a sealed run as it ended; return False if the store has no event of the run.

    The store is only read. Nobody appends to such a log any more, so two processes that do this at once install the
    same. The log in Redis expires after `ENDED_S`.
    """
    generation = await asyncio.to_thread(_newest_installed, log.store, log.names)
    restored = as_sealed(await asyncio.to_thread(load_restored, log.store, log.names))
    if not restored.events:
        return False
    rebuild = _Rebuild(log=log, generation=generation, stale=stale.generation)
    logger.info("putting the log of an ended run back into Redis", extra={"uid": log.uid, "why": stale.why})
    await _fill(rebuild, restored)
    await _install(rebuild, restored, expires_s=ENDED_S)
    return True


async def _fill(rebuild: _Rebuild, restored: Restored) -> None:
    """Write the restored events into the rebuild's temporary key, which expires."""
    log = rebuild.log
    key = log.names.rebuilt_events(rebuild.generation)
    for first in range(0, len(restored.events), PAGE_ENTRIES):
        page = restored.events[first : first + PAGE_ENTRIES]

        async def write(page=page, first=first) -> None:
            """Add a page of events to the temporary key; a page that is there already is no error."""
            # One transaction, so that a page is there as a whole or not at all: a repeated first entry then means a
            # repeated page.
            pipeline = log.redis.pipeline(transaction=True)
            if first == 0:
                # What an earlier try has written, whose answer was lost.
                pipeline.delete(key)
            for entry in page:
                pipeline.execute_command(
                    "XADD", key, entry.id, "v", entry.v, "h", entry.h, "d", entry.d, "tp", entry.tp
                )
            pipeline.expire(key, _TEMPORARY_S)
            try:
                await pipeline.execute()
            except ResponseError as error:
                # Otherwise this page is there: the answer to it was lost.
                if "equal or smaller" not in str(error):
                    raise

        await log.call("restoring events", write)


async def _install(rebuild: _Rebuild, restored: Restored, *, expires_s: float) -> str:
    """Put a rebuilt log in place of the stale one, or of none, in one step; it expires after `expires_s` seconds, 0 for
    never.

    Return "OK", or the script's answer if Redis holds something else by now ("HELD") or not all events ("INCOMPLETE").
    """
    log, names = rebuild.log, rebuild.log.names
    keys = [
        names.meta,
        names.stream(Stream.EVENTS),
        names.rebuilt_events(rebuild.generation),
        names.stream(Stream.BATCHES),
        names.stream(Stream.POLICIES),
        names.stream(Stream.ROLLOUTS),
    ]
    args: list[str | int | bytes] = [rebuild.generation, rebuild.stale, len(restored.events), round(1000 * expires_s)]
    args += ["format", FORMAT_MAJOR]
    for field, value in restored.meta.items():
        args += [field, value]
    reply = await log.call("installing a rebuilt log", lambda: script.INSTALL_LOG.run(log.redis, keys, args))
    answer, held = (as_text(part) for part in reply)
    # The answer to an earlier attempt of this very install may have been lost.
    return "OK" if answer == "HELD" and held == str(rebuild.generation) else answer
