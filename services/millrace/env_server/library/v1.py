"""Changes to `verifiers` v1: names that differ between releases, interception, relayed answers, and thread hops."""

import asyncio
import contextlib
import copy
import functools
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from multidict import CIMultiDict
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.clients.train import RendererSlot
from verifiers.v1.dialects import DIALECTS
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession

from millrace.decoding import decode_object
from millrace.env_server.library.endpoints import arguments_text
from millrace.errors import CorruptObjectError

OUTGROWN = "context_length"
"""The stop condition of a conversation that does not fit the context any more."""
# The texts of engines, and that of the renderer's own check before it asks one.
_TEXTS = (
    "maximum context length",
    "maximum model length",
    "exceeded model",
    "context_length_exceeded",
    "prompt_too_long",
)


def is_too_long(stop_condition: str, error: Any | None) -> bool:
    """Return whether an episode ended because the prompt does not fit: 0.3.1 stops it, 0.4 records the provider's
    error.
    """
    if stop_condition == OUTGROWN:
        return True
    if error is None or error.type not in ("ProviderError", "OverlongPromptError"):
        return False
    return _says_too_long(error.message)


def _says_too_long(message: str) -> bool:
    return any(text in message.lower() for text in _TEXTS)


def stop_what_outgrows() -> None:
    """Have a conversation stop when it outgrows the context, and be scored as it is. Idempotent.

    Release 0.3.1 does so by itself. Release 0.4 leaves it to the harness: a rollout whose harness does not end well
    fails, and is not scored.
    """
    from verifiers.v1 import errors
    from verifiers.v1.rollout import Rollout

    if not hasattr(errors, "OverlongPromptError") and not hasattr(Rollout.fail, "_is_millraces"):
        Rollout.fail = _stopping(Rollout.fail, errors.ProviderError)


def _stopping(stock: Callable[..., None], error_class: type[Exception]) -> Callable[..., None]:
    @functools.wraps(stock)
    def fail(self: Any, error: Exception) -> None:
        # A judge's endpoint refuses, too; only what the interception noted is of the conversation itself.
        is_own = isinstance(error, error_class) and error is self._session.error
        if is_own and self.trace.num_turns and _says_too_long(str(error)):
            self.trace.stop(OUTGROWN)
        else:
            stock(self, error)

    fail._is_millraces = True  # type: ignore[attr-defined]
    return fail


def mcp_field(thing: Any, name: str) -> Any:
    """Return a field of the MCP library by its name in release 1, such as `inputSchema`; release 2, of 0.4:
    `input_schema`.
    """
    return getattr(thing, name if hasattr(thing, name) else re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name))


# Hops to a thread that `verifiers` v1 makes in every turn to tokenize, left out while they cost more than they save.
#
# A hop and its way back cost more than a short prompt does; a long one would hold up every other rollout of the
# worker. So a renderer that was quick of late renders at once, and one that was not does so in a thread, as the
# library has it: the longest time counts, and is forgotten by a tenth with each render.
#
# Members of a group begin with the same messages: what was rendered of late is kept, and each gets lists of its own.

T = TypeVar("T")

QUICK_S = 0.002
"""CPU seconds; a thousand tokens take about half of it."""
_TOOK, _FORGOTTEN = "millrace_took_s", 0.9


KEPT_TOKENS = 1 << 19
"""Per renderer, at most 50 MB; a renderer has one tokenizer and one template, so messages and tools are the key."""
_TOKENS_OF_AN_ENTRY = 64
"""What key and objects of a prompt weigh, as tokens do."""


class KeptPrompts:
    """The `render` of one renderer, whose prompts of late it gives again. Called by one thread at a time."""

    def __init__(self, render: Callable[..., Any]) -> None:
        self._render = render
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self.num_tokens = 0
        self.was_known = False
        """Whether the last prompt was there already."""

    def __call__(self, messages: Any, **options: Any) -> Any:
        """Render as the renderer's own method does."""
        try:
            # In their order, which templates may write. The text itself may be longer than what is rendered of it.
            key = hashlib.sha256(orjson.dumps([messages, options])).digest()
        except TypeError:  # what is no plain data is rendered each time
            return self._render(messages, **options)
        found = self._kept.get(key)
        self.was_known = found is not None
        if found is None:
            found = self._render(messages, **options)
            if found.multi_modal_data is not None:
                return found
            self._kept[key] = found
            self.num_tokens += len(found.token_ids) + _TOKENS_OF_AN_ENTRY
            while self.num_tokens > KEPT_TOKENS:
                self.num_tokens -= len(self._kept.popitem(last=False)[1].token_ids) + _TOKENS_OF_AN_ENTRY
        else:
            self._kept.move_to_end(key)
        made = copy.copy(found)
        vars(made).update({name: list(value) for name, value in vars(found).items() if isinstance(value, list)})
        return made


def _timed(slot: RendererSlot, render: Callable[[], T]) -> T:
    kept: Any = slot.renderer.render
    kept.was_known = False
    began = time.thread_time()
    try:
        return render()
    finally:
        if not kept.was_known:  # which says nothing of the next one
            setattr(slot, _TOOK, max(time.thread_time() - began, _FORGOTTEN * getattr(slot, _TOOK, 0.0)))


def install_rendering() -> None:
    """Make the library's renderers keep rendered prompts. Idempotent."""
    stock: Any = getattr(RendererSlot.run, "__wrapped__", RendererSlot.run)

    @functools.wraps(stock)
    async def run(self: RendererSlot, fn: Callable[[], T]) -> T:
        renderer: Any = self.renderer
        if not isinstance(renderer.render, KeptPrompts):
            renderer.render = KeptPrompts(renderer.render)
        if getattr(self, _TOOK, 0.0) <= QUICK_S and self.lock.acquire(blocking=False):
            try:
                return _timed(self, fn)
            finally:
                self.lock.release()
        return await stock(self, lambda: _timed(self, fn))

    RendererSlot.run = run


# What endpoints that are not ours answer, before the library's relaying client looks at it.
#
# Some give the arguments of a tool call as an object (or leave them null), where OpenAI's APIs have a text of JSON.
# The library takes such an answer for a broken one, and its rollout ends. They are made texts here, for whole answers
# and for events of a stream alike, so that harness and trace get what the API promises.

_DATA = re.compile(rb"(?m)^data:[ \t]*(\{.*\})[ \t]*\r?$")
"""The line of an event that has an object."""


def install_relaying() -> None:
    """Make every answer's tool arguments texts. Idempotent."""
    if getattr(EvalClient.relay, "_is_millraces", False):
        return
    for kind in {type(dialect) for dialect in DIALECTS}:
        _take_objects(kind)
    stock = EvalClient.relay

    async def relay(self: EvalClient, *args: Any, **kwargs: Any) -> Any:
        reply = await stock(self, *args, **kwargs)
        reply.chunks = _events(reply.chunks)
        return reply

    relay._is_millraces = True  # type: ignore[attr-defined]
    EvalClient.relay = relay


def _take_objects(kind: Any) -> None:
    stock = kind.validate_response

    def validate_response(self: Any, raw: Any) -> Any:
        make_texts(raw)
        return stock(self, raw)

    kind.validate_response = validate_response


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield _DATA.sub(_data, chunk) if b'"arguments"' in chunk else chunk


def _data(line: re.Match[bytes]) -> bytes:
    try:
        value = decode_object(line[1], what="an event of an endpoint's stream", reason="ENGINE_ANSWER_INVALID")
    except CorruptObjectError:
        return line[0]  # the library says what is wrong with it
    return b"data: " + json.dumps(value).encode() if make_texts(value) else line[0]


def make_texts(answer: Any) -> bool:
    """Make the tool arguments of an answer, or of an event of a stream, texts in place; return whether any were not."""
    found = [call for call in _calls(answer) if not isinstance(call.get("arguments", ""), str)]
    for call in found:
        call["arguments"] = arguments_text(call["arguments"])
    return bool(found)


def _calls(answer: Any) -> Iterator[dict[str, Any]]:
    """Yield what is called, in an answer or event of OpenAI's chats or of its responses."""
    for choice in _tables(answer, "choices"):
        for name in ("message", "delta"):
            for call in _tables(choice.get(name), "tool_calls"):
                if isinstance(call.get("function"), dict):
                    yield call["function"]
    items = [*_tables(answer, "output"), *_tables(_field(answer, "response"), "output"), _field(answer, "item")]
    for item in items:
        if _field(item, "type") == "function_call":
            yield item


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _tables(value: Any, name: str) -> Iterator[dict[str, Any]]:
    listed = _field(value, name)
    return (each for each in (listed if isinstance(listed, list) else ()) if isinstance(each, dict))


# The interception of a v1 rollout, asked without a connection.
#
# The library catches a harness's model calls with an HTTP server, because a harness is a program. Ours is a coroutine
# in the server's own process: it gives the server's handler what a request would have brought, and takes its answer.
# What the handler does is the same: limits and stops, the model call, the trace. Tool servers, which are programs,
# still come over HTTP.

_PATH = "/v1/chat/completions"
_CHAT = next(dialect for dialect in DIALECTS if isinstance(dialect, ChatDialect))

GATES_CALLS = hasattr(RolloutSession, "decide_tool")
"""Whether the library lets an environment deny a tool call before it is made."""

servers: dict[str, InterceptionServer] = {}
"""That of each rollout, by the secret that its harness is given."""


class StoppedError(Exception):
    """The environment ended the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswer:
    """What the handler answered."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """Return the body, for messages."""
        return self.body.decode("utf-8", "replace")


class InProcessRequest(dict[Any, Any]):
    """As much of an aiohttp request as the handler reads, which also keeps things in it."""

    def __init__(self, secret: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        super().__init__()
        self.path = _PATH
        own = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self.headers = CIMultiDict({**headers, **own})
        self._read_bytes: bytes | None = json.dumps(body).encode()  # the handler forgets it once it has read it

    async def read(self) -> bytes:
        """Return the body."""
        return self._read_bytes or b""


def install_interception() -> None:
    """Register every interception server of this process by the secrets of its rollouts. Idempotent."""
    if getattr(InterceptionServer.register, "_is_millraces", False):
        return
    stock_register, stock_unregister = InterceptionServer.register, InterceptionServer.unregister

    def register(self: InterceptionServer, session: Any) -> tuple[str, str]:
        secrets = stock_register(self, session)
        servers[secrets[0]] = self
        return secrets

    def unregister(self: InterceptionServer, model_secret: str, state_secret: str) -> None:
        servers.pop(model_secret, None)
        stock_unregister(self, model_secret, state_secret)

    register._is_millraces = True  # type: ignore[attr-defined]
    InterceptionServer.register, InterceptionServer.unregister = register, unregister


async def verdict(secret: str, call: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what the environment says in the place of a tool's answer to a call; None if the call may be made.

    Release 0.4 asks the hooks of the environment before a call is made. Raises StoppedError if they end the rollout.
    """
    if not GATES_CALLS:
        return None
    session: Any = servers[secret].sessions[secret]
    function = call["function"]
    arguments: Any = arguments_text(function.get("arguments"))
    with contextlib.suppress(CorruptObjectError):  # the environment sees what is no object of JSON as it is
        arguments = decode_object(arguments, what="arguments of a tool call", reason="TOOL_ARGUMENTS_INVALID")
    decision = await session.decide_tool(str(call["id"]), str(function.get("name")), arguments)
    if decision["action"] == "stop":
        raise StoppedError(str(decision["reason"]))
    return decision.get("message")


async def ask(secret: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None) -> CallAnswer:
    """Make a model call for the rollout with this secret; `headers` are those of the program that asks, if one does."""
    handler: Any = servers[secret].handle_request
    # A task of its own, as in a server: the library cancels what still answers when the rollout is over.
    answering = asyncio.create_task(
        handler(InProcessRequest(secret, body, headers or {}), _CHAT), name="model call of a v1 rollout"
    )
    await asyncio.wait({answering})
    if answering.cancelled():
        return CallAnswer(status=499, body=b"the rollout ended before the model call did")
    if error := answering.exception():  # a defect of the handler: what it foresees it answers
        return CallAnswer(status=500, body=f"{type(error).__name__}: {error}".encode())
    response = answering.result()
    return CallAnswer(status=response.status, body=bytes(response.body or b""))
