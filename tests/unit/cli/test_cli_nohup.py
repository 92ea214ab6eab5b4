"""What is started by `nohup` outlives the terminal."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.computes

CODE = """
import asyncio, os, signal
from millrace.cli import interrupts

async def work(_):
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.2)
    return 0

raise SystemExit(interrupts.run(work))
"""


def run(preexec) -> int:
    return subprocess.run([sys.executable, "-c", CODE], preexec_fn=preexec, timeout=60, capture_output=True).returncode


def test_an_ignored_hangup_stays_ignored() -> None:
    assert run(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) == 0


def test_a_hangup_that_nobody_ignores_ends_the_command() -> None:
    assert run(lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)) != 0
