"""The object store on any S3-compatible server, by boto3.

Path-style addresses, unless a server wants the bucket as a host name, and checksums only where the protocol asks for
them: third-party servers lack the newer ones.
botocore's own retries are off because nobody can see them, and because a create-only PUT needs to know that an earlier
attempt may have succeeded (`create`). Integrity is the hashes that manifests and headers hold, not ETags.
"""

import contextlib
import functools
import io
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import boto3
import botocore.session
from boto3.s3.transfer import TransferConfig, create_transfer_manager
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.loaders import Loader
from s3transfer.subscribers import BaseSubscriber

from millrace.errors import MillraceError
from millrace.storage.base import (
    MAX_GET_BYTES,
    ObjectInfo,
    cannot_carry_runs,
    check_key,
    check_prefix,
    require_range,
    require_size,
)
from millrace.storage.clean_up import ATTEMPT_S, TEMPORARY, RetryPolicy, TransientError, remove
from millrace.storage.s3_errors import (
    ABSENT,
    CLIENT_ERRORS,
    VIRTUAL_ONLY,
    error_code,
    http_status,
    is_unconditional,
    translate,
)
from millrace.storage.scratch import SCRATCH_VARIABLE, io_errors, make_parent
from millrace.telemetry import progress

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0  # also for every block of a body that is sent
READ_TIMEOUT_S = 20.0  # between two packets, not for a whole object
_SLOWEST_BYTES_PER_S = 64 << 10  # a download below that, over its first minute and after, is given up and begun again
_NOT_URGENT_S = 5.0  # of retries: other work waits for it, and it may be done another time
_MAX_CONNECTIONS = 32
_NO_DELETE_OBJECTS = frozenset({400, 405, 501})  # answers of servers that lack it, or want another checksum of it
_MULTIPART_BYTES = 64 << 20
COPY_BYTES = 64 << 10  # small, so that a trickle is noticed
TRANSFER = TransferConfig(
    multipart_threshold=_MULTIPART_BYTES, multipart_chunksize=16 << 20, max_concurrency=4, use_threads=True
)


class _Counted(BaseSubscriber):
    """Counts what an upload has sent; what is sent again was taken back before."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    def on_progress(self, future: Any, bytes_transferred: int, **_: Any) -> None:
        """See `BaseSubscriber.on_progress`."""
        self._count(bytes_transferred)


@functools.cache
def _descriptions() -> Loader:
    """Return the loader of botocore's data about S3, shared because reading them takes longest of a client's start."""
    return botocore.session.Session().get_component("data_loader")


class S3Store:
    """`ObjectStore` in `bucket`, below `prefix`. Credentials come from the usual `AWS_*` environment."""

    def __init__(
        self,
        *,
        bucket: str,
        prefix: str = "",
        endpoint: str | None = None,
        region: str | None = None,
        addressing: Literal["path", "virtual"] | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Create the store.

        `addressing` says where requests name the bucket: by default in the path, unless the server objects.
        """
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint = endpoint
        self._retry = retry or RetryPolicy()
        self._retry_later = replace(self._retry, deadline_s=min(self._retry.deadline_s, _NOT_URGENT_S))
        self._is_bucket_known = False
        self._has_delete_objects = True
        named = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        self._region = named or "us-east-1"
        self._may_change_addressing = addressing is None
        self._connect(addressing or "path")

    def _connect(self, addressing: str) -> None:
        config = Config(
            s3={"addressing_style": addressing},
            signature_version="s3v4",
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            max_pool_connections=_MAX_CONNECTIONS,
            retries={"total_max_attempts": 1},
        )
        session = botocore.session.Session()  # of its own: the environment may hold other credentials by now
        session.register_component("data_loader", _descriptions())
        self.client = boto3.Session(botocore_session=session).client(
            "s3", endpoint_url=self._endpoint, region_name=self._region, config=config
        )

    def ensure_bucket(self) -> None:
        """Create the bucket if it is missing (embedded stack and tests; a deployment's bucket is its operator's)."""

        is_default = self._region == "us-east-1"  # the one region that must not be named
        where: Any = {} if is_default else {"CreateBucketConfiguration": {"LocationConstraint": self._region}}

        def attempt(_: int) -> None:
            try:
                self.client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if error_code(error) not in (*ABSENT, "NoSuchBucket"):
                    self._say_why(error)
                try:
                    self.client.create_bucket(Bucket=self._bucket, **where)
                except ClientError as lost:
                    if error_code(lost) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                        raise

        self._run("create bucket of", "", attempt)
        self._is_bucket_known = True

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing an existing one (`ObjectStore.put`)."""
        name = self._name(key)
        self._run("PUT", key, lambda _: self.client.put_object(Bucket=self._bucket, Key=name, Body=data))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object only if the key is free, by `If-None-Match: *`; False if it exists (`ObjectStore.create`).

        InvalidStateError if the server has no conditional writes.
        """
        name = self._name(key)

        def attempt(number: int) -> bool:
            try:
                self.client.put_object(Bucket=self._bucket, Key=name, Body=data, IfNoneMatch="*")
            except ClientError as error:
                if http_status(error) == 412 or error_code(error) == "PreconditionFailed":
                    # The answer to an earlier attempt may have been lost after it had written.
                    return number > 0 and self._is_stored(name, data)
                # Another create or a delete of the same name is under way: ask again.
                if http_status(error) == 409 or error_code(error) in ABSENT:
                    raise TransientError(str(error)) from error
                if is_unconditional(error):
                    problem = f"it refuses a create-only PUT (If-None-Match: *): {error_code(error)}"
                    raise cannot_carry_runs(self.describe(), problem) from error
                raise
            return True

        return self._run("create", key, attempt)

    def get(self, key: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """Return the whole object; NotFoundError without one, CorruptObjectError if it is larger than `max_bytes`."""
        name = self._name(key)

        def attempt(_: int) -> bytes:
            found = self.client.get_object(Bucket=self._bucket, Key=name)
            size_bytes = self._field(found, "ContentLength")
            if size_bytes > max_bytes:
                found["Body"].close()  # unread: nobody else may use the connection
            require_size(size_bytes, max_bytes, key=key, uri=self.uri(key))
            return b"".join(self._receive(found))

        return self._run("GET", key, attempt, is_read=True)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from `start`; CorruptObjectError if the object ends before."""
        name = self._name(key)
        if length == 0:
            return b""

        def attempt(_: int) -> bytes:
            try:
                wanted = f"bytes={start}-{start + length - 1}"
                found = self.client.get_object(Bucket=self._bucket, Key=name, Range=wanted)
                size_bytes = self._field(found, "ContentLength")
                if "ContentRange" not in found and size_bytes > length:
                    found["Body"].close()  # unread: nobody else may use the connection
                    problem = f"asked for {wanted}, it answers with all {size_bytes} bytes of the object"
                    raise cannot_carry_runs(self.describe(), problem)
                return b"".join(self._receive(found))
            except ClientError as error:
                if http_status(error) == 416:
                    return b""
                raise

        data = self._run(f"GET {length} bytes from {start} of", key, attempt, is_read=True)
        return require_range(data, start, length, key=key, uri=self.uri(key))

    def head(self, key: str) -> ObjectInfo | None:
        """Return size and time of an object; None without one."""
        name = self._name(key)

        def attempt(_: int) -> ObjectInfo | None:
            try:
                found = self.client.head_object(Bucket=self._bucket, Key=name)
            except ClientError as error:
                if error_code(error) in ABSENT:
                    self._check_bucket()  # HEAD answers a bare 404 for a missing bucket, too
                    return None
                self._say_why(error)
            return self._info(key, found, size="ContentLength")

        return self._run("HEAD", key, attempt)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below a prefix after a key, in order (`ObjectStore.list`).

        Markers of folders are left out.
        """
        check_prefix(prefix)
        after = {"StartAfter": self._prefix + start_after} if start_after else {}
        for page in self._pages("LIST", prefix, Prefix=self._prefix + prefix, **after):
            for item in page.get("Contents", ()):
                key = self._field(item, "Key").removeprefix(self._prefix)
                if key.endswith("/"):
                    continue  # a marker by which consoles and other tools show a folder: no object of ours
                if key > start_after or not start_after:  # some servers begin *at* StartAfter
                    yield self._info(key, item, size="Size")

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        """Yield the distinct prefixes with a slash directly below a prefix (`ObjectStore.list_prefixes`)."""
        check_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"prefix {prefix!r} must be empty or end in '/'")
        for page in self._pages("LIST prefixes of", prefix, Prefix=self._prefix + prefix, Delimiter="/"):
            for item in page.get("CommonPrefixes", ()):
                yield self._field(item, "Prefix").removeprefix(self._prefix)

    def delete(self, key: str) -> None:
        """Remove an object, if there is one; tried again for `_NOT_URGENT_S` only."""
        name = self._name(key)
        self._run("DELETE", key, lambda _: self.client.delete_object(Bucket=self._bucket, Key=name), is_urgent=False)

    def delete_many(self, keys: Sequence[str]) -> dict[str, str]:
        """See `ObjectStore.delete_many`: one DeleteObjects, or one DELETE each on a server that has none."""
        names = {self._name(key): key for key in keys}
        if not names:
            return {}
        gone, left = set[str](), dict[str, str]()
        if self._has_delete_objects:
            request = {"Objects": [{"Key": name} for name in names]}

            def attempt(_: int) -> dict[str, Any]:
                try:
                    return self.client.delete_objects(Bucket=self._bucket, Delete=request)
                except ClientError as error:
                    if http_status(error) not in _NO_DELETE_OBJECTS:
                        raise
                    self._has_delete_objects = False
                    return {}

            answer = self._run(f"DELETE {len(names)} objects such as", keys[0], attempt, is_urgent=False)
            gone = {item.get("Key", "") for item in answer.get("Deleted", ())}
            for item in answer.get("Errors", ()):
                left[names.get(item.get("Key", ""), keys[0])] = f"{item.get('Code')}: {item.get('Message')}"
        for name, key in names.items():
            if name not in gone and key not in left:  # a server that does not say that it is gone is asked once more
                try:
                    self.delete(key)
                except MillraceError as error:
                    left[key] = error.message
        return left

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from a file, in parts above 64 MiB, replacing an existing one."""
        name = self._name(key)
        with io_errors(path, "read"):
            path.stat()  # a file that is missing here is no failure of the store
        self._run(
            f"PUT {path.name} as",
            key,
            lambda _: self._upload(path, name),
        )

    def _upload(self, path: Path, name: str) -> None:
        # Not `client.upload_file`: that wraps the server's answer in an error of its own, and while the manager still
        # tidies up, the answer is raised once more on the way out and lost from it.
        with progress.tried() as count, create_transfer_manager(self.client, TRANSFER) as manager:
            manager.upload(str(path), self._bucket, name, subscribers=[_Counted(count)]).result()

    def get_file(self, key: str, path: Path) -> None:
        """Download an object into a file, which appears whole or not at all; NotFoundError without an object."""
        name = self._name(key)
        part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")

        def attempt(_: int) -> None:
            found = self.client.get_object(Bucket=self._bucket, Key=name)
            size_bytes = self._field(found, "ContentLength")
            with io_errors(part, "write", needed_bytes=size_bytes, setting=SCRATCH_VARIABLE):
                file = part.open("wb")
            with file, progress.tried() as count:
                for data in self._receive(found):
                    with io_errors(part, "write", needed_bytes=size_bytes, setting=SCRATCH_VARIABLE):
                        file.write(data)
                    count(len(data))
                with io_errors(part, "write", needed_bytes=size_bytes, setting=SCRATCH_VARIABLE):
                    file.flush()

        make_parent(path, setting=SCRATCH_VARIABLE)
        try:
            self._run("GET", key, attempt, is_read=True)
            with io_errors(path, "write", setting=SCRATCH_VARIABLE):
                os.replace(part, path)
        finally:
            remove(part, what=TEMPORARY)

    def uri(self, key: str) -> str:
        """See `ObjectStore.uri`."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def describe(self) -> str:
        """See `ObjectStore.describe`."""
        return f"{self._endpoint or 'AWS'}, bucket {self._bucket}"

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _read(self, name: str) -> bytes:
        found = self.client.get_object(Bucket=self._bucket, Key=name)
        data = io.BytesIO()
        for part in self._receive(found):
            data.write(part)
        return data.getvalue()

    def _receive(self, found: Any) -> Iterator[bytes]:
        """Yield the body of an answer in pieces, and close it.

        Raises TransientError if it is not as long as its header promised, or slower than
        `_SLOWEST_BYTES_PER_S`.
        """
        size_bytes, count = self._field(found, "ContentLength"), 0
        ends = time.monotonic() + ATTEMPT_S + size_bytes / _SLOWEST_BYTES_PER_S
        with contextlib.closing(found["Body"]) as body:
            while data := body.read(COPY_BYTES):
                count += len(data)
                yield data
                if time.monotonic() > ends and count < size_bytes:
                    raise TransientError(f"only {count} of {size_bytes} bytes came in time")
        if count != size_bytes:
            raise TransientError(f"{count} of {size_bytes} bytes came")

    def _is_stored(self, name: str, data: bytes) -> bool:
        """Return whether exactly these bytes are stored; TransientError if the object went away just now."""
        try:
            return self._read(name) == data
        except ClientError as error:
            if error_code(error) in ABSENT:
                raise TransientError("the object was deleted while it was compared") from error
            raise

    def _pages(self, what: str, prefix: str, **options: Any) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            request = {"Bucket": self._bucket, **options, **token}
            page = self._run(what, prefix, lambda _, request=request: self.client.list_objects_v2(**request))
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": self._field(page, "NextContinuationToken")}

    def _field(self, answer: dict[str, Any], field: str) -> Any:
        """Return a field of an answer that S3 always has; InvalidStateError from a server that leaves it out."""
        if field not in answer:
            if "Body" in answer:
                answer["Body"].close()  # unread: nobody else may use the connection
            raise cannot_carry_runs(self.describe(), f"an answer of it lacks {field}")
        return answer[field]

    def _info(self, key: str, answer: dict[str, Any], *, size: str) -> ObjectInfo:
        modified = self._field(answer, "LastModified").timestamp()
        return ObjectInfo(key=key, size_bytes=self._field(answer, size), modified=modified)

    def _takes_host_names(self, error: BaseException) -> bool:
        """Return whether an error shows that the server wants the bucket as a host name.

        The client is then made anew so. Once at most, and never where the addressing is given.
        """
        if not self._may_change_addressing or not isinstance(error, ClientError):
            return False
        if error_code(error) not in VIRTUAL_ONLY:
            return False
        self._may_change_addressing = False
        self._connect("virtual")
        return True

    def _say_why(self, error: ClientError) -> NoReturn:
        """Raise the error of a HEAD, or where that is a bare status, the error of a listing, which has a reason."""
        if error_code(error).isdecimal():
            self.client.list_objects_v2(Bucket=self._bucket, MaxKeys=1)
        raise error

    def _check_bucket(self) -> None:
        if not self._is_bucket_known:
            self.client.head_bucket(Bucket=self._bucket)
            self._is_bucket_known = True

    def _run(
        self, action: str, key: str, attempt: Callable[[int], T], *, is_read: bool = False, is_urgent: bool = True
    ) -> T:
        """Return what `attempt` returns, tried again as the policy says, for `_NOT_URGENT_S` if it is not urgent.

        Errors of the client become ours. With `is_read` an absent object is NotFoundError, else it means a
        missing bucket.
        """
        where, uri = self.describe(), self.uri(key)
        what = f"{action} {uri}"

        def translated(number: int) -> T:
            try:
                return attempt(number)
            except CLIENT_ERRORS as error:
                if self._takes_host_names(error):
                    raise TransientError("the server takes the bucket as a host name only") from error
                raise translate(error, what, where=where, bucket=self._bucket, uri=uri if is_read else "") from error

        return (self._retry if is_urgent else self._retry_later).run(what, where, translated)
