"""The book of a run's ordinals, open, whole or resolved, and the one reading position in its rollout stream.

    not drawn ──open──▶ open ──add──▶ whole ──settle (trained or without advantage)──▶ pending ──committing──▶ frontier
                          └──────────drop (stale, surplus, error, cancelled, ...)─────────▲

Everything here can be rebuilt from the committed headers and the rollouts in the log. Each rollout is archived once, by
the header that resolves its ordinal.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from millrace.errors import CapacityError, CorruptObjectError, NotFoundError, UnavailableError
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.play.play import Arrival, Play, PlayState
from millrace.orchestrator.play.pools import GroupResult
from millrace.rollouts.types import Purpose, Rollout, RolloutStatus
from millrace.rollouts.wire import decode_rollout
from millrace.runlog import Entry, Frontier, RunLog, Stream
from millrace.runlog.records.token_logs import load_scores
from millrace.runlog.redis.entry import OnDamaged, damaged_entry
from millrace.telemetry import faults, waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """How one ordinal ends in the next header."""

    ordinal: int
    env: str
    task_id: str
    reason: str = ""
    """Empty: trained."""
    attempts: int = 1
    result: GroupResult | None = None
    """What its group was worth; None unless every member came."""

    @classmethod
    def of(cls, play: Play, reason: str) -> "Resolved":
        """Return how `play` ends in the next header: trained if `reason` is empty, else dropped for `reason`.

        The task's id is taken from its rollouts; it is the task's index where none came.
        """
        task, rewards = play.task, [rollout.reward for rollout in play.rollouts()]
        task_id = next((rollout.task_id for rollout in play.members.values()), f"{task.task_index}")
        result = None
        if not play.missing:
            result = GroupResult(env=task.env, task_index=task.task_index, reward=sum(rewards) / len(rewards))
        return cls(
            ordinal=play.ordinal,
            env=task.env,
            task_id=task_id,
            reason=reason,
            attempts=play.attempt + 1,
            result=result,
        )


def count_dropped(resolved: Sequence[Resolved]) -> Counter[str]:
    """Return how many ordinals are dropped, by reason."""
    return Counter(item.reason for item in resolved if item.reason)


def resolutions(resolved: Sequence[Resolved]) -> list[batch_pb2.Resolution]:
    """Return the messages of resolved ordinals for a header, in order of ordinal: trained, or dropped for a reason."""
    return [
        batch_pb2.Resolution(
            ordinal=item.ordinal,
            env=item.env,
            task_id=item.task_id,
            outcome=batch_pb2.ORDINAL_OUTCOME_DROPPED if item.reason else batch_pb2.ORDINAL_OUTCOME_TRAINED,
            reason=item.reason,
            attempts=item.attempts,
        )
        for item in sorted(resolved, key=lambda item: item.ordinal)
    ]


class Book:
    """What is played for training, and what every ordinal came to."""

    def __init__(
        self,
        *,
        count: Callable[[Rollout], None] = lambda rollout: None,
        on_resolved: Callable[[Play], None] = lambda play: None,
    ) -> None:
        """Make an empty book.

        `count` is called with every rollout that is no duplicate, `on_resolved` with every play that ends.
        """
        self._count = count
        self._on_resolved = on_resolved
        self.plays: dict[int, Play] = {}
        """Open and whole plays by ordinal; the whole ones in the order in which they became it."""
        self.changed = asyncio.Event()
        """Set when a play became whole, or is to be placed again, or was resolved."""
        self.step = 0
        """Step that is cut next."""
        self.frontier = Frontier()
        """Ordinals that committed headers resolve."""
        self.num_duplicates = 0
        self._counted_until = ""
        self.cursor = 0
        """Every ordinal below it was drawn."""
        self._rollouts: dict[int, list[Rollout]] = {}
        self._pending: list[Resolved] = []
        self._archive: list[Rollout] = []
        self._committing: frozenset[int] = frozenset()

    def restore(self, *, step: int, frontier: Frontier, num_duplicates: int = 0, counted_until: str = "") -> None:
        """Continue a run at `step`, the one that is cut next, where committed headers resolve the ordinals of
        `frontier`.

        `num_duplicates` are the discarded rollouts that those headers count, up to the entry `counted_until` of the
        stream.
        """
        self.step, self.frontier = step, frontier
        self.num_duplicates, self._counted_until = num_duplicates, counted_until
        self.cursor = frontier.resolved_below

    @property
    def open(self) -> list[Play]:
        """Return the plays of training that still lack rollouts."""
        return [play for play in self.plays.values() if play.is_open]

    @property
    def whole(self) -> list[Play]:
        """Return the plays of training whose every member came back OK, in the order in which they became so."""
        return [play for play in self.plays.values() if play.state is PlayState.WHOLE]

    @property
    def pending(self) -> Sequence[Resolved]:
        """Return how the ordinals end that the next header resolves."""
        return self._pending

    @property
    def drawn_below(self) -> int:
        """Return an ordinal above every one that is played or resolved: none from it on was drawn."""
        # All four places where a drawn ordinal can be: in play, in a committed header, in the one under way, or
        # pending.
        known = [*self.plays, *self.frontier.resolved_above, *self._committing]
        return max([self.cursor, *(ordinal + 1 for ordinal in known), *(item.ordinal + 1 for item in self._pending)])

    def is_resolved(self, ordinal: int) -> bool:
        """Return whether an ordinal is resolved: by a committed header, by the header being committed, or for the
        next one.
        """
        is_known = self.frontier.is_resolved(ordinal) or ordinal in self._committing
        return is_known or any(item.ordinal == ordinal for item in self._pending)

    def next_ordinal(self) -> int:
        """Return the smallest ordinal that is neither resolved nor played; nothing reserves it."""
        while self.cursor in self.plays or self.is_resolved(self.cursor):
            self.cursor += 1
        return self.cursor

    def add(self, rollout: Rollout) -> Arrival:
        """Put a rollout, with its `entry_id`, into the play of its ordinal, and return what that did.

        A play that cannot become whole any more is resolved. A rollout that no play wants counts as a duplicate; it is
        archived with the play of its ordinal, if there is one.
        """
        play = self.plays.get(rollout.ordinal)
        arrival = Arrival.DUPLICATE if play is None else play.add(rollout)
        if arrival is Arrival.DUPLICATE:
            # After a takeover the stream is read from its beginning: earlier duplicates are in the header's count
            # already.
            if entry_key(rollout.entry_id) > entry_key(self._counted_until):
                self.num_duplicates += 1
            rollout = replace(rollout, is_duplicate=True)
        else:
            self._count(rollout)
        if play is not None:
            self._rollouts.setdefault(play.ordinal, []).append(rollout)
            if arrival is Arrival.HOPELESS:
                self._remove(play)
            elif arrival is Arrival.FINISHED:
                # Moved to the end of the dictionary, whose order is the order of arrival in which batches are cut.
                self.plays[play.ordinal] = self.plays.pop(play.ordinal)
                faults.reach(faults.Point.ORCHESTRATOR_AFTER_ROLLOUTS, step=self.step)
        if arrival is not Arrival.OPEN:
            self.changed.set()
        return arrival

    def drop(self, plays: Sequence[Play], *, reason: str) -> None:
        """Resolve plays as dropped for `reason`; the next header records them, and archives their rollouts."""
        for play in plays:
            play.resolve(reason)
            self._remove(play)

    def settle(self, resolved: Sequence[Resolved]) -> None:
        """Resolve the plays of a batch that was cut, as each item says.

        The next header records them and archives their rollouts.
        """
        for item in resolved:
            play = self.plays.pop(item.ordinal)
            play.resolve(item.reason)
            self._on_resolved(play)
            self._archive += self._archived(play)
        self._pending += resolved

    def close(self, reason: str) -> None:
        """Resolve every drawn ordinal as dropped for `reason`, for the closing header.

        Ordinals of a batch that could not be committed are among them. Of an ordinal that a predecessor drew, and of
        which no rollout came, only the number is known.
        """
        self.drop([*self.open, *self.whole], reason=reason)
        self._pending = [replace(item, reason=item.reason or reason) for item in self._pending]
        # Every drawn ordinal must end in some header; these were drawn by a predecessor and came to nothing.
        for ordinal in range(self.frontier.resolved_below, self.drawn_below):
            if not self.is_resolved(ordinal):
                self._pending.append(Resolved(ordinal=ordinal, env="", task_id="", reason=reason, attempts=0))

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        """Archive these rollouts with the next header."""
        self._archive += rollouts

    def keep_evaluated(self, rollout: Rollout, *, counts: bool) -> None:
        """Archive a rollout of an evaluation with the next header, unless an earlier header has archived it.

        Without `counts` it is marked as a duplicate: no report counts it, because its evaluation began anew.
        """
        if entry_key(rollout.entry_id) > entry_key(self._counted_until):
            self._archive.append(rollout if counts else replace(rollout, is_duplicate=True))

    def abandon(self, rollouts: Sequence[Rollout], *, reason: str) -> None:
        """Resolve as dropped for `reason`, for a closing header, the ordinals that a predecessor left open.

        `rollouts` are those in the log; those of training whose ordinal is not resolved are counted and archived. Of an
        ordinal without any only the number is known.
        """
        left = [r for r in rollouts if r.purpose is Purpose.TRAIN and not self.frontier.is_resolved(r.ordinal)]
        self._archive += left
        # After a lost answer an env-server appends a rollout twice, which counts once.
        for rollout in {(r.ordinal, r.member, r.attempt): r for r in left}.values():
            self._count(rollout)
        # The last of equal keys wins: the latest attempt of each ordinal.
        newest = {rollout.ordinal: rollout for rollout in sorted(left, key=lambda rollout: rollout.attempt)}
        # Nothing is known of ordinals above it: if one was drawn, no rollout of it is in the log.
        highest = max([*newest, *self.frontier.resolved_above], default=-1)
        for ordinal in range(self.frontier.resolved_below, highest + 1):
            if self.is_resolved(ordinal):
                continue
            item = Resolved(ordinal=ordinal, env="", task_id="", reason=reason, attempts=0)
            if rollout := newest.get(ordinal):
                item = replace(item, env=rollout.env, task_id=rollout.task_id, attempts=rollout.attempt + 1)
            self._pending.append(item)

    @contextmanager
    def committing(self) -> Iterator[list[Rollout]]:
        """Yield the rollouts to archive with the header that resolves everything pending.

        The caller commits it in the block.

        After the block the next step begins. If the block raises, the next header resolves and archives the same. What
        is dropped during the block is in the next header.
        """
        resolved, rollouts = self._pending, self._archive
        # Emptied before the commit, so that what is dropped during the commit goes into the next header.
        self._pending, self._archive = [], []
        self._committing = frozenset(item.ordinal for item in resolved)
        try:
            yield rollouts
        except BaseException:  # cleans up, then raises: if the run fails meanwhile, the closing header resolves them
            self._pending, self._archive = [*resolved, *self._pending], [*rollouts, *self._archive]
            self._committing = frozenset()
            raise
        self.frontier = self.frontier.resolve(item.ordinal for item in resolved)
        self._committing = frozenset()
        self.step += 1

    def oldest_entry(self) -> str | None:
        """Return the smallest stream id among the rollouts that no committed header archives; None if there is none.

        A successor needs the stream from there on.
        """
        kept = [self._archive, *self._rollouts.values()]
        entries = [rollout.entry_id for rollouts in kept for rollout in rollouts if rollout.entry_id]
        return min(entries, key=entry_key, default=None)

    def _remove(self, play: Play) -> None:
        """Take a play that is over out of the book; the next header resolves its ordinal and archives its rollouts."""
        self._pending.append(Resolved.of(play, play.reason))
        self._on_resolved(play)
        self._archive += self._archived(self.plays.pop(play.ordinal))

    def _archived(self, play: Play) -> list[Rollout]:
        """Forget the rollouts of a resolved play and return them for the archive.

        OK ones that its group did not use, of a task that is scored whole, are marked as duplicates.
        """
        kept = self._rollouts.pop(play.ordinal, [])
        if not play.is_scored_whole:
            return kept
        # Whole members of an attempt that was given up were discarded, too.
        used = {id(member) for member in play.members.values()}
        return [
            replace(rollout, is_duplicate=True)
            if rollout.status == RolloutStatus.OK and id(rollout) not in used
            else rollout
            for rollout in kept
        ]


# The one reading position in a run's rollout stream: every entry is taken once, in order.
#
# Everybody who sends work out asks it first: `catch_up` reads what the log holds by now, and `newest` is the entry
# that a request names as `dispatched_after`. So an audit can tell that nothing was generated again that the log held.

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
        prepare: Callable[[Sequence[Rollout]], Awaitable[None]] | None = None,
        is_scored: bool = False,
        on_damaged: OnDamaged | None = None,
    ) -> None:
        """Make a reader of the log's rollout stream, at the beginning.

        `take` gets every rollout once, with its `entry_id`; `prepare` (None: nothing) gets some before, all that `take`
        gets among them, and may await what that needs; `on_damaged` (None: nothing) gets the stream and each
        skipped entry. With `is_scored` a teacher scores the rollouts that are trained on, and they are taken with its
        scores.
        """
        self._log = run_log
        self._take = take
        self._prepare = prepare
        self._on_damaged = on_damaged
        self._is_scored = is_scored
        self._cursor = START
        self._rewinds = 0
        self._seen: dict[bytes, None] = {}
        self.newest = ""
        """Id of the newest entry that was read; empty before the first."""

    @property
    def position(self) -> str:
        """Return the id of the last entry that was taken, in this copy of the stream; `START` before the first."""
        return self._cursor

    async def follow(self) -> None:
        """Read the stream for ever, and pass each new rollout to `take`; the caller cancels it."""
        while True:
            await self._poll(block_s=FOLLOW_BLOCK_S)

    async def catch_up(self) -> None:
        """Pass every rollout that the stream holds now, and that was not passed yet, to `take`.

        Safe while `follow` runs.
        """
        while await self._poll(block_s=0.0):
            pass

    def rewind(self) -> None:
        """Read on from the first entry, because Redis came back with another copy of the stream.

        What was taken before is recognised by its hash, also where it was appended again under a new id.
        """
        self._cursor = START
        self._rewinds += 1

    async def _poll(self, *, block_s: float) -> bool:
        """Read the next entries, waiting up to `block_s` seconds for one, and pass their rollouts to `take`.

        Returns whether there may be more: False if no entry was there.
        """
        # A rewind may happen during the awaits below; what they return is then of the old position.
        rewinds = self._rewinds
        entries = await self._log.read("rollouts", after=self._cursor, count=READ_COUNT, block_s=block_s)
        rollouts = await self._decode(entries)
        if rollouts and self._prepare is not None:
            await self._prepare(list(rollouts.values()))
        if rewinds != self._rewinds:
            # These were read after the old position, and the new copy may have others before them.
            return True
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
        """Return by entry id the rollouts of entries whose content is new, without those that cannot be decoded."""
        new = [entry for entry in entries if not entry.damage and bytes.fromhex(entry.h) not in self._seen]
        # Side by side, because each is a request to the store for the teacher's scores.
        if self._is_scored:
            found = await asyncio.gather(*(self._rollout(entry) for entry in new))
        else:
            found = [await self._rollout(entry) for entry in new]
        return {entry.id: rollout for entry, rollout in zip(new, found, strict=True) if rollout is not None}

    async def _rollout(self, entry: Entry) -> Rollout | None:
        """Return an entry's rollout, with the teacher's scores where it needs them.

        None, and report it, if it cannot be read.
        """
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
        """Report an entry that holds no rollout to `on_damaged`; the rollout's member is appended or played again."""
        if self._on_damaged is not None:
            self._on_damaged(Stream.ROLLOUTS, entry)

    async def _scored(self, rollout: Rollout) -> Rollout:
        """Return the rollout with the teacher's scores, which its env-server stored before it appended the rollout.

        Waits without a limit while the store does not answer.
        """
        with waits.waiting("the teacher's scores of a rollout", waits_on="object store", quiet_s=STORE_PAUSE_S):
            while True:
                try:
                    return await asyncio.to_thread(load_scores, self._log.store, self._log.names, rollout)
                except (UnavailableError, CapacityError) as error:
                    logger.warning("scores not read, trying again", extra={"problem": str(error)})
                    await asyncio.sleep(STORE_PAUSE_S)

    def _is_new(self, entry_hash: bytes) -> bool:
        """Return whether an entry's content, known by its hash, was not taken before, and remember it."""
        if entry_hash in self._seen:
            return False
        self._seen[entry_hash] = None
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        return True


def entry_key(entry_id: str) -> tuple[int, int]:
    """Return the sort key of a stream id, which is two numbers; an empty id comes first."""
    if not entry_id:
        return 0, 0
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or "0")
