"""Which task an ordinal draws where the run has pools of tasks, ratios that follow a schedule, or a sampler.

A function of the run's record, the ordinal, and the pools that the log has for the ordinal (`pools.py`): the task of
the task order where it is normal, else a random normal one of the same environment, else of another; for a share of the
ordinals a hard one; or what the user's own function says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.config.sections.buffer import BufferConfig
from millrace.orchestrator.play.pools import Placed, Pool, Pools, Thresholds, random_of, replay_of
from millrace.orchestrator.play.tasks import Sampler, TaskOrder, TaskRef, TaskSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    """Tasks by pool, over all training environments."""

    easy: int
    normal: int
    hard: int


def thresholds_of(config: BufferConfig) -> Thresholds:
    """What moves a task."""
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
        """`pools` are those behind the newest committed header."""
        self._order = TaskOrder(sources, seed=seed)
        self._sources = {source.env: source for source in sources}
        self._schedule = sorted((entry.step, tuple(entry.env_ratios)) for entry in config.schedule)
        self._is_on = config.changes_draws
        self._hard_replay = config.hard_replay
        self._seed = seed
        self._pools = pools
        self._sampler = sampler
        self._seen = Pools()
        self._behind: dict[int, tuple[int, Placed]] = {}
        self._normal: dict[tuple[int, str], np.ndarray] = {}

    def task(self, ordinal: int) -> TaskRef:
        """Return the task behind `ordinal` (from 0); that of the task order if no task is normal."""
        if not self._is_on:
            return self._order.task(ordinal)
        step, placed = self._at(ordinal)
        if self._sampler is not None and not self.is_exhausted(ordinal):
            left = {env: self._normal_of(env, placed) for env in self._sources}
            env, index = self._sampler.choose(ordinal, left, step=step)
            return TaskRef(ordinal=ordinal, env=env, task_index=index)
        ref, ratios = self._order.task(ordinal), self._ratios(step)
        rng = random_of(self._seed, ordinal)
        env = ref.env if ratios is None else self._choose(ratios, rng, list(self._sources))
        if (hard := self._replayed(ordinal, env, placed)) is not None:
            return TaskRef(ordinal=ordinal, env=env, task_index=hard)
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
        """Whether no task is left that this ordinal could draw."""
        if not self._is_on:
            return False
        step, placed = self._at(ordinal)
        ratios = self._ratios(step)
        drawn = [env for env in self._sources if ratios is None or ratios[env]]
        return not any(len(self._normal_of(env, placed)) for env in drawn)

    def sizes(self, pools: Pools) -> PoolSizes:
        """How many tasks are in which pool."""
        counts = [pools.counts(env) for env in self._sources]
        easy, hard = sum(count[0] for count in counts), sum(count[1] for count in counts)
        total = sum(source.num_tasks for source in self._sources.values())
        return PoolSizes(easy=easy, normal=total - easy - hard, hard=hard)

    def _ratios(self, step: int) -> Mapping[str, float] | None:
        """The ratios of the schedule at a step; None where it has not begun, and the weights count."""
        begun = [ratios for first, ratios in self._schedule if first <= step]
        return dict(zip(self._sources, begun[-1], strict=True)) if begun else None

    def _choose(self, ratios: Mapping[str, float], rng: np.random.Generator, envs: Sequence[str]) -> str:
        shares = np.asarray([ratios[env] for env in envs], np.float64)
        return envs[int(rng.choice(len(envs), p=shares / shares.sum()))]

    def _replayed(self, ordinal: int, env: str, placed: Placed) -> int | None:
        """The hard task that an ordinal plays again; None where it does not, or none is hard."""
        if not self._hard_replay:
            return None
        rng = replay_of(self._seed, ordinal)
        hard = sorted(task for task, pool in placed.get(env, {}).items() if pool is Pool.HARD)
        return int(rng.choice(hard)) if rng.random() < self._hard_replay and hard else None

    def _at(self, ordinal: int) -> tuple[int, Placed]:
        """The step at which an ordinal is drawn, and the pools that it is drawn from; the same object for the same."""
        pools = self._pools()
        if pools is not self._seen:
            self._seen, self._behind, self._normal = pools, {}, {}
        count = pools.num_counting(ordinal)
        if count not in self._behind:
            self._behind[count] = pools.behind(count)
        return self._behind[count]

    def _normal_of(self, env: str, placed: Placed) -> np.ndarray:
        """The normal tasks of an environment, ascending."""
        key = (id(placed), env)  # `_behind` keeps it alive
        if key not in self._normal:
            taken = np.fromiter(placed.get(env, {}), np.int64)
            self._normal[key] = np.setdiff1d(np.arange(self._sources[env].num_tasks), taken)
        return self._normal[key]
