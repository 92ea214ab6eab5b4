"""Arguments and options that several commands have; importing them must cost nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

RUN = click.argument("name", metavar="RUN")
FORMAT = click.option(
    "-o", "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True
)


# Defaults that help texts show; apart, because importing them must cost nothing.

DEFAULT_LISTEN = "127.0.0.1:50051"
"""Where `millrace up` listens, and where commands look for an orchestrator, unless told otherwise."""
DEFAULT_DIRECTORY = Path("outputs/local")
"""Where `millrace up` works, and where commands look for its stack and its store."""


SERVER = click.option(
    "--server",
    metavar="ADDR",
    help=f"host:port of the orchestrator; else MILLRACE_SERVER, the stack that runs here, {DEFAULT_LISTEN}.",
)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """The decorators as one, in the order of a help text."""

    def decorate(function: F) -> F:
        for each in reversed(decorators):
            function = each(function)
        return function

    return decorate


SERVER_OR_STORE = options(
    click.option(
        "--server",
        metavar="ADDR",
        help=f"Ask this orchestrator; else MILLRACE_SERVER, the stack here, {DEFAULT_LISTEN}.",
    ),
    click.option("--store", metavar="URL", help="Read this object store, and ask no server."),
    click.option("--prefix", metavar="NAME", help="With a store: its deployment; else MILLRACE_PREFIX, else millrace."),
)
STORE = options(
    click.option(
        "--store",
        metavar="URL",
        help="Its object store; else outputs/RUN/store, MILLRACE_STORE_URL, …",
    ),
    click.option("--prefix", metavar="NAME", help="Deployment of the run; else MILLRACE_PREFIX, else millrace."),
)
