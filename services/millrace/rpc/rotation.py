"""A channel that follows its certificates: when their files change, new calls go over a new connection.

A gRPC channel keeps the credentials that it was made with. A worker's channel lives as long as the process, and would
show an expired certificate after the next reconnect.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from millrace.errors import InvalidSpecError
from millrace.rpc.tls import Stamp

logger = logging.getLogger(__name__)

_MAX_OLD = 2
"""Channels that are kept open behind the current one, for the streams on them."""


class RotatingChannel(grpc.aio.Channel):
    """Delegates every call to the channel of the files of now."""

    def __init__(self, make: Callable[[], grpc.aio.Channel], stamp: Callable[[], Stamp]) -> None:
        """`make` opens a channel with the files of now; `stamp` differs when they have changed."""
        self._make = make
        self._stamp = stamp
        self._seen = stamp()
        self._current = make()
        self._old: list[grpc.aio.Channel] = []
        self._closing: set[asyncio.Task[None]] = set()

    def _now(self) -> grpc.aio.Channel:
        """The channel to call over. Files that are wrong leave it as it is, until they change again."""
        stamp = self._stamp()
        if stamp != self._seen:
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
        def invoke(*request: Any, **call_options: Any) -> Any:
            return getattr(self._now(), kind)(*args, **options)(*request, **call_options)

        return invoke

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        """As in gRPC."""
        return self._method("unary_unary", *args, **options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        """As in gRPC."""
        return self._method("unary_stream", *args, **options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        """As in gRPC."""
        return self._method("stream_unary", *args, **options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """As in gRPC."""
        return self._method("stream_stream", *args, **options)

    async def __aenter__(self) -> "RotatingChannel":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close the current channel and those before it."""
        old, self._old = self._old, []
        for channel in [*old, self._current]:
            await channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the current channel."""
        return self._current.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the current channel."""
        await self._current.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Of the current channel."""
        await self._current.channel_ready()
