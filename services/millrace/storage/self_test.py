"""Whether an object store keeps the promises that a run rests on: above all that a create-only PUT has one winner.

Several S3-compatible servers accept `If-None-Match: *` and ignore it, or honour it only when nobody else writes. On
such a server two trainers could both publish a version, so it is found out before a run rather than in one.
"""

import secrets
from concurrent.futures import ThreadPoolExecutor

from millrace.errors import InvalidStateError
from millrace.storage.base import ObjectStore

_WRITERS = 16
_ROUNDS = 4


def self_test(store: ObjectStore, *, prefix: str) -> None:
    """Write, read and delete a few small objects under `prefix`; InvalidStateError names what the store gets wrong.

    About 100 requests. Errors of the store itself (no such bucket, wrong credentials) pass through.
    """
    base = f"{prefix}/self-test/{secrets.token_hex(8)}/"
    written: list[str] = []
    try:
        with ThreadPoolExecutor(_WRITERS) as pool:
            for number in range(_ROUNDS):
                key = f"{base}{number}"
                written.append(key)
                _race(store, pool, key)
        _read_back(store, base, written)
    finally:
        for key in written:
            store.delete(key)


def _race(store: ObjectStore, pool: ThreadPoolExecutor, key: str) -> None:
    """Many writers of one new object: one may win, and its bytes must be what lies there."""
    bodies = [f"writer {number}".encode() for number in range(_WRITERS)]
    outcomes = pool.map(lambda body: store.create(key, body), bodies)
    won = [body for body, is_winner in zip(bodies, outcomes, strict=True) if is_winner]
    if len(won) != 1 or store.get(key) != won[0]:
        raise _bad(store, f"{len(won)} of {_WRITERS} create-only PUTs (If-None-Match: *) of one new object succeeded")
    if store.create(key, b"late"):
        raise _bad(store, "a create-only PUT (If-None-Match: *) replaced an object that was there")


def _read_back(store: ObjectStore, base: str, written: list[str]) -> None:
    whole = store.get(written[0])
    if store.get_range(written[0], 1, 3) != whole[1:4]:
        raise _bad(store, "a range read gave other bytes than the object has there")
    listed = [item.key for item in store.list(base)]
    if listed != sorted(written):
        raise _bad(store, f"a listing shows {len(listed)} of {len(written)} objects that were just written")


def _bad(store: ObjectStore, problem: str) -> InvalidStateError:
    return InvalidStateError(
        f"the object store {store.describe()} cannot carry runs: {problem}",
        reason="STORE_SEMANTICS",
        remedy="use a server that supports conditional writes (Amazon S3, Ceph, Cloudflare R2, SeaweedFS from 4.18 on)",
    )
