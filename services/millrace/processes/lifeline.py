"""How a process of a one-machine stack notices that supervisor and reaper are gone, and ends.

The supervisor and its reaper hold the write end of a pipe whose read end every service inherits.
When both are gone, killed at the same moment, the pipe ends: the service then starts a reaper for itself, which asks it
to end, and after a grace kills it and all that it has started, also what does not listen.

A service also inherits the open file whose lock says that its directory is in use, so that the lock lasts as long as
anything of the stack does. Both are numbers of files in variables, which go no further than the service itself.
"""

import logging
import os
import stat
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import NoReturn

from millrace.errors import InvalidSpecError, MillraceError
from millrace.processes.table import PROCESS_MARK, start_ticks

PIPE, LOCK = "MILLRACE_STACK_PIPE", "MILLRACE_STACK_LOCK"

logger = logging.getLogger(__name__)


def hold(environ: MutableMapping[str, str] = os.environ) -> None:
    """Start a thread that ends this process, with what it has started, once the supervisor and its reaper are gone.

    The pipe by which that is noticed is named by a variable; without it (no stack) nothing is done. Removes the
    variables of pipe and lock from `environ`. Call it before slow imports.
    """
    pipe, lock = _pop_file(environ, PIPE), _pop_file(environ, LOCK)
    if lock is not None:
        os.set_inheritable(lock, False)
    # A parent that did not hand the pipe on may have opened something else under its number.
    if pipe is None or not stat.S_ISFIFO(os.fstat(pipe).st_mode):
        return
    os.set_inheritable(pipe, False)
    mark = environ.get(PROCESS_MARK, "")
    threading.Thread(target=_watch, args=(pipe, mark), name="lifeline", daemon=True).start()


def _pop_file(environ: MutableMapping[str, str], name: str) -> int | None:
    """Remove the variable `name`, and return the file number in it.

    None if it names no file that is open in this process.
    """
    text = environ.pop(name, "")
    if not text.isdecimal():
        return None
    try:
        os.fstat(int(text))
    except OSError:  # of a parent that did not hand it on, such as a shell in between
        return None
    return int(text)


def _watch(pipe: int, mark: str) -> None:
    """Wait until the pipe ends, without limit, then start a reaper that ends this process and what it has started.

    `mark` is the value of `PROCESS_MARK` that descendants of this process have in their environment.
    """
    # Nobody writes to the pipe: the read returns when its last writer is gone.
    os.read(pipe, 1)
    logger.error("the stack's supervisor and its reaper are gone: this process ends")
    # A process of its own, because it has to outlive this one to end what this one has started.
    reaper = subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).with_name("reaper.py")), mark, PROCESS_MARK],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={},
        text=True,
    )
    # Which process to ask first; the end of the file tells the reaper to begin.
    reaper.communicate(f"add {os.getpid()} {start_ticks(os.getpid())}\n")


# How every service is run from its `main`: it holds its lifeline, and says in words what ended it.


def run_service(run: Callable[[], int | None], *, before: Callable[[], object] | None = None) -> NoReturn:
    """Call `before`, start the thread that ends this process with its stack (`hold`), call `run`, exit with its code.

    None is code 0; after an error the code is the error's, 1 for one that is not Millrace's, 130 for Ctrl-C. A
    MillraceError is printed with its remedy, any other error with its traceback. `before` may replace this process by
    another program, which needs the pipe of `hold` itself.
    """
    try:
        if before is not None:
            before()
        hold()
        code = run() or 0
    except MillraceError as error:
        report(error)
        code = error.exit_code
    except Exception as error:  # noqa: BLE001 - the process edge: the last line says in words what the traceback means
        traceback.print_exc()
        print(f"Error: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def report(error: MillraceError) -> None:
    """Print an error to stderr as the `millrace` command does: every violation or the message, then the remedy."""
    violations = error.violations if isinstance(error, InvalidSpecError) else ()
    if len(violations) > 1:
        print(f"Error: {len(violations)} things are wrong:", file=sys.stderr)
        for violation in violations:
            print(f"  - {violation}", file=sys.stderr)
    else:
        print(f"Error: {violations[0] if violations else error.message}", file=sys.stderr)
    if error.remedy:
        print(f"  remedy: {error.remedy}", file=sys.stderr)
