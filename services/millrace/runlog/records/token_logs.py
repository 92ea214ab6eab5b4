"""Where the token logs of a run are: one object per step and lineage, created once, kept as long as the run.

They are measurements: nothing is made of them, so no header names them, and a fork begins without those of its parent.
The event of each names its sha256; events are named by headers and seals.
"""

import hashlib
from dataclasses import dataclass

from millrace.rollouts.token_log import MAX_TOKEN_LOG_BYTES, TokenLog, decode_token_log, encode_token_log
from millrace.runlog.catalogue import TOKEN_LOG
from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore, find_newest, next_revision


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTokenLog:
    """A log that is durable. `key` is without the run's prefix, `sha256` (hex) of the log's bytes."""

    step: int
    key: str
    sha256: str
    size_bytes: int
    is_another: bool
    """Another log of the step was stored before; this one is its next revision."""


def store_token_log(store: ObjectStore, names: Names, log: TokenLog) -> StoredTokenLog:
    """Store the log of a step (blocking), as the next revision if another log of that step and lineage is stored.

    Equal bytes, as of a step that is trained again in a strict run, are not written again.
    """
    first, data = names.token_log(log.step, log.lineage), encode_token_log(log)
    key, is_another = first, False
    if not store.create(first, data):
        key = find_newest(store, first) or first
        if is_another := store.get(key) != data:
            key = next_revision(store, first)
            store.create(key, data)
    return StoredTokenLog(
        step=log.step,
        key=key.removeprefix(names.root),
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        is_another=is_another,
    )


def find_token_log(store: ObjectStore, names: Names, step: int) -> str | None:
    """Return the key of the newest revision of a step's log, of the newest lineage; None without any."""
    prefix = names.token_logs(step)
    found = ((TOKEN_LOG.parse(info.key.removeprefix(names.root)), info.key) for info in store.list(prefix))
    numbered = [(int(place["lineage"]), int(place["revision"]), key) for place, key in found if place]
    return max(numbered, default=(0, 0, None))[2]


def load_token_log(store: ObjectStore, key: str) -> TokenLog:
    """Return the log with this key; NotFoundError, or CorruptObjectError if it is damaged."""
    return decode_token_log(store.get(key, max_bytes=MAX_TOKEN_LOG_BYTES), where=key)
