"""Plain data on its way out: protobuf as dictionaries, secrets masked, and JSON that no text can break."""

import json
import logging
import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from millrace.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    InternalError,
    InvalidSpecError,
    InvalidStateError,
    MillraceError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    Violation,
)
from millrace.telemetry.logging import masked, redact, secrets_of
from millrace.v1 import lineage_pb2, metric_pb2, rollout_pb2
from millrace.v1 import run_service_pb2 as rs


def to_json(value: Any, *, secrets: tuple[str, ...] | None = None) -> bytes:
    """Encode a document as ASCII JSON, with every secret masked and long texts cut; NaN and infinities become null.

    `secrets` are the values to mask, by default those of this process's variables.
    """
    known = secrets_of(os.environ) if secrets is None else secrets
    return json.dumps(masked(value, known), separators=(",", ":"), allow_nan=False).encode()


def of_message(message: Message) -> dict[str, Any]:
    """Return a protobuf message as plain data: every field that is set, whole numbers as numbers, bytes as hex."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(value)
        elif field.is_repeated:
            found[field.name] = [_plain(item) for item in value]
        elif field.enum_type is not None:
            found[field.name] = field.enum_type.values_by_number[value].name
        else:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """Return a protobuf value as plain data: messages as dictionaries, a time as seconds since 1970, bytes as hex."""
    if isinstance(value, Message):
        if value.DESCRIPTOR.full_name == "google.protobuf.Timestamp":
            return value.ToNanoseconds() / 1e9  # type: ignore[attr-defined]
        return of_message(value)
    return value.hex() if isinstance(value, bytes) else value


# Errors as answers of HTTP, and back: a status, and what, where, remedy.

logger = logging.getLogger(__name__)

INDEX_GROWING = "INDEX_GROWING"
"""Reason of what cannot be given yet, because the log is being read: a list, or a sample."""
_ACCEPTED = 202  # asked for, and on its way: no failure

_STATUS: tuple[tuple[type[MillraceError], int], ...] = (
    (InvalidSpecError, 400),
    (UnauthenticatedError, 401),
    (PermissionDeniedError, 403),
    (NotFoundError, 404),
    (AlreadyExistsError, 409),
    (InvalidStateError, 409),
    (ConflictError, 409),
    (CapacityError, 503),
    (UnavailableError, 503),
)


def problem_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body of the HTTP answer for an error: reason, message and remedy, without secrets.

    The status is that of the error's class; 202 for what is not indexed yet (`INDEX_GROWING`). An unexpected error is
    logged, its status is 500, and its text is not in the body.
    """
    if not isinstance(error, MillraceError):
        logger.error("a question of the dashboard failed", exc_info=error)
        error = InternalError(
            f"the answer could not be made: {type(error).__name__}",
            reason="DASHBOARD_FAILED",
            remedy="see the orchestrator's log",
        )
    status = next((number for kind, number in _STATUS if isinstance(error, kind)), 500)
    if error.reason == INDEX_GROWING:
        status = _ACCEPTED
    body = {
        "reason": error.reason,
        "message": redact(error.message)[:4000],
        "remedy": redact(error.remedy or "")[:2000],
    }
    return status, {"error": body}


def error_of(status: int, body: dict[str, Any]) -> MillraceError:
    """Make (not raise) the error in an HTTP answer of `problem_of`, from its status and body.

    A status that `problem_of` never gives becomes an InternalError. The errors with 202 and 503 come back as
    UnavailableErrors.
    """
    problem = body.get("error") or {}
    reason, message, remedy = (str(problem.get(name, "")) for name in ("reason", "message", "remedy"))
    kind = next((kind for kind, number in _STATUS if number == status and kind is not CapacityError), InternalError)
    if status == _ACCEPTED:
        kind = UnavailableError
    if issubclass(kind, InvalidSpecError):
        wrong = [Violation(field="request", message=message)]
        return InvalidSpecError(wrong, message=message, reason=reason, remedy=remedy or None)
    return kind(message, reason=reason, remedy=remedy or None)


# What the orchestrator and its reader say to each other: frames with the number of a question in front.

_NUMBER = struct.Struct("<Q")
MAX_QUESTION_BYTES = 1 << 20
MAX_ANSWER_BYTES = 256 << 20


def numbered(number: int, data: bytes) -> bytes:
    """Return `data`, a question or its answer, with the number of the question in front."""
    return _NUMBER.pack(number) + data


def split_number(data: bytes) -> tuple[int, bytes]:
    """Return the number of a question and the rest of `data`, as `numbered` joined them; ValueError if it is too
    short.
    """
    if len(data) < _NUMBER.size:
        raise ValueError(f"{len(data)} bytes have no number of a question")
    return _NUMBER.unpack_from(data)[0], data[_NUMBER.size :]


# What the reader says, as the messages of the public API.

AnswerPart = Mapping[str, Any]
"""A part of an answer of the reader: JSON."""
_RENAMED = {
    "stop": "stop_condition", "reason": "drop_reason", "tokens": "num_tokens", "sampled": "num_sampled_tokens",
    "turns": "num_turns", "version_min": "min_version", "version_max": "max_version",
}  # fmt: skip
"""Columns of the index that the API calls otherwise."""


def metrics_page(answer: AnswerPart) -> rs.ListMetricsResponse:
    """Return the API's page of metrics from the reader's answer; null, which JSON has for NaN, is NaN again."""
    rows: Sequence[tuple[int, Mapping[str, float | None]]] = answer["steps"]
    steps = [
        metric_pb2.StepMetrics(
            step=step, values={name: math.nan if value is None else value for name, value in values.items()}
        )
        for step, values in rows
    ]
    return rs.ListMetricsResponse(steps=steps)


def rollouts_page(answer: AnswerPart, *, run: str) -> rs.ListRolloutsResponse:
    """Return the API's page of rollouts from the reader's answer; `run` is the run's name."""
    return rs.ListRolloutsResponse(
        rollouts=[rollout(row, run=run) for row in answer["samples"]],
        total_size=answer["total"],
        unreadable=[rollout_pb2.UnreadableBatch(**each) for each in answer["index"]["unreadable"]],
    )


def rollout(row: AnswerPart, *, run: str) -> rollout_pb2.Rollout:
    """Return the API's rollout for a row of the index; `run` is the run's name."""
    fields = {_RENAMED.get(name, name): value for name, value in row.items() if value is not None and name != "id"}
    return rollout_pb2.Rollout(name=f"runs/{run}/rollouts/{row['id']}", **fields)


def lineage(answer: AnswerPart, *, run: str) -> rs.GetLineageResponse:
    """Return the API's lineage of a rollout, or of a version, from the reader's answer; `run` is the run's name."""
    if "sample" in answer:
        became = answer["became"]
        found = lineage_pb2.RolloutLineage(
            rollout=rollout(answer["sample"], run=run),
            made_by=[_version(each) for each in answer["made_by"]],
            batch=_batch(answer["step"]),
            became=None if became is None else _version(became),
        )
        return rs.GetLineageResponse(rollout=found)
    before, after = answer["made_from"], answer["next"]
    of_version = lineage_pb2.VersionLineage(
        version=_version(answer["version"] | ({} if before is None else {"batch": before})),
        made_from=None if before is None else _rollouts(before, run=run),
        made=_rollouts(answer["made"], run=run),
        trained_steps=answer["made"]["steps"],
        next=_version(after) if after["is_known"] else None,
    )
    return rs.GetLineageResponse(version=of_version)


def _count(part: AnswerPart, name: str) -> int:
    """Return a count in a part of an answer; 0 if it is null or missing."""
    value = part.get(name)
    return 0 if value is None else value


def _version(part: AnswerPart) -> lineage_pb2.TracedVersion:
    """Return the API's message of a policy version from a part of the reader's answer."""
    batch, saved = part["batch"], part["checkpoint"]
    found = lineage_pb2.TracedVersion(
        version=part["version"],
        is_known=part["is_known"],
        num_tokens=_count(part, "tokens"),
        digest=part.get("digest", ""),
        uri=part.get("uri", ""),
        codec=part.get("codec", ""),
        size_bytes=part.get("size_bytes", 0),
        replicas=[each["replica"] for each in part["served"]],
        batch=None if batch is None else _batch(batch),
        checkpoint=None if saved is None else lineage_pb2.TracedCheckpoint(**saved),
    )
    if "published" in part:
        found.publish_time.FromNanoseconds(round(part["published"] * 1e9))
    return found


def _batch(part: AnswerPart) -> lineage_pb2.TracedBatch:
    """Return the API's message of a batch from a part of the reader's answer."""
    return lineage_pb2.TracedBatch(
        step=part["step"],
        is_done=part["is_done"],
        key=part["key"],
        num_rollouts=part["rollouts"],
        num_trained=_count(part, "trained"),
        reward_mean=part.get("reward"),
        dropped=part.get("dropped_groups", {}),
        problem=part.get("problem", ""),
    )


def _rollouts(part: AnswerPart, *, run: str) -> lineage_pb2.TracedRollouts:
    """Return the API's message of a number of rollouts and the first of them, from a part of the reader's answer."""
    return lineage_pb2.TracedRollouts(
        num_rollouts=part["num_samples"], rollouts=[rollout(row, run=run) for row in part["samples"]]
    )
