"""What an S3 client and its server say of a failure, as our errors or as something to try again."""

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
    MillraceError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from millrace.storage.retry import TransientError

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


def translate(
    error: BaseException, what: str, *, where: str, bucket: str, uri: str = ""
) -> MillraceError | TransientError:
    """The error to raise for one failed attempt at `what`; `uri` names the object where its absence is an answer."""
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
    """The S3 error code, or the status as text where the answer had no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: ClientError) -> int:
    """The HTTP status of an answer that is an error."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _answered(error: ClientError, what: str, *, where: str, bucket: str, uri: str) -> MillraceError | TransientError:
    code, status = error_code(error), http_status(error)
    answer = f"HTTP {status}" if code == str(status) else f"HTTP {status} {code}"  # HEAD has no body that says more
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
    if status == 507 or code in _FULL:  # before the denials: some servers answer 403 for a quota
        full = CapacityError(
            f"{where} has no room for {what}: {answer}",
            reason="STORE_FULL",
            remedy="free space in the bucket or raise its quota; retention and `keep_last` bound what a run keeps",
            metadata=metadata,
        )
        return TransientError(answer, final=full)
    if code in _DENIED or status in (401, 403):
        return _denied(f"{where} denied {what}: {answer}", metadata)
    if status >= 500 or status in (408, 429) or code in _TRY_AGAIN:
        return TransientError(answer)
    return InternalError(
        f"{where} refused {what}: {answer}: {error}",
        reason="STORE_REFUSED",
        remedy="see the store's log",
        metadata=metadata,
    )


def _denied(message: str, metadata: dict[str, str]) -> PermissionDeniedError:
    return PermissionDeniedError(
        message,
        reason="STORE_DENIED",
        remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of a user who may read and write the bucket",
        metadata=metadata,
    )
