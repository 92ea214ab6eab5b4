"""A Ctrl-C that Python swallows during imports still ends the command."""

import os
import signal
import subprocess
import sys
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


def test_an_import_that_an_interrupt_broke_off_is_an_interrupt() -> None:
    """Libraries turn a KeyboardInterrupt during their import into errors of their own."""
    code = (
        "import os, signal, sys\n"
        "from millrace.cli import main\n"
        "def broken(*_, **__):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        raise ImportError('a half-made module') from None\n"
        "main.cli.main = broken\n"
        "sys.exit(main.main(['rl']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130 and "half-made" not in done.stderr
