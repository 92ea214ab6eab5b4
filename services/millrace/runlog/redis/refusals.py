"""What a Redis says that answers and does not do what it was asked, as our errors: which cause it has, and what to do.

An error inside a script comes as text of the script's error, so words are looked at as well as classes.
"""

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
)

from millrace.errors import (
    CapacityError,
    CorruptObjectError,
    InternalError,
    InvalidStateError,
    MillraceError,
    PermissionDeniedError,
    UnavailableError,
)


def refusal(error: RedisError, what: str, *, address: str) -> MillraceError:
    """Return the error to raise for `what`, which Redis at `address` did not do.

    UnavailableError where Redis may do it later without anybody changing a run; else nothing but a change helps.
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
        return UnavailableError(
            f"Redis at {address} is a replica that cannot be written to ({what})",
            reason="REDIS_READ_ONLY",
            remedy="name the primary in MILLRACE_REDIS_URL, or make this one the primary (REPLICAOF NO ONE)",
            metadata=metadata,
        )
    if _says(error, "NOREPLICAS"):
        return UnavailableError(
            f"Redis at {address} takes no writes, because too few replicas follow it ({what})",
            reason="REDIS_NO_REPLICAS",
            remedy="start its replicas, or set min-replicas-to-write 0",
            metadata=metadata,
        )
    if _says(error, "MISCONF"):
        return UnavailableError(
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
