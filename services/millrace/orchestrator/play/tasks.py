"""Task order: which task of which environment an ordinal plays.

A pure function of (seed, task-set digest, weights, ordinal), so that a new orchestrator draws the same tasks as the one
that died, without any stored cursor.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np

from millrace.config.sections.buffer import BufferConfig
from millrace.custom_code import CustomCode, bad_code
from millrace.errors import InvalidSpecError
from millrace.race import in_own_thread
from millrace.telemetry import waits

CYCLE_SLOTS = 1000
"""Ordinals after which the interleaving of environments repeats; bounds the error of a weight to 1/1000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSource:
    """One environment as the task order sees it."""

    env: str
    num_tasks: int
    digest: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRef:
    """The task of an ordinal."""

    ordinal: int
    env: str
    task_index: int


class TaskOrder:
    """Endless order over the tasks of several environments.

    Environments interleave by weight in a fixed cycle; within an environment every task is drawn once per epoch, in an
    order that is shuffled anew for each epoch.
    """

    def __init__(self, sources: Sequence[TaskSource], *, seed: int) -> None:
        """Make the order of tasks over these environments, shuffled by `seed`; ValueError without any."""
        if not sources:
            raise ValueError("a task order needs at least one environment")
        self._sources = tuple(sources)
        self._seed = seed
        self._cycle, self._ranks, self._counts = _interleave([source.weight for source in sources])
        self._permutation = lru_cache(maxsize=2 * len(sources))(self._draw_permutation)

    def task(self, ordinal: int) -> TaskRef:
        """Return the environment and the task of `ordinal` (from 0); the same for every call."""
        cycle_index, slot = divmod(ordinal, len(self._cycle))
        which = self._cycle[slot]
        # How often the source was drawn before this slot: in all whole cycles, and before it in this one.
        draw = cycle_index * self._counts[which] + self._ranks[slot]
        source = self._sources[which]
        epoch, place = divmod(draw, source.num_tasks)
        return TaskRef(ordinal=ordinal, env=source.env, task_index=int(self._permutation(which, epoch)[place]))

    def _draw_permutation(self, which: int, epoch: int) -> np.ndarray:
        """Return the order of a source's task indices in one pass (`epoch`) over them, shuffled by seed and task set.

        `which` is the index of the source.
        """
        source = self._sources[which]
        material = f"{self._seed}/{source.env}/{source.digest}/{epoch}".encode()
        key = int.from_bytes(hashlib.sha256(material).digest()[:8], "little")
        return np.random.default_rng(key).permutation(source.num_tasks)


def _interleave(weights: Sequence[float]) -> tuple[list[int], list[int], list[int]]:
    """Spread sources over a cycle in proportion to their weights (stride scheduling).

    Returns for each slot the index of its source, for each slot how many slots before it are of the same source, and
    for each source the number of its slots.
    """
    if len(weights) == 1:
        return [0], [0], [1]
    # A slot goes to the source that is least far ahead, which then advances by its stride.
    strides = [1.0 / weight for weight in weights]
    # Half a stride spreads the first slots: otherwise every source would want the first one.
    passes = [stride / 2 for stride in strides]
    cycle: list[int] = []
    ranks: list[int] = []
    counts = [0] * len(weights)
    for _ in range(CYCLE_SLOTS):
        which = min(range(len(passes)), key=lambda i: (passes[i], i))
        cycle.append(which)
        ranks.append(counts[which])
        counts[which] += 1
        passes[which] += strides[which]
    # A source without any slot is never drawn; its count stays positive all the same.
    return cycle, ranks, [max(count, 1) for count in counts]


# A function of the user's own that says which task an ordinal draws (`[orchestrator.buffer] sampler`).

FIELD = "orchestrator.buffer.sampler"
_NUM_TRIED = 8
_TRIED_WITHIN_S = 10.0
_CALL_WITHIN_S = 0.1
"""The loop of the run waits for every call."""
_CHOSEN_WITHIN_S = 60.0
"""The limit of one call of a run: a function that was quick in the trial may wait for something later."""


class Sampler:
    """`fn(ordinal, tasks, *, step, seed, **kwargs)` to the name of an environment and the index of one of its tasks.

    `tasks` maps each environment to the indices that may be drawn, int64 ascending: all of them, or with thresholds the
    normal ones. `step` is the step at which the ordinal is drawn, `seed` the run's. The function is pure: after a kill,
    and in a fork, it is asked again and has to answer the same.
    """

    def __init__(self, function: Callable[..., Any], *, import_path: str, kwargs: Mapping[str, Any], seed: int) -> None:
        """Take the user's function with its further arguments `kwargs` and `seed`, the run's, which it is called with.

        `import_path`, `my.module:fn`, names the function in errors.
        """
        self._function, self._import_path = function, import_path
        self._kwargs, self._seed = dict(kwargs), seed
        # One call at a time: what the function keeps for itself need not be safe for threads.
        self._turn = asyncio.Lock()

    @classmethod
    def load(cls, config: BufferConfig, code: CustomCode, *, seed: int) -> Self | None:
        """Import the sampler that the config names, as far as `code` allows; None if it names none.

        Raises InvalidSpecError if it cannot be loaded. `seed` is the run's, which the function is called with.
        """
        if config.sampler is None:
            return None
        function = code.load(config.sampler, field=FIELD)
        return cls(function, import_path=config.sampler, kwargs=config.sampler_kwargs, seed=seed)

    async def choose(self, ordinal: int, tasks: Mapping[str, np.ndarray], *, step: int) -> tuple[str, int]:
        """Call the user's function for an ordinal in a thread of its own, and return the environment and the index of
        the task that it names.

        `tasks` has by environment the indices that may be drawn; `step` is the step at which the ordinal is drawn.
        Raises InvalidSpecError if the function fails, names none of them, or does not return in time: its thread cannot
        be stopped then.
        """
        async with self._turn:
            reason = f"the task of ordinal {ordinal}, which {self._import_path!r} chooses"
            with waits.waiting(reason, waits_on="orchestrator", deadline_s=_CHOSEN_WITHIN_S, quiet_s=1.0):
                try:
                    async with asyncio.timeout(_CHOSEN_WITHIN_S):
                        return await in_own_thread(partial(self._call, ordinal, tasks, step=step))
                except TimeoutError as error:
                    raise self._bad(f"it took more than {_CHOSEN_WITHIN_S:g} s for ordinal {ordinal}") from error

    def _call(self, ordinal: int, tasks: Mapping[str, np.ndarray], *, step: int) -> tuple[str, int]:
        """Call the user's function as `choose` does, but in this thread and without a limit (blocking)."""
        # Copies: the arrays are cached, and the function may change what it gets.
        given = {env: indices.copy() for env, indices in tasks.items()}
        try:
            answer = self._function(ordinal, given, step=step, seed=self._seed, **self._kwargs)
        except Exception as error:  # a user's function may raise anything
            raise self._bad(f"it raised {type(error).__name__} for ordinal {ordinal}: {error}") from error
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], int | np.integer)):
            raise self._bad(f"it returned {answer!r:.200} for ordinal {ordinal}, not (environment, index of a task)")
        env, index = answer
        if not isinstance(env, str) or env not in tasks:
            raise self._bad(f"it named environment {env!r:.200} for ordinal {ordinal}; there are {', '.join(tasks)}")
        if not np.isin(index, tasks[env]):
            raise self._bad(f"it named task {index} of {env!r} for ordinal {ordinal}, which is not in `tasks[{env!r}]`")
        return env, int(index)

    async def try_out(self, sources: Sequence[TaskSource]) -> None:
        """Call the user's function twice for each of the first `_NUM_TRIED` ordinals, in threads of their own.

        `sources` are the environments, all of whose tasks may be drawn. Raises InvalidSpecError if the two answers
        differ, if it fails, or if it is too slow.
        """
        tasks = {source.env: np.arange(source.num_tasks) for source in sources}

        def ask() -> list[tuple[str, int]]:
            return [self._call(ordinal, tasks, step=0) for ordinal in range(_NUM_TRIED)]

        begun = time.monotonic()
        try:
            async with asyncio.timeout(_TRIED_WITHIN_S):
                first, second = await in_own_thread(ask), await in_own_thread(ask)
        except TimeoutError as error:
            raise self._bad(f"{2 * _NUM_TRIED} calls took more than {_TRIED_WITHIN_S:g} s") from error
        per_call = (time.monotonic() - begun) / (2 * _NUM_TRIED)
        if per_call > _CALL_WITHIN_S:
            raise self._bad(f"a call takes {per_call:.2f} s, and the run waits for each; be faster")
        for ordinal, answers in enumerate(zip(first, second, strict=True)):
            if answers[0] != answers[1]:
                raise self._bad(
                    f"it answered {answers[0]} and then {answers[1]} for ordinal {ordinal}; use only its arguments, "
                    "and no randomness but of a generator made from seed and ordinal"
                )

    def _bad(self, problem: str) -> InvalidSpecError:
        """Return the error that the user's function cannot be used because of `problem`."""
        return bad_code(FIELD, self._import_path, problem)
