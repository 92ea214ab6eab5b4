"""Many adapters on one base in the embedded engine: each its own bits, moved, taken away, refused."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from millrace.errors import InternalError, InvalidStateError, UnavailableError
from millrace.inference.embedded.adapters import Adapters
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.scheduler import Scheduler
from millrace.inference.engine import (
    EngineState,
    FinishReason,
    GenerateRequest,
    Generation,
    InflightMode,
    PolicyIdentity,
    SamplingParams,
)
from millrace.policies.manifest import StagedPolicy
from millrace_testing.inference.adapters import Tenant, tenant
from millrace_testing.patience import patient
from millrace_testing.polling import until

BASE = PolicyIdentity(run_uid="base", lineage=0, version=0)
PROMPTS = tuple(tuple(range(start, start + 3 + start % 5)) for start in range(1, 9))


class Gate:
    """Stops the engine's steps, but not its commands: no load of the machine lets requests end before a test acts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_closed, self._left = False, 10**9
        step = Scheduler.step

        def gated(scheduler: Scheduler) -> bool:
            if self.is_closed:
                time.sleep(0.001)  # as a step takes
                return True
            before = scheduler.num_generated_tokens
            found = step(scheduler)
            self._left -= scheduler.num_generated_tokens - before
            self.is_closed = self._left <= 0
            return found

        monkeypatch.setattr(Scheduler, "step", gated)

    def close_after(self, tokens: int) -> None:
        self._left = tokens

    def open(self) -> None:
        self._left, self.is_closed = 10**9, False


@dataclass
class Bench:
    """An engine with the base, and tenants of different ranks and targets."""

    engine: EmbeddedEngine
    base: torch.nn.Module
    base_digest: str
    tenants: dict[str, Tenant]
    gate: Gate

    async def add(self, *names: str) -> None:
        for name in names:
            held = self.tenants[name]
            proved = await self.engine.add_adapter(held.staged, identity=held.identity)
            assert (proved.digest, proved.proof) == (held.staged.manifest.digest, "readback+probe")

    def request(self, number: int, adapter: str | None = None, **sampling: Any) -> GenerateRequest:
        params = SamplingParams(**{"max_tokens": 12, "seed": number, "ignore_eos": True, **sampling})
        return GenerateRequest(
            request_id=f"{number}-{adapter}",
            prompt_token_ids=PROMPTS[number % len(PROMPTS)],
            sampling=params,
            adapter=self.tenants[adapter].identity if adapter else None,
        )

    async def together(self, adapters: list[str | None], **sampling: Any) -> list[Generation]:
        """Return what requests give that are admitted at once, one for each of `adapters`."""
        await self.engine.pause("test")
        calls = [
            asyncio.ensure_future(self.engine.generate(self.request(n, a, **sampling))) for n, a in enumerate(adapters)
        ]
        await until(lambda: self.engine.status().num_waiting == len(calls), timeout_s=patient(10))
        await self.engine.resume("test")
        return list(await asyncio.gather(*calls))

    async def begun(
        self, adapters: list[str | None], *, tokens: int, **sampling: Any
    ) -> Sequence[asyncio.Future[Generation]]:
        """Return requests, one for each of `adapters`, that stand still once they have so many tokens together."""
        self.gate.close_after(tokens)
        requests = [self.request(number, adapter, **sampling) for number, adapter in enumerate(adapters)]
        calls = [asyncio.ensure_future(self.engine.generate(request)) for request in requests]
        await until(lambda: self.gate.is_closed, timeout_s=patient(20))
        return calls

    def twin(self, adapter: str | None) -> torch.nn.Module:
        return self.base if adapter is None else self.tenants[adapter].twin


@pytest.fixture
async def bench(request, model_dir, make_model, make_staged, monkeypatch) -> AsyncIterator[Bench]:
    gate = Gate(monkeypatch)
    base = make_model(0)
    staged = make_staged(base)
    engine = EmbeddedEngine(**{"max_num_seqs": 32, "max_loras": 4, **getattr(request, "param", {})})
    await engine.load(model_dir, staged, identity=BASE)
    await engine.prove(staged)
    kinds = {
        "a": (4, ("q_proj", "down_proj")),
        "b": (2, ("q_proj", "v_proj", "up_proj")),
        "c": (8, ("down_proj",)),
        "d": (1, ("o_proj", "k_proj", "gate_proj")),
        "e": (4, ("q_proj",)),
    }
    digest = staged.manifest.digest
    tenants = {
        name: tenant(base, run_uid=name, seed=number, rank=rank, targets=targets, base_digest=digest)
        for number, (name, (rank, targets)) in enumerate(kinds.items(), 1)
    }
    yield Bench(engine, base, digest, tenants, gate)
    await engine.close()


async def test_each_request_is_answered_with_its_adapter(bench: Bench, reference) -> None:
    await bench.add("a", "b", "c", "d")
    mixed = ["a", None, "b", "c", "a", "d", None, "b"]
    for sent, adapter, got in zip(range(8), mixed, await bench.together(mixed), strict=True):
        request = bench.request(sent, adapter)
        prompt, completion = list(request.prompt_token_ids), got.token_ids.tolist()
        for other in ("a", "b", "c", "d", None):
            expected = reference(bench.twin(other), prompt, completion)
            gap = float(np.abs(got.logprobs - expected).max())
            assert (gap < 1e-5) == (other == adapter), (sent, adapter, other, gap)
        assert [(span.lineage, span.version) for span in got.policy_spans] == [(0, 1 if adapter else 0)]


@pytest.mark.parametrize("num_rows", [8, 5])
async def test_an_adapter_gives_the_same_bits_beside_others_as_alone(bench: Bench, num_rows: int) -> None:
    """The batch has equal shapes in both cases: what differs is which adapters the other rows have."""
    await bench.add("a", "b", "c", "d")
    others = (["b", "c", None, "d", "b", "c", "d"] * 2)[: num_rows - 1]
    for place in (0, num_rows - 1):
        mixed: list[str | None] = list(others)
        mixed.insert(place, "a")
        beside = (await bench.together(mixed, max_tokens=20))[place]
        alone = (await bench.together(["a"] * num_rows, max_tokens=20))[place]
        assert beside.token_ids.tolist() == alone.token_ids.tolist()
        assert beside.logprobs.tobytes() == alone.logprobs.tobytes()


async def test_equal_prompts_of_different_adapters_are_no_shared_prompt(bench: Bench, reference) -> None:
    await bench.add("a", "b")
    await bench.engine.pause("test")
    requests = [bench.request(8 * n, name) for n, name in enumerate(["a", "b", None, "a", "b"])]
    assert len({request.prompt_token_ids for request in requests}) == 1
    calls = [asyncio.ensure_future(bench.engine.generate(request)) for request in requests]
    await until(lambda: bench.engine.status().num_waiting == 5, timeout_s=patient(10))
    await bench.engine.resume("test")
    for request, got in zip(requests, await asyncio.gather(*calls), strict=True):
        twin = bench.twin(request.adapter.run_uid if request.adapter else None)
        expected = reference(twin, list(request.prompt_token_ids), got.token_ids.tolist())
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)


async def test_more_adapters_than_slots_take_turns(bench: Bench, reference, monkeypatch) -> None:
    await bench.add("a", "b", "c", "d", "e")  # five, and four generate at once
    seen: list[int] = []
    select = Adapters.select

    def watched(adapters: Adapters, keys: Sequence[PolicyIdentity | None]) -> None:
        seen.append(len({key for key in keys if key is not None}))
        select(adapters, keys)

    monkeypatch.setattr(Adapters, "select", watched)
    mixed: list[str | None] = ["a", "b", "c", "d", "e", "a", "b", None, "e"]
    for adapter, request, got in zip(
        mixed, [bench.request(n, a) for n, a in enumerate(mixed)], await bench.together(mixed), strict=True
    ):
        expected = reference(bench.twin(adapter), list(request.prompt_token_ids), got.token_ids.tolist())
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)
    assert max(seen) == 4


_TIGHT = {"max_num_seqs": 2, "max_loras": 1}


@pytest.mark.parametrize(("bench", "names"), [({}, "abcd"), (_TIGHT, "a")], indirect=["bench"])
async def test_an_adapter_without_a_slot_is_not_passed_over_for_ever(bench: Bench, names: str) -> None:
    """The other adapters always have a further request, with rows to spare or none."""
    await bench.add("a", "b", "c", "d", "e")
    numbers = iter(range(100, 10**6))
    is_over = False

    async def busy(name: str, length: int) -> None:
        while not is_over:
            await bench.engine.generate(bench.request(next(numbers), name, max_tokens=length))

    # Of different lengths, so that they never end together.
    tasks = [asyncio.create_task(busy(name, 20 + 7 * n)) for n in range(10) for name in names]
    await until(lambda: bench.engine.status().num_running >= min(4, 2 * len(names)), timeout_s=patient(10))
    try:
        async with asyncio.timeout(patient(60)):
            got = await bench.engine.generate(bench.request(1, "e"))
    finally:
        is_over = True
        await asyncio.gather(*tasks)
    assert len(got.token_ids) == 12


@pytest.mark.parametrize("mode", list(InflightMode))
async def test_requests_go_on_with_their_runs_next_version_and_others_as_they_were(
    bench: Bench, reference, mode
) -> None:
    await bench.add("a", "b")
    old = bench.tenants["a"]
    new = tenant(
        bench.base, run_uid="a", seed=77, version=2, rank=4, targets=("q_proj",),
        base_digest=bench.base_digest,
    )  # fmt: skip
    calls = await bench.begun(["a", "b", "a", None], tokens=40, max_tokens=60)
    await bench.engine.add_adapter(new.staged, identity=new.identity)
    await bench.engine.move_adapter(old.identity, new.identity, inflight_mode=mode)
    await bench.engine.remove_adapter(old.identity)
    bench.gate.open()
    moved, other, again, base = await asyncio.gather(*calls)
    for got in (moved, again):
        first, second = got.policy_spans
        assert (first.version, second.version, second.end) == (1, 2, 60) and 0 < first.end == second.start
        number = 0 if got is moved else 2
        prompt, completion = list(PROMPTS[number]), got.token_ids.tolist()
        with_old = reference(old.twin, prompt, completion)
        np.testing.assert_allclose(got.logprobs[: first.end], with_old[: first.end], atol=1e-5)
        gap = np.abs(got.logprobs[first.end :] - reference(new.twin, prompt, completion)[first.end :]).max()
        assert (gap < 1e-5) == (mode is InflightMode.RECOMPUTE)
        assert np.abs(got.logprobs[first.end :] - with_old[first.end :]).max() > 1e-4
    for got, number, twin in ((other, 1, bench.twin("b")), (base, 3, bench.base)):
        assert len(got.policy_spans) == 1
        expected = reference(twin, list(PROMPTS[number]), got.token_ids.tolist())
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)


async def test_an_adapter_that_is_taken_away_ends_its_requests_alone(bench: Bench) -> None:
    await bench.add("a", "b")
    calls = await bench.begun(["a", "b"], tokens=10, max_tokens=30)
    await bench.engine.remove_adapter(bench.tenants["a"].identity)
    bench.gate.open()
    gone, other = await asyncio.gather(*calls)
    assert gone.finish_reason is FinishReason.ABORT
    assert other.finish_reason is FinishReason.LENGTH and len(other.token_ids) == 30
    with pytest.raises(UnavailableError, match="does not have the adapter a/0-1"):
        await bench.engine.generate(bench.request(3, "a"))
    with pytest.raises(UnavailableError, match="does not have the adapter a/0-1"):
        await bench.engine.score((1, 2, 3), bench.tenants["a"].identity)


async def test_scores_are_those_of_the_adapter_that_is_named(bench: Bench, reference) -> None:
    await bench.add("a", "b")
    for name in ("a", None, "b"):
        identity = bench.tenants[name].identity if name else None
        scores = await bench.engine.score((5, 6, 7, 8), identity)
        np.testing.assert_allclose(scores.logprobs, reference(bench.twin(name), [5], [6, 7, 8]), atol=1e-5)
        assert scores.policy == (identity or BASE)


async def test_the_base_is_bit_for_bit_what_it_was_when_adapters_are_gone(bench: Bench, make_staged) -> None:
    before = (await bench.together([None] * 5))[0]
    await bench.add("a", "b", "c")
    await bench.together(["a", "b", "c", None])
    for name in "abc":
        await bench.engine.remove_adapter(bench.tenants[name].identity)
    assert (await bench.together([None] * 5))[0].logprobs.tobytes() == before.logprobs.tobytes()
    proved = await bench.engine.prove(make_staged(bench.base))
    assert proved.proof == "readback"


def _with_norm(held: Tenant) -> StagedPolicy:
    return held.changed({"base_model.model.model.norm.weight": torch.ones(64)})


def _with_other_base(held: Tenant) -> StagedPolicy:
    return held.changed({}, base_digest="ab" * 32)


def _with_wrong_shape(held: Tenant) -> StagedPolicy:
    return held.changed({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 3)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with_norm, r"replaces whole weights of the base \(base_model\.model\.model\.norm\.weight\)"),
        (_with_other_base, r"on a base of digest abab.*this engine has"),
        (_with_wrong_shape, r"float32\[4, 3\], the model takes float32\[4, 64\]"),
    ],
)
async def test_an_adapter_that_cannot_be_one_of_many_is_refused(bench: Bench, change, message: str) -> None:
    await bench.add("b")
    with pytest.raises(InvalidStateError, match=message):
        await bench.engine.add_adapter(change(bench.tenants["a"]), identity=bench.tenants["a"].identity)
    assert len((await bench.together(["b"]))[0].token_ids) == 12


async def test_an_adapter_that_computes_otherwise_is_not_kept(bench: Bench) -> None:
    await bench.add("b")
    wrong, other = bench.tenants["a"], bench.tenants["c"]
    staged = wrong.changed({}, probe=other.staged.manifest.probe)
    with pytest.raises(InternalError, match="probe"):
        await bench.engine.add_adapter(staged, identity=wrong.identity)
    assert bench.engine.status().state is EngineState.READY
    with pytest.raises(UnavailableError, match="does not have the adapter"):
        await bench.engine.generate(bench.request(0, "a"))
    assert len((await bench.together(["b"]))[0].token_ids) == 12


async def test_another_policy_takes_the_adapters_away(bench: Bench, make_model, make_staged) -> None:
    await bench.add("a")
    [call] = await bench.begun(["a"], tokens=5, max_tokens=200)
    staged = make_staged(make_model(5))
    identity = PolicyIdentity(run_uid="base", lineage=0, version=1)
    await bench.engine.apply_policy(staged, identity=identity, inflight_mode=InflightMode.KEEP)
    assert (await call).finish_reason is FinishReason.ABORT
    bench.gate.open()
    with pytest.raises(UnavailableError, match="a policy is being put in"):
        await bench.engine.add_adapter(
            bench.tenants["a"].changed({}, base_digest=staged.manifest.digest), identity=BASE
        )
    await bench.engine.prove(staged)
    with pytest.raises(UnavailableError, match="does not have the adapter"):
        await bench.engine.generate(bench.request(1, "a"))
    with pytest.raises(InvalidStateError, match="on a base of digest"):
        await bench.add("a")


async def test_an_engine_with_the_adapter_of_one_policy_takes_no_others(bench: Bench) -> None:
    staged = bench.tenants["a"].staged
    await bench.engine.apply_policy(staged, identity=bench.tenants["a"].identity, inflight_mode=InflightMode.KEEP)
    await bench.engine.prove(staged)
    with pytest.raises(InvalidStateError, match="the engine serves one adapter to all requests"):
        await bench.add("b")
