"""What fails at one rank fails at all of them, with the same error: none waits in a collective for one that left."""

import contextlib
from collections.abc import Iterator

from google.rpc import status_pb2

from millrace.decoding import decode_message
from millrace.errors import MillraceError, UnavailableError
from millrace.rpc.status import from_status, to_status
from millrace.telemetry import logging
from millrace.trainer.distributed import Gang

log = logging.getLogger(__name__)


@contextlib.contextmanager
def agreed(gang: Gang) -> Iterator[None]:
    """Collective at the end of the block, which has no collectives of its own.

    If blocks raise, every rank raises the error of the lowest rank whose block did, of the same class; what is none of
    ours reaches the others as UnavailableError.
    """
    try:
        yield
    except BaseException as error:  # raised on: the others learn of it, instead of waiting for this rank
        if not gang.is_alone:
            log.warning("this rank failed, and tells the others", extra={"error": f"{type(error).__name__}: {error}"})
        rows = gang.gather(_told(error, gang.rank))
        first = next(rank for rank, row in enumerate(rows) if row)
        if first == gang.rank or not isinstance(error, Exception):
            raise
        raise _heard(rows[first]) from error
    for row in gang.gather(b""):
        if row:
            raise _heard(row)


def _heard(row: bytes) -> MillraceError:
    """The error that another rank told of."""
    status = decode_message(status_pb2.Status, row, what="the error of a rank", reason="GANG_MESSAGE_INVALID")
    return from_status(status)


def _told(error: BaseException, rank: int) -> bytes:
    if not isinstance(error, MillraceError):
        error = UnavailableError(
            f"rank {rank} failed: {type(error).__name__}: {error}", reason="PEER_FAILED", remedy="see its log"
        )
    return to_status(error).SerializeToString()
