"""The object store on any S3-compatible server, by boto3.

Path-style addresses and checksums only where the protocol asks for them: third-party servers lack the newer ones.
botocore's own retries are off because nobody can see them, and because a create-only PUT needs to know that an earlier
attempt may have succeeded (`create`). Integrity is the hashes that manifests and headers hold, not ETags.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
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
from urllib3.exceptions import HTTPError

from millrace.errors import (
    CorruptObjectError,
    InternalError,
    MillraceError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from millrace.storage.base import ObjectInfo, check_key, check_prefix
from millrace.storage.retry import RetryPolicy, TransientError

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0  # between two packets, not for a whole object
_MAX_CONNECTIONS = 32
_MULTIPART_BYTES = 64 << 20
_COPY_BYTES = 8 << 20
_TRANSFER = TransferConfig(
    multipart_threshold=_MULTIPART_BYTES, multipart_chunksize=16 << 20, max_concurrency=4, use_threads=True
)
_THROTTLED = frozenset({"SlowDown", "RequestTimeout", "RequestLimitExceeded", "Throttling", "ThrottlingException"})
_DENIED = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "Forbidden", "403"})
_ABSENT = frozenset({"NoSuchKey", "404", "NotFound"})


class S3Store:
    """`ObjectStore` in `bucket`, below `prefix`. Credentials come from the usual `AWS_*` environment."""

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str = "",
        endpoint: str | None = None,
        region: str | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint = endpoint
        self._retry = retry or RetryPolicy()
        self._is_bucket_known = False
        config = Config(
            s3={"addressing_style": "path"},
            signature_version="s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            max_pool_connections=_MAX_CONNECTIONS,
            retries={"total_max_attempts": 1},
        )
        named = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        self._region = named or "us-east-1"
        self._client = boto3.Session().client("s3", endpoint_url=endpoint, region_name=self._region, config=config)

    def ensure_bucket(self) -> None:
        """Create the bucket if it is missing (embedded stack and tests; a deployment's bucket is its operator's)."""

        is_default = self._region == "us-east-1"  # the one region that must not be named
        where: Any = {} if is_default else {"CreateBucketConfiguration": {"LocationConstraint": self._region}}

        def attempt(_: int) -> None:
            try:
                self._client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if _code(error) not in (*_ABSENT, "NoSuchBucket"):
                    raise
                try:
                    self._client.create_bucket(Bucket=self._bucket, **where)
                except ClientError as lost:
                    if _code(lost) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                        raise

        self._run("create bucket", attempt)
        self._is_bucket_known = True

    def put(self, key: str, data: bytes) -> None:
        """See `ObjectStore.put`."""
        name = self._name(key)
        self._run(f"PUT {key}", lambda _: self._client.put_object(Bucket=self._bucket, Key=name, Body=data))

    def create(self, key: str, data: bytes) -> bool:
        """See `ObjectStore.create`: `If-None-Match: *`."""
        name = self._name(key)

        def attempt(number: int) -> bool:
            try:
                self._client.put_object(Bucket=self._bucket, Key=name, Body=data, IfNoneMatch="*")
            except ClientError as error:
                if _status(error) == 412 or _code(error) == "PreconditionFailed":
                    # The answer to an earlier attempt may have been lost after it had written.
                    return number > 0 and self._read(name) == data
                if _code(error) == "ConditionalRequestConflict":  # another create is under way: ask again
                    raise TransientError(str(error)) from error
                raise
            return True

        return self._run(f"create {key}", attempt)

    def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        name = self._name(key)
        return self._run(f"GET {key}", lambda _: self._read(name), key=key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        name = self._name(key)
        if length == 0:
            return b""

        def attempt(_: int) -> bytes:
            try:
                return self._read(name, Range=f"bytes={start}-{start + length - 1}")
            except ClientError as error:
                if _status(error) == 416:
                    return b""
                raise

        data = self._run(f"GET {key} from {start}", attempt, key=key)
        if len(data) != length:
            raise CorruptObjectError(
                f"object {self.uri(key)} ends before byte {start + length}",
                reason="OBJECT_TOO_SHORT",
                remedy="restore the object; what refers to it says that it is longer",
                metadata={"key": key},
            )
        return data

    def head(self, key: str) -> ObjectInfo | None:
        """See `ObjectStore.head`."""
        name = self._name(key)

        def attempt(_: int) -> ObjectInfo | None:
            try:
                found = self._client.head_object(Bucket=self._bucket, Key=name)
            except ClientError as error:
                if _code(error) in _ABSENT:
                    self._check_bucket()  # HEAD answers a bare 404 for a missing bucket, too
                    return None
                raise
            return ObjectInfo(key=key, size_bytes=found["ContentLength"], modified=found["LastModified"].timestamp())

        return self._run(f"HEAD {key}", attempt)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        check_prefix(prefix)
        after = {"StartAfter": self._prefix + start_after} if start_after else {}
        for page in self._pages(f"LIST {prefix}", Prefix=self._prefix + prefix, **after):
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._prefix)
                if key > start_after or not start_after:  # some servers begin *at* StartAfter
                    yield ObjectInfo(key=key, size_bytes=item["Size"], modified=item["LastModified"].timestamp())

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_prefixes`."""
        check_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"prefix {prefix!r} must be empty or end in '/'")
        for page in self._pages(f"LIST {prefix}*/", Prefix=self._prefix + prefix, Delimiter="/"):
            for item in page.get("CommonPrefixes", ()):
                yield item["Prefix"].removeprefix(self._prefix)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        name = self._name(key)
        self._run(f"DELETE {key}", lambda _: self._client.delete_object(Bucket=self._bucket, Key=name))

    def put_file(self, key: str, path: Path) -> None:
        """See `ObjectStore.put_file`; in parts above 64 MiB."""
        name = self._name(key)
        self._run(
            f"PUT {key} from a file",
            lambda _: self._client.upload_file(str(path), self._bucket, name, Config=_TRANSFER),
        )

    def get_file(self, key: str, path: Path) -> None:
        """See `ObjectStore.get_file`."""
        name = self._name(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")

        def attempt(_: int) -> None:
            found = self._client.get_object(Bucket=self._bucket, Key=name)
            with contextlib.closing(found["Body"]) as body, part.open("wb") as file:
                while data := body.read(_COPY_BYTES):
                    file.write(data)
                if file.tell() != found["ContentLength"]:
                    raise TransientError(f"{file.tell()} of {found['ContentLength']} bytes came")

        try:
            self._run(f"GET {key} to a file", attempt, key=key)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def uri(self, key: str) -> str:
        """See `ObjectStore.uri`."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def describe(self) -> str:
        """See `ObjectStore.describe`."""
        return f"{self._endpoint or 'AWS'}, bucket {self._bucket}"

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _read(self, name: str, **options: Any) -> bytes:
        found = self._client.get_object(Bucket=self._bucket, Key=name, **options)
        with contextlib.closing(found["Body"]) as body:
            data = body.read()
        if len(data) != found["ContentLength"]:
            raise TransientError(f"{len(data)} of {found['ContentLength']} bytes came")
        return data

    def _pages(self, what: str, **options: Any) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            request = {"Bucket": self._bucket, **options, **token}
            page = self._run(what, lambda _, request=request: self._client.list_objects_v2(**request))
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _check_bucket(self) -> None:
        if not self._is_bucket_known:
            self._client.head_bucket(Bucket=self._bucket)
            self._is_bucket_known = True

    def _run(self, what: str, attempt: Callable[[int], T], *, key: str = "") -> T:
        """Run with retries; what is left over becomes one of our errors."""

        def translated(number: int) -> T:
            try:
                return attempt(number)
            except (ClientError, BotoCoreError, Boto3Error, HTTPError, ConnectionError, TimeoutError) as error:
                raise self._translate(_root(error), what, key) from error

        return self._retry.run(what, self.describe(), translated)

    def _translate(self, error: BaseException, what: str, key: str) -> MillraceError | TransientError:
        metadata = {"store": self.describe()}
        if isinstance(error, ClientError):
            code, status = _code(error), _status(error)
            if code == "NoSuchBucket" or (code in _ABSENT and not key):
                return UnavailableError(
                    f"bucket {self._bucket!r} does not exist at {self._endpoint or 'AWS'}",
                    reason="BUCKET_MISSING",
                    remedy="create it, or correct MILLRACE_STORE_URL",
                    metadata=metadata,
                )
            if code in _ABSENT:
                return NotFoundError(f"no object {self.uri(key)}", reason="OBJECT_NOT_FOUND", metadata={"key": key})
            if code in _DENIED or status in (401, 403):
                return _denied(f"{self.describe()} denied {what}: {code}", metadata)
            if status >= 500 or status == 429 or code in _THROTTLED:
                return TransientError(f"{status} {code}")
            return InternalError(
                f"{self.describe()} refused {what}: {status} {code}: {error}",
                reason="STORE_REFUSED",
                remedy="see the store's log",
                metadata=metadata,
            )
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return _denied(f"no complete credentials for {self.describe()}", metadata)
        transient = (
            BotoConnectionError,
            HTTPClientError,
            IncompleteReadError,
            ResponseStreamingError,
            HTTPError,
            OSError,
        )
        if isinstance(error, transient):
            return TransientError(f"{type(error).__name__}: {error}")
        return InternalError(
            f"{what} at {self.describe()}: {type(error).__name__}: {error}", reason="STORE_FAILED", metadata=metadata
        )


def _denied(message: str, metadata: dict[str, str]) -> PermissionDeniedError:
    return PermissionDeniedError(
        message,
        reason="STORE_DENIED",
        remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of a user who may read and write the bucket",
        metadata=metadata,
    )


def _root(error: BaseException) -> BaseException:
    """What an error of the transfer manager wraps, where it wraps something that we know."""
    if isinstance(error, Boto3Error):
        inner = error.__context__ or error.__cause__
        if isinstance(inner, ClientError | BotoCoreError | HTTPError | OSError):
            return inner
    return error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
