"""What fails at one rank fails at all of them, with the same error: none waits in a collective for one that left."""

import contextlib
from collections.abc import Iterator

from google.rpc import status_pb2

from millrace.errors import MillraceError, UnavailableError
from millrace.rpc.status import from_status, to_status
from millrace.trainer.distributed import Gang


@contextlib.contextmanager
def agreed(gang: Gang) -> Iterator[None]:
    """Collective at the end of the block, which has no collectives of its own.

    A rank whose block raises raises that; the others raise the error of the lowest such rank, of the same class. What
    is none of ours reaches them as UnavailableError.
    """
    try:
        yield
    except BaseException as error:  # raised on: the others learn of it, instead of waiting for this rank
        gang.gather(_told(error, gang.rank))
        raise
    for row in gang.gather(b""):
        if row:
            raise from_status(status_pb2.Status.FromString(row))


def _told(error: BaseException, rank: int) -> bytes:
    if not isinstance(error, MillraceError):
        error = UnavailableError(
            f"rank {rank} failed: {type(error).__name__}: {error}", reason="PEER_FAILED", remedy="see its log"
        )
    return to_status(error).SerializeToString()
