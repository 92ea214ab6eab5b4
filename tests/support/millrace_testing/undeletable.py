"""Files that cannot be deleted."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def undeletable(path: Path) -> Iterator[None]:
    """Keep a file, or the files in a directory, from being deleted while the block lasts; who may not skips the test.

    A user who is not root is kept from it by the directory's rights, root by the attribute of immutable files.
    """
    if os.geteuid() != 0:
        directory = path if path.is_dir() else path.parent
        mode = directory.stat().st_mode
        directory.chmod(0o555)
        try:
            yield
        finally:
            directory.chmod(mode)
        return
    if subprocess.run(["chattr", "-R", "+i", str(path)], capture_output=True, check=False).returncode:
        pytest.skip("this filesystem has no immutable files, and root may delete all others")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-R", "-i", str(path)], capture_output=True, check=False)
