"""Which tasks are easy, hard or normal, a fold over resolved groups, and which task an ordinal draws from them.

    normal ──group's mean reward ≥ easy_threshold──▶ easy      for good, but for the share that `easy_fraction` and
       └─────group's mean reward ≤ hard_threshold──▶ hard      `hard_fraction` return where a run begins anew

With `hard_replay` hard tasks are played again now and then, and move by what their group was worth.

Each header records `drawn_below`, the first ordinal that nobody had drawn when it was cut, and what it moved. Ordinal n
is drawn from the pools after the headers with `drawn_below` ≤ n. That says the same before and after a kill: a header
that was cut after n was drawn does not count for n, also where the orchestrator that draws n again knows that header.
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from millrace.config.sections.buffer import BufferConfig
from millrace.decoding import Fields
from millrace.orchestrator.play.tasks import Sampler, TaskOrder, TaskRef, TaskSource
from millrace.rollouts.types import reaches

MAX_TASKS = 1 << 22
"""Tasks of an environment, from its first, that can leave the normal pool."""
_MAX_PARTS = 1 << 16


class Pool(StrEnum):
    """The pool of a task. Only normal tasks are drawn."""

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
        """Return the pool of a task whose group had this mean reward."""
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
    """The step after the header."""
    placed: Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The pools after a header. Immutable; tasks that are named nowhere are normal."""

    placed: Placed = field(default_factory=dict[str, Mapping[int, Pool]])
    """For every ordinal that is not resolved."""
    recent: tuple[Moves, ...] = ()
    """Later moves, ascending: some ordinal that is not resolved was drawn before each."""
    step: int = 0
    """The step after `placed`."""
    drawn_below: int = 0
    """Ordinals below it were drawn before the newest header."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """By environment, the digest of the task set that the indexes belong to."""

    def num_counting(self, ordinal: int) -> int:
        """Return how many of the recent moves were made before an ordinal was drawn, and so count for its draw."""
        return sum(moves.drawn_below <= ordinal for moves in self.recent)

    def for_draw(self, num_counting: int) -> tuple[int, Placed]:
        """Return the step and the pools of a draw for which the first `num_counting` of the recent moves count."""
        counting = self.recent[:num_counting]
        return (counting[-1].step if counting else self.step), _apply(self.placed, counting)

    def newest(self) -> Placed:
        """Return the pools after all moves, which the next new ordinal is drawn from."""
        return _apply(self.placed, self.recent)

    def after(
        self, groups: Iterable[GroupResult], thresholds: Thresholds, *, step: int, drawn_below: int, resolved_below: int
    ) -> "Pools":
        """Return the pools after the header that resolves `groups`, in this order, each moved by the mean reward of its
        group.

        `thresholds` are the rewards at which a task moves. Of a task's groups in the header the first decides. `step`
        is the step after that header. `drawn_below` is the first ordinal that was not drawn when it was cut, and below
        `resolved_below` all ordinals are resolved.
        """
        now = self.newest()
        moved: dict[str, dict[int, Pool]] = {}
        for group in groups:
            pool = thresholds.pool(group.reward)
            current = now.get(group.env, {}).get(group.task_index, Pool.NORMAL)
            # Once easy, always easy; hard tasks leave their pool only if they are replayed. The first group of a header
            # decides.
            may_move = current is Pool.NORMAL or (current is Pool.HARD and thresholds.replays_hard)
            if may_move and pool is not current and group.task_index < MAX_TASKS:
                moved.setdefault(group.env, {}).setdefault(group.task_index, pool)
        # Never backwards: after a takeover fewer ordinals may be known as drawn than before.
        drawn_below = max(self.drawn_below, drawn_below)
        recent = (*self.recent, Moves(drawn_below=drawn_below, step=step, placed=moved))
        # Moves that count for every unresolved ordinal are folded into `placed`, which bounds the length of `recent`.
        old = [moves for moves in recent if moves.drawn_below <= resolved_below]
        return replace(
            self,
            placed=_apply(self.placed, old),
            step=old[-1].step if old else self.step,
            recent=recent[len(old) :],
            drawn_below=drawn_below,
        )

    def begun_anew(self, *, easy_fraction: float, hard_fraction: float, seed: int, step: int) -> "Pools":
        """Return the pools with a random share (0 to 1) of the easy and of the hard tasks made normal, for ordinals not
        drawn yet.

        The choice depends on `seed` and `step` alone, the step at which the run begins anew.
        """
        rng = _rng(f"{seed}/begun anew/{step}")
        now, moved = self.newest(), dict[str, dict[int, Pool]]()
        for pool, fraction in ((Pool.EASY, easy_fraction), (Pool.HARD, hard_fraction)):
            members = sorted((env, task) for env, tasks in now.items() for task in tasks if tasks[task] is pool)
            # Drawn by a seed over sorted members, so that two orchestrators that resume the same log return the same
            # tasks.
            for place in rng.permutation(len(members))[: round(len(members) * fraction)]:
                env, task = members[place]
                moved.setdefault(env, {})[task] = Pool.NORMAL
        if not moved:
            return self
        moves = Moves(drawn_below=self.drawn_below, step=step, placed=moved)
        return replace(self, recent=(*self.recent, moves))

    def of_task_sets(self, digests: Mapping[str, str]) -> "Pools":
        """Return the pools without the tasks of environments whose task set has another digest than before.

        `digests` are those of the task sets now, by environment; they are recorded.
        """
        gone = {env for env, digest in digests.items() if self.digests.get(env, digest) != digest}
        known = {**self.digests, **digests}
        if not gone:
            return replace(self, digests=known)
        recent = tuple(replace(moves, placed=_without(moves.placed, gone)) for moves in self.recent)
        return replace(self, placed=_without(self.placed, gone), recent=recent, digests=known)

    def counts(self, env: str) -> tuple[int, int]:
        """Return how many tasks of an environment are easy, and how many hard."""
        pools = list(self.newest().get(env, {}).values())
        return pools.count(Pool.EASY), pools.count(Pool.HARD)

    def to_json(self) -> dict[str, Any]:
        """Return the pools as plain data for the JSON of a header."""
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
        """Return the pools that `to_json` encoded; ValueError if they are malformed."""
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
    """Return the random generator of one ordinal's draw, the same for the same run seed and ordinal."""
    return _rng(f"{seed}/draw/{ordinal}")


def replay_of(seed: int, ordinal: int) -> np.random.Generator:
    """Return the random generator that decides whether an ordinal plays a hard task again, and which.

    `seed` is the run's.
    """
    return _rng(f"{seed}/replay/{ordinal}")


def _rng(material: str) -> np.random.Generator:
    """Return a random generator whose seed is the hash of `material`."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(material.encode()).digest()[:8], "little"))


def _apply(placed: Placed, moves: Sequence[Moves]) -> Placed:
    """Return the pools after these moves, in order; tasks that became normal are left out."""
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
    """Return the pools without the environments in `gone`."""
    return {env: tasks for env, tasks in placed.items() if env not in gone}


def _encode(placed: Placed) -> list[dict[str, Any]]:
    """Return pools as plain data: for each environment and pool the indexes of its tasks."""
    encoded: list[dict[str, Any]] = []
    for env, tasks in sorted(placed.items()):
        for pool in sorted(set(tasks.values())):
            members = sorted(task for task in tasks if tasks[task] is pool)
            encoded.append({"env": env, "pool": pool.value, **_encode_set(members)})
    return encoded


def _encode_set(members: Sequence[int]) -> dict[str, Any]:
    """Return ascending indexes, at least one, as plain data: a list or, if shorter, base64 of a bitmap from index 0
    on.
    """
    # A JSON number takes up to about 32 bits, a bitmap one bit for each task up to the last.
    if 32 * len(members) < members[-1]:
        return {"tasks": list(members)}
    bits = np.zeros(members[-1] + 1, np.uint8)
    bits[list(members)] = 1
    return {"bitmap": base64.b64encode(np.packbits(bits, bitorder="little").tobytes()).decode()}


def _decode(fields: Fields, name: str) -> Placed:
    """Return the pools in field `name`, as `_encode` wrote them; ValueError if they are malformed."""
    placed: dict[str, dict[int, Pool]] = {}
    for item in fields.objects(name, most=_MAX_PARTS):
        members = _bits(item.text("bitmap", most=MAX_TASKS)) if item.has("bitmap") else _indexes(item)
        placed.setdefault(item.text("env"), {}).update(dict.fromkeys(members, Pool(item.text("pool"))))
    return placed


def _indexes(item: Fields) -> Sequence[int]:
    """Return the indexes of tasks of an entry that has them as a list."""
    return item.integers("tasks", most=MAX_TASKS, largest=MAX_TASKS - 1)


def _bits(text: str) -> list[int]:
    """Return the indexes whose bits are set in a base64-encoded bitmap; ValueError if it is too large or malformed."""
    data = base64.b64decode(text, validate=True)  # binascii.Error is a ValueError
    if len(data) > MAX_TASKS // 8:
        raise ValueError(f"a bitmap of {len(data)} bytes is too large")
    return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")).tolist()


# Which task an ordinal draws where the run has pools of tasks, ratios that follow a schedule, or a sampler.
#
# A function of the run's record, the ordinal, and the pools that the log has for the ordinal (`pools.py`): the task
# of the task order where it is normal, else a random normal one of the same environment, else of another; for a share
# of the ordinals a hard one; or what the user's own function says.


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Tasks by pool, over all training environments."""

    easy: int
    normal: int
    hard: int


def thresholds_of(config: BufferConfig) -> Thresholds:
    """Return the mean rewards of a group, by the config, at which its task changes its pool."""
    return Thresholds(easy=config.easy_threshold, hard=config.hard_threshold, replays_hard=bool(config.hard_replay))


class TaskBuffer:
    """Draws the tasks of a run."""

    def __init__(
        self,
        sources: Sequence[TaskSource],
        config: BufferConfig,
        *,
        seed: int,
        pools: Callable[[], Pools],
        sampler: Sampler | None = None,
    ) -> None:
        """Make the drawer of a run's tasks, whose draws depend on `seed`, the run's.

        `pools` returns the pools after the newest committed header. `sampler` is the user's function, None if there is
        none.
        """
        self._order = TaskOrder(sources, seed=seed)
        self._sources = {source.env: source for source in sources}
        self._schedule = sorted((entry.step, tuple(entry.env_ratios)) for entry in config.schedule)
        self._is_on = config.changes_draws
        self._hard_replay = config.hard_replay
        self._seed = seed
        self._pools = pools
        self._sampler = sampler
        self._seen = Pools()
        self._draws: dict[int, tuple[int, Placed]] = {}
        self._normal: dict[tuple[int, str], np.ndarray] = {}
        self._chosen: dict[int, TaskRef] = {}
        """What the sampler chose for ordinals whose task was not asked for yet."""

    async def choose(self, ordinals: Iterable[int]) -> None:
        """Have the sampler, if there is one, choose the tasks of these ordinals, one after the other; `task` then
        returns them.

        Nothing is done without a sampler, for an ordinal whose task it has chosen, and where no task is left to draw.
        """
        if self._sampler is None:
            return
        for ordinal in ordinals:
            if ordinal not in self._chosen and not self.is_exhausted(ordinal):
                step, placed = self._at(ordinal)
                left = {env: self._normal_of(env, placed) for env in self._sources}
                env, index = await self._sampler.choose(ordinal, left, step=step)
                self._chosen[ordinal] = TaskRef(ordinal=ordinal, env=env, task_index=index)

    def task(self, ordinal: int) -> TaskRef:
        """Return the task that `ordinal` (from 0) draws: from pools, by ratios or by the sampler, where there are any.

        Otherwise, or if no task is normal, it is that of the task order. With a sampler `choose` comes first.
        """
        if not self._is_on:
            return self._order.task(ordinal)
        if (chosen := self._chosen.pop(ordinal, None)) is not None:
            return chosen
        step, placed = self._at(ordinal)
        assert self._sampler is None or self.is_exhausted(ordinal), f"nobody had ordinal {ordinal} chosen"
        ref, ratios = self._order.task(ordinal), self._ratios(step)
        # A generator per ordinal: no draw depends on the draws before it, which a successor does not repeat.
        rng = random_of(self._seed, ordinal)
        env = ref.env if ratios is None else self._choose(ratios, rng, list(self._sources))
        if (hard := self._replayed(ordinal, env, placed)) is not None:
            return TaskRef(ordinal=ordinal, env=env, task_index=hard)
        # Tasks in no pool are normal, so this is the task order's own task, drawn as in a run without pools.
        if env == ref.env and ref.task_index not in placed.get(env, {}):
            return ref
        if not len(self._normal_of(env, placed)):
            left = [name for name in self._sources if len(self._normal_of(name, placed))]
            weights = ratios or {name: source.weight for name, source in self._sources.items()}
            if not sum(weights[name] for name in left):
                return ref
            env = self._choose(weights, rng, left)
        return TaskRef(ordinal=ordinal, env=env, task_index=int(rng.choice(self._normal_of(env, placed))))

    def is_exhausted(self, ordinal: int) -> bool:
        """Return whether no normal task is left that this ordinal could draw; False for a run without pools."""
        if not self._is_on:
            return False
        step, placed = self._at(ordinal)
        ratios = self._ratios(step)
        drawn = [env for env in self._sources if ratios is None or ratios[env]]
        return not any(len(self._normal_of(env, placed)) for env in drawn)

    def sizes(self, pools: Pools) -> PoolSizes:
        """Return how many tasks of all environments are easy, normal and hard in `pools`."""
        counts = [pools.counts(env) for env in self._sources]
        easy, hard = sum(count[0] for count in counts), sum(count[1] for count in counts)
        total = sum(source.num_tasks for source in self._sources.values())
        return PoolSizes(easy=easy, normal=total - easy - hard, hard=hard)

    def _ratios(self, step: int) -> Mapping[str, float] | None:
        """Return the schedule's ratios at a step; None before the schedule begins, while the weights count."""
        begun = [ratios for first, ratios in self._schedule if first <= step]
        return dict(zip(self._sources, begun[-1], strict=True)) if begun else None

    def _choose(self, ratios: Mapping[str, float], rng: np.random.Generator, envs: Sequence[str]) -> str:
        """Return one of `envs`, drawn at random in proportion to their ratios."""
        shares = np.asarray([ratios[env] for env in envs], np.float64)
        return envs[int(rng.choice(len(envs), p=shares / shares.sum()))]

    def _replayed(self, ordinal: int, env: str, placed: Placed) -> int | None:
        """Return the hard task of `env` that an ordinal plays again; None if it plays no hard task.

        `placed` are its pools.
        """
        if not self._hard_replay:
            return None
        # A generator of its own, so that `hard_replay` does not change which normal task an ordinal draws.
        rng = replay_of(self._seed, ordinal)
        tasks = sorted(task for task, pool in placed.get(env, {}).items() if pool is Pool.HARD)
        return int(rng.choice(tasks)) if rng.random() < self._hard_replay and tasks else None

    def _at(self, ordinal: int) -> tuple[int, Placed]:
        """Return the step at which an ordinal is drawn and its pools, cached until the pools change."""
        pools = self._pools()
        # Pools are immutable and replaced by each header, so identity shows whether they changed.
        if pools is not self._seen:
            self._seen, self._draws, self._normal = pools, {}, {}
        count = pools.num_counting(ordinal)
        if count not in self._draws:
            self._draws[count] = pools.for_draw(count)
        return self._draws[count]

    def _normal_of(self, env: str, placed: Placed) -> np.ndarray:
        """Return the indices of an environment's tasks that are normal in the pools `placed`, int64 ascending."""
        # `_draws` keeps these pools alive, so that no other ones get the same id.
        key = (id(placed), env)
        if key not in self._normal:
            taken = np.fromiter(placed.get(env, {}), np.int64)
            self._normal[key] = np.setdiff1d(np.arange(self._sources[env].num_tasks), taken)
        return self._normal[key]
