"""Makes a v0 reward function that raises visible.

A `verifiers` v0 rubric swallows the exception, logs one line and scores 0.0, which would train the policy away from
whatever made the reward function fail; it does the same of a result that is no number, such as the None of a forgotten
`return`. Every reward function is wrapped once, when the environment is loaded; the wrapper notes the exception for the
rollout that is being scored and lets it go on to the rubric.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from millrace.env_server.adapters import judges
from millrace.env_server.adapters.failures import frames_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """What one reward function raised."""

    message: str
    frames: str
    type: str = "RewardError"


_Failures = list[RewardFailure] | None
_errors: contextvars.ContextVar[_Failures] = contextvars.ContextVar("millrace_reward_errors", default=None)


@contextlib.contextmanager
def recorded_reward_errors() -> Iterator[list[RewardFailure]]:
    """Collect what reward functions raise inside the block, in this task and the tasks that it starts."""
    errors: list[RewardFailure] = []
    token = _errors.set(errors)
    try:
        yield errors
    finally:
        _errors.reset(token)


def watch_rubric(rubric: Any) -> int:
    """Wrap every reward function of a rubric and of the rubrics in it; returns how many."""
    count = 0
    for inner in getattr(rubric, "rubrics", None) or ():
        count += watch_rubric(inner)
    # The list object is changed in place: a rubric may have handed it out.
    funcs = getattr(rubric, "funcs", None) or []
    for index, func in enumerate(funcs):
        if not getattr(func, "_millrace_watched", False):
            funcs[index] = _watched(func, is_of_group=rubric._is_group_func(func))
            count += 1
    return count


def _watched(func: Callable[..., Any], *, is_of_group: bool) -> Callable[..., Any]:
    # `wraps` sets __wrapped__, so inspect.signature, by which a rubric picks arguments and tells group functions,
    # still sees the original.
    @functools.wraps(func)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            with judges.scoring():
                result = func(*args, **kwargs)
                score = await result if inspect.isawaitable(result) else result
            _require_numbers(score, is_of_group=is_of_group)
            return score
        except Exception as error:  # foreign reward code: recorded for the rollout, then raised
            errors = _errors.get()
            if errors is not None:
                name = getattr(func, "__name__", repr(func))
                kind = judges.failure_type(error)
                message = judges.with_remedy(kind, f"reward function {name!r} raised {type(error).__name__}: {error}")
                errors.append(RewardFailure(message=message, frames=frames_of(error), type=kind or "RewardError"))
            raise

    watched._millrace_watched = True  # type: ignore[attr-defined]
    return watched


def _require_numbers(score: Any, *, is_of_group: bool) -> None:
    """Raise TypeError unless it is what a rubric can add up: a number, or of a group one for each member."""
    if not is_of_group:
        _require_number(score)
        return
    if not isinstance(score, Iterable):
        raise TypeError(f"it returned {score!r:.100}, not a list with a number for each member of the group")
    for each in score:
        _require_number(each)


def _require_number(score: Any) -> None:
    try:
        float(score)
    except (TypeError, ValueError) as error:
        raise TypeError(f"it returned {score!r:.100}, which is no number") from error
