"""Checks reward functions' arguments in v1, and wraps methods of the library's classes that score and record."""

import asyncio
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients.train import TrainClient

from millrace.env_server import engine_access
from millrace.env_server.adapters import judges
from millrace.env_server.adapters.failures import not_text_error, other_part, refusal, trace_text
from millrace.env_server.adapters.outcome import NotANumberError, number_of
from millrace.env_server.agents import v1 as agents
from millrace.errors import InvalidSpecError, Violation

_NotTextError = not_text_error(vf.TaskError)
_JUDGE_ERRORS = {kind: type(kind, (vf.TaskError,), {}) for kind in judges.TYPES}
"""The error that the library gets for a failed judge: it keeps an error's type and text alone."""


def keep_whole_traces() -> None:
    """Replace the library's recording of errors so that a traceback begins with the first cause.

    The library wraps what a task's code raises in an error that it does not raise, or whose cause it overwrites.
    """
    stock_init, stock_record = vf.TaskError.__init__, vf.Trace.record_error

    def init(self: Any, *args: object) -> None:
        """Make the error with the exception that is being handled as its context."""
        stock_init(self, *args)
        self.__context__ = sys.exc_info()[1]

    def record_error(self: Any, error: Exception) -> None:
        """Record the error with a traceback that begins with its first cause."""
        stock_record(self, error)
        if self.errors[-1].traceback:
            self.errors[-1].traceback = trace_text(error)

    vf.TaskError.__init__, vf.Trace.record_error = init, record_error


def take_numbers() -> None:
    """Replace the library's recording of rewards in this process so that it takes only numbers.

    Anything else is a TypeError, also a text of digits.
    """
    stock = vf.Trace.record_reward

    def record_reward(self: Any, name: str, value: Any, weight: float = 1.0) -> None:
        """Record the reward as a float; raise TypeError if it is no number."""
        try:
            number = number_of(value)
        except NotANumberError as error:
            raise TypeError(f"reward {name!r} is {error}") from error
        stock(self, name, number, weight)

    vf.Trace.record_reward = record_reward


def mark_scoring() -> None:
    """Replace the library's `Task.score` so that requests of rewards and judges pass the gate of judges.

    The failure of a judge's endpoint is raised as a TaskError of its kind. An exit or cancellation by the task's code
    is raised as a TaskError, too.
    """
    stock = vf.Task.score

    @functools.wraps(stock)
    async def score(self: Any, *args: Any, **kwargs: Any) -> None:
        """Score the task with its requests marked as made for rewards; translate failures of judges, exits and
        cancellations.
        """
        try:
            with judges.scoring(), engine_access.at("the task's rewards"):
                await stock(self, *args, **kwargs)
        except vf.TaskError as error:
            if not (kind := judges.failure_type(error)):
                raise
            raise _JUDGE_ERRORS[kind](judges.with_remedy(kind, str(error))) from error
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            # The rollout is cancelled from outside. Raised by the task's own code, the same error is the task's
            # failure.
            if judges.is_being_cancelled(error):
                raise
            raise vf.TaskError(f"the task's rewards raised {type(error).__name__}: {error}") from error

    vf.Task.score = score


def refuse_other_parts_of_chats() -> None:
    """Replace a method of the library's train client so that it refuses messages with content that is not text.

    Its relaying client still takes them. Replies also end earlier where an agent's request asks for it
    (`agents.ends_of`).
    """
    stock = TrainClient.get_response

    async def get_response(
        self: Any, dialect: Any, body: dict[str, Any], sampling: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse content that is not text, else answer as the library does, with the ends that an agent asks for."""
        if kind := other_part(body.get("messages") or ()):
            raise _NotTextError(refusal(kind))
        return await stock(self, dialect, body, agents.ends_of(body, sampling), *args, **kwargs)

    TrainClient.get_response = get_response


# Refuses a v1 environment whose reward or metric functions want arguments that the library does not pass.
#
# It passes by name what a function's signature names, of what it has. What that is differs between releases, so the
# task's own `score` is asked, with stand-ins of the same signatures. Where a task scores by code of its own, nothing
# is refused.

_KINDS = ("metric", "reward")
_LIBRARY = "verifiers"
_CANDIDATES = ("task", "trace", "runtime", "state", "info", "messages", "prompt", "completion", "answer", "harness")
_CANDIDATES += ("agent", "episode", "taskset", "data", "judge", "client")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def refuse_unknown_arguments(tasks: Iterable[Any]) -> None:
    """Raise InvalidSpecError if a reward or metric function of a task requires an argument that the library does not
    pass.

    One task of each class is looked at; tasks with a `score` of their own are not.
    """
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
    """Return the names of the parameters without default that a function has, as the library calls it by name.

    Of a decorated function they are those of the decorator's own function, and not of what it wraps.
    """
    # The library reads the signature of what a decorator wraps, and calls the decorator's own function.
    shown = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {each.name for each in shown if each.default is inspect.Parameter.empty and each.kind in _BY_NAME}


def _passed(task: Any) -> dict[str, set[str]] | None:
    """Return which arguments the task's `score` passes to each reward and metric function, by the function's name.

    Under "" are the arguments that it could pass. None if the library's code raises when it is called without a
    rollout.
    """
    seen: dict[str, set[str]] = {}
    asked = copy.copy(task)
    candidates = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in _CANDIDATES]
    hooks = {
        kind: [_stand_in(each.__name__, inspect.signature(each), seen) for each in task.hooks(kind)] for kind in _KINDS
    }
    # A function that asks for everything shows what the library has to pass.
    hooks["reward"].append(_stand_in("", inspect.Signature(candidates), seen))
    asked.hooks = hooks.__getitem__
    asked.plugged_judges = list
    try:
        asyncio.run(asked.score(_Trace(), object()))
    except Exception:  # noqa: BLE001 - the library's code, asked out of turn: what is wrong will show in a rollout
        return None
    return seen


def _stand_in(name: str, signature: inspect.Signature, seen: dict[str, set[str]]) -> Callable[..., Any]:
    """Return an async function with that name and signature, which returns a reward of 0.

    A call adds the names of its arguments to those under `name` in `seen`.
    """

    async def called(**values: Any) -> float:
        """Note the arguments, and return a reward of 0."""
        seen.setdefault(name, set()).update(values)
        return 0.0

    called.__name__ = name
    called.__signature__ = signature  # type: ignore[attr-defined] - what `inspect.signature` gives
    return called


class _Trace:
    """Takes the place of a trace that `score` writes into."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.rewards: dict[str, Any] = {}

    def record_metric(self, *values: Any) -> None:
        """Ignore the call."""

    record_metrics = record_reward = record_metric


def _refusal(function: Callable[..., Any], kind: str, missing: list[str], offered: set[str]) -> InvalidSpecError:
    """Make the error for a function of that kind (`reward` or `metric`) that requires the arguments `missing`.

    `offered` has the names of those that it may ask for.
    """
    names = " and ".join(repr(each) for each in missing)
    message = (
        f"{kind} function {function.__name__!r} wants {names}, which the library does not pass; it may ask for "
        f"{', '.join(sorted(offered))}"
    )
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" (at {code.co_filename}:{code.co_firstlineno} in {code.co_name})" if code is not None else ""
    return InvalidSpecError(
        [Violation(field="orchestrator.env.id", message=message)],
        message=f"{message}{place}",
        reason="ENV_REWARD_ARGUMENTS",
        remedy=f"let it ask for one of those, or give {names} a default; the task's own fields are `task.NAME`",
    )
