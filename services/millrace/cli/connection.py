"""Find the server that a command talks to, and connect to it: its address, the stacks on this machine, and the options
of protected servers.

`--token-file`, `--tls-ca` and `--insecure` set MILLRACE_TOKEN_FILE, MILLRACE_TLS_CA and MILLRACE_INSECURE for one
command. There is no option for the token itself, because process lists show command lines.
"""

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from millrace.cli.errors import CliError
from millrace.cli.options import DEFAULT_LISTEN
from millrace.custom_code import environment_module
from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, UnauthenticatedError, UnavailableError, Violation
from millrace.rpc.reach import is_wildcard, own_host
from millrace.telemetry.settings import Settings, parse_address

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.config import RLConfig

T = TypeVar("T")

OPTIONS = {"--token-file": "MILLRACE_TOKEN_FILE", "--tls-ca": "MILLRACE_TLS_CA"}
HELP = """\b
Of a protected server (anywhere in the line):
  --token-file FILE   Bearer token (also: MILLRACE_TOKEN_FILE, MILLRACE_TOKEN).
  --tls-ca FILE       PEM certificates to trust, or `system`: calls with TLS (also: MILLRACE_TLS_CA).
  --insecure          Allow what is refused: tokens or servers in plain text beyond this machine."""

_given: dict[str, str] = {}


def take_options(arguments: Sequence[str]) -> list[str]:
    """Remember the options `--token-file`, `--tls-ca` and `--insecure` for this command, and return the other
    arguments.

    What an earlier call remembered is forgotten. Raises CliError if an option has no value, or for `--token`.
    """
    # A process may run several commands, as the tests do.
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
    """Return a copy of `base` (the process's environment by default) with the variables that `take_options`
    remembered.
    """
    return {**(os.environ if base is None else base), **_given}


def token_given() -> str:
    """Return a phrase for an error message: which source the refused token came from. The token itself is not in it."""
    given = environ()
    if path := given.get("MILLRACE_TOKEN_FILE"):
        return f"it does not accept the one in {path}"
    return "it does not accept the one in MILLRACE_TOKEN" if given.get("MILLRACE_TOKEN") else "none was given"


def open_client(address: str) -> "Client":
    """Return a client of the server at `address`, with token and TLS from the environment and the remembered
    options.
    """
    # gRPC writes one line of its own to stderr for every handshake that fails; ours says it better. Read at its import.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from millrace.client import Client, ClientAccess

    return Client(address, access=ClientAccess.public_from_environ(environ()))


def ask_server(server: str | None, work: "Callable[[Client], Coroutine[Any, Any, T]]", *, run: str = "") -> T:
    """Call `work` with a client of the orchestrator, and return its result.

    `server` is the value of `--server`. Without it the address comes from MILLRACE_SERVER, a stack that runs here (that
    of the run named `run`, if any) or the default. The first signal cancels the work; UnavailableError mentions where
    the address came from.
    """
    from millrace.cli import interrupts

    address, origin = server_address(server, run=run)

    async def call(_: interrupts.Interrupts) -> T:
        async with open_client(address) as client:
            return await work(client)

    with explain_unreachable(origin, address, token=token_given()):
        return interrupts.run(call)


# Which orchestrator a command talks to, and what to say when nobody is there.

CONNECT_TIMEOUT_S = 1.0
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine in an address."""
START_REMEDY = "start a stack with `millrace up`, or name another server with --server or MILLRACE_SERVER"
WAIT_REMEDY = "; or wait: a stack restarts what died"
SILENT_REMEDY = "it listens but does not answer; a stack kills and restarts what is silent for 30 s; try again"


def check_address(text: str, *, option: str) -> str:
    """Return `text` if it is host:port; raise InvalidSpecError, with the option `option` as the field, if it is not."""
    try:
        parse_address(text)
    except ValueError as error:
        violation = Violation(field=option, value=text, message=str(error), source="command line")
        raise InvalidSpecError([violation]) from None
    return text


# The stacks that run on this machine, as the `stack.json` in the directory of each says.
#
# A file is believed as long as the supervisor that wrote it lives: its process id and its start time are compared,
# because another process may get the id later.

OUTPUTS = Path("outputs")
"""Below it the stacks that were started in this directory work, unless `output_dir` or `--dir` says otherwise."""
_PATTERNS = ("*/stack.json", "*/*/stack.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStack:
    """A stack whose supervisor process is alive."""

    directory: Path
    address: str
    """host:port of its orchestrator."""
    says: Mapping[str, Any]
    """The contents of its `stack.json`."""

    @property
    def is_shared(self) -> bool:
        """Return whether the stack serves any number of runs, as that of `millrace up`.

        A stack of `millrace rl` ends with its run.
        """
        return self.says.get("is_durable") is True

    def text(self, name: str) -> str | None:
        """Return the text under `name` in `stack.json`; None if there is none."""
        found = self.says.get(name)
        return found if isinstance(found, str) else None


def read_stack(directory: Path) -> RunningStack | None:
    """Return the stack that runs in `directory`.

    None if there is no readable `stack.json` there, or its supervisor has ended.
    """
    path = directory / "stack.json"
    try:
        says = decode_object(path.read_bytes(), what=str(path), reason="STACK_FILE_CORRUPT")
    except (CorruptObjectError, OSError):  # none, or being written
        return None
    address, pid, ticks = says.get("address"), says.get("pid"), says.get("start_ticks")
    if not (isinstance(address, str) and isinstance(pid, int) and isinstance(ticks, int)):
        return None
    return RunningStack(directory=directory, address=address, says=says) if _is_alive(pid, ticks) else None


def running_stacks(root: Path = OUTPUTS) -> list[RunningStack]:
    """Return the running stacks in directories below `root`, sorted by directory."""
    paths = sorted({path for pattern in _PATTERNS for path in root.glob(pattern)})
    return [stack for path in paths if (stack := read_stack(path.parent)) is not None]


def choose_stack(run: str = "", *, root: Path = OUTPUTS, option: str = "--server") -> RunningStack | None:
    """Choose a stack for a command that names no server; None if no stack runs below `root`.

    The first choice is the stack of the run `run`, whose directory has the run's name or begins with `run`. Then comes
    the only running stack, then, for a run that is named, the only shared one. Raises CliError with the list if the
    choice is not unique; `option` is the option that its hint mentions.
    """
    found = running_stacks(root)
    name = run.removeprefix("runs/")
    named = [stack for stack in found if name and stack.directory.name == name]
    named = named or [stack for stack in found if name and stack.directory.name.startswith(name)]
    # Without a name, and for the newest run, the run of any stack may be meant.
    shared = [stack for stack in found if stack.is_shared] if name not in ("", "-") else []
    for meant in (named, found, shared):
        if len(meant) == 1:
            return meant[0]
    if not found:
        return None
    lines = "\n".join(f"  - {stack.address:<21} {_describe(stack)}" for stack in found)
    first = found[0]
    hint = (
        f"--dir {first.directory}" if option == "--dir" else f"--server {first.address}, or set MILLRACE_SERVER to it"
    )
    raise CliError(
        f"{len(found)} stacks run here, and it is not said which is meant:\n{lines}", hint=f"name one, such as {hint}"
    )


def shared_address(root: Path = OUTPUTS) -> str:
    """Return the address to submit a run to if none is given: that of the only shared stack here, otherwise the default
    of `millrace up`.
    """
    shared = [stack for stack in running_stacks(root) if stack.is_shared]
    return shared[0].address if len(shared) == 1 else DEFAULT_LISTEN


def say_environments_beside(config: "RLConfig", stack: RunningStack | None, *, server: str) -> None:
    """Print a note for each environment of the config whose file is in the current directory and may not be found.

    The stack at `server` searches in another directory. `stack` is None if it is not one of this machine.
    """
    evaluation = config.orchestrator.eval
    ids = [env.id for env in (*config.orchestrator.env, *(evaluation.env if evaluation else ()))]
    looks_in = _looks_in(stack)
    if looks_in is not None and Path(looks_in[0]) == Path.cwd():
        return
    for name in dict.fromkeys(map(environment_module, ids)):
        found = next((path for path in (Path(f"{name}.py"), Path(name) / "__init__.py") if path.is_file()), None)
        is_installed = not name.isidentifier() or importlib.util.find_spec(name) is not None
        if found is None or is_installed:
            continue
        where = (
            "looks where its env-servers run"
            if looks_in is None
            else f"looks in {looks_in[0]} and its venv {looks_in[1]}"
        )
        print(
            f"note: ./{found} is here, and the stack at {server} {where}: start the stack here, put the file there, "
            "or train without it (unset MILLRACE_SERVER, no --server)",
            file=sys.stderr,
        )


def _describe(stack: RunningStack) -> str:
    """Return directory, origin and process id of a stack, for a list of stacks."""
    made_by = "millrace up" if stack.is_shared else f"of {stack.directory.name} alone"
    return f"{stack.directory} ({made_by}, pid {stack.says['pid']})"


def _is_alive(pid: int, ticks: int) -> bool:
    """Return whether process `pid` is running and started at `ticks`, clock ticks after the boot.

    False without psutil: then only the client is installed, and this installation started no stack.
    """
    try:
        from millrace.processes import table
    except ModuleNotFoundError:
        return False
    try:
        return table.is_running(pid) and table.start_ticks(pid) == ticks
    except (OverflowError, ValueError):  # no number of a process
        return False


def _looks_in(stack: RunningStack | None) -> list[str] | None:
    """Return the directory and the venv in which a stack searches environments, as a list of two.

    None if `stack` is None, or if its `stack.json` does not name them.
    """
    found = stack.says.get("looks_in") if stack is not None else None
    is_pair = isinstance(found, list) and len(found) == 2 and all(isinstance(each, str) for each in found)
    return found if is_pair else None


def server_address(
    option: str | None, *, run: str = "", environ: Mapping[str, str] = os.environ, root: Path = OUTPUTS
) -> tuple[str, str]:
    """Return the orchestrator's host:port, and a description of where it comes from.

    The sources, in order: `option` (the value of `--server`), MILLRACE_SERVER, a stack below `root` (`choose_stack`
    with `run`), the default of `millrace up`. Raises CliError if several stacks run here and none can be chosen.
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
    """Add to errors of the block where the address came from (`origin`) and what to do.

    These are UnavailableError if no server answers at `address`, and UnauthenticatedError; `token` is a phrase about
    the refused token. If the address is that of a running stack, in `directory` or in any directory below `outputs`,
    the remedy also says to wait: the stack restarts what died.
    """
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
    """Return whether something accepts connections at `address`.

    A frozen process counts too, because the kernel accepts for it.
    """
    host, port = parse_address(address)
    try:
        with socket.create_connection((own_host(host), port), timeout=CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def stack_at(address: str, directory: Path | None = None) -> RunningStack | None:
    """Return the running stack that listens at `address`; None if there is none.

    Only `directory` is searched if it is given, otherwise all stacks below `outputs`.
    """
    found = running_stacks() if directory is None else [read_stack(directory)]
    return next((stack for stack in found if stack and _place(stack.address) == _place(address)), None)


def _place(address: str) -> tuple[str, int] | None:
    """Return host and port, with one host name for all names of this machine; None if `address` is not valid."""
    try:
        host, port = parse_address(address)
    except ValueError:
        return None
    return ("127.0.0.1" if host in LOOPBACK or is_wildcard(host) else host), port
