"""A vLLM server process in the launcher: start, messages, output, death, and the end of all its processes.

The server leads a session and process group of its own, which its engine cores and workers share. The group is killed
when the server has ended, for whatever reason; and the kernel kills the server when the launcher dies
(`vllm/server/lineage.py`), and engine cores when the server dies. So none of them outlives the others.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

from millrace.errors import InternalError, InvalidSpecError, Violation
from millrace.inference.vllm.handover import FD_VARIABLE, PARENT_VARIABLE
from millrace.processes import sessions
from millrace.processes.channel import Channel
from millrace.processes.table import members
from millrace.race import first_of
from millrace.telemetry import waits
from millrace.telemetry.logging import redact

HOST_MODULE = "millrace.inference.vllm.server.host"
CHECK_DEADLINE_S = 300.0
"""Limit for vLLM's imports, which take 8 s on a quiet machine and 70 s on a busy one."""
KILL_WAIT_S = 5.0
_TAIL_LINES = 40
_SHOWN_LINES = 12
_CHUNK = 64 * 1024
_POLL_S = 0.05
_CAUSE = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:ERROR .*?\] )?([A-Za-z_.]*(?:Error|Exception): \S.*)")
"""The last line of a traceback, as it is or as vLLM's logger prints it."""
_ECHOES = ("Engine core initialization failed", "KeyboardInterrupt: terminated")


class VllmProcess:
    """A started server. `exited` ends with its return code; its messages arrive in `messages`."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel) -> None:
        """Take a started process and the channel to it, and begin to copy its output and to collect its messages."""
        self._process = process
        self._channel = channel
        self._begun = time.monotonic()
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._causes: dict[str, None] = {}
        self._stage = ""
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.exited: asyncio.Task[int] = asyncio.create_task(process.wait(), name="exit of vLLM")
        self._output = asyncio.create_task(self._copy_output(), name="output of vLLM")
        channel.listen(self.messages.put_nowait, lambda why: None)  # its end is for `exited` to say

    @classmethod
    async def start(cls, environ: Mapping[str, str], *, python: str = sys.executable) -> Self:
        """Start vLLM's server in the interpreter `python`, with these variables; it imports vLLM and waits for
        messages.

        Must be called on the main thread.
        """
        with Channel.to_child() as (ours, theirs):
            process = await sessions.start(
                [python, "-m", HOST_MODULE],
                env={**environ, FD_VARIABLE: str(theirs), PARENT_VARIABLE: str(os.getpid())},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
            )
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Return the process id of vLLM's API server, which is also the id of the group of all its processes."""
        return self._process.pid

    @property
    def last_line(self) -> str:
        """Return the newest line that the server wrote."""
        return self._lines[-1] if self._lines else "(no output yet)"

    @property
    def stage(self) -> str:
        """Return the stage of vLLM's start, such as "compiling"; the newest line of its output if that is unknown."""
        return self._stage or redact(self.last_line)[:160]

    async def check(self, flags: Mapping[str, Any]) -> None:
        """Send the flags to the server and wait until vLLM's parser has checked them.

        Raises one InvalidSpecError with all that it refuses, and InternalError if the server dies or does not answer.
        """
        self.send({"flags": dict(flags)})
        with waits.waiting("vLLM to be imported", waits_on="inference", deadline_s=CHECK_DEADLINE_S):
            answer = await self.hear(deadline_s=CHECK_DEADLINE_S, purpose="check its flags")
        if problems := answer["violations"]:
            violations = [Violation(**problem, source="flags of vLLM") for problem in problems]
            raise InvalidSpecError(violations, reason="VLLM_FLAGS_INVALID", remedy="see `vllm serve --help=all`")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send the server a message; do nothing if it is gone, which `exited` reports."""
        with contextlib.suppress(OSError):
            self._channel.send(message)

    async def hear(self, *, deadline_s: float, purpose: str) -> dict[str, Any]:
        """Wait for the server's next message and return it.

        Raises InternalError if the server dies or sends none within `deadline_s`. `purpose` completes the error's text
        "vLLM did not ...".
        """
        message, exited = await first_of(self.messages.get(), self.exited, timeout_s=deadline_s)
        if message is not None:
            return message.result()
        if exited is not None:
            raise await self.death()
        raise InternalError(
            f"vLLM did not {purpose} within {deadline_s:g} s. Its last lines:\n{self._shown()}",
            reason="VLLM_START_TIMEOUT",
            remedy="give it longer with MILLRACE_VLLM_START_S, if its last lines show progress",
        )

    async def death(self) -> InternalError:
        """Wait for the server's exit and return, not raise, an InternalError with how it ended and its last output."""
        code = await self.exited
        # The pipe ends only when every process of the group has closed it, so that the wait for the rest is bounded.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_WAIT_S):
                await asyncio.wait({self._output})
        how = sessions.describe_exit(code)
        causes = "".join(f"\n  cause: {line}" for line in self._causes if code > 0)
        return InternalError(
            f"vLLM died: {how}, {time.monotonic() - self._begun:.1f} s after its start.{causes}\n"
            f"The last lines of its output:\n{self._shown()}",
            reason="VLLM_DIED",
            remedy="read its output above",
            metadata={"how": how},
        )

    def ask_to_end(self) -> None:
        """Send SIGTERM to vLLM's API server, which drains and ends its engine cores; do not wait."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def end(self) -> None:
        """Kill all of the server's processes that are left, and wait until they are gone, at most KILL_WAIT_S."""
        sessions.kill_group(self.pid)
        await self.exited
        ends = time.monotonic() + KILL_WAIT_S
        group = {self.pid: 0}  # whose leader is gone
        # unregistered wait: after a SIGKILL, for at most KILL_WAIT_S
        while members(group) and time.monotonic() < ends:  # noqa: ASYNC110 - other processes have no event
            await asyncio.sleep(_POLL_S)
        self._output.cancel()
        await asyncio.gather(self._output, return_exceptions=True)
        self._channel.close()

    def _shown(self) -> str:
        """Return the server's last lines of output, for a message."""
        lines = list(self._lines)[-_SHOWN_LINES:]
        return "\n".join(f"  | {line}" for line in lines) or "  | (it wrote nothing)"

    async def _copy_output(self) -> None:
        """Copy the server's output to this process's, and keep its last lines, stage and errors."""
        stream = self._process.stdout
        if stream is None:
            raise RuntimeError("vLLM was started without a pipe")
        rest = ""
        while chunk := await stream.read(_CHUNK):
            text = chunk.decode(errors="replace")
            sys.stdout.write(text)
            sys.stdout.flush()
            *whole, rest = (rest + text).split("\n")
            for line in whole:
                self._note(line.rstrip())
            # A line without an end, such as a progress bar, must not grow without bound.
            rest = rest[-_CHUNK:]
            self._stage = stage_of(rest) or self._stage  # a bar is redrawn in one line that does not end
        self._note(rest.rstrip())

    def _note(self, line: str) -> None:
        """Keep a line of output, and the stage or the error that it reports."""
        if not line:
            return
        self._lines.append(line)
        self._stage = stage_of(line) or self._stage
        match = _CAUSE.search(line)
        if match and len(self._causes) < 3 and not any(echo in line for echo in _ECHOES):
            self._causes.setdefault(match[1][:300])


# Stages of vLLM's start, read from its output: weights, compilation and CUDA graphs take minutes.

_STAGES = (
    (re.compile(r"Loading \S* ?checkpoint shards: .*?(\d+)/(\d+)"), "loading weights, {} of {} files"),
    (re.compile(r"[Cc]apturing CUDA graphs?.*?\b(\d+)/(\d+)"), "capturing CUDA graphs, {} of {}"),
    (re.compile(r"Starting to load model|Loading weights|Loading model weights"), "loading weights"),
    (re.compile(r"torch\.compile|Dynamo bytecode|[Cc]ompiling a graph|Compiling .* kernels"), "compiling"),
    (re.compile(r"[Cc]apturing CUDA graph"), "capturing CUDA graphs"),
    (re.compile(r"KV cache|[Mm]emory profiling"), "measuring memory for the KV cache"),
)


def stage_of(line: str) -> str:
    """Return the stage of vLLM's start that a line of output reports, as text; "" if it reports none.

    Of a progress bar's line the last state counts.
    """
    shown = line.rstrip("\r").rpartition("\r")[2]
    for pattern, words in _STAGES:
        if match := pattern.search(shown):
            return words.format(*match.groups())
    return ""
