"""Refuses a v0 environment whose reward functions want arguments that its rubric does not pass.

A rubric passes by name what a function's signature names, of what it has: fields of the state, columns of the data set,
its class objects. Which these are differs between releases, so the rubric itself is asked, with a function that takes
everything. Where code of the environment could still add to them before it scores, nothing is refused.
"""

import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import verifiers as vf

from millrace.env_server.adapters.tasks.groups_v0 import members_of
from millrace.errors import InvalidSpecError, Violation

_PROVIDERS = ("score_object_providers", "group_score_object_providers")
_LIBRARY = "verifiers"


def refuse_unknown_arguments(env: vf.Environment, row: Mapping[str, Any], *, client: Any) -> None:
    """InvalidSpecError if a reward function could never be called; `row` is a task of the environment's data set."""
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
    wanted = " and ".join(repr(each) for each in missing)
    message = (
        f"reward function {name!r} wants {wanted}, which its rubric does not pass; "
        f"it may ask for {', '.join(sorted(offered))}"
    )
    raise InvalidSpecError(
        [Violation(field="orchestrator.env.id", message=message)],
        message=f"{message}{_place(func)}",
        reason="ENV_REWARD_ARGUMENTS",
        remedy=f"let it ask for one of those, or give {wanted} a default"
        + ("" if is_of_group else ", or the data set a column of that name"),
    )


def _missing(func: Callable[..., Any], offered: Mapping[str, Any]) -> list[str]:
    """Names of the arguments without which a function cannot be called, of those that the library would not pass."""
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
    """Return what a rubric passes to a function that takes everything; None if it cannot be told without a rollout."""
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
    """The result of a coroutine that waits for nothing. RuntimeError if it does: environments load without a loop."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    finally:
        coroutine.close()
    raise RuntimeError("it waits for something")


def _rubrics_of(rubric: vf.Rubric) -> Iterator[vf.Rubric]:
    """Return the rubrics that call functions as the library does: those of a group, or the one that there is."""
    if any(hasattr(vf.RubricGroup, name) for name in _own_methods(type(rubric))):
        return
    if not isinstance(rubric, vf.RubricGroup):
        yield rubric
        return
    for each in rubric.rubrics:
        yield from _rubrics_of(each)


def _own_methods(kind: type) -> Iterator[str]:
    """Names of what a class, or one that it is derived from, does beside what the library's do; not constructors."""
    for each in kind.__mro__:
        if each.__module__.split(".")[0] not in (_LIBRARY, "builtins", "abc", "typing"):
            yield from (name for name, value in vars(each).items() if _is_code(value) and not name.startswith("__"))


def _is_code(value: Any) -> bool:
    return callable(value) or hasattr(value, "__get__")


def _place(func: Callable[..., Any]) -> str:
    """` (at rewards.py:12)`, or nothing for what is no function of a file."""
    code = getattr(inspect.unwrap(func), "__code__", None)
    return f" (at {code.co_filename}:{code.co_firstlineno} in {code.co_name})" if code is not None else ""
