"""One task that is played: the state machine from its opening to its end, the same for training and for evaluation.

| state    | meaning                                      | `place` | `add` a rollout          | `lose`   | `resolve` |
|----------|----------------------------------------------|---------|--------------------------|----------|-----------|
| UNPLACED | nobody is known to play it                   | PLACED  | as below, else UNPLACED  | UNPLACED | RESOLVED  |
| PLACED   | an env-server plays what is missing          |         | as below, else PLACED    | UNPLACED | RESOLVED  |
| WHOLE    | every member came back OK                    |         | discarded                |          | RESOLVED  |
| RESOLVED | it is over: trained, or dropped for `reason` |         | discarded                |          |           |

`add` leads to WHOLE with the last member; to RESOLVED where no attempt can help any more; to UNPLACED, as the next
attempt, once all that is missing has failed. `lose` is the next attempt, too: nobody answers for the current one.
Members that came back OK are kept from attempt to attempt, and late ones still count; where an environment scores the
members together, all come from one play.
"""

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from millrace.backoff import Backoff
from millrace.orchestrator.play.settings import PlaySettings
from millrace.orchestrator.play.tasks import TaskRef
from millrace.rollouts.types import Rollout, RolloutStatus

MAX_FAILED_ATTEMPTS = 2
"""Attempts that may end with failed members before the task is given up."""
GIVEN_UP = "error"
"""Why a play is resolved that was given up so."""

MAX_PUT_OFF = 20
"""Times that the deadline of an attempt is put off: an env-server that says for ever that it plays has a defect."""
FAILED_PAUSE_S = 0.25
"""Pause before a member is played again whose environment failed."""

BLAMELESS = frozenset({RolloutStatus.ENGINE_LOST, RolloutStatus.CANCELLED})
"""Outcomes that say nothing about the task: the member is played again, within `max_blameless_attempts`."""

BLAMELESS_BACKOFF = Backoff(0.5, 15.0)
"""First and longest pause before a member is played again that an engine lost; it doubles in between."""


class PlayState(StrEnum):
    """The state of a play; the table above has the transitions."""

    UNPLACED = "unplaced"
    PLACED = "placed"
    WHOLE = "whole"
    RESOLVED = "resolved"


class Arrival(StrEnum):
    """What one rollout did to its play."""

    DUPLICATE = "duplicate"
    """The member was there already, or its play is over: discarded."""
    OPEN = "open"
    """Members are still to come."""
    FINISHED = "finished"
    """The play is whole."""
    RETRY = "retry"
    """Every member answered, some failed: the next attempt plays these again."""
    HOPELESS = "hopeless"
    """The play cannot become whole: it is resolved."""


@dataclass(slots=True, kw_only=True, eq=False)
class Play:
    """One task on its way from dispatch to its batch or its report."""

    task: TaskRef
    group_size: int
    settings: PlaySettings
    planned_step: int = 0
    min_version: int = 0
    """Oldest policy version that a replica may serve to get it."""
    is_pinned: bool = False
    """It is played by a replica that is held at its version (`Policies.hold`)."""
    is_scored_whole: bool = False
    """Its environment compares the members, so all must come from one attempt."""
    is_drawn_by_pools: bool = False
    """A predecessor may have drawn another task for the ordinal, of which no header knew, and its env-server may play
    on: what comes of that is discarded."""
    state: PlayState = PlayState.UNPLACED
    reason: str = ""
    """Why it was resolved without becoming whole, in the words of a resolution."""
    attempt: int = 0
    num_failed_attempts: int = 0
    num_blameless_attempts: int = 0
    env_server: str = ""
    replica: str = ""
    placed_version: int | None = None
    """Version that the replica of the current attempt served when it was placed: no token of it is older."""
    began: float | None = None
    """Monotonic time of its first placement; None before, and where a predecessor placed it."""
    ended: float | None = None
    """Monotonic time at which it became whole."""
    home: str = ""
    """Replica of the attempt before, which has the prefix in its cache; empty if it lost the play."""
    deadline: float = 0.0
    """Monotonic time after which the attempt counts as lost."""
    num_put_off: int = 0
    """How often the deadline of the current attempt was put off."""
    not_before: float = 0.0
    """Monotonic time before which it is not placed again."""
    members: dict[int, Rollout] = field(default_factory=dict)
    """OK rollouts by member."""
    failures: dict[int, Rollout] = field(default_factory=dict)
    """Failed rollouts of the current attempt by member."""

    @property
    def ordinal(self) -> int:
        """Return the ordinal of the play's task."""
        return self.task.ordinal

    @property
    def is_open(self) -> bool:
        """Return whether rollouts of members are still accepted."""
        return self.state in (PlayState.UNPLACED, PlayState.PLACED)

    @property
    def has_failed_members(self) -> bool:
        """Return whether the play is over because its members failed."""
        return self.reason == GIVEN_UP or self.reason in self.settings.hopeless

    @property
    def missing(self) -> list[int]:
        """Return the numbers of the members without an OK rollout."""
        return [member for member in range(self.group_size) if member not in self.members]

    @property
    def num_playing(self) -> int:
        """Return the number of rollouts that an env-server is playing now; 0 unless the play is placed."""
        is_placed = self.state is PlayState.PLACED
        return self.group_size - len(self.members) - len(self.failures) if is_placed else 0

    @property
    def source(self) -> str:
        """Return the env-server whose rollouts the play has already, if its members must all come from one; else ""."""
        return next((rollout.env_server for rollout in self.members.values()), "") if self.is_scored_whole else ""

    @property
    def min_policy_version(self) -> int | None:
        """Return the oldest version among the tokens of the members so far; None before the first sampled token."""
        versions = [rollout.min_version for rollout in self.members.values() if rollout.min_version is not None]
        return min(versions) if versions else None

    @property
    def oldest_version(self) -> int | None:
        """Return the oldest version that any token of the group may have, future ones included; None while unknown."""
        known = [version for version in (self.min_policy_version, self.placed_version) if version is not None]
        return min(known) if known else None

    @property
    def seconds(self) -> float | None:
        """Return the seconds from the play's beginning until now or until it was complete; None if unknown."""
        return None if self.began is None else (time.monotonic() if self.ended is None else self.ended) - self.began

    def rollouts(self) -> list[Rollout]:
        """Return the OK rollouts in order of member."""
        return [self.members[member] for member in sorted(self.members)]

    def place(self, env_server: str, *, replica: str, timeout_s: float, version: int | None = None) -> None:
        """Note that an env-server plays the missing members of this attempt.

        After `timeout_s` seconds they count as lost.

        `replica` is the worker id of the engine, "" if it is not known. `version` is what the replica serves; None for
        a predecessor's placement, whose beginning is not known.
        """
        assert self.state is PlayState.UNPLACED, self.state
        self.state = PlayState.PLACED
        self.env_server, self.replica, self.placed_version = env_server, replica, version
        # A predecessor's placement (`version` None) has no known beginning, and must not count as a quick group.
        self.began = time.monotonic() if self.began is None and version is not None else self.began
        self.deadline, self.num_put_off = time.monotonic() + timeout_s, 0

    def add(self, rollout: Rollout) -> Arrival:
        """Take a rollout of the play's task, change the play's state and return what that did.

        A rollout that fills no place is discarded.
        """
        if not self._wants(rollout):
            return Arrival.DUPLICATE
        if rollout.status == RolloutStatus.OK:
            self.members[rollout.member] = rollout
            self.failures.pop(rollout.member, None)
        # A failure of an earlier attempt is late: its member is being played again already.
        elif rollout.attempt >= self.attempt:
            self.failures[rollout.member] = rollout
        return self._settle()

    @property
    def may_go_on(self) -> bool:
        """Return whether the play's deadline may be extended once more."""
        return self.num_put_off < MAX_PUT_OFF

    def go_on(self) -> None:
        """Extend the play's deadline to a full timeout from now, because the env-server still plays the group."""
        self.num_put_off += 1
        self.deadline = time.monotonic() + self.settings.timeout_s

    def lose(self, *, keeps_home: bool = False) -> None:
        """Give the current attempt up, so that the play is placed again, as the next attempt.

        With `keeps_home` the replica of this attempt is preferred then, because it answers and has the prefix in its
        cache.
        """
        assert self.is_open, self.state
        self.state = PlayState.UNPLACED
        self.home = self.replica if keeps_home else ""
        self.env_server, self.replica, self.placed_version = "", "", None
        self.follow(self.attempt + 1)

    def resolve(self, reason: str) -> None:
        """End the play, so that no rollout of it is accepted any more.

        `reason` is why it is dropped, "" if it is trained.
        """
        assert self.state is not PlayState.RESOLVED
        self.state, self.reason = PlayState.RESOLVED, reason

    def follow(self, attempt: int) -> None:
        """Move on to a later attempt, which a predecessor may have begun, and forget the failures of the current
        attempt.

        An earlier attempt changes nothing, and neither does any attempt once the play is over. A task that is scored as
        a whole loses its members, too.
        """
        if attempt > self.attempt and self.is_open:
            self.attempt = attempt
            self.failures.clear()
            # Rewards of such a group compare its members, so members of two attempts must not be mixed.
            if self.is_scored_whole:
                self.members.clear()

    def is_continued_by(self, *, attempt: int, members: Collection[int]) -> bool:
        """Return whether an unplaced play can be left to an env-server that plays `members` in `attempt`.

        It can if each member that has neither an OK nor a failed rollout is among them. With another attempt than the
        play's it can only if members may come from several attempts and the play has a deadline: else nobody would
        notice that the others failed.
        """
        if self.state is not PlayState.UNPLACED or not set(self.missing) - set(self.failures) <= set(members):
            return False
        return attempt == self.attempt or not (self.is_scored_whole or math.isinf(self.settings.timeout_s))

    def _wants(self, rollout: Rollout) -> bool:
        """Return whether the rollout fills a gap: its member is missing, and it fits the members that came.

        Rollouts that are scored one by one combine over attempts; those of a task that is scored whole come from one
        play, and two orchestrators may have given the same number to two plays.
        """
        if not self.is_open or rollout.group_size != self.group_size or rollout.member in self.members:
            return False
        if self.is_drawn_by_pools and (rollout.env, rollout.task_index) != (self.task.env, self.task.task_index):
            return False
        if not self.is_scored_whole:
            return True
        return rollout.attempt == self.attempt and (not self.members or rollout.env_server == self.source)

    def _settle(self) -> Arrival:
        """Change the state after a rollout was taken, and return the change: whole, open, next attempt, or over."""
        statuses = [failure.status for failure in self.failures.values()]
        if not self.missing:
            self.state, self.ended = PlayState.WHOLE, time.monotonic()
            self.placed_version = None
            return Arrival.FINISHED
        # Playing these again cannot help, such as a prompt that is too long, so one of them ends the whole group.
        if hopeless := [status for status in statuses if status in self.settings.hopeless]:
            self.resolve(str(hopeless[0].value))
            return Arrival.HOPELESS
        # Wait for the other members: an attempt is judged as a whole, so that a lost engine counts once and not per
        # member.
        if any(member not in self.failures for member in self.missing):
            return Arrival.OPEN
        # Infrastructure failures have a limit of their own, so that a flaky engine never uses up the tries of a task.
        is_blameless, limit = all(status in BLAMELESS for status in statuses), self.settings.max_blameless_attempts
        if is_blameless and (limit is None or self.num_blameless_attempts < limit):
            self.num_blameless_attempts += 1
            self.not_before = time.monotonic() + BLAMELESS_BACKOFF.after(self.num_blameless_attempts)
        else:
            self.not_before = time.monotonic() + FAILED_PAUSE_S
            self.num_failed_attempts = MAX_FAILED_ATTEMPTS if is_blameless else self.num_failed_attempts + 1
        if self.num_failed_attempts >= MAX_FAILED_ATTEMPTS:
            self.resolve(GIVEN_UP)
            return Arrival.HOPELESS
        self.lose(keeps_home=RolloutStatus.ENGINE_LOST not in statuses)
        return Arrival.RETRY


def load_of(plays: Iterable[Play]) -> Counter[str]:
    """Return the number of rollouts of these plays that each replica plays, by its worker id."""
    load = Counter[str]()
    for play in plays:
        if play.replica:
            load[play.replica] += play.num_playing
    return load


def num_rollouts(groups: Iterable[Play]) -> int:
    """Return the number of rollouts that the groups have once they are complete."""
    return sum(group.group_size for group in groups)
