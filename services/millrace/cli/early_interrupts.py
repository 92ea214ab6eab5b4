"""Remembers a Ctrl-C that comes while a command's modules are being imported.

This module must load fast, so it imports very little.
"""

import os
import signal
import sys
import threading
from types import FrameType

remembered: list[signal.Signals] = []
"""The signals that came before a command's event loop took them over, and those that it does not take over."""
_AGAIN_S = 0.05  # the callback that swallowed it has returned by then; if it has not, this one is swallowed as well


def listen_early() -> None:
    """Install a SIGINT handler that remembers the signal and raises KeyboardInterrupt.

    Python swallows a KeyboardInterrupt inside some callbacks (weak references, import locks): it prints "Exception
    ignored in …", and the command would go on.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _note_early)
        sys.unraisablehook = _raise_again


def _note_early(number: int, frame: FrameType | None) -> None:
    """Remember the signal and raise KeyboardInterrupt."""
    remembered.append(signal.Signals(number))
    raise KeyboardInterrupt


def _raise_again(swallowed: "sys.UnraisableHookArgs") -> None:
    """Interrupt the main thread once more, soon, if what was swallowed is an interrupt; print every other error."""
    if not issubclass(swallowed.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(swallowed)
        return
    # By a signal of its own, which a blocking call of the main thread notices, too.
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()
