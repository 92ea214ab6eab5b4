"""The connection to Redis, with bounded, visible retries, and the self-test of what a run asks of Redis.

redis-py's own retries are off, because nobody can see them: `Connection.call` retries what lost its connection, with a
log line and a registered wait. Every command that goes through it may therefore run twice; the log's appends are made
for that (a repeated append answers ALREADY).
"""

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import redis.asyncio as redis_asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from millrace.backoff import Backoff
from millrace.errors import (
    CapacityError,
    CorruptObjectError,
    InternalError,
    InvalidSpecError,
    InvalidStateError,
    MillraceError,
    PermissionDeniedError,
    RefusedError,
    UnavailableError,
    Violation,
)
from millrace.runlog.names import Names, Stream
from millrace.runlog.redis import script
from millrace.telemetry import waits
from millrace.telemetry import waits as standstill
from millrace.telemetry.settings import join_address

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Above the longest blocking read (5 s) with room for a 4 MiB entry on a slow link.
SOCKET_TIMEOUT_S = 15.0
CONNECT_TIMEOUT_S = 5.0
HEALTH_CHECK_S = 30  # a connection that was idle that long is pinged before it is used
MAX_BLOCK_S = 5.0  # no read blocks longer, so that a gone log is seen
# A Redis loads an append-only file of some GiB in that time; after it the caller gets the error.
RETRY_DEADLINE_S = 30.0
# A command that takes longer, beyond the time that it may block, is shown as a wait.
QUIET_S = 1.0
OUTAGE_S = 5.0  # a command that took so long was held up by Redis, not by its own work
# So many tries that failed because this process itself did not run are repeated without being counted.
EXCUSED = 3
_BACKOFF = Backoff(0.05, 2.0, spread=(0.5, 1.0))
_MAX_CONNECTIONS = 512  # every blocked reader (a watcher of a run) holds one

# ReadOnlyError: a failover is under way and this connection still leads to the demoted server.
_RETRIED = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time in which Redis did not answer this process, on its monotonic clock. It is over."""

    address: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Return for how many seconds Redis did not answer."""
        return self.ended - self.began


OUTAGES: deque[Outage] = deque(maxlen=16)
"""The newest outages that this process saw, oldest first; commands that waited at the same time saw the same one."""


def open_redis(url: str) -> redis_asyncio.Redis:
    """Return a client for `redis://[user:password@]host:port/db` (or rediss, unix); it connects on first use.

    InvalidSpecError, without the URL's text, if it is malformed.
    """
    try:
        return redis_asyncio.Redis.from_url(
            url,
            decode_responses=False,
            # `call` bounds every command; its docstring says why redis-py must not.
            socket_timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_keepalive=True,
            health_check_interval=HEALTH_CHECK_S,
            # RESP2, so that answers have one shape on every version of the server.
            protocol=2,
            max_connections=_MAX_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError:  # its text repeats parts of the URL, which may be those of the password
        violation = Violation(
            field="MILLRACE_REDIS_URL",
            message="must be redis://[user:password@]host:port/db (or rediss://, unix://) with options that redis-py "
            "knows; other characters of user and password are written as %XX",
            source="environment",
        )
        raise InvalidSpecError([violation]) from None


def describe(client: redis_asyncio.Redis) -> str:
    """Return `host:port` (or the socket's path) of a client, without credentials, for messages."""
    options = client.connection_pool.connection_kwargs
    return options.get("path") or join_address(options.get("host", "localhost"), options.get("port", 6379))


async def call(
    client: redis_asyncio.Redis,
    what: str,
    command: Callable[[], Awaitable[T]],
    *,
    deadline_s: float = RETRY_DEADLINE_S,
    block_s: float = 0.0,
) -> T:
    """Await `command()` and return its result, repeating it while Redis is unreachable.

    The command may run again after it has had its effect, because its answer was lost. `what` describes it in messages.
    `block_s` is how long the command itself may wait in Redis for something to come. Time in which this process did not
    run does not count. `UnavailableError` after `deadline_s`, or at once the error for what Redis refuses (`refusal`).
    The deadline of one try is set here and not by redis-py's `socket_timeout`: that one sends through
    `asyncio.wait_for`, which on Python 3.11 swallows a cancellation that arrives while the send completes
    (python/cpython#81839), so that a cancelled reader would go on reading for ever.
    """
    standstill.watch()
    address, began = describe(client), time.monotonic()
    reason = f"Redis at {address}, which does not answer ({what})"
    with waits.shared(reason, waits_on="redis", deadline_s=SOCKET_TIMEOUT_S, quiet_s=block_s + QUIET_S) as wait:
        result = await _retry(client, what, command, deadline_s=deadline_s, on_failure=wait.show)
    # Kept for an event, which can only be written once Redis answers again.
    if _awake_s(began) > block_s + OUTAGE_S:
        _note_outage(address, began + block_s)
    return result


async def _retry(
    client: redis_asyncio.Redis,
    what: str,
    command: Callable[[], Awaitable[T]],
    *,
    deadline_s: float,
    on_failure: Callable[[str, waits.Refusal | None], None],
) -> T:
    """Return the result of the command, which is tried again for `deadline_s` after its first failure.

    The failure and the recovery are one log line each. `on_failure` gets, at the first failure, a text (empty: the
    usual one) and a refusal for the registered wait. Raises as `call` does.
    """
    address, num_failed, began, excused = describe(client), 0, 0.0, 0
    # unregistered wait: `call` around it is the registered wait
    while True:
        tried = time.monotonic()
        try:
            async with asyncio.timeout(SOCKET_TIMEOUT_S):
                result = await command()
        except AuthenticationError as error:  # a ConnectionError by its class, but time does not heal it
            raise refusal(error, what, address=address) from error
        except _RETRIED as error:
            failure = error
        except RedisError as error:
            # The error of a command inside a script is a ResponseError with the text of READONLY, so its class is not
            # enough.
            if not is_read_only(error):
                raise refusal(error, what, address=address) from error
            failure = error
        else:
            if began:
                logger.info("Redis at %s answers again: %s", address, what)
            return result
        # The time of this try ran out while the process did not run, which says nothing about Redis.
        if not began and excused < EXCUSED and standstill.METER.within(tried, time.monotonic()):
            excused += 1
            logger.info("this process stood still while it was %s: once more", what)
            continue
        # The deadline counts from the first failure: a command that waited in Redis before it failed has used none of
        # it.
        if not began:
            began = time.monotonic()
            text = f"Redis at {address}, a replica that cannot be written to ({what})"
            known = known_refusal(failure, what, address=address)
            on_failure(text if is_read_only(failure) else "", waits.Refusal.of(known))
            logger.warning("Redis at %s is not reachable, retrying: %s: %s", address, what, failure)
        if _awake_s(began) >= deadline_s:
            if (known := known_refusal(failure, what, address=address)) is not None:
                raise known from failure
            raise UnavailableError(
                f"cannot reach Redis at {address} for {deadline_s:g} s ({what}): {failure}",
                reason="REDIS_UNREACHABLE",
                remedy="start Redis or correct MILLRACE_REDIS_URL",
                metadata={"address": address},
            ) from failure
        num_failed += 1
        await asyncio.sleep(_BACKOFF.after(num_failed))


def _awake_s(began: float) -> float:
    """Return the seconds since `began` (monotonic), without those in which this process did not run."""
    now = time.monotonic()
    return now - began - standstill.METER.within(began, now)


def _note_outage(address: str, began: float) -> None:
    """Add an outage from `began` until now to `OUTAGES`; one that overlaps the newest of that address extends it."""
    now = time.monotonic()
    if OUTAGES and OUTAGES[-1].address == address and OUTAGES[-1].ended >= began:
        last = OUTAGES.pop()
        # Commands that waited at the same time saw the same outage.
        began = min(began, last.began)
    OUTAGES.append(Outage(address=address, began=began, ended=now))


def as_text(value: Any) -> str:
    """Return Redis' bytes as text; None becomes "", and bytes that are no UTF-8 equal no text of Millrace's."""
    if value is None:
        return ""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


# What a Redis says that answers and does not do what it was asked, as our errors: which cause it has, and what to do.
#
# An error inside a script comes as text of the script's error, so words are looked at as well as classes.


def refusal(error: RedisError, what: str, *, address: str) -> MillraceError:
    """Make the error to raise for `what` (in words), which Redis at `address` did not do.

    RefusedError where Redis may do it later without anybody changing a run; else nothing but a change helps.
    """
    return known_refusal(error, what, address=address) or InternalError(
        f"Redis at {address} refused: {what}: {error}",
        reason="REDIS_ERROR",
        remedy="see the server's log",
        metadata={"address": address},
    )


def known_refusal(error: Exception, what: str, *, address: str) -> MillraceError | None:
    """Make the error to raise for what Redis refused, if its text names a cause that is known; else return None.

    `what` says in words what it refused, for the message.
    """
    return _of_role(error, what, address) or _of_rights_and_room(error, what, address)


def is_read_only(error: Exception) -> bool:
    """Return whether an error is that of a replica, which takes no writes.

    Perhaps a failover is under way, and the connection leads to the old primary. A read that waits while its server
    becomes a replica is ended with UNBLOCKED.
    """
    return isinstance(error, ReadOnlyError) or _says(error, "READONLY", "read only replica", "UNBLOCKED")


def _of_role(error: Exception, what: str, address: str) -> MillraceError | None:
    """Make the error for a Redis that is a replica, lacks replicas or its disk, or is a cluster's node; else return
    None.

    `what` says in words what it refused.
    """
    metadata = {"address": address}
    if is_read_only(error):
        return RefusedError(
            f"Redis at {address} is a replica that cannot be written to ({what})",
            reason="REDIS_READ_ONLY",
            remedy="name the primary in MILLRACE_REDIS_URL, or make this one the primary (REPLICAOF NO ONE)",
            metadata=metadata,
        )
    if _says(error, "NOREPLICAS"):
        return RefusedError(
            f"Redis at {address} takes no writes, because too few replicas follow it ({what})",
            reason="REDIS_NO_REPLICAS",
            remedy="start its replicas, or set min-replicas-to-write 0",
            metadata=metadata,
        )
    if _says(error, "MISCONF"):
        return RefusedError(
            f"Redis at {address} takes no writes, because it cannot write to its own disk ({what})",
            reason="REDIS_CANNOT_SAVE",
            remedy="see its log: free its disk or correct its directory, or set stop-writes-on-bgsave-error no",
            metadata=metadata,
        )
    if isinstance(error, AskError | ClusterDownError | ClusterCrossSlotError) or _says(error, "slot not served"):
        return InvalidStateError(
            f"Redis at {address} is a node of a cluster, which runs cannot use: {error}",
            reason="REDIS_CLUSTER",
            remedy="name a Redis that is no cluster in MILLRACE_REDIS_URL",
            metadata=metadata,
        )
    return None


def _of_rights_and_room(error: Exception, what: str, address: str) -> MillraceError | None:
    """Make the error for wrong credentials, missing rights, no memory, or a key of another type; else return None.

    `what` says in words what Redis refused.
    """
    metadata = {"address": address}
    if isinstance(error, AuthenticationError):
        return PermissionDeniedError(
            f"Redis at {address} refused: {what}: {error}",
            reason="REDIS_DENIED",
            remedy="correct the credentials in MILLRACE_REDIS_URL",
            metadata=metadata,
        )
    if isinstance(error, NoPermissionError) or _says(error, "NOPERM", "ACL failure"):
        return PermissionDeniedError(
            f"Redis at {address} lets its user not do what runs do ({what}): {error}",
            reason="REDIS_DENIED",
            remedy="allow the user of MILLRACE_REDIS_URL all keys below MILLRACE_PREFIX (~PREFIX:*), scripts, streams, "
            "strings, hashes and sets (ACL SETUSER … +@all -@admin)",
            metadata=metadata,
        )
    if isinstance(error, OutOfMemoryError):
        return CapacityError(
            f"Redis at {address} refused: {what}: {error}",
            reason="REDIS_FULL",
            remedy="raise Redis' maxmemory, or let the trainer catch up so that the log is trimmed",
            metadata=metadata,
        )
    if _says(error, "WRONGTYPE"):
        return CorruptObjectError(
            f"Redis at {address} holds a key of another type than ours: {what}",
            reason="KEY_CORRUPT",
            remedy="find out who else writes to this Redis",
            metadata=metadata,
        )
    return None


def _says(error: Exception, *words: str) -> bool:
    """Return whether an error's text contains one of these words."""
    return any(word in str(error) for word in words)


# Whether a Redis does what a run asks of it: the append script, a read that waits, a lease that expires.
#
# An old server, a replica, a node of a cluster, a user without scripts or without our keys, or a server that is no
# Redis answers a PING like any other. So it is found out by doing it, on keys of the deployment's own prefix.

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
    """Try out on a few keys under `prefix` what runs ask of Redis; the keys are deleted, and expire if that fails.

    InvalidStateError (REDIS_TOO_OLD, REDIS_SEMANTICS), PermissionDeniedError (REDIS_DENIED) and UnavailableError
    (REDIS_READ_ONLY) name what is wrong and what to do.
    """
    names = Names(prefix, f"self-test-{secrets.token_hex(6)}")
    trial, doing = _Trial(client, names), "asking for its version"
    address = describe(client)
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
    """Raise InvalidStateError if the server's version is below `LEAST_VERSION`.

    Warn of one above those that were tried.
    """
    try:
        # unregistered wait: bounded by DEADLINE_S
        found = await client.info("server")
    except ResponseError:  # it refuses INFO to this user: what it can do is tried later anyway
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
    # Valkey reports the release of Redis from which it was forked, and its own release in a field of its own.
    kind = "Valkey" if "valkey_version" in found else "Redis"
    version = str(found.get("valkey_version", version))
    newest = NEWEST_TRIED[kind]
    if _major_and_minor(version) > newest:
        tried = ".".join(map(str, newest))
        logger.warning(f"{kind} at {address} is version {version}, and Millrace was tried with versions to {tried}")


def _major_and_minor(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, fewer if it has fewer."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


class _Trial:
    """What is tried, in order, on the keys of a run that does not exist."""

    def __init__(self, client: redis_asyncio.Redis, names: Names) -> None:
        self._client = client
        self._names = names
        self._stream, self._lease = names.stream(Stream.ROLLOUTS), names.lease("self-test")

    def steps(self) -> dict[str, Any]:
        """Return the functions that try Redis out, in order, by what each does, in words."""
        return {
            "a script made a hash": self._create,
            "the append script added an entry": self._append,
            "entries were read, and waited for": self._read,
            "a lease was taken, and expired": self._take_lease,
        }

    async def clean_up(self) -> None:
        """Delete the keys that were tried out; a failure is ignored, because its cause was reported before."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._client.delete(self._names.meta, self._stream, self._lease)
        except (RedisError, OSError, TimeoutError):
            return

    async def _run(self, run: script.Script, keys: list[str], args: list[Any]) -> None:
        """Run a script, and raise ResponseError unless it answers OK."""
        answer = await run.run(self._client, keys, args)
        if not isinstance(answer, list) or as_text(answer[0]) != "OK":
            raise ResponseError(f"the script answered {answer!r:.100}")

    async def _create(self) -> None:
        """Make the hash of a run by a script."""
        await self._run(script.CREATE_META, [self._names.meta], ["1"])
        await self._client.expire(self._names.meta, 60)

    async def _append(self) -> None:
        """Append an entry by the append script, in the modes of rollouts and of events."""
        data = b"self-test"
        entry = [1, hashlib.sha256(data).hexdigest(), data, ""]
        for mode, role, position in (("auto", "", 0), ("writer", "self-test", 1)):
            # In a stream of its own each: ids of a writer begin with the generation, and those of Redis with the time.
            await self._client.delete(self._stream)
            args = [mode, "1", role, 0, position, 1, *entry, "rollouts"]
            await self._run(script.APPEND, [self._stream, self._names.meta], args)
        await self._client.expire(self._stream, 60)

    async def _read(self) -> None:
        """Read the appended entry, and raise ResponseError unless a read after it waits for another one."""
        found = await self._client.execute_command("XREAD", "COUNT", 1, "STREAMS", self._stream, "0")
        if not found:
            raise ResponseError("a read from the beginning found nothing of what was added")
        newest = found[0][1][0][0]
        words = ("XREAD", "COUNT", 1, "BLOCK", _BLOCK_MS, "STREAMS", self._stream, newest)
        began = time.monotonic()
        # Half of the block time is enough for the proof: the two clocks need not agree to the millisecond, and a server
        # that ignores BLOCK answers at once.
        if await self._client.execute_command(*words) or time.monotonic() - began < _BLOCK_MS / 2000:
            raise ResponseError("a read after the newest entry did not wait for another one")

    async def _take_lease(self) -> None:
        """Take a lease, and raise ResponseError unless it expires in time."""
        lease_ms = await self._hold_lease()
        ends = time.monotonic() + lease_ms / 1000 + _LATE_S
        # unregistered wait: bounded by DEADLINE_S
        while await self._client.get(self._lease) is not None:
            if time.monotonic() > ends:
                raise ResponseError(f"a lease of {lease_ms} ms is there {_LATE_S:g} s after its end")
            await asyncio.sleep(_LEASES_MS[0] / 2000)

    async def _hold_lease(self) -> int:
        """Take a lease that is long enough to be seen before it expires, and return its milliseconds."""
        for lease_ms in _LEASES_MS:
            await self._client.delete(self._lease)
            began = time.monotonic()
            await self._run(script.ACQUIRE_LEASE, [self._lease, self._names.meta], ["1", "held", lease_ms, ""])
            found = await self._client.get(self._lease)
            if found == b"held":
                return lease_ms
            # Absent before its time is over: the server lost it. Absent after that: two commands took longer than the
            # lease lasts, so a longer one is tried.
            if found is not None or time.monotonic() - began < lease_ms / 1000:
                raise ResponseError("a lease that was taken is not there")
        raise TimeoutError


def _explained(error: Exception, address: str, doing: str) -> MillraceError:
    """Make the error to raise for a self-test that failed; `doing` says in words what was tried then."""
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
