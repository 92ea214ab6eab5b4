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
# A download below that, over its first minute and after, is given up and begun again.
_SLOWEST_BYTES_PER_S = 64 << 10
_NOT_URGENT_S = 5.0  # of retries: other work waits for it, and it may be done another time
_MAX_CONNECTIONS = 32
# Answers of servers that lack it, or want another checksum of it.
_NO_DELETE_OBJECTS = frozenset({400, 405, 501})
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
        """Count the bytes of one more part that was sent; a negative number takes back what is sent again."""
        self._count(bytes_transferred)


@functools.cache
def _descriptions() -> Loader:
    """Return botocore's loader of its data about S3.

    All clients share it, because reading takes longest of their start.
    """
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
        """Create the store; nothing is requested yet. Keys are below `prefix` in the bucket.

        `endpoint` None is Amazon's; `region` None is that of the environment. `addressing` says where requests name the
        bucket: by default in the path, unless the server objects.
        """
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._endpoint = endpoint
        self._retry = retry or RetryPolicy()
        # A clean-up that the store refuses must not hold up the work that waits for it.
        self._retry_later = replace(self._retry, deadline_s=min(self._retry.deadline_s, _NOT_URGENT_S))
        self._is_bucket_known = False
        self._has_delete_objects = True
        named = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        self._region = named or "us-east-1"
        self._may_change_addressing = addressing is None
        self._connect(addressing or "path")

    def _connect(self, addressing: str) -> None:
        """Make the client that all requests go through.

        `addressing` is "path" or "virtual" (the bucket in the host name).
        """
        # botocore 1.36 began to send and to expect CRC checksums by default ("when_supported").
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
        # A session of its own: boto3's default one would keep the credentials that the environment had at first.
        session = botocore.session.Session()
        session.register_component("data_loader", _descriptions())
        self.client = boto3.Session(botocore_session=session).client(
            "s3", endpoint_url=self._endpoint, region_name=self._region, config=config
        )

    def ensure_bucket(self) -> None:
        """Create the bucket if it is missing (one-machine stack and tests; a deployment's bucket is its operator's)."""

        # The default region must not be named as a constraint: S3 refuses it there.
        is_default = self._region == "us-east-1"
        where: Any = {} if is_default else {"CreateBucketConfiguration": {"LocationConstraint": self._region}}

        def attempt(_: int) -> None:
            """Create the bucket if the server says that it is missing; one that exists is no error."""
            try:
                self.client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                if error_code(error) not in (*ABSENT, "NoSuchBucket"):
                    self._raise_with_reason(error)
                try:
                    self.client.create_bucket(Bucket=self._bucket, **where)
                except ClientError as lost:
                    if error_code(lost) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                        raise

        self._run("create bucket of", "", attempt)
        self._is_bucket_known = True

    def put(self, key: str, data: bytes) -> None:
        """Write an object, replacing an existing one. Readers get the old bytes or the new ones, never a mixture."""
        name = self._name(key)
        self._run("PUT", key, lambda _: self.client.put_object(Bucket=self._bucket, Key=name, Body=data))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object only if the key is free, by `If-None-Match: *`; return False if it exists.

        Of racing writers one gets True. Where an earlier attempt of this call may have written it and these bytes are
        stored, that counts as ours: True. InvalidStateError if the server has no conditional writes.
        """
        name = self._name(key)

        def attempt(number: int) -> bool:
            """Send a create-only PUT once; return whether the object is ours.

            From the second attempt on, a refused one may be ours as well: equal bytes decide.
            """
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
        """Return the whole object; NotFoundError without one, CorruptObjectError if it has more than `max_bytes`."""
        name = self._name(key)

        def attempt(_: int) -> bytes:
            """Read the whole object once."""
            found = self.client.get_object(Bucket=self._bucket, Key=name)
            size_bytes = self._field(found, "ContentLength")
            if size_bytes > max_bytes:
                found["Body"].close()  # unread: nobody else may use the connection
            require_size(size_bytes, max_bytes, key=key, uri=self.uri(key))
            return b"".join(self._receive(found))

        return self._run("GET", key, attempt, is_read=True)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from offset `start`; CorruptObjectError if the object ends before.

        NotFoundError without an object, InvalidStateError if the server ignores ranges.
        """
        name = self._name(key)
        if length == 0:
            return b""

        def attempt(_: int) -> bytes:
            """Read the range once; empty if the object ends before it."""
            try:
                wanted = f"bytes={start}-{start + length - 1}"
                found = self.client.get_object(Bucket=self._bucket, Key=name, Range=wanted)
                size_bytes = self._field(found, "ContentLength")
                # A server that ignores the header answers with the whole object: it may be larger than memory, and from
                # its beginning it may have as many bytes as a range further on.
                if "ContentRange" not in found and (start or size_bytes > length):
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
        """Return key, size and time of an object; None without one."""
        name = self._name(key)

        def attempt(_: int) -> ObjectInfo | None:
            """Ask once for size and time of the object; None without one."""
            try:
                found = self.client.head_object(Bucket=self._bucket, Key=name)
            except ClientError as error:
                if error_code(error) in ABSENT:
                    # A missing bucket is a bare 404 to HEAD as well, and must not look like an absent object.
                    self._check_bucket()
                    return None
                self._raise_with_reason(error)
            return self._info(key, found, size="ContentLength")

        return self._run("HEAD", key, attempt)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with `prefix` and sorts after `start_after`, in the server's order.

        Markers of folders (keys that end in a slash) are left out.
        """
        check_prefix(prefix)
        after = {"StartAfter": self._prefix + start_after} if start_after else {}
        for page in self._pages("LIST", prefix, Prefix=self._prefix + prefix, **after):
            for item in page.get("Contents", ()):
                key = self._field(item, "Key").removeprefix(self._prefix)
                if key.endswith("/"):
                    # Consoles and other tools create such objects to show a folder; none is ours.
                    continue
                # Some servers begin at StartAfter and not after it.
                if key > start_after or not start_after:
                    yield self._info(key, item, size="Size")

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        """Yield the distinct `prefix + name + "/"` directly below a prefix.

        ValueError unless the prefix is empty or ends in a slash.
        """
        check_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"prefix {prefix!r} must be empty or end in '/'")
        for page in self._pages("LIST prefixes of", prefix, Prefix=self._prefix + prefix, Delimiter="/"):
            for item in page.get("CommonPrefixes", ()):
                yield self._field(item, "Prefix").removeprefix(self._prefix)

    def delete(self, key: str) -> None:
        """Remove an object; no error if there is none. A failure is tried again for `_NOT_URGENT_S` seconds only."""
        name = self._name(key)
        self._run("DELETE", key, lambda _: self.client.delete_object(Bucket=self._bucket, Key=name), is_urgent=False)

    def delete_many(self, keys: Sequence[str]) -> dict[str, str]:
        """Remove objects by one DeleteObjects, or by one DELETE each on a server that lacks it.

        Return by key the reason for each that could not be removed. One that does not exist counts as removed.
        """
        names = {self._name(key): key for key in keys}
        if not names:
            return {}
        gone, left = set[str](), dict[str, str]()
        if self._has_delete_objects:
            request = {"Objects": [{"Key": name} for name in names]}

            def attempt(_: int) -> dict[str, Any]:
                """Delete all once by one request; an empty answer from a server that lacks it."""
                try:
                    return self.client.delete_objects(Bucket=self._bucket, Delete=request)
                except ClientError as error:
                    if http_status(error) not in _NO_DELETE_OBJECTS:
                        raise
                    # Remembered, so that a server is asked once only for what it lacks.
                    self._has_delete_objects = False
                    return {}

            answer = self._run(f"DELETE {len(names)} objects such as", keys[0], attempt, is_urgent=False)
            gone = {item.get("Key", "") for item in answer.get("Deleted", ())}
            for item in answer.get("Errors", ()):
                # An error that names no key of ours counts for the first: something was not removed.
                left[names.get(item.get("Key", ""), keys[0])] = f"{item.get('Code')}: {item.get('Message')}"
        for name, key in names.items():
            # A server that does not say that it is gone is asked once more.
            if name not in gone and key not in left:
                try:
                    self.delete(key)
                except MillraceError as error:
                    left[key] = error.message
        return left

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from the file at `path`, in parts above 64 MiB, replacing an existing object."""
        name = self._name(key)
        with io_errors(path, "read"):
            # Before the upload, whose retries are for the store: a file that is missing here is no failure of it.
            path.stat()
        self._run(
            f"PUT {path.name} as",
            key,
            lambda _: self._upload(path, name),
        )

    def _upload(self, path: Path, name: str) -> None:
        """Send a file to the object `name` (the full key in the bucket), in parts if it is large.

        Count what was sent.
        """
        # Not `client.upload_file`: that wraps the server's answer in an error of its own, and while the manager still
        # tidies up, the answer is raised once more on the way out and lost from it.
        with progress.tried() as count, create_transfer_manager(self.client, TRANSFER) as manager:
            manager.upload(str(path), self._bucket, name, subscribers=[_Counted(count)]).result()

    def get_file(self, key: str, path: Path) -> None:
        """Download an object into a file at `path`, which appears whole or not at all; NotFoundError without an object.

        The file's directory is created.
        """
        name = self._name(key)
        # In the same directory, because a rename is atomic within one filesystem only.
        part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")

        def attempt(_: int) -> None:
            """Download the object once into the temporary file."""
            found = self.client.get_object(Bucket=self._bucket, Key=name)
            size_bytes = self._field(found, "ContentLength")
            with io_errors(part, "write", needed_bytes=size_bytes, setting=SCRATCH_VARIABLE):
                # Opened anew by each attempt, which begins at the first byte.
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
        """Return the `s3://` URI of the object, whether or not it exists."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def describe(self) -> str:
        """Return "ENDPOINT, bucket NAME", which names the store in messages."""
        return f"{self._endpoint or 'AWS'}, bucket {self._bucket}"

    def _name(self, key: str) -> str:
        """Return the full key in the bucket for a key of this store; InvalidSpecError if it is malformed."""
        return self._prefix + check_key(key)

    def _read(self, name: str) -> bytes:
        """Return the bytes of the object `name` (the full key in the bucket), in one attempt."""
        found = self.client.get_object(Bucket=self._bucket, Key=name)
        data = io.BytesIO()
        for part in self._receive(found):
            data.write(part)
        return data.getvalue()

    def _receive(self, found: Any) -> Iterator[bytes]:
        """Yield the body of a GET's answer (`found`, as boto3 returns it) in pieces, and close it.

        Raises TransientError if it is not as long as its header promised, or slower than `_SLOWEST_BYTES_PER_S`.
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
        """Return whether the object `name` holds exactly these bytes; TransientError if it was deleted just now."""
        try:
            return self._read(name) == data
        except ClientError as error:
            if error_code(error) in ABSENT:
                raise TransientError("the object was deleted while it was compared") from error
            raise

    def _pages(self, what: str, prefix: str, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a listing, as boto3 returns them; each is one request, tried again by itself.

        `what` and `prefix` name the operation in messages, `options` are those of `list_objects_v2`.
        """
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
        """Return what an answer says of an object; `size` is the answer's field with its size."""
        modified = self._field(answer, "LastModified").timestamp()
        return ObjectInfo(key=key, size_bytes=self._field(answer, size), modified=modified)

    def _takes_host_names(self, error: BaseException) -> bool:
        """Return whether an error shows that the server wants the bucket in the host name, which was not tried yet.

        The client is then made anew so, once at most, and never where the user chose the addressing.
        """
        if not self._may_change_addressing or not isinstance(error, ClientError):
            return False
        if error_code(error) not in VIRTUAL_ONLY:
            return False
        self._may_change_addressing = False
        self._connect("virtual")
        return True

    def _raise_with_reason(self, error: ClientError) -> NoReturn:
        """Raise the error of a HEAD request, with a reason if the server gives one; never returns.

        A HEAD's error may be a bare status. Then the bucket is listed: the error of that request has a reason.
        """
        if error_code(error).isdecimal():
            self.client.list_objects_v2(Bucket=self._bucket, MaxKeys=1)
        raise error

    def _check_bucket(self) -> None:
        """Raise the client's error if the bucket does not exist; ask the server once only."""
        if not self._is_bucket_known:
            self.client.head_bucket(Bucket=self._bucket)
            self._is_bucket_known = True

    def _run(
        self, action: str, key: str, attempt: Callable[[int], T], *, is_read: bool = False, is_urgent: bool = True
    ) -> T:
        """Return what `attempt(number)` returns, tried again as the policy says, for `_NOT_URGENT_S` if it is not
        urgent.

        `action` and `key` name the operation in messages. Errors of the client become errors of Millrace. With
        `is_read` an absent object is NotFoundError, else it means a missing bucket.
        """
        where, uri = self.describe(), self.uri(key)
        what = f"{action} {uri}"

        def translated(number: int) -> T:
            """Make one attempt, with the client's errors as ours."""
            try:
                return attempt(number)
            except CLIENT_ERRORS as error:
                if self._takes_host_names(error):
                    raise TransientError("the server takes the bucket as a host name only") from error
                raise translate(error, what, where=where, bucket=self._bucket, uri=uri if is_read else "") from error

        return (self._retry if is_urgent else self._retry_later).run(what, where, translated)
