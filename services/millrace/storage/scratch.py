"""Directories for large files that live as long as their process: policies as files, checkpoints on their way.

A process that is killed cannot remove its own. Therefore an owner holds a lock on a file in it for as long as it
lives, and each process that makes a directory removes the others there whose lock is free. The lock goes last, so that
the next process takes up a removal that is cut short. No process inherits it.
"""

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from millrace.errors import PermissionDeniedError, UnavailableError
from millrace.storage.clean_up import TEMPORARY, remove
from millrace.storage.disk import io_errors

logger = logging.getLogger(__name__)

SCRATCH_VARIABLE = "MILLRACE_SCRATCH_DIR"
_PREFIX, _FRESH = "millrace-", ".millrace-fresh-"
_LOCK = "owner.lock"
_FRESH_S = 60.0  # a directory is locked and has its name microseconds after it was made


@contextlib.contextmanager
def scratch_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses in a scratch directory into our errors.

    CapacityError if it is full, PermissionDeniedError if it may not be written, else UnavailableError.
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
    """MILLRACE_SCRATCH_DIR, or where temporary files go; it exists."""
    parent = Path(os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir())
    with scratch_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
    return parent


@contextlib.contextmanager
def owned_directory(purpose: str, *, parent: Path | None = None) -> Iterator[Path]:
    """A new directory `millrace-{purpose}-…` in `parent`, by default `scratch_parent`; gone at the end.

    Files in it may have any name but `owner.lock`.

    Those of dead owners, whatever they were for, are removed first: they may be as large as a checkpoint. Raises
    CapacityError if the disk is full, UnavailableError if nothing can be written there.
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
    """Remove the directories in `parent` whose owners are dead; one without a lock was not made here."""
    for path in [*parent.glob(f"{_PREFIX}*/{_LOCK}"), *_forsaken(parent)]:
        with contextlib.suppress(OSError):  # somebody owns it, or removes it
            lock = _open_own(path)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            if _remove(path.parent, lock):
                logger.info("removed the directory of a process that is gone", extra={"directory": str(path.parent)})


def _forsaken(parent: Path) -> Iterator[Path]:
    """Locks in directories whose makers died before they named them."""
    for path in parent.glob(f"{_FRESH}*/{_LOCK}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _FRESH_S:
                yield path


def _open_own(path: Path) -> IO[str]:
    """The lock, if it is a file of this user: where everybody may write, it might be a link to something else."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+")
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        file.close()
        raise PermissionError(f"{path} is not ours")
    return file


def _remove(directory: Path, lock: IO[str]) -> bool:
    """Remove a directory whose lock is held; whether it is gone.

    The lock is removed last, and closed before, as network file systems need it.
    """
    with lock:
        try:
            names = os.listdir(directory)
        except OSError:  # another one was faster, or its user removed it; `remove` says what else it is
            names = []
        # Everything is tried, so that as little stays as possible.
        left = [remove(directory / name, what=TEMPORARY) for name in names if name != _LOCK]
    return not any(left) and remove(directory, what=TEMPORARY) is None
