"""Which runs exist. The store is the truth, the Redis hash `{prefix}:runs` (name → uid) the fast copy.

Creating a run writes, in this order, all create-only and each by a rule that lets a repetition finish it:

1. `runs/{uid}/run.json`            under a fresh uid: nobody sees it yet
2. `requests/{request_id}` → uid    decides which of several equal requests creates the run; a loser takes over its uid
3. meta in Redis                    the log can be opened (before it, a fork copies what it begins with)
4. `names/{name}` → uid             **the commit**: the run exists and its name is taken
5. `{prefix}:runs` name → uid       listed; a pending mark `?uid` written before step 4 finds it after a crash

A name whose object cannot be read, when the hash is built again, is marked there (`!name`) and looked at each time.

What a crash before step 4 leaves is invisible, and the same request id completes it.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio as redis_asyncio

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import AlreadyExistsError, CorruptObjectError, InvalidSpecError, NotFoundError
from millrace.runlog.names import Deployment, Names, check_run_name
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.redis import connection
from millrace.runlog.redis.connection import as_text
from millrace.runlog.redis.log import RunLog
from millrace.storage import ObjectStore

logger = logging.getLogger(__name__)

_MAX_UID_BYTES = 1 << 10
_PENDING = "?"  # no run name begins with it
_DAMAGED = "!"  # nor with this
_COMPLETE = "*"  # field that says: this hash was built from the store, so a missing name is a missing run


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

    `run_json` must be a JSON object with the strings `name` and `run_hash`. `AlreadyExistsError` (RUN_NAME_TAKEN) if
    another run has the name. `prepare` (blocking) gets the uid and the run.json of the run and writes what the run
    begins with, before anybody can see it; a repeated request repeats it.
    """
    deployment = Deployment(prefix)
    owner = await asyncio.to_thread(read_uid, store, deployment.name_object(name))
    if owner is not None:
        earlier = await find_request(store, prefix, request_id) if request_id else None
        if earlier is None:
            raise _name_taken(name, owner)
        return earlier
    await asyncio.to_thread(store.create, Names(prefix, uid).run_json, run_json)
    if request_id:
        uid = await asyncio.to_thread(_claim, store, deployment.request_object(request_id), uid)
        run_json = await asyncio.to_thread(store.get, Names(prefix, uid).run_json)
        name = _name_in(run_json, Names(prefix, uid).run_json)  # of the request that came first: ours if it is ours
        if await asyncio.to_thread(read_uid, store, deployment.name_object(name)) == uid:
            return uid
    await asyncio.to_thread(prepare, uid, run_json)
    await RunLog.create(redis, store, prefix, uid, run_json)
    # By this mark the run is found if a crash after the commit leaves it unlisted.
    await _hash(redis, deployment, "HSET", _PENDING + uid, name)
    # The commit: from here on the run exists, or another one has the name.
    winner = await asyncio.to_thread(_claim, store, deployment.name_object(name), uid)
    if winner != uid:
        await connection.call(redis, f"dropping run {uid}", lambda: redis.delete(*Names(prefix, uid).all_keys))
        await _hash(redis, deployment, "HDEL", _PENDING + uid)
        raise _name_taken(name, winner)
    await _promote(redis, deployment, name, uid)
    return uid


async def find_request(store: ObjectStore, prefix: str, request_id: str) -> str | None:
    """Return the uid of the run that a request has created; None if it has not, or not completely (create it again)."""
    return await asyncio.to_thread(_find_request, store, prefix, request_id)


async def read_index(redis: redis_asyncio.Redis, store: ObjectStore, prefix: str) -> RunIndex:
    """Return every run, and the names whose objects are damaged; build the Redis hash again where Redis has lost it."""
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
        for name, uid in stored.runs.items():
            await _promote(redis, deployment, name, uid)
        for name in stored.damaged:
            await _hash(redis, deployment, "HSET", _DAMAGED + name, name)
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
            await _promote(redis, deployment, name, held)
            runs[name] = held
    index.runs.update(runs)
    for name in index.runs:  # what Redis knows needs no object
        index.damaged.pop(name, None)
    return index


def _find_request(store: ObjectStore, prefix: str, request_id: str) -> str | None:
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
    """Return whether a field of the hash may be a run, or a mark of one, by its form."""
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
    return check_run_name(RunRecord.parse(run_json, where=where, needs=["name"]).name)


async def _promote(redis: redis_asyncio.Redis, deployment: Deployment, name: str, uid: str) -> None:
    """List a run, and drop its marks."""
    await _hash(redis, deployment, "HSET", name, uid)
    await _hash(redis, deployment, "HDEL", _PENDING + uid, _DAMAGED + name)


async def _hash(redis: redis_asyncio.Redis, deployment: Deployment, command: str, *args: str) -> Any:
    key = deployment.runs_key
    if command == "HGETALL":
        try:
            return await connection.call(redis, "reading the index of runs", lambda: redis.hgetall(key))
        except CorruptObjectError as error:
            logger.error("the index of runs is no hash, it is made anew", extra={"error": error.message})
            await connection.call(redis, "dropping the index of runs", lambda: redis.delete(key))
            return {}
    return await connection.call(redis, "writing the index of runs", lambda: redis.execute_command(command, key, *args))


def _claim(store: ObjectStore, key: str, uid: str) -> str:
    """Create `key` → uid, or return the uid that holds it."""
    if store.create(key, uid.encode()):
        return uid
    return read_uid(store, key) or uid


def read_uid(store: ObjectStore, key: str) -> str | None:
    """Return the uid that an object of the index names.

    None if there is no such object, CorruptObjectError if it has none.
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
    """Return every run, from the store (blocking); a name that cannot be read is logged, and is in `damaged`."""
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
    return AlreadyExistsError(
        f"a run called {name!r} exists (uid {uid})",
        reason="RUN_NAME_TAKEN",
        remedy="choose another name, or leave it out to get one",
        metadata={"run": name, "uid": uid},
    )
