"""Remembers a Ctrl-C that comes while the modules of a command are imported. This one imports next to nothing."""

import signal
import threading
from types import FrameType

remembered: list[signal.Signals] = []


def listen_early() -> None:
    """Remember Ctrl-C during imports from now on, in addition to raising it.

    Python swallows a KeyboardInterrupt that meets a callback of its own (of a weak reference, of an import lock): it
    prints "Exception ignored in …", and the command would go on as if nobody had asked it to end.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _note_early)


def _note_early(number: int, frame: FrameType | None) -> None:
    remembered.append(signal.Signals(number))
    raise KeyboardInterrupt
