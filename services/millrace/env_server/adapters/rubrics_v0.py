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
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import verifiers as vf

from millrace.env_server import engine_access
from millrace.env_server.adapters import judges
from millrace.env_server.adapters.failures import frames_of
from millrace.env_server.adapters.outcome import number_of
from millrace.env_server.adapters.selection import RENDERER, EveryTask
from millrace.errors import InvalidSpecError, Violation

# The environments of a v0 environment, a group's children or itself, and their tasks.

_COMPLETION = "completion"  # `message_type` of environments
_ROWS_KEPT = 1024  # a group's members play the same task, and finding a row takes the dataset 0.2 ms


def completes_text(env: vf.Environment, *, renderer: str) -> bool:
    """Return whether the policy completes texts in this environment, where it would chat in others.

    `renderer` is the configured renderer's name, or "". Raises InvalidSpecError if texts are completed and some members
    of a group chat, a member has tools, or a renderer is configured.
    """
    members = list(members_of(env))
    num_completing = sum(getattr(each, "message_type", "chat") == _COMPLETION for each in members)
    if not num_completing:
        return False
    if num_completing < len(members):
        message = "some environments of the group chat and some have a text completed; make two groups"
        raise InvalidSpecError([Violation(field="env.message_type", value=_COMPLETION, message=message)])
    if any(each.tool_defs for each in members):
        message = "a text that is completed has no tools; leave out the tools, or let the environment chat"
        raise InvalidSpecError([Violation(field="env.message_type", value=_COMPLETION, message=message)])
    if renderer:
        message = "only chats are rendered, and this environment has a text completed; leave the key out"
        raise InvalidSpecError([Violation(field=f"args.{RENDERER}", value=renderer, message=message)])
    return True


def members_of(env: vf.Environment) -> Iterator[vf.Environment]:
    """Yield the environments that play: those of an environment group and of groups in it, or the environment
    itself.
    """
    if not isinstance(env, vf.EnvGroup):
        yield env
        return
    for member in env.envs:
        yield from members_of(member)


def member_of(env: vf.Environment, row: Any) -> vf.Environment:
    """Return the environment of a group, and of groups in it, that plays the dataset row `row`; `env` itself if it
    is no group.
    """
    while isinstance(env, vf.EnvGroup):
        name, row, _ = env._route_child_input(row)
        env = env.get_env_for_name(name)
    return env


def tasks_of(env: vf.Environment, *, is_eval: bool) -> EveryTask | None:
    """Return the environment's task set, for evaluation if `is_eval` and else for training; None if it has none.

    `get_eval_dataset` of the library would fall back to the training tasks, which are not held out.
    """
    dataset: Any = env.build_eval_dataset() if is_eval else env.build_dataset()
    if dataset is None:
        return None

    def row(index: int) -> dict[str, Any]:
        """Return the dataset's row at `index` as a new dictionary."""
        return dict(dataset[index])

    @functools.cache
    def ids() -> list[Any]:
        """Return the dataset's column `id`, or else `example_id`; [] if it has neither."""
        column = next((each for each in ("id", "example_id") if each in dataset.column_names), None)
        return dataset[column][:] if column else []

    def named(index: int, kind: str) -> Iterable[str]:
        """Return the id of the row at `index`, as a tuple of one text, for the kind "ids"; () without ids, or for other
        kinds.
        """
        return (str(ids()[index]),) if kind == "ids" and ids() else ()

    # The library copies a row before a rollout may change it.
    return EveryTask(
        size=len(dataset),
        row=functools.lru_cache(_ROWS_KEPT)(row),
        content=row,
        named=named,
        mixed=interleaved_rows(env, dataset) if isinstance(env, vf.EnvGroup) else None,
    )


def interleaved_rows(env: vf.EnvGroup, dataset: Any) -> list[int]:
    """Return the indices of all rows of a group's dataset, in an order that takes one of each environment in turn.

    The library's order is one environment after the other. So the first rows, which evaluations play, are of all
    environments.
    """
    rows: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(dataset.select_columns(["info"])):
        rows.setdefault(env._input_env_route(row), []).append(index)
    return [index for taken in itertools.zip_longest(*rows.values()) for index in taken if index is not None]


WARNINGS_METRIC = "rubric_warnings"
"""Metric of a rollout: warnings that the library's rubrics logged of it, such as a verification that timed out."""
_LOGGERS = ("verifiers.rubrics", "verifiers.legacy.rubrics")
_CALLS = {"_call_individual_reward_func": False, "_call_group_reward_func": True}
"""The library's calls of reward functions, and whether they get a whole group."""
_MAX_ROLLOUTS = 8192  # as many as `SpanLog` remembers, for the same reason
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
        """Return the library's metrics `known` with each mapping that a function returned split into its keys, and the
        count of warnings if there are any.

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
        """Return the notes (failures, metrics, warnings) of the rollout of `state`, by its `trajectory_id`, to be added
        to.

        New ones are made if there are none. For a state without that id they are the notes of `playing`. Beyond 8192
        rollouts the oldest notes are dropped.
        """
        key = state.get("trajectory_id") if isinstance(state, Mapping) else None
        if not key:
            return self._play.get() or Scored()
        found = self._notes.setdefault(str(key), Scored())
        while len(self._notes) > _MAX_ROLLOUTS:
            self._notes.popitem(last=False)
        return found

    def take(self, trajectory_id: str) -> Scored:
        """Return the notes (failures, metrics, warnings) of one rollout's scoring, and remove them; empty ones if
        there are none.
        """
        return self._notes.pop(trajectory_id, Scored())

    @contextlib.contextmanager
    def playing(self) -> Iterator[Scored]:
        """Yield empty notes (failures, metrics, warnings), to which scoring inside the block adds for states without an
        id.

        Scoring inside the block is that of this task and of tasks that it starts.
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
        """Return the result of the reward function `name` as a float, or a list with a float for each member of the
        group.

        A mapping from a function of weight 0 is noted as metrics and counts as 0.0. Raises TypeError for anything else.
        """
        if not self.is_of_group:
            return self._number(name, result, self.scored[0])
        if not isinstance(result, Iterable) or isinstance(result, Mapping | AbstractSet):  # these have no order
            raise TypeError(f"it returned {result!r:.100}, not a list with a number for each member of the group")
        # A result may be longer than the group: its surplus gets notes of its own, and is refused below.
        scored = iter(self.scored)
        numbers = [self._number(name, each, next(scored, Scored())) for each in result]
        if len(numbers) != len(self.scored):
            raise TypeError(f"it returned {len(numbers)} numbers for the {len(self.scored)} members of the group")
        return numbers

    def _number(self, name: str, value: Any, scored: Scored) -> float:
        """Return one result as a float; note a mapping in `scored` as metrics, if the function's weight is 0, and
        return 0.0.

        Raises TypeError for anything else.
        """
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
        """Take the states of a group's members, and remember which of their steps have no reward now."""
        self._states = states
        self.look()

    def look(self) -> None:
        """Remember which steps of the group's states have no reward now."""
        steps = [step for state in self._states for step in state.get("trajectory") or ()]
        self._silent = [step for step in steps if isinstance(step, MutableMapping) and step.get("reward") is None]

    def restore(self) -> None:
        """Set the reward of the steps that had none at the last `look` back to None."""
        for step in self._silent:
            step["reward"] = None


_turns: contextvars.ContextVar[_Turns | None] = contextvars.ContextVar("millrace_silent_turns", default=None)


def watch_rubrics(rubric_class: Any) -> None:
    """Wrap the scoring methods of `rubric_class`, the library's `Rubric`, and of all its subclasses, made before or
    later.

    What their functions raise or return as metrics, and their warnings, are then noted in SCORED, and rewards that the
    library writes into turns are removed. A second call does nothing.
    """
    if "_millrace_watched" in vars(rubric_class):
        return
    rubric_class._millrace_watched = True

    def init_subclass(cls: type, **options: Any) -> None:
        """Wrap the methods of a new subclass that call reward functions."""
        super(rubric_class, cls).__init_subclass__(**options)
        _watch_calls(cls)

    rubric_class.__init_subclass__ = classmethod(init_subclass)
    for each in _family(rubric_class):
        _watch_calls(each)
    rubric_class.score_group = _without_rewards_of_turns(rubric_class.score_group)
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(_WarningCounter(logging.WARNING))


def _family(kind: type) -> Iterator[type]:
    """Yield a class and all its subclasses."""
    yield kind
    for derived in kind.__subclasses__():
        yield from _family(derived)


def _watch_calls(kind: type) -> None:
    """Wrap the library's two methods that call a reward function, where the class itself defines them."""
    for name, is_of_group in _CALLS.items():
        if name in vars(kind):
            setattr(kind, name, _watching(vars(kind)[name], is_of_group=is_of_group))


def _watching(stock: Callable[..., Any], *, is_of_group: bool) -> Callable[..., Any]:
    """Return a method that calls `stock` with the reward function watched.

    `is_of_group` is whether that function gets the states of a whole group.
    """

    @functools.wraps(stock)
    async def call(rubric: Any, func: Callable[..., Any], state: Any) -> Any:
        """Call the library's method for the reward function `func`, which is watched, with the notes of each rollout in
        `_call`.

        `state` is the state of one rollout, or the list of a whole group's.
        """
        members = state if is_of_group else [state]
        is_metric = _is_metric(rubric, func)
        scored = [SCORED.of(each) for each in members]
        token = _call.set(_Call(scored=scored, is_of_group=is_of_group, is_metric=is_metric))
        try:
            return await stock(rubric, _watched_once(func), state)
        finally:
            _call.reset(token)
            if (turns := _turns.get()) is not None:
                # The reward function may have given turns rewards of their own, which stay.
                turns.look()

    return call


def _is_metric(rubric: Any, func: Any) -> bool:
    """Return whether the rubric has the function, and has it only with weight 0."""
    weights = [weight for each, weight in zip(rubric.funcs, rubric.weights, strict=False) if each is func]
    return bool(weights) and not any(weights)


def _watched_once(func: Any) -> Any:
    """Return the reward function watched (`_watched`); one that is watched already is returned as it is."""
    if getattr(func, "_millrace_watched", False):
        return func
    try:
        return _watched(func)
    except TypeError:  # an object that can be called, and not be kept
        return _watched.__wrapped__(func)


@functools.lru_cache(_MAX_WRAPPED)
def _watched(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return an async function that calls the reward function `func`, through the gate of judges, and accepts its
    result.

    What it raises is noted for the rollouts of the current `_call` and raised again; an exit or a cancellation by its
    own code is raised as RewardAbortedError.
    """

    # `wraps` sets __wrapped__, so inspect.signature, by which a rubric picks arguments and recognises group functions,
    # still sees the original.
    @functools.wraps(func)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        """Call the reward function, note what it raises for its rollouts, and return its accepted result."""
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
    """Return a `score_group` that calls `stock`, and then removes rewards that the library has written into turns."""

    @functools.wraps(stock)
    async def score_group(rubric: Any, states: Sequence[Any]) -> Any:
        """Score the group as the library does, then remove the rewards that it has written into turns."""
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
    """Raise InvalidSpecError if a reward function of the environment requires an argument that its rubric does not
    pass.

    `row` is a task of the environment's data set, and `client` a client that is never used. Environments and rubrics
    with code of their own that could add arguments are not checked.
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
    """Raise InvalidSpecError if `func` requires an argument that the rubric does not pass when it scores the task
    `row`.

    `env` makes the state of the task, with `client`, which is never used.
    """
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
    """Return the names of the parameters that a function requires and the library would not pass.

    `offered` has the arguments that a rubric can pass, by name.
    """
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
    """Return the arguments that a rubric passes to a function that takes everything, by name.

    The rubric is called with such a function, of a single rollout or with `is_of_group` of a group, for a state that
    `env` makes of the task `row`. None if that cannot be known without a rollout, because the library's code raises.
    """
    seen: dict[str, Any] = {}

    async def ask(**values: Any) -> Any:
        """Note the arguments that the rubric passes, and return a reward of 0."""
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

    A rubric or a group whose class replaces a method of the library yields none.
    """
    if any(hasattr(vf.RubricGroup, name) for name in _own_methods(type(rubric))):
        return
    if not isinstance(rubric, vf.RubricGroup):
        yield rubric
        return
    for each in rubric.rubrics:
        yield from _rubrics_of(each)


def _own_methods(kind: type) -> Iterator[str]:
    """Yield the names of methods that a class has from code outside the library: its own and its bases', without
    dunders.
    """
    for each in kind.__mro__:
        if each.__module__.split(".")[0] not in (_LIBRARY, "builtins", "abc", "typing"):
            yield from (name for name, value in vars(each).items() if _is_code(value) and not name.startswith("__"))


def _is_code(value: Any) -> bool:
    """Return whether a class attribute is a function, a property or another descriptor."""
    return callable(value) or hasattr(value, "__get__")


def _place(func: Callable[..., Any]) -> str:
    """Return where a function is defined, as ` (at rewards.py:12 in reward)`; "" for a function without a file."""
    code = getattr(inspect.unwrap(func), "__code__", None)
    return f" (at {code.co_filename}:{code.co_firstlineno} in {code.co_name})" if code is not None else ""
