"""Refuses a v1 environment whose reward or metric functions want arguments that the library does not pass.

It passes by name what a function's signature names, of what it has. What that is differs between releases, so the
task's own `score` is asked, with stand-ins of the same signatures. Where a task scores by code of its own, nothing is
refused.
"""

import asyncio
import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from millrace.errors import InvalidSpecError, Violation

_KINDS = ("metric", "reward")
_LIBRARY = "verifiers"
_CANDIDATES = ("task", "trace", "runtime", "state", "info", "messages", "prompt", "completion", "answer", "harness")
_CANDIDATES += ("agent", "episode", "taskset", "data", "judge", "client")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def refuse_unknown_arguments(tasks: Iterable[Any]) -> None:
    """InvalidSpecError if a reward or metric function of a task could never be called; one task of each class."""
    for task in {type(each): each for each in tasks}.values():
        if type(task).score.__module__.split(".")[0] != _LIBRARY:
            continue
        passed = _passed(task)
        offered = passed.pop("", set()) if passed is not None else set()
        for kind in _KINDS if passed else ():
            for function in task.hooks(kind):
                missing = _required(function) - passed.get(function.__name__, set()) if passed else set()
                if missing:
                    raise _refusal(function, kind, sorted(missing), offered)


def _required(function: Callable[..., Any]) -> set[str]:
    # The library reads the signature of what a decorator wraps, and calls the decorator's own function.
    shown = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {each.name for each in shown if each.default is inspect.Parameter.empty and each.kind in _BY_NAME}


def _passed(task: Any) -> dict[str, set[str]] | None:
    """Which arguments `score` passes to each function, and under "" which there are; None if it cannot be asked."""
    seen: dict[str, set[str]] = {}
    asked = copy.copy(task)
    candidates = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in _CANDIDATES]
    hooks = {
        kind: [_stand_in(each.__name__, inspect.signature(each), seen) for each in task.hooks(kind)] for kind in _KINDS
    }
    hooks["reward"].append(_stand_in("", inspect.Signature(candidates), seen))
    asked.hooks = hooks.__getitem__
    asked.plugged_judges = list
    try:
        asyncio.run(asked.score(_Trace(), object()))
    except Exception:  # noqa: BLE001 - the library's code, asked out of turn: what is wrong will show in a rollout
        return None
    return seen


def _stand_in(name: str, signature: inspect.Signature, seen: dict[str, set[str]]) -> Callable[..., Any]:
    """Return a function of that name and signature which notes what it is called with."""

    async def called(**values: Any) -> float:
        seen.setdefault(name, set()).update(values)
        return 0.0

    called.__name__ = name
    called.__signature__ = signature  # type: ignore[attr-defined] - what `inspect.signature` gives
    return called


class _Trace:
    """What `score` writes into."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.rewards: dict[str, Any] = {}

    def record_metric(self, *values: Any) -> None:
        """Drop it."""

    record_metrics = record_reward = record_metric


def _refusal(function: Callable[..., Any], kind: str, missing: list[str], offered: set[str]) -> InvalidSpecError:
    wanted = " and ".join(repr(each) for each in missing)
    message = (
        f"{kind} function {function.__name__!r} wants {wanted}, which the library does not pass; it may ask for "
        f"{', '.join(sorted(offered))}"
    )
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" (at {code.co_filename}:{code.co_firstlineno} in {code.co_name})" if code is not None else ""
    return InvalidSpecError(
        [Violation(field="orchestrator.env.id", message=message)],
        message=f"{message}{place}",
        reason="ENV_REWARD_ARGUMENTS",
        remedy=f"let it ask for one of those, or give {wanted} a default; the task's own fields are `task.NAME`",
    )
