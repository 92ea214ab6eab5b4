"""The object store in a directory: the default of the one-machine stack.

Atomic by `link`/`rename` of a synced temporary file on the same filesystem, durable by syncing file and directory.
A temporary file is locked while its writer lives, so that what a killed writer left is distinguished and removed. A
full disk is waited for like a store that does not answer: a bounded time, visibly.
"""

import contextlib
import errno
import fcntl
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from millrace.decoding import is_text
from millrace.errors import CapacityError, MillraceError, NotFoundError
from millrace.storage.base import (
    MAX_GET_BYTES,
    ObjectInfo,
    check_key,
    check_prefix,
    require_range,
    require_size,
)
from millrace.storage.clean_up import TEMPORARY, RetryPolicy, TransientError, remove
from millrace.storage.scratch import SCRATCH_VARIABLE, STORE, io_errors, key_is_directory, make_parent
from millrace.telemetry import progress

_TMP = ".tmp"
_STALE_TMP_S = 60.0  # younger files may be between their creation and their lock
_UNLOCKABLE_TMP_S = 24 * 3600.0  # on a filesystem without locks: no single write takes a day
# A concurrent delete may prune a directory between mkdir and link, again and again.
PRUNED_DEADLINE_S = 10.0
_PRUNED_PAUSE_S = 0.02  # at most, between two tries
_COPY_BYTES = 8 << 20


class LocalStore:
    """`ObjectStore` under `root`. Any number of processes of one machine may use it at once."""

    def __init__(self, root: Path, *, retry: RetryPolicy | None = None, setting: str = STORE) -> None:
        """Open the store in the directory `root`, which is created, and remove temporary files of dead writers there.

        `retry` says how long a full disk is waited for; `setting` is the variable or key that names the directory, for
        messages.
        """
        self._root = root.resolve()
        self._setting = setting
        self._tmp = self._root / _TMP
        self._retry = retry or RetryPolicy()
        with io_errors(self._root, "open", setting=setting):
            self._tmp.mkdir(parents=True, exist_ok=True)
            self._remove_stale()

    def put(self, key: str, data: bytes) -> None:
        """Write an object atomically and durably, replacing an existing one; a full disk is tried again for a while."""

        def write(file: BinaryIO) -> None:
            """Write the object's bytes to the temporary file."""
            file.write(data)

        self._commit("PUT", key, write, os.replace, needed_bytes=len(data))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object only if the key is free; return False if it exists. Of racing writers one gets True.

        True is also returned where an earlier try of this same call had written the object and then failed.
        """
        path = self._path(key)
        # Only to save the write: the link below decides.
        if path.is_file():
            return False
        tries = 0

        def write(file: BinaryIO) -> None:
            """Write the object's bytes to the temporary file, and count the try."""
            nonlocal tries
            tries += 1
            file.write(data)

        try:
            # `link` fails where the name exists; a rename would replace it.
            self._commit("create", key, write, os.link, needed_bytes=len(data))
        except FileExistsError:
            if path.is_dir():
                raise key_is_directory(path) from None
            # An earlier try may have named it, then failed to sync the name.
            return tries > 1 and self.get(key) == data
        return True

    def get(self, key: str, *, max_bytes: int = MAX_GET_BYTES) -> bytes:
        """Return the whole object; NotFoundError without one, CorruptObjectError if it has more than `max_bytes`."""
        with self._reading(key) as path, path.open("rb") as file:
            require_size(os.fstat(file.fileno()).st_size, max_bytes, key=key, uri=self.uri(key))
            return file.read()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from offset `start`.

        NotFoundError without an object, CorruptObjectError if it ends before.
        """
        with self._reading(key) as path, path.open("rb") as file:
            file.seek(start)
            data = file.read(length)
        return require_range(data, start, length, key=key, uri=self.uri(key))

    def head(self, key: str) -> ObjectInfo | None:
        """Return key, size and time of an object; None without one."""
        try:
            with self._reading(key) as path:
                return _info(key, path.stat())
        except NotFoundError:
            return None

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with `prefix` and sorts after `start_after`, in order of UTF-8 bytes.

        Objects written or deleted meanwhile may or may not appear.
        """
        directory, _, _ = check_prefix(prefix).rpartition("/")
        base = f"{directory}/" if directory else ""
        for key, stat in self._walk(self._root / directory, base, prefix.encode(), start_after.encode()):
            yield _info(key, stat)

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        """Yield the distinct `prefix + name + "/"` directly below a prefix, sorted.

        Directories without an object are left out. ValueError if the prefix is neither empty nor ends in a slash.
        """
        check_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"prefix {prefix!r} must be empty or end in '/'")
        for name, is_directory in _entries(self._root / prefix, prefix):
            child = f"{prefix}{name}/"
            if is_directory and next(self._walk(self._root / child, child, b"", b""), None) is not None:
                yield child

    def delete(self, key: str) -> None:
        """Remove an object, if there is one, and the directories that became empty; no error if there is none."""
        path = self._path(key)
        with io_errors(path, "delete", setting=self._setting):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
            for parent in path.parents:
                if parent == self._root:
                    break
                try:
                    parent.rmdir()
                except OSError:  # not empty, or someone else was faster: both are fine
                    break

    def delete_many(self, keys: Sequence[str]) -> dict[str, str]:
        """Remove objects one by one; return by key the error's message for each that could not be removed."""
        left: dict[str, str] = {}
        for key in keys:
            try:
                self.delete(key)
            except MillraceError as error:
                left[key] = error.message
        return left

    def put_file(self, key: str, path: Path) -> None:
        """Write an object from the file at `path`, replacing an existing object."""

        def copy(file: BinaryIO) -> None:
            with path.open("rb") as source:
                _copy(source, file)

        with io_errors(path, "read", setting=self._setting):
            size_bytes = path.stat().st_size
        self._commit("PUT", key, copy, os.replace, needed_bytes=size_bytes)

    def get_file(self, key: str, path: Path) -> None:
        """Copy an object into a file at `path`, which appears whole or not at all; NotFoundError without an object.

        The file's directory is created.
        """
        # In the same directory, because a rename is atomic within one filesystem only.
        part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
        with self._reading(key) as source_path:
            source = source_path.open("rb")
        make_parent(path, setting=SCRATCH_VARIABLE)
        size_bytes = os.fstat(source.fileno()).st_size
        with source, io_errors(path, "write", needed_bytes=size_bytes, setting=SCRATCH_VARIABLE):
            try:
                with part.open("xb") as file:
                    _copy(source, file)
                os.replace(part, path)
            finally:
                remove(part, what=TEMPORARY)

    def uri(self, key: str) -> str:
        """Return the `file://` URI of the object's file, whether or not it exists."""
        return (self._root / key).as_uri()

    def describe(self) -> str:
        """Return "directory PATH", which names the store in messages."""
        return f"directory {self._root}"

    def _path(self, key: str) -> Path:
        """Return the file of a key; InvalidSpecError if the key is malformed."""
        return self._root / check_key(key)

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[Path]:
        """Provide the file of a key for reading in the block.

        Raises NotFoundError if there is no such object; errors of the operating system become Millrace's (`io_errors`).
        """
        path = self._path(key)
        with io_errors(path, "read", setting=self._setting):
            try:
                if path.is_dir():
                    raise FileNotFoundError
                yield path
            except (FileNotFoundError, NotADirectoryError):
                raise NotFoundError(
                    f"no object {self.uri(key)}", reason="OBJECT_NOT_FOUND", metadata={"key": key}
                ) from None

    def _commit(
        self,
        action: str,
        key: str,
        write: Callable[[BinaryIO], None],
        publish: Callable[[Path, Path], None],
        *,
        needed_bytes: int,
    ) -> None:
        """Write a temporary file by `write`, then give it the object's name by `publish` (temporary path, path of the
        object).

        A full disk is tried again for a while; `needed_bytes` is for its message, `action` names the operation there.
        FileExistsError of `publish` is passed on.
        """
        path = self._path(key)

        def attempt(_: int) -> None:
            """Write and publish the object once; a full disk is worth another attempt."""
            try:
                with io_errors(path, "write", needed_bytes=needed_bytes, setting=self._setting):
                    self._write_and_publish(path, write, publish)
            except CapacityError as error:  # room may come: retention, another run's end, the operator
                raise TransientError(error.message, final=error) from error

        self._retry.run(f"{action} {self.uri(key)}", self.describe(), attempt)

    def _write_and_publish(
        self, path: Path, write: Callable[[BinaryIO], None], publish: Callable[[Path, Path], None]
    ) -> None:
        """Write and sync a locked temporary file by `write`, give it its name by `publish`, and remove the temporary
        name.
        """
        temporary = self._tmp / secrets.token_hex(16)
        try:
            with temporary.open("xb") as file:
                # The lock holds until the file is closed or its writer dies, whichever is first.
                _lock(file)
                write(file)
                file.flush()
                # Before it gets its name: after a power failure no name may lead to a file without its bytes.
                sync(file.fileno())
                _publish_below(self._root, path, lambda: publish(temporary, path))
        finally:
            # Only the temporary name goes: after a link the object has its own.
            remove(temporary, what=TEMPORARY)

    def _walk(
        self, directory: Path, base: str, prefix: bytes, start_after: bytes
    ) -> Iterator[tuple[str, os.stat_result]]:
        """Yield key and stat of the files at any depth below `directory` that match, in order of keys.

        `base` is the directory's key with a slash, or empty. A key matches that starts with `prefix` and sorts after
        `start_after`; both are UTF-8 bytes. Directories without a match are not read.
        """
        for name, is_directory in _entries(directory, base):
            key = f"{base}{name}"
            if is_directory:
                # A directory is left out if no key below it has the prefix, or if all of them sort before
                # `start_after`.
                child = f"{key}/".encode()
                overlaps = child.startswith(prefix) or prefix.startswith(child)
                is_before = child < start_after and not start_after.startswith(child)
                if overlaps and not is_before:
                    yield from self._walk(directory / name, f"{key}/", prefix, start_after)
            elif key.encode().startswith(prefix) and key.encode() > start_after:
                with contextlib.suppress(FileNotFoundError):  # deleted since scandir
                    yield key, (directory / name).stat()

    def _remove_stale(self) -> None:
        """Remove temporary files that are older than a minute and whose writer is dead."""
        for path in self._tmp.iterdir():
            with contextlib.suppress(FileNotFoundError):
                age_s = time.time() - path.stat().st_mtime
                if age_s > _STALE_TMP_S and (age_s > _UNLOCKABLE_TMP_S or _is_abandoned(path)):
                    remove(path, what=TEMPORARY)


def _entries(directory: Path, base: str) -> list[tuple[str, bool]]:
    """Return (name, is_directory) of a directory's entries in S3's order of keys: a directory sorts as its name with a
    slash.

    `base` is the directory's key; at the root, where it is empty, temporary files are left out. So are names that are
    no text. A missing directory has no entries.
    """
    with io_errors(directory, "list"):
        try:
            with os.scandir(directory) as found:
                entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found if is_text(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
    if not base:
        entries = [entry for entry in entries if entry[0] != _TMP]
    return sorted(entries, key=lambda entry: f"{entry[0]}/".encode() if entry[1] else entry[0].encode())


def _lock(file: BinaryIO) -> None:
    """Lock the file while it is open, as a sign that its writer lives; do nothing on a filesystem without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        # EWOULDBLOCK: another process holds it for a moment, to see whether this file is abandoned.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EWOULDBLOCK):
            raise


def _is_abandoned(path: Path) -> bool:
    """Return whether no process writes this temporary file any more, by its lock; False if that is unknown."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync(descriptor: int) -> None:
    """Make a file's bytes, or a directory's names, durable on the disk; `descriptor` is its open file number."""
    os.fsync(descriptor)


def _sync_directory(directory: Path) -> None:
    """Make new names in a directory durable; do nothing if it was pruned meanwhile, because it holds no name then."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish_below(root: Path, path: Path, publish: Callable[[], None]) -> None:
    """Create the directory of `path` below `root`, call `publish`, which gives the file this name, and make it durable.

    Where others remove the empty directory meanwhile, it is created again; FileNotFoundError where that goes on for ten
    seconds.
    """
    deadline = time.monotonic() + PRUNED_DEADLINE_S
    # unregistered wait: milliseconds, for deletes of this directory by others, within a bound
    while True:
        _make_directories(path.parent, root)
        try:
            publish()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
            # A random pause: with a fixed one a concurrent delete might prune the directory before each try again.
            time.sleep(random.uniform(0, _PRUNED_PAUSE_S))
        else:
            _sync_directory(path.parent)
            return


def _make_directories(directory: Path, root: Path) -> None:
    """Create `directory` below `root` with its parents, each new name made durable; it may be removed again at any
    time.
    """
    if directory == root or directory.is_dir():
        return
    _make_directories(directory.parent, root)
    try:
        directory.mkdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        # A concurrent delete has pruned the parent; the caller tries again.
        return
    _sync_directory(directory.parent)


def _info(key: str, stat: os.stat_result) -> ObjectInfo:
    """Return what a listing says of a file: its key, size and time of modification."""
    return ObjectInfo(key=key, size_bytes=stat.st_size, modified=stat.st_mtime)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    """Copy a file to its end; the bytes are counted as progress of the caller's work."""
    with progress.tried() as count:
        while data := source.read(_COPY_BYTES):
            target.write(data)
            count(len(data))
