"""What reward functions ask other endpoints (judges, mostly): how many calls at once, and for how long each.

A judge that hangs would hold its rollouts until their own deadline, and one that is asked 500 things at once refuses.
So every call that leaves the process while a rollout is scored, by the OpenAI SDK, httpx or aiohttp, passes a gate of
its worker. Nothing else passes it: not the engines, and not what environments do while they play.
"""

import asyncio
import contextlib
import contextvars
import functools
import importlib
import importlib.util
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import openai

_HTTPX = [importlib.import_module(name) for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]
"""The SDK's HTTP library, under the name that it has there, and the one that environments use."""

TIMEOUT_TYPE, ERROR_TYPE = "JudgeTimeout", "JudgeError"
"""Types of a rollout's error: the endpoint did not answer in time; it answered with an error."""
TYPES = (TIMEOUT_TYPE, ERROR_TYPE)
_TIMEOUT_KEY = "`judge.timeout_s` of the `[[orchestrator.env]]`"
_CONCURRENCY_KEY = "`judge.max_concurrent`"
_REMEDY = f"see that the endpoint serves what its key allows, or lower {_CONCURRENCY_KEY}"

_is_scoring: contextvars.ContextVar[bool] = contextvars.ContextVar("millrace_is_scoring", default=False)


class JudgeTimeoutError(Exception):
    """An endpoint that a reward function asked did not answer in time."""


class JudgeGate:
    """Limits the calls that reward functions of this process make to other endpoints.

    `max_concurrent` calls are made at a time, each for at most `timeout_s`. Each limit may be 0, which is none.
    """

    def __init__(self, *, max_concurrent: int, timeout_s: float) -> None:
        """Limit calls to `max_concurrent` at a time and `timeout_s` seconds each; 0 is no limit. `install` puts it
        in place.
        """
        self._max_concurrent = max_concurrent
        self._timeout_s = timeout_s or None
        # A semaphore belongs to one event loop, and environments may run several.
        self._free: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    async def call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await what `call` returns, once fewer than `max_concurrent` calls are in progress, and return the result.

        Raises JudgeTimeoutError if it takes longer than `timeout_s`, in which the wait for a free place does not count.
        Requests that the call itself makes are not limited again.
        """
        token = _is_scoring.set(False)  # the SDK's own requests and repetitions are part of this call
        try:
            async with self._room():
                return await self._in_time(call)
        finally:
            _is_scoring.reset(token)

    async def _in_time(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await what `call` returns and return the result; raise JudgeTimeoutError if it takes longer than `timeout_s`.

        A TimeoutError of the call's own passes through.
        """
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await call()
        except TimeoutError as error:
            if not limit.expired():
                # A time-out of the call's own.
                raise
            late = f"an endpoint that the reward asks did not answer within {self._timeout_s:g} s"
            message = f"{late}; raise {_TIMEOUT_KEY}, or {_REMEDY}"
            raise JudgeTimeoutError(message) from error

    def _room(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Return a context manager that is entered once fewer than `max_concurrent` calls of this event loop are in
        progress.
        """
        if not self._max_concurrent:
            return contextlib.nullcontext()
        loop = asyncio.get_running_loop()
        return self._free.setdefault(loop, asyncio.Semaphore(self._max_concurrent))

    def install(self) -> None:
        """Replace the request methods of openai, httpx and aiohttp in this process: while a rollout is scored,
        their calls pass this gate.
        """
        for owner, name in _CALLS:
            setattr(owner, name, self._gated(getattr(owner, name)))

    def _gated(self, stock: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return a function that calls `stock`, through the gate if a rollout is being scored."""

        @functools.wraps(stock)
        async def gated(*args: Any, **kwargs: Any) -> Any:
            """Call the library's method: through the gate if a rollout is being scored, else directly."""
            if not _is_scoring.get():
                return await stock(*args, **kwargs)
            return await self.call(lambda: stock(*args, **kwargs))

        return gated


_CALLS: tuple[tuple[type, str], ...] = (
    (openai.AsyncOpenAI, "request"),
    (aiohttp.ClientSession, "_request"),
    *((library.AsyncClient, "send") for library in _HTTPX),
)
"""Where the libraries' calls come together."""
_FAILURES = (openai.APIError, aiohttp.ClientError, *(library.HTTPError for library in _HTTPX))


@contextlib.contextmanager
def scoring() -> Iterator[None]:
    """Mark requests that the block makes, also those of tasks that it starts, as made for a reward: they pass the
    gate.
    """
    token = _is_scoring.set(True)
    try:
        yield
    finally:
        _is_scoring.reset(token)


def is_scoring() -> bool:
    """Return whether the current task computes a reward, outside of a call that has passed the gate."""
    return _is_scoring.get()


def is_being_cancelled(error: BaseException) -> bool:
    """Return whether `error` is the cancellation of the current task, and not of something that the task awaits."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def failure_type(error: BaseException) -> str:
    """Return which kind of failure of an endpoint is in the chain of a reward function's error: TIMEOUT_TYPE or
    ERROR_TYPE.

    "" if there is none.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, JudgeTimeoutError):
            return TIMEOUT_TYPE
        if isinstance(cause, _FAILURES):
            return ERROR_TYPE
        cause = cause.__cause__ or cause.__context__
    return ""


def with_remedy(kind: str, message: str) -> str:
    """Return the message, with the remedy appended if `kind` is ERROR_TYPE."""
    return f"{message}; {_REMEDY}" if kind == ERROR_TYPE else message
