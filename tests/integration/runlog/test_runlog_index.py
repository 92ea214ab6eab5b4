"""Creating runs: unique names, idempotent requests, and every crash point completed by a repetition."""

import asyncio
import json

import pytest

from millrace.errors import AlreadyExistsError, InvalidSpecError, UnavailableError
from millrace.runlog import RunLog, new_uid
from millrace.runlog.index import create_run, find_request, read_index
from millrace.runlog.names import Deployment, Names


@pytest.fixture
def create(redis, local_store, prefix, run_json):
    async def create(name: str, *, request_id: str = "", uid: str = "", store=None) -> str:
        uid = uid or new_uid()
        data = run_json(name=name, uid=uid)
        return await create_run(
            redis, store or local_store, prefix, uid=uid, name=name, request_id=request_id, run_json=data
        )

    return create


async def test_created_runs_are_found_and_open(create, redis, local_store, prefix):
    first, second = await create("one"), await create("two", request_id="r2")
    assert (await read_index(redis, local_store, prefix)).runs == {"one": first, "two": second}
    assert (await RunLog.open(redis, local_store, prefix=prefix, uid=first)).generation == 1


async def test_a_second_request_finds_the_first_run(create, local_store, prefix):
    uid = await create("one", request_id="r")
    assert await create("one", request_id="r") == uid
    assert await create("generated-name-2", request_id="r") == uid
    assert await find_request(local_store, prefix, "r") == uid
    assert await find_request(local_store, prefix, "other") is None


async def test_a_taken_name_is_refused(create, redis, local_store, prefix):
    uid = await create("one", request_id="r1")
    for request_id in ("", "r2"):
        with pytest.raises(AlreadyExistsError, match="called 'one' exists"):
            await create("one", request_id=request_id)
    assert (await read_index(redis, local_store, prefix)).runs == {"one": uid}


async def test_sixteen_equal_requests_make_one_run(create, redis, local_store, prefix):
    uids = await asyncio.gather(*(create(f"auto-{n}", request_id="r") for n in range(16)))
    assert len(set(uids)) == 1
    runs = (await read_index(redis, local_store, prefix)).runs
    assert list(runs.values()) == [uids[0]]
    assert json.loads(local_store.get(Names(prefix, uids[0]).run_json))["name"] == next(iter(runs))


async def test_sixteen_requests_for_one_name_make_one_run(create, redis, local_store, prefix):
    found = await asyncio.gather(*(create("one", request_id=f"r{n}") for n in range(16)), return_exceptions=True)
    won = [uid for uid in found if isinstance(uid, str)]
    assert len(won) == 1 and sum(isinstance(error, AlreadyExistsError) for error in found) == 15
    assert (await read_index(redis, local_store, prefix)).runs == {"one": won[0]}
    keys = [key async for key in redis.scan_iter(f"{prefix}:*meta")]
    assert keys == [f"{prefix}:{{{won[0]}}}:meta".encode()], "the losers' logs must be gone"


class _DiesAt:
    """A store that fails at the n-th write, as a crash does."""

    def __init__(self, store, at: int) -> None:
        self._store, self._left = store, at

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def create(self, key: str, data: bytes) -> bool:
        if self._left == 0:
            raise UnavailableError(f"crash before {key}", reason="TEST")
        self._left -= 1
        return self._store.create(key, data)


@pytest.mark.parametrize("at", range(4))
async def test_a_repetition_completes_what_a_crash_left(create, redis, local_store, prefix, at):
    with pytest.raises(UnavailableError, match="crash"):
        await create("one", request_id="r", store=_DiesAt(local_store, at))
    assert await find_request(local_store, prefix, "r") is None
    assert (await read_index(redis, local_store, prefix)).runs == {}
    uid = await create("one", request_id="r")
    assert await find_request(local_store, prefix, "r") == uid
    assert (await read_index(redis, local_store, prefix)).runs == {"one": uid}
    await RunLog.open(redis, local_store, prefix=prefix, uid=uid)


async def test_a_crash_between_name_and_index_is_found_by_listing(create, redis, local_store, prefix):
    await read_index(redis, local_store, prefix)  # the hash counts as complete
    uid = await create("one")
    key = Deployment(prefix).runs_key
    await redis.hdel(key, "one")
    await redis.hset(key, f"?{uid}", "one")
    assert (await read_index(redis, local_store, prefix)).runs == {"one": uid}
    assert await redis.hgetall(key) == {b"one": uid.encode(), b"*": b"1"}


async def test_the_index_is_rebuilt_from_the_store(create, redis, local_store, prefix):
    uids = {name: await create(name) for name in ("a", "b", "c")}
    await redis.delete(Deployment(prefix).runs_key)
    assert (await read_index(redis, local_store, prefix)).runs == uids
    uids["d"] = await create("d")
    await redis.delete(Deployment(prefix).runs_key)
    uids["e"] = await create("e")
    assert (await read_index(redis, local_store, prefix)).runs == uids


@pytest.mark.parametrize("name", ["", "-a", "a/b", "?a", "*", "a" * 64, "ä"])
async def test_bad_names_are_refused(create, name):
    with pytest.raises(InvalidSpecError, match=r"run\.name"):
        await create(name)
