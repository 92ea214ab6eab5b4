"""A Ctrl-C that Python swallows during imports still ends the command."""

import os
import signal
import threading

import pytest

from millrace.cli import interrupts
from millrace.cli.errors import Interrupted


def test_a_swallowed_interrupt_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threading.current_thread() is threading.main_thread()
    monkeypatch.setattr(interrupts, "remembered", [])
    before = signal.getsignal(signal.SIGINT)

    async def work(_: interrupts.Interrupts) -> None:
        pytest.fail("the command went on")

    try:
        interrupts.listen_early()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            interrupts.run(work)
    finally:
        signal.signal(signal.SIGINT, before)
