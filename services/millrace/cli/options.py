"""Arguments and options that several commands have, and names of runs. Importing this module loads nothing large."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from millrace.errors import NotFoundError
from millrace.runlog import names

if TYPE_CHECKING:
    from millrace.client import RunsClient
    from millrace.v1 import run_pb2

F = TypeVar("F", bound=Callable[..., Any])

RUN = click.argument("name", metavar="RUN")
FORMAT = click.option(
    "-o", "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True
)


# Defaults that help texts show; apart, because importing them must cost nothing.

DEFAULT_LISTEN = "127.0.0.1:50051"
"""Address of `millrace up`, and the default address of an orchestrator."""
DEFAULT_DIRECTORY = Path("outputs/local")
"""Directory of `millrace up`, where commands look for its stack and its store."""


SERVER = click.option(
    "--server",
    metavar="ADDR",
    help=f"host:port of the orchestrator; else MILLRACE_SERVER, the stack that runs here, {DEFAULT_LISTEN}.",
)


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Combine click decorators into one; the first is the first in the help text."""

    def decorate(function: F) -> F:
        """Apply the decorators, the last one first, as Python does."""
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


# Names of runs as people type them: `runs/x`, `x`, a unique beginning, a uid, or `-` for the most recent run.


async def resolve(runs: "RunsClient", text: str) -> "run_pb2.Run":
    """Return the run that `text` refers to, asked of a server.

    Raises NotFoundError with a suggestion, InvalidSpecError if several names begin with `text`.
    """
    if text == "-":
        return choose(text, await runs.list(limit=1))
    try:
        return await runs.get(f"runs/{text.removeprefix('runs/')}")
    except NotFoundError:
        return choose(text, await runs.list())


def choose(text: str, known: "Sequence[run_pb2.Run]") -> "run_pb2.Run":
    """Return the run among `known` that `text` refers to: a name, its unique beginning, a uid, or `-` for the newest.

    Where all are of one tenant, the tenant in front of the name may be left out. Raises NotFoundError with a
    suggestion, InvalidSpecError if several names begin with `text`.
    """
    tenants = {run.tenant for run in known}
    tenant = tenants.pop() if len(tenants) == 1 else ""
    by_name = {names.within(tenant, run.name.removeprefix("runs/")): run for run in known}
    wanted = names.within(tenant, text.removeprefix("runs/"))
    return by_name[names.resolve(wanted, {name: run.uid for name, run in by_name.items()})]


# A click command that leaves its arguments to the config loader, which knows every key.


class RawCommand(click.Command):
    """A click command that gets all arguments unparsed, as the parameter `arguments`; the config loader parses them.

    Only `--help` is handled by click.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help if it is asked for.

        Otherwise keep all arguments as they are, because click would read `-1` as an option.
        """
        if "--help" in args or args == ["-h"]:
            return super().parse_args(ctx, ["--help"])
        ctx.params["arguments"] = tuple(args)
        return []

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the text after the command's name in its usage line."""
        return ["@ FILE [@ FILE ...]", "[--KEY VALUE ...]", "[OPTIONS]"]


OPTIONS_HELP = """\b
Options:
  --KEY VALUE     Any key of the config, such as --trainer.optim.lr 1e-5; --KEY @ FILE for a whole section.
  --server ADDR   Submit to this orchestrator (also: MILLRACE_SERVER) instead of starting a local stack.
  --name NAME     Name of the run; made up if left out.
  --resume        Go on with the run of that name; --ckpt.resume_step K begins a fork of it at step K.
  --label KEY=VALUE
                  A free label of the run; may be repeated.
  --dry-run       Print the resolved config and do nothing; with --set-only the keys that are set, without defaults.
  --check-environments
                  Load the environments first, on the orchestrator's env-servers or here; also with --dry-run.
  --plain         One line per step also on a terminal.
  --debug         Show tracebacks.
  --token-file, --tls-ca, --insecure
                  For protected servers; see `millrace --help`."""
