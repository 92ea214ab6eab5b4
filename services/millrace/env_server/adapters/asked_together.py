"""Equal requests that rollouts make at the same time, such as the first turns of a group, become one request with
several choices. A request that no other equals is sent in the same way, with one choice: its answer has log-probs as
a column, without a name for each token.

One request costs a fraction of what many cost, on both sides. The engine answers each choice as soon as it has
ended (`rollouts.choices_wire`), so no rollout waits for a longer one. Each rollout gets the status, tokens,
log-probs, spans and errors of its own choice, as from a request of its own. A cancelled rollout does not disturb the
others; its choice is computed to its end, unless no other rollout waits for the request.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from millrace.rollouts import parameters

WINDOW_S = 0.005
"""How long the first rollout waits for others with the same request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The result of a request: a status with its body, parsed or not, or the error that broke it off."""

    status: int = 0
    body: Any = b""
    retry_after: str | None = None
    streams_choices: bool = False
    """Whether it came as a line of a stream of choices."""
    error: Exception | None = None


@dataclass(eq=False, slots=True)
class _Asking:
    """Rollouts with the same request; the request is sent with the session id of the first one."""

    session_id: str
    waiting: list["asyncio.Future[Reply | None]"] = field(default_factory=list)
    sending: "asyncio.Task[None] | None" = None

    @property
    def is_abandoned(self) -> bool:
        """Return whether no rollout waits for a reply any more."""
        return all(waiter.done() for waiter in self.waiting)


Post = Callable[[bytes, str], AbstractAsyncContextManager[aiohttp.ClientResponse]]
"""Sends a body, with the id of a session."""


class AskedTogether:
    """Sends equal requests of one client as one with several choices."""

    def __init__(self, post: Post) -> None:
        """Take `post`, which opens the request of a body with a session id."""
        self._post = post
        self._open: dict[bytes, _Asking] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, body: Mapping[str, Any], session_id: str) -> Reply | None:
        """Send the request `body`, together with equal ones that come within `WINDOW_S`, and return its own reply.

        A joined request is sent with the first one's `session_id`. Returns None if the server does not split choices:
        the caller has to send the request alone. Network errors are in the reply. If all its callers are cancelled, so
        is a request.
        """
        loop = asyncio.get_running_loop()
        key = orjson.dumps(body)
        asking = self._open.get(key)
        if asking is None:
            asking = self._open[key] = _Asking(session_id)
            # The first of equal requests waits for the others; they join its entry in `_open` meanwhile.
            loop.call_later(WINDOW_S, self._send, key, asking)
        waiter: asyncio.Future[Reply | None] = loop.create_future()
        asking.waiting.append(waiter)
        if len(asking.waiting) == parameters.MAX_CHOICES:
            self._send(key, asking)
        try:
            return await waiter
        except asyncio.CancelledError:
            # Before the request is sent there is nothing to end: `_send` leaves cancelled callers out.
            if asking.sending is not None and asking.is_abandoned:
                asking.sending.cancel()  # the engine ends what it generates when the connection closes
            raise

    def _send(self, key: bytes, asking: _Asking) -> None:
        """Start the request for those callers of `asking` that are not cancelled, once; `key` is its JSON body."""
        if asking.sending is not None:
            return  # there were as many as one request takes before the time was over
        del self._open[key]
        asking.waiting = [waiter for waiter in asking.waiting if not waiter.done()]
        if asking.waiting:
            asking.sending = asyncio.create_task(self._answer(key, asking), name="asked together")
            self._sending.add(asking.sending)
            asking.sending.add_done_callback(self._sending.discard)

    async def _answer(self, key: bytes, asking: _Asking) -> None:
        """Make the request with the body `key`; each waiter of `asking` gets its reply, else the request's error."""
        error: Exception | None = None
        try:
            await self._answer_choices(key, asking)
        except Exception as problem:  # noqa: BLE001 - crosses to the rollouts that wait, which raise it
            error = problem
        # Also on cancellation, which is no Exception: no rollout may wait for ever.
        finally:
            lost = error or aiohttp.ClientPayloadError("the answer ended before every choice was there")
            for waiter in asking.waiting:
                _give(waiter, Reply(error=lost))

    async def _answer_choices(self, key: bytes, asking: _Asking) -> None:
        """Post the body `key` with `n` choices, one for each waiter, and give each its choice when its line arrives.

        If the answer is no stream of choices, each gets all of it, or None where it has choices for several: they
        cannot be split.
        """
        waiting = asking.waiting
        more = orjson.dumps({"n": len(waiting), parameters.FIELD: True})
        combined = key[:-1] + b"," + more[1:]  # the bytes that all agreed on, a JSON object that is not empty
        async with self._post(combined, asking.session_id) as reply:
            if reply.status != 200 or reply.content_type != parameters.CONTENT_TYPE:
                raw, after = await reply.read(), reply.headers.get("Retry-After")
                whole = Reply(status=reply.status, body=raw, retry_after=after)
                for waiter in waiting:
                    _give(waiter, whole if reply.status != 200 or len(waiting) == 1 else None)
                return
            rest = bytearray()
            async for part in reply.content.iter_any():
                # A part may end anywhere in a line, so the rest waits for the next part.
                *lines, last = part.split(b"\n")
                for line in lines:
                    _take(waiting, bytes(rest) + line)
                    rest.clear()
                rest += last


def _take(waiting: list["asyncio.Future[Reply | None]"], line: bytes) -> None:
    """Give the choice in a streamed answer's `line` to its waiter, by the index in it; raise aiohttp.ClientPayloadError
    if it is malformed.
    """
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
    """Set `reply` as the waiter's result, unless the waiter has one or was cancelled."""
    if not waiter.done():
        waiter.set_result(reply)
