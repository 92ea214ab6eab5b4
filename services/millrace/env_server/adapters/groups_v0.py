"""The environments of a v0 environment, a group's children or itself, and their tasks."""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import verifiers as vf

from millrace.env_server.adapters.env_args import RENDERER
from millrace.env_server.adapters.selection import EveryTask
from millrace.errors import InvalidSpecError, Violation

_COMPLETION = "completion"  # `message_type` of environments
_ROWS_KEPT = 1024  # a group's members play the same task, and finding a row takes the dataset 0.2 ms


def completes_text(env: vf.Environment, *, renderer: str) -> bool:
    """Return whether the policy completes texts in this environment, where it would chat in others.

    Raises InvalidSpecError if texts are completed and some members of a group chat, a member has tools, or a renderer
    is configured.
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
    """Yield the environments that play: a group's members, or the environment itself."""
    if not isinstance(env, vf.EnvGroup):
        yield env
        return
    for member in env.envs:
        yield from members_of(member)


def member_of(env: vf.Environment, row: Any) -> vf.Environment:
    """Return the environment of a group, and of groups in it, that plays a row; `env` itself if it is no group."""
    while isinstance(env, vf.EnvGroup):
        name, row, _ = env._route_child_input(row)
        env = env.get_env_for_name(name)
    return env


def tasks_of(env: vf.Environment, *, is_eval: bool) -> EveryTask | None:
    """Return the environment's task set for training or for evaluation; None if it has none.

    `get_eval_dataset` of the library would fall back to the training tasks, which are not held out.
    """
    dataset: Any = env.build_eval_dataset() if is_eval else env.build_dataset()
    if dataset is None:
        return None

    def row(index: int) -> dict[str, Any]:
        return dict(dataset[index])

    @functools.cache
    def ids() -> list[Any]:
        column = next((each for each in ("id", "example_id") if each in dataset.column_names), None)
        return dataset[column][:] if column else []

    def named(index: int, kind: str) -> Iterable[str]:
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
    """Return the indices of a group's rows, one of each environment in turn.

    The library's order is one after the other. So the first rows, which evaluations play, are of all environments.
    """
    rows: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(dataset.select_columns(["info"])):
        rows.setdefault(env._input_env_route(row), []).append(index)
    return [index for taken in itertools.zip_longest(*rows.values()) for index in taken if index is not None]
