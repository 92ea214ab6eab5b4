"""The errors of Millrace: one tree, one table of gRPC codes and exit codes.

Every service raises these, `millrace.rpc.status` carries them over the wire without loss, and the command line turns
them into a message and an exit code. A message says what went wrong and where (field, file, value); `remedy` says what
to do.

    MillraceError
    ├── InvalidSpecError          INVALID_ARGUMENT     exit 2   carries every violation at once
    ├── NotFoundError             NOT_FOUND            exit 3
    ├── AlreadyExistsError        ALREADY_EXISTS       exit 2
    ├── InvalidStateError         FAILED_PRECONDITION  exit 2
    ├── ConflictError             ABORTED              exit 5   read again, then retry
    │   └── FencedError                                         another holder has a newer epoch: stop writing
    ├── UnauthenticatedError      UNAUTHENTICATED      exit 4
    ├── PermissionDeniedError     PERMISSION_DENIED    exit 4
    ├── CapacityError             RESOURCE_EXHAUSTED   exit 5   retry after `retry_after_s`
    ├── UnavailableError          UNAVAILABLE          exit 5   retry if the call is idempotent
    │   ├── LogGoneError                                        Redis lost the run's log; it must be rebuilt
    │   └── RefusedError                                        it answers, and refuses until somebody changes it
    └── InternalError             INTERNAL             exit 1
        └── CorruptObjectError                                  stored bytes are not what was written

This module imports neither grpc nor protobuf: it is on the start-up path of the command line.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EROFS,
)
"""What the operating system answers about a path that a user named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One thing that is wrong with a document.

    Example: `Violation(field="trainer.optim.lr", value="-1", message="must be > 0", source="rl.toml:12")`.
    """

    field: str
    """Dotted path of the field."""
    value: str | None = None
    """The offending value as text; None if it is absent or secret."""
    message: str
    """What is wrong with it, and what would be right."""
    source: str | None = None
    """Where the value came from: `rl.toml:12`, `--max-steps`, `MILLRACE_REDIS_URL`; None if unknown."""

    def __str__(self) -> str:
        got = "" if self.value is None else f" (got {self.value})"
        where = f" [{self.source}]" if self.source else ""
        return f"{self.field}: {self.message}{got}{where}"


class MillraceError(Exception):
    """Root of the tree. Raise a subclass."""

    code: ClassVar[str] = "UNKNOWN"
    """Name of the gRPC status code."""
    exit_code: ClassVar[int] = 1
    """Exit code of a command that ends with this error."""
    default_reason: ClassVar[str] = "UNKNOWN"
    """Reason where the raiser gives none."""
    default_retry_after_s: ClassVar[float | None] = None
    """Delay before a retry where the raiser gives none; None if a retry is of no use."""

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        remedy: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Make an error whose message says what went wrong and where.

        `reason` is UPPER_SNAKE and stable, `remedy` says what to do, `metadata` has the dynamic parts of the message,
        and `retry_after_s` is the delay before a retry. Where `reason` or `retry_after_s` is None, the class's default
        applies.
        """
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.remedy = remedy
        self.metadata: dict[str, str] = dict(metadata or {})
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.request_id: str | None = None  # set where an error arrives from a server: finds the call in its log

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how pickle makes the error again, with all of its attributes."""
        # Executors send exceptions between processes, and keyword-only arguments do not survive the default reduce.
        return _rebuild, (type(self), self.message, self.__dict__.copy())


def _rebuild(cls: type[MillraceError], message: str, state: dict[str, Any]) -> MillraceError:
    """Return an error of class `cls` with this message and the attributes of `state`; its constructor is not called."""
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class InvalidSpecError(MillraceError):
    """A document, a request or a setting is wrong; holds every violation at once."""

    code = "INVALID_ARGUMENT"
    exit_code = 2
    default_reason = "SPEC_INVALID"

    def __init__(
        self,
        violations: Sequence[Violation],
        *,
        message: str | None = None,
        reason: str | None = None,
        remedy: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Make an error of `violations`, at least one (else ValueError); they are the message if `message` is None.

        `reason`, `remedy` and `metadata` are those of every error.
        """
        if not violations:
            raise ValueError("an InvalidSpecError needs at least one violation")
        self.violations: tuple[Violation, ...] = tuple(violations)
        if message is None:
            message = "; ".join(map(str, self.violations))
            if len(self.violations) > 1:
                message = f"{len(self.violations)} violations: {message}"
        super().__init__(message, reason=reason, remedy=remedy, metadata=metadata)


class NotFoundError(MillraceError):
    """The named thing does not exist."""

    code = "NOT_FOUND"
    exit_code = 3
    default_reason = "NOT_FOUND"


class AlreadyExistsError(MillraceError):
    """The name is taken."""

    code = "ALREADY_EXISTS"
    exit_code = 2
    default_reason = "ALREADY_EXISTS"


class InvalidStateError(MillraceError):
    """The thing exists, but its state does not allow this."""

    code = "FAILED_PRECONDITION"
    exit_code = 2
    default_reason = "INVALID_STATE"


class ConflictError(MillraceError):
    """Somebody else changed it meanwhile: read again, then retry."""

    code = "ABORTED"
    exit_code = 5
    default_reason = "CONFLICT"


class FencedError(ConflictError):
    """A newer epoch exists, so this process is no longer the holder: it must stop writing."""

    default_reason = "FENCED"


class UnauthenticatedError(MillraceError):
    """No or wrong credentials."""

    code = "UNAUTHENTICATED"
    exit_code = 4
    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(MillraceError):
    """The caller is known and may not do this."""

    code = "PERMISSION_DENIED"
    exit_code = 4
    default_reason = "PERMISSION_DENIED"


class CapacityError(MillraceError):
    """Nothing is free at the moment: retry after `retry_after_s`."""

    code = "RESOURCE_EXHAUSTED"
    exit_code = 5
    default_reason = "NO_CAPACITY"
    default_retry_after_s = 5.0


class UnavailableError(MillraceError):
    """A service, Redis or the object store cannot be reached or is draining: retry what is idempotent."""

    code = "UNAVAILABLE"
    exit_code = 5
    default_reason = "UNAVAILABLE"
    default_retry_after_s = 1.0


class LogGoneError(UnavailableError):
    """Redis does not hold the run's log (any more), or holds another generation of it."""

    default_reason = "LOG_GONE"


class RefusedError(UnavailableError):
    """Redis or the object store answers, and refuses until somebody changes something about it."""

    default_reason = "REFUSED"


HELD_UP = "RUN_HELD_UP"
"""Reason of the RefusedError that ends waiting for a run which gets nowhere; `cause` in its metadata says why."""


class InternalError(MillraceError):
    """A defect of Millrace."""

    code = "INTERNAL"
    exit_code = 1
    default_reason = "INTERNAL"


class CorruptObjectError(InternalError):
    """Bytes that were read are not the bytes that were written, or break their format."""

    default_reason = "CORRUPT_OBJECT"


def first_error(error: BaseException) -> BaseException:
    """Return the first error inside an exception group, however deep; the error itself if it is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def all_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield every error inside an exception group, in order; the error itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from all_errors(inner)
    else:
        yield error


STORAGE_ERRORS = (UnavailableError, CapacityError, PermissionDeniedError)
"""What calls of Redis and the object store raise while these are away, full, or take rights away: nothing is wrong with
the run, and it goes on once somebody has acted. Of an error of unknown origin ask `is_of_storage`."""


def is_of_storage(error: BaseException) -> bool:
    """Return whether an error says that a service, store or room is missing for a while, and not that a run is wrong.

    Those are UnavailableError and CapacityError, and PermissionDeniedError only of Redis or the object store
    (REDIS_DENIED, STORE_DENIED).
    """
    # What else is not permitted, such as reading a model's directory, is a mistake of the run's owner.
    is_closed = isinstance(error, PermissionDeniedError) and error.reason in ("REDIS_DENIED", "STORE_DENIED")
    return is_closed or isinstance(error, UnavailableError | CapacityError)


def is_refusal(error: BaseException) -> bool:
    """Return whether the other side has answered and refused, so that waiting alone may not help.

    Those are RefusedError, CapacityError, PermissionDeniedError and InvalidStateError. What does not answer (an outage)
    or is damaged is no refusal.
    """
    return isinstance(error, RefusedError | CapacityError | PermissionDeniedError | InvalidStateError)


def error_classes() -> Iterator[type[MillraceError]]:
    """Yield every class of error that this module defines, parents before children, without MillraceError itself."""
    pending: list[type[MillraceError]] = [MillraceError]
    while pending:
        cls = pending.pop(0)
        children = cls.__subclasses__()
        pending.extend(children)
        if cls is not MillraceError and cls.__module__ == __name__:
            yield cls


def of_system(error: BaseException) -> MillraceError | None:
    """Return a Millrace error with a remedy for an OSError about a full disk or a refused path; None for any other.

    CapacityError (DISK_FULL) for a full disk or quota. InvalidStateError (PATH_REFUSED) for a path that is missing, not
    allowed or of the wrong kind: that is the user's to fix, and no defect.
    """
    if not isinstance(error, OSError) or error.errno not in (*_FULL, *_REFUSED):
        return None
    path = error.filename2 or error.filename
    message = f"{path}: {error.strerror}" if path is not None else str(error.strerror)
    if error.errno in _FULL:
        return CapacityError(message, reason="DISK_FULL", remedy="free disk space, or name a directory on another disk")
    if path is None:
        return None
    return InvalidStateError(
        message,
        reason="PATH_REFUSED",
        remedy="name another path, or see that it is there and may be read and written",
    )
