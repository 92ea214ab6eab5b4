"""Intents: what users asked of a run (pause, resume, cancel, config updates), durable before it is acknowledged."""

import asyncio
import datetime
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.runlog.names import Names
from millrace.runlog.records.numbered import create_next
from millrace.storage import ObjectStore

_MAX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What a user asked for, in the order of `sequence`."""

    sequence: int
    kind: str
    payload: Mapping[str, Any]
    time: str


async def write_intent(store: ObjectStore, names: Names, kind: str, payload: Mapping[str, Any]) -> Intent:
    """Append an intent under the next free number; when this returns, it is durable."""
    time = datetime.datetime.now(datetime.UTC).isoformat()
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
    """The intents with a number above `after`, in order."""
    return await asyncio.to_thread(load_intents, store, names, after)


def load_intents(store: ObjectStore, names: Names, after: int) -> list[Intent]:
    """The intents behind `after` in the store, in their order."""
    intents = []
    for info in store.list(names.intents, start_after=names.intent(after)):
        try:
            number = _number(names, info.key)
            if number is None:
                continue
            body = decode_object(
                store.get(info.key, max_bytes=_MAX_BYTES),
                what=store.uri(info.key),
                reason="INTENT_CORRUPT",
                remedy="restore that object",
                max_bytes=_MAX_BYTES,
            )
            if not isinstance(body["kind"], str) or not isinstance(body["payload"], dict):
                raise TypeError("kind must be a string, payload an object")
            intents.append(Intent(sequence=number, kind=body["kind"], payload=body["payload"], time=str(body["time"])))
        except (KeyError, TypeError) as error:
            raise CorruptObjectError(
                f"{store.uri(info.key)} is no intent: {error!r}", reason="INTENT_CORRUPT", remedy="restore that object"
            ) from error
    return intents


def _last_sequence(store: ObjectStore, names: Names) -> int:
    return max((_number(names, info.key) or 0 for info in store.list(names.intents)), default=0)


def _number(names: Names, key: str) -> int | None:
    """The number in an intent's key; None of what is no key of ours."""
    number = key.removeprefix(names.intents).removesuffix(".json")
    return int(number) if number.isdecimal() and key == names.intent(int(number)) else None
