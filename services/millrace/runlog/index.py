"""Which runs exist, and which of them may not have ended. The store is the truth, two Redis hashes are the fast copy:
`{prefix}:runs` (name → uid) of all, `{prefix}:open` (mark → name) of those that may not have ended.

Creating a run writes, in this order, all create-only and each by a rule that lets a repetition finish it:

1. `runs/{uid}/run.json`            under a fresh uid: nobody sees it yet
2. `requests/{request_id}` → uid    decides which of several equal requests creates the run; a loser takes over its uid
3. meta in Redis                    the log can be opened (before it, a fork copies what it begins with)
4. `open/{uid}.0`                   its mark, until it has ended and is sealed; reopening a run writes the next one
5. `names/{name}` → uid             **the commit**: the run exists and its name is taken
6. `{prefix}:runs` name → uid       listed; a pending mark `?uid` written before step 5 finds it after a crash

A name whose object cannot be read, when the hash is built again, is marked there (`!name`) and looked at each time.

What a crash before step 5 leaves is invisible, and the same request id completes it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import redis.asyncio as redis_asyncio
from redis.exceptions import ResponseError

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import AlreadyExistsError, CorruptObjectError, InvalidSpecError, MillraceError, NotFoundError
from millrace.runlog.names import Deployment, Names, Stream, check_run_name
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.redis import connection
from millrace.runlog.redis.connection import as_text
from millrace.runlog.redis.log import RunLog
from millrace.storage import ObjectStore
from millrace.telemetry import faults

logger = logging.getLogger(__name__)

_MAX_UID_BYTES = 1 << 10
_PENDING = "?"  # no run name begins with it
_DAMAGED = "!"  # nor with this
_OPEN = "the index of open runs"
_PAGE = 500  # runs in one command
# This field says that the hash was built from the store: a name that is missing in it is no run.
_COMPLETE = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIndex:
    """Every run of a deployment."""

    runs: dict[str, str] = field(default_factory=dict)
    """Name → uid."""
    damaged: dict[str, CorruptObjectError] = field(default_factory=dict)
    """Name → why nobody can say which run has it."""


async def create_run(
    redis: redis_asyncio.Redis,
    store: ObjectStore,
    prefix: str,
    *,
    uid: str,
    name: str,
    request_id: str = "",
    run_json: bytes,
    prepare: Callable[[str, bytes], None] = lambda uid, run_json: None,
) -> str:
    """Create a run and return its uid: another than `uid` if `request_id` has created one before.

    `run_json` must be a JSON object with the strings `name` and `run_hash`; an empty `request_id` is none.
    `AlreadyExistsError` (RUN_NAME_TAKEN) if another run has the name. `prepare` (blocking) gets the uid and the
    run.json of the run and writes what the run begins with, before anybody can see it; a repeated request repeats it.
    """
    deployment = Deployment(prefix)
    owner = await asyncio.to_thread(read_uid, store, deployment.name_object(name))
    if owner is not None:
        # The name is another run's, or this request created it and its answer was lost.
        earlier = await find_request(store, prefix, request_id) if request_id else None
        if earlier is None:
            raise _name_taken(name, owner)
        return earlier
    await asyncio.to_thread(store.create, Names(prefix, uid).run_json, run_json)
    if request_id:
        uid = await asyncio.to_thread(_claim, store, deployment.request_object(request_id), uid)
        run_json = await asyncio.to_thread(store.get, Names(prefix, uid).run_json)
        # The name in the run.json that the first request stored, which may be another one than ours.
        name = _name_in(run_json, Names(prefix, uid).run_json)
        if await asyncio.to_thread(read_uid, store, deployment.name_object(name)) == uid:
            return uid
    await asyncio.to_thread(prepare, uid, run_json)
    await RunLog.create(redis, store, prefix, uid, run_json)
    await asyncio.to_thread(store.create, deployment.open_object(uid), name.encode())
    # By this mark the run is found if a crash after the commit leaves it unlisted.
    await _hash(redis, deployment, "HSET", _PENDING + uid, name)
    # The commit: from here on the run exists, or another one has the name.
    winner = await asyncio.to_thread(_claim, store, deployment.name_object(name), uid)
    if winner != uid:
        # What was written under the uid stays in the store: without a name nobody sees it.
        await connection.call(redis, f"dropping run {uid}", lambda: redis.delete(*Names(prefix, uid).all_keys))
        await _hash(redis, deployment, "HDEL", _PENDING + uid)
        await asyncio.to_thread(store.delete, deployment.open_object(uid))
        raise _name_taken(name, winner)
    await _promote(redis, deployment, {name: uid})
    await list_open(redis, prefix, uid=uid, name=name, number=0)
    return uid


async def find_request(store: ObjectStore, prefix: str, request_id: str) -> str | None:
    """Return the uid of the run that a request has created; None if there is none, or it was not created completely."""
    return await asyncio.to_thread(_find_request, store, prefix, request_id)


async def read_index(redis: redis_asyncio.Redis, store: ObjectStore, prefix: str) -> RunIndex:
    """Return every run, and the names whose objects are damaged.

    It reads the Redis hash, and builds that again from the store where Redis has lost it.
    """
    deployment = Deployment(prefix)
    found = await _hash(redis, deployment, "HGETALL")
    runs = {as_text(name): as_text(uid) for name, uid in found.items()}
    for name in [name for name, uid in runs.items() if name != _COMPLETE and not _is_ours(name, uid)]:
        logger.error(
            "a field of the index of runs is foreign", extra={"field": name[:200], "uid": runs.pop(name)[:200]}
        )
    index = RunIndex()
    if runs.pop(_COMPLETE, None) is None:
        stored = await asyncio.to_thread(read_names, store, deployment)
        await _promote(redis, deployment, stored.runs)
        for name in stored.damaged:
            await _hash(redis, deployment, "HSET", _DAMAGED + name, name)
        # Last: a hash that a crash left half filled must not count as whole.
        await _hash(redis, deployment, "HSET", _COMPLETE, "1")
        runs |= stored.runs
        index.damaged.update(stored.damaged)
    for mark in [mark for mark in runs if mark[0] in _PENDING + _DAMAGED]:
        uid, name = mark.removeprefix(_PENDING), runs.pop(mark)
        try:
            held = await asyncio.to_thread(read_uid, store, deployment.name_object(name))
        except CorruptObjectError as error:
            index.damaged[name] = error
            continue
        if held is not None and (held == uid or mark.startswith(_DAMAGED)):
            await _promote(redis, deployment, {name: held})
            runs[name] = held
    index.runs.update(runs)
    # A name that Redis knows does not need its object.
    for name in index.runs:
        index.damaged.pop(name, None)
    return index


async def find_uid(redis: redis_asyncio.Redis, store: ObjectStore, prefix: str, wanted: str) -> tuple[str, str] | None:
    """Return name and uid of the run whose name or uid is `wanted`; None if there is none.

    Its cost does not grow with the number of runs. CorruptObjectError if what the store has of the run cannot be read.
    """
    deployment = Deployment(prefix)

    def of_uid() -> tuple[str, str] | None:
        """Return name and uid of the run whose uid is wanted, from the store.

        None if there is none, or it was not committed.
        """
        try:
            key = Names(prefix, wanted).run_json
            name = _name_in(store.get(key, max_bytes=MAX_JSON_BYTES), key)
        except (NotFoundError, InvalidSpecError):
            return None
        return (name, wanted) if read_uid(store, deployment.name_object(name)) == wanted else None

    try:
        key = deployment.name_object(wanted)
    except InvalidSpecError:
        # What cannot be a name may be a uid.
        return await asyncio.to_thread(of_uid)
    held = as_text(await _hash(redis, deployment, "HGET", wanted))
    # The hash may have lost the name with Redis: then the name's object decides.
    uid = held if held and _is_ours(wanted, held) else await asyncio.to_thread(read_uid, store, key)
    return (wanted, uid) if uid else await asyncio.to_thread(of_uid)


# Which runs may not have ended: one mark for each, and a further one for each reopening.


async def list_open(redis: redis_asyncio.Redis, prefix: str, *, uid: str, name: str, number: int) -> None:
    """Add a run to the Redis hash of runs that may not have ended; `number` is how often it was reopened.

    The store has its mark already.
    """
    await _in_hash(redis, Deployment(prefix).open_key, _OPEN, "HSET", f"{uid}.{number}", name)


async def note_ended(redis: redis_asyncio.Redis, store: ObjectStore, prefix: str, *, uid: str, number: int) -> None:
    """Remove all marks that the run may not have ended, in the store and in Redis: its end is sealed.

    `number` is how often it was reopened.
    """
    deployment = Deployment(prefix)
    # The store first: a run whose marks only Redis has is found at every look, and this is done again. One whose marks
    # only the store has is found when both are compared.
    # Of every earlier reopening as well: a process that died may have left its mark.
    for each in range(number + 1):
        await asyncio.to_thread(store.delete, deployment.open_object(uid, each))
    faults.reach(faults.Point.ORCHESTRATOR_MID_UNLIST)
    marks = (f"{uid}.{each}" for each in range(number + 1))
    await _in_hash(redis, deployment.open_key, _OPEN, "HDEL", *marks)


async def read_open(
    redis: redis_asyncio.Redis, store: ObjectStore, prefix: str, *, is_compared: bool
) -> dict[str, str]:
    """Return uid → name of every run that may not have ended.

    The store is asked only if `is_compared`, or where Redis lost the hash. What the hash lacks is then added to it, by
    one try, so that a Redis that takes no writes delays nobody who reads.
    """
    deployment = Deployment(prefix)
    found = await _in_hash(redis, deployment.open_key, _OPEN, "HGETALL")
    marks = {as_text(mark): as_text(name) for mark, name in found.items()}
    is_complete = marks.pop(_COMPLETE, None) is not None
    for mark in [mark for mark, name in marks.items() if not _is_mark(mark, name)]:
        logger.error("a field of the index of open runs is foreign", extra={"field": mark[:200]})
        del marks[mark]
    # A hash without that field was lost, and only has what was written since.
    if is_compared or not is_complete:
        missing = await asyncio.to_thread(_load_open, store, deployment, marks)
        marks |= missing
        if missing or not is_complete:
            await _try_to_complete(redis, deployment, missing)
    return {mark.rpartition(".")[0]: name for mark, name in marks.items()}


async def _try_to_complete(redis: redis_asyncio.Redis, deployment: Deployment, missing: Mapping[str, str]) -> None:
    """Add the `missing` marks (mark → name) to the hash of open runs, and the field that says it is complete.

    It is tried once; a failure is logged.
    """
    try:
        for some in _pages({**missing, _COMPLETE: "1"}):
            words = ("HSET", deployment.open_key, *chain.from_iterable(some))
            await connection.call(redis, f"writing {_OPEN}", partial(redis.execute_command, *words), deadline_s=0.0)
    except MillraceError as error:
        logger.warning("%s is not written, it is read from the store", _OPEN, extra={"error": error.message})


def _load_open(store: ObjectStore, deployment: Deployment, known: Mapping[str, str]) -> dict[str, str]:
    """Return the marks in the store that are not in `known`, with the names of their runs (blocking).

    Marks of runs that were not created whole, or cannot be read, are left out. In a deployment that had runs before
    there were marks every run gets one.
    """
    if store.head(deployment.open_complete) is None:
        for name, uid in read_names(store, deployment).runs.items():
            store.create(deployment.open_object(uid), name.encode())
        store.create(deployment.open_complete, b"")
    found: dict[str, str] = {}
    for info in store.list(deployment.open_prefix):
        mark = info.key.removeprefix(deployment.open_prefix)
        if mark not in known and _is_mark(mark, "any"):
            uid = mark.rpartition(".")[0]
            try:
                name = store.get(info.key, max_bytes=_MAX_UID_BYTES).decode()
                if read_uid(store, deployment.name_object(name)) == uid:
                    found[mark] = name
            except (NotFoundError, CorruptObjectError, InvalidSpecError, UnicodeDecodeError) as error:
                logger.warning("an open run cannot be read", extra={"uid": uid, "error": str(error)})
    return found


def _pages(fields: Mapping[str, str]) -> Iterator[list[tuple[str, str]]]:
    """Yield the items (field, value) of a mapping in lists of at most `_PAGE`, for one command each."""
    items = list(fields.items())
    for first in range(0, len(items), _PAGE):
        yield items[first : first + _PAGE]


def _is_mark(mark: str, name: str) -> bool:
    """Return whether a field of the hash of open runs has the form `{uid}.{number}`, and `name` that of a run's
    name.
    """
    uid, _, number = mark.rpartition(".")
    return number.isdecimal() and _is_ours(name, uid)


def _find_request(store: ObjectStore, prefix: str, request_id: str) -> str | None:
    """Return the uid of the run that a request has created.

    None if there is none, or it was not created whole (blocking).
    """
    deployment = Deployment(prefix)
    uid = read_uid(store, deployment.request_object(request_id))
    if uid is None:
        return None
    try:
        name = _name_in(store.get(Names(prefix, uid).run_json, max_bytes=MAX_JSON_BYTES), Names(prefix, uid).run_json)
    except NotFoundError:
        return None
    return uid if read_uid(store, deployment.name_object(name)) == uid else None


def _is_ours(field: str, value: str) -> bool:
    """Return whether a field and value of the hash of runs have the form of a run, or of a mark of one."""
    if field.startswith(_DAMAGED):
        uid, name = "any", field.removeprefix(_DAMAGED)
        if value != name:
            return False
    elif field.startswith(_PENDING):
        uid, name = field.removeprefix(_PENDING), value
    else:
        uid, name = value, field
    try:
        check_run_name(name)
        Names("any", uid)
    except InvalidSpecError:
        return False
    return True


def _name_in(run_json: bytes, where: str) -> str:
    """Return the run's name in a run.json; CorruptObjectError, naming `where`, or InvalidSpecError if it has none."""
    return check_run_name(RunRecord.parse(run_json, where=where, needs=["name"]).name)


async def _promote(redis: redis_asyncio.Redis, deployment: Deployment, runs: Mapping[str, str]) -> None:
    """List runs (name → uid) in the Redis hash as whole ones: their marks as pending or damaged are removed."""
    for some in _pages(runs):
        await _hash(redis, deployment, "HSET", *chain.from_iterable(some))
        marks = ((_PENDING + uid, _DAMAGED + name) for name, uid in some)
        await _hash(redis, deployment, "HDEL", *chain.from_iterable(marks))


async def _hash(redis: redis_asyncio.Redis, deployment: Deployment, command: str, *args: str) -> Any:
    """Run a Redis command on the hash of all runs, with these arguments after the key; return its answer."""
    return await _in_hash(redis, deployment.runs_key, "the index of runs", command, *args)


async def _in_hash(redis: redis_asyncio.Redis, key: str, what: str, command: str, *args: str) -> Any:
    """Run a Redis command on the hash `key` of the index, and return its answer; `what` names the hash in messages.

    If the key is no hash, HGETALL removes it and returns an empty result; other commands raise CorruptObjectError.
    """
    if command == "HGETALL":
        try:
            return await connection.call(redis, f"reading {what}", lambda: redis.hgetall(key))
        except CorruptObjectError as error:
            logger.error("%s is no hash, it is made anew", what, extra={"error": error.message})
            await connection.call(redis, f"dropping {what}", lambda: redis.delete(key))
            return {}
    return await connection.call(redis, f"writing {what}", lambda: redis.execute_command(command, key, *args))


def _claim(store: ObjectStore, key: str, uid: str) -> str:
    """Create the object `key` with this uid, and return the uid that it holds: ours, or that of who was first
    (blocking).
    """
    if store.create(key, uid.encode()):
        return uid
    return read_uid(store, key) or uid


def read_uid(store: ObjectStore, key: str) -> str | None:
    """Return the uid that an object of the index (a name's, a request's) holds (blocking).

    None if there is no such object, CorruptObjectError if it holds no uid.
    """
    try:
        data = store.get(key, max_bytes=_MAX_UID_BYTES)
    except NotFoundError:
        return None
    try:
        return Names("any", data.decode()).uid
    except (UnicodeDecodeError, InvalidSpecError) as error:
        raise CorruptObjectError(
            f"{store.uri(key)} holds no uid",
            reason="INDEX_CORRUPT",
            remedy="write the uid of the run whose run.json has that name into it again",
        ) from error


def read_names(store: ObjectStore, deployment: Deployment) -> RunIndex:
    """Return every run that has a name in the store (blocking).

    A name that cannot be read is logged, and is in `damaged`.
    """
    index = RunIndex()
    for info in store.list(deployment.names_prefix):
        name = info.key.removeprefix(deployment.names_prefix)
        try:
            uid = read_uid(store, deployment.name_object(name))
        except (CorruptObjectError, InvalidSpecError) as error:
            logger.error("an object of the index of runs cannot be read", extra={"key": info.key, "error": str(error)})
            if isinstance(error, CorruptObjectError):  # else its key is not of a run
                index.damaged[name] = error
            continue
        if uid is not None:
            index.runs[name] = uid
    return index


def _name_taken(name: str, uid: str) -> AlreadyExistsError:
    """Make the error for a name that the run `uid` has."""
    return AlreadyExistsError(
        f"a run called {name!r} exists (uid {uid})",
        reason="RUN_NAME_TAKEN",
        remedy="choose another name, or leave it out to get one",
        metadata={"run": name, "uid": uid},
    )


# Which logs have changed since they were read: what tells one state of a log from another, of many in one request.

_META_FIELDS = ("generation", "format", "run_hash", "damage")


class LogState(NamedTuple):
    """What Redis holds of a log at a moment. While it is the same, no event was appended, and the log was not lost."""

    server: str
    """Run id of the server, which changes when it restarts."""
    meta: tuple[str, ...]
    """The fields of meta that say which log it is, and whether it is damaged."""
    newest: tuple[str, str]
    """Id and hash of the newest event, empty without one."""


async def read_states(redis: redis_asyncio.Redis, names: Sequence[Names]) -> dict[str, LogState]:
    """Return by uid the state of each of these logs, from one request to Redis.

    A log is left out if Redis does not hold it, or does not say so: it has to be opened to find out why. None is in the
    result where INFO is denied, because a restart of the server would go unseen.
    """
    if not names:
        return {}

    async def ask() -> list[Any]:
        """Send one request and return the answers in its order; a command that failed has its error as the answer."""
        pipeline = redis.pipeline(transaction=False)
        pipeline.info("server")
        for each in names:
            pipeline.hmget(each.meta, _META_FIELDS)
            pipeline.xrevrange(each.stream(Stream.EVENTS), count=1)
        return await pipeline.execute(raise_on_error=False)

    info, *answers = await connection.call(redis, "asking which runs have news", ask)
    server = "" if isinstance(info, ResponseError) else as_text(info.get("run_id"))
    if not server:
        return {}
    found: dict[str, LogState] = {}
    for each, meta, events in zip(names, answers[::2], answers[1::2], strict=True):
        if isinstance(meta, ResponseError) or isinstance(events, ResponseError) or meta[0] is None:
            continue
        newest = (as_text(events[0][0]), as_text(events[0][1].get(b"h"))) if events else ("", "")
        found[each.uid] = LogState(server, tuple(as_text(value) for value in meta), newest)
    return found
