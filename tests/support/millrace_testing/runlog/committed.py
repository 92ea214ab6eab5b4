"""What a run's log has committed."""

from collections.abc import Iterable

from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header
from millrace.runlog import RunLog
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.revisions import list_headers, read_header
from millrace.runlog.recover import load_history


async def load_committed(log: RunLog) -> tuple[batch_pb2.BatchHeader | None, bytes]:
    """Return the last committed header and the chain hash behind it; (None, the origin's) if nothing is committed."""
    committed = await load_history(log)
    return committed.last, committed.chain


async def load_headers(log: RunLog) -> tuple[list[batch_pb2.BatchHeader], bytes]:
    """Return every committed header in the order of the chain, and the chain hash behind the last."""
    committed = await load_history(log)
    stored = (read_header(log.store, log.names, *at) for at in list_headers(log.store, log.names))
    return [decode_header(data) for data in stored], committed.chain


def known_by(headers: Iterable[batch_pb2.BatchHeader]) -> KnownObjects:
    """Return what these headers name, as their writer has it."""
    known = KnownObjects()
    for header in headers:
        known.note(header, header.SerializeToString(deterministic=True))
    return known
