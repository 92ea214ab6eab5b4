"""The log of a run (docs/architecture.md): Redis streams in front, the object store as the truth."""

from millrace.runlog.commit import commit_batch
from millrace.runlog.connection import open_redis
from millrace.runlog.epochs import Epoch
from millrace.runlog.event_writer import EventWriter
from millrace.runlog.events import EventReader
from millrace.runlog.frontier import ZERO_CHAIN_HASH, Frontier, chain_hash
from millrace.runlog.intents import Intent
from millrace.runlog.lease import Lease
from millrace.runlog.log import AppendResult, Entry, RunLog
from millrace.runlog.names import Names, Stream, new_uid
from millrace.runlog.recover import load_committed, load_headers, reappend_committed, reappend_policies

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
