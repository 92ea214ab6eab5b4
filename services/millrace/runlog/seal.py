"""The seal of an ended run: what it consists of at its end, in one create-only object.

The chain covers what headers name. What comes behind the closing header (the last event archives, the last versions and
checkpoints) is named by the seal, so that it cannot be taken away or changed unseen either. It is written when the
terminal state is archived; a process that dies between the two leaves that to the next orchestrator that looks.
A run that was reopened after a failure is sealed again, under the next number.
"""

import asyncio
import datetime
import hashlib
import json
import logging
from dataclasses import dataclass

from millrace.decoding import MAX_JSON_BYTES, decode_object
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.rollouts.batch_wire import closes_run
from millrace.runlog.events.archive import EventArchive
from millrace.runlog.names import Names
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.recovery.recover import load_history
from millrace.runlog.redis.log import RunLog
from millrace.storage import ObjectStore

logger = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What a seal says."""

    run_uid: str
    state: str
    """The terminal state: SUCCEEDED, FAILED or CANCELLED."""
    chain_hash: str
    """Chain hash behind the closing header, hex."""
    objects: dict[str, str]
    """sha256 (hex) by key behind the run's prefix, of what the headers do not name."""
    by: str
    time: str
    """On its writer's clock, ISO 8601 with a zone."""

    def encode(self) -> bytes:
        """Canonical JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"format": FORMAT, **fields}, sort_keys=True, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> "Seal":
        """Parse a seal; `CorruptObjectError` if it is none."""
        raw = decode_object(data, what=where, reason="SEAL_CORRUPT", remedy=_REMEDY)
        texts = {name: raw.get(name) for name in ("run_uid", "state", "chain_hash", "by", "time")}
        objects = raw.get("objects")
        if (
            raw.get("format") != FORMAT
            or not all(isinstance(text, str) for text in texts.values())
            or not isinstance(objects, dict)
            or not all(isinstance(sha256, str) for sha256 in objects.values())
        ):
            raise CorruptObjectError(f"{where} is no seal", reason="SEAL_CORRUPT", remedy=_REMEDY)
        return cls(objects=objects, **{name: str(text) for name, text in texts.items()})


_REMEDY = "restore the object from a replica of the bucket"


def seal_key(store: ObjectStore, names: Names) -> str:
    """Where the seal of the run's present end lies (blocking): each reopening begins the next number."""
    return names.seal(sum(1 for _ in store.list(names.reopenings)))


def write_seal(
    store: ObjectStore, names: Names, key: str, known: KnownObjects, *, chain: bytes, state: str, by: str
) -> bool:
    """Seal a run whose terminal state is archived (blocking); False if it is sealed already.

    `key` is that of the end that is sealed: the run may have been reopened since. `known` are the objects that its
    headers name, `chain` is the chain hash behind the closing one.
    """
    if store.head(key) is not None:
        return False
    objects = {ref.key: ref.sha256.hex() for ref in known.find_new(store, names)}
    for other in _others(store, names):
        try:
            data = store.get(other, max_bytes=MAX_JSON_BYTES)
        except NotFoundError:  # a checkpoint that was pruned just now
            continue
        except CorruptObjectError as error:  # nothing of ours is so large; the audit tells of it
            logger.warning("an object is not sealed", extra={"uid": names.uid, "error": error.message})
            continue
        objects[other.removeprefix(names.root)] = hashlib.sha256(data).hexdigest()
    seal = Seal(
        run_uid=names.uid,
        state=state,
        chain_hash=chain.hex(),
        objects=objects,
        by=by,
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
    )
    is_ours = store.create(key, seal.encode())
    if is_ours:
        logger.info("run sealed", extra={"uid": names.uid, "state": state, "objects": len(objects)})
    return is_ours


async def seal_late(log: RunLog, *, state: str, by: str) -> bool:
    """Archive and seal a run whose end left that undone; False if it is sealed."""
    if await asyncio.to_thread(log.store.head, await asyncio.to_thread(seal_key, log.store, log.names)) is not None:
        return False
    await EventArchive(log).archive()
    committed = await load_history(log)
    if committed.is_reopened or committed.last is None or not closes_run(committed.last):
        return False  # it goes on
    key, known = log.names.seal(committed.num_reopened), KnownObjects(committed.headers)
    return await asyncio.to_thread(
        write_seal, log.store, log.names, key, known, chain=committed.chain, state=state, by=by
    )


def _others(store: ObjectStore, names: Names) -> list[str]:
    """What no header names: run.json, the marks of generations, reopenings, checkpoints, earlier seals."""
    keys = [names.run_json]
    for prefix in (names.generations, names.reopenings, names.seals):
        keys += [info.key for info in store.list(prefix)]
    for prefix in store.list_prefixes(names.checkpoints):
        keys += [info.key for info in store.list(f"{prefix}manifest")]
    return keys
