"""Which orchestrator a command talks to, and what to say when nobody is there."""

import contextlib
import os
from collections.abc import Iterator, Mapping

from millrace.cli.defaults import DEFAULT_LISTEN
from millrace.errors import InvalidSpecError, UnavailableError, Violation
from millrace.telemetry.settings import Settings, parse_address


def check_address(text: str, *, option: str) -> str:
    """The address; InvalidSpecError naming the option if it is no host:port."""
    try:
        parse_address(text)
    except ValueError as error:
        violation = Violation(field=option, value=text, message=str(error), source="command line")
        raise InvalidSpecError([violation]) from None
    return text


def server_address(option: str | None, *, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """host:port and where it comes from: the option, MILLRACE_SERVER, or the default of `millrace up`."""
    if option:
        return check_address(option, option="--server"), "--server"
    settings = Settings.from_env(environ)
    return (settings.server, "MILLRACE_SERVER") if settings.server else (DEFAULT_LISTEN, "the default")


@contextlib.contextmanager
def explain_unreachable(origin: str) -> Iterator[None]:
    """Say where the address came from and how to start a server, when none answers at it."""
    try:
        yield
    except UnavailableError as error:
        if error.reason != "UNREACHABLE":
            raise
        raise UnavailableError(
            f"{error.message} (the address is from {origin})",
            reason=error.reason,
            remedy="start a stack with `millrace up`, or name another server with --server or MILLRACE_SERVER",
        ) from error
