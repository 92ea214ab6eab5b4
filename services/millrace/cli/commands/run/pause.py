"""`millrace run pause` and `millrace run resume`: stop a run at a step boundary, and let it go on from its log."""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import click

from millrace.cli.options import RUN, SERVER

if TYPE_CHECKING:
    from millrace.client import Client
    from millrace.v1 import run_pb2


@click.command()
@RUN
@click.option("--reason", default="", help="Why; shown with the run later.")
@SERVER
def pause(name: str, reason: str, server: str | None) -> None:
    """Ask a run to stop at a step boundary and to give its workers back; nothing of it is lost.

    What is being played may finish for 30 s; the rest is played again after `millrace run resume RUN`.
    """

    async def ask(client: "Client", found: "run_pb2.Run") -> str:
        asked = await client.runs.pause(found.name, reason=reason)  # also of a paused run: a resume may be on its way
        if _state(found) == _state(asked) == "PAUSED":
            return f"{found.name} is already paused"
        return f"{asked.name} is asked to pause (now {_state(asked)})"

    _ask(name, server, ask)


@click.command()
@RUN
@SERVER
def resume(name: str, server: str | None) -> None:
    """Let a paused run go on where it stopped, as soon as a trainer is free.

    Also a run that has FAILED, once the cause is removed: it goes on at the step at which it failed, under the same
    name and uid, and keeps what it has learned. What was being played when it failed stays dropped. A run that
    SUCCEEDED or was CANCELLED has ended for good.
    """

    async def ask(client: "Client", found: "run_pb2.Run") -> str:
        asked = await client.runs.resume(found.name)  # also of one that runs: a pause may be on its way
        if _state(found) == _state(asked) not in ("PAUSED", "FAILED"):
            return f"{found.name} is not paused: it goes on (now {_state(asked)})"
        return f"{asked.name} is asked to go on (now {_state(asked)})"

    _ask(name, server, ask)


def _state(run: "run_pb2.Run") -> str:
    from millrace.runlog.events.run_status import state_name

    return state_name(run.state)


def _ask(name: str, server: str | None, ask: "Callable[[Client, run_pb2.Run], Coroutine[Any, Any, str]]") -> None:
    from millrace.cli.names import resolve
    from millrace.cli.offline.ended import ask_or_read, refuse

    async def find_and_ask(client: "Client") -> None:
        click.echo(await ask(client, await resolve(client.runs, name)))

    ask_or_read(server, find_and_ask, refuse, run=name)
