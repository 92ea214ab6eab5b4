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
"""The stop condition of a conversation that has outgrown the context."""
# The texts of engines, and that of the renderer's own check before it asks one.
_TEXTS = (
    "maximum context length",
    "maximum model length",
    "exceeded model",
    "context_length_exceeded",
    "prompt_too_long",
)


def is_too_long(stop_condition: str, error: Any | None) -> bool:
    """Return whether an episode ended because its prompt does not fit the context, by its stop condition or its error.

    Release 0.3.1 stops the episode with that condition, 0.4 records an error of the provider.
    """
    if stop_condition == OUTGROWN:
        return True
    if error is None or error.type not in ("ProviderError", "OverlongPromptError"):
        return False
    return _says_too_long(error.message)


def _says_too_long(message: str) -> bool:
    """Return whether an error's text says that a prompt is too long."""
    return any(text in message.lower() for text in _TEXTS)


def stop_what_outgrows() -> None:
    """Replace a method of release 0.4 so that a conversation that outgrows the context stops and is scored.

    Release 0.3.1 does so by itself. Release 0.4 leaves it to the harness: a rollout whose harness fails is not scored.
    A second call does nothing.
    """
    from verifiers.v1 import errors
    from verifiers.v1.rollout import Rollout

    if not hasattr(errors, "OverlongPromptError") and not hasattr(Rollout.fail, "_is_millraces"):
        Rollout.fail = _stopping(Rollout.fail, errors.ProviderError)


def _stopping(stock: Callable[..., None], error_class: type[Exception]) -> Callable[..., None]:
    """Return a method `fail` that stops the rollout if its own conversation is too long, and else calls `stock`.

    `error_class` is that of the library's errors of model calls.
    """

    @functools.wraps(stock)
    def fail(self: Any, error: Exception) -> None:
        """Stop the rollout if its conversation is too long and has turns, else fail it as the library does."""
        # A judge's endpoint refuses, too; only what the interception noted is of the conversation itself.
        is_own = isinstance(error, error_class) and error is self._session.error
        if is_own and self.trace.num_turns and _says_too_long(str(error)):
            self.trace.stop(OUTGROWN)
        else:
            stock(self, error)

    fail._is_millraces = True  # type: ignore[attr-defined]
    return fail


def mcp_field(thing: Any, name: str) -> Any:
    """Return the field of an object of the MCP library by its name in that library's release 1, such as `inputSchema`.

    In release 2, which 0.4 has, the same field is read as `input_schema`.
    """
    return getattr(thing, name if hasattr(thing, name) else re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name))


# Hops to a thread that `verifiers` v1 makes in every turn to tokenize, left out while they cost more than they save.
#
# A hop and its way back cost more than a short prompt does; a long one would block every other rollout of the worker.
# So a renderer that was quick lately renders in the event loop, and one that was not does so in a thread, as the
# library has it: the longest time counts, and shrinks by a tenth with each render.
#
# Members of a group begin with the same messages: recent results are cached, and each caller gets lists of its own.

T = TypeVar("T")

QUICK_S = 0.002
"""CPU seconds; a thousand tokens take about half of it."""
_TOOK, _FORGOTTEN = "millrace_took_s", 0.9


KEPT_TOKENS = 1 << 19
"""Cached tokens per renderer, 50 MB at most; it has one tokenizer and one template: messages and tools are the key."""
_TOKENS_OF_AN_ENTRY = 64
"""The memory of a prompt's key and objects, in tokens."""


class KeptPrompts:
    """The `render` of one renderer, with a cache of recent results. Called by one thread at a time."""

    def __init__(self, render: Callable[..., Any]) -> None:
        """Make an empty cache over `render`, the renderer's own method."""
        self._render = render
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self.num_tokens = 0
        self.was_known = False
        """Whether the last prompt was in the cache."""

    def __call__(self, messages: Any, **options: Any) -> Any:
        """Return the messages as the renderer's own `render` renders them, from a cache if they were rendered lately.

        `options` are those of `render`. Lists in the result are the caller's own.
        """
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
        # A caller may change the lists of its result, and the cache keeps its own.
        made = copy.copy(found)
        vars(made).update({name: list(value) for name, value in vars(found).items() if isinstance(value, list)})
        return made


def _timed(slot: RendererSlot, render: Callable[[], T]) -> T:
    """Call `render` and return its result; note in `slot` how much CPU time it took, unless the result was cached."""
    kept: Any = slot.renderer.render
    kept.was_known = False
    # CPU time of this thread: the wait for a processor on a busy machine is not the renderer's.
    began = time.thread_time()
    try:
        return render()
    finally:
        if not kept.was_known:  # which says nothing of the next one
            setattr(slot, _TOOK, max(time.thread_time() - began, _FORGOTTEN * getattr(slot, _TOOK, 0.0)))


def install_rendering() -> None:
    """Replace how the library runs renderers in this process: results are cached, and quick ones render in the event
    loop.

    A second call changes nothing.
    """
    # The library's own method, also where an earlier call has replaced it.
    stock: Any = getattr(RendererSlot.run, "__wrapped__", RendererSlot.run)

    @functools.wraps(stock)
    async def run(self: RendererSlot, fn: Callable[[], T]) -> T:
        """Run `fn`, which renders, in the event loop if the renderer was quick lately and is free, else as the
        library does.
        """
        renderer: Any = self.renderer
        if not isinstance(renderer.render, KeptPrompts):
            renderer.render = KeptPrompts(renderer.render)
        # Not waited for: where a thread renders with it, the event loop would stand still for as long.
        if getattr(self, _TOOK, 0.0) <= QUICK_S and self.lock.acquire(blocking=False):
            try:
                return _timed(self, fn)
            finally:
                self.lock.release()
        return await stock(self, lambda: _timed(self, fn))

    RendererSlot.run = run


# Answers of endpoints that are not ours, corrected before the library's relaying client reads them.
#
# Some have the arguments of a tool call as an object (or null), where OpenAI's APIs have a text of JSON. The library
# treats such an answer as broken, and its rollout ends. The arguments are made texts here, in whole answers and in
# events of a stream, so that harness and trace get what the API promises.

_DATA = re.compile(rb"(?m)^data:[ \t]*(\{.*\})[ \t]*\r?$")
"""The line of an event that has an object."""


def install_relaying() -> None:
    """Wrap the library's relaying client so that tool arguments in every answer are texts. A second call does
    nothing.
    """
    if getattr(EvalClient.relay, "_is_millraces", False):
        return
    for kind in {type(dialect) for dialect in DIALECTS}:
        _take_objects(kind)
    stock = EvalClient.relay

    async def relay(self: EvalClient, *args: Any, **kwargs: Any) -> Any:
        """Return what the library's client relays, with tool arguments of streamed events made texts."""
        reply = await stock(self, *args, **kwargs)
        reply.chunks = _events(reply.chunks)
        return reply

    relay._is_millraces = True  # type: ignore[attr-defined]
    EvalClient.relay = relay


def _take_objects(kind: Any) -> None:
    """Wrap the `validate_response` of an API's class so that tool arguments are made texts first."""
    stock = kind.validate_response

    def validate_response(self: Any, raw: Any) -> Any:
        """Make tool arguments texts, then validate the answer as the library does."""
        make_texts(raw)
        return stock(self, raw)

    kind.validate_response = validate_response


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks of a stream of events with tool arguments made texts."""
    async for chunk in chunks:
        yield _DATA.sub(_data, chunk) if b'"arguments"' in chunk else chunk


def _data(line: re.Match[bytes]) -> bytes:
    """Return the matched `data:` line of an event with tool arguments made texts; unchanged if there are none."""
    try:
        value = decode_object(line[1], what="an event of an endpoint's stream", reason="ENGINE_ANSWER_INVALID")
    except CorruptObjectError:
        return line[0]  # the library says what is wrong with it
    return b"data: " + json.dumps(value).encode() if make_texts(value) else line[0]


def make_texts(answer: Any) -> bool:
    """Replace tool arguments that are no text by their JSON, in place, in an answer or in an event of a stream.

    Returns whether there were any.
    """
    found = [call for call in _calls(answer) if not isinstance(call.get("arguments", ""), str)]
    for call in found:
        call["arguments"] = arguments_text(call["arguments"])
    return bool(found)


def _calls(answer: Any) -> Iterator[dict[str, Any]]:
    """Yield the tables of called functions in an answer or event of OpenAI's chats or of its responses."""
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
    """Return the dictionary's value under `name`; None if it has none, or `value` is no dictionary."""
    return value.get(name) if isinstance(value, dict) else None


def _tables(value: Any, name: str) -> Iterator[dict[str, Any]]:
    """Return an iterator of the dictionaries in the list `value[name]`; it is empty if there is no such list."""
    listed = _field(value, name)
    return (each for each in (listed if isinstance(listed, list) else ()) if isinstance(each, dict))


# The interception of a v1 rollout, asked without a connection.
#
# The library serves a harness's model calls with an HTTP server, because a harness is a program. Ours is a coroutine
# in the server's own process: it calls the server's handler with a request object, and takes its answer. The handler
# does the same either way: limits and stops, the model call, the trace. Tool servers, which are programs, use HTTP.

_PATH = "/v1/chat/completions"
_CHAT = next(dialect for dialect in DIALECTS if isinstance(dialect, ChatDialect))

GATES_CALLS = hasattr(RolloutSession, "decide_tool")
"""Whether the library lets an environment deny a tool call before it is made."""

servers: dict[str, InterceptionServer] = {}
"""The server of each rollout, by the secret that its harness gets."""


class StoppedError(Exception):
    """The environment ended the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswer:
    """The handler's answer to a model call."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """Return the body as text, for messages."""
        return self.body.decode("utf-8", "replace")


class InProcessRequest(dict[Any, Any]):
    """The parts of an aiohttp request that the handler uses; it also stores items in it, as in a mapping."""

    def __init__(self, secret: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """Make a request of the rollout with this secret, with the chat `body`; `headers` are further ones of an
        agent's own request.
        """
        super().__init__()
        self.path = _PATH
        own = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self.headers = CIMultiDict({**headers, **own})
        self._read_bytes: bytes | None = json.dumps(body).encode()  # the handler forgets it once it has read it

    async def read(self) -> bytes:
        """Return the body; b"" once the handler has set it to None."""
        return self._read_bytes or b""


def install_interception() -> None:
    """Wrap the library's server so that `servers` has the server of each rollout of this process. Idempotent."""
    if getattr(InterceptionServer.register, "_is_millraces", False):
        return
    stock_register, stock_unregister = InterceptionServer.register, InterceptionServer.unregister

    def register(self: InterceptionServer, session: Any) -> tuple[str, str]:
        """Register a rollout's session as the library does, and note the server under the session's first secret."""
        secrets = stock_register(self, session)
        servers[secrets[0]] = self
        return secrets

    def unregister(self: InterceptionServer, model_secret: str, state_secret: str) -> None:
        """Remove a rollout's session as the library does, and the note of its server."""
        servers.pop(model_secret, None)
        stock_unregister(self, model_secret, state_secret)

    register._is_millraces = True  # type: ignore[attr-defined]
    InterceptionServer.register, InterceptionServer.unregister = register, unregister


async def verdict(secret: str, call: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask the environment whether the tool call `call` may be made; return None if it may, else the message in its
    result's place.

    `secret` names the rollout. Only release 0.4 asks hooks of the environment before a call; with others it always may.
    Raises StoppedError if the hooks end the rollout.
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
    """Make a model call for the rollout with this secret, with the chat request `body`, and return the answer.

    The status is 499 if the rollout ends first, 500 for an unexpected error. `headers` are of the agent's own request,
    if there is one.
    """
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
