"""The embedded engine against plain forward passes: exactness, joins and leaves, updates in flight."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from millrace.errors import InternalError, InvalidStateError, UnavailableError
from millrace.inference.embedded import scheduler as scheduler_module
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import (
    EngineState,
    FinishReason,
    GenerateRequest,
    InflightMode,
    PolicyIdentity,
    SamplingParams,
)
from millrace.inference.model_files import load_tokenizer
from millrace.policies.manifest import Probe
from millrace.policies.tensors import TensorChange
from millrace_testing import polling

EOS = 258
V0 = PolicyIdentity(run_uid="r", lineage=0, version=0)
V1 = PolicyIdentity(run_uid="r", lineage=0, version=1)


def request(number: int, *, prompt: list[int] | None = None, **sampling) -> GenerateRequest:
    rng = random.Random(number)
    prompt = prompt or [rng.randrange(256) for _ in range(rng.randint(1, 40))]
    params = {"max_tokens": rng.randint(1, 30), **sampling}
    return GenerateRequest(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=SamplingParams(**params))


@pytest.fixture
async def engine(model_dir, make_model, make_staged) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(max_num_seqs=6)
    await engine.load(model_dir, make_staged(make_model(0)), identity=V0)
    yield engine
    await engine.close()


until = partial(polling.until, timeout_s=20.0, poll_s=0.001)  # soon enough to meet a request that is generated


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_logprobs_equal_a_forward_pass_while_requests_join_and_leave(engine, make_model, reference, temperature):
    model = make_model(0)
    requests = [request(n, temperature=temperature) for n in range(40)]  # 40 requests through 6 rows: rows are reused

    async def late(item: GenerateRequest, delay_s: float):
        await asyncio.sleep(delay_s)
        return await engine.generate(item)

    results = await asyncio.gather(*(late(r, (n % 7) * 0.004) for n, r in enumerate(requests)))
    for sent, got in zip(requests, results, strict=True):
        expected = reference(model, list(sent.prompt_token_ids), got.token_ids.tolist(), temperature or 1.0)
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)
        ended = got.token_ids[-1] == EOS
        assert got.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert len(got.token_ids) == sent.sampling.max_tokens or ended
        assert [(s.lineage, s.version, s.start, s.end) for s in got.policy_spans] == [(0, 0, 0, len(got.token_ids))]
    assert engine.status().num_finished == 40
    assert engine.status().num_running == 0


async def test_grouped_and_chunked_prefill_equals_a_forward_pass(engine, make_model, reference, monkeypatch):
    monkeypatch.setattr(scheduler_module, "PREFILL_TOKENS", 50)  # several passes per admission
    monkeypatch.setattr(scheduler_module, "IDLE_CACHE_BYTES", 0)  # and a fresh cache after every lull
    await engine.generate(request(99))
    model = make_model(0)
    requests = [request(n) for n in range(12)]
    await engine.pause("test")  # so that all of them are admitted together
    tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
    await until(lambda: engine.status().num_waiting == 12)
    await engine.resume("test")
    for sent, got in zip(requests, await asyncio.gather(*tasks), strict=True):
        expected = reference(model, list(sent.prompt_token_ids), got.token_ids.tolist())
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)


async def test_greedy_takes_the_most_likely_token(engine, make_model):
    import torch

    got = await engine.generate(request(3, temperature=0.0, max_tokens=12))
    ids = list(request(3).prompt_token_ids)
    model = make_model(0)
    for token in got.token_ids.tolist():
        with torch.inference_mode():
            assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(engine):
    item = request(1, seed=77, max_tokens=25, ignore_eos=True)
    alone = await engine.generate(item)
    crowd = [engine.generate(request(n, max_tokens=20)) for n in range(100, 110)]
    among, *_ = await asyncio.gather(engine.generate(replace(item, request_id="again")), *crowd)
    other = await engine.generate(request(1, seed=78, max_tokens=25, ignore_eos=True))
    assert alone.token_ids.tolist() == among.token_ids.tolist()
    assert alone.token_ids.tolist() != other.token_ids.tolist()


async def test_penalties_are_those_of_their_row_and_its_log_probs_say_so(engine, make_model):
    import torch

    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    plain, other = request(7, seed=5, max_tokens=16), request(8, temperature=0.0, max_tokens=16)
    alone = await engine.generate(replace(plain, request_id="alone"))
    sampling = replace(plain.sampling, ignore_eos=True, **penalties)
    among, got, _ = await asyncio.gather(
        engine.generate(plain),
        engine.generate(replace(plain, request_id="penalised", sampling=sampling)),
        engine.generate(other),
    )
    assert among.token_ids.tolist() == alone.token_ids.tolist(), "a neighbour's penalties are not its own"
    prompt, tokens = list(plain.prompt_token_ids), got.token_ids.tolist()
    model = make_model(0)
    for at, (token, logprob) in enumerate(zip(tokens, got.logprobs.tolist(), strict=True)):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + tokens[:at]])).logits[0, -1].double().tolist()
        for seen in set(prompt + tokens[:at]):
            logits[seen] *= 1 / 1.3 if logits[seen] > 0 else 1.3
        for seen in tokens[:at]:
            logits[seen] -= 0.5
        assert logprob == pytest.approx(float(torch.log_softmax(torch.tensor(logits), -1)[token]), abs=1e-4)


async def test_no_completion_ends_before_its_least_length(engine):
    free = await engine.generate(request(9, temperature=0.0, max_tokens=30))
    stop = int(free.token_ids[1])
    item = request(9, temperature=0.0, max_tokens=30)
    first = await engine.generate(
        replace(item, request_id="soon", sampling=replace(item.sampling, stop_token_ids=(stop,)))
    )
    late = replace(item.sampling, stop_token_ids=(stop,), min_tokens=12)
    second = await engine.generate(replace(item, request_id="late", sampling=late))
    assert len(first.token_ids) <= 2 and len(second.token_ids) >= 12 and stop not in second.token_ids[:12].tolist()


async def test_stop_tokens_and_stop_strings_end_a_completion(engine, model_dir):
    tokenizer = load_tokenizer(model_dir)
    item = request(5, seed=1, max_tokens=30, ignore_eos=True)
    free = (await engine.generate(item)).token_ids.tolist()
    token = free[10]
    first = free.index(token)
    sampling = replace(item.sampling, stop_token_ids=(token,))
    by_token = await engine.generate(replace(item, request_id="t", sampling=sampling))
    assert by_token.token_ids.tolist() == free[: first + 1]
    assert (by_token.finish_reason, by_token.stop_reason) == (FinishReason.STOP, token)

    text = tokenizer.decode(free[8:11], skip_special_tokens=True)
    assert text
    sampling = replace(item.sampling, stop=("never there", text))
    by_string = await engine.generate(replace(item, request_id="s", sampling=sampling))
    assert len(by_string.token_ids) <= 11
    assert (by_string.finish_reason, by_string.stop_reason) == (FinishReason.STOP, text)

    sampling = replace(sampling, min_tokens=len(by_string.token_ids) + 1)
    late = await engine.generate(replace(item, request_id="l", sampling=sampling))
    begun, ended = (tokenizer.decode(late.token_ids[:end].tolist()) for end in (sampling.min_tokens - 1, None))
    assert late.token_ids.tolist() == free[: len(late.token_ids)] and len(late.token_ids) >= sampling.min_tokens
    assert late.finish_reason is FinishReason.LENGTH or ended.count(text) > begun.count(text), "passed over, not kept"


async def test_a_stop_string_is_looked_for_in_the_text_that_the_caller_gets(engine, model_dir):
    tokenizer = load_tokenizer(model_dir)
    for number in range(20):  # until one samples a special token
        item = request(number, seed=number, max_tokens=30, ignore_eos=True)
        free = (await engine.generate(item)).token_ids.tolist()
        if special := next((token for token in free[:-1] if token in tokenizer.all_special_ids), None):
            break
    assert special is not None
    for skips, expected in ((False, free[: free.index(special) + 1]), (True, free)):
        stopping = replace(item.sampling, stop=(tokenizer.decode([special]),), skip_special_tokens=skips)
        found = await engine.generate(replace(item, sampling=stopping))
        assert found.token_ids.tolist() == expected


async def test_update_in_flight_with_recompute_continues_as_if_the_new_weights_had_read_everything(
    engine, make_model, make_staged, reference
):
    old, new = make_model(0), make_model(1)
    requests = [request(n, max_tokens=150, ignore_eos=True) for n in range(5)]
    tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
    await until(lambda: engine.status().num_generated_tokens >= 5 * 40)
    await engine.apply_policy(make_staged(new), identity=V1, inflight_mode=InflightMode.RECOMPUTE)
    for sent, got in zip(requests, await asyncio.gather(*tasks), strict=True):
        before, after = got.policy_spans
        assert (before.version, before.start, after.version, after.end) == (0, 0, 1, 150)
        assert before.end == after.start > 0
        prompt, ids = list(sent.prompt_token_ids), got.token_ids.tolist()
        cut = after.start
        np.testing.assert_allclose(got.logprobs[:cut], reference(old, prompt, ids)[:cut], atol=1e-5)
        np.testing.assert_allclose(got.logprobs[cut:], reference(new, prompt, ids)[cut:], atol=1e-5)


async def test_update_in_flight_with_keep_continues_on_the_cache_of_the_old_weights(engine, make_model, make_staged):
    import torch
    from transformers import DynamicCache

    new = make_model(1)
    item = request(0, max_tokens=120, ignore_eos=True)
    task = asyncio.create_task(engine.generate(item))
    await until(lambda: engine.status().num_generated_tokens >= 30)
    await engine.apply_policy(make_staged(new), identity=V1, inflight_mode=InflightMode.KEEP)
    got = await task
    before, after = got.policy_spans
    ids, cut = [*item.prompt_token_ids, *got.token_ids.tolist()], len(item.prompt_token_ids) + after.start
    cache, expected = DynamicCache(), []
    with torch.inference_mode():
        make_model(0)(input_ids=torch.tensor([ids[: cut - 1]]), past_key_values=cache, use_cache=True)
        for position in range(cut - 1, len(ids) - 1):  # the update fell between feeding tokens cut-2 and cut-1
            logits = new(input_ids=torch.tensor([[ids[position]]]), past_key_values=cache, use_cache=True).logits
            expected.append(torch.log_softmax(logits[0, -1].float(), -1)[ids[position + 1]].item())
    assert before.end == after.start
    np.testing.assert_allclose(got.logprobs[after.start :], expected, atol=1e-5)


async def test_tied_embeddings_follow_an_update(engine, make_model, make_staged, reference):
    new = make_model(1)
    await engine.apply_policy(make_staged(new), identity=V1, inflight_mode=InflightMode.KEEP)
    got = await engine.generate(request(2, max_tokens=20))
    expected = reference(new, list(request(2).prompt_token_ids), got.token_ids.tolist())
    np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)
    assert got.policy_spans[0].version == 1


async def test_readback_and_probe_prove_what_was_published(engine, make_model, make_staged, reference):
    old, new = make_model(0), make_model(1)
    held = await engine.prove(make_staged(old))
    assert (held.digest, held.proof) == (make_staged(old).manifest.digest, "readback")
    tokens = [5, 200, 17, 99, 3]
    probe = Probe(token_ids=tuple(tokens), logprobs=tuple(reference(new, tokens[:1], tokens[1:]).tolist()))
    await engine.apply_policy(make_staged(new), identity=V1, inflight_mode=InflightMode.KEEP)
    assert (await engine.prove(make_staged(new, probe))).proof == "readback+probe"
    with pytest.raises(InternalError, match="digest"):
        await engine.prove(make_staged(old))
    shifted = replace(probe, logprobs=tuple(value + 0.01 for value in probe.logprobs))
    with pytest.raises(InternalError, match="probe"):
        await engine.prove(make_staged(new, shifted))


async def test_changes_alone_make_the_new_version(engine, make_model, make_staged, reference):
    import torch

    new = make_model(0)
    for name in ("model.embed_tokens", "model.layers.1.mlp.up_proj", "model.norm"):
        new.get_submodule(name).weight.view(-1)[1::7] *= 1.5
    old, whole = make_staged(make_model(0)), make_staged(new)
    changes = {}
    for name, tensor in whole.tensors.items():
        (positions,) = np.nonzero(tensor.bits() != old.tensors[name].bits())
        if positions.size:
            changes[name] = (TensorChange(bits=tensor.bits()[positions], positions=positions.astype(np.int64)),)
    assert set(changes) == {"model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"}
    bits = whole.tensors["model.norm.weight"].bits()
    changes["model.norm.weight"] = (TensorChange(bits=bits[5:], start=5), TensorChange(bits=bits[:5]))
    for _ in range(2):  # absolute values: twice is once
        await engine.apply_policy(
            make_staged(new, changes=changes, base=(0, 0)), identity=V1, inflight_mode=InflightMode.KEEP
        )
        assert (await engine.prove(whole)).digest == whole.manifest.digest
    got = await engine.generate(request(2, max_tokens=20))
    expected = reference(new, list(request(2).prompt_token_ids), got.token_ids.tolist())
    np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)
    assert torch.equal(new.lm_head.weight, new.model.embed_tokens.weight)  # the model is tied


async def test_a_policy_that_does_not_fit_is_refused_by_name_and_changes_nothing(
    engine, make_model, make_tensors, make_staged
):
    held = await engine.prove(make_staged(make_model(0)))
    wrong = make_tensors(make_model(1))
    wrong.pop("model.norm.weight")
    with pytest.raises(InvalidStateError, match=r"model\.norm\.weight is missing"):
        await engine.check(make_staged(wrong))
    wide = make_staged(make_model(1, intermediate_size=128))
    with pytest.raises(InvalidStateError, match="mlp"):
        await engine.apply_policy(wide, identity=V1, inflight_mode=InflightMode.KEEP)
    assert (await engine.prove(make_staged(make_model(0)))) == held
    assert engine.status().state is EngineState.READY
    assert engine.status().identity == V0


async def test_cancelling_a_call_frees_its_row(engine):
    tasks = [asyncio.create_task(engine.generate(request(n, max_tokens=200, ignore_eos=True))) for n in range(8)]
    await until(lambda: engine.status().num_running == 6 and engine.status().num_waiting == 2)
    await engine.pause("test")
    for task in (tasks[1], tasks[7]):
        task.cancel()
    await until(lambda: engine.status().num_requests == 6)
    await engine.resume("test")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(r, asyncio.CancelledError) for r in results] == [n in (1, 7) for n in range(8)]


async def test_abort_returns_what_is_there_and_survivors_stay_exact(engine, make_model, reference):
    requests = [request(n, max_tokens=180, ignore_eos=True) for n in range(4)]
    tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
    await until(lambda: engine.status().num_generated_tokens >= 80)
    await engine.abort("0")
    results = await asyncio.gather(*tasks)
    assert results[0].finish_reason is FinishReason.ABORT
    for sent, got in zip(requests[1:], results[1:], strict=True):  # row 3 moved into the hole
        expected = reference(make_model(0), list(sent.prompt_token_ids), got.token_ids.tolist())
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-5)


async def test_pause_holds_until_every_holder_resumed(engine):
    await engine.pause("a")
    await engine.pause("b")
    task = asyncio.create_task(engine.generate(request(1)))
    await engine.resume("a")
    await asyncio.sleep(0.05)
    assert not task.done() and engine.status().is_paused
    await engine.resume("b")
    assert (await task).finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


async def test_values_that_are_not_finite_end_the_request_and_do_not_outlive_it(
    engine, make_model, make_staged, reference
):
    broken = make_model(1)
    broken.model.layers[1].mlp.up_proj.weight.fill_(float("nan"))
    broken.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    await engine.apply_policy(make_staged(broken), identity=V1, inflight_mode=InflightMode.KEEP)
    results = await asyncio.gather(*(engine.generate(request(n, prompt=[1] * 40)) for n in range(6)))
    assert {r.finish_reason for r in results} == {FinishReason.ERROR}
    good = make_model(2)
    await engine.apply_policy(make_staged(good), identity=V1, inflight_mode=InflightMode.KEEP)
    for number in range(6):  # the same rows, shorter prompts: old values are behind them
        sent = request(number, prompt=[1, 2], max_tokens=20)
        got = await engine.generate(sent)
        np.testing.assert_allclose(got.logprobs, reference(good, [1, 2], got.token_ids.tolist()), atol=1e-5)


async def test_limits_of_context_and_cache(model_dir, make_model, make_staged):
    engine = EmbeddedEngine(max_num_seqs=8, max_model_len=64, kv_bytes=3 * 64 * 512)  # 512 bytes per token: 3 rows
    with pytest.raises(UnavailableError):
        await engine.generate(request(1))
    await engine.load(model_dir, make_staged(make_model(0)), identity=V0)
    assert engine.status().max_model_len == 64
    with pytest.raises(InvalidStateError, match="64 tokens"):
        await engine.generate(request(1, prompt=[1] * 64))
    got = await engine.generate(request(1, prompt=[1] * 60, max_tokens=100, ignore_eos=True))
    assert (len(got.token_ids), got.finish_reason) == (4, FinishReason.LENGTH)
    peak = 0
    tasks = [asyncio.create_task(engine.generate(request(n, max_tokens=64, ignore_eos=True))) for n in range(8)]
    while not all(task.done() for task in tasks):
        peak = max(peak, engine.status().num_running)
        await asyncio.sleep(0)
    assert 1 <= peak <= 3
    await engine.close()


async def test_a_new_model_replaces_the_old_one_and_ends_its_requests(engine, model_dir, make_model, make_staged):
    task = asyncio.create_task(engine.generate(request(1, max_tokens=250, ignore_eos=True, prompt=[3])))
    await until(lambda: engine.status().num_running == 1)
    await engine.pause("test")
    other = PolicyIdentity(run_uid="other", lineage=0, version=7)
    await engine.load(model_dir, make_staged(make_model(3)), identity=other)
    await engine.resume("test")
    assert (await task).finish_reason is FinishReason.ABORT
    assert engine.status().identity == other
    await engine.fail("test")
    assert engine.status().state is EngineState.FAILED
    with pytest.raises(UnavailableError, match="test"):
        await engine.generate(request(2))
