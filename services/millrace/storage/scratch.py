"""Directories for large files that live as long as their process: policies as files, checkpoints on their way.

A process that is killed cannot remove its own. Therefore an owner holds a lock on a file in it for as long as it
lives, and whoever makes a directory removes those beside it whose lock is free. No process inherits the lock.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from millrace.errors import UnavailableError

log = logging.getLogger(__name__)

SCRATCH_VARIABLE = "MILLRACE_SCRATCH_DIR"
_PREFIX, _FRESH = "millrace-", ".millrace-fresh-"
_LOCK = "owner.lock"


def scratch_parent() -> Path:
    """MILLRACE_SCRATCH_DIR, or where temporary files go; UnavailableError if nothing can be written there."""
    parent = Path(os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir())
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            return parent
    except OSError as error:
        raise UnavailableError(
            f"temporary files cannot be written in {parent}: {error.strerror or error}",
            reason="SCRATCH_UNUSABLE",
            remedy=f"set {SCRATCH_VARIABLE} to a directory on a disk with room for checkpoints and policies",
            metadata={"path": str(parent)},
        ) from error


@contextlib.contextmanager
def owned_directory(purpose: str) -> Iterator[Path]:
    """A new directory `millrace-{purpose}-…` in MILLRACE_SCRATCH_DIR, or where temporary files go; gone at the end.

    Those of dead owners, whatever they were for, are removed first: they may be as large as a checkpoint. Files in it
    may have any name but `owner.lock`.
    """
    parent = scratch_parent()
    _sweep(parent)
    fresh = Path(tempfile.mkdtemp(prefix=_FRESH, dir=parent))
    with (fresh / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under its name only once it is locked: a directory that others see without an owner is one to be removed.
        directory = fresh.rename(parent / f"{_PREFIX}{purpose}-{fresh.name.removeprefix(_FRESH)}")
        try:
            yield directory
        finally:
            _remove(directory)


def _sweep(parent: Path) -> None:
    """Removes directories whose owners are dead; one without a lock was not made here."""
    for path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), path.open("r+") as lock:  # or somebody else owns it, or removed it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("removing the directory of a process that is gone", extra={"directory": str(path.parent)})
            _remove(path.parent)


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("a temporary directory stays", extra={"directory": str(directory), "error": str(error)})
