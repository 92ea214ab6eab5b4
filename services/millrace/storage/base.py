"""What Millrace asks of an object store, the URL that names one, and commit points: create-only JSON objects.

The only atomic primitive is `create` (create-only PUT): it holds on every S3-compatible server that we know and on a
filesystem, while compare-and-swap does not. Everything that must be unique or committed is one such call.
All methods are synchronous and thread-safe; async code calls them through `asyncio.to_thread`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from millrace.decoding import KEY_RULE, require_key
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, Violation

MAX_GET_BYTES = (1 << 30) + (1 << 20)
"""Largest object that is read into memory at once: an archive of 1 GiB that does not compress. Larger ones are read in
ranges, or into a file."""
MAX_DELETED = 1000
"""Most objects of one `delete_many`: as many as one request of S3 removes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object: its key, size, and when it was written (seconds since the epoch, the store's clock)."""

    key: str
    size_bytes: int
    modified: float


class ObjectStore(Protocol):
    """Bytes by key. Every method retries a bounded time, visibly, then raises `UnavailableError`."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object atomically, replacing an existing one. It is for keys that no other process writes."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object only if the key is free; return False if it exists.

        Exactly one of many racing callers gets True. A create whose answer was lost and that is found to be
        stored with equal bytes counts as ours: callers that need *one* winner put something unique (a nonce)
        into the bytes.
        """
        ...

    def get(self, key: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """Return the whole object; `NotFoundError` if there is none.

        `CorruptObjectError`, before its bytes are read, if it has more than `max_bytes`.
        """
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from offset `start`; `CorruptObjectError` if the object ends before.

        `NotFoundError` if there is none.
        """
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Return key, size and time of an object; None if there is none."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with `prefix` and sorts after `start_after`, in order of UTF-8 bytes.

        `start_after` need not exist; empty begins with the first.
        """
        ...

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        """Yield the distinct `prefix + name + "/"` directly under `prefix` ("" or ending in "/"), sorted.

        These are the directories below it that hold objects at any depth.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; no error if there is none."""
        ...

    def delete_many(self, keys: Sequence[str]) -> dict[str, str]:
        """Remove at most `MAX_DELETED` objects in few requests.

        Return the reason for each that could not be removed, by key. One that does not exist counts as removed.
        Raises what `delete` raises if the answer does not say which ones failed.
        """
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from the file at `path`, replacing an existing object, without holding the file in memory."""
        ...

    def get_file(self, key: str, path: Path) -> None:
        """Copy an object into a file at `path`, which appears whole or not at all; `NotFoundError` without an object.

        The file's directory is created; an existing file is replaced.
        """
        ...

    def uri(self, key: str) -> str:
        """Return the object's URI, for people and logs; whether there is such an object is not asked."""
        ...

    def describe(self) -> str:
        """Return a text that names the store, for messages: endpoint and bucket, or directory."""
        ...


def check_key(key: str) -> str:
    """Return `key` if it is a legal object key (`decoding.require_key`), else raise InvalidSpecError.

    A key must not be a directory of another one ("a" and "a/b"): a filesystem cannot hold both. That is not checked
    here.
    """
    try:
        return require_key(key, what="key")
    except ValueError as error:
        message = f"is no object key: {KEY_RULE}"
        violation = Violation(field="key", value=key[:200], message=message, source="object store")
        raise InvalidSpecError([violation]) from error


def require_size(size_bytes: int, max_bytes: int, *, key: str, uri: str) -> None:
    """Raise CorruptObjectError if an object has more bytes (`size_bytes`) than its reader takes (`max_bytes`).

    `key` and `uri` name the object in the error.
    """
    if size_bytes > max_bytes:
        raise CorruptObjectError(
            f"object {uri} has {size_bytes} bytes, and at most {max_bytes} are read of what has its name",
            reason="OBJECT_TOO_LARGE",
            remedy="it is not what was written there: restore it from a replica of the bucket (`millrace run repair`)",
            metadata={"key": key},
        )


def require_range(data: bytes, start: int, length: int, *, key: str, uri: str) -> bytes:
    """Return `data`, which was read from offset `start`; CorruptObjectError unless it is `length` bytes long.

    `key` and `uri` name the object in the error.
    """
    if len(data) != length:
        raise CorruptObjectError(
            f"object {uri} ends before byte {start + length}",
            reason="OBJECT_TOO_SHORT",
            remedy="restore the object; what refers to it says that it is longer",
            metadata={"key": key},
        )
    return data


def cannot_carry_runs(where: str, problem: str) -> InvalidStateError:
    """Make (not raise) the error for a store that breaks what runs rest on; `where` is `ObjectStore.describe`.

    `problem` says in words what the store did wrong.
    """
    return InvalidStateError(
        f"the object store {where} cannot carry runs: {problem}",
        reason="STORE_SEMANTICS",
        remedy="use a server that has conditional writes and range reads: Amazon S3, Ceph, Cloudflare R2, SeaweedFS "
        "from 4.18 on",
    )


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it may be listed: empty, or the beginning of a legal key; else raise InvalidSpecError."""
    if prefix:
        check_key(prefix + "x" if prefix.endswith("/") else prefix)
    return prefix


# Commit points: create-only JSON objects whose existence commits what they name; their checksum and their successors.
#
# A commit point such as `…/manifest.json` is written once and never overwritten. Where it, or what it names, is
# damaged and its writer can make it again, the writer creates `…/manifest.r1.json`, then `…/manifest.r2.json`, and so
# on; the damaged object stays for inspection. Everybody who reads a commit point by its first name asks
# `newest_revision` for the name that counts.

MAX_REVISIONS = 9999
_CHECKSUM = "checksum"
_NAME = re.compile(r"(?P<stem>[^/]*?)(?:\.r(?P<number>[1-9][0-9]{0,3}))?(?P<ending>\.[a-z]+)")


def revision_key(key: str, number: int) -> str:
    """Return the key of revision `number` of a commit point, such as `…/manifest.r2.json`.

    0 is the commit point itself. `key` may be that of any of its revisions. ValueError if it has no file ending.
    """
    directory, slash, name = key.rpartition("/")
    match = _match(name, key)
    middle = f".r{number}" if number else ""
    return f"{directory}{slash}{match['stem']}{middle}{match['ending']}"


def revision_of(key: str) -> int:
    """Return the number of the revision that a key names; 0 for a commit point itself.

    ValueError without a file ending.
    """
    return int(_match(key.rpartition("/")[2], key)["number"] or 0)


def newest_revision(store: ObjectStore, key: str) -> str:
    """Return the key that counts for a commit point: that of its newest revision in the store (blocking).

    It is the commit point's own if nothing is stored. `key` may be that of any revision.
    """
    return find_newest(store, key) or revision_key(key, 0)


def find_newest(store: ObjectStore, key: str) -> str | None:
    """Return the key of a commit point's newest revision in the store, by one listing; None if none is stored.

    `key` may be that of any revision. It blocks.
    """
    first = revision_key(key, 0)
    directory, slash, name = first.rpartition("/")
    stem = f"{directory}{slash}{_match(name, key)['stem']}."
    found = [info.key for info in store.list(stem) if "/" not in info.key.removeprefix(stem)]
    numbers = [
        revision_of(other)
        for other in found
        # The listing also has names that only begin in the same way.
        if _NAME.fullmatch(other.rpartition("/")[2]) and revision_key(other, 0) == first
    ]
    return revision_key(first, max(numbers)) if numbers else None


def next_revision(store: ObjectStore, key: str) -> str:
    """Return the key for a new revision of a commit point: one after the newest in the store (blocking).

    Nothing is written. `CorruptObjectError` if there have been `MAX_REVISIONS` already.
    """
    newest = newest_revision(store, key)
    if (number := revision_of(newest)) == MAX_REVISIONS:
        raise CorruptObjectError(
            f"{store.uri(newest)} is damaged, and there can be no further successor",
            reason="TOO_MANY_REVISIONS",
            remedy="see who writes successors that are damaged, and delete them",
        )
    return revision_key(key, number + 1)


def with_checksum(raw: Mapping[str, Any]) -> bytes:
    """Encode an object as canonical JSON (sorted keys, no spaces, no NaN), with a checksum over all other fields."""
    rest = {name: value for name, value in raw.items() if name != _CHECKSUM}
    return _canonical({**rest, _CHECKSUM: hashlib.sha256(_canonical(rest)).hexdigest()})


def require_checksum(raw: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless a decoded JSON object has the checksum that `with_checksum` gave it."""
    rest = {name: value for name, value in raw.items() if name != _CHECKSUM}
    if raw.get(_CHECKSUM) != hashlib.sha256(_canonical(rest)).hexdigest():
        raise ValueError("its checksum is not that of its content")


def _canonical(raw: Mapping[str, Any]) -> bytes:
    """Return JSON with sorted keys, without spaces; ValueError for a number that is not finite."""
    return json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _match(name: str, key: str) -> re.Match[str]:
    """Return the parts of a commit point's file name (stem, revision's number, ending).

    ValueError, naming `key`, if it has none.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{key!r} is no name of a commit point: it has no ending")
    return match
