"""What a rollout of v1 does without connections and threads: the same answers, and no rollout that holds up others."""

import asyncio
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verifiers")

from verifiers.v1.clients.train import RendererSlot
from verifiers.v1.utils import decorators

from millrace.env_server.library import v1
from millrace.env_server.library import v1 as interception
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


@dataclass
class _Rendered:
    token_ids: list[int]
    message_indices: list[int]
    multi_modal_data: Any = None


def _render(messages: Any, **options: Any) -> _Rendered:
    text = f"{messages} {options}".encode()
    return _Rendered(token_ids=list(text), message_indices=[0] * len(text))


async def test_a_prompt_is_rendered_once_and_each_gets_lists_of_its_own() -> None:
    calls: list[Any] = []

    def render(messages: Any, **options: Any) -> _Rendered:
        calls.append((messages, options))
        return _render(messages, **options)

    kept = v1.KeptPrompts(render)
    messages = [{"role": "user", "content": "hi"}]
    first, second = (kept(messages, tools=None, add_generation_prompt=True) for _ in range(2))
    assert len(calls) == 1 and kept.was_known and first == second == _render(*calls[0][:1], **calls[0][1])
    first.token_ids.append(1)
    first.message_indices.clear()
    assert kept(messages, tools=None, add_generation_prompt=True) == second
    for other in (
        {"tools": [{"a": 1, "b": 2}], "add_generation_prompt": True},
        {"tools": [{"b": 2, "a": 1}], "add_generation_prompt": True},  # a template may write it as it is
        {"tools": None, "add_generation_prompt": False},
    ):
        assert kept(messages, **other) == _render(messages, **other) and not kept.was_known
    assert len(calls) == 4


async def test_prompts_are_kept_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v1, "KEPT_TOKENS", 450)
    kept = v1.KeptPrompts(_render)
    for text in ("a" * 100, "b" * 100, "a" * 100, "c" * 100):
        kept(text)
    assert kept.num_tokens <= 450
    kept("a" * 100)
    assert kept.was_known, "it was asked for later than the other"
    kept("b" * 100)
    assert not kept.was_known
    image = v1.KeptPrompts(lambda messages: _Rendered([1], [0], multi_modal_data=object()))
    image("x")
    image("x")
    assert not image.was_known and image.num_tokens == 0


async def test_a_prompt_that_was_kept_says_nothing_of_the_next_one() -> None:
    slot = _slot()
    here = threading.get_ident()

    def slow(messages: Any) -> _Rendered:
        ends = time.thread_time() + 2 * v1.QUICK_S
        while time.thread_time() < ends:
            pass
        return _render(messages)

    slot.renderer.render = slow  # type: ignore[method-assign]
    for _ in range(50):
        await slot.run(lambda: slot.renderer.render("long"))  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert await slot.run(threading.get_ident) != here, "the next one is long, too, as far as anybody knows"


def _slot() -> RendererSlot:
    v1.install_rendering()
    renderer: Any = SimpleNamespace(render=_render)
    return RendererSlot(renderer=renderer)


async def test_a_quick_renderer_renders_at_once_and_a_slow_one_in_a_thread() -> None:
    slot, here = _slot(), threading.get_ident()

    def slow() -> int:
        ends = time.thread_time() + 2 * v1.QUICK_S
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
