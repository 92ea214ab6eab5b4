"""How a service calls another: `open_channel`, then `call` or `stream` with a stub's method.

    async with open_channel("127.0.0.1:50051") as channel:
        stub = RunServiceStub(channel)
        run = (await call(stub.GetRun, GetRunRequest(name="runs/x"), timeout_s=10, to="the orchestrator")).run

What is raised is always a class of `millrace.errors`. A call that never reached a server, or that a server refused
with UNAVAILABLE, is tried up to five times within two seconds and its deadline; nothing else is tried again here. That
is safe because every RPC of ours is idempotent.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

import millrace
from millrace.errors import InvalidSpecError, UnavailableError, Violation
from millrace.rpc.access import ClientAccess
from millrace.rpc.interceptors import REQUEST_ID_KEY, DefaultDeadline, ShowTokenStream, ShowTokenUnary, new_request_id
from millrace.rpc.status import MAX_METADATA_BYTES, from_rpc_error
from millrace.rpc.tls import Stamp
from millrace.telemetry import waits
from millrace.telemetry.logging import bound
from millrace.telemetry.settings import parse_address

MAX_MESSAGE_BYTES = 64 << 20
"""Largest gRPC message, both directions: a page of 1000 runs with their configs fits, bulk data travels elsewhere."""
DEFAULT_TIMEOUT_S = 10.0
QUIET_S = 1.0
"""A call that lasts longer shows itself as a wait."""

_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],  # every method
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.primary_user_agent", f"millrace/{millrace.__version__}"),
    ("grpc.service_config", _SERVICE_CONFIG),
    ("grpc.enable_retries", 1),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    # A dead path is seen within 40 s, also between calls; servers allow pings every 10 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The default grows to 120 s, which is how long a restarted server would look dead.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Services talk directly; an HTTP proxy of the environment is for the internet.
    ("grpc.enable_http_proxy", 0),
]


def open_channel(
    address: str, *, default_timeout_s: float = DEFAULT_TIMEOUT_S, access: ClientAccess | None = None
) -> grpc.aio.Channel:
    """Return a channel to `address` (host:port); it connects at the first call.

    Unary calls without a deadline get `default_timeout_s`. `access` says how to call; by default as the services of a
    deployment call each other, by the variables of this process. With TLS the channel takes new certificates when their
    files change. InvalidSpecError if the address is malformed or a certificate or token file is wrong,
    InvalidStateError if a token would travel in plain text. Close it, or use it as an asynchronous context manager.
    """
    try:
        parse_address(address)
    except ValueError as error:
        raise InvalidSpecError([Violation(field="address", value=address, message=str(error))]) from None
    access = ClientAccess.internal_from_environ() if access is None else access
    access.require_safe(address)
    interceptors: list[Any] = [DefaultDeadline(default_timeout_s)]
    if access.secret is not None:
        interceptors += [ShowTokenUnary(access), ShowTokenStream(access)]
    if access.tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=interceptors)
    options = [*CHANNEL_OPTIONS, *access.channel_options()]
    tls = access.tls

    def make() -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, tls.grpc_credentials(), options=options, interceptors=interceptors)

    return RotatingChannel(make, tls.stamp)


def _metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call: the request id that is bound in this context, else a fresh one."""
    # A call made while another is handled carries the same id, so that one id finds both in the logs.
    return ((REQUEST_ID_KEY, bound("request_id") or new_request_id()),)


async def call(
    method: Callable[..., Any],
    request: object,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    to: str = "",
    waits_on: str = "",
    quiet_s: float = QUIET_S,
) -> Any:
    """Call a unary method of a stub with a deadline and return its answer; raise classes of `millrace.errors`.

    `to` says in words who is called ("the orchestrator at host:port"), for messages when it cannot be reached;
    `waits_on` names the component for `run why`, where the call appears as a wait once it lasts longer than `quiet_s`
    seconds.
    """
    asked = type(request).__name__.removesuffix("Request")
    reason = f"an answer of {to or waits_on or 'a server'} to {asked}"
    try:
        with waits.waiting(reason, waits_on=waits_on, deadline_s=timeout_s, quiet_s=quiet_s):
            return await method(request, timeout=timeout_s, metadata=_metadata())
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, to=to, timeout_s=timeout_s) from error
    except asyncio.CancelledError:
        _require_cancelled(to or waits_on)
        raise


def _require_cancelled(to: str) -> None:
    """Raise UnavailableError unless the current task itself was cancelled; `to` says in words who was called.

    It is called where a call ended with a cancellation. gRPC cancels a call also where another task has closed its
    channel, and a task that took that for its own cancellation would end without a word.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise UnavailableError(
            f"the connection to {to or 'a server'} was closed while it was called",
            reason="CHANNEL_CLOSED",
            remedy="call again",
        ) from None


async def stream(
    method: Callable[..., Any], request: object, *, timeout_s: float | None = None, to: str = ""
) -> AsyncIterator[Any]:
    """Yield the responses of a server-streaming method; raise classes of `millrace.errors`.

    `to` says in words who is called, for messages. Without `timeout_s` the stream lasts as long as the server sends:
    the server must send heartbeats. Close it with `contextlib.aclosing` when leaving early, which cancels the call.
    """
    responses = method(request, timeout=timeout_s, metadata=_metadata())
    try:
        async for response in responses:
            yield response
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, to=to, timeout_s=timeout_s) from error
    except asyncio.CancelledError:
        _require_cancelled(to)
        raise
    finally:
        # Also where the reader leaves early: the server would go on with a stream that nobody reads.
        responses.cancel()


# A channel that follows its certificates: when their files change, new calls go over a new connection.
#
# A gRPC channel keeps the credentials that it was made with. A worker's channel lives as long as the process, and
# would show an expired certificate after the next reconnect.

logger = logging.getLogger(__name__)

_MAX_OLD = 2
"""Channels that are kept open after the current one, for the streams on them."""


class RotatingChannel(grpc.aio.Channel):
    """Delegates every call to a channel of the current certificate files, and opens a new one when they change."""

    def __init__(self, make: Callable[[], grpc.aio.Channel], stamp: Callable[[], Stamp]) -> None:
        """Open the first channel by `make`, which opens one with the current certificate files.

        `stamp` returns a value that differs from an earlier one when the files have changed.
        """
        self._make = make
        self._stamp = stamp
        # The stamp first: files that change between these two lines are noticed at the next call.
        self._seen = stamp()
        self._current = make()
        self._old: list[grpc.aio.Channel] = []
        self._closing: set[asyncio.Task[None]] = set()

    def _now(self) -> grpc.aio.Channel:
        """Return the channel for the next call: a new one if the files have changed, in place of the current one.

        Files that are wrong are logged, and the current channel stays in use. The last `_MAX_OLD` channels stay open
        for the streams on them.
        """
        stamp = self._stamp()
        if stamp != self._seen:
            # Also where they are wrong: the error is logged once, and not at each call until they are right.
            self._seen = stamp
            try:
                fresh = self._make()
            except (InvalidSpecError, OSError) as error:
                logger.error("the new certificates are not used yet", extra={"error": str(error)})
                return self._current
            logger.info("calling with new certificates")
            self._old.append(self._current)
            self._current = fresh
            while len(self._old) > _MAX_OLD:
                closing = asyncio.get_running_loop().create_task(self._old.pop(0).close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        return self._current

    def _method(self, kind: str, *args: Any, **options: Any) -> Any:
        """Return a stand-in for a stub's method, which looks up the current channel at each call.

        `kind` is the name of gRPC's method of a channel, such as "unary_unary"; the rest are its arguments.
        """

        def invoke(*request: Any, **call_options: Any) -> Any:
            return getattr(self._now(), kind)(*args, **options)(*request, **call_options)

        return invoke

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with one request and one response, as gRPC's channel does; it follows new
        certificates.
        """
        return self._method("unary_unary", *args, **options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with one request and a stream of responses, as gRPC's channel does."""
        return self._method("unary_stream", *args, **options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with a stream of requests and one response, as gRPC's channel does."""
        return self._method("stream_unary", *args, **options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """Return a callable for a method with a stream of requests and one of responses, as gRPC's channel does."""
        return self._method("stream_stream", *args, **options)

    async def __aenter__(self) -> "RotatingChannel":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close the current channel and those that it replaced.

        Calls under way have `grace` seconds (None: none) to end.
        """
        old, self._old = self._old, []
        for channel in [*old, self._current]:
            await channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the current channel, and have it connect if `try_to_connect`."""
        return self._current.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the current channel's state differs from `last_observed_state`."""
        await self._current.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the current channel is ready."""
        await self._current.channel_ready()
