"""Which tasks of a run are easy, hard or normal: a fold over the groups that its headers resolve.

    normal ──group's mean reward ≥ easy_threshold──▶ easy      for good, but for the share that `easy_fraction` and
       └─────group's mean reward ≤ hard_threshold──▶ hard      `hard_fraction` return where a run begins anew

With `hard_replay` hard tasks are played again now and then, and move by what their group was worth.

Each header records `drawn_below`, the first ordinal that nobody had drawn when it was cut, and what it moved. Ordinal n
is drawn from the pools behind the headers with `drawn_below` ≤ n. That says the same before and after a kill: a header
that was cut after n was drawn does not count for n, also where the orchestrator that draws n again knows that header.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from millrace.decoding import Fields
from millrace.rollouts.types import reaches

MAX_TASKS = 1 << 22
"""Tasks of an environment, from its first, that can leave the normal pool."""
_MAX_PARTS = 1 << 16


class Pool(StrEnum):
    """Where a task stands. Only normal ones are drawn."""

    EASY = "easy"
    NORMAL = "normal"
    HARD = "hard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Which mean reward of a group moves its task; None never does."""

    easy: float | None = None
    hard: float | None = None
    replays_hard: bool = False
    """Whether hard tasks are played again, and move by their new group."""

    def pool(self, reward: float) -> Pool:
        """The pool that a group's mean reward stands for."""
        if self.easy is not None and reaches(reward, self.easy):
            return Pool.EASY
        return Pool.HARD if self.hard is not None and reaches(-reward, -self.hard) else Pool.NORMAL


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A group whose members all came, as the fold sees it."""

    env: str
    task_index: int
    reward: float
    """Mean over its members."""


Placed = Mapping[str, Mapping[int, Pool]]
"""By environment and task, the pool of the tasks that are not where they began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What one header moved."""

    drawn_below: int
    """It counts for ordinals from here on."""
    step: int
    """The step behind the header."""
    placed: Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The pools behind a header. Immutable; tasks that are named nowhere are normal."""

    placed: Placed = field(default_factory=dict[str, Mapping[int, Pool]])
    """For every ordinal that is not resolved."""
    recent: tuple[Moves, ...] = ()
    """Later moves, ascending: some ordinal that is not resolved was drawn before each."""
    step: int = 0
    """The step behind `placed`."""
    drawn_below: int = 0
    """Ordinals below it were drawn before the newest header."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """By environment, the digest of the task set that the indexes belong to."""

    def num_counting(self, ordinal: int) -> int:
        """How many of the recent moves count for an ordinal."""
        return sum(moves.drawn_below <= ordinal for moves in self.recent)

    def behind(self, num_counting: int) -> tuple[int, Placed]:
        """The step at which an ordinal is drawn for which so many moves count, and the pools that it is drawn from."""
        counting = self.recent[:num_counting]
        return (counting[-1].step if counting else self.step), _apply(self.placed, counting)

    def newest(self) -> Placed:
        """The pools that the next new ordinal is drawn from."""
        return _apply(self.placed, self.recent)

    def after(
        self, groups: Iterable[GroupResult], thresholds: Thresholds, *, step: int, drawn_below: int, resolved_below: int
    ) -> "Pools":
        """The pools behind the header that resolves `groups`, in this order; `step` is the one behind it."""
        now = self.newest()
        moved: dict[str, dict[int, Pool]] = {}
        for group in groups:
            pool = thresholds.pool(group.reward)
            stands = now.get(group.env, {}).get(group.task_index, Pool.NORMAL)
            may_move = stands is Pool.NORMAL or (stands is Pool.HARD and thresholds.replays_hard)
            if may_move and pool is not stands and group.task_index < MAX_TASKS:
                moved.setdefault(group.env, {}).setdefault(group.task_index, pool)
        drawn_below = max(self.drawn_below, drawn_below)
        recent = (*self.recent, Moves(drawn_below=drawn_below, step=step, placed=moved))
        old = [moves for moves in recent if moves.drawn_below <= resolved_below]
        return replace(
            self,
            placed=_apply(self.placed, old),
            step=old[-1].step if old else self.step,
            recent=recent[len(old) :],
            drawn_below=drawn_below,
        )

    def begun_anew(self, *, easy_fraction: float, hard_fraction: float, seed: int, step: int) -> "Pools":
        """The pools with a random share of the easy and of the hard tasks normal again, for ordinals not drawn yet."""
        rng = _rng(f"{seed}/begun anew/{step}")
        now, moved = self.newest(), dict[str, dict[int, Pool]]()
        for pool, fraction in ((Pool.EASY, easy_fraction), (Pool.HARD, hard_fraction)):
            members = sorted((env, task) for env, tasks in now.items() for task in tasks if tasks[task] is pool)
            for place in rng.permutation(len(members))[: round(len(members) * fraction)]:
                env, task = members[place]
                moved.setdefault(env, {})[task] = Pool.NORMAL
        if not moved:
            return self
        moves = Moves(drawn_below=self.drawn_below, step=step, placed=moved)
        return replace(self, recent=(*self.recent, moves))

    def of_task_sets(self, digests: Mapping[str, str]) -> "Pools":
        """The pools without the tasks of environments whose task set is another one now."""
        gone = {env for env, digest in digests.items() if self.digests.get(env, digest) != digest}
        known = {**self.digests, **digests}
        if not gone:
            return replace(self, digests=known)
        recent = tuple(replace(moves, placed=_without(moves.placed, gone)) for moves in self.recent)
        return replace(self, placed=_without(self.placed, gone), recent=recent, digests=known)

    def counts(self, env: str) -> tuple[int, int]:
        """How many tasks of an environment are easy, and how many hard."""
        pools = list(self.newest().get(env, {}).values())
        return pools.count(Pool.EASY), pools.count(Pool.HARD)

    def to_json(self) -> dict[str, Any]:
        """As a header keeps it."""
        recent = [
            {"drawn_below": moves.drawn_below, "step": moves.step, "placed": _encode(moves.placed)}
            for moves in self.recent
        ]
        return {
            "placed": _encode(self.placed),
            "recent": recent,
            "step": self.step,
            "drawn_below": self.drawn_below,
            "digests": dict(self.digests),
        }

    @classmethod
    def from_json(cls, fields: Fields) -> "Pools":
        """What `to_json` wrote; ValueError if it is nothing of the kind."""
        recent = tuple(
            Moves(drawn_below=item.integer("drawn_below"), step=item.integer("step"), placed=_decode(item, "placed"))
            for item in fields.objects("recent", most=_MAX_PARTS)
        )
        if any(later.drawn_below < earlier.drawn_below for earlier, later in pairwise(recent)):
            raise ValueError("recent moves are not in order")
        return cls(
            placed=_decode(fields, "placed"),
            recent=recent,
            step=fields.integer("step"),
            drawn_below=fields.integer("drawn_below"),
            digests=fields.table("digests"),
        )


def random_of(seed: int, ordinal: int) -> np.random.Generator:
    """The randomness of one ordinal's draw."""
    return _rng(f"{seed}/draw/{ordinal}")


def replay_of(seed: int, ordinal: int) -> np.random.Generator:
    """The randomness that says whether an ordinal plays a hard task again, and which."""
    return _rng(f"{seed}/replay/{ordinal}")


def _rng(material: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(material.encode()).digest()[:8], "little"))


def _apply(placed: Placed, moves: Sequence[Moves]) -> Placed:
    """The pools behind these moves; a task that is normal again is named nowhere."""
    if not moves:
        return placed
    result = {env: dict(tasks) for env, tasks in placed.items()}
    for each in moves:
        for env, tasks in each.placed.items():
            result.setdefault(env, {}).update(tasks)
    return {
        env: {task: pool for task, pool in tasks.items() if pool is not Pool.NORMAL} for env, tasks in result.items()
    }


def _without(placed: Placed, gone: set[str]) -> Placed:
    return {env: tasks for env, tasks in placed.items() if env not in gone}


def _encode(placed: Placed) -> list[dict[str, Any]]:
    encoded: list[dict[str, Any]] = []
    for env, tasks in sorted(placed.items()):
        for pool in sorted(set(tasks.values())):
            members = sorted(task for task in tasks if tasks[task] is pool)
            encoded.append({"env": env, "pool": pool.value, **_encode_set(members)})
    return encoded


def _encode_set(members: Sequence[int]) -> dict[str, Any]:
    """The indexes, or, where that is shorter, base64 of a bitmap that begins with the bit of index 0."""
    if 32 * len(members) < members[-1]:
        return {"tasks": list(members)}
    bits = np.zeros(members[-1] + 1, np.uint8)
    bits[list(members)] = 1
    return {"bitmap": base64.b64encode(np.packbits(bits, bitorder="little").tobytes()).decode()}


def _decode(fields: Fields, name: str) -> Placed:
    placed: dict[str, dict[int, Pool]] = {}
    for item in fields.objects(name, most=_MAX_PARTS):
        members = _bits(item.text("bitmap", most=MAX_TASKS)) if item.has("bitmap") else _indexes(item)
        placed.setdefault(item.text("env"), {}).update(dict.fromkeys(members, Pool(item.text("pool"))))
    return placed


def _indexes(item: Fields) -> Sequence[int]:
    return item.integers("tasks", most=MAX_TASKS, largest=MAX_TASKS - 1)


def _bits(text: str) -> list[int]:
    data = base64.b64decode(text, validate=True)  # binascii.Error is a ValueError
    if len(data) > MAX_TASKS // 8:
        raise ValueError(f"a bitmap of {len(data)} bytes is too large")
    return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")).tolist()
