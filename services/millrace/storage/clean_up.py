"""Removing what nobody needs, which never fails the work before it, and bounded, visible retries (blocking).

Every clean-up goes through here. What cannot be removed stays: a warning names it with the reason, it is counted
(`millrace_removals_failed_total`), and it is not tried again before a pause is over. The pauses grow from a minute to
an hour. What has to be gone, so that a work can go on, is not removed here: its error is that work's.
"""

import logging
import math
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from millrace.backoff import Backoff
from millrace.errors import MillraceError, UnavailableError
from millrace.storage.base import MAX_DELETED, ObjectStore
from millrace.telemetry import waits
from millrace.telemetry.leftovers import LEFTOVERS, Leftover

TEMPORARY = "temporary files"
"""The kind of what lives no longer than its process."""


def remove(path: Path, *, what: str) -> Leftover | None:
    """Remove a file, or a directory with all that is in it; return None, or a record of it if something stays.

    It never raises an OSError: a failure is logged and counted under the kind `what` ("temporary files"), and nothing
    is tried again before a pause is over: a call within it returns the record of the last failure. What does not exist
    counts as removed. Of a directory all is removed that can be.
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
    """Delete an object; return None, or a record of it if it stays.

    It raises no error of the store: a failure is logged and counted under the kind `what`, and nothing is tried again
    before a pause is over: a call within it returns the record of the last failure.
    """
    name = store.uri(key)
    if (paused := LEFTOVERS.is_paused(name)) is not None:
        return paused
    try:
        store.delete(key)
    except MillraceError as error:
        return LEFTOVERS.failed(what, name, error.message)
    LEFTOVERS.removed(name)
    return None


def delete_all(store: ObjectStore, keys: Sequence[str], *, what: str, most: int) -> list[Leftover]:
    """Delete objects, many in one request; return the records of those that were tried and could not be deleted.

    A failure is logged and counted under the kind `what`. An object that failed lately is not tried before its pause is
    over, and counts as a failure. No further request is made once `most` have failed, so objects that are not in the
    result may still exist. Raises no error of the store: a request that fails as a whole is one failure.
    """
    left, due = list[Leftover](), list[str]()
    for key in keys:
        if (paused := LEFTOVERS.is_paused(store.uri(key))) is not None:
            left.append(paused)
        else:
            due.append(key)
    for first in range(0, len(due), MAX_DELETED):
        if len(left) >= most:
            break
        some = due[first : first + MAX_DELETED]
        try:
            stays = store.delete_many(some)
        except MillraceError as error:
            # One leftover is enough: nothing is known of the others.
            stays = dict.fromkeys(some[:1], error.message)
        left += [LEFTOVERS.failed(what, store.uri(key), why) for key, why in islice(stays.items(), most)]
        for key in some if not stays else ():
            LEFTOVERS.removed(store.uri(key))
    return left


class TemporaryDirectory:
    """A directory that lives as long as this object, or the block that it opens; its end raises nothing.

    That of the standard library may raise at its end, also with `ignore_cleanup_errors`.
    """

    def __init__(self, *, prefix: str, directory: Path | None = None) -> None:
        """Make a directory whose name begins with `prefix`, in `directory` (None: where temporary files go).

        `name` is its path.
        """
        self.name = tempfile.mkdtemp(prefix=prefix, dir=directory)
        self._end = weakref.finalize(self, remove, Path(self.name), what=TEMPORARY)

    def cleanup(self) -> None:
        """Remove the directory with all that is in it, once; what cannot be removed is logged, and raises nothing."""
        self._end()

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def _remove(path: Path) -> None:
    """Remove a file or a whole directory; OSError if something stays. What does not exist is no error."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        _remove_tree(path)


def _remove_tree(path: Path) -> None:
    """Remove a directory with all that can be removed of it.

    Raise the first OSError if the directory is still there.
    """
    try:
        shutil.rmtree(path)
    except OSError as error:
        # Once more, without errors: the rest is removed, also where another process removes the same tree.
        shutil.rmtree(path, ignore_errors=True)
        if os.path.lexists(path):
            raise error


def _why(error: OSError, path: Path) -> str:
    """Return in words why `path` could not be removed; of a directory also the first file in it that stays."""
    first = next((Path(at, files[0]) for at, _, files in os.walk(path) if files), None)
    return f"{error.strerror or error}" + (f" ({first} stays)" if first is not None else "")


# Bounded, visible retries of a store's operations (blocking).

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPT_S = 60.0
"""How long one attempt takes at most while nothing is wrong but the time; large objects may take longer."""
QUIET_S = 1.0
"""Operations that are over sooner are no wait worth showing."""
_BACKOFF = Backoff(0.1, 5.0, spread=(0.5, 1.0))


class TransientError(Exception):
    """An attempt failed in a way that another one may fix: 5xx, throttling, time-out, lost connection, no room."""

    def __init__(self, message: str, *, final: MillraceError | None = None, is_answer: bool = False) -> None:
        """Make one; `final` is the error to raise when no attempt is left (None: UnavailableError).

        `is_answer` says that the server itself runs and answered with a failure.
        """
        super().__init__(message)
        self.final = final
        self.is_answer = is_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to try: no attempt begins `deadline_s` seconds after the first failure, or after `max_attempts`.

    A large object takes longer than that; the failure of its first attempt must not be the last one for it.
    """

    deadline_s: float = 60.0
    max_attempts: int = 12

    def run(self, what: str, where: str, attempt: Callable[[int], T]) -> T:
        """Call `attempt(number)`, from 0, until it raises no TransientError, and return its result.

        Pause between attempts. When the policy is exhausted, raise the last error's `final`, else UnavailableError
        naming the operation `what` and the store `where`, both in words. The whole time is registered as one wait,
        whose reason has the last error. It blocks.
        """
        began = time.monotonic()
        number, failing_since = 0, math.inf
        reason = f"object store {where}: {what}"
        deadline_s = self.deadline_s + ATTEMPT_S
        with waits.waiting(reason, waits_on="object store", deadline_s=deadline_s, quiet_s=QUIET_S) as wait:
            while True:
                try:
                    result = attempt(number)
                except TransientError as error:
                    last = error
                else:
                    if number:
                        logger.info("object store answers again: %s", what)
                    return result
                number += 1
                # The deadline counts from the first failure: a slow attempt that succeeds uses none of it.
                failing_since = min(failing_since, time.monotonic())
                if number == 1:
                    logger.warning("object store fails, retrying: %s at %s: %s", what, where, last)
                delay_s = _BACKOFF.after(number)
                if number >= self.max_attempts or time.monotonic() - failing_since + delay_s > self.deadline_s:
                    break
                tried = f"{reason}, attempt {number + 1} of at most {self.max_attempts} after {last}"
                wait.update(reason=tried, refusal=waits.Refusal.of(last.final))
                time.sleep(delay_s)
        if last.final is not None:
            # A refusal (disk full, no right) is named as it is, and not as an outage.
            raise last.final from last
        raise UnavailableError(
            f"the object store {where} failed {number} times in {time.monotonic() - began:.1f} s ({what}): {last}",
            reason="STORE_FAILING" if last.is_answer else "STORE_UNREACHABLE",
            remedy="see its log, it answers with an error each time; or correct MILLRACE_STORE_URL"
            if last.is_answer
            else "check that it runs and that MILLRACE_STORE_URL names its endpoint and bucket",
            metadata={"store": where, "operation": what},
        ) from last
