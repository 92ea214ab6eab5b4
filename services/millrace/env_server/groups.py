"""The groups that are being played: their identity, what is left of them, and which were played before."""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.errors import FencedError
from millrace.rollouts.requests import PlayedGroup, PlayRequest
from millrace.rollouts.types import Purpose

# Keys of finished groups, so that a repeated call does not play them again. At 300 bytes each this is 6 MB.
MAX_FINISHED = 20_000


class GroupKey(NamedTuple):
    """Identity of a group's attempt."""

    run_uid: str
    purpose: Purpose
    eval_id: str
    ordinal: int
    attempt: int


@dataclass(eq=False, kw_only=True)
class PlayingGroup:
    """One attempt of a group. `left` are the members whose rollouts are not appended yet."""

    request: PlayRequest
    left: set[int]
    began: float = field(default_factory=time.monotonic)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def key(self) -> GroupKey:
        """Its identity."""
        return group_key(self.request)

    def described(self) -> PlayedGroup:
        """What the orchestrator is told of it."""
        request = self.request
        return PlayedGroup(
            purpose=request.purpose,
            eval_id=request.eval_id,
            ordinal=request.ordinal,
            attempt=request.attempt,
            members=sorted(self.left),
            age_seconds=time.monotonic() - self.began,
            planned_step=request.planned_step,
            base_url=request.base_url,
        )


def group_key(request: PlayRequest) -> GroupKey:
    """The identity of a request's group."""
    return GroupKey(request.run_uid, request.purpose, request.eval_id, request.ordinal, request.attempt)


class Groups:
    """All groups of this env-server."""

    def __init__(self) -> None:
        self._playing: dict[GroupKey, PlayingGroup] = {}
        self._finished: OrderedDict[GroupKey, None] = OrderedDict()
        self._epochs: dict[str, int] = {}

    @property
    def num_rollouts(self) -> int:
        """Rollouts that are being played or wait to be appended."""
        return sum(len(group.left) for group in self._playing.values())

    def check_epoch(self, run_uid: str, epoch: int) -> None:
        """Raise FencedError if a newer orchestrator has spoken for the run; else remember this one."""
        newest = self._epochs.get(run_uid, 0)
        if epoch < newest:
            raise FencedError(
                f"run {run_uid}: epoch {epoch} is older than epoch {newest}, which this env-server has seen",
                reason="EPOCH_FENCED",
                remedy="another orchestrator drives the run now; stop driving it",
            )
        self._epochs[run_uid] = epoch

    def is_known(self, key: GroupKey) -> bool:
        """Whether the group is being played or was played."""
        return key in self._playing or key in self._finished

    def add(self, group: PlayingGroup) -> None:
        """Begin a group."""
        self._playing[group.key] = group

    def finish_member(self, group: PlayingGroup, member: int) -> None:
        """A member is done with; the group ends with its last one."""
        group.left.discard(member)
        if not group.left and self._playing.get(group.key) is group:
            del self._playing[group.key]
            self._finished[group.key] = None
            while len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)

    def of_run(self, run_uid: str) -> list[PlayingGroup]:
        """The groups of a run that are being played."""
        return [group for group in self._playing.values() if group.request.run_uid == run_uid]

    def all(self) -> list[PlayingGroup]:
        """Every group that is being played."""
        return list(self._playing.values())

    def cancel(self, group: PlayingGroup) -> None:
        """Stop a group; a later request for the same attempt would play it again."""
        self._playing.pop(group.key, None)
        group.left.clear()
        for task in group.tasks:
            task.cancel()
