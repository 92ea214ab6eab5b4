"""What the operating system refuses on a filesystem, as our errors: a full disk says how much it lacks."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from millrace.errors import CapacityError, ConflictError, UnavailableError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def io_errors(path: Path, action: str, *, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn what the operating system refuses while `action` is done to `path` into our errors.

    A full disk or quota is CapacityError with the free space and, where it is known, the space that was needed.
    FileExistsError passes: it is how a lost race shows.
    """
    try:
        yield
    except FileExistsError:
        raise
    except IsADirectoryError:
        raise key_is_directory(path) from None
    except OSError as error:
        if error.errno in _FULL:
            raise _full(path, action, error, needed_bytes) from error
        raise UnavailableError(
            f"cannot {action} {path}: {error.strerror or error}",
            reason="STORE_UNREACHABLE",
            remedy="check that the directory of MILLRACE_STORE_URL exists and is writable",
            metadata={"path": str(path)},
        ) from error


def make_parent(path: Path) -> None:
    """Make the directory that a local file goes to."""
    with io_errors(path, "write"):
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


def _full(path: Path, action: str, error: OSError, needed_bytes: int | None) -> CapacityError:
    free_bytes, free_files = _free(path)
    needed = "" if needed_bytes is None else f"{needed_bytes} bytes are needed, "
    files = ", and no file more fits" if free_files == 0 else ""
    quota = ", and a quota may allow less" if error.errno == errno.EDQUOT else ""
    metadata = {"path": str(path), "free_bytes": str(free_bytes)}
    return CapacityError(
        f"cannot {action} {path}: {error.strerror} ({needed}{free_bytes} bytes are free{files}{quota})",
        reason="DISK_FULL",
        remedy="free disk space, or move what lies there (object store: MILLRACE_STORE_URL, else MILLRACE_SCRATCH_DIR)",
        metadata=metadata if needed_bytes is None else {**metadata, "needed_bytes": str(needed_bytes)},
    )


def _free(path: Path) -> tuple[int, int | None]:
    """Free bytes and files for unprivileged users where `path` would lie; None for files that are not counted."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(place)
            return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None
    return 0, None
