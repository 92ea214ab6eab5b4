"""An agent that is a program, run with the variables by which it finds the policy; and why such a program failed."""

import asyncio
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace.env_server.agents.sessions import AgentAddress, program_environ
from millrace.processes.sessions import describe_exit, kill_group, start

_MAX_OUTPUT_BYTES = 1 << 20
_FRAME = re.compile(r'^[ |]*File "[^"]+", line \d+')
_EXIT = re.compile(
    r"\A(?P<what>[^\n]*? exited -?\d+|[^\n]*?\(exit -?\d+\)|[^\n]*? to interception failed): (?P<output>.+)\Z", re.S
)
_TRACEBACK = re.compile(r"\A(?P<what>.*?)(?P<output>Traceback \(most recent call last\).+)\Z", re.S)
_CAUSE_CHARS, _SHOWN_CHARS = 400, 1200


class AgentFailedError(Exception):
    """The agent's program ended with another status than 0."""

    def __init__(self, message: str, *, output: str = "") -> None:
        """Make the error; `output` is what the program wrote to its standard streams."""
        super().__init__(message)
        self.output = output


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutput:
    """What a program wrote."""

    stdout: str
    stderr: str


async def run_program(
    argv: Sequence[str],
    address: AgentAddress,
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> ProgramOutput:
    """Run an agent's program to its end and return its output, at most the last MiB of each stream.

    `argv` is the command line, `stdin` the text that the program reads, and `cwd` its directory, None for this
    process's. The program gets this worker's variables without Millrace's own, those of `address`, by which it finds
    the policy, and `env`. Its process group is killed when it ends, and when this is cancelled. Raises
    AgentFailedError, with the cause first, if its exit status is not 0, and OSError if it cannot be started.
    """
    process = await start(
        argv,
        env={**program_environ(address), **(env or {})},
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        stdout, stderr, _, _ = await asyncio.gather(
            _tail(process.stdout), _tail(process.stderr), _feed(process.stdin, stdin), process.wait()
        )
    finally:
        # The program's children may outlive it, and would go on asking the policy.
        kill_group(process.pid)
    ran = ProgramOutput(stdout=stdout.decode("utf-8", "replace"), stderr=stderr.decode("utf-8", "replace"))
    if process.returncode:
        output = (ran.stderr or ran.stdout).strip()
        shown = f": {cause_of(output)}\n{output[-_SHOWN_CHARS:]}" if output else ", and printed nothing"
        how = f"{Path(argv[0]).name} ended with {describe_exit(process.returncode)}"
        raise AgentFailedError(how + shown, output=output)
    return ran


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    """Read a stream to its end, and return its last `_MAX_OUTPUT_BYTES`; b"" for None."""
    kept = b""
    while stream is not None and (part := await stream.read(1 << 16)):
        kept = (kept + part)[-_MAX_OUTPUT_BYTES:]
    return kept


async def _feed(stream: asyncio.StreamWriter | None, text: str) -> None:
    """Write the text to a program's standard input and close it; a program that has ended is no error."""
    if stream is None:
        return
    try:
        stream.write(text.encode())
        await stream.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it has ended, or reads nothing
    finally:
        stream.close()


def cause_of(text: str) -> str:
    """Return the line of a failed program's output that names the error, at most `_CAUSE_CHARS` of it; "" without
    output.

    That line is the one after the last frame of a traceback, or without a traceback the last line with text.
    """
    lines = [line.rstrip() for line in text.splitlines() if any(char.isalnum() for char in line)]
    frames = [at for at, line in enumerate(lines) if _FRAME.match(line)]
    if frames:
        for line in lines[frames[-1] + 1 :]:
            if not line.lstrip("| ").startswith(("^", "~")) and not line.lstrip("|").startswith("  "):
                return line.lstrip("| ")[:_CAUSE_CHARS]
    return lines[-1].strip()[:_CAUSE_CHARS] if lines else ""


def cause_first(message: str) -> str:
    """Return a message about a program that failed with the cause moved before the program's output.

    Messages are cut at their ends, and a traceback ends with the cause. A message of another form, or of one line, is
    returned unchanged.
    """
    found = _EXIT.match(message) or _TRACEBACK.match(message)
    if found is None or "\n" not in found["output"]:
        return message
    return ": ".join(filter(None, (found["what"].strip(" :\n"), cause_of(found["output"])))) + f"\n{found['output']}"
