"""How commands reach a protected server: `--token-file`, `--tls-ca` and `--insecure`, which may stand anywhere.

They are the variables MILLRACE_TOKEN_FILE, MILLRACE_TLS_CA and MILLRACE_INSECURE for one command. A token itself is no
option: process lists show command lines.
"""

import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from millrace.cli.errors import CliError

if TYPE_CHECKING:
    from millrace.client import Client

T = TypeVar("T")

OPTIONS = {"--token-file": "MILLRACE_TOKEN_FILE", "--tls-ca": "MILLRACE_TLS_CA"}
HELP = """\b
Of a protected server (anywhere in the line):
  --token-file FILE   Bearer token (also: MILLRACE_TOKEN_FILE, MILLRACE_TOKEN).
  --tls-ca FILE       PEM certificates to trust, or `system`: calls with TLS (also: MILLRACE_TLS_CA).
  --insecure          Allow what is refused: tokens or servers in plain text beyond this machine."""

_given: dict[str, str] = {}


def take_options(arguments: Sequence[str]) -> list[str]:
    """Take these options out of a command line and remember them for this command; CliError if one is incomplete."""
    _given.clear()
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--token":
            raise CliError(
                "a token has no place in a command line: process lists show it",
                hint="write it to a file and give that with --token-file, or set MILLRACE_TOKEN",
            )
        if word == "--insecure":
            _given["MILLRACE_INSECURE"] = "1"
        elif name in OPTIONS:
            value = value if equals else next(words, "")
            if not value or value.startswith("--"):
                raise CliError(f"{name} needs a file")
            _given[OPTIONS[name]] = value
        else:
            rest.append(word)
    return rest


def environ(base: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """The environment (or `base`) with what this command line says."""
    return {**(os.environ if base is None else base), **_given}


def token_given() -> str:
    """Say, without the token, where that comes from which a server does not accept."""
    given = environ()
    if path := given.get("MILLRACE_TOKEN_FILE"):
        return f"it does not accept the one in {path}"
    return "it does not accept the one in MILLRACE_TOKEN" if given.get("MILLRACE_TOKEN") else "none was given"


def open_client(address: str) -> "Client":
    """A client of the server at `address`, as this command line and the environment say."""
    # gRPC writes one line of its own to stderr for every handshake that fails; ours says it better. Read at its import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from millrace.client import Client, ClientAccess

    return Client(address, access=ClientAccess.public_from_environ(environ()))


def ask_server(server: str | None, work: "Callable[[Client], Coroutine[Any, Any, T]]", *, run: str = "") -> T:
    """What the work answers, with a client of the orchestrator that `--server` or the environment names.

    Else of a stack that runs here: that of `run`, as the user calls it, where there are several.
    The first signal cancels the work; UnavailableError says where the address came from if nobody answers at it.
    """
    from millrace.cli import interrupts
    from millrace.cli.address import explain_unreachable, server_address

    address, origin = server_address(server, run=run)

    async def call(_: interrupts.Interrupts) -> T:
        async with open_client(address) as client:
            return await work(client)

    with explain_unreachable(origin, address, token=token_given()):
        return interrupts.run(call)
