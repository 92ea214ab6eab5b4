"""What env-servers are asked and what they play, on the wire (env_service.proto)."""

import functools
from dataclasses import fields
from typing import Any

from millrace.internal.v1 import env_service_pb2
from millrace.rollouts.requests import EnvSpec, PlayedGroup, PlayRequest, Sampling
from millrace.rollouts.wire import purpose_from_wire, purpose_to_wire


def env_from_wire(message: env_service_pb2.EnvSpec) -> EnvSpec:
    """Return the environment that a message names."""
    return EnvSpec(**_values(message, EnvSpec))


def env_to_wire(env: EnvSpec) -> env_service_pb2.EnvSpec:
    """Return the message that names the environment."""
    return env_service_pb2.EnvSpec(**_values(env, EnvSpec))


def sampling_from_wire(message: env_service_pb2.Sampling) -> Sampling:
    """Return the sampling parameters of a message."""
    return Sampling(**_values(message, Sampling))


def sampling_to_wire(sampling: Sampling) -> env_service_pb2.Sampling:
    """Return the message that says it."""
    return env_service_pb2.Sampling(**_values(sampling, Sampling))


def play_from_wire(message: env_service_pb2.PlayGroupRequest) -> PlayRequest:
    """Return the request of a message; its values are not checked here, but by the env-server."""
    values = _values(message, PlayRequest)
    values["purpose"] = purpose_from_wire(message.purpose)
    values["members"] = tuple(message.members)
    values["env"] = env_from_wire(message.env)
    values["sampling"] = sampling_from_wire(message.sampling)
    return PlayRequest(**values)


def play_to_wire(request: PlayRequest) -> env_service_pb2.PlayGroupRequest:
    """Return the message of a request."""
    values = _values(request, PlayRequest)
    values["purpose"] = purpose_to_wire(request.purpose)
    values["env"] = env_to_wire(request.env)
    values["sampling"] = sampling_to_wire(request.sampling)
    return env_service_pb2.PlayGroupRequest(**values)


def group_from_wire(message: env_service_pb2.PlayingGroup) -> PlayedGroup:
    """Return the group that a message names."""
    values = _values(message, PlayedGroup)
    values["purpose"] = purpose_from_wire(message.purpose)
    values["members"] = tuple(message.members)
    return PlayedGroup(**values)


def group_to_wire(group: PlayedGroup) -> env_service_pb2.PlayingGroup:
    """Return the message that names the group."""
    values = _values(group, PlayedGroup)
    values["purpose"] = purpose_to_wire(group.purpose)
    return env_service_pb2.PlayingGroup(**values)


def _values(source: Any, kind: Any) -> dict[str, Any]:
    """Return the fields of `kind`, which have the same names on either side."""
    return {name: getattr(source, name) for name in _field_names(kind)}


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(part.name for part in fields(kind))
