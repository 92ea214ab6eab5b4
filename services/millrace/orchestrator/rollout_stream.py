"""The one reading position in a run's rollout stream: every entry is taken once, in order.

Everybody who sends work out asks it first: `catch_up` reads what the log holds by now, and `newest` is the entry that a
request names as `dispatched_after`. So an audit can tell that nothing was generated again that the log held.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from millrace.errors import CorruptObjectError
from millrace.rollouts.types import Rollout
from millrace.rollouts.wire import decode_rollout
from millrace.runlog import RunLog

log = logging.getLogger(__name__)

READ_COUNT = 512
"""Entries taken from the stream at once; a rollout of a long context is about 0.1 MiB."""
MAX_SEEN = 100_000
"""Hashes of entries that are remembered, some 100 bytes each: more than a Redis that restarts can bring back."""
FOLLOW_BLOCK_S = 5.0
START = "0"


class RolloutStream:
    """Reads from the first entry, so that a new orchestrator reuses what its predecessor was sent."""

    def __init__(self, run_log: RunLog) -> None:
        self._log = run_log
        self._cursor = START
        self._rewinds = 0
        self._seen: dict[bytes, None] = {}
        self.newest = ""
        """Id of the newest entry that was read; empty before the first."""
        self.take: Callable[[Rollout], None] = _nobody_takes
        """Gets every rollout once, with its `entry_id`; set by who sorts them."""

    @property
    def position(self) -> str:
        """Id of the entry of this copy of the stream up to which all were taken; `START` before the first."""
        return self._cursor

    async def follow(self) -> None:
        """Take entries as they come; ends by cancellation."""
        while True:
            await self._poll(block_s=FOLLOW_BLOCK_S)

    async def catch_up(self) -> None:
        """Take every entry that the stream holds now. Safe beside `follow`."""
        while await self._poll(block_s=0.0):
            pass

    def rewind(self) -> None:
        """Read from the first entry again, because Redis came back with another copy of the stream.

        What was taken before is known by its hash, also where it was appended again under a new id.
        """
        self._cursor = START
        self._rewinds += 1

    async def _poll(self, *, block_s: float) -> bool:
        rewinds = self._rewinds
        entries = await self._log.read("rollouts", after=self._cursor, count=READ_COUNT, block_s=block_s)
        if rewinds != self._rewinds:
            return True  # read behind the old position: others of the new copy come first
        for entry in entries:
            # `catch_up` and `follow` may both have asked for it.
            if entry_key(entry.id) <= entry_key(self._cursor):
                continue
            self._cursor = entry.id
            self.newest = max(self.newest, entry.id, key=entry_key)
            if not self._is_new(bytes.fromhex(entry.h)):
                continue
            try:
                rollout = decode_rollout(entry.d)
            except CorruptObjectError as error:
                # The entry's hash held, so its writer encoded it wrongly: the member stays missing and is played again.
                log.error("rollout refused", extra={"entry": entry.id, "error": str(error)})
                continue
            self.take(replace(rollout, entry_id=entry.id))
        return bool(entries)

    def _is_new(self, entry_hash: bytes) -> bool:
        """Whether an entry with that content was not taken before; remembers it."""
        if entry_hash in self._seen:
            return False
        self._seen[entry_hash] = None
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return True


def entry_key(entry_id: str) -> tuple[int, int]:
    """Order of stream ids, which are two numbers; an empty id is before all."""
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds or 0), int(sequence or 0)


def _nobody_takes(rollout: Rollout) -> None:
    raise AssertionError("the stream is read before anybody takes its rollouts")
