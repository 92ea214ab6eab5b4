"""The one reading position in a run's rollout stream: every entry is taken once, in order.

Everybody who sends work out asks it first: `catch_up` reads what the log holds by now, and `newest` is the entry that a
request names as `dispatched_after`. So an audit can tell that nothing was generated again that the log held.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from millrace.errors import CapacityError, CorruptObjectError, NotFoundError, UnavailableError
from millrace.rollouts.types import Purpose, Rollout, RolloutStatus
from millrace.rollouts.wire import decode_rollout
from millrace.runlog import Entry, RunLog, Stream
from millrace.runlog.records.scores import load_scores
from millrace.runlog.redis.entry import OnDamaged, damaged_entry
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

READ_COUNT = 512
"""Entries taken from the stream at once; a rollout of a long context is about 0.1 MiB."""
MAX_SEEN = 100_000
"""Hashes of entries that are remembered, some 100 bytes each: more than a Redis that restarts can bring back."""
FOLLOW_BLOCK_S = 5.0
STORE_PAUSE_S = 1.0
"""Between two tries of a store that does not answer."""
START = "0"


class RolloutStream:
    """Reads from the first entry, so that a new orchestrator reuses what its predecessor was sent."""

    def __init__(
        self,
        run_log: RunLog,
        *,
        take: Callable[[Rollout], None],
        is_scored: bool = False,
        on_damaged: OnDamaged | None = None,
    ) -> None:
        """`take` gets every rollout once, with its `entry_id`; `on_damaged` is called with each entry that is skipped.

        `is_scored`: a teacher scores the rollouts that are trained on, and they are taken with its scores.
        """
        self._log = run_log
        self._take = take
        self._on_damaged = on_damaged
        self._is_scored = is_scored
        self._cursor = START
        self._rewinds = 0
        self._seen: dict[bytes, None] = {}
        self.newest = ""
        """Id of the newest entry that was read; empty before the first."""

    @property
    def position(self) -> str:
        """Id of the entry of this copy of the stream up to which all were taken; `START` before the first."""
        return self._cursor

    async def follow(self) -> None:
        """Take entries as they come; ends by cancellation."""
        while True:
            await self._poll(block_s=FOLLOW_BLOCK_S)

    async def catch_up(self) -> None:
        """Take every entry that the stream holds now. Safe while `follow` runs."""
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
        rollouts = await self._decode(entries)
        if rewinds != self._rewinds:
            return True  # read behind the old position: others of the new copy come first
        for entry in entries:
            # `catch_up` and `follow` may both have asked for it.
            if entry_key(entry.id) <= entry_key(self._cursor):
                continue
            self._cursor = entry.id
            self.newest = max(self.newest, entry.id, key=entry_key)
            if entry.damage:
                self._skip(entry)
                continue
            if not self._is_new(bytes.fromhex(entry.h)):
                continue
            if (rollout := rollouts.get(entry.id)) is not None:
                self._take(replace(rollout, entry_id=entry.id))
        return bool(entries)

    async def _decode(self, entries: Sequence[Entry]) -> dict[str, Rollout]:
        """The rollouts of entries that were not taken yet, by entry id, without those that are refused."""
        new = [entry for entry in entries if not entry.damage and bytes.fromhex(entry.h) not in self._seen]
        if self._is_scored:  # side by side: each is a request to the store
            found = await asyncio.gather(*(self._rollout(entry) for entry in new))
        else:
            found = [await self._rollout(entry) for entry in new]
        return {entry.id: rollout for entry, rollout in zip(new, found, strict=True) if rollout is not None}

    async def _rollout(self, entry: Entry) -> Rollout | None:
        try:
            rollout = decode_rollout(entry.d)
            needs_scores = rollout.purpose is Purpose.TRAIN and rollout.status is RolloutStatus.OK
            return await self._scored(rollout) if self._is_scored and needs_scores else rollout
        except (CorruptObjectError, NotFoundError) as error:
            # The entry's hash held, so its writer encoded it wrongly: the member stays missing and is played again.
            logger.error("rollout refused", extra={"entry": entry.id, "error": str(error)})
            if isinstance(error, CorruptObjectError):
                self._skip(damaged_entry(entry.id, error))
            return None

    def _skip(self, entry: Entry) -> None:
        """An entry holds no rollout: its member stays missing, and is appended again or played again."""
        if self._on_damaged is not None:
            self._on_damaged(Stream.ROLLOUTS, entry)

    async def _scored(self, rollout: Rollout) -> Rollout:
        """With the teacher's scores, which its env-server kept before it appended; waits while the store is away."""
        with waits.waiting("the teacher's scores of a rollout", waits_on="object store", quiet_s=STORE_PAUSE_S):
            while True:
                try:
                    return await asyncio.to_thread(load_scores, self._log.store, self._log.names, rollout)
                except (UnavailableError, CapacityError) as error:
                    logger.warning("scores not read, trying again", extra={"problem": str(error)})
                    await asyncio.sleep(STORE_PAUSE_S)

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
    if not entry_id:
        return 0, 0
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or "0")
