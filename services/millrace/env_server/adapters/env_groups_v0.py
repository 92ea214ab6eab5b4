"""The environments behind a v0 environment: the children of a group, or itself."""

import itertools
from collections.abc import Iterator
from typing import Any

import verifiers as vf

from millrace.env_server.adapters.env_args import RENDERER
from millrace.errors import InvalidSpecError, Violation

_COMPLETION = "completion"  # `message_type` of environments


def completes_text(env: vf.Environment, *, renderer: str) -> bool:
    """Whether the policy completes texts there. InvalidSpecError for what could not be played."""
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
    """The environments that play: those of a group, or the one that there is."""
    if not isinstance(env, vf.EnvGroup):
        yield env
        return
    for member in env.envs:
        yield from members_of(member)


def member_of(env: vf.Environment, row: Any) -> vf.Environment:
    """The environment that plays a row."""
    while isinstance(env, vf.EnvGroup):
        name, row, _ = env._route_child_input(row)
        env = env.get_env_for_name(name)
    return env


def of_every_child(env: vf.EnvGroup, dataset: Any) -> list[int]:
    """The rows of a group's data set with those of its environments in turn: the library puts one behind the other.

    So the first rows, which evaluations play, are of all of them.
    """
    rows: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(dataset.select_columns(["info"])):
        rows.setdefault(env._input_env_route(row), []).append(index)
    return [index for taken in itertools.zip_longest(*rows.values()) for index in taken if index is not None]
