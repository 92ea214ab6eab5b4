"""On the path of every process of a stack: samples what each spends its CPU time on, see `rollout_cost.py --profile`.

A timer of CPU time interrupts a process every 5 ms, and notes for each thread that does not wait the function it is in
and the innermost one of ours around it. It begins anew in forked processes, begins with the variable that names the
directory, and writes there every second of CPU time.
"""

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY_S = 0.005
WRITE_EVERY = 200
DIRECTORY = Path(__file__).resolve().parent / "samples"
# In these a thread waits, or runs the event loop that waits.
IDLE = {"select", "poll", "wait", "_wait_for_tstate_lock", "get", "accept", "_run_once", "run_forever", "_worker"}
# Threads that block in one call of ours or of the interpreter: a pipe, a socket, the end of a process, foreign code.
IDLE |= {"_watch", "answer", "_do_waitpid", "run"}

found: "Counter[str]" = Counter()


def name_of(frame: FrameType) -> str:
    """`package.module:function`, from the file's path: looking up modules here could import."""
    path = Path(frame.f_code.co_filename)
    parts = path.with_suffix("").parts
    return f"{'.'.join(parts[-3:])}:{frame.f_code.co_qualname}"


def is_ours(frame: FrameType) -> bool:
    """Whether it is code of Millrace."""
    return "/millrace/" in frame.f_code.co_filename


def sample(number: int, interrupted: "FrameType | None") -> None:
    """Note where every thread is."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        if at is not None and at.f_code is sample.__code__:
            at = interrupted
        if at is None or at.f_code.co_name in IDLE:
            continue
        leaf = name_of(at)
        ours: FrameType | None = at
        while ours is not None and not is_ours(ours):
            ours = ours.f_back
        found[f"{name_of(ours) if ours is not None else '(no code of ours)'} | {leaf}"] += 1
    found["samples"] += 1
    if found["samples"] % WRITE_EVERY == 0:
        write()


def write() -> None:
    """Write what was found so far, where this process may."""
    try:
        (DIRECTORY / f"{os.getpid()}.json").write_text(json.dumps({"argv": sys.orig_argv, "found": found}))
    except OSError:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def begin() -> None:
    """Sample this process."""
    found.clear()
    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)


if DIRECTORY.is_dir():
    begin()
    os.register_at_fork(after_in_child=begin)
