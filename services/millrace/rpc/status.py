"""Errors of Millrace on the wire, in both directions: the only file that knows how.

A server turns an error into a `google.rpc.Status` with ErrorInfo (reason, domain `millrace`, metadata), BadRequest for
violations, RetryInfo where a retry helps, and RequestInfo; a client turns that back into the same class with the same
message, reason, remedy and violations. All of it travels in one header, so its size is bounded, and what is cut ends
in an ellipsis.
"""

import base64
import contextlib
from typing import Protocol, runtime_checkable

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from millrace import errors
from millrace.decoding import decode_message, unpack
from millrace.errors import CorruptObjectError, InvalidSpecError, MillraceError, Violation

DOMAIN = "millrace"
# Bounds on what one error carries, such that the worst of all fits into MAX_METADATA_BYTES.
MAX_VIOLATIONS = 100
MAX_TEXT_CHARS = 2000  # message, remedy
MAX_VIOLATION_CHARS = 800  # message of one violation
MAX_VALUE_CHARS = 200  # its field, value and source
MAX_METADATA_ENTRIES = 50
MAX_METADATA_CHARS = 500
MAX_METADATA_BYTES = 1 << 20  # for `grpc.max_metadata_size` on both sides; the default is 8 KiB

_DETAILS = "grpc-status-details-bin"
# Metadata keys of ErrorInfo that belong to this file.
_CLASS, _REMEDY, _DERIVED = "millrace-class", "millrace-remedy", "millrace-message-derived"

_GRPC_CODES = {code.name: code for code in grpc.StatusCode}
_NUMBERS = {code.value[0]: code.name for code in grpc.StatusCode}
_CLASSES: dict[str, type[MillraceError]] = {cls.__name__: cls for cls in errors.error_classes()}
# The most general class of each code; parents come first in error_classes().
_BY_CODE: dict[str, type[MillraceError]] = {}
for _cls in errors.error_classes():
    _BY_CODE.setdefault(_cls.code, _cls)


@runtime_checkable
class CallStatus(Protocol):
    """How a call ended: what `AioRpcError` and the synchronous `RpcError` have in common."""

    def code(self) -> grpc.StatusCode:
        """Return the status code with which the call ended."""
        ...

    def details(self) -> str | None:
        """Return the status message with which the call ended; None without one."""
        ...


def to_status(error: MillraceError, *, request_id: str = "") -> status_pb2.Status:
    """Return the error as a `google.rpc.Status`, with class, reason, remedy and violations in its details.

    Long texts and lists are cut to the bounds of this module. An empty `request_id` is not sent.
    """
    entries = list(error.metadata.items())[:MAX_METADATA_ENTRIES]
    metadata = {_cut(key, MAX_VALUE_CHARS): _cut(value, MAX_METADATA_CHARS) for key, value in entries}
    metadata[_CLASS] = type(error).__name__ if type(error).__name__ in _CLASSES else _BY_CODE[error.code].__name__
    if error.remedy:
        metadata[_REMEDY] = _cut(error.remedy, MAX_TEXT_CHARS)
    status = status_pb2.Status(code=_GRPC_CODES[error.code].value[0], message=_cut(error.message, MAX_TEXT_CHARS))
    # Before `metadata` is copied into `info`: it gets values of the violations.
    bad_request = None
    if isinstance(error, InvalidSpecError):
        bad_request = _bad_request(error, metadata)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    status.details.add().Pack(info)
    if bad_request is not None:
        status.details.add().Pack(bad_request)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    if request_id:
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    return status


def _bad_request(error: InvalidSpecError, metadata: dict[str, str]) -> error_details_pb2.BadRequest:
    """Return the violations of an error as a BadRequest, and put their values and sources into `metadata`.

    Beyond `MAX_VIOLATIONS` the last one says how many more there are. `metadata` also notes whether the error's message
    is the one that follows from its violations.
    """
    violations = list(error.violations)
    if len(violations) > MAX_VIOLATIONS:
        more = len(violations) - MAX_VIOLATIONS + 1
        violations = [*violations[: MAX_VIOLATIONS - 1], Violation(field="…", message=f"and {more} more violations")]
    if error.message == InvalidSpecError(error.violations).message:
        metadata[_DERIVED] = "1"  # the client writes the message itself, so that none of it is cut
    bad_request = error_details_pb2.BadRequest()
    for index, violation in enumerate(violations):
        bad_request.field_violations.add(
            field=_cut(violation.field, MAX_VALUE_CHARS), description=_cut(violation.message, MAX_VIOLATION_CHARS)
        )
        if violation.value is not None:
            metadata[f"violation-{index}-value"] = _cut(violation.value, MAX_VALUE_CHARS)
        if violation.source is not None:
            metadata[f"violation-{index}-source"] = _cut(violation.source, MAX_VALUE_CHARS)
    return bad_request


def from_status(status: status_pb2.Status) -> MillraceError:
    """Make (not raise) the error that a server sent: of the same class, with its message, reason, remedy and
    violations.

    A status that is not of Millrace becomes the most general class of its code.
    """
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    request_info = error_details_pb2.RequestInfo()
    for detail in status.details:
        for message in (info, bad_request, retry, request_info):
            unpack(detail, message)
    if info.domain != DOMAIN:
        error = _foreign(_NUMBERS.get(status.code, "UNKNOWN"), status.message)
    else:
        error = _ours(status, info, bad_request)
    if retry.HasField("retry_delay"):
        with contextlib.suppress(ValueError):  # a foreign server's, and no duration
            error.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    error.request_id = request_info.request_id or None
    return error


def to_text(error: MillraceError) -> str:
    """Return the error as base64 text, for a message between processes; `from_text` is the inverse."""
    return base64.b64encode(to_status(error).SerializeToString()).decode()


def from_text(text: str, *, what: str, reason: str) -> MillraceError:
    """Return the error in a text of `to_text`.

    CorruptObjectError with `reason` if the text holds none; `what` says in words what was decoded, for its message.
    """
    return from_status(decode_message(status_pb2.Status, base64.b64decode(text), what=what, reason=reason))


def _ours(
    status: status_pb2.Status, info: error_details_pb2.ErrorInfo, bad_request: error_details_pb2.BadRequest
) -> MillraceError:
    """Make the error of a status that a Millrace server made; `info` and `bad_request` are its decoded details.

    A class that this release does not know becomes the most general one of the same code.
    """
    metadata = dict(info.metadata)
    code = _NUMBERS.get(status.code, "UNKNOWN")
    cls = _CLASSES.get(metadata.pop(_CLASS, ""))
    if cls is None or cls.code != code:  # a newer server has a class that this client does not know
        cls = _BY_CODE.get(code, errors.InternalError)
    remedy = metadata.pop(_REMEDY, None)
    is_derived = metadata.pop(_DERIVED, "") == "1"
    violations = [
        Violation(
            field=violation.field,
            message=violation.description,
            value=metadata.pop(f"violation-{index}-value", None),
            source=metadata.pop(f"violation-{index}-source", None),
        )
        for index, violation in enumerate(bad_request.field_violations)
    ]
    if issubclass(cls, InvalidSpecError):
        return cls(
            violations or [Violation(field="request", message=status.message)],
            message=None if is_derived else status.message,
            reason=info.reason,
            remedy=remedy,
            metadata=metadata,
        )
    return cls(status.message, reason=info.reason, remedy=remedy, metadata=metadata)


def from_rpc_error(error: grpc.RpcError, *, to: str = "", timeout_s: float | None = None) -> MillraceError:
    """Make (not raise) the class of `millrace.errors` for a failed call, whether a handler or the transport ended it.

    `to` says in words who was called ("the orchestrator at host:port") and `timeout_s` the call's deadline; both are
    for the message.
    """
    if not isinstance(error, CallStatus):
        return errors.InternalError(
            f"call to {to or 'a server'} failed without a status: {error!r}", reason="NO_STATUS"
        )
    rich = _details(error)
    # As `grpc_status.rpc_status.from_call` demands: details with another code are not those of this status.
    if rich is not None and rich.code == error.code().value[0]:
        return from_status(rich)
    return _foreign(error.code().name, error.details() or "", to=to, timeout_s=timeout_s)


def _details(error: CallStatus) -> status_pb2.Status | None:
    """Return the status in a failed call's trailing metadata; None if there is none, or it cannot be decoded."""
    trailing = getattr(error, "trailing_metadata", tuple)() or ()
    for key, value in trailing:
        if key == _DETAILS and isinstance(value, bytes):
            try:
                return decode_message(
                    status_pb2.Status, value, what=_DETAILS, reason="STATUS_CORRUPT", max_bytes=MAX_METADATA_BYTES
                )
            except CorruptObjectError:
                return None
    return None


def _foreign(code: str, details: str, *, to: str = "", timeout_s: float | None = None) -> MillraceError:
    """Make the error for a status that no handler of Millrace made: it is from gRPC itself, or from another server.

    `code` is the status code's name, `details` its message; `to` (who was called, in words) and `timeout_s` are for the
    error's message.
    """
    who = to or "the server"
    match code:
        case "DEADLINE_EXCEEDED":
            limit = "its deadline" if timeout_s is None else f"{timeout_s:g} s"
            return errors.UnavailableError(
                f"{who} did not answer within {limit}",
                reason="DEADLINE_EXCEEDED",
                remedy="check that it is running and not overloaded",
            )
        case "UNAVAILABLE" if (handshake := _handshake_error(who, details)) is not None:
            return handshake
        case "UNAVAILABLE":
            return errors.UnavailableError(
                f"cannot reach {who}: {details}",
                reason="UNREACHABLE",
                remedy="check that it is running and that the address is right",
            )
        case "CANCELLED":
            return errors.UnavailableError(f"{who} cancelled the call: {details}", reason="CANCELLED")
        case "UNIMPLEMENTED":
            return errors.InternalError(
                f"{who} does not know this call: {details}",
                reason="UNIMPLEMENTED",
                remedy="use the same release of Millrace on both sides",
            )
        case "INVALID_ARGUMENT":
            return InvalidSpecError([Violation(field="request", message=details)], message=details)
        case "OUT_OF_RANGE":
            return errors.InvalidStateError(details, reason="OUT_OF_RANGE")
        case "RESOURCE_EXHAUSTED" if "larger than max" in details:  # gRPC's own words, of either side
            return InvalidSpecError(
                [Violation(field="message", message=details)],
                message=f"{who} takes no message of that size: {details}",
                reason="MESSAGE_TOO_LARGE",
                remedy="send a smaller config or page",
            )
    cls = _BY_CODE.get(code, errors.InternalError)
    return cls(f"{who} answered {code}: {details}", reason=code)


# What gRPC says when TLS fails, and what it means. Its own words differ from release to release: each has a fallback.
_HANDSHAKES: tuple[tuple[str, str, str, str], ...] = (
    (
        "certificate has expired",
        "TLS_CERTIFICATE_EXPIRED",
        "the certificate of {who} has expired",
        "renew it (the server takes new files without a restart), and check this machine's clock",
    ),
    (
        "Hostname Verification",
        "TLS_NAME_MISMATCH",
        "the certificate of {who} is for another name",
        "call it by a name of its certificate, or say which to expect with MILLRACE_TLS_SERVER_NAME",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "TLS_NOT_TRUSTED",
        "the certificate of {who} is not signed by a CA that is trusted here",
        "trust its CA with MILLRACE_TLS_CA or --tls-ca",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "TLS_NOT_SPOKEN",
        "{who} does not speak TLS",
        "check the address; for a server that speaks plain text unset MILLRACE_TLS_CA, or leave --tls-ca out",
    ),
    (
        "Tls handshake failed",
        "TLS_HANDSHAKE_FAILED",
        "the TLS handshake with {who} failed",
        "see the server's log",
    ),
    (
        "Socket closed",  # it took the connection and hung up
        "HUNG_UP",
        "{who} hangs up on connections from here",
        "it may speak TLS (trust its CA with MILLRACE_TLS_CA or --tls-ca), or ask for a client's certificate (set "
        "MILLRACE_TLS_CERT and MILLRACE_TLS_KEY)",
    ),
)


def _handshake_error(who: str, details: str) -> errors.UnavailableError | None:
    """Return the error of a connection that failed because of TLS, by gRPC's own `details`; None for any other failure.

    `who` says in words who was called.
    """
    # A socket that closes later is an ordinary loss of a connection: only a failure to connect means that the server
    # hangs up.
    for mark, reason, message, remedy in _HANDSHAKES:
        if mark in details and (reason != "HUNG_UP" or "failed to connect" in details):
            return errors.UnavailableError(f"{message.format(who=who)}: {details}", reason=reason, remedy=remedy)
    return None


async def abort(context: grpc.aio.ServicerContext, error: MillraceError, *, request_id: str = "") -> None:
    """End the call with the error and its details; always raises `grpc.aio.AbortError`.

    An empty `request_id` is not sent.
    """
    status = rpc_status.to_status(to_status(error, request_id=request_id))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _cut(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text; what is cut ends in an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
