"""Whether a Redis does what a run asks of it: the append script, a read that waits, a lease that expires.

An old server, a replica, a node of a cluster, a user without scripts or without our keys, or a server that is no Redis
answers a PING like any other. So it is found out by doing it, on keys of the deployment's own prefix.
"""

import asyncio
import hashlib
import logging
import re
import secrets
import time
from typing import Any

import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError, ResponseError

from millrace.errors import InvalidStateError, MillraceError, UnavailableError
from millrace.runlog.names import Names, Stream
from millrace.runlog.redis import connection, script
from millrace.runlog.redis.connection import known_refusal

logger = logging.getLogger(__name__)

LEAST_VERSION = (7, 0)
"""Below it entries cannot be given the first half of their id alone (`XADD … 7-*`), which appends rest on."""
NEWEST_TRIED = {"Redis": (7, 2), "Valkey": (9, 1)}
"""The newest releases that runs were tried on; of a newer one a warning says so, and what it can do is tried here."""
DEADLINE_S = 10.0
_LEASES_MS = (40, 400, 4000)
"""How long a lease lasts; a longer one where two commands take longer than the one before."""
_LATE_S = 1.0
_BLOCK_MS = 20


async def redis_self_test(client: redis_asyncio.Redis, *, prefix: str) -> None:
    """Do on a few keys under `prefix` what runs do; the keys are deleted, and expire if that fails.

    InvalidStateError (REDIS_TOO_OLD, REDIS_SEMANTICS), PermissionDeniedError (REDIS_DENIED) and UnavailableError
    (REDIS_READ_ONLY) name what is wrong and what to do.
    """
    names = Names(prefix, f"self-test-{secrets.token_hex(6)}")
    trial, doing = _Trial(client, names), "asking for its version"
    address = connection.describe(client)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await _check_version(client, address)
            for doing, step in trial.steps().items():  # noqa: B007 - the handlers say what was being done
                await step()
    except TimeoutError:
        raise UnavailableError(
            f"Redis at {address} did not answer within {DEADLINE_S:g} s while {doing}",
            reason="REDIS_UNREACHABLE",
            remedy="start Redis or correct MILLRACE_REDIS_URL",
        ) from None
    except (RedisError, OSError) as error:
        raise _explained(error, address, doing) from error
    finally:
        await trial.clean_up()


async def _check_version(client: redis_asyncio.Redis, address: str) -> None:
    try:
        # unregistered wait: bounded by DEADLINE_S
        found = await client.info("server")
    except ResponseError:  # one that does not tell everybody: what it can do is tried anyway
        return
    version = str(found.get("redis_version", ""))
    numbers = _major_and_minor(version)
    if numbers and numbers < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise InvalidStateError(
            f"Redis at {address} is version {version}, and runs need {least} or newer",
            reason="REDIS_TOO_OLD",
            remedy=f"use Redis from {least} on, or Valkey",
            metadata={"version": version},
        )
    # Valkey calls itself a Redis of the release that it left it at, and tells its own beside it.
    kind = "Valkey" if "valkey_version" in found else "Redis"
    version = str(found.get("valkey_version", version))
    newest = NEWEST_TRIED[kind]
    if _major_and_minor(version) > newest:
        tried = ".".join(map(str, newest))
        logger.warning(f"{kind} at {address} is version {version}, and Millrace was tried with versions to {tried}")


def _major_and_minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


class _Trial:
    """What is tried, in order, on the keys of a run that does not exist."""

    def __init__(self, client: redis_asyncio.Redis, names: Names) -> None:
        self._client = client
        self._names = names
        self._stream, self._lease = names.stream(Stream.ROLLOUTS), names.lease("self-test")

    def steps(self) -> dict[str, Any]:
        """Return each step by what it does, in words."""
        return {
            "a script made a hash": self._create,
            "the append script added an entry": self._append,
            "entries were read, and waited for": self._read,
            "a lease was taken, and expired": self._take_lease,
        }

    async def clean_up(self) -> None:
        """Delete the keys; where that cannot be, whatever refused before has been said."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._client.delete(self._names.meta, self._stream, self._lease)
        except (RedisError, OSError, TimeoutError):
            return

    async def _run(self, run: script.Script, keys: list[str], args: list[Any]) -> None:
        answer = await run.run(self._client, keys, args)
        if not isinstance(answer, list) or connection.as_text(answer[0]) != "OK":
            raise ResponseError(f"the script answered {answer!r:.100}")

    async def _create(self) -> None:
        await self._run(script.CREATE_META, [self._names.meta], ["1"])
        await self._client.expire(self._names.meta, 60)

    async def _append(self) -> None:
        data = b"self-test"
        entry = [1, hashlib.sha256(data).hexdigest(), data, ""]
        for mode, role, position in (("auto", "", 0), ("writer", "self-test", 1)):
            # In a stream of its own each: ids of a writer begin with the generation, and those of Redis with the time.
            await self._client.delete(self._stream)
            args = [mode, "1", role, 0, position, 1, *entry, "rollouts"]
            await self._run(script.APPEND, [self._stream, self._names.meta], args)
        await self._client.expire(self._stream, 60)

    async def _read(self) -> None:
        found = await self._client.execute_command("XREAD", "COUNT", 1, "STREAMS", self._stream, "0")
        if not found:
            raise ResponseError("a read from the beginning found nothing of what was added")
        newest = found[0][1][0][0]
        words = ("XREAD", "COUNT", 1, "BLOCK", _BLOCK_MS, "STREAMS", self._stream, newest)
        began = time.monotonic()
        if await self._client.execute_command(*words) or time.monotonic() - began < _BLOCK_MS / 2000:
            raise ResponseError("a read behind the newest entry did not wait for another one")

    async def _take_lease(self) -> None:
        lease_ms = await self._hold_lease()
        ends = time.monotonic() + lease_ms / 1000 + _LATE_S
        # unregistered wait: bounded by DEADLINE_S
        while await self._client.get(self._lease) is not None:
            if time.monotonic() > ends:
                raise ResponseError(f"a lease of {lease_ms} ms is there {_LATE_S:g} s after its end")
            await asyncio.sleep(_LEASES_MS[0] / 2000)

    async def _hold_lease(self) -> int:
        """Take a lease that is seen to be there; returns how long it is. On a busy machine a short one may be over."""
        for lease_ms in _LEASES_MS:
            await self._client.delete(self._lease)
            began = time.monotonic()
            await self._run(script.ACQUIRE_LEASE, [self._lease, self._names.meta], ["1", "held", lease_ms, ""])
            found = await self._client.get(self._lease)
            if found == b"held":
                return lease_ms
            if found is not None or time.monotonic() - began < lease_ms / 1000:
                raise ResponseError("a lease that was taken is not there")
        raise TimeoutError


def _explained(error: Exception, address: str, doing: str) -> MillraceError:
    if (known := known_refusal(error, doing, address=address)) is not None:
        return known
    if isinstance(error, ResponseError):
        return InvalidStateError(
            f"Redis at {address} cannot carry runs: it failed where {doing}: {error}",
            reason="REDIS_SEMANTICS",
            remedy="use Redis from 7.0 on, or Valkey, with EVAL, EVALSHA and streams under their own names",
        )
    return UnavailableError(
        f"Redis at {address} does not answer: {str(error) or type(error).__name__}",
        reason="REDIS_UNREACHABLE",
        remedy="start Redis or correct MILLRACE_REDIS_URL",
    )
