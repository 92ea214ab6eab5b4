"""Commit points: create-only JSON objects whose existence commits what they name; their checksum and their successors.

A commit point such as `…/manifest.json` is written once and never overwritten. Where it, or what it names, is damaged
and its writer can make it again, the writer creates `…/manifest.r1.json`, then `…/manifest.r2.json`, and so on; the
damaged object stays for inspection. Everybody who reads a commit point by its first name asks
`newest_revision` for the name that counts.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from millrace.errors import CorruptObjectError
from millrace.storage.base import ObjectStore

MAX_REVISIONS = 9999
_CHECKSUM = "checksum"
_NAME = re.compile(r"(?P<stem>[^/]*?)(?:\.r(?P<number>[1-9][0-9]{0,3}))?(?P<ending>\.[a-z]+)")


def revision_key(key: str, number: int) -> str:
    """The key of a commit point's successor `number`; 0 is the commit point itself. `key` may be any of them."""
    directory, slash, name = key.rpartition("/")
    match = _match(name, key)
    middle = f".r{number}" if number else ""
    return f"{directory}{slash}{match['stem']}{middle}{match['ending']}"


def revision_of(key: str) -> int:
    """Which successor a key names; 0 for a commit point itself."""
    return int(_match(key.rpartition("/")[2], key)["number"] or 0)


def newest_revision(store: ObjectStore, key: str) -> str:
    """The key that counts for a commit point: of its newest successor, or its own if it has none (blocking).

    The object need not exist: then the key is its own.
    """
    return find_newest(store, key) or revision_key(key, 0)


def find_newest(store: ObjectStore, key: str) -> str | None:
    """`newest_revision` of what exists; None if neither the commit point nor a successor does. One request."""
    first = revision_key(key, 0)
    directory, slash, name = first.rpartition("/")
    stem = f"{directory}{slash}{_match(name, key)['stem']}."
    found = [info.key for info in store.list(stem) if "/" not in info.key.removeprefix(stem)]
    numbers = [
        revision_of(other)
        for other in found
        if _NAME.fullmatch(other.rpartition("/")[2]) and revision_key(other, 0) == first
    ]
    return revision_key(first, max(numbers)) if numbers else None


def next_revision(store: ObjectStore, key: str) -> str:
    """The key of the successor that comes next (blocking); `CorruptObjectError` if there have been too many."""
    newest = newest_revision(store, key)
    if (number := revision_of(newest)) == MAX_REVISIONS:
        raise CorruptObjectError(
            f"{store.uri(newest)} is damaged, and there can be no further successor",
            reason="TOO_MANY_REVISIONS",
            remedy="see who writes successors that are damaged, and delete them",
        )
    return revision_key(key, number + 1)


def with_checksum(raw: Mapping[str, Any]) -> bytes:
    """Canonical JSON of an object (sorted keys, no spaces, no NaN) with a checksum over the rest of it."""
    rest = {name: value for name, value in raw.items() if name != _CHECKSUM}
    return _canonical({**rest, _CHECKSUM: hashlib.sha256(_canonical(rest)).hexdigest()})


def require_checksum(raw: Mapping[str, Any]) -> None:
    """`ValueError` unless a decoded object has the checksum that `with_checksum` gave it."""
    rest = {name: value for name, value in raw.items() if name != _CHECKSUM}
    if raw.get(_CHECKSUM) != hashlib.sha256(_canonical(rest)).hexdigest():
        raise ValueError("its checksum is not that of its content")


def _canonical(raw: Mapping[str, Any]) -> bytes:
    return json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _match(name: str, key: str) -> re.Match[str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{key!r} is no name of a commit point: it has no ending")
    return match
