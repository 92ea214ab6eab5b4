"""Deletion of a run: what it has, who needs it, and its removal. Blocking, but for the copy in Redis.

    tombstone.json    first: who opens the log learns that the run is being deleted; it has the run's name. Who resumes
                      or forks the run writes first and looks for the tombstone then; the deletion looks for what they
                      wrote once it has the tombstone: so at least one of the two is refused. The tombstone says, too,
                      whether the run was open, and has a nonce: a refused deletion removes only its own tombstone
    Redis             its place among the runs, its log and its leases, where Redis is named
    names             of the run and of its request: nobody finds it any more
    objects           all but run.json, many in one request
    run.json, then tombstone.json

A deletion that dies goes on when it is asked for again, by uid or by the name that the tombstone has.
"""

import asyncio
import contextlib
import datetime
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import redis.asyncio as redis_asyncio

from millrace.decoding import MAX_JSON_BYTES, Fields, decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, NotFoundError
from millrace.runlog.catalogue import kind_at
from millrace.runlog.names import Deployment, Names, tenant_of, within
from millrace.runlog.records.revisions import has_ended, is_closed
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.redis import connection
from millrace.runlog.redis.lease import read_owner
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
    """The run has not ended: somebody may drive it. False if an earlier deletion was to delete it as an open run."""
    is_begun: bool = False
    """The run has a tombstone."""
    needed_by: tuple[str, ...]
    """Names of the forks whose lineage begins with the run."""
    marks: tuple[str, ...]
    """Keys that say that the run may not have ended."""
    counts: Counter[str] = field(default_factory=Counter)
    """Objects by kind."""
    sizes: Counter[str] = field(default_factory=Counter)
    """Bytes by kind."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """Written into the tombstone: it tells this deletion's tombstone from another's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tombstone:
    """What a tombstone says of the deletion that wrote it."""

    nonce: str
    """The deletion's; empty in a tombstone of an older version."""
    was_open: bool
    """The run had not ended, and was to be deleted all the same; False in a tombstone of an older version."""


def plan_deletion(store: ObjectStore, names: Names) -> Deletion:
    """Look at a run and at all others, and return what its deletion would remove, and which forks need it.

    Remove nothing. `NotFoundError` if the store has nothing of it. Where neither its record nor its tombstone has its
    name, every name and request of the deployment is read, for those that lead to the run.
    """
    counts, sizes = Counter[str](), Counter[str]()
    for info in store.list(names.root):
        kind = kind_at(info.key.removeprefix(names.root))
        name = "other object" if kind is None else kind.name
        counts[name] += 1
        sizes[name] += info.size_bytes
    name, request_id = _identity(store, names)
    if not name:
        name, request_id = _leading(store, names)
    if not (counts or name):
        raise NotFoundError(
            f"{store.describe()} holds nothing of a run {names.uid}",
            reason="RUN_NOT_FOUND",
            remedy="check --store and --prefix",
        )
    tombstone = _read_tombstone(store, names)
    return Deletion(
        names=names,
        name=name,
        request_id=request_id,
        is_open=_is_open(store, names, tombstone, name),
        is_begun=tombstone is not None,
        needed_by=tuple(sorted(_forks(store, names))),
        marks=tuple(info.key for info in store.list(f"{Deployment(names.prefix).open_prefix}{names.uid}.")),
        counts=counts,
        sizes=sizes,
    )


def require_unneeded(deletion: Deletion, *, may_be_open: bool, may_be_needed: bool) -> None:
    """Raise InvalidStateError if the run has not ended, or if forks need it, unless the caller allows that.

    `may_be_open` allows the first, `may_be_needed` the second.
    """
    if deletion.is_open and deletion.is_begun and not may_be_open:
        raise InvalidStateError(
            f"run {deletion.name!r} has not ended, and an earlier deletion of it has begun and not ended",
            reason="RUN_OPEN",
            remedy="`millrace run delete --even-open` ends that deletion; to keep the run, make sure that nothing "
            f"deletes it any more, and remove the object {deletion.names.tombstone}",
        )
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
    """Delete a run's objects from the store (blocking); return records of what cannot be removed now.

    If something cannot, the rest and the run's tombstone stay, and the deletion has to be requested again. `by` says in
    the tombstone who deletes. `on_progress` gets the number of objects that are gone so far. InvalidStateError as
    `mark_deleted` raises it, if there is no tombstone yet.
    """
    names = deletion.names
    if store.head(names.tombstone) is None:
        mark_deleted(store, deletion, by=by)
    deployment = Deployment(names.prefix)
    leads = [deployment.name_object(deletion.name)] if deletion.name else []
    leads += [deployment.request_object(deletion.request_id)] if deletion.request_id else []
    # After a deletion that died in between, the name may be another run's by now.
    leads = [key for key in leads if _leads_to(store, key, names.uid)]
    left = delete_all(store, [*deletion.marks, *leads], what=_WHAT, most=_MAX_LEFT)
    last, gone = [names.run_json, names.tombstone], 0
    keys = (info.key for info in store.list(names.root) if info.key not in last)
    while not left and (some := list(islice(keys, MAX_DELETED))):
        left = delete_all(store, some, what=_WHAT, most=_MAX_LEFT)
        gone += len(some)
        on_progress(gone)
    # The tombstone goes last: as long as anything is left, a repeated deletion finds the run by it.
    for key in last if not left else ():
        left += delete_all(store, [key], what=_WHAT, most=_MAX_LEFT)
    return left


def mark_deleted(store: ObjectStore, deletion: Deletion, *, by: str) -> None:
    """Write the tombstone, if there is none: who opens the run's log from now on learns that it is being deleted.

    `by` names who deletes it. Raises InvalidStateError if the run was reopened or forked since the deletion was
    planned, and removes the tombstone then if this deletion wrote it. A run whose name an earlier deletion has removed
    is not looked at again.
    """
    names, time = deletion.names, datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    content = {"name": deletion.name, "request_id": deletion.request_id, "by": by, "time": time}
    content |= {"was_open": deletion.is_open, "nonce": deletion.nonce}
    is_new = store.create(names.tombstone, json.dumps(content, sort_keys=True).encode())
    # A tombstone of a deletion that died says nothing of the look below. The name is what a deletion removes first:
    # after it, headers may be missing, and the look would find an open run.
    if not is_new and not _has_name(store, names, deletion.name):
        return
    try:
        _require_unchanged(store, deletion)
    except InvalidStateError:
        if not is_new and not _has_name(store, names, deletion.name):
            return  # the deletion that wrote the tombstone has gone on, and the look was at what it left
        _withdraw(store, deletion)
        raise


def _withdraw(store: ObjectStore, deletion: Deletion) -> None:
    """Remove the tombstone if this deletion wrote it: another's may be in progress (blocking)."""
    tombstone = _read_tombstone(store, deletion.names)
    if tombstone is not None and tombstone.nonce == deletion.nonce:
        store.delete(deletion.names.tombstone)


async def begin_deletion(redis: redis_asyncio.Redis, store: ObjectStore, deletion: Deletion, *, by: str) -> None:
    """Write the tombstone of a run that no process holds, and remove the run from Redis.

    `by` names who deletes it. Raises InvalidStateError if a process holds a lease of the run, or if the run was
    reopened or forked since the deletion was planned. The tombstone is removed then if this deletion wrote it. An open
    run has to be known to this Redis, unless an earlier deletion has begun, which may have removed it from there.
    """
    if deletion.is_open and await asyncio.to_thread(store.head, deletion.names.tombstone) is None:
        await _require_known(redis, deletion)
    await require_unheld(redis, deletion)
    # Before Redis is cleared: an orchestrator that looks for the log in between must not make it anew.
    await asyncio.to_thread(mark_deleted, store, deletion, by=by)
    try:
        await require_unheld(redis, deletion)
    except InvalidStateError:
        await asyncio.to_thread(_withdraw, store, deletion)
        raise
    await forget_run(redis, deletion)


def _require_unchanged(store: ObjectStore, deletion: Deletion) -> None:
    """Raise InvalidStateError if a run was reopened, or forked, since its deletion was planned (blocking)."""
    # The header first, which takes a few requests: until it is read, the tombstone hides that the run goes on.
    tombstone = _read_tombstone(store, deletion.names)
    was_open = deletion.is_open or (tombstone is not None and tombstone.was_open)
    if not was_open and not _is_closed(store, deletion.names):
        raise InvalidStateError(
            f"run {deletion.name!r} was reopened while its deletion was planned, and goes on",
            reason="RUN_OPEN",
            remedy=f"nothing was deleted; to delete it, end it first with `millrace run cancel {deletion.name}`",
        )
    if new := sorted(set(_forks(store, deletion.names)) - set(deletion.needed_by)):
        raise InvalidStateError(
            f"run {deletion.name!r} was forked while its deletion was planned: {', '.join(new[:8])}",
            reason="RUN_NEEDED",
            remedy="nothing was deleted; ask again, and see which forks need it",
        )


async def _require_known(redis: redis_asyncio.Redis, deletion: Deletion) -> None:
    """Raise InvalidStateError if a Redis has nothing of a run: that it has no lease of it then says nothing."""
    names = deletion.names
    if await connection.call(redis, f"looking for run {names.uid}", lambda: redis.exists(*names.all_keys)):
        return
    index = Deployment(names.prefix).runs_key
    known = await connection.call(redis, "reading the index of runs", lambda: redis.hget(index, deletion.name))
    if known is None or connection.as_text(known) != names.uid:
        raise InvalidStateError(
            f"this Redis knows no run {deletion.name or names.uid!r}, so it cannot say whether something drives it",
            reason="RUN_UNKNOWN_TO_REDIS",
            remedy="nothing was deleted; name the Redis and the prefix of the run's deployment; if that Redis was "
            "lost, start an orchestrator, which brings open runs back, and cancel the run",
        )


async def require_unheld(redis: redis_asyncio.Redis, deletion: Deletion) -> None:
    """Raise InvalidStateError if a process holds a lease of the run: an orchestrator or a trainer that lives."""
    for role in _ROLES:
        owner = await read_owner(redis, deletion.names, role)
        if owner is not None:
            raise InvalidStateError(
                f"the {role} of run {deletion.name or deletion.names.uid!r} is alive: {owner!r} holds its lease",
                reason="RUN_HELD",
                remedy="end the run with `millrace run cancel`, and delete it some seconds after its end; the lease of "
                "a process that died expires by itself",
            )


async def forget_run(redis: redis_asyncio.Redis, deletion: Deletion) -> None:
    """Remove a run from Redis: from the indexes of runs first, then its log and its leases."""
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


def find_tombstone(store: ObjectStore, prefix: str, name: str, *, tenant: str = "") -> str | None:
    """Return the uid of a run called `name`, or with that uid, whose deletion was begun and has not ended.

    None if there is none (blocking). With `tenant` only of the tenant's runs, whose names may lack the tenant.
    """
    for root in store.list_prefixes(f"{prefix}/runs/"):
        names = _named(prefix, root)
        if names is None or store.head(names.tombstone) is None:
            continue
        known = _identity(store, names)[0]
        if (not tenant or tenant_of(known) == tenant) and name in (names.uid, known, within(tenant, known)):
            return names.uid
    return None


_WHAT = "object of a deleted run"


def _identity(store: ObjectStore, names: Names) -> tuple[str, str]:
    """Return name and request id of a run, from its record or from its tombstone.

    Both empty where neither can be read.
    """
    for key in (names.run_json, names.tombstone):
        try:
            fields = Fields(
                decode_object(store.get(key, max_bytes=MAX_JSON_BYTES), what=key, reason="RUN_JSON_CORRUPT")
            )
            return fields.text("name"), fields.text("request_id") if fields.has("request_id") else ""
        except (NotFoundError, CorruptObjectError, ValueError):
            continue
    return "", ""


def _leading(store: ObjectStore, names: Names) -> tuple[str, str]:
    """Return the name and the request id whose objects in the index hold the run's uid; empty where none does
    (blocking).
    """
    deployment = Deployment(names.prefix)

    def found(prefix: str, key_of: Callable[[str], str]) -> str:
        """Return what comes after `prefix` in the first key there that leads to the run; `key_of` makes such a key."""
        keys = [info.key for info in store.list(prefix)]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="index") as pool:
            leads = pool.map(lambda key: _leads_to(store, key, names.uid), keys)
            for key, leads_here in zip(keys, leads, strict=True):
                with contextlib.suppress(InvalidSpecError):  # else it is none of ours
                    if leads_here and key_of(key.removeprefix(prefix)) == key:
                        return key.removeprefix(prefix)
        return ""

    return (
        found(deployment.names_prefix, deployment.name_object),
        found(deployment.requests_prefix, deployment.request_object),
    )


def _read_tombstone(store: ObjectStore, names: Names) -> _Tombstone | None:
    """Return what a run's tombstone says; None if the run has no tombstone (blocking).

    One that cannot be read says nothing: its nonce is empty, and the run was not open.
    """
    try:
        data = store.get(names.tombstone, max_bytes=MAX_JSON_BYTES)
    except NotFoundError:
        return None
    try:
        fields = Fields(decode_object(data, what=names.tombstone, reason="TOMBSTONE_CORRUPT"))
        nonce = fields.text("nonce") if fields.has("nonce") else ""
        return _Tombstone(nonce=nonce, was_open=fields.has("was_open") and fields.flag("was_open"))
    except (CorruptObjectError, ValueError):
        return _Tombstone(nonce="", was_open=False)


def _is_open(store: ObjectStore, names: Names, tombstone: _Tombstone | None, name: str) -> bool:
    """Return whether a run called `name` is open, and no deletion has begun to delete it as an open run (blocking)."""
    if tombstone is None:
        return not _has_ended(store, names)
    if tombstone.was_open:
        return False
    # The name second: as long as it leads to the run, no deletion has removed a header.
    return not _is_closed(store, names) and _has_name(store, names, name)


def _has_ended(store: ObjectStore, names: Names) -> bool:
    """Return whether a run has ended, and was not reopened; False for one whose objects cannot be read."""
    try:
        return has_ended(store, names)
    except CorruptObjectError:
        return False


def _is_closed(store: ObjectStore, names: Names) -> bool:
    """Return whether a run's last header closes it, its tombstone aside; False if its objects cannot be read.

    True for a run without run.json, which nothing can drive.
    """
    try:
        return is_closed(store, names)
    except NotFoundError:
        return True
    except CorruptObjectError:
        return False


def _forks(store: ObjectStore, names: Names) -> Iterator[str]:
    """Yield the names of the runs that were forked from this one and are not being deleted."""

    def made_of(root: str) -> str:
        """Return the name of the run under the prefix `root` if it is a fork of ours; else an empty text."""
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
    """Return the names of the run whose objects are under `root` (`…/runs/UID/`); None if that ends in no uid."""
    try:
        return Names(prefix, root.rstrip("/").rpartition("/")[2])
    except InvalidSpecError:  # no run's place
        return None


def _has_name(store: ObjectStore, names: Names, name: str) -> bool:
    """Return whether `name` still leads to the run; False if it is empty (blocking)."""
    return bool(name) and _leads_to(store, Deployment(names.prefix).name_object(name), names.uid)


def _leads_to(store: ObjectStore, key: str, uid: str) -> bool:
    """Return whether an object of the index (a name's, a request's) holds this uid."""
    try:
        return store.get(key, max_bytes=1 << 10) == uid.encode()
    except (NotFoundError, CorruptObjectError):
        return False
