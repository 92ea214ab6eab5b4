"""An address of an agent: its APIs, limits, tokens and deadlines, by the SDKs that agents are built on."""

import asyncio
import json

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio

from millrace.env_server.agents.server import AgentServer
from millrace.env_server.agents.sessions import AgentLimits, CallRefusedError
from millrace.env_server.isolation.inherited import AgentListen
from millrace.errors import InvalidSpecError
from millrace_testing.patience import patient

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}


class Policy:
    """Calls the tool that it is offered, and says what the tool answered."""

    def __init__(self) -> None:
        self.asked = []
        self.wait = asyncio.Event()
        self.wait.set()

    async def __call__(self, asked):
        self.asked.append(asked)
        await self.wait.wait()
        last = asked.messages[-1]
        has_call = bool(asked.tools) and last["role"] != "tool"
        message = {"content": None, "tool_calls": [CALL]} if has_call else {"content": f"heard {last['content']}"}
        finish = "tool_calls" if has_call else "stop"
        return {
            "choices": [{"message": {**message, "reasoning_content": "hm"}, "finish_reason": finish}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 3},
        }


@pytest_asyncio.fixture
async def server():
    opened = AgentServer(AgentListen())
    yield opened
    await opened.close()


@pytest.fixture
def policy():
    return Policy()


def openai_client(address, **options):
    return openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0, **options)


def anthropic_client(address):
    root = address.environ()["ANTHROPIC_BASE_URL"]
    return anthropic.AsyncAnthropic(base_url=root, api_key=address.api_key, max_retries=0)


async def test_two_turns_with_a_tool_in_chats(server, policy):
    async with server.opened(policy, model="policy") as (address, session), openai_client(address) as client:
        first = await client.chat.completions.create(**CHAT, tools=[TOOL])
        [call] = first.choices[0].message.tool_calls
        assert (first.choices[0].finish_reason, json.loads(call.function.arguments)) == ("tool_calls", {"at": "x"})
        said = first.choices[0].message.model_dump(exclude_none=True)
        answer = {"role": "tool", "tool_call_id": call.id, "content": "a thing"}
        second = await client.chat.completions.create(
            model="policy", messages=[*CHAT["messages"], said, answer], tools=[TOOL], stream=True
        )
        chunks = [chunk async for chunk in second]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "heard a thing"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert [made.reply["content"] for made in session.made] == [None, "heard a thing"]
    assert policy.asked[1].messages[1]["tool_calls"] == [CALL]


@pytest.mark.parametrize("streams", [False, True])
async def test_two_turns_with_a_tool_in_responses(server, policy, streams):
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": True}

    async def ask(client, given):
        if not streams:
            return await client.responses.create(model="policy", input=given, tools=[tool], instructions="be brief")
        asked = {"model": "policy", "input": given, "tools": [tool], "instructions": "be brief"}
        async with client.responses.stream(**asked) as events:
            async for _ in events:
                pass
            return await events.get_final_response()

    async with server.opened(policy, model="policy") as (address, _), openai_client(address) as client:
        first = await ask(client, "hello")
        call = next(item for item in first.output if item.type == "function_call")
        assert json.loads(call.arguments) == {"at": "x"}
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "a thing"}
        given = [{"role": "user", "content": "hello"}, *(item.model_dump() for item in first.output), output]
        second = await ask(client, given)
    assert second.output_text == "heard a thing"
    assert second.usage.total_tokens == 8
    roles = [message["role"] for message in policy.asked[1].messages]
    assert roles == ["system", "user", "assistant", "tool"]
    assert policy.asked[1].messages[2] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize("streams", [False, True])
async def test_two_turns_with_a_tool_in_messages(server, policy, streams):
    tool = {"name": "look", "input_schema": {"type": "object", "properties": {}}}

    async def ask(client, messages):
        asked = {"model": "policy", "max_tokens": 50, "system": "be brief", "tools": [tool], "messages": messages}
        if not streams:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as events:
            return await events.get_final_message()

    async with server.opened(policy, model="policy") as (address, _), anthropic_client(address) as client:
        question = {"role": "user", "content": "hello"}
        first = await ask(client, [question])
        assert first.stop_reason == "tool_use"
        call = next(block for block in first.content if block.type == "tool_use")
        assert call.input == {"at": "x"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "a thing"}
        said = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
        second = await ask(client, [question, said, {"role": "user", "content": [result]}])
    assert [block.text for block in second.content if block.type == "text"] == ["heard a thing"]
    assert [message["role"] for message in policy.asked[1].messages] == ["system", "user", "assistant", "tool"]
    assert policy.asked[0].max_tokens == 50


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}, "tools": [TOOL]}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"functions": [{"name": "look"}]}, "functions"),
        ({"seed": 3}, "seed"),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"stream_options": {"continuous_usage_stats": True}, "stream": True}, "stream_options.continuous_usage_stats"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
        ({"extra_body": {"documents": [{}]}}, "documents"),
        ({"n": 17}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "cache": 1}]}, "messages[0].cache"),
        ({"messages": [{"role": "assistant", "content": None, "refusal": "no"}]}, "messages[0].refusal"),
        ({"messages": [{"role": "assistant", "thinking_blocks": [{"thinking": "x"}]}]}, "messages[0].thinking_blocks"),
        ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "examples": [1]}}]}, "tools[0].function.examples"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(server, policy, asked, param):
    async with server.opened(policy, model="policy") as (address, session), openai_client(address) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{**CHAT, **asked})
    assert caught.value.param == param
    assert session.made == [] == policy.asked


@pytest.mark.parametrize(
    ("route", "asked", "param"),
    [
        ("responses", {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        ("responses", {"input": "x", "reasoning": {"effort": "high"}}, "reasoning"),
        ("responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "text"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("responses", {"input": "x", "nonsense": 1}, "nonsense"),
        ("messages", {"messages": [], "max_tokens": 5}, "messages"),
        ("messages", {"messages": CHAT["messages"], "thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ("messages", {"messages": CHAT["messages"], "tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        (
            "messages",
            {"messages": CHAT["messages"], "tools": [{"type": "bash_20250124", "name": "b"}]},
            "tools[0].type",
        ),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ("responses", {"input": [{"role": {}, "content": "x"}]}, "input[0].role"),
        (
            "responses",
            {"input": "x", "tools": [{"type": "function", "name": "f", "defer_loading": True}]},
            "tools[0].defer_loading",
        ),
        (
            "messages",
            {"messages": CHAT["messages"], "tools": [{"name": "f", "input_examples": [{}]}]},
            "tools[0].input_examples",
        ),
        ("messages", {"messages": CHAT["messages"], "tools": [{"name": "f", "input_schema": {"a": 2**64}}]}, "tools"),
    ],
)
async def test_the_other_apis_refuse_by_name(server, policy, route, asked, param):
    async with server.opened(policy, model="policy") as (address, _), aiohttp.ClientSession() as http:
        headers = {"x-api-key": address.api_key}
        async with http.post(f"{address.base_url}/{route}", json=asked, headers=headers) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, param)


async def test_several_choices_are_several_calls(server, policy):
    async with server.opened(policy, model="policy") as (address, session), openai_client(address) as client:
        answer = await client.chat.completions.create(**CHAT, n=3)
    assert [choice.message.content for choice in answer.choices] == ["heard hello"] * 3
    assert (answer.usage.completion_tokens, len(session.made)) == (9, 3)


async def test_what_the_run_decides_is_told(server, policy):
    asked = {"temperature": 0, "tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}
    drops = ("tool_choice", "response_format")
    async with server.opened(policy, model="policy", drops=drops) as (address, _), openai_client(address) as client:
        raw = await client.chat.completions.with_raw_response.create(**CHAT, **asked, tool_choice="required")
    assert raw.headers["X-Millrace-Not-Applied"] == "tool_choice, temperature, tools[0].function.strict"


async def test_who_speaks_reaches_the_template_and_a_mark_without_a_place_is_told(server, policy):
    async with server.opened(policy, model="policy") as (address, _), openai_client(address) as client:
        await client.chat.completions.create(model="policy", messages=[{**CHAT["messages"][0], "name": "ann"}])
    assert policy.asked[0].messages[0]["name"] == "ann"
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "no such file", "is_error": True}
    asked = {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [result]}],
        "tools": [{"name": "f", "input_schema": {}, "strict": True, "cache_control": {"type": "ephemeral"}}],
    }
    async with server.opened(policy, model="policy") as (address, _), aiohttp.ClientSession() as http:
        headers = {"x-api-key": address.api_key}
        async with http.post(f"{address.base_url}/messages", json=asked, headers=headers) as reply:
            assert reply.status == 200
            assert reply.headers["X-Millrace-Not-Applied"] == "tools[0].strict, messages[0].content[0].is_error"


async def test_limits_of_calls_tokens_and_bytes(server, policy):
    limits = AgentLimits(max_requests=2, max_body_bytes=2000)
    async with server.opened(policy, model="policy", limits=limits) as (address, _), openai_client(address) as client:
        await client.chat.completions.create(**CHAT)
        await client.chat.completions.create(**CHAT)
        with pytest.raises(openai.PermissionDeniedError, match="may make 2 model calls"):
            await client.chat.completions.create(**CHAT)
        with pytest.raises(openai.APIStatusError, match="more than 2000 bytes"):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 3000}])
    limits = AgentLimits(max_tokens=3)
    async with server.opened(policy, model="policy", limits=limits) as (address, _), openai_client(address) as client:
        await client.chat.completions.create(**CHAT)
        with pytest.raises(openai.PermissionDeniedError, match="may sample 3 tokens"):
            await client.chat.completions.create(**CHAT)


async def test_calls_beyond_the_limit_at_once_wait(server, policy):
    policy.wait.clear()
    limits = AgentLimits(max_concurrent=2)
    async with server.opened(policy, model="policy", limits=limits) as (address, _), openai_client(address) as client:
        calls = [asyncio.create_task(client.chat.completions.create(**CHAT, user=str(at))) for at in range(4)]
        while len(policy.asked) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(policy.asked) == 2
        policy.wait.set()
        assert len(await asyncio.gather(*calls)) == 4


async def test_a_token_is_that_of_one_rollout_and_dies_with_it(server, policy):
    async with server.opened(policy, model="policy") as (address, _):
        async with server.opened(policy, model="policy") as (other, _):
            assert other.api_key != address.api_key
        for key, error in (("nonsense", openai.AuthenticationError), (other.api_key, openai.APIStatusError)):
            async with openai.AsyncOpenAI(base_url=address.base_url, api_key=key, max_retries=0) as client:
                with pytest.raises(error) as caught:
                    await client.chat.completions.create(**CHAT)
        assert caught.value.status_code == 410
        assert "has ended" in str(caught.value)
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{address.base_url}/chat/completions", json=CHAT) as reply,
        ):
            assert reply.status == 401


async def test_a_call_that_runs_when_the_rollout_ends_is_answered_and_not_recorded(server, policy):
    policy.wait.clear()
    async with server.opened(policy, model="policy") as (address, session):
        client = openai_client(address)
        call = asyncio.create_task(client.chat.completions.create(**CHAT))
        while not policy.asked:
            await asyncio.sleep(0.01)
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    await client.close()
    assert caught.value.status_code == 410
    assert session.made == []


async def test_a_deadline_ends_the_address(server, policy):
    limits = AgentLimits(deadline_s=0.05)
    async with server.opened(policy, model="policy", limits=limits) as (address, session):
        await asyncio.sleep(0.1)
        async with openai_client(address) as client:
            with pytest.raises(openai.APIStatusError, match="deadline") as caught:
                await client.chat.completions.create(**CHAT)
    assert (caught.value.status_code, session.is_late) == (410, True)


async def test_a_repeated_request_gets_the_answer_of_the_first(server, policy):
    policy.wait.clear()
    async with server.opened(policy, model="policy") as (address, session):
        client = openai.AsyncOpenAI(
            base_url=address.base_url, api_key=address.api_key, max_retries=1, timeout=(timeout_s := patient(1.0))
        )
        call = asyncio.create_task(client.chat.completions.create(**CHAT))
        await asyncio.sleep(1.2 * timeout_s)
        policy.wait.set()
        assert (await call).choices[0].message.content == "heard hello"
        await client.close()
    assert len(session.made) == len(policy.asked) == 1


async def test_what_the_engine_refuses_reaches_the_agent_with_its_status(server):
    async def ask(asked):
        raise CallRefusedError(503, "the engine went away")

    async with server.opened(ask, model="policy") as (address, session), openai_client(address) as client:
        with pytest.raises(openai.InternalServerError, match="went away"):
            await client.chat.completions.create(**CHAT)
    assert session.last_refusal == "503: the engine went away"


async def test_models_and_other_paths(server, policy):
    async with server.opened(policy, model="policy") as (address, _), openai_client(address) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings is not answered here"):
            await client.embeddings.create(model="policy", input="x")


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("", "127.0.0.1", [0]),
        ("172.17.0.1", "172.17.0.1", [0]),
        ("10.0.0.1:20000-20002", "10.0.0.1", [20000, 20001, 20002]),
    ],
)
def test_where_it_listens(text, host, ports):
    listen = AgentListen.from_environ({"MILLRACE_AGENT_LISTEN": text, "MILLRACE_INSECURE": "1"})
    assert (listen.host, list(listen.ports), listen.advertised_host) == (host, ports, host)


@pytest.mark.parametrize("text", ["0.0.0.0", "127.0.0.1:x", "127.0.0.1:9-7", "127.0.0.1:70000", ":80", "172.17.0.1"])
def test_where_it_cannot_listen(text):
    with pytest.raises(InvalidSpecError, match="MILLRACE_AGENT_LISTEN"):
        AgentListen.from_environ({"MILLRACE_AGENT_LISTEN": text})
