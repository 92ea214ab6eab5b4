"""`millrace run fork`, `pause` and `resume`: a run from a step of another one, and a stop at a step boundary."""

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.connection import ask_server
from millrace.cli.errors import CliError
from millrace.cli.options import RUN, SERVER, RawCommand

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.config import RLConfig
    from millrace.v1 import run_pb2

_FLAGS: Mapping[str, bool] = {"step": True, "name": True, "server": True, "dry-run": False, "debug": False}
_EXAMPLE = "millrace run fork RUN --step K [--name NAME] [--KEY VALUE ...]"
_HELP = """\b
Options:
  --step K        First step of the new run: it begins with policy version K of RUN. Required.
  --name NAME     Name of the new run; made up if left out.
  --KEY VALUE     Any key of the config, on top of RUN's, such as --trainer.optim.lr 1e-5 or --max-steps 200.
  @ FILE          A config file, on top of RUN's config.
  --server ADDR   host:port of the orchestrator (also: MILLRACE_SERVER).
  --dry-run       Check the fork, print the config that the new run would have, and do nothing.
  --debug         Show tracebacks."""


class _ForkCommand(RawCommand):
    """A `RawCommand` whose usage line begins with a run and a step."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the text after the command's name in its usage line."""
        return ["RUN", "--step K", "[@ FILE ...]", "[--KEY VALUE ...]", "[OPTIONS]"]


@click.command(cls=_ForkCommand, epilog=_HELP)
def fork(arguments: tuple[str, ...]) -> int:
    """Start a new run from a step of another one.

    The new run copies the newest checkpoint of RUN at or before step K and the batches from there on, computes these
    again, and goes on from there; RUN itself is only read, whether it is running, paused or has ended. Settings of the
    trainer that change a step need a checkpoint at K itself.
    """
    from millrace.cli.session.prepare import check_new_name

    if not arguments or arguments[0].startswith(("--", "@")):
        raise CliError("name the run to fork", hint=_EXAMPLE)
    name, rest = arguments[0], arguments[1:]
    flags = _flags(rest)
    step = _step(flags.get("step"))
    if flags.get("name"):
        check_new_name(str(flags["name"]))
    server = None if flags.get("server") is None else str(flags["server"])
    click.echo(ask_server(server, lambda client: _fork(client, name, rest, step=step, flags=flags), run=name))
    return 0


async def _fork(
    client: "Client", name: str, rest: tuple[str, ...], *, step: int, flags: Mapping[str, str | bool]
) -> str:
    """Fork the run on the server, or with `--dry-run` only check it; return the text to print.

    `rest` are the arguments after the run's name, `flags` the command's own among them.
    """
    from millrace.cli.options import resolve

    parent = await resolve(client.runs, name)
    config = _config(parent, rest)
    run_id = flags.get("name")
    if flags.get("dry-run"):
        from millrace.cli.offline.ended import check_fork

        left = await check_fork(client, parent, config, step=step, name=str(run_id or ""))
        click.echo(f"dry run: nothing is made; left for the server to check: {left}", err=True)
        return json.dumps(json.loads(config.resolved_json()), indent=2)
    made = await client.runs.fork(
        parent.name, step=step, run_id=str(run_id) if run_id else "", config_json=config.resolved_json()
    )
    short = made.name.removeprefix("runs/")
    return f"{made.name} goes on from step {step} of {parent.name}; follow it: millrace run watch {short}"


def _config(parent: "run_pb2.Run", rest: tuple[str, ...]) -> "RLConfig":
    """Return the config of the new run: the parent's resolved config, with files and flags of the command line on top.

    Environment variables are not read.
    """
    from millrace.config import RLConfig
    from millrace.config.layers import Layer, Provenance, Strength
    from millrace.config.load import load

    document: dict[str, Any] = json.loads(parent.config_json)
    if isinstance(document.get("run"), dict):
        document["run"].pop("name", None)  # names are unique
    base = Layer(tree=document, origin=Provenance(label=f"config of {parent.name}", strength=Strength.ENVIRONMENT))
    return load(RLConfig, rest, {}, reserved=_FLAGS, base=base).config


def _flags(rest: tuple[str, ...]) -> Mapping[str, str | bool]:
    """Return the flags in `rest` that belong to this command, not to the config."""
    from millrace.config import RLConfig
    from millrace.config.argv import read_command_line
    from millrace.config.tree import schema_tree

    return read_command_line(rest, schema_tree(RLConfig), reserved=_FLAGS).flags


def _step(text: str | bool | None) -> int:
    """Return the value of `--step` as a number; raise CliError if it is missing or no number of at least 0."""
    if not isinstance(text, str):
        raise CliError("--step is missing: which step shall the new run begin with?", hint=_EXAMPLE)
    if not text.isdigit():
        raise CliError(f"--step must be a number, at least 0 (got {text!r})", hint=_EXAMPLE)
    return int(text)


# `millrace run pause` and `millrace run resume`: stop a run at a step boundary, and let it go on from its log.


@click.command()
@RUN
@click.option("--reason", default="", help="Why; shown with the run later.")
@SERVER
def pause(name: str, reason: str, server: str | None) -> None:
    """Ask a run to stop at a step boundary and give its workers back. Nothing of it is lost.

    What is being played may finish for 30 s; the rest is played again after `millrace run resume RUN`.
    """

    async def ask(client: "Client", found: "run_pb2.Run") -> str:
        """Ask for the pause, and return a text about it."""
        asked = await client.runs.pause(found.name, reason=reason)  # also of a paused run: a resume may be on its way
        if _state(found) == _state(asked) == "PAUSED":
            return f"{found.name} is already paused"
        return f"{asked.name} is asked to pause (now {_state(asked)})"

    _ask(name, server, ask)


@click.command()
@RUN
@click.option(
    "--retain-batches",
    type=click.IntRange(min=0),
    default=None,
    metavar="N",
    help="From here on as `orchestrator.retain_batches`: keep N newest steps; 0 keeps everything.",
)
@click.option(
    "--retain-policies",
    type=click.IntRange(min=0),
    default=None,
    metavar="N",
    help="From here on as `orchestrator.retain_policies`: keep N newest versions; 0 keeps everything.",
)
@SERVER
def resume(name: str, retain_batches: int | None, retain_policies: int | None, server: str | None) -> None:
    """Let a paused run go on where it stopped, as soon as a trainer is free.

    Also a run that has FAILED, once the cause is removed: it goes on at the step at which it failed, under the same
    name and uid, and keeps what it has learned. What was being played when it failed stays dropped. A run that
    SUCCEEDED or was CANCELLED has ended for good. A run that goes on keeps going on; it takes the options.
    """

    async def ask(client: "Client", found: "run_pb2.Run") -> str:
        """Ask the run to go on, and return a text about it."""
        asked = await client.runs.resume(
            found.name, retain_batches=retain_batches, retain_policies=retain_policies
        )  # also of one that runs: a pause may be on its way
        if _state(found) == _state(asked) not in ("PAUSED", "FAILED"):
            kept = "" if retain_batches is retain_policies is None else ", with what it is to keep"
            return f"{found.name} is not paused: it goes on{kept} (now {_state(asked)})"
        return f"{asked.name} is asked to go on (now {_state(asked)})"

    _ask(name, server, ask)


def _state(run: "run_pb2.Run") -> str:
    """Return the name of the run's state, such as `PAUSED`."""
    from millrace.runlog.run_status import state_name

    return state_name(run.state)


def _ask(name: str, server: str | None, ask: "Callable[[Client, run_pb2.Run], Coroutine[Any, Any, str]]") -> None:
    """Call `ask` with a client and the run `name`, and print its answer.

    Raise CliError if the run's own stack has ended.
    """
    from millrace.cli.offline.ended import ask_or_read, refuse
    from millrace.cli.options import resolve

    async def find_and_ask(client: "Client") -> None:
        click.echo(await ask(client, await resolve(client.runs, name)))

    ask_or_read(server, find_and_ask, refuse, run=name)
