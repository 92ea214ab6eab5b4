"""Which orchestrator a command talks to, and what to say when nobody is there."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from millrace.cli.options import DEFAULT_LISTEN
from millrace.cli.stacks import OUTPUTS, RunningStack, choose_stack, read_stack, running_stacks
from millrace.errors import InvalidSpecError, UnauthenticatedError, UnavailableError, Violation
from millrace.rpc.reach import is_wildcard, own_host
from millrace.telemetry.settings import Settings, parse_address

CONNECT_TIMEOUT_S = 1.0
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine in an address."""
START_REMEDY = "start a stack with `millrace up`, or name another server with --server or MILLRACE_SERVER"
WAIT_REMEDY = "; or wait: a stack restarts what died"
SILENT_REMEDY = "it listens but does not answer; a stack kills and restarts what is silent for 30 s; try again"


def check_address(text: str, *, option: str) -> str:
    """The address; InvalidSpecError naming the option if it is no host:port."""
    try:
        parse_address(text)
    except ValueError as error:
        violation = Violation(field=option, value=text, message=str(error), source="command line")
        raise InvalidSpecError([violation]) from None
    return text


def server_address(
    option: str | None, *, run: str = "", environ: Mapping[str, str] = os.environ, root: Path = OUTPUTS
) -> tuple[str, str]:
    """host:port and where it comes from: the option, MILLRACE_SERVER, a stack here, or the default of `millrace up`.

    CliError if several stacks run here and neither of them is that of `run` alone.
    """
    if option:
        return check_address(option, option="--server"), "--server"
    settings = Settings.from_env(environ)
    if settings.server:
        return settings.server, "MILLRACE_SERVER"
    stack = choose_stack(run, root=root)
    return (DEFAULT_LISTEN, "the default") if stack is None else (stack.address, f"{stack.directory}/stack.json")


@contextlib.contextmanager
def explain_unreachable(origin: str, address: str, *, directory: Path | None = None, token: str = "") -> Iterator[None]:
    """Say where the address came from and what to do, when none answers at it, or the one there refuses the token."""
    try:
        yield
    except UnavailableError as error:
        if error.reason not in ("UNREACHABLE", "DEADLINE_EXCEEDED"):
            raise
        if is_listening(address):
            remedy = SILENT_REMEDY
        elif error.reason == "DEADLINE_EXCEEDED":
            raise
        else:
            remedy = START_REMEDY + (WAIT_REMEDY if stack_at(address, directory) else "")
        message = f"{error.message} (the address is from {origin})"
        raise UnavailableError(message, reason=error.reason, remedy=remedy) from error
    except UnauthenticatedError as error:
        message = f"{error.message} by {address} (the address is from {origin}){token and f'; {token}'}"
        raise UnauthenticatedError(
            message, reason=error.reason, remedy=error.remedy, metadata=error.metadata
        ) from error


def is_listening(address: str) -> bool:
    """Whether the port takes connections; a frozen process's does, because the kernel answers for it."""
    host, port = parse_address(address)
    try:
        with socket.create_connection((own_host(host), port), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def stack_at(address: str, directory: Path | None = None) -> RunningStack | None:
    """Return the stack of the directory, or else of one below `outputs`, that listens at this address."""
    found = running_stacks() if directory is None else [read_stack(directory)]
    return next((stack for stack in found if stack and _place(stack.address) == _place(address)), None)


def _place(address: str) -> tuple[str, int] | None:
    """Host and port, with one name for all those that mean this machine."""
    try:
        host, port = parse_address(address)
    except ValueError:
        return None
    return ("127.0.0.1" if host in LOOPBACK or is_wildcard(host) else host), port
