"""Whether a run has ended, from the store alone: its closing header is committed, or the run is deleted."""

from millrace.errors import NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header
from millrace.runlog.names import Names
from millrace.runlog.origin import load_origin
from millrace.storage.base import ObjectStore


def has_ended(store: ObjectStore, names: Names) -> bool:
    """Whether nobody will ever read this run's rollouts again (blocking). A logarithmic number of requests.

    Headers are written one after the other and stay until the run is deleted, so the newest is found by bisection.
    """
    try:
        first = load_origin(store, names).base_step
    except NotFoundError:
        return True  # deleted to the end, the tombstone included
    if store.head(names.tombstone) is not None:
        return True

    def exists(step: int) -> bool:
        return store.head(names.batch_header(step)) is not None

    if not exists(first):
        return False
    low, width = first, 1
    while exists(low + width):
        low, width = low + width, 2 * width
    high = low + width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return decode_header(store.get(names.batch_header(low))).kind == batch_pb2.BATCH_KIND_CLOSE
