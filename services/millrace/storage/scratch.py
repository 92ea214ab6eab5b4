"""The directory of a replica's policy, which its launcher owns: removed when vLLM is gone, however it went.

A launcher that is killed cannot remove its own. Therefore an owner holds a lock on a file in it for as long as it
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

log = logging.getLogger(__name__)

PARENT_VARIABLE = "MILLRACE_POLICY_DIR"
POLICY, NODE = "millrace-policy-", "millrace-node-"
"""How the directories of a head and of another node begin."""
_FRESH = ".millrace-fresh-"
_LOCK = "owner.lock"


@contextlib.contextmanager
def owned_directory(prefix: str) -> Iterator[Path]:
    """A new directory in MILLRACE_POLICY_DIR, or where temporary files go; gone with everything in it at the end.

    Those of dead owners are removed first: each is as large as a policy.
    """
    parent = Path(os.environ.get(PARENT_VARIABLE) or tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    for name in (POLICY, NODE):
        _sweep(parent, name)
    fresh = Path(tempfile.mkdtemp(prefix=_FRESH, dir=parent))
    with (fresh / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under its name only once it is locked: a directory that others see without an owner is one to be removed.
        directory = fresh.rename(parent / f"{prefix}{fresh.name.removeprefix(_FRESH)}")
        try:
            yield directory
        finally:
            _remove(directory)


def _sweep(parent: Path, prefix: str) -> None:
    """Removes directories whose owners are dead; one without a lock was not made here."""
    for path in parent.glob(f"{prefix}*/{_LOCK}"):
        with contextlib.suppress(OSError), path.open("r+") as lock:  # or somebody else owns it, or removed it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("removing the directory of a replica that is gone", extra={"directory": str(path.parent)})
            _remove(path.parent)


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("a policy's directory stays", extra={"directory": str(directory), "error": str(error)})
