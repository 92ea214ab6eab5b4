"""Checks a v0 rubric's arguments, and watches how it scores, so that what it swallows does not pass for a reward.

* A `verifiers` v0 rubric swallows what a reward function raises, logs one line and scores 0.0, which would train the
  policy away from whatever made the function fail; it does the same of a result that is no number, such as the None of
  a forgotten `return`. All rubrics call their functions through two methods of the class `Rubric`. Both are replaced
  there, so it does not matter where a rubric comes from, who calls it, and when its functions were added.
* Scoring a group writes the whole reward into each turn that has none. It is taken out again: a turn has the reward
  that the environment gave it.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import verifiers as vf

from millrace.env_server import engine_access
from millrace.env_server.adapters.failures import frames_of
from millrace.env_server.adapters.groups_v0 import members_of
from millrace.env_server.adapters.outcome import number_of
from millrace.env_server.adapters.scoring import judges
from millrace.errors import InvalidSpecError, Violation

WARNINGS_METRIC = "rubric_warnings"
"""Metric of a rollout: warnings that the library's rubrics logged of it, such as a verification that timed out."""
_LOGGERS = ("verifiers.rubrics", "verifiers.legacy.rubrics")
_CALLS = {"_call_individual_reward_func": False, "_call_group_reward_func": True}
"""The library's calls of reward functions, and whether they get a whole group."""
_MAX_ROLLOUTS = 8192  # as many as `span_log` remembers, for the same reason
_MAX_WRAPPED = 1024


class RewardAbortedError(Exception):
    """A reward function raised what would end its rollout's task, or the whole process, and is raised instead of
    that.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """The error of one reward function."""

    message: str
    frames: str
    type: str = "RewardError"


@dataclass(slots=True, kw_only=True)
class Scored:
    """What rubrics noted of one rollout, beside its reward."""

    failures: list[RewardFailure] = field(default_factory=list[RewardFailure])
    metrics: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """By function of weight 0, the metrics that it returned in the place of a number."""
    num_warnings: int = 0

    def metrics_with(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the library's metrics, with each mapping that a function returned split into its keys, and the
        warnings' count.

        A key that is taken already, such as by another reward function, is written `FUNCTION/KEY`.
        """
        found = {name: value for name, value in known.items() if name not in self.metrics}
        if self.num_warnings:
            found[WARNINGS_METRIC] = self.num_warnings
        for function, own in self.metrics.items():
            for name, value in own.items():
                found[f"{function}/{name}" if str(name) in found else str(name)] = value
        return found


class ScoredLog:
    """The notes of this process's rollouts by `trajectory_id`.

    Those of states without one are of the play in this task.
    """

    def __init__(self) -> None:
        self._notes: OrderedDict[str, Scored] = OrderedDict()
        self._play: contextvars.ContextVar[Scored | None] = contextvars.ContextVar("millrace_scored", default=None)

    def of(self, state: Any) -> Scored:
        """Return the notes of a state's rollout, to be added to; new ones are made if there are none."""
        key = state.get("trajectory_id") if isinstance(state, Mapping) else None
        if not key:
            return self._play.get() or Scored()
        found = self._notes.setdefault(str(key), Scored())
        while len(self._notes) > _MAX_ROLLOUTS:
            self._notes.popitem(last=False)
        return found

    def take(self, trajectory_id: str) -> Scored:
        """Return the notes of one rollout, and forget them; empty notes if there are none."""
        return self._notes.pop(trajectory_id, Scored())

    @contextlib.contextmanager
    def playing(self) -> Iterator[Scored]:
        """Yield notes for states without an id that are scored inside the block, in this task and those that it
        starts.
        """
        notes = Scored()
        token = self._play.set(notes)
        try:
            yield notes
        finally:
            self._play.reset(token)


SCORED = ScoredLog()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a reward function."""

    scored: Sequence[Scored]
    """Of each member."""
    is_of_group: bool
    is_metric: bool
    """Whether its result has weight 0."""

    def accepted(self, name: str, result: Any) -> Any:
        """Return a reward function's result as a float, or a list with one for each member of the group.

        A mapping from a function of weight 0 is noted as metrics and counts as 0.0. Raises TypeError for anything else.
        """
        if not self.is_of_group:
            return self._number(name, result, self.scored[0])
        if not isinstance(result, Iterable) or isinstance(result, Mapping | AbstractSet):  # these have no order
            raise TypeError(f"it returned {result!r:.100}, not a list with a number for each member of the group")
        scored = iter(self.scored)
        numbers = [self._number(name, each, next(scored, Scored())) for each in result]
        if len(numbers) != len(self.scored):
            raise TypeError(f"it returned {len(numbers)} numbers for the {len(self.scored)} members of the group")
        return numbers

    def _number(self, name: str, value: Any, scored: Scored) -> float:
        if self.is_metric and isinstance(value, Mapping):
            scored.metrics[name] = value
            return 0.0
        try:
            return number_of(value)
        except TypeError as error:
            raise TypeError(f"it returned {error}") from error


_call: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("millrace_reward_call", default=None)


class _Turns:
    """Which turns of a group have no reward of the environment's own."""

    def __init__(self, states: Sequence[Any]) -> None:
        self._states = states
        self.look()

    def look(self) -> None:
        """Note the steps that have no reward now; called after the environment's code has run."""
        steps = [step for state in self._states for step in state.get("trajectory") or ()]
        self._silent = [step for step in steps if isinstance(step, MutableMapping) and step.get("reward") is None]

    def restore(self) -> None:
        """Set the reward of the noted steps back to None, which the library has filled in since."""
        for step in self._silent:
            step["reward"] = None


_turns: contextvars.ContextVar[_Turns | None] = contextvars.ContextVar("millrace_silent_turns", default=None)


def watch_rubrics(rubric_class: Any) -> None:
    """Wrap the scoring methods of the library's class `Rubric` and of all its subclasses, made before or later.

    Their failures, metrics and warnings are then noted in SCORED, and rewards that the library writes into turns are
    removed. A second call does nothing.
    """
    if "_millrace_watched" in vars(rubric_class):
        return
    rubric_class._millrace_watched = True

    def init_subclass(cls: type, **options: Any) -> None:
        super(rubric_class, cls).__init_subclass__(**options)
        _watch_calls(cls)

    rubric_class.__init_subclass__ = classmethod(init_subclass)
    for each in _family(rubric_class):
        _watch_calls(each)
    rubric_class.score_group = _without_rewards_of_turns(rubric_class.score_group)
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(_WarningCounter(logging.WARNING))


def _family(kind: type) -> Iterator[type]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _family(derived)


def _watch_calls(kind: type) -> None:
    for name, is_of_group in _CALLS.items():
        if name in vars(kind):
            setattr(kind, name, _watching(vars(kind)[name], is_of_group=is_of_group))


def _watching(stock: Callable[..., Any], *, is_of_group: bool) -> Callable[..., Any]:
    @functools.wraps(stock)
    async def call(rubric: Any, func: Callable[..., Any], state: Any) -> Any:
        members = state if is_of_group else [state]
        is_metric = _is_metric(rubric, func)
        scored = [SCORED.of(each) for each in members]
        token = _call.set(_Call(scored=scored, is_of_group=is_of_group, is_metric=is_metric))
        try:
            return await stock(rubric, _watched_once(func), state)
        finally:
            _call.reset(token)
            if (turns := _turns.get()) is not None:
                turns.look()

    return call


def _is_metric(rubric: Any, func: Any) -> bool:
    """Return whether a rubric gives a function weight 0 everywhere; False if the rubric does not have the function."""
    weights = [weight for each, weight in zip(rubric.funcs, rubric.weights, strict=False) if each is func]
    return bool(weights) and not any(weights)


def _watched_once(func: Any) -> Any:
    if getattr(func, "_millrace_watched", False):
        return func
    try:
        return _watched(func)
    except TypeError:  # an object that can be called, and not be kept
        return _watched.__wrapped__(func)


@functools.lru_cache(_MAX_WRAPPED)
def _watched(func: Callable[..., Any]) -> Callable[..., Any]:
    # `wraps` sets __wrapped__, so inspect.signature, by which a rubric picks arguments and recognises group functions,
    # still sees the original.
    @functools.wraps(func)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        call, name = _call.get(), getattr(func, "__name__", repr(func))
        assert call is not None
        try:
            with judges.scoring(), engine_access.at(f"reward function {name!r}"):
                result = func(*args, **kwargs)
                score = await result if inspect.isawaitable(result) else result
            return call.accepted(name, score)
        # Foreign reward code: noted for its rollouts, then raised.
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if judges.is_being_cancelled(error):
                raise
            kind = judges.failure_type(error)
            message = judges.with_remedy(kind, f"reward function {name!r} raised {type(error).__name__}: {error}")
            failure = RewardFailure(message=message, frames=frames_of(error), type=kind or "RewardError")
            for each in call.scored:
                each.failures.append(failure)
            if isinstance(error, Exception):
                raise
            raise RewardAbortedError(message) from error

    watched._millrace_watched = True  # type: ignore[attr-defined]
    return watched


def _without_rewards_of_turns(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    async def score_group(rubric: Any, states: Sequence[Any]) -> Any:
        turns = _Turns(states)
        token = _turns.set(turns)
        try:
            return await stock(rubric, states)
        finally:
            _turns.reset(token)
            turns.restore()

    return score_group


class _WarningCounter(logging.Handler):
    """Counts warnings that rubrics log while they score: some catch what goes wrong, and score 0."""

    def emit(self, record: logging.LogRecord) -> None:
        """Count a warning for each rollout that is being scored in this task."""
        if (call := _call.get()) is not None:
            for each in call.scored:
                each.num_warnings += 1


# Refusal of v0 environments whose reward functions need arguments that their rubric does not pass.
#
# A rubric passes by name what a function's signature names, of what it has: fields of the state, columns of the data
# set, its class objects. Which these are differs between releases, so the rubric itself is asked, with a function
# that takes everything. Where code of the environment could still add to them before it scores, nothing is refused.

_PROVIDERS = ("score_object_providers", "group_score_object_providers")
_LIBRARY = "verifiers"


def refuse_unknown_arguments(env: vf.Environment, row: Mapping[str, Any], *, client: Any) -> None:
    """Raise InvalidSpecError if a reward function requires an argument that its rubric does not pass.

    `row` is a task of the environment's data set. Environments and rubrics with code of their own that could add
    arguments are not checked.
    """
    for member in members_of(env):
        if any(_own_methods(type(env))) or any(_own_methods(type(member))):
            continue  # their code may give the rubric more when a rollout begins
        for rubric in _rubrics_of(member.rubric):
            if any(getattr(rubric, name, None) for name in _PROVIDERS):
                continue  # code, too, and nobody says that it can be called without a rollout
            for func in rubric.funcs:
                _check(func, member, rubric, row, client)


def _check(
    func: Callable[..., Any], env: vf.Environment, rubric: vf.Rubric, row: Mapping[str, Any], client: Any
) -> None:
    is_of_group = rubric._is_group_func(func)
    offered = _offered(env, rubric, row, client, is_of_group=is_of_group)
    if offered is None or not (missing := _missing(func, offered)):
        return
    name = getattr(func, "__name__", repr(func))
    names = " and ".join(repr(each) for each in missing)
    message = (
        f"reward function {name!r} wants {names}, which its rubric does not pass; "
        f"it may ask for {', '.join(sorted(offered))}"
    )
    raise InvalidSpecError(
        [Violation(field="orchestrator.env.id", message=message)],
        message=f"{message}{_place(func)}",
        reason="ENV_REWARD_ARGUMENTS",
        remedy=f"let it ask for one of those, or give {names} a default"
        + ("" if is_of_group else ", or the data set a column of that name"),
    )


def _missing(func: Callable[..., Any], offered: Mapping[str, Any]) -> list[str]:
    """Return the required parameters of a function that the library would not pass, given what it has to offer."""
    shown = inspect.signature(func).parameters.values()
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in shown)
    passed = {name for name in offered if takes_all or any(each.name == name for each in shown)}
    # The library reads the signature of what a decorator wraps, and calls the decorator's own function.
    called = inspect.signature(func, follow_wrapped=False).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [each for each in called if each.default is inspect.Parameter.empty and each.kind in by_name]
    return [each.name for each in required if each.name not in passed]


def _offered(
    env: vf.Environment, rubric: vf.Rubric, row: Mapping[str, Any], client: Any, *, is_of_group: bool
) -> Mapping[str, Any] | None:
    """Return the arguments that a rubric passes to a function that takes everything.

    None if that cannot be known without a rollout, because the library's code raises.
    """
    seen: dict[str, Any] = {}

    async def ask(**values: Any) -> Any:
        seen.update(values)
        return [0.0] if is_of_group else 0.0

    ask._millrace_watched = True  # type: ignore[attr-defined] - it is no function of the environment's
    try:
        state: Any = _run(env.init_state(dict(row), client, ""))  # pyright: ignore[reportArgumentType]
        if state.get("completion") is None:
            state["completion"] = []
        if is_of_group:
            _run(rubric._call_group_reward_func(ask, [state]))
        else:
            _run(rubric._call_individual_reward_func(ask, state))
    except Exception:  # noqa: BLE001 - foreign code, asked out of turn: what it raises will show in a rollout
        return None
    return seen or None


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that awaits nothing, without an event loop, and return its result.

    Raises RuntimeError if it awaits something.
    """
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    finally:
        coroutine.close()
    raise RuntimeError("it waits for something")


def _rubrics_of(rubric: vf.Rubric) -> Iterator[vf.Rubric]:
    """Yield the rubrics that call functions as the library does: those of a group, or the rubric itself.

    A group with methods of its own in place of the library's yields none.
    """
    if any(hasattr(vf.RubricGroup, name) for name in _own_methods(type(rubric))):
        return
    if not isinstance(rubric, vf.RubricGroup):
        yield rubric
        return
    for each in rubric.rubrics:
        yield from _rubrics_of(each)


def _own_methods(kind: type) -> Iterator[str]:
    """Yield the names of methods that classes outside the library define among a class and its bases, without
    dunders.
    """
    for each in kind.__mro__:
        if each.__module__.split(".")[0] not in (_LIBRARY, "builtins", "abc", "typing"):
            yield from (name for name, value in vars(each).items() if _is_code(value) and not name.startswith("__"))


def _is_code(value: Any) -> bool:
    return callable(value) or hasattr(value, "__get__")


def _place(func: Callable[..., Any]) -> str:
    """Return ` (at rewards.py:12)`, or an empty text for a function without a file."""
    code = getattr(inspect.unwrap(func), "__code__", None)
    return f" (at {code.co_filename}:{code.co_firstlineno} in {code.co_name})" if code is not None else ""
