"""The gate before vLLM's engine client: which requests begin again when a policy comes, and which answers leave."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.errors import UnavailableError
from millrace.inference.vllm.gate import GatedClient, GenerationGate, abort, unbegun
from millrace_testing.polling import until

PROMPT = {"type": "token", "prompt_token_ids": [1]}


class Client:
    """Generates what the test says, when it says so."""

    def __init__(self) -> None:
        self.salts: list[str] = []
        self.queues: list[asyncio.Queue[Any]] = []
        self.aborted: list[str] = []
        self.output_processor = SimpleNamespace(request_states={})

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.salts.append(prompt["cache_salt"])
        self.queues.append(queue := asyncio.Queue())
        state = SimpleNamespace(external_req_id=request_id, parent_req=None, is_prefilling=True)
        self.output_processor.request_states[request_id] = state
        while (output := await queue.get()) is not None:
            state.is_prefilling = False
            yield output

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.output_processor.request_states.pop(request_id)
            self.queues[-1].put_nowait(output(0, "abort"))
            self.queues[-1].put_nowait(None)


def output(token: int, reason: str | None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(index=0, token=token, finish_reason=reason)])


@pytest.fixture
def gate() -> GenerationGate:
    gate = GenerationGate()
    gate.open("v0")
    return gate


@pytest.fixture
def client() -> Client:
    return Client()


async def collect(gate: GenerationGate, client: Client, into: list[int]) -> None:
    async for found in GatedClient(client, gate).generate(PROMPT, None, "a"):
        into.append(found.outputs[0].token)  # noqa: PERF401 - seen as they come


async def begun(client: Client, number: int) -> None:
    await until(lambda: len(client.queues) >= number)


async def test_a_request_without_a_token_begins_again_with_the_new_salt(gate: GenerationGate, client: Client) -> None:
    found: list[int] = []
    task = asyncio.create_task(collect(gate, client, found))
    await begun(client, 1)
    gate.wait()
    gate.hold()
    await abort(client, gate.requeue(unbegun(client)))
    assert client.aborted == ["a"]
    for _ in range(10):
        await asyncio.sleep(0)
    assert (len(client.queues), gate.num_open) == (1, 1), "it waits for the proof, and counts as open"
    gate.open("v1")
    await begun(client, 2)
    client.queues[1].put_nowait(output(7, "stop"))
    client.queues[1].put_nowait(None)
    await task
    assert (found, client.salts, gate.num_open) == ([7], ["v0", "v1"], 0)


async def test_a_request_with_a_token_goes_on(gate: GenerationGate, client: Client) -> None:
    found: list[int] = []
    task = asyncio.create_task(collect(gate, client, found))
    await begun(client, 1)
    client.queues[0].put_nowait(output(7, None))
    await until(lambda: found)
    gate.hold()
    assert gate.requeue(unbegun(client)) == []
    client.queues[0].put_nowait(output(8, "stop"))
    client.queues[0].put_nowait(None)
    for _ in range(10):
        await asyncio.sleep(0)
    assert found == [7], "nothing leaves before the proof"
    gate.open("v1")
    await task
    assert (found, client.salts) == ([7, 8], ["v0"])


async def test_a_requeued_request_is_refused_when_the_update_fails(gate: GenerationGate, client: Client) -> None:
    task = asyncio.create_task(collect(gate, client, []))
    await begun(client, 1)
    gate.wait()
    gate.hold()
    await abort(client, gate.requeue(unbegun(client)))
    gate.refuse("the update failed")
    gate.abort_all("the update failed")
    with pytest.raises(UnavailableError, match="the update failed"):
        await task
    assert (len(client.queues), gate.num_open) == (1, 0)


async def test_choices_that_begin_on_both_sides_of_an_update_are_given_up(gate: GenerationGate, client: Client) -> None:
    found: list[int] = []
    task = asyncio.create_task(collect(gate, client, found))
    await begun(client, 1)
    client.queues[0].put_nowait(output(7, None))
    await until(lambda: found)
    sibling = SimpleNamespace(external_req_id="a", parent_req=SimpleNamespace(external_req_id="a"), is_prefilling=True)
    client.output_processor.request_states["1_a"] = sibling
    await abort(client, gate.requeue(unbegun(client)))
    gate.open("v1")
    with pytest.raises(UnavailableError, match="all of its choices"):
        await task
    assert found == [7]


async def test_an_answer_that_was_kept_back_of_a_request_that_begins_again_never_leaves(
    gate: GenerationGate, client: Client
) -> None:
    """The first choice had its first token, and waited for the proof, when its sibling made both begin again."""
    found: list[int] = []
    task = asyncio.create_task(collect(gate, client, found))
    await begun(client, 1)
    gate.wait()
    gate.hold()
    client.queues[0].put_nowait(output(7, None))
    for _ in range(10):
        await asyncio.sleep(0)
    sibling = SimpleNamespace(external_req_id="a", parent_req=SimpleNamespace(external_req_id="a"), is_prefilling=True)
    client.output_processor.request_states["1_a"] = sibling
    await abort(client, gate.requeue(unbegun(client)))
    gate.open("v1")
    await begun(client, 2)
    client.queues[1].put_nowait(output(8, "stop"))
    client.queues[1].put_nowait(None)
    await task
    assert (found, client.salts) == ([8], ["v0", "v1"])
