"""What a rollout of v1 does without connections and threads: the same answers, and no rollout that holds up others."""

import asyncio
import threading
import time
from typing import Any

import pytest

pytest.importorskip("verifiers")

from verifiers.v1.clients.train import RendererSlot
from verifiers.v1.utils import decorators

from millrace.env_server.library import interception, rendering
from millrace.env_server.library.lookups import discover_decorated


class _Base:
    @decorators.reward(priority=1)
    def second(self) -> float:
        return 2.0

    @decorators.reward
    def hidden(self) -> float:
        return 0.0

    @property
    def dear(self) -> float:
        raise AssertionError("a property is not evaluated")


class _Task(_Base):
    @decorators.reward(priority=2)
    def first(self) -> float:
        return 1.0

    @decorators.metric
    def length(self) -> float:
        return 3.0

    def hidden(self) -> float:  # an override without the decorator
        return 0.0


@pytest.mark.parametrize("attr", ["reward", "metric", "stop"])
def test_decorated_methods_are_those_that_the_library_finds(attr: str) -> None:
    for task in (_Task(), _Base()):
        assert discover_decorated(task, attr) == decorators.discover_decorated(task, attr)
        assert discover_decorated(task, attr) == decorators.discover_decorated(task, attr), "from memory"


def _slot() -> RendererSlot:
    rendering.install()
    renderer: Any = None  # only what is given to `run` is called
    return RendererSlot(renderer=renderer)


async def test_a_quick_renderer_renders_at_once_and_a_slow_one_in_a_thread() -> None:
    slot, here = _slot(), threading.get_ident()

    def slow() -> int:
        ends = time.thread_time() + 2 * rendering.QUICK_S
        while time.thread_time() < ends:
            pass
        return threading.get_ident()

    assert await slot.run(threading.get_ident) == here
    assert await slot.run(slow) == here, "nobody knows beforehand"
    assert await slot.run(slow) != here, "it is known now"
    assert await slot.run(threading.get_ident) != here
    assert await slot.run(threading.get_ident) != here, "the one before was quick, but another may not be"
    for _ in range(100):
        await slot.run(threading.get_ident)
    assert await slot.run(threading.get_ident) == here, "it is long ago"


async def test_a_renderer_that_a_thread_holds_is_waited_for_in_a_thread() -> None:
    slot = _slot()
    with slot.lock:
        waiting = asyncio.create_task(slot.run(threading.get_ident))
        await asyncio.sleep(0.01)
        assert not waiting.done()
    assert await waiting != threading.get_ident()


async def test_a_renderer_that_raises_is_free_again() -> None:
    slot = _slot()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await slot.run(lambda: 1 // 0)
    assert not slot.lock.locked()


class _Server:
    """An interception server whose handler does what the test wants."""

    def __init__(self, handle: Any) -> None:
        self.handle_request = handle


async def _ask(monkeypatch: pytest.MonkeyPatch, handle: Any) -> interception.CallAnswer:
    monkeypatch.setitem(interception.servers, "secret", _Server(handle))  # pyright: ignore[reportArgumentType]
    return await interception.ask("secret", {"model": "policy", "messages": []})


async def test_a_defect_of_the_handler_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def raises(request: Any, dialect: Any) -> Any:
        assert await request.read() == b'{"model": "policy", "messages": []}'
        raise KeyError("tokens")

    reply = await _ask(monkeypatch, raises)
    assert (reply.status, reply.text) == (500, "KeyError: 'tokens'")


async def test_a_handler_that_the_library_cancels_does_not_cancel_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(request: Any, dialect: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    reply = await _ask(monkeypatch, cancelled)
    assert reply.status == 499 and "ended before" in reply.text
