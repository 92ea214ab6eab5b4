"""Removing what nobody needs any more (blocking): it never fails or holds up the work that it follows.

Every clean-up goes through here. What cannot be removed stays: a warning names it with the reason, it is counted
(`millrace_removals_failed_total`), and who asks again before its pause is over is told so at once. The pauses grow from
a minute to an hour. What has to be gone, so that a work can go on, is not removed here: its error is that work's.
"""

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from millrace.errors import MillraceError
from millrace.storage.base import ObjectStore
from millrace.telemetry.leftovers import LEFTOVERS, Leftover

TEMPORARY = "temporary files"
"""The kind of what lives no longer than its process."""


def remove(path: Path, *, what: str) -> Leftover | None:
    """Remove a file, or a directory with all that is in it; return what is known of it if it stays.

    One that is not there is gone. Of a directory everything is removed that can be. `what` is a kind of things.
    """
    name = str(path)
    if (paused := LEFTOVERS.is_paused(name)) is not None:
        return paused
    try:
        _remove(path)
    except OSError as error:
        return LEFTOVERS.failed(what, name, _why(error, path))
    LEFTOVERS.removed(name)
    return None


def delete(store: ObjectStore, key: str, *, what: str) -> Leftover | None:
    """Delete an object; return what is known of it if it stays. `what` is a kind of things."""
    name = store.uri(key)
    if (paused := LEFTOVERS.is_paused(name)) is not None:
        return paused
    try:
        store.delete(key)
    except MillraceError as error:
        return LEFTOVERS.failed(what, name, error.message)
    LEFTOVERS.removed(name)
    return None


class TemporaryDirectory:
    """A directory that lives as long as this object, or the block that it opens; its end raises nothing.

    That of the standard library may raise at its end, also where it is told to ignore errors.
    """

    def __init__(self, *, prefix: str, directory: Path | None = None) -> None:
        """Make one in `directory`, by default where temporary files go."""
        self.name = tempfile.mkdtemp(prefix=prefix, dir=directory)
        self._end = weakref.finalize(self, remove, Path(self.name), what=TEMPORARY)

    def cleanup(self) -> None:
        """Remove it with all that is in it, once."""
        self._end()

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def _remove(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        _remove_tree(path)


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)  # the rest of it, also where somebody else removes it, too
        if os.path.lexists(path):
            raise error


def _why(error: OSError, path: Path) -> str:
    """Return what was answered; of a directory also the first file in it that stays."""
    first = next((Path(at, files[0]) for at, _, files in os.walk(path) if files), None)
    return f"{error.strerror or error}" + (f" ({first} stays)" if first is not None else "")
