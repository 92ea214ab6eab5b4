"""What v0's model calls are asked for: the run's sampling, and what the environment was made with (`sampling_args`).

The library's own `generate` (0.1.14 as 0.3.1) takes an environment's `sampling_args` where who calls it says nothing;
`run_rollout`, which trainers call, does not look at them. Here a run says what is not neutral. Of a group of
environments those of the group count, as with the library, and not those of its members.
"""

from collections.abc import Mapping
from typing import Any

from millrace.env_server.own_sampling import NEUTRAL, flat
from millrace.rollouts.requests import Sampling

_ARGUMENTS = ("temperature", "max_tokens", "top_p")
"""What OpenAI's API knows; the rest goes into `extra_body`."""
_TOKENS = ("max_tokens", "max_completion_tokens")
_ONE_ANSWER = ("n", 1)  # the library's own default


def declared_by(env: Any) -> dict[str, Any]:
    """Return what an environment was made with, without an `extra_body`."""
    said = flat(getattr(env, "sampling_args", None) or {})
    return {name: value for name, value in said.items() if (name, value) != _ONE_ANSWER}


def sampling_args(
    sampling: Sampling, *, is_external: bool = False, declared: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The request's sampling as v0 sampling args, with what the environment `declared` where the run says nothing."""
    parameters = sampling.parameters(is_external=is_external)
    if declared:
        parameters = _filled(parameters, declared, holds_temperature=sampling.holds_temperature)
    args = {name: parameters.pop(name) for name in _ARGUMENTS if name in parameters}
    return args | ({"extra_body": parameters} if parameters else {})


def _filled(asked: Mapping[str, Any], declared: Mapping[str, Any], *, holds_temperature: bool) -> dict[str, Any]:
    said = {name: value for name, value in asked.items() if name not in NEUTRAL or value != NEUTRAL[name]}
    if holds_temperature:
        said["temperature"] = asked["temperature"]
    if any(name in said for name in _TOKENS):
        declared = {name: value for name, value in declared.items() if name not in _TOKENS}
    return {**asked, **declared, **said}
