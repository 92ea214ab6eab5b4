"""The table of groups that are open or finished: from single rollouts to whole groups, each member once."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from millrace.orchestrator.rollout_stream import entry_key
from millrace.orchestrator.tasks import TaskRef
from millrace.rollouts.types import Rollout, RolloutStatus

MAX_FAILED_ATTEMPTS = 2
"""Attempts of a group that may end with failed members before its ordinal is dropped as `error`."""

HOPELESS = frozenset({RolloutStatus.PROMPT_TOO_LONG, RolloutStatus.QUARANTINED})
"""Outcomes that another attempt cannot change: the ordinal is dropped at once."""

BLAMELESS = frozenset({RolloutStatus.ENGINE_LOST, RolloutStatus.CANCELLED})
"""Outcomes that say nothing about the task: the member is played again, as often as it takes."""

BLAMELESS_PAUSE_S = (0.5, 15.0)
"""First and longest pause before a member is played again that an engine lost; it doubles in between."""


class Arrival(StrEnum):
    """What one rollout did to the table."""

    DUPLICATE = "duplicate"
    """The member was there already, or its ordinal is resolved: discarded and counted."""
    OPEN = "open"
    """Its group still waits for members."""
    FINISHED = "finished"
    """Its group is whole."""
    RETRY = "retry"
    """Every member answered, some failed: the failed ones shall be played again."""
    HOPELESS = "hopeless"
    """Its group cannot become whole: drop it."""


@dataclass(slots=True, kw_only=True)
class Group:
    """One ordinal on its way from dispatch to batch."""

    task: TaskRef
    group_size: int
    planned_step: int
    attempt: int = 0
    num_failed_attempts: int = 0
    num_blameless_attempts: int = 0
    env_server: str = ""
    replica: str = ""
    home: str = ""
    """Replica of the attempt before, which has the prefix in its cache; empty if it lost the group."""
    deadline: float = 0.0
    """Monotonic time after which the attempt counts as lost."""
    not_before: float = 0.0
    """Monotonic time before which it is not placed again."""
    members: dict[int, Rollout] = field(default_factory=dict)
    """OK rollouts by member."""
    failures: dict[int, Rollout] = field(default_factory=dict)
    """Failed rollouts of the current attempt by member."""
    is_scored_whole: bool = False
    """Its environment compares the members, so all must come from one attempt."""
    first_entry: str = ""
    """Stream id of its first rollout; nothing from there on may be trimmed while the group is unresolved."""

    @property
    def ordinal(self) -> int:
        """Ordinal of its task."""
        return self.task.ordinal

    @property
    def is_whole(self) -> bool:
        """Whether every member is there."""
        return len(self.members) == self.group_size

    @property
    def missing(self) -> list[int]:
        """Members that have no OK rollout yet."""
        return [member for member in range(self.group_size) if member not in self.members]

    @property
    def source(self) -> str:
        """Env-server whose play of a group that is scored as a whole has come in part; empty if there is none."""
        return next((rollout.env_server for rollout in self.members.values()), "") if self.is_scored_whole else ""

    @property
    def min_policy_version(self) -> int | None:
        """Oldest version among the tokens of its members so far; None before the first sampled token."""
        versions = [rollout.min_version for rollout in self.members.values() if rollout.min_version is not None]
        return min(versions) if versions else None

    def rollouts(self) -> list[Rollout]:
        """The OK rollouts in order of member."""
        return [self.members[member] for member in sorted(self.members)]

    def next_attempt(self, *, is_lost: bool = False) -> None:
        """Give the current attempt up: nobody plays the group until it is placed again.

        Members that came back OK are kept, late ones still count; a group that is scored whole begins anew.
        `is_lost`: its env-server or its replica does not answer, so that it goes wherever there is room.
        """
        self.home = "" if is_lost else self.replica
        self.env_server = self.replica = ""
        self.advance(self.attempt + 1)

    def advance(self, attempt: int) -> None:
        """Go on to a later attempt, which may be a predecessor's; an earlier one changes nothing."""
        if attempt > self.attempt:
            self.attempt = attempt
            self.failures.clear()
            if self.is_scored_whole:
                self.members.clear()

    def wants(self, rollout: Rollout) -> bool:
        """Whether the rollout fills a place: its member is missing, and it may stand beside those that are there.

        Rollouts that are scored one by one combine over attempts; those of a group that is scored whole come from one
        play, and two orchestrators may have given the same number to two plays.
        """
        if rollout.group_size != self.group_size or rollout.member in self.members:
            return False
        beside = (member.env_server == rollout.env_server for member in self.members.values())
        return not self.is_scored_whole or (rollout.attempt == self.attempt and all(beside))

    def failure_reason(self) -> str:
        """Why the group cannot be whole: the first failure's status, in the words of a resolution."""
        for failure in self.failures.values():
            if failure.status in HOPELESS:
                return str(failure.status.value)
        return "error"


class GroupTable:
    """Open and finished groups by ordinal; every rollout of the stream passes through `add` once."""

    def __init__(self) -> None:
        self.open: dict[int, Group] = {}
        self.finished: dict[int, Group] = {}
        self.num_duplicates = 0
        self.counted_until = ""
        """Stream id up to which a predecessor counted duplicates; they are not counted again."""
        self.archive: dict[int, list[Rollout]] = {}
        """Every rollout, failed ones included, of ordinals that no header resolves yet."""

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self.open or ordinal in self.finished

    def __len__(self) -> int:
        return len(self.open) + len(self.finished)

    def __iter__(self) -> Iterator[Group]:
        yield from self.open.values()
        yield from self.finished.values()

    def add(self, rollout: Rollout) -> Arrival:
        """Put a rollout, with its `entry_id`, into its group; one that no group wants is discarded and counted."""
        group = self.open.get(rollout.ordinal)
        if group is None or not group.wants(rollout):
            if entry_key(rollout.entry_id) > entry_key(self.counted_until):
                self.num_duplicates += 1
            if rollout.ordinal in self:
                self.archive.setdefault(rollout.ordinal, []).append(replace(rollout, is_duplicate=True))
            return Arrival.DUPLICATE
        self.archive.setdefault(rollout.ordinal, []).append(rollout)
        if not group.first_entry:
            group.first_entry = rollout.entry_id
        if rollout.status == RolloutStatus.OK:
            group.members[rollout.member] = rollout
            group.failures.pop(rollout.member, None)
        elif rollout.attempt >= group.attempt:
            group.failures[rollout.member] = rollout
        return self._settle(group)

    def load(self) -> Counter[str]:
        """Rollouts that are being played, by replica."""
        load = Counter[str]()
        for group in self.open.values():
            if group.env_server and group.replica:
                load[group.replica] += group.group_size - len(group.members)
        return load

    def remove(self, ordinal: int) -> list[Rollout]:
        """Forget a resolved ordinal and return what the archive shall keep of it."""
        group = self.open.pop(ordinal, None) or self.finished.pop(ordinal, None)
        kept = self.archive.pop(ordinal, [])
        if group is None or not group.is_scored_whole:
            return kept
        # Whole members of an attempt that was given up were discarded, too.
        used = {id(member) for member in group.members.values()}
        return [
            replace(rollout, is_duplicate=True)
            if rollout.status == RolloutStatus.OK and id(rollout) not in used
            else rollout
            for rollout in kept
        ]

    def oldest_entry(self) -> str | None:
        """Smallest stream id that an unresolved group still needs after a takeover; None if there is none."""
        entries = [group.first_entry for group in self if group.first_entry]
        return min(entries, key=entry_key) if entries else None

    def _settle(self, group: Group) -> Arrival:
        if group.is_whole:
            del self.open[group.ordinal]
            self.finished[group.ordinal] = group
            return Arrival.FINISHED
        if any(failure.status in HOPELESS for failure in group.failures.values()):
            return Arrival.HOPELESS
        if any(member not in group.failures for member in group.missing):
            return Arrival.OPEN
        if all(failure.status in BLAMELESS for failure in group.failures.values()):
            first_s, longest_s = BLAMELESS_PAUSE_S
            pause_s = min(first_s * 2 ** min(group.num_blameless_attempts, 10), longest_s)
            group.num_blameless_attempts += 1
            group.not_before = time.monotonic() + pause_s
            return Arrival.RETRY
        group.num_failed_attempts += 1
        return Arrival.HOPELESS if group.num_failed_attempts >= MAX_FAILED_ATTEMPTS else Arrival.RETRY
