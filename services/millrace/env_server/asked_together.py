"""What rollouts ask an engine at the same time with the same words, as the first turns of a group: one request.

It costs a fraction of what one request each does, on both sides. The engine answers each choice as soon as it has ended
(`rollouts.choices_wire`), so no rollout waits for a longer one. To each of them its answer is that of a request of its
own: status, tokens, log-probs, spans and errors are those of its choice. One that is cancelled leaves the others
alone; what it asked for is computed to its end unless it was the last.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from millrace.rollouts import choices_wire

WINDOW_S = 0.005
"""How long the first rollout waits for others that ask the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a request: a status with its body, parsed or not, or the error that broke it off."""

    status: int = 0
    body: Any = b""
    retry_after: str | None = None
    streams_choices: bool = False
    """Whether the server says that it can send choices one by one."""
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class _Asking:
    """Rollouts that ask the same; the first one's session is that of the request."""

    session_id: str
    waiting: list["asyncio.Future[Reply | None]"] = field(default_factory=list)
    sending: "asyncio.Task[None] | None" = None

    @property
    def is_forsaken(self) -> bool:
        """Whether nobody waits any more."""
        return all(waiter.done() for waiter in self.waiting)


Post = Callable[[bytes, str], AbstractAsyncContextManager[aiohttp.ClientResponse]]
"""Sends a body, with the id of a session."""


class AskedTogether:
    """Of one client; `alone` sends one request and never raises for what the server or the network does."""

    def __init__(self, post: Post, alone: Callable[[bytes, str], Awaitable[Reply]]) -> None:
        self._post = post
        self._alone = alone
        self._open: dict[bytes, _Asking] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, body: Mapping[str, Any], session_id: str) -> Reply | None:
        """The reply to this request; None if the server answers no choices one by one any more: ask it alone."""
        loop = asyncio.get_running_loop()
        key = orjson.dumps(body)
        asking = self._open.get(key)
        if asking is None:
            asking = self._open[key] = _Asking(session_id)
            loop.call_later(WINDOW_S, self._send, key, asking)
        waiter: asyncio.Future[Reply | None] = loop.create_future()
        asking.waiting.append(waiter)
        if len(asking.waiting) == choices_wire.MAX_CHOICES:
            self._send(key, asking)
        try:
            return await waiter
        except asyncio.CancelledError:
            if asking.sending is not None and asking.is_forsaken:
                asking.sending.cancel()  # the engine ends what it generates when the connection closes
            raise

    def _send(self, key: bytes, asking: _Asking) -> None:
        """Send what was asked so far, once."""
        if asking.sending is not None:
            return  # there were as many as one request takes before the time was over
        del self._open[key]
        asking.waiting = [waiter for waiter in asking.waiting if not waiter.done()]
        if asking.waiting:
            asking.sending = asyncio.create_task(self._answer(key, asking), name="asked together")
            self._sending.add(asking.sending)
            asking.sending.add_done_callback(self._sending.discard)

    async def _answer(self, key: bytes, asking: _Asking) -> None:
        """Give every waiter its reply, whatever happens."""
        error: Exception | None = None
        try:
            if len(asking.waiting) == 1:
                _give(asking.waiting[0], await self._alone(key, asking.session_id))
            else:
                await self._answer_many(key, asking)
        except Exception as problem:  # noqa: BLE001 - crosses to the rollouts that wait, which raise it
            error = problem
        finally:
            lost = error or aiohttp.ClientPayloadError("the answer ended before every choice was there")
            for waiter in asking.waiting:
                _give(waiter, Reply(error=lost))

    async def _answer_many(self, key: bytes, asking: _Asking) -> None:
        waiting = asking.waiting
        more = orjson.dumps({"n": len(waiting), choices_wire.FIELD: True})
        wanted = key[:-1] + b"," + more[1:]  # the bytes that all agreed on, a JSON object that is not empty
        async with self._post(wanted, asking.session_id) as reply:
            if reply.status != 200 or reply.content_type != choices_wire.CONTENT_TYPE:
                raw, after = await reply.read(), reply.headers.get("Retry-After")
                whole = None if reply.status == 200 else Reply(status=reply.status, body=raw, retry_after=after)
                for waiter in waiting:
                    _give(waiter, whole)
                return
            rest = bytearray()
            async for part in reply.content.iter_any():
                *lines, last = part.split(b"\n")
                for line in lines:
                    _take(waiting, bytes(rest) + line)
                    rest.clear()
                rest += last


def _take(waiting: list["asyncio.Future[Reply | None]"], line: bytes) -> None:
    """Give one of them its choice. aiohttp.ClientPayloadError for what is no line of an engine."""
    try:
        choice = orjson.loads(line)
        index, status, body = choice["index"], choice["status"], choice["body"]
        waiter = waiting[index] if isinstance(index, int) and index >= 0 else None
    except (ValueError, KeyError, TypeError, IndexError):
        waiter, status, body = None, None, None
    if waiter is None or not isinstance(status, int) or not isinstance(body, dict):
        raise aiohttp.ClientPayloadError(f"no line with a choice: {line[:200].decode('utf-8', 'replace')}")
    _give(waiter, Reply(status=status, body=body, streams_choices=True))


def _give(waiter: "asyncio.Future[Reply | None]", reply: Reply | None) -> None:
    if not waiter.done():
        waiter.set_result(reply)
