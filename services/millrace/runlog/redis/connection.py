"""The connection to Redis: bounded, visible retries, then an `UnavailableError` that names the address.

redis-py's own retries are off, because nobody can see them: `Connection.call` retries what lost its connection, with a
log line and a registered wait. Every command that goes through it may therefore run twice; the log's appends are made
for that (a repeated append answers ALREADY).
"""

import asyncio
import logging
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
from millrace.telemetry import waits
from millrace.telemetry import waits as standstill
from millrace.telemetry.settings import join_address

logger = logging.getLogger(__name__)

T = TypeVar("T")

SOCKET_TIMEOUT_S = 15.0  # above the longest blocking read (5 s) with room for a 4 MiB entry on a slow link
CONNECT_TIMEOUT_S = 5.0
HEALTH_CHECK_S = 30  # a connection that was idle that long is pinged before it is used
MAX_BLOCK_S = 5.0  # no read blocks longer, so that a gone log is seen
RETRY_DEADLINE_S = 30.0  # an append-only file of some GiB loads in that time; then the caller must know
QUIET_S = 1.0  # a command that lasts longer shows itself as a wait; a blocking one that much beyond its block
OUTAGE_S = 5.0  # a command that took so long was held up by Redis, not by its own work
EXCUSED = 3  # tries that failed while this process itself stood still and are repeated as if they had not been made
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
        """How long it lasted."""
        return self.ended - self.began


OUTAGES: deque[Outage] = deque(maxlen=16)
"""The newest outages that this process saw, oldest first; commands that waited at the same time saw the same one."""


def open_redis(url: str) -> redis_asyncio.Redis:
    """A client for `redis://[user:password@]host:port/db` (or rediss, unix); connects on first use."""
    try:
        return redis_asyncio.Redis.from_url(
            url,
            decode_responses=False,
            socket_timeout=None,  # `call` bounds every command itself, see there
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_keepalive=True,
            health_check_interval=HEALTH_CHECK_S,
            protocol=2,  # one shape of answers on every server version
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
    """`host:port` (or the socket's path) of a client, without credentials."""
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
    """Await `command()`, repeating it while Redis is unreachable; `what` says in words what is being done.

    `block_s` is how long the command itself may wait in Redis for something to come. Time in which this process stood
    still is not held against Redis.

    The deadline of one try is set here and not by redis-py's `socket_timeout`: that one sends through
    `asyncio.wait_for`, which on Python 3.11 swallows a cancellation that arrives while the send completes
    (python/cpython#81839), so that a cancelled reader would go on reading for ever.
    """
    standstill.watch()
    address, began = describe(client), time.monotonic()
    reason = f"Redis at {address}, which does not answer ({what})"
    with waits.shared(reason, waits_on="redis", deadline_s=SOCKET_TIMEOUT_S, quiet_s=block_s + QUIET_S) as wait:
        result = await _retry(client, what, command, deadline_s=deadline_s, on_failure=wait.show)
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
    """Try for `deadline_s` behind the first failure; that and the recovery are one log line each."""
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
            if not is_read_only(error):
                raise refusal(error, what, address=address) from error
            failure = error
        else:
            if began:
                logger.info("Redis at %s answers again: %s", address, what)
            return result
        if not began and excused < EXCUSED and standstill.METER.within(tried, time.monotonic()):
            excused += 1
            logger.info("this process stood still while it was %s: once more", what)
            continue
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
    """Seconds since a moment in which this process ran."""
    now = time.monotonic()
    return now - began - standstill.METER.within(began, now)


def _note_outage(address: str, began: float) -> None:
    """Remember an outage, or that the newest one was longer than other commands saw."""
    now = time.monotonic()
    if OUTAGES and OUTAGES[-1].address == address and OUTAGES[-1].ended >= began:
        last = OUTAGES.pop()
        began = min(began, last.began)
    OUTAGES.append(Outage(address=address, began=began, ended=now))


def as_text(value: Any) -> str:
    """Redis answers bytes; None becomes "", bytes that are no UTF-8 become what nothing of ours is equal to."""
    if value is None:
        return ""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


# What a Redis says that answers and does not do what it was asked, as our errors: which cause it has, and what to do.
#
# An error inside a script comes as text of the script's error, so words are looked at as well as classes.


def refusal(error: RedisError, what: str, *, address: str) -> MillraceError:
    """Return the error to raise for `what`, which Redis at `address` did not do.

    RefusedError where Redis may do it later without anybody changing a run; else nothing but a change helps.
    """
    return known_refusal(error, what, address=address) or InternalError(
        f"Redis at {address} refused: {what}: {error}",
        reason="REDIS_ERROR",
        remedy="see the server's log",
        metadata={"address": address},
    )


def known_refusal(error: Exception, what: str, *, address: str) -> MillraceError | None:
    """Return the same as `refusal`; None for an error that says nothing of its cause."""
    return _of_role(error, what, address) or _of_rights_and_room(error, what, address)


def is_read_only(error: Exception) -> bool:
    """Return whether a replica answers; perhaps a failover is under way, and the connection leads to the old primary.

    A read that waits while its server becomes a replica is ended with UNBLOCKED.
    """
    return isinstance(error, ReadOnlyError) or _says(error, "READONLY", "read only replica", "UNBLOCKED")


def _of_role(error: Exception, what: str, address: str) -> MillraceError | None:
    """Return what it is that keeps it from writing."""
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
    return any(word in str(error) for word in words)
