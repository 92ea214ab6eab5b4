"""The tasks of an evaluation that is under way: what came back of each, and what is to be played again."""

import asyncio
import time
from dataclasses import dataclass, field

from millrace.orchestrator.groups import BLAMELESS, BLAMELESS_PAUSE_S
from millrace.rollouts.types import Rollout, RolloutStatus

MAX_ATTEMPTS = 2
"""Plays of a task whose rollouts fail; a play that an env-server or an engine lost does not count."""
MAX_LOST_BY_ENDPOINT = 8
"""Plays of a task that an external endpoint loses in a row before that counts as a failure, about five minutes: nobody
restarts somebody else's endpoint."""


@dataclass(slots=True)
class EvalTask:
    """One held-out task in an evaluation."""

    index: int
    group_size: int
    attempt: int = 0
    num_failed_attempts: int = 0
    num_blameless_attempts: int = 0
    max_blameless_attempts: int | None = None
    is_scored_whole: bool = False
    """Its environment compares the members, so all must come from one attempt."""
    env_server: str = ""
    replica: str = ""
    home: str = ""
    """Replica of the attempt before; empty if it lost the task."""
    not_before: float = 0.0
    """Monotonic time before which it is not placed again."""
    good: dict[int, Rollout] = field(default_factory=dict)
    failed: dict[int, Rollout] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Members that have no OK rollout yet."""
        return [member for member in range(self.group_size) if member not in self.good]

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is played any more."""
        return not self.missing or self.num_failed_attempts >= MAX_ATTEMPTS

    @property
    def source(self) -> str:
        """Env-server whose play of a task that is scored as a whole has come in part; empty if there is none."""
        return next((rollout.env_server for rollout in self.good.values()), "") if self.is_scored_whole else ""

    @property
    def num_playing(self) -> int:
        """Rollouts that an env-server plays."""
        return len(self.missing) - len(self.failed) if self.env_server and not self.is_done else 0

    def again(self, *, is_lost: bool) -> None:
        """Play the missing members as the next attempt, all if they are scored together; elsewhere if it was lost."""
        self.home = "" if is_lost else self.replica
        self.env_server = self.replica = ""
        self.advance(self.attempt + 1)

    def advance(self, attempt: int) -> None:
        """Go on to a later attempt, which may be a predecessor's; what a task that is done has got stays."""
        if attempt <= self.attempt:
            return
        self.attempt = attempt
        if not self.is_done:
            self.failed.clear()
            if self.is_scored_whole:
                self.good.clear()

    def wants(self, rollout: Rollout) -> bool:
        """Whether the rollout may stand beside those that are there, as `Group.wants` has it."""
        beside = (member.env_server == rollout.env_server for member in self.good.values())
        return not self.is_scored_whole or (not self.is_done and rollout.attempt == self.attempt and all(beside))

    def add(self, rollout: Rollout) -> None:
        """Take one rollout of it; a failed one counts if it is of the current attempt."""
        if not self.wants(rollout):
            return
        if rollout.status == RolloutStatus.OK:
            self.good.setdefault(rollout.member, rollout)
            self.failed.pop(rollout.member, None)
        elif rollout.attempt == self.attempt:
            self.failed[rollout.member] = rollout
        if self.missing and all(member in self.failed for member in self.missing):
            self._settle()

    def adopt(self, rollout: Rollout) -> None:
        """Take a rollout of a predecessor, whose attempts went on without us."""
        self.advance(rollout.attempt)
        self.add(rollout)

    def _settle(self) -> None:
        """Every missing member failed."""
        is_lost = any(rollout.status == RolloutStatus.ENGINE_LOST for rollout in self.failed.values())
        is_blameless = all(self.failed[member].status in BLAMELESS for member in self.missing)
        limit = self.max_blameless_attempts
        if is_blameless and (limit is None or self.num_blameless_attempts < limit):
            first_s, longest_s = BLAMELESS_PAUSE_S
            pause_s = min(first_s * 2 ** min(self.num_blameless_attempts, 10), longest_s)
            self.num_blameless_attempts += 1
            self.not_before = time.monotonic() + pause_s
        else:
            self.num_failed_attempts = MAX_ATTEMPTS if is_blameless else self.num_failed_attempts + 1
        self.again(is_lost=is_lost)


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """One evaluation of one environment."""

    eval_id: str
    env: str
    step: int
    use_train_tasks: bool
    min_version: int
    tasks: list[EvalTask]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = field(default_factory=time.monotonic)
    last_answer: float = field(default_factory=time.monotonic)

    @property
    def num_missing(self) -> int:
        """Rollouts that are still to come."""
        return sum(len(task.missing) for task in self.tasks if not task.is_done)

    @property
    def num_wanted(self) -> int:
        """Rollouts that were asked for."""
        return sum(task.group_size for task in self.tasks)

    def good(self) -> list[Rollout]:
        """The OK rollouts in order of (task, member)."""
        return [task.good[member] for task in self.tasks for member in sorted(task.good)]

    def failed(self) -> list[Rollout]:
        """The last failure of every member that did not come back OK."""
        return [task.failed[member] for task in self.tasks for member in sorted(task.failed)]
