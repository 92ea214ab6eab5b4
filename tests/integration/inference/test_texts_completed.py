"""v0 environments that have a text completed: our client beside the library's own one, on the embedded engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import ModuleType
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
import verifiers as vf
from datasets import Dataset

from millrace.env_server.adapters.client_v0 import LeanCompletionsClient
from millrace.env_server.adapters.outcome import Outcome
from millrace.env_server.adapters.v0 import V0Adapter, sampling_args
from millrace.env_server.engine_access import make_session
from millrace.env_server.library.v0 import Client, ClientConfig, OpenAICompletionsClient
from millrace.errors import InvalidSpecError
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts import parameters
from millrace.rollouts.types import PolicySpan, RolloutStatus

pytestmark = pytest.mark.filterwarnings("ignore:message_type is deprecated")

CONTEXT = 256
TEXTS = ["Once upon a time", "Zwölf Boxkämpfer jagen Viktor", "x" * 200, "y" * 300]
SHORT, LONG, OVERLONG = 0, 2, 3
PARTS: list[Any] = [
    {"role": "system", "content": [{"type": "text", "text": "Go on."}]},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
]
EVERY = list(range(272))
STATE = ["trajectory", "error"]


class TwoTurns(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        return "and then"


def make_env(prompts: Sequence[Any] = TEXTS, *, kind: type[vf.Environment] = vf.SingleTurnEnv, **more: Any) -> Any:
    def length(completion: Any, **_: Any) -> float:
        return float(len(completion[-1]["content"])) if completion else 0.0

    tasks = Dataset.from_list([{"prompt": prompt, "answer": ""} for prompt in prompts])
    options = {"message_type": "completion", "dataset": tasks, "eval_dataset": tasks, "rubric": vf.Rubric([length])}
    return kind(**options | more)


def load(env: vf.Environment, **args: Any) -> V0Adapter:
    module = ModuleType("completing")
    module.load_environment = lambda: env  # type: ignore[attr-defined]
    return V0Adapter.load(EnvSpec(id="completing"), module, args)


def request(url: str, task: int = SHORT, **changes: Any) -> PlayGroupRequest:
    fields: dict[str, Any] = {
        "run_uid": "u",
        "purpose": rollout_pb2.PURPOSE_TRAIN,
        "ordinal": 0,
        "members": [0],
        "group_size": 1,
        "env": EnvSpec(id="completing"),
        "base_url": f"{url}/v1",
        "task_index": task,
        "model": "policy",
        "sampling": Sampling(temperature=1.0, max_tokens=24),
    }
    return PlayGroupRequest(**fields | changes)


@pytest.fixture
async def stock(served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """Yield the library's own client, without its pauses before it asks again."""
    monkeypatch.setenv("MILLRACE_ENGINE_API_KEY", "EMPTY")
    config = ClientConfig(api_base_url=f"{served.base_url}/v1", api_key_var="MILLRACE_ENGINE_API_KEY", max_retries=0)
    client = OpenAICompletionsClient(config)
    yield client
    await client.close()


class Both:
    """One environment, played with each client: the library's is asked for the tokens that ours always asks for."""

    def __init__(self, env: Any, stock: Client, ours: Client, adapter: V0Adapter) -> None:
        self.adapter, self._env, self._stock, self._ours = adapter, env, stock, ours

    async def play(self, task: int, sampling: Sampling, *, model: str = "policy") -> list[dict[str, Any]]:
        """Return the outputs of the library's rollout loop: with its client, then with ours."""
        args = sampling_args(sampling)
        with_tokens = {**args, "logprobs": 1, "extra_body": {**args["extra_body"], "return_token_ids": True}}
        row: Any = self.adapter.train.row(task)
        outputs = []
        for client, asked in ((self._stock, with_tokens), (self._ours, args)):
            played = await self._env.run_rollout(row, client, model, asked, max_retries=0, state_columns=STATE)
            outputs.append(dict(played))
        return outputs


@pytest.fixture
async def both(served, stock: Client) -> AsyncIterator[Any]:
    opened: list[V0Adapter] = []
    async with make_session() as session:

        async def open_both(env: vf.Environment) -> Both:
            adapter = load(env)
            opened.append(adapter)
            await adapter.start()
            return Both(env, stock, LeanCompletionsClient(f"{served.base_url}/v1", session), adapter)

        yield open_both
    for adapter in opened:
        await adapter.close()


def turn(step: Any) -> tuple[Any, ...]:
    """Return all that a turn says but for its names and times."""
    response = step["response"]
    message = response.message
    tokens, said = step["tokens"], message.tokens
    assert (tokens["prompt_ids"], tokens["completion_ids"]) == (said.prompt_ids, said.completion_ids)
    return (
        [(each.role, each.content) for each in step["prompt"]],
        [(each.role, each.content) for each in step["completion"]],
        {key: value for key, value in tokens.items() if key != "routed_experts"},
        said.prompt_mask,
        said.completion_mask,
        (message.finish_reason, message.is_truncated, message.reasoning_content, message.tool_calls),
        response.usage.model_dump(),
        response.model,
    )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, max_tokens=24),
        Sampling(temperature=0.8, max_tokens=24, extra_body_json='{"seed": 7}'),
        Sampling(temperature=1.0, max_tokens=24, top_p=0.9, extra_body_json='{"seed": 3, "stop": ["e", "a"]}'),
        Sampling(temperature=1.0, max_tokens=24, extra_body_json=f'{{"seed": 3, "stop_token_ids": {EVERY[::5]}}}'),
    ],
    ids=["greedy", "seeded", "stopped by text", "stopped by tokens"],
)
async def test_a_rollout_is_the_same_as_with_the_librarys_client(both, sampling: Sampling) -> None:
    pair = await both(make_env())
    ends = set()
    for task in (SHORT, 1, LONG):
        theirs, ours = await pair.play(task, sampling)
        assert [turn(step) for step in ours["trajectory"]] == [turn(step) for step in theirs["trajectory"]]
        for key in ("reward", "completion", "prompt", "stop_condition", "is_truncated", "error", "token_usage"):
            assert ours.get(key) == theirs.get(key), key
        assert ours["error"] is None and ours["trajectory"][0]["tokens"]["completion_ids"]
        ends.add(ours["trajectory"][0]["response"].message.finish_reason)
    assert ends <= {"stop", "length"} and ("stop" in ends or "stop" not in sampling.extra_body_json)


async def test_messages_become_the_same_text(both) -> None:
    pair = await both(make_env([PARTS]))
    theirs, ours = await pair.play(0, Sampling(temperature=0.0, max_tokens=8))
    assert turn(ours["trajectory"][0]) == turn(theirs["trajectory"][0])
    assert len(ours["trajectory"][0]["tokens"]["prompt_ids"]) == len("Go on.\n\none two"), "no token of a template"


async def test_turns_are_the_same_as_with_the_librarys_client(both) -> None:
    pair = await both(make_env(kind=TwoTurns, max_turns=2))
    theirs, ours = await pair.play(SHORT, Sampling(temperature=0.7, max_tokens=8, extra_body_json='{"seed": 1}'))
    assert len(ours["trajectory"]) == 2
    assert [turn(step) for step in ours["trajectory"]] == [turn(step) for step in theirs["trajectory"]]


async def test_a_prompt_that_does_not_fit_ends_the_rollout_in_the_same_way(served, both) -> None:
    pair = await both(make_env())
    theirs, ours = await pair.play(OVERLONG, Sampling(temperature=0.0, max_tokens=8))
    for key in ("stop_condition", "is_truncated", "trajectory", "reward"):
        assert ours[key] == theirs[key], key
    assert (ours["stop_condition"], type(ours["error"])) == ("prompt_too_long", type(theirs["error"]))
    [outcome] = await pair.adapter.play(request(served.base_url, OVERLONG), tokenizer_dir="")
    assert (outcome.status, outcome.error_type) == (RolloutStatus.PROMPT_TOO_LONG, "PromptTooLong")


@pytest.mark.parametrize(
    ("sampling", "model", "status"),
    [
        (Sampling(temperature=0.0, max_tokens=8, extra_body_json='{"min_tokens": -1}'), "policy", 400),
        (Sampling(temperature=0.0, max_tokens=8), "another", 404),
    ],
)
async def test_what_the_engine_refuses_is_the_same_error(both, sampling: Sampling, model: str, status: int) -> None:
    pair = await both(make_env())
    theirs, ours = await pair.play(SHORT, sampling, model=model)
    assert isinstance(theirs["error"], vf.ModelError) and type(ours["error"]) is type(theirs["error"])
    assert theirs["error"].__cause__.status_code == ours["error"].status_code == status
    assert (ours["stop_condition"], ours["trajectory"]) == (theirs["stop_condition"], [])


async def test_an_engine_that_serves_nothing_is_lost_to_ours(served, both) -> None:
    """The library calls it a model error, which would count against the task."""
    pair = await both(make_env())
    served.api.is_draining = True
    theirs, ours = await pair.play(SHORT, Sampling(temperature=0.0, max_tokens=8))
    assert theirs["error"].__cause__.status_code == 503 and "answered 503" in str(ours["error"])
    [outcome] = await pair.adapter.play(request(served.base_url), tokenizer_dir="")
    assert (outcome.status, outcome.error_type) == (RolloutStatus.ENGINE_LOST, "EngineLostError")


async def test_a_completion_that_only_ends_is_trained_on(both, served) -> None:
    """The library's client refuses it, so that a policy which learns to end at once would never hear of its reward."""
    pair = await both(make_env())
    ending = Sampling(temperature=0.0, max_tokens=8, extra_body_json=json.dumps({"stop_token_ids": EVERY}))
    theirs, ours = await pair.play(SHORT, ending)
    assert isinstance(theirs["error"], vf.EmptyModelResponseError) and ours["error"] is None
    [step] = ours["trajectory"]
    assert len(step["tokens"]["completion_ids"]) == 1 and ours["completion"][0]["content"] == ""


@pytest.fixture
async def group(served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Yield plays members of a group at once; with what was sent to the engine."""
    adapter = load(make_env())
    await adapter.start()
    sent: list[dict[str, Any]] = []
    post = aiohttp.ClientSession.post

    def noted(self: aiohttp.ClientSession, url: Any, *, data: bytes, **kwargs: Any) -> Any:
        sent.append({"url": str(url), **orjson.loads(data)})
        return post(self, url, data=data, **kwargs)

    monkeypatch.setattr(aiohttp.ClientSession, "post", noted)

    async def play(size: int, **changes: Any) -> tuple[list[Outcome], list[dict[str, Any]]]:
        asked = [request(served.base_url, members=[member], group_size=size, **changes) for member in range(size)]
        sent.clear()
        played = await asyncio.gather(*(adapter.play(each, tokenizer_dir="") for each in asked))
        return [outcome for outcomes in played for outcome in outcomes], list(sent)

    yield play
    await adapter.close()


async def test_a_group_asks_once_and_each_member_has_its_own_exact_tokens(served, group, reference) -> None:
    await group(1)  # hears what the engine can do
    outcomes, [body] = await group(8)
    assert body["url"].endswith("/v1/completions") and body["prompt"] == TEXTS[SHORT]
    assert body["n"] == 8 and body[parameters.FIELD] is True
    prompt = list(TEXTS[SHORT].encode())
    sampled = set()
    for outcome in outcomes:
        assert outcome.status is RolloutStatus.OK
        [sample] = outcome.samples
        count, tokens = len(prompt), sample.token_ids.tolist()
        decoded = served.slot.current.tokenizer.decode(tokens[:count])
        assert decoded == TEXTS[SHORT]
        expected = reference(served.model, tokens[:count], tokens[count:], 1.0)
        np.testing.assert_allclose(sample.inference_logprobs[count:], expected, atol=1e-5)
        assert sample.policy_spans == (PolicySpan(lineage=0, version=0, start=count, end=len(tokens)),)
        assert outcome.messages[0]["content"] == TEXTS[SHORT]
        assert outcome.reward == len(outcome.messages[-1]["content"])
        sampled.add(tuple(tokens))
    assert len(sampled) > 1


async def test_members_have_what_one_who_asks_alone_has(group) -> None:
    """The same tokens and log-probs, whether the engine was asked by one or by all."""
    greedy = Sampling(temperature=0.0, max_tokens=24)
    [alone], [single] = await group(1, sampling=greedy)
    members, [shared] = await group(4, sampling=greedy)
    assert "n" not in single and shared["n"] == 4
    [one] = alone.samples
    for member in members:
        [same] = member.samples
        assert same.token_ids.tolist() == one.token_ids.tolist() and member.messages == alone.messages
        np.testing.assert_allclose(same.inference_logprobs, one.inference_logprobs, atol=1e-5)
        assert (same.policy_spans, member.is_truncated, member.reward) == (
            one.policy_spans,
            alone.is_truncated,
            alone.reward,
        )


async def test_without_a_limit_it_goes_on_as_far_as_the_context(group) -> None:
    [outcome], _ = await group(1, sampling=Sampling(temperature=1.0, extra_body_json='{"ignore_eos": true}'))
    [sample] = outcome.samples
    assert sample.num_tokens == CONTEXT and outcome.is_truncated


@pytest.mark.parametrize(
    ("env", "args", "text"),
    [
        (lambda: make_env(tool_defs=[vf.Tool(name="t", description="", parameters={})]), {}, "has no tools"),
        (lambda: make_env(), {"renderer": "qwen3"}, "only chats are rendered"),
        (lambda: vf.EnvGroup([make_env(), make_env(message_type="chat")]), {}, "make two groups"),
        (lambda: vf.EnvGroup([vf.EnvGroup([make_env()])]), {"renderer": "qwen3"}, "only chats are rendered"),
    ],
    ids=["tools", "a renderer", "a mixed group", "a renderer for groups of them"],
)
async def test_what_no_text_can_have_is_refused_when_it_is_loaded(env, args: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSpecError, match=text):
        load(env(), **args)


async def test_an_endpoint_of_others_is_asked_to_chat(group) -> None:
    [outcome], [body] = await group(1, is_external=True, purpose=rollout_pb2.PURPOSE_EVAL, eval_id="e")
    assert body["url"].endswith("/v1/chat/completions") and outcome.status is RolloutStatus.OK
    assert [message["content"] for message in body["messages"]] == [TEXTS[SHORT]]
