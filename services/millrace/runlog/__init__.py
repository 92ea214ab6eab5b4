"""The log of a run (docs/architecture.md): Redis streams in front, the object store as the truth.

The names are loaded when they are used first: a client reads records and events without Redis.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.runlog.commit import commit_batch
    from millrace.runlog.event_archive import EventReader
    from millrace.runlog.event_writer import EventWriter
    from millrace.runlog.names import Names, Stream, new_uid
    from millrace.runlog.records.frontier import ZERO_CHAIN_HASH, Frontier, chain_hash
    from millrace.runlog.records.numbered import Epoch, Intent
    from millrace.runlog.recover import reappend_committed, reappend_policies
    from millrace.runlog.redis.connection import open_redis
    from millrace.runlog.redis.lease import Lease
    from millrace.runlog.redis.log import AppendResult, Entry, RunLog

_HOMES = {
    "commit": ("commit_batch",),
    "event_archive": ("EventReader",),
    "event_writer": ("EventWriter",),
    "names": ("Names", "Stream", "new_uid"),
    "records.numbered": ("Epoch", "Intent"),
    "records.frontier": ("ZERO_CHAIN_HASH", "Frontier", "chain_hash"),
    "recover": ("reappend_committed", "reappend_policies"),
    "redis.connection": ("open_redis",),
    "redis.lease": ("Lease",),
    "redis.log": ("AppendResult", "Entry", "RunLog"),
}

__all__ = [
    "ZERO_CHAIN_HASH",
    "AppendResult",
    "Entry",
    "Epoch",
    "EventReader",
    "EventWriter",
    "Frontier",
    "Intent",
    "Lease",
    "Names",
    "RunLog",
    "Stream",
    "chain_hash",
    "commit_batch",
    "new_uid",
    "open_redis",
    "reappend_committed",
    "reappend_policies",
]


def __getattr__(name: str) -> Any:
    """Import a public name of this package from its module when it is used first; AttributeError for any other name."""
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
