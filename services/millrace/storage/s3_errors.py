"""What an S3 client and its server say of a failure, as our errors or as something to try again.

An answer is read by its code, and by its status only where it has no code that is known: a 501 is no outage, and not
every 403 is a matter of rights.
"""

import re
from datetime import UTC, datetime

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from millrace.errors import (
    CapacityError,
    InternalError,
    InvalidStateError,
    MillraceError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from millrace.storage.clean_up import TransientError

CLIENT_ERRORS = (
    ClientError,
    BotoCoreError,
    HTTPError,
    ResponseParserError,
    ConnectionError,
    TimeoutError,
)
"""Everything that a call of the client may raise because of the other side."""

ABSENT = frozenset({"NoSuchKey", "404", "NotFound"})
_TRY_AGAIN = frozenset(
    {
        "SlowDown",
        "RequestTimeout",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
        "OperationAborted",
        # The body was not what we signed: it was damaged or cut on its way, and the server stored nothing.
        "IncompleteBody",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
    }
)
_FULL = frozenset(
    {
        "QuotaExceeded",
        "InsufficientStorage",
        "XMinioStorageFull",
        "XMinioAdminBucketQuotaExceeded",
        "InsufficientCapacity",
    }
)
_DENIED = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "Forbidden", "403"})
_SKEWED = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_ELSEWHERE = frozenset(
    {
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "PermanentRedirect",
        "AuthorizationQueryParametersError",
        "301",
    }
)
VIRTUAL_ONLY = frozenset({"SecondLevelDomainForbidden", "PathStyleDomainForbidden", "InvalidPathAccess"})
"""Codes of servers that take buckets as host names only: Alibaba's OSS, Tencent's COS, Volcengine's TOS."""
_EXPECTED_REGION = re.compile(r"(?:expecting|expected|region should be)\W+([\w-]+)", re.IGNORECASE)


def is_unconditional(error: ClientError) -> bool:
    """Return whether a server's error says that it has no conditional writes at all, not just that this one failed."""
    code, status = error_code(error), http_status(error)
    if status == 501 or code in ("NotImplemented", "501"):
        return True
    return status in (400, 405) and "none-match" in str(error).lower()


def translate(
    error: BaseException, what: str, *, where: str, bucket: str, uri: str = ""
) -> MillraceError | TransientError:
    """Return the error to raise for a failed attempt: TransientError where another attempt may help, else a Millrace
    error.

    `what` is the operation in words ("GET key"), `where` the store; both, and `bucket`, are for the message. `uri`
    names the object of a read; where it is empty, a missing object means that the bucket is missing.
    """
    if isinstance(error, ClientError):
        return _answered(error, what, where=where, bucket=bucket, uri=uri)
    metadata = {"store": where, "operation": what}
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return _denied(f"no complete credentials for {where}", metadata)
    transient = (
        BotoConnectionError,
        HTTPClientError,
        IncompleteReadError,
        ResponseStreamingError,
        ResponseParserError,  # an answer that is no S3 answer: cut, or a load balancer's page
        HTTPError,
        OSError,
    )
    if isinstance(error, transient):
        return TransientError(f"{type(error).__name__}: {error}")
    return InternalError(
        f"{what} at {where}: {type(error).__name__}: {error}",
        reason="STORE_FAILED",
        remedy="see the log of this service and the store's",
        metadata=metadata,
    )


def error_code(error: ClientError) -> str:
    """Return the S3 error code, or the status as text where the answer had no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: ClientError) -> int:
    """Return the HTTP status of an error answer; 0 if it has none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _answered(error: ClientError, what: str, *, where: str, bucket: str, uri: str) -> MillraceError | TransientError:
    """Return what to raise for an answer of the server that is an error, by its S3 code, then its HTTP status.

    It is a TransientError where another attempt may help. `what` is the operation in words, `where` the store; both,
    and `bucket`, are for the message. `uri` names the object of a read; where it is empty, a missing object means that
    the bucket is missing.
    """
    code, status = error_code(error), http_status(error)
    # The answer to a HEAD has no body, so its code is the status.
    answer = f"HTTP {status}" if code == str(status) else f"HTTP {status} {code}"
    metadata = {"store": where, "operation": what}
    if code == "NoSuchBucket" or (code in ABSENT and not uri):
        return UnavailableError(
            f"bucket {bucket!r} does not exist at {where}",
            reason="BUCKET_MISSING",
            remedy="create it, or correct MILLRACE_STORE_URL",
            metadata=metadata,
        )
    if code in ABSENT:
        return NotFoundError(f"no object {uri}", reason="OBJECT_NOT_FOUND", metadata={"uri": uri})
    if code in _SKEWED:
        return _skewed(error, what, where=where, metadata=metadata)
    if (code in _ELSEWHERE or status == 301) and (region := _expected_region(error)):
        return InvalidStateError(
            f"{where} denied {what}: it is in region {region!r}, and the request was signed for another ({answer})",
            reason="STORE_REGION",
            remedy=f"set AWS_REGION={region}, or add region={region} to MILLRACE_STORE_URL",
            metadata=metadata | {"region": region},
        )
    if code in VIRTUAL_ONLY:
        return InvalidStateError(
            f"{where} denied {what}: it takes the bucket as a host name only ({answer})",
            reason="STORE_ADDRESSING",
            remedy="add addressing=virtual to MILLRACE_STORE_URL, and see that the host BUCKET.ENDPOINT resolves",
            metadata=metadata,
        )
    # Before the denials: some servers answer 403 for a quota.
    if status == 507 or code in _FULL:
        full = CapacityError(
            f"{where} has no room for {what}: {answer}",
            reason="STORE_FULL",
            remedy="free space in the bucket or raise its quota; retention and `keep_last` bound what a run keeps",
            metadata=metadata,
        )
        return TransientError(answer, final=full)
    if code in _DENIED or status in (401, 403):
        return _denied(f"{where} denied {what}: {answer}", metadata)
    if status == 501:
        return InternalError(
            f"{where} does not know how to do {what}: {answer}",
            reason="STORE_REFUSED",
            remedy="use a server that implements this request of S3",
            metadata=metadata,
        )
    if status >= 500 or status in (408, 429) or code in _TRY_AGAIN:
        # What is in front of a server that does not run answers for it: then it is not there.
        return TransientError(answer, is_answer=status not in (502, 503, 504))
    return InternalError(
        f"{where} refused {what}: {answer}: {error}",
        reason="STORE_REFUSED",
        remedy="use a bucket without Object Lock" if "object lock" in str(error).lower() else "see the store's log",
        metadata=metadata,
    )


def _denied(message: str, metadata: dict[str, str]) -> PermissionDeniedError:
    """Make the error for a server that does not accept our credentials or their rights."""
    return PermissionDeniedError(
        message,
        reason="STORE_DENIED",
        remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of a user who may read and write the bucket",
        metadata=metadata,
    )


def _skewed(error: ClientError, what: str, *, where: str, metadata: dict[str, str]) -> UnavailableError:
    """Make the error for clocks that differ by more than a signature may be old, with both times in its message."""
    own = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    other = error.response.get("Error", {}).get("ServerTime") or headers.get("date") or "not given"
    return UnavailableError(
        f"{where} denied {what}: the clocks differ too much: here it is {own} UTC, there {other}",
        reason="CLOCK_SKEWED",
        remedy="set the clock that is wrong, for example by NTP",
        metadata=metadata,
    )


def _expected_region(error: ClientError) -> str:
    """Return the region that the server's answer names for the bucket; empty if it names none."""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    details = error.response.get("Error", {})
    found = _EXPECTED_REGION.search(str(details.get("Message", "")))
    return headers.get("x-amz-bucket-region") or details.get("Region") or (found[1] if found else "")
