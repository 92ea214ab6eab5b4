"""What a run's log has committed."""

from millrace.internal.v1 import batch_pb2
from millrace.runlog import RunLog
from millrace.runlog.recover import load_history


async def load_committed(log: RunLog) -> tuple[batch_pb2.BatchHeader | None, bytes]:
    """Return the last committed header and the chain hash behind it; (None, the origin's) if nothing is committed."""
    committed = await load_history(log)
    return committed.last, committed.chain


async def load_headers(log: RunLog) -> tuple[list[batch_pb2.BatchHeader], bytes]:
    """Return every committed header in the order of the chain, and the chain hash behind the last."""
    committed = await load_history(log)
    return committed.headers, committed.chain
