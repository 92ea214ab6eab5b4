"""The experts of model calls on their way into samples: of several turns, of branches, and of cut completions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import verifiers as vf
from aiohttp import web
from aiohttp.test_utils import TestServer

from millrace.env_server.adapters import client_v0, renderer
from millrace.env_server.adapters.samples import SPANS, Call, SpanLog, Spans, Turn, digest_of, merge_turns
from millrace.env_server.adapters.samples_v0 import turns_of
from millrace.env_server.adapters.samples_v1 import branch_samples
from millrace.env_server.engine_access import engine_access
from millrace.env_server.own_sampling import AskedSampling
from millrace.errors import CorruptObjectError
from millrace.internal.v1.play_pb2 import EnvSpec, Sampling
from millrace.rollouts.routed_experts import RoutedCall, to_answer
from millrace.rollouts.types import PolicySpan


def _rows(count: int, *, start: int = 0) -> np.ndarray:
    """Return experts of two layers, two for each token, the first of which is the token's number."""
    first = np.arange(start, start + count, dtype=np.uint8).repeat(2)
    return np.stack([first, 255 - first], axis=-1).reshape(count, 2, 2)


def _call(prompt: list[int], completion: list[int], *, start: int = 0, shift: int = 0) -> Call:
    rows = _rows(len(prompt) + len(completion) - 1 - start, start=start + shift)
    spans = (PolicySpan(lineage=0, version=1, start=0, end=len(completion)),)
    routed = RoutedCall(start=start, experts=rows)
    return Call(completion_ids=tuple(completion), prompt=digest_of(prompt), spans=spans, routed=routed)


def _turn(prompt: list[int], completion: list[int], call: Call) -> Turn:
    return Turn(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-0.5] * len(completion),
        spans=call.spans,
        routed=call.routed_of(len(prompt) + len(completion)),
    )


@pytest.mark.parametrize("start", [0, 3])
def test_a_later_turn_adds_the_experts_of_what_is_new(start: int) -> None:
    first = _turn([1, 2], [3, 4], _call([1, 2], [3, 4]))
    # It computes the first turn's tokens anew where its answer begins at 0: those do not count.
    later = _turn([1, 2, 3, 4, 9], [7, 8], _call([1, 2, 3, 4, 9], [7, 8], start=start, shift=50))
    [sample] = merge_turns([first, later], requires_spans=True)
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 53, 54, 55]


def test_a_turn_without_a_record_is_filled_by_a_later_one() -> None:
    silent = Turn(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-1], spans=_call([1, 2], [3]).spans)
    assert merge_turns([silent], requires_spans=True)[0].routed_experts is None
    later = _turn([1, 2, 3, 9], [7], _call([1, 2, 3, 9], [7], shift=50))
    [sample] = merge_turns([silent, later], requires_spans=True)
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0, 0].tolist() == [50, 51, 52, 53]


def test_the_experts_of_a_cut_completion_end_where_it_does() -> None:
    call = _call([1, 2], [3, 4, 5])
    steps = [{"tokens": {"prompt_ids": [1, 2], "completion_ids": [3], "completion_logprobs": [-1.0]}}]
    kept = turns_of(steps, Spans([call]), AskedSampling(EnvSpec(), Sampling(temperature=1.0))).kept
    [sample] = merge_turns(kept, requires_spans=True)
    assert sample.routed_experts is not None
    # The last token that is left has experts too, because the engine went on behind it.
    assert sample.routed_experts[:, 0, 0].tolist() == [0, 1, 2]


def test_rollouts_of_an_evaluation_have_none() -> None:
    asked = AskedSampling(EnvSpec(), Sampling(temperature=1.0), is_training=False)
    call = _call([1, 2], [3, 4])
    steps = [{"tokens": {"prompt_ids": [1, 2], "completion_ids": [3, 4], "completion_logprobs": [-1.0, -1.0]}}]
    [sample] = merge_turns(turns_of(steps, Spans([call]), asked).kept, requires_spans=False)
    assert sample.routed_experts is None
    branches = [SimpleNamespace(nodes=[_node([1, 2], 0), _node([3, 4], 2)])]
    [sample] = branch_samples(branches, Spans([call]), requires_spans=False, asked=asked)
    assert sample.routed_experts is None


def test_a_prompt_that_was_another_one_gives_none() -> None:
    for prompt in ([1, 2, 9], [1, 9]):  # of another length, and of the same
        found = Spans([_call([1, 2], [3, 4])]).find([3, 4], prompt)
        assert found.spans and found.routed is None
    assert Call(completion_ids=(3, 4)).routed_of(4) is None


def test_calls_with_equal_completions_and_prompts_of_one_length_keep_their_own() -> None:
    log = SpanLog()
    prompts = [[1, 2], [1, 9]]
    for number, prompt in enumerate(prompts):
        call = _call(prompt, [3, 4], shift=50 * number)
        spans = tuple(replace(span, version=number) for span in call.spans)
        log.note("r", [3, 4], spans, None, call.routed, prompt_ids=prompt)
    taken = log.take("r")
    # The environment recorded them in another order than the engine answered in.
    for number, prompt in reversed(list(enumerate(prompts))):
        found = taken.find([3, 4], prompt)
        assert found.routed is not None and found.spans[0].version == number
        assert found.routed.experts[:, 0, 0].tolist() == [50 * number + place for place in range(3)]


@pytest.mark.parametrize("asks_for_new", [False, True])
def test_a_rollout_keeps_the_experts_of_each_token_once(asks_for_new: bool) -> None:
    log, prompt, calls = SpanLog(), [1], 30
    for turn in range(calls):
        completion = [turn, 100]
        start = log.num_routed("r", prompt) if asks_for_new else 0
        routed = _call(prompt, completion, start=start).routed
        log.note("r", completion, (), None, routed, prompt_ids=prompt)
        prompt = [*prompt, *completion, 200]
    taken = log.take("r").calls
    kept = [call.routed for call in taken if call.routed is not None]
    assert len(kept) == calls and sum(len(each.experts) for each in kept) == kept[-1].end == len(prompt) - 2
    assert all(each.experts.base is None or each.experts.base.nbytes == each.experts.nbytes for each in kept[1:])
    whole = kept[-1].since(0)
    assert whole is not None and whole[:, 0, 0].tolist() == list(range(len(prompt) - 2))


def test_what_a_sample_lacks_comes_from_the_calls_before() -> None:
    """The turn that recorded a sample's first tokens may not be part of the sample."""
    log, longer = SpanLog(), [1, 2, 3, 4, 9]
    log.note("r", [3, 4], (), None, _call([1, 2], [3, 4]).routed, prompt_ids=[1, 2])
    log.note("r", [7], (), None, _call(longer, [7], shift=50).routed, prompt_ids=longer)
    found = log.take("r").find([7], longer)
    [sample] = merge_turns([_turn(longer, [7], replace(found, spans=_call([1], [7]).spans))], requires_spans=True)
    assert sample.routed_experts is not None
    assert sample.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 53, 54]


def _node(token_ids: list[int], num_sampled: int) -> Any:
    mask = [False] * (len(token_ids) - num_sampled) + [True] * num_sampled
    message = SimpleNamespace(role="assistant" if num_sampled else "user")
    logprobs = [-0.5] * num_sampled
    return SimpleNamespace(token_ids=token_ids, mask=mask, logprobs=logprobs, sampled=num_sampled > 0, message=message)


def test_branches_have_the_experts_of_their_own_calls() -> None:
    root, reply = _node([1, 2], 0), _node([8, 3, 4], 2)
    left, right = _node([9, 5], 1), _node([6, 7], 1)
    branches = [SimpleNamespace(nodes=[root, reply, left]), SimpleNamespace(nodes=[root, reply, right])]
    prompt, left_prompt, right_prompt = [1, 2, 8], [1, 2, 8, 3, 4, 9], [1, 2, 8, 3, 4, 6]
    calls = [_call(right_prompt, [7], shift=100), _call(left_prompt, [5], start=4, shift=50), _call(prompt, [3, 4])]
    first, second = branch_samples(branches, Spans(calls), requires_spans=True)
    assert first.routed_experts is not None and second.routed_experts is not None
    assert first.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 54, 55]
    assert second.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 104, 105]


async def test_the_chat_client_notes_them_and_refuses_what_are_no_experts() -> None:
    client = client_v0.LeanClient("http://127.0.0.1:1/v1", session=None)  # type: ignore[arg-type] - nothing is sent
    choice: dict[str, Any] = {
        "message": {"content": "x"},
        "token_ids": [3, 4],
        "logprobs": {"token_logprobs": [-1.0, -1.0], "content": [{"logprob": -1.0}, {"logprob": -1.0}]},
        "routed_experts": to_answer(_rows(3)),
    }
    answer = {"choices": [choice], "prompt_token_ids": [1, 2], "_session_id": "routed", "_sent": None}
    await client.from_native_response(answer)
    [call] = SPANS.take("routed").calls
    assert call.routed is not None and np.array_equal(call.routed.experts, _rows(3))
    choice["routed_experts"] = to_answer(_rows(4))
    with pytest.raises(vf.InvalidModelResponseError, match="are not all but the last of 4 tokens"):
        await client.from_native_response(answer)
    choice["routed_experts"] = to_answer(np.full((3, 2, 2), 7, np.uint8))
    with pytest.raises(vf.InvalidModelResponseError, match="layer 0 has an expert twice"):
        await client.from_native_response(answer)


@pytest.mark.parametrize("start", [0, 2])
async def test_the_renderers_client_keeps_them_and_hands_on_the_rest(start: int) -> None:
    rows = _rows(4 - start, start=start)
    entry = [{"token": f"token_id:{token}", "logprob": -1.0} for token in (7, 8)]
    choice = {"index": 0, "token_ids": [7, 8], "logprobs": {"content": entry}, "routed_experts": to_answer(rows)}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"request_id": "r", "choices": [choice]})

    app = web.Application()
    app.router.add_post("/inference/v1/generate", answer)
    async with TestServer(app) as server:
        client = renderer.GenerateClient(str(server.make_url("/v1")))
        sampling = {"routed_experts_prompt_start": start} if start else {}
        body = {"token_ids": [1, 2, 3], "sampling_params": sampling}
        try:
            reply = await client.post(str(server.make_url("/inference/v1/generate")), body=body)
        finally:
            await engine_access().close()
    [found] = orjson.loads(reply.content)["choices"]
    assert found == {key: value for key, value in choice.items() if key != "routed_experts"}
    call = client.routed(2)
    assert call is not None and call.start == start and np.array_equal(call.experts, rows)
    with pytest.raises(CorruptObjectError, match="are not all but the last of 6 tokens"):
        client.routed(3)


async def test_the_renderers_client_asks_for_the_experts_of_new_tokens_and_says_if_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"choices": [{"index": 0, "token_ids": [7], "routed_experts": to_answer(_rows(9))}]})

    SPANS.note("talk", [3, 4], (), None, _call([1, 2], [3, 4]).routed, prompt_ids=[1, 2])
    app = web.Application()
    app.router.add_post("/inference/v1/generate", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("/inference/v1/generate"))
        try:
            for session, prompt in [("talk", [1, 2, 3, 4, 9]), ("talk", [1, 5, 3, 4, 9]), ("", [1, 2, 3, 4, 9])]:
                await renderer.GenerateClient("http://x", session_id=session).post(url, body={"token_ids": prompt})
            monkeypatch.setattr(renderer, "MAX_ANSWER_BYTES", 100)
            with pytest.raises(renderer.GenerateResponseError, match="at most 100 are read; lower"):
                await renderer.GenerateClient("http://x").post(url, body={"token_ids": [1]})
        finally:
            await engine_access().close()
            SPANS.take("talk")
    starts = [each["sampling_params"].get("routed_experts_prompt_start") for each in asked]
    assert starts == [3, None, None, None]
