"""Calls of the C library, with errors that say what was tried."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any


def libc(function: str, *args: Any) -> int:
    """Call it. Raises OSError if it returns something negative."""
    result = getattr(ctypes.CDLL(None, use_errno=True), function)(*args)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    libc("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


@contextlib.contextmanager
def named(step: str) -> Iterator[None]:
    """Say in the error what could not be done."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot {step}: {error.strerror}") from error
