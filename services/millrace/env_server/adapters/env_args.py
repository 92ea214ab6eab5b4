"""The arguments of an environment, and those among them that are the env-server's own."""

from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation
from millrace.rollouts.requests import EnvSpec

# Keys of an environment's args that are the env-server's own and not passed to the environment.
RENDERER = "renderer"  # name of a `renderers` renderer, such as "qwen3"; tokenizes on the client side
NO_RENDERER = "off"  # its value where the engine shall tokenize (v0 only; v1 has no other way to exact tokens)
V1_ENV = "env"  # v1: further keys of the environment's config, such as {"agent": {"timeout": {"setup": 30}}}
V1_EVAL_ARGS = "eval_args"  # v1: taskset args of the held-out set, merged over the others
MAX_ARGS_BYTES = 1 << 20
"""Largest JSON document in a request."""
V1_NUM_TASKS = "num_tasks"  # v1: how many tasks of an endless taskset


def parse_args(env: EnvSpec) -> dict[str, Any]:
    """The environment's arguments. Raises InvalidSpecError."""
    what = f"what environment {env.id!r} shall be loaded with"
    try:
        return decode_object(env.args_json or "{}", what=what, reason="ENV_ARGS_INVALID", max_bytes=MAX_ARGS_BYTES)
    except CorruptObjectError as error:
        message = f"the args of environment {env.id!r} must be a JSON object ({error})"
        wrong = Violation(field="env.args_json", value=env.args_json[:200], message=message, source="request")
        raise InvalidSpecError([wrong]) from error
