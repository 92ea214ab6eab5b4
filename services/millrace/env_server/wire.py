"""Loaded environments on the wire of the env-server and of its workers, and the limits of what is asked."""

import json
from collections.abc import Sequence

from millrace.config.sections.sampling import BOUNDS
from millrace.decoding import decode_object
from millrace.env_server.adapters.selection import MAX_ARGS_BYTES
from millrace.env_server.isolation.inherited import api_key_problem
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation
from millrace.internal.v1 import env_service_pb2, env_worker_pb2, play_pb2, rollout_pb2
from millrace.rollouts.requests import LoadedEnv, TaskSet
from millrace.runlog.names import Names

MAX_GROUP_SIZE = 65_536
# Longest deadline of a rollout.
_MAX_ROLLOUT_S = 30 * 86_400.0
_DECLARED = "what an environment declares of its sampling"


def loaded_from_wire(message: env_worker_pb2.EnvLoaded) -> LoadedEnv:
    """Decode a worker's report of the environment that it has loaded. Raises CorruptObjectError."""
    declared = decode_object(message.declared_json or "{}", what=_DECLARED, reason="WORKER_REPORT_INVALID")
    if not all(isinstance(values, dict) for values in declared.values()):
        raise CorruptObjectError(f"{_DECLARED} must be an object of objects", reason="WORKER_REPORT_INVALID")
    return LoadedEnv(
        api=message.api,
        requires_group=message.requires_group,
        train=TaskSet(ids=tuple(message.train_task_ids), digest=message.train.digest),
        eval=TaskSet(ids=tuple(message.eval_task_ids), digest=message.eval.digest),
        declared=declared,
    )


def loaded_to_wire(loaded: LoadedEnv) -> env_worker_pb2.EnvLoaded:
    """Encode the description of a loaded environment as a worker's report."""
    return env_worker_pb2.EnvLoaded(
        api=loaded.api,
        requires_group=loaded.requires_group,
        train=tasks_to_wire(loaded.train),
        eval=tasks_to_wire(loaded.eval),
        train_task_ids=loaded.train.ids,
        eval_task_ids=loaded.eval.ids,
        declared_json=json.dumps(loaded.declared, default=str),
    )


def tasks_to_wire(tasks: TaskSet) -> env_service_pb2.TaskSet:
    """Encode a task set's size and digest, without the ids."""
    return env_service_pb2.TaskSet(num_tasks=len(tasks), digest=tasks.digest)


def invalid_request(wrong: Sequence[tuple[str, object, str]], *, source: str = "PlayGroupRequest") -> InvalidSpecError:
    """Return the error of a request with wrong fields; `wrong` has (name, value, problem) of each.

    `source` is the name of the request's message.
    """
    violations = [Violation(field=f, value=str(v), message=m, source=source) for f, v, m in wrong]
    return InvalidSpecError(violations, reason="REQUEST_INVALID")


def check_play(request: play_pb2.PlayGroupRequest) -> None:
    """Raise one InvalidSpecError with everything in a PlayGroup request that makes it unplayable."""
    wrong: list[tuple[str, object, str]] = []
    if not _is_uid(request.run_uid):  # it becomes the name of a directory
        wrong.append(("run_uid", request.run_uid[:80], "must be the uid of a run: lower-case letters, digits and '-'"))
    if request.purpose == rollout_pb2.PURPOSE_UNSPECIFIED:
        wrong.append(("purpose", request.purpose, "must be TRAIN or EVAL"))
    if not request.members:
        wrong.append(("members", "[]", "must name at least one member"))
    if not 0 < request.group_size <= MAX_GROUP_SIZE:
        wrong.append(("group_size", request.group_size, f"must be 1 to {MAX_GROUP_SIZE}"))
    elif len(set(request.members)) != len(request.members) or any(m >= request.group_size for m in request.members):
        wrong.append(
            ("members", list(request.members[:8]), f"must be distinct and below group_size {request.group_size}")
        )
    if not request.base_url:
        wrong.append(("base_url", "", "must be the engine's URL, ending in /v1"))
    if request.is_external and request.purpose == rollout_pb2.PURPOSE_TRAIN:
        message = (
            "only evaluations may be played with an endpoint that is not ours: it cannot say whose tokens it sends"
        )
        wrong.append(("is_external", True, message))
    if problem := api_key_problem(request.api_key_var):
        wrong.append(("api_key_var", request.api_key_var, problem))
    if not _is_json_object(request.sampling.extra_body_json or "{}"):
        wrong.append(("sampling.extra_body_json", request.sampling.extra_body_json[:200], "must be a JSON object"))
    if not 0 < request.rollout_timeout_seconds <= _MAX_ROLLOUT_S:
        message = f"must be positive and at most {_MAX_ROLLOUT_S:.0f}"
        wrong.append(("rollout_timeout_seconds", request.rollout_timeout_seconds, message))
    if not 0 <= request.sampling.temperature <= 100:
        wrong.append(("sampling.temperature", request.sampling.temperature, "must be 0 to 100"))
    most_penalty = BOUNDS["repetition_penalty"]["le"]  # vLLM takes any; larger ones are mistakes
    for name, most in (("top_p", 1), ("min_p", 1), ("top_k", (1 << 31) - 1), ("repetition_penalty", most_penalty)):
        if not 0 <= (value := getattr(request.sampling, name)) <= most:
            wrong.append((f"sampling.{name}", value, f"must be 0 to {most}"))
    if wrong:
        raise invalid_request(wrong)


def _is_json_object(text: str) -> bool:
    """Return whether the text is a JSON object of at most MAX_ARGS_BYTES."""
    try:
        decode_object(text, what="extra_body_json", reason="REQUEST_INVALID", max_bytes=MAX_ARGS_BYTES)
    except CorruptObjectError:
        return False
    return True


def _is_uid(text: str) -> bool:
    """Return whether the text can be the uid of a run."""
    try:
        Names("any", text)
    except InvalidSpecError:
        return False
    return True
