"""What Millrace asks of an object store, and the URL that names one.

The only atomic primitive is `create` (create-only PUT): it holds on every S3-compatible server that we know and on a
filesystem, while compare-and-swap does not. Everything that must be unique or committed is one such call.
All methods are synchronous and thread-safe; async code calls them through `asyncio.to_thread`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millrace.decoding import KEY_RULE, require_key
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, Violation

MAX_GET_BYTES = (1 << 30) + (1 << 20)
"""Largest object that is read into memory at once: an archive of 1 GiB that does not compress. Larger ones are read in
ranges, or into a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object: its key, size, and when it was written (seconds since the epoch, the store's clock)."""

    key: str
    size_bytes: int
    modified: float


class ObjectStore(Protocol):
    """Bytes by key. Every method retries a bounded time, visibly, then raises `UnavailableError`."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object atomically, replacing what is there. Only for names that nobody else writes."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object only if the key is free; False if it exists. Exactly one of many racing callers gets True.

        A create whose answer was lost and that is found to be stored with equal bytes counts as ours: callers that
        need *one* winner put something unique (a nonce) into the bytes.
        """
        ...

    def get(self, key: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """The whole object; `NotFoundError` if there is none.

        `CorruptObjectError`, before anything is read, if it has more than `max_bytes`.
        """
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`; `CorruptObjectError` if the object is shorter than that."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Size and time of an object, or None."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` and sorts after `start_after`, in order of UTF-8 bytes."""
        ...

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        """The distinct `prefix + name + "/"` directly under `prefix` ("" or ending in "/"), sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; no error if there is none."""
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Like `put`, streaming from a file."""
        ...

    def get_file(self, key: str, path: Path) -> None:
        """Like `get`, streaming into a file that appears whole or not at all."""
        ...

    def uri(self, key: str) -> str:
        """Where the object lies, for people and logs."""
        ...

    def describe(self) -> str:
        """The store itself, for messages (endpoint and bucket, or directory)."""
        ...


def check_key(key: str) -> str:
    """Return `key` if it is a legal object key (`decoding.require_key`), else raise.

    A key must not be a directory of another one ("a" and "a/b"): a filesystem cannot hold both.
    """
    try:
        return require_key(key, what="key")
    except ValueError as error:
        message = f"is no object key: {KEY_RULE}"
        violation = Violation(field="key", value=key[:200], message=message, source="object store")
        raise InvalidSpecError([violation]) from error


def require_size(size_bytes: int, max_bytes: int, *, key: str, uri: str) -> None:
    """CorruptObjectError if an object is larger than what its reader takes into memory."""
    if size_bytes > max_bytes:
        raise CorruptObjectError(
            f"object {uri} has {size_bytes} bytes, and at most {max_bytes} are read of what has its name",
            reason="OBJECT_TOO_LARGE",
            remedy="it is not what was written there: restore it from a replica of the bucket (`millrace run repair`)",
            metadata={"key": key},
        )


def require_range(data: bytes, start: int, length: int, *, key: str, uri: str) -> bytes:
    """The bytes that were read from `start`; CorruptObjectError if the object ends before all of them."""
    if len(data) != length:
        raise CorruptObjectError(
            f"object {uri} ends before byte {start + length}",
            reason="OBJECT_TOO_SHORT",
            remedy="restore the object; what refers to it says that it is longer",
            metadata={"key": key},
        )
    return data


def cannot_carry_runs(where: str, problem: str) -> InvalidStateError:
    """Return the error for a store that breaks what runs rest on; `where` is `ObjectStore.describe`."""
    return InvalidStateError(
        f"the object store {where} cannot carry runs: {problem}",
        reason="STORE_SEMANTICS",
        remedy="use a server that has conditional writes and range reads: Amazon S3, Ceph, Cloudflare R2, SeaweedFS "
        "from 4.18 on",
    )


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it may be listed: empty, or the beginning of a legal key."""
    if prefix:
        check_key(prefix + "x" if prefix.endswith("/") else prefix)
    return prefix
