"""Which orchestrator a command talks to, and what to say when nobody is there."""

import contextlib
import os
from collections.abc import Iterator, Mapping

from millrace.cli.commands.up import DEFAULT_LISTEN
from millrace.errors import UnavailableError
from millrace.telemetry.settings import Settings


def server_address(option: str | None, *, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """host:port and where it comes from: the option, MILLRACE_SERVER, or the default of `millrace up`."""
    if option:
        return Settings.from_env({**environ, "MILLRACE_SERVER": option}).require("server"), "--server"
    settings = Settings.from_env(environ)
    return (settings.server, "MILLRACE_SERVER") if settings.server else (DEFAULT_LISTEN, "the default")


@contextlib.contextmanager
def explain_unreachable(address: str, origin: str) -> Iterator[None]:
    """Name the address, where it came from, and how to start a server, when none answers."""
    try:
        yield
    except UnavailableError as error:
        raise UnavailableError(
            f"the orchestrator at {address} (from {origin}) does not answer: {error.message}",
            reason=error.reason,
            remedy="start one with `millrace up`, or name another with --server or MILLRACE_SERVER",
        ) from error
