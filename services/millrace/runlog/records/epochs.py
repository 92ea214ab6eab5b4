"""Fencing epochs: unique by a create-only object, enforced where one appends by a field of Redis' meta.

The object makes an epoch unique even when Redis loses its tail or is wiped; Redis makes the check of every append
cheap. An epoch is therefore never taken from Redis.
"""

import asyncio
import datetime
import json
import logging
import secrets
from dataclasses import dataclass
from functools import partial

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.runlog.names import Names
from millrace.runlog.records.numbered import create_next
from millrace.storage import ObjectStore

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
    """The highest epoch of a role in the store, 0 if there is none (blocking)."""
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
    """Who took an epoch of a role; empty if its object does not say (blocking)."""
    try:
        data = store.get(names.epoch(role, number), max_bytes=_MAX_BYTES)
        return str(decode_object(data, what="epoch", reason="EPOCH_CORRUPT").get("owner", ""))
    except (NotFoundError, CorruptObjectError):  # it is for people: what it says decides nothing
        return ""


def first_generation(store: ObjectStore, names: Names) -> int:
    """Record generation 1 of a run's Redis copy, if none is; returns the newest that is recorded (blocking)."""
    store.create(names.epoch(GENERATION_ROLE, 1), _body("create"))
    return latest_epoch(store, names, GENERATION_ROLE)


async def create_epoch(store: ObjectStore, names: Names, role: str, owner: str) -> Epoch:
    """Create the next epoch object of a role; exactly one caller ever gets each number."""
    data = _body(owner)  # its nonce makes an ambiguous create decidable
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
    body = {"owner": owner, "nonce": secrets.token_hex(8), "time": datetime.datetime.now(datetime.UTC).isoformat()}
    return json.dumps(body, sort_keys=True).encode()
