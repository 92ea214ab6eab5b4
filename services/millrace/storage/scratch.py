"""Directories for large files that live as long as their process, and what a full or refusing disk means.

A process that is killed cannot remove its own. Therefore an owner holds a lock on a file in it for as long as it
lives, and each process that makes a directory removes the others there whose lock is free. The lock goes last, so that
the next process takes up a removal that is cut short. No process inherits it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from millrace.errors import CapacityError, ConflictError, InvalidStateError, PermissionDeniedError, UnavailableError
from millrace.storage.clean_up import TEMPORARY, remove

logger = logging.getLogger(__name__)

SCRATCH_VARIABLE = "MILLRACE_SCRATCH_DIR"
_PREFIX, _FRESH = "millrace-", ".millrace-fresh-"
_LOCK = "owner.lock"
_FRESH_S = 60.0  # a directory is locked and has its name microseconds after it was made


@contextlib.contextmanager
def scratch_errors(path: Path) -> Iterator[None]:
    """Turn errors of the operating system in the block, about the scratch directory `path`, into errors of Millrace.

    CapacityError if the disk is full, PermissionDeniedError if `path` may not be written, else UnavailableError.
    """
    try:
        with io_errors(path, "write", setting=SCRATCH_VARIABLE):
            yield
    except (UnavailableError, PermissionDeniedError, FileExistsError) as error:
        kind = PermissionDeniedError if isinstance(error, PermissionDeniedError) else UnavailableError
        raise kind(
            f"temporary files cannot be written in {path}: {error}",
            reason="SCRATCH_UNUSABLE",
            remedy=f"set {SCRATCH_VARIABLE} to a directory on a disk with room for checkpoints and policies",
            metadata={"path": str(path)},
        ) from error


def scratch_parent() -> Path:
    """Return the directory for large temporary files, created if missing: MILLRACE_SCRATCH_DIR, or the system's."""
    parent = Path(os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir())
    with scratch_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
    return parent


@contextlib.contextmanager
def owned_directory(purpose: str, *, parent: Path | None = None) -> Iterator[Path]:
    """Provide a new directory `millrace-{purpose}-…` in `parent` (None: `scratch_parent`), and remove it after the
    block.

    Files in it may have any name but `owner.lock`. Directories of dead owners, whatever they were for, are removed
    first: they may be as large as a checkpoint. Raises CapacityError if the disk is full, PermissionDeniedError if
    `parent` may not be written, UnavailableError for another error of the system.
    """
    parent = parent or scratch_parent()
    with scratch_errors(parent):
        sweep(parent)
        fresh = Path(tempfile.mkdtemp(prefix=_FRESH, dir=parent))
        try:
            lock = (fresh / _LOCK).open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Under its name only once it is locked: a directory that others see without an owner is one to be removed.
            directory = fresh.rename(parent / f"{_PREFIX}{purpose}-{fresh.name.removeprefix(_FRESH)}")
        except BaseException:  # raised on; the lock's file is closed with its last reference
            remove(fresh, what=TEMPORARY)
            raise
    try:
        yield directory
    finally:
        _remove(directory, lock)


def sweep(parent: Path) -> None:
    """Remove the scratch directories in `parent` whose owners are dead; directories without a lock file stay."""
    for path in [*parent.glob(f"{_PREFIX}*/{_LOCK}"), *_forsaken(parent)]:
        # Its owner lives, or another process removes it at this moment.
        with contextlib.suppress(OSError):
            lock = _open_own(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            if _remove(path.parent, lock):
                logger.info("removed the directory of a process that is gone", extra={"directory": str(path.parent)})


def _forsaken(parent: Path) -> Iterator[Path]:
    """Yield the lock files of directories whose makers died before they gave them their names: older than
    `_FRESH_S`.
    """
    for path in parent.glob(f"{_FRESH}*/{_LOCK}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _FRESH_S:
                yield path


def _open_own(path: Path) -> IO[str]:
    """Open and return a lock file if it is a regular file of this user, else raise OSError.

    Where everybody may write, it might be a link to something else.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+")
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        file.close()
        raise PermissionError(f"{path} is not ours")
    return file


def _remove(directory: Path, lock: IO[str]) -> bool:
    """Remove a directory whose lock file is open as `lock` and held, and return whether it is gone.

    The lock's file is removed last, and closed before, as network file systems need it.
    """
    with lock:
        try:
            names = os.listdir(directory)
        except OSError:  # another one was faster, or its user removed it; `remove` says what else it is
            names = []
        # Everything is tried, so that as little stays as possible.
        left = [remove(directory / name, what=TEMPORARY) for name in names if name != _LOCK]
    return not any(left) and remove(directory, what=TEMPORARY) is None


# What the operating system refuses on a filesystem, as our errors: a full disk says how much it lacks.

STORE = "MILLRACE_STORE_URL"
"""What says where the object store is."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""What waiting does not fix: no outage."""


@contextlib.contextmanager
def io_errors(
    path: Path, action: str, *, needed_bytes: int | None = None, setting: str | None = STORE
) -> Iterator[None]:
    """Turn errors of the operating system in the block into errors of Millrace; `action` (such as "write") is done to
    `path`.

    A full disk or quota is CapacityError with the free space and `needed_bytes`, the space that was needed, if known,
    or InvalidStateError for a disk that is too small; what is not allowed, or read-only, is PermissionDeniedError; a
    directory in place of a file is ConflictError; everything else may be an outage, and is UnavailableError.
    FileExistsError passes: it is how a lost race shows. `setting` is the variable or key that says where `path` is;
    None if its user named it.
    """
    try:
        yield
    except FileExistsError:
        raise
    except IsADirectoryError:
        raise key_is_directory(path) from None
    except OSError as error:
        if error.errno in _FULL:
            raise _full(path, action, error, needed_bytes, setting) from error
        directory = "the directory" if setting is None else f"the directory of {setting}"
        message, metadata = f"cannot {action} {path}: {error.strerror or error}", {"path": str(path)}
        if error.errno in _DENIED:
            raise PermissionDeniedError(
                message,
                reason="STORE_DENIED" if setting == STORE else "DIRECTORY_UNUSABLE",
                remedy=f"let this user (uid {os.geteuid()}) read and write {directory}, or name another one",
                metadata=metadata,
            ) from error
        raise UnavailableError(
            message,
            reason="STORE_UNREACHABLE" if setting == STORE else "DIRECTORY_UNUSABLE",
            remedy=f"check that {directory} exists and is writable, or name another one",
            metadata=metadata,
        ) from error


def make_parent(path: Path, *, setting: str | None = STORE) -> None:
    """Create the directory that the file `path` goes to, with its parents; nothing is done where it exists.

    `setting` is the variable or key that says where `path` is, for messages; None if its user named it. Raises
    CapacityError if the disk is full, PermissionDeniedError if that is not allowed, UnavailableError for anything else.
    """
    with io_errors(path, "write", setting=setting):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, f"{path.parent} is a file") from None


def key_is_directory(path: Path) -> ConflictError:
    """Make (not raise) the error for a key whose file is a directory, because other objects' keys go on from it."""
    return ConflictError(
        f"{path} is the directory of other objects",
        reason="KEY_IS_PREFIX",
        remedy="choose a key that is not the beginning of another one up to a '/'",
        metadata={"path": str(path)},
    )


def _full(
    path: Path, action: str, error: OSError, needed_bytes: int | None, setting: str | None
) -> CapacityError | InvalidStateError:
    """Make the error for a full disk: CapacityError, or InvalidStateError if the disk can never be large enough.

    `action` (such as "write") was done to `path`, and `error` is the system's. `needed_bytes` is the room that it
    takes, None if that is unknown. `setting` is the variable or key that says where `path` is; None if its user named
    it.
    """
    free_bytes, free_files, all_bytes = _room(path)
    needed = "" if needed_bytes is None else f"{needed_bytes} bytes are needed, "
    files = ", and no file more fits" if free_files == 0 else ""
    quota = ", and a quota may allow less" if error.errno == errno.EDQUOT else ""
    metadata = {"path": str(path), "free_bytes": str(free_bytes)}
    name = f"{STORE}, or `output_dir` where the command runs the services" if setting == STORE else setting
    elsewhere = "name a directory elsewhere" if name is None else f"name a directory on another disk ({name})"
    # Waiting helps a disk that is full, and never one that is too small.
    if needed_bytes is not None and all_bytes is not None and needed_bytes > all_bytes:
        return InvalidStateError(
            f"cannot {action} {path}: {needed_bytes} bytes are needed, and its whole disk has {all_bytes}",
            reason="DISK_TOO_SMALL",
            remedy=elsewhere,
            metadata={**metadata, "needed_bytes": str(needed_bytes), "all_bytes": str(all_bytes)},
        )
    return CapacityError(
        f"cannot {action} {path}: {error.strerror} ({needed}{free_bytes} bytes are free{files}{quota})",
        reason="DISK_FULL",
        remedy=f"free disk space, or {elsewhere}",
        metadata=metadata if needed_bytes is None else {**metadata, "needed_bytes": str(needed_bytes)},
    )


def _room(path: Path) -> tuple[int, int | None, int | None]:
    """Return free bytes, free files and all bytes of the disk of `path`, as an unprivileged user may use them.

    Files are None where the disk does not count them. (0, None, None) for a disk that cannot be looked at.
    """
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(place)
            # File systems without a fixed number of inodes report 0 of 0.
            free_files = found.f_favail if found.f_files else None
            return found.f_bavail * found.f_frsize, free_files, found.f_blocks * found.f_frsize
    return 0, None, None
