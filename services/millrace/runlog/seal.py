"""The seal of an ended run: what it consists of at its end, in one create-only object.

The chain covers what headers name. What comes after the closing header (the last event archives, the last versions and
checkpoints) is named by the seal, so that it cannot be taken away or changed unseen either. It is written when the
terminal state is archived; a process that dies between the two leaves that to the next orchestrator that looks, and
with it the pass of retention that it was in.
A run that was reopened after a failure is sealed again, under the next number.
"""

import asyncio
import datetime
import hashlib
import logging

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.rollouts.batch_wire import closes_run
from millrace.runlog import catalogue
from millrace.runlog.catalogue import BATCH_HEADER, SCORES
from millrace.runlog.event_archive import EventArchive
from millrace.runlog.names import Names
from millrace.runlog.records.frontier import NamedObjects
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.run_record import list_objects, load_origin
from millrace.runlog.records.sealed import Seal, seal_key
from millrace.runlog.recover import load_history, load_named
from millrace.runlog.redis.log import RunLog
from millrace.runlog.retention import Retention
from millrace.storage import ObjectStore

logger = logging.getLogger(__name__)

_MAX_OTHERS = 1 << 18
"""Most objects that a seal lists by their size: 30 MB of JSON."""


def write_seal(
    store: ObjectStore, names: Names, key: str, known: KnownObjects, *, chain: bytes, state: str, by: str
) -> bool:
    """Write the seal of a run whose terminal state is archived (blocking); return False if it is sealed already.

    `key` is that of the seal of the end that is meant: the run may have been reopened since. `known` are the objects
    that the run's headers name, `chain` is the chain hash after the closing one, `state` the terminal state, `by` names
    the writer.
    """
    if store.head(key) is not None:
        return False
    named = load_named(store, names, known)
    # Of what headers name, the kinds that a seal names as well; the chain covers all the others.
    objects = {own: named.objects[own].hex() for own in named.objects if catalogue.SEALED in _namers(own)}
    # Listed in the store: what came after the closing header is in no header.
    kinds = [kind for kind in catalogue.KINDS if {catalogue.HEADER, catalogue.SEALED} & {*kind.named_by}]
    for own in [own for kind in kinds for own in list_objects(store, names, kind) if own not in named.objects]:
        try:
            data = store.get(names.root + own, max_bytes=MAX_JSON_BYTES)
        except NotFoundError:  # a checkpoint that was pruned just now
            continue
        except CorruptObjectError as error:  # Millrace writes nothing so large; an audit reports it
            logger.warning("an object is not sealed", extra={"uid": names.uid, "error": error.message})
            continue
        objects[own] = hashlib.sha256(data).hexdigest()
    seal = Seal(
        run_uid=names.uid,
        state=state,
        chain_hash=chain.hex(),
        objects=objects,
        others=_others_by_size(store, names, named, objects),
        by=by,
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
    )
    is_ours = store.create(key, seal.encode())
    if is_ours:
        logger.info("run sealed", extra={"uid": names.uid, "state": state, "objects": len(objects)})
    return is_ours


async def seal_late(log: RunLog, *, state: str, by: str) -> bool:
    """Archive the events of a run that ended in `state`, and seal it, if its last driver did not.

    Return False if it is sealed already, or goes on. `by` names the writer in the seal.
    """
    if await asyncio.to_thread(log.store.head, await asyncio.to_thread(seal_key, log.store, log.names)) is not None:
        return False
    # Events first, because the seal names their archives.
    await EventArchive(log).archive()
    committed = await load_history(log)
    if committed.is_reopened or committed.last is None or not closes_run(committed.last):
        return False  # it goes on
    # A pass of retention that died with the driver: before the seal, which lists what is there.
    first = (await asyncio.to_thread(load_origin, log.store, log.names)).base_step
    for left in await asyncio.to_thread(Retention(log.store, log.names, first=first, by=by).finish):
        logger.warning("what was retired cannot be removed", extra={"uid": log.uid, "error": str(left)})
    key, known = log.names.seal(committed.num_reopened), committed.known
    return await asyncio.to_thread(
        write_seal, log.store, log.names, key, known, chain=committed.chain, state=state, by=by
    )


def _namers(key: str) -> tuple[str, ...]:
    """Return who names the object under a key without the run's prefix (`ObjectKind.named_by`).

    Empty if it is of no kind.
    """
    kind = catalogue.kind_at(key)
    return () if kind is None else kind.named_by


def _others_by_size(
    store: ObjectStore, names: Names, page: NamedObjects, objects: dict[str, str]
) -> dict[str, int] | None:
    """Return the size of everything in the store that neither the headers nor `objects` name, by key.

    None if it is too much. `page` has what the headers name. Headers, attestations and scores are left out. Keys are
    without the run's prefix.
    """
    others: dict[str, int] = {}
    named = objects.keys() | page.objects.keys()
    for prefix in store.list_prefixes(names.root):
        if prefix in (names.attestations, names.root + SCORES.folder):
            continue
        for info in store.list(prefix):
            key = info.key.removeprefix(names.root)
            if key not in named and not page.holds(info.key) and not BATCH_HEADER.parse(key):
                others[key] = info.size_bytes
        if len(others) > _MAX_OTHERS:
            logger.warning("too many objects to be listed in the seal", extra={"uid": names.uid})
            return None
    return others
