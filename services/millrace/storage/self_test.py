"""Whether an object store keeps the promises that a run rests on: above all that a create-only PUT has one winner.

Several S3-compatible servers accept `If-None-Match: *` and ignore it, or honour it only when nobody else writes. On
such a server two trainers could both publish a version, so it is found out before a run rather than in one.
"""

import hashlib
import json
import logging
import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime

from millrace.errors import InvalidStateError
from millrace.storage.base import ObjectStore, cannot_carry_runs
from millrace.storage.clean_up import delete

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of what is tried: a store that has passed an older test is tested again."""
_WRITERS = 8
_ROUNDS = 4


def require_tested(store: ObjectStore, *, prefix: str) -> None:
    """Raise as `self_test`, unless this store has passed it under this address: that it has is kept under `prefix`.

    Two that come at once both test it, which does no harm.
    """
    address = hashlib.sha256(store.describe().encode()).hexdigest()[:16]
    key = f"{prefix}/self-test/passed-{FORMAT}-{address}.json"
    if store.head(key) is not None:
        return
    self_test(store, prefix=prefix)
    passed = {"format": FORMAT, "store": store.describe(), "at": datetime.now(UTC).isoformat(timespec="seconds")}
    store.put(key, json.dumps(passed).encode())


def self_test(store: ObjectStore, *, prefix: str) -> None:
    """Write, read and delete a few small objects under `prefix`; InvalidStateError names what the store gets wrong.

    About 50 requests. Errors of the store itself (no such bucket, wrong credentials) pass through.
    """
    base = f"{prefix}/self-test/{secrets.token_hex(8)}/"
    written = [f"{base}{number}" for number in range(_ROUNDS)]
    try:
        with ThreadPoolExecutor(_ROUNDS * _WRITERS) as pool:
            # At once: where losers wait for their answer, as SeaweedFS has them do, they wait together.
            racing = [_begin_race(store, pool, key) for key in written]
            for key, race in zip(written, racing, strict=True):
                _judge(store, key, race)
        _read_back(store, base, written)
    finally:
        _clean_up(store, written)


def _begin_race(store: ObjectStore, pool: ThreadPoolExecutor, key: str) -> dict[bytes, Future[bool]]:
    """Have many writers create one new object; returns by what each wrote whether it won."""
    bodies = [f"writer {number}".encode() for number in range(_WRITERS)]
    return {body: pool.submit(store.create, key, body) for body in bodies}


def _judge(store: ObjectStore, key: str, race: dict[bytes, Future[bool]]) -> None:
    """One writer may have won, its bytes must be what lies there, and nobody may replace them."""
    won = [body for body, outcome in race.items() if outcome.result()]
    if len(won) != 1 or store.get(key) != won[0]:
        raise cannot_carry_runs(
            store.describe(),
            f"{len(won)} of {_WRITERS} create-only PUTs (If-None-Match: *) of one new object succeeded",
        )
    if store.create(key, b"late"):
        raise cannot_carry_runs(
            store.describe(), "a create-only PUT (If-None-Match: *) replaced an object that was there"
        )


def _read_back(store: ObjectStore, base: str, written: list[str]) -> None:
    whole = store.get(written[0])
    if store.get_range(written[0], 1, 3) != whole[1:4]:
        raise _bad(store, "a range read gave other bytes than the object has there")
    listed = [item.key for item in store.list(base)]
    if listed != sorted(written):
        raise cannot_carry_runs(
            store.describe(), f"a listing shows {len(listed)} of {len(written)} objects that were just written"
        )


def _clean_up(store: ObjectStore, written: list[str]) -> None:
    """Delete what was written; that it cannot be is no reason to refuse a store, and must not hide one."""
    for key in written:
        if delete(store, key, what="object of the self-test") is not None:
            return


def _bad(store: ObjectStore, problem: str) -> InvalidStateError:
    return cannot_carry_runs(store.describe(), problem)
