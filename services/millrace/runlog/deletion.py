"""Deletion of a run: what it has, who needs it, and its removal. Blocking, but for the copy in Redis.

    tombstone.json    first: who opens the log learns that the run is being deleted; it has the run's name
    names             of the run and of its request: nobody finds it any more
    objects           all but run.json, many in one request
    run.json, then tombstone.json

A deletion that dies goes on when it is asked for again, by uid or by the name that the tombstone has.
"""

import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import redis.asyncio as redis_asyncio

from millrace.decoding import MAX_JSON_BYTES, Fields, decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, NotFoundError
from millrace.runlog.catalogue import kind_at
from millrace.runlog.names import Deployment, Names
from millrace.runlog.records.revisions import has_ended
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.redis import connection
from millrace.storage import ObjectStore
from millrace.storage.base import MAX_DELETED
from millrace.storage.clean_up import delete_all
from millrace.telemetry.leftovers import Leftover

_AT_ONCE = 16  # records read at once
_MAX_LEFT = 3  # objects that cannot be deleted, until a deletion gives up
_ROLES = ("orchestrator", "trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What a deletion removes."""

    names: Names
    name: str
    request_id: str
    is_open: bool
    """The run has not ended: somebody may drive it."""
    needed_by: tuple[str, ...]
    """Names of the forks whose lineage begins with the run."""
    marks: tuple[str, ...]
    """Keys that say that the run may not have ended."""
    counts: Counter[str] = field(default_factory=Counter)
    """Objects by kind."""
    sizes: Counter[str] = field(default_factory=Counter)
    """Bytes by kind."""


def plan_deletion(store: ObjectStore, names: Names) -> Deletion:
    """Look at a run and at all others, and return what its deletion would remove, and who needs it.

    `NotFoundError` if the store has nothing of it.
    """
    counts, sizes = Counter[str](), Counter[str]()
    for info in store.list(names.root):
        kind = kind_at(info.key.removeprefix(names.root))
        name = "other object" if kind is None else kind.name
        counts[name] += 1
        sizes[name] += info.size_bytes
    if not counts:
        raise NotFoundError(
            f"{store.describe()} holds nothing of a run {names.uid}",
            reason="RUN_NOT_FOUND",
            remedy="check --store and --prefix",
        )
    name, request_id = _identity(store, names)
    return Deletion(
        names=names,
        name=name,
        request_id=request_id,
        is_open=not _has_ended(store, names),
        needed_by=tuple(sorted(_forks(store, names))),
        marks=tuple(info.key for info in store.list(f"{Deployment(names.prefix).open_prefix}{names.uid}.")),
        counts=counts,
        sizes=sizes,
    )


def require_unneeded(deletion: Deletion, *, may_be_open: bool, may_be_needed: bool) -> None:
    """Raise InvalidStateError if the run is open or forks need it, unless the caller allows that."""
    if deletion.is_open and not may_be_open:
        raise InvalidStateError(
            f"run {deletion.name!r} has not ended: its services would go on writing what is deleted",
            reason="RUN_OPEN",
            remedy=f"end it with `millrace run cancel {deletion.name}`; if nothing drives it any more: --even-open",
        )
    if deletion.needed_by and not may_be_needed:
        forks = ", ".join(deletion.needed_by[:8])
        raise InvalidStateError(
            f"run {deletion.name!r} is the parent of {forks}: their lineage begins with it",
            reason="RUN_NEEDED",
            remedy="delete these first; they have copies of what they train on: --even-needed leaves them without "
            "their history",
        )


def delete_run(
    store: ObjectStore, deletion: Deletion, *, by: str, on_progress: Callable[[int], None] = lambda count: None
) -> list[Leftover]:
    """Delete a run, and return what cannot be removed now; then its tombstone stays, and it is to be asked for again.

    `on_progress` gets the number of objects that are gone.
    """
    names = deletion.names
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    said = {"name": deletion.name, "request_id": deletion.request_id, "by": by, "time": time}
    store.create(names.tombstone, json.dumps(said, sort_keys=True).encode())
    deployment = Deployment(names.prefix)
    leads = [deployment.name_object(deletion.name)] if deletion.name else []
    leads += [deployment.request_object(deletion.request_id)] if deletion.request_id else []
    leads = [key for key in leads if _leads_to(store, key, names.uid)]
    left = delete_all(store, [*deletion.marks, *leads], what=_WHAT, most=_MAX_LEFT)
    last, gone = [names.run_json, names.tombstone], 0
    keys = (info.key for info in store.list(names.root) if info.key not in last)
    while not left and (some := list(islice(keys, MAX_DELETED))):
        left = delete_all(store, some, what=_WHAT, most=_MAX_LEFT)
        gone += len(some)
        on_progress(gone)
    for key in last if not left else ():
        left += delete_all(store, [key], what=_WHAT, most=_MAX_LEFT)
    return left


async def forget_run(redis: redis_asyncio.Redis, deletion: Deletion) -> None:
    """Remove a run from Redis: from the index of runs first, then its log and its leases."""
    names, deployment = deletion.names, Deployment(deletion.names.prefix)
    runs_key, marks = deployment.runs_key, [key.removeprefix(deployment.open_prefix) for key in deletion.marks]
    if deletion.name:
        await connection.call(
            redis, f"removing run {names.uid} from the index", lambda: redis.hdel(runs_key, deletion.name)
        )
    if marks:
        await connection.call(
            redis, f"removing run {names.uid} from the open ones", lambda: redis.hdel(deployment.open_key, *marks)
        )
    leases = [each for role in _ROLES for each in (names.lease(role), names.lease_end(role))]
    keys = (*names.all_keys, *leases)
    await connection.call(redis, f"deleting the log of run {names.uid}", lambda: redis.delete(*keys))


def find_tombstone(store: ObjectStore, prefix: str, name: str) -> str | None:
    """Return the uid of a run of this name whose deletion was begun and has not ended; None if there is none."""
    for root in store.list_prefixes(f"{prefix}/runs/"):
        names = _named(prefix, root)
        if names is not None and store.head(names.tombstone) is not None and _identity(store, names)[0] == name:
            return names.uid
    return None


_WHAT = "object of a deleted run"


def _identity(store: ObjectStore, names: Names) -> tuple[str, str]:
    """Return name and request of a run, from its record or from its tombstone; empty where both are gone."""
    for key in (names.run_json, names.tombstone):
        try:
            fields = Fields(
                decode_object(store.get(key, max_bytes=MAX_JSON_BYTES), what=key, reason="RUN_JSON_CORRUPT")
            )
            return fields.text("name"), fields.text("request_id") if fields.has("request_id") else ""
        except (NotFoundError, CorruptObjectError, ValueError):
            continue
    return "", ""


def _has_ended(store: ObjectStore, names: Names) -> bool:
    """Return whether a run has ended; one that cannot be read has not."""
    try:
        return has_ended(store, names)
    except CorruptObjectError:
        return False


def _forks(store: ObjectStore, names: Names) -> Iterator[str]:
    """Yield the names of the runs that were made of this one."""

    def made_of(root: str) -> str:
        other = _named(names.prefix, root)
        if other is None or other.uid == names.uid:
            return ""
        try:
            data = store.get(other.run_json, max_bytes=MAX_JSON_BYTES)
            record = RunRecord.parse(data, where=other.run_json)
        except (NotFoundError, CorruptObjectError):
            return ""
        is_child = record.parent is not None and record.parent.get("uid") == names.uid
        return (record.name or other.uid) if is_child and store.head(other.tombstone) is None else ""

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="forks") as pool:
        yield from filter(None, pool.map(made_of, store.list_prefixes(f"{names.prefix}/runs/")))


def _named(prefix: str, root: str) -> Names | None:
    try:
        return Names(prefix, root.rstrip("/").rpartition("/")[2])
    except InvalidSpecError:  # no run's place
        return None


def _leads_to(store: ObjectStore, key: str, uid: str) -> bool:
    try:
        return store.get(key, max_bytes=1 << 10) == uid.encode()
    except (NotFoundError, CorruptObjectError):
        return False
