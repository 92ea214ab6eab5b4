"""The adapters that an engine keeps: the least recently used makes room, and is loaded again when it is asked for."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch

from millrace.errors import CapacityError, CorruptObjectError, UnavailableError
from millrace.inference.adapters import ServedAdapters
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import GenerateRequest, Generation, InflightMode, PolicyIdentity, SamplingParams
from millrace.policies.manifest import StagedPolicy
from millrace.telemetry import waits
from millrace_testing.inference.adapters import Tenant, tenant
from millrace_testing.patience import patient
from millrace_testing.polling import until

PROMPT = (3, 4, 5)
snapshot = partial(waits.snapshot, "test")


@dataclass
class Place:
    """An engine with the base and a pool, and the tenants' adapters, whose loading tests stop and damage."""

    engine: EmbeddedEngine
    base: torch.nn.Module
    base_digest: str
    tenants: dict[PolicyIdentity, Tenant] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)

    def add(self, run_uid: str, version: int = 1) -> PolicyIdentity:
        made = tenant(
            self.base, run_uid=run_uid, seed=ord(run_uid) + 100 * version, version=version, base_digest=self.base_digest
        )
        self.tenants[made.identity] = made
        return made.identity

    def stage(self, identity: PolicyIdentity) -> StagedPolicy:
        self.asked.append(identity.run_uid)
        assert self.go_on.wait(patient(60))
        if self.errors:
            raise self.errors.pop()
        return self.tenants[identity].staged

    def pool(self, *, most: int, load_s: float = 60.0) -> ServedAdapters:
        return ServedAdapters(self.engine, self.stage, most=most, load_s=load_s)

    async def generate(self, pool: ServedAdapters, identity: PolicyIdentity, *, tokens: int = 6) -> Generation:
        request = GenerateRequest(
            request_id=f"{identity}-{len(self.asked)}-{tokens}",
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True),
        )
        async with pool.using(identity) as lease:
            assert lease.digest.digest == self.tenants[identity].staged.manifest.digest
            return await self.engine.generate(replace(request, adapter=lease.identity))


@pytest.fixture
async def place(model_dir, make_model, make_staged) -> AsyncIterator[Place]:
    base = make_model(0)
    staged = make_staged(base)
    engine = EmbeddedEngine(max_num_seqs=8)
    await engine.load(model_dir, staged, identity=PolicyIdentity(run_uid="base", lineage=0, version=0))
    await engine.prove(staged)
    place = Place(engine, base, staged.manifest.digest)
    place.go_on.set()
    yield place
    await engine.close()


async def test_the_least_recently_used_adapter_makes_room_and_is_loaded_again(place: Place, reference) -> None:
    pool = place.pool(most=2)
    a, b, c = (place.add(name) for name in "abc")
    for identity in (a, b, a, c, a, b, c):
        got = await place.generate(pool, identity)
        expected = reference(place.tenants[identity].twin, list(PROMPT), got.token_ids.tolist())
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)
    assert place.asked == ["a", "b", "c", "b", "c"]
    assert list(pool.held) == [b, c] and pool.num_loaded == 5
    with pytest.raises(UnavailableError, match="does not have the adapter a/0-1"):
        await place.engine.score((1, 2), a)


async def test_requests_that_wait_for_one_adapter_load_it_once_and_visibly(place: Place) -> None:
    pool = place.pool(most=2)
    a, b = place.add("a"), place.add("b")
    await place.generate(pool, b)
    place.go_on.clear()
    calls = [asyncio.create_task(place.generate(pool, a, tokens=n)) for n in range(2, 7)]
    await until(lambda: place.asked[-1] == "a", timeout_s=patient(10))
    assert len((await place.generate(pool, b)).token_ids) == 6  # others go on
    await until(lambda: any(wait.reason == "adapter a/0-1 (5 requests)" for wait in snapshot()), timeout_s=patient(20))
    calls.pop().cancel()  # one that gives up ends nobody else's loading
    place.go_on.set()
    assert [len(got.token_ids) for got in await asyncio.gather(*calls)] == [2, 3, 4, 5]
    assert place.asked == ["b", "a"]


async def test_an_adapter_that_is_used_does_not_make_room(place: Place) -> None:
    pool = place.pool(most=1)
    a, b = place.add("a"), place.add("b")
    async with pool.using(a):
        call = asyncio.create_task(place.generate(pool, b))
        await until(lambda: any("room for adapter b/0-1" in wait.reason for wait in snapshot()), timeout_s=patient(20))
        assert list(pool.held) == [a] and not call.done()
    assert len((await call).token_ids) == 6
    assert list(pool.held) == [b]


async def test_a_request_for_which_there_is_no_room_is_refused_in_time(place: Place) -> None:
    pool = place.pool(most=1)
    a, b = place.add("a"), place.add("b")
    async with pool.using(a):
        pool.load_s = 0.05
        with pytest.raises((CapacityError, UnavailableError), match=r"requests use all 1 adapters|not loaded within"):
            await place.generate(pool, b)
        await until(lambda: not any("room for adapter" in wait.reason for wait in snapshot()), timeout_s=patient(20))
        pool.load_s = 60.0
    assert len((await place.generate(pool, b)).token_ids) == 6


async def test_an_adapter_that_cannot_be_loaded_is_tried_again_by_the_next_request(place: Place) -> None:
    pool = place.pool(most=2)
    a = place.add("a")
    place.errors = [CorruptObjectError("a tensor is damaged", reason="POLICY_TENSOR_DIGEST_MISMATCH", remedy="…")]
    with pytest.raises(CorruptObjectError, match="a tensor is damaged"):
        await place.generate(pool, a)
    assert pool.held == {}
    assert len((await place.generate(pool, a)).token_ids) == 6


async def test_requests_move_to_the_next_version_with_their_lease(place: Place) -> None:
    """The old version is unused at once, so that it makes room; the new one is not, until its requests have ended."""
    pool = place.pool(most=2)
    old, new, b = place.add("a"), place.add("a", 2), place.add("b")
    async with pool.using(old) as lease:
        await pool.move(old, new, inflight_mode=InflightMode.KEEP)
        assert lease.identity == new
        async with pool.using(b):  # takes the old one's place
            assert list(pool.held) == [new, b]
    assert len((await place.generate(pool, old)).token_ids) == 6  # who pins it gets it all the same
    assert place.asked == ["a", "a", "b", "a"]


async def test_a_move_that_fails_leaves_requests_with_the_old_version(place: Place) -> None:
    pool = place.pool(most=2)
    old, new = place.add("a"), place.add("a", 2)
    async with pool.using(old) as lease, pool.using(new):
        await place.engine.remove_adapter(new)
        with pytest.raises(UnavailableError, match="does not have the adapter a/0-2"):
            await pool.move(old, new, inflight_mode=InflightMode.KEEP)
        assert lease.identity == old
    pool.forget()
    assert pool.held == {}


async def test_the_adapters_of_a_run_are_dropped(place: Place) -> None:
    pool = place.pool(most=3)
    a, b = place.add("a"), place.add("b")
    for identity in (a, b):
        await place.generate(pool, identity)
    await pool.drop("a")
    assert list(pool.held) == [b]
    with pytest.raises(UnavailableError, match="does not have the adapter"):
        await place.engine.score((1, 2), a)
