"""The object store in a directory: the default of the one-machine stack.

Atomic by `link`/`rename` of a synced temporary file on the same filesystem, durable by syncing file and directory.
"""

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from millrace.errors import CapacityError, ConflictError, CorruptObjectError, NotFoundError, UnavailableError
from millrace.storage.base import ObjectInfo, check_key, check_prefix

_TMP = ".tmp"
_STALE_TMP_S = 24 * 3600.0  # a temporary file that old belongs to a dead process: no single write takes a day
_MKDIR_ATTEMPTS = 16  # a concurrent delete may prune a directory between mkdir and link
_COPY_BYTES = 8 << 20


class LocalStore:
    """`ObjectStore` under `root`. Any number of processes of one machine may use it at once."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._tmp = self._root / _TMP
        with _io_errors(self._root, "open"):
            self._tmp.mkdir(parents=True, exist_ok=True)
            self._remove_stale()

    def put(self, key: str, data: bytes) -> None:
        """See `ObjectStore.put`."""
        self._commit(key, _write_bytes(data), os.replace)

    def create(self, key: str, data: bytes) -> bool:
        """See `ObjectStore.create`; the race is decided by link(2)."""
        path = self._path(key)
        if path.is_file():  # spare the write; link below is what decides
            return False
        try:
            self._commit(key, _write_bytes(data), os.link)
        except FileExistsError:
            if path.is_dir():
                raise _is_directory(path) from None
            return False
        return True

    def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        with self._reading(key) as path:
            return path.read_bytes()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `ObjectStore.get_range`."""
        with self._reading(key) as path, path.open("rb") as file:
            file.seek(start)
            data = file.read(length)
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
        try:
            with self._reading(key) as path:
                return _info(key, path.stat())
        except NotFoundError:
            return None

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`. Objects written or deleted meanwhile may or may not appear."""
        directory, _, _ = check_prefix(prefix).rpartition("/")
        base = f"{directory}/" if directory else ""
        for key, stat in self._walk(self._root / directory, base, prefix.encode(), start_after.encode()):
            yield _info(key, stat)

    def list_prefixes(self, prefix: str) -> Iterator[str]:
        """See `ObjectStore.list_prefixes`."""
        check_prefix(prefix)
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"prefix {prefix!r} must be empty or end in '/'")
        for name, is_directory in _entries(self._root / prefix, prefix):
            child = f"{prefix}{name}/"
            if is_directory and next(self._walk(self._root / child, child, b"", b""), None) is not None:
                yield child

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`; prunes directories that became empty."""
        path = self._path(key)
        with _io_errors(path, "delete"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
            for parent in path.parents:
                if parent == self._root:
                    break
                try:
                    parent.rmdir()
                except OSError:  # not empty, or someone else was faster: both are fine
                    break

    def put_file(self, key: str, path: Path) -> None:
        """See `ObjectStore.put_file`."""

        def copy(target: Path) -> None:
            with path.open("rb") as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, _COPY_BYTES)
                _sync(file.fileno())

        self._commit(key, copy, os.replace)

    def get_file(self, key: str, path: Path) -> None:
        """See `ObjectStore.get_file`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
        try:
            with self._reading(key) as source:
                shutil.copyfile(source, part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def uri(self, key: str) -> str:
        """See `ObjectStore.uri`."""
        return (self._root / key).as_uri()

    def describe(self) -> str:
        """See `ObjectStore.describe`."""
        return f"directory {self._root}"

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[Path]:
        path = self._path(key)
        with _io_errors(path, "read"):
            try:
                if path.is_dir():
                    raise FileNotFoundError
                yield path
            except (FileNotFoundError, NotADirectoryError):
                raise NotFoundError(
                    f"no object {self.uri(key)}", reason="OBJECT_NOT_FOUND", metadata={"key": key}
                ) from None

    def _commit(self, key: str, write: Callable[[Path], None], publish: Callable[[Path, Path], None]) -> None:
        """Write a temporary file, then publish it under its name; FileExistsError is passed on."""
        path = self._path(key)
        temporary = self._tmp / secrets.token_hex(16)
        with _io_errors(path, "write"):
            try:
                write(temporary)
                for attempt in range(_MKDIR_ATTEMPTS):
                    _make_directories(path.parent, self._root)
                    try:
                        publish(temporary, path)
                        break
                    except FileNotFoundError:
                        if attempt + 1 == _MKDIR_ATTEMPTS:
                            raise
                _sync_directory(path.parent)
            finally:
                temporary.unlink(missing_ok=True)

    def _walk(
        self, directory: Path, base: str, prefix: bytes, start_after: bytes
    ) -> Iterator[tuple[str, os.stat_result]]:
        for name, is_directory in _entries(directory, base):
            key = f"{base}{name}"
            if is_directory:
                child = f"{key}/".encode()
                overlaps = child.startswith(prefix) or prefix.startswith(child)
                is_before = child < start_after and not start_after.startswith(child)
                if overlaps and not is_before:
                    yield from self._walk(directory / name, f"{key}/", prefix, start_after)
            elif key.encode().startswith(prefix) and key.encode() > start_after:
                with contextlib.suppress(FileNotFoundError):  # deleted since scandir
                    yield key, (directory / name).stat()

    def _remove_stale(self) -> None:
        for path in self._tmp.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _STALE_TMP_S:
                    path.unlink()


def _entries(directory: Path, base: str) -> list[tuple[str, bool]]:
    """(name, is_directory) in S3's order of keys: a directory sorts as its name with a slash."""
    try:
        with os.scandir(directory) as found:
            entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    except (FileNotFoundError, NotADirectoryError):
        return []
    if not base:
        entries = [entry for entry in entries if entry[0] != _TMP]
    return sorted(entries, key=lambda entry: f"{entry[0]}/".encode() if entry[1] else entry[0].encode())


def _is_directory(path: Path) -> ConflictError:
    return ConflictError(
        f"{path} is the directory of other objects",
        reason="KEY_IS_PREFIX",
        remedy="choose a key that is not the beginning of another one up to a '/'",
        metadata={"path": str(path)},
    )


def _write_bytes(data: bytes) -> Callable[[Path], None]:
    def write(target: Path) -> None:
        with target.open("wb") as file:
            file.write(data)
            _sync(file.fileno())

    return write


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_directory(directory: Path) -> None:
    """Make a new name durable. A directory that was pruned meanwhile holds no name to keep."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_directories(directory: Path, root: Path) -> None:
    """Create `directory` below `root`, syncing each parent that got a new name."""
    if directory == root or directory.is_dir():
        return
    _make_directories(directory.parent, root)
    try:
        directory.mkdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        return  # the parent was pruned just now: the caller tries again
    _sync_directory(directory.parent)


def _info(key: str, stat: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key=key, size_bytes=stat.st_size, modified=stat.st_mtime)


@contextlib.contextmanager
def _io_errors(path: Path, action: str) -> Iterator[None]:
    """Turn what the operating system refuses into our errors; a full disk is named as such."""
    try:
        yield
    except FileExistsError:
        raise
    except IsADirectoryError:
        raise _is_directory(path) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"cannot {action} {path}: {error.strerror}",
                reason="DISK_FULL",
                remedy="free disk space or move the store (MILLRACE_STORE_URL)",
                metadata={"path": str(path)},
            ) from error
        raise UnavailableError(
            f"cannot {action} {path}: {error.strerror or error}",
            reason="STORE_UNREACHABLE",
            remedy="check that the directory of MILLRACE_STORE_URL exists and is writable",
            metadata={"path": str(path)},
        ) from error
