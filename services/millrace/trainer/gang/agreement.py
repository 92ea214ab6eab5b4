"""Agreement among ranks: an error of one rank is raised at all of them; and the roll call that names a late rank.

Ranks exchange plain data: bytes as they are, everything else as JSON, an error as a status. After JSON a tuple is a
list.
"""

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from google.rpc import status_pb2
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from millrace.decoding import decode_json, decode_message, decode_object
from millrace.errors import CorruptObjectError, MillraceError, UnavailableError
from millrace.rpc.status import from_status, to_status
from millrace.telemetry import waits

# The roll call: which rank holds up the gang.
#
# A collective returns when every rank has joined it, and does not say which one is missing. So a thread of every rank
# writes a sign of life into the store through which torchrun brought the gang together. Rank 0 reads the signs, and
# registers a wait for each rank that shows none (it is stopped, or its machine is gone), or that waits for something
# outside of collectives. A rank that failed amid a step, where the others wait for it, puts its error into its sign:
# rank 0 reports it.

PEERS = "the other ranks of the gang"
"""What a rank waits for in a collective."""
PERIOD_S = 1.0
SILENT_LOOKS = 8
"""Checks without a new sign after which a rank is named. A rank 0 that was frozen has not checked meanwhile."""
OWN_WAIT_S = 10.0
"""Age from which a rank's wait outside of collectives is in its sign of life."""
_DEADLINE_S = 20.0  # a wait that is overdue is the one that `millrace run why` follows
STORE_S = 10.0
"""Bound of one request to the store."""
_LONGEST_WAIT = 300
_LONGEST_MESSAGE = 2000
_MAX_SHOWN_BYTES = 16_000  # JSON takes up to six bytes for a character


@dataclass(frozen=True, slots=True)
class Failure:
    """The error with which a rank gave up the run."""

    rank: int
    reason: str
    message: str


OnFailure = Callable[[Failure], None]


@dataclass(slots=True)
class _Seen:
    """What rank 0 knows of another rank."""

    shown: bytes = b""
    missed: int = 0
    wait: waits.LastingWait = field(default_factory=waits.LastingWait)


class RollCall:
    """A thread that writes this rank's sign of life and, at rank 0, reads the others'. One per process of a gang."""

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        """Prepare the signs of life of rank `rank`.

        `store` must be used by nothing else, because requests wait for each other.
        """
        store.set_timeout(timedelta(seconds=STORE_S))
        self._store = store
        self._rank = rank
        self._peers = {peer: _Seen() for peer in range(world_size) if peer != rank} if rank == 0 else {}
        self._world_size = world_size
        self._failure: Failure | None = None
        self._on_failure: OnFailure | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roll-call", daemon=True)

    def start(self) -> None:
        """Write the first sign of life, and start the thread that writes the next ones."""
        # Not by the thread, whose first turn may come late: rank 0 would find no sign of this rank.
        self._store.set(_key(self._rank), _shown(0, None))
        self._thread.start()

    def show_failure(self, *, reason: str, message: str) -> None:
        """Put the error with which this rank gives up the run into its signs of life, where rank 0 reads it."""
        self._failure = Failure(self._rank, reason, message[:_LONGEST_MESSAGE])

    def watch_failures(self, on_failure: OnFailure) -> None:
        """Set the function that rank 0's thread calls with each failure of another rank, again at every check."""
        self._on_failure = on_failure

    def stop(self) -> None:
        """Stop the thread and wait for its end, at most the bound of a request to the store.

        A process that exits while one of its threads is inside torch is aborted: the thread cannot return to Python.
        """
        self._stopping.set()
        self._thread.join(STORE_S)

    def _run(self) -> None:
        """Write this rank's sign of life every second and, at rank 0, check the others', until stopped."""
        is_away = False
        count = 0
        while not self._stopping.wait(PERIOD_S):
            count += 1
            try:
                self._store.set(_key(self._rank), _shown(count, self._failure))
                for peer, seen in self._peers.items():
                    self._look(peer, seen)
                is_away = False
            except dist.DistError as error:  # the agent of torchrun ends first, or is gone for a while
                if not is_away and not self._stopping.is_set():
                    logger.warning("the ranks' meeting place does not answer", extra={"error": str(error)})
                is_away = True
        # Nothing checks these waits any more, so that nothing else would end them.
        for seen in self._peers.values():
            seen.wait.over()

    def _look(self, peer: int, seen: _Seen) -> None:
        """Read the sign of life of rank `peer`, and update `seen`, what is known of that rank.

        Registers a wait for the rank if it is silent or waits itself, else ends that wait. Calls `on_failure` if the
        sign has a failure.
        """
        # `get` of a key that was never set would wait for the store's timeout.
        shown = self._store.get(_key(peer)) if self._store.check([_key(peer)]) else b""
        # Checks are counted and not seconds: no rank was late while rank 0 itself was stopped.
        seen.missed = 0 if shown != seen.shown else seen.missed + 1
        seen.shown = shown
        if (failure := _failure(shown)) is not None and self._on_failure is not None:
            self._on_failure(failure)
        if seen.missed >= SILENT_LOOKS:
            who = _describe(peer, self._world_size, shown)
            seen.wait.on(f"{who}, which does not show itself", key="silent", deadline_s=_DEADLINE_S)
        elif own := _fields(shown).get("wait"):
            who = _describe(peer, self._world_size, shown)
            seen.wait.on(f"{who}, which waits for {own}", key="waits", deadline_s=_DEADLINE_S)
        else:
            seen.wait.over()


def _key(rank: int) -> str:
    return f"roll-call/{rank}"


def _shown(count: int, failure: Failure | None) -> str:
    """Encode a sign of life of this process.

    `count` differs in each, `failure` is the error that it reports, if any.
    """
    sign = {"count": count, "pid": os.getpid(), "host": socket.gethostname(), "wait": next(_own_waits(), "")}
    return json.dumps(sign if failure is None else {**sign, "failure": asdict(failure)})


def _failure(shown: bytes) -> Failure | None:
    """Return the failure in a rank's encoded sign of life; None if there is none."""
    match _fields(shown).get("failure"):
        case {"rank": int(rank), "reason": str(reason), "message": str(message)}:
            return Failure(rank, reason, message)
    return None


def _own_waits() -> Iterator[str]:
    """Yield the reasons of this process's waits of more than 10 s outside of collectives, the longest first."""
    for wait in waits.snapshot("", min_age_s=OWN_WAIT_S):
        if not wait.reason.startswith(PEERS):
            yield wait.reason[:_LONGEST_WAIT]


def _describe(rank: int, world_size: int, shown: bytes) -> str:
    """Name a rank for messages, with process and host from its sign of life `shown`, if that has them."""
    fields = _fields(shown)
    where = f" (process {fields.get('pid')} on {fields.get('host')})" if fields else ""
    return f"rank {rank} of {world_size}{where}"


def _fields(shown: bytes) -> dict[str, object]:
    """Decode a rank's sign of life; return an empty dict if it is malformed."""
    try:
        return decode_object(shown, what="the sign of a rank", reason="SIGN_DAMAGED", max_bytes=_MAX_SHOWN_BYTES)
    except CorruptObjectError:
        return {}


logger = logging.getLogger(__name__)

_BYTES, _JSON, _ERROR = b"b", b"j", b"!"
_REASON = "GANG_MESSAGE_INVALID"
_MAX_JSON_BYTES = 1 << 30  # the pieces of a version that very many ranks made


class Agreeing(Protocol):
    """The part of `distributed.Gang` that `agreed` needs."""

    def agree(self, work: Callable[[], None]) -> list[None]:
        """Return the results of `work` at all ranks; raise at all ranks if it raises at one. Collective."""
        ...


@contextlib.contextmanager
def agreed(gang: Agreeing) -> Iterator[None]:
    """Raise at every rank, at the block's end, if the block raised at one. Collective at its end.

    The block must have no collectives of its own. The error is that of the lowest rank that raised.
    """
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - raised on below
        failure = error

    def outcome() -> None:
        if failure is not None:
            raise failure

    gang.agree(outcome)


def encode_result(work: Callable[[], Any], *, rank: int) -> tuple[bytes, BaseException | None]:
    """Run `work`; return its result or error encoded for the other ranks, and the error itself, or None. Raise nothing.

    `rank` is this process's, for messages.
    """
    try:
        value = work()
        row = _BYTES + value if isinstance(value, bytes) else _JSON + json.dumps(value).encode()
    except BaseException as error:  # noqa: BLE001 - raised on by the caller: the others must not wait for this rank
        logger.warning("this rank failed, and tells the others", extra={"error": f"{type(error).__name__}: {error}"})
        return _ERROR + _status_of(error, rank), error
    return row, None


def is_error(row: bytes) -> bool:
    """Return whether a message of `encode_result` has an error instead of a result."""
    return row.startswith(_ERROR)


def decode_result(row: bytes) -> Any:
    """Return the result in a message of `encode_result`; raise the error if the message has one."""
    kind, data = row[:1], row[1:]
    if kind == _BYTES:
        return data
    if kind == _JSON:
        return decode_json(data, what="the message of a rank", reason=_REASON, max_bytes=_MAX_JSON_BYTES)
    raise from_status(decode_message(status_pb2.Status, data, what="the error of a rank", reason=_REASON))


def _status_of(error: BaseException, rank: int) -> bytes:
    """Encode an error of rank `rank` for the other ranks.

    An exception that is no MillraceError becomes UnavailableError.
    """
    if not isinstance(error, MillraceError):
        error = UnavailableError(
            f"rank {rank} failed: {type(error).__name__}: {error}", reason="PEER_FAILED", remedy="see its log"
        )
    return to_status(error).SerializeToString()
