"""Whether an object store keeps the promises that a run rests on: above all that a create-only PUT has one winner.

Several S3-compatible servers accept `If-None-Match: *` and ignore it, or honour it only when nobody else writes. On
such a server two trainers could both publish a version, so it is found out before a run rather than in one.
"""

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from datetime import UTC, datetime

from millrace.errors import InvalidStateError
from millrace.storage.base import ObjectStore, cannot_carry_runs
from millrace.storage.clean_up import delete

logger = logging.getLogger(__name__)

FORMAT = 2
"""Of what is tried: a store that has passed an older test is tested again."""
_RACES = (4, 2, 2, 2, 2, 2, 2)
"""How many writers race for each of as many objects. A server that looks and then writes loses a race of two as often
as one of eight, so that many small ones find it sooner."""
_PATIENCE_S = 0.15

_Races = dict[str, dict[bytes, Future[bool]]]
"""By key and by what each writer writes there: whether it has won."""


def require_tested(store: ObjectStore, *, prefix: str) -> Future[None]:
    """Check that the store does what runs rest on, unless a mark in it shows that it has passed under this address.

    The test writes, reads and deletes a few objects under `prefix`; InvalidStateError names what the store gets wrong.
    Return a future that ends when the last writer's answer was judged, with the error if it is wrong; then the mark is
    written under `prefix`. A store that has passed before gives a future that is done. It blocks. Two callers at once
    both test, which does no harm.
    """
    address = hashlib.sha256(store.describe().encode()).hexdigest()[:16]
    key = f"{prefix}/self-test/passed-{FORMAT}-{address}.json"
    if store.head(key) is not None:
        known = Future[None]()
        known.set_result(None)
        return known

    def passed() -> None:
        about = {"format": FORMAT, "store": store.describe(), "at": datetime.now(UTC).isoformat(timespec="seconds")}
        store.put(key, json.dumps(about).encode())

    return self_test(store, prefix=prefix, passed=passed)


def self_test(store: ObjectStore, *, prefix: str, passed: Callable[[], None] | None = None) -> Future[None]:
    """Write, read and delete a few small objects under `prefix`; InvalidStateError names what the store gets wrong.

    It blocks for about 40 requests. Errors of the store itself (no such bucket, wrong credentials) pass through. It
    does not wait for writers whose answers take far longer than the winners': SeaweedFS lets losers that wait for its
    lock sleep for whole seconds. The returned future ends after the last of them, with an error if one of them has won,
    too. Then what was written is deleted, and `passed` is called if all was right.
    """
    base = f"{prefix}/self-test/{secrets.token_hex(8)}/"
    single = f"{base}{len(_RACES)}"
    # A thread for each writer, because a race needs all of them at once.
    pool = ThreadPoolExecutor(sum(_RACES) + 1, thread_name_prefix="self-test")
    races: _Races = {}
    try:
        for number, writers in enumerate(_RACES):
            races[f"{base}{number}"] = _begin_race(store, pool, f"{base}{number}", writers)
        alone = pool.submit(_write_alone, store, single)
        _await_most(races)
        judged = {key: pool.submit(_judge, store, key, race) for key, race in races.items()}
        open_ones = {key: races[key] for key, is_over in judged.items() if not is_over.result()}
        alone.result()
        _list_back(store, base, [*races, single])
        return pool.submit(_conclude, store, open_ones, [*races, single], passed)
    except BaseException:  # cleans up, and raises it again
        # Writers first: one that is still under way would create its object after the deletion.
        wait(writer for race in races.values() for writer in race.values())
        _clean_up(store, [*races, single])
        raise
    finally:
        # Late writers go on: the future that is returned waits for them.
        pool.shutdown(wait=False)


def _begin_race(store: ObjectStore, pool: ThreadPoolExecutor, key: str, writers: int) -> dict[bytes, Future[bool]]:
    """Have several writers at once create one new object; return, by the bytes that each writes, whether it won."""
    bodies = [f"writer {number}".encode() for number in range(writers)]
    return {body: pool.submit(store.create, key, body) for body in bodies}


def _await_most(races: _Races) -> None:
    """Wait until each race has a winner, then for the other writers as long again, or until `_PATIENCE_S` have passed.

    Raises the error of a writer.
    """
    began = time.monotonic()
    writers = [writer for race in races.values() for writer in race.values()]
    for writer in as_completed(writers):
        writer.result()
        if all(any(each.done() and each.result() for each in race.values()) for race in races.values()):
            break
    took_s = time.monotonic() - began
    wait(writers, timeout=max(_PATIENCE_S, 2 * took_s) - took_s)


def _judge(store: ObjectStore, key: str, race: dict[bytes, Future[bool]]) -> bool:
    """Raise InvalidStateError unless exactly one of the answers so far is a win, and its bytes are the object's.

    `race` has each writer's outcome by the bytes that it wrote; no win among the answers raises, too. Return whether
    every writer had answered when this function began; an answer that comes later is not judged.
    """
    # Bodies differ by writer: only so the stored bytes say who has won.
    answers = {body: outcome.result() for body, outcome in race.items() if outcome.done()}
    won = [body for body, has_won in answers.items() if has_won]
    create_only = "create-only PUTs (If-None-Match: *) of one new object"
    if len(won) != 1:
        raise cannot_carry_runs(store.describe(), f"{len(won)} of {len(race)} {create_only} succeeded")
    if store.get(key) != won[0]:
        problem = f"one of {len(race)} {create_only} succeeded, and the object holds other bytes than it wrote"
        raise cannot_carry_runs(store.describe(), problem)
    return len(answers) == len(race)


def _write_alone(store: ObjectStore, key: str) -> None:
    """Raise InvalidStateError unless a create of the free `key` wins, a second one does not, and a range can be
    read.
    """
    whole = b"alone"
    if not store.create(key, whole):
        raise cannot_carry_runs(store.describe(), "a create-only PUT (If-None-Match: *) of a free name was refused")
    if store.create(key, b"late"):
        raise cannot_carry_runs(
            store.describe(), "a create-only PUT (If-None-Match: *) replaced an object that was there"
        )
    if store.get_range(key, 1, 3) != whole[1:4]:
        raise cannot_carry_runs(store.describe(), "a range read gave other bytes than the object has there")


def _list_back(store: ObjectStore, base: str, written: list[str]) -> None:
    """Raise InvalidStateError unless a listing of `base` shows exactly the keys in `written`, sorted."""
    listed = [item.key for item in store.list(base)]
    if listed != sorted(written):
        raise cannot_carry_runs(
            store.describe(), f"a listing shows {len(listed)} of {len(written)} objects that were just written"
        )


def _conclude(store: ObjectStore, races: _Races, written: list[str], passed: Callable[[], None] | None) -> None:
    """Wait for the writers that had not answered, judge their races, delete what was written, and call `passed`.

    `races` are those with such writers, `written` all keys. Raises InvalidStateError if a race has another outcome than
    one winner; `passed` is not called then.
    """
    try:
        for key, race in races.items():
            wait(race.values())
            _judge(store, key, race)
    except InvalidStateError as error:
        logger.error(
            "the object store has failed its self-test, by an answer that came late", extra={"error": str(error)}
        )
        raise
    finally:
        wait(writer for race in races.values() for writer in race.values())
        _clean_up(store, written)
    if passed is not None:
        passed()


def _clean_up(store: ObjectStore, written: list[str]) -> None:
    """Delete these objects until a deletion fails: that is no reason to refuse a store, and must not hide one."""
    for key in written:
        if delete(store, key, what="object of the self-test") is not None:
            return
