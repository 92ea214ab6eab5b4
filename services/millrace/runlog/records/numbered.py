"""Objects of a run that are numbered from 1 without a gap: epochs, intents, attestations."""

import asyncio
import datetime
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, NotFoundError, UnavailableError
from millrace.runlog.catalogue import INTENT
from millrace.runlog.names import Names
from millrace.storage import ObjectStore

# As many rivals would have to win in between; something else is wrong then.
_MAX_ATTEMPTS = 100


def create_next(
    store: ObjectStore,
    names: Names,
    data_of: Callable[[int], bytes],
    *,
    key_of: Callable[[int], str],
    last: int,
    what: str,
    reason: str,
) -> int:
    """Create an object under the first free number after `last` (blocking), and return that number.

    `data_of` makes of a number what is stored, `key_of` its key. Exactly one caller ever gets each number.
    `UnavailableError` with `reason` after many lost races; `what` names the object in its message.
    """
    for number in range(last + 1, last + 1 + _MAX_ATTEMPTS):
        if store.create(key_of(number), data_of(number)):
            return number
    raise UnavailableError(
        f"lost {_MAX_ATTEMPTS} races for {what} of run {names.uid}",
        reason=reason,
        remedy="find out which processes keep writing them",
        metadata={"uid": names.uid},
    )


# Fencing epochs: unique by a create-only object, enforced where one appends by a field of Redis' meta.
#
# The object makes an epoch unique even when Redis loses its tail or is wiped; Redis makes the check of every append
# cheap. An epoch is therefore never taken from Redis.

logger = logging.getLogger(__name__)

GENERATION_ROLE = "log"
"""Role whose epochs number the generations of the Redis copy: 1 at creation, + 1 at every rebuild."""

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Epoch:
    """The right to write as `role`, until somebody holds a higher number."""

    role: str
    number: int


def latest_epoch(store: ObjectStore, names: Names, role: str) -> int:
    """Return the highest epoch of a role in the store, 0 if there is none (blocking).

    CorruptObjectError if an object there is no epoch by its key.
    """
    highest = 0
    for info in store.list(names.epochs(role)):
        number = info.key.removeprefix(names.epochs(role))
        if not number.isdecimal():
            raise CorruptObjectError(
                f"{store.uri(info.key)} is no epoch", reason="EPOCH_CORRUPT", remedy="remove that object"
            )
        highest = max(highest, int(number))  # names do not sort as numbers beyond eight digits
    return highest


def epoch_owner(store: ObjectStore, names: Names, role: str, number: int) -> str:
    """Return the name of who took an epoch of a role; empty if that cannot be read (blocking)."""
    key = names.epoch(role, number)
    try:
        return decode_epoch(store.get(key, max_bytes=_MAX_BYTES), where=key)
    except (NotFoundError, CorruptObjectError):  # it is for people: what it says decides nothing
        return ""


def decode_epoch(data: bytes, *, where: str) -> str:
    """Return the name of who took an epoch, from its object's bytes.

    CorruptObjectError, naming `where`, if it is none.
    """
    document = decode_object(data, what=where, reason="EPOCH_CORRUPT")
    if missing := sorted({"owner", "nonce"} - document.keys()):
        raise CorruptObjectError(f"{where} lacks {missing}", reason="EPOCH_CORRUPT")
    return str(document["owner"])


def first_generation(store: ObjectStore, names: Names) -> int:
    """Record generation 1 of a run's Redis copy, unless it is recorded; return the newest that is (blocking)."""
    store.create(names.epoch(GENERATION_ROLE, 1), _body("create"))
    return latest_epoch(store, names, GENERATION_ROLE)


async def create_epoch(store: ObjectStore, names: Names, role: str, owner: str) -> Epoch:
    """Create the next epoch object of a role, with `owner` as who took it; exactly one caller ever gets each number.

    UnavailableError after many lost races. Redis does not learn of it here.
    """
    # With a nonce no two epochs have equal bytes: after a lost answer, equal bytes mean that this call wrote the
    # object.
    data = _body(owner)
    last = await asyncio.to_thread(latest_epoch, store, names, role)
    number = await asyncio.to_thread(
        create_next,
        store,
        names,
        lambda _: data,
        key_of=partial(names.epoch, role),
        last=last,
        what=f"an epoch of {role}",
        reason="EPOCH_CONTENDED",
    )
    logger.info("epoch acquired", extra={"uid": names.uid, "role": role, "epoch": number, "owner": owner})
    return Epoch(role, number)


def _body(owner: str) -> bytes:
    """Return the JSON of an epoch's object: its owner, the time, and a random text that tells it from any other."""
    body = {"owner": owner, "nonce": secrets.token_hex(8), "time": datetime.datetime.now(datetime.UTC).isoformat()}
    return json.dumps(body, sort_keys=True).encode()


# Intents: what users asked of a run (pause, resume, cancel, config updates), durable before it is acknowledged.

_INTENTS_MAX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What a user asked for, in the order of `sequence`."""

    sequence: int
    kind: str
    payload: Mapping[str, Any]
    time: str


async def write_intent(store: ObjectStore, names: Names, kind: str, payload: Mapping[str, Any]) -> Intent:
    """Store an intent under the next free number and return it; when this returns, it is durable.

    `kind` is what is requested (`pause`, …), `payload` its JSON fields. UnavailableError after many lost races.
    """
    time = datetime.datetime.now(datetime.UTC).isoformat()
    # With the nonce no two intents have equal bytes: after a lost answer, equal bytes mean that this call wrote the
    # object.
    body = {"kind": kind, "payload": dict(payload), "time": time, "nonce": secrets.token_hex(8)}
    data = json.dumps(body, sort_keys=True).encode()
    last = await asyncio.to_thread(_last_sequence, store, names)
    sequence = await asyncio.to_thread(
        create_next,
        store,
        names,
        lambda _: data,
        key_of=names.intent,
        last=last,
        what="an intent",
        reason="INTENT_CONTENDED",
    )
    return Intent(sequence=sequence, kind=kind, payload=dict(payload), time=time)


async def read_intents(store: ObjectStore, names: Names, *, after: int = 0) -> list[Intent]:
    """Return the intents of a run with a number above `after`, in order."""
    return await asyncio.to_thread(load_intents, store, names, after)


def load_intents(store: ObjectStore, names: Names, after: int) -> list[Intent]:
    """Return the intents of a run with a number above `after`, in order (blocking)."""
    intents = []
    for info in store.list(names.intents, start_after=names.intent(after)):
        number = _number(names, info.key)
        if number is not None:
            data = store.get(info.key, max_bytes=_INTENTS_MAX_BYTES)
            intents.append(replace(decode_intent(data, where=store.uri(info.key)), sequence=number))
    return intents


def decode_intent(data: bytes, *, where: str) -> Intent:
    """Return the intent in an object's bytes, with 0 for its number.

    CorruptObjectError, naming `where`, if it holds none.
    """
    reason, remedy = "INTENT_CORRUPT", "restore that object"
    body = decode_object(data, what=where, max_bytes=_INTENTS_MAX_BYTES, reason=reason, remedy=remedy)
    try:
        if not isinstance(body["kind"], str) or not isinstance(body["payload"], dict):
            raise TypeError("kind must be a string, payload an object")
        return Intent(sequence=0, kind=body["kind"], payload=body["payload"], time=str(body["time"]))
    except (KeyError, TypeError) as error:
        raise CorruptObjectError(f"{where} is no intent: {error!r}", reason=reason, remedy=remedy) from error


def _last_sequence(store: ObjectStore, names: Names) -> int:
    """Return the number of the newest intent of a run, 0 if there is none."""
    return max((_number(names, info.key) or 0 for info in store.list(names.intents)), default=0)


def _number(names: Names, key: str) -> int | None:
    """Return the number in an intent's key; None for any other key."""
    place = INTENT.parse(key.removeprefix(names.root))
    return None if place is None else int(place["number"])
