"""What the operating system refuses on a filesystem, as our errors: a full disk says how much it lacks."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from millrace.errors import CapacityError, ConflictError, InvalidStateError, PermissionDeniedError, UnavailableError

STORE = "MILLRACE_STORE_URL"
"""What says where the object store lies."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""What waiting does not mend: no outage."""


@contextlib.contextmanager
def io_errors(
    path: Path, action: str, *, needed_bytes: int | None = None, setting: str | None = STORE
) -> Iterator[None]:
    """Turn what the operating system refuses while `action` is done to `path` into our errors.

    A full disk or quota is CapacityError with the free space and, where it is known, the space that was needed; what is
    not allowed, or read-only, is PermissionDeniedError; everything else may be an outage, and is UnavailableError.
    FileExistsError passes: it is how a lost race shows. `setting` says where `path` lies; None if its user named it.
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
    """Make the directory that a local file goes to; `setting` as in `io_errors`."""
    with io_errors(path, "write", setting=setting):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, f"{path.parent} is a file") from None


def key_is_directory(path: Path) -> ConflictError:
    """The error for a key that other objects' keys use as a directory."""
    return ConflictError(
        f"{path} is the directory of other objects",
        reason="KEY_IS_PREFIX",
        remedy="choose a key that is not the beginning of another one up to a '/'",
        metadata={"path": str(path)},
    )


def _full(
    path: Path, action: str, error: OSError, needed_bytes: int | None, setting: str | None
) -> CapacityError | InvalidStateError:
    """Return the error for a full disk; one that is smaller than what it should take stays so."""
    free_bytes, free_files, all_bytes = _room(path)
    needed = "" if needed_bytes is None else f"{needed_bytes} bytes are needed, "
    files = ", and no file more fits" if free_files == 0 else ""
    quota = ", and a quota may allow less" if error.errno == errno.EDQUOT else ""
    metadata = {"path": str(path), "free_bytes": str(free_bytes)}
    name = f"{STORE}, or `output_dir` where the command runs the services" if setting == STORE else setting
    elsewhere = "name a directory elsewhere" if name is None else f"name a directory on another disk ({name})"
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
    """Free bytes and files for unprivileged users where `path` would lie, and all bytes of its disk.

    None for files that are not counted, and for a disk that nobody can look at.
    """
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(place)
            free_files = found.f_favail if found.f_files else None
            return found.f_bavail * found.f_frsize, free_files, found.f_blocks * found.f_frsize
    return 0, None, None
