"""The arguments of an environment, and those among them that are the env-server's own."""

from collections.abc import Collection, Mapping
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation
from millrace.internal.v1.play_pb2 import EnvSpec

# Keys of an environment's args that are the env-server's own and not passed to the environment.
RENDERER = "renderer"  # name of a `renderers` renderer, such as "qwen3"; tokenizes on the client side
NO_RENDERER = "off"  # its value where the engine shall tokenize (v0 only; v1 has no other way to exact tokens)
V1_ENV = "env"  # v1: further keys of the environment's config, such as {"agent": {"timeout": {"setup": 30}}}
V1_EVAL_ARGS = "eval_args"  # v1: taskset args of the held-out set, merged over the others
MAX_ARGS_BYTES = 1 << 20
"""Largest JSON document in a request."""
V1_NUM_TASKS = "num_tasks"  # v1: how many tasks of an endless taskset
OURS = "millrace"  # a table of the same keys, for environments that have an option of such a name themselves


def parse_args(env: EnvSpec) -> dict[str, Any]:
    """Parse the environment's arguments.

    Raise InvalidSpecError if they are no JSON object or larger than MAX_ARGS_BYTES.
    """
    what = f"what environment {env.id!r} shall be loaded with"
    try:
        return decode_object(env.args_json or "{}", what=what, reason="ENV_ARGS_INVALID", max_bytes=MAX_ARGS_BYTES)
    except CorruptObjectError as error:
        message = f"the args of environment {env.id!r} must be a JSON object ({error})"
        wrong = Violation(field="env.args_json", value=env.args_json[:200], message=message, source="request")
        raise InvalidSpecError([wrong]) from error


def split_args(
    args: Mapping[str, Any], *, keys: Collection[str], options: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments into the environment's and those among `keys`, which the env-server uses itself.

    A key that is also among the environment's `options` goes to the environment. The env-server's own may always be in
    a table `millrace`, and must be for such a key. Raises InvalidSpecError if that table is none or has an unknown key.
    """
    own = dict(args)
    ours = table_of(own.pop(OURS, None), where=f"args.{OURS}") if OURS not in options else {}
    if unknown := sorted(ours.keys() - set(keys)):
        message = f"has no key {unknown[0]!r}; it has {', '.join(keys)}"
        raise InvalidSpecError([Violation(field=f"args.{OURS}", value=unknown[0], message=message)])
    for key in keys:
        if key not in options and key in own:
            ours.setdefault(key, own.pop(key))
    return own, ours


def table_of(value: Any, *, where: str) -> dict[str, Any]:
    """Return a table among the arguments, empty if it is missing; raise InvalidSpecError if it is no table."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidSpecError([Violation(field=where, value=f"{value!r:.100}", message="must be a table")])
    return dict(value)
