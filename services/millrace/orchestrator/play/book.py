"""The book of a run's ordinals: which are open or whole, and which are resolved, in a header or for the next one.

    not drawn ──open──▶ open ──add──▶ whole ──settle (trained or without advantage)──▶ pending ──committing──▶ frontier
                          └──────────drop (stale, surplus, error, cancelled, ...)─────────▲

Everything here can be rebuilt from the committed headers and the rollouts in the log. Each rollout is archived once, by
the header that resolves its ordinal.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from millrace.orchestrator.play.play import Arrival, Play, PlayState
from millrace.orchestrator.play.pools import GroupResult
from millrace.orchestrator.play.rollout_stream import entry_key
from millrace.rollouts.types import Purpose, Rollout, RolloutStatus
from millrace.runlog import Frontier
from millrace.telemetry import faults


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
        """How `play` ends: trained if `reason` is empty, else dropped for it."""
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


class Book:
    """What is played for training, and what every ordinal came to."""

    def __init__(
        self,
        *,
        count: Callable[[Rollout], None] = lambda rollout: None,
        on_resolved: Callable[[Play], None] = lambda play: None,
    ) -> None:
        """`count` is called with every rollout that is no duplicate, `on_resolved` with every play that is over."""
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
        """Continue behind a header. Duplicates up to the entry `counted_until` of the stream are counted already."""
        self.step, self.frontier = step, frontier
        self.num_duplicates, self._counted_until = num_duplicates, counted_until
        self.cursor = frontier.resolved_below

    @property
    def open(self) -> list[Play]:
        """The plays whose members are still to come."""
        return [play for play in self.plays.values() if play.is_open]

    @property
    def whole(self) -> list[Play]:
        """The plays that can be trained on, in the order in which they became whole."""
        return [play for play in self.plays.values() if play.state is PlayState.WHOLE]

    @property
    def pending(self) -> Sequence[Resolved]:
        """What the next header resolves."""
        return self._pending

    @property
    def drawn_below(self) -> int:
        """An ordinal above every one that is played or resolved."""
        known = [*self.plays, *self.frontier.resolved_above, *self._committing]
        return max([self.cursor, *(ordinal + 1 for ordinal in known), *(item.ordinal + 1 for item in self._pending)])

    def is_resolved(self, ordinal: int) -> bool:
        """Whether an ordinal is resolved: by a committed header, by the one under way, or for the next one."""
        is_known = self.frontier.is_resolved(ordinal) or ordinal in self._committing
        return is_known or any(item.ordinal == ordinal for item in self._pending)

    def next_ordinal(self) -> int:
        """Smallest ordinal that is neither resolved nor played."""
        while self.cursor in self.plays or self.is_resolved(self.cursor):
            self.cursor += 1
        return self.cursor

    def add(self, rollout: Rollout) -> Arrival:
        """Put a rollout, with its `entry_id`, into its play; one that no play wants is discarded and counted."""
        play = self.plays.get(rollout.ordinal)
        arrival = Arrival.DUPLICATE if play is None else play.add(rollout)
        if arrival is Arrival.DUPLICATE:
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
                self.plays[play.ordinal] = self.plays.pop(play.ordinal)
                faults.reach(faults.Point.ORCHESTRATOR_AFTER_ROLLOUTS, step=self.step)
        if arrival is not Arrival.OPEN:
            self.changed.set()
        return arrival

    def drop(self, plays: Sequence[Play], *, reason: str) -> None:
        """Resolve ordinals that are not trained on; the next header says so."""
        for play in plays:
            play.resolve(reason)
            self._remove(play)

    def settle(self, resolved: Sequence[Resolved]) -> None:
        """Resolve the ordinals of a batch that was cut; the next header says so."""
        for item in resolved:
            play = self.plays.pop(item.ordinal)
            play.resolve(item.reason)
            self._on_resolved(play)
            self._archive += self._archived(play)
        self._pending += resolved

    def close(self, reason: str) -> None:
        """Drop every play before the closing header. A batch that could not be committed trains nobody.

        What a predecessor had drawn, and nothing came back from, is resolved, too: only its number is known.
        """
        self.drop([*self.open, *self.whole], reason=reason)
        self._pending = [replace(item, reason=item.reason or reason) for item in self._pending]
        for ordinal in range(self.frontier.resolved_below, self.drawn_below):
            if not self.is_resolved(ordinal):
                self._pending.append(Resolved(ordinal=ordinal, env="", task_id="", reason=reason, attempts=0))

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        """Archive rollouts with the next header."""
        self._archive += rollouts

    def keep_evaluated(self, rollout: Rollout, *, counts: bool) -> None:
        """Archive a rollout of an evaluation, unless the newest header that was read behind it has done so.

        One that no report counts, of an evaluation that began anew, is marked as a duplicate.
        """
        if entry_key(rollout.entry_id) > entry_key(self._counted_until):
            self._archive.append(rollout if counts else replace(rollout, is_duplicate=True))

    def abandon(self, rollouts: Sequence[Rollout], *, reason: str) -> None:
        """Before a closing header: resolve as dropped what a predecessor left open, given the rollouts in the log.

        The archive keeps these. Of an ordinal that nothing came back from only the number is known.
        """
        left = [r for r in rollouts if r.purpose is Purpose.TRAIN and not self.frontier.is_resolved(r.ordinal)]
        self._archive += left
        for rollout in {(r.ordinal, r.member, r.attempt): r for r in left}.values():
            self._count(rollout)
        newest = {rollout.ordinal: rollout for rollout in sorted(left, key=lambda rollout: rollout.attempt)}
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
        """Yield what the header archives that resolves everything pending; commit it in the block. Then the next step
        begins.

        If the commit fails, the next header resolves and archives the same. What is dropped meanwhile is in the next
        one.
        """
        resolved, rollouts = self._pending, self._archive
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
        """Smallest stream id of a rollout that no header archives, which a successor needs; None if there is none."""
        kept = [self._archive, *self._rollouts.values()]
        entries = [rollout.entry_id for rollouts in kept for rollout in rollouts if rollout.entry_id]
        return min(entries, key=entry_key, default=None)

    def _remove(self, play: Play) -> None:
        """A resolved play leaves the book for the next header."""
        self._pending.append(Resolved.of(play, play.reason))
        self._on_resolved(play)
        self._archive += self._archived(self.plays.pop(play.ordinal))

    def _archived(self, play: Play) -> list[Rollout]:
        """What the archive keeps of a resolved play."""
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
