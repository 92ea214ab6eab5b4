"""The log of a run (docs/architecture.md): Redis streams in front, the object store as the truth."""

from millrace.runlog.commit import commit_batch
from millrace.runlog.events.reader import EventReader
from millrace.runlog.events.writer import EventWriter
from millrace.runlog.names import Names, Stream, new_uid
from millrace.runlog.records.epochs import Epoch
from millrace.runlog.records.frontier import ZERO_CHAIN_HASH, Frontier, chain_hash
from millrace.runlog.records.intents import Intent
from millrace.runlog.recovery.recover import load_committed, load_headers, reappend_committed, reappend_policies
from millrace.runlog.redis.connection import open_redis
from millrace.runlog.redis.lease import Lease
from millrace.runlog.redis.log import AppendResult, Entry, RunLog

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
    "load_committed",
    "load_headers",
    "new_uid",
    "open_redis",
    "reappend_committed",
    "reappend_policies",
]
