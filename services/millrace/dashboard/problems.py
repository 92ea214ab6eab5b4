"""Errors as answers of HTTP, and back: a status, and what, where, remedy."""

import logging
from typing import Any

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
from millrace.telemetry.redact import redact

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
    """The status and the body for an error; one that is none of ours is logged, and said without its text."""
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
    """The error that `problem_of` has told of; one of the reader's own defects is an InternalError."""
    told = body.get("error") or {}
    reason, message, remedy = (str(told.get(name, "")) for name in ("reason", "message", "remedy"))
    kind = next((kind for kind, number in _STATUS if number == status and kind is not CapacityError), InternalError)
    if status == _ACCEPTED:
        kind = UnavailableError
    if issubclass(kind, InvalidSpecError):
        wrong = [Violation(field="request", message=message)]
        return InvalidSpecError(wrong, message=message, reason=reason, remedy=remedy or None)
    return kind(message, reason=reason, remedy=remedy or None)
