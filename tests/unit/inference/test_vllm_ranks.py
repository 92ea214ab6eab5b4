"""Calls of all workers of a vLLM replica, over an executor that forgets answers as vLLM's does."""

import asyncio
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.errors import InternalError, InvalidStateError, UnavailableError
from millrace.inference.vllm import ranks
from millrace.inference.vllm.ranks import AnsweringWorker, Ranks, misfits, units_of


class Worker(AnsweringWorker):
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.done: list[str] = []

    def millrace_note(self, text: str) -> str:
        self.done.append(text)
        return f"{text} by {self.rank}"

    def millrace_refuse(self, rank: int) -> None:
        if rank == self.rank:
            raise ValueError(f"rank {rank} cannot")


class Executor:
    """As vLLM's: the first error ends a call, and what the ranks behind it answered stays for the next one."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.answers: list[deque[Any]] = [deque() for _ in workers]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        for worker, queue in zip(self.workers, self.answers, strict=True):
            try:
                queue.append(getattr(worker, method)(*args))
            except ValueError as error:
                queue.append(error)
        found = []
        for queue in self.answers:
            if isinstance(answer := queue.popleft(), ValueError):
                raise answer
            found.append(answer)
        return found


class Client:
    """`cores` engine cores with two workers each; `collective_rpc` gives the first one's answers, as vLLM's does."""

    def __init__(self, cores: int = 1, nodes: int = 1) -> None:
        self.executors = [Executor([Worker(2 * core), Worker(2 * core + 1)]) for core in range(cores)]
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(nnodes=nodes, data_parallel_size=cores))
        self.engine_core = self

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        assert method == "collective_rpc"
        return [executor.collective_rpc(args[0], args[2]) for executor in self.executors]

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return (await self.call_utility_all_async("collective_rpc", method, None, args, None))[0]


@pytest.mark.parametrize("cores", [1, 2])
async def test_each_rank_is_heard(cores: int) -> None:
    caller = Ranks(Client(cores))
    assert await caller.call("millrace_note", "a") == [f"a by {rank}" for rank in range(2 * cores)]
    for failing in range(2 * cores):
        with pytest.raises(InternalError, match=rf"rank {failing} of {2 * cores}: ValueError: rank {failing} cannot"):
            await caller.call("millrace_refuse", failing)
        assert await caller.call("millrace_note", "b") == [f"b by {rank}" for rank in range(2 * cores)]


async def test_an_answer_to_another_call_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    caller = Ranks(client)
    with pytest.raises(ValueError):  # a call of vLLM's own that fails at the first rank
        client.executors[0].collective_rpc("millrace_refuse", (0,))
    asked: list[str] = []
    monkeypatch.setattr(ranks, "ask_restart", lambda reason: asked.append(reason) or True)
    client.executors[0].answers[1].clear()
    client.executors[0].answers[1].append(await caller.call("millrace_note", "old") and [1, "old by 1", ""])
    with pytest.raises(UnavailableError, match="earlier call"):
        await caller.call("millrace_note", "new")
    assert len(asked) == 1


def test_a_tensor_is_wrong_if_no_rank_has_a_place_for_it() -> None:
    assert misfits([[[], ["a", "b", "x"]], [["c is int8"], ["c", "x"]]]) == [
        "c is int8",
        "x is not a weight that the model takes",
    ]
    assert units_of([[10, 20], [30], []]) == [30, 20]


async def test_a_directory_of_one_node_is_refused_for_several() -> None:
    Ranks(Client()).require_readable("/somewhere")
    Ranks(Client(nodes=2)).require_readable(None)
    with pytest.raises(InvalidStateError, match="somewhere"):
        Ranks(Client(nodes=2)).require_readable("/somewhere")


async def test_other_nodes_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(nodes=2)
    away, there = client.executors[0].workers[1], asyncio.Event()
    orders: list[Any] = []
    for worker in client.executors[0].workers:
        worker.millrace_fetch = orders.append  # type: ignore[attr-defined]
        worker.millrace_fetched = lambda number: True  # type: ignore[attr-defined]
    away.millrace_fetched = lambda number: there.is_set()  # type: ignore[attr-defined]
    monkeypatch.setattr(ranks, "write_order", lambda *_: {"changed": None})
    manifest = SimpleNamespace(key="k", digest="d", version=3)
    staged: Any = SimpleNamespace(manifest=manifest, changes={}, base=(0, 2))
    asking = asyncio.create_task(Ranks(client).order(staged, tmp_path))
    async with asyncio.timeout(5):
        while len(orders) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert not asking.done()
        there.set()
        order = await asking
    assert order["policy"] == {"manifest_key": "k", "digest": "d", "base": [0, 2]} and orders[0] == order
