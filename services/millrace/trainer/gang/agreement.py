"""What fails at one rank fails at all of them, with the same error: none waits in a collective for one that left.

What ranks tell each other is plain data: bytes as they are, everything else as JSON, an error as a status. Behind JSON
a tuple is a list.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from google.rpc import status_pb2

from millrace.decoding import decode_json, decode_message
from millrace.errors import MillraceError, UnavailableError
from millrace.rpc.status import from_status, to_status

logger = logging.getLogger(__name__)

_BYTES, _JSON, _ERROR = b"b", b"j", b"!"
_REASON = "GANG_MESSAGE_INVALID"
_MAX_JSON_BYTES = 1 << 30  # the pieces of a version that very many ranks made


class Agreeing(Protocol):
    """What is needed of a gang; `distributed.Gang` is one."""

    def agree(self, work: Callable[[], None]) -> list[None]:
        """What `work` gives at every rank; raises at all of them if it raises at one."""
        ...


@contextlib.contextmanager
def agreed(gang: Agreeing) -> Iterator[None]:
    """Collective at the end of the block, which has no collectives of its own: `Gang.agree` without results."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - raised on below
        failure = error

    def outcome() -> None:
        if failure is not None:
            raise failure

    gang.agree(outcome)


def tell(work: Callable[[], Any], *, rank: int) -> tuple[bytes, BaseException | None]:
    """What to tell the other ranks of `work`, and what it raised."""
    try:
        value = work()
        row = _BYTES + value if isinstance(value, bytes) else _JSON + json.dumps(value).encode()
    except BaseException as error:  # noqa: BLE001 - raised on by the caller: the others must not wait for this rank
        logger.warning("this rank failed, and tells the others", extra={"error": f"{type(error).__name__}: {error}"})
        return _ERROR + _status_of(error, rank), error
    return row, None


def is_error(row: bytes) -> bool:
    """Whether a rank told of an error."""
    return row.startswith(_ERROR)


def hear(row: bytes) -> Any:
    """What another rank told; raises the error that it told of."""
    kind, data = row[:1], row[1:]
    if kind == _BYTES:
        return data
    if kind == _JSON:
        return decode_json(data, what="the message of a rank", reason=_REASON, max_bytes=_MAX_JSON_BYTES)
    raise from_status(decode_message(status_pb2.Status, data, what="the error of a rank", reason=_REASON))


def _status_of(error: BaseException, rank: int) -> bytes:
    """What is no error of ours reaches the others as UnavailableError."""
    if not isinstance(error, MillraceError):
        error = UnavailableError(
            f"rank {rank} failed: {type(error).__name__}: {error}", reason="PEER_FAILED", remedy="see its log"
        )
    return to_status(error).SerializeToString()
