"""Intents: what users asked of a run (pause, resume, cancel, config updates), durable before it is acknowledged."""

import asyncio
import datetime
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, UnavailableError
from millrace.runlog.names import Names
from millrace.storage import ObjectStore

_MAX_ATTEMPTS = 100
_MAX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """One wish, in the order of `sequence`."""

    sequence: int
    kind: str
    payload: Mapping[str, Any]
    time: str


async def write_intent(store: ObjectStore, names: Names, kind: str, payload: Mapping[str, Any]) -> Intent:
    """Append an intent under the next free number; when this returns, it is durable."""
    time = datetime.datetime.now(datetime.UTC).isoformat()
    body = {"kind": kind, "payload": dict(payload), "time": time, "nonce": secrets.token_hex(8)}
    data = json.dumps(body, sort_keys=True).encode()
    sequence = await asyncio.to_thread(_last_sequence, store, names) + 1
    for _ in range(_MAX_ATTEMPTS):
        if await asyncio.to_thread(store.create, names.intent(sequence), data):
            return Intent(sequence=sequence, kind=kind, payload=dict(payload), time=time)
        sequence += 1
    raise UnavailableError(
        f"lost {_MAX_ATTEMPTS} races for an intent of run {names.uid}",
        reason="INTENT_CONTENDED",
        remedy="find out who keeps writing intents",
        metadata={"uid": names.uid},
    )


async def read_intents(store: ObjectStore, names: Names, *, after: int = 0) -> list[Intent]:
    """The intents with a number above `after`, in order."""
    return await asyncio.to_thread(_read, store, names, after)


def _read(store: ObjectStore, names: Names, after: int) -> list[Intent]:
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
    last = 0
    for info in store.list(names.intents):
        last = max(last, _number(names, info.key) or 0)
    return last


def _number(names: Names, key: str) -> int | None:
    """The number in an intent's key; None of what is no key of ours."""
    number = key.removeprefix(names.intents).removesuffix(".json")
    return int(number) if number.isdecimal() and key == names.intent(int(number)) else None
