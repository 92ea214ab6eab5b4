"""Which logs have changed since they were read: what tells one state of a log from another, of many in one request."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import redis.asyncio as redis_asyncio
from redis.exceptions import ResponseError

from millrace.runlog.names import Names, Stream
from millrace.runlog.redis import connection
from millrace.runlog.redis.connection import as_text

_META_FIELDS = ("generation", "format", "run_hash", "damage")


class LogState(NamedTuple):
    """What Redis holds of a log at a moment. While it is the same, no event was appended, and the log was not lost."""

    server: str
    """Run id of the server, which changes when it restarts."""
    meta: tuple[str, ...]
    """The fields of meta that say which log it is, and whether it is damaged."""
    newest: tuple[str, str]
    """Id and hash of the newest event, empty without one."""


async def read_states(redis: redis_asyncio.Redis, names: Sequence[Names]) -> dict[str, LogState]:
    """Return by uid the state of each of these logs, from one request to Redis.

    A log is left out if Redis does not hold it, or does not say so: it has to be opened to find out why. None is in the
    result where INFO is denied, because a restart of the server would go unseen.
    """
    if not names:
        return {}

    async def ask() -> list[Any]:
        """Send one request and return the answers in its order; a command that failed has its error as the answer."""
        pipeline = redis.pipeline(transaction=False)
        pipeline.info("server")
        for each in names:
            pipeline.hmget(each.meta, _META_FIELDS)
            pipeline.xrevrange(each.stream(Stream.EVENTS), count=1)
        return await pipeline.execute(raise_on_error=False)

    info, *answers = await connection.call(redis, "asking which runs have news", ask)
    server = "" if isinstance(info, ResponseError) else as_text(info.get("run_id"))
    if not server:
        return {}
    found: dict[str, LogState] = {}
    for each, meta, events in zip(names, answers[::2], answers[1::2], strict=True):
        if isinstance(meta, ResponseError) or isinstance(events, ResponseError) or meta[0] is None:
            continue
        newest = (as_text(events[0][0]), as_text(events[0][1].get(b"h"))) if events else ("", "")
        found[each.uid] = LogState(server, tuple(as_text(value) for value in meta), newest)
    return found
