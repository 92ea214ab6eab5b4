"""A Ctrl-C that Python swallows still ends the command."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millrace.cli import early_interrupts, interrupts
from millrace.cli.errors import Interrupted


def test_a_swallowed_interrupt_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threading.current_thread() is threading.main_thread()
    remembered: list[signal.Signals] = []
    for module in (early_interrupts, interrupts):
        monkeypatch.setattr(module, "remembered", remembered)
    before = signal.getsignal(signal.SIGINT)

    async def work(_: interrupts.Interrupts) -> None:
        pytest.fail("the command went on")

    try:
        early_interrupts.listen_early()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            interrupts.run(work)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.computes
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


@pytest.mark.computes
def test_the_command_listens_before_its_imports(tmp_path: Path) -> None:
    """What Python swallows while the command's own modules are imported ends it, too."""
    code = (
        "import builtins, os, runpy, signal, sys\n"
        "original = builtins.__import__\n"
        "def swallowed(name, *rest, **more):\n"
        "    if name == 'click':\n"
        "        builtins.__import__ = original\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        except KeyboardInterrupt:\n"
        "            pass\n"
        "    return original(name, *rest, **more)\n"
        "builtins.__import__ = swallowed\n"
        "sys.argv = ['millrace', 'up', '--dir', 'outputs']\n"
        "runpy.run_module('millrace.cli', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.computes
@pytest.mark.parametrize("where", ["finalizer", "weak reference", "collector"])
def test_one_that_a_callback_swallows_ends_a_command_without_an_event_loop(where: str) -> None:
    code = (
        "import gc, os, signal, sys, time, weakref\n"
        "from millrace.cli import main\n"
        "class Held:\n"
        "    pass\n"
        "class Last(Held):\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "def work(*_, **__):\n"
        f"    where = {where!r}\n"
        "    held = Last() if where == 'finalizer' else Held()\n"
        "    if where == 'weak reference':\n"
        "        held.reference = kept = weakref.ref(held, lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "    if where == 'collector':\n"
        "        gc.callbacks.append(lambda *_: gc.callbacks.clear() or os.kill(os.getpid(), signal.SIGINT))\n"
        "        gc.collect()\n"
        "    del held\n"
        "    os.write(1, b'the command goes on\\n')\n"  # at once: the interrupt may come between a print's two writes
        "    time.sleep(60)\n"
        "main.cli.main = work\n"
        "sys.exit(main.main(['audit']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "the command goes on\n", done.stderr
    assert done.returncode == 130 and "Traceback" not in done.stderr


def test_other_errors_that_python_swallows_are_printed_as_ever() -> None:
    code = (
        "from millrace.cli.early_interrupts import listen_early\n"
        "class Odd:\n"
        "    def __del__(self):\n"
        "        raise ValueError('odd')\n"
        "listen_early()\n"
        "Odd()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "Exception ignored in" in done.stderr and "ValueError: odd" in done.stderr
